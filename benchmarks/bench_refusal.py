"""What a refused request costs the others: the server's peak memory and its slowest /health meanwhile.

    python benchmarks/bench_refusal.py --json refusal.json

Bodies of 16 MB with one long list each, then four long prompts at once beside a chat of four tokens. `penstock serve`
runs the demo model in a process of its own (Linux: memory is read from /proc). Checked first: the chat has four tokens,
and every body is refused by name.

- `added MB`: the most memory of the server and its child processes, over what it had before.
- `slowest /health ms`: of one request after the other; the first row, without any load, shows what the machine adds.
- `chat ms`: the slowest chat of four tokens that begins and ends beside the long prompts, or in the first row alone.
"""

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "ops"))
from common import parse, parser, report

SIZE = 16_000_000
LISTS = {
    "tokens": ("/detokenize", '{"tokens":[', "-1", "]}"),
    "modalities": ("/v1/chat/completions", '{"messages":[{"role":"user","content":"hi"}],"modalities":[', "0", "]}"),
    "input": ("/v1/responses", '{"input":[', "{}", "]}"),
    "content": ("/v1/chat/completions", '{"messages":[{"role":"user","content":[', "{}", "]}]}"),
    "include": ("/v1/responses", '{"input":"hi","include":[', "0", "]}"),
}
PROMPTS = {"4 prompts of 8 MB": ("/v1/completions", "prompt", 8), "4 /tokenize of 3 MB": ("/tokenize", "content", 3)}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


class Served:
    """`penstock serve` with the demo model, ready."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        command = [sys.executable, "-m", "penstock", "serve", "--port", str(self._port), "--log-level", "error"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not self._ready():
            if self._process.poll() is not None:
                raise SystemExit("the server ended")
            time.sleep(0.2)

    def _ready(self) -> bool:
        with contextlib.suppress(OSError):
            return self.send("GET", "/health")[0] == 200
        return False

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def send(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def chat(self) -> float:
        start = time.perf_counter()
        status, answer = self.send("POST", "/v1/chat/completions", json.dumps(CHAT).encode())
        if status != 200 or answer["usage"]["completion_tokens"] != 4:
            raise SystemExit(f"a chat was answered with {status}: {answer}")
        return time.perf_counter() - start

    def memory(self, name: str) -> int:
        """VmRSS or VmHWM, the most since `forget`, of the server and its children, in bytes."""
        lines = [line for process in self._processes() for line in (process / "status").read_text().splitlines()]
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

    def forget(self) -> None:
        for process in self._processes():
            (process / "clear_refs").write_text("5")

    def _processes(self) -> list[Path]:
        own = Path(f"/proc/{self._process.pid}")
        children = [pid for thread in (own / "task").iterdir() for pid in (thread / "children").read_text().split()]
        return [own, *(Path(f"/proc/{pid}") for pid in children)]


@contextlib.contextmanager
def repeated(call: Callable[[], float]) -> Iterator[list[float]]:
    """Call again and again in a thread while the block runs, and until one call has begun after it: what they gave."""
    found: list[float] = []
    over = threading.Event()

    def again() -> None:
        while True:
            last = over.is_set()
            found.append(call())
            if last:
                return
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(again)
        try:
            yield found
        finally:
            over.set()
        running.result()


def measured(served: Served, name: str, work: Callable[[], None], chats: bool = False) -> dict[str, Any]:
    def health() -> float:
        start = time.perf_counter()
        served.send("GET", "/health")
        return time.perf_counter() - start

    before = served.memory("VmRSS")
    served.forget()
    start = time.perf_counter()
    with repeated(health) as slow, repeated(served.chat) if chats else contextlib.nullcontext([]) as chat:
        work()
        seconds = time.perf_counter() - start
    row = {"op": name, "seconds": seconds, "added_MB": (served.memory("VmHWM") - before) / 1e6}
    row["slowest_health_ms"] = 1e3 * max(slow)
    return row | ({"chat_ms": 1e3 * max(chat)} if chats else {})


def refused(served: Served, path: str, body: bytes) -> None:
    status, answer = served.send("POST", path, body)
    if status not in (400, 413) or not answer["error"]["message"]:
        raise SystemExit(f"{path} was answered with {status}: {str(answer)[:200]}")


def long_list(name: str, size: int) -> tuple[str, bytes]:
    path, before, item, after = LISTS[name]
    items = (size - len(before)) // (len(item) + 1)
    return path, (before + f"{item}," * (items - 1) + item + after).encode()


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--only", choices=[*LISTS, "prompts"], action="append", help="what to measure (default: all)")
    args = parse(options, argv)
    chosen = args.only or [*LISTS, "prompts"]
    served = Served()
    try:
        served.chat()
        rows = [measured(served, "nothing", lambda: time.sleep(3), chats=True)]
        for name in LISTS:
            refused(served, *long_list(name, 10_000))
            if name in chosen:
                path, body = long_list(name, SIZE)
                rows.append(measured(served, f"16 MB of {name}", lambda p=path, b=body: refused(served, p, b)))
        for name, (path, field, size) in PROMPTS.items() if "prompts" in chosen else ():
            body = json.dumps({field: "the quick brown fox " * (size * 50_000)}).encode()

            def four(path: str = path, body: bytes = body) -> None:
                with ThreadPoolExecutor(4) as threads:
                    for done in [threads.submit(refused, served, path, body) for _ in range(4)]:
                        done.result()

            rows.append(measured(served, name, four, chats=True))
    finally:
        served.close()
    report("Refused requests", rows, args.json)


if __name__ == "__main__":
    main()
