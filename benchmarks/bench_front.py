"""What the front of the server costs: CPU time per token and stream, and from a parsed request to its submission.

    python benchmarks/bench_front.py --streams 32 --tokens 128 --json front.json

The server is the real one (uvicorn on sockets), the clients read in a process of their own, and in place of the
scheduler a thread hands out the tokens of a written answer: one of every stream, and the next ones when all were read.
So every token is written by itself, the dearest case; `at once` is the number of tokens that are ready together.
Counted is all CPU time of the server's process, system calls and the thread included, between the second token and the
last but one. `bare send` is the part of it that the system takes to send as many bytes on the loopback device, which
wakes the reader and does its work in the sender's time. Checked first: every stream has the written text.
"""

import gc
import json
import multiprocessing
import selectors
import socket
import statistics
import sys
import threading
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "ops"))
from common import parse, parser, report

import penstock
from penstock.api import LLM
from penstock.engine.request import Request, RequestLimits, Timings, make_request
from penstock.engine.response import ChunkQueue, ResponseHandle, Token, TokenBatch
from penstock.engine.scheduler import SchedulerMetrics
from penstock.server import schema
from penstock.server.guard import Access
from penstock.server.run import background
from penstock.server.service import Options, Service

WORDS = "Once upon a time there was a fox who lived in a dark wood near the river, and every morning he went out. "
THOUGHTS = f"<think>\n{2 * WORDS}</think>\n\n"
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]},
    },
}
KINDS = {"plain text": ("plain", WORDS * 9, []), "reasoning and tools": ("qwen", THOUGHTS + WORDS * 7, [TOOL])}
EVENT = bytes(280)
GAP = 15e-6  # seconds between two sends, about what the front takes for the next event: the reader falls asleep
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]


class WrittenAnswers:
    """Has the interface of a scheduler, and answers every request with the same tokens.

    Begins when `streams` requests are there; hands out `at_once` tokens of each, and more when all were read.
    `seconds` is the CPU time of the process meanwhile, for `counted` tokens of each stream.
    """

    max_sequences = 64
    closing = False

    def __init__(self, llm: LLM, tokens: list[int], streams: int, at_once: int) -> None:
        self._llm, self._tokens, self._streams, self._at_once = llm, tokens, streams, at_once
        self._limits = RequestLimits(llm.max_context, llm.config.vocab_size)
        self._lock = threading.Condition()
        self._queues: list[ChunkQueue] = []
        self._read = 0
        self.seconds, self.counted = 0.0, 0
        threading.Thread(target=self._run, daemon=True).start()

    def request(self, prompt: Any, max_tokens: int = 256, stop: Any = (), **options: Any) -> Request:
        return make_request(self._limits, self._llm.tokenizer, prompt, max_tokens, stop, options)

    def submit(self, request: Request, client: Hashable = None) -> ResponseHandle:
        queue = ChunkQueue(1, self._wake, Timings())
        queue.state = "generating"
        with self._lock:
            self._queues.append(queue)
            self._lock.notify()
        return ResponseHandle(request, queue, self._llm.tokenizer, lambda finished: None)

    def metrics(self) -> SchedulerMetrics:
        return SchedulerMetrics()

    def close(self, deadline: float | None = None) -> None: ...

    def _wake(self) -> None:
        with self._lock:
            self._read += 1
            if self._read >= self._streams:
                self._lock.notify()

    def _run(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: len(self._queues) == self._streams)
        steps = [self._tokens[at : at + self._at_once] for at in range(0, len(self._tokens), self._at_once)]
        begin = 0.0
        for number, tokens in enumerate(steps):
            last = number == len(steps) - 1
            self._read = 0
            self._put(tokens, last)
            if last:
                return
            with self._lock:
                self._lock.wait_for(lambda: all(queue.drained for queue in self._queues))
            if number == 0:
                begin = time.process_time()
            self.seconds, self.counted = time.process_time() - begin, number * self._at_once

    def _put(self, tokens: list[int], last: bool) -> None:
        batch = TokenBatch()
        for queue in self._queues:
            for place, token in enumerate(tokens):
                reason = "length" if last and place == len(tokens) - 1 else None
                queue.put(Token(token, reason), batch)
            if last:
                queue.end(None, batch)
        batch.wake()


def read_streams(port: int, body: bytes, streams: int) -> list[str]:
    """In the clients' process: that many streams at once, and their texts."""
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    chooser, found = selectors.DefaultSelector(), [bytearray() for _ in range(streams)]
    for number in range(streams):
        made = socket.create_connection(("127.0.0.1", port))
        chooser.register(made, selectors.EVENT_READ, number)
        made.sendall(request)
    while chooser.get_map():
        for key, _ in chooser.select():
            part = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            found[key.data] += part
            if not part:
                chooser.unregister(key.fileobj)
    return [text_of(bytes(answer)) for answer in found]


def receive(port: int, connections: int) -> None:
    """In the clients' process: read what comes."""
    chooser = selectors.DefaultSelector()
    for _ in range(connections):
        chooser.register(socket.create_connection(("127.0.0.1", port)), selectors.EVENT_READ)
    while chooser.get_map():
        for key, _ in chooser.select():
            if not key.fileobj.recv(1 << 16):  # type: ignore[union-attr]
                chooser.unregister(key.fileobj)


def measure_send(pool: Any, streams: int, count: int) -> dict[str, Any]:
    """CPU time of sending an event's bytes and nothing else, to every connection in turn."""
    with socket.create_server(("127.0.0.1", 0), backlog=streams) as listening:
        reading = pool.apply_async(receive, (listening.getsockname()[1], streams))
        made = [listening.accept()[0] for _ in range(streams)]
    seconds = 0.0
    for _ in range(count):
        for one in made:
            begin = time.thread_time()
            one.send(EVENT)
            seconds += time.thread_time() - begin
            until = time.perf_counter() + GAP
            while time.perf_counter() < until:
                pass
    for one in made:
        one.close()
    reading.get()
    return {"case": "bare send", "streams": streams, "at once": 1, "us_per_token": 1e6 * seconds / (streams * count)}


def text_of(response: bytes) -> str:
    deltas = []
    for line in response.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            deltas += [choice["delta"] for choice in event.get("choices", ())]
    return "".join(delta.get("reasoning") or delta.get("content") or "" for delta in deltas)


def measure(llm: LLM, pool: Any, kind: str, streams: int, count: int, at_once: int) -> dict[str, Any]:
    format, text, tools = KINDS[kind]
    tokens = llm.tokenizer.encode(text, add_special_tokens=False)[:count]
    engines: list[WrittenAnswers] = []

    def scheduler(*_: Any, **__: Any) -> WrittenAnswers:
        engines.append(WrittenAnswers(llm, tokens, streams, at_once))
        return engines[0]

    service = Service(Options(), scheduler)
    service.load(lambda _: (llm, {}))
    assert service.failure is None, service.failure
    service._format = format
    body = {"messages": MESSAGES, "max_tokens": count, "stream": True, **({"tools": tools} if tools else {})}
    with background(service, Access()) as url:
        port = int(url.rpartition(":")[2])
        texts = pool.apply(read_streams, (port, json.dumps(body).encode(), streams))
    want = llm.tokenizer.decode(tokens).replace("<think>\n", "").replace("</think>\n\n", "")
    for found in texts:
        if found.strip() != want.strip() and found.replace(" ", "") != want.replace(" ", ""):
            raise SystemExit(f"{kind}: a stream has {found!r:.200}, expected {want!r:.200}")
    [engine] = engines
    each = engine.seconds / (engine.counted * streams)
    return {"case": kind, "streams": streams, "at once": at_once, "tokens": count, "us_per_token": 1e6 * each}


def measure_submit(llm: LLM, kind: str, rounds: int) -> dict[str, Any]:
    """Milliseconds from a parsed request to its submission."""
    format, _, tools = KINDS[kind]
    service = Service(Options(), lambda *_, **__: WrittenAnswers(llm, [0], 1 << 30, 1))
    service.load(lambda _: (llm, {}))
    assert service.failure is None, service.failure
    service._format = format
    times = []
    for _ in range(rounds):
        asked = schema.ChatRequest.model_validate({"messages": MESSAGES, "max_tokens": 8})
        begin = time.perf_counter()
        work = service.chat(
            asked, asked.messages, limit=8, tools=tools, choice=None, parallel=True, response_format=None
        )
        service.submit(work, "client")
        times.append(time.perf_counter() - begin)
    return {"case": f"{kind}: parsed to submit", "ms_p50": 1e3 * statistics.median(times), "ms_max": 1e3 * max(times)}


def main(argv: list[str] | None = None) -> None:
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--streams", type=int, default=32)
    options.add_argument("--tokens", type=int, default=128)
    args = parse(options, argv)
    llm = penstock.load()
    gc.collect()
    gc.freeze()  # as `penstock serve` does
    rows = []
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for kind in KINDS:
            for at_once in (1, 8):
                found = [measure(llm, pool, kind, args.streams, args.tokens, at_once) for _ in range(args.rounds)]
                rows.append(min(found, key=lambda row: row["us_per_token"]))
        sends = [measure_send(pool, args.streams, args.tokens) for _ in range(args.rounds)]
        rows.append(min(sends, key=lambda row: row["us_per_token"]))
    rows += [measure_submit(llm, kind, 50) for kind in KINDS]
    report("The front of the server", rows, args.json)


if __name__ == "__main__":
    main()
