"""Products with dense and quantized weights: a matvec for few rows (`_matvec`), tiles for many (`_gemm`)."""

from typing import Any

import torch
import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda._launch import flat_rows
from penstock.backends.cuda._matvec import TOKENS, expert_rows, gated, matvec, round_activations
from penstock.backends.cuda._quant import code_at, dequantized
from penstock.errors import BackendError
from penstock.ops._op import deterministic, kernel
from penstock.quant import ExpertBlobs, QuantizedTensor

VARIANTS = ("matvec", "tiles")


# dequantize  out[g, j] = code[g, j] * scale[g] + bias[g] in out's dtype
# shapes      packed words, groups [groups, gs] of all rows one after the other; scale, bias [groups]
# grid        (ceil(groups / ROWS),): a program has ROWS groups, which are adjacent in every array
# bytes       packed, scales and biases in, out written once
# limits      none
@triton.jit
def _dequantize_kernel(
    w_ptr, s_ptr, b_ptr, y_ptr, groups, BITS: tl.constexpr, GS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < groups
    j = tl.arange(0, GS)[None, :]
    code = code_at(w_ptr + (row * (GS * BITS // 32))[:, None], j, live[:, None], BITS)
    scale = tl.load(s_ptr + row, mask=live, other=0.0)[:, None]
    bias = tl.load(b_ptr + row, mask=live, other=0.0)[:, None]
    y = dequantized(code, scale, bias, y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None] * GS + j, y, mask=live[:, None])


@kernel(ops.dequantize, device="cuda")
def dequantize(w, dtype, *, out):
    groups = w.scales.numel()
    if groups:
        rows = 4096 // w.group_size
        _dequantize_kernel[(triton.cdiv(groups, rows),)](
            *w.arrays, out, groups, BITS=w.bits, GS=w.group_size, ROWS=rows
        )


def _product(x: torch.Tensor, w: Any, out: torch.Tensor, variant: str | None) -> None:
    """out [..., N] = x [..., K] · w [N, K]."""
    if out.numel() == 0:
        return
    x, out = flat_rows(x), flat_rows(out)
    if variant is None:
        # Deterministic rows do not depend on how many there are: one kernel for all of them.
        variant = "matvec" if len(x) <= TOKENS and not deterministic() else "tiles"
    if variant == "matvec":
        matvec(x, w, out)
        return
    from penstock.backends.cuda._gemm import dense_gemm, quantized_gemm

    (quantized_gemm if isinstance(w, QuantizedTensor) else dense_gemm)(x, w, out)


@kernel(ops.matmul, device="cuda", variants=VARIANTS)
def matmul(x, w, dtype, *, out, variant):
    _product(x, w, out, variant)


@kernel(ops.bf16_matmul, device="cuda", variants=VARIANTS)
def bf16_matmul(x, w, dtype, *, out, variant):
    _product(x, w, out, variant)


@kernel(ops.quantized_matmul, device="cuda", variants=VARIANTS)
def quantized_matmul(x, w, activations, dtype, *, out, variant):
    if activations == "int8":
        x = round_activations(x, w.group_size)
    _product(x, w, out, variant)


@kernel(ops.fused_gate_up_swiglu, device="cuda", variants=VARIANTS)
def fused_gate_up_swiglu(x, gate_w, up_w, activations, *, out, variant):
    if out.numel() == 0:
        return
    if activations == "int8":
        x = round_activations(x, gate_w.group_size)
    x, y = flat_rows(x), flat_rows(out)
    if variant == "matvec" or (variant is None and len(x) <= TOKENS and not deterministic()):
        matvec(x, gate_w, y, up_w, "silu")
        return
    gate, up = (torch.empty(y.shape, dtype=torch.float32, device=y.device) for _ in range(2))
    _product(x, gate_w, gate, "tiles")
    _product(x, up_w, up, "tiles")
    gated(gate, up, "silu", y)


def _sequence_product(
    x: torch.Tensor, experts: Any, ids: torch.Tensor | None, slot_of: torch.Tensor | None, share: int, out: torch.Tensor
) -> None:
    """Experts that are no stack: one launch each, over all pairs where the ids are known to the device only."""
    pairs = len(out)
    if ids is None and slot_of is None:
        for p, w in enumerate(experts):
            matvec(x[p // share : p // share + 1], w, out[p : p + 1])
        return
    ids = torch.arange(pairs, dtype=torch.int32, device=x.device) if ids is None else ids.view(-1)
    if slot_of is not None:
        known = (ids >= 0) & (ids < len(slot_of))
        ids = torch.where(known, slot_of[ids.clamp(0, len(slot_of) - 1)], -1)
    out.zero_()
    part = torch.empty_like(out)
    for slot, w in enumerate(experts):
        mine = ids == slot
        expert_rows(x, w, torch.where(mine, 0, -1).to(torch.int32), None, share, part, stack=1)
        torch.where(mine[:, None], part, out, out=out)


@kernel(ops.expert_matmul, device="cuda")
def expert_matmul(x, experts, ids, slot_of, activations, *, out):
    if isinstance(experts, ExpertBlobs):
        raise BackendError("expert_matmul: experts are ExpertBlobs in host memory, expected a stack on cuda")
    if out.numel() == 0:
        return
    sequence = isinstance(experts, list | tuple)
    first = experts[0] if sequence else experts
    if activations == "int8" and isinstance(first, QuantizedTensor):
        x = round_activations(x, first.group_size)
    N = out.shape[-1]
    rows, y = flat_rows(x), out.view(-1, N)
    share = len(y) // len(rows)
    if sequence:
        _sequence_product(rows, experts, ids, slot_of, share, y)
        return
    if ids is None and slot_of is not None:
        ids = torch.arange(len(slot_of), dtype=torch.int32, device=x.device)
    expert_rows(rows, experts, ids, slot_of, share, y)
