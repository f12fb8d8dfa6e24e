"""One client cannot hold the server: readers that sleep, and shares of sequences, prompts and the queue. HTTP only."""

import contextlib
import http.client
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from penstock.server.guard import Access
from penstock.server.limits import Limits
from penstock.server.service import Options
from tests.server.common import CHAT, PROMPT, Place, error_of, serving, wait_for

LONG = {"messages": PROMPT, "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": True}
LARGE = LONG | {"logprobs": True, "top_logprobs": 20}  # large events: who does not read them lags behind soon
SHORT = {"messages": PROMPT, "max_tokens": 4, "temperature": 0}
SECONDS = 40  # generous for a few tokens, and far below the minute that a client may leave data unread


def number(place: Place, name: str) -> int:
    """A value of /metrics."""
    found = re.search(rf"^penstock:{re.escape(name)} (\S+)", place.client.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return int(float(found[1]))


def sleeper(place: Place, room: int | None = 4096, **fields: Any) -> http.client.HTTPConnection:
    """A client that asks for a stream, with little room for what it does not read; None: what the system gives."""
    made = socket.socket()
    if room is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    made.settimeout(60)
    made.connect(("127.0.0.1", place.port))
    connection = http.client.HTTPConnection("127.0.0.1", place.port)
    connection.sock = made
    connection.request("POST", CHAT, json.dumps(LARGE | fields), {"content-type": "application/json"})
    return connection


def choices(text: str) -> list[Any]:
    """The choices of all events of a complete stream, in order."""
    events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]", text[-300:]
    return [json.loads(event)["choices"] for event in events[:-1]]


def stalled(place: Place) -> None:
    """Wait until no tokens come any more."""
    before = -1
    while (now := number(place, "tokens_predicted_total")) != before:
        before = now
        time.sleep(0.3)


KINDS: list[dict[str, Any]] = [
    {"stop": ["zzzz"]},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2**40},
    {"json_schema": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 300}, "seed": 1},
]


def test_sleeping_readers_give_their_sequences_to_others_and_lose_no_bit(llm):
    kinds = [LARGE | {"max_tokens": 140} | kind for kind in KINDS]
    threads = ThreadPoolExecutor(len(kinds))
    with serving(llm, Options(parallel=len(kinds))) as place, threads, contextlib.ExitStack() as held:
        want = list(threads.map(lambda kind: choices(place.client.post(CHAT, json=kind).text), kinds))
        asleep = [held.enter_context(contextlib.closing(sleeper(place, **kind))) for kind in kinds]
        wait_for(lambda: number(place, "requests_processing") == len(kinds))
        stalled(place)
        assert number(place, "requests_processing") == len(kinds)  # while nobody waits they keep what they have
        assert number(place, "preemptions_total") == 0
        start = time.monotonic()
        answer = place.client.post(CHAT, json=SHORT | {"n": len(kinds)}, timeout=SECONDS)
        assert answer.status_code == 200 and time.monotonic() - start < SECONDS
        assert number(place, "preemptions_total") == number(place, "requests_deferred") == len(kinds)
        assert number(place, "requests_processing") == 0
        got = threads.map(lambda connection: choices(connection.getresponse().read().decode()), asleep)
        assert list(got) == want
        place.settled()


def test_a_preempted_request_whose_reader_never_wakes_up_is_given_up(llm):
    options = Options(parallel=1, limits=Limits(write_seconds=2.0))
    with serving(llm, options) as place, contextlib.closing(sleeper(place)) as connection:
        wait_for(lambda: number(place, "requests_processing") == 1)
        assert place.client.post(CHAT, json=SHORT, timeout=SECONDS).status_code == 200
        assert number(place, "preemptions_total") == 1
        wait_for(lambda: number(place, 'requests_total{end="cancelled"}') == 1, SECONDS)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            connection.getresponse().read()


def test_a_client_that_reads_nothing_is_noticed_whatever_room_it_has(llm):
    """The system's buffers have room for megabytes, but not for what nobody reads."""
    with serving(llm, Options(parallel=1)) as place, contextlib.closing(sleeper(place, room=None)):
        wait_for(lambda: number(place, "requests_processing") == 1)
        assert place.client.post(CHAT, json=SHORT, timeout=SECONDS).status_code == 200
        assert number(place, "preemptions_total") == 1


# -- shares ----------------------------------------------------------------------------------------------------------


class Clients:
    """Two clients of a server, told apart by keys or by addresses, and the order in which their answers came."""

    def __init__(self, place: Place, by: str) -> None:
        self.place, self.came = place, []
        self._threads, self._numbers = ThreadPoolExecutor(16), itertools.count()
        self._clients = {}
        for n, name in enumerate("AB"):
            transport = httpx.HTTPTransport(local_address=f"127.0.0.{n + 1}" if by == "addresses" else None)
            headers = {"authorization": f"Bearer {name}"} if by == "keys" else {}
            self._clients[name] = httpx.Client(base_url=place.url, timeout=60, transport=transport, headers=headers)

    def send(self, name: str, body: dict[str, Any], path: str = CHAT) -> Future[httpx.Response]:
        def work() -> httpx.Response:
            forwarded = {"x-forwarded-for": f"10.0.0.{next(self._numbers)}"}  # anybody can send that
            response = self._clients[name].post(path, json=body, headers=forwarded)
            self.came.append(name)
            return response

        return self._threads.submit(work)

    def ask(self, name: str, **fields: Any) -> Future[httpx.Response]:
        """Send a short request, and return when it has reached the queue."""
        waiting = number(self.place, "requests_deferred")
        asked = self.send(name, SHORT | fields)
        wait_for(lambda: asked.done() or number(self.place, "requests_deferred") == waiting + fields.get("n", 1))
        return asked

    @contextlib.contextmanager
    def holding(self, name: str) -> Iterator[None]:
        """While the block runs, the client reads a stream of its own."""
        end = threading.Event()

        def read() -> None:
            with self._clients[name].stream("POST", CHAT, json=LONG) as response:
                for _ in response.iter_raw():
                    if end.is_set():
                        return

        running = number(self.place, "requests_processing")
        reading = self._threads.submit(read)
        wait_for(lambda: number(self.place, "requests_processing") == running + 1)
        try:
            yield
        finally:
            end.set()
            reading.result(60)

    def close(self) -> None:
        self._threads.shutdown()
        for client in self._clients.values():
            client.close()


@contextlib.contextmanager
def clients(llm: Any, by: str, options: Options) -> Iterator[Clients]:
    access = Access(keys=("A", "B", "watcher") if by == "keys" else ())
    with serving(llm, options, access) as place:
        place.client.headers["authorization"] = "Bearer watcher"
        with contextlib.closing(Clients(place, by)) as made:
            yield made


@pytest.mark.parametrize("by", ["keys", "addresses"])
def test_the_first_request_of_a_client_goes_before_the_next_ones_of_another(by, llm):
    with clients(llm, by, Options(parallel=2)) as made:
        with made.holding("A"), made.holding("A"):
            asked = [made.ask("A", n=3, max_tokens=30), *(made.ask("A", max_tokens=30) for _ in range(2))]
            asked.append(made.ask("B", max_tokens=30))
        assert [one.result(60).status_code for one in asked] == [200] * 4
        assert made.came[0] == "B"


def test_clients_that_both_have_many_requests_take_turns(llm):
    with clients(llm, "addresses", Options(parallel=1)) as made:
        with made.holding("A"):
            asked = [made.ask("A", max_tokens=20) for _ in range(3)] + [made.ask("B", max_tokens=20) for _ in range(3)]
        assert [one.result(60).status_code for one in asked] == [200] * 6
        assert made.came == ["B", "A", "B", "A", "B", "A"]


def test_prompts_of_two_clients_take_turns(llm):
    """A few long prompts of one client, then a short one of another: it does not wait until they are all computed."""
    long = [[n + 5] * 1800 for n in range(3)]
    with clients(llm, "addresses", Options(parallel=4, prefix_cache=False)) as made:
        asked = made.send("A", {"prompt": long, "max_tokens": 1}, "/v1/completions")
        wait_for(lambda: number(made.place, "requests_processing") == 3)
        computed = number(made.place, "prompt_tokens_total")
        assert made.ask("B", max_tokens=1).result(60).status_code == 200
        assert number(made.place, "prompt_tokens_total") - computed < 1800
        assert asked.result(60).status_code == 200


def test_one_client_cannot_fill_the_queue(llm):
    with clients(llm, "addresses", Options(parallel=1, limits=Limits(queue=4))) as made:
        with made.holding("A"):
            asked = [made.ask("A") for _ in range(4)]
            assert made.ask("A").result(60).status_code == 429
            first = made.send("B", SHORT)
            refused = asked.pop().result(60)  # the newest of A makes room
            assert refused.status_code == 429 and error_of(refused)["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1
        assert [one.result(60).status_code for one in [*asked, first]] == [200] * 4
        assert number(made.place, 'requests_total{end="refused"}') == 2
