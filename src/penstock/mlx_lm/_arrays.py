"""Arrays of other libraries, known by what they offer: mlx is never imported, nor is torch."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from penstock.errors import DTypeError, InvalidArgument, ShapeError


def as_numpy(value: Any) -> np.ndarray:
    """An array of any library, a list or a number as a NumPy array, by the buffer protocol, `__array__` or `tolist`."""
    if isinstance(value, np.ndarray):
        return value
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, BufferError):  # a dtype without a NumPy twin, such as bfloat16
        found = None
    if (found is None or found.dtype == object) and callable(tolist := getattr(value, "tolist", None)):
        found = np.asarray(tolist())
    if found is None or found.dtype == object:
        raise DTypeError(f"expected an array of numbers, got a {type(value).__name__}")
    return found


def token_ids(value: Any, what: str) -> list[int]:
    """One sequence of token ids: a list, or an array of any library. Raises DTypeError or ShapeError, naming `what`."""
    expected = "expected token ids (integers in a list or an array)"
    if isinstance(value, str | bytes | dict):
        raise DTypeError(f"{what} is a {type(value).__name__}, {expected}")
    try:
        found = as_numpy(value)
    except ValueError:
        raise DTypeError(f"{what} is a {type(value).__name__}, {expected}") from None
    if found.ndim != 1:
        raise ShapeError(f"{what} has shape {found.shape}, expected one sequence of token ids")
    if found.size and found.dtype.kind not in "iu":
        raise DTypeError(f"{what} holds {found.dtype}, expected token ids, which are integers")
    return found.astype(np.int64).tolist()


def integer(value: Any, what: str, least: int) -> int:
    """A whole number of at least `least`. Raises InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise InvalidArgument(f"{what} is {value!r:.60}, expected an integer of at least {least}")
    return int(value)
