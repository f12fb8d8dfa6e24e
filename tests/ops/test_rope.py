"""Rotary tables by their check values and against transformers; the rotation against transformers, MLX and float64."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding, apply_rotary_pos_emb

import penstock
from penstock import ops
from penstock.dtypes import round_to
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.ops import (
    head_norm_rope,
    position_scale,
    proportional_inv_freq,
    rms_norm,
    rope,
    rope_inv_freq,
    yarn_gain,
    yarn_inv_freq,
)
from tests.ops.common import DTYPES, EPS, assert_close, assert_refused, assert_same_bits, i32, normal, zeros


@pytest.fixture(autouse=True, scope="module")
def definition() -> Iterator[None]:
    with penstock.backend("reference"):
        yield


# -- tables ------------------------------------------------------------------------------------------------------------


def transformers_table(kind: str, dim: int, **parameters: Any) -> tuple[np.ndarray, float]:
    """Table and cos/sin factor that transformers makes of a configuration."""
    config = SimpleNamespace(head_dim=dim, hidden_size=dim, num_attention_heads=1, rope_parameters=parameters)
    config.standardize_rope_params = lambda: None
    make = ROPE_INIT_FUNCTIONS.get(kind, Qwen3_5TextRotaryEmbedding.compute_default_rope_parameters)
    table, factor = make(config)
    return table.numpy(), factor


@pytest.mark.parametrize(
    ("make", "sizes", "entries"),
    [
        (rope_inv_freq, (8, 1e4), {0: 1, 1: 0.1, 2: 0.01, 3: 0.001}),
        (rope_inv_freq, (8, 1e4, 4.0), {0: 0.25, 1: 0.025, 2: 0.0025, 3: 0.00025}),
        (proportional_inv_freq, (128, 1e6, 0.25), {0: 1, 1: 0.80584216, 15: 0.0392419, 16: 0, 63: 0}),
        (proportional_inv_freq, (128, 1e6, 0.25, 8.0), {0: 0.125, 1: 0.80584216 / 8, 15: 0.0392419 / 8, 16: 0}),
        (
            yarn_inv_freq,
            (32, 1e4, 4.0, 512),
            {0: 1, 1: 0.56234133, 2: 0.28234622, 3: 0.13972196, 4: 0.067857146, 5: 0.032133792, 6: 0.014682003}
            | {7: 0.0063509978, 8: 0.0024999999, 15: 4.4456985e-05},
        ),
        (
            yarn_inv_freq,
            (64, 1e4, 40.0, 4096),
            {0: 1, 10: 0.056234132, 11: 0.039006926, 16: 0.0055, 23: 3.3338038e-05, 31: 3.3338035e-06},
        ),
    ],
    ids=["plain", "plain-factor", "proportional", "proportional-factor", "yarn-small", "yarn-deepseek"],
)
def test_inv_freq_has_the_check_values(make, sizes, entries):
    table = make(*sizes)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table[list(entries)], list(entries.values()), rtol=1.2e-7)


@pytest.mark.parametrize("dim", [2, 6, 64, 256])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e7])
def test_inv_freq_is_float64_rounded_once(dim, theta):
    want = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    np.testing.assert_array_equal(rope_inv_freq(dim, theta), np.array(want, np.float32))
    np.testing.assert_array_equal(rope_inv_freq(dim, theta, 3.0), (np.array(want) / 3).astype(np.float32))


@pytest.mark.parametrize(("dim", "theta"), [(64, 1e7), (128, 1e6), (32, 1e4), (256, 5e5)])
def test_inv_freq_matches_transformers(dim, theta):
    """Within 1 ulp while 2i/width is exact in float32, in which they compute: for widths that are powers of two."""
    for part in (0.25, 0.5, 1.0):
        table, factor = transformers_table("default", dim, rope_theta=theta, partial_rotary_factor=part)
        np.testing.assert_array_max_ulp(rope_inv_freq(int(dim * part), theta), table, maxulp=1)
        assert factor == 1
    for part, divisor in ((0.25, 1.0), (0.9, 1.0), (1.0, 1.0), (0.5, 8.0)):
        options = {"rope_theta": theta, "partial_rotary_factor": part, "factor": divisor}
        table, factor = transformers_table("proportional", dim, **options)
        np.testing.assert_array_max_ulp(proportional_inv_freq(dim, theta, part, divisor), table, maxulp=1)
        assert factor == 1


@pytest.mark.parametrize(
    ("dim", "theta", "factor", "original", "options", "ulp"),
    [
        (32, 1e4, 4.0, 512, {}, 1),
        (64, 1e4, 40.0, 4096, {}, 1),
        (64, 1e4, 40.0, 4096, {"truncate": False}, 16),  # their ramp has lost bits where it ends
        (64, 1e6, 16.0, 8192, {"beta_fast": 24.0, "beta_slow": 2.0}, 1),
        (8, 1e4, 2.0, 64, {}, 1),  # the fast end in front of the first channel
        (64, 100.0, 4.0, 1 << 20, {}, 1),  # the slow end behind the last
        (32, 1e4, 8.0, 512, {"beta_fast": 7.0, "beta_slow": 7.0, "truncate": False}, 1),  # both in one place
    ],
    ids=["small", "deepseek", "not-truncated", "betas", "short", "long", "equal"],
)
def test_yarn_inv_freq_matches_transformers(dim, theta, factor, original, options, ulp):
    settings = {"rope_theta": theta, "factor": factor, "original_max_position_embeddings": original, **options}
    table, gain = transformers_table("yarn", dim, **settings)
    np.testing.assert_array_max_ulp(yarn_inv_freq(dim, theta, factor, original, **options), table, maxulp=ulp)
    assert gain == yarn_gain(factor, 1)
    for mscale, all_dim in ((1.0, 1.0), (0.707, 1.0), (1.0, 0.707)):
        _, gain = transformers_table("yarn", dim, **settings, mscale=mscale, mscale_all_dim=all_dim)
        assert gain == yarn_gain(factor, mscale) / yarn_gain(factor, all_dim)


def test_yarn_gain_has_the_check_values():
    assert yarn_gain(4, 1) == pytest.approx(1.1386294, rel=5e-8)
    assert yarn_gain(40, 1) == pytest.approx(1.3688879, rel=5e-8)
    assert 192**-0.5 * yarn_gain(40, 1) ** 2 == pytest.approx(0.13523378, rel=5e-8)
    assert yarn_gain(40, 0.5) == pytest.approx(1 + (yarn_gain(40, 1) - 1) / 2)
    assert [yarn_gain(1, 1), yarn_gain(0.5, 1), yarn_gain(40, 0)] == [1, 1, 1]


# -- rotation ----------------------------------------------------------------------------------------------------------


def cos_sin(table: np.ndarray, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 cos and sin of the float32 angles, doubled as transformers wants them."""
    angles = torch.from_numpy((positions.astype(np.float32)[:, None] * table).astype(np.float64))
    return torch.cat([angles.cos()] * 2, dim=-1), torch.cat([angles.sin()] * 2, dim=-1)


def reference(x: np.ndarray, table: np.ndarray, positions: np.ndarray, interleaved: bool = False) -> np.ndarray:
    """transformers' rotation in float64, the rotary part of DeepSeek's back in its stored order."""
    heads = torch.from_numpy(x.astype(np.float64))
    if not interleaved:
        return apply_rotary_pos_emb(heads, heads, *cos_sin(table, positions), unsqueeze_dim=1)[0].numpy()
    width = 2 * len(table)
    turned, _ = apply_rotary_pos_emb_interleave(heads[..., :width], heads[..., :width], *cos_sin(table, positions))
    y = x.astype(np.float64)
    y[..., 0:width:2], y[..., 1:width:2] = turned[..., : width // 2], turned[..., width // 2 :]
    return y


def assert_rounded(got: np.ndarray, want: np.ndarray, dtype: str = "float32", roundings: int = 1) -> None:
    assert_close("y", got, want, roundings * EPS[dtype], np.abs(want.astype(np.float64)) + 1e-4)


def dot(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Scores [T, T] of the heads of two stacks, in float64."""
    return np.einsum("thd,shd->hts", q.astype(np.float64), k.astype(np.float64))


NEIGHBOURS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])


@NEIGHBOURS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 6, 14])
def test_rope_matches_transformers(width, dtype, interleaved, rng):
    x, at = normal(rng, 5, 3, 14, dtype=dtype), i32(7, 0, 131071, 4096, 8)
    table = rope_inv_freq(width, 1e4)
    got = rope(x, table, at, width, interleaved=interleaved)
    assert_rounded(got, reference(x, table, at, interleaved), dtype)
    assert_same_bits("the rest", got[..., width:], x[..., width:])
    assert not np.array_equal(got[0, :, :width], x[0, :, :width])


@NEIGHBOURS
def test_rope_matches_mlx(interleaved, rng):
    x, table = normal(rng, 6, 3, 16), rope_inv_freq(10, 1e4)
    heads_first = mx.array(np.ascontiguousarray(x.swapaxes(0, 1))[None])
    options = {"traditional": interleaved, "base": None, "scale": 1.0, "offset": 20, "freqs": 1 / mx.array(table)}
    want = np.array(mx.fast.rope(heads_first, 10, **options))[0].swapaxes(0, 1)
    assert_close("y", rope(x, table, 20, 10, interleaved=interleaved), want, 2e-5)


def test_rope_turns_by_a_quarter():
    """Angle π/2 takes (a, b) to (−b, a): pairs are (0, 2), (1, 3), or neighbours (0, 1), (2, 3)."""
    x, quarter = np.array([[[1, 2, 3, 4, 5]]], "f4"), np.full(2, np.pi / 2, "f4")
    np.testing.assert_allclose(rope(x, quarter, 1, 4)[0, 0], [-3, -4, 1, 2, 5], atol=1e-6)
    np.testing.assert_allclose(rope(x, quarter, 1, 4, interleaved=True)[0, 0], [-2, 1, -4, 3, 5], atol=1e-6)
    np.testing.assert_allclose(rope(x, quarter, 2, 4)[0, 0], [-1, -2, -3, -4, 5], atol=1e-6)


@pytest.mark.parametrize("position", [0, 1, 4095, 4096, 32767, 131071, 2**24 + 1, 2**31 - 1])
def test_rope_is_accurate_at_large_positions(position):
    """H8. The angle is one float32 product; its cosine and sine are exact but for the rounding of the result."""
    table = rope_inv_freq(64, 1e4)
    x = np.concatenate([np.ones((1, 1, 32), "f4"), np.zeros((1, 1, 32), "f4")], axis=2)
    angles = [float(np.float32(position) * f) for f in table]
    want = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
    got = rope(x, table, position)[0, 0]
    assert_rounded(got, np.array(want))
    assert_same_bits("array", rope(x, table, np.array(position, np.int32))[0, 0], got)
    if position in (4095, 32767, 131071):  # an angle in float64 is another definition; at 4096 products are exact
        exact = [math.cos(position * float(f)) for f in table]
        assert np.abs(got[:32] - exact).max() > 5e-5


@NEIGHBOURS
def test_rope_takes_positions_in_every_form(interleaved, rng):
    x, table = normal(rng, 4, 3, 8), rope_inv_freq(6)
    want = rope(x, table, 11, 6, 1.5, interleaved)
    options = {"rotary_dim": 6, "mscale": 1.5, "interleaved": interleaved}
    for name in ("start_pos", "positions"):
        for at in (np.array(11, np.int32), i32(11, 12, 13, 14)):
            assert_same_bits(name, rope(x, table, **{name: at}, **options), want)
    for t in range(4):
        for at in (11 + t, np.array(11 + t, np.int32), i32(11 + t)):
            assert_same_bits("one token", rope(x[t], table, at, 6, 1.5, interleaved), want[t])
    assert_same_bits("in place", rope(x, table, 11, 6, 1.5, interleaved, out=x), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_scales_by_mscale_and_is_exact_at_one(dtype, rng):
    x, table = normal(rng, 3, 2, 12, dtype=dtype), rope_inv_freq(8)
    plain = rope(x, table, 5, 8)
    assert_same_bits("1", rope(x, table, 5, 8, 1.0), plain)
    doubled = rope(x, table, 5, 8, 2.0)
    assert_same_bits("2", doubled[..., :8], (plain[..., :8].astype("f4") * 2).astype(plain.dtype))
    assert_same_bits("the rest is not scaled", doubled[..., 8:], x[..., 8:])
    assert_same_bits("position 0 turns nothing", rope(x[:1], table, 0, 8), x[:1])
    want = reference(x, table, i32(5, 6, 7))[..., :8] * 1.3688879
    assert_rounded(rope(x, table, 5, 8, 1.3688879)[..., :8], want, dtype)


@NEIGHBOURS
def test_rope_scores_depend_on_the_distance(interleaved, rng):
    q, k, table = normal(rng, 1, 2, 8), normal(rng, 1, 2, 8), rope_inv_freq(8)
    scores = [
        dot(rope(q, table, 9 + shift, interleaved=interleaved), rope(k, table, 4 + shift, interleaved=interleaved))
        for shift in (0, 1, 77)
    ]
    assert_close("scores", np.stack(scores), np.broadcast_to(scores[0], (3, 2, 1, 1)), 1e-5)
    other = dot(rope(q, table, 9, interleaved=interleaved), rope(k, table, 5, interleaved=interleaved))
    assert np.abs(other - scores[0]).max() > 1e-2


def test_rope_of_neighbours_scores_like_reordered_halves(rng):
    """DeepSeek: rotate neighbours in place, or bring even channels to the front and rotate halves; not as stored."""
    q, k = normal(rng, 5, 3, 8), normal(rng, 5, 1, 8)
    table, order = yarn_inv_freq(8, 1e4, 4.0, 512), [0, 2, 4, 6, 1, 3, 5, 7]
    want = dot(rope(q, table, 30, interleaved=True), np.repeat(rope(k, table, 30, interleaved=True), 3, axis=1))
    halves = [np.ascontiguousarray(x[..., order]) for x in (q, k)]
    got = dot(rope(halves[0], table, 30), np.repeat(rope(halves[1], table, 30), 3, axis=1))
    assert_close("scores", got, want, 4 * EPS["float32"], 8)
    stored = dot(rope(q, table, 30), np.repeat(rope(k, table, 30), 3, axis=1))
    assert np.abs(stored - want).max() > 0.1


def test_rope_with_a_proportional_table_is_not_partial(rng):
    """Gemma 4: the table spans the head, pairs are half a head apart, channels without an angle keep their bits."""
    x = normal(rng, 4, 2, 32)
    got = rope(x, proportional_inv_freq(32, 1e6, 0.25), 50)
    still = np.r_[4:16, 20:32]
    assert_same_bits("no angle", got[..., still], x[..., still])
    partial = rope(x, rope_inv_freq(8, 1e6), 50, 8)
    assert np.abs(got - partial).max() > 0.1
    want = x.astype(np.float64)
    for t, i in np.ndindex(4, 4):
        angle = float(np.float32(50 + t) * np.float32(1e6 ** (-2 * i / 32)))
        turn = math.cos(angle) + 1j * math.sin(angle)
        pair = (x[t, :, i] + 1j * x[t, :, i + 16].astype(np.complex128)) * turn
        want[t, :, i], want[t, :, i + 16] = pair.real, pair.imag
    assert_rounded(got, want)


def test_rope_with_a_plain_table_is_not_yarn(rng):
    x = normal(rng, 4, 2, 32)
    yarn, plain = (rope(x, table, 20) for table in (yarn_inv_freq(32, 1e4, 4.0, 512), rope_inv_freq(32, 1e4)))
    assert np.abs(yarn - plain).max() > 0.1


@given(
    T=st.integers(0, 4), H=st.integers(1, 3), half=st.integers(1, 4), rest=st.integers(0, 3), start=st.integers(0, 200)
)
def test_rope_of_any_shape_keeps_lengths_and_undoes_itself(T, H, half, rest, start):
    x = normal(np.random.default_rng(start), T, H, 2 * half + rest)
    table = rope_inv_freq(2 * half)
    y = rope(x, table, start, 2 * half)
    assert y.shape == x.shape
    assert_close("length", np.square(y.astype("f8")).sum(-1), np.square(x.astype("f8")).sum(-1), 1e-6)
    assert_close("back", rope(y, -table, start, 2 * half), x, 1e-6)


# -- norm and rotation -------------------------------------------------------------------------------------------------


@NEIGHBOURS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [True, False])
def test_head_norm_rope_is_rms_norm_then_rope_with_one_rounding(weighted, dtype, interleaved, rng):
    x, table = normal(rng, 5, 3, 12, dtype=dtype), rope_inv_freq(8)
    weight = normal(rng, 12, dtype="bfloat16") if weighted else None
    x64 = x.astype(np.float64)
    unit = x64 / np.sqrt(np.square(x64).mean(-1, keepdims=True) + 1e-3)
    scaled = unit if weight is None else unit * weight.astype(np.float64)
    want = reference(scaled, table, np.arange(40, 45), interleaved)
    want[..., :8] *= 1.25
    got = head_norm_rope(x, weight, table, 40, 1e-3, 8, 1.25, interleaved)
    assert_rounded(got, want, dtype)
    two = rope(rms_norm(x, weight, 1e-3), table, 40, 8, 1.25, interleaved)
    assert_close("two steps", got, two, 4 * EPS[dtype])
    assert_same_bits("one token", head_norm_rope(x[2], weight, table, 42, 1e-3, 8, 1.25, interleaved), got[2])
    at = i32(*range(40, 45))
    assert_same_bits("positions", head_norm_rope(x, weight, table, at, 1e-3, 8, 1.25, interleaved), got)
    if dtype == "bfloat16" and weighted:
        rounded = round_to(want, x.dtype)
        assert_same_bits("one rounding", got, rounded)
        assert not np.array_equal(two, rounded)


def test_position_scale_by_hand():
    """1 up to the length, then steps of the logarithm; as transformers has it for Llama 4 and Ministral 3."""
    at = i32(0, 15, 16, 47, 48, 1600)
    x = np.array([[1.0, -2.0, 4.0]] * len(at), np.float32)
    got = position_scale(x, at, 0.5, 16)
    want = [1, 1, 1 + 0.5 * np.log(2), 1 + 0.5 * np.log(3), 1 + 0.5 * np.log(4), 1 + 0.5 * np.log(101)]
    np.testing.assert_allclose(got, x * np.array(want)[:, None], rtol=1e-7)
    assert_same_bits("heads", position_scale(x.reshape(6, 3, 1), at, 0.5, 16), got.reshape(6, 3, 1))


# -- refusals ----------------------------------------------------------------------------------------------------------

TURN = {"x": zeros(3, 2, 8), "inv_freq": zeros(3), "rotary_dim": 6, "start_pos": 2}
YARN = {"dim": 8, "theta": 1e4, "factor": 4.0, "original_max_position": 512}
VALID: dict[str, dict[str, Any]] = {
    "rope": TURN,
    "rope one": {**TURN, "x": zeros(2, 8)},
    "head_norm_rope": {**TURN, "weight": zeros(8)},
    "rope_inv_freq": {"dim": 8, "theta": 1e4},
    "proportional_inv_freq": {"head_dim": 8, "theta": 1e4, "partial_rotary_factor": 0.25},
    "yarn_inv_freq": YARN,
    "position_scale": {"x": zeros(3, 2, 8), "positions": i32(0, 5, 9), "beta": 0.1, "length": 4},
}
TURNS: list[tuple[dict[str, Any], type, str]] = [
    ({"x": zeros(8)}, ShapeError, "x has shape (8,), expected [T, H, D] or [H, D]"),
    ({"x": zeros(3, 0, 8)}, ShapeError, "x has shape (3, 0, 8), expected no empty axis but the first"),
    ({"inv_freq": zeros(4)}, ShapeError, "inv_freq has shape (4,), expected (3,) (rotary_dim / 2)"),
    ({"inv_freq": zeros(3, dtype="float16")}, DTypeError, "inv_freq has dtype float16, expected float32"),
    ({"rotary_dim": 5}, InvalidArgument, "rotary_dim is 5, expected an even number from 2 to 8"),
    ({"rotary_dim": 10}, InvalidArgument, "rotary_dim is 10, expected an even number from 2 to 8"),
    ({"rotary_dim": 0}, InvalidArgument, "rotary_dim is 0, expected an even number from 2 to 8"),
    ({"start_pos": -1}, InvalidArgument, "start_pos is -1, expected 0 or more"),
    ({"start_pos": 2**31}, InvalidArgument, "start_pos has 2147483648, expected 0 to 2147483647"),
    ({"start_pos": i32(0, -5, 2)}, InvalidArgument, "start_pos has -5, expected 0 to 2147483647"),
    ({"start_pos": np.array(-5, np.int32)}, InvalidArgument, "start_pos has -5, expected 0 to 2147483647"),
    ({"start_pos": i32(0, 1)}, ShapeError, "start_pos has shape (2,), expected (3,) (one per token) or one number"),
    ({"start_pos": zeros(3)}, DTypeError, "start_pos has dtype float32, expected int32"),
    ({"start_pos": 1.5}, DTypeError, "start_pos is 1.5, expected an array (NumPy or torch) or an int"),
    ({"mscale": float("nan")}, InvalidArgument, "mscale is nan, expected a finite number"),
]
REFUSED: dict[str, list[tuple[dict[str, Any], type, str]]] = {
    "rope": [
        *TURNS,
        ({"positions": i32(0, 1, 2)}, InvalidArgument, "start_pos and positions are both given, expected one"),
        ({"start_pos": i32(0), "positions": i32(0)}, InvalidArgument, "start_pos and positions are both given"),
        ({"start_pos": 0, "positions": i32(0, 1)}, ShapeError, "positions has shape (2,), expected (3,) (one per"),
        ({"start_pos": 0, "positions": i32(0, 1, -1)}, InvalidArgument, "positions has -1, expected 0 to 2147483647"),
        ({"start_pos": 0, "positions": 3}, DTypeError, "positions is 3, expected an array (NumPy or torch) or None"),
    ],
    "rope one": [({"start_pos": i32(0, 1)}, ShapeError, "start_pos has shape (2,), expected (1,) (one per token)")],
    "head_norm_rope": [
        *TURNS,
        ({"weight": zeros(6)}, ShapeError, "weight has shape (6,), expected (8,) (last axis of x)"),
        ({"weight": i32(1)}, DTypeError, "weight has dtype int32, expected float32, float16 or bfloat16"),
        ({"eps": -1.0}, InvalidArgument, "eps is -1.0, expected a finite number, 0 or more"),
    ],
    "rope_inv_freq": [
        ({"dim": 7}, InvalidArgument, "dim is 7, expected an even number of at least 2"),
        ({"dim": 0}, InvalidArgument, "dim is 0, expected an even number of at least 2"),
        ({"theta": 0.0}, InvalidArgument, "theta is 0.0, expected a positive finite number"),
        ({"factor": -1.0}, InvalidArgument, "factor is -1.0, expected a positive finite number"),
    ],
    "proportional_inv_freq": [
        ({"head_dim": 7}, InvalidArgument, "head_dim is 7, expected an even number of at least 2"),
        ({"partial_rotary_factor": 1.5}, InvalidArgument, "partial_rotary_factor is 1.5, expected more than 0, at"),
        ({"partial_rotary_factor": 0.0}, InvalidArgument, "partial_rotary_factor is 0.0, expected more than 0, at"),
    ],
    "yarn_inv_freq": [
        ({"factor": float("inf")}, InvalidArgument, "factor is inf, expected a positive finite number"),
        ({"original_max_position": 0}, InvalidArgument, "original_max_position is 0, expected at least 1"),
        ({"beta_slow": 64.0}, InvalidArgument, "beta_slow is 64.0, expected more than 0 and at most beta_fast (32.0)"),
        ({"theta": 1.0}, InvalidArgument, "theta is 1, expected another number"),
    ],
    "position_scale": [
        ({"x": zeros(8)}, ShapeError, "x has shape (8,), expected [T, N] or [T, H, D]"),
        ({"positions": i32(0, 1)}, ShapeError, "positions has shape (2,), expected (3,) (one per token)"),
        ({"positions": i32(0, 1, -1)}, InvalidArgument, "positions has -1, expected 0 to 2147483647"),
        ({"positions": zeros(3)}, DTypeError, "positions has dtype float32, expected int32"),
        ({"beta": float("nan")}, InvalidArgument, "beta is nan, expected a finite number"),
        ({"length": 0}, InvalidArgument, "length is 0, expected at least 1"),
    ],
}


@pytest.mark.parametrize(
    ("form", "change", "error", "message"), [(form, *row) for form, rows in REFUSED.items() for row in rows]
)
def test_rope_names_the_argument_and_what_it_expected(form, change, error, message):
    assert_refused(ops.REGISTRY[form.split()[0]], {**VALID[form], **change}, error, message)


@pytest.mark.parametrize("form", VALID)
def test_rope_accepts_the_calls_that_the_refusals_start_from(form):
    ops.REGISTRY[form.split()[0]](**VALID[form])
