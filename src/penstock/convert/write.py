"""Writing a model folder: tensors row by row into safetensors files, in a folder beside the target that is renamed.

Next to the target `NAME` lies `NAME.converting` while the work goes on. Its journal says what is made there and which
files are finished, so that the same command goes on after an interruption. Nothing half-written has the final name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.convert.rows import Rows, row_bytes, row_count
from penstock.dtypes import dtype_name
from penstock.errors import InvalidArgument, PenstockError
from penstock.units import amount
from penstock.weights.files import open_regular, read_bounded, short
from penstock.weights.safetensors import DTYPES

SHARD_BYTES = 5 << 30  # of a file, as mlx-lm cuts them
EXTRA = "mtp.safetensors"  # layers that mlx-lm does not know: it reads files called model… alone
CHUNK = 4 << 20  # bytes of rows that are read, worked on and written at once

_JOURNAL = "journal.jsonl"
_JOURNAL_LIMIT = 64 << 20
_ALIGNMENT = 64  # bytes on which a file's tensors start, as long as their sizes allow it
_AHEAD = 2  # chunks that are read while one is worked on
_CODES = {dtype_name(dtype): code for code, dtype in DTYPES.items() if not code.startswith("F8")}


class WriteError(PenstockError):
    """A file or folder that cannot be written."""


class Tensor(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


Work = Callable[[int, np.ndarray], Sequence[np.ndarray]]


@dataclass(frozen=True)
class Task:
    """Rows to read, the tensors that become of them, each of as many rows, and how: `work(first row, rows)`."""

    rows: Rows
    tensors: tuple[Tensor, ...]
    work: Work

    @property
    def nbytes(self) -> int:
        """Bytes to be written."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def source_nbytes(self) -> int:
        return row_count(self.rows) * row_bytes(self.rows)


class Shard(NamedTuple):
    """A file and what goes into it."""

    file: str
    tasks: tuple[Task, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for task in self.tasks for tensor in task.tensors]


def split_shards(tasks: Sequence[Task], extra: Sequence[Task] = (), limit: int = SHARD_BYTES) -> list[Shard]:
    """Files of at most `limit` bytes (a larger task has one of its own), the extra tasks apart."""
    groups: list[list[Task]] = []
    size = 0
    for task in tasks:
        if not groups or size + task.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(task)
        size += task.nbytes
    count = len(groups)
    names = (
        [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)] if count > 1 else ["model.safetensors"]
    )
    shards = [Shard(name, tuple(group)) for name, group in zip(names, groups, strict=True)]
    return [*shards, Shard(EXTRA, tuple(extra))] if extra else shards


def index(shards: Sequence[Shard], parameters: int) -> dict[str, Any]:
    """model.safetensors.index.json."""
    file_of = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    total = sum(task.nbytes for shard in shards for task in shard.tasks)
    return {
        "metadata": {"total_size": total, "total_parameters": parameters},
        "weight_map": {name: file_of[name] for name in sorted(file_of)},
    }


class Workshop:
    """The folder in which a model is made. As a context manager: made or taken up on entering, kept or removed on the
    way out, renamed by `finish`.

    settings: everything that decides what is written; a folder left by other settings is refused. Raises
    InvalidArgument for a target that exists, WriteError for what cannot be written.
    """

    def __init__(self, target: Path, settings: Mapping[str, Any]) -> None:
        self.target = target
        self.folder = target.with_name(f"{target.name}.converting")
        self.settings = dict(settings)
        self.finished: dict[str, int] = {}
        self._lock: int | None = None
        self._own = False  # locked, and begun with these settings
        self._made: list[Path] = []

    def __enter__(self) -> Workshop:
        check_target(self.target)
        with _writing(self.folder):
            for parent in reversed(self.folder.parents):
                if not parent.exists():
                    parent.mkdir()
                    self._made.append(parent)
            if not self.folder.exists():
                self.folder.mkdir()
                self._made.append(self.folder)
        try:
            self._take_up()
        except BaseException:
            self._leave()
            raise
        return self

    def _take_up(self) -> None:
        """Lock the journal, and read what it says or begin it."""
        path = self.folder / _JOURNAL
        if self.folder not in self._made and not path.exists() and any(self.folder.iterdir()):
            raise InvalidArgument(f"{self.folder}: is in the way and was not left by convert, expected no such folder")
        with _writing(path):
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidArgument(
                f"{self.folder}: another convert is at work there, expected it to end first"
            ) from None
        lines = list(_entries(read_bounded(path, _JOURNAL_LIMIT)))
        if not lines:
            self._own = True
            self._note({"settings": self.settings})
            return
        self._compare(lines[0].get("settings"))
        self._own = True
        for line in lines[1:]:
            name, size = line.get("file"), line.get("bytes")
            path = self.folder / str(name)
            if isinstance(size, int) and path.is_file() and _size(path) == size:
                self.finished[path.name] = size

    def _compare(self, before: Any) -> None:
        if not isinstance(before, dict):
            raise InvalidArgument(f"{self.folder}: its journal is damaged, expected it whole: delete the folder")
        differ = [key for key in {**before, **self.settings} if before.get(key) != self.settings.get(key)]
        if differ:
            found = ", ".join(f"{key} {short(before.get(key))} (now {short(self.settings.get(key))})" for key in differ)
            raise InvalidArgument(
                f"{self.folder}: was begun with {found}; expected the same to go on, or delete the folder to start anew"
            )

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        """Give up the lock; remove a folder in which nothing is finished, and folders that were made for it."""
        if self._own and not self.finished and self.folder.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                folder.rmdir()  # those that are not empty stay

    def _note(self, entry: Mapping[str, Any]) -> None:
        assert self._lock is not None
        with _writing(self.folder / _JOURNAL):
            _write_all(self._lock, json.dumps(entry).encode() + b"\n", None)
            os.fsync(self._lock)

    def write_shard(self, shard: Shard, progress: Callable[[int], None]) -> None:
        """Write a file, unless an earlier run has finished it. `progress` is called with the bytes that were read."""
        if shard.file in self.finished:
            progress(sum(task.source_nbytes for task in shard.tasks))
            return
        path = self.folder / f"{shard.file}.partial"
        try:
            with _writing(path), SafetensorsWriter(path, shard.tensors) as out:
                through(shard.tasks, out.write, progress)
            with _writing(path):
                path.rename(self.folder / shard.file)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        size = _size(self.folder / shard.file)
        self._note({"file": shard.file, "bytes": size})
        self.finished[shard.file] = size

    def write_json(self, name: str, value: Any) -> None:
        """A small file, as mlx-lm writes its own: indented by 4."""
        with _writing(self.folder / name):
            (self.folder / name).write_text(json.dumps(value, indent=4) + "\n", encoding="utf-8")

    def write_text(self, name: str, text: str) -> None:
        with _writing(self.folder / name):
            (self.folder / name).write_text(text, encoding="utf-8")

    def copy(self, source: Path) -> None:
        """A file as it is. Raises CheckpointError for anything but a regular file."""
        target = self.folder / source.name
        with os.fdopen(open_regular(source), "rb") as file, _writing(target), target.open("wb") as out:
            shutil.copyfileobj(file, out)

    def finish(self) -> None:
        """Give the folder its final name."""
        check_target(self.target)
        with _writing(self.target):
            (self.folder / _JOURNAL).unlink()
            self.folder.rename(self.target)
        self._made.clear()


def check_target(target: Path) -> None:
    """Raises InvalidArgument unless there is nothing of that name and a folder could have it."""
    if target.name in ("", "..") or target == Path():
        raise InvalidArgument(f"mlx-path is {short(str(target))}, expected the name of a new folder")
    if os.path.lexists(target):
        raise InvalidArgument(f"{target}: exists already, expected a new path (convert replaces nothing)")


def check_room(folder: Path, nbytes: int) -> None:
    """Raises WriteError if the disk of a folder, or of what of its path exists, has less than that left."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise WriteError(f"{folder}: has {amount(free)} free, expected {amount(nbytes)} for the model")


def through(tasks: Sequence[Task], write: Callable[[Tensor, int, np.ndarray], None], progress: Any) -> None:
    """Rows of all tasks, in chunks: the next ones are read and the last ones written while one is worked on."""
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        ahead: deque[tuple[Task, int, Future[np.ndarray]]] = deque()
        behind: deque[Future[None]] = deque()

        def step() -> None:
            task, start, future = ahead.popleft()
            rows = future.result()
            done = task.work(start, rows)
            while len(behind) >= _AHEAD:
                behind.popleft().result()
            behind.append(writer.submit(_write_chunk, write, task.tensors, start, done))
            progress(len(rows) * row_bytes(task.rows))

        try:
            for task in tasks:
                for start, stop in chunks(task.rows):
                    ahead.append((task, start, reader.submit(task.rows.read, start, stop)))
                    if len(ahead) > _AHEAD:
                        step()
            while ahead:
                step()
            while behind:
                behind.popleft().result()
        except BaseException:
            for *_, future in ahead:
                future.cancel()
            raise


def chunks(rows: Rows) -> Iterator[tuple[int, int]]:
    """Ranges of rows of about CHUNK bytes, at least one row each."""
    count, step = row_count(rows), max(1, CHUNK // max(1, row_bytes(rows)))
    for start in range(0, count, step):
        yield start, min(count, start + step)


def _write_chunk(
    write: Callable[[Tensor, int, np.ndarray], None],
    tensors: Sequence[Tensor],
    start: int,
    arrays: Sequence[np.ndarray],
) -> None:
    for tensor, array in zip(tensors, arrays, strict=True):
        write(tensor, start, array)


class SafetensorsWriter:
    """A safetensors file of known tensors, whose rows come in any order. On leaving it is flushed to the disk."""

    def __init__(self, path: Path, tensors: Sequence[Tensor]) -> None:
        self._starts: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
        end = 0
        # Sizes that keep the alignment come first, in order; of the others those of wide numbers, which need it more.
        ordered = sorted(tensors, key=lambda t: -t.dtype.itemsize if t.nbytes % _ALIGNMENT else -_ALIGNMENT)
        for tensor in ordered:
            entry = {"dtype": _CODES[dtype_name(tensor.dtype)], "shape": list(tensor.shape)}
            header[tensor.name] = entry | {"data_offsets": [end, end + tensor.nbytes]}
            self._starts[tensor.name] = end
            end += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        self._data = 8 + len(text)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _write_all(self._file, len(text).to_bytes(8, "little") + text, 0)
            os.ftruncate(self._file, self._data + end)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            if kind is None:
                os.fsync(self._file)
        finally:
            os.close(self._file)

    def write(self, tensor: Tensor, row: int, rows: np.ndarray) -> None:
        """Rows [row, row + len(rows)) of a tensor."""
        assert rows.dtype == tensor.dtype and rows.flags.c_contiguous
        place = self._data + self._starts[tensor.name] + row * (rows.nbytes // max(1, len(rows)))
        _write_all(self._file, rows.reshape(-1).view(np.uint8).data, place)


def _write_all(descriptor: int, data: bytes | memoryview, place: int | None) -> None:
    """All bytes, from a place of the file on or at its end."""
    left = memoryview(data)
    while left:
        count = os.write(descriptor, left) if place is None else os.pwrite(descriptor, left, place)
        place = None if place is None else place + count
        left = left[count:]


def _entries(data: bytes) -> Iterator[dict[str, Any]]:
    """The objects of a journal up to the first line that was not written to its end."""
    for line in data.splitlines(keepends=True):
        try:
            entry = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            return
        yield entry


def _size(path: Path) -> int:
    return path.stat().st_size


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """OSErrors of the block as one WriteError that names the path."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WriteError(f"{path}: the disk is full; free some space, and the same command goes on") from None
        raise WriteError(f"{path}: cannot be written: {error.strerror or error}") from None
