"""How numbers become codes: the definitions, in NumPy."""

from typing import Any

import numpy as np

from penstock.backend_module import backend_module
from penstock.dtypes import FLOATS, dtype_name, round_to
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.quant.arrays import fault_of, is_torch, to_numpy
from penstock.quant.codes import pack_codes
from penstock.quant.formats import COLUMNS, E2M1, E4M3, GLOBAL_UNIT, MODES, Format, resolve
from penstock.quant.tensor import QuantizedTensor

_BLOCK = 1 << 20  # weights the NumPy definitions handle at once: their temporaries stay below 40 MB


def quantize(
    array: Any, bits: int | None = None, group_size: int | None = None, mode: str = "affine", global_scale: Any = None
) -> QuantizedTensor:
    """Weights `[..., K]`, at least 2 axes, as codes and scales of groups, bit for bit as mlx.core.quantize on a CPU.

    affine (bits 4, group_size 64 unless given): per group, in float32, with lo and hi its smallest and largest weight
    and n = 2**bits - 1:
        s = max((hi - lo) / n, 1e-7), negative unless |lo| > |hi|;  edge = lo if |lo| > |hi| else hi
        q0 = rint(edge / s);  if q0 != 0: s = edge / q0, b = edge;  else b = 0
        code = clip(rint((w - b) / s), 0, n)
    1 bit: s = max(hi - lo, 1e-7), b = lo. Scales and biases are s and b rounded to the dtype of `array`: float32,
    float16 or bfloat16. The other modes (bits and group_size follow from the mode): m = max|w| / top in the dtype of
    `array`, top 6 (mxfp4, nvfp4) or 448 (mxfp8);
        mxfp4, mxfp8: scale = 2**ceil(log2(m)), its byte the exponent + 127 modulo 256; 1 where m is 0
        nvfp4: scale = m · u rounded to E4M3, at most 448, u = 2688 / global_scale in float32, or 1 without one
        code: the float nearest to w / scale (nvfp4: in the dtype of `array`, times u), of E2M1 the one nearer to 0 in a
            tie, 0 where scale is 0
    global_scale (nvfp4): a finite number above 0, for all, or float32 `[...]`, one for each matrix of a stack; the
    largest weight is a good one.
    A torch tensor gives torch arrays on its device; it is quantized on the host. Raises DTypeError, ShapeError, and
    InvalidArgument for a group with a value that is not finite or, affine, with hi - lo beyond float32.
    """
    format = resolve("quantize", bits, group_size, mode)
    if is_torch(array):
        _check_weights(array, format)
        host = quantize(to_numpy(array.contiguous()), *format, global_scale)
        return host.to("torch" if array.device.type == "cpu" else str(array.device))
    array, result = _quantize_buffers(array, format, global_scale)
    bad = backend_module("cpu", "quant").quantize_into(array, result)
    if bad >= 0:
        raise _unfit_group(array, bad, format.group_size)
    return result


def quantize_reference(
    array: np.ndarray,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
    global_scale: Any = None,
) -> QuantizedTensor:
    """The definition of `quantize` in plain NumPy: the same results and errors without a compiler, but slower."""
    format = resolve("quantize", bits, group_size, mode)
    array, result = _quantize_buffers(array, format, global_scale)
    groups, step, units = result.scales.size, _BLOCK // format.group_size, units_of(result)
    units = np.repeat(units, groups // max(units.size, 1))[:, None]
    weights = array.reshape(groups, format.group_size)
    parts = [a.reshape(groups, a.size // max(groups, 1)) for a in result.parts]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        for start in range(0, groups, step):
            rows = slice(start, start + step)
            w = weights[rows].astype(np.float32)
            spread = w.max(axis=1) - w.min(axis=1) if mode == "affine" else np.abs(w).max(axis=1)
            unfit = np.flatnonzero(~np.isfinite(spread))
            if unfit.size:
                raise _unfit_group(array, start + int(unfit[0]), format.group_size)
            if mode == "affine":
                codes, *rest = _affine_groups(w, array.dtype, format)
            else:
                codes, *rest = _float_groups(w, array.dtype, format, units[rows])
            for part, made in zip(parts, (pack_codes(codes, format.bits), *rest), strict=True):
                part[rows] = made
    return result


def _affine_groups(w: np.ndarray, dtype: np.dtype, format: Format) -> tuple[np.ndarray, ...]:
    """Codes, scales and biases of float32 groups [G, gs]."""
    n = np.float32(2**format.bits - 1)
    lo, hi = w.min(axis=1, keepdims=True), w.max(axis=1, keepdims=True)
    low_edge = np.abs(lo) > np.abs(hi)
    s = np.maximum((hi - lo) / n, np.float32(1e-7))
    s = np.where(low_edge, s, -s)
    edge = np.where(low_edge, lo, hi)
    q0 = np.rint(edge / s)
    s, b = np.where(q0 != 0, edge / q0, s), np.where(q0 != 0, edge, np.float32(0))
    if format.bits == 1:
        s = np.maximum(hi - lo, np.float32(1e-7))
        b = np.take_along_axis(w, w.argmin(axis=1, keepdims=True), axis=1)  # of 0 and -0 the first one
    # A group of equal weights beyond 3.4e31 has s = 0 and 0 / 0 here: its codes are 0, its weights are b.
    codes = np.nan_to_num(np.rint((w - b) / s), nan=0.0)
    # Neither can overflow: b is a weight or 0, and |s| is at most |edge| or the floor of 1e-7.
    return np.clip(codes, 0, n).astype(np.uint8), round_to(s, dtype), round_to(b, dtype)


def units_of(w: QuantizedTensor) -> np.ndarray:
    """What weights are multiplied by before they are rounded, float32, for each matrix of a stack or one for all."""
    if w.global_scale is None:
        return np.ones(1, np.float32)
    with np.errstate(over="ignore"):  # of a global scale below 8e-36 it is infinite
        return (GLOBAL_UNIT / w.global_scale).reshape(-1)


def _float_groups(w: np.ndarray, dtype: np.dtype, format: Format, unit: np.ndarray) -> tuple[np.ndarray, ...]:
    """Codes and scale bytes of float32 groups [G, gs] that came as `dtype`: quotients are rounded to it, then times
    unit float32 [G, 1].
    """
    top = np.float32(448 if format.mode == "mxfp8" else 6)
    m = round_to(np.abs(w).max(axis=1, keepdims=True) / top, dtype).astype(np.float32)
    if format.mode == "nvfp4":
        scales = _e4m3_codes(m * unit)
        factor = E4M3[scales]
    else:
        mantissa, exponent = np.frexp(m)  # m = mantissa * 2**exponent, 0.5 <= mantissa < 1
        exponent = np.where(m == 0, 0, exponent - (mantissa == np.float32(0.5)))
        scales = ((exponent + 127) % 256).astype(np.uint8)
        factor = np.ldexp(np.float32(1), exponent)
    ratio = round_to(w / factor, dtype).astype(np.float32) * unit
    if format.mode == "mxfp8":
        return _e4m3_codes(ratio), scales
    # The first of the nearest ones: of -0 and 0 it is 0. Without a scale no difference is a number, and it is code 0.
    codes = np.argmin(np.abs(ratio[..., None] - E2M1), axis=-1).astype(np.uint8)
    return np.where(factor == 0, np.uint8(0), codes), scales


def _e4m3_codes(x: np.ndarray) -> np.ndarray:
    """The E4M3 numbers nearest to float32 ones, ties to even, at most 448 in magnitude, which NaN becomes, too."""
    table = E4M3[:0x7F].astype(np.float64)
    magnitude = np.nan_to_num(np.abs(x).astype(np.float64), nan=np.inf, posinf=np.inf)
    above = np.clip(np.searchsorted(table, magnitude), 1, len(table) - 1)
    middle = (table[above - 1] + table[above]) / 2
    odd = above % 2 == 1  # in a tie the even one of the two codes
    code = np.where(magnitude > middle, above, np.where((magnitude == middle) & ~odd, above, above - 1))
    return (code | np.signbit(x) << 7).astype(np.uint8)


def _quantize_buffers(array: Any, format: Format, global_scale: Any) -> tuple[np.ndarray, QuantizedTensor]:
    """The array, copied only if it is not contiguous, and room for its quantized form."""
    _check_weights(array, format)
    whole = _checked_scale(global_scale, format, tuple(array.shape[:-2]))
    array = np.require(array, requirements=["C", "A"])
    *rows, K = array.shape
    packed = np.empty((*rows, K * format.bits // 32), np.uint32)
    groups, scale = (*rows, K // format.group_size), format.scale_dtype(array.dtype)
    scales, *biases = (np.empty(groups, scale) for _ in format.parts[1:])
    return array, QuantizedTensor(packed, scales, biases[0] if biases else None, *format, global_scale=whole)


def _checked_scale(global_scale: Any, format: Format, matrices: tuple[int, ...]) -> np.ndarray | None:
    """A global scale float32 [...] for each matrix of a stack."""
    if global_scale is None:
        return None
    if not MODES[format.mode].global_scale:
        raise InvalidArgument(f"quantize: global_scale is given in mode {format.mode!r}, expected it for nvfp4 alone")
    try:
        found = to_numpy(global_scale) if is_torch(global_scale) else np.asarray(global_scale)
    except ValueError:  # lists of different lengths
        found = None
    if found is None or found.dtype.kind not in "fiu":
        raise DTypeError(f"quantize: global_scale is {global_scale!r:.60}, expected a number or float32")
    with np.errstate(over="ignore"):
        found = found.astype(np.float32)
    if found.shape not in ((), (1,), matrices):
        raise ShapeError(f"quantize: global_scale has shape {found.shape}, expected () or {matrices}")
    if not (np.isfinite(found) & (found > 0)).all():
        raise InvalidArgument("quantize: global_scale has a number that is not finite and above 0, expected all so")
    return np.array(np.broadcast_to(found if found.shape == matrices else found.reshape(()), matrices))


def _unfit_group(array: np.ndarray, group: int, group_size: int) -> InvalidArgument:
    *row, column = (int(i) for i in np.unravel_index(group, (*array.shape[:-1], array.shape[-1] // group_size)))
    place = f"row {row[0] if len(row) == 1 else tuple(row)}, group {column}"
    values = array.reshape(-1, group_size)[group].astype(np.float32)
    odd = values[~np.isfinite(values)]
    if odd.size:
        return InvalidArgument(f"quantize: array holds {odd[0]} in {place}, expected finite numbers")
    span = f"{values.min():.3g} to {values.max():.3g}"
    return InvalidArgument(f"quantize: array spans {span} in {place}, expected a difference that float32 holds")


def _check_weights(array: Any, format: Format) -> None:
    if not (isinstance(array, np.ndarray) or is_torch(array)):
        raise DTypeError(f"quantize: array is a {type(array).__name__}, expected a NumPy array or torch tensor")
    if fault := fault_of(array):
        raise DTypeError(f"quantize: array is {fault}")
    if dtype_name(array.dtype) not in FLOATS:
        raise DTypeError(f"quantize: array has dtype {dtype_name(array.dtype)}, expected one of {', '.join(FLOATS)}")
    shape = tuple(array.shape)
    if len(shape) < 2:
        raise ShapeError(f"quantize: array has shape {shape}, expected at least 2 axes (..., K)")
    if 0 in shape[1:]:
        raise ShapeError(f"quantize: array has shape {shape}, expected no empty axis but the first")
    if shape[-1] % format.unit:
        why = (
            f"group_size = {format.group_size}" if format.group_size >= COLUMNS else f"{COLUMNS} in mode {format.mode}"
        )
        raise ShapeError(f"quantize: array has K = {shape[-1]}, expected a multiple of {why}")
