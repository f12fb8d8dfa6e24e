"""Rank 0 with its scheduler and a rank that follows, as threads, on a device that captures and draws, as a GPU does."""

import math
import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.api import LLM
from penstock.engine.buckets import BucketedSteps
from penstock.engine.engine import Engine
from penstock.engine.hooks import Hooks
from penstock.engine.ranks import Command, Follower, Leader, StepOf
from penstock.engine.request import Request
from penstock.engine.sampling import SamplingParams
from penstock.engine.speculate import Proposal, Speculation, StepCosts
from penstock.errors import EngineDied, NonFiniteLogits
from penstock.models import family_of
from penstock.models.split import Mesh
from tests.engine.capturing import CapturingHost
from tests.models.test_split import CASES, GROUP, Drawn, engine_of
from tests.parallel.threads import ThreadGroup, Threads

RAW, SPELLING = CASES["qwen"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3, "top_k": 9},
    {"temperature": 1.0, "seed": 8, "logprobs": 2},
]
PROMPTS = [[5, 6, 7], list(range(20, 33)), [9]]
LLAMA = CASES["llama"][0]


class Watched(CapturingHost):
    """Notes copies to the host, and when it runs what was captured."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[tuple[int, ...]] = []
        self.replaying = False

    def capture(self, calls: Any) -> Any:
        replay = super().capture(calls)

        def run() -> None:
            self.replaying = True
            replay()
            self.replaying = False

        return run

    def to_host(self, array: Any) -> np.ndarray:
        self.copied.append(array.shape)
        return super().to_host(array)


def answers(llm: LLM) -> list[list[int]]:
    """Tokens after the prompts, three together each time."""
    scheduler, found = llm.scheduler, []
    for options in OPTIONS:
        requests = [Request(prompt, SamplingParams(**options), 5, eos=frozenset()) for prompt in PROMPTS]
        handles = [scheduler.submit(request) for request in requests]
        while not scheduler.idle:
            scheduler.step()
        found += [handle.result(1).tokens for handle in handles]
    return found


def steps_of(engine: Engine) -> BucketedSteps:
    assert engine.programs is not None and isinstance(engine.programs.steps, BucketedSteps)
    return engine.programs.steps


class Ranks:
    """Engines of two ranks. `run` does something with the model on rank 0 while rank 1 follows."""

    def __init__(self, raw: Any = RAW, spelling: str = SPELLING, size: int = 2, **options: Any) -> None:
        self.threads = Threads(size)
        self.groups: list[Any] = ThreadGroup.all(self.threads)
        self.devices = [Watched() for _ in range(size)]
        self.engines: list[Any] = [None] * size
        self._raw, self._spelling, self._options = raw, spelling, options

    def run(self, work: Any) -> Any:
        def one(rank: int) -> Any:
            mesh = Mesh(rank, self.threads.size)
            source, device, group = self.source(rank), self.devices[rank], self.groups[rank]
            leader = self._leader(group) if rank == 0 else None
            options = {"leader": leader, **self._options}
            engine = self.engines[rank] = engine_of(self._raw, source, device, mesh, **options)
            if leader is None:
                return Follower(engine, group).run()
            try:
                return work(LLM(engine, None, None, ()))
            finally:
                leader.end()

        return self.threads.run(one)[0]

    def source(self, rank: int) -> Drawn:
        return Drawn(self._spelling)

    def _leader(self, group: Any) -> Leader:
        family = family_of(self._raw)
        config = family.read_config(self._raw)
        assert family.split is not None
        splits = [family.split(config, Mesh(rank, self.threads.size), GROUP) for rank in range(self.threads.size)]
        return Leader(group, splits, family.caches(config), self.threads.size)

    @property
    def steps(self) -> list[StepOf]:
        """Messages of steps."""
        found = (msgspec.msgpack.decode(message, type=Command) for message in self.groups[0].messages)
        return [command for command in found if isinstance(command, StepOf)]


def alone(raw: Any = RAW) -> LLM:
    return LLM(engine_of(raw, Drawn(SPELLING), CapturingHost(), None), None, None, ())


def test_tokens_are_drawn_on_rank_0_and_travel_to_the_others():
    ranks = Ranks(LLAMA)
    assert ranks.run(answers) == answers(alone(LLAMA))
    assert ranks.devices[1].copied == []  # the rank that follows reads nothing
    assert all(step.highest == [] for step in ranks.steps)
    assert all(np.frombuffer(run.tokens, np.int32).min() >= 0 for step in ranks.steps for run in step.runs)


def test_drafts_are_verified_by_all_ranks(monkeypatch: pytest.MonkeyPatch):
    """Rank 0 says how many tokens count; the states of the others wait for it."""
    rng = np.random.default_rng(0)
    prompts = [[7, 8, 9, 10] * 4, list(range(20, 31))]

    def wrote(llm: LLM, kind: str) -> list[list[int]]:
        params = SamplingParams(temperature=0.6, seed=3)
        handles = [
            llm.scheduler.submit(Request(prompt, params, 14, eos=frozenset(), speculate=kind)) for prompt in prompts
        ]
        while not llm.scheduler.idle:
            llm.scheduler.step()
        return [handle.result(1).tokens for handle in handles]

    want = Ranks(drafts=7, speculate="auto").run(lambda llm: wrote(llm, "off"))
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, want, strict=True)]

    def guessed(self: Speculation, recent: Any, most: int) -> Proposal | None:
        known = self.text.tokens
        drafts = next(text for text in texts if text[: len(known)] == known)[len(known) : len(known) + 3]
        drafts = [token if rng.random() < 0.7 else 5 for token in drafts]
        return Proposal("ngram 4", [0.9**n for n in range(1, len(drafts) + 1)], drafts) if drafts else None

    monkeypatch.setattr(Speculation, "ngram", guessed)
    monkeypatch.setattr(StepCosts, "__call__", lambda self, tokens: 1.0)
    ranks = Ranks(drafts=7, speculate="auto")
    assert ranks.run(lambda llm: wrote(llm, "ngram")) == want
    assert any(run.keep for step in ranks.steps for run in step.runs)


def test_hooks_are_called_on_rank_0_alone():
    called: list[str] = []

    def lower(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        called.append(threading.current_thread().name)
        return np.where(np.arange(logits.shape[1]) % 2, logits, logits - 5)

    hooks = Hooks((lower,), lambda logprobs: logprobs.argmax(axis=-1))

    def hooked(llm: LLM) -> list[list[int]]:
        requests = [Request(prompt, SamplingParams(seed=3), 5, frozenset(), hooks=hooks) for prompt in PROMPTS[:2]]
        requests.append(Request(PROMPTS[2], SamplingParams(seed=3), 5, frozenset()))
        handles = [llm.scheduler.submit(request) for request in requests]
        while not llm.scheduler.idle:
            llm.scheduler.step()
        return [handle.result(1).tokens for handle in handles]

    ranks = Ranks(LLAMA)
    got = ranks.run(hooked)
    assert len(called) == 10 and len(set(called)) == 1
    assert got == hooked(alone(LLAMA)) and got[2] == answers(alone(LLAMA))[2]
    assert ranks.devices[1].copied == []


def test_logits_of_all_rows_are_read_on_rank_0_alone():
    tokens = list(range(1, 60))
    ranks = Ranks()
    got, want = ranks.run(lambda llm: llm.logits(tokens)), alone().logits(tokens)
    assert np.abs(got - want).max() <= 5e-6 * np.abs(want).max()
    assert ranks.devices[1].copied == []


def test_embeddings_are_those_of_one_rank():
    texts = [list(range(1, 60)), [7], list(range(5, 69))]
    ranks = Ranks()
    got, want = ranks.run(lambda llm: llm.embed(texts)), alone().embed(texts)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert ranks.devices[1].copied == []


def test_all_ranks_forget_the_same_positions():
    tokens = list(range(1, 31))

    def shortened(llm: LLM) -> np.ndarray:
        engine = llm.engine
        sequence = engine.open()
        engine.prefill(sequence, [*tokens, 7, 8, 9])
        engine.truncate(sequence, 30)
        return engine.prefill(sequence, [4, 5])

    got, want = Ranks(LLAMA).run(shortened), alone(LLAMA).logits([*tokens, 4, 5])[-1]
    assert np.abs(got - want).max() <= 5e-6 * np.abs(want).max()


class Counting(Threads):
    """Notes what each rank exchanges."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.exchanged: list[list[tuple[int, ...]]] = [[] for _ in range(size)]

    def all_reduce(self, array: Any, note: Any = None) -> None:
        self.exchanged[self.rank].append(array.shape)
        super().all_reduce(array, note)

    def all_gather(self, parts: Any, array: Any) -> None:
        self.exchanged[self.rank].append(array.shape)
        super().all_gather(parts, array)


def test_ranks_prepare_alike_and_capture_nothing_after():
    """Rank 0 has captured what the other rank has not, which would have fewer slots if it chose for itself."""
    ranks = Ranks(LLAMA, max_context=20, cache_memory=1 << 20)
    ranks.threads = Counting(2)
    ranks.groups = ThreadGroup.all(ranks.threads)
    ranks.devices[1].default_sequences = 3
    before: list[int] = []

    def work(llm: LLM) -> list[list[int]]:
        first = answers(llm)
        llm.engine.prepare()
        before.extend(device.captured for device in ranks.devices)
        assert [steps_of(engine).answers for engine in ranks.engines] == [steps_of(llm.engine).answers] * 2
        assert answers(llm) == first
        return first

    ranks.run(work)
    assert before[1] > 20 and [device.captured for device in ranks.devices] == before
    counted = [[math.prod(shape) for shape in own] for own in ranks.threads.exchanged]
    assert counted[0] == counted[1]


class ThroughHost(Counting):
    """Exchanges that must not be captured."""

    capturable = False

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(len(ranks.devices))
        self._devices = ranks.devices

    def all_reduce(self, array: Any, note: Any = None) -> None:
        assert not self._devices[self.rank].replaying
        super().all_reduce(array, note)

    def all_gather(self, parts: Any, array: Any) -> None:
        assert not self._devices[self.rank].replaying
        super().all_gather(parts, array)


def test_replays_are_cut_at_what_is_exchanged_through_the_host():
    ranks = Ranks(LLAMA)
    ranks.threads = ThroughHost(ranks)
    ranks.groups = ThreadGroup.all(ranks.threads)
    assert ranks.run(answers) == answers(alone(LLAMA))
    assert all(device.captured > 3 for device in ranks.devices)  # there are replays between them


def _longer(llm: LLM, sequence: Any) -> None:
    sequence.length += 1


def _paged_otherwise(llm: LLM, sequence: Any) -> None:
    table = sequence.tables[None]
    table.ids[0] += 1
    table.changed()


def _told_more(llm: LLM, sequence: Any) -> None:
    llm.engine.leader._sent += 1  # type: ignore[union-attr]


def _read_other_tokens(llm: LLM, sequence: Any) -> None:
    llm.engine.leader._highest = [7]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (_longer, r"lengths: \[3\] here, \[4\] on rank 0"),
        (_paged_otherwise, r"slots and pages \(hash\): [0-9a-f]{16} here, [0-9a-f]{16} on rank 0"),
        (_told_more, r"messages: \d+ here, \d+ on rank 0"),
        (_read_other_tokens, r"tokens of the last step: \[\] here, \[7\] on rank 0"),
    ],
)
def test_ranks_that_have_come_apart_end_and_say_in_what(change, where):
    ranks = Ranks()

    def work(llm: LLM) -> None:
        sequence = llm.engine.open()
        llm.engine.prefill(sequence, [1, 2, 3])
        change(llm, sequence)
        with pytest.raises(Exception, match=r"Broken|come apart"):
            llm.engine.decode([sequence], [4])

    with pytest.raises(EngineDied, match=rf"^rank 1: the ranks have come apart in their {where}"):
        ranks.run(work)


def test_waiting_for_a_step_ends_when_a_rank_has_failed():
    ranks = Ranks(size=1)

    def work(llm: LLM) -> None:
        launch = llm.engine.launch

        def failing(*how: Any) -> Any:
            step = launch(*how)
            ranks.groups[0].failure = "rank 1: gone"
            return step

        llm.engine.launch = failing  # type: ignore[method-assign]
        with pytest.raises(EngineDied, match="rank 1: gone"):
            answers(llm)

    ranks.run(work)


class Damaged(Drawn):
    """One weight is NaN."""

    def __init__(self, path: str) -> None:
        super().__init__(SPELLING)
        self.path = path

    def weight(self, path: str, *shape: int) -> Any:
        found = super().weight(path, *shape)
        if not path.endswith(self.path):
            return found
        packed, scales, biases = found.arrays
        return found.with_arrays(packed, np.full_like(scales, np.nan), biases)


@pytest.mark.parametrize(
    ("path", "damaged", "where"),
    [
        ("layers.1.mlp.shared_expert.down_proj", {1}, r"layer 1, mlp.shared.down \(quantized_matmul\) on rank 1"),
        ("layers.1.mlp.gate", {0, 1}, r"layer 1, mlp.router \(quantized_matmul\)"),
    ],
    ids=["one", "all"],
)
def test_the_rank_layer_and_op_of_nonfinite_logits_are_named(path, damaged, where):
    class Some(Ranks):
        def source(self, rank: int) -> Drawn:
            return Damaged(path) if rank in damaged else Drawn(SPELLING)

    def ends(llm: LLM) -> None:
        for _ in range(2):  # and the ranks go on together
            handle = llm.scheduler.submit(Request(PROMPTS[1], SamplingParams(), 5, eos=frozenset()))
            while not llm.scheduler.idle:
                llm.scheduler.step()
            with pytest.raises(NonFiniteLogits, match=rf"first in {where}$"):
                handle.result(1)
        assert llm.engine.caches.slots_used == 0

    Some().run(ends)
