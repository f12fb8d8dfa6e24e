"""The end of a decode step on the GPU: tokens are drawn, fed to the next step, and reported to the host.

With it a step needs nothing from the host: the next one may be launched before what this one drew is read.
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

from penstock.backends.cuda.sampling import sample_tokens
from penstock.errors import BackendError
from penstock.ops.array import numpy_view, torch_view
from penstock.ops.sampling import MAX_TOP, ONE, SEEN, Edits, mask_words, split_mode

RING = 4  # steps whose tokens are kept for the host; one that comes round again is read before it is overwritten

EDIT_SLOTS = 64  # requests with edits that are on the device at a time: 2 MB each for a vocabulary of 248 320
_SEEN, _ONE = tl.constexpr(SEEN), tl.constexpr(ONE)


# feed      tokens = ring[step % RING] = drawn; positions and lengths one further where the position is not negative;
#           step one further if there is such a row: a step that was stopped does not count. With slots: counts[slot,
#           token] has one more, and the repetition penalty holds for it
# shapes    drawn, tokens, positions, lengths, slots int32 [rows]; ring int32 [RING, rows] in pinned host memory; step
#           [1]; counts int32 [S, V]
# grid      (1,)
# bytes     a few
# limits    none
@triton.jit
def _feed_kernel(
    drawn_ptr, tokens_ptr, positions_ptr, lengths_ptr, ring_ptr, step_ptr, slots_ptr, counts_ptr, rows, V,
    RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BLOCK)
    live = b < rows
    token = tl.load(drawn_ptr + b, mask=live, other=0)
    position = tl.load(positions_ptr + b, mask=live, other=-1)
    length = tl.load(lengths_ptr + b, mask=live, other=0)
    step = tl.load(step_ptr)
    tl.store(tokens_ptr + b, token, mask=live)
    tl.store(positions_ptr + b, position + 1, mask=live & (position >= 0))
    tl.store(lengths_ptr + b, length + 1, mask=live & (position >= 0))
    tl.store(ring_ptr + step % RING * rows + b, token, mask=live)
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + b, mask=live, other=-1).to(tl.int64)
        counted = live & (position >= 0) & (token >= 0) & (slot >= 0)
        count = tl.load(counts_ptr + slot * V + token, mask=counted, other=0)
        tl.store(counts_ptr + slot * V + token, (count + _ONE) | _SEEN, mask=counted)
    tl.debug_barrier()  # all have read the number of the step
    tl.store(step_ptr, step + (tl.max(position) >= 0).to(tl.int32))


# report    own, ids and top of a step go to their places of the ring
# shapes    own float64 [rows], ids int32, top float64 [rows, n]; each ring [RING, …] in pinned host memory; step [1]
# grid      (rows,)
# bytes     12 * rows * n
# limits    none
@triton.jit
def _report_kernel(
    own_ptr, ids_ptr, top_ptr, own_ring_ptr, ids_ring_ptr, top_ring_ptr, step_ptr, n, RING: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, rows = tl.program_id(0), tl.num_programs(0)
    at, i = tl.load(step_ptr) % RING * rows + row, tl.arange(0, BLOCK)
    tl.store(own_ring_ptr + at, tl.load(own_ptr + row))
    ids = tl.load(ids_ptr + row * n + i, mask=i < n, other=0)
    top = tl.load(top_ptr + row * n + i, mask=i < n, other=0.0)
    tl.store(ids_ring_ptr + at * n + i, ids, mask=i < n)
    tl.store(top_ring_ptr + at * n + i, top, mask=i < n)


class Flight:
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

    def __init__(self, gpu: Any, vocab: int) -> None:
        self.counts = gpu.zeros((EDIT_SLOTS, vocab), "int32")
        self.bias = gpu.zeros((EDIT_SLOTS, vocab), "float32")
        self.penalties = gpu.zeros((EDIT_SLOTS, 3), "float64")
        self._slots: weakref.WeakKeyDictionary[Edits, int] = weakref.WeakKeyDictionary()
        self._fills = 0
        self._used = [0] * EDIT_SLOTS  # the fill that a slot was last part of

    def fill(self, rows: Sequence[Edits | None]) -> list[int]:
        """Bring the edits of these rows here; the slot of each, −1 where it has none. Raises BackendError beyond 64."""
        self._fills += 1
        for edits in rows:
            if edits is not None and edits in self._slots:
                self._used[self._slots[edits]] = self._fills
        return [-1 if edits is None else self._place(edits) for edits in rows]

    def _place(self, edits: Edits) -> int:
        slot = self._slots.get(edits)
        if slot is None:
            taken = set(self._slots.values())
            slot = min(range(EDIT_SLOTS), key=lambda s: (s in taken, self._used[s]))
            if slot in taken and self._used[slot] == self._fills:
                raise BackendError(f"sampling: more than {EDIT_SLOTS} rows have edits, expected at most {EDIT_SLOTS}")
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


class Drawing:
    """What draws from the logits [rows, vocab] of a decode program with these inputs.

    What edits and log-probabilities need is made when the first step has some.
    """

    def __init__(self, gpu: Any, logits: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> None:
        self._gpu, self._logits, self._inputs = gpu, logits, inputs
        rows = len(logits)
        names = {"temperature": "float64", "top_p": "float64", "min_p": "float64", "seed": "int64", "top_k": "int32"}
        names |= {"slots": "int32", "masked": "int32"}
        self._buffer = gpu.inputs([((rows,), dtype) for dtype in names.values()])
        self._host = dict(zip(names, self._buffer.host, strict=True))
        self._parameters = dict(zip(names, self._buffer.on_device, strict=True))
        self._drawn = gpu.zeros((rows,), "int32")
        self._step = gpu.zeros((1,), "int32")
        self._ring = self._new_ring((rows,), torch.int32)
        self._events = [None if gpu.interpreted else torch.cuda.Event() for _ in range(RING)]
        self._flights: list[Flight | None] = [None] * RING
        self._steps = 0

    def calls(self, mode: str) -> list[Callable[[], object]]:
        """What follows the program: the draw in a mode of `ops.sample_tokens`, and its way back."""
        kind, edited, wanted = split_mode(mode)
        rows, vocab = self._logits.shape
        p, inputs = self._parameters, self._inputs
        tables: dict[str, torch.Tensor] = {}
        if edited:
            own = self._tables
            tables = {"slots": p["slots"], "counts": own.counts, "bias": own.bias, "penalties": own.penalties}
            tables |= {"masked": p["masked"], "masks": self._masks.on_device[0]}
        found = self._logprobs[0] if wanted else (None, None, None)
        draw = functools.partial(
            sample_tokens, self._logits, inputs["lengths"], p["temperature"], p["top_k"], p["top_p"], p["min_p"],
            p["seed"], kind, **tables, logprobs=MAX_TOP if wanted else None, out=(self._drawn, *found), in_place=True,
        )  # fmt: skip
        feed = functools.partial(
            _feed_kernel[(1,)], self._drawn, inputs["tokens"], inputs["positions"], inputs["lengths"], self._ring,
            self._step, tables.get("slots"), tables.get("counts"), rows, vocab, RING=RING,
            BLOCK=triton.next_power_of_2(rows), num_warps=1,
        )  # fmt: skip
        if not wanted:
            return [draw, feed]
        report = functools.partial(
            _report_kernel[(rows,)], *found, *self._logprobs[1], self._step, MAX_TOP, RING=RING,
            BLOCK=triton.next_power_of_2(MAX_TOP), num_warps=1,
        )  # fmt: skip
        return [draw, report, feed]

    def fill(self, parameters: Sequence[Mapping[str, Any]], masks: Sequence[np.ndarray | None] = ()) -> None:
        """Set how rows draw; those without an entry are inactive. masks: words of each row's grammar, or None."""
        edits = [row.get("edits") for row in parameters]
        slots = [-1] * len(edits) if not any(edits) else self._tables.fill(edits)
        masked = [b for b, mask in enumerate(masks) if mask is not None]
        if masked:
            self._masks.ready()
            for b in masked:
                self._masks.host[0][b] = mask_words(masks[b], self._logits.shape[1])
            self._masks.send()
        self._buffer.ready()
        self._host["masked"][:] = -1
        self._host["masked"][masked] = masked
        self._host["slots"][: len(slots)] = slots
        for b, row in enumerate(parameters):
            for name, value in row.items():
                if name != "edits":
                    self._host[name][b] = value
        self._buffer.send()

    def launched(self) -> Flight:
        """The step that was just launched."""
        at = self._steps % RING
        self._steps += 1
        event = self._events[at]
        if event is not None:
            event.record()
        rings = [numpy_view(ring)[at] for ring in self._logprobs[1]] if "_logprobs" in vars(self) else []
        self._flights[at] = flight = Flight(numpy_view(self._ring)[at], rings, event)
        oldest = self._flights[self._steps % RING]  # the next step writes over it
        if oldest is not None:
            oldest.tokens()
        return flight

    def _new_ring(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """One array of each of the last steps, in host memory that kernels write to."""
        return self._gpu.pinned((RING, *shape), dtype)

    @functools.cached_property
    def _tables(self) -> EditTables:
        return self._gpu.edit_tables(self._logits.shape[1])

    @functools.cached_property
    def _masks(self) -> Any:
        rows, vocab = self._logits.shape
        return self._gpu.inputs([((rows, -(-vocab // 32)), "int32")])

    @functools.cached_property
    def _logprobs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the draw writes, and the ring of each."""
        rows = len(self._logits)
        wanted = [((rows,), "float64"), ((rows, MAX_TOP), "int32"), ((rows, MAX_TOP), "float64")]
        drawn = [self._gpu.zeros(shape, dtype) for shape, dtype in wanted]
        return drawn, [self._new_ring(shape, getattr(torch, dtype)) for shape, dtype in wanted]
