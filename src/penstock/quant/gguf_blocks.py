"""Weights in the blocks of GGUF files, as they lie there: a second type of quantized tensor.

A row is a sequence of blocks of 32 or 256 weights. Whatever a block looks like, its weights are

    weight[j] = (code[j] - center) * scale[j // 16] + bias[j // 16]

with codes of one byte, a center that belongs to the type, and float32 scales (and, of some types, biases) of 16
weights, which two neighbours may share. Each of product and sum is rounded to float32, as the gguf package does.

type    weights  bytes  a scale is                       bias                    center
Q2_K    256      84     half · 4 bits, for 16            half · 4 bits           0
Q3_K    256      110    half · (6 bits - 32), for 16     none                    4
Q4_K    256      144    half · 6 bits, for 32            -half · 6 bits          0
Q5_K    256      176    half · 6 bits, for 32            -half · 6 bits          0
Q6_K    256      210    half · 8 bits signed, for 16     none                    32
Q5_0    32       22     half                             none                    16
Q5_1    32       24     half                             half                    0
IQ4_NL  32       18     half                             none                    127, of a table of 16 levels
IQ4_XS  256      136    half · (6 bits - 32), for 32     none                    127, of the same
MXFP4   32       17     2^(byte - 128)                   none                    12, of 2 · E2M1 + 12
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.dtypes import FLOATS, numpy_dtype, round_to
from penstock.errors import BackendError, DTypeError, InvalidArgument, ShapeError
from penstock.quant.arrays import fault_of, is_torch, layout_of, to_numpy, to_torch
from penstock.quant.formats import E2M1
from penstock.quant.gguf_planes import PLANES, Layout, Moves, Plane, layout_in_planes, moved
from penstock.quant.tensor import QuantizedTensor

GROUP = 16  # weights that have a scale of their own, in every type
_STEP = 1 << 20  # weights made dense at once
_AT_ONCE = 64 << 20  # bytes of blocks that are rearranged at once


class Decoded(NamedTuple):
    """Blocks as codes uint8 [n, W], scales and biases (None: there are none) float32 [n, W / 16]."""

    codes: np.ndarray
    scales: np.ndarray
    biases: np.ndarray | None = None


@dataclass(frozen=True)
class BlockType:
    """A type of block: weights and bytes of one, what its bytes [n, nbytes] stand for, and where its floats lie."""

    name: str
    size: int
    nbytes: int
    bits: int
    """Bits of a code."""
    center: int
    decode: Callable[[np.ndarray], Decoded]
    halves: tuple[int, ...]
    """Offsets of the float16 numbers of a block."""

    def values(self, data: np.ndarray) -> np.ndarray:
        """The weights float32 [n, size] of blocks uint8 [n, nbytes]."""
        codes, scales, biases = self.decode(data)
        numbers = (codes.astype(np.float32) - np.float32(self.center)).reshape(len(data), -1, GROUP)
        numbers *= scales[..., None]
        if biases is not None:
            numbers += biases[..., None]
        return numbers.reshape(len(data), self.size)

    def first_unsound(self, data: np.ndarray) -> int:
        """The first of blocks uint8 [n, nbytes] with a scale or bias that is not finite; -1: there is none."""
        for at in self.halves:
            exponents = data[:, at + 1] & 0x7C  # the upper byte of a half has its exponent
            if (exponents == 0x7C).any():
                return int(np.argmax(exponents == 0x7C))
        return -1


class GgufTensor(QuantizedTensor):
    """A weight `[..., N, K]` in blocks of a GGUF type: uint8 `[..., N, K / size * nbytes]`, kept and not copied.

    What `QuantizedTensor` says of shape, nbytes, indexing, `rows`, `to` and `dequantize` holds; there are no arrays of
    scales, `mode` is the type, and products round activations ("int8") in groups of 16. The array is NumPy's or
    torch's on the host; `to("cuda")` rearranges it into GgufPlanes. Raises InvalidArgument, DTypeError or ShapeError.
    """

    def __init__(self, blocks: Any, type: str) -> None:
        if not isinstance(type, str) or type not in BLOCK_TYPES:
            raise InvalidArgument(f"GgufTensor: type is {type!r}, expected one of {', '.join(BLOCK_TYPES)}")
        known = BLOCK_TYPES[type]
        fields = {"packed": blocks, "scales": None, "biases": None, "bits": known.bits, "group_size": GROUP}
        for name, value in (fields | {"mode": type, "global_scale": None}).items():
            object.__setattr__(self, name, value)
        self._check_blocks(known)
        object.__setattr__(self, "_laid_out", (layout_of(blocks),))

    def _check_blocks(self, known: BlockType) -> None:
        blocks = self.packed
        if not (hasattr(blocks, "shape") and hasattr(blocks, "dtype")):
            raise DTypeError(f"GgufTensor: blocks is a {type(blocks).__name__}, expected an array")
        if fault := fault_of(blocks):
            raise DTypeError(f"GgufTensor: blocks is {fault}")
        if str(blocks.dtype).removeprefix("torch.") != "uint8":
            raise DTypeError(f"GgufTensor: blocks has dtype {blocks.dtype}, expected uint8")
        if is_torch(blocks) and blocks.device.type != "cpu":
            raise BackendError(
                f"GgufTensor: {self.mode} blocks on {blocks.device}, expected them on the host: "
                f"to({str(blocks.device)!r}) rearranges them for a GPU"
            )
        shape = tuple(blocks.shape)
        if len(shape) < 2 or 0 in shape[1:] or shape[-1] % known.nbytes:
            expected = f"(..., N, a multiple of {known.nbytes} bytes), no axis empty but the first"
            raise ShapeError(f"GgufTensor: blocks has shape {shape}, expected {expected}: {known.name} blocks")
        if not (blocks.flags.c_contiguous if isinstance(blocks, np.ndarray) else blocks.is_contiguous()):
            raise ShapeError("GgufTensor: blocks is not contiguous, expected a C-contiguous array: pass a copy")

    @property
    def type(self) -> str:
        return self.mode

    @property
    def block_type(self) -> BlockType:
        return BLOCK_TYPES[self.mode]

    @property
    def _fields(self) -> dict[str, Any]:
        return {"packed": self.packed}

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The logical shape (..., N, K)."""
        *rows, nbytes = (int(size) for size in self.packed.shape)
        return (*rows, nbytes // self.block_type.nbytes * self.block_type.size)

    @functools.cached_property
    def dtype(self) -> str:
        """The name of the float dtype its scales have."""
        return "float16"

    @functools.cached_property
    def nbytes(self) -> int:
        return math.prod(self.packed.shape)

    def __repr__(self) -> str:
        return f"GgufTensor({self.shape}, {self.mode}{', torch' if is_torch(self.packed) else ''})"

    def with_arrays(self, *arrays: Any) -> "GgufTensor":
        """The same type over another array of blocks."""
        (blocks,) = arrays
        return GgufTensor(blocks, self.mode)

    def __getitem__(self, index: int | slice) -> "GgufTensor":
        """See `QuantizedTensor`."""
        if self.ndim == 2:
            raise InvalidArgument(f"GgufTensor: shape is {self.shape}, expected axes before N and K to index")
        return self.with_arrays(self.packed[index if isinstance(index, slice) else operator.index(index), ...])

    def to(self, device: str) -> "GgufTensor":
        """As a NumPy array ("cpu") or torch tensor ("torch") on the same memory; GgufPlanes for "cuda" and "cuda:n"."""
        if device == "cpu":
            return self if isinstance(self.packed, np.ndarray) else self.with_arrays(to_numpy(self.packed))
        if device == "torch":
            return self.with_arrays(to_torch(self.packed, device))
        return in_planes(self, device)

    def dequantize(self, dtype: str = "float32") -> Any:
        """The weights `[..., N, K]`, those of `gguf.dequantize` in float32, rounded once to another dtype."""
        if dtype not in FLOATS:
            raise DTypeError(f"dequantize: dtype is {dtype!r}, expected one of {', '.join(FLOATS)}")
        self.check()
        if is_torch(self.packed):
            return to_torch(self.to("cpu").dequantize(dtype), "torch")
        known = self.block_type
        data = self.packed.reshape(-1, known.nbytes)
        out, step = np.empty((len(data), known.size), numpy_dtype(dtype)), _STEP // known.size
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            for start in range(0, len(data), step):
                out[start : start + step] = round_to(known.values(data[start : start + step]), out.dtype)
        return out.reshape(self.shape)


class GgufPlanes(GgufTensor):
    """A weight `[..., N, K]` in the planes of a GGUF type: torch tensors on one device, as CUDA kernels read them.

    `to("cpu")` gives a GgufTensor with the blocks that these came from. Raises InvalidArgument, DTypeError, ShapeError.
    """

    def __init__(self, arrays: Sequence[Any], type: str) -> None:
        if type not in BLOCK_TYPES:
            raise InvalidArgument(f"GgufPlanes: type is {type!r}, expected one of {', '.join(BLOCK_TYPES)}")
        known, layout = BLOCK_TYPES[type], layout_in_planes(type)
        fields = {"packed": arrays[0], "scales": None, "biases": None, "bits": known.bits, "group_size": GROUP}
        for name, value in (fields | {"mode": type, "global_scale": None, "_planes": tuple(arrays)}).items():
            object.__setattr__(self, name, value)
        if len(arrays) != len(layout.planes):
            raise ShapeError(f"GgufPlanes: {len(arrays)} arrays, expected {len(layout.planes)} of {type}")
        *rows, words = (int(size) for size in arrays[0].shape)
        blocks = words * 4 // layout.planes[0].nbytes
        for plane, array in zip(layout.planes, arrays, strict=True):
            _check_plane(plane, array, (*rows, blocks * plane.entries))
        object.__setattr__(self, "_laid_out", tuple(map(layout_of, arrays)))

    @property
    def _fields(self) -> dict[str, Any]:
        planes: tuple[Any, ...] = self.__dict__["_planes"]
        return {plane.name: array for plane, array in zip(self.layout.planes, planes, strict=True)}

    @property
    def layout(self) -> Layout:
        return layout_in_planes(self.mode)

    @functools.cached_property
    def by_name(self) -> tuple[Any, ...]:
        """The arrays in the order of PLANES, None where a type has none."""
        return tuple(self._fields.get(name) for name in PLANES)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The logical shape (..., N, K)."""
        *rows, words = (int(size) for size in self.packed.shape)
        return (*rows, words * 32 // self.layout.low)

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(math.prod(array.shape) * array.element_size() for array in self.arrays)

    def __repr__(self) -> str:
        return f"GgufPlanes({self.shape}, {self.mode}, {self.device})"

    def with_arrays(self, *arrays: Any) -> "GgufPlanes":
        """The same type over other planes."""
        return GgufPlanes(arrays, self.mode)

    def __getitem__(self, index: int | slice) -> "GgufPlanes":
        """See `QuantizedTensor`."""
        if self.ndim == 2:
            raise InvalidArgument(f"GgufPlanes: shape is {self.shape}, expected axes before N and K to index")
        return self.with_arrays(*(array[index, ...] for array in self.arrays))

    def to(self, device: str) -> GgufTensor:
        """Blocks in a NumPy array ("cpu") or a torch tensor on the host ("torch"), or these planes on a GPU."""
        if device not in ("cpu", "torch"):
            return self.with_arrays(*(to_torch(array, device) for array in self.arrays))
        self.check()
        *rows, K = self.shape
        known, parts = self.block_type, []
        for plane, array in zip(self.layout.planes, self.arrays, strict=True):
            raw = np.ascontiguousarray(to_numpy(array)).view(np.uint8)
            parts.append(raw.reshape(-1, plane.nbytes))
        blocks = np.ascontiguousarray(moved(np.concatenate(parts, axis=1), self.layout.restored))
        made = GgufTensor(blocks.reshape(*rows, K // known.size * known.nbytes), self.mode)
        return made if device == "cpu" else made.to(device)

    def dequantize(self, dtype: str = "float32") -> Any:
        """See `GgufTensor`; a tensor on the device of the planes."""
        return to_torch(self.to("cpu").dequantize(dtype), "torch" if self.device == "cpu" else self.device)


def _check_plane(plane: Plane, array: Any, shape: tuple[int, ...]) -> None:
    what = f"GgufPlanes: {plane.name}"
    if not is_torch(array):
        raise DTypeError(f"{what} is a {type(array).__name__}, expected a torch tensor")
    if fault := fault_of(array):
        raise DTypeError(f"{what} is {fault}")
    if str(array.dtype) != f"torch.{plane.dtype}":
        raise DTypeError(f"{what} has dtype {array.dtype}, expected {plane.dtype}")
    if tuple(array.shape) != shape or len(shape) < 2:
        raise ShapeError(f"{what} has shape {tuple(array.shape)}, expected {shape}")
    if not array.is_contiguous():
        raise ShapeError(f"{what} is not contiguous, expected a C-contiguous tensor")


def in_planes(w: GgufTensor, device: str) -> GgufPlanes:
    """The planes of blocks, rearranged on a torch device: "torch" is the host, "cuda" or "cuda:n" a GPU."""
    if isinstance(w, GgufPlanes):
        return w.with_arrays(*(to_torch(array, device) for array in w.arrays))
    w.check()
    where = to_torch(np.empty(0, np.uint8), device).device
    import torch

    known, layout = w.block_type, layout_in_planes(w.mode)
    *rows, nbytes = w.packed.shape
    count = nbytes // known.nbytes * math.prod(rows)
    blocks = w.packed.reshape(count, known.nbytes)
    made = [torch.empty((count, plane.nbytes), dtype=torch.uint8, device=where) for plane in layout.planes]
    tables = [[torch.from_numpy(table).to(where) for table in plane.moves] for plane in layout.planes]
    step = max(1, _AT_ONCE // known.nbytes)
    for start in range(0, count, step):
        part = to_torch(blocks[start : start + step], "torch").to(where)
        for to, table in zip(made, tables, strict=True):
            to[start : start + step] = moved(part, Moves(*table))
    arrays = (
        to.view(getattr(torch, plane.dtype)).view(*rows, -1) for to, plane in zip(made, layout.planes, strict=True)
    )
    return GgufPlanes(tuple(arrays), w.mode)


# -- the types -------------------------------------------------------------------------------------------------------

LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)
_LEVEL_CODES = (LEVELS + 127).astype(np.uint8)
_TWICE_CODES = (2 * E2M1 + 12).astype(np.uint8)


def _half(data: np.ndarray, start: int) -> np.ndarray:
    """A float16 of each block as float32 [n, 1]."""
    return np.ascontiguousarray(data[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(data: np.ndarray) -> np.ndarray:
    """Low halves, then high halves: [..., b] → [..., 2 b]."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _bit_fields(data: np.ndarray, bits: int) -> np.ndarray:
    """Fields of a byte from the lowest on, those of one place together: [..., b] → [..., 8 / bits, b]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (data[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)


def _twice(values: np.ndarray) -> np.ndarray:
    """Scales of 32 weights as those of 16."""
    return np.repeat(values, 2, axis=1)


def _q5(data: np.ndarray, start: int) -> np.ndarray:
    high = np.unpackbits(data[:, start : start + 4], axis=1, bitorder="little")
    return _nibbles(data[:, start + 4 :]) | (high << 4)


def _q5_0(data: np.ndarray) -> Decoded:
    return Decoded(_q5(data, 2), _twice(_half(data, 0)))


def _q5_1(data: np.ndarray) -> Decoded:
    return Decoded(_q5(data, 4), _twice(_half(data, 0)), _twice(_half(data, 2)))


def _q2_k(data: np.ndarray) -> Decoded:
    codes = _bit_fields(data[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 256)
    scales, least = data[:, :16] & 15, data[:, :16] >> 4
    return Decoded(codes, _half(data, 80) * scales, -(_half(data, 82) * least))


def _q3_k(data: np.ndarray) -> Decoded:
    low = _bit_fields(data[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 256)
    high = _bit_fields(data[:, :32], 1).reshape(-1, 256)
    scales = _nibbles(data[:, 96:104]) | (_bit_fields(data[:, 104:108], 2).reshape(-1, 16) << 4)
    return Decoded(low | (high << 2), _half(data, 108) * (scales.astype(np.float32) - 32))


def _k_affine(data: np.ndarray, codes: np.ndarray) -> Decoded:
    """Scales and minima of 8 groups, 6 bits each in 12 bytes."""
    first, second, third = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    least = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return Decoded(codes.reshape(-1, 256), _twice(_half(data, 0) * scales), _twice(-(_half(data, 2) * least)))


def _q4_k(data: np.ndarray) -> Decoded:
    return _k_affine(data, _bit_fields(data[:, 16:].reshape(-1, 4, 32), 4))


def _q5_k(data: np.ndarray) -> Decoded:
    codes = _bit_fields(data[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return _k_affine(data, codes | (_bit_fields(data[:, 16:48], 1) << 4))


def _q6_k(data: np.ndarray) -> Decoded:
    low = _bit_fields(data[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)
    high = _bit_fields(data[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256)
    return Decoded(low | (high << 4), _half(data, 208) * np.ascontiguousarray(data[:, 192:208]).view(np.int8))


def _iq4_nl(data: np.ndarray) -> Decoded:
    return Decoded(_LEVEL_CODES[_nibbles(data[:, 2:])], _twice(_half(data, 0)))


def _iq4_xs(data: np.ndarray) -> Decoded:
    high = np.ascontiguousarray(data[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = _bit_fields(data[:, 4:8], 4).swapaxes(1, 2).reshape(-1, 8)
    scales = _half(data, 0) * ((low | (high << 4)).astype(np.float32) - 32)
    return Decoded(_LEVEL_CODES[_nibbles(data[:, 8:].reshape(-1, 8, 16))].reshape(-1, 256), _twice(scales))


def _mxfp4(data: np.ndarray) -> Decoded:
    scales = np.ldexp(np.float32(1), data[:, :1].astype(np.int32) - 128)
    return Decoded(_TWICE_CODES[_nibbles(data[:, 1:])], _twice(scales))


BLOCK_TYPES: Mapping[str, BlockType] = {
    known.name: known
    for known in (
        BlockType("Q2_K", 256, 84, 2, 0, _q2_k, (80, 82)),
        BlockType("Q3_K", 256, 110, 3, 4, _q3_k, (108,)),
        BlockType("Q4_K", 256, 144, 4, 0, _q4_k, (0, 2)),
        BlockType("Q5_K", 256, 176, 5, 0, _q5_k, (0, 2)),
        BlockType("Q6_K", 256, 210, 6, 32, _q6_k, (208,)),
        BlockType("Q5_0", 32, 22, 5, 16, _q5_0, (0,)),
        BlockType("Q5_1", 32, 24, 5, 0, _q5_1, (0, 2)),
        BlockType("IQ4_NL", 32, 18, 4, 127, _iq4_nl, (0,)),
        BlockType("IQ4_XS", 256, 136, 4, 127, _iq4_xs, (0,)),
        BlockType("MXFP4", 32, 17, 4, 12, _mxfp4, ()),
    )
}
