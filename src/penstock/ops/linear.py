"""Products with dense and quantized weights, plain, fused with what surrounds them, and over stacks of experts.

A weight is [N, K]: row = output feature. Every op here gives y[t, n] = Σ_j x[t, j] · W[n, j] in some arrangement;
sums are formed in float64 and rounded once. With activations="int8" a quantized product reads x rounded to 8 bits per
group of the weight (as CPU kernels do for speed):

    delta = max|x| / 127, xq = rint(x / delta) in float32
    y = Σ_g (scale_g · delta_g · Σ_j code_j · xq_j + bias_g · delta_g · Σ_j xq_j)

In modes that are not affine code_j is the float it stands for, and bias is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from penstock import quant
from penstock.dtypes import FLOATS, numpy_dtype, round_to
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.ops import check
from penstock.ops.array import Array, Spec
from penstock.ops.elementwise import gelu, silu
from penstock.ops.norm import rms_norm
from penstock.ops.op import op
from penstock.quant import ExpertBlobs, QuantizedTensor, unpack_codes

ROUNDINGS = ("float32", "int8")
_BLOCK = 1 << 22  # weights made dense at a time: 32 MB of float64


# -- checks ----------------------------------------------------------------------------------------------------------


def weight_matrix(name: str, w: Spec | QuantizedTensor, K: int, lead: int = 0) -> int:
    """w is [N, K] behind `lead` leading axes, which may be empty; returns N."""
    check.axes("[E, N, K]" if lead else "[N, K]", 2 + lead, **{name: w})
    check.floating(**{name: w})
    check.filled(lead, **{name: w})
    if w.shape[-1] != K:
        raise ShapeError(f"{name} has shape {tuple(w.shape)}, expected a last axis of {K} (last axis of x)")
    return w.shape[-2]


def _product(x: Spec, w: Spec | QuantizedTensor, dtype: str | None) -> Spec:
    check.floating(x=x)
    check.axes("[T, K] or [K]", *range(1, 9), x=x)
    check.filled(x=x)
    N = weight_matrix("w", w, x.shape[-1])
    return Spec((*x.shape[:-1], N), check.result_dtype(x, dtype))


# -- arithmetic ------------------------------------------------------------------------------------------------------


def _blocks(w: Array | QuantizedTensor) -> Iterator[tuple[slice, Any]]:
    """Row slices of w small enough to make dense."""
    N, K = w.shape
    step = max(1, _BLOCK // K)
    if step >= N:
        yield slice(0, N), w
        return
    for start in range(0, N, step):
        rows = slice(start, min(start + step, N))
        part = w.rows(rows) if isinstance(w, QuantizedTensor) else w[rows]
        yield rows, part


def dense(w: Array | QuantizedTensor) -> Array:
    """The weight as float64."""
    return (quant.dequantize(w) if isinstance(w, QuantizedTensor) else w).astype(np.float64)


def _int8_product(x: Array, w: QuantizedTensor) -> Array:
    """The formula of the module's docstring for x [T, K]; float64 [T, N]."""
    groups = x.astype(np.float32).reshape(len(x), w.shape[1] // w.group_size, w.group_size)  # [T, G, gs]
    delta = np.max(np.abs(groups), axis=-1, keepdims=True, initial=0) / np.float32(127)
    xq = np.where(delta == 0, 0, np.clip(np.rint(groups / delta), -127, 127))
    rounded = (xq.astype(np.float64) * delta.astype(np.float64)).reshape(x.shape)
    sums = rounded.reshape(groups.shape).sum(axis=-1)  # [T, G]
    y = np.empty((len(x), w.shape[0]))
    for rows, part in _blocks(w):
        if part.mode != "affine":
            y[:, rows] = rounded @ dense(part).T
            continue
        scales = np.repeat(part.scales.astype(np.float64), w.group_size, axis=-1)
        y[:, rows] = rounded @ (unpack_codes(part.packed, w.bits) * scales).T + sums @ part.biases.astype(np.float64).T
    return y


def product(x: Array, w: Array | QuantizedTensor, activations: str = "float32") -> Array:
    """x [T, K] times w [N, K] transposed, in float64. Dense weights are always exact."""
    if activations == "int8" and isinstance(w, QuantizedTensor):
        return _int8_product(x, w)
    y = np.empty((len(x), w.shape[0]))
    for rows, part in _blocks(w):
        y[:, rows] = x.astype(np.float64) @ dense(part).T
    return y


def _matmul(x: Array, w: Array | QuantizedTensor, dtype: str | None, activations: str = "float32") -> Array:
    y = product(x.reshape(-1, x.shape[-1]), w, activations)
    return round_to(y.reshape(*x.shape[:-1], w.shape[0]), x.dtype if dtype is None else numpy_dtype(dtype))


# -- ops -------------------------------------------------------------------------------------------------------------


def _dequantized(w: QuantizedTensor, dtype: str) -> Spec:
    if dtype not in FLOATS:
        raise DTypeError(f"dtype is {dtype!r}, expected float32, float16 or bfloat16")
    return Spec(tuple(w.shape), dtype)


@op(infer=_dequantized)
def dequantize(w: QuantizedTensor, dtype: str = "float32") -> Array:
    """code · scale + bias for every weight, or float(code) · scale → [..., N, K].

    float32: one float32 multiply and one add, the same bits on every backend for half-precision scales. The scales' own
    dtype: product and sum rounded in that dtype, as MLX does. Any other, and modes that are not affine: the float32
    result rounded once.
    """
    return quant.dequantize(w, dtype)


@op(infer=_product)
def matmul(x: Array, w: Array, dtype: str | None = None) -> Array:
    """y[t, n] = Σ_j x[t, j] · w[n, j] with a dense weight of any float dtype.

    x [..., K], w [N, K] → [..., N] in x's dtype, or in `dtype`.
    """
    return _matmul(x, w, dtype)


def _bf16_product(x: Spec, w: Spec, dtype: str | None) -> Spec:
    check.dtype("bfloat16", w=w)
    return _product(x, w, dtype)


@op(infer=_bf16_product)
def bf16_matmul(x: Array, w: Array, dtype: str | None = None) -> Array:
    """`matmul` with a bfloat16 weight [N, K] (router gates that stay unquantized)."""
    return _matmul(x, w, dtype)


def _quantized_product(x: Spec, w: QuantizedTensor, activations: str, dtype: str | None) -> Spec:
    check.one_of(ROUNDINGS, activations=activations)
    return _product(x, w, dtype)


@op(infer=_quantized_product)
def quantized_matmul(x: Array, w: QuantizedTensor, activations: str = "float32", dtype: str | None = None) -> Array:
    """y[t, n] = Σ_j x[t, j] · (code[n, j] · scale[n, j // gs] + bias[n, j // gs]); see `quantize` for other modes.

    x [..., K], w [N, K] of 1 to 8 bits → [..., N] in x's dtype, or in `dtype`. activations="int8" rounds x per group.
    """
    return _matmul(x, w, dtype, activations)


def _gate_up(x: Spec, gate_w: QuantizedTensor, up_w: QuantizedTensor, activations: str) -> Spec:
    check.one_of(ROUNDINGS, activations=activations)
    y = _product(x, gate_w, None)
    check.shape(tuple(gate_w.shape), "as gate_w", up_w=up_w)
    for name in ("bits", "group_size", "mode"):
        if getattr(gate_w, name) != getattr(up_w, name):
            raise InvalidArgument(f"up_w has {name} {getattr(up_w, name)}, expected {getattr(gate_w, name)} as gate_w")
    return y


@op(infer=_gate_up)
def fused_gate_up_swiglu(
    x: Array, gate_w: QuantizedTensor, up_w: QuantizedTensor, activations: str = "float32"
) -> Array:
    """silu(gate_w · x) · (up_w · x) in one pass over x; both weights [N, K] of one format. x [..., K] → [..., N]."""
    rows = x.reshape(-1, x.shape[-1])
    y = silu(product(rows, gate_w, activations)) * product(rows, up_w, activations)
    return round_to(y.reshape(*x.shape[:-1], gate_w.shape[0]), x.dtype)


@op(infer=_gate_up)
def fused_gate_up_geglu(
    x: Array, gate_w: QuantizedTensor, up_w: QuantizedTensor, activations: str = "float32"
) -> Array:
    """gelu_tanh(gate_w · x) · (up_w · x): `fused_gate_up_swiglu` with the other activation."""
    rows = x.reshape(-1, x.shape[-1])
    y = gelu(product(rows, gate_w, activations)) * product(rows, up_w, activations)
    return round_to(y.reshape(*x.shape[:-1], gate_w.shape[0]), x.dtype)


def _norm_product(
    x: Spec,
    norm_weight: Spec,
    w: Spec | QuantizedTensor,
    eps: float,
    activations: str,
    dtype: str | None,
    normed: str | None,
) -> Spec:
    check.one_of(ROUNDINGS, activations=activations)
    check.eps(eps)
    check.floating(norm_weight=norm_weight)
    y = _product(Spec(x.shape, check.result_dtype(x, normed)), w, dtype)
    check.shape(x.shape[-1:], "last axis of x", norm_weight=norm_weight)
    return y


@op(infer=_norm_product)
def norm_matmul(
    x: Array,
    norm_weight: Array,
    w: QuantizedTensor | Array,
    eps: float = 1e-6,
    activations: str = "float32",
    dtype: str | None = None,
    normed: str | None = None,
) -> Array:
    """The product of rms_norm(x, norm_weight, eps, normed) with w: its rows are rounded to x's dtype, or to `normed`.

    x [..., K], norm_weight [K], w [N, K] quantized or dense → [..., N] in the dtype of the normed rows, or in `dtype`.
    """
    return _matmul(rms_norm.body(x, norm_weight, eps, normed), w, dtype, activations)


def _product_add(residual: Spec, x: Spec, w: Spec | QuantizedTensor, activations: str, bias: Spec | None) -> Spec:
    check.one_of(ROUNDINGS, activations=activations)
    check.floating(residual=residual, bias=bias)
    y = _product(x, w, residual.dtype)
    check.shape(y.shape, "that of x · w", residual=residual)
    check.shape(y.shape[-1:], "rows of w", bias=bias)
    return y


@op(infer=_product_add, alias=True)
def matmul_add(
    residual: Array, x: Array, w: QuantizedTensor | Array, activations: str = "float32", bias: Array | None = None
) -> Array:
    """residual + x · w + bias, rounded once to residual's dtype. x [..., K], w [N, K], residual [..., N], bias [N]."""
    y = product(x.reshape(-1, x.shape[-1]), w, activations).reshape(residual.shape)
    if bias is not None:
        y = y + bias.astype(np.float64)
    return round_to(residual.astype(np.float64) + y, residual.dtype)


# -- stacks of experts -----------------------------------------------------------------------------------------------

Experts = Any  # QuantizedTensor | Array [S, N, K] | Sequence[QuantizedTensor] | ExpertBlobs

# What `slot_of` says of an expert that is not in the stack.
ABSENT = -1  # not here yet: it can be fetched
FOREIGN = -2  # another rank's: it adds exactly 0, as if its id were −1


def expert_count(experts: Any) -> int:
    return len(experts) if isinstance(experts, list | tuple | ExpertBlobs) else experts.shape[0]


def expert_rows(experts: Any) -> int:
    """N of each expert, also where there is none."""
    return (experts[0] if isinstance(experts, list | tuple) else experts).shape[-2]


def expert_at(experts: Any, slot: int) -> Any:
    return experts.experts[slot] if isinstance(experts, ExpertBlobs) else experts[slot]


def check_slots(ids: Array, slots: int, slot_of: Array | None) -> None:
    """Every id names an expert that is in the stack or another rank's, or is −1."""
    if slot_of is None:
        check_ids(ids, slots)
    else:
        check_slot_of(ids, slot_of)
        named = slots_of(ids, slot_of)[ids >= 0]
        check.in_range("slot_of", named[named != FOREIGN], 0, slots, f"{slots} slots")


def check_slot_of(ids: Array, slot_of: Array) -> None:
    """Every id has an entry in slot_of, which has slots, −1 and −2, or is −1."""
    check_ids(ids, len(slot_of))
    least = check.bounds(slot_of)[0]
    if least < FOREIGN:
        raise InvalidArgument(f"slot_of has {least}, expected a slot, -1 (not here yet) or -2 (another rank's)")


def check_ids(ids: Array, experts: int) -> None:
    check.in_range("ids", ids, -1, experts, f"{experts} experts, -1: none")


def places(ids: Array, slot_of: Array | None) -> Array:
    """What slot_of says of the experts ids: places in the stack, or −1 and −2; −1 for id −1."""
    if slot_of is None:
        return ids
    if check.bounds(ids)[0] >= 0:
        return slot_of[ids]
    return np.append(slot_of, np.int32(ABSENT))[np.maximum(ids, -1)]


def slots_of(ids: Array, slot_of: Array | None) -> Array:
    """As `places`. Raises InvalidArgument for an expert that is not here yet, so that none is left out."""
    slots = places(ids, slot_of)
    if slot_of is not None and check.bounds(slots)[0] < 0:
        absent = ids[(slots < 0) & (slots != FOREIGN) & (ids >= 0)]
        if absent.size:
            raise InvalidArgument(f"ids has {absent[0]}, an absent expert (slot_of is -1), expected present ones")
    return slots


def counted(ids: Array, slot_of: Array | None) -> Array:
    """Which pairs add to a sum whose terms are given: those with an id that is not another rank's expert."""
    return ids >= 0 if slot_of is None else (ids >= 0) & (places(ids, slot_of) != FOREIGN)


def by_slot(slots: Array) -> Iterator[tuple[int, Array]]:
    """Each slot in use with the flat indices of the entries that name it; negative ones are none."""
    flat = slots.reshape(-1)
    for slot in np.unique(flat[flat >= 0]):
        yield int(slot), np.flatnonzero(flat == slot)


def _expert_product(x: Spec, experts: Any, ids: Spec | None, slot_of: Spec | None, activations: str) -> Spec:
    check.one_of(ROUNDINGS, activations=activations)
    check.floating(x=x)
    check.dtype("int32", ids=ids, slot_of=slot_of)
    check.axes("[E]", 1, slot_of=slot_of)
    each = experts if isinstance(experts, list | tuple) else (experts,)
    lead = 0 if isinstance(experts, list | tuple) else 1
    N = weight_matrix("experts", each[0], x.shape[-1] if x.ndim else 0, lead)
    for one in each[1:]:
        check.shape(tuple(each[0].shape), "as the first expert", experts=one)
    if ids is None:
        ids = Spec((expert_count(experts) if slot_of is None else slot_of.shape[0],), "int32")
    check.axes("[k] or [T, k]", 1, 2, ids=ids)
    check.filled(ids=ids)
    K = x.shape[-1]
    if x.shape not in ((*ids.shape[:-1], K), (*ids.shape, K)):
        raise ShapeError(
            f"x has shape {x.shape}, expected {(*ids.shape[:-1], K)} (shared) or {(*ids.shape, K)} (one each)"
        )
    return Spec((*ids.shape, N), x.dtype)


def _check_expert_product(experts: Any, ids: Array | None, slot_of: Array | None) -> None:
    if ids is None:
        ids = np.arange(expert_count(experts) if slot_of is None else len(slot_of), dtype=np.int32)
    check_slots(ids, expert_count(experts), slot_of)


@op(infer=_expert_product, check=_check_expert_product)
def expert_matmul(
    x: Array,
    experts: QuantizedTensor | Array | Sequence[QuantizedTensor] | ExpertBlobs,
    ids: Array | None = None,
    slot_of: Array | None = None,
    activations: str = "float32",
) -> Array:
    """y[i] = x (shared) or x[i] times expert ids[i].

    experts: stacked [S, N, K], a sequence of [N, K], or blobs; ids int32 [(T,) k], default all in order; x [(T,) K] for
    all, or [(T,) k, K] one each → [(T,) k, N]. slot_of int32 [E] maps an expert to its place in the stack; −1 = not
    here yet, which is refused, −2 = another rank's. Nothing is read for that, and for id −1, no expert: y[i] is 0.
    """
    if ids is None:
        ids = np.arange(expert_count(experts) if slot_of is None else len(slot_of), dtype=np.int32)
    K = x.shape[-1]
    rows = np.broadcast_to(x[..., None, :] if x.ndim == ids.ndim else x, (*ids.shape, K)).reshape(-1, K)
    y = np.zeros((len(rows), expert_rows(experts)))
    for slot, where in by_slot(slots_of(ids, slot_of)):
        y[where] = product(rows[where], expert_at(experts, slot), activations)
    return round_to(y.reshape(*ids.shape, y.shape[-1]), x.dtype)
