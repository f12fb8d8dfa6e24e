"""AltUp: several residual streams, of which a layer computes on the first one alone, and an MLP of few active neurons.

Streams are first [T, D] and rest [T, P − 1, D]; before and behind a layer all of them become sums of all of them.
"""

from __future__ import annotations

import numpy as np

from penstock.dtypes import round_to
from penstock.errors import InvalidArgument
from penstock.ops import check
from penstock.ops.array import Array, Spec
from penstock.ops.norm import f64
from penstock.ops.op import op

LEAST = 1e-5  # of a mean square that is divided by


def _mixed(first: Spec, rest: Spec, scores: Spec, weight: Spec, bias: Spec, extra: Spec | None) -> tuple[Spec, Spec]:
    check.dtype("float32", first=first, rest=rest, scores=scores, weight=weight, bias=bias)
    check.floating(extra=extra)
    check.axes("[T, D]", 2, first=first)
    check.axes("[T, P - 1, D]", 3, rest=rest)
    check.filled(first=first, rest=rest)
    T, D = first.shape
    P = rest.shape[1] + 1
    N = P if extra is None else P + 1
    check.shape((T, P - 1, D), "T, P - 1, D of first", rest=rest)
    check.shape((T, D), "as first", extra=extra)
    check.shape((T, P), "one per stream", scores=scores)
    check.shape((P * N, P), f"{N} factors of {P} streams each, P", weight=weight)
    check.shape((P * N,), f"{N} factors of {P} streams each", bias=bias)
    return first, rest


@op(infer=_mixed)
def altup_mix(
    first: Array, rest: Array, scores: Array, weight: Array, bias: Array, extra: Array | None = None
) -> tuple[Array, Array]:
    """Streams y_q = Σ_p c[q, p] · s_p of each token, s = first, rest and extra (if there is one), P as many again.

    The factors c = weight · tanh(scores) + bias are of the token. first [T, D], rest [T, P − 1, D], scores [T, P],
    weight [P · N, P], bias [P · N], N = P or P + 1, all float32; extra [T, D], any float → like first and rest.
    """
    parts = [f64(first)[:, None], f64(rest)] + ([] if extra is None else [f64(extra)[:, None]])
    streams = np.concatenate(parts, axis=1)
    factors = (np.tanh(f64(scores)) @ f64(weight).T + f64(bias)).reshape(
        len(first), rest.shape[1] + 1, streams.shape[1]
    )
    y = (factors @ streams).astype(np.float32)
    return np.ascontiguousarray(y[:, 0]), np.ascontiguousarray(y[:, 1:])


def _matched(x: Spec, like: Spec) -> Spec:
    check.floating(x=x, like=like)
    check.axes("[T, D]", 2, x=x)
    check.filled(x=x)
    check.shape(x.shape, "as x", like=like)
    return x


@op(infer=_matched, alias=True)
def altup_match(x: Array, like: Array) -> Array:
    """x · √mean(like²) / √max(mean(x²), 1e-5): rows of x with the magnitude of those of like, both [T, D]."""
    size, wanted = (np.mean(f64(v) ** 2, axis=1, keepdims=True) for v in (x, like))
    return round_to(f64(x) * np.sqrt(wanted / np.maximum(size, LEAST)), x.dtype)


def _cut(x: Spec, factor: float) -> Spec:
    check.floating(x=x)
    check.axes("[T, N]", 2, x=x)
    check.filled(x=x)
    if not np.isfinite(factor):
        raise InvalidArgument(f"factor is {factor}, expected a finite number")
    return x


@op(infer=_cut, alias=True)
def gaussian_topk(x: Array, factor: float) -> Array:
    """max(x − (mean(x) + factor · std(x)), 0) by rows of x [T, N]; std divides by N.

    Of normally distributed rows the share Φ(factor) becomes 0.
    """
    wide = f64(x)
    cut = wide.mean(axis=1, keepdims=True) + factor * wide.std(axis=1, keepdims=True)
    return round_to(np.maximum(wide - cut, 0), x.dtype)
