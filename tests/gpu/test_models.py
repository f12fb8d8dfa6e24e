"""Whole models on the GPU: every family against the definitions, alone and in batches; what the engine keeps there."""

from typing import Any

import numpy as np
import pytest

import penstock
from penstock.api import LLM, load_random
from penstock.engine.hooks import Hooks
from penstock.engine.nonfinite import first_nonfinite
from penstock.engine.request import Request
from penstock.engine.sampling import Sampler, SamplingParams
from penstock.engine.steps import Run
from penstock.errors import OutOfMemory
from tests.gpu.common import GPU
from tests.models.common import VOCAB, error, moe_config, next_config, small_config, some_tokens
from tests.models.made import decoded, in_pieces
from tests.models.test_deepseek_v3 import CONFIGS as DEEPSEEK
from tests.models.test_gemma3 import CONFIGS as GEMMA3
from tests.models.test_gemma3n import CONFIGS as GEMMA3N
from tests.models.test_gemma4 import CONFIGS as GEMMA
from tests.models.test_gemma4 import FULL, SLIDING
from tests.models.test_gpt_oss import CONFIG as GPT_OSS
from tests.models.test_kimi_linear import CONFIGS as KIMI
from tests.models.test_kimi_linear import config_of as kimi_config
from tests.models.test_lfm2 import CONFIGS as LFM2
from tests.models.test_llama import CONFIGS as LLAMA

MXFP4 = GPT_OSS | {"vocab_size": VOCAB, "quantization": {"mode": "mxfp4"}}
# cut short for the interpreter, which takes milliseconds per program
SMALL: dict[str, dict[str, Any]] = {
    "qwen3_5": small_config(),
    "gemma4": GEMMA["moe"]["text_config"] | {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]},
    "deepseek_v3": {**DEEPSEEK["v3"], "num_hidden_layers": 2},
    "llama": {**LLAMA["moe"], "num_hidden_layers": 1},
    "kimi_linear": kimi_config((2,), 2),
    "gemma3n": GEMMA3N["plain"],
    "gpt_oss": MXFP4 | {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]},
}
EVERY: dict[str, dict[str, Any]] = {
    **{f"lfm2-{name}": LFM2[name] for name in ("moe", "plain", "dense")},
    "qwen3_5": moe_config(),
    "qwen3_next": next_config(),
    "gpt_oss": MXFP4,
    "gemma3": GEMMA3["text"],
    **{f"gemma3n-{name}": config for name, config in GEMMA3N.items()},
    **{f"gemma4-{name}": config for name, config in GEMMA.items()},
    **{f"deepseek_v3-{name}": config for name, config in DEEPSEEK.items()},
    **{f"kimi_linear-{name}": config for name, config in KIMI.items()},
    **{f"llama-{n}": LLAMA[n] for n in ("tied", "biases", "window", "qwen2 window", "qwen3", "moe", "mixed moe")},
    **{
        f"llama-{name}": LLAMA[name]
        for name in ("qwen2 moe", "mixtral window", "glm", "glm air", "minimax", "ministral")
    },
}


def made(config: dict[str, Any], device: str, **options: Any) -> LLM:
    llm = load_random(config, device=device, activations="float32", max_context=1024, **options)
    if not GPU:
        llm.engine.allocate(sequences=2)  # the interpreter takes its time for every sequence of a mixed step
    return llm


@pytest.mark.cuda
@pytest.mark.parametrize("name", EVERY)
def test_cuda_model_matches_the_definitions_in_float32(name):
    config, tokens = EVERY[name], some_tokens(330)
    reference, gpu = made(config, "reference"), made(config, "cuda", dtype="float32")
    assert error(gpu.logits(tokens), reference.logits(tokens)) <= 5e-5  # the bound up to 1000 tokens
    assert error(decoded(gpu, tokens, 300), decoded(reference, tokens, 300)) <= 5e-5


# Random Gemmas choose other experts after a rounding: with int8 on the CPU they have a cosine of 0.87 and 0.95
@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("gemma4-moe", "gemma4-wide")])
def test_cuda_model_in_bfloat16_is_near_the_definitions(name):
    config, tokens = EVERY[name], some_tokens(330)
    want, got = made(config, "reference").logits(tokens), made(config, "cuda").logits(tokens)
    cosines = np.sum(got * want, axis=1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
    assert np.median(cosines) >= 0.995


@pytest.mark.cuda
def test_cuda_demo_model_keeps_its_promise_in_bfloat16():
    """The trained model: cosine, argmax and perplexity against exact products on the CPU."""
    gpu, cpu = penstock.load(device="cuda"), penstock.load(device="cpu", activations="float32")
    text = "The harbour was quiet that morning. Nobody had seen the boat since the storm, and the old man said"
    tokens = (gpu.tokenizer.encode(text) * 20)[:400]
    got, want = gpu.logits(tokens), cpu.logits(tokens)
    cosines = np.sum(got * want, axis=1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
    assert np.mean(cosines >= 0.999) >= 0.95
    assert np.mean(got.argmax(axis=1) == want.argmax(axis=1)) >= 0.97


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["qwen3_5", "gemma4-moe", "deepseek_v3-v3", "llama-moe"])
def test_cuda_rows_do_not_depend_on_the_batch_when_deterministic(name):
    llm = made(EVERY[name], "cuda", deterministic=True)
    engine, lengths, steps = llm.engine, [40, 5, 17, 33, 1, 9, 33, 2, 40, 33, 5], 3
    texts = [some_tokens(length + steps, seed=n) for n, length in enumerate(lengths)]
    alone = [decoded(llm, text, length)[1:] for text, length in zip(texts, lengths, strict=True)]
    for count in (2, 8, len(lengths)):
        together = [engine.open() for _ in lengths[:count]]
        for sequence, text, length in zip(together, texts, lengths, strict=False):
            engine.prefill(sequence, text[:length])
        for step in range(steps):
            rows = engine.decode(together, [texts[n][lengths[n] + step] for n in range(count)])
            for n, row in enumerate(rows):
                np.testing.assert_array_equal(row, alone[n][step])
        for sequence in together:
            engine.close(sequence)


@pytest.mark.cuda
def test_cuda_prefill_at_grid_points_gives_the_same_bits_as_one_piece():
    llm = load_random(moe_config(max_position_embeddings=1 << 13), device="cuda")
    grid = llm.engine.device.chunk_alignment
    tokens = some_tokens(2 * grid + 300)
    np.testing.assert_array_equal(in_pieces(llm, tokens, [grid, 2 * grid]), in_pieces(llm, tokens, []))


@pytest.mark.cuda
def test_cuda_logits_are_the_same_in_every_run():
    llm = made(EVERY["gemma4-moe"], "cuda")
    tokens = some_tokens(300)
    want = llm.logits(tokens)
    for _ in range(5):
        np.testing.assert_array_equal(llm.logits(tokens), want)


def test_cuda_session_goes_back_and_comes_back_from_a_file(tmp_path):
    """Snapshots, rewinding and files, on the built-in model's smallest relative."""
    if not GPU:
        pytest.skip("seconds per token in the interpreter")
    llm = penstock.load(device="cuda")
    session = llm.session()
    session.append("Once upon a time")
    snapshot = session.snapshot()
    first = session.generate(max_tokens=12).tokens
    session.rewind(snapshot)
    assert session.generate(max_tokens=12).tokens == first
    session.rewind(snapshot)
    session.save(tmp_path / "session")
    again = penstock.restore(tmp_path / "session", llm)
    assert again.generate(max_tokens=12).tokens == first


def test_cuda_hooks_see_logits_and_embeddings_hidden_states():
    """A hooked request beside a plain one and a step ahead: what it sees are the logits of the sequence so far."""
    llm, reference = (made(SMALL["llama"], device, dtype="float32") for device in ("cuda", "reference"))
    seen: list[np.ndarray] = []

    def odd(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        seen.append(logits.copy())
        return np.where(np.arange(VOCAB) % 2, logits, np.float32(-np.inf))

    prompts, hooks = [some_tokens(5), some_tokens(3, seed=1)], Hooks((odd,), lambda p: np.argmax(p, axis=-1))
    own = [Request(prompts[0], SamplingParams(seed=0), 2, frozenset(), hooks=hooks)]
    own.append(Request(prompts[1], SamplingParams(seed=0), 3, frozenset()))
    handles = [llm.scheduler.submit(request) for request in own]
    hooked, plain = (handle.result().tokens for handle in handles)
    rows = reference.logits([*prompts[0], hooked[0]])[len(prompts[0]) - 1 :]
    np.testing.assert_allclose(np.concatenate(seen), rows, atol=1e-4 * np.abs(rows).max())
    assert hooked == [int(np.argmax(np.where(np.arange(VOCAB) % 2, row, -np.inf))) for row in rows]
    assert plain == reference.logits([*prompts[1], *plain[:2]]).argmax(axis=1)[len(prompts[1]) - 1 :].tolist()
    np.testing.assert_allclose(llm.embed(prompts), reference.embed(prompts), atol=1e-5)


@pytest.mark.cuda
def test_cuda_weights_and_caches_lie_on_the_gpu():
    llm = made(EVERY["gemma4-moe"], "cuda")
    engine = llm.engine
    assert engine.model.weights.layers[0].experts.routed.gate.packed.is_cuda
    assert engine.model.weights.norm.is_cuda and all(a.is_cuda for pair in engine.caches.arrays for a in pair)
    assert llm.stats().peak_memory > 0 and llm.stats().weight_bytes > 0


def test_cuda_refuses_a_context_that_does_not_fit():
    config = LLAMA["tied"] | {"max_position_embeddings": 1 << 31}
    with pytest.raises(OutOfMemory, match=r"GB of GPU memory, .* GB are free; max_context=\d+ would fit"):
        load_random(config, device="cuda", max_context=1 << 31)


def test_cuda_model_generates_what_the_definitions_generate():
    if not GPU:
        pytest.skip("seconds per token in the interpreter")
    config = SMALL["qwen3_5"]
    answers = []
    for device in ("reference", "cuda"):
        llm = made(config, device, dtype="float32")
        engine = llm.engine
        sequence = engine.open()
        token, answer = int(engine.prefill(sequence, some_tokens(5)).argmax()), []
        for _ in range(8):
            answer.append(token)
            token = int(engine.decode([sequence], [token])[0].argmax())
        answers.append(answer)
    assert answers[0] == answers[1] and max(answers[0]) < VOCAB


# one family in the interpreter, which takes a minute for the others: the routers themselves are in test_moe.py
@pytest.mark.parametrize("family", [name for name in SMALL if name != "gemma3n"] if GPU else ["llama"])
def test_cuda_router_that_yields_nan_ends_in_nan_and_is_named(family):
    engine = made(SMALL[family], "cuda", dtype="float32").engine
    *_, layer = engine.model.weights.layers
    experts = layer.experts if family == "gemma4" else layer.mlp
    sequence = engine.open()
    engine.prefill(sequence, [3])
    experts.router.scales[0, 0] = np.nan
    row = Sampler(SamplingParams(), VOCAB).row
    runs = [Run(sequence, np.array([4], np.int32))]
    assert engine.launch(runs, [row], "greedy").tokens() == [-2]  # and so the request ends
    with engine.lock, engine.device.running(False):
        named = first_nonfinite(engine, sequence, 5)
    assert named is not None and named.startswith(f"layer {len(engine.model.weights.layers) - 1}, ")
    assert named.endswith("(quantized_matmul)")
