"""How fast this machine's memory can be read: the yardstick of `penstock bench`.

The reading is done by a process of its own, started from this very file, so that its array counts neither as the
model's memory nor for the model's caches. That process needs NumPy alone.
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

BYTES = 1 << 30  # far larger than any cache
_ROUNDS = 3


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

    def __enter__(self) -> ReadBandwidth:
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
