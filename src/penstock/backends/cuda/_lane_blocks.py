"""Device functions for the planes of Q4_K, Q5_K and Q6_K (`quant.gguf_planes`) in the lanes of `_lanes`.

Q4_K has groups of 32, as affine codes may, with scales of their own. Q5_K has a word of `high` for each: lane q loads
that of the q-th of four groups, and two exchanges leave it with 4 bits of each half for its word of every group.

Q6_K has groups of 16: one product of 16 rows, 8 tokens and 16 codes each. A lane loads 16 bytes of `low`, two groups of
a row, and the 8 of `high` for them; four lanes have the 8 groups of 128 codes, and each needs a quarter of every one.
Lanes 2 apart exchange words, so that one of them has the first words of groups and the other the second ones; then
neighbours exchange bytes, which leave one with the codes 0, 1, 4 and 5 of words and the other with 2, 3, 6 and 7. Word
2 h + g of a lane is then of the groups 4 h + g (its lower bytes in each half) and 4 h + g + 2, and word g of `high` has
their upper bits, group after group in each half. x is brought to the same places by one exchange of neighbours.

32 or 64 + code is exact in bfloat16. Sums of products of Q6_K begin at −96 times the sum of x: they are those of
code − 32.
"""

import triton
import triton.language as tl

from penstock.backends.cuda._launch import WIDENED

FIVE, SIX = 0x42004200, 0x42804280  # 32 and 64 in both halves of a word

_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


@triton.constexpr_function
def _same(kind, count):
    return (kind,) * count


# -- scales ----------------------------------------------------------------------------------------------------------


@triton.jit
def half_of(word, i: tl.constexpr):
    """The float16 in half i of a word, as float32."""
    return ((word >> (16 * i)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.constexpr_function
def _byte_asm(i):
    """32768 + byte i of a word: the byte in the mantissa of 2^15."""
    return f"prmt.b32 $0, $1, 0x47000000, {0x7404 | i << 4:#x};"


@triton.jit
def scaled_byte(word, i: tl.constexpr, by, CENTER: tl.constexpr):
    """(byte i of a word − CENTER) · by, exact for a float16 number: as 32768 + byte it is one product and sum."""
    if WIDENED:
        y = (((word >> (8 * i)) & 0xFF) - CENTER).to(tl.float32) * by
    else:
        number = tl.inline_asm_elementwise(_byte_asm(i), "=f,r", [word], dtype=tl.float32, is_pure=True, pack=1)
        y = tl.fma(number, by, by * -(32768.0 + CENTER))
    return y


@triton.jit
def four_scales(sub, more, top, p: tl.constexpr):
    """Scale and bias of the p-th of four groups of Q4_K or Q5_K from their entries of the planes."""
    upper = (more | (more << 8)) & 0x00FF00FF
    upper = (upper | (upper << 4)) & 0x0F0F0F0F
    minima = ((sub >> 6) & 0x03030303) | (upper << 2)
    return scaled_byte(sub & 0x3F3F3F3F, p, half_of(top, 0), 0), scaled_byte(minima, p, -half_of(top, 1), 0)


# -- lanes exchange what they loaded ---------------------------------------------------------------------------------


@triton.constexpr_function
def _exchange_constraints(words):
    """Of as many words as are given, and a lane's place."""
    return ",".join(["=&r"] * words + ["r"] * (words + 1))


@triton.constexpr_function
def _codes_asm():
    """Four words of `low` ($0 … $3), two of `high` ($4, $5) from those that a lane loaded ($6 … $11) and its place in
    the row ($12).
    """
    low, high = [f"${6 + i}" for i in range(4)], ("$10", "$11")
    lines = [".reg .pred odd, far;", ".reg .b32 t, b, n, turn, keep, w<4>, h<2>;"]
    lines += ["and.b32 t, $12, 1;", "setp.ne.b32 odd, t, 0;", "setp.gt.u32 far, $12, 1;"]
    # bytes 0 and 2 of this lane's word and of the other's, or bytes 1 and 3 of the other's and of this one's
    lines += ["selp.b32 b, 0x3715, 0x6240, far;", "selp.b32 n, 0x3715, 0x6240, odd;"]
    lines += ["selp.b32 turn, 28, 4, odd;", "selp.b32 keep, 0xF0F0F0F0, 0x0F0F0F0F, odd;"]
    for i, first, second in ((0, low[0], low[1]), (1, low[2], low[3])):
        lines += [f"selp.b32 t, {first}, {second}, far;", "shfl.sync.bfly.b32 t, t, 2, 0x1f, 0xffffffff;"]
        lines += [f"selp.b32 w{i}, t, {first}, far;", f"selp.b32 w{i + 2}, {second}, t, far;"]
    for i in range(4):
        lines += [f"shfl.sync.bfly.b32 t, w{i}, 1, 0x1f, 0xffffffff;", f"prmt.b32 ${i}, w{i}, t, n;"]
    for i in range(2):
        lines += [f"shfl.sync.bfly.b32 t, {high[i]}, 2, 0x1f, 0xffffffff;", f"prmt.b32 h{i}, {high[i]}, t, b;"]
        lines += [f"shfl.sync.bfly.b32 t, h{i}, 1, 0x1f, 0xffffffff;", "shf.l.wrap.b32 t, t, t, turn;"]
        lines += [f"lop3.b32 ${4 + i}, h{i}, t, keep, 0xE4;"]
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def _upper_asm():
    """Four bits of each half for each of four groups ($0) from the word of one of them ($1) and a lane's place ($2)."""
    lines = [".reg .pred odd, far;", ".reg .b32 t, h, n, turn, keep;"]
    lines += ["and.b32 t, $2, 1;", "setp.ne.b32 odd, t, 0;", "setp.gt.u32 far, $2, 1;"]
    lines += ["selp.b32 n, 0x3715, 0x6240, odd;", "selp.b32 turn, 28, 4, far;"]
    lines += ["selp.b32 keep, 0xF0F0F0F0, 0x0F0F0F0F, far;"]
    lines += ["shfl.sync.bfly.b32 t, $1, 1, 0x1f, 0xffffffff;", "prmt.b32 h, $1, t, n;"]
    lines += ["shfl.sync.bfly.b32 t, h, 2, 0x1f, 0xffffffff;", "shf.l.wrap.b32 t, t, t, turn;"]
    return "\n".join(["{", *lines, "lop3.b32 $0, h, t, keep, 0xE4;", "}"])


@triton.jit
def five_upper(words, q):
    """What a lane loaded of `high` of a row of Q5_K for 128 codes, as the upper bits of its word of each group."""
    if not WIDENED:
        made = tl.inline_asm_elementwise(
            _upper_asm(), _exchange_constraints(1), [words[0], q], dtype=tl.int32, is_pure=False, pack=1
        )
        words = (made,)
    return words


@triton.jit
def six_codes(words, q):
    """What a lane loaded of `low` and `high` of a row for 128 codes, as its quarter of each group."""
    if not WIDENED:
        place = (q,)
        kinds: tl.constexpr = _same(tl.int32, 6)
        words = tl.inline_asm_elementwise(
            _codes_asm(), _exchange_constraints(6), words + place, dtype=kinds, is_pure=False, pack=1
        )
    return words


@triton.constexpr_function
def _x_asm():
    """Two pairs of x of each of two groups from the four pairs that a lane has of one ($4 … $7), and its place ($8)."""
    lines = [".reg .pred odd;", ".reg .b32 t;", "and.b32 t, $8, 1;", "setp.ne.b32 odd, t, 0;"]
    for i in range(2):
        first, second = f"${4 + i}", f"${6 + i}"
        lines += [f"selp.b32 t, {first}, {second}, odd;", "shfl.sync.bfly.b32 t, t, 1, 0x1f, 0xffffffff;"]
        lines += [f"selp.b32 ${i}, t, {first}, odd;", f"selp.b32 ${2 + i}, {second}, t, odd;"]
    return "\n".join(["{", *lines, "}"])


@triton.jit
def six_x(pairs, q):
    """The pairs of x of a lane in 32 codes, as its quarter of each of their two groups."""
    if not WIDENED:
        place = (q,)
        kinds: tl.constexpr = _same(tl.int32, 4)
        pairs = tl.inline_asm_elementwise(
            _x_asm(), _exchange_constraints(4), pairs + place, dtype=kinds, is_pure=False, pack=1
        )
    return pairs


# -- products --------------------------------------------------------------------------------------------------------


@triton.constexpr_function
def _sums_asm():
    """−96 times the sums of two pairs of x of each lane ($2, $3) over a row's lanes."""
    zeros = ", ".join(["0f00000000"] * 4)
    product = f"{_MMA} {{$0, $1, c2, c3}}, {{a, a, a, a}}, {{$2, $3}}, {{{zeros}}};"
    return "\n".join(["{", ".reg .b32 a;", ".reg .f32 c2, c3;", "mov.b32 a, 0xC2C0C2C0;", product, "}"])


@triton.jit
def six_sums(xs):
    """−96 Σ of x over a group for the tokens 2 q and 2 q + 1 of a lane."""
    kinds: tl.constexpr = _same(tl.float32, 2)
    return tl.inline_asm_elementwise(_sums_asm(), "=&f,=&f,r,r", xs, dtype=kinds, is_pure=True, pack=1)


@triton.constexpr_function
def _moved(to, word, place, up):
    return f"shl.b32 {to}, {word}, {up - place};" if place < up else f"shr.u32 {to}, {word}, {place - up};"


@triton.constexpr_function
def _product_asm(p, tiles):
    """4 sums for each tile of tokens: of `low` and `high` of a row, those of the row 8 further, pairs of x and sums of
    each tile, and magic; p: which 32 of the 128 codes.
    """
    row, x = 4 * tiles, 4 * tiles + 4
    sums, magic = x + 2 * tiles, f"${x + 4 * tiles}"
    lines = [".reg .b32 t, a0, a1, a2, a3;"]
    for to, low, i in (("a0", row, 0), ("a1", row + 2, 0), ("a2", row, 1), ("a3", row + 2, 1)):
        lines += [_moved("t", f"${low}", 8 * (p % 2) + 4 * i, 1), f"lop3.b32 {to}, t, 0x1E001E, {magic}, 0xEA;"]
        lines += [_moved("t", f"${low + 1}", 4 * p + 2 * i, 5), f"lop3.b32 {to}, t, 0x600060, {to}, 0xEA;"]
    for tile in range(tiles):
        d = ", ".join(f"${4 * tile + i}" for i in range(4))
        c = ", ".join(f"${sums + 2 * tile + i % 2}" for i in range(4))
        b = f"${x + 2 * tile}, ${x + 2 * tile + 1}"
        lines.append(f"{_MMA} {{{d}}}, {{a0, a1, a2, a3}}, {{{b}}}, {{{c}}};")
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def _product_constraints(tiles):
    return ",".join(["=&f"] * (4 * tiles) + ["r"] * (4 + 2 * tiles) + ["f"] * (2 * tiles) + ["r"])


@triton.jit
def six_products(words, xs, sums, magic, p: tl.constexpr, TILES: tl.constexpr):
    """Σ (code − 32) · x over a group, 4 sums for each tile of tokens as those of `_lanes`. words: of `low` and `high`
    for two rows; xs, sums: of the group for each tile.
    """
    kinds: tl.constexpr = _same(tl.float32, 4 * TILES)
    return tl.inline_asm_elementwise(
        _product_asm(p, TILES), _product_constraints(TILES), words + xs + sums + (magic,), dtype=kinds, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.constexpr_function
def _five_asm(p, tiles):
    """4 sums for each tile of tokens: of the word of a row and its upper bits, those of the row 8 further, pairs of x,
    and magic; p: which of four groups.
    """
    row, x = 4 * tiles, 4 * tiles + 4
    magic, place = f"${x + 4 * tiles}", 8 * (p % 2) + 4 * (p // 2)
    lines = [".reg .b32 t, a0, a1, a2, a3;"]
    for j in (0, 2):
        for to, low, i in (("a0", row, j), ("a1", row + 2, j), ("a2", row, j + 1), ("a3", row + 2, j + 1)):
            lines += [_moved("t", f"${low}", 4 * i, 2), f"lop3.b32 {to}, t, 0x3C003C, {magic}, 0xEA;"]
            lines += [_moved("t", f"${low + 1}", place + i, 6), f"lop3.b32 {to}, t, 0x400040, {to}, 0xEA;"]
        for tile in range(tiles):
            d = ", ".join(f"${4 * tile + i}" for i in range(4))
            b = f"${x + 4 * tile + j}, ${x + 4 * tile + j + 1}"
            c = d if j else ", ".join(["0f00000000"] * 4)
            lines.append(f"{_MMA} {{{d}}}, {{a0, a1, a2, a3}}, {{{b}}}, {{{c}}};")
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def _five_constraints(tiles):
    return ",".join(["=&f"] * (4 * tiles) + ["r"] * (5 + 4 * tiles))


@triton.jit
def five_products(words, xs, magic, p: tl.constexpr, TILES: tl.constexpr):
    """Σ (32 + code) · x over the p-th of four groups. words: of a row and its upper bits, for two rows."""
    kinds: tl.constexpr = _same(tl.float32, 4 * TILES)
    given = (magic,)
    return tl.inline_asm_elementwise(
        _five_asm(p, TILES), _five_constraints(TILES), words + xs + given, dtype=kinds, is_pure=True, pack=1
    )


@triton.jit
def five_numbers(low, high, place):
    """32 + code of a word [threads, 1] of `low` whose upper bits are at a place [threads] of the halves of a word of
    `high` [threads]: float32 [threads, 8].
    """
    i = tl.arange(0, 8)[None, :]
    upper = (high[:, None] >> (i // 4 * 16 + i % 4 + place[:, None])) & 1
    return (((low >> (4 * i)) & 15) + 16 * upper + 32).to(tl.float32)


@triton.jit
def six_numbers(low, high):
    """code − 32 of a word [threads, 1] of `low` and of the word of `high` with its upper bits from bit 0 of each half
    on: float32 [threads, 8].
    """
    i = tl.arange(0, 8)[None, :]
    upper = (high >> (i // 4 * 16 + i % 4 * 2)) & 3
    return (((low >> (4 * i)) & 15) + 16 * upper - 32).to(tl.float32)
