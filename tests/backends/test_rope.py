"""The CPU kernels of rope beyond the cases of tests/ops: far positions, forms of a position, rows, threads, aliases."""

import numpy as np
import pytest

from penstock import ops
from tests.backends import rows
from tests.ops.common import DTYPES, assert_close, assert_same_bits, normal, run_on

CASES = [case for case in rows.cases_of("rope") if case.label == "positions" or case.op == "head_norm_rope"]
SCALES = [case for case in rows.cases_of("rope") if case.op == "position_scale" and case.label != "empty"]
EPS = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("position", [0, 1, 4095, 131_071, 16_777_217, 2**31 - 1])
def test_rope_is_accurate_at_far_positions(position, interleaved, rng):
    x, table = normal(rng, 3, 5, 72), ops.rope_inv_freq(64, 1e4)
    call = {"positions": np.full(3, position, np.int32), "rotary_dim": 64, "interleaved": interleaved}
    got, want = (run_on(device, ops.rope, x, table, **call) for device in ("cpu", "reference"))
    assert_close("y", got, want, 5e-7)
    assert_same_bits("the rest of the head", got[..., 64:], x[..., 64:])


def test_rope_of_angles_beyond_the_quick_reduction(rng):
    """A table above 1 leads past 2**31; infinite angles give NaN, as in the definition."""
    x, table = normal(rng, 3, 2, 8), np.array([1e10, 3e38, 1.0, 1e-3], np.float32)
    call = {"positions": np.array([0, 77, 2**31 - 1], np.int32)}
    got, want = (run_on(device, ops.rope, x, table, **call) for device in ("cpu", "reference"))
    assert_close("y", got, want, 5e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_position_zero_and_zero_frequencies_change_nothing(dtype, rng):
    x, table = normal(rng, 4, 3, 34, dtype=dtype), ops.rope_inv_freq(32, 1e4)
    first = run_on("cpu", ops.rope, x, table, 0, 32)
    assert_same_bits("position 0", first[0], x[0])
    assert_same_bits("no frequency", run_on("cpu", ops.rope, x, np.zeros(16, np.float32), 9, 32), x)


def test_rope_takes_every_form_of_position(rng):
    x, table = normal(rng, 4, 3, 32), ops.rope_inv_freq(32, 1e4)
    want = run_on("cpu", ops.rope, x, table, 100)
    each = np.arange(100, 104, dtype=np.int32)
    each.setflags(write=False)
    for call in ((np.array(100, np.int32),), (each,), (0, None, 1.0, False, each)):
        assert_same_bits("y", run_on("cpu", ops.rope, x, table, *call), want)
    for at in (102, each[2:3], np.array(102, np.int32)):
        assert_same_bits("one token", run_on("cpu", ops.rope, x[2], table, at), want[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_follow_the_definition(dtype, rng):
    x, table, w = normal(rng, 5, 2, 16, dtype=dtype), ops.rope_inv_freq(16, 1e4), normal(rng, 16)
    x[1, 0, 3], x[2, 1, 0], x[3, 0, 9], x[4] = np.inf, np.nan, -np.inf, 0
    calls = [(ops.rope, (x, table, 7)), (ops.head_norm_rope, (x, w, table, 7)), (ops.head_norm_rope, (x, None, table))]
    for op, call in calls:
        with np.errstate(invalid="ignore"):
            assert_close(op.name, run_on("cpu", op, *call), run_on("reference", op, *call), EPS[dtype])


@pytest.mark.parametrize("scale", [1e-39, 1e30])
def test_heads_of_any_magnitude_are_normed(scale, rng):
    x, table, w = normal(rng, 3, 2, 20, scale=scale), ops.rope_inv_freq(12, 1e4), normal(rng, 20)
    call = {"start_pos": 5, "eps": 0.0, "rotary_dim": 12}
    got, want = (run_on(device, ops.head_norm_rope, x, w, table, **call) for device in ("cpu", "reference"))
    assert_close("y", got, want, 2e-6)


def test_mscale_scales_rotated_channels_alone(rng):
    x, table = normal(rng, 3, 2, 20), ops.rope_inv_freq(12, 1e4)
    plain, scaled = (run_on("cpu", ops.rope, x, table, 5, 12, m) for m in (1.0, 0.5))
    assert_same_bits("rotated", scaled[..., :12], plain[..., :12] * np.float32(0.5))
    assert_same_bits("passed", scaled[..., 12:], x[..., 12:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_do_not_depend_on_their_number(case, dtype, rng):
    rows.check_rows_alone(case, dtype, start_pos=rng.integers(0, 200_000, rows.MANY).astype(np.int32))


@pytest.mark.parametrize("case", SCALES, ids=str)
def test_scaled_rows_do_not_depend_on_their_number(case):
    for dtype in DTYPES:
        rows.check_rows_alone(case, dtype)


@pytest.mark.parametrize("case", [*CASES, *SCALES], ids=str)
def test_threads_give_the_same_bits(case):
    for dtype in DTYPES:
        rows.check_threads(case, dtype)


@pytest.mark.parametrize("case", [*CASES, *SCALES], ids=str)
def test_outputs_may_lie_on_inputs(case):
    for dtype in DTYPES:
        for count in (1, 5, rows.MANY):
            rows.check_in_place(case, dtype, count)


def test_kernels_run_uncompiled():
    tables = ("rope_inv_freq", "yarn_inv_freq", "proportional_inv_freq")
    rows.check_uncompiled("rope", "head_norm_rope", "position_scale", *tables)
