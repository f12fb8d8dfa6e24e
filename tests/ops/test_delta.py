"""Gated DeltaNet and Kimi Delta Attention against torch, transformers and MLX, by hand, and cut in pieces."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.gated_delta import gated_delta_ops
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

import penstock
from penstock import ops
from penstock.dtypes import numpy_dtype
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.ops import (
    conv1d_causal,
    conv1d_state_update,
    gated_delta_net,
    gated_delta_step,
    gated_rms_norm,
    gdn_decay_beta,
    rms_norm_qk,
)
from penstock.ops.delta import chunkwise, recurrence
from tests.ops.common import DTYPES, EPS, assert_close, assert_refused, assert_same_bits, i32, normal, zeros


@pytest.fixture(autouse=True, scope="module")
def definition() -> Iterator[None]:
    with penstock.backend("reference"):
        yield


def assert_rounded(got: np.ndarray, want: np.ndarray, dtype: str = "float32") -> None:
    assert_close("y", got, want, EPS[dtype], np.abs(want) + 1e-4)


# -- convolution -------------------------------------------------------------------------------------------------------


def convolve(state: np.ndarray, x: np.ndarray, *cuts: int, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and last state of a sequence cut into calls."""
    state, pieces = state.copy(), np.split(x, cuts)
    outputs = []
    for piece in pieces:
        before = state.copy()
        outputs.append(conv1d_causal(piece, state, weight, out=np.full_like(piece, np.nan)))
        assert_same_bits("state", state, before)  # the convolution itself only reads it
        assert conv1d_state_update(state, piece) is None
    return np.concatenate(outputs), state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("W", [1, 2, 4, 5])
@pytest.mark.parametrize("T", [0, 1, 2, 3, 7])
def test_conv1d_causal_matches_torch(T, W, dtype, rng):
    x, state = normal(rng, T, 6, dtype=dtype), normal(rng, W - 1, 6, dtype=dtype)
    weight = normal(rng, 6, W, dtype="bfloat16")
    both = torch.from_numpy(np.concatenate([state, x]).astype(np.float64).T)[None]
    want = np.zeros((0, 6))
    if T:
        taps = torch.from_numpy(weight.astype(np.float64))[:, None]
        sums = torch.nn.functional.conv1d(both, taps, groups=6)
        want = torch.nn.functional.silu(sums)[0].T.numpy()
        assert_rounded(conv1d_causal(x, state, weight, act="none"), sums[0].T.numpy(), dtype)
    assert_rounded(conv1d_causal(x, state, weight), want, dtype)
    if dtype != "float32":
        assert_rounded(conv1d_causal(x, state.astype(np.float32), weight), want, dtype)  # a float32 state will do


def test_conv1d_causal_by_hand():
    """The last tap meets the current token, the first the oldest."""
    state, x = np.array([[1], [2], [3]], "f4"), np.array([[4], [5]], "f4")
    y = conv1d_causal(x, state, np.array([[1000, 100, 10, 1]], "f4"))
    np.testing.assert_array_equal(y, [[1234], [2345]])  # silu(1234) is 1234 in float32
    y = conv1d_causal(x, state, np.array([[0, 0, 0, -1]], "f4"))
    np.testing.assert_allclose(y, [[-4 / (1 + math.e**4)], [-5 / (1 + math.e**5)]], rtol=6e-8)
    y = conv1d_causal(x, state, np.array([[0, 0, 100, -1]], "f4"), act="none")
    np.testing.assert_array_equal(y, [[296], [395]])


def test_conv1d_commit_moves_on_by_what_was_accepted(rng):
    """As if the accepted rows had come one by one, whatever else was kept."""
    for count in range(4):
        state, x = normal(rng, 3, 5, 6), normal(rng, 3, 6)
        want = state[1, :2].copy()
        kept = {"starts": i32(0, 3), "keep": i32(3), "width": 3}
        conv1d_state_update(state, x, i32(1), **kept)
        ops.conv1d_commit(state, i32(1), i32(count), 3)
        for row in x[:count]:
            conv1d_state_update(want, row[None])
        assert_same_bits(f"{count} accepted", state[1, :2], want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 17])
def test_conv1d_in_chunks_equals_whole(chunk, dtype, rng):
    """H10, bit for bit, the state included."""
    x, state, weight = normal(rng, 39, 5, dtype=dtype), normal(rng, 3, 5, dtype=dtype), normal(rng, 5, 4)
    whole = convolve(state, x, weight=weight)
    pieces = convolve(state, x, *range(chunk, 39, chunk), weight=weight)
    for name, got, want in zip(("y", "state"), pieces, whole, strict=True):
        assert_same_bits(name, got, want)


@given(T=st.integers(0, 9), cut=st.integers(0, 9), W=st.integers(1, 6), C=st.integers(1, 3))
def test_conv1d_of_any_shape_may_be_cut_anywhere(T, cut, W, C):
    rng = np.random.default_rng(T * 10 + cut)
    x, state, weight = normal(rng, T, C), normal(rng, W - 1, C), normal(rng, C, W)
    whole = convolve(state, x, weight=weight)
    for name, got, want in zip(("y", "state"), convolve(state, x, min(cut, T), weight=weight), whole, strict=True):
        assert_same_bits(name, got, want)


@pytest.mark.parametrize(
    ("T", "want"), [(0, [1, 2, 3]), (1, [2, 3, 10]), (2, [3, 10, 11]), (3, [10, 11, 12]), (4, [11, 12, 13])]
)
@pytest.mark.parametrize(("dtype", "kept"), [*zip(DTYPES, DTYPES, strict=True), *((d, "float32") for d in DTYPES[1:])])
def test_conv1d_state_update_keeps_the_last_rows(T, want, dtype, kept):
    """H11: for T < 3 rows of the old state move up. The state is float32 or of x's dtype."""
    state = np.array([[1, -1], [2, -2], [3, -3]], numpy_dtype(kept))
    x = (10 + np.arange(T))[:, None] * np.array([1, -1])
    conv1d_state_update(state, x.astype(numpy_dtype(dtype)))
    np.testing.assert_array_equal(state.astype("f4"), np.array(want)[:, None] * [1, -1])


@pytest.mark.parametrize("W", [1, 2, 4])
def test_conv1d_slots_equal_single_calls(W, rng):
    x, state, weight, slots = normal(rng, 3, 5), normal(rng, 5, W - 1, 5), normal(rng, 5, W), i32(4, 0, 2)
    want = state.copy()
    rows = [conv1d_causal(x[b : b + 1], want[slot], weight) for b, slot in enumerate(slots)]
    for b, slot in enumerate(slots):
        conv1d_state_update(want[slot], x[b : b + 1])
    assert_same_bits("y", conv1d_causal(x, state, weight, slots), np.concatenate(rows))
    conv1d_state_update(state, x, slots)
    assert_same_bits("state", state, want)
    assert conv1d_causal(x[:0], state, weight, i32()).shape == (0, 5)
    conv1d_state_update(state, x[:0], i32())
    assert_same_bits("state", state, want)


# -- gates -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_gdn_decay_beta_matches_torch(dtype, rng):
    alpha, beta = normal(rng, 7, 5, dtype=dtype, scale=4), normal(rng, 7, 5, dtype=dtype, scale=4)
    A_log, dt_bias = normal(rng, 5), normal(rng, 5, dtype="bfloat16")
    a, A, bias, b = (torch.from_numpy(x.astype(np.float64)) for x in (alpha, A_log, dt_bias, beta))
    want = torch.exp(-A.exp() * torch.nn.functional.softplus(a + bias, threshold=1000)), torch.sigmoid(b)
    for name, got, exact in zip("gb", gdn_decay_beta(alpha, beta, A_log, dt_bias), want, strict=True):
        assert got.dtype == np.float32
        assert_close(name, got, exact.numpy(), EPS["float32"], np.abs(exact.numpy()) + 1e-9)


@pytest.mark.parametrize(
    ("z", "A_log", "g"),
    [
        (100, -20, math.exp(-100 * math.exp(-20))),  # log(1 + exp(z)) overflows float32: g would be 0
        (1000, -10, math.exp(-1000 * math.exp(-10))),
        (-30, 20, math.exp(-math.exp(20 - 30))),  # … and loses exp(−30): g would be 1
        (-100, 100, math.exp(-1)),
        (100, 5, 0),
        (-100, 1, 1),
        (100, -100, 1),
        (0, 0, 0.5),
    ],
)
def test_gdn_decay_beta_is_stable_at_the_extremes(z, A_log, g):
    alpha, A, none = np.array([[z - 2]], "f4"), np.array([A_log], "f4"), np.zeros((1, 1), "f4")
    got, _ = gdn_decay_beta(alpha, none, A, np.array([2], "f4"))
    assert got[0, 0] == pytest.approx(g, rel=1e-7)
    _, strength = gdn_decay_beta(none, np.array([[z]], "f4"), A, A)
    assert strength[0, 0] == pytest.approx(1 / (1 + math.exp(-z)) if z > -700 else 0, rel=1e-7)


# -- delta rule --------------------------------------------------------------------------------------------------------

HEADS = pytest.mark.parametrize(("Hk", "Hv", "Dk", "Dv"), [(2, 2, 5, 3), (2, 4, 4, 6), (1, 4, 3, 3), (3, 6, 8, 2)])


def tokens(rng: Any, T: int, Hk: int, Hv: int, Dk: int, Dv: int, dtype: str = "float32") -> tuple[np.ndarray, ...]:
    """qkv with normalised q and k, g, b and a state."""
    qkv = rms_norm_qk(normal(rng, T, 2 * Hk * Dk + Hv * Dv, dtype=dtype), Hk, Dk, Hk * Dk)
    g, b = (rng.uniform(low, 1, (T, Hv)).astype(np.float32) for low in (0.5, 0))
    return qkv, g, b, normal(rng, Hv, Dv, Dk)


def parts(qkv: np.ndarray, Hk: int, Hv: int, Dk: int, Dv: int) -> tuple[np.ndarray, ...]:
    """q, k [T, Hk, Dk] and v [T, Hv, Dv] of the rows."""
    q, k, v = np.split(qkv, [Hk * Dk, 2 * Hk * Dk], axis=1)
    return q.reshape(-1, Hk, Dk), k.reshape(-1, Hk, Dk), v.reshape(-1, Hv, Dv)


def test_gated_delta_net_by_hand():
    """Two tokens, one key head of 2 for two value heads of 1. Every number is exact.

    head 0: S = [1, 2]; g = ½ → [½, 1]; S·k = ½; δ = (4 − ½)·½ = 1¾; S = [2¼, 1]; y = S·q = 4¼
            g = 1; k = (0, 2): S·k = 2; δ = (3 − 2)·1 = 1; S = [2¼, 3]; y = 3
    head 1: S = [0, 0]; δ = (−8)·1; S = [−8, 0]; y = −16;   g = 0 → [0, 0]; δ = 6·½ = 3; S = [0, 6]; y = 6
    """
    state = np.array([[[1, 2]], [[0, 0]]], "f4")
    qkv = np.array([[1, 2, 1, 0, 4, -8], [0, 1, 0, 2, 3, 6]], "f4")
    qkv[0, :2] = 2, -0.25
    g, b = np.array([[0.5, 1], [1, 0]], "f4"), np.array([[0.5, 1], [1, 0.5]], "f4")
    y = gated_delta_net(state, qkv, g, b, 1, 2, 2, 1)
    np.testing.assert_array_equal(y[..., 0], [[4.25, -16], [3, 6]])
    np.testing.assert_array_equal(state[:, 0], [[2.25, 3], [0, 6]])


@HEADS
@pytest.mark.parametrize("method", ["auto", "step", "sequential", "chunkwise"])
def test_gated_delta_net_matches_transformers(method, Hk, Hv, Dk, Dv, rng):
    """They scale q by Dk^(−1/2) themselves, take ln g, and keep the transposed state."""
    qkv, g, b, state = tokens(rng, 21, Hk, Hv, Dk, Dv)
    q, k, v = parts(qkv, Hk, Hv, Dk, Dv)
    q, k = (np.repeat(x, Hv // Hk, axis=1) for x in (q * np.float32(Dk**0.5), k))
    inputs = [torch.from_numpy(x)[None] for x in (q, k, v, np.log(g), b)]
    start = torch.from_numpy(state.swapaxes(1, 2).copy())[None]
    got, scale = gated_delta_net(state, qkv, g, b, Hk, Hv, Dk, Dv, method=method, chunk=8), np.abs(state).max()
    for rule in (torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule):
        want, last = rule(*inputs, initial_state=start.clone(), output_final_state=True)
        assert_close("y", got, want[0].numpy(), 2e-6, scale)
        assert_close("state", state, last[0].swapaxes(1, 2).numpy(), 2e-6, scale)


@HEADS
def test_gated_delta_net_matches_mlx(Hk, Hv, Dk, Dv, rng):
    qkv, g, b, state = tokens(rng, 9, Hk, Hv, Dk, Dv)
    inputs = (mx.array(np.ascontiguousarray(x))[None] for x in (*parts(qkv, Hk, Hv, Dk, Dv), g, b, state))
    mx.disable_compile()  # MLX compiles with the C++ compiler of the machine
    want, last = (np.array(x)[0] for x in gated_delta_ops(*inputs))
    mx.enable_compile()
    got, scale = gated_delta_net(state, qkv, g, b, Hk, Hv, Dk, Dv), np.abs(state).max()
    assert_close("y", got, want, 2e-6, scale)
    assert_close("state", state, last, 2e-6, scale)


@pytest.mark.parametrize("method", ["step", "chunkwise"])
def test_gated_delta_net_by_channel_matches_transformers_and_mlx(method, rng):
    """transformers take ln g, and keep the transposed state."""
    H, Dk, Dv = 3, 10, 7
    qkv, _, b, state = tokens(rng, 21, H, H, Dk, Dv)
    g = rng.uniform(0.05, 1, (21, H, Dk)).astype(np.float32)
    q, k, v = parts(qkv, H, H, Dk, Dv)
    inputs = [torch.from_numpy(x)[None] for x in (q * np.float32(Dk**0.5), k, v, np.log(g), b)]
    start = torch.from_numpy(state.swapaxes(1, 2).copy())[None]
    of_mlx = [mx.array(np.ascontiguousarray(x))[None] for x in (q, k, v, g, b, state)]
    got, scale = gated_delta_net(state, qkv, g, b, H, H, Dk, Dv, method=method, chunk=8), np.abs(state).max()
    for rule in (recurrent_kimi_delta_attention, chunk_kimi_delta_attention):
        want, last = rule(*inputs, initial_state=start.clone(), output_final_state=True)
        assert_close("y", got, want[0].numpy(), 4e-6, scale)
        assert_close("state", state, last[0].swapaxes(1, 2).numpy(), 4e-6, scale)
    mx.disable_compile()
    want, last = (np.array(x)[0] for x in gated_delta_ops(*of_mlx))
    mx.enable_compile()
    assert_close("y", got, want, 2e-6, scale)
    assert_close("state", state, last, 2e-6, scale)


def test_equal_decays_of_channels_are_a_decay_of_the_head(rng):
    qkv, g, b, state = tokens(rng, 21, 2, 4, 6, 5)
    other, spread = state.copy(), np.repeat(g[..., None], 6, axis=2)
    for method in ("step", "chunkwise"):
        want = gated_delta_net(state, qkv, g, b, 2, 4, 6, 5, method=method)
        assert_rounded(gated_delta_net(other, qkv, spread, b, 2, 4, 6, 5, method=method), want)
    assert_rounded(other, state)
    alpha, bias = normal(rng, 9, 4), normal(rng, 4)
    one, _ = gdn_decay_beta(alpha, alpha, bias, bias)
    many, _ = gdn_decay_beta(np.repeat(alpha[..., None], 3, axis=2), alpha, bias, np.repeat(bias[:, None], 3, axis=1))
    np.testing.assert_array_equal(many, np.repeat(one[..., None], 3, axis=2))


def test_rms_norm_qk_before_gated_delta_net_is_what_transformers_normalise(rng):
    """Their l2norm adds 1e-6 to the sum of squares; adding it to the mean shows for short vectors."""
    Hk, Hv, Dk, Dv = 2, 4, 16, 3
    raw = normal(rng, 12, 2 * Hk * Dk + Hv * Dv, scale=2e-3)
    raw[:, 2 * Hk * Dk :] *= 500
    _, g, b, start = tokens(rng, 12, Hk, Hv, Dk, Dv)
    q, k, v = parts(raw, Hk, Hv, Dk, Dv)
    q, k = (np.repeat(x, Hv // Hk, axis=1) for x in (q, k))
    inputs = [torch.from_numpy(x)[None] for x in (q, k, v, np.log(g), b)]
    initial = torch.from_numpy(start.swapaxes(1, 2).copy())[None]
    want, _ = torch_recurrent_gated_delta_rule(*inputs, initial_state=initial, use_qk_l2norm_in_kernel=True)
    sizes, scale = (Hk, Hv, Dk, Dv), np.abs(want.numpy()).max()
    got = gated_delta_net(start.copy(), rms_norm_qk(raw, Hk, Dk, Hk * Dk), g, b, *sizes)
    assert_close("y", got, want[0].numpy(), 4e-6, scale)
    mean = gated_delta_net(start.copy(), rms_norm_qk(raw, Hk, Dk, Hk * Dk, eps_on="mean"), g, b, *sizes)
    assert np.abs(mean - got).max() > 1e-2 * scale


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_delta_net_rounds_outputs_to_the_dtype_of_qkv(dtype, rng):
    sizes = (2, 4, 5, 3)
    qkv, g, b, state = tokens(rng, 8, *sizes, dtype=dtype)
    want = gated_delta_net(state.copy(), qkv.astype(np.float32), g, b, *sizes)
    got = gated_delta_net(state, qkv, g, b, *sizes, out=np.full((8, 4, 3), np.nan, qkv.dtype))
    assert_rounded(got, want.astype(np.float64), dtype)


def heads(rng: np.random.Generator, T: int, Hv: int = 3, Dk: int = 5, Dv: int = 4) -> tuple[np.ndarray, ...]:
    """float64 state, q, k, v, g, b for `recurrence` and `chunkwise`, keys of length 1."""
    q, k, v = (rng.standard_normal((T, Hv, width)) for width in (Dk, Dk, Dv))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return rng.standard_normal((Hv, Dv, Dk)), q, k, v, rng.uniform(0.3, 1, (T, Hv)), rng.uniform(0, 1, (T, Hv))


def assert_forms_agree(call: tuple[np.ndarray, ...], chunk: int, rel: float) -> None:
    (y, last), (chunked, chunked_last) = recurrence(*call), chunkwise(*call, chunk)
    assert_close("y", chunked, y, rel, np.abs(y).max(initial=1))
    assert_close("state", chunked_last, last, rel, np.abs(last).max())


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_chunkwise_equals_recurrence(chunk, rng):
    for T in range(34):  # last chunks of every length
        assert_forms_agree(heads(rng, T), chunk, 1e-14)


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
@pytest.mark.parametrize(
    "zeros_at",
    [[0], [17], [32], [15, 16], [0, 1, 2, 3, 4, 5, 6, 7], [3, 9, 20, 32], list(range(33))],
    ids=["first", "middle", "last", "border", "eight", "several", "all"],
)
def test_chunkwise_takes_decays_of_exactly_zero(zeros_at, chunk, rng):
    """H7. A floor of 1e-30 stands in for ln 0; sums of such logarithms cost two digits."""
    state, q, k, v, g, b = heads(rng, 33)
    g[zeros_at, :2] = 0  # the third head forgets nothing
    assert_forms_agree((state, q, k, v, g, b), chunk, 5e-13)


@pytest.mark.parametrize("method", ["step", "chunkwise"])
def test_gated_delta_net_is_finite_for_every_length_and_forgets_all_at_zero(method, rng):
    """H6 and H7 through the op, outputs filled with NaN before."""
    sizes = (1, 2, 4, 3)
    for T in range(1, 34):
        qkv, g, b, state = tokens(rng, T, *sizes)
        g[T // 2] = 0
        other = state + 1
        y = gated_delta_net(state, qkv, g, b, *sizes, method=method, out=np.full((T, 2, 3), np.nan, "f4"))
        z = gated_delta_net(other, qkv, g, b, *sizes, method=method)
        assert np.isfinite(y).all()
        assert np.isfinite(state).all()
        assert_same_bits("after", y[T // 2 :], z[T // 2 :])  # what was before the zero does not matter any more
        assert_same_bits("state", state, other)


@given(
    T=st.integers(0, 12),
    cut=st.integers(0, 12),
    dtype=st.sampled_from(DTYPES),
    kept=st.sampled_from(("float32", "bfloat16")),
)
def test_gated_delta_net_may_be_cut_anywhere(T, cut, dtype, kept):
    sizes, cut = (1, 2, 3, 2), min(cut, T)
    qkv, g, b, state = tokens(np.random.default_rng(T), T, *sizes, dtype=dtype)
    state = state.astype(numpy_dtype(kept))
    whole, pieces = state.copy(), state.copy()
    y = gated_delta_net(whole, qkv, g, b, *sizes)
    both = [gated_delta_net(pieces, qkv[part], g[part], b[part], *sizes) for part in (slice(cut), slice(cut, T))]
    assert_same_bits("y", np.concatenate(both), y)
    assert_same_bits("state", pieces, whole)
    if T == 0:
        assert_same_bits("nothing happened", whole, state)


@pytest.mark.parametrize("method", ["step", "chunkwise"])
def test_gated_delta_net_rounds_a_bfloat16_state_once_and_its_output_comes_before(method, rng):
    sizes = (2, 4, 5, 3)
    qkv, g, b, state = tokens(rng, 1, *sizes)
    state = state.astype(numpy_dtype("bfloat16"))
    whole, half = state.astype(np.float32), state.copy()
    want = gated_delta_net(whole, qkv, g, b, *sizes, method=method)
    assert_same_bits("y", gated_delta_net(half, qkv, g, b, *sizes, method=method), want)
    assert half.dtype == state.dtype
    assert_same_bits("state", half, whole.astype(state.dtype))
    assert not np.array_equal(half.astype(np.float32), whole)


def test_gated_delta_net_by_chunks_may_be_cut_between_chunks(rng):
    sizes = (1, 2, 3, 2)
    qkv, g, b, state = tokens(rng, 21, *sizes)
    whole, pieces = state.copy(), state.copy()
    y = gated_delta_net(whole, qkv, g, b, *sizes, method="chunkwise", chunk=4)
    for part in (slice(8), slice(8, 21)):
        got = gated_delta_net(pieces, qkv[part], g[part], b[part], *sizes, method="chunkwise", chunk=4)
        assert_same_bits("y", got, y[part])
    assert_same_bits("state", pieces, whole)


@pytest.mark.parametrize("method", ["auto", "step", "chunkwise"])
def test_gated_delta_net_slots_equal_single_calls(method, rng):
    sizes, slots = (2, 4, 5, 3), i32(4, 0, 2)
    qkv, g, b, _ = tokens(rng, 3, *sizes)
    state = normal(rng, 5, 4, 3, 5)
    want = state.copy()
    rows = [gated_delta_net(want[s], qkv[i : i + 1], g[i : i + 1], b[i : i + 1], *sizes) for i, s in enumerate(slots)]
    assert_same_bits("y", gated_delta_net(state, qkv, g, b, *sizes, method=method, slots=slots), np.concatenate(rows))
    assert_same_bits("state", state, want)
    assert gated_delta_net(state, qkv[:0], g[:0], b[:0], *sizes, slots=i32()).shape == (0, 4, 3)
    assert_same_bits("state", state, want)


# -- a layer's step ----------------------------------------------------------------------------------------------------


def layer(rng, dtype: str) -> dict[str, Any]:
    B, S, Hk, Hv, Dk, Dv, W = 3, 5, 2, 4, 6, 5, 4
    C = 2 * Hk * Dk + Hv * Dv
    rows = {"qkv": (B, C), "z": (B, Hv, Dv), "alpha": (B, Hv), "beta": (B, Hv), "conv_state": (S, W - 1, C)}
    call = {name: normal(rng, *shape, dtype=dtype) for name, shape in rows.items()}
    call |= {"state": normal(rng, S, Hv, Dv, Dk), "slots": i32(4, 0, 2), "conv_weight": normal(rng, C, W)}
    return call | {"A_log": normal(rng, Hv), "dt_bias": normal(rng, Hv), "norm_weight": normal(rng, Dv), "Hk": Hk}


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_delta_step_is_its_ops_one_after_the_other(dtype, kept, rng):
    call = layer(rng, dtype)
    call["state"] = call["state"].astype(numpy_dtype(kept))
    qkv, kept, state, slots, Hk = (call[name] for name in ("qkv", "conv_state", "state", "slots", "Hk"))
    kept, state, (Hv, Dv, Dk) = kept.copy(), state.copy(), state.shape[1:]
    y = conv1d_causal(qkv, kept, call["conv_weight"], slots)
    conv1d_state_update(kept, qkv, slots)
    g, b = gdn_decay_beta(call["alpha"], call["beta"], call["A_log"], call["dt_bias"])
    d = gated_delta_net(state, rms_norm_qk(y, Hk, Dk, Hk * Dk), g, b, Hk, Hv, Dk, Dv, slots=slots)
    assert_same_bits("y", gated_delta_step(**call, eps=0.1), gated_rms_norm(d, call["z"], call["norm_weight"], 0.1))
    assert_same_bits("conv_state", call["conv_state"], kept)
    assert_same_bits("state", call["state"], state)


# -- refusals ----------------------------------------------------------------------------------------------------------

CONV = {"x": zeros(5, 6), "state": zeros(3, 6)}
CONV_SLOTS = {"x": zeros(2, 6), "state": zeros(4, 3, 6), "slots": i32(3, 1)}
SIZES = {"Hk": 1, "Hv": 2, "Dk": 4, "Dv": 9}
RULE = {"qkv": zeros(5, 26), "g": zeros(5, 2), "b": zeros(5, 2), **SIZES, "state": zeros(2, 9, 4)}
ROWS = {"qkv": zeros(2, 26), "z": zeros(2, 2, 9), "alpha": zeros(2, 2), "beta": zeros(2, 2)}
STATES = {"conv_state": zeros(4, 3, 26), "state": zeros(4, 2, 9, 4), "slots": i32(3, 1)}
WEIGHTS = {"conv_weight": zeros(26, 4), "A_log": zeros(2), "dt_bias": zeros(2), "norm_weight": zeros(9)}
STEP = {**ROWS, **STATES, **WEIGHTS, "Hk": 1}
VALID: dict[str, dict[str, Any]] = {
    "conv1d_causal": {**CONV, "weight": zeros(6, 4)},
    "conv1d_causal slots": {**CONV_SLOTS, "weight": zeros(6, 4)},
    "conv1d_state_update": CONV,
    "conv1d_commit": {"state": zeros(4, 5, 6), "slots": i32(3, 1), "accepted": i32(2, 0), "width": 4},
    "conv1d_state_update slots": CONV_SLOTS,
    "gdn_decay_beta": {"alpha": zeros(5, 2), "beta": zeros(5, 2), "A_log": zeros(2), "dt_bias": zeros(2)},
    "gated_delta_net": RULE,
    "gated_delta_net slots": {**RULE, "state": zeros(7, 2, 9, 4), "slots": i32(6, 5, 4, 3, 0)},
    "gated_delta_step": STEP,
    "gdn_decay_beta by channel": {
        "alpha": zeros(5, 2, 3), "beta": zeros(5, 2), "A_log": zeros(2), "dt_bias": zeros(2, 3)
    },
    "gated_delta_net by channel": {**RULE, "g": zeros(5, 2, 4)},
    "gated_delta_step by channel": {**STEP, "alpha": zeros(2, 2, 4), "dt_bias": zeros(2, 4), "act": "sigmoid"},
}  # fmt: skip
BAD_CONV = [
    ({"x": zeros(6)}, ShapeError, "x has shape (6,), expected [T, C]"),
    ({"x": zeros(5, 0)}, ShapeError, "x has shape (5, 0), expected no empty axis but the first"),
    ({"state": zeros(3, 5)}, ShapeError, "state has shape (3, 5), expected (3, 6) (taps - 1 and channels)"),
    ({"state": zeros(1, 3, 6)}, ShapeError, "state has shape (1, 3, 6), expected [W - 1, C]"),
    ({"state": zeros(3, 6, dtype="float16")}, DTypeError, "state has dtype float16, expected float32"),
]
BAD_SLOTS = [
    ({"slots": i32(0, 4)}, InvalidArgument, "slots has 4, expected -1 to 3 (4 slots)"),
    ({"slots": i32(0, -2)}, InvalidArgument, "slots has -2, expected -1 to 3 (4 slots)"),
    ({"slots": i32(1, 1)}, InvalidArgument, "slots has the same value twice, expected distinct values"),
    ({"slots": i32(1)}, ShapeError, "slots has shape (1,), expected (2,) (one per row)"),
    ({"state": zeros(3, 6)}, ShapeError, "state has shape (3, 6), expected [S, W - 1, C]"),
]
REFUSED: dict[str, list[tuple[dict[str, Any], type, str]]] = {
    "conv1d_causal": [
        *BAD_CONV,
        ({"state": zeros(2, 6)}, ShapeError, "state has shape (2, 6), expected (3, 6) (taps - 1 and channels)"),
        ({"weight": zeros(5, 4)}, ShapeError, "weight has shape (5, 4), expected 6 rows (channels of x)"),
        ({"weight": zeros(6, 0)}, ShapeError, "weight has shape (6, 0), expected no empty axis"),
        ({"weight": zeros(6, 1, 4)}, ShapeError, "weight has shape (6, 1, 4), expected [C, W]"),
        ({"act": "gelu"}, InvalidArgument, "act is 'gelu', expected one of 'silu', 'none'"),
    ],
    "conv1d_causal slots": BAD_SLOTS,
    "conv1d_state_update": BAD_CONV,
    "conv1d_commit": [
        ({"state": zeros(4, 6)}, ShapeError, "state has shape (4, 6), expected [S, W - 1 + K, C]"),
        ({"width": 7}, ShapeError, "state has shape (4, 5, 6), expected at least 6 rows (width - 1)"),
        ({"slots": i32(3, 4)}, InvalidArgument, "slots has 4, expected -1 to 3 (4 slots)"),
        ({"accepted": i32(3, 0)}, InvalidArgument, "accepted has 3, expected 0 to 2 (2 rows can be kept)"),
        ({"accepted": i32(1)}, ShapeError, "accepted has shape (1,), expected (2,) (as slots)"),
    ],
    "conv1d_state_update slots": BAD_SLOTS,
    "gdn_decay_beta": [
        ({"beta": zeros(4, 2)}, ShapeError, "beta has shape (4, 2), expected (5, 2) (as alpha)"),
        ({"beta": zeros(5, 2, dtype="float16")}, DTypeError, "beta has dtype float16, expected float32 as alpha"),
        ({"A_log": zeros(3)}, ShapeError, "A_log has shape (3,), expected (2,) (one per value head)"),
        ({"dt_bias": zeros(1)}, ShapeError, "dt_bias has shape (1,), expected (2,) (one per value head)"),
    ],
    "gated_delta_net": [
        ({"state": zeros(2, 4, 9)}, ShapeError, "state has shape (2, 4, 9), expected (2, 9, 4) (Hv, Dv, Dk)"),
        ({"state": zeros(2, 9, 4, dtype="float16")}, DTypeError, "state has dtype float16, expected float32"),
        ({"state": zeros(1, 2, 9, 4)}, ShapeError, "state has shape (1, 2, 9, 4), expected [Hv, Dv, Dk]"),
        ({"qkv": zeros(5, 25)}, ShapeError, "qkv has shape (5, 25), expected (5, 26) (T, 2 Hk Dk + Hv Dv)"),
        ({"g": zeros(5, 1)}, ShapeError, "g has shape (5, 1), expected (5, 2) (T, Hv)"),
        ({"b": zeros(4, 2)}, ShapeError, "b has shape (4, 2), expected (5, 2) (T, Hv)"),
        ({"b": zeros(5, 2, dtype="float16")}, DTypeError, "b has dtype float16, expected float32"),
        ({"Hk": 2, "Hv": 3}, InvalidArgument, "Hv is 3, expected a multiple of 2 (Hk)"),
        ({"Dk": 0}, InvalidArgument, "Dk is 0, expected at least 1"),
        ({"chunk": 0}, InvalidArgument, "chunk is 0, expected at least 1"),
        ({"method": "fast"}, InvalidArgument, "method is 'fast', expected one of 'auto', 'step', 'sequential', "),
    ],
    "gated_delta_net slots": [
        ({"slots": i32(6, 5, 4, 3, 7)}, InvalidArgument, "slots has 7, expected -1 to 6 (7 slots)"),
        ({"slots": i32(6, 5, 4, 3, 3)}, InvalidArgument, "slots has the same value twice, expected distinct values"),
        ({"slots": i32(6, 5)}, ShapeError, "slots has shape (2,), expected (5,) (one per row)"),
        ({"state": zeros(2, 9, 4)}, ShapeError, "state has shape (2, 9, 4), expected [S, Hv, Dv, Dk]"),
    ],
    "gated_delta_step": [
        ({"slots": i32(3, 4)}, InvalidArgument, "slots has 4, expected -1 to 3 (4 slots)"),
        ({"slots": i32(3, 3)}, InvalidArgument, "slots has the same value twice, expected distinct values"),
        ({"state": zeros(2, 9, 4)}, ShapeError, "state has shape (2, 9, 4), expected [S, Hv, Dv, Dk]"),
        ({"conv_state": zeros(3, 3, 26)}, ShapeError, "conv_state has shape (3, 3, 26), expected (4, 3, 26) (slots of"),
        ({"z": zeros(2, 9, 2)}, ShapeError, "z has shape (2, 9, 2), expected (2, 2, 9) (B, Hv, Dv)"),
        ({"z": zeros(2, 2, 9, dtype="float16")}, DTypeError, "z has dtype float16, expected float32 as qkv"),
        ({"alpha": zeros(3, 2), "beta": zeros(3, 2)}, ShapeError, "alpha has shape (3, 2), expected (2, 2) (B, Hv)"),
        ({"norm_weight": zeros(8)}, ShapeError, "norm_weight has shape (8,), expected (9,) (Dv)"),
        ({"qkv": zeros(2, 25)}, ShapeError, "qkv has shape (2, 25), expected (2, 26) (B, 2 Hk Dk + Hv Dv)"),
        ({"conv_weight": zeros(25, 4)}, ShapeError, "conv_weight has shape (25, 4), expected (26, 4) (C, W)"),
        ({"Hk": 3}, InvalidArgument, "Hk is 3, expected a divisor of 2 (Hv)"),
        ({"eps": -1.0}, InvalidArgument, "eps is -1.0, expected a finite number, 0 or more"),
        ({"act": "gelu"}, InvalidArgument, "act is 'gelu', expected one of 'silu', 'sigmoid'"),
    ],
    "gdn_decay_beta by channel": [
        ({"alpha": zeros(5, 2, 3, 1)}, ShapeError, "alpha has shape (5, 2, 3, 1), expected [T, Hv] or [T, Hv, D]"),
        ({"dt_bias": zeros(2)}, ShapeError, "dt_bias has shape (2,), expected (2, 3) (as alpha)"),
        ({"A_log": zeros(2, 3)}, ShapeError, "A_log has shape (2, 3), expected (2,) (one per value head)"),
    ],
    "gated_delta_net by channel": [
        ({"g": zeros(5, 2, 9)}, ShapeError, "g has shape (5, 2, 9), expected (5, 2, 4) (T, Hv, Dk)"),
        ({"b": zeros(5, 2, 4)}, ShapeError, "b has shape (5, 2, 4), expected (5, 2) (T, Hv)"),
    ],
    "gated_delta_step by channel": [
        ({"alpha": zeros(2, 2, 9)}, ShapeError, "alpha has shape (2, 2, 9), expected (2, 2, 4) (B, Hv, Dk)"),
        ({"dt_bias": zeros(2)}, ShapeError, "dt_bias has shape (2,), expected (2, 4) (Hv, Dk)"),
    ],
}


@pytest.mark.parametrize(
    ("form", "change", "error", "message"), [(form, *row) for form, rows in REFUSED.items() for row in rows]
)
def test_delta_names_the_argument_and_what_it_expected(form, change, error, message):
    assert_refused(ops.REGISTRY[form.split()[0]], {**VALID[form], **change}, error, message)


@pytest.mark.parametrize("form", VALID)
def test_delta_accepts_the_calls_that_the_refusals_start_from(form):
    ops.REGISTRY[form.split()[0]](**copy.deepcopy(VALID[form]))
