"""Device functions that multiply codes with a few columns of activations on tensor cores.

Weights are the large operand of matrix products of 16 rows with 8 columns. Codes are small integers, so they are exact
in bfloat16; activations become one bfloat16 (bfloat16 itself), two (float16) or three (float32), also exactly; products
are summed in float32. The columns hold groups × tokens: a column sums one group of the weight for one token and is then
multiplied by the group's scale. The order of K inside a tile is free, so it is the order in which codes lie in the
registers that loaded them: no weight passes through shared memory. Codes that are floats (`_floats`) are exact in
bfloat16 as well.

A lane loads 1 to 4 words (2, 4 and 8 bits) or 32 codes (3, 5 and 6 bits) of a row and shares the row with 3 others: a
tile is what the 4 have. Tensors are [S, R, …]: S warps, each with its own block of K, and R rows. Which lane holds what
follows from the order of axes at the loads (`load_by_lane`).
"""

from collections import namedtuple

import triton
import triton.language as tl

from penstock.backends.cuda._blocks import (
    block_scales,
    code_bits,
    has_levels,
    high_bits,
    is_blocks,
    is_type,
    level_tile,
    load_high,
    more_groups,
    sub_groups,
    top_groups,
    with_high,
)
from penstock.backends.cuda._floats import float_tile, global_factor, is_float, scale_of, width
from penstock.backends.cuda._launch import WIDENED, load_by_lane, sigmoid
from penstock.backends.cuda._rows import rounded

# The bits of a pair of bfloat16 numbers 128; a code OR-ed into the mantissa makes 128 + code. It is an argument of the
# kernels because one instruction cannot hold two constants, the mask and this: an OR less per pair of codes.
FP_MAGIC = 0x43004300

# Arrays of a launch. w, up, common, common_up: codes, scales, biases, or planes of blocks, None where there are none.
Arrays = namedtuple(
    "Arrays",
    "w up common common_up x norm residual ids order slot_of weights score y bias up_bias",
    defaults=(None, None),
)
# Numbers of a launch: N rows of a product, rows from one matrix to the next and from w to up, numbers from one token to
# the next in x and y, eps of the norm, limit and alpha of a clamped gate.
Sizes = namedtuple("Sizes", "N matrix up_row x_step y_step eps limit alpha", defaults=(0.0, 0.0))
# What a kernel is compiled for: G groups of GS codes of BITS in a row; TP tokens, R rows of y from ROWS rows of weights
# (twice as many with ACT), S warps, U blocks of a warp at a time; NORMED: dtype of normed rows of x (None: no norm).
Constants = namedtuple("Constants", "G BITS GS TP R ROWS S U PAIRS_PER_ROW SHARED_EVERY MANY ACT NORMED")


@triton.constexpr_function
def is_stream(bits):
    """Whether codes cross the borders of words."""
    return bits in (3, 5, 6)


@triton.constexpr_function
def lane_words(bits, gs, tokens):
    """Words that a lane loads at once: 4, or fewer where the groups of a tile and tokens would not fit in 8 columns."""
    words, bits = 4, width(bits)
    while words > 1 and tokens * (words * 128 // bits) > 8 * gs:
        words //= 2
    return words


@triton.constexpr_function
def tile_codes(bits, gs, tokens):
    """Codes of one row in a tile: those of 4 lanes."""
    return 128 if is_stream(bits) else lane_words(bits, gs, tokens) * 128 // width(bits)


@triton.constexpr_function
def columns(bits, gs, tokens):
    """Columns of a product: the groups of a tile, times tokens (a power of two)."""
    return max(8, tokens * max(1, tile_codes(bits, gs, tokens) // gs))


@triton.constexpr_function
def block_codes(bits, gs, tokens):
    """Codes of one row in a block of K: a group, or the part of it in a tile, for each column of a token."""
    return columns(bits, gs, tokens) // tokens * min(gs, tile_codes(bits, gs, tokens))


@triton.constexpr_function
def has_biases(bits):
    """Whether scales come with biases: not those of codes that are floats or places in a table."""
    return not is_float(bits) and not has_levels(bits)


@triton.jit
def _pairs_less(pair, OFFSET: tl.constexpr):
    """int32 [...] that hold two bfloat16 each → bfloat16 [..., 2] less OFFSET; no instruction but the subtraction."""
    low = (pair & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    both = tl.join(low, high)
    if WIDENED:
        both = both.to(tl.float32)
    if OFFSET > 0:
        both -= OFFSET
    return both


@triton.jit
def _tile(
    words, magic, BITS: tl.constexpr, SHIFT: tl.constexpr, UP: tl.constexpr, OFFSET: tl.constexpr, S: tl.constexpr,
    R: tl.constexpr, high=None, KIND: tl.constexpr = 0,
):  # fmt: skip
    """words and magic [4, 8, S, R / 8, L] → (magic | code · 2^UP) − OFFSET as bfloat16 [S, R, 8 L J]; None: codes 0.

    A word gives J pairs: code j of its lower half and code j of its upper half. Of 8-bit codes 4 bits, from SHIFT on.
    high: words with the upper bits of these codes, of a KIND of blocks.
    """
    J: tl.constexpr = 16 // BITS
    L: tl.constexpr = magic.shape[4]
    pair = magic.permute(2, 3, 1, 0, 4).reshape(S, R, 4, L, 1)
    if words is not None:
        shift = SHIFT - UP + BITS * tl.arange(0, J)
        word = words.permute(2, 3, 1, 0, 4).reshape(S, R, 4, L, 1)
        if SHIFT < UP:
            word = tl.where(shift < 0, word << tl.maximum(-shift, 0), word >> tl.maximum(shift, 0))
        else:
            word = word >> shift
        pair |= word & ((1 << min(BITS, 4)) - 1 << UP) * 0x10001
        if high is not None:
            pair = with_high(pair, high.permute(2, 3, 1, 0, 4).reshape(S, R, 4, L, 1), UP, KIND)
    a = _pairs_less(tl.broadcast_to(pair, (S, R, 4, L, J)), OFFSET)  # [S, R, lane, word, J, 2]
    return a.reshape(S, R, 4, L, J // 2, 2, 2).permute(0, 1, 3, 4, 2, 5, 6).reshape(S, R, 8 * L * J)


@triton.jit
def _stream_code(words, BITS: tl.constexpr, c: tl.constexpr):
    """Code c of the 32 in a tuple of BITS words."""
    shift: tl.constexpr = c * BITS % 32
    code = words[c * BITS // 32].to(tl.uint32, bitcast=True) >> shift
    if shift + BITS > 32:
        code |= words[c * BITS // 32 + 1].to(tl.uint32, bitcast=True) << (32 - shift)
    return (code & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def _stream_tile(
    words, magic, BITS: tl.constexpr, UP: tl.constexpr, OFFSET: tl.constexpr, S: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """A tuple of BITS words [4, 8, S, R / 8] and magic of that shape → as `_tile`, bfloat16 [S, R, 128].

    Pairs are codes c and c + 16 of the 32 codes of a lane; the bits of c become axes, the lowest first.
    """
    pairs = ()
    for c in tl.static_range(16):
        if words is None:
            pairs += (magic,)
        else:
            low, high = _stream_code(words, BITS, c), _stream_code(words, BITS, c + 16)
            pairs += ((low << UP) | (high << (16 + UP)) | magic,)
    for level in tl.static_range(4):
        joined = ()
        for i in tl.static_range(8 >> level):
            joined += (tl.join(pairs[2 * i], pairs[2 * i + 1]),)
        pairs = joined
    a = _pairs_less(pairs[0], OFFSET)  # [lane, 8, S, R / 8, 2, 2, 2, 2, 2]
    return a.permute(2, 3, 1, 4, 5, 6, 0, 7, 8).reshape(S, R, 128)


@triton.jit
def _cut(x):
    """float32 → its first 8 bits as bfloat16 and the rest as float32, both exact."""
    bits = x.to(tl.int32, bitcast=True)
    head = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return head, x - (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _dots(a, x0, x1, x2, acc):
    """acc + a · (x0 + x1 + x2), the parts of x that there are."""
    if WIDENED:
        acc = tl.dot(a, x0.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, x0, acc)
    if x1 is not None:
        acc = _dots(a, x1, x2, None, acc)
    return acc


@triton.jit
def _rows(a, PART: tl.constexpr, base, common, up_row, row, m, width, HALF: tl.constexpr):
    """Addresses of rows of the matrix that starts at row `base`, or of the common one; from m = HALF on, of those of
    its up matrix. PART: 0 codes, 1 scales, 2 biases.
    """
    at = a.w[PART] + (base + row) * width
    if a.up[PART] is not None:
        at = tl.where(m < HALF, at, a.up[PART] + (base + up_row + row) * width)
    if a.common[PART] is not None:
        own = a.common[PART] + row * width
        if a.common_up[PART] is not None:
            own = tl.where(m < HALF, own, a.common_up[PART] + row * width)
        at = tl.where(common, own, at)
    return at


@triton.jit
def _load_words(a, base, common, block, first, n, C: tl.constexpr):
    """The words of a block as a tuple: for each tile [4, 8, S, R / 8, words of a lane], or BITS of [4, 8, S, R / 8].
    Of blocks whose codes have upper bits two for each tile: `low`, then `high`.
    """
    BITS: tl.constexpr = C.BITS
    BLOCK: tl.constexpr = block_codes(BITS, C.GS, C.TP)
    TILES: tl.constexpr = BLOCK // tile_codes(BITS, C.GS, C.TP)
    HALF: tl.constexpr = C.ROWS // 8 if a.up[0] is None else C.ROWS // 16
    ROW: tl.constexpr = C.G * C.GS * width(BITS) // 32
    L: tl.constexpr = BITS if is_stream(BITS) else lane_words(BITS, C.GS, C.TP)
    m = tl.arange(0, C.ROWS // 8)
    row = first + tl.arange(0, 8)[:, None, None] + 8 * (m % HALF)
    rows = _rows(a, 0, base[:, None], common[:, None], n.up_row, row, m, ROW, HALF)
    live = (row < n.N) & (base >= 0)[:, None]
    start = block[:, None] * (BLOCK * width(BITS) // 32) + tl.arange(0, 4)[:, None, None, None] * L
    if high_bits(BITS) > 0:
        HIGH_ROW: tl.constexpr = C.G * C.GS * high_bits(BITS) // 32
        above = _rows(a, 1, base[:, None], common[:, None], n.up_row, row, m, HIGH_ROW, HALF)
    words = ()
    for t in tl.static_range(TILES):
        at = start + t * (4 * L)
        ok = live & (at < ROW)
        if is_stream(BITS):
            for i in tl.static_range(BITS):
                words += (load_by_lane(rows + at + i, ok),)
        else:
            at = at[:, :, :, :, None] + tl.arange(0, L)
            words += (load_by_lane(rows[:, :, :, None] + at, ok[:, :, :, :, None]),)
            if high_bits(BITS) > 0:
                words += (load_high(above, start + t * (4 * L), ok, L, BITS),)
    return words


@triton.jit
def _load_block_scales(a, base, common, block, first, n, C: tl.constexpr):
    """Scales and biases of a block in planes where the product has its columns, float32 [S, R, columns]."""
    BITS: tl.constexpr = C.BITS
    COLS: tl.constexpr = columns(BITS, C.GS, C.TP)
    HALF: tl.constexpr = C.ROWS // 8 if a.up[0] is None else C.ROWS // 16
    EACH: tl.constexpr = 2 if C.TP == 1 else 1
    each = tl.arange(0, EACH)
    if C.G % 2 == 1:
        each = (each * 5) & 1
    column = tl.arange(0, 4)[:, None, None, None, None, None] * 2 + 8 * tl.arange(0, COLS // 8)[:, None] + each
    group = block[:, None, None, None] * (COLS // C.TP) + column // C.TP
    m = tl.arange(0, C.ROWS // 8)[:, None, None]
    row = first + tl.arange(0, 8)[:, None, None, None, None] + 8 * (m % HALF)
    base, common = base[:, None, None, None], common[:, None, None, None]
    live = (row < n.N) & (group < C.G) & (base >= 0)
    sub, more, top = None, None, None
    if a.w[2] is not None:
        EVERY: tl.constexpr = sub_groups(BITS)
        at = _rows(a, 2, base, common, n.up_row, row, m, C.G // EVERY, HALF)
        sub = load_by_lane(at + group // EVERY, live)
    if a.w[3] is not None:
        MORE: tl.constexpr = more_groups(BITS)
        at = _rows(a, 3, base, common, n.up_row, row, m, C.G // MORE, HALF)
        more = load_by_lane(at + group // MORE, live)
    if a.w[4] is not None:
        TOP: tl.constexpr = top_groups(BITS)
        at = _rows(a, 4, base, common, n.up_row, row, m, C.G // TOP, HALF)
        if TOP > 1 and TOP % (COLS // C.TP) == 0:  # one for all columns, which each of the lanes of a row loads
            which = (block * (COLS // C.TP) // TOP)[:, None, None, None]
            lane = tl.arange(0, 4)[:, None, None, None, None, None] * 0
            top = load_by_lane(at + which + lane, (row < n.N) & (which < C.G // TOP) & (base >= 0))
        else:
            top = load_by_lane(at + group // TOP, live)
    scale, bias = block_scales(sub, more, top, group, BITS)
    return _in_columns(scale, COLS, C), _in_columns(bias, COLS, C)


@triton.jit
def _in_columns(scale, COLS: tl.constexpr, C: tl.constexpr):
    """What broadcasts to [4, 8, S, R / 8, columns / 8, 2], where lanes loaded it, as [S, R, columns]."""
    scale = tl.broadcast_to(scale, (4, 8, C.S, C.ROWS // 8, COLS // 8, 2))
    return scale.permute(2, 3, 1, 4, 0, 5).reshape(C.S, C.ROWS, COLS)


@triton.jit
def _load_scales(a, PART: tl.constexpr, base, common, block, first, n, C: tl.constexpr):
    """Scales (PART 1) or biases (2) of a block where the product has its columns, float32 [S, R, columns]."""
    COLS: tl.constexpr = columns(C.BITS, C.GS, C.TP)
    HALF: tl.constexpr = C.ROWS // 8 if a.up[PART] is None else C.ROWS // 16
    EACH: tl.constexpr = 2 if C.TP == 1 else 1  # two neighbouring columns have one group if there are several tokens
    each = tl.arange(0, EACH)
    if C.G % 2 == 1:  # pairs are not aligned: hide that they are adjacent, which would put them on neighbouring lanes
        each = (each * 5) & 1
    column = tl.arange(0, 4)[:, None, None, None, None, None] * 2 + 8 * tl.arange(0, COLS // 8)[:, None] + each
    group = block[:, None, None, None] * (COLS // C.TP) + column // C.TP
    group = group // max(1, C.GS // tile_codes(C.BITS, C.GS, C.TP))
    m = tl.arange(0, C.ROWS // 8)[:, None, None]
    row = first + tl.arange(0, 8)[:, None, None, None, None] + 8 * (m % HALF)
    base, common = base[:, None, None, None], common[:, None, None, None]
    at = _rows(a, PART, base, common, n.up_row, row, m, C.G, HALF)
    live = (row < n.N) & (group < C.G) & (base >= 0)
    scale = scale_of(load_by_lane(at + group, live), C.BITS)
    if is_float(C.BITS) and a.w[2] is not None:
        slot = tl.maximum(base, 0) // n.matrix
        which = a.w[2] + slot
        if a.up[2] is not None:
            which = tl.where(m < HALF, which, a.up[2] + slot)
        scale *= global_factor(which, 0, live)
    return _in_columns(scale, COLS, C)


@triton.jit
def _load_x(
    ptr, x_at, x_step, block, live, T, K: tl.constexpr, BITS: tl.constexpr, GS: tl.constexpr, TP: tl.constexpr
):  # fmt: skip
    """x of a block as words [4, 8, S, columns / 8, chunks, up to 4]; 0 where a column has no group.

    Lane 4 n + q loads column n, codes of lane q.
    """
    PW: tl.constexpr = 32 // ptr.dtype.element_ty.primitive_bitwidth  # numbers in a word
    KT: tl.constexpr = tile_codes(BITS, GS, TP)
    PART: tl.constexpr = min(GS, KT)
    VEC: tl.constexpr = min(4, KT // 4 // PW)
    n = tl.arange(0, 8)[:, None, None, None, None] + 8 * tl.arange(0, columns(BITS, GS, TP) // 8)[:, None, None]
    word = tl.arange(0, 4)[:, None, None, None, None, None] * (KT // 4 // PW)
    word += tl.arange(0, KT // 4 // PW // VEC)[:, None] * VEC + tl.arange(0, VEC)
    column = n // TP
    at = block[:, None, None, None] * (block_codes(BITS, GS, TP) // PW) + column // (KT // PART) * (KT // PW) + word
    ok = (word // (PART // PW) == column % (KT // PART)) & (at < K // PW) & (n % TP < T) & live[:, None, None, None]
    at += x_at[:, None, None, None] // PW + (n % TP) * (x_step // PW)
    return load_by_lane(ptr.to(tl.pointer_type(tl.int32)) + at, ok)


@triton.jit
def _in_order(
    words, DTYPE: tl.constexpr, BITS: tl.constexpr, GS: tl.constexpr, TP: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """What `_load_x` gives, as numbers in the order of the codes of a tile: [S, codes of a tile, columns]."""
    COLS: tl.constexpr = columns(BITS, GS, TP)
    if DTYPE.primitive_bitwidth == 16:
        words = tl.join((words & 0xFFFF).to(tl.int16), (words >> 16).to(tl.int16))
    x = words.to(DTYPE, bitcast=True)
    if is_stream(BITS):
        x = x.reshape(4, 8, S, COLS // 8, 2, 2, 2, 2, 2).permute(2, 8, 7, 6, 0, 5, 4, 3, 1)
    else:
        x = x.reshape(4, 8, S, COLS // 8, lane_words(BITS, GS, TP), 2, 8 // width(BITS), 2).permute(
            2, 4, 6, 0, 7, 5, 3, 1
        )
    return x.reshape(S, tile_codes(BITS, GS, TP), COLS)


@triton.jit
def _multiplied(
    words, scale, bias, x0, magic, late, BITS: tl.constexpr, GS: tl.constexpr, TP: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """The product of a block, float32 [S, R, columns]; magic: of codes without biases 0; late: zeros of that shape."""
    x1, x2 = None, None
    if x0.dtype != tl.bfloat16:  # parts of 8 bits each
        WIDE: tl.constexpr = x0.dtype == tl.float32
        x0, rest = _cut(x0.to(tl.float32))
        x1, rest = _cut(rest)
        if WIDE:
            x2, rest = _cut(rest)
    if has_biases(BITS):
        y = _numbers_multiplied(words, scale, bias, x0, x1, x2, magic, late, BITS, GS, TP, R, S)
    else:
        y = _levels_multiplied(words, x0, x1, x2, magic, late, BITS, GS, TP, R, S) * scale
    return y


@triton.jit
def _levels_multiplied(
    words, x0, x1, x2, zero, late, BITS: tl.constexpr, GS: tl.constexpr, TP: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """`_multiplied` without scales, of codes that are floats or places in a table; zero: 0 in the shape of words."""
    PER_TILE: tl.constexpr = TP * max(1, tile_codes(BITS, GS, TP) // GS)
    own_tile = (tl.arange(0, columns(BITS, GS, TP)) // PER_TILE)[None, None, :]
    made = tl.zeros((S, R, columns(BITS, GS, TP)), tl.float32)
    for t in tl.static_range(len(words)):
        if is_type(BITS, "IQ4_NL", "IQ4_XS"):
            tile = level_tile(words[t] | zero, BITS, S, R)
        else:
            tile = float_tile(words[t], zero, BITS, S, R)
        made = tl.where(own_tile == t, _dots(tile, x0, x1, x2, late), made)
    if is_type(BITS, "MXFP4"):  # whose scales are half as large, so that the last one is finite
        made *= 2.0
    return made


@triton.jit
def _numbers_multiplied(
    words, scale, bias, x0, x1, x2, magic, late, BITS: tl.constexpr, GS: tl.constexpr, TP: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """`_multiplied` of codes that are unsigned numbers."""
    # A code in the upper bits of the mantissa of 2^BITS makes 2^BITS + code (of 8 bits 16 + the lower half and 256 + 16
    # times the upper), which the sum of x takes away again. Activations in parts want codes around 0 for the sake of
    # their last bits: from 128 + code a centre is taken, an instruction more per pair.
    PLAIN: tl.constexpr = x1 is None
    WIDTH: tl.constexpr = code_bits(BITS)
    HALF: tl.constexpr = 4 if WIDTH == 8 else WIDTH
    UP: tl.constexpr = 7 - HALF if PLAIN else 0
    CENTRE: tl.constexpr = 1 << (WIDTH - 1) if WIDTH < 8 else 136  # of 8 bits 8 from each half
    OFFSET: tl.constexpr = 0 if PLAIN else 128 + CENTRE if WIDTH < 8 else 136
    UPPER: tl.constexpr = 0 if PLAIN else 2176
    STEP: tl.constexpr = BITS if is_stream(BITS) else 2 if high_bits(BITS) > 0 else 1  # words of a tile in the tuple
    if PLAIN:
        magic -= (7 - HALF) * 0x00800080
    zero = tl.zeros((S, R, columns(BITS, GS, TP)), tl.float32)
    own = (tl.arange(0, columns(BITS, GS, TP)) // TP // max(1, tile_codes(BITS, GS, TP) // GS))[None, None, :]
    acc = zero
    for t in tl.static_range(len(words) // STEP):
        if is_stream(BITS):
            dot = _dots(_stream_tile(words[t * BITS : (t + 1) * BITS], magic, BITS, UP, OFFSET, S, R), x0, x1, x2, zero)
        elif is_blocks(BITS):
            high = words[t * STEP + 1] if high_bits(BITS) > 0 else None
            tile = _tile(words[t * STEP], magic, width(BITS), 0, UP, OFFSET, S, R, high, BITS)
            dot = _dots(tile, x0, x1, x2, zero)
        else:
            dot = _dots(_tile(words[t], magic, BITS, 0, UP, OFFSET, S, R), x0, x1, x2, zero)
        if BITS == 8:  # the upper halves, as 16 · (16 … 31), or 16 · (0 … 15) − 128
            dot = _dots(_tile(words[t], magic + 0x02000200, BITS, 4, UP, UPPER, S, R), x0, x1, x2, dot)
        acc = tl.where(own == t, dot, acc)
    # Sums of x by a product with ones (or 2^BITS), which are made as codes are: then it wants x in the same registers.
    if is_stream(BITS):
        ones = _stream_tile(None, magic, BITS, UP, 0 if PLAIN else 127, S, R)
    else:
        ones = _tile(None, magic, width(BITS), 0, UP, 0 if PLAIN else 127, S, R)
    sums = _dots(ones, x0, x1, x2, late)
    if PLAIN:
        y = acc * scale + (bias * (1 / (1 << HALF)) - (17 if BITS == 8 else 1) * scale) * sums
    else:
        y = acc * scale + (bias + CENTRE * scale) * sums
    return y


@triton.jit
def place_of(ids_ptr, slot_ptr, at, live, known, stack):
    """Place in the stack of the expert ids[at], −1 if there is none. Past the L1 cache, which may be older."""
    expert = tl.load(ids_ptr + at, mask=live, other=-1, cache_modifier=".cg")
    if slot_ptr is not None:
        inside = live & (expert >= 0) & (expert < known)
        expert = tl.load(slot_ptr + expert, mask=inside, other=-1, cache_modifier=".cg")
    return tl.where(live & (expert >= 0) & (expert < stack), expert, -1).to(tl.int64)


@triton.jit
def _block_of(start, S: tl.constexpr):
    """The block of each of S warps. Any order of warps will do; this one hides that their blocks are adjacent, which
    would put them on the lanes.
    """
    return start + ((tl.arange(0, S) * 5) & (S - 1))


@triton.jit
def load_blocks(a, pair, start, first, known, stack, n, C: tl.constexpr, expert=None):
    """Weights of U blocks of K per warp, of the pairs from `pair` on: for `multiplied_blocks`.

    Rows first … of the matrices of PAIRS_PER_ROW pairs lie one after the other as blocks; `start` is the first block.
    With up the second half of the ROWS rows is that of another weight, `up_row` rows further. The last of every
    SHARED_EVERY pairs is the shared expert's; ids are those of the others. expert: that of the only pair, −1 for none
    and 0 for the shared one, instead of ids.
    """
    BLOCKS: tl.constexpr = triton.cdiv(C.G * C.GS, block_codes(C.BITS, C.GS, C.TP))
    U: tl.constexpr = C.U
    bases, words, scales, biases = (), (), (), ()
    for u in tl.static_range(U):
        at = _block_of(start + u * C.S, C.S)
        live = at < C.PAIRS_PER_ROW * BLOCKS
        q = (pair + at // BLOCKS).to(tl.int32)
        is_common = at < 0
        if expert is not None:
            is_common = q % C.SHARED_EVERY == C.SHARED_EVERY - 1
            slot = tl.where(live, expert, -1).to(tl.int64)
        elif a.ids is None:
            slot = tl.where(live, q, -1).to(tl.int64)
        elif C.SHARED_EVERY > 0:
            is_common = q % C.SHARED_EVERY == C.SHARED_EVERY - 1
            slot = place_of(a.ids, a.slot_of, q - q // C.SHARED_EVERY, live & ~is_common, known, stack)
            slot = tl.where(live & is_common, 0, slot)
        else:
            slot = place_of(a.ids, a.slot_of, q, live, known, stack)
        base = slot * n.matrix
        block = at % BLOCKS
        words += _load_words(a, base, is_common, block, first, n, C)
        if is_blocks(C.BITS):
            scale, bias = _load_block_scales(a, base, is_common, block, first, n, C)
            scales += (scale,)
            if has_biases(C.BITS):
                biases += (bias,)
        else:
            scales += (_load_scales(a, 1, base, is_common, block, first, n, C),)
            if has_biases(C.BITS):
                biases += (_load_scales(a, 2, base, is_common, block, first, n, C),)
        bases += (base,)
    return bases, words, scales, biases


@triton.jit
def row_rinv(x_ptr, x_at, x_step, T, eps, K: tl.constexpr, TP: tl.constexpr, S: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of TP rows of K: float32 [TP]."""
    WIDTH: tl.constexpr = min(triton.next_power_of_2(K), max(64, 512 * S // TP))
    token = tl.arange(0, TP)[:, None]
    squares = tl.zeros((TP, WIDTH), tl.float32)
    for start in tl.static_range(0, K, WIDTH):
        k = start + tl.arange(0, WIDTH)[None, :]
        x = tl.load(x_ptr + x_at + token * x_step + k, mask=(token < T) & (k < K), other=0.0).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 1) / K + eps)


@triton.jit
def factor_of(weights_ptr, score_ptr, q, live, SHARED_EVERY: tl.constexpr):
    """What the products of pairs q are multiplied by: their weight, or for the common expert the sigmoid of its score
    (None: 1).
    """
    if SHARED_EVERY == 0:
        factor = tl.load(weights_ptr + q, mask=live, other=0.0)
    else:
        token = q // SHARED_EVERY
        is_common = q % SHARED_EVERY == SHARED_EVERY - 1
        factor = tl.load(weights_ptr + q - token, mask=live & ~is_common, other=0.0)
        gate = 1.0
        if score_ptr is not None:
            gate = sigmoid(tl.load(score_ptr + token, mask=live & is_common, other=0.0).to(tl.float32))
        factor = tl.where(live & is_common, gate, factor)
    return factor


@triton.jit
def load_x_blocks(x, blocks, pair, start, T, pairs_per_x, n, C: tl.constexpr):
    """What `multiplied_blocks` multiplies the blocks with: words of x for each of U."""
    K: tl.constexpr = C.G * C.GS
    BLOCKS: tl.constexpr = triton.cdiv(K, block_codes(C.BITS, C.GS, C.TP))
    xs = ()
    for u in tl.static_range(C.U):
        at = _block_of(start + u * C.S, C.S)
        x_at = (pair + at // BLOCKS) // pairs_per_x * K
        xs += (_load_x(x, x_at, n.x_step, at % BLOCKS, blocks[0][u] >= 0, T, K, C.BITS, C.GS, C.TP),)
    return xs


@triton.jit
def multiplied_blocks(
    a, x, blocks, rinv, magic, pair, start, T, pairs_per_x, n, C: tl.constexpr, xs=None, others=None
):  # fmt: skip
    """The products [S, ROWS, columns] of the blocks that `load_blocks` loaded, with x, summed over U. With a norm x is
    times rinv [TP] and norm [K], rounded to NORMED. xs: x, where `load_x_blocks` has loaded it; others: more of that,
    which is to be under way before the first product.
    """
    bases, words, scales, biases = blocks
    BITS: tl.constexpr = C.BITS
    GS: tl.constexpr = C.GS
    TP: tl.constexpr = C.TP
    U: tl.constexpr = C.U
    K: tl.constexpr = C.G * GS
    COLS: tl.constexpr = columns(BITS, GS, TP)
    BLOCKS: tl.constexpr = triton.cdiv(K, block_codes(BITS, GS, TP))
    if xs is None:
        xs = load_x_blocks(x, blocks, pair, start, T, pairs_per_x, n, C)
    norms = ()
    if a.norm is not None:
        for u in tl.static_range(U):
            at = _block_of(start + u * C.S, C.S)
            norms += (_load_x(a.norm, at * 0, 0, at % BLOCKS, bases[u] >= 0, T, K, BITS, GS, TP),)

    # The compiler would put loads off until their use; with few warps each delay is another wait for memory. So the
    # first use is made to depend on all of them: `nothing` is 0, which only we know.
    nothing = magic >> 31
    guard, late, x_guard = words[0], scales[0].to(tl.int32, bitcast=True), xs[0]
    if not WIDENED:
        for t in tl.static_range(1, len(words)):
            guard |= words[t]
        for u in tl.static_range(U):
            late |= scales[u].to(tl.int32, bitcast=True)
            if has_biases(BITS):
                late |= biases[u].to(tl.int32, bitcast=True)
            x_guard |= xs[u]
        x_guard = tl.xor_sum(x_guard, 4, keep_dims=True)
        if others is not None:
            for u in tl.static_range(len(others)):
                x_guard |= tl.xor_sum(others[u], 4, keep_dims=True)
    if has_biases(BITS):
        magic = (guard & nothing) | magic
    else:
        magic = guard & nothing
    late = (late & nothing).to(tl.float32, bitcast=True)

    EACH: tl.constexpr = len(words) // U
    total = tl.zeros((C.S, C.ROWS, COLS), tl.float32)
    for u in tl.static_range(U):
        part = xs[u] if u > 0 else xs[0] | (x_guard & nothing)
        part = _in_order(part, x.dtype.element_ty, BITS, GS, TP, C.S)
        if a.norm is not None:
            by = tl.broadcast_to(rinv[None, :], (COLS // TP, TP)).reshape(1, 1, COLS)
            norm = _in_order(norms[u], a.norm.dtype.element_ty, BITS, GS, TP, C.S).to(tl.float32)
            part = rounded(part.to(tl.float32) * by * norm, C.NORMED)
        mine = words[u * EACH : (u + 1) * EACH]
        bias = biases[u] if has_biases(BITS) else None
        part = _multiplied(mine, scales[u], bias, part, magic, late, BITS, GS, TP, C.ROWS, C.S)
        if a.weights is not None:
            q = (pair + _block_of(start + u * C.S, C.S) // BLOCKS).to(tl.int32)
            part *= factor_of(a.weights, a.score, q, bases[u] >= 0, C.SHARED_EVERY)[:, None, None]
        total += part
    return total


@triton.jit
def columns_summed(total, S: tl.constexpr, R: tl.constexpr, COLS: tl.constexpr, TP: tl.constexpr):
    """[S, R, groups · TP] over warps and groups → [R, TP]."""
    return tl.sum(tl.sum(total.reshape(S, R, COLS // TP, TP), 2), 0)
