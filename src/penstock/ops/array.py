"""Arrays of every kind: NumPy's, torch's, and symbols that stand for arrays which do not exist yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from penstock.dtypes import ITEMSIZE, bfloat16, dtype_name, numpy_dtype
from penstock.quant import ExpertBlobs, QuantizedTensor, is_torch

if TYPE_CHECKING:
    from penstock.ops.op import Op

Array: TypeAlias = np.ndarray  # what a definition sees; callers may pass torch tensors or graph symbols


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and dtype name of an array: all that `infer` may look at."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        n = 1
        for s in self.shape:
            n *= s
        return n

    @property
    def nbytes(self) -> int:
        return self.size * ITEMSIZE[self.dtype]


class Symbol:
    """An array that does not exist yet. An op called with one records a node instead of running.

    `record(op, arguments, specs, out)` gets the bound arguments by name, the inferred specs (None for an output
    that is not wanted) and the caller's `out=`; what it returns is the result of the call.
    """

    spec: Spec

    def record(self, op: Op, arguments: dict[str, Any], specs: tuple[Spec | None, ...], out: Any) -> Any:
        raise NotImplementedError


def is_array(value: object) -> bool:
    return isinstance(value, np.ndarray | Symbol) or is_torch(value)


def spec_of(array: Any) -> Spec:
    """The spec of a NumPy array, torch tensor or symbol."""
    if isinstance(array, Symbol):
        return array.spec
    return Spec(tuple(array.shape), dtype_name(array.dtype))


def location_of(array: Any) -> str:
    """ "numpy", "symbol", or the torch device as a string ("cpu", "cuda:0")."""
    if isinstance(array, np.ndarray):
        return "numpy"
    return "symbol" if isinstance(array, Symbol) else str(array.device)


def leaves(value: Any) -> tuple[Any, ...]:
    """The arrays inside an argument: itself, the three of a quantized tensor, those of a sequence; () for a scalar."""
    if is_array(value):
        return (value,)
    if isinstance(value, QuantizedTensor | ExpertBlobs):
        return value.arrays
    if isinstance(value, list | tuple):
        return tuple(leaf for item in value for leaf in leaves(item))
    return ()


def numpy_view(value: Any) -> Any:
    """Torch CPU tensors as NumPy arrays on the same memory; everything else unchanged."""
    if isinstance(value, QuantizedTensor):
        return value.to("cpu")
    if isinstance(value, list | tuple):
        return type(value)(numpy_view(item) for item in value)
    if not is_torch(value):
        return value
    import torch

    value = value.detach()
    if value.dtype is torch.bfloat16:
        return value.view(torch.int16).numpy().view(bfloat16)
    return value.numpy()


def torch_view(array: Any) -> Any:
    """A NumPy array as a torch CPU tensor on the same memory."""
    import torch

    if array.dtype == bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def concatenated(arrays: Sequence[Any], axis: int = 0) -> Any:
    """NumPy arrays or torch tensors one behind the other, as a new one."""
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays, axis)
    import torch

    return torch.cat(list(arrays), axis)


def as_one(arrays: Sequence[Any]) -> Any | None:
    """The array of which these are all rows, one behind the other in one allocation; None if they are not."""
    first, rows = arrays[0], sum(map(len, arrays))
    if any(address(a) + a.nbytes != address(b) for a, b in pairwise(arrays)):
        return None
    if not isinstance(first, np.ndarray):
        if len({array.untyped_storage().data_ptr() for array in arrays}) > 1:
            return None
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    whole = first.base
    if not isinstance(whole, np.ndarray) or any(array.base is not whole for array in arrays):
        return None
    if (whole.dtype, whole.shape[1:]) != (first.dtype, first.shape[1:]):
        return None
    start = (address(first) - address(whole)) * len(first) // first.nbytes
    return whole[start : start + rows]


def shaped(memory: Any, spec: Spec) -> Any:
    """Bytes (NumPy or torch uint8, as many as the spec needs) as an array of this shape and dtype, without a copy."""
    if isinstance(memory, np.ndarray):
        return memory.view(numpy_dtype(spec.dtype)).reshape(spec.shape)
    import torch

    return memory.view(getattr(torch, spec.dtype)).reshape(spec.shape)


def part(memory: Any, start: int, shape: tuple[int, ...], dtype: str, row_stride: int | None = None) -> Any:
    """An array of this shape and dtype from byte `start` of memory (NumPy or torch uint8) on, without a copy.

    row_stride: elements from one row to the next, None: those of a row.
    """
    if row_stride is not None:
        T, width = shape[0], Spec(shape[1:], dtype).size
        rows = part(memory, start, (max(0, (T - 1) * row_stride + width) if T else 0,), dtype)
        return columns_of(rows, shape, row_stride)
    if isinstance(memory, np.ndarray):
        return np.ndarray(shape, numpy_dtype(dtype), memory, start)  # a third of the time of slices and views
    spec = Spec(shape, dtype)
    return shaped(memory[start : start + spec.size * ITEMSIZE[dtype]], spec)


def columns_of(flat: Any, shape: tuple[int, ...], row_stride: int) -> Any:
    """The first columns of rows that lie so many elements apart in a flat array, in this shape, without a copy."""
    inner = [1]
    for size in reversed(shape[2:]):
        inner.insert(0, inner[0] * size)
    strides = (row_stride, *inner)[: len(shape)]
    if isinstance(flat, np.ndarray):
        return np.lib.stride_tricks.as_strided(flat, shape, [step * flat.itemsize for step in strides])
    return flat.as_strided(shape, strides)


def is_contiguous(array: Any) -> bool:
    if isinstance(array, np.ndarray):
        return array.flags.c_contiguous and array.flags.aligned
    return isinstance(array, Symbol) or (array.is_contiguous() and array.data_ptr() % array.element_size() == 0)


def address(array: Any) -> int:
    return array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data_ptr()


def overlap(a: Any, b: Any) -> bool:
    """True if two contiguous arrays share memory."""
    if isinstance(a, Symbol) or isinstance(b, Symbol):
        return a is b
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.may_share_memory(a, b)  # compares bounds: exact for contiguous arrays
    start_a, start_b = address(a), address(b)
    bytes_a, bytes_b = spec_of(a).nbytes, spec_of(b).nbytes
    return bytes_a > 0 and bytes_b > 0 and start_a < start_b + bytes_b and start_b < start_a + bytes_a


def same_memory(a: Any, b: Any) -> bool:
    if isinstance(a, Symbol) or isinstance(b, Symbol):
        return a is b
    return address(a) == address(b) and spec_of(a) == spec_of(b)
