"""Attention over latents, which are keys and values at once (MLA)."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.backends.cuda._attend_tile import Program, attend_rows, prefetch_first_tile, program_of


# latent    as `prefill`, with v = k, and number is that of the last token: token t is at number[b] − T + t. With starts
#           as `decode`
# shapes    q [B, T, H, W], q2 [B, T, H, W2], k [rows, W], k2 [rows, W2], out [B, T, H, W]; table, number, parts of a
#           split as `decode`.
# grid      as `prefill`, with heads = 1: all query heads are one group
# bytes     latents and rotated parts in sight once per tile of M rows; q, q2 and out once
# limits    those of `decode`
#
# PDL: as `decode`.
@triton.jit(do_not_specialize=["number", "T", "entries", "pages", "capacity", "window", "tiles", "splits"])
def latent_kernel(
    a, number, T, entries, pages, capacity, window, tiles, splits, h, C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    p = program_of(T, h.heads, splits, tiles, C)
    if PDL:
        if C.ONE:
            prefetch_first_tile(a, p, number, entries, pages, capacity, -T, window, h, C)
        gdc_wait()
        gdc_launch_dependents()
    if a.starts is not None:
        first = tl.load(a.starts + p.b)
        if tl.load(a.starts + p.b + 1) != first + 1:
            return
        p = Program(p.block, p.head, p.split, p.tile, p.b, first.to(tl.int64))
    attend_rows(a, p, number, T, entries, pages, capacity, -T, window, splits, h, C)
