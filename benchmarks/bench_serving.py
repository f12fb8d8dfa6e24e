"""A server under load: tokens/s, time to the first token and between tokens, over HTTP from clients in other processes.

    python benchmarks/bench_serving.py --model FOLDER --clients 1 8 32 --prompt 32 10:1000 --json serving.json
    python benchmarks/bench_serving.py --model FOLDER --clients 8 32 --rate half --seconds 30 --prompt 10:1000
    python benchmarks/bench_serving.py --url http://127.0.0.1:8000 --clients 31 --schema 1
    python benchmarks/bench_serving.py --plot serving.svg --results before.json after.json

Closed loop (`--clients`): each client sends its next request when the last one's answer is complete; the n-th requests
of all clients are a round. Open loop (`--rate`): requests arrive by chance, so many per second, whatever is still
running; `half` is half of the most requests per second that warm rounds of the closed loop with the same prompts had.
Prompts are token ids of exact lengths, `N` or uniformly from `A:B`; answers have `--tokens` tokens at temperature 1,
each with a seed of its own. `--schema 1` adds a client whose answers follow a JSON schema; all but the column
schema_per_s (tokens/s of one such answer) is then of the plain clients. A schema needs a model with an end-of-text
token (`random_checkpoint.py --eos`); where that is one of very many, `--may-end` spares plain requests the bias against
it.

Rows of the closed loop are of all rounds, of the first and of those after it. tokens_per_s counts all tokens of plain
clients that came while the requests of the row were under way, stream_per_s is the median of single answers, behind
their first token. first and next are the times to the first token and between tokens; an event with several tokens
counts as one of that many. `--json` has beside the rows ready_s, the seconds from the start of `penstock serve` until
/health said that it was ready.

`--model` starts `penstock serve` and, with `--experts`, first says how many distinct experts each layer of a step with
so many rows reads, and the share of what independent choices would read: random weights may route every token to the
same few, and a row with a share below 0.9 does not count. `--url` measures any server that speaks the OpenAI protocol.
Checked first: a greedy request gives the same text twice, and answers have the length asked for. The row `client` is
the load generator against a server that computes nothing: its own ceiling.
"""

import asyncio
import html
import json
import math
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "ops"))
from common import parser, report

EVENT = b"data: {"
HALF = "half"  # of the rate at which the closed loop is saturated
START_DELAY = 1.0  # seconds in which all processes get ready


@dataclass(frozen=True)
class Ask:
    """One request: when it is sent (seconds after the start; None: when the client's last answer is complete).

    round: its number among those of its client. schema: its answer follows a JSON schema.
    """

    body: bytes
    tokens: int
    at: float | None = None
    round: int = 0
    schema: bool = False


@dataclass
class Answer:
    """When it was sent, when each of its events came, and what it said at the end."""

    ask: Ask
    tokens: int
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    error: str | None = None
    text: str = ""


# --------------------------------------------------------------------------------------------------------------------
# The processes of the clients


class _Stream(asyncio.Protocol):
    """One request over a connection of its own; `done` is set when the server closes it."""

    def __init__(self, head: bytes, ask: Ask) -> None:
        self.answer = Answer(ask, ask.tokens)
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

    def __init__(self, model: str, vocab: int, tokens: int, seed: int, may_end: bool = False) -> None:
        self._model, self._vocab, self._tokens, self._may_end = model, vocab, tokens, may_end
        self._random = random.Random(seed)

    def ids(self, lengths: str) -> list[int]:
        least, _, most = lengths.partition(":")
        return [
            self._random.randrange(self._vocab) for _ in range(self._random.randint(int(least), int(most or least)))
        ]

    def client(self, lengths: str, requests: int, schema: bool = False) -> list[Ask]:
        """What one client of the closed loop sends."""
        if not schema:
            return [self.ask(lengths, round=n) for n in range(requests)]
        items = {"type": "array", "items": {"type": "integer"}, "minItems": self._tokens}
        form = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": items}}
        return [
            self.ask(lengths, round=n, schema=True, response_format=form, ignore_eos=False) for n in range(requests)
        ]

    def ask(self, lengths: str, at: float | None = None, round: int = 0, schema: bool = False, **more: Any) -> Ask:
        body = {
            "model": self._model,
            "prompt": self.ids(lengths),
            "max_tokens": self._tokens,
            "temperature": 1,
            "top_p": 1,
            "seed": self._random.getrandbits(31),
            "ignore_eos": not self._may_end,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Ask(json.dumps(body | more).encode(), self._tokens, at, round, schema)

    def arrivals(self, rate: float, seconds: float) -> list[float]:
        """Times of a Poisson process."""
        times, now = [], self._random.expovariate(rate)
        while now < seconds:
            times.append(now)
            now += self._random.expovariate(rate)
        return times


def check(load: Load, prompts: Prompts) -> None:
    """Stops the program unless answers have their length and a greedy one is the same twice."""
    ask = prompts.ask("24", temperature=0, ignore_eos=True)
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


def rows_of(load: str, lengths: str, answers: list[Answer]) -> Iterator[dict[str, Any]]:
    """A row of all answers; where there are several rounds one of the first, and one of those after it."""
    row = {"load": load, "prompt": lengths}
    plain = [answer for answer in answers if not answer.ask.schema]
    schema = [answer for answer in answers if answer.ask.schema]
    yield row | {"rounds": "all"} | numbers_of(plain, plain) | schema_numbers(schema)
    first = [answer for answer in plain if answer.ask.round == 0]
    warm = [answer for answer in plain if answer.ask.round > 0]
    if warm:
        yield row | {"rounds": "first"} | numbers_of(first, plain)
        yield row | {"rounds": "warm"} | numbers_of(warm, plain)


def numbers_of(answers: list[Answer], beside: list[Answer]) -> dict[str, Any]:
    """Latencies of answers, and the tokens/s of all those `beside` them (and themselves) from their first request to
    their last token.
    """
    good = [answer for answer in answers if answer.error is None]
    found: dict[str, Any] = {"requests": len(answers), "errors": len(answers) - len(good)}
    if not good:
        return found
    firsts = [answer.times[0] - answer.sent for answer in good]
    gaps = []
    for answer in good:
        per_event = (len(answer.times) - 1) / max(1, answer.tokens - 1)
        gaps += [(b - a) * per_event for a, b in zip(answer.times, answer.times[1:], strict=False)]
    begin, end = min(answer.sent for answer in good), max(answer.times[-1] for answer in good)
    tokens = 0.0
    for answer in beside:
        if answer.error is None:
            inside = sum(begin < at <= end for at in answer.times)
            tokens += answer.tokens * inside / len(answer.times)
    found["tokens_per_s"] = tokens / (end - begin)
    found["stream_per_s"] = percentile(stream_rates(good), 0.5)
    found |= {f"first_p{p}_ms": 1e3 * percentile(firsts, p / 100) for p in (50, 95, 99)}
    found |= {f"next_p{p}_ms": 1e3 * percentile(gaps, p / 100) for p in (50, 95, 99)}
    return found


def schema_numbers(answers: list[Answer]) -> dict[str, Any]:
    """Of the clients with a schema. Stops the program if an answer failed or ended early."""
    for answer in answers:
        if answer.error is not None or answer.tokens != answer.ask.tokens:
            raise SystemExit(f"schema: {answer.error or f'{answer.tokens} tokens, expected {answer.ask.tokens}'}")
    return {"schema_per_s": percentile(stream_rates(answers), 0.5)} if answers else {}


def stream_rates(answers: list[Answer]) -> list[float]:
    """Tokens/s of single answers behind their first token, where that did not come together with the last."""
    spans = [(answer.tokens - 1, answer.times[-1] - answer.times[0]) for answer in answers]
    return [tokens / seconds for tokens, seconds in spans if seconds > 0]


def measure(load: Load, prompts: Prompts, args: Any) -> Iterator[dict[str, Any]]:
    for lengths in args.prompt:
        saturated = 0.0
        for clients in args.clients or ():
            asks = [prompts.client(lengths, args.requests) for _ in range(clients)]
            asks += [prompts.client(lengths, args.requests, schema=True) for _ in range(args.schema)]
            name = f"{clients} clients" + (f" + {args.schema} schema" if args.schema else "")
            rows = list(rows_of(name, lengths, load.run(asks)))
            yield from rows
            saturated = max(saturated, rows[-1].get("tokens_per_s", 0.0) / args.tokens)  # warm, if there are rounds
        for rate in args.rate or ():
            rate = saturated / 2 if rate == HALF else rate
            if not rate:
                raise SystemExit(f"--rate {HALF}: the closed loop with prompts of {lengths} has no answers")
            asks = [[prompts.ask(lengths, at)] for at in prompts.arrivals(rate, args.seconds)]
            yield from rows_of(f"{rate:.3g} per s", lengths, load.run(asks))


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as the table has it: three percentiles in a column."""
    cells = {name: row.get(name) for name in ("load", "prompt", "rounds", "requests", "errors")}
    cells |= {"tokens/s": row.get("tokens_per_s"), "stream/s": row.get("stream_per_s")}
    for name in ("first", "next"):
        values = [row.get(f"{name}_p{p}_ms") for p in (50, 95, 99)]
        cells[f"{name} p50/p95/p99 ms"] = "/".join(
            f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in values if value is not None
        )
    if "schema_per_s" in row:
        cells["schema/s"] = row["schema_per_s"]
    if "distinct_experts" in row:
        cells["experts"] = f"{row['distinct_experts']:.0f} ({row['experts_share']:.2f})"
    return cells


def clients_of(row: Mapping[str, Any]) -> int | None:
    """Plain clients of a row of the closed loop."""
    found = re.match(r"(\d+) clients", row["load"])
    return int(found[1]) if found else None


# --------------------------------------------------------------------------------------------------------------------
# Plot

COLORS = ("#767676", "#1a6faf", "#c2570c", "#2d7d46", "#7b4bab")  # of results
DASHES = ("", "7 4", "2 3", "9 3 2 3")  # of prompts
WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 240, 70, 62, 100  # of a panel, and around it


def plotted(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """An SVG with two panels by clients: tokens/s and first token p95, a line for each result and kind of prompt."""
    lines: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for name, rows in results.items():
        for row in rows:
            closed = clients_of(row) is not None and "schema" not in row["load"] and "tokens_per_s" in row
            if closed and row["rounds"] == "all":
                lines.setdefault((name, row["prompt"]), []).append(row)
    if not lines:
        raise SystemExit("--plot: the results have no rows of a closed loop, expected some (--clients)")
    names, prompts = list(results), list(dict.fromkeys(prompt for _, prompt in lines))
    clients = sorted({clients_of(row) or 0 for rows in lines.values() for row in rows})
    height = TOP + HEIGHT + 70 + 20 * len(lines)
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * (LEFT + WIDTH) + GAP}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold">A server under load, all rounds</text>',
    ]
    panels = (
        ("Tokens per second, all clients", "tokens_per_s", 1.0, False),
        ("First token, p95, seconds", "first_p95_ms", 1e-3, True),
    )
    for number, (title, key, unit, log) in enumerate(panels):
        left = LEFT + number * (WIDTH + GAP)
        values = [row[key] * unit for rows in lines.values() for row in rows]
        ticks = log_ticks(min(values), max(values)) if log else even_ticks(max(values))

        def x(count: int, left: int = left) -> float:
            span = math.log2(clients[-1] / clients[0]) or 1.0
            return left + 16 + (WIDTH - 32) * math.log2(count / clients[0]) / span

        def y(value: float, ticks: list[float] = ticks, log: bool = log) -> float:
            low, high, at = (math.log(v) if log else v for v in (ticks[0], ticks[-1], value))
            return TOP + HEIGHT * (1 - (at - low) / (high - low))

        made.append(f'<text x="{left}" y="{TOP - 14}" font-weight="bold">{title}</text>')
        for tick in ticks:
            made.append(f'<path d="M{left} {y(tick):.1f}h{WIDTH}" stroke="#ddd"/>')
            made.append(f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:,g}</text>')
        for count in clients:
            made.append(f'<text x="{x(count):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{count}</text>')
        made.append(f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">clients</text>')
        for (name, prompt), rows in lines.items():
            ordered = sorted(rows, key=lambda row: clients_of(row) or 0)
            points = [(x(clients_of(row) or 0), y(row[key] * unit)) for row in ordered]
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
            style = line_style(names.index(name), prompts.index(prompt))
            made.append(f'<polyline points="{path}" fill="none" {style}/>')
            for (a, b), row in zip(points, ordered, strict=True):
                note = html.escape(f"{name}, prompts of {prompt}: {row[key] * unit:,.4g} at {row['load']}")
                dot = f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{COLORS[names.index(name) % len(COLORS)]}">'
                made.append(f"{dot}<title>{note}</title></circle>")
    for number, (name, prompt) in enumerate(lines):
        at = TOP + HEIGHT + 66 + 20 * number
        made.append(f'<path d="M{LEFT} {at - 4}h44" {line_style(names.index(name), prompts.index(prompt))}/>')
        about = html.escape(f"{name}, prompts of {prompt.replace(':', ' to ')} tokens")
        made.append(f'<text x="{LEFT + 54}" y="{at}">{about}</text>')
    return "\n".join([*made, "</svg>", ""])


def line_style(result: int, prompt: int) -> str:
    dash = DASHES[prompt % len(DASHES)]
    return f'stroke="{COLORS[result % len(COLORS)]}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")


def even_ticks(most: float) -> list[float]:
    """From 0 to at least `most`, in 3 to 7 round steps."""
    power = 10 ** math.floor(math.log10(most / 3))
    step = next(power * m for m in (1, 2, 5, 10) if most / (power * m) <= 6)
    return [step * n for n in range(math.ceil(most / step) + 1)]


def log_ticks(least: float, most: float) -> list[float]:
    """1, 2 and 5 times powers of ten around all values."""
    powers = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 1)
    ticks = [float(f"{m}e{power}") for power in powers for m in (1, 2, 5)]
    low = max(n for n, tick in enumerate(ticks) if tick <= least)
    high = min(n for n, tick in enumerate(ticks) if tick >= most)
    return ticks[low : max(high, low + 1) + 1]


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
    (row,) = rows_of("client", "32", load.run([[prompts.ask("32") for _ in range(4)] for _ in range(clients)]))
    load.close()
    server.kill()
    return row


def distinct_experts(
    model: str, device: str | None, rows: Sequence[int], prompts: Prompts
) -> dict[int, tuple[float, float]]:
    """Distinct experts that a layer of a step with so many rows reads, on average over layers and steps; and by how
    many there would be if every row chose by itself, each expert as often.
    """
    import numpy as np

    import penstock
    from penstock.analysis.expert_routes import record
    from penstock.errors import InvalidArgument

    llm = penstock.load(model, **({} if device is None else {"device": device}))
    chosen, experts = [], 1
    try:
        for seed in range(max(rows)):
            options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 9}
            options["logit_bias"] = dict.fromkeys(llm.tokenizer.eos_ids, -1e30)
            made = record(llm, prompts.ids("32"), **options)
            chosen.append(made.ids[made.decode])
            experts = made.experts
    except InvalidArgument:
        return {}
    ids = np.stack(chosen)  # rows, steps, layers, k
    _, steps, layers, k = ids.shape
    counts = {
        n: [len(np.unique(ids[:n, step, layer])) for step in range(steps) for layer in range(layers)] for n in rows
    }
    means = {n: float(np.mean(found)) for n, found in counts.items()}
    return {n: (mean, mean / (experts * (1 - (1 - k / experts) ** n))) for n, mean in means.items()}


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--url", help="a server that runs already")
    options.add_argument("--model", help="serve this one: a folder, a file, a name (default: the demo model)")
    options.add_argument("--serve", default="", help="options of penstock serve, as one string")
    options.add_argument("--clients", type=int, nargs="+", help="clients of the closed loop")
    options.add_argument("--schema", type=int, default=0, help="clients with a JSON schema beside each of them")
    options.add_argument("--rate", type=rate_of, nargs="+", help="requests per second of the open loop, or half")
    options.add_argument("--seconds", type=float, default=30, help="of arrivals in the open loop")
    options.add_argument("--prompt", nargs="+", default=["32"], help="tokens of a prompt, N or A:B")
    options.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    options.add_argument("--requests", type=int, default=3, help="of each client of the closed loop")
    options.add_argument("--vocab", type=int, default=500, help="prompts have token ids below it")
    options.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1), help="of the clients")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--may-end", action="store_true", help="do not ask for answers without an end-of-text token")
    options.add_argument("--experts", action="store_true", help="with --model: count distinct experts first")
    options.add_argument("--plot", type=Path, help="draw tokens/s and the first token by clients into this SVG")
    options.add_argument("--results", type=Path, nargs="+", help="with --plot: draw these files of --json; no server")
    args = options.parse_args(argv)
    if args.results is not None:
        if args.plot is None:
            options.error("--results: expected together with --plot")
        args.plot.write_text(plotted({path.stem: json.loads(path.read_text())["rows"] for path in args.results}))
        return
    if not args.clients and not args.rate:
        args.clients = [1, 8]
    if HALF in (args.rate or ()) and not args.clients:
        options.error(f"--rate {HALF}: expected together with --clients, whose most requests per second are halved")
    most = max(args.clients or [8])
    rows = [client_ceiling(most, Prompts("", args.vocab, args.tokens, 0), args.processes)]
    spread = {}
    if args.experts and args.url is None:
        device = re.search(r"--device[ =](\S+)", args.serve)
        prompts = Prompts("", args.vocab, args.tokens, args.seed)
        spread = distinct_experts(args.model or "demo", device and device[1], args.clients or [8], prompts)
    summary = {}
    if args.url is not None:
        rows += measured(args.url, args)
    else:
        with served(args.model or "demo", args.serve.split()) as (url, seconds):
            summary["ready_s"] = seconds
            rows += measured(url, args)
    for row in rows:
        if (clients := clients_of(row)) in spread:
            row["distinct_experts"], row["experts_share"] = spread[clients]
    report("A server under load", rows, args.json, shown, **summary)
    if args.plot is not None:
        args.plot.write_text(plotted({args.model or args.url or "demo": rows}))


def rate_of(text: str) -> float | str:
    return HALF if text == HALF else float(text)


def measured(url: str, args: Any) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as response:
        name = json.load(response)["data"][0]["id"]
    load = Load(url, args.processes)
    check(load, Prompts(name, args.vocab, args.tokens, args.seed, args.may_end))
    rows = []
    for row in measure(load, Prompts(name, args.vocab, args.tokens, args.seed, args.may_end), args):
        print({key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        rows.append(row)
    load.close()
    return rows


if __name__ == "__main__":
    main()
