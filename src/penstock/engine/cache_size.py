"""How large caches of a fixed size are made: slots of sequences, and pages per window, within a number of bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.engine.cache import Caches
from penstock.errors import OutOfMemory
from penstock.units import amount

Pages = dict[int | None, int]  # per window, None for full attention

SHORT = 2048  # positions of a sequence that `load` has room for beside one of max_context


class CacheSize(NamedTuple):
    """Slots, and pages per window."""

    slots: int
    pages: Pages


def size_within(caches: Caches, max_context: int, sequences: int, memory: int, stored: int = 0) -> CacheSize:
    """The most that `memory` bytes hold: slots and windows of so many sequences, all the rest for full attention.

    There are never more pages than the sequences could use, with one more of each, which a snapshot may hold. stored:
    bytes for windows of stored prefixes. Raises OutOfMemory unless one of the sequences can have max_context positions.
    """
    full, windows = _of_one(caches, max_context)
    extra = stored // max(1, caches.size(0, dict.fromkeys(windows, 1)))
    pages: Pages = {window: sequences * count + extra for window, count in windows.items()}
    beside = caches.size(sequences, pages)
    for window, count in full.items():
        pages[window] = min(sequences * (count + 1), max(0, memory - beside) // caches.page_bytes(window))
    if beside > memory or any(pages[window] < count for window, count in full.items()):
        need = beside + caches.size(0, full)
        fitting = sequences_within(caches, max_context, sequences, memory)
        advice = f"use at most {fitting} sequences" if fitting else "use a shorter context (max_context)"
        raise OutOfMemory(
            f"cache: {sequences} sequences, one of them with {max_context} positions, need {amount(need)} of "
            f"{caches.device.memory_name}, {amount(max(0, memory))} are there for them; {advice}, or more memory"
        )
    return CacheSize(sequences, pages)


def sequences_within(caches: Caches, max_context: int, most: int, memory: int) -> int:
    """How many sequences, up to `most`, have room in so many bytes, one of them with max_context positions."""
    full, windows = _of_one(caches, max_context)
    left, each = memory - caches.size(0, full), caches.size(1, windows)
    if left < each:
        return 0
    return min(most, left // each) if each else most


def size_for_load(caches: Caches, max_context: int, sequences: int, free: int) -> CacheSize:
    """Room for one sequence of max_context and, up to half of the free bytes, for short ones beside it."""
    memory = max(free // 2, caches.bytes_of(max_context))
    count = max(1, sequences_within(caches, max_context, sequences, memory))
    size = size_within(caches, max_context, count, memory)
    short = caches.pages_of(min(max_context, SHORT))
    for window, pages in _of_one(caches, max_context)[0].items():
        size.pages[window] = min(size.pages[window], pages + count * short[window])
    return size


def size_for_batches(caches: Caches, batches: Iterable[tuple[int, int]]) -> CacheSize:
    """Room for each batch by itself, a number of sequences and the positions of each, with a snapshot of each."""
    slots, pages = 0, dict.fromkeys(caches.pools, 0)
    for sequences, positions in batches:
        slots = max(slots, sequences)
        for window, count in caches.pages_of(positions).items():
            held = 1 if window is None else count  # by a snapshot, while the sequence has others
            pages[window] = max(pages[window], sequences * (count + held))
    return CacheSize(slots, pages)


def _of_one(caches: Caches, positions: int) -> tuple[Pages, Pages]:
    """The pages of one sequence: of full attention, and of windows."""
    pages = caches.pages_of(positions)
    full: Pages = {window: count for window, count in pages.items() if window is None}
    return full, {window: count for window, count in pages.items() if window is not None}
