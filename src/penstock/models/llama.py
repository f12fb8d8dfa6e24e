"""Llama and its relatives: attention with rotary positions, a gated MLP or experts, nothing recurrent.

model_type `llama` (Llama 2 and 3, SmolLM2), `mistral` (sliding window), `qwen2`, `qwen3` (normed heads), `qwen3_moe`
(Qwen3-30B-A3B). Axis letters: T tokens, H query heads, Hkv key/value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock import ops
from penstock.models.config import Fields, layer_types
from penstock.models.family import Family, GgufArchitecture, GgufNames
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
    nothing,
    over_ranks,
    read_experts,
    read_head,
    read_mlp,
    stream_norm,
)
from penstock.models.rope import Rope, read_rope
from penstock.models.source import Source, Weight
from penstock.models.split import Mesh, Split, mlp_parts, share_heads, share_width, vocabulary_parts
from penstock.models.step import Layout, PagedKV, Step, attend
from penstock.ops.array import Array

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


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


def read_config(raw: dict) -> Config:
    """The config of a text model. Raises CheckpointError for what is missing, inconsistent or not supported."""
    fields = Fields(raw, "config.json")
    model_type = fields.choice("model_type", MODEL_TYPES)
    layers = fields.integer("num_hidden_layers", most=4096)
    H = fields.integer("num_attention_heads")
    Hkv = fields.integer("num_key_value_heads", H)
    fields.require(H % Hkv == 0, f"num_attention_heads is {H}, expected a multiple of num_key_value_heads ({Hkv})")
    dim = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", 128 if model_type == "qwen3" else None)
    if head_dim is None:
        fields.require(dim % H == 0, f"head_dim is missing, expected it: hidden_size {dim} is no multiple of {H} heads")
        head_dim = dim // H
    fields.choice("hidden_act", ("silu",), "silu")
    fields.choice("pretraining_tp", (1,), 1)
    max_positions = fields.integer("max_position_embeddings", 1 << 15)
    count_key = "num_local_experts" if "num_local_experts" in fields else "num_experts"  # as newer files spell it
    count = fields.integer(count_key, least=0) if model_type == "qwen3_moe" else 0
    step = fields.integer("decoder_sparse_step", 1)
    dense = {n for n in range(layers) if not count or (n + 1) % step or n in fields.items("mlp_only_layers", int, ())}
    attention_bias = fields.boolean("attention_bias", False)
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
        rope=read_rope(fields, head_dim, max_positions, theta=10000.0),
        head_norms=model_type in ("qwen3", "qwen3_moe"),
        qkv_bias=attention_bias or model_type == "qwen2",
        out_bias=attention_bias and model_type != "qwen2",
        mlp_bias=fields.boolean("mlp_bias", False),
        tied=fields.boolean("tie_word_embeddings", False),
        mlp_width=fields.integer("intermediate_size") if dense else 0,
        dense_layers=frozenset(dense),
        experts=count,
        top_k=fields.integer("num_experts_per_tok", most=count) if count else 0,
        expert_width=fields.integer("moe_intermediate_size") if count else 0,
        renormalise=fields.boolean("norm_topk_prob", False) if count else True,
    )


def _windows(fields: Fields, model_type: str, layers: int) -> tuple[int | None, ...]:
    """Mistral's window counts for all layers; Qwen's only with `use_sliding_window`, for all layers of a model with
    experts, from a layer on or by list else.
    """
    window = fields.integer("sliding_window", None)
    if model_type != "mistral" and not fields.boolean("use_sliding_window", False):
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
    routed: ExpertStack


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
        routed = read_experts(source, f"{path}.mlp", "switch_mlp", config.experts, dim, config.expert_width)
        block = Experts(source.weight(f"{path}.mlp.gate", config.experts, dim), routed)
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


def _attention(source: Source, config: Config, path: str) -> Attention:
    H, Hkv, D, dim = config.heads, config.kv_heads, config.head_dim, config.dim
    parts = (("q", H * D), ("k", Hkv * D), ("v", Hkv * D))
    inputs = adjacent(*(source.weight(f"{path}{part}_proj", rows, dim) for part, rows in parts))
    biases = [source.vector(f"{path}{part}_proj.bias", rows) for part, rows in parts] if config.qkv_bias else []
    return Attention(
        inputs,
        source.weight(path + "o_proj", dim, H * D),
        tuple(biases),
        source.vector(path + "o_proj.bias", dim) if config.out_bias else None,
        source.vector(path + "q_norm", D) if config.head_norms else None,
        source.vector(path + "k_norm", D) if config.head_norms else None,
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
    q, k, v = heads(q, config.heads), heads(k, config.kv_heads), heads(v, config.kv_heads)  # [T, H, D]
    if w.q_norm is not None:
        q, k = ops.rms_norm(q, w.q_norm, config.norm_eps), ops.rms_norm(k, w.k_norm, config.norm_eps)
    q, k = apply_rope(step, q, config.rope), apply_rope(step, k, config.rope)
    y = attend(step, cache, q, k, v, config.head_dim**-0.5, window)
    y = over_ranks(step, linear(step, flat(y), w.out))
    return y if w.out_bias is None else ops.add(y, w.out_bias)


def feed_forward(step: Step, x: Array, w: Mlp | BiasedMlp | Experts, config: Config) -> Array:
    """The second half of a layer, x [T, dim] → [T, dim]."""
    if isinstance(w, Mlp):
        return over_ranks(step, mlp(step, x, w))
    if isinstance(w, BiasedMlp):
        y = nothing(x)
        if w.mlp.gate.shape[0]:
            gate, up = linear(step, x, w.mlp.gate), linear(step, x, w.mlp.up)
            y = linear(step, ops.swiglu(ops.add(gate, w.gate_bias), ops.add(up, w.up_bias)), w.mlp.down)
        return ops.add(over_ranks(step, y), w.down_bias)
    logits = linear(step, x, w.router, "float32")
    ids, weights = ops.moe_softmax_topk(logits, config.top_k, propagate_nan=True, active=step.active)
    if config.renormalise:
        weights = ops.moe_normalize_weights(weights)
    return over_ranks(step, experts(step, x, ids, weights, w.routed))


# -- over ranks ------------------------------------------------------------------------------------------------------


def split(config: Config, mesh: Mesh, group: int) -> Split[Config]:
    """Heads, widths of MLPs, experts, vocabulary. Sums over ranks: the embedding, the output of attention before its
    bias, and of each MLP or its experts before its bias.
    """
    D = config.head_dim
    own, dense = share_heads(mesh, config.heads, config.kv_heads, D, group), share_width(mesh, config.mlp_width, group)
    parts = {
        **vocabulary_parts(mesh, config.vocab_size),
        **mlp_parts("mlp", dense, config.mlp_width),
        "self_attn.o_proj": own.columns(D),
    }
    for name, part in (("q", own.rows(D)), ("k", own.kv_rows(D)), ("v", own.kv_rows(D))):
        parts |= {f"self_attn.{name}_proj": part, f"self_attn.{name}_proj.bias": part}
    width = None
    if mesh.experts_split and config.experts:
        width = (*share_width(mesh, config.expert_width, group), config.expert_width)
    local = replace(
        config,
        heads=own.count,
        kv_heads=own.kv_count,
        mlp_width=dense[1] - dense[0],
        expert_width=config.expert_width if width is None else width[1] - width[0],
    )
    span = own.kv_span(D)
    return Split(local, parts, width, ((span, span),) * len(config.windows))


# -- the family ------------------------------------------------------------------------------------------------------

_GGUF = GgufNames(
    architectures={
        "llama": GgufArchitecture("llama", neighbours=True, windowed="mistral"),
        "qwen2": GgufArchitecture("qwen2", biased=True),
        "qwen3": GgufArchitecture("qwen3"),
        "qwen3moe": GgufArchitecture("qwen3_moe", experts=True),
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
        "mlp.gate": "ffn_gate_inp",
        "mlp.switch_mlp.gate_proj": "ffn_gate_exps",
        "mlp.switch_mlp.up_proj": "ffn_up_exps",
        "mlp.switch_mlp.down_proj": "ffn_down_exps",
    },
)

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
        "experts": ("mlp.switch_mlp.*", "mlp.experts.*"),
        "router": ("mlp.gate",),
        "norms": ("*norm",),
        "attention": ("self_attn.*",),
        "dense MLP": ("mlp.*",),
    },
    skipped=("model.vision_tower.", "vision_tower.", "mtp."),
    gguf=_GGUF,
    split=split,
)
