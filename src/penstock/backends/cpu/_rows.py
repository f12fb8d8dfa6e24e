"""Rows of any float format as bytes: a kernel that takes them has one signature for all formats and compiles once."""

import numpy as np

from penstock.backends.cpu._formats import BFLOAT16, FLOAT16, FLOAT32, load_row, rounded, store_row, widened
from penstock.backends.cpu.compile import njit

_UINT8 = np.dtype(np.uint8)
_NOTHING = np.empty((1, 0), _UINT8)
_NOTHING.flags.writeable = False


def bytes_in(array: np.ndarray | None) -> np.ndarray:
    """The bytes of an input [..., n] as [rows, n * itemsize], read-only; no rows at all for None."""
    if array is None:
        return _NOTHING
    view = (array if array.ndim == 2 else array.reshape(-1, array.shape[-1])).view(_UINT8)
    view.setflags(False)
    return view


def bytes_out(array: np.ndarray) -> np.ndarray:
    """The bytes of an output or a state [..., n] as [rows, n * itemsize]."""
    return (array if array.ndim == 2 else array.reshape(-1, array.shape[-1])).view(_UINT8)


@njit
def itemsize(fmt):
    return 4 if fmt == FLOAT32 else 2


@njit
def load_bytes(row, fmt, out):
    """float32 of a row of bytes."""
    if fmt == FLOAT32:
        load_row(row.view(np.int32), FLOAT32, out)
    else:
        load_row(row.view(np.uint16), fmt, out)


@njit
def store_bytes(values, fmt, row):
    """A row of float32 into a row of bytes."""
    if fmt == FLOAT32:
        store_row(values, FLOAT32, row.view(np.int32))
    else:
        store_row(values, fmt, row.view(np.uint16))


@njit
def copy_bytes(row, out):
    """out = row; an assignment of slices would not vectorise."""
    for j in range(out.size):
        out[j] = row[j]


# Blocks are many short pieces of rows. One view serves them all, since each view counts a reference atomically, which
# makes the loads after it wait; columns are unsigned, since an index that might be negative keeps a loop from
# vectorising (12 times slower).


@njit
def load_block(rows, fmt, first, column, width, out):
    """float32 of out.shape[0] rows from `first` on, `width` columns from `column` on."""
    if fmt == FLOAT32:
        _load_block(rows.view(np.int32), FLOAT32, first, np.uint64(column), np.uint64(width), out)
    elif fmt == FLOAT16:
        _load_block(rows.view(np.uint16), FLOAT16, first, np.uint64(column), np.uint64(width), out)
    else:
        _load_block(rows.view(np.uint16), BFLOAT16, first, np.uint64(column), np.uint64(width), out)


@njit(forceinline=True)
def _load_block(bits, fmt, first, column, width, out):
    for i in range(out.shape[0]):
        for j in range(width):
            out[i, j] = widened(bits[first + i, column + j], fmt)


@njit
def store_block(values, fmt, first, column, width, rows):
    """The first `width` columns of `values` into as many rows of bytes from `first` on, from `column` on."""
    if fmt == FLOAT32:
        _store_block(values, FLOAT32, first, np.uint64(column), np.uint64(width), rows.view(np.int32))
    elif fmt == FLOAT16:
        _store_block(values, FLOAT16, first, np.uint64(column), np.uint64(width), rows.view(np.uint16))
    else:
        _store_block(values, BFLOAT16, first, np.uint64(column), np.uint64(width), rows.view(np.uint16))


@njit(forceinline=True)
def _store_block(values, fmt, first, column, width, bits):
    for i in range(values.shape[0]):
        for j in range(width):
            bits[first + i, column + j] = rounded(values[i, j], fmt)
