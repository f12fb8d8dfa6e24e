"""Device functions for codes that are small floats (mxfp4, mxfp8, nvfp4) in the lanes of `_lanes`, 32 codes at a time.

The sign and the magnitude of a code, each moved to its place in half a word, are a bfloat16 number with another
exponent, subnormal ones too; a product with 2^126 (E2M1) or 2^120 (E4M3) corrects that, exactly. NaN of E4M3 comes out
as 480.

nvfp4 has two scales for 32 codes. So the product that corrects the exponent multiplies with the scale as well: a number
and a scale have 6 bits together, which bfloat16 holds. Scales come with a factor 2^-8, for 448 · 2^126 is too large.
"""

import triton
import triton.language as tl

from penstock.backends.cuda._floats import float_values, scale_of
from penstock.backends.cuda._lane_blocks import _MMA, _same
from penstock.backends.cuda._launch import WIDENED

GROUP = 32  # codes of a row that are taken together
LANE_FLOATS = ("mxfp4", "mxfp8", "nvfp4")
_LESS = tl.constexpr(256.0)
_E2M1, _E4M3 = "0x7E807E80", "0x7B807B80"  # 2^126 and 2^120 as two bfloat16


@triton.constexpr_function
def float_bits(kind):
    """Bits of a code of a kind of floats; 0: it is none."""
    return 8 if kind == "mxfp8" else 4 if kind in ("mxfp4", "nvfp4") else 0


@triton.constexpr_function
def scale_bytes(kind):
    """Bytes of scales for 32 codes."""
    return 2 if kind == "nvfp4" else 1


@triton.constexpr_function
def _number(to, word, place, bits, factor):
    """A pair of codes of a word, the place-th of each half, as two bfloat16 numbers times a factor."""
    lines = []
    if bits == 4:
        if place >= 2:
            lines.append(f"shr.u32 t, {word}, 8;")
            word = "t"
        up = 4 * (place % 2)
        lines += [f"and.b32 t, {word}, {0x000F000F << up:#x};", f"mul.lo.u32 t, t, {0x1040 >> up:#x};"]
        lines.append("and.b32 t, t, 0x81C081C0;")
    else:
        sign, magnitude = (f"shl.b32 t, {word}, 8;", f"shl.b32 u, {word}, 4;")
        if place == 1:
            sign, magnitude = f"mov.b32 t, {word};", f"shr.u32 u, {word}, 4;"
        lines += [sign, "and.b32 t, t, 0x80008000;", magnitude, "lop3.b32 t, u, 0x07F007F0, t, 0xEA;"]
    return [*lines, f"fma.rn.bf16x2 {to}, t, {factor}, z;"]


@triton.constexpr_function
def _product_asm(bits, tiles, scaled):
    """4 sums for each tile of 8 tokens, of the words of a row, those of the row 8 further and pairs of x; `scaled`:
    behind them what the numbers of either row are multiplied by.
    """
    words, pairs = bits // 4, 4
    row, x = 4 * tiles, 4 * tiles + 2 * words
    first, second = (f"${x + tiles * pairs}", f"${x + tiles * pairs + 1}") if scaled else ("e", "e")
    lines = [".reg .b32 t, u, e, z, a0, a1, a2, a3;", "mov.b32 z, 0x80008000;"]
    if not scaled:
        lines.append(f"mov.b32 e, {_E2M1 if bits == 4 else _E4M3};")
    for j in range(0, pairs, 2):
        word, place = (j // 2, 0) if bits == 8 else (0, j)
        above, below = f"${row + word}", f"${row + words + word}"
        for to, source, at, factor in (
            ("a0", above, place, first), ("a1", below, place, second),
            ("a2", above, place + 1, first), ("a3", below, place + 1, second),
        ):  # fmt: skip
            lines += _number(to, source, at, bits, factor)
        for tile in range(tiles):
            d = ", ".join(f"${4 * tile + i}" for i in range(4))
            at = x + tile * pairs + j
            c = d if j else ", ".join(["0f00000000"] * 4)
            lines.append(f"{_MMA} {{{d}}}, {{a0, a1, a2, a3}}, {{${at}, ${at + 1}}}, {{{c}}};")
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def _product_constraints(bits, tiles, scaled):
    return ",".join(["=&f"] * (4 * tiles) + ["r"] * (bits // 2 + 4 * tiles + (2 if scaled else 0)))


@triton.jit
def float_products(words, xs, scales, BITS: tl.constexpr, TILES: tl.constexpr):
    """Σ of numbers times x over 32 codes, 4 sums for each tile of tokens as those of `_lanes`. words: of two rows;
    scales: none, or of two rows what `pair_scale` gives.
    """
    kinds: tl.constexpr = _same(tl.float32, 4 * TILES)
    SCALED: tl.constexpr = len(scales) > 0
    return tl.inline_asm_elementwise(
        _product_asm(BITS, TILES, SCALED), _product_constraints(BITS, TILES, SCALED), words + xs + scales, dtype=kinds,
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.constexpr_function
def _scale_asm(i):
    """2^118 times byte i + $2 of a word ($1), an E4M3 number, as two bfloat16; NaN if it is that."""
    lines = [".reg .pred p;", ".reg .b32 t, u, s, e, z;", "mov.b32 z, 0x80008000;"]
    lines += ["shl.b32 t, $2, 3;", "shr.u32 t, $1, t;"]
    lines += [f"prmt.b32 t, t, 0, {0x404 | i << 4 | i << 12:#x};", "shr.u32 u, t, 4;", "and.b32 s, t, 0x80008000;"]
    lines += ["lop3.b32 s, u, 0x07F007F0, s, 0xEA;", "mov.b32 e, 0x7F007F00;", "fma.rn.bf16x2 s, s, e, z;"]
    lines += ["mov.b32 e, 0x77007700;", "fma.rn.bf16x2 s, s, e, z;", "and.b32 t, t, 0x7F00;"]
    return "\n".join(["{", *lines, "setp.eq.u32 p, t, 0x7F00;", "selp.b32 $0, 0x7FC07FC0, s, p;", "}"])


@triton.jit
def pair_scale(word, half, p: tl.constexpr):
    """2^118 times the scale of nvfp4 of a half of the p-th 32 codes, of which a word has two; see `float_products`."""
    return tl.inline_asm_elementwise(
        _scale_asm(p % 2 * 2), "=r,r,r", [word, half], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def row_scale(scales, p: tl.constexpr):
    """The scale of mxfp4 or mxfp8 of the p-th 32 codes, float32."""
    return scale_of((scales[p // 4] >> (8 * (p % 4))) & 0xFF, 20)


@triton.jit
def less(made):
    """Sums over scales of `pair_scale` as those of scales."""
    if not WIDENED:
        made *= _LESS
    return made


@triton.jit
def float_numbers(words, scales, half, p: tl.constexpr, BITS: tl.constexpr, SCALED: tl.constexpr):
    """What the codes in words [threads, BITS / 4] stand for, float32 [threads, 8]; SCALED: times the scale of nvfp4 of
    a half of the p-th 32.
    """
    codes = (words[:, :, None] >> (tl.arange(0, 32 // BITS) * BITS)[None, None, :]) & ((1 << BITS) - 1)
    numbers = float_values(tl.reshape(codes, [words.shape[0], 8]), BITS)
    if SCALED:
        scale = scale_of((scales[p // 2] >> (8 * (p % 2 * 2 + half))) & 0xFF, 36)
        numbers *= scale[:, None]
    return numbers
