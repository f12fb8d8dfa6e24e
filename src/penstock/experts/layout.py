"""Where the experts of a layer lie in files: one extent per expert and array, nothing of it read yet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from penstock.ops.array import Spec
from penstock.quant import Format as QuantFormat

ALIGNED = 64  # bytes: the arrays of an expert in one record start at multiples of it
BLOCK = 4096  # alignment of direct reads: no file system wants more
HASH = 16  # bytes of a record's hash
ROWS = "rows"


@dataclass(frozen=True)
class Extent:
    """Bytes in a file."""

    path: Path
    start: int
    nbytes: int


@dataclass(frozen=True)
class TensorExtents:
    """One array of each expert of a layer, such as the scales of `gate`: its spec, and where each expert's lies.

    blocks: the type of GGUF blocks that its bytes are; None: they are what the spec says. dealt: of arrays that have
    their bytes out of the same extents, how: ROWS, which lie in turns, or blocks of a type of `weights.gguf.BLOCKS`,
    whose codes, scales and biases these are. share: which of them this is.
    """

    spec: Spec
    extents: Sequence[Extent]
    blocks: str | None = None
    dealt: str | None = None
    share: int = 0


@dataclass(frozen=True)
class Format:
    """What the experts of several layers have in common: the arrays of one, in order, and the types of those that are
    GGUF blocks (empty: none is). Alike ones share memory.
    """

    specs: tuple[Spec, ...]
    blocks: tuple[str | None, ...] = ()

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each array starts in a record, aligned."""
        return (0, *accumulate(_up(spec.nbytes, ALIGNED) for spec in self.specs))[: len(self.specs)]

    @cached_property
    def payload(self) -> int:
        """Bytes of the arrays of one expert."""
        return sum(spec.nbytes for spec in self.specs)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a record: all arrays of one expert, each aligned."""
        return sum(_up(spec.nbytes, ALIGNED) for spec in self.specs)

    @cached_property
    def step(self) -> int:
        """Bytes from one record of a packed file to the next: whole blocks."""
        return _up(self.nbytes, BLOCK)

    def views(self, record: memoryview) -> list[memoryview]:
        """The arrays of a record, as bytes."""
        return [record[at : at + spec.nbytes] for at, spec in zip(self.offsets, self.specs, strict=True)]


@dataclass(frozen=True)
class Layer:
    """The experts of one layer, in files. hashes: of their records, one after the other, where a file has them."""

    name: str  # path of the layer's experts in the checkpoint, for messages
    parts: tuple[TensorExtents, ...]
    hashes: bytes | None = None

    @cached_property
    def format(self) -> Format:
        blocks = tuple(part.blocks for part in self.parts)
        return Format(tuple(part.spec for part in self.parts), blocks if any(blocks) else ())

    @property
    def count(self) -> int:
        return len(self.parts[0].extents)

    @property
    def nbytes(self) -> int:
        """Of all experts in the files."""
        return self.format.payload * self.count

    @property
    def dealt_nbytes(self) -> int:
        """Of the arrays that are made of GGUF blocks, of all experts."""
        return sum(part.spec.nbytes for part in self.parts if part.dealt not in (None, ROWS)) * self.count

    def extents(self, expert: int) -> list[Extent]:
        """Where the arrays of one expert lie, in the order of the format."""
        return [part.extents[expert] for part in self.parts]


@dataclass(frozen=True)
class ExpertFiles:
    """A stack of matrices in files, one per expert: dense (format None), or the arrays of a quantized tensor."""

    name: str
    format: QuantFormat | None
    parts: tuple[TensorExtents, ...]


def in_turns(files: ExpertFiles) -> tuple[ExpertFiles, ExpertFiles]:
    """Two stacks of matrices out of one that has their rows in turns."""

    def half(part: TensorExtents, turn: int) -> TensorExtents:
        rows, *rest = part.spec.shape
        assert part.dealt is None
        return replace(part, spec=Spec((rows // 2, *rest), part.spec.dtype), dealt=ROWS, share=turn)

    first, second = (replace(files, parts=tuple(half(part, turn) for part in files.parts)) for turn in (0, 1))
    return first, second


class StridedExtents(Sequence[Extent]):
    """Places of one size in a file, each `step` bytes behind the one before."""

    def __init__(self, path: Path, start: int, size: int, count: int, step: int) -> None:
        self.path, self.step = path, step
        self._start, self._size, self._count = start, size, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return Extent(self.path, self._start + index % self._count * self.step, self._size)


def stacked(path: Path, start: int, count: int, spec: Spec, step: int | None = None) -> TensorExtents:
    """A part whose experts follow each other in one tensor, or lie `step` bytes apart."""
    return TensorExtents(spec, StridedExtents(path, start, spec.nbytes, count, spec.nbytes if step is None else step))


def files(layers: Iterable[Layer]) -> list[Path]:
    """The files that experts lie in, each once."""
    found: dict[Path, None] = {}
    for layer in layers:
        for part in layer.parts:
            extents = part.extents
            paths = [extents.path] if isinstance(extents, StridedExtents) else [extent.path for extent in extents]
            found |= dict.fromkeys(paths)
    return list(found)


def record_hash(format: Format, arrays: Iterable[memoryview]) -> bytes:
    """Hash of the record with these arrays, wherever they lie: zeros are between them and up to the next record."""
    # SHA-256 has instructions of its own: 1.3 to 1.8 GB/s on a core where BLAKE2b has 0.6
    digest, at = hashlib.sha256(), 0
    for start, array in zip(format.offsets, arrays, strict=True):
        digest.update(bytes(start - at))
        digest.update(array)
        at = start + len(array)
    digest.update(bytes(format.step - at))
    return digest.digest()[:HASH]


def _up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step
