"""Device functions that read quantized weights: codes of 1 to 8 bits or small floats, and their numbers.

A row of packed words is one little-endian bit stream: code j is the bits j · BITS … j · BITS + BITS − 1 of the row.
"""

import triton
import triton.language as tl

from penstock.backends.cuda._floats import float_values, scale_of, width
from penstock.backends.cuda._rows import rounded


@triton.jit
def code_at(row_ptr, k, mask, BITS: tl.constexpr):
    """Codes k of packed rows as int32, 0 where masked. row_ptr: first word (int32) of each row; it, k and mask
    broadcast. One load per code for 1, 2, 4 and 8 bits, two for the others (the second where one crosses words).
    """
    WIDTH: tl.constexpr = width(BITS)
    LAST: tl.constexpr = (1 << WIDTH) - 1
    if 32 % WIDTH == 0:
        PER: tl.constexpr = 32 // WIDTH
        word = tl.load(row_ptr + k // PER, mask=mask, other=0)
        code = (word >> ((k % PER) * WIDTH)) & LAST
    else:
        first = (k * BITS) // 32
        shift = (k * BITS) % 32
        low = tl.load(row_ptr + first, mask=mask, other=0).to(tl.uint32, bitcast=True)
        high = tl.load(row_ptr + first + 1, mask=mask & (shift + BITS > 32), other=0).to(tl.uint32, bitcast=True)
        # In two steps: a shift by 32 (shift = 0) would be undefined.
        code = (((low >> shift) | ((high << 1) << (31 - shift))) & LAST).to(tl.int32)
    return code


@triton.jit
def unpack(words, BITS: tl.constexpr):
    """Words [M, W] (int32) as codes [M, W · 32 / bits] in order, without further loads; of 1, 2, 4 or 8 bits."""
    WIDTH: tl.constexpr = width(BITS)
    PER: tl.constexpr = 32 // WIDTH
    shift = (tl.arange(0, PER) * WIDTH)[None, None, :]
    codes = (words[:, :, None] >> shift) & ((1 << WIDTH) - 1)
    return codes.reshape(words.shape[0], words.shape[1] * PER)


@triton.jit
def float_weights(code, scale, factor, BITS: tl.constexpr, dtype: tl.constexpr):
    """float · scale in `dtype` for codes that are floats; scale: bytes, factor: of a global scale, or None."""
    number = scale_of(scale, BITS)
    if factor is not None:
        number *= factor
    return rounded(float_values(code, BITS) * number, dtype)


@triton.jit
def dequantized(code, scale, bias, dtype: tl.constexpr):
    """code · scale + bias in `dtype` by the rules of `ops.dequantize`: the same bits as the definition.

    Product and sum are formed in float32 (the product is exact there for half-precision scales, so a fused
    multiply-add gives the same bits); with the scales' own dtype each is rounded to it.
    """
    product = code.to(tl.float32) * scale.to(tl.float32)
    if dtype == scale.dtype:
        product = rounded(product, dtype).to(tl.float32)
    return rounded(product + bias.to(tl.float32), dtype)
