"""The gated delta rule token by token, with the state in the registers of the programs that have its value rows."""

import functools

import torch
import triton
import triton.language as tl

import penstock.backends.cuda._launch  # noqa: F401  (sets Triton up)
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._runs import by_chunks
from penstock.backends.cuda._tuning import DELTA_AHEAD, DELTA_RUNS
from penstock.errors import BackendError


@functools.cache
def recurrence_tile(Dk: int, Dv: int) -> tuple[int, int, int]:
    """Value rows of a program, key columns / 32 and warps: 16 values of the state a thread."""
    if Dk > 16384:
        raise BackendError(f"gated_delta_net: Dk is {Dk}, expected at most 16384 on cuda")
    wide = triton.next_power_of_2(triton.cdiv(Dk, 32))
    rows = min(max(1, 16 // wide), triton.next_power_of_2(Dv))
    return rows, wide, max(1, min(8, rows * wide // 16))


@triton.jit
def token_of(qkv_ptr, token, head, rows, cols, Hk, Hv, Dk, Dv, GROUP: tl.constexpr):
    """q, k for every row and v of a token and value head."""
    q_ptr = qkv_ptr + token * (2 * Hk * Dk + Hv * Dv) + head // GROUP * Dk + cols
    q = tl.load(q_ptr, mask=cols < Dk, other=0.0).to(tl.float32)
    k = tl.load(q_ptr + Hk * Dk, mask=cols < Dk, other=0.0).to(tl.float32)
    v_ptr = qkv_ptr + token * (2 * Hk * Dk + Hv * Dv) + (2 * Hk * Dk + head * Dv) + rows
    v = tl.load(v_ptr, mask=rows < Dv, other=0.0).to(tl.float32)
    return q, k, v


@triton.jit
def gates_of(g_ptr, b_ptr, at, cols, Hv, Dk, CHANNELS: tl.constexpr):
    """g, of each column of the state where CHANNELS, and b of a token and value head, at = token * Hv + head."""
    if CHANNELS:
        g = tl.load(g_ptr + at * Dk + cols, mask=cols < Dk, other=1.0)
    else:
        g = tl.load(g_ptr + at)
    return g, tl.load(b_ptr + at)


@triton.jit
def moved_on(S, q, k, v, g, b, dtype: tl.constexpr, CHANNELS: tl.constexpr):
    """The state [ROWS, WIDE, 32] after a token, rounded to `dtype`, and its output; y = S q as g (S q) + d (k.q) of the
    old S.
    """
    if CHANNELS:
        S *= g
        g = 1.0
    known = tl.sum(tl.sum(S * k, axis=1), axis=1)
    read = tl.sum(tl.sum(S * q, axis=1), axis=1)
    d = (v - g * known) * b
    y = g * read + d * tl.sum(tl.sum(k * q, axis=1), axis=1)
    return rounded(g * S + d[:, None, None] * k, dtype).to(tl.float32), y


# recurrence  S <- g*S;  d = (v - S k)*b;  S <- S + d k^T;  y = S q, for each token
# shapes      qkv [T, 2 Hk Dk + Hv Dv] = q | k | v; g, b float32 [T, Hv], g where CHANNELS [T, Hv, Dk]; state [(S,) Hv,
#             Dv, Dk], float32 or bfloat16, rounded to that after each token; y [T, Hv, Dv]
# grid        (rows, Hv, blocks of Dv): one program owns ROWS value rows of a state; rows = B with slots (one token
#             each), else 1 (T tokens in turn)
# bytes       2 * rows * Hv * Dv * Dk * itemsize for the state, read and written once; the tokens' q | k | v | y besides
# limits      Dk <= 16384: a value row lies in the registers of a program
@triton.jit(do_not_specialize=["tokens"])
def _recurrence_kernel(
    state_ptr, qkv_ptr, g_ptr, b_ptr, slots_ptr, y_ptr, tokens, slots, Hk, Hv, Dk, Dv,
    BY_SLOT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, AHEAD: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = state_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    # Columns as [1, WIDE, 32]: 8 lanes of a warp read 128 bytes of a row and a warp 4 rows at once, so that a sum over
    # columns takes 3 shuffles for 4 rows, not 5 for each. q and k are read for every row: by themselves, they would
    # get another layout, and the state with them.
    cols = 32 * tl.arange(0, WIDE)[None, :, None] + tl.arange(0, 32)[None, None, :] + rows[:, None, None] * 0
    some = rows < Dv
    y_ptr += head * Dv + rows
    tile = state_ptr + (head * Dv + rows[:, None, None]).to(tl.int64) * Dk + cols
    if BY_SLOT:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        q, k, v = token_of(qkv_ptr, token, head, rows, cols, Hk, Hv, Dk, Dv, GROUP)
        g, b = gates_of(g_ptr, b_ptr, token * Hv + head, cols, Hv, Dk, CHANNELS)
        active = (slot >= 0) & (slot < slots)
        moved = (rows[:, None, None] < tl.where(active, Dv, 0)) & (cols < Dk)
        tile += slot * Hv * Dv * Dk
        S, y = moved_on(tl.load(tile, mask=moved, other=0.0).to(tl.float32), q, k, v, g, b, dtype, CHANNELS)
        y = tl.where(active, y, 0.0)
        tl.store(y_ptr + token * Hv * Dv, y.to(y_ptr.dtype.element_ty), mask=some)
    else:
        moved = some[:, None, None] & (cols < Dk)
        S = tl.load(tile, mask=moved, other=0.0).to(tl.float32)
        for t in tl.range(tokens, num_stages=AHEAD):
            token = tl.cast(t, tl.int64)
            q, k, v = token_of(qkv_ptr, token, head, rows, cols, Hk, Hv, Dk, Dv, GROUP)
            g, b = gates_of(g_ptr, b_ptr, token * Hv + head, cols, Hv, Dk, CHANNELS)
            S, y = moved_on(S, q, k, v, g, b, dtype, CHANNELS)
            tl.store(y_ptr + token * Hv * Dv, y.to(y_ptr.dtype.element_ty), mask=some)
    tl.store(tile, rounded(S, dtype), mask=moved)


def recur(
    state: torch.Tensor, qkv: torch.Tensor, g: torch.Tensor, b: torch.Tensor, slots: torch.Tensor | None,
    out: torch.Tensor, Hk: int, Hv: int, Dk: int, Dv: int,
) -> None:  # fmt: skip
    """Writes out [T, Hv, Dv] and moves the state on over the T tokens of qkv, or with slots each state over its own."""
    T = len(qkv)
    rows, wide, warps = recurrence_tile(Dk, Dv)
    states, tokens = (1, T) if slots is None else (T, 1)
    _recurrence_kernel[(states, Hv, triton.cdiv(Dv, rows))](
        state, qkv, g, b, slots, out, tokens, state.shape[0], Hk, Hv, Dk, Dv, slots is not None, Hv // Hk, rows, wide,
        DELTA_AHEAD, g.ndim == 3, num_warps=warps,
    )  # fmt: skip


# -- runs of several sequences ---------------------------------------------------------------------------------------


# runs        `recurrence` over the run of each sequence (ops/ragged.py) from state[slots[n]], which moves on; of a run
#             that is kept, keep[n] != 0, the state stays and g and b go to gates[slots[n]]. Runs that chunks take
#             (`by_chunks`) are left as they are; rows of no sequence and of one without a slot are 0
# shapes      as in `recurrence`; starts int32 [B + 1], slots, keep int32 [B], gates float32 [S, room, 2, Hv], where
#             CHANNELS [S, room, Dk + 1, Hv]
# grid        (programs, Hv, blocks of Dv): one program owns ROWS value rows of every programs-th sequence
# bytes       as in `recurrence`, those of kept runs without the writing
# limits      as in `recurrence`; gates beyond their room are not written
@triton.jit(do_not_specialize=["T", "B", "slots", "room", "longest", "programs"])
def _recurrence_runs_kernel(
    state_ptr, qkv_ptr, g_ptr, b_ptr, starts_ptr, slots_ptr, keep_ptr, gates_ptr, y_ptr,
    T, B, slots, room, longest, programs, Hk, Hv, Dk, Dv,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, AHEAD: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = state_ptr.dtype.element_ty
    head = tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    cols = 32 * tl.arange(0, WIDE)[None, :, None] + tl.arange(0, 32)[None, None, :] + rows[:, None, None] * 0
    some = rows < Dv
    moved = some[:, None, None] & (cols < Dk)
    y_ptr += head * Dv + rows
    state_ptr += (head * Dv + rows[:, None, None]).to(tl.int64) * Dk + cols
    for n in range(tl.program_id(0), B + 1, programs):
        first = tl.load(starts_ptr + n)
        end = tl.load(starts_ptr + n + 1, mask=n < B, other=T)
        slot = tl.load(slots_ptr + n, mask=n < B, other=-1).to(tl.int64)
        kept = first * 0
        if keep_ptr is not None:
            kept = tl.load(keep_ptr + n, mask=n < B, other=0)
        if (slot < 0) | (slot >= slots):
            for t in range(first, end, 32):
                token = t + tl.arange(0, 32).to(tl.int64)
                zero = tl.zeros((32, ROWS), y_ptr.dtype.element_ty)
                live = (token < end)[:, None] & some[None, :]
                tl.store(y_ptr[None, :] + token[:, None] * Hv * Dv, zero, mask=live)
        elif (end > first) & (by_chunks(end - first, kept, longest) == 0):
            tile = state_ptr + slot * Hv * Dv * Dk
            S = tl.load(tile, mask=moved, other=0.0).to(tl.float32)
            for t in tl.range(first, end, num_stages=AHEAD):
                token = tl.cast(t, tl.int64)
                q, k, v = token_of(qkv_ptr, token, head, rows, cols, Hk, Hv, Dk, Dv, GROUP)
                g, b = gates_of(g_ptr, b_ptr, token * Hv + head, cols, Hv, Dk, CHANNELS)
                S, y = moved_on(S, q, k, v, g, b, dtype, CHANNELS)
                tl.store(y_ptr + token * Hv * Dv, y.to(y_ptr.dtype.element_ty), mask=some)
            if kept == 0:
                tl.store(tile, rounded(S, dtype), mask=moved)
            elif gates_ptr is not None:
                count = tl.minimum(end - first, room)
                if tl.program_id(2) == 0:
                    for i in range(count):
                        at = (first + i).to(tl.int64) * Hv + head
                        if CHANNELS:
                            gate_ptr = gates_ptr + (slot * room + i) * (Dk + 1) * Hv + head
                            c = tl.arange(0, 32 * WIDE)
                            tl.store(gate_ptr + c * Hv, tl.load(g_ptr + at * Dk + c, mask=c < Dk), mask=c < Dk)
                            tl.store(gate_ptr + Dk * Hv, tl.load(b_ptr + at))
                        else:
                            gate_ptr = gates_ptr + (slot * room + i) * 2 * Hv + head
                            tl.store(gate_ptr, tl.load(g_ptr + at))
                            tl.store(gate_ptr + Hv, tl.load(b_ptr + at))


def recur_runs(
    state: torch.Tensor, qkv: torch.Tensor, g: torch.Tensor, b: torch.Tensor, starts: torch.Tensor,
    slots: torch.Tensor, keep: torch.Tensor | None, gates: torch.Tensor | None, longest: int, out: torch.Tensor,
    Hk: int, Hv: int, Dk: int, Dv: int,
) -> None:  # fmt: skip
    """One launch of `runs`: those of more than `longest` tokens are for chunks unless they are kept."""
    rows, wide, warps = recurrence_tile(Dk, Dv)
    B = len(slots)
    programs = min(B + 1, DELTA_RUNS)
    _recurrence_runs_kernel[(programs, Hv, triton.cdiv(Dv, rows))](
        state, qkv, g, b, starts, slots, keep, gates, out, len(qkv), B, state.shape[0],
        0 if gates is None else gates.shape[1], longest, programs, Hk, Hv, Dk, Dv, Hv // Hk, rows, wide, DELTA_AHEAD,
        g.ndim == 3, num_warps=warps,
    )  # fmt: skip


# commit      `recurrence` over the first accepted[n] of the tokens that were kept at slots[n], without the outputs
# shapes      qkv [B, room, 2 Hk Dk + Hv Dv]; gates float32 [S, room, 2, Hv], where CHANNELS [S, room, Dk + 1, Hv];
#             state [S, Hv, Dv, Dk]; slots, accepted int32 [B]
# grid        (B, Hv, blocks of Dv): one program owns ROWS value rows of a state
# bytes       2 * B * Hv * Dv * Dk * itemsize for the states, and the tokens' k | v
# limits      as in `recurrence`
@triton.jit(do_not_specialize=["slots"])
def _commit_kernel(
    state_ptr, qkv_ptr, gates_ptr, slots_ptr, accepted_ptr, slots, room, Hk, Hv, Dk, Dv,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, AHEAD: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    head = tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    cols = 32 * tl.arange(0, WIDE)[None, :, None] + tl.arange(0, 32)[None, None, :] + rows[:, None, None] * 0
    slot = tl.load(slots_ptr + n).to(tl.int64)
    count = tl.minimum(tl.load(accepted_ptr + n), room)
    if (count <= 0) | (slot < 0) | (slot >= slots):
        return
    moved = (rows[:, None, None] < Dv) & (cols < Dk)
    tile = state_ptr + ((slot * Hv + head) * Dv + rows[:, None, None]) * Dk + cols
    qkv_ptr += n.to(tl.int64) * room * (2 * Hk * Dk + Hv * Dv)
    each = Dk + 1 if CHANNELS else 2  # rows of a token
    gates_ptr += slot * room * each * Hv + head
    S = tl.load(tile, mask=moved, other=0.0).to(tl.float32)
    for t in tl.range(count, num_stages=AHEAD):
        token = tl.cast(t, tl.int64)
        gate_ptr = gates_ptr + token * each * Hv
        q, k, v = token_of(qkv_ptr, token, head, rows, cols, Hk, Hv, Dk, Dv, GROUP)
        if CHANNELS:
            g = tl.load(gate_ptr + cols * Hv, mask=cols < Dk, other=1.0)
        else:
            g = tl.load(gate_ptr)
        b = tl.load(gate_ptr + (each - 1) * Hv)
        S, _ = moved_on(S, q, k, v, g, b, state_ptr.dtype.element_ty, CHANNELS)
    tl.store(tile, rounded(S, state_ptr.dtype.element_ty), mask=moved)


def commit_states(
    state: torch.Tensor, qkv: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor, Hk: int
) -> None:
    """Moves states on by accepted tokens of qkv [B, K, C]."""
    Hv, Dv, Dk = state.shape[1:]
    rows, wide, warps = recurrence_tile(Dk, Dv)
    _commit_kernel[(len(slots), Hv, triton.cdiv(Dv, rows))](
        state, qkv, gates, slots, accepted, state.shape[0], gates.shape[1], Hk, Hv, Dk, Dv, Hv // Hk, rows, wide,
        DELTA_AHEAD, gates.shape[2] > 2, num_warps=warps,
    )  # fmt: skip
