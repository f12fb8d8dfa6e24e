"""Embedding look-ups on the CPU: rows of a dense or quantized table, bit for bit as the definitions."""

import numpy as np
from numba import prange

from penstock import ops
from penstock.backends.cpu._formats import fmt, frozen
from penstock.backends.cpu._rows import bytes_in, bytes_out, copy_bytes, itemsize, load_bytes, store_bytes
from penstock.backends.cpu._threads import run
from penstock.backends.cpu.compile import njit
from penstock.backends.cpu.quant import _unpack, dequantize_into
from penstock.ops.check import bounds
from penstock.ops.op import kernel
from penstock.quant import QuantizedTensor

_SERIAL = 1 << 15  # output elements up to which one thread is faster than waking the others
_CHUNK = 8  # rows a thread takes at once


@kernel(ops.embedding, device="cpu")
def embedding(token_ids: np.ndarray, table: np.ndarray, dtype: str | None = None, *, out: np.ndarray) -> None:
    assert table.flags.c_contiguous
    if out.dtype == table.dtype and out.size <= _SERIAL:
        bits = np.uint16 if table.dtype.itemsize == 2 else np.uint32
        np.take(table.view(bits), token_ids, axis=0, out=out.view(bits), mode="clip")  # "raise" would buffer the rows
        if bounds(token_ids)[0] < 0:
            out[token_ids < 0] = 0
        return
    rows = bytes_in(table)
    _gather(token_ids, rows, rows, rows, 0, 1, fmt(table), out)


@kernel(ops.quantized_embedding, device="cpu")
def quantized_embedding(
    token_ids: np.ndarray, table: QuantizedTensor, dtype: str | None = None, *, out: np.ndarray
) -> None:
    if table.mode != "affine":
        _gather_floats(token_ids.reshape(-1), table, out)
        return
    packed, scales, biases = (bytes_in(array) for array in table.arrays)
    _gather(token_ids, packed, scales, biases, table.bits, table.group_size, fmt(table.scales), out)


@kernel(ops.ids_after_first, device="cpu")
def ids_after_first(ids: np.ndarray, positions: np.ndarray, *, out: np.ndarray) -> None:
    np.copyto(out, np.where(positions == 0, np.int32(-1), ids))


def _gather_floats(ids: np.ndarray, table: QuantizedTensor, out: np.ndarray) -> None:
    """Rows of a table that is not affine: copied as codes, then made dense."""
    if ids.size == 0:
        return
    made = np.empty((ids.size, table.shape[1]), out.dtype)
    dequantize_into(table.rows(np.maximum(ids, 0)), made)
    if bounds(ids)[0] < 0:
        made[ids < 0] = 0
    out.reshape(made.shape)[:] = made


def _gather(token_ids, packed, scales, biases, bits, group_size, table_fmt, out) -> None:
    if out.size == 0:
        return
    ids = frozen(token_ids.reshape(-1))
    args = (ids, packed, scales, biases, bits, group_size, table_fmt, fmt(out), bytes_out(out))
    if out.size <= _SERIAL:
        _gather_some(*args, 0, ids.size)
    else:
        run(_gather_rows, *args)


# gather    out[t] = table[ids[t]] rounded to out's format; a quantized row is code * scale + bias in float32 first;
#           zeros for a negative id
# shapes    ids int32 [T]; rows as bytes: packed [vocab, ...], scales, biases [vocab, K / gs] of fmt, out [T, K]; for
#           bits = 0 packed is a dense table of fmt, and scales and biases are not read
# threads   prange over chunks of rows
# bytes     a row of the table in and a row of out, once for each id
# limits    gs a multiple of 32; no fast-math: a fused multiply-add would round once instead of twice
@njit(parallel=True)
def _gather_rows(ids, packed, scales, biases, bits, gs, fmt, out_fmt, out):
    for c in prange((ids.size + _CHUNK - 1) // _CHUNK):
        stop = min(ids.size, (c + 1) * _CHUNK)
        _gather_some(ids, packed, scales, biases, bits, gs, fmt, out_fmt, out, c * _CHUNK, stop)


@njit
def _gather_some(ids, packed, scales, biases, bits, gs, fmt, out_fmt, out, start, stop):
    dim = out.shape[1] // itemsize(out_fmt)
    if bits == 0:
        values = np.empty(dim, np.float32)
        for t in range(start, stop):
            if ids[t] < 0:
                out[t, :] = 0
                continue
            row = packed[ids[t]]
            if fmt == out_fmt:
                copy_bytes(row, out[t])
            else:
                load_bytes(row, fmt, values)
                store_bytes(values, out_fmt, out[t])
        return
    groups = dim // gs
    codes = np.empty(dim, np.uint8)
    eights = codes.view(np.uint64)
    s, b = np.empty(groups, np.float32), np.empty(groups, np.float32)
    values = np.empty(dim, np.float32)
    code_groups, value_groups = codes.reshape((groups, gs)), values.reshape((groups, gs))
    for t in range(start, stop):
        index = ids[t]
        if index < 0:
            out[t, :] = 0
            continue
        load_bytes(scales[index], fmt, s)
        load_bytes(biases[index], fmt, b)
        if bits == 4:
            _unpack_nibbles(packed[index], codes)
        elif bits == 8:
            copy_bytes(packed[index], codes)
        else:
            _unpack(packed[index], bits, eights)
        for g in range(groups):
            for j in range(gs):
                value_groups[g, j] = np.float32(code_groups[g, j]) * s[g] + b[g]
        store_bytes(values, out_fmt, out[t])


@njit
def _unpack_nibbles(row, codes):
    for i in range(row.size):
        codes[2 * i] = row[i] & np.uint8(15)
        codes[2 * i + 1] = row[i] >> np.uint8(4)
