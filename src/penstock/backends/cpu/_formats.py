"""Float formats inside kernels. Numba knows neither float16 nor bfloat16, so arrays come as bit patterns.

float32 arrays are viewed as int32, the halves as uint16, and a format number says which half it is: a kernel has two
signatures, one per width. Conversions vectorise; widening is exact, rounding goes to nearest, ties to even.
"""

import platform

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from penstock.backends.cpu.compile import njit
from penstock.dtypes import numpy_dtype

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
_FORMATS = {numpy_dtype("float32"): FLOAT32, numpy_dtype("float16"): FLOAT16, numpy_dtype("bfloat16"): BFLOAT16}
_PATTERNS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.int32)}


def fmt(array: np.ndarray) -> int:
    """Format number of a float array."""
    return _FORMATS[array.dtype]


def writable(array: np.ndarray) -> np.ndarray:
    """The bits of an output."""
    return array.view(_PATTERNS[array.dtype.itemsize])


def readable(array: np.ndarray) -> np.ndarray:
    """The bits of an input, read-only: Numba would compile a kernel again for an array that is so by itself."""
    bits = array.view(_PATTERNS[array.dtype.itemsize])
    bits.setflags(False)
    return bits


def frozen(array: np.ndarray) -> np.ndarray:
    """A view of an input as it is (ids, positions, float32 tables), read-only for the same reason."""
    view = array.view()
    view.setflags(False)
    return view


@njit
def number(pattern):
    """float32 of its bits (int32)."""
    return np.int32(pattern).view(np.float32)


@njit
def pattern_of(x):
    """Bits (int32) of a float32."""
    return np.float32(x).view(np.int32)


def _converts_float16() -> bool:
    """True if the CPU that Numba compiles for has instructions for it; without them LLVM would call a library."""
    if numba.config.DISABLE_JIT:
        return False
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+f16c" in features.split(",") or platform.machine().lower() in ("aarch64", "arm64")


@njit
def _widened_half(bits):
    """float32 of a float16 in integer arithmetic."""
    magnitude = np.int32((bits & np.int32(0x7FFF)) << np.int32(13))
    sign = np.int32((bits & np.int32(0x8000)) << np.int32(16))
    # The exponents' biases differ by 112: a float32 product makes up for it and normalises subnormals on the way.
    finite = pattern_of(number(magnitude) * np.float32(2.0**112))
    pattern = finite if magnitude < np.int32(0x0F800000) else np.int32(magnitude | np.int32(0x7F800000))
    return number(sign | pattern)


@njit
def _rounded_half(x):
    """float16 of a float32 that is not NaN, in integer arithmetic."""
    pattern = pattern_of(x)
    magnitude = np.int32(pattern & np.int32(0x7FFFFFFF))
    odd = (magnitude >> np.int32(13)) & np.int32(1)
    normal = np.int32((magnitude + np.int32(0xFFF - 0x38000000) + odd) >> np.int32(13))
    # Below 2**-14 the steps are those of float32 at 0.5: adding 0.5 rounds, and its lowest bits count the steps.
    small = np.int32(pattern_of(number(magnitude) + np.float32(0.5)) - np.int32(0x3F000000))
    half = small if magnitude < np.int32(0x38800000) else normal
    half = half if magnitude < np.int32(0x477FF000) else np.int32(0x7C00)  # from 65520 on: infinity
    return np.int32(half | ((pattern >> np.int32(16)) & np.int32(0x8000)))


if _converts_float16():

    @intrinsic
    def _extend(typingctx, bits):
        def codegen(context, builder, sig, args):
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

        return types.float32(types.uint16), codegen

    @intrinsic
    def _truncate(typingctx, x):
        def codegen(context, builder, sig, args):
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

        return types.uint16(types.float32), codegen

    @njit
    def _from_half(bits):
        return _extend(np.uint16(bits))

    @njit
    def _to_half(x):
        return np.int32(_truncate(np.float32(x)))

else:
    _from_half, _to_half = _widened_half, _rounded_half


@njit
def widened(bits, fmt):
    """The float32 of a bit pattern: exact."""
    if fmt == FLOAT16:
        return _from_half(bits)
    return number(np.int32(bits) << np.int32(16) if fmt == BFLOAT16 else bits)


@njit
def rounded(x, fmt):
    """The bit pattern, as int32, nearest to a float32, ties to even; NaN becomes a quiet NaN."""
    pattern = pattern_of(x)
    if fmt == FLOAT32:
        return pattern
    upper = np.int32(pattern >> np.int32(16))
    if fmt == FLOAT16:
        half = _to_half(x)
        return half if x == x else np.int32((upper & np.int32(0x8000)) | np.int32(0x7E00))
    half = (np.int32(pattern + np.int32(0x7FFF) + (upper & np.int32(1))) >> np.int32(16)) & np.int32(0xFFFF)
    return half if x == x else np.int32((upper & np.int32(0x8000)) | np.int32(0x7FC0))


@njit
def load_row(row, fmt, out):
    """float32 of a row of any format."""
    if fmt == FLOAT16:
        for j in range(row.size):
            out[j] = widened(row[j], FLOAT16)
    elif fmt == BFLOAT16:
        for j in range(row.size):
            out[j] = widened(row[j], BFLOAT16)
    else:
        for j in range(row.size):
            out[j] = number(row[j])


@njit
def store_row(values, fmt, out):
    """A row of float32 into a row of any format."""
    if fmt == FLOAT16:
        for j in range(out.size):
            out[j] = rounded(values[j], FLOAT16)
    elif fmt == BFLOAT16:
        for j in range(out.size):
            out[j] = rounded(values[j], BFLOAT16)
    else:
        for j in range(out.size):
            out[j] = pattern_of(values[j])
