"""Quantized tensors, packing, quantize and dequantize: by hand values, against MLX, and what they refuse."""

import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import ops
from penstock.dtypes import FLOATS, bfloat16, f32_to_bf16, numpy_dtype, round_to
from penstock.errors import BackendError, DTypeError, InvalidArgument, ShapeError
from penstock.quant import (
    BITS,
    GROUP_SIZES,
    MODES,
    ExpertBlobs,
    QuantizedTensor,
    dequantize,
    pack_codes,
    quantize,
    quantize_reference,
    unpack_codes,
)

U32, F32 = np.uint32, np.float32


def bits_of(array):
    return np.ascontiguousarray(array).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def assert_same_bits(got, want):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(bits_of(got), bits_of(want))


def assert_same_tensor(got, want):
    for a, b in zip(got.arrays, want.arrays, strict=True):
        assert_same_bits(a, b)


def random_tensor(rng, *rows, K=192, bits=4, group_size=32, dtype="bfloat16"):
    """Any codes; scales and biases of both signs over many orders of magnitude."""
    groups = (*rows, K // group_size)
    spread = [rng.standard_normal(groups) * 10.0 ** rng.uniform(-8, 4, groups) for _ in range(2)]
    codes = rng.integers(0, 2**bits, (*rows, K))
    scales, biases = (x.astype(np.float32).astype(numpy_dtype(dtype)) for x in spread)
    return QuantizedTensor(pack_codes(codes, bits), scales, biases, bits, group_size)


# float formats

BF16_VECTORS = [
    (0x3F800000, 0x3F80, 0x3F80),
    (0x3F808000, 0x3F80, 0x3F80),
    (0x3F818000, 0x3F81, 0x3F82),
    (0x3F808001, 0x3F80, 0x3F81),
    (0x7F7FFFFF, 0x7F7F, 0x7F80),
    (0x7F800001, 0x7F80, 0x7FC0),
    (0x7FFFFFFF, 0x7FFF, 0x7FC0),
    (0xFFFFFFFF, 0xFFFF, 0xFFC0),
    (0x80000000, 0x8000, 0x8000),
]


@pytest.mark.parametrize(("bits", "truncated", "nearest"), BF16_VECTORS, ids=lambda v: f"{v:x}")
def test_f32_to_bf16_by_hand(bits, truncated, nearest):
    x = np.array([bits], np.uint32).view(np.float32)
    assert bits_of(f32_to_bf16(x, mode="truncate"))[0] == truncated
    assert bits_of(f32_to_bf16(x))[0] == nearest


def test_round_to_rounds_float64_to_bfloat16_once():
    above_tie = np.array([1 + 2.0**-8 + 2.0**-40, -1 - 2.0**-8 - 2.0**-40])
    below_tie = np.array([1 + 3 * 2.0**-8 - 2.0**-40])
    step = 2.0**-7
    np.testing.assert_array_equal(round_to(above_tie, bfloat16).astype(np.float64), [1 + step, -1 - step])
    np.testing.assert_array_equal(round_to(below_tie, "bfloat16").astype(np.float64), [1 + step])
    # ml_dtypes passes through float32, which lands on the tie and loses the side:
    np.testing.assert_array_equal(above_tie.astype(bfloat16).astype(np.float64), [1, -1])
    np.testing.assert_array_equal(below_tie.astype(bfloat16).astype(np.float64), [1 + 2 * step])


# packing


@pytest.mark.parametrize(
    ("bits", "codes", "words"),
    [
        (4, range(8), [0x76543210]),
        (8, [1, 2, 3, 4], [0x04030201]),
        (2, [0, 1, 2, 3] * 4, [0xE4E4E4E4]),
        (3, [0, 1, 2, 3, 4, 5, 6, 7] * 4, [0x88FAC688, 0xC688FAC6, 0xFAC688FA]),
        (5, [31, *[0] * 5, 2, *[0] * 25], [0x8000001F, 0, 0, 0, 0]),
        (6, [1, 2, 3, 4, 5, 63, *[0] * 10], [0xC5103081, 0xF, 0]),
    ],
)
def test_pack_codes_by_hand(bits, codes, words):
    packed = pack_codes(np.array([list(codes)]), bits)
    assert [hex(w) for w in packed[0]] == [hex(w) for w in words]
    np.testing.assert_array_equal(unpack_codes(packed, bits), [list(codes)])


@pytest.mark.parametrize("bits", BITS)
def test_pack_codes_is_a_little_endian_bit_stream(bits, rng):
    codes = rng.integers(0, 2**bits, (3, 5, 96))
    stream = np.unpackbits(pack_codes(codes, bits).view(np.uint8), axis=-1, bitorder="little")
    weights = 1 << np.arange(bits)
    np.testing.assert_array_equal(stream.reshape(3, 5, 96, bits) @ weights, codes)


@given(st.data(), st.sampled_from(BITS), st.integers(0, 3), st.integers(1, 5))
def test_pack_codes_round_trip(data, bits, rows, cycles):
    K = cycles * 32
    noise = data.draw(st.binary(min_size=rows * K, max_size=rows * K))
    codes = np.frombuffer(noise, np.uint8).reshape(rows, K).astype(np.int16) % 2**bits
    packed = pack_codes(codes, bits)
    assert (packed.shape, packed.dtype) == ((rows, K * bits // 32), np.uint32)
    assert unpack_codes(packed, bits).dtype == np.uint8
    np.testing.assert_array_equal(unpack_codes(packed, bits), codes)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pack_codes(np.zeros((2, 8), int), 7), InvalidArgument, "pack_codes: bits is 7, expected one of 1"),
        (lambda: pack_codes(np.zeros((2, 8), int), 4.0), InvalidArgument, "pack_codes: bits is 4.0, expected one of"),
        (
            lambda: pack_codes(np.zeros(8, np.float32), 4),
            DTypeError,
            "pack_codes: codes has dtype float32, expected int",
        ),
        (lambda: pack_codes(np.zeros((2, 8), int), 3), ShapeError, "pack_codes: codes has shape (2, 8), expected K"),
        (lambda: pack_codes(np.zeros((2, 0), int), 4), ShapeError, "pack_codes: codes has shape (2, 0), expected K"),
        (lambda: pack_codes(np.arange(8) + 9, 4), InvalidArgument, "pack_codes: codes has 9 to 16, expected 0 to 15"),
        (lambda: pack_codes(np.arange(8) - 1, 4), InvalidArgument, "pack_codes: codes has -1 to 6, expected 0 to 15"),
        (lambda: unpack_codes(np.zeros(4, np.int32), 4), DTypeError, "unpack_codes: packed has dtype int32, expected"),
        (lambda: unpack_codes(np.zeros(4, np.uint32), 3), ShapeError, "unpack_codes: packed has shape (4,), expected"),
    ],
)
def test_packing_refuses(call, error, message):
    with pytest.raises(error, match=r"^" + re.escape(message)):
        call()


# quantize


def groups_of_all_kinds(rng, group_size, dtype):
    """[2, rows, 2 * group_size]: each row another kind of group."""
    K, tiny, huge = 2 * group_size, (1e-7 if dtype == "float16" else 1e-40), (6e4 if dtype == "float16" else 1e30)
    normal, uniform = rng.standard_normal((12, K)), rng.uniform(0.5, 1, (12, K))
    exponents = rng.uniform(-6, 4, (4, K)) if dtype == "float16" else rng.uniform(-40, 37, (4, K))
    rows = [
        *normal[:3],
        0.02 * normal[3],
        0 * normal[4],
        -0.0 * uniform[5],
        0 * normal[4] + 0.3,
        0 * normal[4] - 7.0,
        0 * normal[4] + tiny,
        0 * normal[4] - huge,
        uniform[6],
        -uniform[7],
        1 + 0.001 * uniform[8],
        tiny * normal[9],
        huge * np.sign(normal[10]) * uniform[10],
        np.where(np.arange(K) % 17 == 0, huge, tiny) * uniform[11],
        np.rint(8 * normal[0]) / 2,
        np.arange(K) % 31 - 15.5,
        1e-7 * np.rint(4 * normal[1]),
        *(np.sign(rng.standard_normal((4, K))) * 10.0**exponents),
    ]
    narrow = np.stack([rows, rows[::-1]]).astype(np.float32).astype(numpy_dtype(dtype))
    assert np.isfinite(narrow.astype(np.float32)).all()
    return narrow


@pytest.fixture(scope="module")
def mx():
    mlx = pytest.importorskip("mlx.core")
    mlx.set_default_device(mlx.cpu)
    return mlx


def to_mlx(mx, array):
    if array.dtype == np.uint32:
        return mx.array(array)
    return mx.array(array.astype(np.float32)).astype(getattr(mx, str(array.dtype)))


def from_mlx(mx, array):
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(bfloat16)
    return np.array(array)


@pytest.mark.parametrize("function", [quantize, quantize_reference])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_quantize_equals_mlx(function, dtype, group_size, bits, mx, rng):
    x = groups_of_all_kinds(rng, group_size, dtype)
    got = function(x, bits, group_size)
    want = [from_mlx(mx, a) for a in mx.quantize(to_mlx(mx, x), bits=bits, group_size=group_size)]
    assert got.shape == x.shape
    for a, b in zip(got.arrays, want, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("function", [quantize, quantize_reference])
def test_quantize_by_hand(function):
    x = np.zeros((3, 32), np.float32)
    x[0, :16] = np.arange(16)  # hi is the edge: the scale is -1, code = 15 - x
    x[1] = -x[0]  # lo is the edge: the scale is 1, code = 15 + x
    q = function(x, bits=4, group_size=32)
    np.testing.assert_array_equal(q.scales, np.float32([[-1], [1], [-1e-7]]))
    np.testing.assert_array_equal(q.biases, [[15], [-15], [0]])
    codes = unpack_codes(q.packed, 4)
    np.testing.assert_array_equal(codes[0, :16], 15 - np.arange(16))
    np.testing.assert_array_equal(codes[1], 15 + x[1])
    np.testing.assert_array_equal(dequantize(q), x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize_of_zeros_dequantizes_to_zeros(dtype):
    q = quantize(np.zeros((2, 64), numpy_dtype(dtype)), bits=2, group_size=32)
    for out in FLOATS:
        assert not dequantize(q, out).any()


@pytest.mark.parametrize("value", [1e38, -3.4e38, 3.5e31])
def test_quantize_keeps_equal_weights_of_any_size(value):
    x = np.full((1, 32), value, np.float32)
    np.testing.assert_array_equal(dequantize(quantize(x, 8, 32)), x)


def test_quantize_takes_strided_and_misaligned_and_read_only_arrays(rng):
    x = rng.standard_normal((6, 128)).astype(np.float32)
    want = quantize(x, 4, 32)
    assert_same_tensor(quantize(np.asfortranarray(x), 4, 32), want)
    assert_same_tensor(quantize(np.repeat(x, 2, axis=1)[:, ::2], 4, 32), want)
    shifted = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape)
    assert not shifted.flags.aligned
    assert_same_tensor(quantize(shifted, 4, 32), want)


def test_quantize_of_no_rows_is_empty():
    q = quantize(np.zeros((0, 3, 128), np.float16), bits=5, group_size=64)
    assert (q.shape, q.packed.shape, q.scales.shape, q.dtype) == ((0, 3, 128), (0, 3, 20), (0, 3, 2), "float16")
    assert dequantize(q).shape == (0, 3, 128)
    assert_same_tensor(quantize_reference(np.zeros((0, 3, 128), np.float16), bits=5, group_size=64), q)


@pytest.mark.parametrize("function", [quantize, quantize_reference])
@pytest.mark.parametrize(
    ("value", "dtype", "said"),
    [
        (np.nan, "float32", "holds nan"),
        (np.inf, "float16", "holds inf"),
        (-np.inf, "bfloat16", "holds -inf"),
        (-3e38, "float32", "spans -3e+38 to 2e+38"),
        (-3e38, "bfloat16", "spans -3e+38 to 1.99e+38"),
    ],
)
def test_quantize_names_the_first_group_it_cannot_take(function, value, dtype, said):
    x = np.zeros((2, 3, 128), np.float32)
    x[..., 5] = 6e4 if dtype == "float16" else 2e38
    x[1, 1, 69] = x[1, 2, 1] = value
    x[1, 1, 70] = x[..., 5].max()
    with pytest.raises(
        InvalidArgument, match=rf"^quantize: array {re.escape(said)} in row \(1, 1\), group 2, expected"
    ):
        function(x.astype(numpy_dtype(dtype)), 4, 32)


@pytest.mark.parametrize("function", [quantize, quantize_reference])
@pytest.mark.parametrize(
    ("array", "bits", "group_size", "error", "message"),
    [
        (np.zeros((2, 64)), 4, 64, DTypeError, "array has dtype float64, expected one of float32, float16, bfloat16"),
        (np.zeros((2, 64), ">f4"), 4, 64, DTypeError, "array has dtype >f4, expected one of"),
        ([[0.0] * 64], 4, 64, DTypeError, "array is a list, expected a NumPy array or torch tensor"),
        (np.ma.zeros((2, 64), F32), 4, 64, DTypeError, "array is a MaskedArray, expected a plain NumPy array"),
        (np.zeros(64, np.float32), 4, 64, ShapeError, "array has shape (64,), expected at least 2 axes"),
        (np.zeros((2, 0), np.float32), 4, 64, ShapeError, "array has shape (2, 0), expected no empty axis but"),
        (np.zeros((2, 96), np.float32), 4, 64, ShapeError, "array has K = 96, expected a multiple of group_size = 64"),
        (np.zeros((2, 64), np.float32), 0, 64, InvalidArgument, "bits is 0, expected one of 1, 2, 3, 4, 5, 6, 8"),
        (np.zeros((2, 64), np.float32), 4, 16, InvalidArgument, "group_size is 16, expected one of 32, 64, 128"),
    ],
)
def test_quantize_refuses(function, array, bits, group_size, error, message):
    with pytest.raises(error, match=r"^quantize: " + re.escape(message)):
        function(array, bits, group_size)


# dequantize


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", BITS)
def test_dequantize_in_the_scales_dtype_equals_mlx(dtype, bits, mx, rng):
    q = random_tensor(rng, 3, 41, bits=bits, group_size=64, dtype=dtype)
    want = mx.dequantize(*(to_mlx(mx, a) for a in q.arrays), group_size=64, bits=bits)
    assert_same_bits(dequantize(q, dtype), from_mlx(mx, want))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", BITS)
def test_dequantize_to_float32_equals_mlx_with_wide_scales(dtype, bits, mx, rng):
    q = random_tensor(rng, 53, bits=bits, group_size=32, dtype=dtype)
    packed, *wide = (to_mlx(mx, a) for a in q.arrays)
    want = mx.dequantize(packed, *(a.astype(mx.float32) for a in wide), group_size=32, bits=bits)
    assert_same_bits(dequantize(q), from_mlx(mx, want))


def test_dequantize_rounds_once_or_in_the_scales_dtype():
    scale, bias, code = 1 + 2.0**-7, 2.0**-8, 3
    q = QuantizedTensor(
        pack_codes(np.full((1, 32), code), 4), np.array([[scale]], bfloat16), np.array([[bias]], bfloat16), 4, 32
    )
    assert dequantize(q)[0, 0] == 3 + 3 * 2.0**-7 + 2.0**-8
    assert float(dequantize(q, "float16")[0, 0]) == 3 + 14 * 2.0**-9  # nearest to 3.02734375, float32 inside
    assert (
        float(dequantize(q, "bfloat16")[0, 0]) == 3 + 2 * 2.0**-6
    )  # 3.0234375 ties to 3.03125, which absorbs the bias


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_dequantize_does_not_depend_on_its_blocks(rows, rng, monkeypatch):
    q = random_tensor(rng, rows, 5, K=256, group_size=128)
    want = dequantize(q, "bfloat16")
    monkeypatch.setattr("penstock.quant.values._BLOCK", 3 * 128)
    assert_same_bits(dequantize(q, "bfloat16"), want)
    x = rng.standard_normal((rows, 5, 256)).astype(np.float32)
    assert_same_tensor(quantize_reference(x, 4, 128), quantize(x, 4, 128))


def test_dequantize_refuses_a_dtype(rng):
    with pytest.raises(DTypeError, match=r"^dequantize: dtype is 'int8', expected one of float32, float16, bfloat16"):
        dequantize(random_tensor(rng, 3), "int8")


# Modes of small floats

FLOAT_MODES = [mode for mode in MODES if mode != "affine"]


def floats_of_all_kinds(rng, dtype):
    """[rows, 64]: normal weights of all sizes, any bits, ties between levels, zeros, and what overflows a scale."""
    kind, tiny = numpy_dtype(dtype), -20 if dtype == "float16" else -149
    words = rng.integers(0, 1 << 16, (200, 64), np.uint16)
    anything = words.astype(np.uint32) << 16
    anything = anything.view(np.float32) if dtype == "float32" else words.view(kind).astype(np.float32)
    rows = [
        rng.standard_normal((300, 64)),
        rng.standard_normal((300, 64)) * np.exp2(rng.integers(tiny, 13, (300, 1)).astype(float)),
        np.where(np.isfinite(anything), anything, 0),
        rng.integers(-96, 97, (200, 64)) / 16,
        rng.integers(-7000, 7001, (200, 64)) / 16,
        np.zeros((2, 64)) * [[1], [-1]],
    ]
    return np.concatenate([part.astype(np.float32) for part in rows]).astype(kind)


@pytest.mark.parametrize("function", [quantize, quantize_reference])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", FLOAT_MODES)
def test_quantize_to_floats_equals_mlx(function, dtype, mode, mx, rng):
    x = floats_of_all_kinds(rng, dtype)
    got = function(x, mode=mode)
    want = [from_mlx(mx, a) for a in mx.quantize(to_mlx(mx, x), mode=mode)]
    assert (got.shape, got.mode, got.biases, got.dtype) == (x.shape, mode, None, "bfloat16")
    for a, b in zip(got.arrays, want, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("function", [quantize, quantize_reference])
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize_with_a_global_scale_equals_mlx(function, dtype, mx, rng):
    x = floats_of_all_kinds(rng, dtype)
    for factor in np.float32([1, 0.37, 5.5, 100, 1e-30, 3e30, 7.123, 1e-36, 1e-40]):  # 2688 over the last is infinite
        got = function(x, mode="nvfp4", global_scale=float(factor))
        want = mx.quantize(to_mlx(mx, x), mode="nvfp4", global_scale=mx.array(factor))
        assert (got.global_scale.shape, got.global_scale) == ((), factor)
        for a, b in zip((got.packed, got.scales), want, strict=True):
            assert_same_bits(a, from_mlx(mx, b))


@pytest.mark.parametrize("function", [quantize, quantize_reference])
def test_matrices_of_a_stack_have_global_scales_of_their_own(function, rng):
    x = rng.standard_normal((3, 5, 64)).astype(np.float32)
    factors = np.float32([3, 0.5, 70])
    whole = function(x, mode="nvfp4", global_scale=factors)
    for e, factor in enumerate(factors):
        one = function(x[e], mode="nvfp4", global_scale=factor)
        for a, b in zip(whole[e].arrays, one.arrays, strict=True):
            assert_same_bits(a, b)
    largest = np.abs(x).max(axis=(1, 2))
    near = dequantize(function(x, mode="nvfp4", global_scale=largest))
    assert np.abs(near - x).mean() < 0.09


@pytest.mark.parametrize("function", [quantize, quantize_reference])
@pytest.mark.parametrize(
    ("mode", "factor", "error", "message"),
    [
        ("mxfp4", 1.0, InvalidArgument, "global_scale is given in mode 'mxfp4', expected it for nvfp4 alone"),
        ("nvfp4", 0.0, InvalidArgument, "global_scale has a number that is not finite and above 0"),
        ("nvfp4", np.float32([1, np.nan]), InvalidArgument, "global_scale has a number that is not finite and above 0"),
        ("nvfp4", np.ones(3, F32), ShapeError, "global_scale has shape (3,), expected () or (2,)"),
        ("nvfp4", 1e300, InvalidArgument, "global_scale has a number that is not finite and above 0"),
        ("nvfp4", "all", DTypeError, "global_scale is 'all', expected a number or float32"),
        ("nvfp4", [[1], [1, 2]], DTypeError, "global_scale is [[1], [1, 2]], expected a number or float32"),
    ],
)
def test_quantize_refuses_a_global_scale(function, mode, factor, error, message):
    with pytest.raises(error, match=r"^quantize: " + re.escape(message)):
        function(np.zeros((2, 3, 32), F32), mode=mode, global_scale=factor)


def every_scale(rng, mode):
    """All bytes of scales, each over codes of all kinds."""
    known = MODES[mode]
    bits, gs = known.default_bits, known.default_group_size
    packed = rng.integers(0, 1 << 32, (256, 512 * bits // 32), np.uint32)
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 512 // gs, axis=1)
    return QuantizedTensor(packed, scales, None, bits, gs, mode)


def assert_same_numbers(got, want):
    """The same bits; NaN is NaN, whatever its bits."""
    assert_same_bits(np.where(np.isnan(got), np.float32(0), got), np.where(np.isnan(want), np.float32(0), want))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


@pytest.mark.parametrize("mode", FLOAT_MODES)
def test_dequantize_of_floats_equals_mlx_for_every_scale(mode, mx, rng):
    q = every_scale(rng, mode)
    arrays = mx.array(q.packed), mx.array(q.scales)
    want = np.array(mx.dequantize(*arrays, mode=mode, dtype=mx.float32))
    assert_same_numbers(dequantize(q), want)
    assert_same_numbers(ops.dequantize(q), want)
    half = mx.dequantize(*arrays, mode=mode, dtype=mx.bfloat16).astype(mx.float32)
    assert_same_numbers(dequantize(q, "bfloat16").astype(np.float32), np.array(half))


def test_global_scales_multiply_the_scales_of_their_experts(mx, rng):
    packed = rng.integers(0, 1 << 32, (3, 5, 8), np.uint32)
    scales = rng.integers(0, 126, (3, 5, 4)).astype(np.uint8)
    factors = np.float32([3.7, 0.01, 55.5])
    q = QuantizedTensor(packed, scales, None, 4, 16, "nvfp4", factors)
    for got in (dequantize(q), ops.dequantize(q)):
        for e, factor in enumerate(factors):
            one = mx.array(packed[e]), mx.array(scales[e])
            want = mx.dequantize(*one, mode="nvfp4", dtype=mx.float32, global_scale=mx.array(factor))
            assert_same_bits(got[e], np.array(want))
    one = q[2]
    assert (one.global_scale.shape, one.nbytes) == ((), 5 * (8 * 4 + 4) + 4)
    assert_same_bits(dequantize(one), dequantize(q)[2])
    assert_same_bits(dequantize(one.rows(slice(1, 3))), dequantize(q)[2, 1:3])
    assert one.to("torch").to("cpu").global_scale == factors[2]


def test_quantize_to_floats_by_hand():
    x = np.zeros((3, 32), np.float32)
    x[0, :9] = [6, -6, 5, -5, 0.25, -0.25, 0.26, 3.5, -0.0]  # scale 1
    x[1, :3] = [12.5, 2, -1]  # above 6 · 2: the scale is 4
    q = quantize(x, mode="mxfp4")
    np.testing.assert_array_equal(q.scales, [[127], [129], [127]])
    np.testing.assert_array_equal(unpack_codes(q.packed, 4)[0, :9], [7, 15, 6, 14, 0, 0, 1, 5, 0])
    np.testing.assert_array_equal(dequantize(q)[1, :3], [12, 2, 0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mode": "mxfp6"}, InvalidArgument, "mode is 'mxfp6', expected one of affine, mxfp4, mxfp8, nvfp4"),
        ({"bits": 8}, InvalidArgument, "bits is 8, expected 4 in mode nvfp4"),
        ({"group_size": 32}, InvalidArgument, "group_size is 32, expected 16 in mode nvfp4"),
        ({"biases": np.zeros((2, 3, 4), F32)}, InvalidArgument, "biases is a ndarray, expected None in mode nvfp4"),
        ({"scales": np.zeros((2, 3, 4), F32)}, DTypeError, "scales has dtype float32, expected uint8"),
        ({"scales": np.zeros((2, 3, 2), np.uint8)}, ShapeError, "scales has shape (2, 3, 2), expected (2, 3, 4)"),
        ({"packed": np.zeros((2, 3, 6), U32)}, ShapeError, "packed has shape (2, 3, 6), expected a multiple of 4"),
        ({"global_scale": np.zeros(3, F32)}, ShapeError, "global_scale has shape (3,), expected (2,) (experts)"),
        ({"global_scale": np.zeros(2)}, DTypeError, "global_scale has dtype float64, expected float32"),
        ({"mode": "mxfp4", "group_size": 32, "scales": np.zeros((2, 3, 2), np.uint8), "global_scale": np.zeros(2, F32)},
         InvalidArgument, "global_scale is a ndarray, expected None in mode mxfp4"),
    ],
)  # fmt: skip
def test_quantized_tensor_of_floats_refuses(change, error, message):
    given = {"packed": np.zeros((2, 3, 8), U32), "scales": np.zeros((2, 3, 4), np.uint8), "biases": None}
    given |= {"bits": 4, "group_size": 16, "mode": "nvfp4", **change}
    with pytest.raises(error, match=r"^QuantizedTensor: " + re.escape(message)):
        QuantizedTensor(**given)


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
def test_quantized_tensor_has_bits_and_group_size_of_its_mode(mode, rng):
    q = quantize(rng.standard_normal((3, 128)).astype(np.float32), mode=mode)
    same = QuantizedTensor(q.packed, q.scales, q.biases, mode=mode)
    assert same.key == q.key and same.format == q.format
    np.testing.assert_array_equal(dequantize(same), dequantize(q))


@pytest.mark.parametrize("function", [quantize, quantize_reference])
def test_quantize_to_floats_refuses(function):
    x = np.zeros((2, 96), np.float32)
    with pytest.raises(ShapeError, match=r"^quantize: array has K = 48, expected a multiple of 32 in mode nvfp4"):
        function(x[:, :48], mode="nvfp4")
    with pytest.raises(InvalidArgument, match=r"^quantize: group_size is 64, expected 32 in mode mxfp4"):
        function(x, group_size=64, mode="mxfp4")
    x[1, 40] = np.nan
    with pytest.raises(InvalidArgument, match=r"^quantize: array holds nan in row 1, group 1, expected finite numbers"):
        function(x, mode="mxfp8")


# QuantizedTensor


def test_quantized_tensor_describes_itself(rng):
    q = random_tensor(rng, 7, 5, K=192, bits=3, group_size=64, dtype="float16")
    assert (q.shape, q.ndim, q.dtype, q.device) == ((7, 5, 192), 3, "float16", "cpu")
    assert q.nbytes == 7 * 5 * (192 * 3 // 8 + 2 * 3 * 2) == sum(a.nbytes for a in q.arrays)
    assert repr(q) == "QuantizedTensor((7, 5, 192), 3 bits, groups of 64, float16 scales, cpu)"


def test_quantized_tensor_index_is_a_view_of_leading_axes(rng):
    q = random_tensor(rng, 4, 3, 5)
    one, some = q[1], q[1:3]
    assert (one.shape, some.shape, q[-1][0].shape) == ((3, 5, 192), (2, 3, 5, 192), (5, 192))
    assert all(np.shares_memory(a, b) for a, b in zip(one.arrays, q.arrays, strict=True))
    np.testing.assert_array_equal(dequantize(one), dequantize(q)[1])
    assert [e.shape for e in q] == [(3, 5, 192)] * 4
    with pytest.raises(InvalidArgument, match=r"^QuantizedTensor: shape is \(5, 192\), expected axes before N and K"):
        one[0][0]
    with pytest.raises(DTypeError, match=r"^QuantizedTensor: index is 'a', expected an int or a slice"):
        q["a"]  # type: ignore[index]
    with pytest.raises(IndexError):
        q[4]
    with pytest.raises(ShapeError, match=r"^QuantizedTensor: packed is not contiguous"):
        q[::2]


def test_quantized_tensor_takes_symbols():
    def symbol(shape, dtype):
        return SimpleNamespace(shape=shape, dtype=dtype)

    q = QuantizedTensor(
        symbol((9, 3, 24), "uint32"), symbol((9, 3, 3), "bfloat16"), symbol((9, 3, 3), "bfloat16"), 4, 64
    )
    assert (q.shape, q.dtype, q.nbytes) == ((9, 3, 192), "bfloat16", 9 * 3 * (24 * 4 + 2 * 3 * 2))
    with pytest.raises(ShapeError, match=r"^QuantizedTensor: biases has shape"):
        q.with_arrays(q.packed, q.scales, symbol((9, 3, 2), "bfloat16"))


@pytest.mark.parametrize(
    ("packed", "scales", "biases", "bits", "group_size", "error", "message"),
    [
        (np.zeros((3, 16), U32), np.zeros((3, 5), F32), np.zeros((3, 4), F32), 4, 32, ShapeError,
         "scales has shape (3, 5), expected (3, 4) (K / group_size)"),
        (np.zeros((3, 16), U32), np.zeros((3, 4), F32), np.zeros((2, 4), F32), 4, 32, ShapeError,
         "biases has shape (2, 4), expected (3, 4) (K / group_size)"),
        (np.zeros((3, 16), U32), np.zeros((1, 3, 4), F32), np.zeros((1, 3, 4), F32), 4, 32, ShapeError,
         "scales has shape (1, 3, 4), expected (3, 4)"),
        (np.zeros((3, 15), U32), np.zeros((3, 4), F32), np.zeros((3, 4), F32), 4, 32, ShapeError,
         "packed has shape (3, 15), expected a multiple of 4 words in a row (group_size * bits / 32)"),
        (np.zeros(16, U32), np.zeros(4, F32), np.zeros(4, F32), 4, 32, ShapeError,
         "packed has shape (16,), expected at least 2 axes"),
        (np.zeros((3, 0), U32), np.zeros((3, 0), F32), np.zeros((3, 0), F32), 4, 32, ShapeError,
         "packed has shape (3, 0), expected no empty axis but the first"),
        (np.zeros((3, 16), np.int32), np.zeros((3, 4), F32), np.zeros((3, 4), F32), 4, 32, DTypeError,
         "packed has dtype int32, expected uint32"),
        (np.zeros((3, 16), U32), np.zeros((3, 4)), np.zeros((3, 4)), 4, 32, DTypeError,
         "scales has dtype float64, expected float32 or float16 or bfloat16"),
        (np.zeros((3, 16), U32), np.zeros((3, 4), F32), np.zeros((3, 4), bfloat16), 4, 32, DTypeError,
         "biases has dtype bfloat16, expected float32"),
        (np.zeros((3, 16), U32), None, np.zeros((3, 4), F32), 4, 32, DTypeError,
         "scales is a NoneType, expected an array"),
        (np.zeros((3, 16), U32), np.zeros((3, 4), F32), np.zeros((3, 4), F32), 7, 32, InvalidArgument,
         "bits is 7, expected one of 1, 2, 3, 4, 5, 6, 8"),
        (np.zeros((3, 16), U32), np.zeros((3, 4), F32), np.zeros((3, 4), F32), 4, 48, InvalidArgument,
         "group_size is 48, expected one of 32, 64, 128"),
        (np.zeros((16, 3), U32).T, np.zeros((3, 4), F32), np.zeros((3, 4), F32), 4, 32, ShapeError,
         "packed is not contiguous"),
        (np.zeros((3, 16), U32), np.zeros(49, np.uint8)[1:].view(F32).reshape(3, 4), np.zeros((3, 4), F32), 4, 32,
         ShapeError, "scales is not aligned in memory"),
    ],
)  # fmt: skip
def test_quantized_tensor_refuses(packed, scales, biases, bits, group_size, error, message):
    with pytest.raises(error, match=r"^QuantizedTensor: " + re.escape(message)):
        QuantizedTensor(packed, scales, biases, bits, group_size)


# torch


@pytest.mark.parametrize("dtype", FLOATS)
def test_quantized_tensor_to_torch_and_back_shares_memory(dtype, rng):
    torch = pytest.importorskip("torch")
    q = random_tensor(rng, 2, 3, dtype=dtype)
    t = q.to("torch")
    assert (t.packed.dtype, t.scales.dtype) == (torch.int32, getattr(torch, dtype))
    assert (t.shape, t.dtype, t.device, t.nbytes) == (q.shape, q.dtype, "cpu", q.nbytes)
    assert "torch cpu" in repr(t)
    assert [a.data_ptr() for a in t.arrays] == [a.ctypes.data for a in q.arrays]
    assert all(np.shares_memory(a, b) for a, b in zip(t.to("cpu").arrays, q.arrays, strict=True))
    assert_same_tensor(t[1].to("cpu"), q[1])
    assert_same_bits(dequantize(t, "float32").numpy(), dequantize(q))
    assert q.to("cpu") is q


@pytest.mark.filterwarnings("error")
def test_quantized_tensor_to_torch_takes_read_only_arrays(rng):
    pytest.importorskip("torch")
    q = random_tensor(rng, 3)
    for a in q.arrays:
        a.flags.writeable = False
    assert q.to("torch").packed.data_ptr() == q.packed.ctypes.data


@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize_of_a_torch_tensor_gives_torch_arrays(dtype, rng):
    torch = pytest.importorskip("torch")
    x = rng.standard_normal((3, 128)).astype(np.float32).astype(numpy_dtype(dtype))
    t = torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype))
    got = quantize(t.requires_grad_(), 6, 64)
    assert isinstance(got.packed, torch.Tensor)
    assert got.scales.dtype == t.dtype
    assert_same_tensor(got.to("cpu"), quantize(x, 6, 64))
    assert_same_tensor(quantize(t.detach().T.contiguous().T, 6, 64).to("cpu"), quantize(x, 6, 64))
    with pytest.raises(DTypeError, match=r"^quantize: array has dtype float64"):
        quantize(t.detach().double())


def test_quantized_tensor_refuses_mixed_homes_and_unknown_devices(rng):
    torch = pytest.importorskip("torch")
    q = random_tensor(rng, 3)
    t = q.to("torch")
    with pytest.raises(
        InvalidArgument, match=r"^QuantizedTensor: scales is a torch tensor on cpu, expected NumPy arrays"
    ):
        q.with_arrays(q.packed, t.scales, q.biases)
    with pytest.raises(DTypeError, match=r"^QuantizedTensor: packed has dtype int64, expected int32"):
        t.with_arrays(t.packed.long(), t.scales, t.biases)
    with pytest.raises(ShapeError, match=r"^QuantizedTensor: biases is not contiguous"):
        t.with_arrays(t.packed, t.scales, t.biases.T.contiguous().T)
    with pytest.raises(InvalidArgument, match=r"^QuantizedTensor.to: device is 'tpu', expected cpu, torch, cuda or"):
        q.to("tpu")
    with pytest.raises(InvalidArgument, match=r"^QuantizedTensor.to: device is None, expected cpu, torch, cuda or"):
        q.to(None)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match=r"^quantize: array is a tensor on the device meta, expected one on cpu"):
        quantize(torch.zeros(2, 64, device="meta"))
    if not torch.cuda.is_available():
        with pytest.raises(BackendError, match=r"^QuantizedTensor.to: 'cuda:1' needs a CUDA device"):
            q.to("cuda:1")


@pytest.mark.cuda
def test_quantize_of_a_cuda_tensor_stays_on_its_device(rng):
    torch = pytest.importorskip("torch")
    x = rng.standard_normal((3, 128)).astype(np.float32)
    got = quantize(torch.from_numpy(x).cuda().bfloat16())
    assert got.device == "cuda:0"
    assert dequantize(got).is_cuda
    assert_same_tensor(got.to("cpu"), quantize(x.astype(bfloat16)))


def test_import_of_quant_leaves_compilers_and_torch_alone():
    script = "import sys, penstock.quant; print(sorted({'numba', 'torch', 'triton'} & set(sys.modules)))"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"


# ExpertBlobs


def blobs_of(stack, lead=0):
    """One buffer per expert: `lead` bytes, packed, biases, scales."""
    offsets, at = {}, lead
    for name in ("packed", "biases", "scales"):
        offsets[name], at = at, at + getattr(stack[0], name).nbytes
    buffers = [b"\0" * lead + b"".join(getattr(e, name).tobytes() for name in offsets) for e in stack]
    return buffers, offsets


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)])
def test_expert_blobs_are_views_of_their_experts(wrap, rng):
    stack = random_tensor(rng, 3, 5, K=192, bits=5, group_size=64, dtype="float16")
    buffers, at = blobs_of(stack, lead=12)
    blobs = ExpertBlobs([wrap(b) for b in buffers], at["packed"], at["scales"], at["biases"], 5, 192, 5, 64, "float16")
    assert (len(blobs), blobs.shape, blobs.bits, blobs.group_size, blobs.dtype) == (3, (3, 5, 192), 5, 64, "float16")
    assert blobs.experts is blobs.experts
    for expert, want, buffer in zip(blobs.experts, stack, blobs.arrays, strict=True):
        assert_same_tensor(expert, want)
        assert all(np.shares_memory(a, buffer) for a in expert.arrays)


def test_expert_blobs_refuse_what_does_not_fit(rng):
    stack = random_tensor(rng, 2, 3, K=64, bits=4, group_size=32)
    buffers, at = blobs_of(stack)
    good = {"w_off": at["packed"], "s_off": at["scales"], "b_off": at["biases"], "N": 3, "K": 64, "bits": 4, "gs": 32}
    size = len(buffers[0])
    assert (size, at) == (3 * (32 + 2 * 4), {"packed": 0, "biases": 96, "scales": 108})

    def refuses(error, message, given=buffers, **changes):
        with pytest.raises(error, match=r"^ExpertBlobs: " + message):
            ExpertBlobs(given, **{**good, **changes})

    refuses(ShapeError, r"buffers\[1\] has 119 bytes, expected 120 for scales", [buffers[0], buffers[1][:-1]])
    refuses(ShapeError, r"buffers\[0\] has 120 bytes, expected 122 for scales", s_off=110)
    refuses(ShapeError, r"buffers\[0\] has 120 bytes, expected \d{20,} for packed", w_off=np.uint64(2**64 - 4))
    refuses(ShapeError, r"buffers\[0\] has 120 bytes, expected \d{20,} for packed", N=2**62)
    refuses(ShapeError, r"packed at offset 14 of buffers\[0\], address 0x[0-9a-f]+, expected a multiple of 4", w_off=14)
    refuses(ShapeError, r"scales at offset 107 of .*, expected a multiple of 2", s_off=107)
    shifted = [memoryview(b"\0" + b)[1:] for b in buffers]
    refuses(ShapeError, "packed at offset 0 of .*, expected a multiple of 4", shifted)
    refuses(InvalidArgument, "w_off is -4, expected at least 0", w_off=-4)
    refuses(InvalidArgument, "N is 0, expected at least 1", N=0)
    refuses(DTypeError, "K is 64.0, expected an int", K=64.0)
    refuses(ShapeError, "K is 48, expected a multiple of gs = 32", K=48)
    refuses(InvalidArgument, "bits is 7, expected one of", bits=7)
    refuses(DTypeError, "scale_dtype is 'float64', expected one of", scale_dtype="float64")
    refuses(ShapeError, "buffers is empty, expected one buffer per expert", [])
    refuses(DTypeError, r"buffers\[0\] is a str, expected bytes", ["text"])
    refuses(DTypeError, r"buffers\[0\] has dtype float32, expected uint8", [np.zeros(99, np.float32)])
    refuses(ShapeError, r"buffers\[0\] has shape \(9, 9\), expected one contiguous axis", [np.zeros((9, 9), np.uint8)])
