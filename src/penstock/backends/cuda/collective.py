"""Collectives of GPU arrays: what the ranks' communicator does, and the copies around it. NCCL's are captured."""

import torch
import triton
import triton.language as tl

from penstock import ops
from penstock.backends.cuda._launch import pdl_options, wait_for_previous
from penstock.backends.cuda._tuning import ELEMENTS
from penstock.ops.collective import bounds, communicator
from penstock.ops.op import kernel


@kernel(ops.all_reduce, device="cuda")
def all_reduce(x, *, out):
    if out.data_ptr() != x.data_ptr():  # a program's sums are made in place
        out.copy_(x)
    communicator().all_reduce(out)


@kernel(ops.all_gather, device="cuda")
def all_gather(x, columns, *, out):
    to = communicator()
    rows, columns = out.shape
    if columns % to.size == 0 and 1 in (rows, to.size):  # the parts lie as the rows do
        to.all_gather(out.view(to.size, rows, x.shape[1]), x)
        return
    widest = -(-columns // to.size)
    part = x
    if x.shape[1] < widest:
        part = torch.zeros((rows, widest), dtype=x.dtype, device=x.device)
        part[:, : x.shape[1]] = x
    parts = torch.empty((to.size, rows, widest), dtype=x.dtype, device=x.device)
    to.all_gather(parts, part)
    for rank in range(to.size):
        start, stop = bounds(columns, rank, to.size)
        out[:, start:stop] = parts[rank, :, : stop - start]


# part_ids  y[t] = ids[t] - first if that is 0 … count - 1, else -1
# shapes    ids, y int32 [T]
# grid      ceil(T / BLOCK)
# bytes     8 · T
# limits    none
@triton.jit(do_not_specialize=["first", "count", "T"])
def _part_ids_kernel(ids_ptr, out_ptr, first, count, T, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(ids_ptr + at, mask=at < T, other=-1) - first
    tl.store(out_ptr + at, tl.where((own >= 0) & (own < count), own, -1), mask=at < T)


@kernel(ops.part_ids, device="cuda")
def part_ids(ids, first, count, *, out):
    T = ids.numel()
    if T:
        _part_ids_kernel[(triton.cdiv(T, ELEMENTS),)](ids, out, first, count, T, BLOCK=ELEMENTS, **pdl_options())


@kernel(ops.beside, device="cuda")
def beside(a, b, *, out):
    out[:, : a.shape[1]] = a
    out[:, a.shape[1] :] = b
