"""Activations before and after the products of `_matvec`: gated ones, and ones rounded to 8 bits."""

import torch
import triton
import triton.language as tl

from penstock.backends.cuda._launch import activation, pdl_options, wait_for_previous
from penstock.backends.cuda._rows import rounded


# gated     y[i] = act(gate[i]) * up[i]
# shapes    gate, up float32, y any float, all of one size
# grid      (ceil(size / BLOCK),)
# bytes     each once
# limits    none
@triton.jit
def _gated_kernel(gate_ptr, up_ptr, y_ptr, size, ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < size, other=0.0)
    up = tl.load(up_ptr + at, mask=at < size, other=0.0)
    tl.store(y_ptr + at, rounded(activation(gate, ACT) * up, y_ptr.dtype.element_ty), mask=at < size)


# round     y[t, g * gs + j] = rint(x / d) * d with d = max |x| / 127 of the group, in float32; 0 where d = 0
# shapes    x, y [groups, GS]
# grid      (ceil(groups / ROWS),)
# bytes     x once, y once
# limits    none
@triton.jit
def _round_kernel(x_ptr, y_ptr, groups, GS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = row * GS + tl.arange(0, GS)[None, :]
    x = tl.load(x_ptr + at, mask=row < groups, other=0.0).to(tl.float32)
    delta = tl.div_rn(tl.max(tl.abs(x), 1), 127.0)[:, None]
    ratio = tl.div_rn(x, tl.where(delta == 0, 1.0, delta))
    # Adding and taking away 1.5 · 2^23 rounds to the nearest even integer.
    whole = tl.minimum(tl.maximum((ratio + 12582912.0) - 12582912.0, -127.0), 127.0)
    tl.store(y_ptr + at, whole * delta, mask=row < groups)


def gated(gate: torch.Tensor, up: torch.Tensor, act: str, out: torch.Tensor) -> None:
    """out = act(gate) · up; gate and up float32."""
    _gated_kernel[(triton.cdiv(out.numel(), 1024),)](gate, up, out, out.numel(), ACT=act, BLOCK=1024, **pdl_options())


def round_activations(x: torch.Tensor, gs: int) -> torch.Tensor:
    """x [T, K] rounded to 8 bits per group of gs, as float32: what a product with activations="int8" reads."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    groups = x.numel() // gs
    if groups:
        _round_kernel[(triton.cdiv(groups, 8),)](x, y, groups, GS=gs, ROWS=8, num_warps=1, **pdl_options())
    return y
