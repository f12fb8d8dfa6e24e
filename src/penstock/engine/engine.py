"""Runs a model for sequences: prefill on a grid of positions, decode of several sequences at once.

A step's arithmetic for one sequence depends neither on who else is in the batch nor on where its pages lie. Prompts are
cut at multiples of GRID, so the answer does not depend on whether a part of the prompt was there before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from penstock.engine.cache import Caches, Sequence, Snapshot
from penstock.engine.place import Place, place_of
from penstock.errors import InvalidArgument
from penstock.models.step import PAGE, Step

GRID = PAGE  # prefill is cut at multiples of this position


@dataclass(frozen=True)
class Model:
    """A loaded model: the family's module, its config and its weights, and a name for the files it came from."""

    family: ModuleType
    config: Any
    weights: Any
    fingerprint: str
    nbytes: int = 0


class Engine:
    """One model on one device with the caches of its sequences. Its methods may be called from several threads."""

    def __init__(
        self,
        model: Model,
        *,
        device: str = "cpu",
        activations: str = "int8",
        dtype: str = "float32",
        max_context: int,
        deterministic: bool = False,
        place: Place | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.activations = activations
        self.dtype = dtype
        self.max_context = max_context
        self.deterministic = deterministic
        self.place = place or place_of(device)
        self.caches = Caches(model.family.caches(model.config), dtype, self.place)
        self._lock = threading.RLock()

    def open(self) -> Sequence:
        with self._lock:
            return self.caches.open()

    def close(self, sequence: Sequence) -> None:
        with self._lock:
            self.caches.close(sequence)

    def snapshot(self, sequence: Sequence) -> Snapshot:
        with self._lock:
            self._check_room(sequence, 0)
            return self.caches.snapshot(sequence)

    def rewind(self, sequence: Sequence, snapshot: Snapshot) -> None:
        with self._lock:
            if sequence.closed or snapshot.closed:
                which = "sequence" if sequence.closed else "snapshot"
                raise InvalidArgument(f"rewind: the {which} was closed, expected an open one")
            self.caches.rewind(sequence, snapshot)

    def drop(self, snapshot: Snapshot) -> None:
        with self._lock:
            self.caches.drop(snapshot)

    def prefill(
        self,
        sequence: Sequence,
        tokens: Seq[int],
        every: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """Append tokens to a sequence; scores after the last one [vocab], or after each one [T, vocab].

        Cut at multiples of GRID, so that what is stored at a grid point never depends on the cut. If a piece fails the
        sequence keeps what the pieces before it wrote. `progress` is called with the number of tokens of each piece.
        """
        ids = self._ids(tokens)
        if not len(ids):
            raise InvalidArgument("prefill: tokens is empty, expected at least one")
        self._check_room(sequence, len(ids))
        rows = np.empty((len(ids), self.model.config.vocab_size), np.float32) if every else None
        done = 0
        while True:
            count = min(len(ids) - done, GRID - sequence.length % GRID)
            last = done + count == len(ids)
            scores = self._piece(sequence, ids[done : done + count], every, last)
            if rows is not None:
                rows[done : done + count] = scores
            done += count
            if progress is not None:
                progress(count)
            if last:
                assert scores is not None
                return scores[0] if rows is None else rows

    def _piece(self, sequence: Sequence, ids: np.ndarray, every: bool, last: bool) -> np.ndarray | None:
        family, config, weights = self.model.family, self.model.config, self.model.weights
        with self._lock, self.place.running(deterministic=False):  # the cut of a prompt does not depend on others
            self.caches.reserve(sequence, len(ids))  # may raise OutOfMemory, and then nothing has changed
            arrays = (table.array for table in sequence.tables.values())
            tokens, positions, *tables = self.place.numbers([ids, np.array(sequence.length, np.int32), *arrays])
            step = Step(
                tokens=tokens,
                positions=positions,
                tables=dict(zip(sequence.tables, tables, strict=True)),
                start=sequence.length,
                slot=sequence.slot,
                activations=self.activations,
                dtype=self.dtype,
            )
            with _whole([sequence]):
                h = family.forward(step, weights, config, self.caches.arrays)
                self.caches.advance(sequence, len(ids))
            if every or last:
                return self.place.host(family.logits(step, h if every else h[-1:], weights, config))
            return None

    def decode(self, sequences: Seq[Sequence], tokens: Seq[int]) -> np.ndarray:
        """Append one token to each of B sequences; scores after it, float32 [B, vocab]."""
        family, config, weights = self.model.family, self.model.config, self.model.weights
        ids = self._ids(tokens)
        for sequence in sequences:
            self._check_room(sequence, 1)
        with self._lock, self.place.running(self.deterministic):
            for sequence in sequences:
                self.caches.reserve(sequence, 1)
            at = np.array([sequence.length for sequence in sequences], np.int32)
            rows = np.array([sequence.slot for sequence in sequences], np.int32)
            arrays = (_tables(sequences, window) for window in self.caches.pools)
            tokens_here, positions, lengths, slots, *tables = self.place.numbers(
                [ids, at, at + np.int32(1), rows, *arrays]
            )
            step = Step(
                tokens=tokens_here,
                positions=positions,
                tables=dict(zip(self.caches.pools, tables, strict=True)),
                slots=slots,
                lengths=lengths,
                activations=self.activations,
                dtype=self.dtype,
            )
            with _whole(sequences):
                h = family.forward(step, weights, config, self.caches.arrays)
                for sequence in sequences:
                    self.caches.advance(sequence, 1)
            return self.place.host(family.logits(step, h, weights, config))

    def _ids(self, tokens: Seq[int]) -> np.ndarray:
        vocab = self.model.config.vocab_size
        try:
            ids = np.asarray(tokens)
        except (ValueError, TypeError, OverflowError):
            ids = np.empty(0, object)
        if ids.size == 0 and ids.dtype != object:
            return np.empty(0, np.int32)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidArgument("tokens: expected a list of integers (token ids)")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab:
            raise InvalidArgument(f"tokens: has {low if low < 0 else high}, expected ids from 0 to {vocab - 1}")
        return ids.astype(np.int32)

    def _check_room(self, sequence: Sequence, count: int) -> None:
        if sequence.closed or sequence.spoiled:
            state = "was closed" if sequence.closed else "was interrupted in the middle of a step"
            raise InvalidArgument(
                f"sequence: it {state}, expected an open one (rewind it to a snapshot, or start anew)"
            )
        if sequence.length + count > self.max_context:
            raise InvalidArgument(
                f"context: {sequence.length} positions are filled and {count} more were given, "
                f"expected at most {self.max_context} in all (max_context)"
            )


@contextlib.contextmanager
def _whole(sequences: Seq[Sequence]) -> Iterator[None]:
    """Mark sequences whose step did not come to its end: their states may be half-way."""
    try:
        yield
    except BaseException:
        for sequence in sequences:
            sequence.spoiled = True
        raise


def _tables(sequences: Seq[Sequence], window: int | None) -> np.ndarray:
    """Block tables of several sequences, padded to the longest with page 0."""
    arrays = [sequence.tables[window].array for sequence in sequences]
    if len(arrays) == 1:
        return arrays[0][None]
    table = np.zeros((len(arrays), max(map(len, arrays))), np.int32)
    for row, array in zip(table, arrays, strict=True):
        row[: len(array)] = array
    return table
