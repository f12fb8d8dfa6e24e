"""Steps in a few captured sizes: any mix of tokens runs in one of them with the numbers of exact sizes."""

import itertools
from typing import Any

import numpy as np
import pytest

from penstock.api import LLM, load_random
from penstock.engine.buckets import ANSWERS, MIXED, Bucket, BucketedSteps
from penstock.engine.engine import Engine
from penstock.engine.request import Request
from penstock.engine.sampling import SamplingParams
from penstock.engine.scheduler import Scheduler
from penstock.engine.steps import Run
from penstock.graph import Program, SizedProgram
from tests.engine.capturing import CapturingHost
from tests.models.common import moe_config, some_tokens
from tests.models.test_deepseek_v3 import CONFIGS as DEEPSEEK
from tests.models.test_gemma4 import CONFIGS as GEMMA
from tests.models.test_llama import CONFIGS as LLAMA

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": moe_config(),
    "gemma4": GEMMA["moe"],
    "deepseek_v3": DEEPSEEK["v3"],
    "llama": LLAMA["window"],
}


def engines(config: dict[str, Any], sequences: int = 5, max_context: int = 700) -> tuple[Engine, Engine]:
    """The same model on a device that captures, and on the CPU."""
    exact = load_random(config, device="cpu", max_context=max_context).engine
    device = CapturingHost()
    device.default_sequences = sequences
    return Engine(exact.model, activations=exact.activations, max_context=max_context, device=device), exact


def steps_of(engine: Engine) -> BucketedSteps:
    assert engine.programs is not None and isinstance(engine.programs.steps, BucketedSteps)
    return engine.programs.steps


@pytest.mark.parametrize("family", FAMILIES)
def test_any_mix_has_the_numbers_of_exact_sizes(family: str, rng: np.random.Generator) -> None:
    """Prompts and answers in one step, answers alone, all rows wanted: rows beyond them change nothing."""
    both = engines(FAMILIES[family])
    opened = [[engine.open() for _ in range(5)] for engine in both]
    for number in range(14):
        runs: list[list[Run]] = [[], []]
        for i in rng.permutation(5)[: rng.integers(1, 6)]:
            count = 1 if number % 3 == 0 or rng.random() < 0.4 else int(rng.integers(1, 80))
            count = min(count, 256 - opened[0][i].length % 256)
            ids = rng.integers(0, 200, count).astype(np.int32)
            wanted = ("last", "all", "none")[rng.integers(3)] if number % 2 else "last"
            for own, sequences in zip(runs, opened, strict=True):
                own.append(Run(sequences[i], ids, wanted, prompt=count > 1))
        got, want = (engine.step(own) for engine, own in zip(both, runs, strict=True))
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            np.testing.assert_array_equal(got, want)


def test_the_next_larger_size_is_used() -> None:
    engine, _ = engines(LLAMA["tied"], sequences=24)
    engine.allocate(sequences=24)
    steps = steps_of(engine)
    assert steps.answers == (1, 2, 4, 8, 16, 24)
    assert steps.bucket(1, 1) == Bucket(1, 1, True) and steps.bucket(17, 17) == Bucket(24, 24, True)
    assert steps.bucket(2, 1) == Bucket(16, 24, False) and steps.bucket(2048, 3) == Bucket(2048, 24, False)
    assert len(ANSWERS) + len(MIXED) <= 48
    assert all(b <= a * 4 / 3 + 1 for a, b in itertools.pairwise(MIXED))
    tokens = np.arange(10, 1001)
    padded = np.array([steps.bucket(int(n), 1).rows for n in tokens])
    assert (padded - tokens).sum() < 0.15 * padded.sum()


def test_many_wanted_rows_are_taken_in_passes() -> None:
    engine, exact = engines(LLAMA["tied"], max_context=600)
    tokens = some_tokens(511)
    got, want = (each.prefill(each.open(), tokens, every=True) for each in (engine, exact))
    np.testing.assert_array_equal(got[:256], want[:256])
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()  # one chunk here, two there


def test_nothing_is_traced_compiled_or_captured_after_ready(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """200 requests of random lengths, options and company."""
    engine, _ = engines(moe_config(num_hidden_layers=4), max_context=512)
    device: Any = engine.device
    llm = LLM(engine, None, None, ())
    scheduler = Scheduler(llm, max_sequences=5, queue=300, memory=64 << 20)
    engine.prepare()
    steps = steps_of(engine)
    assert steps.measured and device.captured >= len(steps.answers) + len(steps.mixed)
    before = device.captured, device.compiled
    for kind in (Program, SizedProgram):
        monkeypatch.setattr(kind, "__init__", lambda *_, **__: pytest.fail("a program was traced"))
    options = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "logprobs": 2},
        {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5},
        {"logit_bias": {3: 2.0}},
    ]
    handles = []
    for n in range(200):
        length, most = int(rng.integers(1, 380)), int(rng.integers(1, 5))
        params = SamplingParams(**options[n % 5])
        handles.append(scheduler.submit(Request(some_tokens(length, seed=n), params, most, eos=frozenset())))
        if rng.random() < 0.2:
            for _ in range(int(rng.integers(1, 9))):
                scheduler.step()
    while not scheduler.idle:
        scheduler.step()
    assert (device.captured, device.compiled) == before
    assert scheduler.metrics().finished == len(handles) == 200
    scheduler.close()


def test_a_step_keeps_to_its_time(rng: np.random.Generator) -> None:
    """Chunks of prompts beside answers are as many tokens as were measured to take no longer."""
    engine, _ = engines(LLAMA["tied"], max_context=2048)
    steps = steps_of(engine)
    engine.allocate(sequences=5)
    steps._bind_anew()
    steps._seconds = {Bucket(rows, 5, False): rows / 10_000 for rows in steps.mixed}
    assert steps.tokens_within(0.06) == 512 and steps.tokens_within(1.0) == 4096 and steps.tokens_within(1e-9) == 16


def chunks_of_a_prompt(monkeypatch: pytest.MonkeyPatch, engine: Engine, tokens: int, answers: int) -> list[int]:
    """The chunks in which a prompt is read, alone or beside answers, where 40 tokens take a millisecond."""
    scheduler = Scheduler(LLM(engine, None, None, ()), max_sequences=2, prefix_cache=False)
    steps = steps_of(engine)
    steps._bind_anew()
    steps._seconds = {Bucket(rows, 2, False): rows / 40_000 for rows in steps.mixed}
    found: list[list[int]] = []
    launch = engine.launch

    def watched(runs: Any, *how: Any) -> Any:
        found.append([len(run.tokens) for run in runs if run.prompt])
        return launch(runs, *how)

    handles = [scheduler.submit(Request([5, 6], SamplingParams(), 40, eos=frozenset())) for _ in range(answers)]
    scheduler.step()
    monkeypatch.setattr(engine, "launch", watched)
    handles.append(scheduler.submit(Request(some_tokens(tokens), SamplingParams(), 1, eos=frozenset())))
    while not scheduler.idle:
        scheduler.step()
    assert [handle.result(1).finish_reason for handle in handles] == ["length"] * (answers + 1)
    scheduler.close()
    return [count for step in found for count in step]


def test_a_prompt_that_delays_no_answer_goes_in_larger_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the time of a step beside answers, which is 60 ms: 4096 tokens, and 7 pages of 2047."""
    engine, _ = engines(LLAMA["tied"] | {"max_position_embeddings": 8192}, sequences=2, max_context=8192)
    assert chunks_of_a_prompt(monkeypatch, engine, 4096 + 300, answers=0) == [4096, 300]
    assert chunks_of_a_prompt(monkeypatch, engine, 4096 + 300, answers=1) == [1792, 1792, 812]


def test_a_prompt_never_has_more_pages_of_a_window_than_were_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache for one sequence: a chunk of 4096 tokens would need pages that there are none of."""
    engine, _ = engines(LLAMA["window"] | {"max_position_embeddings": 8192}, sequences=1, max_context=8192)
    engine.allocate(sequences=1)
    assert max(chunks_of_a_prompt(monkeypatch, engine, 7000, answers=0)) == 2048
