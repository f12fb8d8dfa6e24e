"""AltUp on the CPU: sums of streams, and passes over rows that need their mean first."""

import numpy as np
from numba import prange

from penstock import ops
from penstock.backends.cpu._formats import fmt, frozen
from penstock.backends.cpu._math import tanh32
from penstock.backends.cpu._rows import bytes_in, bytes_out, itemsize, load_bytes, store_bytes
from penstock.backends.cpu._threads import run
from penstock.backends.cpu.compile import FUSED_MULTIPLY_ADD, SUM_IN_ANY_ORDER, njit
from penstock.ops.altup import LEAST
from penstock.ops.op import kernel

_SERIAL = 1 << 15  # numbers up to which one thread is faster than waking the others
_LEAST = np.float32(LEAST)


@kernel(ops.altup_mix, device="cpu")
def altup_mix(first, rest, scores, weight, bias, extra=None, *, out):
    if not first.size:
        return
    factors = tuple(frozen(array) for array in (scores, weight, bias))
    args = (frozen(first), frozen(rest), *factors, bytes_in(extra), fmt(first if extra is None else extra), *out)
    if rest.size <= _SERIAL:
        _mix_some(*args, 0, len(first))
    else:
        run(_mix, *args)


# mix       y[q] = sum_p c[q, p] s[p], c = weight tanh(scores) + bias, s = first, rest, extra; p in order
# shapes    first, y0 [T, D], rest, y [T, P - 1, D], scores [T, P], weight [P N, P], bias [P N] float32; extra [T, D] of
#           any format as bytes
# threads   prange over tokens; a token belongs to one thread
# bytes     T * D * (2 P * 4 + itemsize), each once
# limits    none
@njit(parallel=True)
def _mix(first, rest, scores, weight, bias, extra, extra_fmt, y0, y):
    for t in prange(first.shape[0]):
        _mix_some(first, rest, scores, weight, bias, extra, extra_fmt, y0, y, t, t + 1)


@njit
def _mix_some(first, rest, scores, weight, bias, extra, extra_fmt, y0, y, start, stop):
    P, D = rest.shape[1] + 1, first.shape[1]
    width = bias.size // P
    last, c = np.empty(D, np.float32), np.empty(bias.size, np.float32)
    for t in range(start, stop):
        for i in range(bias.size):
            c[i] = bias[i]
            for k in range(P):
                c[i] += weight[i, k] * tanh32(scores[t, k])
        if width > P:
            load_bytes(extra[t], extra_fmt, last)
        for q in range(P):
            row = y0[t] if q == 0 else y[t, q - 1]
            _times(c[q * width], first[t], row)
            for p in range(1, P):
                _add_times(c[q * width + p], rest[t, p - 1], row)
            if width > P:
                _add_times(c[q * width + P], last, row)


@njit
def _times(c, x, y):
    for j in range(y.size):
        y[j] = c * x[j]


@njit(fastmath=FUSED_MULTIPLY_ADD)
def _add_times(c, x, y):
    for j in range(y.size):
        y[j] += c * x[j]


@kernel(ops.altup_match, device="cpu")
def altup_match(x, like, *, out):
    if not x.size:
        return
    args = (bytes_in(x), bytes_in(like), fmt(x), fmt(like), bytes_out(out))
    if x.size <= _SERIAL:
        _match_some(*args, 0, len(x))
    else:
        run(_match, *args)


# match     y = x sqrt(mean(like^2) / max(mean(x^2), 1e-5))
# shapes    x, y [T, D] of one format, like [T, D] of any, as bytes
# threads   prange over rows
# bytes     T * D * (2 itemsize of x + itemsize of like)
# limits    none
@njit(parallel=True)
def _match(x, like, x_fmt, like_fmt, out):
    for t in prange(x.shape[0]):
        _match_some(x, like, x_fmt, like_fmt, out, t, t + 1)


@njit
def _match_some(x, like, x_fmt, like_fmt, out, start, stop):
    D = x.shape[1] // itemsize(x_fmt)
    row, other = np.empty(D, np.float32), np.empty(D, np.float32)
    for t in range(start, stop):
        load_bytes(x[t], x_fmt, row)
        load_bytes(like[t], like_fmt, other)
        size = max(_squares(row) / np.float32(D), _LEAST)
        _times(np.sqrt(_squares(other) / np.float32(D) / size), row, other)
        store_bytes(other, x_fmt, out[t])


@njit(fastmath=SUM_IN_ANY_ORDER)
def _squares(row):
    total = np.float32(0)
    for j in range(row.size):
        total += row[j] * row[j]
    return total


@kernel(ops.gaussian_topk, device="cpu")
def gaussian_topk(x, factor, *, out):
    if not x.size:
        return
    args = (bytes_in(x), np.float32(factor), fmt(x), bytes_out(out))
    if x.size <= _SERIAL:
        _cut_some(*args, 0, len(x))
    else:
        run(_cut, *args)


# cut       y = max(x - (mean + factor * std), 0)
# shapes    x, y [T, N] of one format, as bytes
# threads   prange over rows
# bytes     2 * T * N * itemsize
# limits    none
@njit(parallel=True)
def _cut(x, factor, x_fmt, out):
    for t in prange(x.shape[0]):
        _cut_some(x, factor, x_fmt, out, t, t + 1)


@njit
def _cut_some(x, factor, x_fmt, out, start, stop):
    N = x.shape[1] // itemsize(x_fmt)
    row = np.empty(N, np.float32)
    for t in range(start, stop):
        load_bytes(x[t], x_fmt, row)
        mean = _sum(row) / np.float32(N)
        cut = mean + factor * np.sqrt(_squares_about(row, mean) / np.float32(N))
        for j in range(N):
            row[j] = max(row[j] - cut, np.float32(0))
        store_bytes(row, x_fmt, out[t])


@njit(fastmath=SUM_IN_ANY_ORDER)
def _sum(row):
    total = np.float32(0)
    for j in range(row.size):
        total += row[j]
    return total


@njit(fastmath=SUM_IN_ANY_ORDER)
def _squares_about(row, mean):
    total = np.float32(0)
    for j in range(row.size):
        total += (row[j] - mean) * (row[j] - mean)
    return total
