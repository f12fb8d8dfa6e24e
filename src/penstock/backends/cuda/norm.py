"""CUDA kernels of the norms: one for a norm and what surrounds it, one for three norms of one row, one for the end of
a layer, one for the heads of a DeltaNet layer. Each reads and writes memory once, rows stay in registers between.

rinv(v) = 1 / sqrt(mean(v²) + eps) and n(v, w) = v · rinv(v) · w as in the definitions; float32 inside.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda._launch import pdl_options, prefetch_lines, sigmoid, silu, wait_for_previous
from penstock.backends.cuda._rows import Tile, expert_sum, rinv, rounded, tile, vector
from penstock.backends.cuda._tuning import COPIED_COLUMNS, QK_NUMBERS, ROW_PAIRS, TRIPLE_THREAD
from penstock.ops.op import kernel


def _scalar(scalar: Any) -> tuple[torch.Tensor | None, float, int]:
    """A factor as (tensor or None, number, step per column): one of the two counts."""
    if isinstance(scalar, torch.Tensor):
        return scalar, 1.0, int(scalar.numel() > 1)
    return None, float(scalar), 0


def _pair(share: Tile, rows: int) -> Tile:
    """Two rows for a program where there are many, which then share their weights. The sums of a row are formed in the
    same order as those of one alone.
    """
    widest, many = ROW_PAIRS
    return share._replace(R=2) if share.R == 1 and widest >= share.BLOCK and rows >= many else share


# norm      v = x, or Σ_i slots[i]·x[i], plus before; y = (n(v, w) ∘ after) · scalar, ∘ after one of: nothing, · after,
#           · act(after), + after, + n(after, w_after); sum = v. Pointers that are None leave their part out
# shapes    x [rows, dim], with K > 0 [rows, K, dim] and slots float32 [rows, K]; before, after, sum, y [rows, dim],
#           each of a float of its own; w, w_after [dim]; scalar a number, one element (STEP 0) or [dim] (STEP 1)
# grid      (ceil(rows / R),): a program owns R whole rows
# bytes     itemsize · rows · dim · (max(K, 1) + 1 + one for each of before, after, sum that is given)
# limits    BLOCK ≥ dim, a power of two; sum and y may lie over x, before or after
#
# EVERY > 0: so many rows of after lie side by side, the next ones after_step further.
# PDL: its weight comes to the L2 cache before it waits.
@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x_ptr,
    slots_ptr,
    before_ptr,
    w_ptr,
    after_ptr,
    w_after_ptr,
    scalar_ptr,
    sum_ptr,
    y_ptr,
    rows,
    dim,
    eps,
    number,
    after_step,
    K: tl.constexpr,
    AFTER: tl.constexpr,
    EVERY: tl.constexpr,
    STEP: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and R == 1 and w_ptr is not None:
        prefetch_lines(w_ptr, dim, BLOCK)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    col = tl.arange(0, BLOCK)
    live = (row < rows)[:, None] & (col < dim)[None, :]
    at = row[:, None] * dim + col[None, :]
    if K > 0:
        v = expert_sum(x_ptr, slots_ptr, None, None, 0, row, col, live, rows, dim, K)
    else:
        v = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    if before_ptr is not None:
        v += tl.load(before_ptr + at, mask=live, other=0.0).to(tl.float32)
    if AFTER != "nothing":  # this and the vectors are loaded before the sums are waited for
        beside = at
        if EVERY > 0:
            beside = (row // EVERY * after_step + row % EVERY * dim)[:, None] + col[None, :]
        after = tl.load(after_ptr + beside, mask=live, other=0.0).to(tl.float32)
    if w_ptr is not None:
        w = vector(w_ptr, col, dim)
    if AFTER == "norm":
        w_after = vector(w_after_ptr, col, dim)
    if scalar_ptr is not None:
        factor = vector(scalar_ptr, col * STEP, dim)
    else:
        factor = number
    y = v * rinv(v, dim, eps)
    if AFTER == "silu":
        y *= silu(after)
    if AFTER == "sigmoid":
        y *= sigmoid(after)
    if w_ptr is not None:
        y *= w
    if AFTER == "mul":
        y *= after
    if AFTER == "add":
        y += after
    if AFTER == "norm":
        y += after * rinv(after, dim, eps) * w_after
    y *= factor
    tl.store(y_ptr + at, rounded(y, y_ptr.dtype.element_ty), mask=live)
    if sum_ptr is not None:
        tl.store(sum_ptr + at, rounded(v, sum_ptr.dtype.element_ty), mask=live)


def _norm(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    *,
    slots: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
    how: str = "nothing",
    w_after: torch.Tensor | None = None,
    scalar: Any = 1.0,
    sum_out: torch.Tensor | None = None,
) -> None:
    dim = out.shape[-1]
    rows = out.numel() // dim
    if rows == 0:
        return
    share = tile(op, dim)
    if slots is None and before is None and after is None:
        share = _pair(share, rows)
    factor, number, step = _scalar(scalar)
    k = 0 if slots is None else slots.shape[1]
    apart = after is not None and not after.is_contiguous()
    every, after_step = (after[0].numel() // dim, after.stride(0)) if apart else (0, 0)
    _norm_kernel[(triton.cdiv(rows, share.R),)](
        x,
        slots,
        before,
        weight,
        after,
        w_after,
        factor,
        sum_out,
        out,
        rows,
        dim,
        eps,
        number,
        after_step,
        K=k,
        AFTER=how,
        EVERY=every,
        STEP=step,
        R=share.R,
        BLOCK=share.BLOCK,
        num_warps=share.warps,
        **pdl_options(),
    )


@kernel(ops.rms_norm, device="cuda")
def rms_norm(x, weight, eps, dtype=None, *, out):
    _norm("rms_norm", x, weight, eps, out)


@kernel(ops.rms_norm_mul, device="cuda")
def rms_norm_mul(x, norm_weight, scale, eps, *, out):
    _norm("rms_norm_mul", x, norm_weight, eps, out, after=scale, how="mul")


@kernel(ops.gated_rms_norm, device="cuda")
def gated_rms_norm(values, z, weight, eps, act="silu", *, out):
    _norm("gated_rms_norm", values, weight, eps, out, after=z, how=act)


@kernel(ops.norm_add, device="cuda")
def norm_add(residual, x, weight, eps, *, out):
    _norm("norm_add", x, weight, eps, out, after=residual, how="add")


@kernel(ops.norm_add_scalar, device="cuda")
def norm_add_scalar(residual, x, weight, scalar, eps, *, out):
    _norm("norm_add_scalar", x, weight, eps, out, after=residual, how="add", scalar=scalar)


@kernel(ops.residual_norm, device="cuda")
def residual_norm(residual, x, weight, eps, write_sum, *, out):
    _norm("residual_norm", x, weight, eps, out[0], before=residual, sum_out=out[1])


@kernel(ops.residual_norm_scalar, device="cuda")
def residual_norm_scalar(residual, x, weight, scalar, eps, *, out):
    _norm("residual_norm_scalar", x, weight, eps, out, before=residual, scalar=scalar)


@kernel(ops.moe_wsum_norm_add, device="cuda")
def moe_wsum_norm_add(expert_out, weights, residual, norm_weight, eps, *, out):
    _norm("moe_wsum_norm_add", expert_out, norm_weight, eps, out, slots=weights, after=residual, how="add")


@kernel(ops.moe_wsum_dnorm_add, device="cuda")
def moe_wsum_dnorm_add(expert_out, weights, residual, res_norm_weight, moe_norm_weight, eps, *, out):
    _norm(
        "moe_wsum_dnorm_add",
        expert_out,
        moe_norm_weight,
        eps,
        out,
        slots=weights,
        after=residual,
        how="norm",
        w_after=res_norm_weight,
    )


# triple    m = x, or hidden + n(x, post); ya, yb, yc = n(m, wa), n(m, wb), n(m, wc); with hidden res = m
# shapes    x, hidden, res, ya, yb, yc [rows, dim], the last three of one float; post, wa, wb, wc [dim]; hidden, post
#           and res are None together
# grid      (ceil(rows / R),): a program owns R whole rows
# bytes     itemsize · rows · dim · 4, with hidden 6
# limits    BLOCK ≥ dim, a power of two; an output may lie over x or hidden
@triton.jit(do_not_specialize=["rows"])
def _triple_kernel(
    x_ptr,
    hidden_ptr,
    post_ptr,
    wa_ptr,
    wb_ptr,
    wc_ptr,
    res_ptr,
    ya_ptr,
    yb_ptr,
    yc_ptr,
    rows,
    dim,
    eps,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    col = tl.arange(0, BLOCK)
    live = (row < rows)[:, None] & (col < dim)[None, :]
    at = row[:, None] * dim + col[None, :]
    m = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    if hidden_ptr is not None:
        hidden = tl.load(hidden_ptr + at, mask=live, other=0.0).to(tl.float32)
        post = vector(post_ptr, col, dim)
    wa, wb, wc = vector(wa_ptr, col, dim), vector(wb_ptr, col, dim), vector(wc_ptr, col, dim)
    if hidden_ptr is not None:
        m = hidden + m * rinv(m, dim, eps) * post
        tl.store(res_ptr + at, rounded(m, res_ptr.dtype.element_ty), mask=live)
    y = m * rinv(m, dim, eps)
    kind: tl.constexpr = ya_ptr.dtype.element_ty
    tl.store(ya_ptr + at, rounded(y * wa, kind), mask=live)
    tl.store(yb_ptr + at, rounded(y * wb, kind), mask=live)
    tl.store(yc_ptr + at, rounded(y * wc, kind), mask=live)


def _triple(op: str, x: Any, hidden: Any, post: Any, weights: Any, eps: float, res: Any, out: Any) -> None:
    dim = x.shape[-1]
    rows = x.numel() // dim
    if rows == 0:
        return
    share = _pair(tile(op, dim, per_thread=TRIPLE_THREAD), rows)
    arrays = (x, hidden, post, *weights, res, *out)
    grid = (triton.cdiv(rows, share.R),)
    _triple_kernel[grid](*arrays, rows, dim, eps, R=share.R, BLOCK=share.BLOCK, num_warps=share.warps, **pdl_options())


@kernel(ops.rms_norm_triple, device="cuda")
def rms_norm_triple(x, wa, wb, wc, eps, dtype, *, out):
    _triple("rms_norm_triple", x, None, None, (wa, wb, wc), eps, None, out)


@kernel(ops.post_attn_triple_norm, device="cuda")
def post_attn_triple_norm(hidden, attn_out, post_attn_w, wa, wb, wc, eps, *, out):
    _triple("post_attn_triple_norm", attn_out, hidden, post_attn_w, (wa, wb, wc), eps, out[0], out[1:])


# endlayer  v = x, or Σ_i slots[i]·x[i]; mid = addend (with w1 n(addend, w1)) + n(v, w2);
#           y = (residual + n(mid, w3)) · scalar
# shapes    x [rows, dim], with K > 0 [rows, K, dim] and slots float32 [rows, K]; addend, residual, mid, y [rows, dim];
#           w1 (or None), w2, w3 [dim]; scalar a number, one element (STEP 0) or [dim] (STEP 1); mid may be None
# grid      (ceil(rows / R),): a program owns R whole rows
# bytes     itemsize · rows · dim · (max(K, 1) + 3, with mid 4)
# limits    BLOCK ≥ dim, a power of two; mid and y may lie over x, addend or residual
@triton.jit(do_not_specialize=["rows"])
def _endlayer_kernel(
    x_ptr,
    slots_ptr,
    addend_ptr,
    residual_ptr,
    w1_ptr,
    w2_ptr,
    w3_ptr,
    scalar_ptr,
    mid_ptr,
    y_ptr,
    rows,
    dim,
    eps,
    number,
    K: tl.constexpr,
    STEP: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    col = tl.arange(0, BLOCK)
    live = (row < rows)[:, None] & (col < dim)[None, :]
    at = row[:, None] * dim + col[None, :]
    if K > 0:
        v = expert_sum(x_ptr, slots_ptr, None, None, 0, row, col, live, rows, dim, K)
    else:
        v = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    addend = tl.load(addend_ptr + at, mask=live, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + at, mask=live, other=0.0).to(tl.float32)
    w2, w3 = vector(w2_ptr, col, dim), vector(w3_ptr, col, dim)
    if scalar_ptr is not None:
        factor = vector(scalar_ptr, col * STEP, dim)
    else:
        factor = number
    if w1_ptr is not None:
        addend = addend * rinv(addend, dim, eps) * vector(w1_ptr, col, dim)
    mid = addend + v * rinv(v, dim, eps) * w2
    y = (residual + mid * rinv(mid, dim, eps) * w3) * factor
    if mid_ptr is not None:
        tl.store(mid_ptr + at, rounded(mid, mid_ptr.dtype.element_ty), mask=live)
    tl.store(y_ptr + at, rounded(y, y_ptr.dtype.element_ty), mask=live)


def _endlayer(op: str, x: Any, slots: Any, rows_in: Any, weights: Any, scalar: Any, eps: float, out: Any) -> None:
    mid, y = out
    dim = y.shape[-1]
    rows = y.numel() // dim
    if rows == 0:
        return
    share = tile(op, dim)
    factor, number, step = _scalar(scalar)
    k = 0 if slots is None else slots.shape[1]
    arrays = (x, slots, *rows_in, *weights, factor, mid, y)
    sizes = (rows, dim, eps, number)
    grid = (triton.cdiv(rows, share.R),)
    _endlayer_kernel[grid](
        *arrays, *sizes, K=k, STEP=step, R=share.R, BLOCK=share.BLOCK, num_warps=share.warps, **pdl_options()
    )


@kernel(ops.post_ff_norm2_endlayer, device="cuda")
def post_ff_norm2_endlayer(addend, moe_accum, residual, w2, w3, layer_scalar, eps, return_mid, w1, *, out):
    _endlayer("post_ff_norm2_endlayer", moe_accum, None, (addend, residual), (w1, w2, w3), layer_scalar, eps, out)


@kernel(ops.moe_wsum_post_ff_norm2_endlayer, device="cuda")
def moe_wsum_post_ff_norm2_endlayer(
    expert_out, weights, addend, residual, w2, w3, layer_scalar, eps, return_mid, *, out
):
    op = "moe_wsum_post_ff_norm2_endlayer"
    _endlayer(op, expert_out, weights, (addend, residual), (None, w2, w3), layer_scalar, eps, out)


# qk        q ← q / sqrt(Σq² + eps) · q_scale, k ← k / sqrt(Σk² + eps) per head; other columns pass through
# shapes    x, y [T, total]; q heads at h · dim, k heads at k_start + h · dim for h < heads
# grid      (T, ceil(2 · heads / R) + ceil(total / COLUMNS)): R heads of a token each, then copies of COLUMNS columns,
#           which are left out where y is x
# bytes     2 · itemsize · T · total, of which only the heads where y is x
# limits    BLOCK ≥ dim, a power of two
@triton.jit
def _qk_kernel(
    x_ptr,
    y_ptr,
    heads,
    dim,
    k_start,
    total,
    eps,
    q_scale,
    head_programs,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    start = tl.program_id(0).to(tl.int64) * total
    part = tl.program_id(1)
    col = tl.arange(0, BLOCK)
    if part < head_programs:
        head = part * R + tl.arange(0, R)
        live = (head < 2 * heads)[:, None] & (col < dim)[None, :]
        is_q = head < heads
        first = tl.where(is_q, head * dim, k_start + (head - heads) * dim)
        at = start + first[:, None] + col[None, :]
        v = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(v * v, axis=1) + eps) * tl.where(is_q, q_scale, 1.0)
        tl.store(y_ptr + at, rounded(v * factor[:, None], y_ptr.dtype.element_ty), mask=live)
    else:
        j = (part - head_programs) * COLUMNS + tl.arange(0, COLUMNS)
        width = heads * dim
        passes = ((j >= width) & (j < k_start)) | ((j >= k_start + width) & (j < total))
        tl.store(y_ptr + start + j, tl.load(x_ptr + start + j, mask=passes), mask=passes)


@kernel(ops.rms_norm_qk, device="cuda")
def rms_norm_qk(x, num_k_heads, key_dim, key_offset, inv_scale, eps, eps_on, *, out):
    T, total = x.shape
    if T == 0:
        return
    share = tile("rms_norm_qk", key_dim, QK_NUMBERS)
    head_programs = triton.cdiv(2 * num_k_heads, share.R)
    in_place = out.data_ptr() == x.data_ptr() or total == 2 * num_k_heads * key_dim
    copies = 0 if in_place else triton.cdiv(total, COPIED_COLUMNS)
    added = eps * key_dim if eps_on == "mean" else eps
    q_scale = key_dim**-0.5 if inv_scale is None else inv_scale
    sizes = (num_k_heads, key_dim, key_offset, total, added, float(q_scale), head_programs)
    grid = (T, head_programs + copies)
    _qk_kernel[grid](
        x, out, *sizes, R=share.R, BLOCK=share.BLOCK, COLUMNS=COPIED_COLUMNS, num_warps=share.warps, **pdl_options()
    )
