"""/v1/embeddings: the vectors of `LLM.embed`, wherever the engine runs, and what is refused."""

import base64

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
from tests.server.common import Place, error_of, serving, wait_for

PATH = "/v1/embeddings"
TEXTS = ["The king slept.", "A fox", "A fox ran away, and the wood was dark and wide. " * 30]


@pytest.fixture(scope="module")
def client(place):
    with openai.OpenAI(base_url=f"{place.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_embeddings_are_those_of_embed(client, llm):
    want = llm.embed(TEXTS)
    found = client.embeddings.create(model="demo", input=TEXTS)  # the client asks for base64
    np.testing.assert_array_equal(np.array([one.embedding for one in found.data], np.float32), want)
    assert [one.index for one in found.data] == [0, 1, 2] and found.model == "demo"
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(len(llm.tokenizer.encode(t)) for t in TEXTS)
    ids = llm.tokenizer.encode(TEXTS[1])
    for given in (TEXTS[1], [TEXTS[1]], ids, [ids]):
        [one] = client.embeddings.create(model="demo", input=given, encoding_format="float").data
        np.testing.assert_array_equal(np.array(one.embedding, np.float32), want[1])


def test_base64_is_little_endian_float32(place, llm):
    asked = {"input": TEXTS[0], "encoding_format": "base64", "user": "someone"}
    [found] = place.client.post("/embeddings", json=asked).json()["data"]
    vector = np.frombuffer(base64.b64decode(found["embedding"]), "<f4")
    np.testing.assert_array_equal(vector, llm.embed(TEXTS[0]))


def test_more_texts_than_the_queue_holds(place, llm):
    """In order, and without refusing others."""
    service = place.service
    most = service.scheduler.max_sequences + service.options.limits.queue
    given = [[n % 200 + 1] for n in range(most + 9)]
    found = place.client.post(PATH, json={"input": given}).json()["data"]
    np.testing.assert_array_equal(np.array([one["embedding"] for one in found[:5]], np.float32), llm.embed(given[:5]))
    assert [one["index"] for one in found] == list(range(len(given)))
    place.settled()


def test_the_last_token_in_place_of_the_mean(llm):
    with serving(llm, Options(pooling="last")) as place:
        [found] = place.client.post(PATH, json={"input": TEXTS[2]}).json()["data"]
    want = llm.embed(TEXTS[2], pooling="last")
    np.testing.assert_array_equal(np.array(found["embedding"], np.float32), want)
    assert abs(want @ llm.embed(TEXTS[2])) < 0.99


@pytest.mark.parametrize("fields, param, words", [
    ({"dimensions": 8}, "dimensions", "dimensions is not supported"),
    ({"encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
    ({"input": []}, "input", "wrong type or empty"),
    ({"input": ""}, "input", "no tokens"),
    ({"input": ["x", ""]}, "input[1]", "no tokens"),
    ({"input": ["x", 3]}, "input", "[1] is of a wrong type"),
    ({"input": [[1], [-1]]}, "input[1]", "has -1"),
    ({"input": ["x"] * 2049}, "input", "2049 prompts, expected at most 2048"),
    ({"model": "other"}, "model", "expected demo"),
    ({"temperature": 1}, "temperature", "no field"),
])  # fmt: skip
def test_what_is_refused(place, fields, param, words):
    error = error_of(place.client.post(PATH, json={"input": "x"} | fields))
    assert error["param"] == param and words in error["message"], error


def test_texts_beyond_the_context_are_refused(place, llm):
    limit = llm.max_context
    assert place.client.post(PATH, json={"input": [5] * limit}).status_code == 200
    for given in (["x", [5] * (limit + 1)], ["x", "fox " * (2 * limit)]):
        error = error_of(place.client.post(PATH, json={"input": given}))
        assert error["param"] == "input[1]" and error["code"] == "context_length_exceeded", error
        assert f"more than {limit} tokens" in error["message"]


def test_engines_in_other_processes_give_the_same(llm):
    """Two of them."""
    from penstock.engine.resources import share_machine

    service = Service(Options(), engine_starter({}, lambda note: None, share_machine("cpu", 2)))
    service.load(lambda _: (RemoteModel(read_tokenizer(resolve_model(None))), {}))
    assert service.failure is None
    with background(service, Access()) as url, httpx.Client(base_url=url, timeout=60) as client:
        place = Place(url, service, client)
        replicas = service.replicas
        assert replicas is not None
        found = client.post(PATH, json={"input": TEXTS * 2}).json()["data"]
        want = [*llm.embed(TEXTS)] * 2
        np.testing.assert_allclose([one["embedding"] for one in found], want, atol=1e-6)
        assert {number for number, by_prefix in replicas.chosen if not by_prefix} == {0, 1}
        wait_for(lambda: replicas.metrics().running == 0, 10)
        place.settled()
