"""Codes and scales that are small floats (mxfp4, nvfp4, mxfp8), for kernels that also read affine ones.

A kernel is compiled for a kind of codes, BITS: the bits of unsigned numbers, or one of the numbers below, whose lower 4
bits are the bits of a code. Those from 256 on are blocks of GGUF (`_blocks`).
"""

from typing import Any

import triton
import triton.language as tl

from penstock.backends.cuda._launch import WIDENED
from penstock.errors import BackendError
from penstock.quant import BLOCK_TYPES, GLOBAL_UNIT, GgufPlanes, GgufTensor, QuantizedTensor, layout_in_planes

MXFP4, NVFP4, MXFP8 = 20, 36, 40
BLOCK_KINDS = {name: 256 + 16 * i + layout_in_planes(name).low for i, name in enumerate(BLOCK_TYPES)}
_KINDS = {"mxfp4": MXFP4, "nvfp4": NVFP4, "mxfp8": MXFP8} | BLOCK_KINDS
_UNIT = tl.constexpr(float(GLOBAL_UNIT))


def kind_of(w: QuantizedTensor) -> int:
    """The kind of codes of a weight."""
    return _KINDS.get(w.mode, w.bits)


def groups_of(w: QuantizedTensor) -> int:
    """Weights that share a scale."""
    return w.layout.group if isinstance(w, GgufPlanes) else w.group_size


def kernel_arrays(w: QuantizedTensor) -> tuple[Any, ...]:
    """What kernels read: codes, scales, and biases (affine), a global scale, or None; of blocks their planes low, high,
    sub, more and top, None where there are none.
    """
    if isinstance(w, GgufPlanes):
        return w.by_name
    if isinstance(w, GgufTensor):
        raise BackendError(f"a product: a weight is {w!r}, expected its planes on cuda: to('cuda') makes them")
    return w.packed, w.scales, w.biases if w.mode == "affine" else w.global_scale


@triton.constexpr_function
def width(kind):
    """Bits of a code."""
    return kind & 15


@triton.constexpr_function
def is_float(kind):
    return 15 < kind < 256


@triton.jit
def float_values(code, BITS: tl.constexpr):
    """float32 of E2M1 or E4M3 codes (int32); without subnormal numbers on the way, which a compiler may flush."""
    MAGNITUDE: tl.constexpr = 0x7 if width(BITS) == 4 else 0x7F
    UP: tl.constexpr = 22 if width(BITS) == 4 else 20
    LEAST: tl.constexpr = 0.5 if width(BITS) == 4 else 0.001953125
    SMALL: tl.constexpr = 2 if width(BITS) == 4 else 8  # magnitudes below it are multiples of the least one
    BIAS: tl.constexpr = 126 if width(BITS) == 4 else 120
    magnitude = code & MAGNITUDE
    normal = ((magnitude << UP) + (BIAS << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < SMALL, magnitude.to(tl.float32) * LEAST, normal)
    if width(BITS) == 8:
        value = tl.where(magnitude == MAGNITUDE, float("nan"), value)
    return tl.where(code > MAGNITUDE, -value, value)


@triton.jit
def scale_of(raw, BITS: tl.constexpr):
    """Scales as float32: floats as they are loaded, bytes by what they stand for in a kind of codes."""
    if is_float(BITS):
        byte = raw.to(tl.int32)
        if BITS == 36:
            scale = float_values(byte, 40)
        else:
            scale = tl.maximum(byte << 23, 0x00400000).to(tl.float32, bitcast=True)
    else:
        scale = raw.to(tl.float32)
    return scale


@triton.jit
def global_factor(ptr, at, mask):
    """What global scales multiply: scale / 2688, 0 where masked; mask None: all."""
    if mask is None:
        factor = tl.load(ptr + at)
    else:
        factor = tl.load(ptr + at, mask=mask, other=0.0)
    return tl.div_rn(factor, _UNIT)  # as NumPy divides: `/` may be off in the last bit


@triton.jit
def float_tile(words, zero, BITS: tl.constexpr, S: tl.constexpr, R: tl.constexpr):
    """words [4, 8, S, R / 8, L] → what their codes stand for, bfloat16 [S, R, 8 L J] in the order of `_codes._tile`.

    The bits of a code, two of them at a time, become those of a bfloat16 with another exponent, subnormal ones too, and
    a product corrects that; NaN of E4M3 comes out as 480. zero: 0 in the shape of words,
    after which they are read.
    """
    FOUR: tl.constexpr = width(BITS) == 4
    J: tl.constexpr = 16 // width(BITS)
    L: tl.constexpr = words.shape[4]
    word = words.permute(2, 3, 1, 0, 4).reshape(S, R, 4, L, 1)
    zero = zero.permute(2, 3, 1, 0, 4).reshape(S, R, 4, L, 1)
    j = tl.arange(0, J)
    if FOUR:
        code = (word >> (8 * (j // 2))) & (zero | (0x000F000F << 4 * (j % 2)))
        pair = code * (0x1040 >> 4 * (j % 2)) & -2118090304  # 0x81C081C0: sign and magnitude, each from its own copy
    else:
        moved = word >> (8 * j)
        pair = ((moved << 4) & (zero | 0x07F007F0)) | ((moved << 8) & -2147450880)
    if WIDENED:  # the interpreter loses subnormal bfloat16 numbers where it widens them
        both = tl.join((pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True))
    else:
        low = (pair & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        both = tl.join(low, (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))
    both *= 8.507059173023462e37 if FOUR else 1.329227995784916e36  # 2^126, 2^120
    return both.reshape(S, R, 4, L, J // 2, 2, 2).permute(0, 1, 3, 4, 2, 5, 6).reshape(S, R, 8 * L * J)
