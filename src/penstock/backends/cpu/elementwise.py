"""CPU kernels of the elementwise ops: one pass over blocks that fit in the first-level cache.

Arrays come flat, as uint16 patterns whatever their dtype, so each kernel has one signature. A block is widened to
float32 scratch, worked on there and rounded into `out`: loops on scratch vectorise even where `out` is one of the
inputs.
"""

from typing import Any

import numpy as np
from numba import prange

from penstock import ops
from penstock.backends.cpu import _threads
from penstock.backends.cpu._formats import BFLOAT16, FLOAT16, FLOAT32, fmt, rounded, widened
from penstock.backends.cpu._math import gelu32, sigmoid32, silu32, tanh32
from penstock.backends.cpu.compile import FUSED_MULTIPLY_ADD, njit
from penstock.dtypes import round_to
from penstock.ops.op import kernel

ADD, MUL, WIDE_ADD, WIDE_MUL, ADD_NUMBER, MUL_NUMBER, GELU, SWIGLU, GEGLU, SOFTCAP, SIGMOID_GATE = range(11)

_BLOCK = 2048  # numbers in a scratch array: 8 KB
_CHUNK = 16  # blocks that a thread takes at once
SERIAL = 1 << 15  # numbers up to which waking the other threads costs more than it saves
_UINT16 = np.dtype(np.uint16)
NOTHING, NO_OUTPUT = np.empty(0, np.uint16), np.empty(0, np.uint16)  # in the place of arrays that a call lacks
NOTHING.flags.writeable = False


def flat(array: np.ndarray) -> np.ndarray:
    """The bits of an input as read-only uint16 [size * itemsize / 2]."""
    bits = array.ravel().view(_UINT16)
    bits.setflags(False)  # read-only: Numba would compile a kernel again for an array that is so by itself
    return bits


def flat_out(array: np.ndarray) -> np.ndarray:
    """The bits of an output as uint16 [size * itemsize / 2]."""
    assert array.flags.c_contiguous
    return array.ravel().view(_UINT16)


def slots(weights: np.ndarray) -> np.ndarray:
    """Weights of expert slots as read-only float32 [rows, k]."""
    rows = (weights if weights.ndim == 2 else weights.reshape(-1, weights.shape[-1])).view()
    rows.setflags(False)
    return rows


@njit
def load(bits, fmt, start, out):
    """Numbers start, start + 1, … of an array as float32."""
    n = out.size
    if fmt == FLOAT32:
        row = bits[2 * start : 2 * (start + n)].view(np.float32)
        for j in range(n):
            out[j] = row[j]
    elif fmt == FLOAT16:
        half = bits[start : start + n]
        for j in range(n):
            out[j] = widened(half[j], FLOAT16)
    else:
        half = bits[start : start + n]
        for j in range(n):
            out[j] = widened(half[j], BFLOAT16)


@njit
def store(values, fmt, bits, start):
    """float32 rounded into an array from number `start` on."""
    n = values.size
    if fmt == FLOAT32:
        row = bits[2 * start : 2 * (start + n)].view(np.float32)
        for j in range(n):
            row[j] = values[j]
    elif fmt == FLOAT16:
        half = bits[start : start + n]
        for j in range(n):
            half[j] = rounded(values[j], FLOAT16)
    else:
        half = bits[start : start + n]
        for j in range(n):
            half[j] = rounded(values[j], BFLOAT16)


# -- maps ------------------------------------------------------------------------------------------------------------


@njit
def _narrowed(x, odd):
    """float32 of a float64: to nearest, or to odd if it is to be rounded again.

    To odd means that an inexact result has its last bit set, which keeps "above or below the tie" for the next
    rounding.
    """
    near = np.float32(x)
    back = np.float64(near)
    pattern = near.view(np.int32)
    toward_zero = np.int32(pattern - np.int32(1)) if abs(back) > abs(x) else pattern
    inexact = (back != x) & (abs(near) < np.float32(np.inf))
    return np.int32(toward_zero | np.int32(1)).view(np.float32) if inexact & odd else near


@njit(fastmath=FUSED_MULTIPLY_ADD)
def _map(op, a, b, x, odd):
    """a[j] = op(a[j], b[j], x)."""
    if op == ADD:
        for j in range(a.size):
            a[j] = a[j] + b[j]
    elif op == MUL:
        for j in range(a.size):
            a[j] = a[j] * b[j]
    elif op == WIDE_ADD:
        for j in range(a.size):
            a[j] = _narrowed(np.float64(a[j]) + np.float64(b[j]), odd)
    elif op == WIDE_MUL:
        for j in range(a.size):
            a[j] = _narrowed(np.float64(a[j]) * np.float64(b[j]), odd)
    elif op == ADD_NUMBER:
        for j in range(a.size):
            a[j] = _narrowed(np.float64(a[j]) + x, odd)
    elif op == MUL_NUMBER:
        for j in range(a.size):
            a[j] = _narrowed(np.float64(a[j]) * x, odd)
    elif op == GELU:
        for j in range(a.size):
            a[j] = gelu32(a[j])
    elif op == SWIGLU:
        for j in range(a.size):
            a[j] = silu32(a[j]) * b[j]
    elif op == GEGLU:
        for j in range(a.size):
            a[j] = gelu32(a[j]) * b[j]
    elif op == SIGMOID_GATE:
        for j in range(a.size):
            a[j] = a[j] * sigmoid32(b[j])
    else:
        cap, inverse = np.float32(x), np.float32(1 / x)
        straight = np.float32(x * 2.0**-13)  # up to here cap * tanh(a / cap) is a
        for j in range(a.size):
            pressed = cap * tanh32(a[j] * inverse)
            a[j] = a[j] if abs(a[j]) <= straight else pressed


@njit
def _map_blocks(op, a, b, b_fmt, x, fmt, period, block, out, start, stop):
    """Numbers start … stop - 1; with a period, b is one vector of that length and blocks hold whole periods."""
    s, t = np.empty(block, np.float32), np.empty(block, np.float32)
    for i in range(0, block if period > 0 else 0, max(1, period)):
        load(b, b_fmt, 0, t[i : i + period])
    odd = fmt != FLOAT32
    whole = b.size > 0 and period == 0
    for i in range(start, stop, block):
        n = min(block, stop - i)
        load(a, fmt, i, s[:n])
        if whole:
            load(b, b_fmt, i, t[:n])
        _map(op, s[:n], t[:n], x, odd)
        store(s[:n], fmt, out, i)


# map       out[i] = op(a[i], b[i] or b[i % period] or x): the op is one of the codes above
# shapes    a, out n numbers of one format; b as many, or `period` of any format, or none; uint16 patterns
# threads   prange over chunks of blocks; numbers do not depend on each other, so neither on the threads
# bytes     a, b and out once each; scratch of 16 KB stays in the first-level cache
# limits    with a period, block is a multiple of it; softcap takes a cap that float32 holds
@njit(parallel=True)
def _map_parallel(op, a, b, b_fmt, x, fmt, period, block, out, n):
    step = _CHUNK * block
    for c in prange((n + step - 1) // step):
        _map_blocks(op, a, b, b_fmt, x, fmt, period, block, out, c * step, min(n, (c + 1) * step))


def _run(op: int, a: np.ndarray, b: Any, out: np.ndarray, x: float = 0.0) -> None:
    """Map a and b (an array like a, a vector for its last axis, or None) to out."""
    n = a.size
    if n == 0:
        return
    period, block, b_bits, b_fmt = 0, _BLOCK, NOTHING, FLOAT32
    if b is not None:
        b_bits, b_fmt = flat(b), fmt(b)
        if b.size != n:
            period = b.size
            block = max(1, _BLOCK // period) * period
    call = (op, flat(a), b_bits, b_fmt, x, fmt(a), period, min(block, n), flat_out(out))
    if n <= SERIAL:
        _map_blocks(*call, 0, n)
    else:
        _threads.run(_map_parallel, *call, n)


def _number(b: Any) -> float | None:
    """b as a number, if it is one or an array of one."""
    if isinstance(b, np.ndarray):
        return float(b.reshape(-1)[0]) if b.size == 1 else None
    return float(b)


# The definition rounds a float64 result once. Where both operands are of one half, a float32 sum or product rounded to
# that half is the same, as 24 bits are more than twice its bits; operands of two formats take the wide way.


@kernel(ops.add, device="cpu")
def add(a, b, *, out):
    number = _number(b)
    if number is not None:
        _run(ADD_NUMBER, a, None, out, number)
    else:
        _run(ADD if fmt(a) in (FLOAT32, fmt(b)) else WIDE_ADD, a, b, out)


@kernel(ops.mul, device="cpu")
def mul(a, b, *, out):
    number = _number(b)
    if number is not None:
        _run(MUL_NUMBER, a, None, out, number)
    else:
        _run(MUL if fmt(a) in (FLOAT32, fmt(b)) else WIDE_MUL, a, b, out)


@kernel(ops.residual_add, device="cpu")
def residual_add(a, b, *, out):
    _run(ADD if fmt(a) in (FLOAT32, fmt(b)) else WIDE_ADD, a, b, out)


@kernel(ops.gelu_tanh, device="cpu")
def gelu_tanh(x, *, out):
    _run(GELU, x, None, out)


@kernel(ops.swiglu, device="cpu")
def swiglu(gate, up, *, out):
    _run(SWIGLU, gate, up, out)


@kernel(ops.geglu, device="cpu")
def geglu(gate, up, *, out):
    _run(GEGLU, gate, up, out)


@kernel(ops.softcap, device="cpu")
def softcap(x, cap, *, out):
    _run(SOFTCAP, x, None, out, float(cap))


@kernel(ops.sigmoid_gate, device="cpu")
def sigmoid_gate(x, gate, *, out):
    _run(SIGMOID_GATE, x, gate, out)


# -- weighted sums ---------------------------------------------------------------------------------------------------


@njit(fastmath=FUSED_MULTIPLY_ADD)
def _add_scaled(bits, fmt, start, weight, total):
    """total[j] += weight * number start + j."""
    n = total.size
    if fmt == FLOAT32:
        row = bits[2 * start : 2 * (start + n)].view(np.float32)
        for j in range(n):
            total[j] += weight * row[j]
    elif fmt == FLOAT16:
        half = bits[start : start + n]
        for j in range(n):
            total[j] += weight * widened(half[j], FLOAT16)
    else:
        half = bits[start : start + n]
        for j in range(n):
            total[j] += weight * widened(half[j], BFLOAT16)


@njit
def expert_sum(expert_out, fmt, weights, row, total):
    """total = Σ_i weights[row, i] * expert_out[row, i], slot after slot; weights [rows, k], expert_out flat."""
    total[:] = np.float32(0)
    k = weights.shape[1]
    for i in range(k):
        _add_scaled(expert_out, fmt, (row * k + i) * total.size, weights[row, i], total)


@njit
def _weighted_rows(expert_out, weights, fmt, dim, out, start, stop):
    total = np.empty(dim, np.float32)
    for row in range(start, stop):
        expert_sum(expert_out, fmt, weights, row, total)
        store(total, fmt, out, row * dim)


@kernel(ops.columns, device="cpu")
def columns(x, start, stop, dtype, *, out):
    part = x[:, start:stop]
    np.copyto(out, part if out.dtype == x.dtype else round_to(part, out.dtype))


@kernel(ops.split_columns, device="cpu")
def split_columns(x, first, second, third, fourth, *, out):
    start = 0
    for part in out:
        if part is not None:
            np.copyto(part, x[:, start : start + part.shape[1]])
            start += part.shape[1]


# weighted_sum  y[r] = sum_i weights[r, i] * expert_out[r, i], from 0 in slot order, in float32
# shapes        expert_out [rows, k, dim], y [rows, dim] flat, one format, uint16 patterns; weights float32 [rows, k]
# threads       prange over chunks of rows; a row belongs to one thread
# bytes         rows * (k + 1) * dim * itemsize, each once
# limits        none
@njit(parallel=True)
def _weighted_parallel(expert_out, weights, fmt, dim, out):
    rows, k = weights.shape
    step = max(1, _BLOCK * _CHUNK // (k * dim))
    for c in prange((rows + step - 1) // step):
        _weighted_rows(expert_out, weights, fmt, dim, out, c * step, min(rows, (c + 1) * step))


@kernel(ops.weighted_sum, device="cpu")
def weighted_sum(expert_out, weights, *, out):
    if expert_out.size == 0:  # no rows, or no slots
        out[...] = 0
        return
    dim = expert_out.shape[-1]
    call = (flat(expert_out), slots(weights), fmt(expert_out), dim, flat_out(out))
    if expert_out.size <= SERIAL:
        _weighted_rows(*call, 0, out.size // dim)
    else:
        _threads.run(_weighted_parallel, *call)
