"""Memory-mapped GGUF files. The whole header is checked against the file before anything is made from it.

A file is a magic, a version, two counts, key-value metadata, an entry per tensor, and the data, each tensor at a
multiple of the alignment. Versions 2 and 3, little-endian, are read. What is not exactly so is refused with
CheckpointError, in arithmetic that cannot overflow.

Weights come dense (F32, F16, BF16, as views of the file), as blocks of 32 codes with a scale (Q4_0, Q4_1, Q8_0),
which are groups of affine codes and become QuantizedTensor without loss, or as other blocks (`quant.BLOCK_TYPES`),
which become GgufTensor, views of the file too. Types beside these are known by name and size, so that the layout of
the file can be checked, but their tensors cannot be had.
"""

import math
import os
import re
import shlex
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from penstock.dtypes import bfloat16
from penstock.errors import CheckpointError, InvalidArgument
from penstock.quant import BLOCK_TYPES, GgufTensor, QuantizedTensor
from penstock.weights.files import kind_of, short
from penstock.weights.mapped import MappedFile

HEADER_LIMIT = 100_000_000  # bytes before the data; the largest vocabularies with their merges have about 20 MB
KEY_LIMIT = 1 << 16  # metadata keys; real files have less than a hundred
TENSOR_LIMIT = 1 << 18
STRING_LIMIT = 1 << 22  # strings in all arrays of the metadata together
RANK_LIMIT = 4
NAME_LIMIT = 64  # bytes of a tensor's name
ALIGNMENTS = tuple(1 << n for n in range(3, 22))  # 8 bytes to 2 MB

SUPPORTED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", *BLOCK_TYPES)
# No kernel reads these, but `penstock convert` can round them to groups.
CONVERTED = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0")

# number: name, weights in a block, bytes of a block
_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
KNOWN = frozenset(name for name, _, _ in _TYPES.values())
_REMOVED = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

_DENSE = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": bfloat16}


class _Blocks(NamedTuple):
    """A block format: its record in the file, bits of a code, and the bias in scales (None: the record has one)."""

    record: np.dtype
    bits: int
    offset: int | None

    @property
    def largest(self) -> int:
        """The bits of the largest float16 scale whose bias is one, too."""
        return int(np.float16(np.finfo(np.float16).max / -(self.offset or -1)).view(np.uint16))


_GROUP = 32
# Codes are one opaque field: NumPy gathers it ten times as fast as an axis of 16 bytes.
BLOCKS = {
    "Q4_0": _Blocks(np.dtype([("scale", "<f2"), ("codes", "V16")]), 4, -8),
    "Q4_1": _Blocks(np.dtype([("scale", "<f2"), ("bias", "<f2"), ("codes", "V16")]), 4, None),
    "Q8_0": _Blocks(np.dtype([("scale", "<f2"), ("codes", "V32")]), 8, -128),
}
_HALF_INFINITY = 0x7C00
_STEP = 1 << 13  # blocks that are rearranged at once: their temporaries stay in the cache

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_PARTS_LIMIT = 4096

_MAGIC = b"GGUF"
_OLD_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"algg")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: dict[int, np.dtype] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_KEY_BYTES = 8 + 1 + 4 + 1  # the least that a key needs: length, one character, type, value
_ENTRY_BYTES = 8 + 1 + 4 + 4 + 8  # the least of a tensor's entry: length, one character, rank, type, offset
_SIZE_LIMIT = 2**63 - 1
# Control characters, backslashes, and "", "." or ".." between slashes, as for safetensors.
_BAD_NAME = re.compile(r"[\x00-\x1f\x7f\\]|(?:\A|/)\.{0,2}(?:/|\Z)")
_BAD_KEY = re.compile(r"[\x00-\x20\x7f]|\A\Z")


class TensorInfo(NamedTuple):
    """One tensor of a file: type as GGUF names it, shape with rows first, and the bytes [start, stop) of the file."""

    type: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class GgufFile:
    """An open file: `version`, `metadata` by key, `tensors` by name, `notices`; `tensor` gives the data.

    Opening reads the header alone. In metadata numbers are Python's, arrays of numbers NumPy's, those of strings lists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notices: list[str] = []
        self._file = MappedFile(path)
        self.size = self._file.size
        header = _Header(self._file)
        self.version = header.version()
        tensor_count, key_count = header.counts()
        self.metadata = header.metadata(key_count)
        self.alignment = self._checked_alignment()
        self.tensors = self._checked_tensors(header.entries(tensor_count), header.position)
        self._more: dict[str, GgufFile] = {}  # the other parts of a split model, by the names of their tensors

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "GgufFile":
        """Read and check the header of a file; raises CheckpointError for anything that is not as it should be.

        The first part of a split model (`NAME-00001-of-00003.gguf`) opens the others, too.
        """
        file = cls(Path(path))
        file._join_parts()
        return file

    def _join_parts(self) -> None:
        """Open the other parts of a split model, and take their tensors for this file's."""
        count = self.metadata.get("split.count", 1)
        if type(count) is not int or not 0 <= count <= _PARTS_LIMIT:
            found = f"split.count is {short(count)}"
            raise CheckpointError(f"{self.path}: {found}, expected the number of parts, at most {_PARTS_LIMIT}")
        if count < 2:
            return
        spelled = _PART.fullmatch(self.path.name)
        if spelled is None or int(spelled[2]) != 1 or int(spelled[3]) != count:
            expected = f"the first one, named …-00001-of-{count:05}.gguf"
            raise CheckpointError(f"{self.path}: is one of {count} parts of a model, expected {expected}")
        for n in range(count):
            part = self if n == 0 else GgufFile(self.path.with_name(f"{spelled[1]}-{n + 1:05}-of-{count:05}.gguf"))
            if part.metadata.get("split.no") != n or part.metadata.get("split.count") != count:
                found = f"says it is part {short(part.metadata.get('split.no'))} of {part.metadata.get('split.count')}"
                raise CheckpointError(f"{part.path}: {found}, expected {n} of {count} by its name")
            if n == 0:
                continue
            if twice := sorted(part.tensors.keys() & self.tensors.keys()):
                part._refuse(twice[0], "is in an earlier part, too, expected each tensor once")
            self.tensors |= part.tensors
            self._more |= dict.fromkeys(part.tensors, part)
        total = self.metadata.get("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            found = f"{count} parts have {len(self.tensors)} tensors"
            raise CheckpointError(f"{self.path}: {found}, expected {total} by split.tensors.count")

    def path_of(self, name: str) -> Path:
        """The file that a tensor lies in."""
        return self._more[name].path if name in self._more else self.path

    def _mapped(self, name: str) -> MappedFile:
        return self._more[name]._file if name in self._more else self._file

    @property
    def _files(self) -> list[MappedFile]:
        return [self._file, *{id(part): part._file for part in self._more.values()}.values()]

    def __repr__(self) -> str:
        return f"GgufFile({str(self.path)!r}, {len(self.tensors)} tensors, {self.size} bytes)"

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(info.nbytes for info in self.tensors.values())

    def info(self, name: str) -> TensorInfo:
        """Type, shape and place of a tensor; raises CheckpointError for an unknown name."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: has no tensor {short(name)}")
        return self.tensors[name]

    def loaded_nbytes(self, name: str) -> int:
        """Bytes of a tensor as `tensor` gives it: groups have a bias beside their scale, which some formats lack."""
        info = self.info(name)
        if info.type not in BLOCKS:
            return info.nbytes
        blocks = math.prod(info.shape) // _GROUP
        return blocks * (_GROUP * BLOCKS[info.type].bits // 8 + 4)

    def is_copied(self, name: str) -> bool:
        """Whether `tensor` makes a copy: the order of codes in a block is not that of QuantizedTensor."""
        return self.info(name).type in BLOCKS

    def check(self) -> None:
        """Raises CheckpointError for a file that was written to since it was opened."""
        for file in self._files:
            file.check()

    def lease(self) -> bool:
        """See `MappedFile.lease`."""
        held = [file.lease() for file in self._files]
        return all(held)

    def check_supported(self, name: str, types: Collection[str] = SUPPORTED, convertible: bool = True) -> None:
        """Raises CheckpointError, naming tensor and type, for one of none of the types: `tensor` gives the default.

        convertible: whether `penstock convert` knows the architecture of the file.
        """
        info = self.info(name)
        if info.type in types:
            return
        hint = "llama-quantize --allow-requantize writes the file again in one of these"
        if info.type in CONVERTED and convertible:
            hint = f"penstock convert --model {shlex.quote(str(self.path))} --requantize makes a folder that loads"
        self._refuse(name, f"has type {info.type}, expected one of {', '.join(types)}: {hint}")

    def tensor(self, name: str) -> np.ndarray | QuantizedTensor:
        """A tensor: a read-only view of the file if it is dense or a GgufTensor, else codes in memory of their own.

        Equal to what the format says bit for bit in float32, but zeros are always positive: Q4_0 and Q8_0 have a bias
        of -8 and -128 scales, which float16 holds exactly; where it would overflow, scales and biases are float32.
        Raises CheckpointError for an unknown name, an unsupported type, and a scale that is not finite.
        """
        info = self.info(name)
        self.check_supported(name)
        if info.type in _DENSE:
            return self._mapped(name).view(info.start, info.shape, _DENSE[info.type])
        if len(info.shape) < 2 or 0 in info.shape[1:]:
            self._refuse(name, f"is {info.type} of shape {list(info.shape)}, expected rows of at least {_GROUP} codes")
        return self._blocks(name, info) if info.type in BLOCK_TYPES else self._quantized(name, info)

    def _blocks(self, name: str, info: TensorInfo) -> GgufTensor:
        """Blocks as they lie in the file, after a look at the floats of each."""
        known = BLOCK_TYPES[info.type]
        shape = (*info.shape[:-1], info.shape[-1] // known.size * known.nbytes)
        data = self._mapped(name).view(info.start, shape, np.dtype(np.uint8))
        if (block := known.first_unsound(data.reshape(-1, known.nbytes))) >= 0:
            found = f"has a scale that is not finite in block {block}"
            self._refuse(name, f"{found}, expected finite numbers: damaged?")
        return GgufTensor(data, info.type)

    def _quantized(self, name: str, info: TensorInfo) -> QuantizedTensor:
        format = BLOCKS[info.type]
        groups = (*info.shape[:-1], info.shape[-1] // _GROUP)
        blocks = self._mapped(name).view(info.start, (math.prod(groups),), format.record)
        scales = np.empty(len(blocks), np.float16)
        biases = np.zeros(len(blocks), np.float16)
        codes = np.empty((len(blocks), _GROUP * format.bits // 8), np.uint8)
        _take_apart(format, blocks, codes, scales, biases)
        if fault := _not_finite(scales, biases):
            self._refuse(name, f"has {fault}")
        if format.offset is not None:
            if _largest(scales) > format.largest:
                scales = scales.astype(np.float32)
            biases = scales * scales.dtype.type(format.offset)
        packed = codes.view("<u4").reshape(*groups[:-1], -1 if codes.size else info.shape[-1] * format.bits // 32)
        try:
            return QuantizedTensor(packed, scales.reshape(groups), biases.reshape(groups), format.bits, _GROUP)
        except InvalidArgument as error:
            self._refuse(name, f"cannot be used: {error}")

    def _checked_alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment not in ALIGNMENTS:
            expected = f"a power of two from {ALIGNMENTS[0]} to {ALIGNMENTS[-1]}"
            raise CheckpointError(f"{self.path}: general.alignment is {short(alignment)}, expected {expected}")
        return alignment

    def _checked_tensors(self, entries: list["_Entry"], header_end: int) -> dict[str, TensorInfo]:
        data_start = _aligned(header_end, self.alignment)
        found: dict[str, TensorInfo] = {}
        for entry in entries:
            if entry.name in found:
                self._refuse(entry.name, "appears twice, expected each name once")
            found[entry.name] = self._checked_entry(entry, data_start)
        end = data_start if entries else header_end
        for start, stop, name in sorted((info.start, info.stop, name) for name, info in found.items()):
            if start < end:
                self._refuse(name, f"starts at byte {start}, expected {end} or more: it overlaps the tensor before it")
            if start - end >= self.alignment:
                self._refuse(name, f"starts at byte {start}, expected {end}: unused bytes lie before it")
            end = max(end, stop)
        if self.size > _aligned(end, self.alignment):
            raise CheckpointError(f"{self.path}: has {self.size - end} bytes behind the last tensor, expected none")
        return found

    def _checked_entry(self, entry: "_Entry", data_start: int) -> TensorInfo:
        name, type, sizes, offset = entry
        if type not in _TYPES:
            kind = f"{_REMOVED[type]}, which GGUF no longer has" if type in _REMOVED else f"number {type}"
            self._refuse(name, f"has type {kind}, expected one of {', '.join(SUPPORTED)}")
        spelled, block, block_bytes = _TYPES[type]
        shape = tuple(reversed(sizes))
        # Axes of size 0 are left out at first: NumPy counts so, and a shape such as [0, 2**62, 2**62] is no shape.
        count = math.prod(size or 1 for size in sizes)
        if count > _SIZE_LIMIT // block_bytes:
            self._refuse(name, f"has shape {short(list(shape))}, expected less than 2**63 bytes")
        if block > 1 and (not sizes or sizes[0] % block):
            self._refuse(name, f"is {spelled} of shape {list(shape)}, expected rows of a multiple of {block}")
        nbytes = 0 if 0 in sizes else count // block * block_bytes
        if offset % self.alignment:
            self._refuse(name, f"has offset {offset}, expected a multiple of {self.alignment}, the alignment")
        start = data_start + offset
        if start + nbytes > self.size:
            self._refuse(
                name, f"ends at byte {start + nbytes}, but the file has {self.size} bytes: an unfinished download?"
            )
        return TensorInfo(spelled, shape, start, start + nbytes)

    def _refuse(self, name: str, found: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: tensor {short(name)} {found}")


class _Entry(NamedTuple):
    """A tensor's entry as the file has it: sizes from the fastest axis on, offset from the start of the data."""

    name: str
    type: int
    sizes: tuple[int, ...]
    offset: int


class _Header:
    """Takes the header's values from the start of a file on; each is checked against what is left before it is read."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.position = 0
        self._file = file
        self._data = bytearray()
        self._strings = 0

    def version(self) -> int:
        head = self._file.read(0, min(self._file.size, 512))
        if head[:4] in _OLD_MAGICS:
            raise CheckpointError(f"{self.path}: a GGML file of the time before GGUF, expected GGUF 2 or 3")
        if head[:4] != _MAGIC:
            if kind := kind_of(head):
                raise CheckpointError(f"{self.path}: {kind}")
            found = f"starts with {short(head[:4])}" if head else "has no bytes"
            raise CheckpointError(f"{self.path}: {found}, expected a GGUF file")
        self._take(4, "the magic")
        version = self._number(4, "the version")
        if version in (2, 3):
            return version
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
            raise CheckpointError(f"{self.path}: is big-endian, expected a little-endian GGUF file")
        raise CheckpointError(f"{self.path}: is GGUF version {version}, expected 2 or 3")

    def counts(self) -> tuple[int, int]:
        """How many tensors and how many keys there are, neither more than the file has room for."""
        counts = [self._number(8, "the counts") for _ in range(2)]
        left = self._file.size - self.position
        for count, what, least, limit in (
            (counts[0], "tensors", _ENTRY_BYTES, TENSOR_LIMIT),
            (counts[1], "metadata keys", _KEY_BYTES, KEY_LIMIT),
        ):
            if count > min(limit, left // least):
                room = f"at most {min(limit, left // least)} (the file has {self._file.size} bytes)"
                raise CheckpointError(f"{self.path}: says it has {count} {what}, expected {room}")
        return counts[0], counts[1]

    def metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for n in range(count):
            key = self._text(f"metadata key {n}", 0xFFFF)
            if _BAD_KEY.search(key):
                raise CheckpointError(f"{self.path}: metadata key {short(key)}, expected a name without spaces")
            if key in values:
                raise CheckpointError(f"{self.path}: metadata key {short(key)} appears twice, expected each once")
            where = f"metadata {short(key)}"
            values[key] = self._value(self._number(4, where), where)
        return values

    def entries(self, count: int) -> list[_Entry]:
        return [self._entry(n) for n in range(count)]

    def _entry(self, n: int) -> _Entry:
        name = self._text(f"the name of tensor {n}", NAME_LIMIT)
        if _BAD_NAME.search(name):
            raise CheckpointError(f"{self.path}: tensor name {short(name)} has control characters or parts of a path")
        where = f"the entry of tensor {short(name)}"
        rank = self._number(4, where)
        if rank > RANK_LIMIT:
            raise CheckpointError(f"{self.path}: tensor {short(name)} has {rank} axes, expected at most {RANK_LIMIT}")
        sizes = tuple(self._number(8, where) for _ in range(rank))
        if any(size > _SIZE_LIMIT for size in sizes):
            shape = short(list(reversed(sizes)))
            raise CheckpointError(f"{self.path}: tensor {short(name)} has shape {shape}, expected sizes below 2**63")
        return _Entry(name, self._number(4, where), sizes, self._number(8, where))

    def _value(self, type: int, where: str) -> Any:
        if type == _STRING:
            return self._text(where)
        if type == _ARRAY:
            return self._array(where)
        if type not in _NUMBERS:
            raise CheckpointError(f"{self.path}: {where} has type {type}, expected a number, a string or an array")
        return self._numbers(type, 1, where)[0].item()

    def _array(self, where: str) -> Any:
        type, count = self._number(4, where), self._number(8, where)
        if type == _ARRAY:
            raise CheckpointError(f"{self.path}: {where} is an array of arrays, expected numbers or strings")
        if type == _STRING:
            return self._texts(count, where)
        if type not in _NUMBERS:
            raise CheckpointError(f"{self.path}: {where} has elements of type {type}, expected numbers or strings")
        return self._numbers(type, count, where)

    def _numbers(self, type: int, count: int, where: str) -> np.ndarray:
        dtype = _NUMBERS[type]
        start = self._take(count * dtype.itemsize, where)
        values = np.frombuffer(bytes(self._data[start : self.position]), dtype)
        if type == _BOOL:
            if values.size and values.max() > 1:
                raise CheckpointError(f"{self.path}: {where} has a truth value of {values.max()}, expected 0 or 1")
            return values.view(np.bool_)
        return values

    def _texts(self, count: int, where: str) -> list[str]:
        self._strings += count
        if self._strings > STRING_LIMIT:
            raise CheckpointError(f"{self.path}: {where} has {count} strings, expected at most {STRING_LIMIT} in all")
        self._need(8 * count, where)  # each has at least its length
        texts: list[str] = []
        data, position, size_of = self._data, self.position, struct.Struct("<Q").unpack_from
        try:
            # Written out instead of calling _text: vocabularies have hundreds of thousands of strings.
            while len(texts) < count:
                start = position + 8
                if start > len(data):
                    self._need(start - self.position, where)
                stop = start + size_of(data, position)[0]
                if stop > len(data):
                    self._need(stop - self.position, where)
                texts.append(data[start:stop].decode())
                position = stop
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: {where} has a string {len(texts)} that is not UTF-8") from None
        self.position = position
        return texts

    def _text(self, where: str, limit: int = HEADER_LIMIT) -> str:
        length = self._number(8, where)
        if length > limit:
            raise CheckpointError(f"{self.path}: {where} has {length} bytes, expected at most {limit}")
        start = self._take(length, where)
        try:
            return self._data[start : self.position].decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: {where} is not UTF-8") from None

    def _number(self, width: int, where: str) -> int:
        start = self._take(width, where)
        return int.from_bytes(self._data[start : self.position], "little")

    def _take(self, count: int, where: str) -> int:
        """Moves behind the next `count` bytes, which are then in memory, and gives their place."""
        self._need(count, where)
        start = self.position
        self.position += count
        return start

    def _need(self, count: int, where: str) -> None:
        """Reads on until `count` bytes from the position on are in memory; more than the file has are refused."""
        end = self.position + count
        if end <= len(self._data):
            return
        if end > self._file.size:
            found = f"{where} ends at byte {end}, but the file has {self._file.size} bytes"
            raise CheckpointError(f"{self.path}: {found}: damaged, or an unfinished download?")
        if end > HEADER_LIMIT:
            raise CheckpointError(f"{self.path}: {where} ends at byte {end}, expected a header of {HEADER_LIMIT} bytes")
        # Twice as much as before, so that a header of any length is read in a few pieces.
        stop = min(self._file.size, HEADER_LIMIT, max(end, 2 * len(self._data), 1 << 16))
        self._data += self._file.read(len(self._data), stop - len(self._data))


def deal_blocks(type: str, data: np.ndarray, packed: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> str:
    """Blocks of a type of BLOCKS as the arrays of a QuantizedTensor with float16 scales; all are given as their bytes.

    What is wrong with them, "" if nothing is: a scale that is not finite, or whose bias is beyond float16.
    """
    format = BLOCKS[type]
    blocks, halves = data.view(format.record), (scales.view(np.float16), biases.view(np.float16))
    if format.offset is not None:
        halves[1].fill(0)
    _take_apart(format, blocks, packed.reshape(len(blocks), -1), *halves)
    fault = _not_finite(*halves)
    if format.offset is not None and not fault:
        if _largest(halves[0]) > format.largest:
            most = np.uint16(format.largest).view(np.float16)
            return f"a scale of {np.abs(halves[0]).max()}, expected at most {most} where experts are streamed"
        np.multiply(halves[0], np.float16(format.offset), out=halves[1])
    return fault


def _take_apart(format: _Blocks, blocks: np.ndarray, codes: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> None:
    """Codes in order, uint8 [blocks, bytes], scales and, if the blocks have them, biases, float16 [blocks]."""
    for start in range(0, len(blocks), _STEP):
        part = slice(start, start + _STEP)
        scales[part] = blocks["scale"][part]
        if format.offset is None:
            biases[part] = blocks["bias"][part]
        stored = blocks["codes"][part].copy()
        if format.bits == 8:
            np.bitwise_xor(stored.view(np.uint8), 128, out=codes[part].reshape(-1))  # signed to unsigned
        else:
            reorder_nibbles(stored.view("<u2"), codes[part].view(np.uint64))


def _not_finite(scales: np.ndarray, biases: np.ndarray) -> str:
    """The first block with a number that is not finite, "" if there is none."""
    for what, values in (("scale", scales), ("bias", biases)):
        if _largest(values) >= _HALF_INFINITY:
            block = int(np.argmin(np.isfinite(values)))
            return f"{what} {values[block]} in block {block}, expected a finite number: damaged?"
    return ""


def reorder_nibbles(pairs: np.ndarray, out: np.ndarray) -> None:
    """16 bytes, whose low halves are codes 0 to 15 and whose high halves are 16 to 31, into code order, per block.

    pairs uint16 [blocks * 8], two bytes each; out uint64 [blocks, 2].
    """
    low = (pairs & 0x0F) | ((pairs >> 4) & 0xF0)
    high = ((pairs >> 4) & 0x0F) | ((pairs >> 8) & 0xF0)
    out[:, 0] = low.astype(np.uint8).view(np.uint64)
    out[:, 1] = high.astype(np.uint8).view(np.uint64)


def _largest(values: np.ndarray) -> int:
    """The largest absolute value of float16 numbers as a bit pattern, whose order is theirs: NaN above infinity."""
    return int((values.view(np.uint16) & 0x7FFF).max(initial=0))


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
