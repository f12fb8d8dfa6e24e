"""Gemma 3n: several residual streams (AltUp), a low-rank branch beside attention (Laurel), MLPs of few active neurons.

model_type `gemma3n` (config under `text_config`) and `gemma3n_text`. A layer computes on the first of P streams, which
it predicts from all, and corrects all of them by what it found (ops/altup.py). Attention, per-layer inputs and what the
last layers share are Gemma 4's (gemma4.py). Axis letters: T tokens, P streams.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from penstock import ops
from penstock.errors import CheckpointError
from penstock.models import gemma4
from penstock.models.config import Fields, layer_types
from penstock.models.family import Family, GgufArchitecture, GgufNames, MlxRules
from penstock.models.gemma3 import rope_of
from penstock.models.gemma4 import Attention, Kind, PerLayer, PerLayerInputs, attention, per_layer_inputs
from penstock.models.gguf_keys import GgufKeys, base, rope_scaling, sliding, vocab_size
from penstock.models.layers import (
    Mlp,
    adjacent,
    embed,
    flat,
    head_logits,
    linear,
    mlp,
    over_ranks,
    read_head,
    read_mlp,
    stream_norm,
    stream_rows,
)
from penstock.models.source import Source, Weight
from penstock.models.split import Mesh, Split, mlp_parts, share_heads, share_width, vocabulary_parts
from penstock.models.step import Layout, Step
from penstock.ops.array import Array

MODEL_TYPES = ("gemma3n", "gemma3n_text")

_SLIDING, _FULL = "sliding_attention", "full_attention"


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
    cuts: tuple[float | None, ...]  # standard deviations below which neurons of a layer are 0; None: none of them is
    streams: int
    scaled: bool  # what the per-layer input meets is scaled by a vector
    laurel_rank: int
    tied: bool
    softcap: float | None
    per_layer_width: int
    per_layer_vocab: int
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0


def read_config(raw: dict) -> Config:
    """The config of a text model. Raises CheckpointError for what is missing, inconsistent or not supported."""
    top = Fields(raw, "config.json")
    fields = top.table("text_config", top)
    model_type = fields.choice("model_type", MODEL_TYPES, None) or top.choice("model_type", MODEL_TYPES)
    fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    fields.choice("attention_bias", (False,), False)
    fields.choice("altup_active_idx", (0,), 0)
    layers = fields.integer("num_hidden_layers", most=4096)
    kinds_of = layer_types(fields, layers, (_SLIDING, _FULL), 5)
    H, Hkv, D = (fields.integer(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    fields.require(H % Hkv == 0, f"num_attention_heads is {H}, expected a multiple of num_key_value_heads ({Hkv})")
    max_positions = fields.integer("max_position_embeddings", 32768)
    window = fields.integer("sliding_window")
    windows = {_SLIDING: window, _FULL: None}
    kinds = {
        kind: Kind(H, Hkv, D, rope_of(fields, kind, D, max_positions), windows[kind], True) for kind in set(kinds_of)
    }
    shared = fields.integer("num_kv_shared_layers", least=0, most=layers - 1)
    first_shared = layers - shared
    last = {kind: n for n, kind in enumerate(kinds_of[:first_shared])}
    for kind in kinds_of[first_shared:]:
        fields.require(kind in last, f"num_kv_shared_layers is {shared}, expected a layer of {kind} before those")
    vocab = fields.integer("vocab_size")
    return Config(
        model_type=model_type,
        vocab_size=vocab,
        max_positions=max_positions,
        dim=fields.integer("hidden_size"),
        layer_types=kinds_of,
        kinds=dict(sorted(kinds.items())),
        sources=tuple(n if n < first_shared else last[kind] for n, kind in enumerate(kinds_of)),
        norm_eps=fields.number("rms_norm_eps", above=0),
        heads=H,
        mlp_widths=_widths(fields, layers),
        cuts=_cuts(fields, layers),
        streams=fields.integer("altup_num_inputs", least=2, most=64),
        scaled=fields.boolean("altup_correct_scale", True),
        laurel_rank=fields.integer("laurel_rank"),
        tied=fields.boolean("tie_word_embeddings", True) or top.boolean("tie_word_embeddings", True),
        softcap=fields.number("final_logit_softcapping", None, above=0),
        per_layer_width=fields.integer("hidden_size_per_layer_input"),
        per_layer_vocab=fields.integer("vocab_size_per_layer_input", most=vocab),
    )


def _widths(fields: Fields, layers: int) -> tuple[int, ...]:
    """`intermediate_size`: one number for all layers, or one for each."""
    if not isinstance(fields.values.get("intermediate_size"), list):
        return (fields.integer("intermediate_size"),) * layers
    widths = fields.items("intermediate_size", int)
    fields.require(
        len(widths) == layers and min(widths) > 0, f"intermediate_size has {len(widths)} entries, expected {layers}"
    )
    return widths


def _cuts(fields: Fields, layers: int) -> tuple[float | None, ...]:
    """`activation_sparsity_pattern`: the share of neurons that are 0, by layer."""
    shares = fields.values.get("activation_sparsity_pattern")
    if shares is None:
        raise fields.error("activation_sparsity_pattern", f"a list of {layers} numbers from 0 to 1")
    each = shares if isinstance(shares, list) else [shares] * layers
    right = all(isinstance(s, int | float) and not isinstance(s, bool) and 0 <= s < 1 for s in each)
    if not right or len(each) != layers:
        raise fields.error("activation_sparsity_pattern", f"a list of {layers} numbers from 0 to 1")
    return tuple(NormalDist().inv_cdf(share) if share > 0 else None for share in each)


# -- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AltUp:
    router: Weight  # [P, dim]
    router_norm: np.ndarray  # divided by dim
    predict: np.ndarray  # [P · N, P]: of the factors of `altup_mix`, with an extra stream but in the first layer
    predict_bias: np.ndarray  # [P · N]
    correct: np.ndarray
    correct_bias: np.ndarray
    scale: np.ndarray | None  # [dim]


@dataclass(frozen=True)
class Laurel:
    left: Weight  # [rank, dim]
    right: Weight
    norm: np.ndarray


@dataclass(frozen=True)
class Layer:
    altup: AltUp
    laurel: Laurel
    input_norm: np.ndarray
    attention: Attention
    attention_norm: np.ndarray
    mlp_norm: np.ndarray
    mlp: Mlp
    output_norm: np.ndarray
    per_layer: PerLayer


@dataclass(frozen=True)
class Weights:
    embed: Weight
    streams: tuple[Weight, ...]  # [dim, dim], of each stream but the first
    merged: tuple[Weight, ...]
    per_layer: PerLayerInputs
    layers: tuple[Layer, ...]
    norm: np.ndarray
    head: Weight


def read_weights(source: Source, config: Config) -> Weights:
    dim = config.dim
    table = source.weight("embed_tokens", config.vocab_size, dim)
    others = range(config.streams - 1)
    streams, merged = (
        tuple(source.weight(f"altup_{part}projections.{n}", dim, dim) for n in others) for part in ("", "unembed_")
    )
    return Weights(
        table,
        adjacent(*streams),
        merged,
        gemma4.read_inputs(source, config),
        tuple(_layer(source, config, n) for n in range(len(config.layer_types))),
        source.vector("norm", dim),
        read_head(source, config.tied, table, config.vocab_size, dim),
    )


def _layer(source: Source, config: Config, n: int) -> Layer:
    dim, path = config.dim, f"layers.{n}."
    return Layer(
        _altup(source, config, n, path + "altup."),
        Laurel(
            source.weight(path + "laurel.linear_left", config.laurel_rank, dim),
            source.weight(path + "laurel.linear_right", dim, config.laurel_rank),
            source.vector(path + "laurel.post_laurel_norm", dim),
        ),
        source.vector(path + "input_layernorm", dim),
        gemma4.read_attention(source, config, n, path + "self_attn."),
        source.vector(path + "post_attention_layernorm", dim),
        source.vector(path + "pre_feedforward_layernorm", dim),
        read_mlp(source, path + "mlp", dim, config.mlp_widths[n]),
        source.vector(path + "post_feedforward_layernorm", dim),
        gemma4.read_per_layer(source, config, path),
    )


def _altup(source: Source, config: Config, n: int, path: str) -> AltUp:
    """Prediction and correction as factors of `altup_mix`, linear in tanh of the router's P scores.

    Predicted: stream q plus Σ_p of p times a factor; behind a layer all streams but the first have got an extra one
    more. Corrected: prediction q plus (extra − prediction 0) times 1 + a factor.
    """
    P, dim = config.streams, config.dim
    predict = source.vector(path + "prediction_coefs", P * P, P).reshape(P, P, P)
    correct = source.vector(path + "correction_coefs", P, P)
    own = np.eye(P, dtype=np.float32)
    factors, constant = [predict], [own]
    if n > 0:
        factors.append(predict[:, 1:].sum(axis=1, keepdims=True))
        constant.append(own[:, 1:].sum(axis=1, keepdims=True))
    later = np.zeros((P, P + 1, P), np.float32)
    later[:, 0], later[:, P] = -correct, correct
    constants = np.concatenate([own, np.ones((P, 1), np.float32)], axis=1)
    constants[:, 0] -= 1
    return AltUp(
        source.weight(path + "modality_router", P, dim),
        source.vector(path + "router_norm", dim) / np.float32(dim),
        np.concatenate(factors, axis=1).reshape(-1, P),
        np.concatenate(constant, axis=1).reshape(-1),
        later.reshape(-1, P),
        constants.reshape(-1),
        source.vector(path + "correct_output_scale", dim) if config.scaled else None,
    )


# -- the model -------------------------------------------------------------------------------------------------------


def caches(config: Config) -> tuple[Layout, ...]:
    """One cache per layer; a layer that shares another's has an empty one."""
    return gemma4.caches(config)


def forward(step: Step, w: Weights, config: Config, cache: Sequence[tuple[Array, Array]]) -> Array:
    """The mean of the streams after the last layer, [T, dim]; `logits` multiplies its rows with the head."""
    eps, P, dim = config.norm_eps, config.streams, config.dim
    h = ops.mul(embed(step, w.embed, vocab=config.vocab_size), math.sqrt(dim))
    inputs = per_layer_inputs(step, h, w.per_layer, config)
    x = stream_rows(step, h)
    rest, *more = (ops.altup_match(linear(step, x, part, "float32"), h) for part in w.streams)
    for part in more:
        rest = ops.beside(rest, part)
    rest = rest.reshape(h.shape[0], P - 1, dim)
    extra = None  # is still to be added to all streams but the first
    for n, layer in enumerate(w.layers):
        w_up = layer.altup
        h, rest = ops.altup_mix(h, rest, scores(step, h, w_up, config), w_up.predict, w_up.predict_bias, extra)
        x = stream_norm(step, h, layer.input_norm, eps)
        y = ops.rms_norm(
            attention(step, x, layer.attention, config, n, cache[config.sources[n]]), layer.attention_norm, eps
        )
        low = linear(step, linear(step, x, layer.laurel.left), layer.laurel.right)
        laurel = ops.add(x, ops.rms_norm(low, layer.laurel.norm, eps))
        y = ops.mul(ops.residual_add(ops.residual_add(h, y), laurel), 2**-0.5)
        x = feed_forward(step, stream_norm(step, y, layer.mlp_norm, eps), layer.mlp, config.cuts[n])
        y = ops.residual_add(y, ops.rms_norm(x, layer.output_norm, eps))
        h, rest = ops.altup_mix(h, rest, scores(step, y, w_up, config), w_up.correct, w_up.correct_bias, y)
        scaled = h if w_up.scale is None else ops.mul(h, w_up.scale)
        x = ops.geglu(linear(step, stream_rows(step, scaled), layer.per_layer.gate), inputs[n])
        extra = ops.rms_norm(linear(step, x, layer.per_layer.out), layer.per_layer.norm, eps)
    total, streams = h, flat(rest)
    for n, part in enumerate(w.merged):
        one = ops.columns(streams, n * dim, (n + 1) * dim)
        one = stream_rows(step, one if extra is None else ops.residual_add(one, extra))
        total = ops.residual_add(total, ops.altup_match(linear(step, one, part, "float32"), h))
    return ops.mul(total, 1 / P)


def scores(step: Step, h: Array, w: AltUp, config: Config) -> Array:
    """The router's products, float32 [T, P]."""
    return linear(step, stream_norm(step, h, w.router_norm, config.norm_eps), w.router, "float32")


def feed_forward(step: Step, x: Array, w: Mlp, cut: float | None) -> Array:
    """A gated MLP; with a cut most neurons are 0, and all of them are on every rank. x [T, dim] → [T, dim]."""
    if cut is None:
        return over_ranks(step, mlp(step, x, w, "gelu_tanh"))
    gate = ops.gaussian_topk(linear(step, x, w.gate), cut)
    return linear(step, ops.geglu(gate, linear(step, x, w.up)), w.down)


def final_norm(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """The hidden state that the head reads, [T, dim]."""
    return stream_norm(step, h, w.norm, config.norm_eps)


def logits(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """Logits of the next token, float32 [T, vocab]."""
    y = head_logits(step, final_norm(step, h, w, config), w.head, config.vocab_size)
    return y if config.softcap is None else ops.softcap(y, config.softcap)


# -- over ranks ------------------------------------------------------------------------------------------------------


def split(config: Config, mesh: Mesh, group: int) -> Split[Config]:
    """Heads, widths of MLPs without a cut, vocabulary; all that is of streams, and MLPs with a cut, is on every rank.

    Sums over ranks: both embeddings, the output of attention and of MLPs that are split.
    """
    D = next(iter(config.kinds.values())).head_dim
    heads = share_heads(mesh, config.heads, next(iter(config.kinds.values())).kv_heads, D, group)
    widths = [
        share_width(mesh, width, group) if cut is None else (0, width)
        for width, cut in zip(config.mlp_widths, config.cuts, strict=True)
    ]
    parts = {
        **vocabulary_parts(mesh, config.vocab_size),
        **vocabulary_parts(mesh, config.per_layer_vocab, "embed_tokens_per_layer"),
        **{f"self_attn.{part}_proj": heads.kv_rows(D) for part in ("k", "v")},
        "self_attn.q_proj": heads.rows(D),
        "self_attn.o_proj": heads.columns(D),
    }
    for n, cut in enumerate(config.cuts):
        if cut is None:
            parts |= mlp_parts(f"layers.{n}.mlp", widths[n], config.mlp_widths[n])
    kinds = {name: replace(kind, heads=heads.count, kv_heads=heads.kv_count) for name, kind in config.kinds.items()}
    local = replace(config, kinds=kinds, mlp_widths=tuple(stop - first for first, stop in widths))
    spans = (heads.kv_span(D) if source == n else slice(0, 0) for n, source in enumerate(config.sources))
    return Split(local, parts, None, tuple((span, span) for span in spans))


# -- the family ------------------------------------------------------------------------------------------------------


def mlx_rules(raw: Mapping[str, Any], config: Config) -> MlxRules:
    """mlx-lm keeps the names of the released files, and the keys and values of layers that share those of others; it
    has no model of `gemma3n_text`.
    """
    unused = tuple(f"self_attn.{part}" for part in ("k_proj", "v_proj", "k_norm"))
    return MlxRules(within=raw["model_type"] == "gemma3n", kept=unused)


def _of_gguf(keys: GgufKeys) -> dict[str, Any]:
    """The rank of LAuReL is told by its tensors; of the share of neurons that are 0 files have the quantile."""
    config, layers = base(keys, "gemma3n_text"), keys.layers
    left = "blk.0.laurel_l.weight"
    if left not in keys.file:
        raise CheckpointError(f"{keys.file.path}: has no tensor {left!r}, expected it by the metadata")
    if keys.integer("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise keys.error("rope.dimension_count", f"{config['head_dim']}, the length of keys")
    key = "activation_sparsity_scale"
    found = keys.values.get(key)
    cuts: list[Any] = found if isinstance(found, list) else [found] * layers
    keys.accept(key)
    if len(cuts) != layers or any(not isinstance(cut, float) or math.isnan(cut) for cut in cuts):
        raise keys.error(key, f"{layers} numbers, one per layer")
    return config | {
        "intermediate_size": list(keys.per_layer("feed_forward_length", int)),
        "layer_types": sliding(keys, 5),
        "sliding_window": keys.integer("attention.sliding_window"),
        "num_kv_shared_layers": keys.integer("attention.shared_kv_layers", least=0, most=layers - 1),
        "altup_num_inputs": keys.integer("altup.num_inputs"),
        "altup_active_idx": keys.integer("altup.active_idx", least=0),
        "altup_correct_scale": keys.has(r"blk\.\d+\.altup_correct_scale\.weight"),
        "laurel_rank": keys.file.tensors[left].shape[0],
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": vocab_size(keys.file, "per_layer_token_embd.weight"),
        "activation_sparsity_pattern": [NormalDist().cdf(cut) for cut in cuts],
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0, above=0),
        "rope_scaling": rope_scaling(keys),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0) or None,
    }  # fmt: skip


_GGUF = GgufNames(
    architectures={"gemma3n": GgufArchitecture(_of_gguf, unwritten="the matrices of its streams are one tensor")},
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
        "post_feedforward_layernorm": "post_ffw_norm",
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
        "altup.prediction_coefs": "altup_predict_coef",
        "altup.correction_coefs": "altup_correct_coef",
        "altup.modality_router": "altup_router",
        "altup.router_norm": "altup_router_norm",
        "altup.correct_output_scale": "altup_correct_scale",
        "laurel.linear_left": "laurel_l",
        "laurel.linear_right": "laurel_r",
        "laurel.post_laurel_norm": "laurel_post_norm",
    },
    stacks={"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"},
)

FAMILY = Family(
    name="gemma3n",
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
        "norms": ("*norm", "altup.correct_output_scale"),
        "attention": ("self_attn.*",),
        "dense MLP": ("mlp.*", "altup*", "laurel.*", "per_layer_*"),  # with what stands around the MLP
    },
    skipped=tuple(
        f"{prefix}{part}"
        for prefix in ("", "model.")
        for part in ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
    ),
    mlx_rules=mlx_rules,
    gguf=_GGUF,
    split=split,
)
