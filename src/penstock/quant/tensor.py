"""Quantized weights as arrays of words and scales."""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from penstock.dtypes import ITEMSIZE, dtype_name
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.quant.arrays import fault_of, is_torch, layout_of, to_numpy, to_torch
from penstock.quant.formats import COLUMNS, MODES, Format, resolve
from penstock.quant.values import dequantize


class Quantized(Protocol):
    """What every type of quantized weight has, whatever its layout."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape (..., N, K)."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays it is made of."""
        ...

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything about the format: equal for tensors that fit the same kernels."""
        ...

    def to(self, device: str) -> "Quantized": ...

    def dequantize(self, dtype: str = "float32") -> Any: ...


_BY_MODE: Any = None  # a field of which nothing was said


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedTensor:
    """A weight `[..., N, K]` as codes and scales of groups, in one of the modes of `formats.MODES`.

    affine: w[n, j] = code[n, j] * scale[n, j // gs] + bias[n, j // gs]; scales and biases `[..., N, K / gs]`, both
    float32, float16 or bfloat16. The others: w[n, j] = float(code[n, j]) * scale[n, j // gs]; scales are bytes uint8
    `[..., N, K / gs]`, biases None; with a global_scale (nvfp4, float32 `[...]`) the scale is further multiplied by
    global_scale / 2688. packed `[..., N, K * bits / 32]`, NumPy uint32 or torch int32 with the same bits. Leading axes
    are experts. bits and group_size follow from the mode where they are left out. The arrays are kept, not copied:
    C-contiguous, aligned, of one kind and on one device. Raises ShapeError, DTypeError or InvalidArgument.
    """

    packed: Any
    scales: Any
    biases: Any = None
    bits: int = _BY_MODE
    group_size: int = _BY_MODE
    mode: str = "affine"
    global_scale: Any = None
    _laid_out: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        format = resolve("QuantizedTensor", self.bits, self.group_size, self.mode)
        object.__setattr__(self, "bits", format.bits)
        object.__setattr__(self, "group_size", format.group_size)
        known = MODES[self.mode]
        for name in ("biases", "global_scale"):
            if getattr(self, name) is not None and not getattr(known, name):
                kind = type(getattr(self, name)).__name__
                raise InvalidArgument(f"QuantizedTensor: {name} is a {kind}, expected None in mode {self.mode}")
        fields = self._fields
        for name, array in fields.items():
            if not (hasattr(array, "shape") and hasattr(array, "dtype")):
                raise DTypeError(f"QuantizedTensor: {name} is a {type(array).__name__}, expected an array")
            if fault := fault_of(array):
                raise DTypeError(f"QuantizedTensor: {name} is {fault}")
        _check_dtype("packed", self.packed, _word_dtypes(self.packed))
        _check_dtype("scales", self.scales, known.scale_dtypes)
        if known.biases:
            _check_dtype("biases", self.biases, (dtype_name(self.scales.dtype),))

        shape: tuple[int, ...] = tuple(self.packed.shape)
        step = max(self.group_size, COLUMNS) * self.bits // 32
        found = f"QuantizedTensor: packed has shape {shape}"
        if len(shape) < 2:
            raise ShapeError(f"{found}, expected at least 2 axes (..., N, K * bits / 32)")
        if 0 in shape[1:]:
            raise ShapeError(f"{found}, expected no empty axis but the first")
        *rows, words = shape
        if words % step:
            why = "group_size * bits / 32" if self.group_size >= COLUMNS else f"{COLUMNS} * bits / 32"
            raise ShapeError(f"{found}, expected a multiple of {step} words in a row ({why})")
        groups = (*rows, words * 32 // self.bits // self.group_size)
        for name in ("scales", "biases"):
            if name in fields and (found := tuple(fields[name].shape)) != groups:
                raise ShapeError(f"QuantizedTensor: {name} has shape {found}, expected {groups} (K / group_size)")
        if self.global_scale is not None:
            _check_dtype("global_scale", self.global_scale, ("float32",))
            if (found := tuple(self.global_scale.shape)) != shape[:-2]:
                raise ShapeError(f"QuantizedTensor: global_scale has shape {found}, expected {shape[:-2]} (experts)")
        for name, array in fields.items():
            _check_memory(name, array, self.packed)
        object.__setattr__(self, "_laid_out", tuple(map(layout_of, self.arrays)))

    @property
    def _fields(self) -> dict[str, Any]:
        """The arrays by name, those that the mode has."""
        found = {"packed": self.packed, "scales": self.scales}
        if MODES[self.mode].biases:
            found["biases"] = self.biases
        if self.global_scale is not None:
            found["global_scale"] = self.global_scale
        return found

    def check(self) -> None:
        """Raises ShapeError if an array was given another shape, dtype or memory since (arrays can be, in place):
        kernels count on what was found here.
        """
        if tuple(map(layout_of, self.arrays)) == self._laid_out:  # the usual case, in 2 µs
            return
        for (name, array), layout in zip(self._fields.items(), self._laid_out, strict=True):
            if layout_of(array) != layout:
                raise ShapeError(
                    f"QuantizedTensor: {name} was changed in place to {dtype_name(array.dtype)} "
                    f"{tuple(array.shape)}, expected it as it was given, {dtype_name(layout[0])} {tuple(layout[1])}"
                )

    @functools.cached_property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays: packed, scales, then biases (affine) or the global scale, where there are any."""
        return tuple(self._fields.values())

    @property
    def parts(self) -> tuple[Any, ...]:
        """The arrays that have the rows of the weight: all but a global scale."""
        return self.arrays if self.global_scale is None else self.arrays[:-1]

    @functools.cached_property
    def format(self) -> Format:
        return Format(self.bits, self.group_size, self.mode)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The logical shape (..., N, K)."""
        return (*(int(size) for size in self.packed.shape[:-1]), int(self.packed.shape[-1]) * 32 // self.bits)

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """Everything about the format: equal for tensors that fit the same kernels."""
        return self.shape, *self.format, self.dtype, self.global_scale is not None

    @functools.cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First address of each array and the one behind its end (NumPy arrays)."""
        starts = [a.__array_interface__["data"][0] for a in self.arrays]
        return tuple((start, start + a.nbytes) for start, a in zip(starts, self.arrays, strict=True))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @functools.cached_property
    def dtype(self) -> str:
        """Name of the float dtype its weights have: that of scales and biases, bfloat16 where scales are bytes."""
        return dtype_name(self.scales.dtype) if MODES[self.mode].biases else "bfloat16"

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(math.prod(a.shape) * ITEMSIZE[dtype_name(a.dtype)] for a in self.arrays)

    @functools.cached_property
    def device(self) -> str:
        """The name "cpu" for NumPy arrays and torch CPU tensors, else that of the torch device."""
        return str(getattr(self.packed, "device", "cpu"))

    def __repr__(self) -> str:
        kind = "torch " if is_torch(self.packed) else ""
        layout = f"{self.format}, {self.dtype} scales" if self.mode == "affine" else str(self.format)
        return f"QuantizedTensor({self.shape}, {layout}, {kind}{self.device})"

    @staticmethod
    def of(format: Format, arrays: Sequence[Any]) -> "QuantizedTensor":
        """A tensor of a format over the arrays that `QuantizedTensor.arrays` lists."""
        packed, scales, *rest = arrays
        biases = rest.pop(0) if MODES[format.mode].biases else None
        return QuantizedTensor(packed, scales, biases, *format, global_scale=rest[0] if rest else None)

    def with_arrays(self, *arrays: Any) -> "QuantizedTensor":
        """The same format over other arrays: as many as `arrays`, or as `parts`, which keeps the global scale."""
        assert len(arrays) in (len(self.arrays), len(self.parts))
        return QuantizedTensor.of(self.format, (*arrays, *self.arrays[len(arrays) :]))

    def __getitem__(self, index: int | slice) -> "QuantizedTensor":
        """One expert or a range of them, as views: selects along the first axis, which must not be N.

        Raises InvalidArgument for a tensor of 2 axes, IndexError past the end (so that a stack can be iterated).
        """
        if self.ndim == 2:
            raise InvalidArgument(f"QuantizedTensor: shape is {self.shape}, expected axes before N and K to index")
        if not isinstance(index, slice):
            try:
                index = operator.index(index)
            except TypeError:
                raise DTypeError(f"QuantizedTensor: index is {index!r}, expected an int or a slice") from None
        return self.with_arrays(*(a[index, ...] for a in self.arrays))

    def rows(self, index: Any) -> "QuantizedTensor":
        """Some rows of a weight `[N, K]`: views for a slice, copies for an array of row numbers."""
        return self.with_arrays(*(a[index] for a in self.parts))

    def to(self, device: str) -> "QuantizedTensor":
        """As NumPy arrays ("cpu"), torch CPU tensors ("torch") or torch CUDA tensors ("cuda", "cuda:1").

        Host to host shares memory. Raises InvalidArgument for another name, BackendError without torch or CUDA.
        """
        if device == "cpu":
            return self if isinstance(self.packed, np.ndarray) else self.with_arrays(*map(to_numpy, self.arrays))
        return self.with_arrays(*(to_torch(a, device) for a in self.arrays))

    def dequantize(self, dtype: str = "float32") -> Any:
        """See `penstock.dequantize`."""
        return dequantize(self, dtype)


def _word_dtypes(array: Any) -> tuple[str, ...]:
    """What packed words may be called: NumPy has uint32; torch computes with int32; a symbol may stand for either."""
    if isinstance(array, np.ndarray):
        return ("uint32",)
    return ("int32",) if is_torch(array) else ("uint32", "int32")


def _check_dtype(name: str, array: Any, allowed: tuple[str, ...]) -> None:
    found = dtype_name(array.dtype)
    if found not in allowed:
        raise DTypeError(f"QuantizedTensor: {name} has dtype {found}, expected {' or '.join(allowed)}")


def _check_memory(name: str, array: Any, like: Any) -> None:
    """Of the kind and on the device of `like`, C-contiguous and aligned; a symbol has no memory to check."""
    if isinstance(array, np.ndarray):
        kind, contiguous, aligned = "a NumPy array", array.flags.c_contiguous, array.flags.aligned
    elif is_torch(array):
        kind, contiguous = f"a torch tensor on {array.device}", array.is_contiguous()
        aligned = array.data_ptr() % array.element_size() == 0
    else:
        return
    if isinstance(array, np.ndarray) != isinstance(like, np.ndarray) or str(array.device) != str(like.device):
        home = "NumPy arrays" if isinstance(like, np.ndarray) else f"torch tensors on {like.device}"
        raise InvalidArgument(f"QuantizedTensor: {name} is {kind}, expected {home} as packed")
    if not contiguous:
        raise ShapeError(f"QuantizedTensor: {name} is not contiguous, expected a C-contiguous array: pass a copy")
    if not aligned:
        raise ShapeError(f"QuantizedTensor: {name} is not aligned in memory, expected an aligned array: pass a copy")
