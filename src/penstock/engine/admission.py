"""Memory for sequences: how much there is, how much is used or promised, and whether one more fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.engine.cache import PageTable, Sequence
from penstock.engine.cache_size import sequences_within
from penstock.engine.engine import Engine
from penstock.engine.options import WORKING_BYTES
from penstock.engine.prefix import Entry, PrefixCache
from penstock.errors import InvalidArgument, OutOfMemory
from penstock.units import amount

GPU_MEMORY_UTILIZATION = 0.9  # share of a GPU's memory that weights, caches and steps may take together

Pages = Mapping[int | None, int]  # per window
Promises = Iterable[tuple[Sequence, Pages]]  # sequences, and the most pages that each may come to hold


class Admission:
    """Bytes for sequences and stored prefixes. A sequence that was let in finds its pages there."""

    def __init__(self, engine: Engine, total: int, prefix: PrefixCache | None) -> None:
        self._engine = engine
        self.total = total
        self._prefix = prefix

    def check(self, positions: int, prompt: int) -> Pages:
        """The pages that a request of so many positions may come to hold. Raises OutOfMemory if it can never fit."""
        caches = self._engine.caches
        need = caches.bytes_of(positions)
        if need > self.total:
            raise OutOfMemory(
                f"request: {positions} positions (a prompt of {prompt} and max_tokens) need {amount(need)} of "
                f"{self._engine.device.memory_name}, {amount(self.total)} are there for sequences; "
                "use fewer max_tokens or a shorter prompt"
            )
        return caches.pages_of(positions)

    def used(self, promises: Promises, more: Pages | None = None, slots: int = 0) -> int:
        """Bytes that are in use or promised; with `more` pages per window and slots."""
        caches = self._engine.caches
        owed = self._owed(promises, more or {})
        total = sum((pool.used + owed[w]) * caches.page_bytes(w) for w, pool in caches.pools.items())
        states = 0 if self._prefix is None else self._prefix.state_bytes
        return total + (caches.slots_used + slots) * caches.slot_bytes + states

    def open(self, pages: Pages, found: Entry | None, promises: Promises) -> Sequence:
        """A new sequence that may come to hold `pages`, in the state of a stored prefix. Raises OutOfMemory."""
        promises = list(promises)
        held = {} if found is None else _held(found.snapshot.tables)
        more = {window: max(0, count - held.get(window, 0)) for window, count in pages.items()}
        need = self.used(promises, more, 1)
        if need > self.total:
            raise OutOfMemory(
                f"request: needs memory that is in use, {amount(need)} with what runs, "
                f"expected at most {amount(self.total)}"
            )
        with self._engine.lock:
            self._engine.caches.make_room(self._owed(promises, more), 1)
            sequence = self._engine.caches.open()
        if self._prefix is not None and found is not None:
            self._prefix.use(found, sequence)
        return sequence

    def helps(self, pages: Pages, promises: Promises) -> bool:
        """Whether it would fit if all stored prefixes went."""
        return self._fits(promises, pages, slots=1, emptied=True)

    def stores(self, sequence: Sequence, promises: Promises, emptied: bool) -> bool:
        """Whether a copy of the sequence's state fits, and pages of windows in place of those that the copy holds.

        emptied: if all stored prefixes went.
        """
        pages = {window: 0 if window is None else len(table.live) for window, table in sequence.tables.items()}
        return self._fits(promises, pages, states=1, emptied=emptied)

    def _fits(self, promises: Promises, more: Pages, slots: int = 0, states: int = 0, emptied: bool = False) -> bool:
        """Whether pages per window, slots and copies of states fit beside what is in use or promised."""
        caches, promises = self._engine.caches, list(promises)
        gone = self._prefix if emptied else None
        if self._engine.device.fixed_caches:
            owed, back = self._owed(promises, more), {} if gone is None else gone.reclaimable_pages
            short = any(owed[window] > len(pool.free) + back.get(window, 0) for window, pool in caches.pools.items())
            if short or caches.slots_used + slots > caches.slots:
                return False
        need = self.used(promises, more, slots) + states * caches.slot_bytes
        return need - (0 if gone is None else gone.reclaimable) <= self.total

    def _owed(self, promises: Promises, more: Pages) -> dict[int | None, int]:
        """Pages per window that may still be taken."""
        owed = {window: more.get(window, 0) for window in self._engine.caches.pools}
        for sequence, pages in promises:
            held = _held(sequence.tables)
            for window in owed:
                owed[window] += max(0, pages[window] - held[window])
        return owed


def _held(tables: Mapping[int | None, PageTable]) -> dict[int | None, int]:
    return {window: len(table.ids) - table.first for window, table in tables.items()}


def all_memory(engine: Engine) -> int:
    """Bytes of what sequences have and of what is free: a limit for those that take memory while it lasts."""
    return engine.caches.nbytes + max(1, engine.free_memory())


def memory_for_sequences(engine: Engine, sequences: int, share: float = 1.0) -> int:
    """Bytes for sequences: what is free, less activations, and of weights in files as many as half of the rest holds.

    share: of the device's memory, for all that this process has there. With all of it at least one sequence of
    max_context has room, since `load` has seen to that.
    """
    caches = engine.caches
    working = engine.working_bytes(sequences)
    spare = max(0, engine.free_memory(share) - working)
    mapped = min(engine.model.from_files, spare // 2)
    return caches.nbytes + max(spare - mapped, min(spare, caches.bytes_of(engine.max_context)))


class Shares(NamedTuple):
    """What a scheduler has: sequences that run at a time, bytes for them and stored prefixes, bytes for prefixes."""

    sequences: int
    memory: int
    prefix: int


def share_memory(
    engine: Engine,
    sequences: int | None,
    memory: int | None,
    prefix: int | None,
    utilization: float | None = None,
    allocate: bool = True,
) -> Shares:
    """The shares of a scheduler that was asked for these, None for what is usual; caches of a fixed size are made now.

    allocate: False if the caches stay as they are, or as `load` has them. Raises OutOfMemory for more than there is.
    """
    device, caches = engine.device, engine.caches
    most = min(device.default_sequences if sequences is None else sequences, engine.most_sequences)
    memory = engine.cache_memory if memory is None else memory
    if not device.fixed_caches:
        if utilization is not None:
            raise InvalidArgument(
                f"scheduler: gpu_memory_utilization is {utilization!r}, expected none on device {device.name!r}; "
                "memory (--memory) is for all devices"
            )
        share = engine.free_memory() // 10 if prefix is None else prefix
        memory = memory_for_sequences(engine, most) if memory is None else memory
        return Shares(most, memory, min(share, memory))
    if not allocate:
        engine.ensure_allocated()
        share = caches.nbytes // 10 if prefix is None else prefix
        return Shares(min(most, caches.slots), caches.nbytes + (share if caches.slot_bytes else 0), share)
    least = caches.bytes_of(engine.max_context)
    if memory is None:
        memory = memory_for_sequences(engine, most, GPU_MEMORY_UTILIZATION if utilization is None else utilization)
        if utilization is None and memory < least:  # `load` has seen to it that the whole context fits all the same
            memory = min(least, memory_for_sequences(engine, most))
    elif memory > (there := caches.nbytes + engine.free_memory() - WORKING_BYTES):
        raise OutOfMemory(
            f"scheduler: memory for sequences is {amount(memory)}, expected at most {amount(max(0, there))}: "
            f"so much {device.memory_name} is free beside the weights and {amount(WORKING_BYTES)} for steps"
        )
    share = min(memory // 10, max(0, memory - least)) if prefix is None else prefix
    states = share if caches.slot_bytes else 0  # copies of recurrent state lie beside the caches
    if sequences is None:
        most = max(1, sequences_within(caches, engine.max_context, most, memory - share))
    engine.allocate(most, memory - states, stored=share - states)
    return Shares(most, min(memory, caches.nbytes + states), share)
