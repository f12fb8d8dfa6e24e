"""Rows of GGUF blocks as products need them: against bytes, as codes for panels, and dense.

Each factory gives a compiled function for one type and one way of multiplying; `PORTABLE` ones are plain Python and
give the same bits. Rows whose length is no multiple of 256 are copied and filled up with zeros first.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from penstock.backends.cpu import _blocks
from penstock.backends.cpu._blocks import KINDS, STEP
from penstock.backends.cpu._formats import FLOAT16, number, widened
from penstock.backends.cpu._simd import LANES, TWICE, at
from penstock.backends.cpu.compile import keep_alive, njit
from penstock.quant.gguf_blocks import GROUP, LEVELS

_Q2, _Q3, _Q4, _Q5, _Q6 = (KINDS[f"Q{n}_K"] for n in range(2, 7))
_Q5_0, _Q5_1, _NL, _XS, _FP4 = (KINDS[name] for name in ("Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS", "MXFP4"))
_LEVEL_CODES = (LEVELS + 127).astype(np.int32)
_TWICE_CODES = np.array(TWICE, np.int32) + 12


def padded(K: int) -> int:
    """Columns of whole steps."""
    return -(-K // STEP) * STEP


@njit
def _half(row, place):
    return widened(np.int32(row[place]) | np.int32(row[place + 1]) << np.int32(8), FLOAT16)


@functools.cache
def _element(kind: int) -> tuple[Any, Any]:
    """Functions of a row of bytes: the code of weight j, and scale and bias (of codes as they are) of group g."""
    size, nbytes = (STEP, _blocks.step_bytes(kind)) if kind in (_Q2, _Q3, _Q4, _Q5, _Q6, _XS) else (32, 0)
    nbytes = nbytes or _blocks.step_bytes(kind) // 8
    middle = np.float32(_blocks.center(kind))

    @njit
    def code(row, j):
        p, j = j // size * nbytes, j % size
        group, lane = j // 32, j % 32
        half, quarter = j // 128, j // 32 % 4
        nibble = 4 * (lane // 16)
        if kind == _Q4:
            return np.int32(row[p + 16 + 32 * (group // 2) + lane] >> 4 * (group % 2) & 15)
        if kind == _Q5:
            low = row[p + 48 + 32 * (group // 2) + lane] >> 4 * (group % 2) & 15
            return np.int32(low | (row[p + 16 + lane] >> group & 1) << 4)
        if kind == _Q6:
            low = row[p + 64 * half + 32 * (quarter % 2) + lane] >> 4 * (quarter // 2) & 15
            return np.int32(low | (row[p + 128 + 32 * half + lane] >> 2 * quarter & 3) << 4)
        if kind == _Q3:
            low = row[p + 32 + 32 * half + lane] >> 2 * quarter & 3
            return np.int32(low | (row[p + lane] >> group & 1) << 2)
        if kind == _Q2:
            return np.int32(row[p + 16 + 32 * half + lane] >> 2 * quarter & 3)
        if kind == _XS:
            return _LEVEL_CODES[row[p + 8 + 16 * group + lane % 16] >> nibble & 15]
        if kind == _NL:
            return _LEVEL_CODES[row[p + 2 + lane % 16] >> nibble & 15]
        if kind == _FP4:
            return _TWICE_CODES[row[p + 1 + lane % 16] >> nibble & 15]
        bits = p + (2 if kind == _Q5_0 else 4)
        return np.int32(row[bits + 4 + lane % 16] >> nibble & 15 | (row[bits + lane // 8] >> lane % 8 & 1) << 4)

    @njit
    def scale(row, g):
        p, g = g * GROUP // size * nbytes, g % (size // GROUP)
        n = g // 2
        if kind in (_Q4, _Q5):
            if n < 4:
                s, m = np.int32(row[p + 4 + n] & 63), np.int32(row[p + 8 + n] & 63)
            else:
                s = np.int32(row[p + 8 + n] & 15 | row[p + n] >> 6 << 4)
                m = np.int32(row[p + 8 + n] >> 4 | row[p + 4 + n] >> 6 << 4)
            return _half(row, p) * np.float32(s), -(_half(row, p + 2) * np.float32(m))
        if kind == _Q2:
            s, m = np.int32(row[p + g] & 15), np.int32(row[p + g] >> 4)
            return _half(row, p + 80) * np.float32(s), -(_half(row, p + 82) * np.float32(m))
        if kind == _Q5_1:
            return _half(row, p), _half(row, p + 2)
        if kind == _Q6:
            one = _half(row, p + 208) * np.float32((np.int32(row[p + 192 + g]) ^ 128) - 128)
        elif kind == _Q3:
            low = np.int32(row[p + 96 + g % 8] >> 4 * (g // 8) & 15)
            one = _half(row, p + 108) * np.float32((low | np.int32(row[p + 104 + g % 4] >> 2 * (g // 4) & 3) << 4) - 32)
        elif kind == _XS:
            low = np.int32(row[p + 4 + n // 2] >> 4 * (n % 2) & 15)
            high = np.int32(row[p + 2 + n // 4] >> 2 * (n % 4) & 3)
            one = _half(row, p) * np.float32((low | high << 4) - 32)
        elif kind == _FP4:
            e = np.int32(row[p])
            one = number(np.int32(0x00200000) << e if e < 2 else (e - np.int32(1)) << np.int32(23))
        else:
            one = _half(row, p)
        return one, one * -middle

    return code, scale


@functools.cache
def widen(kind: int, portable: bool, how: int) -> Any:
    """out [K] = a row of blocks uint8 in float32, bit for bit the definition."""
    middle, affine, nbytes = np.int32(_blocks.center(kind)), _blocks.has_biases(kind), _blocks.step_bytes(kind)
    if portable:
        code, scale = _element(kind)

        @njit
        def plain(row, out):
            for g in range(out.size // GROUP):
                s, b = scale(row, g)
                for j in range(g * GROUP, (g + 1) * GROUP):
                    value = np.float32(np.float32(code(row, j) - middle) * s)
                    out[j] = np.float32(value + b) if affine else value

        return plain

    @njit
    def dense(row, out):
        if out.size % STEP == 0:
            _blocks.block_weights(at(row, 0), at(out, 0), out.size // STEP, kind, how)
            return
        steps = (out.size + STEP - 1) // STEP
        whole, made = np.zeros(steps * nbytes, np.uint8), np.empty(steps * STEP, np.float32)
        whole[: row.size] = row
        _blocks.block_weights(at(whole, 0), at(made, 0), steps, kind, how)
        out[:] = made[: out.size]
        keep_alive((whole, made))

    return dense


@functools.cache
def int8_dot(kind: int, portable: bool, how: int) -> Any:
    """The product of a row of blocks with bytes xq [K'] that have delta and total [K' / 16], K' whole steps."""
    nbytes = _blocks.step_bytes(kind)
    if portable:
        code, scale = _element(kind)

        @njit
        def plain(row, xq, delta, total):
            lanes = np.zeros(LANES, np.float32)
            groups = row.size * STEP // nbytes // GROUP
            for g in range(groups):
                dot = np.int32(0)
                for j in range(g * GROUP, (g + 1) * GROUP):
                    dot += code(row, j) * np.int32(xq[j])
                s, b = scale(row, g)
                lane = g % LANES
                lanes[lane] = np.float32(lanes[lane] + np.float32(s * delta[g]) * np.float32(dot))
                lanes[lane] = np.float32(lanes[lane] + np.float32(b * total[g]))
            for n in (8, 4, 2, 1):
                for i in range(n):
                    lanes[i] = np.float32(lanes[i] + lanes[i + n])
            return lanes[0]

        return plain

    @njit
    def dot(row, xq, delta, total):
        steps = xq.size // STEP
        x, d, sx = at(xq, 0), at(delta, 0), at(total, 0)
        if row.size == steps * nbytes:
            return _blocks.block_dot(at(row, 0), x, d, sx, steps, kind, how)
        whole = np.zeros(steps * nbytes, np.uint8)
        whole[: row.size] = row
        y = _blocks.block_dot(at(whole, 0), x, d, sx, steps, kind, how)
        keep_alive(whole)
        return y

    return dot


@functools.cache
def unpack(kind: int, how: int) -> Any:
    """Codes uint8 [K'], scales and biases float32 [K' / 16] of a row, K' whole steps: for panels."""
    nbytes = _blocks.step_bytes(kind)

    @njit
    def codes(row, to, scales, biases):
        steps = to.size // STEP
        c, s, b = at(to, 0), at(scales, 0), at(biases, 0)
        if row.size == steps * nbytes:
            _blocks.block_codes(at(row, 0), c, s, b, steps, kind, how)
        else:
            whole = np.zeros(steps * nbytes, np.uint8)
            whole[: row.size] = row
            _blocks.block_codes(at(whole, 0), c, s, b, steps, kind, how)
            keep_alive(whole)

    return codes
