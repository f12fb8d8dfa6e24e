"""A gated delta net's runs that are kept: all between the projections of a layer, in two launches.

The first moves the rows of the convolution on by what was accepted of the run before, and convolves those rows and the
run's. In the second every program owns the state of a head: it takes the accepted tokens in and writes the state once,
then runs the new tokens from there and norms what they give.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.backends.cuda._delta_step import advance, decay, gate, load_part, store_part
from penstock.backends.cuda._launch import pdl_options, sigmoid
from penstock.backends.cuda._rows import rounded

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
#              length; y of the run behind these rows, its q and k divided (q by sqrt(Dk) too); g and b as in
#              gdn_decay_beta. The first W - 1 rows of the state are then those behind the accepted ones, and the run's
#              come behind them if it is kept, keep[n] != 0; else they move on by the run
# shapes       x, y [T, C], C = 2 Hk Dk + Hv Dv; kept [S, W - 1 + K, C]; weight [C, W]; alpha, beta, g, b [T, Hv];
#              old [B, K, C] in kept's dtype; starts int32 [B + 1] or None: a row each; slots, keep, accepted int32 [B],
#              the last two None: 0
# grid         (B, 2 Hk + Hv): one program owns a head of q, k or v of a sequence; those of v have the gates of it
# bytes        (T + B (W - 1)) * C * itemsize three times, and the weight
# limits       a head is at most 16384 wide
#
# PDL: the next kernel may start when this one has seen the end of the one before.
@triton.jit(do_not_specialize=["T", "B", "slots"])
def _mix_runs_kernel(
    x_ptr, kept_ptr, weight_ptr, alpha_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, starts_ptr, slots_ptr, keep_ptr,
    accepted_ptr, y_ptr, g_ptr, b_ptr, old_ptr, T, B, slots, depth, Hk, Hv, Dk, Dv, eps,
    W: tl.constexpr, ROOM: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    kept_dtype: tl.constexpr = kept_ptr.dtype.element_ty
    n, part = tl.program_id(0), tl.program_id(1)
    head = part - 2 * Hk  # of v if not negative
    C = 2 * Hk * Dk + Hv * Dv
    i = tl.arange(0, BLOCK)
    c = tl.where(head < 0, part * Dk, 2 * Hk * Dk + head * Dv) + i
    wide = tl.where(head < 0, Dk, Dv)
    live = i < wide
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    low, high, slot = _run_of(starts_ptr, slots_ptr, n, B, T, slots)
    if slot < 0:
        return
    K = depth - (W - 1)
    accepted, keep, count = _count(accepted_ptr, n, K), _count(keep_ptr, n, depth), high - low
    kept_ptr += slot * depth * C + c
    x_ptr += low * C + c
    if (accepted > 0) & (part >= Hk):
        old = tl.arange(0, ROOM)[:, None]
        taken = (old < accepted) & live[None, :]
        sums = tl.zeros((ROOM, BLOCK), tl.float32)
        for j in tl.static_range(W):
            tap = tl.load(weight_ptr + c * W + j, mask=live, other=0.0).to(tl.float32)
            x = tl.load(kept_ptr[None, :] + (old + j) * C, mask=taken, other=0.0).to(tl.float32)
            sums = tl.fma(x, tl.broadcast_to(tap[None, :], (ROOM, BLOCK)), sums)
        sums = _silu_rounded(sums, kept_dtype)
        if head < 0:
            sums = _unit_rows(sums, 1.0, eps, kept_dtype)
        tl.store(old_ptr + (n.to(tl.int64) * K + old) * C + c[None, :], rounded(sums, kept_dtype), mask=taken)
    scale = tl.where(part < Hk, 1.0 / tl.sqrt_rn(tl.cast(Dk, tl.float32)), 1.0)
    for start in range(0, count, TOKENS):
        t = start + tl.arange(0, TOKENS)
        some = (t < count)[:, None] & live[None, :]
        total = tl.zeros((TOKENS, BLOCK), tl.float32)
        for j in tl.static_range(W):
            tap = tl.load(weight_ptr + c * W + j, mask=live, other=0.0).to(tl.float32)
            row = (t + (j - (W - 1)))[:, None]
            before = tl.load(kept_ptr[None, :] + (accepted + row + (W - 1)) * C, mask=some & (row < 0), other=0.0)
            own = tl.load(x_ptr[None, :] + row * C, mask=some & (row >= 0), other=0.0)
            x = tl.where(row < 0, before.to(tl.float32), own.to(tl.float32))
            total = tl.fma(x, tl.broadcast_to(tap[None, :], (TOKENS, BLOCK)), total)
        y = _silu_rounded(total, dtype)
        if head < 0:
            y = _unit_rows(y, scale, eps, dtype)
        tl.store(y_ptr + (low + t[:, None]) * C + c[None, :], rounded(y, dtype), mask=some)
        if head >= 0:
            token = (low + t) * Hv + head
            alpha = tl.load(alpha_ptr + token, mask=t < count, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptr + token, mask=t < count, other=0.0).to(tl.float32)
            A, bias = tl.load(A_log_ptr + head).to(tl.float32), tl.load(dt_bias_ptr + head).to(tl.float32)
            tl.store(g_ptr + token, decay(alpha, A, bias), mask=t < count)
            tl.store(b_ptr + token, sigmoid(beta), mask=t < count)
    # rows of the state are read by other threads than write them
    tl.debug_barrier()
    moved = tl.where(keep > 0, 0, count)
    for r in tl.static_range(W - 1):  # in rising order a thread reads every row before it writes it
        at = r + moved
        first = tl.load(kept_ptr + (accepted + at) * C, mask=i < tl.where(at < W - 1, wide, 0), other=0.0)
        last = tl.load(x_ptr + (at - (W - 1)) * C, mask=i < tl.where(at < W - 1, 0, wide), other=0.0)
        tl.store(kept_ptr + r * C, tl.where(at < W - 1, first, last.to(kept_dtype)), mask=live)
    if keep > 0:
        for place in range(tl.minimum(count, K)):
            new = tl.load(x_ptr + place * C, mask=live, other=0.0)
            tl.store(kept_ptr + (W - 1 + place) * C, new.to(kept_dtype), mask=live)


@triton.jit
def _loaded(y_ptr, at, i, rows, live, key, head, Hk, Dk, Dv, WIDE: tl.constexpr, LINE: tl.constexpr):
    """q and k [WIDE, 1, LINE], their product, and v [ROWS] of a row of q | k | v that begins at `at`."""
    columns, values = tl.where(live, Dk, 0), tl.where(live, Dv, 0)
    q = tl.load(y_ptr + at + key * Dk + i, mask=i < columns, other=0.0).to(tl.float32)
    k = tl.load(y_ptr + at + (Hk + key) * Dk + i, mask=i < columns, other=0.0).to(tl.float32)
    v = tl.load(y_ptr + at + 2 * Hk * Dk + head * Dv + rows, mask=rows < values, other=0.0).to(tl.float32)
    kq = tl.sum(k * q, axis=0)
    return tl.reshape(q, (WIDE, LINE))[:, None, :], tl.reshape(k, (WIDE, LINE))[:, None, :], kq, v


# verify    `recurrence` over the accepted tokens behind `mix of runs`, after which the state is written; then over the
#           run, of whose y rounded out = y * rinv(y) * act(z) * norm. The gates of a kept run go to gates[slots[n]],
#           and the state stays as it was before it; else it moves on
# shapes    as in `mix of runs`; gates float32 [S, K, 2, Hv]; state [S, Hv, Dv, Dk]; z, out [T, Hv, Dv]; norm [Dv]
# grid      (B + 1, Hv): one program owns the state of a head; those of B rows of no sequence, which are 0
# bytes     B * Hv * Dv * Dk * itemsize for the state, read once and, where it moves, written
# limits    Dv * Dk, each up to a power of two, at most 16384: the state lies in the registers of a program
#
# PDL: it starts while `mix of runs` ends, which writes neither state nor starts nor slots and has by then seen the end
# of the kernel before itself: so it asks for those before it waits.
@triton.jit(do_not_specialize=["T", "B", "slots"])
def _verify_kernel(
    state_ptr, y_ptr, g_ptr, b_ptr, old_ptr, gates_ptr, z_ptr, norm_ptr, starts_ptr, slots_ptr, keep_ptr, accepted_ptr,
    out_ptr, T, B, slots, K, eps, Hk: tl.constexpr, Hv: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, LINE: tl.constexpr, ROOM: tl.constexpr, ACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = out_ptr.dtype.element_ty
    dtype: tl.constexpr = state_ptr.dtype.element_ty
    n, head = tl.program_id(0), tl.program_id(1)
    C: tl.constexpr = 2 * Hk * Dk + Hv * Dv
    EXACT: tl.constexpr = Dk == WIDE * LINE and Dv == ROWS
    key = head // (Hv // Hk)
    rows, i = tl.arange(0, ROWS), tl.arange(0, WIDE * LINE)
    cols = LINE * tl.arange(0, WIDE)[:, None, None] + tl.arange(0, LINE)[None, None, :]
    low, high, slot = _run_of(starts_ptr, slots_ptr, n, B, T, slots)
    inside = (rows[None, :, None] < Dv) & (cols < Dk)
    tile = state_ptr + (tl.maximum(slot, 0) * Hv + head) * Dv * Dk + (rows[None, :, None] * Dk + cols)
    S = load_part(tile, inside, EXACT, "").to(tl.float32)
    norm = tl.load(norm_ptr + rows, mask=rows < Dv, other=0.0).to(tl.float32)
    out_ptr += head * Dv + rows
    z_ptr += head * Dv + rows
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if slot < 0:
        for t in range(low, high):
            tl.store(out_ptr + t * Hv * Dv, tl.zeros((ROWS,), kind), mask=rows < Dv)
        return
    accepted, keep = _count(accepted_ptr, n, K), _count(keep_ptr, n, T)
    if gates_ptr is not None:
        gates_ptr += slot * K * 2 * Hv + head
    if accepted > 0:
        old_ptr += n.to(tl.int64) * K * C
        for place in range(accepted):
            own_ptr = old_ptr + place * C
            decayed, strength = tl.load(gates_ptr + place * 2 * Hv), tl.load(gates_ptr + (place * 2 + 1) * Hv)
            line = tl.load(own_ptr + (Hk + key) * Dk + i, mask=i < Dk, other=0.0).to(tl.float32)
            value = tl.load(own_ptr + 2 * Hk * Dk + head * Dv + rows, mask=rows < Dv, other=0.0).to(tl.float32)
            column = tl.reshape(line, (WIDE, LINE))[:, None, :]
            S, _ = advance(S, column, column, 0.0, value, decayed, strength, False)
            S = rounded(S, dtype).to(tl.float32)
        store_part(tile, S, inside, EXACT, "")
    q, k, kq, v = _loaded(y_ptr, low * C, i, rows, low < high, key, head, Hk, Dk, Dv, WIDE, LINE)
    for t in range(low, high):
        at = t * Hv + head
        g, b = tl.load(g_ptr + at), tl.load(b_ptr + at)
        z = tl.load(z_ptr + t * Hv * Dv, mask=rows < Dv, other=0.0).to(tl.float32)
        behind = _loaded(y_ptr, (t + 1) * C, i, rows, t + 1 < high, key, head, Hk, Dk, Dv, WIDE, LINE)
        S, y = advance(S, q, k, kq, v, g, b, False)
        S = rounded(S, dtype).to(tl.float32)
        y = rounded(y, kind).to(tl.float32)
        y *= tl.rsqrt(tl.sum(y * y, axis=0) / Dv + eps) * gate(z, ACT) * norm
        tl.store(out_ptr + t * Hv * Dv, rounded(y, kind), mask=rows < Dv)
        q, k, kq, v = behind
    if keep == 0:
        store_part(tile, S, inside, EXACT, "")
    elif gates_ptr is not None:
        tl.debug_barrier()  # all have read the gates of the run before
        r = tl.arange(0, ROOM)
        some = r < tl.minimum(high - low, K)
        at = (low + r) * Hv + head
        tl.store(gates_ptr + r * 2 * Hv, tl.load(g_ptr + at, mask=some, other=0.0), mask=some)
        tl.store(gates_ptr + (r * 2 + 1) * Hv, tl.load(b_ptr + at, mask=some, other=0.0), mask=some)


def verify(
    qkv, z, alpha, beta, conv_state, state, gates, slots, starts, keep, accepted, conv_weight, A_log, dt_bias,
    norm_weight, Hk: int, eps: float, act: str, out: torch.Tensor,
) -> None:  # fmt: skip
    """`gated_delta_verify` where `takes_steps`; starts None: a row of each sequence, and gates, keep and accepted None:
    no run is kept, nor was one.
    """
    T, B, (S, Hv, Dv, Dk), W = len(qkv), len(slots), state.shape, conv_weight.shape[1]
    depth = conv_state.shape[1]
    K = depth - (W - 1)
    room = triton.next_power_of_2(max(1, K))
    y, g, b = torch.empty_like(qkv), *(qkv.new_empty((T, Hv), dtype=torch.float32) for _ in range(2))
    old = conv_state.new_empty((B, max(1, K), qkv.shape[1]))
    where, pdl = (starts, slots, keep, accepted), pdl_options()
    _mix_runs_kernel[(B, 2 * Hk + Hv)](
        qkv, conv_state, conv_weight, alpha, beta, A_log, dt_bias, *where, y, g, b, old, T, B, S, depth, Hk, Hv, Dk,
        Dv, 1e-6, W=W, ROOM=room, TOKENS=TOKENS, BLOCK=triton.next_power_of_2(max(Dk, Dv)), num_warps=4, **pdl,
    )  # fmt: skip
    line = min(128 // state.element_size(), max(32, triton.next_power_of_2(Dk)))
    rows, wide = triton.next_power_of_2(Dv), triton.next_power_of_2(triton.cdiv(Dk, line))
    warps = max(1, min(8, rows * wide * line // 2048))
    _verify_kernel[(B + 1, Hv)](
        state, y, g, b, old, gates, z, norm_weight, *where, out, T, B, S, K, eps, Hk=Hk, Hv=Hv, Dk=Dk, Dv=Dv,
        ROWS=rows, WIDE=wide, LINE=line, ROOM=room, ACT=act, num_warps=warps, **pdl,
    )  # fmt: skip
