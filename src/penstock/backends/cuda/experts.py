"""Slots for streamed experts in GPU memory, pinned host memory behind them, and the search for what is missing.

An expert is read from disk into a record of pinned memory, and stays there as long as there is room. One launch moves
the records that a layer needs into their slots, straight over the bus. Everything runs on the current stream, so a slot
is written after what reads its old expert and before what reads its new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from penstock.errors import OutOfMemory
from penstock.ops._op import numpy_view
from penstock.streaming.layout import Format, views
from penstock.streaming.sizes import parse_size, spelled

_BLOCK = 256 << 20  # bytes of pinned memory that are taken at a time
_WAY = 512 << 20  # bytes of experts that may be on their way at once
_AT_ONCE = 256  # and how many
_SHARE = 0.6  # of the free host memory that is used unless somebody says how much
_RING = 8  # moves that may be under way


# move      slots[p][slot[i]] = the p-th array of record[i], for every array of a format
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
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    record = tl.load(record_ptr + i)
    slot = tl.load(slot_ptr + i).to(tl.int64)
    end: tl.constexpr = START[PARTS - 1] + WORDS[PARTS - 1]
    value = tl.load(base_ptr + record + word, mask=word < end, other=0)
    for p in tl.static_range(PARTS):
        at = word - START[p]
        tl.store(slots[p] + slot * WORDS[p] + at, value, mask=(at >= 0) & (at < WORDS[p]))


# look      report[1 + i] = ids[i], −1 for those of inactive rows; report[0] = whether one of them has no slot; if so,
#           all rows become inactive
# shapes    ids int32 [rows · K]; slot_of int32 [experts]; rows (a slot each, −1: inactive), positions, lengths int32
# grid      (1,)
# bytes     few
# limits    rows · K ≤ BLOCK
@triton.jit
def _look_kernel(
    ids_ptr, slot_of_ptr, rows_ptr, positions_ptr, lengths_ptr, report_ptr, rows, experts, K: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    live = i < rows * K
    active = tl.load(rows_ptr + i // K, mask=live, other=-1) >= 0
    expert = tl.load(ids_ptr + i, mask=live, other=0)
    known = active & (expert >= 0) & (expert < experts)
    slot = tl.load(slot_of_ptr + expert, mask=known, other=0)
    missing = tl.sum((known & (slot < 0)).to(tl.int32)) > 0
    tl.store(report_ptr + 1 + i, tl.where(active, expert, -1), mask=live)
    tl.store(report_ptr, missing.to(tl.int32))
    if missing:
        row = i < rows
        tl.store(rows_ptr + i, tl.full([BLOCK], -1, tl.int32), mask=row)
        tl.store(positions_ptr + i, tl.full([BLOCK], -1, tl.int32), mask=row)
        tl.store(lengths_ptr + i, tl.zeros([BLOCK], tl.int32), mask=row)


class Missing:
    """See engine/place.py. The kernel writes to pinned memory, so that a look costs no copy."""

    def __init__(self, pinned: Any, layers: int, width: int) -> None:
        self._report = pinned((layers, 1 + width), torch.int32)
        self.host = numpy_view(self._report)

    def look(self, n: int, ids: Any, slot_of: Any, inputs: Mapping[str, Any]) -> None:
        rows, k = ids.shape
        _look_kernel[(1,)](
            ids, slot_of, inputs["slots"], inputs["positions"], inputs["lengths"], self._report[n], rows,
            slot_of.numel(), K=k, BLOCK=triton.next_power_of_2(rows * k), num_warps=1,
        )  # fmt: skip

    def wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


class GpuTier:
    """See streaming/store.py. host: bytes of pinned memory for experts, "auto": what is free, as far as it helps."""

    def __init__(self, gpu: Any, host: str, top_k: int) -> None:
        self._gpu, self._host, self._top_k = gpu, host, top_k
        self._ring = [_Move(gpu) for _ in range(_RING)]
        self._next = 0
        self._table: Any = None
        self._slot_of: Sequence[np.ndarray] = ()

    def slots(self, format: Format, count: int, experts: int, share: float, store: Any) -> DeviceSlots:
        from penstock.backends.cpu.features import memory

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
        return DeviceSlots(self._gpu, self, format, count, records, at_once, store)

    def shown(self, slot_of: Sequence[np.ndarray]) -> list[Any]:
        self._slot_of = slot_of
        sizes = [len(row) for row in slot_of]
        with self._gpu._memory_errors():
            self._table = torch.full((sum(sizes),), -1, dtype=torch.int32, device=self._gpu.device)
        return list(self._table.split(sizes))

    def move(self, base: Any, records: Sequence[int], slots: Sequence[int], into: DeviceSlots) -> Any:
        """Launch a move, and bring what `slot_of` says to the device; an event that is done after it."""
        move = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        return move.run(base, records, slots, into, self._table, self._slot_of)


class _Move:
    """Pinned memory for one launch: what goes where, and the `slot_of` arrays as they are then."""

    def __init__(self, gpu: Any) -> None:
        self._gpu, self._records, self._slots, self._table = gpu, None, None, None
        self._done = None if gpu.interpreted else torch.cuda.Event()

    def run(
        self, base: Any, records: Sequence[int], slots: Sequence[int], into: DeviceSlots, table: Any, slot_of: Any
    ) -> Any:
        if self._records is None:
            self._records = self._gpu.pinned((_AT_ONCE,), torch.int64)
            self._slots = self._gpu.pinned((_AT_ONCE,), torch.int32)
            self._table = self._gpu.pinned(tuple(table.shape), torch.int32)
        elif self._done is not None:
            self._done.synchronize()  # of the move before the last few: its memory is free again
        n = len(slots)
        numpy_view(self._records)[:n] = records
        numpy_view(self._slots)[:n] = slots
        np.concatenate(slot_of, out=numpy_view(self._table))
        _move_kernel[(n, triton.cdiv(into.words, 4096))](
            base, self._records, self._slots, into.words_of, START=into.start, WORDS=into.sizes,
            PARTS=len(into.sizes), BLOCK=4096, num_warps=8,
        )  # fmt: skip
        table.copy_(self._table, non_blocking=True)
        if self._done is not None:
            self._done.record()
        return self._done


class DeviceSlots:
    """Slots in GPU memory; their experts come from `records` of pinned memory, the latest used ones of which stay."""

    def __init__(
        self, gpu: Any, tier: GpuTier, format: Format, count: int, records: int, at_once: int, store: Any
    ) -> None:
        self.count, self.at_once = count, at_once
        self._format, self._tier, self._gpu = format, tier, gpu
        self._reader, self._counters = store.reader, store.counters
        self._most = records
        with gpu._memory_errors():
            self.arrays = tuple(
                torch.zeros((count, *spec.shape), dtype=_DTYPES[spec.dtype], device=gpu.device) for spec in format.specs
            )
        self.words_of = tuple(array.view(-1).view(torch.int32) for array in self.arrays)
        self.sizes = tuple(spec.nbytes // 4 for spec in format.specs)
        self.start = tuple(offset // 4 for offset in format.offsets)
        self.words = self.start[-1] + self.sizes[-1]
        self._blocks: list[Any] = []
        self._bytes: list[memoryview] = []
        self._at: list[int] = []  # where records start, in words from the first block
        self._record_of: OrderedDict[tuple[int, int], int] = OrderedDict()  # the latest used ones last
        self._spare: list[int] = []
        self._moving: dict[int, Any] = {}  # record → event after the move that reads it
        self._coming: dict[int, tuple[int, int]] = {}  # slot → its expert, whose record is kept

    def fill(self, slots: Sequence[int], layer: int, experts: Sequence[int]) -> list[Future[None]]:
        futures = []
        for slot, expert in zip(slots, experts, strict=True):
            key = self._coming[slot] = (layer, expert)
            if key in self._record_of:
                self._record_of.move_to_end(key)
                self._counters.host_hits += 1
                futures.append(_done())
                continue
            record = self._record_of[key] = self._taken()
            self._counters.reads += 1
            self._counters.bytes_read += self._format.payload
            futures.append(self._reader.submit(layer, expert, views(self._format, self._bytes[record])))
        return futures

    def land(self, slots: Sequence[int]) -> None:
        for start in range(0, len(slots), _AT_ONCE):
            part = slots[start : start + _AT_ONCE]
            records = [self._record_of[self._coming.pop(slot)] for slot in part]
            event = self._tier.move(self._blocks[0], [self._at[record] for record in records], part, self)
            self._moving.update(dict.fromkeys(records, event))
            self._counters.bytes_copied += len(part) * self._format.payload

    def drop(self, slot: int) -> None:
        self._spare.append(self._record_of.pop(self._coming.pop(slot)))

    def shown(self, slot_of: np.ndarray) -> Any:
        return torch.from_numpy(slot_of).to(self._gpu.device)

    def _taken(self) -> int:
        """A record that may be written: a new one, or that of the expert which was not used for the longest time."""
        if not self._spare and len(self._at) < self._most:
            self._grow()
        if self._spare:
            record = self._spare.pop()
        else:
            kept = set(self._coming.values())
            record = self._record_of.pop(next(key for key in self._record_of if key not in kept))
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


_DTYPES = {
    "uint32": torch.int32,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
