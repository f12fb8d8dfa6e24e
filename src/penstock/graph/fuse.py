"""The rules by which a graph of plain ops becomes one of fused ops.

A rule's docstring is its pattern → its replacement, in the ops' own words; `…` stands for arguments that go over as
they are. Whether a pattern is replaced where it was found is judged in `rewrite`, the same way for all rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from penstock import ops
from penstock.graph import fuse_cuda
from penstock.graph.rewrite import Candidates, Match, Rule, operands, rewritten, rule, same
from penstock.graph.trace import Graph, Node, Value
from penstock.ops.array import as_one
from penstock.ops.device import device_type
from penstock.quant import QuantizedTensor


def fuse(graph: Graph, device: str, batch_invariant: bool = False) -> Graph:
    """A graph of fused ops that computes the same for a device ("cpu" or "cuda"); the given one stays as it is.

    batch_invariant: without the rules that change a row's arithmetic with the number of rows.
    """
    fused = rewritten(graph, device, BATCH_INVARIANT if batch_invariant else RULES)
    fuse_cuda.fetch_ahead(fused)
    if device == "cuda":
        fuse_cuda.columns_in_place(fused)
    return fused


# -- norms, sums and products ----------------------------------------------------------------------------------------


def _factors(node: Node) -> Iterator[tuple[Any, Any]]:
    """A value and what a `mul` multiplies all its rows by: a number, one element, or a vector."""
    if not isinstance(node["b"], Value) or node["b"].shape != node["a"].shape:
        yield node["a"], node["b"]


@rule(ops.residual_add, ops.add)
def norm_add(match: Match, node: Node) -> Candidates:
    """r + rms_norm(x) → norm_add(r, x)"""
    for residual, y in operands(node):
        norm = match.made_by(y, ops.rms_norm)
        if norm is not None:
            args = residual, norm["x"], norm["weight"], norm["eps"]
            yield match.call(ops.norm_add, *args, instead=(norm, node), makes=(node.out,))


@rule(ops.rms_norm)
def rms_norm_triple(match: Match, node: Node) -> Candidates:
    """rms_norm(x, wa), rms_norm(x, wb), rms_norm(x, wc) → rms_norm_triple(x, wa, wb, wc)"""
    x, how = node["x"], (node["eps"], node.out.dtype)
    alike = [
        other
        for other in match.readers(x)
        if other.op is ops.rms_norm and same(other["x"], x) and (other["eps"], other.out.dtype) == how
    ]
    alike = [other for other in alike if other["weight"] is not None]
    if node in alike and len(alike) >= 3:
        three = alike[:3]
        weights = [norm["weight"] for norm in three]
        yield match.call(ops.rms_norm_triple, x, *weights, *how, instead=three, makes=[norm.out for norm in three])


@rule(ops.rms_norm_triple)
def post_attn_triple_norm(match: Match, node: Node) -> Candidates:
    """r = norm_add(h, a), rms_norm_triple(r, …) → post_attn_triple_norm(h, a, …), r kept"""
    total = match.maker(node["x"], ops.norm_add)
    if total is not None and total["eps"] == node["eps"]:
        weights = total["weight"], node["wa"], node["wb"], node["wc"]
        yield match.call(
            ops.post_attn_triple_norm,
            *(total["residual"], total["x"], *weights, node["eps"]),
            instead=(total, node),
            makes=(total.out, *node.outs),
        )


@rule(ops.mul)
def end_of_layer_scaled(match: Match, node: Node) -> Candidates:
    """m = norm_add(a, x), norm_add(r, m) · s → post_ff_norm2_endlayer(a, x, r, s), m kept if needed"""
    for y, factor in _factors(node):
        outer = match.made_by(y, ops.norm_add)
        if outer is not None:
            yield _end_of_layer(match, outer, factor, (outer, node), node.out)


@rule(ops.norm_add)
def end_of_layer(match: Match, node: Node) -> Candidates:
    """m = norm_add(a, x), norm_add(r, m) → post_ff_norm2_endlayer(a, x, r, 1), m kept if needed"""
    yield _end_of_layer(match, node, 1.0, (node,), node.out)


def _end_of_layer(match: Match, outer: Node, factor: Any, last: tuple[Node, ...], made: Value) -> Any:
    inner = match.maker(outer["x"], ops.norm_add)
    if inner is None or inner["eps"] != outer["eps"]:
        return None
    instead = (inner, *last)
    mid = match.needed(inner.out, instead)
    rows = inner["residual"], inner["x"], outer["residual"]
    return match.call(
        ops.post_ff_norm2_endlayer,
        *(*rows, inner["weight"], outer["weight"], factor, outer["eps"], mid is not None),
        instead=instead,
        makes=(mid, made),
    )


@rule(ops.mul)
def norm_add_scalar(match: Match, node: Node) -> Candidates:
    """norm_add(r, x) · s → norm_add_scalar(r, x, s), s a number, one element or a vector"""
    for y, factor in _factors(node):
        total = match.made_by(y, ops.norm_add)
        if total is not None:
            args = total["residual"], total["x"], total["weight"], factor, total["eps"]
            yield match.call(ops.norm_add_scalar, *args, instead=(total, node), makes=(node.out,))


@rule(ops.rms_norm)
def residual_norm(match: Match, node: Node) -> Candidates:
    """v = a + b, rms_norm(v) → residual_norm(a, b), v kept if needed"""
    total = match.maker(node["x"], ops.residual_add, ops.add)
    if total is not None and isinstance(total["b"], Value):
        instead = total, node
        kept = match.needed(total.out, instead)
        args = total["a"], total["b"], node["weight"], node["eps"], kept is not None
        yield match.call(ops.residual_norm, *args, instead=instead, makes=(node.out, kept))


# -- heads, routers, feed-forward blocks -----------------------------------------------------------------------------


@rule(ops.rope)
def head_norm_rope(match: Match, node: Node) -> Candidates:
    """rope(rms_norm(x), …) → head_norm_rope(x, …)"""
    norm = match.made_by(node["x"], ops.rms_norm)
    if norm is not None:
        at = node["start_pos"] if node["positions"] is None else node["positions"]
        rest = node["rotary_dim"], node["mscale"], node["interleaved"]
        args = norm["x"], norm["weight"], node["inv_freq"], at, norm["eps"], *rest
        yield match.call(ops.head_norm_rope, *args, instead=(norm, node), makes=(node.out,))


@rule(ops.moe_normalize_weights)
def moe_route(match: Match, node: Node) -> Candidates:
    """ids, w = moe_softmax_topk(logits, k), moe_normalize_weights(w) → moe_route(logits, None, k), NaN as it was

    The order of the chosen experts changes, so ids must not be an output. No plain op looks up a scale per expert:
    models that have one call moe_route themselves.
    """
    chosen = match.maker(node["weights"], ops.moe_softmax_topk)
    ids = chosen.outs[0] if chosen is not None else None
    if chosen is not None and ids is not None and not match.kept(ids):
        args = chosen["logits"], None, chosen["k"], chosen["propagate_nan"], chosen["active"]
        yield match.call(ops.moe_route, *args, instead=(chosen, node), makes=(ids, node.out))


_GATED = {ops.swiglu: ops.fused_gate_up_swiglu, ops.geglu: ops.fused_gate_up_geglu}


@rule(*_GATED)
def fused_gate_up(match: Match, node: Node) -> Candidates:
    """swiglu(x @ gate, x @ up) → fused_gate_up_swiglu(x, gate, up), geglu → fused_gate_up_geglu"""
    gate, up = (match.made_by(value, ops.quantized_matmul) for value in (node["gate"], node["up"]))
    if gate is not None and up is not None and same(gate["x"], up["x"]) and gate["activations"] == up["activations"]:
        args = gate["x"], gate["w"], up["w"], gate["activations"]
        yield match.call(_GATED[node.op], *args, instead=(gate, up, node), makes=(node.out,))


@rule(ops.quantized_matmul)
def joined_products(match: Match, node: Node) -> Candidates:
    """x @ wa, x @ wb, … → split_columns(x @ w, …) where w is wa above wb above … in memory, for few rows of x

    How few, the device says.
    """
    x, rest = node["x"], (node["activations"], node["dtype"])
    if x.ndim != 2 or x.shape[0] > device_type(match.device).joins:
        return
    group, w = [node], None
    for other in match.readers(x):
        if other.op is node.op and same(other["x"], x) and (other["activations"], other["dtype"]) == rest:
            above = _above([*(each["w"] for each in group), other["w"]]) if len(group) < 4 else None
            if above is not None:
                group, w = [*group, other], above
    if w is not None:
        product = match.call(node.op, x, w, *rest, instead=group, makes=(None,))
        columns = [each["w"].shape[0] for each in group]
        makes = [each.out for each in group] + [None] * (4 - len(group))
        split = match.call(ops.split_columns, product.node.out, *columns, instead=group, makes=makes)
        yield replace(split, before=product.node)


def _above(weights: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
    """The weight of which these are all rows, in this order; None if they are not, or differ in format."""
    first = weights[0]
    if any(w.key[1:] != first.key[1:] or w.shape[1:] != first.shape[1:] for w in weights):
        return None
    if first.global_scale is not None:
        return None
    blocks = [as_one(arrays) for arrays in zip(*(w.arrays for w in weights), strict=True)]
    return None if any(block is None for block in blocks) else first.with_arrays(*blocks)


RULES: tuple[Rule, ...] = (
    norm_add,
    rms_norm_triple,
    post_attn_triple_norm,
    end_of_layer_scaled,
    end_of_layer,
    norm_add_scalar,
    head_norm_rope,
    moe_route,
    fused_gate_up,  # before joined products: what is between is rounded in neither of one row nor of several
    joined_products,
    *fuse_cuda.BLOCKS,
    *fuse_cuda.INTO_PRODUCTS,
    residual_norm,  # after these: a product that takes the sum leaves the norm to the next product
)

# Without those that change a row's arithmetic with the number of rows.
BATCH_INVARIANT: tuple[Rule, ...] = tuple(each for each in RULES if each not in fuse_cuda.INTO_PRODUCTS)
