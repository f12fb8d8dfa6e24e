import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock import ops
from penstock.dtypes import numpy_dtype, round_to
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from tests.ops.common import DTYPES, EPS, assert_close, assert_refused_like, assert_same_bits, normal
from tests.ops.test_elementwise import check_refusals, f16, f32

DIMS = (1, 2, 3, 4, 5, 31, 32, 33, 255, 256, 257, 2816, 2817)


@pytest.fixture(autouse=True)
def _definition():
    with penstock.backend("reference"):
        yield


def f64(x):
    return np.asarray(x).astype(np.float64)


def n(v, w=1.0, eps=1e-6):
    """v / sqrt(mean(v²) + eps) · w in float64."""
    v = f64(v)
    return v / np.sqrt(np.sum(v**2, axis=-1, keepdims=True) / v.shape[-1] + eps) * f64(w)


def wsum(expert_out, weights):
    return np.einsum("tkd,tk->td", f64(expert_out), f64(weights))


def far(a, b):
    """Two results that differ by far more than any rounding."""
    return np.abs(f64(a) - f64(b)).max() > 0.01


# -- rms_norm ----------------------------------------------------------------------------------------------------------


def test_rms_norm_by_hand():
    x, w = np.array([[3.0, 4.0]], "float32"), np.array([1.0, 2.0], "float32")
    assert_close("y", ops.rms_norm(x, w, eps=0.0), [[3 / 12.5**0.5, 8 / 12.5**0.5]], 1e-7)
    assert_close("eps", ops.rms_norm(np.ones((1, 5), "float32"), eps=3.0), np.full((1, 5), 0.5), 0)  # 1 / sqrt(1 + 3)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_matches_torch(dtype, weight_dtype, rng):
    torch = pytest.importorskip("torch")
    for dim in DIMS:
        x, w = normal(rng, 3, dim, dtype=dtype), normal(rng, dim, dtype=weight_dtype)
        for weight, eps in ((w, 1e-6), (None, 1e-2)):
            y = ops.rms_norm(x, weight, eps)
            w64 = None if weight is None else torch.from_numpy(f64(weight))
            want = torch.nn.functional.rms_norm(torch.from_numpy(f64(x)), (dim,), w64, eps).numpy()
            assert y.dtype == numpy_dtype(dtype)
            assert_close(f"y of dim {dim}", y, want, 1.01 * EPS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_matches_mlx(dtype, rng):
    mx = pytest.importorskip("mlx.core")
    for dim in (1, 33, 2816):
        x, w = normal(rng, 4, dim, dtype=dtype), normal(rng, dim, dtype=dtype)
        for weight in (w, None):
            want = mx.fast.rms_norm(mx.array(x), None if weight is None else mx.array(weight), 1e-5)
            want = np.array(want.astype(mx.float32))
            bound = max(4 * EPS[dtype], 1e-6)  # mlx sums in float32 and rounds x · rinv
            assert_close(f"y of dim {dim}", ops.rms_norm(x, weight, 1e-5), want, bound)


def test_rms_norm_without_weight_is_weight_one(rng):
    x = normal(rng, 3, 7)
    assert_same_bits("y", ops.rms_norm(x), ops.rms_norm(x, np.ones(7, "float16")))


def test_rms_norm_multiplies_by_the_weight_as_it_is(rng):
    x, w = normal(rng, 3, 7), normal(rng, 7)
    assert far(ops.rms_norm(x, w), n(x, 1 + w))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_special_rows(dtype):
    x = np.array([[0, 0, 0], [1, np.nan, 2], [np.inf, 1, -1], [3, 3, 3]]).astype(numpy_dtype(dtype))
    nan = np.nan
    want = [[0, 0, 0], [nan] * 3, [nan, 0, 0], [1, 1, 1]]
    np.testing.assert_array_equal(ops.rms_norm(x, eps=0.0)[1:].astype(np.float64), want[1:])
    np.testing.assert_array_equal(np.round(ops.rms_norm(x).astype(np.float64), 2), want)
    assert np.isnan(ops.rms_norm(x, eps=0.0)[0].astype(np.float64)).all()


@pytest.mark.parametrize(("dtype", "big"), [("float32", 3e38), ("float16", 65504), ("bfloat16", 3e38)])
def test_rms_norm_does_not_overflow(dtype, big):
    x = np.array([[big, -big, big, 0]]).astype(numpy_dtype(dtype))
    assert_close("y", ops.rms_norm(x), n([[1, -1, 1, 0]], eps=0), 1.01 * EPS[dtype])


def test_rms_norm_rounds_once(rng):
    x, w, scale = (normal(rng, *shape, dtype="bfloat16") for shape in [(40, 64), (64,), (40, 64)])
    bf16 = x.dtype
    stepwise = round_to(f64(round_to(n(x), bf16)) * f64(w), bf16)
    y = ops.rms_norm(x, w)
    assert_same_bits("y", y, round_to(n(x, w), bf16))
    assert (y != stepwise).any()
    two_ops = ops.mul(y, scale)
    fused = ops.rms_norm_mul(x, w, scale)
    assert (fused != two_ops).any()
    assert np.abs(f64(fused) - n(x, w) * f64(scale)).sum() < np.abs(f64(two_ops) - n(x, w) * f64(scale)).sum()


@given(st.lists(st.integers(0, 3), max_size=3), st.integers(0, 5))
def test_rms_norm_takes_any_rows_and_refuses_inner_zeros(lead, dim):
    x = np.arange(np.prod(lead, dtype=int) * dim, dtype="float32").reshape(*lead, dim) + 1
    if dim == 0 or 0 in lead[1:]:
        assert_refused_like(ops.rms_norm, {"x": x}, ShapeError, r"x has shape \(.*\), expected ")
        return
    y = ops.rms_norm(x)
    assert y.shape == x.shape
    for row, got in zip(x.reshape(-1, dim), y.reshape(-1, dim), strict=True):
        assert_same_bits("a row alone", got, ops.rms_norm(row))


def test_rms_norm_works_per_head_in_place(rng):
    x, w = normal(rng, 3, 4, 6), normal(rng, 6, dtype="bfloat16")
    want = ops.rms_norm(x.reshape(12, 6), w).reshape(3, 4, 6)
    assert ops.rms_norm(x, w, out=x) is x
    assert_same_bits("x", x, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_triple_is_three_norms(dtype, rng):
    x, weights = normal(rng, 3, 33, dtype=dtype), [normal(rng, 33, dtype=d) for d in DTYPES]
    for y, w in zip(ops.rms_norm_triple(x, *weights, eps=1e-5), weights, strict=True):
        assert_same_bits("y", y, ops.rms_norm(x, w, eps=1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_mul_scales_every_element(dtype, rng):
    for rows, dim in ((1, 1), (4, 5), (3, 257)):
        x, scale, w = normal(rng, rows, dim, dtype=dtype), normal(rng, rows, dim, dtype=dtype), normal(rng, dim)
        assert_close("y", ops.rms_norm_mul(x, w, scale, 1e-3), n(x, w, 1e-3) * f64(scale), 1.01 * EPS[dtype])


# -- rms_norm_qk -------------------------------------------------------------------------------------------------------


def test_rms_norm_qk_by_hand():
    x = np.array([[3, 4, -1, 5, 12, 7]], "float32")  # q | gap | k | v
    want = [[3 / 5 / 2**0.5, 4 / 5 / 2**0.5, -1, 5 / 13, 12 / 13, 7]]
    assert_close("y", ops.rms_norm_qk(x, 1, 2, 3, eps=0.0), want, 1e-7)
    want = [[3 / 6 * 10, 4 / 6 * 10, -1, 5 / 180**0.5, 12 / 180**0.5, 7]]  # 25 + 11 = 36; inv_scale is q's alone
    assert_close("y", ops.rms_norm_qk(x, 1, 2, 3, inv_scale=10.0, eps=11.0), want, 1e-7)
    want = [[3 / 47**0.5, 4 / 47**0.5, -1, 5 / 191**0.5, 12 / 191**0.5, 7]]  # the mean's eps counts key_dim times
    assert_close("y", ops.rms_norm_qk(x, 1, 2, 3, inv_scale=1.0, eps=11.0, eps_on="mean"), want, 1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width", "gap", "values"), [(1, 1, 0, 0), (3, 5, 2, 7), (2, 160, 0, 33)])
def test_rms_norm_qk_matches_transformers(heads, width, gap, values, dtype, rng):
    torch = pytest.importorskip("torch")
    l2norm = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5").l2norm
    size, offset = heads * width, heads * width + gap
    x = normal(rng, 4, offset + size + values, dtype=dtype, scale=0.02)
    bits = x.view(np.uint16 if x.itemsize == 2 else np.uint32)
    bits[:, offset + size :] |= 0x7F81 << (8 * x.itemsize - 16)  # NaN of many kinds, to be copied as they are
    y = ops.rms_norm_qk(x, heads, width, offset)
    for start, factor in ((0, width**-0.5), (offset, 1.0)):
        part = torch.from_numpy(f64(x[:, start : start + size])).reshape(4, heads, width)
        want = (l2norm(part, eps=1e-6) * factor).reshape(4, size).numpy()
        assert_close(f"columns from {start}", y[:, start : start + size], want, 1.01 * EPS[dtype])
    assert_same_bits("between q and k", y[:, size:offset], x[:, size:offset])
    assert_same_bits("values", y[:, offset + size :], x[:, offset + size :])
    assert_same_bits("in place", ops.rms_norm_qk(x, heads, width, offset, out=x), y)


def test_rms_norm_qk_eps_on_the_mean_is_another_result(rng):
    x = normal(rng, 5, 2 * 128, scale=0.005)  # Σx² near 0.003, as in trained models
    q = f64(x[:, :128])
    by_sum, by_mean = (ops.rms_norm_qk(x, 1, 128, 128, eps_on=on) for on in ("sum", "mean"))
    assert_close("mean", by_mean[:, :128], n(q) / 128, 1e-7)  # rinv / sqrt(Dk) is the unit vector, once more the scale
    assert np.abs(by_sum / by_mean - 1).min() > 0.01


def test_rms_norm_qk_of_no_tokens_is_empty():
    assert ops.rms_norm_qk(f32(0, 20), 1, 8, 8).shape == (0, 20)


# -- fusions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rms_norm_norms_before_the_gate(dtype, rng):
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    for T, heads, width in ((1, 1, 1), (3, 2, 5), (2, 3, 160)):
        values, z = (normal(rng, T, heads, width, dtype=dtype) for _ in range(2))
        w = normal(rng, width, dtype="bfloat16")
        y = ops.gated_rms_norm(values, z, w, eps=1e-3)
        silu = f64(z) / (1 + np.exp(-f64(z)))
        assert_close("y", y, n(values, w, 1e-3) * silu, 1.01 * EPS[dtype])
        norm = module.Qwen3_5RMSNormGated(width, eps=1e-3)
        norm.weight.data = torch.from_numpy(w.astype(np.float32))
        want = norm(torch.from_numpy(values.astype(np.float32)), torch.from_numpy(z.astype(np.float32)))
        assert_close("y of transformers", y, want.detach().numpy(), 1e-6 + 1.01 * EPS[dtype])
        if width > 1:
            assert far(y, n(f64(values) * silu, w, 1e-3))  # the gate is not part of the norm
    assert ops.gated_rms_norm(values[:0], z[:0], w).shape == (0, heads, width)


def _end(a, v):
    """The two results of the end of a layer, `v` the expert sum."""
    addend = f64(a["addend"]) if "w1" not in a else n(a["addend"], a["w1"], a["eps"])
    mid = addend + n(v, a["w2"], a["eps"])
    return mid, (f64(a["residual"]) + n(mid, a["w3"], a["eps"])) * f64(a["layer_scalar"])


def _post_attn(a):
    res = f64(a["hidden"]) + n(a["attn_out"], a["post_attn_w"], a["eps"])
    return res, *(n(res, a[w], a["eps"]) for w in ("wa", "wb", "wc"))


FUSED = {
    "norm_add": lambda a: f64(a["residual"]) + n(a["x"], a["weight"], a["eps"]),
    "norm_add_scalar": lambda a: (f64(a["residual"]) + n(a["x"], a["weight"], a["eps"])) * f64(a["scalar"]),
    "residual_norm": lambda a: n(f64(a["residual"]) + f64(a["x"]), a["weight"], a["eps"]),
    "residual_norm_scalar": lambda a: n(f64(a["residual"]) + f64(a["x"]), a["weight"], a["eps"]) * f64(a["scalar"]),
    "moe_wsum_norm_add": lambda a: (
        f64(a["residual"]) + n(wsum(a["expert_out"], a["weights"]), a["norm_weight"], a["eps"])
    ),
    "moe_wsum_dnorm_add": lambda a: (
        n(a["residual"], a["res_norm_weight"], a["eps"])
        + n(wsum(a["expert_out"], a["weights"]), a["moe_norm_weight"], a["eps"])
    ),
    "post_attn_triple_norm": _post_attn,
    "post_ff_norm2_endlayer": lambda a: _end(a, a["moe_accum"]),
    "moe_wsum_post_ff_norm2_endlayer": lambda a: _end(a, wsum(a["expert_out"], a["weights"])),
}
# the argument that may be of another float than the other rows, and so is what is added to it
STREAM_OF = {
    **dict.fromkeys(("norm_add", "norm_add_scalar", "residual_norm", "post_ff_norm2_endlayer"), "residual"),
    "post_attn_triple_norm": "hidden",
}
ROWS = ("x", "residual", "hidden", "attn_out", "addend", "moe_accum", "scale", "values", "z")


def arguments(name, rng, T=3, dim=5, dtype="float32", weight_dtype="float32", eps=1e-3):
    """Arguments of an op of this family: rows [T, dim], weights [dim], a scalar, k = 4 expert outputs."""
    args = {}
    for parameter in getattr(ops, name).params:
        if parameter in ROWS:
            args[parameter] = normal(rng, T, dim, dtype=dtype)
        elif parameter == "expert_out":
            args[parameter] = normal(rng, T, 4, dim, dtype=dtype)
        elif parameter == "weights":
            args[parameter] = normal(rng, T, 4)
        elif parameter in ("scalar", "layer_scalar"):
            args[parameter] = normal(rng, 1, dtype=weight_dtype)
        elif parameter == "eps":
            args[parameter] = eps
        elif parameter not in ("write_sum", "return_mid", "dtype"):
            args[parameter] = normal(rng, dim, dtype=weight_dtype)
    return args


@pytest.mark.parametrize(("dtype", "weight_dtype"), [*zip(DTYPES, DTYPES, strict=True), ("float32", "bfloat16")])
@pytest.mark.parametrize("name", FUSED)
def test_fused_norm_matches_its_formula(name, dtype, weight_dtype, rng):
    for T, dim in ((1, 1), (3, 5), (2, 33), (1, 2817), (0, 4)):
        args = arguments(name, rng, T, dim, dtype, weight_dtype)
        got, want = getattr(ops, name)(**args), FUSED[name](args)
        got, want = (r if isinstance(r, tuple) else (r,) for r in (got, want))
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert g.dtype == numpy_dtype(dtype)
            assert_close(f"{name}[{i}]", g, w, 1.01 * EPS[dtype])


def test_norm_add_by_hand():
    residual, x, w = np.array([[10, 20]], "float32"), np.array([[3, 4]], "float32"), np.array([1, 2], "float32")
    normed, summed = np.array([3, 8]) / 12.5**0.5, np.array([13, 48]) / (13**2 / 2 + 24**2 / 2) ** 0.5
    two = np.array([2.0], "float32")
    assert_close("norm_add", ops.norm_add(residual, x, w, 0.0), residual + normed, 1e-7)
    assert_close("scalar", ops.norm_add_scalar(residual, x, w, two, 0.0), 2 * (residual + normed), 1e-7)
    assert_close("residual_norm", ops.residual_norm(residual, x, w, 0.0), summed[None], 1e-7)
    assert_close("scalar", ops.residual_norm_scalar(residual, x, w, two, 0.0), 2 * summed[None], 1e-7)


def test_norm_add_scalar_is_not_residual_norm_scalar(rng):
    args = arguments("norm_add_scalar", rng, dim=16)
    assert far(ops.norm_add_scalar(**args), ops.residual_norm_scalar(**args))


def test_moe_wsum_dnorm_add_does_not_add_the_raw_residual(rng):
    args = arguments("moe_wsum_dnorm_add", rng, dim=16)
    v = wsum(args["expert_out"], args["weights"])
    y = ops.moe_wsum_dnorm_add(**args)
    assert far(y, f64(args["residual"]) + n(v, args["moe_norm_weight"], 1e-3))
    assert far(y, n(args["residual"], args["moe_norm_weight"], 1e-3) + n(v, args["res_norm_weight"], 1e-3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_norm_writes_the_sum_only_when_asked(dtype, rng):
    args = arguments("residual_norm", rng, 3, 33, dtype)
    y, total = ops.residual_norm(**args, write_sum=True)
    assert_same_bits("sum", total, ops.residual_add(args["residual"], args["x"]))
    assert_same_bits("y", y, ops.residual_norm(**args))
    buffers = np.full_like(y, np.nan), np.full_like(y, 7)
    assert ops.residual_norm(**args, out=buffers) is buffers[0]
    assert_same_bits("y", buffers[0], y)
    assert (buffers[1] == 7).all()


@pytest.mark.parametrize("over", ["residual", "x"])
def test_residual_norm_may_put_the_sum_over_an_input(over, rng):
    args = arguments("residual_norm", rng, 3, 257)
    y, total = ops.residual_norm(**args, write_sum=True)
    out = np.full_like(y, np.nan), args[over]
    assert ops.residual_norm(**args, write_sum=True, out=out)[1] is args[over]
    assert_same_bits("y", out[0], y)
    assert_same_bits("sum", args[over], total)


@pytest.mark.parametrize("name", ["post_ff_norm2_endlayer", "moe_wsum_post_ff_norm2_endlayer"])
def test_endlayer_leaves_the_middle_out_when_told(name, rng):
    args = arguments(name, rng)
    mid, h = getattr(ops, name)(**args)
    alone = getattr(ops, name)(**args, return_mid=False)
    assert_same_bits("h", alone, h)
    assert far(mid, h)
    buffers = np.full_like(h, 7), np.full_like(h, np.nan)
    assert getattr(ops, name)(**args, return_mid=False, out=buffers) is buffers[1]
    assert_same_bits("h", buffers[1], h)
    assert (buffers[0] == 7).all()


@pytest.mark.parametrize("name", [name for name in FUSED if "scalar" in name or "endlayer" in name])
def test_scalar_is_a_number_one_element_or_a_vector(name, rng):
    run, key = getattr(ops, name), "layer_scalar" if "endlayer" in name else "scalar"
    args = arguments(name, rng, dim=6) | ({"return_mid": False} if "endlayer" in name else {})
    base = run(**args | {key: 1.0})
    half = f64(base) * 1.5
    for scalar in (1.5, np.float32(1.5), *(np.full(shape, 1.5, "bfloat16") for shape in ((), (1,), (1, 1), (6,)))):
        assert_close(f"scalar {scalar!r}", run(**args | {key: scalar}), half, 1e-6)
    assert_same_bits("an int", run(**args | {key: 2}), base * 2)
    vector = np.arange(6, dtype="float32")
    assert_close("a vector", run(**args | {key: vector}), f64(base) * vector, 1e-6)
    narrow = arguments(name, rng, dim=1) | ({"return_mid": False} if "endlayer" in name else {})
    want = run(**narrow | {key: 3.0})
    assert_same_bits("dim 1", run(**narrow | {key: np.array([3], "float16")}), want)


def test_gemma_end_of_layer_is_the_same_by_all_four_chains(rng):
    T, k, dim = 5, 4, 48
    res, dense = normal(rng, T, dim), normal(rng, T, dim)
    experts, w = normal(rng, T, k, dim), np.abs(normal(rng, T, k))
    w1, w2, w3, s = normal(rng, dim), normal(rng, dim), normal(rng, dim), np.array([0.7], "float32")
    want = (f64(res) + n(n(dense, w1) + n(wsum(experts, w), w2), w3)) * f64(s)
    normed, summed = ops.rms_norm(dense, w1), ops.weighted_sum(experts, w)
    chains = {
        "A": ops.norm_add_scalar(res, ops.moe_wsum_norm_add(experts, w, normed, w2), w3, s),
        "B": ops.norm_add_scalar(res, ops.moe_wsum_dnorm_add(experts, w, dense, w1, w2), w3, s),
        "C": ops.post_ff_norm2_endlayer(normed, summed, res, w2, w3, s)[1],
        "D": ops.moe_wsum_post_ff_norm2_endlayer(experts, w, normed, res, w2, w3, s)[1],
    }
    for chain, h in chains.items():
        assert_close(f"chain {chain}", h, want, 1e-6)
    mid = ops.moe_wsum_norm_add(experts, w, normed, w2)
    wrong = {
        "addend = residual stream": ops.post_ff_norm2_endlayer(res, summed, res, w2, w3, s)[1],
        "addend not normed": ops.post_ff_norm2_endlayer(dense, summed, res, w2, w3, s)[1],
        "residual_norm_scalar at the end": ops.residual_norm_scalar(res, mid, w3, s),
        "scalar on the norm alone": ops.residual_add(res, ops.mul(ops.rms_norm(mid, w3), 0.7)),
        "1 + w": ops.norm_add_scalar(res, mid, 1 + w3, s),
    }
    for reading, h in wrong.items():
        assert far(h, want), reading


def test_post_attn_triple_norm_is_norm_add_and_three_norms(rng):
    args = arguments("post_attn_triple_norm", rng, 3, 40)
    res, *normed = ops.post_attn_triple_norm(**args)
    assert_same_bits("res", res, ops.norm_add(args["hidden"], args["attn_out"], args["post_attn_w"], 1e-3))
    for y, w in zip(normed, ("wa", "wb", "wc"), strict=True):
        assert_close(w, y, ops.rms_norm(res, args[w], 1e-3), 1e-6)


@pytest.mark.parametrize("name", STREAM_OF)
def test_fused_norm_adds_to_a_stream_of_another_float(name, rng):
    """Sums have the stream's dtype, normed rows that of the others, both by the formula to their own last bit."""
    for stream, dtype in (("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")):
        args = arguments(name, rng, 3, 33, dtype)
        args[STREAM_OF[name]] = normal(rng, 3, 33, dtype=stream)
        more = {"write_sum": True} if name == "residual_norm" else {}
        got, want = getattr(ops, name)(**args, **more), FUSED[name](args)
        got, want = (r if isinstance(r, tuple) else (r,) for r in (got, want))
        if name == "residual_norm":
            want = (*want, f64(args["residual"]) + f64(args["x"]))
        kinds = {
            "residual_norm": (dtype, stream),
            "post_attn_triple_norm": (stream, dtype, dtype, dtype),
            "post_ff_norm2_endlayer": (dtype, stream),
        }.get(name, (stream,))
        for i, (g, w, kind) in enumerate(zip(got, want, kinds, strict=True)):
            assert g.dtype == numpy_dtype(kind)
            assert_close(f"{name}[{i}]", g, w, 1.01 * EPS[kind])


def test_rms_norm_rounds_once_to_the_dtype_that_is_asked_for(rng):
    x, w = normal(rng, 3, 33), [normal(rng, 33) for _ in range(3)]
    for dtype in DTYPES:
        want = [round_to(n(x, weight, 1e-6), dtype) for weight in w]
        assert_same_bits("one", ops.rms_norm(x, w[0], dtype=dtype), want[0])
        for got, each in zip(ops.rms_norm_triple(x, *w, dtype=dtype), want, strict=True):
            assert_same_bits("triple", got, each)
    with pytest.raises(DTypeError, match="rms_norm: dtype is 'int32', expected float32, float16 or bfloat16"):
        ops.rms_norm(x, w[0], dtype="int32")


# -- errors ------------------------------------------------------------------------------------------------------------


def valid(name, rng):
    """One valid call of each op of the family."""
    if name == "rms_norm_qk":
        return {"x": normal(rng, 3, 13), "num_k_heads": 2, "key_dim": 3, "key_offset": 6}
    if name == "gated_rms_norm":
        return {"values": normal(rng, 3, 2, 5), "z": normal(rng, 3, 2, 5), "weight": normal(rng, 5)}
    return arguments(name, rng) | ({"write_sum": True} if name == "residual_norm" else {})


@pytest.mark.parametrize(
    "name", ["rms_norm", "rms_norm_mul", "rms_norm_triple", "rms_norm_qk", "gated_rms_norm", *FUSED]
)
def test_norm_op_refuses_bad_arrays(name, rng):
    args = valid(name, rng)
    check_refusals(getattr(ops, name), args)
    for eps in (-1e-6, np.inf, np.nan):
        assert_refused_like(
            getattr(ops, name), args | {"eps": eps}, InvalidArgument, f"eps is {eps}, expected a finite"
        )


@pytest.mark.parametrize("name", ["rms_norm_mul", "gated_rms_norm", *FUSED])
def test_norm_op_wants_activations_alike_and_weights_of_the_last_axis(name, rng):
    """Each array made longer by one, and each activation made float16, in turn; a residual stream may be."""
    op, args = getattr(ops, name), valid(name, rng)
    arrays = {key: value for key, value in args.items() if isinstance(value, np.ndarray)}
    for key, value in arrays.items():
        longer = np.concatenate([value, value[..., :1]], axis=-1)
        message = rf"({'|'.join(arrays)}) has shape \([\d, ]+\), expected .*"
        assert_refused_like(op, args | {key: longer}, ShapeError, message)
        if (key in ROWS and key != STREAM_OF.get(name)) or key in ("expert_out", "weights"):
            if name in STREAM_OF and len([row for row in arrays if row in ROWS]) == 2:
                continue  # the only row beside the stream
            message = f"({'|'.join(arrays)}) has dtype float(16|32), expected float(16|32)"
            assert_refused_like(op, args | {key: value.astype("float16")}, DTypeError, message)
    deeper = {key: value[None] for key, value in arrays.items()}
    assert_refused_like(op, args | deeper, ShapeError, r"\w+ has shape .*, expected ")


WRONG = {
    "rms_norm": [
        ({"weight": f32(4)}, ShapeError, r"weight has shape \(4,\), expected \(5,\) \(last axis of x\)"),
        ({"weight": f32(1, 5)}, ShapeError, r"weight has shape \(1, 5\), expected \(5,\)"),
        ({"x": f32(3, 0), "weight": f32(0)}, ShapeError, r"x has shape \(3, 0\), expected "),
        ({"x": f32()}, ShapeError, r"x has shape \(\), expected \[..., dim\]"),
        ({"eps": "1e-6"}, DTypeError, "eps is '1e-6', expected a float"),
    ],
    "rms_norm_mul": [
        ({"scale": f32(5)}, ShapeError, r"scale has shape \(5,\), expected \(3, 5\) \(as x\)"),
        ({"scale": f16(3, 5)}, DTypeError, "scale has dtype float16, expected float32 as x"),
    ],
    "rms_norm_triple": [({"wb": f32(6)}, ShapeError, r"wb has shape \(6,\), expected \(5,\) \(last axis of x\)")],
    "rms_norm_qk": [
        ({"x": f32(13)}, ShapeError, r"x has shape \(13,\), expected \[T, per_token_total\]"),
        ({"x": f32(3, 11)}, ShapeError, "x has 11 columns, expected at least 12"),
        ({"key_offset": 5}, InvalidArgument, "key_offset is 5, expected at least 6"),
        ({"key_dim": 0}, InvalidArgument, "key_dim is 0, expected at least 1"),
        ({"num_k_heads": -1}, InvalidArgument, "num_k_heads is -1, expected at least 1"),
        ({"eps_on": "max"}, InvalidArgument, "eps_on is 'max', expected one of 'sum', 'mean'"),
        ({"inv_scale": np.nan}, InvalidArgument, "inv_scale is nan, expected a finite number"),
        ({"key_dim": 3.0}, DTypeError, "key_dim is 3.0, expected an int"),
    ],
    "gated_rms_norm": [
        ({"values": f32(6, 5)}, ShapeError, r"values has shape \(6, 5\), expected \[T, Hv, Dv\]"),
        ({"z": f16(3, 2, 5)}, DTypeError, "z has dtype float16, expected float32 as values"),
    ],
    "norm_add": [({"x": f32(15)}, ShapeError, r"x has shape \(15,\), expected \(3, 5\) \(as residual\)")],
    "norm_add_scalar": [
        ({"scalar": f32(3)}, ShapeError, r"scalar has shape \(3,\), expected one element or \(5,\)"),
        ({"scalar": f32(1, 5)}, ShapeError, r"scalar has shape \(1, 5\), expected one element or \(5,\)"),
        ({"scalar": np.ones(1, int)}, DTypeError, "scalar has dtype int64, expected float32"),
    ],
    "residual_norm": [({"write_sum": 1}, DTypeError, "write_sum is 1, expected a bool")],
    "residual_norm_scalar": [({"scalar": f32(0)}, ShapeError, r"scalar has shape \(0,\), expected one element or")],
    "moe_wsum_norm_add": [
        ({"expert_out": f32(4, 3, 5)}, ShapeError, r"weights has shape \(3, 4\), expected \(4, 3"),
        ({"expert_out": f32(3, 0, 5), "weights": f32(3, 0)}, ShapeError, "expert_out has shape"),
    ],
    "moe_wsum_dnorm_add": [({"res_norm_weight": f32(4)}, ShapeError, r"res_norm_weight has shape \(4,\), expected")],
    "post_attn_triple_norm": [({"wc": f32(4)}, ShapeError, r"wc has shape \(4,\), expected \(5,\)")],
    "post_ff_norm2_endlayer": [({"layer_scalar": f32(2)}, ShapeError, r"layer_scalar has shape \(2,\), expected ")],
    "moe_wsum_post_ff_norm2_endlayer": [({"weights": f16(3, 4)}, DTypeError, "weights has dtype float16, expected")],
}


@pytest.mark.parametrize(
    ("name", "change", "error", "message"), [(name, *case) for name, cases in WRONG.items() for case in cases]
)
def test_norm_op_names_what_is_wrong(name, change, error, message, rng):
    assert_refused_like(getattr(ops, name), valid(name, rng) | change, error, message)


def test_two_outputs_never_overlap(rng):
    y = f32(3, 5)
    args = valid("rms_norm_triple", rng) | {"out": (y, f32(3, 5), y)}
    assert_refused_like(ops.rms_norm_triple, args, InvalidArgument, r"out\[2\] overlaps out\[0\]")
