"""Experts read from files by threads, straight into memory that the caller gives.

Three ways of reading, chosen by `io`:

pagecache  `preadv` through the system's page cache: what was read before comes from memory while it is free.
direct     `preadv` past it (O_DIRECT) in whole blocks: less work per byte, and nothing else is pushed out of memory.
           Blocks land in the caller's memory where file and memory are aligned alike, else in a buffer of the thread.
mmap       copies from a memory map. The size of the file is checked before each copy, but a file that becomes shorter
           during one, or a disk that fails, still kills the process (SIGBUS): the other two report an error instead.

`auto` is pagecache where all experts stay in memory once they were read, else the faster of pagecache and direct.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

import numpy as np

from penstock.errors import BackendError, CheckpointError, InvalidArgument
from penstock.experts import disk
from penstock.experts.layout import BLOCK, HASH, ROWS, Layer, StridedExtents, files, record_hash
from penstock.weights.files import open_regular, short
from penstock.weights.gguf import deal_blocks

IO = ("auto", "direct", "pagecache", "mmap")
THREADS = 8  # enough for a disk that is fast only with several requests at once
BOUNCE = 2 << 20  # bytes of a thread's buffer for blocks that cannot land where they belong

_GAP = 4096  # bytes between two arrays that are read and thrown away rather than jumped over
_PIECES = 256  # arrays in one call; the system takes 1024
_PAUSES = (0.01, 0.1)  # seconds before a read that failed is tried again
_AHEAD = 512 << 10  # bytes that the system is asked to fetch in one go; of more it may take only a part
_SAMPLE = 512  # experts read in a measurement, at most

preadv = os.preadv


class Counters(NamedTuple):
    """What a reader did so far."""

    reads: int  # experts
    nbytes: int  # of their arrays
    seconds: float  # in reads, added up over the threads


class ExpertReader:
    """Reads experts of some layers, by threads of its own. The files stay open until `close`.

    owned: the experts of each layer that are read in measurements; None: all.

    An expert whose record has a hash (a packed file's) is compared with it when it is first read.
    io: one of IO, afterwards the way that was chosen. threads: how many reads run at the same time.
    Raises CheckpointError for a file that cannot be opened, or not in the way that `io` demands.
    """

    def __init__(
        self, layers: Sequence[Layer], io: str = "auto", threads: int | None = None, owned: Sequence[int] | None = None
    ) -> None:
        if io not in IO:
            raise InvalidArgument(f"expert io is {io!r}, expected one of {', '.join(IO)}")
        if threads is not None and threads < 1:
            raise InvalidArgument(f"reading threads are {threads}, expected at least 1")
        self._layers, self._owned = list(layers), owned
        self._sizes = [[spec.nbytes for spec in layer.format.specs] for layer in self._layers]
        self._payload = [sum(sizes) for sizes in self._sizes]
        self._dealt = [_dealt(layer) for layer in self._layers]
        self._undealt = threading.local()  # a thread's memory for what is dealt to several arrays, by its bytes
        self._compared = [bytearray(layer.count) for layer in self._layers]  # with the hash, by expert
        self._threads = threads or THREADS
        self._lock = threading.Lock()
        self._reads, self._nbytes, self._seconds = 0, 0, 0.0
        self._files: dict[Path, _File] = {}
        self._pid, self._pool = os.getpid(), ThreadPoolExecutor(self._threads, "penstock-experts")
        self._release = weakref.finalize(self, _released, self._pid, self._pool, self._files)
        try:
            for path in files(self._layers):
                self._files[path] = _File(path)
            self._even = [self._evenly(layer) for layer in self._layers]
            self.io = self._chosen() if io == "auto" else io
            self._way = self._way_of(self.io)
        except BaseException:
            self._release()
            raise

    def __enter__(self) -> ExpertReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def submit(self, layer: int, expert: int, into: Sequence[memoryview]) -> Future[None]:
        """Read the arrays of an expert, in the order of its format, into writable bytes of the same sizes.

        The future raises CheckpointError if a file ends early, cannot be read after three tries or has a damaged
        record; other reads go on.
        Raises InvalidArgument for an expert or sizes that the layer does not have, BackendError in a forked process.
        """
        self._check(layer, expert, into)
        try:
            return self._pool.submit(self._read, layer, expert, into)
        except RuntimeError as error:
            raise BackendError(f"experts cannot be read any more: {error}") from None

    def read(self, layer: int, expert: int, into: Sequence[memoryview]) -> None:
        """The same, now and in this thread."""
        self._check(layer, expert, into)
        self._read(layer, expert, into)

    def check(self) -> None:
        """Raises CheckpointError if a file was shortened, written or replaced since it was opened. Costs microseconds.

        A file that was only removed is no error: it can be read as long as it is open.
        """
        for file in self._files.values():
            file.check()

    @property
    def counters(self) -> Counters:
        with self._lock:
            return Counters(self._reads, self._nbytes, self._seconds)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of cold experts read in this reader's way, measured when it is first asked for."""
        self._check_open()
        return self._rate(self.io, self._way)

    def close(self) -> None:
        """Cancel reads that have not begun, wait for the others, end the threads and close the files."""
        if os.getpid() == self._pid:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._release()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise BackendError(
                "experts are read by threads that a forked process does not have; start processes with the spawn method"
            )
        if not self._release.alive:
            raise BackendError("experts cannot be read any more: their reader is closed")

    def _check(self, layer: int, expert: int, into: Sequence[memoryview]) -> None:
        self._check_open()
        if not 0 <= layer < len(self._layers):
            raise InvalidArgument(f"layer is {layer}, expected 0 to {len(self._layers) - 1}")
        name, count = self._layers[layer].name, self._layers[layer].count
        if not 0 <= expert < count:
            raise InvalidArgument(f"{name}: expert is {expert}, expected 0 to {count - 1}")
        if (sizes := [len(view) for view in into]) != self._sizes[layer]:
            raise InvalidArgument(f"{name}: memory for an expert has {sizes} bytes, expected {self._sizes[layer]}")

    def _evenly(self, layer: Layer) -> list[_Run] | None:
        """The first expert of a layer, if every other one lies as that does, so many steps behind it; else None."""
        steps = [part.extents.step for part in layer.parts if isinstance(part.extents, StridedExtents)]
        return self._joined(layer, 0, steps) if len(steps) == len(layer.parts) else None

    def _joined(self, layer: Layer, expert: int, steps: Sequence[int]) -> list[_Run]:
        """The arrays of an expert, those that are neighbours in a file, and in step, together."""
        runs: list[_Run] = []
        extents = layer.extents(expert)
        for part in sorted(range(len(extents)), key=lambda part: (str(extents[part].path), extents[part].start)):
            path, start, nbytes = extents[part].path, extents[part].start, extents[part].nbytes
            if nbytes == 0 or layer.parts[part].share > 0:  # the latter comes with the first share
                continue
            file, step, piece = self._files[path], steps[part], _Piece(part, start, start + nbytes)
            if not (runs and runs[-1].takes(file, step, piece)):
                runs.append(_Run(file, step, [piece], piece.start, piece.stop))
        return runs

    def _runs(self, layer: int, expert: int) -> list[_Run]:
        even = self._even[layer]
        if even is None:
            return self._joined(self._layers[layer], expert, [0] * len(self._sizes[layer]))
        return [run.of(expert) for run in even]

    def _read(self, layer: int, expert: int, into: Sequence[memoryview]) -> None:
        start = time.perf_counter()
        self._fetch(self._way, self._runs(layer, expert), layer, expert, into)
        self._compare(layer, expert, into)
        seconds = time.perf_counter() - start
        with self._lock:
            self._reads += 1
            self._nbytes += self._payload[layer]
            self._seconds += seconds

    def _fetch(self, way: _Way, runs: list[_Run], layer: int, expert: int, into: Sequence[memoryview]) -> None:
        """Read the arrays of an expert; those that are dealt by way of memory that has all of them."""
        dealt, whole = self._dealt[layer], list(into)
        for n, one in enumerate(dealt):
            whole[one.parts[0]] = self._memory(n, one.nbytes)
        for run in runs:
            way.read(run, whole)
        for one in dealt:
            data, arrays = _bytes(whole[one.parts[0]]), [_bytes(into[part]) for part in one.parts]
            if one.how != ROWS:
                if fault := deal_blocks(one.how, data, *arrays):
                    extent = self._layers[layer].parts[one.parts[0]].extents[expert]
                    where = f"expert {expert} of {short(self._layers[layer].name)}, at byte {extent.start},"
                    raise CheckpointError(f"{extent.path}: {where} has {fault}")
                continue
            both = data.reshape(self._layers[layer].format.specs[one.parts[0]].shape[0], 2, -1)
            for turn, array in enumerate(arrays):
                np.copyto(array.reshape(len(both), -1), both[:, turn])

    def _memory(self, number: int, nbytes: int) -> memoryview:
        name = f"{number} {nbytes}"
        if not hasattr(self._undealt, name):
            setattr(self._undealt, name, memoryview(mmap.mmap(-1, nbytes)))
        return getattr(self._undealt, name)

    def _compare(self, layer: int, expert: int, into: Sequence[memoryview]) -> None:
        """Raises CheckpointError for a record that is not what its hash says; each is looked at once."""
        hashes = self._layers[layer].hashes
        if hashes is None or self._compared[layer][expert]:
            return
        if record_hash(self._layers[layer].format, into) != hashes[expert * HASH : (expert + 1) * HASH]:
            raise damaged(self._layers[layer].extents(expert)[0].path, self._layers[layer].name, expert)
        self._compared[layer][expert] = True

    def _way_of(self, io: str) -> _Way:
        if io == "pagecache":
            return _PageCache()
        if io == "mmap":
            return _Mapped()
        for file in self._files.values():
            file.open_direct()
        return _Direct()

    def _chosen(self) -> str:
        # all experts, whoever owns them: ranks of one machine share its page cache
        if not self._files or disk.stays_in_memory(sum(layer.nbytes for layer in self._layers)):
            return "pagecache"
        try:
            direct = self._rate("direct", self._way_of("direct"))
        except CheckpointError:  # the file system does not do it
            return "pagecache"
        return "direct" if direct >= self._rate("pagecache", _PageCache()) else "pagecache"

    def _rate(self, io: str, way: _Way) -> float:
        """Bytes per second of reading experts that are not in the page cache, as far as they can be dropped from it."""
        sizes = [range(layer.count) if self._owned is None else self._owned for layer in self._layers]
        experts = [(n, expert) for n, some in enumerate(sizes) for expert in some]
        random.Random(f"{io} {len(experts)}").shuffle(experts)
        experts = experts[:_SAMPLE]
        if not experts:
            return 0.0
        record = max(1, *(layer.format.nbytes for layer in self._layers))
        spaces = threading.local()

        def read(number: int) -> int:
            layer, expert = experts[number]
            if not hasattr(spaces, "record"):
                spaces.record = memoryview(mmap.mmap(-1, record))
            runs, into = self._runs(layer, expert), self._layers[layer].format.views(spaces.record)
            for run in runs:
                run.file.drop(run.start, run.stop)
            self._fetch(way, runs, layer, expert, into)
            return self._payload[layer]

        devices = tuple(sorted({file.status.st_dev for file in self._files.values()}))
        size = self._payload[0] // max(1, len(self._runs(0, 0)))  # of a read, about
        return disk.bandwidth((io, devices, size.bit_length()), read, len(experts), self._threads)


class _File:
    """An open file, and how it was when it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = open_regular(path)
        self.direct: int | None = None
        self._map: mmap.mmap | None = None
        self._lock = threading.Lock()
        self.status = os.fstat(self.descriptor)

    def open_direct(self) -> None:
        """Open it past the page cache, too. Raises CheckpointError if the file system does not do that."""
        if self.direct is not None:
            return
        try:
            flag = getattr(os, "O_DIRECT", None)
            if flag is None:
                raise OSError(errno.EINVAL, "this system has no O_DIRECT")
            descriptor = os.open(self.path, os.O_RDONLY | flag)
            try:
                with mmap.mmap(-1, BLOCK) as block:
                    preadv(descriptor, [block], 0)
                if not os.path.samestat(os.fstat(descriptor), self.status):
                    self._changed("was replaced")
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: direct reads are refused here ({error.strerror}), expected expert io auto or pagecache"
            ) from None
        self.direct = descriptor

    def check(self) -> None:
        try:
            status = os.stat(self.path)  # noqa: PTH116  a third of the time of Path.stat
        except OSError:
            status = os.fstat(self.descriptor)
        before = self.status
        if (status.st_ino, status.st_dev) != (before.st_ino, before.st_dev):
            self._changed("was replaced")
        if status.st_size != before.st_size:
            self._changed(f"has {status.st_size} bytes, expected the {before.st_size} it had")
        if status.st_mtime_ns != before.st_mtime_ns:
            self._changed("was written")

    def check_size(self) -> None:
        """Raises CheckpointError for a file whose size changed: the map of a shorter one ends in SIGBUS."""
        if (size := os.fstat(self.descriptor).st_size) != self.status.st_size:
            self._changed(f"has {size} bytes, expected the {self.status.st_size} it had")

    def mapped(self) -> mmap.mmap:
        with self._lock:
            if self._map is None:
                try:
                    self._map = mmap.mmap(self.descriptor, self.status.st_size, access=mmap.ACCESS_READ)
                except (OSError, ValueError) as error:
                    raise CheckpointError(f"{self.path}: cannot be mapped into memory: {error}") from None
                if hasattr(mmap, "MADV_RANDOM"):  # what is needed is asked for, nothing around it
                    self._map.madvise(mmap.MADV_RANDOM)
            return self._map

    def fetch(self, start: int, stop: int) -> None:
        """Begin to read bytes into the page cache."""
        if hasattr(os, "posix_fadvise"):
            for at in range(start, stop, _AHEAD):
                os.posix_fadvise(self.descriptor, at, min(_AHEAD, stop - at), os.POSIX_FADV_WILLNEED)

    def drop(self, start: int, stop: int) -> None:
        """Take bytes out of the page cache, if the system does that."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._map = None  # unmapped with its last view
        os.close(self.descriptor)
        if self.direct is not None:
            os.close(self.direct)

    def _changed(self, found: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {found} since it was opened; load the model again")


class _Piece(NamedTuple):
    """One array of an expert: its number in the format, and its bytes [start, stop) in the file."""

    part: int
    start: int
    stop: int


@dataclass(slots=True)
class _Run:
    """Neighbours in a file, in the order in which they lie there; step: bytes to those of the next expert."""

    file: _File
    step: int
    pieces: list[_Piece]
    start: int
    stop: int

    def takes(self, file: _File, step: int, piece: _Piece) -> bool:
        """Add a piece if it is a neighbour."""
        near = 0 <= piece.start - self.stop <= _GAP and len(self.pieces) < _PIECES
        if not near or file is not self.file or step != self.step:
            return False
        self.pieces.append(piece)
        self.stop = piece.stop
        return True

    def of(self, expert: int) -> _Run:
        """The same of another expert; this is the first."""
        by = expert * self.step
        pieces = [_Piece(part, start + by, stop + by) for part, start, stop in self.pieces]
        return _Run(self.file, self.step, pieces, self.start + by, self.stop + by)


class _Way(Protocol):
    """How bytes come from a file."""

    def read(self, run: _Run, into: Sequence[memoryview]) -> None: ...


class _PageCache:
    def __init__(self) -> None:
        self._scrap = memoryview(bytearray(_GAP))  # what lies between arrays; all threads write to it, none reads

    def read(self, run: _Run, into: Sequence[memoryview]) -> None:
        buffers, at = [], run.start
        for part, start, stop in run.pieces:
            if at != start:
                buffers.append(self._scrap[: start - at])
            buffers.append(into[part])
            at = stop
        _fill(run.file, buffers, run.start, run.stop)


class _Direct:
    def __init__(self) -> None:
        self._threads = threading.local()
        self._page_cache = _PageCache()
        self._lands = True  # blocks may be read into the caller's memory

    def read(self, run: _Run, into: Sequence[memoryview]) -> None:
        try:
            whole = self._covered(run, into, self._lands)
        except OSError as error:
            whole = False
            if error.errno in (errno.EFAULT, errno.EINVAL):  # memory of a device driver may not take blocks from a disk
                self._lands = False
        if not whole:  # an interruption, an error or the end of the file: the plain way reads on or says what it is
            self._page_cache.read(run, into)

    def _covered(self, run: _Run, into: Sequence[memoryview], lands: bool) -> bool:
        """Read the blocks that cover a run; False if there were fewer bytes than it has."""
        landing = self._landing(run, into) if lands else []
        bounce = self._bounce()
        at, end = run.start // BLOCK * BLOCK, -(-run.stop // BLOCK) * BLOCK
        first, buffers, kept, used = at, [], [], 0
        for low, high, blocks in (*landing, (end, end, None)):
            while at < low:
                if used == BOUNCE:
                    if not self._call(run, into, first, at, buffers, kept):
                        return False
                    first, buffers, kept, used = at, [], [], 0
                count = min(low - at, BOUNCE - used)
                buffers.append(bounce.data[used : used + count])
                kept.append((at, bounce[used : used + count]))
                at, used = at + count, used + count
            if blocks is not None:
                buffers.append(blocks)
                at = high
        return self._call(run, into, first, at, buffers, kept)

    def _landing(self, run: _Run, into: Sequence[memoryview]) -> list[tuple[int, int, memoryview]]:
        """Whole blocks inside of one array that are aligned in memory as in the file: first and last byte, memory."""
        found = []
        for part, start, stop in run.pieces:
            low, high = -(-start // BLOCK) * BLOCK, stop // BLOCK * BLOCK
            if low < high and (_address(into[part]) - start) % BLOCK == 0:
                found.append((low, high, into[part][low - start : high - start]))
        return found

    def _call(
        self,
        run: _Run,
        into: Sequence[memoryview],
        start: int,
        stop: int,
        buffers: list[memoryview],
        kept: list[tuple[int, np.ndarray]],
    ) -> bool:
        """One call: blocks from `start` to `stop`; those in `kept` are copied to the arrays that they belong to."""
        assert run.file.direct is not None
        if preadv(run.file.direct, buffers, start) < min(stop, run.stop) - start:
            return False
        for at, blocks in kept:
            for part, first, last in run.pieces:
                low, high = max(at, first), min(at + len(blocks), last)
                if low < high:
                    np.copyto(_bytes(into[part])[low - first : high - first], blocks[low - at : high - at])
        return True

    def _bounce(self) -> np.ndarray:
        """Aligned memory of this thread."""
        try:
            return self._threads.bounce
        except AttributeError:
            self._threads.bounce = np.frombuffer(mmap.mmap(-1, BOUNCE), np.uint8)
            return self._threads.bounce


class _Mapped:
    def read(self, run: _Run, into: Sequence[memoryview]) -> None:
        file = run.file
        file.check_size()
        if run.stop > file.status.st_size:
            _ends(file, file.status.st_size, run.stop)
        map = file.mapped()
        file.fetch(run.start, run.stop)
        for part, start, stop in run.pieces:
            np.copyto(_bytes(into[part]), np.frombuffer(map, np.uint8, stop - start, start))
        if hasattr(mmap, "MADV_DONTNEED"):  # the pages stay in the page cache, but do not count as this process's
            start = run.start // mmap.PAGESIZE * mmap.PAGESIZE
            map.madvise(mmap.MADV_DONTNEED, start, run.stop - start)


class _Dealt(NamedTuple):
    """Arrays whose bytes come out of the same extents: how, their numbers by share, and bytes of an extent."""

    how: str
    parts: tuple[int, ...]
    nbytes: int


def _dealt(layer: Layer) -> list[_Dealt]:
    shares: dict[int, list[int]] = {}
    for n, part in enumerate(layer.parts):
        if part.dealt is not None:
            shares.setdefault(id(part.extents), []).append(n)
    found = []
    for numbers in shares.values():
        first, *_ = parts = tuple(sorted(numbers, key=lambda n: layer.parts[n].share))
        how, extents = layer.parts[first].dealt, layer.parts[first].extents
        assert how is not None
        found.append(_Dealt(how, parts, extents[0].nbytes))
    return found


def damaged(path: Path, layer: str, expert: int) -> CheckpointError:
    return CheckpointError(f"{path}: expert {expert} of {short(layer)} is damaged; run `penstock pack` with --force")


def _fill(file: _File, buffers: list[memoryview], start: int, stop: int) -> None:
    """Read the bytes [start, stop). Raises CheckpointError if the file ends before or an error does not go away."""
    failed = 0
    while True:
        try:
            got = preadv(file.descriptor, buffers, start)
        except InterruptedError:
            continue
        except OSError as error:
            if failed == len(_PAUSES):
                raise CheckpointError(f"{file.path}: cannot be read at byte {start}: {error.strerror}") from None
            time.sleep(_PAUSES[failed])
            failed += 1
            continue
        start += got
        if start == stop:
            return
        if got == 0:
            _ends(file, start, stop)
        buffers = _rest(buffers, got)


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of buffers whose first bytes are filled."""
    for n, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[n + 1 :]]
        done -= len(buffer)
    return []


def _ends(file: _File, at: int, stop: int) -> NoReturn:
    raise CheckpointError(f"{file.path}: ends at byte {at}, expected {stop} or more: was it shortened?")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _bytes(view: memoryview) -> np.ndarray:
    return np.frombuffer(view, np.uint8)


def _released(pid: int, pool: ThreadPoolExecutor, files: dict[Path, _File]) -> None:
    """Let go of everything, without waiting: this may run in one of the threads."""
    if os.getpid() == pid:  # a forked process has the threads' locks, but not the threads
        pool.shutdown(wait=False)
    for file in files.values():
        file.close()
    files.clear()
