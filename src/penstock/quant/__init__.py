"""Quantized tensors: their formats, their packing, and how numbers become codes and codes numbers.

A row of K weights is cut into groups of `group_size`; each weight is a code of `bits` bits, each group has a scale. In
mode "affine" codes are unsigned numbers, groups have a bias too, and weight = code * scale + bias; in the others codes
are small floats, and weight = float * scale. The layouts are those of MLX checkpoints. Axis letters: E experts, N
output features (rows), K input features, gs group size.
"""

from penstock.quant.arrays import fault_of, is_torch, to_torch
from penstock.quant.blobs import ExpertBlobs
from penstock.quant.codes import pack_codes, unpack_codes
from penstock.quant.formats import (
    BITS,
    E4M3,
    GLOBAL_UNIT,
    GROUP_SIZES,
    MODES,
    Format,
    check_format,
    first_unsound_scale,
    levels,
    resolve,
    scale_values,
)
from penstock.quant.gguf_blocks import BLOCK_TYPES, BlockType, GgufPlanes, GgufTensor, in_planes
from penstock.quant.gguf_planes import PLANES, Layout, Plane, layout_in_planes
from penstock.quant.rounding import quantize, quantize_reference, units_of
from penstock.quant.tensor import Quantized, QuantizedTensor
from penstock.quant.values import dequantize, group_scales

__all__ = [
    "BITS",
    "BLOCK_TYPES",
    "E4M3",
    "GLOBAL_UNIT",
    "GROUP_SIZES",
    "MODES",
    "PLANES",
    "BlockType",
    "ExpertBlobs",
    "Format",
    "GgufPlanes",
    "GgufTensor",
    "Layout",
    "Plane",
    "Quantized",
    "QuantizedTensor",
    "check_format",
    "dequantize",
    "fault_of",
    "first_unsound_scale",
    "group_scales",
    "in_planes",
    "is_torch",
    "layout_in_planes",
    "levels",
    "pack_codes",
    "quantize",
    "quantize_reference",
    "resolve",
    "scale_values",
    "to_torch",
    "units_of",
    "unpack_codes",
]
