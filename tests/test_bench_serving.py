"""benchmarks/bench_serving.py: its numbers from answers made by hand, its clients against its own dummy server."""

import importlib.util
import json
import math
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def serving():
    before = sys.path.copy()
    spec = importlib.util.spec_from_file_location("bench_serving", BENCHMARKS / "bench_serving.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_serving"] = module  # its dataclasses look there
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path[:] = before
        del sys.modules["bench_serving"]


def answer(
    serving: ModuleType, sent: float, *times: float, round: int = 0, schema: bool = False, tokens: int = 0
) -> Any:
    ask = serving.Ask(b"", tokens or len(times), None, round, schema)
    return serving.Answer(ask, ask.tokens, sent, list(times))


def test_rows_are_of_all_rounds_the_first_and_the_rest(serving):
    answers = [
        answer(serving, 0.0, 1.0, 1.5, 2.0),
        answer(serving, 0.0, 3.0, 3.5, 4.0),
        answer(serving, 2.0, 2.5, 3.0, 3.5, round=1),
        answer(serving, 4.0, 4.5, 5.5, 6.5, round=1),
        answer(serving, 0.0, 0.1, 9.0, schema=True),
    ]
    every, first, warm = serving.rows_of("2 clients + 1 schema", "32", answers)
    assert [row["rounds"] for row in (every, first, warm)] == ["all", "first", "warm"]
    assert [row["requests"] for row in (every, first, warm)] == [4, 2, 2]
    assert every["tokens_per_s"] == pytest.approx(12 / 6.5)  # of plain clients, whose last token comes at 6.5
    assert first["tokens_per_s"] == pytest.approx(9 / 4)  # those of the second round that came meanwhile are counted
    assert warm["tokens_per_s"] == pytest.approx((6 + 3) / 4.5)  # behind 2.0, where one of the first came, to 6.5
    assert (first["first_p50_ms"], first["first_p95_ms"], warm["first_p99_ms"]) == (3000, 3000, 500)
    assert (first["next_p99_ms"], warm["next_p99_ms"]) == (500, 1000)
    assert every["stream_per_s"] == 2 and every["schema_per_s"] == pytest.approx(1 / 8.9)
    assert "schema_per_s" not in first
    assert serving.clients_of(every) == 2 and serving.clients_of({"load": "1.5 per s"}) is None
    assert serving.shown(every)["first p50/p95/p99 ms"] == "1000/3000/3000"


def test_rows_count_errors_and_events_of_several_tokens(serving):
    failed = answer(serving, 0.0)
    failed.error = "HTTP/1.1 503"
    (row,) = serving.rows_of("1 clients", "32", [failed])
    assert (row["requests"], row["errors"]) == (1, 1) and "tokens_per_s" not in row
    assert serving.shown(row)["first p50/p95/p99 ms"] == ""
    (row,) = serving.rows_of("2 clients", "32", [failed, answer(serving, 0.0, 1.0, 2.0, 3.0, tokens=5)])
    assert (row["errors"], row["tokens_per_s"], row["next_p50_ms"]) == (1, pytest.approx(5 / 3), 500)
    short = answer(serving, 0.0, 1.0, schema=True)
    short.tokens = 0
    with pytest.raises(SystemExit, match="^schema: 0 tokens, expected 1"):
        list(serving.rows_of("1 clients", "32", [answer(serving, 0.0, 1.0), short]))


def test_measure_halves_the_most_that_the_closed_loop_got(serving):
    class Load:
        def __init__(self):
            self.asked: list[list[list[Any]]] = []

        def run(self, clients):
            self.asked.append(clients)
            speed = len(clients)  # each answer takes a second for as many clients
            found = []
            for asks in clients:
                for n, ask in enumerate(asks):
                    begin = ask.at if ask.at is not None else n * 4 / speed
                    times = [begin + (k + 1) / speed for k in range(4)]
                    found.append(serving.Answer(ask, 4, begin, times))
            return found

    args = type("Args", (), {})()
    args.prompt, args.clients, args.rate, args.requests, args.tokens = ["5", "2:3"], [1, 2], ["half", 3.0], 2, 4
    args.seconds, args.schema = 40, 1
    load = Load()
    rows = list(serving.measure(load, serving.Prompts("m", 50, 4, seed=1), args))
    assert [row["load"] for row in rows if row["rounds"] == "all"] == 2 * [
        "1 clients + 1 schema",
        "2 clients + 1 schema",
        "0.75 per s",
        "3 per s",
    ]
    # 2 clients of 3 have 4 tokens each in 4/3 seconds: 1.5 requests per second
    assert max(row["tokens_per_s"] for row in rows if serving.clients_of(row)) == pytest.approx(6)
    (plain, schema), arrivals = load.asked[0], [ask.at for (ask,) in load.asked[2]]
    assert [ask.round for ask in plain] == [0, 1] and not any(ask.schema for ask in plain)
    body, other = json.loads(plain[0].body), json.loads(schema[0].body)
    assert (
        len(body["prompt"]) == 5 and body["ignore_eos"] and body["temperature"] == 1 and "response_format" not in body
    )
    assert other["response_format"]["json_schema"]["schema"]["minItems"] == 4 and not other["ignore_eos"]
    assert arrivals == sorted(arrivals) and 15 < len(arrivals) < 50 and arrivals[-1] < 40


def test_clients_read_the_events_of_a_server(serving):
    port = serving.free_port()
    threading.Thread(target=serving.dummy, args=(port,), daemon=True).start()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            serving.socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.02)
    prompts = serving.Prompts("m", 50, 7, seed=0)
    clients = [prompts.client("3", 2), prompts.client("1:4", 2)]
    answers = serving._process(f"http://127.0.0.1:{port}", clients, time.perf_counter())
    assert [(made.error, made.tokens, len(made.times), made.ask.round) for made in answers] == [
        (None, 7, 7, 0),
        (None, 7, 7, 1),
    ] * 2
    assert all(made.sent < made.times[0] <= made.times[-1] and made.text == " word" * 7 for made in answers)


def test_plot_draws_a_line_for_each_result_and_kind_of_prompt(serving, tmp_path):
    def rows(factor: float) -> list[dict[str, Any]]:
        return [
            {"load": load, "prompt": prompt, "rounds": rounds, "tokens_per_s": factor * n, "first_p95_ms": 30 * n}
            for prompt in ("32", "10:1000")
            for rounds in ("all", "warm")
            for n, load in ((1, "1 clients"), (8, "8 clients"), (32, "32 clients"), (9, "9 clients + 1 schema"))
        ] + [{"load": "client", "prompt": "32", "rounds": "all", "tokens_per_s": 1e5, "first_p95_ms": 1}]

    files = []
    for name, factor in (("a<b", 10), ("after", 90)):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"rows": rows(factor)}))
    serving.main(["--plot", str(tmp_path / "plot.svg"), "--results", *map(str, files)])
    drawn = ElementTree.fromstring((tmp_path / "plot.svg").read_text())
    space = "{http://www.w3.org/2000/svg}"
    lines = [line.attrib["points"].split() for line in drawn.iter(f"{space}polyline")]
    texts = [text.text for text in drawn.iter(f"{space}text")]
    assert [len(points) for points in lines] == [3] * 8  # two panels, two results, two kinds of prompts
    assert {"1", "8", "32", "clients", "a<b, prompts of 32 tokens", "after, prompts of 10 to 1000 tokens"} <= set(texts)
    assert "9" not in texts and "3,000" in texts and "0.02" in texts and "1" in texts
    ys = [[float(point.split(",")[1]) for point in points] for points in lines[:4]]
    assert all(y == sorted(y, reverse=True) for y in ys) and ys[0] > ys[2]  # upwards; the second result is higher
    assert all(0 <= y <= 400 for points in ys for y in points)


@pytest.mark.parametrize("most", [0.003, 7.0, 99.0, 2999.0, 3000.0, 123456.0])
def test_ticks_are_few_round_and_around_all_values(serving, most):
    even = serving.even_ticks(most)
    assert even[0] == 0 and even[-2] < most <= even[-1] * (1 + 1e-9) and 3 <= len(even) <= 8
    log = serving.log_ticks(most / 40, most)
    assert log[0] <= most / 40 < log[1] and log[-2] < most <= log[-1]
    assert all(f"{tick:.0e}"[0] in "125" for tick in log)
    assert math.isclose(serving.log_ticks(5.0, 5.0)[0], 5.0) and len(serving.log_ticks(5.0, 5.0)) == 2


def test_wrong_options_are_named(serving, capsys):
    for options, message in (
        (["--rate", "half"], "--rate half: expected together with --clients"),
        (["--results", "a.json"], "--results: expected together with --plot"),
        (["--rate", "fast"], "argument --rate: invalid rate_of value: 'fast'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            serving.main(options)
        assert stopped.value.code == 2 and message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="^--plot: the results have no rows of a closed loop"):
        serving.plotted({"a": [{"load": "client", "rounds": "all"}]})
