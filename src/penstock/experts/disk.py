"""How fast experts come from a disk: a short measurement at the size of the real reads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

from penstock.machine import memory

SECONDS = 0.12  # of one measurement

_known: dict[Hashable, float] = {}


def bandwidth(key: Hashable, read: Callable[[int], int], count: int, threads: int) -> float:
    """Bytes per second of `read(n)`, n from 0 to count − 1, called by several threads until the time is over.

    `read` returns the bytes that it read. What was measured once for a key, such as a device, holds for the process.
    """
    if key not in _known:
        _known[key] = _measured(read, count, threads)
    return _known[key]


def _measured(read: Callable[[int], int], count: int, threads: int) -> float:
    numbers, start = itertools.count(), time.perf_counter()

    def some() -> int:
        total = 0
        while (number := next(numbers)) < count and time.perf_counter() - start < SECONDS:
            total += read(number)
        return total

    with ThreadPoolExecutor(threads) as pool:
        total = sum(done.result() for done in [pool.submit(some) for _ in range(threads)])
    return total / (time.perf_counter() - start)


def stays_in_memory(nbytes: int) -> bool:
    """Whether the system's page cache will keep that much: it fills half of the free memory at most."""
    return nbytes <= memory(reclaim=True)[1] // 2
