"""Rows into caches on CUDA: one kernel for both caches of a layer, in every layout of ops/cache.py.

A slot is a page that holds a whole sequence, and a contiguous cache is one page without a table.
"""

import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda._launch import pdl_options, wait_for_previous
from penstock.ops.op import kernel


# append    row t of a and b to row table[s * stride + p // page] * page + p % page of their caches; without a table p
# shapes    sources [T, wide], caches [pages * page, wide] of one dtype, `wide` for a and b on their own; table int32,
#           `entries` for each of its `lines`; p = positions[t] if EACH, else start + positions[0] + t (none: 0);
#           s = sequence[t], or t where there is none
# grid      (ceil(T / ROWS), blocks of a + blocks of b): a program has BLOCK columns of ROWS rows of one of the two
# bytes     sources in, the same out
# limits    positions in int32; positions and sequences outside of the table, pages outside of the cache are skipped
@triton.jit(do_not_specialize=["T", "start", "lines"])
def _append_kernel(
    a_ptr, b_ptr, a_cache_ptr, b_cache_ptr, positions_ptr, table_ptr, sequence_ptr,
    T, start, lines, a_wide, b_wide, page, pages, entries, stride,
    EACH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = t < T
    if EACH:
        p = tl.load(positions_ptr + t, mask=there, other=-1)
    else:
        p = t.to(tl.int32) + start
        if positions_ptr is not None:
            p += tl.load(positions_ptr)
    there &= (p >= 0) & (p // page < entries)
    row = p.to(tl.int64)
    s = t
    if sequence_ptr is not None:
        s = tl.load(sequence_ptr + t, mask=there, other=-1).to(tl.int64)
        there &= (s >= 0) & (s < lines)
    if table_ptr is not None:
        held = tl.load(table_ptr + s * stride + p // page, mask=there, other=-1).to(tl.int64)
        there &= (held >= 0) & (held < pages)
        row = held * page + p % page
    part = tl.program_id(1)
    blocks = tl.cdiv(a_wide, BLOCK)
    if part < blocks:
        _copy(a_ptr, a_cache_ptr, t, row, there, part, a_wide, BLOCK)
    else:
        _copy(b_ptr, b_cache_ptr, t, row, there, part - blocks, b_wide, BLOCK)


@triton.jit
def _copy(source_ptr, cache_ptr, t, row, there, part, wide, BLOCK: tl.constexpr):
    column = part * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = there[:, None] & (column < wide)
    x = tl.load(source_ptr + t[:, None] * wide + column, mask=live)
    tl.store(cache_ptr + row[:, None] * wide + column, x, mask=live)


def _append(a, b, a_cache, b_cache, positions, slots, block_table, sequence=None) -> None:
    T = 1 if a.ndim == 1 else a.shape[0]
    if T == 0:
        return
    assert a.is_contiguous() and b.is_contiguous() and a_cache.is_contiguous() and b_cache.is_contiguous()
    table = slots if slots is not None else block_table
    page = a_cache.shape[0 if table is None else 1]
    pages = a_cache.shape[0] if table is not None else 1
    entries = 1 if block_table is None else block_table.shape[-1]
    start, each = (positions, False) if isinstance(positions, int) else (0, positions.ndim == 1)
    a_wide, b_wide = a.numel() // T, b.numel() // T
    block = min(1024, triton.next_power_of_2(max(a_wide, b_wide)))
    rows = 1 if T < 64 else min(16, max(1, 2048 // block))
    _append_kernel[(triton.cdiv(T, rows), triton.cdiv(a_wide, block) + triton.cdiv(b_wide, block))](
        a, b, a_cache, b_cache, None if isinstance(positions, int) else positions, table, sequence,
        T, start, 0 if table is None else len(table), a_wide, b_wide, page, pages, entries, entries if each else 0,
        EACH=each, ROWS=rows, BLOCK=block, num_warps=max(1, min(4, rows * block // 512)), **pdl_options(),
    )  # fmt: skip


@kernel(ops.kv_cache_append, device="cuda")
def kv_cache_append(k_src, v_src, k_cache, v_cache, kv_start, slots):
    _append(k_src, v_src, k_cache, v_cache, kv_start, slots, None)


@kernel(ops.kv_pages_append, device="cuda")
def kv_pages_append(k_src, v_src, k_pages, v_pages, block_table, positions, sequence):
    _append(k_src, v_src, k_pages, v_pages, positions, None, block_table, sequence)


@kernel(ops.mla_cache_append, device="cuda")
def mla_cache_append(kv_lat, k_pe, latent_cache, rope_k_cache, pos, slots, block_table, sequence):
    _append(kv_lat, k_pe, latent_cache, rope_k_cache, pos, slots, block_table, sequence)
