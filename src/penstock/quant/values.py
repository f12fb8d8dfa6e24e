"""How codes become numbers: the definition, in NumPy."""

from typing import Any

import numpy as np

from penstock.dtypes import FLOATS, numpy_dtype, round_to
from penstock.errors import DTypeError
from penstock.quant.arrays import is_torch, to_torch
from penstock.quant.codes import unpack_codes
from penstock.quant.formats import GLOBAL_UNIT, MODES, levels, scale_values

_BLOCK = 1 << 20  # weights handled at once: temporaries stay below 40 MB


def dequantize(w: Any, dtype: str = "float32") -> Any:
    """The weights `[..., N, K]` that the codes stand for: code * scale + bias, or float(code) * scale.

    float32, or a dtype that is not the scales': computed in float32 (product and sum each rounded), the result rounded
    once more to `dtype`. The scales' own dtype: product and sum rounded in that dtype, as mlx.core.dequantize does.
    Returns a NumPy array or, for torch arrays, a tensor on their device. Raises DTypeError for another dtype.
    """
    if dtype not in FLOATS:
        raise DTypeError(f"dequantize: dtype is {dtype!r}, expected one of {', '.join(FLOATS)}")
    if w.mode not in MODES:  # blocks, which know themselves what they stand for
        return w.dequantize(dtype)
    w.check()
    if is_torch(w.packed):
        return to_torch(dequantize(w.to("cpu"), dtype), "torch" if w.device == "cpu" else w.device)
    affine = w.mode == "affine"
    inner = numpy_dtype(dtype if affine and dtype == w.dtype else "float32")
    groups, step = w.scales.size, _BLOCK // w.group_size
    packed, *rest = (a.reshape(groups, a.size // max(groups, 1)) for a in w.parts)
    scales = rest[0] if affine else None
    out = np.empty((groups, w.group_size), numpy_dtype(dtype))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        numbers = None if affine else group_scales(w).reshape(groups, 1)
        for start in range(0, groups, step):
            rows = slice(start, start + step)
            codes = unpack_codes(packed[rows], w.bits)
            if scales is not None:
                values = codes.astype(inner) * scales[rows].astype(inner) + rest[1][rows].astype(inner)
            else:
                assert numbers is not None
                values = levels(w.mode)[codes] * numbers[rows]
            out[rows] = round_to(values, out.dtype)
    return out.reshape(w.shape)


def group_scales(w: Any) -> np.ndarray:
    """The factors of groups `[..., N, K / gs]` as float32 (NumPy arrays): a global scale is in them."""
    if w.mode == "affine":
        return w.scales.astype(np.float32)
    scales = scale_values(w.mode)[w.scales]
    if w.global_scale is None:
        return scales
    with np.errstate(over="ignore", under="ignore"):
        return scales * (w.global_scale / GLOBAL_UNIT)[..., None, None]
