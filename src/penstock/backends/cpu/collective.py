"""Collectives of host arrays: what the ranks' communicator does, and the copies around it."""

import numpy as np

from penstock import ops
from penstock.ops.collective import bounds, communicator
from penstock.ops.op import kernel


@kernel(ops.all_reduce, device="cpu")
def all_reduce(x, *, out):
    if out is not x:
        np.copyto(out, x)
    communicator().all_reduce(out)


@kernel(ops.all_gather, device="cpu")
def all_gather(x, columns, *, out):
    to = communicator()
    rows, columns = out.shape
    part = np.zeros((rows, -(-columns // to.size)), x.dtype)
    part[:, : x.shape[1]] = x
    parts = np.empty((to.size, *part.shape), x.dtype)
    to.all_gather(parts, part)
    for rank in range(to.size):
        start, stop = bounds(columns, rank, to.size)
        out[:, start:stop] = parts[rank, :, : stop - start]


@kernel(ops.part_ids, device="cpu")
def part_ids(ids, first, count, *, out):
    here = (ids >= first) & (ids < first + count)
    np.copyto(out, np.where(here, ids - first, -1))


@kernel(ops.beside, device="cpu")
def beside(a, b, *, out):
    out[:, : a.shape[1]] = a
    out[:, a.shape[1] :] = b
