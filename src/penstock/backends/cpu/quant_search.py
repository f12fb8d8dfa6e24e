"""Compiled search for scales, biases and codes that keep what matters of a matrix.

Formats come as in `quant.py`: bit patterns and a number. What is searched is still code * scale + bias, so that the
result is an ordinary quantized tensor.
"""

import numpy as np
from numba import prange

from penstock.backends.cpu._formats import fmt, frozen, readable, rounded, widened
from penstock.backends.cpu._formats import writable as bits_of
from penstock.backends.cpu._threads import run
from penstock.backends.cpu.compile import SUM_IN_ANY_ORDER, njit
from penstock.backends.cpu.quant import _extent, _load, _pack, _words, plain
from penstock.dtypes import dtype_name
from penstock.quant import QuantizedTensor

_ROWS = 16  # rows a thread takes at once: they share what is read of the feedback
# Parts of a group's span that codes reach over at first. Few bits lose less by cutting off its ends.
_REACH = np.array([1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.64, 0.58, 0.52], np.float32)
_TURNS = 3  # of codes for scale and bias, then scale and bias for codes
_NO_FEEDBACK = np.zeros((1, 1), np.float32)


def search_into(
    array: np.ndarray, importance: np.ndarray, out: QuantizedTensor, feedback: np.ndarray | None = None
) -> int:
    """Fill `out` with codes, scales and biases of small weighted error; returns the first row that has none, or -1.

    array [N, K] contiguous, importance float32 [K], at least 0; out as in `quant.quantize_into`, whose rounding is one
    of the candidates: without feedback the weighted error of a group is never above that of plain rounding. feedback
    float32 [K, K]: the error of weight j, times row j, is taken from the weights behind it before those are rounded. A
    row that has none holds a value that is not finite or spans more than float32 holds.
    """
    assert array.flags.c_contiguous and importance.flags.c_contiguous
    assert (array.shape, dtype_name(array.dtype)) == (out.shape, out.dtype)
    K, gs = array.shape[-1], out.group_size
    assert (importance.dtype, importance.shape) == (np.float32, (K,))
    if feedback is None:
        feedback = _NO_FEEDBACK
    else:
        assert (feedback.dtype, feedback.shape) == (np.float32, (K, K)) and feedback.flags.c_contiguous
    if array.size == 0:
        return -1
    rows = len(array)
    packed = _words(out).reshape(rows, K // gs, -1)
    scales, biases = bits_of(out.scales), bits_of(out.biases)
    inputs = readable(array), frozen(importance).reshape(-1, gs), frozen(feedback), frozen(_REACH)
    return int(run(_search, *inputs, out.bits, fmt(out.scales), packed, scales, biases))


# search    per group: s, b, codes q that make Σ_j h[j] (w[j] − (q[j] s + b))² small, s and b numbers of the format:
#           plain rounding, and from each reach r: b = mid − r span / 2, s = r span / n, then in turns codes and the
#           least squares of s and b for them; of these the best after rounding s and b. With feedback U the codes are
#           then chosen one by one, w[k] −= (w[j] − (q[j] s + b)) U[j, k] for all k > j of the row
# shapes    weights [N, K], scales, biases [N, K / gs]: bits of one format; importance [K / gs, gs]; feedback [K, K] or
#           [1, 1] for none; packed uint8 [N, K / gs, gs · bits / 8]
# threads   prange over blocks of rows; a row belongs to one thread, so the result does not depend on their number
# bytes     as quantize, and the feedback once per block of 16 rows; compute bound: about 40 passes over a group in
#           cache, K multiplications per weight for the feedback
# limits    gs a multiple of 32; sums in any order, so that vector units of other widths may choose another of two
#           candidates that are equally good
@njit(parallel=True)
def _search(weights, importance, feedback, reach, bits, fmt, packed, scales, biases):
    rows = weights.shape[0]
    blocks = (rows + _ROWS - 1) // _ROWS
    unfit = np.empty(blocks, np.int64)
    for i in prange(blocks):
        stop = min(rows, (i + 1) * _ROWS)
        unfit[i] = _search_rows(
            weights, importance, feedback, reach, bits, fmt, packed, scales, biases, i * _ROWS, stop
        )
    for i in range(blocks):
        if unfit[i] >= 0:
            return unfit[i]
    return -1


@njit
def _search_rows(weights, importance, feedback, reach, bits, fmt, packed, scales, biases, start, stop):
    K, gs = weights.shape[1], importance.shape[1]
    n = np.float32((1 << bits) - 1)
    pattern = np.empty((stop - start, K), np.int32)
    w = pattern.view(np.float32)
    q = np.empty(gs, np.float32)
    codes = np.empty((stop - start, gs), np.uint8)
    s, b = np.empty(stop - start, np.float32), np.empty(stop - start, np.float32)
    for r in range(stop - start):
        _load(weights[start + r], fmt, pattern[r])
    for g in range(K // gs):
        first, last = g * gs, (g + 1) * gs
        for r in range(stop - start):
            fits, s[r], b[r] = _group(
                w[r, first:last], pattern[r, first:last], importance[g], reach, n, fmt, q, codes[r]
            )
            if not fits:
                return start + r
            scales[start + r, g], biases[start + r, g] = rounded(s[r], fmt), rounded(b[r], fmt)
        if feedback.shape[0] == K:
            for j in range(first, last):
                for r in range(stop - start):
                    x = _code(w[r, j], s[r], b[r], n)
                    codes[r, j - first] = np.uint8(np.int32(x))
                    _feed(w[r], w[r, j] - (x * s[r] + b[r]), feedback[j], j + 1)
        for r in range(stop - start):
            _pack(codes[r].view(np.uint64), bits, packed[start + r, g])
    return -1


@njit
def _group(w, pattern, h, reach, n, fmt, q, codes):
    """Whether the group can be quantized, the best scale and bias as numbers of the format, and `codes` for them."""
    zero, half = np.float32(0), np.float32(0.5)
    lo, hi = _extent(pattern)
    span = hi - lo
    if not np.isfinite(span):
        return False, zero, zero
    s, b = plain(lo, hi, n)
    _codes(w, s, b, n, q)
    best_s, best_b = widened(rounded(s, fmt), fmt), widened(rounded(b, fmt), fmt)
    least = _error(w, h, q, best_s, best_b)
    _keep(q, codes)
    if span <= np.float32(1e-7) * n:
        return True, best_s, best_b
    for r in reach:
        s = r * span / n
        b = half * (lo + hi) - half * r * span
        for _ in range(_TURNS):
            _codes(w, s, b, n, q)
            s, b = _fitted(w, h, q, s, b)
        s, b = widened(rounded(s, fmt), fmt), widened(rounded(b, fmt), fmt)
        if s == zero or not np.isfinite(s) or not np.isfinite(b):
            continue
        _codes(w, s, b, n, q)
        error = _error(w, h, q, s, b)
        if error < least:
            least, best_s, best_b = error, s, b
            _keep(q, codes)
    return True, best_s, best_b


@njit
def _code(w, s, b, n):
    zero = np.float32(0)
    x = np.rint((w - b) / s)
    x = x if x > zero else zero  # 0 / 0 is code 0 as well
    return x if x < n else n


@njit
def _codes(w, s, b, n, q):
    for j in range(w.size):
        q[j] = _code(w[j], s, b, n)


@njit
def _keep(q, codes):
    for j in range(q.size):
        codes[j] = np.uint8(np.int32(q[j]))


@njit(fastmath=SUM_IN_ANY_ORDER)
def _feed(w, error, row, start):
    for k in range(start, w.size):
        w[k] -= error * row[k]


@njit(fastmath=SUM_IN_ANY_ORDER)
def _error(w, h, q, s, b):
    total = np.float32(0)
    for j in range(w.size):
        off = w[j] - (q[j] * s + b)
        total += h[j] * off * off
    return total


@njit(fastmath=SUM_IN_ANY_ORDER)
def _fitted(w, h, q, s, b):
    """Scale and bias of least weighted error for given codes: s, b unchanged where the codes are all alike."""
    sh = sq = sqq = sw = sqw = np.float32(0)
    for j in range(w.size):
        hq = h[j] * q[j]
        sh += h[j]
        sq += hq
        sqq += hq * q[j]
        sw += h[j] * w[j]
        sqw += hq * w[j]
    det = sh * sqq - sq * sq
    if not det > np.float32(1e-6) * sh * sqq:
        return s, b
    slope = (sh * sqw - sq * sw) / det
    return slope, (sw - slope * sq) / sh
