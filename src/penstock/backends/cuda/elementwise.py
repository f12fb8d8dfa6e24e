"""CUDA kernels of the elementwise ops: one over flat arrays, one with a vector for all rows, one for expert sums.

All are bandwidth bound: 16-byte accesses, several in flight per thread, arithmetic in float32.
"""

import functools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda._launch import gelu_tanh as gelu
from penstock.backends.cuda._launch import pdl_options, sigmoid, silu, tanh, wait_for_previous
from penstock.backends.cuda._rows import expert_sum, rounded
from penstock.backends.cuda._tuning import ELEMENT_WARPS, ELEMENTS
from penstock.ops.op import kernel


@triton.jit
def _combined(a, b, OP: tl.constexpr):
    """OP of two float32 tiles."""
    if OP == "add":
        y = a + b
    elif OP == "mul":
        y = a * b
    elif OP == "swiglu":
        y = silu(a) * b
    elif OP == "geglu":
        y = gelu(a) * b
    else:
        tl.static_assert(OP == "gate")
        y = a * sigmoid(b)
    return y


# map       y[i] = OP(a[i], b[i]); without b OP(a[i], number), the number being high + low, or b's one element
# shapes    a, y flat [n]; b flat [n], one element (ONE), or None
# grid      (ceil(n / BLOCK),)
# bytes     itemsize · n · (2, with a whole b 3)
# limits    y may lie over a or b
@triton.jit
def _map_kernel(
    a_ptr, b_ptr, y_ptr, n, high, low, OP: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    a = tl.load(a_ptr + at, mask=live, other=0.0).to(tl.float32)
    if b_ptr is None:
        if OP == "add":
            y = (a + high) + low
        elif OP == "mul":
            y = tl.fma(a, high, a * low)
        elif OP == "gelu":
            y = gelu(a)
        else:
            tl.static_assert(OP == "softcap")
            y = high * tanh(a / high)
    elif ONE:
        y = _combined(a, tl.load(b_ptr).to(tl.float32), OP)
    else:
        y = _combined(a, tl.load(b_ptr + at, mask=live, other=0.0).to(tl.float32), OP)
    tl.store(y_ptr + at, rounded(y, y_ptr.dtype.element_ty), mask=live)


@functools.lru_cache(maxsize=256)
def _split(number: float) -> tuple[float, float]:
    """A float64 as the sum of two float32, which is how a kernel gets it."""
    high = float(np.float32(number))
    return high, number - high if np.isfinite(high) else 0.0


def _map(a: torch.Tensor, b: torch.Tensor | None, out: torch.Tensor, how: str, number: float = 0.0) -> None:
    n = a.numel()
    if n == 0:
        return
    one = b is not None and b.numel() == 1 < n
    numbers = _split(number)
    _map_kernel[(triton.cdiv(n, ELEMENTS),)](
        a, b, out, n, *numbers, OP=how, ONE=one, BLOCK=ELEMENTS, num_warps=ELEMENT_WARPS, **pdl_options()
    )


# row map   y[r, :] = OP(a[r, :], b)
# shapes    a, y [rows, dim], b [dim]
# grid      (ceil(rows / R), ceil(dim / COLS)): R rows of COLS columns
# bytes     2 · itemsize · rows · dim; b stays in cache
# limits    dim ≤ 65535 · COLS
@triton.jit(do_not_specialize=["rows"])
def _row_map_kernel(
    a_ptr, b_ptr, y_ptr, rows, dim, OP: tl.constexpr, R: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    live = (row < rows)[:, None] & (col < dim)[None, :]
    at = row[:, None] * dim + col[None, :]
    a = tl.load(a_ptr + at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + col, mask=col < dim, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, rounded(_combined(a, b[None, :], OP), y_ptr.dtype.element_ty), mask=live)


def _tiling(out: torch.Tensor) -> tuple[tuple[int, int], int, int, dict[str, int]]:
    """Grid, rows, columns and the constants of a kernel that takes R rows of COLS columns of `out` [..., dim]."""
    dim = out.shape[-1]
    rows = out.numel() // dim
    columns = min(triton.next_power_of_2(dim), ELEMENTS)
    R = ELEMENTS // columns
    grid = (triton.cdiv(rows, R), triton.cdiv(dim, columns))
    return grid, rows, dim, {"R": R, "COLS": columns, "num_warps": ELEMENT_WARPS}


def _broadcast(a: torch.Tensor, b: Any, out: torch.Tensor, how: str) -> None:
    """add and mul: b is a number, an array like a, one element, or a vector for all rows."""
    if not isinstance(b, torch.Tensor):
        _map(a, None, out, how, float(b))
    elif b.numel() in (1, a.numel()):
        _map(a, b, out, how)
    elif a.numel() > 0:
        grid, rows, dim, constants = _tiling(out)
        _row_map_kernel[grid](a, b, out, rows, dim, OP=how, **constants, **pdl_options())


@kernel(ops.add, device="cuda")
def add(a, b, *, out):
    _broadcast(a, b, out, "add")


@kernel(ops.mul, device="cuda")
def mul(a, b, *, out):
    _broadcast(a, b, out, "mul")


@kernel(ops.residual_add, device="cuda")
def residual_add(a, b, *, out):
    _map(a, b, out, "add")


@kernel(ops.gelu_tanh, device="cuda")
def gelu_tanh(x, *, out):
    _map(x, None, out, "gelu")


@kernel(ops.swiglu, device="cuda")
def swiglu(gate, up, *, out):
    _map(gate, up, out, "swiglu")


@kernel(ops.geglu, device="cuda")
def geglu(gate, up, *, out):
    _map(gate, up, out, "geglu")


@kernel(ops.softcap, device="cuda")
def softcap(x, cap, *, out):
    _map(x, None, out, "softcap", float(cap))


@kernel(ops.sigmoid_gate, device="cuda")
def sigmoid_gate(x, gate, *, out):
    _map(x, gate, out, "gate")


@kernel(ops.columns, device="cuda")
def columns(x, start, stop, dtype, *, out):
    out.copy_(x[:, start:stop])


# split     part[t, :] = x[t, start : start + columns of the part], parts one after the other
# shapes    x [rows, N]; parts [rows, a], [rows, b], [rows, c], [rows, N - a - b - c], the last two may be None
# grid      (rows, ceil(N / BLOCK)): BLOCK columns of a row
# bytes     2 · itemsize · rows · N
# limits    N ≤ 65535 · BLOCK
@triton.jit(do_not_specialize=["a", "b", "c"])
def _split_kernel(x_ptr, a_ptr, b_ptr, c_ptr, d_ptr, N, a, b, c, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + col, mask=col < N, other=0.0)
    tl.store(a_ptr + row * a + col, x, mask=col < a)
    col -= a
    tl.store(b_ptr + row * b + col, x, mask=(col >= 0) & (col < b))
    if c_ptr is not None:
        col -= b
        tl.store(c_ptr + row * c + col, x, mask=(col >= 0) & (col < c))
    if d_ptr is not None:
        col -= c
        tl.store(d_ptr + row * (N - a - b - c) + col, x, mask=(col >= 0) & (col < N - a - b - c))


@kernel(ops.split_columns, device="cuda")
def split_columns(x, first, second, third, fourth, *, out):
    if x.numel():
        grid = (len(x), triton.cdiv(x.shape[1], 2048))
        _split_kernel[grid](x, *out, x.shape[1], first, second, third, BLOCK=2048, num_warps=8, **pdl_options())


# weighted  y[t, :] = Σ_i weights[t, i] · x[t, i, :], slots in order; those of ids below 0 and of experts that
#           are other ranks' add nothing
# shapes    x [rows, K, dim], weights float32 [rows, K], ids int32 [rows, K] or None: all add, slot_of int32 [known] or
#           None: none is another rank's, y [rows, dim]
# grid      (ceil(rows / R), ceil(dim / COLS)): R rows of COLS columns
# bytes     itemsize · rows · dim · (K + 1)
# limits    dim ≤ 65535 · COLS
@triton.jit(do_not_specialize=["rows", "known"])
def _weighted_kernel(
    x_ptr, weights_ptr, ids_ptr, slot_of_ptr, y_ptr, rows, dim, known, K: tl.constexpr, R: tl.constexpr,
    COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    live = (row < rows)[:, None] & (col < dim)[None, :]
    y = expert_sum(x_ptr, weights_ptr, ids_ptr, slot_of_ptr, known, row, col, live, rows, dim, K)
    tl.store(y_ptr + row[:, None] * dim + col[None, :], rounded(y, y_ptr.dtype.element_ty), mask=live)


@kernel(ops.weighted_sum, device="cuda")
def weighted_sum(expert_out, weights, *, out):
    sum_of_chosen(expert_out, weights, None, None, out)


def sum_of_chosen(
    expert_out: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor | None, slot_of: torch.Tensor | None,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """`weighted_sum` without the slots whose id is negative or another rank's expert; ids None: of all."""
    if out.numel() == 0:
        return
    grid, rows, dim, constants = _tiling(out)
    known = 0 if slot_of is None else slot_of.numel()
    _weighted_kernel[grid](
        expert_out, weights, ids, slot_of, out, rows, dim, known, K=weights.shape[-1], **constants, **pdl_options()
    )
