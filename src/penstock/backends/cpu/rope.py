"""CPU kernels of rotary position embedding. Its tables are made once per model: there the definitions serve."""

from typing import Any

import numpy as np
from numba import prange

from penstock import ops
from penstock.backends.cpu import _threads
from penstock.backends.cpu._formats import FLOAT32, fmt
from penstock.backends.cpu._math import SINCOS_MOST, sincos
from penstock.backends.cpu.compile import njit
from penstock.backends.cpu.elementwise import NOTHING, SERIAL, flat, flat_out, load, store
from penstock.backends.cpu.norm import ALONE, scaled_rows, unit_factors
from penstock.ops.op import kernel

_BLOCK = 2048  # numbers of a block of heads
_CHUNK = 16  # blocks that a thread takes at once
_NO_POSITIONS = np.empty(0, np.int32)
_NO_POSITIONS.flags.writeable = False


@kernel(ops.rope_inv_freq, device="cpu", composed=True)
@np.errstate(all="ignore")
def rope_inv_freq(dim, theta, factor, *, out):
    out[...] = ops.rope_inv_freq.body(dim, theta, factor)


@kernel(ops.proportional_inv_freq, device="cpu", composed=True)
@np.errstate(all="ignore")
def proportional_inv_freq(head_dim, theta, partial_rotary_factor, factor, *, out):
    out[...] = ops.proportional_inv_freq.body(head_dim, theta, partial_rotary_factor, factor)


@kernel(ops.yarn_inv_freq, device="cpu", composed=True)
@np.errstate(all="ignore")
def yarn_inv_freq(dim, theta, factor, original_max_position, beta_fast, beta_slow, truncate, *, out):
    table = ops.yarn_inv_freq.body(dim, theta, factor, original_max_position, beta_fast, beta_slow, truncate)
    out[...] = table


@njit
def _angles(position, inv_freq, mscale, angle, c, s):
    """cos and sin of one token, times mscale. The angle is a float32 product; cos and sin are formed in float64."""
    p = np.float32(position)
    far = False
    for i in range(inv_freq.size):
        angle[i] = p * inv_freq[i]
        far |= not abs(angle[i]) <= SINCOS_MOST
    if far:  # or not a number
        for i in range(angle.size):
            x = np.float64(angle[i])
            c[i], s[i] = np.float32(np.cos(x) * mscale), np.float32(np.sin(x) * mscale)
    else:
        for i in range(angle.size):
            sin, cos = sincos(angle[i])
            c[i], s[i] = np.float32(cos * mscale), np.float32(sin * mscale)


@njit
def _rotate(v, n, c, s, interleaved, y):
    """The rotary channels of n heads; the rest of y is left alone.

    No fused multiply-add: which of the two products it takes in depends on what is compiled around it, and a kernel
    must give the same bits in the process that compiled it and in one that read it from the cache.
    """
    half = c.size
    if interleaved:
        for h in range(n):
            for i in range(half):
                a, b = v[h, 2 * i], v[h, 2 * i + 1]
                y[h, 2 * i] = a * c[i] - b * s[i]
                y[h, 2 * i + 1] = a * s[i] + b * c[i]
    else:
        for h in range(n):
            for i in range(half):
                a, b = v[h, i], v[h, half + i]
                y[h, i] = a * c[i] - b * s[i]
                y[h, half + i] = a * s[i] + b * c[i]


@njit
def _rope_tokens(
    x, fmt, shape, inv_freq, at, positions, mscale, interleaved, weight, weight_fmt, eps, out, start, stop
):
    """Tokens start … stop - 1 of `_rope_parallel`."""
    _, heads, D = shape
    half = inv_freq.size
    angle, c, s = np.empty(half, np.float32), np.empty(half, np.float32), np.empty(half, np.float32)
    w = np.ones(D, np.float32)
    if weight.size > 0:
        load(weight, weight_fmt, 0, w)
    rows = max(1, _BLOCK // D)
    scratch, rinv = np.empty((2, rows, D), np.float32), np.empty(rows, np.float32)
    v, y = scratch[0], scratch[1]
    for t in range(start, stop):
        _angles(positions[t] if positions.size > 0 else at + t, inv_freq, mscale, angle, c, s)
        for h in range(0, heads, rows):
            n = min(rows, heads - h)
            place = (t * heads + h) * D
            load(x, fmt, place, v.reshape(-1)[: n * D])
            if eps >= 0:
                unit_factors(v, n, D, eps, rinv)
                scaled_rows(v, n, rinv, w, v, ALONE, y)
                v, y = y, v
            if 2 * half < D:
                for r in range(n):  # not slices: Numba compiles a message about shapes with each assignment of one
                    for i in range(2 * half, D):
                        y[r, i] = v[r, i]
            _rotate(v, n, c, s, interleaved, y)
            store(y.reshape(-1)[: n * D], fmt, out, place)


# rope      (a, b) → (a·c - b·s, a·s + b·c), c, s = mscale · cos, sin(float32(position) · inv_freq[i]) of pair i;
#           with eps >= 0 each head is n(head, weight) first. Pairs are (i, i + half), interleaved (2i, 2i + 1)
# shapes    x, out [T, H, D] flat, uint16 patterns; inv_freq float32 [half]; positions int32 [T], or none: at, at + 1 …
# threads   prange over chunks of tokens; cos and sin of a token are formed once for all of its heads
# bytes     2 * T * H * D * itemsize
# limits    none; angles beyond 2**31, which no table up to 1 reaches, take the slow cos and sin
@njit(parallel=True)
def _rope_parallel(x, fmt, shape, inv_freq, at, positions, mscale, interleaved, weight, weight_fmt, eps, out):
    T, heads, D = shape
    step = max(1, _BLOCK * _CHUNK // (heads * D))
    for c in prange((T + step - 1) // step):
        start, stop = c * step, min(T, (c + 1) * step)
        _rope_tokens(
            x, fmt, shape, inv_freq, at, positions, mscale, interleaved, weight, weight_fmt, eps, out, start, stop
        )


def _run(
    x: np.ndarray,
    inv_freq: np.ndarray,
    start_pos: Any,
    mscale: float,
    interleaved: bool,
    out: np.ndarray,
    weight: np.ndarray | None = None,
    eps: float = -1.0,
) -> None:
    """Rotate x [T, H, D] or [H, D]; with eps ≥ 0 norm each head first."""
    if x.size == 0:
        return
    shape = x.shape if x.ndim == 3 else (1, *x.shape)
    at, positions = 0, _NO_POSITIONS
    if not isinstance(start_pos, np.ndarray) or start_pos.ndim == 0:
        at = int(start_pos)
    else:
        positions = start_pos.view()
        positions.setflags(False)
    table = inv_freq.view()
    table.setflags(False)
    weight_bits, weight_fmt = (NOTHING, FLOAT32) if weight is None else (flat(weight), fmt(weight))
    angles = (table, at, positions, float(mscale), bool(interleaved))
    call = (flat(x), fmt(x), shape, *angles, weight_bits, weight_fmt, float(eps), flat_out(out))
    if x.size <= SERIAL:
        _rope_tokens(*call, 0, shape[0])
    else:
        _threads.run(_rope_parallel, *call)


@kernel(ops.rope, device="cpu")
def rope(x, inv_freq, start_pos, rotary_dim, mscale, interleaved, positions, *, out):
    _run(x, inv_freq, start_pos if positions is None else positions, mscale, interleaved, out)


@kernel(ops.head_norm_rope, device="cpu")
def head_norm_rope(x, weight, inv_freq, start_pos, eps, rotary_dim, mscale, interleaved, *, out):
    _run(x, inv_freq, start_pos, mscale, interleaved, out, weight, eps)


@njit
def _scale_rows(x, fmt, positions, width, beta, length, out, start, stop):
    """Tokens start … stop - 1 of `_scale_parallel`."""
    v = np.empty(min(width, _BLOCK), np.float32)
    for t in range(start, stop):
        factor = np.float32(1 + beta * np.log1p(np.float64(max(positions[t], 0) // length)))
        for i in range(0, width, _BLOCK):
            n = min(_BLOCK, width - i)
            load(x, fmt, t * width + i, v[:n])
            for j in range(n):
                v[j] *= factor
            store(v[:n], fmt, out, t * width + i)


# scale     out[t] = x[t] · (1 + beta · ln(1 + floor(positions[t] / length)))
# shapes    x, out [T, width] flat, uint16 patterns; positions int32 [T]
# threads   prange over chunks of tokens
# bytes     2 * T * width * itemsize
# limits    none
@njit(parallel=True)
def _scale_parallel(x, fmt, positions, width, beta, length, out):
    T = positions.size
    step = max(1, _BLOCK * _CHUNK // width)
    for c in prange((T + step - 1) // step):
        _scale_rows(x, fmt, positions, width, beta, length, out, c * step, min(T, (c + 1) * step))


@kernel(ops.position_scale, device="cpu")
def position_scale(x, positions, beta, length, *, out):
    if x.size == 0:
        return
    at = positions.view()
    at.setflags(False)
    call = (flat(x), fmt(x), at, x.size // len(x), float(beta), int(length), flat_out(out))
    if x.size <= SERIAL:
        _scale_rows(*call, 0, len(x))
    else:
        _threads.run(_scale_parallel, *call)
