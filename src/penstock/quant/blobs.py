"""Experts inside byte buffers of their own."""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.dtypes import FLOATS, dtype_name, numpy_dtype
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.quant.arrays import fault_of
from penstock.quant.formats import check_format
from penstock.quant.tensor import QuantizedTensor


@dataclass(frozen=True, eq=False, repr=False)
class ExpertBlobs:
    """One projection `[N, K]` of E experts, each inside a byte buffer of its own, at the same offsets in each.

    buffers: E one-dimensional uint8 arrays, or anything with the buffer protocol (bytes, memoryview, mmap); w_off,
    s_off and b_off: byte offsets of packed words, scales and biases. `experts` are views into the buffers.
    Raises ShapeError where a part is misaligned or outside of its buffer.
    """

    buffers: Sequence[Any]
    w_off: int
    s_off: int
    b_off: int
    N: int
    K: int
    bits: int
    gs: int
    scale_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_format("ExpertBlobs", self.bits, self.gs)
        if self.scale_dtype not in FLOATS:
            raise DTypeError(f"ExpertBlobs: scale_dtype is {self.scale_dtype!r}, expected one of {', '.join(FLOATS)}")
        for name in ("w_off", "s_off", "b_off", "N", "K"):
            _set_int(self, name, least=0 if name.endswith("_off") else 1)
        if self.K % self.gs:
            raise ShapeError(f"ExpertBlobs: K is {self.K}, expected a multiple of gs = {self.gs}")
        object.__setattr__(self, "buffers", tuple(_bytes(i, buffer) for i, buffer in enumerate(self.buffers)))
        if not self.buffers:
            raise ShapeError("ExpertBlobs: buffers is empty, expected one buffer per expert")
        for i, buffer in enumerate(self.buffers):
            for name, offset, dtype, shape in self._parts:
                end = offset + math.prod(shape) * dtype.itemsize
                if end > buffer.size:
                    raise ShapeError(f"ExpertBlobs: buffers[{i}] has {buffer.size} bytes, expected {end} for {name}")
                if (buffer.ctypes.data + offset) % dtype.itemsize:
                    place = f"offset {offset} of buffers[{i}], address {buffer.ctypes.data + offset:#x}"
                    raise ShapeError(f"ExpertBlobs: {name} at {place}, expected a multiple of {dtype.itemsize}")

    @property
    def _parts(self) -> tuple[tuple[str, int, np.dtype, tuple[int, int]], ...]:
        scale, groups = numpy_dtype(self.scale_dtype), (self.N, self.K // self.gs)
        return (
            ("packed", self.w_off, np.dtype(np.uint32), (self.N, self.K * self.bits // 32)),
            ("scales", self.s_off, scale, groups),
            ("biases", self.b_off, scale, groups),
        )

    @functools.cached_property
    def experts(self) -> tuple[QuantizedTensor, ...]:
        """The experts as tensors whose arrays are views into the buffers."""

        def expert(buffer: np.ndarray) -> QuantizedTensor:
            packed, scales, biases = (np.ndarray(shape, dtype, buffer, off) for _, off, dtype, shape in self._parts)
            return QuantizedTensor(packed, scales, biases, self.bits, self.gs)

        return tuple(map(expert, self.buffers))

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The buffers as uint8 arrays."""
        return tuple(self.buffers)

    def __len__(self) -> int:
        return len(self.buffers)

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.buffers), self.N, self.K

    @property
    def ndim(self) -> int:
        return 3

    @property
    def dtype(self) -> str:
        return self.scale_dtype

    @property
    def key(self) -> tuple[Any, ...]:
        return self.shape, self.bits, self.gs, self.scale_dtype

    @property
    def group_size(self) -> int:
        return self.gs

    @property
    def device(self) -> str:
        return "cpu"

    def __repr__(self) -> str:
        return f"ExpertBlobs({self.shape}, {self.bits} bits, groups of {self.gs}, {self.scale_dtype} scales)"


def _set_int(blobs: ExpertBlobs, name: str, least: int) -> None:
    """Make a field a Python int, whose sums cannot overflow."""
    value = getattr(blobs, name)
    try:
        number = operator.index(value)
    except TypeError:
        raise DTypeError(f"ExpertBlobs: {name} is {value!r}, expected an int") from None
    if number < least:
        raise InvalidArgument(f"ExpertBlobs: {name} is {number}, expected at least {least}")
    object.__setattr__(blobs, name, number)


def _bytes(i: int, buffer: Any) -> np.ndarray:
    if not isinstance(buffer, np.ndarray):
        try:
            buffer = np.frombuffer(buffer, np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            kind = type(buffer).__name__
            raise DTypeError(f"ExpertBlobs: buffers[{i}] is a {kind}, expected bytes: {error}") from None
    if fault := fault_of(buffer):
        raise DTypeError(f"ExpertBlobs: buffers[{i}] is {fault}")
    if buffer.dtype != np.uint8:
        raise DTypeError(f"ExpertBlobs: buffers[{i}] has dtype {dtype_name(buffer.dtype)}, expected uint8")
    if buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ShapeError(f"ExpertBlobs: buffers[{i}] has shape {buffer.shape}, expected one contiguous axis")
    return buffer
