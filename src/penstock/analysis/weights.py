"""The weights of a model with their roles: what they take, what a step reads of them, where they lie.

A `WeightInfo` is a tensor as a family asks for it (`survey` writes these down from files alone) or an array of weights
that are loaded, or of which nothing but the shapes counts (`walk`). What a token reads follows from both alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import numpy as np

from penstock.experts.streamed import Streamed
from penstock.models.layers import ExpertStack
from penstock.ops.array import address, is_array
from penstock.ops.linear import FOREIGN
from penstock.quant import Format, QuantizedTensor

# Fields of a family's weights on the way to an array; the first that is there counts. Coarser than a family's
# roles of paths: the norms inside of a mixer are of its role, and "MLP" is a shared expert as well as a dense block.
_ROLE_OF_FIELD = {
    "embed": "embedding",
    "table": "embedding",
    "head": "head",
    "router": "router",
    "shared_gate": "router",
    "mixer": "attention",
    "attention": "attention",
    "mlp": "MLP",
    "shared": "MLP",
}
_LAYER = re.compile(r"layers\.(\d+)\.")


def layer_of(path: str) -> int | None:
    """The layer of a tensor's path, None outside of layers."""
    found = _LAYER.match(path)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class TensorFormat:
    """How a tensor is stored: packed in `bits` with a scale and a bias per group, or dense (group_size None)."""

    bits: int
    group_size: int | None
    dtype: str  # of a dense tensor, or of scales and biases
    mode: str = "affine"

    def __str__(self) -> str:
        return self.dtype if self.group_size is None else str(Format(self.bits, self.group_size, self.mode))


@dataclass(frozen=True)
class WeightInfo:
    """One tensor, or a stack of them. takes: how many of the first axis a token reads, None for all.

    format: of a stored one; array: of a loaded one.
    """

    path: str
    role: str
    layer: int | None
    shape: tuple[int, ...]
    nbytes: int
    takes: int | None = None
    format: TensorFormat | None = None
    array: Any = None

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def share(self) -> float:
        """Of it, what one token reads."""
        return 1.0 if self.takes is None else min(1.0, self.takes / max(1, self.shape[0]))

    def read_by(self, tokens: int) -> float:
        """Bytes of it that a step of so many tokens reads."""
        if self.takes is None:
            return self.nbytes
        read = rows_read if self.role == "embedding" else experts_read
        return self.nbytes * read(self.shape[0], self.takes, tokens)


def experts_read(count: int, top_k: int, tokens: int) -> float:
    """Share of E experts that a step of T tokens reads: 1 − (1 − k/E)^T on average, when all are as likely."""
    return 1 - (1 - min(1.0, top_k / max(1, count))) ** tokens


def rows_read(count: int, takes: int, tokens: int) -> float:
    """Share of a table's rows that a step of so many tokens reads."""
    return min(1.0, takes * tokens / count)


@dataclass(frozen=True)
class Sum:
    """Weights taken together; active is what one token reads."""

    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    active_parameters: float = 0.0
    active_bytes: float = 0.0

    @classmethod
    def of(cls, weights: Iterable[WeightInfo]) -> Sum:
        found = list(weights)
        return cls(
            len(found),
            sum(weight.parameters for weight in found),
            sum(weight.nbytes for weight in found),
            sum(weight.parameters * weight.share for weight in found),
            sum(weight.nbytes * weight.share for weight in found),
        )


# --------------------------------------------------------------------------------------------------------------------
# Loaded weights


class HasWeights(Protocol):
    """A model, or its programs: a family's weights and config, and experts that are not all in memory."""

    @property
    def weights(self) -> Any: ...

    @property
    def config(self) -> Any: ...

    @property
    def experts(self) -> Streamed | None: ...


def walk(model: HasWeights) -> list[WeightInfo]:
    """Every array and quantized tensor of a model's weights; several may show the same memory."""
    top_k = getattr(model.config, "top_k", 0)
    return [_info(names, layer, stacked, array, top_k) for names, layer, stacked, array in _arrays(model.weights)]


def distinct(model: HasWeights) -> list[WeightInfo]:
    """Of weights that share their memory (views of joined ones, a head that is the table of embeddings) the largest.

    Where that is a table and something else, it is something else. Of experts that are streamed all count, with those
    that are in files alone: the slots of several layers are the same.
    """
    weights, kept = walk(model), []
    if model.experts is not None:
        kept = _streamed(weights, model.experts)
        weights = [one for one in weights if one.role != "experts" and not one.path.endswith(".slot_of")]
    found = [(*span(weight.array), weight) for weight in weights]
    found.sort(key=lambda one: (one[0], -one[1], one[2].role == "embedding"))
    end = -1
    for _, stop, weight in found:
        if stop > end:
            kept.append(weight)
            end = stop
    return kept


def _streamed(weights: Iterable[WeightInfo], experts: Streamed) -> list[WeightInfo]:
    """Stacks of streamed experts with as many as there are, of a split model this rank's, instead of slots."""
    stacks = [weight for weight in weights if weight.role == "experts"]
    own = (int(np.sum(slot_of != FOREIGN)) for slot_of in experts.store.slot_of)
    counts, found = dict(zip(expert_layers(stacks), own, strict=True)), []
    for weight in stacks:
        assert weight.layer is not None
        count, (slots, *rest) = counts[weight.layer], weight.shape
        found.append(replace(weight, shape=(count, *rest), nbytes=weight.nbytes // slots * count))
    return found


def expert_layers(weights: Iterable[WeightInfo]) -> list[int]:
    """Numbers of the layers that have experts, ascending."""
    return sorted({weight.layer for weight in weights if weight.role == "experts" and weight.layer is not None})


def active_bytes(model: HasWeights, tokens: int = 1) -> int:
    """Bytes of the weights that a step reads for so many tokens, each once: chosen experts, of a table a row each."""
    return round(sum(weight.read_by(tokens) for weight in distinct(model)))


def span(array: Any) -> tuple[int, int]:
    """First address of an array (of codes, if quantized) and the one behind its end."""
    if isinstance(array, QuantizedTensor):
        array = array.packed
    start = address(array)
    return start, start + array.nbytes


def _info(names: tuple[str, ...], layer: int | None, stacked: bool, array: Any, top_k: int) -> WeightInfo:
    shape = tuple(array.shape)
    if stacked and len(shape) == 3:
        role, takes = "experts", top_k or None
    else:
        role = next((role for name, role in _ROLE_OF_FIELD.items() if name in names), "norms")
        takes = 1 if role == "embedding" else None
    return WeightInfo(".".join(names), role, layer, shape, array.nbytes, takes, array=array)


def _arrays(
    value: Any, names: tuple[str, ...] = (), layer: int | None = None, stacked: bool = False
) -> Iterator[tuple[tuple[str, ...], int | None, bool, Any]]:
    """Arrays with the names of the fields that lead to each, its layer, and whether it is one of a stack of experts."""
    if is_array(value) or isinstance(value, QuantizedTensor):
        yield names, layer, stacked, value
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from _arrays(item, names, number if names == ("layers",) else layer, stacked)
    elif is_dataclass(value):
        for field in fields(value):
            own = (*names, field.name)
            yield from _arrays(getattr(value, field.name), own, layer, stacked or isinstance(value, ExpertStack))
