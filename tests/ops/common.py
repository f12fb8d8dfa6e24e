"""What the op tests share: running an op on a backend, and comparing with a bound that says what failed."""

import re
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.dtypes import numpy_dtype, round_to
from penstock.errors import InvalidArgument
from penstock.ops.array import leaves
from penstock.quant import QuantizedTensor

DTYPES = ("float32", "float16", "bfloat16")
EPS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # half an ulp of 1


def run_on(device: str, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an op with its backend forced ("reference", "cpu", "cuda")."""
    with penstock.backend(device):
        return op(*args, **kwargs)


def normal(rng: np.random.Generator, *shape: int, dtype: str = "float32", scale: float = 1.0) -> np.ndarray:
    return round_to(rng.standard_normal(shape) * scale, numpy_dtype(dtype))


def quantized(
    rng: np.random.Generator,
    *shape: int,
    bits: int = 4,
    group_size: int = 32,
    dtype: str = "bfloat16",
    mode: str = "affine",
) -> QuantizedTensor:
    """A quantized random weight [..., N, K] with entries of size K^(−1/2); else as its mode wants."""
    w = round_to(rng.standard_normal(shape) * shape[-1] ** -0.5, numpy_dtype(dtype))
    return penstock.quantize(w, bits, group_size) if mode == "affine" else penstock.quantize(w, mode=mode)


def assert_close(name: str, got: Any, want: Any, rel: float, scale: Any = None) -> None:
    """|got − want| ≤ rel · scale everywhere; scale defaults to max(|want|, 1) per element. NaN must match NaN."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    bound = rel * (np.maximum(np.abs(want), 1) if scale is None else np.broadcast_to(scale, want.shape))
    bound = np.where(np.isfinite(want), bound, 0)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):  # inf - inf
        bad = ~same & ~(np.abs(got - want) <= bound)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{name}{list(at)} is {got[at]!r}, expected {want[at]!r} ± {bound[at]:.3g} ({bad.sum()} of {bad.size} off)"
        )


def assert_same_bits(name: str, got: Any, want: Any) -> None:
    """Equal shape, dtype and every bit."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{name}: {got.dtype}{got.shape}, expected {want.dtype}{want.shape}"
    )
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(want).tobytes(), f"{name}: bits differ"


def assert_refused_like(op: Any, arguments: dict[str, Any], error: type, pattern: str) -> None:
    """The call raises exactly `error`, "<op>: <pattern> … expected …", and leaves every array as it was."""
    arrays = [a for value in arguments.values() for a in leaves(value)]
    before = [a.copy() for a in arrays]
    with pytest.raises(InvalidArgument, match=rf"^{op.name}: {pattern}") as caught:
        op(**arguments)
    assert type(caught.value) is error, repr(caught.value)
    assert "expected" in str(caught.value)
    for now, then in zip(arrays, before, strict=True):
        assert_same_bits(f"{op.name}: an array of the refused call", now, then)


def assert_refused(op: Any, arguments: dict[str, Any], error: type, message: str) -> None:
    """`assert_refused_like` with the words themselves."""
    assert_refused_like(op, arguments, error, re.escape(message))


def i32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, numpy_dtype(dtype))


def fenced(w: QuantizedTensor) -> QuantizedTensor:
    """A stack [S, N, K] with NaN before its first and behind its last expert: what slot −1 or S would read."""
    return w.with_arrays(*(_fenced(array) for array in w.arrays))


def _fenced(array: np.ndarray) -> np.ndarray:
    wide = np.full((len(array) + 2, *array.shape[1:]), np.nan if array.dtype != np.uint32 else 0).astype(array.dtype)
    wide[1:-1] = array
    return wide[1:-1]
