"""Memory-mapped safetensors files. The whole header is checked against the file before anything is made from it.

A file is an 8-byte little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, and the data,
which the tensors fill without gaps. What is not exactly so is refused with CheckpointError.
"""

import os
import re
import weakref
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from penstock.dtypes import bfloat16
from penstock.errors import CheckpointError
from penstock.weights.files import kind_of, parse_json, short
from penstock.weights.mapped import MappedFile

HEADER_LIMIT = 100_000_000  # bytes, as in the reference implementation
RANK_LIMIT = 8

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": bfloat16,
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(np.uint8),  # raw bytes: penstock does not compute in these formats
    "F8_E5M2": np.dtype(np.uint8),
}

_FORMATS = ("mlx", "pt")  # writers whose conventions are known
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_SIZE_LIMIT = 2**63 - 1  # what NumPy and the file system count with
# Control characters, backslashes, lone surrogates, and "", "." or ".." between slashes: no name of a tensor, but
# harmful wherever a path or a line of text is made from it.
_BAD_NAME = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]|(?:\A|/)\.{0,2}(?:/|\Z)")


class TensorInfo(NamedTuple):
    """One tensor of a file: dtype as the file spells it (a key of DTYPES), and the bytes [start, stop) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def aligned(self) -> bool:
        """Whether a mapped view of the tensor starts at a multiple of its element size."""
        return self.start % DTYPES[self.dtype].itemsize == 0


class SafetensorsFile:
    """An open file: `tensors` by name, `metadata`, `notices`; `array` gives the data.

    Opening reads the header alone. The file stays open as long as this object lives, the mapping as long as an array.
    """

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self.path, self.size = file.path, file.size
        self.notices: list[str] = []
        header, data_start = self._read_header()
        self.metadata = self._checked_metadata(header.pop("__metadata__", {}))
        self.tensors = {name: self._checked_entry(name, entry, data_start) for name, entry in header.items()}
        self._check_layout(data_start)
        self._copies: weakref.WeakValueDictionary[str, np.ndarray] = weakref.WeakValueDictionary()
        self._copied: set[str] = set()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "SafetensorsFile":
        """Read and check the header of a file; raises CheckpointError for anything that is not as it should be."""
        return cls(MappedFile(Path(path)))

    def __repr__(self) -> str:
        return f"SafetensorsFile({str(self.path)!r}, {len(self.tensors)} tensors, {self.size} bytes)"

    def array(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of the mapped file; bfloat16 as ml_dtypes.bfloat16, F8 formats as raw uint8.

        A tensor that is not aligned in the file comes as a copy, made once for as long as it is referred to. Raises
        CheckpointError for an unknown name and for a file whose size changed since it was opened.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: has no tensor {short(name)}")
        info = self.tensors[name]
        dtype = DTYPES[info.dtype]
        if info.nbytes and not info.aligned:
            self._file.check_size()
            return self._copy(name, info).view(dtype).reshape(info.shape)
        return self._file.view(info.start, info.shape, dtype)

    def check(self) -> None:
        """Raises CheckpointError for a file that was written to since it was opened."""
        self._file.check()

    def lease(self) -> bool:
        """See `MappedFile.lease`."""
        return self._file.lease()

    @property
    def misaligned_nbytes(self) -> int:
        """Bytes of the tensors that `array` has to copy."""
        return sum(info.nbytes for info in self.tensors.values() if not info.aligned)

    @property
    def copied(self) -> tuple[int, int]:
        """How many tensors were copied so far because they are not aligned, and their bytes."""
        return len(self._copied), sum(self.tensors[name].nbytes for name in self._copied)

    def _copy(self, name: str, info: TensorInfo) -> np.ndarray:
        """The bytes of a tensor in memory of their own; read, not copied from the mapping, which would count twice."""
        copy = self._copies.get(name)
        if copy is None:
            copy = np.empty(info.nbytes, np.uint8)
            self._file.read_into(copy.data, info.start)
            copy.flags.writeable = False
            self._copies[name] = copy
            self._copied.add(name)
        return copy

    def _read_header(self) -> tuple[dict[str, Any], int]:
        """The header as an object and the position of the data."""
        head = self._file.read(0, min(self.size, 512))
        length = int.from_bytes(head[:8], "little")
        if self.size < 8 or not 0 < length <= min(HEADER_LIMIT, self.size - 8):
            if kind := kind_of(head):
                raise CheckpointError(f"{self.path}: {kind}")
            if self.size < 8:
                found = "no bytes" if self.size == 0 else f"only {self.size} bytes"
                raise CheckpointError(f"{self.path}: has {found}, expected a safetensors file")
            limit = f"1 to {min(HEADER_LIMIT, self.size - 8)} (the file has {self.size} bytes)"
            raise CheckpointError(f"{self.path}: header length is {length}, expected {limit}")
        text = self._file.read(8, length)
        if text[:1] != b"{":
            raise CheckpointError(f"{self.path}: header starts with {short(text[:1])}, expected '{{'")
        header = parse_json(text, f"{self.path}: header")
        return header, 8 + length

    def _checked_metadata(self, metadata: Any) -> dict[str, str]:
        if not isinstance(metadata, dict):
            raise CheckpointError(f"{self.path}: __metadata__ is {short(metadata)}, expected an object")
        for key, value in metadata.items():
            if not isinstance(value, str):
                raise CheckpointError(f"{self.path}: __metadata__ {short(key)} is {short(value)}, expected a string")
        if (format := metadata.get("format", "pt")) not in _FORMATS:
            expected = " or ".join(_FORMATS)
            self.notices.append(f"{self.path}: metadata says format {short(format)}, expected {expected}")
        return metadata

    def _checked_entry(self, name: str, entry: Any, data_start: int) -> TensorInfo:
        if _BAD_NAME.search(name):
            raise CheckpointError(f"{self.path}: tensor name {short(name)} has control characters or parts of a path")
        if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
            found = f"keys {short(sorted(entry))}" if isinstance(entry, dict) else short(entry)
            self._refuse(name, f"has {found}, expected an object with dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            self._refuse(name, f"has dtype {short(dtype)}, expected one of {', '.join(DTYPES)}")
        if not isinstance(shape, list):
            self._refuse(name, f"has shape {short(shape)}, expected a list of sizes")
        if len(shape) > RANK_LIMIT:
            self._refuse(name, f"has {len(shape)} axes, expected at most {RANK_LIMIT}")
        # Axes of size 0 are left out at first: NumPy counts so, and a shape such as [0, 2**62, 2**62] is no shape.
        nbytes = DTYPES[dtype].itemsize
        for size in shape:
            if type(size) is not int or size < 0:
                self._refuse(name, f"has shape {short(shape)}, expected a list of sizes")
            nbytes *= size or 1
        if nbytes > _SIZE_LIMIT:
            self._refuse(name, f"has shape {short(shape)}, expected less than 2**63 bytes")
        nbytes = 0 if 0 in shape else nbytes
        if not isinstance(offsets, list) or [type(place) for place in offsets] != [int, int]:
            self._refuse(name, f"has data_offsets {short(offsets)}, expected two integers")
        start, stop = offsets
        if not 0 <= start <= stop:
            self._refuse(name, f"has data_offsets {short(offsets)}, expected 0 <= begin <= end")
        if data_start + stop > self.size:
            end = short(data_start + stop)
            self._refuse(name, f"ends at byte {end}, but the file has {self.size} bytes: an unfinished download?")
        if stop - start != nbytes:
            self._refuse(name, f"has {stop - start} bytes, expected {nbytes} for {dtype} of shape {short(shape)}")
        return TensorInfo(dtype, tuple(shape), data_start + start, data_start + stop)

    def _check_layout(self, data_start: int) -> None:
        """The tensors follow each other without overlap or gap, from the header to the end of the file."""
        end = data_start
        for start, stop, name in sorted((info.start, info.stop, name) for name, info in self.tensors.items()):
            if start < end:
                self._refuse(name, f"starts at byte {start}, expected {end}: it overlaps the tensor before it")
            if start > end:
                self._refuse(name, f"starts at byte {start}, expected {end}: unused bytes lie before it")
            end = stop
        if end != self.size:
            raise CheckpointError(f"{self.path}: has {self.size - end} bytes behind the last tensor, expected none")

    def _refuse(self, name: str, found: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: tensor {short(name)} {found}")
