"""Several clients of one model against one, without HTTP: tokens/s of a scheduler, and what it adds to a stream.

    python benchmarks/bench_serve_engine.py
    python benchmarks/bench_serve_engine.py --shapes qwen3.6 --clients 4 --tokens 64

Made-up weights in true shapes: a dense model 2048 wide (that of Llama 3.2 1B) and Qwen3.6-35B-A3B, 8 layers each.
Checks first that every client of a batch gets the tokens it gets alone. A client reads chunk by chunk in a thread of
its own; tokens count from when the last client has its first one until the first client has its last one. The limit is
what reading the weights allows: clients x (bytes of a step for one) / (bytes of a step for all).
"""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "ops"))
from common import parse, parser, report

import penstock
from penstock.analysis.weights import active_bytes
from penstock.api import LLM, load_random
from penstock.engine.generation import Request, run_requests
from penstock.engine.scheduler import Scheduler
from penstock.models.config import first_layers
from penstock.weights.resolve import resolve_model

DENSE = {"hidden_size": 2048, "num_attention_heads": 32, "head_dim": 64}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense-2048": ("llama-3.2-3b", DENSE),
    "qwen3.6": ("qwen3.6-35b-a3b", {}),
}


def config_of(name: str, layers: int, vocab: int) -> dict[str, Any]:
    shipped, changes = SHAPES[name]
    config, _ = first_layers(resolve_model(shipped, ["config"]).read_config(), layers, shipped)
    config.get("text_config", config).update({**changes, "vocab_size": vocab})
    return config


def request_of(llm: LLM, client: int, tokens: int) -> Request:
    """A prompt of its own and a seed of its own; it ends after `tokens`."""
    prompt = [client + 1, 2 * client + 7, 300 + client, 40]
    request = llm.request(prompt, tokens, temperature=1.0, seed=client)
    request.eos = frozenset()
    return request


def chunk_times(chunks: Iterator[Any]) -> list[float]:
    return [time.perf_counter() for _ in chunks]


def steady_rate(times: list[list[float]]) -> float:
    """Tokens/s of all clients while all of them generate."""
    begin, end = max(one[0] for one in times), min(one[-1] for one in times)
    return sum(begin < at <= end for one in times for at in one) / (end - begin)


def direct_rate(llm: LLM, tokens: int) -> float:
    return steady_rate([chunk_times(run_requests(llm.engine, [request_of(llm, 0, tokens)]))])


def scheduled_rate(made: Scheduler, llm: LLM, clients: int, tokens: int) -> float:
    times: dict[int, list[float]] = {}

    def client(n: int) -> None:
        times[n] = chunk_times(iter(made.submit(request_of(llm, n, tokens))))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return steady_rate(list(times.values()))


def check(made: Scheduler, llm: LLM, clients: int) -> None:
    requests = [request_of(llm, n, 8) for n in range(clients)]
    together = [ticket.result().tokens for ticket in [made.submit(request) for request in requests]]
    for n, tokens in enumerate(together):
        alone = request_of(llm, n, 8)
        if [chunk.token for _, chunk in run_requests(llm.engine, [alone])] != tokens:
            raise SystemExit(f"client {n}: other tokens in a batch than alone")


def measure(name: str, llm: LLM, clients: int, tokens: int, rounds: int) -> dict[str, Any]:
    with Scheduler(llm, max_sequences=clients) as made:
        check(made, llm, clients)
        direct, one, all_of_them = [], [], []
        for _ in range(rounds):  # in turns: the machine may change its pace
            direct.append(direct_rate(llm, tokens))
            one.append(scheduled_rate(made, llm, 1, tokens))
            all_of_them.append(scheduled_rate(made, llm, clients, tokens))
    model = llm.engine.model
    limit = clients * active_bytes(model) / active_bytes(model, clients)
    return {
        "shape": name,
        "direct tok/s": max(direct),
        "1 client tok/s": max(one),
        f"{clients} clients tok/s": max(all_of_them),
        "ratio": max(all_of_them) / max(one),
        "limit": limit,
        "overhead %": 100 * (max(direct) / max(one) - 1),
    }


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=3)
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--vocab", type=int, default=32768, help="vocabulary of the made-up models")
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--tokens", type=int, default=48, help="tokens per client and round")
    args = parse(options, argv)
    tokenizer = penstock.load(device="cpu").tokenizer  # random models have none; its texts mean nothing here
    rows = []
    for name in args.shapes:
        engine = load_random(config_of(name, args.layers, args.vocab), max_context=4096).engine
        llm = LLM(engine, tokenizer, None, ())
        rows.append(measure(name, llm, args.clients, args.tokens, args.rounds))
    report(f"{args.clients} clients against one, {args.layers} layers", rows, args.json)


if __name__ == "__main__":
    main()
