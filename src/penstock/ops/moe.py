"""Mixture-of-experts: routers, gated expert products, combination with the residual stream."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.dtypes import round_to
from penstock.errors import InvalidArgument, ShapeError
from penstock.ops import check
from penstock.ops.array import Array, Spec
from penstock.ops.elementwise import ACTIVATIONS, expert_sum, sigmoid
from penstock.ops.linear import (
    FOREIGN,
    ROUNDINGS,
    by_slot,
    check_slot_of,
    check_slots,
    counted,
    expert_at,
    places,
    product,
    slots_of,
    weight_matrix,
)
from penstock.ops.norm import rms_norm
from penstock.ops.op import op
from penstock.quant import QuantizedTensor

# -- routers ---------------------------------------------------------------------------------------------------------


def _logits(logits: Spec, k: int, name: str, active: Spec | None) -> tuple[Spec, Spec]:
    check.dtype("float32", logits=logits)
    check.dtype("int32", active=active)
    check.axes("[T, E] or [E]", 1, 2, logits=logits)
    experts = logits.shape[-1]
    if experts == 0:
        raise ShapeError(f"logits has shape {logits.shape}, expected at least one expert")
    if not 1 <= k <= experts:
        raise InvalidArgument(f"{name} is {k}, expected 1 to {experts} (the number of experts)")
    check.shape(logits.shape[:-1], "one per row of logits", active=active)
    chosen = (*logits.shape[:-1], k)
    return Spec(chosen, "int32"), Spec(chosen, "float32")


def _probabilities(logits: Array) -> tuple[Array, Array]:
    """softmax in float64 and, per row, whether it means anything (no NaN, no +inf, not all −inf)."""
    top = logits.max(axis=-1, keepdims=True)
    e = np.exp(logits.astype(np.float64) - top)
    return e / e.sum(axis=-1, keepdims=True), np.isfinite(top)


def _chosen(
    ids: Array, weights: Array, sound: Array, propagate_nan: bool, active: Array | None, *seen: Array
) -> tuple[Array, Array]:
    """A router's outputs: ids 0 in rows that are not sound, and weights 0; with propagate_nan weights NaN there and in
    rows where something seen is not finite. Rows that are not active have ids −1 and weights 0.
    """
    if propagate_nan:
        sound = sound & np.all([np.isfinite(one).all(axis=-1, keepdims=True) for one in seen], axis=0)
    weights = np.where(sound, weights, np.nan if propagate_nan else 0)
    ids = np.where(sound, ids, 0)
    if active is not None:
        inactive = active[..., None] < 0
        ids, weights = np.where(inactive, -1, ids), np.where(inactive, 0, weights)
    return ids.astype(np.int32), weights.astype(np.float32)


def _best(scores: Array, k: int) -> Array:
    """Indices of the k largest of each row, descending, the lowest index first among equals."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


def _route(
    logits: Spec, per_expert_scale: Spec | None, top_k: int, propagate_nan: bool, active: Spec | None
) -> tuple[Spec, Spec]:
    result = _logits(logits, top_k, "top_k", active)
    check.floating(per_expert_scale=per_expert_scale)
    check.shape(logits.shape[-1:], "one per expert", per_expert_scale=per_expert_scale)
    return result


@op(infer=_route)
def moe_route(
    logits: Array, per_expert_scale: Array | None, top_k: int, propagate_nan: bool = False, active: Array | None = None
) -> tuple[Array, Array]:
    """The top_k experts of each row, best first, with renormalised and then scaled weights.

    p = softmax(logits) over all experts; ids by logit, ties to the lowest index; w = p[ids] / Σ p[ids] · scale[ids]
    logits float32 [(T,) E], per_expert_scale [E] or None → ids int32, weights float32 [(T,) k]. The weights are not
    renormalised after the scale. A row with NaN or +inf, or all −inf, gives ids 0 and weights 0; with propagate_nan
    every row whose logits are not all finite gives ids 0 and weights NaN, which no result survives. active int32 [T]:
    a row whose number is negative is of no sequence and gives ids −1 and weights 0, whatever its logits are.
    """
    p, sound = _probabilities(logits)
    ids = _best(logits, top_k)
    chosen = np.take_along_axis(p, ids, axis=-1)
    total = chosen.sum(axis=-1, keepdims=True)
    scale = np.ones(logits.shape[-1]) if per_expert_scale is None else per_expert_scale.astype(np.float64)
    return _chosen(ids, chosen / total * scale[ids], sound & (total > 0), propagate_nan, active, logits)


@op(infer=lambda logits, k, propagate_nan, active: _logits(logits, k, "k", active))
def moe_softmax_topk(
    logits: Array, k: int, propagate_nan: bool = False, active: Array | None = None
) -> tuple[Array, Array]:
    """The k experts of each row in slot order with their softmax probabilities, not renormalised.

    Slots start as experts 0 … k − 1; each later expert takes the slot of the smallest logit (the first such slot) if
    its own is strictly larger. logits float32 [(T,) E] → ids int32, weights float32 [(T,) k], slots not sorted. A row
    with NaN or +inf, or all −inf, gives ids 0 and weights 0; propagate_nan and active as in `moe_route`.
    """
    p, sound = _probabilities(logits)
    rows = logits.reshape(-1, logits.shape[-1])
    ids = np.tile(np.arange(k), (len(rows), 1))
    held = rows[:, :k].copy()
    every = np.arange(len(rows))
    for i in range(k, rows.shape[1]):
        slot = np.argmin(held, axis=1)
        better = rows[:, i] > held[every, slot]
        held[every[better], slot[better]] = rows[better, i]
        ids[every[better], slot[better]] = i
    ids = ids.reshape(*logits.shape[:-1], k)
    return _chosen(ids, np.take_along_axis(p, ids, axis=-1), sound, propagate_nan, active, logits)


def _group_route(
    logits: Spec,
    bias: Spec | None,
    n_group: int,
    topk_group: int,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    propagate_nan: bool,
    active: Spec | None,
    norm_eps: float,
) -> tuple[Spec, Spec]:
    result = _logits(logits, top_k, "top_k", active)
    if not 0 < norm_eps < math.inf:
        raise InvalidArgument(f"norm_eps is {norm_eps}, expected a positive finite number")
    experts = logits.shape[-1]
    check.floating(bias=bias)
    check.shape((experts,), "one per expert", bias=bias)
    check.finite(routed_scaling_factor=routed_scaling_factor)
    check.positive(n_group=n_group)
    if experts % n_group:
        raise InvalidArgument(f"n_group is {n_group}, expected a divisor of {experts} (the number of experts)")
    if n_group > 1 and experts // n_group < 2:
        raise InvalidArgument(f"n_group is {n_group}, expected at least 2 of the {experts} experts in a group")
    if not 1 <= topk_group <= n_group:
        raise InvalidArgument(f"topk_group is {topk_group}, expected 1 to {n_group} (n_group)")
    kept = topk_group * (experts // n_group)
    if top_k > kept:
        raise InvalidArgument(f"top_k is {top_k}, expected at most {kept} (experts in topk_group groups)")
    return result


@op(infer=_group_route)
def moe_group_route(
    logits: Array,
    bias: Array | None,
    n_group: int,
    topk_group: int,
    top_k: int,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    propagate_nan: bool = False,
    active: Array | None = None,
    norm_eps: float = 1e-20,
) -> tuple[Array, Array]:
    """DeepSeek-V3's router: sigmoid scores, a bias for the choice alone, groups of experts first.

    s = σ(logits), c = s + bias in float32; keep the topk_group groups of largest (sum of their two best c); ids = the
    top_k largest c among those, ties to the lowest index; w = s[ids], divided by Σ w + norm_eps if norm_topk_prob,
    times routed_scaling_factor. logits float32 [(T,) E], bias [E] or None → ids int32, weights float32 [(T,) k]. A row
    with NaN gives ids 0 and weights 0; with propagate_nan one whose logits or c are not all finite ids 0 and weights
    NaN; active as in `moe_route`.
    """
    experts = logits.shape[-1]
    s = sigmoid(logits.astype(np.float64)).astype(np.float32)
    choice = scores = s if bias is None else s + bias.astype(np.float32)
    sound = np.asarray(~np.isnan(choice).any(axis=-1, keepdims=True))
    if n_group > 1:
        groups = choice.reshape(*choice.shape[:-1], n_group, experts // n_group)
        two_best = np.sort(groups, axis=-1)[..., -2:]
        keep = np.zeros(groups.shape[:-1], bool)
        np.put_along_axis(keep, _best(two_best[..., 1] + two_best[..., 0], topk_group), True, axis=-1)
        choice = np.where(keep[..., None], groups, -np.inf).reshape(choice.shape)
    ids = _best(choice, top_k)
    weights = np.take_along_axis(s, ids, axis=-1).astype(np.float64)
    if norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + norm_eps)
    return _chosen(ids, weights * routed_scaling_factor, sound, propagate_nan, active, logits, scores)


def _scored(
    x: Spec, norm_weight: Spec | None, w: Any, scores: int, eps: float, write_normed: bool, dtype: str | None
) -> tuple[Spec | None, Spec, Spec | None]:
    """What a router that has its product makes of rows: them, normed, logits of experts, and other scores."""
    check.floating(x=x, norm_weight=norm_weight)
    check.axes("[T, K] or [K]", 1, 2, x=x)
    check.filled(x=x)
    check.shape(x.shape[-1:], "last axis of x", norm_weight=norm_weight)
    check.eps(eps)
    N = weight_matrix("w", w, x.shape[-1])
    if not 0 <= scores < N:
        raise InvalidArgument(f"scores is {scores}, expected 0 to {N - 1} (rows of w less one)")
    if write_normed and norm_weight is None:
        raise InvalidArgument("write_normed is True without norm_weight, expected both")
    if dtype is not None and norm_weight is None:
        kept = "rows that are not normed stay as they are"
        raise InvalidArgument(f"dtype is {dtype} without norm_weight, expected None: {kept}")
    normed = Spec(x.shape, check.result_dtype(x, dtype))
    lead = x.shape[:-1]
    more = Spec((*lead, scores), "float32") if scores else None
    return normed if write_normed else None, Spec((*lead, N - scores), "float32"), more


def _scores_of(
    x: Array, norm_weight: Array | None, w: Any, scores: int, eps: float, write_normed: bool, dtype: str | None
) -> tuple[Array | None, Array, Array | None]:
    """Those of `_scored`."""
    h = x if norm_weight is None else rms_norm.body(x, norm_weight, eps, dtype)
    logits = product(h.reshape(-1, h.shape[-1]), w, "float32").astype(np.float32)
    logits = logits.reshape(*x.shape[:-1], logits.shape[-1])
    experts = logits.shape[-1] - scores
    more = np.ascontiguousarray(logits[..., experts:]) if scores else None
    return h if write_normed else None, np.ascontiguousarray(logits[..., :experts]), more


def _norm_route(
    x: Spec,
    norm_weight: Spec | None,
    w: Any,
    per_expert_scale: Spec | None,
    top_k: int,
    scores: int,
    eps: float,
    propagate_nan: bool,
    active: Spec | None,
    write_normed: bool,
    fetch: Any,
    dtype: str | None,
    logit_bias: Spec | None,
) -> tuple[Spec | None, Spec, Spec, Spec | None]:
    normed, logits, more = _scored(x, norm_weight, w, scores, eps, write_normed, dtype)
    check.floating(logit_bias=logit_bias)
    check.shape(logits.shape[-1:], "experts", logit_bias=logit_bias)
    return normed, *_route(logits, per_expert_scale, top_k, propagate_nan, active), more


@op(infer=_norm_route)
def moe_norm_route(
    x: Array,
    norm_weight: Array | None,
    w: QuantizedTensor | Array,
    per_expert_scale: Array | None,
    top_k: int,
    scores: int = 0,
    eps: float = 1e-6,
    propagate_nan: bool = False,
    active: Array | None = None,
    write_normed: bool = False,
    fetch: QuantizedTensor | Array | None = None,
    dtype: str | None = None,
    logit_bias: Array | None = None,
) -> tuple[Array | None, Array, Array, Array | None]:
    """`moe_route` with what is before it: the norm of the rows, h = rms_norm(x, norm_weight, eps) or x itself, and
    the product, logits = h · w in float32, plus logit_bias [E].

    x [(T,) K], norm_weight [K] or None, w [E + scores, K] quantized or dense: the last `scores` rows are no experts',
    their products are returned. → h with write_normed, in dtype (None: x's) as the product reads it, ids int32,
    weights float32 [(T,) k], float32 [(T,) scores] if there are some. fetch: a weight that is read soon after; a device
    may bring it to a cache meanwhile.
    """
    normed, logits, more = _scores_of(x, norm_weight, w, scores, eps, write_normed, dtype)
    if logit_bias is not None:
        logits = (logits.astype(np.float64) + logit_bias).astype(np.float32)
    return normed, *moe_route.body(logits, per_expert_scale, top_k, propagate_nan, active), more


def _norm_group_route(
    x: Spec,
    norm_weight: Spec | None,
    w: Any,
    bias: Spec | None,
    n_group: int,
    topk_group: int,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    scores: int,
    eps: float,
    propagate_nan: bool,
    active: Spec | None,
    write_normed: bool,
    fetch: Any,
    dtype: str | None,
    norm_eps: float,
) -> tuple[Spec | None, Spec, Spec, Spec | None]:
    normed, logits, more = _scored(x, norm_weight, w, scores, eps, write_normed, dtype)
    how = (n_group, topk_group, top_k, norm_topk_prob, routed_scaling_factor, propagate_nan)
    return normed, *_group_route(logits, bias, *how, active, norm_eps), more


@op(infer=_norm_group_route)
def moe_norm_group_route(
    x: Array,
    norm_weight: Array | None,
    w: QuantizedTensor | Array,
    bias: Array | None,
    n_group: int,
    topk_group: int,
    top_k: int,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    scores: int = 0,
    eps: float = 1e-6,
    propagate_nan: bool = False,
    active: Array | None = None,
    write_normed: bool = False,
    fetch: QuantizedTensor | Array | None = None,
    dtype: str | None = None,
    norm_eps: float = 1e-20,
) -> tuple[Array | None, Array, Array, Array | None]:
    """`moe_group_route` with the norm and the product before it, as in `moe_norm_route`."""
    normed, logits, more = _scores_of(x, norm_weight, w, scores, eps, write_normed, dtype)
    how = (n_group, topk_group, top_k, norm_topk_prob, routed_scaling_factor, propagate_nan)
    return normed, *moe_group_route.body(logits, bias, *how, active, norm_eps), more


def _normalized(weights: Spec) -> Spec:
    check.dtype("float32", weights=weights)
    check.axes("[T, k] or [k]", 1, 2, weights=weights)
    check.filled(weights=weights)
    return weights


@op(infer=_normalized, alias=True)
def moe_normalize_weights(weights: Array) -> Array:
    """weights / Σ weights per row; a row whose sum is not above 0 (or NaN) stays as it is. float32 [(T,) k]."""
    w = weights.astype(np.float64)
    total = w.sum(axis=-1, keepdims=True)
    return (w * np.where(total > 0, 1 / total, 1)).astype(np.float32)


# -- experts ---------------------------------------------------------------------------------------------------------


def _choice(x: Spec, ids: Spec, slot_of: Spec | None, act: str, activations: str) -> None:
    check.floating(x=x)
    check.dtype("int32", ids=ids, slot_of=slot_of)
    check.axes("[E]", 1, slot_of=slot_of)
    check.axes("[T, k] or [k]", 1, 2, ids=ids)
    check.filled(ids=ids)
    check.one_of(tuple(ACTIVATIONS), act=act)
    check.one_of(ROUNDINGS, activations=activations)


def _gate_up_width(gate_w: Any, up_w: Any, K: int, lead: int = 1, which: str = "") -> int:
    """Rows of the hidden state; `which` stands before the arguments' names."""
    N = weight_matrix(f"{which}gate_w", gate_w, K, lead)
    if up_w is not None:
        weight_matrix(f"{which}up_w", up_w, K, lead)
        check.shape(tuple(gate_w.shape), f"as {which}gate_w", **{f"{which}up_w": up_w})
        return N
    if N % 2:
        shape = tuple(gate_w.shape)
        raise ShapeError(f"{which}gate_w has shape {shape}, expected an even number of rows (gate, then up)")
    return N // 2


def _expert_gate_up(
    x: Spec, gate_w: Any, up_w: Any, ids: Spec, slot_of: Spec | None, act: str, activations: str
) -> Spec:
    _choice(x, ids, slot_of, act, activations)
    check.axes("[T, K] or [K]", ids.ndim, x=x)
    check.filled(x=x)
    N = _gate_up_width(gate_w, up_w, x.shape[-1])
    check.shape((*ids.shape[:-1], x.shape[-1]), "one row per row of ids", x=x)
    return Spec((*ids.shape, N), x.dtype)


def _gated(rows: Array, gate_w: Any, up_w: Any, act: str, activations: str) -> Array:
    """act(gate_w · x) · (up_w · x) of one expert in float64; up_w None: gate_w has gate rows, then up rows."""
    gate = product(rows, gate_w, activations)
    if up_w is None:
        gate, up = np.split(gate, 2, axis=-1)
    else:
        up = product(rows, up_w, activations)
    return ACTIVATIONS[act](gate) * up


def _check_ids(ids: Array, gate_w: Any, slot_of: Array | None) -> None:
    check_slots(ids, gate_w.shape[0], slot_of)


@op(infer=_expert_gate_up, check=_check_ids)
def expert_gate_up(
    x: Array,
    gate_w: QuantizedTensor | Array,
    up_w: QuantizedTensor | Array | None,
    ids: Array,
    slot_of: Array | None = None,
    act: str = "silu",
    activations: str = "float32",
) -> Array:
    """h[t, i] = act(gate_w[e] · x[t]) · (up_w[e] · x[t]) for the chosen experts e = ids[t, i].

    x [(T,) K], gate_w and up_w [S, N, K] (up_w None: gate_w is [S, 2N, K], gate rows first), ids int32 [(T,) k],
    slot_of int32 [E]: place of an expert in the stack, −1 = not here yet, −2 = another rank's → [(T,) k, N]. act "silu"
    or "gelu_tanh". One that is not here yet is refused; on a GPU, where ids stay unread by the host, its rows are 0 and
    nothing is read for it. Id −1 is no expert, as a router gives it to rows of no sequence: nothing is read, its rows
    are 0. Another rank's expert is the same as no expert, here and below; a stack may be empty.
    """
    K = x.shape[-1]
    N = gate_w.shape[1] if up_w is not None else gate_w.shape[1] // 2
    k = ids.shape[-1]
    rows = x.reshape(-1, K)
    h = np.zeros((len(rows) * k, N))
    for slot, where in by_slot(slots_of(ids, slot_of)):
        up = None if up_w is None else expert_at(up_w, slot)
        h[where] = _gated(rows[where // k], expert_at(gate_w, slot), up, act, activations)
    return round_to(h.reshape(*ids.shape, N), x.dtype)


def _expert_down(h: Spec, down_w: Any, ids: Spec, weights: Spec, slot_of: Spec | None, activations: str) -> Spec:
    check.floating(h=h)
    _choice(h, ids, slot_of, "silu", activations)
    check.dtype("float32", weights=weights)
    check.shape(ids.shape, "as ids", weights=weights)
    check.axes("[T, k, I] or [k, I]", ids.ndim + 1, h=h)
    check.filled(h=h)
    check.shape((*ids.shape, h.shape[-1]), "one row per id", h=h)
    return Spec((*ids.shape[:-1], weight_matrix("down_w", down_w, h.shape[-1], lead=1)), h.dtype)


def _down_sum(h: Array, down_w: Any, ids: Array, weights: Array, slot_of: Array | None, activations: str) -> Array:
    """`expert_down_sum` in float64."""
    rows = h.reshape(-1, h.shape[-1])
    each = np.zeros((len(rows), down_w.shape[1]))
    for slot, where in by_slot(slots_of(ids, slot_of)):
        each[where] = product(rows[where], expert_at(down_w, slot), activations)
    return _sum_of_chosen(each.reshape(*ids.shape, each.shape[1]), ids, weights, slot_of)


def _sum_of_chosen(each: Array, ids: Array, weights: Array, slot_of: Array | None) -> Array:
    """`expert_sum` without the pairs of id −1 and of other ranks' experts, whatever stands there."""
    there = counted(ids, slot_of)
    return expert_sum(np.where(there[..., None], each.astype(np.float64), 0), np.where(there, weights, 0))


@op(infer=_expert_down, check=lambda ids, down_w, slot_of: _check_ids(ids, down_w, slot_of))
def expert_down_sum(
    h: Array,
    down_w: QuantizedTensor | Array,
    ids: Array,
    weights: Array,
    slot_of: Array | None = None,
    activations: str = "float32",
) -> Array:
    """y[t] = Σ_i weights[t, i] · (down_w[ids[t, i]] · h[t, i]), slots in order.

    h [(T,) k, I], down_w [S, dim, I], ids int32 and weights float32 [(T,) k], slot_of as in `expert_gate_up` → [(T,)
    dim]. Id −1 adds nothing, whatever its row of h and its weight are.
    """
    return round_to(_down_sum(h, down_w, ids, weights, slot_of, activations), h.dtype)


def _expert_mlp(
    expert_out: Spec,
    x: Spec,
    ids: Spec,
    gate_w: Any,
    up_w: Any,
    down_w: Any,
    slot_of: Spec | None,
    act: str,
    activations: str,
) -> None:
    weights = Spec(ids.shape, "float32")
    _moe_forward(x, ids, weights, gate_w, up_w, down_w, slot_of, act, activations, expert_out)


def _check_batch(ids: Array, gate_w: Any, slot_of: Array | None) -> None:
    """As `_check_ids`, for a batch of experts: others may be absent."""
    if slot_of is None:
        _check_ids(ids, gate_w, None)
    else:
        slots, why = gate_w.shape[0], "slots, -1: not here yet, -2: another rank's"
        check_slot_of(ids, slot_of)
        check.in_range("slot_of", places(ids, slot_of), FOREIGN, slots, f"{slots} {why}")


@op(infer=_expert_mlp, check=_check_batch, writes=("expert_out",))
def expert_mlp(
    expert_out: Array,
    x: Array,
    ids: Array,
    gate_w: QuantizedTensor | Array,
    up_w: QuantizedTensor | Array | None,
    down_w: QuantizedTensor | Array,
    slot_of: Array | None = None,
    act: str = "silu",
    activations: str = "float32",
) -> None:
    """expert_out[t, i] = down_w[e] · (act(gate_w[e] · x[t]) · (up_w[e] · x[t])), e = ids[t, i], where e is present.

    Rows of experts that are absent (slot_of −1 or −2), and of id −1, stay as they are: batches of experts that do not
    fit a stack at once fill expert_out [(T,) k, dim], of any float, one after the other, and `moe_forward` sums it.
    Other arguments as there; the inner product is rounded to x's dtype.
    """
    k, rows, each = ids.shape[-1], x.reshape(-1, x.shape[-1]), expert_out.reshape(-1, expert_out.shape[-1])
    for slot, where in by_slot(places(ids, slot_of)):
        up = None if up_w is None else expert_at(up_w, slot)
        h = round_to(_gated(rows[where // k], expert_at(gate_w, slot), up, act, activations), x.dtype)
        each[where] = round_to(product(h, expert_at(down_w, slot), activations), expert_out.dtype)


def _moe_forward(
    x: Spec,
    ids: Spec,
    weights: Spec,
    gate_w: Any,
    up_w: Any,
    down_w: Any,
    slot_of: Spec | None,
    act: str,
    activations: str,
    expert_out: Spec | None,
) -> Spec:
    h = _expert_gate_up(x, gate_w, up_w, ids, slot_of, act, activations)
    y = _expert_down(h, down_w, ids, weights, slot_of, activations)
    if down_w.shape[0] != gate_w.shape[0]:
        raise ShapeError(f"down_w has {down_w.shape[0]} experts, expected {gate_w.shape[0]} as gate_w")
    check.floating(expert_out=expert_out)
    check.shape((*ids.shape, y.shape[-1]), "T, k, dim", expert_out=expert_out)
    return y


def _check_call(ids: Array, gate_w: Any, slot_of: Array | None, expert_out: Array | None) -> None:
    """As `_check_ids`; with expert_out no expert is read, so that all may be absent."""
    if expert_out is None:
        _check_ids(ids, gate_w, slot_of)
    elif slot_of is not None:
        check_slot_of(ids, slot_of)


def _routed(
    x: Array, ids: Array, weights: Array, gate_w: Any, up_w: Any, down_w: Any, slot_of: Array | None, act: str,
    activations: str, expert_out: Array | None,
) -> Array:  # fmt: skip
    """`moe_forward` in float64."""
    if expert_out is not None:
        return _sum_of_chosen(expert_out, ids, weights, slot_of)
    h = expert_gate_up.body(x, gate_w, up_w, ids, slot_of, act, activations)
    return _down_sum(h, down_w, ids, weights, slot_of, activations)


@op(infer=_moe_forward, check=_check_call)
def moe_forward(
    x: Array,
    ids: Array,
    weights: Array,
    gate_w: QuantizedTensor | Array,
    up_w: QuantizedTensor | Array | None,
    down_w: QuantizedTensor | Array,
    slot_of: Array | None = None,
    act: str = "silu",
    activations: str = "float32",
    expert_out: Array | None = None,
) -> Array:
    """`expert_down_sum(expert_gate_up(x, …), …)`: the routed half of an MoE block, x [(T,) K] → [(T,) dim].

    Kernels group the (token, slot) pairs by expert, so that each expert's weights are read once per call. With
    expert_out [(T,) k, dim], which `expert_mlp` filled, they only sum that. Id −1 adds nothing, whatever its weight and
    its row of expert_out are.
    """
    return round_to(_routed(x, ids, weights, gate_w, up_w, down_w, slot_of, act, activations, expert_out), x.dtype)


def _moe_biased_forward(
    x: Spec,
    ids: Spec,
    weights: Spec,
    gate_w: Any,
    up_w: Any,
    down_w: Any,
    gate_bias: Spec,
    up_bias: Spec,
    down_bias: Spec,
    slot_of: Spec | None,
    limit: float,
    alpha: float,
    activations: str,
    residual: Spec | None,
) -> Spec:
    if up_w is None:
        raise InvalidArgument("up_w is None, expected gate and up rows apart")
    y = _moe_forward(x, ids, weights, gate_w, up_w, down_w, slot_of, "silu", activations, None)
    check.dtype("float32", gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias)
    E = gate_w.shape[0] if slot_of is None else slot_of.shape[0]
    check.shape((E, gate_w.shape[1]), "experts, rows of gate_w", gate_bias=gate_bias, up_bias=up_bias)
    check.shape((E, y.shape[-1]), "experts, rows of down_w", down_bias=down_bias)
    if not limit > 0:
        raise InvalidArgument(f"limit is {limit}, expected a number above 0")
    if not 1e-4 <= alpha <= 1e4:
        raise InvalidArgument(f"alpha is {alpha}, expected a number from 1e-4 to 1e4")
    check.floating(residual=residual)
    check.shape(y.shape, "that of the sum", residual=residual)
    return y if residual is None else residual


@op(infer=_moe_biased_forward, check=_check_ids, alias=True)
def moe_biased_forward(
    x: Array,
    ids: Array,
    weights: Array,
    gate_w: QuantizedTensor | Array,
    up_w: QuantizedTensor | Array,
    down_w: QuantizedTensor | Array,
    gate_bias: Array,
    up_bias: Array,
    down_bias: Array,
    slot_of: Array | None = None,
    limit: float = 7.0,
    alpha: float = 1.702,
    activations: str = "float32",
    residual: Array | None = None,
) -> Array:
    """y[t] = Σ_i weights[t, i] · (down_w[e] · h[t, i] + down_bias[e]), e = ids[t, i], the experts of gpt-oss.

    h = g · σ(alpha · g) · (u + 1), rounded to x's dtype, g = min(gate_w[e] · x[t] + gate_bias[e], limit), u = up_w[e] ·
    x[t] + up_bias[e] between −limit and limit. Biases float32 [E, ·] by expert, whatever its place in the stack; other
    arguments as in `moe_forward`. With a residual [(T,) dim] residual + y, rounded once to its dtype.
    """
    k, rows = ids.shape[-1], x.reshape(-1, x.shape[-1])
    each = np.zeros((ids.size, down_w.shape[1]))
    chosen = ids.reshape(-1)
    for slot, where in by_slot(slots_of(ids, slot_of)):
        gate, up = (product(rows[where // k], expert_at(w, slot), activations) for w in (gate_w, up_w))
        e = chosen[where]
        g, u = np.minimum(gate + gate_bias[e], limit), np.clip(up + up_bias[e], -limit, limit)
        h = round_to(g / (1 + np.exp(-alpha * g)) * (u + 1), x.dtype)
        each[where] = product(h, expert_at(down_w, slot), activations) + down_bias[e]
    total = _sum_of_chosen(each.reshape(*ids.shape, -1), ids, weights, slot_of)
    if residual is None:
        return round_to(total, x.dtype)
    return round_to(residual.astype(np.float64) + total, residual.dtype)


def _score(score: Spec | None, lead: tuple[int, ...], name: str) -> None:
    """One number per token."""
    check.floating(**{name: score})
    if score is not None and score.shape not in (lead, (*lead, 1)):
        raise ShapeError(f"{name} has shape {score.shape}, expected {lead} or {(*lead, 1)} (one per token)")


def _moe_shared_forward(
    residual: Spec | None,
    x: Spec,
    ids: Spec,
    weights: Spec,
    gate_w: Any,
    up_w: Any,
    down_w: Any,
    shared_gate_w: Any,
    shared_up_w: Any,
    shared_down_w: Any,
    shared_score: Spec | None,
    slot_of: Spec | None,
    act: str,
    activations: str,
    norm_weight: Spec | None,
    eps: float,
    expert_out: Spec | None,
) -> Spec:
    y = _moe_forward(x, ids, weights, gate_w, up_w, down_w, slot_of, act, activations, expert_out)
    check.floating(residual=residual)
    check.shape(y.shape, "one row per row of ids", residual=residual)
    width = _gate_up_width(shared_gate_w, shared_up_w, x.shape[-1], 0, "shared_")
    weight_matrix("shared_down_w", shared_down_w, width)
    check.shape((y.shape[-1], width), "dim, width of shared_gate_w", shared_down_w=shared_down_w)
    _score(shared_score, ids.shape[:-1], "shared_score")
    check.floating(norm_weight=norm_weight)
    check.shape(x.shape[-1:], "last axis of x", norm_weight=norm_weight)
    check.eps(eps)
    return y if residual is None else residual


@op(infer=_moe_shared_forward, check=_check_call, alias=True)
def moe_shared_forward(
    residual: Array | None,
    x: Array,
    ids: Array,
    weights: Array,
    gate_w: QuantizedTensor | Array,
    up_w: QuantizedTensor | Array | None,
    down_w: QuantizedTensor | Array,
    shared_gate_w: QuantizedTensor | Array,
    shared_up_w: QuantizedTensor | Array | None,
    shared_down_w: QuantizedTensor | Array,
    shared_score: Array | None = None,
    slot_of: Array | None = None,
    act: str = "silu",
    activations: str = "float32",
    norm_weight: Array | None = None,
    eps: float = 1e-6,
    expert_out: Array | None = None,
) -> Array:
    """A whole MoE block: residual + Σ_i weights[t, i] · expert_ids[t, i](x) + σ(shared_score[t]) · shared(x).

    expert and shared are down(act(gate · x) · (up · x)), the inner product rounded to x's dtype; arguments as in
    `moe_forward`, the shared ones [I, K], [I, K] (None: shared_gate_w is [2I, K], gate rows first) and [dim, I];
    shared_score [T] or [T, 1] of any float, None: factor 1. With norm_weight [K] the block reads rms_norm(x,
    norm_weight, eps). x [(T,) K] → [(T,) dim] in residual's dtype, rounded once; residual None: nothing is added, and
    the result has x's dtype. A row of ids −1 is its residual and the shared expert.
    """
    x = x if norm_weight is None else rms_norm.body(x, norm_weight, eps)
    routed = _routed(x, ids, weights, gate_w, up_w, down_w, slot_of, act, activations, expert_out)
    y = routed if residual is None else residual.astype(np.float64) + routed
    rows = x.reshape(-1, x.shape[-1])
    own = round_to(_gated(rows, shared_gate_w, shared_up_w, act, activations), x.dtype)
    shared = product(own, shared_down_w, activations).reshape(y.shape)
    if shared_score is not None:
        shared = shared * sigmoid(shared_score.astype(np.float64).reshape(*y.shape[:-1], 1))
    return round_to(y + shared, x.dtype if residual is None else residual.dtype)


def _moe_route_forward(
    residual: Spec | None,
    x: Spec,
    norm_weight: Spec | None,
    w: Any,
    per_expert_scale: Spec | None,
    top_k: int,
    gate_w: Any,
    up_w: Any,
    down_w: Any,
    shared_gate_w: Any,
    shared_up_w: Any,
    shared_down_w: Any,
    scored: bool,
    eps: float,
    propagate_nan: bool,
    active: Spec | None,
    act: str,
    fetch: Any,
    dtype: str | None,
) -> tuple[Spec, Spec, Spec]:
    normed = norm_weight is not None
    routing = (per_expert_scale, top_k, int(scored), eps, propagate_nan, active, normed, fetch, dtype, None)
    rows, ids, weights, score = _norm_route(x, norm_weight, w, *routing)
    rows = x if rows is None else rows
    experts = (gate_w, up_w, down_w, shared_gate_w, shared_up_w, shared_down_w)
    y = _moe_shared_forward(residual, rows, ids, weights, *experts, score, None, act, "float32", None, eps, None)
    E = w.shape[0] - scored
    if gate_w.shape[0] != E:
        raise ShapeError(f"gate_w has {gate_w.shape[0]} experts, expected {E} (rows of w that are experts')")
    return y, ids, weights


@op(infer=_moe_route_forward)
def moe_route_forward(
    residual: Array | None,
    x: Array,
    norm_weight: Array | None,
    w: QuantizedTensor | Array,
    per_expert_scale: Array | None,
    top_k: int,
    gate_w: QuantizedTensor | Array,
    up_w: QuantizedTensor | Array | None,
    down_w: QuantizedTensor | Array,
    shared_gate_w: QuantizedTensor | Array,
    shared_up_w: QuantizedTensor | Array | None,
    shared_down_w: QuantizedTensor | Array,
    scored: bool = False,
    eps: float = 1e-6,
    propagate_nan: bool = False,
    active: Array | None = None,
    act: str = "silu",
    fetch: QuantizedTensor | Array | None = None,
    dtype: str | None = None,
) -> tuple[Array, Array, Array]:
    """`moe_shared_forward` of the rows and experts that `moe_norm_route` gives: a whole MoE block with its router.

    h, ids, weights, score = moe_norm_route(x, norm_weight, w, …); y = moe_shared_forward(residual, h, ids, weights, …).
    norm_weight None: h is x. w [E, K], where scored [E + 1, K]: its last row makes the score of the shared expert,
    whose factor else is 1. All E experts are in the stacks. → y [(T,) dim] as of `moe_shared_forward`, ids int32 and
    weights float32 [(T,) k].
    """
    normed = norm_weight is not None
    routing = (per_expert_scale, top_k, int(scored), eps, propagate_nan, active, normed, fetch, dtype)
    h, ids, weights, score = moe_norm_route.body(x, norm_weight, w, *routing)
    h = x if h is None else h
    experts = (gate_w, up_w, down_w, shared_gate_w, shared_up_w, shared_down_w)
    return moe_shared_forward.body(residual, h, ids, weights, *experts, score, None, act), ids, weights


# -- combination -----------------------------------------------------------------------------------------------------


def _rows_of_sum(h_mid: Spec | None, expert_out: Spec | None, moe_sum: Spec | None) -> tuple[str, Spec]:
    """The argument that says how many rows there are, and what the result is like: h_mid, or else what is summed."""
    check.axes("[T, dim] or [dim]", 1, 2, h_mid=h_mid, moe_sum=moe_sum)
    given = {"h_mid": h_mid, "moe_sum": moe_sum, "expert_out": expert_out}
    name, found = next((name, spec) for name, spec in given.items() if spec is not None)
    if found is expert_out:
        check.axes("[T, k, dim] or [k, dim]", 2, 3, expert_out=expert_out)
    if found.shape[-1] == 0:
        raise ShapeError(f"{name} has shape {found.shape}, expected a last axis of at least 1")
    return name, Spec((*found.shape[:-2], found.shape[-1]), found.dtype) if found is expert_out else found


def _combined(
    h_mid: Spec | None,
    expert_out: Spec | None,
    weights: Spec | None,
    shared_out: Spec | None,
    shared_gate: Spec | float | None,
    moe_sum: Spec | None,
) -> Spec:
    check.floating(h_mid=h_mid)
    if (expert_out is None) == (moe_sum is None) or (weights is None) != (expert_out is None):
        raise InvalidArgument("expert_out with weights, or moe_sum, expected exactly one of the two")
    added = check.alike(expert_out=expert_out, shared_out=shared_out, moe_sum=moe_sum)
    name, total = _rows_of_sum(h_mid, expert_out, moe_sum)
    check.shape(total.shape, f"as {name}", shared_out=shared_out, moe_sum=moe_sum)
    lead = total.shape[:-1]
    if expert_out is not None and weights is not None:
        check.dtype("float32", weights=weights)
        check.axes("[T, k, dim] or [k, dim]", total.ndim + 1, expert_out=expert_out)
        k = expert_out.shape[-2]
        check.shape((*lead, k, total.shape[-1]), "T, k, dim", expert_out=expert_out)
        check.shape((*lead, k), "T, k", weights=weights)
    if shared_gate is not None and shared_out is None:
        raise InvalidArgument("shared_gate is given without shared_out, expected both")
    if isinstance(shared_gate, Spec):
        if shared_gate.dtype not in ("float32", total.dtype, added):
            check.dtype("float32", shared_gate=shared_gate)
        _score(shared_gate, lead, "shared_gate")
    return total


@op(infer=_combined, alias=True)
def moe_combine_residual(
    h_mid: Array | None,
    expert_out: Array | None,
    weights: Array | None,
    shared_out: Array | None,
    shared_gate: Array | float | None = None,
    moe_sum: Array | None = None,
) -> Array:
    """(h_mid + moe) + σ(shared_gate) · shared_out, moe = Σ_i weights[i] · expert_out[i] or the given moe_sum.

    h_mid, shared_out, moe_sum [(T,) dim]; expert_out [(T,) k, dim] with weights float32 [(T,) k], k = 0 allowed;
    shared_gate one score before the sigmoid per token, None adds shared_out as it is; shared_out None: no shared
    expert. What is added is of one float, h_mid of any; the result has h_mid's dtype. h_mid None: nothing but the
    experts, in their dtype.
    """
    if moe_sum is not None:  # one expert of weight 1
        expert_out, weights = moe_sum[..., None, :], np.ones((*moe_sum.shape[:-1], 1))
    assert expert_out is not None and weights is not None
    y = expert_sum(expert_out, weights)
    if h_mid is not None:
        y = h_mid.astype(np.float64) + y
    if shared_out is not None:
        gate = 1.0 if shared_gate is None else sigmoid(np.resize(shared_gate, (*y.shape[:-1], 1)).astype(np.float64))
        y = y + gate * shared_out.astype(np.float64)
    return round_to(y, expert_out.dtype if h_mid is None else h_mid.dtype)


def _bucket(out_sum: Spec, bucket_out: Spec, token_idx: Spec, weights: Spec) -> None:
    check.alike(out_sum=out_sum, bucket_out=bucket_out)
    check.dtype("int32", token_idx=token_idx)
    check.dtype("float32", weights=weights)
    check.axes("[T, dim]", 2, out_sum=out_sum)
    check.filled(out_sum=out_sum)
    check.axes("[B]", 1, token_idx=token_idx)
    check.shape((token_idx.shape[0], out_sum.shape[1]), "one row per token_idx", bucket_out=bucket_out)
    check.shape(token_idx.shape, "as token_idx", weights=weights)


@op(
    infer=_bucket,
    check=lambda out_sum, token_idx: check.in_range("token_idx", token_idx, 0, len(out_sum)),
    writes=("out_sum",),
)
def moe_bucket_accumulate(out_sum: Array, bucket_out: Array, token_idx: Array, weights: Array) -> None:
    """out_sum[token_idx[b]] += bucket_out[b] · weights[b]: one expert's rows added into the sums of their tokens.

    out_sum [T, dim] is changed; bucket_out [B, dim], token_idx int32 [B], weights float32 [B]. A token named twice
    gets both.
    """
    total = out_sum.astype(np.float64)
    np.add.at(total, token_idx, bucket_out.astype(np.float64) * weights[:, None].astype(np.float64))
    out_sum[...] = round_to(total, out_sum.dtype)
