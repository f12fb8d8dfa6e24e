"""gpt-oss: attention with sinks, every other layer in a sliding window, and experts with biases and a clamped SwiGLU.

model_type `gpt_oss` (gpt-oss-20b and -120b), in mlx-lm's layout (experts in mxfp4 or any other format), as released
(blocks of mxfp4, rows of gate and up in turns) or dense as transformers has it (columns in turns). Axis letters: T
tokens, H query heads, Hkv key/value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock import ops
from penstock.errors import InvalidArgument
from penstock.models.config import Fields, layer_types
from penstock.models.family import Family, GgufArchitecture, GgufNames, MlxRules
from penstock.models.gguf_keys import GgufKeys, base, rotation, sliding
from penstock.models.layers import (
    ExpertStack,
    adjacent,
    apply_rope,
    columns_as_rows,
    embed,
    flat,
    head_logits,
    heads,
    in_turns,
    linear,
    nothing,
    over_ranks,
    read_experts,
    read_head,
    stream_norm,
)
from penstock.models.rope import Rope, read_rope
from penstock.models.source import Source, Weight
from penstock.models.split import Mesh, Part, Split, share_heads, vocabulary_parts
from penstock.models.step import Layout, PagedKV, Step, attend
from penstock.ops.array import Array

_KINDS = ("sliding_attention", "full_attention")


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
    tied: bool
    experts: int
    top_k: int
    expert_width: int
    limit: float
    alpha: float


def read_config(raw: dict) -> Config:
    """The config of a text model. Raises CheckpointError for what is missing, inconsistent or not supported."""
    fields = Fields(raw, "config.json")
    layers = fields.integer("num_hidden_layers", most=4096)
    H, Hkv = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    fields.require(H % Hkv == 0, f"num_attention_heads is {H}, expected a multiple of num_key_value_heads ({Hkv})")
    fields.choice("hidden_act", ("silu",), "silu")
    fields.choice("attention_bias", (True,), True)
    D, count = fields.integer("head_dim", 64), fields.integer("num_local_experts")
    max_positions = fields.integer("max_position_embeddings", 131072)
    window = fields.integer("sliding_window", 128)
    kinds = [_KINDS[n % 2] for n in range(layers)]
    if fields.items("layer_types", str, None) is not None:
        kinds = list(layer_types(fields, layers, _KINDS))
    return Config(
        model_type=fields.choice("model_type", ("gpt_oss",)),
        vocab_size=fields.integer("vocab_size"),
        max_positions=max_positions,
        dim=fields.integer("hidden_size"),
        windows=tuple(window if kind == _KINDS[0] else None for kind in kinds),
        norm_eps=fields.number("rms_norm_eps", 1e-5, above=0),
        heads=H,
        kv_heads=Hkv,
        head_dim=D,
        rope=read_rope(fields, D, max_positions, theta=150000.0, whole=True),
        tied=fields.boolean("tie_word_embeddings", False),
        experts=count,
        top_k=fields.integer("num_experts_per_tok", 4, most=count),
        expert_width=fields.integer("intermediate_size"),
        limit=fields.number("swiglu_limit", 7.0, above=0),
        alpha=fields.number("swiglu_alpha", 1.702, above=0),
    )


# -- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    inputs: tuple[Weight, ...]  # q [H · D, dim], k and v [Hkv · D, dim]
    input_biases: tuple[np.ndarray, ...]
    out: Weight
    out_bias: np.ndarray
    sinks: np.ndarray  # [H]


@dataclass(frozen=True)
class Experts:
    router: Weight
    router_bias: np.ndarray
    routed: ExpertStack
    gate_bias: np.ndarray  # [E, width]
    up_bias: np.ndarray
    down_bias: np.ndarray  # [E, dim]


@dataclass(frozen=True)
class Layer:
    attention_norm: np.ndarray
    attention: Attention
    mlp_norm: np.ndarray
    mlp: Experts


@dataclass(frozen=True)
class Weights:
    embed: Weight
    layers: tuple[Layer, ...]
    norm: np.ndarray
    head: Weight


def read_weights(source: Source, config: Config) -> Weights:
    table = source.weight("embed_tokens", config.vocab_size, config.dim)
    layers = tuple(_layer(source, config, f"layers.{n}") for n in range(len(config.windows)))
    head = read_head(source, config.tied, table, config.vocab_size, config.dim)
    return Weights(table, layers, source.vector("norm", config.dim), head)


def _layer(source: Source, config: Config, path: str) -> Layer:
    dim, E = config.dim, config.experts
    return Layer(
        source.vector(f"{path}.input_layernorm", dim),
        _attention(source, config, f"{path}.self_attn."),
        source.vector(f"{path}.post_attention_layernorm", dim),
        Experts(
            source.weight(f"{path}.mlp.router", E, dim),
            source.vector(f"{path}.mlp.router.bias", E),
            *_experts(source, config, f"{path}.mlp"),
        ),
    )


def _experts(source: Source, config: Config, path: str) -> tuple[ExpertStack, np.ndarray, np.ndarray, np.ndarray]:
    """The stacks of a layer, and the biases of gate, up and down."""
    E, dim, width = config.experts, config.dim, config.expert_width
    base = f"{path}.experts"
    if f"{base}.gate_proj" in source or f"{base}.gate_up_proj" not in source:
        biases = (("gate", width), ("up", width), ("down", dim))
        gate, up, down = (source.vector(f"{base}.{part}_proj.bias", E, size) for part, size in biases)
        return read_experts(source, path, "experts", E, dim, width), gate, up, down
    if f"{base}.gate_up_proj_blocks" in source:
        down = source.stack([f"{base}.down_proj"], E, dim, width)
        stack = ExpertStack(*in_turns(source.stack([f"{base}.gate_up_proj"], E, 2 * width, dim)), down)
    else:
        gate, up = columns_as_rows(source.stack([f"{base}.gate_up_proj"], E, dim, 2 * width), 2)
        (down,) = columns_as_rows(source.stack([f"{base}.down_proj"], E, width, dim))
        stack = ExpertStack(gate, up, down)
    gate_up = source.vector(f"{base}.gate_up_proj_bias", E, 2 * width)
    gate, up = (np.ascontiguousarray(gate_up[:, first::2]) for first in (0, 1))
    return stack, gate, up, source.vector(f"{base}.down_proj_bias", E, dim)


def _attention(source: Source, config: Config, path: str) -> Attention:
    H, Hkv, D, dim = config.heads, config.kv_heads, config.head_dim, config.dim
    parts = (("q", H * D), ("k", Hkv * D), ("v", Hkv * D))
    return Attention(
        adjacent(*(source.weight(f"{path}{part}_proj", rows, dim) for part, rows in parts)),
        tuple(source.vector(f"{path}{part}_proj.bias", rows) for part, rows in parts),
        source.weight(f"{path}o_proj", dim, H * D),
        source.vector(f"{path}o_proj.bias", dim),
        source.vector(f"{path}sinks", H),
    )


# -- the model -------------------------------------------------------------------------------------------------------


def caches(config: Config) -> tuple[Layout, ...]:
    kv = config.kv_heads * config.head_dim
    return tuple(PagedKV(kv, kv, window) for window in config.windows)


def forward(step: Step, w: Weights, config: Config, cache: Sequence[tuple[Array, Array]]) -> Array:
    """The residual stream after the last layer, [T, dim]; `logits` multiplies its rows with the head."""
    h = embed(step, w.embed, vocab=config.vocab_size)
    for layer, window, state in zip(w.layers, config.windows, cache, strict=True):
        x = stream_norm(step, h, layer.attention_norm, config.norm_eps)
        h = ops.residual_add(h, attention(step, x, layer.attention, config, state, window))
        x = stream_norm(step, h, layer.mlp_norm, config.norm_eps)
        h = ops.residual_add(h, feed_forward(step, x, layer.mlp, config))
    return h


def logits(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """Logits of the next token, float32 [T, vocab]."""
    return head_logits(step, stream_norm(step, h, w.norm, config.norm_eps), w.head, config.vocab_size)


def attention(
    step: Step, x: Array, w: Attention, config: Config, cache: tuple[Array, Array], window: int | None
) -> Array:
    """Causal attention with rotary positions and sinks. x [T, dim] → [T, dim]."""
    q, k, v = (ops.add(linear(step, x, part), bias) for part, bias in zip(w.inputs, w.input_biases, strict=True))
    q, k, v = heads(q, config.heads), heads(k, config.kv_heads), heads(v, config.kv_heads)  # [T, H, D]
    q, k = apply_rope(step, q, config.rope), apply_rope(step, k, config.rope)
    y = attend(step, cache, q, k, v, config.head_dim**-0.5, window, w.sinks)
    return ops.add(over_ranks(step, linear(step, flat(y), w.out)), w.out_bias)


def feed_forward(step: Step, x: Array, w: Experts, config: Config) -> Array:
    """The experts of a layer, x [T, dim] → [T, dim]: softmax over the scores of the chosen ones."""
    scores = ops.add(linear(step, x, w.router, "float32"), w.router_bias)
    ids, weights = ops.moe_softmax_topk(scores, config.top_k, propagate_nan=True, active=step.active)
    weights = ops.moe_normalize_weights(weights)
    stack = w.routed
    if 0 in stack.gate.shape:  # a rank that has none of them
        return over_ranks(step, nothing(x))
    y = ops.moe_biased_forward(
        x, ids, weights, stack.gate, stack.up, stack.down, w.gate_bias, w.up_bias, w.down_bias, stack.slot_of,
        config.limit, config.alpha, step.activations,
    )  # fmt: skip
    return over_ranks(step, y)


# -- over ranks ------------------------------------------------------------------------------------------------------


def split(config: Config, mesh: Mesh, group: int) -> Split[Config]:
    """Heads with their sinks, experts, vocabulary. Sums over ranks: the embedding, the output of attention before its
    bias, and of the experts.
    """
    if mesh.experts_split:
        raise InvalidArgument("expert parallelism is off, expected it on: experts with biases are not split by width")
    D = config.head_dim
    own = share_heads(mesh, config.heads, config.kv_heads, D, group)
    parts = {
        **vocabulary_parts(mesh, config.vocab_size),
        "self_attn.o_proj": own.columns(D),
        "self_attn.sinks": Part(-2, slice(own.first, own.stop), config.heads),
    }
    for name, part in (("q", own.rows(D)), ("k", own.kv_rows(D)), ("v", own.kv_rows(D))):
        parts |= {f"self_attn.{name}_proj": part, f"self_attn.{name}_proj.bias": part}
    span = own.kv_span(D)
    local = replace(config, heads=own.count, kv_heads=own.kv_count)
    return Split(local, parts, None, ((span, span),) * len(config.windows))


# -- the family ------------------------------------------------------------------------------------------------------


def _of_gguf(keys: GgufKeys) -> dict[str, Any]:
    """Of YaRN's `truncate` and the limit of SwiGLU files say nothing: the released models have one value each."""
    config = base(keys, "gpt_oss")
    turned = rotation(keys, config["head_dim"])
    if "rope_scaling" in turned:
        turned["rope_scaling"]["truncate"] = False
    return config | turned | {
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": sliding(keys, 2),
    }  # fmt: skip


_GGUF = GgufNames(
    architectures={"gpt-oss": GgufArchitecture(_of_gguf)},
    modules={
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.sinks": "attn_sinks",
        "mlp.router": "ffn_gate_inp",
        "mlp.experts.gate_proj": "ffn_gate_exps",
        "mlp.experts.up_proj": "ffn_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
    },
)

FAMILY = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    read_config=read_config,
    read_weights=read_weights,
    caches=caches,
    forward=forward,
    logits=logits,
    roles={
        "embedding": ("embed_tokens",),
        "head": ("lm_head",),
        "experts": ("mlp.experts.*",),
        "router": ("mlp.router", "mlp.router.*"),
        "norms": ("*norm",),
        "attention": ("self_attn.*",),
    },
    mlx_rules=lambda raw, config: MlxRules(in_columns=True),
    gguf=_GGUF,
    split=split,
)
