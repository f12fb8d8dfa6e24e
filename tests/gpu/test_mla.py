"""CUDA latent attention: products with weights of any bits, absorbed and expanded attention, tiles."""

from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.dtypes import round_to
from tests.gpu.common import reference, run, to_device, to_host
from tests.gpu.test_attention import assert_near, close
from tests.ops.common import EPS, assert_close, assert_same_bits, i32, normal, quantized


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mla_products_of_any_bits(bits, rng):
    whole = quantized(rng, 2 * 20, 64, bits=bits)  # two heads: 12 rows of keys, 8 of values
    embed, unembed = quantized(rng, 2, 40, 32, bits=bits), quantized(rng, 2, 9, 64, bits=bits)
    nope, latent = normal(rng, 3, 2, 12), normal(rng, 3, 2, 64)
    for op, call in (
        (ops.mla_q_prime, {"q_nope": nope, "kv_b": whole}),
        (ops.mla_q_prime, {"q_nope": normal(rng, 3, 2, 32), "kv_b": embed}),
        (ops.mla_out_per_head, {"v_combine": latent, "kv_b": whole, "nope": 12}),
        (ops.mla_out_per_head, {"v_combine": latent, "kv_b": unembed}),
    ):
        close(run(op, **call), reference(op, **call))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_mla_products_of_few_tokens_over_several_blocks(dtype, rng):
    """More rows, columns and outputs than a program takes at once, none a multiple of that."""
    whole = quantized(rng, 2 * 57, 288)
    keys = {"q_nope": normal(rng, 2, 2, 37, dtype=dtype), "kv_b": whole}
    values = {"v_combine": normal(rng, 2, 2, 288, dtype=dtype), "kv_b": whole, "nope": 37}
    for op, call in ((ops.mla_q_prime, keys), (ops.mla_out_per_head, values)):
        close(run(op, **call), reference(op, **call), dtype)


@pytest.mark.parametrize(("T", "K", "dtype"), [(1, 40, "bfloat16"), (3, 17, "float16"), (4, 128, "bfloat16")])
def test_mla_q_prime_of_codes_that_stay_where_they_are_loaded(T, K, dtype, rng):
    whole = quantized(rng, 2 * (K + 3), 128, group_size=64)
    call = {"q_nope": normal(rng, T, 2, K, dtype=dtype), "kv_b": whole}
    want = reference(ops.mla_q_prime, **call)
    assert_close("y", run(ops.mla_q_prime, **call), want, 2 * EPS[dtype], np.abs(want.astype(np.float64)) + 0.1)


def test_mla_prepare_skips_rows_and_pages_that_are_not_there(rng):
    T, H, nope, rope, R = 4, 3, 5, 6, 9
    pages = {"latent_pages": normal(rng, 4, 4, R), "rope_pages": normal(rng, 4, 4, rope)}
    call = {"q": normal(rng, T, H * (nope + rope)), "kv": normal(rng, T, R + rope), "kv_norm": normal(rng, R)}
    call |= {"inv_freq": ops.rope_inv_freq(rope, 1e4), "H": H, "nope": nope}
    held = {name: to_device(page.copy()) for name, page in pages.items()}
    where = {"positions": i32(-1, 6, 8, 2), "block_table": i32([0, 1], [3, 2], [0, 1], [9, 1])}
    with penstock.backend("cuda"):
        got = to_host(ops.mla_prepare(**{n: to_device(v) for n, v in (call | where).items()}, **held))
    room = {"positions": i32(0, 6, 8, 2), "block_table": np.arange(12, dtype=np.int32).reshape(4, 3)}
    room |= {"latent_pages": np.zeros((12, 4, R), "f4"), "rope_pages": np.zeros((12, 4, rope), "f4")}
    with penstock.backend("reference"):
        want = ops.mla_prepare(**call, **room)
    assert_same_bits("q_nope", got[0], want[0])
    assert not got[1][0].any()
    assert_close("q_pe", got[1][1:], want[1][1:], 2e-6)
    for name in pages:  # row 1 at position 6 is the only one that has a place
        pages[name][2, 2] = room[name][4, 2]
        assert_close(name, to_host(held[name]), pages[name], 2e-6)


def test_mla_products_of_many_tokens_are_those_of_one(rng):
    whole, x = to_device(quantized(rng, 2 * 48, 64)), to_device(normal(rng, 19, 2, 32, dtype="bfloat16"))
    with penstock.backend("cuda", deterministic=True):
        together = ops.mla_q_prime(x, whole)
        for t in (0, 7, 18):
            assert_same_bits("y", to_host(ops.mla_q_prime(x[t : t + 1].clone(), whole)), to_host(together[t : t + 1]))
    want = reference(ops.mla_q_prime, q_nope=to_host(x), kv_b=whole.to("cpu"))
    close(to_host(together), want, "bfloat16")


@pytest.mark.parametrize("form", ["whole", "pair", "dense"])
def test_mla_products_of_hundreds_of_tokens(form, rng):
    key = quantized(rng, 2, 64, 32) if form == "pair" else quantized(rng, 2 * 40, 64)  # two heads of 32 + 8
    if form == "dense":
        key = penstock.dequantize(key)
    value = quantized(rng, 2, 8, 64) if form == "pair" else None
    call = {"latent": normal(rng, 300, 64), "kv_b": key}
    call |= {"unembed_out": value} if form == "pair" else {"heads": 2, "nope": 32}
    for y, want in zip(run(ops.mla_expand, **call), reference(ops.mla_expand, **call), strict=True):
        close(y, want)
    call = {"q_nope": normal(rng, 300, 2, 32), "kv_b": key}
    close(run(ops.mla_q_prime, **call), reference(ops.mla_q_prime, **call))
    call = {"v_combine": normal(rng, 300, 2, 64), "kv_b": key if value is None else value}
    call |= {} if form == "pair" else {"nope": 32}
    close(run(ops.mla_out_per_head, **call), reference(ops.mla_out_per_head, **call))


def latents(rng, *lead, R=40, rope=12) -> dict[str, Any]:
    return {"latent_cache": normal(rng, *lead, R), "rope_k_cache": normal(rng, *lead, rope)}


def test_mla_sdpa_of_lengths_slots_and_pages_out_of_range(rng):
    q: dict[str, Any] = {"q_prime": normal(rng, 3, 5, 40), "q_pe": normal(rng, 3, 5, 12), "softmax_scale": 0.2}
    caches = latents(rng, 4, 16)
    want = reference(ops.mla_sdpa, **q, **caches, cache_len=i32(16, 9, 0), slots=i32(1, 2, 0))
    y = run(ops.mla_sdpa, **q, **caches, cache_len=i32(99, 9, 7), slots=i32(1, 2, -1))
    close(y, want)
    table = i32(1, -1, 4, 2, 3, 0).reshape(3, 2)
    y = run(ops.mla_sdpa, **q, **caches, cache_len=i32(16, 32, -3), block_table=table)
    close(y[0], want[0])
    assert not y[2].any()
    assert np.isfinite(y[1]).all()


@pytest.mark.parametrize("T", [1, 3])
def test_mla_sdpa_takes_its_length_from_an_array(T, rng):
    q: dict[str, Any] = {"q_prime": normal(rng, T, 20, 40), "q_pe": normal(rng, T, 20, 12), "softmax_scale": 0.2}
    caches, table = latents(rng, 5, 8), i32(3, 1, 4)
    caches["latent_cache"][[0, 2]] = np.nan
    want = reference(ops.mla_sdpa, **q, **caches, cache_len=21, block_table=table)
    close(run(ops.mla_sdpa, **q, **caches, cache_len=np.array(21, np.int32), block_table=table), want)


@pytest.mark.parametrize("start", [17, np.array(17, np.int32)], ids=["int", "array"])
def test_mla_prefill_reads_pages_up_to_its_end(start, rng):
    caches = latents(rng, 6, 8, R=64, rope=6)
    caches["latent_cache"][5] = caches["rope_k_cache"][5] = np.nan  # the last page of the table: behind the end
    call = {"q_nope": normal(rng, 7, 2, 20), "q_pe": normal(rng, 7, 2, 6), **caches, "softmax_scale": 0.2}
    call |= {"kv_b": quantized(rng, 2 * 32, 64), "block_table": i32(2, 0, 4, 5)}
    close(run(ops.mla_prefill, start=start, **call), reference(ops.mla_prefill, start=17, **call))


def test_mla_sdpa_in_tiles_equals_one_shot(rng):
    q = {"q_prime": normal(rng, 3, 40, dtype="bfloat16"), "q_pe": normal(rng, 3, 12, dtype="bfloat16")}
    rows = {"latent_cache": normal(rng, 90, 40), "rope_k_cache": normal(rng, 90, 12)}
    caches = {name: round_to(value, "bfloat16") for name, value in rows.items()}
    state = [to_device(np.full(shape, np.nan, np.float32)) for shape in (3, 3, (3, 40))]
    given = {name: to_device(value) for name, value in (q | caches).items()}
    with penstock.backend("cuda"):
        for number, (low, high) in enumerate([(0, 0), (0, 37), (37, 37), (37, 38), (38, 90)]):
            ops.mla_sdpa_tile_accumulate(
                *state, **given, tile_start=low, tile_end=high, softmax_scale=0.2, first=number == 0
            )
        y = to_host(ops.mla_sdpa_finalize(*state[1:]))
    exact = {name: value.astype(np.float32) for name, value in (q | caches).items()}
    assert_close("y", y, reference(ops.mla_sdpa, **exact, cache_len=90, softmax_scale=0.2), 4e-6)


# -- on a GPU: DeepSeek-V3 has 128 heads of 128 + 64, latents of 512 -------------------------------------------------


def absorbed(q, pe, latent, rope_k, start, scale):
    """q [T, H, R] at start … over latents [n, R], in float64."""
    at, p = start + torch.arange(len(q), device="cuda")[:, None], torch.arange(len(latent), device="cuda")
    scores = torch.einsum("thr,pr->htp", q.double(), latent.double())
    scores += torch.einsum("thr,pr->htp", pe.double(), rope_k.double())
    weights = (scores * scale).masked_fill(p > at, -torch.inf).softmax(-1)
    return torch.einsum("htp,pr->thr", weights, latent.double())


def random_latents(n, dtype):
    pages = -(-n // 256)
    latent, rope_k = (torch.randn(pages, 256, width, device="cuda", dtype=dtype) for width in (512, 64))
    table = torch.randperm(pages, device="cuda").int()
    rows = latent[table.long()].view(pages * 256, -1)[:n], rope_k[table.long()].view(pages * 256, -1)[:n]
    return latent, rope_k, table, rows


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [1, 127, 128, 129, 4095, 4096, 4097, 8192, 10_000])
def test_mla_sdpa_of_any_length(n, dtype):
    latent, rope_k, table, rows = random_latents(n, dtype)
    q, pe = (torch.randn(1, 128, width, device="cuda", dtype=dtype) for width in (512, 64))
    length = torch.tensor([n], dtype=torch.int32, device="cuda")
    want = absorbed(q, pe, *rows, n - 1, 0.07)
    assert_near(ops.mla_sdpa(q, pe, latent, rope_k, length, 0.07, block_table=table[None].contiguous()), want, dtype)
    assert_near(ops.mla_sdpa(q[0], pe[0], *(x.contiguous() for x in rows), n, 0.07), want[0], dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mla_prefill_is_the_absorbed_attention_at_model_shape(dtype):
    n, T, H = 1500, 300, 128
    latent, rope_k, table, rows = random_latents(n, dtype)
    q_nope, q_pe = (torch.randn(T, H, width, device="cuda", dtype=dtype) for width in (128, 64))
    kv_b = torch.randn(H, 256, 512, device="cuda", dtype=torch.float32) * 0.04
    want = absorbed(torch.einsum("thi,hic->thc", q_nope.double(), kv_b[:, :128].double()), q_pe, *rows, n - T, 0.07)
    want = torch.einsum("thc,hfc->thf", want, kv_b[:, 128:].double())
    y = ops.mla_prefill(q_nope, q_pe, latent, rope_k, n - T, 0.07, kv_b.view(-1, 512).to(dtype), block_table=table)
    error = float((y.double() - want).norm() / want.norm())
    assert error < (4e-6 if dtype == torch.float32 else 2e-2), error
    q = ops.mla_q_prime(q_nope, kv_b.view(-1, 512).to(dtype))
    z = ops.mla_sdpa(q, q_pe, latent, rope_k, n, 0.07, block_table=table)
    z = ops.mla_out_per_head(z, kv_b.view(-1, 512).to(dtype), nope=128)
    error = float((z.double() - want).norm() / want.norm())
    assert error < (4e-6 if dtype == torch.float32 else 2e-2), error
