"""The CPU kernels of routers and combination beyond the cases of tests/ops: ties, rows without meaning, many rows."""

import numpy as np
import pytest

from penstock import ops
from penstock.dtypes import numpy_dtype, round_to
from tests.backends import rows
from tests.ops.cases import by_op
from tests.ops.common import DTYPES, EPS, assert_close, assert_same_bits, normal, run_on

ROUTERS = ("moe_route", "moe_softmax_topk", "moe_group_route")
OPS = (*ROUTERS, "moe_normalize_weights", "moe_combine_residual", "moe_bucket_accumulate")


def route(name, device, logits, k, per_expert=None, **options):
    if name == "moe_route":
        return run_on(device, ops.moe_route, logits, per_expert, k, **options)
    if name == "moe_softmax_topk":
        return run_on(device, ops.moe_softmax_topk, logits, k, **options)
    options = {"n_group": 1, "topk_group": 1, **options}
    return run_on(device, ops.moe_group_route, logits, per_expert, top_k=k, **options)


def check_route(name, logits, k, per_expert=None, **options):
    with np.errstate(all="ignore"):
        got, want = (route(name, device, logits, k, per_expert, **options) for device in ("cpu", "reference"))
    differ = np.argwhere(got[0] != want[0])
    row = differ[0][0] if len(differ) else 0
    assert differ.size == 0, f"{name}: ids of row {row} are {got[0][row]}, not {want[0][row]}"
    assert_close(f"{name} weights", got[1], want[1], 2e-6)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("E", [1, 2, 31, 33, 64, 127, 128, 129, 511, 512])
def test_winner_in_every_position(E, name, rng):
    logits = normal(rng, E, E)
    np.fill_diagonal(logits, 9)
    for k in {1, min(E, 8), min(E, 17)}:
        check_route(name, logits, k)
    assert (route(name, "cpu", logits, 1)[0][:, 0] == np.arange(E)).all()


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("E", [3, 16, 128, 130])
def test_ties_go_to_the_lowest_index(E, name, rng):
    check_route(name, np.zeros((2, E), np.float32), min(E, 9))
    steps = rng.integers(0, 4, (400, E)).astype(np.float32)  # many ties
    steps[::3] -= 2
    steps[::5] *= 0
    steps[::5, ::2] *= np.float32(-1)  # 0 and -0 are equal
    check_route(name, steps, min(E, 8))
    for distance in (1, 16, 31, 32, 33, 64, 127):
        if distance < E:
            logits = normal(rng, E - distance, E)
            at = np.arange(E - distance)
            logits[at, at] = logits[at, at + distance] = 7
            check_route(name, logits, min(E, 3))


@pytest.mark.parametrize("name", ROUTERS)
def test_all_experts_may_be_chosen(name, rng):
    check_route(name, normal(rng, 20, 37), 37)


@pytest.mark.parametrize("name", ROUTERS)
def test_rows_without_meaning(name, rng):
    logits = normal(rng, 12, 40)
    logits[0, 3], logits[1, 0], logits[2, 39] = np.nan, np.inf, -np.nan
    logits[3], logits[4, :38], logits[5, ::2] = -np.inf, -np.inf, -np.inf
    logits[6, 5], logits[6, 6] = np.inf, -np.inf
    logits[7], logits[8] = 3.4e38, -3.4e38
    logits[9, :20] -= 200  # underflowed tails
    check_route(name, logits, 4)
    check_route(name, logits, 39)


@pytest.mark.parametrize("scale", [*DTYPES, None])
def test_scale_comes_after_the_renormalisation(scale, rng):
    per_expert = None if scale is None else normal(rng, 33, dtype=scale)
    logits = normal(rng, 50, 33, scale=2)
    check_route("moe_route", logits, 5, per_expert)
    check_route("moe_group_route", logits, 5, per_expert, n_group=3, topk_group=2)
    if scale is None:
        assert_close("sum", route("moe_route", "cpu", logits, 5)[1].sum(axis=-1), np.ones(50), 1e-6)


@pytest.mark.parametrize("logits", [[1, 3, 2, 3]])
def test_vector_of_logits(logits):
    ids, weights = run_on("cpu", ops.moe_route, np.float32(logits), np.float32([1, 2, 3, 4]), 2)
    assert ids.tolist() == [1, 3] and weights.tolist() == [1, 2]


SLOTS = [([1, 4, 2, 3], [3, 1]), ([1, 1, 1, 1], [0, 1]), ([1, 6, 1, 6, 6], [3, 1, 4]), ([3, 1, 2, 4], [0, 3, 2])]


@pytest.mark.parametrize("p, ids", SLOTS)
def test_slots_are_replaced_in_order(p, ids):
    assert run_on("cpu", ops.moe_softmax_topk, np.log(np.float32(p)), len(ids))[0].tolist() == ids


def test_group_route_of_extremes(rng):
    logits = normal(rng, 60, 32, scale=30)
    logits[0] = [-np.inf, np.inf] * 16
    bias = normal(rng, 32)
    check_route("moe_group_route", logits, 6, bias, n_group=4, topk_group=2, norm_topk_prob=False)
    bias[8:16] = -np.inf  # a group of chosen experts ties with those left out
    check_route("moe_group_route", logits, 16, bias, n_group=4, topk_group=2, routed_scaling_factor=2.5)
    bias[0], bias[1:8] = np.inf, -np.inf  # inf - inf ranks last
    check_route("moe_group_route", logits, 8, bias, n_group=4, topk_group=1)
    check_route("moe_group_route", logits, 8, bias, n_group=4, topk_group=4)
    bias = normal(rng, 32)
    bias.reshape(4, 8)[:, 3:] = -np.inf  # so do experts of a kept group
    check_route("moe_group_route", logits, 12, bias, n_group=4, topk_group=2)
    bias[5] = np.nan
    check_route("moe_group_route", logits, 8, bias, n_group=4, topk_group=1)


def test_group_route_scores_are_those_of_the_definition(rng):
    """Bit for bit: a choice between two experts may hang on the last one."""
    magnitudes = 10.0 ** rng.uniform(-8, 2.5, (40, 500))
    logits = (magnitudes * rng.choice([-1, 1], magnitudes.shape)).astype(np.float32)
    options = {"norm_topk_prob": False}
    got, want = (route("moe_group_route", device, logits, 500, **options) for device in ("cpu", "reference"))
    assert_same_bits("ids", got[0], want[0])
    assert_same_bits("scores", got[1], want[1])


def hard_logits(rng, T, E):
    """Random rows, some in coarse steps, some a last bit apart."""
    logits = normal(rng, T, E, scale=2)
    logits[::3] = np.round(logits[::3] * 8) / 8
    near = logits[1::7]
    near[:, 1::2] = np.nextafter(near[:, : E // 2 * 2 : 2], np.float32(np.inf))[:, : near[:, 1::2].shape[1]]
    return logits


@pytest.mark.parametrize("name", ROUTERS)
def test_many_rows_agree_and_repeat(name, rng):
    logits, bias = hard_logits(rng, 20_000, 128), normal(rng, 128, scale=0.1)
    options = {"n_group": 8, "topk_group": 4} if name == "moe_group_route" else {}
    check_route(name, logits, 8, bias, **options)
    first = route(name, "cpu", logits, 8, bias, **options)
    for _ in range(20):
        for a, b in zip(route(name, "cpu", logits, 8, bias, **options), first, strict=True):
            assert_same_bits("again", a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTERS)
def test_a_million_rows_agree(name, rng):
    for _ in range(20):
        bias = normal(rng, 128, scale=0.1)
        options = {"n_group": 8, "topk_group": 4} if name == "moe_group_route" else {}
        check_route(name, hard_logits(rng, 50_000, 128), 8, bias, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTERS)
def test_a_hundred_thousand_rows_repeat_a_hundred_times(name, rng):
    logits = normal(rng, 100_000, 128)
    first = route(name, "cpu", logits, 8)
    for _ in range(100):
        for a, b in zip(route(name, "cpu", logits, 8), first, strict=True):
            assert_same_bits("again", a, b)


def test_normalize_weights_of_extremes(rng):
    weights = np.abs(normal(rng, 9, 5))
    weights[1], weights[2], weights[3], weights[4, 0] = 0, -weights[2], 1e-42, np.nan
    weights[5], weights[6, 1], weights[7] = 3e38, np.inf, [1, -1, 0, 0, 0]
    with np.errstate(all="ignore"):
        got, want = (run_on(device, ops.moe_normalize_weights, weights) for device in ("cpu", "reference"))
        assert_close("weights", got, want, 2e-7)
    assert_same_bits("in place", run_on("cpu", ops.moe_normalize_weights, weights, out=weights), got)


# -- combination -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T, k, dim", [(1, 8, 2048), (7, 0, 61), (300, 3, 257)])
def test_combine_of_every_form(T, k, dim, dtype, rng):
    h, shared, total = (normal(rng, T, dim, dtype=dtype) for _ in range(3))
    experts, weights = normal(rng, T, k, dim, dtype=dtype), normal(rng, T, k, scale=0.3)
    gates = [None, -0.75, normal(rng, T), normal(rng, T, 1), normal(rng, T, dtype=dtype)]
    rel = 2e-6 + (2 * EPS[dtype] if dtype != "float32" else 0)
    given = {"expert_out": None, "weights": None, "moe_sum": total}
    for inputs in ({"expert_out": experts, "weights": weights}, given):
        for gate in gates:
            for second in (shared, None):
                call = {"h_mid": h, "shared_out": second, "shared_gate": None if second is None else gate, **inputs}
                got, want = (run_on(device, ops.moe_combine_residual, **call) for device in ("cpu", "reference"))
                assert_close("y", got, want, rel)
    one = {"h_mid": h[0], "expert_out": experts[0], "weights": weights[0], "shared_out": shared[0], "shared_gate": 1.5}
    got, want = (run_on(device, ops.moe_combine_residual, **one) for device in ("cpu", "reference"))
    assert_close("one row", got, want, rel)


@pytest.mark.parametrize("case", by_op("moe_combine_residual"), ids=str)
def test_combine_in_place(case):
    if 0 not in case.sizes:
        for dtype in DTYPES:
            for count in (1, 5, rows.MANY):
                rows.check_in_place(case, dtype, count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B, dim", [(40, 61), (300, 257)])
def test_bucket_adds_every_row_of_a_token(B, dim, dtype, rng):
    """Duplicates are added up before rounding."""
    bucket, weights = normal(rng, B, dim, dtype=dtype), normal(rng, B)
    token_idx = rng.integers(0, 7, B).astype(np.int32)
    found = []
    start = round_to(rng.standard_normal((9, dim)), numpy_dtype(dtype))
    for device in ("cpu", "reference"):
        found.append(start.copy())
        run_on(device, ops.moe_bucket_accumulate, found[-1], bucket, token_idx, weights)
    once = 4e-6 + (1.01 * EPS[dtype] if dtype != "float32" else 0)  # as good as one rounding
    assert_close("sum", *found, once, np.abs(found[1].astype(np.float64)).max())
    assert_same_bits("others", found[0][7:], start[7:])


# -- rows and threads ------------------------------------------------------------------------------------------------

EACH = [case for name in (*ROUTERS, "moe_normalize_weights", "moe_combine_residual") for case in by_op(name)]
EACH = [case for case in EACH if case.label in ("ragged", "many", "sum")]


@pytest.mark.parametrize("case", EACH, ids=str)
def test_rows_do_not_depend_on_their_number(case):
    for dtype in case.dtypes:
        rows.check_rows_alone(case, dtype)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_threads_give_the_same_bits(case):
    for dtype in case.dtypes:
        rows.check_threads(case, dtype)


def test_kernels_run_uncompiled():
    rows.check_uncompiled(*OPS[:-1])


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("k", [3, 20])
def test_routers_propagate_nan_as_the_definition_does(name, k, rng):
    """One of each kind in rows of a ragged number of experts, at the front, in the middle and at the end."""
    logits = rng.standard_normal((10, 37)).astype(np.float32)
    for row, (value, at) in enumerate((v, at) for v in (np.nan, np.inf, -np.inf) for at in (0, 17, 36)):
        logits[row, at] = value
    with np.errstate(all="ignore"):
        want, got = (route(name, device, logits, k, propagate_nan=True) for device in ("reference", "cpu"))
    np.testing.assert_array_equal(got[0], want[0])
    assert np.isnan(got[1][:9]).all() and not got[0][:9].any() and np.isfinite(got[1][9]).all()
