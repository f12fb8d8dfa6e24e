import os
import platform
import subprocess
import sys

import pytest

from penstock.backends.cpu import features

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
    monkeypatch.setattr(features, "_listed_flags", lambda: frozenset({"flag"}))
    outcomes = features.probe.__wrapped__()
    assert outcomes == {"good": "usable", "bad": "killed by SIGILL", "absent": "not listed"}


def test_usable_features_are_listed_by_the_system():
    known = features._BY_MACHINE.get(platform.machine(), {})
    assert all(known[name][0] in features._listed_flags() for name in features.usable_features())
    if platform.machine() == "x86_64" and "avx2" in features._listed_flags():
        assert "avx2" in features.usable_features()


@pytest.mark.parametrize(("attribute", "value"), [("machine", "riscv64"), ("machine", "")])
def test_probe_is_empty_on_an_unknown_machine(monkeypatch, attribute, value):
    monkeypatch.setattr(platform, attribute, lambda: value)
    assert features.probe.__wrapped__() == {}


def test_features_imports_the_standard_library_alone():
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print({'numpy', 'numba'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code, features.__file__], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def test_cores_are_those_of_the_affinity_mask():
    allowed = os.sched_getaffinity(0)
    assert 1 <= features.physical_cores() <= features.usable_threads() <= len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert features.physical_cores() == features.usable_threads() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.fixture
def fake_system(tmp_path, monkeypatch):
    """An empty /proc and /sys; returns a function that writes a file into them."""
    monkeypatch.setattr(features, "PROC", tmp_path / "proc")
    monkeypatch.setattr(features, "SYS", tmp_path / "sys")
    monkeypatch.setattr(features, "_allowed_cpus", lambda: {0, 1, 2, 3, 4, 5, 6, 7})

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    return write


def test_machine_without_proc_and_sys_gets_safe_answers(fake_system):
    assert features._listed_flags() == frozenset()
    assert features.cpu_model()
    assert features.usable_threads() == features.physical_cores() == 8
    assert features.memory() == (0, 0)


def test_threads_that_share_a_core_count_once(fake_system):
    for cpu in range(8):
        fake_system(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    assert features.physical_cores() == 4
    assert features.usable_threads() == 8


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/job\n2:memory:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
    ],
    ids=["unlimited", "parent", "half", "version1"],
)
def test_threads_respect_the_control_group(fake_system, files, threads):
    for path, text in files.items():
        fake_system(path, text)
    assert features.usable_threads() == threads


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("max", "5000", (8192000, 4096000)), ("3000000", "1000000", (3000000, 2000000)), ("100", "900", (100, 0))],
)
def test_memory_respects_the_control_group(fake_system, limit, used, expected):
    fake_system("proc/meminfo", "MemTotal:       8000 kB\nMemFree:        10 kB\nMemAvailable:   4000 kB\n")
    fake_system("proc/self/cgroup", "0::/job\n")
    fake_system("sys/fs/cgroup/job/memory.max", limit)
    fake_system("sys/fs/cgroup/job/memory.current", used)
    assert features.memory() == expected
