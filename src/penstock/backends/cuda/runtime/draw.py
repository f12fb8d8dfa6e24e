"""The end of a decode step on the GPU: tokens are drawn, fed to the next step, and reported to the host.

With it a step needs nothing from the host: the next one may be launched before what this one drew is read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from penstock.backends.cuda.sampling import sample_tokens
from penstock.ops.array import numpy_view

RING = 4  # steps whose tokens are kept for the host; one that comes round again is read before it is overwritten


# feed      tokens = ring[step % RING] = drawn; positions and lengths one further where the position is not negative;
#           step one further if there is such a row: a step that was stopped does not count
# shapes    drawn, tokens, positions, lengths int32 [rows]; ring int32 [RING, rows] in pinned host memory; step [1]
# grid      (1,)
# bytes     a few
# limits    none
@triton.jit
def _feed_kernel(
    drawn_ptr, tokens_ptr, positions_ptr, lengths_ptr, ring_ptr, step_ptr, rows,
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
    tl.debug_barrier()  # all have read the number of the step
    tl.store(step_ptr, step + (tl.max(position) >= 0).to(tl.int32))


class Flight:
    """Tokens of a step that is under way."""

    def __init__(self, row: np.ndarray, done: Any) -> None:
        self._row, self._done = row, done
        self._tokens: list[int] | None = None

    def tokens(self) -> list[int]:
        """Wait for the step; one token per row."""
        if self._tokens is None:
            if self._done is not None:
                self._done.synchronize()
            self._tokens = self._row.tolist()
        return self._tokens


class Drawing:
    """What draws from the logits [rows, vocab] of a decode program with these inputs."""

    def __init__(self, gpu: Any, logits: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> None:
        rows = len(logits)
        names = {"temperature": "float64", "top_p": "float64", "min_p": "float64", "seed": "int64", "top_k": "int32"}
        self._buffer = gpu.inputs([((rows,), dtype) for dtype in names.values()])
        self._host = dict(zip(names, self._buffer.host, strict=True))
        parameters = dict(zip(names, self._buffer.on_device, strict=True))
        drawn = torch.zeros(rows, dtype=torch.int32, device=gpu.torch_device)
        step = torch.zeros(1, dtype=torch.int32, device=gpu.torch_device)
        ring = torch.zeros((RING, rows), dtype=torch.int32)
        ring = ring if gpu.interpreted else ring.pin_memory()
        self._ring = numpy_view(ring)
        self._events = [None if gpu.interpreted else torch.cuda.Event() for _ in range(RING)]
        self._flights: list[Flight | None] = [None] * RING
        self._steps = 0
        self._draw = functools.partial(sample_tokens, logits, inputs["lengths"], out=drawn)
        self._parameters = [parameters[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed")]
        self._feed = functools.partial(
            _feed_kernel[(1,)], drawn, inputs["tokens"], inputs["positions"], inputs["lengths"], ring, step, rows,
            RING=RING, BLOCK=triton.next_power_of_2(rows), num_warps=1,
        )  # fmt: skip

    def calls(self, mode: str) -> list[Callable[[], object]]:
        """What follows the program: the draw in a mode of `ops.sample_tokens`, and its way back."""
        return [functools.partial(self._draw, *self._parameters, mode), self._feed]

    def fill(self, parameters: Sequence[Mapping[str, float]]) -> None:
        """Set how rows draw; those without an entry are inactive."""
        self._buffer.ready()
        for b, row in enumerate(parameters):
            for name, value in row.items():
                self._host[name][b] = value
        self._buffer.send()

    def launched(self) -> Flight:
        """The step that was just launched."""
        at = self._steps % RING
        self._steps += 1
        event = self._events[at]
        if event is not None:
            event.record()
        self._flights[at] = flight = Flight(self._ring[at], event)
        oldest = self._flights[self._steps % RING]  # the next step writes over it
        if oldest is not None:
            oldest.tokens()
        return flight
