"""The causal convolution of a gated delta net on the GPU, and the rows that it keeps."""

import torch
import triton
import triton.language as tl

import penstock.backends.cuda._launch  # noqa: F401  (sets Triton up)
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._runs import block_of, sequence_of
from penstock.backends.cuda._tuning import CONV_DOWN


@triton.jit
def _store(y_ptr, x, mask, SILU: tl.constexpr):
    """x, or x / (1 + exp(-x)): one division; exp overflows to infinity where the result is 0."""
    if SILU:
        x = x / (1.0 + tl.exp(-x))
    tl.store(y_ptr, rounded(x, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_unit(y_ptr, x, first, mask, heads, SILU: tl.constexpr, DIM: tl.constexpr):
    """`_store` of a row of channels from `first` on; DIM > 0: q and k, `heads` of DIM channels each, to unit length."""
    CHANNELS: tl.constexpr = x.shape[0]
    kind: tl.constexpr = y_ptr.dtype.element_ty
    if SILU:
        x = x / (1.0 + tl.exp(-x))
    if DIM > 0:  # noqa: SIM102  (known when it is compiled)
        if first < 2 * heads * DIM:
            v = tl.reshape(rounded(x, kind).to(tl.float32), (CHANNELS // DIM, DIM))
            head = first // DIM + tl.arange(0, CHANNELS // DIM)
            factor = tl.rsqrt(tl.sum(v * v, axis=1) + 1e-6) * tl.where(head < heads, DIM**-0.5, 1.0)
            x = tl.reshape(v * tl.where(head < 2 * heads, factor, 1.0)[:, None], (CHANNELS,))
    tl.store(y_ptr, rounded(x, kind), mask=mask)


# conv1d   y[t, c] = silu(sum_j seq[t + j, c] * weight[c, j]), seq = state, x; by slots: seq = state[slots[t]], x[t];
#          the sum itself without SILU, here and below
# shapes   x, y [T, C]; state [W - 1, C] or [S, depth, C], depth >= W - 1, float32 or x's dtype; weight [C, W] of any
#          float; slots [T]
# grid     (blocks of tokens * blocks of channels,): one program owns a [TOKENS, CHANNELS] tile of y
# bytes    2 * T * C * itemsize; all but one of the W reads of an element of x come from the first-level cache
# limits   none; W is unrolled
@triton.jit(do_not_specialize=["T"])
def _conv1d_kernel(
    x_ptr, state_ptr, weight_ptr, slots_ptr, y_ptr, T, C, slots, depth, W: tl.constexpr, BY_SLOT: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(C, CHANNELS)
    first = (tl.program_id(0) // across).to(tl.int64) * TOKENS
    t = first + tl.arange(0, TOKENS)[:, None]
    c = (tl.program_id(0) % across) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = (t < T) & (c < C)
    slot = t * 0
    live = inside
    if BY_SLOT:
        slot = tl.load(slots_ptr + t, mask=t < T, other=-1).to(tl.int64)
        live = inside & (slot >= 0) & (slot < slots)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for j in tl.static_range(W):
        tap = tl.load(weight_ptr + c * W + j, mask=c < C, other=0.0).to(tl.float32)
        if BY_SLOT:
            if j < W - 1:
                row = tl.load(state_ptr + (slot * depth + j) * C + c, mask=live, other=0.0).to(tl.float32)
            else:
                row = tl.load(x_ptr + t * C + c, mask=live, other=0.0).to(tl.float32)
        else:
            at = t + (j - (W - 1))  # row of x; negative: of the state
            row = tl.load(x_ptr + at * C + c, mask=inside & (at >= 0), other=0.0).to(tl.float32)
            if first < W - 1:
                old = tl.load(state_ptr + (at + (W - 1)) * C + c, mask=inside & (at < 0), other=0.0)
                row += old.to(tl.float32)
        total = tl.fma(row, tap, total)
    _store(y_ptr + t * C + c, tl.where(live, total, 0.0), inside, SILU)


@triton.jit
def _taps(a, b, c, d, w0, w1, w2, w3):
    return tl.fma(d, w3, tl.fma(c, w2, tl.fma(b, w1, a * w0)))  # rounded as in `_conv1d_kernel`


# conv1d of 4 taps  as above, for one sequence of many tokens
# shapes            as above, W = 4
# grid              (blocks of tokens * blocks of channels,): one program goes down TOKENS rows of CHANNELS channels and
#                   keeps the last three in registers, so that every element is read and converted once
# bytes             2 * T * C * itemsize, and three rows in TOKENS again
# limits            TOKENS a multiple of 4
@triton.jit(do_not_specialize=["T"])
def _conv1d_down_kernel(
    x_ptr, state_ptr, weight_ptr, y_ptr, T, C, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, SILU: tl.constexpr
):
    across = tl.cdiv(C, CHANNELS)
    first = (tl.program_id(0) // across).to(tl.int64) * TOKENS
    c = (tl.program_id(0) % across) * CHANNELS + tl.arange(0, CHANNELS)
    live = c < C
    taps = tl.load(weight_ptr + c[:, None] * 4 + tl.arange(0, 4)[None, :], mask=live[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(taps.to(tl.float32), (CHANNELS, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    if first == 0:
        p = tl.load(state_ptr + c, mask=live, other=0.0).to(tl.float32)
        q = tl.load(state_ptr + C + c, mask=live, other=0.0).to(tl.float32)
        r = tl.load(state_ptr + 2 * C + c, mask=live, other=0.0).to(tl.float32)
    else:
        before = x_ptr + (first - 3) * C + c
        p = tl.load(before, mask=live, other=0.0).to(tl.float32)
        q = tl.load(before + C, mask=live, other=0.0).to(tl.float32)
        r = tl.load(before + 2 * C, mask=live, other=0.0).to(tl.float32)
    for n in range(0, TOKENS, 4):
        t = first + n
        at = t * C + c
        # four loads under way before the first store, which they could not pass
        x0 = tl.load(x_ptr + at, mask=c < tl.where(t < T, C, 0), other=0.0).to(tl.float32)
        x1 = tl.load(x_ptr + at + C, mask=c < tl.where(t + 1 < T, C, 0), other=0.0).to(tl.float32)
        x2 = tl.load(x_ptr + at + 2 * C, mask=c < tl.where(t + 2 < T, C, 0), other=0.0).to(tl.float32)
        x3 = tl.load(x_ptr + at + 3 * C, mask=c < tl.where(t + 3 < T, C, 0), other=0.0).to(tl.float32)
        _store(y_ptr + at, _taps(p, q, r, x0, w0, w1, w2, w3), c < tl.where(t < T, C, 0), SILU)
        _store(y_ptr + at + C, _taps(q, r, x0, x1, w0, w1, w2, w3), c < tl.where(t + 1 < T, C, 0), SILU)
        _store(y_ptr + at + 2 * C, _taps(r, x0, x1, x2, w0, w1, w2, w3), c < tl.where(t + 2 < T, C, 0), SILU)
        _store(y_ptr + at + 3 * C, _taps(x0, x1, x2, x3, w0, w1, w2, w3), c < tl.where(t + 3 < T, C, 0), SILU)
        p, q, r = x1, x2, x3


def convolve(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, slots: torch.Tensor | None, silu: bool,
    out: torch.Tensor,
) -> None:  # fmt: skip
    T, C = x.shape
    W = weight.shape[1]
    if slots is None and W == 4 and T >= 64:
        tokens, channels, warps = CONV_DOWN
        channels = min(channels, triton.next_power_of_2(C))
        grid = (triton.cdiv(T, tokens) * triton.cdiv(C, channels),)
        _conv1d_down_kernel[grid](x, state, weight, out, T, C, tokens, channels, silu, num_warps=warps)
        return
    tokens, channels = 1 if T < 64 else 8, min(128, triton.next_power_of_2(C))
    grid = (triton.cdiv(T, tokens) * triton.cdiv(C, channels),)
    _conv1d_kernel[grid](
        x, state, weight, slots, out, T, C, state.shape[0], state.shape[-2], W, slots is not None, tokens, channels,
        silu,
        num_warps=1 if tokens == 1 else 4,
    )  # fmt: skip


# conv1d_state_update  state <- the last W - 1 rows of state, x (of one row x[b] for state[slots[b]])
# shapes               state [W - 1, C] or [S, depth, C], depth >= W - 1, float32 or x's dtype; x [T, C]; slots [B]
# grid                 (rows * blocks of channels,): one program moves on CHANNELS columns of a state, a thread its own
# bytes                2 * (W - 1) * C * itemsize for each state
# limits               none
@triton.jit(do_not_specialize=["T"])
def _conv1d_shift_kernel(
    state_ptr, x_ptr, slots_ptr, T, C, slots, depth, KEPT: tl.constexpr, BY_SLOT: tl.constexpr, CHANNELS: tl.constexpr
):
    across = tl.cdiv(C, CHANNELS)
    row = (tl.program_id(0) // across).to(tl.int64)
    c = (tl.program_id(0) % across) * CHANNELS + tl.arange(0, CHANNELS)
    new, slot, most = tl.cast(T, tl.int64), row * 0, C
    if BY_SLOT:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        new, most = row * 0 + 1, tl.where((slot >= 0) & (slot < slots), C, 0)
    state_ptr += slot * depth * C
    x_ptr += row * C
    # Row r becomes row r + new of state, x. In rising order a thread reads every row before it writes it.
    for r in range(KEPT):
        at = r + new
        old = tl.load(state_ptr + at * C + c, mask=c < tl.where(at < KEPT, most, 0), other=0.0)
        fresh = tl.load(x_ptr + (at - KEPT) * C + c, mask=c < tl.where(at < KEPT, 0, most), other=0.0)
        tl.store(state_ptr + r * C + c, tl.where(at < KEPT, old, fresh.to(old.dtype)), mask=c < most)


# conv1d of runs  as conv1d, seq = the first W - 1 rows of state[slots[b]], then the run of sequence b (ops/ragged.py);
#                 0 for rows of no sequence and of those without a slot
# shapes          x, y [T, C]; state [slots, rows, C], rows >= W - 1; starts int32 [B + 1], slots int32 [B]
# grid            (blocks of tokens * blocks of channels,): one program owns a [TOKENS, CHANNELS] tile of y
# bytes           as conv1d
# limits          SEQUENCES >= B
@triton.jit(do_not_specialize=["T", "B", "slots"])
def _conv1d_runs_kernel(
    x_ptr, state_ptr, weight_ptr, starts_ptr, slots_ptr, y_ptr, T, B, C, rows, slots, W: tl.constexpr,
    SEQUENCES: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(C, CHANNELS)
    row = (tl.program_id(0) // across) * TOKENS + tl.arange(0, TOKENS)
    b = sequence_of(starts_ptr, B, row, SEQUENCES)
    there = (row < T) & (b < B)
    first = tl.load(starts_ptr + b, mask=there, other=0).to(tl.int64)[:, None]
    slot = tl.load(slots_ptr + b, mask=there, other=-1).to(tl.int64)[:, None]
    t = row.to(tl.int64)[:, None]
    c = (tl.program_id(0) % across) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = (t < T) & (c < C)
    live = inside & (slot >= 0) & (slot < slots)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for j in tl.static_range(W):
        tap = tl.load(weight_ptr + c * W + j, mask=c < C, other=0.0).to(tl.float32)
        at = t + (j - (W - 1))
        before = at - first + (W - 1)  # row of the state, if the run does not have it
        new = tl.load(x_ptr + at * C + c, mask=live & (at >= first), other=0.0).to(tl.float32)
        old = tl.load(state_ptr + (slot * rows + before) * C + c, mask=live & (at < first), other=0.0).to(tl.float32)
        total = tl.fma(tl.where(at < first, old, new), tap, total)
    _store(y_ptr + t * C + c, tl.where(live, total, 0.0), inside, SILU)


@triton.jit
def _kept_row(state_ptr, x_ptr, at, first, slot, rows, C, c, live):
    """Row `at` of a run that begins at `first`: of x, or one of the three that its slot keeps from before."""
    new = tl.load(x_ptr + at * C + c, mask=c < tl.where(at >= first, live, 0), other=0.0).to(tl.float32)
    old = tl.load(state_ptr + (slot * rows + at - first + 3) * C + c, mask=c < tl.where(at < first, live, 0), other=0.0)
    return new + old.to(tl.float32)


@triton.jit
def _run_of(starts_ptr, slots_ptr, b, B, T, slots):
    """First row, end and slot of run b; behind the last one rows of none, slot -1."""
    first = tl.load(starts_ptr + b).to(tl.int64)
    end = tl.load(starts_ptr + b + 1, mask=b < B, other=T).to(tl.int64)
    slot = tl.load(slots_ptr + b, mask=b < B, other=-1).to(tl.int64)
    return first, end, tl.where(slot < slots, slot, -1)


# conv1d of runs, 4 taps  as conv1d of runs, for many rows; DIM > 0: then q and k in front, `heads` of DIM each, as
#                         in rms_norm_qk
# shapes                  as conv1d of runs, W = 4
# grid                    (blocks of tokens * blocks of channels,): one program goes down TOKENS rows of CHANNELS
#                         channels and keeps the last three in registers; where another run begins it takes those of
#                         its slot
# bytes                   as conv1d of 4 taps
# limits                  SEQUENCES >= B; TOKENS a multiple of 4, CHANNELS one of DIM
@triton.jit(do_not_specialize=["T", "B", "slots"])
def _conv1d_runs_down_kernel(
    x_ptr, state_ptr, weight_ptr, starts_ptr, slots_ptr, y_ptr, T, B, C, rows, slots, heads,
    SEQUENCES: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, SILU: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(C, CHANNELS)
    top = (tl.program_id(0) // across).to(tl.int64) * TOKENS
    left = (tl.program_id(0) % across) * CHANNELS
    c = left + tl.arange(0, CHANNELS)
    taps = tl.load(weight_ptr + c[:, None] * 4 + tl.arange(0, 4)[None, :], mask=(c < C)[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(taps.to(tl.float32), (CHANNELS, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    b = tl.sum(sequence_of(starts_ptr, B, top + tl.arange(0, 1), SEQUENCES))
    first, end, slot = _run_of(starts_ptr, slots_ptr, b, B, T, slots)
    live = tl.where(slot >= 0, C, 0)
    p = _kept_row(state_ptr, x_ptr, top - 3, first, slot, rows, C, c, live)
    q = _kept_row(state_ptr, x_ptr, top - 2, first, slot, rows, C, c, live)
    r = _kept_row(state_ptr, x_ptr, top - 1, first, slot, rows, C, c, live)
    for n in range(0, TOKENS, 4):
        t = top + n
        if t + 3 < end:  # four loads under way before the first store, which they could not pass
            at = t * C + c
            x0 = tl.load(x_ptr + at, mask=c < live, other=0.0).to(tl.float32)
            x1 = tl.load(x_ptr + at + C, mask=c < live, other=0.0).to(tl.float32)
            x2 = tl.load(x_ptr + at + 2 * C, mask=c < live, other=0.0).to(tl.float32)
            x3 = tl.load(x_ptr + at + 3 * C, mask=c < live, other=0.0).to(tl.float32)
            _store_unit(y_ptr + at, _taps(p, q, r, x0, w0, w1, w2, w3), left, c < C, heads, SILU, DIM)
            _store_unit(y_ptr + at + C, _taps(q, r, x0, x1, w0, w1, w2, w3), left, c < C, heads, SILU, DIM)
            _store_unit(y_ptr + at + 2 * C, _taps(r, x0, x1, x2, w0, w1, w2, w3), left, c < C, heads, SILU, DIM)
            _store_unit(y_ptr + at + 3 * C, _taps(x0, x1, x2, x3, w0, w1, w2, w3), left, c < C, heads, SILU, DIM)
            p, q, r = x1, x2, x3
        else:
            for i in range(4):
                row = t + i
                if row < T:
                    if row >= end:
                        while (row >= end) & (b < B):
                            b += 1
                            first, end, slot = _run_of(starts_ptr, slots_ptr, b, B, T, slots)
                        live = tl.where(slot >= 0, C, 0)
                        p = _kept_row(state_ptr, x_ptr, row - 3, first, slot, rows, C, c, live)
                        q = _kept_row(state_ptr, x_ptr, row - 2, first, slot, rows, C, c, live)
                        r = _kept_row(state_ptr, x_ptr, row - 1, first, slot, rows, C, c, live)
                    x = tl.load(x_ptr + row * C + c, mask=c < live, other=0.0).to(tl.float32)
                    _store_unit(y_ptr + row * C + c, _taps(p, q, r, x, w0, w1, w2, w3), left, c < C, heads, SILU, DIM)
                    p, q, r = q, r, x


def convolve_runs(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor,
    silu: bool, heads: int, dim: int, out: torch.Tensor,
) -> bool:  # fmt: skip
    """Whether heads of q and k in front, so many of `dim` channels, are of unit length, too: those of many rows."""
    T, C = x.shape
    if weight.shape[1] == 4 and T >= 64:
        tokens, channels, warps = CONV_DOWN
        channels = min(channels, triton.next_power_of_2(C))
        whole = heads > 0 and channels % dim == 0
        _conv1d_runs_down_kernel[(triton.cdiv(T, tokens) * triton.cdiv(C, channels),)](
            x, state, weight, starts, slots, out, T, len(slots), C, state.shape[1], state.shape[0], heads,
            block_of(len(slots)), tokens, channels, silu, dim if whole else 0, num_warps=warps,
        )  # fmt: skip
        return whole
    tokens, channels = 1 if T < 64 else 8, min(128, triton.next_power_of_2(C))
    grid = (triton.cdiv(T, tokens) * triton.cdiv(C, channels),)
    _conv1d_runs_kernel[grid](
        x, state, weight, starts, slots, out, T, len(slots), C, state.shape[1], state.shape[0], weight.shape[1],
        block_of(len(slots)), tokens, channels, silu, num_warps=1 if tokens == 1 else 4,
    )  # fmt: skip
    return False


def move_on(state: torch.Tensor, x: torch.Tensor, slots: torch.Tensor | None, width: int | None = None) -> None:
    T, C = x.shape
    kept = state.shape[-2] if width is None else width - 1
    channels = min(128, triton.next_power_of_2(C))
    grid = ((1 if slots is None else T) * triton.cdiv(C, channels),)
    _conv1d_shift_kernel[grid](
        state, x, slots, T, C, state.shape[0], state.shape[-2], kept, slots is not None, channels, num_warps=1
    )


# update of runs  rows 0 .. KEPT - 1 of state[slots[b]] <- the last KEPT rows of them and the run of sequence b; of a
#                 run that is kept, keep[b] != 0, its rows go behind them instead
# shapes          state [slots, rows, C], float32 or x's dtype; x [T, C]; starts int32 [B + 1]; slots, keep int32 [B]
# grid            (B * blocks of channels,): one program moves on CHANNELS columns of a state, a thread its own
# bytes           2 * KEPT * C * itemsize for each state, and the rows of kept runs twice
# limits          none; kept rows beyond those of the state are not written
@triton.jit(do_not_specialize=["slots"])
def _conv1d_shift_runs_kernel(
    state_ptr, x_ptr, starts_ptr, slots_ptr, keep_ptr, C, rows, slots, KEPT: tl.constexpr, CHANNELS: tl.constexpr
):
    across = tl.cdiv(C, CHANNELS)
    b = tl.program_id(0) // across
    c = (tl.program_id(0) % across) * CHANNELS + tl.arange(0, CHANNELS)
    first = tl.load(starts_ptr + b)
    new = (tl.load(starts_ptr + b + 1) - first).to(tl.int64)
    slot = tl.load(slots_ptr + b).to(tl.int64)
    if (new == 0) | (slot < 0) | (slot >= slots):
        return
    state_ptr += slot * rows * C + c
    x_ptr += first.to(tl.int64) * C + c
    kept = 0
    if keep_ptr is not None:
        kept = tl.load(keep_ptr + b)
    if kept != 0:
        for i in range(tl.minimum(new, rows - KEPT)):
            x = tl.load(x_ptr + i * C, mask=c < C)
            tl.store(state_ptr + (KEPT + i) * C, x.to(state_ptr.dtype.element_ty), mask=c < C)
    else:
        for r in range(KEPT):  # in rising order a thread reads every row before it writes it
            at = r + new
            old = tl.load(state_ptr + at * C, mask=c < tl.where(at < KEPT, C, 0), other=0.0)
            fresh = tl.load(x_ptr + (at - KEPT) * C, mask=c < tl.where(at < KEPT, 0, C), other=0.0)
            tl.store(state_ptr + r * C, tl.where(at < KEPT, old, fresh.to(old.dtype)), mask=c < C)


def move_runs_on(
    state: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor, keep: torch.Tensor | None,
    width: int | None,
) -> None:  # fmt: skip
    C = x.shape[1]
    channels = min(128, triton.next_power_of_2(C))
    kept = state.shape[1] if width is None else width - 1
    _conv1d_shift_runs_kernel[(len(slots) * triton.cdiv(C, channels),)](
        state, x, starts, slots, keep, C, state.shape[1], state.shape[0], kept, channels, num_warps=1
    )


# commit of kept rows  rows 0 .. KEPT - 1 of state[slots[b]] <- rows accepted[b] .. accepted[b] + KEPT - 1
# shapes               state [slots, rows, C]; slots, accepted int32 [B]
# grid                 (B * blocks of channels,): one program moves CHANNELS columns of a state, a thread its own
# bytes                2 * KEPT * C * itemsize for each state that moves
# limits               none; more than there is room for is as much as there is
@triton.jit(do_not_specialize=["slots"])
def _conv1d_commit_kept_kernel(
    state_ptr, slots_ptr, accepted_ptr, C, rows, slots, KEPT: tl.constexpr, CHANNELS: tl.constexpr
):
    across = tl.cdiv(C, CHANNELS)
    b = tl.program_id(0) // across
    c = (tl.program_id(0) % across) * CHANNELS + tl.arange(0, CHANNELS)
    slot = tl.load(slots_ptr + b).to(tl.int64)
    count = tl.minimum(tl.load(accepted_ptr + b), rows - KEPT)
    if (count <= 0) | (slot < 0) | (slot >= slots):
        return
    state_ptr += slot * rows * C + c
    for r in range(KEPT):  # in rising order a thread reads every row before it writes it
        tl.store(state_ptr + r * C, tl.load(state_ptr + (r + count) * C, mask=c < C), mask=c < C)


def commit_kept(state: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor, width: int) -> None:
    _, rows, C = state.shape
    channels = min(128, triton.next_power_of_2(C))
    _conv1d_commit_kept_kernel[(len(slots) * triton.cdiv(C, channels),)](
        state, slots, accepted, C, rows, state.shape[0], width - 1, channels, num_warps=1
    )


# commit of rows  y[b, i] = silu(conv1d) of row i of those kept at slots[b], i < accepted[b]; then the first W - 1 rows
#                 of the state <- those from accepted[b] on
# shapes          state [slots, rows, C], rows = W - 1 + K; weight [C, W]; slots, accepted int32 [B]; y [B, K, C]
# grid            (B * blocks of channels,): one program has CHANNELS columns of a sequence, a thread its own
# bytes           (W + 1) * accepted * C * itemsize, mostly from the first-level cache, and 2 * (W - 1) * C * itemsize
# limits          none; other rows of y stay as they are
@triton.jit(do_not_specialize=["slots"])
def _conv1d_commit_kernel(
    state_ptr, weight_ptr, slots_ptr, accepted_ptr, y_ptr, C, K, slots, W: tl.constexpr, CHANNELS: tl.constexpr
):
    across = tl.cdiv(C, CHANNELS)
    b = tl.program_id(0) // across
    c = (tl.program_id(0) % across) * CHANNELS + tl.arange(0, CHANNELS)
    slot = tl.load(slots_ptr + b).to(tl.int64)
    count = tl.minimum(tl.load(accepted_ptr + b), K)
    if (count <= 0) | (slot < 0) | (slot >= slots):
        return
    state_ptr += slot * (W - 1 + K) * C + c
    y_ptr += b.to(tl.int64) * K * C + c
    for i in range(count):
        total = tl.zeros((CHANNELS,), tl.float32)
        for j in tl.static_range(W):
            tap = tl.load(weight_ptr + c * W + j, mask=c < C, other=0.0).to(tl.float32)
            row = tl.load(state_ptr + (i + j) * C, mask=c < C, other=0.0).to(tl.float32)
            total = tl.fma(row, tap, total)
        _store(y_ptr + i * C, total, c < C, True)
    for r in range(W - 1):
        tl.store(state_ptr + r * C, tl.load(state_ptr + (r + count) * C, mask=c < C), mask=c < C)


def commit_rows(
    state: torch.Tensor, weight: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor, out: torch.Tensor
) -> None:
    """Writes out [B, K, C], the convolution of accepted rows, and moves the states on by them."""
    B, K, C = out.shape
    channels = min(128, triton.next_power_of_2(C))
    _conv1d_commit_kernel[(B * triton.cdiv(C, channels),)](
        state, weight, slots, accepted, out, C, K, state.shape[0], weight.shape[1], channels, num_warps=1
    )
