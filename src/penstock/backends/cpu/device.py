"""Host memory as a device: NumPy arrays, Numba kernels or the ops' definitions."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from penstock.dtypes import numpy_dtype
from penstock.machine import available_memory, memory, peak_memory
from penstock.ops.device import DeviceSampler, StepInputs, register_device
from penstock.ops.op import backend

_MOST_ROWS = 1 << 20  # of a cache: pages, or slots


class CpuDevice:
    """Host memory and the CPU's kernels."""

    name = "cpu"
    memory_name = "memory"
    host_memory = True
    runs_programs = True
    samples_tokens = False
    chunk_alignment = 256  # a page of the caches: each is written by one chunk
    fixed_caches = False
    joins = 8
    captures = False
    default_dtype, default_activations = "float32", "int8"
    state_dtypes: tuple[str, ...] = ("float32",)
    default_sequences = 8
    compiles_ahead = True

    @staticmethod
    def set_threads(count: int) -> None:
        from penstock.backends.cpu import _threads  # imports Numba

        _threads.set_threads(count)

    @staticmethod
    def threads() -> int:
        from penstock.backends.cpu import _threads

        return _threads.threads()

    def to_device(self, value: Any) -> Any:
        return value

    def to_host(self, array: Any) -> np.ndarray:
        return array.copy()

    def rows_to_host(self, array: np.ndarray, rows: Seq[int]) -> Callable[[], np.ndarray]:
        found = array[list(rows)]
        return lambda: found

    def zeros(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.zeros(shape, numpy_dtype(dtype))

    def reserve(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Zeros in address space alone: a page of memory is taken when it is first written. May raise MemoryError."""
        kind = np.dtype(numpy_dtype(dtype))
        nbytes = math.prod(shape) * kind.itemsize
        if not nbytes:
            return np.zeros(shape, kind)
        try:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_NORESERVE)
        except (OSError, OverflowError) as error:
            raise MemoryError(str(error)) from None
        return np.frombuffer(memory, kind).reshape(shape)

    def most_rows(self, nbytes: int) -> int:
        return min(_MOST_ROWS, memory()[0] // max(1, nbytes)) if hasattr(mmap, "MAP_NORESERVE") else 0

    def copy(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def copies(self, arrays: Seq[np.ndarray]) -> list[np.ndarray]:
        return [array.copy() for array in arrays]

    def clear_all(self, arrays: Seq[np.ndarray]) -> None:
        for array in arrays:
            array[...] = 0

    def copy_all(self, into: Seq[np.ndarray], arrays: Seq[np.ndarray]) -> None:
        for target, array in zip(into, arrays, strict=True):
            np.copyto(target, array)

    def arena(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def compile(self, calls: Seq[Callable[[], object]]) -> None:
        pass

    def capture(self, calls: Seq[Callable[[], object]]) -> Callable[[], object]:
        kept = tuple(calls)

        def replay() -> None:
            for call in kept:
                call()

        return replay

    def wait(self) -> None:
        pass

    def lost(self, error: BaseException) -> bool:
        return False

    def event(self) -> Callable[[], object]:
        return self.wait

    def step_inputs(self, wanted: Mapping[str, tuple[tuple[int, ...], str]], slots: int) -> StepInputs:
        raise NotImplementedError

    def sampler(self, inputs: StepInputs, vocab: int) -> DeviceSampler:
        raise NotImplementedError

    def expert_tier(self, host: str, top_k: int) -> None:
        return None

    def miss_detector(self, tier: Any, layers: int, width: int, sums: str | None = None) -> None:
        return None

    def expert_room(self, pairs: tuple[int, int], experts: int, x: np.ndarray, block: bool) -> np.ndarray:
        return np.empty((*pairs, x.shape[-1]), np.float32)

    def free_memory(self, share: float = 1.0) -> int:
        return available_memory()

    def peak_memory(self) -> int:
        return peak_memory()

    def copy_rate(self) -> None:
        return None

    def link_rate(self) -> None:
        return None

    def running(self, deterministic: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


class ReferenceDevice(CpuDevice):
    """Host memory and the definitions of the ops."""

    name = "reference"
    runs_programs = False
    compiles_ahead = False
    default_activations = "float32"
    state_dtypes = ("float32", "bfloat16")

    @staticmethod
    def threads() -> int:
        return 1

    def running(self, deterministic: bool) -> contextlib.AbstractContextManager[Any]:
        return backend("reference")


register_device(CpuDevice)
register_device(ReferenceDevice)
