"""A thousand clients at once, most of them rude: nothing leaks, and every finished answer is the right one."""

import asyncio
import contextlib
import json
import random
import re
import resource
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.common import wait_for
from tests.server.test_serve import Program, started

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at processes through /proc")

PROMPTS = ["Once upon a time", "The king said", "A fox came to the river and", "In the dark wood", "The old woman had"]
TOKENS = 4

KINDS = {  # how many of a hundred clients do what
    "stream": 14,
    "whole": 14,
    "slow": 12,  # reads a little, sleeps, reads the rest
    "idle": 4,  # connects, says nothing, goes
    "head": 8,  # leaves in the middle of the head
    "body": 8,
    "asked": 12,  # leaves when the request is complete
    "reading": 16,  # leaves after the first events
    "wrong": 6,
    "broken": 6,
}


@dataclass
class Outcome:
    """What clients saw."""

    done: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)


class Client:
    def __init__(self, port: int, want: dict[tuple[str, int], str], outcome: Outcome) -> None:
        self.port, self.want, self.outcome = port, want, outcome

    async def run(self, number: int) -> None:
        """One connection, what it does chosen by its number alone."""
        rng = random.Random(number)
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        try:
            async with asyncio.timeout(300):
                await self._act(kind, rng, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            self.outcome.wrong.append(f"{kind}: {error!r}")
        finally:
            if rng.random() < 0.5:
                writer.transport.abort()
            else:
                writer.close()
                with contextlib.suppress(Exception):
                    await writer.wait_closed()

    async def _act(self, kind: str, rng: random.Random, reader: Any, writer: Any) -> None:
        if kind == "idle":
            await asyncio.sleep(rng.random())
            return
        if kind == "broken":
            writer.write(rng.randbytes(200) + b"\r\n\r\n")
            self._expect(kind, await reader.read(), 400)
            return
        prompt, seed = rng.choice(PROMPTS), rng.randrange(3)
        streamed = kind in ("stream", "slow", "reading") or rng.random() < 0.5
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0.8, "top_p": 1, "seed": seed}
        body |= {"stream": streamed, "ignore_eos": True}
        if kind == "wrong":
            body["max_tokens"] = rng.choice([0, -1, "x", None, 2**64, 1.5]) or 0
        elif kind in ("asked", "reading"):
            body["max_tokens"] = 1500
        elif kind == "whole":
            body["stream"] = streamed = False
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        whole = f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        if kind in ("head", "body"):
            cut = rng.randrange(1, 60) if kind == "head" else len(whole) - rng.randrange(1, len(data))
            writer.write(whole[:cut])
            await writer.drain()
            await asyncio.sleep(rng.random() / 2)
            return
        writer.write(whole)
        await writer.drain()
        if kind == "asked":
            await asyncio.sleep(rng.random())
        elif kind == "reading":
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(rng.randrange(4)):
                await reader.readline()
        elif kind == "wrong":
            self._expect(kind, await reader.read(), 400)
        else:
            if kind == "slow":
                for _ in range(4):
                    await asyncio.sleep(rng.random() / 2)
                    data = await reader.read(50)
                    whole = data if _ == 0 else whole + data
                whole += await reader.read()
            else:
                whole = await reader.read()
            self._check(kind, whole, streamed, prompt, seed)

    def _expect(self, kind: str, response: bytes, status: int) -> None:
        if not response.startswith(f"HTTP/1.1 {status} ".encode()) or b'{"error":' not in response:
            self.outcome.wrong.append(f"{kind}: {response[:200]!r}")

    def _check(self, kind: str, response: bytes, streamed: bool, prompt: str, seed: int) -> None:
        if response.startswith(b"HTTP/1.1 429 ") and b"retry-after" in response.lower():
            self.outcome.refused += 1
            return
        head, _, body = response.partition(b"\r\n\r\n")
        body = _unchunked(body) if b"chunked" in head.lower() else body
        try:
            if streamed:
                events = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
                assert events[-1] == "[DONE]"
                text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
            else:
                text = json.loads(body)["choices"][0]["text"]
        except Exception as error:
            self.outcome.wrong.append(f"{kind}: {error!r} in {response[-300:]!r}")
            return
        if text != self.want[prompt, seed]:
            self.outcome.wrong.append(f"{kind}: {text!r}, expected {self.want[prompt, seed]!r}")
        self.outcome.done += 1


def _unchunked(data: bytes) -> bytes:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        parts.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(parts)


async def _storm(client: Client, connections: int, seconds: float) -> int:
    """That many at a time; when the time is up, those under way come to their ends. How many there were."""
    end = time.monotonic() + seconds
    numbers = iter(range(10**9))
    count = 0

    async def one(first: bool) -> None:
        nonlocal count
        await asyncio.sleep(random.random() * min(1.0, seconds))  # a thousand SYNs in one moment overflow the queue
        while first or time.monotonic() < end:
            first = False
            count += 1
            await client.run(next(numbers))

    await asyncio.gather(*(one(True) for _ in range(connections)))
    return count


def _state(server: Program) -> dict[str, int]:
    proc = Path(f"/proc/{server.process.pid}")
    status = proc.joinpath("status").read_text()
    found = {name: int(re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)[1]) for name in ("VmRSS", "Threads")}  # type: ignore[index]
    metrics = httpx.get(f"{server.url}/metrics").text
    for name in ("kv_pages_used", "requests_processing", "requests_deferred", "sequence_memory_used_bytes"):
        found[name] = int(float(re.search(rf"^penstock:{name} (\S+)", metrics, re.MULTILINE)[1]))  # type: ignore[index]
    return found | {"files": len(list(proc.joinpath("fd").iterdir()))}


def _settled(server: Program) -> dict[str, int]:
    wait_for(lambda: all(_state(server)[name] == 0 for name in ("requests_processing", "requests_deferred")), 120)
    return _state(server)


def _run(llm: Any, connections: int, seconds: float, before_that: int, growth: int) -> None:
    """`before_that`: connections of a first storm, after which memory may grow by `growth` bytes at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3 * connections:
        pytest.skip(f"{hard} files may be open, {3 * connections} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    options = {"max_tokens": TOKENS, "temperature": 0.8, "logit_bias": dict.fromkeys(llm.tokenizer.eos_ids, -1e30)}
    want = {(p, seed): llm.generate(p, seed=seed, **options).text for p in PROMPTS for seed in range(3)}
    try:
        with started("--queue", "2000", "--disable-log-requests") as server:
            port = int(server.url.rpartition(":")[2])
            outcome = Outcome()
            client = Client(port, want, outcome)
            asyncio.run(_storm(client, before_that, seconds / 10))
            before = _settled(server)
            count = asyncio.run(_storm(client, connections, seconds))
            after = _settled(server)
            assert httpx.get(f"{server.url}/health").status_code == 200
            assert server.end(signal.SIGTERM) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(
        f"{count} connections, {outcome.done} answers, {outcome.refused} refused; {before} -> {after}", file=sys.stderr
    )
    assert outcome.wrong == []
    assert count >= connections and outcome.done > count / 5
    assert after["kv_pages_used"] <= before["kv_pages_used"]
    assert after["sequence_memory_used_bytes"] <= before["sequence_memory_used_bytes"]
    assert after["Threads"] <= before["Threads"] and after["files"] <= before["files"] + 1
    assert after["VmRSS"] - before["VmRSS"] < growth >> 10, f"{before} -> {after}"
    assert "Traceback" not in "\n".join(server.lines)


def test_two_hundred_connections(llm):
    _run(llm, 200, 0.5, before_that=50, growth=128 << 20)


@pytest.mark.slow
def test_a_thousand_connections_for_two_minutes(llm):
    _run(llm, 1000, 120.0, before_that=1000, growth=48 << 20)
