"""penstock serve --config FILE, and --root-path."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.main import run
from penstock.server.service import Options
from tests.cli.common import call
from tests.server.common import CHAT, PROMPT, serving

DOCS = (Path(__file__).parents[2] / "docs" / "server.md").read_text()


@pytest.fixture
def seen(monkeypatch):
    """What the server would have been started with."""
    found: dict[str, Any] = {}

    def instead(_loader: Any, options: Any, access: Any, bound: Any, *_: Any) -> Any:
        found.update(options=options, access=access, port=bound.getsockname()[1])
        bound.close()
        return SimpleNamespace(failure=None)

    monkeypatch.setattr("penstock.server.run.serve", instead)
    return found


@pytest.fixture
def config(tmp_path):
    def write(text: str, mode: int = 0o600) -> str:
        path = tmp_path / "serve.toml"
        path.write_text(text)
        path.chmod(mode)
        return str(path)

    return write


def test_flags_go_before_variables_before_the_file_before_defaults(seen, config, monkeypatch):
    path = config(
        'model = "demo"\nport = 0\nalias = ["fox", "cub"]\nmax-num-seqs = 3\nmax_body = 1000\nwebui = false\n'
        'temp = 0.5\ntop-p = 0.25\napi-key = "of-file"\ntimeout = 77\nroot-path = "/llm/"\nprompt-cache-bytes = "2M"\n'
    )
    assert run(["serve", "--config", path]) == 0
    options, access = seen["options"], seen["access"]
    assert options.names == ("fox", "cub", "demo") and options.parallel == 3 and options.limits.body == 1000
    assert not options.page and options.metrics and options.limits.request_seconds == 77 and options.root_path == "/llm"
    assert options.defaults == {"temperature": 0.5, "top_p": 0.25} and options.prefix_memory == 2 * 10**6
    assert access.keys == ("of-file",) and options.limits.queue == 256

    monkeypatch.setenv("PENSTOCK_API_KEY", "of-variable")
    assert run(["serve", "demo", "--temp", "0", "--webui", "-a", "hen", "-np", "2", "--config", path]) == 0
    options, access = seen["options"], seen["access"]
    assert options.names == ("hen", "demo") and options.page and options.parallel == 2
    assert options.defaults == {"temperature": 0.0, "top_p": 0.25} and access.keys == ("of-variable",)


def test_a_variable_goes_before_the_file_for_every_setting(seen, config, monkeypatch, capsys):
    path = config("port = 0\ndata-parallel-size = 2\nengine-process = false\n")
    shown = call(capsys, "serve", "--config", path)
    assert shown.status == 2 and "--data-parallel-size: is 2, expected 1 with --no-engine-process" in shown.err
    monkeypatch.setenv("PENSTOCK_DATA_PARALLEL_SIZE", "1")
    assert run(["serve", "--config", path]) == 0


def test_the_model_of_the_file_gives_way_to_one_on_the_command_line(seen, config):
    path = config('model = "/no/such/folder"\nport = 0\n')
    assert run(["serve", "demo", "--config", path]) == 0
    assert run(["serve", "--config", path, "-m", "demo"]) == 0
    assert run(["serve", "--config", path]) == 1


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602])
def test_a_file_with_a_key_is_not_for_others(capsys, seen, config, mode):
    shown = call(capsys, "serve", "--config", config('port = 0\napi-key = "the-secret"\n', mode))
    assert shown.status == 1 and f"holds a key and has the mode {mode:o}" in shown.err and "secret" not in shown.err
    assert run(["serve", "--config", config("port = 0\n", mode)]) == 0


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("prot = 1", 2, "'prot' is no option, did you mean port?"),
        ("config = 'x'", 2, "'config' is no option"),
        ("kv-bits = 4", 2, "'kv-bits' is no option"),
        ("foreign_3 = 4", 2, "'foreign_3' is no option"),
        ("no-webui = true", 2, "'no-webui' is no option"),
        ("[serve]\nport = 1", 2, "'serve' is no option"),
        ("port = [1]", 2, "port: is a list"),
        ("port = 2020-01-01", 2, "port: is a date"),
        ("parallel = 1\nmax-num-seqs = 2", 2, "'max-num-seqs' says again"),
        ("port = 99999", 2, "--port"),
        ("parallel = true", 2, "parallel: is a bool, expected a text or a number"),
        ("parallel = 1.5", 2, "--parallel"),
        ("alias = [1]", 2, "alias: is a list, expected a text or a list of texts"),
        ("webui = 'maybe'", 2, "webui: is a str, expected true or false"),
        ("port 1", 1, "no valid TOML"),
        ("api-key = ' '", 2, "--api-key: is empty"),
        ("root-path = 'llm'", 2, "--root-path: is 'llm', expected a path such as /llm"),
    ],
)
def test_wrong_files_are_one_line(capsys, monkeypatch, config, text, status, message):
    monkeypatch.setattr("penstock.server.run.bind", lambda *_: pytest.fail("the file was taken"))
    shown = call(capsys, "serve", "--config", config(text))
    assert shown.status == status and message in shown.err and shown.err.count("\n") == 1, shown.err


def test_files_that_cannot_be_read_are_one_line(capsys, tmp_path):
    (tmp_path / "latin").write_bytes(b'alias = "\xff"')
    for name, message in (("none", "No such file"), (".", "Is a directory"), ("latin", "is not UTF-8")):
        shown = call(capsys, "serve", "--config", str(tmp_path / name))
        assert shown.status == 1 and message in shown.err and shown.err.count("\n") == 1


def test_the_file_in_the_manual_is_taken(seen, config):
    (text,) = re.findall(r"```toml\n(.*?)```", DOCS, re.DOTALL)
    text = re.sub(r"^model = .*$", 'model = "demo"', text, flags=re.MULTILINE).replace("port = 8000", "port = 0")
    assert run(["serve", "--config", config(text)]) == 0
    assert seen["options"].names == ("chat", "code", "demo") and not seen["options"].page


def test_below_the_path_of_a_proxy(llm):
    with serving(llm, Options(root_path="/a/llm")) as place:
        body = {"messages": PROMPT, "max_tokens": 2}
        for path in (CHAT, f"/a/llm{CHAT}"):
            assert place.client.post(path, json=body).status_code == 200
        assert place.client.get("/a/llm/").text == place.client.get("/").text
        assert place.client.get("/a/llm/app.js").status_code == 200
        redirected = place.client.get("/a/llm")
        assert (redirected.status_code, redirected.headers["location"]) == (307, "/a/llm/")
        assert (
            place.client.get("/a/llmx/health").status_code == 404 == place.client.get("/a/llm/a/llm/health").status_code
        )
        assert place.client.get("/openapi.json").json()["servers"] == [{"url": "/a/llm"}]
        counted = 'penstock:http_requests_total{path="/v1/chat/completions",status="200"} 2.0'
        assert counted in place.client.get("/a/llm/metrics").text
