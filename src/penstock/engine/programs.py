"""What the programs of a model's steps are made of: its weights, its caches, and the graph of a step of some sizes."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np

from penstock import ops
from penstock.engine.buckets import BucketedSteps
from penstock.engine.cache import Caches, Sequence
from penstock.engine.draft_head import HeadDrafter
from penstock.engine.steps import KEPT, MOST_SEQUENCES, ExactSteps, padded, ragged_step, step_shapes, table_names
from penstock.errors import OutOfMemory
from penstock.experts.streamed import Streamed
from penstock.graph import Bound, Graph, Program, Wrap, trace
from penstock.models.family import AnyFamily, ModelConfig, ModelWeights
from penstock.models.split import Mesh
from penstock.models.step import STREAM, Cache, Step
from penstock.ops.array import Spec, spec_of
from penstock.units import amount


class Programs:
    """Traces the steps of one model on one device; `steps` runs them.

    wrap: see `Program.bind`; what is bound already stays as it is until `caches.version` changes.
    """

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
        mesh: Mesh | None = None,
    ) -> None:
        self.mesh = mesh
        self.most_of_ranks = MOST_SEQUENCES  # the least `most_answers` of all ranks
        self.experts = experts  # streamed ones
        self.max_context = max_context
        self.family, self.config, self.weights = family, config, weights
        self.caches, self.device = caches, caches.device
        self.activations = activations
        self.fused, self.batch_invariant = fused, batch_invariant  # see Program
        self.wrap: Wrap | None = None
        self.windows = table_names(caches.pools)
        self._commits: dict[tuple[int, int], tuple[Bound, dict[str, Any]]] = {}
        self.drafter: HeadDrafter | None = None  # by the model's own head
        self.steps: ExactSteps | BucketedSteps = BucketedSteps(self) if self.device.captures else ExactSteps(self)

    def unbind(self) -> None:
        """Let go of the caches' arrays, which others replace: programs are bound again when they are used."""
        self.steps.unbind()
        self._commits = {}
        if self.drafter is not None:
            self.drafter.unbind()

    def commit(self, sequences: Seq[Sequence]) -> None:
        """Move recurrent states on by the tokens that were accepted of kept runs."""
        device, count = self.device, self._committed_at_once(len(sequences))
        bound, inputs = self._bound_commit(count)
        slots = np.array([one.slot for one in sequences], np.int32)
        accepted = np.array([one.accepted for one in sequences], np.int32)
        inputs["slots"][:] = device.to_device(padded(slots, count, -1))
        inputs["accepted"][:] = device.to_device(padded(accepted, count, 0))
        with device.running(self.batch_invariant):
            bound.run()

    def prepare_commit(self, sequences: int) -> None:
        """Have that ready for up to so many sequences."""
        for count in sorted({self._committed_at_once(each) for each in range(1, sequences + 1)}):
            if self.caches.gates:
                self._bound_commit(count)

    def _committed_at_once(self, sequences: int) -> int:
        """A power of two on a device that captures, so that few programs are bound."""
        return 1 << (sequences - 1).bit_length() if self.device.captures else sequences

    def _bound_commit(self, count: int) -> tuple[Bound, dict[str, Any]]:
        key, device = (count, self.caches.version), self.device
        if key not in self._commits:
            program = Program(self.commit_graph(count), device.name, **self.options)
            inputs = {name: device.zeros((count,), "int32") for name in ("slots", "accepted")}
            arena = self.new_arena(program.arena_bytes)
            self._commits[key] = program.bind(inputs | self.cache_arrays(), arena, self.wrap), inputs
        return self._commits[key]

    @property
    def options(self) -> dict[str, Any]:
        """Of each `Program`."""
        return {"fused": self.fused, "batch_invariant": self.batch_invariant}

    @property
    def most_answers(self) -> int:
        """Sequences of a step of answers: on a device those whose experts fit, on every rank of a split model."""
        if self.experts is None:
            return MOST_SEQUENCES
        return min(self.experts.store.most_tokens, self.most_of_ranks)

    def new_arena(self, nbytes: int) -> Any:
        if nbytes > (free := self.device.free_memory()):
            raise OutOfMemory(
                f"step: {amount(nbytes)} of {self.device.memory_name} are needed, {amount(free)} are free; "
                "use fewer sequences at once, or close sessions"
            )
        return self.device.arena(nbytes)

    # -- graphs ------------------------------------------------------------------------------------------------------

    def graph(
        self,
        T: int,
        B: int,
        n: int,
        R: int = 0,
        decode: bool = False,
        padded: bool = False,
        hidden: bool = False,
        keeps: bool = False,
        also_stream: bool = False,
    ) -> Graph:
        """A step of T tokens of B sequences with block tables of n pages: the logits of R rows, or of none of them, and
        then the residual stream.

        decode: one token of each sequence. padded: some rows may be of no sequence. hidden: what the final norm makes
        of the residual stream, in place of it. keeps: some runs are kept, after what was accepted of those before has
        moved the recurrent states on. also_stream: the residual stream beside what it gives otherwise.
        """
        specs = {name: Spec(shape, "int32") for name, shape in step_shapes(T, B, R, n, self.windows.values()).items()}
        if decode:
            specs = {name: spec for name, spec in specs.items() if name not in ("sequence", "starts", "wanted")}
        if not R:
            specs.pop("wanted", None)
        if keeps:
            specs |= dict.fromkeys(KEPT, Spec((B,), "int32"))

        def fn(**given: Any) -> Any:
            active = given["slots" if decode else "sequence"] if padded else None
            options = {"activations": self.activations, "dtype": self.caches.dtype, "active": active, "mesh": self.mesh}
            step = ragged_step(given, self.windows, **options)
            if keeps:
                self._commit(step, given)
            h = self.family.forward(step, self.weights, self.config, self.cache_values(given))
            if hidden:
                return self.final_norm(step, h)
            found = self._logits(step, h, given.get("wanted")) if R else h
            return (found, h) if also_stream else found

        return trace(fn, specs | self.cache_specs())

    def commit_graph(self, B: int) -> Graph:
        """Moves the recurrent states of B sequences on by what was accepted of runs that were kept."""

        def fn(slots: Any, accepted: Any, **given: Any) -> tuple[()]:
            self._commit(Step(slots, slots, slots, slots, {}, accepted=accepted), given)
            return ()

        return trace(fn, dict.fromkeys(("slots", "accepted"), Spec((B,), "int32")) | self.cache_specs())

    def _commit(self, step: Step, given: Mapping[str, Any]) -> None:
        assert self.family.commit is not None
        self.family.commit(step, self.weights, self.config, self.cache_values(given))

    def head_graph(self, T: int, R: int) -> Graph:
        """The logits of R rows of the residual stream of T rows."""

        def fn(h: Any, wanted: Any) -> Any:
            options = {"activations": self.activations, "dtype": self.caches.dtype, "mesh": self.mesh}
            step = Step(wanted, wanted, wanted, wanted, {}, **options)
            return self._logits(step, h, wanted)

        specs = {"h": Spec((T, self.config.dim), STREAM), "wanted": Spec((R,), "int32")}
        return trace(fn, specs)

    def hidden_graph(self, T: int, R: int) -> Graph:
        """What the final norm makes of R rows of the residual stream of T rows, float32."""

        def fn(h: Any, wanted: Any) -> Any:
            return self.final_norm(Step(wanted, wanted, wanted, wanted, {}), ops.embedding(wanted, h))

        specs = {"h": Spec((T, self.config.dim), STREAM), "wanted": Spec((R,), "int32")}
        return trace(fn, specs)

    def final_norm(self, step: Step, rows: Any) -> Any:
        """What the final norm makes of rows of the residual stream, float32."""
        assert self.family.final_norm is not None
        return self.family.final_norm(replace(step, dtype="float32"), rows, self.weights, self.config)

    def rows_of(self, h: Any, wanted: Any) -> Any:
        """The wanted rows of h, in its dtype."""
        return ops.embedding(wanted, h)

    def _logits(self, step: Step, h: Any, wanted: Any) -> Any:
        rows = h if wanted is None else self.rows_of(h, wanted)
        return self.family.logits(step, rows, self.weights, self.config)

    def cache_arrays(self) -> dict[str, Any]:
        """Arrays of all caches by input name."""
        layers = [(*pair, *self._gates(n)) for n, pair in enumerate(self.caches.arrays)]
        return {f"cache{n}.{i}": array for n, arrays in enumerate(layers) for i, array in enumerate(arrays)}

    def _gates(self, layer: int) -> tuple[Any, ...]:
        return (self.caches.gates[layer],) if layer in self.caches.gates else ()

    def cache_specs(self) -> dict[str, Spec]:
        return {name: spec_of(array) for name, array in self.cache_arrays().items()}

    def cache_values(self, values: Mapping[str, Any]) -> list[Cache]:
        """Of the layers of the model, without that of a head."""
        counts = [2 + len(self._gates(n)) for n in range(len(self.family.caches(self.config)))]
        return [tuple(values[f"cache{n}.{i}"] for i in range(count)) for n, count in enumerate(counts)]
