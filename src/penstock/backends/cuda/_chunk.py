"""The gated delta rule by chunks of 64 tokens on tensor cores, for prefill.

With γ_l the product of the decays of a chunk up to token l, Γ[l, i] that from i + 1 to l, S the state before the chunk
(transposed, [Dk, Dv]) and A[l, i] = b_l Γ[l, i] k_l·k_i for i < l:

    R = V − diag(γ) K S;   Y = diag(γ) Q S + P R;   S ← γ_last S + Kᵀ M R
    P = tril(Γ ∘ Q Kᵀ) (I + A)⁻¹ diag(b);   M = diag(Γ[last, :]) (I + A)⁻¹ diag(b)

`_prepare_kernel` makes P, M and γ for all chunks at once, `_advance_kernel` carries S through the chunks, three
products deep in each. Decays are products, never exp of a difference of logarithms: a decay of 0 needs no care.

Precision: q, k and v enter products as they are, float16 or bfloat16 with float32 sums. What is float32 (S, R, M, the
inverse) enters as the sum of a high and a low half of that type, at most 2⁻¹⁷ of its size away, in all that reaches the
state: as two columns of the right factor whose products come out side by side. float32 activations take the recurrence.
"""

import functools

import torch
import triton
import triton.language as tl

from penstock.backends.cuda._launch import WIDENED, capability
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._runs import block_of, chunked_lengths

CHUNK = 64
SEGMENT = 4096  # tokens prepared at a time: 24 KB of scratch for each chunk and head
CHUNKS = 160  # of runs prepared at a time: enough for 2048 tokens however they are cut


def takes_chunks(qkv: torch.Tensor, g: torch.Tensor, Dk: int) -> bool:
    """Whether these kernels take the activations: of 16 bits, one decay of a head, and tiles fit in shared memory."""
    return qkv.element_size() == 2 and g.ndim == 2 and Dk <= 128


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def _halves(x, dtype: tl.constexpr):
    """float32 x as high + low of `dtype`."""
    high = rounded(x, dtype)
    return high, rounded(x - high.to(tl.float32), dtype)


@triton.jit
def _pairs(x, dtype: tl.constexpr):
    """float32 x [M, N] as [M, 2 N] of `dtype`: high and low halves side by side."""
    high, low = _halves(x, dtype)
    return tl.reshape(tl.join(high, low), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def _unpaired(y):
    """[M, 2 N] as [M, N]: the sums of neighbours."""
    even, odd = tl.split(tl.reshape(y, (y.shape[0], y.shape[1] // 2, 2)))
    return even + odd


@triton.jit
def _dot(a, b, total):
    """total + a @ b of 16-bit a and b, float32 sums."""
    if WIDENED:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit
def _dot_full(high, low, z_high, z_low, total):
    """total + (high + low) @ (z_high + z_low) but for low @ z_low."""
    return _dot(high, z_high, _dot(high, z_low, _dot(low, z_high, total)))


@triton.jit
def _inverse(A, C: tl.constexpr, dtype: tl.constexpr):
    """(I + A)⁻¹ of a strictly lower [C, C] float32: 16 x 16 blocks on the diagonal by substitution, the rest from them.

    With D the inverses on the diagonal and X = D (A outside those blocks), which vanishes from its (C / 16)th power
    on: (I + A)⁻¹ = (I + X)⁻¹ D = (I − X)(I + X²) D for C = 64. Substitution is stable where powers of A are not: they
    have entries of 10⁶ and more for equal keys.
    """
    tl.static_assert(C == 64)
    N: tl.constexpr = C // 16
    row, col = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    same = (row // 16) == (col // 16)
    blocks = tl.permute(tl.reshape(tl.where(same, A, 0.0), (N, 16, N, 16)), (0, 2, 1, 3))
    a = tl.sum(blocks, axis=1)  # [N, 16, 16], the blocks on the diagonal
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    x = tl.where(i == j, 1.0, 0.0) + tl.zeros((N, 16, 16), tl.float32)
    for r in range(15):
        done = tl.sum(tl.where(i == r, x, 0.0), axis=1)  # row r of the inverse
        factor = tl.sum(tl.where(j == r, a, 0.0), axis=2)  # its part in the rows below
        x -= factor[:, :, None] * done[:, None, :]
    n = tl.arange(0, N)[:, None, None, None]
    m = tl.arange(0, N)[None, :, None, None]
    D = tl.where(n == m, x[:, None, :, :], 0.0)
    D = tl.reshape(tl.permute(D, (0, 2, 1, 3)), (C, C))
    zero = tl.zeros((C, C), tl.float32)
    D_high, D_low = _halves(D, dtype)
    high, low = _halves(tl.where(same, 0.0, A), dtype)
    X = _dot_full(D_high, D_low, high, low, zero)
    X_high, X_low = _halves(X, dtype)
    high, low = _halves(_dot_full(X_high, X_low, X_high, X_low, zero), dtype)
    D = _dot_full(high, low, D_high, D_low, D)
    high, low = _halves(D, dtype)
    return D - _dot_full(X_high, X_low, high, low, zero)


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
    tl.store(gamma_ptr + program * C + row, tl.associative_scan(g, 0, _multiply))
    last = tl.associative_scan(after, 0, _multiply, reverse=True)  # Γ[last, :]

    down, over = row[:, None], row[None, :]
    ratio = tl.associative_scan(tl.where(down > over, g[:, None], 1.0), 0, _multiply)  # Γ where down >= over
    zero = tl.zeros((C, C), tl.float32)
    A = tl.where(down > over, b[:, None] * ratio * _dot(k, tl.trans(k), zero), 0.0)
    P = rounded(tl.where(down >= over, ratio * _dot(q, tl.trans(k), zero), 0.0), dtype)
    inverse = _inverse(A, C, dtype) * b[None, :]
    at = PM_ptr + (program * 3 * C + down) * C + over
    high, low = _halves(inverse, dtype)
    tl.store(at, rounded(_dot(P, high, _dot(P, low, zero)), dtype))
    high, low = _halves(last[:, None] * inverse, dtype)
    tl.store(at + C * C, high)
    tl.store(at + 2 * C * C, low)


# prepare  P = tril(Γ ∘ Q K^T) (I + A)^-1 diag(b), M = diag(Γ[last, :]) (I + A)^-1 diag(b) and γ of each chunk and head
# shapes   qkv [T, 2 Hk Dk + Hv Dv]; g, b float32 [T, Hv] -> PM [chunks, Hv, 3, C, C], P and the halves of M, in qkv's
#          dtype, γ float32 [chunks, Hv, C]
# grid     (chunks * Hv,)
# bytes    4 * T * Hk * Dk in, chunks * Hv * 6 * C * C out; 3.4 M multiply-adds for each program
# limits   16-bit qkv; DK <= 128
@triton.jit(do_not_specialize=["T"])
def _prepare_kernel(qkv_ptr, g_ptr, b_ptr, PM_ptr, gamma_ptr, T, Hk, Hv, Dk, width, C: tl.constexpr, DK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    first = program // Hv * C
    _prepare_chunk(
        qkv_ptr, g_ptr, b_ptr, PM_ptr, gamma_ptr, program, program % Hv, first, T, Hk, Hv, Dk, width, C, DK
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
        both = _pairs(S, dtype)
        R = x.to(tl.float32) - gamma * _unpaired(_dot(k, both, zero))
        y = _unpaired(_dot(q, both, zero)) * gamma
        both = _pairs(R, dtype)
        U = _unpaired(_dot(M, both, _dot(M_low, both, zero)))
        y += _unpaired(_dot(P, both, zero))
        both = _pairs(U, dtype)
        S = S * last + _unpaired(_dot(tl.trans(k), both, tl.zeros((DK, 2 * BV), tl.float32)))
        out = y_ptr + t * (Hv * Dv) + (head * Dv + v)[None, :]
        tl.store(out, y.to(dtype), mask=mask_v)
    return S


# advance  R = V - diag(γ) K S;  Y = diag(γ) Q S + P R;  S <- γ_last S + K^T M R, chunk by chunk
# shapes   as in prepare; state float32 or bfloat16 [Hv, Dv, Dk], S its transpose, float32; y [T, Hv, Dv]
# grid     (Hv * blocks of Dv,): one program carries BV columns of S through all chunks, in registers
# bytes    for each chunk and program 2 * C * (2 * DK + 3 * C + BV) in and 2 * C * BV out, mostly from L2
# limits   16-bit qkv; DK <= 128: three chunks' tiles in shared memory, 193 KB
@triton.jit(do_not_specialize=["T"])
def _advance_kernel(
    state_ptr, qkv_ptr, PM_ptr, gamma_ptr, y_ptr, T, Hk, Hv, Dk, Dv, width,
    C: tl.constexpr, DK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(Dv, BV)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    col = tl.arange(0, DK)
    v = (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    S_ptr = state_ptr + (head * Dv + v[None, :]) * Dk + col[:, None]
    real = (v < Dv)[None, :] & (col < Dk)[:, None]
    S = tl.load(S_ptr, mask=real, other=0.0).to(tl.float32)
    S = _advance_chunks(
        S, qkv_ptr, PM_ptr, gamma_ptr, y_ptr, head, v, 0, T, 0, Hk, Hv, Dk, Dv, width, C, DK, BV, STAGES
    )  # fmt: skip
    tl.store(S_ptr, rounded(S, state_ptr.dtype.element_ty), mask=real)


@functools.cache
def _tiles(Dk: int, Dv: int, major: int) -> tuple[int, int, int]:
    """Padded key width, columns of S of a program and stages of `_advance_kernel`."""
    DK = max(16, triton.next_power_of_2(Dk))
    BV = min(32, max(16, triton.next_power_of_2(Dv)))
    return DK, BV, 3 if major in (9, 10) else 1  # 227 KB of shared memory, or as little as 99


def delta_chunks(
    state: torch.Tensor, qkv: torch.Tensor, g: torch.Tensor, b: torch.Tensor, out: torch.Tensor,
    Hk: int, Hv: int, Dk: int, Dv: int,
) -> None:  # fmt: skip
    """Writes out [T, Hv, Dv] and moves the state [Hv, Dv, Dk] on over the T tokens of qkv."""
    T, width = qkv.shape
    DK, BV, stages = _tiles(Dk, Dv, capability(qkv)[0])
    programs = triton.cdiv(min(T, SEGMENT), CHUNK) * Hv
    PM, gamma = qkv.new_empty((programs, 3, CHUNK, CHUNK)), g.new_empty((programs, CHUNK))
    for start in range(0, T, SEGMENT):
        part = slice(start, min(start + SEGMENT, T))
        rows, tokens = qkv[part], part.stop - start
        _prepare_kernel[(triton.cdiv(tokens, CHUNK) * Hv,)](
            rows, g[part], b[part], PM, gamma, tokens, Hk, Hv, Dk, width, CHUNK, DK, num_warps=4
        )
        _advance_kernel[(Hv * triton.cdiv(Dv, BV),)](
            state, rows, PM, gamma, out[part], tokens, Hk, Hv, Dk, Dv, width, CHUNK, DK, BV, stages, num_warps=4
        )


# -- runs of several sequences ---------------------------------------------------------------------------------------


# prepare of runs  `prepare` of chunk `low` + i of the runs that go by chunks (`chunked_lengths`), one behind the other
# shapes           as in prepare; starts int32 [B + 1], slots, keep int32 [B]
# grid             (chunks * Hv,): programs beyond the last chunk end at once
# bytes, limits    as in prepare; SEQUENCES >= B
@triton.jit(do_not_specialize=["low", "B", "slots", "longest"])
def _prepare_runs_kernel(
    qkv_ptr, g_ptr, b_ptr, starts_ptr, slots_ptr, keep_ptr, PM_ptr, gamma_ptr, low, B, slots, longest, Hk, Hv, Dk,
    width, C: tl.constexpr, DK: tl.constexpr, SEQUENCES: tl.constexpr,
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
    _prepare_chunk(
        qkv_ptr, g_ptr, b_ptr, PM_ptr, gamma_ptr, program, program % Hv, first.to(tl.int64), end, Hk, Hv, Dk, width,
        C, DK,
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
    state_ptr, qkv_ptr, starts_ptr, slots_ptr, keep_ptr, PM_ptr, gamma_ptr, y_ptr, low, high, B, slots, longest,
    Hk, Hv, Dk, Dv, width,
    C: tl.constexpr, DK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, SEQUENCES: tl.constexpr,
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
        S = _advance_chunks(
            tl.load(at, mask=real, other=0.0).to(tl.float32), qkv_ptr, PM_ptr, gamma_ptr, y_ptr, head, v, first, end,
            tl.maximum(before - low, 0), Hk, Hv, Dk, Dv, width, C, DK, BV, STAGES,
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
    DK, BV, stages = _tiles(Dk, Dv, capability(qkv)[0])
    most = T // CHUNK + min(B, T // (longest + 1))  # a run has at most one chunk that is not full
    programs = min(most, CHUNKS) * Hv
    PM, gamma = qkv.new_empty((programs, 3, CHUNK, CHUNK)), g.new_empty((programs, CHUNK))
    for low in range(0, most, CHUNKS):
        high = min(low + CHUNKS, most)
        _prepare_runs_kernel[((high - low) * Hv,)](
            qkv, g, b, starts, slots, keep, PM, gamma, low, B, state.shape[0], longest, Hk, Hv, Dk, width, CHUNK, DK,
            block_of(B), num_warps=4,
        )  # fmt: skip
        _advance_runs_kernel[(Hv * triton.cdiv(Dv, BV),)](
            state, qkv, starts, slots, keep, PM, gamma, out, low, high, B, state.shape[0], longest, Hk, Hv, Dk, Dv,
            width, CHUNK, DK, BV, stages, block_of(B), num_warps=4,
        )  # fmt: skip
