import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock import ops
from penstock.dtypes import round_to
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from tests.ops.common import (
    DTYPES,
    EPS,
    assert_close,
    assert_refused_like,
    assert_same_bits,
    fenced,
    i32,
    normal,
    quantized,
)
from tests.ops.test_elementwise import check_refusals, f16, f32

INF, NAN = np.inf, np.nan
EXPERTS = (1, 31, 33, 64, 127, 128, 129, 511, 512)


@pytest.fixture(autouse=True)
def _definition():
    with penstock.backend("reference"):
        yield


def f64(x):
    return np.asarray(x).astype(np.float64)


def softmax(logits):
    e = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def distinct(rng, T, E, step=0.05):
    """Logits without ties: the numbers 0 … E − 1 in random order, made uneven by less than half a step."""
    places = rng.permuted(np.tile(np.arange(E, dtype="float32"), (T, 1)), axis=1)
    return (places + rng.uniform(0, 0.4, (T, E)).astype("float32") - E / 2) * np.float32(step)


# -- moe_route ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "scale", "k", "ids", "weights"),
    [
        ([1, 3, 2, 3], [1, 2, 3, 4], 2, [1, 3], [1, 2]),  # the tie goes to the lower index; scaled, not renormalised
        ([1, 3, 2, 3], None, 2, [1, 3], [0.5, 0.5]),
        ([0, np.log(3)], [1, 1], 2, [1, 0], [0.75, 0.25]),
        ([5], [0.25], 1, [0], [0.25]),
        ([-INF, 0, -INF, np.log(3)], None, 3, [3, 1, 0], [0.75, 0.25, 0]),  # masked experts come last, weight 0
        ([-INF, 2, -INF, -INF], [9, 8, 7, 6], 4, [1, 0, 2, 3], [8, 0, 0, 0]),
        ([7, 7, 7, 7, 7], None, 3, [0, 1, 2], [1 / 3] * 3),
        ([NAN, 1, 2], None, 2, [0, 0], [0, 0]),
        ([1, NAN, 2], [3, 3, 3], 2, [0, 0], [0, 0]),
        ([1, INF, 2], None, 2, [0, 0], [0, 0]),
        ([INF, INF], None, 2, [0, 0], [0, 0]),
        ([-INF, -INF, -INF], [1, 2, 3], 2, [0, 0], [0, 0]),
        ([0.0, -0.0, 0.0], None, 3, [0, 1, 2], [1 / 3] * 3),
        ([-3, np.nextafter(np.float32(-3), np.float32(0)), 5], None, 2, [2, 1], [1, np.exp(-8)]),  # one ulp decides
        ([-200, 0, -150, -300], None, 3, [1, 2, 0], [1, 0, 0]),  # below the range of exp the logit still ranks
        ([3e38, -3e38, 3.2e38], None, 3, [2, 0, 1], [1, 0, 0]),
    ],
)
def test_moe_route_by_hand(logits, scale, k, ids, weights):
    logits = np.array(logits, "float32")
    scale = None if scale is None else np.array(scale, "float32")
    got_ids, got_weights = ops.moe_route(logits, scale, k)
    assert got_ids.dtype == np.int32
    assert got_weights.dtype == np.float32
    np.testing.assert_array_equal(got_ids, ids)
    np.testing.assert_allclose(got_weights, weights, rtol=4e-4 if logits[0] == -3 else 1e-7, atol=1e-60)
    stacked = ops.moe_route(np.stack([logits, logits]), scale, k)
    assert_same_bits("ids of two rows", stacked[0], np.stack([got_ids, got_ids]))
    assert_same_bits("weights of two rows", stacked[1], np.stack([got_weights, got_weights]))


@pytest.mark.parametrize("E", EXPERTS)
def test_moe_route_finds_the_winner_in_every_position(E):
    others = np.arange(E)[:, None] == 0  # the lowest index but the winner: 1 for winner 0, else 0
    for low in (0.0, -1e30, -INF):
        logits = np.full((E, E), low, "float32")
        np.fill_diagonal(logits, 1)
        ids, weights = ops.moe_route(logits, None, min(E, 2))
        np.testing.assert_array_equal(ids[:, 0], np.arange(E))
        np.testing.assert_array_equal(ids[:, 1:], others[:, : ids.shape[1] - 1])
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
        slots, p = ops.moe_softmax_topk(logits, 1)
        np.testing.assert_array_equal(slots[:, 0], np.arange(E))
        assert_close("p", p[:, 0], np.diagonal(softmax(logits)), EPS["float32"])


@pytest.mark.parametrize("E", EXPERTS)
def test_moe_route_gives_equal_logits_to_the_lowest_indices(E):
    k = min(E, 8)
    ids, weights = ops.moe_route(np.full((2, E), -1.25, "float32"), None, k)
    np.testing.assert_array_equal(ids, [np.arange(k)] * 2)
    np.testing.assert_array_equal(weights, np.full((2, k), np.float32(1 / k)))


@pytest.mark.parametrize("distance", [1, 16, 31, 32, 33, 64, 127])
def test_moe_route_breaks_a_tie_at_any_distance(distance):
    E = 128
    first = np.arange(E - distance)
    logits = np.full((len(first), E), -1, "float32")
    logits[first, first] = logits[first, first + distance] = 2
    np.testing.assert_array_equal(ops.moe_route(logits, None, 1)[0][:, 0], first)
    np.testing.assert_array_equal(ops.moe_softmax_topk(logits, 1)[0][:, 0], first)
    ids, weights = ops.moe_route(logits, None, 2)
    np.testing.assert_array_equal(ids, np.stack([first, first + distance], axis=1))
    np.testing.assert_array_equal(weights, np.full(ids.shape, 0.5))
    rest = np.where(first == 0, 1, 0)  # of the equal losers the lowest index comes third
    rest[(first == 0) & (distance == 1)] = 2
    np.testing.assert_array_equal(ops.moe_route(logits, None, 3)[0][:, 2], rest)


@pytest.mark.parametrize("E", [1, 2, 33, 128])
def test_moe_route_of_all_experts_is_the_softmax(E, rng):
    logits, scale = distinct(rng, 3, E), normal(rng, E, dtype="bfloat16")
    ids, weights = ops.moe_route(logits, scale, E)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1))
    want = np.take_along_axis(softmax(logits) * scale.astype(np.float64), ids, axis=1)
    assert_close("weights", weights, want, EPS["float32"])


def test_moe_route_renormalises_before_the_scale(rng):
    logits, scale = distinct(rng, 50, 16), np.abs(normal(rng, 16)) + 0.5
    ids, weights = ops.moe_route(logits, scale, 4)
    plain_ids, plain = ops.moe_route(logits, None, 4)
    assert_same_bits("ids", ids, plain_ids)  # the scale does not choose
    assert_close("sum of plain weights", plain.sum(axis=1), np.ones(50), 4 * EPS["float32"])
    assert_close("weights", weights, plain * scale[ids], 4 * EPS["float32"])
    assert np.abs(weights.sum(axis=1) - 1).min() > 1e-3


def test_moe_route_of_many_tokens_matches_torch_twice(rng):
    torch = pytest.importorskip("torch")
    T, E, k = 100_000, 128, 8
    logits = distinct(rng, T, E)
    first, second = ops.moe_route(logits, None, k), ops.moe_route(logits, None, k)
    best, ids = torch.topk(torch.from_numpy(logits), k)
    np.testing.assert_array_equal(first[0], ids.numpy())
    assert_close("weights", first[1], torch.softmax(best.double(), dim=-1).numpy(), EPS["float32"])
    assert_same_bits("ids again", second[0], first[0])
    assert_same_bits("weights again", second[1], first[1])


def test_moe_route_matches_the_gemma_router_of_transformers(rng):
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    hidden, E, k = 24, 10, 3
    config = module.Gemma4TextConfig(hidden_size=hidden, num_experts=E, top_k_experts=k, rms_norm_eps=1e-6)
    h, proj, scale, per_expert = normal(rng, 7, hidden), normal(rng, E, hidden), normal(rng, hidden), normal(rng, E)
    router = module.Gemma4TextRouter(config)
    weights = {"proj.weight": proj, "scale": scale, "per_expert_scale": per_expert}
    router.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()}, strict=False)
    _, want, want_ids = (t.detach().numpy() for t in router(torch.from_numpy(h)))
    logits = ops.matmul(ops.rms_norm(h, scale * np.float32(hidden**-0.5)), proj)
    ids, got = ops.moe_route(logits, per_expert, k)
    np.testing.assert_array_equal(ids, want_ids)
    assert_close("weights", got, want, 2e-6)


@given(st.integers(0, 3), st.integers(1, 6), st.data())
def test_routers_take_any_number_of_rows(T, E, data):
    k = data.draw(st.integers(1, E))
    logits = (np.arange(T * E, dtype="float32") * 7 % 5).reshape(T, E)
    calls = [lambda x: ops.moe_route(x, None, k), lambda x: ops.moe_softmax_topk(x, k)]
    for route in (*calls, lambda x: ops.moe_group_route(x, None, 1, 1, k)):
        ids, weights = route(logits)
        assert ids.shape == weights.shape == (T, k)
        for t in range(T):
            assert len(set(ids[t])) == k
            for name, whole, alone in zip(("ids", "weights"), (ids, weights), route(logits[t]), strict=True):
                assert_same_bits(name, whole[t], alone)


def test_routers_give_rows_of_no_sequence_no_expert(rng):
    logits = normal(rng, 4, 6)
    logits[1], logits[2, 3] = NAN, NAN
    active = i32(7, -1, 0, -5)
    calls = {
        "moe_route": functools.partial(ops.moe_route, per_expert_scale=normal(rng, 6), top_k=2),
        "moe_softmax_topk": functools.partial(ops.moe_softmax_topk, k=2),
        "moe_group_route": functools.partial(ops.moe_group_route, bias=None, n_group=2, topk_group=1, top_k=2),
    }
    for name, route in calls.items():
        for nan in (False, True):
            ids, weights = route(logits, propagate_nan=nan, active=active)
            assert ids.dtype == np.int32 and weights.dtype == np.float32
            np.testing.assert_array_equal(ids[[1, 3]], -1, name)
            np.testing.assert_array_equal(weights[[1, 3]], 0, name)
            for got, want in zip((ids, weights), route(logits, propagate_nan=nan), strict=True):
                assert_same_bits(f"{name}: rows of sequences", got[[0, 2]], want[[0, 2]])
            assert np.isnan(weights[2]).all() == nan
        ids, weights = route(logits[0], active=np.array(-1, "int32"))
        assert ids.tolist() == [-1, -1] and weights.tolist() == [0, 0]


# -- moe_softmax_topk --------------------------------------------------------------------------------------------------


def running_minimum(p, k):
    """The source's algorithm word for word."""
    value, ids = [-1e30] * k, [0] * k
    for i in range(len(p)):
        slot = min(range(k), key=lambda s: (value[s], s))
        if p[i] > value[slot]:
            value[slot], ids[slot] = p[i], i
    return ids, value


@pytest.mark.parametrize(
    ("p", "k", "ids"),
    [
        ([0.1, 0.4, 0.2, 0.3], 2, [3, 1]),
        ([0.25, 0.25, 0.25, 0.25], 2, [0, 1]),
        ([0.05, 0.3, 0.05, 0.3, 0.3], 3, [3, 1, 4]),
        ([0.3, 0.1, 0.2, 0.4], 3, [0, 3, 2]),
        ([0.25, 0.75], 2, [0, 1]),  # slots are not sorted
    ],
)
def test_moe_softmax_topk_by_hand(p, k, ids):
    got, weights = ops.moe_softmax_topk(np.log(p).astype("float32"), k)
    np.testing.assert_array_equal(got, ids)
    np.testing.assert_allclose(weights, np.array(p)[ids] / np.sum(p), rtol=1e-6)  # not renormalised over the chosen


@pytest.mark.parametrize(("E", "k"), [(1, 1), (5, 2), (9, 9), (33, 8), (128, 16), (600, 17)])
def test_moe_softmax_topk_matches_the_source_algorithm_slot_by_slot(E, k, rng):
    many_ties = rng.integers(-4, 4, (20, E)).astype("float32")
    masked = np.where(rng.uniform(size=(20, E)) < 0.3, np.float32(-INF), many_ties)
    masked[:, -1] = 1
    for logits in (distinct(rng, 20, E), many_ties, masked):
        ids, weights = ops.moe_softmax_topk(logits, k)
        assert ids.dtype == np.int32
        want = [running_minimum(list(p), k) for p in softmax(logits)]
        np.testing.assert_array_equal(ids, [w[0] for w in want])
        assert_close("weights", weights, [w[1] for w in want], EPS["float32"])


def test_moe_softmax_topk_ranks_by_logit():
    above = np.nextafter(np.float32(-3), np.float32(0))
    ids, _ = ops.moe_softmax_topk(np.array([[-3, above, 5], [0, -150, -140]], "float32"), 2)
    np.testing.assert_array_equal(ids, [[2, 1], [0, 2]])


@pytest.mark.parametrize("row", [[NAN, 1, 2, 3], [1, INF, 2, 3], [-INF] * 4, [NAN] * 4])
def test_moe_softmax_topk_of_a_row_without_meaning_is_zero(row):
    ids, weights = ops.moe_softmax_topk(np.array([row, [0, 9, 0, 9]], "float32"), 2)
    np.testing.assert_array_equal(ids, [[0, 0], [3, 1]])
    np.testing.assert_array_equal(weights[0], [0, 0])


# -- moe_normalize_weights ---------------------------------------------------------------------------------------------


def test_moe_normalize_weights_by_hand():
    rows = [[1, 3], [0, 0], [-1, -3], [2, -2], [NAN, 1], [INF, 1], [1e-40, 3e-40], [3e38, 3e38]]
    want = [[0.25, 0.75], [0, 0], [-1, -3], [2, -2], [NAN, 1], [NAN, 0], [0.25, 0.75], [0.5, 0.5]]
    w = np.array(rows, "float32")
    y = ops.moe_normalize_weights(w)
    np.testing.assert_allclose(y, want, rtol=1e-4)  # 1e-40 has few bits in float32
    np.testing.assert_array_equal(y[:5], np.float32(want[:5]))
    assert_same_bits("one row", ops.moe_normalize_weights(w[0]), y[0])
    assert ops.moe_normalize_weights(w, out=w) is w
    assert_same_bits("in place", w, y)


def test_moe_normalize_weights_completes_the_qwen_router(rng):
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
    E, k = 12, 4
    config = module.Qwen3_5MoeTextConfig(hidden_size=E, num_experts=E, num_experts_per_tok=k)
    router = module.Qwen3_5MoeTopKRouter(config)
    router.weight.data = torch.eye(E)
    logits = distinct(rng, 9, E, step=0.4)
    _, want, want_ids = (t.detach().numpy() for t in router(torch.from_numpy(logits)))
    ids, weights = ops.moe_softmax_topk(logits, k)
    weights = ops.moe_normalize_weights(weights)
    order = np.argsort(-weights, axis=1)
    np.testing.assert_array_equal(np.take_along_axis(ids, order, axis=1), want_ids)
    assert_close("weights", np.take_along_axis(weights, order, axis=1), want, 1e-6)


# -- moe_group_route ---------------------------------------------------------------------------------------------------


def deepseek(torch, module, logits, bias, n_group, topk_group, k, norm, factor):
    E = logits.shape[1]
    config = module.DeepseekV3Config(
        hidden_size=E,
        n_routed_experts=E,
        num_experts_per_tok=k,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm,
        routed_scaling_factor=factor,
    )
    router = module.DeepseekV3TopkRouter(config)
    router.weight.data = torch.eye(E)
    router.e_score_correction_bias = torch.from_numpy(bias)
    _, weights, ids = (t.detach().numpy() for t in router(torch.from_numpy(logits)))
    return ids, weights


@pytest.mark.parametrize(
    ("E", "n_group", "topk_group", "k", "norm", "factor"),
    [
        *[(32, 4, 2, 5, True, 2.5), (32, 4, 2, 5, False, 1.0), (24, 1, 1, 6, True, 1.0)],
        *[(16, 8, 3, 1, True, 0.5), (8, 2, 2, 8, True, 1.0)],
    ],
)
def test_moe_group_route_matches_transformers(E, n_group, topk_group, k, norm, factor, rng):
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    logits, bias = distinct(rng, 60, E, step=0.2), normal(rng, E, scale=0.2)
    want_ids, want = deepseek(torch, module, logits, bias, n_group, topk_group, k, norm, factor)
    ids, weights = ops.moe_group_route(logits, bias, n_group, topk_group, k, norm, factor)
    assert ids.dtype == np.int32
    here, there = np.argsort(ids, axis=1), np.argsort(want_ids, axis=1)  # transformers does not sort the chosen
    np.testing.assert_array_equal(np.take_along_axis(ids, here, 1), np.take_along_axis(want_ids, there, 1))
    assert_close("weights", np.take_along_axis(weights, here, 1), np.take_along_axis(want, there, 1), 1e-6)
    choice = 1 / (1 + np.exp(-logits.astype(np.float64))) + bias
    assert (np.diff(np.take_along_axis(choice, ids, 1)) <= 1e-7).all()  # best first
    if norm:
        assert_close("sum", weights.sum(axis=1), np.full(60, factor), 1e-6)


def test_moe_group_route_never_takes_an_expert_of_a_dropped_group():
    s = np.array([0.9, 0.1, 0.05, 0.04, 0.02, 0.01, 0.9, 0.1])
    bias = np.array([0, -0.5, -0.5, -0.5, 0, 0, -0.6, -0.6], "float32")
    logits = np.log(s / (1 - s)).astype("float32")
    ids, weights = ops.moe_group_route(logits, bias, 2, 1, 2)
    np.testing.assert_array_equal(ids, [0, 1])  # with 0 instead of −inf for dropped groups: 0 and 4
    assert_close("weights", weights, [0.9, 0.1], 1e-6)


def test_moe_group_route_wrong_readings_differ():
    s = np.array([0.9, 0.1, 0.3, 0.6, 0.55, 0.5])  # group 0 has the best expert, group 1 the best two
    bias = np.array([0, 0, 0, 0, 0, 0.2], "float32")
    logits = np.log(s / (1 - s)).astype("float32")
    ids, weights = ops.moe_group_route(logits, bias, 2, 1, 2)
    np.testing.assert_array_equal(ids, [5, 3])  # group score = best one would keep group 0
    assert_close("weights", weights, [0.5 / 1.1, 0.6 / 1.1], 1e-6)  # the bias is not in the weights
    assert_close("scaled", ops.moe_group_route(logits, bias, 2, 1, 2, True, 16.0)[1], weights * 16, 1e-5)
    assert_close("not normed", ops.moe_group_route(logits, bias, 2, 1, 2, False)[1], [0.5, 0.6], 1e-6)
    assert_close("eps", ops.moe_group_route(logits, bias, 2, 1, 2, norm_eps=0.9)[1], [0.25, 0.3], 1e-6)
    np.testing.assert_array_equal(ops.moe_group_route(logits, bias, 1, 1, 2)[0], [0, 5])  # one group is no group
    np.testing.assert_array_equal(ops.moe_group_route(logits, None, 2, 1, 2)[0], [0, 2])  # the bias chose


def test_moe_group_route_ties_and_special_rows():
    ids, weights = ops.moe_group_route(np.zeros((1, 12), "float32"), None, 4, 2, 5)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(weights, np.full((1, 5), 0.2, "float32"))
    rows = [[NAN, 1, 2, 3], [INF, -INF, -INF, 1], [-INF] * 4]
    ids, weights = ops.moe_group_route(np.array(rows, "float32"), None, 2, 2, 2)
    np.testing.assert_array_equal(ids, [[0, 0], [0, 3], [0, 1]])
    one = 1 / (1 + 1 / (1 + np.exp(-1)))
    assert_close("weights", weights, [[0, 0], [one, 1 - one], [0, 0]], 1e-7)  # 0 / (0 + 1e-20) is 0
    bias = np.array([0, 0, 0, NAN], "float32")
    np.testing.assert_array_equal(ops.moe_group_route(np.zeros(4, "float32"), bias, 2, 1, 2)[0], [0, 0])


ODD_ROWS = [[NAN, 1, 2, 3], [1, INF, 2, 3], [1, 2, 3, -INF], [-INF] * 4, [5, 4, 1, 2]]


def test_routers_propagate_nan_where_a_row_is_not_finite():
    rows = np.array(ODD_ROWS, "float32")
    bias = np.array([0, 0, INF, 0], "float32")
    for route in (
        functools.partial(ops.moe_route, rows, None, 2),
        functools.partial(ops.moe_softmax_topk, rows, 2),
        functools.partial(ops.moe_group_route, rows, None, 2, 2, 2),
    ):
        plain, (ids, weights) = route(), route(propagate_nan=True)
        assert np.isnan(weights[:4]).all() and not ids[:4].any() and weights.shape == (5, 2)
        for name, whole, last in zip(("ids", "weights"), plain, (ids, weights), strict=True):
            assert_same_bits(name, whole[4], last[4])
        assert np.isfinite(plain[1]).all()  # the rule without it
    ids, weights = ops.moe_group_route(rows[4:], bias, 2, 2, 2, propagate_nan=True)
    assert np.isnan(weights).all() and not ids.any()
    assert np.isnan(ops.moe_normalize_weights(weights)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moe_norm_route_is_its_parts(dtype, rng):
    x, norm, w = normal(rng, 4, 64, dtype=dtype), normal(rng, 64), quantized(rng, 13, 64, bits=8)
    active, scale = i32(0, -1, 3, 0), normal(rng, 11)
    h = ops.rms_norm(x, norm, 1e-4)
    logits = ops.quantized_matmul(h, w, dtype="float32")
    parts = [np.ascontiguousarray(part) for part in np.split(logits, [11], axis=1)]
    want = h, *ops.moe_route(parts[0], scale, 5, True, active), parts[1]
    got = ops.moe_norm_route(x, norm, w, scale, 5, 2, 1e-4, True, active, write_normed=True)
    for name, a, b in zip(("h", "ids", "weights", "scores"), got, want, strict=True):
        assert_same_bits(name, a, b)
    above = w.with_arrays(*(part[:12] for part in w.arrays))
    ids, weights = ops.moe_norm_group_route(h, None, above, None, 4, 2, 3, False, 1.5)
    own = ops.moe_group_route(np.ascontiguousarray(logits[:, :12]), None, 4, 2, 3, False, 1.5)
    assert_same_bits("ids", ids, own[0])
    assert_same_bits("weights", weights, own[1])


def test_moe_route_forward_is_its_parts(rng):
    arguments = VALID["moe_route_forward"](rng) | {"active": i32(0, -1, 2, 3), "propagate_nan": True}
    y, ids, weights = ops.moe_route_forward(**arguments)
    router = {name: arguments[name] for name in ("x", "norm_weight", "w", "per_expert_scale", "top_k", "active")}
    h, *chosen, score = ops.moe_norm_route(**router, scores=1, propagate_nan=True, write_normed=True)
    experts = {name: value for name, value in arguments.items() if name.endswith("_w") and value is not arguments["w"]}
    want = ops.moe_shared_forward(arguments["residual"], h, *chosen, **experts, shared_score=score)
    for name, a, b in zip(("y", "ids", "weights"), (y, ids, weights), (want, *chosen), strict=True):
        assert_same_bits(name, a, b)


def test_moe_norm_route_by_hand():
    x, norm = np.array([[3.0, 4.0]], "float32"), np.array([1.0, 2.0], "float32")  # normed: 0.849, 2.263
    w = np.array([[0, 0], [1, 0], [0, 1], [10, 0]], "float32")
    h, ids, weights, scores = ops.moe_norm_route(x, norm, w, None, 2, 1, 0.0, write_normed=True)
    np.testing.assert_allclose(h, [[3 / 12.5**0.5, 8 / 12.5**0.5]], rtol=2e-6)
    np.testing.assert_array_equal(ids, [[2, 1]])
    share = 1 / (1 + np.exp(-5 / 12.5**0.5))
    np.testing.assert_allclose(weights, [[share, 1 - share]], rtol=2e-6)
    np.testing.assert_allclose(scores, [[30 / 12.5**0.5]], rtol=2e-6)


# -- experts -----------------------------------------------------------------------------------------------------------


def stack(rng, kind, *shape):
    if kind == "quantized":
        return quantized(rng, *shape)
    return normal(rng, *shape, dtype=kind, scale=shape[-1] ** -0.5)


def dense(w):
    return np.asarray(penstock.dequantize(w) if isinstance(w, penstock.QuantizedTensor) else w).astype(np.float64)


def dense_loop(torch, x, ids, weights, gate, up, down, act):
    """Token by token, expert by expert in torch float64; also the sum of absolute products as a scale for errors."""
    gate, up, down = (torch.from_numpy(dense(w)) for w in (gate, up, down))
    activate = torch.nn.functional.silu if act == "silu" else torch.nn.GELU(approximate="tanh")
    y = torch.zeros((len(x), down.shape[1]), dtype=torch.float64)
    size = torch.zeros_like(y)
    for t in range(len(x)):
        row = torch.from_numpy(x[t].astype(np.float64))
        for e, w in zip(ids[t], weights[t], strict=True):
            h = activate(gate[e] @ row) * (up[e] @ row)
            y[t] += float(w) * (down[e] @ h)
            size[t] += abs(float(w)) * (down[e].abs() @ h.abs())
    return y.numpy(), size.numpy()


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("kind", ["quantized", "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_moe_forward_matches_a_dense_loop(dtype, kind, act, rng):
    torch = pytest.importorskip("torch")
    T, E, k, K, N, dim = 5, 6, 3, 64, 32, 40
    x, weights = normal(rng, T, K, dtype=dtype), normal(rng, T, k)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype("int32")
    ids[0] = ids[0, 0]  # the same expert in every slot
    gate, up, down = stack(rng, kind, E, N, K), stack(rng, kind, E, N, K), stack(rng, kind, E, dim, N)
    h = ops.expert_gate_up(x, gate, up, ids, act=act)
    assert h.shape == (T, k, N)
    two = ops.expert_down_sum(h, down, ids, weights)
    y = ops.moe_forward(x, ids, weights, gate, up, down, act=act)
    assert_same_bits("fused", y, two)
    want, size = dense_loop(torch, x, ids, weights, gate, up, down, act)
    assert_close("y", y, want, 2.1 * EPS[dtype], size)  # h and y are each rounded once
    for t in range(T):
        alone = ops.moe_forward(x[t], ids[t], weights[t], gate, up, down, act=act)
        assert_same_bits("one token", alone, y[t])
        assert_same_bits("one token", ops.expert_gate_up(x[t], gate, up, ids[t], act=act), h[t])
        assert_same_bits("one token", ops.expert_down_sum(h[t], down, ids[t], weights[t]), y[t])


@pytest.mark.parametrize("kind", ["quantized", "float32"])
def test_expert_gate_up_takes_gate_and_up_joined(kind, rng):
    E, N, K = 3, 32, 64
    gate, up, down = stack(rng, kind, E, N, K), stack(rng, kind, E, N, K), stack(rng, kind, E, 5, N)
    if kind == "quantized":
        joined = gate.with_arrays(*(np.concatenate(pair, axis=1) for pair in zip(gate.arrays, up.arrays, strict=True)))
    else:
        joined = np.concatenate([gate, up], axis=1)
    x, ids, weights = normal(rng, 4, K), rng.integers(0, E, (4, 2)).astype("int32"), normal(rng, 4, 2)
    want = ops.expert_gate_up(x, gate, up, ids)
    assert_close("h", ops.expert_gate_up(x, joined, None, ids), want, EPS["float32"])  # BLAS may sum in another order
    y = ops.moe_forward(x, ids, weights, joined, None, down)
    assert_close("y", y, ops.moe_forward(x, ids, weights, gate, up, down), 4 * EPS["float32"])


def test_experts_found_by_slot_are_the_same(rng):
    E, T, k, K, N, dim = 5, 4, 2, 32, 32, 6
    gate, up, down = quantized(rng, E, N, K), quantized(rng, E, N, K), quantized(rng, E, dim, N)
    x, weights = normal(rng, T, K), normal(rng, T, k)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype("int32")
    order = np.array([3, 0, 4, 1, 2])
    slot_of = np.argsort(order).astype("int32")
    moved = [w.with_arrays(*(a[order] for a in w.arrays)) for w in (gate, up, down)]
    want = ops.moe_forward(x, ids, weights, gate, up, down)
    assert_same_bits("y", ops.moe_forward(x, ids, weights, *moved, slot_of=slot_of), want)
    h = ops.expert_gate_up(x, *moved[:2], ids, slot_of=slot_of)
    assert_same_bits("h", h, ops.expert_gate_up(x, gate, up, ids))
    assert_same_bits("y", ops.expert_down_sum(h, moved[2], ids, weights, slot_of=slot_of), want)
    fewer = [w[:4] for w in moved]  # expert 2 is away, the others stay where they were
    away = np.where(slot_of == 4, -1, slot_of).astype("int32")
    kept = np.where(ids == 2, 0, ids).astype("int32")
    want = ops.moe_forward(x, kept, weights, gate, up, down)
    assert_same_bits("y", ops.moe_forward(x, kept, weights, *fewer, slot_of=away), want)
    kept[1, 1] = 2
    args = {"x": x, "gate_w": fewer[0], "up_w": fewer[1], "ids": kept}
    message = r"ids has 2, an absent expert \(slot_of is -1\), expected"
    assert_refused_like(ops.expert_gate_up, args | {"slot_of": away}, InvalidArgument, message)
    assert_refused_like(
        ops.expert_gate_up, args | {"slot_of": slot_of}, InvalidArgument, "slot_of has 4, expected 0 to 3"
    )
    args = {"h": h, "down_w": fewer[2], "ids": kept, "weights": weights, "slot_of": away}
    assert_refused_like(ops.expert_down_sum, args | {"out": f32(T, dim)}, InvalidArgument, message)


@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_no_expert_adds_nothing(activations, rng):
    """Whatever the row, its weight and its row of expert_out are; the other pairs are as they were."""
    E, T, k, K, N = 5, 4, 2, 64, 32
    gate, up, down = quantized(rng, E, N, K), quantized(rng, E, N, K), quantized(rng, E, K, N)
    x, residual, weights = normal(rng, T, K), normal(rng, T, K), normal(rng, T, k)
    ids = i32([1, 4], [-1, -1], [3, -1], [-1, -1])
    away = ids < 0
    instead = np.where(away, 0, ids).astype("int32")
    lighter = np.where(away, 0, weights).astype("float32")
    call = {"gate_w": gate, "up_w": up, "down_w": down, "activations": activations}
    want = ops.moe_forward(x, instead, lighter, **call)
    x[[1, 3]], weights[away] = NAN, INF
    moved = [w.with_arrays(*(a[[1, 2, 4, 0, 3]] for a in w.arrays)) for w in (gate, up, down)]
    by_slot = dict(zip(("gate_w", "up_w", "down_w"), moved, strict=True)) | {"slot_of": i32(3, 0, -1, 4, 2)}
    for more in ({}, by_slot):
        y = ops.moe_forward(x, ids, weights, **(call | more))
        assert_same_bits("y", y, want)
        assert_same_bits("y of no expert", y[[1, 3]], f32(2, K))
        place = more.get("slot_of")
        stacks = call | more
        h = ops.expert_gate_up(x, stacks["gate_w"], stacks["up_w"], ids, place, activations=activations)
        assert not h[away].any() and h[~away].any(axis=-1).all()
        h[away] = NAN
        y = ops.expert_down_sum(h, stacks["down_w"], ids, weights, place, activations)
        assert_same_bits("y of two ops", y, want)
        rows = np.full((T, k, K), NAN, "float32")
        ops.expert_mlp(rows, x, ids, **(call | more))
        assert np.isnan(rows[away]).all() and np.isfinite(rows[~away]).all()
        y = ops.moe_forward(x, ids, weights, **(call | more), expert_out=rows)
        assert_close("y of rows", y, want, 2e-6, np.abs(want).max())
    shared = {"shared_gate_w": gate[0], "shared_up_w": up[0], "shared_down_w": down[0]}
    x[[1, 3]] = 1
    own = ops.moe_shared_forward(residual, x, instead, 0 * lighter, **call, **shared)
    y = ops.moe_shared_forward(residual, x, ids, weights, **call, **shared)
    assert_same_bits("residual and shared expert", y[[1, 3]], own[[1, 3]])
    assert (y[[0, 2]] != own[[0, 2]]).any(axis=-1).all()


def part_of(stack, own):
    """Some experts of a stack, with NaN around them."""
    return fenced(stack.with_arrays(*(a[list(own)] for a in stack.arrays)))


def slots_for(own, E):
    """`slot_of` of a rank that owns these experts."""
    slot_of = np.full(E, -2, "int32")
    slot_of[list(own)] = np.arange(len(own))
    return slot_of


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("T", [1, 4])
def test_other_ranks_experts_are_no_experts(T, activations, device, rng):
    """Bit for bit as with ids of −1, whatever their weights and rows are; the parts of all ranks are the whole."""
    E, k, K, N = 5, 3, 64, 32
    stacks = [quantized(rng, E, N, K), quantized(rng, E, N, K), quantized(rng, E, K, N)]
    shared = {"shared_gate_w": quantized(rng, 2 * N, K), "shared_up_w": None, "shared_down_w": quantized(rng, K, N)}
    x, residual, weights = normal(rng, T, K), normal(rng, T, K), normal(rng, T, k)
    ids = i32([2, 0, 4], [3, 1, 3], [1, 4, -1], [4, 2, 2])[:T]
    parts = {(0, 2, 4): None, (1, 3): None, (): None}
    with penstock.backend(device):
        for own in parts:
            gate, up, down = (part_of(w, own) for w in stacks)
            slot_of, mine = slots_for(own, E), np.isin(ids, own)
            none, odd = np.where(mine, ids, -1).astype("int32"), np.where(mine, weights, NAN).astype("float32")
            rows = np.where(mine.any(axis=-1, keepdims=True), x, INF).astype("float32")
            call = {"gate_w": gate, "up_w": up, "down_w": down, "slot_of": slot_of, "activations": activations}
            y = ops.moe_forward(rows, ids, odd, **call, out=np.full((T, K), NAN, "float32"))
            assert_same_bits("y", y, ops.moe_forward(rows, none, odd, **call))
            assert np.isfinite(y).all() and not y[~mine.any(axis=-1)].any()
            parts[own] = y
            h = ops.expert_gate_up(rows, gate, up, ids, slot_of, activations=activations)
            assert_same_bits("h", h, ops.expert_gate_up(rows, gate, up, none, slot_of, activations=activations))
            assert not h[~mine].any()
            h[~mine] = NAN
            assert_same_bits("y of h", ops.expert_down_sum(h, down, ids, odd, slot_of, activations), y)
            each = ops.expert_matmul(h, down, ids, slot_of, activations)
            assert np.isfinite(each).all() and not each[~mine].any()
            each = np.full((T, k, K), NAN, "float32")
            ops.expert_mlp(each, rows, ids, **call)
            assert np.isnan(each[~mine]).all() and np.isfinite(each[mine]).all()
            away = {"slot_of": np.where(slot_of < 0, slot_of, -1).astype("int32")}  # what was filled may be gone again
            by_rows = ops.moe_forward(rows, ids, odd, **(call | away), expert_out=each)
            assert_close("y of rows", by_rows, y, 2e-6, np.abs(y).max() + 1)
            block = {"residual": residual, "x": x, "weights": odd, **call, **shared}
            both = ops.moe_shared_forward(ids=ids, **block)
            assert_same_bits("block", both, ops.moe_shared_forward(ids=none, **block))
            alone = ops.moe_shared_forward(ids=np.full_like(ids, -1), **block)
            assert_same_bits("shared expert", both[~mine.any(axis=-1)], alone[~mine.any(axis=-1)])
        want = ops.moe_forward(x, ids, weights, *stacks, activations=activations)
    assert_close("sum of ranks", sum(parts.values()), want, 2e-6, np.abs(want).max())


def test_an_expert_that_is_not_here_yet_is_refused_and_so_is_what_slot_of_cannot_say(rng):
    """Beside those of other ranks, which are not."""
    gate, down, x = quantized(rng, 1, 32, 64), quantized(rng, 1, 64, 32), normal(rng, 2, 64)
    ids, weights = i32([0, 1], [3, -1]), f32(2, 2)
    valid = {"x": x, "ids": ids, "weights": weights, "gate_w": gate, "up_w": gate, "down_w": down}
    valid["slot_of"] = i32(0, -2, -1, -2)
    ops.moe_forward(**valid)
    absent = r"ids has 2, an absent expert \(slot_of is -1\), expected present ones"
    assert_refused_like(ops.moe_forward, valid | {"ids": i32([0, 1], [2, -1])}, InvalidArgument, absent)
    message = r"slot_of has -3, expected a slot, -1 \(not here yet\) or -2 \(another rank's\)"
    for more in ({}, {"expert_out": f32(2, 2, 64)}):
        assert_refused_like(ops.moe_forward, valid | more | {"slot_of": i32(0, -2, -3, -2)}, InvalidArgument, message)
    valid = {name: value for name, value in valid.items() if name != "weights"} | {"expert_out": f32(2, 2, 64)}
    assert_refused_like(ops.expert_mlp, valid | {"slot_of": i32(0, -2, -3, -2)}, InvalidArgument, message)
    empty = {"gate_w": gate[:0], "up_w": gate[:0], "down_w": down[:0]}
    assert_refused_like(ops.expert_mlp, valid | empty, InvalidArgument, "slot_of has 0, expected -2 to -1")


def test_moe_forward_of_no_tokens_is_empty(rng):
    gate, down = quantized(rng, 3, 32, 64), quantized(rng, 3, 7, 32)
    ids, weights = np.zeros((0, 2), "int32"), f32(0, 2)
    for activations in ("float32", "int8"):
        h = ops.expert_gate_up(f32(0, 64), gate, gate, ids, activations=activations)
        assert h.shape == (0, 2, 32)
        assert ops.expert_down_sum(h, down, ids, weights, activations=activations).shape == (0, 7)
        assert ops.moe_forward(f32(0, 64), ids, weights, gate, gate, down, activations=activations).shape == (0, 7)


def test_experts_round_activations_as_quantized_matmul_does(rng):
    gate, up, down = quantized(rng, 2, 32, 64), quantized(rng, 2, 32, 64), quantized(rng, 2, 9, 32)
    x, ids = normal(rng, 1, 64), np.array([[1]], "int32")
    h = ops.expert_gate_up(x, gate, up, ids, activations="int8")[0]
    assert_same_bits("h", h, ops.fused_gate_up_swiglu(x, gate[1], up[1], activations="int8"))
    assert (h != ops.expert_gate_up(x, gate, up, ids)[0]).any()
    y = ops.expert_down_sum(h[None], down, ids, np.ones((1, 1), "float32"), activations="int8")
    assert_same_bits("y", y, ops.quantized_matmul(h, down[1], activations="int8"))
    whole = ops.moe_forward(x, ids, np.ones((1, 1), "float32"), gate, up, down, activations="int8")
    assert_same_bits("whole", whole, y)


def test_moe_block_matches_transformers(rng):
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
    hidden, E, k, N, shared = 24, 7, 3, 10, 14
    config = module.Qwen3_5MoeTextConfig(
        hidden_size=hidden,
        num_experts=E,
        num_experts_per_tok=k,
        moe_intermediate_size=N,
        shared_expert_intermediate_size=shared,
    )
    config._experts_implementation = "eager"
    block = module.Qwen3_5MoeSparseMoeBlock(config)
    w = {name: normal(rng, *p.shape, scale=0.3) for name, p in block.named_parameters()}
    block.load_state_dict({name: torch.from_numpy(value) for name, value in w.items()})
    x = normal(rng, 6, hidden)
    want = block(torch.from_numpy(x)[None])[0].detach().numpy()
    ids, weights = ops.moe_softmax_topk(ops.matmul(x, w["gate.weight"]), k)
    weights = ops.moe_normalize_weights(weights)
    moe = ops.moe_forward(x, ids, weights, w["experts.gate_up_proj"], None, w["experts.down_proj"])
    gate, up, down = (w[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down"))
    shared_out = ops.matmul(ops.swiglu(ops.matmul(x, gate), ops.matmul(x, up)), down)
    score = ops.matmul(x, w["shared_expert_gate.weight"])
    y = ops.moe_combine_residual(np.zeros_like(x), None, None, shared_out, score, moe_sum=moe)
    assert_close("block", y, want, 2e-6, np.abs(want).max())


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_moe_shared_forward_is_the_block_of_its_parts(dtype, joined, rng):
    T, E, k, K, N, own, dim = 5, 4, 2, 64, 32, 96, 64
    x, residual = normal(rng, T, K, dtype=dtype), normal(rng, T, dim, dtype=dtype)
    ids, weights, score = rng.integers(0, E, (T, k)).astype("int32"), normal(rng, T, k), normal(rng, T)
    gate, up, down = quantized(rng, E, N, K), quantized(rng, E, N, K), quantized(rng, E, dim, N)
    shared = quantized(rng, own, K), quantized(rng, own, K), quantized(rng, dim, own)
    h = ops.fused_gate_up_swiglu(x, *shared[:2])
    one = f64(ops.quantized_matmul(h, shared[2], dtype="float32"))
    each = ops.expert_gate_up(x, gate, up, ids).astype("float32")
    routed = np.einsum("tkd,tk->td", f64(ops.expert_matmul(each, down, ids)), f64(weights))
    if joined:
        gate, up = gate.with_arrays(*(np.concatenate(a, 1) for a in zip(gate.arrays, up.arrays, strict=True))), None
        both = (np.concatenate(a) for a in zip(shared[0].arrays, shared[1].arrays, strict=True))
        shared = shared[0].with_arrays(*both), None, shared[2]
    for form in (score, score[:, None].copy(), score.astype("float16"), None):
        sigma = np.ones((T, 1)) if form is None else 1 / (1 + np.exp(-f64(form).reshape(T, 1)))
        y = ops.moe_shared_forward(residual, x, ids, weights, gate, up, down, *shared, form)
        assert_close("y", y, f64(residual) + routed + sigma * one, 1.01 * EPS[dtype] + 1e-6)
    norm = normal(rng, K, dtype="bfloat16")
    normed = ops.rms_norm(residual, norm, 1e-3)
    want = ops.moe_shared_forward(residual, normed, ids, weights, gate, up, down, *shared, score)
    arguments = (residual, residual, ids, weights, gate, up, down, *shared, score)
    assert_same_bits("norm", ops.moe_shared_forward(*arguments, norm_weight=norm, eps=1e-3), want)
    alone = (a[1] for a in (residual, normed, ids, weights))
    assert_same_bits("one token", ops.moe_shared_forward(*alone, gate, up, down, *shared, score[1:2]), want[1])
    assert ops.moe_shared_forward(*arguments, norm_weight=norm, eps=1e-3, out=residual) is residual
    assert_same_bits("in place", residual, want)


# -- combination -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_moe_combine_residual_adds_experts_and_gated_shared(dtype, rng):
    T, k, dim = 4, 3, 5
    h, shared = normal(rng, T, dim, dtype=dtype), normal(rng, T, dim, dtype=dtype)
    out, weights = normal(rng, T, k, dim, dtype=dtype), normal(rng, T, k)
    gate = normal(rng, T)
    h64, shared64 = h.astype(np.float64), shared.astype(np.float64)
    moe = np.einsum("tkd,tk->td", out.astype(np.float64), weights.astype(np.float64))
    sigma = 1 / (1 + np.exp(-gate.astype(np.float64)))
    moe_sum = ops.weighted_sum(out, weights)
    own = gate.astype(h.dtype)  # a gate in the dtype of the activations
    sigma_own = 1 / (1 + np.exp(-own.astype(np.float64)))
    forms = [(gate, sigma), (gate[:, None].copy(), sigma), (own, sigma_own)]
    forms += [(0.3, np.full(T, 1 / (1 + np.exp(-0.3)))), (-1000, np.zeros(T)), (None, np.ones(T))]
    for score, factor in forms:
        added = h64 + factor[:, None] * shared64
        y = ops.moe_combine_residual(h, out, weights, shared, score)
        assert_close("y", y, added + moe, 1.01 * EPS[dtype])
        summed = ops.moe_combine_residual(h, None, None, shared, score, moe_sum=moe_sum)
        assert_close("moe_sum", summed, added + moe_sum.astype(np.float64), 1.01 * EPS[dtype])
        for t in range(T):
            for shape in ((), (1,)):
                one = score[t].reshape(shape) if isinstance(score, np.ndarray) else score
                assert_same_bits("one token", ops.moe_combine_residual(h[t], out[t], weights[t], shared[t], one), y[t])
    assert_close("no shared", ops.moe_combine_residual(h, out, weights, None), h64 + moe, 1.01 * EPS[dtype])
    want = ops.moe_combine_residual(h, out, weights, shared, gate)
    assert ops.moe_combine_residual(h, out, weights, shared, gate, out=h) is h
    assert_same_bits("in place", h, want)


def test_moe_combine_residual_by_hand():
    h, shared = np.array([[1.0, 2.0]], "float32"), np.array([[10.0, 20.0]], "float32")
    experts, weights = np.array([[[1, 1], [2, 4]]], "float32"), np.array([[2, 3]], "float32")
    half = ops.moe_combine_residual(h, experts, weights, shared, 0.0)
    np.testing.assert_array_equal(half, [[1 + 8 + 5, 2 + 14 + 10]])
    np.testing.assert_array_equal(ops.moe_combine_residual(h, experts, weights, shared), [[19, 36]])
    none = ops.moe_combine_residual(h, experts[:, :0].copy(), weights[:, :0].copy(), shared)
    np.testing.assert_array_equal(none, [[11, 22]])  # no routed expert
    np.testing.assert_array_equal(ops.moe_combine_residual(None, experts, weights, shared, 0.0), [[13, 24]])
    alone = ops.moe_combine_residual(None, None, None, None, moe_sum=shared.astype("float16"))
    assert alone.dtype == "float16" and alone.tolist() == [[10, 20]]
    for gate in (0.5, f32(0), f32(0, 1), None):
        assert ops.moe_combine_residual(f32(0, 2), f32(0, 2, 2), f32(0, 2), f32(0, 2), gate).shape == (0, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_moe_bucket_accumulate_adds_each_row_to_its_token(dtype, rng):
    T, dim = 5, 3
    idx = i32(3, 0, 3, 4)  # token 3 twice: it gets both
    total, bucket, weights = normal(rng, T, dim, dtype=dtype), normal(rng, 4, dim, dtype=dtype), normal(rng, 4)
    want = total.astype(np.float64)
    for b, t in enumerate(idx):
        want[t] += bucket[b].astype(np.float64) * float(weights[b])
    want = round_to(want, total.dtype)
    untouched = total[[1, 2]]
    assert ops.moe_bucket_accumulate(total, bucket, idx, weights) is None
    assert_same_bits("out_sum", total, want)
    assert_same_bits("other tokens", total[[1, 2]], untouched)
    ops.moe_bucket_accumulate(total, bucket[:0], idx[:0], weights[:0])
    assert_same_bits("empty bucket", total, want)


def test_moe_bucket_accumulate_by_expert_is_the_weighted_sum(rng):
    T, E, k, dim = 7, 5, 3, 4
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)])
    out, weights, total = normal(rng, T, k, dim), normal(rng, T, k), f32(T, dim)
    for e in range(E):
        tokens, slots = np.nonzero(ids == e)
        ops.moe_bucket_accumulate(total, out[tokens, slots], tokens.astype("int32"), weights[tokens, slots])
    assert_close("out_sum", total, ops.weighted_sum(out, weights), 1e-6)


# -- errors ------------------------------------------------------------------------------------------------------------


def _weights(rng):
    return {"gate_w": quantized(rng, 3, 32, 64), "up_w": quantized(rng, 3, 32, 64)}


def _chosen(rng):
    return {"ids": rng.integers(0, 3, (4, 2)).astype("int32"), "weights": normal(rng, 4, 2)}


VALID = {
    "moe_route": lambda rng: {"logits": normal(rng, 3, 8), "per_expert_scale": normal(rng, 8), "top_k": 2},
    "moe_softmax_topk": lambda rng: {"logits": normal(rng, 3, 8), "k": 2},
    "moe_group_route": lambda rng: {
        "logits": normal(rng, 3, 8),
        "bias": normal(rng, 8),
        "n_group": 4,
        "topk_group": 2,
        "top_k": 3,
    },
    "moe_norm_route": lambda rng: {
        "x": normal(rng, 3, 64),
        "norm_weight": normal(rng, 64),
        "w": quantized(rng, 9, 64),
        "per_expert_scale": normal(rng, 8),
        "top_k": 2,
        "scores": 1,
        "write_normed": True,
    },
    "moe_norm_group_route": lambda rng: {
        "x": normal(rng, 3, 64),
        "norm_weight": normal(rng, 64),
        "w": normal(rng, 9, 64),
        "bias": normal(rng, 8),
        "n_group": 4,
        "topk_group": 2,
        "top_k": 3,
        "scores": 1,
        "write_normed": True,
    },
    "moe_normalize_weights": lambda rng: {"weights": np.abs(normal(rng, 3, 4))},
    "expert_gate_up": lambda rng: {"x": normal(rng, 4, 64), **_weights(rng), "ids": _chosen(rng)["ids"]},
    "expert_down_sum": lambda rng: {"h": normal(rng, 4, 2, 32), "down_w": quantized(rng, 3, 9, 32), **_chosen(rng)},
    "moe_forward": lambda rng: {
        "x": normal(rng, 4, 64),
        **_chosen(rng),
        **_weights(rng),
        "down_w": quantized(rng, 3, 9, 32),
    },
    "moe_shared_forward": lambda rng: {
        "residual": normal(rng, 4, 64),
        "x": normal(rng, 4, 64),
        **_chosen(rng),
        **_weights(rng),
        "down_w": quantized(rng, 3, 64, 32),
        "shared_gate_w": quantized(rng, 96, 64),
        "shared_up_w": quantized(rng, 96, 64),
        "shared_down_w": quantized(rng, 64, 96),
        "shared_score": normal(rng, 4),
        "norm_weight": normal(rng, 64),
    },
    "moe_route_forward": lambda rng: {
        "residual": normal(rng, 4, 64),
        "x": normal(rng, 4, 64),
        "norm_weight": normal(rng, 64),
        "w": quantized(rng, 4, 64),
        "per_expert_scale": normal(rng, 3),
        "top_k": 2,
        **_weights(rng),
        "down_w": quantized(rng, 3, 64, 32),
        "shared_gate_w": quantized(rng, 96, 64),
        "shared_up_w": quantized(rng, 96, 64),
        "shared_down_w": quantized(rng, 64, 96),
        "scored": True,
    },
    "moe_biased_forward": lambda rng: {
        "x": normal(rng, 4, 64),
        "ids": i32([2, 0], [1, 2], [0, 1], [2, 1]),
        "weights": normal(rng, 4, 2),
        "gate_w": quantized(rng, 3, 32, 64),
        "up_w": quantized(rng, 3, 32, 64),
        "down_w": quantized(rng, 3, 64, 32),
        "gate_bias": normal(rng, 3, 32),
        "up_bias": normal(rng, 3, 32),
        "down_bias": normal(rng, 3, 64),
    },
    "moe_combine_residual": lambda rng: {
        "h_mid": normal(rng, 4, 5),
        "expert_out": normal(rng, 4, 2, 5),
        "weights": normal(rng, 4, 2),
        "shared_out": normal(rng, 4, 5),
        "shared_gate": normal(rng, 4),
    },
    "moe_bucket_accumulate": lambda rng: {
        "out_sum": normal(rng, 4, 5),
        "bucket_out": normal(rng, 2, 5),
        "token_idx": i32(3, 1),
        "weights": normal(rng, 2),
    },
}


@pytest.mark.parametrize("name", VALID)
def test_moe_op_refuses_bad_arrays(name, rng):
    check_refusals(getattr(ops, name), VALID[name](rng))


def test_moe_bucket_accumulate_refuses_memory_it_cannot_change(rng):
    args = VALID["moe_bucket_accumulate"](rng)
    shared = np.concatenate([args["out_sum"], args["bucket_out"]])
    overlapping = args | {"out_sum": shared[:4], "bucket_out": shared[3:5]}
    message = "out_sum overlaps bucket_out in memory, expected"
    assert_refused_like(ops.moe_bucket_accumulate, overlapping, InvalidArgument, message)
    args["out_sum"].flags.writeable = False
    assert_refused_like(ops.moe_bucket_accumulate, args, InvalidArgument, "out_sum is read-only, expected a writable")


WRONG = {
    "moe_norm_route": [
        ({"top_k": 9}, InvalidArgument, "top_k is 9, expected 1 to 8"),
        ({"scores": 9}, InvalidArgument, r"scores is 9, expected 0 to 8 \(rows of w less one\)"),
        ({"scores": -1}, InvalidArgument, "scores is -1, expected 0 to 8"),
        ({"norm_weight": None}, InvalidArgument, "write_normed is True without norm_weight, expected both"),
        ({"norm_weight": f32(63)}, ShapeError, r"norm_weight has shape \(63,\), expected \(64,\)"),
        ({"x": f32(2, 3, 64)}, ShapeError, r"x has shape \(2, 3, 64\), expected \[T, K\] or \[K\]"),
        ({"x": f32(3, 32), "norm_weight": f32(32)}, ShapeError, r"w has shape \(9, 64\)"),
        ({"eps": -1.0}, InvalidArgument, "eps is -1.0"),
        ({"per_expert_scale": f32(9)}, ShapeError, r"per_expert_scale has shape \(9,\), expected \(8,\)"),
        ({"active": i32(0, 0)}, ShapeError, r"active has shape \(2,\), expected \(3,\)"),
    ],
    "moe_norm_group_route": [
        ({"n_group": 3}, InvalidArgument, "n_group is 3, expected a divisor of 8"),
        ({"bias": f32(7)}, ShapeError, r"bias has shape \(7,\), expected \(8,\)"),
        ({"write_normed": True, "norm_weight": None}, InvalidArgument, "write_normed is True without norm_weight"),
    ],
    "moe_route": [
        ({"top_k": 0}, InvalidArgument, "top_k is 0, expected 1 to 8"),
        ({"top_k": 9}, InvalidArgument, "top_k is 9, expected 1 to 8"),
        ({"top_k": 2.0}, DTypeError, "top_k is 2.0, expected an int"),
        ({"logits": f32(3, 0)}, ShapeError, r"logits has shape \(3, 0\), expected at least one expert"),
        ({"logits": f32(2, 3, 8)}, ShapeError, r"logits has shape \(2, 3, 8\), expected \[T, E\] or \[E\]"),
        ({"logits": f16(3, 8)}, DTypeError, "logits has dtype float16, expected float32"),
        ({"active": i32(0, 0)}, ShapeError, r"active has shape \(2,\), expected \(3,\) \(one per row of logits\)"),
        ({"active": f32(3)}, DTypeError, "active has dtype float32, expected int32"),
        ({"per_expert_scale": f32(7)}, ShapeError, r"per_expert_scale has shape \(7,\), expected \(8,\)"),
    ],
    "moe_softmax_topk": [
        ({"k": 0}, InvalidArgument, "k is 0, expected 1 to 8"),
        ({"k": 9}, InvalidArgument, "k is 9, expected 1 to 8"),
        ({"logits": f32()}, ShapeError, r"logits has shape \(\), expected \[T, E\] or \[E\]"),
    ],
    "moe_group_route": [
        ({"n_group": 3}, InvalidArgument, "n_group is 3, expected a divisor of 8"),
        ({"n_group": 0}, InvalidArgument, "n_group is 0, expected at least 1"),
        ({"n_group": 8}, InvalidArgument, "n_group is 8, expected at least 2 of the 8 experts"),
        ({"topk_group": 0}, InvalidArgument, "topk_group is 0, expected 1 to 4"),
        ({"topk_group": 5}, InvalidArgument, "topk_group is 5, expected 1 to 4"),
        ({"top_k": 5}, InvalidArgument, "top_k is 5, expected at most 4"),
        ({"bias": f32(4)}, ShapeError, r"bias has shape \(4,\), expected \(8,\)"),
        ({"routed_scaling_factor": INF}, InvalidArgument, "routed_scaling_factor is inf, expected"),
        ({"norm_eps": 0.0}, InvalidArgument, "norm_eps is 0.0, expected a positive finite number"),
    ],
    "moe_normalize_weights": [
        ({"weights": f16(3, 4)}, DTypeError, "weights has dtype float16, expected float32"),
        ({"weights": f32(3, 0)}, ShapeError, r"weights has shape \(3, 0\), expected "),
        ({"weights": f32(1, 3, 4)}, ShapeError, r"weights has shape \(1, 3, 4\), expected"),
    ],
    "expert_gate_up": [
        ({"x": f32(4, 32)}, ShapeError, r"gate_w has shape \(3, 32, 64\), expected a last axis of 32"),
        ({"x": f32(3, 64)}, ShapeError, r"x has shape \(3, 64\), expected \(4, 64\)"),
        ({"x": f32(64)}, ShapeError, r"x has shape \(64,\), expected \[T, K\]"),
        ({"up_w": f32(3, 31, 64)}, ShapeError, r"up_w has shape \(3, 31, 64\), expected \(3, 32, 64\)"),
        ({"gate_w": f32(3, 7, 64), "up_w": None}, ShapeError, r"gate_w has .* expected an even number"),
        ({"gate_w": f32(32, 64)}, ShapeError, r"gate_w has shape \(32, 64\), expected \[E, N, K\]"),
        ({"ids": np.full((4, 2), 3, "int32")}, InvalidArgument, "ids has 3, expected -1 to 2"),
        ({"ids": np.full((4, 2), -2, "int32")}, InvalidArgument, "ids has -2, expected -1 to 2"),
        ({"ids": np.zeros((4, 0), "int32")}, ShapeError, r"ids has shape \(4, 0\), expected no empty"),
        ({"act": "gelu"}, InvalidArgument, "act is 'gelu', expected one of 'silu', 'gelu_tanh'"),
        ({"activations": "int4"}, InvalidArgument, "activations is 'int4', expected one of 'float32'"),
        ({"slot_of": f32(3)}, DTypeError, "slot_of has dtype float32, expected int32"),
    ],
    "expert_down_sum": [
        ({"h": np.zeros((4, 2, 32), "int32")}, DTypeError, "h has dtype int32, expected float32"),
        ({"h": f32(4, 3, 32)}, ShapeError, r"h has shape \(4, 3, 32\), expected \(4, 2, 32\)"),
        ({"h": f32(4, 2, 64)}, ShapeError, r"down_w has shape \(3, 9, 32\), expected a last axis of 64"),
        ({"weights": f32(4, 3)}, ShapeError, r"weights has shape \(4, 3\), expected \(4, 2\)"),
        ({"weights": f16(4, 2)}, DTypeError, "weights has dtype float16, expected float32"),
        ({"ids": np.full((4, 2), 3, "int32")}, InvalidArgument, "ids has 3, expected -1 to 2"),
    ],
    "moe_forward": [
        ({"down_w": f32(2, 9, 32)}, ShapeError, "down_w has 2 experts, expected 3"),
        ({"down_w": f32(3, 9, 31)}, ShapeError, r"down_w has shape \(3, 9, 31\), expected a last axis of 32"),
        ({"down_w": f32()}, ShapeError, r"down_w has shape \(\), expected \[E, N, K\]"),
        ({"weights": f32(4, 1)}, ShapeError, r"weights has shape \(4, 1\), expected \(4, 2\)"),
        ({"ids": np.full((4, 2), 7, "int32")}, InvalidArgument, "ids has 7, expected -1 to 2"),
    ],
    "moe_shared_forward": [
        ({"residual": f32(4, 63)}, ShapeError, r"residual has shape \(4, 63\), expected \(4, 64\)"),
        ({"shared_up_w": f32(96, 63)}, ShapeError, r"shared_up_w has shape \(96, 63\), expected a last axis of 64"),
        ({"shared_up_w": f32(95, 64)}, ShapeError, r"shared_up_w has shape \(95, 64\), expected \(96, 64\)"),
        ({"shared_gate_w": f32(95, 64), "shared_up_w": None}, ShapeError, r"shared_gate_w has .* an even number"),
        ({"shared_down_w": f32(64, 95)}, ShapeError, r"shared_down_w has shape \(64, 95\), expected a last axis"),
        ({"shared_down_w": f32(63, 96)}, ShapeError, r"shared_down_w has shape \(63, 96\), expected \(64, 96\)"),
        ({"shared_score": f32(5)}, ShapeError, r"shared_score has shape \(5,\), expected \(4,\) or \(4, 1\)"),
        ({"norm_weight": f32(63)}, ShapeError, r"norm_weight has shape \(63,\), expected \(64,\)"),
        ({"eps": NAN}, InvalidArgument, "eps is nan, expected a finite number"),
        ({"ids": np.full((4, 2), 7, "int32")}, InvalidArgument, "ids has 7, expected -1 to 2"),
        ({"act": "gelu"}, InvalidArgument, "act is 'gelu', expected one of 'silu', 'gelu_tanh'"),
    ],
    "moe_route_forward": [
        ({"scored": False}, ShapeError, r"per_expert_scale has shape \(3,\), expected \(4,\)"),
        ({"w": f32(6, 64), "per_expert_scale": None}, ShapeError, r"gate_w has 3 experts, expected 5"),
        ({"norm_weight": f32(63)}, ShapeError, r"norm_weight has shape \(63,\), expected \(64,\)"),
        ({"top_k": 4}, InvalidArgument, "top_k is 4, expected 1 to 3"),
        ({"residual": f32(4, 63)}, ShapeError, r"residual has shape \(4, 63\), expected \(4, 64\)"),
        ({"shared_down_w": f32(64, 95)}, ShapeError, r"shared_down_w has shape \(64, 95\), expected a last axis"),
        ({"active": i32(0, 0)}, ShapeError, r"active has shape \(2,\), expected \(4,\)"),
        ({"act": "gelu"}, InvalidArgument, "act is 'gelu', expected one of 'silu', 'gelu_tanh'"),
    ],
    "moe_combine_residual": [
        ({"moe_sum": f32(4, 5)}, InvalidArgument, "expert_out with weights, or moe_sum, expected"),
        ({"expert_out": None}, InvalidArgument, "expert_out with weights, or moe_sum, expected"),
        ({"weights": None}, InvalidArgument, "expert_out with weights, or moe_sum, expected"),
        ({"weights": f32(4, 3)}, ShapeError, r"weights has shape \(4, 3\), expected \(4, 2\)"),
        ({"weights": f16(4, 2)}, DTypeError, "weights has dtype float16, expected float32"),
        ({"expert_out": f16(4, 2, 5)}, DTypeError, "shared_out has dtype float32, expected float16 as expert_out"),
        ({"shared_out": f32(5)}, ShapeError, r"shared_out has shape \(5,\), expected \(4, 5\)"),
        ({"shared_out": None}, InvalidArgument, "shared_gate is given without shared_out, expected"),
        ({"shared_gate": f32(5)}, ShapeError, r"shared_gate has shape \(5,\), expected \(4,\)"),
        ({"shared_gate": f16(4)}, DTypeError, "shared_gate has dtype float16, expected float32"),
        ({"h_mid": f32(4, 0)}, ShapeError, r"h_mid has shape \(4, 0\), expected a last axis of at"),
        ({"h_mid": None, "expert_out": f32(2)}, ShapeError, r"expert_out has shape \(2,\), expected"),
        ({"h_mid": None, "expert_out": f32(4, 2, 0)}, ShapeError, r"expert_out has shape \(4, 2, 0\), expected a last"),
        ({"h_mid": None, "shared_out": f32(3, 5)}, ShapeError, r"shared_out has shape \(3, 5\), expected \(4, 5\)"),
        ({"h_mid": None, "weights": f32(4, 3)}, ShapeError, r"weights has shape \(4, 3\), expected \(4, 2\)"),
    ],
    "moe_bucket_accumulate": [
        ({"token_idx": i32(3, 4)}, InvalidArgument, "token_idx has 4, expected 0 to 3"),
        ({"token_idx": i32(-1, 0)}, InvalidArgument, "token_idx has -1, expected 0 to 3"),
        ({"token_idx": i32(1)}, ShapeError, r"bucket_out has shape \(2, 5\), expected \(1, 5\)"),
        ({"weights": f32(3)}, ShapeError, r"weights has shape \(3,\), expected \(2,\)"),
        ({"bucket_out": f16(2, 5)}, DTypeError, "bucket_out has dtype float16, expected float32"),
        ({"out_sum": f32(5)}, ShapeError, r"out_sum has shape \(5,\), expected \[T, dim\]"),
        ({"out": f32(4, 5)}, ShapeError, "out has 1 arrays, expected 0"),
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "error", "message"), [(name, *case) for name, cases in WRONG.items() for case in cases]
)
def test_moe_op_names_what_is_wrong(name, change, error, message, rng):
    assert_refused_like(getattr(ops, name), VALID[name](rng) | change, error, message)
