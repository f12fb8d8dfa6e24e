"""Embedding look-ups on CUDA: rows of a dense or quantized table, bit for bit as the definitions."""

import torch
import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda._blocks import block_tile
from penstock.backends.cuda._floats import is_float, kernel_arrays, kind_of, width
from penstock.backends.cuda._launch import pdl_options, wait_for_previous
from penstock.backends.cuda._quant import code_at, dequantized, float_weights, unpack
from penstock.backends.cuda._rows import rounded
from penstock.backends.cuda._tuning import ELEMENTS, EMBED_COLUMNS
from penstock.ops.op import kernel
from penstock.quant import GgufTensor, QuantizedTensor


# gather    out[t] = table[ids[t]] rounded to out's dtype; zeros for an id outside of the table
# shapes    ids int32 [T]; table [vocab, dim], out [T, dim] of any float
# grid      (T, ceil(dim / BLOCK)): a program has BLOCK columns of a row
# bytes     T * dim of the table in and of out
# limits    none
@triton.jit
def _gather_kernel(ids_ptr, table_ptr, out_ptr, vocab, dim, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < dim
    index = tl.load(ids_ptr + row).to(tl.int64)
    held = tl.where((index >= 0) & (index < vocab), dim, 0)
    x = tl.load(table_ptr + index * dim + column, mask=column < held, other=0.0)
    tl.store(out_ptr + row * dim + column, rounded(x, out_ptr.dtype.element_ty), mask=live)


# gather_quantized  out[t] = code * scale + bias of row ids[t], in float32, rounded to out's dtype; zeros as above
# shapes    ids int32 [T]; packed int32 [vocab, dim * BITS / 32], scales, biases [vocab, dim / gs]; out [T, dim]
# grid      (T, ceil(dim / BLOCK)): a program has BLOCK columns of a row, 32 of them (BITS words) under one scale
# bytes     T rows of the table in, T * dim of out
# limits    gs a multiple of 32, except for codes that are floats; those have no global scale
@triton.jit
def _gather_quantized_kernel(
    ids_ptr, packed_ptr, scales_ptr, biases_ptr, out_ptr, vocab, dim,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    index = tl.load(ids_ptr + row).to(tl.int64)
    there = part < tl.where((index >= 0) & (index < vocab), dim // 32, 0)
    column = part[:, None] * 32 + tl.arange(0, 32)[None, :]
    words = packed_ptr + index * (dim // 32 * width(BITS))
    if 32 % width(BITS) == 0:
        word = part[:, None] * width(BITS) + tl.arange(0, width(BITS))[None, :]
        code = unpack(tl.load(words + word, mask=there[:, None], other=0), BITS)
    else:
        code = code_at(words, column, there[:, None], BITS)
    if is_float(BITS):
        at = index * (dim // GROUP) + column // GROUP
        scale = tl.load(scales_ptr + at, mask=there[:, None], other=0)
        y = float_weights(code, scale, None, BITS, tl.float32)
    else:
        group = index * (dim // GROUP) + part // (GROUP // 32)
        scale = tl.load(scales_ptr + group, mask=there, other=0.0)
        bias = tl.load(biases_ptr + group, mask=there, other=0.0)
        y = dequantized(code, scale[:, None], bias[:, None], tl.float32)
    tl.store(out_ptr + row * dim + column, rounded(y, out_ptr.dtype.element_ty), mask=column < dim)


# gather_blocks  out[t] = the weights of row ids[t] of planes, in float32, rounded to out's dtype; zeros as above
# shapes    ids int32 [T]; planes of [vocab, dim] weights; out [T, dim]
# grid      (T, ceil(dim / BLOCK)): a program has BLOCK columns of a row
# bytes     T rows of the table in, T * dim of out
# limits    none
@triton.jit
def _gather_blocks_kernel(
    ids_ptr, table, out_ptr, vocab, dim, BITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(ids_ptr + row + tl.zeros([1], tl.int64)).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    y = block_tile(table, index, (index >= 0) & (index < vocab), start, dim, 1, BLOCK, BITS)
    column = start + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + row * dim + column, rounded(y, out_ptr.dtype.element_ty), mask=column < dim)


def _sizes(out: torch.Tensor) -> tuple[tuple[int, int], int, int]:
    """Grid, block and warps for the rows of `out`."""
    dim = out.shape[-1]
    block = max(32, min(EMBED_COLUMNS, triton.next_power_of_2(dim)))
    return (out.numel() // dim, triton.cdiv(dim, block)), block, max(1, block // 512)


@kernel(ops.embedding, device="cuda")
def embedding(token_ids: torch.Tensor, table: torch.Tensor, dtype: str | None = None, *, out: torch.Tensor) -> None:
    if out.numel() == 0:
        return
    assert table.is_contiguous() and out.is_contiguous()
    grid, block, warps = _sizes(out)
    _gather_kernel[grid](token_ids, table, out, *table.shape, BLOCK=block, num_warps=warps, **pdl_options())


@kernel(ops.quantized_embedding, device="cuda")
def quantized_embedding(
    token_ids: torch.Tensor, table: QuantizedTensor, dtype: str | None = None, *, out: torch.Tensor
) -> None:
    if out.numel() == 0:
        return
    grid, block, warps = _sizes(out)
    if isinstance(table, GgufTensor):
        _gather_blocks_kernel[grid](
            token_ids, kernel_arrays(table), out, *table.shape,
            BITS=kind_of(table), BLOCK=block, num_warps=warps, **pdl_options(),
        )  # fmt: skip
        return
    _gather_quantized_kernel[grid](
        token_ids, *kernel_arrays(table), out, *table.shape,
        BITS=kind_of(table), GROUP=table.group_size, BLOCK=block, num_warps=warps, **pdl_options(),
    )  # fmt: skip


# ids_after_first  y[t] = -1 where positions[t] = 0, else ids[t]
# shapes    ids, positions, y int32 [T]
# grid      ceil(T / BLOCK)
# bytes     12 * T
# limits    none
@triton.jit(do_not_specialize=["T"])
def _after_first_kernel(ids_ptr, positions_ptr, out_ptr, T, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(ids_ptr + at, mask=at < T, other=-1)
    position = tl.load(positions_ptr + at, mask=at < T, other=0)
    tl.store(out_ptr + at, tl.where(position == 0, -1, own), mask=at < T)


@kernel(ops.ids_after_first, device="cuda")
def ids_after_first(ids, positions, *, out):
    T = ids.numel()
    if T:
        _after_first_kernel[(triton.cdiv(T, ELEMENTS),)](ids, positions, out, T, BLOCK=ELEMENTS, **pdl_options())
