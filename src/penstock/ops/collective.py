"""Collectives: what the ranks of a model that is split over several devices or machines exchange.

A process that has joined others has a communicator here; without one it is the only rank. Ranks call the same
collectives in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from penstock.dtypes import round_to
from penstock.errors import InvalidArgument, ShapeError
from penstock.ops import check
from penstock.ops.array import Array, Spec
from penstock.ops.op import op


class Communicator(Protocol):
    """Exchanges arrays of the host or of a GPU, contiguous and of equal shape and dtype on all ranks."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def capturable(self) -> bool:
        """Whether what it does to a GPU's arrays can be captured with the kernels around it, and replayed."""
        ...

    def all_reduce(self, array: Any, note: Any = None) -> None:
        """Replace an array by its sum over all ranks: the same bytes on each. note: a small one of the same dtype that
        travels with it, and is replaced likewise.
        """
        ...

    def all_gather(self, parts: Any, array: Any) -> None:
        """Write the arrays of all ranks into parts [size, …]."""
        ...


class _Alone:
    """The communicator of a process that has joined no others."""

    rank, size, capturable = 0, 1, True

    def all_reduce(self, array: Any, note: Any = None) -> None:
        pass

    def all_gather(self, parts: Any, array: Any) -> None:
        parts[0] = array


class _Silent:
    """The place of another communicator, without its exchanges."""

    def __init__(self, given: Communicator) -> None:
        self._given = given

    @property
    def rank(self) -> int:
        return self._given.rank

    @property
    def size(self) -> int:
        return self._given.size

    @property
    def capturable(self) -> bool:
        return self._given.capturable

    def all_reduce(self, array: Any, note: Any = None) -> None:
        pass

    def all_gather(self, parts: Any, array: Any) -> None:
        pass


_MOST = 2**31 - 1  # of an id
_current: Communicator = _Alone()


def communicator() -> Communicator:
    """By which this process reaches the other ranks."""
    return _current


def set_communicator(given: Communicator | None) -> None:
    """Exchange arrays by this from now on; None: this process is the only rank."""
    global _current
    _current = _Alone() if given is None else given
    all_gather.forget_plans()  # its shapes depend on the number of ranks


@contextlib.contextmanager
def exchanging_nothing() -> Iterator[None]:
    """Inside, collectives leave their arrays as they are: calls that are made for their kernels' sake alone, which
    other ranks may not make.
    """
    global _current
    before = _current
    _current = _Silent(before)
    try:
        yield
    finally:
        _current = before


def bounds(count: int, rank: int, size: int) -> tuple[int, int]:
    """The first of `count` things that a rank has, and the first behind them: as even as they can be shared out."""
    return rank * count // size, (rank + 1) * count // size


def gathered(x: Array) -> Array:
    """Arrays of all ranks [size, …], on the host."""
    parts = np.empty((_current.size, *x.shape), x.dtype)
    _current.all_gather(parts, np.ascontiguousarray(x))
    return parts


def _reduced(x: Spec) -> Spec:
    check.floating(x=x)
    check.filled(x=x)
    return x


@op(infer=_reduced, alias=True)
def all_reduce(x: Array) -> Array:
    """Σ of x over all ranks, in their order; every rank has the same bytes. x itself where there is one rank."""
    return round_to(gathered(x).astype(np.float64).sum(axis=0), x.dtype)


def _gathered(x: Spec, columns: int | None) -> Spec:
    check.floating(x=x)
    check.axes("[T, N]", 2, x=x)
    rank, size = _current.rank, _current.size
    columns = size * x.shape[1] if columns is None else columns
    start, stop = bounds(columns, rank, size)
    if stop - start != x.shape[1]:
        raise ShapeError(
            f"x has {x.shape[1]} columns, expected {stop - start}: rank {rank} of {size} has a part of {columns}"
        )
    return Spec((x.shape[0], columns), x.dtype)


@op(infer=_gathered)
def all_gather(x: Array, columns: int | None = None) -> Array:
    """The columns of all ranks side by side, x [T, N] → [T, columns], in the order of the ranks.

    Rank r has columns r · columns // size up to (r + 1) · columns // size of them; None: all have as many.
    """
    size = _current.size
    whole = size * x.shape[1] if columns is None else columns
    shares = [bounds(whole, rank, size) for rank in range(size)]
    widest = max(stop - start for start, stop in shares)
    parts = gathered(np.pad(x, ((0, 0), (0, widest - x.shape[1]))))
    return np.concatenate([part[:, : stop - start] for part, (start, stop) in zip(parts, shares, strict=True)], axis=1)


def _part_ids(ids: Spec, first: int, count: int) -> Spec:
    check.dtype("int32", ids=ids)
    if not (0 <= first <= _MOST and 0 <= count <= _MOST):
        raise InvalidArgument(f"first and count are {first} and {count}, expected 0 to {_MOST}")
    return ids


@op(infer=_part_ids, alias=True)
def part_ids(ids: Array, first: int, count: int) -> Array:
    """Ids in a part of a table that holds its rows first … first + count − 1: less `first`, −1 for rows elsewhere."""
    here = (ids >= first) & (ids < first + count)
    return np.where(here, ids - first, -1).astype(np.int32)


def _beside(a: Spec, b: Spec) -> Spec:
    check.axes("[T, N]", 2, a=a, b=b)
    check.floating(a=a)
    check.alike(a=a, b=b)
    check.shape((a.shape[0], b.shape[1]), "as many rows as a", b=b)
    return Spec((a.shape[0], a.shape[1] + b.shape[1]), a.dtype)


@op(infer=_beside)
def beside(a: Array, b: Array) -> Array:
    """The columns of a [T, N], then those of b [T, M] → [T, N + M]: two sums over ranks as one."""
    return np.concatenate([a, b], axis=1)


EXCHANGES = (all_reduce, all_gather)  # what takes other ranks
