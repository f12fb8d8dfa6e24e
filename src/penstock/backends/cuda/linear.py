"""Products with dense and quantized weights: a matvec for one row (`_matvec`), lanes for a few rows of codes
(`_few_rows`), tiles for many (`_gemm`), and for many with codes that may not be rounded (`_exact`).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda import _tuning
from penstock.backends.cuda._activations import gated, round_activations
from penstock.backends.cuda._exact import exact_product, takes_exactly
from penstock.backends.cuda._few_rows import few_rows, refused, takes
from penstock.backends.cuda._floats import global_factor, is_float, kernel_arrays, kind_of, width
from penstock.backends.cuda._gemm import dense_blocks
from penstock.backends.cuda._launch import flat_rows, multiprocessors
from penstock.backends.cuda._matvec import matvec, same_codes
from penstock.backends.cuda._matvec_experts import expert_rows
from penstock.backends.cuda._quant import code_at, dequantized, float_weights
from penstock.backends.cuda._tuning import FEW_EXACT, FEW_MOST, FEW_NARROW, FEW_ONE, MATVEC_EXACT, MATVEC_TOKENS, SCORES
from penstock.backends.cuda.norm import rms_norm
from penstock.errors import BackendError
from penstock.ops.op import deterministic, kernel
from penstock.quant import ExpertBlobs, GgufTensor, QuantizedTensor

VARIANTS = ("matvec", "tiles")
CODED = ("matvec", "lanes", "tiles")  # of quantized weights


# dequantize  out[g, j] = code[g, j] * scale[g] + bias[g] in out's dtype, or float(code[g, j]) * scale[g]
# shapes      packed words, groups [groups, gs] of all rows one after the other; scale, bias [groups]; of floats b is a
#             global scale for every `per_expert` groups, or None
# grid        (ceil(groups / ROWS),): a program has ROWS groups, which are adjacent in every array
# bytes       packed, scales and biases in, out written once
# limits      none
@triton.jit
def _dequantize_kernel(
    w_ptr, s_ptr, b_ptr, y_ptr, groups, per_expert, BITS: tl.constexpr, GS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < groups
    j = tl.arange(0, GS)[None, :]
    code = code_at(w_ptr + (row * (GS * width(BITS) // 32))[:, None], j, live[:, None], BITS)
    scale = tl.load(s_ptr + row, mask=live, other=0)[:, None]
    if is_float(BITS):
        factor = None if b_ptr is None else global_factor(b_ptr, row // per_expert, live)[:, None]
        y = float_weights(code, scale, factor, BITS, y_ptr.dtype.element_ty)
    else:
        bias = tl.load(b_ptr + row, mask=live, other=0.0)[:, None]
        y = dequantized(code, scale, bias, y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None] * GS + j, y, mask=live[:, None])


@kernel(ops.dequantize, device="cuda")
def dequantize(w, dtype, *, out):
    if isinstance(w, GgufTensor):
        if out.numel():
            dense_blocks(w, out)
        return
    groups = w.scales.numel()
    if groups:
        rows, each = 4096 // w.group_size, w.scales.shape[-1] * w.scales.shape[-2]
        _dequantize_kernel[(triton.cdiv(groups, rows),)](
            *kernel_arrays(w), out, groups, each, BITS=kind_of(w), GS=w.group_size, ROWS=rows
        )


def _few(rows: torch.Tensor, variant: str | None, exact: bool = False) -> bool:
    """Whether the matvec takes these rows. Deterministic rows all go one way.

    exact: a small weight that may not be rounded. The tiles of many rows take float32 for it, which is slow.
    """
    most = MATVEC_EXACT[0] if exact else MATVEC_TOKENS
    return variant == "matvec" or (variant is None and len(rows) <= most and not deterministic())


def _exact(activations: torch.dtype, w: Any, out: torch.Tensor) -> bool:
    """Whether a float32 result of codes is asked for, of few of them: the scores of a router."""
    asked = isinstance(w, QuantizedTensor) and out.dtype is torch.float32 and activations is not out.dtype
    return asked and w.shape[0] <= MATVEC_EXACT[1]


def _by_lanes(x: torch.Tensor, weights: tuple[Any, ...], variant: str | None, exact: bool = False) -> bool:
    """Whether lanes take these rows; exact: the result is float32 and the weight may not be rounded."""
    if variant not in (None, "lanes"):
        return False
    fit = takes(x, *weights) and same_codes(*weights)
    if variant == "lanes" and not fit:
        raise refused(x, *weights)
    T, N = len(x), weights[0].shape[0]
    if variant == "lanes" or not fit:
        return variant == "lanes"
    if T == 1:
        least = FEW_ONE.get(weights[0].mode)
        return least is not None and least * multiprocessors(x) <= N
    narrow, most = FEW_EXACT
    return (2 * FEW_MOST if N <= FEW_NARROW else FEW_MOST) >= T or (exact and (narrow >= N or most >= T))


def product(
    x: torch.Tensor,
    w: Any,
    out: torch.Tensor,
    variant: str | None,
    half: bool = False,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """out [..., N] = residual + bias + x [..., K] · w [N, K]; out may be residual.

    half: what is made of a float32 out is rounded to x's dtype in the end, so weights rounded to it will do.
    """
    if out.numel() == 0:
        return
    x, out = flat_rows(x), flat_rows(out)
    residual = None if residual is None else flat_rows(residual)
    exact = out.dtype is torch.float32 and x.dtype is not out.dtype and not half
    alone = variant is None and bias is None and not deterministic()
    if alone and takes_exactly(x, w, out, exact):
        exact_product(x, w, out, residual)
        return
    lanes = _by_lanes(x, (w,), variant, exact)
    if not lanes and _few(x, variant, _exact(x.dtype, w, out) and not half):
        matvec(x, w, out, residual=residual, bias=bias)
        return
    if bias is not None:
        rows = bias.expand(out.shape)
        residual = rows.contiguous() if residual is None else torch.add(residual, rows)
    if lanes:
        few_rows(x, w, out, residual)
        return
    from penstock.backends.cuda._gemm import dense_gemm, quantized_gemm

    if isinstance(w, QuantizedTensor):
        quantized_gemm(x, w, out, half, residual)
    elif residual is None:
        dense_gemm(x, w, out)
    else:
        more = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        dense_gemm(x, w, more)
        torch.add(residual, more, out=out)


@kernel(ops.matmul, device="cuda", variants=VARIANTS)
def matmul(x, w, dtype, *, out, variant):
    product(x, w, out, variant)


@kernel(ops.bf16_matmul, device="cuda", variants=VARIANTS)
def bf16_matmul(x, w, dtype, *, out, variant):
    product(x, w, out, variant)


@kernel(ops.quantized_matmul, device="cuda", variants=CODED)
def quantized_matmul(x, w, activations, dtype, *, out, variant):
    if _rounds(activations, w):
        x = round_activations(x, w.group_size)
    product(x, w, out, variant)


def gate_up(x, gate_w, up_w, act: str, activations: str, out: torch.Tensor, variant: str | None) -> None:
    """out = act(gate_w · x) · (up_w · x)."""
    if out.numel() == 0:
        return
    if _rounds(activations, gate_w):
        x = round_activations(x, gate_w.group_size)
    x, y = flat_rows(x), flat_rows(out)
    if _by_lanes(x, (gate_w, up_w), variant):
        few_rows(x, gate_w, y, up=up_w, act=act)
        return
    if _few(x, variant) and gate_w.global_scale is None is up_w.global_scale:
        matvec(x, gate_w, y, up_w, act)
        return
    gate, up = (torch.empty(y.shape, dtype=torch.float32, device=y.device) for _ in range(2))
    how = "matvec" if _few(x, variant) else "tiles"
    product(x, gate_w, gate, how, half=True)
    product(x, up_w, up, how, half=True)
    gated(gate, up, act, y)


@kernel(ops.fused_gate_up_swiglu, device="cuda", variants=CODED)
def fused_gate_up_swiglu(x, gate_w, up_w, activations, *, out, variant):
    gate_up(x, gate_w, up_w, "silu", activations, out, variant)


@kernel(ops.fused_gate_up_geglu, device="cuda", variants=CODED)
def fused_gate_up_geglu(x, gate_w, up_w, activations, *, out, variant):
    gate_up(x, gate_w, up_w, "gelu_tanh", activations, out, variant)


def _rounds(activations: str, w: Any) -> bool:
    """Whether a product with w reads its activations rounded to 8 bits."""
    return activations == "int8" and isinstance(w, QuantizedTensor)


@kernel(ops.norm_matmul, device="cuda", variants=CODED)
def norm_matmul(x, norm_weight, w, eps, activations, dtype, normed, *, out, variant):
    if out.numel() == 0:
        return
    rows, kind = flat_rows(x), x.dtype if normed is None else getattr(torch, normed)
    alone = variant == "matvec" or (len(rows) == 1 and w.shape[1] <= _tuning.MATVEC_NORM)
    if alone and not _rounds(activations, w) and _few(rows, variant, _exact(kind, w, out)):
        matvec(rows, w, flat_rows(out), norm=norm_weight, eps=eps, normed=kind)
        return
    ready = torch.empty(rows.shape, dtype=kind, device=rows.device)
    y, plain = flat_rows(out), variant is None and not _rounds(activations, w) and not deterministic()
    exact = y.dtype is torch.float32 and kind is not torch.float32
    if plain and len(rows) < SCORES[0] and takes_exactly(ready, w, y, exact):
        exact_product(rows, w, y, None, norm_weight, eps, kind)
        return
    rms_norm(rows, norm_weight, eps, out=ready)
    product(round_activations(ready, w.group_size) if _rounds(activations, w) else ready, w, out, variant)


@kernel(ops.matmul_add, device="cuda", variants=CODED)
def matmul_add(residual, x, w, activations, bias, *, out, variant):
    if out.numel() == 0:
        return
    if _rounds(activations, w):
        x = round_activations(x, w.group_size)
    if x.data_ptr() == out.data_ptr():  # of one shape: columns of out would be written while x is read
        x = x.clone()
    product(x, w, out, variant, half=out.dtype is x.dtype, residual=residual, bias=bias)


def _sequence_product(
    x: torch.Tensor, experts: Any, ids: torch.Tensor | None, slot_of: torch.Tensor | None, pairs_per_x: int,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Experts that are no stack: one launch each, over all pairs where the ids are known to the device only."""
    pairs = len(out)
    if ids is None and slot_of is None:
        for p, w in enumerate(experts):
            matvec(x[p // pairs_per_x : p // pairs_per_x + 1], w, out[p : p + 1])
        return
    ids = torch.arange(pairs, dtype=torch.int32, device=x.device) if ids is None else ids.view(-1)
    if slot_of is not None:
        known = (ids >= 0) & (ids < len(slot_of))
        ids = torch.where(known, slot_of[ids.clamp(0, len(slot_of) - 1)], -1)
    out.zero_()
    part = torch.empty_like(out)
    for slot, w in enumerate(experts):
        mine = ids == slot
        expert_rows(x, w, torch.where(mine, 0, -1).to(torch.int32), None, pairs_per_x, part, stack=1)
        torch.where(mine[:, None], part, out, out=out)


@kernel(ops.expert_matmul, device="cuda")
def expert_matmul(x, experts, ids, slot_of, activations, *, out):
    if isinstance(experts, ExpertBlobs):
        raise BackendError("expert_matmul: experts are ExpertBlobs in host memory, expected a stack on cuda")
    if out.numel() == 0:
        return
    sequence = isinstance(experts, list | tuple)
    first = experts[0] if sequence else experts
    if _rounds(activations, first):
        x = round_activations(x, first.group_size)
    N = out.shape[-1]
    rows, y = flat_rows(x), out.view(-1, N)
    pairs_per_x = len(y) // len(rows)
    if sequence:
        _sequence_product(rows, experts, ids, slot_of, pairs_per_x, y)
        return
    if ids is None and slot_of is not None:
        ids = torch.arange(len(slot_of), dtype=torch.int32, device=x.device)
    expert_rows(rows, experts, ids, slot_of, pairs_per_x, y)
