"""What HTTP costs: streams of the server against `llm.stream`, the way of a first token, eight clients against one.

    python benchmarks/bench_server.py --tokens 128 --json server.json

The model and its server run in a process of their own, which on request also streams directly, so that both ways are
measured in turns on the same model. The client reads plain sockets. Checked first: both ways give the same text.

- `added`: how much longer a token takes through HTTP, by the best rounds.
- `first ms`: from the moment the engine has chosen the first token to its arrival at the client.
- `8 clients`: tokens per second while eight streams run together, over those of one; `limit` is what the bytes of
  weights allow (8 rows read a dense matrix once, but more experts).
"""

import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script it sees its own folder only
sys.path.insert(0, str(Path(__file__).parent / "ops"))
from common import parse, parser, report

from benchmarks.random_checkpoint import words
from penstock.analysis.weights import active_bytes
from penstock.api import LLM, load, load_random
from penstock.models.config import first_layers
from penstock.text.tokenizer import Tokenizer
from penstock.weights.resolve import resolve_model

VOCAB = 32768
SHAPES = ("demo", "qwen3.6-35b-a3b", "dense-2048")
PROMPT = [(7 * n) % 997 + 5 for n in range(16)]


def model(shape: str) -> LLM:
    """The demo model, or 8 layers of a true shape with made-up weights and words."""
    if shape == "demo":
        return load()
    name = "llama-3.2-3b" if shape == "dense-2048" else shape
    config, _ = first_layers(resolve_model(name, ["config"]).read_config(), 8, name)
    config.get("text_config", config)["vocab_size"] = VOCAB
    if shape == "dense-2048":
        config |= {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
    return LLM(load_random(config, max_context=2048).engine, Tokenizer(words(VOCAB)), None, ())


# --------------------------------------------------------------------------------------------------------------------
# The process of the server


def serve(shape: str) -> None:
    """Serve a model; a line of stdin asks for a direct stream of that many tokens."""
    from penstock.engine.generation import Request
    from penstock.server.guard import Access
    from penstock.server.run import background
    from penstock.server.service import Options, Service

    llm = model(shape)
    chosen: list[float] = []  # when the first tokens of requests were known
    take = Request.take

    def timed(request: Request, drawn: Any, position: int) -> Any:
        chunk = take(request, drawn, position)
        if len(request.tokens) == 1:
            chosen.append(time.perf_counter())
        return chunk

    Request.take = timed  # type: ignore[method-assign]
    service = Service(Options())
    service.load(lambda _: (llm, {}))
    own = llm.engine.model
    limits = {f"limit_{n}": n * active_bytes(own) / active_bytes(own, n) for n in (2, 4, 8)}
    with background(service, Access()) as url:
        print(json.dumps({"port": int(url.rpartition(":")[2]), **limits}), flush=True)
        for line in sys.stdin:
            if line.strip() == "chosen":
                print(json.dumps(chosen), flush=True)
                chosen.clear()
                continue
            times, texts = [], []
            for chunk in llm.stream(PROMPT, max_tokens=int(line), logit_bias=unending(llm)):
                times.append(time.perf_counter())
                texts.append(chunk.text)
            rate = (len(times) - 1) / (times[-1] - times[0])
            print(json.dumps({"text": "".join(texts), "tps": rate, "seconds": 1 / rate}), flush=True)


def unending(llm: LLM) -> dict[int, float] | None:
    return dict.fromkeys(llm.tokenizer.eos_ids, -1e30) or None


# --------------------------------------------------------------------------------------------------------------------
# The client


class Served:
    """The other process, and streams from it."""

    def __init__(self, shape: str) -> None:
        command = [sys.executable, __file__, "--serve", shape]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def streams(self, clients: int, tokens: int) -> tuple[list[str], list[list[float]]]:
        """Texts of that many streams at once, and the times of their events; the last has only the end's reason."""
        body = {
            "prompt": PROMPT,
            "max_tokens": tokens,
            "temperature": 0,
            "top_p": 1,
            "ignore_eos": True,
            "stream": True,
        }
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        chooser = selectors.DefaultSelector()
        found, times = [bytearray() for _ in range(clients)], [[] for _ in range(clients)]
        made = [socket.create_connection(("127.0.0.1", self.about["port"])) for _ in range(clients)]
        for number, one in enumerate(made):
            chooser.register(one, selectors.EVENT_READ, number)
        for one in made:
            one.sendall(request)
        while chooser.get_map():
            for key, _ in chooser.select():
                part = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                now = time.perf_counter()
                times[key.data] += [now] * part.count(b'"text":"')
                found[key.data] += part
                if not part:
                    chooser.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
        return [text_of(bytes(one)) for one in found], times


def text_of(response: bytes) -> str:
    events = [line[6:] for line in response.decode().split("\n") if line.startswith("data: {")]
    return "".join(json.loads(event.strip())["choices"][0]["text"] for event in events)


def together(times: list[list[float]]) -> float:
    """Tokens per second while all streams run: after the last of them began, before the first of them ended."""
    start, end = max(own[0] for own in times), min(own[-2] for own in times)
    if end <= start:
        raise SystemExit("the streams did not run at the same time, expected more --tokens")
    return sum(start < at <= end for own in times for at in own[:-1]) / (end - start)


def measured(shape: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    served = Served(shape)
    direct = served.ask(str(tokens))
    texts, _ = served.streams(8, tokens)
    if {direct["text"]} != set(texts) or not direct["text"]:
        raise SystemExit(f"{shape}: a stream of the server differs from llm.stream")
    alone, through, first = [], [], []
    served.ask("chosen")
    for _ in range(rounds):
        alone.append(served.ask(str(tokens))["seconds"])
        served.ask("chosen")
        _, [times] = served.streams(1, tokens)
        through.append((times[-2] - times[0]) / (tokens - 1))
        [chosen] = served.ask("chosen")
        first.append(times[0] - chosen)
    rows = [
        {"op": "llm.stream", "shape": shape, "tokens_per_s": 1 / min(alone)},
        {
            "op": "HTTP stream",
            "shape": shape,
            "tokens_per_s": 1 / min(through),
            "added": min(through) / min(alone) - 1,
            "first_ms": 1e3 * statistics.median(first),
            "worst_first_ms": 1e3 * max(first),
        },
    ]
    ones = 0.0
    for clients in (1, 2, 4, 8):
        best = 0.0
        for _ in range(rounds):
            best = max(best, together(served.streams(clients, tokens)[1]))
        ones = ones or best
        row = {"op": f"{clients} clients", "shape": shape, "tokens_per_s": best, "times_one": best / ones}
        rows.append(row | {"limit": served.about.get(f"limit_{clients}", 1.0)})
    served.close()
    return rows


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--shape", choices=SHAPES, action="append", help="what to measure (default: all)")
    options.add_argument("--tokens", type=int, default=96, help="tokens of a stream")
    options.add_argument("--serve", choices=SHAPES, help="be the process of the server")
    options.set_defaults(rounds=5)
    args = parse(options, argv)
    if args.serve:
        serve(args.serve)
        return
    if args.threads is not None:  # the other process computes
        os.environ["PENSTOCK_THREADS"] = str(args.threads)
    rows = [row for shape in args.shape or SHAPES for row in measured(shape, args.tokens, args.rounds)]
    report("The server against llm.stream", rows, args.json)


if __name__ == "__main__":
    main()
