"""Steps that verify, accept and draft on the GPU by themselves."""

from typing import Any

import numpy as np
import pytest

import penstock
from penstock import api
from penstock.api import LLM, load_random
from penstock.engine.draft_gate import DraftGate
from penstock.engine.engine import Engine
from penstock.engine.rank import Rank
from penstock.engine.ranks import Follower
from penstock.engine.request import Request
from penstock.engine.sampling import SamplingParams
from penstock.engine.scheduler import Scheduler
from penstock.engine.speculate import StepCosts
from penstock.engine.steps import Run
from penstock.models.split import Mesh
from tests.engine.test_speculate import HEADS, check_thousand_texts
from tests.models.common import error, small_config, some_tokens
from tests.models.made import decoded
from tests.parallel.streamed import TurnGroup, Turns


def made(config: dict[str, Any]) -> LLM:
    options = {"dtype": "float32", "max_context": 600, "deterministic": True, "speculate": "mtp"}
    return load_random(config, device="cuda", **options)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate takes what requests allow."""
    monkeypatch.setattr(DraftGate, "drafts", lambda self, answers, sizes: min(one.most for one in answers))


def answered(scheduler: Scheduler, prompts: list[list[int]], count: int, options: Any, **drafting: Any) -> list[Any]:
    """What each of these prompts gets, all at once."""
    params = SamplingParams(**{"seed": 1, **options})
    requests = [Request(prompt, params, count, frozenset(), **drafting) for prompt in prompts]
    return [handle.result(600) for handle in [scheduler.submit(request, buffer=1 << 20) for request in requests]]


def check_text(llm: LLM, prompts: list[list[int]], count: int, drafts: int, **options: Any) -> None:
    launched = []
    with Scheduler(llm, prefix_cache=False, allocate=False) as made, pytest.MonkeyPatch.context() as patch:
        launch = Engine.launch_ahead
        patch.setattr(Engine, "launch_ahead", lambda *args: (launched.append(args), launch(*args))[1])
        want = answered(made, prompts, count, options, speculate="off")
        assert not launched
        found = answered(made, prompts, count, options, speculate="mtp", num_draft_tokens=drafts)
    assert [done.tokens for done in found] == [done.tokens for done in want]
    assert launched and all(done.timings.draft_n > 0 for done in found)


def check_accepted(llm: LLM, prompt: list[int], count: int, acceptance: tuple[float, ...]) -> None:
    """Made-up drafts that all count, but for the last: all behind them are the model's own, of the text as it is."""
    drafts = len(acceptance)
    drafting: dict[str, Any] = {"speculate": "mtp", "num_draft_tokens": drafts, "fixed_drafts": True}
    with Scheduler(llm, prefix_cache=False, allocate=False) as made:
        (done,) = answered(made, [prompt], count, {}, acceptance=acceptance, **drafting)
    assert all(hits == tries for tries, hits in done.timings.draft_places[: drafts - 1]) and done.timings.draft_n > 0
    logits = decoded(llm, [*prompt, *done.tokens[:-1]], len(prompt))
    best = logits.argmax(1)  # where a draft is that token and does not count, the one behind it stands for it
    own = [token in (one, (one + 1) % logits.shape[1]) for one, token in zip(best, done.tokens, strict=True)]
    # the first of the prompt, one without drafts by a device that drafts by itself, then of each step the token behind
    # the drafts that count
    places = [0, *range(1 if llm.engine.drafts_ahead else drafts, count, drafts)]
    assert all(own[place] for place in places)


def test_text_and_states_in_the_interpreter() -> None:
    llm = made(small_config(mtp_num_hidden_layers=1, vocab_size=64))
    llm.engine.allocate(sequences=2)
    check_text(llm, [[1, 2], [3]], 3, 1, temperature=0.8, seed=3)
    check_accepted(llm, [5, 6], 6, (1.0, 0.0))


def test_steps_without_an_active_row_change_nothing_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with which drafting is captured, beside an answer that goes on behind them as it would."""
    monkeypatch.setattr("penstock.engine.draft_head._FILLED_ROWS", (8,))
    llm = made(small_config(mtp_num_hidden_layers=1, vocab_size=64))
    engine = llm.engine
    engine.allocate(sequences=1)
    want = engine.open()
    logits = [engine.prefill(want, [5, 6, 7]), *engine.decode([want], [8])]
    engine.close(want)
    found = engine.open()
    first = engine.prefill(found, [5, 6, 7])
    engine.prepare_drafting(1, (1,), ("greedy",))
    steps: Any = engine.programs.steps  # type: ignore[union-attr]
    assert steps.drafting_prepared(1, (1,), "greedy") and not steps.draft_seconds(1)
    for got, one in zip([first, *engine.decode([found], [8])], logits, strict=True):
        np.testing.assert_array_equal(got, one)


def check_kept(engine: Engine) -> None:
    """Logits behind two of three tokens that were verified are those behind two that were read."""
    kept, read = engine.open(), engine.open()
    engine.prefill(kept, [5, 6])
    engine.step([Run(kept, np.array([7, 8, 9], np.int32), "all", keep=True)])
    engine.accept(kept, 2)
    engine.prefill(read, [5, 6, 7, 8])
    got, want = engine.decode([kept, read], [3, 3])
    assert error(got, want) <= 5e-6


class ThroughHost(Turns):
    """Ranks whose exchanges are not captured."""

    capturable = False


def on_two_ranks(config: dict[str, Any], work: Any) -> None:
    """Do something with a random model on rank 0 while rank 1 follows, both on one device."""
    options = {"dtype": "float32", "activations": "float32", "state_dtype": "float32", "expert_cache": "auto"}
    given = {"config": config, "device": "cuda", "max_context": 64, "threads": 1, "seed": 0, "deterministic": True}
    given |= {"on_device": False, "cache_memory": None, "speculate": "mtp", "num_draft_tokens": None, **options}
    turns = ThroughHost(2)
    groups = TurnGroup.all(turns)

    def one(number: int) -> Any:
        about: Any = groups[number], Mesh(number, 2), {**given, "device": "cpu"}, 2, None
        rank = Rank(*about)
        llm = api._load_random(given, None, rank)
        rank.agree(llm.engine)
        if number:
            return Follower(llm.engine, about[0]).run()
        try:
            return work(llm)
        finally:
            llm.engine.leader.end()  # type: ignore[union-attr]

    turns.run(one)
    assert turns.exchanged[0] == turns.exchanged[1]


def test_the_head_of_rank_0_drafts_in_the_interpreter() -> None:
    """The host reads drafts and says how many count; the states of both ranks wait for that."""

    def work(llm: LLM) -> None:
        assert not llm.engine.drafts_ahead
        llm.engine.allocate(sequences=2)
        check_accepted(llm, [5, 6], 4, (1.0, 0.0))
        check_kept(llm.engine)

    quantized = {"linear_value_head_dim": 32, "quantization": {"bits": 4, "group_size": 32}}
    on_two_ranks(small_config(mtp_num_hidden_layers=1, vocab_size=64, **quantized), work)


@pytest.mark.cuda
def test_cuda_ranks_have_the_text_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes on one GPU."""
    monkeypatch.setenv("PENSTOCK_RANK_BACKEND", "gloo")
    monkeypatch.setattr(StepCosts, "__call__", lambda self, tokens: 1.0)
    given: dict[str, Any] = {"device": "cuda", "dtype": "float32", "deterministic": True, "max_context": 600}
    prompts = [some_tokens(n, n) for n in (3, 300, 40)]
    with penstock.load(tensor_parallel_size=2, **given) as llm:
        for options in ({}, {"temperature": 0.8, "seed": 3}):
            want = llm.generate(prompts, max_tokens=24, speculate="off", **options)
            found = llm.generate(prompts, max_tokens=24, speculate="mtp", num_draft_tokens=3, **options)
            assert [done.tokens for done in found] == [done.tokens for done in want]
            assert all(done.timings.draft_n > 0 for done in found)


@pytest.mark.cuda
@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_cuda_text_and_states(family: str, drafts: int) -> None:
    llm = made(HEADS[family])
    llm.engine.allocate(sequences=5)
    prompts = [some_tokens(n, n) for n in (3, 250, 40, 9, 100)]
    for options in ({}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "top_k": 30, "top_p": 0.9, "seed": 4}):
        for count in (1, 5):
            check_text(llm, prompts[:count], 40, drafts, **options)
    check_accepted(llm, some_tokens(250), 60, (*[1.0] * (drafts - 1), 0.0))


@pytest.mark.cuda
def test_cuda_a_thousand_texts_are_the_same() -> None:
    with penstock.load(device="cuda", deterministic=True) as llm:
        check_thousand_texts(llm, ["mtp", "ngram"])


@pytest.mark.cuda
def test_cuda_sizes_with_drafts_are_captured_and_measured() -> None:
    llm = load_random(HEADS["qwen3_5"], device="cuda", max_context=600, speculate="auto")
    llm.engine.allocate(sequences=4)
    llm.engine.prepare()
    steps: Any = llm.engine.programs.steps  # type: ignore[union-attr]
    assert [sorted(steps.draft_seconds(count)) for count in (1, 2, 4, 8)] == [[0, 1, 3, 7]] * 3 + [[]]
    assert all(runner.captured for runner in steps._drafting.values())
    assert np.all([took > 0 for count in (1, 2, 4) for took in steps.draft_seconds(count).values()])
    head: Any = llm.engine.drafter._runner  # type: ignore[union-attr]
    fills = {(rows, count) for form, rows, count, _ in head._runners if form == "fill"}
    assert fills == {(8, 1), (64, 1), (256, 1), (8, 4), (64, 4), (256, 4), (512, 4)}
    assert all(runner.captured for runner in head._runners.values())
