"""Chunks of the delta rule whose decays are of key channels (`_chunk.py` has the scheme, and one decay of a head).

γ_l and Γ[l, i] are vectors of Dk numbers here, which stand inside of the products over channels:

    A[l, i] = b_l Σ_c k_lc Γ[l, i]_c k_ic;   R = V − (γ ∘ K) S;   U = M R;   M = (I + A)⁻¹ diag(b)
    Y = (γ ∘ Q) S + P R;   S ← γ_last ∘ S + (Γ[last, :] ∘ K)ᵀ U;   P = tril(Σ_c q_lc Γ[l, i]_c k_ic) M

Γ[l, i] falls into two factors, both products of decays and so at most 1, at the edge in front of the 16 tokens that l
is in: from there to l, and from i to there. Where l and i are of the same 16 tokens there is no such edge: those
numbers are summed one token after the other.
"""

import triton
import triton.language as tl

from penstock.backends.cuda._chunk_products import (
    dot,
    dot_full,
    halves,
    inverse,
    multiply,
    on_diagonal,
    pairs,
    unpaired,
)
from penstock.backends.cuda._rows import rounded

PARTS = 5  # of `keys`: γ ∘ Q, the halves of γ ∘ K and those of Γ[last, :] ∘ K


@triton.jit
def _within(
    qkv_ptr, g_ptr, k, q_col, first, end, head, Hk, Hv, Dk, width, C: tl.constexpr, DK: tl.constexpr
):  # fmt: skip
    """Σ_c x_lc Γ[l, i]_c k_ic of x = k and x = q, [C / 16, 16, 16] each: l and i ≤ l of the same 16 tokens."""
    N: tl.constexpr = C // 16
    col, i = tl.arange(0, DK)[None, :], tl.arange(0, 16)[None, :]
    block = first + 16 * tl.arange(0, N)
    decayed = tl.reshape(k.to(tl.float32), (N, 16, DK))
    a = tl.zeros((N, 16, 16), tl.float32)
    p = tl.zeros((N, 16, 16), tl.float32)
    for n in range(16):
        t = (block + n)[:, None]
        mask = (t < end) & (col < Dk)
        g = tl.load(g_ptr + (t * Hv + head) * Dk + col, mask=mask, other=1.0)
        q_n = tl.load(qkv_ptr + t * width + q_col, mask=mask, other=0.0).to(tl.float32)
        k_n = tl.load(qkv_ptr + t * width + q_col + Hk * Dk, mask=mask, other=0.0).to(tl.float32)
        decayed = tl.where((i < n)[:, :, None], decayed * g[:, None, :], decayed)
        here = (i == n)[:, :, None]
        a = tl.where(here, tl.sum(decayed * k_n[:, None, :], axis=2)[:, None, :], a)
        p = tl.where(here, tl.sum(decayed * q_n[:, None, :], axis=2)[:, None, :], p)
    return a, p


@triton.jit
def prepare_channels(
    qkv_ptr, g_ptr, b_ptr, PM_ptr, keys_ptr, last_ptr, program, head, first, end, Hk, Hv, Dk, width,
    C: tl.constexpr, DK: tl.constexpr,
):  # fmt: skip
    """P, M, γ_last and the decayed q and k of the tokens from `first` on, up to C and none from `end` on."""
    N: tl.constexpr = C // 16
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    row, col = tl.arange(0, C), tl.arange(0, DK)
    t = (first + row)[:, None]
    real = (col < Dk)[None, :]
    mask = (t < end) & real
    q_col = (head // (Hv // Hk) * Dk + col)[None, :]
    q = tl.load(qkv_ptr + t * width + q_col, mask=mask, other=0.0)
    k = tl.load(qkv_ptr + t * width + q_col + Hk * Dk, mask=mask, other=0.0)
    g_ptrs = g_ptr + (t * Hv + head) * Dk + col[None, :]
    g = tl.load(g_ptrs, mask=mask, other=1.0)
    next_mask = (t + 1 < end) & (row + 1 < C)[:, None] & real
    after = tl.load(g_ptrs + Hv * Dk, mask=next_mask, other=1.0)
    b = tl.load(b_ptr + (first + row) * Hv + head, mask=first + row < end, other=0.0)

    gamma = tl.associative_scan(g, 0, multiply)
    tl.store(last_ptr + program * DK + col, tl.sum(tl.where((row == C - 1)[:, None], gamma, 0.0), axis=0))
    at = keys_ptr + (program * 5 * C + row[:, None]) * DK + col[None, :]
    tl.store(at, rounded(q.to(tl.float32) * gamma, dtype))
    high, low = halves(k.to(tl.float32) * gamma, dtype)
    tl.store(at + C * DK, high)
    tl.store(at + 2 * C * DK, low)
    high, low = halves(k.to(tl.float32) * tl.associative_scan(after, 0, multiply, reverse=True), dtype)
    tl.store(at + 3 * C * DK, high)
    tl.store(at + 4 * C * DK, low)

    down, over = row[:, None], row[None, :]
    a, p = _within(qkv_ptr, g_ptr, k, q_col, first, end, head, Hk, Hv, Dk, width, C, DK)
    A, P = on_diagonal(a, C), on_diagonal(p, C)
    from_edge = tl.reshape(tl.associative_scan(tl.reshape(g, (N, 16, DK)), 1, multiply), (C, DK))
    inner = tl.where((row % 16 == 15)[:, None], 1.0, after)
    to_edge = tl.associative_scan(tl.reshape(inner, (N, 16, DK)), 1, multiply, reverse=True)
    right = k.to(tl.float32) * tl.reshape(to_edge, (C, DK))
    k_high, k_low = halves(k.to(tl.float32) * from_edge, dtype)
    q_high, q_low = halves(q.to(tl.float32) * from_edge, dtype)
    zero = tl.zeros((C, C), tl.float32)
    for n in range(1, N):  # rows of the n-th 16 tokens, columns in front of them
        whole = tl.sum(tl.where((row == 16 * n - 1)[:, None], from_edge, 0.0), axis=0)
        right = tl.where((row // 16 < n - 1)[:, None], right * whole[None, :], right)
        high, low = halves(right, dtype)
        here = (down // 16 == n) & (over // 16 < n)
        A = tl.where(here, dot_full(k_high, k_low, tl.trans(high), tl.trans(low), zero), A)
        P = tl.where(here, dot_full(q_high, q_low, tl.trans(high), tl.trans(low), zero), P)
    P = rounded(tl.where(down >= over, P, 0.0), dtype)
    solved = inverse(tl.where(down > over, b[:, None] * A, 0.0), C, dtype) * b[None, :]
    high, low = halves(solved, dtype)
    at = PM_ptr + (program * 3 * C + down) * C + over
    tl.store(at, rounded(dot(P, high, dot(P, low, zero)), dtype))
    tl.store(at + C * C, high)
    tl.store(at + 2 * C * C, low)


@triton.jit
def advance_channels(
    S, qkv_ptr, PM_ptr, keys_ptr, last_ptr, y_ptr, head, v, first, end, base, Hk, Hv, Dk, Dv, width,
    C: tl.constexpr, DK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """S [DK, BV], columns v of a head, after the tokens first … end − 1, whose chunks are prepared from `base` on."""
    row, col = tl.arange(0, C).to(tl.int64), tl.arange(0, DK)
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    v_col = (2 * Hk * Dk + head * Dv + v)[None, :]
    zero = tl.zeros((C, 2 * BV), tl.float32)
    for n in tl.range(tl.cdiv(end - first, C), num_stages=STAGES):
        tile = (base + n) * Hv + head
        t = first + n * C + row[:, None]
        mask_v = (t < end) & (v < Dv)[None, :]
        x = tl.load(qkv_ptr + t * width + v_col, mask=mask_v, other=0.0)
        at = keys_ptr + (tile * 5 * C + row[:, None]) * DK + col[None, :]
        q = tl.load(at)
        k = tl.load(at + C * DK)
        k_low = tl.load(at + 2 * C * DK)
        left = tl.load(at + 3 * C * DK)
        left_low = tl.load(at + 4 * C * DK)
        at = PM_ptr + (tile * 3 * C + row[:, None]) * C + row[None, :]
        P = tl.load(at)
        M = tl.load(at + C * C)
        M_low = tl.load(at + 2 * C * C)
        last = tl.load(last_ptr + tile * DK + col)[:, None]
        both = pairs(S, dtype)
        R = x.to(tl.float32) - unpaired(dot(k, both, dot(k_low, both, zero)))
        y = unpaired(dot(q, both, zero))
        both = pairs(R, dtype)
        U = unpaired(dot(M, both, dot(M_low, both, zero)))
        y += unpaired(dot(P, both, zero))
        both = pairs(U, dtype)
        moved = dot(tl.trans(left), both, dot(tl.trans(left_low), both, tl.zeros((DK, 2 * BV), tl.float32)))
        S = S * last + unpaired(moved)
        out = y_ptr + t * (Hv * Dv) + (head * Dv + v)[None, :]
        tl.store(out, y.to(dtype), mask=mask_v)
    return S
