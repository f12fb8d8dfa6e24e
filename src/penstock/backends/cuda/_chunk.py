"""The gated delta rule by chunks of 64 tokens on tensor cores, for prefill.

With γ_l the product of the decays of a chunk up to token l, Γ[l, i] that from i + 1 to l, S the state before the chunk
(transposed, [Dk, Dv]) and A[l, i] = b_l Γ[l, i] k_l·k_i for i < l:

    R = V − diag(γ) K S;   Y = diag(γ) Q S + P R;   S ← γ_last S + Kᵀ M R
    P = tril(Γ ∘ Q Kᵀ) (I + A)⁻¹ diag(b);   M = diag(Γ[last, :]) (I + A)⁻¹ diag(b)

`_prepare_kernel` makes P, M and γ for all chunks at once, `_advance_kernel` carries S through the chunks, three
products deep in each. Decays are products, never exp of a difference of logarithms: a decay of 0 needs no care. Where
each key channel has a decay of its own (CHANNELS), `_chunk_channels.py` has what a chunk is made of.

Precision: q, k and v enter products as they are, float16 or bfloat16 with float32 sums. What is float32 (S, R, M, the
inverse) enters as the sum of a high and a low half of that type, at most 2⁻¹⁷ of its size away, in all that reaches the
state: as two columns of the right factor whose products come out side by side. float32 activations take the recurrence.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from penstock.backends.cuda._chunk_channels import PARTS, advance_channels, prepare_channels
from penstock.backends.cuda._chunk_products import dot, halves, inverse, multiply, pairs, unpaired
from penstock.backends.cuda._launch import capability
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._runs import block_of, chunked_lengths

CHUNK = 64
SEGMENT = 4096  # tokens prepared at a time: 24 KB of scratch for each chunk and head
CHUNKS = 160  # of runs prepared at a time: enough for 2048 tokens however they are cut
CHANNELS_SEGMENT, CHANNELS_CHUNKS = 1024, 24  # with decays of channels: 105 KB of scratch for each chunk and head


def takes_chunks(qkv: torch.Tensor, Dk: int) -> bool:
    """Whether these kernels take the activations: of 16 bits, and tiles fit in shared memory."""
    return qkv.element_size() == 2 and Dk <= 128


@triton.jit
def _prepare_chunk(
    qkv_ptr, g_ptr, b_ptr, PM_ptr, gamma_ptr, program, head, first, end, Hk, Hv, Dk, width,
    C: tl.constexpr, DK: tl.constexpr,
):  # fmt: skip
    """P, M and γ of the tokens from `first` on, up to C of them and none from `end` on, as number `program`."""
    row, col = tl.arange(0, C), tl.arange(0, DK)
    t = first + row
    live = t < end
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    mask = live[:, None] & (col < Dk)[None, :]
    q_ptr = qkv_ptr + t[:, None] * width + (head // (Hv // Hk) * Dk + col)[None, :]
    q = tl.load(q_ptr, mask=mask, other=0.0)
    k = tl.load(q_ptr + Hk * Dk, mask=mask, other=0.0)
    g = tl.load(g_ptr + t * Hv + head, mask=live, other=1.0)
    after = tl.load(g_ptr + (t + 1) * Hv + head, mask=(t + 1 < end) & (row + 1 < C), other=1.0)
    b = tl.load(b_ptr + t * Hv + head, mask=live, other=0.0)
    tl.store(gamma_ptr + program * C + row, tl.associative_scan(g, 0, multiply))
    last = tl.associative_scan(after, 0, multiply, reverse=True)  # Γ[last, :]

    down, over = row[:, None], row[None, :]
    ratio = tl.associative_scan(tl.where(down > over, g[:, None], 1.0), 0, multiply)  # Γ where down >= over
    zero = tl.zeros((C, C), tl.float32)
    A = tl.where(down > over, b[:, None] * ratio * dot(k, tl.trans(k), zero), 0.0)
    P = rounded(tl.where(down >= over, ratio * dot(q, tl.trans(k), zero), 0.0), dtype)
    solved = inverse(A, C, dtype) * b[None, :]
    at = PM_ptr + (program * 3 * C + down) * C + over
    high, low = halves(solved, dtype)
    tl.store(at, rounded(dot(P, high, dot(P, low, zero)), dtype))
    high, low = halves(last[:, None] * solved, dtype)
    tl.store(at + C * C, high)
    tl.store(at + 2 * C * C, low)


@triton.jit
def _prepare_either(
    qkv_ptr, g_ptr, b_ptr, PM_ptr, keys_ptr, gamma_ptr, program, first, end, Hk, Hv, Dk, width,
    C: tl.constexpr, DK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One chunk of the head `program` % Hv, with one decay of a head or with those of its channels."""
    head = program % Hv
    if CHANNELS:
        prepare_channels(
            qkv_ptr, g_ptr, b_ptr, PM_ptr, keys_ptr, gamma_ptr, program, head, first, end, Hk, Hv, Dk, width, C, DK
        )  # fmt: skip
    else:
        _prepare_chunk(
            qkv_ptr, g_ptr, b_ptr, PM_ptr, gamma_ptr, program, head, first, end, Hk, Hv, Dk, width, C, DK
        )  # fmt: skip


# prepare  P = tril(Γ ∘ Q K^T) (I + A)^-1 diag(b), M = diag(Γ[last, :]) (I + A)^-1 diag(b) and γ of each chunk and head
# shapes   qkv [T, 2 Hk Dk + Hv Dv]; g, b float32 [T, Hv] -> PM [chunks, Hv, 3, C, C], P and the halves of M, in qkv's
#          dtype, γ float32 [chunks, Hv, C]; CHANNELS: g [T, Hv, Dk] -> keys [chunks, Hv, 5, C, DK] in qkv's dtype, too,
#          and of γ its last, [chunks, Hv, DK]
# grid     (chunks * Hv,)
# bytes    4 * T * Hk * Dk in, chunks * Hv * 6 * C * C out; 3.4 M multiply-adds for each program
# limits   16-bit qkv; DK <= 128
@triton.jit(do_not_specialize=["T"])
def _prepare_kernel(
    qkv_ptr, g_ptr, b_ptr, PM_ptr, keys_ptr, gamma_ptr, T, Hk, Hv, Dk, width,
    C: tl.constexpr, DK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    first = program // Hv * C
    _prepare_either(
        qkv_ptr, g_ptr, b_ptr, PM_ptr, keys_ptr, gamma_ptr, program, first, T, Hk, Hv, Dk, width, C, DK, CHANNELS
    )  # fmt: skip


@triton.jit
def _advance_chunks(
    S, qkv_ptr, PM_ptr, gamma_ptr, y_ptr, head, v, first, end, base, Hk, Hv, Dk, Dv, width,
    C: tl.constexpr, DK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """S [DK, BV], columns v of a head, after the tokens first … end − 1, whose chunks are prepared from `base` on."""
    row, col = tl.arange(0, C).to(tl.int64), tl.arange(0, DK)
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    q_col = (head // (Hv // Hk) * Dk + col)[None, :]
    v_col = (2 * Hk * Dk + head * Dv + v)[None, :]
    zero = tl.zeros((C, 2 * BV), tl.float32)
    for n in tl.range(tl.cdiv(end - first, C), num_stages=STAGES):
        tile = (base + n) * Hv + head
        t = first + n * C + row[:, None]
        mask, mask_v = (t < end) & (col < Dk)[None, :], (t < end) & (v < Dv)[None, :]
        q = tl.load(qkv_ptr + t * width + q_col, mask=mask, other=0.0)
        k = tl.load(qkv_ptr + t * width + (q_col + Hk * Dk), mask=mask, other=0.0)
        x = tl.load(qkv_ptr + t * width + v_col, mask=mask_v, other=0.0)
        at = PM_ptr + (tile * 3 * C + row[:, None]) * C + row[None, :]
        P = tl.load(at)
        M = tl.load(at + C * C)
        M_low = tl.load(at + 2 * C * C)
        gamma = tl.load(gamma_ptr + tile * C + row)[:, None]
        last = tl.load(gamma_ptr + tile * C + (C - 1))
        both = pairs(S, dtype)
        R = x.to(tl.float32) - gamma * unpaired(dot(k, both, zero))
        y = unpaired(dot(q, both, zero)) * gamma
        both = pairs(R, dtype)
        U = unpaired(dot(M, both, dot(M_low, both, zero)))
        y += unpaired(dot(P, both, zero))
        both = pairs(U, dtype)
        S = S * last + unpaired(dot(tl.trans(k), both, tl.zeros((DK, 2 * BV), tl.float32)))
        out = y_ptr + t * (Hv * Dv) + (head * Dv + v)[None, :]
        tl.store(out, y.to(dtype), mask=mask_v)
    return S


@triton.jit
def _advance_either(
    S, qkv_ptr, PM_ptr, keys_ptr, gamma_ptr, y_ptr, head, v, first, end, base, Hk, Hv, Dk, Dv, width,
    C: tl.constexpr, DK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    if CHANNELS:
        S = advance_channels(
            S, qkv_ptr, PM_ptr, keys_ptr, gamma_ptr, y_ptr, head, v, first, end, base, Hk, Hv, Dk, Dv, width,
            C, DK, BV, STAGES,
        )  # fmt: skip
    else:
        S = _advance_chunks(
            S, qkv_ptr, PM_ptr, gamma_ptr, y_ptr, head, v, first, end, base, Hk, Hv, Dk, Dv, width, C, DK, BV, STAGES
        )  # fmt: skip
    return S


# advance  R = V - diag(γ) K S;  Y = diag(γ) Q S + P R;  S <- γ_last S + K^T M R, chunk by chunk
# shapes   as in prepare; state float32 or bfloat16 [Hv, Dv, Dk], S its transpose, float32; y [T, Hv, Dv]
# grid     (Hv * blocks of Dv,): one program carries BV columns of S through all chunks, in registers
# bytes    for each chunk and program 2 * C * (2 * DK + 3 * C + BV) in and 2 * C * BV out, mostly from L2; 3 * DK more
#          where CHANNELS
# limits   16-bit qkv; DK <= 128: three chunks' tiles in shared memory, 193 KB
@triton.jit(do_not_specialize=["T"])
def _advance_kernel(
    state_ptr, qkv_ptr, PM_ptr, keys_ptr, gamma_ptr, y_ptr, T, Hk, Hv, Dk, Dv, width,
    C: tl.constexpr, DK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(Dv, BV)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    col = tl.arange(0, DK)
    v = (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    S_ptr = state_ptr + (head * Dv + v[None, :]) * Dk + col[:, None]
    real = (v < Dv)[None, :] & (col < Dk)[:, None]
    S = tl.load(S_ptr, mask=real, other=0.0).to(tl.float32)
    S = _advance_either(
        S, qkv_ptr, PM_ptr, keys_ptr, gamma_ptr, y_ptr, head, v, 0, T, 0, Hk, Hv, Dk, Dv, width,
        C, DK, BV, STAGES, CHANNELS,
    )  # fmt: skip
    tl.store(S_ptr, rounded(S, state_ptr.dtype.element_ty), mask=real)


@functools.cache
def _tiles(Dk: int, Dv: int, major: int, channels: bool) -> tuple[int, int, int]:
    """Padded key width, columns of S of a program and stages of `_advance_kernel`."""
    DK = max(32 if channels else 16, triton.next_power_of_2(Dk))  # Triton 3.6 has no layout for 16 of channels
    BV = min(32, max(16, triton.next_power_of_2(Dv)))
    return DK, BV, 3 if major in (9, 10) and not channels else 1  # 227 KB of shared memory, or as little as 99


def _scratch(qkv: torch.Tensor, g: torch.Tensor, programs: int, DK: int) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """P and M, decayed queries and keys where decays are of channels, and γ."""
    PM = qkv.new_empty((programs, 3, CHUNK, CHUNK))
    if g.ndim == 2:
        return PM, None, g.new_empty((programs, CHUNK))
    return PM, qkv.new_empty((programs, PARTS, CHUNK, DK)), g.new_empty((programs, DK))


def delta_chunks(
    state: torch.Tensor, qkv: torch.Tensor, g: torch.Tensor, b: torch.Tensor, out: torch.Tensor,
    Hk: int, Hv: int, Dk: int, Dv: int,
) -> None:  # fmt: skip
    """Writes out [T, Hv, Dv] and moves the state [Hv, Dv, Dk] on over the T tokens of qkv."""
    T, width = qkv.shape
    channels = g.ndim == 3
    DK, BV, stages = _tiles(Dk, Dv, capability(qkv)[0], channels)
    segment = CHANNELS_SEGMENT if channels else SEGMENT
    scratch = _scratch(qkv, g, triton.cdiv(min(T, segment), CHUNK) * Hv, DK)
    for start in range(0, T, segment):
        part = slice(start, min(start + segment, T))
        rows, tokens = qkv[part], part.stop - start
        _prepare_kernel[(triton.cdiv(tokens, CHUNK) * Hv,)](
            rows, g[part], b[part], *scratch, tokens, Hk, Hv, Dk, width, CHUNK, DK, channels,
            num_warps=8 if channels else 4,
        )  # fmt: skip
        _advance_kernel[(Hv * triton.cdiv(Dv, BV),)](
            state, rows, *scratch, out[part], tokens, Hk, Hv, Dk, Dv, width, CHUNK, DK, BV, stages, channels,
            num_warps=8 if channels else 4,
        )  # fmt: skip


# -- runs of several sequences ---------------------------------------------------------------------------------------


# prepare of runs  `prepare` of chunk `low` + i of the runs that go by chunks (`chunked_lengths`), one behind the other
# shapes           as in prepare; starts int32 [B + 1], slots, keep int32 [B]
# grid             (chunks * Hv,): programs beyond the last chunk end at once
# bytes, limits    as in prepare; SEQUENCES >= B
@triton.jit(do_not_specialize=["low", "B", "slots", "longest"])
def _prepare_runs_kernel(
    qkv_ptr, g_ptr, b_ptr, starts_ptr, slots_ptr, keep_ptr, PM_ptr, keys_ptr, gamma_ptr, low, B, slots, longest,
    Hk, Hv, Dk, width, C: tl.constexpr, DK: tl.constexpr, SEQUENCES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    chunk = low + tl.program_id(0) // Hv
    chunks = tl.cdiv(chunked_lengths(starts_ptr, slots_ptr, keep_ptr, B, slots, longest, SEQUENCES), C)
    if chunk >= tl.sum(chunks, axis=0):
        return
    behind = tl.cumsum(chunks, axis=0) <= chunk  # runs that this chunk is behind
    n = tl.sum(behind.to(tl.int32), axis=0)
    first = tl.load(starts_ptr + n) + (chunk - tl.sum(tl.where(behind, chunks, 0), axis=0)) * C
    end = tl.load(starts_ptr + n + 1).to(tl.int64)
    _prepare_either(
        qkv_ptr, g_ptr, b_ptr, PM_ptr, keys_ptr, gamma_ptr, program, first.to(tl.int64), end, Hk, Hv, Dk, width,
        C, DK, CHANNELS,
    )  # fmt: skip


@triton.jit
def _run_behind(
    starts_ptr, slots_ptr, keep_ptr, n, low, high, B, slots, longest, C: tl.constexpr, SEQUENCES: tl.constexpr
):
    """The next sequence behind n that has one of the chunks low … high − 1, SEQUENCES if there is none; the chunks in
    front of its run, and those that it has.

    Found anew for every run: what it takes to find them would be in registers all along, and spill.
    """
    number = tl.arange(0, SEQUENCES)
    chunks = tl.cdiv(chunked_lengths(starts_ptr, slots_ptr, keep_ptr, B, slots, longest, SEQUENCES), C)
    last = tl.cumsum(chunks, axis=0)
    mine = (chunks > 0) & (last > low) & (last - chunks < high) & (number > n)
    found = tl.min(tl.where(mine, number, SEQUENCES), axis=0)
    count = tl.sum(tl.where(number == found, chunks, 0), axis=0)
    return found, tl.sum(tl.where(number == found, last, 0), axis=0) - count, count


# advance of runs  `advance` of each run that goes by chunks, over those of its chunks that are in low .. high - 1
# shapes           as in advance; state [slots, Hv, Dv, Dk]; starts int32 [B + 1], slots, keep int32 [B]
# grid             (Hv * blocks of Dv,): one program carries BV columns of the states through all runs
# bytes, limits    as in advance; SEQUENCES >= B
@triton.jit(do_not_specialize=["low", "high", "B", "slots", "longest"])
def _advance_runs_kernel(
    state_ptr, qkv_ptr, starts_ptr, slots_ptr, keep_ptr, PM_ptr, keys_ptr, gamma_ptr, y_ptr, low, high, B, slots,
    longest, Hk, Hv, Dk, Dv, width,
    C: tl.constexpr, DK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, SEQUENCES: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(Dv, BV)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    col = tl.arange(0, DK)
    v = (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    S_ptr = state_ptr + (head * Dv + v[None, :]) * Dk + col[:, None]
    real = (v < Dv)[None, :] & (col < Dk)[:, None]
    n, before, count = _run_behind(starts_ptr, slots_ptr, keep_ptr, -1, low, high, B, slots, longest, C, SEQUENCES)
    while n < SEQUENCES:
        start = tl.load(starts_ptr + n)
        first = start + tl.maximum(low - before, 0) * C
        end = tl.minimum(tl.load(starts_ptr + n + 1), start + (tl.minimum(before + count, high) - before) * C)
        at = S_ptr + tl.load(slots_ptr + n).to(tl.int64) * Hv * Dv * Dk
        S = _advance_either(
            tl.load(at, mask=real, other=0.0).to(tl.float32), qkv_ptr, PM_ptr, keys_ptr, gamma_ptr, y_ptr, head, v,
            first, end, tl.maximum(before - low, 0), Hk, Hv, Dk, Dv, width, C, DK, BV, STAGES, CHANNELS,
        )  # fmt: skip
        tl.store(at, rounded(S, state_ptr.dtype.element_ty), mask=real)
        n, before, count = _run_behind(starts_ptr, slots_ptr, keep_ptr, n, low, high, B, slots, longest, C, SEQUENCES)


def delta_chunks_of_runs(
    state: torch.Tensor, qkv: torch.Tensor, g: torch.Tensor, b: torch.Tensor, starts: torch.Tensor,
    slots: torch.Tensor, keep: torch.Tensor | None, longest: int, out: torch.Tensor, Hk: int, Hv: int, Dk: int, Dv: int,
) -> None:  # fmt: skip
    """Writes the rows of out and moves on the states of runs of more than `longest` tokens that are not kept."""
    T, width = qkv.shape
    B = len(slots)
    channels = g.ndim == 3
    DK, BV, stages = _tiles(Dk, Dv, capability(qkv)[0], channels)
    most = T // CHUNK + min(B, T // (longest + 1))  # a run has at most one chunk that is not full
    at_once = CHANNELS_CHUNKS if channels else CHUNKS
    scratch = _scratch(qkv, g, min(most, at_once) * Hv, DK)
    for low in range(0, most, at_once):
        high = min(low + at_once, most)
        _prepare_runs_kernel[((high - low) * Hv,)](
            qkv, g, b, starts, slots, keep, *scratch, low, B, state.shape[0], longest, Hk, Hv, Dk, width, CHUNK, DK,
            block_of(B), channels, num_warps=8 if channels else 4,
        )  # fmt: skip
        _advance_runs_kernel[(Hv * triton.cdiv(Dv, BV),)](
            state, qkv, starts, slots, keep, *scratch, out, low, high, B, state.shape[0], longest, Hk, Hv, Dk, Dv,
            width, CHUNK, DK, BV, stages, block_of(B), channels, num_warps=8 if channels else 4,
        )  # fmt: skip
