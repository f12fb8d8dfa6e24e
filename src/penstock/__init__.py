"""penstock runs quantized Mixture-of-Experts language models on GPUs and CPUs.

This module holds the public names. `load` gives a model; the op library is `penstock.ops`, each op takes NumPy arrays
or torch tensors; `models.register` adds a family of models.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock._version import __version__

if TYPE_CHECKING:
    from penstock import errors, mlx_lm, models, ops
    from penstock.api import LLM, load, restore
    from penstock.ops import backend, dequantize
    from penstock.quant import QuantizedTensor, quantize

__all__ = [
    "LLM",
    "QuantizedTensor",
    "__version__",
    "backend",
    "dequantize",
    "errors",
    "load",
    "mlx_lm",
    "models",
    "ops",
    "quantize",
    "restore",
]

_HOMES = {
    "LLM": "penstock.api",
    "QuantizedTensor": "penstock.quant",
    "backend": "penstock.ops",
    "dequantize": "penstock.ops",
    "load": "penstock.api",
    "quantize": "penstock.quant",
    "restore": "penstock.api",
}


def __dir__() -> list[str]:
    """The public names, also those that are not imported yet."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    """A name is imported when it is first used: a child process that needs one small module starts without NumPy."""
    if name in ("errors", "mlx_lm", "models", "ops"):
        return import_module(f"penstock.{name}")
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
