"""Memory for sequences: how much there is, how much is used or promised, and whether one more fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.engine.cache import PageTable, Sequence
from penstock.engine.engine import Engine
from penstock.engine.prefix import Entry, PrefixCache
from penstock.engine.steps import table_width
from penstock.errors import OutOfMemory
from penstock.units import amount

_KEEP_FREE = 256 << 20  # bytes of memory that sequences leave to everything else

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
        gone = 0 if self._prefix is None else self._prefix.reclaimable
        return self.used(promises, pages, 1) - gone <= self.total

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
    return engine.caches.nbytes + max(1, engine.device.free_memory())


def memory_for_sequences(engine: Engine, sequences: int) -> int:
    """Bytes for sequences: what is free, less activations, and of weights in files as many as half of the rest holds.

    At least one sequence of max_context has room, since `load` has seen to that.
    """
    device, caches, programs = engine.device, engine.caches, engine.programs
    working = _KEEP_FREE
    if programs is not None:
        with engine.lock:
            caches.make_room(dict.fromkeys(caches.pools, 1), 1)  # programs are made for caches that are not empty
            if programs.steps is not None:
                working += programs.steps.arena_bytes
            else:
                widths = dict.fromkeys(caches.pools, table_width(1))
                chunk = programs.prefill(min(device.chunk_alignment, engine.max_context), 0, widths, logits=False)
                step = programs.decode(device.rows(sequences), widths)
                working += chunk.program.arena_bytes + step.program.arena_bytes
    spare = max(0, device.free_memory() - working)
    mapped = min(engine.model.from_files, spare // 2)
    return caches.nbytes + max(spare - mapped, min(spare, caches.bytes_of(engine.max_context)))
