"""Where the time of a step goes: a model's program before and after fusion, node by node, in bytes and seconds.

A trace needs shapes alone, so that a model of any size is traced without its weights. Measuring needs them.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock import ops
from penstock.analysis.measured import LAUNCH_SECONDS, MeasuredShare, measured_share
from penstock.analysis.weights import experts_read, rows_read, span, walk
from penstock.dtypes import ITEMSIZE, numpy_dtype
from penstock.engine.cache import Caches
from penstock.engine.programs import Programs
from penstock.engine.steps import Run, step_arrays, table_width
from penstock.errors import BackendError, CheckpointError, InvalidArgument, OutOfMemory
from penstock.graph import Graph, Node, Plan, Program, Value, fuse, plan
from penstock.graph.trace import nbytes
from penstock.models import mtp, replaced
from penstock.models.config import first_layers
from penstock.models.layers import ExpertStack
from penstock.models.split import SplitSource
from penstock.models.step import PAGE, PagedKV, empty, with_state_dtype
from penstock.ops.array import address, leaves
from penstock.ops.device import device_for

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.models.family import AnyFamily
    from penstock.models.split import Mesh
    from penstock.weights.checkpoint import Checkpoint
    from penstock.weights.resolve import ResolvedModel

Layers = int | Literal["all"] | None  # of a config.json: the first so many, all if None
_CALLS = 16  # of a kind of node in a measurement, at least
_ROUNDS = 5


@dataclass(frozen=True)
class Work:
    """A step: a decode of one token of each of `rows` sequences, or a prefill of `rows` tokens of one sequence."""

    step: str
    rows: int
    depth: int  # positions that are there before

    @property
    def decoding(self) -> bool:
        return self.step == "decode"

    @property
    def sequences(self) -> int:
        return self.rows if self.decoding else 1

    @property
    def positions(self) -> int:
        """Of each sequence, after the step."""
        return self.depth + (1 if self.decoding else self.rows)

    def read(self, window: int | None) -> int:
        """Positions of all sequences that attention reads, each once."""
        before = self.depth if window is None else min(self.depth, window - 1)
        return self.rows * (before + 1) if self.decoding else before + self.rows

    def __str__(self) -> str:
        many = f"{self.rows} sequence{'s' * (self.rows != 1)}" if self.decoding else f"{self.rows} tokens"
        return f"{self.step} of {many} at depth {self.depth}"


@dataclass(frozen=True)
class Line:
    """A node: what it makes, the bytes it moves, the seconds these need and those that it took."""

    op: str
    family: str
    layer: int | None  # None: before the first or after the last
    made: tuple[str, ...]
    reads: int
    writes: int
    predicted: float
    measured: float | None = None

    @property
    def nbytes(self) -> int:
        return self.reads + self.writes

    @property
    def seconds(self) -> float:
        """Measured where it was measured."""
        return self.predicted if self.measured is None else self.measured

    @property
    def kind(self) -> tuple[Any, ...]:
        return self.op, self.made, self.reads, self.writes


@dataclass(frozen=True)
class Group:
    """Layers whose nodes are alike, or what comes before or after all layers; `lines` are those of one of them."""

    title: str
    count: int
    lines: tuple[Line, ...]

    @property
    def seconds(self) -> float:
        return self.count * sum(line.seconds for line in self.lines)


@dataclass(frozen=True)
class Side:
    """A program: its nodes, the arena's bytes as planned and without sharing, the seconds of a whole run."""

    lines: tuple[Line, ...]
    arena: int
    apart: int
    whole: float | None = None

    @property
    def nbytes(self) -> int:
        return sum(line.nbytes for line in self.lines)

    @property
    def predicted(self) -> float:
        return sum(line.predicted for line in self.lines)

    @property
    def seconds(self) -> float:
        return sum(line.seconds for line in self.lines)

    def with_launches(self, launch: float) -> float:
        """Seconds of all bytes and of a launch per node; some nodes need several."""
        return self.predicted + launch * len(self.lines)

    def groups(self) -> list[Group]:
        """Layers that are alike together, in the order in which each kind comes first; times are their means."""
        parts: dict[int | str, list[Line]] = {}
        for line in self.lines:
            at = line.layer
            if at is None:
                at = "after the layers" if any(isinstance(part, int) for part in parts) else "before the layers"
            parts.setdefault(at, []).append(line)
        kinds: dict[Any, list[int | str]] = defaultdict(list)
        for at, lines in parts.items():
            kinds[at if isinstance(at, str) else tuple(line.kind for line in lines)].append(at)
        return [
            Group(_title(members), len(members), tuple(map(_mean, zip(*(parts[at] for at in members), strict=True))))
            for members in kinds.values()
        ]

    def by_op(self) -> dict[str, list[Line]]:
        found: dict[str, list[Line]] = defaultdict(list)
        for line in self.lines:
            found[line.op].append(line)
        return found


@dataclass(frozen=True)
class TraceReport:
    """A traced step before and after fusion; `how` says where the bandwidth (GB/s) comes from.

    expected: of the speed by bytes, the share that such models were measured to reach; None if that is not known.
    """

    name: str
    device: str
    dtype: str
    work: Work
    bandwidth: float
    how: str
    before: Side
    after: Side
    expected: MeasuredShare | None = None

    @property
    def measured(self) -> bool:
        return self.after.whole is not None

    @property
    def launch(self) -> float:
        """Seconds that a node takes beside those of its bytes, as measured."""
        return LAUNCH_SECONDS[self.device]


def _mean(lines: tuple[Line, ...]) -> Line:
    times = [line.measured for line in lines if line.measured is not None]
    return replace(lines[0], measured=sum(times) / len(times)) if times else lines[0]


def _title(members: Sequence[int | str]) -> str:
    """6 × layers 0–2, 4–6."""
    numbers = [member for member in members if isinstance(member, int)]
    if not numbers:
        return str(members[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    spelled = [f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    shown = ", ".join(spelled if len(spelled) <= 4 else [*spelled[:3], "…", spelled[-1]])
    return f"{len(numbers)} × layers {shown}" if len(numbers) > 1 else f"layer {shown}"


# --------------------------------------------------------------------------------------------------------------------
# The model


@dataclass(frozen=True)
class TracedModel:
    """A model to be traced: programs over weights of which nothing but their shapes counts, or over an engine's."""

    name: str
    device: str
    programs: Programs
    engine: Engine | None = None


@dataclass(frozen=True)
class Outline:
    """A model of which nothing but shapes counts. columns: of its quantization groups. head: of the head that drafts,
    None without one.
    """

    name: str
    family: AnyFamily
    config: Any
    source: Any
    columns: int
    head: Any = None


def outline_of(found: ResolvedModel, layers: Layers) -> Outline:
    """The shapes of a model. layers: how many of a config.json are taken."""
    from penstock import models
    from penstock.models.gguf import open_gguf
    from penstock.models.random import Shapes
    from penstock.models.source import CheckpointSource, ShapeOnlySource
    from penstock.models.split import group_columns
    from penstock.weights.checkpoint import Checkpoint

    name, raw = taken_layers(found, layers)
    if raw is not None:
        family, shapes = models.family_of(raw), Shapes(raw)
        read = family.read_config(raw)
        head = shapes if mtp.declared(family, read, raw) else None
        return Outline(name, family, read, shapes, shapes.group_size, head)
    if found.kind == "gguf":
        gguf = open_gguf(found.path)
        return Outline(name, gguf.family, gguf.read_config(), ShapeOnlySource(gguf.source), gguf.columns)
    checkpoint = Checkpoint.open(found.path)
    family = models.family_of(checkpoint.config)
    config = family.read_config(checkpoint.config)
    source = ShapeOnlySource(CheckpointSource(checkpoint, *family.names(checkpoint, config)))
    return Outline(name, family, config, source, group_columns(checkpoint), _head_of(checkpoint, family, config))


def _head_of(checkpoint: Checkpoint, family: AnyFamily, config: Any) -> Any:
    """The shapes of the head that drafts, None for one that cannot be used."""
    from penstock.models.source import ShapeOnlySource

    none = np.empty((0, 0), np.float32)
    try:
        found = mtp.find(checkpoint, family, config)
        if found is None:
            return None
        found.read(family, config, none, none, ShapeOnlySource)
        return ShapeOnlySource(found.source)
    except CheckpointError:
        return None


def outlined_head(outline: Outline, programs: Programs) -> mtp.Head | None:
    """The head that drafts beside these programs, of which nothing but the shapes counts."""
    if outline.head is None:
        return None
    source, mesh, weights = outline.head, programs.mesh, programs.weights
    if mesh is not None:
        assert outline.family.split is not None
        source = SplitSource(source, outline.family.split(outline.config, mesh, outline.columns), mesh)
    return mtp.read(source, outline.family, programs.config, weights.embed, weights.head)


def outlined(
    found: ResolvedModel, layers: Layers, device: str, dtype: str, activations: str, work: Work
) -> TracedModel:
    """A model without its weights. layers: how many of a config.json are taken."""
    outline = outline_of(found, layers)
    return TracedModel(outline.name, device, outlined_programs(outline, dtype, activations, work))


def outlined_programs(
    outline: Outline, dtype: str, activations: str, work: Work, state_dtype: str = "float32", mesh: Mesh | None = None
) -> Programs:
    """Programs over weights and caches of which nothing but the shapes counts. mesh: of a rank's part alone."""
    family, config, source = outline.family, outline.config, outline.source
    _check_positions(work, config)
    if mesh is not None:
        assert family.split is not None
        split = family.split(config, mesh, outline.columns)
        config, source = split.config, SplitSource(source, split, mesh)
    weights = family.read_weights(source, config)
    if mesh is not None and not mesh.experts_split and config.experts:
        slot_of = mesh.slot_of(config.experts)
        weights = replaced(weights, ExpertStack, lambda stack: replace(stack, slot_of=slot_of))
    caches = Caches(with_state_dtype(family.caches(config), state_dtype), dtype, device_for("cpu"))
    pages = work.sequences * -(-work.positions // PAGE)

    def unwritten(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        try:
            return np.empty(shape, numpy_dtype(dtype))
        except (MemoryError, ValueError):
            raise OutOfMemory(f"kernels: {work}: a cache of shape {shape} is more than this machine can name") from None

    caches.arrays = [empty(layout, pages, work.sequences, dtype, unwritten) for layout in caches.layouts]
    return Programs(family, config, weights, caches, activations, mesh=mesh)


def taken_layers(found: ResolvedModel, layers: Layers) -> tuple[str, dict[str, Any] | None]:
    """The model's name, and of a config.json what it says with its first layers only."""
    if found.kind == "config":
        raw, shown = first_layers(found.read_config(), "all" if layers is None else layers, str(found.config_path))
        return found.name + shown, raw
    if layers is not None:
        raise InvalidArgument(f"layers: is {layers}, expected none; a stored model is traced whole")
    return found.name, None


def _check_positions(work: Work, config: Any) -> None:
    if work.positions > config.max_positions:
        raise InvalidArgument(
            f"kernels: {work.positions} positions are asked for, expected at most {config.max_positions} (the model's)"
        )


# --------------------------------------------------------------------------------------------------------------------
# Tracing


def reported(subject: TracedModel, dtype: str, work: Work, bandwidth: float, how: str, measure: bool) -> TraceReport:
    """Trace a step, before and after fusion; `measure` runs both programs as well."""
    programs = subject.programs
    state = _State(subject.engine, work) if measure and subject.engine is not None else None
    pages = table_width(-(-work.positions // PAGE))
    decode = work.decoding or work.rows == 1
    graph = programs.graph(work.rows, work.sequences, pages, R=work.sequences, decode=decode)
    sides = []
    for each in (graph, fuse(graph, subject.device)):
        lines, planned = _lines(each, programs, work, bandwidth), plan(each)
        side = Side(tuple(lines), planned.size, planned.apart)
        sides.append(side if state is None else state.measured(side, each, subject.device))
    alone = work.decoding and work.rows == 1
    expected = measured_share(subject.device, programs.family.name, bandwidth) if alone else None
    return TraceReport(subject.name, subject.device, dtype, work, bandwidth, how, *sides, expected=expected)


def _lines(graph: Graph, programs: Programs, work: Work, bandwidth: float) -> Iterator[Line]:
    layer_of = _Layers(programs)
    layer: int | None = None
    for node in graph.nodes:
        layer = layer_of(node, layer)
        reads, writes = moved(node, work, programs.caches.layouts)
        made = tuple(f"{out.dtype}{list(out.shape)}" for out in node.outs if out is not None)
        yield Line(node.op.name, node.op.family, layer, made, reads, writes, (reads + writes) / bandwidth / 1e9)


class _Layers:
    """Finds the layer of a node by the weights that it reads; one that reads none goes with the node before."""

    def __init__(self, programs: Programs) -> None:
        spans = [(*span(weight.array), weight.layer) for weight in walk(programs)]
        self._spans: list[tuple[int, int, int | None]] = sorted(spans, key=lambda span: span[:2])
        self._starts = [span[0] for span in self._spans]

    def __call__(self, node: Node, before: int | None) -> int | None:
        arrays = [leaf for _, arg in _read_args(node) for leaf in leaves(arg) if not isinstance(leaf, Value)]
        found = list(map(self._layer, arrays))
        known = [layer for layer, ours in found if ours]
        if not known:
            return before
        return max((layer for layer in known if layer is not None), default=None)

    def _layer(self, array: Any) -> tuple[int | None, bool]:
        """The layer of the weight that an array is, or is a part of, and whether there is such a weight at all."""
        at = address(array)
        number = bisect.bisect_right(self._starts, at) - 1
        if number < 0 or at >= self._spans[number][1]:
            return None, False
        return self._spans[number][2], True


def _read_args(node: Node) -> Iterator[tuple[str, Any]]:
    """Arguments of a node, without what it may bring to a cache for another one, which reads it."""
    return ((name, arg) for name, arg in node.args.items() if name != "fetch")


def moved(node: Node, work: Work, layouts: Sequence[Any]) -> tuple[int, int]:
    """Bytes that a node reads and writes: of caches the rows of this step, of experts and tables those it takes."""
    reads, writes = 0.0, sum(nbytes(out) for out in node.outs if out is not None)
    ids = node.outs[1] if node.op is ops.moe_route_forward else node.args.get("ids")
    for name, arg in _read_args(node):
        if isinstance(arg, Value):
            read, written = _value_bytes(arg, name in node.op.writes, work, layouts)
            if node.op is ops.conv1d_state_update and name == "x":
                read = min(read, nbytes(node["state"]))  # its last rows alone
            reads, writes = reads + read, writes + written
            continue
        size = sum(leaf.nbytes for leaf in leaves(arg))
        if node.op.family == "embed" and size:
            size *= rows_read(arg.shape[0], 1, work.rows)
        elif isinstance(ids, Value) and size and len(arg.shape) == 3:
            tokens, top_k = ids.shape
            size *= experts_read(arg.shape[0], top_k, tokens)
        reads += size
    return round(reads), round(writes)


def _value_bytes(value: Value, written: bool, work: Work, layouts: Sequence[Any]) -> tuple[int, int]:
    whole = nbytes(value)
    name = value.base.name
    if name is None or not name.startswith("cache"):
        return whole, whole if written else 0
    layout = layouts[int(name.removeprefix("cache").partition(".")[0])]
    if isinstance(layout, PagedKV):
        row = value.shape[-1] * ITEMSIZE[value.dtype]
        return (0, work.rows * row) if written else (work.read(layout.window) * row, 0)
    if not value.is_part:
        whole = whole // max(value.shape[0], 1) * work.sequences
    return whole, whole if written else 0


# --------------------------------------------------------------------------------------------------------------------
# Time


class _State:
    """Sequences of an engine, as deep as asked for, and the times of programs that take a step of them.

    Their caches hold zeros: how long a kernel takes does not depend on them. A node runs often, in a replay with all
    nodes of its kind, so that it finds its weights where it finds them in a step: in memory, not in a cache.
    """

    def __init__(self, engine: Engine, work: Work) -> None:
        self._engine, self._work = engine, work
        engine.allocate_for([(work.sequences, work.positions)])
        self._sequences = [engine.open() for _ in range(work.sequences)]
        for sequence in self._sequences:
            engine.caches.reserve(sequence, work.positions)
            engine.caches.advance(sequence, work.depth)

    def measured(self, side: Side, graph: Graph, device: str) -> Side:
        engine, where = self._engine, self._engine.device
        program = Program(graph, device, fused=False, cut=lambda node: True)
        program.plan = _apart(graph)  # a node may run by itself, whatever has run in between
        assert engine.programs is not None
        arrays = engine.programs.cache_arrays()
        inputs = {name: where.to_device(array) for name, array in self._inputs().items()}
        with where.running(deterministic=False):
            bound = program.bind(arrays | inputs, where.arena(program.arena_bytes))
            if not np.isfinite(where.to_host(bound.run()[0])).all():
                raise BackendError("kernels: the step gave logits that are not finite, expected finite ones")
            kinds: dict[Any, list[int]] = defaultdict(list)
            for number, line in enumerate(side.lines):
                kinds[line.kind].append(number)
            times: dict[int, float] = {}
            for members in kinds.values():
                repeated = members * math.ceil(_CALLS / len(members))
                calls = [call for number in repeated for call in bound.segments[number]]
                times |= dict.fromkeys(members, _seconds(where.capture(calls), where.wait) / len(repeated))
            whole = _seconds(where.capture(bound.calls), where.wait)
        lines = tuple(replace(line, measured=times[number]) for number, line in enumerate(side.lines))
        return replace(side, lines=lines, whole=whole)

    def _inputs(self) -> dict[str, np.ndarray]:
        work, rng, programs = self._work, np.random.default_rng(0), self._engine.programs
        assert programs is not None
        tokens = rng.integers(0, self._engine.model.config.vocab_size, (work.sequences, work.rows // work.sequences))
        runs = [Run(sequence, ids.astype(np.int32)) for sequence, ids in zip(self._sequences, tokens, strict=True)]
        return step_arrays(runs, programs.windows)


def _apart(graph: Graph) -> Plan:
    """A plan in which no two values share bytes."""
    offsets: dict[Value, int] = {}
    end = 0
    for out in (out for node in graph.nodes for out in node.outs if out is not None):
        offsets[out] = end
        end += -(-max(nbytes(out), 1) // 256) * 256
    return Plan(offsets, end, end)


def _seconds(replay: Callable[[], object], wait: Callable[[], object]) -> float:
    """Of a call, the median of some rounds, each long enough to be told from its launch."""
    replay()
    wait()
    count, times = 1, []
    while len(times) < _ROUNDS:
        start = time.perf_counter()
        for _ in range(count):
            replay()
        wait()
        took = time.perf_counter() - start
        if took < 5e-3 and count < 256:
            count *= 2
        else:
            times.append(took / count)
    return sorted(times)[_ROUNDS // 2]
