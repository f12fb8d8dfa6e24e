import json
import os
import shutil
from pathlib import Path

import pytest

from penstock import models
from penstock.engine.expert_weights import expert_layers
from penstock.experts import packed
from penstock.experts.layout import Extent, Layer
from penstock.models.source import CheckpointSource
from penstock.weights.checkpoint import Checkpoint
from tests.cli.common import call
from tests.cli.model import DEMO
from tests.models.common import dense_config, write_model


@pytest.fixture
def model(tmp_path):
    """A folder with the demo model."""
    for path in DEMO.iterdir():
        shutil.copy(path, tmp_path)
    return tmp_path


def layers_of(checkpoint: Checkpoint) -> list[Layer]:
    family = models.family_of(checkpoint.config)
    config = family.read_config(checkpoint.config)
    return expert_layers(family, CheckpointSource(checkpoint, *family.names(checkpoint, config)), config)


def test_pack_writes_the_experts_into_one_file(capsys, model):
    shown = call(capsys, "pack", str(model))
    target = model / "experts.penstock"
    assert (shown.status, shown.err) == (0, "")
    checkpoint = Checkpoint.open(model)
    layers = layers_of(checkpoint)
    experts = sum(layer.count for layer in layers)
    assert shown.out.startswith(f"{target}: {experts} experts of {len(layers)} layers, ")
    assert "packed in" in shown.out and shown.out.count("\n") == 1
    found = packed.open_packed(target, layers, checkpoint.fingerprint)
    for layer, own in zip(layers, found, strict=True):
        for part in own.parts:
            assert {extent.path for extent in part.extents} == {target}
        for expert in range(layer.count):
            for a, b in zip(layer.extents(expert), own.extents(expert), strict=True):
                assert piece(a) == piece(b)
    assert sorted(path.name for path in model.iterdir()) == sorted(
        [*(path.name for path in DEMO.iterdir()), "experts.penstock"]
    )


def piece(extent: Extent) -> bytes:
    with extent.path.open("rb") as file:
        return os.pread(file.fileno(), extent.nbytes, extent.start)


def report(capsys, *arguments: str) -> dict:
    shown = call(capsys, "pack", *arguments, "--json")
    assert shown.status == 0, shown.err
    return json.loads(shown.out)


def test_pack_leaves_a_file_that_fits_alone(capsys, model):
    first = report(capsys, str(model))
    assert first["status"] == "packed" and first["seconds"] > 0
    assert 0 < first["moved_bytes"] < first["bytes"] == (model / "experts.penstock").stat().st_size
    before = (model / "experts.penstock").stat()
    second = report(capsys, str(model))
    assert second == first | {"status": "current", "seconds": 0, "moved_bytes": 0}
    assert "packed before and of this model" in call(capsys, "pack", str(model)).out
    after = (model / "experts.penstock").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert report(capsys, str(model), "--force")["status"] == "packed"
    assert (model / "experts.penstock").stat().st_ino != before.st_ino


def test_pack_again_when_the_model_changed(capsys, model):
    report(capsys, str(model))
    os.utime(model / "model.safetensors", ns=(1, 1))
    shown = call(capsys, "pack", str(model))
    assert shown.status == 0 and "packed in" in shown.out
    assert shown.err.count("\n") == 1 and "packed again: " in shown.err and "changed" in shown.err
    assert "packed before and of this model" in call(capsys, "pack", str(model)).out


def test_pack_check_compares_all_hashes(capsys, model):
    missing = call(capsys, "pack", str(model), "--check")
    assert (missing.status, missing.out) == (1, "")
    assert missing.err == f"penstock: error: {model / 'experts.penstock'}: no such file\n"
    report(capsys, str(model))
    found = report(capsys, str(model), "--check")
    assert found["status"] == "verified" and found["moved_bytes"] > 0
    assert "all hashes right" in call(capsys, "pack", str(model), "--check").out
    with (model / "experts.penstock").open("r+b") as file:
        file.seek(-5000, os.SEEK_END)
        file.write(b"damage")
    damaged = call(capsys, "pack", str(model), "--check")
    assert damaged.status == 1
    assert damaged.err.count("\n") == 1 and "is damaged; run `penstock pack` with --force" in damaged.err


def test_pack_into_another_file(capsys, model, tmp_path_factory):
    target = tmp_path_factory.mktemp("elsewhere") / "x.bin"
    assert report(capsys, str(model), "--out", str(target))["file"] == str(target)
    assert target.exists() and not (model / "experts.penstock").exists()
    refused = call(capsys, "pack", str(model), "--force", "--out", str(model / "model.safetensors"))
    assert refused.status == 1 and "is there and no packed expert file; it is not replaced" in refused.err
    Checkpoint.open(model)


def test_pack_interrupted_goes_on(capsys, model, monkeypatch):
    def stop(record):
        calls.append(len(record))
        if len(calls) == 20:
            raise KeyboardInterrupt
        return real(record)

    real, calls = packed._hash, []
    with monkeypatch.context() as patched:
        patched.setattr(packed, "_hash", stop)
        shown = call(capsys, "pack", str(model))
    target = model / "experts.penstock"
    assert (shown.status, shown.out) == (130, "")
    assert shown.err == f"interrupted; {target}.part is kept, and the same command goes on from there\n"
    assert Path(f"{target}.part").exists() and not target.exists()
    rest = report(capsys, str(model))
    checked = report(capsys, str(model), "--check")
    assert 0 < rest["moved_bytes"] < checked["moved_bytes"]


def test_pack_refuses_what_has_no_experts(capsys, tmp_path):
    folder = write_model(tmp_path / "dense", dense_config())
    shown = call(capsys, "pack", str(folder))
    assert (shown.status, shown.out) == (1, "")
    assert shown.err == f"penstock: error: {folder}: has no experts to pack\n"


def test_pack_usage(capsys, model):
    shown = call(capsys, "pack", str(model), "--check", "--force")
    assert shown.status == 2 and "--force: expected without --check" in shown.err
    assert call(capsys, "pack").status == 2
    absent = call(capsys, "pack", str(model / "absent"))
    assert absent.status == 1 and absent.err.count("\n") == 1
    helped = call(capsys, "pack", "--help")
    assert helped.status == 0 and "penstock pack ./my-model" in helped.out
