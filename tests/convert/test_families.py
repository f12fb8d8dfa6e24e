"""Every family from end to end: converted, verified, inspected and run."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.convert import write as writing
from penstock.convert.run import Options, convert
from tests.cli.common import call
from tests.convert.common import CONFIGS, stored, write


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_converted_verified_inspected_and_run(capsys: Any, tmp_path: Path, name: str) -> None:
    folder, made = write(tmp_path / "source", name), str(tmp_path / "made")
    shown = call(
        capsys, "convert", "--model", str(folder), "--mlx-path", made, "-q", "--q-group-size", "32", "--keep-mtp"
    )
    assert shown.status == 0, shown.err
    shown = call(capsys, "verify", made)
    assert shown.status == 0, shown.out + shown.err
    shown = call(capsys, "inspect", made, "--json", "--bandwidth", "10")
    assert shown.status == 0 and json.loads(shown.out), shown.err
    shown = call(
        capsys, "generate", "--model", made, "-p", "hello", "-m", "4", "--device", "reference", "--ignore-chat-template"
    )
    assert shown.status == 0, shown.err


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next", "gemma4", "deepseek_v3"])
def test_pieces_of_any_size_make_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = write(tmp_path / "source", name)
    convert(folder, tmp_path / "large", Options(quantize=True, q_group_size=32, keep_mtp=True))
    monkeypatch.setattr(writing, "CHUNK", 900)
    convert(folder, tmp_path / "small", Options(quantize=True, q_group_size=32, keep_mtp=True))
    assert stored(tmp_path / "small", "*.safetensors") == stored(tmp_path / "large", "*.safetensors")
