"""Whether models can run on a GPU here, and if not, why: asked without importing torch where that is enough."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

CAPABILITY = (8, 0)  # the oldest GPUs that the kernels run on
INSTALL = "pip install 'penstock[cuda]'"
_DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))


def driver_found() -> bool:
    """Whether an NVIDIA driver is loaded (under WSL its stand-in)."""
    return any(path.exists() for path in _DRIVER)


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter (TRITON_INTERPRET=1): on torch CPU tensors, for tests."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


@functools.cache
def unusable() -> str | None:
    """Why no GPU can be used, in one line; None if one can."""
    if not driver_found():
        return "no NVIDIA driver is loaded here"
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed ({INSTALL})"
    try:
        import torch
        import triton  # noqa: F401
    except Exception as error:  # a broken package may raise anything
        return f"torch or triton cannot be imported ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if not torch.cuda.is_available():
        built = torch.version.cuda
        return "torch finds no GPU" if built else "torch is a build without CUDA"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < CAPABILITY:
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {major}.{minor}, expected {CAPABILITY[0]}.{CAPABILITY[1]} or newer"
    return None


def visible_gpus() -> list[str]:
    """The GPUs that torch finds, each as CUDA_VISIBLE_DEVICES names it; none where no GPU can be used."""
    if unusable() is not None:
        return []
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]
