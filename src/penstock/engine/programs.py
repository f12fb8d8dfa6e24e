"""The programs of a model by shape: traced once, bound to the caches, captured where the device replays.

Everything that changes from step to step lies in buffers that a program keeps: tokens, positions, lengths, slots and
block tables. A prefill works on the recurrent state of one sequence in rows of its own, into which the engine copies
the sequence's, so that one program serves every sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.engine.cache import Caches
from penstock.engine.runner import Runner, SegmentedRunner
from penstock.engine.steps import Steps, table_name, table_width
from penstock.errors import OutOfMemory
from penstock.experts.streamed import EXPERT_OPS, Streamed
from penstock.graph import Graph, Program, Wrap, trace
from penstock.models.family import AnyFamily, ModelConfig, ModelWeights
from penstock.models.step import PagedKV, Step, empty
from penstock.ops.array import Spec, spec_of
from penstock.units import amount

KEPT = 48  # programs of prefills and of decodes that are kept, the latest used ones


class Programs:
    """Makes and keeps the programs of one model on one device."""

    def __init__(
        self,
        family: AnyFamily,
        config: ModelConfig,
        weights: ModelWeights,
        caches: Caches,
        activations: str,
        fused: bool = True,
        batch_invariant: bool = False,
        experts: Streamed | None = None,
        max_context: int = 0,
    ) -> None:
        self.experts = experts  # streamed ones
        self.max_context = max_context
        self.family, self.config, self.weights = family, config, weights
        self.caches, self.device = caches, caches.device
        self.activations = activations
        self.fused, self.batch_invariant = fused, batch_invariant  # see Program
        self.wrap: Wrap | None = None  # see Program.bind
        zeros = self.device.zeros
        self.rows = [
            None if isinstance(layout, PagedKV) else empty(layout, 0, 1, caches.dtype, zeros)
            for layout in caches.layouts
        ]
        self._kept: dict[Any, Runner] = {}
        self._sizes: set[tuple[int, bool]] = set()  # of prefills so far
        self._by_start: set[Any] = set()  # prefills whose nodes depend on where they start
        self._streams: dict[int, Any] = {}
        self._arena: Any = None
        self._arenas = 0  # how many there have been
        self._decode_arenas: dict[Any, Any] = {}
        self.steps = Steps(self) if self.device.ragged else None

    # -- runners -----------------------------------------------------------------------------------------------------

    def decode(self, rows: int, widths: Mapping[int | None, int]) -> Runner:
        """One token of each of `rows` sequences, with block tables of these widths; its output are logits."""
        key = ("decode", rows, tuple(widths.items()))
        runner = self._kept.pop(key, None)
        if runner is None:
            names = self._decode_names(rows, widths)
            runner = self._segmented(rows, widths, names)
            if runner is None:
                runner = self._made(self.decode_graph(rows, widths), names, ahead=True)
        self._keep(key, runner)
        if key not in self._decode_arenas:
            self._decode_arenas[key] = self.new_arena(runner.program.arena_bytes)
        wrap = self.wrap if isinstance(runner, SegmentedRunner) else self._wrap(runner)
        runner.bind(self.caches.version, self.cache_arrays(False), self._decode_arenas[key], wrap)
        return runner

    def prefill(self, T: int, start: int, widths: Mapping[int | None, int], logits: bool) -> Runner:
        """T tokens of one sequence from position `start` on. Outputs: logits after the last, or the residual stream."""
        key: Any = ("prefill", T, tuple(widths.items()), logits)
        if key in self._by_start:
            key = (*key, start)
        runner = self._kept.pop(key, None)
        if runner is None:
            graph, by_start = self.prefill_graph(T, start, widths, logits)
            if by_start and key not in self._by_start:
                self._by_start.add(key)
                key = (*key, start)
            names: dict[str, tuple[int, ...]] = {"tokens": (T,), "positions": ()}
            names |= {table_name(window): (width,) for window, width in widths.items()}
            size = (T.bit_length(), logits)  # lengths of one size run the same kernels
            runner = self._made(graph, names, compiles=size not in self._sizes)
            self._sizes.add(size)
        return self._with_arena(self._keep(key, runner), self.cache_arrays(True))

    def logits(self, T: int) -> tuple[Runner, Any]:
        """Logits of T rows of the residual stream, and the array that these rows are to be copied into."""
        key = ("logits", T)
        runner = self._kept.pop(key, None) or self._made(self.logits_graph(T), {})
        self._keep(key, runner)
        if T not in self._streams:
            self._streams[T] = self.device.zeros((T, self.config.dim), self.caches.dtype)
        return self._with_arena(runner, {"h": self._streams[T]}), self._streams[T]

    def looking(self, pages: Mapping[int | None, int], wrap: Wrap) -> Runner:
        """One token of one sequence with so many pages per window, unfused, its kernels wrapped; made for one run."""
        widths = {window: table_width(count) for window, count in pages.items()}
        rows = self.device.rows(1)
        program = Program(self.decode_graph(rows, widths), self.device.name, fused=False)
        runner = Runner(program, self.device, self._decode_names(rows, widths), captures=False)
        inner = wrap if self.experts is None else self.experts.wrap(program.graph, False, wrap)
        arena = self.new_arena(program.arena_bytes)
        runner.bind(self.caches.version, self.cache_arrays(False), arena, inner)
        return runner

    def _decode_names(self, rows: int, widths: Mapping[int | None, int]) -> dict[str, tuple[int, ...]]:
        """The inputs of a decode program and their shapes."""
        names: dict[str, tuple[int, ...]] = dict.fromkeys(("tokens", "positions", "lengths", "slots"), (rows,))
        return names | {table_name(window): (rows, width) for window, width in widths.items()}

    def _with_arena(self, runner: Runner, arrays: Mapping[str, Any]) -> Runner:
        """Bind to the arena that prefills share: they run one at a time, and nothing in it outlives a run."""
        need = runner.program.arena_bytes
        if self._arena is None or len(self._arena) < need:
            self._arena = None  # the old one goes before the new one comes
            self._arena = self.new_arena(need)
            self._arenas += 1
        runner.bind((self.caches.version, self._arenas), arrays, self._arena, self._wrap(runner, prefill=True))
        return runner

    def unbind(self) -> None:
        """Let go of the caches' arrays, which others replace: programs are made again when they are used."""
        self._kept.clear()
        self._decode_arenas.clear()
        self._streams.clear()
        if self.steps is not None:
            self.steps.unbind()

    def _wrap(self, runner: Runner, prefill: bool = False) -> Wrap | None:
        """What wraps the kernels of a program: streamed experts, and `self.wrap` inside."""
        return self.wrap if self.experts is None else self.experts.wrap(runner.program.graph, prefill, self.wrap)

    def new_arena(self, nbytes: int) -> Any:
        if nbytes > (free := self.device.free_memory()):
            raise OutOfMemory(
                f"step: {amount(nbytes)} of {self.device.memory_name} are needed, {amount(free)} are free; "
                "use fewer sequences at once, or close sessions"
            )
        return self.device.arena(nbytes)

    def _made(
        self, graph: Graph, names: Mapping[str, tuple[int, ...]], compiles: bool = True, ahead: bool = False
    ) -> Runner:
        more = self.experts.look_ahead if ahead and self.experts is not None and self.experts.prefetches else None
        program = Program(graph, self.device.name, fused=self.fused, batch_invariant=self.batch_invariant, more=more)
        captures = self.experts is None or not self.device.samples_tokens
        return Runner(program, self.device, names, compiles, captures)

    def _segmented(
        self, rows: int, widths: Mapping[int | None, int], names: Mapping[str, tuple[int, ...]]
    ) -> Runner | None:
        """A decode program that detects on the device which experts are absent, where experts are streamed to one."""
        if self.experts is None:
            return None
        detector = self.device.miss_detector(self.experts.tier, len(self.experts.slot_of), rows * self.config.top_k)
        if detector is None:
            return None
        graph = self.decode_graph(rows, widths)
        program = Program(
            graph,
            self.device.name,
            fused=self.fused,
            batch_invariant=self.batch_invariant,
            cut=lambda node: node.op in EXPERT_OPS,
        )
        return SegmentedRunner(program, self.device, names, self.experts, detector)

    def _keep(self, key: Any, runner: Runner) -> Runner:
        self._kept[key] = runner
        while len(self._kept) > KEPT:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._decode_arenas.pop(oldest, None)
            if oldest[0] == "logits":
                del self._streams[oldest[1]]
        return runner

    # -- graphs ------------------------------------------------------------------------------------------------------

    def decode_graph(self, rows: int, widths: Mapping[int | None, int]) -> Graph:
        specs = {name: Spec((rows,), "int32") for name in ("tokens", "positions", "lengths", "slots")}
        specs |= {table_name(window): Spec((rows, width), "int32") for window, width in widths.items()}

        def fn(tokens: Any, positions: Any, lengths: Any, slots: Any, **more: Any) -> Any:
            step = self._step(tokens, positions, widths, more)
            step = replace(step, lengths=lengths, slots=slots)
            h = self.family.forward(step, self.weights, self.config, self.cache_values(more))
            return self.family.logits(step, h, self.weights, self.config)

        return trace(fn, specs | self.cache_specs(False))

    def prefill_graph(self, T: int, start: int, widths: Mapping[int | None, int], logits: bool) -> tuple[Graph, bool]:
        """The graph, and whether its nodes depend on `start`."""
        specs = {"tokens": Spec((T,), "int32"), "positions": Spec((), "int32")}
        specs |= {table_name(window): Spec((width,), "int32") for window, width in widths.items()}
        read: list[bool] = []

        def fn(tokens: Any, positions: Any, **more: Any) -> Any:
            step = _Watched(**vars(replace(self._step(tokens, positions, widths, more), start=start)))
            object.__setattr__(step, "_read", read)
            h = self.family.forward(step, self.weights, self.config, self.cache_values(more))
            return self.family.logits(step, h[-1:], self.weights, self.config) if logits else h

        graph = trace(fn, specs | self.cache_specs(True))
        return graph, bool(read)

    def logits_graph(self, T: int) -> Graph:
        def fn(h: Any) -> Any:
            step = Step(h, h, {}, activations=self.activations, dtype=self.caches.dtype)
            return self.family.logits(step, h, self.weights, self.config)

        return trace(fn, {"h": Spec((T, self.config.dim), self.caches.dtype)})

    def _step(self, tokens: Any, positions: Any, widths: Mapping[int | None, int], more: Mapping[str, Any]) -> Step:
        tables = {window: more[table_name(window)] for window in widths}
        return Step(tokens, positions, tables, activations=self.activations, dtype=self.caches.dtype)

    def cache_arrays(self, one: bool) -> dict[str, Any]:
        """Arrays of all caches by input name; `one`: the rows of one sequence instead of all recurrent states."""
        found = {}
        for n, (arrays, rows) in enumerate(zip(self.caches.arrays, self.rows, strict=True)):
            first, second = rows if one and rows is not None else arrays
            found |= {f"cache{n}.0": first, f"cache{n}.1": second}
        return found

    def cache_specs(self, one: bool) -> dict[str, Spec]:
        return {name: spec_of(array) for name, array in self.cache_arrays(one).items()}

    def cache_values(self, values: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        return [(values[f"cache{n}.0"], values[f"cache{n}.1"]) for n in range(len(self.caches.layouts))]


class _Watched(Step):
    """A step that notes whether a family reads where it starts: then a graph is good for that start alone."""

    def __getattribute__(self, name: str) -> Any:
        if name == "start":
            object.__getattribute__(self, "_read").append(True)
        return object.__getattribute__(self, name)
