"""Affine group quantization: the tensors, their packing, and how numbers become codes and codes numbers.

A row of K weights is cut into groups of `group_size`; each weight is an unsigned code of `bits` bits, each group has a
scale and a bias, and weight = code * scale + bias. The layout is that of MLX checkpoints. Axis letters: E experts,
N output features (rows), K input features, gs group size.
"""

import functools
import math
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.backend_module import backend_module
from penstock.dtypes import FLOATS, ITEMSIZE, bfloat16, dtype_name, numpy_dtype, round_to
from penstock.errors import BackendError, DTypeError, InvalidArgument, ShapeError

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)

_BLOCK = 1 << 20  # weights the NumPy definitions handle at once: their temporaries stay below 40 MB


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedTensor:
    """A weight `[..., N, K]` as codes, scales and biases: w[n, j] = code[n, j] * scale[n, j // gs] + bias[n, j // gs].

    packed `[..., N, K * bits / 32]`, NumPy uint32 or torch int32 with the same bits; scales and biases
    `[..., N, K / gs]`, both float32, float16 or bfloat16. Leading axes are experts. The arrays are kept, not copied:
    C-contiguous, aligned, of one kind and on one device. Raises ShapeError, DTypeError or InvalidArgument.
    """

    packed: Any
    scales: Any
    biases: Any
    bits: int
    group_size: int
    _laid_out: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        _check_format("QuantizedTensor", self.bits, self.group_size)
        fields = {"packed": self.packed, "scales": self.scales, "biases": self.biases}
        for name, array in fields.items():
            if not (hasattr(array, "shape") and hasattr(array, "dtype")):
                raise DTypeError(f"QuantizedTensor: {name} is a {type(array).__name__}, expected an array")
            if fault := fault_of(array):
                raise DTypeError(f"QuantizedTensor: {name} is {fault}")
        _check_dtype("packed", self.packed, _word_dtypes(self.packed))
        _check_dtype("scales", self.scales, FLOATS)
        _check_dtype("biases", self.biases, (self.dtype,))

        shape: tuple[int, ...] = tuple(self.packed.shape)
        step = self.group_size * self.bits // 32
        found = f"QuantizedTensor: packed has shape {shape}"
        if len(shape) < 2:
            raise ShapeError(f"{found}, expected at least 2 axes (..., N, K * bits / 32)")
        if 0 in shape[1:]:
            raise ShapeError(f"{found}, expected no empty axis but the first")
        *rows, words = shape
        if words % step:
            raise ShapeError(f"{found}, expected a multiple of {step} words in a row (group_size * bits / 32)")
        groups = (*rows, words // step)
        for name in ("scales", "biases"):
            if (found := tuple(fields[name].shape)) != groups:
                raise ShapeError(f"QuantizedTensor: {name} has shape {found}, expected {groups} (K / group_size)")
        for name, array in fields.items():
            _check_memory(name, array, self.packed)
        object.__setattr__(self, "_laid_out", tuple(map(_layout, self.arrays)))

    def check(self) -> None:
        """Raises ShapeError if an array was given another shape, dtype or memory since (arrays can be, in place):
        kernels count on what was found here.
        """
        if tuple(map(_layout, self.arrays)) == self._laid_out:  # the usual case, in 2 µs
            return
        for name, array, layout in zip(("packed", "scales", "biases"), self.arrays, self._laid_out, strict=True):
            if _layout(array) != layout:
                raise ShapeError(
                    f"QuantizedTensor: {name} was changed in place to {dtype_name(array.dtype)} "
                    f"{tuple(array.shape)}, expected it as it was given, {dtype_name(layout[0])} {tuple(layout[1])}"
                )

    @functools.cached_property
    def arrays(self) -> tuple[Any, Any, Any]:
        return self.packed, self.scales, self.biases

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The logical shape (..., N, K)."""
        return (*(int(size) for size in self.packed.shape[:-1]), int(self.packed.shape[-1]) * 32 // self.bits)

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """Everything about the format: equal for tensors that fit the same kernels."""
        return self.shape, self.bits, self.group_size, self.dtype

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
        """Name of the dtype of scales and biases."""
        return dtype_name(self.scales.dtype)

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(math.prod(a.shape) * ITEMSIZE[dtype_name(a.dtype)] for a in self.arrays)

    @functools.cached_property
    def device(self) -> str:
        """The name "cpu" for NumPy arrays and torch CPU tensors, else that of the torch device."""
        return str(getattr(self.packed, "device", "cpu"))

    def __repr__(self) -> str:
        kind = "torch " if is_torch(self.packed) else ""
        layout = f"{self.bits} bits, groups of {self.group_size}, {self.dtype} scales"
        return f"QuantizedTensor({self.shape}, {layout}, {kind}{self.device})"

    def with_arrays(self, packed: Any, scales: Any, biases: Any) -> "QuantizedTensor":
        """The same bits and group size over other arrays."""
        return QuantizedTensor(packed, scales, biases, self.bits, self.group_size)

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
        return self.with_arrays(*(a[index] for a in self.arrays))

    def to(self, device: str) -> "QuantizedTensor":
        """As NumPy arrays ("cpu"), torch CPU tensors ("torch") or torch CUDA tensors ("cuda", "cuda:1").

        Host to host shares memory. Raises InvalidArgument for another name, BackendError without torch or CUDA.
        """
        if device == "cpu":
            return self if isinstance(self.packed, np.ndarray) else self.with_arrays(*map(_to_numpy, self.arrays))
        return self.with_arrays(*(to_torch(a, device) for a in self.arrays))


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
        _check_format("ExpertBlobs", self.bits, self.gs)
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
    def group_size(self) -> int:
        return self.gs

    @property
    def device(self) -> str:
        return "cpu"

    def __repr__(self) -> str:
        return f"ExpertBlobs({self.shape}, {self.bits} bits, groups of {self.gs}, {self.scale_dtype} scales)"


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Integer codes `[..., K]` below 2**bits to uint32 `[..., K * bits / 32]`, the inverse of `unpack_codes`.

    A row is one little-endian bit stream: code j occupies the bits from j * bits on, bit i being bit i % 32 of word
    i // 32. Raises InvalidArgument for a code out of range, ShapeError unless K * bits is a multiple of 32.
    """
    _check_bits("pack_codes", bits)
    codes = np.asarray(codes)
    if codes.dtype.kind not in "iu":
        raise DTypeError(f"pack_codes: codes has dtype {dtype_name(codes.dtype)}, expected integers")
    if codes.ndim < 1 or codes.shape[-1] < 1 or codes.shape[-1] * bits % 32:
        raise ShapeError(f"pack_codes: codes has shape {codes.shape}, expected K * bits to be a multiple of 32")
    if codes.size and (codes.min() < 0 or codes.max() >> bits):
        raise InvalidArgument(f"pack_codes: codes has {codes.min()} to {codes.max()}, expected 0 to {2**bits - 1}")
    cycle = math.lcm(bits, 32)  # after so many bits a code starts with a word again
    lanes = codes.reshape(*codes.shape[:-1], codes.shape[-1] * bits // cycle, cycle // bits)
    words = np.zeros((*lanes.shape[:-1], cycle // 32), np.uint32)
    for j in range(lanes.shape[-1]):
        word, shift = divmod(j * bits, 32)
        code = lanes[..., j].astype(np.uint32)
        words[..., word] |= code << np.uint32(shift)
        if shift + bits > 32:
            words[..., word + 1] |= code >> np.uint32(32 - shift)
    return words.reshape(*codes.shape[:-1], codes.shape[-1] * bits // 32)


def unpack_codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """uint32 `[..., W]` to codes uint8 `[..., K]`, K = 32 * W / bits, the inverse of `pack_codes`.

    Raises DTypeError for another dtype, ShapeError unless 32 * W is a multiple of bits.
    """
    _check_bits("unpack_codes", bits)
    packed = np.asarray(packed)
    if packed.dtype != np.uint32:
        raise DTypeError(f"unpack_codes: packed has dtype {dtype_name(packed.dtype)}, expected uint32")
    if packed.ndim < 1 or packed.shape[-1] < 1 or packed.shape[-1] * 32 % bits:
        raise ShapeError(f"unpack_codes: packed has shape {packed.shape}, expected words that {bits}-bit codes fill")
    cycle = math.lcm(bits, 32)
    words = packed.reshape(*packed.shape[:-1], packed.shape[-1] * 32 // cycle, cycle // 32)
    codes = np.empty((*words.shape[:-1], cycle // bits), np.uint8)
    for j in range(codes.shape[-1]):
        word, shift = divmod(j * bits, 32)
        code = words[..., word] >> np.uint32(shift)
        if shift + bits > 32:
            code |= words[..., word + 1] << np.uint32(32 - shift)
        codes[..., j] = code & np.uint32(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * 32 // bits)


def dequantize(w: QuantizedTensor, dtype: str = "float32") -> Any:
    """The weights `[..., N, K]` that the codes stand for: code * scale + bias.

    float32, or a dtype that is not the scales': computed in float32 (product and sum each rounded), the result rounded
    once more to `dtype`. The scales' own dtype: product and sum rounded in that dtype, as mlx.core.dequantize does.
    Returns a NumPy array or, for torch arrays, a tensor on their device. Raises DTypeError for another dtype.
    """
    if dtype not in FLOATS:
        raise DTypeError(f"dequantize: dtype is {dtype!r}, expected one of {', '.join(FLOATS)}")
    w.check()
    if is_torch(w.packed):
        return to_torch(dequantize(w.to("cpu"), dtype), "torch" if w.device == "cpu" else w.device)
    inner = numpy_dtype(dtype if dtype == w.dtype else "float32")
    groups, step = w.scales.size, _BLOCK // w.group_size
    packed, scales, biases = (a.reshape(groups, a.size // max(groups, 1)) for a in w.arrays)
    out = np.empty((groups, w.group_size), numpy_dtype(dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, groups, step):
            rows = slice(start, start + step)
            codes = unpack_codes(packed[rows], w.bits).astype(inner)
            values = codes * scales[rows].astype(inner) + biases[rows].astype(inner)
            out[rows] = round_to(values, out.dtype)
    return out.reshape(w.shape)


def quantize(array: Any, bits: int = 4, group_size: int = 64) -> QuantizedTensor:
    """Weights `[..., K]`, at least 2 axes, as codes, scales and biases, bit for bit as mlx.core.quantize on a CPU.

    Per group, in float32, with lo and hi its smallest and largest weight and n = 2**bits - 1:
        s = max((hi - lo) / n, 1e-7), negative unless |lo| > |hi|;  edge = lo if |lo| > |hi| else hi
        q0 = rint(edge / s);  if q0 != 0: s = edge / q0, b = edge;  else b = 0
        code = clip(rint((w - b) / s), 0, n)
    Scales and biases are s and b rounded to the dtype of `array`: float32, float16 or bfloat16. A torch tensor gives
    torch arrays on its device; it is quantized on the host. Raises DTypeError, ShapeError, and InvalidArgument for a
    group with a value that is not finite or with hi - lo beyond float32.
    """
    if is_torch(array):
        _check_weights(array, bits, group_size)
        host = quantize(_to_numpy(array.contiguous()), bits, group_size)
        return host.to("torch" if array.device.type == "cpu" else str(array.device))
    array, result = _quantize_buffers(array, bits, group_size)
    bad = backend_module("cpu", "quant").quantize_into(array, result)
    if bad >= 0:
        raise _unfit_group(array, bad, group_size)
    return result


def quantize_reference(array: np.ndarray, bits: int = 4, group_size: int = 64) -> QuantizedTensor:
    """The definition of `quantize` in plain NumPy: the same results and errors without a compiler, but slower."""
    array, result = _quantize_buffers(array, bits, group_size)
    groups, step, n = result.scales.size, _BLOCK // group_size, np.float32(2**bits - 1)
    weights = array.reshape(groups, group_size)
    packed, scales, biases = (a.reshape(groups, a.size // max(groups, 1)) for a in result.arrays)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for start in range(0, groups, step):
            rows = slice(start, start + step)
            w = weights[rows].astype(np.float32)
            lo, hi = w.min(axis=1, keepdims=True), w.max(axis=1, keepdims=True)
            unfit = np.flatnonzero(~np.isfinite(hi - lo))
            if unfit.size:
                raise _unfit_group(array, start + int(unfit[0]), group_size)
            low_edge = np.abs(lo) > np.abs(hi)
            s = np.maximum((hi - lo) / n, np.float32(1e-7))
            s = np.where(low_edge, s, -s)
            edge = np.where(low_edge, lo, hi)
            q0 = np.rint(edge / s)
            s, b = np.where(q0 != 0, edge / q0, s), np.where(q0 != 0, edge, np.float32(0))
            # A group of equal weights beyond 3.4e31 has s = 0 and 0 / 0 here: its codes are 0, its weights are b.
            codes = np.nan_to_num(np.rint((w - b) / s), nan=0.0)
            packed[rows] = pack_codes(np.clip(codes, 0, n).astype(np.uint8), bits)
            # Neither can overflow: b is a weight or 0, and |s| is at most |edge| or the floor of 1e-7.
            scales[rows], biases[rows] = round_to(s, scales.dtype), round_to(b, biases.dtype)
    return result


def _quantize_buffers(array: Any, bits: int, group_size: int) -> tuple[np.ndarray, QuantizedTensor]:
    """The array, copied only if it is not contiguous, and room for its quantized form."""
    _check_weights(array, bits, group_size)
    array = np.require(array, requirements=["C", "A"])
    *rows, K = array.shape
    packed = np.empty((*rows, K * bits // 32), np.uint32)
    scales, biases = (np.empty((*rows, K // group_size), array.dtype) for _ in range(2))
    return array, QuantizedTensor(packed, scales, biases, bits, group_size)


def _unfit_group(array: np.ndarray, group: int, group_size: int) -> InvalidArgument:
    *row, column = (int(i) for i in np.unravel_index(group, (*array.shape[:-1], array.shape[-1] // group_size)))
    place = f"row {row[0] if len(row) == 1 else tuple(row)}, group {column}"
    values = array.reshape(-1, group_size)[group].astype(np.float32)
    odd = values[~np.isfinite(values)]
    if odd.size:
        return InvalidArgument(f"quantize: array holds {odd[0]} in {place}, expected finite numbers")
    span = f"{values.min():.3g} to {values.max():.3g}"
    return InvalidArgument(f"quantize: array spans {span} in {place}, expected a difference that float32 holds")


def _check_bits(who: str, bits: int) -> None:
    if not isinstance(bits, int) or bits not in BITS:
        raise InvalidArgument(f"{who}: bits is {bits!r}, expected one of {', '.join(map(str, BITS))}")


def _check_format(who: str, bits: int, group_size: int) -> None:
    _check_bits(who, bits)
    if not isinstance(group_size, int) or group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise InvalidArgument(f"{who}: group_size is {group_size!r}, expected one of {sizes}")


def _check_weights(array: Any, bits: int, group_size: int) -> None:
    _check_format("quantize", bits, group_size)
    if not (isinstance(array, np.ndarray) or is_torch(array)):
        raise DTypeError(f"quantize: array is a {type(array).__name__}, expected a NumPy array or torch tensor")
    if dtype_name(array.dtype) not in FLOATS:
        raise DTypeError(f"quantize: array has dtype {dtype_name(array.dtype)}, expected one of {', '.join(FLOATS)}")
    shape = tuple(array.shape)
    if len(shape) < 2:
        raise ShapeError(f"quantize: array has shape {shape}, expected at least 2 axes (..., K)")
    if 0 in shape[1:]:
        raise ShapeError(f"quantize: array has shape {shape}, expected no empty axis but the first")
    if shape[-1] % group_size:
        raise ShapeError(f"quantize: array has K = {shape[-1]}, expected a multiple of group_size = {group_size}")


def _word_dtypes(array: Any) -> tuple[str, ...]:
    """What packed words may be called: NumPy has uint32; torch computes with int32; a symbol may stand for either."""
    if isinstance(array, np.ndarray):
        return ("uint32",)
    return ("int32",) if is_torch(array) else ("uint32", "int32")


def _check_dtype(name: str, array: Any, allowed: tuple[str, ...]) -> None:
    found = dtype_name(array.dtype)
    if found not in allowed:
        raise DTypeError(f"QuantizedTensor: {name} has dtype {found}, expected {' or '.join(allowed)}")


def fault_of(array: Any) -> str | None:
    """What is wrong with an array whose memory does not tell what it holds; None for a plain one."""
    kind = type(array)
    if isinstance(array, np.ndarray):
        if kind in (np.ndarray, np.memmap) or getattr(kind, "memory_is_plain", False):
            return None
        return f"a {kind.__name__}, expected a plain NumPy array: np.asarray makes one, without a mask or other meaning"
    if not is_torch(array):
        return None  # a symbol
    import torch

    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]
    if kind not in (torch.Tensor, torch.nn.Parameter) or wrapped(array):
        return f"a {kind.__name__} that stands for another tensor, expected a plain torch tensor"
    if array.layout is not torch.strided or array.is_nested or array.is_quantized:
        odd = "nested" if array.is_nested else "quantized" if array.is_quantized else str(array.layout)
        return f"a tensor that is {odd}, expected a dense one"
    if array.device.type not in ("cpu", "cuda"):
        return f"a tensor on the device {array.device}, expected one on cpu or cuda"
    if array.is_conj() or array.is_neg():
        return "a tensor that is conjugated or negated when it is read, expected resolved values: resolve_neg()"
    end, there = (array.storage_offset() + array.numel()) * array.element_size(), array.untyped_storage().nbytes()
    if end > there and array.is_contiguous():
        return f"a tensor of {end} bytes on a storage of {there}, expected all of its memory"
    return None


def _layout(array: Any) -> tuple[Any, ...]:
    """What kernels know about an array's memory: dtype, shape, steps and, for torch, whose storage can be another one,
    where it lies.
    """
    if isinstance(array, np.ndarray):
        return array.dtype, array.shape, array.strides
    if is_torch(array):
        return array.dtype, array.shape, array.stride(), array.data_ptr(), array.untyped_storage().nbytes()
    return array.dtype, array.shape  # a symbol


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


def is_torch(array: object) -> bool:
    """Whether this is a torch tensor; torch is not imported to find out."""
    return _is_tensor_type(type(array))


@functools.cache
def _is_tensor_type(kind: type) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in kind.__mro__)


def _to_numpy(tensor: Any) -> np.ndarray:
    """A torch tensor's values as a NumPy array, on the same memory if it is on the host; int32 words become uint32."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(bfloat16)
    return tensor.numpy().view(np.uint32) if tensor.dtype is torch.int32 else tensor.numpy()


def to_torch(array: Any, device: str) -> Any:
    """An array or tensor as a torch tensor: "torch" on the host, on the same memory if possible; "cuda" or "cuda:n"."""
    if device != "torch" and device != "cuda" and not device.startswith("cuda:"):
        raise InvalidArgument(f"QuantizedTensor.to: device is {device!r}, expected cpu, torch, cuda or cuda:<n>")
    try:
        import torch
    except ImportError:
        raise BackendError(f"QuantizedTensor.to: {device!r} needs torch: pip install 'penstock[cuda]'") from None
    if device != "torch" and not torch.cuda.is_available():
        raise BackendError(f"QuantizedTensor.to: {device!r} needs a CUDA device, torch finds none")
    if isinstance(array, np.ndarray):
        carrier = {np.dtype(np.uint32): np.int32, bfloat16: np.int16}.get(array.dtype, array.dtype)
        with warnings.catch_warnings():  # torch has no read-only tensors and says so for each mapped file
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(array.view(carrier))
        array = tensor.view(torch.bfloat16) if array.dtype == bfloat16 else tensor
    return array.to("cpu" if device == "torch" else device)
