"""Llama and its relatives: attention with rotary positions, a gated MLP or experts, nothing recurrent.

model_type `llama` (Llama 2 and 3, SmolLM2), `mistral` (sliding window), `ministral3` (queries that grow with their
position; `mistral3`: with a vision tower, the config under `text_config`), `qwen2`, `qwen3` (normed heads), `qwen3_moe`
(Qwen3-30B-A3B), `qwen2_moe` (a shared expert with a gate), `mixtral`, `glm4_moe` (GLM-4.5 to 4.7: sigmoid routing with
a bias, a shared expert), `minimax_m2` (sigmoid routing, queries and keys normed over all heads). Axis letters: T
tokens, H query heads, Hkv key/value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock import ops
from penstock.models.config import Fields, expert_groups, layer_types, query_scale, text_part
from penstock.models.family import DraftHead, Family, GgufArchitecture, GgufNames, MlxRules
from penstock.models.gguf_keys import GgufKeys, base, halves, rotation, sigmoid_experts
from penstock.models.layers import (
    ExpertStack,
    Mlp,
    add_blocks,
    adjacent,
    apply_rope,
    embed,
    experts,
    flat,
    head_logits,
    heads,
    linear,
    mlp,
    nothing,
    over_ranks,
    read_experts,
    read_head,
    read_mlp,
    stream_norm,
)
from penstock.models.rope import Rope, read_rope
from penstock.models.source import VISION, Source, Weight
from penstock.models.split import Heads, Mesh, Split, mlp_parts, share_heads, share_width, vocabulary_parts
from penstock.models.step import Layout, PagedKV, Step, attend
from penstock.ops.array import Array

_MOE = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "minimax_m2")
_TEXT = ("llama", "mistral", "ministral3", "qwen2", "qwen3", *_MOE)
_WRAPPER = "mistral3"
MODEL_TYPES = (*_TEXT, _WRAPPER)

_WINDOWED = ("mistral", "mixtral")  # `sliding_window` counts for all layers
_THETA = {"mixtral": 1e6, "minimax_m2": 5e6}  # where rope_theta is missing; of the others 10000
_BLOCK = {"mixtral": "block_sparse_moe", "minimax_m2": "block_sparse_moe"}  # the module of experts; of the others mlp
_TURNED = "rope.dimension_count"  # in configs made of GGUF files, where heads of all these may turn in part
_SHARED = {"qwen2_moe": "shared_expert", "glm4_moe": "shared_experts"}  # the module of the shared expert


@dataclass(frozen=True)
class Config:
    model_type: str
    vocab_size: int
    max_positions: int
    dim: int
    windows: tuple[int | None, ...]  # one per layer
    norm_eps: float
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    head_norms: bool
    joint_norms: Heads | None  # norms of q and k are over all heads: of those the ones that are here
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool
    mlp_width: int
    dense_layers: frozenset[int]
    experts: int
    top_k: int
    expert_width: int
    renormalise: bool
    query_scale: tuple[float, int] | None = None  # beta and length of ops.position_scale
    shared_width: int = 0
    sigmoid: bool = False  # the router's scores, with a bias for the choice; else softmax
    groups: int = 1
    top_groups: int = 1
    routed_scale: float = 1.0


def read_config(raw: dict) -> Config:
    """The config of a text model. Raises CheckpointError for what is missing, inconsistent or not supported."""
    fields, model_type = text_part(raw, _TEXT, _WRAPPER, ("mistral", "ministral3"))
    scaled = model_type == "ministral3"
    layers = fields.integer("num_hidden_layers", most=4096)
    H = fields.integer("num_attention_heads")
    Hkv = fields.integer("num_key_value_heads") if scaled else fields.integer("num_key_value_heads", H)
    fields.require(H % Hkv == 0, f"num_attention_heads is {H}, expected a multiple of num_key_value_heads ({Hkv})")
    dim = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", 128 if model_type == "qwen3" else None)
    if head_dim is None:
        if model_type in ("minimax_m2", "ministral3"):  # transformers and mlx-lm take different ones
            raise fields.error("head_dim", "an integer")
        fields.require(dim % H == 0, f"head_dim is missing, expected it: hidden_size {dim} is no multiple of {H} heads")
        head_dim = dim // H
    fields.choice("hidden_act", ("silu",), "silu")
    fields.choice("pretraining_tp", (1,), 1)
    max_positions = fields.integer("max_position_embeddings", 1 << 15)
    count, dense, more = _read_experts(fields, model_type, layers)
    attention_bias = fields.boolean("attention_bias", False)
    if model_type in _BLOCK or scaled:
        fields.choice("attention_bias", (False,), False)
    inputs_biased = fields.boolean("qkv_bias", True) if model_type == "qwen2_moe" else model_type == "qwen2"
    share = 0.5 if model_type == "glm4_moe" else 1.0
    if model_type == "minimax_m2":
        share = fields.integer("rotary_dim", head_dim, most=head_dim) / head_dim
    width = "intermediate_size" if model_type in _BLOCK else "moe_intermediate_size"
    return Config(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        max_positions=max_positions,
        dim=dim,
        windows=_windows(fields, model_type, layers),
        norm_eps=fields.number("rms_norm_eps", above=0),
        heads=H,
        kv_heads=Hkv,
        head_dim=head_dim,
        rope=read_rope(
            fields,
            head_dim,
            max_positions,
            theta=_THETA.get(model_type, 10000.0),
            share=share,
            whole=model_type not in ("glm4_moe", "minimax_m2") and _TURNED not in fields,
        ),
        head_norms=model_type in ("qwen3", "qwen3_moe")
        or (model_type == "glm4_moe" and fields.boolean("use_qk_norm", False)),
        joint_norms=Heads(0, H, 0, Hkv, H, Hkv) if model_type == "minimax_m2" else None,
        qkv_bias=inputs_biased or (attention_bias and model_type != "qwen2_moe"),
        out_bias=attention_bias and model_type not in ("qwen2", "qwen2_moe", "glm4_moe"),
        mlp_bias=fields.boolean("mlp_bias", False),
        tied=fields.boolean("tie_word_embeddings", False),
        mlp_width=fields.integer("intermediate_size") if dense else 0,
        dense_layers=frozenset(dense),
        experts=count,
        top_k=fields.integer("num_experts_per_tok", most=count) if count else 0,
        expert_width=fields.integer(width) if count else 0,
        query_scale=query_scale(fields) if scaled else None,
        **more,
    )


def _read_experts(fields: Fields, model_type: str, layers: int) -> tuple[int, set[int], dict[str, Any]]:
    """How many experts there are, the layers without any, and the fields of Config about their choice."""
    every = set(range(layers))
    if model_type not in _MOE:
        return 0, every, {"renormalise": True}
    if model_type == "glm4_moe":
        return _read_glm_experts(fields, layers)
    local = "num_local_experts" in fields or model_type in _BLOCK  # Qwen's in newer files, too
    count = fields.integer("num_local_experts" if local else "num_experts", least=int(model_type in _BLOCK))
    if model_type in _BLOCK:
        if model_type == "minimax_m2":
            _check_minimax(fields, layers)
        return count, set(), {"renormalise": True, "sigmoid": model_type == "minimax_m2"}
    step = fields.integer("decoder_sparse_step", 1)
    dense = {n for n in every if not count or (n + 1) % step or n in fields.items("mlp_only_layers", int, ())}
    more: dict[str, Any] = {"renormalise": fields.boolean("norm_topk_prob", False) if count else True}
    if model_type == "qwen2_moe" and count:
        more["shared_width"] = fields.integer("shared_expert_intermediate_size")
    return count, dense, more


def _check_minimax(fields: Fields, layers: int) -> None:
    """Keys of MiniMax's configs that name other architectures than the one that was released."""
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    fields.choice("use_qk_norm", (True,), True)
    fields.choice("qk_norm_type", ("per_layer",), "per_layer")
    fields.choice("use_routing_bias", (True,), True)
    fields.choice("shared_intermediate_size", (0,), 0)
    kinds = fields.items("attn_type_list", int, (1,) * layers)
    fields.require(set(kinds) <= {1}, "attn_type_list has other numbers, expected 1 in every layer (full attention)")


def _read_glm_experts(fields: Fields, layers: int) -> tuple[int, set[int], dict[str, Any]]:
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    fields.choice("topk_method", ("noaux_tc",), "noaux_tc")
    count = fields.integer("n_routed_experts")
    groups, top_groups, _ = expert_groups(fields, count)
    shared = fields.integer("n_shared_experts", 1, least=0)
    return (
        count,
        set(range(min(layers, fields.integer("first_k_dense_replace", 1, least=0)))),
        {
            "renormalise": fields.boolean("norm_topk_prob", True),
            "shared_width": fields.integer("moe_intermediate_size") * shared,
            "sigmoid": True,
            "groups": groups,
            "top_groups": top_groups,
            "routed_scale": fields.number("routed_scaling_factor", 1.0, above=0),
        },
    )


def _windows(fields: Fields, model_type: str, layers: int) -> tuple[int | None, ...]:
    """Mistral's window counts for all layers; Qwen's only with `use_sliding_window`, for all layers of a model with
    experts, from a layer on or by list else.
    """
    unused = model_type == "qwen2_moe" and not fields.boolean("use_sliding_window", False)
    window = None if unused else fields.integer("sliding_window", None)  # transformers writes 0 then
    if model_type == "ministral3":  # transformers and mlx-lm have windows in different layers
        if window is not None:
            raise fields.error("sliding_window", "null")
        return (None,) * len(layer_types(fields, layers, ("full_attention",), default="full_attention"))
    if model_type == "qwen2_moe":  # which layers would have one is told in two ways
        fields.choice("use_sliding_window", (False,), False)
    if model_type not in _WINDOWED and not fields.boolean("use_sliding_window", False):
        window = None
    if window is None:
        return (None,) * layers
    if fields.items("layer_types", str, None) is not None:
        kinds = layer_types(fields, layers, ("sliding_attention", "full_attention"))
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = fields.integer("max_window_layers", 28, least=0) if model_type in ("qwen2", "qwen3") else 0
    return tuple(window if n >= first else None for n in range(layers))


# -- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    inputs: tuple[Weight, ...]  # q [H · D, dim], k and v [Hkv · D, dim]
    out: Weight
    input_biases: tuple[np.ndarray, ...]  # of q, k, v, or none
    out_bias: np.ndarray | None
    q_norm: np.ndarray | None
    k_norm: np.ndarray | None


@dataclass(frozen=True)
class BiasedMlp:
    mlp: Mlp
    gate_bias: np.ndarray
    up_bias: np.ndarray
    down_bias: np.ndarray


@dataclass(frozen=True)
class Experts:
    router: Weight
    bias: np.ndarray | None  # for the choice alone
    routed: ExpertStack
    shared: Mlp | None
    shared_gate: Weight | None  # [1, dim]


@dataclass(frozen=True)
class Layer:
    attention_norm: np.ndarray
    attention: Attention
    mlp_norm: np.ndarray
    mlp: Mlp | BiasedMlp | Experts


@dataclass(frozen=True)
class Weights:
    embed: Weight
    layers: tuple[Layer, ...]
    norm: np.ndarray
    head: Weight


def read_weights(source: Source, config: Config) -> Weights:
    table = source.weight("embed_tokens", config.vocab_size, config.dim)
    layers = tuple(_layer(source, config, n) for n in range(len(config.windows)))
    head = read_head(source, config.tied, table, config.vocab_size, config.dim)
    return Weights(table, layers, source.vector("norm", config.dim), head)


def _layer(source: Source, config: Config, n: int) -> Layer:
    dim, path = config.dim, f"layers.{n}"
    block: Mlp | BiasedMlp | Experts
    if n not in config.dense_layers:
        block = _experts(source, config, f"{path}.{_BLOCK.get(config.model_type, 'mlp')}")
    else:
        block = read_mlp(source, f"{path}.mlp", dim, config.mlp_width)
        if config.mlp_bias:
            width = config.mlp_width
            gate, up, down = (
                source.vector(f"{path}.mlp.{part}_proj.bias", size)
                for part, size in (("gate", width), ("up", width), ("down", dim))
            )
            block = BiasedMlp(block, gate, up, down)
    return Layer(
        source.vector(f"{path}.input_layernorm", dim),
        _attention(source, config, f"{path}.self_attn."),
        source.vector(f"{path}.post_attention_layernorm", dim),
        block,
    )


def _experts(source: Source, config: Config, path: str) -> Experts:
    count, dim, shared = config.experts, config.dim, _SHARED.get(config.model_type)
    spelled = ("gate_proj", "up_proj", "down_proj") if path.endswith(".mlp") else ("w1", "w3", "w2")
    bias = f"{path}.gate.e_score_correction_bias" if path.endswith(".mlp") else f"{path}.e_score_correction_bias"
    return Experts(
        source.weight(f"{path}.gate", count, dim),
        source.vector(bias, count) if config.sigmoid else None,
        read_experts(source, path, "switch_mlp", count, dim, config.expert_width, spelled),
        read_mlp(source, f"{path}.{shared}", dim, config.shared_width) if shared and config.shared_width else None,
        source.weight(f"{path}.shared_expert_gate", 1, dim) if config.model_type == "qwen2_moe" else None,
    )


def _attention(source: Source, config: Config, path: str) -> Attention:
    H, Hkv, D, dim = config.heads, config.kv_heads, config.head_dim, config.dim
    parts = [("q", H * D), ("k", Hkv * D), ("v", Hkv * D)]
    norms = [D, D] if config.head_norms else []
    if config.joint_norms is not None:
        norms = [config.joint_norms.whole * D, config.joint_norms.kv_whole * D]
        parts = [("q", norms[0]), ("k", norms[1]), parts[2]]
    inputs = adjacent(*(source.weight(f"{path}{part}_proj", rows, dim) for part, rows in parts))
    biases = [source.vector(f"{path}{part}_proj.bias", rows) for part, rows in parts] if config.qkv_bias else []
    return Attention(
        inputs,
        source.weight(path + "o_proj", dim, H * D),
        tuple(biases),
        source.vector(path + "o_proj.bias", dim) if config.out_bias else None,
        source.vector(path + "q_norm", norms[0]) if norms else None,
        source.vector(path + "k_norm", norms[1]) if norms else None,
    )


# -- the model -------------------------------------------------------------------------------------------------------


def caches(config: Config) -> tuple[Layout, ...]:
    kv = config.kv_heads * config.head_dim
    return tuple(PagedKV(kv, kv, window) for window in config.windows)


def forward(step: Step, w: Weights, config: Config, cache: Sequence[tuple[Array, Array]]) -> Array:
    """The residual stream after the last layer, [T, dim]; `logits` multiplies its rows with the head."""
    h = embed(step, w.embed, vocab=config.vocab_size)
    for layer, window, state in zip(w.layers, config.windows, cache, strict=True):
        h = decoder_layer(step, h, layer, config, state, window)
    return h


def decoder_layer(
    step: Step, h: Array, layer: Layer, config: Config, state: tuple[Array, Array], window: int | None = None
) -> Array:
    """The residual stream h [T, dim] after one layer."""
    x = stream_norm(step, h, layer.attention_norm, config.norm_eps)
    h = ops.residual_add(h, attention(step, x, layer.attention, config, state, window))
    x = stream_norm(step, h, layer.mlp_norm, config.norm_eps)
    return feed_forward(step, h, x, layer.mlp, config)


def final_norm(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """The hidden state that the head reads, [T, dim]."""
    return stream_norm(step, h, w.norm, config.norm_eps)


def logits(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """Logits of the next token, float32 [T, vocab]."""
    return head_logits(step, final_norm(step, h, w, config), w.head, config.vocab_size)


def attention(
    step: Step, x: Array, w: Attention, config: Config, cache: tuple[Array, Array], window: int | None
) -> Array:
    """Causal attention with rotary positions. x [T, dim] → [T, dim]."""
    q, k, v = (linear(step, x, part) for part in w.inputs)
    if w.input_biases:
        q, k, v = (ops.add(part, bias) for part, bias in zip((q, k, v), w.input_biases, strict=True))
    if config.joint_norms is not None:
        q, k = _jointly_normed(q, k, w, config, config.joint_norms)
    if config.query_scale is not None:
        q = ops.position_scale(q, step.positions, *config.query_scale)
    q, k, v = heads(q, config.heads), heads(k, config.kv_heads), heads(v, config.kv_heads)  # [T, H, D]
    if config.head_norms:
        q, k = ops.rms_norm(q, w.q_norm, config.norm_eps), ops.rms_norm(k, w.k_norm, config.norm_eps)
    q, k = apply_rope(step, q, config.rope), apply_rope(step, k, config.rope)
    y = attend(step, cache, q, k, v, config.head_dim**-0.5, window)
    y = over_ranks(step, linear(step, flat(y), w.out))
    return y if w.out_bias is None else ops.add(y, w.out_bias)


def _jointly_normed(q: Array, k: Array, w: Attention, config: Config, own: Heads) -> tuple[Array, Array]:
    """q and k of all heads, normed over all of them; of a split model then the columns of the heads that are here."""
    q, k = ops.rms_norm(q, w.q_norm, config.norm_eps), ops.rms_norm(k, w.k_norm, config.norm_eps)
    D = config.head_dim
    if own.count < own.whole:
        q = ops.columns(q, own.first * D, own.stop * D)
    if own.kv_count < own.kv_whole:
        k = ops.columns(k, own.kv_first * D, own.kv_stop * D)
    return q, k


def feed_forward(step: Step, h: Array, x: Array, w: Mlp | BiasedMlp | Experts, config: Config) -> Array:
    """h + the second half of a layer of x, h and x [T, dim]."""
    if isinstance(w, Experts):
        return moe(step, h, x, w, config)
    if isinstance(w, Mlp):
        return ops.residual_add(h, over_ranks(step, mlp(step, x, w)))
    y = nothing(x)
    if w.mlp.gate.shape[0]:
        gate, up = linear(step, x, w.mlp.gate), linear(step, x, w.mlp.up)
        y = linear(step, ops.swiglu(ops.add(gate, w.gate_bias), ops.add(up, w.up_bias)), w.mlp.down)
    return ops.residual_add(h, ops.add(over_ranks(step, y), w.down_bias))


def moe(step: Step, h: Array, x: Array, w: Experts, config: Config) -> Array:
    """h + Σ chosen experts of x + shared expert of x, h and x [T, dim]."""
    logits = linear(step, x, w.router, "float32")
    score = None if w.shared_gate is None else linear(step, x, w.shared_gate, "float32")
    if config.sigmoid:
        choice = (config.groups, config.top_groups, config.top_k, config.renormalise, config.routed_scale)
        ids, weights = ops.moe_group_route(logits, w.bias, *choice, propagate_nan=True, active=step.active)
    else:
        ids, weights = ops.moe_softmax_topk(logits, config.top_k, propagate_nan=True, active=step.active)
        if config.renormalise:
            weights = ops.moe_normalize_weights(weights)
    if w.shared is None:
        return ops.residual_add(h, over_ranks(step, experts(step, x, ids, weights, w.routed)))
    # before the experts, which may still be on their way; a rank may have no part of it
    shared = mlp(step, x, w.shared) if w.shared.gate.shape[0] else None
    routed = experts(step, x, ids, weights, w.routed)
    return add_blocks(step, h, shared, None if shared is None else score, routed)


# -- over ranks ------------------------------------------------------------------------------------------------------


def split(config: Config, mesh: Mesh, group: int) -> Split[Config]:
    """Heads, widths of MLPs, experts, vocabulary. Sums over ranks: the embedding, the output of attention before its
    bias, and of each MLP or its experts and shared expert before its bias. What makes queries and keys that are normed
    over all heads is on every rank.
    """
    D = config.head_dim
    own = share_heads(mesh, config.heads, config.kv_heads, D, group)
    dense, shared = share_width(mesh, config.mlp_width, group), share_width(mesh, config.shared_width, group)
    parts = {
        **vocabulary_parts(mesh, config.vocab_size),
        **mlp_parts("mlp", dense, config.mlp_width),
        **mlp_parts(f"mlp.{_SHARED.get(config.model_type, 'shared_expert')}", shared, config.shared_width),
        "self_attn.o_proj": own.columns(D),
    }
    for name, part in (("q", own.rows(D)), ("k", own.kv_rows(D)), ("v", own.kv_rows(D))):
        if config.joint_norms is not None and name != "v":
            continue
        parts |= {f"self_attn.{name}_proj": part, f"self_attn.{name}_proj.bias": part}
    width = None
    if mesh.experts_split and config.experts:
        width = (*share_width(mesh, config.expert_width, group), config.expert_width)
    local = replace(
        config,
        heads=own.count,
        kv_heads=own.kv_count,
        joint_norms=config.joint_norms and own,
        mlp_width=dense[1] - dense[0],
        shared_width=shared[1] - shared[0],
        expert_width=config.expert_width if width is None else width[1] - width[0],
    )
    span = own.kv_span(D)
    return Split(local, parts, width, ((span, span),) * len(config.windows))


# -- the family ------------------------------------------------------------------------------------------------------


def _of_llama(keys: GgufKeys) -> dict[str, Any]:
    """A window counts for all layers, as the first Mistral has it. With experts it is Mixtral."""
    window = _window(keys)
    more = {} if window is None else {"sliding_window": window}
    if keys.integer("expert_count", 0, least=0):
        return _of_mixtral(keys) | more
    return _dense_config(keys, "llama" if window is None else "mistral") | more


def _of_mixtral(keys: GgufKeys) -> dict[str, Any]:
    return _attention_config(keys, "mixtral") | {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "intermediate_size": keys.integer("expert_feed_forward_length", None) or keys.integer("feed_forward_length"),
    }


def _of_qwen(keys: GgufKeys, model_type: str) -> dict[str, Any]:
    """Biases of q, k and v belong to Qwen2, and its config.json says nothing of them."""
    if _window(keys) is not None:
        raise keys.error("attention.sliding_window", "none: of the models in GGUF only those of llama may have one")
    config = _dense_config(keys, model_type)
    return config | {"attention_bias": False} if model_type == "qwen2" else config


def _of_mistral3(keys: GgufKeys) -> dict[str, Any]:
    """Ministral 3, and Mistral Small 3.1, whose queries do not grow with their position."""
    window, beta = _window(keys), keys.number("attention.temperature_scale", 0.0)
    if window is not None:
        raise keys.error("attention.sliding_window", "none")
    config = _dense_config(keys, "ministral3" if beta else "mistral")
    scaling = config.pop("rope_scaling", None)
    if scaling is not None and (gain := keys.number("rope.scaling.yarn_log_multiplier", 0.0)):
        scaling |= {"mscale": 1.0, "mscale_all_dim": gain}  # mscale is in no key, and 1 in all released models
    if not beta:
        return config | ({} if scaling is None else {"rope_scaling": scaling})
    if scaling is None or scaling["rope_type"] != "yarn":
        raise keys.error("rope.scaling.type", "'yarn', whose original_context_length is where queries begin to grow")
    return config | {
        "rope_parameters": scaling | {"rope_theta": config["rope_theta"], "llama_4_scaling_beta": beta}
    }  # fmt: skip


def _window(keys: GgufKeys) -> int | None:
    window = keys.integer("attention.sliding_window", 0, least=0)
    if not window or window >= keys.integer("context_length"):
        return None
    if "attention.sliding_window_pattern" in keys:
        raise keys.error("attention.sliding_window", "none: not by layers")
    return window


def _attention_config(keys: GgufKeys, model_type: str) -> dict[str, Any]:
    config = base(keys, model_type)
    biased = {
        "attention_bias": keys.has(r"blk\.\d+\.attn_(q|k|v|output)\.bias"),
        "mlp_bias": keys.has(r"blk\.\d+\.ffn_(gate|up|down)\.bias"),
    }
    turned = rotation(keys, config["head_dim"])
    if "partial_rotary_factor" in turned:
        turned[_TURNED] = keys.integer(_TURNED)
    return config | biased | turned


def _dense_config(keys: GgufKeys, model_type: str) -> dict[str, Any]:
    config = _attention_config(keys, model_type)
    if keys.integer("expert_count", 0, least=0):
        raise keys.error("expert_count", "no experts")
    return config | {"intermediate_size": keys.integer("feed_forward_length")}


def _of_qwen3_moe(keys: GgufKeys) -> dict[str, Any]:
    return _of_experts(keys, "qwen3_moe")


def _of_experts(keys: GgufKeys, model_type: str) -> dict[str, Any]:
    if _window(keys) is not None:
        raise keys.error("attention.sliding_window", "none: of the models in GGUF only those of llama may have one")
    return _attention_config(keys, model_type) | {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": keys.boolean("expert_weights_norm", model_type == "qwen3_moe"),
    }


def _of_qwen2_moe(keys: GgufKeys) -> dict[str, Any]:
    config = _of_experts(keys, "qwen2_moe")
    width = keys.integer("expert_shared_feed_forward_length", None) or keys.integer("feed_forward_length")
    return config | {"shared_expert_intermediate_size": width, "qkv_bias": config.pop("attention_bias")}


def _of_glm(keys: GgufKeys) -> dict[str, Any]:
    keys.accept("rope.dimension_sections")  # of pictures
    return (
        {"rope_scaling": None}
        | _attention_config(keys, "glm4_moe")
        | sigmoid_experts(keys)
        | {
            "intermediate_size": keys.integer("feed_forward_length"),
            "use_qk_norm": keys.has(r"blk\.\d+\.attn_q_norm\.weight"),
        }
    )


def _of_minimax(keys: GgufKeys) -> dict[str, Any]:
    config, chosen = base(keys, "minimax_m2"), sigmoid_experts(keys)
    for key, value in (("n_shared_experts", 0), ("n_group", 1), ("first_k_dense_replace", 0)):
        keys.require(chosen[key] == value, f"experts have {key} {chosen[key]}, expected {value}")
    turned = rotation(keys, config["head_dim"])
    turned.pop("partial_rotary_factor", None)
    return (
        config
        | turned
        | {
            "rotary_dim": keys.integer("rope.dimension_count", config["head_dim"]),
            "shared_intermediate_size": 0,
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "num_local_experts": chosen["n_routed_experts"],
            "num_experts_per_tok": chosen["num_experts_per_tok"],
            "intermediate_size": chosen["moe_intermediate_size"],
        }
    )


_EXPERTS = {
    f"{block}.{path}": name
    for block in ("mlp", "block_sparse_moe")
    for path, name in {
        "gate": "ffn_gate_inp",
        "switch_mlp.gate_proj": "ffn_gate_exps",
        "switch_mlp.up_proj": "ffn_up_exps",
        "switch_mlp.down_proj": "ffn_down_exps",
        "experts.gate_up_proj": "ffn_gate_up_exps",
        "experts.down_proj": "ffn_down_exps",
    }.items()
}
_GGUF = GgufNames(
    architectures={
        "llama": GgufArchitecture(_of_llama, rows=halves),
        "mistral3": GgufArchitecture(_of_mistral3, rows=halves),
        "qwen2": GgufArchitecture(lambda keys: _of_qwen(keys, "qwen2")),
        "qwen3": GgufArchitecture(lambda keys: _of_qwen(keys, "qwen3")),
        "qwen3moe": GgufArchitecture(_of_qwen3_moe),
        "qwen2moe": GgufArchitecture(_of_qwen2_moe),
        "glm4moe": GgufArchitecture(_of_glm, {"post_attention_layernorm": "post_attention_norm"}),
        "minimax-m2": GgufArchitecture(_of_minimax),
    },
    modules={
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        **_EXPERTS,
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        **{
            f"mlp.{shared}.{part}_proj": f"ffn_{part}_shexp"
            for shared in ("shared_expert", "shared_experts")
            for part in ("gate", "up", "down")
        },
    },
    tensors={
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    },
)


def mlx_rules(raw: Mapping[str, Any], config: Config) -> MlxRules:
    """mlx-lm keeps the biases of routers as they are, and GLM's routers dense; only `text_config` says that a head is
    tied.
    """
    if raw["model_type"] == _WRAPPER:
        text = raw["text_config"]
        untold = config.tied and text.get("tie_word_embeddings") is None
        return MlxRules(nested=True, config={"text_config": {**text, "tie_word_embeddings": True}} if untold else {})
    if not config.sigmoid:
        return MlxRules()
    dense = ("mlp.gate",) if config.model_type == "glm4_moe" else ()
    return MlxRules(uncast=("e_score_correction_bias",), unquantized=dense)


FAMILY = Family(
    name="llama",
    model_types=MODEL_TYPES,
    read_config=read_config,
    read_weights=read_weights,
    caches=caches,
    forward=forward,
    final_norm=final_norm,
    logits=logits,
    roles={
        "embedding": ("embed_tokens",),
        "head": ("lm_head",),
        "experts": ("*.switch_mlp.*", "*.experts.*"),
        "shared expert": ("mlp.shared_expert.*", "mlp.shared_experts.*"),
        "router": ("*.gate", "*.e_score_correction_bias", "mlp.shared_expert_gate"),
        "norms": ("*norm",),
        "attention": ("self_attn.*",),
        "dense MLP": ("mlp.*",),
    },
    skipped=(*VISION, "mtp."),
    mlx_rules=mlx_rules,
    gguf=_GGUF,
    split=split,
    draft_head=DraftHead(
        model_types=("glm4_moe",),
        depth="num_nextn_predict_layers",
        spelling="nextn",
        drafter=lambda model_type: f"{model_type}_mtp",
        config=lambda config: replace(config, windows=(None,), dense_layers=frozenset()),
        read_layer=lambda source, config: _layer(source, config, 0),
        read_norm=lambda source, path, size: source.vector(path, size),
        layer=decoder_layer,
        sees_first=False,
    ),
)
