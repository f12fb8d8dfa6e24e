"""Attention of the runs of several sequences."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.backends.cuda._attend_tile import Program, attend_rows, program_of, store_zeros


@triton.jit
def _run_of(starts, i, rows, B, C: tl.constexpr, SEQUENCES: tl.constexpr):
    """The sequence that has tile i, its tile of that number, its first row and how many it has.

    The tiles of sequence b start at ⌊starts[b] · GROUP / M⌋ + b, which is room for all that it has; behind the last
    sequence are those of the rows of none, up to `rows`.
    """
    n = tl.arange(0, SEQUENCES)
    end = tl.load(starts + 1 + n, mask=n < B, other=0)
    b = tl.sum(((n < B) & (end * C.GROUP // C.M + n + 1 <= i)).to(tl.int32), axis=0)
    first = tl.load(starts + b)
    T = tl.load(starts + b + 1, mask=b < B, other=rows) - first
    return b, i - (first * C.GROUP // C.M + b), first, T


# ragged    as `prefill` for the runs of B sequences: row t of T is at number[b] − T + t. Runs of up to `above` rows are
#           left as they are; 0 for those of more than `longest` rows that end at up to `up_to` positions, and for rows
#           of no sequence
# shapes    q, gate, out [rows, H, …]; starts int32 [B + 1], number int32 [B]; the rest as `prefill`
# grid      (tiles · heads · ⌈WV / BV⌉,), tiles = ⌊rows · GROUP / M⌋ + B + 1: a tile has M rows of one sequence, or is
#           empty
# bytes     as `prefill`
# limits    those of `decode`; SEQUENCES ≥ B; splits is 1
@triton.jit(
    do_not_specialize=[
        "number", "rows", "B", "above", "longest", "up_to", "entries", "pages", "capacity", "window", "tiles", "splits"
    ]
)  # fmt: skip
def ragged_kernel(
    a, number, rows, B, above, longest, up_to, entries, pages, capacity, window, tiles, splits, h, C: tl.constexpr,
    SEQUENCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    p = program_of(0, h.heads, splits, tiles, C)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    b, tile, first, T = _run_of(a.starts, p.tile, rows, B, C, SEQUENCES)
    if (tile < 0) | (tile * C.M >= T * C.GROUP) | ((b < B) & (above >= T)):
        return
    p = Program(p.block, p.head, p.split, tile, b, first.to(tl.int64))
    end = tl.load(number + b, mask=b < B, other=0)
    if (b == B) | ((longest < T) & (end <= up_to)):
        store_zeros(a, p, T, h, C)
        return
    attend_rows(a, p, number, T, entries, pages, capacity, -T, window, splits, h, C)
