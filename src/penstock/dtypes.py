"""Float formats by name, and rounding between them.

bfloat16 is the upper half of a float32. NumPy has no such type: host arrays carry it as ml_dtypes.bfloat16, whose
bits torch.bfloat16 shares.
"""

import ml_dtypes
import numpy as np

from penstock.errors import DTypeError, InvalidArgument

bfloat16 = np.dtype(ml_dtypes.bfloat16)

FLOATS = ("float32", "float16", "bfloat16")  # what activations, parameters and scales may be

_NUMPY: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": bfloat16,
    "float64": np.dtype(np.float64),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "int16": np.dtype(np.int16),
    "uint16": np.dtype(np.uint16),
    "int32": np.dtype(np.int32),
    "uint32": np.dtype(np.uint32),
    "int64": np.dtype(np.int64),
    "uint64": np.dtype(np.uint64),
    "bool": np.dtype(np.bool_),
}
_NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in _NUMPY.items()}
ITEMSIZE: dict[str, int] = {name: dtype.itemsize for name, dtype in _NUMPY.items()}


def dtype_name(dtype: object) -> str:
    """'float32' for np.dtype('float32') or torch.float32; foreign byte orders and other types keep their own
    spelling.
    """
    name = _NAMES.get(dtype)  # type: ignore[arg-type]
    return name if name is not None else str(dtype).removeprefix("torch.")


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a name; raises DTypeError for a name that penstock does not know."""
    try:
        return _NUMPY[name]
    except (KeyError, TypeError):
        raise DTypeError(f"dtype is {name!r}, expected one of {', '.join(_NUMPY)}") from None


def round_to(x: np.ndarray, dtype: np.dtype | str) -> np.ndarray:
    """Round to the nearest value of `dtype`, ties to even, in one step (float64 → bfloat16 does not pass through
    float32).
    """
    dtype = numpy_dtype(dtype) if isinstance(dtype, str) else dtype
    if dtype != bfloat16 or x.dtype != np.float64:
        return x.astype(dtype)
    # Round to odd on the way through float32: where the first step was inexact its last bit is set to 1, which
    # keeps "above or below the tie" for the second step.
    narrow = x.astype(np.float32)
    back = narrow.astype(np.float64)
    bits = narrow.view(np.uint32)
    inexact = (back != x) & np.isfinite(narrow)
    toward_zero = bits - (inexact & (np.abs(back) > np.abs(x))).astype(np.uint32)
    odd = np.where(inexact, toward_zero | np.uint32(1), bits)
    return f32_to_bf16(odd.view(np.float32).reshape(x.shape))


def f32_to_bf16(x: np.ndarray, mode: str = "nearest") -> np.ndarray:
    """float32 → bfloat16: mode "nearest" (ties to even, NaN stays a quiet NaN) or "truncate" (drops the lower half).

    Truncation is for comparison only: it turns a NaN whose payload lies in the lower half into infinity.
    """
    if x.dtype != np.float32:
        raise DTypeError(f"f32_to_bf16: x has dtype {dtype_name(x.dtype)}, expected float32")
    bits = np.ascontiguousarray(x).view(np.uint32)
    if mode == "truncate":
        return (bits >> 16).astype(np.uint16).view(bfloat16).reshape(x.shape)
    if mode != "nearest":
        raise InvalidArgument(f"f32_to_bf16: mode is {mode!r}, expected 'nearest' or 'truncate'")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    quiet_nan = ((bits >> 16) & np.uint32(0x8000)) | np.uint32(0x7FC0)
    return np.where(np.isnan(x), quiet_nan, rounded).astype(np.uint16).view(bfloat16).reshape(x.shape)
