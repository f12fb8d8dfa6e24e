"""Model families: each module reads its config and weights, is a plain sequence of ops, and ends with its FAMILY.

`FAMILIES` says which module runs which `model_type` of config.json; families of other packages are registered, or are
found through the entry-point group `penstock.families`. docs/adding-a-model.md shows how one is added.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

import numpy as np

from penstock.errors import CheckpointError, InvalidArgument
from penstock.models.family import AnyFamily, Family
from penstock.ops.array import address, is_array
from penstock.quant import QuantizedTensor
from penstock.settings import Settings

FAMILIES = {
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_next": "qwen3_5",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma3n": "gemma3n",
    "gemma3n_text": "gemma3n",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "kimi_linear": "kimi_linear",
    "gpt_oss": "gpt_oss",
    "glm4_moe_lite": "deepseek_v3",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "qwen3_moe": "llama",
    "qwen2_moe": "llama",
    "mixtral": "llama",
    "glm4_moe": "llama",
    "minimax_m2": "llama",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2",
    "mistral4": "deepseek_v3",
    "ministral3": "llama",
    "mistral3": "llama",
}
WRAPPED = {"mistral3": ("mistral4",)}  # model_types of a text_config that are of another family


T = TypeVar("T")


GROUP = "penstock.families"  # entry points by model_type, each a Family
_registered: dict[str, AnyFamily] = {}


def register(family: AnyFamily) -> None:
    """Run models whose `model_type` is one of this family's. Raises InvalidArgument for names that are taken."""
    if not isinstance(family, Family):
        raise InvalidArgument(
            f"register: family is a {type(family).__name__}, expected a penstock.models.family.Family"
        )
    for name in family.model_types:
        if name in FAMILIES:
            raise InvalidArgument(f"register: model_type {name!r} is built in, expected another name")
        if _registered.get(name, family) is not family:
            raise InvalidArgument(f"register: model_type {name!r} is registered already, expected another name")
    _registered.update(dict.fromkeys(family.model_types, family))


def plugins() -> dict[str, EntryPoint]:
    """Families of installed packages by model_type; none of them is imported. Built-in names do not count."""
    if not Settings.from_env().plugins:
        return {}
    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in FAMILIES}


def family_of(config: dict[str, Any]) -> AnyFamily:
    """The family of a config.json. Raises CheckpointError naming the model_type if there is none.

    Installed packages are looked through for one that is neither built in nor registered; a model folder never is.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str):
        if model_type in FAMILIES:
            text = config.get("text_config")
            inner = text.get("model_type", "") if isinstance(text, dict) else ""
            return _family(FAMILIES[inner if inner in WRAPPED.get(model_type, ()) else model_type])
        if model_type not in _registered and (entry := plugins().get(model_type)) is not None:
            _load(entry)
        if model_type in _registered:
            return _registered[model_type]
    if isinstance(model_type, str) and model_type.endswith("_mtp"):
        raise CheckpointError(
            f"config.json: model_type is {model_type[:80]!r}, a head that drafts for another model, expected a model"
        )
    found = "is missing" if model_type is None else f"is {str(model_type)[:80]!r}"
    raise CheckpointError(f"config.json: model_type {found}, expected one of {', '.join((*FAMILIES, *_registered))}")


def _load(entry: EntryPoint) -> None:
    where = "an installed package" if entry.dist is None else f"the package {entry.dist.name} {entry.dist.version}"
    try:
        family = entry.load()
        register(family)
    except Exception as error:
        raise CheckpointError(
            f"config.json: model_type is {entry.name!r}, whose family in {where} cannot be used: "
            f"{type(error).__name__}: {error}"
        ) from error
    if entry.name not in family.model_types:
        raise CheckpointError(
            f"config.json: model_type is {entry.name!r}, whose family in {where} runs {', '.join(family.model_types)}"
        )


def families() -> list[AnyFamily]:
    return [_family(module) for module in dict.fromkeys(FAMILIES.values())]


def _family(module: str) -> AnyFamily:
    return importlib.import_module(f"penstock.models.{module}").FAMILY


def placed(value: T, put: Callable[[Any], Any]) -> T:
    """A family's weights or config with every NumPy array moved by `put`; what several fields share stays shared."""
    return replaced(value, np.ndarray, put)


def replaced(value: T, kind: type | tuple[type, ...], make: Callable[[Any], Any]) -> T:
    """A family's weights or config with `make` of everything of a kind in its place, of shared things once."""
    moved: dict[int, Any] = {}

    def visit(value: Any) -> Any:
        if isinstance(value, kind):
            if id(value) not in moved:
                moved[id(value)] = make(value)
            return moved[id(value)]
        if isinstance(value, tuple | list):
            return type(value)(map(visit, value))
        if isinstance(value, dict):
            return {key: visit(item) for key, item in value.items()}
        if not is_dataclass(value) or isinstance(value, type | QuantizedTensor):
            return value
        return replace(value, **{item.name: visit(getattr(value, item.name)) for item in fields(value)})

    return visit(value)


def bytes_of(weights: Any) -> int:
    """Bytes of all arrays in a family's weights; memory that several of them show (joined parts, a tied head) once."""
    spans: set[tuple[int, int]] = set()

    def visit(value: Any) -> None:
        if isinstance(value, tuple | list):
            for item in value:
                visit(item)
        elif isinstance(value, QuantizedTensor):
            visit(value.arrays)
        elif is_array(value):
            start = address(value)
            spans.add((start, start + value.nbytes))
        elif is_dataclass(value):
            for item in fields(value):
                visit(getattr(value, item.name))

    visit(weights)
    total = end = 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
