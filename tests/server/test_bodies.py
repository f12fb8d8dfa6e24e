"""Bodies and prompts that are refused cost little, and nobody else waits for them."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest import mock

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.child import ChildOutOfMemory, ChildTimeout
from penstock.errors import PenstockError
from penstock.server import body as module
from penstock.server import schema
from penstock.server.body import Bodies, values
from penstock.server.errors import ApiError
from penstock.server.limits import Limits
from penstock.server.service import Options
from penstock.server.validate import checked, parsed
from tests.server.common import CHAT, PROMPT, Place, error_of, serving, wait_for

REQUESTS = {
    "/v1/chat/completions": schema.ChatRequest,
    "/v1/completions": schema.CompletionRequest,
    "/v1/responses": schema.ResponsesRequest,
    "/tokenize": schema.TokenizeRequest,
    "/detokenize": schema.DetokenizeRequest,
    "/apply-template": schema.TemplateRequest,
}
# One long list each, with an item that is wrong: path, what stands before the items, an item, what stands behind them.
LISTS = {
    "tokens": ("/detokenize", b'{"tokens":[', b'""', b"]}"),
    "modalities": (CHAT, b'{"messages":[{"role":"user","content":"hi"}],"modalities":[', b"0", b"]}"),
    "input": ("/v1/responses", b'{"input":[', b"{}", b"]}"),
    "content": (CHAT, b'{"messages":[{"role":"user","content":[', b"{}", b"]}]}"),
    "include": ("/v1/responses", b'{"input":"hi","include":[', b"0", b"]}"),
}


def long_list(name: str, items: int) -> tuple[str, bytes]:
    path, before, item, after = LISTS[name]
    return path, before + b",".join([item] * items) + after


def post(place: Place, path: str, content: bytes) -> httpx.Response:
    return place.client.post(path, content=content, headers={"content-type": "application/json"})


# counting


def count(value) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(count(item) for item in inner)


def empty(value) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (value in ([], {})) + sum(empty(item) for item in inner)


TEXT = st.text(st.sampled_from('",:[]{}\\ax\né'), max_size=8)
JSON = st.recursive(
    TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200)
@given(value=JSON, step=st.integers(1, 9), ascii=st.booleans())
def test_values_are_counted_outside_strings(value, step, ascii):
    text = json.dumps(value, ensure_ascii=ascii).encode()
    with mock.patch.object(module, "_STEP", step):
        assert values(text) == count(value) + empty(value)  # an empty list is counted as one of one value


@pytest.mark.parametrize("name", LISTS)
def test_a_long_list_is_refused_before_it_is_parsed(place, name):
    path, content = long_list(name, 200_001)
    with mock.patch.object(module, "parsed", side_effect=AssertionError):
        response = post(place, path, content)
    error = error_of(response)
    assert response.status_code == 413 and error["code"] == "request_too_large"
    assert "expected at most 200000" in error["message"] and f"{values(content)} values" in error["message"]


def test_commas_and_brackets_in_a_text_are_no_values(place):
    response = place.client.post("/tokenize", json={"content": ',[{"' * 60_000})
    assert response.status_code == 200 and len(response.json()["tokens"]) > 1000


# lists


@pytest.mark.parametrize("name", LISTS)
def test_the_first_wrong_item_of_a_list_is_the_only_error(name):
    path, content = long_list(name, 15)
    with pytest.raises(ValidationError) as raised:
        REQUESTS[path].model_validate(json.loads(content))
    places = {error["loc"][-3:] for error in raised.value.errors()}
    assert raised.value.error_count() < 5 and not any(1 in place for place in places)
    with pytest.raises(ApiError, match=rf"{name}.*\[0\]"):
        parsed(content, REQUESTS[path])


@pytest.mark.parametrize("path", REQUESTS)
def test_every_list_and_free_object_of_a_request_has_a_limit(path):
    unbounded = []

    def look(part, where):
        if isinstance(part, list):
            for n, item in enumerate(part):
                look(item, f"{where}[{n}]")
        elif isinstance(part, dict):
            if part.get("type") == "array" and "maxItems" not in part:
                unbounded.append(where)
            if part.get("type") == "object" and "properties" not in part and "maxProperties" not in part:
                unbounded.append(where)
            for name, item in part.items():
                look(item, f"{where}.{name}")

    look(REQUESTS[path].model_json_schema(), path)
    assert not unbounded


@pytest.mark.parametrize("path", REQUESTS)
def test_the_first_unknown_field_is_the_only_error(path):
    with pytest.raises(ApiError, match="'field0' is no field"):
        REQUESTS[path].model_validate({f"field{n}": n for n in range(100)})


def test_limits_of_single_lists_are_told(place):
    message = {"role": "user", "content": [{"type": "text", "text": ""}] * 20_001}
    many = {"modalities": ["text"] * 17, "messages": [message]}
    for field, value in many.items():
        response = place.chat(**{field: value})
        assert response.status_code == 400 and "expected at most" in error_of(response)["message"]
    biased = {str(n): 0 for n in range(200_001)}
    with pytest.raises(ApiError, match="logit_bias has 200001 entries, expected at most 200000"):
        parsed(json.dumps({"messages": PROMPT, "logit_bias": biased}).encode(), schema.ChatRequest)


# large bodies


LARGE = "x" * (1 << 20)


def test_a_large_body_is_checked_in_a_process_that_ends_with_the_server(llm):
    with mock.patch.object(Bodies, "close", autospec=True, side_effect=Bodies.close) as closed:
        with serving(llm) as place:
            with mock.patch.object(module, "parsed", side_effect=AssertionError):
                assert place.chat(user=LARGE).status_code == 200
                wrong = place.chat(user=LARGE, max_tokens=0)
                cut = post(place, CHAT, b"[" + b" " * (1 << 20))
            assert wrong.status_code == 400 and error_of(wrong) == error_of(place.chat(max_tokens=0))
            assert cut.status_code == 400 and error_of(cut)["code"] == "invalid_json"
        [bodies] = closed.call_args.args
        assert bodies._child._process is None


WRONG = [b"", b"\xef\xbb\xbf{", b"\xff", b"[1]", b'{"content": NaN}', b'{"content": 1e999}', b'{"content": "\\ud800"}']
WRONG += [b'{"content": [' * 999, b'{"a": 1, "a": 1}', b'{"content": 3}', b'{"content": "x", "y": 1}', b"1" * 5000]


def test_what_the_process_says_is_what_parsing_here_says():
    bodies = Bodies(Limits())
    with mock.patch.object(module, "_LARGE", -1):
        for content in WRONG:
            with pytest.raises(ApiError) as here:
                parsed(content, schema.TokenizeRequest)
            with pytest.raises(ApiError) as there:
                bodies.parsed(bytearray(content), schema.TokenizeRequest)
            assert (there.value.status, there.value.body) == (here.value.status, here.value.body)
        good = b'\xef\xbb\xbf{"content": "\\ud83e\\udd8a", "with_pieces": true}'
        assert bodies.parsed(bytearray(good), schema.TokenizeRequest) == parsed(good, schema.TokenizeRequest)
    bodies.close()
    assert checked(b"TokenizeRequest\n" + good) == b""


@pytest.mark.parametrize("raised, said", [(ChildTimeout, "takes longer than"), (ChildOutOfMemory, "needs more than")])
def test_a_body_that_takes_too_much_to_check_is_refused(raised, said):
    bodies = Bodies(Limits())
    with mock.patch.object(bodies, "_child") as child:
        child.call.side_effect = raised("x")
        with pytest.raises(ApiError, match=f"the body {said} .* to be checked") as refused:
            bodies.parsed(bytearray(b" " * (2 << 20)), schema.TokenizeRequest)
    assert refused.value.status == 413


# long prompts


@contextmanager
def held(place):
    """Inside, texts of more than 50,000 characters stay with the tokenizer. Gives a function that sends one of so many
    characters, and a list of those that have come there.
    """
    tokenizer = place.service.llm.tokenizer
    encode, came, go = tokenizer.encode, [], threading.Event()

    def slow(text, *args, **options):
        if len(text) > 50_000:
            came.append(text)
            go.wait(60)
        return encode(text, *args, **options)

    with mock.patch.object(tokenizer, "encode", slow), ThreadPoolExecutor(8) as threads:
        try:
            yield lambda n: threads.submit(place.client.post, "/tokenize", json={"content": "word " * (n // 5)}), came
        finally:
            go.set()


def test_short_requests_do_not_wait_for_long_ones(quiet):
    with held(quiet) as (send, came):
        long = [send(80_000) for _ in range(6)]
        wait_for(lambda: came)
        assert quiet.chat(max_tokens=4).json()["usage"]["completion_tokens"] == 4
        assert not any(one.done() for one in long)
    assert [one.result().status_code for one in long] == [200] * 6


def test_bodies_count_until_they_have_been_looked_at(llm):
    with serving(llm, Options(limits=Limits(bodies=250_000))) as place:
        with held(place) as (send, came):
            long = send(200_000)
            wait_for(lambda: came)
            refused = place.client.post("/tokenize", json={"content": "x" * 100_000})
            assert refused.status_code == 503 and error_of(refused)["code"] == "overloaded"
        assert long.result().status_code == 200
        assert place.client.post("/tokenize", json={"content": "x" * 100_000}).status_code == 200


@pytest.mark.parametrize("content", ["hello ", "x", "é", "你好", "1", "<|im_end|>"])
def test_a_prompt_that_cannot_fit_is_refused_untokenized(place, llm, content):
    text = content * (400_000 // len(content))
    with mock.patch.object(type(llm.tokenizer), "_ids", side_effect=AssertionError):
        chat = place.chat(messages=[{"role": "user", "content": text}])
    assert chat.status_code == 400
    error = error_of(chat)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert f"{llm.max_context} tokens or more" in error["message"]


def test_a_prompt_is_tokenized_until_the_context_is_full(place, llm):
    text = "a b c d " * 5000
    with mock.patch.object(llm.tokenizer, "_longest", None):
        response = place.client.post("/v1/completions", json={"prompt": ["hi", text]})
    error = error_of(response)
    assert response.status_code == 400
    assert (error["param"], error["code"]) == ("prompt[1]", "context_length_exceeded")


def test_answers_of_tokenize_are_bounded(llm):
    with serving(llm, Options(limits=Limits(tokenized=5000))) as place:
        most = {"content": "a" + " b" * 4999}
        plain = place.client.post("/tokenize", json=most).json()["tokens"]
        pieces = place.client.post("/tokenize", json={**most, "with_pieces": True}).json()["tokens"]
        assert plain == [one["id"] for one in pieces] == llm.tokenizer.encode(most["content"], add_special_tokens=False)
        assert len(plain) == 5000 and "".join(one["piece"] for one in pieces) == most["content"]
        for fields in ({}, {"with_pieces": True}):
            response = place.client.post("/tokenize", json={"content": most["content"] + " b", **fields})
            error = error_of(response)
            assert response.status_code == 400 and error["param"] == "content" and "5000" in error["message"]
        assert place.client.post("/tokenize", json={"content": ""}).json() == {"tokens": []}


# panics


class Panic(BaseException):
    """As libraries written in Rust raise it: no Exception."""


def test_a_panic_of_the_tokenizer_is_an_error_in_the_usual_shape(quiet, llm):
    backend = mock.Mock()
    backend.encode.side_effect = backend.decode.side_effect = Panic("called `Option::unwrap()`\non a `None` value")
    with mock.patch.object(llm.tokenizer, "backend", backend):
        answers = [
            quiet.chat(),
            quiet.client.post("/v1/completions", json={"prompt": "x"}),
            quiet.client.post("/tokenize", json={"content": "x"}),
            quiet.client.post("/detokenize", json={"tokens": [5]}),
        ]
    for response in answers:
        assert response.status_code == 500
        assert error_of(response)["type"] == "server_error" and "a library failed" in error_of(response)["message"]
    assert quiet.chat().status_code == 200


def test_a_panic_elsewhere_is_an_error_in_the_usual_shape(quiet):
    with mock.patch.object(quiet.service, "chat", side_effect=Panic("boom")):
        response = quiet.chat()
    assert response.status_code == 500 and error_of(response)["code"] == PenstockError.__name__
    assert quiet.chat().status_code == 200
