"""Expert products of a routed block. Routers and combination are in _route.py.

The (token, slot) pairs of a routing are sorted by expert, so that each expert's weights are read once per call; with
one token every pair is its own group. Decode and prefill run the same grouped product, and a pair's result does not
depend on the rest of the call.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import prange

from penstock import ops
from penstock.backends.cpu._blocks import STEP
from penstock.backends.cpu._formats import frozen
from penstock.backends.cpu._math import silu32
from penstock.backends.cpu._route import moe_combine_residual
from penstock.backends.cpu._rows import copy_bytes
from penstock.backends.cpu._simd import width as width_of
from penstock.backends.cpu._threads import run
from penstock.backends.cpu.compile import njit
from penstock.backends.cpu.linear import (
    PORTABLE,
    STRIP,
    VARIANTS,
    WIDE,
    Pairs,
    block_size,
    by_size,
    chosen,
    finish,
    float_rows,
    float_target,
    gated,
    gated_row,
    grouped_product,
    int8_tokens,
    paired_size,
    pairs_of,
    product_into,
    rounded_rows,
    shared_products,
    stack_of,
    whole,
)
from penstock.backends.cpu.norm import rms_norm
from penstock.ops import kernel
from penstock.ops.linear import counted, places, slots_of
from penstock.quant import GgufTensor, QuantizedTensor


# weighted  y[t] = Σ_i weights[t, i] · rows[place[t, i]], slots in order, those of place −1 left out
# shapes    rows float32 [P, dim] of sorted pairs; place int64 [T, k]; weights float32 [T, k]; y float32 [T, dim]
# threads   prange over tokens in the parallel form
# bytes     4 · (P + T) · dim
# limits    none
@njit
def _weighted_row(rows, place, weights, y):
    y[:] = 0
    for i in range(place.size):
        if place[i] < 0:
            continue
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
    """The pairs of ids that name an expert of this rank; one that is not here yet is refused."""
    return pairs_of(slots_of(ids, slot_of).reshape(-1), ids.size // ids.shape[-1])


def _gate_up(
    x: np.ndarray, k: int, pairs: Pairs, gate_w: Any, up_w: Any, act: str, activations: str, variant: str | None
) -> np.ndarray:
    """act(gate) · up of the sorted pairs: float32 [P, N] from one float32 row per token."""
    stacks = [stack_of(w) for w in (gate_w, up_w) if w is not None]
    products = [np.empty((pairs.count, w.rows), np.float32) for w in stacks]
    shared_products(x, stacks, pairs.groups, lambda a: pairs.gather(a, k), products, activations, variant)
    N = stacks[0].rows if up_w is not None else stacks[0].rows // 2
    gate, up = products if up_w is not None else (products[0][:, :N], products[0][:, N:])
    h = np.empty(gate.shape, np.float32)
    gated(gate, up, act, h)
    return h


def _down(h: np.ndarray, pairs: Pairs, down_w: Any, activations: str, variant: str | None) -> np.ndarray:
    """The down projections of sorted pairs h [P, I]: float32 [P, dim]."""
    stack = stack_of(down_w)
    each = np.empty((len(h), stack.rows), np.float32)
    grouped_product(frozen(h), stack, pairs.groups, each, activations, variant)
    return each


def _sum(each: np.ndarray, pairs: Pairs, weights: np.ndarray, out: np.ndarray) -> None:
    """out = the weighted sums over slots of float32 rows [P, dim], sorted as `pairs`."""
    _sum_placed(each, _places(pairs, len(each), weights.size), weights, out)


def _places(pairs: Pairs, count: int, size: int) -> np.ndarray:
    """Which of `count` sorted rows is that of each of `size` pairs, −1: it has none."""
    place = np.arange(size)
    if pairs.order is not None:
        place[:] = -1
        place[pairs.order] = np.arange(count)
    return place


def _sum_placed(each: np.ndarray, place: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    """out = the weighted sums over slots of float32 rows; place: where the row of each pair is, −1: it has none."""
    y, k = float_target(out), weights.shape[-1]
    flat, factors = y.reshape(-1, each.shape[1]), frozen(weights.reshape(-1, k))
    by_size(_weighted, _weighted_parallel, each.size, frozen(each), place.reshape(-1, k), factors, flat)
    finish(y, out)


@kernel(ops.expert_gate_up, device="cpu", variants=tuple(VARIANTS))
def expert_gate_up(x, gate_w, up_w, ids, slot_of, act, activations, *, out, variant):
    if out.size == 0:
        return
    pairs = _sorted_pairs(ids, slot_of)
    h = _gate_up(float_rows(x), ids.shape[-1], pairs, gate_w, up_w, act, activations, variant)
    y = float_target(out)
    pairs.restore(h, y.reshape(ids.size, h.shape[1]))
    finish(y, out)


@kernel(ops.expert_down_sum, device="cpu", variants=tuple(VARIANTS))
def expert_down_sum(h, down_w, ids, weights, slot_of, activations, *, out, variant):
    if out.size == 0:
        return
    pairs = _sorted_pairs(ids, slot_of)
    _sum(_down(pairs.sort(float_rows(h)), pairs, down_w, activations, variant), pairs, weights, out)


FEW_TOKENS = 8  # that go through their experts in one launch


@functools.cache
def token_block(up_kind: int, down_kind: int, how: int) -> Any:
    """The kernel that takes a few tokens through their chosen experts, int8, for two kinds of codes."""
    up_rows, down_rows = int8_tokens(up_kind, how), int8_tokens(down_kind, how)
    up_pairs, down_pairs = width_of(up_kind) == 4, width_of(down_kind) == 4

    # token_block  h[p] = act(gate_e · x[t]) · (up_e · x[t]) of pairs p of a token t and an expert e, sorted by e;
    #              y[t] = Σ_i weights[t, i] · (down_e · h of pair (t, i)), in order, those of a slot below 0 left out
    # shapes       gate, up [S, N, ·], down [S, dim, ·] as in Stack, up rows from `offset` on; x float32 [T, K]; slots
    #              integers [T · k]; weights float32 [T, k]; width I of h; y float32 [T, dim]
    # threads      prange over strips of each expert's rows of h, then over strips of y; a number belongs to one thread
    # bytes        the weights of each chosen expert once
    # limits       instructions of `how`
    @njit(parallel=True)
    def block(
        gate, gate_s, gate_b, up, up_s, up_b, offset, down, down_s, down_b, form, down_form, up_gs, down_gs,
        up_offset, down_offset, slots, weights, x, width, gelu, y,
    ):  # fmt: skip
        (T, dim), K, k = y.shape, x.shape[1], weights.shape[1]
        order, place = np.empty(slots.size, np.int64), np.empty((T, k), np.int64)
        P = _sort_pairs(slots, order, place)
        lo = np.empty(P + 1, np.int64)
        experts = _first_of_each(slots, order, P, lo)

        xp = np.empty((T, paired_size(K) if up_pairs else K), np.int8)
        xb = np.empty((T, block_size(K)), np.int8)
        groups = K // up_gs * STRIP
        delta, total = np.empty((T, groups), np.float32), np.empty((T, groups), np.float32)
        rounded_rows(x, up_gs, up_offset, up_pairs, xp, xb, delta, total)
        if T > 1:  # a row for each pair: those of an expert lie one behind the other
            xp, xb, delta, total = _of_pairs(order[:P], k, xp, xb, delta, total)
        h = np.empty((P, width), np.float32)
        strip = STRIP if K > 512 else WIDE
        strips = (width + strip - 1) // strip
        for i in prange(experts * strips):
            e, first = i // strips, i % strips * strip
            rows = min(strip, width - first)
            low, high = (lo[e], lo[e + 1]) if T > 1 else (0, 1)
            g, u = np.empty((high - low, rows), np.float32), np.empty((high - low, rows), np.float32)
            slot = np.int64(slots[order[lo[e]]])
            at_gate, at_up = slot * gate.shape[1] + first, slot * up.shape[1] + offset + first
            p, b, d, s = xp[low:high], xb[low:high], delta[low:high], total[low:high]
            up_rows(gate, gate_s, gate_b, form, up_gs, at_gate, p, b, d, s, g, 0, rows)
            up_rows(up, up_s, up_b, form, up_gs, at_up, p, b, d, s, u, 0, rows)
            for n in range(lo[e + 1] - lo[e]):
                gated_row(g[n], u[n], gelu, h[lo[e] + n, first : first + rows])

        hp = np.empty((P, paired_size(width) if down_pairs else width), np.int8)
        hb = np.empty((P, block_size(width)), np.int8)
        h_groups = width // down_gs * STRIP
        h_delta, h_total = np.empty((P, h_groups), np.float32), np.empty((P, h_groups), np.float32)
        rounded_rows(h, down_gs, down_offset, down_pairs, hp, hb, h_delta, h_total)
        for i in prange((dim + WIDE - 1) // WIDE):  # 16 KB of each expert at a width of 512
            first = i * WIDE
            rows = min(WIDE, dim - first)
            each = np.empty((P, rows), np.float32)
            for e in range(experts):
                low, high = lo[e], lo[e + 1]
                at_row = np.int64(slots[order[low]]) * dim + first
                p, b, d, s = hp[low:high], hb[low:high], h_delta[low:high], h_total[low:high]
                down_rows(down, down_s, down_b, down_form, down_gs, at_row, p, b, d, s, each[low:high], 0, rows)
            for t in range(T):
                _weighted_row(each, place[t], weights[t], y[t, first : first + rows])

    return block


@njit
def _of_pairs(order, k, xp, xb, delta, total):
    """Rows of tokens as rows of their pairs."""
    P = order.size
    to_p, to_b = np.empty((P, xp.shape[1]), np.int8), np.empty((P, xb.shape[1]), np.int8)
    to_d, to_t = np.empty((P, delta.shape[1]), np.float32), np.empty((P, delta.shape[1]), np.float32)
    for p in range(P):
        t = order[p] // k
        copy_bytes(xp[t], to_p[p])
        copy_bytes(xb[t], to_b[p])
        copy_bytes(delta[t], to_d[p])
        copy_bytes(total[t], to_t[p])
    return to_p, to_b, to_d, to_t


@njit
def _sort_pairs(slots, order, place):
    """Pairs in order of their slots, those below 0 left out: `order` has their numbers, `place` where each is or −1;
    how many there are. For a few pairs.
    """
    count, k = 0, place.shape[1]
    for p in range(slots.size):
        if slots[p] < 0:
            continue
        i = count
        while i > 0 and slots[order[i - 1]] > slots[p]:
            order[i] = order[i - 1]
            i -= 1
        order[i] = p
        count += 1
    place[:] = -1
    for i in range(count):
        place[order[i] // k, order[i] % k] = i
    return count


@njit
def _first_of_each(slots, order, count, lo):
    """Where the pairs of each slot begin, and where all end; how many slots there are."""
    found = 0
    for p in range(count):
        if p == 0 or slots[order[p]] != slots[order[p - 1]]:
            lo[found] = p
            found += 1
    lo[found] = count
    return found


def _few_tokens(
    x: np.ndarray, slots: np.ndarray, weights: np.ndarray, gate_w: Any, up_w: Any, down_w: Any, act: str, how: int,
    y: np.ndarray,
) -> None:  # fmt: skip
    """All of `moe_forward` for a few float32 rows [T, K] and weights [T, k] into y [T, dim]."""
    gate, down = stack_of(gate_w), stack_of(down_w)
    up = gate if up_w is None else stack_of(up_w)
    width = gate.rows if up_w is not None else gate.rows // 2
    run(
        token_block(gate.kind, down.kind, how),
        gate.codes, gate.scales, gate.biases, up.codes, up.scales, up.biases, 0 if up_w is not None else width,
        down.codes, down.scales, down.biases, gate.fmt, down.fmt, gate.gs, down.gs, gate.offset, down.offset,
        frozen(slots), frozen(weights), x, width, act == "gelu_tanh", y,
    )  # fmt: skip


def _rounded(h: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float32 rows in another format, as the definition rounds them."""
    if dtype == np.float32:
        return h
    rounded = np.empty(h.shape, dtype)
    finish(h, rounded)
    return rounded


def _fits_one_launch(x: np.ndarray, gate_w: Any, up_w: Any, down_w: Any, activations: str) -> bool:
    weights = [w for w in (gate_w, up_w, down_w) if w is not None]
    return (
        activations == "int8"
        and x.size <= FEW_TOKENS * x.shape[-1]
        and x.dtype == np.float32
        and all(isinstance(w, QuantizedTensor) and w.global_scale is None for w in weights)
        and (up_w is None or up_w.key[1:] == gate_w.key[1:])
        and not any(isinstance(w, GgufTensor) and w.shape[-1] % STEP for w in weights)  # rows that must be filled up
    )


def _mlp(x, k: int, pairs: Pairs, gate_w, up_w, down_w, act: str, activations: str, variant) -> np.ndarray:
    """The products of sorted pairs: float32 [P, dim] from one row x of any float per token."""
    h = _gate_up(float_rows(x), k, pairs, gate_w, up_w, act, activations, variant)
    return _down(float_rows(_rounded(h, x.dtype)), pairs, down_w, activations, variant)


@kernel(ops.expert_mlp, device="cpu", variants=tuple(VARIANTS))
def expert_mlp(expert_out, x, ids, gate_w, up_w, down_w, slot_of, act, activations, *, variant):
    pairs = pairs_of(places(ids, slot_of).reshape(-1), 2)  # sorted, however many tokens they are of
    if pairs.count == 0:
        return
    each = _mlp(x, ids.shape[-1], pairs, gate_w, up_w, down_w, act, activations, variant)
    expert_out.reshape(-1, each.shape[1])[pairs.order] = _rounded(each, expert_out.dtype)


@kernel(ops.moe_forward, device="cpu", variants=tuple(VARIANTS))
def moe_forward(x, ids, weights, gate_w, up_w, down_w, slot_of, act, activations, expert_out, *, out, variant):
    if out.size == 0:
        return
    if expert_out is not None:
        place = np.where(counted(ids, slot_of), np.arange(ids.size).reshape(ids.shape), -1)
        _sum_placed(float_rows(expert_out), place, weights, out)
        return
    how, slots = chosen(variant), slots_of(ids, slot_of).reshape(-1)
    if how != PORTABLE and _fits_one_launch(x, gate_w, up_w, down_w, activations):
        rows, k = float_rows(x), ids.shape[-1]
        y = out.reshape(len(rows), out.shape[-1])
        _few_tokens(rows, slots, weights.reshape(-1, k), gate_w, up_w, down_w, act, how, y)
        return
    pairs = pairs_of(slots, ids.size // ids.shape[-1])
    _sum(_mlp(x, ids.shape[-1], pairs, gate_w, up_w, down_w, act, activations, variant), pairs, weights, out)


# clamped   h[p, j] = g · σ(alpha · g) · (u + 1), g = min(gate[p, j] + gate_bias[e, j], limit), u = up[p, j] +
#           up_bias[e, j] between −limit and limit
# shapes    gate, up, h float32 [P, N], h may be gate; biases float32 [E, N]; expert int64 [P]: e of each row
# threads   prange over rows in the parallel form; a row belongs to one thread
# bytes     20 · P · N
# limits    none
@njit
def _clamped_row(gate, up, gate_bias, up_bias, limit, alpha, h):
    for j in range(h.size):
        g = min(gate[j] + gate_bias[j], limit)
        u = min(max(up[j] + up_bias[j], -limit), limit)
        h[j] = silu32(alpha * g) / alpha * (u + np.float32(1))


@njit
def _clamped(gate, up, gate_bias, up_bias, expert, limit, alpha, h):
    for p in range(h.shape[0]):
        _clamped_row(gate[p], up[p], gate_bias[expert[p]], up_bias[expert[p]], limit, alpha, h[p])


@njit(parallel=True)
def _clamped_parallel(gate, up, gate_bias, up_bias, expert, limit, alpha, h):
    for p in prange(h.shape[0]):
        _clamped_row(gate[p], up[p], gate_bias[expert[p]], up_bias[expert[p]], limit, alpha, h[p])


@kernel(ops.moe_biased_forward, device="cpu", variants=tuple(VARIANTS), composed=True)
def moe_biased_forward(
    x, ids, weights, gate_w, up_w, down_w, gate_bias, up_bias, down_bias, slot_of, limit, alpha, activations, residual,
    *, out, variant,
):  # fmt: skip
    if out.size == 0:
        return
    k = ids.shape[-1]
    pairs = pairs_of(places(ids, slot_of).reshape(-1), ids.size // k)
    chosen = ids.reshape(-1).astype(np.int64)
    expert = chosen if pairs.order is None else chosen[pairs.order]
    stacks = [stack_of(gate_w), stack_of(up_w)]
    gate, up = (np.empty((pairs.count, w.rows), np.float32) for w in stacks)
    shared_products(float_rows(x), stacks, pairs.groups, lambda a: pairs.gather(a, k), [gate, up], activations, variant)
    biases = (frozen(gate_bias), frozen(up_bias), expert, np.float32(limit), np.float32(alpha))
    by_size(_clamped, _clamped_parallel, gate.size, gate, up, *biases, gate)
    each = _down(float_rows(_rounded(gate, x.dtype)), pairs, down_w, activations, variant)
    each += down_bias[expert]
    if residual is None:
        _sum(each, pairs, weights, out)
        return
    routed, y = np.empty(out.shape, np.float32), float_target(out)
    _sum(each, pairs, weights, routed)
    np.add(float_rows(residual).reshape(out.shape), routed, out=y)
    finish(y, out)


@kernel(ops.moe_shared_forward, device="cpu", variants=tuple(VARIANTS), composed=True)
def moe_shared_forward(
    residual, x, ids, weights, gate_w, up_w, down_w, shared_gate_w, shared_up_w, shared_down_w, shared_score, slot_of,
    act, activations, norm_weight, eps, expert_out, *, out, variant,
):  # fmt: skip
    if out.size == 0:
        return
    if norm_weight is not None:
        x, normed = np.empty_like(x), x
        rms_norm(normed, norm_weight, eps, out=x)
    rows = float_rows(x)
    routed, shared = (np.empty(out.shape, np.float32) for _ in range(2))
    routing = (x, ids, weights, gate_w, up_w, down_w, slot_of, act, activations, expert_out)
    moe_forward(*routing, out=routed, variant=variant)
    own = Pairs(None, whole(len(rows)))
    h = _gate_up(rows, 1, own, shared_gate_w, shared_up_w, act, activations, variant)
    product_into(_rounded(h, x.dtype), shared_down_w, shared.reshape(len(rows), -1), activations, variant)
    y = float_target(out)
    wide = None if residual is None else float_rows(residual).reshape(out.shape)
    moe_combine_residual(wide, None, None, shared, shared_score, routed, out=y)
    finish(y, out)
