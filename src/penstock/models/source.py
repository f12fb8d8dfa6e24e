"""Where a model's weights come from: a checkpoint, or a random generator of the same shapes.

A family asks for each weight by its path (after the family's prefix) and its shape. So a checkpoint is checked against
its config while it is read, and a model of any size can be made up for a benchmark without a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from penstock.dtypes import FLOATS, bfloat16, dtype_name
from penstock.errors import CheckpointError
from penstock.models.config import Fields
from penstock.ops._op import Array
from penstock.quant import BITS, GROUP_SIZES, QuantizedTensor
from penstock.weights.checkpoint import Checkpoint

Weight = Array | QuantizedTensor


class Source(Protocol):
    """Weights by path. `layout` is "hf" for the released files of Hugging Face, "mlx" for those of mlx-lm."""

    layout: str

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

    def stack(self, paths: Iterable[str], *shape: int) -> Weight:
        """Matrices of one shape, each stored by itself, as one stack."""
        ...


def text_names(checkpoint: Checkpoint) -> tuple[str, str, str]:
    """Prefix of a text model's tensors, prefix of its `lm_head`, and the layout; alone, or beside a vision tower."""
    spellings = (("language_model.model.", "language_model.", "mlx"), ("model.language_model.", "", "hf"))
    for spelling in spellings:
        if f"{spelling[0]}norm.weight" in checkpoint:
            return spelling
    turned = any(".switch_" in name or name.endswith(".scales") for name in checkpoint.names)
    return "model.", "", "mlx" if turned else "hf"


class Stored:
    """Weights of a checkpoint, each checked against the shape that the config implies.

    prefix stands before every path in the file, head before `lm_head`.
    """

    def __init__(self, checkpoint: Checkpoint, prefix: str, head: str, layout: str) -> None:
        self.checkpoint = checkpoint
        self.prefix = prefix
        self.head = head
        self.layout = layout
        self._used: set[str] = set()

    def _path(self, path: str) -> str:
        return (self.head if path == "lm_head" else self.prefix) + path

    def __contains__(self, path: str) -> bool:
        name = self._path(path)
        return name in self.checkpoint or f"{name}.weight" in self.checkpoint

    def _tensor(self, path: str, shape: tuple[int, ...]) -> Weight:
        name = self._path(path)
        tensor = self.checkpoint.tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self.checkpoint.path}: {name} has shape {tuple(tensor.shape)}, expected {shape} by config.json"
            )
        self._used.update((name, *(f"{name}.{part}" for part in ("weight", "scales", "biases"))))
        return tensor

    def weight(self, path: str, *shape: int) -> Weight:
        tensor = self._tensor(path, shape)
        if not isinstance(tensor, QuantizedTensor):
            self._floating(path, tensor)
        return tensor

    def vector(self, path: str, *shape: int) -> np.ndarray:
        tensor = self._tensor(path, shape)
        if isinstance(tensor, QuantizedTensor):
            raise CheckpointError(f"{self.checkpoint.path}: {self._path(path)} is quantized, expected a dense tensor")
        self._floating(path, tensor)
        return tensor.astype(np.float32)

    def _floating(self, path: str, tensor: np.ndarray) -> None:
        if dtype_name(tensor.dtype) not in FLOATS:
            raise CheckpointError(
                f"{self.checkpoint.path}: {self._path(path)} has dtype {dtype_name(tensor.dtype)}, "
                f"expected one of {', '.join(FLOATS)}"
            )

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Weight:
        return _taken(self.weight(path, *shape), order)

    def stack(self, paths: Iterable[str], *shape: int) -> Weight:
        found = [self.weight(path, *shape) for path in paths]
        first = found[0]
        if any(_kind(w) != _kind(first) for w in found):
            raise CheckpointError(
                f"{self.checkpoint.path}: {self._path(next(iter(paths)))} and the experts beside it differ in "
                "bits, group size or dtype, expected them alike"
            )
        if isinstance(first, QuantizedTensor):
            return first.with_arrays(*(np.stack(parts) for parts in zip(*(w.arrays for w in found), strict=True)))  # type: ignore[union-attr]
        return np.stack(found)  # type: ignore[arg-type]

    def unused(self) -> list[str]:
        """Names of tensors that nothing asked for."""
        return sorted(name for name in self.checkpoint.names if name not in self._used)


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
        self._rng = np.random.Generator(np.random.SFC64(seed))
        self._progress = progress

    def __contains__(self, path: str) -> bool:
        return not path.endswith(".bias") and path != "lm_head"  # which is asked for where it may be left out

    def weight(self, path: str, *shape: int) -> Weight:
        bits = 8 if path.endswith((".gate", "shared_expert_gate", "router.proj")) else self.bits
        *rows, K = shape
        gs = self.group_size
        while K % gs:
            gs //= 2
            if gs not in GROUP_SIZES:
                return (self._rng.standard_normal(shape, np.float32) * K**-0.5).astype(bfloat16)
        packed = np.empty((*rows, K * bits // 32), np.uint32)
        flat = packed.reshape(-1).view(np.uint64) if packed.size % 2 == 0 else packed.reshape(-1)
        step = 1 << 22
        for start in range(0, flat.size, step):
            part = flat[start : start + step]
            part[:] = self._rng.integers(0, np.iinfo(flat.dtype).max, part.size, flat.dtype, endpoint=True)
            if self._progress:
                self._progress(part.nbytes)
        # codes are uniform, so a weight has the standard deviation scale · 2^bits / sqrt(12); make that K^(-1/2) · 0.7
        scale = 0.7 * 12**0.5 / 2**bits * K**-0.5
        scales = np.full((*rows, K // gs), scale, bfloat16)
        biases = np.full((*rows, K // gs), -scale * (2**bits - 1) / 2, bfloat16)
        return QuantizedTensor(packed, scales, biases, bits, gs)

    def vector(self, path: str, *shape: int) -> np.ndarray:
        noise = self._rng.standard_normal(shape, np.float32)
        if path.endswith(("norm", "layernorm", "norm_1", "norm_2", "layernorm_1", "layernorm_2", "layer_scalar")):
            return 1 + np.float32(0.05) * noise
        if path.endswith("bias"):
            return np.float32(0.01) * noise
        return np.float32(0.5) * noise

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Weight:
        return self.weight(path, len(order), *shape[1:])

    def stack(self, paths: Iterable[str], *shape: int) -> Weight:
        found = list(paths)
        return self.weight(found[0], len(found), *shape)


class Placed:
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

    def stack(self, paths: Iterable[str], *shape: int) -> Weight:
        return self._put(self.source.stack(paths, *shape))


def _kind(weight: Weight) -> Any:
    """What matrices must have in common to be stacked, besides their shape."""
    return weight.key if isinstance(weight, QuantizedTensor) else weight.dtype


def _taken(weight: Weight, order: np.ndarray) -> Weight:
    if isinstance(weight, QuantizedTensor):
        return weight.with_arrays(*(np.ascontiguousarray(a[order]) for a in weight.arrays))
    return np.ascontiguousarray(weight[order])
