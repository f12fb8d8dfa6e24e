"""Gemma 3: sliding and global attention in turn, norms before and behind each block, a dense MLP.

model_type `gemma3` (config under `text_config`) and `gemma3_text`. Files of both layouts hold norms less 1. Axis
letters: T tokens, H query heads, Hkv key/value heads, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock import ops
from penstock.dtypes import bfloat16
from penstock.models.config import Fields, layer_types
from penstock.models.family import Family, GgufArchitecture, GgufNames, MlxRules
from penstock.models.gguf_keys import GgufKeys, base, less_one, rope_scaling, sliding
from penstock.models.layers import (
    Mlp,
    adjacent,
    apply_rope,
    embed,
    flat,
    head_logits,
    heads,
    linear,
    mlp,
    over_ranks,
    read_head,
    read_mlp,
    stream_norm,
)
from penstock.models.rope import Rope, read_rope
from penstock.models.source import VISION, Source, Weight
from penstock.models.split import Mesh, Split, mlp_parts, share_heads, share_width, vocabulary_parts
from penstock.models.step import Layout, PagedKV, Step, attend
from penstock.ops.array import Array

MODEL_TYPES = ("gemma3", "gemma3_text")

_SLIDING, _FULL = "sliding_attention", "full_attention"


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
    scale: float
    rope: Rope
    local_rope: Rope  # of layers with a window
    embed_scale: float
    mlp_width: int
    tied: bool
    softcap: float | None
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0


def read_config(raw: dict) -> Config:
    """The config of a text model. Raises CheckpointError for what is missing, inconsistent or not supported."""
    top = Fields(raw, "config.json")
    fields = top.table("text_config", top)
    nested = fields is not top  # whose files leave out what all sizes had at first
    model_type = fields.choice("model_type", MODEL_TYPES, None) or top.choice("model_type", MODEL_TYPES)
    layers = fields.integer("num_hidden_layers", most=4096)
    kinds = layer_types(fields, layers, (_SLIDING, _FULL), fields.integer("sliding_window_pattern", 6))
    fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    fields.choice("attention_bias", (False,), False)
    fields.choice("use_bidirectional_attention", (False,), False)
    if fields.number("attn_logit_softcapping", None) is not None:
        raise fields.error("attn_logit_softcapping", "null")
    H = fields.integer("num_attention_heads", 8) if nested else fields.integer("num_attention_heads")
    Hkv = fields.integer("num_key_value_heads", 4) if nested else fields.integer("num_key_value_heads")
    fields.require(H % Hkv == 0, f"num_attention_heads is {H}, expected a multiple of num_key_value_heads ({Hkv})")
    head_dim, dim = fields.integer("head_dim", 256), fields.integer("hidden_size")
    max_positions = fields.integer("max_position_embeddings", 131072)
    window = fields.integer("sliding_window") if _SLIDING in kinds else None
    vocab = fields.integer("vocab_size", top.integer("vocab_size", 262208) if nested else None)
    if vocab is None:
        raise fields.error("vocab_size", "an integer from 1")
    return Config(
        model_type=model_type,
        vocab_size=vocab,
        max_positions=max_positions,
        dim=dim,
        windows=tuple(window if kind == _SLIDING else None for kind in kinds),
        norm_eps=fields.number("rms_norm_eps", 1e-6, above=0),
        heads=H,
        kv_heads=Hkv,
        head_dim=head_dim,
        scale=fields.number("query_pre_attn_scalar", 256.0, above=0) ** -0.5,
        rope=rope_of(fields, _FULL, head_dim, max_positions),
        local_rope=rope_of(fields, _SLIDING, head_dim, max_positions),
        embed_scale=_embed_scale(raw, fields, dim),
        mlp_width=fields.integer("intermediate_size"),
        tied=fields.boolean("tie_word_embeddings", True) or top.boolean("tie_word_embeddings", True),
        softcap=fields.number("final_logit_softcapping", None, above=0),
    )


def _embed_scale(raw: dict, fields: Fields, dim: int) -> float:
    """√dim in the dtype of the model, as transformers has it; bfloat16 if there is none, and always in mlx-lm's
    conversions.
    """
    told = (table.values.get(key) for table in (fields, Fields(raw, "config.json")) for key in ("dtype", "torch_dtype"))
    dtype = None if "quantization" in raw else next(filter(None, told), None)
    root = np.float32(math.sqrt(dim))
    return float(root if dtype == "float32" else root.astype(np.float16 if dtype == "float16" else bfloat16))


def rope_of(fields: Fields, kind: str, head_dim: int, max_positions: int) -> Rope:
    """Older files have a theta for each kind of layer, and a scaling of the global ones alone."""
    tables = fields.table("rope_parameters", None)
    parameters = tables.table(kind, None) if tables is not None else None
    if parameters is None and kind == _SLIDING:
        theta = fields.number("rope_local_base_freq", 10000.0, above=0)
        parameters = Fields({"rope_theta": theta}, fields.where)
    elif parameters is None:
        parameters = fields.table("rope_scaling", None) or Fields({}, fields.where)
    return read_rope(fields, head_dim, max_positions, parameters, theta=1e6, whole=True)


# -- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    inputs: tuple[Weight, ...]  # q [H · D, dim], k and v [Hkv · D, dim]
    out: Weight
    q_norm: np.ndarray
    k_norm: np.ndarray


@dataclass(frozen=True)
class Layer:
    input_norm: np.ndarray
    attention: Attention
    attention_norm: np.ndarray
    mlp_norm: np.ndarray
    mlp: Mlp
    output_norm: np.ndarray


@dataclass(frozen=True)
class Weights:
    embed: Weight
    layers: tuple[Layer, ...]
    norm: np.ndarray
    head: Weight


def read_weights(source: Source, config: Config) -> Weights:
    table = source.weight("embed_tokens", config.vocab_size, config.dim)
    layers = tuple(_layer(source, config, f"layers.{n}.") for n in range(len(config.windows)))
    head = read_head(source, config.tied, table, config.vocab_size, config.dim)
    return Weights(table, layers, _norm(source, "norm", config.dim), head)


def _norm(source: Source, path: str, size: int) -> np.ndarray:
    return source.vector(path, size) + np.float32(1)


def _layer(source: Source, config: Config, path: str) -> Layer:
    dim = config.dim
    return Layer(
        _norm(source, path + "input_layernorm", dim),
        _attention(source, config, path + "self_attn."),
        _norm(source, path + "post_attention_layernorm", dim),
        _norm(source, path + "pre_feedforward_layernorm", dim),
        read_mlp(source, path + "mlp", dim, config.mlp_width),
        _norm(source, path + "post_feedforward_layernorm", dim),
    )


def _attention(source: Source, config: Config, path: str) -> Attention:
    dim, D = config.dim, config.head_dim
    rows = {"q": config.heads * D, "k": config.kv_heads * D, "v": config.kv_heads * D}
    return Attention(
        adjacent(*(source.weight(f"{path}{part}_proj", count, dim) for part, count in rows.items())),
        source.weight(path + "o_proj", dim, rows["q"]),
        _norm(source, path + "q_norm", D),
        _norm(source, path + "k_norm", D),
    )


# -- the model -------------------------------------------------------------------------------------------------------


def caches(config: Config) -> tuple[Layout, ...]:
    kv = config.kv_heads * config.head_dim
    return tuple(PagedKV(kv, kv, window) for window in config.windows)


def forward(step: Step, w: Weights, config: Config, cache: Sequence[tuple[Array, Array]]) -> Array:
    """The residual stream after the last layer, [T, dim]; `logits` multiplies its rows with the head."""
    eps = config.norm_eps
    h = ops.mul(embed(step, w.embed, vocab=config.vocab_size), config.embed_scale)
    for layer, window, state in zip(w.layers, config.windows, cache, strict=True):
        x = attention(step, stream_norm(step, h, layer.input_norm, eps), layer.attention, config, state, window)
        h = ops.residual_add(h, ops.rms_norm(x, layer.attention_norm, eps))
        x = over_ranks(step, mlp(step, stream_norm(step, h, layer.mlp_norm, eps), layer.mlp, "gelu_tanh"))
        h = ops.residual_add(h, ops.rms_norm(x, layer.output_norm, eps))
    return h


def final_norm(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """The hidden state that the head reads, [T, dim]."""
    return stream_norm(step, h, w.norm, config.norm_eps)


def logits(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """Logits of the next token, float32 [T, vocab]."""
    y = head_logits(step, final_norm(step, h, w, config), w.head, config.vocab_size)
    return y if config.softcap is None else ops.softcap(y, config.softcap)


def attention(
    step: Step, x: Array, w: Attention, config: Config, cache: tuple[Array, Array], window: int | None
) -> Array:
    """Causal attention with normed heads. x [T, dim] → [T, dim]."""
    q, k, v = (linear(step, x, part) for part in w.inputs)
    q, k, v = heads(q, config.heads), heads(k, config.kv_heads), heads(v, config.kv_heads)  # [T, H, D]
    rope = config.rope if window is None else config.local_rope
    q = apply_rope(step, ops.rms_norm(q, w.q_norm, config.norm_eps), rope)
    k = apply_rope(step, ops.rms_norm(k, w.k_norm, config.norm_eps), rope)
    return over_ranks(step, linear(step, flat(attend(step, cache, q, k, v, config.scale, window)), w.out))


# -- over ranks ------------------------------------------------------------------------------------------------------


def split(config: Config, mesh: Mesh, group: int) -> Split[Config]:
    """Heads, widths of MLPs, vocabulary. Sums over ranks: the embedding, the outputs of attention and MLP before the
    norms behind them.
    """
    D = config.head_dim
    own, dense = share_heads(mesh, config.heads, config.kv_heads, D, group), share_width(mesh, config.mlp_width, group)
    parts = {
        **vocabulary_parts(mesh, config.vocab_size),
        **mlp_parts("mlp", dense, config.mlp_width),
        "self_attn.q_proj": own.rows(D),
        "self_attn.k_proj": own.kv_rows(D),
        "self_attn.v_proj": own.kv_rows(D),
        "self_attn.o_proj": own.columns(D),
    }
    local = replace(config, heads=own.count, kv_heads=own.kv_count, mlp_width=dense[1] - dense[0])
    span = own.kv_span(D)
    return Split(local, parts, None, ((span, span),) * len(config.windows))


# -- the family ------------------------------------------------------------------------------------------------------


def mlx_rules(raw: Mapping[str, Any], config: Config) -> MlxRules:
    """mlx-lm looks for the size of the vocabulary beside `text_config`, not in it."""
    nested = raw["model_type"] == "gemma3"
    return MlxRules(nested, config={"vocab_size": config.vocab_size} if nested else {})


def _of_gguf(keys: GgufKeys) -> dict[str, Any]:
    """The scale of scores is in no key: that of the 27B, which has 62 layers, is by hidden_size, of others by head."""
    config = base(keys, "gemma3_text")
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    window = keys.integer("attention.sliding_window", 0, least=0)
    kinds = sliding(keys, 6) if window else [_FULL] * keys.layers
    if keys.integer("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise keys.error("rope.dimension_count", f"{config['head_dim']}, the length of keys")
    return config | {
        "query_pre_attn_scalar": dim // heads if keys.layers == 62 else config["head_dim"],
        "intermediate_size": keys.integer("feed_forward_length"),
        "sliding_window": window or None,
        "layer_types": kinds,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0, above=0),
        "rope_scaling": rope_scaling(keys),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
    }  # fmt: skip


_GGUF = GgufNames(
    architectures={"gemma3": GgufArchitecture(_of_gguf, values={"*norm": less_one})},
    modules={
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
)

FAMILY = Family(
    name="gemma3",
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
        "norms": ("*norm",),
        "attention": ("self_attn.*",),
        "dense MLP": ("mlp.*",),
    },
    skipped=VISION,
    mlx_rules=mlx_rules,
    gguf=_GGUF,
    split=split,
)
