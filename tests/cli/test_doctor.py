import json
import os
import platform
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest

import penstock
from penstock.backends.cpu import features
from penstock.cli import doctor
from tests.cli.common import call, program

QUICK = {"TRITON_CACHE_DIR": "/nosuch"}  # where it exists it may have a hundred thousand files


@pytest.fixture(scope="module")
def report():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", QUICK["TRITON_CACHE_DIR"])
        return doctor.examined()


def test_doctor_json_says_what_is_here():
    shown = program("doctor", "--json", **QUICK)
    assert (shown.status, shown.err) == (0, "")
    report = json.loads(shown.out)
    assert report["penstock"] == penstock.__version__
    assert report["python"] == platform.python_version()
    assert report["packages"]["numpy"] == np.__version__
    assert report["packages"]["numba"] == numba.__version__
    assert set(report["cpu"]["features"]) == features.usable_features()
    assert 1 <= report["cpu"]["physical_cores"] <= report["cpu"]["threads"]
    assert report["memory"]["total"] >= report["memory"]["free"] > 0
    assert report["packages"]["rich"] and report["packages"]["tokenizers"]
    assert report["disk"]["total"] >= report["disk"]["free"] > 0
    assert set(report["caches"]) == {"kernels", "triton", "models"}


def test_doctor_prints_every_finding(capsys, monkeypatch, report):
    monkeypatch.setattr(doctor, "examined", lambda: report)
    shown = call(capsys, "doctor")
    assert shown.status == 0
    rows = dict(line.split(maxsplit=1) for line in shown.out.splitlines())
    assert rows["penstock"] == penstock.__version__
    assert rows["numba"] == numba.__version__
    assert "physical" in rows["cores"]
    assert all(name in shown.out for name in report["cpu"]["features"])
    assert all(f"note: {note}" in shown.out for note in report["notes"])


def without_gpu(report):
    extras = dict.fromkeys((name for names, _ in doctor._EXTRAS.values() for name in names), "1.0")
    kernels = report["caches"]["kernels"] | {"writable": True, "distrusted": None}
    return report | {
        "errors": {},
        "packages": report["packages"] | extras | {"torch": "2.13.0+cpu", "triton": "3.9.0"},
        "caches": report["caches"] | {"kernels": kernels, "triton": report["caches"]["triton"] | {"distrusted": None}},
        "cpu": report["cpu"] | {"unusable": {}},
        "cuda": {"available": False, "driver": None, "torch_built_for": None, "devices": [], "unusable": "x"},
    }


def gpu(name, capability):
    return {"available": True, "devices": [{"name": name, "capability": capability, "memory": 2**37}]}


@pytest.mark.parametrize(
    ("part", "changes", "note"),
    [
        ("cuda", {}, "no NVIDIA driver is loaded here; penstock runs on the CPU"),
        ("cuda", {"driver": "580.1"}, "torch 2.13.0+cpu is built without CUDA; install a CUDA build"),
        ("cuda", {"driver": "580.1", "torch_built_for": "13.0"}, "torch sees no GPU, although an NVIDIA driver"),
        ("cuda", gpu("Quadro P400", "6.1"), "Quadro P400 has compute capability 6.1, expected 8.0 or newer"),
        ("packages", {"torch": None}, "torch is not installed; only GPUs and torch tensors need it: pip install"),
        ("packages", {"triton": None}, "triton is not installed"),
        ("packages", {"torch": "2.10.1"}, "torch 2.10.1 is outside the tested range 2.11 to 2.13"),
        ("packages", {"triton": "3.10.0"}, "triton 3.10.0 is outside the tested range 3.6 to 3.9"),
        ("packages", {"uvicorn": None, "pydantic": None}, "uvicorn, pydantic are not installed; only needed to serve"),
        ("packages", {"llguidance": None}, "llguidance is not installed; only needed for answers that follow a JSON"),
        (
            "caches",
            {"kernels": {"folder": "/x", "writable": False, "distrusted": None}},
            "/x cannot be written: every process compiles its kernels; PENSTOCK_CACHE_DIR moves it",
        ),
        (
            "caches",
            {"triton": {"distrusted": "/x belongs to user 7, expected 1"}},
            "/x belongs to user 7, expected 1: compiled kernels there are not used, every process compiles its own",
        ),
        ("errors", {"torch": "OSError: libfoo"}, "torch is installed but cannot be used: OSError: libfoo"),
        ("cpu", {"unusable": {"amx_int8": "killed by SIGILL"}}, "amx_int8 is listed by the system, but killed"),
    ],
)
def test_doctor_notes_name_what_is_missing(report, part, changes, note):
    changed = without_gpu(report)
    changed[part] = changed[part] | changes
    assert [line for line in doctor._notes(changed) if line.startswith(note)]


def test_doctor_has_nothing_to_note_on_a_good_machine(report):
    good = without_gpu(report)
    good["cuda"] = good["cuda"] | gpu("H200", "9.0")
    assert doctor._notes(good) == []


def test_doctor_survives_a_torch_that_kills_its_process(tmp_path):
    (tmp_path / "torch.py").write_text("import os; os.kill(os.getpid(), 4)")
    (tmp_path / "triton.py").write_text("__version__ = '3.7.0'")
    shown = program("doctor", "--json", PYTHONPATH=f"{tmp_path}:{':'.join(sys.path)}", **QUICK)
    report = json.loads(shown.out)
    assert shown.status == 0
    assert report["packages"]["torch"] is None
    assert report["packages"]["triton"] == "3.7.0"
    assert report["errors"] == {"torch": "the process that tried it ended with -4"}


def test_doctor_reports_a_package_that_does_not_import(tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('half installed\\nmore')")
    shown = program("doctor", PYTHONPATH=f"{tmp_path}:{':'.join(sys.path)}", **QUICK)
    assert shown.status == 0
    assert "note: torch is installed but cannot be used: RuntimeError: half installed\n" in shown.out


def test_doctor_knows_the_extras_of_the_package(report):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = {
        name: tuple(package for line in lines if (package := re.split(r"[<>=; ]", line)[0]) != "torch")
        for name, lines in project["optional-dependencies"].items()
        if name in ("server", "grammar", "gguf", "distributed")
    }
    assert {name: names for name, (names, _) in doctor._EXTRAS.items()} == wanted
    core = {re.split(r"[<>=; ]", line)[0] for line in project["dependencies"]}
    assert core == {*doctor._LIBRARIES, "numpy", "numba"}


def test_doctor_says_how_to_install_what_is_missing(report):
    changed = without_gpu(report)
    changed["packages"] |= {"starlette": None}
    assert doctor._extra(changed, "server") == "not installed (to serve models over HTTP)"
    assert any(line.endswith("pip install 'penstock[server]'") for line in doctor._notes(changed))


def test_doctor_measures_a_disk_and_leaves_nothing_on_it(tmp_path, monkeypatch):
    found = doctor._disk(tmp_path / "not" / "yet" / "there")
    assert found["folder"] == str(tmp_path)
    assert found["write_gb_per_s"] > 0 and found["read_gb_per_s"] > 0
    assert list(tmp_path.iterdir()) == []
    full = SimpleNamespace(disk_usage=lambda path: (2**40, 2**40, 5))
    monkeypatch.setattr(doctor, "shutil", full)
    assert doctor._disk(tmp_path)["write_gb_per_s"] is None


def test_doctor_lives_with_a_disk_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    found = doctor._disk(tmp_path)
    assert (found["write_gb_per_s"], found["read_gb_per_s"]) == (None, None)
    assert found["free"] > 0


def test_doctor_counts_a_cache_without_its_links(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("blobs/a")
    (tmp_path / "loop").symlink_to(".")
    found = doctor._folder(tmp_path)
    assert (found["files"], found["bytes"], found["complete"], found["writable"]) == (1, 5, True, True)
    nothing = doctor._folder(tmp_path / "nosuch")
    assert (nothing["files"], nothing["bytes"], nothing["complete"]) == (0, 0, True)


def test_doctor_stops_counting_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_COUNT_SECONDS", -1.0)
    found = doctor._folder(tmp_path)
    assert found["complete"] is False
    assert doctor._held(found).startswith("more than 0.0 MiB")


def test_doctor_finds_the_caches_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "p"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    (tmp_path / "models--owner--name" / "snapshots").mkdir(parents=True)
    assert doctor.cached_models() == ["owner/name"]
    assert os.fspath(doctor.hub_cache()) == str(tmp_path)
    assert doctor._kernel_cache()["folder"] == str(tmp_path / "p" / "numba")
    assert doctor._compiled(*doctor.kernel_cache.triton_root())["folder"] == str(tmp_path / "p" / "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "t"))
    assert doctor._compiled(*doctor.kernel_cache.triton_root())["folder"] == str(tmp_path / "t")


def test_doctor_names_a_kernel_cache_that_others_can_write_and_makes_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "p"))
    assert doctor._kernel_cache()["distrusted"] is None
    assert not (tmp_path / "p").exists()
    (tmp_path / "p").mkdir()
    (tmp_path / "p").chmod(0o777)
    assert doctor._kernel_cache()["distrusted"] == f"{tmp_path / 'p'} can be written by others (mode 0777)"
