"""Expert products of a routed block. Routers and combination are in _route.py.

The (token, slot) pairs of a routing are sorted by expert, so that each expert's weights are read once per call; with
one token every pair is its own group. Decode and prefill run the same grouped product, and a pair's result does not
depend on who else is in the call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

import penstock.backends.cpu._route  # noqa: F401  (registers the routers)
from penstock import ops
from penstock.backends.cpu._compile import njit
from penstock.backends.cpu._formats import frozen
from penstock.backends.cpu.linear import (
    VARIANTS,
    Pairs,
    Stack,
    by_size,
    finish,
    float_rows,
    float_target,
    gated,
    grouped_product,
    pairs_of,
    shared_products,
    stack_of,
)
from penstock.ops import kernel


# weighted  y[t] = Σ_i weights[t, i] · rows[place[t, i]], slots in order
# shapes    rows float32 [P, dim] of sorted pairs; place int64 [T, k]; weights float32 [T, k]; y float32 [T, dim]
# threads   prange over tokens in the parallel form
# bytes     4 · (P + T) · dim
# limits    none
@njit
def _weighted_row(rows, place, weights, y):
    y[:] = 0
    for i in range(place.size):
        w, row = weights[i], rows[place[i]]
        for j in range(y.size):
            y[j] += w * row[j]


@njit
def _weighted(rows, place, weights, y):
    for t in range(y.shape[0]):
        _weighted_row(rows, place[t], weights[t], y[t])


@njit(parallel=True)
def _weighted_parallel(rows, place, weights, y):
    for t in prange(y.shape[0]):
        _weighted_row(rows, place[t], weights[t], y[t])


def _sorted_pairs(ids: np.ndarray, slot_of: np.ndarray | None) -> Pairs:
    return pairs_of((ids if slot_of is None else slot_of[ids]).reshape(-1), ids.size // ids.shape[-1])


def _gate_up(
    x: np.ndarray, k: int, pairs: Pairs, gate_w: Any, up_w: Any, act: str, activations: str, variant: str | None
) -> np.ndarray:
    """act(gate) · up of the sorted pairs: float32 [P, N] from one float32 row per token."""
    stacks = [stack_of(w) for w in (gate_w, up_w) if w is not None]
    products = [np.empty((len(x) * k, w.rows), np.float32) for w in stacks]
    shared_products(x, stacks, pairs.groups, lambda a: pairs.gather(a, k), products, activations, variant)
    N = stacks[0].rows if up_w is not None else stacks[0].rows // 2
    gate, up = products if up_w is not None else (products[0][:, :N], products[0][:, N:])
    h = np.empty(gate.shape, np.float32)
    gated(gate, up, act, h)
    return h


def _down_sum(
    h: np.ndarray,
    shape: tuple[int, ...],
    pairs: Pairs,
    down_w: Any,
    weights: np.ndarray,
    out: np.ndarray,
    activations: str,
    variant: str | None,
) -> None:
    """Weighted sum over slots of the down projections of sorted pairs h [P, I]."""
    stack: Stack = stack_of(down_w)
    each = np.empty((len(h), stack.rows), np.float32)
    grouped_product(frozen(h), stack, pairs.groups, each, activations, variant)
    place = np.arange(len(h))
    if pairs.order is not None:
        place[pairs.order] = np.arange(len(h))
    k = shape[-1]
    y = float_target(out)
    flat = y.reshape(-1, stack.rows)
    by_size(_weighted, _weighted_parallel, each.size, each, place.reshape(-1, k), frozen(weights.reshape(-1, k)), flat)
    finish(y, out)


@kernel(ops.expert_gate_up, device="cpu", variants=tuple(VARIANTS))
def expert_gate_up(x, gate_w, up_w, ids, slot_of, act, activations, *, out, variant):
    if out.size == 0:
        return
    pairs = _sorted_pairs(ids, slot_of)
    h = _gate_up(float_rows(x), ids.shape[-1], pairs, gate_w, up_w, act, activations, variant)
    y = float_target(out)
    pairs.restore(h, y.reshape(h.shape))
    finish(y, out)


@kernel(ops.expert_down_sum, device="cpu", variants=tuple(VARIANTS))
def expert_down_sum(h, down_w, ids, weights, slot_of, activations, *, out, variant):
    if out.size == 0:
        return
    pairs = _sorted_pairs(ids, slot_of)
    _down_sum(pairs.sort(float_rows(h)), ids.shape, pairs, down_w, weights, out, activations, variant)


@kernel(ops.moe_forward, device="cpu", variants=tuple(VARIANTS))
def moe_forward(x, ids, weights, gate_w, up_w, down_w, slot_of, act, activations, *, out, variant):
    if out.size == 0:
        return
    pairs = _sorted_pairs(ids, slot_of)
    h = _gate_up(float_rows(x), ids.shape[-1], pairs, gate_w, up_w, act, activations, variant)
    if x.dtype != np.float32:  # the definition rounds h, as the two ops on their own would
        rounded = np.empty(h.shape, x.dtype)
        finish(h, rounded)
        h = float_rows(rounded)
    _down_sum(h, ids.shape, pairs, down_w, weights, out, activations, variant)
