"""All kinds of work at once: texts of all lengths, chats, tools, JSON, embeddings, prompts that are read, and clients
that leave. Every answer is the one that the request gets alone, and nothing is left behind.
"""

import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.test_load import _settled
from tests.server.test_serve import started

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at processes through /proc")

TEXT = "Once upon a time there was a fox who lived in a wood, and one day the king of the wood said: "
USER = [{"role": "user", "content": "Tell me of the fox."}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "tame": {"type": "boolean"}},
    "required": ["name", "tame"],
    "additionalProperties": False,
}


def requests(sizes: int) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies, each kind in so many sizes."""
    chat, text, found = "/v1/chat/completions", "/v1/completions", []
    for n in range(sizes):
        seeded: dict[str, Any] = {"temperature": 0.8, "top_p": 1, "seed": n}
        found += [
            (text, {"prompt": TEXT * (1 + 6 * n), "max_tokens": 4 + 20 * n, "ignore_eos": True, **seeded}),
            (text, {"prompt": [TEXT[:30], TEXT[40:]], "max_tokens": 5, "n": 2, "logprobs": 3, **seeded}),
            (text, {"prompt": TEXT * (1 + 4 * n), "echo": True, "logprobs": 2, "max_tokens": n, "temperature": 0}),
            (chat, {"messages": USER, "max_tokens": 12 + n, "logprobs": True, "top_logprobs": 2, **seeded}),
            (chat, {"messages": USER, "max_tokens": 90, "tools": [TOOL], "tool_choice": "required", **seeded}),
            (chat, {"messages": USER, "max_tokens": 30 + n, "response_format": {"type": "json_object"}, **seeded}),
            (chat, {"messages": USER, "max_tokens": 60, "json_schema": SCHEMA, **seeded}),
            ("/v1/messages", {"model": "demo", "messages": USER, "max_tokens": 9 + n, **seeded}),
            ("/v1/responses", {"input": TEXT, "max_output_tokens": 7 + n, **seeded}),
            ("/v1/embeddings", {"input": [TEXT, TEXT[: 9 + n], "fox"] * (1 + n)}),
        ]
    return found


def essence(path: str, answer: dict[str, Any]) -> Any:
    """What does not depend on time, chance or caches."""
    if path == "/v1/embeddings":
        return [one["embedding"] for one in answer["data"]]
    if path == "/v1/messages":
        return answer["content"], answer["stop_reason"], answer["usage"]["output_tokens"]
    if path == "/v1/responses":
        return [part["text"] for part in answer["output"][0]["content"]], answer["usage"]["output_tokens"]
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["id"]
    return answer["choices"], answer["usage"]["completion_tokens"]


def check_json(body: dict[str, Any], choices: list[dict[str, Any]]) -> None:
    """JSON is whole and calls are calls, whatever the model wrote."""
    message = choices[0].get("message", {})
    if "response_format" in body or "json_schema" in body:
        assert isinstance(json.loads(message["content"]), dict)
    for call in message.get("tool_calls", ()):
        assert call["function"]["name"] == "weather" and "city" in json.loads(call["function"]["arguments"])


async def leaves(client: httpx.AsyncClient, rng: random.Random) -> None:
    """A stream that is closed after some events, or a request that is given up."""
    body = {"messages": USER, "max_tokens": 400, "ignore_eos": True, "stream": True}
    if rng.random() < 0.5:
        body |= {"response_format": {"type": "json_object"}}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        count = rng.randrange(6)
        async for _ in response.aiter_lines():
            count -= 1
            if count < 0:
                return


async def storm(url: str, asked: list[Any], want: list[Any], workers: int, seconds: float, least: int) -> Counter[str]:
    """Workers that send one request after the other for so long; each of the requests `least` times at the least."""
    counted, until = Counter[str](), time.monotonic() + seconds
    queue = [n for n in range(len(asked)) for _ in range(least)]
    random.Random(3).shuffle(queue)

    async def work(number: int) -> None:
        rng = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=300, headers={"x-request-id": f"w{number}"}) as client:
            goes = number % 3 == 0
            while queue or time.monotonic() < until:
                if goes:
                    await leaves(client, rng)
                    counted["left"] += 1
                goes = rng.random() < 0.2
                n = queue.pop() if queue else rng.randrange(len(asked))
                path, body = asked[n]
                response = await client.post(path, json=body)
                assert response.status_code == 200, response.text
                assert essence(path, response.json()) == want[n], (path, body, response.text[:2000])
                counted[path] += 1

    await asyncio.gather(*(work(number) for number in range(workers)))
    return counted


def run(sizes: int, workers: int, seconds: float, least: int, growth: int) -> None:
    with started("--queue", "500", "--parallel", "8", "--disable-log-requests") as server:
        asked, want = requests(sizes), []
        for path, body in asked:
            answer = httpx.post(server.url + path, json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            want.append(essence(path, answer.json()))
            if path == "/v1/chat/completions":
                check_json(body, want[-1][0])
        if seconds:
            asyncio.run(storm(server.url, asked, want, workers, seconds / 5, 1))
        before = _settled(server)
        counted = asyncio.run(storm(server.url, asked, want, workers, seconds, least))
        after = _settled(server)
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.end(signal.SIGTERM) == 0
    print(f"{dict(counted)}; {before} -> {after}", file=sys.stderr)
    assert len(counted) == 6 and counted["left"] > 2
    assert after["kv_pages_used"] <= before["kv_pages_used"]
    assert after["sequence_memory_used_bytes"] <= before["sequence_memory_used_bytes"]
    if seconds:  # else threads have not all been started
        assert after["Threads"] <= before["Threads"] and after["files"] <= before["files"] + 1
    assert after["VmRSS"] - before["VmRSS"] < growth >> 10, f"{before} -> {after}"
    assert "Traceback" not in "\n".join(server.lines)


def test_every_kind_of_request_at_once():
    pytest.importorskip("llguidance")
    run(sizes=2, workers=9, seconds=0, least=1, growth=128 << 20)


@pytest.mark.slow
def test_every_kind_of_request_for_two_minutes():
    pytest.importorskip("llguidance")
    run(sizes=3, workers=40, seconds=120, least=3, growth=64 << 20)
