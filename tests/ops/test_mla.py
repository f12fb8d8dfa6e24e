"""Latent attention: absorbed against expanded (torch, MLX), in tiles against one shot, and in every cache layout."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock import ops
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.ops import (
    attention_prefill,
    mla_cache_append,
    mla_expand,
    mla_out_per_head,
    mla_q_prime,
    mla_sdpa,
    mla_sdpa_finalize,
    mla_sdpa_tile_accumulate,
    mla_split_q_kv,
)
from penstock.quant import QuantizedTensor, dequantize
from tests.ops.common import (
    DTYPES,
    EPS,
    assert_close,
    assert_refused,
    assert_same_bits,
    i32,
    normal,
    quantized,
    run_on,
    zeros,
)


@pytest.fixture(autouse=True, scope="module")
def definition() -> Iterator[None]:
    with penstock.backend("reference"):
        yield


H, NOPE, ROPE, VD, R = 3, 32, 4, 5, 64
P = NOPE + VD


def assert_rounded(got: np.ndarray, want: np.ndarray, dtype: str = "float32", roundings: int = 1) -> None:
    assert_close("y", got, want, roundings * EPS[dtype], np.abs(want.astype(np.float64)) + 1e-4)


def pair(kv_b: np.ndarray) -> dict[str, Any]:
    """embed_q [H, R, nope] and unembed_out [H, vd, R] of a whole dense kv_b, by the names of `mla_expand`."""
    w = kv_b.reshape(H, P, -1)
    return {"kv_b": w[:, :NOPE].swapaxes(1, 2).copy(), "unembed_out": w[:, NOPE:].copy()}


# -- splitting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (1,), (6,), (0,)], ids=str)
@pytest.mark.parametrize("where", [{"nope": NOPE}, {"kv_lora_rank": R}, {"nope": NOPE, "kv_lora_rank": R}], ids=str)
def test_mla_split_q_kv_copies_the_parts(where, lead, dtype, rng):
    q_full, kv_pre = normal(rng, *lead, H, NOPE + ROPE, dtype=dtype), normal(rng, *lead, R + ROPE, dtype=dtype)
    parts = mla_split_q_kv(q_full, kv_pre, **where)
    want = q_full[..., :NOPE], q_full[..., NOPE:], kv_pre[..., :R], kv_pre[..., R:]
    for name, got, part in zip(("q_nope", "q_pe", "kv_lat", "k_pe"), parts, want, strict=True):
        assert_same_bits(name, got, part)
        assert got.flags.c_contiguous
        assert not np.shares_memory(got, q_full)
        assert not np.shares_memory(got, kv_pre)


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mla_prepare_is_its_ops_one_after_the_other(dtype, each, rng):
    T, H, nope, rope, R = 3, 2, 5, 6, 7
    q, kv = normal(rng, T, H * (nope + rope), dtype=dtype), normal(rng, T, R + rope, dtype=dtype)
    pages = [normal(rng, 6, 4, width, dtype=dtype) for width in (R, rope)]
    weight, table, into = normal(rng, R), ops.rope_inv_freq(rope, 100.0), [page.copy() for page in pages]
    at, blocks = (i32(7, 0, 2), i32([4, 0], [1, 2], [3, 5])) if each else (np.array(2, np.int32), i32(4, 0))
    got = ops.mla_prepare(q, kv, weight, table, at, *pages, blocks, H, nope, 1.2, 0.01)
    q_nope, q_pe, latent, k_pe = ops.mla_split_q_kv(q.reshape(T, H, -1), kv, nope)
    k_pe = ops.rope(k_pe[:, None], table, at, mscale=1.2)[:, 0]
    ops.mla_cache_append(ops.rms_norm(latent, weight, 0.01), k_pe.copy(), *into, at, block_table=blocks)
    want = (q_nope, ops.rope(q_pe, table, at, mscale=1.2), *into)
    for name, a, b in zip(("q_nope", "q_pe", "latent_pages", "rope_pages"), (*got, *pages), want, strict=True):
        assert_same_bits(name, a, b)


# -- weights -----------------------------------------------------------------------------------------------------------


def products(weights: dict[str, Any], q_nope: Any, v_combine: Any, latent: Any) -> dict[str, np.ndarray]:
    """The three products with one form of the weight."""
    if "unembed_out" in weights:
        embed_q, unembed_out = weights["kv_b"], weights["unembed_out"]
        q_prime, out = mla_q_prime(q_nope, embed_q), mla_out_per_head(v_combine, unembed_out)
        k, v = mla_expand(latent, embed_q, unembed_out)
    else:
        kv_b = weights["kv_b"]
        q_prime, out = mla_q_prime(q_nope, kv_b), mla_out_per_head(v_combine, kv_b, nope=NOPE)
        k, v = mla_expand(latent, kv_b, heads=H, nope=NOPE)
        assert_same_bits("v_head_dim", mla_out_per_head(v_combine, kv_b, v_head_dim=VD), out)
        for name, got, want in zip("kv", mla_expand(latent, kv_b, heads=H, v_head_dim=VD), (k, v), strict=True):
            assert_same_bits(name, got, want)
    return {"q_prime": q_prime, "out": out, "k": k, "v": v}


def inputs(rng: np.random.Generator, dtype: str = "float32") -> tuple[np.ndarray, ...]:
    """q_nope [T, H, nope], v_combine [T, H, R], latent [T, R]."""
    return normal(rng, 4, H, NOPE, dtype=dtype), normal(rng, 4, H, R, dtype=dtype), normal(rng, 4, R, dtype=dtype)


def by_definition(kv_b: np.ndarray, q_nope: Any, v_combine: Any, latent: Any) -> dict[str, np.ndarray]:
    """Row by row in float64: key row i of head h is row h·P + i, its value rows follow."""
    w = kv_b.astype(np.float64)
    q, y, x = (a.astype(np.float64) for a in (q_nope, v_combine, latent))
    want = {name: np.zeros((len(x), H, width)) for name, width in (("q_prime", R), ("out", VD), ("k", NOPE), ("v", VD))}
    for h in range(H):
        for i in range(NOPE):
            want["q_prime"][:, h] += q[:, h, i, None] * w[h * P + i]
            want["k"][:, h, i] = x @ w[h * P + i]
        for f in range(VD):
            want["out"][:, h, f] = y[:, h] @ w[h * P + NOPE + f]
            want["v"][:, h, f] = x @ w[h * P + NOPE + f]
    return want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["dense", "dense-bfloat16", "quantized-4", "quantized-8", "pair", "pair-quantized"])
def test_mla_products_match_their_formulas(form, dtype, rng):
    arrays = inputs(rng, dtype)
    kv_b = normal(rng, H * P, R, dtype="bfloat16" if "bfloat16" in form else "float32", scale=0.2)
    weights: dict[str, Any] = {"kv_b": kv_b}
    if form.startswith("quantized"):
        weights["kv_b"] = penstock.quantize(kv_b, bits=int(form[-1]), group_size=64)
        kv_b = dequantize(weights["kv_b"])
    if form.startswith("pair"):
        weights = pair(kv_b)
    if form == "pair-quantized":  # groups along nope and along R
        weights["kv_b"] = penstock.quantize(weights["kv_b"], bits=4, group_size=32)
        weights["unembed_out"] = penstock.quantize(weights["unembed_out"], bits=4, group_size=64)
        keys, values = (dequantize(w) for w in weights.values())
        kv_b = np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(H * P, R)
    want = by_definition(kv_b, *arrays)
    got = products(weights, *arrays)
    for name in want:
        assert_rounded(got[name], want[name], dtype)
    one = [array[2] for array in arrays[:2]]
    assert_rounded(mla_q_prime(one[0], weights["kv_b"]), want["q_prime"][2], dtype)
    value = weights.get("unembed_out", weights["kv_b"])
    nope = None if "unembed_out" in weights else NOPE
    assert_rounded(mla_out_per_head(one[1], value, nope), want["out"][2], dtype)


def test_mla_products_of_whole_and_pair_agree(rng):
    arrays, kv_b = inputs(rng), normal(rng, H * P, R, scale=0.2)
    halves = products(pair(kv_b), *arrays)
    for name, want in products({"kv_b": kv_b}, *arrays).items():
        assert_rounded(halves[name], want, roundings=2)


def test_mla_products_with_the_pair_match_mlx(rng):
    q_nope, v_combine, latent = inputs(rng)
    embed_q, unembed_out = quantized(rng, H, R, NOPE, dtype="float32"), quantized(rng, H, VD, R, dtype="float32")

    def mlx(x: np.ndarray, w: QuantizedTensor, transpose: bool = True) -> np.ndarray:
        """x [H, T, ·] times each head of w."""
        arrays = (mx.array(a) for a in (np.ascontiguousarray(x), w.packed, w.scales, w.biases))
        return np.array(mx.quantized_matmul(*arrays, transpose=transpose, group_size=w.group_size, bits=w.bits))

    rows = np.broadcast_to(latent, (H, *latent.shape))
    want = {
        "q_prime": mlx(q_nope.swapaxes(0, 1), embed_q),
        "out": mlx(v_combine.swapaxes(0, 1), unembed_out),
        "k": mlx(rows, embed_q, transpose=False),
        "v": mlx(rows, unembed_out),
    }
    got = products({"kv_b": embed_q, "unembed_out": unembed_out}, q_nope, v_combine, latent)
    for name in want:
        assert_close(name, got[name], want[name].swapaxes(0, 1), 4e-6, np.abs(want[name]).max())


def test_mla_products_of_no_tokens_are_empty(rng):
    arrays, kv_b = [array[:0] for array in inputs(rng)], normal(rng, H * P, R)
    for weights in ({"kv_b": kv_b}, pair(kv_b)):
        shapes = {name: y.shape for name, y in products(weights, *arrays).items()}
        assert shapes == {"q_prime": (0, H, R), "out": (0, H, VD), "k": (0, H, NOPE), "v": (0, H, VD)}


# -- absorbed and expanded ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["dense", "quantized", "pair"])
@pytest.mark.parametrize(("T", "n"), [(1, 1), (1, 23), (23, 23), (5, 23), (70, 71)])
def test_mla_absorbed_equals_expanded_attention(T, n, form, rng):
    """q'·latent + q_pe·k_pe is the score of ordinary attention with keys [W_K latent | k_pe] and values W_V latent."""
    q_nope, q_pe, scale = normal(rng, T, H, NOPE), normal(rng, T, H, ROPE), 0.17
    latent, k_pe = normal(rng, n, R), normal(rng, n, ROPE)
    kv_b: Any = normal(rng, H * P, R, scale=R**-0.5)
    sizes = {"heads": H, "nope": NOPE}
    keys = values = kv_b
    if form == "quantized":
        keys = values = penstock.quantize(kv_b, bits=4, group_size=32)
    if form == "pair":
        (keys, values), sizes = pair(kv_b).values(), {}
    room = [np.concatenate([cache, np.full((3, cache.shape[1]), np.nan, "f4")]) for cache in (latent, k_pe)]
    combined = mla_sdpa(mla_q_prime(q_nope, keys), q_pe, *room, n, scale)
    got = mla_out_per_head(combined, values, sizes.get("nope"))

    k, v = mla_expand(latent, keys, values if form == "pair" else None, **sizes)
    whole = np.concatenate([k, np.repeat(k_pe[:, None], H, axis=1)], axis=-1)
    q = np.concatenate([q_nope, q_pe], axis=-1)
    want = attention_prefill(q, whole, v, n - T, scale)
    assert_close("expanded", got, want, 1e-6, np.abs(want).max())
    seen = torch.ones(T, n, dtype=torch.bool).tril(n - T)
    arguments = (torch.from_numpy(x.astype(np.float64)).transpose(0, 1)[None] for x in (q, whole, v))
    exact = torch.nn.functional.scaled_dot_product_attention(*arguments, attn_mask=seen, scale=scale)
    assert_close("torch", got, exact[0].transpose(0, 1).numpy(), 1e-6, np.abs(want).max())
    if T == 1:
        one = mla_sdpa(mla_q_prime(q_nope[0], keys), q_pe[0], *room, n, scale)
        assert_same_bits("one token", one, combined[0])


def latents(rng: Any, *lead: int, R: int = 6, rope: int = 4, dtype: str = "float32") -> tuple[np.ndarray, ...]:
    """Queries or cache rows: the latent and the rope part."""
    return normal(rng, *lead, R, dtype=dtype), normal(rng, *lead, rope, dtype=dtype)


def exact_sdpa(q_prime: Any, q_pe: Any, latent: Any, rope_k: Any, scale: float) -> np.ndarray:
    """One token over all rows of the caches, by torch in float64."""
    q, k = (np.concatenate([a, b], axis=-1).astype(np.float64) for a, b in ((q_prime, q_pe), (latent, rope_k)))
    q, k, v = (torch.from_numpy(x) for x in (q, k, latent.astype(np.float64)))
    return (torch.softmax(q @ k.T * scale, dim=-1) @ v).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 19])
def test_mla_sdpa_matches_torch(n, dtype, rng):
    q, caches = latents(rng, 3, dtype=dtype), latents(rng, n, dtype=dtype)
    got = mla_sdpa(*q, *caches, n, 0.7, out=np.full_like(q[0], np.nan))
    assert_rounded(got, exact_sdpa(*q, *caches, 0.7), dtype)
    assert_same_bits("array", mla_sdpa(*q, *caches, np.array(n, np.int32), 0.7), got)


def test_mla_sdpa_causal_rows_equal_single_tokens_in_pieces_too(rng):
    q, caches = latents(rng, 9, 3), latents(rng, 14)
    whole = mla_sdpa(*q, *caches, 14, 0.7)
    for t in range(9):
        assert_rounded(mla_sdpa(q[0][t], q[1][t], *caches, 6 + t, 0.7), whole[t], roundings=2)
    for low, high in ((0, 4), (4, 5), (5, 9)):
        assert_rounded(mla_sdpa(q[0][low:high], q[1][low:high], *caches, 5 + high, 0.7), whole[low:high], roundings=2)


def test_mla_sdpa_of_nothing_is_zero_or_empty(rng):
    q, caches = latents(rng, 3), [np.full_like(cache, np.nan) for cache in latents(rng, 5)]
    for n in (0, np.array(0, np.int32)):
        assert_same_bits("y", mla_sdpa(*q, *caches, n, 0.7), np.zeros((3, 6), "f4"))
    none = latents(rng, 0, 3)
    for n in (0, 4):
        assert mla_sdpa(*none, *caches, n, 0.7).shape == (0, 3, 6)


@pytest.mark.parametrize("page", [1, 2, 3, 5, 16])
def test_mla_sdpa_slots_and_pages_equal_single_calls(page, rng):
    """Rows written through `mla_cache_append` in each layout and read back."""
    lengths = i32(11, 0, 1, 5)
    B, n, each = len(lengths), 11, -(-11 // page)
    q, rows = latents(rng, B, 3), latents(rng, B, n)
    slots, table = i32(3, 0, 4, 2), rng.permutation(B * each + 2)[: B * each].reshape(B, each).astype(np.int32)
    slotted = [np.full((5, n, x.shape[-1]), np.nan, "f4") for x in rows]
    pages = [np.full((B * each + 2, page, x.shape[-1]), np.nan, "f4") for x in rows]
    for t in range(n):
        step = [np.ascontiguousarray(x[:, t]) for x in rows]
        mla_cache_append(*step, *slotted, np.full(B, t, np.int32), slots)
        mla_cache_append(*step, *pages, np.full(B, t, np.int32), block_table=table)
    want = np.stack([mla_sdpa(q[0][b], q[1][b], rows[0][b], rows[1][b], int(lengths[b]), 0.7) for b in range(B)])
    assert_rounded(want[0], exact_sdpa(q[0][0], q[1][0], rows[0][0], rows[1][0], 0.7))
    for b in range(B):
        table[b, -(-lengths[b] // page) :] = -1
    assert_same_bits("slots", mla_sdpa(*q, *slotted, lengths, 0.7, slots), want)
    assert_same_bits("pages", mla_sdpa(*q, *pages, lengths, 0.7, block_table=table), want)
    assert_same_bits("one", mla_sdpa(q[0][0], q[1][0], *pages, 11, 0.7, block_table=table[0]), want[0])
    many = latents(rng, 4, 3)
    causal = mla_sdpa(*many, rows[0][0], rows[1][0], 9, 0.7)
    assert_same_bits("causal", mla_sdpa(*many, *pages, 9, 0.7, block_table=table[0]), causal)
    none = latents(rng, 0, 3)
    assert mla_sdpa(*none, *slotted, i32(), 0.7, i32()).shape == (0, 3, 6)
    assert mla_sdpa(*none, *pages, i32(), 0.7, block_table=table[:0]).shape == (0, 3, 6)


# -- tiles -------------------------------------------------------------------------------------------------------------


def tiled(q: Any, caches: Any, edges: list[int], scale: float = 0.7) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """`mla_sdpa` by tiles between the edges from a state full of NaN; the result and the last state."""
    heads, width = q[0].shape
    state = np.full(heads, np.nan, "f4"), np.full(heads, np.nan, "f4"), np.full((heads, width), np.nan, "f4")
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        assert mla_sdpa_tile_accumulate(*state, *q, *caches, start, end, scale, first=number == 0) is None
    return mla_sdpa_finalize(state[1], state[2], out=np.full((heads, width), np.nan, "f4")), state


@pytest.mark.parametrize("tile", [1, 7, 64, 150])
@pytest.mark.parametrize("empty", ["none", "first", "later"])
def test_mla_sdpa_in_tiles_equals_one_shot(tile, empty, rng):
    q, caches = latents(rng, 3), latents(rng, 150)
    edges = sorted({*range(0, 150, tile), 150})
    edges = {"none": edges, "first": [0, *edges], "later": [*edges[:-1], edges[-2], edges[-1], edges[-1]]}[empty]
    got, (top, total, _) = tiled(q, caches, edges)
    want = exact_sdpa(*q, *caches, 0.7)
    assert_close("y", got, want, 2e-6, np.abs(want).max())
    assert_close("one shot", got, mla_sdpa(*q, *caches, 150, 0.7), 2e-6, np.abs(want).max())
    scores = (q[0].astype("f8") @ caches[0].T + q[1].astype("f8") @ caches[1].T) * 0.7
    assert_close("running_max", top, scores.max(axis=1), EPS["float32"], np.abs(scores).max())
    sums = np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1)
    assert_close("denominator", total, sums, 2e-5, sums)  # a maximum rounded to float32 shifts the sum


@given(cuts=st.lists(st.integers(0, 12), max_size=5), start=st.integers(0, 3))
def test_mla_sdpa_in_tiles_may_be_cut_anywhere(cuts, start):
    rng = np.random.default_rng(start)
    q, caches = latents(rng, 2), latents(rng, 12)
    want = exact_sdpa(*q, *(cache[start:] for cache in caches), 0.7)
    got, _ = tiled(q, caches, [start, *sorted(max(cut, start) for cut in cuts), 12])
    assert_close("y", got, want, 1e-6, np.abs(want).max())


@pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 4095, 4096, 4097, 8192, 10000])
def test_mla_sdpa_takes_caches_of_any_length(n, rng):
    """H17, also around the length at which the source kernels changed to tiles."""
    q, caches = latents(rng, 2, R=5, rope=3), latents(rng, n + 1, R=5, rope=3)
    caches[0][n:], caches[1][n:] = np.nan, np.nan
    got, by_tiles = mla_sdpa(*q, *caches, n, 0.7), tiled(q, caches, [*range(0, n, 4096), n] if n else [0, 0])[0]
    want = exact_sdpa(*q, *(cache[:n] for cache in caches), 0.7) if n else np.zeros((2, 5))
    assert_rounded(got, want)
    assert_close("tiles", by_tiles, want, 1e-6)


def test_mla_sdpa_of_scores_that_are_all_minus_infinity_is_zero(rng):
    q, caches = latents(rng, 2), latents(rng, 8)
    q[1][...], caches[1][...] = 1, -np.inf
    assert_same_bits("one shot", mla_sdpa(*q, *caches, 8, 0.7), np.zeros((2, 6), "f4"))
    got, (top, total, _) = tiled(q, caches, [0, 3, 3, 8])
    assert_same_bits("tiles", got, np.zeros((2, 6), "f4"))
    assert np.isneginf(top).all()
    assert (total == 0).all()
    caches[1][5:7] = 0  # two positions come into sight, in a tile after and before others that have none
    want = exact_sdpa(*q, *(cache[5:7] for cache in caches), 0.7)
    for edges in ([0, 8], [0, 3, 8], [0, 5, 7, 8], list(range(9))):
        assert_close("some", tiled(q, caches, edges)[0], want, 1e-6)
    assert_rounded(mla_sdpa(*q, *caches, 8, 0.7), want)


def test_mla_sdpa_tile_accumulate_by_hand():
    """Scores ln 2 and 0 on top of a state with M = ln 4, Z = 1: Z' = 1 + 2/4 + 1/4; V' likewise."""
    state = np.log(np.array([4], "f4")), np.array([1], "f4"), np.array([[8]], "f4")
    q = np.array([[0]], "f4"), np.array([[1]], "f4")
    caches = np.array([[16], [32]], "f4"), np.log(np.array([[2], [1]], "f4"))
    mla_sdpa_tile_accumulate(*state, *q, *caches, 0, 2, 1.0)
    np.testing.assert_allclose(state[0], np.log(4), rtol=1e-7)
    np.testing.assert_allclose(state[1], [1.75], rtol=1e-7)
    np.testing.assert_allclose(state[2], [[8 + 16 / 2 + 32 / 4]], rtol=1e-7)
    np.testing.assert_allclose(mla_sdpa_finalize(state[1], state[2]), [[24 / 1.75]], rtol=1e-7)
    again = copy.deepcopy(state)
    mla_sdpa_tile_accumulate(*again, *q, *caches, 1, 1, 1.0)  # an empty tile that is not the first
    for name, a, b in zip(("M", "Z", "V"), again, state, strict=True):
        assert_same_bits(name, a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mla_sdpa_finalize_divides_and_guards_zero(dtype):
    total, sums = np.array([2, 0, -1, 3], "f4"), np.array([[1, 5], [np.nan, 1], [3, 3], [1, 2]], "f4")
    got = mla_sdpa_finalize(total, sums, dtype)
    assert got.dtype.name == dtype
    assert_rounded(got, np.array([[0.5, 2.5], [0, 0], [0, 0], [1 / 3, 2 / 3]]), dtype)


# -- refusals ----------------------------------------------------------------------------------------------------------

KV_B = zeros(2 * 7, 8)  # H = 2, nope = 4, v_head_dim = 3, R = 8
CACHES = {"latent_cache": zeros(6, 8), "rope_k_cache": zeros(6, 5)}
PAGES = {"latent_cache": zeros(5, 3, 8), "rope_k_cache": zeros(5, 3, 5)}
QUERY = {"q_prime": zeros(2, 8), "q_pe": zeros(2, 5), "softmax_scale": 0.5}
QUERIES = {"q_prime": zeros(3, 2, 8), "q_pe": zeros(3, 2, 5), "softmax_scale": 0.5}
STATE = {"running_max": zeros(2), "denominator": zeros(2), "accumulator": zeros(2, 8)}
PAIR = {"latent": zeros(3, 8), "kv_b": zeros(2, 8, 4), "unembed_out": zeros(2, 3, 8)}
ROWS = {"q": zeros(2, 18), "kv": zeros(2, 12), "kv_norm": zeros(8)}
WHERE = {"inv_freq": zeros(2), "positions": i32(3, 0), "block_table": i32([0, 1], [2, 9])}
VALID: dict[str, dict[str, Any]] = {
    "mla_split_q_kv": {"q_full": zeros(3, 2, 9), "kv_pre": zeros(3, 13), "nope": 4},
    "mla_q_prime": {"q_nope": zeros(2, 4), "kv_b": KV_B},
    "mla_q_prime pair": {"q_nope": zeros(3, 2, 4), "kv_b": zeros(2, 8, 4)},
    "mla_out_per_head": {"v_combine": zeros(2, 8), "kv_b": KV_B, "nope": 4},
    "mla_out_per_head pair": {"v_combine": zeros(2, 8), "kv_b": zeros(2, 3, 8)},
    "mla_expand": {"latent": zeros(3, 8), "kv_b": KV_B, "heads": 2, "nope": 4},
    "mla_expand pair": PAIR,
    "mla_sdpa": {**QUERY, **CACHES, "cache_len": 4},
    "mla_sdpa causal": {**QUERIES, **CACHES, "cache_len": 4},
    "mla_sdpa slots": {**QUERIES, **PAGES, "cache_len": i32(1, 0, 3), "slots": i32(4, 0, 2)},
    "mla_sdpa pages": {**QUERIES, **PAGES, "cache_len": i32(1, 0, 3), "block_table": i32([4, 9], [9, 9], [2, 9])},
    "mla_sdpa_tile_accumulate": {**STATE, **QUERY, **CACHES, "tile_start": 1, "tile_end": 4},
    "mla_sdpa_finalize": {"denominator": zeros(2), "accumulator": zeros(2, 8)},
    "mla_prepare": {**ROWS, **WHERE, "latent_pages": zeros(5, 2, 8), "rope_pages": zeros(5, 2, 4), "H": 2, "nope": 5},
}
LEFT_OUT = "nope and v_head_dim are both left out, expected one of them with a whole kv_b"
WRONG_CACHES: list[tuple[dict[str, Any], type, str]] = [
    ({"q_pe": zeros(2, 4)}, ShapeError, "rope_k_cache has shape (6, 5), expected rows of 4 as the query"),
    ({"q_pe": zeros(3, 5)}, ShapeError, "q_pe has shape (3, 5), expected (2, 5) (as q_prime but for the last axis)"),
    ({"latent_cache": zeros(6, 7)}, ShapeError, "latent_cache has shape (6, 7), expected rows of 8 as the query"),
    ({"rope_k_cache": zeros(5, 5)}, ShapeError, "rope_k_cache has shape (5, 5), expected (6,) in front as"),
    ({"q_pe": zeros(2, 5, dtype="float16")}, DTypeError, "q_pe has dtype float16, expected float32 as q_prime"),
    ({"softmax_scale": float("nan")}, InvalidArgument, "softmax_scale is nan, expected a finite number"),
]
REFUSED: dict[str, list[tuple[dict[str, Any], type, str]]] = {
    "mla_split_q_kv": [
        ({"nope": None}, InvalidArgument, "nope and kv_lora_rank are both left out, expected one of them"),
        ({"kv_lora_rank": 9}, ShapeError, "kv_pre has shape (3, 13), expected a last axis of 14 (R + rope)"),
        ({"nope": 9}, ShapeError, "q_full has shape (3, 2, 9), expected a last axis of nope + rope, both at least 1"),
        ({"nope": 0}, ShapeError, "q_full has shape (3, 2, 9), expected a last axis of nope + rope, both at least 1"),
        ({"kv_pre": zeros(3, 5)}, ShapeError, "kv_pre has shape (3, 5), expected a last axis of more than 5 (R"),
        ({"kv_pre": zeros(2, 13)}, ShapeError, "kv_pre has shape (2, 13), expected (3, 13)"),
        ({"kv_pre": zeros(13)}, ShapeError, "kv_pre has shape (13,), expected [T, R + rope] or [R + rope]"),
        ({"q_full": zeros(3, 2, 9, dtype="float16")}, DTypeError, "kv_pre has dtype float32, expected float16 as"),
    ],
    "mla_q_prime": [
        ({"kv_b": zeros(13, 8)}, ShapeError, "kv_b has shape (13, 8), expected a multiple of 2 rows (heads)"),
        ({"kv_b": zeros(6, 8)}, ShapeError, "kv_b has 3 rows per head, expected at least 4 (nope)"),
        ({"kv_b": zeros(14, 0)}, ShapeError, "kv_b has shape (14, 0), expected no empty axis"),
        ({"kv_b": 1.0}, DTypeError, "kv_b is 1.0, expected an array (NumPy or torch) or a QuantizedTensor"),
        ({"q_nope": zeros(4)}, ShapeError, "q_nope has shape (4,), expected [T, H, nope] with T optional"),
    ],
    "mla_q_prime pair": [
        ({"kv_b": zeros(2, 4, 8)}, ShapeError, "kv_b has shape (2, 4, 8), expected (2, 4, 4) (H, R, nope)"),
        ({"kv_b": zeros(3, 8, 4)}, ShapeError, "kv_b has shape (3, 8, 4), expected (2, 8, 4) (H, R, nope)"),
    ],
    "mla_out_per_head": [
        ({"nope": None}, InvalidArgument, LEFT_OUT),
        ({"nope": 7}, ShapeError, "kv_b has 7 rows per head, expected nope + v_head_dim (7 and None given)"),
        ({"v_head_dim": 4}, ShapeError, "kv_b has 7 rows per head, expected nope + v_head_dim (4 and 4 given)"),
        ({"v_combine": zeros(2, 6)}, ShapeError, "kv_b has shape (14, 8), expected a last axis of 6 (R)"),
        ({"v_combine": zeros(3, 8)}, ShapeError, "kv_b has shape (14, 8), expected a multiple of 3 rows (heads)"),
    ],
    "mla_out_per_head pair": [
        ({"kv_b": zeros(3, 3, 8)}, ShapeError, "kv_b has shape (3, 3, 8), expected (2, 3, 8) (H, v_head_dim, R)"),
        ({"kv_b": zeros(2, 0, 8)}, ShapeError, "kv_b has shape (2, 0, 8), expected no empty axis"),
    ],
    "mla_expand": [
        ({"nope": None}, InvalidArgument, LEFT_OUT),
        ({"heads": None}, InvalidArgument, "heads is left out, expected the number of heads with a whole kv_b"),
        ({"heads": 0}, InvalidArgument, "heads is 0, expected at least 1"),
        ({"heads": 3}, ShapeError, "kv_b has shape (14, 8), expected a multiple of 3 rows (heads)"),
        ({"latent": zeros(3, 7)}, ShapeError, "kv_b has shape (14, 8), expected a last axis of 7 (R)"),
        ({"unembed_out": zeros(2, 3, 8)}, InvalidArgument, "unembed_out is given with a whole kv_b, expected one or"),
    ],
    "mla_expand pair": [
        ({"unembed_out": None}, InvalidArgument, "unembed_out is left out, expected it beside an embed_q of"),
        ({"unembed_out": zeros(2, 3, 7)}, ShapeError, "unembed_out has shape (2, 3, 7), expected (2, 3, 8)"),
        ({"unembed_out": zeros(6, 8)}, ShapeError, "unembed_out has shape (6, 8), expected [H, v_head_dim, R]"),
        ({"kv_b": zeros(2, 4, 8)}, ShapeError, "kv_b has shape (2, 4, 8), expected (2, 8, 8) (H, R, nope)"),
    ],
    "mla_sdpa": [
        *WRONG_CACHES,
        ({"cache_len": 7}, InvalidArgument, "cache_len is 7, expected 0 to 6 (rows of the call, positions)"),
        ({"cache_len": -1}, InvalidArgument, "cache_len is -1, expected 0 or more"),
        ({"cache_len": np.array(7, np.int32)}, InvalidArgument, "cache_len is 7, expected 0 to 6"),
        ({"cache_len": np.array(-1, np.int32)}, InvalidArgument, "cache_len is -1, expected 0 to 6"),
        ({"cache_len": 1.0}, DTypeError, "cache_len is 1.0, expected an array (NumPy or torch) or an int"),
        ({"cache_len": i32(3)}, ShapeError, "q_prime has shape (2, 8), expected [B, H, R]"),
    ],
    "mla_sdpa causal": [
        ({"cache_len": 2}, InvalidArgument, "cache_len is 2, expected 3 to 6 (rows of the call, positions)"),
        ({"cache_len": np.array(2, np.int32)}, InvalidArgument, "cache_len is 2, expected 3 to 6"),
        ({"cache_len": i32(3, 3, 3)}, ShapeError, "cache_len has one value per row, expected slots or block_table"),
    ],
    "mla_sdpa slots": [
        ({"slots": i32(5, 0, 1)}, InvalidArgument, "slots has 5, expected 0 to 4 (5 slots)"),
        ({"slots": i32(1, 0)}, ShapeError, "slots has shape (2,), expected (3,)"),
        ({"cache_len": i32(1, 4, 3)}, InvalidArgument, "cache_len has 4, expected 0 to 3 (3 positions in the cache)"),
        ({"cache_len": 3}, ShapeError, "cache_len is one number, expected int32 (3,)"),
        ({"block_table": i32([0], [1], [2])}, InvalidArgument, "slots and block_table are both given, expected"),
    ],
    "mla_sdpa pages": [
        ({"cache_len": i32(1, 0, 7)}, InvalidArgument, "cache_len has 7, expected 0 to 6 (6 positions in the cache)"),
        ({"cache_len": i32(1, 0, 4)}, InvalidArgument, "block_table has 9, expected 0 to 4 (5 pages)"),
        ({"cache_len": i32(1, 0, -1)}, InvalidArgument, "cache_len has -1, expected 0 to 6 (6 positions in"),
        ({"block_table": i32([0, 1])}, ShapeError, "block_table has shape (1, 2), expected 3 rows"),
    ],
    "mla_sdpa_tile_accumulate": [
        *WRONG_CACHES,
        ({"tile_end": 0}, InvalidArgument, "tile_start and tile_end are 1 and 0, expected 0 <= start <= end <= 6"),
        ({"tile_end": 7}, InvalidArgument, "tile_start and tile_end are 1 and 7, expected 0 <= start <= end <= 6"),
        ({"tile_start": -1}, InvalidArgument, "tile_start and tile_end are -1 and 4, expected 0 <= start"),
        ({"running_max": zeros(3)}, ShapeError, "running_max has shape (3,), expected (2,) (H)"),
        ({"accumulator": zeros(2, 7)}, ShapeError, "accumulator has shape (2, 7), expected (2, 8) (as q_prime)"),
        ({"denominator": zeros(2, dtype="float16")}, DTypeError, "denominator has dtype float16, expected float32"),
    ],
    "mla_sdpa_finalize": [
        ({"denominator": zeros(3)}, ShapeError, "denominator has shape (3,), expected (2,) (H)"),
        ({"dtype": "float64"}, DTypeError, "dtype is 'float64', expected float32, float16 or bfloat16"),
    ],
    "mla_prepare": [
        ({"q": zeros(2, 17)}, ShapeError, "q has shape (2, 17), expected a last axis of 2 heads wider than 5 (nope)"),
        ({"nope": 9}, ShapeError, "q has shape (2, 18), expected a last axis of 2 heads wider than 9 (nope)"),
        ({"kv": zeros(2, 4)}, ShapeError, "kv has shape (2, 4), expected a last axis of more than 4 (R + rope)"),
        ({"kv": zeros(3, 12)}, ShapeError, "kv has shape (3, 12), expected (2, 12) (T, R + rope)"),
        ({"kv": zeros(2, 12, dtype="float16")}, DTypeError, "kv has dtype float16, expected float32 as q"),
        ({"kv_norm": zeros(7)}, ShapeError, "kv_norm has shape (7,), expected (8,) (R)"),
        ({"inv_freq": zeros(3)}, ShapeError, "inv_freq has shape (3,), expected (2,) (rotary_dim / 2)"),
        ({"rope_pages": zeros(5, 2, 3)}, ShapeError, "the end of kv has shape (2, 4), expected rows of 3 as rope_"),
        ({"positions": i32(4, 0)}, InvalidArgument, "positions has 4, expected 0 to 3 (4 positions)"),
        ({"block_table": i32(0, 1)}, ShapeError, "block_table has shape (2,), expected [B, n]"),
    ],
}


@pytest.mark.parametrize(
    ("form", "change", "error", "message"), [(form, *row) for form, rows in REFUSED.items() for row in rows]
)
def test_mla_names_the_argument_and_what_it_expected(form, change, error, message):
    assert_refused(ops.REGISTRY[form.split()[0]], {**VALID[form], **change}, error, message)


@pytest.mark.parametrize("form", VALID)
def test_mla_accepts_the_calls_that_the_refusals_start_from(form):
    ops.REGISTRY[form.split()[0]](**copy.deepcopy(VALID[form]))


# -- mla_prefill -----------------------------------------------------------------------------------------------------


def prefill_call(rng, T=5, H=3, nope=8, vd=6, R=32, rope=4, start=7):
    latent, rope_k = normal(rng, 20, R), normal(rng, 20, rope)
    return {
        "q_nope": normal(rng, T, H, nope),
        "q_pe": normal(rng, T, H, rope),
        "latent_cache": latent,
        "rope_k_cache": rope_k,
        "start": start,
        "softmax_scale": 0.3,
        "kv_b": normal(rng, H * (nope + vd), R, scale=R**-0.5),
    }


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_mla_prefill_is_the_absorbed_attention(device, rng):
    call = prefill_call(rng)
    got = run_on(device, ops.mla_prefill, **call)
    q = run_on(device, ops.mla_q_prime, call["q_nope"], call["kv_b"])
    y = run_on(device, ops.mla_sdpa, q, call["q_pe"], call["latent_cache"], call["rope_k_cache"], 12, 0.3)
    want = run_on(device, ops.mla_out_per_head, y, call["kv_b"], v_head_dim=6)
    assert_close("y", got, want, 4e-6)


def test_mla_prefill_is_torch_attention_over_expanded_keys(rng):
    call = prefill_call(rng)
    w = torch.from_numpy(call["kv_b"]).double().view(3, 14, 32)
    latent, rope_k = (torch.from_numpy(call[name][:12]).double() for name in ("latent_cache", "rope_k_cache"))
    k = torch.cat([torch.einsum("pc,hfc->hpf", latent, w[:, :8]), rope_k.expand(3, 12, 4)], dim=2)
    v = torch.einsum("pc,hfc->hpf", latent, w[:, 8:])
    q = torch.cat([torch.from_numpy(call[name]).double() for name in ("q_nope", "q_pe")], dim=2).transpose(0, 1)
    seen = torch.arange(12)[None] <= 7 + torch.arange(5)[:, None]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3).transpose(0, 1)
    assert_close("y", run_on("reference", ops.mla_prefill, **call), want.numpy(), 1e-6)


def test_mla_prefill_refuses_what_does_not_fit(rng):
    call = prefill_call(rng)
    for change, error, message in (
        ({"start": 16}, InvalidArgument, "start is 16, expected 0 to 15"),
        ({"start": -1}, InvalidArgument, "start is -1"),
        ({"q_pe": normal(rng, 5, 3, 5)}, ShapeError, "rope_k_cache has shape (20, 4), expected rows of 5"),
        ({"q_pe": normal(rng, 4, 3, 4)}, ShapeError, "q_pe has shape (4, 3, 4), expected (5, 3, 4)"),
        ({"kv_b": normal(rng, 43, 32)}, ShapeError, "kv_b has shape (43, 32), expected a multiple of 3"),
        ({"kv_b": normal(rng, 42, 31)}, ShapeError, "kv_b has shape (42, 31), expected a last axis of 32"),
        ({"start": np.array([1, 2], np.int32)}, ShapeError, "start has one value per row, expected one number"),
    ):
        assert_refused(ops.mla_prefill, {**call, **change}, error, message)
