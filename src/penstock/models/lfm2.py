"""LFM2: short gated convolutions with attention in some layers, a gated MLP or experts.

model_type `lfm2` (dense) and `lfm2_moe` (LFM2-8B-A1B, 24B-A2B). A layer that convolves keeps the last W − 1 rows of
what goes in, and no other state. Axis letters: T tokens, H query heads, Hkv key/value heads, D width of a head, W taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock import ops
from penstock.models.config import Fields, layer_types
from penstock.models.family import Family, GgufArchitecture, GgufNames, MlxRules
from penstock.models.gguf_keys import SIGMOID, GgufKeys, rotation, stem
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
    stream_norm,
)
from penstock.models.rope import Rope, read_rope
from penstock.models.source import Source, Weight, text_names
from penstock.models.split import Mesh, Part, Split, mlp_parts, share_heads, share_width, vocabulary_parts
from penstock.models.step import Cache, Layout, PagedKV, RecurrentState, Step, attend, commit_convolution, convolve
from penstock.ops.array import Array
from penstock.weights.checkpoint import Checkpoint

MODEL_TYPES = ("lfm2", "lfm2_moe")

_CONV, _FULL = "conv", "full_attention"
_NORM_EPS = 1e-6  # added to the sum of the chosen experts' scores


@dataclass(frozen=True)
class Config:
    model_type: str
    vocab_size: int
    max_positions: int
    dim: int
    layer_types: tuple[str, ...]
    norm_eps: float
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    taps: int
    channels: int  # of the convolutions
    tied: bool
    mlp_width: int
    dense_layers: int
    experts: int
    top_k: int
    expert_width: int
    expert_bias: bool
    renormalise: bool
    routed_scale: float


def read_config(raw: dict) -> Config:
    """The config of a text model. Raises CheckpointError for what is missing, inconsistent or not supported."""
    fields = Fields(raw, "config.json")
    model_type = fields.choice("model_type", MODEL_TYPES)
    sparse = model_type == "lfm2_moe"
    layers = fields.integer("num_hidden_layers", most=4096)
    kinds = _kinds(fields, layers)
    H = fields.integer("num_attention_heads")
    Hkv = fields.integer("num_key_value_heads")
    fields.require(H % Hkv == 0, f"num_attention_heads is {H}, expected a multiple of num_key_value_heads ({Hkv})")
    dim = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", dim // H)
    fields.require(
        head_dim * H == dim, f"hidden_size is {dim}, expected num_attention_heads ({H}) times the width of a head"
    )
    fields.choice("conv_bias", (False,), False)
    max_positions = fields.integer("max_position_embeddings", 128000)
    count = fields.integer("num_experts") if sparse else 0
    dense = fields.integer("num_dense_layers", least=0) if sparse else layers
    tied = fields.boolean("tie_embedding", fields.boolean("tie_word_embeddings", True))
    return Config(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        max_positions=max_positions,
        dim=dim,
        layer_types=kinds,
        norm_eps=fields.number("norm_eps", above=0),
        heads=H,
        kv_heads=Hkv,
        head_dim=head_dim,
        rope=_rope(fields, head_dim, max_positions),
        taps=fields.integer("conv_L_cache", least=2, most=64),
        channels=dim,
        tied=tied,
        mlp_width=(fields.integer("intermediate_size") if sparse else _dense_width(fields, dim)) if dense else 0,
        dense_layers=min(dense, layers),
        experts=count,
        top_k=fields.integer("num_experts_per_tok", most=count) if sparse else 0,
        expert_width=fields.integer("moe_intermediate_size") if sparse else 0,
        expert_bias=fields.boolean("use_expert_bias") if sparse else False,
        renormalise=fields.boolean("norm_topk_prob") if sparse else True,
        routed_scale=fields.number("routed_scaling_factor", 1.0, above=0) if sparse else 1.0,
    )


def _kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """`layer_types`, or by the numbers of the layers that attend."""
    attending = fields.items("full_attn_idxs", int, None)
    if attending is None:
        return layer_types(fields, layers, (_CONV, _FULL))
    made = tuple(_FULL if n in attending else _CONV for n in range(layers))
    told = "layer_types" in fields
    same = not told or layer_types(fields, layers, (_CONV, _FULL)) == made
    fields.require(same, "full_attn_idxs has other layers than layer_types, expected the same")
    return made


def _rope(fields: Fields, head_dim: int, max_positions: int) -> Rope:
    """mlx-lm knows no scaling of positions here."""
    for key in ("rope_parameters", "rope_scaling"):
        table = fields.table(key, None)
        if table is not None:
            table.choice("rope_type", ("default",), "default")
            table.choice("type", ("default",), "default")
    return read_rope(fields, head_dim, max_positions, theta=1e6, whole=True)


def _dense_width(fields: Fields, dim: int) -> int:
    """What `block_ff_dim` (or `intermediate_size`) comes to: two thirds of it, rounded up, unless the files say not."""
    width = fields.integer("block_ff_dim", None) or fields.integer("intermediate_size")
    if fields.integer("block_dim", dim) != dim:
        raise fields.error("block_dim", f"{dim} (hidden_size)")
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return width
    if fields.values.get("block_ffn_dim_multiplier", 1.0) is None:  # transformers rounds up then, mlx-lm does not
        raise fields.error("block_ffn_dim_multiplier", "a number above 0")
    unit, times = fields.integer("block_multiple_of", 256), fields.number("block_ffn_dim_multiplier", 1.0, above=0)
    return -(-int(times * int(2 * width / 3)) // unit) * unit


# -- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    inputs: tuple[Weight, ...]  # q [H · D, dim], k and v [Hkv · D, dim]
    out: Weight
    q_norm: np.ndarray
    k_norm: np.ndarray


@dataclass(frozen=True)
class Convolution:
    inputs: Weight  # [3 C, dim]: two gates and what is convolved, B, C, x
    taps: np.ndarray  # [C, W]
    out: Weight


@dataclass(frozen=True)
class Experts:
    router: Weight
    bias: np.ndarray | None  # for the choice alone
    routed: ExpertStack


@dataclass(frozen=True)
class Layer:
    mixer_norm: np.ndarray
    mixer: Attention | Convolution
    mlp_norm: np.ndarray
    mlp: Mlp | Experts


@dataclass(frozen=True)
class Weights:
    embed: Weight
    layers: tuple[Layer, ...]
    norm: np.ndarray
    head: Weight


def names(checkpoint: Checkpoint, config: Config) -> tuple[str, str, str]:
    """Prefix of the text model's tensors, prefix of `lm_head`, and the layout: "hf" has convolutions [C, 1, W], "mlx"
    [C, W, 1].
    """
    prefix, head, layout = text_names(checkpoint)
    convolving = (n for n, kind in enumerate(config.layer_types) if kind == _CONV)
    name = f"{prefix}layers.{next(convolving, -1)}.conv.conv.weight"
    if name in checkpoint and len(shape := checkpoint.shape(name)) == 3:
        layout = "hf" if shape[1] == 1 else "mlx"
    return prefix, head, layout


def read_weights(source: Source, config: Config) -> Weights:
    table = source.weight("embed_tokens", config.vocab_size, config.dim)
    layers = tuple(_layer(source, config, n) for n in range(len(config.layer_types)))
    head = read_head(source, config.tied, table, config.vocab_size, config.dim)
    return Weights(table, layers, source.vector("embedding_norm", config.dim), head)


def _layer(source: Source, config: Config, n: int) -> Layer:
    path, dim = f"layers.{n}.", config.dim
    full = config.layer_types[n] == _FULL
    return Layer(
        source.vector(path + "operator_norm", dim),
        _attention(source, config, path + "self_attn.") if full else _convolution(source, config, path + "conv."),
        source.vector(path + "ffn_norm", dim),
        _feed_forward(source, config, n),
    )


def _attention(source: Source, config: Config, path: str) -> Attention:
    dim, D = config.dim, config.head_dim
    rows = {"q": config.heads * D, "k": config.kv_heads * D, "v": config.kv_heads * D}
    return Attention(
        adjacent(*(source.weight(f"{path}{part}_proj", count, dim) for part, count in rows.items())),
        source.weight(path + "out_proj", dim, rows["q"]),
        source.vector(path + "q_layernorm", D),
        source.vector(path + "k_layernorm", D),
    )


def _convolution(source: Source, config: Config, path: str) -> Convolution:
    C, W, dim = config.channels, config.taps, config.dim
    shape = (C, W, 1) if source.layout == "mlx" else (C, 1, W)
    return Convolution(
        source.weight(path + "in_proj", 3 * C, dim),
        source.vector(path + "conv", *shape).reshape(C, W),
        source.weight(path + "out_proj", dim, C),
    )


def _feed_forward(source: Source, config: Config, n: int) -> Mlp | Experts:
    path, dim, count = f"layers.{n}.feed_forward", config.dim, config.experts
    if n < config.dense_layers:
        spelled = config.experts > 0 and source.layout == "mlx"
        first, second, down = ("gate_proj", "up_proj", "down_proj") if spelled else ("w1", "w3", "w2")
        gate, up = adjacent(*(source.weight(f"{path}.{part}", config.mlp_width, dim) for part in (first, second)))
        return Mlp(gate, up, source.weight(f"{path}.{down}", dim, config.mlp_width))
    return Experts(
        source.weight(f"{path}.gate", count, dim),
        source.vector(f"{path}.expert_bias", count) if config.expert_bias else None,
        read_experts(source, path, "switch_mlp", count, dim, config.expert_width, ("w1", "w3", "w2")),
    )


# -- the model -------------------------------------------------------------------------------------------------------


def caches(config: Config) -> tuple[Layout, ...]:
    kv = config.kv_heads * config.head_dim
    attending, convolving = PagedKV(kv, kv), RecurrentState((config.taps - 1, config.channels), (0, 0, 0))
    return tuple(attending if kind == _FULL else convolving for kind in config.layer_types)


def forward(step: Step, w: Weights, config: Config, cache: Sequence[Cache]) -> Array:
    """The residual stream after the last layer, [T, dim]; `logits` multiplies its rows with the head."""
    h = embed(step, w.embed, vocab=config.vocab_size)
    for layer, state in zip(w.layers, cache, strict=True):
        x = stream_norm(step, h, layer.mixer_norm, config.norm_eps)
        if isinstance(layer.mixer, Attention):
            y = attention(step, x, layer.mixer, config, state)
        else:
            y = convolution(step, x, layer.mixer, state)
        h = ops.residual_add(h, y)
        x = stream_norm(step, h, layer.mlp_norm, config.norm_eps)
        y = mlp(step, x, layer.mlp) if isinstance(layer.mlp, Mlp) else moe(step, x, layer.mlp, config)
        h = ops.residual_add(h, over_ranks(step, y))
    return h


def commit(step: Step, w: Weights, config: Config, cache: Sequence[Cache]) -> None:
    """Move the rows of convolutions on by what was accepted of kept runs."""
    for layer, state in zip(w.layers, cache, strict=True):
        if isinstance(layer.mixer, Convolution):
            commit_convolution(step, state, config.taps)


def final_norm(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """The hidden state that the head reads, [T, dim]."""
    return stream_norm(step, h, w.norm, config.norm_eps)


def logits(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """Logits of the next token, float32 [T, vocab]."""
    return head_logits(step, final_norm(step, h, w, config), w.head, config.vocab_size)


def attention(step: Step, x: Array, w: Attention, config: Config, cache: Cache) -> Array:
    """Causal attention with normed heads. x [T, dim] → [T, dim]."""
    q, k, v = (linear(step, x, part) for part in w.inputs)
    q, k, v = heads(q, config.heads), heads(k, config.kv_heads), heads(v, config.kv_heads)  # [T, H, D]
    q = apply_rope(step, ops.rms_norm(q, w.q_norm, config.norm_eps), config.rope)
    k = apply_rope(step, ops.rms_norm(k, w.k_norm, config.norm_eps), config.rope)
    return over_ranks(step, linear(step, flat(attend(step, cache, q, k, v, config.head_dim**-0.5)), w.out))


def convolution(step: Step, x: Array, w: Convolution, cache: Cache) -> Array:
    """C ⊙ (a short causal convolution of B ⊙ x), where B, C and x are projections. x [T, dim] → [T, dim]."""
    C = w.taps.shape[0]
    before, behind, rows = ops.split_columns(linear(step, x, w.inputs), C, C, C)
    y = ops.mul(convolve(step, cache, ops.mul(rows, before), w.taps, "none"), behind)
    return over_ranks(step, linear(step, y, w.out))


def moe(step: Step, x: Array, w: Experts, config: Config) -> Array:
    """Σ chosen experts of x [T, dim]."""
    how = (1, 1, config.top_k, config.renormalise, config.routed_scale)
    scores = linear(step, x, w.router, "float32")
    ids, weights = ops.moe_group_route(scores, w.bias, *how, propagate_nan=True, active=step.active, norm_eps=_NORM_EPS)
    return experts(step, x, ids, weights, w.routed)


# -- over ranks ------------------------------------------------------------------------------------------------------


def split(config: Config, mesh: Mesh, group: int) -> Split[Config]:
    """Heads, channels of convolutions, widths of MLPs, experts, vocabulary. Sums over ranks: the embedding, the output
    of attention and of convolutions, and of each MLP or its experts.
    """
    D, C = config.head_dim, config.channels
    own = share_heads(mesh, config.heads, config.kv_heads, D, group)
    dense, conv = share_width(mesh, config.mlp_width, group), share_width(mesh, C, group)
    mine = np.arange(*conv)
    rows = Part(-2, slice(*dense), config.mlp_width)
    parts = {
        **vocabulary_parts(mesh, config.vocab_size),
        **mlp_parts("feed_forward", dense, config.mlp_width),
        "feed_forward.w1": rows,
        "feed_forward.w3": rows,
        "feed_forward.w2": replace(rows, axis=-1),
        "self_attn.q_proj": own.rows(D),
        "self_attn.k_proj": own.kv_rows(D),
        "self_attn.v_proj": own.kv_rows(D),
        "self_attn.out_proj": own.columns(D),
        "conv.in_proj": Part(-2, np.concatenate([n * C + mine for n in range(3)]), 3 * C),
        "conv.conv": Part(-2, slice(*conv), C),
        "conv.out_proj": Part(-1, slice(*conv), C),
    }
    width = None
    if mesh.experts_split and config.experts:
        width = (*share_width(mesh, config.expert_width, group), config.expert_width)
    local = replace(
        config,
        heads=own.count,
        kv_heads=own.kv_count,
        channels=conv[1] - conv[0],
        mlp_width=dense[1] - dense[0],
        expert_width=config.expert_width if width is None else width[1] - width[0],
    )
    span = own.kv_span(D)
    indices = {_FULL: (span, span), _CONV: (slice(*conv), None)}
    return Split(local, parts, width, tuple(indices[kind] for kind in config.layer_types))


# -- the family ------------------------------------------------------------------------------------------------------


def mlx_rules(raw: Mapping[str, Any], config: Config) -> MlxRules:
    """mlx-lm spells w1, w2 and w3 out where there are experts."""
    spelled = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"} if config.experts else {}
    renamed = tuple((f".feed_forward.{short}", f".feed_forward.{long}") for short, long in spelled.items())
    return MlxRules(channels_last=("conv.conv.weight",), uncast=("expert_bias",), renamed=renamed)


def _of_gguf(keys: GgufKeys, model_type: str) -> dict[str, Any]:
    """A layer without heads of keys convolves. Of the choice of experts files say that it is by sigmoids, no more."""
    config, counts = stem(keys, model_type), keys.per_layer("attention.head_count_kv", int)
    attending = {count for count in counts if count}
    keys.require(len(attending) == 1, f"attention.head_count_kv has {sorted(attending)}, expected one number and 0")
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    for key in ("attention.key_length", "attention.value_length"):
        if keys.integer(key, head_dim) != head_dim:
            raise keys.error(key, f"{head_dim}")
    if rotation(keys, head_dim):
        raise keys.error("rope.scaling.type", "all channels, at frequencies that are not scaled")
    config |= {
        "norm_eps": config.pop("rms_norm_eps"),
        "num_key_value_heads": attending.pop(),
        "layer_types": [_FULL if count else _CONV for count in counts],
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "conv_bias": False,
        "intermediate_size": keys.integer("feed_forward_length"),
    }
    if model_type == "lfm2":
        width, dim = config["intermediate_size"], config["hidden_size"]
        config |= {"block_dim": dim, "block_ff_dim": width, "block_auto_adjust_ff_dim": False}
        return config | {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}  # which mlx-lm asks for
    if keys.integer("expert_gating_func") != SIGMOID:
        raise keys.error("expert_gating_func", f"{SIGMOID} (sigmoid)")
    return config | {
        "num_dense_layers": keys.integer("leading_dense_block_count", 0, least=0),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "use_expert_bias": keys.has(r"blk\.\d+\.exp_probs_b\.bias"),
        "norm_topk_prob": keys.boolean("expert_weights_norm", True),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
    }  # fmt: skip


_GGUF = GgufNames(
    architectures={
        "lfm2": GgufArchitecture(lambda keys: _of_gguf(keys, "lfm2")),
        "lfm2moe": GgufArchitecture(lambda keys: _of_gguf(keys, "lfm2_moe")),
    },
    modules={
        "embed_tokens": "token_embd",
        "embedding_norm": "token_embd_norm",
        "lm_head": "output",
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "conv.conv": "shortconv.conv",
        "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj",
        "feed_forward.gate": "ffn_gate_inp",
        "feed_forward.experts.gate_up_proj": "ffn_gate_up_exps",
        "feed_forward.experts.down_proj": "ffn_down_exps",
        **{
            f"feed_forward.{path}": f"ffn_{part}{end}"
            for part, spelled in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
            for path, end in ((spelled, ""), (f"{part}_proj", ""), (f"switch_mlp.{part}_proj", "_exps"))
        },
    },
    tensors={"feed_forward.expert_bias": "exp_probs_b.bias"},
)

FAMILY = Family(
    name="lfm2",
    model_types=MODEL_TYPES,
    read_config=read_config,
    read_weights=read_weights,
    caches=caches,
    forward=forward,
    final_norm=final_norm,
    logits=logits,
    names=names,
    roles={
        "embedding": ("embed_tokens",),
        "head": ("lm_head",),
        "experts": ("*.switch_mlp.*", "*.experts.*"),
        "router": ("feed_forward.gate", "feed_forward.expert_bias"),
        "norms": ("*norm",),
        "attention": ("self_attn.*",),
        "linear attention": ("conv.*",),
        "dense MLP": ("feed_forward.*",),
    },
    unquantized=("conv.conv",),
    mlx_rules=mlx_rules,
    gguf=_GGUF,
    split=split,
    commit=commit,
    linear_attention="short convolution",
)
