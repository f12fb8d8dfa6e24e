import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock import ops
from penstock.dtypes import numpy_dtype, round_to
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from tests.ops.common import DTYPES, EPS, assert_close, assert_refused_like, assert_same_bits, normal

INF, NAN = np.inf, np.nan


@pytest.fixture(autouse=True)
def _definition():
    with penstock.backend("reference"):
        yield


# -- what every op refuses, for the tests of all families --------------------------------------------------------------


def strided(array):
    """The same values with a gap after each of them."""
    return np.repeat(array, 2, axis=-1)[..., ::2]


def check_refusals(op, args):
    """Each argument of a valid call made bad in turn, then each output (dtype, shape, layout, read-only, overlap)."""
    for name, value in args.items():
        assert_refused_like(op, args | {name: [1.0]}, DTypeError, f"{name} is a list, expected ")
        if isinstance(value, np.ndarray):
            other = "int64" if value.dtype.kind == "i" else "float64"
            assert_refused_like(
                op, args | {name: value.astype(other)}, DTypeError, f"{name} has dtype {other}, expected "
            )
        if isinstance(value, np.ndarray) and value.ndim and value.size > 1:
            message = f"{name} is not contiguous {re.escape(f'(shape {value.shape})')}, expected a C-contiguous array"
            assert_refused_like(op, args | {name: strided(value)}, ShapeError, message)
    if op.writes:
        return
    results = op(**args)
    results = results if isinstance(results, tuple) else (results,)
    clean = tuple(np.full(r.shape, 7, r.dtype) for r in results)
    assert_refused_like(
        op, args | {"out": (*clean, clean[0])}, ShapeError, f"out has {len(clean) + 1} arrays, expected "
    )
    for i, good in enumerate(clean):
        name = "out" if len(clean) == 1 else rf"out\[{i}\]"
        other = "float16" if good.dtype == np.float32 else "float32"
        shape = (*good.shape[:-1], good.shape[-1] + 1)
        frozen = good.copy()
        frozen.flags.writeable = False
        for bad, error, message in (
            (good.astype(other), DTypeError, f"has dtype {other}, expected {good.dtype}"),
            (np.full(shape, 7, good.dtype), ShapeError, re.escape(f"has shape {shape}, expected {good.shape}")),
            (strided(good), ShapeError, "is not contiguous"),
            (frozen, InvalidArgument, "is read-only, expected a writable array"),
        ):
            assert_refused_like(op, args | {"out": (*clean[:i], bad, *clean[i + 1 :])}, error, f"{name} {message}")
        check_overlaps(op, args, clean, i, name)


def check_overlaps(op, args, clean, i, name):
    """Output i one element into an input is refused; over an input of its shape it is allowed where the op says so."""
    for argument, value in args.items():
        if not isinstance(value, np.ndarray) or value.dtype != clean[i].dtype or value.size < 2:
            continue
        memory = np.zeros(max(value.size, clean[i].size + 1), value.dtype)
        memory[: value.size] = value.reshape(-1)
        moved = args | {argument: memory[: value.size].reshape(value.shape)}
        shifted = memory[1 : clean[i].size + 1].reshape(clean[i].shape)
        message = rf"{name} overlaps {argument} in memory, expected "
        assert_refused_like(op, moved | {"out": (*clean[:i], shifted, *clean[i + 1 :])}, InvalidArgument, message)
        if value.shape != clean[i].shape:
            continue
        moved = args | {argument: value.copy()}
        over = moved | {"out": (*clean[:i], moved[argument], *clean[i + 1 :])}
        if not op.alias:
            assert_refused_like(op, over, InvalidArgument, message)
            continue
        want = op(**args)
        got = op(**over)
        assert (got[i] if isinstance(got, tuple) else got) is moved[argument]
        for g, w in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
            assert_same_bits(f"{op.name} over {argument}", g, w)


# -- the ops -----------------------------------------------------------------------------------------------------------

GATED = {
    "swiglu": lambda torch, a, b: torch.nn.functional.silu(a) * b,
    "geglu": lambda torch, a, b: torch.nn.functional.gelu(a, approximate="tanh") * b,
    "sigmoid_gate": lambda torch, a, b: a * torch.sigmoid(b),
    "gelu_tanh": lambda torch, a: torch.nn.functional.gelu(a, approximate="tanh"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATED)
def test_activation_matches_torch(name, dtype, rng):
    torch = pytest.importorskip("torch")
    for shape in [(1,), (3,), (5, 7), (2, 3, 33), (0, 4)]:
        args = [normal(rng, *shape, dtype=dtype, scale=3) for _ in range(GATED[name].__code__.co_argcount - 1)]
        want = GATED[name](torch, *(torch.from_numpy(a.astype(np.float64)) for a in args)).numpy()
        got = getattr(ops, name)(*args)
        assert got.dtype == numpy_dtype(dtype)
        assert_close(name, got, want, 1.01 * EPS[dtype], np.maximum(np.abs(want), 1e-4))


def test_swiglu_by_hand():
    gate, up = np.array([0, 1, -1, np.log(3)], "float32"), np.array([5, 2, 2, 4], "float32")
    sigma = 1 / (1 + np.exp(-1.0))
    assert_close("y", ops.swiglu(gate, up), [0, 2 * sigma, -2 * (1 - sigma), 3 * np.log(3)], 1e-7)
    assert np.abs(ops.swiglu(gate, up) - ops.swiglu(up, gate)).max() > 0.1  # the first argument is the gate


# x, silu(x), gelu_tanh(x), sigmoid(x) (as x = 1 gated), softcap(x, 30)
EXTREMES = [
    (INF, INF, INF, 1, 30),
    (-INF, NAN, NAN, 0, -30),
    (1e4, 1e4, 1e4, 1, 30),
    (-1e4, -0.0, -0.0, 0, -30),
    (3.0e38, np.float32(3.0e38), np.float32(3.0e38), 1, 30),
    (-3.0e38, -0.0, -0.0, 0, -30),
    (NAN, NAN, NAN, NAN, NAN),
    (0.0, 0.0, 0.0, 0.5, 0.0),
    (-0.0, -0.0, -0.0, 0.5, -0.0),
    (1e-30, np.float32(1e-30) / 2, np.float32(1e-30) / 2, 0.5, np.float32(1e-30)),
]


@pytest.mark.parametrize(("x", "silu", "gelu", "sigma", "capped"), EXTREMES)
def test_activations_at_extremes(x, silu, gelu, sigma, capped):
    x, one = np.array([x], "float32"), np.ones(1, "float32")
    results = ops.swiglu(x, one), ops.gelu_tanh(x), ops.geglu(x, one), ops.sigmoid_gate(one, x), ops.softcap(x, 30.0)
    for got, want in zip(results, (silu, gelu, gelu, sigma, capped), strict=True):
        np.testing.assert_array_equal(got, np.float32([want]))
        assert np.isnan(want) or np.signbit(got[0]) == np.signbit(want)


def test_sigmoid_gate_closes_on_infinity_only_for_finite_values():
    x, gate = np.array([2, INF, -INF], "float32"), np.array([-INF, -INF, INF], "float32")
    np.testing.assert_array_equal(ops.sigmoid_gate(x, gate), [0, NAN, -INF])


def test_gelu_tanh_is_not_the_erf_form():
    torch = pytest.importorskip("torch")
    x = np.linspace(-3, 3, 61, dtype="float32")
    erf = torch.nn.functional.gelu(torch.from_numpy(x)).numpy()
    assert 1e-4 < np.abs(ops.gelu_tanh(x) - erf).max() < 1e-3
    assert np.abs(ops.geglu(x, np.ones_like(x)) - ops.swiglu(x, np.ones_like(x))).max() > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap_presses_into_the_cap_and_keeps_the_order(dtype, rng):
    x = np.sort(normal(rng, 3, 50, dtype=dtype, scale=40).reshape(-1))
    for cap in (30.0, 0.5, 7):
        y = ops.softcap(x, cap)
        assert_close("y", y, cap * np.tanh(x.astype(np.float64) / cap), 1.01 * EPS[dtype])
        assert (np.abs(y) <= cap).all()
        assert (np.diff(y.astype(np.float64)) >= 0).all()


@pytest.mark.parametrize("cap", [0.0, -1.0, INF, NAN])
def test_softcap_refuses_a_cap_that_caps_nothing(cap):
    assert_refused_like(
        ops.softcap, {"x": np.ones(3, "float32"), "cap": cap}, InvalidArgument, f"cap is {cap}, expected "
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_add_is_one_float_addition(dtype, rng):
    a, b = (normal(rng, 41, 13, dtype=dtype) for _ in range(2))
    a[0], b[0] = np.finfo(np.float16).max * 0.6, np.finfo(np.float16).max * 0.6  # above the largest float16
    a[1], b[1] = round_to(np.logspace(-8, 4, 13), a.dtype), round_to(-np.logspace(4, -8, 13), a.dtype)
    a[2, :5], b[2, :5] = [INF, INF, -INF, NAN, -0.0], [INF, -INF, 1, 1, -0.0]
    with np.errstate(all="ignore"):
        want = (a.astype(np.float32) + b.astype(np.float32)).astype(a.dtype)
    got = ops.residual_add(a, b)
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))
    assert_same_bits("sum", np.nan_to_num(got), np.nan_to_num(want))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "formula"), [("add", np.add), ("mul", np.multiply)])
def test_add_and_mul_broadcast_a_vector_or_one_number(name, formula, dtype, rng):
    a = normal(rng, 2, 3, 5, dtype=dtype)
    full, vector = normal(rng, 2, 3, 5, dtype=dtype), normal(rng, 5)
    ones = np.array(1.5, "float32"), np.array([1.5], "float16"), np.full((1, 1), 1.5, "float32"), 1.5, np.float32(1.5)
    for b in (full, vector, vector.astype("float16"), *ones, 3):
        want = round_to(formula(a.astype(np.float64), np.asarray(b, np.float64)), a.dtype)
        assert_same_bits(name, getattr(ops, name)(a, b), want)
    assert getattr(ops, name)(a[:0], vector).shape == (0, 3, 5)
    out = a.copy()
    assert getattr(ops, name)(out, vector, out=out) is out
    assert_same_bits("in place", out, getattr(ops, name)(a, vector))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weighted_sum_matches_einsum(dtype, rng):
    x, weights = normal(rng, 3, 4, 7, dtype=dtype), normal(rng, 3, 4)
    want = np.einsum("tkd,tk->td", x.astype(np.float64), weights.astype(np.float64))
    y = ops.weighted_sum(x, weights)
    assert y.dtype == x.dtype
    assert_close("y", y, want, 1.01 * EPS[dtype])
    for t in range(3):
        assert_same_bits("one token", ops.weighted_sum(x[t], weights[t]), y[t])


def test_weighted_sum_adds_slot_after_slot():
    x = np.array([[1e8], [1.0], [-1e8]], "float32")
    big = np.array([1e30, 1.0, 1e30], "float32")  # even float64 loses the middle slot: the order shows
    assert ops.weighted_sum(x, np.ones(3, "float32"))[0] == 1
    assert ops.weighted_sum(x, big)[0] == 0
    assert ops.weighted_sum(x[[0, 2, 1]], big[[0, 2, 1]])[0] == 1


@given(st.integers(0, 3), st.integers(0, 5), st.integers(1, 4))
def test_weighted_sum_of_any_shape(T, k, dim):
    x = np.arange(T * k * dim, dtype="float32").reshape(T, k, dim)
    weights = np.arange(1, T * k + 1, dtype="float32").reshape(T, k)
    want = [[sum(weights[t, i] * x[t, i, d] for i in range(k)) for d in range(dim)] for t in range(T)]
    np.testing.assert_array_equal(ops.weighted_sum(x, weights), np.reshape(want, (T, dim)))
    ones = np.ones((k, dim), "float32")
    np.testing.assert_array_equal(ops.weighted_sum(ones, ones[:, 0].copy()), np.full(dim, k))


def test_elementwise_ops_take_torch_tensors(rng):
    torch = pytest.importorskip("torch")
    a, b = normal(rng, 3, 5, dtype="bfloat16"), normal(rng, 3, 5, dtype="bfloat16")
    tensors = [torch.from_numpy(v.view(np.int16)).view(torch.bfloat16) for v in (a, b)]
    y = ops.swiglu(*tensors)
    assert y.dtype is torch.bfloat16
    assert_same_bits("y", y.view(torch.int16).numpy(), ops.swiglu(a, b).view(np.int16))


def _pair(first, second):
    return lambda rng: {first: normal(rng, 3, 5), second: normal(rng, 3, 5)}


VALID = {
    "add": _pair("a", "b"),
    "mul": _pair("a", "b"),
    "residual_add": _pair("a", "b"),
    "swiglu": _pair("gate", "up"),
    "geglu": _pair("gate", "up"),
    "sigmoid_gate": _pair("x", "gate"),
    "gelu_tanh": lambda rng: {"x": normal(rng, 3, 5)},
    "softcap": lambda rng: {"x": normal(rng, 3, 5), "cap": 3.0},
    "weighted_sum": lambda rng: {"expert_out": normal(rng, 3, 4, 5), "weights": normal(rng, 3, 4)},
}


@pytest.mark.parametrize("name", VALID)
def test_elementwise_op_refuses_bad_arrays(name, rng):
    check_refusals(getattr(ops, name), VALID[name](rng))


def f32(*shape):
    return np.zeros(shape, "float32")


def f16(*shape):
    return np.zeros(shape, "float16")


WRONG = {
    "residual_add": [({"b": f32(5)}, ShapeError, r"b has shape \(5,\), expected \(3, 5\) \(as a\)")],
    "swiglu": [
        ({"up": f32(3, 4)}, ShapeError, r"up has shape \(3, 4\), expected \(3, 5\) \(as gate\)"),
        ({"up": f16(3, 5)}, DTypeError, "up has dtype float16, expected float32 as gate"),
        ({"gate": f32(3, 0), "up": f32(3, 0)}, ShapeError, r"gate has shape \(3, 0\), expected no "),
    ],
    "geglu": [
        ({"up": f32(5, 3)}, ShapeError, r"up has shape \(5, 3\), expected \(3, 5\) \(as gate\)"),
        ({"gate": f16(3, 5)}, DTypeError, "up has dtype float32, expected float16 as gate"),
    ],
    "sigmoid_gate": [
        ({"gate": f32(3)}, ShapeError, r"gate has shape \(3,\), expected \(3, 5\) \(as x\)"),
        ({"gate": f16(3, 5)}, DTypeError, "gate has dtype float16, expected float32 as x"),
    ],
    "gelu_tanh": [({"x": f32(3, 0)}, ShapeError, r"x has shape \(3, 0\), expected no empty axis but the first")],
    "softcap": [
        ({"x": f32(2, 0, 4)}, ShapeError, r"x has shape \(2, 0, 4\), expected no empty axis but the first"),
        ({"cap": "30"}, DTypeError, "cap is '30', expected a float"),
        ({"cap": True}, DTypeError, "cap is True, expected a float"),
    ],
    "add": [
        ({"b": f32(3)}, ShapeError, r"b has shape \(3,\), expected \(3, 5\), \(5,\) or one element"),
        ({"b": f16(3, 5)}, DTypeError, "b has dtype float16, expected float32 as a"),
    ],
    "mul": [
        ({"b": f32(3, 1)}, ShapeError, r"b has shape \(3, 1\), expected \(3, 5\), \(5,\) or one element"),
        ({"b": f16(3, 5)}, DTypeError, "b has dtype float16, expected float32 as a"),
    ],
    "weighted_sum": [
        ({"weights": f32(4, 3)}, ShapeError, r"weights has shape \(4, 3\), expected \(3, 4\)"),
        ({"weights": f16(3, 4)}, DTypeError, "weights has dtype float16, expected float32"),
        ({"expert_out": f32(3, 4, 0)}, ShapeError, r"expert_out has shape \(3, 4, 0\), expected "),
        ({"expert_out": f32(5)}, ShapeError, r"expert_out has shape \(5,\), expected \[T, k, dim\]"),
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "error", "message"), [(name, *case) for name, cases in WRONG.items() for case in cases]
)
def test_elementwise_op_names_what_is_wrong(name, change, error, message, rng):
    assert_refused_like(getattr(ops, name), VALID[name](rng) | change, error, message)
