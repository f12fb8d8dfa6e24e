"""Collectives over ranks that are threads: definitions by hand, kernels against them; tests/gpu has the CUDA kernels.

What holds of every op, one rank alone, is in test_cases.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import ops
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.ops.collective import bounds, communicator, exchanging_nothing, set_communicator
from tests.ops.common import assert_close, assert_same_bits, normal
from tests.parallel.threads import Threads

DEVICES = ("reference", "cpu")
Move = Callable[[Any], Any]


def on_ranks(size: int, device: str, call: Callable[[int], Any]) -> list[Any]:
    """What each rank's call returns."""

    def work(rank: int) -> Any:
        with penstock.backend(device):
            return call(rank)

    return Threads(size).run(work)


def check_all_reduce(device: str, size: int, rng: np.random.Generator, there: Move = np.copy, back: Move = np.copy):
    """Sums into an array of NaN, and in place: the same bytes on every rank, up to rounding those of float64."""
    for rows in (0, 1, 5):
        given = [normal(rng, rows, 61) for _ in range(size)]
        want = np.sum(given, axis=0, dtype=np.float64)

        def summed(rank, given=given):
            x = there(given[rank])
            out = ops.all_reduce(x, out=there(np.full_like(given[rank], np.nan)))
            assert_same_bits("x", back(x), given[rank])
            ops.all_reduce(x, out=x)
            return back(out), back(x)

        found = on_ranks(size, device, summed)
        for one in (array for pair in found for array in pair):
            assert_same_bits("sum", one, found[0][0])
        assert_close("sum", found[0][0], want, 3e-7)


def check_all_gather(device: str, size: int, rng: np.random.Generator, there: Move = np.copy, back: Move = np.copy):
    """Even and uneven shares, some of nothing; without `columns` all have as many."""
    for rows, columns in ((3, 7 * size), (1, 5 * size), (4, 11), (1, 10), (2, 1), (0, 9)):
        whole = normal(rng, rows, columns)

        def gathered(rank, whole=whole, rows=rows, columns=columns):
            x = there(np.ascontiguousarray(whole[:, slice(*bounds(columns, rank, size))]))
            out = ops.all_gather(x, columns, out=there(np.full_like(whole, np.nan)))
            even = ops.all_gather(x) if columns % size == 0 else out
            return back(out), back(even)

        for one in (array for pair in on_ranks(size, device, gathered) for array in pair):
            assert_same_bits("columns", one, whole)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_all_reduce_is_the_sum_of_all_ranks(device, size, rng):
    check_all_reduce(device, size, rng)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_all_gather_has_the_columns_of_all_ranks(device, size, rng):
    check_all_gather(device, size, rng)


def test_all_reduce_rounds_half_precision_once():
    given = np.array([[256.0, 1.0]], np.float16), np.array([[0.1, 2.0]], np.float16), np.array([[0.1, -3.0]])
    found = on_ranks(3, "reference", lambda rank: ops.all_reduce(given[rank].astype(np.float16)))
    assert_same_bits("sum", found[1], np.array([[256.25, 0.0]], np.float16))  # 256.2 of float64; 256 step by step


def test_part_ids_by_hand():
    ids = np.array([4, 5, 9, 10, -1, 0], np.int32)
    for device in DEVICES:
        with penstock.backend(device):
            np.testing.assert_array_equal(ops.part_ids(ids, 5, 5), [-1, 0, 4, -1, -1, -1])
            np.testing.assert_array_equal(ops.part_ids(ids, 0, 0), [-1] * 6)


def test_beside_by_hand():
    a, b = np.array([[1, 2], [3, 4]], np.float32), np.array([[5], [6]], np.float32)
    for device in DEVICES:
        with penstock.backend(device):
            out = ops.beside(a, b, out=np.full((2, 3), np.nan, np.float32))
        np.testing.assert_array_equal(out, [[1, 2, 5], [3, 4, 6]])


X = np.zeros((3, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: ops.all_gather(X, 9), ShapeError, "all_gather: x has 4 columns, expected 9: rank 0 of 1 has a part"),
        (lambda: ops.all_gather(X[0]), ShapeError, r"all_gather: x has shape \(4,\)"),
        (lambda: ops.all_gather(X.astype(np.int32)), DTypeError, "all_gather: x has dtype int32"),
        (lambda: ops.all_reduce(X.astype(np.int32)), DTypeError, "all_reduce: x has dtype int32"),
        (lambda: ops.all_reduce(X[:, :0]), ShapeError, r"all_reduce: x has shape \(3, 0\)"),
        (lambda: ops.part_ids(X, 0, 4), DTypeError, "part_ids: ids has dtype float32"),
        (lambda: ops.part_ids(np.zeros(2, np.int32), -1, 4), InvalidArgument, "first and count are -1 and 4"),
        (lambda: ops.beside(X, X[:2]), ShapeError, r"beside: b has shape \(2, 4\)"),
        (lambda: ops.beside(X, X.astype(np.float16)), DTypeError, "beside: "),
    ],
)
def test_wrong_arguments_are_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_a_rank_with_another_share_is_refused():
    with pytest.raises(ShapeError, match="x has 4 columns, expected 3: rank 0 of 3 has a part of 11"):
        on_ranks(3, "cpu", lambda rank: ops.all_gather(X, 11))


def test_shapes_follow_the_number_of_ranks():
    """What was inferred for one rank does not serve two."""
    assert ops.all_gather(X).shape == (3, 4)
    assert [one.shape for one in on_ranks(2, "cpu", lambda rank: ops.all_gather(X))] == [(3, 8)] * 2
    assert ops.all_gather(X).shape == (3, 4)


def test_nothing_is_exchanged_for_the_sake_of_kernels():
    class Deaf:
        rank, size, capturable = 1, 3, False

        def all_reduce(self, array):
            pytest.fail("a sum was exchanged")

        def all_gather(self, parts, array):
            pytest.fail("columns were exchanged")

    set_communicator(Deaf())
    try:
        with exchanging_nothing(), penstock.backend("cpu"):
            assert (communicator().rank, communicator().size, communicator().capturable) == (1, 3, False)
            np.testing.assert_array_equal(ops.all_reduce(X + 1), X + 1)
            assert ops.all_gather(X, 12).shape == (3, 12)
        assert isinstance(communicator(), Deaf)
    finally:
        set_communicator(None)
