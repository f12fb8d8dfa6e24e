"""Attention of one token of each sequence over its keys and values."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.backends.cuda._attend_tile import Program, attend_rows, prefetch_first_tile, program_of
from penstock.backends.cuda._runs import row_of


# decode    y[b, h] = Σ_p softmax_p(scale · q[b, h] · k[p]) · v[p] over p ≤ at = number[b] + shift and, with a window,
#           p > at − window, times sigmoid(gate[b, h]) if there is one; with SPLIT the unnormalised sum, its maximum and
#           its denominator per split. With starts, of the sequences whose run is one row: q, gate and out are there. If
#           SHORT, of the rows of runs of up to SHORT rows, each as if it were a sequence's only one
# shapes    q [B, H, W + W2], k [rows, heads, W + W2], v [rows, heads, WV], out [B, H, WV], H = heads · GROUP; table
#           int32 [B, entries] of pages of `page` rows; number an int, or int32 without axes or [B]. Split: out float32
#           [B · H, splits, WV], stats float32 [B · H, splits, 2]
# grid      (B · tiles · splits · heads · ⌈WV / BV⌉,), with SHORT so many times as many: M of the GROUP heads over every
#           tile of N positions in `splits`, for BV columns of the values
# bytes     keys and values in sight once per tile of M heads; q and out once
# limits    M · BV and N · (B + B2 + BV) have to fit registers and shared memory (`_plan`); BV divides WV if it is
#           less; scale > 0; pages out of range and positions outside 0 … capacity − 1 read nothing, a row that
#           sees nothing is 0
#
# PDL: it starts while the kernel before ends, and has its first tile brought to the L2 cache before it waits for it.
@triton.jit(do_not_specialize=["number", "entries", "pages", "capacity", "window", "splits"])
def decode_kernel(
    a, number, entries, pages, capacity, window, splits, h, C: tl.constexpr, SHIFT: tl.constexpr, SHORT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    p = program_of(1, h.heads, splits, tl.cdiv(C.GROUP, C.M), C)
    if PDL:
        if SHORT > 0:
            b, row, shift, there = row_of(a.starts, p.b, SHORT)
            if there:
                mine = Program(p.block, p.head, p.split, p.tile, b, row.to(tl.int64))
                prefetch_first_tile(a, mine, number, entries, pages, capacity, shift, window, h, C)
        else:
            prefetch_first_tile(a, p, number, entries, pages, capacity, SHIFT, window, h, C)
        gdc_wait()
        gdc_launch_dependents()
    if SHORT > 0:
        b, row, shift, there = row_of(a.starts, p.b, SHORT)
        if there == 0:
            return
        p = Program(p.block, p.head, p.split, p.tile, b, row.to(tl.int64))
        attend_rows(a, p, number, 1, entries, pages, capacity, shift, window, splits, h, C)
    else:
        if a.starts is not None:
            first = tl.load(a.starts + p.b)
            if tl.load(a.starts + p.b + 1) != first + 1:
                return
            p = Program(p.block, p.head, p.split, p.tile, p.b, first.to(tl.int64))
        attend_rows(a, p, number, 1, entries, pages, capacity, SHIFT, window, splits, h, C)
