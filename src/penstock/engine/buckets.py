"""Steps in a few fixed sizes, for a device that captures: any mix of tokens runs in the next larger one.

There are three forms. Answers: one token of each of B sequences. Verification: 2, 4 or 8 tokens of each of B sequences,
of which the host says afterwards how many count, or the device itself, which drafts the next ones in the same piece
(`draft_chain.py`). Mixed: T tokens of up to as many sequences as there are. Rows beyond
those of the step are of no sequence: they read nothing and change nothing. Everything that differs from step to step
lies in arrays that all sizes share, so that no size is captured twice; the residual stream is written to one place, and
the head reads the wanted rows of it: logits, and the tokens drawn from them, are programs of their own by the number of
rows. Block tables have their full width.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.engine.cache import Sequence
from penstock.engine.draft_chain import AheadRun, DraftChain, chain_inputs, chain_values
from penstock.engine.runner import Call, Runner, SegmentedRunner, between_replays
from penstock.engine.steps import (
    KEPT,
    MOST_LOGITS,
    Run,
    block_tables,
    kept_arrays,
    padded,
    read_logprobs,
    step_arrays,
    step_shapes,
    wants_hidden,
    wants_logprobs,
)
from penstock.experts.streamed import EXPERT_OPS
from penstock.graph import Graph, Program, SizedProgram, Wrap
from penstock.graph.sizes import Sizes
from penstock.models.step import PAGE, STREAM
from penstock.ops.collective import communicator
from penstock.ops.device import DeviceSampler, PendingDraw, PendingStep, StepInputs
from penstock.ops.sampling import MODES

if TYPE_CHECKING:
    from penstock.engine.programs import Programs

ANSWERS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MIXED = (
    16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048, 2560,
    3200, 4096
)  # fmt: skip
VERIFIED = (2, 4, 8)  # tokens of each sequence
_VERIFYING = (1, 2, 4, 8, 16, 32)  # sequences
PREPARED = (1, 2, 4, 8)  # sequences of steps that the device accepts by itself, prepared ahead of requests
_DRAFTED, _MANY_DRAFTED = (1, 3), (1, 3, 7)  # of a sequence in steps that are prepared, the latter of up to so many
POSITIONS_TO_MEASURE = 128
_SHORT = 4  # pages: a token of Qwen3.6-35B-A3B on an H200 takes 20 µs less than with a table of full width
_FEW = 8  # rows up to which products take norms and sums in: see graph/fuse_cuda.py
_HIDDEN = "hidden"  # in place of a mode: the head is the final norm alone
WHOLE = ("greedy", "plain")  # modes in which answers and their draw are captured in one piece
_DRAWN = ("wanted", "draw_at", "draw_slots")
_PADS: dict[str, int] = dict.fromkeys(("tokens", "positions", "sequence", "slots", *_DRAWN), -1)


UNREAD = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
"""How a row is drawn whose token is not read."""


@dataclass(frozen=True)
class Bucket:
    """A size of step: rows, sequences, and whether each row is of a sequence of its own; short: it is of one sequence
    that has a few pages, so that attention need not share them out among many programs. keeps: runs are verified.
    """

    rows: int
    sequences: int
    answers: bool
    short: bool = False
    keeps: bool = False


class BucketedSteps:
    """The steps of one model on a device that captures. One step runs at a time, in the order of `launch` and `run`."""

    most_tokens = MIXED[-1]

    def __init__(self, programs: Programs) -> None:
        self._programs, self._device = programs, programs.device
        self._version: int | None = None  # of the caches that everything below was bound to
        self._inputs: StepInputs | None = None
        self._sampler: DeviceSampler | None = None
        self._hidden: Any = None
        self._kinds: dict[Any, SizedProgram] = {}
        self._arenas: dict[SizedProgram, Any] = {}
        self._runners: dict[Any, Runner] = {}
        self._wholes: dict[Any, Runner] = {}
        self._heads: dict[Any, tuple[Runner, Any]] = {}
        self._chain: DraftChain | None = None
        self._drafting: dict[Any, Runner] = {}
        self._head_arena: Any = None
        self._seconds: dict[Bucket, float] = {}
        self._draft_seconds: dict[int, dict[int, float]] = {}
        self._prepared: set[tuple[int, int, str]] = set()

    # -- sizes -------------------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> int:
        """The most of a step: as many as there are slots."""
        return max(1, min(ANSWERS[-1], self._programs.caches.slots))

    @property
    def answers(self) -> tuple[int, ...]:
        """Sizes of steps with one token of each sequence."""
        return _answer_sizes(min(self.sequences, self._programs.most_answers))

    @property
    def mixed(self) -> tuple[int, ...]:
        """Sizes of all other steps."""
        return _mixed_sizes(min(MIXED[-1], self.sequences * self._programs.max_context))

    def bucket(self, tokens: int, sequences: int, pages: int = 1 << 30) -> Bucket:
        """The size for so many tokens of so many sequences that have up to so many pages."""
        if tokens == sequences <= self.answers[-1]:
            rows = next_size(self.answers, sequences)
            return Bucket(rows, rows, True, rows == 1 and pages <= _SHORT < self._pages)
        return Bucket(next_size(self.mixed, tokens), self.sequences, False)

    def verifying(self, tokens: int, sequences: int) -> Bucket:
        """The size for the verification of so many tokens of so many sequences."""
        most = self.sequences
        for count in sizes_up_to(_VERIFYING, most):
            for each in VERIFIED:
                if count >= sequences and count * each >= tokens:
                    return Bucket(count * each, count, False, keeps=True)
        return Bucket(next_size(self.mixed, tokens), most, False, keeps=True)

    def draft_seconds(self, sequences: int) -> dict[int, float]:
        """Seconds of steps of so many sequences by the drafts that the device makes for each, where they are known."""
        return self._draft_seconds.get(sequences, {})

    def tokens_within(self, seconds: float) -> int:
        """The most tokens of a step that is known to take no longer, at least those of the smallest size."""
        known = [(b.rows, took) for b, took in self._seconds.items() if not b.answers and not b.keeps]
        return max((rows for rows, took in known if took <= seconds), default=MIXED[0])

    @property
    def measured(self) -> bool:
        """Whether it is known how long steps take."""
        return any(not bucket.answers and not bucket.keeps for bucket in self._seconds)

    def working_bytes(self, sequences: int) -> int:
        """Memory that steps take beside weights and caches, at the most."""
        programs = self._programs
        config, rows = programs.config, self._most_head_rows(sequences)
        mixed = self._kind(Bucket(MIXED[-1], min(sequences, ANSWERS[-1]), False)).arena_bytes
        return 2 * mixed + 3 * 4 * rows * config.vocab_size

    def _most_head_rows(self, sequences: int) -> int:
        """The most rows of logits in prepared steps of up to so many sequences."""
        if self._programs.drafter is None:
            return min(sequences, MOST_LOGITS)
        few = min(sequences, PREPARED[-1])
        return min(max(few * (1 + _MANY_DRAFTED[-1]), sequences * (1 + _DRAFTED[-1])), MOST_LOGITS)

    # -- steps -------------------------------------------------------------------------------------------------------

    def run(self, runs: Seq[Run], bucket: Bucket | None = None) -> np.ndarray | None:
        """Run a step; its logits float32 [R, vocab] after the wanted tokens, in the order of the runs, None if R is 0;
        or hidden states float32 [T, dim].

        bucket: a size, if not the next larger one.
        """
        wanted, _ = self._launch(runs, {}, bucket)
        passes = self._passes(wanted, wants_hidden(runs))
        if wants_logprobs(runs):
            return read_logprobs(self._device, runs[0], passes)
        parts = [self._device.to_host(rows) for rows in passes]
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def follow(self, runs: Seq[Run]) -> None:
        """Start a step of which another rank reads the logits or draws: the same programs up to there."""
        for _ in self._passes(self._launch(runs, {})[0], wants_hidden(runs)):
            pass

    def _passes(self, wanted: np.ndarray, hidden: bool) -> Iterator[Any]:
        """Logits (or hidden states) of the wanted rows of the step that was just launched, some at a time; readable
        until the next.
        """
        mode = _HIDDEN if hidden else None
        if 0 < len(wanted) <= MOST_LOGITS:
            yield self._logits(len(wanted), mode)[: len(wanted)]
            return
        assert self._inputs is not None
        for start in range(0, len(wanted), MOST_LOGITS):
            rows = wanted[start : start + MOST_LOGITS]
            self._inputs.send({"wanted": padded(rows, MOST_LOGITS, -1)})
            self._inputs.unpack()
            yield self._logits(MOST_LOGITS, mode)[: len(rows)]

    def launch(
        self, runs: Seq[Run], rows: Seq[Any], mode: str, masks: Seq[np.ndarray | None] = (), hosted: Seq[int] = ()
    ) -> PendingStep:
        """Start a step and draw tokens after its wanted rows, as `rows` (`Sampler.row`) and a mode of `mode_of` say;
        masks: the words of each row's grammar, None where it has none; hosted: rows whose logits the host gets.
        """
        if not rows:
            self._launch(runs, {})
            return _WithoutTokens(self._device.event())
        self._bind_anew()
        assert self._sampler is not None
        values = self._sampler.values(rows, masks)
        drawn_at, slots = [], []
        for run in runs:
            count, end = 0 if run.wanted == "none" else len(run.tokens) if run.keep else 1, run.sequence.length
            end += len(run.tokens)
            drawn_at += range(end - count + 1, end + 1)
            slots += [-1 if run.keep else run.sequence.slot] * count  # the host says which of the kept ones counts
        values["draw_at"], values["draw_slots"] = np.array(drawn_at, np.int32), np.array(slots, np.int32)
        _, head_rows = self._launch(runs, values, mode=mode)
        drawn, logits = self._sampler.launched(len(rows), mode), None
        if hosted:
            logits = self._device.rows_to_host(self._head(head_rows, mode)[1], hosted)
        return _Drawing(drawn, logits)

    def launch_ahead(self, runs: Seq[AheadRun], drafts: int, rows: Seq[Any], mode: str) -> PendingStep:
        """Start a step that verifies the drafts which the device has for each sequence, and makes so many more, as
        `rows` (`Sampler.row` of each sequence) and a mode of `mode_of` say. Of the 1 + drafts tokens that are reported
        for each, those behind the last one that counts are −1.
        """
        self._bind_anew()
        assert self._inputs is not None and self._sampler is not None
        count, each = len(runs), 1 + drafts
        bucket = self.drafting(count, drafts)
        T, B = bucket.rows, bucket.sequences
        values = chain_values(runs, rows)
        by_row = self._sampler.values([row for row in rows for _ in range(each)])
        by_row |= {"wanted": np.arange(count * each, dtype=np.int32), "draw_slots": np.full(T, -1, np.int32)}
        by_row["sequence"] = np.repeat(np.arange(count, dtype=np.int32), each)
        values |= {name: padded(array, T, _PADS.get(name, 0)) for name, array in by_row.items()}
        values["starts"] = np.minimum(np.arange(B + 1, dtype=np.int32), count) * np.int32(each)
        values["slots"] = padded(np.array([run.sequence.slot for run in runs], np.int32), B, -1)
        values["keep"] = padded(np.full(count, each, np.int32), B, 0)
        values |= block_tables([run.sequence for run in runs], self._programs.windows, lambda pages: pages)
        runner = self._drafting_runner(bucket, mode)
        self._inputs.send(values)
        with self._running(bucket):
            runner.run()
        return _Drawing(self._sampler.launched(count * each, mode), None)

    def drafting(self, sequences: int, drafts: int) -> Bucket:
        """The size for a step with so many drafts of so many sequences."""
        count = next_size(sizes_up_to(_VERIFYING, self.sequences), sequences)
        return Bucket(count * (1 + drafts), count, False, keeps=True)

    def _drafting_runner(self, bucket: Bucket, mode: str) -> Runner:
        key = (bucket, mode)
        if key not in self._drafting:
            assert self._inputs is not None and self._sampler is not None
            if self._chain is None:
                drafter = self._programs.drafter
                assert drafter is not None
                given = self._inputs.on_device
                self._chain = DraftChain(self._programs, drafter.head, given, self._hidden, self._pages)
            B, chain, drawn = bucket.sequences, self._chain, self._sampler.drawn
            drafts = bucket.rows // B - 1
            unpack, *body = self._runner(bucket, prompt=False).calls
            head, logits = self._head(bucket.rows, None)
            calls = [unpack, *chain.before(B, drafts), *body, *head.calls]
            calls += self._sampler.calls(logits, mode, chain.accept(B, drafts, drawn))
            calls += chain.draft(B, drafts, drawn, mode)
            runner = self._drafting[key] = Runner(self._device, [calls])
            with self._running(bucket):
                self._device.compile(runner.calls)
        return self._drafting[key]

    def _launch(
        self, runs: Seq[Run], drawing: dict[str, np.ndarray], bucket: Bucket | None = None, mode: str | None = None
    ) -> tuple[np.ndarray, int]:
        """Start a step up to its residual stream, with a mode up to the tokens drawn; its wanted rows, and the size of
        the head that draws behind them.
        """
        self._bind_anew()
        assert self._inputs is not None
        arrays = step_arrays(runs, self._programs.windows, width=lambda pages: pages)
        if any(run.keep for run in runs):
            bucket = bucket or self.verifying(len(arrays["tokens"]), len(runs))
            arrays |= kept_arrays(runs) if self._programs.caches.gates else {}
        bucket = bucket or self._bucket(arrays)
        sizes = step_shapes(bucket.rows, bucket.sequences, 0, 0, ()) | dict.fromkeys(KEPT, (bucket.sequences,))
        every = (bucket.answers or bucket.keeps) and len(arrays["wanted"]) == len(arrays["tokens"])
        whole = every and mode in WHOLE and self._programs.experts is None
        # a size that verifies may have more rows: those without a token draw nothing, whatever was there before
        room = bucket.rows if whole else self._head_rows(max(1, min(len(arrays["wanted"]), MOST_LOGITS)))
        values = {}
        for name, array in (arrays | drawing).items():
            if array.ndim == 2:
                values[name] = array
            elif name == "starts":
                values[name] = padded(array, bucket.sequences + 1, array[-1])
            elif name in sizes and name != "wanted":
                values[name] = padded(array, sizes[name][0], _PADS.get(name, 0))
            elif len(array) <= room:
                values[name] = padded(array, room, _PADS.get(name, 0))
        if whole and mode is not None:
            runner, mode = self._whole(bucket, mode), None
        else:
            runner = self._runner(bucket, any(run.prompt for run in runs))
        self._inputs.send(values)
        with self._running(bucket):
            runner.run()
        if mode is not None:
            self._logits(len(arrays["wanted"]), mode)
        if self._programs.drafter is not None:
            self._programs.drafter.observe(runs, self._hidden[: len(arrays["tokens"])])
        return arrays["wanted"], room

    def _bucket(self, arrays: dict[str, np.ndarray]) -> Bucket:
        pages = max((arrays[name].shape[1] for name in self._programs.windows.values()), default=0)
        return self.bucket(len(arrays["tokens"]), len(arrays["slots"]), pages)

    def _running(self, bucket: Bucket) -> contextlib.AbstractContextManager[Any]:
        """With `deterministic` a mixed step is one chunk of a prompt, whose cut does not depend on others."""
        return self._device.running(self._programs.batch_invariant and (bucket.answers or bucket.keeps))

    def _logits(self, rows: int, mode: str | None) -> Any:
        """Run the head over the wanted rows, and draw from its logits in this mode; the logits, or hidden states."""
        runner, logits = self._head(self._head_rows(rows), mode)
        runner.run()
        return logits

    def _head_rows(self, rows: int) -> int:
        verified = [size for size in _verified_sizes() if size > self.answers[-1]]
        return next_size([*self.answers, *verified, MOST_LOGITS], rows)

    # -- programs ----------------------------------------------------------------------------------------------------

    def _bind_anew(self) -> None:
        """Let go of everything that is bound to caches which have been replaced."""
        caches = self._programs.caches
        if self._version == caches.version:
            return
        self.unbind()
        programs, device, B = self._programs, self._device, self.sequences
        self._hidden = device.zeros((self.most_tokens, programs.config.dim), STREAM)
        shapes = step_shapes(self.most_tokens, B, max(B, MOST_LOGITS), self._pages, programs.windows.values())
        shapes |= dict.fromkeys(KEPT, (B,))
        wanted: dict[str, Any] = {name: (shape, "int32") for name, shape in shapes.items()}
        if programs.drafter is not None:
            wanted |= chain_inputs(B)
        self._inputs = device.step_inputs(wanted, B)
        self._sampler = device.sampler(self._inputs, programs.config.vocab_size) if device.samples_tokens else None
        self._version = caches.version

    def unbind(self) -> None:
        """Let go of the caches' arrays."""
        self._runners, self._wholes, self._heads, self._arenas, self._seconds = {}, {}, {}, {}, {}
        self._chain, self._drafting, self._draft_seconds, self._prepared = None, {}, {}, set()
        self._hidden = self._head_arena = self._inputs = self._sampler = self._version = None

    def _exchanging(self, wrap: Wrap | None) -> Wrap | None:
        """The same wrap of kernels, which keeps those out of replays that cannot be captured."""
        return wrap if self._programs.mesh is None or communicator().capturable else between_replays(wrap)

    @property
    def _pages(self) -> int:
        """Columns of a block table."""
        return max(1, -(-self._programs.max_context // PAGE))

    def _runner(self, bucket: Bucket, prompt: bool, compiles: bool = True) -> Runner:
        """What runs steps of this size; compiles: its kernels are compiled before they first run."""
        prompt = (prompt or not bucket.answers) and self._programs.experts is not None
        key = (bucket, prompt)
        if key not in self._runners:
            runner = self._runners[key] = self._new_runner(bucket, prompt)
            if compiles and runner.captures:
                with self._running(bucket):
                    self._device.compile(runner.calls)
        return self._runners[key]

    def _whole(self, bucket: Bucket, mode: str) -> Runner:
        """What runs answers of this size and draws after each of them, in one piece."""
        key = (bucket, mode)
        if key not in self._wholes:
            body, (head, _) = self._runner(bucket, prompt=False), self._head(bucket.rows, mode)
            self._wholes[key] = Runner(self._device, [[*body.calls, *head.calls]])
        return self._wholes[key]

    def _new_runner(self, bucket: Bucket, prompt: bool) -> Runner:
        programs, device, experts = self._programs, self._device, self._programs.experts
        assert self._inputs is not None
        kind = self._kind(bucket)
        if kind not in self._arenas:
            self._arenas[kind] = programs.new_arena(kind.arena_bytes)
        given = self._inputs.on_device
        pages = _SHORT if bucket.short else self._pages
        shapes = step_shapes(bucket.rows, bucket.sequences, 0, pages, programs.windows.values())
        shapes |= dict.fromkeys(KEPT, (bucket.sequences,))
        wanted = {name: shape for name, shape in shapes.items() if name in kind.graph.inputs}
        inputs = {name: given[name][tuple(map(slice, shape))] for name, shape in wanted.items()}
        detector, wrap = None, programs.wrap
        if experts is not None:
            width = bucket.rows * programs.config.top_k
            if not prompt:
                sums = None if programs.mesh is None else experts.sums(kind.graph)[0].outs[0]
                dtype = None if sums is None else sums.dtype
                detector = device.miss_detector(experts.tier, len(experts.slot_of), width, dtype)
            if detector is None:
                wrap = experts.wrap(kind.graph, prompt, wrap)
            else:
                wrap = experts.detecting(kind.graph, detector, inputs, wrap)
        sizes = {"B": bucket.sequences} if bucket.answers else {"T": bucket.rows}
        outputs = [self._hidden[: bucket.rows]]
        arrays = inputs | programs.cache_arrays()
        bound = kind.bind(sizes, arrays, self._arenas[kind], self._exchanging(wrap), outputs)
        segments: list[list[Call]] = [list(segment) for segment in bound.segments]
        segments[0].insert(0, self._inputs.unpack)
        if experts is None:
            return Runner(device, segments)
        if detector is None:
            return Runner(device, segments, captures=device.host_memory)
        layers = experts.layers(kind.graph)
        return SegmentedRunner(device, segments, experts, detector, layers, self._inputs.unpack)

    def _kind(self, bucket: Bucket) -> SizedProgram:
        """Sizes with the same nodes: one row, those up to which products take norms in, and where they are joined."""
        programs, rows = self._programs, bucket.rows
        joined = self._device.joins
        if bucket.keeps:
            least, most = next(span for span in _spans((_FEW, joined, MIXED[-1])) if span[1] >= rows)
            least = max(2, least)
        elif bucket.answers:
            spans = _spans((1, _FEW, joined, self.answers[-1]))
            least, most = next(span for span in spans if span[1] >= rows)
            most = min(most, self.answers[-1])
        else:
            least, most = (MIXED[0], joined) if rows <= joined else (joined + 1, MIXED[-1])
        key = (most, bucket.short) if bucket.answers else (most, bucket.sequences, bucket.keeps)
        if key not in self._kinds:
            B, n, answers = bucket.sequences, _SHORT if bucket.short else self._pages, bucket.answers
            keeps = bucket.keeps and bool(programs.caches.gates)

            def graph(sizes: Sizes) -> Graph:
                if answers:
                    return programs.graph(sizes["B"], sizes["B"], n, decode=True, padded=True)
                return programs.graph(sizes["T"], B, n, padded=True, keeps=keeps)

            name = "B" if answers else "T"
            detecting = programs.experts is not None and answers
            cut = (lambda node: node.op in EXPERT_OPS) if detecting else None
            sizes = {name: least}, {name: most}
            self._kinds[key] = SizedProgram(graph, self._device.name, *sizes, cut=cut, **programs.options)
        return self._kinds[key]

    def _head(self, rows: int, mode: str | None, compiles: bool = True) -> tuple[Runner, Any]:
        """What makes logits of the wanted rows, and draws from them in this mode; where the logits are.

        With the mode _HIDDEN hidden states in place of logits.
        """
        key = (rows, mode)
        if key not in self._heads:
            programs, device = self._programs, self._device
            assert self._inputs is not None
            graph = programs.hidden_graph if mode == _HIDDEN else programs.head_graph
            program = Program(graph(self.most_tokens, rows), device.name, **programs.options)
            if self._head_arena is None or len(self._head_arena) < program.arena_bytes:
                most = self._head_rows(self._most_head_rows(self.sequences))
                largest = programs.head_graph(self.most_tokens, most)
                need = max(program.arena_bytes, Program(largest, device.name, **programs.options).arena_bytes)
                self._heads, self._wholes, self._head_arena = {}, {}, None
                self._head_arena = programs.new_arena(need)
            inputs = {"h": self._hidden, "wanted": self._inputs.on_device["wanted"][:rows]}
            bound = program.bind(inputs, self._head_arena, self._exchanging(programs.wrap))
            (logits,) = bound.outputs
            calls: list[Call] = list(bound.calls)
            if mode not in (None, _HIDDEN):
                assert self._sampler is not None
                calls += self._sampler.calls(logits, mode)
            runner = Runner(device, [calls])
            if compiles:
                device.compile(runner.calls)
            self._heads[key] = runner, logits
        return self._heads[key]

    # -- ahead of requests -------------------------------------------------------------------------------------------

    def prepare(self, seconds: Callable[[Bucket], float]) -> None:
        """Have all sizes and all ways to draw compiled and captured, and know how long the sizes take.

        seconds: runs steps of a size and gives the `time` of one. Ranks of one model run the same programs as often as
        each other, in the same order, whatever they have captured before and however long it takes.
        """
        self._bind_anew()
        buckets = [Bucket(rows, rows, True) for rows in self.answers]
        buckets += [self.bucket(1, 1, 1)] if self._pages > _SHORT else []
        buckets += [Bucket(rows, self.sequences, False) for rows in self.mixed]
        self._head(self.answers[-1], None, compiles=False)  # the largest first: it has the memory of all
        modes = _modes() if self._programs.mesh is None else [*_modes(), None]  # ranks that follow draw nothing
        heads = [(rows, mode) for rows in self.answers for mode in modes] if self._sampler is not None else []
        drawing = [call for key in heads for call in self._head(*key, compiles=False)[0].calls]
        for answers in (True, False):
            own = [bucket for bucket in buckets if bucket.answers == answers]
            runners = [self._runner(bucket, not answers, compiles=False) for bucket in own]
            calls = [call for runner in runners if runner.captures for call in runner.calls]
            with self._running(own[0]):
                self._device.compile(calls + drawing if answers else calls)
        for bucket in buckets:
            self._seconds[bucket] = seconds(bucket)
        for rows, mode in heads:
            self._draw_nothing(self._head(rows, mode)[0], rows, mode)
        if heads and self._programs.experts is None:
            for bucket in buckets:
                for mode in WHOLE if bucket.answers else ():
                    self._draw_nothing(self._whole(bucket, mode), bucket.rows, mode)

    def drafting_prepared(self, sequences: int, drafts: Seq[int], mode: str) -> bool:
        """Whether `prepare_drafting` was called for all of these since the caches were allocated."""
        prepared = self._prepared if self._version == self._programs.caches.version else ()
        return all((sequences, each, mode) in prepared for each in drafts)

    def prepare_drafting(self, sequences: int, drafts: Seq[int], modes: Seq[str]) -> None:
        """Have steps of so many sequences captured, with and without drafts that the device accepts by itself, by the
        drafts of each and the way to draw. No row is active: nothing is read or written of a sequence.
        """
        self._bind_anew()
        fewer = range(sequences // 2 + 1, sequences + 1)  # which have steps with drafts of the same size
        plain = {self.bucket(each, each, pages) for each in fewer for pages in (1, 1 << 30)}
        for mode in modes:
            for bucket in plain:
                with self._running(bucket):
                    if mode in WHOLE:
                        self._draw_nothing(self._whole(bucket, mode), bucket.rows, mode)
                    else:
                        self._draw_nothing(self._runner(bucket, prompt=False), bucket.rows, None)
                        self._draw_nothing(self._head(bucket.rows, mode)[0], bucket.rows, mode)
            for each in drafts:
                bucket = self.drafting(sequences, each)
                runner = self._drafting_runner(bucket, mode)
                with self._running(bucket):
                    self._draw_nothing(runner, bucket.rows, mode, bucket.sequences)
                self._prepared.add((sequences, each, mode))

    def measure_drafting(self, sequences: Seq[Sequence], drafts: Seq[int], mode: str) -> None:
        """Know how long prepared steps of so many sequences take by the drafts of each; the sequences: empty ones, with
        pages for `POSITIONS_TO_MEASURE` positions.
        """
        count, known = len(sequences), {}
        tokens = [np.full(1, n % self._programs.config.vocab_size, np.int32) for n in range(count)]
        rows = [UNREAD] * count
        self.launch([Run(sequence, token) for sequence, token in zip(sequences, tokens, strict=True)], rows, mode)
        pages = max((len(table.ids) for one in sequences for table in one.tables.values()), default=0)
        bucket = self.bucket(count, count, pages)
        whole = [self._whole(bucket, mode)] if mode in WHOLE else []
        known[0] = self._replayed(
            whole or [self._runner(bucket, prompt=False), self._head(bucket.rows, mode)[0]], count
        )
        for each in drafts:
            for sequence in sequences:
                sequence.drafted = None
            for _ in range(2):  # the first has no drafts
                ahead = [AheadRun(one, token.tolist(), 0) for one, token in zip(sequences, tokens, strict=True)]
                self.launch_ahead(ahead, each, rows, mode).tokens()
                for sequence in sequences:
                    sequence.drafted = each
            runner = self._drafting_runner(self.drafting(count, each), mode)
            known[each] = self._replayed([runner], count * (1 + each))
        self._draft_seconds[count] = self._draft_seconds.get(count, {}) | known

    def _replayed(self, runners: Seq[Runner], rows: int) -> float:
        """Seconds of replays, one behind the other, of what was sent last; rows: that draw."""
        assert self._sampler is not None
        count = 3
        self._device.wait()
        begin = time.perf_counter()
        for _ in range(count):
            for runner in runners:
                runner.run()
            self._sampler.launched(rows, WHOLE[0])
        self._device.wait()
        return (time.perf_counter() - begin) / count

    def _draw_nothing(self, runner: Runner, rows: int, mode: str | None, drafting: int = 0) -> None:
        """Capture what ends with a draw; no row is active. drafting: sequences of a step that the device accepts."""
        assert self._inputs is not None and self._sampler is not None
        names = ("tokens", "positions", "slots", *_DRAWN)
        none: dict[str, np.ndarray] = dict.fromkeys(names, np.full(rows, -1, np.int32))
        none["lengths"] = np.zeros(rows, np.int32)
        if drafting:
            none |= {"sequence": none["wanted"], "slots": none["slots"][:drafting]}
            none |= {name: np.zeros(drafting, np.int32) for name in ("lengths", "keep")}
            none |= chain_values([], [UNREAD] * drafting) | {"starts": np.zeros(drafting + 1, np.int32)}
        self._inputs.send(self._sampler.values([UNREAD] * rows) | none)
        self._inputs.unpack()
        for _ in self._until_captured(runner):
            runner.run()
            if mode is not None:
                self._sampler.launched(rows, mode).tokens()

    def _until_captured(self, runner: Runner) -> Iterator[None]:
        """Runs of it until it is a replay: a list of calls, then a capture. As many on each of several ranks."""
        ranks = self._programs.mesh is not None
        for _ in range(2):
            if ranks or not runner.captured:
                yield

    def time(self, bucket: Bucket, step: Callable[[], object]) -> float:
        """Seconds of a step of this size, once it is a replay."""
        runner = self._runner(bucket, prompt=not bucket.answers)
        for _ in self._until_captured(runner):
            step()
        self._device.wait()
        begin = time.perf_counter()
        step()
        self._device.wait()
        return time.perf_counter() - begin


@dataclass(frozen=True)
class _WithoutTokens:
    """A pending step that draws none."""

    wait: Callable[[], object]

    def tokens(self) -> list[int]:
        self.wait()
        return []

    def logprobs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        raise NotImplementedError

    def logits(self) -> np.ndarray:
        raise NotImplementedError


@dataclass(frozen=True)
class _Drawing:
    """A pending step that draws tokens; hosted: waits for the logits of rows that the host gets."""

    drawn: PendingDraw
    hosted: Callable[[], np.ndarray] | None

    def tokens(self) -> list[int]:
        return self.drawn.tokens()

    def logprobs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.drawn.logprobs()

    def logits(self) -> np.ndarray:
        assert self.hosted is not None
        return self.hosted()


def drafts_to_prepare(sequences: int, most: int) -> tuple[int, ...]:
    """Numbers of drafts for which steps of so many sequences are prepared, each of which may have so many."""
    sizes = _MANY_DRAFTED if sequences <= PREPARED[-1] else _DRAFTED
    return tuple(sorted({min(size, most) for size in sizes}))


def _modes() -> Iterable[str]:
    """All ways to draw: see `ops.sampling.split_mode`."""
    return [mode + edits + logprobs for mode in MODES for edits in ("", "+edits") for logprobs in ("", "+logprobs")]


@functools.cache
def _answer_sizes(most: int) -> tuple[int, ...]:
    return sizes_up_to(ANSWERS, most)


@functools.cache
def _mixed_sizes(tokens: int) -> tuple[int, ...]:
    """Up to the first that has room for so many tokens."""
    return MIXED[: MIXED.index(next_size(MIXED, tokens)) + 1]


@functools.cache
def _verified_sizes() -> list[int]:
    """Rows of steps that verify."""
    found = {count * each for count in _VERIFYING for each in VERIFIED}
    return sorted(size for size in found if size < MOST_LOGITS)


def _spans(ends: Seq[int]) -> list[tuple[int, int]]:
    """From each end to the next: (1, 8), (9, 64), …"""
    found, start = [], 1
    for end in ends:
        if end >= start:
            found.append((start, end))
            start = end + 1
    return found


def next_size(sizes: Seq[int], size: int) -> int:
    """The first of sizes in their order that has room for this one."""
    return next(one for one in sizes if one >= size)


def sizes_up_to(sizes: Seq[int], most: int) -> tuple[int, ...]:
    """Those below the largest that there can be, and that one."""
    return *(size for size in sizes if size < most), most
