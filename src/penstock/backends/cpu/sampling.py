"""Sampling on the CPU: only what can be among the kept ranks is sorted."""

import math

import numpy as np

from penstock import ops
from penstock.ops.op import kernel
from penstock.ops.sampling import INACTIVE, NOT_FINITE, uniform

_SEED = 0xFFFFFFFFFFFFFFFF  # the bits of a seed


@kernel(ops.sample_tokens, device="cpu")
def sample_tokens(
    logits: np.ndarray,
    positions: np.ndarray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    seed: np.ndarray,
    mode: str = "full",
    *,
    out: np.ndarray,
) -> None:
    columns = (array.tolist() for array in (positions, temperature, top_k, top_p, min_p, seed))
    for b, row in enumerate(zip(*columns, strict=True)):
        out[b] = _token(logits[b], *row)


def _token(x, position: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> int:
    if position < 0:
        return INACTIVE
    best = int(x.argmax())  # the first of equal ones, or the first NaN
    highest = float(x[best])
    if not math.isfinite(highest):
        return NOT_FINITE
    if temperature == 0:
        return best
    ids = None  # that are left; None: all
    if 0 < top_k < x.size:
        ids = _leading(x, float(np.partition(x, x.size - top_k)[x.size - top_k]), top_k)
        x = x[ids]
    weights = x.astype(np.float64)
    weights -= highest
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the highest to -inf, and their weight to 0
        weights /= temperature
    np.exp(weights, out=weights)
    kept = np.ones(x.size, np.bool_) if min_p == 0 else weights >= min_p
    if top_p < 1:
        total = float(weights.sum())
        # What lies below this floor weighs less than half of 1 - top_p together, so that top_p cuts above it.
        among = np.flatnonzero(weights >= 0.5 * (1 - top_p) * total / weights.size)
        ranked = among[np.argsort(-x[among], kind="stable")]
        n = int(np.cumsum(weights[ranked]).searchsorted(top_p * total)) + 1
        leading = np.zeros(x.size, np.bool_)
        leading[ranked[:n]] = True
        kept &= leading
    weights *= kept
    sums = np.cumsum(weights, out=weights)
    at = int(sums.searchsorted(uniform(seed & _SEED, position) * sums[-1], side="right"))
    if at == sums.size:
        at = int(sums.searchsorted(sums[-1]))
    return at if ids is None else int(ids[at])


def _leading(x: np.ndarray, value: float, k: int) -> np.ndarray:
    """Indices, ascending, of the k first ranks of x, whose value of rank k is known: the lower index among equals."""
    ids = np.flatnonzero(x >= value)
    ties = np.flatnonzero(x[ids] == value)
    return np.delete(ids, ties[ties.size - (ids.size - k) :])
