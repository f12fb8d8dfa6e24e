"""CUDA kernels of the norms: in place, ragged widths, kinds of weights and factors, rows alone and among many."""

from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.errors import BackendError
from tests.gpu.common import DEVICE, reference, run, to_device, to_host
from tests.ops.cases import CASES, Case
from tests.ops.common import EPS, assert_close, assert_same_bits, normal
from tests.ops.test_cases import check_against_definition

NORMS = [case for case in CASES if ops.REGISTRY[case.op].family == "norm"]
RAGGED = [case for case in NORMS if case.label in ("ragged", "sum")]


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def on_device(op, arguments, out=None):
    with penstock.backend("cuda"):
        return as_tuple(op(**arguments, out=out))


@pytest.mark.parametrize("case", RAGGED, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norm_may_write_over_its_inputs(case: Case, dtype):
    op = ops.REGISTRY[case.op]
    want = as_tuple(reference(op, **case.arguments(dtype)))
    asked = [y for y in want if y is not None]
    arguments = {name: to_device(value) for name, value in case.arguments(dtype).items()}
    like = [v for v in arguments.values() if isinstance(v, torch.Tensor) and v.shape == asked[0].shape]
    fresh = [torch.full_like(like[0], float("nan")) for _ in asked]
    out = tuple((like[::-1] + fresh)[: len(asked)])
    got = on_device(op, arguments, out if len(out) > 1 else out[0])
    check_against_definition(case, dtype, to_host(got), tuple(asked))


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 31, 32, 33, 255, 256, 257, 2817])
def test_norm_add_of_any_width(dim, rng):
    arguments = {name: normal(rng, 3, dim) for name in ("residual", "x")} | {"weight": normal(rng, dim)}
    assert_close("y", run(ops.norm_add, **arguments), reference(ops.norm_add, **arguments), 2e-6)


@pytest.mark.parametrize("weight", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rms_norm_takes_weights_of_any_float(dtype, weight, rng):
    arguments = {"x": normal(rng, 3, 48, dtype=dtype), "weight": normal(rng, 48, dtype=weight)}
    assert_close("y", run(ops.rms_norm, **arguments), reference(ops.rms_norm, **arguments), 2e-6 + 2 * EPS[dtype])


def test_rms_norm_of_a_zero_row(rng):
    x = np.stack([np.zeros(33, np.float32), normal(rng, 33)])
    y = run(ops.rms_norm, x=x, eps=1e-6)
    assert not y[0].any() and np.isfinite(y[1]).all()
    assert np.isnan(run(ops.rms_norm, x=x, eps=0.0)[0]).all()


def test_residual_norm_leaves_a_sum_alone_that_was_not_asked_for(rng):
    residual, x, weight = (to_device(normal(rng, *shape)) for shape in ((3, 20), (3, 20), (20,)))
    y, sentinel = torch.empty_like(x), torch.full_like(x, 7.0)
    on_device(ops.residual_norm, {"residual": residual, "x": x, "weight": weight}, (y, sentinel))
    assert (sentinel == 7.0).all() and torch.isfinite(y).all()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("eps_on", ["sum", "mean"])
def test_rms_norm_qk_passes_the_other_columns_through(in_place, eps_on, rng):
    arguments = {"x": normal(rng, 4, 3000, dtype="float16"), "num_k_heads": 3, "key_dim": 20, "key_offset": 71}
    arguments |= {"eps": 0.01, "eps_on": eps_on, "inv_scale": 0.5}
    want = reference(ops.rms_norm_qk, **arguments)
    x = to_device(arguments["x"])
    out = x if in_place else torch.full_like(x, float("nan"))
    (got,) = on_device(ops.rms_norm_qk, arguments | {"x": x}, out)
    got = to_host(got)
    assert_close("y", got, want, 2e-6 + 2 * EPS["float16"])
    passing = np.r_[60:71, 131:3000]
    assert_same_bits("other columns", got[:, passing], arguments["x"][:, passing])


@pytest.mark.parametrize("k", [1, 7, 9, 17])
def test_moe_wsum_norm_add_of_any_number_of_slots(k, rng):
    arguments = {"expert_out": normal(rng, 2, k, 40), "weights": normal(rng, 2, k), "residual": normal(rng, 2, 40)}
    arguments |= {"norm_weight": normal(rng, 40)}
    op = ops.moe_wsum_norm_add
    assert_close("y", run(op, **arguments), reference(op, **arguments), 4e-6)


def test_norm_says_how_wide_a_row_may_be():
    with pytest.raises(BackendError, match=r"^rms_norm: .* 65537 .*expected at most 65536 on cuda"):
        run(ops.rms_norm, x=np.zeros((1, 65537), np.float32))


@pytest.mark.parametrize("case", RAGGED, ids=str)
def test_norm_gives_a_row_the_same_bits_alone(case: Case):
    op = ops.REGISTRY[case.op]
    arguments = case.arguments("bfloat16")
    whole = as_tuple(run(op, **arguments))
    rows = max((v.shape[0] for v in arguments.values() if isinstance(v, np.ndarray) and v.ndim > 1), default=0)
    alone = {
        n: v[2:3] if isinstance(v, np.ndarray) and v.ndim > 1 and len(v) == rows else v for n, v in arguments.items()
    }
    for y, one in zip(whole, as_tuple(run(op, **alone)), strict=True):
        if y is not None:
            assert_same_bits(op.name, one, y[2:3])


# -- on a GPU --------------------------------------------------------------------------------------------------------


def made(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def n64(v, w=1.0, eps=1e-6):
    v = v.double()
    return v * torch.rsqrt((v * v).mean(-1, keepdim=True) + eps) * w


def near(got, want, rel=2e-6):
    rel += {torch.float32: 0, torch.float16: 2 * EPS["float16"], torch.bfloat16: 2 * EPS["bfloat16"]}[got.dtype]
    assert bool(((got.double() - want).abs() <= rel * want.abs().clamp_min(1)).all())


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [2048, 2816, 7168, 16384, 18432, 40000, 65536])
def test_rms_norm_at_model_widths(dim):
    for dtype in (torch.float32, torch.bfloat16):
        for T in (1, 4, 1000):
            x, w = made(T, dim, dtype=dtype), made(dim)
            out = torch.full_like(x, float("nan"))
            with penstock.backend("cuda"):
                near(ops.rms_norm(x, w, out=out), n64(x, w.double()))


@pytest.mark.cuda
@pytest.mark.parametrize("case", NORMS, ids=str)
def test_norm_at_model_shapes_twice(case: Case):
    """dim 2816 and many rows, poisoned outputs, the same bits again; a row alone has the bits it has among many."""
    if case.label not in ("ragged", "sum", "vector", "hidden-only"):
        pytest.skip("one case of each op")
    sizes = {"rms_norm_qk": (1000, 16, 128, 4096), "gated_rms_norm": (1000, 32, 128)}
    slots = (1000, 8, 2816) if "wsum" in case.op else (2100, 2816)
    big = Case(case.op, "model", case.make, sizes.get(case.op, slots), case.rel, case.whole, case.dtypes)
    op = ops.REGISTRY[case.op]
    want = as_tuple(reference(op, **big.arguments("bfloat16")))
    asked = tuple(y for y in want if y is not None)
    arguments = {name: to_device(value) for name, value in big.arguments("bfloat16").items()}
    runs = []
    for _ in range(2):
        out = tuple(torch.full(y.shape, float("nan"), dtype=torch.bfloat16, device=DEVICE) for y in asked)
        got = on_device(op, arguments, out if len(out) > 1 else out[0])
        runs.append(tuple(y for y in got if y is not None))
    check_against_definition(big, "bfloat16", to_host(runs[0]), asked)
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
    one = {n: v[5:6] if isinstance(v, torch.Tensor) and v.ndim > 1 else v for n, v in arguments.items()}
    alone = [y for y in on_device(op, one) if y is not None]
    for a, b in zip(runs[0], alone, strict=True):
        assert torch.equal(a[5:6], b)


@pytest.mark.cuda
def test_norm_of_a_million_heads_is_repeatable():
    x, w = made(1_000_003, 128), made(128)
    with penstock.backend("cuda"):
        first = ops.rms_norm(x, w)
        near(first, n64(x, w.double()))
        for _ in range(20):
            assert torch.equal(ops.rms_norm(x, w), first)


@pytest.mark.cuda
def test_norm_of_more_than_two_to_the_31_numbers():
    x, w = torch.zeros(1_100_000, 2048, dtype=torch.bfloat16, device=DEVICE), made(2048)
    x[-3:] = made(3, 2048)
    with penstock.backend("cuda"):
        y = ops.rms_norm(x, w, out=torch.full_like(x, float("nan")))
    near(y[-3:], n64(x[-3:], w.double()))
    assert not y[:-3].any()


@pytest.mark.cuda
def test_norm_in_a_graph_follows_its_buffers():
    x, r, w, s = made(3, 2816), made(3, 2816), made(2816), made(1)
    y = torch.empty_like(x)
    with penstock.backend("cuda"):
        ops.norm_add_scalar(r, x, w, s, out=y)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.norm_add_scalar(r, x, w, s, out=y)
        for buffer in (x, r, w, s):
            buffer.copy_(made(*buffer.shape))
        y.fill_(float("nan"))
        graph.replay()
    near(y, (r.double() + n64(x, w.double())) * s.double())


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 33])
def test_a_chain_of_small_kernels_replays_as_call_by_call(rows, rng):
    """Each starts before the one ahead has ended, reads what that writes, and writes over what earlier ones read."""
    x, w, table = (to_device(normal(rng, *shape, dtype="bfloat16")) for shape in ((rows, 512), (512,), (50, 512)))
    inv_freq, ids = to_device(normal(rng, 32)), to_device(rng.integers(0, 50, rows).astype(np.int32))
    a, b, total = (torch.empty_like(x) for _ in range(3))

    def chain(wait: Any) -> torch.Tensor:
        ops.embedding(ids, table, out=a)
        wait()
        for _ in range(30):
            ops.rms_norm(a, w, out=b)
            wait()
            ops.residual_norm(x, b, w, write_sum=True, out=(a, total))
            wait()
            ops.rope(a.view(rows, 8, 64), inv_freq, 7, out=b.view(rows, 8, 64))
            wait()
            ops.swiglu(b, total, out=a)
            wait()
        return a.clone()

    want = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(lambda: None)
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)
