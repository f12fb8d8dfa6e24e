"""Ragged calls: T rows of B sequences in any mix, the run of each sequence behind that of the one before.

    starts     int32 [B + 1], from 0 on: rows starts[b] … starts[b + 1] − 1 are the run of sequence b, which may be
               empty; rows from starts[B] on belong to no sequence
    sequence   int32 [T]: whose each row is, −1 for those of none
    lengths    int32 [B]: positions of a sequence with its run counted, so that row t of its run is at position
               lengths[b] − starts[b + 1] + t
    slots      int32 [B]: where the state of a sequence is, −1 for a sequence that is left out

A row of no sequence reads nothing, writes nothing and gives 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from penstock.errors import InvalidArgument, ShapeError
from penstock.ops import check
from penstock.ops.array import Array, Spec


def sequences(starts: Spec) -> int:
    """B of these starts."""
    check.dtype("int32", starts=starts)
    check.axes("[B + 1]", 1, starts=starts)
    if not starts.shape[0]:
        raise ShapeError("starts has shape (0,), expected [B + 1]")
    return starts.shape[0] - 1


def check_starts(starts: Array, rows: int) -> None:
    """Host values: from 0 on, never falling, inside the rows."""
    bounds = starts.tolist()
    if bounds[0] != 0 or bounds[-1] > rows or any(a > b for a, b in itertools.pairwise(bounds)):
        raise InvalidArgument(f"starts is {bounds}, expected numbers from 0 on that do not fall, at most {rows} (rows)")


def runs(starts: Array) -> Iterator[tuple[int, int, int]]:
    """(b, first row, row behind the last) of each run that is not empty."""
    bounds = starts.tolist()
    for b, (low, high) in enumerate(itertools.pairwise(bounds)):
        if low < high:
            yield b, low, high


def with_runs(slots: Array | None, starts: Array | None) -> Array | None:
    """starts; where there are none and a sequence is left out, those of one row for each of the slots."""
    if starts is None and slots is not None and slots.size and slots.min() < 0:
        return np.arange(len(slots) + 1, dtype=np.int32)
    return starts


def equal_runs(starts: Array) -> Iterator[tuple[int, int, int]]:
    """Neighbouring runs of one length, none of them empty: (first sequence, how many, rows of each)."""
    first = count = length = 0
    for b, low, high in runs(starts):
        if count and (high - low != length or b != first + count):
            yield first, count, length
            count = 0
        if not count:
            first, length = b, high - low
        count += 1
    if count:
        yield first, count, length
