"""Where the time of a token goes: decode of a made-up model in a true shape, by op, and what is left beside kernels.

    python benchmarks/bench_decode.py qwen3.6-35b-a3b --layers 8 --vocab 32768

Checks first that a batch of two gives each row the bits it has alone. Then tokens/s against the limit (read rate of
this minute ÷ weights that a token needs), and a profile: seconds inside kernels' functions, inside ops but outside
kernels (checks, allocation), and outside ops (model, engine). Timing every op slows a step by a few per cent.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "ops"))
from common import parse, parser, read_rate, report

from penstock.analysis.weights import active_bytes
from penstock.api import LLM, load_random
from penstock.models.config import first_layers
from penstock.ops.op import Op
from penstock.weights.resolve import ResolvedModel, resolve_model


def config_of(found: ResolvedModel, layers: int, vocab: int | None) -> dict[str, Any]:
    config, _ = first_layers(found.read_config(), layers, str(found.config_path))
    if vocab is not None:
        config.get("text_config", config)["vocab_size"] = vocab
    return config


def check(llm: LLM) -> None:
    engine, rows = llm.engine, []
    first, second = engine.open(), engine.open()
    for sequence, prompt in ((first, [1, 2, 3, 4, 5]), (second, [7])):
        engine.prefill(sequence, prompt)
        start = engine.snapshot(sequence)
        rows.append(engine.decode([sequence], [9])[0])
        engine.rewind(sequence, start)
    together = engine.decode([first, second], [9, 9])
    if not all(np.array_equal(a, b) for a, b in zip(rows, together, strict=True)) or not np.isfinite(together).all():
        raise SystemExit("decode: a row of a batch differs from the same row alone")
    for sequence in (first, second):
        engine.close(sequence)


def seconds_per_token(llm: LLM, tokens: int) -> float:
    engine = llm.engine
    sequence = engine.open()
    engine.prefill(sequence, [1, 2, 3])
    rng = np.random.default_rng(0)
    ids = rng.integers(0, llm.config.vocab_size, tokens).tolist()
    start = time.perf_counter()
    for token in ids:
        engine.decode([sequence], [token])
    seconds = (time.perf_counter() - start) / tokens
    engine.close(sequence)
    return seconds


class Profile:
    """Seconds in each op and in its kernel while a `with` block runs."""

    def __enter__(self) -> "Profile":
        self.ops: dict[str, list[float]] = {}
        self._plain = Op.__call__, Op._on_host
        call, on_host, ops = *self._plain, self.ops

        def timed_call(op: Op, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(op, *args, **kwargs)
            entry = ops.setdefault(op.name, [0, 0.0, 0.0])
            entry[0] += 1
            entry[1] += time.perf_counter() - start
            return result

        def timed_host(op: Op, values: Any, outputs: Any, plan: Any, run: Any) -> Any:
            def timed(*args: Any, **kwargs: Any) -> None:
                start = time.perf_counter()
                run(*args, **kwargs)
                ops.setdefault(op.name, [0, 0.0, 0.0])[2] += time.perf_counter() - start

            return on_host(op, values, outputs, plan, timed)

        Op.__call__, Op._on_host = timed_call, timed_host  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        Op.__call__, Op._on_host = self._plain  # type: ignore[method-assign]


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("config", help="a config.json, or the name of a shipped one")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--vocab", type=int, help="another vocabulary size")
    options.add_argument("--tokens", type=int, default=48, help="tokens of a timing")
    args = parse(options, argv)

    found = resolve_model(args.config, ["config"])
    llm = load_random(config_of(found, args.layers, args.vocab), max_context=4096)
    check(llm)
    nbytes = active_bytes(llm.engine.model)
    rounds = [(seconds_per_token(llm, args.tokens), read_rate()) for _ in range(args.rounds)]
    best, rate = min(rounds)  # with the read rate of its own minute
    with Profile() as profile:
        start = time.perf_counter()
        seconds_per_token(llm, args.tokens)
        whole = (time.perf_counter() - start) / args.tokens

    n = args.tokens
    inside = sum(kernel for _, _, kernel in profile.ops.values()) / n
    in_ops = sum(total for _, total, _ in profile.ops.values()) / n
    rows = [
        {"op": name, "calls": count / n, "us": total / n * 1e6, "us in kernels": kernel / n * 1e6}
        for name, (count, total, kernel) in sorted(profile.ops.items(), key=lambda item: -item[1][1])
    ]
    rows += [
        {"op": "all ops", "us": in_ops * 1e6, "us in kernels": inside * 1e6},
        {"op": "a token, with timing", "us": whole * 1e6, "us in kernels": inside * 1e6},
        {"op": "a token", "us": best * 1e6},
    ]
    summary = {
        "tokens_per_second": 1 / best,
        "active_MB": nbytes / 1e6,
        "GB_per_second": nbytes / best / 1e9,
        "read_GB_per_second": rate,
        "share_of_read": nbytes / best / 1e9 / rate,
        "outside_kernels": 1 - inside / whole,
    }
    report(f"{found.name}, {args.layers} layers: a decoded token", rows, args.json, **summary)


if __name__ == "__main__":
    main()
