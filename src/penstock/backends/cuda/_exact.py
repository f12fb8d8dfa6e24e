"""Products of many rows with codes of 8 bits whose weights may not be rounded: the scores of a router.

A code less 128 is exact in half precision, as x is, so that tensor cores add up each group without rounding an operand;
scale and bias of a group come after, in float32.
"""

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl

from penstock.backends.cuda._gemm import dot_dtype
from penstock.backends.cuda._launch import TL_DTYPES
from penstock.backends.cuda._tuning import EXACT_TILES
from penstock.quant import QuantizedTensor

_SHIFT = tl.constexpr(8388608.0 + 128.0)  # a code or-ed into the mantissa of 2^23 is that number plus the code

# Arrays of a product; codes: bytes.
_Arrays = namedtuple("_Arrays", "x codes scales biases out")


# exact     out[t, n] = Σ_g s[n, g] · Σ_k (code[n, k] − 128) · x[t, k] + (b[n, g] + 128 · s[n, g]) · Σ_k x[t, k], k over
#           the codes of group g, which has scale s and bias b
# shapes    x [T, K] in half precision; codes uint8 [N, K]; scales, biases [N, K / GS] of any float; out float32 [T, N]
# grid      (T tiles · N tiles,), T tiles first
# bytes     x once for each N tile, the weight once for each T tile (from L2 but the first), out once
# limits    K a multiple of GS, GS one of 16
@triton.jit(do_not_specialize=["T"])
def _exact_kernel(
    a, T, N, K: tl.constexpr, GS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr
):
    tiles = tl.cdiv(T, BM)
    m = (tl.program_id(0) % tiles).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(0) // tiles * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1).to(tl.int64)
    j = tl.arange(0, GS)
    s_at, b_at = a.scales + row * (K // GS), a.biases + row * (K // GS)
    total = tl.zeros([BN, BM], tl.float32)
    s, b = tl.load(s_at), tl.load(b_at)
    for g in range(K // GS):
        codes = tl.load(a.codes + row[:, None] * K + g * GS + j[None, :])
        x = tl.load(a.x + m[:, None] * K + g * GS + j[None, :], mask=(m < T)[:, None], other=0.0)
        scale, bias = s.to(tl.float32)[:, None], b.to(tl.float32)[:, None]
        following = tl.minimum(g + 1, K // GS - 1)  # its scales are on their way while this group is multiplied
        s, b = tl.load(s_at + following), tl.load(b_at + following)
        w = ((codes.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - _SHIFT).to(DTYPE)
        part = tl.dot(w, tl.trans(x.to(DTYPE)))
        total += part * scale + tl.sum(x.to(tl.float32), axis=1)[None, :] * (bias + scale * 128.0)
    at = a.out + m[:, None] * N + n[None, :]
    tl.store(at, tl.trans(total), mask=(m < T)[:, None] & (n < N)[None, :])


def takes_exactly(x: torch.Tensor, w: Any, out: torch.Tensor) -> bool:
    """Whether a product goes this way: many rows in half precision, few rows of affine codes in bytes."""
    least, most, *_ = EXACT_TILES
    coded = isinstance(w, QuantizedTensor) and w.mode == "affine" and w.bits == 8 and w.shape[0] <= most
    return coded and len(x) >= least and x.dtype is not torch.float32 and out.dtype is torch.float32


def exact_product(x: torch.Tensor, w: QuantizedTensor, out: torch.Tensor) -> None:
    """out [T, N] = x [T, K] · wᵀ."""
    assert x.is_contiguous() and out.is_contiguous() and w.packed.is_contiguous()
    (T, K), N = x.shape, w.shape[0]
    *_, BM, BN, warps, stages = EXACT_TILES
    a = _Arrays(x, w.packed.view(torch.uint8), w.scales, w.biases, out)
    _exact_kernel[(triton.cdiv(T, BM) * triton.cdiv(N, BN),)](
        a, T, N, K, w.group_size, BM, BN, TL_DTYPES[dot_dtype(x, x, x)], num_warps=warps, num_stages=stages
    )
