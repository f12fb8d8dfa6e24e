"""Beginnings of prompts that were computed before: found by their tokens, kept as snapshots at chunk ends.

A prompt is cut into blocks of the device's chunk alignment. The digest of a block covers its tokens, all tokens before
it and the model, so equal digests mean equal states, bit for bit: every prefill is cut at the same points. What decode
steps have written is never stored, since their rounding is not that of a prefill.

A snapshot shares pages with the sequences and snapshots around it. Where a model keeps every position (no window, no
recurrent state) one more snapshot costs nothing, and there is one at each chunk end. Elsewhere each costs its state
and the pages of its windows, so there is one at the last chunk end of a prompt, which the next turn of a conversation
begins with, and one where two prompts were seen to part, which is where a shared instruction ends.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from penstock.engine.cache import Sequence, Snapshot
from penstock.engine.engine import Engine
from penstock.models.step import PAGE, PagedKV

_REMEMBERED = 1 << 16  # digests of blocks that were seen, stored or not


@dataclass(eq=False)
class Entry:
    """A stored prefix."""

    digest: bytes
    snapshot: Snapshot
    before: list[bytes]  # digests of the chunk ends before it

    @property
    def length(self) -> int:
        return self.snapshot.length


class PrefixCache:
    """Snapshots of prefixes up to a number of bytes; the least recently used go first. For one thread."""

    def __init__(self, engine: Engine, budget: int) -> None:
        self._engine = engine
        self.budget = budget
        self.alignment = engine.device.chunk_alignment
        caches = engine.caches
        self.free_of_cost = all(isinstance(layout, PagedKV) and layout.window is None for layout in caches.layouts)
        self._page_bytes = {window: caches.page_bytes(window) for window in caches.pools}
        self._state_bytes = caches.state_bytes
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # the least recently used first
        self._pages: dict[int | None, Counter[int]] = {window: Counter() for window in caches.pools}
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._root = hashlib.blake2b(engine.model.fingerprint.encode(), digest_size=16).digest()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state that the entries hold."""
        return self._state_bytes * len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of recurrent state and of pages that the entries hold, alone or with others."""
        pages = sum(len(held) * self._page_bytes[window] for window, held in self._pages.items())
        return self.state_bytes + pages

    @property
    def reclaimable_pages(self) -> dict[int | None, int]:
        """Pages per window that would be free if all entries went."""
        pools = self._engine.caches.pools
        return {
            window: sum(pools[window].references[page] == count for page, count in held.items())
            for window, held in self._pages.items()
        }

    @property
    def reclaimable(self) -> int:
        """Bytes that would be free if all entries went."""
        pages = self.reclaimable_pages
        return self.state_bytes + sum(count * self._page_bytes[window] for window, count in pages.items())

    def digests(self, tokens: Seq[int]) -> list[bytes]:
        """One digest per whole chunk. May be called from any thread."""
        ids = np.asarray(tokens, "<i4")
        found, digest = [], self._root
        for start in range(0, len(ids) - self.alignment + 1, self.alignment):
            digest = hashlib.blake2b(digest + ids[start : start + self.alignment].tobytes(), digest_size=16).digest()
            found.append(digest)
        return found

    def find(self, digests: Seq[bytes], length: int) -> Entry | None:
        """The longest stored prefix of a prompt of `length` tokens that leaves at least one to compute."""
        for digest in reversed(digests[: (length - 1) // self.alignment]):
            if digest in self._entries:
                return self._entries[digest]
        return None

    def use(self, entry: Entry, sequence: Sequence) -> None:
        """Put a sequence into the state of an entry, which becomes the most recently used."""
        self._engine.rewind(sequence, entry.snapshot)
        self._touch(entry)

    def points(self, digests: Seq[bytes], start: int) -> set[int]:
        """Lengths at which the prefill of a prompt, begun at `start`, should store; the prompt counts as seen."""
        alignment, blocks = self.alignment, len(digests)
        seen = next((n for n, digest in enumerate(digests) if digest not in self._seen), blocks)
        for digest in reversed(digests):
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        wanted = range(1, blocks + 1) if self.free_of_cost else {seen, blocks}
        return {n * alignment for n in wanted if n * alignment > start}

    def store(self, digests: Seq[bytes], sequence: Sequence, fits: Callable[[bool], bool]) -> bool:
        """Keep the present state of a sequence, which is at a chunk end of a prompt with these digests.

        fits: whether there is room, neither in use nor promised, for what the sequence itself will not hold on to: the
        state and the pages of windows; with True, whether there would be if all entries went. Others go if the budget
        or the room asks for it; if that is not enough nothing is stored.
        """
        assert sequence.length % self.alignment == 0 and self.alignment % PAGE == 0
        blocks = sequence.length // self.alignment
        digest = digests[blocks - 1]
        if digest in self._entries:
            self._touch(self._entries[digest])
            return True
        pages = {window: len(table.live) * self._page_bytes[window] for window, table in sequence.tables.items()}
        if self._state_bytes + sum(pages.values()) > self.budget or not fits(True):
            return False
        while self.nbytes + self._added(sequence) > self.budget or not fits(False):
            if not self.evict():
                return False
        try:
            snapshot = self._engine.snapshot(sequence)
        except MemoryError:
            return False
        entry = self._entries[digest] = Entry(digest, snapshot, list(digests[: blocks - 1]))
        for window, table in snapshot.tables.items():
            self._pages[window].update(table.live)
        self._touch(entry)
        return True

    def evict(self) -> bool:
        """Drop the least recently used entry; False if there is none."""
        if not self._entries:
            return False
        _, entry = self._entries.popitem(last=False)
        for window, table in entry.snapshot.tables.items():
            held = self._pages[window]
            held.subtract(table.live)
            for page in table.live:
                if not held[page]:
                    del held[page]
        self._engine.drop(entry.snapshot)
        return True

    def clear(self) -> None:
        while self.evict():
            pass

    def _touch(self, entry: Entry) -> None:
        """Where entries share all their memory the longer one is the older: it alone gives something back."""
        self._entries.move_to_end(entry.digest)
        if self.free_of_cost:
            for digest in reversed(entry.before):
                if digest in self._entries:
                    self._entries.move_to_end(digest)

    def _added(self, sequence: Sequence) -> int:
        """Bytes that a snapshot of the sequence would add."""
        total = self._state_bytes
        for window, table in sequence.tables.items():
            held = self._pages[window]
            total += self._page_bytes[window] * sum(page not in held for page in table.live)
        return total
