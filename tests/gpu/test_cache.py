"""Appending to caches on CUDA: every layout, positions and pages that are not there, replay in a graph."""

from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from tests.gpu.common import GPU, to_device
from tests.ops.common import assert_same_bits, i32, normal


def appended(op: Any, device: str, call: dict[str, Any]) -> list[np.ndarray]:
    """The caches after a call on fresh copies."""
    made = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in call.items()}
    if device == "cuda":
        made = {name: to_device(value) for name, value in made.items()}
    with penstock.backend(device):
        op(**made)
    return [made[name].cpu().numpy() if device == "cuda" else made[name] for name in op.writes]


def check(op: Any, **call: Any) -> None:
    for got, want in zip(appended(op, "cuda", call), appended(op, "reference", call), strict=True):
        assert_same_bits("cache", got, want)


def kv(rng: Any, T: int, wide: tuple[int, int] = (24, 13)) -> dict[str, Any]:
    return {"k_src": normal(rng, T, wide[0]), "v_src": normal(rng, T, wide[1])}


@pytest.mark.parametrize("T", [1, 70, 4000] if GPU else [1, 70])
@pytest.mark.parametrize("start", [3, np.array(3, np.int32)], ids=["int", "array"])
def test_kv_cache_append_in_one_sequence(T, start, rng):
    caches = {"k_cache": normal(rng, T + 5, 24), "v_cache": normal(rng, T + 5, 13)}
    check(ops.kv_cache_append, **kv(rng, T), **caches, kv_start=start)


@pytest.mark.parametrize("B", [3, 65])
def test_kv_cache_append_into_slots(B, rng):
    caches = {"k_cache": normal(rng, B + 2, 5, 24), "v_cache": normal(rng, B + 2, 5, 13)}
    where = {"kv_start": rng.integers(0, 5, B).astype(np.int32), "slots": rng.permutation(B + 2)[:B].astype(np.int32)}
    check(ops.kv_cache_append, **kv(rng, B), **caches, **where)


@pytest.mark.parametrize("T", [1, 70, 3000] if GPU else [1, 70])
@pytest.mark.parametrize("start", [5, np.array(5, np.int32)], ids=["int", "array"])
def test_kv_pages_append_over_pages(T, start, rng):
    n = (T + 5) // 8 + 1
    pages = {"k_pages": normal(rng, n + 3, 8, 24), "v_pages": normal(rng, n + 3, 8, 13)}
    table = rng.permutation(n + 3)[:n].astype(np.int32)
    check(ops.kv_pages_append, **kv(rng, T), **pages, block_table=table, positions=start)


@pytest.mark.parametrize("layout", ["contiguous", "slots", "sequence", "batch"])
def test_mla_cache_append_in_every_layout(layout, rng):
    B = 3
    lead = (9,) if layout == "contiguous" else (B + 3, 4)
    caches = {"latent_cache": normal(rng, *lead, 600), "rope_k_cache": normal(rng, *lead, 64)}
    where: dict[str, Any] = {"pos": i32(3, 0, 2)}
    if layout == "slots":
        where["slots"] = i32(5, 0, 2)
    elif layout == "batch":
        where |= {"pos": i32(7, 0, 2), "block_table": i32([5, 1], [0, -1], [4, -1])}
    else:
        where["pos"] = 2
        if layout == "sequence":
            where["block_table"] = i32(4, 1)
    sources = {"kv_lat": normal(rng, B, 600), "k_pe": normal(rng, B, 64)}
    check(ops.mla_cache_append, **sources, **caches, **where)


def test_appends_write_nothing_outside_of_the_cache(rng):
    """An inactive row has position, slot or page −1; what is too large is as absent. One row of each call is there."""
    src = kv(rng, 4)
    slots = {"k_cache": normal(rng, 3, 5, 24), "v_cache": normal(rng, 3, 5, 13)}
    pages = {"k_pages": slots["k_cache"], "v_pages": slots["v_cache"]}
    line = {"k_cache": normal(rng, 5, 24), "v_cache": normal(rng, 5, 13)}
    calls = [
        (ops.kv_cache_append, slots, {"slots": i32(-1, 3, 1, 0), "kv_start": i32(0, 0, 4, -1)}, (2, (1, 4))),
        (ops.kv_cache_append, slots, {"slots": i32(2, 2, 2, 1), "kv_start": i32(5, -7, 2**31 - 1, 0)}, (3, (1, 0))),
        (ops.kv_cache_append, line, {"kv_start": np.array(4, np.int32)}, (0, (4,))),
        (ops.kv_cache_append, line, {"kv_start": np.array(-3, np.int32)}, (3, (0,))),
        (
            ops.kv_pages_append,
            pages,
            {"block_table": i32([0, 1], [-1, 2], [3, 0], [1, 2]), "positions": i32(10, 4, 2, 6)},
            (3, (2, 1)),
        ),
        (ops.kv_pages_append, pages, {"block_table": i32(-1, 1), "positions": np.array(9, np.int32)}, (0, (1, 4))),
    ]
    for op, caches, where, (row, place) in calls:
        got = appended(op, "cuda", {**src, **caches, **where})
        for cache, after, rows in zip(caches.values(), got, src.values(), strict=True):
            want = cache.copy()
            want[place] = rows[row]
            assert_same_bits(op.name, after, want)


@pytest.mark.cuda
def test_kv_pages_append_replays_in_a_graph_at_other_positions(rng):
    src = {name: to_device(value) for name, value in kv(rng, 2).items()}
    pages = {"k_pages": torch.zeros(9, 4, 24, device="cuda"), "v_pages": torch.zeros(9, 4, 13, device="cuda")}
    table, positions = to_device(i32([0, 1, 2], [3, 4, 5])), to_device(i32(0, 0))
    call = {**src, **pages, "block_table": table, "positions": positions}
    ops.kv_pages_append(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.kv_pages_append(**call)
    positions.copy_(to_device(i32(9, -1)))
    pages["k_pages"].zero_()
    graph.replay()
    assert torch.equal(pages["k_pages"][2, 1], src["k_src"][0])
    assert int(pages["k_pages"].any(dim=-1).sum()) == 1
