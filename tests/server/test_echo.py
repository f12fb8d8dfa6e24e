"""/v1/completions with echo and log probabilities of the prompt, as evaluation harnesses read them."""

from typing import Any

import httpx
import numpy as np
import openai
import pytest

from penstock.server.engine_start import engine_starter
from penstock.server.guard import Access
from penstock.server.model_info import RemoteModel, read_tokenizer
from penstock.server.run import background
from penstock.server.service import Options, Service
from penstock.weights.resolve import resolve_model

PATH = "/v1/completions"
TEXT = "Once upon a time there was a fox who lived in a wood, and one day"
ASKED: dict[str, Any] = {"prompt": TEXT, "temperature": 0, "echo": True, "logprobs": 2}


@pytest.fixture(scope="module")
def rows(llm) -> np.ndarray:
    """Log probabilities after each token of the text."""
    logits = llm.logits(llm.tokenizer.encode(TEXT)).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def check_table(table: dict[str, Any], llm, rows: np.ndarray) -> None:
    """That of the text."""
    ids = llm.tokenizer.encode(TEXT)
    assert table["token_logprobs"][0] is None and table["top_logprobs"][0] is None
    own = [rows[n, token] for n, token in enumerate(ids[1:])]
    np.testing.assert_allclose(table["token_logprobs"][1 : len(ids)], own, atol=1e-5)
    for n, (token, top) in enumerate(
        zip(table["tokens"][1 : len(ids)], table["top_logprobs"][1 : len(ids)], strict=True)
    ):
        assert max(top.values()) == pytest.approx(rows[n].max(), abs=1e-5) and token in top and 1 <= len(top) <= 3
    assert "".join(table["tokens"][: len(ids)]) == TEXT
    assert [TEXT[at : at + 3] for at in table["text_offset"][: len(ids)]] == [
        TEXT[len("".join(table["tokens"][:n])) :][:3] for n in range(len(ids))
    ]


def test_a_prompt_alone(place, llm, rows):
    found = place.client.post(PATH, json=ASKED | {"max_tokens": 0}).json()
    [choice] = found["choices"]
    assert choice["text"] == TEXT and choice["finish_reason"] == "length" and "prompt_logprobs" not in choice
    check_table(choice["logprobs"], llm, rows)
    assert len(choice["logprobs"]["tokens"]) == len(rows)
    assert found["usage"]["completion_tokens"] == 0 and found["usage"]["total_tokens"] == len(rows)
    bare = place.client.post(PATH, json={"prompt": TEXT, "echo": True, "max_tokens": 0}).json()["choices"][0]
    assert (bare["text"], bare["logprobs"], bare["finish_reason"]) == (TEXT, None, "length")


def test_a_prompt_and_its_answer(place, llm, rows):
    want = llm.generate(TEXT, max_tokens=4, logprobs=2)
    with openai.OpenAI(base_url=f"{place.url}/v1", api_key="unused", max_retries=0) as client:
        found = client.completions.create(model="demo", max_tokens=4, **ASKED)
    [choice] = found.choices
    assert choice.text == TEXT + want.text
    check_table(choice.logprobs.model_dump(), llm, rows)
    np.testing.assert_allclose(choice.logprobs.token_logprobs[len(rows) :], want.logprobs, atol=1e-5)
    assert found.usage.completion_tokens == 4
    echoed = place.client.post(PATH, json={"prompt": TEXT, "temperature": 0, "echo": True, "max_tokens": 4}).json()
    assert echoed["choices"][0]["text"] == TEXT + want.text and echoed["choices"][0]["logprobs"] is None


def test_a_stream_begins_with_the_prompt(place, llm, rows):
    events = place.events(PATH, max_tokens=3, **ASKED)[:-1]
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == TEXT + llm.generate(TEXT, max_tokens=3).text
    assert choices[-1]["finish_reason"] == "length"
    tables = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    whole = {name: [value for table in tables for value in table[name]] for name in tables[0]}
    check_table(whole, llm, rows)
    assert len(whole["tokens"]) == len(rows) + 3
    ended = place.events(PATH, max_tokens=0, **ASKED)[-2]["choices"][0]
    assert ended["finish_reason"] == "length"


def test_prompts_of_ids_as_a_harness_sends_them(place, llm):
    """lm-eval: context and continuation as ids, one token more, which its slices leave out."""
    context, ends = llm.tokenizer.encode("The king"), [" slept.", " was old and"]
    wholes = [context + llm.tokenizer.encode(end, add_special_tokens=False) for end in ends]
    asked = {"prompt": wholes, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    eos = min(llm.tokenizer.eos_ids)
    for more in ({}, {"logit_bias": {str(eos): 1000}}):  # an answer that ends at once has a token, too
        choices = place.client.post(PATH, json=asked | more).json()["choices"]
        for whole, choice in zip(wholes, choices, strict=True):
            table = choice["logprobs"]
            assert len(table["tokens"]) == len(whole) + 1
            logits = llm.logits(whole).astype(np.float64)
            best = logits.max(axis=1, keepdims=True)
            all_rows = logits - best - np.log(np.exp(logits - best).sum(axis=1, keepdims=True))
            own = [all_rows[n - 1, whole[n]] for n in range(len(context), len(whole))]
            assert sum(table["token_logprobs"][len(context) : -1]) == pytest.approx(sum(own), abs=1e-5)
            greedy = all(token == max(top, key=top.get) for token, top in zip(
                table["tokens"][len(context) : -1], table["top_logprobs"][len(context) : -1], strict=True
            ))  # fmt: skip
            assert greedy == all(logits[n - 1].argmax() == whole[n] for n in range(len(context), len(whole)))


def test_prompt_logprobs_by_ids(place, llm, rows):
    ids = llm.tokenizer.encode(TEXT)
    [choice] = place.client.post(PATH, json={"prompt": TEXT, "max_tokens": 0, "prompt_logprobs": 1}).json()["choices"]
    assert choice["text"] == "" and choice["prompt_logprobs"][0] is None and choice["logprobs"] is None
    for n, entry in enumerate(choice["prompt_logprobs"][1:]):
        own, best = entry[str(ids[n + 1])], entry[str(rows[n].argmax())]
        assert own["logprob"] == pytest.approx(rows[n, ids[n + 1]], abs=1e-5) and best["rank"] == 1
        assert own["rank"] == 1 + (rows[n] > rows[n, ids[n + 1]]).sum() and len(entry) <= 2


def test_an_engine_in_another_process_gives_the_same(llm, rows):
    service = Service(Options(), engine_starter({}, lambda note: None))
    service.load(lambda _: (RemoteModel(read_tokenizer(resolve_model(None))), {}))
    assert service.failure is None
    with background(service, Access()) as url, httpx.Client(base_url=url, timeout=60) as client:
        for tokens in (0, 3):
            [choice] = client.post(PATH, json=ASKED | {"max_tokens": tokens}).json()["choices"]
            check_table(choice["logprobs"], llm, rows)
            assert len(choice["logprobs"]["tokens"]) == len(rows) + tokens
