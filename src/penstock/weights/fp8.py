"""Block-scaled FP8, as DeepSeek releases it: E4M3 numbers [N, K], each square of 128 with a scale of its own."""

import numpy as np

from penstock.dtypes import bfloat16, round_to
from penstock.quant import E4M3, Format, QuantizedTensor

BLOCK = 128  # rows and columns that share a scale
EXACT = Format(8, 32, "mxfp8")  # holds such a weight as it is if its scales are powers of two


def blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a matrix."""
    return tuple(-(-size // BLOCK) for size in shape)


def made_dense(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """codes uint8 [N, K], scales [⌈N / 128⌉, ⌈K / 128⌉] of any float → bfloat16 [N, K], each product rounded once."""
    N, K = codes.shape
    out = np.empty((N, K), bfloat16)
    factors = scales.astype(np.float32).repeat(BLOCK, axis=1)[:, :K]
    for block in range(scales.shape[0]):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        out[rows] = round_to(np.take(E4M3, codes[rows]) * factors[block], bfloat16)
    return out


def as_mxfp8(codes: np.ndarray, scales: np.ndarray) -> QuantizedTensor | None:
    """The same numbers in mxfp8, on the memory of the codes; None where a scale is no power of two, or K no multiple of
    32.
    """
    N, K = codes.shape
    mantissa, exponent = np.frexp(scales.astype(np.float32))
    if K % EXACT.unit or not (mantissa == 0.5).all() or exponent.min() < -126 or exponent.max() > 128:
        return None
    per_group = (exponent + 126).astype(np.uint8).repeat(BLOCK, axis=0)[:N]
    per_group = per_group.repeat(BLOCK // EXACT.group_size, axis=1)[:, : K // EXACT.group_size]
    words = np.require(codes.view("<u4"), requirements=["A"])  # a copy only where the file is not aligned
    return QuantizedTensor(words, np.ascontiguousarray(per_group), None, *EXACT)
