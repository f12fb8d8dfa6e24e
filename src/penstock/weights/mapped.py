"""A file of weights, opened without trust and mapped into memory only when an array is asked for."""

import fcntl
import math
import mmap
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import CheckpointError
from penstock.weights.files import open_regular


class MappedFile:
    """An open regular file. It stays open as long as this object lives, the mapping as long as a view of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_regular(path)
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        self.size, self._changed = status.st_size, status.st_mtime_ns
        self._map: mmap.mmap | None = None
        self._leased = False

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes; raises CheckpointError as `read_into`."""
        out = bytearray(count)
        self.read_into(memoryview(out), start)
        return bytes(out)

    def read_into(self, out: memoryview, start: int) -> None:
        """Fill `out`; raises CheckpointError for a disk error and for a file that ends before."""
        done = 0
        while done < len(out):
            try:
                got = os.preadv(self._descriptor, [out[done:]], start + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read at byte {start + done}: {error.strerror}") from None
            if got == 0:
                raise CheckpointError(f"{self.path}: ends at byte {start + done}, expected {start + len(out)} or more")
            done += got

    def check_size(self) -> None:
        """Raises CheckpointError for a file whose size changed since it was opened."""
        # A page behind the end of a shortened file is not an error but the death of the process (SIGBUS).
        if (size := os.fstat(self._descriptor).st_size) != self.size:
            raise CheckpointError(f"{self.path}: has {size} bytes, expected the {self.size} it had when it was opened")

    def check(self) -> None:
        """Raises CheckpointError for a file that was written to since it was opened, if its time of change tells.

        And for one with a lease that another program has opened for writing: it may write from now on.
        """
        if self._leased and fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
            self._leased = False
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            raise CheckpointError(f"{self.path}: another program opened it for writing, expected it to stay as it was")
        self.check_size()
        if os.fstat(self._descriptor).st_mtime_ns != self._changed:
            raise CheckpointError(f"{self.path}: was changed while it is in use, expected it as it was when opened")

    def lease(self) -> bool:
        """Ask the system to hold off programs that want to write to the file or shorten it, until `check` has noticed.

        Linux does so for files of one's own (or root's) on most local file systems, and for 45 seconds by default
        (/proc/sys/fs/lease-break-time). False where it does not.
        """
        if not hasattr(fcntl, "F_SETLEASE"):
            return False
        try:
            # the signal that announces a writer would end the process; this one is ignored by default
            fcntl.fcntl(self._descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            return False
        self._leased = True
        return True

    def view(self, start: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Bytes of the file as a read-only array; the caller has checked that they lie inside of it.

        Raises CheckpointError for a file whose size changed since it was opened.
        """
        self.check_size()
        if 0 in shape:
            array = np.empty(shape, dtype)
            array.flags.writeable = False
            return array
        if self._map is None:
            try:
                self._map = mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{self.path}: cannot be mapped into memory: {error}") from None
        return np.ndarray(shape, dtype, self._map, start)


def is_mapped(array: np.ndarray) -> bool:
    """Whether an array lies in a mapped file, or in other memory that a map gave."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap)


def in_memory(array: np.ndarray) -> np.ndarray:
    """A read-only copy in memory of its own."""
    copy = pages(array.shape, array.dtype)
    np.copyto(copy, array)
    copy.flags.writeable = False
    return copy


def pages(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Zeros from the start of a page on, where direct reads need no copy; a page is there once it is written.

    Large pages, where the system has them: a direct read into small ones costs it three times the work.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize), flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)
