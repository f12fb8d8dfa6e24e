"""Embeddings of texts: what they are a mean of, alone and beside others, and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.api import LLM, load_random
from penstock.backends.cpu.device import CpuDevice
from penstock.engine.request import reading_request
from penstock.errors import InvalidArgument, NonFiniteLogits
from penstock.quant import QuantizedTensor
from tests.engine.capturing import CapturingHost
from tests.engine.test_scheduler import nothing_is_held, with_device
from tests.models.common import error, small_config, some_tokens, write_model
from tests.models.test_deepseek_v3 import CONFIGS as DEEPSEEK
from tests.models.test_gemma4 import CONFIGS as GEMMA
from tests.models.test_llama import CONFIGS as LLAMA

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": small_config(),
    "gemma4": GEMMA["moe"]["text_config"],
    "deepseek_v3": DEEPSEEK["v3"],
    "llama": LLAMA["moe"],
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return penstock.load(write_model(tmp_path_factory.mktemp("small"), small_config()), device="cpu")


@pytest.fixture(params=[CpuDevice, CapturingHost])
def llm(request: pytest.FixtureRequest, loaded: LLM) -> LLM:
    """The model with caches of its own, on a device that hands logits to the host, and on one that draws."""
    return with_device(loaded, request.param(), 2048)


def hidden_of(llm: LLM, tokens: list[int]) -> np.ndarray:
    rows: list[np.ndarray] = []
    llm.scheduler.submit(reading_request(llm.engine.limits, tokens), rows=rows.append, hidden=True).result()
    return np.concatenate(rows)


def embedding_of(rows: np.ndarray) -> np.ndarray:
    mean = rows.astype(np.float64).mean(axis=0)
    return mean / np.linalg.norm(mean)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hidden_state_is_what_the_head_reads(family: str) -> None:
    llm = load_random(FAMILIES[family], device="reference", activations="float32", max_context=512)
    tokens, head = some_tokens(20), llm.engine.model.weights.head
    rows = hidden_of(llm, tokens)
    assert rows.shape == (20, llm.config.dim) and rows.dtype == np.float32
    matrix = penstock.dequantize(head) if isinstance(head, QuantizedTensor) else head
    logits = rows.astype(np.float64) @ np.asarray(matrix, np.float64).T
    cap = getattr(llm.config, "softcap", None)
    assert error(llm.logits(tokens), logits if cap is None else cap * np.tanh(logits / cap)) <= 1e-5
    np.testing.assert_allclose(llm.embed(tokens), embedding_of(rows), atol=1e-6)


def test_embeddings_are_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    """Of texts in chunks and of one token, beside each other, an answer and logits of another text."""
    texts = [some_tokens(n, seed=n) for n in (1, 7, 600, 256, 3, 257, 1)]
    alone = [llm.embed(text) for text in texts]
    stream = llm.stream(some_tokens(5), max_tokens=6)
    first = next(stream)
    beside = llm.scheduler.submit(reading_request(llm.engine.limits, texts[2]), rows=lambda rows: None)
    found = llm.embed(texts)
    assert found.shape == (7, llm.config.dim) and found.dtype == np.float32
    beside.result()
    assert [first.token, *(chunk.token for chunk in stream)] == llm.generate(some_tokens(5), max_tokens=6).tokens
    if isinstance(llm.engine.device, CapturingHost):  # steps of other sizes
        np.testing.assert_allclose(found, alone, atol=1e-5)
    else:
        np.testing.assert_array_equal(found, alone)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    rows = hidden_of(llm, texts[2])
    np.testing.assert_allclose(found[2], embedding_of(rows), atol=1e-6)
    np.testing.assert_allclose(llm.embed(texts[2], pooling="last"), embedding_of(rows[-1:]), atol=1e-6)
    nothing_is_held(llm)


def test_texts_are_encoded_as_the_tokenizer_says(loaded: LLM) -> None:
    llm = with_device(loaded, CpuDevice(), 2048)
    one = llm.embed("abc")
    assert one.shape == (llm.config.dim,) and (one == llm.embed(llm.tokenizer.encode("abc"))).all()
    np.testing.assert_array_equal(llm.embed(["abc", "d"]), [one, llm.embed("d")])
    assert llm.embed([]).shape == (0, llm.config.dim)
    before = llm.stats().prompt_tokens
    llm.embed([[1, 2], [3]])
    assert llm.stats().prompt_tokens == before + 3 and llm.stats().generated_tokens == 0


def test_texts_share_their_steps(llm: LLM) -> None:
    llm.scheduler.step_seconds = 1e9  # however slow the machine is
    llm.embed([some_tokens(4, seed=n) for n in range(4)])
    assert llm.scheduler._execution.steps <= 2  # the first one shows how long a token takes


@pytest.mark.parametrize("texts, words", [
    ("", r"embed: texts has no tokens, expected 1 to 64 \(max_context\)"),
    (["a", ""], r"embed: texts\[1\] has no tokens"),
    ([[1], [2] * 65], r"embed: texts\[1\] has 65 tokens, expected 1 to 64"),
    ([[1], [10**6]], r"embed: texts\[1\]: has 1000000, expected ids from 0"),
    (7, "embed: texts is a int, expected text"),
    ([3, None], r"embed: texts\[0\]: expected a list of integers"),
])  # fmt: skip
def test_texts_that_are_refused(texts: Any, words: str, loaded: LLM) -> None:
    llm = with_device(loaded, CpuDevice(), 64)
    with pytest.raises(InvalidArgument, match=words):
        llm.embed(texts)
    assert llm.scheduler.idle


def test_a_pooling_that_there_is_not(loaded: LLM) -> None:
    with pytest.raises(InvalidArgument, match="pooling is 'max', expected mean or last"):
        loaded.embed("abc", pooling="max")


def test_a_hidden_state_that_is_not_finite_is_refused(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = with_device(loaded, CpuDevice(), 64)
    monkeypatch.setattr(llm.engine, "step", lambda runs: np.full((3, llm.config.dim), np.nan, np.float32))
    with pytest.raises(NonFiniteLogits, match="embed: the model produced hidden states that are not finite"):
        llm.embed([1, 2, 3])


def test_a_family_without_a_final_norm_is_refused_by_name(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = with_device(loaded, CpuDevice(), 64)
    model = llm.engine.model
    monkeypatch.setattr(llm.engine, "model", replace(model, family=replace(model.family, final_norm=None)))
    with pytest.raises(InvalidArgument, match="qwen3_5_moe_text has no final_norm"):
        llm.embed("abc")
