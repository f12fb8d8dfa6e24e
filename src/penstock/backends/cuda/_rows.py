"""What kernels that own whole rows share: how many rows and warps a program gets, loads, the norm of a row."""

import functools
from typing import NamedTuple

import triton
import triton.language as tl

from penstock.backends.cuda._launch import WIDENED
from penstock.backends.cuda._tuning import ROW_NUMBERS, ROW_THREAD, ROW_WARPS
from penstock.errors import BackendError
from penstock.ops import linear

FOREIGN = tl.constexpr(linear.FOREIGN)
WIDEST = 65536  # numbers of a row; above 16384 a program's registers no longer hold it and it spills to memory


class Tile(NamedTuple):
    """A program's share: R rows, BLOCK columns of which the first dim are live."""

    R: int
    BLOCK: int
    warps: int


@functools.cache
def tile(op: str, dim: int, numbers: int = ROW_NUMBERS, per_thread: int = ROW_THREAD) -> Tile:
    """The share of a program that holds whole rows of this width, at least `numbers` in all. It depends on the width
    alone, never on the number of rows, so that the bits of a row do not depend on the rows around it.
    """
    if dim > WIDEST:
        raise BackendError(f"{op}: the last axis has {dim} numbers, expected at most {WIDEST} on cuda")
    block = triton.next_power_of_2(dim)
    fewest, most = ROW_WARPS
    return Tile(max(1, numbers // block), block, max(fewest, min(most, block // (32 * per_thread))))


@triton.jit
def rounded(y, dtype: tl.constexpr):
    """y of any float to the nearest number of `dtype`, ties to even."""
    if WIDENED and dtype == tl.bfloat16 and y.dtype != tl.bfloat16:
        y = y.to(tl.float32)
        bits = y.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        y = tl.where(y == y, nearest, bits | 0x400000).to(tl.float32, bitcast=True)
    return y.to(dtype)


@triton.jit
def rinv(v, dim, eps):
    """1 / sqrt(mean(v²) + eps) of the rows of v [R, BLOCK] float32, 0 beyond dim: [R, 1]."""
    return tl.rsqrt(tl.sum(v * v, axis=1, keep_dims=True) / dim + eps)


@triton.jit
def vector(ptr, col, dim):
    """A parameter vector [dim] as float32 [1, BLOCK]."""
    return tl.load(ptr + col, mask=col < dim, other=0.0).to(tl.float32)[None, :]


@triton.jit
def adds(id_ptr, slot_of_ptr, known, live):
    """Whether the experts whose ids are there add to a sum: not those below 0, nor, of the `known`, other ranks'."""
    expert = tl.load(id_ptr, mask=live, other=-1)
    there = expert >= 0
    if slot_of_ptr is not None:
        place = tl.load(slot_of_ptr + expert, mask=there & (expert < known), other=0)
        there = there & (place != FOREIGN)
    return there


@triton.jit
def expert_sum(x_ptr, slots_ptr, ids_ptr, slot_of_ptr, known, row, col, live, rows, dim, K: tl.constexpr):
    """Σ_i slots[row, i] · x[row, i, col] in float32, slot after slot; x [rows, K, dim], slots [rows, K]: [R, BLOCK].

    With ids [rows, K] those below 0, and of the `known` experts in slot_of other ranks', add nothing, whatever x and
    slots have there.
    """
    total = tl.zeros(live.shape, tl.float32)
    for i in tl.range(0, K, loop_unroll_factor=8):  # eight independent loads in flight
        slot = tl.load(slots_ptr + row * K + i, mask=row < rows, other=0.0)
        x = tl.load(x_ptr + (row[:, None] * K + i) * dim + col[None, :], mask=live, other=0.0).to(tl.float32)
        if ids_ptr is not None:  # x is read all the same, not to wait for the id
            there = adds(ids_ptr + row * K + i, slot_of_ptr, known, row < rows)
            slot = tl.where(there, slot, 0.0)
            x = tl.where(there[:, None], x, 0.0)
        total += x * slot[:, None]
    return total
