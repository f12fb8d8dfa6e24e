"""Products and inverses of the delta rule's chunks (`_chunk.py`, `_chunk_channels.py`), in halves of 16 bits."""

import triton
import triton.language as tl

from penstock.backends.cuda._launch import WIDENED
from penstock.backends.cuda._rows import rounded


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def halves(x, dtype: tl.constexpr):
    """float32 x as high + low of `dtype`."""
    high = rounded(x, dtype)
    return high, rounded(x - high.to(tl.float32), dtype)


@triton.jit
def pairs(x, dtype: tl.constexpr):
    """float32 x [M, N] as [M, 2 N] of `dtype`: high and low halves side by side."""
    high, low = halves(x, dtype)
    return tl.reshape(tl.join(high, low), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def unpaired(y):
    """[M, 2 N] as [M, N]: the sums of neighbours."""
    even, odd = tl.split(tl.reshape(y, (y.shape[0], y.shape[1] // 2, 2)))
    return even + odd


@triton.jit
def dot(a, b, total):
    """total + a @ b of 16-bit a and b, float32 sums."""
    if WIDENED:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit
def dot_full(high, low, z_high, z_low, total):
    """total + (high + low) @ (z_high + z_low) but for low @ z_low."""
    return dot(high, z_high, dot(high, z_low, dot(low, z_high, total)))


@triton.jit
def on_diagonal(x, C: tl.constexpr):
    """Blocks x [C / 16, 16, 16] on the diagonal of [C, C], and 0."""
    n = tl.arange(0, C // 16)[:, None, None, None]
    m = tl.arange(0, C // 16)[None, :, None, None]
    return tl.reshape(tl.permute(tl.where(n == m, x[:, None, :, :], 0.0), (0, 2, 1, 3)), (C, C))


@triton.jit
def inverse(A, C: tl.constexpr, dtype: tl.constexpr):
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
    D = on_diagonal(x, C)
    zero = tl.zeros((C, C), tl.float32)
    D_high, D_low = halves(D, dtype)
    high, low = halves(tl.where(same, 0.0, A), dtype)
    X = dot_full(D_high, D_low, high, low, zero)
    X_high, X_low = halves(X, dtype)
    high, low = halves(dot_full(X_high, X_low, X_high, X_low, zero), dtype)
    D = dot_full(high, low, D_high, D_low, D)
    high, low = halves(D, dtype)
    return D - dot_full(X_high, X_low, high, low, zero)
