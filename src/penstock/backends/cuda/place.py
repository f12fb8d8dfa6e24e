"""GPU memory as the place of a model's arrays (see engine/place.py); without a GPU, torch's for the interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from penstock.backends.cuda.features import interpreted, unusable
from penstock.errors import BackendError, OutOfMemory
from penstock.ops._op import backend, numpy_view
from penstock.quant import QuantizedTensor, to_torch


class Gpu:
    """The current CUDA device."""

    memory = "GPU memory"

    def __init__(self) -> None:
        self.interpreted = interpreted()
        if not self.interpreted and (why := unusable()) is not None:
            raise BackendError(f"load: device is 'cuda', expected 'cpu': {why}")
        import torch

        self._torch = torch
        self.device = torch.device("cpu") if self.interpreted else torch.device("cuda", torch.cuda.current_device())

    def put(self, value: Any) -> Any:
        with self._memory_errors():
            if isinstance(value, QuantizedTensor):
                return value.with_arrays(*map(self._tensor, value.arrays))
            return self._tensor(value)

    def _tensor(self, array: Any) -> Any:
        return to_torch(array, "torch").to(self.device)

    def host(self, array: Any) -> np.ndarray:
        return numpy_view(array.detach().cpu())

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        with self._memory_errors():
            return self._torch.zeros(shape, dtype=getattr(self._torch, dtype), device=self.device)

    def copy(self, array: Any) -> Any:
        with self._memory_errors():
            return array.clone()

    def numbers(self, arrays: Seq[np.ndarray]) -> list[Any]:
        torch = self._torch
        packed = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays], dtype=np.int32))
        if not self.interpreted:
            packed = packed.pin_memory().to(self.device, non_blocking=True)
        parts, start = [], 0
        for array in arrays:
            parts.append(packed[start : start + array.size].view(array.shape))
            start += array.size
        return parts

    def free(self) -> int:
        if self.interpreted:
            from penstock.backends.cpu.features import memory

            return memory(reclaim=True)[1]
        cuda = self._torch.cuda
        cached = cuda.memory_reserved(self.device) - cuda.memory_allocated(self.device)
        return cuda.mem_get_info(self.device)[0] + cached

    def peak(self) -> int:
        return 0 if self.interpreted else self._torch.cuda.max_memory_allocated(self.device)

    @contextlib.contextmanager
    def running(self, deterministic: bool) -> Iterator[None]:
        with self._memory_errors(), backend("cuda" if self.interpreted else "auto", deterministic=deterministic):
            yield

    @contextlib.contextmanager
    def _memory_errors(self) -> Iterator[None]:
        try:
            yield
        except self._torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"GPU memory: an allocation failed with {self.free() / 1e9:.2f} GB free; "
                "use a shorter context, fewer sequences, or device='cpu'"
            ) from error


class CopyBandwidth:
    """The yardstick of `penstock bench` on a GPU: a copy of `nbytes`, bytes read plus bytes written per second."""

    def __init__(self, nbytes: int = 1 << 30) -> None:
        self.nbytes = nbytes

    def __enter__(self) -> CopyBandwidth:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def measure(self) -> float | None:
        """GB/s now; None under the interpreter and where memory is short."""
        import torch

        if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 3 * self.nbytes:
            return None
        source = torch.empty(self.nbytes // 4, dtype=torch.int32, device="cuda").random_()
        target = torch.empty_like(source)
        times = []
        for _ in range(5):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        return 2 * self.nbytes / min(times) / 1e6
