"""CUDA kernels of the elementwise ops: exact sums, kinds of operands, lengths around a block, extreme values."""

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from tests.gpu.common import DEVICE, reference, run, to_device, to_host
from tests.ops.common import DTYPES, EPS, assert_close, assert_same_bits, normal

PAIRS = [ops.residual_add, ops.add, ops.mul, ops.swiglu, ops.geglu, ops.sigmoid_gate]


def by_position(op, *values):
    return dict(zip(op.params, values, strict=False))


@pytest.mark.parametrize("op", [ops.residual_add, ops.add, ops.mul], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 17, 2048, 2049])
def test_sums_and_products_are_exact(op, dtype, n, rng):
    # numbers of very different sizes: the rounding of the float32 in between must not show
    a, b = (normal(rng, 1, n, dtype=dtype) * np.exp2(rng.integers(-9, 9, (1, n))).astype(dtype_of(dtype)) for _ in "ab")
    arguments = by_position(op, a.astype(dtype_of(dtype)), b.astype(dtype_of(dtype)))
    assert_same_bits("y", run(op, **arguments), reference(op, **arguments))


def dtype_of(name):
    from penstock.dtypes import numpy_dtype

    return numpy_dtype(name)


@pytest.mark.parametrize("op", [ops.add, ops.mul], ids=lambda op: op.name)
@pytest.mark.parametrize("shape", [(5, 3, 61), (3, 2050), (1, 1), (7, 1)], ids=str)
@pytest.mark.parametrize("kind", ["number", "element", "vector", "whole"])
def test_operand_may_be_a_number_an_element_a_vector_or_whole(op, kind, shape, rng):
    b = {"number": 53.06599665, "element": normal(rng, 1, 1), "vector": normal(rng, shape[-1], dtype="bfloat16")}
    b["whole"] = normal(rng, *shape)
    arguments = {"a": normal(rng, *shape), "b": b[kind]}
    assert_close("y", run(op, **arguments), reference(op, **arguments), 1.3e-7)


@pytest.mark.parametrize("op", PAIRS, ids=lambda op: op.name)
@pytest.mark.parametrize("over", [0, 1])
def test_pairs_may_be_written_over(op, over, rng):
    arguments = by_position(op, normal(rng, 3, 61, dtype="bfloat16"), normal(rng, 3, 61, dtype="bfloat16"))
    want = reference(op, **arguments)
    tensors = {name: to_device(value) for name, value in arguments.items()}
    out = list(tensors.values())[over]
    with penstock.backend("cuda"):
        assert op(**tensors, out=out) is out
    assert_close("y", to_host(out), want, 2e-6 + 2 * EPS["bfloat16"])


@pytest.mark.parametrize(
    "op", [ops.swiglu, ops.geglu, ops.sigmoid_gate, ops.gelu_tanh, ops.softcap], ids=lambda o: o.name
)
def test_activations_of_extreme_values(op):
    x = np.array([0, -0.0, 1e-30, -1e-30, 0.2499, 0.2501, -3, 9, -20, 87, -87, 104, -104, 1e4, -1e4, 3e38, -3e38], "f4")
    arguments = by_position(op, x, np.full_like(x, 0.5))
    if op is ops.softcap:
        arguments["cap"] = 30.0
    elif op is ops.sigmoid_gate:
        arguments = {"x": arguments["gate"], "gate": x}
    elif op is ops.gelu_tanh:
        arguments = {"x": x[:-2]}  # the cube of 3e38 is no float32
    elif op is ops.geglu:
        arguments = {name: value[:-2] for name, value in arguments.items()}
    assert_close("y", run(op, **arguments), reference(op, **arguments), 2e-6)


@pytest.mark.parametrize("k, dim", [(0, 5), (1, 1), (9, 33), (17, 1030)])
def test_weighted_sum_of_any_number_of_slots(k, dim, rng):
    for lead in ((), (3,)):
        arguments = {"expert_out": normal(rng, *lead, k, dim), "weights": normal(rng, *lead, k)}
        assert_close("y", run(ops.weighted_sum, **arguments), reference(ops.weighted_sum, **arguments), 4e-6)


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_residual_add_is_exact_for_all_bfloat16():
    """Every bfloat16 with a few others of near and far sizes, against a float64 sum."""
    bits = torch.arange(-(2**15), 2**15, device=DEVICE, dtype=torch.int32).to(torch.int16)
    a = bits.view(torch.bfloat16)
    a = torch.where(a.isfinite(), a, torch.zeros_like(a)).repeat(64, 1)
    b = a[:, torch.randperm(2**16, device=DEVICE)]
    b[:32] = (a[:32].float() * torch.randn(32, 2**16, device=DEVICE)).bfloat16().nan_to_num(0, 0, 0)
    with penstock.backend("cuda"):
        got = ops.residual_add(a, b.contiguous())
    with penstock.backend("reference"):
        want = ops.residual_add(a, b.contiguous())
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.cuda
@pytest.mark.parametrize("op", PAIRS, ids=lambda op: op.name)
def test_pairs_at_a_prefill_shape_twice(op):
    a, b = (torch.randn(4096, 2112, device=DEVICE).bfloat16() for _ in range(2))
    with penstock.backend("cuda"):
        first, second = (op(a, b, out=torch.full_like(a, float("nan"))) for _ in range(2))
    assert torch.equal(first, second)
    with penstock.backend("reference"):
        want = op(a, b)
    assert_close("y", to_host(first).astype(np.float32), to_host(want).astype(np.float32), 2e-6 + 2 * EPS["bfloat16"])


@pytest.mark.cuda
def test_map_of_more_than_two_to_the_31_numbers():
    a = torch.zeros(2**31 + 4099, dtype=torch.bfloat16, device=DEVICE)
    a[-5:] = 3.0
    with penstock.backend("cuda"):
        ops.mul(a, 0.5, out=a)
    assert (a[-5:] == 1.5).all() and not a[:-5].any()


@pytest.mark.cuda
def test_add_of_a_vector_to_a_million_rows():
    a, b = torch.randn(1_000_003, 61, device=DEVICE), torch.randn(61, device=DEVICE)
    with penstock.backend("cuda"):
        assert torch.equal(ops.add(a, b), a + b)
