import platform
import subprocess
import sys

import pytest

from penstock.backends.cpu import features, try_codes
from penstock.machine import cpu_flags

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="instructions are tried on Linux only")

RETURN = {"x86_64": "c3", "aarch64": "c0035fd6"}.get(platform.machine(), "")
UNDEFINED = {"x86_64": "0f0b", "aarch64": "00000000"}.get(platform.machine(), "")  # ud2; udf #0
ENDLESS = {"x86_64": "ebfe", "aarch64": "00000014"}.get(platform.machine(), "")  # a jump to itself

needs_codes = pytest.mark.skipif(not RETURN, reason="no machine code known for this architecture")


@needs_codes
def test_try_codes_reports_the_instruction_that_kills_and_goes_on():
    outcomes = features.try_codes({"first": RETURN, "fake": UNDEFINED, "last": RETURN})
    assert outcomes == {"first": "usable", "fake": "killed by SIGILL", "last": "usable"}


@needs_codes
def test_try_codes_outlives_code_that_never_returns():
    outcomes = features.try_codes({"first": RETURN, "fake": ENDLESS}, timeout=1.0)
    assert outcomes == {"first": "usable", "fake": "not tried: no answer in 1 s"}


def test_try_codes_needs_no_interpreter_to_stay_calm(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert features.try_codes({"any": "c3"}) == {"any": "not tried: no child process: No such file or directory"}


@needs_codes
def test_probe_reports_a_listed_feature_that_dies_as_unusable(monkeypatch):
    known = {"good": ("flag", RETURN), "bad": ("flag", UNDEFINED), "absent": ("other", RETURN)}
    monkeypatch.setitem(features._BY_MACHINE, platform.machine(), known)
    monkeypatch.setattr(features, "cpu_flags", lambda: frozenset({"flag"}))
    outcomes = features.probe.__wrapped__()
    assert outcomes == {"good": "usable", "bad": "killed by SIGILL", "absent": "not listed"}


def test_usable_features_are_listed_by_the_system():
    known = features._BY_MACHINE.get(platform.machine(), {})
    assert all(known[name][0] in cpu_flags() for name in features.usable_features())
    if platform.machine() == "x86_64" and "avx2" in cpu_flags():
        assert "avx2" in features.usable_features()


@pytest.mark.parametrize(("attribute", "value"), [("machine", "riscv64"), ("machine", "")])
def test_probe_is_empty_on_an_unknown_machine(monkeypatch, attribute, value):
    monkeypatch.setattr(platform, attribute, lambda: value)
    assert features.probe.__wrapped__() == {}


def test_script_imports_the_standard_library_alone():
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print({'penstock', 'numpy', 'numba'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code, try_codes.__file__], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
