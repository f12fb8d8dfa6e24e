"""Device functions that read the planes of GGUF blocks (`quant.gguf_planes`), for kernels that also read other weights.

A kernel is compiled for a kind of codes, BITS: 256 and more for blocks, whose lower 4 bits are those of a code in the
plane `low`. Weights of a group are code · scale + bias, or level(code) · scale. Products round once on the way: a scale
has at most 19 bits, a code with a bias as many as leave their product exact.
"""

import triton
import triton.language as tl

from penstock.backends.cuda._floats import BLOCK_KINDS, float_values, width
from penstock.backends.cuda._launch import WIDENED, load_by_lane
from penstock.quant import BLOCK_TYPES, layout_in_planes

_NAMES = {kind: name for name, kind in BLOCK_KINDS.items()}
_HIGH = {kind: layout_in_planes(name).high for kind, name in _NAMES.items()}
_GROUP = {kind: layout_in_planes(name).group for kind, name in _NAMES.items()}
_SIZE = {kind: BLOCK_TYPES[name].size for kind, name in _NAMES.items()}
_CENTER = {kind: float(BLOCK_TYPES[name].center) for kind, name in _NAMES.items()}


@triton.constexpr_function
def is_blocks(kind):
    return kind >= 256


@triton.constexpr_function
def is_type(kind, *names):
    """Whether codes are those of one of these types."""
    return kind >= 256 and _NAMES[kind] in names


@triton.constexpr_function
def high_bits(kind):
    """Bits of a code in the plane `high`."""
    return _HIGH[kind] if kind >= 256 else 0


@triton.constexpr_function
def code_bits(kind):
    """Bits of a code: of blocks all of them, else those of a word."""
    return width(kind) + high_bits(kind) if kind >= 256 else kind & 15


@triton.constexpr_function
def has_levels(kind):
    """Whether codes are places in a table."""
    return is_type(kind, "IQ4_NL", "IQ4_XS", "MXFP4")


@triton.constexpr_function
def has_biases(kind):
    """Whether groups have biases; else they come from a center of codes, or there are none."""
    return is_type(kind, "Q2_K", "Q4_K", "Q5_K", "Q5_1")


@triton.constexpr_function
def group_of(kind):
    """Weights of a group."""
    return _GROUP[kind]


@triton.constexpr_function
def top_groups(kind):
    """Groups that share an entry of `top`."""
    return _SIZE[kind] // _GROUP[kind]


@triton.constexpr_function
def sub_groups(kind):
    """Groups that share a byte of `sub`."""
    return 2 if is_type(kind, "Q3_K") else 1


@triton.constexpr_function
def more_groups(kind):
    """Groups that share a byte of `more`."""
    return 4 if is_type(kind, "Q3_K") else 2


@triton.constexpr_function
def high_run(kind):
    """Words of `low` whose upper bits share a word of `high`."""
    return width(kind) // high_bits(kind)


@triton.constexpr_function
def _center(kind):
    return _CENTER[kind]


# -- scales ----------------------------------------------------------------------------------------------------------


@triton.jit
def _half(bits):
    """The float16 in the lower half of int32, as float32."""
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def block_scales(sub, more, top, group, BITS: tl.constexpr):
    """Scales and biases, float32, of groups from what `sub`, `more` and `top` have for them; None: no such plane.

    A center is in the biases: exact, as it is a power of two. Biases of types with levels mean nothing.
    """
    if is_type(BITS, "MXFP4"):
        byte = sub.to(tl.int32)
        bits = tl.where(byte < 2, 0x00200000 << tl.minimum(byte, 1), (byte - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
    elif is_type(BITS, "Q5_1"):
        scale, bias = _half(top), _half(top >> 16)
    elif is_type(BITS, "Q5_0", "IQ4_NL"):
        scale = top.to(tl.float32)
    elif is_type(BITS, "Q2_K"):
        byte = sub.to(tl.int32)
        scale = _half(top) * (byte & 15).to(tl.float32)
        bias = -(_half(top >> 16) * (byte >> 4).to(tl.float32))
    elif is_type(BITS, "Q4_K", "Q5_K"):
        byte = sub.to(tl.int32)
        upper = (more.to(tl.int32) >> ((group & 1) * 4)) & 15
        scale = _half(top) * (byte & 63).to(tl.float32)
        bias = -(_half(top >> 16) * ((byte >> 6) | (upper << 2)).to(tl.float32))
    elif is_type(BITS, "Q3_K"):
        lower = (sub.to(tl.int32) >> ((group & 1) * 4)) & 15
        upper = (more.to(tl.int32) >> ((group & 3) * 2)) & 3
        scale = top.to(tl.float32) * ((lower | (upper << 4)) - 32).to(tl.float32)
    elif is_type(BITS, "IQ4_XS"):
        scale = top.to(tl.float32) * (sub.to(tl.int32) - 32).to(tl.float32)
    else:
        byte = sub.to(tl.int32)
        scale = top.to(tl.float32) * ((byte ^ 128) - 128).to(tl.float32)
    if not has_biases(BITS):
        bias = -_center(BITS) * scale
    return scale, bias


# -- codes -----------------------------------------------------------------------------------------------------------


@triton.jit
def levels(code, BITS: tl.constexpr):
    """What codes 0 … 15 stand for in a type with levels, as float32."""
    if is_type(BITS, "MXFP4"):
        level = float_values(code, 20) * 2.0
    else:
        # four bytes of level + 127 in a word, four words
        low = tl.where((code & 4) == 0, 0x3E2C1700, 0x75695C4E)
        high = tl.where((code & 4) == 0, -1516729216, -254229324)  # 0xA5988C80, 0xF0D8C4B4
        byte = (tl.where(code < 8, low, high) >> ((code & 3) * 8)) & 0xFF
        level = (byte | 0x4B000000).to(tl.float32, bitcast=True) - 8388735.0  # 2^23 + 127
    return level


@triton.jit
def load_high(rows, at, ok, L: tl.constexpr, BITS: tl.constexpr):
    """Words of `high` for L words of `low` of each lane, from word `at` of a row on: [4, 8, S, R / 8, L].

    rows, at and ok [4, 8, S, R / 8]. A word of `high` stands for each of its run. Of less than a run the upper bits
    that belong to the first word come down to the lowest place.
    """
    RUN: tl.constexpr = high_run(BITS)
    at = tl.broadcast_to(at, ok.shape)
    if L >= RUN:
        more = tl.arange(0, L // RUN)
        words = load_by_lane((rows + at // RUN)[:, :, :, :, None] + more, ok[:, :, :, :, None])
        spread = words
        for _ in tl.static_range(RUN.bit_length() - 1):
            spread = tl.join(spread, spread)
        words = spread.reshape(ok.shape[0], ok.shape[1], ok.shape[2], ok.shape[3], L)
    else:
        word = load_by_lane(rows + at // RUN, ok)
        word = word.to(tl.uint32, bitcast=True) >> (at % RUN * (16 // width(BITS) * high_bits(BITS)))
        word = word.to(tl.int32, bitcast=True)[:, :, :, :, None]
        words = tl.broadcast_to(word, (ok.shape[0], ok.shape[1], ok.shape[2], ok.shape[3], L))
    return words


@triton.constexpr_function
def _masked_or(mask):
    """$1 & mask | $2 in one instruction: the compiler makes two of it where $2 is such a sum, too."""
    return f"lop3.b32 $0, $1, {mask:#x}, $2, 0xEA;"


@triton.jit
def with_high(pairs, words, UP: tl.constexpr, BITS: tl.constexpr):
    """pairs [S, R, 4, L, J] of lower bits, UP bits up, with the upper ones of words [S, R, 4, L, 1] of `high`, one for
    each of `low`.
    """
    HIGH: tl.constexpr = high_bits(BITS)
    LOW: tl.constexpr = width(BITS)
    J: tl.constexpr = 16 // LOW
    L: tl.constexpr = words.shape[3]
    place = tl.arange(0, L)[:, None] % min(L, high_run(BITS)) * (J * HIGH) + HIGH * tl.arange(0, J)[None, :]
    shift = place - (UP + LOW)
    words = tl.where(shift < 0, words << tl.maximum(-shift, 0), words >> tl.maximum(shift, 0))
    MASK: tl.constexpr = ((1 << HIGH) - 1 << (UP + LOW)) * 0x10001
    if WIDENED:
        pairs |= words & MASK
    else:
        pairs = tl.inline_asm_elementwise(
            _masked_or(MASK), "=r,r,r", [words, pairs], dtype=tl.int32, is_pure=True, pack=1
        )
    return pairs


@triton.jit
def level_tile(words, BITS: tl.constexpr, S: tl.constexpr, R: tl.constexpr):
    """words [4, 8, S, R / 8, L] → levels, bfloat16 [S, R, 32 L] in the order of `_codes._tile`."""
    L: tl.constexpr = words.shape[4]
    word = words.permute(2, 3, 1, 0, 4).reshape(S, R, 4, L, 1)
    pair = tl.broadcast_to(word, (S, R, 4, L, 4)) >> (4 * tl.arange(0, 4))
    both = tl.join(levels(pair & 15, BITS), levels((pair >> 16) & 15, BITS))
    if not WIDENED:
        both = both.to(tl.bfloat16)
    return both.reshape(S, R, 4, L, 2, 2, 2).permute(0, 1, 3, 4, 2, 5, 6).reshape(S, R, 32 * L)


# -- tiles of weights ------------------------------------------------------------------------------------------------


@triton.jit
def _plane(ptr, at, ok):
    """Entries of a plane, 0 where they are not ok; None where there is no plane."""
    found = None
    if ptr is not None:
        found = tl.load(ptr + at, mask=ok, other=0)
    return found


@triton.jit
def _spread(groups, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, groups] → [ROWS, COLUMNS]."""
    G: tl.constexpr = groups.shape[1]
    return tl.reshape(tl.broadcast_to(groups[:, :, None], [ROWS, G, COLUMNS // G]), [ROWS, COLUMNS])


@triton.jit
def block_tile(w, row, row_ok, start, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """Weights start … start + COLUMNS − 1 of rows [ROWS] (int64) of planes w with K columns, float32; 0 where a row is
    not ok, and beyond K. start and COLUMNS are multiples of 32.
    """
    LOW: tl.constexpr = width(BITS)
    HIGH: tl.constexpr = high_bits(BITS)
    PER: tl.constexpr = 32 // LOW
    word = tl.arange(0, COLUMNS // PER)[None, :]
    ok = row_ok[:, None] & (start + word * PER < K)
    words = tl.load(w[0] + row[:, None] * (K // PER) + start // PER + word, mask=ok, other=0)
    shift = (tl.arange(0, PER) * LOW)[None, None, :]
    code = tl.reshape((words[:, :, None] >> shift) & ((1 << LOW) - 1), [ROWS, COLUMNS])
    if HIGH > 0:
        ABOVE: tl.constexpr = 32 // HIGH
        word = tl.arange(0, COLUMNS // ABOVE)[None, :]
        ok = row_ok[:, None] & (start + word * ABOVE < K)
        words = tl.load(w[1] + row[:, None] * (K // ABOVE) + start // ABOVE + word, mask=ok, other=0)
        i = tl.arange(0, ABOVE)
        place = i % PER // (PER // 2) * 16 + (i // PER * (PER // 2) + i % (PER // 2)) * HIGH
        upper = (words[:, :, None] >> place[None, None, :]) & ((1 << HIGH) - 1)
        code |= tl.reshape(upper, [ROWS, COLUMNS]) << LOW
    GS: tl.constexpr = group_of(BITS)
    group = start // GS + tl.arange(0, COLUMNS // GS)[None, :]
    ok = row_ok[:, None] & (group < K // GS)
    at = row[:, None] * (K // GS)
    sub = _plane(w[2], at // sub_groups(BITS) + group // sub_groups(BITS), ok)
    more = _plane(w[3], at // more_groups(BITS) + group // more_groups(BITS), ok)
    top = _plane(w[4], at // top_groups(BITS) + group // top_groups(BITS), ok)
    scale, bias = block_scales(sub, more, top, group, BITS)
    if has_levels(BITS):
        y = levels(code, BITS) * _spread(scale, ROWS, COLUMNS)
    else:
        # the center first, as the definition does: with a bias instead the product would be rounded otherwise
        number = (code | 0x4B000000).to(tl.float32, bitcast=True)
        if has_biases(BITS):
            y = (number - 8388608.0) * _spread(scale, ROWS, COLUMNS) + _spread(bias, ROWS, COLUMNS)
        else:
            y = (number - (8388608.0 + _center(BITS))) * _spread(scale, ROWS, COLUMNS)
    return y
