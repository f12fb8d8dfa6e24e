"""Device functions that multiply codes with a few columns of activations on tensor cores.

Weights are the large operand of matrix products of 16 rows with 8 columns. Codes are small integers, so they are exact
in bfloat16; activations become one bfloat16 (bfloat16 itself), two (float16) or three (float32), also exactly; products
are summed in float32. The columns hold groups × tokens: a column sums one group of the weight for one token and is then
multiplied by the group's scale. The order of K inside a tile is free, so it is the order in which codes lie in the
registers that loaded them: no weight passes through shared memory.

A lane loads 1 to 4 words (2, 4 and 8 bits) or 32 codes (3, 5 and 6 bits) of a row and shares the row with 3 others: a
tile is what the 4 have. Tensors are [S, R, …]: S warps, each with its own block of K, and R rows. Which lane holds what
follows from the order of axes at the loads (Triton 3.6 takes axes of equal stride from the first to the last).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.backends.cuda._launch import WIDENED

# The bits of a pair of bfloat16 numbers 128; a code OR-ed into the mantissa makes 128 + code. It is an argument of the
# kernels because one instruction cannot hold two constants, the mask and this: an OR less per pair of codes.
MAGIC = 0x43004300


@triton.constexpr_function
def is_stream(bits):
    """Whether codes cross the borders of words."""
    return bits in (3, 5, 6)


@triton.constexpr_function
def lane_words(bits, gs, tokens):
    """Words that a lane loads at once: 4, or fewer where the groups of a tile and tokens would not fit in 8 columns."""
    words = 4
    while words > 1 and tokens * (words * 128 // bits) > 8 * gs:
        words //= 2
    return words


@triton.constexpr_function
def tile_codes(bits, gs, tokens):
    """Codes of one row in a tile: those of 4 lanes."""
    return 128 if is_stream(bits) else lane_words(bits, gs, tokens) * 128 // bits


@triton.constexpr_function
def columns(bits, gs, tokens):
    """Columns of a product: the groups of a tile, times tokens (a power of two)."""
    return max(8, tokens * max(1, tile_codes(bits, gs, tokens) // gs))


@triton.constexpr_function
def block_codes(bits, gs, tokens):
    """Codes of one row in a block of K: a group, or the part of it in a tile, for each column of a token."""
    return columns(bits, gs, tokens) // tokens * min(gs, tile_codes(bits, gs, tokens))


@triton.jit
def _pairs_less(pair, OFFSET: tl.constexpr):
    """int32 [...] that hold two bfloat16 each → bfloat16 [..., 2] less OFFSET; no instruction but the subtraction."""
    low = (pair & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    both = tl.join(low, high)
    return (both.to(tl.float32) if WIDENED else both) - OFFSET


@triton.jit
def _tile(
    words, magic, BITS: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr, S: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """words and magic [4, 8, S, R / 8, L] → (magic | code) − OFFSET as bfloat16 [S, R, 8 L J]; words None: codes 0.

    A word gives J pairs: code j of its lower half and code j of its upper half. Of 8-bit codes 4 bits, from SHIFT on.
    """
    J: tl.constexpr = 16 // BITS
    L: tl.constexpr = magic.shape[4]
    pair = magic.permute(2, 3, 1, 0, 4).reshape(S, R, 4, L, 1)
    if words is not None:
        shift = SHIFT + BITS * tl.arange(0, J)
        pair |= (words.permute(2, 3, 1, 0, 4).reshape(S, R, 4, L, 1) >> shift) & ((1 << min(BITS, 4)) - 1) * 0x10001
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
def _stream_tile(words, magic, BITS: tl.constexpr, OFFSET: tl.constexpr, S: tl.constexpr, R: tl.constexpr):
    """A tuple of BITS words [4, 8, S, R / 8] and magic of that shape → as `_tile`, bfloat16 [S, R, 128].

    Pairs are codes c and c + 16 of the 32 codes of a lane; the bits of c become axes, the lowest first.
    """
    pairs = ()
    for c in tl.static_range(16):
        if words is None:
            pairs += (magic,)
        else:
            pairs += (_stream_code(words, BITS, c) | (_stream_code(words, BITS, c + 16) << 16) | magic,)
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
def _rows(ptr, up_ptr, base, up_row, row, m, width, HALF: tl.constexpr):
    """Addresses of rows of the matrix that starts at row `base`; from m = HALF on, of those of the up matrix."""
    at = ptr + (base + row) * width
    if up_ptr is not None:
        at = tl.where(m < HALF, at, up_ptr + (base + up_row + row) * width)
    return at


@triton.jit
def _load_words(
    ptr, up_ptr, base, up_row, block, first, N, G: tl.constexpr, BITS: tl.constexpr, GS: tl.constexpr,
    TP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The words of a block as a tuple: for each tile [4, 8, S, R / 8, words of a lane], or BITS of [4, 8, S, R / 8]."""
    KT: tl.constexpr = tile_codes(BITS, GS, TP)
    TILES: tl.constexpr = block_codes(BITS, GS, TP) // KT
    HALF: tl.constexpr = R // 8 if up_ptr is None else R // 16
    ROW: tl.constexpr = G * (GS * BITS // 32)
    L: tl.constexpr = BITS if is_stream(BITS) else lane_words(BITS, GS, TP)
    m = tl.arange(0, R // 8)
    row = first + tl.arange(0, 8)[:, None, None] + 8 * (m % HALF)
    rows = _rows(ptr, up_ptr, base[:, None], up_row, row, m, ROW, HALF)
    live = (row < N) & (base >= 0)[:, None]
    start = block[:, None] * (block_codes(BITS, GS, TP) * BITS // 32) + tl.arange(0, 4)[:, None, None, None] * L
    words = ()
    for t in tl.static_range(TILES):
        at = start + t * (4 * L)
        ok = live & (at < ROW)
        if is_stream(BITS):
            for i in tl.static_range(BITS):
                words += (tl.load(rows + at + i, mask=ok, other=0),)
        else:
            at = at[:, :, :, :, None] + tl.arange(0, L)
            words += (tl.load(rows[:, :, :, None] + at, mask=ok[:, :, :, :, None], other=0),)
    return words


@triton.jit
def _load_scales(
    ptr, up_ptr, base, up_row, block, first, N, G: tl.constexpr, BITS: tl.constexpr, GS: tl.constexpr,
    TP: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Scales (or biases) of a block where the product has its columns, float32 [S, R, columns]."""
    COLS: tl.constexpr = columns(BITS, GS, TP)
    HALF: tl.constexpr = R // 8 if up_ptr is None else R // 16
    EACH: tl.constexpr = 2 if TP == 1 else 1  # two neighbouring columns have one group if there are several tokens
    each = tl.arange(0, EACH)
    if G % 2 == 1:  # pairs are not aligned: hide that they are adjacent, which would put them on neighbouring lanes
        each = (each * 5) & 1
    n = tl.arange(0, 4)[:, None, None, None, None, None] * 2 + 8 * tl.arange(0, COLS // 8)[:, None] + each
    group = (block[:, None, None, None] * (COLS // TP) + n // TP) // max(1, GS // tile_codes(BITS, GS, TP))
    m = tl.arange(0, R // 8)[:, None, None]
    row = first + tl.arange(0, 8)[:, None, None, None, None] + 8 * (m % HALF)
    at = _rows(ptr, up_ptr, base[:, None, None, None], up_row, row, m, G, HALF)
    live = (row < N) & (group < G) & (base >= 0)[:, None, None, None]
    scale = tl.load(at + group, mask=live, other=0.0).to(tl.float32)
    return tl.broadcast_to(scale, (4, 8, S, R // 8, COLS // 8, 2)).permute(2, 3, 1, 4, 0, 5).reshape(S, R, COLS)


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
    return tl.load(ptr.to(tl.pointer_type(tl.int32)) + at, mask=ok, other=0)


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
        x = x.reshape(4, 8, S, COLS // 8, lane_words(BITS, GS, TP), 2, 8 // BITS, 2).permute(2, 4, 6, 0, 7, 5, 3, 1)
    return x.reshape(S, tile_codes(BITS, GS, TP), COLS)


@triton.jit
def _multiplied(
    words, scale, bias, x0, magic, late, BITS: tl.constexpr, GS: tl.constexpr, TP: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """The product of a block, float32 [S, R, columns]; late: zeros of that shape."""
    x1, x2 = None, None
    if x0.dtype != tl.bfloat16:  # parts of 8 bits each
        WIDE: tl.constexpr = x0.dtype == tl.float32
        x0, rest = _cut(x0.to(tl.float32))
        x1, rest = _cut(rest)
        if WIDE:
            x2, rest = _cut(rest)
    CENTRE: tl.constexpr = 1 << (BITS - 1) if BITS < 8 else 136  # taken from codes; of 8 bits 8 from each half
    OFFSET: tl.constexpr = 128 + CENTRE if BITS < 8 else 136
    STEP: tl.constexpr = BITS if is_stream(BITS) else 1  # words of a tile in the tuple
    zero = tl.zeros((S, R, columns(BITS, GS, TP)), tl.float32)
    own = (tl.arange(0, columns(BITS, GS, TP)) // TP // max(1, tile_codes(BITS, GS, TP) // GS))[None, None, :]
    acc = zero
    for t in tl.static_range(len(words) // STEP):
        if is_stream(BITS):
            dot = _dots(_stream_tile(words[t * BITS : (t + 1) * BITS], magic, BITS, OFFSET, S, R), x0, x1, x2, zero)
        else:
            dot = _dots(_tile(words[t], magic, BITS, 0, OFFSET, S, R), x0, x1, x2, zero)
        if BITS == 8:  # the upper halves, as 16 · (0 … 15) − 128
            dot = _dots(_tile(words[t], magic + 0x02000200, BITS, 4, 2176, S, R), x0, x1, x2, dot)
        acc = tl.where(own == t, dot, acc)
    # Sums of x by a product with ones, which are made as codes are: then it wants x in the same registers.
    if is_stream(BITS):
        ones = _stream_tile(None, magic, BITS, 127, S, R)
    else:
        ones = _tile(None, magic, BITS, 0, 127, S, R)
    return acc * scale + (bias + CENTRE * scale) * _dots(ones, x0, x1, x2, late)


@triton.jit
def place_of(ids_ptr, slot_ptr, at, live, known, stack):
    """Place in the stack of the expert ids[at], −1 if there is none. Past the L1 cache, which may be older."""
    expert = tl.load(ids_ptr + at, mask=live, other=-1, cache_modifier=".cg")
    if slot_ptr is not None:
        inside = live & (expert >= 0) & (expert < known)
        expert = tl.load(slot_ptr + expert, mask=inside, other=-1, cache_modifier=".cg")
    return tl.where(live & (expert >= 0) & (expert < stack), expert, -1).to(tl.int64)


@triton.jit
def add_blocks(
    total, w_ptr, s_ptr, b_ptr, u_ptr, us_ptr, ub_ptr, x_ptr, ids_ptr, slot_ptr, weights_ptr, magic, pair, start, first,
    N, T, known, stack, matrix, up_row, share, x_step, SLOTS: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr,
    GS: tl.constexpr, TP: tl.constexpr, R: tl.constexpr, S: tl.constexpr, U: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """total [S, R, columns] plus the products of U blocks of K per warp, of the pairs from `pair` on.

    Rows first … of the matrices of SLOTS pairs lie one after the other as blocks; `start` is the first block. With
    u_ptr the second half of the R rows is that of another weight, `up_row` rows further. WAIT: x may be what the kernel
    before this one writes.
    """
    K: tl.constexpr = G * GS
    BLOCKS: tl.constexpr = (K + block_codes(BITS, GS, TP) - 1) // block_codes(BITS, GS, TP)
    # Any order of warps will do; this one hides that their blocks are adjacent, which would put them on the lanes.
    warp = (tl.arange(0, S) * 5) & (S - 1)
    bases, pairs, words, scales, biases = (), (), (), (), ()
    for u in tl.static_range(U):
        at = start + u * S + warp
        live = at < SLOTS * BLOCKS
        pairs += (pair + at // BLOCKS,)
        if ids_ptr is None:
            slot = tl.where(live, pairs[u], -1)
        else:
            slot = place_of(ids_ptr, slot_ptr, pairs[u], live, known, stack)
        bases += (slot * matrix,)
        words += _load_words(w_ptr, u_ptr, bases[u], up_row, at % BLOCKS, first, N, G, BITS, GS, TP, R)
        scales += (_load_scales(s_ptr, us_ptr, bases[u], up_row, at % BLOCKS, first, N, G, BITS, GS, TP, R, S),)
        biases += (_load_scales(b_ptr, ub_ptr, bases[u], up_row, at % BLOCKS, first, N, G, BITS, GS, TP, R, S),)
    if WAIT:
        gdc_launch_dependents()
        gdc_wait()

    xs = ()
    for u in tl.static_range(U):
        block = (start + u * S + warp) % BLOCKS
        xs += (_load_x(x_ptr, pairs[u] // share * K, x_step, block, bases[u] >= 0, T, K, BITS, GS, TP),)

    # The compiler would put loads off until their use; with few warps each delay is another wait for memory. So the
    # first use is made to depend on all of them: `nothing` is 0, which only we know.
    nothing = magic >> 31
    guard, late, x_guard = words[0], scales[0].to(tl.int32, bitcast=True), xs[0]
    if not WIDENED:
        for t in tl.static_range(1, len(words)):
            guard |= words[t]
        for u in tl.static_range(U):
            late |= scales[u].to(tl.int32, bitcast=True) | biases[u].to(tl.int32, bitcast=True)
            x_guard |= xs[u]
        x_guard = tl.xor_sum(x_guard, 4, keep_dims=True)
    magic = (guard & nothing) | magic
    late = (late & nothing).to(tl.float32, bitcast=True)

    EACH: tl.constexpr = len(words) // U
    for u in tl.static_range(U):
        x = xs[u] if u > 0 else xs[0] | (x_guard & nothing)
        x = _in_order(x, x_ptr.dtype.element_ty, BITS, GS, TP, S)
        mine = words[u * EACH : (u + 1) * EACH]
        part = _multiplied(mine, scales[u], biases[u], x, magic, late, BITS, GS, TP, R, S)
        if weights_ptr is not None:
            part *= tl.load(weights_ptr + pairs[u], mask=bases[u] >= 0, other=0.0)[:, None, None]
        total += part
    return total


@triton.jit
def columns_summed(total, S: tl.constexpr, R: tl.constexpr, COLS: tl.constexpr, TP: tl.constexpr):
    """[S, R, groups · TP] over warps and groups → [R, TP]."""
    return tl.sum(tl.sum(total.reshape(S, R, COLS // TP, TP), 2), 0)
