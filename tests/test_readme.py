"""Everything that README.md shows runs as written."""

import importlib.util
import io
import re
import shlex
import signal
from dataclasses import fields
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.settings import Settings, variable
from tests.server.test_serve import started

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


COMMANDS = [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]


def test_readme_python_blocks_run_in_order(capsys):
    names: dict[str, object] = {}
    for block in blocks("python"):
        if "import torch" in block and importlib.util.find_spec("torch") is None:
            continue
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    # comments behind a print show the start of what it prints
    for block in blocks("python"):
        for shown in re.findall(r"# (QuantizedTensor\(.*?|rms_norm: .*?) ?\.\.\.", block):
            assert shown in printed


def needs_elsewhere(command: str) -> bool:
    """A download, gigabytes or a GPU: then the flags at least must exist."""
    return bool({"--model", "--random", "cuda"} & set(shlex.split(command)))


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("penstock ")])
def test_readme_penstock_commands_run(capsys, monkeypatch, command):
    _, verb, *arguments = shlex.split(command)
    if needs_elsewhere(command):
        assert run([verb, "--help"]) == 0
        usage = capsys.readouterr().out
        assert all(argument in usage for argument in arguments if argument.startswith("-"))
        return
    if verb == "serve":  # it ends when it is told to
        with started(*arguments) as server:
            assert server.end(signal.SIGTERM) == 0
        return
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/exit\n"))
    monkeypatch.setattr("penstock.analysis.bandwidth.array_bytes", lambda: 1 << 24)
    assert run([verb, *arguments]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", [command for command in COMMANDS if not command.startswith("penstock ")])
def test_readme_make_targets_exist(command):
    program, target = command.split()
    assert program == "make"
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_readme_lists_every_setting():
    listed = re.findall(r"^\| `(PENSTOCK_\w+)` \| (.*) \|$", README, re.MULTILINE)
    assert [name for name, _ in listed] == [variable(setting) for setting in fields(Settings)]
    for (name, text), setting in zip(listed, fields(Settings), strict=True):
        assert text.startswith(setting.metadata["help"]), name


def test_readme_links_lead_somewhere():
    assert all((ROOT / target).exists() for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README))
