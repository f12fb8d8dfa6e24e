"""How long sums over ranks take at the sizes of steps: what `penstock plan` predicts with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.parallel.group import RankGroup

_ROWS = (1, 8, 32, 128, 512)
_COLUMNS = (2048, 7168)
_ROUNDS = 21
_WARM = 10  # before those that count
_CAPTURED = 20  # sums in a graph, as steps on a GPU have them


@dataclass(frozen=True)
class SumTime:
    """A sum of [rows, columns] over all ranks: bytes of one rank's array, median seconds of the slowest rank."""

    rows: int
    columns: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class SumTimes:
    """Of all sizes. dtype: of the arrays."""

    size: int
    backend: str
    dtype: str
    times: tuple[SumTime, ...]

    @property
    def latency(self) -> float:
        """Seconds of the fastest sum: one of the small ones, which differ by noise alone."""
        return min(one.seconds for one in self.times)

    def rate(self, one: SumTime) -> float:
        """GB/s over a link: of a ring, 2 (N − 1) / N of the bytes."""
        return 2 * (self.size - 1) / self.size * one.nbytes / one.seconds / 1e9

    @property
    def bandwidth(self) -> float | None:
        """GB/s over a link of the largest sum, its latency taken off; None of one rank."""
        largest = max(self.times, key=lambda one: one.nbytes)
        moving = max(largest.seconds - self.latency, 1e-9)
        return self.rate(largest) * largest.seconds / moving if self.size > 1 else None


def measure_sums(group: RankGroup) -> SumTimes:
    """Time sums as steps make them: float32 host arrays by gloo, bfloat16 on GPUs, captured, by NCCL. On all ranks."""
    run, dtype, itemsize = (_gloo, "float32", 4) if group.backend == "gloo" else (_nccl, "bfloat16", 2)
    shapes = [(rows, columns) for columns in _COLUMNS for rows in _ROWS]
    with group.stepping(first=True):
        own = [statistics.median(run(group, rows, columns)) for rows, columns in shapes]
        slowest = np.max(group.gather_host(np.array(own)), axis=0)
    times = (
        SumTime(rows, columns, rows * columns * itemsize, float(seconds))
        for (rows, columns), seconds in zip(shapes, slowest, strict=True)
    )
    return SumTimes(group.size, group.backend, dtype, tuple(times))


def _gloo(group: RankGroup, rows: int, columns: int) -> list[float]:
    array = np.zeros((rows, columns), np.float32)

    def one() -> float:
        start = time.perf_counter()
        group.all_reduce(array)
        return time.perf_counter() - start

    return _rounds(one)


def _nccl(group: RankGroup, rows: int, columns: int) -> list[float]:
    import torch

    array = torch.zeros((rows, columns), dtype=torch.bfloat16, device="cuda")
    group.all_reduce(array)  # makes what a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CAPTURED):
            group.all_reduce(array)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def one() -> float:
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / _CAPTURED

    return _rounds(one)


def _rounds(one: Callable[[], float]) -> list[float]:
    return [one() for _ in range(_WARM + _ROUNDS)][_WARM:]
