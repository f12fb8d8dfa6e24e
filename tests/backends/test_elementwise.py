"""The CPU kernels of the elementwise ops beyond the cases of tests/ops: bits, extremes, rows, threads, aliases."""

import numpy as np
import pytest

from penstock import ops
from penstock.dtypes import numpy_dtype
from tests.backends import rows
from tests.ops.common import DTYPES, assert_close, assert_same_bits, normal, run_on

CASES = rows.cases_of("elementwise")
ALIASES = [case for case in CASES if ops.REGISTRY[case.op].alias and case.label in ("ragged", "vector")]
WIDTH = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}


def any_bits(rng: np.random.Generator, n: int, dtype: str) -> np.ndarray:
    """Numbers of all magnitudes, infinities and NaN: random bit patterns, a quarter of them near 1, a quarter tiny."""
    kind, quarter = WIDTH[dtype], n // 4
    x = rng.integers(0, np.iinfo(kind).max, n, kind, endpoint=True).view(numpy_dtype(dtype))
    x[:quarter] = normal(rng, quarter, dtype=dtype)
    x[quarter : 2 * quarter] = normal(rng, quarter, dtype=dtype, scale=1e-6 if dtype == "float16" else 1e-20)
    return x[rng.permutation(n)]


def same_numbers(name: str, got: np.ndarray, want: np.ndarray) -> None:
    """Every bit, but NaN may have any payload."""
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    assert_same_bits(name, got[~nan], want[~nan])


@pytest.mark.parametrize("op", [ops.add, ops.mul, ops.residual_add], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_products_have_the_bits_of_the_definition(op, dtype, rng):
    a, b = any_bits(rng, 100_003, dtype), any_bits(rng, 100_003, dtype)
    same_numbers(op.name, run_on("cpu", op, a, b), run_on("reference", op, a, b))


@pytest.mark.parametrize("op", [ops.add, ops.mul], ids=lambda op: op.name)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_vector_operands_of_any_dtype_have_the_bits_of_the_definition(op, dtype, kind, rng):
    for count, dim in ((1, 3001), (43, 1001), (601, 61)):
        a, b = any_bits(rng, count * dim, dtype).reshape(count, dim), any_bits(rng, dim, kind)
        same_numbers(op.name, run_on("cpu", op, a, b), run_on("reference", op, a, b))


@pytest.mark.parametrize("op", [ops.add, ops.mul], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_have_the_bits_of_the_definition(op, dtype, rng):
    a = any_bits(rng, 40_001, dtype)
    for b in (53.06599665, -1e-3, 0, 1e300, np.array(0.1, "float32"), normal(rng, 1, 1, dtype="bfloat16")):
        same_numbers(op.name, run_on("cpu", op, a, b), run_on("reference", op, a, b))


def test_a_sum_just_above_a_tie_rounds_up_once():
    """1 + 2**-8 + 2**-30 lies above the tie of bfloat16; float32 on the way would put it on the tie, then on 1."""
    a, b = np.array([[1.0, 1.0]], numpy_dtype("bfloat16")), np.array([2**-8 + 2**-30, 2**-8], np.float32)
    assert run_on("cpu", ops.add, a, b).astype(np.float32).tolist() == [[1 + 2**-7, 1.0]]


@pytest.mark.parametrize("op", [ops.swiglu, ops.geglu, ops.sigmoid_gate], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_follow_the_definition_at_the_extremes(op, dtype, rng):
    # not between -87.33 and -745, where the float32 sigmoid is 0 and the definition's not: times infinity that shows
    values = [0.0, -0.0, 1.0, -1.0, -20.0, 20.0, -87.0, 90.0, 3e4, -3e4, 6e-8, np.inf, -np.inf, np.nan]
    a, b = (np.array(x, numpy_dtype(dtype)) for x in zip(*[(x, y) for x in values for y in values], strict=True))
    eps = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    with np.errstate(invalid="ignore"):
        assert_close(op.name, run_on("cpu", op, a, b), run_on("reference", op, a, b), eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unary_ops_follow_the_definition_at_all_magnitudes(dtype, rng):
    x = any_bits(rng, 50_001, dtype)
    eps = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    with np.errstate(invalid="ignore"):
        assert_close("gelu_tanh", run_on("cpu", ops.gelu_tanh, x), run_on("reference", ops.gelu_tanh, x), eps)
    for cap in (30.0, 1e-3, 1, 1e30, 1e-42, 1e60):
        got, want = (run_on(device, ops.softcap, x, cap) for device in ("cpu", "reference"))
        with np.errstate(invalid="ignore"):
            assert_close(f"softcap {cap}", got, want, eps)


def test_weighted_sum_adds_slot_after_slot():
    rows_of = np.array([[[1e8], [1.0], [-1e8]]], np.float32)
    ones = np.ones((1, 3), np.float32)
    assert run_on("cpu", ops.weighted_sum, rows_of, ones).tolist() == [[0.0]]
    assert run_on("cpu", ops.weighted_sum, rows_of[:, [0, 2, 1]].copy(), ones).tolist() == [[1.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [c for c in CASES if c.label in ("ragged", "wide")], ids=str)
def test_rows_do_not_depend_on_their_number(case, dtype):
    rows.check_rows_alone(case, dtype)


@pytest.mark.parametrize("case", [c for c in CASES if c.label in ("ragged", "vector", "number")], ids=str)
def test_threads_give_the_same_bits(case):
    for dtype in DTYPES:
        rows.check_threads(case, dtype)


@pytest.mark.parametrize("case", ALIASES, ids=str)
def test_outputs_may_lie_on_inputs(case):
    for dtype in DTYPES:
        for count in (1, 5, rows.MANY):
            rows.check_in_place(case, dtype, count)


def test_kernels_run_uncompiled():
    rows.check_uncompiled(*dict.fromkeys(case.op for case in CASES))
