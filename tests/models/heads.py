"""Heads that draft for tests: run on any device, and made around one layer of transformers' own classes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

import penstock
from penstock import models
from penstock.engine.steps import ragged_step
from penstock.graph import Program, trace
from penstock.models import mtp
from penstock.models.family import AnyFamily
from penstock.models.split import Mesh
from penstock.models.step import empty
from penstock.ops.array import spec_of
from penstock.ops.device import device_for
from tests.models.made import fill, save, torch_model

TABLES = {None: "table"}
NEXTN = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}


class Drafter:
    """A head on a device with a cache for some sequences of up to a page each."""

    def __init__(
        self,
        head: mtp.Head,
        family: AnyFamily,
        device: str,
        sequences: int = 1,
        fused: bool = True,
        mesh: Mesh | None = None,
    ) -> None:
        self.head, self.family, self.name, self.fused, self.mesh = head, family, device, fused, mesh
        self.device = device_for(device)
        self.cache = empty(mtp.layout(head, family), sequences, sequences, "float32", self.device.zeros)

    def __call__(self, runs: Mapping[int, tuple[int, Sequence[int]]], hidden: np.ndarray) -> tuple[np.ndarray, ...]:
        """h' and logits of a step: by sequence the first position of its run, and the tokens after its positions."""
        lengths = [len(tokens) for _, tokens in runs.values()]
        which = np.repeat(np.arange(len(runs)), lengths)
        positions = np.concatenate([np.arange(at, at + len(tokens)) for at, tokens in runs.values()])
        given = {
            "tokens": np.concatenate([tokens for _, tokens in runs.values()]),
            "positions": positions,
            "sequence": which,
            "starts": np.cumsum([0, *lengths]),
            "lengths": [at + len(tokens) for at, tokens in runs.values()],
            "slots": list(runs),
            "table": np.array(list(runs))[:, None],
        }
        arrays = {name: np.array(array, np.int32) for name, array in given.items()}
        if max(lengths) == 1:
            del arrays["sequence"], arrays["starts"]
        arrays["hidden"] = np.ascontiguousarray(hidden, np.float32)
        if self.name == "reference":
            with penstock.backend("reference"):
                return self._run(**arrays, keys=self.cache[0], values=self.cache[1])
        inputs = {name: self.device.to_device(array) for name, array in arrays.items()}
        inputs |= {"keys": self.cache[0], "values": self.cache[1]}
        graph = trace(self._run, {name: spec_of(array) for name, array in inputs.items()})
        program = Program(graph, self.name, fused=self.fused)
        found = program.bind(inputs, self.device.arena(program.arena_bytes)).run()
        return tuple(np.array(self.device.to_host(array)) for array in found)

    def _run(self, **given: Any) -> tuple[Any, Any]:
        step = ragged_step(given, TABLES, mesh=self.mesh)
        h = mtp.forward(self.head, step, given["hidden"], (given["keys"], given["values"]))
        return h, mtp.logits(self.head, step, h)


class Made(NamedTuple):
    """A folder with a head alone in the names of released files, its tables, and transformers' model of its layer."""

    folder: Path
    embed: np.ndarray
    lm_head: np.ndarray
    layer: Any

    def oracle(self, x: np.ndarray) -> np.ndarray:
        """Logits of the head after inputs x [T, dim] of its layer, float32."""
        import torch

        with torch.no_grad():
            return self.layer(inputs_embeds=torch.from_numpy(x)[None].float()).logits[0].numpy()

    def read(self) -> tuple[mtp.Head, AnyFamily]:
        raw = json.loads((self.folder / "config.json").read_text())
        family = models.family_of(raw)
        config = family.read_config(raw)
        return mtp.open_drafter(self.folder, family, config).read(family, config, self.embed, self.lm_head), family


def make_head(folder: Path, config: Mapping[str, Any], one: Mapping[str, Any], seed: int = 5) -> Made:
    """config: of the trunk; one: of a model whose single layer is the head's."""
    only = folder / "layer"
    only.mkdir(parents=True)
    (only / "config.json").write_text(json.dumps(one))
    layer = torch_model(only)
    fill(layer, {"o_proj": 0.25, "down_proj": 0.25}, seed)
    save(layer, only, one)
    stored = {name: array for file in sorted(only.glob("*.safetensors")) for name, array in load_file(file).items()}
    text = config.get("text_config", config)
    dim, nextn = text["hidden_size"], config["model_type"] not in ("qwen3_5_moe", "qwen3_5", "qwen3_next")
    start = f"model.layers.{text['num_hidden_layers']}." if nextn else "mtp."
    rng = np.random.default_rng(seed)
    offset = 1.0 if nextn else 0.0  # of norms
    tensors = {
        "fc": rng.standard_normal((dim, 2 * dim)) * (2 * dim) ** -0.5,
        "pre_fc_norm_embedding": offset + 0.3 * rng.standard_normal(dim),
        "pre_fc_norm_hidden": offset + 0.3 * rng.standard_normal(dim),
    }
    found = {
        f"{start}{NEXTN[name] if nextn else name}.weight": array.astype(ml_dtypes.bfloat16)
        for name, array in tensors.items()
    }
    for name, array in stored.items():
        _, inner, rest = name.partition("layers.0.")
        if inner:
            found[f"{start}{rest}" if nextn else f"{start}layers.0.{rest}"] = array
        elif name.endswith(("model.norm.weight", "language_model.norm.weight")):
            found[f"{start}shared_head.norm.weight" if nextn else f"{start}norm.weight"] = array
    target = folder / "head"
    target.mkdir()
    save_file(found, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    embed = next(array for name, array in stored.items() if name.endswith("embed_tokens.weight"))
    return Made(target, embed, stored["lm_head.weight"], torch_model(only, load=True))


def head_inputs(
    tensors: Mapping[str, np.ndarray], embed: np.ndarray, tokens: Sequence[int], hidden: np.ndarray, eps: float
) -> np.ndarray:
    """What goes into a head's layer, by the recipe of the released files and in float64."""
    found = {name.removesuffix(".weight"): array.astype(np.float64) for name, array in tensors.items()}

    def named(*ends: str) -> np.ndarray:
        return next(array for name, array in found.items() if name.endswith(ends))

    def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight

    nextn = any(name.endswith("eh_proj") for name in found)
    e, one = embed.astype(np.float64)[list(tokens)], 0.0 if nextn else 1.0
    if nextn:
        e[0] = 0
    e = normed(e, one + named("enorm", "pre_fc_norm_embedding"))
    g = normed(hidden.astype(np.float64), one + named("hnorm", "pre_fc_norm_hidden"))
    return np.concatenate([e, g], axis=1) @ named("eh_proj", "mtp.fc").T
