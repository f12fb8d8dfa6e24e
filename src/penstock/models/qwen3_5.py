"""Qwen3.5 / Qwen3.6 and Qwen3-Next: Gated DeltaNet and gated attention layers, with experts or a dense MLP.

model_type `qwen3_5_moe`, `qwen3_5_moe_text`, `qwen3_5`, `qwen3_5_text` (config under `text_config`) and `qwen3_next`.
Axis letters: T tokens, H query heads, Hkv key/value heads, D width of a head; in DeltaNet layers Hk and Hv heads of
width Dk and Dv, and a convolution over W positions; E experts of width I, k chosen per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock import ops
from penstock.models.config import MOST_ROWS, Fields, layer_types
from penstock.models.family import DraftHead, Family, GgufArchitecture, GgufNames, MlxRules
from penstock.models.gguf_keys import GgufKeys, base, logarithm, rotation
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
    over_ranks,
    read_experts,
    read_head,
    read_mlp,
    stream_norm,
)
from penstock.models.rope import Rope, read_rope
from penstock.models.source import Source, Weight, text_names
from penstock.models.split import Heads, Mesh, Part, Split, mlp_parts, share_heads, share_width, vocabulary_parts
from penstock.models.step import (
    Cache,
    Layout,
    PagedKV,
    RecurrentState,
    Step,
    attend,
    commit_delta,
    convolve,
    delta_rule,
)
from penstock.ops.array import Array
from penstock.weights.checkpoint import Checkpoint

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_text", "qwen3_next")

_KINDS = ("linear_attention", "full_attention")


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
    key_heads: int  # of DeltaNet layers, as the next four
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    tied: bool
    mlp_width: int  # of dense layers
    dense_layers: frozenset[int]
    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    renormalise: bool
    tiled: bool = False  # value head j reads key head j mod key_heads, as in GGUF files; else those of one are together

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


def read_config(raw: dict) -> Config:
    """The config of a text model. Raises CheckpointError for what is missing, inconsistent or not supported."""
    top = Fields(raw, "config.json")
    fields = top.table("text_config", top)
    model_type = fields.choice("model_type", MODEL_TYPES, None) or top.choice("model_type", MODEL_TYPES)
    layers = fields.integer("num_hidden_layers", most=4096)
    H, Hkv = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    dim = fields.integer("hidden_size")
    fields.require(H % Hkv == 0, f"num_attention_heads is {H}, expected a multiple of num_key_value_heads ({Hkv})")
    head_dim = fields.integer("head_dim", None)
    if head_dim is None:
        fields.require(dim % H == 0, f"head_dim is missing, expected it: hidden_size {dim} is no multiple of {H} heads")
        head_dim = dim // H
    Hk, Hv = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    fields.require(Hv % Hk == 0, f"linear_num_value_heads is {Hv}, expected a multiple of linear_num_key_heads ({Hk})")
    Dk, Dv = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    rows = 2 * (Hk * Dk + Hv * Dv)
    fields.require(rows <= MOST_ROWS, f"heads of linear attention have {rows} channels, expected at most {MOST_ROWS}")
    fields.choice("hidden_act", ("silu",), "silu")
    fields.choice("attention_bias", (False,), False)
    fields.choice("attn_output_gate", (True,), True)
    max_positions = fields.integer("max_position_embeddings", 1 << 18)

    count = fields.integer("num_experts", 0, least=0)
    k = fields.integer("num_experts_per_tok", most=count) if count else 0
    step = fields.integer("decoder_sparse_step", 1)
    dense = {n for n in range(layers) if not count or (n + 1) % step or n in fields.items("mlp_only_layers", int, ())}
    return Config(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        max_positions=max_positions,
        dim=dim,
        layer_types=layer_types(fields, layers, _KINDS, fields.integer("full_attention_interval", 4)),
        norm_eps=fields.number("rms_norm_eps", above=0),
        heads=H,
        kv_heads=Hkv,
        head_dim=head_dim,
        rope=read_rope(fields, head_dim, max_positions, share=0.25),
        key_heads=Hk,
        value_heads=Hv,
        key_dim=Dk,
        value_dim=Dv,
        conv_width=fields.integer("linear_conv_kernel_dim", most=64),
        tied=fields.boolean("tie_word_embeddings", False) or top.boolean("tie_word_embeddings", False),
        mlp_width=fields.integer("intermediate_size") if dense else 0,
        dense_layers=frozenset(dense),
        experts=count,
        top_k=k,
        expert_width=fields.integer("moe_intermediate_size") if count else 0,
        shared_width=fields.integer("shared_expert_intermediate_size") if count else 0,
        renormalise=fields.boolean("norm_topk_prob", True),
        tiled=fields.boolean("linear_value_heads_tiled", False) and Hk != Hv,
    )


# -- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeltaNet:
    qkv: Weight  # [2 Hk Dk + Hv Dv, dim]: all q heads, all k heads, all v heads
    z: Weight  # [Hv Dv, dim]
    a: Weight  # [Hv, dim]
    b: Weight
    conv: np.ndarray  # [conv_dim, W]
    A_log: np.ndarray
    dt_bias: np.ndarray
    norm: np.ndarray
    out: Weight


@dataclass(frozen=True)
class Attention:
    q: Weight  # [H · 2D, dim]: per head D rows of q, then D rows of the gate
    k: Weight  # [Hkv · D, dim]
    v: Weight
    out: Weight
    q_norm: np.ndarray
    k_norm: np.ndarray


@dataclass(frozen=True)
class Experts:
    router: Weight  # [E, dim]
    shared_gate: Weight  # [1, dim]
    routed: ExpertStack
    shared: Mlp


@dataclass(frozen=True)
class Layer:
    mixer_norm: np.ndarray
    mixer: DeltaNet | Attention
    mlp_norm: np.ndarray
    mlp: Experts | Mlp


@dataclass(frozen=True)
class Weights:
    embed: Weight
    layers: tuple[Layer, ...]
    norm: np.ndarray
    head: Weight


def names(checkpoint: Checkpoint, config: Config) -> tuple[str, str, str]:
    """Prefix of the text model's tensors, prefix of `lm_head`, and the layout ("hf" or "mlx").

    HF files keep the convolution as [C, 1, W] and norm weights without their + 1; mlx-lm turned both.
    """
    prefix, head, layout = text_names(checkpoint)
    for name in checkpoint.names:
        if name.endswith("conv1d.weight") and len(checkpoint.shape(name)) == 3:
            _, second, third = checkpoint.shape(name)
            if second != third:
                return prefix, head, "hf" if second == 1 else "mlx"
    return prefix, head, layout


def read_weights(source: Source, config: Config) -> Weights:
    layers = tuple(_layer(source, config, n, kind) for n, kind in enumerate(config.layer_types))
    table = source.weight("embed_tokens", config.vocab_size, config.dim)
    head = read_head(source, config.tied, table, config.vocab_size, config.dim)
    return Weights(table, layers, _offset(source, "norm", config.dim), head)


def _offset(source: Source, path: str, *shape: int) -> np.ndarray:
    """A norm weight that HF files store less 1."""
    weight = source.vector(path, *shape)
    return weight + np.float32(1) if source.layout == "hf" else weight


def _layer(source: Source, config: Config, n: int, kind: str) -> Layer:
    dim, path = config.dim, f"layers.{n}"
    if n in config.dense_layers:
        block = read_mlp(source, f"{path}.mlp", dim, config.mlp_width)
    else:
        router, gate = adjacent(
            source.weight(f"{path}.mlp.gate", config.experts, dim),
            source.weight(f"{path}.mlp.shared_expert_gate", 1, dim),
        )
        block = Experts(
            router,
            gate,
            read_experts(source, f"{path}.mlp", "switch_mlp", config.experts, dim, config.expert_width),
            read_mlp(source, f"{path}.mlp.shared_expert", dim, config.shared_width),
        )
    return Layer(
        _offset(source, f"{path}.input_layernorm", dim),
        _delta_net(source, config, f"{path}.linear_attn.")
        if kind == "linear_attention"
        else _attention(source, config, f"{path}.self_attn."),
        _offset(source, f"{path}.post_attention_layernorm", dim),
        block,
    )


def _attention(source: Source, config: Config, path: str) -> Attention:
    H, Hkv, D, dim = config.heads, config.kv_heads, config.head_dim, config.dim
    rows = {"q": 2 * H * D, "k": Hkv * D, "v": Hkv * D}
    q, k, v = adjacent(*(source.weight(f"{path}{part}_proj", count, dim) for part, count in rows.items()))
    return Attention(
        q,
        k,
        v,
        source.weight(path + "o_proj", dim, H * D),
        _offset(source, path + "q_norm", D),
        _offset(source, path + "k_norm", D),
    )


def _delta_net(source: Source, config: Config, path: str) -> DeltaNet:
    Hv, Dv, dim, W = config.value_heads, config.value_dim, config.dim, config.conv_width
    if config.model_type == "qwen3_next":
        qkv, z, b, a = _joined_projections(source, config, path)
    else:
        qkv = source.weight(path + "in_proj_qkv", config.conv_dim, dim)
        z = source.weight(path + "in_proj_z", Hv * Dv, dim)
        b, a = (source.weight(f"{path}in_proj_{part}", Hv, dim) for part in ("b", "a"))
    qkv, z, a, b = adjacent(qkv, z, a, b)
    conv_shape = (config.conv_dim, 1, W) if source.layout == "hf" else (config.conv_dim, W, 1)
    return DeltaNet(
        qkv,
        z,
        a,
        b,
        source.vector(path + "conv1d", *conv_shape).reshape(config.conv_dim, W),
        source.vector(path + "A_log", Hv),
        source.vector(path + "dt_bias", Hv),
        source.vector(path + "norm", Dv),
        source.weight(path + "out_proj", dim, Hv * Dv),
    )


def _joined_projections(source: Source, config: Config, path: str) -> tuple[Weight, Weight, Weight, Weight]:
    """Qwen3-Next keeps q, k, v, z together, and b, a, key head by key head; rows are put into the order of Qwen3.5.

    In GGUF files q, k, v and z are in that order already, and two.
    """
    Hk, Hv, Dk, Dv, dim = config.key_heads, config.value_heads, config.key_dim, config.value_dim, config.dim
    per = Hv // Hk
    rows = np.arange(Hk * (2 * Dk + 2 * per * Dv)).reshape(Hk, 2 * Dk + 2 * per * Dv)
    q, k, v, z = (part.reshape(-1) for part in np.split(rows, np.cumsum([Dk, Dk, per * Dv]), axis=1))
    gates = np.arange(2 * Hv).reshape(Hk, 2 * per)
    b, a = gates[:, :per].reshape(-1), gates[:, per:].reshape(-1)
    joined, pair = (path + "in_proj_qkvz", rows.size, dim), (path + "in_proj_ba", 2 * Hv, dim)
    beta, alpha = (source.rows(pair[0], part, *pair[1:]) for part in (b, a))
    if path + "in_proj_qkv" in source:
        qkv = source.weight(path + "in_proj_qkv", config.conv_dim, dim)
        return qkv, source.weight(path + "in_proj_z", Hv * Dv, dim), beta, alpha
    mixed = source.rows(joined[0], np.concatenate([q, k, v]), *joined[1:])
    return mixed, source.rows(joined[0], z, *joined[1:]), beta, alpha


# -- the model -------------------------------------------------------------------------------------------------------


def caches(config: Config) -> tuple[Layout, ...]:
    """One cache per layer."""
    kv = config.kv_heads * config.head_dim
    pages = PagedKV(kv, kv)
    recurrent = RecurrentState(
        (config.conv_width - 1, config.conv_dim), (config.value_heads, config.value_dim, config.key_dim)
    )
    return tuple(recurrent if kind == "linear_attention" else pages for kind in config.layer_types)


def forward(step: Step, w: Weights, config: Config, cache: Sequence[Cache]) -> Array:
    """The residual stream after the last layer, [T, dim]; `logits` multiplies its rows with the head."""
    h = embed(step, w.embed, vocab=config.vocab_size)
    for layer, state in zip(w.layers, cache, strict=True):
        h = decoder_layer(step, h, layer, config, state)
    return h


def decoder_layer(step: Step, h: Array, layer: Layer, config: Config, state: Cache) -> Array:
    """The residual stream h [T, dim] after one layer."""
    x = stream_norm(step, h, layer.mixer_norm, config.norm_eps)
    if isinstance(layer.mixer, DeltaNet):
        h = ops.residual_add(h, delta_net(step, x, layer.mixer, config, state))
    else:
        h = ops.residual_add(h, attention(step, x, layer.mixer, config, state))
    x = stream_norm(step, h, layer.mlp_norm, config.norm_eps)
    if isinstance(layer.mlp, Mlp):
        return ops.residual_add(h, over_ranks(step, mlp(step, x, layer.mlp)))
    return moe(step, h, x, layer.mlp, config)


def commit(step: Step, w: Weights, config: Config, cache: Sequence[Cache]) -> None:
    """Move recurrent states on by what was accepted of kept runs."""
    for layer, state in zip(w.layers, cache, strict=True):
        if isinstance(layer.mixer, DeltaNet):
            commit_delta(step, state, layer.mixer.conv, config.key_heads)


def final_norm(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """The hidden state that the head reads, [T, dim]."""
    return stream_norm(step, h, w.norm, config.norm_eps)


def logits(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """Logits of the next token, float32 [T, vocab]."""
    return head_logits(step, final_norm(step, h, w, config), w.head, config.vocab_size)


def delta_net(step: Step, x: Array, w: DeltaNet, config: Config, cache: Cache) -> Array:
    """Gated DeltaNet: convolution, normalised q and k, the delta rule, a gated norm. x [T, dim] → [T, dim]."""
    Hk, Hv, Dk, Dv = config.key_heads, config.value_heads, config.key_dim, config.value_dim
    qkv, z, alpha, beta = (linear(step, x, part) for part in (w.qkv, w.z, w.a, w.b))
    y = ops.rms_norm_qk(convolve(step, cache, qkv, w.conv), Hk, Dk, Hk * Dk)
    if config.tiled and Hk < Hv:
        y, Hk = tiled(y, Hk, Hv, Dk), Hv
    g, b = ops.gdn_decay_beta(alpha, beta, w.A_log, w.dt_bias)
    d = delta_rule(step, cache, y, g, b, Hk, Hv, Dk, Dv)  # [T, Hv, Dv]
    return over_ranks(step, linear(step, flat(ops.gated_rms_norm(d, heads(z, Hv), w.norm, config.norm_eps)), w.out))


def tiled(y: Array, Hk: int, Hv: int, Dk: int) -> Array:
    """q‖k‖v with heads of q and k for each of v: all of them in turn, and again. [T, (2 Hk + Hv) D] → [T, 3 Hv D]."""
    made: Array | None = None
    for start in (0, Hk * Dk):
        for first in range(0, Hv, Hk):
            part = ops.columns(y, start, start + min(Hk, Hv - first) * Dk)
            made = part if made is None else ops.beside(made, part)
    assert made is not None
    return ops.beside(made, ops.columns(y, 2 * Hk * Dk, y.shape[1]))


def attention(step: Step, x: Array, w: Attention, config: Config, cache: Cache) -> Array:
    """Softmax attention with normed heads, partial rotation and a gate on the output. x [T, dim] → [T, dim]."""
    eps = config.norm_eps
    q, k, v = (linear(step, x, part) for part in (w.q, w.k, w.v))
    q, gate = ops.split_q_gate(heads(q, config.heads))  # [T, H, D] each
    q = apply_rope(step, ops.rms_norm(q, w.q_norm, eps), config.rope)
    k = apply_rope(step, ops.rms_norm(heads(k, config.kv_heads), w.k_norm, eps), config.rope)  # [T, Hkv, D]
    y = attend(step, cache, q, k, heads(v, config.kv_heads), config.head_dim**-0.5)
    return over_ranks(step, linear(step, flat(ops.sigmoid_gate(y, gate)), w.out))


def moe(step: Step, h: Array, x: Array, w: Experts, config: Config) -> Array:
    """h + Σ chosen experts of x + σ(score) · shared expert of x, h and x [T, dim]."""
    logits, score = (linear(step, x, part, "float32") for part in (w.router, w.shared_gate))
    ids, weights = ops.moe_softmax_topk(logits, config.top_k, propagate_nan=True, active=step.active)
    if config.renormalise:
        weights = ops.moe_normalize_weights(weights)
    # before the experts, which may still be on their way; a rank may have no part of it
    shared = mlp(step, x, w.shared) if w.shared.gate.shape[0] else None
    routed = experts(step, x, ids, weights, w.routed)
    return add_blocks(step, h, shared, None if shared is None else score, routed)


# -- over ranks ------------------------------------------------------------------------------------------------------


def split(config: Config, mesh: Mesh, group: int) -> Split[Config]:
    """Heads of attention and DeltaNet, widths of MLPs, experts, vocabulary.

    Sums over ranks: the embedding, the output of each mixer, and of each MLP with its experts and shared expert.
    """
    D, Dk, Dv, Hk = config.head_dim, config.key_dim, config.value_dim, config.key_heads
    own = share_heads(mesh, config.heads, config.kv_heads, D, group)
    delta = share_heads(
        mesh, config.value_heads, config.value_heads if config.tiled else Hk, Dv, group, "value heads of DeltaNet"
    )
    read = np.arange(delta.kv_first, delta.kv_stop)
    if config.tiled:  # from the key head that the first one reads on
        read = (delta.first + np.arange(min(delta.count, Hk))) % Hk
    dense, shared = share_width(mesh, config.mlp_width, group), share_width(mesh, config.shared_width, group)
    keys = (read[:, None] * Dk + np.arange(Dk)).reshape(-1)
    values = np.arange(delta.first * Dv, delta.stop * Dv)
    mixed = np.concatenate([keys, Hk * Dk + keys, 2 * Hk * Dk + values])
    value_heads = Part(-2, slice(delta.first, delta.stop), config.value_heads)
    parts = {
        **vocabulary_parts(mesh, config.vocab_size),
        **mlp_parts("mlp", dense, config.mlp_width),
        **mlp_parts("mlp.shared_expert", shared, config.shared_width),
        "self_attn.q_proj": own.rows(2 * D),
        "self_attn.k_proj": own.kv_rows(D),
        "self_attn.v_proj": own.kv_rows(D),
        "self_attn.o_proj": own.columns(D),
        "linear_attn.in_proj_qkv": Part(-2, mixed, config.conv_dim),
        "linear_attn.conv1d": Part(-2, mixed, config.conv_dim),
        "linear_attn.in_proj_z": delta.rows(Dv),
        **dict.fromkeys(
            (f"linear_attn.{name}" for name in ("in_proj_a", "in_proj_b", "A_log", "dt_bias")), value_heads
        ),
        "linear_attn.out_proj": delta.columns(Dv),
        **({} if config.tiled else _joined_parts(config, delta)),
    }
    width = None
    if mesh.experts_split and config.experts:
        width = (*share_width(mesh, config.expert_width, group), config.expert_width)
    local = replace(
        config,
        heads=own.count,
        kv_heads=own.kv_count,
        key_heads=len(read),
        value_heads=delta.count,
        mlp_width=dense[1] - dense[0],
        shared_width=shared[1] - shared[0],
        expert_width=config.expert_width if width is None else width[1] - width[0],
    )
    kv, state = own.kv_span(D), slice(delta.first, delta.stop)
    caches = tuple((mixed, state) if kind == "linear_attention" else (kv, kv) for kind in config.layer_types)
    return Split(local, parts, width, caches)


def _joined_parts(config: Config, delta: Heads) -> dict[str, Part]:
    """Rows of Qwen3-Next's joined projections: those of each key head, with the value heads that are here."""
    Dk, Dv, per = config.key_dim, config.value_dim, config.value_heads // config.key_heads
    block = 2 * Dk + 2 * per * Dv
    rows, gates = [], []
    for key in range(delta.kv_first, delta.kv_stop):
        first, stop = max(delta.first, key * per) - key * per, min(delta.stop, (key + 1) * per) - key * per
        start = key * block
        rows += [np.arange(start, start + 2 * Dk)]
        rows += [start + 2 * Dk + shift * per * Dv + np.arange(first * Dv, stop * Dv) for shift in (0, 1)]
        gates += [2 * key * per + shift * per + np.arange(first, stop) for shift in (0, 1)]
    return {
        "linear_attn.in_proj_qkvz": Part(-2, np.concatenate(rows), config.key_heads * block),
        "linear_attn.in_proj_ba": Part(-2, np.concatenate(gates), 2 * config.value_heads),
    }


# -- the family ------------------------------------------------------------------------------------------------------


def mlx_rules(raw: Mapping[str, Any], config: Config) -> MlxRules:
    """mlx-lm knows no model_type with `_text`, and casts the A_log of Qwen3-Next as everything else."""
    qwen3_next = raw["model_type"] == "qwen3_next"
    return MlxRules(
        nested=not qwen3_next,
        offset_norms=(  # those of the layers that predict further tokens as well
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
            "q_norm.weight",
            "k_norm.weight",
            "model.norm.weight",
            "mtp.norm.weight",
            "pre_fc_norm_embedding.weight",
            "pre_fc_norm_hidden.weight",
        ),
        channels_last=("conv1d.weight",),
        uncast=() if qwen3_next else ("A_log",),
        config={"model_type": raw["model_type"].removesuffix("_text")},
    )


def _of_gguf(keys: GgufKeys, model_type: str) -> dict[str, Any]:
    keys.accept("rope.dimension_sections")  # of pictures
    config, layers = base(keys, model_type), keys.layers
    turned = rotation(keys, config["head_dim"])
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    keys.require(inner % heads == 0, f"ssm.inner_size is {inner}, expected a multiple of ssm.time_step_rank ({heads})")
    interval = keys.integer("full_attention_interval", 4)
    recurrent = tuple((n + 1) % interval != 0 for n in range(layers))
    if "attention.recurrent_layers" in keys:
        recurrent = keys.per_layer("attention.recurrent_layers", bool)
    rope = {"rope_type": "default"} | turned.get("rope_scaling", {})
    rope |= {"rope_theta": config["rope_theta"], "partial_rotary_factor": turned.get("partial_rotary_factor", 1.0)}
    config |= {
        "rope_parameters": rope,
        "layer_types": [_KINDS[0] if mixes else _KINDS[1] for mixes in recurrent],
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_value_heads_tiled": model_type != "qwen3_next",
    }  # fmt: skip
    if model_type == "qwen3_5_text":
        return config | {"intermediate_size": keys.integer("feed_forward_length")}
    count = keys.integer("expert_used_count")
    width = keys.integer("expert_feed_forward_length", None)
    shared = keys.integer("expert_shared_feed_forward_length", None)
    return config | {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": count,
        "moe_intermediate_size": width or keys.integer("feed_forward_length") // count,
        "shared_expert_intermediate_size": shared or keys.integer("feed_forward_length"),
        "norm_topk_prob": keys.boolean("expert_weights_norm", True),
    }  # fmt: skip


def _grouped(config: Mapping[str, Any], path: str, axis: int) -> np.ndarray | None:
    """Value heads in the order of mlx-lm's files: those of one key head together."""
    Hk, Hv = config["linear_num_key_heads"], config["linear_num_value_heads"]
    Dk, Dv, part = config["linear_key_head_dim"], config["linear_value_head_dim"], path.removeprefix("linear_attn.")
    heads = np.arange(Hv).reshape(Hv // Hk, Hk).T.reshape(-1)
    values = (heads[:, None] * Dv + np.arange(Dv)).reshape(-1)
    if axis == 1:
        return values if part == "out_proj" else None
    if part in ("in_proj_qkv", "conv1d"):
        return np.concatenate([np.arange(2 * Hk * Dk), 2 * Hk * Dk + values])
    return {"in_proj_z": values}.get(part, heads if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else None)


_DECAY = {"linear_attn.A_log": logarithm}
_GGUF = GgufNames(
    architectures={
        "qwen35moe": GgufArchitecture(lambda keys: _of_gguf(keys, "qwen3_5_moe_text"), values=_DECAY, written=_grouped),
        "qwen35": GgufArchitecture(lambda keys: _of_gguf(keys, "qwen3_5_text"), values=_DECAY, written=_grouped),
        "qwen3next": GgufArchitecture(
            lambda keys: _of_gguf(keys, "qwen3_next"),
            values=_DECAY,
            unwritten="its projections of q, k, v and z are two, which mlx-lm has as one",
            copied=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
        ),
    },
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
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "linear_attn.in_proj_qkvz": "ssm_in",
        "linear_attn.in_proj_ba": "ssm_ba",
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
        "mlp.gate": "ffn_gate_inp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        "mlp.switch_mlp.gate_proj": "ffn_gate_exps",
        "mlp.switch_mlp.up_proj": "ffn_up_exps",
        "mlp.switch_mlp.down_proj": "ffn_down_exps",
        "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
        **{
            f"mlp.{block}{part}_proj": f"ffn_{part}{end}"
            for block, end in (("", ""), ("shared_expert.", "_shexp"))
            for part in ("gate", "up", "down")
        },
    },
    tensors={"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"},
)


def _head_config(config: Config) -> Config:
    """The head is one layer that attends, with experts if the trunk has any."""
    return replace(
        config, layer_types=("full_attention",), dense_layers=frozenset() if config.experts else frozenset((0,))
    )


FAMILY = Family(
    name="qwen3_5",
    model_types=MODEL_TYPES,
    read_config=read_config,
    names=names,
    read_weights=read_weights,
    caches=caches,
    forward=forward,
    commit=commit,
    commits=lambda config: not config.tiled,
    final_norm=final_norm,
    logits=logits,
    roles={
        "embedding": ("embed_tokens",),
        "head": ("lm_head",),
        "experts": ("mlp.switch_mlp.*", "mlp.experts.*"),
        "shared expert": ("mlp.shared_expert.*",),
        "router": ("mlp.gate", "mlp.shared_expert_gate"),
        "norms": ("*norm",),
        "attention": ("self_attn.*",),
        "linear attention": ("linear_attn.*",),
        "dense MLP": ("mlp.*",),
    },
    skipped=("model.visual.", "vision_tower.", "visual.", "mtp.", "model.mtp.", "language_model.mtp."),
    unquantized=(".conv1d",),
    mlx_rules=mlx_rules,
    gguf=_GGUF,
    split=split,
    draft_head=DraftHead(
        model_types=MODEL_TYPES,
        depth="mtp_num_hidden_layers",
        spelling="mtp",
        drafter=lambda model_type: "qwen3_5_mtp",
        config=_head_config,
        read_layer=lambda source, config: _layer(source, config, 0, "full_attention"),
        read_norm=_offset,
        layer=decoder_layer,
    ),
)
