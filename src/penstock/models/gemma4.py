"""Gemma 4: sliding and global attention, a dense MLP beside experts (26B-A4B) or alone, per-layer inputs.

model_type `gemma4` (config under `text_config`) and `gemma4_text`. Sliding layers have values of their own and plain
rotary positions; global layers are wider, rotate a quarter of their channels, and may use their raw keys as values. The
last `num_kv_shared_layers` layers read the cache of the last layer of their kind before them. Axis letters: T tokens,
H query heads, Hkv key/value heads, D width of a head, P width of the per-layer inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from penstock import ops
from penstock.errors import CheckpointError
from penstock.models.config import Fields, layer_types
from penstock.models.family import Family, GgufArchitecture, GgufNames, MlxRules
from penstock.models.gguf_keys import GgufKeys, rope_scaling, share, sliding, stem, vocab_size
from penstock.models.layers import (
    ExpertStack,
    Mlp,
    adjacent,
    apply_rope,
    embed,
    experts,
    flat,
    head_logits,
    heads,
    linear,
    mlp,
    over_ranks,
    read_experts,
    read_head,
    read_mlp,
    stream_norm,
    stream_rows,
)
from penstock.models.rope import Rope, read_rope
from penstock.models.source import Source, Weight
from penstock.models.split import Mesh, Split, mlp_parts, share_heads, share_width, vocabulary_parts
from penstock.models.step import Layout, PagedKV, Step, attend, attend_only
from penstock.ops.array import Array

MODEL_TYPES = ("gemma4", "gemma4_text")

_SLIDING, _FULL = "sliding_attention", "full_attention"
_ROPES = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    _FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True)
class Kind:
    """What the layers of one kind have in common."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None
    values: bool  # a projection of their own; else the raw keys


@dataclass(frozen=True)
class Config:
    model_type: str
    vocab_size: int
    max_positions: int
    dim: int
    layer_types: tuple[str, ...]
    kinds: dict[str, Kind]
    sources: tuple[int, ...]  # per layer the layer whose cache it reads: itself, or the one it shares with
    norm_eps: float
    heads: int
    mlp_widths: tuple[int, ...]
    tied: bool
    softcap: float | None
    per_layer_width: int  # 0: no per-layer inputs
    per_layer_vocab: int
    experts: int  # 0: no experts
    top_k: int
    expert_width: int


def read_config(raw: dict) -> Config:
    """The config of a text model. Raises CheckpointError for what is missing, inconsistent or not supported."""
    top = Fields(raw, "config.json")
    fields = top.table("text_config", top)
    model_type = fields.choice("model_type", MODEL_TYPES, None) or top.choice("model_type", MODEL_TYPES)
    layers = fields.integer("num_hidden_layers", most=4096)
    kinds_of = layer_types(fields, layers, (_SLIDING, _FULL), fields.integer("sliding_window_pattern", 6))
    if "layer_types" not in fields:
        kinds_of = (*kinds_of[:-1], _FULL)  # the last layer is global, whatever the pattern says
    H = fields.integer("num_attention_heads")
    fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    fields.choice("attention_bias", (False,), False)
    fields.choice("use_bidirectional_attention", ("vision",), None)  # text attends causally
    max_positions = fields.integer("max_position_embeddings", 131072)

    shared = fields.integer("num_kv_shared_layers", 0, least=0, most=layers - 1)
    first_shared = layers - shared
    last = {kind: n for n, kind in enumerate(kinds_of[:first_shared])}
    for kind in kinds_of[first_shared:]:
        fields.require(kind in last, f"num_kv_shared_layers is {shared}, expected a layer of {kind} before those")
    width = fields.integer("intermediate_size")
    wide = 2 if fields.boolean("use_double_wide_mlp", False) else 1
    moe = fields.boolean("enable_moe_block", False)
    count = fields.integer("num_experts") if moe else 0
    per_layer = fields.integer("hidden_size_per_layer_input", 256, least=0)
    vocab = fields.integer("vocab_size")
    return Config(
        model_type=model_type,
        vocab_size=vocab,
        max_positions=max_positions,
        dim=fields.integer("hidden_size"),
        layer_types=kinds_of,
        kinds={kind: _kind(fields, kind, kinds_of, H, max_positions) for kind in sorted(set(kinds_of))},
        sources=tuple(n if n < first_shared else last[kind] for n, kind in enumerate(kinds_of)),
        norm_eps=fields.number("rms_norm_eps", above=0),
        heads=H,
        mlp_widths=tuple(width * (wide if 0 < first_shared <= n else 1) for n in range(layers)),
        tied=fields.boolean("tie_word_embeddings", True) or top.boolean("tie_word_embeddings", True),
        softcap=fields.number("final_logit_softcapping", None, above=0),
        per_layer_width=per_layer,
        per_layer_vocab=fields.integer("vocab_size_per_layer_input", vocab) if per_layer else 0,
        experts=count,
        top_k=fields.integer("top_k_experts", most=count) if moe else 0,
        expert_width=fields.integer("moe_intermediate_size") if moe else 0,
    )


def _kind(fields: Fields, kind: str, kinds_of: Sequence[str], H: int, max_positions: int) -> Kind:
    tables = fields.table("rope_parameters", None)
    parameters = tables.table(kind, None) if tables is not None else None
    parameters = parameters or Fields(_ROPES[kind], f"{fields.where}: rope_parameters")
    kv_heads, head_dim, values = fields.integer("num_key_value_heads"), fields.integer("head_dim"), True
    window = fields.integer("sliding_window")
    if kind == _FULL:
        values, window = not fields.boolean("attention_k_eq_v", False), None
        if "per_layer_config" not in fields:
            head_dim = fields.integer("global_head_dim", 512)
            kv_heads = kv_heads if values else fields.integer("num_global_key_value_heads", kv_heads)
    if "per_layer_config" in fields:
        kv_heads, head_dim = _overridden(fields, kind, kinds_of, kv_heads, head_dim)
    fields.require(H % kv_heads == 0, f"num_attention_heads is {H}, expected a multiple of {kv_heads} key/value heads")
    return Kind(H, kv_heads, head_dim, read_rope(fields, head_dim, max_positions, parameters), window, values)


def _overridden(fields: Fields, kind: str, kinds_of: Sequence[str], kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Heads and their width by `per_layer_config`, which newer files have instead of the `global_` keys."""
    tables = fields.table("per_layer_config")
    found = set()
    for n in (n for n, other in enumerate(kinds_of) if other == kind):
        table = tables.table(str(n), None) or Fields({}, tables.where)
        for key in table.values:
            table.require(key in ("head_dim", "num_key_value_heads"), f"{key} is not known, expected it left out")
        found.add((table.integer("num_key_value_heads", kv_heads), table.integer("head_dim", head_dim)))
    tables.require(len(found) == 1, f"layers of {kind} differ, expected them alike")
    return found.pop()


class SharedLayers(Protocol):
    """What attention that shares keys and values, and per-layer inputs, take from a config; here and in Gemma 3n."""

    @property
    def dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def layer_types(self) -> tuple[str, ...]: ...
    @property
    def kinds(self) -> Mapping[str, Kind]: ...
    @property
    def sources(self) -> tuple[int, ...]: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def per_layer_width(self) -> int: ...
    @property
    def per_layer_vocab(self) -> int: ...


# -- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    inputs: tuple[Weight, ...]  # q [H · D, dim], then k [Hkv · D, dim] and v unless they come from elsewhere
    out: Weight
    q_norm: np.ndarray
    k_norm: np.ndarray | None  # None: reads the keys and values of another layer


@dataclass(frozen=True)
class Experts:
    router: Weight
    router_norm: np.ndarray  # router.scale · dim^(−1/2)
    expert_scale: np.ndarray
    routed: ExpertStack
    input_norm: np.ndarray
    dense_norm: np.ndarray  # of the dense MLP's output
    output_norm: np.ndarray


@dataclass(frozen=True)
class PerLayer:
    gate: Weight
    out: Weight
    norm: np.ndarray


@dataclass(frozen=True)
class Layer:
    input_norm: np.ndarray
    attention: Attention
    attention_norm: np.ndarray
    mlp_norm: np.ndarray
    mlp: Mlp
    experts: Experts | None
    output_norm: np.ndarray
    per_layer: PerLayer | None
    scalar: np.ndarray


@dataclass(frozen=True)
class PerLayerInputs:
    table: Weight  # [vocab, layers · P]
    projection: Weight  # [layers · P, dim]
    norm: np.ndarray


@dataclass(frozen=True)
class Weights:
    embed: Weight
    per_layer: PerLayerInputs | None
    layers: tuple[Layer, ...]
    norm: np.ndarray
    head: Weight


def read_weights(source: Source, config: Config) -> Weights:
    dim, count = config.dim, len(config.layer_types)
    table = source.weight("embed_tokens", config.vocab_size, dim)
    inputs = read_inputs(source, config) if config.per_layer_width else None
    layers = tuple(_layer(source, config, n) for n in range(count))
    head = read_head(source, config.tied, table, config.vocab_size, dim)
    return Weights(table, inputs, layers, source.vector("norm", dim), head)


def read_inputs(source: Source, config: SharedLayers) -> PerLayerInputs:
    dim, width = config.dim, len(config.layer_types) * config.per_layer_width
    return PerLayerInputs(
        source.weight("embed_tokens_per_layer", config.per_layer_vocab, width),
        source.weight("per_layer_model_projection", width, dim),
        source.vector("per_layer_projection_norm", config.per_layer_width),
    )


def read_per_layer(source: Source, config: SharedLayers, path: str) -> PerLayer:
    dim, P = config.dim, config.per_layer_width
    return PerLayer(
        source.weight(path + "per_layer_input_gate", P, dim),
        source.weight(path + "per_layer_projection", dim, P),
        source.vector(path + "post_per_layer_input_norm", dim),
    )


def _layer(source: Source, config: Config, n: int) -> Layer:
    dim, path = config.dim, f"layers.{n}."
    per_layer = read_per_layer(source, config, path) if config.per_layer_width else None
    return Layer(
        source.vector(path + "input_layernorm", dim),
        read_attention(source, config, n, path + "self_attn."),
        source.vector(path + "post_attention_layernorm", dim),
        source.vector(path + "pre_feedforward_layernorm", dim),
        read_mlp(source, path + "mlp", dim, config.mlp_widths[n]),
        _experts(source, config, path) if config.experts else None,
        source.vector(path + "post_feedforward_layernorm", dim),
        per_layer,
        source.vector(path + "layer_scalar", 1),
    )


def read_attention(source: Source, config: SharedLayers, n: int, path: str) -> Attention:
    kind, dim = config.kinds[config.layer_types[n]], config.dim
    rows = {"q": kind.heads * kind.head_dim}
    if config.sources[n] == n:
        rows |= {"k": kind.kv_heads * kind.head_dim} | ({"v": kind.kv_heads * kind.head_dim} if kind.values else {})
    return Attention(
        adjacent(*(source.weight(f"{path}{part}_proj", count, dim) for part, count in rows.items())),
        source.weight(path + "o_proj", dim, rows["q"]),
        source.vector(path + "q_norm", kind.head_dim),
        source.vector(path + "k_norm", kind.head_dim) if "k" in rows else None,
    )


def _experts(source: Source, config: Config, path: str) -> Experts:
    dim = config.dim
    return Experts(
        source.weight(path + "router.proj", config.experts, dim),
        source.vector(path + "router.scale", dim) * np.float32(dim**-0.5),
        source.vector(path + "router.per_expert_scale", config.experts),
        read_experts(source, path + "experts", "switch_glu", config.experts, dim, config.expert_width),
        source.vector(path + "pre_feedforward_layernorm_2", dim),
        source.vector(path + "post_feedforward_layernorm_1", dim),
        source.vector(path + "post_feedforward_layernorm_2", dim),
    )


# -- the model -------------------------------------------------------------------------------------------------------


def caches(config: SharedLayers) -> tuple[Layout, ...]:
    """One cache per layer; a layer that shares another's has an empty one."""
    layouts = []
    for n, name in enumerate(config.layer_types):
        kind = config.kinds[name]
        width = kind.kv_heads * kind.head_dim if config.sources[n] == n else 0
        layouts.append(PagedKV(width, width, kind.window))
    return tuple(layouts)


def forward(step: Step, w: Weights, config: Config, cache: Sequence[tuple[Array, Array]]) -> Array:
    """The residual stream after the last layer, [T, dim]; `logits` multiplies its rows with the head."""
    eps = config.norm_eps
    h = ops.mul(embed(step, w.embed, vocab=config.vocab_size), math.sqrt(config.dim))
    inputs = per_layer_inputs(step, h, w.per_layer, config) if w.per_layer is not None else None
    for n, layer in enumerate(w.layers):
        x = stream_norm(step, h, layer.input_norm, eps)
        x = attention(step, x, layer.attention, config, n, cache[config.sources[n]])
        h = ops.residual_add(h, ops.rms_norm(x, layer.attention_norm, eps))
        x = mlp(step, stream_norm(step, h, layer.mlp_norm, eps), layer.mlp, "gelu_tanh")
        if layer.experts is None:
            x = over_ranks(step, x)
        else:
            x, y = both_over_ranks(step, x, moe(step, h, layer.experts, config))
            y = ops.rms_norm(y, layer.experts.output_norm, eps)
            x = ops.add(ops.rms_norm(x, layer.experts.dense_norm, eps), y)
        h = ops.residual_add(h, ops.rms_norm(x, layer.output_norm, eps))
        if layer.per_layer is not None and inputs is not None:
            x = ops.geglu(linear(step, stream_rows(step, h), layer.per_layer.gate), inputs[n])
            x = linear(step, x, layer.per_layer.out)
            h = ops.residual_add(h, ops.rms_norm(x, layer.per_layer.norm, eps))
        h = ops.mul(h, layer.scalar)
    return h


def final_norm(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """The hidden state that the head reads, [T, dim]."""
    return stream_norm(step, h, w.norm, config.norm_eps)


def logits(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """Logits of the next token, float32 [T, vocab]."""
    y = head_logits(step, final_norm(step, h, w, config), w.head, config.vocab_size)
    return y if config.softcap is None else ops.softcap(y, config.softcap)


def attention(step: Step, x: Array, w: Attention, config: SharedLayers, n: int, cache: tuple[Array, Array]) -> Array:
    """Attention with normed heads and scale 1. Values are normed without a weight. x [T, dim] → [T, dim]."""
    kind, eps = config.kinds[config.layer_types[n]], config.norm_eps
    q, *kv = (linear(step, x, part) for part in w.inputs)
    q = ops.rms_norm(heads(q, kind.heads), w.q_norm, eps)
    q = apply_rope(step, q, kind.rope)
    if w.k_norm is None:
        return over_ranks(step, linear(step, flat(attend_only(step, cache, q, 1.0, kind.window)), w.out))
    raw = heads(kv[0], kind.kv_heads)  # [T, Hkv, D]
    k = apply_rope(step, ops.rms_norm(raw, w.k_norm, eps), kind.rope)
    v = ops.rms_norm(heads(kv[1], kind.kv_heads) if kind.values else raw, None, eps)
    return over_ranks(step, linear(step, flat(attend(step, cache, q, k, v, 1.0, kind.window)), w.out))


def moe(step: Step, h: Array, w: Experts, config: Config) -> Array:
    """Sum of the chosen experts; router and experts see the residual stream through norms of their own."""
    scores = linear(step, stream_norm(step, h, w.router_norm, config.norm_eps), w.router, "float32")
    ids, weights = ops.moe_route(scores, w.expert_scale, config.top_k, propagate_nan=True, active=step.active)
    x = stream_norm(step, h, w.input_norm, config.norm_eps)
    return experts(step, x, ids, weights, w.routed, "gelu_tanh")


def both_over_ranks(step: Step, x: Array, y: Array) -> tuple[Array, Array]:
    """Two sums over ranks as one, before their norms."""
    if step.mesh is None:
        return x, y
    dim, both = x.shape[1], ops.all_reduce(ops.beside(x, y))
    return ops.columns(both, 0, dim), ops.columns(both, dim, 2 * dim)


def per_layer_inputs(step: Step, h: Array, w: PerLayerInputs, config: SharedLayers) -> list[Array]:
    """(normed projection of the embedding + row of the second table · √P) / √2, one [T, P] per layer.

    Tokens that the second table does not have (of pictures and sound) have 0 there.
    """
    count, P = len(config.layer_types), config.per_layer_width
    T = h.shape[0]
    # eps belongs to the scaled projection: scaling by dim^(−1/2) inside the norm would divide it by dim
    projected = ops.mul(linear(step, stream_rows(step, h), w.projection), config.dim**-0.5).reshape(T, count, P)
    projected = ops.rms_norm(projected, w.norm, config.norm_eps)
    known = step
    if config.per_layer_vocab < config.vocab_size:
        known = replace(step, tokens=ops.part_ids(step.tokens, 0, config.per_layer_vocab))
    rows = embed(known, w.table, step.dtype, config.per_layer_vocab)
    rows = ops.mul(rows, math.sqrt(P)).reshape(T, count, P)
    both = ops.mul(ops.add(projected, rows), 2**-0.5)
    both = flat(both)
    return [ops.columns(both, n * P, (n + 1) * P) for n in range(count)]


# -- over ranks ------------------------------------------------------------------------------------------------------


def split(config: Config, mesh: Mesh, group: int) -> Split[Config]:
    """Heads, widths of MLPs, experts, vocabulary; per-layer gates and projections are on every rank.

    Sums over ranks: both embeddings, the output of attention, and of each MLP and its experts as one sum of two halves,
    all before the norms behind them.
    """
    own = {
        name: share_heads(mesh, config.heads, kind.kv_heads, kind.head_dim, group, f"heads of {name}")
        for name, kind in config.kinds.items()
    }
    widths = [share_width(mesh, width, group) for width in config.mlp_widths]
    parts = vocabulary_parts(mesh, config.vocab_size)
    if config.per_layer_width:
        parts |= vocabulary_parts(mesh, config.per_layer_vocab, "embed_tokens_per_layer")
    caches: list[tuple[slice, slice]] = []
    for n, name in enumerate(config.layer_types):
        heads, D, path = own[name], config.kinds[name].head_dim, f"layers.{n}."
        parts |= mlp_parts(f"{path}mlp", widths[n], config.mlp_widths[n])
        parts |= {f"{path}self_attn.{part}_proj": heads.kv_rows(D) for part in ("k", "v")}
        parts |= {f"{path}self_attn.q_proj": heads.rows(D), f"{path}self_attn.o_proj": heads.columns(D)}
        span = heads.kv_span(D) if config.sources[n] == n else slice(0, 0)
        caches.append((span, span))
    narrow = None
    if mesh.experts_split and config.experts:
        narrow = (*share_width(mesh, config.expert_width, group), config.expert_width)
    local = replace(
        config,
        kinds={
            name: replace(kind, heads=own[name].count, kv_heads=own[name].kv_count)
            for name, kind in config.kinds.items()
        },
        mlp_widths=tuple(stop - first for first, stop in widths),
        expert_width=config.expert_width if narrow is None else narrow[1] - narrow[0],
    )
    return Split(local, parts, narrow, tuple(caches))


# -- the family ------------------------------------------------------------------------------------------------------


def mlx_rules(raw: Mapping[str, Any], config: Config) -> MlxRules:
    """mlx-lm looks for the size of the vocabulary beside `text_config`, not in it."""
    nested = raw["model_type"] == "gemma4"
    return MlxRules(nested, "experts.switch_glu", config={"vocab_size": config.vocab_size} if nested else {})


def _of_gguf(keys: GgufKeys) -> dict[str, Any]:
    """Which global layers use their keys as values is told by the tensors, the share of their channels that turns by
    `rope_freqs`: 1 for those, a huge number for the others.
    """
    config, kinds, layers = stem(keys, "gemma4_text"), sliding(keys, 6), keys.layers
    wide, narrow = keys.integer("attention.key_length"), keys.integer("attention.key_length_swa")
    for key, value in (
        ("attention.value_length", wide),
        ("rope.dimension_count", wide),
        ("attention.value_length_swa", narrow),
        ("rope.dimension_count_swa", narrow),
    ):
        if keys.integer(key, value) != value:
            raise keys.error(key, f"{value}, the length of keys")
    if (scaling := rope_scaling(keys)) is not None:
        raise keys.error("rope.scaling.type", f"frequencies that are not scaled: {scaling['rope_type']}")
    shared = keys.integer("attention.shared_kv_layers", 0, least=0, most=layers - 1)
    P = keys.integer("embedding_length_per_layer_input", 0, least=0)
    return config | _kv_of_gguf(keys, kinds[: layers - shared], wide, narrow) | _mlp_of_gguf(keys, shared) | {
        "layer_types": kinds,
        "head_dim": narrow,
        "sliding_window": keys.integer("attention.sliding_window"),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": P,
        "vocab_size_per_layer_input": vocab_size(keys.file, "per_layer_token_embd.weight") if P else None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            _SLIDING: {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0, above=0)},
            _FULL: {
                "rope_type": "proportional",
                "rope_theta": config["rope_theta"],
                "partial_rotary_factor": _turning(keys, wide) if _FULL in kinds else 1.0,
            },
        },
    }  # fmt: skip


def _kv_of_gguf(keys: GgufKeys, kinds: Sequence[str], wide: int, narrow: int) -> dict[str, Any]:
    """Heads of keys and values of layers that have their own, those of a kind alike."""
    counts = dict(zip(kinds, keys.per_layer("attention.head_count_kv", int), strict=False))
    for n, (kind, count) in enumerate(zip(kinds, keys.per_layer("attention.head_count_kv", int), strict=False)):
        keys.require(counts[kind] == count, f"attention.head_count_kv of layer {n} is {count}, expected {counts[kind]}")
    full = [n for n, kind in enumerate(kinds) if kind == _FULL]
    valued = {f"blk.{n}.attn_v.weight" in keys.file for n in full}
    keys.require(len(valued) < 2, "some layers of full_attention have attn_v, expected all of them or none")
    sliding_heads, full_heads = (counts.get(kind) or next(iter(counts.values())) for kind in (_SLIDING, _FULL))
    config: dict[str, Any] = {
        "num_key_value_heads": sliding_heads,
        "attention_k_eq_v": valued == {False},
        "global_head_dim": wide,
    }
    if valued == {False}:
        return config | {"num_global_key_value_heads": full_heads}
    if full_heads == sliding_heads:
        return config
    own = {"head_dim": wide, "num_key_value_heads": full_heads}
    layers = [n for n, kind in enumerate(sliding(keys, 6)) if kind == _FULL]
    return config | {"per_layer_config": {str(n): own for n in layers}}


def _mlp_of_gguf(keys: GgufKeys, shared: int) -> dict[str, Any]:
    widths, layers = keys.per_layer("feed_forward_length", int), keys.layers
    twice = tuple(2 * widths[0] if n >= layers - shared else widths[0] for n in range(layers))
    if widths not in ((widths[0],) * layers, twice):
        raise keys.error("feed_forward_length", f"{widths[0]}, or twice that in the last {shared} layers")
    config: dict[str, Any] = {"intermediate_size": widths[0], "use_double_wide_mlp": widths == twice and shared > 0}
    count = keys.integer("expert_count", 0, least=0)
    return config | {"enable_moe_block": count > 0} | {
        "num_experts": count,
        "top_k_experts": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
    } if count else config  # fmt: skip


def _turning(keys: GgufKeys, head_dim: int) -> float:
    name = "rope_freqs.weight"
    where = f"{keys.file.path}: tensor {name}"
    if name not in keys.file:
        raise CheckpointError(f"{keys.file.path}: has no tensor {name!r}, expected it by the metadata")
    factors = keys.file.tensor(name)
    if not isinstance(factors, np.ndarray) or factors.shape != (head_dim // 2,):
        raise CheckpointError(f"{where} has shape {factors.shape}, expected {head_dim // 2} numbers")
    turned = int((factors == 1).sum())
    if not turned or not (factors[:turned] == 1).all() or not (factors[turned:] >= 1e29).all():
        raise CheckpointError(f"{where} has other numbers, expected 1 and, behind them, 1e30")
    return share(2 * turned, head_dim)


_GGUF = GgufNames(
    architectures={"gemma4": GgufArchitecture(_of_gguf, own_factors=True)},
    modules={
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "lm_head": "output",
        "embed_tokens_per_layer": "per_layer_token_embd",
        "per_layer_model_projection": "per_layer_model_proj",
        "per_layer_projection_norm": "per_layer_proj_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm": "post_ffw_norm",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "layer_scalar": "layer_output_scale",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "router.proj": "ffn_gate_inp",
        "experts.switch_glu.gate_proj": "ffn_gate_exps",
        "experts.switch_glu.up_proj": "ffn_up_exps",
        "experts.switch_glu.down_proj": "ffn_down_exps",
        "experts.gate_up_proj": "ffn_gate_up_exps",
        "experts.down_proj": "ffn_down_exps",
    },
    tensors={"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"},
)

FAMILY = Family(
    name="gemma4",
    model_types=MODEL_TYPES,
    read_config=read_config,
    read_weights=read_weights,
    caches=caches,
    forward=forward,
    final_norm=final_norm,
    logits=logits,
    roles={
        "embedding": ("embed_tokens*",),
        "head": ("lm_head",),
        "experts": ("experts.*",),
        "router": ("router.*",),
        "norms": ("*norm", "*norm_?", "layer_scalar"),
        "attention": ("self_attn.*",),
        "dense MLP": ("mlp.*", "per_layer_*"),  # with what brings a layer's own input in
    },
    skipped=tuple(
        f"{prefix}{part}"
        for prefix in ("", "model.")
        for part in ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "multi_modal_projector.", "mtp.")
    ),
    mlx_rules=mlx_rules,
    gguf=_GGUF,
    split=split,
)
