"""The compiled loops of quantize and dequantize against the NumPy definitions, bit for bit."""

import os
import subprocess
import sys

import numba
import numpy as np
import pytest

from penstock.backends.cpu.quant import dequantize_into, quantize_into
from penstock.dtypes import FLOATS, numpy_dtype
from penstock.quant import BITS, GROUP_SIZES, QuantizedTensor, dequantize, pack_codes, quantize_reference


def bits_of(array):
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def assert_same_bits_or_nan(got, want):
    """A NaN has no defined sign and payload; everything else is equal to the last bit."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(bits_of(got)[~nan], bits_of(want)[~nan])


def filled_like(q):
    """Room for a tensor like q, full of ones and NaN."""
    nan = np.full(q.scales.shape, np.nan, np.float32).astype(q.scales.dtype)
    return q.with_arrays(np.full_like(q.packed, 0xFFFFFFFF), nan, nan.copy())


def quantized(x, bits, group_size):
    want = quantize_reference(x, bits, group_size)
    got = filled_like(want)
    assert quantize_into(x, got) == -1
    for a, b in zip(got.arrays, want.arrays, strict=True):
        np.testing.assert_array_equal(bits_of(a), bits_of(b))
    return got


def dequantized(q, dtype):
    out = np.full(q.shape, np.nan, np.float32).astype(numpy_dtype(dtype))
    dequantize_into(q, out)
    return out


def random_bits(rng, shape, dtype):
    """Any value of the dtype: every exponent, subnormal, infinite and NaN."""
    unsigned = {2: np.uint16, 4: np.uint32}[numpy_dtype(dtype).itemsize]
    return rng.integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True).view(numpy_dtype(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_quantize_kernel_equals_definition(bits, group_size, dtype, rng):
    scale = 10.0 ** rng.uniform(-12, 3, (3, 47, 1))
    x = (scale * rng.standard_normal((3, 47, 3 * group_size))).astype(np.float32).astype(numpy_dtype(dtype))
    q = quantized(x, bits, group_size)
    for out in FLOATS:
        assert_same_bits_or_nan(dequantized(q, out), dequantize(q, out))


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129])
def test_quantize_kernel_takes_any_number_of_groups(rows, rng):
    x = rng.standard_normal((rows, 64)).astype(np.float32)
    q = quantized(x, 3, 64)
    assert_same_bits_or_nan(dequantized(q, "float32"), dequantize(q))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("out", FLOATS)
@pytest.mark.parametrize("bits", [3, 8])
def test_dequantize_kernel_equals_definition_for_any_scale(bits, out, dtype, rng):
    groups = (211, 5)
    codes = pack_codes(rng.integers(0, 2**bits, (211, 160)), bits)
    q = QuantizedTensor(codes, random_bits(rng, groups, dtype), random_bits(rng, groups, dtype), bits, 32)
    assert_same_bits_or_nan(dequantized(q, out), dequantize(q, out))


@pytest.mark.parametrize("out", ["float16", "bfloat16"])
def test_dequantize_kernel_rounds_to_nearest_even(out):
    """All values of the half that stand for float32 numbers, the ties between them, and the neighbours of both."""
    halves = np.arange(0x7C00 if out == "float16" else 0x7F80, dtype=np.uint16).view(numpy_dtype(out))
    exact = halves.astype(np.float32)
    ties = exact[:-1] + (exact[1:] - exact[:-1]) / 2
    near = np.concatenate([exact, ties])
    values = np.concatenate([near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(0))])
    values = np.concatenate([values, -values, np.float32([65519.99, 65520, 3.4028235e38, np.inf, -np.inf, np.nan])])
    biases = values.reshape(-1, 1)
    packed = np.zeros((len(biases), 2), np.uint32)
    q = QuantizedTensor(packed, np.zeros_like(biases), biases, 2, 32)
    with np.errstate(over="ignore"):
        want = np.repeat(biases + np.float32(0), 32, axis=1).astype(numpy_dtype(out))
    assert_same_bits_or_nan(dequantized(q, out), want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dequantize_kernel_widens_every_half(dtype):
    biases = np.arange(0x10000, dtype=np.uint16).view(numpy_dtype(dtype)).reshape(-1, 1)
    q = QuantizedTensor(np.zeros((0x10000, 2), np.uint32), np.zeros_like(biases), biases, 2, 32)
    with np.errstate(invalid="ignore"):  # signalling NaN
        want = np.repeat(biases.astype(np.float32) + np.float32(0), 32, axis=1)
    assert_same_bits_or_nan(dequantized(q, "float32"), want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_quantize_kernel_finds_the_first_unfit_group(dtype, value, rng):
    x = rng.standard_normal((301, 2, 64)).astype(np.float32)
    x[140, 1, 33] = x[300, 0, 0] = value
    x = x.astype(numpy_dtype(dtype))
    assert quantize_into(x, filled_like(quantize_reference(np.zeros_like(x), 4, 32))) == (140 * 2 + 1) * 2 + 1


def test_kernels_do_not_depend_on_the_number_of_threads(rng):
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("one core")
    x = rng.standard_normal((1031, 128)).astype(np.float32)
    want = quantize_reference(x, 5, 32)
    before = numba.get_num_threads()
    try:
        for threads in (1, 2):
            numba.set_num_threads(threads)
            assert_same_bits_or_nan(dequantized(quantized(x, 5, 32), "float16"), dequantize(want, "float16"))
    finally:
        numba.set_num_threads(before)


def test_kernels_read_arrays_that_are_read_only(rng):
    x = rng.standard_normal((5, 64)).astype(np.float32)
    x.flags.writeable = False
    q = quantized(x, 4, 32)
    for a in q.arrays:
        a.flags.writeable = False
    assert_same_bits_or_nan(dequantized(q, "float32"), dequantize(q))


def test_kernels_run_without_their_compiler():
    script = """
import warnings; warnings.simplefilter("error")
import numpy as np
from penstock.backends.cpu import quant
from penstock.dtypes import numpy_dtype
from penstock.quant import dequantize, quantize, quantize_reference
assert type(quant._quantize).__name__ == "function"
for dtype in ("float32", "float16", "bfloat16"):
    x = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32).astype(numpy_dtype(dtype))
    q, want = quantize(x, 5, 32), quantize_reference(x, 5, 32)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(q.arrays, want.arrays))
    out = np.empty_like(x)
    quant.dequantize_into(q, out)
    assert out.tobytes() == dequantize(q, dtype).tobytes()
"""
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, check=True)
