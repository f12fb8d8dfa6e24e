"""Ops with weights of small floats, and of 1 bit: CPU kernels against definitions, definitions against mlx."""

import numpy as np
import pytest

import penstock
from penstock import ops
from penstock.errors import BackendError
from penstock.quant import QuantizedTensor, dequantize
from tests.ops.common import EPS, assert_close, normal
from tests.ops.modes import FLOAT_MODES, KINDS, calls, weight


@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_cpu_kernels_equal_definitions(kind, activations, rng):
    for op, arguments in calls(rng, kind, "float32", activations):
        with penstock.backend("reference"):
            want = op(**arguments)
        assert_close(f"{op.name} y", op(**arguments), want, 4e-6, max(np.abs(want).max(), 1e-3))


@pytest.mark.parametrize("variant", ["avx2", "portable"])
@pytest.mark.parametrize("kind", FLOAT_MODES)
def test_every_instruction_set_gives_the_same_int8_product(kind, variant, rng):
    w, x = weight(rng, kind, 17, 608), normal(rng, 5, 608)
    want = ops.quantized_matmul(x, w, activations="int8")
    with penstock.backend("cpu", variant=variant):
        try:
            got = ops.quantized_matmul(x, w, activations="int8")
        except BackendError:
            pytest.skip(f"{variant} does not run here")
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("variant", [None, "avx2", "portable"])
def test_mxfp8_gives_a_row_the_same_bits_alone_and_among_others(variant, activations, rng):
    """All codes, NaN too, and scales of any size: alone it is multiplied in registers, among others in panels."""
    codes = np.arange(18 * 352, dtype=np.uint32).astype(np.uint8).reshape(18, 352)
    codes[:9][(codes[:9] & 0x7F) == 0x7F] = 0  # half of the rows have no NaN
    scales = rng.integers(90, 134, (18, 11), np.uint8)
    scales[2, 4], scales[6:9] = 150, rng.integers(0, 9, (3, 11), np.uint8)  # a row of large, three of tiny ones
    w, x = QuantizedTensor(codes.view(np.uint32), scales, None, 8, 32, "mxfp8"), normal(rng, 6, 352)
    with penstock.backend("cpu", variant=variant):
        try:
            many = ops.quantized_matmul(x, w, activations)
        except BackendError:
            pytest.skip(f"{variant} does not run here")
        alone = np.concatenate([ops.quantized_matmul(x[t : t + 1], w, activations) for t in range(len(x))])
    np.testing.assert_array_equal(alone, many)
    assert np.isnan(many[:, 9:]).all() and np.isfinite(many[:, :9]).all()
    with penstock.backend("reference"):
        want = ops.quantized_matmul(x, w, activations)
    assert np.isnan(want[:, 9:]).all()
    want = want[:, :9]
    np.testing.assert_allclose(many[:, :9] / np.abs(want).max(0), want / np.abs(want).max(0), atol=4e-6)


@pytest.mark.parametrize("kind", FLOAT_MODES)
def test_quantized_matmul_multiplies_what_dequantize_gives(kind, rng):
    w, x = weight(rng, kind, 9, 96), normal(rng, 3, 96)
    with penstock.backend("reference"):
        got = ops.quantized_matmul(x, w)
        rounded = ops.quantized_matmul(x, w, activations="int8")
    assert_close("y", got, x.astype(np.float64) @ dequantize(w).astype(np.float64).T, EPS["float32"])
    assert not np.array_equal(rounded, got)
    assert_close("y", rounded, got, 0.02)


@pytest.mark.parametrize("kind", FLOAT_MODES)
def test_quantized_matmul_agrees_with_mlx(kind, rng):
    mx = pytest.importorskip("mlx.core")
    mx.set_default_device(mx.cpu)
    w, x = weight(rng, kind, 64, 128), normal(rng, 3, 128)
    arrays = mx.array(w.packed), mx.array(w.scales)
    want = mx.quantized_matmul(mx.array(x), *arrays, mode=kind, group_size=w.group_size, bits=w.bits)
    assert_close("y", ops.quantized_matmul(x, w), np.array(want), 4e-6)
