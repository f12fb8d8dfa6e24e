"""How fast memory can be read here: the yardstick of `penstock bench`, and what predictions are made with.

Host memory is read by a process of its own, started from this very file, so that its array counts neither as the
model's memory nor for the model's caches. That process needs NumPy alone. Other devices copy within their memory.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from penstock.ops.device import Device

BYTES = 1 << 30  # far larger than any cache
H200 = 4260.0  # GB/s of a copy, as measured there: what is assumed for a GPU where there is none
_ROUNDS = 3


def bandwidth_of(name: str, given: float | None) -> tuple[float, str]:
    """GB/s of the memory of a device, and how it is known. Raises BackendError where it cannot be measured."""
    from penstock.backends.cuda.runtime.features import unusable
    from penstock.errors import BackendError
    from penstock.ops.device import device_for, device_type

    if given is not None:
        return given, "as given"
    rate, host = None, device_type(name).host_memory
    if host or not unusable():
        device = device_for(name)
        with bandwidth_meter(device, device.threads()) as measure:
            rate = measure()
    if rate is not None:
        return rate, "a plain read here" if host else "a copy on this GPU"
    if host:
        raise BackendError("kernels: the bandwidth could not be measured, expected --bandwidth")
    return H200, "a copy on an H200, there is no GPU here"


@contextmanager
def bandwidth_meter(device: Device, threads: int) -> Iterator[Callable[[], float | None]]:
    """A function that measures GB/s of a device's memory: a read by so many threads, or a copy (reads and writes)."""
    if device.host_memory:
        with ReadBandwidth(threads, array_bytes()) as reading:
            yield reading.measure
    else:
        yield device.copy_rate


def array_bytes() -> int:
    """Bytes for the array whose reading is measured: fewer where memory is short."""
    from penstock.machine import available_memory

    return max(1 << 26, min(BYTES, available_memory() // 4))


def read_rate(array: np.ndarray, threads: ThreadPoolExecutor, count: int) -> float:
    """GB/s of summing a float32 array by `count` threads, the best of some rounds."""
    parts = np.array_split(array, count)
    best = float("inf")
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        list(threads.map(np.sum, parts))
        best = min(best, time.perf_counter() - start)
    return array.nbytes / best / 1e9


class ReadBandwidth:
    """A process that measures when asked. A context manager; `nbytes` are those of the array that it reads."""

    def __init__(self, threads: int, nbytes: int = BYTES) -> None:
        self._command = [sys.executable, "-P", __file__, str(threads), str(nbytes)]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self._process.communicate()  # closes its input, which ends it
            self._process = None

    def measure(self) -> float | None:
        """GB/s now: a shared host gives twice as much in one minute as in the next. None if the process has died."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            return float(self._process.stdout.readline())
        except (OSError, ValueError):
            return None


def _answer(count: int, nbytes: int) -> None:
    """The process: a measurement for every line of standard input."""
    # Numbers that differ from page to page: a host may keep equal pages of its guests once, then they sit in cache.
    array = np.arange(nbytes // 4, dtype=np.float32)
    with ThreadPoolExecutor(count) as threads:
        for _ in sys.stdin:
            print(read_rate(array, threads, count), flush=True)


if __name__ == "__main__":
    _answer(int(sys.argv[1]), int(sys.argv[2]))
