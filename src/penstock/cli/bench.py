"""penstock bench: how fast a model reads prompts and writes tokens here, in the form of llama-bench."""

import csv
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from rich.console import Console

from penstock import compile_progress
from penstock.cli._foreign import LOADING, refused, taken
from penstock.cli._model import DRAFTS, NamedModel, UsageError, complete_config, note, resolved, verb
from penstock.cli._output import print_json
from penstock.errors import InvalidArgument, OutOfMemory
from penstock.units import amount

if TYPE_CHECKING:
    from penstock.api import LLM
    from penstock.engine.cache import Caches, Sequence, Snapshot
    from penstock.engine.engine import Engine
    from penstock.engine.request import Request
    from penstock.engine.response import ResponseHandle
    from penstock.engine.scheduler import Continued, Scheduler
    from penstock.ops.device import Device

PREPARING = 3  # runs before the first that counts, where programs are captured, at the least
_MOST_RUNS = 8  # until nothing is captured any more
AHEAD = 4  # tokens that an answer may have while the prompts of others are read
_SLACK = AHEAD + 2  # with those of steps under way

_FOREIGN = (
    *LOADING,
    refused("--no-kv-offload -nkvo", "caches are where the model is; --device cpu has both in host memory", silent="0"),
    refused("--embeddings -embd", "reading (pp) and writing (tg) are measured", silent="0"),
    taken("--delay", "one measurement follows the other", silent="0"),
    refused("--max-kv-size", "a measurement takes the context that it needs"),
)


@dataclass(frozen=True)
class BenchModel(NamedModel):
    """The same with a number of drafts."""

    speculate: Annotated[  # type: ignore[assignment]
        str,
        typer.Option(
            "--speculate",
            metavar="N|KIND",
            rich_help_panel=DRAFTS,
            help="N drafts in every step, or off, auto, mtp, ngram, draft: as many as the gate takes.",
        ),
    ] = "off"


@verb(_FOREIGN)
def bench(
    model: BenchModel,
    random: Annotated[
        str | None,
        typer.Option(
            "--random",
            metavar="CONFIG",
            help="A config.json, a hub id or the name of a shipped config; random weights.",
            autocompletion=complete_config,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            metavar="N",
            help="With --random: the first N layers, or all; by default all on a GPU with room, else as the file says.",
        ),
    ] = None,
    prompts: Annotated[
        str, typer.Option("-p", "--n-prompt", "--prompt-tokens", metavar="N", help="Prompt sizes; 0 for none.")
    ] = "512",
    generations: Annotated[
        str,
        typer.Option("-n", "--n-gen", "-g", "--generation-tokens", metavar="N", help="Tokens to write; 0 for none."),
    ] = "128",
    pairs: Annotated[
        list[str] | None, typer.Option("-pg", metavar="P,N", help="A prompt and its answer; may be repeated.")
    ] = None,
    depths: Annotated[
        str, typer.Option("-d", "--n-depth", metavar="N", help="Tokens that are in the context before.")
    ] = "0",
    batches: Annotated[
        str, typer.Option("-b", "--batch-size", metavar="N", help="Sequences that write together.")
    ] = "1",
    threads: Annotated[
        str | None, typer.Option("-t", "--threads", metavar="N", help="Threads; by default all physical cores.")
    ] = None,
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", "--num-trials", metavar="N", min=1, help="Of every measurement.")
    ] = 5,
    acceptance: Annotated[
        str | None,
        typer.Option(
            "--acceptance",
            metavar="P,P",
            rich_help_panel=DRAFTS,
            help="With --speculate: draft i counts with this probability if those before it do, whatever it is.",
        ),
    ] = None,
    output: Annotated[
        Literal["md", "json", "jsonl", "csv"], typer.Option("-o", "--output", help="Form of the output.")
    ] = "md",
) -> None:
    """Measure tokens per second: pp512 reads a prompt, tg128 writes tokens, @ d4096 with that many before.

    -p -n -d -b -t take lists and ranges: 128,512 or 0-4096+1024 or 1-8*2. A prompt is timed from its submission to its
    first token, answers from the moment when each has its first token to the end of all. GB/s are the weights that a
    token needs, "of read" (on a GPU "of copy") is their share of what this machine's memory gave to a plain read (a
    copy) in the same minute. "first ms" is the time from a prompt to its first token; "host us" what a step on a GPU
    costs the host; "drafts" how many a step had of an answer, and "accepted" their share that counted. Programs are
    compiled and captured before, and the time for it is printed at the end.

    \b
    Examples:
      penstock bench
      penstock bench --random qwen3.6-35b-a3b --layers 8 -p 512 -n 128 -d 0,4096
      penstock bench --random gemma4-26b-a4b --device cuda -n 128 -b 1,32
      penstock bench -m ./my-model -p 0 -n 64 -b 1-8*2 -o json
      penstock bench --random qwen3.6-35b-a3b -p 0 --speculate 2 --acceptance .8
    """
    drafting = Drafting.of(model.speculate, acceptance)
    if drafting.count is not None and model.num_draft_tokens is not None:
        raise UsageError(f"--num-draft-tokens: expected without --speculate {model.speculate}, which says how many")
    if random is not None and (model.draft_model is not None or drafting.kind == "draft"):
        raise UsageError("--draft-model: expected with a stored model; random weights have their own head alone")
    model = replace(model, speculate=drafting.kind)
    if random is None:
        model.follow()
    if model.model is not None and random is not None:
        raise UsageError("--random: made-up weights need no --model, expected one of the two")
    if random is not None and (model.moe_cache or model.expert_cache) != "auto":
        raise UsageError("--expert-cache: expected with a stored model; random weights have no files to be read from")
    if layers is not None and random is None:
        raise UsageError("--layers: expected together with --random; a stored model runs whole")
    tests = planned(
        numbers("-p", prompts),
        numbers("-n", generations),
        pairs or [],
        numbers("-d", depths),
        numbers("-b", batches, 1),
    )
    tests = [drafting.with_spare(test) for test in tests]
    counts: list[int | None] = [*numbers("-t", threads, 1)] if threads is not None else [None]
    need = max(test.positions for test in tests)
    if random is None:
        name, llm = model.name, model.load_with(need, counts[0], note)
        check_room(name, llm.engine.device, llm.engine.caches, [(test.batch, test.positions) for test in tests])
    else:
        name, llm = _made_up(model, random, layers, tests, counts[0])
    drafting.check(llm.engine)
    llm.engine.allocate_for([(test.batch, test.positions) for test in tests])
    more = ["batch"] if any(test.batch > 1 for test in tests) else []
    more += ["drafts", "accepted"] if drafting.kind != "off" else []
    printer = _PRINTERS[output](name, llm.engine.device.name, more)
    for count in counts:
        with _threads(llm.engine.device, count) as used:
            for row in measured(llm, name, tests, repetitions, used, drafting):
                printer.row(row)
    printer.end()


# --------------------------------------------------------------------------------------------------------------------
# What to measure


@dataclass(frozen=True)
class Test:
    """One line of the table."""

    prompt: int
    generation: int
    depth: int
    batch: int = 1
    spare: int = 0  # tokens that an answer may be ahead of those whose drafts are accepted less often

    @property
    def name(self) -> str:
        parts = [f"pp{self.prompt}"] if self.prompt else []
        parts += [f"tg{self.generation}"] if self.generation else []
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def writes(self) -> bool:
        """Whether answers alone are measured."""
        return not self.prompt

    @property
    def tokens(self) -> int:
        return self.prompt + self.generation * self.batch

    @property
    def positions(self) -> int:
        """Of each of its sequences: with the first token of an answer, which is not measured, and those ahead."""
        before = self.depth + self.prompt or 1
        return before + (self.generation and self.generation + 1 + (_SLACK + self.spare if self.batch > 1 else 0))


@dataclass(frozen=True)
class Drafting:
    """What the requests of a measurement draft with. count: of every step; None: as many as the gate takes."""

    kind: str = "off"
    count: int | None = None
    acceptance: tuple[float, ...] | None = None

    @classmethod
    def of(cls, speculate: str, acceptance: str | None) -> "Drafting":
        """By the options. Raises UsageError."""
        from penstock.engine.speculate import MOST_DRAFTS, SPECULATE

        number = speculate.isascii() and speculate.isdigit()
        if speculate not in SPECULATE and not (number and 1 <= int(speculate[:3]) <= MOST_DRAFTS):
            raise UsageError(f"--speculate: is {speculate!r}, expected 1 to {MOST_DRAFTS} or {', '.join(SPECULATE)}")
        if acceptance is None:
            return cls("mtp", int(speculate)) if number else cls(speculate)
        if speculate == "off":
            raise UsageError("--acceptance: expected together with --speculate N, auto, mtp, ngram or draft")
        try:
            chances = tuple(float(part) for part in acceptance.split(","))
        except ValueError:
            chances = (-1.0,)
        if not all(0 <= chance <= 1 for chance in chances):
            raise UsageError(f"--acceptance: is {acceptance!r}, expected numbers from 0 to 1 such as 0.85,0.75,0.65")
        return cls("mtp" if number else speculate, int(speculate) if number else None, chances)

    def with_spare(self, test: Test) -> Test:
        """The test with room for answers that run ahead of others, so that none ends before all are measured."""
        return test if self.kind == "off" else replace(test, spare=test.generation // 2)

    def of_request(self) -> dict[str, Any]:
        """Fields of a request."""
        fixed = {"num_draft_tokens": self.count, "fixed_drafts": self.count is not None}
        return {"speculate": self.kind, "acceptance": self.acceptance, **fixed}

    def prepare(self, engine: "Engine", answers: int) -> None:
        """Have the steps of so many answers ready from which the gate chooses, while no request runs: they are measured
        then.
        """
        from penstock.engine.buckets import WHOLE, drafts_to_prepare
        from penstock.engine.draft_gate import MOST_ANSWERS

        kind, most = engine.speculating(self.kind)
        if kind == "mtp" and self.count is None and engine.drafts_ahead and answers <= MOST_ANSWERS:
            engine.prepare_drafting(answers, drafts_to_prepare(answers, most), WHOLE[-1:])

    def check(self, engine: "Engine") -> None:
        """Raise InvalidArgument where drafts are wanted and nothing drafts."""
        wanted = self.count is not None or self.acceptance is not None
        if wanted and engine.speculating(self.kind)[0] == "off":
            raise InvalidArgument("--speculate: the model has no head that drafts, expected ngram or off")


def planned(
    prompts: list[int], generations: list[int], pairs: list[str], depths: list[int], batches: list[int]
) -> list[Test]:
    """The lines of the table in their order. Raises UsageError if there are none."""
    both = []
    for pair in pairs:
        found = numbers("-pg", pair, 1)
        if len(found) != 2:
            raise UsageError(f"-pg: is {pair!r}, expected two numbers such as 512,128")
        both.append(found)
    tests = []
    for depth in depths:
        tests += [Test(prompt, 0, depth) for prompt in prompts if prompt]
        tests += [Test(0, count, depth, batch) for batch in batches for count in generations if count]
        tests += [Test(prompt, count, depth) for prompt, count in both]
    if not tests:
        raise UsageError("-p and -n: are both 0, expected something to measure")
    return tests


def numbers(option: str, text: str, least: int = 0) -> list[int]:
    """A list such as 128,512, with ranges first-last, first-last+step and first-last*factor. Raises UsageError."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?\s*", part, re.ASCII)
        if match is None:
            raise UsageError(f"{option}: is {text!r}, expected numbers such as 128,512 or 0-4096+1024 or 1-8*2")
        first, last, how, step = match.groups()
        value, end, by = int(first), int(last or first), int(step or 1)
        if end < value or (last and by < (2 if how == "*" else 1)) or (how == "*" and value == 0):
            raise UsageError(f"{option}: {part.strip()!r} is no rising range")
        while value <= end and len(found) <= 1000:
            found.append(value)
            value = value * by if how == "*" else value + by
    if len(found) > 1000 or min(found) < least:
        raise UsageError(f"{option}: is {text!r}, expected up to 1000 numbers of at least {least}")
    return found


# --------------------------------------------------------------------------------------------------------------------
# Measuring


@dataclass(frozen=True)
class Row:
    """A measurement, with llama-bench's names, and mlx-lm's for the speeds (tokens per second) and memory (GB)."""

    model: str
    model_type: str
    model_size: int  # bytes
    model_n_params: int
    backend: str
    n_threads: int
    test: str
    n_prompt: int
    n_gen: int
    n_depth: int
    batch_size: int
    avg_ns: float
    stddev_ns: float
    avg_ts: float
    stddev_ts: float
    samples_ns: list[int]
    samples_ts: list[float]
    prompt_tps: float | None
    generation_tps: float | None
    peak_memory: float
    active_bytes: int  # weights that a step of `batch_size` tokens reads
    gb_per_s: float | None
    read_gb_per_s: float | None
    share_of_read: float | None
    ttft_ms: float | None  # of a prompt: until its first token is there
    host_us: float | None  # a decode step's work on the host while a GPU is at it; the launch is part of it
    prepare_s: float  # compiling and capturing before
    compile_seconds: float  # of that, and on the CPU: for kernels that this machine had not compiled before
    speculate: str  # what drafts came from
    acceptance: list[float] | None  # made up
    draft_n: int  # drafts that were verified, of all repetitions
    draft_n_accepted: int
    drafts_per_step: float | None  # of an answer, as many as the gate took


def measured(
    llm: "LLM", name: str, tests: list[Test], repetitions: int, threads: int, drafting: "Drafting | None" = None
) -> Iterator[Row]:
    """Run the tests one after the other, all as requests of one scheduler. Raises InvalidArgument for large batches."""
    from penstock.analysis.bandwidth import bandwidth_meter
    from penstock.engine.scheduler import Scheduler

    engine, rng, most = llm.engine, np.random.default_rng(0), max(test.batch for test in tests)
    check_batch(engine, most)
    with ExitStack() as stack:
        begin, loaded = time.perf_counter(), llm.stats().compile_seconds
        made = Scheduler(llm, max_sequences=most, queue=0, prefix_cache=False, buffer=AHEAD, read_timeout=math.inf)
        scheduler, opening = stack.enter_context(made), time.perf_counter() - begin
        bandwidth = None
        for number, test in enumerate(tests):
            if test.writes and bandwidth is None:
                bandwidth = stack.enter_context(bandwidth_meter(engine.device, threads))
            if drafting is not None and test.writes:
                begin = time.perf_counter()
                drafting.prepare(engine, test.batch)
                opening += time.perf_counter() - begin
            own = Requests(engine, scheduler, test, rng, drafting)
            with _shown(f"{number + 1}: {test.name}") as progress, own as requests:
                times = _timed(requests, repetitions, bandwidth if test.writes else None, progress)
            times.compiled, loaded = times.compiled + loaded, 0.0
            if engine.device.samples_tokens:
                times.prepare, opening = times.prepare + opening, 0.0
            yield _row(llm, name, test, threads, times, drafting or Drafting())


@dataclass
class Times:
    """Seconds of every repetition, and what was measured beside them."""

    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # from a prompt to its first token
    written: list[float] = field(default_factory=list)  # seconds of the answers alone, behind their first tokens
    host: list[float] = field(default_factory=list)  # of a step, mean of a repetition, where the device draws
    drafts: list[int] = field(default_factory=list)  # that were verified
    accepted: list[int] = field(default_factory=list)  # of them
    turns: list[int] = field(default_factory=list)  # answers of all steps
    rates: list[float] = field(default_factory=list)  # bandwidths before and after, GB/s
    prepare: float = 0.0
    compiled: float = 0.0

    def add(self, run: "Times") -> None:
        """Another repetition."""
        for name in ("seconds", "first", "written", "host", "drafts", "accepted", "turns"):
            getattr(self, name).extend(getattr(run, name))


def _timed(
    requests: "Requests",
    repetitions: int,
    bandwidth: Callable[[], float | None] | None,
    progress: Callable[[str], None],
) -> Times:
    test, captures = requests.test, requests.engine.device.samples_tokens
    times, before, compiled = Times(), Times(), compile_progress.seconds()
    progress("compiling and capturing")
    if captures:  # the first run is a list of calls (and caches may grow), the second a capture
        for number in range(_MOST_RUNS):
            if _ran_ready(requests, before) and number + 1 >= PREPARING:
                break
    else:  # compiles, and touches every page once
        requests.run(min(test.generation, 8), before)
    rates = [bandwidth() if bandwidth else None]
    for repetition in range(repetitions):
        progress(f"repetition {repetition + 1} of {repetitions}")
        found = Times()
        for _ in range(_MOST_RUNS):
            found = Times()
            if _ran_ready(requests, found):
                break
        times.add(found)
    rates.append(bandwidth() if bandwidth else None)
    times.rates = [rate for rate in rates if rate]
    times.compiled = compile_progress.seconds() - compiled
    if captures:
        times.prepare = times.compiled + max(0.0, sum(before.seconds) - len(before.seconds) * min(times.seconds))
    return times


def _ran_ready(requests: "Requests", times: Times) -> bool:
    """Run the test once; whether nothing was captured meanwhile."""
    from penstock.engine.runner import unready_runs

    before = unready_runs()
    requests.run(requests.test.generation, times)
    return unready_runs() == before


class Requests:
    """The requests of one test; this thread runs the steps of their scheduler.

    A prompt is a request for one token, timed from its submission to the token. Answers begin behind prompts
    of `depth` tokens, one at least, and their time begins when each has its first token: until then none gets more than
    a few ahead, since their tokens are not read. They are drawn at temperature 1: sequences of made-up weights that
    choose the likeliest token soon repeat themselves, and read few experts. A prompt at a depth continues a sequence
    that has read the tokens before, as a session does.
    """

    def __init__(
        self,
        engine: "Engine",
        scheduler: "Scheduler",
        test: Test,
        rng: np.random.Generator,
        drafting: Drafting | None = None,
    ) -> None:
        self.engine, self.test, self._drafting = engine, test, drafting or Drafting()
        self._scheduler, self._rng = scheduler, rng
        self._before: tuple[Sequence, Snapshot] | None = None  # a prompt at a depth

    def __enter__(self) -> "Requests":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            sequence, snapshot = self._before
            self.engine.drop(snapshot)
            self.engine.close(sequence)

    def run(self, generation: int, times: Times) -> None:
        """Run the test once, with answers of `generation` tokens behind their first, and add to `times`."""
        test = self.test
        continued = self._rewound() if test.prompt and test.depth else None
        most = generation + 1 + (_SLACK + test.spare if test.batch > 1 else 0)
        requests = [self._request(test.prompt or max(1, test.depth), most) for _ in range(test.batch)]
        begin = compile_progress.clock()
        handles = [self._scheduler.submit(request, continued=continued) for request in requests]
        try:
            self._read_prompts(handles)
            first, before = compile_progress.clock(), self._scheduler.metrics()
            accepted = sum(handle.timings.draft_n_accepted for handle in handles)
            if test.prompt:
                times.first.append(first - begin)
            else:
                begin = compile_progress.clock()
            if not generation:
                times.seconds.append(first - begin)
                return
            tokens = _written(handles, generation)
            end = compile_progress.clock()
            share = test.batch * generation / tokens  # a step under way at the beginning gives some a token more
            times.seconds.append((end - begin) * share)
            times.written.append((end - first) * share)
            after = self._scheduler.metrics()
            times.drafts.append(after.draft_tokens - before.draft_tokens)
            times.accepted.append(sum(handle.timings.draft_n_accepted for handle in handles) - accepted)
            times.turns.append(after.decode_rows - before.decode_rows)
            if self.engine.device.samples_tokens:
                times.host.append((after.host_seconds - before.host_seconds) / (after.steps - before.steps))
        finally:
            for handle in handles:
                handle.cancel()

    def _request(self, prompt: int, most: int) -> "Request":
        """Random tokens, and any token may follow; the answer ends at its length alone."""
        from penstock.engine.request import Request
        from penstock.engine.sampling import SamplingParams

        ids = self._rng.integers(0, self.engine.model.config.vocab_size, prompt).tolist()
        params = SamplingParams(temperature=0.0 if most == 1 else 1.0, seed=int(self._rng.integers(1 << 32)))
        return Request(ids, params, most, eos=frozenset(), **self._drafting.of_request())

    def _read_prompts(self, handles: "list[ResponseHandle]") -> None:
        """Run steps until each has its first token, and take it. Raises OutOfMemory if they cannot run together."""
        while waiting := [handle for handle in handles if not handle.ready]:
            waiting[0].poll()
            for handle in handles:
                if handle.ready and handle.state in ("waiting", "done") and len(handles) > 1:
                    handle.take()  # raises what it failed with
                    raise OutOfMemory(
                        f"-b: {len(handles)} sequences of {self.test.positions} positions do not fit together in "
                        f"{amount(self._scheduler.memory)}; take fewer sequences or positions"
                    )
        for handle in handles:
            handle.take()

    def _rewound(self) -> "Continued":
        """A sequence that has read `depth` tokens, as it was before the last run."""
        from penstock.engine.scheduler import Continued

        if self._before is None:
            sequence = self.engine.open()
            try:
                handle = self._scheduler.submit(
                    self._request(self.test.depth, 1), continued=Continued(sequence, (), None)
                )
                self._read_prompts([handle])
                self._before = sequence, self.engine.snapshot(sequence)
            except BaseException:
                self.engine.close(sequence)
                raise
        sequence, snapshot = self._before
        self.engine.rewind(sequence, snapshot)
        self.engine.caches.reserve(sequence, 1)  # a page that the snapshot holds is copied now, not in a measurement
        return Continued(sequence, (), None)


def _written(handles: "list[ResponseHandle]", count: int) -> int:
    """Run steps until they have `count` tokens more each, on average; those of all together."""
    counts = [0] * len(handles)
    while sum(counts) < count * len(handles):
        next(handle for handle in handles if not handle.ended).poll()
        for number, handle in enumerate(handles):
            counts[number] += len(handle.take())
    return sum(counts)


def _row(llm: "LLM", name: str, test: Test, threads: int, times: Times, drafting: Drafting) -> Row:
    from penstock.analysis.weights import Sum, active_bytes, distinct

    model = llm.engine.model
    weights, seconds = Sum.of(distinct(model)), times.seconds
    speeds = [test.tokens / one for one in seconds]
    speed, active = statistics.fmean(speeds), active_bytes(model, test.batch)
    moved = active * speed / test.batch / 1e9 if test.writes else None
    read = max(times.rates, default=None)
    return Row(
        model=name,
        model_type=llm.config.model_type,
        model_size=weights.nbytes,
        model_n_params=weights.parameters,
        backend=llm.engine.device.name.upper(),
        n_threads=threads,
        test=test.name,
        n_prompt=test.prompt,
        n_gen=test.generation,
        n_depth=test.depth,
        batch_size=test.batch,
        avg_ns=statistics.fmean(seconds) * 1e9,
        stddev_ns=_deviation(seconds) * 1e9,
        avg_ts=speed,
        stddev_ts=_deviation(speeds),
        samples_ns=[round(one * 1e9) for one in seconds],
        samples_ts=speeds,
        prompt_tps=speed if not test.generation else None,
        generation_tps=speed if test.writes else None,
        peak_memory=llm.stats().peak_memory / 1e9,
        active_bytes=active,
        gb_per_s=moved,
        read_gb_per_s=read,
        share_of_read=moved / read if moved and read else None,
        ttft_ms=statistics.median(times.first) * 1e3 if times.first else None,
        host_us=statistics.median(times.host) * 1e6 if times.host else None,
        prepare_s=times.prepare,
        compile_seconds=times.compiled,
        speculate=drafting.kind,
        acceptance=None if drafting.acceptance is None else list(drafting.acceptance),
        draft_n=sum(times.drafts),
        draft_n_accepted=sum(times.accepted),
        drafts_per_step=sum(times.drafts) / sum(times.turns) if sum(times.turns) and drafting.kind != "off" else None,
    )


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


@contextmanager
def _threads(device: "Device", count: int | None) -> Iterator[int]:
    """The CPU kernels' threads for a while; other devices have no say in them."""
    before = device.threads()
    if count is None or not (device.host_memory and device.runs_programs):
        yield before
        return
    device.set_threads(count)
    try:
        yield count
    finally:
        device.set_threads(before)


@contextmanager
def _shown(what: str) -> Iterator[Callable[[str], None]]:
    """What is being done, on stderr if that is a terminal; silent else."""
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    with Console(stderr=True).status(what) as status:
        yield lambda step: status.update(f"{what}: {step}")


# --------------------------------------------------------------------------------------------------------------------
# Made-up models


def _made_up(
    model: NamedModel, config: str, layers: str | None, tests: list[Test], threads: int | None
) -> "tuple[str, LLM]":
    """A model of a config.json with random weights, and its name."""
    from penstock import api, models
    from penstock.engine.cache import Caches
    from penstock.engine.options import resolve_options, resolve_state_dtype
    from penstock.models.config import first_layers
    from penstock.models.random import Random
    from penstock.models.split import Mesh
    from penstock.models.step import with_state_dtype
    from penstock.ops.device import device_for

    count = layer_count(layers)
    found = resolved(config, ("config",), model.revision, model.offline, files="config", option="--random")
    path, given = found.config_path, found.read_config()
    device, dtype, _ = resolve_options(model.device, model.dtype, model.activations, threads)
    where = device_for(device)
    if count is None and not where.host_memory:
        whole = api.random_nbytes(first_layers(given, "all", str(path))[0], model.speculate) // model.ranks
        count = "all" if whole <= 0.9 * where.free_memory() else None
    raw, shown = first_layers(given, count, str(path))
    name = found.name + shown
    family = models.family_of(raw)
    read, need = family.read_config(raw), api.random_nbytes(raw, model.speculate) // model.ranks
    if model.ranks > 1 and family.split is not None:
        read = family.split(read, Mesh(0, model.ranks), Random(raw).group_size).config
    batches = [(test.batch, test.positions) for test in tests]
    layouts = with_state_dtype(family.caches(read), resolve_state_dtype(model.state_dtype, device))
    check_room(f"{path}{shown}", where, Caches(layouts, dtype), batches, need)
    with _shown(f"making up {amount(need)} of weights") as progress:
        made = 0

        def add(nbytes: int) -> None:
            nonlocal made
            made += nbytes
            progress(amount(made))

        llm = api.load_random(
            raw,
            device=model.device,
            dtype=model.dtype,
            state_dtype=model.state_dtype,
            activations=model.activations,
            max_context=max(test.positions for test in tests),
            threads=threads,
            progress=add,
            on_device=True,
            cache_memory=model.memory,
            speculate=model.speculate,
            num_draft_tokens=model.num_draft_tokens,
            **model.rank_arguments(),
        )
    return name, llm


def check_batch(engine: "Engine", size: int) -> None:
    """Raises InvalidArgument for more sequences than run in one step."""
    if size > engine.most_sequences:
        raise InvalidArgument(
            f"-b: is {size}, expected at most {engine.most_sequences}: no more run in one step here; -b counts "
            "sequences, not tokens of a chunk as in llama-bench"
        )


def check_room(
    what: str, device: "Device", caches: "Caches", batches: Iterable[tuple[int, int]], weights: int = 0
) -> None:
    """Raise OutOfMemory unless weights that are still to come fit together with each of `batches`.

    A batch is a number of sequences and the positions of each.
    """
    states, count, positions = max((count * caches.bytes_of(length), count, length) for count, length in batches)
    if weights + states > (free := device.free_memory()):
        parts = [f"{amount(weights)} for its weights"] if weights else []
        parts.append(f"{amount(states)} for {count} x {positions} positions")
        advice = "; --layers takes fewer" if weights > free else "; take fewer sequences or positions"
        raise OutOfMemory(
            f"{what}: needs {amount(weights + states)} of {device.memory_name} ({', '.join(parts)}), "
            f"{amount(free)} are free{advice}"
        )


def layer_count(text: str | None) -> int | Literal["all"] | None:
    """What --layers says. Raises UsageError for anything but a number or all."""
    if text is None or text == "all":
        return text
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise UsageError(f"--layers: is {text!r}, expected a number or all")
    return int(text)


# --------------------------------------------------------------------------------------------------------------------
# Output


class _Markdown:
    """A table as llama-bench prints it, row by row."""

    def __init__(self, name: str, device: str, more: list[str]) -> None:
        self._columns = {"model": max(20, len(name)), "size": 11, "params": 10, "backend": 9, "threads": 7}
        self._columns |= {"batch": 5} if "batch" in more else {}
        self._columns |= {"test": 17, "t/s": 17}
        self._columns |= {name: len(name) for name in ("drafts", "accepted") if name in more}
        self._columns |= {"first ms": 8, "GB/s": 6}
        self._columns |= {"of copy": 7, "host us": 7} if device == "cuda" else {"of read": 7}
        self._started = False
        self._prepared = self._compiled = 0.0

    def row(self, row: Row) -> None:
        if not self._started:
            self._started = True
            self._print({name: name for name in self._columns})
            rules = (f"{'-' * (width + 1)}{'-' if n == 0 else ':'}" for n, width in enumerate(self._columns.values()))
            print(f"|{'|'.join(rules)}|", flush=True)
        share = "" if row.share_of_read is None else f"{row.share_of_read:.0%}"
        cells = {
            "model": row.model,
            "size": _bytes(row.model_size),
            "params": _count(row.model_n_params),
            "backend": row.backend,
            "threads": str(row.n_threads),
            "batch": str(row.batch_size),
            "test": row.test,
            "t/s": f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}",
            "drafts": "" if row.drafts_per_step is None else f"{row.drafts_per_step:.2f}",
            "accepted": f"{row.draft_n_accepted / row.draft_n:.0%}" if row.draft_n else "",
            "GB/s": "" if row.gb_per_s is None else f"{row.gb_per_s:.1f}",
            "of read": share,
            "of copy": share,
            "first ms": "" if row.ttft_ms is None else f"{row.ttft_ms:.1f}",
            "host us": "" if row.host_us is None else f"{row.host_us:.0f}",
        }
        self._print(cells)
        self._prepared += row.prepare_s
        self._compiled += row.compile_seconds

    def _print(self, cells: Mapping[str, str]) -> None:
        shown = (
            cells[name].ljust(width) if name == "model" else cells[name].rjust(width)
            for name, width in self._columns.items()
        )
        print(f"| {' | '.join(shown)} |", flush=True)

    def end(self) -> None:
        if self._prepared:
            print(f"\nBefore: {self._prepared:.1f} s to compile and capture programs.")
        elif self._compiled >= 0.1:
            print(f"\nBefore: {self._compiled:.1f} s to compile kernels, once on this machine.")


class _Json:
    """All rows as one list."""

    def __init__(self, name: str, device: str, more: list[str]) -> None:
        self._rows: list[dict[str, Any]] = []

    def row(self, row: Row) -> None:
        self._rows.append(asdict(row))

    def end(self) -> None:
        print_json(self._rows)


class _JsonLines:
    """A row per line."""

    def __init__(self, name: str, device: str, more: list[str]) -> None:
        pass

    def row(self, row: Row) -> None:
        print(json.dumps(asdict(row), ensure_ascii=False), flush=True)

    def end(self) -> None:
        pass


class _Csv:
    """A heading and a row per line; the samples are left to JSON."""

    def __init__(self, name: str, device: str, more: list[str]) -> None:
        names = [field.name for field in fields(Row) if not field.name.startswith("samples")]
        self._writer = csv.DictWriter(sys.stdout, names, extrasaction="ignore", lineterminator="\n")
        self._writer.writeheader()

    def row(self, row: Row) -> None:
        self._writer.writerow(asdict(row))
        sys.stdout.flush()

    def end(self) -> None:
        pass


_PRINTERS = {"md": _Markdown, "json": _Json, "jsonl": _JsonLines, "csv": _Csv}


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def _count(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"
