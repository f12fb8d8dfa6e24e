"""The float32 polynomials against float64, on numbers of all magnitudes."""

import numba
import numpy as np
import pytest

from penstock.backends.cpu import _math

INF, NAN = np.inf, np.nan


def sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def gelu(x):
    return x * sigmoid(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


DEFINITIONS = {
    "exp32": np.exp,
    "sigmoid32": sigmoid,
    "silu32": lambda x: x * sigmoid(x),
    "gelu32": gelu,
    "tanh32": np.tanh,
    "log32": np.log,
    "log1p32": np.log1p,
    "softplus32": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
}
LOOPS = {}


def run(name: str, x: np.ndarray) -> np.ndarray:
    """The function in a loop, as kernels call it."""
    if name not in LOOPS:
        function = getattr(_math, name)

        @numba.njit(error_model="numpy")
        def loop(x, y):
            for i in range(x.size):
                y[i] = function(x[i])

        LOOPS[name] = loop
    y = np.empty_like(x)
    LOOPS[name](x, y)
    return y


def magnitudes() -> np.ndarray:
    """A million floats spread over all bit patterns, and the numbers around 0 densely."""
    patterns = np.arange(0, 2**32, 4099, dtype=np.uint64).astype(np.uint32).view(np.float32)
    dense = np.concatenate([np.linspace(-110, 110, 500_001), np.linspace(-2, 2, 500_001)]).astype(np.float32)
    return np.concatenate([patterns, dense])


def ulps(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Errors in units of the last place where the result is finite, and those x; what is not finite must agree."""
    with np.errstate(all="ignore"):
        exact = DEFINITIONS[name](x.astype(np.float64))
        want = exact.astype(np.float32)
    got = run(name, x)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    return np.abs(got[finite] - exact[finite]) / np.spacing(np.abs(want[finite])), x[finite]


@pytest.mark.parametrize(
    "name, bound, least",
    [
        ("exp32", 1, -INF),
        ("log32", 1, -INF),
        ("log1p32", 2, -INF),
        ("softplus32", 2, -INF),
        ("tanh32", 2.5, -INF),
        ("sigmoid32", 2.5, -87.33),
        ("silu32", 3, -87.33),
        ("gelu32", 3, 0),
    ],
)
def test_math_is_within_ulps_of_float64(name, bound, least):
    x = magnitudes()
    errors, x = ulps(name, x[~(x < least)])
    worst = errors.argmax()
    assert errors[worst] <= bound, f"{name}({x[worst]}) is off by {errors[worst]:.2f} ulp"


@pytest.mark.parametrize("name, bound", [("sigmoid32", 1.2e-38), ("silu32", 1.1e-36), ("gelu32", 1.2e-7)])
def test_gates_keep_an_absolute_bound_on_the_negative_side(name, bound):
    x = magnitudes()
    x = x[(x < (0 if name == "gelu32" else -87.33)) & np.isfinite(x)]
    with np.errstate(all="ignore"):
        want = DEFINITIONS[name](x.astype(np.float64))
    assert np.abs(run(name, x) - want).max() <= bound


@pytest.mark.parametrize("name", DEFINITIONS)
def test_math_of_special_numbers(name):
    x = np.array([INF, -INF, NAN, 0.0, -0.0, 3.4e38, -3.4e38, 1e-45, -1e-45, 88.72284, -104, -87.5], np.float32)
    with np.errstate(all="ignore"):
        want = DEFINITIONS[name](x.astype(np.float64)).astype(np.float32)
    got = run(name, x)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1.1e-36)
    zeros = (want == 0) & (x == 0)
    np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(want[zeros]))


@pytest.mark.parametrize("name", DEFINITIONS)
def test_math_does_not_depend_on_the_place_in_the_loop(name):
    """The vector part of a loop and what remains of it give the same bits."""
    x = (np.random.default_rng(0).standard_normal(203) * 4).astype(np.float32)
    whole = run(name, x)
    single = np.concatenate([run(name, x[i : i + 1].copy()) for i in range(x.size)])
    assert whole.tobytes() == single.tobytes()


def test_sincos_of_angles_up_to_its_limit():
    far = np.linspace(0, 2.0**31, 1_000_001)
    near = np.linspace(-200_000, 200_000, 1_000_001)
    angle = np.concatenate([far, -far, near, 2.0 ** np.linspace(-140, 31, 100_001)]).astype(np.float32)

    @numba.njit(error_model="numpy")
    def loop(angle, sin, cos):
        for i in range(angle.size):
            sin[i], cos[i] = _math.sincos(angle[i])

    sin, cos = np.empty(angle.size), np.empty(angle.size)
    loop(angle, sin, cos)
    assert np.abs(sin - np.sin(angle.astype(np.float64))).max() <= 1e-13
    assert np.abs(cos - np.cos(angle.astype(np.float64))).max() <= 1e-13
