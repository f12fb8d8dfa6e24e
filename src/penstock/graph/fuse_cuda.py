"""Rules for the GPU, where every launch costs: whole blocks of a layer, and norms and sums inside products.

But for the gated delta net the CPU's kernels of these ops call those of the plain ones, and its programs have those.
"""

from __future__ import annotations

import math
from typing import Any

from penstock import ops
from penstock.graph.rewrite import Candidates, Match, Rule, operands, rule, same
from penstock.graph.trace import Graph, Node, Value

CUDA = ("cuda",)

# -- whole blocks ----------------------------------------------------------------------------------------------------

_ACT = {ops.fused_gate_up_swiglu: "silu", ops.fused_gate_up_geglu: "gelu_tanh"}


@rule(ops.moe_combine_residual, devices=CUDA)
def moe_shared_forward(match: Match, node: Node) -> Candidates:
    """moe_combine_residual(h, moe_forward(x, …), fused_gate_up_swiglu(x, …) @ down) → moe_shared_forward(h, x, …)"""
    routed = match.made_by(node["moe_sum"], ops.moe_forward)
    down = match.made_by(node["shared_out"], ops.quantized_matmul)
    shared = match.made_by(down["x"], *_ACT) if down is not None else None
    if routed is None or down is None or shared is None or not same(routed["x"], shared["x"]):
        return
    if routed["act"] == _ACT[shared.op] and routed["activations"] == shared["activations"] == down["activations"]:
        weights = {"shared_gate_w": shared["gate_w"], "shared_up_w": shared["up_w"], "shared_down_w": down["w"]}
        args = {**routed.args, **weights, "residual": node["h_mid"], "shared_score": node["shared_gate"]}
        yield match.call(ops.moe_shared_forward, **args, instead=(routed, shared, down, node), makes=(node.out,))


@rule(ops.post_ff_norm2_endlayer, devices=CUDA)
def dense_norm(match: Match, node: Node) -> Candidates:
    """post_ff_norm2_endlayer(rms_norm(x, w), …) → post_ff_norm2_endlayer(x, …, w1=w)"""
    norm = match.made_by(node["addend"], ops.rms_norm)
    if norm is not None and norm["weight"] is not None and norm["eps"] == node["eps"] and node["w1"] is None:
        args = {**node.args, "addend": norm["x"], "w1": norm["weight"]}
        yield match.call(ops.post_ff_norm2_endlayer, **args, instead=(norm, node), makes=node.outs)


@rule(ops.gated_rms_norm)
def gated_delta_step(match: Match, node: Node) -> Candidates:
    """conv1d_causal, conv1d_state_update, rms_norm_qk, gdn_decay_beta, gated_delta_net, gated_rms_norm, with slots
    → gated_delta_step; of runs that are kept, with delta_commit before → gated_delta_verify
    """
    net = match.made_by(node["values"], ops.gated_delta_net)
    unit = match.made_by(net["qkv"], ops.rms_norm_qk) if net is not None else None
    conv = match.made_by(unit["x"], ops.conv1d_causal) if unit is not None else None
    gates = match.made_by(net["g"], ops.gdn_decay_beta) if net is not None else None
    if net is None or unit is None or conv is None or gates is None or not same(conv["slots"], net["slots"]):
        return
    heads = (net["Hk"], net["Dk"], net["Hk"] * net["Dk"], None, 1e-6, "sum")
    if tuple(unit.args.values())[1:] != heads or not all(map(same, gates.outs, (net["g"], net["b"]))):
        return
    if not same(conv["starts"], net["starts"]) or conv["act"] != "silu":
        return
    of = (conv["state"], conv["x"], conv["slots"], conv["starts"], net["keep"])
    rows = conv["x"], node["z"], gates["alpha"], gates["beta"]
    states = conv["state"], net["state"]
    weights = conv["weight"], gates["A_log"], gates["dt_bias"], node["weight"]
    rest = net["Hk"], node["eps"], node["act"]
    for moved in match.readers(conv["state"]):
        if moved.op is not ops.conv1d_state_update or not all(map(same, list(moved.args.values())[:5], of)):
            continue
        whole = (conv, moved, unit, gates, net, node)
        if net["starts"] is None:
            args = (*rows, *states, net["slots"], *weights, *rest)
            yield match.call(ops.gated_delta_step, *args, instead=whole, makes=(node.out,))
        elif net["keep"] is not None and moved["width"] == conv["weight"].shape[1]:
            for commit in match.readers(net["gates"]):
                runs = (net["gates"], net["slots"])
                its = (*states, *runs, conv["weight"], net["Hk"])
                if commit.op is ops.delta_commit and all(map(same, _without(commit, "accepted"), its)):
                    args = (*rows, *states, *runs, net["starts"], net["keep"], commit["accepted"], *weights, *rest)
                    yield match.call(ops.gated_delta_verify, *args, instead=(commit, *whole), makes=(node.out,))


@rule(ops.rms_norm_qk, devices=CUDA)
def convolution_heads(match: Match, node: Node) -> Candidates:
    """rms_norm_qk(conv1d_causal(x, …, starts)) → conv1d_causal(x, …, starts, key_heads, key_dim)"""
    conv = match.made_by(node["x"], ops.conv1d_causal)
    heads, dim = node["num_k_heads"], node["key_dim"]
    if conv is None or conv["starts"] is None or conv["key_heads"]:
        return
    if tuple(node.args.values())[1:] == (heads, dim, heads * dim, None, 1e-6, "sum"):
        args = {**conv.args, "key_heads": heads, "key_dim": dim}
        yield match.call(ops.conv1d_causal, **args, instead=(conv, node), makes=(node.out,))


def _without(node: Node, name: str) -> list[Any]:
    """The arguments of a node but for one."""
    return [value for key, value in node.args.items() if key != name]


@rule(ops.kv_pages_append, devices=CUDA)
def attention_prepare(match: Match, node: Node) -> Candidates:
    """split_q_gate, head_norm_rope (or rope) of q and k, rms_norm of v, kv_pages_append → attention_prepare

    q is what the attention over the same pages reads, of runs if the rows are of several sequences. Also without a
    gate, and without the norm of v; biases that are added to q, k and v before go inside.
    """
    key, how = _turned(match, node["k_src"])
    if key is None or not same(how[1], node["positions"]):
        return
    value = match.made_by(node["v_src"], ops.rms_norm)
    raw = node["v_src"] if value is None else value["x"]
    if value is not None and value["weight"] is not None:
        return
    for reader in match.readers(node["k_pages"]):
        query, its_how = _turned(match, reader.args.get("q"))
        if query is None or not all(map(same, how, its_how)):
            continue
        if (reader.args.get("starts") is None) != (node["sequence"] is None):
            continue
        eps = {norm["eps"] for norm in (query, key, value) if norm is not None and "eps" in norm.args}
        if len(eps) > 1:
            continue
        split = match.maker(query["x"], ops.split_q_gate)
        if split is not None and not same(query["x"], split.outs[0]):
            continue
        q = query["x"] if split is None else split["q_proj"]
        rows = _flat(q), _flat(key["x"]), None if same(raw, key["x"]) else _flat(raw)
        norms = query.args.get("weight"), key.args.get("weight")
        pages = node["k_pages"], node["v_pages"], node["block_table"]
        inv_freq, at, rotary_dim, mscale = how
        found = [each for each in (split, query, key, value, node) if each is not None]
        sums = [_biased(match, row) for row in rows]
        for inside in (sums, [None] * 3) if any(sums) else ([None] * 3,):
            inputs = [row if total is None else total["a"] for row, total in zip(rows, inside, strict=True)]
            biases = [None if total is None else total["b"] for total in inside]
            yield match.call(
                ops.attention_prepare,
                *(*inputs, *norms, inv_freq, at, *pages, q.shape[1], rotary_dim, mscale),
                *(min(eps, default=1e-6), split is not None, value is not None, node["sequence"], *biases),
                instead=[*(total for total in inside if total is not None), *found],
                makes=(query.out, None if split is None else split.outs[1]),
            )


@rule(ops.mla_cache_append, devices=CUDA)
def mla_prepare(match: Match, node: Node) -> Candidates:
    """mla_split_q_kv, rms_norm of the latent, rope of q_pe and of k_pe, mla_cache_append into pages → mla_prepare"""
    latent = match.made_by(node["kv_lat"], ops.rms_norm)
    split = match.made_by(latent["x"], ops.mla_split_q_kv) if latent is not None else None
    key, how = _turned(match, node["k_pe"].base)
    if latent is None or split is None or key is None or not same(how[1], node["pos"]):
        return
    q_nope, q_pe, _, k_pe = split.outs
    if q_nope is None or q_pe is None or key["x"].base is not k_pe or key.op is not ops.rope:
        return
    for reader in match.readers(q_pe):
        query, its_how = _turned(match, reader.out, stays=True) if reader.op is ops.rope else (None, ())
        if query is None or not all(map(same, how, its_how)):
            continue
        inv_freq, at, _, mscale = how
        pages = node["latent_cache"], node["rope_k_cache"], node["block_table"]
        sizes = q_nope.shape[1], q_nope.shape[2], mscale, latent["eps"]
        yield match.call(
            ops.mla_prepare,
            *(_flat(split["q_full"]), split["kv_pre"], latent["weight"], inv_freq, at, *pages, *sizes),
            node["sequence"],
            instead=(split, latent, query, key, node),
            makes=(q_nope, query.out),
        )


@rule(ops.sigmoid_gate, devices=CUDA)
def attention_gate(match: Match, node: Node) -> Candidates:
    """sigmoid_gate(attention_paged(q, …), gate) → attention_paged(q, …, gate)"""
    attend = match.made_by(node["x"], ops.attention_paged)
    if attend is not None and attend["gate"] is None:
        args = {**attend.args, "gate": node["gate"]}
        yield match.call(ops.attention_paged, **args, instead=(attend, node), makes=(node.out,))


def _turned(match: Match, value: Any, stays: bool = False) -> tuple[Node | None, tuple[Any, ...]]:
    """The rotation of halves of heads [T, H, D] that makes a value, after a norm with a weight or none, and its
    inv_freq, position, rotary_dim and mscale. The value has one reader, or any number if it stays.
    """
    node = (match.maker if stays else match.made_by)(value, ops.head_norm_rope, ops.rope)
    if node is None or node["interleaved"] or node["x"].ndim != 3:
        return None, ()
    if node.op is ops.head_norm_rope and node["weight"] is None:
        return None, ()
    named = node.args.get("positions")
    at = node["start_pos"] if named is None else named
    return node, (node["inv_freq"], at, node["rotary_dim"], node["mscale"])


def _biased(match: Match, x: Any) -> Node | None:
    """The sum of rows and one vector that makes x, which nothing else reads."""
    total = match.made_by(x, ops.add)
    there = (
        total is not None and getattr(total["b"], "shape", None) == x.shape[-1:] and not isinstance(total["b"], Value)
    )
    return total if there else None


def _flat(x: Value) -> Value:
    """[T, H, D] as [T, H · D]."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


# -- inside products of few rows, which wait for memory and have time to spare ---------------------------------------

FEW = 8  # rows
SOME = 256  # rows up to which a block has its router, and a product a norm that no sum comes before

_PRODUCTS = (ops.quantized_matmul, ops.matmul)


def _few(x: Value, most: int = FEW) -> bool:
    return x.spec.size <= most * x.shape[-1]


@rule(ops.residual_add, devices=CUDA)
def matmul_add(match: Match, node: Node) -> Candidates:
    """r + x @ w → matmul_add(r, x, w), r + (x @ w + b) → matmul_add(r, x, w, bias=b)"""
    for residual, y in operands(node):
        total = _biased(match, y)
        product = match.made_by(y if total is None else total["a"], *_PRODUCTS)
        if product is not None and _few(product["x"]):
            args = residual, product["x"], product["w"], product.args.get("activations", "float32")
            bias, instead = (None, (product, node)) if total is None else (total["b"], (product, total, node))
            yield match.call(ops.matmul_add, *args, bias, instead=instead, makes=(node.out,))


@rule(ops.residual_add, devices=CUDA)
def experts_add(match: Match, node: Node) -> Candidates:
    """r + moe_biased_forward(x, …) → moe_biased_forward(x, …, residual=r), for few rows"""
    for residual, y in operands(node):
        experts = match.made_by(y, ops.moe_biased_forward)
        if experts is not None and experts["residual"] is None and _few(experts["x"]):
            args = {**experts.args, "residual": residual}
            yield match.call(ops.moe_biased_forward, **args, instead=(experts, node), makes=(node.out,))


@rule(ops.moe_route, ops.moe_group_route, devices=CUDA)
def moe_norm_route(match: Match, node: Node) -> Candidates:
    """moe_route(rms_norm(x) @ w, …) → moe_norm_route(x, w, …), moe_group_route → moe_norm_group_route, for one row

    The normed rows are kept if needed. Also without the norm, where a bias is added to the scores, and where w has rows
    of other scores below those of the experts. Rows that are rounded to int8 stay in front. With 8 rows of
    Qwen3.6-35B-A3B on an H200 one launch takes 9.0 µs, norm, product and choice 6.4.
    """
    if math.prod(node["logits"].shape[:-1]) == 1:
        yield _with_product(match, node)


def _with_product(match: Match, node: Node, normed: bool = True) -> Any:
    """A router with the product before it, and, if that is asked for, with the norm before that."""
    total = _biased(match, node["logits"]) if node.op is ops.moe_route else None
    logits = node["logits"] if total is None else total["a"]
    split = match.made_by(logits, ops.split_columns)
    if split is not None and (split.outs[0] is not logits or split.outs[2:] != (None, None)):
        return None
    product = match.made_by(logits if split is None else split["x"], *_PRODUCTS)
    if product is None or product.args.get("activations") == "int8":
        return None
    norm = match.maker(product["x"], ops.rms_norm) if normed else None
    if norm is not None and norm["weight"] is None:
        norm = None
    instead = [each for each in (norm, product, split, total, node) if each is not None]
    kept = None if norm is None else match.needed(norm.out, instead)
    score = None if split is None else split.outs[1]
    how = {name: arg for name, arg in node.args.items() if name != "logits"}
    return match.call(
        ops.moe_norm_route if node.op is ops.moe_route else ops.moe_norm_group_route,
        x=product["x"] if norm is None else norm["x"],
        norm_weight=None if norm is None else norm["weight"],
        w=product["w"],
        scores=0 if score is None else score.shape[-1],
        write_normed=kept is not None,
        **({} if norm is None else {"eps": norm["eps"], "dtype": norm.out.dtype}),
        **({} if total is None else {"logit_bias": total["b"]}),
        **how,
        instead=instead,
        makes=(kept, *node.outs, score),
    )


_ROUTING = ("x", "norm_weight", "w", "per_expert_scale", "top_k", "eps", "propagate_nan", "active", "fetch", "dtype")
_EXPERTS = ("residual", "gate_w", "up_w", "down_w", "shared_gate_w", "shared_up_w", "shared_down_w", "act")


@rule(ops.moe_shared_forward, devices=CUDA)
def moe_route_forward(match: Match, node: Node) -> Candidates:
    """moe_shared_forward(r, h, ids, w, …) of what moe_norm_route(x, …) would give → moe_route_forward(r, x, …), for
    up to SOME rows

    Of more than FEW rows the norm stays in front, where it comes with the sum before it (`residual_norm`). Experts that
    may be absent keep their router: what brings them has to see its choice first.
    """
    plain = match.maker(node["ids"], ops.moe_route) if _few(node["x"], SOME) else None
    offer = None if plain is None else _with_product(match, plain, _few(node["x"]))
    if offer is None or offer.node["logit_bias"] is not None or node["slot_of"] is not None:
        return
    route = offer.node
    if node["activations"] != "float32" or node["norm_weight"] is not None or node["expert_out"] is not None:
        return
    normed, ids, weights, score = route.outs
    rows = route["x"] if route["norm_weight"] is None else normed
    read = node["x"], node["weights"], node["shared_score"]
    if rows is None or not all(map(same, (rows, weights, score), read)):
        return
    args = {name: route[name] for name in _ROUTING} | {name: node[name] for name in _EXPERTS}
    yield match.call(
        ops.moe_route_forward,
        **args,
        scored=score is not None,
        instead=(*offer.instead, node),
        makes=(node.out, ids, weights),
    )


@rule(*_PRODUCTS, ops.moe_shared_forward, devices=CUDA)
def norm_matmul(match: Match, node: Node) -> Candidates:
    """rms_norm(x) @ w → norm_matmul(x, w),
    moe_shared_forward(h, rms_norm(x), …) → moe_shared_forward(h, x, …) with the norm inside

    Of more than FEW rows a norm behind a sum comes with that (`residual_norm`). A norm with two readers stays: with it
    in both, a token of Qwen3.6-35B-A3B took 1.575 ms on an H200, not 1.545. Rows that are rounded to int8 are normed
    and rounded once, in front. So are those to which a sum over ranks is added: that takes a launch of its own, which
    has the norm, too (`residual_norm`).
    """
    norm = match.made_by(node["x"], ops.rms_norm)
    if norm is None or norm["weight"] is None or node.args.get("activations") == "int8":
        return
    total = match.maker(norm["x"], ops.residual_add)
    if total is not None and match.maker(total["b"], ops.all_reduce) is not None:
        return
    if not _few(norm["x"]) and (total is not None or not _few(norm["x"], SOME) or node.op is not ops.quantized_matmul):
        return
    if node.op in _PRODUCTS:
        rest = norm["eps"], node.args.get("activations", "float32"), node["dtype"], norm.out.dtype
        args = norm["x"], norm["weight"], node["w"], *rest
        yield match.call(ops.norm_matmul, *args, instead=(norm, node), makes=node.outs)
    elif node["norm_weight"] is None and norm.out.dtype == norm["x"].dtype:
        args = {**node.args, "x": norm["x"], "norm_weight": norm["weight"], "eps": norm["eps"]}
        yield match.call(ops.moe_shared_forward, **args, instead=(norm, node), makes=node.outs)


def fetch_ahead(graph: Graph) -> None:
    """Tell each router with a product which dense weight is read next: its launch leaves most of the GPU idle."""
    w = None
    for node in reversed(graph.nodes):
        if node.op in (ops.moe_norm_route, ops.moe_norm_group_route, ops.moe_route_forward):
            node.args["fetch"] = w
        elif node.op in (*_PRODUCTS, ops.norm_matmul):
            w = node["w"]


# Arguments of which the kernels read a row wherever it lies.
ROWS_APART = {
    ops.gated_delta_step: ("qkv", "z", "alpha", "beta"),
    ops.gated_delta_verify: ("qkv", "z", "alpha", "beta"),
    ops.attention_prepare: ("q", "k", "v"),
}


def columns_in_place(graph: Graph) -> None:
    """Leave out split_columns where all readers can take the columns where they are. (Those of one row are a part.)"""
    reads: dict[Value, list[tuple[Node, str]]] = {}
    for node in graph.nodes:
        for name, arg in node.args.items():
            if isinstance(arg, Value):
                reads.setdefault(arg.base, []).append((node, name))
    returned = {output.base for output in graph.outputs}
    for split in [node for node in graph.nodes if node.op is ops.split_columns]:
        x, outs = split["x"], [out for out in split.outs if out is not None]
        if x.is_part or not returned.isdisjoint(outs):
            continue
        if not all(_of_rows(node, name, out) for out in outs for node, name in reads.get(out, ())):
            continue
        offset = 0
        for out in outs:
            for node, name in reads.get(out, ()):
                where = {"node": x.node, "name": x.name, "base": x, "offset": offset, "row_stride": x.shape[1]}
                node.args[name] = Value(graph, node[name].spec, **where)
            offset += out.shape[1]
        graph.nodes.remove(split)


def _of_rows(node: Node, name: str, whole: Value) -> bool:
    """Whether a node reads all of a value in an argument whose rows may lie apart."""
    arg = node[name]
    return name in ROWS_APART.get(node.op, ()) and arg.spec.size == whole.spec.size and len(arg) == len(whole)


BLOCKS: tuple[Rule, ...] = (
    moe_shared_forward,
    dense_norm,
    gated_delta_step,
    convolution_heads,  # after that one, which takes all of a step
    attention_prepare,
    mla_prepare,
    attention_gate,
)
INTO_PRODUCTS: tuple[Rule, ...] = (matmul_add, experts_add, moe_route_forward, moe_norm_route, norm_matmul)
