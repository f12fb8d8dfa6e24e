"""RMS norms and their fusions with residual adds, products and weighted expert sums.

Throughout, rinv(v) = 1 / sqrt(mean(v²) + eps) over the last axis and n(v, w) = v · rinv(v) · w. Weights multiply as
they are: files that store w for a factor 1 + w get the 1 at load. All sums are formed in float64 and rounded once
per output. Activations are float32, float16 or bfloat16, alike in one call; weights any of the three. A residual stream
may be of another float than what is added to it: the sum has the stream's dtype, what is normed that of the other rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.dtypes import round_to
from penstock.errors import InvalidArgument, ShapeError
from penstock.ops import check
from penstock.ops.array import Array, Spec
from penstock.ops.elementwise import expert_sum, sigmoid, silu
from penstock.ops.op import op


def f64(x: Array | float) -> Array:
    return np.asarray(x).astype(np.float64)


def normed(v: Array, eps: float, weight: Array | float = 1.0) -> Array:
    """n(v, weight) of a float64 array."""
    return v * (1 / np.sqrt(np.mean(v * v, axis=-1, keepdims=True) + eps)) * f64(weight)


def _rows(eps: float, weights: Mapping[str, Spec | None], **activations: Spec) -> Spec:
    """Activations alike in shape and dtype, [..., dim]; weights [dim]."""
    first_name, first = next(iter(activations.items()))
    check.alike(**activations)
    check.axes("[..., dim]", *range(1, 9), **{first_name: first})
    check.filled(**{first_name: first})
    dim = first.shape[-1]
    if dim == 0:
        raise ShapeError(f"{first_name} has shape {first.shape}, expected a last axis of at least 1")
    check.shape(first.shape, f"as {first_name}", **activations)
    check.floating(**weights)
    check.shape((dim,), f"last axis of {first_name}", **weights)
    check.eps(eps)
    return first


def _beside(eps: float, weights: Mapping[str, Spec | None], rows: Mapping[str, Spec], **stream: Spec) -> Spec:
    """`_rows` beside a residual stream of their shape, of any float; returns the rows."""
    ((name, spec),) = stream.items()
    check.floating(**stream)
    check.shape(spec.shape, f"as {name}", **rows)
    return _rows(eps, weights, **rows)


def _scalar(name: str, scalar: Spec | float, dim: int) -> None:
    if isinstance(scalar, Spec):
        check.floating(**{name: scalar})
        if scalar.size != 1 and scalar.shape != (dim,):
            raise ShapeError(f"{name} has shape {scalar.shape}, expected one element or ({dim},)")


def _factor(scalar: Array | float) -> Array:
    return f64(scalar).reshape(-1)


def _normed(x: Spec, weight: Spec | None, eps: float, dtype: str | None) -> Spec:
    y = _rows(eps, {"weight": weight}, x=x)
    return Spec(y.shape, check.result_dtype(x, dtype))


@op(infer=_normed, alias=True)
def rms_norm(x: Array, weight: Array | None = None, eps: float = 1e-6, dtype: str | None = None) -> Array:
    """Scale each row of x to unit root mean square, then by weight.

    y = x · rinv(x) · weight; weight None leaves the factor out
    x [..., dim], weight [dim]; y has x's shape and dtype, or `dtype`. A zero row gives 0, with eps = 0 NaN. `out=x` is
    allowed where y has x's dtype.
    """
    return round_to(normed(f64(x), eps, 1.0 if weight is None else weight), dtype or x.dtype)


@op(infer=lambda x, norm_weight, scale, eps: _rows(eps, {"norm_weight": norm_weight}, x=x, scale=scale), alias=True)
def rms_norm_mul(x: Array, norm_weight: Array, scale: Array, eps: float = 1e-6) -> Array:
    """n(x, norm_weight) · scale, scale [..., dim] like x (a whole operand, not a vector)."""
    return round_to(normed(f64(x), eps, norm_weight) * f64(scale), x.dtype)


def _triple(x: Spec, wa: Spec, wb: Spec, wc: Spec, eps: float, dtype: str | None) -> tuple[Spec, Spec, Spec]:
    y = _rows(eps, {"wa": wa, "wb": wb, "wc": wc}, x=x)
    y = Spec(y.shape, check.result_dtype(x, dtype))
    return y, y, y


@op(infer=_triple, alias=True)
def rms_norm_triple(
    x: Array, wa: Array, wb: Array, wc: Array, eps: float = 1e-6, dtype: str | None = None
) -> tuple[Array, Array, Array]:
    """n(x, wa), n(x, wb), n(x, wc) from one reduction, in x's dtype or in `dtype`."""
    v = f64(x)
    ya, yb, yc = (round_to(normed(v, eps, w), dtype or x.dtype) for w in (wa, wb, wc))
    return ya, yb, yc


def _qk(
    x: Spec, num_k_heads: int, key_dim: int, key_offset: int, inv_scale: float | None, eps: float, eps_on: str
) -> Spec:
    check.floating(x=x)
    check.axes("[T, per_token_total]", 2, x=x)
    check.filled(x=x)
    check.positive(num_k_heads=num_k_heads, key_dim=key_dim)
    check.eps(eps)
    check.one_of(("sum", "mean"), eps_on=eps_on)
    if inv_scale is not None:
        check.finite(inv_scale=inv_scale)
    width = num_k_heads * key_dim
    if key_offset < width:
        raise InvalidArgument(f"key_offset is {key_offset}, expected at least {width} (num_k_heads · key_dim)")
    if key_offset + width > x.shape[1]:
        raise ShapeError(f"x has {x.shape[1]} columns, expected at least {key_offset + width} (key_offset + keys)")
    return x


@op(infer=_qk, alias=True)
def rms_norm_qk(
    x: Array,
    num_k_heads: int,
    key_dim: int,
    key_offset: int,
    inv_scale: float | None = None,
    eps: float = 1e-6,
    eps_on: str = "sum",
) -> Array:
    """L2-normalise the q and k heads at the front of each row; the rest of the row passes through.

    q ← q / sqrt(Σq² + eps) · inv_scale      heads h at columns h · key_dim
    k ← k / sqrt(Σk² + eps)                  heads h at columns key_offset + h · key_dim
    x [T, per_token_total]; inv_scale defaults to key_dim^(−1/2). eps_on="mean" adds eps to the mean of squares, key_dim
    times as much: what an older kernel did, kept for comparison.
    """
    y = x.copy()
    width = num_k_heads * key_dim
    added = eps * key_dim if eps_on == "mean" else eps
    for start, factor in ((0, key_dim**-0.5 if inv_scale is None else inv_scale), (key_offset, 1.0)):
        heads = f64(x[:, start : start + width]).reshape(-1, num_k_heads, key_dim)
        unit = heads / np.sqrt(np.sum(heads * heads, axis=-1, keepdims=True) + added)
        y[:, start : start + width] = round_to(unit * factor, x.dtype).reshape(-1, width)
    return y


GATE_ACTS = ("silu", "sigmoid")


def _gated(values: Spec, z: Spec, weight: Spec, eps: float, act: str) -> Spec:
    check.one_of(GATE_ACTS, act=act)
    check.axes("[T, Hv, Dv]", 3, values=values)
    return _rows(eps, {"weight": weight}, values=values, z=z)


@op(infer=_gated, alias=True)
def gated_rms_norm(values: Array, z: Array, weight: Array, eps: float = 1e-6, act: str = "silu") -> Array:
    """values · rinv(values) · act(z) · weight, per head: the norm sees values alone, before the gate.

    values, z [T, Hv, Dv], weight [Dv]; act: "silu" or "sigmoid".
    """
    return round_to(normed(f64(values), eps) * (silu if act == "silu" else sigmoid)(f64(z)) * f64(weight), values.dtype)


def _added(residual: Spec, x: Spec, weight: Spec, eps: float) -> Spec:
    _beside(eps, {"weight": weight}, {"x": x}, residual=residual)
    return residual


@op(infer=_added, alias=True)
def norm_add(residual: Array, x: Array, weight: Array, eps: float = 1e-6) -> Array:
    """residual + n(x, weight) in residual's dtype: the norm is of x alone."""
    return round_to(f64(residual) + normed(f64(x), eps, weight), residual.dtype)


def _with_scalar(residual: Spec, x: Spec, weight: Spec, scalar: Spec | float, eps: float) -> Spec:
    _added(residual, x, weight, eps)
    _scalar("scalar", scalar, x.shape[-1])
    return residual


@op(infer=_with_scalar, alias=True)
def norm_add_scalar(residual: Array, x: Array, weight: Array, scalar: Array | float, eps: float = 1e-6) -> Array:
    """(residual + n(x, weight)) · scalar in residual's dtype; scalar is a number, one element, or a vector [dim]."""
    return round_to((f64(residual) + normed(f64(x), eps, weight)) * _factor(scalar), residual.dtype)


def _with_sum(residual: Spec, x: Spec, weight: Spec, eps: float, write_sum: bool) -> tuple[Spec, Spec | None]:
    y = _beside(eps, {"weight": weight}, {"x": x}, residual=residual)
    return y, residual if write_sum else None


@op(infer=_with_sum, alias=True)
def residual_norm(
    residual: Array, x: Array, weight: Array, eps: float = 1e-6, write_sum: bool = False
) -> tuple[Array, Array | None]:
    """v = residual + x; n(v, weight) in x's dtype, and with write_sum also v in residual's.

    `out=(y, sum)` may put the sum over residual or x; without write_sum a buffer given for it is left alone.
    """
    v = f64(residual) + f64(x)
    return round_to(normed(v, eps, weight), x.dtype), round_to(v, residual.dtype) if write_sum else None


def _scaled(residual: Spec, x: Spec, weight: Spec, scalar: Spec | float, eps: float) -> Spec:
    y = _rows(eps, {"weight": weight}, residual=residual, x=x)
    _scalar("scalar", scalar, y.shape[-1])
    return y


@op(infer=_scaled, alias=True)
def residual_norm_scalar(residual: Array, x: Array, weight: Array, scalar: Array | float, eps: float = 1e-6) -> Array:
    """n(residual + x, weight) · scalar."""
    return round_to(normed(f64(residual) + f64(x), eps, weight) * _factor(scalar), x.dtype)


def _wsum(expert_out: Spec, weights: Spec, eps: float, norms: Mapping[str, Spec | None], **rows: Spec) -> Spec:
    """expert_out [rows, k, dim] with k ≥ 1, weights float32 [rows, k], the rest [rows, dim]."""
    check.axes("[rows, k, dim]", 3, expert_out=expert_out)
    check.filled(expert_out=expert_out)
    check.dtype("float32", weights=weights)
    check.shape(expert_out.shape[:2], "rows and k of expert_out", weights=weights)
    check.alike(expert_out=expert_out, **rows)
    check.shape((expert_out.shape[0], expert_out.shape[2]), "rows and dim of expert_out", **rows)
    return _rows(eps, norms, **rows)


@op(
    infer=lambda expert_out, weights, residual, norm_weight, eps: _wsum(
        expert_out, weights, eps, {"norm_weight": norm_weight}, residual=residual
    ),
    alias=True,
)
def moe_wsum_norm_add(
    expert_out: Array, weights: Array, residual: Array, norm_weight: Array, eps: float = 1e-6
) -> Array:
    """residual + n(v, norm_weight) with v = Σ_i expert_out[:, i] · weights[:, i].

    expert_out [rows, k, dim], weights float32 [rows, k], residual [rows, dim].
    """
    return round_to(f64(residual) + normed(expert_sum(expert_out, weights), eps, norm_weight), residual.dtype)


@op(
    infer=lambda expert_out, weights, residual, res_norm_weight, moe_norm_weight, eps: _wsum(
        expert_out,
        weights,
        eps,
        {"res_norm_weight": res_norm_weight, "moe_norm_weight": moe_norm_weight},
        residual=residual,
    ),
    alias=True,
)
def moe_wsum_dnorm_add(
    expert_out: Array,
    weights: Array,
    residual: Array,
    res_norm_weight: Array,
    moe_norm_weight: Array,
    eps: float = 1e-6,
) -> Array:
    """n(residual, res_norm_weight) + n(v, moe_norm_weight), v the weighted expert sum: the raw residual is not
    added.
    """
    v = expert_sum(expert_out, weights)
    y = normed(f64(residual), eps, res_norm_weight) + normed(v, eps, moe_norm_weight)
    return round_to(y, residual.dtype)


def _post_attn(
    hidden: Spec, attn_out: Spec, post_attn_w: Spec, wa: Spec, wb: Spec, wc: Spec, eps: float
) -> tuple[Spec, Spec, Spec, Spec]:
    weights = {"post_attn_w": post_attn_w, "wa": wa, "wb": wb, "wc": wc}
    y = _beside(eps, weights, {"attn_out": attn_out}, hidden=hidden)
    return hidden, y, y, y


@op(infer=_post_attn, alias=True)
def post_attn_triple_norm(
    hidden: Array, attn_out: Array, post_attn_w: Array, wa: Array, wb: Array, wc: Array, eps: float = 1e-6
) -> tuple[Array, Array, Array, Array]:
    """res = hidden + n(attn_out, post_attn_w); returns res in hidden's dtype and n(res, wa), n(res, wb), n(res, wc) in
    attn_out's.
    """
    res = f64(hidden) + normed(f64(attn_out), eps, post_attn_w)
    ya, yb, yc = (round_to(normed(res, eps, w), attn_out.dtype) for w in (wa, wb, wc))
    return round_to(res, hidden.dtype), ya, yb, yc


def _endlayer(
    addend: Spec,
    moe_accum: Spec,
    residual: Spec,
    w2: Spec,
    w3: Spec,
    layer_scalar: Spec | float,
    eps: float,
    return_mid: bool,
    w1: Spec | None,
) -> tuple[Spec | None, Spec]:
    rows = {"addend": addend, "moe_accum": moe_accum}
    y = _beside(eps, {"w1": w1, "w2": w2, "w3": w3}, rows, residual=residual)
    _scalar("layer_scalar", layer_scalar, y.shape[-1])
    return y if return_mid else None, residual


def _end_of_layer(
    addend: Array,
    v: Array,
    residual: Array,
    w2: Array,
    w3: Array,
    scalar: Array | float,
    eps: float,
    mid_dtype: np.dtype | None,
) -> tuple[Array | None, Array]:
    """addend and v are float64; hidden has the dtype of residual, mid_dtype None: mid is not asked for."""
    mid = addend + normed(v, eps, w2)
    hidden = (f64(residual) + normed(mid, eps, w3)) * _factor(scalar)
    return None if mid_dtype is None else round_to(mid, mid_dtype), round_to(hidden, residual.dtype)


@op(infer=_endlayer, alias=True)
def post_ff_norm2_endlayer(
    addend: Array,
    moe_accum: Array,
    residual: Array,
    w2: Array,
    w3: Array,
    layer_scalar: Array | float,
    eps: float = 1e-6,
    return_mid: bool = True,
    w1: Array | None = None,
) -> tuple[Array | None, Array]:
    """m = addend + n(moe_accum, w2); h = (residual + n(m, w3)) · layer_scalar; returns m (unless told not to) and h.

    For a Gemma 4 layer addend is the normed output of the dense MLP and residual the stream after attention. With w1
    n(addend, w1) stands in the place of addend. m has addend's dtype, h residual's.
    """
    first = f64(addend) if w1 is None else normed(f64(addend), eps, w1)
    mid = addend.dtype if return_mid else None
    return _end_of_layer(first, f64(moe_accum), residual, w2, w3, layer_scalar, eps, mid)


def _wsum_endlayer(
    expert_out: Spec,
    weights: Spec,
    addend: Spec,
    residual: Spec,
    w2: Spec,
    w3: Spec,
    layer_scalar: Spec | float,
    eps: float,
    return_mid: bool,
) -> tuple[Spec | None, Spec]:
    y = _wsum(expert_out, weights, eps, {"w2": w2, "w3": w3}, addend=addend, residual=residual)
    _scalar("layer_scalar", layer_scalar, y.shape[-1])
    return y if return_mid else None, y


@op(infer=_wsum_endlayer, alias=True)
def moe_wsum_post_ff_norm2_endlayer(
    expert_out: Array,
    weights: Array,
    addend: Array,
    residual: Array,
    w2: Array,
    w3: Array,
    layer_scalar: Array | float,
    eps: float = 1e-6,
    return_mid: bool = True,
) -> tuple[Array | None, Array]:
    """`post_ff_norm2_endlayer` with moe_accum = Σ_i expert_out[:, i] · weights[:, i] formed on the way."""
    mid = addend.dtype if return_mid else None
    return _end_of_layer(f64(addend), expert_sum(expert_out, weights), residual, w2, w3, layer_scalar, eps, mid)
