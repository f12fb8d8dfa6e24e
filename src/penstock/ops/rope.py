"""Rotary position embedding, its frequency tables, and a scale by position."""

from __future__ import annotations

import math

import numpy as np

from penstock.dtypes import round_to
from penstock.errors import InvalidArgument, ShapeError
from penstock.ops import check
from penstock.ops.array import Array, Spec
from penstock.ops.norm import f64, normed
from penstock.ops.op import op

# -- tables: float64 inside, rounded once to float32 -----------------------------------------------------------------


def _table(dim: int, theta: float, name: str = "dim") -> Spec:
    if dim < 2 or dim % 2:
        raise InvalidArgument(f"{name} is {dim}, expected an even number of at least 2")
    if not 0 < theta < math.inf:
        raise InvalidArgument(f"theta is {theta}, expected a positive finite number")
    return Spec((dim // 2,), "float32")


def _factor(factor: float) -> None:
    if not 0 < factor < math.inf:
        raise InvalidArgument(f"factor is {factor}, expected a positive finite number")


def _powers(dim: int, theta: float) -> Array:
    return float(theta) ** (-2 * np.arange(dim // 2, dtype=np.float64) / dim)


def _plain(dim: int, theta: float, factor: float) -> Spec:
    _factor(factor)
    return _table(dim, theta)


@op(infer=_plain)
def rope_inv_freq(dim: int, theta: float = 10000.0, factor: float = 1.0) -> Array:
    """theta^(−2i/dim) / factor for i < dim/2: the plain table of a rotary width, float32 [dim/2]."""
    return (_powers(dim, theta) / factor).astype(np.float32)


def _proportional(head_dim: int, theta: float, partial_rotary_factor: float, factor: float) -> Spec:
    _factor(factor)
    if not 0 < partial_rotary_factor <= 1:
        raise InvalidArgument(f"partial_rotary_factor is {partial_rotary_factor}, expected more than 0, at most 1")
    return _table(head_dim, theta, "head_dim")


@op(infer=_proportional)
def proportional_inv_freq(head_dim: int, theta: float, partial_rotary_factor: float, factor: float = 1.0) -> Array:
    """theta^(−2i/head_dim) / factor for i < n, 0 for the rest; n = int(partial_rotary_factor · head_dim // 2).

    Gemma 4's full-attention layers: the table spans the whole head (`rope` with rotary_dim = head_dim), and channels
    with a zero entry stay as they are. float32 [head_dim/2].
    """
    live = np.arange(head_dim // 2) < int(partial_rotary_factor * head_dim // 2)
    return np.where(live, _powers(head_dim, theta) / factor, 0).astype(np.float32)


def _yarn(
    dim: int,
    theta: float,
    factor: float,
    original_max_position: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> Spec:
    _factor(factor)
    check.positive(original_max_position=original_max_position)
    if not 0 < beta_slow <= beta_fast < math.inf:
        raise InvalidArgument(f"beta_slow is {beta_slow}, expected more than 0 and at most beta_fast ({beta_fast})")
    if math.isinf(original_max_position / (2 * math.pi * beta_slow)):
        raise InvalidArgument(f"beta_slow is {beta_slow}, expected one whose reciprocal is a number")
    if theta == 1:
        raise InvalidArgument("theta is 1, expected another number")
    return _table(dim, theta)


@op(infer=_yarn)
def yarn_inv_freq(
    dim: int,
    theta: float,
    factor: float,
    original_max_position: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Array:
    """YaRN: fast channels keep theta^(−2i/dim), slow ones are divided by factor, a ramp between.

    at(β) = dim · ln(original_max_position / (2πβ)) / (2 ln theta); low = ⌊at(beta_fast)⌋, high = ⌈at(beta_slow)⌉, kept
    inside 0 … dim − 1 (truncate=False leaves out floor and ceiling); ramp_i = clip((i − low) / (high − low), 0, 1);
    table_i = theta^(−2i/dim) · (1 − ramp_i + ramp_i / factor). float32 [dim/2].
    """

    def at(beta: float) -> float:
        return dim * math.log(original_max_position / (2 * math.pi * beta)) / (2 * math.log(theta))

    low, high = at(beta_fast), at(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return (_powers(dim, theta) * ((1 - ramp) + ramp / factor)).astype(np.float32)


def yarn_gain(factor: float, m: float) -> float:
    """0.1 · m · ln(factor) + 1, or 1 for factor ≤ 1: what YaRN multiplies scores (squared) or cosines by."""
    return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0


# -- rotation --------------------------------------------------------------------------------------------------------


def rotated(
    x: Spec,
    inv_freq: Spec,
    start_pos: Spec | int,
    rotary_dim: int | None,
    mscale: float,
    interleaved: bool,
    positions: Spec | None,
) -> Spec:
    """What `rope` returns, its arguments checked."""
    check.floating(x=x)
    check.dtype("float32", inv_freq=inv_freq)
    check.axes("[T, H, D] or [H, D]", 2, 3, x=x)
    check.filled(1 if x.ndim == 3 else 0, x=x)
    check.finite(mscale=mscale)
    D = x.shape[-1]
    width = D if rotary_dim is None else rotary_dim
    if width % 2 or not 0 < width <= D:
        raise InvalidArgument(f"rotary_dim is {width}, expected an even number from 2 to {D} (the width of a head)")
    check.shape((width // 2,), "rotary_dim / 2", inv_freq=inv_freq)
    if positions is not None:
        if not (isinstance(start_pos, int) and start_pos == 0):
            raise InvalidArgument("start_pos and positions are both given, expected one")
        start_pos = positions
    if isinstance(start_pos, Spec):
        name = "start_pos" if positions is None else "positions"
        check.dtype("int32", **{name: start_pos})
        allowed = ((), x.shape[:1]) if x.ndim == 3 else ((), (1,))
        if start_pos.shape not in allowed:
            raise ShapeError(f"{name} has shape {start_pos.shape}, expected {allowed[1]} (one per token) or one number")
    elif start_pos < 0:
        raise InvalidArgument(f"start_pos is {start_pos}, expected 0 or more")
    return x


def _at(start_pos: Array | int, positions: Array | None) -> Array:
    return np.asarray(start_pos if positions is None else positions)


def _check_positions(start_pos: Array | int, positions: Array | None) -> None:
    if positions is None:
        check.in_range("start_pos", start_pos, 0, 2**31)
    else:
        check.in_range("positions", positions, 0, 2**31)


def rotate(x: Array, inv_freq: Array, at: Array, rotary_dim: int | None, mscale: float, interleaved: bool) -> Array:
    """`rope` of a float64 array."""
    rows = x if x.ndim == 3 else x[None]
    width = x.shape[-1] if rotary_dim is None else rotary_dim
    half = width // 2
    p = at + np.arange(len(rows)) if at.ndim == 0 else at
    angle = (p.astype(np.float32)[:, None] * inv_freq).astype(np.float64)  # rounded to float32 before cos and sin
    c, s = np.cos(angle)[:, None] * mscale, np.sin(angle)[:, None] * mscale
    first, second = (slice(0, width, 2), slice(1, width, 2)) if interleaved else (slice(0, half), slice(half, width))
    y = rows.copy()
    y[..., first] = rows[..., first] * c - rows[..., second] * s
    y[..., second] = rows[..., first] * s + rows[..., second] * c
    return y.reshape(x.shape)


@op(infer=rotated, check=_check_positions, alias=True)
def rope(
    x: Array,
    inv_freq: Array,
    start_pos: int | Array = 0,
    rotary_dim: int | None = None,
    mscale: float = 1.0,
    interleaved: bool = False,
    positions: Array | None = None,
) -> Array:
    """Rotate pairs of channels by position · frequency.

    angle = float32(p) · inv_freq[i], rounded to float32; (a, b) → (a·c − b·s, a·s + b·c) with c, s = mscale · cos, sin
    x [T, H, D] (or [H, D], one token), inv_freq float32 [rotary_dim/2]. start_pos is the position of the first token,
    or int32 [T] with one each (also as `positions`). Pairs are (i, i + rotary_dim/2), or (2i, 2i+1) if interleaved;
    channels from rotary_dim on pass through. `out=x` is allowed.
    """
    return round_to(rotate(f64(x), inv_freq, _at(start_pos, positions), rotary_dim, mscale, interleaved), x.dtype)


def _head_norm_rope(
    x: Spec,
    weight: Spec | None,
    inv_freq: Spec,
    start_pos: Spec | int,
    eps: float,
    rotary_dim: int | None,
    mscale: float,
    interleaved: bool,
) -> Spec:
    check.eps(eps)
    y = rotated(x, inv_freq, start_pos, rotary_dim, mscale, interleaved, None)
    check.floating(weight=weight)
    check.shape(x.shape[-1:], "last axis of x", weight=weight)
    return y


@op(infer=_head_norm_rope, check=lambda start_pos: _check_positions(start_pos, None), alias=True)
def head_norm_rope(
    x: Array,
    weight: Array | None,
    inv_freq: Array,
    start_pos: int | Array = 0,
    eps: float = 1e-6,
    rotary_dim: int | None = None,
    mscale: float = 1.0,
    interleaved: bool = False,
) -> Array:
    """`rope(rms_norm(x, weight, eps), …)` per head, with no rounding between the two. x [T, H, D] or [H, D], weight
    [D].
    """
    y = normed(f64(x), eps, 1.0 if weight is None else weight)
    return round_to(rotate(y, inv_freq, _at(start_pos, None), rotary_dim, mscale, interleaved), x.dtype)


# -- scale by position -----------------------------------------------------------------------------------------------


def _position_scaled(x: Spec, positions: Spec, beta: float, length: int) -> Spec:
    check.floating(x=x)
    check.axes("[T, N] or [T, H, D]", 2, 3, x=x)
    check.filled(x=x)
    check.dtype("int32", positions=positions)
    check.shape(x.shape[:1], "one per token", positions=positions)
    check.finite(beta=beta)
    check.positive(length=length)
    return x


@op(infer=_position_scaled, check=lambda positions: check.in_range("positions", positions, 0, 2**31), alias=True)
def position_scale(x: Array, positions: Array, beta: float, length: int) -> Array:
    """x[t] · (1 + beta · ln(1 + ⌊positions[t] / length⌋)): sharper attention far behind the first `length` positions.

    x [T, N] or [T, H, D], queries; positions int32 [T]. `out=x` is allowed.
    """
    factor = 1 + beta * np.log1p((positions.astype(np.int64) // length).astype(np.float64))
    return round_to(f64(x) * factor.reshape(-1, *(1,) * (x.ndim - 1)), x.dtype)
