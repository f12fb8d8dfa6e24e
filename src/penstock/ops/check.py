"""Checks shared by the `infer` functions. They name the argument; the framework puts the op's name in front."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.dtypes import FLOATS
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.ops.array import Array, Spec


def floating(**specs: Any) -> None:
    """Each is float32, float16 or bfloat16; None passes."""
    for name, spec in specs.items():
        if isinstance(spec, Spec) and spec.dtype not in FLOATS:
            raise DTypeError(f"{name} has dtype {spec.dtype}, expected float32, float16 or bfloat16")


def alike(**specs: Any) -> str:
    """All are of one float dtype (None passes); returns it."""
    floating(**specs)
    given = [(name, spec) for name, spec in specs.items() if spec is not None]
    first_name, first = given[0]
    for name, spec in given[1:]:
        if spec.dtype != first.dtype:
            raise DTypeError(f"{name} has dtype {spec.dtype}, expected {first.dtype} as {first_name}")
    return first.dtype


def dtype(expected: str, /, **specs: Any) -> None:
    for name, spec in specs.items():
        if isinstance(spec, Spec) and spec.dtype != expected:
            raise DTypeError(f"{name} has dtype {spec.dtype}, expected {expected}")


def result_dtype(x: Spec, dtype: str | None) -> str:
    """x's dtype unless another float is asked for (router logits of half-precision activations, for one)."""
    if dtype is not None and dtype not in FLOATS:
        raise DTypeError(f"dtype is {dtype!r}, expected float32, float16 or bfloat16")
    return dtype or x.dtype


def shape(expected: tuple[int, ...], why: str = "", /, **specs: Any) -> None:
    for name, spec in specs.items():
        if spec is not None and tuple(spec.shape) != expected:
            raise ShapeError(f"{name} has shape {tuple(spec.shape)}, expected {expected}{f' ({why})' if why else ''}")


def axes(form: str, *allowed: int, **specs: Any) -> None:
    """The number of axes is one of `allowed`; `form` shows them, such as "[T, H, D] or [H, D]"."""
    for name, spec in specs.items():
        if spec is not None and len(spec.shape) not in allowed:
            raise ShapeError(f"{name} has shape {tuple(spec.shape)}, expected {form}")


def filled(lead: int = 1, /, **specs: Any) -> None:
    """No axis is empty but the first `lead` ones."""
    for name, spec in specs.items():
        if spec is not None and 0 in spec.shape[lead:]:
            raise ShapeError(
                f"{name} has shape {tuple(spec.shape)}, expected no empty axis{' but the first' if lead else ''}"
            )


def positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise InvalidArgument(f"{name} is {number}, expected at least 1")


def one_of(allowed: tuple[str, ...], /, **values: str) -> None:
    for name, value in values.items():
        if value not in allowed:
            raise InvalidArgument(f"{name} is {value!r}, expected one of {', '.join(map(repr, allowed))}")


def eps(value: float) -> None:
    if not 0 <= value < float("inf"):
        raise InvalidArgument(f"eps is {value}, expected a finite number, 0 or more")


def finite(**numbers: float) -> None:
    for name, number in numbers.items():
        if not -float("inf") < number < float("inf"):
            raise InvalidArgument(f"{name} is {number}, expected a finite number")


_FEW = 64  # up to here Python's own loop over the numbers is faster than NumPy's overhead


def bounds(values: Array | int) -> tuple[float, float]:
    """Smallest and largest of some numbers; of none (inf, -inf)."""
    if isinstance(values, int):
        return values, values
    if values.size == 0:
        return np.inf, -np.inf
    if values.size <= _FEW:
        numbers = values.ravel().tolist()
        return int(min(numbers)), int(max(numbers))
    return int(values.min()), int(values.max())


def in_range(name: str, values: Array | int, low: int, high: int, why: str = "") -> None:
    """Host values lie in low … high − 1."""
    smallest, largest = bounds(values)
    if smallest < low or largest >= high:
        found = smallest if smallest < low else largest
        raise InvalidArgument(f"{name} has {found}, expected {low} to {high - 1}{f' ({why})' if why else ''}")


def distinct(values: Array) -> bool:
    """No number of an integer array [n] stands in it twice."""
    if values.size <= _FEW:
        return values.size < 2 or len(set(values.tolist())) == values.size
    ordered = np.sort(values)
    return not (ordered[1:] == ordered[:-1]).any()


def unique(name: str, values: Array) -> None:
    if not distinct(values):
        raise InvalidArgument(f"{name} has the same value twice, expected distinct values")
