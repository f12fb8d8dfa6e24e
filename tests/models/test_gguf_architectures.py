"""GGUF files of each architecture, written as llama.cpp's converter writes them, against the released weights."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine.engine import Engine, Model
from penstock.models import family_of
from penstock.models.gguf import GgufModel, open_gguf
from penstock.ops.device import device_for
from tests.models.common import error, some_tokens
from tests.models.gguf_files import MODELS, Released, mixed, rounded, tensors_of, write

CLOSE = 1e-6


def engine_of(family: Any, config: Any, weights: Any, device: str = "cpu") -> Engine:
    model = Model(family, config, weights, "", 0)
    return Engine(model, device=device_for(device), activations="float32", max_context=config.max_positions)


def logits(engine: Engine, tokens: list[int]) -> np.ndarray:
    return engine.prefill(engine.open(), tokens, every=True)


@functools.cache
def wanted(name: str, count: int) -> np.ndarray:
    """Logits with the released weights."""
    config = MODELS[name]
    family = family_of(config)
    read = family.read_config(config)
    return logits(engine_of(family, read, family.read_weights(Released(config), read)), some_tokens(count))


def of_file(model: GgufModel, tokens: list[int], device: str = "cpu") -> np.ndarray:
    config = model.read_config()
    return logits(engine_of(model.family, config, model.family.read_weights(model.source, config), device), tokens)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_released_weights(tmp_path: Path, name: str) -> None:
    model = open_gguf(write(tmp_path / "x.gguf", name))
    bound = 3 * CLOSE if name.startswith("deepseek2") else CLOSE  # kv_b_proj is two: sums have another order
    assert error(of_file(model, some_tokens(60)), wanted(name, 60)) < bound
    assert not model.source.unused()
    assert not [notice for notice in model.notices if "not known" in notice]


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_blocks_are_those_of_their_numbers(tmp_path: Path, name: str) -> None:
    blocks = mixed(tensors_of(name))
    dense = open_gguf(write(tmp_path / "dense.gguf", name, tensors=rounded(blocks)))
    model, tokens = open_gguf(write(tmp_path / "x.gguf", name, tensors=blocks)), some_tokens(30)
    assert error(of_file(model, tokens), of_file(dense, tokens)) < 3 * CLOSE
