"""The gated delta net on the GPU: causal convolution (`_conv.py`), gates, and the delta rule.

The rule is the recurrence with the state in registers (`_recurrence.py`: decode, short and kept runs, float32
activations) or, for many tokens, chunks of 64 on tensor cores (`_chunk.py`). Slots outside the states, −1 for an
inactive row too, give a row of zeros and touch no state. `gated_delta_step` is a whole decode step in two launches.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock import ops
from penstock.backends.cuda._chunk import delta_chunks, delta_chunks_of_runs, takes_chunks
from penstock.backends.cuda._conv import commit_rows, convolve, convolve_runs, move_on, move_runs_on
from penstock.backends.cuda._launch import pdl_options, sigmoid, silu
from penstock.backends.cuda._recurrence import commit_states, moved_on, recur, recur_runs, token_of
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._tuning import DELTA_STEPS
from penstock.ops.op import deterministic, kernel

# -- convolution -----------------------------------------------------------------------------------------------------


@kernel(ops.conv1d_causal, device="cuda")
def conv1d_causal(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    slots: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
) -> None:
    if not x.numel():
        return
    if starts is not None and slots is not None:
        convolve_runs(x, state, weight, starts, slots, out)
    else:
        convolve(x, state, weight, slots, out)


@kernel(ops.conv1d_state_update, device="cuda")
def conv1d_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    slots: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    width: int | None = None,
) -> None:
    if not x.numel() or not state.numel():
        return
    if starts is not None and slots is not None:
        if len(slots):
            move_runs_on(state, x, starts, slots, keep, width)
    else:
        move_on(state, x, slots)


# -- gates -----------------------------------------------------------------------------------------------------------


@triton.jit
def exp_accurate(x):
    """exp of float32 x <= 88 within 2 ulp: tl.exp, whose error grows with |x|, only of what is left beside a power of
    two; 0 from -126 ln 2 on.
    """
    n = tl.floor(tl.maximum(x, -88.0) * 1.4426950408889634 + 0.5)
    rest = (x - n * 0.693359375) + n * 2.12194440054690583e-4
    return tl.where(x < -87.0, 0.0, tl.exp(rest) * tl.exp2(n))


@triton.jit
def softplus(z):
    """max(z, 0) + log1p(exp(-|z|)) of float32; log1p(e) = 2 atanh(e / (2 + e)) by its series, s <= 1/3."""
    e = exp_accurate(-tl.abs(z))
    s = e / (2.0 + e)
    q = s * s
    series = 0.2 + q * (0.14285715 + q * (0.11111111 + q * (0.09090909 + q * (0.07692308 + q * 0.06666667))))
    return tl.maximum(z, 0.0) + 2.0 * s * (1.0 + q * (0.33333334 + q * series))


# gdn_decay_beta  g = exp(-exp(A_log) * softplus(alpha + dt_bias)), b = sigmoid(beta)
# shapes          alpha, beta [T, Hv]; A_log, dt_bias [Hv], any float; g, b float32 [T, Hv]
# grid            (blocks of elements,)
# bytes           T * Hv * (2 * itemsize + 8)
# limits          none
@triton.jit(do_not_specialize=["n"])
def _gates_kernel(alpha_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, g_ptr, b_ptr, n, Hv, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    head = i % Hv
    alpha = tl.load(alpha_ptr + i, mask=live, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + i, mask=live, other=0.0).to(tl.float32)
    A = tl.load(A_log_ptr + head, mask=live, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias_ptr + head, mask=live, other=0.0).to(tl.float32)
    tl.store(g_ptr + i, exp_accurate(-exp_accurate(A) * softplus(alpha + bias)), mask=live)
    tl.store(b_ptr + i, sigmoid(beta), mask=live)


@kernel(ops.gdn_decay_beta, device="cuda")
def gdn_decay_beta(
    alpha: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    n = alpha.numel()
    if n:
        block = 128
        grid = (triton.cdiv(n, block),)
        _gates_kernel[grid](alpha, beta, A_log, dt_bias, *out, n, alpha.shape[1], block, num_warps=1)


# -- delta rule ------------------------------------------------------------------------------------------------------

_ANY = (1 << 31) - 1


@kernel(ops.gated_delta_net, device="cuda", variants=("step", "chunks"))
def gated_delta_net(
    state: torch.Tensor,
    qkv: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    Hk: int,
    Hv: int,
    Dk: int,
    Dv: int,
    method: str = "auto",
    chunk: int = 0,
    slots: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    variant: str | None,
) -> None:
    """`chunk` says where the definition cuts; the chunks here are of 64 tokens whatever it is.

    Of a ragged call each run has its own arrangement, by its own length: up to DELTA_STEPS tokens, and all that are
    kept, by the recurrence.
    """
    T = len(qkv)
    if T == 0:
        return
    if starts is not None and slots is not None:
        by_steps = method in ("step", "sequential") if variant is None else variant == "step"
        all_chunks = method == "chunkwise" if variant is None else variant == "chunks"
        longest = _ANY if by_steps or not takes_chunks(qkv, Dk) else 0 if all_chunks else DELTA_STEPS
        recur_runs(state, qkv, g, b, starts, slots, keep, gates, longest, out, Hk, Hv, Dk, Dv)
        if longest < T:
            delta_chunks_of_runs(state, qkv, g, b, starts, slots, keep, longest, out, Hk, Hv, Dk, Dv)
        return
    many = method == "chunkwise" or (method == "auto" and (T > DELTA_STEPS or deterministic()))
    if (many if variant is None else variant == "chunks") and slots is None and takes_chunks(qkv, Dk):
        delta_chunks(state, qkv, g, b, out, Hk, Hv, Dk, Dv)
    else:
        recur(state, qkv, g, b, slots, out, Hk, Hv, Dk, Dv)


@kernel(ops.delta_commit, device="cuda")
def delta_commit(conv_state, state, gates, slots, accepted, conv_weight, Hk) -> None:
    """The convolution of the kept rows, which moves on; rms_norm_qk of what it gives; the recurrence."""
    (B,), K, C = slots.shape, gates.shape[1], conv_state.shape[2]
    if not B or not K:
        return
    Dk = state.shape[3]
    rows = conv_state.new_zeros((B * K, C))  # those that are not accepted are normed, and not read
    commit_rows(conv_state, conv_weight, slots, accepted, rows.view(B, K, C))
    ops.rms_norm_qk(rows, Hk, Dk, Hk * Dk, out=rows)
    commit_states(state, rows.view(B, K, C), gates, slots, accepted, Hk)


# -- a layer's step in two launches ----------------------------------------------------------------------------------


# mix      y = silu(conv1d(x)) of a row, its q and k heads divided by their lengths (q by sqrt(Dk) too); the rows kept
#          for the convolution move on; g and b as in gdn_decay_beta
# shapes   x, y [B, C], C = 2 Hk Dk + Hv Dv; kept [S, W - 1, C]; weight [C, W]; alpha, beta, g, b [B, Hv]; slots [B]
# grid     (B, 2 Hk + Hv): one program owns a head of q, k or v; those of v have the gates of their head
# bytes    B * C * (2 + 2 * (W - 1)) * itemsize and the weight
# limits   a head is at most 16384 wide
@triton.jit
def _mix_kernel(
    x_ptr, kept_ptr, weight_ptr, alpha_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, slots_ptr, y_ptr, g_ptr, b_ptr,
    slots, Hk, Hv, Dk, Dv, eps, W: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    head = part - 2 * Hk  # of v if not negative
    i = tl.arange(0, BLOCK)
    wide = tl.where(head < 0, Dk, Dv)
    c = tl.where(head < 0, part * Dk, 2 * Hk * Dk + head * Dv) + i
    C = 2 * Hk * Dk + Hv * Dv
    live = i < wide
    x = tl.load(x_ptr + row * C + c, mask=live, other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    active = (slot >= 0) & (slot < slots)
    moved = i < tl.where(active, wide, 0)
    kept_ptr += slot * (W - 1) * C + c
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(W - 1):
        old = tl.load(kept_ptr + j * C, mask=moved, other=0.0)
        tap = tl.load(weight_ptr + c * W + j, mask=live, other=0.0).to(tl.float32)
        total = tl.fma(old.to(tl.float32), tap, total)
        if j > 0:
            tl.store(kept_ptr + (j - 1) * C, old, mask=moved)
    if W > 1:
        tl.store(kept_ptr + (W - 2) * C, x.to(kept_ptr.dtype.element_ty), mask=moved)
    total = tl.fma(x, tl.load(weight_ptr + c * W + W - 1, mask=live, other=0.0).to(tl.float32), total)
    y = rounded(total / (1.0 + tl.exp(-total)), y_ptr.dtype.element_ty).to(tl.float32)
    length = tl.sqrt_rn(tl.sum(y * y, axis=0) + eps)
    y = tl.where(head < 0, y / length * tl.where(part < Hk, 1.0 / tl.sqrt_rn(tl.cast(Dk, tl.float32)), 1.0), y)
    tl.store(y_ptr + row * C + c, rounded(tl.where(active, y, 0.0), y_ptr.dtype.element_ty), mask=live)
    if head >= 0:
        at = row * Hv + head
        bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        strength = softplus(tl.load(alpha_ptr + at).to(tl.float32) + bias)
        tl.store(g_ptr + at, exp_accurate(-exp_accurate(tl.load(A_log_ptr + head).to(tl.float32)) * strength))
        tl.store(b_ptr + at, sigmoid(tl.load(beta_ptr + at).to(tl.float32)))


# step      `recurrence` of one token and, of its y rounded, out = y * rinv(y) * silu(z) * norm
# shapes    as in `recurrence`; z, out [B, Hv, Dv]; norm [Dv]
# grid      (B, Hv): one program owns the state of a head
# bytes     2 * B * Hv * Dv * Dk * 4 for the state, read and written once
# limits    Dv * Dk, each up to a power of two, at most 16384: the state lies in the registers of a program
#
# PDL: it starts while `mix` ends, which writes neither state nor z nor slots and by then has seen the end of the kernel
# before itself: so it asks for those before it waits.
@triton.jit
def _step_kernel(
    state_ptr, qkv_ptr, g_ptr, b_ptr, z_ptr, norm_ptr, slots_ptr, out_ptr, slots, Hk, Hv, Dk, Dv, eps,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    cols = 32 * tl.arange(0, WIDE)[None, :, None] + tl.arange(0, 32)[None, None, :]
    slot = tl.load(slots_ptr + token).to(tl.int64)
    active = (slot >= 0) & (slot < slots)
    moved = (rows[:, None, None] < tl.where(active, Dv, 0)) & (cols < Dk)
    tile = state_ptr + ((slot * Hv + head) * Dv + rows[:, None, None]) * Dk + cols
    S = tl.load(tile, mask=moved, other=0.0)
    at = (token * Hv + head) * Dv + rows
    z = tl.load(z_ptr + at, mask=rows < Dv, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + rows, mask=rows < Dv, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    q, k, v, g, b = token_of(qkv_ptr, g_ptr, b_ptr, token, head, rows, cols, Hk, Hv, Dk, Dv, GROUP)
    S, y = moved_on(S, q, k, v, g, b)
    tl.store(tile, S, mask=moved)
    y = rounded(y, kind).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, axis=0) / Dv + eps) * silu(z) * weight
    tl.store(out_ptr + at, rounded(tl.where(active, y, 0.0), kind), mask=rows < Dv)


@functools.cache
def _step_tile(Dk: int, Dv: int) -> tuple[int, int, int] | None:
    """Value rows, key columns / 32 and warps of a program that owns a head's state; None: it is too large."""
    rows, wide = triton.next_power_of_2(Dv), triton.next_power_of_2(triton.cdiv(Dk, 32))
    return None if rows * wide > 512 else (rows, wide, max(1, min(8, rows * wide // 64)))


@kernel(ops.gated_delta_step, device="cuda")
def gated_delta_step(
    qkv, z, alpha, beta, conv_state, state, slots, conv_weight, A_log, dt_bias, norm_weight, Hk, eps, *, out
) -> None:
    B, (Hv, Dv, Dk) = len(qkv), state.shape[1:]
    if B == 0:
        return
    y = torch.empty_like(qkv)
    g, b = (qkv.new_empty((B, Hv), dtype=torch.float32) for _ in range(2))
    _mix_kernel[(B, 2 * Hk + Hv)](
        qkv, conv_state, conv_weight, alpha, beta, A_log, dt_bias, slots, y, g, b, len(state), Hk, Hv, Dk, Dv, 1e-6,
        W=conv_weight.shape[1], BLOCK=triton.next_power_of_2(max(Dk, Dv)), num_warps=1, **pdl_options(),
    )  # fmt: skip
    tile = _step_tile(Dk, Dv)
    if tile is None:
        recur(state, y, g, b, slots, out, Hk, Hv, Dk, Dv)
        ops.gated_rms_norm(out, z, norm_weight, eps, out=out)
        return
    rows, wide, warps = tile
    _step_kernel[(B, Hv)](
        state, y, g, b, z, norm_weight, slots, out, len(state), Hk, Hv, Dk, Dv, eps,
        GROUP=Hv // Hk, ROWS=rows, WIDE=wide, num_warps=warps, **pdl_options(),
    )  # fmt: skip
