"""What the kernel modules of this backend share: Triton, sizes of launches, device functions that many kernels use."""

import functools
import os
from typing import Any

# Triton 3.9 asks programs to choose whether a product and a sum may round once (fma); so far it did.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
import triton.language as tl

from penstock.backends.cuda.runtime.triton_cache import use_trusted_cache

INTERPRETED = bool(triton.knobs.runtime.interpret)  # kernels run as Python on torch CPU tensors
if not INTERPRETED:
    use_trusted_cache()  # before anything is compiled or loaded
# The same inside kernels. The interpreter computes with the bits of bfloat16 as if they were integers, and makes
# bfloat16 of float32 by dropping bits: there products take float32 operands, and `_rows.rounded` rounds by itself.
WIDENED = tl.constexpr(INTERPRETED)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(tensor: torch.Tensor) -> int:
    """Multiprocessors of the GPU that holds the tensor; 2 under the interpreter."""
    return _multiprocessors(tensor.device.index) if tensor.is_cuda else 2


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """Compute capability of the GPU that holds the tensor; that of a Hopper under the interpreter."""
    return _capability(tensor.device.index) if tensor.is_cuda else (9, 0)


@functools.cache
def pdl_options() -> dict[str, bool]:
    """What a launch takes whose kernel may start while the one before it ends (PDL): compute capability 9.0 on.

    Such a kernel calls gdc_wait before it reads what the one before writes, and before it writes anything.
    """
    if INTERPRETED or triton.runtime.driver.active.get_current_target().arch < 90:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@functools.lru_cache(maxsize=None, typed=True)
def compiled_for(constants: Any) -> Any:
    """A NamedTuple of what a kernel is compiled for, as its parameter C: each of them a constant, since Triton 3.6 does
    not take the plain integers in a constant for shapes.
    """
    return constants if INTERPRETED else constants._make(c if c is None else tl.constexpr(c) for c in constants)


def flat_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., K] as [T, K] on the same memory."""
    return x.view(-1, x.shape[-1])


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(−x)) of float32, without overflow on either side."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0 / (1.0 + small), small / (1.0 + small))


@triton.jit
def silu(x):
    """x · sigmoid(x) of float32."""
    return x * sigmoid(x)


@triton.jit
def tanh(x):
    """tanh of float32: the odd series near 0, where 1 − exp cancels, else from exp(−2|x|)."""
    a = tl.abs(x)
    small = tl.exp(-2.0 * a)
    far = (1.0 - small) / (1.0 + small)
    s = a * a
    near = a * (1.0 + s * (-0.33333334 + s * (0.13333334 + s * (-0.053968254 + s * 0.021869488))))
    y = tl.where(a < 0.25, near, far)
    return tl.where(x < 0, -y, y)


@triton.jit
def gelu_tanh(x):
    """The tanh form of GELU of float32, by 0.5 · (1 + tanh(u)) = sigmoid(2u), which does not cancel."""
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def activation(x, ACT: tl.constexpr):
    """ACT "silu" or "gelu_tanh"."""
    if ACT == "silu":
        y = silu(x)
    else:
        y = gelu_tanh(x)
    return y
