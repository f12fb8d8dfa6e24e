"""Help, completion, exit status and colours of the whole program: what holds for every verb."""

import os
import pty
import re
import select
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from penstock.cli import main
from penstock.cli.main import app
from tests.cli.common import call, program
from tests.cli.model import write_small_model

COMMAND = typer.main.get_command(app)
VERBS = [name for name, verb in COMMAND.commands.items() if not verb.hidden]  # type: ignore[attr-defined]
LOADING = [verb for verb in VERBS if verb not in ("doctor", "kernels", "convert")]


def examples(text: str) -> list[str]:
    """The lines of the Examples section of a help text."""
    section = re.search(r"^ +Examples:\n((?: +\S.*\n)+)", text, re.MULTILINE)
    assert section, "no Examples section"
    return [line.strip() for line in section[1].splitlines()]


def arguments(example: str) -> list[str]:
    """What the program is given by a line of a shell; what comes before a pipe, and variables, do not count."""
    words = shlex.split(example)
    if "|" in words:
        words = words[words.index("|") + 1 :]
    while re.match("[A-Z_]+=", words[0]):  # a variable of the environment
        words = words[1:]
    assert words[0] == "penstock"
    return words[1:]


# -- help ------------------------------------------------------------------------------------------------------------


def test_every_verb_is_listed_with_a_line_of_its_own(capsys):
    shown = call(capsys, "--help").out
    for verb in VERBS:
        assert re.search(rf"^  {verb} +[A-Z]", shown, re.MULTILINE), verb


@pytest.mark.parametrize("verb", VERBS)
def test_help_says_what_a_verb_does_and_shows_examples_that_parse(capsys, monkeypatch, verb):
    monkeypatch.setenv("COLUMNS", "200")  # examples in one line each
    shown = call(capsys, verb, "--help")
    assert shown.status == 0 and shown.err == ""
    found = examples(shown.out)
    assert len(found) >= 2
    for example in found:
        name, *words = arguments(example)
        assert name == verb
        COMMAND.commands[verb].make_context(verb, words)  # type: ignore[attr-defined]


def test_help_of_the_program_shows_examples_that_parse(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for example in examples(call(capsys, "--help").out):
        name, *words = arguments(example)
        if name in VERBS:
            COMMAND.commands[name].make_context(name, words)  # type: ignore[attr-defined]
        else:
            assert [name] == arguments("penstock --install-completion")


@pytest.mark.parametrize(
    ("verb", "panels"),
    [
        ("generate", ["Prompt and answer", "Sampling", "Grammar", "Chat template", "Model", "Memory and experts"]),
        ("serve", ["Arguments", "Model", "Memory and experts", "Several devices", "Address and clients", "Answers"]),
        ("bench", ["Options", "Model", "Memory and experts", "Several devices"]),
    ],
)
def test_help_lists_options_by_panels_in_up_to_100_columns(capsys, monkeypatch, verb, panels):
    monkeypatch.setenv("COLUMNS", "100")
    shown = call(capsys, verb, "--help").out
    found = re.findall(r"^(\w.*):$", shown, re.MULTILINE)
    assert [panel for panel in found if panel in panels] == panels
    assert 80 < max(map(len, shown.splitlines())) <= 100
    own = shown.index(f"\n{found[0]}:\n")
    assert "--help " not in shown[own : shown.index(f"\n{found[1]}:\n")] or found[0] == "Options"


def test_commands_of_the_page_about_tools_parse():
    text = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    commands = re.findall(r"^penstock .*", text, re.MULTILINE)
    assert len(commands) > 8
    for command in commands:
        name, *words = arguments(command)
        COMMAND.commands[name].make_context(name, words)  # type: ignore[attr-defined]


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_has_a_help_text(verb):
    for option in COMMAND.commands[verb].params:  # type: ignore[attr-defined]
        if not option.hidden:
            assert option.help, option.name


# -- completion ------------------------------------------------------------------------------------------------------


def completed(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What bash is told of a line whose end is being typed."""
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    with pytest.raises(SystemExit):
        main.main([])
    return capsys.readouterr().out.split()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of huggingface_hub with two models, a dataset and a download that never began."""
    for name in ("models--mlx-community--Some-4bit", "models--owner--name", "datasets--owner--text"):
        (tmp_path / name / "snapshots").mkdir(parents=True)
    (tmp_path / "models--owner--nothing").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))


def test_completion_knows_verbs_and_options(monkeypatch, capsys):
    assert completed("penstock ", monkeypatch, capsys) == VERBS
    assert completed("penstock per", monkeypatch, capsys) == ["perplexity"]
    assert completed("penstock verify --ha", monkeypatch, capsys) == ["--hashes"]


@pytest.mark.parametrize("before", ["inspect", "verify", "perplexity", "generate --model", "bench -m", "chat --model"])
def test_completion_knows_the_models_of_the_local_cache(monkeypatch, capsys, cache, before):
    assert completed(f"penstock {before} ow", monkeypatch, capsys) == ["owner/name"]
    assert completed(f"penstock {before} mlx-community/", monkeypatch, capsys) == ["mlx-community/Some-4bit"]
    assert completed(f"penstock {before} /tmp", monkeypatch, capsys) == []  # then the shell completes paths


def test_completion_survives_a_missing_cache(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "nosuch"))
    assert completed("penstock inspect ow", monkeypatch, capsys) == []


def test_completion_script_is_shown_for_the_shell():
    command = f"{sys.executable} -m penstock --show-completion; exit $?"  # bash stays: it is looked for among parents
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert shown.returncode == 0
    assert "_PENSTOCK_COMPLETE=complete_bash" in shown.stdout


# -- exit status -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_an_unknown_option_is_one_line_and_status_2(capsys, verb):
    shown = call(capsys, verb, "--no-such-option")
    assert (shown.status, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert shown.err.startswith("penstock: error: No such option: --no-such-option")


@pytest.mark.parametrize("verb", LOADING)
def test_a_missing_model_is_one_line_and_status_1(capsys, tmp_path, verb):
    more = {"perplexity": ["--data-path", __file__], "cache_prompt": ["-p", "x", "--prompt-cache-file", "y"]}
    shown = call(capsys, verb, "--model", str(tmp_path / "nosuch"), *more.get(verb, []))
    assert (shown.status, shown.out, shown.err.count("\n")) == (1, "", 1)
    assert "no such folder" in shown.err


@pytest.mark.parametrize(
    ("verb", "inside"),
    [
        ("perplexity", "penstock.analysis.perplexity.evaluate"),
        ("inspect", "penstock.analysis.survey.survey"),
        ("verify", "penstock.analysis.verify.check_headers"),
        ("doctor", "penstock.cli.doctor.examined"),
    ],
)
def test_an_interrupt_is_silent_and_status_130(capsys, monkeypatch, verb, inside):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(inside, interrupted)
    more = ["--data-path", __file__, "--sequence-length", "64"] if verb == "perplexity" else []
    shown = call(capsys, verb, *more)
    assert (shown.status, shown.out, shown.err) == (130, "", "")


# -- terminals and pipes ---------------------------------------------------------------------------------------------


def on_terminal(*words: str, **environ: str) -> str:
    """What the program writes to a terminal."""
    ours, theirs = pty.openpty()
    env = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-m", "penstock", *words]
    child = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=env | {"TERM": "xterm-256color"} | environ
    )
    os.close(theirs)
    found = b""
    try:
        while select.select([ours], [], [], 60)[0]:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # all who could write have gone
                break
            if not data:
                break
            found += data
    finally:
        os.close(ours)
        child.wait()
    return found.decode()


def test_bars_and_colours_are_for_terminals(tmp_path):
    words = ["perplexity", write_small_model(tmp_path / "small"), "--data-path", __file__, "--device", "reference"]
    words += ["--sequence-length", "32", "--num-samples", "2"]
    shown = on_terminal(*words)
    assert "windows" in shown and "\x1b[" in shown
    shown = program(*words, "--json")
    assert (shown.status, shown.err) == (0, "")
    assert "\x1b" not in shown.out and "\r" not in shown.out


def test_no_color_leaves_no_escape_sequences_in_a_table():
    shown = on_terminal("verify", NO_COLOR="1")
    assert "headers" in shown
    assert not re.search(r"\x1b\[[0-9;]*m", shown)
