"""Two engine processes of the demo model behind one address."""

import os
import signal
import sys

import httpx
import pytest

pytest.importorskip("msgspec", reason="the extra `server` is not installed")

from penstock.engine.request import Timings
from penstock.engine.resources import Resources, share_machine
from penstock.server.engine_start import engine_starter, replica_start
from penstock.server.guard import Access
from penstock.server.latency import BOUNDS, Latencies
from penstock.server.model_info import RemoteModel, read_tokenizer
from penstock.server.run import background
from penstock.server.service import Options, Service
from penstock.weights.resolve import resolve_model
from tests.cli.common import call
from tests.server.common import Place, wait_for

STORY = "Once upon a time there was a fox who lived in a wood with {} other animals, and one day the fox said"


@pytest.fixture(scope="module")
def two():
    """A server in this process with two engines; it has been asked nothing."""
    service = Service(Options(), engine_starter({}, lambda note: None, share_machine("cpu", 2)))
    service.load(lambda _: (RemoteModel(read_tokenizer(resolve_model(None))), {}))
    assert service.failure is None
    with background(service, Access()) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield Place(url, service, client)


def numbers(place: Place) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in place.client.get("/metrics").text.splitlines() if line[:1] != "#"]
    return {name: float(value) for name, _, value in lines}


def test_answers_are_those_of_one_engine_and_beginnings_stay_together(two, llm):
    replicas = two.service.replicas
    assert replicas is not None
    texts = [*(f"{name} {STORY.format(name)}" for name in ("Seven", "No", "Seven", "No")), "The king", "The king"]
    for text in texts:
        body = {"prompt": text, "max_tokens": 6, "temperature": 0}
        answer = two.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert answer == llm.generate(text, max_tokens=6).text
    assert replicas.chosen == {(0, False): 2, (0, True): 2, (1, False): 1, (1, True): 1}
    health = two.client.get("/health")
    assert health.json() == {"status": "ok", "progress": 1.0, "model": "demo", "replicas": {"ready": 2, "total": 2}}
    slots = [scheduler.max_sequences for scheduler in replicas.schedulers]
    assert two.client.get("/props").json()["total_slots"] == sum(slots) == 16

    wait_for(lambda: numbers(two)["penstock:tokens_predicted_total"] == 6 * 6 + 2, 10)  # each engine tried itself out
    found = numbers(two)
    each = [found[f'penstock:replica_tokens_predicted_total{{replica="{n}"}}'] for n in (0, 1)]
    assert each == [4 * 6 + 1, 2 * 6 + 1]
    assert found['penstock:replica_requests_total{choice="prefix",replica="1"}'] == 1
    count = {name: found[f'vllm:{name}_seconds_count{{model_name="demo"}}'] for name in ("time_to_first_token",)}
    assert count == {"time_to_first_token": 6}
    assert found['vllm:inter_token_latency_seconds_count{model_name="demo"}'] == 6 * 5
    assert found['vllm:prefix_cache_queries_total{model_name="demo"}'] == found["penstock:prompt_tokens_total"] > 100


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes are not pinned here")
def test_replicas_share_the_machine(two):
    replicas = two.service.replicas
    own = [os.sched_getaffinity(scheduler.pid) for scheduler in replicas.schedulers]
    assert own == [set(share.cpus) for share in share_machine("cpu", 2)]
    if sys.platform == "linux":
        memory = [scheduler.metrics().memory_total for scheduler in replicas.schedulers]
        assert memory[0] == pytest.approx(memory[1], rel=0.1) and sum(memory) < os.sysconf("SC_PHYS_PAGES") * 4096


def test_a_server_with_one_dead_replica_is_healthy(two):
    """The last one of this module: the dead engine may still be loading when it ends."""
    replicas = two.service.replicas
    os.kill(replicas.schedulers[0].pid, signal.SIGKILL)
    wait_for(lambda: replicas.available == [1], 10)
    health = two.client.get("/health")
    assert health.status_code == 200 and health.json()["replicas"] == {"ready": 1, "total": 2}
    assert two.chat().status_code == 200
    assert numbers(two)['penstock:replica_ready{replica="0"}'] == 0


def test_replica_start_shares_out_what_is_for_all_on_a_cpu():
    load, options = {"cache_memory": "3G", "threads": 5}, {"queue": 256, "prefix_memory": 1000}
    start = replica_start(load, options, Resources((0, 1), 2), 3)
    assert start.model == {"cache_memory": 1 << 30, "threads": 2}
    assert start.scheduler == {"queue": 86, "prefix_memory": 333}
    on_gpu = replica_start(load, options, Resources(gpus=("0",)), 3)
    assert on_gpu.model == load and on_gpu.scheduler == options | {"queue": 86}
    left_out = replica_start({"cache_memory": None}, {"queue": 0, "prefix_memory": None}, Resources((0,), 1), 2)
    assert left_out.model == {"cache_memory": None, "threads": 1}
    assert left_out.scheduler == {"queue": 0, "prefix_memory": None}


def test_latencies_count_the_gaps_of_a_request_by_their_mean():
    found = Latencies()
    found.add([Timings(9, 0.25, 5, 2.0, 0.5), Timings(9, 0.004, 1, 0.0, 0.0), Timings(9, 1.0, 0, 0.0, 1.0)])

    def buckets(histogram):
        """Where the count grows."""
        seen, before = {}, 0
        for bound, count in histogram.buckets():
            if count > before:
                seen[float(bound)] = count - before
            before = count
        return seen

    assert buckets(found.inter_token) == {0.5: 4} and found.inter_token.sum == 2.0  # a bound counts as below it
    assert buckets(found.first_token) == {0.005: 1, 1.0: 1} and found.first_token.sum == pytest.approx(0.754)
    assert buckets(found.whole) == {0.005: 1, 5.0: 1} and found.whole.sum == pytest.approx(2.754)
    assert buckets(found.queue) == {BOUNDS[0]: 1, 0.5: 1} and found.queue.sum == 0.5
    found.queue.observe(1e9)
    assert found.queue.buckets()[-1] == ("+Inf", 3) and found.queue.buckets()[-2][1] == 2


@pytest.fixture
def unserved(monkeypatch):
    monkeypatch.setattr("penstock.server.run.bind", lambda *_: pytest.fail("the command line was taken"))


@pytest.mark.parametrize("size", ["0", "-1", "two", "1.5", ""])
def test_a_wrong_number_of_replicas_is_wrong_usage(capsys, unserved, size):
    shown = call(capsys, "serve", "-dp", size)
    assert shown.status == 2 and "--data-parallel-size" in shown.err and shown.err.count("\n") == 1


def test_replicas_need_processes_and_gpus_enough(capsys, monkeypatch, unserved):
    shown = call(capsys, "serve", "--data-parallel-size", "2", "--no-engine-process")
    assert (shown.status, shown.err.count("\n")) == (2, 1) and "expected 1 with --no-engine-process" in shown.err
    monkeypatch.setattr("penstock.engine.resources.cuda.unusable", lambda: None)
    monkeypatch.setattr("penstock.engine.resources.cuda.visible_gpus", lambda: ["0"])
    shown = call(capsys, "serve", "-dp", "2", "--device", "cuda")
    assert shown.status == 1 and shown.out == ""
    assert shown.err == "penstock: error: --data-parallel-size: is 2: 2 engines need a GPU each, there is 1\n"
    monkeypatch.setenv("PENSTOCK_DATA_PARALLEL_SIZE", "3")
    assert "is 3: 3 engines" in call(capsys, "serve", "--device", "cuda").err


def test_more_replicas_than_cores_are_warned_of(capsys, monkeypatch):
    def instead(loader, options, access, bound, listening, *more):
        bound.close()
        listening()
        return type("Service", (), {"failure": None})()

    monkeypatch.setattr("penstock.server.run.serve", instead)
    shown = call(capsys, "serve", "--port", "0", "--device", "cpu", "-dp", "999")
    first, second = shown.err.splitlines()
    assert shown.status == 0 and " listens on http://" in first
    assert second.startswith("penstock: warning: --data-parallel-size: is 999, more than the ")
