"""The kernel of `_attend`: softmax attention with an online softmax over a cache.

A program takes rows that share a key-value head: GROUP query heads of as many tokens as fill its tile, so a decode step
of one token still reads every key once for the whole group. Keys come as one or two parts, which may be arrays of their
own: a head of 192 is 128 + 64; latent heads have a latent, which is the value too, and a rotated part.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.backends.cuda._combine import gated
from penstock.backends.cuda._launch import WIDENED
from penstock.backends.cuda._rows import rounded

CONTIGUOUS, PAGE_PER_TILE, PAGE_PER_ROW = (tl.constexpr(n) for n in range(3))  # how a cache is addressed
# Keys: one array; a latent and a rotated part, both for all heads; a part of each head and a rotated one for all heads.
WHOLE, LATENT, EXPANDED = (tl.constexpr(n) for n in range(3))


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
def _attend_tile(
    q,
    q2,
    acc,
    top,
    total,
    k_ptr,
    k2_ptr,
    v_ptr,
    table_ptr,
    entry,
    first,
    low,
    high,
    at,
    page,
    pages,
    heads,
    scale,
    window,
    W: tl.constexpr,
    W2: tl.constexpr,
    WV: tl.constexpr,
    B: tl.constexpr,
    B2: tl.constexpr,
    BV: tl.constexpr,
    N: tl.constexpr,
    KEYS: tl.constexpr,
    LAYOUT: tl.constexpr,
    WINDOWED: tl.constexpr,
    EXACT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of N positions from `first` on, merged into acc, top and total (in powers of two)."""
    n = tl.arange(0, N)
    position = first + n
    hidden = 0.0  # added to the scores of a whole tile
    if LAYOUT == PAGE_PER_TILE:
        page_ok = (entry >= 0) & (entry < pages)
        hidden = tl.where(page_ok, 0.0, float("-inf"))
        high = tl.where(page_ok, high, low)
    row_ok = (position >= low) & (position < high)
    if LAYOUT == PAGE_PER_ROW:
        page_of = tl.load(table_ptr + position // page, mask=row_ok, other=-1)
        row_ok = row_ok & (page_of >= 0) & (page_of < pages)
        # Not the row itself: Triton would take it for a multiple of 16 like `page`, and load 16 bytes at odd addresses.
        start = ((page_of - position // page).to(tl.int64) * page + first)[:, None]
    elif LAYOUT == PAGE_PER_TILE:
        start = entry.to(tl.int64) * page + first % page
    else:
        start = entry.to(tl.int64) + first
    row = n[:, None]
    CHECKED: tl.constexpr = MASKED or LAYOUT != CONTIGUOUS

    k_stride = heads * (W + W2 if KEYS == WHOLE else W)
    d = tl.arange(0, B)
    k = _load(k_ptr + start * k_stride + row * k_stride + d[None, :], row_ok, d, W, B, CHECKED)
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], N], tl.float32))
    if W2 > 0:
        k2_stride = heads * (W + W2) if KEYS == WHOLE else W2
        d2 = tl.arange(0, B2)
        k2 = _load(k2_ptr + start * k2_stride + row * k2_stride + d2[None, :], row_ok, d2, W2, B2, CHECKED)
        scores = dot(q2, tl.trans(k2), scores)
    if MASKED:
        seen = row_ok[None, :] & (position[None, :] <= at[:, None])
        if WINDOWED:
            seen = seen & (position[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    elif LAYOUT == PAGE_PER_ROW:
        scores = tl.where(row_ok[None, :], scores, float("-inf"))

    # The scale is positive, so it may follow the maximum: then a score takes one fused multiply-add. The maximum is
    # kept as a rounded product: from the exact one `keep` would differ from 1 by 1e-7 in every tile that leaves it.
    highest = tl.maximum(top, tl.max(scores, axis=1) * scale + hidden)
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # 0: a row that has seen nothing yet
    weights = tl.exp2(scores * scale - (shift - hidden)[:, None])
    keep = tl.exp2(top - shift)
    total = total * keep + tl.sum(weights, axis=1)
    acc = acc * keep[:, None]
    if KEYS == LATENT:
        v = k
    else:
        dv = tl.arange(0, BV)
        v_stride = heads * WV
        v = _load(v_ptr + start * v_stride + row * v_stride + dv[None, :], row_ok, dv, min(WV, BV), BV, CHECKED)
    if EXACT:
        v = v.to(tl.float32)
    acc = dot(rounded(weights, v.dtype), v, acc)
    return acc, highest, total


@triton.jit
def _attend_tiles(
    begin,
    end,
    step,
    entry,
    q,
    q2,
    acc,
    top,
    total,
    k_ptr,
    k2_ptr,
    v_ptr,
    table_ptr,
    entries,
    low,
    high,
    at,
    page,
    pages,
    heads,
    scale,
    window,
    W: tl.constexpr,
    W2: tl.constexpr,
    WV: tl.constexpr,
    B: tl.constexpr,
    B2: tl.constexpr,
    BV: tl.constexpr,
    N: tl.constexpr,
    KEYS: tl.constexpr,
    LAYOUT: tl.constexpr,
    WINDOWED: tl.constexpr,
    EXACT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Every step-th tile from `begin` up to `end`; entry: the page of the first of them, then of the one behind."""
    for first in range(begin, end, step):
        following = entry
        if LAYOUT == PAGE_PER_TILE:  # a tile ahead, so that its latency is not in the way of the tile's own loads
            following = tl.load(table_ptr + tl.minimum((first + step) // page, entries - 1))
        acc, top, total = _attend_tile(
            q, q2, acc, top, total, k_ptr, k2_ptr, v_ptr, table_ptr, entry, first, low, high, at, page, pages, heads,
            scale, window, W, W2, WV, B, B2, BV, N, KEYS, LAYOUT, WINDOWED, EXACT, MASKED,
        )  # fmt: skip
        entry = following
    return acc, top, total, entry


# attend    y[b, t, h] = Σ_p softmax_p(scale · q[b, t, h] · k[p]) · v[p] over p ≤ at = number[b] + shift + t and, with
#           a window, p > at − window, times sigmoid(gate[b, t, h]) if there is one; with SPLIT the unnormalised sum,
#           its maximum and its denominator per split
# shapes    q [B, T, H, W + W2], k [rows, heads, W + W2], v [rows, heads, WV], out [B, T, H, WV], H = heads · GROUP;
#           LATENT: q [.., W], q2 [.., W2], k [rows, W], k2 [rows, W2], v = k; EXPANDED: the same q, q2 and k2 with
#           k [rows, heads, W] and a v. table int32 [B, entries] of pages of
#           `page` rows; number an int, or int32 without axes or [B]. Split: out float32 [B·T·H, splits, WV],
#           stats float32 [B·T·H, splits, 2]
# grid      (B · tiles · splits · heads · ⌈WV / BV⌉,): M rows (GROUP heads of M / GROUP tokens) over every tile of N
#           positions in `splits`, for BV columns of the values. Late tiles of rows, which see most, start first
# bytes     keys and values in sight once per tile of M rows; q and out once. Prefill is bound by the matrix rate
# limits    M · BV and N · (B + B2 + BV) have to fit registers and shared memory (`_plan`); BV divides WV if it is less;
#           scale > 0; pages out of range and positions outside 0 … capacity − 1 read nothing, a row that sees nothing
#           is 0; ONE: T is 1
#
# PDL: it starts while the kernel before ends. Of what that one may write it then reads number and table, only to have
# keys and values brought to the L2 cache; after the wait it reads all of them again.
@triton.jit(do_not_specialize=["number", "T", "entries", "pages", "capacity", "shift", "window", "tiles", "splits"])
def attend_kernel(
    q_ptr,
    q2_ptr,
    k_ptr,
    k2_ptr,
    v_ptr,
    table_ptr,
    number,
    gate_ptr,
    out_ptr,
    stats_ptr,
    T,
    heads,
    entries,
    page,
    pages,
    capacity,
    shift,
    scale,
    window,
    tiles,
    splits,
    GROUP: tl.constexpr,
    W: tl.constexpr,
    W2: tl.constexpr,
    WV: tl.constexpr,
    B: tl.constexpr,
    B2: tl.constexpr,
    BV: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    COUNTED: tl.constexpr,
    KEYS: tl.constexpr,
    LAYOUT: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr,
    EXACT: tl.constexpr,
    ONE: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    block = 0
    if BV < WV:  # blocks of columns of the values
        block = (pid % ((WV + BV - 1) // BV)) * BV
        pid = pid // ((WV + BV - 1) // BV)
    head = pid % heads
    pid = pid // heads
    split = pid % splits
    pid = pid // splits
    tile = tiles - 1 - pid % tiles
    b = pid // tiles

    width: tl.constexpr = W + W2 if KEYS == WHOLE else W
    table_ptr += b.to(tl.int64) * entries
    if PDL:
        if ONE and COUNTED > 0 and LAYOUT == PAGE_PER_TILE:
            known = tl.load(number + b * (COUNTED - 1)) + shift + 1
            first = split * N
            if WINDOWED:
                first += tl.maximum(known - window, 0) // N * N
            if (known <= capacity) & (first < known):
                page_of = tl.load(table_ptr + first // page)
                if (page_of >= 0) & (page_of < pages):
                    start = page_of.to(tl.int64) * page + first % page
                    rows = tl.minimum(known - first, N)
                    _prefetch_rows(k_ptr + head * width, start, rows, heads * width, width, N)
                    if KEYS == LATENT:
                        _prefetch_rows(k2_ptr, start, rows, W2, W2, N)
                    else:
                        _prefetch_rows(v_ptr + head * WV, start, rows, heads * WV, WV, N)
        gdc_wait()
        gdc_launch_dependents()

    # All loads that do not wait for another: where the row stands, its first page, the row.
    if COUNTED > 0:
        number = tl.load(number + b * (COUNTED - 1))
    entry = tl.full([], 0, tl.int32)
    if LAYOUT == PAGE_PER_TILE and not WINDOWED:
        entry = tl.load(table_ptr + tl.minimum(split * N // page, entries - 1))
    row = tile * M + tl.arange(0, M)
    t = row // GROUP
    live = row < T * GROUP
    first_line = b.to(tl.int64) * T * (heads * GROUP) + head * GROUP
    line = first_line + t * (heads * GROUP) + row % GROUP
    d = tl.arange(0, B)
    d2 = tl.arange(0, B2)
    q = _load(q_ptr + line[:, None] * width + d[None, :], live, d, W, B, True)
    q2 = q
    if W2 > 0:
        if KEYS != WHOLE:
            q2 = _load(q2_ptr + line[:, None] * W2 + d2[None, :], live, d2, W2, B2, True)
        else:
            q2 = _load(q_ptr + W + line[:, None] * width + d2[None, :], live, d2, W2, B2, True)
            k2_ptr = k_ptr + head * width + W
    k_ptr += head * width
    v_ptr += head * WV + block

    # Positions low … high − 1 are in sight of some row; those of tiles from `left` to `right` of every row.
    base = tl.minimum(tl.maximum(number, -(2**30)) + shift, capacity - T)
    at = base + t
    earliest = base + (tile * M) // GROUP
    latest = base + tl.minimum((tile * M + M - 1) // GROUP, T - 1)
    high = tl.maximum(latest + 1, 0)
    low = 0
    begin = split * N
    step = splits * N
    if WINDOWED:
        low = tl.maximum(earliest - window + 1, 0)
        begin += low // N * N
    left = begin
    right = begin
    if not ONE:  # for one token the code and registers of one loop matter more than masks
        if WINDOWED:
            left = tl.minimum(tl.cdiv(tl.maximum(latest - window + 1, 0), N) * N, high)
            left = begin + tl.cdiv(tl.maximum(left - begin, 0), step) * step
        right = tl.maximum(tl.minimum(earliest + 1, high), 0) // N * N
        right = left + tl.cdiv(tl.maximum(right - left, 0), step) * step
    if SPLIT:
        line = line * splits + split
        if begin >= high:
            tl.store(stats_ptr + line * 2, tl.full([M], float("-inf"), tl.float32), mask=live)
            tl.store(stats_ptr + line * 2 + 1, tl.zeros([M], tl.float32), mask=live)
            return

    acc = tl.zeros([M, BV], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if WINDOWED and LAYOUT == PAGE_PER_TILE:
        entry = tl.load(table_ptr + tl.minimum(begin // page, entries - 1))
    if WINDOWED and not ONE:
        acc, top, total, entry = _attend_tiles(
            begin, left, step, entry, q, q2, acc, top, total, k_ptr, k2_ptr, v_ptr, table_ptr, entries, low, high, at,
            page, pages, heads, scale, window, W, W2, WV, B, B2, BV, N, KEYS, LAYOUT, WINDOWED, EXACT, True,
        )  # fmt: skip
    if not ONE:
        acc, top, total, entry = _attend_tiles(
            left, right, step, entry, q, q2, acc, top, total, k_ptr, k2_ptr, v_ptr, table_ptr, entries, low, high, at,
            page, pages, heads, scale, window, W, W2, WV, B, B2, BV, N, KEYS, LAYOUT, WINDOWED, EXACT, False,
        )  # fmt: skip
    acc, top, total, entry = _attend_tiles(
        right, high, step, entry, q, q2, acc, top, total, k_ptr, k2_ptr, v_ptr, table_ptr, entries, low, high, at,
        page, pages, heads, scale, window, W, W2, WV, B, B2, BV, N, KEYS, LAYOUT, WINDOWED, EXACT, True,
    )  # fmt: skip

    # The rows once more, from a number that only we know to be 0: those of above would be kept in registers, and spill.
    row = tile * M + tl.minimum(splits, 0) + tl.arange(0, M)
    live = row < T * GROUP
    line = first_line + row // GROUP * (heads * GROUP) + row % GROUP
    dv = block + tl.arange(0, BV)
    if SPLIT:
        line = line * splits + split
        tl.store(stats_ptr + line * 2, top, mask=live)
        tl.store(stats_ptr + line * 2 + 1, total, mask=live)
    place = line[:, None] * WV + dv[None, :]
    ok = live[:, None] & (dv < WV)[None, :]
    if not SPLIT:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if gate_ptr is not None:
            acc = gated(acc, gate_ptr, place, ok)
    tl.store(out_ptr + place, rounded(acc, out_ptr.dtype.element_ty), mask=ok)
