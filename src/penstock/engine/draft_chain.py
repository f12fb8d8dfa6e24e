"""Steps that verify, accept and draft on a device: what is captured around the trunk's run of 1 + k tokens of each of
B sequences, so that the host has to decide nothing between two of them.

Before the trunk: its tokens, positions and lengths come from what the device knows of each slot (`ops.draft_rows`).
Behind its draws: the drafts that count (`ops.accept_drafts`), then the head over the rows that do, which appends its
own keys and values, and k drafts behind each other, each drawn with the noise of its position (`ops.chain_draft`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import ops
from penstock.engine.cache import Sequence
from penstock.engine.speculate import MOST_DRAFTS
from penstock.engine.steps import ragged_step, step_shapes
from penstock.graph import Bound, Graph, Program, trace
from penstock.models import mtp
from penstock.models.step import STREAM
from penstock.ops.array import Spec
from penstock.ops.drafts import DRAFTS

if TYPE_CHECKING:
    from penstock.engine.programs import Programs
    from penstock.engine.runner import Call

_DRAWING = {"temperature": "float64", "top_p": "float64", "min_p": "float64", "seed": "int64", "top_k": "int32"}
_PREFIX = "draft_"  # of what the head's draws read, one row for each sequence


@dataclass(slots=True, eq=False)
class AheadRun:
    """One sequence of such a step. answer: its tokens, the first of them at position `start`, by which the host says
    what the device does not know yet; chances: a made-up acceptance of its drafts.
    """

    sequence: Sequence
    answer: Seq[int]
    start: int
    chances: Seq[float] | None = None


def chain_inputs(sequences: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Arrays that the host sends beside those of every step."""
    found: dict[str, tuple[tuple[int, ...], str]] = {
        "known": ((sequences, DRAFTS), "int32"),
        "chance": ((sequences, MOST_DRAFTS), "float32"),
    }
    return found | {_PREFIX + name: ((sequences,), dtype) for name, dtype in _DRAWING.items()}


def chain_values(runs: Seq[AheadRun], rows: Seq[Any]) -> dict[str, np.ndarray]:
    """Their values for a step; rows: how each sequence draws."""
    known = np.full((len(runs), DRAFTS), -1, np.int32)
    chance = np.full((len(runs), MOST_DRAFTS), -1, np.float32)
    for b, run in enumerate(runs):
        sequence = run.sequence
        if sequence.drafted is None:
            known[b] = sequence.length, sequence.accepted, run.answer[sequence.length - run.start]
        if run.chances is not None:
            chance[b] = 0
            chance[b, : len(run.chances)] = run.chances[:MOST_DRAFTS]
    found = {"known": known, "chance": chance}
    return found | {_PREFIX + name: np.array([row[name] for row in rows], dtype) for name, dtype in _DRAWING.items()}


class DraftChain:
    """What the device knows of its slots, and the calls of one head around a step; inputs: arrays on the device,
    hidden: the residual stream of the trunk's rows.
    """

    def __init__(self, programs: Programs, head: mtp.Head, inputs: dict[str, Any], hidden: Any, pages: int) -> None:
        self._programs, self._head, self._inputs, self._hidden, self._pages = programs, head, inputs, hidden, pages
        device, slots = programs.device, max(1, programs.caches.slots)
        self._ahead = device.zeros((slots, DRAFTS + MOST_DRAFTS), "int32")
        names = ("wanted", "at", "tokens", "positions", "lengths", "drawn")
        self._own = {name: device.zeros((slots,), "int32") for name in names}
        self._sequence = device.zeros((len(inputs["wanted"]),), "int32")
        self._recycled = [device.zeros((slots, programs.config.dim), programs.caches.dtype) for _ in range(2)]
        self._arena: Any = None

    def before(self, B: int, drafts: int) -> list[Call]:
        """What gives the trunk its rows."""
        given, T = self._inputs, B * (1 + drafts)
        rows = [given[name][:T] for name in ("tokens", "positions", "draw_at")]
        out = (*rows, given["lengths"][:B], given["accepted"][:B])
        return [functools.partial(ops.draft_rows, self._ahead, given["slots"][:B], given["known"][:B], drafts, out=out)]

    def accept(self, B: int, drafts: int, drawn: Any) -> list[Call]:
        """What says behind the trunk's draws which of them count."""
        given, T = self._inputs, B * (1 + drafts)
        out = (self._sequence[:T], self._own["wanted"][:B], self._own["at"][:B])
        args = (drawn[:T], self._ahead, given["tokens"][:T], given["positions"][:T], given["slots"][:B])
        how = (given[_PREFIX + "seed"][:B], given["chance"][:B], self._programs.config.vocab_size)
        return [functools.partial(ops.accept_drafts, *args, *how, out=out)]

    def draft(self, B: int, drafts: int, drawn: Any, mode: str) -> list[Call]:
        """The head over the rows that count, and so many drafts."""
        given, own, T = self._inputs, self._own, B * (1 + drafts)
        tables = {name: given[name][:B] for name in self._programs.windows.values()}
        both = tables | {"slots": given["slots"][:B], "positions": given["positions"][:T], "tokens": drawn[:T]}
        first = both | {"starts": given["starts"][: B + 1], "lengths": given["lengths"][:B]}
        first |= {"sequence": self._sequence[:T], "wanted": own["wanted"][:B], "hidden": self._hidden[:T]}
        chained = {name: own[name][:B] for name in ("tokens", "positions", "lengths")}
        calls: list[Call] = []
        for place in range(drafts):
            into = self._recycled[place % 2][:B]
            if place == 0:
                bound = self._bound(self._first(T, B), first, into)
            else:
                bound = self._bound(self._next(B), both | chained | {"hidden": self._recycled[1 - place % 2][:B]}, into)
            calls += bound.calls
            how = [given[_PREFIX + name][:B] for name in ("temperature", "top_k", "top_p", "min_p", "seed")]
            out = (own["drawn"][:B], None, None, None)
            calls.append(functools.partial(ops.sample_tokens, bound.outputs[1], own["at"][:B], *how, mode, out=out))
            args = (own["drawn"][:B], self._ahead, given["slots"][:B], place)
            calls.append(functools.partial(ops.chain_draft, *args, out=(*chained.values(), own["at"][:B])))
        return calls

    def _bound(self, graph: Graph, inputs: dict[str, Any], recycled: Any) -> Bound:
        programs = self._programs
        program = Program(graph, programs.device.name, **programs.options)
        if self._arena is None or len(self._arena) < program.arena_bytes:
            self._arena = programs.new_arena(program.arena_bytes)
        wanted = {name: inputs[name] for name in graph.inputs if name in inputs}
        return program.bind(wanted | programs.cache_arrays(), self._arena, programs.wrap, [recycled])

    def _first(self, T: int, B: int) -> Graph:
        """Behind runs of the trunk: h' and logits of the wanted rows."""
        specs = self._specs(T, B) | {"hidden": Spec((T, self._programs.config.dim), STREAM)}

        def fn(**given: Any) -> Any:
            programs = self._programs
            step = ragged_step(given, programs.windows, active=given["sequence"], **self._options)
            h = self._forward(step, programs.final_norm(step, given["hidden"]), given)
            rows = programs.rows_of(h, given["wanted"])
            return rows, mtp.logits(self._head, step, rows)

        return trace(fn, specs)

    def _next(self, B: int) -> Graph:
        """Behind a draft of each sequence, by its h'."""
        specs = self._specs(B, B)
        specs = {name: spec for name, spec in specs.items() if name not in ("sequence", "starts", "wanted")}
        specs["hidden"] = Spec((B, self._programs.config.dim), self._programs.caches.dtype)

        def fn(**given: Any) -> Any:
            step = ragged_step(given, self._programs.windows, active=given["slots"], **self._options)
            h = self._forward(step, given["hidden"], given)
            return h, mtp.logits(self._head, step, h)

        return trace(fn, specs)

    @property
    def _options(self) -> dict[str, Any]:
        programs = self._programs
        return {"activations": programs.activations, "dtype": programs.caches.dtype}

    def _specs(self, T: int, B: int) -> dict[str, Spec]:
        programs = self._programs
        shapes = step_shapes(T, B, B, self._pages, programs.windows.values())
        found = {name: Spec(shape, "int32") for name, shape in shapes.items()}
        return found | {name: spec for name, spec in programs.cache_specs().items() if name in self._cache}

    @property
    def _cache(self) -> tuple[str, str]:
        """Inputs that are the head's own keys and values."""
        own = len(self._programs.caches.layouts) - 1
        return f"cache{own}.0", f"cache{own}.1"

    def _forward(self, step: Any, hidden: Any, given: dict[str, Any]) -> Any:
        keys, values = self._cache
        return mtp.forward(self._head, step, hidden, (given[keys], given[values]))
