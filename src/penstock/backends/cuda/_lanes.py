"""Device functions for products of up to 32 rows with coded weights, written for single lanes of a warp.

Tensors have one number per thread: lane 4 r + q of a warp holds the codes of rows r and r + 8 of every 16 rows that the
q-th quarter of a group has, and the x of token r for the same quarter. So words go from memory into registers, become
bfloat16 numbers there and are the left operand of a matrix product of 16 rows, 8 tokens and 16 codes; no weight and no
x passes through shared memory. Which code is at which place of k is free: the pairs that a mask leaves in a word are
taken as they are, and x is brought into their order.

A code in the upper bits of the mantissa of 2^BITS makes 2^BITS + code (of 8 bits 16 + the lower half and 256 + 16 times
the upper one). What that adds is taken away with the bias, by the sum of x over the group: products are exact in
bfloat16, sums are float32, and scales and biases are applied in float32 once for a group.

A lane has few bytes of a group, and a load of 32 lanes costs as much for 4 bytes of each as for 16. So it loads its
part of two groups at once where these are few words: lanes 0 and 1 of a row the first group, lanes 2 and 3 the second.
Then lanes 2 apart exchange halves (`_exchanged`), and lane q has the quarter `quarter(q)` of both.

In the interpreter, which knows no PTX, the same lanes do the same sums in float32: there a lane's words and x of a
group are one row of a tensor, not a tuple of registers.
"""

from collections import namedtuple

import triton
import triton.language as tl

from penstock.backends.cuda._lane_blocks import (
    five_numbers,
    five_products,
    five_upper,
    four_scales,
    half_of,
    scaled_byte,
    six_codes,
    six_numbers,
    six_products,
    six_sums,
    six_x,
)
from penstock.backends.cuda._lane_floats import (
    float_bits,
    float_numbers,
    float_products,
    less,
    pair_scale,
    row_scale,
    scale_bytes,
)
from penstock.backends.cuda._launch import INTERPRETED, WIDENED

# What a product is compiled for: rows of K codes of BITS in groups of GS. A warp has MT times 16 rows and NT times 8
# tokens; S warps share K and V the rows of a program. P groups have their scales in one load, U of these are loaded at
# a time. ACT: the second half of the MT tiles is of up rows. EVEN: rows end with a program's. AHEAD: x is loaded one
# step ahead, too. SHARED_EVERY, GROUPED: see `_few_rows`. BLOCKS: weights are planes of Q4_K, Q5_K or Q6_K (else
# None), BITS those of `low`, GS is 32 and P is 4: for Q6_K two groups stand for one. Or codes are floats, mxfp4, mxfp8
# or nvfp4: GS is 32, for nvfp4 two groups stand for one.
Constants = namedtuple("Constants", "K BITS GS MT NT S V P U ACT EVEN AHEAD GROUPED SHARED_EVERY BLOCKS")

MAGIC = {2: 0x40804080, 4: 0x41804180, 8: 0x41804180}  # 2^BITS (of 8 bits 16) in both halves of a word


@triton.constexpr_function
def lane_words(bits, gs):
    """Words of a lane in one group of a row."""
    return gs * bits // 128


@triton.constexpr_function
def lane_pairs(bits, gs):
    """Pairs of x of a lane in one group."""
    return gs // 8


@triton.constexpr_function
def word_parts(bits, gs):
    """Tensors that hold the words of a lane in one group of a row."""
    return 1 if INTERPRETED else lane_words(bits, gs)


@triton.constexpr_function
def x_parts(bits, gs):
    """Tensors that hold the x of a lane in one group."""
    return 1 if INTERPRETED else lane_pairs(bits, gs)


@triton.constexpr_function
def paired(C):
    """Whether a lane loads its words of two groups at once: of experts, where most of the time is their weights', and
    of blocks, whose groups are half a sector of 32 bytes.
    """
    return (C.GROUPED or C.BLOCKS) and C.P % 2 == 0 and lane_words(C.BITS, C.GS) <= 2


@triton.constexpr_function
def six(C):
    """Whether weights are planes of Q6_K."""
    return C.BLOCKS == "Q6_K"


@triton.constexpr_function
def four(C):
    """Whether weights are planes of Q4_K or Q5_K."""
    return C.BLOCKS in ("Q4_K", "Q5_K")


@triton.constexpr_function
def five(C):
    """Whether weights are planes of Q5_K."""
    return C.BLOCKS == "Q5_K"


@triton.constexpr_function
def floats(C):
    """Whether codes are floats."""
    return float_bits(C.BLOCKS) > 0


@triton.constexpr_function
def _step_bytes(blocks, groups):
    each = scale_bytes(blocks) if float_bits(blocks) else 1 if blocks in ("Q4_K", "Q5_K") else 2
    return groups * each


@triton.constexpr_function
def scale_step(C):
    """Bytes of the scales of a row in a block."""
    return _step_bytes(C.BLOCKS, C.P)


@triton.constexpr_function
def upper_words(blocks, groups):
    """Tensors that hold what a lane loads of `high` of a row of Q5_K: one for each group in the interpreter."""
    return 0 if blocks != "Q5_K" else groups if INTERPRETED else 1


@triton.constexpr_function
def row_words(C):
    """Tensors that hold what a lane loads of `low` and `high` of a row of Q6_K."""
    return 8 if INTERPRETED else 6


@triton.constexpr_function
def warps(C):
    """Threads of a program."""
    return 32 * C.S * C.V


@triton.constexpr_function
def row_tiles(C):
    """Tiles of 16 rows of the result that a warp has."""
    return C.MT if C.ACT is None else C.MT // 2


@triton.constexpr_function
def steps(C):
    """Blocks of P groups in a row."""
    return C.K // C.GS // C.P


@triton.constexpr_function
def _types(kind, count):
    return (kind,) * count


# -- PTX -------------------------------------------------------------------------------------------------------------


_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
_ZEROS = "0f00000000, 0f00000000, 0f00000000, 0f00000000"


@triton.constexpr_function
def _numbers(to, word, shift, up, mask, magic):
    """A pair of codes, `shift` bits up in each half of a word, as two bfloat16."""
    move = f"shl.b32 t, {word}, {up - shift};" if shift < up else f"shr.u32 t, {word}, {shift - up};"
    return [move, f"lop3.b32 {to}, t, {mask:#x}, {magic}, 0xEA;"]


@triton.constexpr_function
def _product_asm(bits, gs, tiles):
    """4 sums for each tile of 8 tokens, of the words of a row, those of the row 8 further, pairs of x, and magic."""
    words, codes, pairs = lane_words(bits, gs), 32 // bits, lane_pairs(bits, gs)
    half = min(bits, 4)
    up = 7 - half
    mask = ((1 << half) - 1 << up) * 0x10001
    first = 4 * tiles
    a, b, x = first, first + words, first + 2 * words
    magic = f"${x + tiles * pairs}"
    lines = [".reg .b32 t, a0, a1, a2, a3, m;"]
    if bits == 8:
        lines.append(f"add.u32 m, {magic}, 0x02000200;")
    begun = False
    for word in range(words):
        for j in range(0, 2 if bits == 8 else codes // 2, 2):
            for high, added in ((0, magic), (4, "m")) if bits == 8 else ((0, magic),):
                step = 8 if bits == 8 else bits
                for to, row, place in (("a0", a, j), ("a1", b, j), ("a2", a, j + 1), ("a3", b, j + 1)):
                    lines += _numbers(to, f"${row + word}", step * place + high, up, mask, added)
                for tile in range(tiles):
                    d = ", ".join(f"${4 * tile + i}" for i in range(4))
                    at = x + tile * pairs + word * (codes // 2) + j
                    c = d if begun else _ZEROS
                    lines.append(f"{_MMA} {{{d}}}, {{a0, a1, a2, a3}}, {{${at}, ${at + 1}}}, {{{c}}};")
                begun = True
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def _product_constraints(bits, gs, tiles):
    return ",".join(["=&f"] * (4 * tiles) + ["r"] * (2 * lane_words(bits, gs) + tiles * lane_pairs(bits, gs) + 1))


@triton.constexpr_function
def _sums_asm(pairs):
    """The sums of x over a group for the two tokens of a lane: products with ones."""
    lines = [".reg .b32 one;", ".reg .f32 c2, c3;", "mov.b32 one, 0x3F803F80;"]
    for i in range(0, pairs, 2):
        c = _ZEROS if i == 0 else "$0, $1, c2, c3"
        lines.append(f"{_MMA} {{$0, $1, c2, c3}}, {{one, one, one, one}}, {{${2 + i}, ${3 + i}}}, {{{c}}};")
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def _sums_constraints(pairs):
    return ",".join(["=&f"] * 2 + ["r"] * pairs)


@triton.constexpr_function
def _x_asm(bits, gs):
    """The x of a lane in a group, in the order of the pairs of its words; 0 if the last argument is 0."""
    pairs, step = lane_pairs(bits, gs), 16 // bits  # step: pairs of x for a word
    lines = [".reg .pred p;", f".reg .b32 u<{pairs}>;", f"setp.ne.b32 p, ${pairs + 1}, 0;"]
    lines += [f"mov.b32 u{i}, 0;" for i in range(pairs)]
    for i in range(0, pairs, 4):
        lines.append(f"@p ld.global.v4.b32 {{u{i}, u{i + 1}, u{i + 2}, u{i + 3}}}, [${pairs} + {4 * i}];")
    for first in range(0, pairs, step):
        for i in range(step // 2):
            both = f"u{first + i}, u{first + i + step // 2}"
            lines.append(f"prmt.b32 ${first + 2 * i}, {both}, 0x5410;")
            lines.append(f"prmt.b32 ${first + 2 * i + 1}, {both}, 0x7632;")
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def _x_constraints(pairs):
    return ",".join(["=&r"] * pairs + ["l", "r"])


@triton.constexpr_function
def _load_asm(size, hint):
    """`size` bytes from an address that is a multiple of it, 2 to 16, as words."""
    if size == 2:
        return "{.reg .b16 a, z; mov.b16 z, 0; ld.global.nc.b16 a, [$1]; mov.b32 $0, {a, z};}"
    count = size // 4
    to = "$0" if count == 1 else "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    return f"ld.global.nc{hint}.{'' if count == 1 else f'v{count}.'}b32 {to}, [${count}];"


@triton.constexpr_function
def _load_constraints(size):
    return ",".join(["=r"] * max(1, size // 4) + ["l"])


# -- lanes -----------------------------------------------------------------------------------------------------------


@triton.jit
def _load(at, SIZE: tl.constexpr, HINT: tl.constexpr):
    """SIZE bytes at each of these addresses, as a tuple of words. Not "pure": the compiler would put loads off until
    their use, and then few of them are under way at once.
    """
    words = ()
    if WIDENED:
        if SIZE == 2:
            words += (tl.load(at.to(tl.pointer_type(tl.int16))).to(tl.int32) & 0xFFFF,)
        else:
            for i in tl.static_range(SIZE // 4):
                words += (tl.load(at.to(tl.pointer_type(tl.int32)) + i),)
    elif SIZE <= 4:
        asm: tl.constexpr = _load_asm(SIZE, HINT)
        words += (tl.inline_asm_elementwise(asm, _load_constraints(SIZE), [at], dtype=tl.int32, is_pure=False, pack=1),)
    else:
        kinds: tl.constexpr = _types(tl.int32, SIZE // 4)
        words += tl.inline_asm_elementwise(
            _load_asm(SIZE, HINT), _load_constraints(SIZE), [at], dtype=kinds, is_pure=False, pack=1
        )
    return words


@triton.jit
def quarter(q, C: tl.constexpr):
    """Which quarter of a group lane q of a row has."""
    if paired(C):
        q = q % 2 * 2 + q // 2
    return q


@triton.jit
def codes_offset(q, C: tl.constexpr):
    """Bytes from the start of a block to what lane q of a row loads first."""
    WORDS: tl.constexpr = lane_words(C.BITS, C.GS)
    if six(C) and not WIDENED:
        offset = q * 16
    elif paired(C) and not WIDENED:
        offset = q * (8 * WORDS)
    else:
        offset = quarter(q, C) * (4 * WORDS)
    return offset


@triton.jit
def high_offset(q, C: tl.constexpr):
    """Bytes from the start of a block to what lane q of a row loads first of `high`."""
    if five(C):
        offset = q * 0 if WIDENED else q * 4
    else:
        offset = quarter(q, C) // 2 * 4 if WIDENED else q * 8
    return offset


@triton.jit
def _load_six(low, high, C: tl.constexpr):
    """What a lane loads of a row of Q6_K for 128 codes, before `six_codes`."""
    words = ()
    if WIDENED:
        for p in tl.static_range(C.P):
            words += (tl.load((low + p * 16).to(tl.pointer_type(tl.int32)))[:, None],)
        for p in tl.static_range(C.P):
            words += (tl.load((high + p * 8).to(tl.pointer_type(tl.int32)))[:, None],)
    else:
        words += _load(low, 16, ".L1::no_allocate.L2::128B") + _load(high, 8, ".L1::no_allocate.L2::128B")
    return words


@triton.jit
def _load_codes(at, C: tl.constexpr):
    """The words of a lane in the P groups of a block of a row; in pairs of groups, before `_exchanged`."""
    WORDS: tl.constexpr = lane_words(C.BITS, C.GS)
    words = ()
    if WIDENED:
        for p in tl.static_range(C.P):
            ptr = (at + p * 16 * WORDS).to(tl.pointer_type(tl.int32))
            words += (tl.load(ptr[:, None] + tl.arange(0, WORDS)[None, :]),)
    elif paired(C):
        for p in tl.static_range(C.P // 2):
            words += _load(at + p * 32 * WORDS, 8 * WORDS, ".L1::no_allocate.L2::128B")
    else:
        for p in tl.static_range(C.P):
            words += _load(at + p * 16 * WORDS, 4 * WORDS, ".L1::no_allocate.L2::128B")
    return words


@triton.constexpr_function
def _exchange_asm(words):
    """First the words of the first group, then those of the second, of a lane's words of half a group of one of them;
    the last argument says whether it has the second.
    """
    lines = [".reg .pred p;", ".reg .b32 s;", f"setp.ne.b32 p, ${4 * words}, 0;"]
    for i in range(words):
        first, second = f"${2 * words + i}", f"${3 * words + i}"
        lines.append(f"selp.b32 s, {first}, {second}, p;")
        lines.append("shfl.sync.bfly.b32 s, s, 2, 0x1f, 0xffffffff;")
        lines.append(f"selp.b32 ${i}, s, {first}, p;")
        lines.append(f"selp.b32 ${words + i}, {second}, s, p;")
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def _exchange_constraints(words):
    return ",".join(["=&r"] * (2 * words) + ["r"] * (2 * words + 1))


@triton.jit
def _exchanged(words, C: tl.constexpr):
    """What `_load_codes` loaded for all rows and blocks, as the words of a lane's quarter of each group."""
    WORDS: tl.constexpr = lane_words(C.BITS, C.GS)
    if paired(C) and not WIDENED:
        second = (tl.arange(0, warps(C)) % 4 // 2,)
        kinds: tl.constexpr = _types(tl.int32, 2 * WORDS)
        new = ()
        for i in tl.static_range(C.U * C.MT * C.P):
            new += tl.inline_asm_elementwise(
                _exchange_asm(WORDS), _exchange_constraints(WORDS),
                words[2 * WORDS * i : 2 * WORDS * (i + 1)] + second, dtype=kinds, is_pure=False, pack=1,
            )  # fmt: skip
        words = new
    return words


@triton.jit
def _number(words, i: tl.constexpr, KIND: tl.constexpr):
    """Half i of the words, a number of KIND, as float32."""
    word = words[i // 2]
    if tl.bfloat16 == KIND:
        bits = word << 16 if i % 2 == 0 else word & -65536
        y = bits.to(tl.float32, bitcast=True)
    else:
        y = ((word >> (16 * (i % 2))) & 0xFFFF).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    return y


@triton.jit
def _load_x(at, live, BITS: tl.constexpr, GS: tl.constexpr):
    """The pairs of x of a lane in a group that start at these addresses; 0 where live is 0."""
    PAIRS: tl.constexpr = lane_pairs(BITS, GS)
    if WIDENED:
        ptr = at.to(tl.pointer_type(tl.int16))[:, None] + tl.arange(0, 2 * PAIRS)[None, :]
        bits = tl.load(ptr, mask=(live != 0)[:, None], other=0).to(tl.int32) << 16
        pairs = (bits.to(tl.float32, bitcast=True),)
    else:
        kinds: tl.constexpr = _types(tl.int32, PAIRS)
        pairs = tl.inline_asm_elementwise(
            _x_asm(BITS, GS), _x_constraints(PAIRS), [at, live], dtype=kinds, is_pure=False, pack=1
        )
    return pairs


@triton.jit
def _by_token(a, x, THREADS: tl.constexpr):
    """Σ a[r, q] · x[n, q] over the quarters q and what they hold [THREADS, GS / 4], for all rows r and tokens n of each
    warp, as the two tokens 2 q and 2 q + 1 of lane (r, q).
    """
    QUARTER: tl.constexpr = x.shape[1]
    a = tl.reshape(a, [THREADS // 32, 8, 1, 4 * QUARTER])
    x = tl.reshape(x, [THREADS // 32, 1, 8, 4 * QUARTER])
    low, high = tl.split(tl.reshape(tl.sum(a * x, axis=3), [THREADS // 32, 8, 4, 2]))
    return tl.reshape(low, [THREADS]), tl.reshape(high, [THREADS])


@triton.jit
def _sums(xs, PAIRS: tl.constexpr, THREADS: tl.constexpr):
    """Σ of x over a group for the tokens 2 q and 2 q + 1."""
    if WIDENED:
        sums = _by_token(tl.full(xs[0].shape, 1.0, tl.float32), xs[0], THREADS)
    else:
        kinds: tl.constexpr = _types(tl.float32, 2)
        sums = tl.inline_asm_elementwise(
            _sums_asm(PAIRS), _sums_constraints(PAIRS), xs, dtype=kinds, is_pure=True, pack=1
        )
    return sums


@triton.jit
def _numbers_of(words, BITS: tl.constexpr, GS: tl.constexpr):
    """offset + code of a lane in a group: float32 [threads, GS / 4]."""
    OFFSET: tl.constexpr = 272 if BITS == 8 else 1 << BITS
    codes = (words[:, :, None] >> (tl.arange(0, 32 // BITS) * BITS)[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape((codes + OFFSET).to(tl.float32), [words.shape[0], GS // 4])


@triton.jit
def _products(words, xs, magic, C: tl.constexpr):
    """4 sums for each tile of tokens: (row r, token 2 q), (r, 2 q + 1), (r + 8, 2 q), (r + 8, 2 q + 1)."""
    if WIDENED:
        sums = ()
        for t in tl.static_range(C.NT):
            sums += _by_token(_numbers_of(words[0], C.BITS, C.GS), xs[t], warps(C))
            sums += _by_token(_numbers_of(words[1], C.BITS, C.GS), xs[t], warps(C))
    else:
        kinds: tl.constexpr = _types(tl.float32, 4 * C.NT)
        sums = tl.inline_asm_elementwise(
            _product_asm(C.BITS, C.GS, C.NT), _product_constraints(C.BITS, C.GS, C.NT), words + xs + (magic,),
            dtype=kinds, is_pure=True, pack=1,
        )  # fmt: skip
    return sums


@triton.jit
def _with_upper(biases, C: tl.constexpr):
    """Biases of all rows of Q5_K with the upper bits as a lane's own of each group."""
    q = tl.arange(0, warps(C)) % 4
    EACH: tl.constexpr = _bias_words(C) // 2
    new = ()
    for i in tl.static_range(2 * C.U * C.MT):
        new += biases[i * EACH : i * EACH + 2] + five_upper(biases[i * EACH + 2 : (i + 1) * EACH], q)
    return new


@triton.jit
def _five_tile(words, upper, below, xs, magic, p: tl.constexpr, C: tl.constexpr):
    """`_products` of Q5_K for the p-th of four groups; upper, below: upper bits of row r and of row r + 8."""
    if WIDENED:
        made, place = (), 4 * quarter(tl.arange(0, warps(C)) % 4, C)
        for t in tl.static_range(C.NT):
            made += _by_token(five_numbers(words[0], upper[p], place), xs[t], warps(C))
            made += _by_token(five_numbers(words[1], below[p], place), xs[t], warps(C))
    else:
        made = five_products(words[:1] + upper + words[1:] + below, xs, magic, p, C.NT)
    return made


@triton.jit
def _add_tile(total, words, scales, biases, xs, sums, magic, p: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr):
    """total + the products of 16 rows and a group, the p-th of those whose scales these are."""
    OFFSET: tl.constexpr = 272.0 if C.BITS == 8 else 32.0 if five(C) else float(1 << C.BITS)
    HALF: tl.constexpr = max(1, C.P // 2)
    EACH: tl.constexpr = _bias_words(C) // 2
    if five(C):
        product = _five_tile(words, biases[2:EACH], biases[2 + EACH :], xs, magic, p, C)
    else:
        product = _products(words, xs, magic, C)
    if four(C):
        s0, b0 = four_scales(scales[0], biases[0], biases[1], p)
        s1, b1 = four_scales(scales[1], biases[EACH], biases[1 + EACH], p)
    else:
        s0, s1 = _number(scales[:HALF], p, KIND), _number(scales[HALF:], p, KIND)
        b0, b1 = _number(biases[:HALF], p, KIND), _number(biases[HALF:], p, KIND)
    b0, b1 = b0 - OFFSET * s0, b1 - OFFSET * s1
    new = ()
    for t in tl.static_range(C.NT):
        new += (
            total[4 * t] + b0 * sums[2 * t] + product[4 * t] * s0,
            total[4 * t + 1] + b0 * sums[2 * t + 1] + product[4 * t + 1] * s0,
            total[4 * t + 2] + b1 * sums[2 * t] + product[4 * t + 2] * s1,
            total[4 * t + 3] + b1 * sums[2 * t + 1] + product[4 * t + 3] * s1,
        )
    return new


@triton.jit
def _add_floats(total, words, scales, xs, p: tl.constexpr, C: tl.constexpr):
    """`_add_tile` of the p-th 32 codes that are floats."""
    HALF: tl.constexpr = _scale_words(C) // 2
    PAIRED: tl.constexpr = scale_bytes(C.BLOCKS) == 2
    half = quarter(tl.arange(0, warps(C)) % 4, C) // 2
    if WIDENED:
        made = ()
        for t in tl.static_range(C.NT):
            for row in tl.static_range(2):
                mine = scales[row * HALF : (row + 1) * HALF]
                made += _by_token(float_numbers(words[row], mine, half, p, C.BITS, PAIRED), xs[t], warps(C))
    else:
        by = ()
        if PAIRED:
            by += (pair_scale(scales[p // 2], half, p), pair_scale(scales[HALF + p // 2], half, p))
        made = float_products(words, xs, by, C.BITS, C.NT)
    new = ()
    for t in tl.static_range(C.NT):
        for i in tl.static_range(4):
            if PAIRED:
                new += (total[4 * t + i] + less(made[4 * t + i]),)
            else:
                s = row_scale(scales[i // 2 * HALF : i // 2 * HALF + HALF], p)
                new += (total[4 * t + i] + made[4 * t + i] * s,)
    return new


# -- blocks of K -----------------------------------------------------------------------------------------------------


@triton.jit
def load_block(starts, back, block, C: tl.constexpr):
    """Words, scales and biases of U blocks, every S-th from `block` on, for the rows of a lane.

    starts: addresses of the codes, scales and biases of a lane's first row, for each weight (gate, up), of blocks those
    of low, sub, more (of Q6_K high) and top: then entries of sub are scales, those of more and top biases, and words of
    high follow those of low. back: how many rows before its place a row is to be read, where rows end before the
    program's.
    """
    WORDS: tl.constexpr = lane_words(C.BITS, C.GS)
    ROW: tl.constexpr = C.K * C.BITS // 8
    GROUPS: tl.constexpr = C.K // C.GS * 2
    STEP: tl.constexpr = scale_step(C)
    words, scales, biases = (), (), ()
    for u in tl.static_range(C.U):
        at = block + u * C.S
        if steps(C) % (C.S * C.U) != 0:
            at = tl.minimum(at, steps(C) - 1)
        at = at.to(tl.int64)
        for weight in tl.static_range(C.MT // row_tiles(C)):
            w = starts[weight][0] + at * (C.P * 16 * WORDS)
            s = starts[weight][1] + at * STEP
            b = starts[weight][2] + at * (32 if six(C) else C.P // 2 if four(C) else 2 * C.P)
            for m in tl.static_range(2 * row_tiles(C)):
                row = m * 8
                if not C.EVEN:
                    row = row - back[m]
                if six(C):
                    words += _load_six(w + row * ROW, b + row * (C.K // 4), C)
                    scales += _load(s + row * (C.K // 16), 8, "")
                    biases += _load(starts[weight][3] + at // 2 * 2 + row * (C.K // 128), 2, "")
                elif four(C):
                    words += _load_codes(w + row * ROW, C)
                    top = starts[weight][3] + at // 2 * 4
                    scales += _load(s + row * (C.K // 32), 4, "")
                    biases += _load(b + row * (C.K // 64), 2, "") + _load(top + row * (C.K // 64), 4, "")
                    for i in tl.static_range(upper_words(C.BLOCKS, C.P)):
                        biases += _load(starts[weight][4] + at * 16 + row * (C.K // 8) + 4 * i, 4, "")
                elif floats(C):
                    words += _load_codes(w + row * ROW, C)
                    scales += _load(s + row * (steps(C) * STEP), STEP, "")
                else:
                    words += _load_codes(w + row * ROW, C)
                    scales += _load(s + row * GROUPS, 2 * C.P, "")
                    biases += _load(b + row * GROUPS, 2 * C.P, "")
    return words, scales, biases


@triton.jit
def load_x(x_at, live, block, C: tl.constexpr):
    """x of U blocks for each tile of tokens; addresses and whether there is a token come as tuples."""
    xs = ()
    for u in tl.static_range(C.U):
        at = block + u * C.S
        inside = (at < steps(C)).to(tl.int32)
        for p in tl.static_range(C.P):
            for t in tl.static_range(C.NT):
                here = x_at[t] + (at * C.P + p).to(tl.int64) * (2 * C.GS)
                xs += _load_x(here, inside & live[t], C.BITS, C.GS)
    return xs


@triton.constexpr_function
def _first_word(u, m, p, C):
    """Where the words of row tile m in group p of block u begin."""
    return ((u * C.MT + m) * 2 * C.P + p) * word_parts(C.BITS, C.GS)


@triton.constexpr_function
def _scale_words(C):
    """Words that hold the scales of a row tile's two rows in a block."""
    return 2 if C.BLOCKS and not float_bits(C.BLOCKS) else 2 * max(1, _step_bytes(C.BLOCKS, C.P) // 4)


@triton.constexpr_function
def _bias_words(C):
    """Words that hold their biases, of Q5_K upper bits of codes, too."""
    return 0 if float_bits(C.BLOCKS) else 2 * (2 + upper_words(C.BLOCKS, C.P)) if C.BLOCKS else 2 * max(1, C.P // 2)


@triton.jit
def _six_tile(words, xs, sums, magic, p: tl.constexpr, g: tl.constexpr, q, C: tl.constexpr):
    """Σ (code − 32) · x of a row tile over group g of the p-th 32 codes, as `_products`. words: what `six_codes` gives
    for row r, then for row r + 8.
    """
    WORDS: tl.constexpr = row_words(C)
    if WIDENED:
        made = ()
        for t in tl.static_range(C.NT):
            for row in tl.static_range(2):
                low, high = words[row * WORDS + p], words[row * WORDS + C.P + p]
                numbers = six_numbers(low, high >> (q // 2 * 8)[:, None])  # lane q has a word of group q % 2
                made += _by_token(tl.where((q % 2 == g)[:, None], numbers, 0.0), xs[t], warps(C))
    else:
        at: tl.constexpr = p // 2 * 2 + g
        both = words[at : at + 1] + words[4 + g : 5 + g]
        both += words[WORDS + at : WORDS + at + 1] + words[WORDS + 4 + g : WORDS + 5 + g]
        made = six_products(both, xs, sums, magic, p, C.NT)
    return made


@triton.jit
def _six_scales(scales, tops, p: tl.constexpr, g: tl.constexpr):
    """Scales of the two rows of a lane in a tile for group g of the p-th 32 codes."""
    s0 = scaled_byte(scales[p // 2] ^ -2139062144, (2 * p + g) % 4, half_of(tops[0], 0), 128)  # ^ 0x80808080: unsigned
    return s0, scaled_byte(scales[2 + p // 2] ^ -2139062144, (2 * p + g) % 4, half_of(tops[1], 0), 128)


@triton.jit
def _add_six(total, loaded, xs, magic, C: tl.constexpr):
    """`add_blocks` of Q6_K."""
    words, scales, tops = loaded
    q = tl.arange(0, warps(C)) % 4
    WORDS: tl.constexpr = row_words(C)
    PARTS: tl.constexpr = x_parts(C.BITS, C.GS)
    for u in tl.static_range(C.U):
        rows = ()
        for m in tl.static_range(2 * C.MT * u, 2 * C.MT * (u + 1)):
            rows += six_codes(words[m * WORDS : (m + 1) * WORDS], q)
        for p in tl.static_range(C.P):
            mine = ()
            for t in tl.static_range((u * C.P + p) * C.NT, (u * C.P + p + 1) * C.NT):
                mine += six_x(xs[t * PARTS : (t + 1) * PARTS], q)
            for g in tl.static_range(2):
                x, sums = (), ()
                if WIDENED:
                    x = mine
                else:
                    for t in tl.static_range(C.NT):
                        x += mine[4 * t + 2 * g : 4 * t + 2 * g + 2]
                        sums += six_sums(mine[4 * t + 2 * g : 4 * t + 2 * g + 2])
                new = ()
                for m in tl.static_range(C.MT):
                    made = _six_tile(rows[2 * m * WORDS : 2 * (m + 1) * WORDS], x, sums, magic, p, g, q, C)
                    s0, s1 = _six_scales(
                        scales[4 * (u * C.MT + m) : 4 * (u * C.MT + m + 1)],
                        tops[2 * (u * C.MT + m) : 2 * (u * C.MT + m + 1)], p, g,
                    )  # fmt: skip
                    for t in tl.static_range(C.NT):
                        for i in tl.static_range(4):
                            y = total[4 * (m * C.NT + t) + i]
                            new += (y + made[4 * t + i] * (s0 if i < 2 else s1),)
                total = new
    return total


@triton.jit
def add_blocks(total, loaded, xs, magic, KIND: tl.constexpr, C: tl.constexpr):
    """total [4 · MT · NT] + the products of what `load_block` and `load_x` loaded."""
    if six(C):
        total = _add_six(total, loaded, xs, magic, C)
    else:
        total = _add_groups(total, loaded, xs, magic, KIND, C)
    return total


@triton.jit
def _add_groups(total, loaded, xs, magic, KIND: tl.constexpr, C: tl.constexpr):
    """`add_blocks` of groups of whole words."""
    words, scales, biases = loaded
    words = _exchanged(words, C)
    if five(C):
        biases = _with_upper(biases, C)
    WORDS: tl.constexpr = word_parts(C.BITS, C.GS)
    PARTS: tl.constexpr = x_parts(C.BITS, C.GS)
    EACH: tl.constexpr = _scale_words(C)
    BIASES: tl.constexpr = _bias_words(C)
    for u in tl.static_range(C.U):
        for p in tl.static_range(C.P):
            mine = xs[(u * C.P + p) * C.NT * PARTS : (u * C.P + p + 1) * C.NT * PARTS]
            sums = ()
            if not floats(C):
                for t in tl.static_range(C.NT):
                    sums += _sums(mine[t * PARTS : (t + 1) * PARTS], lane_pairs(C.BITS, C.GS), warps(C))
            new = ()
            for m in tl.static_range(C.MT):
                before = total[4 * m * C.NT : 4 * (m + 1) * C.NT]
                both = (
                    words[_first_word(u, m, p, C) : _first_word(u, m, p, C) + WORDS]
                    + words[_first_word(u, m, p + C.P, C) : _first_word(u, m, p + C.P, C) + WORDS]
                )
                scale = scales[(u * C.MT + m) * EACH : (u * C.MT + m + 1) * EACH]
                if floats(C):
                    new += _add_floats(before, both, scale, mine, p, C)
                else:
                    bias = biases[(u * C.MT + m) * BIASES : (u * C.MT + m + 1) * BIASES]
                    new += _add_tile(before, both, scale, bias, mine, sums, magic, p, KIND, C)
            total = new
    return total


@triton.jit
def multiplied(starts, back, x_at, live, first, magic, part, KIND: tl.constexpr, C: tl.constexpr):
    """The products of all of K, a tuple of 4 · MT · NT: for tile (m, t) those of `_products`. `first` is what
    `load_block` loaded for the first blocks; `part`: which of the S parts of K a thread has.
    """
    total = ()
    for _ in tl.static_range(4 * C.MT * C.NT):
        total += (tl.zeros([warps(C)], tl.float32),)
    STRIDE: tl.constexpr = C.S * C.U
    LAST: tl.constexpr = (triton.cdiv(steps(C), STRIDE) - 1) * STRIDE
    loaded = first
    if C.AHEAD:
        xs = load_x(x_at, live, part, C)
        for block in range(0, LAST, STRIDE):
            following = load_block(starts, back, part + block + STRIDE, C)
            x_following = load_x(x_at, live, part + block + STRIDE, C)
            total = add_blocks(total, loaded, xs, magic, KIND, C)
            loaded, xs = following, x_following
    else:
        for block in range(0, LAST, STRIDE):
            xs = load_x(x_at, live, part + block, C)
            following = load_block(starts, back, part + block + STRIDE, C)
            total = add_blocks(total, loaded, xs, magic, KIND, C)
            loaded = following
        xs = load_x(x_at, live, part + LAST, C)
    return add_blocks(total, loaded, xs, magic, KIND, C)


@triton.constexpr_function
def _levels(n):
    return n.bit_length() - 1


@triton.jit
def joined(parts, N: tl.constexpr):
    """A tuple of N tensors [threads] as one [threads, N]; N a power of two."""
    for level in tl.static_range(_levels(N)):
        new = ()
        for i in tl.static_range(N >> (level + 1)):
            new += (tl.join(parts[i], parts[i + (N >> (level + 1))]),)
        parts = new
    return tl.reshape(parts[0], [parts[0].shape[0], N])


@triton.jit
def summed(total, C: tl.constexpr):
    """Σ over the S parts of K: float32 [V, 32, 4 · MT · NT]."""
    A: tl.constexpr = 4 * C.MT * C.NT
    y = tl.permute(tl.reshape(joined(total, A), [C.V, C.S, 32, A]), [0, 2, 3, 1])
    for level in tl.static_range(_levels(C.S)):
        low, high = tl.split(tl.reshape(y, [C.V, 32, A, C.S >> (level + 1), 2]))
        y = low + high
    return tl.reshape(y, [C.V, 32, A])
