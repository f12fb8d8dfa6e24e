"""Attention of the tokens of a chunk over keys and values of each head."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.backends.cuda._attend_tile import attend_rows, program_of


# prefill   as `decode` for T tokens of each sequence, of which token t is at number[b] + t
# shapes    those of `decode` with q and out [B, T, H, …]; EXPANDED: q [.., W], q2 [.., W2], k [rows, heads, W],
#           k2 [rows, W2] for all heads
# grid      as `decode`: a tile has GROUP heads of M / GROUP tokens. Late tiles, which see most, start first
# bytes     keys and values in sight once per tile of M rows; q and out once. It is bound by the matrix rate
# limits    those of `decode`
@triton.jit(do_not_specialize=["number", "T", "entries", "pages", "capacity", "window", "tiles", "splits"])
def prefill_kernel(
    a, number, T, entries, pages, capacity, window, tiles, splits, h, C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    p = program_of(T, h.heads, splits, tiles, C)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    attend_rows(a, p, number, T, entries, pages, capacity, 0, window, splits, h, C)
