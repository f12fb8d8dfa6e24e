"""A gated delta net's runs that are kept: all between the projections of a layer, in three launches.

The first moves the rows of the convolution on by what was accepted of the run before, and convolves those rows and the
run's. In the second a program owns some value rows of a head's state: it takes the accepted tokens in and writes them
once, then runs the new tokens from there. The third norms what they give.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.backends.cuda._delta_step import decay, row_steps
from penstock.backends.cuda._launch import pdl_options, prefetch_lines, sigmoid
from penstock.backends.cuda._recurrence import gates_of, moved_on, recurrence_tile, token_of
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._tuning import DELTA_AHEAD
from penstock.backends.cuda.norm import gated_rms_norm

TOKENS = 8  # of a run that a program convolves at once


@triton.jit
def _run_of(starts_ptr, slots_ptr, n, B, T, slots):
    """First row of run n, row behind its last, and its slot, −1 for one that there is not; run B: rows of none."""
    if starts_ptr is not None:
        low = tl.load(starts_ptr + n)
        high = tl.load(starts_ptr + n + 1, mask=n < B, other=T)
    else:
        low, high = tl.minimum(n, T), tl.minimum(n + 1, T)
    slot = tl.load(slots_ptr + n, mask=n < B, other=-1).to(tl.int64)
    return low.to(tl.int64), high.to(tl.int64), tl.where(slot < slots, slot, -1)


@triton.jit
def _count(counts_ptr, n, most):
    """counts[n], from 0 to `most`; 0 without counts."""
    count = n * 0
    if counts_ptr is not None:
        count = tl.minimum(tl.maximum(tl.load(counts_ptr + n), 0), most)
    return count.to(tl.int64)


@triton.jit
def _silu_rounded(total, dtype: tl.constexpr):
    return rounded(total / (1.0 + tl.exp(-total)), dtype).to(tl.float32)


@triton.jit
def _unit_rows(y, scale, eps, dtype: tl.constexpr):
    """Rows of a head of q or k divided by their length, times a scale, and rounded, in float32."""
    length = tl.sqrt_rn(tl.sum(y * y, axis=1) + eps)
    return rounded(y / length[:, None] * scale, dtype).to(tl.float32)


# mix of runs  old[n, i] = silu(conv1d) of row i of those kept at slots[n], i < accepted[n], its k head divided by its
#              length, and old_g, old_b its gates; y of the run behind these rows, its q and k divided (q by sqrt(Dk)
#              too); g and b as in gdn_decay_beta. The first W - 1 rows of the state are then those behind the accepted
#              ones, and the run's come behind them, its gates into `gates`, if it is kept, keep[n] != 0; else they move
#              on by the run
# shapes       x, y [T, C], C = 2 Hk Dk + Hv Dv; kept [S, W - 1 + K, C]; weight [C, W]; alpha, beta, g, b [T, Hv];
#              rows of x, alpha and beta `steps` apart; old [B, K, C] in kept's dtype, old_g, old_b float32 [B, K, Hv];
#              gates float32 [S, K, 2, Hv] or None; starts int32 [B + 1] or None: a row each; slots, keep, accepted
#              int32 [B], the last two None: 0
# grid         (B, 2 Hk + Hv): one program owns a head of q, k or v of a sequence; those of v have the gates of it
# bytes        (T + B (W - 1)) * C * itemsize three times, and the weight
# limits       a head is at most 16384 wide; W at most TOKENS
#
# All is asked for before the first store, which loads could not pass. PDL: the next kernel may start when this one has
# seen the end of the one before.
@triton.jit(do_not_specialize=["T", "B", "slots"])
def _mix_runs_kernel(
    x_ptr, kept_ptr, weight_ptr, alpha_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, gates_ptr, starts_ptr, slots_ptr,
    keep_ptr, accepted_ptr, y_ptr, g_ptr, b_ptr, old_ptr, old_g_ptr, old_b_ptr, T, B, slots, depth, steps, Hk, Hv, Dk,
    Dv, eps, W: tl.constexpr, ROOM: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    kept_dtype: tl.constexpr = kept_ptr.dtype.element_ty
    n, part = tl.program_id(0), tl.program_id(1)
    head = part - 2 * Hk  # of v if not negative
    C = 2 * Hk * Dk + Hv * Dv
    i = tl.arange(0, BLOCK)
    begin = tl.where(head < 0, part * Dk, 2 * Hk * Dk + head * Dv)
    c, wide = begin + i, tl.where(head < 0, Dk, Dv)
    live = i < wide
    if PDL:
        prefetch_lines(weight_ptr + begin * W, wide * W, BLOCK * W)
        gdc_wait()
        gdc_launch_dependents()
    low, high, slot = _run_of(starts_ptr, slots_ptr, n, B, T, slots)
    if slot < 0:
        return
    K = depth - (W - 1)
    accepted, keep, count = _count(accepted_ptr, n, K), _count(keep_ptr, n, depth), high - low
    kept_ptr += slot * depth * C + c[None, :]
    x_ptr += low * steps.x + c[None, :]

    last = tl.arange(0, TOKENS)[:, None] + tl.where(keep > 0, 0, count)  # of the rows that the convolution keeps
    held = (tl.arange(0, TOKENS) < W - 1)[:, None] & live[None, :]
    before = tl.load(kept_ptr + (accepted + last) * C, mask=held & (last < W - 1), other=0.0)
    behind = tl.load(x_ptr + (last - (W - 1)) * steps.x, mask=held & (last >= W - 1), other=0.0)
    rows = tl.where(last < W - 1, before, behind.to(kept_dtype))

    place = tl.arange(0, ROOM)
    taken = (place < accepted)[:, None] & (i < tl.where(part >= Hk, wide, 0))[None, :]
    sums = tl.zeros((ROOM, BLOCK), tl.float32)
    for j in tl.static_range(W):
        weight = tl.load(weight_ptr + c * W + j, mask=live, other=0.0).to(tl.float32)
        old = tl.load(kept_ptr + (place[:, None] + j) * C, mask=taken, other=0.0).to(tl.float32)
        sums = tl.fma(old, tl.broadcast_to(weight[None, :], (ROOM, BLOCK)), sums)
    sums = _silu_rounded(sums, kept_dtype)
    if head < 0:
        sums = _unit_rows(sums, 1.0, eps, kept_dtype)
    if gates_ptr is not None:
        gates_ptr += slot * K * 2 * Hv + tl.maximum(head, 0)
        owned = place < tl.where(head >= 0, accepted, 0)
        old_g = tl.load(gates_ptr + place * 2 * Hv, mask=owned, other=0.0)
        old_b = tl.load(gates_ptr + (place * 2 + 1) * Hv, mask=owned, other=0.0)

    scale = tl.where(part < Hk, 1.0 / tl.sqrt_rn(tl.cast(Dk, tl.float32)), 1.0)
    for start in range(0, count, TOKENS):
        t = start + tl.arange(0, TOKENS)
        some = (t < count)[:, None] & live[None, :]
        total = tl.zeros((TOKENS, BLOCK), tl.float32)
        new = tl.load(x_ptr + t[:, None] * steps.x, mask=some, other=0.0)
        for j in tl.static_range(W):
            tap = tl.load(weight_ptr + c * W + j, mask=live, other=0.0).to(tl.float32)
            if j < W - 1:
                row = (t + (j - (W - 1)))[:, None]
                first = tl.load(kept_ptr + (accepted + row + (W - 1)) * C, mask=some & (row < 0), other=0.0)
                own = tl.load(x_ptr + row * steps.x, mask=some & (row >= 0), other=0.0)
                x = tl.where(row < 0, first.to(tl.float32), own.to(tl.float32))
            else:
                x = new.to(tl.float32)
            total = tl.fma(x, tl.broadcast_to(tap[None, :], (TOKENS, BLOCK)), total)
        y = _silu_rounded(total, dtype)
        if head < 0:
            y = _unit_rows(y, scale, eps, dtype)
        mine = t < tl.where(head >= 0, count, 0)
        own_head = tl.maximum(head, 0)
        token = (low + t) * Hv + own_head
        alpha = tl.load(alpha_ptr + (low + t) * steps.alpha + own_head, mask=mine, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + (low + t) * steps.beta + own_head, mask=mine, other=0.0).to(tl.float32)
        A = tl.load(A_log_ptr + own_head).to(tl.float32)
        g, b = decay(alpha, A, tl.load(dt_bias_ptr + own_head).to(tl.float32)), sigmoid(beta)
        tl.store(y_ptr + (low + t[:, None]) * C + c[None, :], rounded(y, dtype), mask=some)
        tl.store(g_ptr + token, g, mask=mine)
        tl.store(b_ptr + token, b, mask=mine)
        tl.debug_barrier()  # rows and gates that are written over were read by other threads
        room = tl.where(keep > 0, K, 0)
        tl.store(kept_ptr + (W - 1 + t[:, None]) * C, new.to(kept_dtype), mask=some & (t < room)[:, None])
        if gates_ptr is not None:
            tl.store(gates_ptr + t * 2 * Hv, g, mask=mine & (t < room))
            tl.store(gates_ptr + (t * 2 + 1) * Hv, b, mask=mine & (t < room))
    tl.debug_barrier()
    tl.store(kept_ptr + tl.arange(0, TOKENS)[:, None] * C, rows, mask=held)
    at = n.to(tl.int64) * K + place
    tl.store(old_ptr + at[:, None] * C + c[None, :], rounded(sums, kept_dtype), mask=taken)
    if gates_ptr is not None:
        tl.store(old_g_ptr + at * Hv + tl.maximum(head, 0), old_g, mask=owned)
        tl.store(old_b_ptr + at * Hv + tl.maximum(head, 0), old_b, mask=owned)


# verify    `recurrence` over the accepted tokens behind `mix of runs`, after which the state is written; then over the
#           run, behind which it moves on too unless that is kept
# shapes    as in `mix of runs`; state [S, Hv, Dv, Dk], y_out [T, Hv, Dv]
# grid      (B + 1, Hv, blocks of Dv): one program owns ROWS value rows of a state; those of B rows of no sequence,
#           which are 0
# bytes     B * Hv * Dv * Dk * itemsize for the state, read once and, where it moves, written
# limits    as in `recurrence`
#
# PDL: it starts while `mix of runs` ends, which writes neither state nor starts nor slots and has by then seen the end
# of the kernel before itself: so it asks for those before it waits.
@triton.jit(do_not_specialize=["T", "B", "slots"])
def _verify_kernel(
    state_ptr, y_ptr, g_ptr, b_ptr, old_ptr, old_g_ptr, old_b_ptr, starts_ptr, slots_ptr, keep_ptr, accepted_ptr,
    out_ptr, T, B, slots, K, Hk, Hv, Dk, Dv,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = state_ptr.dtype.element_ty
    n, head = tl.program_id(0), tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    cols = 32 * tl.arange(0, WIDE)[None, :, None] + tl.arange(0, 32)[None, None, :] + rows[:, None, None] * 0
    low, high, slot = _run_of(starts_ptr, slots_ptr, n, B, T, slots)
    moved = (rows[:, None, None] < tl.where(slot >= 0, Dv, 0)) & (cols < Dk)
    tile = state_ptr + ((tl.maximum(slot, 0) * Hv + head) * Dv + rows[:, None, None]) * Dk + cols
    S = tl.load(tile, mask=moved, other=0.0).to(tl.float32)
    out_ptr += head * Dv + rows
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if slot < 0:
        for t in range(low, high):
            tl.store(out_ptr + t * Hv * Dv, tl.zeros((ROWS,), out_ptr.dtype.element_ty), mask=rows < Dv)
        return
    accepted, keep = _count(accepted_ptr, n, K), _count(keep_ptr, n, T)
    if accepted > 0:
        for place in tl.range(0, accepted.to(tl.int32), num_stages=AHEAD):
            old = n.to(tl.int64) * K + place
            _query, key, value = token_of(old_ptr, old, head, rows, cols, Hk, Hv, Dk, Dv, GROUP)
            before, strength = gates_of(old_g_ptr, old_b_ptr, old * Hv + head, cols, Hv, Dk, False)
            S, _read = moved_on(S, key, key, value, before, strength, dtype, False)
        tl.store(tile, rounded(S, dtype), mask=moved)
    for t in tl.range(low.to(tl.int32), high.to(tl.int32), num_stages=AHEAD):
        token = tl.cast(t, tl.int64)
        q, k, v = token_of(y_ptr, token, head, rows, cols, Hk, Hv, Dk, Dv, GROUP)
        g, b = gates_of(g_ptr, b_ptr, token * Hv + head, cols, Hv, Dk, False)
        S, y = moved_on(S, q, k, v, g, b, dtype, False)
        tl.store(out_ptr + token * Hv * Dv, rounded(y, out_ptr.dtype.element_ty), mask=rows < Dv)
    if keep == 0:
        tl.store(tile, rounded(S, dtype), mask=moved)


def verify(
    qkv, z, alpha, beta, conv_state, state, gates, slots, starts, keep, accepted, conv_weight, A_log, dt_bias,
    norm_weight, Hk: int, eps: float, act: str, out: torch.Tensor,
) -> None:  # fmt: skip
    """`gated_delta_verify` where `takes_runs`; starts None: a row of each sequence, and gates, keep and accepted None:
    no run is kept, nor was one.
    """
    T, B, (S, Hv, Dv, Dk), W = len(qkv), len(slots), state.shape, conv_weight.shape[1]
    depth = conv_state.shape[1]
    K = depth - (W - 1)
    y, g, b = qkv.new_empty(qkv.shape), *(qkv.new_empty((T, Hv), dtype=torch.float32) for _ in range(2))
    old = conv_state.new_empty((B, max(1, K), qkv.shape[1]))
    old_gates = [qkv.new_empty((B, max(1, K), Hv), dtype=torch.float32) for _ in range(2)]
    where, pdl = (starts, slots, keep, accepted), pdl_options()
    _mix_runs_kernel[(B, 2 * Hk + Hv)](
        qkv, conv_state, conv_weight, alpha, beta, A_log, dt_bias, gates, *where, y, g, b, old, *old_gates, T, B, S,
        depth, row_steps(qkv, alpha, beta), Hk, Hv, Dk, Dv, 1e-6, W=W, ROOM=triton.next_power_of_2(max(1, K)),
        TOKENS=TOKENS, BLOCK=triton.next_power_of_2(max(Dk, Dv)), num_warps=4, **pdl,
    )  # fmt: skip
    rows, wide, warps = recurrence_tile(Dk, Dv)
    _verify_kernel[(B + 1, Hv, triton.cdiv(Dv, rows))](
        state, y, g, b, old, *old_gates, *where, out, T, B, S, K, Hk, Hv, Dk, Dv, GROUP=Hv // Hk, ROWS=rows, WIDE=wide,
        AHEAD=DELTA_AHEAD, num_warps=warps, **pdl,
    )  # fmt: skip
    if T:
        gated_rms_norm(out, z, norm_weight, eps, act, out=out)


def takes_runs(W: int) -> bool:
    """Whether a program holds the rows that a convolution keeps."""
    return W <= TOKENS
