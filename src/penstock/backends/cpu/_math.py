"""exp, log and what is made of them as float32 polynomials that vectorise: pip's Numba has no vector math library.

Scalar functions without branches: called in a loop they are inlined, and LLVM turns the loop into vector code (np.exp
stays a call per element). NaN, infinities and signed zeros are as in NumPy; underflow is gradual, but sigmoid and its
products are 0 where e**-|x| is subnormal. Largest errors, measured on all magnitudes against float64 in
tests/backends/test_math.py: 1 ulp for exp and log, 2 for log1p and softplus, 2.5 for tanh and sigmoid, 3 for silu and
gelu; on the negative side gelu has the error of its exponent 2u as well, 2.5 |2u| ulp.
"""

import functools

import numpy as np

from penstock.backends.cpu._formats import number, pattern_of
from penstock.backends.cpu.compile import FUSED_MULTIPLY_ADD, njit

_ZERO, _HALF, _ONE, _TWO = (np.float32(x) for x in (0, 0.5, 1, 2))
_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts (Cody and Waite): the first has 9 bits, so its product with an exponent is exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440054690583e-4)

_EXP_LEAST, _EXP_MOST = np.float32(-104), np.float32(89)  # exp is 0 below and infinite above
_SIGMOID_MOST = np.float32(87.33)  # e**-x is a normal float32 up to here
_ROUNDER = np.float32(1.5 * 2.0**23)  # added to a float32, it leaves the nearest integer in the lowest bits
_TANH_MOST = np.float32(10)  # tanh rounds to 1 from 9.01 on
_LOG_LEAST_NORMAL = np.int32(0x00800000)
_ROOT_HALF = np.int32(0x3F3504F3)  # sqrt(1/2)

# (exp(r) - 1 - r) / r**2 on |r| <= ln(2) / 2, within 3.1e-9 of exp
_E0, _E1, _E2, _E3, _E4 = (np.float32(c) for c in (0.49999994, 0.1666652, 0.041668393, 0.008368781, 0.0013814467))
# (log(1 + f) - f + f**2 / 2) / f**3 on sqrt(1/2) <= 1 + f <= sqrt(2), within 7.5e-10 of log
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (
    np.float32(c)
    for c in (
        0.33333313, -0.25000009, 0.20002119, -0.16667996, 0.14219552, -0.12405589, 0.11888162, -0.11675652, 0.0674664,
    )
)  # fmt: skip

_GELU_1, _GELU_3 = np.float32(1.5957691216057308), np.float32(0.07135481282553487)  # 2 sqrt(2/pi) (1, 0.044715)

# pi / 2 in two parts: the first has 22 bits, so its product with a 31-bit quadrant is exact in float64.
_TWO_OVER_PI = 0.6366197723675814
_HALF_PI_HIGH, _HALF_PI_LOW = float.fromhex("0x1.921fb0p+0"), float.fromhex("0x1.5110b4611a626p-22")
SINCOS_MOST = np.float32(2.0**31)  # the largest angle of `sincos`
# (sin(r) - r) / r**3 and (cos(r) - 1 + r**2 / 2) / r**4 in r**2 on |r| <= pi/4, within 5e-15
_S0, _S1, _S2, _S3, _S4 = (
    -0.16666666666631577, 0.008333333325270743, -0.0001984126382270898, 2.7555357730286316e-06, -2.4761651527321217e-08,
)  # fmt: skip
_C0, _C1, _C2, _C3, _C4 = (
    0.04166666666660224, -0.0013888888878247194, 2.4801580945175672e-05, -2.755555986697254e-07, 2.064714184704069e-09,
)  # fmt: skip

_inlined = functools.partial(njit, forceinline=True)  # a call left in a loop would keep it from vectorising


@_inlined
def _power_of_two(n):
    """2**n as float32, n an int32 from -126 to 127."""
    return number((n + np.int32(127)) << np.int32(23))


@_inlined(fastmath=FUSED_MULTIPLY_ADD)
def _expm1_reduced(r):
    """exp(r) - 1 for |r| <= ln(2) / 2."""
    return r + r * r * (_E0 + r * (_E1 + r * (_E2 + r * (_E3 + r * _E4))))


@_inlined(fastmath=FUSED_MULTIPLY_ADD)
def exp32(x):
    """e**x; infinite from 88.7229 on, subnormal below -87.3365, 0 below -103.98."""
    c = x if x > _EXP_LEAST else _EXP_LEAST  # NaN becomes a number here and comes back at the end
    c = c if c < _EXP_MOST else _EXP_MOST
    n = np.rint(c * _LOG2_E)
    r = c - n * _LN2_HIGH - n * _LN2_LOW
    k = np.int32(n)
    half = k >> np.int32(1)  # in two factors: 2**k is no float32 for k = 128 or below -126
    y = (_ONE + _expm1_reduced(r)) * _power_of_two(half) * _power_of_two(k - half)
    return y if x == x else x


@_inlined(fastmath=FUSED_MULTIPLY_ADD)
def _sigmoid_of_number(x):
    """1 / (1 + e**-x) of what is not NaN; 0 below -87.33, where it would be subnormal."""
    c = x if x > -_SIGMOID_MOST else -_SIGMOID_MOST
    c = c if c < _SIGMOID_MOST else _SIGMOID_MOST
    t = c * -_LOG2_E + _ROUNDER
    n = t - _ROUNDER
    r = -c - n * _LN2_HIGH - n * _LN2_LOW
    e = number(pattern_of(_ONE + _expm1_reduced(r)) + (pattern_of(t) << np.int32(23)))
    y = _ONE / (_ONE + e)
    return y if x > -_SIGMOID_MOST else _ZERO


@_inlined
def sigmoid32(x):
    """1 / (1 + e**-x); 0 below -87.33."""
    y = _sigmoid_of_number(x)
    return y if x == x else x


@_inlined
def silu32(x):
    """x * sigmoid(x); -0 below -87.33, NaN for -inf."""
    return x * _sigmoid_of_number(x)


@_inlined(fastmath=FUSED_MULTIPLY_ADD)
def gelu32(x):
    """The tanh form of GELU, 0.5 * x * (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 * x**3)."""
    return x * _sigmoid_of_number(x * (_GELU_1 + _GELU_3 * (x * x)))


@_inlined(fastmath=FUSED_MULTIPLY_ADD)
def tanh32(x):
    """tanh(x) = m / (m + 2) with m = e**(2 |x|) - 1, and the sign of x."""
    a = abs(x)
    c = _TWO * (_TANH_MOST if a > _TANH_MOST else a)  # NaN stays NaN to the end
    t = c * _LOG2_E + _ROUNDER
    n = t - _ROUNDER
    r = c - n * _LN2_HIGH - n * _LN2_LOW
    scale = number((pattern_of(t) << np.int32(23)) + np.int32(127 << 23))
    m = scale * _expm1_reduced(r) + (scale - _ONE)
    return number(pattern_of(m / (m + _TWO)) | (pattern_of(x) & np.int32(-0x80000000)))


@_inlined(fastmath=FUSED_MULTIPLY_ADD)
def log32(x):
    """The natural logarithm; -inf at 0, NaN below."""
    tiny = pattern_of(x) < _LOG_LEAST_NORMAL  # subnormal, or negative and replaced at the end
    p = pattern_of(x * np.float32(2.0**23) if tiny else x)
    k = (p - _ROOT_HALF) >> np.int32(23)
    n = np.float32(k - np.int32(23) if tiny else k)
    f = number(p - (k << np.int32(23))) - _ONE
    q = _L4 + f * (_L5 + f * (_L6 + f * (_L7 + f * _L8)))
    q = _L0 + f * (_L1 + f * (_L2 + f * (_L3 + f * q)))
    s = f * f
    y = n * _LN2_LOW + f * s * q
    y = n * _LN2_HIGH + (f + (y - _HALF * s))
    y = y if x < np.float32(np.inf) else x  # infinity and NaN
    y = y if x != _ZERO else np.float32(-np.inf)
    return y if not x < _ZERO else np.float32(np.nan)


@_inlined
def log1p32(x):
    """log(1 + x), accurate for small x; -inf at -1, NaN below."""
    u = _ONE + x
    lost = (x - (u - _ONE)) / u  # what rounding 1 + x took away
    y = log32(u) + (lost if (u > _ZERO) & (u < np.float32(np.inf)) else _ZERO)
    return y if abs(x) > np.float32(2.0**-25) else x


@_inlined
def softplus32(x):
    """log(1 + e**x) = max(x, 0) + log1p(e**-|x|)."""
    return (x if not x < _ZERO else _ZERO) + log1p32(exp32(-abs(x)))


@_inlined(fastmath=FUSED_MULTIPLY_ADD)
def sincos(angle):
    """(sin, cos) of a float32 angle up to SINCOS_MOST in size, as float64 within 1e-13."""
    x = np.float64(angle)
    n = np.rint(x * _TWO_OVER_PI)
    r = x - n * _HALF_PI_HIGH - n * _HALF_PI_LOW
    z = r * r
    s = r + r * z * (_S0 + z * (_S1 + z * (_S2 + z * (_S3 + z * _S4))))
    c = 1.0 - 0.5 * z + z * z * (_C0 + z * (_C1 + z * (_C2 + z * (_C3 + z * _C4))))
    quadrant = np.int32(n)
    odd = (quadrant & np.int32(1)) != 0
    sin, cos = (c if odd else s), (s if odd else c)
    sin = -sin if (quadrant & np.int32(2)) != 0 else sin
    cos = -cos if ((quadrant + np.int32(1)) & np.int32(2)) != 0 else cos
    return sin, cos
