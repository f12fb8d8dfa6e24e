"""The CPU kernels of whole families of models, found with shapes alone: what `penstock compile` compiles."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import models
from penstock.engine.compile_ahead import Missing, missing_kernels
from penstock.engine.engine import Engine, Model
from penstock.engine.options import resolve_options
from penstock.models.config import first_layers
from penstock.models.random import Shapes
from penstock.ops.device import device_for
from penstock.weights.resolve import shipped_configs

# Kernels differ by how much there is to do: rows of a product, numbers of a node, tokens of a run.
PROMPTS = (20, 2, 3, 5, 9, 17, 33, 64, 129, 256)
SEQUENCES = (1, 2, 4, 8)
ACTIVATIONS = ("int8", "float32")


def shipped_by_family() -> dict[str, list[Path]]:
    """The shipped config.json files by the name of their models' family."""
    found: dict[str, list[Path]] = defaultdict(list)
    for file in shipped_configs().values():
        found[models.family_of(json.loads(file.read_text())).name].append(file)
    return dict(sorted(found.items()))


def missing_of_families(names: Sequence[str]) -> Missing:
    """Kernels that are not on disk of the families' models: answers of some sequences and prompts of many lengths."""
    missing: Missing = {}
    for name in names:
        for file in shipped_by_family()[name]:
            for activations in ACTIVATIONS:
                engine = shape_engine(json.loads(file.read_text()), str(file), activations)
                missing |= missing_kernels(engine, PROMPTS, SEQUENCES)
    return missing


def shape_engine(raw: dict[str, Any], where: str, activations: str) -> Engine:
    """An engine on the CPU of a config.json's first layers, whose weights have shapes and no numbers."""
    config, _ = first_layers(raw, None, where)
    family, device = models.family_of(config), device_for("cpu")
    read = family.read_config(config)
    model = Model(family, read, family.read_weights(Shapes(config), read), f"shapes of {where}")
    dtype = resolve_options("cpu").dtype
    return Engine(model, device=device, activations=activations, dtype=dtype, max_context=min(read.max_positions, 1024))
