"""Steps that verify, accept and draft on a device by themselves: the text is the same, the drafts are those of the
host's way, and requests join, end and leave in between.
"""

import functools
import itertools
import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import compile_progress
from penstock.api import LLM
from penstock.engine.draft_chain import AheadRun
from penstock.engine.draft_gate import DraftGate
from penstock.engine.engine import Engine
from penstock.engine.request import Request
from penstock.engine.runner import unready_runs
from penstock.engine.sampling import SamplingParams
from penstock.engine.scheduler import Scheduler
from penstock.engine.speculate import Acceptance, Proposal, Speculation, Speculator
from penstock.engine.steps import Run
from penstock.errors import OutOfMemory
from penstock.graph import Program, SizedProgram
from tests.engine.capturing import CapturingHost
from tests.engine.test_speculate import with_head
from tests.models.common import some_tokens


@pytest.fixture(scope="module")
def demo() -> LLM:
    """The demo model, whose head is trained, on a device that captures."""
    own = penstock.load(device="cpu")
    engine = own.engine
    options = {"activations": engine.activations, "max_context": 700, "drafts": 7, "speculate": "mtp"}
    return LLM(Engine(engine.model, device=CapturingHost(), **options), own.tokenizer, None, ())


@pytest.fixture(scope="module")
def random(demo: LLM) -> LLM:
    """A random model with latent attention: no recurrent states."""
    return with_head("deepseek_v3", True, demo.tokenizer)


TAKES = DraftGate.drafts


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate takes what requests allow."""
    monkeypatch.setattr(DraftGate, "drafts", lambda self, answers, sizes: min(one.most for one in answers))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    tale = (Path(penstock.__file__).parent / "demo" / "tale.txt").read_text()
    return [tale[start : start + length] for start, length in ((0, 40), (900, 700), (2000, 5), (3000, 250))]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Answers and drafts of each step that the device accepts by itself."""
    found: list[tuple[int, int]] = []
    launch = Engine.launch_ahead

    def noted(self: Engine, runs: Any, drafts: int, *more: Any) -> Any:
        found.append((len(runs), drafts))
        return launch(self, runs, drafts, *more)

    monkeypatch.setattr(Engine, "launch_ahead", noted)
    return found


DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "seed": 3},
    "top_k": {"temperature": 0.9, "top_k": 30, "seed": 2},
    "full": {"temperature": 1.2, "top_k": 100, "top_p": 0.9, "min_p": 0.02, "seed": 2**64 - 5},
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_text_is_the_same(name: str, demo: LLM, texts: list[str], steps: list[tuple[int, int]]) -> None:
    make: Any = functools.partial(demo.generate, texts, max_tokens=24, **DRAWS[name])
    want = make(speculate="off")
    for drafts in (1, 3, 7):
        steps.clear()
        found = make(num_draft_tokens=drafts)
        assert [done.tokens for done in found] == [done.tokens for done in want]
        assert max(steps) == (4, drafts)
        timings = [done.timings for done in found]
        assert 0 < sum(t.draft_n_accepted for t in timings) < sum(t.draft_n for t in timings)
        assert all(sum(place[1] for place in t.draft_places) == t.draft_n_accepted for t in timings)
        assert all(t.generated_tokens == len(done.tokens) for t, done in zip(timings, found, strict=True))
    assert demo.engine.caches.slots_used == 0 and demo.engine.caches.pools[None].used == 0


def test_a_model_without_recurrent_states(random: LLM, steps: list[tuple[int, int]]) -> None:
    prompts = [some_tokens(5), [3, 4] * 10, some_tokens(300, 2)]
    make = functools.partial(random.generate, prompts, max_tokens=12, temperature=0.9, seed=2)
    want = [done.tokens for done in make(speculate="off")]
    assert [done.tokens for done in make(num_draft_tokens=3)] == want and steps


@pytest.mark.parametrize("speculate", ["off", "mtp"])
def test_json_is_closed_before_max_tokens(speculate: str, demo: LLM) -> None:
    """Which the positions that steps under way may write behind it are no part of."""
    asked = {"type": "json_object"}
    for seed in range(3):
        done = demo.generate("A fox", 12, 1.5, seed=seed, response_format=asked, speculate=speculate)
        assert isinstance(json.loads(done.text), dict) and len(done.tokens) <= 12


def drafts_by_position(llm: LLM, text: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Drafts behind each position of an answer that had some."""
    found: dict[int, list[int]] = {}
    draft, launch = Engine.draft, Engine.launch_ahead

    def noted(self: Engine, asked: Any) -> None:
        draft(self, asked)
        found.update({one.sequence.length: one.drafts for one in asked})

    def noted_ahead(self: Engine, runs: Any, *more: Any) -> Any:
        step = launch(self, runs, *more)
        for run in runs:
            row = self.programs.steps._chain._ahead[run.sequence.slot].tolist()  # type: ignore[union-attr]
            found[row[0]] = [token for token in row[3:] if token >= 0]
        return step

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "draft", noted)
        patch.setattr(Engine, "launch_ahead", noted_ahead)
        patch.setattr("penstock.engine.speculate.StepCosts.__call__", lambda self, tokens: 1.0)
        if not ahead:
            patch.setattr(Engine, "drafts_ahead", False)
        llm.generate(text, max_tokens=40, temperature=0.7, seed=5, num_draft_tokens=3)
    return found


def test_the_drafts_are_those_of_the_host(demo: LLM, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the same positions: the head has seen the same rows, those of accepted drafts too."""
    common = 0
    for text in texts:
        host, device = (drafts_by_position(demo, text, ahead, monkeypatch) for ahead in (False, True))
        for position in host.keys() & device.keys():
            common += 1
            assert device[position][: len(host[position])] == host[position]
    assert common > 15


def test_heads_of_requests_that_need_the_host_draft_as_exact_ones(demo: LLM, texts: list[str]) -> None:
    """Log-probabilities, penalties: beside a request that does not."""
    options: list[dict[str, Any]] = [{"logprobs": 2}, {"repetition_penalty": 1.2}, {}]
    with Scheduler(demo, max_sequences=3) as made:
        found = []
        for kind in ("off", "mtp"):
            handles = [
                made.submit(made.request(texts[n], 16, temperature=0.8, seed=n, speculate=kind, **own))
                for n, own in enumerate(options)
            ]
            found.append([handle.result(60) for handle in handles])
    for plain, drafted in zip(*found, strict=True):
        assert (plain.tokens, plain.logprobs) == (drafted.tokens, drafted.logprobs)


def test_what_the_host_has_accepted_is_committed_on_the_device(demo: LLM) -> None:
    """To the bit as token by token, behind a run of which three tokens count."""
    engine, row = demo.engine, {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    ids = demo.tokenizer.encode("Once upon a time there was a miller who had a daughter and she")[:9]
    engine.ensure_allocated()
    states, tokens = [], []
    for ahead in (False, True):
        sequence = engine.open()
        engine.prefill(sequence, ids[:5])
        if ahead:
            engine.step([Run(sequence, np.array([*ids[5:8], 1], np.int32), "all", keep=True)])
            engine.accept(sequence, 3)
            tokens.append(engine.launch_ahead([AheadRun(sequence, ids[8:], 8)], 3, [row], "greedy").tokens()[0])
            engine.advance_ahead(sequence, 3, 1)
            engine.settle(sequence)
        else:
            tokens += [int(engine.decode([sequence], [token])[0].argmax()) for token in ids[5:]][-1:]
        states.append([np.array(one) for one in engine.caches.copied_states(sequence)])
        engine.close(sequence)
    assert tokens[0] == tokens[1]
    for one, other in zip(*states, strict=True):
        rows = slice(3 if one.ndim == 2 else None)  # behind those of the convolution are kept ones
        np.testing.assert_array_equal(one[rows], other[rows])


def test_requests_join_and_end_in_between(demo: LLM, texts: list[str], steps: list[tuple[int, int]]) -> None:
    ids = [demo.tokenizer.encode(text) for text in texts]
    counts = [30, 11, 25, 4]
    with Scheduler(demo, max_sequences=4, prefix_cache=False) as made:
        request = functools.partial(made.request, temperature=0.8, seed=9, num_draft_tokens=3)
        pairs = list(zip(ids, counts, strict=True))
        want = [made.submit(request(own, count, speculate="off")).result(60).tokens for own, count in pairs]
        steps.clear()
        handles = []
        for own, count in pairs:
            handles.append(made.submit(request(own, count)))
            for _ in range(3):
                next(handles[0])
        got = [[token.token for token in handle] for handle in handles]
    assert got[1:] == want[1:] and got[0] == want[0][12:]
    assert {1, 2, 4} <= {answers for answers, _ in steps}


@pytest.mark.parametrize("overlap", [True, False])
def test_answers_end_where_they_would(overlap: bool, demo: LLM, texts: list[str]) -> None:
    """At max_tokens, an end token, a stop string, and the end of the context."""
    ids = demo.tokenizer.encode(texts[0])
    with Scheduler(demo, max_sequences=2, overlap=overlap, prefix_cache=False) as made:
        request = functools.partial(made.request, temperature=0.9, seed=4)
        text = made.submit(request(ids, 30, speculate="off")).result(60).tokens
        for count in (1, 2, 3, 5, 8, 13):
            done = made.submit(request(ids, count, num_draft_tokens=3)).result(60)
            assert (done.tokens, done.finish_reason) == (text[:count], "length")
        done = made.submit(request(ids, 30, extra_eos=[text[9]])).result(60)
        assert (done.tokens, done.finish_reason) == (text[: text.index(text[9]) + 1], "stop")
        stop = demo.tokenizer.decode(text[6:8]).strip()
        want = made.submit(request(ids, 30, stop=[stop], speculate="off")).result(60)
        done = made.submit(request(ids, 30, stop=[stop])).result(60)
        assert (done.text, done.finish_reason) == (want.text, want.finish_reason) == (want.text, "stop")
        whole = (ids * 99)[: 700 - 20]
        want = made.submit(request(whole, 50, speculate="off")).result(60)
        done = made.submit(request(whole, 50)).result(60)
        assert (done.tokens, done.finish_reason) == (want.tokens, "length") and len(want.tokens) <= 20
    assert demo.engine.caches.pools[None].used == 0


def test_a_prefix_that_is_stored_and_pages_that_are_crossed(demo: LLM, texts: list[str]) -> None:
    ids = (demo.tokenizer.encode(texts[1]) * 9)[:509]  # two pages but for three positions
    with Scheduler(demo, max_sequences=1) as made:
        request = functools.partial(made.request, ids, 20, temperature=0.8, seed=1)
        want = made.submit(request(speculate="off")).result(60).tokens
        for _ in range(2):
            assert made.submit(request(num_draft_tokens=7)).result(60).tokens == want


def test_a_reader_that_lags_behind_is_computed_again(demo: LLM, texts: list[str]) -> None:
    """Its sequence goes to another request meanwhile."""
    with Scheduler(demo, max_sequences=1, buffer=3, prefix_cache=False) as made:
        request = functools.partial(made.request, temperature=0.8, seed=1, num_draft_tokens=3)
        want = [made.submit(request(text, 24, speculate="off"), buffer=99).result(60).tokens for text in texts[:2]]
        slow = made.submit(request(texts[0], 24))
        first = [next(slow).token for _ in range(2)]
        other = made.submit(request(texts[1], 24), buffer=99).result(60).tokens
        assert other == want[1]
        assert [*first, *(token.token for token in slow)] == want[0]


def test_made_up_acceptance_counts_as_often_as_it_says(demo: LLM, texts: list[str]) -> None:
    ids = demo.tokenizer.encode(texts[0])
    params = SamplingParams(temperature=1.0, seed=3)
    drafting: dict[str, Any] = {"speculate": "mtp", "num_draft_tokens": 3, "fixed_drafts": True}
    with Scheduler(demo, max_sequences=1, prefix_cache=False) as made:
        request = Request(ids, params, 400, frozenset(), acceptance=(0.9, 0.5), **drafting)
        places = made.submit(request, buffer=500).result(120).timings.draft_places
    shares = [hits / tries for tries, hits in places]
    assert abs(shares[0] - 0.9) < 0.08 and abs(shares[1] - 0.5) < 0.12 and shares[2] == 0


@pytest.mark.parametrize("most", [3, 30])
def test_metrics_count_the_drafts_that_were_verified(most: int, demo: LLM, texts: list[str]) -> None:
    """Not those of a run's first step, which has none yet, nor of the step that was launched behind an answer's end."""
    with Scheduler(demo, max_sequences=2, prefix_cache=False) as made:
        handles = [made.submit(made.request(text, most, num_draft_tokens=3)) for text in texts[:2]]
        timings = [handle.result(60).timings for handle in handles]
        made.submit(made.request(texts[2], 2, speculate="off")).result(60)
        found = made.metrics()
    assert found.draft_tokens == sum(one.draft_n for one in timings) > 0
    assert found.accepted_tokens == sum(one.draft_n_accepted for one in timings)


def test_a_session_goes_on_behind_an_answer(demo: LLM, texts: list[str]) -> None:
    """A session's own answers take the host's way; its sequence beside them is untouched."""
    demo.engine.allocate(sequences=2)
    with demo.session() as session:
        options: dict[str, Any] = {"temperature": 0.7, "seed": 2}
        one = session.generate(texts[0], max_tokens=9, num_draft_tokens=3, **options).tokens
        demo.generate(texts[1], max_tokens=9, num_draft_tokens=3, **options)
        two = session.generate(max_tokens=9, num_draft_tokens=3, **options).tokens
        assert one + two == demo.generate(texts[0], max_tokens=18, speculate="off", **options).tokens


# -- what is captured when -------------------------------------------------------------------------------------------


def untouched(demo: LLM, device: CapturingHost | None = None) -> LLM:
    """The demo model on a device that captures and has captured nothing yet."""
    engine = demo.engine
    options = {"activations": engine.activations, "max_context": 700, "drafts": 7, "speculate": "mtp"}
    return LLM(Engine(engine.model, device=device or CapturingHost(), **options), demo.tokenizer, None, ())


def endless(llm: LLM, texts: list[str], **draw: Any) -> list[Request]:
    """Requests whose answers end at no token."""
    params = [SamplingParams(temperature=0.8, seed=n, **draw) for n in range(len(texts))]
    return [Request(llm.tokenizer.encode(text), own, 400, frozenset()) for text, own in zip(texts, params, strict=True)]


@pytest.mark.parametrize("answers", [1, 3])
@pytest.mark.parametrize("draw", [{}, {"top_k": 30}], ids=["plain", "top_k"])
def test_drafts_that_rest_and_begin_again_capture_nothing(
    answers: int, draw: dict[str, Any], demo: LLM, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind rests of all lengths, those of more rows than one run has too, with each number of drafts."""
    llm = untouched(demo)
    llm.engine.allocate(sequences=answers + 1)
    before = [*[0] * 14, 1, 1, 0, 1, 1]
    behind = [drafts for rest in (1, 3, 9, 20, 70, 10) for drafts in (*[0] * rest, 3, 3, 1, 7, 7)]
    script, left = itertools.count(), []
    unready: list[int] = []

    def drafts(self: DraftGate, answers: Any, sizes: Any) -> int:
        step = next(script)
        if step == len(before):
            unready.append(unready_runs())
            for kind in (Program, SizedProgram):
                monkeypatch.setattr(kind, "__init__", lambda *_, **__: pytest.fail("a program was traced"))
        left[:] = [*before, *behind][step:]
        return left[0] if left else 0

    monkeypatch.setattr(DraftGate, "drafts", drafts)
    taken = {0: 0, 1: 0, 3: 0, 7: 0}
    launch = Engine.launch_ahead
    monkeypatch.setattr(
        Engine, "launch_ahead", lambda *args: (taken.__setitem__(args[2], taken[args[2]] + 1), launch(*args))[1]
    )
    with Scheduler(llm, max_sequences=answers, prefix_cache=False, allocate=False) as made:
        requests = endless(llm, [texts[0], texts[3], texts[2]][:answers], **draw)
        handles = [made.submit(request, buffer=999) for request in requests]
        while not unready or len(left) > 1:
            assert made.step() and not any(handle.ended for handle in handles)
        assert unready_runs() == unready[0]
    assert min(taken[1], taken[3], taken[7]) >= 6


def test_drafts_of_a_host_that_rest_and_begin_again_capture_no_fills(
    demo: LLM, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that waited, where the host reads drafts: an answer with a penalty."""
    llm = untouched(demo)
    llm.engine.allocate(sequences=2)
    before, behind = [0] * 6 + [1] * 4, [*[0] * 3, 1, *[0] * 20, 1, 1, *[0] * 90, 1, 1, 0, 0]
    steps, unready = [], []  # drafts of each step that were wanted

    def drafts(self: Speculator, answers: Any, room: int, draft: Any) -> list[Proposal | None]:
        if len(steps) == len(before):
            unready.append(unready_runs())
        steps.append([*before, *behind][len(steps)])
        return [Proposal("mtp", [1.0], draft({0: 1})[0]) if steps[-1] else None]

    monkeypatch.setattr(Speculator, "drafts", drafts)
    monkeypatch.setattr(Speculator, "wants", lambda self, speculation: True)
    monkeypatch.setattr(Speculator, "rests", lambda self, answers: False)
    with Scheduler(llm, max_sequences=1, prefix_cache=False, allocate=False) as made:
        (request,) = endless(llm, texts[:1], repetition_penalty=1.1)
        handle = made.submit(request, buffer=999)
        while len(steps) < len(before) + len(behind):
            made.step()
        assert not handle.ended and unready_runs() == unready[0]


class SlowCaptures(CapturingHost):
    """By a clock that goes on by a second whenever it is read, and by a thousand when something is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def capture(self, calls: Any) -> Any:
        self.now += 1000.0
        return super().capture(calls)


def test_a_capture_is_no_cost_of_a_step(demo: LLM, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps with drafts, without, and of more answers than before."""
    device, took = SlowCaptures(), []
    llm = untouched(demo, device)
    llm.engine.allocate(sequences=3)
    monkeypatch.setattr(compile_progress, "clock", device.clock)
    record = DraftGate.record

    def noted(self: DraftGate, answers: int, drafts: int, seconds: float | None) -> None:
        took.append((answers, drafts, seconds or 0.0))
        record(self, answers, drafts, seconds)

    monkeypatch.setattr(DraftGate, "record", noted)
    monkeypatch.setattr(DraftGate, "drafts", lambda self, answers, sizes: len(took) % 8 // 4 * 3)
    with Scheduler(llm, max_sequences=2, prefix_cache=False, allocate=False) as made:
        for count in (1, 2):
            handles = [made.submit(request, buffer=999) for request in endless(llm, texts[:count])]
            while len(took) < 30 * count:
                made.step()
            for handle in handles:
                handle.cancel()
    assert {(1, 0), (1, 3), (2, 0), (2, 3)} <= {(answers, drafts) for answers, drafts, _ in took}
    assert device.now > 4000
    assert max(seconds for *_, seconds in took) < 1000


def test_steps_with_drafts_are_measured_where_there_are_sequences_for_that(demo: LLM) -> None:
    llm = untouched(demo)
    llm.engine.allocate(sequences=3)
    steps: Any = llm.engine.programs.steps  # type: ignore[union-attr]
    busy = llm.engine.open()
    for sequences in (2, 3):
        llm.engine.prepare_drafting(sequences, (1, 3))
    assert sorted(steps.draft_seconds(2)) == [0, 1, 3] and not steps.draft_seconds(3)
    assert steps.drafting_prepared(3, (1, 3), "plain") and not steps.drafting_prepared(3, (7,), "plain")
    assert llm.engine.caches.slots_used == 1 and llm.engine.caches.pools[None].used == 0
    llm.engine.close(busy)


def test_steps_have_no_drafts_where_they_cannot_be_prepared(
    demo: LLM, texts: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For want of memory: said once, and answers go on."""
    llm, tries, offered = untouched(demo), [], set()

    def full(self: Engine, *args: Any) -> None:
        tries.append(args)
        raise OutOfMemory("step: 1 GB are needed, 1 MB are free")

    def drafts(self: DraftGate, answers: Any, sizes: Any) -> int:
        offered.add(tuple(sizes))
        return TAKES(self, answers, sizes)

    monkeypatch.setattr(Engine, "prepare_drafting", full)
    monkeypatch.setattr(DraftGate, "drafts", drafts)
    with Scheduler(llm, max_sequences=1, prefix_cache=False, allocate=False) as made:
        done = made.submit(made.request(texts[0], 60, temperature=0.8, seed=1), buffer=99).result(60)
    assert len(done.tokens) == 60 or done.finish_reason == "stop"
    assert len(tries) == 1 and offered == {()} and done.timings.draft_n == 0
    assert [record.message for record in caplog.records] == [
        "steps of 1 answers have no drafts: step: 1 GB are needed, 1 MB are free"
    ]


# -- how many --------------------------------------------------------------------------------------------------------


def speculation(chance: float, most: int = 7, fixed: bool = False) -> Speculation:
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.record("mtp", 1, int(chance > 0.5))
        acceptance.record("mtp", 7, 7 if chance > 0.5 else 0)
    return Speculation("mtp", most, acceptance, fixed)


SURE, UNSURE = speculation(1.0), speculation(0.0)
GATE = TAKES


def gate(**measured: float) -> DraftGate:
    """By measured seconds of one answer: s0 without drafts, s1 with one, …"""
    seconds = {int(name[1:]): took for name, took in measured.items()}
    return DraftGate(lambda answers: seconds if answers == 1 else {})


def test_the_gate_takes_what_makes_tokens_come_soonest() -> None:
    assert GATE(gate(s0=1.0, s1=1.2, s3=1.6), [SURE]) == 3
    assert GATE(gate(s0=1.0, s1=1.2, s3=4.0), [SURE]) == 1
    assert GATE(gate(s0=1.0, s1=2.1, s3=4.2), [SURE]) == 0
    assert GATE(gate(s0=1.0, s1=1.1, s3=1.2), [UNSURE]) == 0
    assert GATE(gate(s0=1.0, s1=1.2, s3=1.6), [speculation(1.0, most=2)]) == 1  # of what was measured
    assert GATE(gate(s0=1.0, s1=9.0), [speculation(0.0, 5, fixed=True)]) == 5


def test_the_gate_measures_what_it_does_not_know() -> None:
    one = DraftGate()
    assert GATE(one, [SURE]) == 0  # what a step without takes is not known
    for seconds in (90.0, 900.0, 90.0, 9.0, 1.0):  # compiled, captured, launched before
        one.record(1, 0, seconds)
    assert GATE(one, [SURE]) > 0 and GATE(one, [SURE] * 2) == 0 and GATE(one, [SURE] * 33) == 0
    for drafts in (1, 2, 3, 7):
        for _ in range(5):
            one.record(1, drafts, 9.0)
    assert GATE(one, [SURE]) == 0


def test_the_gate_learns_what_more_drafts_take_than_seem_best() -> None:
    """By steps of none and of one three would take too long; they take less."""
    one, took = DraftGate(), {0: 1.0, 1: 1.7, 2: 1.9, 3: 2.1, 7: 9.0}
    for _ in range(5):
        one.record(1, 0, took[0])
    taken = []
    for _ in range(40):
        taken.append(GATE(one, [SURE]))
        one.record(1, taken[-1], took[taken[-1]])
    assert taken[-20:] == [3] * 20 and taken.count(7) <= 5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "acceptance, least", [((0.85, 0.75, 0.65), 1.05), ((0.7, 0.6, 0.5), 0.98), ((0.5, 0.4, 0.3), 0.98), ((0.1,), 0.98)]
)
def test_the_gate_is_not_slower_than_no_drafts(acceptance, least, seed) -> None:
    """Steps as an H200 takes them, in milliseconds, a few of them interrupted; between steps with drafts and those
    without the device has to be waited for, so that the first step of each kind takes longer than others do.
    """
    took, chance = {0: 1.248, 1: 2.28, 2: 2.72, 3: 3.03, 7: 5.2}, np.random.default_rng(seed).random
    measured = {drafts: 0.93e-3 * each for drafts, each in took.items()}
    one, shared, last, tokens, total = DraftGate(lambda answers: measured), Acceptance(), 0, 0, 0.0
    for step in range(4000):
        if step % 60 == 0:
            answer = Speculation("mtp", 7, Acceptance(shared))
        drafts, accepted = GATE(one, [answer]), 0
        while accepted < min(drafts, len(acceptance)) and chance() < acceptance[accepted]:
            accepted += 1
        if drafts:
            answer.acceptance.record("mtp", drafts, accepted)
        each = took[drafts] * (1.6 if chance() < 0.02 else 1.0) + (1.0 if (drafts > 0) != (last > 0) else 0.0)
        one.record(1, drafts, 1e-3 * each)
        last, tokens, total = drafts, tokens + 1 + accepted, total + each
    assert tokens / total >= least / (took[0] * 1.012)


def gate_runs(
    acceptance: tuple[float, ...], measured: tuple[int, ...], seed: int, first: int = 64, stop: int = 2064
) -> tuple[float, float]:
    """What the steps that the gate chooses for one answer of 256 tokens behind another bring from the token `first` on,
    as a ratio to the best fixed number of drafts, and to none. Steps as an H200 takes them in milliseconds, 3 % more or
    less, one in fifty three times as long; chance decides what the gate sees, but of a choice its expected tokens and
    time count.
    """
    took, rng = {0: 1.25, 1: 2.05, 2: 2.6, 3: 3.03, 7: 5.2}, np.random.default_rng(seed)
    chances = [*itertools.accumulate((*acceptance, *[0.0] * 7)[:7], operator.mul)]
    expected = [1 + sum(chances[:drafts]) for drafts in range(8)]
    known = {drafts: 0.93e-3 * took[drafts] for drafts in measured}  # replays behind each other take less
    one, shared, last, tokens, end = DraftGate(lambda answers: known), Acceptance(), 0, 0, 0
    made = spent = 0.0
    while tokens < stop:
        if tokens >= end:
            answer, end = Speculation("mtp", 7, Acceptance(shared)), end + 256
        drafts = GATE(one, [answer])
        verified = min(drafts, last)  # those that the step before has made
        accepted = int((rng.random(7)[:verified] < (*acceptance, *[0.0] * 7)[:verified]).cumprod().sum())
        if verified:
            answer.acceptance.record("mtp", verified, accepted)
        slow = 3.0 if rng.random() < 0.02 else 1.0
        one.record(1, drafts, 1e-3 * took[drafts] * (1 + 0.03 * rng.standard_normal()) * slow)
        if tokens >= first:
            made, spent = made + expected[verified], spent + took[drafts]
        last, tokens = drafts, tokens + 1 + accepted
    best = max(expected[drafts] / each for drafts, each in took.items())
    return made / spent / best, made / spent * took[0]


@pytest.mark.parametrize("measured", [(), (0, 1, 3)], ids=["unmeasured", "captured"])
def test_the_gate_soon_takes_what_is_best_and_keeps_to_it(measured: tuple[int, ...]) -> None:
    found = [gate_runs((0.85, 0.75, 0.65), measured, seed)[0] for seed in range(8)]
    assert np.mean(found) >= 0.98 and min(found) >= 0.97
    assert min(gate_runs((0.1,), measured, seed)[1] for seed in range(8)) >= 0.98


@pytest.mark.parametrize("acceptance", [(0.1,), (0.5, 0.4, 0.3)])
def test_the_gate_soon_knows_that_drafts_do_not_pay(acceptance: tuple[float, ...]) -> None:
    """In the first answer of a process, and in the next ones."""
    first, later = ([gate_runs(acceptance, (0, 1, 3, 7), seed, *part)[1] for seed in range(16)] for part in PARTS)
    assert np.mean(first) >= 0.985 and min(first) >= 0.96
    assert np.mean(later) >= 0.99


PARTS = (0, 256), (256, 1536)  # tokens


def test_the_gate_takes_one_draft_until_it_has_seen_a_few() -> None:
    one, answer = gate(s0=1.0, s1=1.2, s3=1.6, s7=9.0), Speculation("mtp", 7, Acceptance(Acceptance()))
    taken = []
    for _ in range(6):
        taken.append(GATE(one, [answer]))
        answer.acceptance.record("mtp", taken[-1], taken[-1])
    assert taken == [1, 1, 1, 3, 3, 3]
    assert GATE(one, [answer, Speculation("mtp", 7, Acceptance())]) == 0  # what steps of two take is not known
    assert GATE(one, [Speculation("mtp", 7, Acceptance(answer.acceptance.others))]) == 3  # others have seen some


def test_the_gate_tries_drafts_that_do_not_pay_ever_more_rarely() -> None:
    one = gate(s0=1.0, s1=1.5)
    taken = [GATE(one, [UNSURE]) for _ in range(4000)]
    tries = [n for n in range(1, 4000) if taken[n] and not taken[n - 1]]
    assert sum(taken) <= 4000 / 64 and 3 <= len(tries) <= 6
    apart = [after - before for before, after in itertools.pairwise(tries)]
    assert all(after > 1.9 * before for before, after in itertools.pairwise(apart))
