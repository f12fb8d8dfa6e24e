"""Made-up weights in the shapes of a config: for benchmarks, for tracing, and for the size of a model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock.dtypes import bfloat16, numpy_dtype
from penstock.models import family_of
from penstock.models.quantization import FormatTable
from penstock.models.source import Weight, _untouched
from penstock.models.split import Mesh, Split
from penstock.ops.array import Array
from penstock.quant import Format, QuantizedTensor, levels, scale_values

_ALL = 0xFFFFFFFF
_TAME = 0xBFBFBFBF  # E4M3 codes without the upper bit of their exponent: below 2, and never NaN


def _scale_byte(format: Format, columns: int) -> int:
    """The scale that gives uniform codes about the standard deviation columns^(-1/2) · 0.7."""
    drawn = levels(format.mode)
    if format.mode == "mxfp8":
        drawn = drawn[np.arange(256) & _TAME & 0xFF]
    wanted = 0.7 * columns**-0.5 / float(np.sqrt(np.mean(drawn.astype(np.float64) ** 2)))
    scales = scale_values(format.mode)[:127] if format.mode == "nvfp4" else scale_values(format.mode)[:255]
    return int(np.argmin(np.abs(np.log2(np.maximum(scales, 1e-30)) - np.log2(wanted))))


class Random:
    """Made-up weights in the MLX layout: codes drawn at random, scales that keep the activations tame.

    Matrices are quantized as the config's `quantization` table says (default 4 bits, groups of 64; routers 8 bits
    where it names none).
    """

    layout = "mlx"

    def __init__(self, config: Mapping[str, Any], seed: int = 0, progress: Callable[[int], None] | None = None) -> None:
        self._formats = FormatTable(config)
        self.group_size = self._formats.unit  # columns at whose multiples a matrix can be cut
        self._role_of = family_of(dict(config)).role_of
        self._seed, self._rng = seed, np.random.Generator(np.random.SFC64(seed))
        self._progress = progress

    def __contains__(self, path: str) -> bool:
        return not path.endswith(".bias") and path != "lm_head"  # which is asked for where it may be left out

    def start_at(self, path: str) -> None:
        """Draw what comes next as if it came first, whatever was drawn before: it depends on the seed and this path."""
        self._rng = np.random.Generator(np.random.SFC64([self._seed, zlib.crc32(path.encode())]))

    def weight(self, path: str, *shape: int) -> Weight:
        if 0 in shape:
            return self._filled(shape, 0.0)
        *rows, K = shape
        format = self._formats.format(path, K, self._role_of(path) == "router")
        if format is None:
            return self._dense(shape)
        bits, groups = format.bits, (*rows, K // format.group_size)
        mask = _TAME if format.mode == "mxfp8" else _ALL
        codes = self._codes((*rows, K * bits // 32), mask)
        if format.mode != "affine":
            return QuantizedTensor(codes, self._filled(groups, _scale_byte(format, K), "uint8"), None, *format)
        # codes are uniform, so a weight has the standard deviation scale · 2^bits / sqrt(12); make that K^(-1/2) · 0.7
        scale = 0.7 * 12**0.5 / 2**bits * K**-0.5
        biases = self._filled(groups, -scale * (2**bits - 1) / 2)
        return QuantizedTensor(codes, self._filled(groups, scale), biases, *format)

    def _codes(self, shape: tuple[int, ...], mask: int) -> Array:
        """Words of drawn bits, those outside of the mask 0."""
        packed = np.empty(shape, np.uint32)
        flat = packed.reshape(-1).view(np.uint64) if packed.size % 2 == 0 else packed.reshape(-1)
        step = 1 << 22
        for start in range(0, flat.size, step):
            part = flat[start : start + step]
            part[:] = self._rng.integers(0, np.iinfo(flat.dtype).max, part.size, flat.dtype, endpoint=True)
            if self._progress:
                self._progress(part.nbytes)
        if mask != _ALL:
            packed &= np.uint32(mask)
        return packed

    def _filled(self, shape: tuple[int, ...], value: float, dtype: str = "bfloat16") -> Array:
        return np.full(shape, value, numpy_dtype(dtype))

    def _dense(self, shape: tuple[int, ...]) -> Array:
        return (self._rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5).astype(bfloat16)

    def vector(self, path: str, *shape: int) -> np.ndarray:
        noise = self._rng.standard_normal(shape, np.float32)
        if self._role_of(path) == "norms":
            return 1 + np.float32(0.05) * noise
        if path.endswith("bias"):
            return np.float32(0.01) * noise
        return np.float32(0.5) * noise

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Weight:
        return self.weight(path, len(order), *shape[1:])

    def stack(self, paths: Sequence[str], *shape: int) -> Weight:
        return self.weight(paths[0], *shape)


@runtime_checkable
class Maker(Protocol):
    """A device that can draw weights where they are to lie: a GPU."""

    def to_device(self, value: Any) -> Any: ...

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any: ...

    def random_codes(self, shape: tuple[int, ...], seed: int) -> Any:
        """int32, every bit drawn."""
        ...


class DeviceRandomSource(Random):
    """Made-up weights that the device draws itself: seconds instead of minutes, and other numbers than the host's."""

    def __init__(
        self, config: Mapping[str, Any], device: Maker, seed: int = 0, progress: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(config, seed, progress)
        self._device = device

    def _codes(self, shape: tuple[int, ...], mask: int) -> Array:
        made = self._device.random_codes(shape, int(self._rng.integers(1 << 63)))
        if self._progress:
            self._progress(made.nbytes)
        if mask != _ALL:
            made &= mask - (1 << 32)  # as int32
        return made

    def _filled(self, shape: tuple[int, ...], value: float, dtype: str = "bfloat16") -> Array:
        made = self._device.zeros(shape, dtype)
        made[...] = value
        return made

    def _dense(self, shape: tuple[int, ...]) -> Array:
        return self._device.to_device(super()._dense(shape))


class RandomPart:
    """Made-up weights of a rank, drawn in the shapes of its part, which is no part of what one device would draw.

    What all ranks have is the same on each.
    """

    def __init__(self, source: Random, split: Split[Any], mesh: Mesh) -> None:
        self.layout, self._source, self._split, self._mesh = source.layout, source, split, mesh

    def __contains__(self, path: str) -> bool:
        return path in self._source

    def _shape(self, path: str, shape: Sequence[int], axis: int | None = None) -> list[int]:
        found, part = list(shape), self._split.part(path)
        if part is not None:
            found[part.axis if axis is None else axis] = part.count
        self._source.start_at(path)
        return found

    def weight(self, path: str, *shape: int) -> Weight:
        return self._source.weight(path, *self._shape(path, shape))

    def vector(self, path: str, *shape: int) -> np.ndarray:
        return self._source.vector(path, *self._shape(path, shape, 0))

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Weight:
        return self.weight(path, len(order), *shape[1:])

    def stack(self, paths: Sequence[str], *shape: int) -> Weight:
        count, *matrix = shape
        self._source.start_at(paths[0])
        count = count if self._mesh.experts_split else len(self._mesh.owned(count))
        return self._source.stack(paths, count, *matrix)


class Shapes(Random):
    """Weights of which nothing but shape and format counts: for their size, and for tracing. They take no memory."""

    def _codes(self, shape: tuple[int, ...], mask: int) -> Array:
        return _untouched(shape, np.dtype(np.uint32))

    def _filled(self, shape: tuple[int, ...], value: float, dtype: str = "bfloat16") -> Array:
        return _untouched(shape, numpy_dtype(dtype))

    def _dense(self, shape: tuple[int, ...]) -> Array:
        return _untouched(shape, bfloat16)
