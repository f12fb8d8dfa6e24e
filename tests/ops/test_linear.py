import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock import ops, quant
from penstock.dtypes import numpy_dtype, round_to
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.quant import BITS, GROUP_SIZES, ExpertBlobs, QuantizedTensor, pack_codes, unpack_codes
from tests.ops.common import DTYPES, EPS, assert_close, assert_refused_like, assert_same_bits, normal, quantized
from tests.ops.test_elementwise import check_refusals, f16, f32


@pytest.fixture(autouse=True)
def _definition():
    with penstock.backend("reference"):
        yield


def f64(x):
    return np.asarray(x).astype(np.float64)


def mlx_weight(mx, w):
    """The weight as MLX takes it, with float32 scales."""
    scales, biases = (mx.array(a).astype(mx.float32) for a in (w.scales, w.biases))
    return mx.array(w.packed), scales, biases, {"group_size": w.group_size, "bits": w.bits}


def mlx_dense(mx, w):
    """code · scale + bias by MLX; exact for half-precision scales."""
    packed, scales, biases, layout = mlx_weight(mx, w)
    return np.array(mx.dequantize(packed, scales, biases, **layout)).astype(np.float64)


# -- quantized_matmul --------------------------------------------------------------------------------------------------


def test_quantized_matmul_by_hand():
    codes = np.arange(64).reshape(2, 32) % 16
    scales, biases = np.array([[0.5], [-2.0]], "float32"), np.array([[1.0], [3.0]], "float32")
    w = QuantizedTensor(pack_codes(codes, 4), scales, biases, 4, 32)
    x = np.zeros(32, "float32")
    x[[0, 5, 31]] = [10, 1, 2]  # codes 0, 5, 15 in both rows
    np.testing.assert_array_equal(ops.quantized_matmul(x, w), [10 * 1 + 3.5 + 2 * 8.5, 10 * 3 - 7 - 2 * 27])


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_quantized_matmul_matches_mlx_and_torch(bits, group_size, scale_dtype, rng):
    torch, mx = pytest.importorskip("torch"), pytest.importorskip("mlx.core")
    w = quantized(rng, 7, 256, bits=bits, group_size=group_size, dtype=scale_dtype)
    dense = mlx_dense(mx, w)
    for dtype in DTYPES:
        x = normal(rng, 3, 256, dtype=dtype)
        y = ops.quantized_matmul(x, w)
        assert y.dtype == numpy_dtype(dtype)
        want = (torch.from_numpy(f64(x)) @ torch.from_numpy(dense).T).numpy()
        size = np.abs(f64(x)) @ np.abs(dense).T
        ulp = EPS["float32"] * 2 * size if scale_dtype == "float32" else 0  # fused or separate multiply-add
        assert_close("y", y, want, 1.01, EPS[dtype] * np.maximum(np.abs(want), 2.0**-14) + ulp)
    packed, scales, biases, layout = mlx_weight(mx, w)
    x = normal(rng, 3, 256)
    loose = mx.quantized_matmul(mx.array(x), packed, scales, biases, transpose=True, **layout)
    assert_close("y of mlx", ops.quantized_matmul(x, w), np.array(loose), 1e-5, np.abs(f64(x)) @ np.abs(dense).T)


@pytest.mark.parametrize("N", [1, 7, 8, 9, 15, 17, 63, 65])
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_quantized_matmul_of_any_row_count(N, activations, rng):
    w, x = quantized(rng, N, 64), normal(rng, 3, 64)
    y = ops.quantized_matmul(x, w, activations=activations)
    assert y.shape == (3, N)
    for i in range(N):
        row = w.with_arrays(*(a[i : i + 1] for a in w.arrays))
        assert_close("a row of w alone", y[:, i : i + 1], ops.quantized_matmul(x, row, activations=activations), 1e-7)


@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_quantized_matmul_rows_are_independent(activations, rng):
    w, x = quantized(rng, 5, 64), normal(rng, 4, 3, 64, dtype="float16")
    y = ops.quantized_matmul(x, w, activations=activations)
    assert y.shape == (4, 3, 5)
    flat = ops.quantized_matmul(x.reshape(12, 64), w, activations=activations)
    assert_same_bits("two axes", flat.reshape(4, 3, 5), y)
    for t in range(12):
        alone = ops.quantized_matmul(x.reshape(12, 64)[t], w, activations=activations)
        assert alone.shape == (5,)
        assert_same_bits("one row", alone, flat[t])
    assert ops.quantized_matmul(x[:0], w, activations=activations).shape == (0, 3, 5)
    assert ops.quantized_matmul(x[0, :0], w, activations=activations).shape == (0, 5)


@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_matmul_gives_the_dtype_asked_for(dtype, activations, rng):
    w, x = quantized(rng, 9, 128), normal(rng, 3, 128, dtype="bfloat16")
    exact = ops.quantized_matmul(x.astype("float32"), w, activations=activations)
    y = ops.quantized_matmul(x, w, activations=activations, dtype=dtype)
    assert y.dtype == numpy_dtype(dtype)
    assert_close("y", y, exact, 1.01 * EPS[dtype] + EPS["float32"], np.abs(exact))


def test_quantized_matmul_of_a_large_weight_is_that_of_its_parts(rng):
    w, x = quantized(rng, 1100, 4096, group_size=128), normal(rng, 2, 4096)  # too much to make dense at once
    parts = [w.with_arrays(*(a[rows] for a in w.arrays)) for rows in (slice(0, 600), slice(600, 1100))]
    for activations in ("float32", "int8"):
        halves = [ops.quantized_matmul(x, part, activations=activations) for part in parts]
        assert_close("y", ops.quantized_matmul(x, w, activations=activations), np.concatenate(halves, axis=1), 1e-6)


# -- activations rounded to 8 bits -------------------------------------------------------------------------------------


def int8_loop(x, w):
    """The formula of penstock.ops.linear, number by number."""
    codes, gs = unpack_codes(w.packed, w.bits), w.group_size
    y = np.zeros((len(x), w.shape[0]))
    for t, n, g in np.ndindex(len(x), w.shape[0], w.shape[1] // gs):
        group = [np.float32(v) for v in x[t, g * gs : (g + 1) * gs]]
        delta = max(abs(v) for v in group) / np.float32(127)
        xq = [0 if delta == 0 else round(v / delta) for v in group]  # Python rounds half to even
        dot = sum(int(c) * q for c, q in zip(codes[n, g * gs : (g + 1) * gs], xq, strict=True))
        y[t, n] += float(delta) * (float(w.scales[n, g]) * dot + float(w.biases[n, g]) * sum(xq))
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 64), (4, 32), (5, 32), (6, 128), (8, 64)])
def test_quantized_matmul_int8_is_the_written_formula(bits, group_size, dtype, rng):
    w = quantized(rng, 3, 128, bits=bits, group_size=group_size)
    x = normal(rng, 4, 128, dtype=dtype, scale=3)
    x[0, :group_size] = 0  # a group of zeros
    x[1, :group_size] = (np.arange(group_size) - 9) / 2  # delta is not 1: ordinary
    x[2, :] = np.resize([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], 128)  # delta is 1: halves go to even
    y = ops.quantized_matmul(x, w, activations="int8", dtype="float32")
    want = int8_loop(x, w)
    assert_close("y", y, want, 1.01 * EPS["float32"], np.maximum(np.abs(want), 1e-3))
    exact = f64(x) @ f64(penstock.dequantize(w)).T
    assert (y != round_to(exact, np.float32)).any()
    # |x − delta · xq| ≤ delta / 2 for each x
    delta = np.abs(f64(x)).reshape(4, -1, group_size).max(axis=-1) / 127
    weights = np.abs(f64(penstock.dequantize(w))).reshape(3, -1, group_size).sum(axis=-1)
    bound = (delta[:, None] / 2 * weights).sum(axis=-1)
    assert (np.abs(y - exact) <= bound * (1 + 1e-5) + 1e-5).all()


def test_quantized_matmul_int8_rounds_halves_to_even():
    codes = np.zeros((1, 32), int)
    w = QuantizedTensor(pack_codes(codes + 1, 4), np.ones((1, 1), "float32"), np.zeros((1, 1), "float32"), 4, 32)
    for value, rounded in ((0.5, 0), (1.5, 2), (2.5, 2), (-0.5, 0), (-2.5, -2), (0.50001, 1)):
        x = np.zeros((1, 32), "float32")
        x[0, :2] = 127, value
        assert ops.quantized_matmul(x, w, activations="int8")[0, 0] == 127 + rounded


def test_quantized_matmul_int8_keeps_nan_in_its_row(rng):
    w, x = quantized(rng, 3, 64), normal(rng, 3, 64)
    x[0, 5], x[1, 40] = np.nan, np.inf
    for activations in ("float32", "int8"):
        y = ops.quantized_matmul(x, w, activations=activations)
        assert not np.isfinite(y[:2]).any()
        assert np.isnan(y[0]).all()
        assert np.isfinite(y[2]).all()
    assert (ops.quantized_matmul(np.zeros((2, 64), "float32"), w, activations="int8") == 0).all()
    tiny = np.full((1, 64), 1e-45, "float32")  # max|x| / 127 underflows: the group counts by its bias alone
    assert np.isfinite(ops.quantized_matmul(tiny, w, activations="int8")).all()


# -- dense products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_matches_torch(dtype, weight_dtype, rng):
    torch = pytest.importorskip("torch")
    for T, N, K in ((1, 1, 1), (3, 5, 7), (2, 9, 65)):
        x, w = normal(rng, T, K, dtype=dtype), normal(rng, N, K, dtype=weight_dtype)
        want = torch.nn.functional.linear(*(torch.from_numpy(f64(a)) for a in (x, w))).numpy()
        for result in (None, *DTYPES):
            y = ops.matmul(x, w, dtype=result)
            assert y.dtype == numpy_dtype(result or dtype)
            assert_close("y", y, want, 1.01 * EPS[result or dtype])
        assert_close("one row", ops.matmul(x[0], w), want[0], 1.01 * EPS[dtype])
        if weight_dtype == "bfloat16":
            assert_same_bits("bf16_matmul", ops.bf16_matmul(x, w), ops.matmul(x, w))
            assert_same_bits("bf16_matmul", ops.bf16_matmul(x, w, dtype="float32"), ops.matmul(x, w, dtype="float32"))


@given(st.lists(st.integers(0, 3), max_size=2), st.integers(1, 4), st.integers(1, 4))
def test_matmul_of_any_shape(lead, N, K):
    x = np.arange(math.prod(lead) * K, dtype="float32").reshape(*lead, K)
    w = np.arange(N * K, dtype="float32").reshape(N, K) - 3
    if 0 in lead[1:]:
        assert_refused_like(
            ops.matmul, {"x": x, "w": w}, ShapeError, "x has shape .*, expected no empty axis but the first"
        )
        return
    np.testing.assert_array_equal(ops.matmul(x, w), x @ w.T)


def test_matmul_sums_long_rows_without_loss(rng):
    K = 3 * 33_000
    x = np.tile(np.array([3e7, 1, -3e7], "float32"), K // 3)
    assert ops.matmul(x, np.ones((1, K), "float16"))[0] == K / 3  # a float32 sum loses every 1
    x = rng.permutation(x)
    assert ops.bf16_matmul(x, np.ones((2, K), numpy_dtype("bfloat16")))[1] == K / 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_fused_gate_up_swiglu_is_two_products_and_swiglu(activations, dtype, rng):
    gate, up = quantized(rng, 7, 64, bits=3), quantized(rng, 7, 64, bits=3)
    x = normal(rng, 3, 2, 64, dtype=dtype)
    a, b = (f64(ops.quantized_matmul(x, w, activations=activations, dtype="float32")) for w in (gate, up))
    y = ops.fused_gate_up_swiglu(x, gate, up, activations=activations)
    assert y.dtype == x.dtype
    assert_close("y", y, a / (1 + np.exp(-a)) * b, 1.01 * EPS[dtype] + 4 * EPS["float32"])
    swapped = ops.fused_gate_up_swiglu(x, up, gate, activations=activations)
    assert np.abs(f64(swapped) - f64(y)).max() > 0.01
    assert_same_bits("one row", ops.fused_gate_up_swiglu(x[0, 0], gate, up, activations=activations), y[0, 0])
    assert ops.fused_gate_up_swiglu(x[:0], gate, up, activations=activations).shape == (0, 2, 7)


@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_fused_gate_up_geglu_is_two_products_and_geglu(activations, rng):
    gate, up, x = quantized(rng, 7, 64, bits=3), quantized(rng, 7, 64, bits=3), normal(rng, 3, 2, 64)
    a, b = (ops.quantized_matmul(x, w, activations=activations) for w in (gate, up))
    y = ops.fused_gate_up_geglu(x, gate, up, activations=activations)
    assert_close("y", y, f64(ops.geglu(a, b)), 8 * EPS["float32"])
    assert (y != ops.fused_gate_up_swiglu(x, gate, up, activations=activations)).any()


# -- products with what surrounds them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_norm_matmul_is_the_product_of_the_norm(activations, dtype, rng):
    x, norm = normal(rng, 3, 2, 64, dtype=dtype), normal(rng, 64, dtype="bfloat16")
    h = ops.rms_norm(x, norm, 1e-3)
    w, dense = quantized(rng, 7, 64), normal(rng, 7, 64, dtype="bfloat16")
    for kind in (None, "float32"):
        want = ops.quantized_matmul(h, w, activations=activations, dtype=kind)
        got = ops.norm_matmul(x, norm, w, 1e-3, activations=activations, dtype=kind)
        assert_same_bits("quantized", got, want)
        got = ops.norm_matmul(x, norm, dense, 1e-3, activations=activations, dtype=kind)
        assert_same_bits("dense", got, ops.matmul(h, dense, dtype=kind))
    assert_same_bits("one row", ops.norm_matmul(x[0, 0], norm, dense, 1e-3), ops.matmul(h[0, 0], dense))


def test_norm_matmul_by_hand():
    x, norm, w = np.array([[3.0, 4.0]], "float32"), np.array([1.0, 2.0], "float32"), np.eye(2, dtype="float32")
    y = ops.norm_matmul(x, norm, w, eps=0.0)
    np.testing.assert_allclose(y, [[3 / 12.5**0.5, 8 / 12.5**0.5]], rtol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_matmul_add_rounds_the_sum_once(activations, dtype, rng):
    x, w, dense = normal(rng, 3, 2, 64, dtype=dtype), quantized(rng, 7, 64), normal(rng, 7, 64, dtype="float16")
    residual = normal(rng, 3, 2, 7, dtype=dtype)
    for weight in (w, dense):
        exact = ops.matmul(x, dense, dtype="float32")
        if weight is w:
            exact = ops.quantized_matmul(x, w, activations=activations, dtype="float32")
        y = ops.matmul_add(residual, x, weight, activations=activations)
        assert y.dtype == residual.dtype
        assert_close("y", y, f64(residual) + f64(exact), 1.01 * EPS[dtype] + 4 * EPS["float32"])
    want = ops.matmul_add(residual, x, w)
    assert ops.matmul_add(residual, x, w, out=residual) is residual
    assert_same_bits("in place", residual, want)


@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_dequantize_is_that_of_quant(scale_dtype, rng):
    for bits in BITS:
        w = quantized(rng, 2, 5, 64, bits=bits, dtype=scale_dtype)
        for dtype in DTYPES:
            assert_same_bits(f"{bits} bits", ops.dequantize(w, dtype), quant.dequantize(w, dtype))
        codes = f64(unpack_codes(w.packed, bits)).reshape(2, 5, 2, 32)
        want = codes * f64(w.scales)[..., None] + f64(w.biases)[..., None]
        assert_close(f"{bits} bits", ops.dequantize(w), want.reshape(2, 5, 64), 2 * EPS["float32"])


# -- expert_matmul -----------------------------------------------------------------------------------------------------


def blobs(w):
    """The experts of a stack as byte buffers, with something before, between and after the parts."""
    E, N, K = w.shape
    s_off, b_off, w_off = 8, 8 + w.scales[0].nbytes + 4, 8 + 2 * w.scales[0].nbytes + 12
    buffers = []
    for e in range(E):
        buffer = np.full(w_off + w.packed[e].nbytes + 7, 255, np.uint8)
        for offset, part in ((w_off, w.packed[e]), (s_off, w.scales[e]), (b_off, w.biases[e])):
            buffer[offset : offset + part.nbytes] = np.frombuffer(part.tobytes(), np.uint8)
        buffers.append(buffer)
    return ExpertBlobs(tuple(buffers), w_off, s_off, b_off, N, K, w.bits, w.group_size, w.dtype)


KINDS = {
    "stacked": lambda w: w,
    "sequence": lambda w: [w[e] for e in range(w.shape[0])],
    "blobs": blobs,
    "dense": lambda w: penstock.dequantize(w),
}


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_expert_matmul_is_one_product_per_id(kind, scale_dtype, rng):
    E, N, K, T, k = 4, 9, 64, 3, 2
    stacked = quantized(rng, E, N, K, dtype=scale_dtype)
    experts = KINDS[kind](stacked)
    some = np.array([2, 0, 2], "int32")  # one expert twice, two not at all
    pairs = rng.integers(0, E, (T, k)).astype("int32")
    for ids, lead in ((None, (E,)), (some, (3,)), (pairs, (T, k)), (some[:0], (0,)), (pairs[:0], (0, k))):
        named = np.arange(E) if ids is None else ids
        for shape in (lead[:-1], lead):  # shared by the experts of a token, or one each
            x = normal(rng, *shape, K)
            y = ops.expert_matmul(x, experts, ids)
            assert y.shape == (*lead, N)
            for at in np.ndindex(lead):
                row = x[at] if shape == lead else x[at[:-1]]
                want = ops.quantized_matmul(row, stacked[int(named[at])])
                assert_close(f"expert at {at}", y[at], want, 2 * EPS["float32"])


def test_expert_matmul_finds_experts_by_slot(rng):
    w = quantized(rng, 3, 5, 32)
    slot_of = np.array([2, -1, 0, 1], "int32")  # expert 1 of 4 is absent
    x, ids = normal(rng, 32), np.array([3, 0, 2], "int32")
    want = ops.expert_matmul(x, w, np.array([1, 2, 0], "int32"))
    for kind in KINDS.values():
        assert_close("y", ops.expert_matmul(x, kind(w), ids, slot_of), want, 2 * EPS["float32"])
    bad = {"x": x, "experts": w, "slot_of": slot_of}
    message = r"ids has 1, an absent expert \(slot_of is -1\), expected present ones"
    assert_refused_like(ops.expert_matmul, bad | {"ids": np.array([3, 1], "int32")}, InvalidArgument, message)
    assert_refused_like(ops.expert_matmul, bad, InvalidArgument, message)  # by default all of slot_of


@pytest.mark.parametrize("kind", KINDS)
def test_expert_matmul_of_no_expert_is_zero(kind, rng):
    w, x = quantized(rng, 3, 5, 32), normal(rng, 2, 32)
    slot_of = np.array([2, -1, 0, 1], "int32")
    want = ops.expert_matmul(x, w, np.array([[0, 1], [2, 0]], "int32"))
    got = ops.expert_matmul(x, KINDS[kind](w), np.array([[2, -1], [-1, 2]], "int32"), slot_of)
    assert_close("y of an expert", got[0, 0], want[0, 0], 2 * EPS["float32"])
    assert_close("y of an expert", got[1, 1], want[1, 1], 2 * EPS["float32"])
    assert not got[0, 1].any() and not got[1, 0].any()
    nothing = ops.expert_matmul(x, KINDS[kind](w), np.full((2, 3), -1, "int32"))
    assert nothing.shape == (2, 3, 5) and not nothing.any()


@pytest.mark.parametrize("kind", ["stacked", "sequence", "blobs"])
def test_expert_matmul_rounds_activations_when_asked(kind, rng):
    w, x = quantized(rng, 2, 5, 64, bits=8), normal(rng, 2, 64, dtype="float16")
    y = ops.expert_matmul(x, KINDS[kind](w), activations="int8")
    for e in range(2):
        assert_same_bits("y", y[e], ops.quantized_matmul(x[e], w[e], activations="int8"))
    assert (y != ops.expert_matmul(x, KINDS[kind](w))).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("wrong", "shown"), [([0, 4], 4), ([-2, 2], -2), ([0, 2**31 - 1], 2**31 - 1)])
def test_expert_matmul_refuses_ids_out_of_range(kind, wrong, shown, rng):
    args = {"x": normal(rng, 32), "experts": KINDS[kind](quantized(rng, 4, 5, 32)), "ids": np.array(wrong, "int32")}
    message = rf"ids has {shown}, expected -1 to 3 \(4 experts, -1: none\)"
    assert_refused_like(ops.expert_matmul, args | {"out": np.full((2, 5), 7, "float32")}, InvalidArgument, message)


# -- errors ------------------------------------------------------------------------------------------------------------

VALID = {
    "dequantize": lambda rng: {"w": quantized(rng, 3, 64)},
    "matmul": lambda rng: {"x": normal(rng, 3, 64), "w": normal(rng, 5, 64)},
    "bf16_matmul": lambda rng: {"x": normal(rng, 3, 64), "w": normal(rng, 5, 64, dtype="bfloat16")},
    "quantized_matmul": lambda rng: {"x": normal(rng, 3, 64), "w": quantized(rng, 64, 64)},
    "fused_gate_up_swiglu": lambda rng: {
        "x": normal(rng, 3, 64),
        "gate_w": quantized(rng, 64, 64),
        "up_w": quantized(rng, 64, 64),
    },
    "norm_matmul": lambda rng: {"x": normal(rng, 3, 64), "norm_weight": normal(rng, 64), "w": quantized(rng, 64, 64)},
    "matmul_add": lambda rng: {"residual": normal(rng, 3, 5), "x": normal(rng, 3, 64), "w": normal(rng, 5, 64)},
    "expert_matmul": lambda rng: {
        "x": normal(rng, 2, 32),
        "experts": quantized(rng, 4, 32, 32),
        "ids": np.array([3, 1], "int32"),
        "slot_of": np.array([0, 1, 2, 3], "int32"),
    },
}


@pytest.mark.parametrize("name", VALID)
def test_linear_op_refuses_bad_arrays(name, rng):
    check_refusals(getattr(ops, name), VALID[name](rng))


def blank(*shape, bits=4, group_size=32):
    """A quantized weight of zeros."""
    *rows, K = shape
    groups = f32(*rows, K // group_size)
    return QuantizedTensor(np.zeros((*rows, K * bits // 32), np.uint32), groups, groups.copy(), bits, group_size)


WRONG = {
    "dequantize": [
        ({"dtype": "float64"}, DTypeError, "dtype is 'float64', expected float32, float16 or bfloat16"),
        ({"w": f32(3, 64)}, DTypeError, "w is a ndarray, expected a QuantizedTensor"),
    ],
    "matmul": [
        ({"x": f32(3, 63)}, ShapeError, r"w has shape \(5, 64\), expected a last axis of 63 \(last axis of x\)"),
        ({"x": f32()}, ShapeError, r"x has shape \(\), expected \[T, K\] or \[K\]"),
        ({"x": f32(2, 0, 64)}, ShapeError, r"x has shape \(2, 0, 64\), expected no empty axis"),
        ({"w": f32(64)}, ShapeError, r"w has shape \(64,\), expected \[N, K\]"),
        ({"w": f32(0, 64)}, ShapeError, r"w has shape \(0, 64\), expected no empty axis"),
        ({"w": blank(64, 64)}, DTypeError, "w is a QuantizedTensor, expected an array"),
        ({"dtype": "int8"}, DTypeError, "dtype is 'int8', expected float32, float16 or bfloat16"),
    ],
    "bf16_matmul": [
        ({"w": f32(5, 64)}, DTypeError, "w has dtype float32, expected bfloat16"),
        ({"w": f16(5, 64)}, DTypeError, "w has dtype float16, expected bfloat16"),
        ({"x": f32(3, 65)}, ShapeError, r"w has shape \(5, 64\), expected a last axis of 65"),
    ],
    "quantized_matmul": [
        ({"x": f32(3, 32)}, ShapeError, r"w has shape \(64, 64\), expected a last axis of 32 \(last axis of x\)"),
        ({"x": f32(0)}, ShapeError, r"w has shape \(64, 64\), expected a last axis of 0"),
        ({"w": blank(2, 5, 64)}, ShapeError, r"w has shape \(2, 5, 64\), expected \[N, K\]"),
        ({"w": f32(5, 64)}, DTypeError, "w is a ndarray, expected a QuantizedTensor"),
        ({"activations": "int4"}, InvalidArgument, "activations is 'int4', expected one of 'float32', 'int8'"),
        ({"activations": None}, DTypeError, "activations is None, expected a string"),
        ({"dtype": "float64"}, DTypeError, "dtype is 'float64', expected float32, float16 or bfloat16"),
    ],
    "fused_gate_up_swiglu": [
        ({"up_w": blank(63, 64)}, ShapeError, r"up_w has shape \(63, 64\), expected \(64, 64\) \(as gate_w\)"),
        ({"up_w": blank(64, 64, bits=8)}, InvalidArgument, "up_w has bits 8, expected 4 as gate_w"),
        ({"up_w": blank(64, 64, group_size=64)}, InvalidArgument, "up_w has group_size 64, expected 32 as"),
        ({"x": f32(3, 32)}, ShapeError, r"\w+ has shape \(64, 64\), expected a last axis of 32"),
        ({"activations": "bf16"}, InvalidArgument, "activations is 'bf16', expected one of 'float32', 'int8'"),
    ],
    "norm_matmul": [
        ({"norm_weight": f32(63)}, ShapeError, r"norm_weight has shape \(63,\), expected \(64,\) \(last axis of x\)"),
        ({"eps": -1.0}, InvalidArgument, "eps is -1.0, expected a finite number, 0 or more"),
        ({"w": f32(5, 32)}, ShapeError, r"w has shape \(5, 32\), expected a last axis of 64"),
        ({"activations": "int4"}, InvalidArgument, "activations is 'int4', expected one of 'float32', 'int8'"),
        ({"dtype": "float64"}, DTypeError, "dtype is 'float64', expected float32, float16 or bfloat16"),
    ],
    "matmul_add": [
        ({"residual": f32(3, 6)}, ShapeError, r"residual has shape \(3, 6\), expected \(3, 5\) \(that of x"),
        ({"w": f32(5, 32)}, ShapeError, r"w has shape \(5, 32\), expected a last axis of 64"),
        ({"activations": "int4"}, InvalidArgument, "activations is 'int4', expected one of 'float32', 'int8'"),
    ],
    "expert_matmul": [
        ({"x": f32(2, 64)}, ShapeError, r"experts has shape \(4, 32, 32\), expected a last axis of 64"),
        ({"x": f32(3, 32)}, ShapeError, r"x has shape \(3, 32\), expected \(32,\) \(shared\) or \(2, 32\) \(one"),
        ({"x": f32(2, 1, 32)}, ShapeError, r"x has shape \(2, 1, 32\), expected \(32,\) \(shared\) or \(2, 32\)"),
        ({"ids": np.zeros((2, 0), "int32")}, ShapeError, r"ids has shape \(2, 0\), expected no empty axis"),
        ({"ids": np.zeros((1, 1, 2), "int32")}, ShapeError, r"ids has shape \(1, 1, 2\), expected \[k\] or \[T, k\]"),
        ({"ids": f32(2)}, DTypeError, "ids has dtype float32, expected int32"),
        ({"slot_of": np.zeros((1, 4), "int32")}, ShapeError, r"slot_of has shape \(1, 4\), expected \[E\]"),
        ({"slot_of": np.full(4, 9, "int32")}, InvalidArgument, r"slot_of has 9, expected 0 to 3 \(4 slots\)"),
        ({"experts": blank(32, 32)}, ShapeError, r"experts has shape \(32, 32\), expected \[E, N, K\]"),
        ({"experts": []}, DTypeError, "experts is a list, expected "),
        ({"experts": [blank(64, 64), f32(64, 64)]}, DTypeError, "experts is a list, expected "),
        ({"experts": [blank(64, 32), blank(63, 32)]}, ShapeError, r"experts has shape \(63, 32\), expected \(64, 32\)"),
        ({"activations": "int4"}, InvalidArgument, "activations is 'int4', expected one of 'float32', 'int8'"),
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "error", "message"), [(name, *case) for name, cases in WRONG.items() for case in cases]
)
def test_linear_op_names_what_is_wrong(name, change, error, message, rng):
    assert_refused_like(getattr(ops, name), VALID[name](rng) | change, error, message)
