"""A family of models in one file: its config, its weights, its sequence of ops; then one of its models, loaded and run.

python examples/own_family.py

The model is made up here, with random weights and the demo model's tokenizer, so it writes noise.
docs/adding-a-model.md explains each part; examples/penstock-my-llama is a family as a package, found when installed.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import penstock
from penstock import ops
from penstock.models.config import Fields
from penstock.models.family import Family
from penstock.models.layers import Mlp, embed, flat, heads, linear, mlp, read_mlp, stream_norm
from penstock.models.source import Source, Weight
from penstock.models.step import Layout, PagedKV, Step, attend
from penstock.ops.array import Array

EPS = 1e-6


@dataclass(frozen=True)
class Config:
    model_type: str
    vocab_size: int
    max_positions: int
    dim: int
    layers: int
    heads: int
    width: int
    tied: bool = True
    experts: int = 0
    top_k: int = 0


def read_config(raw: dict[str, Any]) -> Config:
    fields = Fields(raw, "config.json")
    sizes = ("vocab_size", "max_positions", "dim", "layers", "heads", "width")
    return Config(fields.choice("model_type", ("plain",)), *(fields.integer(name) for name in sizes))


@dataclass(frozen=True)
class Layer:
    norm: np.ndarray
    q: Weight
    k: Weight
    v: Weight
    out: Weight
    mlp_norm: np.ndarray
    mlp: Mlp


@dataclass(frozen=True)
class Weights:
    embed: Weight
    layers: tuple[Layer, ...]
    norm: np.ndarray
    head: Weight


def read_weights(source: Source, config: Config) -> Weights:
    """Each asked for by path and shape: what does not fit is refused with both shapes."""
    dim = config.dim

    def layer(path: str) -> Layer:
        q, k, v, out = (source.weight(f"{path}.attention.{part}", dim, dim) for part in ("q", "k", "v", "out"))
        norm, mlp_norm = (source.vector(f"{path}.{part}", dim) for part in ("norm", "mlp_norm"))
        return Layer(norm, q, k, v, out, mlp_norm, read_mlp(source, f"{path}.mlp", dim, config.width))

    table = source.weight("embed_tokens", config.vocab_size, dim)
    return Weights(table, tuple(layer(f"layers.{n}") for n in range(config.layers)), source.vector("norm", dim), table)


def caches(config: Config) -> tuple[Layout, ...]:
    return (PagedKV(config.dim, config.dim),) * config.layers


def forward(step: Step, w: Weights, config: Config, cache: Sequence[tuple[Array, Array]]) -> Array:
    """Tokens to the residual stream [T, dim]: plain ops, which the graph fuses."""
    h = embed(step, w.embed)
    for layer, state in zip(w.layers, cache, strict=True):
        x = stream_norm(step, h, layer.norm, EPS)
        q, k, v = (heads(linear(step, x, part), config.heads) for part in (layer.q, layer.k, layer.v))
        attended = attend(step, state, q, k, v, (config.dim // config.heads) ** -0.5)
        h = ops.residual_add(h, linear(step, flat(attended), layer.out))
        h = ops.residual_add(h, mlp(step, stream_norm(step, h, layer.mlp_norm, EPS), layer.mlp))
    return h


def logits(step: Step, h: Array, w: Weights, config: Config) -> Array:
    return linear(step, stream_norm(step, h, w.norm, EPS), w.head, "float32")


FAMILY = Family(
    name="plain",
    model_types=("plain",),
    read_config=read_config,
    read_weights=read_weights,
    caches=caches,
    forward=forward,
    logits=logits,
    roles={"embedding": ("embed_tokens",), "norms": ("*norm",), "attention": ("attention.*",), "dense MLP": ("mlp.*",)},
)


def make_model(folder: Path) -> None:
    """config.json, random weights and a tokenizer: what a model's folder needs."""
    config = {"vocab_size": 4096, "max_positions": 512, "dim": 128, "layers": 2, "heads": 4, "width": 320}
    (folder / "config.json").write_text(json.dumps({"model_type": "plain", **config}))
    demo = Path(penstock.__file__).parent / "demo" / "model"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder)
    rng, dim, width = np.random.default_rng(0), config["dim"], config["width"]
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config["vocab_size"], dim), "norm": (dim,)}
    for n in range(config["layers"]):
        shapes |= {f"layers.{n}.{name}": (dim,) for name in ("norm", "mlp_norm")}
        shapes |= {f"layers.{n}.attention.{name}": (dim, dim) for name in ("q", "k", "v", "out")}
        shapes |= {f"layers.{n}.mlp.{name}_proj": (width, dim) for name in ("gate", "up")}
        shapes[f"layers.{n}.mlp.down_proj"] = (dim, width)
    made = {
        f"model.{path}.weight": np.ones(shape, np.float32)
        if len(shape) == 1
        else (rng.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32)
        for path, shape in shapes.items()
    }
    save_file(made, folder / "model.safetensors")


def main() -> None:
    penstock.models.register(FAMILY)
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name))
        with penstock.load(name, device="cpu") as llm:
            print(llm)
            tokens = llm.tokenizer.encode("Once upon a time")
            print(llm.generate(tokens, max_tokens=8).tokens)
            kernels = llm.logits(tokens)
        with penstock.load(name, device="reference") as llm:  # the same ops by their definitions, unfused
            print(f"off the definitions by {np.abs(llm.logits(tokens) - kernels).max():.1e}")


if __name__ == "__main__":
    main()
