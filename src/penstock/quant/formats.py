"""The formats of quantized tensors: the modes, their bits, groups and scales, and what their codes stand for.

mode    group size       bits                   scales           a code is
affine  32, 64, 128      1, 2, 3, 4, 5, 6, 8    floats, biases   an unsigned number
mxfp4   32               4                      E8M0 bytes       an E2M1 float
mxfp8   32               8                      E8M0 bytes       an E4M3 float
nvfp4   16               4                      E4M3 bytes       an E2M1 float
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.dtypes import FLOATS
from penstock.errors import InvalidArgument


@dataclass(frozen=True)
class Mode:
    """What tensors of a mode may have; the defaults come first in `mlx.core.quantize` too."""

    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]
    default_bits: int
    default_group_size: int
    scale_dtypes: tuple[str, ...]
    biases: bool = False
    global_scale: bool = False


MODES: Mapping[str, Mode] = {
    "affine": Mode((1, 2, 3, 4, 5, 6, 8), (32, 64, 128), 4, 64, FLOATS, biases=True),
    "mxfp4": Mode((4,), (32,), 4, 32, ("uint8",)),
    "mxfp8": Mode((8,), (32,), 8, 32, ("uint8",)),
    "nvfp4": Mode((4,), (16,), 4, 16, ("uint8",), global_scale=True),
}
BITS = MODES["affine"].bits
GROUP_SIZES = MODES["affine"].group_sizes
_AT_ONCE = 1 << 20  # scales that are looked at together
COLUMNS = 32  # a row has a multiple of so many weights, whatever its groups

GLOBAL_UNIT = np.float32(448 * 6)  # a global scale is the largest weight; this is the largest E4M3 · E2M1


class Format(NamedTuple):
    """How a tensor is quantized. Raises InvalidArgument through `checked` for what no mode has."""

    bits: int
    group_size: int
    mode: str = "affine"

    @property
    def unit(self) -> int:
        """Columns at whose multiples a row can be cut."""
        return max(self.group_size, COLUMNS)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors of a weight in a checkpoint, behind its path; a global scale is left out."""
        return ("weight", "scales", "biases") if MODES[self.mode].biases else ("weight", "scales")

    def scale_dtype(self, weights: np.dtype) -> np.dtype:
        """The dtype of scales (and biases) of weights of some dtype."""
        return weights if MODES[self.mode].biases else np.dtype(np.uint8)

    def __str__(self) -> str:
        return f"{self.bits} bits, groups of {self.group_size}" if self.mode == "affine" else self.mode


def resolve(who: str, bits: int | None, group_size: int | None, mode: str) -> Format:
    """A format with what is None filled in by its mode. Raises InvalidArgument, which `who` begins."""
    known = mode_of(who, mode)
    bits = known.default_bits if bits is None else bits
    return check_format(who, bits, known.default_group_size if group_size is None else group_size, mode)


def mode_of(who: str, mode: str) -> Mode:
    if not isinstance(mode, str) or mode not in MODES:
        raise InvalidArgument(f"{who}: mode is {mode!r}, expected one of {', '.join(MODES)}")
    return MODES[mode]


def check_bits(who: str, bits: int, mode: str = "affine") -> None:
    allowed = MODES[mode].bits
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in allowed:
        raise InvalidArgument(f"{who}: bits is {bits!r}, expected {_choice(allowed, mode)}")


def check_format(who: str, bits: int, group_size: int, mode: str = "affine") -> Format:
    known = mode_of(who, mode)
    check_bits(who, bits, mode)
    if not isinstance(group_size, int) or group_size not in known.group_sizes:
        raise InvalidArgument(f"{who}: group_size is {group_size!r}, expected {_choice(known.group_sizes, mode)}")
    return Format(bits, group_size, mode)


def _choice(allowed: tuple[int, ...], mode: str) -> str:
    listed = ", ".join(map(str, allowed))
    return f"one of {listed}" if len(allowed) > 1 else f"{listed} in mode {mode}"


def _floats(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """The numbers of a small float format without infinities, by code: those with sign 0, then those with sign 1."""
    code = np.arange(1 << (exponent_bits + mantissa_bits))
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    unit = 1 << mantissa_bits
    value = np.where(exponent > 0, mantissa + unit, mantissa) * np.exp2(np.maximum(exponent, 1) - bias) / unit
    return np.concatenate([value, -value]).astype(np.float32)


E2M1 = _floats(2, 1, 1)  # 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
E4M3 = _floats(4, 3, 7)  # up to 448; the last code of either sign is NaN
E4M3[[0x7F, 0xFF]] = np.nan
with np.errstate(over="ignore"):  # the last one is infinity, as MLX reads it
    E8M0 = np.exp2(np.arange(256) - 127.0).astype(np.float32)
for _table in (E2M1, E4M3, E8M0):
    _table.flags.writeable = False


def levels(mode: str) -> np.ndarray:
    """What each code of a mode that is not affine stands for: float32."""
    return E4M3 if mode == "mxfp8" else E2M1


def scale_values(mode: str) -> np.ndarray:
    """What each byte of the scales of a mode that is not affine stands for: float32 [256]."""
    return E4M3 if mode == "nvfp4" else E8M0


def first_unsound_scale(mode: str, scales: np.ndarray) -> int:
    """The first of scales uint8 of a mode that is not affine that stands for no finite number, counted; -1: none."""
    mask, flat = np.uint8(0x7F if mode == "nvfp4" else 0xFF), scales.reshape(-1)
    for start in range(0, flat.size, _AT_ONCE):
        part = flat[start : start + _AT_ONCE]
        part = part & mask if mode == "nvfp4" else part
        if part.max() == mask:
            return start + int(np.argmax(part))
    return -1
