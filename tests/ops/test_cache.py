"""Appending to caches: exactly the rows asked for, bit for bit; and what the ops that read or keep state refuse."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock import ops
from penstock.dtypes import numpy_dtype
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.ops import kv_cache_append, kv_pages_append, mla_cache_append
from tests.ops.cases import CASES, Case
from tests.ops.common import DTYPES, assert_refused, assert_same_bits, i32, zeros


@pytest.fixture(autouse=True, scope="module")
def definition() -> Iterator[None]:
    with penstock.backend("reference"):
        yield


def bits(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    """Random bits: every kind of number, NaN with payloads and subnormals included."""
    kind = numpy_dtype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape).copy()


# -- rows ------------------------------------------------------------------------------------------------------------

NAMES = {  # sources, caches, position
    "kv_cache_append": ("k_src", "v_src", "k_cache", "v_cache", "kv_start"),
    "kv_pages_append": ("k_src", "v_src", "k_pages", "v_pages", "positions"),
    "mla_cache_append": ("kv_lat", "k_pe", "latent_cache", "rope_k_cache", "pos"),
}
# label: axes in front of a row of the cache, position, slots or table, where each row of the source has to be
PLACES: dict[str, tuple[Any, ...]] = {
    "start": ((7,), 0, {}, [0, 1, 2]),
    "end": ((7,), 4, {}, [4, 5, 6]),
    "array": ((7,), np.array(2, np.int32), {}, [2, 3, 4]),
    "nothing": ((7,), 7, {}, []),
    "slots": ((4, 7), i32(6, 0, 2), {"slots": i32(3, 0, 2)}, [(3, 6), (0, 0), (2, 2)]),
    "slots-nothing": ((4, 7), i32(), {"slots": i32()}, []),
    "pages": ((5, 2), 3, {"block_table": i32(9, 1, 0, -1)}, [(1, 1), (0, 0), (0, 1)]),
    "pages-end": ((5, 2), np.array(5, np.int32), {"block_table": i32(4, 4, 3, 0)}, [(3, 1), (0, 0), (0, 1)]),
    "pages-nothing": ((5, 2), 4, {"block_table": i32(9, 9)}, []),
    "pages-batch": ((5, 2), i32(3, 0, 1), {"block_table": i32([-1, 1], [2, 9], [2, 9])}, [(1, 1), (2, 0), (2, 1)]),
}
BOTH = [(op, label) for op in NAMES for label in PLACES]
AT = pytest.mark.parametrize(
    ("op", "label"), [(op, label) for op, label in BOTH if "mla" in op or ("pages" in op) == ("pages" in label)]
)


def append(rng: np.random.Generator, op: str, label: str, dtype: str, split: tuple[bool, ...] = (False, False)) -> None:
    """Call an op at a place and compare all of both caches; `split` gives sources and caches rows of [2, width / 2]."""
    lead, position, where, rows = PLACES[label]
    names = NAMES[op]
    sources, caches = {}, {}
    for source, cache, width in zip(names[:2], names[2:4], (6, 4), strict=True):
        row, kept = ((2, width // 2) if parts else (width,) for parts in split)
        sources[source], caches[cache] = bits(rng, len(rows), *row, dtype=dtype), bits(rng, *lead, *kept, dtype=dtype)
    want = {name: cache.copy() for name, cache in caches.items()}
    for source, cache in zip(sources.values(), want.values(), strict=True):
        for row, place in enumerate(rows):
            cache[place] = source[row].reshape(cache[place].shape)
    assert ops.REGISTRY[op](**sources, **caches, **{names[4]: position}, **where) is None
    for name, cache in caches.items():
        assert_same_bits(name, cache, want[name])


@AT
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_writes_its_rows_and_no_other(op, label, dtype, rng):
    append(rng, op, label, dtype)


@pytest.mark.parametrize("split", [(True, False), (False, True), (True, True)], ids=["source", "cache", "both"])
@pytest.mark.parametrize(
    ("op", "label"), [("kv_cache_append", "end"), ("kv_cache_append", "slots"), ("kv_pages_append", "pages")]
)
def test_append_takes_rows_as_heads(op, label, split, rng):
    append(rng, op, label, "float32", split)


def test_mla_cache_append_takes_one_token_without_its_axis(rng):
    caches = bits(rng, 7, 6), bits(rng, 7, 4)
    want = [cache.copy() for cache in caches]
    kv_lat, k_pe = bits(rng, 6), bits(rng, 4)
    want[0][5], want[1][5] = kv_lat, k_pe
    mla_cache_append(kv_lat, k_pe, *caches, 5)
    for number in (0, 1):
        assert_same_bits(f"cache {number}", caches[number], want[number])


@given(page=st.integers(1, 5), start=st.integers(0, 12), T=st.integers(0, 8), seed=st.integers(0, 9))
def test_kv_pages_append_in_any_pages_reads_back_as_one_sequence(page, start, T, seed):
    rng = np.random.default_rng(seed)
    n = -(-20 // page)
    table = rng.permutation(n + 2)[:n].astype(np.int32)
    pages = bits(rng, n + 2, page, 3), bits(rng, n + 2, page, 2)
    flat = tuple(part[table].reshape(n * page, -1) for part in pages)
    sources = bits(rng, T, 3), bits(rng, T, 2)
    kv_pages_append(*sources, *pages, table, start)
    kv_cache_append(*sources, *flat, start)
    for whole, part in zip(flat, pages, strict=True):
        assert_same_bits("rows", part[table].reshape(whole.shape), whole)


# -- refusals --------------------------------------------------------------------------------------------------------


def valid(op: str, form: str) -> dict[str, Any]:
    """A call with three rows that passes."""
    lead, position, where, _ = PLACES[form]
    k_src, v_src, k_cache, v_cache, at = NAMES[op]
    rows = {k_src: np.ones((3, 6), "f4"), v_src: np.ones((3, 4), "f4")}
    return {**rows, k_cache: np.full((*lead, 6), 7, "f4"), v_cache: np.full((*lead, 4), 7, "f4"), at: position, **where}


REFUSED = {
    ("kv_cache_append", "end"): [
        ({"k_src": zeros(3, 5)}, ShapeError, "k_src has shape (3, 5), expected rows of 6 as k_cache"),
        ({"k_src": zeros(18)}, ShapeError, "k_src has shape (18,), expected [T, kv_dim]"),
        ({"v_src": zeros(2, 4)}, ShapeError, "v_src has shape (2, 4), expected 3 rows as k_src"),
        ({"v_src": zeros(3, 0)}, ShapeError, "v_src has shape (3, 0), expected no empty axis"),
        ({"v_cache": zeros(6, 4)}, ShapeError, "v_cache has shape (6, 4), expected (7,) in front as k_cache"),
        ({"v_cache": zeros(7, 4, dtype="float16")}, DTypeError, "v_cache has dtype float16, expected float32 as k_src"),
        ({"k_src": zeros(3, 6, dtype="int32")}, DTypeError, "k_src has dtype int32, expected float32, float16 or"),
        ({"kv_start": -1}, InvalidArgument, "kv_start is -1, expected 0 or more"),
        ({"kv_start": 5}, InvalidArgument, "kv_start is 5, expected 0 to 4 (3 rows into 7 positions)"),
        ({"kv_start": np.array(5, np.int32)}, InvalidArgument, "kv_start is 5, expected 0 to 4"),
        ({"kv_start": np.array(-1, np.int32)}, InvalidArgument, "kv_start is -1, expected 0 to 4"),
        ({"kv_start": 1.0}, DTypeError, "kv_start is 1.0, expected an array (NumPy or torch) or an int"),
        ({"kv_start": i32(1, 2, 3)}, ShapeError, "kv_start has one value per row, expected slots"),
    ],
    ("kv_cache_append", "slots"): [
        ({"kv_start": 2}, ShapeError, "kv_start is one number, expected int32 (3,)"),
        ({"kv_start": i32(1, 2)}, ShapeError, "kv_start has shape (2,), expected (3,)"),
        ({"kv_start": i32(0, 7, 0)}, InvalidArgument, "kv_start has 7, expected 0 to 6 (7 positions)"),
        ({"kv_start": i32(0, 0, -1)}, InvalidArgument, "kv_start has -1, expected 0 to 6"),
        ({"slots": i32(0, 1)}, ShapeError, "slots has shape (2,), expected (3,)"),
        ({"slots": i32(0, 4, 1)}, InvalidArgument, "slots has 4, expected 0 to 3 (4 slots)"),
        ({"slots": i32(0, -1, 1)}, InvalidArgument, "slots has -1, expected 0 to 3 (4 slots)"),
        ({"slots": i32(2, 0, 2)}, InvalidArgument, "slots has the same value twice, expected distinct"),
    ],
    ("kv_pages_append", "pages"): [
        ({"positions": 6}, InvalidArgument, "positions is 6, expected 0 to 5 (3 rows into 8 positions)"),
        ({"positions": -1}, InvalidArgument, "positions is -1, expected 0 or more"),
        ({"positions": i32(0, 1, 2)}, ShapeError, "block_table has shape (4,), expected [B, n]"),
        ({"block_table": i32(0, 1, 5, 2)}, InvalidArgument, "block_table has 5, expected 0 to 4 (5 pages)"),
        ({"block_table": i32(0, -1, 2, 3)}, InvalidArgument, "block_table has -1, expected 0 to 4 (5 pages)"),
        ({"block_table": i32([0, 1], [2, 3])}, ShapeError, "block_table has shape (2, 2), expected [n]"),
        ({"positions": 1, "block_table": i32(3, 3)}, InvalidArgument, "block_table has a page twice in positions 1 to"),
        ({"v_pages": zeros(5, 3, 4)}, ShapeError, "v_pages has shape (5, 3, 4), expected (5, 2) in front"),
        ({"k_pages": zeros(5, 6)}, ShapeError, "k_pages has shape (5, 6), expected [pages, page, width]"),
    ],
    ("kv_pages_append", "pages-batch"): [
        ({"positions": i32(3, 0, 4)}, InvalidArgument, "positions has 4, expected 0 to 3 (4 positions)"),
        ({"positions": i32(3, 0, 0)}, InvalidArgument, "block_table has the same value twice"),
        ({"block_table": i32([0], [1])}, ShapeError, "block_table has shape (2, 1), expected 3 rows"),
    ],
    ("mla_cache_append", "end"): [
        ({"kv_lat": zeros(3, 5)}, ShapeError, "kv_lat has shape (3, 5), expected rows of 6 as latent_cache"),
        ({"kv_lat": zeros(6)}, ShapeError, "k_pe has shape (3, 4), expected [T, rope] or [rope]"),
        ({"k_pe": zeros(2, 4)}, ShapeError, "k_pe has shape (2, 4), expected 3 rows as kv_lat"),
        ({"pos": 5}, InvalidArgument, "pos is 5, expected 0 to 4 (3 rows into 7 positions)"),
        ({"pos": -1}, InvalidArgument, "pos is -1, expected 0 or more"),
    ],
    ("mla_cache_append", "slots"): [
        ({"block_table": i32([0])}, InvalidArgument, "slots and block_table are both given, expected at most")
    ],
    ("mla_cache_append", "pages"): [
        ({"pos": np.array(6, np.int32)}, InvalidArgument, "pos is 6, expected 0 to 5 (3 rows into 8")
    ],
}


@pytest.mark.parametrize(
    ("op", "form", "change", "error", "message"), [(*call, *row) for call, rows in REFUSED.items() for row in rows]
)
def test_append_refuses_and_leaves_the_caches(op, form, change, error, message):
    assert_refused(ops.REGISTRY[op], {**valid(op, form), **change}, error, message)


@pytest.mark.parametrize(("op", "form"), [(op, "pages" if "pages" in op else "end") for op in NAMES])
def test_append_refuses_a_source_inside_a_cache_and_one_cache_twice(op, form):
    call = valid(op, form)
    k_src, v_src, k_cache, v_cache, _ = NAMES[op]
    inside = {v_src: call[v_cache].reshape(-1)[4:16].reshape(3, 4)}
    twice = {k_src: np.ones((3, 4), "f4"), k_cache: call[v_cache]}
    for change, other in ((inside, v_src), (twice, k_cache)):
        message = f"{v_cache} overlaps {other} in memory, expected separate arrays"
        assert_refused(ops.REGISTRY[op], {**call, **change}, InvalidArgument, message)


# -- what every op of these families refuses, on the calls of cases.py -------------------------------------------------

FAMILIES = ("attention", "cache", "rope", "delta", "mla")
CALLS = pytest.mark.parametrize("case", [c for c in CASES if ops.REGISTRY[c.op].family in FAMILIES], ids=str)


def arrays_of(arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}


def results_of(case: Case) -> tuple[np.ndarray, ...]:
    result = ops.REGISTRY[case.op](**case.arguments("float32"))
    return result if isinstance(result, tuple) else () if result is None else (result,)


def out_name(case: Case, number: int, results: tuple[np.ndarray, ...]) -> str:
    """What messages call an output; attention_prepare has a second one, though not in every call."""
    return f"out[{number}]" if len(results) > 1 or case.op == "attention_prepare" else "out"


def strided(array: np.ndarray) -> np.ndarray:
    """The same values with a gap behind each."""
    return np.repeat(array[..., None], 2, axis=-1)[..., 0]


@CALLS
def test_op_refuses_another_dtype_of_each_array(case):
    op = ops.REGISTRY[case.op]
    for name, array in arrays_of(case.arguments("float32")).items():
        wider = array.astype(np.int64 if array.dtype.kind == "i" else np.float64)
        message = f"{name} has dtype {wider.dtype}, expected "
        assert_refused(op, {**case.arguments("float32"), name: wider}, DTypeError, message)


@CALLS
def test_op_refuses_two_more_axes_of_each_array(case):
    op = ops.REGISTRY[case.op]
    for name, array in arrays_of(case.arguments("float32")).items():
        deep = array[None, None]
        message = f"{name} has shape {deep.shape}, expected "
        assert_refused(op, {**case.arguments("float32"), name: deep}, ShapeError, message)


@CALLS
def test_op_refuses_strided_arrays(case):
    op = ops.REGISTRY[case.op]
    for name, array in arrays_of(case.arguments("float32")).items():
        gaps = strided(array)
        if not gaps.flags.c_contiguous:
            message = f"{name} is not contiguous (shape {array.shape}), expected a C-contiguous array"
            assert_refused(op, {**case.arguments("float32"), name: gaps}, ShapeError, message)


@CALLS
def test_op_refuses_an_out_that_does_not_fit(case):
    op, results = ops.REGISTRY[case.op], results_of(case)
    for number, like in enumerate(results):
        good = tuple(np.full_like(result, 7) for result in results)
        name = out_name(case, number, results)
        frozen = good[number].copy()
        frozen.flags.writeable = False
        other = np.full(like.shape, 7, np.float64)
        longer = np.full((*like.shape[:-1], like.shape[-1] + 1), 7, like.dtype)
        bad = [
            (other, DTypeError, f"{name} has dtype float64, expected {like.dtype}"),
            (longer, ShapeError, f"{name} has shape {longer.shape}, expected {like.shape}"),
            (frozen, InvalidArgument, f"{name} is read-only, expected a writable array"),
        ]
        if not strided(like).flags.c_contiguous:
            bad.append((strided(good[number]), ShapeError, f"{name} is not contiguous (shape {like.shape}), expected"))
        for array, error, message in bad:
            outputs = (*good[:number], array, *good[number + 1 :])
            assert_refused(op, {**case.arguments("float32"), "out": outputs}, error, message)
            assert all((output == 7).all() for output in outputs)


def sharing(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Copies of two arrays of one dtype in which the last element of the first is the first of the second."""
    memory = np.zeros(first.size + second.size - 1, first.dtype)
    low, high = memory[: first.size].reshape(first.shape), memory[first.size - 1 :].reshape(second.shape)
    high[...] = second
    low[...] = first
    return low, high


@CALLS
def test_op_refuses_an_out_that_shares_one_element_with_an_input(case):
    op, results = ops.REGISTRY[case.op], results_of(case)
    for name, array in arrays_of(case.arguments("float32")).items():
        if len(results) == 1 and array.size and results[0].size and array.dtype == results[0].dtype:
            shared, out = sharing(array, results[0])
            call = {**case.arguments("float32"), name: shared, "out": out}
            message = f"{out_name(case, 0, results)} overlaps {name} in memory, expected "
            assert_refused(op, call, InvalidArgument, message)


@CALLS
def test_op_refuses_state_that_is_read_only_or_shares_one_element_with_an_input(case):
    op = ops.REGISTRY[case.op]
    arrays = arrays_of(case.arguments("float32"))
    for name in set(op.writes) & set(arrays):
        frozen = arrays[name].copy()
        frozen.flags.writeable = False
        message = f"{name} is read-only, expected a writable array"
        assert_refused(op, {**case.arguments("float32"), name: frozen}, InvalidArgument, message)
        for other, array in arrays.items():
            if other not in op.writes and array.size and array.dtype == frozen.dtype:
                shared, state = sharing(array, frozen)
                call = {**case.arguments("float32"), other: shared, name: state}
                assert_refused(op, call, InvalidArgument, f"{name} overlaps {other} in memory, expected separate")
