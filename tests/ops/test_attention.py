"""The definition of attention against torch in float64, by hand, and in all its forms against itself."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock import ops
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.ops import (
    attention_decode,
    attention_paged,
    attention_prefill,
    attention_prepare,
    attention_scores,
    attention_softmax,
    attention_values,
    head_norm_rope,
    kv_pages_append,
    rms_norm,
    rope,
    rope_inv_freq,
    sigmoid_gate,
    split_q_gate,
)
from tests.ops.common import DTYPES, EPS, assert_close, assert_refused, assert_same_bits, i32, normal, zeros


@pytest.fixture(autouse=True, scope="module")
def definition() -> Iterator[None]:
    with penstock.backend("reference"):
        yield


def oracle(q: Any, k: Any, v: Any, start: int, scale: float, window: int | None = None) -> np.ndarray:
    """torch in float64: q [T, H, D] at positions start …, k [n, Hkv · D], v [n, Hkv · Dv] → [T, H, Dv]."""
    n, D = k.shape[0], q.shape[-1]
    Hkv = k.size // n // D
    rows, columns = start + torch.arange(len(q))[:, None], torch.arange(n)
    seen = (columns <= rows) & (columns > rows - (n + 1 if window is None else window))
    k, v = k.reshape(n, Hkv, D), v.reshape(n, Hkv, -1)
    heads_first = (torch.from_numpy(x.astype(np.float64)).transpose(0, 1)[None] for x in (q, k, v))
    y = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=seen, scale=scale, enable_gqa=True)
    return y[0].transpose(0, 1).numpy()


def assert_rounded(got: np.ndarray, want: np.ndarray, dtype: str = "float32", roundings: int = 1) -> None:
    """got is want (exact, or itself rounded) rounded to dtype."""
    assert_close("y", got, want, roundings * EPS[dtype], np.abs(want.astype(np.float64)) + 1e-4)


def differs(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.abs(a.astype(np.float64) - b).max() > 1e-3)


def sequence(rng: Any, T: int, H: int, Hkv: int, D: int, Dv: int, n: int, dtype: str = "float32") -> tuple[Any, ...]:
    """Queries of T tokens, keys and values of n positions."""
    caches = normal(rng, n, Hkv * D, dtype=dtype), normal(rng, n, Hkv * Dv, dtype=dtype)
    return normal(rng, T, H, D, dtype=dtype), *caches


def paged(rng: np.random.Generator, caches: Any, page: int, spare: int = 2) -> tuple[list[np.ndarray], np.ndarray]:
    """Caches [B, n, width] as shuffled pages among spare ones full of NaN, and the block table [B, pages of each]."""
    B, n, _ = caches[0].shape
    each = -(-n // page)
    table = rng.permutation(B * each + spare)[: B * each].reshape(B, each).astype(np.int32)
    pages = [np.full((B * each + spare, page, cache.shape[2]), np.nan, cache.dtype) for cache in caches]
    for b, p in np.ndindex(B, n):
        for target, cache in zip(pages, caches, strict=True):
            target[table[b, p // page], p % page] = cache[b, p]
    return pages, table


# -- against torch -----------------------------------------------------------------------------------------------------

SHAPES = {  # T, H, Hkv, D, Dv, start, scale, window
    "mha": (5, 3, 3, 8, 8, 0, 8**-0.5, None),
    "gqa2": (7, 6, 3, 10, 6, 4, 10**-0.5, None),
    "gqa4": (1, 8, 2, 16, 20, 12, 1.0, None),
    "gqa8": (9, 8, 1, 5, 3, 2, 0.3, None),
    "two-blocks": (70, 2, 1, 4, 6, 3, 0.5, None),  # the definition takes 64 queries at a time
    "window": (9, 6, 3, 10, 6, 4, 1.0, 4),
    "window-two-blocks": (140, 2, 2, 4, 3, 1, 0.5, 66),
    "window-1": (4, 2, 1, 8, 5, 3, 0.4, 1),
    "window-wide": (6, 4, 2, 8, 5, 3, 0.4, 100),
}
SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@SHAPE
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_prefill_matches_torch(shape, dtype, rng):
    T, H, Hkv, D, Dv, start, scale, window = shape
    q, k, v = sequence(rng, T, H, Hkv, D, Dv, start + T, dtype)
    want = oracle(q, k, v, start, scale, window)
    room = [np.concatenate([x, np.full((3, x.shape[1]), np.nan, x.dtype)]) for x in (k, v)]  # unused rows are not read
    got = attention_prefill(q, *room, start, scale, window, out=np.full((T, H, Dv), np.nan, q.dtype))
    assert_rounded(got, want, dtype)


@SHAPE
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_decode_matches_torch(shape, dtype, rng):
    _, H, Hkv, D, Dv, start, scale, window = shape
    q, k, v = sequence(rng, 1, H, Hkv, D, Dv, start + 6, dtype)
    want = oracle(q, k[: start + 1], v[: start + 1], start, scale, window)[0]
    k[start + 1 :], v[start + 1 :] = np.nan, np.nan
    assert_rounded(attention_decode(q[0], k, v, start + 1, scale, window), want, dtype)


def test_attention_prefill_takes_large_scores_and_infinite_keys(rng):
    q, k, v = sequence(rng, 3, 2, 1, 4, 3, 5)
    assert_rounded(attention_prefill(q * 1e4, k, v, 2, 100.0), oracle(q * 1e4, k, v, 2, 100.0))
    q[...], k[1] = 1, -np.inf  # a score of −inf is a position that is not seen
    hidden = np.delete(k, 1, axis=0), np.delete(v, 1, axis=0)
    assert_rounded(attention_prefill(q, k, v, 2, 0.5), oracle(q, *hidden, 1, 0.5))


# -- window ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 3, 7, 8, None])
def test_attention_window_counts_the_token_itself(window):
    """With equal scores the result is the mean of the values seen, here unit vectors: one entry for each position."""
    n = 7
    q, k, v = np.zeros((n, 1, 2), "f4"), np.zeros((n, 2), "f4"), np.eye(n, dtype="f4")
    want = np.zeros((n, n))
    for t in range(n):
        first = 0 if window is None else max(0, t - window + 1)
        want[t, first : t + 1] = 1 / (t + 1 - first)
    assert_rounded(attention_prefill(q, k, v, 0, 1.0, window)[:, 0], want)
    for t in range(n):
        assert_rounded(attention_decode(q[t], k, v, t + 1, 1.0, window)[0], want[t])


def test_attention_window_one_off_and_another_scale_differ(rng):
    q, k, v = sequence(rng, 6, 4, 2, 8, 5, 9)
    want = oracle(q, k, v, 3, 1.0, 4)
    prefill, decode = attention_prefill(q, k, v, 3, 1.0, 4), attention_decode(q[5], k, v, 9, 1.0, 4)
    assert_rounded(prefill, want)
    assert_rounded(decode, want[5])
    for scale, window in ((1.0, 3), (1.0, 5), (1.0, None), (8**-0.5, 4)):
        wrong = oracle(q, k, v, 3, scale, window)
        assert differs(prefill, wrong)
        assert differs(decode, wrong[5])


# -- three launches ----------------------------------------------------------------------------------------------------


def test_attention_scores_by_hand():
    q = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], "f4")
    k = np.array([[1, 10, 100, 1000], [2, 20, 200, 2000], [9, 9, 9, 9]], "f4")
    got = attention_scores(q, k, 2, 0.5, 2, 3)
    want = [[10.5, 21, 0], [21.5, 43, 0], [3250, 6500, 0], [4350, 8700, 0]]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("H", "Hkv", "D", "Dv"), [(3, 3, 8, 6), (6, 3, 5, 7), (8, 2, 4, 4), (8, 1, 2, 3)])
def test_attention_scores_softmax_values_equal_decode(H, Hkv, D, Dv, rng):
    q, k, v = sequence(rng, 1, H, Hkv, D, Dv, 11)
    scores = attention_scores(q[0], k, 9, 0.3, H // Hkv, 13)
    weights = attention_softmax(scores, 9)
    got = attention_values(weights, v, 9, H // Hkv)
    assert_close("y", got, attention_decode(q[0], k, v, 9, 0.3), 4 * EPS["float32"])
    assert_rounded(weights[:, :9].sum(axis=1, dtype=np.float64), np.ones(H), roundings=9)


@pytest.mark.parametrize("seq_len", [0, 1, 4, 6])
def test_attention_scores_write_the_first_columns_only(seq_len, rng):
    q, k, _ = sequence(rng, 1, 4, 2, 8, 8, 6)
    out = np.full((4, 7), -7, "f4")
    assert attention_scores(q[0], k, seq_len, 1.0, 2, 7, out=out) is out
    new = attention_scores(q[0], k, seq_len, 1.0, 2, 7)
    assert_same_bits("written", out[:, :seq_len], new[:, :seq_len])
    assert (out[:, seq_len:] == -7).all()
    assert (new[:, seq_len:] == 0).all()
    assert (new[:, :seq_len] != 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seq_len", [0, 1, 5, 9])
def test_attention_softmax_leaves_the_rest_and_works_in_place(seq_len, dtype, rng):
    scores = normal(rng, 4, 9, dtype=dtype, scale=3)
    before = scores.copy()
    got = attention_softmax(scores, seq_len)
    assert_same_bits("scores", scores, before)
    assert_same_bits("rest", got[:, seq_len:], before[:, seq_len:])
    want = torch.softmax(torch.from_numpy(before[:, :seq_len].astype(np.float64)), dim=-1).numpy()
    assert_rounded(got[:, :seq_len], want, dtype)
    assert attention_softmax(scores, seq_len, out=scores) is scores
    assert_same_bits("in place", scores, got)


def test_attention_softmax_starts_its_maximum_at_minus_infinity():
    rows = [[-2e30, -2e30, -3e30], [-np.inf, 1, 1], [-np.inf] * 3, [1e30, -1e30, 1e30]]
    want = [[0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0, 0], [0.5, 0, 0.5]]
    np.testing.assert_array_equal(attention_softmax(np.array(rows, "f4"), 3), want)


def test_attention_values_read_what_seq_len_says(rng):
    scores, v = normal(rng, 4, 9), normal(rng, 6, 2 * 5)
    scores[:, 5:], v[5:] = np.nan, np.nan
    want = np.einsum("gap,pgd->gad", scores[:, :5].reshape(2, 2, 5).astype("f8"), v[:5].reshape(5, 2, 5).astype("f8"))
    assert_rounded(attention_values(scores, v, 5, 2), want.reshape(4, 5))
    assert (attention_values(scores, v, 0, 2) == 0).all()


# -- one meaning in all forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5])
def test_attention_prefill_in_pieces_equals_whole_and_its_rows_equal_decode(window, rng):
    q, k, v = sequence(rng, 77, 4, 2, 6, 3, 80)
    whole = attention_prefill(q, k, v, 3, 0.4, window)
    for cuts in ([1, 2, 10], [64], [63, 76]):
        pieces = zip(np.split(q, cuts), [0, *cuts], strict=True)
        joined = np.concatenate([attention_prefill(piece, k, v, 3 + at, 0.4, window) for piece, at in pieces])
        assert_rounded(joined, whole, roundings=2)
    for t in (0, 1, 63, 64, 76):
        assert_rounded(attention_decode(q[t], k, v, 3 + t + 1, 0.4, window), whole[t], roundings=2)


@given(T=st.integers(0, 6), start=st.integers(0, 6), window=st.none() | st.integers(1, 9), page=st.integers(1, 5))
def test_attention_prefill_of_any_length_matches_torch_in_pages_too(T, start, window, page):
    rng = np.random.default_rng(T * 100 + start)
    q, k, v = sequence(rng, T, 2, 1, 3, 2, 13)
    got = attention_prefill(q, k, v, start, 0.7, window)
    assert_rounded(got, oracle(q, k, v, start, 0.7, window))
    pages, table = paged(rng, (k[None], v[None]), page)
    table[0, -(-(start + T) // page) :] = -1  # pages after the last row and in front of the window may be missing
    table[0, : 0 if window is None else max(0, start - window + 1) // page] = 9999
    if T == 0:
        table[...] = 9999
    for at in (start, np.array(start, np.int32)):
        assert_same_bits("pages", attention_prefill(q, *pages, at, 0.7, window, table[0]), got)


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("page", [1, 3, 4, 16])
def test_attention_paged_and_slots_equal_single_calls(page, window, rng):
    B, lengths = 5, i32(13, 0, 1, 4, 12)
    q = normal(rng, B, 4, 6)
    caches = normal(rng, B, 13, 2 * 6), normal(rng, B, 13, 2 * 3)
    sequences = zip(q, *caches, lengths.tolist(), strict=True)
    want = np.stack([attention_decode(*row, 0.4, window) for row in sequences])
    assert_rounded(want[0], oracle(q[:1], caches[0][0], caches[1][0], 12, 0.4, window)[0])
    assert (want[1] == 0).all()
    pages, table = paged(rng, caches, page)
    for b, n in enumerate(lengths):
        table[b, -(-n // page) :] = -1
    assert_same_bits("pages", attention_paged(q, *pages, table, lengths, 0.4, window), want)
    slots = rng.permutation(B).astype(np.int32)
    mixed = [np.full_like(cache, np.nan) for cache in caches]
    for cache, target in zip(caches, mixed, strict=True):
        target[slots] = cache
    assert_same_bits("slots", attention_decode(q, *mixed, lengths, 0.4, window, slots), want)


@given(page=st.integers(1, 6), lengths=st.lists(st.integers(0, 11), max_size=4), window=st.none() | st.integers(1, 12))
def test_attention_paged_of_any_lengths_matches_torch(page, lengths, window):
    rng = np.random.default_rng(len(lengths))
    B = len(lengths)
    q, caches = normal(rng, B, 2, 3), (normal(rng, B, 11, 3), normal(rng, B, 11, 4))
    pages, table = paged(rng, caches, page)
    got = attention_paged(q, *pages, table, i32(*lengths), 0.6, window)
    for b, n in enumerate(lengths):
        want = oracle(q[b : b + 1], caches[0][b], caches[1][b], n - 1, 0.6, window)[0] if n else np.zeros((2, 4))
        assert_rounded(got[b], want)


@pytest.mark.parametrize("page", [1, 2, 3, 5])
def test_attention_paged_over_a_ring_of_pages_equals_contiguous(page, rng):
    """A window of W needs ⌈(W − 1) / page⌉ + 1 pages however long the sequence: the table comes back to the first."""
    W, n = 6, 24
    ring = -(-(W - 1) // page) + 1
    q, k, v = sequence(rng, n, 4, 2, 6, 3, n)
    pages = np.full((ring, page, 12), np.nan, "f4"), np.full((ring, page, 6), np.nan, "f4")
    table = (np.arange(-(-n // page)) % ring).astype(np.int32)
    for t in range(n):
        kv_pages_append(k[t : t + 1], v[t : t + 1], *pages, table, t)
        want = attention_decode(q[t], k, v, t + 1, 0.4, W)
        assert_same_bits("paged", attention_paged(q[t : t + 1], *pages, table[None], i32(t + 1), 0.4, W)[0], want)
        assert_same_bits("prefill", attention_prefill(q[t : t + 1], *pages, t, 0.4, W, table)[0], want)


def test_attention_forms_agree_on_heads_in_the_cache_and_lengths_in_arrays(rng):
    q, k, v = sequence(rng, 3, 4, 2, 6, 5, 8)
    split = k.reshape(8, 2, 6), v.reshape(8, 2, 5)
    decode, prefill = attention_decode(q[0], k, v, 7, 0.4), attention_prefill(q, k, v, 4, 0.4)
    length, start = np.array(7, np.int32), np.array(4, np.int32)
    for caches in ((k, v), split):
        assert_same_bits("decode", attention_decode(q[0], *caches, length, 0.4), decode)
        assert_same_bits("prefill", attention_prefill(q, *caches, start, 0.4), prefill)
    pages = k.reshape(4, 2, 2, 6), v.reshape(4, 2, 2, 5)
    assert_same_bits("paged", attention_paged(q[:1], *pages, i32([0, 1, 2, 3]), i32(7), 0.4)[0], decode)
    assert_same_bits("table", attention_prefill(q, *pages, 4, 0.4, None, i32(0, 1, 2, 3)), prefill)
    assert_same_bits("scores", attention_scores(q[0], split[0], 7, 0.4, 2, 7), attention_scores(q[0], k, 7, 0.4, 2, 7))


def test_attention_of_nothing_is_zero_or_empty(rng):
    q, k, v = sequence(rng, 2, 4, 2, 6, 5, 8)
    k[...], v[...] = np.nan, np.nan
    for length in (0, np.array(0, np.int32)):
        assert_same_bits("decode", attention_decode(q[0], k, v, length, 0.4), np.zeros((4, 5), "f4"))
        assert_same_bits("window", attention_decode(q[0], k, v, length, 0.4, 3), np.zeros((4, 5), "f4"))
    none, pages = q[:0], (k.reshape(4, 2, 12), v.reshape(4, 2, 10))
    for start, window in ((0, None), (8, None), (5, 1), (5, 3)):
        assert attention_prefill(none, k, v, start, 0.4, window).shape == (0, 4, 5)
    assert attention_decode(none, *pages, i32(), 0.4, None, i32()).shape == (0, 4, 5)
    assert attention_paged(none, *pages, np.zeros((0, 3), np.int32), i32(), 0.4).shape == (0, 4, 5)


# -- split -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_split_q_gate_cuts_each_head(dtype, rng):
    T, H, D = 3, 4, 5
    x = normal(rng, T, H, 2 * D, dtype=dtype)
    q, gate = split_q_gate(x)
    flat = x.reshape(T, 2 * H * D)
    for h in range(H):
        assert_same_bits("q", q[:, h], flat[:, 2 * h * D : 2 * h * D + D])
        assert_same_bits("gate", gate[:, h], flat[:, 2 * h * D + D : 2 * h * D + 2 * D])
    assert not np.array_equal(q.reshape(T, -1), flat[:, : H * D])  # not all of q before all of gate
    assert q.flags.c_contiguous
    assert gate.flags.c_contiguous
    assert not np.shares_memory(q, x)


# -- fused with what stands around it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_paged_gates_what_it_rounded(dtype, rng):
    q, k, v = normal(rng, 2, 4, 6, dtype=dtype), normal(rng, 5, 3, 12, dtype=dtype), normal(rng, 5, 3, 8, dtype=dtype)
    call = {"q": q, "k_pages": k, "v_pages": v, "block_table": i32([4, 0], [1, 2]), "lengths": i32(5, 2), "scale": 0.4}
    gate = normal(rng, 2, 4, 4, dtype=dtype, scale=3)
    assert_same_bits("y", attention_paged(**call, gate=gate), sigmoid_gate(attention_paged(**call), gate))


ONE_EACH = {"positions": i32(7, 0, 2), "block_table": i32([4, 0], [1, 2], [3, 5])}
SEQUENCE = {"positions": np.array(2, np.int32), "block_table": i32(4, 0)}


@pytest.mark.parametrize("where", [ONE_EACH, SEQUENCE], ids=["batch", "sequence"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("gated", "normed", "values"), [(True, True, "v"), (False, True, "k"), (False, False, "v")])
def test_attention_prepare_is_its_ops_one_after_the_other(gated, normed, values, dtype, where, rng):
    T, H, Hkv, D, width = 3, 4, 2, 10, 6
    q = normal(rng, T, H * D * (1 + gated), dtype=dtype)
    k, v = normal(rng, T, Hkv * D, dtype=dtype), normal(rng, T, Hkv * D, dtype=dtype) if values == "v" else None
    q_w, k_w = (normal(rng, D, dtype="bfloat16") if normed else None for _ in range(2))
    pages, table = [normal(rng, 6, 4, Hkv * D, dtype=dtype) for _ in range(2)], rope_inv_freq(width, 100.0)
    into = [page.copy() for page in pages]
    form = {"rotary_dim": width, "mscale": 1.2, "eps": 0.01, "gated": gated, "norm_values": values == "k"}
    at, blocks = where["positions"], where["block_table"]
    got = attention_prepare(q, k, v, q_w, k_w, table, at, *pages, blocks, H, **form)

    def turned(x, weight):
        if weight is None:
            return rope(x, table, at, width, 1.2)
        return head_norm_rope(x, weight, table, at, 0.01, width, 1.2)

    heads = q.reshape(T, H, -1)
    want = split_q_gate(heads) if gated else (heads,)
    want = (turned(want[0], q_w), *want[1:])
    keys = k.reshape(T, Hkv, D)
    value = rms_norm(keys, None, 0.01) if v is None else v
    kv_pages_append(turned(keys, k_w), value, *into, blocks, at)
    for name, a, b in zip(("q", "gate"), got if gated else (got,), want, strict=False):
        assert_same_bits(name, a, b)
    for name, a, b in zip(("key_pages", "value_pages"), pages, into, strict=True):
        assert_same_bits(name, a, b)


# -- refusals ----------------------------------------------------------------------------------------------------------


HALF = {"k_cache": zeros(6, 16, dtype="float16"), "v_cache": zeros(6, 10, dtype="float16")}
ONE = {"k_cache": zeros(6, 16), "v_cache": zeros(6, 10), "scale": 0.5}
SLOTS = {"q": zeros(3, 4, 8), "k_cache": zeros(5, 6, 16), "v_cache": zeros(5, 6, 10), "scale": 0.5}
PAGES = {"q": zeros(3, 4, 8), "k_pages": zeros(5, 2, 16), "v_pages": zeros(5, 2, 10), "scale": 0.5}
SCORES = {"q": zeros(4, 8), "k_cache": zeros(6, 16), "scale": 0.5}
HEADS = {"q": zeros(2, 32), "k": zeros(2, 16), "v": zeros(2, 16), "q_norm": zeros(8), "k_norm": None}
WHERE = {"inv_freq": zeros(4), "positions": i32(3, 0), "block_table": i32([0, 1], [2, 9])}
VALID: dict[str, dict[str, Any]] = {
    "attention_scores": {**SCORES, "seq_len": 5, "heads_per_kv": 2, "seq_stride": 7},
    "attention_softmax": {"scores": zeros(4, 7), "seq_len": 5},
    "attention_values": {"scores": zeros(4, 7), "v_cache": zeros(6, 10), "seq_len": 5, "heads_per_kv": 2},
    "split_q_gate": {"q_proj": zeros(3, 4, 10)},
    "attention_decode": {"q": zeros(4, 8), **ONE, "seq_len": 5},
    "attention_decode slots": {**SLOTS, "seq_len": i32(1, 2, 3), "slots": i32(4, 0, 2)},
    "attention_prefill": {"q": zeros(3, 4, 8), **ONE, "start": 3},
    "attention_prefill pages": {**SLOTS, "start": 8, "block_table": i32(0, 4, 9)},
    "attention_paged": {**PAGES, "block_table": i32([0, 1], [2, 9], [4, 3]), "lengths": i32(4, 2, 3)},
    "attention_prepare": {**HEADS, "H": 4, **WHERE, "key_pages": zeros(5, 2, 16), "value_pages": zeros(5, 2, 16)},
}
REFUSED: dict[str, list[tuple[dict[str, Any], type, str]]] = {
    "attention_scores": [
        ({"q": zeros(4, 6)}, ShapeError, "k_cache has heads of 8, expected 6 as q"),
        ({"q": zeros(0, 8)}, ShapeError, "q has shape (0, 8), expected no empty axis"),
        ({"k_cache": zeros(6, 15)}, ShapeError, "k_cache has rows of 15, expected a multiple of 2 (key-value heads)"),
        ({"k_cache": zeros(6, 16, dtype="float16")}, DTypeError, "k_cache has dtype float16, expected float32 as q"),
        ({"heads_per_kv": 3}, InvalidArgument, "heads_per_kv is 3, expected a divisor of 4 (query heads)"),
        ({"heads_per_kv": 0}, InvalidArgument, "heads_per_kv is 0, expected at least 1"),
        ({"seq_len": 7}, InvalidArgument, "seq_len is 7, expected 0 to 6 (rows of k_cache)"),
        ({"seq_len": -1}, InvalidArgument, "seq_len is -1, expected 0 to 6 (rows of k_cache)"),
        ({"seq_stride": 4}, InvalidArgument, "seq_stride is 4, expected at least 5 (seq_len)"),
        ({"scale": float("nan")}, InvalidArgument, "scale is nan, expected a finite number"),
        ({"scale": None}, DTypeError, "scale is None, expected a float"),
    ],
    "attention_softmax": [
        ({"scores": zeros(4)}, ShapeError, "scores has shape (4,), expected [H, seq_stride]"),
        ({"seq_len": 8}, InvalidArgument, "seq_len is 8, expected 0 to 7 (columns of scores)"),
        ({"seq_len": -1}, InvalidArgument, "seq_len is -1, expected 0 to 7 (columns of scores)"),
    ],
    "attention_values": [
        ({"seq_len": 7}, InvalidArgument, "seq_len is 7, expected 0 to 6 (rows of v_cache)"),
        ({"scores": zeros(4, 4)}, InvalidArgument, "seq_len is 5, expected 0 to 4 (columns of scores)"),
        ({"v_cache": zeros(6, 9)}, ShapeError, "v_cache has rows of 9, expected a multiple of 2 (key-value heads)"),
        ({"v_cache": zeros(6, 10, dtype="float16")}, DTypeError, "v_cache has dtype float16, expected float32 as"),
        ({"heads_per_kv": 3}, InvalidArgument, "heads_per_kv is 3, expected a divisor of 4 (query heads)"),
    ],
    "split_q_gate": [
        ({"q_proj": zeros(3, 4, 9)}, ShapeError, "q_proj has shape (3, 4, 9), expected an even last axis"),
        ({"q_proj": zeros(3, 0, 8)}, ShapeError, "q_proj has shape (3, 0, 8), expected no empty axis but the first"),
        ({"q_proj": zeros(4, 10)}, ShapeError, "q_proj has shape (4, 10), expected [T, H, 2D]"),
    ],
    "attention_decode": [
        ({"q": zeros(4, 7)}, ShapeError, "k_cache has rows of 16, expected a multiple of 7 (the width of a head of q)"),
        ({"q": zeros(3, 8)}, ShapeError, "q has 3 heads, expected a multiple of 2 (the heads of k_cache)"),
        ({"q": zeros(2, 4, 8)}, ShapeError, "q has shape (2, 4, 8), expected [H, D]"),
        ({"v_cache": zeros(6, 9)}, ShapeError, "v_cache has rows of 9, expected a multiple of 2 (the heads of"),
        ({"v_cache": zeros(5, 10)}, ShapeError, "v_cache has shape (5, 10), expected (6,) in front as k_cache"),
        (HALF, DTypeError, "k_cache has dtype float16, expected float32 as q"),
        ({"seq_len": 7}, InvalidArgument, "seq_len is 7, expected 0 to 6 (positions in the cache)"),
        ({"seq_len": -1}, InvalidArgument, "seq_len is -1, expected 0 or more"),
        ({"seq_len": np.array(7, np.int32)}, InvalidArgument, "seq_len has 7, expected 0 to 6 (6 positions"),
        ({"seq_len": np.array(-1, np.int32)}, InvalidArgument, "seq_len has -1, expected 0 to 6 (6 positions"),
        ({"window": 0}, InvalidArgument, "window is 0, expected at least 1"),
        ({"scale": float("inf")}, InvalidArgument, "scale is inf, expected a finite number"),
        ({"slots": i32(0)}, ShapeError, "seq_len is one number, expected int32 (4,)"),
    ],
    "attention_decode slots": [
        ({"slots": None}, ShapeError, "seq_len has one value per row, expected slots"),
        ({"slots": i32(4, 0, 5)}, InvalidArgument, "slots has 5, expected 0 to 4 (5 slots)"),
        ({"slots": i32(4, 0)}, ShapeError, "slots has shape (2,), expected (3,)"),
        ({"seq_len": i32(1, 7, 3)}, InvalidArgument, "seq_len has 7, expected 0 to 6 (6 positions"),
        ({"seq_len": i32(1, 2)}, ShapeError, "seq_len has shape (2,), expected (3,)"),
    ],
    "attention_prefill": [
        ({"start": 4}, InvalidArgument, "start + T is 7, expected 0 to 6 (positions in the cache)"),
        ({"start": -1}, InvalidArgument, "start is -1, expected 0 or more"),
        ({"start": np.array(4, np.int32)}, InvalidArgument, "start is 4, expected 0 to 3 (3 rows in 6 positions)"),
        ({"start": np.array(-1, np.int32)}, InvalidArgument, "start is -1, expected 0 to 3 (3 rows in 6 positions)"),
        ({"start": i32(0, 1, 2)}, ShapeError, "start has one value per row, expected one number"),
        ({"q": zeros(4, 8)}, ShapeError, "q has shape (4, 8), expected [T, H, D]"),
        ({"q": zeros(3, 5, 8)}, ShapeError, "q has 5 heads, expected a multiple of 2 (the heads of k_cache)"),
        ({"window": -2}, InvalidArgument, "window is -2, expected at least 1"),
        (HALF, DTypeError, "k_cache has dtype float16, expected float32 as q"),
    ],
    "attention_prefill pages": [
        ({"start": 16}, InvalidArgument, "start + T is 19, expected 0 to 18 (positions in the cache)"),
        ({"start": 10}, InvalidArgument, "block_table has 9, expected 0 to 4 (5 pages)"),
        ({"block_table": i32(0, -1)}, InvalidArgument, "block_table has -1, expected 0 to 4 (5 pages)"),
        ({"block_table": i32([0, 1])}, ShapeError, "block_table has shape (1, 2), expected [n]"),
    ],
    "attention_paged": [
        ({"lengths": i32(4, 5, 3)}, InvalidArgument, "lengths has 5, expected 0 to 4 (4 positions in block_table)"),
        ({"lengths": i32(4, -1, 3)}, InvalidArgument, "lengths has -1, expected 0 to 4 (4 positions in block_table)"),
        ({"lengths": i32(4, 3, 3)}, InvalidArgument, "block_table has 9, expected 0 to 4 (5 pages)"),
        ({"lengths": i32(4, 2)}, ShapeError, "lengths has shape (2,), expected (3,)"),
        ({"lengths": 4}, DTypeError, "lengths is 4, expected an array (NumPy or torch)"),
        ({"block_table": i32(0, 1, 2)}, ShapeError, "block_table has shape (3,), expected [B, n]"),
        ({"block_table": i32([0, 1])}, ShapeError, "block_table has shape (1, 2), expected 3 rows"),
        ({"v_pages": zeros(5, 3, 10)}, ShapeError, "v_pages has shape (5, 3, 10), expected (5, 2) in front as k_pages"),
        ({"q": zeros(3, 3, 8)}, ShapeError, "q has 3 heads, expected a multiple of 2 (the heads of k_pages)"),
        ({"gate": zeros(3, 4, 8)}, ShapeError, "gate has shape (3, 4, 8), expected (3, 4, 5) (as the result)"),
        ({"gate": zeros(3, 4, 5, dtype="float16")}, DTypeError, "gate has dtype float16, expected float32 as q"),
    ],
    "attention_prepare": [
        ({"q": zeros(2, 31)}, ShapeError, "q has shape (2, 31), expected a last axis of 4 heads"),
        ({"q": zeros(2, 32), "gated": True, "k_norm": zeros(8)}, ShapeError, "q_norm has shape (8,), expected (4,)"),
        ({"q": zeros(2, 3)}, ShapeError, "q has shape (2, 3), expected a last axis of 4 heads"),
        ({"k": zeros(2, 24), "v": None}, ShapeError, "k has shape (2, 24), expected heads of 8 whose number divides 4"),
        ({"v": zeros(2, 8)}, ShapeError, "v has shape (2, 8), expected (2, 16) (as k)"),
        ({"v": zeros(2, 16, dtype="float16")}, DTypeError, "v has dtype float16, expected float32 as q"),
        ({"k_norm": zeros(4)}, ShapeError, "k_norm has shape (4,), expected (8,) (the width of a head)"),
        ({"inv_freq": zeros(3)}, ShapeError, "inv_freq has shape (3,), expected (4,) (rotary_dim / 2)"),
        ({"rotary_dim": 9}, InvalidArgument, "rotary_dim is 9, expected an even number from 2 to 8"),
        ({"key_pages": zeros(5, 2, 8)}, ShapeError, "k has shape (2, 16), expected rows of 8 as key_pages"),
        ({"value_pages": zeros(4, 2, 16)}, ShapeError, "value_pages has shape (4, 2, 16), expected (5, 2) in front as"),
        ({"positions": i32(4, 0)}, InvalidArgument, "positions has 4, expected 0 to 3 (4 positions)"),
        ({"positions": i32(0, 3)}, InvalidArgument, "block_table has 9, expected 0 to 4 (5 pages)"),
        ({"block_table": i32(0, 1)}, ShapeError, "block_table has shape (2,), expected [B, n]"),
        ({"H": 0}, InvalidArgument, "H is 0, expected at least 1"),
    ],
}


@pytest.mark.parametrize(
    ("form", "change", "error", "message"), [(form, *row) for form, rows in REFUSED.items() for row in rows]
)
def test_attention_names_the_argument_and_what_it_expected(form, change, error, message):
    assert_refused(ops.REGISTRY[form.split()[0]], {**VALID[form], **change}, error, message)


@pytest.mark.parametrize("form", VALID)
def test_attention_accepts_the_calls_that_the_refusals_start_from(form):
    ops.REGISTRY[form.split()[0]](**VALID[form])


def test_attention_paged_refuses_a_ring_shorter_than_what_it_reads(rng):
    q, k, v = normal(rng, 1, 2, 4), normal(rng, 3, 2, 4), normal(rng, 3, 2, 4)
    ring = {"block_table": i32([0, 1, 2, 0, 1]), "lengths": i32(9), "scale": 1.0}
    call = {"q": q, "k_pages": k, "v_pages": v, **ring}
    message = "block_table has a page twice in positions 1 to 8, expected distinct pages"
    assert_refused(ops.attention_paged, {**call, "window": 8}, InvalidArgument, message)
    assert ops.attention_paged(**call, window=5).shape == (1, 2, 4)


def test_sinks_take_part_in_the_sum_alone(rng):
    """A sink is a key that scores the same for every query and has a value of 0."""
    q, k, v = normal(rng, 1, 4, 8), normal(rng, 1, 16, 16), normal(rng, 1, 16, 16)
    sinks = np.float32([-3, 0, 2, 50])
    where = {"block_table": i32([0]), "lengths": i32(5), "scale": 0.5}
    y = ops.attention_paged(q, k, v, **where, sinks=sinks)
    for h in range(4):
        keys, values = k[0, :5, h // 2 * 8 :][:, :8], v[0, :5, h // 2 * 8 :][:, :8]
        scores = np.append(keys.astype(np.float64) @ q[0, h] * 0.5, sinks[h])
        weights = np.exp(scores - scores.max())
        want = (weights[:5] / weights.sum()) @ values.astype(np.float64)
        np.testing.assert_allclose(y[0, h], want, rtol=2e-5, atol=1e-6)
    with pytest.raises(ShapeError, match=r"^attention_paged: sinks has shape \(3,\), expected \(4,\)"):
        ops.attention_paged(q, k, v, **where, sinks=sinks[:3])
