"""Which experts are in memory: slots with a byte budget in front of the files, filled as tokens choose.

Layers whose experts have the same arrays share a pool of slots. A step asks for the experts of a layer as soon as they
are chosen (`request`) and waits for them before it computes (`wait`). A prefill may choose more experts than there are
slots; then they come in batches (`expert_batches`, `token_batches`). One thread at a time uses a store.

A store may own a part of the experts, where other ranks have the others: those are never read, counted or kept.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from penstock.dtypes import numpy_dtype
from penstock.errors import InvalidArgument, PenstockError
from penstock.experts.layout import Format, Layer
from penstock.experts.policy import Policy, make_policy
from penstock.ops.linear import ABSENT, FOREIGN
from penstock.units import amount
from penstock.weights.mapped import pages

_BATCH = 32  # experts of a batch: enough to read at once, and the slots that decoding uses stay


@dataclass
class Counters:
    """What a store has done. hits and reads count experts, once per layer and step; bytes are of the files."""

    hits: int = 0  # in a slot when they were chosen
    host_hits: int = 0  # in host memory, on their way to a GPU
    reads: int = 0  # from disk
    guessed: int = 0  # of the reads, those of a guess (they count as hits when they are chosen)
    bytes_read: int = 0
    bytes_copied: int = 0  # from host memory to a GPU
    wait_seconds: float = 0.0


class Reader(Protocol):
    """Reads experts from files (`reader.ExpertReader`)."""

    def submit(self, layer: int, expert: int, into: Sequence[memoryview]) -> Future[None]: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class Slots(Protocol):
    """Memory for `count` experts of one format."""

    count: int
    at_once: int  # most experts that can be on their way
    arrays: tuple[Any, ...]  # [count, …] each, in the order of the format

    def fill(self, slots: Sequence[int], layer: int, experts: Sequence[int]) -> Sequence[Future[None]]:
        """Begin to bring these experts into these slots; one future for each."""
        ...

    def publish(self, slots: Sequence[int]) -> None:
        """The futures of these slots are done: make them readable for kernels that are called from now on."""
        ...

    def drop(self, slot: int) -> None:
        """The future of this slot failed."""
        ...

    def moved(self, owners: np.ndarray) -> None:
        """The device brought these experts (places in the table of all layers) into slots itself."""
        ...

    def device_slot_map(self, slot_of: np.ndarray) -> Any:
        """A copy of a `slot_of` array where kernels read it."""
        ...


class Tier(Protocol):
    """Makes the slots of a store where its kernels run."""

    @property
    def fully_cached(self) -> bool:
        """Whether a device has all experts at hand, and will keep them: none of its steps stops."""
        ...

    def slots(self, format: Format, count: int, experts: int, share: float, store: Store) -> Slots:
        """Memory for `count` of this rank's `experts` of a format, which are a `share` of the bytes of all of its."""
        ...

    def device_slot_maps(self, store: Store) -> list[Any]:
        """The `slot_of` arrays of a store as kernels read them; what is published later changes them."""
        ...


class HostTier:
    """Slots in host memory."""

    fully_cached = False  # the host computes, and detects what is absent layer by layer

    def slots(self, format: Format, count: int, experts: int, share: float, store: Store) -> Slots:
        return HostSlots(format, count, store)

    def device_slot_maps(self, store: Store) -> list[Any]:
        return list(store.slot_of)


class HostSlots:
    """Slots in host memory, filled by reads straight into them."""

    def __init__(self, format: Format, count: int, store: Store) -> None:
        self.count = self.at_once = count
        self.arrays = tuple(pages((count, *spec.shape), numpy_dtype(spec.dtype)) for spec in format.specs)
        self._bytes = [array.reshape(-1).view(np.uint8).data for array in self.arrays]
        self._sizes = [spec.nbytes for spec in format.specs]
        self._reader, self._counters = store.reader, store.counters

    def fill(self, slots: Sequence[int], layer: int, experts: Sequence[int]) -> list[Future[None]]:
        self._counters.reads += len(slots)
        self._counters.bytes_read += len(slots) * sum(self._sizes)
        return [
            self._reader.submit(layer, expert, self._views(slot)) for slot, expert in zip(slots, experts, strict=True)
        ]

    def _views(self, slot: int) -> list[memoryview]:
        return [view[slot * size : (slot + 1) * size] for view, size in zip(self._bytes, self._sizes, strict=True)]

    def publish(self, slots: Sequence[int]) -> None:
        pass

    def drop(self, slot: int) -> None:
        pass

    def moved(self, owners: np.ndarray) -> None:
        pass

    def device_slot_map(self, slot_of: np.ndarray) -> np.ndarray:
        return slot_of


class Pool:
    """Slots that several layers share, and whose they are."""

    def __init__(self, slots: Slots, policy: Policy) -> None:
        self.slots, self.policy = slots, policy
        self.owner = np.full(slots.count, -1, np.int64)  # place of the expert in the table of all layers, −1: empty
        self.pending: dict[int, Future[None]] = {}
        self.latest: np.ndarray = np.empty(0, np.int32)  # slots of the layer that is computed now


class Store:
    """The experts of a model, of which `budget` bytes are in slots. `slot_of[layer]` int32 [E] says where: −1 for one
    that is in no slot, −2 for another rank's.

    top_k: experts that a token chooses, which must fit. tier: where the slots are, host memory by default. owned: the
    experts of each layer that are this rank's, ascending; None: all. Raises InvalidArgument for a budget that is too
    small, with the one that is needed, and for experts that there are not.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        reader: Reader,
        budget: int,
        top_k: int,
        policy: str = "auto",
        tier: Tier | None = None,
        owned: Sequence[int] | None = None,
    ) -> None:
        tier = tier or HostTier()
        self.layers, self.reader, self.top_k = list(layers), reader, chosen_here(top_k, owned)
        self.counters = Counters()
        self.bases = np.cumsum([0, *(layer.count for layer in self.layers)])
        self.table = np.full(self.bases[-1], ABSENT, np.int32)  # `slot_of` of all layers
        self.slot_of = np.split(self.table, self.bases[1:-1])
        counts = slot_counts(self.layers, budget, top_k, owned)
        if owned is not None:
            for row in self.slot_of:
                row[np.setdiff1d(np.arange(len(row)), owned)] = FOREIGN
        self._key_of = np.cumsum(self.table != FOREIGN) - 1  # as policies count: the experts of other ranks have none
        self._pools: dict[Format, Pool] = {}
        for format, count in counts.items():
            experts = sum(owned_count(layer, owned) for layer in self.layers if layer.format == format)
            share = experts * format.payload / max(1, owned_bytes(self.layers, owned))
            slots = tier.slots(format, count, experts, share, self)
            self._pools[format] = Pool(slots, make_policy(policy, count, max(1, int(self._key_of[-1]) + 1)))
        self.pool_of = [self._pools[layer.format] for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(pool.slots.count * format.payload for format, pool in self._pools.items())

    @property
    def most_tokens(self) -> int:
        """Tokens whose experts fit at once, whatever they choose."""
        return min(min(pool.slots.count, pool.slots.at_once) for pool in self._pools.values()) // max(1, self.top_k)

    def close(self) -> None:
        self.reader.close()

    # -- what a step does --------------------------------------------------------------------------------------------

    def request(self, layer: int, ids: np.ndarray, prefill: bool = False) -> bool:
        """Begin to bring in the experts that a layer chose; False if there are not enough slots, and nothing begins.

        Id −1 is no expert, and experts of other ranks are none either, here and below. prefill: ids are of a prefill,
        whose choice says little about the tokens after it.
        """
        pool, slot_of = self.pool_of[layer], self.slot_of[layer]
        chosen = self._distinct(layer, ids)
        slots = slot_of[chosen]
        absent = chosen[slots < 0]
        if len(absent):
            if len(absent) + len(pool.pending) > pool.slots.at_once:
                return False
            victims = self._victims(pool, slots[slots >= 0], len(absent))
            if len(victims) < len(absent):
                return False
            self._fill(layer, absent, victims)
            slots = slot_of[chosen]
        self.counters.hits += len(chosen) - len(absent)
        if prefill:
            pool.policy.touch_prefill(slots)
            self._count(layer, ids)
        else:
            pool.policy.used(slots)
        pool.latest = slots
        return True

    def _count(self, layer: int, ids: np.ndarray) -> None:
        """Count for the policy how often the tokens of a prefill [T, k] chose each expert."""
        there = ids >= 0
        chosen, counts = np.unique(self._named(layer, ids), return_counts=True)
        tokens = int(np.count_nonzero(there.any(axis=-1)))
        self.pool_of[layer].policy.add_prefill_counts(self._key_of[self.bases[layer] + chosen], counts, tokens)

    def wait(self, layer: int, ids: np.ndarray) -> None:
        """Wait for the experts ids, which were requested. Raises CheckpointError for one that cannot be read."""
        pool = self.pool_of[layer]
        if pool.pending:
            self._wait_for(pool, self.slot_of[layer][self._distinct(layer, ids)])

    def record_step(self, layers: np.ndarray, ids: np.ndarray, came: int) -> None:
        """Count what steps did on the device: `layers` [n] chose the experts ids [n, W] (−1: none), of which `came`
        were absent before. The owners of slots are in sync already.
        """
        chosen = np.unique((self.bases[layers][:, None] + ids)[ids >= 0])
        chosen = chosen[self.table[chosen] != FOREIGN]
        self.counters.hits += len(chosen) - came
        slots = self.table[chosen]
        for pool in self._pools.values():
            own = slots >= 0  # not so if it was given up later in the step
            own[own] = pool.owner[np.minimum(slots[own], pool.slots.count - 1)] == chosen[own]
            if own.any():
                pool.policy.used(slots[own])

    def sync_owners(self, pool: Pool, owners: np.ndarray) -> None:
        """Set the owners of a pool's slots to those that a device gave them to."""
        slots = np.flatnonzero(owners != pool.owner)
        self._take(pool, slots, owners[slots])
        pool.slots.moved(owners[slots])

    @property
    def pending(self) -> bool:
        """Whether something is on its way."""
        return any(pool.pending for pool in self._pools.values())

    def drain(self) -> None:
        """Wait for all that is on its way; a read that fails leaves an empty slot."""
        for pool in self._pools.values():
            if pool.pending:
                with contextlib.suppress(PenstockError):
                    self._wait_for(pool, np.array(list(pool.pending)))

    def expert_batches(self, layer: int, ids: np.ndarray) -> Iterator[Any]:
        """Where `request` says no to ids [T, k]: `slot_of` arrays, as kernels read them, of some experts at a time.

        Each chosen expert is present in one of them. While some are computed the next are read.
        """
        pool, slot_of = self.pool_of[layer], self.slot_of[layer]
        chosen = self._distinct(layer, ids)
        there = slot_of[chosen] >= 0
        current, rest = chosen[there], chosen[~there]
        self.counters.hits += len(current)
        self._count(layer, ids)
        at_once = max(1, min(pool.slots.count // 2, pool.slots.at_once // 2, _BATCH))
        while len(current) or len(rest):
            begun = self.begin(layer, rest[:at_once], slot_of[current])
            if len(current):
                self._wait_for(pool, slot_of[current])
                batch = np.minimum(slot_of, ABSENT)
                batch[current] = slot_of[current]
                pool.policy.touch_prefill(slot_of[current])
                yield pool.slots.device_slot_map(batch)
            elif not begun:
                self._wait_for(pool, np.array(list(pool.pending)))  # the slots are taken by guesses under way
            current, rest = rest[:begun], rest[begun:]

    def token_batches(self, layer: int, ids: np.ndarray) -> Iterator[slice]:
        """Where `request` says no to ids [T, k]: tokens in order, some at a time, all of whose experts are present."""
        for start in range(0, len(ids), self.most_tokens):
            part = slice(start, start + self.most_tokens)
            self.request(layer, ids[part], prefill=True)
            self.wait(layer, ids[part])
            yield part

    def prefetch(self, layer: int, ids: np.ndarray) -> None:
        """Begin to bring in experts that a layer will perhaps choose, as far as slots of no pending read are free."""
        pool, slot_of = self.pool_of[layer], self.slot_of[layer]
        chosen = self._distinct(layer, ids)
        absent = chosen[slot_of[chosen] < 0]
        if not len(absent) or len(pool.pending) + len(absent) > pool.slots.count - 2 * self.top_k:
            return
        keep = slot_of[chosen[slot_of[chosen] >= 0]]
        self.counters.guessed += self.begin(layer, absent, np.concatenate([keep, pool.latest]))

    def begin(self, layer: int, experts: np.ndarray, keep: np.ndarray) -> int:
        """Begin to bring in the first of these absent experts, as many as there are slots besides `keep`; how many."""
        pool = self.pool_of[layer]
        victims = self._victims(pool, keep, min(len(experts), pool.slots.at_once - len(pool.pending)))
        self._fill(layer, experts[: len(victims)], victims)
        return len(victims)

    def _victims(self, pool: Pool, keep: np.ndarray, count: int) -> np.ndarray:
        busy = np.zeros(pool.slots.count, bool)
        busy[keep] = True
        busy[list(pool.pending)] = True
        return pool.policy.victims(count, busy)

    def _take(self, pool: Pool, slots: np.ndarray, owners: np.ndarray) -> None:
        """Note whose these slots are now."""
        old = pool.owner[slots]
        self.table[old[old >= 0]] = ABSENT
        pool.owner[slots] = owners
        self.table[owners] = slots
        pool.policy.filled(slots, self._key_of[owners])

    def _fill(self, layer: int, experts: np.ndarray, slots: np.ndarray) -> None:
        pool = self.pool_of[layer]
        self._take(pool, slots, self.bases[layer] + experts)
        futures = pool.slots.fill(slots.tolist(), layer, experts.tolist())
        pool.pending.update(zip(slots.tolist(), futures, strict=True))

    def _wait_for(self, pool: Pool, slots: np.ndarray) -> None:
        started = time.perf_counter()
        failure: BaseException | None = None
        arrived = []
        for slot in slots.tolist():
            future = pool.pending.pop(slot, None)
            if future is None:
                continue
            try:
                future.result()
                arrived.append(slot)
            except BaseException as error:
                failure = failure or error
                self._drop(pool, slot)
        if arrived:
            pool.slots.publish(arrived)
        self.counters.wait_seconds += time.perf_counter() - started
        if failure is not None:
            raise failure

    def _drop(self, pool: Pool, slot: int) -> None:
        """Empty a slot whose expert did not arrive."""
        pool.slots.drop(slot)
        self.table[pool.owner[slot]] = ABSENT
        pool.owner[slot] = -1

    def _named(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """The experts of this rank that ids name, as often as they do."""
        named = ids[ids >= 0]
        return named[self.slot_of[layer][named] != FOREIGN]

    def _distinct(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """Each once."""
        return np.unique(self._named(layer, ids))


def owned_count(layer: Layer, owned: Sequence[int] | None) -> int:
    """Experts of a layer that a rank owns. Raises InvalidArgument for some that the layer does not have."""
    if owned is None:
        return layer.count
    if any(b <= a for a, b in itertools.pairwise([-1, *owned, layer.count])):
        raise InvalidArgument(
            f"{layer.name}: owned is {list(owned)}, expected ascending experts from 0 to {layer.count - 1}"
        )
    return len(owned)


def owned_bytes(layers: Sequence[Layer], owned: Sequence[int] | None) -> int:
    """Bytes in the files of the experts that a rank owns."""
    return sum(layer.format.payload * owned_count(layer, owned) for layer in layers)


def chosen_here(top_k: int, owned: Sequence[int] | None) -> int:
    """How many experts a token chooses at most of those that a rank owns."""
    return top_k if owned is None else min(top_k, len(owned))


def slot_counts(
    layers: Sequence[Layer], budget: int, top_k: int, owned: Sequence[int] | None = None
) -> dict[Format, int]:
    """How many slots each format gets of a budget in bytes, by the bytes that its experts have in all.

    No more than there are experts, no less than a token of one layer chooses. owned: the experts of each layer that
    count, None: all; without any there is one slot, which stays empty.
    """
    total: dict[Format, int] = {}
    for layer in layers:
        total[layer.format] = total.get(layer.format, 0) + owned_count(layer, owned)
    least = {format: min(chosen_here(top_k, owned), count) for format, count in total.items()}
    need = sum(format.payload * count for format, count in least.items())
    if budget < need:
        raise InvalidArgument(
            f"expert_cache: {amount(budget)} are too few, expected at least {amount(need)} "
            f"({', '.join(f'{n} experts of {amount(format.payload)}' for format, n in least.items())}: "
            "what a token chooses in a layer)"
        )
    whole = max(1, sum(format.payload * count for format, count in total.items()))
    left, counts = budget - need, dict(least)
    for format, count in total.items():
        share = left * (format.payload * count) // whole
        counts[format] = max(1, min(count, least[format] + share // format.payload))
    return counts
