"""Latent attention (MLA): products with a weight of each head (`_per_head`), attention over latents (`_attend`)."""

import torch
import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda import _prepare
from penstock.backends.cuda._attend import ALL_RUNS, Cache, attend, attend_runs, attend_tiles, cache_of
from penstock.backends.cuda._gemm import dense_copy
from penstock.backends.cuda._per_head import copies, per_head
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._runs import block_of
from penstock.backends.cuda.attention import split_rows
from penstock.ops.op import kernel


@kernel(ops.mla_split_q_kv, device="cuda")
def mla_split_q_kv(q_full, kv_pre, nope, kv_lora_rank, *, out):
    q_nope, q_pe, kv_lat, k_pe = out
    if q_full.shape[0]:
        split_rows(q_full, q_nope, q_pe, kv_pre, kv_lat, k_pe)


@kernel(ops.mla_prepare, device="cuda")
def mla_prepare(
    q, kv, kv_norm, inv_freq, positions, latent_pages, rope_pages, block_table, H, nope, mscale, eps, sequence, *, out
):
    if len(q):
        pages = (latent_pages, rope_pages)
        _prepare.mla_prepare(q, kv, kv_norm, inv_freq, positions, pages, block_table, mscale, eps, sequence, out)


# -- weights ---------------------------------------------------------------------------------------------------------


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """[(T,) H, K] as [T, H, K]."""
    return x.view(-1, *x.shape[-2:])


@kernel(ops.mla_q_prime, device="cuda")
def mla_q_prime(q_nope, kv_b, *, out):
    x, y = _tokens(q_nope), _tokens(out)
    if len(x) == 0:
        return
    if kv_b.ndim == 3:
        per_head(x, kv_b, y, kv_b.shape[1], 0, turned=False)
    else:
        per_head(x, kv_b, y, kv_b.shape[0] // x.shape[1], 0, turned=True)


@kernel(ops.mla_out_per_head, device="cuda")
def mla_out_per_head(v_combine, kv_b, nope, v_head_dim, *, out):
    x, y = _tokens(v_combine), _tokens(out)
    if len(x) == 0:
        return
    rows = kv_b.shape[1] if kv_b.ndim == 3 else kv_b.shape[0] // x.shape[1]
    per_head(x, kv_b, y, rows, rows - y.shape[2], turned=False)


def _expand(latent, kv_b, unembed_out, keys, values, count=None) -> None:
    if unembed_out is not None:
        per_head(latent, kv_b, keys, kv_b.shape[1], 0, turned=True, count=count)
        per_head(latent, unembed_out, values, unembed_out.shape[1], 0, turned=False, count=count)
        return
    rows = kv_b.shape[0] // keys.shape[1]
    if copies(latent, kv_b):
        kv_b = dense_copy(kv_b, latent.dtype)  # once for both
    per_head(latent, kv_b, keys, rows, 0, turned=False, count=count)
    per_head(latent, kv_b, values, rows, keys.shape[2], turned=False, count=count)


@kernel(ops.mla_expand, device="cuda")
def mla_expand(latent, kv_b, unembed_out, heads, nope, v_head_dim, *, out):
    if len(latent):
        _expand(latent, kv_b, unembed_out, *out)


# -- attention over latents ------------------------------------------------------------------------------------------


@kernel(ops.mla_sdpa, device="cuda")
def mla_sdpa(
    q_prime,
    q_pe,
    latent_cache,
    rope_k_cache,
    cache_len,
    softmax_scale,
    slots,
    block_table,
    starts,
    longest,
    up_to,
    *,
    out,
):
    q, pe = _tokens(q_prime), _tokens(q_pe)
    rows, H, R = q.shape
    if rows == 0:
        return
    if starts is not None:
        caches, cache = (latent_cache, rope_k_cache, latent_cache), cache_of(latent_cache, None, block_table)
        limits = {"longest": longest, "up_to": up_to}
        attend_runs(q, pe, *caches, out, cache, cache_len, starts, softmax_scale, None, (H, 1, R), **limits)
        return
    steps = isinstance(cache_len, int) or cache_len.ndim == 0
    B, T = (1, rows) if steps else (rows, 1)
    cache = cache_of(latent_cache, slots, block_table)
    caches = (latent_cache, rope_k_cache, latent_cache)
    attend(q, pe, *caches, out, cache, cache_len, -T, softmax_scale, None, (B, T, H, 1, R), steps)


# gather    y[p, :] = x[table[p // page] · page + p % page, :] of two arrays, 0 for p ≥ end or a page out of range. With
#           run (`long_runs`) the positions of its sequence, whose table is one of many; rows behind them stay
# shapes    x [pages · page, R], x2 [pages · page, R2], y [positions, R], y2 [positions, R2]; table int32 [n] or [B, n]
# grid      (⌈positions / ROWS⌉,)
# bytes     2 · positions · (R + R2) · itemsize
# limits    BLOCK = next power of two ≥ max(R, R2)
@triton.jit(do_not_specialize=["start", "T", "entries"])
def _gather_kernel(
    x_ptr, x2_ptr, table_ptr, run_ptr, y_ptr, y2_ptr, start, T, entries, positions, page, pages, R, R2,
    COUNTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if run_ptr is None:
        end = (tl.load(start) if COUNTED else start) + T
    else:
        end = tl.load(run_ptr + 2)
        if tl.program_id(0) * ROWS >= end:
            return
        table_ptr += tl.load(run_ptr + 3).to(tl.int64) * entries
    number = tl.load(table_ptr + p // page, mask=p < positions, other=-1)
    ok = ((p < end) & (number >= 0) & (number < pages))[:, None]
    jump = ((number - p // page).to(tl.int64) * page)[:, None]  # to the row of p; see `_attend_tile`
    to = p.to(tl.int64)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + jump * R + to * R + c, mask=ok & (c < R), other=0.0)
    tl.store(y_ptr + to * R + c, x, mask=(to < positions) & (c < R))
    x2 = tl.load(x2_ptr + jump * R2 + to * R2 + c, mask=ok & (c < R2), other=0.0)
    tl.store(y2_ptr + to * R2 + c, x2, mask=(to < positions) & (c < R2))


# long_runs  run[j] = first row, row behind the last, positions and sequence of the j-th run of more than `longer_than`
#            rows that ends at up to `up_to` positions; zeros where there is none
# shapes     starts int32 [B + 1]; position of each row int32 [T]; run int32 [runs, 4]
# grid       (1,): one program looks at all sequences
# bytes      16 · B
# limits     SEQUENCES ≥ B
@triton.jit(do_not_specialize=["B", "runs", "longer_than", "up_to"])
def _long_runs_kernel(
    starts_ptr, position_ptr, run_ptr, B, runs, longer_than, up_to, SEQUENCES: tl.constexpr
):  # fmt: skip
    b = tl.arange(0, SEQUENCES)
    first = tl.load(starts_ptr + b, mask=b < B, other=0)
    behind = tl.load(starts_ptr + b + 1, mask=b < B, other=0)
    long = behind - first > longer_than
    end = tl.load(position_ptr + first, mask=long, other=0) + behind - first
    long &= end <= up_to
    j = tl.cumsum(long.to(tl.int32), axis=0) - 1
    found = long & (j < runs)
    tl.store(run_ptr + j * 4, first, mask=found)
    tl.store(run_ptr + j * 4 + 1, behind, mask=found)
    tl.store(run_ptr + j * 4 + 2, end, mask=found)
    tl.store(run_ptr + j * 4 + 3, b, mask=found)
    none = (b >= tl.sum(long.to(tl.int32), axis=0)) & (b < runs)
    for i in tl.static_range(4):
        tl.store(run_ptr + b * 4 + i, tl.zeros((SEQUENCES,), tl.int32), mask=none)


def _prefill_runs(
    q_nope, q_pe, latent_cache, rope_k_cache, position, softmax_scale, kv_b, unembed_out, block_table, starts,
    longer_than, up_to, out,
) -> None:  # fmt: skip
    """One long run after the other in the same room for the keys and values of `up_to` positions.

    How many there are is known on the device alone: launches for runs that are not there end at once.
    """
    T, H, width = out.shape
    B, cache = len(block_table), cache_of(latent_cache, None, block_table)
    R, rope = latent_cache.shape[-1], q_pe.shape[-1]
    out.zero_()
    runs = min(B, T // (longer_than + 1))
    if runs == 0:
        return
    room = cache.capacity if up_to is None else min(up_to, cache.capacity)
    found = torch.empty((runs, 4), dtype=torch.int32, device=out.device)
    _long_runs_kernel[(1,)](starts, position, found, B, runs, longer_than, room, SEQUENCES=block_of(B), num_warps=4)
    latent, rope_k = q_nope.new_empty(room, R), q_nope.new_empty(room, rope)
    keys, values = q_nope.new_empty(room, H, q_nope.shape[-1]), q_nope.new_empty(room, H, width)
    kv_b, unembed_out = (dense_copy(w, latent.dtype) if copies(latent, w) else w for w in (kv_b, unembed_out))
    whole = Cache(None, 1, room, 1)
    for run in found:
        _gather_kernel[(triton.cdiv(room, 4),)](
            latent_cache, rope_k_cache, block_table, run, latent, rope_k, 0, 0, cache.entries, room, cache.page,
            cache.pages, R, rope, COUNTED=False, ROWS=4, BLOCK=triton.next_power_of_2(max(R, rope)),
        )  # fmt: skip
        _expand(latent, kv_b, unembed_out, keys, values, run[2:3])
        attend_tiles(
            q_nope, q_pe, keys, rope_k, values, out, whole, run[2:3], run[:2], softmax_scale, None, (H, H, width), None,
            ALL_RUNS, 0,
        )  # fmt: skip


@kernel(ops.mla_prefill, device="cuda")
def mla_prefill(
    q_nope, q_pe, latent_cache, rope_k_cache, start, softmax_scale, kv_b, unembed_out, block_table, starts, longer_than,
    up_to, *, out,
):  # fmt: skip
    T, H, width = out.shape
    if T == 0:
        return
    if starts is not None:
        _prefill_runs(
            q_nope, q_pe, latent_cache, rope_k_cache, start, softmax_scale, kv_b, unembed_out, block_table, starts,
            longer_than, up_to, out,
        )  # fmt: skip
        return
    cache = cache_of(latent_cache, None, block_table)
    R, rope = latent_cache.shape[-1], q_pe.shape[-1]
    known = isinstance(start, int)
    positions = start + T if known else cache.capacity
    if block_table is None:
        latent, rope_k = latent_cache[:positions], rope_k_cache[:positions]
    else:
        latent, rope_k = q_nope.new_empty(positions, R), q_nope.new_empty(positions, rope)
        _gather_kernel[(triton.cdiv(positions, 4),)](
            latent_cache, rope_k_cache, block_table, None, latent, rope_k, start, T, 0, positions, cache.page,
            cache.pages, R, rope, COUNTED=not known, ROWS=4, BLOCK=triton.next_power_of_2(max(R, rope)),
        )  # fmt: skip
    keys, values = q_nope.new_empty(positions, H, q_nope.shape[-1]), q_nope.new_empty(positions, H, width)
    _expand(latent, kv_b, unembed_out, keys, values)
    whole, sizes = Cache(None, 1, positions, 1), (1, T, H, H, width)
    attend(q_nope, q_pe, keys, rope_k, values, out, whole, start, 0, softmax_scale, None, sizes, steps=True)


@kernel(ops.mla_sdpa_tile_accumulate, device="cuda")
def mla_sdpa_tile_accumulate(
    running_max,
    denominator,
    accumulator,
    q_prime,
    q_pe,
    latent_cache,
    rope_k_cache,
    tile_start,
    tile_end,
    softmax_scale,
    first,
):
    H, R = q_prime.shape
    state = (running_max, denominator, accumulator, first)
    caches, cache = (latent_cache, rope_k_cache, latent_cache), cache_of(latent_cache, None, None)
    window = tile_end - tile_start
    attend(
        q_prime, q_pe, *caches, None, cache, tile_end, -1, softmax_scale, window, (1, 1, H, 1, R), state=state
    )  # fmt: skip


# finalize  y[h, :] = acc[h, :] / z[h], 0 where z is not above 0
# shapes    z float32 [H], acc float32 [H, R], y [H, R] of any dtype, may be acc
# grid      (H,): one program owns a row
# bytes     H · R · (4 + itemsize of y)
# limits    BLOCK = next power of two ≥ R
@triton.jit
def _finalize_kernel(z_ptr, acc_ptr, y_ptr, R, BLOCK: tl.constexpr):
    h = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    z = tl.load(z_ptr + h)
    acc = tl.load(acc_ptr + h * R + d, mask=d < R, other=0.0)
    y = tl.where(z > 0.0, acc / tl.where(z > 0.0, z, 1.0), 0.0)
    tl.store(y_ptr + h * R + d, rounded(y, y_ptr.dtype.element_ty), mask=d < R)


@kernel(ops.mla_sdpa_finalize, device="cuda")
def mla_sdpa_finalize(denominator, accumulator, dtype, *, out):
    H, R = accumulator.shape
    _finalize_kernel[(H,)](denominator, accumulator, out, R, BLOCK=triton.next_power_of_2(R))
