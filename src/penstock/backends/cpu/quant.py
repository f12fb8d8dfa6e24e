"""Compiled loops of quantize and dequantize, equal to the NumPy definitions in penstock.quant bit for bit.

Numba knows neither float16 nor bfloat16, so arrays come as bit patterns: int32 for float32, uint16 for the halves; a
format number says which half it is. Groups are independent and follow each other in memory, so a tensor of any shape is
a list of groups here. The host is little-endian, as every platform of Numba is.
"""

import numpy as np
from numba import prange

from penstock.backends.cpu._formats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    fmt,
    number,
    pattern_of,
    readable,
    rounded,
    widened,
)
from penstock.backends.cpu._formats import writable as bits_of
from penstock.backends.cpu._threads import run
from penstock.backends.cpu.compile import njit
from penstock.dtypes import dtype_name
from penstock.quant import GgufTensor, QuantizedTensor, group_scales, levels, units_of

_CHUNK = 128  # groups a thread takes at once: 4 to 16 thousand weights, enough to hide the two scratch arrays


def quantize_into(array: np.ndarray, out: QuantizedTensor) -> int:
    """Fill `out` with the codes, scales and biases of `array`; returns the first group that cannot be quantized or -1.

    array [..., K] contiguous, out.shape == array.shape, scales of the array's dtype. Such a group holds a value that is
    not finite or spans more than float32 holds; nothing in `out` is defined then.
    """
    assert array.flags.c_contiguous
    assert array.shape == out.shape
    assert out.mode != "affine" or dtype_name(array.dtype) == out.dtype
    if array.size == 0:
        return -1
    weights = readable(array).reshape(-1, out.group_size)
    if out.mode != "affine":
        top = np.float32(448 if out.mode == "mxfp8" else 6)
        rest = (out.bits, out.mode == "nvfp4", top, units_of(out), _words(out), out.scales.reshape(-1))
        return int(run(_quantize_floats, weights, fmt(array), *rest))
    packed, scales, biases = _words(out), bits_of(out.scales).reshape(-1), bits_of(out.biases).reshape(-1)
    return int(run(_quantize, weights, out.bits, fmt(out.scales), packed, scales, biases))


def dequantize_into(w: QuantizedTensor, out: np.ndarray) -> None:
    """Fill `out` [..., N, K], contiguous, float32, float16 or bfloat16, with code * scale + bias of `w` (NumPy arrays).

    Rounds as penstock.quant.dequantize does: in the scales' dtype where out has it, else in float32 and then to out.
    """
    assert out.flags.c_contiguous
    assert out.shape == w.shape
    if out.size == 0:
        return
    if isinstance(w, GgufTensor):
        out[...] = w.dequantize(dtype_name(out.dtype))
        return
    values, out_fmt = bits_of(out).reshape(-1, w.group_size), fmt(out)
    if w.mode != "affine":
        with np.errstate(over="ignore"):
            numbers = readable(group_scales(w)).reshape(-1)
        run(_dequantize_floats, readable(_words(w)), numbers, readable(levels(w.mode)), w.bits, out_fmt, values)
        return
    packed, scales, biases = readable(_words(w)), readable(w.scales).reshape(-1), readable(w.biases).reshape(-1)
    run(_dequantize, packed, scales, biases, w.bits, fmt(w.scales), out_fmt, values)


def _words(w: QuantizedTensor) -> np.ndarray:
    """The packed codes as bytes [groups, gs * bits / 8]."""
    return w.packed.view(np.uint8).reshape(-1, w.group_size * w.bits // 8)


# quantize  per group: s, b as penstock.quant.quantize defines them; code = clip(rint((w - b) / s), 0, 2**bits - 1)
# shapes    weights [groups, gs], scales, biases [groups]: bits of one format; packed uint8 [groups, gs * bits / 8]
# threads   prange over chunks of groups; a group belongs to one thread, so the result does not depend on their number
# bytes     groups * gs * itemsize in, groups * (gs * bits / 8 + 2 * itemsize) out, each once
# limits    gs a multiple of 32; no fast-math: division, subtraction and rint are IEEE float32, as in the definition
@njit(parallel=True)
def _quantize(weights, bits, fmt, packed, scales, biases):
    """Returns the first group that is not finite or too wide, or -1."""
    groups = weights.shape[0]
    chunks = (groups + _CHUNK - 1) // _CHUNK
    unfit = np.empty(chunks, np.int64)
    for c in prange(chunks):
        stop = min(groups, (c + 1) * _CHUNK)
        unfit[c] = _quantize_chunk(weights, bits, fmt, packed, scales, biases, c * _CHUNK, stop)
    for c in range(chunks):
        if unfit[c] >= 0:
            return unfit[c]
    return -1


@njit
def plain(lo, hi, n):
    """Scale and bias of a group from lo to hi with codes 0 … n: the edge further from 0 is met exactly; of two codes
    both edges are.
    """
    if n == np.float32(1):
        return max(hi - lo, np.float32(1e-7)), lo
    low_edge = abs(lo) > abs(hi)
    s = max((hi - lo) / n, np.float32(1e-7))
    s = s if low_edge else -s
    edge = lo if low_edge else hi
    q0 = np.rint(edge / s)
    if q0 != np.float32(0):
        return edge / q0, edge
    return s, np.float32(0)


@njit
def _quantize_chunk(weights, bits, fmt, packed, scales, biases, start, stop):
    gs = weights.shape[1]
    pattern = np.empty(gs, np.int32)
    codes = np.empty(gs, np.uint8)
    w, eights = pattern.view(np.float32), codes.view(np.uint64)
    n = np.float32((1 << bits) - 1)
    zero = np.float32(0)
    for g in range(start, stop):
        _load(weights[g], fmt, pattern)
        lo, hi = _extent(pattern)
        span = hi - lo
        if not np.isfinite(span):  # an infinity or NaN in the group is lo or hi
            return g
        if bits == 1 and lo == zero:  # of 0 and -0 the first one
            at = 0
            while w[at] != zero:
                at += 1
            lo = w[at]
        s, b = plain(lo, hi, n)
        for j in range(gs):
            q = np.rint((w[j] - b) / s)
            q = q if q > zero else zero  # 0 / 0, from a group of equal weights beyond 3.4e31, is code 0 as well
            codes[j] = np.uint8(np.int32(q if q < n else n))
        _pack(eights, bits, packed[g])
        scales[g] = rounded(s, fmt)
        biases[g] = rounded(b, fmt)
    return -1


# quantize_floats  per group: scale and codes as penstock.quant.quantize defines them for modes that are not affine
# shapes    weights [groups, gs] bits of a format, packed uint8 [groups, gs * bits / 8], scales uint8 [groups]; top: the
#           largest float of the codes; units float32 [matrices], of as many groups each
# threads   prange over chunks of groups; a group belongs to one thread
# bytes     groups * gs * itemsize in, groups * (gs * bits / 8 + 1) out, each once
# limits    bits 4 or 8; no fast-math: quotients are IEEE float32, rounded to the weights' format
@njit(parallel=True)
def _quantize_floats(weights, fmt, bits, small_scales, top, units, packed, scales):
    """Returns the first group that is not finite, or -1."""
    groups = weights.shape[0]
    chunks = (groups + _CHUNK - 1) // _CHUNK
    unfit = np.empty(chunks, np.int64)
    for c in prange(chunks):
        stop = min(groups, (c + 1) * _CHUNK)
        unfit[c] = _quantize_floats_chunk(
            weights, fmt, bits, small_scales, top, units, packed, scales, c * _CHUNK, stop
        )
    for c in range(chunks):
        if unfit[c] >= 0:
            return unfit[c]
    return -1


@njit
def _quantize_floats_chunk(weights, fmt, bits, small_scales, top, units, packed, scales, start, stop):
    gs, each = weights.shape[1], weights.shape[0] // units.size
    pattern = np.empty(gs, np.int32)
    w = pattern.view(np.float32)
    for g in range(start, stop):
        _load(weights[g], fmt, pattern)
        most = np.int32(0)
        for j in range(gs):
            most = max(most, np.int32(pattern[j] & np.int32(0x7FFFFFFF)))  # |w| orders as its bits do
        if most >= np.int32(0x7F800000):
            return g
        m, unit = widened(rounded(number(most) / top, fmt), fmt), units[g // each]
        if small_scales:
            code = _e4m3_code(m * unit)
            factor = _e4m3_value(code)
        else:
            exponent = _exponent_above(m)
            code = np.uint8((exponent + 127) & 255)
            factor = np.float32(2.0**exponent)
        scales[g] = code
        row = packed[g]
        for i in range(row.size):
            row[i] = 0
        for j in range(gs):
            ratio = widened(rounded(w[j] / factor, fmt), fmt) * unit if factor != np.float32(0) else np.float32(0)
            if bits == 8:
                row[j] = _e4m3_code(ratio)
            else:
                row[j >> 1] |= np.uint8(_e2m1_code(ratio) << (4 * (j & 1)))
    return -1


@njit
def _exponent_above(m):
    """The smallest e with 2**e >= m, 0 for m = 0."""
    bits = pattern_of(m)
    if bits == 0:
        return 0
    if bits < 0x00800000:  # subnormal: bits * 2**-149
        e = -149
        while (1 << (e + 149)) < bits:
            e += 1
        return e
    e = (bits >> 23) - 127
    return e + 1 if bits & 0x007FFFFF else e


@njit
def _e4m3_code(x):
    """The nearest E4M3 number, ties to even, at most 448 in magnitude."""
    bits = pattern_of(x)
    sign = np.int32((bits >> np.int32(24)) & np.int32(0x80))
    bits &= np.int32(0x7FFFFFFF)
    if bits < np.int32(0x3C800000):  # below 2**-6: multiples of 2**-9
        code = np.int32(np.rint(number(bits) * np.float32(512)))
    else:
        bits = min(bits, np.int32(0x43E00000))  # 448
        code = ((bits + np.int32(0x7FFFF) + ((bits >> np.int32(20)) & np.int32(1))) >> np.int32(20)) - np.int32(960)
    return np.uint8(sign | code)


@njit
def _e4m3_value(code):
    magnitude = np.int32(code & 0x7F)
    if magnitude < 8:
        return np.float32(magnitude) * np.float32(2.0**-9)
    return number(np.int32((magnitude + np.int32(960)) << np.int32(20)))


@njit
def _e2m1_code(x):
    """The nearest E2M1 number, the one nearer to 0 in a tie; far beyond 6 differences in float32 decide, and what is
    not a number is 0.
    """
    a = abs(x)
    if not a <= np.float32(1 << 20):
        return _nearest_e2m1(x)
    if a <= np.float32(0.25):
        return 0
    if a <= np.float32(1.75):
        code = 1 if a <= np.float32(0.75) else 2 if a <= np.float32(1.25) else 3
    else:
        code = 4 if a <= np.float32(2.5) else 5 if a <= np.float32(3.5) else 6 if a <= np.float32(5) else 7
    return code + 8 if x < 0 else code


@njit
def _nearest_e2m1(x):
    best, least = 0, abs(x)
    for code in range(16):
        e, m = (code >> 1) & 3, code & 1
        level = np.float32(0.5 * m) if e == 0 else np.float32((1 + 0.5 * m) * 2.0 ** (e - 1))
        gap = abs(np.float32(x - (-level if code & 8 else level)))
        if gap < least:
            best, least = code, gap
    return best


# dequantize  value = code * scale + bias, product and sum rounded in float32, or in the half that scales and out share
# shapes      packed uint8 [groups, gs * bits / 8]; scales, biases [groups], out [groups, gs] bits of float32 or a half
# threads     prange over chunks of groups, each written by one thread
# bytes       groups * (gs * bits / 8 + 2 * itemsize) in, groups * gs * itemsize out, each once
# limits      gs a multiple of 32; no fast-math: a fused multiply-add would differ for float32 scales
@njit(parallel=True)
def _dequantize(packed, scales, biases, bits, fmt, out_fmt, out):
    groups = out.shape[0]
    for c in prange((groups + _CHUNK - 1) // _CHUNK):
        stop = min(groups, (c + 1) * _CHUNK)
        _dequantize_chunk(packed, scales, biases, bits, fmt, out_fmt, out, c * _CHUNK, stop)


@njit
def _dequantize_chunk(packed, scales, biases, bits, fmt, out_fmt, out, start, stop):
    gs = out.shape[1]
    codes = np.empty(gs, np.uint8)
    eights = codes.view(np.uint64)
    for g in range(start, stop):
        _unpack(packed[g], bits, eights)
        s, b = widened(scales[g], fmt), widened(biases[g], fmt)
        row = out[g]
        if out_fmt == FLOAT32:
            for j in range(gs):
                row[j] = rounded(np.float32(codes[j]) * s + b, FLOAT32)
        elif out_fmt == FLOAT16 and fmt == FLOAT16:
            for j in range(gs):
                product = widened(rounded(np.float32(codes[j]) * s, FLOAT16), FLOAT16)
                row[j] = rounded(product + b, FLOAT16)
        elif out_fmt == BFLOAT16 and fmt == BFLOAT16:
            for j in range(gs):
                product = widened(rounded(np.float32(codes[j]) * s, BFLOAT16), BFLOAT16)
                row[j] = rounded(product + b, BFLOAT16)
        else:
            for j in range(gs):
                row[j] = rounded(np.float32(codes[j]) * s + b, out_fmt)


# dequantize_floats  value = levels[code] * scale, rounded once to out's format
# shapes      packed uint8 [groups, gs * bits / 8]; scales [groups], levels [2**bits] and out [groups, gs]: bits of
#             float32, of out's format
# threads     prange over chunks of groups, each written by one thread
# bytes       groups * (gs * bits / 8 + 4) in, groups * gs * itemsize out, each once
# limits      bits 4 or 8
@njit(parallel=True)
def _dequantize_floats(packed, scales, levels, bits, out_fmt, out):
    groups, gs = out.shape
    for c in prange((groups + _CHUNK - 1) // _CHUNK):
        for g in range(c * _CHUNK, min(groups, (c + 1) * _CHUNK)):
            s, row = number(scales[g]), packed[g]
            for j in range(gs):
                code = row[j] if bits == 8 else (row[j >> 1] >> (4 * (j & 1))) & 15
                out[g, j] = rounded(number(levels[code]) * s, out_fmt)


@njit
def _load(row, fmt, pattern):
    """float32 bits of a row of any format."""
    if fmt == FLOAT16:
        for j in range(row.size):
            pattern[j] = pattern_of(widened(row[j], FLOAT16))
    elif fmt == BFLOAT16:
        for j in range(row.size):
            pattern[j] = np.int32(row[j]) << np.int32(16)
    else:
        for j in range(row.size):
            pattern[j] = row[j]


@njit
def _extent(pattern):
    """Smallest and largest of float32 bit patterns, where NaN lies beyond the infinity of its sign.

    Patterns order as integers do once those of negative numbers have their lower bits inverted. An integer minimum
    vectorises without fast-math, and no NaN escapes it.
    """
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for j in range(pattern.size):
        p = pattern[j]
        key = np.int32(p ^ ((p >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        low = min(low, key)
        high = max(high, key)
    lo = np.int32(low ^ ((low >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    hi = np.int32(high ^ ((high >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return number(lo), number(hi)


@njit
def _pack(eights, bits, row):
    """Codes, 8 in the bytes of a uint64, to a little-endian bit stream of `bits` bytes for each 8."""
    b = np.uint64(bits)
    for i in range(eights.size):
        x = eights[i]
        x = (x & np.uint64(0x00FF00FF00FF00FF)) | ((x & np.uint64(0xFF00FF00FF00FF00)) >> (np.uint64(8) - b))
        x = (x & np.uint64(0x0000FFFF0000FFFF)) | ((x & np.uint64(0xFFFF0000FFFF0000)) >> np.uint64(16 - 2 * bits))
        x = (x & np.uint64(0x00000000FFFFFFFF)) | ((x >> np.uint64(32)) << np.uint64(4 * bits))
        for t in range(bits):
            row[i * bits + t] = np.uint8((x >> np.uint64(8 * t)) & np.uint64(0xFF))


@njit
def _unpack(row, bits, eights):
    """The inverse of `_pack`."""
    quads = np.uint64((1 << (4 * bits)) - 1)
    pairs = np.uint64((1 << (2 * bits)) - 1) * np.uint64(0x0000000100000001)
    single = np.uint64((1 << bits) - 1) * np.uint64(0x0001000100010001)
    for i in range(eights.size):
        x = np.uint64(0)
        for t in range(bits):
            x |= np.uint64(row[i * bits + t]) << np.uint64(8 * t)
        x = (x & quads) | ((x >> np.uint64(4 * bits)) << np.uint64(32))
        x = (x & pairs) | (((x >> np.uint64(2 * bits)) & pairs) << np.uint64(16))
        eights[i] = (x & single) | (((x >> np.uint64(bits)) & single) << np.uint64(8))
