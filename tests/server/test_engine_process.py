"""The engine in a process of its own: the same answers, and what happens when one of the two processes ends."""

import contextlib
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("msgspec", reason="the extra `server` is not installed")

from penstock.engine.remote import BUFFER, RemoteScheduler
from penstock.server.engine_start import engine_starter
from penstock.server.guard import Access
from penstock.server.model_info import RemoteModel, read_tokenizer
from penstock.server.run import background
from penstock.server.service import Options, Service
from penstock.weights.resolve import resolve_model
from tests.server.common import CHAT, PROMPT, Place, error_of, wait_for
from tests.server.test_serve import started

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at processes through /proc")

LONG = {"messages": PROMPT, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def remote():
    """A server in this process whose engine is in another one."""
    service = Service(Options(), engine_starter({}, lambda note: None))
    service.load(lambda _: (RemoteModel(read_tokenizer(resolve_model(None))), {}))
    assert service.failure is None
    with background(service, Access()) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield Place(url, service, client)


def scheduler_of(place: Place) -> RemoteScheduler:
    found = place.service.scheduler
    assert isinstance(found, RemoteScheduler)
    return found


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def test_answers_are_those_of_an_engine_in_this_process(remote, llm):
    want = llm.chat(PROMPT, max_tokens=8)
    whole = remote.chat().json()
    assert whole["choices"][0]["message"]["content"] == want.text
    assert whole["usage"]["completion_tokens"] == len(want.tokens)
    events = remote.events()
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert text == want.text and events[-1] == "[DONE]"
    assert events[-2]["timings"]["predicted_n"] == 8 and events[-2]["timings"]["prompt_ms"] > 0
    sampled = remote.chat(temperature=0.8, seed=5, max_tokens=12).json()["choices"][0]["message"]["content"]
    assert sampled == llm.chat(PROMPT, temperature=0.8, seed=5, max_tokens=12).text


def test_logprobs_stops_grammars_and_several_answers_travel(remote, llm):
    want = llm.chat(PROMPT, max_tokens=4, logprobs=2)
    found = remote.chat(max_tokens=4, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in found] == pytest.approx(want.logprobs, rel=1e-12)
    assert [len(entry["top_logprobs"]) for entry in found] == [2] * 4
    whole = llm.chat(PROMPT, max_tokens=12).text
    stop = whole[6:9]
    stopped = remote.chat(max_tokens=1500, stop=[stop]).json()["choices"][0]
    assert stopped["message"]["content"] == whole[: whole.index(stop)] and stopped["finish_reason"] == "stop"
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    content = remote.chat(max_tokens=60, response_format=format).json()["choices"][0]["message"]["content"]
    assert json.loads(content)["a"] in (1, 2)
    many = remote.chat(n=3, seed=1, temperature=0.7).json()["choices"]
    assert len({choice["message"]["content"] for choice in many}) > 1
    wait_for(lambda: scheduler_of(remote).metrics().running == 0, 10)


def test_what_the_server_tells_of_itself_is_the_engines(remote, llm):
    meta = remote.client.get("/v1/models").json()["data"][0]["meta"]
    assert meta["n_ctx"] == llm.max_context and meta["n_vocab"] == llm.config.vocab_size
    assert meta["size"] == llm.stats().weight_bytes and meta["quantization"] == "4-bit"
    counts = remote.chat(expert_heat=True).json()["expert_heat"]["counts"]
    per_layer = 7 * llm.config.top_k  # of eight tokens the last is not computed
    assert [sum(layer) for layer in counts] == [per_layer] * len(meta["expert_layers"])
    assert remote.client.get("/props").json()["total_slots"] == scheduler_of(remote).max_sequences
    wait_for(lambda: "penstock:tokens_predicted_total 0.0" not in remote.client.get("/metrics").text, 10)


def test_a_client_that_leaves_ends_its_request_in_the_engine(remote):
    scheduler = scheduler_of(remote)
    before = scheduler.metrics().cancelled
    with remote.client.stream("POST", CHAT, json=LONG | {"stream": True}) as response:
        next(response.iter_lines())
    wait_for(lambda: scheduler.metrics().cancelled > before and scheduler.metrics().running == 0, 10)


def stands(scheduler) -> bool:
    """Whether no token comes for more than the time between two reports of the engine."""
    before = scheduler.metrics().generated_tokens
    time.sleep(1.0)
    return scheduler.metrics().generated_tokens == before


def test_a_reader_that_lags_behind_holds_its_request_up_and_no_other(remote, llm):
    scheduler = scheduler_of(remote)
    tokens = 3 * BUFFER + 100  # more than both processes keep
    options = {"max_tokens": tokens, "logit_bias": dict.fromkeys(llm.tokenizer.eos_ids, -1e30)}
    handle = scheduler.submit(scheduler.request("Once upon a time", **options))
    chunk = next(handle)
    held = scheduler._live[max(scheduler._live)]
    wait_for(lambda: held.paused, 60)
    other = scheduler.submit(scheduler.request("The king", max_tokens=4)).result(60)
    assert len(other.tokens) == 4
    wait_for(lambda: stands(scheduler), 60)  # the engine waits for the reader
    assert not handle._queue.drained and handle.state != "done"
    text = chunk.text + "".join(more.text for more in handle)
    assert text == llm.generate("Once upon a time", **options).text


def test_a_handle_that_is_dropped_ends_its_request(remote):
    scheduler = scheduler_of(remote)
    handle = scheduler.submit(scheduler.request("Once upon a time", max_tokens=1500))
    wait_for(lambda: scheduler.metrics().running == 1, 20)
    del handle
    wait_for(lambda: not scheduler._live, 20)


def test_a_dead_engine_ends_its_requests_and_a_new_one_answers(remote):
    """The last one of this module: a second death would end the server."""
    scheduler = scheduler_of(remote)
    results: dict[str, httpx.Response] = {}
    streamed: list[str] = []

    def whole():
        results["whole"] = httpx.post(remote.url + CHAT, json=LONG, timeout=60)

    def stream():
        with httpx.stream("POST", remote.url + CHAT, json=LONG | {"stream": True}, timeout=60) as response:
            streamed.extend(line for line in response.iter_lines() if line)

    threads = [threading.Thread(target=one) for one in (whole, stream)]
    for thread in threads:
        thread.start()
    wait_for(lambda: scheduler.metrics().running == 2, 30)
    before, began = scheduler.pid, time.monotonic()
    os.kill(before, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < 2.0
    assert results["whole"].status_code == 503 and error_of(results["whole"])["code"] == "engine_died"
    assert "signal 9" in error_of(results["whole"])["message"]
    last = json.loads(streamed[-1].removeprefix("data: "))
    assert last["error"]["code"] == "engine_died" and len(streamed) > 2
    health = remote.client.get("/health")
    assert health.status_code == 503 and health.json()["status"] == "restarting"
    refused = remote.chat()
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    wait_for(lambda: remote.client.get("/health").status_code == 200, 120)
    assert scheduler.pid != before and remote.chat().status_code == 200


def engine_of(pid: int) -> int:
    """The engine process of a server."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            child = re.search(rf"^PPid:\s+{pid}$", (process / "status").read_text(), re.MULTILINE)
            if child and b"engine_process" in (process / "cmdline").read_bytes():
                return int(process.name)
    raise AssertionError("there is no engine process")


@pytest.mark.slow
def test_a_second_death_ends_the_server_with_status_1():
    with started("--engine-process") as server:
        os.kill(engine_of(server.process.pid), signal.SIGKILL)
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503, 5)
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200, 120)
        os.kill(engine_of(server.process.pid), signal.SIGKILL)
        assert server.process.wait(20) == 1


@pytest.mark.slow
@pytest.mark.parametrize("loading", [False, True], ids=["ready", "loading"])
def test_an_engine_does_not_outlive_the_front(loading):
    with started("--engine-process", ready=not loading) as server:
        wait_for(lambda: _found(server.process.pid), 20)
        engine = engine_of(server.process.pid)
        server.process.kill()
        wait_for(lambda: not alive(engine), 3)


def _found(pid: int) -> bool:
    with contextlib.suppress(AssertionError, OSError):
        return engine_of(pid) > 0
    return False


@pytest.mark.slow
def test_a_signal_to_the_front_finishes_answers_and_ends_both():
    with started("--engine-process") as server:
        engine = engine_of(server.process.pid)
        body = LONG | {"max_tokens": 60}
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(httpx.post(server.url + CHAT, json=body, timeout=60)))
        thread.start()
        wait_for(lambda: "requests_processing 1.0" in httpx.get(f"{server.url}/metrics").text, 20)
        assert server.end(signal.SIGTERM) == 0
        thread.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 60
        assert not alive(engine)


@pytest.mark.slow
def test_a_model_that_the_engine_cannot_load_is_stated(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with started("--engine-process", "--model", str(tmp_path), ready=False) as server:
        wait_for(lambda: httpx.get(f"{server.url}/health").json()["status"] == "error", 60)
        assert server.end(signal.SIGTERM) == 1
