"""Programs on the GPU: fused equals unfused, replays equal single calls, tokens drawn there equal those of the host."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

import penstock
from penstock.api import LLM, load_random
from penstock.backends.cuda.runtime.compile import compile_all
from penstock.engine import cache
from penstock.engine.engine import Engine
from penstock.engine.sampling import Sampler, SamplingParams, mode_of
from penstock.engine.steps import CHAINED, Run
from penstock.ops.device import PendingStep
from tests.gpu.common import GPU
from tests.gpu.test_models import EVERY, SMALL, made
from tests.graph.test_models import unfused
from tests.models.common import error, small_config, some_tokens, write_model
from tests.models.made import decoded

DRAWS = {
    "greedy": {},
    "plain": {"temperature": 0.9, "seed": 5},
    "min_p": {"temperature": 1.3, "min_p": 0.1, "seed": 2**64 - 3},
    "top_k": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 1},
    "full": {"temperature": 1.1, "top_k": 100, "top_p": 0.95, "min_p": 0.01, "seed": 1},
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", EVERY)
def test_cuda_fused_equals_unfused(name):
    llm = made(EVERY[name], "cuda", dtype="float32")
    plain, tokens = unfused(llm), some_tokens(60)
    # each is within 5e-5 of the definitions (test_models.py); random models amplify the roundings that fusion saves
    assert error(decoded(llm, tokens, 30), decoded(plain, tokens, 30)) <= 5e-5
    assert error(llm.logits(tokens), plain.logits(tokens)) <= 5e-5


class Job(NamedTuple):
    """A prompt and how many tokens are drawn behind it."""

    sampler: Sampler
    prompt: list[int]
    count: int


def drawn(engine: Engine, jobs: Sequence[Job], chained: bool = True) -> list[list[int]]:
    """Tokens of each job drawn on the device. A job joins where one has ended, and its prompt is a step of its own.

    chained: each step is launched before the tokens of the one before are read.
    """
    slots = engine.caches.slots
    sequences: dict[int, cache.Sequence] = {}
    tokens: list[list[int]] = [[] for _ in jobs]
    started = [0] * len(jobs)  # tokens that are drawn or under way
    pending: list[tuple[PendingStep, list[int]]] = []
    joined = 0

    def launch(whose: list[int], runs: list[Run]) -> None:
        samplers = [jobs[n].sampler for n in whose]
        pending.append((engine.launch(runs, [sampler.row for sampler in samplers], mode_of(samplers)), whose))
        for n in whose:
            started[n] += 1
            if started[n] == jobs[n].count:
                engine.close(sequences.pop(n))
        while len(pending) > int(chained):
            step, others = pending.pop(0)
            for n, token in zip(others, step.tokens(), strict=True):
                tokens[n].append(token)

    while sequences or joined < len(jobs):
        if joined < len(jobs) and len(sequences) < slots:
            sequences[joined] = sequence = engine.open()
            joined += 1
            launch([joined - 1], [Run(sequence, np.array(jobs[joined - 1].prompt, np.int32), prompt=True)])
        if sequences:
            known = {n: CHAINED - sequence.slot if chained else tokens[n][-1] for n, sequence in sequences.items()}
            runs = [Run(sequence, np.array([known[n]], np.int32)) for n, sequence in sequences.items()]
            launch(list(sequences), runs)
    for step, others in pending:
        for n, token in zip(others, step.tokens(), strict=True):
            tokens[n].append(token)
    return tokens


def sampled(engine: Engine, job: Job) -> list[int]:
    """Tokens drawn on the host from logits."""
    sequence = engine.open()
    logits, tokens = engine.prefill(sequence, job.prompt), []
    while True:
        tokens.append(job.sampler.sample(logits, sequence.length).token)
        if len(tokens) == job.count:
            break
        logits = engine.decode([sequence], tokens[-1:])[0]
    engine.close(sequence)
    return tokens


@pytest.mark.parametrize("name", DRAWS if GPU else [pytest.param("full", marks=pytest.mark.slow)])
def test_cuda_draws_the_tokens_of_the_host(name):
    """Chained and not, in slots that are used again, across pages; the other jobs of a step are greedy."""
    llm = made(EVERY["qwen3_5"] if GPU else SMALL["llama"], "cuda", dtype="float32", deterministic=True)
    llm.engine.allocate(sequences=3 if GPU else 2)
    sizes = [(4, 40), (250, 12), (9, 1), (1, 60), (30, 20), (200, 90)] if GPU else [(1, 3), (1, 2), (1, 2)]

    def jobs() -> list[Job]:
        params = [SamplingParams(**DRAWS[name] if n != 1 else {}) for n in range(len(sizes))]
        return [
            Job(Sampler(own, llm.config.vocab_size), some_tokens(length, seed=n), count)
            for n, (own, (length, count)) in enumerate(zip(params, sizes, strict=True))
        ]

    want = [sampled(llm.engine, job) for job in jobs()]
    assert drawn(llm.engine, jobs()) == want
    if GPU:
        assert drawn(llm.engine, jobs(), chained=False) == want
    assert llm.engine.caches.slots_used == 0


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["qwen3_5", "gemma4-moe", "deepseek_v3-v3", "llama-window"])
def test_cuda_a_thousand_replays_give_the_tokens_of_single_steps(name, monkeypatch):
    """Across pages; single steps are launched call by call, never captured."""
    config = {**EVERY[name], "max_position_embeddings": 2048}
    llm = load_random(config, device="cuda", max_context=1500)
    engine, vocab = llm.engine, llm.config.vocab_size
    engine.allocate(sequences=2)
    (replayed,) = drawn(engine, [Job(Sampler(SamplingParams(), vocab), some_tokens(50), 1040)])
    steps = engine.programs.steps
    assert len([whole for whole in steps._wholes.values() if whole.captured]) == 2  # up to 1024 positions, and beyond

    def listed(calls):
        kept = tuple(calls)
        return lambda: [call() for call in kept]

    monkeypatch.setattr(engine.device, "capture", listed)
    steps.unbind()
    assert sampled(engine, Job(Sampler(SamplingParams(), vocab), some_tokens(50), 1040)) == replayed


@pytest.mark.cuda
def test_cuda_everything_is_captured_before_the_first_request():
    llm = load_random(EVERY["qwen3_5"], device="cuda", dtype="float32", max_context=1500)
    engine = llm.engine
    engine.allocate(sequences=5)
    engine.prepare()
    steps = engine.programs.steps
    assert steps.measured and all(runner.captured for runner in (*steps._runners.values(), *steps._wholes.values()))
    assert engine.caches.slots_used == 0
    made = len(steps._runners), len(steps._wholes)
    jobs = [Job(Sampler(SamplingParams(), llm.config.vocab_size), some_tokens(n, seed=n), 9) for n in (3, 40, 700)]
    assert drawn(engine, jobs) == [sampled(engine, job) for job in jobs]
    assert (len(steps._runners), len(steps._wholes)) == made


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_model(tmp_path_factory.mktemp("small"), small_config())
    return penstock.load(folder, device="cuda", max_context=600, deterministic=True)


def answers(llm: LLM, prompts: list[list[int]], max_tokens: int, **options: object) -> list[list[int]]:
    return [c.tokens for c in llm.generate(prompts, max_tokens=max_tokens, **options)]


@pytest.mark.cuda
@pytest.mark.parametrize("name", DRAWS)
def test_cuda_generation_ahead_of_the_host_gives_the_host_s_texts(name, text_model, monkeypatch):
    """Several requests of different lengths, with ends on the way, against the path that reads logits."""
    prompts = [some_tokens(n, seed=n) for n in (3, 40, 250, 9, 100)]
    got = [answers(text_model, prompts, limit, **DRAWS[name]) for limit in (1, 2, 30)]
    monkeypatch.setattr(text_model.engine.device, "samples_tokens", False)
    want = [answers(text_model, prompts, limit, **DRAWS[name]) for limit in (1, 2, 30)]
    assert got == want


@pytest.mark.cuda
def test_cuda_generation_leaves_nothing_behind(text_model):
    caches = text_model.engine.caches
    stream: Iterator = text_model.stream(some_tokens(5), max_tokens=50)
    for _ in range(3):
        next(stream)
    stream.close()
    text_model.generate([some_tokens(5)] * 3, max_tokens=20, stop=["e"])
    assert len(caches._free_slots) == caches._slots and caches.pools[None].used == 0


@pytest.mark.cuda
def test_cuda_session_is_where_its_text_ends(text_model):
    """A session's steps are not launched ahead: its state is that of the tokens it has shown."""
    session = text_model.session()
    session.append(some_tokens(20))
    snapshot = session.snapshot()
    whole = session.generate(max_tokens=24).tokens
    session.rewind(snapshot)
    parts = [token for n in (5, 1, 18) for token in session.generate(max_tokens=n).tokens]
    assert parts == whole


@pytest.mark.cuda
def test_cuda_batch_grows_and_shrinks(text_model):
    prompts = [some_tokens(n + 1, seed=n) for n in range(11)]
    together = answers(text_model, prompts, 12)
    assert together == [text_model.generate(prompt, max_tokens=12).tokens for prompt in prompts]


@pytest.mark.cuda
def test_cuda_compile_all_compiles_and_runs_nothing():
    x = torch.randn(7, 333, device="cuda", dtype=torch.float16)
    out = torch.full_like(x, torch.nan)
    call = functools.partial(penstock.ops.swiglu, x, x, out=out)
    compile_all([call])
    assert out.isnan().all()
    call()
    assert not out.isnan().any()
