"""Bytes that are hardly HTTP, clients that are slow or leave: the server answers in its error shape, or hangs up."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.server.limits import Limits
from penstock.server.service import Options
from tests.server.common import CHAT, PROMPT, error_of, received, serving, status_of, wait_for

BODY = json.dumps({"messages": PROMPT, "max_tokens": 2}).encode()
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
HOST = b"Host: localhost\r\n"


def post(body: bytes, *headers: bytes, path: bytes = CHAT.encode(), version: bytes = b"HTTP/1.1") -> bytes:
    lines = [b"POST " + path + b" " + version, HOST.rstrip(), b"Content-Type: application/json", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@pytest.fixture(scope="module")
def place(llm):
    """Short limits, so that nobody has to wait for them."""
    limits = Limits(
        header_seconds=1.0, body_seconds=1.0, idle_seconds=1.0, linger_seconds=0.5, headers=8 << 10, body=1 << 20
    )
    with serving(llm, Options(limits=limits)) as made:
        yield made


BYTES = {
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), 400),
    "http/0.9": (b"GET /health\r\n\r\n", 400),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "smtp": (b"EHLO example.org\r\n\r\n", 400),
    "nul": (b"\x00" * 100 + b"\r\n\r\n", 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /health HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400),
    "bad header": (b"GET /health HTTP/1.1\r\n" + HOST + b"no colon\r\n\r\n", 400),
    "space in a name": (b"GET /health HTTP/1.1\r\n" + HOST + b"a b: c\r\n\r\n", 400),
    "folded header": (b"GET /health HTTP/1.1\r\n" + HOST + b"a: b\r\n \x00\r\n\r\n", 400),
    "negative length": (post(BODY, b"Content-Length: -5"), 400),
    "length of words": (post(BODY, b"Content-Length: many"), 400),
    "enormous length": (post(BODY, b"Content-Length: " + b"9" * 30), 400),
    "two lengths": (post(BODY, b"Content-Length: 5", b"Content-Length: 6"), 400),
    "length and chunks": (post(CHUNKED, b"Content-Length: 5", b"Transfer-Encoding: chunked"), 400),
    "chunks and length": (post(BODY, b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(BODY)), 400),
    "chunks of http/1.0": (post(CHUNKED, b"Transfer-Encoding: chunked", version=b"HTTP/1.0"), 400),
    "large length": (post(BODY, b"Content-Length: 104857600"), 413),
    "length of 20 digits": (post(BODY, b"Content-Length: " + b"9" * 20), 413),
    "unknown coding": (post(BODY, b"Transfer-Encoding: gzip"), 501),
    "chunk of nonsense": (post(b"zz\r\nhello\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"), 400),
    "long head": (b"GET /health HTTP/1.1\r\n" + HOST + b"x: " + b"y" * 100_000 + b"\r\n\r\n", 431),
    "many headers": (
        b"GET /health HTTP/1.1\r\n" + HOST + b"".join(b"x%d: y\r\n" % n for n in range(9999)) + b"\r\n",
        431,
    ),
    "long path": (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431),
    "no length": (post(b"", b"Connection: close"), 400),
    "late body": (post(BODY[:10], b"Content-Length: 100"), 408),
    "late chunk": (post(b'5\r\n{"mes', b"Transfer-Encoding: chunked"), 408),
    "head without end": (b"GET /health HTTP/1.1\r\n" + HOST, 408),
    "silence": (b"", 408),
}


@pytest.fixture(scope="module")
def answers(place):
    """To all BYTES, sent at once: most wait for a limit."""
    with ThreadPoolExecutor(len(BYTES)) as pool:
        return dict(zip(BYTES, pool.map(lambda name: place.send(BYTES[name][0]), BYTES), strict=True))


@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_are_no_request_get_an_error_and_an_end(place, answers, name):
    response, status = answers[name], BYTES[name][1]
    assert status_of(response) == status, response
    assert error_of(response)["message"]
    assert place.client.get("/health").status_code == 200


def test_a_slow_head_is_not_waited_for(place):
    with place.socket() as made:
        start = time.monotonic()
        for n in range(40):  # a byte now and then does not buy time
            try:
                made.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "[n : n + 1])
            except OSError:
                break
            time.sleep(0.1)
        assert time.monotonic() - start < 3.5
        assert status_of(received(made)) == 408


def test_requests_may_follow_each_other_at_once(place):
    one = post(BODY, b"Content-Length: %d" % len(BODY))
    last = b"GET /health HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
    answers = place.send(one + one + last)
    assert answers.count(b"HTTP/1.1 200 OK") == 3
    assert answers.index(b"chat.completion") < answers.index(b'"status":"ok"')


def test_http_1_0_and_expect_are_understood(place):
    old = place.send(b"GET /health HTTP/1.0\r\n" + HOST + b"\r\n")
    assert status_of(old) == 200
    with place.socket() as made:
        made.sendall(post(b"", b"Content-Length: %d" % len(BODY), b"Expect: 100-continue", b"Connection: close"))
        assert made.recv(65536).startswith(b"HTTP/1.1 100 ")
        made.sendall(BODY)
        assert status_of(received(made)) == 200


def test_an_upgrade_is_ignored(place):
    asked = b"GET /health HTTP/1.1\r\n" + HOST + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert b'"status":"ok"' in place.send(asked)


def test_idle_connections_are_closed(place):
    with place.socket() as made:
        made.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
        assert b'"status":"ok"' in received(made)  # ends, because the server hangs up


def test_a_refused_body_is_not_read_for_ever(place):
    with place.socket() as made:
        made.sendall(post(b"", b"Content-Length: 104857600"))
        assert status_of(made.recv(65536)) == 413
        wait_for(lambda: _hung_up(made))


def _hung_up(made: socket.socket) -> bool:
    try:
        made.sendall(b" " * 1000)
    except OSError:
        return True
    time.sleep(0.2)
    return False


@pytest.mark.parametrize("stage", ["before a byte", "in the head", "in the body", "waiting", "streaming"])
def test_clients_that_leave_are_forgotten(place, stage):
    stream = json.dumps(
        {"messages": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": stage == "streaming"}
    ).encode()
    whole = post(stream, b"Content-Length: %d" % len(stream))
    sent = {"before a byte": b"", "in the head": whole[:40], "in the body": whole[:-20]}.get(stage, whole)
    loaded = place.service.loaded
    for how in (socket.SHUT_RDWR, None):
        before = loaded[1].metrics()
        made = place.socket()
        made.sendall(sent)
        if stage in ("waiting", "streaming"):
            wait_for(lambda: loaded[1].metrics().generated_tokens > before.generated_tokens)  # noqa: B023
        if how is not None:
            made.shutdown(how)
        made.close()
        place.settled()
        after = loaded[1].metrics()
        assert after.cancelled - before.cancelled == (stage in ("waiting", "streaming"))
        assert after.generated_tokens - before.generated_tokens < 1900  # it did not go on to its end


@pytest.mark.parametrize("path", [CHAT, "/health"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closed_its_half_is_answered(place, path, stream):
    body = json.dumps({"messages": PROMPT, "max_tokens": 40, "ignore_eos": True, "stream": stream}).encode()
    one = post(body, b"Content-Length: %d" % len(body))
    if path == "/health":
        one = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
    end = {CHAT: b"data: [DONE]" if stream else b'"finish_reason":"length"', "/health": b'"status":"ok"'}[path]
    for count in (1, 2):  # several at once are all answered, and then the connection ends
        with place.socket() as made:
            made.sendall(one * count)
            made.shutdown(socket.SHUT_WR)
            answers = received(made)
        assert answers.count(b"HTTP/1.1 ") == answers.count(b"HTTP/1.1 200 OK\r\n") == count, answers
        assert answers.startswith(b"HTTP/1.1 200 OK\r\n") and answers.count(end) == count
    with place.socket() as made:  # what follows the whole request is half of one, which nobody waits for
        made.sendall(one + one[:-20])
        made.shutdown(socket.SHUT_WR)
        answers = received(made)
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 1 and answers.count(end) == 1
    place.settled()


def test_a_client_that_never_reads_is_dropped(llm):
    limits = Limits(write_seconds=1.0)
    with serving(llm, Options(limits=limits, max_tokens=2000)) as place:
        body = json.dumps(
            {"messages": PROMPT, "n": 8, "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20}
        )
        with socket.socket() as made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            made.connect(("127.0.0.1", place.port))
            made.sendall(post(body.encode(), b"Content-Length: %d" % len(body)))
            loaded = place.service.loaded
            wait_for(lambda: loaded[1].metrics().running > 0)
            wait_for(lambda: loaded[1].metrics().running == 0, 60)
            assert loaded[1].metrics().finished <= 1  # the first token of `load`: nobody came to his end
            time.sleep(1.5)
            rest = received(made)  # the connection was given up as well: nothing came behind what is unread
            assert b'"error"' not in rest and not rest.endswith(b"0\r\n\r\n")
        place.settled()


def test_connections_beyond_the_limit_are_turned_away(llm):
    with serving(llm, Options(limits=Limits(connections=3))) as place:
        held = [place.socket() for _ in range(3)]
        time.sleep(0.2)
        refused = place.send(b"")
        assert status_of(refused) == 503 and error_of(refused)["code"] == "too_many_connections"
        assert b"retry-after: 1" in refused.lower()
        for made in held:
            made.close()
        wait_for(
            lambda: status_of(place.send(b"GET /health HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n")) == 200
        )


def test_streams_get_signs_of_life_and_a_last_word_when_time_is_up(llm, monkeypatch):
    limits = Limits(request_seconds=1.0)
    with serving(llm, Options(limits=limits, ping_seconds=0.2)) as place:
        scheduler = place.service.scheduler
        monkeypatch.setattr(scheduler, "_admit", lambda: None)  # nothing is ever started
        with place.client.stream("POST", CHAT, json={"messages": PROMPT, "stream": True}) as response:
            text = response.read().decode()
        assert text.count(": ping\n\n") >= 2
        last = json.loads(text.rstrip().rpartition("data: ")[2])
        assert last["error"]["code"] == "timeout" and "[DONE]" not in text
        late = place.chat()
        assert late.status_code == 504 and error_of(late)["code"] == "timeout"
        monkeypatch.undo()
        place.settled()
