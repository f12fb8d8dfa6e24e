"""Softmax attention over contiguous, slotted and paged caches (`_attend`), and the separate launches of the sources."""

import torch
import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda._attend import attend, attend_runs, cache_of
from penstock.backends.cuda._attend_tile import dot
from penstock.backends.cuda._launch import flat_rows, pdl_options, wait_for_previous
from penstock.backends.cuda._prepare import prepare
from penstock.backends.cuda._rows import rounded
from penstock.ops.op import kernel


def _value_width(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lead: int) -> tuple[int, int]:
    """Key-value heads and the width of a value."""
    heads = k_cache.shape[lead:].numel() // q.shape[-1]
    return heads, v_cache.shape[lead:].numel() // heads


@kernel(ops.attention_decode, device="cuda")
def attention_decode(q, k_cache, v_cache, seq_len, scale, window, slots, *, out):
    batch = 1 if slots is None else q.shape[0]
    if batch == 0:
        return
    heads, width = _value_width(q, k_cache, v_cache, 1 if slots is None else 2)
    cache, sizes = cache_of(k_cache, slots, None), (batch, 1, q.shape[-2], heads, width)
    attend(q, None, k_cache, None, v_cache, out, cache, seq_len, -1, scale, window, sizes)


@kernel(ops.attention_paged, device="cuda")
def attention_paged(q, k_pages, v_pages, block_table, lengths, scale, window, gate, starts, sinks, *, out):
    if q.shape[0] == 0:
        return
    heads, width = _value_width(q, k_pages, v_pages, 2)
    if starts is not None:
        cache, sizes = cache_of(k_pages, None, block_table), (q.shape[1], heads, width)
        call = (q, None, k_pages, None, v_pages, out, cache, lengths, starts, scale, window, sizes)
        attend_runs(*call, gate, sinks=sinks)
        return
    cache, sizes = cache_of(k_pages, None, block_table), (q.shape[0], 1, q.shape[1], heads, width)
    attend(q, None, k_pages, None, v_pages, out, cache, lengths, -1, scale, window, sizes, gate=gate, sinks=sinks)


@kernel(ops.attention_prefill, device="cuda")
def attention_prefill(q, k_cache, v_cache, start, scale, window, block_table, *, out):
    T, H, _ = q.shape
    if T == 0:
        return
    heads, width = _value_width(q, k_cache, v_cache, 1 if block_table is None else 2)
    cache, sizes = cache_of(k_cache, None, block_table), (1, T, H, heads, width)
    attend(q, None, k_cache, None, v_cache, out, cache, start, 0, scale, window, sizes, steps=True)


@kernel(ops.attention_prepare, device="cuda")
def attention_prepare(
    q, k, v, q_norm, k_norm, inv_freq, positions, key_pages, value_pages, block_table, H, rotary_dim, mscale, eps,
    gated, norm_values, sequence, q_bias, k_bias, v_bias, *, out,
):  # fmt: skip
    if len(q):
        pages, norms, biases = (key_pages, value_pages), (q_norm, k_norm), (q_bias, k_bias, v_bias)
        where = (inv_freq, positions, pages, block_table)
        prepare(q, k, v, norms, biases, *where, mscale, eps, norm_values, sequence, out)


# -- one launch of the sources each ----------------------------------------------------------------------------------


# attention_scores  y[h, p] = scale · Σ_d q[h, d] · k[p, head(h), d] for p < seq_len
# shapes    q [H, D], k [≥ seq_len, heads, D], y [H, stride], H = heads · GROUP; other columns of y stay
# grid      (⌈seq_len / N⌉, heads): N positions for the M ≥ GROUP rows of a head, D in steps of BLOCK
# bytes     seq_len · heads · D keys once, H · seq_len scores
# limits    M = next power of two ≥ max(GROUP, 16), so GROUP at most 128 for registers
@triton.jit(do_not_specialize=["seq_len", "stride"])
def _scores_kernel(
    q_ptr,
    k_ptr,
    y_ptr,
    seq_len,
    stride,
    scale,
    heads,
    D,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    g = tl.arange(0, M)
    row = head * GROUP + g
    scores = tl.zeros([M, N], tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        q_ok = (g < GROUP)[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + row[:, None] * D + d[None, :], mask=q_ok, other=0.0)
        k_ok = (p < seq_len)[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + (p[:, None] * heads + head) * D + d[None, :], mask=k_ok, other=0.0)
        scores = dot(q, tl.trans(k), scores)
    y = rounded(scores * scale, y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None] * stride + p[None, :], y, mask=(g < GROUP)[:, None] & (p < seq_len)[None, :])


def _group_rows(group: int) -> int:
    return max(16, triton.next_power_of_2(group))


@kernel(ops.attention_scores, device="cuda")
def attention_scores(q, k_cache, seq_len, scale, heads_per_kv, seq_stride, *, out):
    if seq_len == 0:
        return
    H, D = q.shape
    grid = (triton.cdiv(seq_len, 64), H // heads_per_kv)
    sizes = {"GROUP": heads_per_kv, "M": _group_rows(heads_per_kv), "N": 64, "BLOCK": 32}
    _scores_kernel[grid](q, k_cache, out, seq_len, seq_stride, scale, H // heads_per_kv, D, **sizes)


# attention_softmax  y[h, p] = exp(x[h, p] − max) / Σ exp(x[h, p] − max) over p < seq_len; y[h, p] = x[h, p] behind
# shapes    x, y [H, columns]; a row of nothing but −inf gives zeros
# grid      (H,): one program owns a row and reads it whole before it writes, so y may be x
# bytes     3 · H · columns · itemsize; the second and third pass come from L2
# limits    none
@triton.jit(do_not_specialize=["seq_len", "columns"])
def _softmax_kernel(x_ptr, y_ptr, seq_len, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, seq_len, BLOCK):
        p = start + column
        x = tl.load(x_ptr + row + p, mask=p < seq_len, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, x)
    highest = tl.max(top, axis=0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, seq_len, BLOCK):
        p = start + column
        x = tl.load(x_ptr + row + p, mask=p < seq_len, other=float("-inf")).to(tl.float32)
        sums += tl.exp(x - highest)
    total = tl.sum(sums, axis=0)
    total = tl.where(total == 0.0, 1.0, total)
    for start in range(0, columns, BLOCK):
        p = start + column
        x = tl.load(x_ptr + row + p, mask=p < columns, other=0.0)
        y = tl.exp(x.to(tl.float32) - highest) / total
        tl.store(y_ptr + row + p, tl.where(p < seq_len, rounded(y, x.dtype), x), mask=p < columns)


@kernel(ops.attention_softmax, device="cuda")
def attention_softmax(scores, seq_len, *, out):
    H, columns = scores.shape
    _softmax_kernel[(H,)](scores, out, seq_len, columns, BLOCK=1024, num_warps=4)


# attention_values  y[h, d] = Σ_{p < seq_len} x[h, p] · v[p, head(h), d]
# shapes    x [H, stride], v [≥ seq_len, heads, D], y [H, D], H = heads · GROUP
# grid      (⌈D / BLOCK⌉, heads): BLOCK columns for the M ≥ GROUP rows of a head over all positions, N at a time
# bytes     seq_len · heads · D values once; H · seq_len weights per block of columns
# limits    M = next power of two ≥ max(GROUP, 16), so GROUP at most 128 for registers
@triton.jit(do_not_specialize=["seq_len", "stride"])
def _values_kernel(
    x_ptr,
    v_ptr,
    y_ptr,
    seq_len,
    stride,
    heads,
    D,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.arange(0, M)
    row = head * GROUP + g
    acc = tl.zeros([M, BLOCK], tl.float32)
    for start in range(0, seq_len, N):
        p = start + tl.arange(0, N).to(tl.int64)
        x_ok = (g < GROUP)[:, None] & (p < seq_len)[None, :]
        x = tl.load(x_ptr + row[:, None] * stride + p[None, :], mask=x_ok, other=0.0)
        v_ok = (p < seq_len)[:, None] & (d < D)[None, :]
        v = tl.load(v_ptr + (p[:, None] * heads + head) * D + d[None, :], mask=v_ok, other=0.0)
        acc = dot(x, v, acc)
    y_ok = (g < GROUP)[:, None] & (d < D)[None, :]
    tl.store(y_ptr + row[:, None] * D + d[None, :], rounded(acc, y_ptr.dtype.element_ty), mask=y_ok)


@kernel(ops.attention_values, device="cuda")
def attention_values(scores, v_cache, seq_len, heads_per_kv, *, out):
    H, D = out.shape
    heads = H // heads_per_kv
    sizes = {"GROUP": heads_per_kv, "M": _group_rows(heads_per_kv), "N": 64, "BLOCK": 32}
    _values_kernel[(triton.cdiv(D, 32), heads)](scores, v_cache, out, seq_len, scores.shape[1], heads, D, **sizes)


# split     left[r, :] = x[r, :LEFT], right[r, :] = x[r, LEFT:]; a second array of rows likewise in the same launch
# shapes    x [rows, LEFT + RIGHT], x2 [rows2, LEFT2 + RIGHT2]; the parts contiguous
# grid      (⌈rows / R⌉ + ⌈rows2 / R⌉,): R rows of one of the two arrays
# bytes     2 · (all elements) · itemsize
# limits    BLOCK = next power of two ≥ the wider row
@triton.jit(do_not_specialize=["rows", "rows2"])
def _split_kernel(
    x_ptr,
    left_ptr,
    right_ptr,
    x2_ptr,
    left2_ptr,
    right2_ptr,
    rows,
    rows2,
    LEFT,
    WIDTH,
    LEFT2,
    WIDTH2,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    pid = tl.program_id(0)
    ours = tl.cdiv(rows, R)
    if pid < ours:
        _split_rows(x_ptr, left_ptr, right_ptr, pid, rows, LEFT, WIDTH, R, BLOCK)
    else:
        _split_rows(x2_ptr, left2_ptr, right2_ptr, pid - ours, rows2, LEFT2, WIDTH2, R, BLOCK)


@triton.jit
def _split_rows(x_ptr, left_ptr, right_ptr, block, rows, LEFT, WIDTH, R: tl.constexpr, BLOCK: tl.constexpr):
    row = (block.to(tl.int64) * R + tl.arange(0, R))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * WIDTH + column, mask=(row < rows) & (column < WIDTH), other=0.0)
    tl.store(left_ptr + row * LEFT + column, x, mask=(row < rows) & (column < LEFT))
    right = (row < rows) & (column >= LEFT) & (column < WIDTH)
    tl.store(right_ptr + row * (WIDTH - LEFT) + (column - LEFT), x, mask=right)


def split_rows(x: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *second: torch.Tensor) -> None:
    """Cut the rows of x into left and right; with `second` (x2, left2, right2) those of another array as well."""
    x2, left2, right2 = second or (x, left, right)
    rows, rows2 = flat_rows(x).shape[0], flat_rows(x2).shape[0] if second else 0
    block = triton.next_power_of_2(max(x.shape[-1], x2.shape[-1]))
    R = max(1, 2048 // block)
    _split_kernel[(triton.cdiv(rows, R) + triton.cdiv(rows2, R),)](
        x, left, right, x2, left2, right2, rows, rows2, left.shape[-1], x.shape[-1], left2.shape[-1], x2.shape[-1],
        R=R, BLOCK=block, **pdl_options(),
    )  # fmt: skip


@kernel(ops.split_q_gate, device="cuda")
def split_q_gate(q_proj, *, out):
    if q_proj.shape[0]:
        split_rows(q_proj, *out)
