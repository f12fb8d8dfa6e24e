"""Made-up weights in the shapes of a config: for benchmarks, for tracing, and for the size of a model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock.dtypes import bfloat16
from penstock.models import family_of
from penstock.models.config import Fields
from penstock.models.source import Weight, _untouched
from penstock.models.split import Mesh, Split
from penstock.ops.array import Array
from penstock.quant import BITS, GROUP_SIZES, QuantizedTensor


class Random:
    """Made-up weights in the MLX layout: codes drawn at random, scales that keep the activations tame.

    Matrices are quantized as the config's `quantization` table says (default 4 bits, groups of 64; routers 8 bits).
    """

    layout = "mlx"

    def __init__(self, config: Mapping[str, Any], seed: int = 0, progress: Callable[[int], None] | None = None) -> None:
        fields = Fields(config, "config.json")
        table = fields.table("quantization", None) or Fields({}, "config.json")
        self.bits = table.choice("bits", BITS, 4)
        self.group_size = table.choice("group_size", GROUP_SIZES, 64)
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
        bits = 8 if self._role_of(path) == "router" else self.bits
        *rows, K = shape
        gs = self.group_size
        while K % gs:
            gs //= 2
            if gs not in GROUP_SIZES:
                return self._dense(shape)
        # codes are uniform, so a weight has the standard deviation scale · 2^bits / sqrt(12); make that K^(-1/2) · 0.7
        scale = 0.7 * 12**0.5 / 2**bits * K**-0.5
        groups = (*rows, K // gs)
        codes = self._codes((*rows, K * bits // 32))
        biases = self._filled(groups, -scale * (2**bits - 1) / 2)
        return QuantizedTensor(codes, self._filled(groups, scale), biases, bits, gs)

    def _codes(self, shape: tuple[int, ...]) -> Array:
        packed = np.empty(shape, np.uint32)
        flat = packed.reshape(-1).view(np.uint64) if packed.size % 2 == 0 else packed.reshape(-1)
        step = 1 << 22
        for start in range(0, flat.size, step):
            part = flat[start : start + step]
            part[:] = self._rng.integers(0, np.iinfo(flat.dtype).max, part.size, flat.dtype, endpoint=True)
            if self._progress:
                self._progress(part.nbytes)
        return packed

    def _filled(self, shape: tuple[int, ...], value: float) -> Array:
        return np.full(shape, value, bfloat16)

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

    def _codes(self, shape: tuple[int, ...]) -> Array:
        made = self._device.random_codes(shape, int(self._rng.integers(1 << 63)))
        if self._progress:
            self._progress(made.nbytes)
        return made

    def _filled(self, shape: tuple[int, ...], value: float) -> Array:
        made = self._device.zeros(shape, "bfloat16")
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

    def _codes(self, shape: tuple[int, ...]) -> Array:
        return _untouched(shape, np.dtype(np.uint32))

    def _filled(self, shape: tuple[int, ...], value: float) -> Array:
        return _untouched(shape, bfloat16)

    def _dense(self, shape: tuple[int, ...]) -> Array:
        return _untouched(shape, bfloat16)
