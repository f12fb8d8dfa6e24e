"""What the tests of CUDA kernels share. Without a GPU the kernels run in Triton's interpreter on torch CPU tensors."""

from typing import Any

import numpy as np
import torch

import penstock
from penstock import ops
from penstock.ops.array import numpy_view, torch_view
from penstock.quant import GgufTensor, QuantizedTensor, in_planes
from tests.ops.common import EPS, assert_close, i32, normal

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def to_device(value: Any) -> Any:
    """NumPy arrays as torch tensors on the device under test; scalars as they are."""
    if isinstance(value, np.ndarray):
        return torch_view(value).to(DEVICE)
    if isinstance(value, GgufTensor):
        return in_planes(value, "cuda" if GPU else "torch")
    if isinstance(value, QuantizedTensor):
        return value.to("cuda" if GPU else "torch")
    return [to_device(item) for item in value] if isinstance(value, list) else value


def to_host(value: Any) -> Any:
    """Tensors as NumPy arrays."""
    if isinstance(value, tuple):
        return tuple(to_host(item) for item in value)
    return numpy_view(value.cpu()) if isinstance(value, torch.Tensor) else value


def run(op: Any, variant: str | None = None, **arguments: Any) -> Any:
    """Call an op by its CUDA kernel with NumPy arguments; results are NumPy arrays."""
    with penstock.backend("cuda", variant=variant):
        return to_host(op(**{name: to_device(value) for name, value in arguments.items()}))


def reference(op: Any, **arguments: Any) -> Any:
    """The definition on the same arguments; state is copied, not written."""
    copied = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    with penstock.backend("reference"):
        return op(**copied)


def check_experts_by_lanes(rng: Any, own: Any, both: Any, halves: Any, down: Any) -> None:
    """Blocks of 3 experts by lanes, of 5 and of 27 tokens, the latter with a shared one: its gate, up and down are
    `own`. both: gate and up in one stack, None: two stacks are given, `halves`.
    """
    k, dim = 2, down.shape[-2]
    gate, up = halves if both is None else (both, None)
    for T, op in ((5, ops.moe_forward), (27, ops.moe_shared_forward)):
        ids = np.stack([rng.permutation(5)[:k] for _ in range(T)]).astype(np.int32)
        ids[-1, 0] = -1
        call = {"x": normal(rng, T, dim, dtype="bfloat16"), "ids": ids, "weights": rng.random((T, k), np.float32)}
        call |= {"gate_w": gate, "up_w": up, "down_w": down, "slot_of": i32(2, -2, 0, 1, -2)}
        if op is ops.moe_shared_forward:
            call |= {"residual": normal(rng, T, dim), "shared_gate_w": own[0], "shared_up_w": own[1]}
            call |= {"shared_down_w": own[2], "shared_score": normal(rng, T, dtype="bfloat16")}
        want = reference(op, **call | {"gate_w": halves[0], "up_w": halves[1]}).astype(np.float32)
        got = run(op, variant="lanes", **call).astype(np.float32)
        assert_close(f"{op.name} y", got, want, 4 * EPS["bfloat16"], np.abs(want).max())
