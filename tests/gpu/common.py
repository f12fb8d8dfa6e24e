"""What the tests of CUDA kernels share. Without a GPU the kernels run in Triton's interpreter on torch CPU tensors."""

from typing import Any

import numpy as np
import torch

import penstock
from penstock.ops.array import numpy_view, torch_view
from penstock.quant import GgufTensor, QuantizedTensor, in_planes

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
