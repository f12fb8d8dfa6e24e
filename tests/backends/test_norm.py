"""The CPU kernels of the norm ops beyond the cases of tests/ops: extremes, rows, threads, aliases."""

import numpy as np
import pytest

from penstock import ops
from penstock.dtypes import numpy_dtype, round_to
from tests.backends import rows
from tests.ops.common import DTYPES, assert_close, assert_same_bits, normal, run_on

CASES = rows.cases_of("norm")
EPS = {"float32": 4e-6, "float16": 1e-3, "bfloat16": 8e-3}


@pytest.mark.parametrize("scale", [1e-44, 1e-39, 1e-30, 1e-20, 1e19, 1e30, 3e37])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_rows_of_any_magnitude_are_normed(scale, eps, rng):
    x, w = normal(rng, 3, 61, scale=scale), normal(rng, 61)
    weights = [normal(rng, 61) for _ in range(3)]
    assert_close("y", run_on("cpu", ops.rms_norm, x, w, eps), run_on("reference", ops.rms_norm, x, w, eps), 2e-6)
    got, want = (run_on(device, ops.rms_norm_triple, x, *weights, eps) for device in ("cpu", "reference"))
    for a, b in zip(got, want, strict=True):
        assert_close("triple", a, b, 2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_infinite_and_nan_rows_follow_the_definition(dtype, rng):
    x = normal(rng, 6, 33, dtype=dtype)
    x[1] = 0
    x[2, 5], x[3, 7], x[4, 32] = np.inf, -np.inf, np.nan
    other, w = normal(rng, 6, 33, dtype=dtype), normal(rng, 33)
    other[0, 3], other[5, 1], other[5, 2] = np.inf, np.nan, -np.inf
    for eps in (1e-6, 0.0):
        for op, arguments in (
            (ops.rms_norm, (x, w)),
            (ops.rms_norm_mul, (x, w, other)),
            (ops.norm_add, (other, x, w)),
            (ops.norm_add_scalar, (other, x, w, 0.5)),
            (ops.residual_norm_scalar, (other, x, w, normal(rng, 33))),
            (ops.gated_rms_norm, (x[:, None].copy(), other[:, None].copy(), w)),
        ):
            got, want = (run_on(device, op, *arguments, eps=eps) for device in ("cpu", "reference"))
            with np.errstate(invalid="ignore"):
                assert_close(f"{op.name}, eps {eps}", got, want, EPS[dtype])


@pytest.mark.parametrize("eps_on", ["sum", "mean"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_qk_copies_what_lies_between_and_behind(dtype, eps_on, rng):
    """Bit for bit, NaN with their payload; in place and not."""
    x = normal(rng, 7, 101, dtype=dtype)
    x.view(np.uint8)[:, -8:] = 0xFF
    call = {"num_k_heads": 3, "key_dim": 11, "key_offset": 40, "inv_scale": -2.5, "eps": 1e-3, "eps_on": eps_on}
    want, got = run_on("reference", ops.rms_norm_qk, x, **call), run_on("cpu", ops.rms_norm_qk, x, **call)
    for start, stop in ((33, 40), (73, 101)):
        assert_same_bits("passed through", got[:, start:stop], want[:, start:stop])
    assert_close("heads", got[:, :73], want[:, :73], EPS[dtype])
    assert_same_bits("in place", run_on("cpu", ops.rms_norm_qk, x, **call, out=x), got)


def test_rms_norm_qk_of_tiny_and_huge_heads(rng):
    x = normal(rng, 2, 64)
    x[0] *= np.float32(1e-41)
    x[1] *= np.float32(1e30)
    call = {"num_k_heads": 2, "key_dim": 16, "key_offset": 32, "eps": 0.0}
    assert_close("y", run_on("cpu", ops.rms_norm_qk, x, **call), run_on("reference", ops.rms_norm_qk, x, **call), 2e-6)


def test_residual_norm_leaves_the_sum_alone_unless_asked(rng):
    residual, x, w, y = normal(rng, 3, 61), normal(rng, 3, 61), normal(rng, 61), np.empty((3, 61), np.float32)
    buffer = np.full((3, 61), 7, np.float32)
    run_on("cpu", ops.residual_norm, residual, x, w, out=(y, buffer))
    assert (buffer == 7).all()
    total = residual + x
    run_on("cpu", ops.residual_norm, residual, x, w, write_sum=True, out=(x, residual))
    assert_same_bits("sum", residual, total)
    assert_same_bits("y", x, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalar_of_every_form(dtype, rng):
    residual, x, w = normal(rng, 3, 61, dtype=dtype), normal(rng, 3, 61, dtype=dtype), normal(rng, 61)
    same = [0.625, np.full((), 0.625, np.float32), np.full((1, 1), 0.625, np.float16), np.full(61, 0.625, np.float32)]
    same.append(round_to(np.full(61, 0.625), numpy_dtype("bfloat16")))
    for op in (ops.norm_add_scalar, ops.residual_norm_scalar):
        want = run_on("reference", op, residual, x, w, 0.625)
        for scalar in same:
            assert_close(op.name, run_on("cpu", op, residual, x, w, scalar), want, EPS[dtype])


@pytest.mark.parametrize("kind", DTYPES)
def test_weights_of_every_dtype(kind, rng):
    x, w = normal(rng, 3, 61, dtype="bfloat16"), normal(rng, 61, dtype=kind)
    w.setflags(write=False)
    assert_close("y", run_on("cpu", ops.rms_norm, x, w), run_on("reference", ops.rms_norm, x, w), 8e-3)


def test_wide_rows(rng):
    """Longer than a block of scratch, with a ragged end."""
    x, w = normal(rng, 5, 20_011), normal(rng, 20_011)
    assert_close("y", run_on("cpu", ops.rms_norm, x, w), run_on("reference", ops.rms_norm, x, w), 2e-6)


ROWS_ALONE = [(case, dtype) for case in CASES if case.label in ("ragged", "sum", "heads") for dtype in DTYPES]
ROWS_ALONE += [(case, "float32") for case in CASES if case.label == "wide"]


@pytest.mark.parametrize("case, dtype", ROWS_ALONE, ids=str)
def test_rows_do_not_depend_on_their_number(case, dtype):
    rows.check_rows_alone(case, dtype)


@pytest.mark.parametrize("case", [c for c in CASES if c.label in ("ragged", "sum", "vector", "number")], ids=str)
def test_threads_give_the_same_bits(case):
    for dtype in DTYPES:
        rows.check_threads(case, dtype)


@pytest.mark.parametrize("case", [c for c in CASES if c.label in ("ragged", "sum", "heads")], ids=str)
def test_outputs_may_lie_on_inputs(case):
    for dtype in DTYPES:
        for count in (1, 5, rows.MANY):
            rows.check_in_place(case, dtype, count)


def test_kernels_run_uncompiled():
    rows.check_uncompiled(*dict.fromkeys(case.op for case in CASES))
