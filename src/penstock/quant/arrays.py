"""Arrays of quantized tensors: NumPy's and torch's, their memory, and the way from one to the other."""

import functools
import warnings
from typing import Any

import numpy as np

from penstock.dtypes import bfloat16
from penstock.errors import BackendError, InvalidArgument


def fault_of(array: Any) -> str | None:
    """What is wrong with an array whose memory does not tell what it holds; None for a plain one."""
    kind = type(array)
    if isinstance(array, np.ndarray):
        if kind in (np.ndarray, np.memmap) or getattr(kind, "memory_is_plain", False):
            return None
        return f"a {kind.__name__}, expected a plain NumPy array: np.asarray makes one, without a mask or other meaning"
    if not is_torch(array):
        return None  # a symbol
    import torch

    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]
    if kind not in (torch.Tensor, torch.nn.Parameter) or wrapped(array):
        return f"a {kind.__name__} that stands for another tensor, expected a plain torch tensor"
    if array.layout is not torch.strided or array.is_nested or array.is_quantized:
        odd = "nested" if array.is_nested else "quantized" if array.is_quantized else str(array.layout)
        return f"a tensor that is {odd}, expected a dense one"
    if array.device.type not in ("cpu", "cuda"):
        return f"a tensor on the device {array.device}, expected one on cpu or cuda"
    if array.is_conj() or array.is_neg():
        return "a tensor that is conjugated or negated when it is read, expected resolved values: resolve_neg()"
    end, there = (array.storage_offset() + array.numel()) * array.element_size(), array.untyped_storage().nbytes()
    if end > there and array.is_contiguous():
        return f"a tensor of {end} bytes on a storage of {there}, expected all of its memory"
    return None


def layout_of(array: Any) -> tuple[Any, ...]:
    """What kernels know about an array's memory: dtype, shape, steps and, for torch, whose storage can be another one,
    where it lies.
    """
    if isinstance(array, np.ndarray):
        return array.dtype, array.shape, array.strides
    if is_torch(array):
        return array.dtype, array.shape, array.stride(), array.data_ptr(), array.untyped_storage().nbytes()
    return array.dtype, array.shape  # a symbol


def is_torch(array: object) -> bool:
    """Whether this is a torch tensor; torch is not imported to find out."""
    return _is_tensor_type(type(array))


@functools.cache
def _is_tensor_type(kind: type) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in kind.__mro__)


def to_numpy(tensor: Any) -> np.ndarray:
    """A torch tensor's values as a NumPy array, on the same memory if it is on the host; int32 words become uint32."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(bfloat16)
    return tensor.numpy().view(np.uint32) if tensor.dtype is torch.int32 else tensor.numpy()


def to_torch(array: Any, device: str) -> Any:
    """An array or tensor as a torch tensor: "torch" on the host, on the same memory if possible; "cuda" or "cuda:n"."""
    if not isinstance(device, str) or not (device in ("torch", "cuda") or device.startswith("cuda:")):
        raise InvalidArgument(f"QuantizedTensor.to: device is {device!r}, expected cpu, torch, cuda or cuda:<n>")
    try:
        import torch
    except ImportError:
        raise BackendError(f"QuantizedTensor.to: {device!r} needs torch: pip install 'penstock[cuda]'") from None
    if device != "torch" and not torch.cuda.is_available():
        raise BackendError(f"QuantizedTensor.to: {device!r} needs a CUDA device, torch finds none")
    if isinstance(array, np.ndarray):
        carrier = {np.dtype(np.uint32): np.int32, bfloat16: np.int16}.get(array.dtype, array.dtype)
        with warnings.catch_warnings():  # torch has no read-only tensors and says so for each mapped file
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(array.view(carrier))
        array = tensor.view(torch.bfloat16) if array.dtype == bfloat16 else tensor
    return array.to("cpu" if device == "torch" else device)
