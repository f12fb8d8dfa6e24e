"""The end of a step on the GPU: tokens are drawn, kept for the next step, and reported to the host.

With it the next step may be launched before what this one drew is read.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from penstock.backends.cuda._launch import pdl_options, wait_for_previous
from penstock.backends.cuda.runtime.inputs import StepInputs
from penstock.backends.cuda.sampling import sample_tokens
from penstock.errors import BackendError
from penstock.ops.array import numpy_view, torch_view
from penstock.ops.sampling import MAX_TOP, ONE, SEEN, Edits, mask_words, split_mode

RING = 4  # steps whose tokens are kept for the host; one that comes round again is read before it is overwritten

_SEEN, _ONE = tl.constexpr(SEEN), tl.constexpr(ONE)


# feed      last[slots] = ring[step % RING] = drawn, step one further; with edited: counts[edited, token] has one more,
#           and the repetition penalty holds for it
# shapes    drawn, slots, edited int32 [rows], −1: none; last int32 [S]; ring int32 [RING, stride] in pinned host
#           memory; step [1]; counts int32 [E, V]
# grid      (1,)
# bytes     a few
# limits    none
@triton.jit
def _feed_kernel(
    drawn_ptr, slots_ptr, last_ptr, ring_ptr, step_ptr, edited_ptr, counts_ptr, rows, stride, V,
    RING: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    b = tl.arange(0, BLOCK)
    live = b < rows
    token = tl.load(drawn_ptr + b, mask=live, other=0)
    slot = tl.load(slots_ptr + b, mask=live, other=-1)
    step = tl.load(step_ptr)
    tl.store(last_ptr + slot, token, mask=live & (slot >= 0))
    tl.store(ring_ptr + step % RING * stride + b, token, mask=live)
    if edited_ptr is not None:
        edited = tl.load(edited_ptr + b, mask=live, other=-1).to(tl.int64)
        counted = live & (token >= 0) & (edited >= 0)
        count = tl.load(counts_ptr + edited * V + token, mask=counted, other=0)
        tl.store(counts_ptr + edited * V + token, (count + _ONE) | _SEEN, mask=counted)
    tl.debug_barrier()  # all have read the number of the step
    tl.store(step_ptr, step + 1)


# report    own, ids and top of a step go to their places of the ring
# shapes    own float64 [rows], ids int32, top float64 [rows, n]; each ring [RING, stride, …] in pinned host memory;
#           step [1]
# grid      (rows,)
# bytes     12 * rows * n
# limits    none
@triton.jit
def _report_kernel(
    own_ptr, ids_ptr, top_ptr, own_ring_ptr, ids_ring_ptr, top_ring_ptr, step_ptr, stride, n, RING: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0)
    at, i = tl.load(step_ptr) % RING * stride + row, tl.arange(0, BLOCK)
    tl.store(own_ring_ptr + at, tl.load(own_ptr + row))
    ids = tl.load(ids_ptr + row * n + i, mask=i < n, other=0)
    top = tl.load(top_ptr + row * n + i, mask=i < n, other=0.0)
    tl.store(ids_ring_ptr + at * n + i, ids, mask=i < n)
    tl.store(top_ring_ptr + at * n + i, top, mask=i < n)


class PendingStep:
    """Tokens of a step that is under way."""

    def __init__(self, row: np.ndarray, logprobs: Sequence[np.ndarray], done: Any) -> None:
        self._row, self._rings, self._done = row, logprobs, done
        self._tokens: list[int] | None = None
        self._logprobs: tuple[np.ndarray, ...] = ()

    def tokens(self) -> list[int]:
        """Wait for the step; one token per row."""
        if self._tokens is None:
            if self._done is not None:
                self._done.synchronize()
            self._tokens = self._row.tolist()
            self._logprobs = tuple(ring.copy() for ring in self._rings)
        return self._tokens

    def logprobs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Wait for the step; of its tokens [rows], and ids and log-probabilities of the first ranks [rows, 20]."""
        self.tokens()
        own, ids, top = self._logprobs
        return own, ids, top


class EditTables:
    """The edits of requests on the GPU, by slot: the tables of `ops.sample_tokens`.

    The GPU counts what it draws. A request's row is sent when it first comes, again when the host has counted tokens
    that were not drawn here, and of what the repetition penalty forgets the ids alone.
    """

    def __init__(self, gpu: Any, vocab: int, slots: int) -> None:
        self.counts = gpu.zeros((slots, vocab), "int32")
        self.bias = gpu.zeros((slots, vocab), "float32")
        self.penalties = gpu.zeros((slots, 3), "float64")
        self._slots: weakref.WeakKeyDictionary[Edits, int] = weakref.WeakKeyDictionary()
        self._fills = 0
        self._used = [0] * slots  # the fill that a slot was last part of

    def fill(self, rows: Sequence[Edits | None]) -> list[int]:
        """Bring the edits of these rows here; the slot of each, −1 where it has none. Raises BackendError: too many."""
        self._fills += 1
        for edits in rows:
            if edits is not None and edits in self._slots:
                self._used[self._slots[edits]] = self._fills
        return [-1 if edits is None else self._place(edits) for edits in rows]

    def _place(self, edits: Edits) -> int:
        slot = self._slots.get(edits)
        if slot is None:
            taken = set(self._slots.values())
            slot = min(range(len(self._used)), key=lambda s: (s in taken, self._used[s]))
            if slot in taken and self._used[slot] == self._fills:
                most = len(self._used)
                raise BackendError(f"sampling: more than {most} rows have edits, expected at most {most}")
            for other in [other for other, at in self._slots.items() if at == slot]:
                del self._slots[other]
            self._slots[edits], self._used[slot], edits.stale = slot, self._fills, True
        if edits.stale:
            for table, row in ((self.counts, edits.counts), (self.bias, edits.bias), (self.penalties, edits.penalties)):
                table[slot].copy_(torch_view(row))
        elif gone := [i for i in edits.forgotten if not edits.counts[i] & SEEN]:
            index = torch.tensor(gone, device=self.counts.device)
            self.counts[slot, index] = self.counts[slot, index] & ~SEEN
        edits.stale = False
        edits.forgotten.clear()
        return slot


# what sampling reads for each row: where it draws, how, and which edits and grammar it has
SAMPLING_INPUTS = {
    "draw_at": "int32", "draw_slots": "int32", "temperature": "float64", "top_p": "float64", "min_p": "float64",
    "seed": "int64", "top_k": "int32", "edited": "int32", "masked": "int32",
}  # fmt: skip


class DeviceSampler:
    """What draws after steps with these inputs, from logits [rows, vocab].

    What edits and log-probabilities need is made when the first step has some.
    """

    def __init__(self, gpu: Any, inputs: StepInputs, vocab: int) -> None:
        self._gpu, self._inputs, self._vocab = gpu, inputs, vocab
        self._most = most = len(inputs.on_device["draw_at"])
        self.drawn = gpu.zeros((most,), "int32")
        self._step = gpu.zeros((1,), "int32")
        self._ring = self._new_ring((most,), torch.int32)
        self._events = [None if gpu.interpreted else torch.cuda.Event() for _ in range(RING)]
        self._pending: list[PendingStep | None] = [None] * RING
        self._steps = 0
        self._last: tuple[list[Any], dict[str, np.ndarray]] = [], {}

    def values(self, rows: Sequence[Mapping[str, Any]], masks: Sequence[np.ndarray | None] = ()) -> dict[str, Any]:
        """See `ops.device`; the edits and masks themselves are sent here."""
        known, found = self._last
        if len(known) != len(rows) or any(one is not other for one, other in zip(known, rows, strict=True)):
            names = ("temperature", "top_p", "min_p", "seed", "top_k")
            found = {name: np.array([row[name] for row in rows], SAMPLING_INPUTS[name]) for name in names}
            self._last = list(rows), found
        edits = [row.get("edits") for row in rows]
        masked = np.full(len(rows), -1, np.int32)
        edited = np.array(self._tables.fill(edits), np.int32) if any(edits) else masked
        if any(mask is not None for mask in masks):
            self._masks.ready()
            masked = masked.copy()
            for b, mask in enumerate(masks):
                if mask is not None:
                    self._masks.host[0][b], masked[b] = mask_words(mask, self._vocab), b
            self._masks.send()
        return found | {"edited": edited, "masked": masked}

    def calls(
        self, logits: torch.Tensor, mode: str, behind: Sequence[Callable[[], object]] = ()
    ) -> list[Callable[[], object]]:
        """The draw in a mode of `ops.sample_tokens`, what is done behind it, and its way back."""
        kind, edited, wanted = split_mode(mode)
        rows, vocab = logits.shape
        p = {name: self._inputs.on_device[name][:rows] for name in SAMPLING_INPUTS}
        tables: dict[str, torch.Tensor] = {}
        if edited:
            own = self._tables
            tables = {"slots": p["edited"], "counts": own.counts, "bias": own.bias, "penalties": own.penalties}
            tables |= {"masked": p["masked"], "masks": self._masks.on_device[0][:rows]}
        found = [array[:rows] for array in self._logprobs[0]] if wanted else [None, None, None]
        draw = functools.partial(
            sample_tokens, logits, p["draw_at"], p["temperature"], p["top_k"], p["top_p"], p["min_p"], p["seed"], kind,
            **tables, logprobs=MAX_TOP if wanted else None, out=(self.drawn[:rows], *found), in_place=True,
        )  # fmt: skip
        feed = functools.partial(
            _feed_kernel[(1,)], self.drawn, p["draw_slots"], self._inputs.last, self._ring, self._step,
            tables.get("slots"), tables.get("counts"), rows, self._most, vocab, RING=RING,
            BLOCK=triton.next_power_of_2(rows), num_warps=1, **pdl_options(),
        )  # fmt: skip
        if not wanted:
            return [draw, *behind, feed]
        report = functools.partial(
            _report_kernel[(rows,)], *found, *self._logprobs[1], self._step, self._most, MAX_TOP, RING=RING,
            BLOCK=triton.next_power_of_2(MAX_TOP), num_warps=1, **pdl_options(),
        )  # fmt: skip
        return [draw, *behind, report, feed]

    def launched(self, rows: int, mode: str) -> PendingStep:
        """The draw that was just launched."""
        at = self._steps % RING
        self._steps += 1
        event = self._events[at]
        if event is not None:
            event.record()
        rings = [numpy_view(ring)[at, :rows] for ring in self._logprobs[1]] if split_mode(mode)[2] else []
        self._pending[at] = step = PendingStep(numpy_view(self._ring)[at, :rows], rings, event)
        oldest = self._pending[self._steps % RING]  # the next step writes over it
        if oldest is not None:
            oldest.tokens()
        return step

    def _new_ring(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """One array of each of the last steps, in host memory that kernels write to."""
        return self._gpu.pinned((RING, *shape), dtype)

    @functools.cached_property
    def _tables(self) -> EditTables:
        return EditTables(self._gpu, self._vocab, len(self._inputs.last))

    @functools.cached_property
    def _masks(self) -> Any:
        return self._gpu.inputs([((self._most, -(-self._vocab // 32)), "int32")])

    @functools.cached_property
    def _logprobs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the draw writes, and the ring of each."""
        wanted = [((self._most,), "float64"), ((self._most, MAX_TOP), "int32"), ((self._most, MAX_TOP), "float64")]
        drawn = [self._gpu.zeros(shape, dtype) for shape, dtype in wanted]
        return drawn, [self._new_ring(shape, getattr(torch, dtype)) for shape, dtype in wanted]
