"""The rules of fusion on graphs of a few nodes: where each fires, that it changes no result, where it must not."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from penstock import ops
from penstock.graph import Graph, Node, Value, fuse, trace
from penstock.graph.fuse import RULES
from penstock.graph.fuse_cuda import INTO_PRODUCTS
from penstock.graph.rewrite import Match, rewritten
from penstock.models.layers import adjacent
from penstock.ops.array import Spec
from tests.graph.common import arrays, matrix, names, run, vector

T, DIM, EPS = 3, 32, 0.3  # an eps that shows if it is lost
ROWS = Spec((T, DIM), "float32")
ROW = Spec((1, DIM), "float32")
NINE_ROWS = Spec((9, DIM), "float32")
ONE_ROW = {"x": Spec((1, DIM), "float32")}
HEADS = Spec((T, 2, 8), "float32")
Build = Callable[..., tuple[Sequence[Value], Sequence[Value]]]  # values by name → what is returned, what lies between


@dataclass(frozen=True)
class Case:
    """A pattern: what it is made of and the ops that are left of it."""

    build: Build
    want: Sequence[str]
    specs: dict[str, Spec]
    given: dict[str, np.ndarray] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")


def norm(x: Value, seed: int, eps: float = EPS) -> Value:
    return ops.rms_norm(x, vector(x.shape[-1], seed=seed), eps)


def traced(
    build: Build, specs: dict[str, Spec], extra: Callable[[Sequence[Value]], Sequence[Value]] = lambda between: ()
) -> Graph:
    """The graph of a pattern; `extra` makes further outputs of what lies between."""

    def both(**values: Value) -> tuple[Value, ...]:
        outputs, between = build(**values)
        return (*outputs, *extra(between))

    return trace(both, specs)


def check(graph: Graph, fused: Graph, specs: dict[str, Spec], given: dict[str, np.ndarray]) -> None:
    """Both give the same outputs and leave the same in their inputs, within roundings of float32."""
    before, after = (arrays(specs, **{k: v.copy() for k, v in given.items()}) for _ in range(2))
    want, got = run(graph, before), run(fused, after)
    for a, b in zip((*got, *after.values()), (*want, *before.values()), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * max(1.0, float(np.abs(b).max())))


# -- patterns --------------------------------------------------------------------------------------------------------


def norm_add(h: Value, x: Value) -> Any:
    y = norm(x, 1)
    return [ops.residual_add(h, y)], [y]


def norm_add_turned(h: Value, x: Value) -> Any:
    y = norm(x, 1)
    return [ops.add(y, h)], [y]


def norm_add_scalar(h: Value, x: Value) -> Any:
    y = norm(x, 1)
    total = ops.residual_add(h, y)
    return [ops.mul(total, vector(1, seed=2))], [y, total]


def norm_add_number(h: Value, x: Value) -> Any:
    y = norm(x, 1)
    total = ops.residual_add(h, y)
    return [ops.mul(total, 1.75)], [y, total]


def residual_norm(h: Value, x: Value) -> Any:
    total = ops.residual_add(h, x)
    return [norm(total, 1)], []


def residual_norm_kept(h: Value, x: Value) -> Any:
    total = ops.add(h, x)
    return [norm(total, 1), ops.gelu_tanh(total)], []


def rms_norm_triple(x: Value) -> Any:
    return [norm(x, 1), norm(x, 2), norm(x, 3)], []


def rms_norm_four(x: Value) -> Any:
    return [norm(x, n) for n in range(4)], []


def post_attn_triple_norm(h: Value, x: Value) -> Any:
    y = norm(x, 1)
    total = ops.residual_add(h, y)
    parts = [norm(total, 2), norm(total, 3), norm(total, 4)]
    return [*parts, ops.residual_add(total, parts[0])], [y]


def end_of_layer(h: Value, x: Value, e: Value) -> Any:
    mid = ops.add(norm(x, 1), norm(e, 2))  # either norm may become part of the sum
    y = norm(mid, 3)
    total = ops.residual_add(h, y)
    return [ops.mul(total, vector(1, seed=4))], [y, total]


def end_of_layer_unscaled(h: Value, x: Value, e: Value) -> Any:
    experts = norm(e, 2)
    mid = ops.add(x, experts)
    y = norm(mid, 3)
    return [ops.residual_add(h, y), ops.gelu_tanh(mid)], [experts, y]


def head_norm_rope(q: Value, positions: Value) -> Any:
    y = norm(q, 1)
    return [ops.rope(y, vector(2), positions, 4, 1.25)], [y]


def head_norm_rope_by_name(q: Value, positions: Value) -> Any:
    y = ops.rms_norm(q, None, EPS)
    return [ops.rope(y, vector(4), interleaved=True, positions=positions)], [y]


def moe_route(logits: Value, x: Value, active: Value | None = None) -> Any:
    ids, chosen = ops.moe_softmax_topk(logits, 3, active=active)
    weights = ops.moe_normalize_weights(chosen)
    gate, down = matrix(7, 64, DIM, seed=1), matrix(7, DIM, 32, seed=2)
    return [ops.moe_forward(x, ids, weights, gate, None, down)], [ids, chosen]


def gate_up(x: Value) -> Any:
    gate, up = (ops.quantized_matmul(x, matrix(48, DIM, seed=n), "int8") for n in (1, 2))
    return [ops.swiglu(gate, up)], [gate, up]


def block(*rows: int, seed: int = 1) -> tuple[Any, ...]:
    """Weights that lie below each other in memory."""
    return adjacent(*(matrix(count, DIM, seed=seed + n) for n, count in enumerate(rows)))


def gate_up_adjacent(x: Value) -> Any:
    gate, up = (ops.quantized_matmul(x, w) for w in block(48, 48))
    return [ops.swiglu(gate, up)], []


def products(x: Value, *weights: Any, **options: Any) -> Any:
    """Products of one input, the first of them as heads."""
    q, *rest = (ops.quantized_matmul(x, w, **options) for w in weights)
    return [ops.gelu_tanh(q.reshape(len(x), 2, q.shape[1] // 2)), *rest], []


def joined_products(x: Value) -> Any:
    return products(x, *block(64, 16, 16), activations="int8")


def gate_up_geglu(x: Value) -> Any:
    gate, up = (ops.quantized_matmul(x, matrix(48, DIM, seed=n)) for n in (1, 2))
    return [ops.geglu(gate, up)], [gate, up]


def moe(
    h: Value | None, x: Value, ids: Value, w: Value, score: Any = None, act: str = "silu", own: str = "float32"
) -> Any:
    routed = ops.moe_forward(x, ids, w, matrix(5, 64, DIM, seed=1), None, matrix(5, DIM, 32, seed=2), act=act)
    gate, up = (ops.quantized_matmul(x, matrix(96, DIM, seed=n), own) for n in (3, 4))
    y = ops.swiglu(gate, up)
    shared = ops.quantized_matmul(y, matrix(DIM, 96, seed=5), own)
    return [ops.moe_combine_residual(h, None, None, shared, score, moe_sum=routed)], [routed, gate, y, shared]


HK, HV, DK, DV, TAPS = 2, 4, 6, 5, 4
CHANNELS = 2 * HK * DK + HV * DV


def delta(
    qkv: Value,
    z: Value,
    a: Value,
    b: Value,
    conv: Value,
    state: Value,
    slots: Value | None = None,
    eps: float = 1e-6,
    turned: bool = False,
    kept: Value | None = None,
    other: Value | None = None,
    starts: Value | None = None,
) -> Any:
    """A DeltaNet layer; turned: decay and strength; kept: what the convolution keeps; other: slots of the states;
    starts: of runs.
    """
    weights = vector(CHANNELS, TAPS), vector(HV, seed=1), vector(HV, seed=2), vector(DV, seed=3)
    y = ops.conv1d_causal(qkv, conv, weights[0], slots=slots, starts=starts)
    ops.conv1d_state_update(conv, qkv if kept is None else kept, slots=slots, starts=starts)
    unit = ops.rms_norm_qk(y, HK, DK, HK * DK, eps=eps)
    gates = ops.gdn_decay_beta(a, b, *weights[1:3])
    g, strength = reversed(gates) if turned else gates
    where = {"slots": slots if other is None else other, "starts": starts}
    d = ops.gated_delta_net(state, unit, g, strength, HK, HV, DK, DV, **where)
    return [ops.gated_rms_norm(d, z, weights[3], EPS)], [y, unit, g, strength, d]


def projected_delta(x: Value, keeps: bool = False, **rest: Any) -> Any:
    """A DeltaNet layer behind products with adjacent weights; keeps: the last one is returned, too."""
    qkv, z, a, b = (ops.quantized_matmul(x, w) for w in block(CHANNELS, HV * DV, HV, HV))
    made, between = delta(qkv, z.reshape(len(x), HV, DV), a, b, **rest)
    return [*made, *([b] if keeps else [])], between


def projected_heads(x: Value, **rest: Any) -> Any:
    q, k, v = (ops.quantized_matmul(x, w) for w in block(H * D, 2 * D, 2 * D))
    return bare_heads(q.reshape(len(x), H, D), k.reshape(len(x), 2, D), v.reshape(len(x), 2, D), **rest)


def delta_of_runs(**values: Any) -> Any:
    """A DeltaNet layer of runs, of which rows before the norm of q and k are not kept."""
    made, between = delta(**values)
    return made, between[:1]


def kept_delta(
    gates: Value, accepted: Value, slots: Value, starts: Value, keep: Value, conv: Value, state: Value, qkv: Value,
    z: Value, a: Value, b: Value, seed: int = 0, others: Value | None = None,
) -> Any:  # fmt: skip
    """A DeltaNet layer with runs that are kept, behind a commit: by another weight if it has a seed, of other slots."""
    weights = vector(CHANNELS, TAPS), vector(HV, seed=1), vector(HV, seed=2), vector(DV, seed=3)
    at = slots if others is None else others
    ops.delta_commit(conv, state, gates, at, accepted, vector(CHANNELS, TAPS, seed=seed) if seed else weights[0], HK)
    y = ops.conv1d_causal(qkv, conv, weights[0], slots, starts)
    ops.conv1d_state_update(conv, qkv, slots, starts, keep, TAPS)
    unit = ops.rms_norm_qk(y, HK, DK, HK * DK)
    g, strength = ops.gdn_decay_beta(a, b, *weights[1:3])
    runs = {"slots": slots, "starts": starts, "keep": keep, "gates": gates}
    d = ops.gated_delta_net(state, unit, g, strength, HK, HV, DK, DV, **runs)
    return [ops.gated_rms_norm(d, z, weights[3], EPS)], [y, unit, g, strength, d]


H, D, INV_FREQ = 4, 8, vector(2, seed=9)
CACHE = {name: Spec((6, 16, 2 * D), "float32") for name in ("keys", "values")}
DECODE = {"at": Spec((T,), "int32"), "table": Spec((T, 2), "int32"), "lengths": Spec((T,), "int32")}
AT = np.array([17, 3, 31], np.int32)
_RAN = {"at": [16, 17, 3], "table": [[5, 1], [0, 2]], "lengths": [18, 4], "sequence": [0, 0, 1], "starts": [0, 2, 3]}
RAN = {name: np.array(value, np.int32) for name, value in _RAN.items()}  # runs of two rows and of one
RUNS = {name: Spec(array.shape, "int32") for name, array in RAN.items()}
DECODED = {"at": AT, "table": np.arange(6, dtype=np.int32).reshape(T, 2), "lengths": AT + np.int32(1)}


def turn(x: Value, at: Value, seed: int | None, eps: float = EPS, inv_freq: np.ndarray = INV_FREQ, **how: Any) -> Any:
    """A norm unless seed is None, then a rotation."""
    y = x if seed is None else norm(x, seed, eps)
    return ops.rope(y, inv_freq, at, 4, 1.25, **how)


def attend(
    q: Value,
    k: Value,
    v: Value,
    keys: Value,
    values: Value,
    table: Value,
    at: Value,
    lengths: Value,
    sequence: Value | None = None,
    starts: Value | None = None,
) -> Value:
    ops.kv_pages_append(k, v, keys, values, table, at, sequence)
    return ops.attention_paged(q, keys, values, table, lengths, 0.5, starts=starts)


def gated_heads(q: Value, k: Value, v: Value, at: Value, **cache: Value) -> Any:
    """Qwen3.5: q beside its gate, norms of q and k."""
    q, gate = ops.split_q_gate(q)
    turned, key = turn(q, at, 1), turn(k, at, 2)
    y = attend(turned, key, v, at=at, **cache)
    return [ops.sigmoid_gate(y, gate)], [q, turned, key, y]


def values_of_keys(q: Value, k: Value, at: Value, **cache: Value) -> Any:
    """Gemma 4's global layers: the values are the raw keys, normed."""
    turned, key, value = turn(q, at, 1), turn(k, at, 2), ops.rms_norm(k, None, EPS)
    return [attend(turned, key, value, at=at, **cache)], [turned, key, value]


def bare_heads(q: Value, k: Value, v: Value, at: Value, **cache: Value) -> Any:
    """Llama: rotations alone."""
    turned, key = turn(q, at, None), turn(k, at, None)
    return [attend(turned, key, v, at=at, **cache)], [turned, key]


def biased_heads(q: Value, k: Value, v: Value, at: Value, **cache: Value) -> Any:
    """gpt-oss and Qwen2: biases, then rotations."""
    rows = [ops.add(x.reshape(T, x.spec.size // T), vector(x.spec.size // T, seed=n)) for n, x in enumerate((q, k, v))]
    q, k, v = (row.reshape(*x.shape) for row, x in zip(rows, (q, k, v), strict=True))
    turned, key = turn(q, at, None), turn(k, at, None)
    return [attend(turned, key, v, at=at, **cache)], [turned, key, *rows]


def prompt_heads(q: Value, k: Value, v: Value, at: Value, table: Value, keys: Value, values: Value) -> Any:
    """A prompt's tokens of one sequence."""
    turned, key, value = turn(q, at, 1), turn(k, at, 2), ops.rms_norm(v, None, EPS)
    ops.kv_pages_append(key, value, keys, values, table, at)
    y = ops.attention_prefill(turned, keys, values, at, 0.5, block_table=table)
    return [y], [turned, key, value]


RANK, NOPE, ROPE = 12, 5, 8


def latents(
    q: Value,
    kv: Value,
    keys: Value,
    values: Value,
    table: Value | None,
    at: Value,
    lengths: Value,
    scales: tuple[float, float] = (1.25, 1.25),
    count: int = 1,
    slots: Value | None = None,
    width: int | None = ROPE,
    turned_at: Value | None = None,
    k: Value | None = None,
    normed: bool = False,
) -> Any:
    """DeepSeek-V3. scales: of the two rotations; count: heads that k_pe is turned as, width: how much of them;
    turned_at: other positions; k: another key; normed: the key is.
    """
    q_nope, q_pe, latent, k_pe = ops.mla_split_q_kv(q, kv, NOPE)
    latent = norm(latent, 1)
    k_pe = k_pe if k is None else k
    turns = at if turned_at is None else turned_at
    inv_freq = vector((width or ROPE) // count // 2)
    turned = ops.rope(q_pe, inv_freq, turns, width and width // count, scales[0])
    k_pe = k_pe.reshape(T, count, ROPE // count)
    key = ops.rope(norm(k_pe, 2) if normed else k_pe, inv_freq, turns, width and width // count, scales[1])
    ops.mla_cache_append(latent, key.reshape(T, ROPE), keys, values, at, slots=slots, block_table=table)
    q_latent = ops.mla_q_prime(q_nope, vector(H, RANK, NOPE))
    return [ops.mla_sdpa(q_latent, turned, keys, values, lengths, 0.5, slots, table)], [latent, key]


def latents_of_a_prompt(q: Value, kv: Value, keys: Value, values: Value, table: Value, at: Value) -> Any:
    """Rotations over all of the width, positions from the first token on."""
    q_nope, q_pe, latent, k_pe = ops.mla_split_q_kv(q, kv, NOPE)
    inv_freq = vector(4)
    turned, key = (ops.rope(x, inv_freq, at) for x in (q_pe, k_pe.reshape(T, 1, ROPE)))
    ops.mla_cache_append(norm(latent, 1), key.reshape(T, ROPE), keys, values, at, block_table=table)
    return [q_nope, ops.gelu_tanh(turned)], [k_pe, key]


def latents_of_runs(q: Value, kv: Value, keys: Value, values: Value, at: Value, table: Value, **runs: Value) -> Any:
    """Runs of several sequences, some over their latents, some over keys and values: two nodes read the queries."""
    q_nope, q_pe, latent, k_pe = ops.mla_split_q_kv(q, kv, NOPE)
    latent, starts, inv_freq = norm(latent, 1), runs["starts"], vector(4)
    turned, key = (ops.rope(x, inv_freq, at) for x in (q_pe, k_pe.reshape(T, 1, ROPE)))
    ops.mla_cache_append(
        latent, key.reshape(T, ROPE), keys, values, at, block_table=table, sequence=runs["sequence"]
    )  # fmt: skip
    short = ops.mla_sdpa(
        ops.mla_q_prime(q_nope, vector(H, RANK, NOPE)), turned, keys, values, runs["lengths"], 0.5,
        block_table=table, starts=starts, longest=1,
    )  # fmt: skip
    weights = vector(H, RANK, NOPE), vector(H, 7, RANK)
    long = ops.mla_prefill(
        q_nope, turned, keys, values, at, 0.5, *weights, block_table=table, starts=starts, longer_than=1
    )  # fmt: skip
    return [short, long], [latent, key]


def gated_twice(q: Value, g: Value, keys: Value, values: Value, at: Value, table: Value, lengths: Value) -> Any:
    y = ops.sigmoid_gate(ops.attention_paged(q, keys, values, table, lengths, 0.5), q)
    return [ops.sigmoid_gate(y, g)], []


def matmul_add(h: Value, x: Value) -> Any:
    y = ops.quantized_matmul(x, matrix(DIM, DIM), "int8")
    return [ops.residual_add(h, y)], [y]


def biased_matmul_add(h: Value, x: Value) -> Any:
    y = ops.quantized_matmul(x, matrix(DIM, DIM))
    z = ops.add(y, vector(DIM))
    return [ops.residual_add(h, z)], [y, z]


def experts_add(h: Value, x: Value, ids: Value, w: Value) -> Any:
    stacks = matrix(5, 64, DIM, seed=1), matrix(5, 64, DIM, seed=2), matrix(5, DIM, 64, seed=3)
    y = ops.moe_biased_forward(x, ids, w, *stacks, vector(5, 64, seed=4), vector(5, 64, seed=5), vector(5, DIM, seed=6))
    return [ops.residual_add(h, y)], [y]


def biased_router(x: Value) -> Any:
    y = norm(x, 1)
    logits = ops.quantized_matmul(y, matrix(7, DIM), "float32", "float32")
    scores = ops.add(logits, vector(7, seed=3))
    return [*ops.moe_route(scores, None, 3), ops.gelu_tanh(y)], [logits, scores]


def dense_matmul_add(h: Value, x: Value) -> Any:
    y = ops.matmul(x, vector(DIM, DIM))
    return [ops.residual_add(y, h)], [y]


def norm_matmul(x: Value) -> Any:
    y, z = norm(x, 1), norm(x, 2)
    return [ops.quantized_matmul(y, matrix(48, DIM)), ops.matmul(z, vector(7, DIM), "float32")], [y, z]


def router(x: Value, norms: bool = True, more: int = 0, rounds: str = "float32") -> Any:
    y = norm(x, 1) if norms else x
    w, *below = block(7, more) if more else (matrix(7, DIM),)
    logits, *scores = (ops.quantized_matmul(y, part, rounds) for part in (w, *below))
    chosen = ops.moe_route(logits, vector(7), 3)
    return [*chosen, *scores, ops.gelu_tanh(y)], [logits]


def group_router(x: Value) -> Any:
    y = norm(x, 1)
    logits = ops.matmul(y, vector(8, DIM))
    return list(ops.moe_group_route(logits, vector(8), 4, 2, 3)), [logits]


def norm_moe(h: Value, ids: Value, w: Value) -> Any:
    y = norm(h, 1)
    outputs, between = moe(h, y, ids, w)
    return outputs, [y, *between]


def routed_moe(x: Value, scored: bool = True, keeps: bool = False, rounds: str = "float32", **how: Any) -> Any:
    """A router and experts of all rows; keeps: the normed rows are returned, too."""
    y = norm(x, 1)
    w, below = block(7, 1)
    logits, score = ops.quantized_matmul(y, w, dtype="float32"), ops.quantized_matmul(y, below, dtype="float32")
    ids, weights = ops.moe_route(logits, vector(7), 3)
    experts = matrix(7, 64, DIM, seed=1), None, matrix(7, DIM, 32, seed=2)
    routed = ops.moe_forward(y, ids, weights, *experts, activations=rounds, **how)
    gate, up = (ops.quantized_matmul(y, matrix(96, DIM, seed=n), rounds) for n in (3, 4))
    shared = ops.quantized_matmul(ops.swiglu(gate, up), matrix(DIM, 96, seed=5), rounds)
    total = ops.moe_combine_residual(x, None, None, shared, score if scored else None, moe_sum=routed)
    return [total, *([y] if keeps else []), *([] if scored else [score])], [y, logits, routed, gate, up, shared]


def two(**more: Spec) -> dict[str, Spec]:
    return {"h": ROWS, "x": ROWS, **more}


POSITIONS = np.array([5, 0, 300], np.int32)
ROUTED = {"logits": Spec((T, 7), "float32"), "x": ROWS}
TURNED = {"q": HEADS, "positions": Spec((T,), "int32")}
CHOSEN = {"ids": Spec((T, 3), "int32"), "w": Spec((T, 3), "float32")}
IDS = {"ids": np.array([[4, 0, 2], [1, 3, 4], [0, 1, 2]], np.int32)}
LINEAR = {
    "qkv": Spec((T, CHANNELS), "float32"),
    "z": Spec((T, HV, DV), "float32"),
    "a": Spec((T, HV), "float32"),
    "b": Spec((T, HV), "float32"),
    "conv": Spec((7, TAPS - 1, CHANNELS), "float32"),
    "state": Spec((7, HV, DV, DK), "float32"),
    "slots": Spec((T,), "int32"),
}
SLOTS = {"slots": np.array([5, 0, 3], np.int32)}
_ROOM = 3  # for kept runs
_KEPT = {"slots": [5, 0], "starts": [0, 2, 3], "keep": [2, 0], "accepted": [1, 3]}
KEPT = {name: np.array(value, np.int32) for name, value in _KEPT.items()}
KEPT_RUNS = LINEAR | {name: Spec(array.shape, "int32") for name, array in KEPT.items()}
KEPT_RUNS |= {"conv": Spec((7, TAPS - 1 + _ROOM, CHANNELS), "float32"), "gates": Spec((7, _ROOM, 2, HV), "float32")}
QUERY, KEY, GATED = (Spec((T, count, width), "float32") for count, width in ((H, D), (2, D), (H, 2 * D)))
PROMPT = {"at": Spec((), "int32"), "table": Spec((3,), "int32"), **CACHE}
MLA = {
    "q": Spec((T, H, NOPE + ROPE), "float32"),
    "kv": Spec((T, RANK + ROPE), "float32"),
    "keys": Spec((6, 32, RANK), "float32"),
    "values": Spec((6, 32, ROPE), "float32"),
}
CUDA = ("cuda",)

CASES = {
    "norm_add": Case(norm_add, ["norm_add"], two()),
    "norm_add turned": Case(norm_add_turned, ["norm_add"], two()),
    "norm_add_scalar": Case(norm_add_scalar, ["norm_add_scalar"], two()),
    "norm_add_scalar of a number": Case(norm_add_number, ["norm_add_scalar"], two()),
    "residual_norm": Case(residual_norm, ["residual_norm"], two()),
    "residual_norm, sum kept": Case(residual_norm_kept, ["residual_norm", "gelu_tanh"], two()),
    "rms_norm_triple": Case(rms_norm_triple, ["rms_norm_triple"], {"x": ROWS}),
    "rms_norm_triple of four": Case(rms_norm_four, ["rms_norm_triple", "rms_norm"], {"x": ROWS}),
    "post_attn_triple_norm": Case(post_attn_triple_norm, ["post_attn_triple_norm", "residual_add"], two()),
    "end of layer": Case(end_of_layer, ["rms_norm", "post_ff_norm2_endlayer"], two(e=ROWS), devices=("cpu",)),
    "end of layer, dense norm": Case(end_of_layer, ["post_ff_norm2_endlayer"], two(e=ROWS), devices=("cuda",)),
    "end of layer, mid kept": Case(end_of_layer_unscaled, ["post_ff_norm2_endlayer", "gelu_tanh"], two(e=ROWS)),
    "head_norm_rope": Case(head_norm_rope, ["head_norm_rope"], TURNED, {"positions": POSITIONS}),
    "head_norm_rope by name": Case(head_norm_rope_by_name, ["head_norm_rope"], TURNED, {"positions": POSITIONS}),
    "moe_route": Case(moe_route, ["moe_route", "moe_forward"], ROUTED),
    "moe_route, some rows inactive": Case(
        moe_route,
        ["moe_route", "moe_forward"],
        {**ROUTED, "active": Spec((T,), "int32")},
        {"active": np.arange(T, dtype=np.int32) % 2 - 1},
    ),
    "gate_up": Case(gate_up, ["fused_gate_up_swiglu"], {"x": ROWS}),
    "gate_up adjacent": Case(gate_up_adjacent, ["fused_gate_up_swiglu"], ONE_ROW),
    "joined_products": Case(joined_products, ["quantized_matmul", "split_columns", "gelu_tanh"], {"x": ROWS}),
    "joined_products of more rows than the CPU joins": Case(
        joined_products, [*["quantized_matmul"] * 3, "gelu_tanh"], {"x": NINE_ROWS}, devices=("cpu",)
    ),
    "gate_up adjacent of some rows": Case(gate_up_adjacent, ["fused_gate_up_swiglu"], {"x": ROWS}),
    "joined_products in another order": Case(
        lambda x: products(x, *block(64, 16)[::-1]),
        ["quantized_matmul", "split_columns", "gelu_tanh"],
        {"x": ROWS},
    ),
    "joined_products of one row": Case(joined_products, ["quantized_matmul", "gelu_tanh"], ONE_ROW),
    "gate_up of geglu": Case(gate_up_geglu, ["fused_gate_up_geglu"], {"x": ROWS}),
    "moe_shared_forward": Case(
        moe, ["moe_shared_forward"], two(**CHOSEN, score=Spec((T, 1), "float32")), IDS, devices=CUDA
    ),
    "moe_shared_forward without a score": Case(moe, ["moe_shared_forward"], two(**CHOSEN), IDS, devices=CUDA),
    "moe_shared_forward without a residual": Case(
        lambda **values: moe(None, **values), ["moe_shared_forward"], {"x": ROWS, **CHOSEN}, IDS, devices=CUDA
    ),
    "gated_delta_step": Case(delta, ["gated_delta_step"], LINEAR, SLOTS),
    "columns_in_place of a gated delta net": Case(
        projected_delta,
        ["quantized_matmul", "gated_delta_step"],
        {"x": ROWS, **{name: LINEAR[name] for name in ("conv", "state", "slots")}},
        SLOTS,
        devices=CUDA,
    ),
    "columns_in_place of attention": Case(
        projected_heads,
        ["quantized_matmul", "attention_prepare", "attention_paged"],
        {"x": ROWS, **DECODE, **CACHE},
        DECODED,
        devices=CUDA,
    ),
    "convolution_heads": Case(
        delta_of_runs,
        ["conv1d_causal", "conv1d_state_update", "gdn_decay_beta", "gated_delta_net", "gated_rms_norm"],
        LINEAR | {"slots": Spec((2,), "int32"), "starts": Spec((3,), "int32")},
        {"slots": KEPT["slots"], "starts": KEPT["starts"]},
        devices=CUDA,
    ),
    "gated_delta_verify": Case(kept_delta, ["gated_delta_verify"], KEPT_RUNS, KEPT),
    "attention_prepare": Case(
        gated_heads,
        ["attention_prepare", "attention_paged"],
        {"q": GATED, "k": KEY, "v": KEY, **DECODE, **CACHE},
        DECODED,
        devices=CUDA,
    ),
    "attention_prepare, values of keys": Case(
        values_of_keys,
        ["attention_prepare", "attention_paged"],
        {"q": QUERY, "k": KEY, **DECODE, **CACHE},
        DECODED,
        devices=CUDA,
    ),
    "attention_prepare without norms": Case(
        bare_heads,
        ["attention_prepare", "attention_paged"],
        {"q": QUERY, "k": KEY, "v": KEY, **DECODE, **CACHE},
        DECODED,
        devices=CUDA,
    ),
    "attention_prepare with biases": Case(
        biased_heads,
        ["attention_prepare", "attention_paged"],
        {"q": QUERY, "k": KEY, "v": KEY, **DECODE, **CACHE},
        DECODED,
        devices=CUDA,
    ),
    "attention_prepare of a prompt": Case(
        prompt_heads,
        ["attention_prepare", "attention_prefill"],
        {"q": QUERY, "k": KEY, "v": KEY, **PROMPT},
        {"at": np.array(15, np.int32), "table": np.array([4, 1, 2], np.int32)},
        devices=CUDA,
    ),
    "attention_prepare of flat values": Case(
        bare_heads,
        ["attention_prepare", "attention_paged"],
        {"q": QUERY, "k": KEY, "v": Spec((T, 2 * D), "float32"), **DECODE, **CACHE},
        DECODED,
        devices=CUDA,
    ),
    "attention_prepare of runs": Case(
        gated_heads,
        ["attention_prepare", "attention_paged"],
        {"q": GATED, "k": KEY, "v": KEY, **RUNS, **CACHE},
        RAN,
        devices=CUDA,
    ),
    "mla_prepare of runs": Case(
        latents_of_runs, ["mla_prepare", "mla_q_prime", "mla_sdpa", "mla_prefill"], MLA | RUNS, RAN, devices=CUDA
    ),
    "mla_prepare": Case(latents, ["mla_prepare", "mla_q_prime", "mla_sdpa"], MLA | DECODE, DECODED, devices=CUDA),
    "mla_prepare of a prompt": Case(
        latents_of_a_prompt,
        ["mla_prepare", "gelu_tanh"],
        MLA | {"at": Spec((), "int32"), "table": Spec((3,), "int32")},
        {"at": np.array(30, np.int32), "table": np.array([4, 1, 2], np.int32)},
        devices=CUDA,
    ),
    "attention_paged with one of two gates": Case(
        gated_twice,
        ["attention_paged", "sigmoid_gate"],
        {"q": QUERY, "g": QUERY, **DECODE, **CACHE},
        DECODED,
        devices=CUDA,
    ),
    "matmul_add": Case(matmul_add, ["matmul_add"], two(), devices=CUDA),
    "matmul_add of a dense weight": Case(dense_matmul_add, ["matmul_add"], two(), devices=CUDA),
    "matmul_add with a bias": Case(biased_matmul_add, ["matmul_add"], two(), devices=CUDA),
    "experts_add": Case(experts_add, ["moe_biased_forward"], two(**CHOSEN), IDS, devices=CUDA),
    "moe_norm_route with a bias": Case(biased_router, ["moe_norm_route", "gelu_tanh"], {"x": ROW}, devices=CUDA),
    "norm_matmul": Case(norm_matmul, ["norm_matmul", "norm_matmul"], {"x": ROWS}, devices=CUDA),
    "norm_matmul of more rows": Case(
        lambda x: ([ops.quantized_matmul(y, matrix(48, DIM)) for y in [norm(x, 1)]], []),
        ["norm_matmul"],
        {"x": Spec((9, DIM), "float32")},
        devices=CUDA,
    ),
    "moe_norm_route": Case(router, ["moe_norm_route", "gelu_tanh"], {"x": ROW}, devices=CUDA),
    "moe_norm_route without a norm": Case(
        lambda x: router(x, norms=False), ["moe_norm_route", "gelu_tanh"], {"x": ROW}, devices=CUDA
    ),
    "moe_norm_route with scores": Case(
        lambda x: router(x, more=32), ["moe_norm_route", "gelu_tanh"], {"x": ROW}, devices=CUDA
    ),
    "moe_norm_group_route": Case(group_router, ["moe_norm_group_route"], {"x": ROW}, devices=CUDA),
    "moe_route_forward": Case(routed_moe, ["moe_route_forward"], {"x": ROW}, devices=CUDA),
    "moe_route_forward of some rows": Case(routed_moe, ["moe_route_forward"], {"x": ROWS}, devices=CUDA),
    "norm in moe_shared_forward": Case(norm_moe, ["moe_shared_forward"], {"h": ROWS, **CHOSEN}, IDS, devices=CUDA),
}

ALL = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


@ALL
def test_a_rule_fires_and_changes_no_result(case: Case) -> None:
    graph = traced(case.build, case.specs)
    plain = names(graph)
    for device in case.devices:
        fused = fuse(graph, device)
        assert Counter(names(fused)) == Counter(case.want)
        assert list(fused.inputs) == list(graph.inputs) and fused.outputs[0].graph is fused
        check(graph, fused, case.specs, case.given)
    assert names(graph) == plain, "the given graph is as it was"
    if case.devices == CUDA:
        assert Counter(names(fuse(graph, "cpu"))) != Counter(case.want), "its parts are as fast on the CPU"


USES: dict[str, Callable[[Value], Value]] = {
    "returned": lambda value: value,
    "read": ops.gelu_tanh,
    "read in part": lambda value: ops.gelu_tanh(value[1:] if len(value) > 1 else value[:, 5:]),
}


@pytest.mark.parametrize("use", USES)
@ALL
def test_no_rule_drops_what_somebody_needs(case: Case, use: str) -> None:
    """Each value between, used once more: the rule that would drop it does not fire, others may."""
    both, alone = traced(case.build, case.specs, lambda between: between), traced(case.build, case.specs)
    for place in range(len(both.outputs) - len(alone.outputs)):

        def extra(between: Sequence[Value], place: int = place) -> list[Value]:
            value = between[place]
            return [value if value.dtype == "int32" else USES[use](value)]

        graph = traced(case.build, case.specs, extra)
        for device in case.devices:
            fused = fuse(graph, device)
            kept = Counter(names(fused)) - Counter(["gelu_tanh"])
            assert kept != Counter(case.want), f"value {place} was dropped"
            check(graph, fused, case.specs, case.given)


# -- what does not fit -----------------------------------------------------------------------------------------------


def other_dtype_added(x: Value, h: Value) -> Any:
    return [ops.add(h, norm(x, 1))], []  # a bias of another dtype


def two_inputs(h: Value, x: Value, ids: Value, w: Value) -> Any:
    routed = ops.moe_forward(h, ids, w, matrix(5, 64, DIM, seed=1), None, matrix(5, DIM, 32, seed=2))
    y = ops.fused_gate_up_swiglu(x, matrix(96, DIM, seed=3), matrix(96, DIM, seed=4))
    shared = ops.quantized_matmul(y, matrix(DIM, 96, seed=5))
    return [ops.moe_combine_residual(h, None, None, shared, None, moe_sum=routed)], []


INTEGERS = IDS | SLOTS | DECODED | {"others": np.array([1, 2, 6], np.int32)}
UNFIT: dict[str, tuple[Build, dict[str, Spec], str]] = {
    "norm_add of a bias": (other_dtype_added, {"x": Spec((DIM,), "float16"), "h": ROWS}, "norm_add"),
    "norm_add without a weight": (
        lambda h, x: ([ops.residual_add(h, ops.rms_norm(x, None, EPS))], []),
        two(),
        "norm_add",
    ),
    "norm_add of another shape": (
        lambda h, q: ([ops.residual_add(h, norm(q, 1).reshape(T, 16))], []),
        {"h": Spec((T, 16), "float32"), "q": HEADS},
        "norm_add",
    ),
    "norm_add_scalar by a matrix": (
        lambda h, x: ([ops.mul(ops.residual_add(h, norm(x, 1)), h)], []),
        two(),
        "norm_add_scalar",
    ),
    "residual_norm of a bias": (
        lambda h: ([norm(ops.add(h, vector(DIM, seed=2)), 1)], []),
        {"h": ROWS},
        "residual_norm",
    ),
    "residual_norm of heads": (
        lambda h, x: ([norm(ops.residual_add(h, x).reshape(T, 4, 8), 1)], []),
        two(),
        "residual_norm",
    ),
    "rms_norm_triple of two eps": (
        lambda x: ([norm(x, 1), norm(x, 2, 0.1), norm(x, 3)], []),
        {"x": ROWS},
        "rms_norm_triple",
    ),
    "rms_norm_triple of two shapes": (
        lambda x: ([norm(x, 1), norm(x.reshape(T, 4, 8), 2), norm(x, 3)], []),
        {"x": ROWS},
        "rms_norm_triple",
    ),
    "post_attn_triple_norm of two eps": (
        lambda h, x: ([norm(r := ops.add(h, norm(x, 1, 0.1)), 2), norm(r, 3), norm(r, 4), r], []),
        two(),
        "post_attn_triple_norm",
    ),
    "end of layer of two eps": (
        lambda h, x, e: ([ops.mul(ops.add(h, norm(ops.add(x, norm(e, 1)), 2, 0.1)), 2.0)], []),
        two(e=ROWS),
        "post_ff_norm2_endlayer",
    ),
    "head_norm_rope over all heads": (
        lambda x, positions: ([ops.rope(norm(x, 1).reshape(T, 4, 8), vector(4), positions)], []),
        {"x": ROWS, "positions": Spec((T,), "int32")},
        "head_norm_rope",
    ),
    "moe_route whose ids are returned": (
        lambda logits: ([(c := ops.moe_softmax_topk(logits, 3))[0], ops.moe_normalize_weights(c[1])], []),
        {"logits": ROUTED["logits"]},
        "moe_route",
    ),
    "gate_up of two rows": (
        lambda x: ([ops.swiglu(*(ops.quantized_matmul(v, matrix(48, DIM)) for v in (x[:1], x[1:2])))], []),
        {"x": ROWS},
        "fused_gate_up_swiglu",
    ),
    "gate_up of two inputs": (
        lambda h, x: ([ops.swiglu(*(ops.quantized_matmul(v, matrix(48, DIM)) for v in (h, x)))], []),
        two(),
        "fused_gate_up_swiglu",
    ),
    "gate_up of two formats": (
        lambda x: ([ops.swiglu(*(ops.quantized_matmul(x, matrix(48, DIM, bits=bits)) for bits in (4, 8)))], []),
        {"x": ROWS},
        "fused_gate_up_swiglu",
    ),
    "gate_up of two roundings": (
        lambda x: ([ops.swiglu(*(ops.quantized_matmul(x, matrix(48, DIM), a) for a in ("int8", "float32")))], []),
        {"x": ROWS},
        "fused_gate_up_swiglu",
    ),
    "gate_up in another dtype": (
        lambda x: (
            [ops.swiglu(*(ops.quantized_matmul(x, matrix(48, DIM, seed=n), dtype="float32") for n in (1, 2)))],
            [],
        ),
        {"x": Spec((T, DIM), "float16")},
        "fused_gate_up_swiglu",
    ),
    "moe_shared_forward of two activations": (
        lambda **v: moe(**v, act="gelu_tanh"),
        two(**CHOSEN),
        "moe_shared_forward",
    ),
    "moe_shared_forward of two roundings": (lambda **v: moe(**v, own="int8"), two(**CHOSEN), "moe_shared_forward"),
    "moe_shared_forward of two inputs": (two_inputs, two(**CHOSEN), "moe_shared_forward"),
    "moe_shared_forward, its score a number": (lambda **v: moe(**v, score=0.5), two(**CHOSEN), "moe_shared_forward"),
    "gated_delta_step with another eps": (lambda **v: delta(**v, eps=0.1), LINEAR, "gated_delta_step"),
    "gated_delta_step, gates turned": (lambda **v: delta(**v, turned=True), LINEAR, "gated_delta_step"),
    "gated_delta_step that keeps other rows": (
        lambda qkv, **v: delta(qkv, kept=ops.gelu_tanh(qkv), **v),
        LINEAR,
        "gated_delta_step",
    ),
    "gated_delta_step of other slots": (
        lambda others, slots, **v: delta(slots=slots, other=others, **v),
        LINEAR | {"others": Spec((T,), "int32")},
        "gated_delta_step",
    ),
    "gated_delta_step of a prompt": (
        lambda conv, state, slots, **v: delta(conv=conv[2], state=state[2], **v),
        LINEAR,
        "gated_delta_step",
    ),
    "gated_delta_verify, the commit by another weight": (
        lambda **v: kept_delta(**v, seed=5),
        KEPT_RUNS,
        "gated_delta_verify",
    ),
    "gated_delta_verify, the commit of other slots": (
        lambda others, **v: kept_delta(**v, others=others),
        KEPT_RUNS | {"others": Spec((2,), "int32")},
        "gated_delta_verify",
    ),
    "gated_delta_step of runs": (
        lambda starts, slots, **v: delta(slots=slots, starts=starts, **v),
        LINEAR | {"slots": Spec((2,), "int32"), "starts": Spec((3,), "int32")},
        "gated_delta_step",
    ),
    "attention_prepare of rows of others": (
        bare_heads,
        {"q": QUERY, "k": KEY, "v": KEY, **DECODE, **CACHE, "sequence": Spec((T,), "int32")},
        "attention_prepare",
    ),
    "attention_prepare of two eps": (
        lambda q, k, v, at, **cache: ([attend(turn(q, at, 1), turn(k, at, 2, 0.1), v, at=at, **cache)], []),
        {"q": QUERY, "k": KEY, "v": KEY, **DECODE, **CACHE},
        "attention_prepare",
    ),
    "attention_prepare of two tables": (
        lambda q, k, v, at, **cache: (
            [attend(turn(q, at, 1), turn(k, at, 2, inv_freq=vector(2)), v, at=at, **cache)],
            [],
        ),
        {"q": QUERY, "k": KEY, "v": KEY, **DECODE, **CACHE},
        "attention_prepare",
    ),
    "attention_prepare at other positions": (
        lambda q, k, v, at, **cache: (
            [attend(turn(q, cache["lengths"], 1), turn(k, cache["lengths"], 2), v, at=at, **cache)],
            [],
        ),
        {"q": QUERY, "k": KEY, "v": KEY, **DECODE, **CACHE},
        "attention_prepare",
    ),
    "attention_prepare of neighbours": (
        lambda q, k, v, at, **cache: (
            [attend(turn(q, at, 1, interleaved=True), turn(k, at, 2, interleaved=True), v, at=at, **cache)],
            [],
        ),
        {"q": QUERY, "k": KEY, "v": KEY, **DECODE, **CACHE},
        "attention_prepare",
    ),
    "attention_prepare of weighted values": (
        lambda q, k, v, at, **cache: ([attend(turn(q, at, 1), turn(k, at, 2), norm(v, 3), at=at, **cache)], []),
        {"q": QUERY, "k": KEY, "v": KEY, **DECODE, **CACHE},
        "attention_prepare",
    ),
    "attention_prepare of a norm without a weight": (
        lambda q, k, v, at, **cache: (
            [attend(turn(ops.rms_norm(q, None, EPS), at, None), turn(k, at, 2), v, at=at, **cache)],
            [],
        ),
        {"q": QUERY, "k": KEY, "v": KEY, **DECODE, **CACHE},
        "attention_prepare",
    ),
    "attention_prepare of gates": (
        lambda q, k, v, at, **cache: (
            [attend(turn(ops.split_q_gate(q)[1], at, 1), turn(k, at, 2), v, at=at, **cache)],
            [],
        ),
        {"q": GATED, "k": KEY, "v": KEY, **DECODE, **CACHE},
        "attention_prepare",
    ),
    "mla_prepare of two scales": (lambda **v: latents(**v, scales=(1.25, 2.0)), MLA | DECODE, "mla_prepare"),
    "mla_prepare of part of the width": (lambda **v: latents(**v, width=4), MLA | DECODE, "mla_prepare"),
    "mla_prepare of two key heads": (lambda **v: latents(**v, count=2), MLA | DECODE, "mla_prepare"),
    "mla_prepare at other positions": (
        lambda lengths, **v: latents(lengths=lengths, turned_at=lengths, **v),
        MLA | DECODE,
        "mla_prepare",
    ),
    "mla_prepare of normed keys": (lambda **v: latents(**v, normed=True), MLA | DECODE, "mla_prepare"),
    "mla_prepare of other keys": (latents, MLA | DECODE | {"k": Spec((T, ROPE), "float32")}, "mla_prepare"),
    "mla_prepare of slots": (
        lambda table, slots, **v: latents(table=None, slots=slots, **v),
        MLA | DECODE | {"slots": Spec((T,), "int32")},
        "mla_prepare",
    ),
    "matmul_add of many rows": (matmul_add, dict.fromkeys("hx", Spec((9, DIM), "float32")), "matmul_add"),
    "moe_norm_route of two rows": (router, {"x": Spec((2, DIM), "float32")}, "moe_norm_route"),
    "moe_norm_route of rounded rows": (lambda x: router(x, rounds="int8"), {"x": ROW}, "moe_norm_route"),
    "moe_norm_route of logits that are returned": (
        lambda x: ([*(found := router(x))[0], *found[1]], []),
        {"x": ROW},
        "moe_norm_route",
    ),
    "moe_route_forward of many rows": (routed_moe, {"x": Spec((257, DIM), "float32")}, "moe_route_forward"),
    "moe_norm_route of rows whose experts may be absent": (
        lambda x: routed_moe(x, slot_of=np.arange(7, dtype=np.int32)),
        {"x": ROWS},
        "moe_norm_route",
    ),
    "moe_route_forward of experts that may be absent": (
        lambda x: routed_moe(x, slot_of=np.arange(7, dtype=np.int32)),
        {"x": ROW},
        "moe_route_forward",
    ),
    "moe_route_forward of rounded rows": (lambda x: routed_moe(x, rounds="int8"), {"x": ROW}, "moe_route_forward"),
    "moe_route_forward of a row that is returned": (
        lambda x: routed_moe(x, keeps=True),
        {"x": ROW},
        "moe_route_forward",
    ),
    "moe_route_forward of another's score": (lambda x: routed_moe(x, scored=False), {"x": ROW}, "moe_route_forward"),
    "norm_matmul of many rows": (norm_matmul, {"x": Spec((257, DIM), "float32")}, "norm_matmul"),
    "norm_matmul of more rows with a dense weight": (
        lambda x: ([ops.matmul(norm(x, 1), vector(7, DIM))], []),
        {"x": Spec((9, DIM), "float32")},
        "norm_matmul",
    ),
    "norm_matmul of more rows behind a sum": (
        lambda x: ([ops.quantized_matmul(norm(ops.residual_add(x, x), 1), matrix(48, DIM))], []),
        {"x": Spec((9, DIM), "float32")},
        "norm_matmul",
    ),
    "norm_matmul for two": (
        lambda x: ([ops.matmul(y, vector(n, DIM)) for y in [norm(x, 1)] for n in (5, 6)], []),
        {"x": ROWS},
        "norm_matmul",
    ),
    "norm_matmul of a norm that is returned": (
        lambda x: ([*(found := norm_matmul(x))[0], *found[1]], []),
        {"x": ROWS},
        "norm_matmul",
    ),
    "norm_matmul of a norm read in part": (
        lambda x: ([ops.matmul(y, vector(7, DIM)) for y in [norm(x, 1)] for y in (y, y[1:])], []),
        {"x": ROWS},
        "norm_matmul",
    ),
    "norm_matmul of rounded rows": (
        lambda x: ([ops.quantized_matmul(norm(x, 1), matrix(48, DIM), "int8")], []),
        {"x": ROWS},
        "norm_matmul",
    ),
    "norm_matmul without a weight": (
        lambda x: ([ops.matmul(ops.rms_norm(x, None, EPS), vector(7, DIM))], []),
        {"x": ROWS},
        "norm_matmul",
    ),
    "norm_matmul of heads": (
        lambda q: ([ops.matmul(norm(q, 1).reshape(T, 16), vector(7, 16))], []),
        {"q": HEADS},
        "norm_matmul",
    ),
    "joined_products of many rows": (joined_products, {"x": Spec((257, DIM), "float32")}, "split_columns"),
    "joined_products that lie apart": (
        lambda x: products(x, matrix(64, DIM, seed=1), matrix(16, DIM, seed=2)),
        {"x": ROWS},
        "split_columns",
    ),
    "joined_products with a gap": (lambda x: products(x, *block(64, 16, 16)[::2]), {"x": ROWS}, "split_columns"),
    "joined_products of two inputs": (
        lambda h, x: ([ops.quantized_matmul(v, w) for v, w in zip((h, x), block(64, 16), strict=True)], []),
        two(),
        "split_columns",
    ),
    "joined_products of two roundings": (
        lambda x: (
            [ops.quantized_matmul(x, w, a) for w, a in zip(block(64, 16), ("int8", "float32"), strict=True)],
            [],
        ),
        {"x": ROWS},
        "split_columns",
    ),
    "joined_products in two dtypes": (
        lambda x: (
            [ops.quantized_matmul(x, w, dtype=d) for w, d in zip(block(64, 16), ("float32", None), strict=True)],
            [],
        ),
        {"x": Spec((T, DIM), "float16")},
        "split_columns",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_rule_does_not_fire_where_its_op_does_not_fit(name: str) -> None:
    build, specs, op = UNFIT[name]
    graph = traced(build, specs)
    for device in ("cpu", "cuda"):
        fused = fuse(graph, device)
        assert op not in names(fused)
        check(graph, fused, specs, {name: array for name, array in INTEGERS.items() if name in specs})


@pytest.mark.parametrize("how", ["one is returned", "one has another reader", "on the CPU"])
def test_columns_stay_apart_where_a_reader_needs_them_so(how: str) -> None:
    specs = {"x": ROWS, **{name: LINEAR[name] for name in ("conv", "state", "slots")}}

    def other(x: Value, **rest: Any) -> Any:
        qkv, z, a, b = (ops.quantized_matmul(x, w) for w in block(CHANNELS, HV * DV, HV, HV))
        return [*delta(qkv, z.reshape(len(x), HV, DV), a, b, **rest)[0], ops.gelu_tanh(z)], []

    builds = {"one is returned": lambda **v: projected_delta(**v, keeps=True), "one has another reader": other}
    graph = traced(builds.get(how, projected_delta), specs)
    fused = fuse(graph, "cpu" if how == "on the CPU" else "cuda")
    assert "split_columns" in names(fused)
    check(graph, fused, specs, SLOTS)


def test_what_is_between_is_kept_only_if_needed() -> None:
    (node,) = (node for node in fuse(traced(end_of_layer, two(e=ROWS)), "cpu").nodes if len(node.outs) == 2)
    assert node.outs[0] is None and not node["return_mid"]
    (node,) = fuse(traced(residual_norm, two()), "cpu").nodes
    assert node.outs[1] is None and not node["write_sum"]


def test_values_that_are_the_raw_keys_are_not_read_twice() -> None:
    graph = traced(values_of_keys, {"q": QUERY, "k": KEY, **DECODE, **CACHE})
    prepare = fuse(graph, "cuda").nodes[0]
    assert prepare["v"] is None and prepare["norm_values"] and prepare["k"].shape == (T, 2 * D)


@pytest.mark.parametrize("inner, outer", [(None, None), (vector(DIM, seed=6), vector(DIM, seed=7))])
def test_moe_shared_forward_takes_one_norm_with_a_weight(inner: np.ndarray | None, outer: np.ndarray | None) -> None:
    def build(h: Value, ids: Value, w: Value) -> Any:
        weights = matrix(5, 64, DIM, seed=1), None, matrix(5, DIM, 32, seed=2)
        shared = matrix(96, DIM, seed=3), matrix(96, DIM, seed=4), matrix(DIM, 96, seed=5)
        x = ops.rms_norm(h, inner, EPS)
        return [ops.moe_shared_forward(h, x, ids, w, *weights, *shared, norm_weight=outer)], []

    specs = {"h": ROWS, **CHOSEN}
    graph = traced(build, specs)
    assert names(fuse(graph, "cuda")) == names(graph)


# -- order -----------------------------------------------------------------------------------------------------------


def test_a_node_that_needs_what_it_would_make_is_not_made() -> None:
    """The residual of the second sum comes from the first: one node cannot make both."""

    def build(x: Value, e: Value) -> Any:
        mid = ops.add(x, norm(e, 1))
        return [ops.residual_add(ops.gelu_tanh(mid), norm(mid, 2))], []

    specs = {"x": ROWS, "e": ROWS}
    graph = traced(build, specs)
    fused = fuse(graph, "cpu")
    assert names(fused) == ["norm_add", "gelu_tanh", "norm_add"]
    check(graph, fused, specs, {})


def test_a_new_node_stands_behind_what_it_reads_and_before_its_readers() -> None:
    """The residual is made between the sum's other operand and the sum; the kept sum is read before the norm."""

    def build(x: Value, e: Value) -> Any:
        y = norm(e, 1)
        total = ops.residual_add(ops.gelu_tanh(x), y)
        early = ops.gelu_tanh(total)
        return [early, norm(ops.add(total, early), 2), norm(total, 3)], []

    specs = {"x": ROWS, "e": ROWS}
    graph = traced(build, specs)
    fused = fuse(graph, "cpu")
    assert names(fused) == ["gelu_tanh", "norm_add", "gelu_tanh", "residual_norm", "rms_norm"]
    check(graph, fused, specs, {})


@pytest.mark.parametrize("when", ["before", "between", "behind"])
def test_reads_and_writes_of_a_state_keep_their_order(when: str) -> None:
    """Somebody else reads the convolution's rows: before or behind the layer that is no matter, between it is."""

    def build(slots: Value, **values: Value) -> Any:
        def read() -> list[Value]:
            return [ops.conv1d_causal(values["qkv"], values["conv"], vector(CHANNELS, TAPS, seed=7), slots=slots)]

        early = read() if when == "before" else []
        y = ops.conv1d_causal(values["qkv"], values["conv"], vector(CHANNELS, TAPS), slots=slots)
        ops.conv1d_state_update(values["conv"], values["qkv"], slots=slots)
        middle = read() if when == "between" else []
        decay, strength = ops.gdn_decay_beta(values["a"], values["b"], vector(HV, seed=1), vector(HV, seed=2))
        unit = ops.rms_norm_qk(y, HK, DK, HK * DK)
        d = ops.gated_delta_net(values["state"], unit, decay, strength, HK, HV, DK, DV, slots=slots)
        y = ops.gated_rms_norm(d, ops.gelu_tanh(values["z"]), vector(DV), EPS)
        return [y, *early, *middle, *(read() if when == "behind" else [])], []

    graph = traced(build, LINEAR)
    fused = fuse(graph, "cuda")
    assert ("gated_delta_step" in names(fused)) == (when != "between")
    check(graph, fused, LINEAR, SLOTS)


def test_keys_are_not_appended_behind_a_reader() -> None:
    """A layer that attends over the pages before this layer's q is there keeps the append where it is."""

    def build(q: Value, k: Value, v: Value, at: Value, keys: Value, values: Value, table: Value, lengths: Value) -> Any:
        ops.kv_pages_append(turn(k, at, 2), v, keys, values, table, at)
        first = ops.attention_paged(q, keys, values, table, lengths, 0.5)
        return [ops.attention_paged(turn(first, at, 1), keys, values, table, lengths, 0.5)], []

    specs = {"q": QUERY, "k": KEY, "v": KEY, **DECODE, **CACHE}
    graph = traced(build, specs)
    fused = fuse(graph, "cuda")
    assert "attention_prepare" not in names(fused)
    check(graph, fused, specs, DECODED)


def test_rules_are_for_devices_and_in_a_list() -> None:
    graph = traced(norm_add_scalar, two())
    assert names(rewritten(graph, "cpu", ())) == names(graph)
    assert names(rewritten(graph, "cpu", RULES[:1])) == ["norm_add", "mul"]
    assert names(rewritten(traced(matmul_add, two()), "cuda", INTO_PRODUCTS)) == ["matmul_add"]


@pytest.mark.parametrize("build", [matmul_add, norm_matmul, router])
def test_batch_invariant_rules_do_not_look_at_the_number_of_rows(build: Build) -> None:
    for rows in (1, 8, 9):
        specs = {name: Spec((rows, DIM), "float32") for name in (two() if build is matmul_add else {"x": ROWS})}
        fused = names(fuse(traced(build, specs), "cuda", batch_invariant=True))
        assert not {"matmul_add", "norm_matmul", "moe_norm_route"} & set(fused)


def test_routers_know_the_next_dense_weight() -> None:
    weights = [matrix(48, DIM, seed=n) for n in (1, 2)]

    def build(x: Value, ids: Value, w: Value) -> Any:
        outputs = []
        for each in (weights[0], None, weights[1]):
            outputs += router(x)[0]
            ids, shares, gated = outputs[-3:]
            outputs.append(ops.moe_forward(gated, ids, shares, matrix(7, 64, DIM), None, matrix(7, DIM, 32)))
            if each is not None:
                outputs.append(ops.quantized_matmul(outputs[-1], each))
        return [*outputs, *group_router(x)[0]], []

    for device in ("cuda", "cpu"):
        graph = fuse(traced(build, {"x": ROW, **CHOSEN}), device)
        fetched = [node["fetch"] for node in graph.nodes if "fetch" in node.args]
        assert len(fetched) == (4 if device == "cuda" else 0)
        assert all(
            found is want for found, want in zip(fetched, (weights[0], weights[1], weights[1], None), strict=False)
        )
    batch = fuse(traced(build, {"x": ROW, **CHOSEN}), "cuda", batch_invariant=True)
    assert not any("fetch" in node.args for node in batch.nodes)


def test_a_reader_does_not_pass_a_writer() -> None:
    """The gate of an attention comes behind an append to the same pages: the attention stays in front of that."""

    def build(q: Value, k: Value, v: Value, at: Value, keys: Value, values: Value, table: Value, lengths: Value) -> Any:
        y = ops.attention_paged(q, keys, values, table, lengths, 0.5)
        ops.kv_pages_append(k, v, keys, values, table, at)
        return [ops.sigmoid_gate(y, ops.gelu_tanh(q))], []

    specs = {"q": QUERY, "k": KEY, "v": KEY, **DECODE, **CACHE}
    graph = traced(build, specs)
    assert names(fuse(graph, "cuda")) == names(graph)


# -- what every rewrite is held to -----------------------------------------------------------------------------------


def appended() -> tuple[Match, dict[str, Node]]:
    """An append of doubled rows, and what each node of it is."""

    def build(k: Value, at: Value, keys: Value, values: Value, table: Value, lengths: Value) -> Any:
        ops.kv_pages_append(ops.gelu_tanh(k), k, keys, values, table, at)
        return [ops.gelu_tanh(k)], []

    graph = traced(build, {"k": KEY, **DECODE, **CACHE})
    return Match(graph, "cpu"), dict(zip(("make", "append", "last"), graph.nodes, strict=True))


def test_a_rewrite_writes_what_the_old_nodes_wrote() -> None:
    match, nodes = appended()
    last, args = nodes["last"], nodes["last"]["x"]
    assert match.apply(match.call(ops.gelu_tanh, args, instead=[last], makes=[last.out]))
    match, nodes = appended()
    last = nodes["last"]
    assert not match.apply(match.call(ops.gelu_tanh, last["x"], instead=[nodes["append"], last], makes=[last.out]))


def test_a_rewrite_reads_no_state_that_the_old_nodes_did_not_read() -> None:
    match, nodes = appended()
    last, keys = nodes["last"], nodes["append"]["k_pages"]
    part = keys.reshape(keys.spec.size)[: last.out.spec.size].reshape(*last.out.shape)
    assert not match.apply(match.call(ops.gelu_tanh, part, instead=[last], makes=[last.out]))


def test_a_rewrite_reads_nothing_that_it_removes() -> None:
    graph = traced(lambda x: ([ops.gelu_tanh(ops.gelu_tanh(x))], []), {"x": ROWS})
    (first, last), match = graph.nodes, Match(graph, "cpu")
    assert not match.apply(match.call(ops.gelu_tanh, first.out, instead=[first, last], makes=[last.out]))
    assert match.apply(match.call(ops.gelu_tanh, first["x"], instead=[first, last], makes=[last.out]))


def test_a_call_that_does_not_fit_is_no_offer() -> None:
    match, nodes = appended()
    last = nodes["last"]
    assert match.call(ops.residual_add, last["x"], last["x"], instead=[last], makes=[last.out]) is not None
    assert match.call(ops.residual_add, last["x"], 1.0, instead=[last], makes=[last.out]) is None
    assert match.call(ops.gelu_tanh, last["x"][:2], instead=[last], makes=[last.out]) is None


def test_makers_are_of_whole_values() -> None:
    match, nodes = appended()
    make = nodes["make"]
    for part in (make.out[1:], make.out.reshape(2 * T, D)):
        assert match.maker(part, ops.gelu_tanh) is None
    assert match.made_by(make.out, ops.gelu_tanh) is make
    assert match.made_by(make.out, ops.residual_add) is None and match.maker(1.0, ops.gelu_tanh) is None


def test_dense_norm_needs_the_eps_of_the_layer_and_a_reader_less():
    def fn(h: Value, x: Value, e: Value, eps: float, kept: bool) -> Any:
        dense = norm(x, 1, eps)
        mid = ops.add(dense, norm(e, 2))
        y = ops.mul(ops.residual_add(h, norm(mid, 3)), 2.0)
        return (y, dense) if kept else y

    for eps, kept, inside in ((EPS, False, True), (0.1, False, False), (EPS, True, False)):
        graph = trace(lambda h, x, e, eps=eps, kept=kept: fn(h, x, e, eps, kept), two(e=ROWS))
        (node,) = (node for node in fuse(graph, "cuda").nodes if node.op is ops.post_ff_norm2_endlayer)
        assert (node["w1"] is not None) == inside
