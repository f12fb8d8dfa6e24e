"""Rows into caches, and rows cut in two: copies of memory, as 16-bit words whatever the numbers are."""

from __future__ import annotations

import numpy as np
from numba import prange

from penstock import ops
from penstock.backends.cpu._formats import frozen
from penstock.backends.cpu._threads import run
from penstock.backends.cpu.compile import njit
from penstock.ops import kernel

_FEW = 1 << 17  # words that one thread copies before others are awake


# append    row t of a and b to row table[b, p // page] * page + p % page of their caches: p = positions[t], b =
#           sequence[t] (none if below 0) with one position per row, else p = positions[0] + t, b = 0
# shapes    sources [T, wide] and caches [rows, wide] as words; table int32 [B, n]; positions, sequence int32 [T] or [1]
# threads   one: a step of decoding copies a few rows
# bytes     sources in, the same out
# limits    rows in int64
@njit
def _append(a_src, a_cache, b_src, b_cache, table, positions, sequence, each, page):
    T = a_src.shape[0]
    for t in range(T):
        p = np.int64(positions[t]) if each else np.int64(positions[0]) + t
        s = np.int64(sequence[t]) if each else np.int64(0)
        if s < 0 or p < 0:
            continue
        row = np.int64(table[s, p // page]) * page + p % page
        a, b = a_cache[row], b_cache[row]
        for j in range(a.size):
            a[j] = a_src[t, j]
        for j in range(b.size):
            b[j] = b_src[t, j]


def _rows(array: np.ndarray, count: int) -> np.ndarray:
    return array.reshape(count, -1).view(np.uint16)


def _append_rows(a_src, b_src, a_cache, b_cache, positions, slots, block_table, sequence=None) -> None:
    each = not isinstance(positions, int) and positions.ndim == 1
    T = 1 if a_src.ndim == 1 else len(a_src)
    if T == 0:
        return
    if slots is None and block_table is None:
        start = int(positions)
        a_cache[start : start + T] = a_src.reshape(T, *a_cache.shape[1:])
        b_cache[start : start + T] = b_src.reshape(T, *b_cache.shape[1:])
        return
    page = a_cache.shape[1]
    table = block_table if slots is None else slots
    if table.ndim == 1:
        table = table.reshape(T if each else 1, -1)
    rows = a_cache.shape[0] * page
    a, b = frozen(_rows(a_src, T)), frozen(_rows(b_src, T))
    where = frozen(positions if each else np.array([int(positions)], np.int32))
    whose = frozen(np.arange(T, dtype=np.int32) if sequence is None else sequence)
    _append(a, _rows(a_cache, rows), b, _rows(b_cache, rows), frozen(table), where, whose, each, page)


@kernel(ops.kv_cache_append, device="cpu")
def kv_cache_append(k_src, v_src, k_cache, v_cache, kv_start, slots):
    _append_rows(k_src, v_src, k_cache, v_cache, kv_start, slots, None)


@kernel(ops.kv_pages_append, device="cpu")
def kv_pages_append(k_src, v_src, k_pages, v_pages, block_table, positions, sequence):
    _append_rows(k_src, v_src, k_pages, v_pages, positions, None, block_table, sequence)


@kernel(ops.mla_cache_append, device="cpu")
def mla_cache_append(kv_lat, k_pe, latent_cache, rope_k_cache, pos, slots, block_table, sequence):
    _append_rows(kv_lat, k_pe, latent_cache, rope_k_cache, pos, slots, block_table, sequence)


@njit
def _split_rows(src, a, b, start, stop):
    for t in range(start, stop):
        row, left, right = src[t], a[t], b[t]
        for j in range(left.size):
            left[j] = row[j]
        for j in range(right.size):
            right[j] = row[left.size + j]


# split     a[t] = src[t, :wide], b[t] = src[t, wide:]
# shapes    src [T, wide + rest], a [T, wide], b [T, rest] as words
# threads   prange over chunks of 64 rows; `_split_rows` alone for few
# bytes     src in, the same out
# limits    none
@njit(parallel=True)
def _split(src, a, b):
    T = src.shape[0]
    for c in prange((T + 63) // 64):
        _split_rows(src, a, b, c * 64, min(T, c * 64 + 64))


def split(src: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """The last axis of src cut into those of a and b."""
    T = src.size // src.shape[-1]
    if T == 0:
        return
    rows = frozen(_rows(src, T)), _rows(a, T), _rows(b, T)
    if rows[0].size <= _FEW:
        _split_rows(*rows, 0, T)
    else:
        run(_split, *rows)
