"""Drafts: what they are taken from, how many are taken, and that the text is the same with and without them."""

import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.api import LLM, load_random
from penstock.engine import draft_gate, draft_head, speculate
from penstock.engine import engine as engine_module
from penstock.engine.buckets import UNREAD
from penstock.engine.engine import Engine
from penstock.engine.execution import Execution
from penstock.engine.scheduler import Scheduler
from penstock.engine.speculate import Acceptance, Proposal, RecentAnswers, Speculation, StepCosts, TokenIndex, choose
from penstock.engine.steps import Run
from penstock.errors import DTypeError, InvalidArgument
from penstock.text.tokenizer import Tokenizer
from tests.engine.capturing import CapturingHost
from tests.models.common import VOCAB, moe_config, small_config, some_tokens, trained, write_model
from tests.models.test_deepseek_v3 import CONFIGS as DEEPSEEK
from tests.models.test_gemma4 import CONFIGS as GEMMA
from tests.models.test_llama import CONFIGS as LLAMA

REPEATED = [7, 8, 9, 10, 11] * 6


# -- what was written before -----------------------------------------------------------------------------------------


def index_of(*texts: list[int]) -> TokenIndex:
    index = TokenIndex()
    for text in texts:
        index.end()
        index.extend(text)
    return index


def test_token_index_finds_what_followed_the_last_tokens() -> None:
    index = index_of([1, 2, 3, 4, 5, 9, 2, 3, 4, 5])
    assert index.find(index) == (5, 4)
    assert index.following(5, 3) == [9, 2, 3]
    assert index.following(5, 8) == [9, 2, 3, 4, 5, 9, 2, 3]  # it goes on as it has
    assert index_of([1, 2, 1, 2]).find(index_of([1, 2, 1, 2])) == (2, 2)
    assert index_of([5, 1, 2, 6, 1, 2]).find(index_of([5, 1, 2, 6, 1, 2])) == (3, 2)
    nowhere = index_of([1, 2, 3])
    assert nowhere.find(nowhere) == (0, 0)
    assert TokenIndex().find(TokenIndex()) == (0, 0)


def test_token_index_takes_the_latest_of_the_longest_matches() -> None:
    text = [1, 2, 3, 4, 50, 1, 2, 3, 4, 60, 3, 4, 70, 1, 2, 3, 4]
    index = index_of(text)
    at, same = index.find(index)
    assert (text[at], same) == (60, 4)
    index.extend([61])
    assert index.find(index) == (0, 0)


def test_token_index_does_not_look_across_texts() -> None:
    index = index_of([1, 2, 3, 4], [5, 6, 7])
    assert index.find(index_of([3, 4, 5, 6])) == (7, 2)
    assert index.find(index_of([4, 5]))[1] == 0
    assert index_of([1, 2, 3, 4], [5, 6]).following(2, 5) == [3, 4]


def test_recent_answers_are_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculate, "_RECENT", 20)
    recent = RecentAnswers()
    for first in range(0, 100, 10):
        recent.add(list(range(first, first + 10)))
    assert recent.find(index_of([92, 93, 94, 95])) == ([96, 97, 98, 99], 4)
    assert recent.find(index_of([2, 3, 4, 5])) == ([], 0)
    assert recent.find(index_of([94, 95]))[1] == 0  # two tokens of another text are not enough
    assert len(recent._index.tokens) < 60


# -- how many --------------------------------------------------------------------------------------------------------


def costs(*seconds: float) -> StepCosts:
    made = StepCosts()
    for tokens, one in enumerate(seconds, 1):
        for each in (99, 99, one):
            made.record(tokens, each)
    return made


def test_choose_takes_what_makes_tokens_come_soonest() -> None:
    flat, steep = costs(*[1.0] * 9), costs(*np.arange(1.0, 10))
    sure, unsure = [0.9, 0.8, 0.7], [0.1, 0.01]
    assert choose([sure], flat, 9) == [3]
    assert choose([sure], steep, 9) == [0]
    assert choose([unsure], costs(1, 1.2, 1.4), 9) == [0]
    assert choose([sure], costs(1, 1.2, 3, 3), 9) == [1]
    assert choose([unsure, sure], costs(1, 1, 1.1, 1.2, 1.3, 1.4, 1.5), 9) == [0, 3]
    assert choose([unsure, sure, []], flat, 2) == [0, 2, 0]  # no more room
    assert choose([sure], flat, 9, each=1.0) == [0]  # drafting takes too long
    assert choose([sure], costs(1, 1.05, 1.05, 1.05), 9, each=0.05) == [3]
    assert choose([[]], flat, 9) == [0]


def test_step_costs_are_lower_quartiles_with_lines_between() -> None:
    made = costs(1.0)
    for _ in range(2):
        made.record(5, 100.0)  # the first of its size is bound then, and kernels are loaded
    assert made(5) == pytest.approx(1.0 * 2)  # what is usual
    made.record(5, 3.0)
    assert (made(1), made(3), made(5)) == (1.0, 2.0, 3.0)
    for _ in range(3):
        made.record(5, 1000.0)  # interruptions
        assert made(5) == 3.0
    for _ in range(16):
        made.record(5, 4.0)
    assert made(5) == 4.0  # of the latest ones


def test_acceptance_begins_with_what_others_have_seen() -> None:
    others = Acceptance()
    first = Acceptance(others).chance("ngram 2", 0)
    for _ in range(60):
        Acceptance(others).record("ngram 2", 3, 2)
    own = Acceptance(others)
    assert first == pytest.approx(0.3)
    assert own.chance("ngram 2", 0) > 0.9 and own.chance("ngram 2", 1) > 0.9 and own.chance("ngram 2", 2) < 0.1
    for _ in range(60):
        own.record("ngram 2", 3, 0)
    assert own.chances("ngram 2", 2)[0] < 0.1
    assert own.chance("ngram 8", 0) == pytest.approx(0.85)


def test_drafts_that_are_not_taken_are_compared_with_what_comes() -> None:
    one = Speculation("ngram", 3, Acceptance())
    for _ in range(20):
        one.watch(Proposal("ngram 2", [0.5, 0.2], [4, 5]))
        one.extend([4, 6, 8])
    assert one.acceptance.chance("ngram 2", 0) > 0.9
    assert one.acceptance.chance("ngram 2", 1) < 0.2


# -- runs that are kept ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small"), small_config())


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return penstock.load(folder, device="cpu", max_context=700)


@pytest.fixture(scope="module")
def captured(llm: LLM) -> LLM:
    """The same model on a device that captures programs and draws tokens."""
    own = llm.engine
    options = {"activations": own.activations, "max_context": 700, "drafts": 7, "speculate": "auto"}
    return LLM(Engine(own.model, device=CapturingHost(), **options), llm.tokenizer, None, ())


@pytest.mark.parametrize("start", [3, 254])
def test_a_kept_run_counts_as_far_as_it_is_accepted(start: int, llm: LLM, rng: np.random.Generator) -> None:
    """To the bit as token by token, behind steps, snapshots, and commits outside of a step."""
    engine, ids = llm.engine, some_tokens(start + 40)
    plain, kept = engine.open(), engine.open()
    try:
        for sequence in (plain, kept):
            engine.prefill(sequence, ids[:start])
        want = [engine.decode([plain], [token])[0] for token in ids[start:]]
        at = start
        while at < len(ids):
            count = min(int(rng.integers(1, 9)), len(ids) - at)
            accepted = int(rng.integers(1, count + 1))
            tokens = np.array([*ids[at : at + accepted], *rng.integers(0, VOCAB, count - accepted)], np.int32)
            if count == 1:
                found = engine.step([Run(kept, tokens)])
            else:
                found = engine.step([Run(kept, tokens, "all", keep=True)])
                assert kept.length == at
                engine.accept(kept, accepted)
            assert found is not None and kept.length == at + accepted
            for row in range(accepted):
                np.testing.assert_array_equal(found[row], want[at - start + row])
            if rng.random() < 0.3:
                snapshot = engine.snapshot(kept)
                engine.step([Run(kept, tokens[:1])])
                engine.rewind(kept, snapshot)
                engine.drop(snapshot)
            at += accepted
        engine.settle(kept)
        for layer in range(len(engine.caches.layouts)):
            for one, other in zip(engine.caches.rows(plain, layer), engine.caches.rows(kept, layer), strict=True):
                np.testing.assert_array_equal(one, other)
    finally:
        engine.close(plain)
        engine.close(kept)


@pytest.mark.parametrize("look", ["logits", "last"])
def test_a_step_that_verifies_draws_for_its_own_rows_alone(look: str, captured: LLM) -> None:
    """Its size may have more of them, which another step has used, and so does the head whose logits the host reads."""
    engine = captured.engine
    opened = [engine.open() for _ in range(3)]
    try:
        for n, sequence in enumerate(opened):
            engine.prefill(sequence, some_tokens(9 + n, n))
        for count in (4, 2):  # tokens of the first sequence, in steps of eight rows
            runs = [Run(one, np.array([7], np.int32)) for one in opened[1:]]
            runs.insert(0, Run(opened[0], np.array(some_tokens(count, 5), np.int32), "all", keep=True))
            step = engine.launch(runs, [UNREAD] * (count + 2), "greedy", (), range(count + 2))
            engine.accept(opened[0], 1)
            tokens = step.tokens()
            if look == "logits":
                assert step.logits().argmax(1).tolist() == tokens
            else:
                last = engine.programs.steps._inputs.last  # type: ignore[union-attr]
                assert [last[one.slot] for one in opened[1:]] == tokens[count:]
    finally:
        for sequence in opened:
            engine.close(sequence)


def test_recurrent_states_have_room_only_where_drafts_are_wanted(folder: Path, llm: LLM) -> None:
    off = penstock.load(folder, device="cpu", max_context=300, speculate="off")
    assert off.engine.caches.room == 0 and off.engine.caches.slot_bytes == llm.engine.caches.state_bytes
    assert off.generate([5, 6], max_tokens=3).tokens == llm.generate([5, 6], max_tokens=3).tokens
    with pytest.raises(InvalidArgument, match=r"^generate: speculate is 'ngram', expected 'off': the model was loaded"):
        off.generate([5, 6], max_tokens=3, speculate="ngram")


# -- the same text ---------------------------------------------------------------------------------------------------


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of any size take as long as each other, so that all drafts are taken."""
    monkeypatch.setattr(StepCosts, "__call__", lambda self, tokens: 1.0)
    monkeypatch.setattr(Execution, "draft_seconds", lambda self, answers: {})
    monkeypatch.setattr(speculate, "GAIN", 1.0)
    monkeypatch.setattr(draft_gate, "GAIN", 1.0)


@pytest.fixture
def guessing(monkeypatch: pytest.MonkeyPatch, eager: None) -> Callable[[list[list[int]]], None]:
    """Makes drafts of known texts, some of them wrong: every number of them is accepted now and then."""

    def install(texts: list[list[int]]) -> None:
        rng = np.random.default_rng(1)

        def ngram(self: Speculation, recent: RecentAnswers, most: int) -> Proposal | None:
            known = self.text.tokens
            text = next((one for one in texts if one[: len(known)] == known), [])
            drafts = text[len(known) : len(known) + most]
            drafts = [token if rng.random() < 0.8 else int(rng.integers(0, 100)) for token in drafts]
            return Proposal("ngram 4", [0.9**n for n in range(1, len(drafts) + 1)], drafts) if drafts else None

        monkeypatch.setattr(Speculation, "ngram", ngram)

    return install


class Doubled:
    """A hook that remembers how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, float]] = []

    def __call__(self, tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        self.calls.append((len(tokens), float(logits.sum())))
        return logits * np.float32(0.5)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "seed": 3},
    "cut": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 4},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {9: 2.0}},
    "context": {"temperature": 0.7, "repetition_penalty": 1.3, "repetition_context": 7, "seed": 5},
    "logprobs": {"temperature": 0.9, "logprobs": 3, "seed": 6},
    "stop": {"stop": ["a", "%"], "temperature": 1.5, "seed": 8},
}


@pytest.mark.parametrize("device", ["llm", "captured"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_text_is_the_same_with_drafts(
    name: str, device: str, guessing: Callable[[list[list[int]]], None], request: pytest.FixtureRequest
) -> None:
    llm: LLM = request.getfixturevalue(device)
    prompts = [some_tokens(5), REPEATED, some_tokens(300, 2)]
    want = llm.generate(prompts, max_tokens=40, speculate="off", **OPTIONS[name])
    guessing([[*prompt, *done.tokens] for prompt, done in zip(prompts, want, strict=True)])
    for most in (7, 2):
        found = llm.generate(prompts, max_tokens=40, speculate="ngram", num_draft_tokens=most, **OPTIONS[name])
        for one, other in zip(found, want, strict=True):
            assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
            assert (one.logprobs, one.top_logprobs) == (other.logprobs, other.top_logprobs)
        drafted = [done.timings for done in found if len(done.tokens) > 3]
        assert not drafted or 0 < sum(t.draft_n_accepted for t in drafted) < sum(t.draft_n for t in drafted)
        assert all(len(t.draft_places) <= most for t in drafted)
        assert all(sum(place[1] for place in t.draft_places) == t.draft_n_accepted for t in drafted)
        if name != "stop":  # which is found behind the tokens of a step
            assert all(done.timings.generated_tokens == len(done.tokens) for done in found)


def test_hooks_see_what_they_would_without_drafts(llm: LLM, guessing: Callable[[list[list[int]]], None]) -> None:
    prompt, options = REPEATED, {"temperature": 0.9, "seed": 1, "max_tokens": 30}
    plain, drafted = Doubled(), Doubled()
    want = llm.generate(prompt, logits_processors=[plain], speculate="off", **options)
    guessing([[*prompt, *want.tokens]])
    found = llm.generate(prompt, logits_processors=[drafted], speculate="ngram", **options)
    assert found.tokens == want.tokens and drafted.calls == plain.calls and found.timings.draft_n > 0


def test_answers_end_where_they_would_without_drafts(llm: LLM, guessing: Callable[[list[list[int]]], None]) -> None:
    prompt = REPEATED
    text = llm.generate(prompt, max_tokens=30, speculate="off", temperature=1.0, seed=9).tokens
    guessing([[*prompt, *text]])
    for count in range(1, 12):
        done = llm.generate(prompt, max_tokens=count, speculate="ngram", temperature=1.0, seed=9)
        assert (done.tokens, done.finish_reason) == (text[:count], "length")
    end = text[8]
    done = llm.generate(prompt, max_tokens=30, speculate="ngram", temperature=1.0, seed=9, extra_eos=[end])
    assert (done.tokens, done.finish_reason) == (text[: text.index(end) + 1], "stop")
    whole = [5] * (700 - 6)
    want = llm.generate(whole, max_tokens=50, speculate="off").tokens
    guessing([[*whole, *want]])
    assert llm.generate(whole, max_tokens=50, speculate="ngram").tokens == want and len(want) == 6


@pytest.mark.parametrize("device", ["llm", "captured"])
def test_a_session_holds_what_was_read(
    device: str, guessing: Callable[[list[list[int]]], None], request: pytest.FixtureRequest
) -> None:
    llm: LLM = request.getfixturevalue(device)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 2}
    text = llm.generate(REPEATED, max_tokens=24, speculate="off", **options).tokens
    guessing([[*REPEATED, *text]])
    with llm.session() as plain, llm.session() as drafted:
        for session, kind in ((plain, "off"), (drafted, "ngram")):
            for n, _ in enumerate(session.stream(REPEATED, max_tokens=24, speculate=kind, **options)):
                if n == 12:
                    break
            assert session.tokens == [*REPEATED, *text[:13]]
            assert session._sequence.length == len(session.tokens) - 1
        more = [
            session.generate([3, 4], max_tokens=9, speculate="ngram", **options).tokens for session in (plain, drafted)
        ]
        assert more[0] == more[1]
        snapshot = drafted.snapshot()
        want = drafted.generate(max_tokens=7, speculate="ngram", **options).tokens
        drafted.rewind(snapshot)
        assert drafted.generate(max_tokens=7, speculate="off", **options).tokens == want


def test_a_saved_session_goes_on_as_it_would(
    llm: LLM, guessing: Callable[[list[list[int]]], None], tmp_path: Path
) -> None:
    text = llm.generate(REPEATED, max_tokens=24, speculate="off").tokens
    guessing([[*REPEATED, *text]])
    with llm.session() as session:
        session.generate(REPEATED, max_tokens=20, speculate="ngram")
        session.save(tmp_path / "saved")
        with penstock.restore(tmp_path / "saved", llm) as again:
            assert again.generate(max_tokens=4).tokens == text[20:]
        assert session.generate(max_tokens=4).tokens == text[20:]


def test_metrics_count_drafts(llm: LLM, eager: None) -> None:
    with Scheduler(llm, max_sequences=2) as made:
        done = made.submit(made.request(REPEATED, 20, speculate="ngram", temperature=0.0)).result(60)
        metrics = made.metrics()
    assert metrics.draft_tokens == done.timings.draft_n and metrics.accepted_tokens == done.timings.draft_n_accepted


def test_metrics_count_drafts_of_a_request_that_ends_while_it_waits_for_another_sequence(
    llm: LLM, guessing: Callable[[list[list[int]]], None]
) -> None:
    text = llm.generate(REPEATED, max_tokens=40, speculate="off").tokens
    guessing([[*REPEATED, *text]])
    with Scheduler(llm, max_sequences=1, buffer=2) as made:
        lagging = made.submit(made.request(REPEATED, 40, speculate="ngram"))
        next(lagging)
        while not lagging.timings.draft_n_accepted:
            made.step()
        made.submit(made.request([5], 2)).result(60)
        assert (lagging.state, made.metrics().preemptions) == ("waiting", 1)
        lagging.cancel()
        assert made.metrics().accepted_tokens == lagging.timings.draft_n_accepted


FAMILIES: dict[str, Any] = {
    "gemma4": GEMMA["moe"],
    "deepseek_v3": DEEPSEEK["v3"],
    "llama": LLAMA["window"],
    "lfm2": "tests.models.test_lfm2",
    "kimi_linear": "tests.models.test_kimi_linear",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_have_the_same_text(family: str, llm: LLM, guessing: Callable[[list[list[int]]], None]) -> None:
    """Windows, latent attention, and recurrent states that are copied."""
    config = FAMILIES[family]
    if isinstance(config, str):  # a module that imports this one
        config = next(iter(importlib.import_module(config).CONFIGS.values()))
    llm = LLM(load_random(config, device="cpu", max_context=400).engine, llm.tokenizer, None, ())
    vocab = llm.config.vocab_size
    prompts = [[token % vocab for token in prompt] for prompt in (REPEATED, some_tokens(290, 2))]
    make = functools.partial(llm.generate, prompts, max_tokens=24, temperature=0.7, seed=2)
    want = [done.tokens for done in make(speculate="off")]
    guessing([[*prompt, *tokens] for prompt, tokens in zip(prompts, want, strict=True)])
    found = make(speculate="ngram")
    assert [done.tokens for done in found] == want
    assert all(0 < done.timings.draft_n_accepted < done.timings.draft_n for done in found if len(done.tokens) > 8)


# -- bad input -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_drafted_is_refused(llm: LLM, folder: Path) -> None:
    with pytest.raises(
        InvalidArgument, match=r"^generate: speculate is 'eagle', expected one of off, auto, mtp, ngram"
    ):
        llm.generate([5], speculate="eagle")
    with pytest.raises(InvalidArgument, match=r"^generate: num_draft_tokens is 8, expected 1 to 7: a step verifies"):
        llm.generate([5], num_draft_tokens=8)
    with pytest.raises(DTypeError, match=r"^generate: num_draft_tokens is True, expected an integer"):
        llm.generate([5], num_draft_tokens=True)
    with pytest.raises(InvalidArgument, match=r"^load: speculate is 3, expected one of off"):
        penstock.load(folder, device="cpu", speculate=3)  # type: ignore[arg-type]
    counted = llm.generate([5], max_tokens=3, speculate="ngram", num_draft_tokens=np.int64(3))  # type: ignore[arg-type]
    assert len(counted.tokens) == 3
    with pytest.raises(InvalidArgument, match="speculate is 'mtp', expected another: the model has not a head"):
        penstock.load(folder, device="cpu", speculate="mtp")


# -- a model's own head ----------------------------------------------------------------------------------------------


HEADS: dict[str, Any] = {
    "qwen3_5": moe_config(mtp_num_hidden_layers=1),
    "deepseek_v3": DEEPSEEK["v3"] | {"num_nextn_predict_layers": 1},
}


def with_head(family: str, captures: bool, tokenizer: Tokenizer) -> LLM:
    """A random model with a random head."""
    own = load_random(HEADS[family], device="cpu", max_context=700).engine
    assert own.model.head is not None
    options = {"activations": own.activations, "max_context": 700, "drafts": 7, "speculate": "mtp"}
    return LLM(Engine(own.model, device=CapturingHost() if captures else None, **options), tokenizer, None, ())


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("family", HEADS)
def test_a_head_drafts_and_changes_no_text(family: str, captures: bool, llm: LLM, eager: None) -> None:
    llm = with_head(family, captures, llm.tokenizer)
    prompts = [some_tokens(5), [3, 4] * 10, some_tokens(300, 2)]
    for options in ({}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "seed": 1, "repetition_penalty": 1.1}):
        make = functools.partial(llm.generate, prompts, max_tokens=16, **options)
        want = [done.tokens for done in make(speculate="off")]
        make(speculate="off")  # one answer is short: the gate has to know what steps of all three take
        for count in (1, 3):
            found = make(speculate="mtp", num_draft_tokens=count)
            assert [done.tokens for done in found] == want
            assert all(done.timings.draft_n > 0 for done in found)
        assert [done.tokens for done in make()] == want  # auto


@pytest.mark.parametrize("captures", [False, True])
def test_a_head_of_many_tokens_drafts_the_first_of_them(
    captures: bool, llm: LLM, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which changes no text."""
    monkeypatch.setattr(engine_module, "DRAFT_ROWS", 64)
    few = with_head("qwen3_5", captures, llm.tokenizer)
    drafted: list[int] = []
    draft = Engine.draft

    def noted(self: Engine, asked: list[Any]) -> None:
        draft(self, asked)
        drafted.extend(token for one in asked for token in one.drafts)

    def noted_ahead(self: Engine, runs: list[Any], *more: Any, launch: Any = Engine.launch_ahead) -> Any:
        step = launch(self, runs, *more)
        rows = [self.programs.steps._chain._ahead[run.sequence.slot, 3:] for run in runs]  # type: ignore[union-attr]
        drafted.extend(token for row in rows for token in row.tolist() if token >= 0)
        return step

    monkeypatch.setattr(Engine, "draft", noted)
    monkeypatch.setattr(Engine, "launch_ahead", noted_ahead)
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        want = few.generate(some_tokens(9), max_tokens=16, speculate="off", **options).tokens
        assert few.generate(some_tokens(9), max_tokens=16, speculate="mtp", **options).tokens == want
    assert len(set(drafted)) > 5 and max(drafted) < 64 and VOCAB >= 128
    monkeypatch.setattr(engine_module, "DRAFT_ROWS", VOCAB)
    assert with_head("qwen3_5", captures, llm.tokenizer).engine.drafter._runner.head.rows == VOCAB  # type: ignore[union-attr]


def test_captured_heads_draft_what_exact_ones_do(llm: LLM, eager: None) -> None:
    """Also behind steps that were launched before the token of the last one was known."""
    made = []
    for captures in (False, True):
        llm = with_head("qwen3_5", captures, llm.tokenizer)
        drafted: list[list[int]] = []
        draft = Engine.draft

        def noted(self: Engine, asked: Any, draft: Any = draft, drafted: Any = drafted) -> None:
            draft(self, asked)
            drafted.extend(one.drafts for one in asked)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "draft", noted)
            patch.setattr(Engine, "drafts_ahead", False)  # see test_draft_chain.py
            llm.generate(some_tokens(7), max_tokens=12, temperature=0.9, seed=4, num_draft_tokens=3)
        made.append(drafted)
    assert made[0] and made[0] == made[1]


def test_the_demo_model_accepts_its_heads_drafts(eager: None) -> None:
    """At temperature 0.8 too, since drafts are drawn with the noise of the token itself."""
    llm = penstock.load(device="cpu")
    tale = (Path(penstock.__file__).parent / "demo" / "tale.txt").read_text()
    texts = [tale[start : start + 300] for start in range(0, 4000, 1000)]
    found = [llm.generate(text, max_tokens=40, temperature=0.8, seed=7, num_draft_tokens=2).timings for text in texts]
    tries, accepted = (sum(one.draft_places[0][i] for one in found) for i in (0, 1))
    assert accepted >= 0.55 * tries > 20


def test_rows_that_waited_make_the_same_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait, and in however many runs they are computed, with the first draft or before."""
    monkeypatch.setattr(speculate, "_REST", 0)
    every_sixth = lambda self, counts, found, room: [2 * (next(steps) % 6 == 0) for _ in counts]  # noqa: E731
    monkeypatch.setattr(speculate.Speculator, "_tried", every_sixth)
    made: list[list[list[int]]] = []
    for rows, size in ((256, 16 << 20), (3, 16 << 20), (4, 0)):
        steps = itertools.count(1)
        monkeypatch.setattr(draft_head, "_MOST_ROWS", rows)
        monkeypatch.setattr(draft_head, "_MOST_BYTES", size)
        llm = penstock.load(device="cpu", speculate="mtp", num_draft_tokens=2)
        drafted: list[list[int]] = []
        draft = Engine.draft

        def noted(self: Engine, asked: list, drafted: list = drafted, draft: Callable = draft) -> None:
            draft(self, asked)
            drafted += [list(one.drafts) for one in asked]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "draft", noted)
            llm.generate("The king and the fox went into the forest, and", max_tokens=40)
        made.append(drafted)
    assert len(made[0]) > 1 and made[0] == made[1] == made[2]


def test_many_rows_of_several_sequences_wait_for_one_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one run of the head takes."""
    steps = itertools.count()
    late = lambda self, counts, found, room: [2 * (next(steps) >= 60) for _ in counts]  # noqa: E731
    monkeypatch.setattr(speculate, "_REST", 0)
    monkeypatch.setattr(speculate.Speculator, "_tried", late)
    llm = penstock.load(device="cpu", speculate="mtp")
    prompts = [some_tokens(count, seed) for seed, count in enumerate((240, 230, 220, 210, 9, 600))]
    want = [done.tokens for done in llm.generate(prompts, max_tokens=30, speculate="off")]
    found = llm.generate(prompts, max_tokens=30)
    assert [done.tokens for done in found] == want and all(done.timings.draft_n for done in found)


def test_rows_of_a_verified_run_have_the_bits_of_single_steps_in_bfloat16() -> None:
    engine = penstock.load(device="cpu", dtype="bfloat16", max_context=512).engine
    alone, together = engine.open(), engine.open()
    for sequence in (alone, together):
        engine.prefill(sequence, some_tokens(21))
    for count in (2, 3, 5):
        tokens = np.array(some_tokens(count, count), np.int32)
        want = np.concatenate([engine.step([Run(alone, tokens[n : n + 1])]) for n in range(count)])  # type: ignore[arg-type]
        np.testing.assert_array_equal(engine.step([Run(together, tokens, "all", keep=True)]), want)
        engine.accept(together, count)


def check_thousand_texts(llm: LLM, kinds: Sequence[str]) -> None:
    """Prompts, seeds, temperatures and truncations, many at a time."""
    tale = (Path(penstock.__file__).parent / "demo" / "tale.txt").read_text()
    starts = np.random.default_rng(0).integers(0, len(tale) - 400, 250).tolist()
    draws: list[dict[str, Any]] = [{}, {"temperature": 0.5}, {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02}]
    for number, draw in enumerate([*draws, {"temperature": 1.2, "top_k": 50}]):
        for first in range(0, len(starts), 25):
            prompts = [tale[start : start + 40 + start % 350] for start in starts[first : first + 25]]
            options = {"max_tokens": 24, "seed": 1000 * number + first, **draw}
            want = [done.tokens for done in llm.generate(prompts, speculate="off", **options)]
            for kind in kinds:
                found = llm.generate(prompts, speculate=kind, **options)
                assert [done.tokens for done in found] == want
                assert kind != "mtp" or any(done.timings.draft_n_accepted for done in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "tiny-qwen3.5-moe", "tiny-deepseek-v3", "tiny-gemma4-moe"])
def test_a_thousand_texts_are_the_same(name: str | None, eager: None) -> None:
    """The demo model and, where TRAINED_MODELS names a folder of them, trained ones, with their heads and n-grams."""
    folder = trained(name) if name is not None else None
    head = None if folder is None else folder.with_name(f"{name}-mtp")
    head = None if head is None or not head.is_dir() else head
    with penstock.load(folder, device="cpu", draft_model=None if head is None else str(head)) as llm:
        check_thousand_texts(llm, ["ngram", *(["mtp"] if llm.engine.drafter is not None else [])])
