"""Writing keys, values and MLA latents into caches, and the ways a cache may lie in memory.

Three layouts, one meaning (position p of a sequence has one row):

    contiguous   [max_seq, …]          one sequence; positions are an int, or an int32 array without axes
    slots        [S, max_seq, …]       B sequences, one step each: slots int32 [B], positions int32 [B]
    pages        [P, page, …]          row p is pages[block_table[p // page], p % page]; block_table int32 [n] for T
                                       steps of one sequence, [B, n] with positions int32 [B] for one step of B, or
                                       with positions and `sequence` int32 [T] for T rows of B (see ragged.py)

The row may be flat ([…, kv_dim]) or split ([…, Hkv, D]): it is the same memory. Pages need not be distinct along a
block table, so a sliding window is a table that comes back to its first pages.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.errors import InvalidArgument, ShapeError
from penstock.ops import check
from penstock.ops.array import Array, Spec
from penstock.ops.op import op

# -- layouts ---------------------------------------------------------------------------------------------------------


def row_width(name: str, cache: Spec, lead: int) -> int:
    """Elements of one row of a cache with `lead` axes in front of it."""
    form = {1: "[max_seq, width] or [max_seq, H, D]", 2: "[pages, page, width] or [pages, page, H, D]"}[lead]
    check.axes(form, lead + 1, lead + 2, **{name: cache})
    check.filled(0, **{name: cache})
    return math.prod(cache.shape[lead:])


def batched(name: str, position: Spec | int) -> bool:
    """True for one position per row (int32 [B]), False for one number (an int, or int32 without axes)."""
    if isinstance(position, Spec):
        check.dtype("int32", **{name: position})
        check.axes("a number or [B]", 0, 1, **{name: position})
        return position.ndim == 1
    if position < 0:
        raise InvalidArgument(f"{name} is {position}, expected 0 or more")
    return False


def check_layout(slots: Spec | None, block_table: Spec | None, per_row: bool, rows: int | None, name: str) -> None:
    """`slots` or `block_table`, or neither, as the form of the positions wants; rows: None for any number."""
    check.dtype("int32", slots=slots, block_table=block_table)
    if slots is not None and block_table is not None:
        raise InvalidArgument("slots and block_table are both given, expected at most one")
    if slots is not None:
        if not per_row:
            raise ShapeError(f"{name} is one number, expected int32 ({rows},) (one per row) with slots")
        if rows is not None:
            check.shape((rows,), "one per row", slots=slots)
    if block_table is not None:
        check.axes("[B, n]" if per_row else "[n]", 2 if per_row else 1, block_table=block_table)
        if per_row and rows is not None and block_table.shape[0] != rows:
            raise ShapeError(
                f"block_table has shape {block_table.shape}, expected {rows} rows (one per row of the call)"
            )
    if per_row and slots is None and block_table is None:
        raise ShapeError(f"{name} has one value per row, expected slots or block_table with it")


def capacity(cache: Spec | Array, slots: Any, block_table: Any) -> int:
    """Positions that a sequence of this layout can have."""
    if block_table is not None:
        return block_table.shape[-1] * cache.shape[1]
    return cache.shape[0 if slots is None else 1]


def table_of(slots: Array | None, block_table: Array | None, b: int | None) -> Array | None:
    """Block table of one sequence; a slot is a table of one page. None: contiguous."""
    if slots is not None:
        return slots[b : b + 1] if b is not None else slots
    if block_table is not None:
        return block_table if b is None else block_table[b]
    return None


def read_rows(cache: Array, table: Array | None, low: int, high: int) -> Array:
    """Rows low … high − 1 of a sequence as float64 [high − low, width]."""
    if table is None:
        rows = cache[low:high]
    else:
        p = np.arange(low, high)
        rows = cache[table[p // cache.shape[1]], p % cache.shape[1]]
    return rows.reshape(high - low, math.prod(cache.shape[1 if table is None else 2 :])).astype(np.float64)


def check_read(cache: Array, slots: Array | None, block_table: Array | None, spans: list[tuple[int, int]]) -> None:
    """Every page (or slot) that the spans of the sequences read exists, and none stands twice in one span.

    A table that comes back to a page inside what a call reads or writes is a ring too short for it.
    """
    if slots is not None:
        check.in_range("slots", slots, 0, cache.shape[0], f"{cache.shape[0]} slots")
    if block_table is not None:
        tables = block_table if block_table.ndim == 2 else (block_table,)
        page = cache.shape[1]
        for table, (low, high) in zip(tables, spans, strict=True):
            if high == low:
                continue
            first, stop = low // page, -(-high // page)
            if stop - first == 1 and 0 <= table.item(first) < cache.shape[0]:  # what a decode step appends to
                continue
            used = table[first:stop]
            check.in_range("block_table", used, 0, cache.shape[0], f"{cache.shape[0]} pages")
            if not check.distinct(used):
                found = f"block_table has a page twice in positions {low} to {high - 1}"
                raise InvalidArgument(f"{found}, expected distinct pages")


# -- appending -------------------------------------------------------------------------------------------------------


def check_append(
    name: str, cache: Any, rows: int, slots: Any, block_table: Any, positions: Any, sequence: Any = None
) -> None:
    """Host values: positions inside the cache, pages and slots that exist, no row written twice."""
    room = capacity(cache, slots, block_table)
    if sequence is not None:
        check.in_range("sequence", sequence, -1, len(block_table), f"{len(block_table)} rows of block_table")
        there = sequence >= 0
        positions, block_table = positions[there], block_table[sequence[there]]
    if isinstance(positions, int) or positions.ndim == 0:
        start = int(positions)
        if not 0 <= start <= room - rows:
            raise InvalidArgument(f"{name} is {start}, expected 0 to {room - rows} ({rows} rows into {room} positions)")
        check_read(cache, slots, block_table, [(start, start + rows)])
        return
    check.in_range(name, positions, 0, room, f"{room} positions")
    check_read(cache, slots, block_table, [(p, p + 1) for p in positions.tolist()])
    if slots is not None:
        check.unique("slots", slots)
    elif positions.size > 1:
        page = cache.shape[1]
        rows_of = block_table[np.arange(positions.size), positions // page] * page + positions % page
        check.unique("block_table", rows_of)


def write_rows(
    cache: Array,
    src: Array,
    slots: Array | None,
    block_table: Array | None,
    positions: Any,
    sequence: Array | None = None,
) -> None:
    """The rows of src into a cache of any layout; those of no sequence, or at a negative position, go nowhere."""
    if np.ndim(positions):
        there = np.asarray(positions) >= 0 if sequence is None else sequence >= 0
        src, positions = src[there], positions[there]
        slots = None if slots is None else slots[there]
        if block_table is not None:
            block_table = block_table[there if sequence is None else sequence[there]]
    start = np.asarray(positions)
    p = np.arange(int(start), int(start) + len(src)) if start.ndim == 0 else start
    if slots is None and block_table is None:
        cache[p] = src.reshape(len(src), *cache.shape[1:])
        return
    rows = src.reshape(len(src), *cache.shape[2:])
    if slots is not None:
        cache[slots, p] = rows
    elif block_table is not None:
        page = cache.shape[1]
        pages = block_table[p // page] if start.ndim == 0 else block_table[np.arange(len(p)), p // page]
        cache[pages, p % page] = rows


def appended(
    sources: dict[str, Spec],
    caches: dict[str, Spec],
    positions: Any,
    name: str,
    slots: Any,
    block_table: Any,
    sequence: Spec | None = None,
) -> None:
    """Checks rows and the caches that they go to, by the caller's names for them; `name` is that of the positions."""
    check.alike(**sources, **caches)
    (first, src), *rest = sources.items()
    for other, spec in rest:
        if spec.shape[:1] != src.shape[:1]:
            raise ShapeError(f"{other} has shape {spec.shape}, expected {src.shape[0]} rows as {first}")
    rows = src.shape[0]
    per_row = batched(name, positions)
    check_layout(slots, block_table, per_row, None if sequence is not None else rows, name)
    if sequence is not None:
        check.dtype("int32", sequence=sequence)
        if block_table is None or not per_row:
            raise ShapeError(f"sequence goes with block_table [B, n] and one of {name} per row")
        check.shape((rows,), "one per row", sequence=sequence)
    if per_row:
        check.shape((rows,), "one per row", **{name: positions})
    paged = slots is not None or block_table is not None
    for (source, spec), (target, cache) in zip(sources.items(), caches.items(), strict=True):
        width = row_width(target, cache, 2 if paged else 1)
        if math.prod(spec.shape[1:]) != width:
            raise ShapeError(f"{source} has shape {spec.shape}, expected rows of {width} as {target}")
    (first, cache), *rest = caches.items()
    for other, spec in rest:
        lead = spec.shape[: 2 if paged else 1]
        if lead != cache.shape[: len(lead)]:
            raise ShapeError(f"{other} has shape {spec.shape}, expected {cache.shape[: len(lead)]} in front as {first}")
    if not isinstance(positions, Spec) and not per_row:
        room = capacity(cache, slots, block_table)
        if positions + rows > room:
            raise InvalidArgument(
                f"{name} is {positions}, expected 0 to {room - rows} ({rows} rows into {room} positions)"
            )


def _source(name: str, spec: Spec) -> None:
    check.axes("[T, kv_dim] or [T, Hkv, D]", 2, 3, **{name: spec})
    check.filled(**{name: spec})


def _kv_appended(
    k_src: Spec, v_src: Spec, k_cache: Spec, v_cache: Spec, kv_start: Spec | int, slots: Spec | None
) -> None:
    _source("k_src", k_src)
    _source("v_src", v_src)
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    appended({"k_src": k_src, "v_src": v_src}, caches, kv_start, "kv_start", slots, None)


@op(
    infer=_kv_appended,
    check=lambda k_src, k_cache, kv_start, slots: check_append("kv_start", k_cache, len(k_src), slots, None, kv_start),
    writes=("k_cache", "v_cache"),
)
def kv_cache_append(
    k_src: Array, v_src: Array, k_cache: Array, v_cache: Array, kv_start: int | Array, slots: Array | None = None
) -> None:
    """k_cache[kv_start + t] = k_src[t] and the same for v; other rows are untouched.

    k_src [T, kv_dim] (or [T, Hkv, D]) into k_cache [max_seq, kv_dim]; or with slots int32 [B] and kv_start int32 [B]
    row b of k_src into k_cache[slots[b], kv_start[b]].
    """
    write_rows(k_cache, k_src, slots, None, kv_start)
    write_rows(v_cache, v_src, slots, None, kv_start)


def _pages_appended(
    k_src: Spec,
    v_src: Spec,
    k_pages: Spec,
    v_pages: Spec,
    block_table: Spec,
    positions: Spec | int,
    sequence: Spec | None,
) -> None:
    _source("k_src", k_src)
    _source("v_src", v_src)
    caches = {"k_pages": k_pages, "v_pages": v_pages}
    appended({"k_src": k_src, "v_src": v_src}, caches, positions, "positions", None, block_table, sequence)


@op(
    infer=_pages_appended,
    check=lambda k_src, k_pages, block_table, positions, sequence: check_append(
        "positions", k_pages, len(k_src), None, block_table, positions, sequence
    ),
    writes=("k_pages", "v_pages"),
)
def kv_pages_append(
    k_src: Array,
    v_src: Array,
    k_pages: Array,
    v_pages: Array,
    block_table: Array,
    positions: int | Array,
    sequence: Array | None = None,
) -> None:
    """Keys and values into pages [P, page, …]: position p is row p % page of page block_table[p // page].

    One sequence: block_table int32 [n], positions the first of T. B sequences, one row each: block_table [B, n],
    positions int32 [B], negative: nothing is written. T rows of B sequences: block_table [B, n], positions and sequence
    int32 [T].
    """
    write_rows(k_pages, k_src, None, block_table, positions, sequence)
    write_rows(v_pages, v_src, None, block_table, positions, sequence)


def _mla_rows(spec: Spec) -> Spec:
    """One token without its T axis is a stack of one."""
    return Spec((1, *spec.shape), spec.dtype) if spec.ndim == 1 else spec


def _mla_appended(
    kv_lat: Spec,
    k_pe: Spec,
    latent_cache: Spec,
    rope_k_cache: Spec,
    pos: Spec | int,
    slots: Spec | None,
    block_table: Spec | None,
    sequence: Spec | None,
) -> None:
    check.axes("[T, R] or [R]", 1, 2, kv_lat=kv_lat)
    check.axes("[T, rope] or [rope]", kv_lat.ndim, k_pe=k_pe)
    sources = {"kv_lat": _mla_rows(kv_lat), "k_pe": _mla_rows(k_pe)}
    check.filled(**sources)
    caches = {"latent_cache": latent_cache, "rope_k_cache": rope_k_cache}
    appended(sources, caches, pos, "pos", slots, block_table, sequence)


@op(
    infer=_mla_appended,
    check=lambda kv_lat, latent_cache, pos, slots, block_table, sequence: check_append(
        "pos", latent_cache, 1 if kv_lat.ndim == 1 else len(kv_lat), slots, block_table, pos, sequence
    ),
    writes=("latent_cache", "rope_k_cache"),
)
def mla_cache_append(
    kv_lat: Array,
    k_pe: Array,
    latent_cache: Array,
    rope_k_cache: Array,
    pos: int | Array,
    slots: Array | None = None,
    block_table: Array | None = None,
    sequence: Array | None = None,
) -> None:
    """latent_cache[pos + t] = kv_lat[t] and rope_k_cache[pos + t] = k_pe[t], in any of the module's layouts.

    kv_lat [R] or [T, R], k_pe [rope] or [T, rope]; caches [max_len, R] and [max_len, rope], or with slots or pages.
    """
    for cache, src in ((latent_cache, kv_lat), (rope_k_cache, k_pe)):
        write_rows(cache, src.reshape(-1, src.shape[-1]), slots, block_table, pos, sequence)
