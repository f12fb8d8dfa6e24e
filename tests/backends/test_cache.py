"""The copies into caches and out of rows, bit for bit: NaN with their payload, every layout, few rows and many."""

import copy

import numpy as np
import pytest

from penstock import ops
from penstock.dtypes import numpy_dtype
from tests.backends.test_attention import check_uncompiled, with_threads
from tests.ops.common import DTYPES, assert_same_bits, run_on


def bits(rng, *shape, dtype="float32"):
    """Any bits at all."""
    size = {"float32": 4}.get(dtype, 2)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8).view(numpy_dtype(dtype))


def check(op, **arguments):
    want = copy.deepcopy(arguments)
    run_on("reference", op, **want)
    run_on("cpu", op, **arguments)
    for name in op.writes:
        assert_same_bits(name, arguments[name], want[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 33, 700])
def test_append_to_every_layout(dtype, rows, rng):
    k, v = bits(rng, rows, 6, dtype=dtype), bits(rng, rows, 3, 5, dtype=dtype)
    room = rows + 9
    for start in (0, 9, np.array(4, np.int32)):
        caches = {"k_cache": bits(rng, room, 6, dtype=dtype), "v_cache": bits(rng, room, 15, dtype=dtype)}
        check(ops.kv_cache_append, k_src=k, v_src=v, **caches, kv_start=start)
    slots, where = rng.permutation(rows + 2)[:rows].astype(np.int32), rng.integers(0, 7, rows).astype(np.int32)
    caches = {"k_cache": bits(rng, rows + 2, 7, 6, dtype=dtype), "v_cache": bits(rng, rows + 2, 7, 3, 5, dtype=dtype)}
    check(ops.kv_cache_append, k_src=k, v_src=v, **caches, kv_start=where, slots=slots)
    pages = {"k_pages": bits(rng, rows + 2, 7, 6, dtype=dtype), "v_pages": bits(rng, rows + 2, 7, 15, dtype=dtype)}
    table = rng.permutation(rows + 2).astype(np.int32)
    for start in (3, np.array(13, np.int32)):
        check(ops.kv_pages_append, k_src=k, v_src=v, **copy.deepcopy(pages), block_table=table, positions=start)
    tables = rng.permutation(rows + 2)[:rows, None].astype(np.int32)
    check(ops.kv_pages_append, k_src=k, v_src=v, **pages, block_table=tables, positions=where)


@pytest.mark.parametrize("dtype", DTYPES)
def test_append_latents(dtype, rng):
    caches = {"latent_cache": bits(rng, 4, 8, 9, dtype=dtype), "rope_k_cache": bits(rng, 4, 8, 3, dtype=dtype)}
    rows = {"kv_lat": bits(rng, 2, 9, dtype=dtype), "k_pe": bits(rng, 2, 3, dtype=dtype)}
    pos, slots = np.array([7, 0], np.int32), np.array([3, 1], np.int32)
    check(ops.mla_cache_append, **rows, **copy.deepcopy(caches), pos=pos, slots=slots)
    check(ops.mla_cache_append, **rows, **copy.deepcopy(caches), pos=15, block_table=np.array([3, 0, 1], np.int32))
    one = {name: row[0] for name, row in rows.items()}
    check(ops.mla_cache_append, **one, **caches, pos=15, block_table=np.array([3, 0, 1], np.int32))
    flat = {name: cache[0].copy() for name, cache in caches.items()}
    check(ops.mla_cache_append, **one, **flat, pos=7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 5, 3000])
def test_rows_are_cut_in_two(dtype, T, rng):
    q_proj = bits(rng, T, 3, 34, dtype=dtype)
    full, kv = bits(rng, T, 3, 29, dtype=dtype), bits(rng, T, 17, dtype=dtype)
    for count in (1, 2):
        got = with_threads(count, lambda: run_on("cpu", ops.split_q_gate, q_proj))
        for a, b in zip(got, run_on("reference", ops.split_q_gate, q_proj), strict=True):
            assert_same_bits("q and gate", a, b)
        got = with_threads(count, lambda: run_on("cpu", ops.mla_split_q_kv, full, kv, 20))
        for a, b in zip(got, run_on("reference", ops.mla_split_q_kv, full, kv, 20), strict=True):
            assert_same_bits("q_nope, q_pe, kv_lat, k_pe", a, b)


def test_kernels_run_uncompiled():
    check_uncompiled("cache")
