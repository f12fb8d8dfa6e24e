"""Whether a model on this disk is whole and means something. All problems are listed, not the first one.

Files are read, not mapped: one that is shortened meanwhile is a problem and not the end of the process. Memory stays at
a few buffers per thread, whatever the size of the model.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from penstock import models
from penstock.analysis.survey import FromFiles, FromGguf, Headers, Recorder, check_sizes
from penstock.analysis.weights import TensorFormat
from penstock.errors import CheckpointError, PenstockError
from penstock.machine import usable_threads
from penstock.models import mtp
from penstock.models.family import AnyFamily, ModelConfig
from penstock.models.gguf import GgufModel
from penstock.models.source import left_over
from penstock.quant import BLOCK_TYPES, Format
from penstock.text.gguf_tokenizer import gguf_tokenizer
from penstock.text.tokenizer import Tokenizer, tokens_beyond
from penstock.weights.checkpoint import INDEX, read_index, weight_files
from penstock.weights.files import check_plain_name, list_folder, read_bounded, short
from penstock.weights.gguf import BLOCKS, GgufFile
from penstock.weights.mapped import MappedFile
from penstock.weights.safetensors import SafetensorsFile, TensorInfo

Progress = Callable[[int], None]
ProgressBar = Callable[[str, int, bool], AbstractContextManager[Callable[..., None]]]
_Job = TypeVar("_Job")
_Done = TypeVar("_Done")

_PIECE = 8 << 20  # bytes that a thread reads at once
_LIST_LIMIT = 16 << 20  # bytes of a list of hashes
_MESSAGE = [{"role": "user", "content": "Hello"}]
_SUFFIX = ".safetensors"
_HASH = re.compile(r"(?P<hash>[0-9a-fA-F]{64}) [ *](?P<name>.+)|SHA256 \((?P<named>.+)\) = (?P<hex>[0-9a-fA-F]{64})")
# dtype: words of its size, and the exponent whose bits are all set in infinity and NaN
_EXPONENTS: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80 << 16),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "E8M0": ("u1", 0xFF),
    "E4M3": ("u1", 0x7F),
}
# words of a row per scale: what the scales of a module that is not affine are, and its codes if they can be NaN
_BYTE_SCALES: dict[int, tuple[str, str | None]] = {4: ("E8M0", None), 2: ("E4M3", None), 8: ("E8M0", "E4M3")}


@dataclass
class Check:
    """One thing that was looked at: what was found in a few words, and every problem in a line."""

    name: str
    about: str = ""
    problems: list[str] = field(default_factory=list)
    skipped: bool = False

    @property
    def status(self) -> str:
        return "failed" if self.problems else "skipped" if self.skipped else "ok"


# --------------------------------------------------------------------------------------------------------------------
# Headers and index


def check_headers(folder: Path) -> tuple[Check, list[SafetensorsFile]]:
    """Open every weight file of a folder: its header, and the bounds of each tensor. The files that could be opened."""
    check, files = Check("headers"), []
    listing = list_folder(folder)
    if "config.json" not in listing:
        check.problems.append(f"{folder}: has no config.json, expected a model folder")
    try:
        names, _ = weight_files(folder, listing, [])
    except CheckpointError as error:
        if INDEX not in str(error):  # whose problems are those of the next check
            check.problems.append(str(error))
        names = [name for name in listing if name.endswith(_SUFFIX) and not name.startswith(".")]
    owners: dict[str, SafetensorsFile] = {}
    for name in names:
        try:
            file = SafetensorsFile.open(folder / name)
        except CheckpointError as error:
            check.problems.append(str(error))
            continue
        files.append(file)
        for tensor in file.tensors:
            if owners.setdefault(tensor, file) is not file:
                there = owners[tensor].path.name
                check.problems.append(f"{file.path}: tensor {short(tensor)} is in {there} as well, expected it once")
    nbytes = sum(info.nbytes for file in files for info in file.tensors.values())
    check.about = f"{_many(len(names), 'file')}, {_many(len(owners), 'tensor')}, {nbytes / 1e6:,.1f} MB"
    return check, files


def check_index(folder: Path, files: Iterable[SafetensorsFile]) -> Check:
    """Compare the index, if there is one, with the files: every tensor, and the sum of their bytes."""
    check = Check("index")
    listing = set(list_folder(folder))
    if INDEX not in listing:
        check.about, check.skipped = f"there is no {INDEX}", True
        return check
    try:
        index = read_index(folder / INDEX)
    except CheckpointError as error:
        check.problems.append(str(error))
        return check
    opened = {file.path.name: file for file in files}
    owners = {tensor: name for name, file in opened.items() for tensor in file.tensors}
    listed = sorted(set(index.file_of.values()))
    lost = [name for name in listed if name not in listing]
    check.problems += [f"{index.path}: lists {short(name)}, but the folder has no such file" for name in lost]
    for tensor, name in index.file_of.items():
        if tensor in owners and owners[tensor] != name:
            check.problems.append(f"{index.path}: tensor {short(tensor)} is in {owners[tensor]}, not in {name}")
        elif tensor not in owners and name in opened:
            check.problems.append(f"{index.path}: tensor {short(tensor)} is not in {name}")
    unlisted = [tensor for tensor in owners if tensor not in index.file_of]
    check.problems += [f"{index.path}: does not list tensor {short(name)} of {owners[name]}" for name in unlisted]
    total = sum(info.nbytes for file in opened.values() for info in file.tensors.values())
    whole = all(name in opened for name in listed)
    if whole and index.total_size is not None and index.total_size != total:
        check.problems.append(f"{index.path}: total_size is {short(index.total_size)}, the tensors have {total} bytes")
    check.about = f"{_many(len(index.file_of), 'tensor')} in {_many(len(listed), 'file')}"
    return check


# --------------------------------------------------------------------------------------------------------------------
# Numbers


class _Range(NamedTuple):
    """Floats in a file: bytes [start, stop), as records of which `parts` are words that have an exponent."""

    file: MappedFile
    tensor: str
    start: int
    stop: int
    record: np.dtype[Any]
    parts: tuple[tuple[str, int], ...]  # field of the record ("" for a plain number) and its exponent


class Numbers:
    """The floats of a model: weights that are dense, scales and biases. `nbytes` are read to look at all of them."""

    def __init__(self, ranges: Iterable[_Range]) -> None:
        self._ranges = [one for one in ranges if one.stop > one.start]
        self.nbytes = sum(one.stop - one.start for one in self._ranges)

    @classmethod
    def of_safetensors(cls, files: Iterable[SafetensorsFile]) -> Numbers:
        found, files = [], list(files)
        bytes_of = _small_floats({name: info for file in files for name, info in file.tensors.items()})
        for file in files:
            mapped = MappedFile(file.path)
            for name, info in file.tensors.items():
                kind = bytes_of.get(name, info.dtype)
                if kind in _EXPONENTS:
                    word, exponent = _EXPONENTS[kind]
                    found.append(_Range(mapped, name, info.start, info.stop, np.dtype(word), (("", exponent),)))
        return cls(found)

    @classmethod
    def of_gguf(cls, file: GgufFile) -> Numbers:
        """Dense tensors, and of the block formats that penstock runs their scales and biases."""
        found, opened = [], {path: MappedFile(path) for path in {file.path_of(name) for name in file.tensors}}
        for name, info in file.tensors.items():
            mapped = opened[file.path_of(name)]
            if info.type in _EXPONENTS:
                word, exponent = _EXPONENTS[info.type]
                found.append(_Range(mapped, name, info.start, info.stop, np.dtype(word), (("", exponent),)))
            elif info.type in BLOCKS:
                record = BLOCKS[info.type].record
                halves = (part for part in record.names or () if part in ("scale", "bias"))
                parts = tuple((part, _EXPONENTS["F16"][1]) for part in halves)
                found.append(_Range(mapped, name, info.start, info.stop, record, parts))
            elif info.type in BLOCK_TYPES:
                known = BLOCK_TYPES[info.type]
                offsets, (word, exponent) = known.halves or (0,), _EXPONENTS["F16" if known.halves else "E8M0"]
                names = [f"scale {at}" for at in offsets]
                fields = {"names": names, "formats": [word] * len(names), "offsets": list(offsets)}
                record = np.dtype(fields | {"itemsize": known.nbytes})  # type: ignore[call-overload]
                parts = tuple((scale, exponent) for scale in names)
                found.append(_Range(mapped, name, info.start, info.stop, record, parts))
        return cls(found)

    def check(self, threads: int, progress: Progress) -> Check:
        """Read them all, in parallel; a problem for each tensor that has infinities or NaN."""
        check = Check("numbers", f"{_many(len(self._ranges), 'tensor')} of floats, {self.nbytes / 1e6:,.1f} MB")
        pieces = [(one, start) for one in self._ranges for start in range(0, one.stop - one.start, _step(one))]
        buffers = threading.local()
        bad: dict[tuple[str, str], tuple[int, int]] = {}

        def look(job: tuple[_Range, int]) -> tuple[_Range, int, int] | str | None:
            one, offset = job
            count = min(_step(one), one.stop - one.start - offset)
            if not hasattr(buffers, "data"):
                buffers.data = np.empty(_PIECE + 4096, np.uint8)
            data = buffers.data[:count]
            try:
                one.file.read_into(data.data, one.start + offset)
            except CheckpointError as error:
                return str(error)
            finally:
                progress(count)
            number, first = _not_finite(data.view(one.record), one.parts)
            return (one, number, offset // one.record.itemsize + first) if number else None

        for outcome in _each(threads, look, pieces):
            if isinstance(outcome, str):
                check.problems.append(outcome)
            elif outcome is not None:
                one, number, first = outcome
                key = (str(one.file.path), one.tensor)
                before, earliest = bad.get(key, (0, first))
                bad[key] = before + number, min(earliest, first)
        check.problems = list(dict.fromkeys(check.problems)) + [
            f"{path}: tensor {short(tensor)} has {_many(number, 'number')} not finite (the first is number {first}), "
            "expected none: damaged?"
            for (path, tensor), (number, first) in bad.items()
        ]
        return check


def _small_floats(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Which small floats the scales, and perhaps the codes, of modules are that are not affine: it shows in shapes."""
    made: dict[str, str] = {}
    for name, info in tensors.items():
        if name.endswith("_scales") and info.dtype == "U8" and f"{name.removesuffix('_scales')}_blocks" in tensors:
            made[name] = _BYTE_SCALES[4][0]  # blocks of mxfp4
            continue
        packed = tensors.get(f"{name.removesuffix('.scales')}.weight") if name.endswith(".scales") else None
        if packed is None or info.dtype != "U8" or packed.dtype != "U32" or not info.shape or not packed.shape:
            continue
        scales, codes = _BYTE_SCALES.get(packed.shape[-1] // max(info.shape[-1], 1), (None, None))
        if scales is not None:
            made[name] = scales
        if codes is not None:
            made[f"{name.removesuffix('.scales')}.weight"] = codes
    return made


def _step(one: _Range) -> int:
    return _PIECE // one.record.itemsize * one.record.itemsize


def _not_finite(values: np.ndarray, parts: Iterable[tuple[str, int]]) -> tuple[int, int]:
    """How many numbers are infinite or NaN, and the first of them."""
    total, first = 0, len(values)
    for name, exponent in parts:
        words = values[name] if name else values
        words = words.view(f"<u{words.itemsize}")
        mask = words.dtype.type(exponent)
        if (np.bitwise_and(words, mask)).max(initial=0) != mask:
            continue
        at = np.flatnonzero((words & mask) == mask)
        total, first = total + len(at), min(first, int(at[0]))
    return total, first


def _each(threads: int, function: Callable[[_Job], _Done], jobs: Iterable[_Job]) -> Iterator[_Done]:
    """The function of each job, in order; what has not begun is dropped when the caller stops."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield from pool.map(function, jobs)
    finally:
        pool.shutdown(cancel_futures=True)


# --------------------------------------------------------------------------------------------------------------------
# Hashes


def read_hashes(path: Path) -> dict[str, str]:
    """SHA-256 by file name, from a list as sha256sum writes it (plain or with --tag).

    Raises CheckpointError for a line that is none, a name with folders in it, a file that appears twice.
    """
    try:
        text = read_bounded(path, _LIST_LIMIT).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: is not UTF-8, expected a list of SHA-256 hashes and names") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _HASH.fullmatch(line.rstrip())
        if match is None:
            raise CheckpointError(f"{path}: line {number} is {short(line)}, expected a SHA-256, two spaces and a name")
        name = (match["name"] or match["named"]).removeprefix("./")
        check_plain_name(f"{path}: line {number}", name)
        if name in found:
            raise CheckpointError(f"{path}: line {number}: {short(name)} appears twice, expected each file once")
        found[name] = (match["hash"] or match["hex"]).lower()
    if not found:
        raise CheckpointError(f"{path}: has no hashes, expected lines of a SHA-256, two spaces and a name")
    return found


def hub_hashes(folder: Path) -> dict[str, str]:
    """Hashes of a folder that huggingface_hub made, by file name; empty if it is none.

    In its cache a file is a link to a blob that is named by its hash; beside files in a folder of the user's own it
    keeps their etags. Large files have their SHA-256 (64 digits), small ones that of a Git blob (40 digits).
    """
    found: dict[str, str] = {}
    for name in list_folder(folder):
        path, kept = folder / name, folder / ".cache" / "huggingface" / "download" / f"{name}.metadata"
        if path.is_symlink():
            target = path.readlink()
            etag = target.name if target.parent.name == "blobs" else ""
        elif kept.is_file():
            lines = read_bounded(kept, 1 << 16).decode(errors="replace").splitlines()
            etag = lines[1].strip() if len(lines) > 1 else ""
        else:
            continue
        if re.fullmatch(r"[0-9a-f]{64}|[0-9a-f]{40}", etag):
            found[name] = etag
    return found


def hashed_nbytes(folder: Path, expected: Iterable[str]) -> int:
    """Bytes of those files that are there."""
    sizes = 0
    for name in expected:
        try:
            sizes += (folder / name).stat().st_size
        except OSError:
            continue
    return sizes


def check_hashes(folder: Path, expected: dict[str, str], threads: int, progress: Progress) -> Check:
    """Hash the files that `expected` names, several at once, and compare."""
    check = Check("hashes", f"{_many(len(expected), 'file')}, {hashed_nbytes(folder, expected) / 1e6:,.1f} MB")

    def hashed(item: tuple[str, str]) -> str | None:
        name, wanted = item
        try:
            found = _hash(folder / name, wanted, progress)
        except CheckpointError as error:
            return str(error)
        return None if found == wanted else f"{folder / name}: its hash is {found}, expected {wanted}"

    check.problems += [problem for problem in _each(threads, hashed, expected.items()) if problem is not None]
    return check


def _hash(path: Path, like: str, progress: Progress) -> str:
    """SHA-256 of a file, or the name that Git gives its content, whichever has as many digits as `like`."""
    file = MappedFile(path)
    if len(like) == 64:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    data = np.empty(_PIECE, np.uint8)
    for start in range(0, file.size, _PIECE):
        piece = data[: min(_PIECE, file.size - start)]
        file.read_into(piece.data, start)
        digest.update(piece.data)
        progress(len(piece))
    return digest.hexdigest()


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


# --------------------------------------------------------------------------------------------------------------------
# The whole model


def check_model(folder: Path, expected: dict[str, str] | None, bar: ProgressBar) -> tuple[list[Check], list[str]]:
    """All checks of a model folder or a .gguf file, and remarks that are no problems.

    expected: hashes of its files by name, None: they are not looked at.
    """
    checks, notes = (_of_gguf if folder.is_file() else _of_folder)(folder, bar)
    home = folder.parent if folder.is_file() else folder
    if expected is None:
        checks.append(Check("hashes", "not asked for: --hashes FILE or --hub", skipped=True))
    else:
        with bar("hashes", hashed_nbytes(home, expected), True) as advance:
            checks.append(check_hashes(home, expected, usable_threads(), advance))
    seen: set[str] = set()
    for check in checks:  # one cause may show in several checks
        check.problems = [problem for problem in check.problems if not (problem in seen or seen.add(problem))]
    return checks, [remark for remark in notes if remark not in seen]


def _of_folder(folder: Path, bar: ProgressBar) -> tuple[list[Check], list[str]]:
    headers, files = check_headers(folder)
    checks = [headers, check_index(folder, files), _numbers(Numbers.of_safetensors(files), bar)]
    notes: list[str] = []
    config, alone = None, False
    try:
        checkpoint = Headers(folder)
        alone = mtp.is_head(checkpoint.config)
    except CheckpointError as error:
        broken = any(check.problems for check in checks)
        checks.append(Check("model", "the files cannot be read together", [] if broken else [str(error)], broken))
    else:
        notes = [notice for notice in checkpoint.notices if "model.safetensors.index.json:" not in notice]
        quantization, shapes = Check("quantization"), Check("shapes")
        checks += [quantization, shapes]
        _check_quantization(checkpoint, quantization)
        config, more = _check_shapes(checkpoint, shapes)
        notes += more
    if alone and not (folder / "tokenizer.json").is_file():  # its trunk has one
        return [*checks, *(Check(name, "its trunk's", skipped=True) for name in ("tokenizer", "template"))], notes
    return [*checks, *_tokenizer_checks(lambda: Tokenizer.from_folder(folder), f"{folder}", config)], notes


def _of_gguf(path: Path, bar: ProgressBar) -> tuple[list[Check], list[str]]:
    try:
        file = GgufFile.open(path)
    except CheckpointError as error:
        return [Check("headers", problems=[str(error)])], []
    about = f"GGUF {file.version}, {len(file.tensors):,} tensors, {file.nbytes / 1e6:,.1f} MB"
    shapes = Check("shapes")
    checks = [Check("headers", about), _numbers(Numbers.of_gguf(file), bar), shapes]
    config, gguf = None, None
    try:
        gguf = GgufModel(file)
        config = gguf.read_config()
        check_sizes(config, f"{path}")
    except PenstockError as error:
        shapes.problems.append(str(error))
    else:
        _ask(gguf.family, config, FromGguf(gguf), shapes)
    checks += _tokenizer_checks(lambda: gguf_tokenizer(file), f"{path}", config)
    return checks, list(file.notices if gguf is None else gguf.notices)


def _numbers(numbers: Numbers, bar: ProgressBar) -> Check:
    with bar("numbers", numbers.nbytes, True) as advance:
        return numbers.check(usable_threads(), advance)


def _check_quantization(checkpoint: Headers, check: Check) -> None:
    """Every quantized module: its parts fit each other and the table of config.json, and the other way round."""
    formats: dict[Format, int] = {}
    paths = [name.removesuffix(".scales") for name in checkpoint.names if name.endswith(".scales")]
    for path in dict.fromkeys([*paths, *checkpoint.listed_modules]):
        try:
            format = checkpoint.quantization(path)
            if format is not None:
                checkpoint.tensor(path)
                formats[format] = formats.get(format, 0) + 1
        except CheckpointError as error:
            check.problems.append(str(error))
    for path in (name.removesuffix("_blocks") for name in checkpoint.names if name.endswith("_blocks")):
        try:
            format = checkpoint.tensor(path).format  # type: ignore[union-attr]
            formats[format] = formats.get(format, 0) + 1
        except CheckpointError as error:
            check.problems.append(str(error))
    found = (
        f"{count:,} of {format.bits} bits in groups of {format.group_size}"
        if format.mode == "affine"
        else f"{count:,} of {format.mode}"
        for format, count in sorted(formats.items())
    )
    check.about = ", ".join(found) or "no quantized tensors"


def _check_shapes(checkpoint: Headers, check: Check) -> tuple[Any, list[str]]:
    """Every tensor that the family asks for is there in its shape. The family's config, and remarks."""
    where = f"{checkpoint.path / 'config.json'}"
    try:
        alone = mtp.is_head(checkpoint.config)
        raw = mtp.trunk_config(checkpoint.config, where) if alone else checkpoint.config
        family = models.family_of(raw)
        config = family.read_config(raw)
        check_sizes(config, where, checkpoint)
        if alone:
            head = mtp.open_drafter(checkpoint.path, family, config, open_folder=lambda _: checkpoint)
            check.about = f"a head that drafts for {config.model_type}"
            _ask_head(family, config, head, check)
            return config, [] if check.problems else left_over(head.source, (), 1).remarks
        described = FromFiles.of(checkpoint, family, config)
    except PenstockError as error:
        check.problems.append(str(error))
        return None, []
    _ask(family, config, described, check)
    try:
        head = mtp.find(checkpoint, family, config, described.stored)
        if head is not None:
            check.about += ", and a head that drafts"
            _ask_head(family, config, head, check)
    except PenstockError as error:
        check.problems.append(str(error))
    layers = len(family.caches(config))
    return config, [] if check.problems else left_over(described.stored, family.skipped, layers).remarks


def _ask_head(family: AnyFamily, config: ModelConfig, head: mtp.HeadFiles, check: Check) -> None:
    recorder = Recorder(_Forgiving(FromFiles(head.source), check.problems), family)
    none = np.empty((0, 0), np.float32)
    mtp.read(recorder, family, config, none, none)
    check.about += f" with {len(recorder.weights):,} weights"


def _ask(family: AnyFamily, config: ModelConfig, described: Any, check: Check) -> None:
    recorder = Recorder(_Forgiving(described, check.problems), family)
    try:
        family.read_weights(recorder, config)
    except PenstockError as error:
        check.problems.append(str(error))
    layers = len(family.caches(config))
    check.about = f"{config.model_type}, {layers} layers, {len(recorder.weights):,} weights asked for"


class _Forgiving:
    """Formats from elsewhere; what is wrong with one is written down, and the next one is asked for."""

    def __init__(self, described: Any, problems: list[str]) -> None:
        self._described, self._problems = described, problems
        self.layout = described.layout

    def __contains__(self, path: str) -> bool:
        return path in self._described

    def found(self, path: str, shape: tuple[int, ...], vector: bool) -> Any:
        try:
            return self._described.found(path, shape, vector)
        except PenstockError as error:
            self._problems.append(str(error))
            return TensorFormat(32, None, "float32"), 0


def _tokenizer_checks(read: Any, where: str, config: Any) -> list[Check]:
    words, template = Check("tokenizer"), Check("template")
    try:
        tokenizer: Tokenizer = read()
        words.about = f"{tokenizer.vocab_size:,} tokens"
        tokenizer.decode(tokenizer.encode("Hello, world"))
        if config is not None:
            words.about += f" of {config.vocab_size:,}"
            remarks = tokens_beyond(where, tokenizer, config.vocab_size)
            words.about += "".join(remark.removeprefix(where) for remark in remarks)
    except PenstockError as error:
        words.problems.append(str(error))
        template.about, template.skipped = "there is no tokenizer", True
        return [words, template]
    if not tokenizer.has_chat_template:
        template.about, template.skipped = "there is none", True
        return [words, template]
    try:
        text = tokenizer.apply_chat_template(_MESSAGE)
        template.about = f"writes a message in {len(tokenizer.encode(text, add_special_tokens=False))} tokens"
    except PenstockError as error:
        template.problems.append(f"{where}: {error}" if where not in str(error) else str(error))
    return [words, template]
