"""Drafts by a model's own head (`models/mtp.py`): its keys and values lie beside the trunk's, in the same pages.

The head's entry for position t needs the trunk's hidden row t and the token t + 1. Rows of prompts are computed as soon
as the tokens are known; those of answers wait until drafts are wanted, and are then computed together with the first
one. A rejected draft leaves entries that the next rows write over. What is missing (the beginning of a restored
session) makes drafts worse, and changes no text.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.engine.cache import PageTable, Sequence
from penstock.engine.steps import MOST_TOKENS, Run, ragged_step, step_arrays, step_shapes, table_width
from penstock.graph import Bound, Graph, SizedProgram, trace
from penstock.graph.sizes import Sizes
from penstock.models import mtp
from penstock.models.step import PAGE
from penstock.ops.array import Spec

if TYPE_CHECKING:
    from penstock.engine.programs import Programs
    from penstock.engine.sampling import Sampler

_MOST_ROWS = 256  # of answers that wait for a draft


@dataclass(eq=False)
class _Waiting:
    """Hidden rows [n, dim] of a sequence from a position on, and the tokens at these positions."""

    start: int
    rows: np.ndarray
    tokens: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(eq=False)
class _At:
    """Where a run of the head goes: as a sequence that has so many positions."""

    slot: int
    tables: dict[int | None, PageTable]
    length: int


@dataclass(eq=False)
class Asked:
    """So many drafts are wanted behind the last token of a sequence, which has not been computed yet."""

    sequence: Sequence
    token: int
    count: int
    sampler: Sampler
    mask: np.ndarray | None = None  # of a grammar, for the first of them
    drafts: list[int] = field(default_factory=list)


class HeadDrafter:
    """The head of one model on a device that binds programs to exact sizes."""

    def __init__(self, programs: Programs, head: mtp.Head) -> None:
        self._programs, self.head = programs, head
        self._waiting: weakref.WeakKeyDictionary[Sequence, _Waiting] = weakref.WeakKeyDictionary()
        self._kinds: dict[Any, SizedProgram] = {}
        self._bound: dict[Any, tuple[Bound, dict[str, np.ndarray]]] = {}
        self._arenas: dict[Any, Any] = {}

    # -- rows of the trunk -------------------------------------------------------------------------------------------

    def observe(self, runs: Seq[Run], hidden: np.ndarray) -> None:
        """The trunk has computed these runs, whose sequences are not longer yet; hidden [T, dim] after its final norm.

        Rows of prompts are computed now, but for the last one, whose next token is not known.
        """
        filled: list[tuple[Run, np.ndarray]] = []
        first = 0
        for run in runs:
            rows = hidden[first : first + len(run.tokens)]
            first += len(run.tokens)
            waiting = self._add(run, rows)
            if run.prompt or len(waiting.tokens) > _MOST_ROWS:
                filled.append(self._fill(run.sequence, waiting))
        for part in _within(filled):
            self._run([run for run, _ in part], np.concatenate([rows for _, rows in part]))

    def _add(self, run: Run, rows: np.ndarray) -> _Waiting:
        at, tokens = run.sequence.length, run.tokens.tolist()
        known = self._waiting.get(run.sequence)
        if known is not None and known.end == at:
            known.rows, known.tokens = np.concatenate([known.rows, rows]), known.tokens + tokens
        else:
            known = self._waiting[run.sequence] = _Waiting(at, rows.copy(), tokens)
        return known

    def _fill(self, sequence: Sequence, waiting: _Waiting) -> tuple[Run, np.ndarray]:
        """A run of all rows but the last, which alone waits then."""
        count = len(waiting.tokens) - 1
        run = Run(_At(sequence.slot, sequence.tables, waiting.start), np.array(waiting.tokens[1:], np.int32), "none")  # type: ignore[arg-type]
        rows, waiting.rows = waiting.rows[:count], waiting.rows[count:].copy()
        waiting.start, waiting.tokens = waiting.start + count, waiting.tokens[count:]
        return run, rows

    def accepted(self, sequence: Sequence, count: int) -> None:
        """Of a run that was kept behind `sequence.length` so many tokens count."""
        waiting = self._waiting.get(sequence)
        if waiting is not None:
            left = sequence.length + count - waiting.start
            waiting.rows, waiting.tokens = waiting.rows[:left], waiting.tokens[:left]

    def ready(self, sequence: Sequence) -> bool:
        """Whether the hidden row before the next token is there."""
        waiting = self._waiting.get(sequence)
        return waiting is not None and bool(waiting.tokens) and waiting.end == sequence.length

    # -- drafts ------------------------------------------------------------------------------------------------------

    def draft(self, asked: Seq[Asked]) -> None:
        """Draft for sequences that are `ready`; pages for their next positions are reserved."""
        runs, rows = [], []
        for one in asked:
            waiting = self._waiting[one.sequence]
            tokens = np.array([*waiting.tokens[1:], one.token], np.int32)
            runs.append(Run(_At(one.sequence.slot, one.sequence.tables, waiting.start), tokens))  # type: ignore[arg-type]
            rows.append(waiting.rows)
            waiting.start, waiting.rows, waiting.tokens = waiting.end, waiting.rows[:0], []
        left, hidden, place = list(asked), np.concatenate(rows), 0
        while left:
            recycled, logits = self._run(runs, hidden)
            for one, row in zip(left, logits, strict=True):
                mask = one.mask if place == 0 else None
                one.drafts.append(one.sampler.draft(row, one.sequence.length + 1 + place, mask))
            place += 1
            going = [n for n, one in enumerate(left) if one.count > place]
            left, hidden = [left[n] for n in going], recycled[going]
            runs = [
                Run(
                    _At(one.sequence.slot, one.sequence.tables, one.sequence.length - 1 + place),  # type: ignore[arg-type]
                    np.array(one.drafts[-1:], np.int32),
                )
                for one in left
            ]

    # -- programs ----------------------------------------------------------------------------------------------------

    def unbind(self) -> None:
        """Let go of the caches' arrays."""
        self._bound = {}

    def _run(self, runs: Seq[Run], hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A step of the head: its own hidden states [R, dim] and logits [R, rows] after the wanted tokens."""
        programs = self._programs
        arrays = step_arrays(runs, programs.windows)
        T, B, R = (len(arrays[name]) for name in ("tokens", "slots", "wanted"))
        pages = max(arrays[name].shape[1] for name in programs.windows.values())
        bound, inputs = self._bind({"T": T, "B": B, "R": max(1, R), "n": pages}, R > 0)
        for name, array in (arrays | {"hidden": hidden}).items():
            if array.size:
                inputs[name][...] = array
        found = bound.run()
        if not R:
            return hidden[:0], hidden[:0]
        recycled, logits = map(programs.device.to_host, found)
        return recycled.astype(np.float32), logits

    def _bind(self, sizes: dict[str, int], drafts: bool) -> tuple[Bound, dict[str, np.ndarray]]:
        programs = self._programs
        key = (tuple(sizes.values()), drafts, programs.caches.version)
        kept = self._bound.pop(key, None)
        if kept is None:
            program = self._kind(sizes["T"] == 1, drafts)
            shapes = step_shapes(**sizes, tables=programs.windows.values())
            inputs: dict[str, Any] = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
            inputs["hidden"] = np.zeros((sizes["T"], programs.config.dim), np.float32)
            arena = self._arenas.setdefault(program, None)
            if arena is None:
                arena = self._arenas[program] = programs.new_arena(program.arena_bytes)
            kept = program.bind(sizes, inputs | programs.cache_arrays(), arena, programs.wrap), inputs
        self._bound[key] = kept
        while len(self._bound) > 32:
            del self._bound[next(iter(self._bound))]
        return kept

    def _kind(self, one: bool, drafts: bool) -> SizedProgram:
        programs, key = self._programs, (one, drafts)
        if key not in self._kinds:
            most_pages = max(8, table_width(-(-2 * programs.max_context // PAGE)))
            least = {"T": 1 if one else 2, "B": 1, "R": 1, "n": 4}
            most = {"T": MOST_TOKENS, "B": 256, "R": 256, "n": most_pages}
            if one:
                most |= {"T": 1, "B": 1, "R": 1}

            def graph(sizes: Sizes) -> Graph:
                return self._graph(sizes["T"], sizes["B"], sizes["n"], sizes["R"] if drafts else 0)

            self._kinds[key] = SizedProgram(graph, programs.device.name, least, most, **programs.options)
        return self._kinds[key]

    def _graph(self, T: int, B: int, n: int, R: int) -> Graph:
        programs, head = self._programs, self.head
        specs = {
            name: Spec(shape, "int32") for name, shape in step_shapes(T, B, R, n, programs.windows.values()).items()
        }
        if not R:
            specs.pop("wanted")
        specs["hidden"] = Spec((T, programs.config.dim), "float32")
        own = len(programs.caches.layouts) - 1
        specs |= {name: spec for name, spec in programs.cache_specs().items() if name.startswith(f"cache{own}.")}

        def fn(hidden: Any, **given: Any) -> Any:
            options = {"activations": programs.activations, "dtype": programs.caches.dtype, "mesh": programs.mesh}
            step = ragged_step(given, programs.windows, **options)
            h = mtp.forward(head, step, hidden, (given[f"cache{own}.0"], given[f"cache{own}.1"]))
            if not R:
                return h
            rows = programs.rows_of(h, given["wanted"])
            return rows, mtp.logits(head, step, rows)

        return trace(fn, specs)


def _within(filled: list[tuple[Run, np.ndarray]]) -> list[list[tuple[Run, np.ndarray]]]:
    """Runs in steps of no more than the most tokens; those without rows are left out."""
    steps: list[list[tuple[Run, np.ndarray]]] = []
    tokens = 0
    for run, rows in filled:
        if not len(rows):
            continue
        if not steps or tokens + len(rows) > MOST_TOKENS:
            steps.append([])
            tokens = 0
        steps[-1].append((run, rows))
        tokens += len(rows)
    return steps
