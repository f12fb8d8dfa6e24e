"""A model folder: config.json, the tensors of all its safetensors files, and which of them are quantized and how.

Opening reads config.json, the index and the headers of the files, no weights. Nothing in the folder is executed.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, KeysView, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from penstock.dtypes import dtype_name
from penstock.errors import CheckpointError, InvalidArgument
from penstock.quant import MODES, Format, QuantizedTensor
from penstock.units import amount
from penstock.weights import fp8
from penstock.weights.files import JSON_LIMIT, check_plain_name, list_folder, parse_json, read_bounded, read_json, short
from penstock.weights.safetensors import DTYPES, SafetensorsFile, TensorInfo

INDEX = "model.safetensors.index.json"

_SUFFIX = ".safetensors"
_SHARD = re.compile(r"(.*)-(\d{1,6})-of-(\d{1,6})\.safetensors")
_HEAD = re.compile(r"(?:model[-_.])?mtp(?:[-_.].*)?\.safetensors")  # layers that predict further tokens
_BESIDE = ("adapter", "consolidated", "optimizer")  # starts of names of safetensors files that are not the model
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_UNREADABLE = (*_PICKLED, ".npz", ".gguf", ".h5", ".msgpack", ".onnx")
_F8_NAMES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_SCALES = ("F32", "F16", "BF16")
_FORMAT_KEYS = ("bits", "group_size", "mode")
_GLOBAL = "global_scale"
_SCALE_INV = "_scale_inv"  # behind the name of a matrix in block-scaled FP8
_BLOCKS, _BLOCK_SCALES = "_blocks", "_scales"  # behind the name of matrices in mxfp4, as gpt-oss is released
_MXFP4 = Format(4, 32, "mxfp4")
_CODE_KEYS = ("auto_map", "model_file")


@dataclass(frozen=True)
class _Formats:
    """The quantization table: formats in general and by module path, None for a dense one; `scaled`: paths of which it
    says that they have a global scale.
    """

    general: Format
    by_path: dict[str, Format | None]
    scaled: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Index:
    """model.safetensors.index.json: which file has which tensor, and the bytes of all of them if it says so."""

    path: Path
    file_of: dict[str, str]
    total_size: Any


class Checkpoint:
    """The tensors and the configuration of a model folder. Made by `Checkpoint.open`."""

    path: Path
    config: dict[str, Any]

    def __init__(self, folder: Path) -> None:
        self.path = folder
        listing = list_folder(folder)
        self._config_path = folder / "config.json"
        if "config.json" not in listing:
            raise CheckpointError(f"{folder}: has no config.json, expected a model folder")
        self._config_bytes = read_bounded(self._config_path, JSON_LIMIT)
        self.config = parse_json(self._config_bytes, str(self._config_path))
        _check_object(self.config, str(self._config_path))
        self._notices = [
            f"{self._config_path}: {key} names code in the folder, which is never executed"
            for key in _CODE_KEYS
            if self.config.get(key)
        ]
        names, index = weight_files(folder, listing, self._notices)
        self._files = [SafetensorsFile.open(folder / name) for name in names]
        self._file_of = _owners(self._files)
        if index is not None:
            self._notices += _checked_against(index, self._file_of)
        self._formats = self._read_formats(listing)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> "Checkpoint":
        """Open a model folder: config.json with model.safetensors, or with shards and their index, or shards alone.

        Raises CheckpointError, which names the file, for anything missing, damaged, contradictory or not supported.
        """
        return cls(Path(folder))

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self._file_of)} tensors in {len(self._files)} files)"

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    @property
    def names(self) -> KeysView[str]:
        """The names of all tensors, as in the files."""
        return self._file_of.keys()

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self._files)

    @property
    def notices(self) -> list[str]:
        """What a user should know although it is no error, one line each; copies appear once they were made."""
        found = [*self._notices, *(notice for file in self._files for notice in file.notices)]
        for file in self._files:
            count, nbytes = file.copied
            if count:
                noun, are, were = ("tensor", "is", "was") if count == 1 else ("tensors", "are", "were")
                size = amount(nbytes)
                found.append(f"{count} {noun} ({size}) {are} not aligned in {file.path} and {were} copied")
        return found

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for file in self._files for info in file.tensors.values())

    @functools.cached_property
    def misaligned_nbytes(self) -> int:
        """Bytes of the tensors that cannot be used from the mapped files and are copied into memory when asked for."""
        return sum(file.misaligned_nbytes for file in self._files)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of config.json and of the name, dtype and shape of each tensor.

        Folder and file names and the distribution over files do not matter; neither do the weights.
        """
        digest = hashlib.sha256(hashlib.sha256(self._config_bytes).digest())
        for name in sorted(self.names):
            info = self._info(name)
            digest.update(json.dumps([name, info.dtype, info.shape]).encode() + b"\n")
        return digest.hexdigest()

    def check(self) -> None:
        """Raises CheckpointError if a file was shortened or written to since it was opened: for every step of a model.

        Reading behind the end of a mapped file ends the process (SIGBUS); between this look and the reading a small
        risk is left.
        """
        for file in self._files:
            file.check()

    def lease(self) -> bool:
        """Ask the system to hold off writers of all files (see `MappedFile.lease`); whether it does."""
        leased = [file.lease() for file in self._files]
        return all(leased)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def dtype(self, name: str) -> str:
        """Name of a tensor's dtype: "bfloat16", "uint32", also "float8_e4m3fn", whose arrays are raw uint8."""
        spelled = self._info(name).dtype
        return _F8_NAMES.get(spelled) or dtype_name(DTYPES[spelled])

    def location(self, name: str) -> tuple[Path, int, int]:
        """The file of a tensor and the bytes [start, stop) in it."""
        info = self._info(name)
        return self._file_of[name].path, info.start, info.stop

    def array(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of its file; see `SafetensorsFile.array`."""
        self._info(name)
        return self._file_of[name].array(name)

    @property
    def listed_modules(self) -> list[str]:
        """Paths of the modules that the quantization table of config.json names."""
        return [] if self._formats is None else list(self._formats.by_path)

    def quantization(self, module_path: str) -> Format | None:
        """The format of a module's weight, None if it is dense or absent.

        Raises CheckpointError where the quantization table of config.json and the tensors contradict each other.
        """
        by_path = self._formats.by_path if self._formats else {}
        if f"{module_path}.scales" not in self:
            if by_path.get(module_path) is not None and f"{module_path}.weight" in self:
                self._refuse(f"{module_path}.weight", f"has no {module_path}.scales, but config.json says quantized")
            return None
        if self._formats is None:
            self._refuse(f"{module_path}.scales", "needs bits and group size, but config.json has no quantization")
        format = by_path.get(module_path, self._formats.general)
        if format is None:
            self._refuse(f"{module_path}.scales", "is there, but config.json says false (not quantized)")
        return format

    def tensor(self, module_path: str) -> np.ndarray | QuantizedTensor:
        """The weight of a module: quantized if `<path>.scales` or `<path>_blocks` exists, else the array
        `<path>.weight` or `<path>`.

        Raises CheckpointError if there is none, and if its parts do not fit each other or the quantization table.
        """
        if f"{module_path}.weight{_SCALE_INV}" in self:
            return self._from_blocks(f"{module_path}.weight")
        if f"{module_path}{_BLOCKS}" in self:
            return self._of_mxfp4(*map(self.array, self.mxfp4_blocks(module_path)))
        format, names = self.parts(module_path)
        if format is None:
            return self.array(names[0])
        try:
            return QuantizedTensor.of(format, [self.array(name) for name in names])
        except InvalidArgument as error:
            self._refuse(names[0], f"cannot be used: {error}")

    def parts(self, module_path: str) -> tuple[Format | None, tuple[str, ...]]:
        """The format of a module's weight, and the tensors it is made of, as `QuantizedTensor.arrays` has them (the
        bytes, where they are `mxfp4_blocks`); None and one tensor if it is dense. Raises CheckpointError as `tensor`
        does; the files are not touched.
        """
        if f"{module_path}{_BLOCKS}" in self:
            return _MXFP4, self.mxfp4_blocks(module_path)
        format = self.quantization(module_path)
        if format is not None:
            return format, self._quantized(module_path, format)
        name = f"{module_path}.weight" if f"{module_path}.weight" in self else module_path
        spelled = self._info(name).dtype
        if name != module_path and spelled == "U32":
            self._refuse(name, f"has packed words (U32), but there is no {module_path}.scales")
        if spelled in _F8_NAMES and f"{name}{_SCALE_INV}" in self:
            self._refuse(
                name, "is FP8 in blocks, which is not streamed, expected MLX's quantization: penstock convert -q"
            )
        if spelled in _F8_NAMES:
            self._refuse(name, f"has dtype {spelled}, expected a float of 16 or more bits or MLX's quantization")
        return None, (name,)

    def _from_blocks(self, name: str) -> np.ndarray | QuantizedTensor:
        """A matrix in block-scaled FP8: mxfp8 where config.json says that scales are powers of two, else bfloat16."""
        if name not in self:
            self._refuse(f"{name}{_SCALE_INV}", f"has no {name} beside it")
        codes, scales = self._info(name), self._info(f"{name}{_SCALE_INV}")
        if codes.dtype != "F8_E4M3" or len(codes.shape) != 2 or 0 in codes.shape:
            self._refuse(name, f"is {codes.dtype} {list(codes.shape)}, expected F8_E4M3 [N, K]: it has {_SCALE_INV}")
        wanted = fp8.blocks(codes.shape)
        if scales.dtype not in _SCALES or scales.shape != wanted:
            found = f"is {scales.dtype} {list(scales.shape)}"
            self._refuse(f"{name}{_SCALE_INV}", f"{found}, expected floats {list(wanted)}, one per 128 x 128")
        factors = self.array(f"{name}{_SCALE_INV}")
        if not np.isfinite(factors).all():
            self._refuse(f"{name}{_SCALE_INV}", "has numbers that are not finite, expected finite scales: damaged?")
        return self._made_of_blocks(self.array(name), factors)

    def _made_of_blocks(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray | QuantizedTensor:
        """codes uint8 [N, K], scales of blocks."""
        exact = fp8.as_mxfp8(codes, scales) if self._scales_are_powers else None
        return fp8.made_dense(codes, scales) if exact is None else exact

    def mxfp4_blocks(self, module_path: str) -> tuple[str, str]:
        """The tensors of a stack of matrices in mxfp4 as gpt-oss is released: codes uint8 [E, N, K / 32, 16], scales
        uint8 [E, N, K / 32]. Raises CheckpointError for others.
        """
        names = f"{module_path}{_BLOCKS}", f"{module_path}{_BLOCK_SCALES}"
        codes = self._info(names[0])
        if codes.dtype != "U8" or len(codes.shape) != 4 or codes.shape[-1] != 16 or 0 in codes.shape:
            self._refuse(names[0], f"is {codes.dtype} {list(codes.shape)}, expected U8 [E, N, K / 32, 16]")
        if names[1] not in self:
            self._refuse(names[0], f"has no {names[1]} beside it, expected the scales of its blocks")
        scales = self._info(names[1])
        if (scales.dtype, scales.shape) != ("U8", codes.shape[:-1]):
            found = f"is {scales.dtype} {list(scales.shape)}"
            self._refuse(names[1], f"{found}, expected U8 {list(codes.shape[:-1])}, one for each block")
        return names

    def _of_mxfp4(self, codes: np.ndarray, scales: np.ndarray) -> QuantizedTensor:
        """The same bytes as MLX's words: on the memory of the file, where that is aligned."""
        words = np.require(codes, requirements=["C"]).reshape(*codes.shape[:2], -1).view("<u4")
        return QuantizedTensor(np.require(words, requirements=["A"]), scales, None, *_MXFP4)

    @property
    def _scales_are_powers(self) -> bool:
        table = self.config.get("quantization_config")
        return isinstance(table, dict) and table.get("scale_fmt") == "ue8m0"

    def _quantized(self, path: str, format: Format) -> tuple[str, ...]:
        parts = tuple(f"{path}.{part}" for part in format.parts)
        for name in parts:
            if name not in self:
                there = f"{path}.scales" if name != f"{path}.scales" else f"{path}.weight"
                self._refuse(there, f"has no {name} beside it, expected the parts of a quantized weight")
        packed, scales, *biases = (self._info(name) for name in parts)
        bits, says = format.bits, f"config.json says {format}"
        allowed = _SCALES if biases else ("U8",)
        if packed.dtype != "U32":
            self._refuse(parts[0], f"has dtype {packed.dtype}, expected U32 (packed words of {bits} bits)")
        if scales.dtype not in allowed:
            choice = f"one of {', '.join(allowed)}" if biases else f"U8: {says}"
            self._refuse(parts[1], f"has dtype {scales.dtype}, expected {choice}")
        if not biases and f"{path}.biases" in self:
            self._refuse(f"{path}.biases", f"is there, expected no biases: {says}")
        if len(packed.shape) < 2 or 0 in packed.shape[1:]:
            self._refuse(parts[0], f"has shape {list(packed.shape)}, expected [..., N, K * {bits} / 32]")
        *rows, words = packed.shape
        step = format.unit * bits // 32
        if words % step:
            self._refuse(parts[0], f"has {words} words in a row, expected a multiple of {step}: {says}")
        groups = (*rows, words * 32 // bits // format.group_size)
        if scales.shape != groups:
            self._refuse(parts[1], f"has shape {list(scales.shape)}, expected {list(groups)}: {says}")
        if biases and (biases[0].dtype, biases[0].shape) != (scales.dtype, scales.shape):
            found, wanted = (f"{info.dtype} {list(info.shape)}" for info in (biases[0], scales))
            self._refuse(parts[2], f"is {found}, expected {wanted} as the scales")
        return (*parts, *self._global_scale(path, format, packed.shape[:-2]))

    def _global_scale(self, path: str, format: Format, experts: tuple[int, ...]) -> tuple[str, ...]:
        """The name of a module's global scale, if it has one."""
        name = f"{path}.{_GLOBAL}"
        if name not in self:
            if self._formats is not None and path in self._formats.scaled:
                self._refuse(f"{path}.weight", f"has no {name} beside it, but config.json says {_GLOBAL}")
            return ()
        info = self._info(name)
        if not MODES[format.mode].global_scale:
            self._refuse(name, f"is there, expected none: config.json says {format}")
        if (info.dtype, info.shape) != ("F32", experts):
            self._refuse(name, f"is {info.dtype} {list(info.shape)}, expected F32 {list(experts)}, one for each expert")
        return (name,)

    def _read_formats(self, listing: list[str]) -> _Formats | None:
        source, table = quantization_table(self.config)
        if table is None:
            if "hf_quant_config.json" in listing:
                raise CheckpointError(
                    f"{self.path / 'hf_quant_config.json'}: ModelOpt quantization, expected MLX's affine one"
                )
            return None
        where = f"{self._config_path}: {source}"
        other = self.config.get("quantization_config")
        if source == "quantization" and other is not None and other != table:
            self._notices.append(f"{self._config_path}: quantization_config differs from quantization and is ignored")
        _check_object(table, where)
        if table.get("quant_method") == "fp8" and source.endswith("quantization_config"):
            found = table.get("weight_block_size")
            if found != [fp8.BLOCK, fp8.BLOCK] or table.get("fmt", "e4m3") != "e4m3":
                blocks = f"E4M3 in [{fp8.BLOCK}, {fp8.BLOCK}]"
                raise CheckpointError(f"{where} has weight_block_size {short(found)}, expected {blocks}")
            size = "as it is in mxfp8" if self._scales_are_powers else "in the memory of bfloat16"
            self._notices.append(f"{self._config_path}: FP8 is held {size}; penstock convert -q makes it small")
            return None
        method = table.get("quant_method")
        if method == "mxfp4" and any(name.endswith(_BLOCKS) for name in self._file_of):
            return None  # tensors in blocks are known by their names
        if method is not None:
            raise CheckpointError(f"{where} has quant_method {short(method)}, expected MLX's affine quantization")
        general = _format(table, where, required=True)
        by_path: dict[str, Format | None] = {}
        scaled: set[str] = set()
        for path, value in table.items():
            if path in _FORMAT_KEYS:
                continue
            if isinstance(value, bool):
                by_path[path] = general if value else None
            elif isinstance(value, dict):
                if unknown := sorted(value.keys() - {*_FORMAT_KEYS, _GLOBAL}):
                    expected = ", ".join((*_FORMAT_KEYS, _GLOBAL))
                    raise CheckpointError(f"{where} of {short(path)} has {short(unknown[0])}, expected only {expected}")
                by_path[path] = _format(value, f"{where} of {short(path)}", required=False)
                if value.get(_GLOBAL):
                    scaled.add(path)
            elif "." in path or f"{path}.weight" in self:
                raise CheckpointError(f"{where} of {short(path)} is {short(value)}, expected an object or false")
            else:
                self._notices.append(f"{where} has {short(path)}, which is not known and ignored")
        absent = [path for path in by_path if f"{path}.weight" not in self and path not in self]
        if absent:
            more = f" and {len(absent) - 1} others" if len(absent) > 1 else ""
            self._notices.append(f"{where} speaks of {short(absent[0])}{more}, which the files do not have")
        return _Formats(general, by_path, frozenset(scaled))

    def _info(self, name: str) -> TensorInfo:
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(f"{self.path}: has no tensor {short(name)}")
        return file.tensors[name]

    def _refuse(self, name: str, found: str) -> NoReturn:
        raise CheckpointError(f"{self._file_of[name].path}: tensor {short(name)} {found}")


def weight_files(folder: Path, listing: list[str], notices: list[str]) -> tuple[list[str], Index | None]:
    """The safetensors files that are the model, and the index if there is one that belongs to them."""
    there = [name for name in listing if name.endswith(_SUFFIX) and not name.startswith(".")]
    # As mlx-lm does, files called model… are the model; other names are taken only where there are none.
    own = [name for name in there if name.startswith("model")]
    own = own or [name for name in there if not name.startswith(_BESIDE)]
    index = read_index(folder / INDEX) if INDEX in listing else None
    if index is None and not own:
        others = [name for name in listing if name.endswith(_UNREADABLE)]
        found = f" but {short(others[0])}" if others else ""
        pickled = ", and pickles are never loaded" if any(name.endswith(_PICKLED) for name in others) else ""
        raise CheckpointError(f"{folder}: has no {_SUFFIX} files{found}, expected at least one{pickled}")
    if index is not None:
        listed = sorted(set(index.file_of.values()))
        missing = sorted(set(listed) - set(listing))
        if not missing:
            own = listed
        elif len(missing) < len(listed) or not own or _missing_shard(own):
            lost = f"{short(missing[0])} and {len(missing) - 1} others" if missing[1:] else short(missing[0])
            raise CheckpointError(f"{index.path}: lists {lost}, but the folder has no such file: not fully downloaded?")
        else:  # some converters leave the index of the model they started from beside their own files
            notices.append(f"{index.path}: lists none of the files that are there; read without it: {', '.join(own)}")
            index = None
    own += [name for name in there if _HEAD.fullmatch(name) and name not in own]
    if index is None and (shard := _missing_shard(own)):
        raise CheckpointError(f"{folder}: has no {shard}, expected all files of the set: an unfinished download?")
    if unread := sorted(set(there) - set(own)):
        belong = f"not listed in {INDEX}" if index is not None else "not part of the model by their names"
        notices.append(f"{folder}: {', '.join(map(short, unread))}: {belong}, not read")
    return own, index


def _missing_shard(names: Iterable[str]) -> str | None:
    """The first name that is absent from sets such as model-00001-of-00003.safetensors; None if they are complete."""
    there = set(names)
    sets = {(m[1], len(m[2]), m[3]) for m in map(_SHARD.fullmatch, there) if m}
    for stem, digits, total in sorted(sets):
        wanted = (f"{stem}-{i:0{digits}}-of-{total}{_SUFFIX}" for i in range(1, int(total) + 1))
        if missing := next((name for name in wanted if name not in there), None):
            return missing
    return None


def read_index(path: Path) -> Index:
    """model.safetensors.index.json. Raises CheckpointError, which names it, for anything wrong."""
    index = read_json(path)
    _check_object(index, str(path))
    file_of = index.get("weight_map")
    _check_object(file_of, f"{path}: weight_map")
    if not file_of:
        raise CheckpointError(f"{path}: weight_map is empty, expected the tensors of the model")
    for name, file in file_of.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{path}: the file of tensor {short(name)} is {short(file)}, expected a name")
    for file in sorted(set(file_of.values())):
        check_plain_name(str(path), file)
        if not file.endswith(_SUFFIX):
            raise CheckpointError(f"{path}: lists {short(file)}, expected only {_SUFFIX} files")
    metadata = index.get("metadata")
    if metadata is not None:
        _check_object(metadata, f"{path}: metadata")
    return Index(path, file_of, (metadata or {}).get("total_size"))


def _owners(files: list[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    """The file of each tensor; raises CheckpointError for a name in two files, of which either may be the right one."""
    owners: dict[str, SafetensorsFile] = {}
    for file in files:
        for name in file.tensors:
            if name in owners:
                raise CheckpointError(f"{file.path}: tensor {short(name)} is in {owners[name].path.name} as well")
            owners[name] = file
    return owners


def _checked_against(index: Index, owners: dict[str, SafetensorsFile]) -> list[str]:
    """Notices about an index that says too little; raises CheckpointError for one that is wrong."""
    hint = f"an outdated {INDEX}? Without it all files are read"
    for name, file in index.file_of.items():
        if name not in owners:
            raise CheckpointError(f"{index.path}: tensor {short(name)} is not in {file} ({hint})")
        if owners[name].path.name != file:
            found = f"tensor {short(name)} is in {owners[name].path.name}, not in {file}"
            raise CheckpointError(f"{index.path}: {found} ({hint})")
    notices = []
    if unlisted := [name for name in owners if name not in index.file_of]:
        more = f" and {len(unlisted) - 1} others" if len(unlisted) > 1 else ""
        notices.append(f"{index.path}: does not list tensor {short(unlisted[0])}{more} of the files, read nevertheless")
    total = sum(file.tensors[name].nbytes for name, file in owners.items())
    if index.total_size is not None and index.total_size != total:
        notices.append(f"{index.path}: total_size is {short(index.total_size)}, the tensors have {total} bytes")
    return notices


def quantization_table(config: dict[str, Any]) -> tuple[str, Any]:
    """The key of the quantization table in config.json and the table, None without one."""
    text = config.get("text_config")
    for prefix, holder in (("", config), ("text_config.", text if isinstance(text, dict) else {})):
        for key in ("quantization", "quantization_config"):
            if holder.get(key) not in (None, {}):
                return f"{prefix}{key}", holder[key]
    return "", None


def _format(table: Mapping[str, Any], where: str, required: bool) -> Format:
    """A format; an override may leave out a part or have null there, as mlx_lm.convert writes it for mixed recipes:
    it then has MLX's default, not the general one.
    """
    mode = table.get("mode", "affine")
    if not isinstance(mode, str) or mode not in MODES:
        raise CheckpointError(f"{where}: mode is {short(mode)}, expected one of {', '.join(MODES)}")
    known, found = MODES[mode], []
    required = required and mode == "affine"
    for key, allowed, default in (
        ("bits", known.bits, known.default_bits),
        ("group_size", known.group_sizes, known.default_group_size),
    ):
        value = default if table.get(key) is None and not required else table.get(key)
        if type(value) is not int or value not in allowed:
            choice = f"one of {', '.join(map(str, allowed))}" if allowed[1:] else f"{allowed[0]} in mode {mode}"
            raise CheckpointError(f"{where}: {key} is {short(value)}, expected {choice}")
        found.append(value)
    return Format(found[0], found[1], mode)


def _check_object(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: is {short(value)}, expected a JSON object")
