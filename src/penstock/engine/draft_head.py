"""Drafts by a model's own head (`models/mtp.py`): its keys and values lie beside the trunk's, in the same pages.

The head's entry for position t needs the trunk's hidden row t and the token t + 1. Rows wait until drafts are wanted,
and are then computed together with the first one; without it where they become many, as those of a chunk of a prompt
that may be stored. A rejected draft leaves entries that the next rows write over. What is missing (the beginning of a
restored session) makes drafts worse, and changes no text.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.dtypes import numpy_dtype
from penstock.engine.buckets import UNREAD, next_size, sizes_up_to
from penstock.engine.cache import PageTable, Sequence
from penstock.engine.draft_chain import AheadRun
from penstock.engine.runner import Runner
from penstock.engine.sampling import Sampler, mode_of
from penstock.engine.speculate import MOST_DRAFTS
from penstock.engine.steps import (
    CHAINED,
    MOST_TOKENS,
    Run,
    alike_sizes,
    padded,
    ragged_step,
    step_arrays,
    step_shapes,
    table_width,
)
from penstock.graph import Bound, Graph, Program, SizedProgram, trace
from penstock.graph.sizes import Sizes
from penstock.models import mtp
from penstock.models.step import PAGE, STREAM
from penstock.ops.array import Spec, spec_of

if TYPE_CHECKING:
    from penstock.engine.programs import Programs

_MOST_ROWS = 256  # of a sequence that are computed at once
_MOST_BYTES = 16 << 20  # of rows of an answer that wait for a draft
_NO_ROWS = np.empty((0, 0), np.float32)


@dataclass(eq=False)
class _Waiting:
    """Hidden rows [n, dim] of a sequence from a position on, in parts, and the tokens at these positions."""

    start: int
    rows: list[Any]
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
    """So many drafts are wanted behind the last token of an answer, which has not been computed yet.

    answer: its tokens, the first of them at position `start`. text: all tokens of the sequence and that last one, for a
    second model.
    """

    sequence: Sequence
    answer: Seq[int]
    start: int
    count: int
    sampler: Sampler
    mask: np.ndarray | None = None  # of a grammar, for the first of them
    drafts: list[int] = field(default_factory=list)
    text: Seq[int] = ()


Rows = list[Any]
"""Parts [n, dim] of arrays on the device, one behind the other."""


class HeadRunner(Protocol):
    """Runs a head on a device."""

    head: mtp.Head
    most_rows: int  # of a sequence behind which it drafts in one step

    def copy(self, hidden: Any) -> Any:
        """Rows of a step of the trunk, which the next one writes over."""
        ...

    def fill(self, runs: Seq[Run], rows: Rows) -> None:
        """Compute the head's entries for these runs; rows: what the trunk has left for their tokens."""
        ...

    def draft(self, asked: Seq[Asked], runs: Seq[Run], rows: Rows) -> None:
        """The same, and draft what is asked for behind each run."""
        ...

    def prepare(self, sequences: int) -> None:
        """Have fills of up to so many sequences ready."""
        ...

    def unbind(self) -> None:
        """Let go of the caches' arrays."""
        ...


class HeadDrafter:
    """What the head of one model has still to see of each sequence."""

    def __init__(self, runner: HeadRunner) -> None:
        self._runner = runner
        self._waiting: weakref.WeakKeyDictionary[Sequence, _Waiting] = weakref.WeakKeyDictionary()
        self.unbind = runner.unbind

    @property
    def head(self) -> mtp.Head:
        return self._runner.head

    def replace_head(self, head: mtp.Head) -> None:
        """The same head with its weights elsewhere in memory, before the first step."""
        self._runner.head = head

    def observe(self, runs: Seq[Run], hidden: Any) -> None:
        """The trunk has computed these runs, whose sequences are not longer yet; hidden [T, dim]: its rows, as the
        runner takes them.

        Where many wait they are computed now, but for the last one, whose next token is not known.
        """
        kept = self._runner.copy(hidden)
        filled: list[list[tuple[Run, Rows]]] = []
        first, most = 0, max(_MOST_ROWS, _MOST_BYTES // (4 * hidden.shape[1]))
        for run in runs:
            rows = kept[first : first + len(run.tokens)]
            first += len(run.tokens)
            if run.wanted in ("all", "hidden", "logprobs") and not run.keep:  # nothing is generated behind it
                continue
            waiting = self._add(run, rows)
            if len(waiting.tokens) >= (_MOST_ROWS if run.prompt else most):
                filled.append(self._fill(run.sequence, waiting))
        if filled:
            self._run(filled)

    def _run(self, filled: list[list[tuple[Run, Rows]]]) -> None:
        """Runs of each sequence one after the other, those of several together."""
        for each in itertools.zip_longest(*filled):
            for part in _within([one for one in each if one is not None]):
                self._runner.fill([run for run, _ in part], [row for _, rows in part for row in rows])

    def _add(self, run: Run, rows: Any) -> _Waiting:
        at, tokens = run.sequence.length, run.tokens.tolist()
        known = self._waiting.get(run.sequence)
        if known is not None and known.end == at:
            known.rows.append(rows)
            known.tokens += tokens
        else:
            known = self._waiting[run.sequence] = _Waiting(at, [rows], tokens)
        return known

    def _fill(self, sequence: Sequence, waiting: _Waiting) -> list[tuple[Run, Rows]]:
        """Runs of all rows but the last, which alone waits then."""
        start, tokens, rows, last = waiting.start, waiting.tokens, waiting.rows, waiting.rows[-1]
        waiting.start, waiting.rows, waiting.tokens = waiting.end - 1, [last[-1:]], tokens[-1:]
        if min(tokens) < 0:  # the host does not know them
            return []
        return [
            (Run(_at(sequence, start + at), np.array(part, np.int32), "none"), _rows(rows, at, at + len(part)))
            for at in range(0, len(tokens) - 1, _MOST_ROWS)
            for part in [tokens[1:][at : at + _MOST_ROWS]]
        ]

    def accepted(self, sequence: Sequence, count: int) -> None:
        """Of a run that was kept behind `sequence.length` so many tokens count."""
        waiting = self._waiting.get(sequence)
        if waiting is not None and waiting.rows:
            over = waiting.end - sequence.length - count
            waiting.tokens = waiting.tokens[: len(waiting.tokens) - over]
            waiting.rows[-1] = waiting.rows[-1][: len(waiting.rows[-1]) - over]

    def ready(self, sequence: Sequence) -> bool:
        """Whether the hidden row before the next token is there."""
        waiting = self._waiting.get(sequence)
        return waiting is not None and bool(waiting.tokens) and waiting.end == sequence.length

    def waiting(self, sequence: Sequence) -> int:
        """Rows of a sequence that it has not seen yet."""
        waiting = self._waiting.get(sequence)
        return 0 if waiting is None else len(waiting.tokens)

    def knows(self, sequence: Sequence) -> bool:
        """Whether nothing before the next token is missing but what waits."""
        waiting = self._waiting.get(sequence)
        return waiting is not None and waiting.end == sequence.length

    def draft(self, asked: Seq[Asked]) -> None:
        """Draft for sequences that are `ready`; pages for their next positions are reserved."""
        runs, rows, filled = [], [], []
        together = sum(len(self._waiting[one.sequence].tokens) for one in asked) <= MOST_TOKENS
        most = self._runner.most_rows if together else 1
        for one in asked:
            filled.append(self._filled(one.sequence, one.answer, one.start, most))
            run, own = self._taken(one.sequence, one.answer)
            runs.append(run)
            rows += own
        self._run(filled)
        self._runner.draft(asked, runs, rows)

    def catch_up(self, runs: Seq[AheadRun]) -> None:
        """Compute what waits of sequences that the device will draft for by itself."""
        waiting = [one for one in runs if (known := self._waiting.get(one.sequence)) is not None and known.tokens]
        self._run([self._filled(one.sequence, one.answer, one.start) for one in waiting])
        for part in _within([self._taken(one.sequence, one.answer, "none") for one in waiting]):
            self._runner.fill([run for run, _ in part], [row for _, rows in part for row in rows])

    def prepare(self, sequences: int) -> None:
        """Have what computes rows that wait, of up to so many sequences, ready before it is asked for."""
        self._runner.prepare(sequences)

    def caught_up(self, sequence: Sequence) -> None:
        """The device has computed all before the next token by itself."""
        self._waiting[sequence] = _Waiting(sequence.length, [], [])

    def _filled(
        self, sequence: Sequence, answer: Seq[int], start: int, most: int = _MOST_ROWS
    ) -> list[tuple[Run, Rows]]:
        """The tokens that wait are all known then. Where they are more than `most`, runs of all but the last one."""
        waiting = self._waiting[sequence]
        waiting.tokens = [
            token if token >= 0 else answer[position - start]
            for position, token in enumerate(waiting.tokens, waiting.start)
        ]
        return self._fill(sequence, waiting) if len(waiting.tokens) > most else []

    def _taken(self, sequence: Sequence, answer: Seq[int], wanted: str = "last") -> tuple[Run, Rows]:
        """A run of all that waits, `_filled` before, up to the last token of an answer."""
        waiting = self._waiting[sequence]
        run = Run(_at(sequence, waiting.start), np.array([*waiting.tokens[1:], answer[-1]], np.int32), wanted)
        rows = waiting.rows
        waiting.start, waiting.rows, waiting.tokens = waiting.end, [], []
        return run, rows


class ExactHead:
    """A head on a device that binds programs to exact sizes; the host draws. Hidden rows are those of the trunk's
    residual stream, in host memory.
    """

    most_rows = _MOST_ROWS

    def __init__(self, programs: Programs, head: mtp.Head) -> None:
        self._programs, self.head = programs, head
        self._kinds: dict[Any, SizedProgram] = {}
        self._bound: dict[Any, tuple[Bound, dict[str, np.ndarray]]] = {}
        self._arenas: dict[Any, Any] = {}

    def copy(self, hidden: Any) -> Any:
        return hidden.copy()

    def prepare(self, sequences: int) -> None:
        pass  # sizes are bound when they are met, in milliseconds

    def fill(self, runs: Seq[Run], rows: Rows) -> None:
        self._run(runs, rows)

    def draft(self, asked: Seq[Asked], runs: Seq[Run], rows: Rows) -> None:
        left, place = list(asked), 0
        while left:
            recycled, logits = self._run(runs, rows, follows=place > 0)
            for one, row in zip(left, logits, strict=True):
                mask = one.mask if place == 0 else None
                one.drafts.append(one.sampler.draft(row, one.sequence.length + 1 + place, mask))
            place += 1
            going = [n for n, one in enumerate(left) if one.count > place]
            left, rows = [left[n] for n in going], [recycled[n : n + 1] for n in going]
            runs = [_next_run(one, place, one.drafts[-1]) for one in left]

    def unbind(self) -> None:
        """Let go of the caches' arrays."""
        self._bound = {}

    def _run(self, runs: Seq[Run], rows: Rows, follows: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """A step of the head: its own hidden states [R, dim] and logits [R, rows] after the wanted tokens. follows: it
        drafts behind drafts, and reads its own hidden states in place of the trunk's.
        """
        programs = self._programs
        arrays = step_arrays(runs, programs.windows)
        T, B, R = (len(arrays[name]) for name in ("tokens", "slots", "wanted"))
        pages = max(arrays[name].shape[1] for name in programs.windows.values())
        bound, inputs = self._bind({"T": T, "B": B, "R": max(1, R), "n": pages}, R > 0, follows)
        for name, array in arrays.items():
            if array.size:
                inputs[name][...] = array
        np.concatenate(rows, out=inputs["hidden"])
        found = bound.run()
        if not R:
            return _NO_ROWS, _NO_ROWS
        recycled, logits = map(programs.device.to_host, found)
        return recycled, logits

    def _bind(self, sizes: dict[str, int], drafts: bool, follows: bool) -> tuple[Bound, dict[str, np.ndarray]]:
        programs = self._programs
        key = (tuple(sizes.values()), drafts, follows, programs.caches.version)
        kept = self._bound.pop(key, None)
        if kept is None:
            program = self._kind(sizes["T"], drafts, follows)
            shapes = step_shapes(**sizes, tables=programs.windows.values())
            inputs: dict[str, Any] = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
            inputs["hidden"] = np.zeros((sizes["T"], programs.config.dim), numpy_dtype(self._hidden_dtype(follows)))
            arena = self._arenas.setdefault(program, None)
            if arena is None:
                arena = self._arenas[program] = programs.new_arena(program.arena_bytes)
            kept = program.bind(sizes, inputs | programs.cache_arrays(), arena, programs.wrap), inputs
        self._bound[key] = kept
        while len(self._bound) > 32:
            del self._bound[next(iter(self._bound))]
        return kept

    def _hidden_dtype(self, follows: bool) -> str:
        return self._programs.caches.dtype if follows else STREAM

    def _kind(self, T: int, drafts: bool, follows: bool) -> SizedProgram:
        programs = self._programs
        least_tokens, most_tokens = alike_sizes(T, programs.device)
        key = (least_tokens, drafts, follows)
        if key not in self._kinds:
            most_pages = max(8, table_width(-(-2 * programs.max_context // PAGE)))
            least = {"T": least_tokens, "B": 1, "R": 1, "n": 4}
            most = {"T": most_tokens, "B": min(256, most_tokens), "R": min(256, most_tokens), "n": most_pages}

            def graph(sizes: Sizes) -> Graph:
                return self._graph(sizes["T"], sizes["B"], sizes["n"], sizes["R"] if drafts else 0, follows)

            self._kinds[key] = SizedProgram(graph, programs.device.name, least, most, **programs.options)
        return self._kinds[key]

    def _graph(self, T: int, B: int, n: int, R: int, follows: bool) -> Graph:
        programs, head = self._programs, self.head
        specs = {
            name: Spec(shape, "int32") for name, shape in step_shapes(T, B, R, n, programs.windows.values()).items()
        }
        if not R:
            specs.pop("wanted")
        specs["hidden"] = Spec((T, programs.config.dim), self._hidden_dtype(follows))
        own = len(programs.caches.layouts) - 1
        specs |= {name: spec for name, spec in programs.cache_specs().items() if name.startswith(f"cache{own}.")}

        def fn(hidden: Any, **given: Any) -> Any:
            step = ragged_step(given, programs.windows, activations=programs.activations, dtype=programs.caches.dtype)
            hidden = hidden if follows else programs.final_norm(step, hidden)
            h = mtp.forward(head, step, hidden, (given[f"cache{own}.0"], given[f"cache{own}.1"]))
            if not R:
                return h
            rows = programs.rows_of(h, given["wanted"])
            return rows, mtp.logits(head, step, rows)

        return trace(fn, specs)


class CapturedHead:
    """A head on a device that captures and draws: drafts follow each other there, and the host reads them at the end.
    Hidden rows are those of the trunk's residual stream.
    """

    most_rows = 1 + MOST_DRAFTS  # of a run that was verified: more come in fills

    def __init__(self, programs: Programs, head: mtp.Head) -> None:
        self._programs, self._device, self.head = programs, programs.device, head
        self._version: int | None = None
        self._runners: dict[Any, Runner] = {}
        self._filled: set[int] = set()  # numbers of sequences of which all fills are captured
        self._drafted: set[tuple[int, str]] = set()  # and of those of which drafts are, in a mode
        self._inputs: Any = None
        self._sampler: Any = None
        self._hidden: Any = None
        self._recycled: Any = None

    def copy(self, hidden: Any) -> Any:
        (found,) = self._device.copies([hidden])
        return found

    def unbind(self) -> None:
        self._version, self._runners, self._filled, self._drafted = None, {}, set(), set()
        self._inputs = self._sampler = self._hidden = self._recycled = None

    def fill(self, runs: Seq[Run], rows: Rows) -> None:
        self._ready()
        values, T, B = self._values(runs, fills=True)
        self._bring(rows)
        self._inputs.send(values)
        self._runner("fill", T, B, None).run()

    def prepare(self, sequences: int) -> None:
        self._ready()
        slots = max(1, self._programs.caches.slots)
        for B in sizes_up_to(_FILLED_SEQUENCES, slots):
            if B not in self._filled:
                most = _MOST_ROWS if B == 1 else MOST_TOKENS
                for T in (rows for rows in _FILLED_ROWS if B <= rows <= most):
                    self._run_nothing("fill", T, B, None)
                self._filled.add(B)
            if sequences <= B:
                break

    def _prepare_drafts(self, sequences: int, mode: str) -> None:
        """Have fills and drafts of so many sequences ready that are drawn in this mode."""
        slots = max(1, self._programs.caches.slots)
        B = next_size(sizes_up_to(_SIZES, slots), sequences)
        if (B, mode) in self._drafted:
            return
        self.prepare(sequences)
        for form, T in (("first", B), ("first", self._rows_before(B)), ("next", B)):
            self._run_nothing(form, T, B, mode)
        self._drafted.add((B, mode))

    def _rows_before(self, B: int) -> int:
        """Of a step that drafts behind more than one row of some of B sequences."""
        return next_size(_SIZES, self.most_rows * B)

    def _run_nothing(self, form: str, T: int, B: int, mode: str | None) -> None:
        """Capture a step of this size; no row is active."""
        none = dict.fromkeys(("tokens", "positions", "sequence"), np.full(T, -1, np.int32))
        none |= dict.fromkeys(("slots", "wanted", "from", "draw_at", "draw_slots"), np.full(B, -1, np.int32))
        none |= {"lengths": np.zeros(B, np.int32), "starts": np.zeros(B + 1, np.int32)}
        self._inputs.send(none | (self._sampler.values([UNREAD] * B) if mode is not None else {}))
        runner = self._runner(form, T, B, mode)
        while not runner.captured:
            runner.run()
            if mode is not None:
                self._sampler.launched(B, mode)

    def draft(self, asked: Seq[Asked], runs: Seq[Run], rows: Rows) -> None:
        self._ready()
        mode = mode_of([one.sampler for one in asked]).partition("+")[0]
        self._prepare_drafts(len(runs), mode)
        left, place, form = list(enumerate(asked)), 0, "first"
        pending: list[tuple[list[Asked], Any]] = []
        self._bring(rows)
        came: list[int] = []
        while left:
            own = [one for _, one in left]
            values, T, B = self._values(runs)
            count = len(own)
            values |= {
                name: padded(value, B, 0)
                for name, value in self._sampler.values([_plain(one.sampler.row) for one in own]).items()
            }
            at = np.array([one.sequence.length + 1 + place for one in own], np.int32)
            values["draw_at"] = padded(at, B, -1)
            values["draw_slots"] = padded(np.array([one.sequence.slot for one in own], np.int32), B, -1)
            if form == "next":
                values["from"] = padded(np.array(came, np.int32), B, -1)
            self._inputs.send(values)
            self._runner(form, T, B, mode).run()
            pending.append((own, self._sampler.launched(count, mode)))
            place, form = place + 1, "next"
            came = [n for n, (_, one) in enumerate(left) if one.count > place]
            left = [left[n] for n in came]
            runs = [_next_run(one, place, CHAINED - one.sequence.slot) for _, one in left]
        for own, drawn in pending:
            for one, token in zip(own, drawn.tokens(), strict=False):
                one.drafts.append(max(0, token))

    def _ready(self) -> None:
        """Have arrays for the caches that there are."""
        caches, device = self._programs.caches, self._device
        if self._version == caches.version:
            return
        self.unbind()
        slots, pages = max(1, caches.slots), max(1, -(-self._programs.max_context // PAGE))
        shapes = step_shapes(_SIZES[-1], slots, slots, pages, self._programs.windows.values()) | {"from": (slots,)}
        self._inputs = device.step_inputs({name: (shape, "int32") for name, shape in shapes.items()}, slots)
        self._sampler = device.sampler(self._inputs, self.head.rows)
        dim = self._programs.config.dim
        self._hidden = device.zeros((_SIZES[-1], dim), STREAM)
        self._recycled = device.zeros((slots, dim), self._programs.caches.dtype)
        self._version = caches.version

    def _bring(self, rows: Rows) -> None:
        first = 0
        for part in rows:
            self._hidden[first : first + len(part)] = part
            first += len(part)

    def _values(self, runs: Seq[Run], fills: bool = False) -> tuple[dict[str, np.ndarray], int, int]:
        """What a step reads, and its size, of which there are few: rows and sequences."""
        arrays = step_arrays(runs, self._programs.windows, width=lambda pages: pages)
        slots, rows = max(1, self._programs.caches.slots), len(arrays["tokens"])
        B = next_size(sizes_up_to(_FILLED_SEQUENCES if fills else _SIZES, slots), len(runs))
        if fills:
            T = next_size(_FILLED_ROWS, max(rows, B))
        else:
            T = B if rows == len(runs) else self._rows_before(B)
        sizes = step_shapes(T, B, B, 0, ())
        values = {}
        for name, array in arrays.items():
            if array.ndim == 2:
                values[name] = array
            elif name == "starts":
                values[name] = padded(array, B + 1, array[-1])
            else:
                values[name] = padded(array, sizes[name][0], 0 if name == "lengths" else -1)
        return values, T, B

    def _runner(self, form: str, T: int, B: int, mode: str | None) -> Runner:
        key = (form, T, B, mode)
        if key not in self._runners:
            programs, device = self._programs, self._device
            program = Program(self._graph(form, T, B), device.name, **programs.options)
            given = self._inputs.on_device
            pages = max(1, -(-programs.max_context // PAGE))
            shapes = step_shapes(T, B, B, pages, programs.windows.values()) | {"from": (B,)}
            inputs = {name: given[name][tuple(map(slice, shape))] for name, shape in shapes.items()}
            inputs |= {"hidden": self._hidden[:T], "recycled": self._recycled}
            inputs |= programs.cache_arrays()
            bound = program.bind(inputs, programs.new_arena(program.arena_bytes), programs.wrap)
            calls = [self._inputs.unpack, *bound.calls]
            if mode is not None:
                recycled, logits = bound.outputs
                calls.append(functools.partial(device.copy_all, [self._recycled[:B]], [recycled]))
                calls += self._sampler.calls(logits, mode)
            runner = self._runners[key] = Runner(device, [calls])
            device.compile(runner.calls)
        return self._runners[key]

    def _graph(self, form: str, T: int, B: int) -> Graph:
        """fill: entries alone. first: drafts behind runs. next: behind the draft before, from row `from` of its h'."""
        programs, head = self._programs, self.head
        pages = max(1, -(-programs.max_context // PAGE))
        specs = {
            name: Spec(shape, "int32") for name, shape in step_shapes(T, B, B, pages, programs.windows.values()).items()
        }
        if form == "fill":
            specs.pop("wanted")
        if form == "next":
            specs |= {"from": Spec((B,), "int32"), "recycled": spec_of(self._recycled)}
        else:
            specs["hidden"] = Spec((T, programs.config.dim), STREAM)
        own = len(programs.caches.layouts) - 1
        specs |= {name: spec for name, spec in programs.cache_specs().items() if name.startswith(f"cache{own}.")}

        def fn(**given: Any) -> Any:
            options = {"activations": programs.activations, "dtype": programs.caches.dtype}
            step = ragged_step(given, programs.windows, active=given["sequence"], **options)
            if form == "next":
                hidden = programs.rows_of(given["recycled"], given["from"])
            else:
                hidden = programs.final_norm(step, given["hidden"])
            h = mtp.forward(head, step, hidden, (given[f"cache{own}.0"], given[f"cache{own}.1"]))
            if form == "fill":
                return h
            rows = programs.rows_of(h, given["wanted"])
            return rows, mtp.logits(head, step, rows)

        return trace(fn, specs)


_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # of rows, and of sequences
_FILLED_ROWS, _FILLED_SEQUENCES = (8, 64, 256, 512, 4096), (1, 8, 64)


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """How a row is drawn, without its edits."""
    return {name: value for name, value in row.items() if name != "edits"}


def _at(sequence: Sequence, length: int) -> Any:
    """A sequence of the head, which has so many positions."""
    return _At(sequence.slot, sequence.tables, length)


def _next_run(one: Asked, place: int, token: int) -> Run:
    """The head's run behind the draft at the place before."""
    return Run(_at(one.sequence, one.sequence.length - 1 + place), np.array([token], np.int32))


def _rows(rows: Rows, first: int, stop: int) -> Rows:
    """Those of some parts from one number up to another."""
    found, at = [], 0
    for part in rows:
        own = part[max(0, first - at) : max(0, stop - at)]
        at += len(part)
        if len(own):
            found.append(own)
    return found


def _within(filled: list[tuple[Run, Rows]]) -> list[list[tuple[Run, Rows]]]:
    """Runs in steps of no more than the most tokens; those without rows are left out."""
    steps: list[list[tuple[Run, Rows]]] = []
    tokens = 0
    for run, rows in filled:
        if not rows:
            continue
        if not steps or tokens + len(run.tokens) > MOST_TOKENS:
            steps.append([])
            tokens = 0
        steps[-1].append((run, rows))
        tokens += len(run.tokens)
    return steps
