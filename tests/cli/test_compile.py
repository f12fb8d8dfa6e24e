"""penstock compile: which kernels it asks for, that a second call finds nothing, and what it refuses."""

import pytest

from penstock.cli.main import run
from penstock.engine import compile_ahead, compile_families


@pytest.fixture
def compiled(monkeypatch):
    """What was to be compiled, as lists of kernels; nothing is."""
    asked = []
    monkeypatch.setattr(compile_ahead, "start", lambda *given, **more: None)
    monkeypatch.setattr(compile_ahead, "compile_kernels", lambda missing: asked.append(list(missing)))
    return asked


def test_compile_says_what_it_did_and_that_nothing_was_left(capsys, monkeypatch, compiled):
    left = {"gemma4": ["a", "b"], "llama": ["b"]}
    monkeypatch.setattr(compile_families, "shipped_by_family", lambda: dict.fromkeys(left))
    monkeypatch.setattr(
        compile_families, "missing_of_families", lambda names: {file: None for name in names for file in left[name]}
    )
    assert run(["compile"]) == run(["compile", "llama"]) == 0
    assert compiled == [["a", "b"], ["b"]]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Compiled 2 kernels in ") and second.startswith("Compiled 1 kernel in ")
    left.update(gemma4=[], llama=[])
    assert run(["compile", "gemma4", "llama"]) == 0
    assert capsys.readouterr().out == "Nothing was left to compile.\n"
    assert len(compiled) == 2


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["nosuch"], "FAMILY: is 'nosuch', expected one of deepseek_v3, gemma3, gemma3n, gemma4, gpt_oss, kimi_linear"),
        (["llama", "--model", "x"], "--model: expected without FAMILY"),
    ],
    ids=["family", "both"],
)
def test_compile_refuses(capsys, compiled, arguments, why):
    assert run(["compile", "--device", "cpu", *arguments]) == 2
    assert why in capsys.readouterr().err and not compiled
