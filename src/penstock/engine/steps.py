"""Ragged steps: tokens of several sequences in one run of a program, what a step reads, and steps of exact sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import ops
from penstock.engine.cache import Sequence
from penstock.engine.heat import ChoiceNotes, ExpertHeat
from penstock.graph import Bound, Graph, SizedProgram
from penstock.graph.sizes import Sizes
from penstock.models.step import PAGE, Step
from penstock.ops.device import Device

if TYPE_CHECKING:
    from penstock.engine.programs import Programs

CHAINED = -2
KEPT = ("keep", "accepted")
MOST_TOKENS = 512  # of a step
MOST_SEQUENCES = MOST_LOGITS = 256
_KEPT = 32  # bound programs of a kind, the latest used ones
_LEAST_PAGES = 4  # columns of a block table, which grow in powers of two: a new width is bound anew


@dataclass(slots=True, eq=False)
class Run:
    """Tokens int32 [n] that a step appends to a sequence; `wanted`: logits after none of them, the last or all, or the
    hidden state of each after the final norm ("hidden": then of all runs of a step).

    "logprobs": logits after the last one, and `found` gets what `ops.token_logprobs` makes of those after each, for the
    tokens `targets` int32 [n] and so many of the first ranks (None: nothing, another rank does it). Such a run is a
    step of its own.

    A token CHAINED − s stands for the one that the step before has drawn for the sequence in slot s. keep: the sequence
    is as it was until `Engine.accept` says how many of the tokens are its own. heat: takes the experts that the tokens
    choose, where the device tells them.
    """

    sequence: Sequence
    tokens: np.ndarray
    wanted: str = "last"
    prompt: bool = False  # a chunk of a prompt, not of an answer
    keep: bool = False
    targets: np.ndarray | None = None
    top: int = 0
    found: tuple[np.ndarray, ...] = ()
    heat: ExpertHeat | None = None


class ExactSteps:
    """The steps of one model on a device that binds programs to exact sizes; what runs is one step at a time.

    A kind of step (one token; a few; more; with logits, without, with hidden states) is traced once and bound again to
    the sizes of each step. Nothing is padded, and a row's numbers depend on nothing else in the step.
    """

    most_tokens = MOST_TOKENS

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._kinds: dict[Any, SizedProgram] = {}
        self._bound: dict[Any, tuple[Bound, dict[str, np.ndarray]]] = {}
        self._buffers: dict[str, np.ndarray] = {}
        self._arena: Any = None
        self._notes: ChoiceNotes | None = None

    def working_bytes(self, sequences: int) -> int:
        """Memory that steps take beside weights and caches, at the most."""
        return self._kind(MOST_TOKENS, "logits", False, False).arena_bytes

    def run(self, runs: Seq[Run]) -> np.ndarray | None:
        """Run the step; logits float32 [R, vocab] after the wanted tokens, in the order of the runs, None if R is 0; or
        hidden states float32 [T, dim].
        """
        device, windows = self._programs.device, self._programs.windows
        arrays = step_arrays(runs, windows)
        output = "hidden" if wants_hidden(runs) else "logits" if len(arrays["wanted"]) else "stream"
        if output == "hidden":
            arrays["wanted"] = arrays["wanted"][:0]
        T, B, R = (len(arrays[name]) for name in ("tokens", "slots", "wanted"))
        pages = max((arrays[name].shape[1] for name in windows.values()), default=_LEAST_PAGES)
        sizes = {"T": T, "B": B, "R": max(R, 1), "n": pages}
        counts = any(run.heat is not None for run in runs)
        bound, inputs = self._bind(sizes, output, any(run.prompt for run in runs), self._keeps(runs, arrays), counts)
        for name, array in arrays.items():
            if array.size:
                inputs[name][...] = array
        found, *hidden = bound.run()
        if counts and self._notes is not None:
            for run, begin, end in zip(runs, arrays["starts"], arrays["starts"][1:], strict=False):
                if run.heat is not None:
                    run.heat.add(self._notes.of(begin, end), self._notes.experts, run.keep)
        drafter = self._programs.drafter
        if drafter is not None and hidden:
            drafter.observe(runs, hidden[0])
        if wants_logprobs(runs):
            return read_logprobs(device, runs[0], [found])
        return None if output == "stream" else device.to_host(found)

    def _keeps(self, runs: Seq[Run], arrays: dict[str, np.ndarray]) -> bool:
        """Whether recurrent states wait for what is accepted; then the step reads what was of the runs before."""
        if not any(run.keep for run in runs) or not self._programs.caches.gates:
            return False
        arrays |= kept_arrays(runs)
        return True

    def unbind(self) -> None:
        """Let go of the caches' arrays."""
        self._bound = {}

    def _bind(
        self, sizes: dict[str, int], output: str, prompt: bool, keeps: bool, counts: bool
    ) -> tuple[Bound, dict[str, np.ndarray]]:
        programs = self._programs
        prompt = prompt and programs.experts is not None
        key = (tuple(sizes.values()), output, prompt, keeps, counts, programs.caches.version)
        kept = self._bound.pop(key, None)
        if kept is None:
            program = self._kind(sizes["T"], output, prompt, keeps)
            if self._arena is None or len(self._arena) < program.arena_bytes:
                self._arena, self._bound = None, {}
                self._arena = programs.new_arena(program.arena_bytes)
            shapes = step_shapes(**sizes, tables=programs.windows.values())
            shapes |= dict.fromkeys(KEPT, (sizes["B"],)) if keeps else {}
            inputs = {name: self._buffer(name, shape) for name, shape in shapes.items()}
            wrap = programs.wrap
            if counts:
                self._notes = self._notes or ChoiceNotes(program.graph, MOST_TOKENS)
                wrap = self._notes.wrap(wrap)
            if programs.experts is not None:
                wrap = programs.experts.wrap(program.graph, prompt, wrap)
            kept = program.bind(sizes, inputs | programs.cache_arrays(), self._arena, wrap), inputs
        self._bound[key] = kept
        while len(self._bound) > _KEPT:
            del self._bound[next(iter(self._bound))]
        return kept

    def _buffer(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The first numbers of a buffer that serves all sizes."""
        size = int(np.prod(shape))
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name], self._bound = np.zeros(2 * size, np.int32), {}
        return self._buffers[name][:size].reshape(shape)

    def _kind(self, T: int, output: str, prompt: bool, keeps: bool) -> SizedProgram:
        programs, experts = self._programs, self._programs.experts
        least_tokens, most_tokens = alike_sizes(T, programs.device)
        one = most_tokens == 1
        key = (least_tokens, output, prompt, keeps)
        if key not in self._kinds:
            most_pages = max(2 * _LEAST_PAGES, table_width(-(-2 * programs.max_context // PAGE)))
            least = {"T": least_tokens, "B": 1, "R": 1, "n": _LEAST_PAGES}
            most = {"T": most_tokens, "B": min(MOST_SEQUENCES, most_tokens), "R": min(MOST_LOGITS, most_tokens)}
            most |= {"n": most_pages}
            ahead = experts.look_ahead if experts is not None and experts.prefetches and not prompt else None

            def graph(sizes: Sizes) -> Graph:
                rows, hidden = sizes["R"] if output == "logits" else 0, output == "hidden"
                size = (sizes["T"], sizes["B"], sizes["n"], rows)
                also = programs.drafter is not None and not hidden
                return programs.graph(*size, decode=one, hidden=hidden, keeps=keeps, also_stream=also)

            self._kinds[key] = SizedProgram(graph, programs.device.name, least, most, more=ahead, **programs.options)
        return self._kinds[key]


def alike_sizes(T: int, device: Device) -> tuple[int, int]:
    """The least and the most tokens of steps that have the nodes of one with T: one, a few whose products with adjacent
    weights are joined, or more.
    """
    classes = ((1, 1), (2, device.joins), (max(2, device.joins + 1), MOST_TOKENS))
    return next(sizes for sizes in classes if sizes[1] >= T)


def wants_hidden(runs: Seq[Run]) -> bool:
    """Whether a step of these runs gives hidden states."""
    return any(run.wanted == "hidden" for run in runs)


def wants_logprobs(runs: Seq[Run]) -> bool:
    """Whether the logits of these runs, of one, are reduced to those of its targets."""
    return runs[0].wanted == "logprobs"


def read_logprobs(device: Device, run: Run, passes: Iterable[Any]) -> np.ndarray:
    """Reduce the logits after each token of a run, which come in arrays [n, vocab] of the device, there: into `found`;
    logits [1, vocab] after the last one. An array is read before the next one comes.
    """
    at, parts, last = 0, [], None
    for logits in passes:
        at, first = at + len(logits), at
        if run.targets is not None:
            targets = device.to_device(np.ascontiguousarray(run.targets[first:at]))
            parts.append([device.to_host(part) for part in ops.token_logprobs(logits, targets, run.top)])
        if at == len(run.tokens):
            last = device.to_host(logits[-1:])
    run.found = tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    assert last is not None
    return last


def table_names(windows: Iterable[int | None]) -> dict[int | None, str]:
    """The inputs that are block tables, by their window."""
    return {window: table_name(window) for window in windows}


def table_name(window: int | None) -> str:
    return f"table{'' if window is None else window}"


def table_width(pages: int) -> int:
    """Columns of a block table that has room for this many pages."""
    width = _LEAST_PAGES
    while width < pages:
        width *= 2
    return width


def step_shapes(T: int, B: int, R: int, n: int, tables: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """The arrays that a step of T tokens of B sequences reads, all int32: R wanted rows, n pages in each table."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("tokens", "positions", "sequence"), (T,))
    shapes |= {"starts": (B + 1,), "lengths": (B,), "slots": (B,), "wanted": (R,)}
    return shapes | dict.fromkeys(tables, (B, n))


def step_arrays(
    runs: Seq[Run], tables: Mapping[int | None, str], width: Callable[[int], int] = table_width
) -> dict[str, np.ndarray]:
    """What a step reads, by name; `wanted` are the rows whose results are wanted. width: see `table_width`."""
    if len(runs) == 1:
        arrays = _arrays_of_one(runs[0])
        return arrays | block_tables([runs[0].sequence], tables, width)
    lengths = np.array([len(run.tokens) for run in runs], np.int32)
    before = np.array([run.sequence.length for run in runs], np.int32)
    starts = np.zeros(len(runs) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    sequence = np.repeat(np.arange(len(runs), dtype=np.int32), lengths)
    rows = np.arange(starts[-1], dtype=np.int32)
    wanted = [
        rows[end - 1 : end] if run.wanted == "last" else rows[first:end]
        for run, first, end in zip(runs, starts, starts[1:], strict=False)
        if run.wanted != "none"
    ]
    arrays = {
        "tokens": np.concatenate([run.tokens for run in runs]),
        "positions": rows - starts[sequence] + before[sequence],
        "sequence": sequence,
        "starts": starts,
        "lengths": before + lengths,
        "slots": np.array([run.sequence.slot for run in runs], np.int32),
        "wanted": np.concatenate(wanted) if wanted else rows[:0],
    }
    return arrays | block_tables([run.sequence for run in runs], tables, width)


def _arrays_of_one(run: Run) -> dict[str, np.ndarray]:
    """The same without block tables for one sequence, in a third of the time."""
    count, before = len(run.tokens), run.sequence.length
    first_wanted = {"none": count, "last": count - 1}.get(run.wanted, 0)
    return {
        "tokens": run.tokens,
        "positions": np.arange(before, before + count, dtype=np.int32),
        "sequence": np.zeros(count, np.int32),
        "starts": np.array((0, count), np.int32),
        "lengths": np.array((before + count,), np.int32),
        "slots": np.array((run.sequence.slot,), np.int32),
        "wanted": np.arange(first_wanted, count, dtype=np.int32),
    }


def block_tables(
    sequences: Seq[Sequence], tables: Mapping[int | None, str], width: Callable[[int], int] = table_width
) -> dict[str, np.ndarray]:
    """The block tables of a step, by name. width: see `table_width`."""
    arrays = {}
    for window, name in tables.items():
        own = [sequence.tables[window].array for sequence in sequences]
        arrays[name] = np.zeros((len(own), width(max(map(len, own)))), np.int32)
        for row, pages in zip(arrays[name], own, strict=True):
            row[: len(pages)] = pages
    return arrays


def padded(array: np.ndarray, size: int, pad: int) -> np.ndarray:
    """The array with as many numbers `pad` behind it as make it this long."""
    if len(array) == size:
        return array
    found = np.full(size, pad, array.dtype)
    found[: len(array)] = array
    return found


def kept_arrays(runs: Seq[Run]) -> dict[str, np.ndarray]:
    """What a step reads that keeps runs: the tokens of each that are kept, and those accepted of the run before."""
    keep = [len(run.tokens) if run.keep else 0 for run in runs]
    accepted = [run.sequence.accepted for run in runs]
    return dict(zip(KEPT, (np.array(keep, np.int32), np.array(accepted, np.int32)), strict=True))


def ragged_step(arrays: Mapping[str, Any], tables: Mapping[int | None, str], **more: Any) -> Step:
    """The step of these arrays, or of the values that stand for them in a trace. Without `starts`, and where there is
    one row, each row is a sequence by itself.
    """
    each = "starts" not in arrays or arrays["tokens"].shape[0] == 1
    names = ("tokens", "positions", "lengths", "slots", *(() if each else ("sequence", "starts")))
    names += tuple(name for name in KEPT if name in arrays)
    given = {window: arrays[name] for window, name in tables.items()}
    return Step(tables=given, **{name: arrays[name] for name in names}, **more)
