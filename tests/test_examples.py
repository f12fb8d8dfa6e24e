"""The programs of examples/ run."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import penstock

PROMPT = "Once upon a time"
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
def test_ray_serve_answers_from_its_replicas():
    pytest.importorskip("ray", reason="Ray is not installed")
    pytest.importorskip("aiohttp", reason="ray[serve] is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(EXAMPLES / "ray_serve.py"), "--replicas", "2", "--port", str(port), "--cpus", "0.5"]
    process = subprocess.Popen(
        [*command, "--", "--alias", "fox"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        lines = []
        while not any("2 replicas answer" in line for line in lines):
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "fox"
            body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
            answer = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            assert answer == penstock.load().generate(PROMPT, max_tokens=8).text
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
            assert client.post("/v1/completions", json=body | {"max_tokens": "x"}).status_code == 400
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130, -signal.SIGINT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
