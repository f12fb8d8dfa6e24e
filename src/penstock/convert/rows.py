"""Tensors of which rows can be had without the rest, and what a conversion does to them.

A tensor of shape [..., K] is a list of rows of K numbers; one of a single axis is one row. Rows are read from their
file when they are asked for, so that a conversion never holds more of a tensor than it works on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from penstock.dtypes import bfloat16, dtype_name, numpy_dtype, round_to
from penstock.errors import CheckpointError
from penstock.quant import E4M3, Format, QuantizedTensor
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.fp8 import BLOCK
from penstock.weights.mapped import MappedFile

_OPEN = 16  # files that are kept open


class Rows(Protocol):
    """shape [..., K], the dtype of what `read` returns, and the rows [start, stop) as an array [stop − start, K]."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def read(self, start: int, stop: int) -> np.ndarray: ...


def row_count(rows: Rows) -> int:
    return math.prod(rows.shape[:-1])


def row_bytes(rows: Rows) -> int:
    return (rows.shape[-1] if rows.shape else 1) * rows.dtype.itemsize


class Files:
    """Opens files for reading and keeps a few of them; one whose size changed since the first time is refused."""

    def __init__(self) -> None:
        self._sizes: dict[Path, int] = {}
        self._open = functools.lru_cache(_OPEN)(MappedFile)

    def read_into(self, path: Path, out: np.ndarray, start: int) -> None:
        """Fill a contiguous array. Raises CheckpointError for a file that is damaged or no longer what it was."""
        file = self._open(path)
        file.check_size()
        size = self._sizes.setdefault(path, file.size)
        if file.size != size:
            raise CheckpointError(f"{path}: has {file.size} bytes, expected the {size} it had before")
        file.read_into(out.reshape(-1).view(np.uint8).data, start)


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in a file, from byte `start` on."""

    files: Files
    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        out = np.empty((stop - start, self.shape[-1] if self.shape else 1), self.dtype)
        if out.size:
            self.files.read_into(self.path, out, self.start + start * row_bytes(self))
        return out


def stored(files: Files, checkpoint: Checkpoint, name: str) -> Stored:
    """A tensor of a checkpoint; FP8 formats come as raw bytes."""
    path, start, _ = checkpoint.location(name)
    dtype = checkpoint.dtype(name)
    raw = np.dtype(np.uint8) if dtype.startswith("float8") else numpy_dtype(dtype)
    return Stored(files, path, start, checkpoint.shape(name), raw)


@dataclass(frozen=True)
class Whole:
    """A tensor that is made in one piece, when its first row is asked for; kept until its last one was read."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_made", None)

    def read(self, start: int, stop: int) -> np.ndarray:
        made: np.ndarray | None = self._made  # type: ignore[attr-defined]
        if made is None:
            made = self.make()
            assert made.shape == self.shape and made.dtype == self.dtype
        last = stop >= row_count(self)
        object.__setattr__(self, "_made", None if last else made)
        return made.reshape(row_count(self), -1)[start:stop]


@dataclass(frozen=True)
class Shaped:
    """The same numbers in another shape; for small tensors, of which it reads all."""

    rows: Rows
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.rows.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.rows.read(0, row_count(self.rows)).reshape(row_count(self), -1)[start:stop]


@dataclass(frozen=True)
class Stacked:
    """Tensors of one shape and dtype as one with a new first axis."""

    parts: tuple[Rows, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    @property
    def dtype(self) -> np.dtype:
        return self.parts[0].dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        pieces = [self.parts[n].read(a, b) for n, a, b in runs(start, stop, row_count(self.parts[0]))]
        return _joined(pieces)


@dataclass(frozen=True)
class Half:
    """The first or second half of the rows of each matrix: [E, 2 N, K] → [E, N, K]."""

    whole: Rows
    second: bool

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, rows, K = self.whole.shape
        return (*lead, rows // 2, K)

    @property
    def dtype(self) -> np.dtype:
        return self.whole.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        N = self.shape[-2]
        places = ((n * 2 * N + self.second * N, a, b) for n, a, b in runs(start, stop, N))
        return _joined([self.whole.read(first + a, first + b) for first, a, b in places])


@dataclass(frozen=True)
class InTurns:
    """Every other row of each matrix: [E, 2 N, K] → [E, N, K]."""

    whole: Rows
    second: bool

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, rows, K = self.whole.shape
        return (*lead, rows // 2, K)

    @property
    def dtype(self) -> np.dtype:
        return self.whole.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(self.whole.read(2 * start, 2 * stop)[self.second :: 2])


@dataclass(frozen=True)
class Words:
    """Blocks of bytes [E, N, G, 16] as rows of packed words [E, N, 4 G]."""

    blocks: Rows

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, blocks, nbytes = self.blocks.shape
        return (*lead, blocks * nbytes // 4)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint32)

    def read(self, start: int, stop: int) -> np.ndarray:
        blocks = self.blocks.shape[-2]
        return self.blocks.read(start * blocks, stop * blocks).reshape(stop - start, -1).view("<u4")


@dataclass(frozen=True)
class Heads:
    """A part of each head's rows: [H · width, K] → rows [first, last) of each head as [H, last − first, K].

    turned: each head's matrix transposed, [H, K, last − first].
    """

    whole: Rows
    heads: int
    first: int
    last: int
    turned: bool

    @property
    def shape(self) -> tuple[int, ...]:
        count, K = self.last - self.first, self.whole.shape[-1]
        return (self.heads, K, count) if self.turned else (self.heads, count, K)

    @property
    def dtype(self) -> np.dtype:
        return self.whole.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        width = row_count(self.whole) // self.heads
        pieces = []
        for head, a, b in runs(start, stop, self.shape[1]):
            matrix = self.whole.read(head * width + self.first, head * width + self.last)
            pieces.append((matrix.T if self.turned else matrix)[a:b])
        return np.ascontiguousarray(_joined(pieces))


@dataclass(frozen=True)
class PlusOne:
    """x + 1, rounded to the dtype of x."""

    rows: Rows

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    @property
    def dtype(self) -> np.dtype:
        return self.rows.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        return (self.rows.read(start, stop).astype(np.float32) + np.float32(1)).astype(self.dtype)


@dataclass(frozen=True)
class BlockScaled:
    """FP8 (E4M3) numbers [N, K], each square of 128 times its scale [⌈N / 128⌉, ⌈K / 128⌉], rounded to bfloat16."""

    codes: Rows
    scales: Rows

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def dtype(self) -> np.dtype:
        return bfloat16

    def read(self, start: int, stop: int) -> np.ndarray:
        numbers = np.take(E4M3, self.codes.read(start, stop))
        first = start // BLOCK
        scales = self.scales.read(first, -(-stop // BLOCK)).astype(np.float32).repeat(BLOCK, axis=1)
        for block, a, b in runs(start, stop, BLOCK):
            row = block * BLOCK - start
            numbers[row + a : row + b] *= scales[block - first, : self.shape[-1]]
        return round_to(numbers, bfloat16)  # a bfloat16 scale gives the same: the product is exact in float32


@dataclass(frozen=True)
class Cast:
    """Rounded to another float format. Raises CheckpointError for a number that it cannot hold."""

    rows: Rows
    dtype: np.dtype
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    def read(self, start: int, stop: int) -> np.ndarray:
        found = self.rows.read(start, stop)
        with np.errstate(over="ignore"):
            made = found.astype(self.dtype)
        if self.dtype == np.float16 and not np.isfinite(made).all():
            wide = found[~np.isfinite(made)].astype(np.float32)
            expected = "at most 65504, the largest float16" if np.isfinite(wide[0]) else "finite numbers: damaged?"
            raise CheckpointError(f"{self.name}: holds {wide[0]:g}, expected {expected}")
        return made


@dataclass(frozen=True)
class Dequantized:
    """The numbers that the codes of a quantized tensor stand for, in the dtype of its scales, rounded as mlx does;
    where scales are bytes in bfloat16.

    parts: packed words, scales and, where there are any, biases. factors: of matrices of the stack [E], where they have
    global scales.
    """

    parts: tuple[Rows, ...]
    format: Format
    dtype: np.dtype
    factors: Rows | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        packed = self.parts[0]
        return (*packed.shape[:-1], packed.shape[-1] * 32 // self.format.bits)

    def cast(self, dtype: np.dtype, name: str) -> Dequantized:
        """The same in another float format: computed in it, not rounded to it at the end."""
        if self.format.mode != "affine":
            return replace(self, dtype=dtype)
        return replace(self, dtype=dtype, parts=(self.parts[0], *(Cast(part, dtype, name) for part in self.parts[1:])))

    def read(self, start: int, stop: int) -> np.ndarray:
        from penstock.backends.cpu.quant import dequantize_into

        out = np.empty((stop - start, self.shape[-1]), self.dtype)
        arrays = [part.read(start, stop) for part in self.parts]
        if self.factors is None:
            dequantize_into(QuantizedTensor.of(self.format, arrays), out)
            return out
        factors = self.factors.read(0, 1).reshape(-1)
        for matrix, a, b in runs(start, stop, self.shape[-2]):
            own = slice(matrix * self.shape[-2] + a - start, matrix * self.shape[-2] + b - start)
            parts = [*(array[own] for array in arrays), factors[matrix, ...]]
            dequantize_into(QuantizedTensor.of(self.format, parts), out[own])
        return out


def describe(rows: Rows) -> str:
    return f"{dtype_name(rows.dtype)} {list(rows.shape)}"


def runs(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Rows [start, stop) of a stack of matrices of `size` rows: which matrix, and which rows of it."""
    while start < stop:
        n, a = divmod(start, size)
        b = min(size, a + stop - start)
        yield n, a, b
        start += b - a


def _joined(pieces: list[Any]) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
