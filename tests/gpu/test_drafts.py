"""Steps that verify, accept and draft on the GPU by themselves."""

from typing import Any

import numpy as np
import pytest

from penstock.api import LLM, load_random
from penstock.engine.draft_gate import DraftGate
from penstock.engine.engine import Engine
from penstock.engine.request import Request
from penstock.engine.sampling import SamplingParams
from penstock.engine.scheduler import Scheduler
from tests.engine.test_speculate import HEADS
from tests.models.common import small_config, some_tokens
from tests.models.made import decoded


def made(config: dict[str, Any]) -> LLM:
    options = {"dtype": "float32", "max_context": 600, "deterministic": True, "speculate": "mtp"}
    return load_random(config, device="cuda", **options)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate takes what requests allow."""
    monkeypatch.setattr(DraftGate, "drafts", lambda self, answers: min(one.most for one in answers))


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
    # the first of the prompt, one without drafts, then of each step the token behind the drafts that count
    places = [0, 1, *range(1 + drafts, count, drafts)]
    assert all(own[place] for place in places)


def test_text_and_states_in_the_interpreter() -> None:
    llm = made(small_config(mtp_num_hidden_layers=1, vocab_size=64))
    llm.engine.allocate(sequences=2)
    check_text(llm, [[1, 2], [3]], 3, 1, temperature=0.8, seed=3)
    check_accepted(llm, [5, 6], 6, (1.0, 0.0))


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
def test_cuda_sizes_with_drafts_are_captured_and_measured() -> None:
    llm = load_random(HEADS["qwen3_5"], device="cuda", max_context=600, speculate="auto")
    llm.engine.allocate(sequences=4)
    llm.engine.prepare()
    steps: Any = llm.engine.programs.steps  # type: ignore[union-attr]
    assert [sorted(steps.draft_seconds(count)) for count in (1, 2, 4, 8)] == [[0, 1, 3]] * 3 + [[]]
    assert all(runner.captured for runner in steps._drafting.values())
    assert np.all([took > 0 for count in (1, 2, 4) for took in steps.draft_seconds(count).values()])
