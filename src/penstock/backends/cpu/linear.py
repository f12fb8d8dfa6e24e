"""Products with dense and quantized weights: one grouped product behind all of them.

A call is a list of groups; group i multiplies rows lo[i] … hi[i] − 1 of x with weight slot[i] of a stack [S, N, K]. A
plain product is one group, experts are one group each. Two ways of multiplying:

    int8      x is rounded to bytes per group of the weight; codes and bytes meet in integer dot products (exact), and
              (scale · delta) · Σ code·xq + bias · (delta · Σ xq) is added up in float32 in a fixed order; E2M1 floats
              are u = 2 · float + 12, unsigned, and (scale / 2 · delta) · (Σ u·xq − 12 · Σ xq) is added up; E4M3 floats
              are whole numbers of 2⁻⁹ below 2¹⁸, so sums over 32 fit 32 bits (their scales are below 2¹²⁰, since they
              are multiplied by 256 first), and a NaN code makes its row's results NaN
    float32   weights become float32 rows in cache, products are fused multiply-adds into 16 lanes

In both the order of a sum depends on K alone: not on threads, tokens, tiles or the instructions used.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
from numba import prange

from penstock import ops
from penstock.backends.cpu import _block_rows, _blocks, _simd
from penstock.backends.cpu._formats import (
    FLOAT32,
    fmt,
    frozen,
    load_row,
    number,
    pattern_of,
    readable,
    store_row,
    widened,
    writable,
)
from penstock.backends.cpu._math import gelu32, silu32
from penstock.backends.cpu._simd import at
from penstock.backends.cpu._threads import run
from penstock.backends.cpu.compile import SUM_IN_ANY_ORDER, keep_alive, njit
from penstock.backends.cpu.features import usable_features
from penstock.backends.cpu.norm import rms_norm
from penstock.backends.cpu.quant import dequantize_into
from penstock.dtypes import numpy_dtype
from penstock.errors import BackendError
from penstock.ops import kernel
from penstock.ops.check import bounds
from penstock.ops.linear import slots_of
from penstock.quant import E4M3, GLOBAL_UNIT, ExpertBlobs, GgufTensor, QuantizedTensor, group_scales

PORTABLE = 3
VARIANTS = {"vnni": _simd.VNNI, "avx_vnni": _simd.VNNI256, "avx2": _simd.AVX2, "portable": PORTABLE}
NEEDS = {
    "vnni": ("avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    "avx_vnni": ("avx2", "avx_vnni"),
    "avx2": ("avx2",),
    "portable": (),
}
STRIP = 16  # rows of a weight that one task takes: the lanes of a panel
WIDE = 64  # where they are short
FEW = 2  # tokens up to which a row is read against all of them; above, 16 rows become a panel first (1.7 × at 3 tokens)
FEW_SHORT = 4  # the same for rows of up to 512
FEW_TOGETHER = 8  # the same where codes are unpacked once for all tokens
SOME = 16  # tokens up to which a product is one call
SMALL = 1 << 17  # weight bytes × tokens below which one thread is faster than waking the others


@functools.cache
def _runs_here(variant: str) -> bool:
    """Both the CPU and the compiler know the instructions of a variant."""
    if numba.config.DISABLE_JIT or numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return variant == "portable"  # an instruction that LLVM was told not to know ends the process
    features = usable_features()
    wanted = NEEDS["vnni"] if variant == "avx_vnni" and "avx_vnni" not in features else NEEDS[variant]
    return set(wanted) <= features  # AVX-512 VNNI has the 256-bit form too


@functools.cache
def _best() -> int:
    return next(how for name, how in VARIANTS.items() if _runs_here(name))


def chosen(variant: str | None) -> int:
    if variant is None:
        return _best()
    if not _runs_here(variant):
        raise BackendError(
            f"quantized product: variant {variant!r} needs {', '.join(NEEDS[variant])}, not all usable here"
        )
    return VARIANTS[variant]


# -- operands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Stack:
    """Views of a weight [S, N, K] as kernels take them. Dense weights have kind 0 and their numbers in `codes`."""

    codes: np.ndarray  # all three as bytes: [S, N, K · bits / 8], or [S, N, K · itemsize]
    scales: np.ndarray  # [S, N, K / gs · itemsize]
    biases: np.ndarray  # the scales again where there are none
    kind: int  # of codes, as in _simd.py
    gs: int
    fmt: int
    K: int
    global_scale: np.ndarray | None = None  # [S], the tensor's own: slots are filled with other experts

    @property
    def is_blocks(self) -> bool:
        """Whether codes holds blocks of GGUF, which have their scales inside."""
        return self.kind >= _blocks.FIRST

    @property
    def rounds(self) -> bool:
        """Whether "int8" rounds what it is multiplied with."""
        return self.kind != 0

    @property
    def offset(self) -> float:
        """What `int8_row` is to multiply sums of bytes with; 0: what one byte stands for."""
        return float(_simd.OFFSET) if _simd.is_fp4(self.kind) else 0.0

    @property
    def rows(self) -> int:
        return self.codes.shape[1]


_stacks: weakref.WeakKeyDictionary[QuantizedTensor, Stack] = weakref.WeakKeyDictionary()
_NONE = frozen(np.zeros((1, 1, 1), np.uint8))


def _bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of [(S,) N, n] as [S, N, n · itemsize]: one signature of a kernel for all formats."""
    return frozen(array.view(np.uint8).reshape(-1, array.shape[-2], array.shape[-1] * array.itemsize))


def stack_of(w: QuantizedTensor | np.ndarray) -> Stack:
    """The views of a weight [N, K] or [S, N, K]; those of a quantized tensor are made once."""
    if not isinstance(w, QuantizedTensor):
        return Stack(_bytes(w), _NONE, _NONE, 0, 1, fmt(w), w.shape[-1])
    stack = _stacks.get(w)
    if stack is None and isinstance(w, GgufTensor):
        stack = Stack(_bytes(w.packed), _NONE, _NONE, kind_of(w), w.group_size, 0, w.shape[-1])
        _stacks[w] = stack
    if stack is None:
        parts, kind = [_bytes(array) for array in w.parts], kind_of(w)
        form = _simd.SCALES[kind] if kind in _simd.SCALES else fmt(w.scales)
        factors = None if w.global_scale is None else w.global_scale.reshape(-1)
        stack = Stack(parts[0], parts[1], parts[-1], kind, w.group_size, form, w.shape[-1], factors)
        _stacks[w] = stack
    return stack


_KINDS = {"mxfp4": _simd.MXFP4, "nvfp4": _simd.NVFP4, "mxfp8": _simd.MXFP8, **_blocks.KINDS}


def kind_of(w: QuantizedTensor) -> int:
    """The kind of codes of a weight, as in _simd.py."""
    return _KINDS.get(w.mode, w.bits)


_float_scales: weakref.WeakKeyDictionary[QuantizedTensor, np.ndarray] = weakref.WeakKeyDictionary()


def float_scales(w: QuantizedTensor) -> np.ndarray:
    """The scales of bytes as float32, made once: what `numbers` of _simd.py are multiplied with."""
    found = _float_scales.get(w)
    if found is None:
        found = group_scales(w) * np.float32(0.5 if _simd.is_fp4(kind_of(w)) else 256)
        _float_scales[w] = found
    return found


@dataclass(frozen=True, eq=False, slots=True)
class Groups:
    """Which rows of x meet which weight of a stack."""

    slot: np.ndarray  # int64 each
    lo: np.ndarray
    hi: np.ndarray
    least: int  # rows of the smallest group


@functools.lru_cache(maxsize=64)
def whole(rows: int) -> Groups:
    """All rows against the only weight."""
    return Groups(*(np.array([value]) for value in (0, 0, rows)), rows)


def float_rows(x: np.ndarray) -> np.ndarray:
    """x [..., K] as float32 [T, K]; float32 itself is not copied."""
    rows = x.reshape(-1, x.shape[-1])
    if x.dtype == np.float32:
        return frozen(rows)
    wide = np.empty(rows.shape, np.float32)
    by_size(_widen, _widen_parallel, rows.size, readable(rows), fmt(rows), wide)
    return frozen(wide)


def float_target(out: np.ndarray) -> np.ndarray:
    """Where float32 results go: `out` itself, or scratch to be rounded into it by `finish`."""
    return out if out.dtype == np.float32 else np.empty(out.shape, np.float32)


def finish(y: np.ndarray, out: np.ndarray) -> None:
    """Round float32 results into an `out` of another format."""
    if y is not out:
        rows = out.reshape(-1, out.shape[-1])
        by_size(_narrow, _narrow_parallel, rows.size, frozen(y.reshape(rows.shape)), fmt(out), writable(rows))


def by_size(serial: Any, parallel: Any, size: int, *args: Any) -> None:
    """One of two forms of a row kernel, by the numbers it works on."""
    if size < 1 << 15:
        serial(*args)
    else:
        run(parallel, *args)


@njit
def _widen(x, kind, out):
    for t in range(x.shape[0]):
        load_row(x[t], kind, out[t])


@njit(parallel=True)
def _widen_parallel(x, kind, out):
    for t in prange(x.shape[0]):
        load_row(x[t], kind, out[t])


@njit
def _narrow(x, kind, out):
    for t in range(x.shape[0]):
        store_row(x[t], kind, out[t])


@njit(parallel=True)
def _narrow_parallel(x, kind, out):
    for t in prange(x.shape[0]):
        store_row(x[t], kind, out[t])


# -- int8 activations ------------------------------------------------------------------------------------------------


# int8_row  delta = max|x| / 127, xq = clip(rint(x / delta), −127, 127), total = delta · Σ xq (with an offset
#           offset · Σ xq), per group of gs
# shapes    x float32 [K]; xq int8 [K]; delta, total float32 [K / gs]
# threads   prange over rows in `_int8_rows`; a row belongs to one thread
# bytes     5 · K + 8 · K / gs
# limits    a group with NaN or infinity gets a NaN delta, so that it shows in the result
@njit(fastmath=SUM_IN_ANY_ORDER)
def int8_row(x, gs, offset, xq, delta, total):
    for g in range(delta.size):
        part, bytes_out = x[g * gs : (g + 1) * gs], xq[g * gs : (g + 1) * gs]
        top, sum_q = np.int32(0), np.int32(0)
        for j in range(gs):
            top = max(top, np.int32(pattern_of(part[j]) & np.int32(0x7FFFFFFF)))  # |x| orders as its bits do
        d = number(top) / np.float32(127)
        delta[g] = d if top < np.int32(0x7F800000) else np.float32(np.nan)
        if d == 0 or top >= np.int32(0x7F800000):
            for j in range(gs):
                bytes_out[j] = 0
        else:
            for j in range(gs):
                q = np.rint(part[j] / d)
                q = min(max(q, np.float32(-127)), np.float32(127))
                bytes_out[j] = np.int8(np.int32(q))
                sum_q += np.int32(q)
        total[g] = np.float32(sum_q) * (delta[g] if offset == 0 else np.float32(offset))


@njit
def _int8_rows(x, gs, offset, xq, delta, total):
    for t in range(x.shape[0]):
        int8_row(x[t], gs, offset, xq[t], delta[t], total[t])


@njit(parallel=True)
def _int8_rows_parallel(x, gs, offset, xq, delta, total):
    for t in prange(x.shape[0]):
        int8_row(x[t], gs, offset, xq[t], delta[t], total[t])


@dataclass(frozen=True, eq=False, slots=True)
class Bytes:
    """Rows of x as bytes [P, K] with delta and total [P, K / gs].

    paired: what 4-bit rows are read against; panelled: what panels of codes are.
    """

    xq: np.ndarray
    paired: np.ndarray
    panelled: np.ndarray
    delta: np.ndarray
    total: np.ndarray

    def map(self, move: Callable[[np.ndarray], np.ndarray]) -> Bytes:
        """Every array moved alike."""
        xq = move(self.xq)
        paired, panelled = (xq if v is self.xq else move(v) for v in (self.paired, self.panelled))
        return Bytes(xq, paired, panelled, move(self.delta), move(self.total))


def int8_rows(x: np.ndarray, w: Stack, groups: Groups, how: int) -> Bytes:
    """float32 [P, K] as a product with w wants it."""
    P, K = x.shape
    if w.is_blocks and K % _blocks.STEP:
        return _padded_rows(x, w)
    xq = np.empty((P, K), np.int8)
    delta, total = np.empty((P, K // w.gs), np.float32), np.empty((P, K // w.gs), np.float32)
    by_size(_int8_rows, _int8_rows_parallel, x.size, x, w.gs, w.offset, xq, delta, total)
    paired = xq
    if _simd.width(w.kind) == 4 and how != PORTABLE and (how != _simd.VNNI or groups.least <= FEW):
        paired = np.empty((P, paired_size.py_func(K)), np.int8)
        pair_rows(xq, paired)
    panelled = xq
    if how == _simd.VNNI and P > FEW and (_simd.width(w.kind) == 4 or w.kind == _simd.MXFP8):
        panelled = np.empty((P, K), np.int8)
        by_size(_panel_rows, _panel_rows_parallel, x.size, xq, w.kind, panelled)
    return Bytes(xq, paired, panelled, delta, total)


def _padded_rows(x: np.ndarray, w: Stack) -> Bytes:
    """Rows that blocks of 32 meet, filled up to whole steps with zeros."""
    (P, K), full = x.shape, _block_rows.padded(x.shape[1])
    wide = np.zeros((P, full), np.float32)
    wide[:, :K] = x
    xq = np.empty((P, full), np.int8)
    delta, total = np.empty((P, full // w.gs), np.float32), np.empty((P, full // w.gs), np.float32)
    by_size(_int8_rows, _int8_rows_parallel, wide.size, wide, w.gs, w.offset, xq, delta, total)
    return Bytes(xq, xq, xq, delta, total)


# panel_rows  what panels of codes meet: for 4 bits of each 8 bytes the even ones, then the odd ones, as `code_panel`
#             has them; for mxfp8 x + 128 as unsigned bytes
# shapes      x, out int8 [P, K], K a multiple of 8
# threads     prange over rows
# bytes       2 · P · K
# limits      none
@njit
def _panel_row(x, kind, out):
    if kind == _simd.MXFP8:
        for j in range(x.size):
            out[j] = x[j] ^ np.int8(-128)
        return
    for start in range(0, x.size, 8):
        for j in range(4):
            out[start + j] = x[start + 2 * j]
            out[start + 4 + j] = x[start + 2 * j + 1]


@njit
def _panel_rows(x, kind, out):
    for t in range(x.shape[0]):
        _panel_row(x[t], kind, out[t])


@njit(parallel=True)
def _panel_rows_parallel(x, kind, out):
    for t in prange(x.shape[0]):
        _panel_row(x[t], kind, out[t])


_TWICE = np.array(_simd.TWICE, np.int32)
_E4M3 = np.array(E4M3)
_E4M3_UNIT = np.float32(_simd.E4M3_UNIT)
_WHOLE_E4M3 = np.nan_to_num(_E4M3 * 512, nan=0).astype(np.int32)


@njit
def _number_at(row, i, kind):
    """Number i of a row of bytes that holds floats of a format."""
    if kind >= _simd.WIDE_E8M0:
        code = np.int32(row[i])
        if kind == _simd.HALF_E4M3:
            return _E4M3[code] * np.float32(0.5)
        scale = number(max(code << np.int32(23), np.int32(0x00400000)))
        return scale * np.float32(256 if kind == _simd.WIDE_E8M0 else 0.5)
    if kind == FLOAT32:
        return number(
            np.int32(row[4 * i])
            | np.int32(row[4 * i + 1]) << np.int32(8)
            | np.int32(row[4 * i + 2]) << np.int32(16)
            | np.int32(row[4 * i + 3]) << np.int32(24)
        )
    return widened(np.int32(row[2 * i]) | np.int32(row[2 * i + 1]) << np.int32(8), kind)


@njit
def _code_at(row, j, bits):
    """Code j of a packed row."""
    at_bit = j * bits
    word = np.int32(row[at_bit >> 3])
    if (at_bit & 7) + bits > 8:
        word |= np.int32(row[(at_bit >> 3) + 1]) << np.int32(8)
    return (word >> (at_bit & 7)) & ((1 << bits) - 1)


# pair_rows of each 128 bytes of a block of 512 the even ones, then the odd ones; the last block of a ragged row is its
#           last 512 bytes. Rows below 512 as they are.
# shapes    x int8 [T, K]; out int8 [T, paired_size(K)]
# threads   none: a few rows
# bytes     2 · T · K
# limits    none
@njit
def pair_rows(x, out):
    K, size = x.shape[1], out.shape[1]
    for t in range(x.shape[0]):
        if K < 512:
            for j in range(K):
                out[t, j] = x[t, j]
            continue
        for block in range(0, size, 512):
            row, paired = x[t, min(block, K - 512) :], out[t, block : block + 512]
            for start in range(0, 512, 128):
                source, to = row[start : start + 128], paired[start : start + 128]
                for j in range(64):
                    to[j], to[64 + j] = source[2 * j], source[2 * j + 1]


@njit
def paired_size(K):
    """Bytes of a row of `pair_rows`."""
    return K if K < 512 else (K + 511) // 512 * 512


# block_rows  rows below 512 again and again, as often as it takes to end with a block of 512, paired or as they are:
#             what the codes of as many rows meet, which lie in one piece
# shapes      x int8 [T, K]; out int8 [T, block_size(K)]
# threads     none: a few rows
# bytes       T · (K + block_size(K))
# limits      none
@njit
def block_rows(x, pairs, out):
    K, size = x.shape[1], out.shape[1]
    whole = np.empty((1, size), np.int8)
    for t in range(x.shape[0]):
        for start in range(0, size, K):
            copy, row = whole[0, start : start + K], x[t]
            for j in range(K):
                copy[j] = row[j]
        if pairs:
            pair_rows(whole, out[t : t + 1])
        else:
            for j in range(size):
                out[t, j] = whole[0, j]


@njit
def _repeat(row, count):
    """The first `count` numbers of a row again and again."""
    for i in range(count, row.size):
        row[i] = row[i - count]


@njit
def rounded_rows(x, gs, offset, pairs, xp, xb, delta, total):
    """float32 rows as `int8_one` takes them: bytes, paired for codes of 4 bits, those of `block_rows`; delta and total
    [T, 16 · G], 16 times the same.
    """
    xq, groups = np.empty(x.shape, np.int8), x.shape[1] // gs
    for t in range(x.shape[0]):
        int8_row(x[t], gs, offset, xq[t], delta[t, :groups], total[t, :groups])
        _repeat(delta[t], groups)
        _repeat(total[t], groups)
    if pairs:
        pair_rows(xq, xp)
    else:
        xp[:] = xq
    block_rows(xq, pairs, xb)


@njit
def block_size(K):
    """Bytes of a row of `block_rows`; 0: there are none."""
    if K >= 512:
        return 0
    size = K
    while size % 512:
        size += K
    return size


# portable_dot  what group_dots and scaled_sum of _simd.py give together, in plain Python: the same bits everywhere
# shapes        codes, scales, biases: one row of a Stack; xq int8 [K]; delta, total float32 [K / gs]
# threads       none: one row against one token
# bytes         K · bits / 8 + K / gs · 2 · itemsize
# limits        no fast-math: each product and sum is rounded, lane g % 16 collects group g
@njit
def _portable_dot(codes, scales, biases, form, kind, gs, xq, delta, total):
    lanes = np.zeros(_simd.LANES, np.float32)
    for g in range(delta.size):
        dot = 0
        for j in range(g * gs, (g + 1) * gs):
            code = _code_at(codes, j, kind & 15)
            if kind == _simd.MXFP8:
                dot += _WHOLE_E4M3[code] * np.int32(xq[j])
            else:
                dot += (_TWICE[code] + _simd.OFFSET if kind > 15 else code) * np.int32(xq[j])
        lane = g % _simd.LANES
        factor = np.float32(_number_at(scales, g, form) * delta[g])
        if kind == _simd.MXFP8:
            lanes[lane] = np.float32(lanes[lane] + factor * np.float32(np.float32(dot) * _E4M3_UNIT))
            continue
        if kind > 15:
            lanes[lane] = np.float32(lanes[lane] + factor * np.float32(np.float32(dot) - total[g]))
            continue
        lanes[lane] = np.float32(lanes[lane] + factor * np.float32(dot))
        lanes[lane] = np.float32(lanes[lane] + np.float32(_number_at(biases, g, form) * total[g]))
    for n in (8, 4, 2, 1):
        for i in range(n):
            lanes[i] = np.float32(lanes[i] + lanes[i + n])
    return np.float32(np.nan) if kind == _simd.MXFP8 and _has_nan(codes) else lanes[0]


@njit
def _has_nan(codes):
    """Whether one of a row of E4M3 codes is NaN."""
    found = False
    for code in codes:
        found |= code & 0x7F == 0x7F
    return found


@functools.cache
def _scaled_sum(kind: int) -> tuple[Any, Any]:
    """`_simd.scaled_sum` and `_simd.scaled_terms` for scales of any format that goes with a kind of codes."""
    if kind in _simd.SCALES:
        fixed = _simd.SCALES[kind]

        @njit
        def scaled(ints, s, b, d, x, groups, form):
            return _simd.scaled_sum(ints, s, b, d, x, groups, fixed)

        @njit
        def terms(ints, s, b, d, x, count, out, form):
            _simd.scaled_terms(ints, s, b, d, x, count, out, fixed)

    else:

        @njit
        def scaled(ints, s, b, d, x, groups, form):
            if form == 0:
                return _simd.scaled_sum(ints, s, b, d, x, groups, 0)
            if form == 1:
                return _simd.scaled_sum(ints, s, b, d, x, groups, 1)
            return _simd.scaled_sum(ints, s, b, d, x, groups, 2)

        @njit
        def terms(ints, s, b, d, x, count, out, form):
            if form == 0:
                _simd.scaled_terms(ints, s, b, d, x, count, out, 0)
            elif form == 1:
                _simd.scaled_terms(ints, s, b, d, x, count, out, 1)
            else:
                _simd.scaled_terms(ints, s, b, d, x, count, out, 2)

    return scaled, terms


@njit
def _sum_terms(terms, groups, out, first):
    """out[first + r] = the sum over the groups of row r of a strip, in the order of `_simd.scaled_sum`: a number of
    groups that `_has_few_groups`.
    """
    source, to = at(terms, 0), at(out, first)
    if groups == 2:
        _simd.row_sums(source, to, 2)
    elif groups == 3:
        _simd.row_sums(source, to, 3)
    elif groups == 4:
        _simd.row_sums(source, to, 4)
    elif groups == 6:
        _simd.row_sums(source, to, 6)
    elif groups == 8:
        _simd.row_sums(source, to, 8)


@njit
def _has_few_groups(groups):
    return groups == 2 or groups == 3 or groups == 4 or groups == 6 or groups == 8


@functools.cache
def int8_one(kind: int, how: int) -> Any:
    """The product of some rows of codes with one token, int8, as other kernels call it."""
    if kind >= _blocks.FIRST:
        dot = _block_rows.int8_dot(kind, False, how)

        @njit
        def gguf_rows(codes, scales, biases, form, gs, first, xp, xb, delta, total, t, out):
            N = codes.shape[1]
            for i in range(out.size):
                row = codes[(first + i) // N, (first + i) % N]
                out[i] = dot(row, xp[t], delta[t], total[t])

        return gguf_rows
    bits, (scaled, terms) = _simd.width(kind), _scaled_sum(kind)

    # int8_one  out[i] = row first + i of the weight · token t, for out.size rows
    # shapes    codes, scales, biases as in Stack; xp int8 [P, K], or [P, paired_size(K)] of `pair_rows`; xb int8
    #           [P, block_size(K)] of `block_rows`; delta, total float32 [P, 16 · G]: 16 times the same; out float32
    # threads   none: part of a task
    # bytes     out.size · (K · bits / 8 + 2 · G · itemsize)
    # limits    instructions of `how`, not PORTABLE
    @njit
    def rows(codes, scales, biases, form, gs, first, xp, xb, delta, total, t, out):
        stride, each, size = codes.shape[2], scales.shape[2], xb.shape[1]
        K = stride * 8 // bits
        groups = K // gs
        sums = np.empty(STRIP * groups, np.int32)
        d, sx, ints = at(delta, t * STRIP * groups), at(total, t * STRIP * groups), at(sums, 0)
        i, nan = 0, False
        together = 1 if K % 512 == 0 else size // K
        if together and _has_few_groups(groups):
            # The codes of as many short rows as end with a whole block are one row of blocks, and one vector holds
            # groups of several rows.
            found, length = np.empty(STRIP * groups, np.float32), K * together
            x = at(xb, t * size) if together > 1 else at(xp, t * xp.shape[1])
            while i + STRIP <= out.size:
                row = first + i
                for r in range(0, STRIP, together):
                    c, to = at(codes, (row + r) * stride), at(sums, r * groups)
                    nan |= _simd.group_dots(c, x, to, 1, length, gs, kind, how)
                s, b = at(scales, row * each), at(biases, row * each)
                terms(ints, s, b, d, sx, STRIP * groups, at(found, 0), form)
                _sum_terms(found, groups, out, i)
                i += STRIP
            keep_alive(found)
        while i < out.size:
            row = first + i
            nan |= _simd.group_dots(at(codes, row * stride), at(xp, t * xp.shape[1]), ints, 1, K, gs, kind, how)
            s, b = at(scales, row * each), at(biases, row * each)
            out[i] = scaled(ints, s, b, d, sx, groups, form)
            i += 1
        keep_alive(sums)
        if nan:
            for i in range(out.size):
                if _has_nan(codes[(first + i) // codes.shape[1], (first + i) % codes.shape[1]]):
                    out[i] = np.float32(np.nan)

    return rows


@functools.cache
def int8_tokens(kind: int, how: int) -> Any:
    """The product of some rows of codes with a few tokens, int8, as other kernels call it."""
    one = int8_one(kind, how)
    if kind != 4 or how != _simd.VNNI:

        @njit
        def one_by_one(codes, scales, biases, form, gs, first, xp, xb, delta, total, y, column, rows):
            for t in range(y.shape[0]):
                part = y[t, column : column + rows]
                one(codes, scales, biases, form, gs, first, xp, xb, delta, total, t, part)

        return one_by_one

    # int8_tokens  y[t, column + i] = row first + i of the weight · token t, for `rows` rows
    # shapes       as in int8_one; y float32 [P, ·]
    # threads      none: part of a task
    # bytes        rows · (K · bits / 8 + 2 · G · itemsize)
    # limits       codes of 4 bits, AVX-512 VNNI
    @njit
    def together(codes, scales, biases, form, gs, first, xp, xb, delta, total, y, column, rows):
        T, K = xp.shape
        groups, done = K // gs, 0
        if gs == 64 and K <= 512 and _has_few_groups(groups):
            terms = np.empty((T, STRIP * groups), np.float32)
            whole = xb if K < 512 else xp
            x, size, to = at(whole, 0), whole.shape[1], at(terms, 0)
            stride, each = codes.shape[2], scales.shape[2]
            d, sx = at(delta, 0), at(total, 0)
            while done + STRIP <= rows:
                row = first + done
                c, s, b = at(codes, row * stride), at(scales, row * each), at(biases, row * each)
                if form == 0:
                    _simd.strip_terms(c, x, size, s, b, d, sx, T, groups, to, kind, how, 0)
                elif form == 1:
                    _simd.strip_terms(c, x, size, s, b, d, sx, T, groups, to, kind, how, 1)
                else:
                    _simd.strip_terms(c, x, size, s, b, d, sx, T, groups, to, kind, how, 2)
                for t in range(T):
                    _sum_terms(terms[t], groups, y[t], column + done)
                done += STRIP
            keep_alive(terms)
        for t in range(T if done < rows else 0):
            part = y[t, column + done : column + rows]
            one(codes, scales, biases, form, gs, first + done, xp, xb, delta, total, t, part)

    return together


@functools.cache
def int8_few(kind: int, how: int) -> tuple[Any, Any]:
    """Serial and parallel kernel of a product with a few rows of float32, from rounding them to the results in
    one call.
    """
    tokens, pairs = int8_tokens(kind, how), _simd.width(kind) == 4

    # int8_few  y[t] = W · int8(x[t]) for one weight and a few rows
    # shapes    codes, scales, biases as in Stack, S = 1; x float32 [T, K]; y float32 [T, N]
    # threads   prange over strips of the weight in the parallel form; a number belongs to one thread
    # bytes     the weight once, or once per row of x (the second finds it in cache); x stays in cache
    # limits    instructions of `how`, not PORTABLE
    @njit
    def serial(codes, scales, biases, form, gs, offset, x, y):
        T, K = x.shape
        xp = np.empty((T, paired_size(K) if pairs else K), np.int8)
        xb = np.empty((T, block_size(K)), np.int8)
        delta, total = np.empty((T, K // gs * STRIP), np.float32), np.empty((T, K // gs * STRIP), np.float32)
        rounded_rows(x, gs, offset, pairs, xp, xb, delta, total)
        tokens(codes, scales, biases, form, gs, 0, xp, xb, delta, total, y, 0, y.shape[1])

    @njit(parallel=True)
    def parallel(codes, scales, biases, form, gs, offset, x, y):
        T, K = x.shape
        xp = np.empty((T, paired_size(K) if pairs else K), np.int8)
        xb = np.empty((T, block_size(K)), np.int8)
        delta, total = np.empty((T, K // gs * STRIP), np.float32), np.empty((T, K // gs * STRIP), np.float32)
        rounded_rows(x, gs, offset, pairs, xp, xb, delta, total)
        N, rows = y.shape[1], STRIP if K > 512 else WIDE
        for i in prange((N + rows - 1) // rows):
            first = i * rows
            tokens(codes, scales, biases, form, gs, first, xp, xb, delta, total, y, first, min(rows, N - first))

    return serial, parallel


@functools.cache
def int8_gate_up(kind: int, how: int) -> tuple[Any, Any]:
    """Serial and parallel kernel of act(gate · x) · (up · x) for a few rows of float32 in one call."""
    tokens, pairs = int8_tokens(kind, how), _simd.width(kind) == 4

    # int8_gate_up  y[t] = act(G · int8(x[t])) · (U · int8(x[t])), act silu or gelu
    # shapes        two weights of one format as in int8_few; x float32 [T, K]; y float32 [T, N]
    # threads       prange over strips of the weights in the parallel form; a number belongs to one thread
    # bytes         as int8_few for both
    # limits        as int8_few
    @njit
    def strip(gate, gate_s, gate_b, up, up_s, up_b, form, gs, first, rows, xp, xb, delta, total, gelu, y):
        g, u = np.empty((y.shape[0], rows), np.float32), np.empty((y.shape[0], rows), np.float32)
        tokens(gate, gate_s, gate_b, form, gs, first, xp, xb, delta, total, g, 0, rows)
        tokens(up, up_s, up_b, form, gs, first, xp, xb, delta, total, u, 0, rows)
        for t in range(y.shape[0]):
            gated_row(g[t], u[t], gelu, y[t, first : first + rows])

    @njit
    def serial(gate, gate_s, gate_b, up, up_s, up_b, form, gs, offset, x, gelu, y):
        T, K = x.shape
        xp = np.empty((T, paired_size(K) if pairs else K), np.int8)
        xb = np.empty((T, block_size(K)), np.int8)
        delta, total = np.empty((T, K // gs * STRIP), np.float32), np.empty((T, K // gs * STRIP), np.float32)
        rounded_rows(x, gs, offset, pairs, xp, xb, delta, total)
        strip(gate, gate_s, gate_b, up, up_s, up_b, form, gs, 0, y.shape[1], xp, xb, delta, total, gelu, y)

    @njit(parallel=True)
    def parallel(gate, gate_s, gate_b, up, up_s, up_b, form, gs, offset, x, gelu, y):
        T, K = x.shape
        xp = np.empty((T, paired_size(K) if pairs else K), np.int8)
        xb = np.empty((T, block_size(K)), np.int8)
        delta, total = np.empty((T, K // gs * STRIP), np.float32), np.empty((T, K // gs * STRIP), np.float32)
        rounded_rows(x, gs, offset, pairs, xp, xb, delta, total)
        N, most = y.shape[1], STRIP if K > 512 else WIDE
        for i in prange((N + most - 1) // most):
            first = i * most
            rows = min(most, N - first)
            strip(gate, gate_s, gate_b, up, up_s, up_b, form, gs, first, rows, xp, xb, delta, total, gelu, y)

    return serial, parallel


@functools.cache
def int8_some(kind: int) -> tuple[Any, Any]:
    """Serial and parallel kernel of a product with some rows of float32, from rounding them to the results in
    one call: AVX-512 VNNI alone.
    """
    task, panels = _panel_task(kind), _simd.width(kind) == 4 or kind == _simd.MXFP8

    @njit
    def rounded(x, gs, offset, xq, xp, delta, total):
        for t in range(x.shape[0]):
            int8_row(x[t], gs, offset, xq[t], delta[t], total[t])
            if panels:
                _panel_row(xq[t], kind, xp[t])

    # int8_some  y[t] = W · int8(x[t]) for one weight and some rows
    # shapes     codes, scales, biases as in Stack, S = 1; x float32 [T, K]; y float32 [T, N]
    # threads    prange over strips of the weight in the parallel form; a number belongs to one thread
    # bytes      the weight once, its panels (in L2) once per tile of rows
    # limits     AVX-512 VNNI
    @njit
    def serial(codes, scales, biases, form, gs, offset, x, y):
        T, K = x.shape
        xq = np.empty((T, K), np.int8)
        xp = np.empty((T, K), np.int8) if panels else xq
        delta, total = np.empty((T, K // gs), np.float32), np.empty((T, K // gs), np.float32)
        rounded(x, gs, offset, xq, xp, delta, total)
        for first in range(0, y.shape[1], STRIP):
            task(codes, scales, biases, form, gs, 0, first, xp, xp, delta, total, 0, T, y)

    @njit(parallel=True)
    def parallel(codes, scales, biases, form, gs, offset, x, y):
        T, K = x.shape
        xq = np.empty((T, K), np.int8)
        xp = np.empty((T, K), np.int8) if panels else xq
        delta, total = np.empty((T, K // gs), np.float32), np.empty((T, K // gs), np.float32)
        rounded(x, gs, offset, xq, xp, delta, total)
        for i in prange((y.shape[1] + STRIP - 1) // STRIP):
            task(codes, scales, biases, form, gs, 0, i * STRIP, xp, xp, delta, total, 0, T, y)

    return serial, parallel


@functools.cache
def _scale_panels(kind: int) -> Any:
    """`_simd.scale_panel` of scales and, where there are any, biases."""
    if kind in _simd.SCALES:
        fixed = _simd.SCALES[kind]

        @njit
        def panels(from_s, from_b, each, rows, to_s, to_b, groups, form):
            _simd.scale_panel(from_s, each, rows, to_s, groups, fixed)

    else:

        @njit
        def panels(from_s, from_b, each, rows, to_s, to_b, groups, form):
            if form == 0:
                _simd.scale_panel(from_s, each, rows, to_s, groups, 0)
                _simd.scale_panel(from_b, each, rows, to_b, groups, 0)
            elif form == 1:
                _simd.scale_panel(from_s, each, rows, to_s, groups, 1)
                _simd.scale_panel(from_b, each, rows, to_b, groups, 1)
            else:
                _simd.scale_panel(from_s, each, rows, to_s, groups, 2)
                _simd.scale_panel(from_b, each, rows, to_b, groups, 2)

    return panels


@functools.cache
def _panel_task(kind: int) -> Any:
    """The task of `int8_product` for many tokens, AVX-512 VNNI."""
    scale_panels = _scale_panels(kind)
    if kind == _simd.MXFP8:

        @njit
        def add_up(panel, sums, groups):
            return _simd.e4m3_panel(panel, sums, groups)

    else:

        @njit
        def add_up(panel, sums, groups):
            return False

    # panel_task  y[t, n] as in int8_rows for many tokens: 16 rows unpacked once, rows in lanes, tokens in tiles of 8
    # shapes      as in int8_rows; panel uint8 [K/4, 16, 4], scales and biases float32 [G, 16], G filled up to 16
    # threads     none: one task
    # bytes       the strip once; the panel (16 · K bytes, in L2) once per tile of tokens
    # limits      AVX-512 VNNI
    @njit
    def panel_task(codes, scales, biases, form, gs, slot, first, xq, xp, delta, total, lo, hi, y):
        N, K, groups = codes.shape[1], xq.shape[1], delta.shape[1]
        rows = min(STRIP, N - first)
        panel = np.empty(K * STRIP, np.uint8)
        full = (groups + STRIP - 1) // STRIP * STRIP
        s, b = np.empty((full, STRIP), np.float32), np.empty((full, STRIP), np.float32)
        acc = np.empty(STRIP * 8 * STRIP, np.float32)
        stride = codes.shape[2]
        _simd.code_panel(at(codes, (slot * N + first) * stride), stride, rows, at(panel, 0), K, kind)
        each = scales.shape[2]
        to_s, to_b = at(s, 0), at(b, 0)
        from_s, from_b = at(scales, (slot * N + first) * each), at(biases, (slot * N + first) * each)
        scale_panels(from_s, from_b, each, rows, to_s, to_b, groups, form)
        nan = add_up(at(panel, 0), to_b, groups)
        t = lo
        while t < hi:
            x, d, sx = at(xq, t * K), at(delta, t * groups), at(total, t * groups)
            to = at(y, t * N + first)
            ps, pb, pp, pa = at(s, 0), at(b, 0), at(panel, 0), at(acc, 0)
            ahead = at(codes, (slot * N + first + STRIP) * stride)
            if hi - t >= 8:
                _simd.panel_dots(pp, ps, pb, x, d, sx, pa, to, N, rows, K, gs, ahead, kind, 8)
                t += 8
            elif hi - t >= 4:
                _simd.panel_dots(pp, ps, pb, x, d, sx, pa, to, N, rows, K, gs, ahead, kind, 4)
                t += 4
            elif hi - t >= 2:
                _simd.panel_dots(pp, ps, pb, x, d, sx, pa, to, N, rows, K, gs, ahead, kind, 2)
                t += 2
            else:
                _simd.panel_dots(pp, ps, pb, x, d, sx, pa, to, N, rows, K, gs, ahead, kind, 1)
                t += 1
        keep_alive((panel, s, b, acc))
        if nan:
            for n in range(first, first + rows):
                if _has_nan(codes[slot, n]):
                    y[lo:hi, n] = np.float32(np.nan)

    return panel_task


@functools.cache
def int8_product(kind: int, how: int) -> tuple[Any, Any]:
    """Serial and parallel kernel of the grouped product with int8 activations, for one kind of codes."""
    if kind >= _blocks.FIRST:
        return _over_strips(_block_task(kind, how))
    scaled, _ = _scaled_sum(kind)
    if how == PORTABLE:

        @njit
        def task(codes, scales, biases, form, gs, slot, first, xq, xp, delta, total, lo, hi, y):
            for n in range(first, min(first + STRIP, codes.shape[1])):
                for t in range(lo, hi):
                    y[t, n] = _portable_dot(
                        codes[slot, n], scales[slot, n], biases[slot, n], form, kind, gs, xq[t], delta[t], total[t]
                    )

    else:
        # int8_rows  y[t, n] = Σ_g (scale · delta) · Σ code·xq + bias · total for 16 rows n, one row of codes at a time
        # shapes     codes, scales, biases as in Stack; xq int8 [P, K], xp the same or `pair_rows` of it; delta, total
        #            float32 [P, G]; y [P, N]
        # threads    none: one task; a row's codes are read once for all tokens
        # bytes      16 · (K · bits / 8 + 2 · G · itemsize) per task, x stays in cache
        # limits     instructions of `how`
        @njit
        def rows_task(codes, scales, biases, form, gs, slot, first, xq, xp, delta, total, lo, hi, y):
            K, groups = xq.shape[1], delta.shape[1]
            sums = np.empty((hi - lo, groups), np.int32)
            for n in range(first, min(first + STRIP, codes.shape[1])):
                row = slot * codes.shape[1] + n
                scale_row = row * scales.shape[2]
                c = at(codes, row * codes.shape[2])
                nan = _simd.group_dots(c, at(xp, lo * xp.shape[1]), at(sums, 0), hi - lo, K, gs, kind, how)
                for t in range(hi - lo):
                    ints, s, b = at(sums, t * groups), at(scales, scale_row), at(biases, scale_row)
                    d, x = at(delta, (lo + t) * groups), at(total, (lo + t) * groups)
                    y[lo + t, n] = np.float32(np.nan) if nan else scaled(ints, s, b, d, x, groups, form)
            keep_alive(sums)

        task = rows_task

    if how == _simd.VNNI:
        panel_task = _panel_task(kind)

        @njit
        def either_task(codes, scales, biases, form, gs, slot, first, xq, xp, delta, total, lo, hi, y):
            if hi - lo <= FEW:
                rows_task(codes, scales, biases, form, gs, slot, first, xq, xp, delta, total, lo, hi, y)
            else:
                panel_task(codes, scales, biases, form, gs, slot, first, xq, xp, delta, total, lo, hi, y)

        task = either_task

    return _over_strips(task)


def _over_strips(task: Any) -> tuple[Any, Any]:
    """A task of `int8_product` for all strips of all groups: serial and parallel."""

    @njit
    def serial(codes, scales, biases, form, gs, slot, lo, hi, xq, xp, delta, total, y):
        strips = (codes.shape[1] + STRIP - 1) // STRIP
        for i in range(slot.size * strips):
            g, first = i // strips, i % strips * STRIP
            task(codes, scales, biases, form, gs, slot[g], first, xq, xp, delta, total, lo[g], hi[g], y)

    @njit(parallel=True)
    def parallel(codes, scales, biases, form, gs, slot, lo, hi, xq, xp, delta, total, y):
        strips = (codes.shape[1] + STRIP - 1) // STRIP
        for i in prange(slot.size * strips):
            g, first = i // strips, i % strips * STRIP
            task(codes, scales, biases, form, gs, slot[g], first, xq, xp, delta, total, lo[g], hi[g], y)

    return serial, parallel


def _block_task(kind: int, how: int) -> Any:
    """The task of `int8_product` for a type of GGUF blocks."""
    dot = _block_rows.int8_dot(kind, how == PORTABLE, how)

    # block_task  y[t, n] = Σ_g (scale · delta) · Σ code·xq + bias · total for 16 rows n of blocks, one at a time
    # shapes      codes uint8 [S, N, bytes of a row]; xq int8 [P, K], K whole steps of 256; delta, total [P, K / 16]
    # threads     none: one task
    # bytes       the strip once per token (it stays in cache), x stays in cache
    # limits      instructions of `how`
    @njit
    def block_task(codes, scales, biases, form, gs, slot, first, xq, xp, delta, total, lo, hi, y):
        for n in range(first, min(first + STRIP, codes.shape[1])):
            for t in range(lo, hi):
                y[t, n] = dot(codes[slot, n], xp[t], delta[t], total[t])

    if how != _simd.VNNI:
        return block_task
    unpack = _block_rows.unpack(kind, how)

    # block_panel  the same for many tokens: 16 rows as codes of 8 bits, then as in panel_task
    # shapes       as above; c uint8 [16, K], s and b float32 [16, G] and the panels of them are scratch
    # threads      none: one task
    # bytes        the strip once; the panel (16 · K bytes, in L2) once per tile of tokens
    # limits       AVX-512 VNNI
    @njit
    def block_panel(codes, scales, biases, form, gs, slot, first, xq, xp, delta, total, lo, hi, y):
        if hi - lo <= FEW:
            block_task(codes, scales, biases, form, gs, slot, first, xq, xp, delta, total, lo, hi, y)
            return
        N, K, groups = codes.shape[1], xq.shape[1], delta.shape[1]
        rows = min(STRIP, N - first)
        c = np.empty((rows, K), np.uint8)
        s, b = np.empty((rows, groups), np.float32), np.empty((rows, groups), np.float32)
        for r in range(rows):
            unpack(codes[slot, first + r], c[r], s[r], b[r])
        panel = np.empty(K * STRIP, np.uint8)
        ps, pb = np.empty((groups, STRIP), np.float32), np.empty((groups, STRIP), np.float32)
        acc = np.empty(STRIP * 8 * STRIP, np.float32)
        _simd.code_panel(at(c, 0), K, rows, at(panel, 0), K, 8)
        keep_alive(c)
        for r in range(STRIP):
            for g in range(groups):
                ps[g, r], pb[g, r] = s[min(r, rows - 1), g], b[min(r, rows - 1), g]
        t = lo
        while t < hi:
            x, d, sx, to = at(xq, t * K), at(delta, t * groups), at(total, t * groups), at(y, t * N + first)
            p, q, w, a, ahead = at(ps, 0), at(pb, 0), at(panel, 0), at(acc, 0), at(panel, 0)
            if hi - t >= 8:
                _simd.panel_dots(w, p, q, x, d, sx, a, to, N, rows, K, gs, ahead, 8, 8)
                t += 8
            elif hi - t >= 4:
                _simd.panel_dots(w, p, q, x, d, sx, a, to, N, rows, K, gs, ahead, 8, 4)
                t += 4
            elif hi - t >= 2:
                _simd.panel_dots(w, p, q, x, d, sx, a, to, N, rows, K, gs, ahead, 8, 2)
                t += 2
            else:
                _simd.panel_dots(w, p, q, x, d, sx, a, to, N, rows, K, gs, ahead, 8, 1)
                t += 1
        keep_alive((panel, ps, pb, acc))

    return block_panel


# -- float32 ---------------------------------------------------------------------------------------------------------


@njit(fastmath=SUM_IN_ANY_ORDER)
def _plain_dot(w, x):
    total = np.float32(0)
    for j in range(w.size):
        total += w[j] * x[j]
    return total


@njit
def _plain_weights(codes, scales, biases, form, kind, gs, out):
    """A row of a Stack as float32."""
    for j in range(out.size):
        if kind == 0:
            out[j] = _number_at(codes, j, form)
        elif kind > 15:
            code = _code_at(codes, j, kind & 15)
            value = _E4M3[code] / np.float32(256) if kind == _simd.MXFP8 else np.float32(_TWICE[code])
            out[j] = value * _number_at(scales, j // gs, form)
        else:
            q = np.float32(_code_at(codes, j, kind))
            out[j] = np.float32(q * _number_at(scales, j // gs, form)) + _number_at(biases, j // gs, form)


@functools.cache
def float_product(kind: int, how: int) -> tuple[Any, Any]:
    """Serial and parallel kernel of the grouped product in float32; kind 0 stands for dense weights."""
    fixed = _simd.SCALES.get(kind, 0)
    if kind >= _blocks.FIRST:
        widen = _block_rows.widen(kind, how == PORTABLE, how)

        @njit
        def widen_weight(codes, scales, biases, form, gs, slot, n, out):
            widen(codes[slot, n], out)

    elif how == PORTABLE:

        @njit
        def widen_weight(codes, scales, biases, form, gs, slot, n, out):
            _plain_weights(codes[slot, n], scales[slot, n], biases[slot, n], form, kind, gs, out)

    elif kind == 0:

        @njit
        def widen_weight(codes, scales, biases, form, gs, slot, n, out):
            row, to = at(codes, (slot * codes.shape[1] + n) * codes.shape[2]), at(out, 0)
            if form == 0:
                _simd.dense_row(row, to, out.size, 0)
            elif form == 1:
                _simd.dense_row(row, to, out.size, 1)
            else:
                _simd.dense_row(row, to, out.size, 2)

    else:

        @njit
        def widen_weight(codes, scales, biases, form, gs, slot, n, out):
            row = slot * codes.shape[1] + n
            c, to = at(codes, row * codes.shape[2]), at(out, 0)
            s, b = at(scales, row * scales.shape[2]), at(biases, row * scales.shape[2])
            if kind > 15:
                _simd.dense_codes(c, s, b, to, out.size, gs, kind, fixed, how)
            elif form == 0:
                _simd.dense_codes(c, s, b, to, out.size, gs, kind, 0, how)
            elif form == 1:
                _simd.dense_codes(c, s, b, to, out.size, gs, kind, 1, how)
            else:
                _simd.dense_codes(c, s, b, to, out.size, gs, kind, 2, how)

    if how == PORTABLE:

        @njit
        def tile(dense, r, rows, x, t, tokens, y, n):
            for i in range(rows):
                for j in range(tokens):
                    y[t + j, n + i] = _plain_dot(dense[r + i], x[t + j])

    else:

        @njit
        def tile(dense, r, rows, x, t, tokens, y, n):
            K, N = x.shape[1], y.shape[1]
            w, xs, to = at(dense, r * K), at(x, t * K), at(y, t * N + n)
            if rows == 4 and tokens == 4:
                _simd.float_dots(w, K, xs, K, to, N, K, 4, 4)
            elif rows == 4:
                _simd.float_dots(w, K, xs, K, to, N, K, 4, 1)
            elif tokens == 4:
                _simd.float_dots(w, K, xs, K, to, N, K, 1, 4)
            else:
                _simd.float_dots(w, K, xs, K, to, N, K, 1, 1)

    # dense_task  y[t, n] = Σ_j x[t, j] · W[n, j] for `strip` rows n of one weight, made dense first
    # shapes      codes, scales, biases as in Stack; x float32 [P, K]; y [P, N]; dense float32 [strip, K] is scratch
    # threads     none: one task
    # bytes       the strip once; dense (in L2) once per 4 tokens
    # limits      none
    @njit
    def dense_task(codes, scales, biases, form, gs, slot, first, strip, x, lo, hi, y):
        N, K = codes.shape[1], x.shape[1]
        rows = min(strip, N - first)
        dense = np.empty((rows, K), np.float32)
        for r in range(rows):
            widen_weight(codes, scales, biases, form, gs, slot, first + r, dense[r])
        t = lo
        while t < hi:
            tokens = 4 if hi - t >= 4 else 1
            r = 0
            while r < rows:
                block = 4 if rows - r >= 4 else 1
                tile(dense, r, block, x, t, tokens, y, first + r)
                r += block
            t += tokens

    task = dense_task
    if kind >= _blocks.FIRST and how != PORTABLE:
        # blocks_task  the same for a few tokens: blocks become floats in registers, 2 rows at a time
        # shapes       as above
        # threads      none: one task
        # bytes        the strip once per token, x in cache
        # limits       K in whole steps of 256; others are made dense
        @njit
        def blocks_task(codes, scales, biases, form, gs, slot, first, strip, x, lo, hi, y):
            N, K, stride = codes.shape[1], x.shape[1], codes.shape[2]
            if hi - lo >= 4 or K % _blocks.STEP:
                dense_task(codes, scales, biases, form, gs, slot, first, strip, x, lo, hi, y)
                return
            n, last, steps = first, min(first + strip, N), K // _blocks.STEP
            while n < last:
                c = at(codes, (slot * N + n) * stride)
                for t in range(lo, hi):
                    to, xs = at(y, t * N + n), at(x, t * K)
                    if last - n >= 2:
                        _blocks.block_float_dots(c, stride, xs, to, steps, kind, 2, how)
                    else:
                        _blocks.block_float_dots(c, stride, xs, to, steps, kind, 1, how)
                n += 2 if last - n >= 2 else 1

        task = blocks_task
    elif kind and how != PORTABLE:

        @njit
        def widen_scales(scales, form, row, out):
            source, to = at(scales, row * scales.shape[2]), at(out, 0)
            if kind > 15:
                _simd.dense_row(source, to, out.size, fixed)
            elif form == 0:
                _simd.dense_row(source, to, out.size, 0)
            elif form == 1:
                _simd.dense_row(source, to, out.size, 1)
            else:
                _simd.dense_row(source, to, out.size, 2)

        # coded_task  the same for a few tokens: codes become floats in registers, 4 rows at a time
        # shapes      as above; scales and biases of 4 rows as float32 are scratch
        # threads     none: one task
        # bytes       the strip once per token, x in cache
        # limits      scales of mxfp8 below 2^120: they are multiplied by 256 first
        @njit
        def coded_task(codes, scales, biases, form, gs, slot, first, strip, x, lo, hi, y):
            if hi - lo >= 4:
                dense_task(codes, scales, biases, form, gs, slot, first, strip, x, lo, hi, y)
                return
            N, K, stride = codes.shape[1], x.shape[1], codes.shape[2]
            groups, last = K // gs, min(first + strip, N)
            s, b = np.empty((4, groups), np.float32), np.empty((4, groups), np.float32)
            n = first
            while n < last:
                rows = 4 if last - n >= 4 else 1
                for r in range(rows):
                    widen_scales(scales, form, slot * N + n + r, s[r])
                    if kind < 16:
                        widen_scales(biases, form, slot * N + n + r, b[r])
                c = at(codes, (slot * N + n) * stride)
                for t in range(lo, hi):
                    to, xs = at(y, t * N + n), at(x, t * K)
                    if rows == 4:
                        _simd.coded_dots(c, stride, at(s, 0), at(b, 0), groups, xs, to, K, gs, kind, 4, how)
                    else:
                        _simd.coded_dots(c, stride, at(s, 0), at(b, 0), groups, xs, to, K, gs, kind, 1, how)
                n += rows
            keep_alive((s, b))

        task = coded_task

    @njit
    def serial(codes, scales, biases, form, gs, slot, lo, hi, strip, x, y):
        strips = (codes.shape[1] + strip - 1) // strip
        for i in range(slot.size * strips):
            g, first = i // strips, i % strips * strip
            task(codes, scales, biases, form, gs, slot[g], first, strip, x, lo[g], hi[g], y)

    @njit(parallel=True)
    def parallel(codes, scales, biases, form, gs, slot, lo, hi, strip, x, y):
        strips = (codes.shape[1] + strip - 1) // strip
        for i in prange(slot.size * strips):
            g, first = i // strips, i % strips * strip
            task(codes, scales, biases, form, gs, slot[g], first, strip, x, lo[g], hi[g], y)

    return serial, parallel


# -- the product -----------------------------------------------------------------------------------------------------


def grouped_product(
    x: np.ndarray, w: Stack, groups: Groups, y: np.ndarray, activations: str, variant: str | None = None
) -> None:
    """y[p] = W[slot] · x[p] for every group: x float32 [P, K], y float32 [P, N]."""
    if y.size == 0:
        return
    how = chosen(variant)
    if activations == "int8" and w.rounds:
        quantized_product(int8_rows(x, w, groups, how), w, groups, y, how)
        return
    kernels = float_product(w.kind, how)
    strip = 32 if len(x) >= 16 * len(groups.slot) else 8
    args = (w.codes, w.scales, w.biases, w.fmt, w.gs, groups.slot, groups.lo, groups.hi, strip, x, y)
    _launch(kernels, w, groups, args)
    _scale_groups(w, groups, y)


def quantized_product(x: Bytes, w: Stack, groups: Groups, y: np.ndarray, how: int) -> None:
    """`grouped_product` of rows that are bytes already."""
    rows = (x.panelled, x.paired, x.delta, x.total)  # made for this call, so writable: one signature
    args = (w.codes, w.scales, w.biases, w.fmt, w.gs, groups.slot, groups.lo, groups.hi, *rows, y)
    _launch(int8_product(w.kind, how), w, groups, args)
    _scale_groups(w, groups, y)


def _scale_groups(w: Stack, groups: Groups, y: np.ndarray) -> None:
    """Multiply the products with each weight of a stack by what its global scale stands for, where there is one."""
    if w.global_scale is not None:
        for slot, lo, hi in zip(groups.slot, groups.lo, groups.hi, strict=True):
            y[lo:hi] *= w.global_scale[slot] / np.float32(GLOBAL_UNIT)


def _launch(kernels: tuple[Any, Any], w: Stack, groups: Groups, args: tuple[Any, ...]) -> None:
    work = w.codes[0].nbytes * max(len(groups.slot), args[-1].shape[0])
    if work < SMALL:
        kernels[0](*args)
    else:
        run(kernels[1], *args)


def product_into(x: np.ndarray, w: Any, out: np.ndarray, activations: str, variant: str | None) -> None:
    """One weight [N, K] against all rows of x [..., K] into out [..., N]."""
    rows = float_rows(x)
    y = float_target(out)
    flat = y.reshape(len(rows), out.shape[-1])
    stack = stack_of(w)
    if not _in_one_call(rows, stack, flat, activations, variant):
        grouped_product(rows, stack, whole(len(rows)), flat, activations, variant)
    finish(y, out)


def _in_one_call(x: np.ndarray, w: Stack, y: np.ndarray, activations: str, variant: str | None) -> bool:
    """A product with a few rows, for which calls take as long as the work, by one kernel; whether there is one."""
    how = chosen(variant)
    by_rows = _goes_by_rows(w, len(x), activations, how)
    if by_rows is None:
        return False
    serial, parallel = int8_few(w.kind, how) if by_rows else int8_some(w.kind)
    args = (w.codes, w.scales, w.biases, w.fmt, w.gs, w.offset, x, y)
    if w.codes.nbytes * len(x) < SMALL:
        serial(*args)
    else:
        run(parallel, *args)
    return True


def _goes_by_rows(w: Stack, T: int, activations: str, how: int) -> bool | None:
    """Whether a product with T rows in one call takes rows of the weight one by one, or by panels; None: it is more
    than one call.
    """
    if activations != "int8" or not w.rounds or w.is_blocks or w.global_scale is not None or not 0 < T <= SOME:
        return None
    short = FEW_TOGETHER if w.kind == 4 and w.gs == 64 and how == _simd.VNNI else FEW_SHORT
    by_rows = (short if w.K <= 512 else FEW) >= T
    return None if how == PORTABLE or (not by_rows and how != _simd.VNNI) else by_rows


@kernel(ops.dequantize, device="cpu")
def dequantize(w, dtype, *, out):
    dequantize_into(w, out)


@kernel(ops.matmul, device="cpu")
def matmul(x, w, dtype, *, out):
    product_into(x, w, out, "float32", None)


@kernel(ops.bf16_matmul, device="cpu")
def bf16_matmul(x, w, dtype, *, out):
    product_into(x, w, out, "float32", None)


@kernel(ops.quantized_matmul, device="cpu", variants=tuple(VARIANTS))
def quantized_matmul(x, w, activations, dtype, *, out, variant):
    product_into(x, w, out, activations, variant)


def shared_products(
    x: np.ndarray,
    stacks: list[Stack],
    groups: Groups,
    gather: Callable[[np.ndarray], np.ndarray],
    products: list[np.ndarray],
    activations: str,
    variant: str | None,
) -> None:
    """Several weights against the same rows, which `gather` makes from x; int8 rounds x once for all that it meets."""
    if products[0].size == 0:
        return
    if activations == "int8" and stacks[0].rounds and len({(w.kind, w.gs) for w in stacks}) == 1:
        how = chosen(variant)
        rows = int8_rows(x, stacks[0], groups, how).map(gather)
        for w, y in zip(stacks, products, strict=True):
            quantized_product(rows, w, groups, y, how)
    else:
        rows = frozen(gather(x))
        for w, y in zip(stacks, products, strict=True):
            grouped_product(rows, w, groups, y, activations, variant)


# gated    h[p, j] = act(gate[p, j]) · up[p, j]
# shapes   gate, up, h float32 [P, N]; gate and up may be halves of one [P, 2N], h may be gate
# threads  prange over rows in the parallel form; a row belongs to one thread
# bytes    12 · P · N
# limits   none
@njit
def gated_row(gate, up, gelu, h):
    if gelu:
        for j in range(h.size):
            h[j] = gelu32(gate[j]) * up[j]
    else:
        for j in range(h.size):
            h[j] = silu32(gate[j]) * up[j]


@njit
def _gated(gate, up, gelu, h):
    for p in range(h.shape[0]):
        gated_row(gate[p], up[p], gelu, h[p])


@njit(parallel=True)
def _gated_parallel(gate, up, gelu, h):
    for p in prange(h.shape[0]):
        gated_row(gate[p], up[p], gelu, h[p])


def gated(gate: np.ndarray, up: np.ndarray, act: str, h: np.ndarray) -> None:
    """h = act(gate) · up, act "silu" or "gelu_tanh"."""
    by_size(_gated, _gated_parallel, h.size, gate, up, act == "gelu_tanh", h)


def _gate_up(x, gate_w, up_w, act: str, activations: str, out: np.ndarray, variant: str | None) -> None:
    """out = act(gate_w · x) · (up_w · x)."""
    if out.size == 0:
        return
    rows, y = float_rows(x), float_target(out)
    gate = y.reshape(len(rows), out.shape[-1])
    g, u = stacks = [stack_of(gate_w), stack_of(up_w)]
    alike, how = (g.kind, g.gs, g.fmt) == (u.kind, u.gs, u.fmt), chosen(variant)
    if alike and all(_goes_by_rows(w, len(rows), activations, how) for w in stacks):
        args = (g.codes, g.scales, g.biases, u.codes, u.scales, u.biases, g.fmt, g.gs, g.offset)
        serial, parallel = int8_gate_up(g.kind, how)
        if g.codes.nbytes * len(rows) < SMALL:
            serial(*args, rows, act == "gelu_tanh", gate)
        else:
            run(parallel, *args, rows, act == "gelu_tanh", gate)
        finish(y, out)
        return
    up = np.empty(gate.shape, np.float32)
    if not all(_in_one_call(rows, w, y, activations, variant) for w, y in zip(stacks, (gate, up), strict=True)):
        shared_products(rows, stacks, whole(len(rows)), lambda a: a, [gate, up], activations, variant)
    gated(gate, up, act, gate)
    finish(y, out)


@kernel(ops.fused_gate_up_swiglu, device="cpu", variants=tuple(VARIANTS))
def fused_gate_up_swiglu(x, gate_w, up_w, activations, *, out, variant):
    _gate_up(x, gate_w, up_w, "silu", activations, out, variant)


@kernel(ops.fused_gate_up_geglu, device="cpu", variants=tuple(VARIANTS))
def fused_gate_up_geglu(x, gate_w, up_w, activations, *, out, variant):
    _gate_up(x, gate_w, up_w, "gelu_tanh", activations, out, variant)


@kernel(ops.norm_matmul, device="cpu", variants=tuple(VARIANTS), composed=True)
def norm_matmul(x, norm_weight, w, eps, activations, dtype, normed, *, out, variant):
    rows = np.empty(x.shape, x.dtype if normed is None else numpy_dtype(normed))
    rms_norm(x, norm_weight, eps, out=rows)
    product_into(rows, w, out, activations, variant)


@kernel(ops.matmul_add, device="cpu", variants=tuple(VARIANTS), composed=True)
def matmul_add(residual, x, w, activations, bias, *, out, variant):
    y, total = np.empty(out.shape, np.float32), float_target(out)
    product_into(x, w, y, activations, variant)
    if bias is not None:
        y += bias.astype(np.float32)
    np.add(float_rows(residual).reshape(y.shape), y, out=total)
    finish(total, out)


# -- experts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Pairs:
    """(row, slot) pairs of a routing, sorted by the weight they meet; those that meet none are left out."""

    order: np.ndarray | None  # sorted position → pair; None: all, as they came
    groups: Groups

    @property
    def count(self) -> int:
        return int(self.groups.hi[-1]) if self.groups.hi.size else 0

    def gather(self, rows: np.ndarray, k: int) -> np.ndarray:
        """Row of each sorted pair, from one row per token: a new array."""
        return rows.repeat(k, axis=0) if self.order is None else rows[self.order // k]

    def sort(self, rows: np.ndarray) -> np.ndarray:
        """Rows of pairs in sorted order."""
        return frozen(rows if self.order is None else rows[self.order])

    def restore(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Sorted rows back to the order of the pairs; 0 for those that are left out."""
        if self.order is None:
            out[...] = rows
        else:
            if len(rows) < len(out):
                out[...] = 0
            out[self.order] = rows


def pairs_of(slots: np.ndarray, tokens: int) -> Pairs:
    """Group equal slots [P] of a routing, those below 0 left out. One token's experts are distinct (or read twice), so
    each is a group.
    """
    if bounds(slots)[0] < 0:
        present = np.flatnonzero(slots >= 0)
        found = pairs_of(slots[present], tokens)
        return replace(found, order=present if found.order is None else present[found.order])
    P = slots.size
    if tokens <= 1 or P == 0:
        at_row = np.arange(P)
        return Pairs(None, Groups(slots.astype(np.int64), at_row, at_row + 1, 1))
    order = np.argsort(slots, kind="stable")
    ordered = slots[order].astype(np.int64)
    lo = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    hi = np.append(lo[1:], P)
    return Pairs(order, Groups(ordered[lo], lo, hi, int((hi - lo).min())))


@kernel(ops.expert_matmul, device="cpu", variants=tuple(VARIANTS))
def expert_matmul(x, experts, ids, slot_of, activations, *, out, variant):
    if isinstance(experts, ExpertBlobs):
        experts = experts.experts
    count = len(experts) if isinstance(experts, list | tuple) else experts.shape[0]
    if ids is None:
        ids = np.arange(count if slot_of is None else len(slot_of), dtype=np.int32)
    slots = slots_of(ids, slot_of).reshape(-1)
    shared = x.ndim == ids.ndim
    pairs = pairs_of(slots, slots.size // ids.shape[-1])
    rows = float_rows(x)
    sorted_rows = frozen(pairs.gather(rows, ids.shape[-1])) if shared else pairs.sort(rows)
    y = np.empty((pairs.count, out.shape[-1]), np.float32)
    if isinstance(experts, list | tuple):
        for slot, lo, hi in zip(pairs.groups.slot, pairs.groups.lo, pairs.groups.hi, strict=True):
            part = frozen(sorted_rows[lo:hi])
            grouped_product(part, stack_of(experts[slot]), whole(int(hi - lo)), y[lo:hi], activations, variant)
    else:
        grouped_product(sorted_rows, stack_of(experts), pairs.groups, y, activations, variant)
    target = float_target(out)
    pairs.restore(y, target.reshape(slots.size, out.shape[-1]))
    finish(target, out)
