"""penstock serve as a program."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

import penstock
from penstock.cli._model import ModelOptions, set_template
from penstock.cli.main import run
from penstock.cli.serve import _compile_template, _names, byte_size
from penstock.errors import CheckpointError
from penstock.text import template
from tests.cli.common import call, program
from tests.server.common import CHAT, PROMPT, wait_for

LONG = {"messages": PROMPT, "stream": True, "max_tokens": 1900, "ignore_eos": True}


@dataclass
class Program:
    """The program in a process, listening on a free port."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str] = field(default_factory=list)

    def end(self, *signals: int) -> int:
        """Send signals and wait for the end; its status."""
        for sent in signals:
            self.process.send_signal(sent)
            time.sleep(0.05)
        _, rest = self.process.communicate(timeout=60)
        self.lines += rest.splitlines()
        return self.process.returncode


@contextlib.contextmanager
def started(*arguments: str, ready: bool = True, **environ: str) -> Iterator[Program]:
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "serve", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environ,
    )
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
        url = re.search(r"http://\S+:\d+", first)
        assert url is not None, first + process.stderr.read()
        made = Program(process, url.group(), [first.rstrip()])
        if ready:
            wait_for(lambda: httpx.get(f"{made.url}/health").status_code == 200, 240)
        yield made
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stderr.close()  # type: ignore[union-attr]


def test_serve_answers_logs_and_finishes_what_it_began(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with started("--alias", "fox", "--top-p", "1", "--chat-template-file", str(template)) as server:
        answer = httpx.post(server.url + CHAT, json={"messages": PROMPT, "max_tokens": 5, "seed": 3}, timeout=60).json()
        llm, prompt = penstock.load(), f"user: {PROMPT[0]['content']}\n"
        want = llm.generate(llm.tokenizer.encode(prompt, False), max_tokens=5, temperature=0.8, seed=3)
        assert answer["model"] == "fox" and answer["choices"][0]["message"]["content"] == want.text
        names = [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]]
        assert names == ["fox", "demo"]
        settings = httpx.get(f"{server.url}/props").json()["default_generation_settings"]
        assert settings["params"] == {"max_tokens": 512, "temperature": 0.8, "top_p": 1.0}  # the demo model's, and ours
        with httpx.stream("POST", server.url + CHAT, json=LONG | {"max_tokens": 400}, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503)
            assert httpx.get(f"{server.url}/health").json()["status"] == "draining"
            refused = httpx.post(server.url + CHAT, json={"messages": PROMPT})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
            assert "data: [DONE]" in list(lines)
        assert server.end() == 0
    text = "\n".join(server.lines)
    assert server.lines[0].startswith(f"penstock {penstock.__version__} listens on {server.url}")
    assert "were copied into memory" in text  # so that changes of its files do not matter
    assert "fox is ready after" in text and "context of 2048 tokens" in text and f"In a browser:   {server.url}" in text
    assert re.search(rf"^20\d\d-\d\d-\d\dT\S+ req_\w+ 127.0.0.1 POST {CHAT} 200 .* tokens in", text, re.MULTILINE)
    assert "Traceback" not in text and "story" not in text  # no word of the prompt


def test_with_a_json_log_every_line_is_an_object():
    with started("--log-format", "json") as server:
        httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "mine"})
        assert server.end(signal.SIGTERM) == 0
    lines = [json.loads(line) for line in server.lines]
    assert all({"time", "level", "message"} <= set(line) for line in lines)
    assert "listens on" in lines[0]["message"] and any("is ready after" in line["message"] for line in lines)
    assert [line["path"] for line in lines if line.get("request_id") == "mine"] == ["/v1/models"]


def test_a_second_ctrl_c_ends_at_once():
    with started("--shutdown-timeout", "60") as server, httpx.stream("POST", server.url + CHAT, json=LONG) as response:
        next(response.iter_lines())
        start = time.monotonic()
        assert server.end(signal.SIGINT, signal.SIGINT) == 130
        assert time.monotonic() - start < 10


def test_the_end_need_not_wait_for_the_model():
    with started(ready=False) as server:
        assert server.end(signal.SIGTERM) == 0


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shown = program("serve", "--port", str(port))
    assert shown.status == 1 and shown.out == ""
    assert re.fullmatch(rf"penstock: error: serve: port {port} of 127.0.0.1 is in use .*\n", shown.err)


@pytest.fixture
def unserved(monkeypatch):
    """A command line that is taken after all fails here, and does not serve for ever."""
    monkeypatch.setattr("penstock.server.run.bind", lambda *_: pytest.fail("the command line was taken"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "--host: 0.0.0.0 can be reached from other machines"),
        (("--host", "::"), "--host: :: can be reached"),
        (("--api-key", ""), "--api-key: is empty"),
        (("--api-key", "a", "--api-key", " "), "--api-key: is empty"),
        (("--api-key", "a,,b"), "--api-key: is empty"),
        (("--chat-template-args", "["), "--chat-template-args: not valid JSON"),
        (("--chat-template-args", '{"messages": 1}'), "'messages' is set by requests"),
        (("--chat-template", "chatml"), "--chat-template: names of templates"),
        (("--generation-config", "x"), "--generation-config: is 'x'"),
        (("--max-body", "much"), "'much' is no number of bytes"),
        (("--port", "99999"), "--port"),
        (("demo", "-m", "demo"), "--model: 'demo' stands behind the verb already, expected one of the two"),
        (("--json-schema", "{}"), "--json-schema: not supported by penstock yet; requests set it (response_format)"),
        (("--speculate", "eagle"), "--speculate"),
        (("--num-draft-tokens", "8"), "--num-draft-tokens"),
        (("--adapter-path", "x"), "--adapter-path: not supported"),
        (("--ssl-key-file", "x"), "--ssl-keyfile: expected --ssl-certfile with it"),
        (("--uds", "x", "--host", "::1"), "--uds: expected without --host and --port"),
        (("--uds", "x", "--uds-mode", "888"), "'888' is no mode"),
        (("--uds", "x", "--uds-mode", "4600"), "'4600' is no mode"),
        (("--host", "0.0.0.0", "--ssl-certfile", "x"), "--host: 0.0.0.0 can be reached from other machines"),
        (("--kv-bits", "4"), "--kv-bits: not supported"),
        (("--gpu-memory-utilization", "0"), "--gpu-memory-utilization: is 0, expected above 0 and at most 1"),
        (("--gpu-memory-utilization", "nan"), "--gpu-memory-utilization: is nan, expected above 0"),
        (("--gpu-memory-utilization", "0.5", "--memory", "2G"), "--gpu-memory-utilization: expected without --memory"),
        (("--memory", "lots"), "--memory: is 'lots', expected a size such as"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(capsys, unserved, arguments, message):
    shown = call(capsys, "serve", *arguments)
    assert shown.status == 2 and message in shown.err and shown.err.count("\n") == 1


@pytest.mark.parametrize("blank", ["", " ", " \t\n"])
def test_a_blank_key_in_the_environment_is_refused(capsys, monkeypatch, unserved, blank):
    monkeypatch.setenv("PENSTOCK_API_KEY", blank)
    for more in ((), ("--api-key", "other"), ("--insecure",)):
        shown = call(capsys, "serve", *more)
        assert shown.status == 2 and shown.err.count("\n") == 1
        assert shown.err.startswith("penstock: error: PENSTOCK_API_KEY: is blank, expected a key")


@pytest.mark.parametrize("content", ["", "\n \n", "# only a remark\n  # another\n", "\ufeff# a remark\n"])
def test_a_key_file_without_a_key_is_refused(capsys, tmp_path, unserved, content):
    keys = tmp_path / "keys"
    keys.write_text(content, encoding="utf-8")
    shown = call(capsys, "serve", "--api-key", "other", "--api-key-file", str(keys))
    assert shown.status == 2 and shown.err.count("\n") == 1
    assert f"--api-key-file: {keys}: has no key" in shown.err


def test_a_missing_key_file_is_one_line_and_status_1(capsys, tmp_path):
    shown = call(capsys, "serve", "--api-key-file", str(tmp_path / "nothing"))
    assert shown.status == 1 and "--api-key-file" in shown.err and shown.err.count("\n") == 1


def test_without_the_extra_the_way_to_get_it_is_named(capsys, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "uvicorn" else real(name, *a))
    shown = call(capsys, "serve")
    assert shown.status == 1
    assert (
        shown.err
        == "penstock: error: serve: uvicorn is not installed; the server needs: pip install 'penstock[server]'\n"
    )


def test_command_lines_of_mlx_lm_and_llama_cpp_are_understood(monkeypatch, tmp_path):
    """Everything up to the server itself, which is not started."""
    seen: dict[str, Any] = {}

    def instead(loader: Any, options: Any, access: Any, bound: socket.socket, *_: Any) -> Any:
        bound.close()
        seen.update(options=options, access=access)
        return type("Service", (), {"failure": None})()

    monkeypatch.setattr("penstock.server.run.serve", instead)
    keys = tmp_path / "keys"
    keys.write_text("# of the team\none\n\n  # old: zero\n two \nwith#inside\n")
    monkeypatch.setenv("PENSTOCK_API_KEY", "three")
    mlx = "--host 127.0.0.1 --port 0 --allowed-origins https://a.example,https://b.example --log-level DEBUG "
    mlx += "--temp 0.5 --top-p 0.9 "
    mlx += (
        "--top-k 20 --min-p 0.1 --max-tokens 100 --decode-concurrency 4 --prompt-concurrency 8 --prompt-cache-size 10 "
    )
    mlx += "--prompt-cache-bytes 500MB --kv-group-size 64 --num-draft-tokens 3"
    arguments = [*mlx.split(), "--chat-template-args", '{"enable_thinking": false}', "--api-key-file", str(keys)]
    assert run(["server", *arguments]) == 0
    options, access = seen["options"], seen["access"]
    assert options.defaults == {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1}
    assert (options.max_tokens, options.parallel, options.prefix_memory) == (100, 4, 500 * 10**6)
    assert options.template_variables == {"enable_thinking": False}
    assert access.keys == ("three", "one", "two", "with#inside")
    assert access.origins == ("https://a.example", "https://b.example")

    llama = "--host 0.0.0.0 --port 0 --api-key k1,k2 -np 2 -to 60 --sse-ping-interval 5 --jinja -cb --metrics "
    llama += "--reasoning-format none "
    llama += "--reasoning-budget 0 --no-webui -a fox -a cub --cache-prompt -c 1k"
    assert run(["serve", *llama.split()]) == 0
    options, access = seen["options"], seen["access"]
    assert options.names == ("fox", "cub", "demo") and not options.page and not options.split_reasoning
    assert options.template_variables == {"enable_thinking": False} and options.ping_seconds == 5
    assert options.limits.request_seconds == 60 and options.parallel == 2 and options.limits.body == 16 << 20
    assert access.keys == ("k1", "k2", "three") and access.hosts is None

    vllm = "--host 127.0.0.1 --port 0 --served-model-name m --max-model-len 1k --max-num-seqs 3 "
    vllm += "--no-enable-prefix-caching "
    vllm += "--enable-auto-tool-choice --generation-config vllm --disable-log-requests"
    vllm += " --gpu-memory-utilization 0.75"
    assert run(["serve", *vllm.split()]) == 0
    assert seen["options"].parallel == 3 and not seen["options"].prefix_cache
    assert seen["options"].gpu_memory_utilization == 0.75
    assert not seen["options"].allow_special_in_messages
    assert run(["serve", "--port", "0", "--allow-special-in-messages"]) == 0
    assert seen["options"].allow_special_in_messages


def test_options_of_the_model_reach_it(monkeypatch):
    seen: dict[str, Any] = {}

    def instead(loader: Any, _options: Any, _access: Any, bound: socket.socket, *_: Any) -> Any:
        bound.close()
        monkeypatch.setattr("penstock.api.load", loaded)
        loader(print)
        return type("Service", (), {"failure": None})()

    def loaded(model: Any, **given: Any) -> Any:
        seen.update(given, model=model)
        return type("LLM", (), {"engine": None, "tokenizer": Mock()})()

    monkeypatch.setattr("penstock.server.run.serve", instead)
    monkeypatch.setattr("penstock.engine.protect.protect", str)
    assert run("serve --port 0 -c 1k -t 1 --expert-cache 1G --expert-policy lru --expert-io direct".split()) == 0
    assert seen["cache_memory"] is None
    assert (
        run("serve --port 0 -c 1k -t 1 --expert-cache 1G --expert-policy lru --expert-io direct --memory 2G".split())
        == 0
    )
    assert seen["cache_memory"] == "2G"
    assert (seen["max_context"], seen["threads"], seen["progress"]) == (1000, 1, print)
    assert (seen["expert_cache"], seen["expert_policy"], seen["expert_io"]) == ("1G", "lru", "direct")


def test_a_missing_folder_is_refused_before_anybody_listens(capsys, tmp_path):
    shown = call(capsys, "serve", "--model", str(tmp_path / "nosuch"))
    assert (shown.status, shown.out, shown.err.count("\n")) == (1, "", 1)
    assert "no such folder" in shown.err


def test_a_model_that_cannot_be_loaded_is_stated_and_the_status_is_1(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with started("--model", str(tmp_path), ready=False) as server:
        health: dict[str, Any] = {}

        def failed() -> bool:
            health.update(httpx.get(f"{server.url}/health").json())
            return health["status"] == "error"

        wait_for(failed)
        assert "config.json" in health["error"]["message"]
        assert server.end(signal.SIGTERM) == 1
    assert any(line.startswith("penstock: error: ") and "config.json" in line for line in server.lines)


def test_a_broken_template_is_refused_when_the_model_is_loaded(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "templates", llm.tokenizer.templates)  # put back afterwards
    with pytest.raises(CheckpointError, match=r"^--chat-template: chat template, line 1"):
        set_template(llm.tokenizer, "{% if %}")


def test_a_models_own_template_is_compiled_before_the_first_chat_and_may_be_broken(llm, monkeypatch, capsys):
    template._child.close()
    _compile_template(llm.tokenizer)
    assert template._child._process is not None and capsys.readouterr().err == ""
    monkeypatch.setattr(llm.tokenizer, "templates", template.ChatTemplates({"default": ("{% if %}", "t.jinja")}))
    _compile_template(llm.tokenizer)
    warning = "penstock: warning: no chat will be answered: t.jinja: chat template, line 1"
    assert capsys.readouterr().err.startswith(warning)


def test_names_of_folders_do_not_tell_where_they_are(tmp_path):
    (tmp_path / "my-model").mkdir()
    assert _names(ModelOptions(str(tmp_path / "my-model")), []) == ("my-model",)
    assert _names(ModelOptions("owner/name"), ["a"]) == ("a", "owner/name", "name")
    assert _names(ModelOptions(None), []) == ("demo",)


def test_byte_sizes():
    assert [byte_size(text) for text in ("7", "500MB", "5G", "16MiB", "2k", "1GiB", "3b")] == [
        7,
        500 * 10**6,
        5 * 10**9,
        16 << 20,
        2000,
        1 << 30,
        3,
    ]
