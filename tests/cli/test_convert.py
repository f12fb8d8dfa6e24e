"""penstock convert: its options, what it prints, and one line for whatever is wrong."""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from penstock.convert import write
from tests.cli.common import call, program
from tests.convert.common import config_in, stored
from tests.convert.common import write as write_source


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("released") / "model", "qwen2")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_convert_writes_a_model_and_says_what(capsys: Any, source: Path, tmp_path: Path) -> None:
    shown = call(capsys, "convert", "--hf-path", str(source), "--mlx-path", str(tmp_path / "made"), "-q")
    assert (shown.status, shown.err) == (0, "")
    assert shown.out.startswith(f"{tmp_path}/made: 0.1 M parameters, ") and " kB in 1 file, " in shown.out
    assert shown.out.count("\n") == 1 and "bits per weight" in shown.out
    assert config_in(tmp_path / "made")["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}


def test_json_is_the_report(capsys: Any, source: Path, tmp_path: Path) -> None:
    options = ("-q", "--q-bits", "8", "--q-group-size", "32", "--dtype", "float16", "--json")
    shown = call(capsys, "convert", "--model", str(source), "--mlx-path", str(tmp_path / "made"), *options)
    report = json.loads(shown.out)
    assert report["files"] == 1 and report["kept"] == 0 and report["perplexity"] is None
    assert report["nbytes"] == sum(len(data) for *_, data in stored(tmp_path / "made").values())
    assert 8 < report["bits_per_weight"] == pytest.approx(8 * report["nbytes"] / report["parameters"])


def test_the_default_folder_is_that_of_mlx_lm(
    capsys: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "convert", "--model", str(source)).status == 0
    assert names(tmp_path) == ["mlx_model"]


def test_there_and_back(capsys: Any, source: Path, tmp_path: Path) -> None:
    four, dense = str(tmp_path / "four"), str(tmp_path / "dense")
    assert call(capsys, "convert", "--model", str(source), "--mlx-path", four, "-q").status == 0
    assert call(capsys, "convert", "--model", four, "--mlx-path", dense, "-d").status == 0
    assert stored(Path(dense)).keys() == stored(source).keys()
    shown = call(capsys, "convert", "--model", four, "--mlx-path", str(tmp_path / "three"), "-q", "--q-bits", "3")
    assert shown.status == 1 and "is quantized already" in shown.err


def test_remarks_go_to_stderr(capsys: Any, tmp_path: Path) -> None:
    folder = write_source(tmp_path / "source", "qwen3_5_moe")
    shown = call(capsys, "convert", "--model", str(folder), "--mlx-path", str(tmp_path / "made"))
    assert shown.status == 0 and shown.out.count("\n") == 1
    assert "tensors that predict further tokens are left out" in shown.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-q", "-d"), "convert: quantize and dequantize are both asked for, expected one of them"),
        (("-q", "--q-bits", "7"), "q-bits is 7, expected one of 1, 2, 3, 4, 5, 6, 8"),
        (("-q", "--q-group-size", "48"), "q-group-size is 48, expected one of 32, 64, 128"),
        (("--q-bits", "4"), "convert: q_bits is 4, expected it with quantize (-q)"),
        (("-q", "--quant-predicate", "mixed_9"), "quant-predicate is 'mixed_9', expected one of mixed_2_6"),
        (("-q", "--q-mode", "mxfp6"), "Invalid value for '--q-mode'"),
        (("--q-mode", "mxfp4"), "convert: q_mode is 'mxfp4', expected it with quantize (-q)"),
        (("-q", "--q-mode", "mxfp4", "--q-bits", "8"), "q-bits is 8, expected 4 in mode mxfp4"),
        (("-q", "--q-mode", "mxfp4", "--calibrate", "x.txt"), "convert: q_mode is 'mxfp4', expected affine with"),
        (("--upload-repo", "me/it"), "--upload-repo: not supported by penstock yet"),
        (("--dtype", "float8"), "Invalid value for '--dtype'"),
        (("--calibrate", "x.txt"), "convert: calibrate is asked for without quantize"),
        (("-q", "--calibrate-tokens", "5"), "convert: calibrate_tokens is 5, expected a number above 0, and a text"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(capsys: Any, tmp_path: Path, options: Any, message: str) -> None:
    shown = call(capsys, "convert", "--model", "nosuch", "--mlx-path", str(tmp_path / "made"), *options)
    assert (shown.status, shown.out) == (2, "")
    assert shown.err.startswith(f"penstock: error: {message}") and shown.err.count("\n") == 1
    assert names(tmp_path) == []


def test_a_missing_recipe_is_one_line(capsys: Any, source: Path, tmp_path: Path) -> None:
    shown = call(capsys, "convert", "--model", str(source), "-q", "--quant-predicate", str(tmp_path / "nosuch.json"))
    assert shown.status == 1 and shown.err.endswith("nosuch.json: no such file\n")


# -- damaged sources -------------------------------------------------------------------------------------------------


def shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the header of a shard, its data stays."""

    def damage(folder: Path) -> None:
        data = shard(folder).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        table = json.loads(data[8 : 8 + size])
        change(table)
        text = json.dumps(table).encode()
        shard(folder).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return damage


def first(table: dict[str, Any]) -> dict[str, Any]:
    return next(entry for name, entry in table.items() if name != "__metadata__")


def config(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def weights(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        found = {name: array for file in folder.glob("model-*") for name, array in load_file(file).items()}
        for path in folder.glob("model*"):
            path.unlink()
        change(found)
        save_file(found, folder / "model.safetensors", {"format": "pt"})

    return damage


def replaced(data: bytes) -> Callable[[Path], None]:
    return lambda folder: shard(folder).write_bytes(data) and None


def instead(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = shard(folder)
        path.unlink()
        make(path)

    return damage


UP = "model.layers.0.mlp.up_proj"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty shard": (replaced(b""), "has no bytes, expected a safetensors file"),
    "short shard": (replaced(b"\1\2\3"), "has only 3 bytes"),
    "a folder for a shard": (instead(Path.mkdir), "is a folder, expected a regular file"),
    "a FIFO for a shard": (instead(os.mkfifo), "is a FIFO, expected a regular file"),
    "a dangling link": (instead(lambda path: path.symlink_to("nowhere")), "is a link to nowhere, which does not exist"),
    "a link to itself": (instead(lambda path: path.symlink_to(path.name)), "is a link that leads back to itself"),
    "Git LFS": (replaced(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"), "a Git LFS pointer"),
    "an HTML page": (replaced(b"<!DOCTYPE html><html></html>"), "an HTML page, not the file itself"),
    "a header that is too long": (
        replaced(struct.pack("<Q", 1 << 62) + b"{}" * 9),
        "header length is 4611686018427387904",
    ),
    "a header that is no JSON": (replaced(struct.pack("<Q", 4) + b"{no}"), "header: not valid JSON"),
    "offsets past the end": (
        header(lambda table: first(table).update(data_offsets=[0, 1 << 60], shape=[1 << 59])),
        "an unfinished download?",
    ),
    "negative sizes": (header(lambda table: first(table).update(shape=[-1, 2])), "expected a list of sizes"),
    "an unknown dtype": (header(lambda table: first(table).update(dtype="F4")), "has dtype 'F4', expected one of"),
    "a truncated shard": (lambda folder: os.truncate(shard(folder), 5000), "an unfinished download?"),
    "a missing shard": (lambda folder: shard(folder).unlink(), "not fully downloaded?"),
    "an index with paths": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "../x.safetensors"}}'
        ),
        "is no plain file name",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json, expected a model folder"),
    "a config of NaN": (lambda folder: (folder / "config.json").write_text('{"a": NaN}'), "NaN is no JSON number"),
    "another model": (config(model_type="gpt2"), "config.json: model_type is 'gpt2', expected one of"),
    "an unknown rotation": (config(rope_scaling={"rope_type": "spiral"}), "rope_type is 'spiral', expected one of"),
    "heads that do not fit": (config(num_attention_heads=3), "num_attention_heads is 3, expected a multiple"),
    "text for a number": (config(hidden_size="64"), "hidden_size is '64', expected an integer"),
    "another width": (config(intermediate_size=128), "has shape (160, 64), expected (128, 64) by config.json"),
    "another vocabulary": (config(vocab_size=300), "model.embed_tokens has shape (263, 64), expected (300, 64)"),
    "more layers": (config(num_hidden_layers=3), "has no tensor 'model.layers.2.mlp.gate_proj.weight'"),
    "another quantization": (config(quantization_config={"quant_method": "gptq"}), "has quant_method 'gptq'"),
    "a table without bits": (config(quantization={"group_size": 64}), "bits is None, expected one of"),
    "integers": (
        weights(lambda w: w.update({f"{UP}.weight": w[f"{UP}.weight"].view("int16")})),
        "has dtype int16, expected",
    ),
    "scales without words about them": (
        weights(lambda w: w.update({f"{UP}.scales": w[f"{UP}.weight"]})),
        "needs bits and group size, but config.json has no quantization",
    ),
    "FP8 without scales": (
        header(lambda table: table[f"{UP}.weight"].update(dtype="F8_E4M3", shape=[160, 128])),
        f"tensor '{UP}.weight' is FP8 without '{UP}.weight_scale_inv'",
    ),
    "a pickle": (
        lambda folder: [path.rename(path.with_suffix(".bin")) for path in folder.glob("model*")],
        "and pickles are never loaded",
    ),
    "a FIFO for the tokenizer": (
        lambda folder: ((folder / "tokenizer.json").unlink(), os.mkfifo(folder / "tokenizer.json")),
        "tokenizer.json: is a FIFO, expected a regular file",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_is_one_line_and_nothing_is_written(capsys: Any, tmp_path: Path, name: str) -> None:
    folder = write_source(tmp_path / "source", "qwen2")
    damage, message = DAMAGES[name]
    damage(folder)
    (tmp_path / "out").mkdir()
    shown = call(capsys, "convert", "--model", str(folder), "--mlx-path", str(tmp_path / "out" / "made"), "-q")
    last = shown.err.splitlines()[-1]
    assert (shown.status, shown.out) == (1, "") and last.startswith("penstock: error: ") and message in last, shown.err
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.gguf", b"", "has no bytes, expected a GGUF file"),
        ("x.gguf", b"GGUF" + b"\xff" * 40, "is GGUF version 4294967295, expected 2 or 3"),
        ("x.gguf", b"GGUF\3\0\0\0" + b"\xff" * 16, "tensors"),
        ("x.txt", b"hello", "is a file, expected a model folder"),
    ],
)
def test_a_damaged_file_is_one_line(capsys: Any, tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    shown = call(capsys, "convert", "--model", str(tmp_path / name), "--mlx-path", str(tmp_path / "made"))
    assert shown.status == 1 and message in shown.err and shown.err.count("\n") == 1
    assert names(tmp_path) == [name]


def test_no_such_model_is_one_line(capsys: Any, tmp_path: Path) -> None:
    shown = call(capsys, "convert", "--model", str(tmp_path / "nosuch"), "--mlx-path", str(tmp_path / "made"))
    assert shown.status == 1 and "no such folder" in shown.err and names(tmp_path) == []


def test_code_in_the_folder_is_copied_and_never_run(capsys: Any, tmp_path: Path) -> None:
    folder = write_source(tmp_path / "source", "qwen2")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config(auto_map={"AutoModel": "evil.Model"}, model_file="evil.py")(folder)
    shown = call(capsys, "convert", "--model", str(folder), "--mlx-path", str(tmp_path / "made"))
    assert shown.status == 0 and "which is never executed" in shown.err
    assert not (tmp_path / "ran").exists() and (tmp_path / "made" / "evil.py").exists()


# -- interrupted -----------------------------------------------------------------------------------------------------


def test_control_c_is_one_line_and_leaves_no_half_model(source: Path, tmp_path: Path) -> None:
    """SIGINT while the second file is written, in a process of its own."""
    code = f"""
import sys, time
from penstock.convert import run, write
from penstock.cli.main import run as main
real, note = run.convert, write.Workshop._note
run.convert = lambda *args, **options: real(*args, **options, shard_bytes=30000)
def noted(self, entry):
    note(self, entry)
    if "file" in entry:
        self.finished[entry["file"]] = entry["bytes"]
        print("one", flush=True)
        time.sleep(30)
write.Workshop._note = noted
sys.exit(main(["convert", "--model", {str(source)!r}, "--mlx-path", {str(tmp_path / "made")!r}, "-q"]))
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    ready = child.stdout.readline()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert ready == "one\n", err
    assert child.returncode == 130
    left = tmp_path / "made.converting"
    assert err == f"penstock: interrupted; finished files are in {left}, the same command goes on\n"
    assert names(tmp_path) == ["made.converting"]
    assert names(left)[0] == "journal.jsonl" and names(left)[1].startswith("model-00001-of-")


def test_control_c_before_the_first_file_leaves_nothing(
    capsys: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(write, "through", interrupted)
    shown = call(capsys, "convert", "--model", str(source), "--mlx-path", str(tmp_path / "made"))
    assert (shown.status, shown.out, shown.err) == (130, "", "penstock: interrupted; nothing was written\n")
    assert names(tmp_path) == []


def test_a_full_disk_is_one_line(capsys: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: Any, place: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    shown = call(capsys, "convert", "--model", str(source), "--mlx-path", str(tmp_path / "made"))
    assert (shown.status, shown.out) == (1, "") and shown.err.count("\n") == 1
    assert "model.safetensors.partial: the disk is full; free some space" in shown.err
    assert names(tmp_path) == []


def test_help_shows_examples_and_fits_80_columns(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = call(capsys, "convert", "--help")
    assert shown.status == 0 and "Examples:" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80


def test_output_is_quiet_in_a_pipe(source: Path, tmp_path: Path) -> None:
    shown = program("convert", "--model", str(source), "--mlx-path", str(tmp_path / "made"))
    assert (shown.status, shown.err) == (0, "") and "\x1b" not in shown.out
