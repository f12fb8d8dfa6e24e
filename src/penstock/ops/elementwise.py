"""Elementwise ops: sums, products, gated activations, soft cap, weighted sums of expert outputs."""

from __future__ import annotations

import itertools
import math

import numpy as np

from penstock.dtypes import numpy_dtype, round_to
from penstock.errors import InvalidArgument, ShapeError
from penstock.ops import check
from penstock.ops.array import Array, Spec
from penstock.ops.op import op


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(−x)) in float64, without overflow on either side."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def silu(x: Array) -> Array:
    """x · sigmoid(x) in float64; −0 for very negative x, NaN for −inf."""
    return x * sigmoid(x)


def gelu(x: Array) -> Array:
    """The tanh form of GELU in float64."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu}


def _same(**specs: Spec) -> Spec:
    """All arguments have one shape and dtype; so has the result."""
    first_name, first = next(iter(specs.items()))
    check.alike(**specs)
    check.filled(**{first_name: first})
    check.shape(first.shape, f"as {first_name}", **specs)
    return first


def _sum(a: Spec, b: Spec) -> Spec:
    """Arguments have one shape; the result has a's dtype."""
    check.floating(b=b)
    check.shape(a.shape, "as a", b=b)
    return _same(a=a)


def _broadcast(a: Spec, b: Spec | float) -> Spec:
    """b has a's shape, or is one vector for all rows, or one number."""
    check.floating(a=a)
    check.filled(a=a)
    if not isinstance(b, Spec):
        return a
    check.floating(b=b)
    if b.shape == a.shape and a.ndim > 1:
        check.alike(a=a, b=b)
    elif b.size != 1 and b.shape != a.shape[-1:]:
        raise ShapeError(f"b has shape {b.shape}, expected {a.shape}, {a.shape[-1:]} or one element")
    return a


def _operand(a: Array, b: Array | float) -> Array | float:
    if not isinstance(b, np.ndarray):
        return float(b)
    return b.astype(np.float64).reshape(a.shape if b.shape == a.shape else b.size)


@op(infer=_broadcast, alias=True, wide=True)
def add(a: Array, b: Array | float) -> Array:
    """a + b; b has a's shape, or is a vector [last axis] (a bias; any float dtype), or one number."""
    return round_to(a.astype(np.float64) + _operand(a, b), a.dtype)


@op(infer=_broadcast, alias=True, wide=True)
def mul(a: Array, b: Array | float) -> Array:
    """a · b; b has a's shape, or is a vector [last axis] (any float dtype), or one number."""
    return round_to(a.astype(np.float64) * _operand(a, b), a.dtype)


@op(infer=_sum, alias=True)
def residual_add(a: Array, b: Array) -> Array:
    """a + b of equal shapes in a's dtype, b of any float; bit-exact on every backend."""
    return round_to(a.astype(np.float64) + b.astype(np.float64), a.dtype)


@op(infer=lambda x: _same(x=x), alias=True)
def gelu_tanh(x: Array) -> Array:
    """0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))."""
    return round_to(gelu(x.astype(np.float64)), x.dtype)


@op(infer=lambda gate, up: _same(gate=gate, up=up), alias=True)
def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) · up, silu(g) = g / (1 + exp(−g)); any shape."""
    return round_to(silu(gate.astype(np.float64)) * up.astype(np.float64), gate.dtype)


@op(infer=lambda gate, up: _same(gate=gate, up=up), alias=True)
def geglu(gate: Array, up: Array) -> Array:
    """gelu_tanh(gate) · up; any shape."""
    return round_to(gelu(gate.astype(np.float64)) * up.astype(np.float64), gate.dtype)


def _capped(x: Spec, cap: float) -> Spec:
    if not 0 < cap < math.inf:
        raise InvalidArgument(f"cap is {cap}, expected a positive finite number")
    return _same(x=x)


@op(infer=_capped, alias=True, wide=True)
def softcap(x: Array, cap: float) -> Array:
    """cap · tanh(x / cap): logits pressed into (−cap, cap), order kept."""
    return round_to(cap * np.tanh(x.astype(np.float64) / cap), x.dtype)


@op(infer=lambda x, gate: _same(x=x, gate=gate), alias=True)
def sigmoid_gate(x: Array, gate: Array) -> Array:
    """x · sigmoid(gate), same shapes; `out=x` gates in place."""
    return round_to(x.astype(np.float64) * sigmoid(gate.astype(np.float64)), x.dtype)


def _columns(x: Spec, start: int, stop: int, dtype: str | None) -> Spec:
    check.floating(x=x)
    check.axes("[T, N]", 2, x=x)
    if not 0 <= start < stop <= x.shape[1]:
        raise ShapeError(f"start and stop are {start} and {stop}, expected 0 <= start < stop <= {x.shape[1]} (N)")
    return Spec((x.shape[0], stop - start), check.result_dtype(x, dtype))


@op(infer=_columns)
def columns(x: Array, start: int, stop: int, dtype: str | None = None) -> Array:
    """Columns start … stop − 1 of x [T, N] as an array of their own, [T, stop − start], rounded to `dtype` if given."""
    part = x[:, start:stop].copy()
    return part if dtype is None else round_to(part, numpy_dtype(dtype))


def _split(x: Spec, first: int, second: int, third: int, fourth: int) -> tuple[Spec | None, ...]:
    check.floating(x=x)
    check.axes("[T, N]", 2, x=x)
    counts = (first, second, third, fourth)
    if min(counts) < 0 or not first or not second or (fourth and not third) or sum(counts) != x.shape[1]:
        raise ShapeError(f"parts have {counts} columns, expected two to four parts of {x.shape[1]} columns in all (N)")
    return tuple(Spec((x.shape[0], count), x.dtype) if count else None for count in counts)


@op(infer=_split)
def split_columns(
    x: Array, first: int, second: int, third: int = 0, fourth: int = 0
) -> tuple[Array, Array, Array | None, Array | None]:
    """x [T, N] cut after `first`, `second` and `third` columns into two, three or four arrays of their own."""
    cuts = np.cumsum([0, first, second, third, fourth])
    parts = [x[:, a:b].copy() if b > a else None for a, b in itertools.pairwise(cuts)]
    return tuple(parts)  # type: ignore[return-value]


def _weighted(expert_out: Spec, weights: Spec) -> Spec:
    check.floating(expert_out=expert_out)
    check.dtype("float32", weights=weights)
    check.axes("[T, k, dim] or [k, dim]", 2, 3, expert_out=expert_out)
    check.shape(expert_out.shape[:-1], "expert_out without its last axis", weights=weights)
    if expert_out.shape[-1] == 0:
        raise ShapeError(f"expert_out has shape {expert_out.shape}, expected a last axis of at least 1")
    return Spec((*expert_out.shape[:-2], expert_out.shape[-1]), expert_out.dtype)


def expert_sum(expert_out: Array, weights: Array) -> Array:
    """Σ_i weights[…, i] · expert_out[…, i, :] in float64, slot after slot."""
    total = np.zeros((*expert_out.shape[:-2], expert_out.shape[-1]))
    for i in range(expert_out.shape[-2]):
        total += expert_out[..., i, :].astype(np.float64) * weights[..., i, None].astype(np.float64)
    return total


@op(infer=_weighted)
def weighted_sum(expert_out: Array, weights: Array) -> Array:
    """y = Σ_i weights[i] · expert_out[i], slots in order.

    expert_out [(T,) k, dim], weights float32 [(T,) k] → [(T,) dim]; k = 0 gives zeros.
    """
    return round_to(expert_sum(expert_out, weights), expert_out.dtype)
