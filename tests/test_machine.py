import os
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock import machine

linux = pytest.mark.skipif(sys.platform != "linux", reason="affinity and control groups are Linux's")


@linux
def test_cores_are_those_of_the_affinity_mask():
    allowed = os.sched_getaffinity(0)
    assert 1 <= machine.physical_cores() <= machine.usable_threads() <= len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert machine.physical_cores() == machine.usable_threads() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.fixture
def fake_system(tmp_path, monkeypatch):
    """An empty /proc and /sys; returns a function that writes a file into them."""
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "SYS", tmp_path / "sys")
    monkeypatch.setattr(machine, "_allowed_cpus", lambda: {0, 1, 2, 3, 4, 5, 6, 7})

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    return write


def test_machine_without_proc_and_sys_gets_safe_answers(fake_system):
    assert machine.cpu_flags() == frozenset()
    assert machine.cpu_model()
    assert machine.usable_threads() == machine.physical_cores() == 8
    assert machine.memory() == (0, 0)


def test_threads_that_share_a_core_count_once(fake_system):
    for cpu in range(8):
        fake_system(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    assert machine.physical_cores() == 4
    assert machine.usable_threads() == 8
    assert machine.cores() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    for cpu in range(8):
        fake_system(f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", f"{10 - cpu % 2}\n")
    assert machine.cores() == [[1, 5], [3, 7], [0, 4], [2, 6]]


def test_memory_is_limited_to_what_a_process_was_given(fake_system, monkeypatch):
    fake_system("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 700 kB\n")
    fake_system("proc/self/status", "Name:\tx\nVmRSS:\t999 kB\nRssAnon:\t 100 kB\nRssFile:\t9 kB\nRssShmem:\t 20 kB\n")
    monkeypatch.setattr(machine, "_memory_limit", None)
    assert machine.memory() == (1000 << 10, 700 << 10)
    for limit, free in ((900, 700), (500, 380), (110, 0)):
        machine.limit_memory(limit << 10)
        assert machine.memory() == (limit << 10, free << 10)
        assert machine.available_memory() == free << 10


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
    assert machine.usable_threads() == threads


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("max", "5000", (8192000, 4096000)), ("3000000", "1000000", (3000000, 2000000)), ("100", "900", (100, 0))],
)
def test_memory_respects_the_control_group(fake_system, limit, used, expected):
    fake_system("proc/meminfo", "MemTotal:       8000 kB\nMemFree:        10 kB\nMemAvailable:   4000 kB\n")
    fake_system("proc/self/cgroup", "0::/job\n")
    fake_system("sys/fs/cgroup/job/memory.max", limit)
    fake_system("sys/fs/cgroup/job/memory.current", used)
    assert machine.memory() == expected


def test_available_memory_is_a_sensible_number() -> None:
    assert 0 < machine.available_memory() < 1 << 63


def test_available_memory_knows_the_limit_of_a_container(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = machine.available_memory()
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    (tmp_path / "meminfo").write_text(Path("/proc/meminfo").read_text())
    monkeypatch.setattr(machine, "PROC", tmp_path)
    monkeypatch.setattr(machine, "SYS", tmp_path)
    tmp_path = tmp_path / "fs" / "cgroup"
    tmp_path.mkdir(parents=True)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert machine.available_memory() == pytest.approx(free, rel=0.5)
    (tmp_path / "memory.max").write_text("5000000\n")
    assert machine.available_memory() == 4_000_000
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 300000\nactive_file 200000\nslab 1\n")
    assert machine.available_memory() == 4_500_000
    (tmp_path / "memory.current").write_text("9000000\n")
    assert machine.available_memory() == 0


def test_peak_memory_is_at_least_what_is_in_use() -> None:
    block = np.ones(3_000_000)
    assert machine.peak_memory() > block.nbytes
