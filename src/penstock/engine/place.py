"""Where the arrays of a loaded model lie: in host memory as NumPy arrays, or on a GPU as torch tensors.

The engine makes, copies and reads arrays through a place alone, so everything above the ops is written once. The GPU's
place is in the CUDA backend, where torch belongs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np

from penstock.dtypes import numpy_dtype
from penstock.engine.memory import available_memory, peak_memory
from penstock.ops._op import backend


class Place(Protocol):
    """What the engine needs to know of a device."""

    memory: str  # its name in messages: "memory", "GPU memory"

    def put(self, value: Any) -> Any:
        """A NumPy array or quantized tensor, here."""
        ...

    def host(self, array: Any) -> np.ndarray:
        """An array of this place as a NumPy array; waits for it."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any: ...

    def copy(self, array: Any) -> Any: ...

    def numbers(self, arrays: Seq[np.ndarray]) -> list[Any]:
        """Small int32 arrays of a step, here: one transfer for all of them."""
        ...

    def free(self) -> int:
        """Bytes that can still be allocated."""
        ...

    def peak(self) -> int:
        """The most bytes that were in use so far."""
        ...

    def running(self, deterministic: bool) -> contextlib.AbstractContextManager[Any]:
        """Inside, ops run with this place's kernels; a lack of memory is penstock's OutOfMemory."""
        ...


class Host:
    """Host memory; `reference` runs the definitions of the ops instead of their kernels."""

    memory = "memory"

    def __init__(self, reference: bool = False) -> None:
        self.reference = reference

    def put(self, value: Any) -> Any:
        return value

    def host(self, array: Any) -> np.ndarray:
        return array

    def zeros(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.zeros(shape, numpy_dtype(dtype))

    def copy(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def numbers(self, arrays: Seq[np.ndarray]) -> list[np.ndarray]:
        return list(arrays)

    def free(self) -> int:
        return available_memory()

    def peak(self) -> int:
        return peak_memory()

    def running(self, deterministic: bool) -> contextlib.AbstractContextManager[Any]:
        return backend("reference") if self.reference else contextlib.nullcontext()


def place_of(device: str) -> Place:
    """The place of a device: "cpu", "reference" or "cuda". Raises BackendError where CUDA cannot be used."""
    if device != "cuda":
        return Host(device == "reference")
    from penstock.backends.cuda.place import Gpu

    return Gpu()
