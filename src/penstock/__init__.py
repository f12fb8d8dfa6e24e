"""penstock runs quantized Mixture-of-Experts language models on GPUs and CPUs.

This module holds the public names. `load` gives a model; the op library is `penstock.ops`, each op takes NumPy arrays
or torch tensors.
"""

from typing import TYPE_CHECKING, Any

from penstock import errors, ops
from penstock._version import __version__
from penstock.ops import backend, dequantize
from penstock.quant import QuantizedTensor, quantize

if TYPE_CHECKING:
    from penstock.api import LLM, load, restore

__all__ = [
    "LLM",
    "QuantizedTensor",
    "__version__",
    "backend",
    "dequantize",
    "errors",
    "load",
    "ops",
    "quantize",
    "restore",
]


def __getattr__(name: str) -> Any:
    """The engine comes with its tokenizer and templates, which a user of the ops alone does not wait for."""
    if name in ("LLM", "load", "restore"):
        from penstock import api

        return getattr(api, name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
