"""DeepSeek-V3 and Cogito-V2: latent attention (MLA), group-limited sigmoid routing, a shared expert.

model_type `deepseek_v3`, `kimi_k2`, `glm4_moe_lite` (GLM-4.7-Flash) and `mistral4` (Mistral Small 4: softmax routing,
queries that grow with their position; `mistral3`: with a vision tower, the config under `text_config`). The cache
holds a latent [R] and a rotated key [rope] per position, shared by all heads. A few tokens attend in the latent space
(absorbed); a long chunk of a prompt expands the cached latents to keys and values first. Axis letters: T tokens, H
heads, R rank of the latent, nope and rope the two parts of a head's query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from penstock import ops
from penstock.models.config import MOST_ROWS, Fields, expert_groups, query_scale, text_part
from penstock.models.family import DraftHead, Family, GgufArchitecture, GgufNames, MlxRules, SplitHeads
from penstock.models.gguf_keys import SOFTMAX, GgufKeys, rope_scaling, sigmoid_experts, softmax_experts, stem
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
from penstock.models.source import VISION, Source, Weight
from penstock.models.split import Mesh, Part, Split, mlp_parts, share_heads, share_width, vocabulary_parts
from penstock.models.step import Layout, PagedKV, Step
from penstock.ops.array import Array

MODEL_TYPES = ("deepseek_v3", "kimi_k2", "glm4_moe_lite", "mistral4")

_WRAPPER = "mistral3"

_INNER_EPS = 1e-6  # of the norms inside MLA, whatever rms_norm_eps says
_EXPANDED_BYTES = 1 << 29  # keys and values that a chunk of a prompt may expand to


@dataclass(frozen=True)
class Config:
    model_type: str
    vocab_size: int
    max_positions: int
    dim: int
    layers: int
    norm_eps: float
    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope_dim: int
    value_dim: int
    rope: Rope
    interleaved: bool
    scale: float
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
    softmax: bool = False  # the router's scores; else sigmoid, with a bias for the choice
    query_scale: tuple[float, int] | None = None  # beta and length of ops.position_scale


def read_config(raw: dict) -> Config:
    """The config of a text model. Raises CheckpointError for what is missing, inconsistent or not supported."""
    fields, model_type = text_part(raw, MODEL_TYPES, _WRAPPER, ("mistral4",))
    mistral = model_type == "mistral4"
    flash = model_type == "glm4_moe_lite"  # whose defaults transformers and mlx-lm do not agree on
    fields.choice("hidden_act", ("silu",), "silu")
    fields.choice("attention_bias", (False,), False)
    if mistral:
        fields.choice("n_group", (1,), 1)
    else:
        fields.choice("scoring_func", ("sigmoid",), "sigmoid")
        fields.choice("topk_method", ("noaux_tc",), "noaux_tc")
    fields.choice("moe_layer_freq", (1,), 1)
    layers = fields.integer("num_hidden_layers", most=4096)
    nope, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    heads = ordered_heads(fields, nope + rope_dim)
    max_positions = fields.integer("max_position_embeddings", 4096)
    told = _whole_rotation(fields, nope + rope_dim, rope_dim) if mistral else fields
    rope = read_rope(told, rope_dim, max_positions, theta=None if flash or mistral else 10000.0)
    fields.require(rope.width == rope_dim, "partial_rotary_factor is not 1, expected all of qk_rope_head_dim to turn")

    count = fields.integer("n_routed_experts") if flash or mistral else fields.integer("n_routed_experts", 0, least=0)
    dense = fields.integer("first_k_dense_replace", int(flash), least=0) if count else layers
    kinds = fields.items("mlp_layer_types", str, None) if flash else None
    if kinds is not None:
        dense = kinds.count("dense")
        expected = ("dense",) * dense + ("sparse",) * (layers - dense)
        fields.require(kinds == expected, f"mlp_layer_types has another order, expected {layers}: dense ones first")
    groups, top_groups, k = expert_groups(fields, count) if count else (1, 1, 0)
    expert_width = fields.integer("moe_intermediate_size") if count else 0
    return Config(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        max_positions=max_positions,
        dim=fields.integer("hidden_size"),
        layers=layers,
        norm_eps=fields.number("rms_norm_eps", above=0),
        heads=heads,
        q_rank=fields.integer("q_lora_rank", None),
        kv_rank=fields.integer("kv_lora_rank", most=MOST_ROWS),
        nope=nope,
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim"),
        rope=rope,
        interleaved=fields.boolean("rope_interleave", True),
        scale=(nope + rope_dim) ** -0.5 * rope.score_gain,
        tied=fields.boolean("tie_word_embeddings", False),
        mlp_width=fields.integer("intermediate_size") if dense else 0,
        dense_layers=min(dense, layers),
        experts=count,
        top_k=k,
        expert_width=expert_width,
        shared_width=expert_width * _shared_experts(fields, mistral) if count else 0,
        groups=groups,
        top_groups=top_groups,
        renormalise=fields.boolean("norm_topk_prob", True),
        routed_scale=fields.number("routed_scaling_factor", 1.8 if flash else 1.0, above=0),
        softmax=mistral,
        query_scale=scale if mistral and (scale := query_scale(fields))[0] else None,
    )


def ordered_heads(fields: Fields, width: int) -> int:
    """Heads of `width` channels each, whose rows are put into order."""
    heads = fields.integer("num_attention_heads")
    found = f"num_attention_heads is {heads} and their width {width}"
    fields.require(heads * width <= MOST_ROWS, f"{found}, expected at most {MOST_ROWS} channels in all")
    return heads


def _shared_experts(fields: Fields, mistral: bool) -> int:
    return fields.integer("n_shared_experts") if mistral else fields.integer("n_shared_experts", 0, least=0)


def _whole_rotation(fields: Fields, width: int, rope_dim: int) -> Fields:
    """Without `partial_rotary_factor`, which is that of a head: the share of qk_rope_head_dim."""
    table = fields.table("rope_parameters")
    key = "partial_rotary_factor"
    share = table.number(key, None, above=0, most=1)
    if share is not None and round(share * width) != rope_dim:
        raise table.error(key, f"{rope_dim / width:g} (qk_rope_head_dim of a head)")
    parameters = {name: value for name, value in table.values.items() if name != key}
    return Fields({**fields.values, "rope_parameters": parameters, key: None}, fields.where)


# -- weights ---------------------------------------------------------------------------------------------------------


class LatentConfig(Protocol):
    """What latent attention takes from a config; rope None: nothing is rotated."""

    @property
    def dim(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def q_rank(self) -> int | None: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def nope(self) -> int: ...
    @property
    def rope_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def rope(self) -> Rope | None: ...
    @property
    def interleaved(self) -> bool: ...
    @property
    def scale(self) -> float: ...


class RoutingConfig(Protocol):
    """What the choice of experts takes from a config."""

    @property
    def groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def renormalise(self) -> bool: ...
    @property
    def routed_scale(self) -> float: ...


@dataclass(frozen=True)
class Attention:
    q_a: Weight  # [q_rank, dim], or q itself
    kv_a: Weight  # [R + rope, dim]
    q_norm: np.ndarray | None
    q_b: Weight | None  # [H · (nope + rope), q_rank]
    kv_norm: np.ndarray
    key: Weight  # kv_b whole [H · (nope + vd), R], or embed_q [H, R, nope]
    value: Weight | None  # unembed_out [H, vd, R]; None: the value rows of kv_b
    out: Weight


@dataclass(frozen=True)
class Experts:
    router: Weight
    bias: np.ndarray | None
    routed: ExpertStack
    shared: Mlp | None


@dataclass(frozen=True)
class Layer:
    attention_norm: np.ndarray
    attention: Attention
    mlp_norm: np.ndarray
    mlp: Mlp | Experts


@dataclass(frozen=True)
class Weights:
    embed: Weight
    layers: tuple[Layer, ...]
    norm: np.ndarray
    head: Weight


def read_weights(source: Source, config: Config) -> Weights:
    table = source.weight("embed_tokens", config.vocab_size, config.dim)
    layers = tuple(_layer(source, config, n) for n in range(config.layers))
    head = read_head(source, config.tied, table, config.vocab_size, config.dim)
    return Weights(table, layers, source.vector("norm", config.dim), head)


def _layer(source: Source, config: Config, n: int) -> Layer:
    dim, path = config.dim, f"layers.{n}"
    block: Mlp | Experts
    if n < config.dense_layers:
        block = read_mlp(source, f"{path}.mlp", dim, config.mlp_width)
    else:
        bias = f"{path}.mlp.gate.e_score_correction_bias"
        shared = config.shared_width
        block = Experts(
            source.weight(f"{path}.mlp.gate", config.experts, dim),
            source.vector(bias, config.experts) if not config.softmax and bias in source else None,
            read_experts(source, f"{path}.mlp", "switch_mlp", config.experts, dim, config.expert_width),
            read_mlp(source, f"{path}.mlp.shared_experts", dim, shared) if shared else None,
        )
    return Layer(
        source.vector(f"{path}.input_layernorm", dim),
        read_attention(source, config, f"{path}.self_attn."),
        source.vector(f"{path}.post_attention_layernorm", dim),
        block,
    )


def read_attention(source: Source, config: LatentConfig, path: str) -> Attention:
    H, R, dim = config.heads, config.kv_rank, config.dim
    width, vd = config.nope + config.rope_dim, config.value_dim
    per_head = np.concatenate([np.arange(config.nope), config.nope + _halves(config)])
    q_rows = (np.arange(H)[:, None] * width + per_head).reshape(-1)
    kv_rows = np.concatenate([np.arange(R), R + _halves(config)])
    kv_a = source.rows(path + "kv_a_proj_with_mqa", kv_rows, R + config.rope_dim, dim)
    if config.q_rank is None:
        q_norm, q_b, first = None, None, source.rows(path + "q_proj", q_rows, H * width, dim)
    else:
        first = source.weight(path + "q_a_proj", config.q_rank, dim)
        q_norm = source.vector(path + "q_a_layernorm", config.q_rank)
        q_b = source.rows(path + "q_b_proj", q_rows, H * width, config.q_rank)
    if path + "embed_q" in source:
        key = source.weight(path + "embed_q", H, R, config.nope)
        value = source.weight(path + "unembed_out", H, vd, R)
    else:
        key, value = source.weight(path + "kv_b_proj", H * (config.nope + vd), R), None
    kv_norm = source.vector(path + "kv_a_layernorm", R)
    out = source.weight(path + "o_proj", dim, H * vd)
    first, kv_a = adjacent(first, kv_a)
    return Attention(first, kv_a, q_norm, q_b, kv_norm, key, value, out)


def _halves(config: LatentConfig) -> np.ndarray:
    """Order of rotary rows that turns neighbouring pairs (2i, 2i + 1) into pairs (i, i + rope/2)."""
    order = np.arange(config.rope_dim)
    return np.concatenate([order[::2], order[1::2]]) if config.interleaved else order


# -- the model -------------------------------------------------------------------------------------------------------


def caches(config: Config) -> tuple[Layout, ...]:
    return (PagedKV(config.kv_rank, config.rope_dim),) * config.layers


def forward(step: Step, w: Weights, config: Config, cache: Sequence[tuple[Array, Array]]) -> Array:
    """The residual stream after the last layer, [T, dim]; `logits` multiplies its rows with the head."""
    h = embed(step, w.embed, vocab=config.vocab_size)
    for layer, state in zip(w.layers, cache, strict=True):
        h = decoder_layer(step, h, layer, config, state)
    return h


def decoder_layer(step: Step, h: Array, layer: Layer, config: Config, state: tuple[Array, Array]) -> Array:
    """The residual stream h [T, dim] after one layer."""
    x = stream_norm(step, h, layer.attention_norm, config.norm_eps)
    h = ops.residual_add(h, attention(step, x, layer.attention, config, state, config.query_scale))
    x = stream_norm(step, h, layer.mlp_norm, config.norm_eps)
    if isinstance(layer.mlp, Mlp):
        return ops.residual_add(h, over_ranks(step, mlp(step, x, layer.mlp)))
    return moe(step, h, x, layer.mlp, config, config.softmax)


def final_norm(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """The hidden state that the head reads, [T, dim]."""
    return stream_norm(step, h, w.norm, config.norm_eps)


def logits(step: Step, h: Array, w: Weights, config: Config) -> Array:
    """Logits of the next token, float32 [T, vocab]."""
    return head_logits(step, final_norm(step, h, w, config), w.head, config.vocab_size)


def attention(
    step: Step, x: Array, w: Attention, config: LatentConfig, cache: tuple[Array, Array],
    query_scale: tuple[float, int] | None = None,
) -> Array:  # fmt: skip
    """Latent attention. x [T, dim] → [T, dim]."""
    q, kv = linear(step, x, w.q_a), linear(step, x, w.kv_a)
    if w.q_b is not None:
        q = linear(step, ops.rms_norm(q, w.q_norm, _INNER_EPS), w.q_b)
    if query_scale is not None:
        q = ops.position_scale(q, step.positions, *query_scale)
    q_nope, q_pe, latent, k_pe = ops.mla_split_q_kv(heads(q, config.heads), kv, config.nope)
    latent = ops.rms_norm(latent, w.kv_norm, _INNER_EPS)
    if config.rope is not None:
        q_pe = apply_rope(step, q_pe, config.rope)
        k_pe = flat(apply_rope(step, heads(k_pe, 1), config.rope))
    table = step.tables[None]
    ops.mla_cache_append(latent, k_pe, *cache, step.positions, block_table=table, sequence=step.sequence)
    if step.starts is None:
        y = _latent(q_nope, q_pe, w, config, cache, step.lengths, block_table=table)
        return over_ranks(step, linear(step, flat(y), w.out))
    longest, up_to = _break_even(config), _most_expanded(config)
    limits = {"starts": step.starts, "longest": longest, "up_to": up_to}
    y = _latent(q_nope, q_pe, w, config, cache, step.lengths, block_table=table, **limits)
    if x.shape[0] > 1:
        weights, runs = (config.scale, w.key, w.value), {"starts": step.starts, "longer_than": longest, "up_to": up_to}
        long = ops.mla_prefill(q_nope, q_pe, *cache, step.positions, *weights, block_table=table, **runs)
        y = ops.add(y, long)  # each has 0 where the other one has rows
    return over_ranks(step, linear(step, flat(y), w.out))


def _latent(
    q_nope: Array,
    q_pe: Array,
    w: Attention,
    config: LatentConfig,
    cache: tuple[Array, Array],
    lengths: Any,
    **more: Any,
) -> Array:
    """Attention over the latents themselves → [T, H, value_dim]."""
    y = ops.mla_sdpa(ops.mla_q_prime(q_nope, w.key), q_pe, *cache, lengths, config.scale, **more)
    return ops.mla_out_per_head(y, w.key if w.value is None else w.value, config.nope if w.value is None else None)


def _break_even(config: LatentConfig) -> int:
    """Tokens up to which a run of them is cheaper over the latents than over keys and values expanded from them.

    Per position: expanding costs R · (nope + vd) multiplications per head once; a token then saves the difference
    between the latent's width and a head's.
    """
    R, nope, vd = config.kv_rank, config.nope, config.value_dim
    saved = 2 * R - (nope + vd)
    return R * (nope + vd) // saved if saved > 0 else 1 << 30


def _most_expanded(config: LatentConfig) -> int:
    """Positions whose keys and values may be expanded at once."""
    return _EXPANDED_BYTES // (4 * config.heads * (config.nope + config.rope_dim + config.value_dim))


def moe(step: Step, h: Array, x: Array, w: Experts, config: RoutingConfig, softmax: bool = False) -> Array:
    """h + Σ chosen experts of x + shared expert of x, h and x [T, dim]."""
    ids, weights = choice(step, linear(step, x, w.router, "float32"), w, config, softmax)
    # before the experts, which may still be on their way; a rank may have no part of it
    shared = None if w.shared is None or not w.shared.gate.shape[0] else mlp(step, x, w.shared)
    routed = experts(step, x, ids, weights, w.routed)
    return add_blocks(step, h, shared, None, routed)


def choice(step: Step, logits: Array, w: Experts, config: RoutingConfig, softmax: bool) -> tuple[Array, Array]:
    """The experts of each row by logits [T, E], and their weights, [T, k] each."""
    if not softmax:
        how = (config.groups, config.top_groups, config.top_k, config.renormalise, config.routed_scale)
        return ops.moe_group_route(logits, w.bias, *how, propagate_nan=True, active=step.active)
    ids, weights = ops.moe_softmax_topk(logits, config.top_k, propagate_nan=True, active=step.active)
    if config.renormalise:
        weights = ops.moe_normalize_weights(weights)
    return ids, weights if config.routed_scale == 1 else ops.mul(weights, config.routed_scale)


# -- over ranks ------------------------------------------------------------------------------------------------------


def split(config: Config, mesh: Mesh, group: int) -> Split[Config]:
    """Heads, widths of MLPs, experts, vocabulary; what makes latents, and their cache, is on every rank.

    Sums over ranks: the embedding, the output of attention, and of each MLP with its experts and shared expert.
    """
    H, nope, vd, width = config.heads, config.nope, config.value_dim, config.nope + config.rope_dim
    own = share_heads(mesh, H, H, vd, group)
    dense, shared = share_width(mesh, config.mlp_width, group), share_width(mesh, config.shared_width, group)
    stacked = Part(-3, slice(own.first, own.stop), H)
    parts = {
        **vocabulary_parts(mesh, config.vocab_size),
        **mlp_parts("mlp", dense, config.mlp_width),
        **mlp_parts("mlp.shared_experts", shared, config.shared_width),
        "self_attn.q_proj": own.rows(width),
        "self_attn.q_b_proj": own.rows(width),
        "self_attn.kv_b_proj": own.rows(nope + vd),
        "self_attn.embed_q": stacked,
        "self_attn.unembed_out": stacked,
        "self_attn.o_proj": own.columns(vd),
    }
    narrow = None
    if mesh.experts_split and config.experts:
        narrow = (*share_width(mesh, config.expert_width, group), config.expert_width)
    local = replace(
        config,
        heads=own.count,
        mlp_width=dense[1] - dense[0],
        shared_width=shared[1] - shared[0],
        expert_width=config.expert_width if narrow is None else narrow[1] - narrow[0],
    )
    return Split(local, parts, narrow, ((None, None),) * config.layers)


# -- the family ------------------------------------------------------------------------------------------------------


def latent_heads(config: LatentConfig) -> dict[str, SplitHeads]:
    """kv_b_proj is two in mlx-lm: what turns queries into the latent space, and what turns latents into values."""
    width = config.nope + config.value_dim
    parts = {"embed_q": (0, config.nope, True), "unembed_out": (config.nope, width, False)}
    return {"kv_b_proj": SplitHeads(config.heads, (config.heads * width, config.kv_rank), parts)}


def mlx_rules(raw: Mapping[str, Any], config: Config) -> MlxRules:
    """mlx-lm can quantize Mistral's routers, not the others."""
    return MlxRules(
        nested=raw["model_type"] == _WRAPPER,
        split_heads=latent_heads(config),
        uncast=("e_score_correction_bias",),
        unquantized=() if config.softmax else ("mlp.gate",),
    )


def _of_gguf(keys: GgufKeys) -> dict[str, Any]:
    """Older files have `kv_b_proj` in one piece, and the widths of heads as key_length and value_length.

    Mistral Large 3 is `deepseek2`, too, and has experts by softmax and queries that grow with their position.
    """
    grown = "attention.temperature_scale" in keys.values and keys.integer("expert_gating_func", SOFTMAX) == SOFTMAX
    mistral = keys.arch == "mistral4" or grown
    config, rank = stem(keys, "mistral4" if mistral else "deepseek_v3"), keys.integer("attention.kv_lora_rank")
    rope_dim = keys.integer("rope.dimension_count")
    own = "attention.key_length_mla" in keys
    keys.accept("attention.head_count_kv", "attention.key_length", "attention.value_length")
    width = keys.integer("attention.key_length_mla" if own else "attention.key_length")
    keys.require(width > rope_dim, f"keys of {width} channels, expected more than rope.dimension_count ({rope_dim})")
    scaling = rope_scaling(keys)
    if scaling is not None and (gain := keys.number("rope.scaling.yarn_log_multiplier", 0.0)):
        # The converter writes a tenth of mscale_all_dim. mscale is in no key: it is the same in all released models.
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * gain, 6))
    if keys.integer("expert_count", 0, least=0):
        config |= softmax_experts(keys) if mistral else sigmoid_experts(keys)
    if mistral:
        more = {"rope_parameters": _grown_queries(keys, scaling), "num_key_value_heads": config["num_attention_heads"]}
    else:
        more = {"rope_scaling": scaling}
    return config | more | {
        "intermediate_size": keys.integer("feed_forward_length"),
        "q_lora_rank": keys.integer("attention.q_lora_rank", None),
        "kv_lora_rank": rank,
        "qk_nope_head_dim": width - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": keys.integer("attention.value_length_mla" if own else "attention.value_length"),
    }  # fmt: skip


def _grown_queries(keys: GgufKeys, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """`rope_parameters` of Mistral. The converter of released files leaves out how queries grow: then they do not."""
    if scaling is None or scaling["rope_type"] != "yarn":
        raise keys.error("rope.scaling.type", "'yarn', whose original_context_length is where queries begin to grow")
    beta, original = keys.number("attention.temperature_scale", 0.0), scaling["original_max_position_embeddings"]
    if keys.integer("attention.temperature_length", original) != original:
        raise keys.error("attention.temperature_length", f"{original}, the original_context_length")
    if not beta:
        found = f"{keys.arch}.attention.temperature_scale is missing, queries do not grow from position {original} on"
        keys.file.notices.append(f"{keys.file.path}: {found}")
    return scaling | {"rope_theta": keys.number("rope.freq_base", 10000.0, above=0), "llama_4_scaling_beta": beta}


_TURNED = ("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa")
_GGUF = GgufNames(
    architectures={name: GgufArchitecture(_of_gguf, copied=_TURNED) for name in ("deepseek2", "mistral4")},
    modules={
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
        "self_attn.embed_q": "attn_k_b",
        "self_attn.unembed_out": "attn_v_b",
        "self_attn.o_proj": "attn_output",
        "mlp.gate": "ffn_gate_inp",
        "mlp.switch_mlp.gate_proj": "ffn_gate_exps",
        "mlp.switch_mlp.up_proj": "ffn_up_exps",
        "mlp.switch_mlp.down_proj": "ffn_down_exps",
        "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
        **{
            f"mlp.{block}{part}_proj": f"ffn_{part}{end}"
            for block, end in (("", ""), ("shared_experts.", "_shexp"))
            for part in ("gate", "up", "down")
        },
    },
    tensors={"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"},
)

FAMILY = Family(
    name="deepseek_v3",
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
        "shared expert": ("mlp.shared_experts.*",),
        "router": ("mlp.gate", "mlp.gate.*"),
        "norms": ("*norm",),
        "attention": ("self_attn.*",),
        "dense MLP": ("mlp.*",),
    },
    skipped=("mtp.", "model.mtp.", *VISION),
    mlx_rules=mlx_rules,
    gguf=_GGUF,
    split=split,
    draft_head=DraftHead(
        model_types=MODEL_TYPES,
        depth="num_nextn_predict_layers",
        spelling="nextn",
        drafter=lambda model_type: f"{model_type}_mtp",
        config=lambda config: replace(config, layers=1, dense_layers=int(not config.experts)),
        read_layer=lambda source, config: _layer(source, config, 0),
        read_norm=lambda source, path, size: source.vector(path, size),
        layer=decoder_layer,
        sees_first=False,
    ),
    full_attention="latent attention (MLA)",
)
