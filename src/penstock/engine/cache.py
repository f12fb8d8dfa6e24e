"""The memory of sequences: pages of keys and values, slots of recurrent state, and copies of a moment of both.

Pages are counted. A snapshot holds the pages of its moment and a copy of the recurrent state; a sequence that writes
into a page that is held elsewhere writes into a copy of its own. Layers of one window share page numbers: page p of
a sequence is row p of every such layer's arrays. Pages that have left a window go back at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.dtypes import ITEMSIZE
from penstock.errors import InvalidArgument, OutOfMemory
from penstock.models.step import PAGE, Layout, PagedKV, RecurrentState, empty
from penstock.ops.device import Device, device_for
from penstock.units import amount

_KEEP_FREE = 64 << 20  # bytes of memory that growing a cache leaves to everything else
_FEWEST_PAGES = 4  # of a window, where they grow
_LESS = "use a shorter context, fewer sequences, or close sessions"


class PageTable:
    """Pages of one sequence or snapshot in one pool: block b of the positions lies in page ids[b], from `first` on."""

    def __init__(self, ids: Seq[int] = (), first: int = 0) -> None:
        self.ids = list(ids)
        self.first = first  # blocks before it have left the window and hold no page
        self._array: np.ndarray | None = None

    @property
    def live(self) -> list[int]:
        return self.ids[self.first :]

    def changed(self) -> None:
        self._array = None

    @property
    def array(self) -> np.ndarray:
        """int32 [blocks] for the kernels; blocks without a page name page 0, which is never read for them."""
        if self._array is None:
            self._array = np.array(self.ids or [0], np.int32)
        return self._array


class PagePool:
    """Numbers of the pages of all layers with one window."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.references: list[int] = []
        self.free: list[int] = []

    @property
    def capacity(self) -> int:
        return len(self.references)

    @property
    def used(self) -> int:
        return self.capacity - len(self.free)

    def grow(self, capacity: int) -> None:
        self.free.extend(range(capacity - 1, self.capacity - 1, -1))
        self.references.extend([0] * (capacity - self.capacity))

    def take(self) -> int:
        page = self.free.pop()
        self.references[page] = 1
        return page

    def hold(self, pages: Seq[int]) -> None:
        for page in pages:
            self.references[page] += 1

    def release(self, pages: Seq[int]) -> None:
        for page in pages:
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free.append(page)


@dataclass(eq=False)
class Sequence:
    """One sequence in the caches: `length` positions, a slot of recurrent state, a page table per window."""

    slot: int
    tables: dict[int | None, PageTable]
    length: int = 0
    corrupt: bool = False  # a step stopped half-way: recurrent state may be ahead of `length`
    writable: int = 0  # positions below it are known to lie in pages that no snapshot holds
    accepted: int = 0  # of a run that was kept, the tokens that its recurrent states do not hold yet, but `length` does
    drafted: int | None = None  # where it is the device knows, and so many drafts behind it: ops/drafts.py
    ahead: int = 0  # tokens that steps under way may append at the most: how many, the device says
    closed: bool = field(default=False, repr=False)


@dataclass(eq=False)
class Snapshot:
    """A moment of a sequence: its pages, held, and a copy of its recurrent state (nothing for pure attention)."""

    length: int
    tables: dict[int | None, PageTable]
    state: list[Any]
    closed: bool = field(default=False, repr=False)


class Caches:
    """Arrays of all layers, and the owners of their parts; raises OutOfMemory where more are wanted than fit.

    Where a device has `fixed_caches` the arrays get their size by `allocate` and keep it. Where it reserves address
    space they have their full size from the start, and what is used of them grows; elsewhere they are replaced by
    larger ones, twice as large if that fits.
    """

    def __init__(self, layouts: Seq[Layout], dtype: str, device: Device | None = None) -> None:
        self.layouts = tuple(layouts)
        self.dtype = dtype
        self.device = device or device_for("cpu")
        windows = {layout.window for layout in self.layouts if isinstance(layout, PagedKV)}
        self.pools = {window: PagePool(window) for window in sorted(windows, key=lambda w: -1 if w is None else w)}
        self.gates: dict[int, Any] = {}  # of kept runs, by layers whose states have room for them
        self.arrays, self._reserved = self._first_arrays()
        self._slots = 0
        self._free_slots: list[int] = []
        self.version = 0  # changes when arrays are replaced by others

    def _first_arrays(self) -> tuple[list[tuple[Any, Any]], bool]:
        """The arrays to begin with, and whether they are as large as they can ever be."""
        if self.device.fixed_caches:
            return self._made(0, dict.fromkeys(self.pools, 0)), False
        pages = {window: self.device.most_rows(self.page_bytes(window)) for window in self.pools}
        slots = self.device.most_rows(self.slot_bytes)
        if slots and all(pages.values()):
            try:
                return self._made(slots, pages, self.device.reserve), True
            except MemoryError:
                pass  # a limit of address space
        return self._made(0, dict.fromkeys(self.pools, 0)), False

    def _made(
        self, slots: int, pages: Mapping[int | None, int], zeros: Callable[..., Any] | None = None
    ) -> list[tuple[Any, Any]]:
        """Arrays of all layers for so many slots, and pages per window."""
        zeros = zeros or self.device.zeros
        self.gates = {n: zeros((slots, *layout.gates), "float32") for n, layout in self._with_room()}
        return [
            empty(layout, pages[layout.window] if isinstance(layout, PagedKV) else 0, slots, self.dtype, zeros)
            for layout in self.layouts
        ]

    def _with_room(self) -> list[tuple[int, RecurrentState]]:
        """Layers whose states have room for kept runs, by number."""
        return [(n, one) for n, one in enumerate(self.layouts) if isinstance(one, RecurrentState) and one.room]

    @property
    def room(self) -> int | None:
        """The most tokens of a run that can be kept until it is known how many count; None: any number."""
        return min((layout.room for layout in self._recurrent), default=None)

    @property
    def _recurrent(self) -> list[RecurrentState]:
        return [layout for layout in self.layouts if isinstance(layout, RecurrentState)]

    def allocate(self, slots: int, pages: Mapping[int | None, int]) -> None:
        """Give the arrays this size, all slots and pages free: only where the device has `fixed_caches`.

        Raises InvalidArgument while sequences are open or pages are held, OutOfMemory if it does not fit; then there
        are no slots and pages.
        """
        assert self.device.fixed_caches
        if self.in_use:
            held = sum(pool.used for pool in self.pools.values())
            raise InvalidArgument(
                f"cache: {self.slots_used} sequences are open and {held} pages are held, expected none while the "
                "caches get another size; close sessions and drop snapshots first"
            )
        self.version += 1
        self._resize(0, dict.fromkeys(self.pools, 0))  # the old arrays go before the new ones come
        need, free = self.size(slots, pages), self.device.free_memory()
        if need > free:
            raise OutOfMemory(
                f"cache: {slots} sequences and {sum(pages.values())} pages take {amount(need)} of "
                f"{self.device.memory_name}, {amount(free)} are free; use fewer sequences or less memory for them"
            )
        self._resize(slots, pages)

    def _resize(self, slots: int, pages: Mapping[int | None, int]) -> None:
        self.arrays = self._made(slots, pages)
        self._slots, self._free_slots = slots, list(range(slots - 1, -1, -1))
        for window, pool in self.pools.items():
            pool.references, pool.free = [], []
            pool.grow(pages[window])

    @property
    def saved_layouts(self) -> tuple[Layout, ...]:
        """Of what `rows` gives and `fill` takes."""
        return self.layouts

    @property
    def in_use(self) -> bool:
        """Whether a sequence is open or a page is held."""
        return self.slots_used > 0 or any(pool.used for pool in self.pools.values())

    @property
    def nbytes(self) -> int:
        """Of pages and slots that have been made room for."""
        return self.size(self._slots, {window: pool.capacity for window, pool in self.pools.items()})

    def size(self, slots: int, pages: Mapping[int | None, int]) -> int:
        """Bytes of so many slots, and pages per window."""
        return slots * self.slot_bytes + sum(count * self.page_bytes(window) for window, count in pages.items())

    def bytes_of(self, length: int) -> int:
        """What a sequence of `length` positions takes: its pages (no more than a window's) and its recurrent state."""
        return self.size(1, self.pages_of(length))

    def pages_of(self, length: int) -> dict[int | None, int]:
        """The most pages per window that a sequence holds until it has `length` positions."""
        whole = -(-length // PAGE)
        chunk = self.device.chunk_alignment // PAGE  # written at once, before any of the pages behind it go back
        return {w: whole if w is None else min(whole, -(-w // PAGE) + 1 + chunk) for w in self.pools}

    def page_bytes(self, window: int | None) -> int:
        """Bytes of a page in all layers of one window."""
        return sum(self._row_bytes(one) for one in self.layouts if isinstance(one, PagedKV) and one.window == window)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence in all layers, with room for a kept run."""
        return sum(map(self._row_bytes, self._recurrent))

    @property
    def state_bytes(self) -> int:
        """Bytes of a copy of it, which no run is kept for."""
        return sum(self._row_bytes(replace(layout, room=0)) for layout in self._recurrent)

    @property
    def slots(self) -> int:
        """Sequences that there is room for without growing."""
        return self._slots

    @property
    def slots_used(self) -> int:
        return self._slots - len(self._free_slots)

    # -- sequences ---------------------------------------------------------------------------------------------------

    def open(self) -> Sequence:
        if not self._free_slots:
            self._grow_slots(max(1, 2 * self._slots))
        slot = self._free_slots.pop()
        self.device.clear_all(self._states(slot))
        return Sequence(slot, {window: PageTable() for window in self.pools})

    def close(self, sequence: Sequence) -> None:
        if not sequence.closed:
            sequence.closed = True
            self._release(sequence.tables)
            self._free_slots.append(sequence.slot)

    def reserve(self, sequence: Sequence, count: int) -> None:
        """Make the next `count` positions of a sequence its own to write."""
        end = sequence.length + count
        if end <= sequence.writable:
            return
        wanted = {window: self._missing(sequence, window, end) for window in self.pools}
        for window, pages in wanted.items():
            self._grow_pages(window, pages)
        for window, pool in self.pools.items():
            table = sequence.tables[window]
            at = sequence.length // PAGE
            if at < len(table.ids) and pool.references[table.ids[at]] > 1:
                self._copy_page(window, table, at)
            while len(table.ids) * PAGE < end:
                table.ids.append(pool.take())
                table.changed()
        sequence.writable = -(-end // PAGE) * PAGE

    def reserve_ahead(self, sequence: Sequence, count: int) -> None:
        """The same before the step that writes them; of a split model on all ranks, whose pages are to be the same."""
        self.reserve(sequence, count)

    def advance(self, sequence: Sequence, count: int) -> None:
        """The next `count` positions have been written; pages that no later position reads go back."""
        sequence.length += count
        for window, pool in self.pools.items():
            if window is None:
                continue
            table = sequence.tables[window]
            dead = max(0, sequence.length - window + 1) // PAGE  # the next token reads from length - window + 1 on
            if dead > table.first:
                pool.release(table.ids[table.first : dead])
                table.ids[table.first : dead] = [0] * (dead - table.first)
                table.first = dead
                table.changed()

    def accept(self, sequence: Sequence, count: int) -> None:
        """Of a run that was kept, the first `count` tokens are the sequence's; its recurrent states wait for them."""
        sequence.accepted = count if self.gates else 0
        self.advance(sequence, count)

    def snapshot(self, sequence: Sequence) -> Snapshot:
        state = self.device.copies(self._states(sequence.slot))  # before pages are held: it may raise OutOfMemory
        tables = {}
        for window, table in sequence.tables.items():
            self.pools[window].hold(table.live)
            tables[window] = PageTable(table.ids, table.first)
        sequence.writable = 0
        return Snapshot(sequence.length, tables, state)

    def rewind(self, sequence: Sequence, snapshot: Snapshot) -> None:
        """Put a sequence (the snapshot's own or another one) into the state of the snapshot, which stays valid."""
        sequence.accepted, sequence.drafted = 0, None
        for window, table in snapshot.tables.items():
            self.pools[window].hold(table.live)
        self._release(sequence.tables)
        sequence.tables = {window: PageTable(table.ids, table.first) for window, table in snapshot.tables.items()}
        sequence.length, sequence.corrupt, sequence.writable = snapshot.length, False, 0
        self.device.copy_all(self._states(sequence.slot), snapshot.state)

    def copied_states(self, sequence: Sequence) -> list[Any]:
        """Copies of its recurrent states."""
        return self.device.copies(self._states(sequence.slot))

    def put_states(self, sequence: Sequence, states: list[Any]) -> None:
        """Give it the recurrent states that were copied."""
        self.device.copy_all(self._states(sequence.slot), states)

    def can_truncate(self, sequence: Sequence) -> bool:
        """Whether all positions of a sequence are still there: no recurrent state, nothing behind a window."""
        paged = all(isinstance(layout, PagedKV) for layout in self.layouts)
        return paged and not any(table.first for table in sequence.tables.values())

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Go back to the first `length` positions of a sequence for which `can_truncate` holds."""
        assert self.can_truncate(sequence) and length <= sequence.length
        for window, table in sequence.tables.items():
            kept = -(-length // PAGE)
            self.pools[window].release(table.ids[kept:])
            del table.ids[kept:]
            table.changed()
        sequence.length, sequence.writable = length, 0

    def _states(self, slot: int) -> list[Any]:
        """The recurrent state of a slot, in all layers that have one; without the rows of a kept run."""
        layers = zip(self.layouts, self.arrays, strict=True)
        pairs = [(one, arrays) for one, arrays in layers if isinstance(one, RecurrentState)]
        return [part for one, (conv, state) in pairs for part in (conv[slot][: one.conv[0]], state[slot])]

    def drop(self, snapshot: Snapshot) -> None:
        if not snapshot.closed:
            snapshot.closed = True
            self._release(snapshot.tables)

    def _release(self, tables: dict[int | None, PageTable]) -> None:
        for window, table in tables.items():
            self.pools[window].release(table.live)

    # -- rows, for files ---------------------------------------------------------------------------------------------

    def rows(self, sequence: Sequence, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of what a layer keeps: the rows of its live positions, or its recurrent state."""
        layout, (first, second) = self.layouts[layer], self.arrays[layer]
        if not isinstance(layout, PagedKV):
            rows = first[sequence.slot][: layout.conv[0]], second[sequence.slot]
            return tuple(map(self.device.to_host, rows))  # type: ignore[return-value]
        table = sequence.tables[layout.window]
        count = sequence.length - table.first * PAGE
        kept = (a[table.live].reshape(len(table.live) * PAGE, a.shape[-1])[:count] for a in (first, second))
        return tuple(map(self.device.to_host, kept))  # type: ignore[return-value]

    def fill(self, sequence: Sequence, length: int, rows: Seq[tuple[np.ndarray, np.ndarray]]) -> None:
        """The reverse of `rows` for all layers, or the first of them, into a sequence that has just been opened."""
        self.reserve(sequence, length)
        self.advance(sequence, length)
        for layout, arrays, kept in zip(self.layouts, self.arrays, rows, strict=False):
            for array, values in zip(arrays, map(self.device.to_device, kept), strict=True):
                if not isinstance(layout, PagedKV):
                    array[sequence.slot][: len(values)] = values
                    continue
                table = sequence.tables[layout.window]
                for i, page in enumerate(table.live):
                    part = values[i * PAGE : (i + 1) * PAGE]
                    array[page, : len(part)] = part

    # -- growth ------------------------------------------------------------------------------------------------------

    def make_room(self, pages: Mapping[int | None, int], slots: int) -> None:
        """Have this many pages per window and slots free, so that taking them cannot fail. May raise OutOfMemory."""
        for window, count in pages.items():
            self._grow_pages(window, count)
        missing = slots - len(self._free_slots)
        if missing > 0:
            twice = max(missing, self._slots)
            fits = twice * self.slot_bytes + _KEEP_FREE <= self.device.free_memory()
            self._grow_slots(self._slots + (twice if fits else missing))

    def _missing(self, sequence: Sequence, window: int | None, end: int) -> int:
        table, pool = sequence.tables[window], self.pools[window]
        at = sequence.length // PAGE
        copied = at < len(table.ids) and pool.references[table.ids[at]] > 1
        return max(0, -(-end // PAGE) - len(table.ids)) + copied

    def _copy_page(self, window: int | None, table: PageTable, block: int) -> None:
        pool, old = self.pools[window], table.ids[block]
        page = pool.take()
        for layout, arrays in zip(self.layouts, self.arrays, strict=True):
            if isinstance(layout, PagedKV) and layout.window == window:
                for array in arrays:
                    array[page] = array[old]
        pool.release([old])
        table.ids[block] = page
        table.changed()

    def _grow_pages(self, window: int | None, wanted: int) -> None:
        pool = self.pools[window]
        if wanted <= len(pool.free):
            return
        if self.device.fixed_caches:
            raise OutOfMemory(
                f"cache: {wanted} more pages of {PAGE} positions are needed, {len(pool.free)} of {pool.capacity} are "
                f"free; {_LESS}, or give the caches more memory"
            )
        least = max(pool.capacity + wanted - len(pool.free), _FEWEST_PAGES)
        capacity = max(least, min(2 * pool.capacity, pool.capacity + 256))
        layers = [n for n, layout in enumerate(self.layouts) if isinstance(layout, PagedKV) and layout.window == window]
        if (capacity - pool.capacity) * self.page_bytes(window) + _KEEP_FREE > self.device.free_memory():
            capacity = least
        self._grow(layers, capacity, 0, pool.capacity)
        pool.grow(capacity)

    def _grow_slots(self, capacity: int) -> None:
        if self.device.fixed_caches:
            raise OutOfMemory(
                f"cache: {self.slots_used} of {self._slots} sequences that there is room for are open, expected fewer; "
                "close sessions, or allocate the caches for more sequences"
            )
        layers = [n for n, layout in enumerate(self.layouts) if not isinstance(layout, PagedKV)]
        self._grow(layers, 0, capacity, self._slots)
        self._free_slots.extend(range(capacity - 1, self._slots - 1, -1))
        self._slots = capacity

    def _grow(self, layers: Seq[int], pages: int, slots: int, before: int) -> None:
        """Have room for so many pages or slots of these layers, which had it for `before`."""
        need = (max(pages, slots) - before) * sum(self._row_bytes(self.layouts[n]) for n in layers)
        free = self.device.free_memory()
        full = self._reserved and any(len(self.arrays[n][0]) < max(pages, slots) for n in layers)
        if need + _KEEP_FREE > free or full:
            raise OutOfMemory(
                f"cache: {amount(need)} more of {self.device.memory_name} are needed, {amount(free)} are free; {_LESS}"
            )
        if self._reserved:
            return
        self.version += 1  # first: memory may end on the way, and some arrays are new then
        for n in layers:
            grown = empty(self.layouts[n], pages, slots, self.dtype, self.device.zeros)
            for new, array in zip(grown, self.arrays[n], strict=True):
                new[: len(array)] = array
            self.arrays[n] = grown
        for n, layout in self._with_room():
            if n in layers:
                gates = self.device.zeros((slots, *layout.gates), "float32")
                gates[: len(self.gates[n])] = self.gates[n]
                self.gates[n] = gates

    def _row_bytes(self, layout: Layout) -> int:
        """Bytes of one page, or of one slot, of a layer."""
        if isinstance(layout, PagedKV):
            return PAGE * (layout.key_width + layout.value_width) * ITEMSIZE[self.dtype]
        rows = math.prod(layout.conv_rows) * ITEMSIZE[self.dtype] + 4 * math.prod(layout.gates)
        return rows + math.prod(layout.state) * ITEMSIZE[layout.dtype]
