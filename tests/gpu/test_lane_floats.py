"""Lanes with codes that are floats against definitions; their assembly, which no interpreter runs, on one warp."""

from typing import Any

import numpy as np
import pytest

import penstock
from penstock import ops
from penstock.backends.cuda import _lane_floats as lanes
from penstock.errors import BackendError
from penstock.quant import QuantizedTensor
from tests.gpu import ptx
from tests.gpu.common import GPU, check_experts_by_lanes, reference, run, to_device, to_host
from tests.ops.common import EPS, assert_close, i32, normal, quantized

MODES = ("mxfp4", "mxfp8", "nvfp4")
EXACT = 4e-6 if GPU else 1e-6  # of the largest result
LANE = np.arange(32)
ROW, PLACE = LANE // 4, LANE % 4


def every_code(rng: np.random.Generator, mode: str, N: int, K: int, scales: range) -> QuantizedTensor:
    """A weight whose codes are any but NaN, and whose scales are these, in any order."""
    w = quantized(rng, N, K, mode=mode)
    codes = rng.integers(0, 1 << 32, w.packed.shape, dtype=np.uint32)
    if w.bits == 8:
        codes &= np.uint32(0xBFBFBFBF)
    bytes_ = np.resize(rng.permutation(np.array(scales, np.uint8)), w.scales.size).reshape(w.scales.shape)
    return w.with_arrays(codes, bytes_)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("T", "N", "K"), [(1, 1, 64), (3, 37, 192), (8, 70, 128), (11, 19, 320), (17, 132, 64), (5, 17, 2880)]
)
def test_lanes_take_floats(T, N, K, mode, rng):
    """Rows that end in a tile, more tokens than one tile of them has, few and many steps of K, gate and up."""
    x, w, up = normal(rng, T, K, dtype="bfloat16"), quantized(rng, N, K, mode=mode), quantized(rng, N, K, mode=mode)
    want = reference(ops.quantized_matmul, x=x, w=w, dtype="float32")
    got = run(ops.quantized_matmul, variant="lanes", x=x, w=w, dtype="float32")
    assert_close("y", got, want, EXACT, np.abs(want).max())
    want = reference(ops.fused_gate_up_swiglu, x=x, gate_w=w, up_w=up).astype(np.float32)
    got = run(ops.fused_gate_up_swiglu, variant="lanes", x=x, gate_w=w, up_w=up).astype(np.float32)
    assert_close("h", got, want, 4 * EPS["bfloat16"], np.abs(want).max())


@pytest.mark.parametrize(
    ("mode", "scales"), [("mxfp4", range(100, 140)), ("mxfp8", range(100, 140)), ("nvfp4", range(127))]
)
def test_lanes_take_every_code_and_scale(mode, scales, rng):
    """Each row apart, so that the smallest count: any codes, and scales that are subnormal."""
    x, w = normal(rng, 8, 64, dtype="bfloat16"), every_code(rng, mode, 301, 64, scales)
    want = reference(ops.quantized_matmul, x=x, w=w, dtype="float32")
    got = run(ops.quantized_matmul, variant="lanes", x=x, w=w, dtype="float32")
    assert_close("y", got, want, EXACT, np.abs(want).max(axis=0, keepdims=True))


def test_a_scale_that_is_not_a_number_makes_its_row_so(rng):
    x, w = normal(rng, 3, 64, dtype="bfloat16"), quantized(rng, 20, 64, mode="nvfp4")
    scales = w.scales.copy()
    scales[[4, 17], [1, 3]] = 127, 255
    got = run(ops.quantized_matmul, variant="lanes", x=x, w=w.with_arrays(w.packed, scales), dtype="float32")
    assert np.isnan(got[:, [4, 17]]).all()
    assert np.isfinite(np.delete(got, [4, 17], axis=1)).all()


@pytest.mark.parametrize("mode", MODES)
def test_lanes_take_a_residual_and_rows_of_a_weight(mode, rng):
    x, w, residual = normal(rng, 9, 128, dtype="bfloat16"), quantized(rng, 40, 128, mode=mode), normal(rng, 9, 37)
    with penstock.backend("cuda", variant="lanes"):
        rows = to_device(w)
        rows = rows.with_arrays(*(part[3:] for part in rows.arrays if part is not None))
        got = to_host(ops.matmul_add(to_device(residual), to_device(x), rows))
    part = w.with_arrays(*(each[3:] for each in w.arrays if each is not None))
    want = reference(ops.matmul_add, residual=residual, x=x, w=part)
    assert_close("y", got, want, 2 * EXACT, np.abs(want).max())


@pytest.mark.parametrize(("first", "last", "stacked"), [("mxfp4", "mxfp8", False), ("nvfp4", "mxfp4", True)])
def test_lanes_take_experts_of_floats(first, last, stacked, rng):
    """Gate and up of one mode and down of another, in one stack and in two, in tiles of 8 pairs and of 16, absent ones
    among them; the shared expert as one more.
    """
    E, dim, width = 3, 128, 64
    own = [
        quantized(rng, *shape, mode=mode)
        for *shape, mode in ((width, dim, first), (width, dim, first), (dim, width, last))
    ]
    both, down = quantized(rng, E, 2 * width, dim, mode=first), quantized(rng, E, dim, width, mode=last)
    halves = [
        both.with_arrays(*(np.ascontiguousarray(a[:, rows]) for a in both.arrays if a is not None))
        for rows in (slice(width), slice(width, None))
    ]
    check_experts_by_lanes(rng, own, both if stacked else None, halves, down)


@pytest.mark.parametrize(("T", "mode", "streamed"), [(5, "mxfp4", True), (29, "mxfp4", False), (9, "affine", True)])
def test_lanes_take_experts_with_biases(T, mode, streamed, rng):
    """gpt-oss's gate, whose experts have biases by their ids and weights by their slots; absent ones add nothing."""
    E, k, dim, width, limit = 3, 2, 192, 128, 0.7
    sizes = {"gate": (width, dim), "up": (width, dim), "down": (dim, width)}
    call: dict[str, Any] = {f"{name}_w": quantized(rng, E, *size, mode=mode) for name, size in sizes.items()}
    call |= {f"{name}_bias": normal(rng, 5 if streamed else E, size[0]) for name, size in sizes.items()}
    ids = np.stack([rng.permutation(5 if streamed else E)[:k] for _ in range(T)]).astype(np.int32)
    ids[-1, 0] = -1
    call |= {"x": normal(rng, T, dim, dtype="bfloat16"), "ids": ids, "weights": rng.random((T, k), np.float32)}
    call |= {"slot_of": i32(2, -2, 0, 1, -2) if streamed else None, "limit": limit, "residual": normal(rng, T, dim)}
    want = reference(ops.moe_biased_forward, **call)
    assert_close(
        "y", run(ops.moe_biased_forward, variant="lanes", **call), want, 4 * EPS["bfloat16"], np.abs(want).max()
    )
    call["residual"] = None
    want = reference(ops.moe_biased_forward, **call).astype(np.float32)
    got = run(ops.moe_biased_forward, variant="lanes", **call).astype(np.float32)
    assert_close("sum", got, want, 4 * EPS["bfloat16"], np.abs(want).max())


def test_lanes_refuse_other_floats(rng):
    """Odd numbers of groups, of which no load takes two scales, and a global scale."""
    x = normal(rng, 3, 96, dtype="bfloat16")
    with pytest.raises(BackendError, match="variant 'lanes': .*mxfp4.*expected .* multiples of 64"):
        run(ops.quantized_matmul, variant="lanes", x=x, w=quantized(rng, 5, 96, mode="mxfp4"))
    w = penstock.quantize(normal(rng, 5, 96), mode="nvfp4", global_scale=np.float32(3))
    with pytest.raises(BackendError, match="variant 'lanes': .*without a global scale"):
        run(ops.quantized_matmul, variant="lanes", x=x, w=w)


# -- assembly --------------------------------------------------------------------------------------------------------


def pairs(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two bfloat16 numbers in a word."""
    bits = [part.astype(np.float32).view(np.uint32) >> 16 for part in (low, high)]
    return bits[0] | bits[1] << 16


@pytest.mark.parametrize("mode", MODES)
def test_a_warp_multiplies_32_codes_of_16_rows(mode, rng):
    """Every code and sign, two tiles of tokens; of nvfp4 the scales of both halves, subnormal ones among them."""
    tokens, words, step = 2, 2 if mode == "mxfp8" else 1, 2 if mode == "mxfp8" else 4
    w = every_code(rng, mode, 16, 32, range(127) if mode == "nvfp4" else range(127, 128))
    x = normal(rng, 8 * tokens, 32, dtype="bfloat16").astype(np.float32)
    codes = [w.packed[row, words * PLACE + i] for row in (ROW, ROW + 8) for i in range(words)]
    mine = []
    for t in range(tokens):
        each = [x[8 * t + ROW, 8 * PLACE + i] for i in range(8)]
        for first in range(0, 8, 2 * step):
            mine += [pairs(each[first + i], each[first + i + step]) for i in range(step)]
    scales, factor = [], 1.0
    if mode == "nvfp4":
        factor = lanes._LESS.value
        for row in (ROW, ROW + 8):
            both = w.scales[row].astype(np.uint32) << np.array([0, 8], np.uint32)
            given = [both[:, 0] | both[:, 1], (PLACE // 2).astype(np.uint32)]
            scales += ptx.run(lanes._scale_asm(0), "=r,r,r", given)
    asm = lanes._product_asm(w.bits, tokens, bool(scales))
    made = ptx.run(asm, lanes._product_constraints(w.bits, tokens, bool(scales)), [*codes, *mine, *scales])
    want = w.dequantize("float32").astype(np.float64) @ x.T.astype(np.float64)
    got = np.full((16, 8 * tokens), np.nan)
    for i, sums in enumerate(made):
        got[ROW + i % 4 // 2 * 8, i // 4 * 8 + 2 * PLACE + i % 2] = factor * sums
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_a_scale_of_either_half_is_a_number_or_nan():
    """All 256 bytes, in both places where the lane of a second group finds its own."""
    for first in range(0, 256, 32):
        byte = np.arange(first, first + 32, dtype=np.uint32)
        want = np.where(byte & 127 == 127, np.nan, 2.0**118 * e4m3(byte))
        for i, half in ((0, 0), (0, 1), (2, 0), (2, 1)):
            place = np.uint32(8 * (i + half))
            word = byte << place | np.uint32(0xA5A5A5A5) & ~np.uint32(0xFF << place & 0xFFFFFFFF)
            (made,) = ptx.run(lanes._scale_asm(i), "=r,r,r", [word, np.full(32, half, np.uint32)])
            for number in (made << np.uint32(16), made & np.uint32(0xFFFF0000)):
                np.testing.assert_array_equal(number.astype(np.uint32).view(np.float32), want.astype(np.float32))


def e4m3(byte: np.ndarray) -> np.ndarray:
    import ml_dtypes

    return byte.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
