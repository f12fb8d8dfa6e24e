"""Where a model's weights come from: a checkpoint, on their way to a device, in slots, or by their shapes alone.

A family asks for each weight by its path (after the family's prefix) and its shape. So a checkpoint is checked against
its config while it is read, and a model of any size can be made up without a file (`models.random`).
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import numpy as np

from penstock.dtypes import FLOATS, dtype_name
from penstock.errors import CheckpointError, OutOfMemory
from penstock.experts.layout import ExpertFiles, TensorExtents, stacked
from penstock.ops.array import Array, Spec
from penstock.quant import QuantizedTensor, first_unsound_scale
from penstock.units import amount
from penstock.weights.checkpoint import Checkpoint

Weight = Array | QuantizedTensor

VISION = tuple(
    f"{prefix}{part}" for prefix in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.")
)  # how names of the parts of released files begin that see
_PARTS = (
    *(f".{part}" for part in ("weight", "scales", "biases", "global_scale", "weight_scale_inv")),
    *("_blocks", "_scales"),
)
_LAYER = re.compile(r"\.layers\.(\d{1,6})\.")


class Source(Protocol):
    """Weights by path. `layout` is "hf" for the released files of Hugging Face, "mlx" for those of mlx-lm."""

    @property
    def layout(self) -> str: ...

    def __contains__(self, path: str) -> bool: ...

    def weight(self, path: str, *shape: int) -> Weight:
        """A matrix (or a stack of them) that is multiplied by: dense or quantized, as stored, not copied."""
        ...

    def vector(self, path: str, *shape: int) -> np.ndarray:
        """A small tensor (norm weight, scale, conv kernel) as float32."""
        ...

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Weight:
        """`weight` with its rows in another order: quantized rows move whole, nothing is quantized again."""
        ...

    def stack(self, paths: Sequence[str], *shape: int) -> Weight:
        """The matrices of a layer's experts as one stack: a tensor that is one, or each stored by itself."""
        ...


def text_names(checkpoint: Checkpoint, _config: object = None) -> tuple[str, str, str]:
    """Prefix of a text model's tensors, prefix of its `lm_head`, and the layout; alone, or beside a vision tower."""
    spellings = (("language_model.model.", "language_model.", "mlx"), ("model.language_model.", "", "hf"))
    for spelling in spellings:
        if f"{spelling[0]}norm.weight" in checkpoint:
            return spelling
    turned = any(".switch_" in name or name.endswith(".scales") for name in checkpoint.names)
    return "model.", "", "mlx" if turned else "hf"


class CheckpointSource:
    """Weights of a checkpoint, each checked against the shape that the config implies.

    prefix stands before every path in the file, head before `lm_head`. used: names that have been asked for, where
    several sources share a checkpoint.
    """

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, head: str, layout: str, used: set[str] | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self.prefix = prefix
        self.head = head
        self.layout = layout
        self.used: set[str] = set() if used is None else used

    def name_of(self, path: str) -> str:
        return (self.head if path == "lm_head" else self.prefix) + path

    def __contains__(self, path: str) -> bool:
        name = self.name_of(path)
        return any(f"{name}{end}" in self.checkpoint for end in ("", ".weight", "_blocks"))

    def _tensor(self, path: str, shape: tuple[int, ...]) -> Weight:
        name = self.name_of(path)
        tensor = self.checkpoint.tensor(name)
        self._check_shape(name, tuple(tensor.shape), shape)
        if isinstance(tensor, QuantizedTensor) and tensor.mode != "affine":
            self._check_scales(name, tensor)
        self.used.update((name, *(f"{name}{part}" for part in _PARTS)))
        return tensor

    def _check_scales(self, name: str, tensor: QuantizedTensor) -> None:
        """Raises CheckpointError for bytes or global scales that are not finite: few of all bytes, read in a row."""
        at = first_unsound_scale(tensor.mode, tensor.scales)
        what = f"a scale that is not finite (byte {at} of its scales)" if at >= 0 else ""
        if tensor.global_scale is not None and not np.isfinite(tensor.global_scale).all():
            what = "a global scale that is not finite"
        if what:
            raise CheckpointError(f"{self.checkpoint.path}: {name} has {what}, expected finite numbers: damaged?")

    def _check_shape(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise CheckpointError(f"{self.checkpoint.path}: {name} has shape {found}, expected {shape} by config.json")

    def weight(self, path: str, *shape: int) -> Weight:
        tensor = self._tensor(path, shape)
        if not isinstance(tensor, QuantizedTensor):
            self._floating(path, dtype_name(tensor.dtype))
        return tensor

    def vector(self, path: str, *shape: int) -> np.ndarray:
        tensor = self._tensor(path, shape)
        if isinstance(tensor, QuantizedTensor):
            raise CheckpointError(f"{self.checkpoint.path}: {self.name_of(path)} is quantized, expected a dense tensor")
        self._floating(path, dtype_name(tensor.dtype))
        return tensor.astype(np.float32)

    def _floating(self, path: str, dtype: str) -> None:
        if dtype not in FLOATS:
            raise CheckpointError(
                f"{self.checkpoint.path}: {self.name_of(path)} has dtype {dtype}, expected one of {', '.join(FLOATS)}"
            )

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Weight:
        return _taken(self.weight(path, *shape), order)

    def stack(self, paths: Sequence[str], *shape: int) -> Weight:
        if len(paths) == 1:
            return self.weight(paths[0], *shape)
        found = [self.weight(path, *shape[1:]) for path in paths]
        first = found[0]
        if any(_kind(w) != _kind(first) for w in found):
            self._differ(paths[0])
        if isinstance(first, QuantizedTensor):
            return first.with_arrays(*(np.stack(parts) for parts in zip(*(w.arrays for w in found), strict=True)))  # type: ignore[union-attr]
        return np.stack(found)  # type: ignore[arg-type]

    def _differ(self, path: str) -> NoReturn:
        raise CheckpointError(
            f"{self.checkpoint.path}: {self.name_of(path)} and the experts beside it differ in "
            "bits, group size or dtype, expected them alike"
        )

    def expert_files(self, paths: Sequence[str], *shape: int) -> ExpertFiles:
        """`stack` without a look at the files: where its matrices lie."""
        one = len(paths) == 1
        count, *matrix = shape
        found = [self._expert_files(path, tuple(shape if one else matrix), count if one else 1) for path in paths]
        first = found[0]
        if any(_outward(files) != _outward(first) for files in found):
            self._differ(paths[0])
        if one:
            return first
        columns = zip(*(files.parts for files in found), strict=True)
        parts = (TensorExtents(column[0].spec, tuple(part.extents[0] for part in column)) for column in columns)
        return replace(first, parts=tuple(parts))

    def _expert_files(self, path: str, shape: tuple[int, ...], count: int) -> ExpertFiles:
        name = self.name_of(path)
        format, names = self.checkpoint.parts(name)
        specs = [Spec(self.checkpoint.shape(tensor), self.checkpoint.dtype(tensor)) for tensor in names]
        if names[0].endswith("_blocks"):  # of 16 bytes with 32 codes: the same bytes in words
            *stack, groups, _ = specs[0].shape
            specs[0] = Spec((*stack, 4 * groups), "uint32")
        *rows, last = specs[0].shape
        self._check_shape(name, (*rows, last if format is None else last * 32 // format.bits), shape)
        self.used.update(names)
        if format is None:
            self._floating(path, self.checkpoint.dtype(names[0]))
        parts = []
        for tensor, spec in zip(names, specs, strict=True):
            own = () if tensor.endswith(".global_scale") else spec.shape[-2:]
            file, start, _ = self.checkpoint.location(tensor)
            parts.append(stacked(file, start, count, Spec(own, spec.dtype)))
        return ExpertFiles(name, format, tuple(parts))

    def mark_used(self, paths: Sequence[str]) -> None:
        """Count these as asked for, though nothing of them is read: another rank has them."""
        for name in map(self.name_of, paths):
            self.used.update((name, *(f"{name}{part}" for part in _PARTS)))

    def unused(self) -> list[str]:
        """Names of tensors that nothing asked for."""
        return sorted(name for name in self.checkpoint.names if name not in self.used)


@dataclass(frozen=True)
class LeftOver:
    """Tensors of a checkpoint that its model does not use: by the part that is known and not run, and all others."""

    known: dict[str, list[str]]
    remarks: list[str]


def left_over(source: CheckpointSource, skipped: Sequence[str], layers: int) -> LeftOver:
    """What nothing has asked `source` for; skipped: how names of parts begin that are not run."""
    known: dict[str, list[str]] = {}
    other: list[str] = []
    for name in source.unused():
        part = next((start.rstrip(".") for start in skipped if name.startswith(start)), None)
        layer = _LAYER.search(name)
        if part is None and layer is not None and int(layer[1]) >= layers:
            part = f"layers from {layers} on (prediction of further tokens)"
        (other if part is None else known.setdefault(part, [])).append(name)
    path, remarks = source.checkpoint.path, []
    if known:
        remarks.append(f"{path}: {sum(map(len, known.values()))} tensors of {', '.join(sorted(known))} are skipped")
    if other:
        shown = ", ".join(other[:3]) + (" …" if len(other) > 3 else "")
        remarks.append(f"{path}: {len(other)} tensors are not part of the model: {shown}")
    return LeftOver(known, remarks)


class ShapeOnlySource:
    """Another source's matrices by shape and format alone: none is read or copied. Vectors are as they are."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.layout = source.layout

    def __contains__(self, path: str) -> bool:
        return path in self.source

    def weight(self, path: str, *shape: int) -> Weight:
        return outlined(self.source.weight(path, *shape))

    def vector(self, path: str, *shape: int) -> np.ndarray:
        return self.source.vector(path, *shape)

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Weight:
        return _outlined(self.source.weight(path, *shape), lambda own: (len(order), *own[1:]))

    def stack(self, paths: Sequence[str], *shape: int) -> Weight:
        if len(paths) == 1:
            return self.weight(paths[0], *shape)
        return _outlined(self.source.weight(paths[0], *shape[1:]), lambda own: (len(paths), *own))

    def mark_used(self, paths: Sequence[str]) -> None:
        """Nothing is counted."""


def outlined(weight: Weight) -> Weight:
    """A weight of the same shape and format that takes no memory."""
    return _outlined(weight, lambda own: own)


def _outlined(weight: Weight, shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Weight:
    """A weight of the same format that takes no memory; `shape` turns the shapes of its arrays into the new ones."""
    if isinstance(weight, QuantizedTensor):
        return weight.with_arrays(*(_untouched(shape(array.shape), array.dtype) for array in weight.arrays))
    return _untouched(shape(weight.shape), weight.dtype)


class _Untouched(np.ndarray):
    """An array that is never read or written, so that its pages are never there.

    Joined to others, copied, or of some rows or columns, it makes another.
    """

    memory_is_plain = True

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        shape = list(self.shape)
        if func is np.concatenate:
            arrays, axis = args
            shape[axis] = sum(array.shape[axis] for array in arrays)
        elif func is np.take:
            _, index, axis = args
            shape[axis] = len(index)
        elif func is not np.copy:
            return super().__array_function__(func, types, args, kwargs)
        return _untouched(tuple(shape), self.dtype)


def _untouched(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Not by np.empty, which touches the first page of each array: a huge one, perhaps, and there are thousands."""
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, max(1, nbytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.ndarray(shape, dtype, memory).view(_Untouched)
    except (OSError, MemoryError, OverflowError, ValueError):
        raise OutOfMemory(f"config.json: a weight of shape {shape} needs {amount(nbytes)}, too many") from None


class DeviceSource:
    """A source whose matrices go to a device as they are read, one at a time, so that the host never holds them all.

    Vectors stay NumPy arrays: families compute with them while they read; `models.placed` moves what is left.
    """

    def __init__(self, source: Source, put: Callable[[Any], Any]) -> None:
        self.source = source
        self.layout = source.layout
        self._put = put

    def __contains__(self, path: str) -> bool:
        return path in self.source

    def weight(self, path: str, *shape: int) -> Weight:
        return self._put(self.source.weight(path, *shape))

    def vector(self, path: str, *shape: int) -> np.ndarray:
        return self.source.vector(path, *shape)

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Weight:
        return self._put(self.source.rows(path, order, *shape))

    def stack(self, paths: Sequence[str], *shape: int) -> Weight:
        return self._put(self.source.stack(paths, *shape))


class FilesSource(Source, Protocol):
    """A source over files, which says where experts lie in them."""

    def expert_files(self, paths: Sequence[str], *shape: int) -> ExpertFiles: ...


class FileBackedSource(DeviceSource):
    """A checkpoint whose experts stay in its files: their stacks come as `ExpertFiles`."""

    def __init__(self, source: FilesSource, put: Callable[[Any], Any]) -> None:
        super().__init__(source, put)
        self._stored = source

    def stack(self, paths: Sequence[str], *shape: int) -> Any:
        return self._stored.expert_files(paths, *shape)


def _outward(files: ExpertFiles) -> Any:
    """What expert files must have in common to be one."""
    return files.format, tuple(part.spec for part in files.parts)


def _kind(weight: Weight) -> Any:
    """What matrices must have in common to be stacked, besides their shape."""
    return weight.key if isinstance(weight, QuantizedTensor) else weight.dtype


def _taken(weight: Weight, order: np.ndarray) -> Weight:
    if isinstance(weight, QuantizedTensor):
        return weight.rows(order)
    return np.ascontiguousarray(weight[order])
