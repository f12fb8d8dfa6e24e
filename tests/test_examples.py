"""The programs of examples/ run."""

import importlib.util
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import venv
from pathlib import Path

import httpx
import numpy as np
import pytest

import penstock
from penstock.engine.session import Session
from tests.server.test_serve import started

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


@pytest.fixture
def ran(capsys, monkeypatch):
    """Run a program of examples/ as __main__ and get what it prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def address():
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    with started() as server:
        yield f"{server.url}/v1"
        assert server.end(signal.SIGTERM) == 0


def test_every_example_is_run_by_a_test_and_listed():
    here = Path(__file__).read_text()
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    for file in EXAMPLES.iterdir():
        if file.suffix in (".py", ".ipynb"):
            assert f'"{file.name}"' in here and f"(../examples/{file.name})" in page, file.name


def test_chat_loop(ran, monkeypatch):
    lines = iter(["Tell me a story.", "And then?"])
    read: list[int] = []
    advance = Session.advance
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or (_ for _ in ()).throw(EOFError))
    monkeypatch.setattr(Session, "advance", lambda *given: read.append(advance(*given)))
    assert len(ran("chat_loop.py").split()) > 20
    assert read[0] == 0 and read[1] >= 10  # at least the first question was there


def test_batch(ran):
    shown = ran("batch.py")
    assert shown.count(" tokens, ") == 4 and shown.count(" ended: ") == 4


def test_streaming(ran):
    shown = ran("streaming.py").splitlines()
    assert "ended: length" in shown and shown[-1].endswith(".")


def test_json_schema(ran):
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    assert re.fullmatch(r"(fox|crow|wolf), [1-9] years old, (not so )?clever\n", ran("json_schema.py"))


def test_tools(ran, address):
    shown = ran("tools.py", address).splitlines()
    assert re.fullmatch(
        r"weather\(\{'town': '\w+', 'days': -?\d+\}\) → \w+ in (Bremen|Hameln) for -?\d+ days", shown[0]
    )
    assert shown[-1] and "weather(" not in shown[-1]


def test_ops_torch(ran):
    pytest.importorskip("torch", reason="torch is not installed")
    shown = ran("ops_torch.py")
    assert "2097152 bytes of weights became 327680" in shown
    assert float(re.findall(r"off the definition by (\S+)", shown)[0]) < 1e-5


def test_own_family(ran, monkeypatch):
    monkeypatch.setattr(penstock.models, "_registered", {})
    shown = ran("own_family.py")
    assert shown.startswith("LLM(plain, cpu, context 512)\n[")
    assert float(re.findall(r"off the definitions by (\S+)", shown)[0]) < 1e-4


def test_the_notebook_runs_from_its_first_cell_to_its_last(capsys):
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    book = json.loads((EXAMPLES / "tour.ipynb").read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 10 and all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"tour.ipynb, cell {number}", "exec"), names)
        assert capsys.readouterr().out, number  # every cell shows something


@pytest.fixture(scope="module")
def langchain(tmp_path_factory):
    """A Python that has LangChain's client, in an environment of its own if this one has not."""
    if importlib.util.find_spec("langchain_openai") is not None:
        return sys.executable
    folder = tmp_path_factory.mktemp("langchain")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    done = subprocess.run([python, "-m", "pip", "install", "-q", "langchain-openai"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("langchain-openai is not installed, and pip cannot fetch it")
    return python


@pytest.mark.slow
def test_langchain(langchain, address):
    command = [langchain, str(EXAMPLES / "langchain_chat.py"), address]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    for method in ("json_schema", "function_calling"):
        assert re.search(rf"^{method} {{'name': '(fox|crow|wolf)', 'age': [1-9]}}$", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_lm_eval_chooses_as_logits_do(address, tmp_path):
    """The task of examples/lm-eval: lm-eval's accuracy is that of `llm.logits` on the same texts."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    yaml = pytest.importorskip("yaml")
    root = EXAMPLES.parent
    task = yaml.safe_load((EXAMPLES / "lm-eval" / "tales.yaml").read_text())
    lines = (root / task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
    llm = penstock.load()
    right = 0
    for row in map(json.loads, lines):
        begin = llm.tokenizer.encode(row["begin"])
        scores = []
        for end in row["ends"]:
            ids = llm.tokenizer.encode(row["begin"] + end)
            rows = llm.logits(ids).astype(float)
            rows -= np.logaddexp.reduce(rows, axis=-1, keepdims=True)
            scores.append(sum(rows[place - 1, ids[place]] for place in range(len(begin), len(ids))))
        right += int(np.argmax(scores)) == row["right"]
    model = f"model=demo,base_url={address}/completions,tokenizer=src/penstock/demo/model,num_concurrent=2"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", model]
    command += ["--tasks", "tales", "--include_path", "examples/lm-eval", "--output_path", str(tmp_path)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    [file] = tmp_path.rglob("results_*.json")
    assert json.loads(file.read_text())["results"]["tales"]["acc,none"] == pytest.approx(right / len(lines))
