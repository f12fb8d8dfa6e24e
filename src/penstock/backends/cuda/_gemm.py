"""Matrix products for many rows on tensor cores: quantized weights are made dense in registers, a tile at a time.

The weight tile is the left operand, so that it goes from registers into the tensor cores without a detour through
shared memory: out[t, n]ᵀ = W[n, :] · x[t, :]ᵀ. A thread owns whole 32-bit words of codes; the order in which codes
come out of words is an order of k ("dot order"), and x is brought into the same order. With VPW codes per unit (a word
of 2, 4 or 8-bit codes; 32 codes of 3, 5 or 6 bits) and chunks of 4 units, code h·VPW/2 + j of unit u stands at
8·j + 2·u + h of its chunk: the two halves of a word give the pairs that one 32-bit register holds.
"""

import functools
from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl

from penstock.backends.cuda._blocks import block_tile, is_blocks
from penstock.backends.cuda._floats import (
    float_values,
    global_factor,
    groups_of,
    is_float,
    kernel_arrays,
    kind_of,
    scale_of,
    width,
)
from penstock.backends.cuda._launch import INTERPRETED, TL_DTYPES, compiled_for, multiprocessors, shared_memory
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._tuning import (
    DENSE_BLOCKS,
    GEMM,
    GEMM_BLOCKS,
    GEMM_DENSE,
    GEMM_ORDERED,
    GEMM_PART,
    GEMM_SPLIT,
    GEMM_WIDE,
)
from penstock.ops.op import deterministic
from penstock.quant import GLOBAL_UNIT, MODES, GgufTensor, QuantizedTensor

# A use of the sum in every step makes Triton wait for the tensor cores before the registers that hold the weight tile
# are written again; without one it leaves up to three of four products unfinished.
_SETTLE = tl.constexpr(not INTERPRETED)

# Arrays of a product; w: codes, scales and biases of its weight, its planes, or three times the dense one.
_Arrays = namedtuple("_Arrays", "x w out")
# What tiles of a product are compiled for: rows of K codes of BITS (0: dense) in groups of GS, BN of them by BK of K at
# a time, BM rows of x; ORDERED: x is in dot order; DTYPE: of the operands; WORDS: `words_fit`; PAIRS: `pairs_of`.
Constants = namedtuple("Constants", "K BITS GS WORDS PAIRS ORDERED DTYPE BM BN BK")


@triton.constexpr_function
def units(bits: int) -> int:
    """Codes per unit: those of a word where a word holds whole codes, else 32."""
    bits = width(bits)
    return 32 // bits if bits in (2, 4, 8) else 32


@triton.jit
def dot_order(x, ROWS: tl.constexpr, BK: tl.constexpr, VPW: tl.constexpr):
    """[ROWS, BK] with k as stored → in dot order."""
    x = tl.reshape(x, [ROWS, BK // (4 * VPW), 4, 2, VPW // 2])
    return tl.reshape(tl.permute(x, [0, 1, 4, 2, 3]), [ROWS, BK])


@triton.jit
def load_scales(ptr, start, k, C: tl.constexpr):
    """Scales or biases of the groups in k…k+BK of rows that start there, [BN, groups]; 0 beyond K.

    WORDS: half-precision ones are cut out of the aligned words that hold them, because an asynchronous copy takes 4
    bytes or more.
    """
    if C.BK <= C.GS:
        at = start + k // C.GS
        if C.WORDS:
            word = tl.load(ptr.to(tl.pointer_type(tl.int32)) + (at >> 1))
            s = (word >> ((at & 1) * 16).to(tl.int32)).to(tl.int16).to(ptr.dtype.element_ty, bitcast=True)
        else:
            s = tl.load(ptr + at)
        s = s[:, None]
    else:
        g = k // C.GS + tl.arange(0, C.BK // C.GS)
        at = ptr + start[:, None] + g[None, :]
        if C.K % C.BK == 0:
            s = tl.load(at)
        else:
            s = tl.load(at, mask=g[None, :] < C.K // C.GS, other=0)
    return s


@triton.jit
def by_unit(s, C: tl.constexpr):
    """[BN, groups] → [BN, chunks, 1, 4], one per unit."""
    GROUPS: tl.constexpr = C.BK // C.GS if C.BK > C.GS else 1
    UNITS: tl.constexpr = C.BK // units(C.BITS)
    s = tl.broadcast_to(s[:, :, None], [C.BN, GROUPS, UNITS // GROUPS])
    return tl.reshape(s, [C.BN, UNITS // 4, 4])[:, :, None, :]


@triton.jit
def _twice(s, SHAPE: tl.constexpr):
    """A half-precision number in both halves of a word."""
    s = s.to(tl.uint16, bitcast=True).to(tl.uint32)
    return tl.broadcast_to(s | s << 16, SHAPE)


@triton.jit
def load_tile(ptr, start, live, k, C: tl.constexpr):
    """k…k+BK of rows of K elements that start there; 0 beyond K and for rows that are not live (None: all are)."""
    col = k + tl.arange(0, C.BK)
    at = ptr + start[:, None] + col[None, :]
    if C.K % C.BK == 0:
        if live is None:
            y = tl.load(at)
        else:
            y = tl.load(at, mask=live[:, None], other=0.0)
    else:
        inside = col[None, :] < C.K
        y = tl.load(at, mask=inside if live is None else inside & live[:, None], other=0.0)
    return y


@triton.jit
def _word(ptr, start, k, AT: tl.constexpr, C: tl.constexpr):
    """Word AT of every unit of 32 codes, [BN, chunks, 4]."""
    u = k // 32 + tl.arange(0, C.BK // 32)
    at = ptr + start[:, None] + (u * C.BITS + AT)[None, :]
    if C.K % C.BK == 0:
        word = tl.load(at)
    else:
        word = tl.load(at, mask=u[None, :] < C.K // 32, other=0)
    return tl.reshape(word.to(tl.uint32, bitcast=True), [C.BN, C.BK // 128, 4])


@triton.jit
def _code(words, J: tl.constexpr, BITS: tl.constexpr):
    """Code J of every unit."""
    WORD: tl.constexpr = J * BITS // 32
    SHIFT: tl.constexpr = J * BITS % 32
    code = words[WORD] >> SHIFT
    if SHIFT + BITS > 32:
        code |= words[WORD + 1] << (32 - SHIFT)
    return code & ((1 << BITS) - 1)


@triton.jit
def _every_eighth(words, J: tl.constexpr, BITS: tl.constexpr):
    """Places J and J + 8 of both halves, [BN, chunks, 4, half, 2]."""
    here = tl.join(_code(words, J, BITS), _code(words, J + 16, BITS))
    return tl.join(here, tl.join(_code(words, J + 8, BITS), _code(words, J + 24, BITS)))


@triton.jit
def _every_second(words, J: tl.constexpr, BITS: tl.constexpr):
    """Places J, J + 2, …, [BN, chunks, 4, half, 2, 2, 2]."""
    a = tl.join(_every_eighth(words, J, BITS), _every_eighth(words, J + 4, BITS))
    return tl.join(a, tl.join(_every_eighth(words, J + 2, BITS), _every_eighth(words, J + 6, BITS)))


@triton.jit
def load_codes(ptr, start, k, C: tl.constexpr):
    """Codes k…k+BK of rows that start at these words, [BN, chunks, VPW / 2, 4, half]; 0 beyond K.

    PAIRS: without the last axis, both halves in the halves of a word, with other codes in the bits above each.
    """
    BITS: tl.constexpr = width(C.BITS)
    MASK: tl.constexpr = (1 << BITS) - 1
    if 32 % BITS == 0:
        VPW: tl.constexpr = 32 // BITS
        w = k // VPW + tl.arange(0, C.BK // VPW)
        at = ptr + start[:, None] + w[None, :]
        if C.K % C.BK == 0:
            words = tl.load(at)
        else:
            words = tl.load(at, mask=w[None, :] < C.K // VPW, other=0)
        words = tl.reshape(words.to(tl.uint32, bitcast=True), [C.BN, C.BK // (4 * VPW), 4])
        j = tl.arange(0, VPW // 2) * BITS
        words = words[:, :, None, :] >> j[None, None, :, None]
        if C.PAIRS is not None:
            codes = words
        else:
            codes = tl.join(words & MASK, (words >> 16) & MASK)
    else:
        words = (
            _word(ptr, start, k, 0, C),
            _word(ptr, start, k, 1, C),
            _word(ptr, start, k, 2, C),
            _word(ptr, start, k, min(3, C.BITS - 1), C),
            _word(ptr, start, k, min(4, C.BITS - 1), C),
            _word(ptr, start, k, C.BITS - 1, C),
        )
        codes = tl.join(_every_second(words, 0, C.BITS), _every_second(words, 1, C.BITS))
        codes = tl.permute(codes, [0, 1, 4, 5, 6, 7, 2, 3])  # [BN, chunks, place (4 axes of 2), unit, half]
    return codes


@triton.jit
def weight_tile(codes, s, b, C: tl.constexpr):
    """code · scale + bias, [BN, BK] in dot order and in DTYPE, rounded once: from float32 or (PAIRS) the exact sum.

    A code or-ed into the mantissa of 2^23 is that number plus the code, without a conversion.
    """
    VPW: tl.constexpr = units(C.BITS)
    TILE: tl.constexpr = [C.BN, C.BK]
    s = by_unit(s, C)
    if is_float(C.BITS):
        FLOATS: tl.constexpr = [C.BN, C.BK // (4 * VPW), VPW // 2, 4, 2]
        s = tl.broadcast_to(scale_of(s, C.BITS)[:, :, :, :, None], FLOATS)
        w = tl.reshape(float_values(codes.to(tl.int32, bitcast=True), C.BITS) * s, TILE).to(C.DTYPE)
    elif C.PAIRS is not None:
        SHAPE: tl.constexpr = [C.BN, C.BK // (4 * VPW), VPW // 2, 4]
        s = _twice(s, SHAPE)
        b = _twice(by_unit(b, C), SHAPE)
        w = tl.inline_asm_elementwise(C.PAIRS, "=r,r,r,r", [codes, s, b], dtype=tl.uint32, is_pure=True, pack=1)
        low = w.to(tl.uint16).to(C.DTYPE, bitcast=True)
        w = tl.reshape(tl.join(low, (w >> 16).to(tl.uint16).to(C.DTYPE, bitcast=True)), TILE)
    else:
        SHAPE: tl.constexpr = [C.BN, C.BK // (4 * VPW), VPW // 2, 4, 2]
        w = tl.reshape((codes | 0x4B000000).to(tl.float32, bitcast=True), TILE) - 8388608.0
        s = tl.reshape(tl.broadcast_to(s[:, :, :, :, None], SHAPE), TILE)
        b = tl.reshape(tl.broadcast_to(by_unit(b, C)[:, :, :, :, None], SHAPE), TILE)
        w = (w * s.to(tl.float32) + b.to(tl.float32)).to(C.DTYPE)
    return w


@triton.jit
def accumulate(acc, a, x_start, x_live, w_start, s_start, b_start, first, last, C: tl.constexpr):
    """acc [BN, BM] + W · xᵀ over k = first…last, for rows of W and x that start at these elements.

    The loop's loads become asynchronous copies, several steps ahead. Rows of x that are not live are not read: all of
    them reading one and the same row takes longer than the product.
    """
    if C.BITS == 0:
        for k in range(first, last, C.BK):
            w = load_tile(a.w[0], w_start, None, k, C).to(C.DTYPE)
            x = load_tile(a.x, x_start, x_live, k, C).to(C.DTYPE)
            acc = tl.dot(w, tl.trans(x), acc, input_precision="tf32x3")
    elif is_blocks(C.BITS):
        for k in range(first, last, C.BK):
            w = rounded(block_tile(a.w, w_start, w_start >= 0, k, C.K, C.BN, C.BK, C.BITS), C.DTYPE)
            x = load_tile(a.x, x_start, x_live, k, C).to(C.DTYPE)
            acc = tl.dot(w, tl.trans(x), acc, input_precision="tf32x3")
    else:
        for k in range(first, last, C.BK):
            codes = load_codes(a.w[0], w_start, k, C)
            s = load_scales(a.w[1], s_start, k, C)
            b = None if is_float(C.BITS) else load_scales(a.w[2], b_start, k, C)
            w = weight_tile(codes, s, b, C)
            # x last, next to the product that reads it: its way through shared memory is not cut by that of the scales
            x = load_tile(a.x, x_start, x_live, k, C).to(C.DTYPE)
            if not C.ORDERED:
                x = dot_order(x, acc.shape[1], C.BK, units(C.BITS))
            acc = tl.dot(w, tl.trans(x), acc, input_precision="tf32x3")
            if _SETTLE:
                acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


@triton.jit
def accumulate_both(one, two, a, x_start, x_live, more_start, more_live, starts, C: tl.constexpr):
    """one + W · xᵀ and two + W · zᵀ over K, z being more rows of x; W starts as `starts` say: codes, scales, biases."""
    for k in range(0, C.K, C.BK):
        codes = load_codes(a.w[0], starts[0], k, C)
        s = load_scales(a.w[1], starts[1], k, C)
        b = None if is_float(C.BITS) else load_scales(a.w[2], starts[2], k, C)
        w = weight_tile(codes, s, b, C)
        x = load_tile(a.x, x_start, x_live, k, C).to(C.DTYPE)
        z = load_tile(a.x, more_start, more_live, k, C).to(C.DTYPE)
        one = tl.dot(w, tl.trans(x), one)
        two = tl.dot(w, tl.trans(z), two)
        if _SETTLE:
            one = tl.inline_asm_elementwise("", "=f,0", [one], dtype=tl.float32, is_pure=True, pack=1)
            two = tl.inline_asm_elementwise("", "=f,0", [two], dtype=tl.float32, is_pure=True, pack=1)
    return one, two


@triton.jit
def weight_starts(row, C: tl.constexpr):
    """Where rows of a weight start: in its codes or numbers, and in its scales and biases; of blocks the rows."""
    if is_blocks(C.BITS):
        starts = row, row
    else:
        starts = row * (C.K * width(C.BITS) // 32 if C.BITS else C.K), row * (C.K // C.GS)
    return starts


# gemm      out[t, n] = Σ_k x[t, k] · W[n, k], W = code · scale + bias or dense, in parts of K that are added in order
# shapes    x [T, K] as stored, or in dot order (ORDERED); W [N, K]; out [splits, T, N]; sums in float32
# grid      (T tiles · N tiles, splits), T tiles first, so that a weight tile comes from memory once and then from L2;
#           a program has FOLD parts, either all of them or one
# bytes     T · K · itemsize per N tile, the weight once per T tile (from L2 but the first), out once
# limits    K a multiple of 32 if the weight is quantized
@triton.jit(do_not_specialize=["T"])
def _gemm_kernel(a, T, N, PART: tl.constexpr, FOLD: tl.constexpr, C: tl.constexpr):
    tiles = tl.cdiv(T, C.BM)
    m = (tl.program_id(0) % tiles).to(tl.int64) * C.BM + tl.arange(0, C.BM)
    n = tl.program_id(0) // tiles * C.BN + tl.arange(0, C.BN)
    w_start, s_start = weight_starts(tl.minimum(n, N - 1).to(tl.int64), C)
    total = tl.zeros([C.BN, C.BM], tl.float32)
    for part in tl.static_range(FOLD):
        start = (tl.program_id(1) + part) * PART
        acc = tl.zeros([C.BN, C.BM], tl.float32)
        total += accumulate(acc, a, m * C.K, m < T, w_start, s_start, s_start, start, min(start + PART, C.K), C)
    if is_float(C.BITS) and a.w[2] is not None:
        total *= global_factor(a.w[2], 0, None)
    at = a.out + (tl.program_id(1).to(tl.int64) * T + m[:, None]) * N + n[None, :]
    tl.store(at, tl.trans(total).to(a.out.dtype.element_ty), mask=(m[:, None] < T) & (n[None, :] < N))


# add_parts out[i] = residual[i] + Σ_s parts[s, i], s in order
# shapes    parts float32 [SPLITS, size], out [size] and residual [size] (or None) of any float dtype, may be one
# grid      (size / BLOCK,)
# bytes     size · (4 · SPLITS + itemsize), residual once
# limits    none
@triton.jit
def _add_parts_kernel(parts_ptr, residual_ptr, out_ptr, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    for s in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + s * size.to(tl.int64) + i, mask=i < size, other=0.0)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < size)


# dot_order out = x with the k of every chunk of 4 · VPW in dot order
# shapes    x, out [chunks, 4 · VPW], the rows of a contiguous [T, K] end to end
# grid      (chunks / CHUNKS,)
# bytes     2 · T · K · itemsize
# limits    K a multiple of 4 · VPW
@triton.jit(do_not_specialize=["chunks"])
def _dot_order_kernel(x_ptr, out_ptr, chunks, VPW: tl.constexpr, CHUNKS: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    at = chunk[:, None] * (4 * VPW) + tl.arange(0, 4 * VPW)[None, :]
    live = chunk[:, None] < chunks
    x = tl.load(x_ptr + at, mask=live, other=0.0)
    tl.store(out_ptr + at, dot_order(x, CHUNKS, 4 * VPW, VPW), mask=live)


# dense     out[i] = code[i] · scale[i // GS] + bias[i // GS] in float32, rounded to out's dtype
# shapes    the weight's units end to end: packed [units, words], scales and biases flat; out [units, VPW]
# grid      (units / UNITS,)
# bytes     packed, scales and biases once, out once
# limits    none
@triton.jit(do_not_specialize=["count"])
def _dense_kernel(w_ptr, s_ptr, b_ptr, out_ptr, count, BITS: tl.constexpr, GS: tl.constexpr, UNITS: tl.constexpr):
    VPW: tl.constexpr = units(BITS)
    WORDS: tl.constexpr = VPW * BITS // 32
    u = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    live = u < count
    s = tl.load(s_ptr + u * VPW // GS, mask=live, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + u * VPW // GS, mask=live, other=0.0).to(tl.float32)
    bit = tl.arange(0, VPW)[None, :] * BITS
    codes = tl.zeros([UNITS, VPW], tl.uint32)
    for i in tl.static_range(WORDS):
        word = tl.load(w_ptr + u * WORDS + i, mask=live, other=0).to(tl.uint32, bitcast=True)[:, None]
        codes |= tl.where(bit // 32 == i, word >> (bit % 32), 0)
        codes |= tl.where((bit // 32 == i - 1) & (bit % 32 + BITS > 32), word << ((32 - bit % 32) % 32), 0)
    codes = codes & ((1 << BITS) - 1)
    w = (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    at = out_ptr + u[:, None] * VPW + tl.arange(0, VPW)[None, :]
    tl.store(at, (w * s[:, None] + b[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None])


# -- launches --------------------------------------------------------------------------------------------------------


def dot_dtype(x: torch.Tensor, w: Any, out: torch.Tensor) -> torch.dtype:
    """What the operands are rounded to: x's dtype, or float32 where the result is and a weight may need it."""
    if out.dtype is torch.float32 and (isinstance(w, QuantizedTensor) or w.dtype is not x.dtype):
        return torch.float32
    # The interpreter multiplies bfloat16 as if they were integers.
    return torch.float32 if INTERPRETED and x.dtype is torch.bfloat16 else x.dtype


# Two codes in the halves of $1 times scales $2 plus biases $3: a code or-ed into the mantissa of 128 (bfloat16) or 1024
# (float16) is that number plus the code; taking the number off again is exact, and the last step rounds once.
_PAIRS = """{{
.reg .b32 w, one, less;
mov.b32 one, {one:#x};
mov.b32 less, {less:#x};
lop3.b32 w, $1, {mask:#x}, {base:#x}, 0xEA;
fma.rn.{kind}x2 w, w, one, less;
fma.rn.{kind}x2 $0, w, $2, $3;
}}"""
_HALVES = {torch.bfloat16: ("bf16", 0x3F80, 0xC300, 0x4300), torch.float16: ("f16", 0x3C00, 0xE400, 0x6400)}


@functools.cache
def _pairs(bits: int, scales: torch.dtype, dtype: torch.dtype) -> str | None:
    if INTERPRETED or scales is not dtype or dtype not in _HALVES:
        return None
    if bits not in (2, 4) and not (bits == 8 and dtype is torch.float16):
        return None
    kind, *words = _HALVES[dtype]
    one, less, base, mask = (word | word << 16 for word in (*words, (1 << bits) - 1))
    return _PAIRS.format(kind=kind, one=one, less=less, base=base, mask=mask)


def pairs_of(w: Any, dtype: torch.dtype) -> str | None:
    """The PTX that makes weights of two codes at a time, where both fit the mantissa and scales are of this dtype."""
    if not isinstance(w, QuantizedTensor) or w.mode not in MODES:
        return None
    return _pairs(kind_of(w), w.scales.dtype, dtype)


def words_fit(w: Any) -> bool:
    """True if half-precision scales and biases can be read by aligned words that end with the array."""
    s, b = w.scales, w.biases
    return (
        w.mode == "affine"
        and s.element_size() == 2
        and s.numel() % 2 == 0
        and s.data_ptr() % 4 == 0
        and b.data_ptr() % 4 == 0
    )


def ordered(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x [T, K] in dot order for weights of these bits: a copy."""
    unit = units(bits)
    assert x.is_contiguous() and x.shape[1] % (4 * unit) == 0
    made, chunks = torch.empty_like(x), x.numel() // (4 * unit)
    step = 1024 // unit
    _dot_order_kernel[(triton.cdiv(chunks, step),)](x, made, chunks, unit, step)
    return made


def ordering(T: int, K: int, bits: int) -> bool:
    """Whether x goes in dot order by a copy: many rows, or codes whose unpacking needs shared memory beside x."""
    return 0 < bits < 256 and (T > GEMM_ORDERED or bits in (3, 5, 6)) and K % (4 * units(bits)) == 0


def plainly(dtype: torch.dtype, bits: int, is_ordered: bool) -> bool:
    """Whether a product takes 2 warps, for which Triton chooses the instructions of single warps.

    float32 weights, and codes of 3, 5 and 6 bits beside an x that is not in dot order, pass through shared memory on
    their way to the product; the instructions of four warps together, which read it on their own account, are kept for
    weights that come from registers.
    """
    return dtype is torch.float32 or (bits in (3, 5, 6) and not is_ordered)


def stages_for(stages: int, bits: int, shared: int) -> int:
    """Stages of tiles: blocks of 99 KB have room for one less of codes that cross words, which need up to 40 KB for
    their unpacking beside them, and of dense weights of 16 bits, whose 128 rows and columns take 32 KB.
    """
    return stages - 1 if (bits in (3, 5, 6) or (bits == 0 and stages > 2)) and shared < 163 else stages


def blocks_config(wide: bool) -> tuple[int, int, int, int]:
    """BN, BK, warps and stages of tiles of GGUF blocks; wide: of float32."""
    if INTERPRETED:  # which is slow by the operation: fewer of them
        return 256, 256, 4, 1
    return GEMM_WIDE if wide else GEMM_BLOCKS


@functools.cache
def _config(
    T: int, N: int, K: int, bits: int, wide: bool, fixed: bool, processors: int, shared: int
) -> tuple[int, ...]:  # fmt: skip
    """BM, BN, BK, parts of K, parts of a program, warps, stages; `wide`: see `plainly`.

    The bits of a row depend on where the parts begin alone: `fixed` chooses them without T. BN is at least 32 per warp:
    for a load of fewer elements than threads Triton finds no layout that leaves the weights where they are unpacked.
    """
    BM = 16 if T <= 16 else 32 if T <= 32 else 64 if T <= 64 or wide or fixed else 128
    BN, BK, warps, stages = blocks_config(wide) if is_blocks(bits) else GEMM_WIDE if wide else GEMM[BM]
    BK = min(BK, 64) if fixed else BK
    BK = max(BK, 4 * units(bits)) if bits else BK
    tiles = triton.cdiv(N, BN) * (1 if fixed else triton.cdiv(T, BM))
    parts = 1
    while tiles * parts * 2 <= processors * GEMM_SPLIT[BM] and K // (parts * 2) >= GEMM_PART:
        parts *= 2
    return BM, BN, BK, parts, parts if fixed and T > 64 else 1, warps, stages_for(stages, bits, shared)


def _launch(
    x: torch.Tensor, w: Any, out: torch.Tensor, half: bool = False, residual: torch.Tensor | None = None
) -> None:
    (T, K), N = x.shape, w.shape[0]
    quantized = isinstance(w, QuantizedTensor)
    arrays, bits, gs = (kernel_arrays(w), kind_of(w), groups_of(w)) if quantized else ((w, w, w), 0, 1)
    dtype, order = dot_dtype(x, w, x if half else out), ordering(T, K, bits)
    wide = plainly(dtype, bits, order)
    gpu = (multiprocessors(x), shared_memory(x))
    BM, BN, BK, parts, fold, warps, stages = _config(T, N, K, bits, wide, deterministic(), *gpu)
    splits = parts // fold
    whole = splits == 1 and residual is None
    sums = out if whole else torch.empty((splits, T, N), dtype=torch.float32, device=x.device)
    part = triton.cdiv(triton.cdiv(K, parts), BK) * BK
    words, pairs = quantized and words_fit(w), pairs_of(w, dtype)
    C = Constants(K, bits, gs, words, pairs, order, TL_DTYPES[dtype], BM, BN, BK)
    a = _Arrays(ordered(x, bits) if order else x, arrays, sums)
    grid, options = (triton.cdiv(T, BM) * triton.cdiv(N, BN), splits), {"num_warps": warps, "num_stages": stages}
    _gemm_kernel[grid](a, T, N, PART=part, FOLD=fold, C=compiled_for(C), **options)
    if not whole:
        size = out.numel()
        _add_parts_kernel[(triton.cdiv(size, 1024),)](sums, residual, out, size, splits, 1024)


def dense_copy(w: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight made dense in this dtype, in new memory."""
    made = torch.empty(w.shape, dtype=dtype, device=w.packed.device)
    if isinstance(w, GgufTensor):
        dense_blocks(w, made)
        return made
    if w.mode != "affine":
        _dense_floats(w, made)
        return made
    unit = units(w.bits)
    count, step = made.numel() // unit, 2048 // unit
    _dense_kernel[(triton.cdiv(count, step),)](*w.arrays, made, count, w.bits, w.group_size, step)
    return made


# dense_blocks  out[r, k] = the weight of the planes w, in float32, rounded to out's dtype
# shapes    planes of [R, K] weights; out [R, K]
# grid      (ceil(R / ROWS), ceil(K / COLUMNS))
# bytes     planes once, out once
# limits    none
@triton.jit(do_not_specialize=["R"])
def _dense_blocks_kernel(w, out_ptr, R, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * COLUMNS
    y = block_tile(w, row, row < R, start, K, ROWS, COLUMNS, BITS)
    column = start + tl.arange(0, COLUMNS)[None, :]
    at = out_ptr + row[:, None] * K + column
    tl.store(at, rounded(y, out_ptr.dtype.element_ty), mask=(row < R)[:, None] & (column < K))


def dense_blocks(w: GgufTensor, made: torch.Tensor) -> None:
    """Write the weights of planes in made's dtype."""
    K, R = w.shape[-1], made.numel() // w.shape[-1]
    rows, columns = DENSE_BLOCKS
    grid = (triton.cdiv(R, rows), triton.cdiv(K, columns))
    _dense_blocks_kernel[grid](kernel_arrays(w), made, R, K, rows, columns, kind_of(w))


# dense_floats  out[i] = float(code[i]) · scale[i // GS] in float32, rounded to out's dtype
# shapes    the weight's words end to end: packed [words], scales flat; out [words, codes of a word]
# grid      (words / WORDS,)
# bytes     packed and scales once, out once
# limits    no global scale
@triton.jit(do_not_specialize=["count"])
def _dense_floats_kernel(w_ptr, s_ptr, out_ptr, count, BITS: tl.constexpr, GS: tl.constexpr, WORDS: tl.constexpr):
    PER: tl.constexpr = 32 // width(BITS)
    u = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    live = u < count
    s = scale_of(tl.load(s_ptr + u * PER // GS, mask=live, other=0), BITS)
    word = tl.load(w_ptr + u, mask=live, other=0)
    j = tl.arange(0, PER)[None, :]
    code = (word[:, None] >> (j * width(BITS))) & ((1 << width(BITS)) - 1)
    y = (float_values(code, BITS) * s[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + u[:, None] * PER + j, y, mask=live[:, None])


def _dense_floats(w: QuantizedTensor, made: torch.Tensor) -> None:
    count = w.packed.numel()
    grid = (triton.cdiv(count, 256),)
    _dense_floats_kernel[grid](w.packed, w.scales, made, count, kind_of(w), w.group_size, 256)
    if w.global_scale is not None:
        made *= (w.global_scale / float(GLOBAL_UNIT))[..., None, None].to(made.dtype)


def _dense_pays(T: int, N: int) -> bool:
    """True where a dense copy of the weight and cuBLAS take less time than tiles."""
    return any(least <= T and rows > N for least, rows in GEMM_DENSE)


def quantized_gemm(
    x: torch.Tensor, w: QuantizedTensor, out: torch.Tensor, half: bool = False, residual: torch.Tensor | None = None
) -> None:
    """out [T, N] = residual + x [T, K] · wᵀ for a quantized w [N, K].

    half: weights rounded to x's dtype will do though out is float32. (They do where out has x's dtype.)
    """
    assert x.is_contiguous() and out.is_contiguous()
    T, N = out.shape
    half = x.dtype is not torch.float32 and (half or x.dtype is out.dtype)
    if T == 0:
        return
    same = x.dtype is out.dtype
    if half and (same or x.is_cuda) and _dense_pays(T, N) and not deterministic():
        dense = dense_copy(w, x.dtype).t()
        if same:
            torch.mm(x, dense, out=out) if residual is None else torch.addmm(residual, x, dense, out=out)
        elif residual is None:
            torch.mm(x, dense, out_dtype=torch.float32, out=out)
        else:
            torch.add(residual, torch.mm(x, dense, out_dtype=torch.float32), out=out)
    else:
        _launch(x, w, out, half, residual)


def in_full(x: torch.Tensor) -> bool:
    """Whether torch multiplies x without rounding it first."""
    return x.dtype is not torch.float32 or torch.get_float32_matmul_precision() == "highest"


def dense_gemm(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """out [T, N] = x [T, K] · wᵀ for a dense w [N, K]; dtypes may differ.

    cuBLAS where all three agree, unless torch may round float32 operands to fewer bits.
    """
    assert x.is_contiguous() and w.is_contiguous() and out.is_contiguous()
    if x.shape[0] == 0:
        return
    alike = x.dtype is w.dtype and x.dtype is out.dtype and not deterministic()
    if alike and in_full(x):
        torch.mm(x, w.t(), out=out)
    else:
        _launch(x, w, out)
