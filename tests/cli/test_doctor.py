import json
import platform
import sys

import numba
import numpy as np
import pytest

import penstock
from penstock.backends.cpu import features
from penstock.cli import doctor
from tests.cli.common import call, program


@pytest.fixture(scope="module")
def report():
    return doctor.examined()


def test_doctor_json_says_what_is_here():
    shown = program("doctor", "--json")
    assert (shown.status, shown.err) == (0, "")
    report = json.loads(shown.out)
    assert report["penstock"] == penstock.__version__
    assert report["python"] == platform.python_version()
    assert report["packages"]["numpy"] == np.__version__
    assert report["packages"]["numba"] == numba.__version__
    assert set(report["cpu"]["features"]) == features.usable_features()
    assert 1 <= report["cpu"]["physical_cores"] <= report["cpu"]["threads"]
    assert report["memory"]["total"] >= report["memory"]["free"] > 0


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
    return report | {
        "errors": {},
        "packages": report["packages"] | {"torch": "2.13.0+cpu", "triton": "3.9.0"},
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
    shown = program("doctor", "--json", PYTHONPATH=f"{tmp_path}:{':'.join(sys.path)}")
    report = json.loads(shown.out)
    assert shown.status == 0
    assert report["packages"]["torch"] is None
    assert report["packages"]["triton"] == "3.7.0"
    assert report["errors"] == {"torch": "the process that tried it ended with -4"}


def test_doctor_reports_a_package_that_does_not_import(tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('half installed\\nmore')")
    shown = program("doctor", PYTHONPATH=f"{tmp_path}:{':'.join(sys.path)}")
    assert shown.status == 0
    assert "note: torch is installed but cannot be used: RuntimeError: half installed\n" in shown.out
