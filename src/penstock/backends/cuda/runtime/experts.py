"""Slots for streamed experts in GPU memory, and pinned host memory behind them.

An expert is read from disk into a record of pinned memory, and stays there as long as there is room. One launch moves
the records that a layer needs into their slots, straight over the bus. In a decode step the device decides itself: an
expert that is not in a slot takes that of the lowest score, as the policy on the host saw it a step ago, and comes from
its record; a report to the host follows. Only what is on disk stops a step, on all ranks of a split model, which learn
of it with the layer's sum. Everything runs on the current stream, so a slot is written after what reads its old expert
and before what reads its new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

import penstock.backends.cuda._launch  # noqa: F401  (sets Triton up)
from penstock.backends.cuda._rows import FOREIGN
from penstock.errors import OutOfMemory
from penstock.ops import linear
from penstock.ops.array import numpy_view
from penstock.ops.collective import communicator
from penstock.ops.device import ExpertFormat
from penstock.quant import BLOCK_TYPES, layout_in_planes
from penstock.units import parse_size, spelled

_BLOCK = 256 << 20  # bytes of pinned memory that are taken at a time
_WAY = 512 << 20  # bytes of experts that may be on their way at once
_AT_ONCE = 256  # and how many
_ARRANGED = 16  # GGUF blocks that a program rearranges
_SHARE = 0.6  # of the free host memory that is used unless `expert_host` says how much
_RING = 8  # moves that may be under way
_STAGED = 64 << 20  # bytes of experts in GGUF blocks that are rearranged at once
_PREFETCHED = 16  # experts that are read before a step chooses them, at once
_EPOCH = 1 << 30
_NOWHERE = -(1 << 62)  # where the record is of an expert that has none; others may have negative places


# move      slots[p][slot[i]] = the p-th array of record[i], for every array of a format; nothing where slot[i] is −1
# shapes    record int64 [n]: where records start, in words from base; slot int32 [n]; slots: tuples of int32 views of
#           the stacks; START, WORDS: where each array starts in a record, and its words
# grid      (n, ceil(words / BLOCK)): a program has BLOCK words of a record
# bytes     2 · n · words · 4; records may be in pinned host memory
# limits    arrays of whole words
@triton.jit
def _move_kernel(
    base_ptr, record_ptr, slot_ptr, slots, START: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    slot = tl.load(slot_ptr + i).to(tl.int64)
    if slot < 0:
        return
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    record = tl.load(record_ptr + i)
    end: tl.constexpr = START[PARTS - 1] + WORDS[PARTS - 1]
    value = tl.load(base_ptr + record + word, mask=word < end, other=0)
    for p in tl.static_range(PARTS):
        at = word - START[p]
        tl.store(slots[p] + slot * WORDS[p] + at, value, mask=(at >= 0) & (at < WORDS[p]))


# stage     staged[i] = record[i], whole, for the records that have a slot
# shapes    as those of `move`; staged int32 [n, WORDS]
# grid      (n, ceil(WORDS / BLOCK))
# bytes     2 · n · WORDS · 4; records may be in pinned host memory
# limits    none
@triton.jit
def _stage_kernel(base_ptr, record_ptr, slot_ptr, staged_ptr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    if tl.load(slot_ptr + i) < 0:
        return
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(base_ptr + tl.load(record_ptr + i) + word, mask=word < WORDS, other=0)
    tl.store(staged_ptr + i * WORDS + word, value, mask=word < WORDS)


# arrange   the planes of slot[i] = those of the blocks in staged[i] (`quant.gguf_planes`); nothing where slot[i] is −1
# shapes    staged uint8 [n, NBYTES]; planes: uint8 views of the stacks; tables: for each plane the moves of its
#           BYTES of a block, int32 [4, BYTES, FIELDS]. START, COUNT, SIZE: for each plane where its blocks start in a
#           record, how many there are, and bytes of one
# grid      (n, ceil(most blocks / BLOCKS)): a program has BLOCKS blocks of every plane
# bytes     what the records have, once from memory, then F times from the caches
# limits    none
@triton.jit
def _arrange_kernel(
    staged_ptr, slot_ptr, planes, tables, NBYTES: tl.constexpr, START: tl.constexpr, COUNT: tl.constexpr,
    SIZE: tl.constexpr, BYTES: tl.constexpr, FIELDS: tl.constexpr, PLANES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + i).to(tl.int64)
    if slot < 0:
        return
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    for p in tl.static_range(PLANES):
        byte = tl.arange(0, triton.next_power_of_2(BYTES[p]))
        known = byte < BYTES[p]
        live = (block < COUNT[p]) & known[None, :]
        source = staged_ptr + i * NBYTES + START[p] + block * SIZE[p]
        made = tl.zeros(live.shape, tl.int32)
        for f in tl.static_range(FIELDS[p]):
            at = tables[p] + byte * FIELDS[p] + f
            step = BYTES[p] * FIELDS[p]
            where = tl.load(at, mask=known, other=0)[None, :]
            right = tl.load(at + step, mask=known, other=0)[None, :]
            kept = tl.load(at + 2 * step, mask=known, other=0)[None, :]
            left = tl.load(at + 3 * step, mask=known, other=0)[None, :]
            made |= ((tl.load(source + where, mask=live, other=0).to(tl.int32) >> right) & kept) << left
        to = planes[p] + (slot * COUNT[p] + block) * BYTES[p] + byte[None, :]
        tl.store(to, made.to(tl.uint8), mask=live)


# resolve   slots for the experts that a layer chose and that have none: each takes the slot of the lowest score that
#           its layer does not use. report[0] = 1 if one of them has no record either: then nothing changes, and all
#           rows become inactive, so that what follows in the step changes nothing
# shapes    ids int32 [rows · K]; slot_of int32 (−1: none, −2: another rank's, which is no choice here), record int64
#           (NOWHERE: none) of all experts of all layers, this layer's from `base` on; key int32 [S]: whose slot it is;
#           score float32 [S], as the host saw it after `known`; used int32 [S]: when each slot was used last; clock
#           int32 [2]: the time before this step, and known; n: of the layer in the step; rows (a state each, −1:
#           inactive), positions, lengths int32; report int32 [1 + 2 · WIDTH]: flag, ids (−1 of inactive rows and of
#           other ranks), slots that were given; to_slot int32, to_record int64 [WIDTH]: what to move; with NOTED note
#           [2] of any float: the flag, twice
# grid      (1,)
# bytes     8 · S where something is missing
# limits    rows · K ≤ WIDTH; different experts of this rank ≤ S ≤ SLOTS; what was used since `known` scores above
#           anything else
@triton.jit
def _resolve_kernel(
    ids_ptr, slot_of_ptr, record_ptr, key_ptr, score_ptr, used_ptr, clock_ptr, rows_ptr, positions_ptr, lengths_ptr,
    report_ptr, to_slot_ptr, to_record_ptr, note_ptr, n, base, rows, experts, S, NOWHERE: tl.constexpr,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, NOTED: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    live = i < rows * K
    active = tl.load(rows_ptr + i // K, mask=live, other=-1) >= 0
    expert = tl.load(ids_ptr + i, mask=live, other=0)
    known = active & (expert >= 0) & (expert < experts)
    slot = tl.load(slot_of_ptr + base + expert, mask=known, other=0)
    known = known & (slot != FOREIGN)
    record = tl.load(record_ptr + base + expert, mask=known, other=0)
    away = known & (slot < 0)
    missing = tl.sum((away & (record == NOWHERE)).to(tl.int32)) > 0
    tl.store(report_ptr, missing.to(tl.int32))
    if NOTED:
        tl.store(note_ptr + tl.arange(0, 2), tl.zeros([2], tl.float32) + missing.to(tl.float32))
    tl.store(report_ptr + 1 + i, tl.where(active & (slot != FOREIGN), expert, -1), mask=live)
    given = tl.full([BLOCK], -1, tl.int32)
    now = tl.load(clock_ptr) + n + 1
    held = known & (slot >= 0)
    tl.store(used_ptr + slot, tl.zeros([BLOCK], tl.int32) + now, mask=held)
    if missing:
        row = i < rows
        tl.store(rows_ptr + i, given, mask=row)
        tl.store(positions_ptr + i, given, mask=row)
        tl.store(lengths_ptr + i, tl.zeros([BLOCK], tl.int32), mask=row)
    elif tl.sum(away.to(tl.int32)) > 0:
        number = expert + 0 * i
        before = (number[:, None] == number[None, :]) & (i[None, :] < i[:, None]) & away[None, :]
        first = away & (tl.sum(before.to(tl.int32), 1) == 0)
        order = tl.cumsum(first.to(tl.int32)) - 1
        tl.debug_barrier()
        s = tl.arange(0, SLOTS)
        used = tl.load(used_ptr + s, mask=s < S, other=now)
        late = (used - tl.load(clock_ptr + 1)).to(tl.float32)
        score = tl.where(late > 0, 1e28 * late, tl.load(score_ptr + s, mask=s < S, other=0.0))
        score = tl.where(used == now, float("inf"), score)
        for m in range(tl.sum(first.to(tl.int32))):
            least = tl.argmin(score, 0)
            score = tl.where(s == least, float("inf"), score)
            given = tl.where(first & (order == m), least.to(tl.int32), given)
        taken = given >= 0
        tl.store(used_ptr + given, tl.zeros([BLOCK], tl.int32) + now, mask=taken)
        old = tl.load(key_ptr + given, mask=taken, other=-1)
        tl.store(slot_of_ptr + old, tl.full([BLOCK], -1, tl.int32), mask=taken & (old >= 0))
        tl.debug_barrier()
        tl.store(slot_of_ptr + base + expert, given, mask=taken)
        tl.store(key_ptr + given, base + expert, mask=taken)
    tl.store(report_ptr + 1 + WIDTH + i, given, mask=live)
    tl.store(to_slot_ptr + i, given, mask=live)
    tl.store(to_record_ptr + i, record, mask=live)


# agree     found = note; where note[0] > 0, so that a rank stops, all rows become inactive
# shapes    note [2] of any float, summed over ranks: those that stop at this layer, those that missed experts of it;
#           found int32 [2]; rows, positions, lengths int32, as in resolve
# grid      (1,)
# bytes     12 · count where a rank stops
# limits    none
@triton.jit
def _agree_kernel(note_ptr, found_ptr, rows_ptr, positions_ptr, lengths_ptr, count, BLOCK: tl.constexpr):
    one = tl.arange(0, 2)
    tl.store(found_ptr + one, tl.load(note_ptr + one).to(tl.int32))
    if tl.load(note_ptr).to(tl.float32) > 0:
        i = tl.arange(0, BLOCK)
        none = tl.full([BLOCK], -1, tl.int32)
        tl.store(rows_ptr + i, none, mask=i < count)
        tl.store(positions_ptr + i, none, mask=i < count)
        tl.store(lengths_ptr + i, tl.zeros([BLOCK], tl.int32), mask=i < count)


class MissDetector:
    """See `ops.device`. The kernels report to pinned memory, so that detecting costs no copy."""

    def __init__(self, gpu: Any, tier: GpuTier, layers: int, width: int, sums: str | None = None) -> None:
        self._tier, self._width = tier, width
        self._gpu, self.turn = gpu, 0
        self._reports = [gpu.pinned((layers, 1 + 2 * width), torch.int32) for _ in range(2)]
        self._hosts = [numpy_view(report) for report in self._reports]
        self._to_slot = torch.full((width,), -1, dtype=torch.int32, device=gpu.torch_device)
        self._to_record = torch.zeros(width, dtype=torch.int64, device=gpu.torch_device)
        self.agreed: np.ndarray | None = None
        self._notes: Any = None
        if sums is not None:
            self._found = gpu.pinned((layers, 2), torch.int32).fill_(1)  # of no step yet
            self.agreed = numpy_view(self._found)
            kind = getattr(torch, sums)
            self._notes = torch.zeros((layers, 2), dtype=kind, device=gpu.torch_device)
            # what a layer's note says once its experts are there: that none were missed, or that some were
            self._resolved = torch.tensor([[0, 0], [0, 1]], dtype=kind, device=gpu.torch_device)

    @property
    def host(self) -> np.ndarray:
        return self._hosts[self.turn]

    def detect(self, n: int, layer: int, ids: Any, inputs: Mapping[str, Any]) -> None:
        (rows, k), tier, slots = ids.shape, self._tier, self._tier.slots_of[layer]
        _resolve_kernel[(1,)](
            ids, tier.table, tier.records, slots.key, slots.score, slots.used, tier.clock, inputs["slots"],
            inputs["positions"], inputs["lengths"], self._reports[self.turn][n], self._to_slot, self._to_record,
            None if self._notes is None else self._notes[n], n,
            tier.bases[layer], rows, tier.bases[layer + 1] - tier.bases[layer], slots.count, _NOWHERE, K=k,
            WIDTH=self._width, BLOCK=triton.next_power_of_2(rows * k), SLOTS=triton.next_power_of_2(slots.count),
            NOTED=self._notes is not None, num_warps=4 if slots.count <= 2048 else 16,
        )  # fmt: skip
        slots.move(self._to_record, self._to_slot, rows * k)

    def agree(self, n: int, x: Any, inputs: Mapping[str, Any], out: Any) -> None:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        communicator().all_reduce(out, self._notes[n])
        rows = len(inputs["slots"])
        _agree_kernel[(1,)](
            self._notes[n], self._found[n], inputs["slots"], inputs["positions"], inputs["lengths"], rows,
            BLOCK=triton.next_power_of_2(rows), num_warps=1,
        )  # fmt: skip

    def resolve(self, n: int, missed: bool) -> None:
        self._notes[n].copy_(self._resolved[int(missed)])

    def rank(self, behind: int) -> None:
        self._tier.rank(behind)

    def report_future(self) -> Callable[[], np.ndarray]:
        host, done = self.host, None if self._gpu.interpreted else torch.cuda.Event()
        if done is not None:
            done.record()

        def report() -> np.ndarray:
            if done is not None:
                done.synchronize()
            return host.copy()

        return report

    def prefetch_all(self) -> None:
        self._tier.prefetch_all()

    def apply_report(self, layers: np.ndarray, report: np.ndarray) -> None:
        self._tier.apply_report(layers, report)

    def wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


class GpuTier:
    """See `experts.store`. host: bytes of pinned memory for experts, "auto": what is free, as far as it helps.

    On the device: `table`, slots, and `records`, offsets in pinned memory, of all experts of all layers.
    """

    def __init__(self, gpu: Any, host: str, top_k: int) -> None:
        self._gpu, self._host, self._top_k = gpu, host, top_k
        self._ring = [_Sent(gpu) for _ in range(_RING)]
        self._next = self._time = 0
        self._ranked, self._roomy, self._fully_cached = -1, False, False
        self._store: Any = None
        self._pools: list[DeviceSlots] = []

    def slots(self, format: ExpertFormat, count: int, experts: int, share: float, store: Any) -> DeviceSlots:
        from penstock.machine import memory

        at_once = max(self._top_k, min(_AT_ONCE, count, _WAY // format.nbytes))
        free = memory(reclaim=True)[1]
        if self._host == "auto":
            room = int(free * _SHARE * share) // format.nbytes if count < experts else 0
        else:
            asked = parse_size(self._host, "load: expert_host", whole=experts * format.nbytes)
            if asked > free:
                raise OutOfMemory(f"expert_host: {spelled(asked)} are asked for, {spelled(free)} of memory are free")
            room = int(asked * share) // format.nbytes
        records = max(at_once, min(room, experts))
        self._pools.append(DeviceSlots(self._gpu, self, format, count, experts, records, at_once, store))
        return self._pools[-1]

    def device_slot_maps(self, store: Any) -> list[Any]:
        self._store = store
        sizes = [len(row) for row in store.slot_of]
        self.bases = [0, *accumulate(sizes)]
        self.slots_of = [pool.slots for pool in store.pool_of]
        here = [np.flatnonzero(row != linear.FOREIGN).tolist() for row in store.slot_of]  # not other ranks'
        for slots in self._pools:
            own = [layer for layer, found in enumerate(self.slots_of) if found is slots]
            slots.unread = ((layer, expert) for layer in own for expert in here[layer])
        self._roomy = all(slots.count >= 2 * max(map(len, here)) for slots in self._pools)
        self.host_records = np.full(self.bases[-1], _NOWHERE, np.int64)
        with self._gpu._memory_errors():
            self.table = torch.from_numpy(store.table.copy()).to(self._gpu.torch_device)
            self.records = torch.full((self.bases[-1],), _NOWHERE, dtype=torch.int64, device=self._gpu.torch_device)
            self.clock = torch.zeros(2, dtype=torch.int32, device=self._gpu.torch_device)
        return list(self.table.split(sizes))

    @property
    def fully_cached(self) -> bool:
        if not self._fully_cached and not self._store.pending:
            self._fully_cached = all(slots.kept == slots.experts for slots in self._pools) or bool(
                (self._store.table != linear.ABSENT).all()
            )
        return self._fully_cached

    def prefetch_all(self) -> None:
        """Go on to read experts before a step chooses them, where host memory has room for all, and send the places of
        those that have come to the device.
        """
        if sum(slots.prefetch_all() for slots in self._pools):
            now = self._sent()
            now.array("records", self.records)[:] = self.host_records
            now.go()

    def send(self) -> Any:
        """Bring what the host knows of slots and records to the device; an event that is done after what was sent."""
        now = self._sent()
        now.array("table", self.table)[:] = self._store.table
        now.array("records", self.records)[:] = self.host_records
        for n, slots in enumerate(self._pools):
            now.array(f"key{n}", slots.key)[:] = slots.pool.owner
        return now.go()

    def rank(self, behind: int) -> None:
        """Bring what the policies think of the slots to the device; they do not know of the last `behind` steps."""
        arrived = self._store.counters.host_hits + self._store.counters.reads
        if self._ranked == arrived and self._roomy:
            return  # nothing came since, so little will; slots seem to be in use that were in the last steps
        self._ranked = arrived
        now = self._sent()
        self._time = (self._time + len(self.slots_of)) % _EPOCH
        now.array("clock", self.clock)[:] = self._time, self._time - behind * len(self.slots_of)
        if self._time < len(self.slots_of):  # the clock begins anew
            for slots in self._pools:
                slots.used.zero_()
        for n, slots in enumerate(self._pools):
            score = slots.pool.policy.ranks()
            top = score.max()
            now.array(f"score{n}", slots.score)[:] = score - (top if np.isfinite(top) else 0.0)
        now.go()

    def apply_report(self, layers: np.ndarray, report: np.ndarray) -> None:
        """Bring the store up to date with what a step did on the device; report: rows of `MissDetector.host`."""
        ids, taken = np.split(report[:, 1:], 2, axis=1)
        came = taken >= 0
        if came.any():
            for slots in self._pools:
                own = np.array([self.slots_of[n] is slots for n in layers.tolist()])
                row, column = np.nonzero(came & own[:, None])  # in the order in which slots were given
                owners = slots.pool.owner.copy()
                owners[taken[row, column]] = self._store.bases[layers[row]] + ids[row, column]
                self._store.sync_owners(slots.pool, owners)
            counters = self._store.counters
            counters.host_hits += int(came.sum())
            sizes = np.array([self.slots_of[n]._format.payload for n in layers.tolist()])
            counters.bytes_copied += int((came.sum(axis=1) * sizes).sum())
        self._store.record_step(layers, ids, int(came.sum()))

    def _sent(self) -> _Sent:
        found = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        return found.ready()


class _Sent:
    """Pinned memory on its way to the device."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._held: dict[str, Any] = {}
        self._now: list[tuple[Any, Any]] = []
        self._done = None if gpu.interpreted else torch.cuda.Event()

    def ready(self) -> _Sent:
        """Wait until what was sent from here last has left."""
        if self._done is not None:
            self._done.synchronize()
        return self

    def array(self, name: str, target: Any) -> np.ndarray:
        """An array to fill, for `target` on the device."""
        if name not in self._held:
            self._held[name] = self._gpu.pinned(tuple(target.shape), target.dtype)
        self._now.append((target, self._held[name]))
        return numpy_view(self._held[name])

    def go(self) -> Any:
        for target, source in self._now:
            target.copy_(source, non_blocking=True)
        self._now = []
        if self._done is not None:
            self._done.record()
        return self._done


class DeviceSlots:
    """Slots in GPU memory; their experts come from `records` of pinned memory, the latest used ones of which stay."""

    def __init__(
        self,
        gpu: Any,
        tier: GpuTier,
        format: ExpertFormat,
        count: int,
        experts: int,
        records: int,
        at_once: int,
        store: Any,
    ) -> None:
        self.count, self.at_once = count, at_once
        self.experts = experts
        self._format, self._tier, self._gpu = format, tier, gpu
        self._reader, self._counters = store.reader, store.counters
        self._most = records
        blocks = format.blocks or (None,) * len(format.specs)
        with gpu._memory_errors():
            made = [
                _slot_arrays(spec, kind, count, gpu.torch_device)
                for spec, kind in zip(format.specs, blocks, strict=True)
            ]
            self.arrays = tuple(array for part in made for array in part)
            self._arranged = _Arranged(gpu, format, blocks, made, at_once) if any(blocks) else None
            self.key = torch.full((count,), -1, dtype=torch.int32, device=gpu.torch_device)
            self.score = torch.zeros(count, dtype=torch.float32, device=gpu.torch_device)
            self.used = torch.zeros(count, dtype=torch.int32, device=gpu.torch_device)
        plain = [n for n, kind in enumerate(blocks) if kind is None]
        self._views = tuple(made[n][0].view(-1).view(torch.int32) for n in plain)
        self._sizes = tuple(format.specs[n].nbytes // 4 for n in plain)
        self._start = tuple(format.offsets[n] // 4 for n in plain)
        self._orders = [_Sent(gpu) for _ in range(_RING)]
        self._order = 0
        self._blocks: list[Any] = []
        self._bytes: list[memoryview] = []
        self._at: list[int] = []  # where records start, in words from the first block
        self._record_of: OrderedDict[int, int] = OrderedDict()  # place in the table → record; the latest used ones last
        self._spare: list[int] = []
        self._moving: dict[int, Any] = {}  # record → event after the move that reads it
        self._coming: dict[int, int] = {}  # slot → place in the table of its expert, whose record is kept
        self._prefetched: dict[int, tuple[int, Future[None]]] = {}  # place in the table → record that is being read
        self.unread: Iterator[tuple[int, int]] = iter(())  # layers and experts still to be looked at for that
        self._prefetches = records == experts
        self._to_slot = torch.full((_AT_ONCE,), -1, dtype=torch.int32, device=gpu.torch_device)
        self._to_record = torch.zeros(_AT_ONCE, dtype=torch.int64, device=gpu.torch_device)
        self._grow()  # where records are counted from does not change any more

    @property
    def pool(self) -> Any:
        return next(pool for pool in self._tier._store.pool_of if pool.slots is self)

    def move(self, records: Any, slots: Any, count: int) -> None:
        """Launch a move of up to `count` records."""
        if self._arranged is not None:
            self._arranged.move(self._blocks[0], records, slots, count)
        if not self._views:
            return
        _move_kernel[(count, triton.cdiv(self._start[-1] + self._sizes[-1], 4096))](
            self._blocks[0], records, slots, self._views, START=self._start, WORDS=self._sizes,
            PARTS=len(self._sizes), BLOCK=4096, num_warps=8,
        )  # fmt: skip

    def fill(self, slots: Sequence[int], layer: int, experts: Sequence[int]) -> list[Future[None]]:
        futures = []
        for slot, expert in zip(slots, experts, strict=True):
            owner = self._coming[slot] = self._tier.bases[layer] + expert
            if owner in self._record_of:
                self._record_of.move_to_end(owner)
                self._counters.host_hits += 1
                futures.append(_done())
                continue
            if owner in self._prefetched:
                self._record_of[owner], future = self._prefetched.pop(owner)
                self._counters.guessed -= 1
            else:
                self._record_of[owner], future = self._read(layer, expert)
            futures.append(future)
        return futures

    def _read(self, layer: int, expert: int) -> tuple[int, Future[None]]:
        """Begin to read an expert into a record."""
        record = self._taken()
        self._counters.reads += 1
        self._counters.bytes_read += self._format.payload
        return record, self._reader.submit(layer, expert, self._format.views(self._bytes[record]))

    @property
    def kept(self) -> int:
        """Experts in records."""
        return len(self._record_of)

    def prefetch_all(self) -> bool:
        """Keep the records of experts that were read before a step chose them, and begin to read more. Whether there is
        something new. One that cannot be read ends this; a step that needs it reads it again and fails.
        """
        if not self._prefetches or self.kept == self.experts:
            return False
        done = [owner for owner, (_, future) in self._prefetched.items() if future.done()]
        for owner in done:
            record, future = self._prefetched.pop(owner)
            if future.exception() is None:
                self._record_of[owner] = record
                self._tier.host_records[owner] = self._at[record]
            else:
                self._spare.append(record)
                self._prefetches = False
        while self._prefetches and len(self._prefetched) < _PREFETCHED and (found := next(self.unread, None)):
            layer, expert = found
            owner = self._tier.bases[layer] + expert
            if owner not in self._record_of:
                self._prefetched[owner] = self._read(layer, expert)
                self._counters.guessed += 1
        return bool(done)

    def publish(self, slots: Sequence[int]) -> None:
        for start in range(0, len(slots), _AT_ONCE):
            part = slots[start : start + _AT_ONCE]
            owners = [self._coming.pop(slot) for slot in part]
            records = [self._record_of[owner] for owner in owners]
            self._tier.host_records[owners] = [self._at[record] for record in records]
            order = self._orders[self._order].ready()
            self._order = (self._order + 1) % len(self._orders)
            order.array("slot", self._to_slot)[: len(part)] = part
            order.array("record", self._to_record)[: len(part)] = [self._at[record] for record in records]
            order.go()
            self.move(self._to_record, self._to_slot, len(part))
            self._counters.bytes_copied += len(part) * self._format.payload
            self._moving.update(dict.fromkeys(records, self._tier.send()))

    def moved(self, owners: np.ndarray) -> None:
        if len(self._record_of) == self._most < self.experts:  # else none of them is ever given up
            for owner in owners.tolist():
                self._record_of.move_to_end(owner)

    def drop(self, slot: int) -> None:
        owner = self._coming.pop(slot)
        self._tier.host_records[owner] = _NOWHERE
        self._spare.append(self._record_of.pop(owner))

    def device_slot_map(self, slot_of: np.ndarray) -> Any:
        return torch.from_numpy(slot_of).to(self._gpu.torch_device)

    def _taken(self) -> int:
        """A record that may be written: a new one, or that of the expert which was not used for the longest time."""
        if not self._spare and len(self._at) < self._most:
            self._grow()
        if self._spare:
            record = self._spare.pop()
        else:
            kept = set(self._coming.values())
            owner = next(owner for owner in self._record_of if owner not in kept)
            record = self._record_of.pop(owner)
            self._tier.host_records[owner] = _NOWHERE
        event = self._moving.pop(record, None)
        if event is not None:
            event.synchronize()
        return record

    def _grow(self) -> None:
        size = self._format.nbytes
        count = min(self._most - len(self._at), max(1, _BLOCK // size))
        block = self._gpu.pinned((count * size // 4,), torch.int32)
        self._blocks.append(block)
        first = (block.data_ptr() - self._blocks[0].data_ptr()) // 4
        data = memoryview(numpy_view(block)).cast("B")
        self._spare += range(len(self._at) + count - 1, len(self._at) - 1, -1)
        self._at += [first + n * size // 4 for n in range(count)]
        self._bytes += [data[n * size : (n + 1) * size] for n in range(count)]


class _Arranged:
    """What brings those arrays of records that are GGUF blocks into the planes of slots, some records at a time."""

    def __init__(self, gpu: Any, format: ExpertFormat, blocks: Sequence[str | None], made: Any, at_once: int) -> None:
        self._nbytes = format.nbytes
        self._count = max(1, min(at_once, _STAGED // format.nbytes))
        self._staged = torch.empty((self._count, format.nbytes // 4), dtype=torch.int32, device=gpu.torch_device)
        self._planes, self._tables, shapes = [], [], []
        for spec, kind, offset, arrays in zip(format.specs, blocks, format.offsets, made, strict=True):
            if kind is None:
                continue
            size = BLOCK_TYPES[kind].nbytes
            for plane, array in zip(layout_in_planes(kind).planes, arrays, strict=True):
                table = torch.from_numpy(np.stack(plane.moves)).to(gpu.torch_device)
                self._planes.append(array.view(-1).view(torch.uint8))
                self._tables.append(table)
                shapes.append((offset, spec.nbytes // size, size, plane.nbytes, table.shape[2]))
        self._start, self._counts, self._sizes, *shares = zip(*shapes, strict=True)
        # Triton 3.6 does not take plain integers in a tuple for shapes
        self._bytes, self._fields = (share if gpu.interpreted else tuple(map(tl.constexpr, share)) for share in shares)

    def move(self, base: Any, records: Any, slots: Any, count: int) -> None:
        """Launch the moves of up to `count` records."""
        words, most = self._nbytes // 4, max(self._counts)
        for start in range(0, count, self._count):
            n, to = min(self._count, count - start), slots[start:]
            _stage_kernel[(n, triton.cdiv(words, 4096))](
                base, records[start:], to, self._staged, WORDS=words, BLOCK=4096, num_warps=8
            )
            _arrange_kernel[(n, triton.cdiv(most, _ARRANGED))](
                self._staged.view(torch.uint8), to, tuple(self._planes), tuple(self._tables), NBYTES=self._nbytes,
                START=self._start, COUNT=self._counts, SIZE=self._sizes, BYTES=self._bytes, FIELDS=self._fields,
                PLANES=len(self._planes), BLOCKS=_ARRANGED, num_warps=4,
            )  # fmt: skip


def _slot_arrays(spec: Any, kind: str | None, count: int, device: Any) -> list[Any]:
    """Memory for one array of `count` experts: itself, or the planes of its GGUF blocks."""
    if kind is None:
        return [torch.zeros((count, *spec.shape), dtype=_DTYPES[spec.dtype], device=device)]
    rows, nbytes = spec.shape
    blocks = nbytes // BLOCK_TYPES[kind].nbytes
    return [
        torch.zeros((count, rows, blocks * plane.entries), dtype=_DTYPES[plane.dtype], device=device)
        for plane in layout_in_planes(kind).planes
    ]


_DTYPES = {
    "uint32": torch.int32,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
