"""Programs on the GPU: fused equals unfused, replays equal single calls, tokens drawn there equal those of the host."""

import functools
from collections.abc import Iterator

import pytest
import torch

import penstock
from penstock.api import LLM, load_random
from penstock.backends.cuda.runtime.compile import compile_all
from penstock.engine.engine import Engine
from penstock.engine.sampling import Sampler, SamplingParams
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


def drawn(engine: Engine, sampler: Sampler, prompt: list[int], count: int, ahead: bool = True) -> list[int]:
    """Tokens drawn on the device, each step launched before the one before has been seen, if it may."""
    sequence = engine.open()
    tokens = [sampler.sample(engine.prefill(sequence, prompt), sequence.length).token]
    flight = engine.draw([sequence], tokens, [sampler.row], sampler.mode)
    while True:
        more = len(tokens) + 1 < count
        following = None
        if more and ahead and engine.continues([sequence]):
            following = engine.draw([sequence], None, [sampler.row], sampler.mode)
        tokens.append(flight.tokens()[0])
        if not more:
            break
        flight = following or engine.draw([sequence], tokens[-1:], [sampler.row], sampler.mode)
    engine.close(sequence)
    return tokens


def sampled(engine: Engine, sampler: Sampler, prompt: list[int], count: int) -> list[int]:
    """Tokens drawn on the host from logits."""
    sequence = engine.open()
    logits, tokens = engine.prefill(sequence, prompt), []
    while True:
        tokens.append(sampler.sample(logits, sequence.length).token)
        if len(tokens) == count:
            break
        logits = engine.decode([sequence], tokens[-1:])[0]
    engine.close(sequence)
    return tokens


@functools.cache
def small() -> LLM:
    return made(SMALL["qwen3_5"], "cuda", dtype="float32")


@pytest.mark.parametrize("name", DRAWS if GPU else [pytest.param("full", marks=pytest.mark.slow)])
def test_cuda_draws_the_tokens_of_the_host(name):
    engine = small().engine
    params, count = SamplingParams(**DRAWS[name]), 40 if GPU else 3
    want = sampled(engine, Sampler(params, small().config.vocab_size), some_tokens(4), count)
    assert drawn(engine, Sampler(params, small().config.vocab_size), some_tokens(4), count) == want
    if GPU:
        assert drawn(engine, Sampler(params, small().config.vocab_size), some_tokens(4), count, ahead=False) == want


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["qwen3_5", "gemma4-moe", "deepseek_v3-v3", "llama-window"])
def test_cuda_a_thousand_replays_give_the_tokens_of_single_steps(name, monkeypatch):
    """Across pages and buckets of the block table; single steps are launched call by call, never captured."""
    config = {**EVERY[name], "max_position_embeddings": 2048}
    llm = load_random(config, device="cuda", max_context=1500)
    engine, vocab = llm.engine, llm.config.vocab_size
    replayed = drawn(engine, Sampler(SamplingParams(), vocab), some_tokens(50), 1040)
    assert any(runner._replays for runner in engine.programs._kept.values())

    def listed(calls):
        kept = tuple(calls)
        return lambda: [call() for call in kept]

    monkeypatch.setattr(engine.device, "capture", listed)
    engine.programs._kept.clear()
    assert sampled(engine, Sampler(SamplingParams(), vocab), some_tokens(50), 1040) == replayed
    widths = {key[2] for key in engine.programs._kept if key[0] == "decode"}
    assert len(widths) == 2


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
