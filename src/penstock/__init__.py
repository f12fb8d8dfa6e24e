"""penstock runs quantized Mixture-of-Experts language models on GPUs and CPUs.

This module holds the public names. The op library is `penstock.ops`; each op takes NumPy arrays or torch tensors.
"""

from penstock import errors, ops
from penstock._version import __version__
from penstock.ops import backend, dequantize
from penstock.quant import QuantizedTensor, quantize

__all__ = ["QuantizedTensor", "__version__", "backend", "dequantize", "errors", "ops", "quantize"]
