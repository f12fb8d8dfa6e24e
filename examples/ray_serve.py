"""Replicas of `penstock serve` under Ray Serve: one address, as many servers as Ray starts, on one machine or several.

pip install 'penstock[server]' 'ray[serve]'
python examples/ray_serve.py --replicas 2 --gpus 1 -- --model mlx-community/Qwen3.6-35B-A3B-4bit

What stands behind `--` goes to `penstock serve`. Each replica starts one server on a free port of its own machine and
passes requests on to it; Ray gives it its GPUs, restarts it when it ends, and chooses among replicas.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator

import aiohttp
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

NOT_PASSED_ON = {"host", "connection", "keep-alive", "transfer-encoding", "content-length"}


@serve.deployment(max_ongoing_requests=256)
class Penstock:
    """One server and the way to it."""

    def __init__(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "penstock", "serve", "--port", "0", "--no-webui", *arguments]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        first = self._process.stderr.readline()
        address = re.search(r"http://\S+:\d+", first)
        if address is None:
            raise RuntimeError(first + self._process.stderr.read())
        self._url = address.group()
        threading.Thread(target=self._log, daemon=True).start()
        self._session: aiohttp.ClientSession | None = None
        while (health := self._health())["status"] != "ok":
            if health["status"] == "error":
                raise RuntimeError(health["error"]["message"])
            time.sleep(0.2)

    def check_health(self) -> None:
        """Called by Ray, which starts another replica if this raises."""
        if (health := self._health())["status"] != "ok":
            raise RuntimeError(str(health))

    async def __call__(self, request: Request) -> StreamingResponse:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: value for name, value in request.headers.items() if name not in NOT_PASSED_ON}
        body = await request.body()
        answer = await self._session.request(request.method, self._url + path, data=body or None, headers=headers)
        passed = {name: value for name, value in answer.headers.items() if name.lower() not in NOT_PASSED_ON}
        return StreamingResponse(_content(answer), answer.status, passed)

    def __del__(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def _health(self) -> dict:
        """What /health says."""
        if (status := self._process.poll()) is not None:
            return {"status": "error", "error": {"message": f"penstock serve ended with status {status}"}}
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=10) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)

    def _log(self) -> None:
        for line in self._process.stderr or ():
            print(line, end="", file=sys.stderr, flush=True)


async def _content(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """What the server sends, as it comes. A client that goes away ends its request there, too."""
    try:
        async for part in answer.content.iter_any():
            yield part
    finally:
        answer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Replicas of penstock serve under Ray Serve.")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="of each replica")
    parser.add_argument("--cpus", type=float, default=1, help="of each replica")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("arguments", nargs="*", help="of penstock serve, behind --")
    given = parser.parse_args()
    serve.start(http_options={"host": "127.0.0.1", "port": given.port})
    resources = {"num_gpus": given.gpus, "num_cpus": given.cpus}
    deployment = Penstock.options(num_replicas=given.replicas, ray_actor_options=resources)
    serve.run(deployment.bind(given.arguments), name="penstock")
    print(f"{given.replicas} replicas answer on http://127.0.0.1:{given.port}/v1; Ctrl-C ends them", flush=True)
    try:
        threading.Event().wait()
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main()
