"""A server in a thread of the test process, and what tests ask of it."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from penstock.server.guard import Access
from penstock.server.run import background
from penstock.server.service import Options, Service

PROMPT = [{"role": "user", "content": "Tell me a story about a fox."}]
CHAT = "/v1/chat/completions"


@dataclass
class Place:
    """A running server: its address, the service behind it, a client."""

    url: str
    service: Service
    client: httpx.Client

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def chat(self, **fields: Any) -> httpx.Response:
        return self.client.post(CHAT, json={"messages": PROMPT, "max_tokens": 8, "temperature": 0, **fields})

    def events(self, path: str = CHAT, **fields: Any) -> list[Any]:
        """Data of all events of a stream; the last one of a good stream is "[DONE]"."""
        body = {"messages": PROMPT, "max_tokens": 8, "temperature": 0} if path == CHAT else {}
        with self.client.stream("POST", path, json={**body, "stream": True, **fields}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            text = response.read().decode()
        lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def send(self, data: bytes) -> bytes:
        """What comes back for raw bytes until the server closes, which it may do before all are sent."""
        parts: list[bytes] = []
        with self.socket() as made:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                made.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                while part := made.recv(65536):
                    parts.append(part)
        return b"".join(parts)

    def settled(self) -> None:
        """Wait until no request is left and nothing is held but stored prefixes."""
        loaded = self.service.loaded
        assert loaded is not None
        wait_for(lambda: loaded[1].metrics().running == 0 and loaded[1].metrics().waiting == 0)
        assert self.client.get("/health").status_code == 200


def received(made: socket.socket) -> bytes:
    parts = []
    while part := made.recv(65536):
        parts.append(part)
    return b"".join(parts)


def wait_for(true: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@contextlib.contextmanager
def serving(llm: Any, options: Options | None = None, access: Access | None = None, port: int = 0) -> Iterator[Place]:
    """A server for a loaded model."""
    service = Service(options or Options())
    service.load(lambda _: (llm, {}))
    assert service.failure is None
    with background(service, access or Access(), port) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield Place(url, service, client)


def error_of(response: httpx.Response | bytes) -> dict[str, Any]:
    """The error of a response, after a look at its shape."""
    if isinstance(response, bytes):
        head, _, body = response.partition(b"\r\n\r\n")
        assert b"application/json" in head, head
        content = json.loads(body)
    else:
        assert response.headers["content-type"] == "application/json", response.text
        content = response.json()
    error = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and "\n" not in error["message"]
    assert isinstance(error["type"], str)
    return error


def status_of(response: bytes) -> int:
    assert response.startswith(b"HTTP/1.1 "), response[:80]
    return int(response[9:12])


class Script:
    """A grammar that lets a model write one text and nothing else, to see what the server makes of it."""

    def __init__(self, tokens: list[int], eos: int, vocab: int) -> None:
        self._tokens, self._vocab, self._eos = tokens, vocab, eos
        self._at = 0
        self.done = self.closing = False

    def mask(self) -> np.ndarray:
        words = np.zeros((self._vocab + 31) // 32, np.uint32)
        token = self._tokens[self._at] if self._at < len(self._tokens) else self._eos
        words[token // 32] = 1 << (token % 32)
        return words

    def accept(self, token: int) -> None:
        self._at += 1

    def end_within(self, tokens: int) -> None:
        pass

    def copy(self) -> "Script":
        return Script(self._tokens, self._eos, self._vocab)


@contextlib.contextmanager
def scripted(monkeypatch: Any, place: Place, text: str, format: str = "qwen") -> Iterator[None]:
    """Inside, the model of a server answers with this text, and is taken for one of that format."""
    tokenizer, vocab = place.service.llm.tokenizer, place.service.llm.config.vocab_size
    script = Script(tokenizer.encode(text, add_special_tokens=False), min(tokenizer.eos_ids), vocab)
    with monkeypatch.context() as patched:
        patched.setattr(place.service, "_format", format)
        patched.setattr(place.service, "_grammar", lambda *_, **__: script)
        yield
