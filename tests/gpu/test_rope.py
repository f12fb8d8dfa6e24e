"""CUDA kernels of rotary embedding: forms of positions, partial and interleaved heads, in place, far angles."""

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.errors import BackendError
from tests.gpu.common import DEVICE, reference, run, to_device, to_host
from tests.ops.common import EPS, assert_close, assert_same_bits, i32, normal

TABLE = ops.rope_inv_freq(24, 1e4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("at", ["int", "scalar", "each", "positions"])
def test_rope_takes_positions_in_every_form(at, interleaved, rng):
    arguments = {"x": normal(rng, 3, 5, 37), "inv_freq": TABLE, "rotary_dim": 24, "mscale": 1.25}
    arguments["interleaved"] = interleaved
    forms = {"int": 11, "scalar": np.array(11, np.int32), "each": i32(7, 0, 99), "positions": i32(7, 0, 99)}
    arguments["positions" if at == "positions" else "start_pos"] = forms[at]
    assert_close("y", run(ops.rope, **arguments), reference(ops.rope, **arguments), 2e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [24, 37])
@pytest.mark.parametrize("weight", [None, "float16"])
def test_head_norm_rope_of_one_token(weight, width, interleaved, rng):
    D = 24 if width == 24 else 37
    arguments = {"x": normal(rng, 3, D, dtype="bfloat16"), "inv_freq": TABLE, "start_pos": i32(40), "rotary_dim": 24}
    arguments |= {"weight": None if weight is None else normal(rng, D, dtype=weight), "interleaved": interleaved}
    want = reference(ops.head_norm_rope, **arguments)
    assert_close("y", run(ops.head_norm_rope, **arguments), want, 2e-6 + 2 * EPS["bfloat16"])


@pytest.mark.parametrize("op", [ops.rope, ops.head_norm_rope], ids=lambda op: op.name)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_in_place(op, interleaved, rng):
    arguments = {"x": normal(rng, 5, 3, 37, dtype="float16"), "inv_freq": TABLE, "start_pos": 3, "rotary_dim": 24}
    arguments["interleaved"] = interleaved
    if op is ops.head_norm_rope:
        arguments["weight"] = normal(rng, 37)
    want = reference(op, **arguments)
    tensors = {name: to_device(value) for name, value in arguments.items()}
    with penstock.backend("cuda"):
        op(**tensors, out=tensors["x"])
    assert_close("y", to_host(tensors["x"]), want, 2e-6 + 2 * EPS["float16"])
    if op is ops.rope:
        assert_same_bits("other channels", to_host(tensors["x"])[..., 24:], arguments["x"][..., 24:])


def test_rope_is_accurate_at_far_positions(rng):
    at = i32(0, 1, 4095, 4096, 32767, 105615, 131071, 2**31 - 1)
    table = ops.rope_inv_freq(128, 1e4)
    x = np.zeros((len(at), 1, 128), np.float32)
    x[..., :64] = 1  # y is then cos and sin themselves
    angle = (at.astype(np.float32)[:, None] * table).astype(np.float64)
    y = run(ops.rope, x=x, inv_freq=table, start_pos=at)[:, 0]
    np.testing.assert_allclose(y[:, :64], np.cos(angle), rtol=0, atol=3e-7)
    np.testing.assert_allclose(y[:, 64:], np.sin(angle), rtol=0, atol=3e-7)


@pytest.mark.parametrize("op", [ops.rope, ops.head_norm_rope], ids=lambda op: op.name)
def test_inactive_rows_come_out_as_zeros(op, rng):
    """Values on the device cannot be checked: a position of -1 marks a row without a token."""
    x, table, at = (to_device(v) for v in (normal(rng, 3, 2, 37), TABLE, i32(5, -1, 9)))
    more = {"weight": None} if op is ops.head_norm_rope else {}
    with penstock.backend("cuda"):
        y = op(x=x, inv_freq=table, start_pos=at, rotary_dim=24, **more)
    assert not y[1].any() and y[0].all() and y[2].all()


def test_rope_says_how_wide_a_head_may_be():
    with pytest.raises(BackendError, match=r"^rope: x has heads of 16386, expected at most 16384 on cuda"):
        run(ops.rope, x=np.zeros((1, 1, 16386), np.float32), inv_freq=TABLE, rotary_dim=24)


# -- on a GPU --------------------------------------------------------------------------------------------------------

SHAPES = {"qwen": (16, 256, 64, False), "qwen-k": (2, 256, 64, False), "gemma": (16, 256, 256, False)}
SHAPES |= {"gemma-global": (16, 512, 512, False), "deepseek": (128, 64, 64, True), "odd": (3, 70, 46, True)}


@pytest.mark.cuda
@pytest.mark.parametrize("op", [ops.rope, ops.head_norm_rope], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("H, D, width, interleaved", list(SHAPES.values()), ids=list(SHAPES))
def test_rope_at_model_shapes_twice(op, H, D, width, interleaved, dtype, rng):
    """300 tokens, poisoned outputs, the same bits again; a token alone has the bits it has among many."""
    at = rng.integers(0, 131072, 300).astype(np.int32)
    arguments = {"x": normal(rng, 300, H, D, dtype=dtype), "inv_freq": ops.rope_inv_freq(width, 1e6), "start_pos": at}
    arguments |= {"rotary_dim": width, "interleaved": interleaved}
    if op is ops.head_norm_rope:
        arguments["weight"] = normal(rng, D, dtype="bfloat16")
    tensors = {name: to_device(value) for name, value in arguments.items()}
    with penstock.backend("cuda"):
        first, second = (op(**tensors, out=torch.full_like(tensors["x"], float("nan"))) for _ in range(2))
        one = op(**(tensors | {"x": tensors["x"][7:8], "start_pos": tensors["start_pos"][7:8]}))
    assert torch.equal(first, second) and torch.equal(first[7:8], one)
    rel = 2e-6 + (2 * EPS["bfloat16"] if dtype == "bfloat16" else 0)
    assert_close("y", to_host(first), reference(op, **arguments), rel)


@pytest.mark.cuda
def test_rope_in_a_graph_follows_its_positions():
    x, table = torch.randn(4, 8, 128, device=DEVICE), to_device(ops.rope_inv_freq(128, 1e4))
    at = torch.tensor([1, 2, 3, 4], dtype=torch.int32, device=DEVICE)
    y = torch.empty_like(x)
    with penstock.backend("cuda"):
        ops.rope(x, table, at, out=y)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.rope(x, table, at, out=y)
        at.copy_(torch.tensor([9, 70000, -1, 0], dtype=torch.int32))
        graph.replay()
        kept = at.clamp_min(0)
        want = ops.rope(x, table, kept)
    assert torch.equal(y[[0, 1, 3]], want[[0, 1, 3]]) and not y[2].any()


@pytest.mark.cuda
def test_rope_of_a_hundred_thousand_tokens():
    x, table = torch.randn(100_003, 3, 64, device=DEVICE), to_device(ops.rope_inv_freq(64, 1e4))
    with penstock.backend("cuda"):
        y = ops.rope(x, table, 5)
        for start in (0, 50_000, 99_990):
            part = ops.rope(x[start : start + 13], table, 5 + start)
            assert torch.equal(y[start : start + 13], part)
