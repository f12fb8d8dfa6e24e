"""A model split over ranks: which heads, rows, columns and experts each of them has.

What widens (q, k, v, gate, up, embedding, head) is split by rows, what narrows (out, down) by columns on multiples of
the quantization group; so each rank has heads and widths of its own, and sums over ranks follow what narrows. Routers,
norms and MLA's latents are on every rank. Families say in their own files which weights are split how and where they
sum (`Family.split`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from penstock.errors import InvalidArgument
from penstock.models.source import Weight
from penstock.ops.collective import bounds
from penstock.quant import GgufTensor, QuantizedTensor
from penstock.weights.checkpoint import Checkpoint

ConfigT = TypeVar("ConfigT")

_IN_LAYER = re.compile(r"layers\.\d+\.(.+)")
Index = slice | np.ndarray
_NARROWING = ("o_proj", "out_proj", "down_proj", ".w2")  # ends of the paths of matrices that are split by columns
GGUF_COLUMNS = 32  # of the smallest block


@dataclass(frozen=True)
class Mesh:
    """This process is rank `rank` of `size` that run one model; experts_split: experts are along their width."""

    rank: int
    size: int
    experts_split: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise InvalidArgument(f"mesh: rank is {self.rank} of {self.size}, expected 0 to {self.size - 1}")

    def share(self, count: int) -> tuple[int, int]:
        """The first of `count` things that this rank has, and the first behind them."""
        return bounds(count, self.rank, self.size)

    def owned(self, experts: int) -> list[int]:
        """The experts of this rank: every size-th."""
        return list(range(self.rank, experts, self.size))

    def slot_of(self, experts: int) -> np.ndarray:
        """int32 [experts]: where each expert is in stacks of this rank's, −2 for those of other ranks."""
        ids = np.arange(experts, dtype=np.int32)
        return np.where(ids % self.size == self.rank, ids // self.size, -2).astype(np.int32)


@dataclass(frozen=True)
class Part:
    """What a rank has of one axis of a tensor with `whole` entries there: −2 for rows of a matrix, −1 for columns, −3
    for the matrices of a stack; of a vector always the first.
    """

    axis: int
    index: Index
    whole: int

    @property
    def count(self) -> int:
        """Of the entries those that the rank has."""
        return self.index.stop - self.index.start if isinstance(self.index, slice) else len(self.index)


@dataclass(frozen=True)
class Split(Generic[ConfigT]):
    """How a rank splits a model: the config of its own part, and parts of tensors by path.

    Of a path in a layer what stands behind `layers.N.`, or the whole path where layers differ. widths: of experts, by
    their rows; None: whole experts.
    """

    config: ConfigT
    parts: Mapping[str, Part]
    expert_width: tuple[int, int, int] | None = None  # first, behind the last, whole
    caches: tuple[tuple[Index | None, Index | None], ...] = field(default=(), repr=False)

    def part(self, path: str) -> Part | None:
        inner = _IN_LAYER.fullmatch(path)
        return self.parts.get(path) or (self.parts.get(inner[1]) if inner else None)


@dataclass(frozen=True)
class Heads:
    """Heads of a rank, with the key/value heads (or key heads) that they read."""

    first: int
    stop: int
    kv_first: int
    kv_stop: int
    whole: int
    kv_whole: int

    @property
    def count(self) -> int:
        return self.stop - self.first

    @property
    def kv_count(self) -> int:
        return self.kv_stop - self.kv_first

    def rows(self, width: int) -> Part:
        """Rows of the heads, `width` each."""
        return Part(-2, slice(self.first * width, self.stop * width), self.whole * width)

    def kv_rows(self, width: int) -> Part:
        return Part(-2, slice(self.kv_first * width, self.kv_stop * width), self.kv_whole * width)

    def columns(self, width: int) -> Part:
        return Part(-1, slice(self.first * width, self.stop * width), self.whole * width)

    def kv_span(self, width: int) -> slice:
        """Columns of a cache of all key/value heads that this rank has."""
        return slice(self.kv_first * width, self.kv_stop * width)


def share_heads(mesh: Mesh, heads: int, kv_heads: int, width: int, group: int, what: str = "heads") -> Heads:
    """The heads of a rank: whole groups that read one key/value head, or a part of one group where ranks are more.

    `width` columns of each go into a product whose weights have groups of `group` columns. Raises InvalidArgument where
    they cannot be shared out.
    """
    per, size = heads // kv_heads, mesh.size
    if kv_heads >= size:
        unit = group // math.gcd(group, per * width)  # key/value heads that end with a group
        if kv_heads % unit == 0 and kv_heads // unit >= size:
            first, stop = (n * unit for n in mesh.share(kv_heads // unit))
            return Heads(first * per, stop * per, first, stop, heads, kv_heads)
    else:
        kv = next(n for n in range(kv_heads) if mesh.rank in range(*bounds(size, n, kv_heads)))
        begin, end = bounds(size, kv, kv_heads)
        unit = group // math.gcd(group, width)
        if per % unit == 0 and per // unit >= end - begin:
            first, stop = (kv * per + n * unit for n in bounds(per // unit, mesh.rank - begin, end - begin))
            return Heads(first, stop, kv, kv + 1, heads, kv_heads)
    raise InvalidArgument(
        f"tensor_parallel_size is {size}, expected fewer ranks: {heads} {what} of {width} columns that read {kv_heads} "
        f"cannot be shared out in groups of {group} columns"
    )


def share_width(mesh: Mesh, width: int, group: int) -> tuple[int, int]:
    """Rows of gate and up, columns of down, that a rank has of an MLP: whole groups, perhaps none."""
    if width % group:
        raise InvalidArgument(
            f"tensor_parallel_size is {mesh.size}, expected 1: a width of {width} is no multiple of groups of {group}"
        )
    first, stop = mesh.share(width // group)
    return first * group, stop * group


def group_columns(checkpoint: Checkpoint) -> int:
    """Columns at whose multiples all quantized matrices of a checkpoint that are cut so can be."""
    modules = {name.removesuffix(".scales") for name in checkpoint.names if name.endswith(".scales")}
    formats = {checkpoint.parts(name)[0] for name in modules if name.endswith(_NARROWING)}
    return math.lcm(*(format.unit for format in formats if format is not None))


def mlp_parts(path: str, share: tuple[int, int], width: int) -> dict[str, Part]:
    """Parts of an MLP's weights and of their biases."""
    own = slice(*share)
    rows = Part(-2, own, width)
    return {
        f"{path}.gate_proj": rows,
        f"{path}.up_proj": rows,
        f"{path}.down_proj": Part(-1, own, width),
        f"{path}.gate_proj.bias": rows,
        f"{path}.up_proj.bias": rows,
    }


def vocabulary_parts(mesh: Mesh, vocab: int, *paths: str) -> dict[str, Part]:
    """Rows of tables with one per token."""
    return dict.fromkeys(paths or ("embed_tokens", "lm_head"), Part(-2, slice(*mesh.share(vocab)), vocab))


def taken(weight: Weight, part: Part) -> Weight:
    """A part of a weight; rows of a slice are not copied. One without entries is a dense array."""
    if not isinstance(weight, QuantizedTensor):
        return _along(weight, part.axis, part.index)
    shape = list(weight.shape)
    shape[part.axis] = part.count
    if 0 in shape:
        return np.empty(shape, np.float32)
    if part.axis != -1:
        arrays = weight.arrays if part.axis == -3 else weight.parts
        return weight.with_arrays(*(_along(array, part.axis + weight.ndim, part.index) for array in arrays))
    assert isinstance(part.index, slice)
    start, stop = part.index.start, part.index.stop
    if isinstance(weight, GgufTensor):
        size, nbytes = weight.block_type.size, weight.block_type.nbytes
        if start % size or stop % size:
            found = f"a weight has blocks of {size} columns ({weight.type})"
            raise InvalidArgument(f"{found}, expected {start} and {stop} to be multiples")
        return weight.with_arrays(_along(weight.packed, -1, slice(start // size * nbytes, stop // size * nbytes)))
    packed, *rest = weight.parts
    per_word, group, unit = 32 / weight.bits, weight.group_size, weight.format.unit
    if start % unit or stop % unit:
        raise InvalidArgument(f"a weight has groups of {unit} columns, expected {start} and {stop} to be multiples")
    words = slice(int(start / per_word), int(stop / per_word))
    groups = slice(start // group, stop // group)
    return weight.with_arrays(_along(packed, -1, words), *(_along(array, -1, groups) for array in rest))


def _along(array: Any, axis: int, index: Index) -> Any:
    if not isinstance(index, slice):
        return np.take(array, index, axis)
    found = array[(slice(None),) * (axis % array.ndim) + (index,)]
    return found if found.flags.c_contiguous else np.copy(found, order="C")


class SplitSource:
    """The part of a rank of another source's weights: nothing else of their files is read.

    Families ask for the shapes of their part; of what is split the whole has the other shape.
    """

    def __init__(self, source: Any, split: Split[Any], mesh: Mesh) -> None:
        self.source, self.split, self.mesh = source, split, mesh
        self.layout = source.layout

    def __contains__(self, path: str) -> bool:
        return path in self.source

    def weight(self, path: str, *shape: int) -> Weight:
        part = self.split.part(path)
        if part is None:
            return self.source.weight(path, *shape)
        whole = [*shape]
        whole[part.axis] = part.whole
        return taken(self.source.weight(path, *whole), part)

    def vector(self, path: str, *shape: int) -> np.ndarray:
        part = self.split.part(path)
        if part is None:
            return self.source.vector(path, *shape)
        return np.ascontiguousarray(self.source.vector(path, part.whole, *shape[1:])[part.index])

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Weight:
        if self.split.part(path) is None:
            return self.source.rows(path, order, *shape)
        return taken(self.weight(path, *shape), Part(-2, order, len(order)))

    def stack(self, paths: Sequence[str], *shape: int) -> Weight:
        if self.split.expert_width is not None:
            return self._narrow(paths, *shape)
        count, *matrix = shape
        owned = self.mesh.owned(count)
        if len(paths) == 1:
            return taken(self.source.stack(paths, *shape), Part(-3, np.array(owned, np.int64), count))
        self.source.mark_used(paths)
        if len(owned) > 1:
            return self.source.stack([paths[e] for e in owned], len(owned), *matrix)
        one = self.source.weight(paths[owned[0] if owned else 0], *matrix)
        arrays = [array[None][: len(owned)] for array in (one.arrays if isinstance(one, QuantizedTensor) else (one,))]
        return one.with_arrays(*arrays) if isinstance(one, QuantizedTensor) else arrays[0]

    def _narrow(self, paths: Sequence[str], count: int, *matrix: int) -> Weight:
        """All experts along their width."""
        assert self.split.expert_width is not None
        first, stop, whole = self.split.expert_width
        name = paths[0].rpartition(".")[2]
        if name == "gate_up_proj":
            rows = np.arange(first, stop)
            part, own = Part(-2, np.concatenate([rows, whole + rows]), 2 * whole), (2 * whole, matrix[1])
        elif name in ("down_proj", "w2"):
            part, own = Part(-1, slice(first, stop), whole), (matrix[0], whole)
        else:
            part, own = Part(-2, slice(first, stop), whole), (whole, matrix[1])
        return taken(self.source.stack(paths, count, *own), part)

    def expert_files(self, paths: Sequence[str], *shape: int) -> Any:
        """Where the experts of all ranks lie."""
        return self.source.expert_files(paths, *shape)
