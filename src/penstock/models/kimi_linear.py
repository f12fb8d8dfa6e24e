"""Kimi-Linear: Kimi Delta Attention (a decay for each key channel) and latent attention without rotation, with experts.

model_type `kimi_linear`. Latent attention and experts are DeepSeek-V3's (deepseek_v3.py), but nothing tells positions
apart there: that is left to the delta layers. Axis letters: T tokens; in delta layers H heads of width D for keys and
values alike, and a convolution over W positions; in latent ones those of deepseek_v3.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock import ops
from penstock.models.config import MOST_ROWS, Fields, layer_types
from penstock.models.deepseek_v3 import Attention, Experts, attention, latent_heads, moe, ordered_heads, read_attention
from penstock.models.family import Family, GgufArchitecture, GgufNames, MlxRules
from penstock.models.gguf_keys import GgufKeys, logarithm, sigmoid_experts, stem
from penstock.models.layers import (
    Mlp,
    adjacent,
    embed,
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
)
from penstock.models.source import Source, Weight
from penstock.models.split import Heads, Mesh, Part, Split, mlp_parts, share_heads, share_width, vocabulary_parts
from penstock.models.step import Cache, Layout, PagedKV, RecurrentState, Step, commit_delta, convolve, delta_rule
from penstock.ops.array import Array, concatenated
from penstock.quant import GgufTensor, QuantizedTensor
from penstock.weights.checkpoint import Checkpoint

MODEL_TYPES = ("kimi_linear",)

_KINDS = ("linear_attention", "full_attention")
_MIXED = ("q", "k", "v")  # what is convolved


@dataclass(frozen=True)
class Config:
    model_type: str
    vocab_size: int
    max_positions: int
    dim: int
    layer_types: tuple[str, ...]
    norm_eps: float
    heads: int  # of latent attention, as the next eight
    q_rank: int | None
    kv_rank: int
    nope: int
    rope_dim: int  # of keys that all heads share; nothing is rotated
    value_dim: int
    rope: None
    interleaved: bool
    scale: float
    delta_heads: Heads  # of delta layers, those that are here
    delta_dim: int
    conv_width: int
    tied: bool
    mlp_width: int
    dense_layers: int
    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    groups: int
    top_groups: int
    renormalise: bool
    routed_scale: float


def read_config(raw: dict) -> Config:
    """The config of a text model. Raises CheckpointError for what is missing, inconsistent or not supported."""
    fields = Fields(raw, "config.json")
    model_type = fields.choice("model_type", MODEL_TYPES)
    fields.choice("hidden_act", ("silu",), "silu")
    fields.choice("attention_bias", (False,), False)
    fields.choice("mla_use_nope", (True,), True)
    fields.choice("moe_router_activation_func", ("sigmoid",), "sigmoid")
    fields.choice("moe_layer_freq", (1,), 1)
    fields.choice("num_nextn_predict_layers", (0,), 0)
    layers = fields.integer("num_hidden_layers", most=4096)
    nope, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    H = ordered_heads(fields, nope + rope_dim)
    Hkv = fields.integer("num_key_value_heads", H)
    fields.require(Hkv == H, f"num_key_value_heads is {Hkv}, expected {H} (num_attention_heads)")

    count = fields.integer("num_experts", least=0)
    kinds = fields.items("mlp_layer_types", str, None)
    if count and kinds is not None:  # all that transformers writes of them
        dense = fields.integer("first_k_dense_replace", kinds.count("dense"), least=0)
    else:
        dense = fields.integer("first_k_dense_replace", least=0) if count else layers
    if kinds is not None:
        expected = ("dense",) * min(dense, layers) + ("sparse",) * (layers - dense)
        fields.require(kinds == expected, f"mlp_layer_types has another order, expected {layers}: {dense} dense first")
    groups, top_groups, k = _groups(fields, count) if count else (1, 1, 0)
    width = fields.integer("moe_intermediate_size") if count else 0
    delta = _delta_config(fields)
    Hd = delta["num_heads"]
    return Config(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        max_positions=fields.integer("model_max_length", fields.integer("max_position_embeddings", 1 << 20)),
        dim=fields.integer("hidden_size"),
        layer_types=_layer_types(fields, layers),
        norm_eps=fields.number("rms_norm_eps", above=0),
        heads=H,
        q_rank=fields.integer("q_lora_rank", None),
        kv_rank=fields.integer("kv_lora_rank", most=MOST_ROWS),
        nope=nope,
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim"),
        rope=None,
        interleaved=False,
        scale=(nope + rope_dim) ** -0.5,
        delta_heads=Heads(0, Hd, 0, Hd, Hd, Hd),
        delta_dim=delta["head_dim"],
        conv_width=delta["short_conv_kernel_size"],
        tied=fields.boolean("tie_word_embeddings", False),
        mlp_width=fields.integer("intermediate_size") if dense else 0,
        dense_layers=min(dense, layers),
        experts=count,
        top_k=k,
        expert_width=width,
        shared_width=width * (fields.integer("num_shared_experts", least=0) if count else 0),
        groups=groups,
        top_groups=top_groups,
        renormalise=fields.boolean("moe_renormalize", True),
        routed_scale=fields.number("routed_scaling_factor", above=0) if count else 1.0,
    )


def _delta_config(fields: Fields) -> dict[str, int]:
    """Sizes of delta layers: `linear_attn_config` of the released files, or the keys that transformers writes."""
    if "linear_attn_config" not in fields:
        names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
        names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
        return {name: fields.integer(key, most=64 if "conv" in key else 1 << 16) for name, key in names.items()}
    table = fields.table("linear_attn_config")
    sizes = {name: table.integer(name, most=1 << 16) for name in ("num_heads", "head_dim")}
    return sizes | {"short_conv_kernel_size": table.integer("short_conv_kernel_size", 4, most=64)}


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """`layer_types`, or the two lists of `linear_attn_config`, which count from 1; where both are given they agree."""
    listed = layer_types(fields, layers, _KINDS) if "layer_types" in fields else None
    if "linear_attn_config" not in fields:
        return listed if listed is not None else layer_types(fields, layers, _KINDS)
    table = fields.table("linear_attn_config")
    linear, full = table.items("kda_layers", int), table.items("full_attn_layers", int)
    for n in range(1, layers + 1):  # those beyond are of layers that are left out
        table.require(
            (n in linear) != (n in full), f"layer {n} is in both or none of the lists of layers, expected one"
        )
    kinds = tuple(_KINDS[n in full] for n in range(1, layers + 1))
    fields.require(listed in (None, kinds), "layer_types is another order than linear_attn_config, expected one")
    return kinds


def _groups(fields: Fields, count: int) -> tuple[int, int, int]:
    """Groups of experts, how many of them a token may choose from, and how many experts it chooses."""
    groups, top_groups = fields.integer("num_expert_group", 1), fields.integer("topk_group", 1)
    k = fields.integer("num_experts_per_token", most=count)
    fields.require(count % groups == 0, f"num_experts is {count}, expected a multiple of num_expert_group ({groups})")
    fields.require(top_groups <= groups, f"topk_group is {top_groups}, expected at most num_expert_group ({groups})")
    fields.require(
        groups == 1 or count // groups >= 2, f"num_expert_group is {groups}, expected two experts or more in each"
    )
    room = top_groups * (count // groups)
    fields.require(k <= room, f"num_experts_per_token is {k}, expected at most {room} (topk_group groups of experts)")
    return groups, top_groups, k


# -- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeltaAttention:
    mixed: tuple[Weight, ...]  # q, k and v as one [3 H D, dim], or three where their formats differ
    b: Weight  # [H, dim]
    f_a: Weight  # [D, dim], what decays are made of
    f_b: Weight  # [H D, D]
    g_a: Weight  # [D, dim], the gate of the output
    g_b: Weight
    conv: np.ndarray  # [3 H D, W]
    A_log: np.ndarray  # [H]
    dt_bias: np.ndarray  # [H, D]
    norm: np.ndarray  # [D]
    out: Weight


@dataclass(frozen=True)
class Layer:
    mixer_norm: np.ndarray
    mixer: DeltaAttention | Attention
    mlp_norm: np.ndarray
    mlp: Experts | Mlp


@dataclass(frozen=True)
class Weights:
    embed: Weight
    layers: tuple[Layer, ...]
    norm: np.ndarray
    head: Weight


def names(checkpoint: Checkpoint, config: Config) -> tuple[str, str, str]:
    """Prefix of the text model's tensors, prefix of `lm_head`, and the layout ("hf" or "mlx")."""
    turned = any(name.endswith((".q_conv.conv.weight", ".embed_q.weight")) for name in checkpoint.names)
    return "model.", "", "mlx" if turned else "hf"


def read_weights(source: Source, config: Config) -> Weights:
    table = source.weight("embed_tokens", config.vocab_size, config.dim)
    layers = tuple(_layer(source, config, n, kind) for n, kind in enumerate(config.layer_types))
    head = read_head(source, config.tied, table, config.vocab_size, config.dim)
    return Weights(table, layers, source.vector("norm", config.dim), head)


def _layer(source: Source, config: Config, n: int, kind: str) -> Layer:
    dim, path = config.dim, f"layers.{n}"
    block = f"{path}.mlp"
    if source.layout == "hf" and f"{path}.block_sparse_moe.gate_proj" in source:  # as transformers writes it
        block = f"{path}.block_sparse_moe"
    return Layer(
        source.vector(f"{path}.input_layernorm", dim),
        _delta_attention(source, config, f"{path}.self_attn.")
        if kind == "linear_attention"
        else read_attention(source, config, f"{path}.self_attn."),
        source.vector(f"{path}.post_attention_layernorm", dim),
        read_mlp(source, block, dim, config.mlp_width) if n < config.dense_layers else _experts(source, config, path),
    )


def _experts(source: Source, config: Config, path: str) -> Experts:
    """The released files call the block otherwise, and have the bias below the router."""
    mlx = source.layout == "mlx"
    block = f"{path}.mlp" if mlx else f"{path}.block_sparse_moe"
    bias = f"{block}.e_score_correction_bias" if mlx else f"{block}.gate.e_score_correction_bias"
    shared = config.shared_width
    return Experts(
        source.weight(f"{block}.gate", config.experts, config.dim),
        source.vector(bias, config.experts),
        read_experts(source, block, "switch_mlp", config.experts, config.dim, config.expert_width, ("w1", "w3", "w2")),
        read_mlp(source, f"{block}.shared_experts", config.dim, shared) if shared else None,
    )


def _delta_attention(source: Source, config: Config, path: str) -> DeltaAttention:
    here, D, dim, W = config.delta_heads, config.delta_dim, config.dim, config.conv_width
    H, own = here.count, here.count * D
    mixed = _joined(*(source.weight(f"{path}{part}_proj", own, dim) for part in _MIXED))
    inputs = {"b": H, "f_a": D, "g_a": D}
    rest = (source.weight(f"{path}{part}_proj", rows, dim) for part, rows in inputs.items())
    *mixed, b, f_a, g_a = adjacent(*mixed, *rest)
    name, shape = ("{}_conv.conv", (own, W, 1)) if source.layout == "mlx" else ("{}_conv1d", (own, 1, W))
    conv = [source.vector(path + name.format(part), *shape).reshape(own, W) for part in _MIXED]
    rates = source.vector(path + "A_log", 1, 1, here.whole, 1).reshape(-1)
    return DeltaAttention(
        tuple(mixed),
        b,
        f_a,
        source.weight(path + "f_b_proj", own, D),
        g_a,
        source.weight(path + "g_b_proj", own, D),
        np.concatenate(conv),
        np.ascontiguousarray(rates[here.first : here.stop]),
        source.vector(path + "dt_bias", own).reshape(H, D),
        source.vector(path + "o_norm", D),
        source.weight(path + "o_proj", dim, own),
    )


def _joined(*weights: Weight) -> tuple[Weight, ...]:
    """Quantized weights of one format as one (a copy); others as they are."""
    quantized = [w for w in weights if isinstance(w, QuantizedTensor) and not isinstance(w, GgufTensor)]
    if len(quantized) < len(weights) or len({w.key for w in quantized}) != 1 or quantized[0].global_scale is not None:
        return weights
    arrays = zip(*(w.arrays for w in quantized), strict=True)
    return (quantized[0].with_arrays(*(concatenated(parts) for parts in arrays)),)


# -- the model -------------------------------------------------------------------------------------------------------


def caches(config: Config) -> tuple[Layout, ...]:
    """One cache per layer."""
    H, D = config.delta_heads.count, config.delta_dim
    pages = PagedKV(config.kv_rank, config.rope_dim)
    recurrent = RecurrentState((config.conv_width - 1, 3 * H * D), (H, D, D), decays=D)
    return tuple(recurrent if kind == "linear_attention" else pages for kind in config.layer_types)


def forward(step: Step, w: Weights, config: Config, cache: Sequence[Cache]) -> Array:
    """The residual stream after the last layer, [T, dim]; `logits` multiplies its rows with the head."""
    h = embed(step, w.embed, vocab=config.vocab_size)
    for layer, state in zip(w.layers, cache, strict=True):
        x = stream_norm(step, h, layer.mixer_norm, config.norm_eps)
        if isinstance(layer.mixer, DeltaAttention):
            h = ops.residual_add(h, delta_attention(step, x, layer.mixer, config, state))
        else:
            h = ops.residual_add(h, attention(step, x, layer.mixer, config, state))
        x = stream_norm(step, h, layer.mlp_norm, config.norm_eps)
        if isinstance(layer.mlp, Mlp):
            h = ops.residual_add(h, over_ranks(step, mlp(step, x, layer.mlp)))
        else:
            h = moe(step, h, x, layer.mlp, config)
    return h


def commit(step: Step, w: Weights, config: Config, cache: Sequence[Cache]) -> None:
    """Move recurrent states on by what was accepted of kept runs."""
    for layer, state in zip(w.layers, cache, strict=True):
        if isinstance(layer.mixer, DeltaAttention):
            commit_delta(step, state, layer.mixer.conv, config.delta_heads.count)


def final_norm(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """The hidden state that the head reads, [T, dim]."""
    return stream_norm(step, h, w.norm, config.norm_eps)


def logits(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """Logits of the next token, float32 [T, vocab]."""
    return head_logits(step, final_norm(step, h, w, config), w.head, config.vocab_size)


def delta_attention(step: Step, x: Array, w: DeltaAttention, config: Config, cache: Cache) -> Array:
    """Convolution, normalised q and k, the delta rule with decays of channels, a gated norm. x [T, dim] → [T, dim]."""
    H, D = config.delta_heads.count, config.delta_dim
    mixed, *rest = (linear(step, x, part) for part in w.mixed)
    for part in rest:
        mixed = ops.beside(mixed, part)
    beta, low, gate = (linear(step, x, part) for part in (w.b, w.f_a, w.g_a))
    alpha, z = linear(step, low, w.f_b), linear(step, gate, w.g_b)
    y = ops.rms_norm_qk(convolve(step, cache, mixed, w.conv), H, D, H * D)
    g, b = ops.gdn_decay_beta(heads(alpha, H), beta, w.A_log, w.dt_bias)
    d = delta_rule(step, cache, y, g, b, H, H, D, D)  # [T, H, D]
    y = ops.gated_rms_norm(d, heads(z, H), w.norm, config.norm_eps, "sigmoid")
    return over_ranks(step, linear(step, flat(y), w.out))


# -- over ranks ------------------------------------------------------------------------------------------------------


def split(config: Config, mesh: Mesh, group: int) -> Split[Config]:
    """Heads of both kinds of layers, widths of MLPs, experts, vocabulary; latents and their cache are on every rank.

    Sums over ranks: the embedding, the output of each mixer, and of each MLP with its experts and shared expert.
    """
    H, D, nope, vd = config.delta_heads.whole, config.delta_dim, config.nope, config.value_dim
    own = share_heads(mesh, config.heads, config.heads, vd, group)
    delta = share_heads(mesh, H, H, D, group, "heads of delta attention")
    dense, shared = share_width(mesh, config.mlp_width, group), share_width(mesh, config.shared_width, group)
    stacked, rows = Part(-3, slice(own.first, own.stop), config.heads), delta.rows(D)
    both = {"q_proj": own.rows(nope + config.rope_dim), "o_proj": own.columns(vd)}
    mixed = np.concatenate([np.arange(delta.first * D, delta.stop * D) + n * H * D for n in range(3)])
    parts = {
        **vocabulary_parts(mesh, config.vocab_size),
        **mlp_parts("mlp", dense, config.mlp_width),
        **mlp_parts("block_sparse_moe", dense, config.mlp_width),
        **mlp_parts("mlp.shared_experts", shared, config.shared_width),
        **mlp_parts("block_sparse_moe.shared_experts", shared, config.shared_width),
        "self_attn.q_b_proj": own.rows(nope + config.rope_dim),
        "self_attn.kv_b_proj": own.rows(nope + vd),
        "self_attn.embed_q": stacked,
        "self_attn.unembed_out": stacked,
        **dict.fromkeys((f"self_attn.{name}_proj" for name in ("k", "v", "f_b", "g_b")), rows),
        **dict.fromkeys((f"self_attn.{part}_{name}" for part in _MIXED for name in ("conv1d", "conv.conv")), rows),
        "self_attn.b_proj": delta.rows(1),
        "self_attn.dt_bias": rows,
    }
    for n, kind in enumerate(config.layer_types):
        linear = {"q_proj": rows, "o_proj": delta.columns(D)}
        for name, part in (linear if kind == "linear_attention" else both).items():
            parts[f"layers.{n}.self_attn.{name}"] = part
    narrow = None
    if mesh.experts_split and config.experts:
        narrow = (*share_width(mesh, config.expert_width, group), config.expert_width)
    local = replace(
        config,
        heads=own.count,
        delta_heads=delta,
        mlp_width=dense[1] - dense[0],
        shared_width=shared[1] - shared[0],
        expert_width=config.expert_width if narrow is None else narrow[1] - narrow[0],
    )
    state = slice(delta.first, delta.stop)
    found = tuple((mixed, state) if kind == "linear_attention" else (None, None) for kind in config.layer_types)
    return Split(local, parts, narrow, found)


# -- the family ------------------------------------------------------------------------------------------------------


def mlx_rules(raw: Mapping[str, Any], config: Config) -> MlxRules:
    return MlxRules(
        renamed=(
            (".block_sparse_moe.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
            (".block_sparse_moe.", ".mlp."),
            *((f".{part}_conv1d.", f".{part}_conv.conv.") for part in _MIXED),
        ),
        channels_last=("_conv.conv.weight",),
        split_heads=latent_heads(config),
        uncast=("e_score_correction_bias", "A_log", "dt_bias"),
    )


_DELTA = ("k_proj", "v_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "A_log", "dt_bias", "*_conv*")


def _of_gguf(keys: GgufKeys) -> dict[str, Any]:
    """A layer without heads of keys is a delta layer, which has as many heads as the others."""
    config, chosen = stem(keys, "kimi_linear"), sigmoid_experts(keys)
    counts, H = keys.per_layer("attention.head_count_kv", int), config["num_attention_heads"]
    rope_dim, width = keys.integer("rope.dimension_count"), keys.integer("attention.key_length_mla")
    keys.require(width > rope_dim, f"keys of {width} channels, expected more than rope.dimension_count ({rope_dim})")
    keys.accept("attention.key_length", "attention.value_length")
    layers = {name: [n + 1 for n, count in enumerate(counts) if bool(count) == full]
              for name, full in (("kda_layers", False), ("full_attn_layers", True))}  # fmt: skip
    return config | {
        "num_key_value_heads": H,
        "head_dim": config["hidden_size"] // H,  # which mlx-lm asks for
        "model_max_length": config["max_position_embeddings"],
        "intermediate_size": keys.integer("feed_forward_length"),
        "q_lora_rank": keys.integer("attention.q_lora_rank", None),
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": width - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": keys.integer("attention.value_length_mla"),
        "mla_use_nope": True,
        "linear_attn_config": layers | {
            "num_heads": H,
            "head_dim": keys.integer("kda.head_dim"),
            "short_conv_kernel_size": keys.integer("ssm.conv_kernel"),
        },
        "num_experts": chosen["n_routed_experts"],
        "num_experts_per_token": chosen["num_experts_per_tok"],
        "num_shared_experts": chosen["n_shared_experts"],
        "num_expert_group": chosen["n_group"],
        "topk_group": chosen["topk_group"],
        "moe_intermediate_size": chosen["moe_intermediate_size"],
        "first_k_dense_replace": chosen["first_k_dense_replace"],
        "moe_renormalize": keys.boolean("expert_weights_norm", True),
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
        "routed_scaling_factor": chosen["routed_scaling_factor"],
    }  # fmt: skip


_GGUF = GgufNames(
    architectures={"kimi-linear": GgufArchitecture(_of_gguf, values={"self_attn.A_log": logarithm})},
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
        "self_attn.b_proj": "ssm_beta",
        **{f"self_attn.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")},
        **{f"self_attn.{part}_conv.conv": f"ssm_conv1d_{part}" for part in _MIXED},
        "self_attn.o_norm": "ssm_norm",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
        "self_attn.embed_q": "attn_k_b",
        "self_attn.unembed_out": "attn_v_b",
        "mlp.gate": "ffn_gate_inp",
        "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
        **{
            f"mlp.{block}{part}_proj": f"ffn_{part}{end}"
            for block, end in (("", ""), ("shared_experts.", "_shexp"), ("switch_mlp.", "_exps"))
            for part in ("gate", "up", "down")
        },
    },
    tensors={
        "self_attn.A_log": "ssm_a",
        "self_attn.dt_bias": "ssm_dt.bias",
        "mlp.e_score_correction_bias": "exp_probs_b.bias",
    },
)

FAMILY = Family(
    name="kimi_linear",
    model_types=MODEL_TYPES,
    read_config=read_config,
    names=names,
    read_weights=read_weights,
    caches=caches,
    forward=forward,
    final_norm=final_norm,
    logits=logits,
    commit=commit,
    roles={
        "embedding": ("embed_tokens",),
        "head": ("lm_head",),
        "experts": ("mlp.switch_mlp.*", "block_sparse_moe.experts.*"),
        "shared expert": ("mlp.shared_experts.*", "block_sparse_moe.shared_experts.*"),
        "router": ("mlp.gate", "mlp.e_score_correction_bias", "block_sparse_moe.gate", "block_sparse_moe.gate.*"),
        "norms": ("*norm",),
        "linear attention": tuple(f"self_attn.{name}" for name in _DELTA),
        "attention": ("self_attn.*",),  # q_proj and o_proj of delta layers too: their names are the same
        "dense MLP": ("mlp.*", "block_sparse_moe.*"),
    },
    skipped=("mtp.", "model.mtp."),
    unquantized=("_conv.conv",),
    mlx_rules=mlx_rules,
    gguf=_GGUF,
    split=split,
    full_attention="latent attention (MLA)",
)
