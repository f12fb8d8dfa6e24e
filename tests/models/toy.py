"""A family that is one file: attention without positions, then experts, under names that no other family has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock import ops
from penstock.models.config import Fields
from penstock.models.family import Family, MlxRules, SplitHeads
from penstock.models.layers import ExpertStack, embed, experts, flat, heads, linear, read_experts, read_head
from penstock.models.source import Source, Weight
from penstock.models.step import Layout, PagedKV, Step, attend
from penstock.ops.array import Array


@dataclass(frozen=True)
class Config:
    model_type: str
    vocab_size: int
    max_positions: int
    dim: int
    layers: int
    heads: int
    experts: int
    top_k: int
    expert_width: int
    tied: bool = False


def read_config(raw: dict[str, Any]) -> Config:
    fields = Fields(raw, "config.json")
    sizes = ("vocab_size", "max_positions", "dim", "layers", "heads", "experts", "top_k", "expert_width")
    return Config(fields.choice("model_type", ("toy",)), *(fields.integer(key) for key in sizes))


@dataclass(frozen=True)
class Layer:
    mixer_norm: np.ndarray
    q: Weight
    k: Weight
    v: Weight
    out: Weight
    block_norm: np.ndarray
    choice: Weight
    routed: ExpertStack


@dataclass(frozen=True)
class Weights:
    embed: Weight
    layers: tuple[Layer, ...]
    norm: np.ndarray
    head: Weight


def read_weights(source: Source, config: Config) -> Weights:
    """The released files keep k and v of a head together, and norms less 1."""
    dim, H = config.dim, config.heads
    both = np.arange(2 * dim).reshape(H, 2, dim // H)

    def norm(path: str) -> np.ndarray:
        return source.vector(path, dim) + np.float32(source.layout == "hf")

    def layer(path: str) -> Layer:
        if f"{path}.mixer.keys" in source:
            k, v = (source.weight(f"{path}.mixer.{part}", H, dim // H, dim) for part in ("keys", "values"))
            k, v = (np.ascontiguousarray(part).reshape(dim, dim) for part in (k, v))
        else:
            k, v = (source.rows(f"{path}.mixer.kv", both[:, n].reshape(-1), 2 * dim, dim) for n in (0, 1))
        return Layer(
            norm(f"{path}.mixer_norm"),
            source.weight(f"{path}.mixer.q", dim, dim),
            k,
            v,
            source.weight(f"{path}.mixer.out", dim, dim),
            norm(f"{path}.block_norm"),
            source.weight(f"{path}.block.choice", config.experts, dim),
            read_experts(source, f"{path}.block", "switch_bank", config.experts, dim, config.expert_width),
        )

    table = source.weight("embed_tokens", config.vocab_size, dim)
    head = read_head(source, config.tied, table, config.vocab_size, dim)
    return Weights(table, tuple(layer(f"layers.{n}") for n in range(config.layers)), norm("norm"), head)


def caches(config: Config) -> tuple[Layout, ...]:
    return (PagedKV(config.dim, config.dim),) * config.layers


def forward(step: Step, w: Weights, config: Config, cache: Sequence[tuple[Array, Array]]) -> Array:
    h = embed(step, w.embed)
    for layer, state in zip(w.layers, cache, strict=True):
        x = ops.rms_norm(h, layer.mixer_norm, 1e-6)
        q, k, v = (heads(linear(step, x, part), config.heads) for part in (layer.q, layer.k, layer.v))
        h = ops.residual_add(h, linear(step, flat(attend(step, state, q, k, v, 0.25)), layer.out))
        x = ops.rms_norm(h, layer.block_norm, 1e-6)
        ids, weights = ops.moe_softmax_topk(linear(step, x, layer.choice, "float32"), config.top_k)
        h = ops.residual_add(h, experts(step, x, ids, weights, layer.routed))
    return h


def logits(step: Step, h: Array, w: Weights, config: Config) -> Array:
    return linear(step, ops.rms_norm(h, w.norm, 1e-6), w.head, "float32")


def mlx_rules(raw: Mapping[str, Any], config: Config) -> MlxRules:
    D = config.dim // config.heads
    kv = SplitHeads(config.heads, (2 * config.dim, config.dim), {"keys": (0, D, False), "values": (D, 2 * D, False)})
    return MlxRules(
        nested=True,
        expert_stack="switch_bank",
        offset_norms=("norm.weight",),
        split_heads={"kv": kv},
        config={"written_for": "mlx-lm"},
    )


FAMILY = Family(
    name="toy",
    model_types=("toy",),
    read_config=read_config,
    read_weights=read_weights,
    caches=caches,
    forward=forward,
    logits=logits,
    roles={
        "embedding": ("embed_tokens",),
        "head": ("lm_head",),
        "router": ("block.choice",),
        "experts": ("block.*",),
        "norms": ("*norm",),
        "attention": ("mixer.*",),
    },
    skipped=("camera.",),
    unquantized=("mixer.keys", "mixer.values"),
    more_bits=("mixer.out",),
    mlx_rules=mlx_rules,
    full_attention="toy attention",
)
