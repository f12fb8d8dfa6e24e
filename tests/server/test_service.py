"""Loading, queues and the end: what the server says when it cannot answer."""

import contextlib
import json
import threading
import time

import httpx
import pytest

import penstock
from penstock.errors import CheckpointError, InvalidArgument, OutOfMemory
from penstock.server.guard import Access
from penstock.server.limits import Limits
from penstock.server.run import background
from penstock.server.service import Options, Service, generation_defaults
from tests.models.common import small_config, write_model, write_tokens_beyond
from tests.server.common import CHAT, PROMPT, error_of, serving, wait_for

LONG = {"messages": PROMPT, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


def test_the_server_answers_while_it_loads(llm):
    go_on = threading.Event()

    def loader(progress):
        progress(0.25)
        go_on.wait(20)
        progress(0.5)
        return llm, {"temperature": 0.5}

    service = Service(Options(names=("a", "b")))
    thread = threading.Thread(target=service.load, args=(loader,))
    with background(service, Access()) as url, httpx.Client(base_url=url, timeout=20) as client:
        thread.start()
        wait_for(lambda: service.progress == 0.25)
        loading = client.get("/health")
        assert loading.status_code == 503 and loading.headers["retry-after"] == "1"
        assert loading.json()["status"] == "loading" and loading.json()["progress"] == 0.25
        assert loading.json()["error"]["code"] == "loading" and "25" in loading.json()["error"]["message"]
        for response in (client.post(CHAT, json=LONG), client.post("/tokenize", json={}), client.get("/props")):
            assert response.status_code == 503 and error_of(response)["code"] == "loading"
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["a", "b"]
        assert "penstock:load_progress 0.25" in client.get("/metrics").text
        assert client.get("/").status_code == 200
        go_on.set()
        wait_for(lambda: client.get("/health").status_code == 200)
        assert client.get("/props").json()["default_generation_settings"]["params"]["temperature"] == 0.5
        thread.join()


@pytest.mark.parametrize(
    "error, shown",
    [(CheckpointError("model: is damaged"), "model: is damaged"), (ZeroDivisionError("oh"), "ZeroDivision")],
)
def test_a_model_that_cannot_be_loaded_is_stated(error, shown):
    def loader(progress):
        raise error

    service = Service(Options())
    service.load(loader)
    with background(service, Access()) as url, httpx.Client(base_url=url, timeout=20) as client:
        health = client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "error"
        assert shown in health.json()["error"]["message"]
        failed = client.post(CHAT, json=LONG)
        assert failed.status_code == 503 and error_of(failed)["code"] == "load_failed"


def test_a_full_queue_answers_429_and_takes_requests_again(llm):
    with serving(llm, Options(parallel=1, limits=Limits(queue=1))) as place:
        with contextlib.ExitStack() as held:
            for _ in range(2):
                held.enter_context(place.client.stream("POST", CHAT, json=LONG | {"stream": True}))
            metrics = place.service.scheduler.metrics
            wait_for(lambda: metrics().running == metrics().waiting == 1)
            for fields in ({}, {"stream": True}, {"n": 3}):
                refused = place.chat(**fields)
                assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
                error = error_of(refused)
                assert error["code"] == "queue_full" and error["type"] == "rate_limit_error"
        place.settled()
        assert place.chat().status_code == 200


def test_a_request_that_is_refused_half_way_leaves_nothing(llm):
    with serving(llm, Options(parallel=2, limits=Limits(queue=1))) as place:
        refused = place.chat(n=6, max_tokens=500)
        assert refused.status_code == 429
        place.settled()
        assert place.chat(n=2).status_code == 200


def test_lack_of_memory_is_503(llm, monkeypatch):
    with serving(llm) as place:

        def submit(request, client):
            raise OutOfMemory("request: 5 positions need 3.00 GB of memory")

        monkeypatch.setattr(place.service.scheduler, "submit", submit)
        response = place.chat()
        assert response.status_code == 503 and error_of(response)["code"] == "out_of_memory"


@pytest.mark.parametrize("seconds, complete", [(60.0, True), (0.0, False)])
def test_the_end_waits_for_answers_under_way_within_its_limit(llm, seconds, complete):
    texts: dict[str, str] = {}
    service = Service(Options(limits=Limits(shutdown_seconds=seconds)))
    service.load(lambda _: (llm, {}))

    def stream(url: str) -> None:
        fields = LONG | {"stream": True, "max_tokens": 300}
        with httpx.stream("POST", url + CHAT, json=fields, timeout=60) as response:
            texts["stream"] = response.read().decode()

    def whole(url: str) -> None:
        texts["whole"] = httpx.post(url + CHAT, json=LONG | {"max_tokens": 300}, timeout=60).text

    with background(service, Access()) as url:
        threads = [threading.Thread(target=one, args=(url,)) for one in (stream, whole)]
        for thread in threads:
            thread.start()
        metrics = service.scheduler.metrics
        wait_for(lambda: metrics().running == 2 and metrics().generated_tokens > 10)
        start = time.monotonic()
    for thread in threads:
        thread.join()
    if complete:
        assert texts["stream"].endswith("data: [DONE]\n\n") and "chat.completion" in texts["whole"]
    else:
        assert time.monotonic() - start < 5
        last = json.loads(texts["stream"].rstrip().rpartition("data: ")[2])
        assert last["error"]["code"] == "cancelled" and "closed" in last["error"]["message"]
        assert json.loads(texts["whole"])["error"]["code"] == "cancelled"
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-server"]


def test_generation_defaults_come_from_the_models_folder(tmp_path):
    def given(**values: object) -> dict[str, object]:
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        return generation_defaults(tmp_path)

    assert generation_defaults(None) == generation_defaults(tmp_path / "nowhere") == {}
    assert given(do_sample=True, temperature=0.6, top_p=0.9, top_k=20, eos_token_id=[1]) == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
    }
    assert given(do_sample=False, temperature=0.6) == {} and given() == {}
    assert given(do_sample=True) == {"temperature": 1.0}
    assert given(temperature=None, top_p=0.5) == {"top_p": 0.5}
    with pytest.raises(InvalidArgument, match="generation_config.json: temperature"):
        given(temperature="hot")


def test_defaults_of_the_server_apply_where_a_request_says_nothing(llm):
    options = Options(defaults={"temperature": 0.9, "top_p": 0.8}, max_tokens=7)
    with serving(llm, options) as place:
        fields = {"prompt": "Once upon a time", "seed": 3}
        found = place.client.post("/v1/completions", json=fields).json()
        want = llm.generate("Once upon a time", max_tokens=7, temperature=0.9, top_p=0.8, seed=3).text
        assert found["choices"][0]["text"] == want
        greedy = place.client.post("/v1/completions", json=fields | {"temperature": 0, "top_p": 1}).json()
        assert greedy["choices"][0]["text"] == llm.generate("Once upon a time", max_tokens=7).text


def test_template_variables_of_the_server_and_of_requests_reach_the_template(llm, monkeypatch):
    from penstock.text.template import ChatTemplates

    source = "{{ mood }}/{{ enable_thinking }}/{{ reasoning_effort }}/{{ messages[0].content }}"
    monkeypatch.setattr(llm.tokenizer, "templates", ChatTemplates({"default": (source, "t.jinja")}))
    with serving(llm, Options(template_variables={"mood": "calm", "enable_thinking": True})) as place:

        def prompt(**fields: object) -> str:
            return place.client.post(
                "/apply-template", json={"messages": [{"role": "user", "content": "x"}], **fields}
            ).json()["prompt"]

        assert prompt() == "calm/True//x"
        assert prompt(chat_template_kwargs={"mood": "merry"}) == "merry/True//x"
        rendered = []
        templates = llm.tokenizer.templates
        real = templates.render
        monkeypatch.setattr(templates, "render", lambda *a, **k: rendered.append(real(*a, **k)) or rendered[-1])
        place.chat(messages=[{"role": "user", "content": "x"}], reasoning_effort="high")
        place.chat(messages=[{"role": "user", "content": "x"}], reasoning_effort="none")
        assert rendered == ["calm/True/high/x", "calm/False//x"]


def test_tokens_that_the_model_has_no_embeddings_for_are_refused_by_name(tmp_path):
    folder = write_tokens_beyond(write_model(tmp_path, small_config(vocab_size=260)))
    with serving(penstock.load(folder, device="reference"), Options(allow_special_in_messages=True)) as place:
        image = "has 260 ('<|image|>'), expected ids from 0 to 259, which have embeddings"
        for param, path, fields in (
            ("messages", CHAT, {"messages": [{"role": "user", "content": "<|image|>"}]}),
            ("prompt", "/v1/completions", {"prompt": "a<|image|>"}),
            ("prompt[1]", "/v1/completions", {"prompt": ["a", "<|image|>"]}),
            ("prompt", "/v1/completions", {"prompt": [5, 260]}),
            ("logit_bias", "/v1/completions", {"prompt": "a", "logit_bias": {"260": 1}}),
            ("stop_token_ids", "/v1/completions", {"prompt": "a", "stop_token_ids": [260]}),
        ):
            response = place.client.post(path, json=fields)
            error = error_of(response)
            assert (response.status_code, error["param"], error["message"]) == (400, param, f"{param}: {image}")
        fields = {"prompt": "a", "ignore_eos": True, "max_tokens": 2}  # of the two ends the model has one
        assert place.client.post("/v1/completions", json=fields).json()["usage"]["completion_tokens"] == 2
        tokens = place.client.post("/tokenize", json={"content": "a<|image|>"}).json()["tokens"]
        assert place.client.post("/detokenize", json={"tokens": tokens}).json()["content"] == "a<|image|>"
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
        answer = place.chat(json_schema=schema, max_tokens=50).json()
        assert answer["choices"][0]["message"]["content"].replace(" ", "").startswith("{")
