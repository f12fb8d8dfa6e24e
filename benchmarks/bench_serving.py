"""A server under load: tokens/s, time to the first token and between tokens, over HTTP from clients in other processes.

    python benchmarks/bench_serving.py --model FOLDER --clients 1 8 32 --prompt 32 10:1000 --json serving.json
    python benchmarks/bench_serving.py --url http://127.0.0.1:8000 --rate 4 --seconds 30 --prompt 10:1000

Closed loop (`--clients`): each client sends its next request when the last one's answer is complete. Open loop
(`--rate`): requests arrive by chance, so many per second, whatever is still running. Prompts are token ids of exact
lengths, `N` or uniformly from `A:B`; answers have `--tokens` tokens at temperature 1, each with a seed of its own.

`--model` starts `penstock serve` and, for a model with experts, first says how many distinct ones each layer of a step
with so many rows reads: random weights may route every token to the same few. `--url` measures any server that speaks
the OpenAI protocol. Checked first: a greedy request gives the same text twice, and answers have the length asked for.
The row `client` is the load generator against a server that computes nothing: its own ceiling.
"""

import asyncio
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "ops"))
from common import parser, report

EVENT = b"data: {"
START_DELAY = 1.0  # seconds in which all processes get ready


@dataclass(frozen=True)
class Ask:
    """One request: when it is sent (seconds after the start; None: when the client's last answer is complete)."""

    body: bytes
    tokens: int
    at: float | None = None


@dataclass
class Answer:
    """When it was sent, when each of its events came, and what it said at the end."""

    sent: float
    tokens: int
    times: list[float] = field(default_factory=list)
    error: str | None = None
    text: str = ""


# --------------------------------------------------------------------------------------------------------------------
# The processes of the clients


class _Stream(asyncio.Protocol):
    """One request over a connection of its own; `done` is set when the server closes it."""

    def __init__(self, head: bytes, ask: Ask) -> None:
        self.answer = Answer(0.0, ask.tokens)
        self.done = asyncio.get_running_loop().create_future()
        self._request = head % len(ask.body) + ask.body
        self._parts: list[bytes] = []
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        self.answer.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.answer.times += [now] * (self._tail + data).count(EVENT)
        self._tail = data[-(len(EVENT) - 1) :]
        self._parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        _read(self.answer, b"".join(self._parts))
        self.done.set_result(None)


def _read(answer: Answer, response: bytes) -> None:
    """Fill in the text and the number of tokens; events that bring no token lose their times."""
    status, _, rest = response.partition(b"\r\n")
    if b" 200 " not in status + b" ":
        answer.error = (status + rest.rpartition(b"\r\n\r\n")[2][:200]).decode(errors="replace") or "no answer"
        return
    body = rest.partition(b"\r\n\r\n")[2]
    if b"chunked" in rest.partition(b"\r\n\r\n")[0].lower():
        body = b"".join(_chunks(body))
    texts, times = [], []
    arrived = iter(answer.times)
    for line in body.split(b"\n"):
        if not line.startswith(EVENT):
            continue
        event, at = json.loads(line[6:]), next(arrived)
        if "error" in event:
            answer.error = json.dumps(event["error"])[:200]
        if event.get("usage"):
            answer.tokens = event["usage"]["completion_tokens"]
        choice = (event.get("choices") or [{}])[0]
        if choice.get("text") or ("text" in choice and not choice.get("finish_reason")):
            texts.append(choice["text"])
            times.append(at)
    answer.text, answer.times = "".join(texts), times
    if not times and answer.error is None:
        answer.error = "an answer without tokens"


def _chunks(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size or b"0", 16)
        yield body[:length]
        body = body[length + 2 :]


async def _client(host: str, port: int, head: bytes, asks: Sequence[Ask], start: float) -> list[Answer]:
    """Requests one after the other, or each at its own time."""
    loop = asyncio.get_running_loop()

    async def one(ask: Ask) -> Answer:
        if ask.at is not None:
            await asyncio.sleep(max(0.0, start + ask.at - time.perf_counter()))
        _, stream = await loop.create_connection(lambda: _Stream(head, ask), host, port)
        await stream.done
        return stream.answer

    await asyncio.sleep(max(0.0, start - time.perf_counter()))
    if asks and asks[0].at is not None:
        return list(await asyncio.gather(*map(one, asks)))
    return [await one(ask) for ask in asks]


def _process(url: str, clients: list[list[Ask]], start: float) -> list[Answer]:
    """All clients of one process."""
    parts = urllib.parse.urlsplit(url)
    head = (
        f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    ).encode()

    async def everything() -> list[Answer]:
        host, port = parts.hostname or "127.0.0.1", parts.port or 80
        found = await asyncio.gather(*(_client(host, port, head, asks, start) for asks in clients))
        return [answer for own in found for answer in own]

    return asyncio.run(everything())


class Load:
    """Processes that send requests to one server."""

    def __init__(self, url: str, processes: int) -> None:
        self.url, self._processes = url, processes
        self._pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
        list(self._pool.map(abs, range(processes)))  # started now, not inside a measurement

    def run(self, clients: list[list[Ask]]) -> list[Answer]:
        start = time.perf_counter() + START_DELAY
        shares = [clients[n :: self._processes] for n in range(self._processes)]
        futures = [self._pool.submit(_process, self.url, share, start) for share in shares if share]
        return [answer for future in futures for answer in future.result()]

    def close(self) -> None:
        self._pool.shutdown()


# --------------------------------------------------------------------------------------------------------------------
# Requests


class Prompts:
    """Requests with prompts of random token ids; the same seed gives the same requests."""

    def __init__(self, model: str, vocab: int, tokens: int, seed: int) -> None:
        self._model, self._vocab, self._tokens = model, vocab, tokens
        self._random = random.Random(seed)

    def ids(self, lengths: str) -> list[int]:
        least, _, most = lengths.partition(":")
        return [
            self._random.randrange(self._vocab) for _ in range(self._random.randint(int(least), int(most or least)))
        ]

    def ask(self, lengths: str, at: float | None = None, **more: Any) -> Ask:
        body = {
            "model": self._model,
            "prompt": self.ids(lengths),
            "max_tokens": self._tokens,
            "temperature": 1,
            "top_p": 1,
            "seed": self._random.getrandbits(31),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Ask(json.dumps(body | more).encode(), self._tokens, at)

    def arrivals(self, rate: float, seconds: float) -> list[float]:
        """Times of a Poisson process."""
        times, now = [], self._random.expovariate(rate)
        while now < seconds:
            times.append(now)
            now += self._random.expovariate(rate)
        return times


def check(load: Load, prompts: Prompts) -> None:
    """Stops the program unless answers have their length and a greedy one is the same twice."""
    ask = prompts.ask("24", temperature=0)
    first, second = load.run([[ask]])[0], load.run([[ask]])[0]
    for answer in (first, second):
        if answer.error is not None or answer.tokens != ask.tokens:
            raise SystemExit(f"{load.url}: {answer.error or f'{answer.tokens} tokens, expected {ask.tokens}'}")
    if first.text != second.text:
        raise SystemExit(f"{load.url}: a greedy request gave two different texts")


# --------------------------------------------------------------------------------------------------------------------
# Rows


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def row_of(load: str, lengths: str, answers: list[Answer]) -> dict[str, Any]:
    good = [answer for answer in answers if answer.error is None]
    row: dict[str, Any] = {
        "load": load,
        "prompt": lengths,
        "requests": len(answers),
        "errors": len(answers) - len(good),
    }
    if not good:
        return row
    firsts = [answer.times[0] - answer.sent for answer in good]
    gaps = []
    for answer in good:
        per_event = (len(answer.times) - 1) / max(1, answer.tokens - 1)
        gaps += [(b - a) * per_event for a, b in zip(answer.times, answer.times[1:], strict=False)]
    wall = max(answer.times[-1] for answer in good) - min(answer.sent for answer in good)
    row["tokens_per_s"] = sum(answer.tokens for answer in good) / wall
    row["stream_per_s"] = percentile(
        [
            (answer.tokens - 1) / (last - first)
            for answer in good
            if (last := answer.times[-1]) > (first := answer.times[0])
        ],
        0.5,
    )
    row |= {f"first_p{p}_ms": 1e3 * percentile(firsts, p / 100) for p in (50, 95, 99)}
    row |= {f"next_p{p}_ms": 1e3 * percentile(gaps, p / 100) for p in (50, 95, 99)}
    return row


def measure(load: Load, prompts: Prompts, args: Any) -> Iterator[dict[str, Any]]:
    for lengths in args.prompt:
        for clients in args.clients or ():
            asks = [[prompts.ask(lengths) for _ in range(args.requests)] for _ in range(clients)]
            yield row_of(f"{clients} clients", lengths, load.run(asks))
        for rate in args.rate or ():
            asks = [[prompts.ask(lengths, at)] for at in prompts.arrivals(rate, args.seconds)]
            yield row_of(f"{rate:g} per s", lengths, load.run(asks))


# --------------------------------------------------------------------------------------------------------------------
# Servers


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


@contextmanager
def served(model: str, options: Sequence[str]) -> Iterator[tuple[str, float]]:
    """`penstock serve` in a process of its own: its address, and the seconds until it was ready."""
    port, begin = free_port(), time.perf_counter()
    command = [sys.executable, "-m", "penstock", "serve", "--model", model, "--port", str(port), *options]
    log = tempfile.TemporaryFile()  # noqa: SIM115 - the process writes to it until both end
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                log.seek(0)
                raise SystemExit(f"{' '.join(command)}: {log.read()[-1000:].decode(errors='replace')}")
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.1)
        yield url, time.perf_counter() - begin
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def dummy(port: int) -> None:
    """A server that answers every completion at once with as many prepared events as it asks for."""
    event = b'data: {"id":"cmpl-0","object":"text_completion","created":0,"model":"m","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'  # noqa: E501
    usage = (
        b'data: {"id":"cmpl-0","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":1}}\n\n'
    )
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # a look whether the port is open
            return
        found = re.search(rb"content-length: *(\d+)", request, re.IGNORECASE)
        body = json.loads(await reader.readexactly(int(found[1]) if found else 0))
        writer.write(head)
        for _ in range(body["max_tokens"]):
            writer.write(event)
            await asyncio.sleep(0)
        writer.write(usage % body["max_tokens"] + b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    async def forever() -> None:
        await (await asyncio.start_server(answer, "127.0.0.1", port)).serve_forever()

    asyncio.run(forever())


def client_ceiling(clients: int, prompts: Prompts, processes: int) -> dict[str, Any]:
    port = free_port()
    server = multiprocessing.get_context("spawn").Process(target=dummy, args=(port,), daemon=True)
    server.start()
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.05)
    load = Load(f"http://127.0.0.1:{port}", processes)
    row = row_of("client", "32", load.run([[prompts.ask("32") for _ in range(4)] for _ in range(clients)]))
    load.close()
    server.kill()
    return row


def distinct_experts(model: str, device: str | None, rows: Sequence[int], prompts: Prompts) -> dict[int, float]:
    """Distinct experts that a layer of a step with so many rows reads, on average over layers and steps."""
    import numpy as np

    import penstock
    from penstock.analysis.expert_routes import record
    from penstock.errors import InvalidArgument

    llm = penstock.load(model, **({} if device is None else {"device": device}))
    chosen = []
    try:
        for seed in range(max(rows)):
            options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 9}
            options["logit_bias"] = dict.fromkeys(llm.tokenizer.eos_ids, -1e30)
            made = record(llm, prompts.ids("32"), **options)
            chosen.append(made.ids[made.decode])
    except InvalidArgument:
        return {}
    ids = np.stack(chosen)  # rows, steps, layers, k
    _, steps, layers, _ = ids.shape
    counts = {
        n: [len(np.unique(ids[:n, step, layer])) for step in range(steps) for layer in range(layers)] for n in rows
    }
    return {n: float(np.mean(found)) for n, found in counts.items()}


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--url", help="a server that runs already")
    options.add_argument("--model", help="serve this one: a folder, a file, a name (default: the demo model)")
    options.add_argument("--serve", default="", help="options of penstock serve, as one string")
    options.add_argument("--clients", type=int, nargs="+", help="clients of the closed loop")
    options.add_argument("--rate", type=float, nargs="+", help="requests per second of the open loop")
    options.add_argument("--seconds", type=float, default=30, help="of arrivals in the open loop")
    options.add_argument("--prompt", nargs="+", default=["32"], help="tokens of a prompt, N or A:B")
    options.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    options.add_argument("--requests", type=int, default=3, help="of each client of the closed loop")
    options.add_argument("--vocab", type=int, default=500, help="prompts have token ids below it")
    options.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1), help="of the clients")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--experts", action="store_true", help="with --model: count distinct experts first")
    args = options.parse_args(argv)
    if not args.clients and not args.rate:
        args.clients = [1, 8]
    most = max(args.clients or [8])
    rows = [client_ceiling(most, Prompts("", args.vocab, args.tokens, 0), args.processes)]
    spread = {}
    if args.experts and args.url is None:
        device = re.search(r"--device[ =](\S+)", args.serve)
        prompts = Prompts("", args.vocab, args.tokens, args.seed)
        spread = distinct_experts(args.model or "demo", device and device[1], args.clients or [8], prompts)
    if args.url is not None:
        rows += measured(args.url, args)
    else:
        with served(args.model or "demo", args.serve.split()) as (url, seconds):
            rows += [row | {"ready_s": seconds} for row in measured(url, args)]
    for row in rows:
        clients = int(row["load"].split()[0]) if row["load"].endswith("clients") else 0
        if clients in spread:
            row["distinct_experts"] = spread[clients]
    report("A server under load", rows, args.json)


def measured(url: str, args: Any) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as response:
        name = json.load(response)["data"][0]["id"]
    load = Load(url, args.processes)
    check(load, Prompts(name, args.vocab, args.tokens, args.seed))
    rows = []
    for row in measure(load, Prompts(name, args.vocab, args.tokens, args.seed), args):
        print({key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        rows.append(row)
    load.close()
    return rows


if __name__ == "__main__":
    main()
