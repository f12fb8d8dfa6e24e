"""What the attention kernels share: an online softmax over the tiles of a cache that a program sees.

A program takes rows that share a key-value head: GROUP query heads of as many tokens as fill its tile, so a decode step
of one token still reads every key once for the whole group. Keys come as one or two parts, which may be arrays of their
own: a head of 192 is 128 + 64; latent heads have a latent, which is the value too, and a rotated part.
"""

from collections import namedtuple

import triton
import triton.language as tl

from penstock.backends.cuda._combine import gated
from penstock.backends.cuda._launch import WIDENED
from penstock.backends.cuda._rows import rounded

CONTIGUOUS, PAGE_PER_TILE, PAGE_PER_ROW = (tl.constexpr(n) for n in range(3))  # how a cache is addressed
# Keys: one array; a latent and a rotated part, both for all heads; a part of each head and a rotated one for all heads.
WHOLE, LATENT, EXPANDED = (tl.constexpr(n) for n in range(3))

# Arrays of a launch. gate: None or like out; out and stats: with SPLIT of every split, else out twice; starts: None, or
# where the runs of the sequences start (ops/ragged.py).
Arrays = namedtuple("Arrays", "q q2 k k2 v table gate out stats starts sinks")
# Numbers of a model: key-value heads, rows of a page, factor of the scores in powers of two.
Heads = namedtuple("Heads", "heads page scale")
# What a kernel is compiled for: widths W of a key, W2 of its second part and WV of a value, each up to a power of two
# B, B2, BV (BV less: a block of columns); M rows and N positions of a tile. COUNTED: number is an int (0), an array of
# one (1) or one of each sequence (2). EXACT: weights of the values stay float32. ONE: one token of each sequence.
# BY_ROW: one row of a run, and its part of a split by the row.
Constants = namedtuple("Constants", "GROUP W W2 WV B B2 BV M N COUNTED KEYS LAYOUT WINDOWED SPLIT EXACT ONE BY_ROW")
# The part of one program: first column of its values, key-value head, split, tile of rows, sequence and its first row.
Program = namedtuple("Program", "block head split tile b first")
# What the rows of a program see: positions low … high − 1, a row at `at` those up to it and inside the window.
View = namedtuple("View", "q q2 k k2 v table entries pages window low high at")


@triton.jit
def dot(a, b, acc):
    """acc + a · b with float32 sums; float32 operands exactly."""
    if WIDENED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _load(pointers, row_ok, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr):
    """A tile whose columns end at WIDTH; rows that are not ok are 0 if they are to be checked."""
    if WIDTH == BLOCK:
        if CHECKED:
            x = tl.load(pointers, mask=row_ok[:, None], other=0.0)
        else:
            x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=row_ok[:, None] & (column < WIDTH)[None, :], other=0.0)
    return x


@triton.jit
def _prefetch_rows(ptr, start, rows, stride, WIDTH: tl.constexpr, N: tl.constexpr):
    """Ask for WIDTH numbers of up to N of `rows` rows, `stride` apart, from row `start` on, to come to the L2 cache.
    What they hold may still change.
    """
    LINES: tl.constexpr = triton.next_power_of_2((WIDTH * ptr.dtype.element_ty.primitive_bitwidth + 1023) // 1024)
    EACH: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
    row = tl.minimum(tl.arange(0, N), rows - 1)
    column = tl.minimum(tl.arange(0, LINES) * EACH, WIDTH - 1)
    pointers = ptr + (start + row)[:, None] * stride + column[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def program_of(T, heads, splits, tiles, C: tl.constexpr):
    """The program's part of the grid (B · tiles · splits · heads · ⌈WV / BV⌉,): late tiles, which see most, first."""
    pid = tl.program_id(0)
    block = 0
    if C.BV < C.WV:  # blocks of columns of the values
        block = (pid % ((C.WV + C.BV - 1) // C.BV)) * C.BV
        pid = pid // ((C.WV + C.BV - 1) // C.BV)
    head = pid % heads
    pid = pid // heads
    split = pid % splits
    pid = pid // splits
    tile = tiles - 1 - pid % tiles
    b = pid // tiles
    return Program(block, head, split, tile, b, b.to(tl.int64) * T)


@triton.jit
def prefetch_first_tile(a, p, number, entries, pages, capacity, shift, window, h, C: tl.constexpr):
    """Have the keys and values of the program's first tile brought to the L2 cache, for one token of each sequence.

    Of what the kernel before may write it reads number and table, which its caller reads again after the wait.
    """
    if C.COUNTED > 0 and C.LAYOUT == PAGE_PER_TILE:
        width: tl.constexpr = C.W + C.W2 if C.KEYS == WHOLE else C.W
        known = tl.load(number + p.b * (C.COUNTED - 1)) + shift + 1
        first = p.split * C.N
        if C.WINDOWED:
            first += tl.maximum(known - window, 0) // C.N * C.N
        if (known <= capacity) & (first < known):
            page_of = tl.load(a.table + p.b.to(tl.int64) * entries + first // h.page)
            if (page_of >= 0) & (page_of < pages):
                start = page_of.to(tl.int64) * h.page + first % h.page
                rows = tl.minimum(known - first, C.N)
                _prefetch_rows(a.k + p.head * width, start, rows, h.heads * width, width, C.N)
                if C.KEYS == LATENT:
                    _prefetch_rows(a.k2, start, rows, C.W2, C.W2, C.N)
                else:
                    _prefetch_rows(a.v + p.head * C.WV, start, rows, h.heads * C.WV, C.WV, C.N)


@triton.jit
def _rows_of(p, T, heads, C: tl.constexpr):
    """The rows of a program, which of them there are, and the line of each in [rows · H]."""
    row = p.tile * C.M + tl.arange(0, C.M)
    live = row < T * C.GROUP
    first_line = p.first * (heads * C.GROUP) + p.head * C.GROUP
    return row, live, first_line + row // C.GROUP * (heads * C.GROUP) + row % C.GROUP


@triton.jit
def _view_of(a, p, number, T, entries, pages, capacity, shift, window, splits, h, C: tl.constexpr):
    """What the program sees, the page and the position of its first tile, and where its first and last row stand."""
    width: tl.constexpr = C.W + C.W2 if C.KEYS == WHOLE else C.W
    table = a.table + p.b.to(tl.int64) * entries
    # All loads that do not wait for another: where the row stands, its first page, the row.
    if C.COUNTED > 0:
        number = tl.load(number + p.b * (C.COUNTED - 1))
    entry = tl.full([], 0, tl.int32)
    if C.LAYOUT == PAGE_PER_TILE and not C.WINDOWED:
        entry = tl.load(table + tl.minimum(p.split * C.N // h.page, entries - 1))
    row, live, line = _rows_of(p, T, h.heads, C)
    d = tl.arange(0, C.B)
    d2 = tl.arange(0, C.B2)
    q = _load(a.q + line[:, None] * width + d[None, :], live, d, C.W, C.B, True)
    q2 = q
    k2 = a.k2
    if C.W2 > 0:
        if C.KEYS != WHOLE:
            q2 = _load(a.q2 + line[:, None] * C.W2 + d2[None, :], live, d2, C.W2, C.B2, True)
        else:
            q2 = _load(a.q + C.W + line[:, None] * width + d2[None, :], live, d2, C.W2, C.B2, True)
            k2 = a.k + p.head * width + C.W
    base = tl.minimum(tl.maximum(number, -(2**30)) + shift, capacity - T)
    earliest = base + (p.tile * C.M) // C.GROUP
    latest = base + tl.minimum((p.tile * C.M + C.M - 1) // C.GROUP, T - 1)
    low = 0
    begin = p.split * C.N
    if C.WINDOWED:
        low = tl.maximum(earliest - window + 1, 0)
        begin += low // C.N * C.N
    high = tl.maximum(latest + 1, 0)
    k, v = a.k + p.head * width, a.v + (p.head * C.WV + p.block)
    at = base + row // C.GROUP
    return View(q, q2, k, k2, v, table, entries, pages, window, low, high, at), entry, begin, earliest, latest


@triton.jit
def _attend_tile(view, entry, first, acc, top, total, h, C: tl.constexpr, MASKED: tl.constexpr):
    """One tile of N positions from `first` on, merged into acc, top and total (in powers of two)."""
    n = tl.arange(0, C.N)
    position = first + n
    hidden = 0.0  # added to the scores of a whole tile
    high = view.high
    if C.LAYOUT == PAGE_PER_TILE:
        page_ok = (entry >= 0) & (entry < view.pages)
        hidden = tl.where(page_ok, 0.0, float("-inf"))
        high = tl.where(page_ok, high, view.low)
    row_ok = (position >= view.low) & (position < high)
    if C.LAYOUT == PAGE_PER_ROW:
        page_of = tl.load(view.table + position // h.page, mask=row_ok, other=-1)
        row_ok = row_ok & (page_of >= 0) & (page_of < view.pages)
        # Not the row itself: Triton would take it for a multiple of 16 like `page`, and load 16 bytes at odd addresses.
        start = ((page_of - position // h.page).to(tl.int64) * h.page + first)[:, None]
    elif C.LAYOUT == PAGE_PER_TILE:
        start = entry.to(tl.int64) * h.page + first % h.page
    else:
        start = entry.to(tl.int64) + first
    row = n[:, None]
    CHECKED: tl.constexpr = MASKED or C.LAYOUT != CONTIGUOUS

    k_stride = h.heads * (C.W + C.W2 if C.KEYS == WHOLE else C.W)
    d = tl.arange(0, C.B)
    k = _load(view.k + start * k_stride + row * k_stride + d[None, :], row_ok, d, C.W, C.B, CHECKED)
    scores = dot(view.q, tl.trans(k), tl.zeros([C.M, C.N], tl.float32))
    if C.W2 > 0:
        k2_stride = h.heads * (C.W + C.W2) if C.KEYS == WHOLE else C.W2
        d2 = tl.arange(0, C.B2)
        k2 = _load(view.k2 + start * k2_stride + row * k2_stride + d2[None, :], row_ok, d2, C.W2, C.B2, CHECKED)
        scores = dot(view.q2, tl.trans(k2), scores)
    if MASKED:
        seen = row_ok[None, :] & (position[None, :] <= view.at[:, None])
        if C.WINDOWED:
            seen = seen & (position[None, :] > view.at[:, None] - view.window)
        scores = tl.where(seen, scores, float("-inf"))
    elif C.LAYOUT == PAGE_PER_ROW:
        scores = tl.where(row_ok[None, :], scores, float("-inf"))

    # The scale is positive, so it may follow the maximum: then a score takes one fused multiply-add. The maximum is
    # kept as a rounded product: from the exact one `keep` would differ from 1 by 1e-7 in every tile that leaves it.
    highest = tl.maximum(top, tl.max(scores, axis=1) * h.scale + hidden)
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # 0: a row that has seen nothing yet
    weights = tl.exp2(scores * h.scale - (shift - hidden)[:, None])
    keep = tl.exp2(top - shift)
    total = total * keep + tl.sum(weights, axis=1)
    acc = acc * keep[:, None]
    if C.KEYS == LATENT:
        v = k
    else:
        dv = tl.arange(0, C.BV)
        v_stride = h.heads * C.WV
        v = _load(view.v + start * v_stride + row * v_stride + dv[None, :], row_ok, dv, min(C.WV, C.BV), C.BV, CHECKED)
    if C.EXACT:
        v = v.to(tl.float32)
    acc = dot(rounded(weights, v.dtype), v, acc)
    return acc, highest, total


@triton.jit
def _attend_tiles(view, begin, end, step, entry, acc, top, total, h, C: tl.constexpr, MASKED: tl.constexpr):
    """Every step-th tile from `begin` up to `end`; entry: the page of the first of them, then of the one behind."""
    for first in range(begin, end, step):
        following = entry
        if C.LAYOUT == PAGE_PER_TILE:  # a tile ahead, so that its latency is not in the way of the tile's own loads
            following = tl.load(view.table + tl.minimum((first + step) // h.page, view.entries - 1))
        acc, top, total = _attend_tile(view, entry, first, acc, top, total, h, C, MASKED)
        entry = following
    return acc, top, total, entry


@triton.jit
def _sinks_of(a, p, C: tl.constexpr):
    """Maximum and denominator that rows begin with: with sinks, in the first split, those of one score, no value."""
    top = tl.full([C.M], float("-inf"), tl.float32)
    total = tl.zeros([C.M], tl.float32)
    if a.sinks is not None:
        head = p.head * C.GROUP + (p.tile * C.M + tl.arange(0, C.M)) % C.GROUP
        first = p.split == 0
        top = tl.where(first, tl.load(a.sinks + head) * 1.4426950408889634, top)  # in powers of two
        total = tl.where(first, 1.0, total)
    return top, total


@triton.jit
def _attend_view(view, entry, begin, earliest, latest, splits, top, total, h, C: tl.constexpr):
    """Sum, maximum and denominator of every row over all tiles of its split, from the given ones on."""
    step = splits * C.N
    left = begin
    right = begin
    if not C.ONE:  # tiles from left to right are in sight of every row; one token wants the registers of one loop
        if C.WINDOWED:
            left = tl.minimum(tl.cdiv(tl.maximum(latest - view.window + 1, 0), C.N) * C.N, view.high)
            left = begin + tl.cdiv(tl.maximum(left - begin, 0), step) * step
        right = tl.maximum(tl.minimum(earliest + 1, view.high), 0) // C.N * C.N
        right = left + tl.cdiv(tl.maximum(right - left, 0), step) * step
    acc = tl.zeros([C.M, C.BV], tl.float32)
    if C.WINDOWED and C.LAYOUT == PAGE_PER_TILE:
        entry = tl.load(view.table + tl.minimum(begin // h.page, view.entries - 1))
    if C.WINDOWED and not C.ONE:
        acc, top, total, entry = _attend_tiles(view, begin, left, step, entry, acc, top, total, h, C, True)
    if not C.ONE:
        acc, top, total, entry = _attend_tiles(view, left, right, step, entry, acc, top, total, h, C, False)
    acc, top, total, entry = _attend_tiles(view, right, view.high, step, entry, acc, top, total, h, C, True)
    return acc, top, total


@triton.jit
def _part_of(p, T, C: tl.constexpr):
    """Where a split leaves its part: by sequences, wherever their rows are, unless programs are of rows."""
    first = p.first
    if not C.BY_ROW:
        first = p.b.to(tl.int64) * T
    return Program(p.block, p.head, p.split, p.tile, p.b, first)


@triton.jit
def store_zeros(a, p, T, h, C: tl.constexpr):
    """0 as the result of a program's rows."""
    _, live, line = _rows_of(p, T, h.heads, C)
    dv = p.block + tl.arange(0, C.BV)
    zero = tl.zeros([C.M, C.BV], a.out.dtype.element_ty)
    tl.store(a.out + line[:, None] * C.WV + dv[None, :], zero, mask=live[:, None] & (dv < C.WV)[None, :])


@triton.jit
def _store_nothing(a, p, T, splits, h, C: tl.constexpr):
    """The maximum and denominator of a split in which no position is in sight."""
    _, live, line = _rows_of(_part_of(p, T, C), T, h.heads, C)
    line = line * splits + p.split
    tl.store(a.stats + line * 2, tl.full([C.M], float("-inf"), tl.float32), mask=live)
    tl.store(a.stats + line * 2 + 1, tl.zeros([C.M], tl.float32), mask=live)


@triton.jit
def _store_rows(a, p, acc, top, total, T, splits, h, C: tl.constexpr):
    """The result of a program's rows, or with SPLIT its part of it."""
    # The rows once more, from a number that only we know to be 0: those of above would be kept in registers, and spill.
    tile = Program(p.block, p.head, p.split, p.tile + tl.minimum(splits, 0), p.b, p.first)
    if C.SPLIT:
        tile = _part_of(tile, T, C)
    _, live, line = _rows_of(tile, T, h.heads, C)
    dv = p.block + tl.arange(0, C.BV)
    if C.SPLIT:
        line = line * splits + p.split
        tl.store(a.stats + line * 2, top, mask=live)
        tl.store(a.stats + line * 2 + 1, total, mask=live)
    place = line[:, None] * C.WV + dv[None, :]
    ok = live[:, None] & (dv < C.WV)[None, :]
    if not C.SPLIT:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if a.gate is not None:
            acc = gated(acc, a.gate, place, ok)
    tl.store(a.out + place, rounded(acc, a.out.dtype.element_ty), mask=ok)


@triton.jit
def attend_rows(a, p, number, T, entries, pages, capacity, shift, window, splits, h, C: tl.constexpr):
    """All that a program does once the kernel before has ended."""
    seen = _view_of(a, p, number, T, entries, pages, capacity, shift, window, splits, h, C)
    view, entry, begin, earliest, latest = seen
    if C.SPLIT:
        high = view.high
        if begin >= high:
            _store_nothing(a, p, T, splits, h, C)
            return
    top, total = _sinks_of(a, p, C)
    acc, top, total = _attend_view(view, entry, begin, earliest, latest, splits, top, total, h, C)
    _store_rows(a, p, acc, top, total, T, splits, h, C)
