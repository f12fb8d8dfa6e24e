"""What the operating system knows of this machine and lets this process have: memory, cores."""

from __future__ import annotations

import math
import os
import platform
import sys
from pathlib import Path, PurePosixPath

PROC = Path("/proc")
SYS = Path("/sys")

_memory_limit: int | None = None  # bytes, of this process


def cpu_model() -> str:
    """The name of the CPU, or of its architecture where the system does not tell."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def usable_threads() -> int:
    """Hardware threads this process may run on."""
    return min(len(_allowed_cpus()), _cpu_quota())


def physical_cores() -> int:
    """Physical cores this process may run on: hardware threads that share a core count once."""
    return min(len(cores()), _cpu_quota())


def cores() -> list[list[int]]:
    """Hardware threads this process may run on, those of a physical core together, cores of a socket side by side."""
    found: dict[tuple[int, str], list[int]] = {}
    for cpu in sorted(_allowed_cpus()):
        topology = SYS / f"devices/system/cpu/cpu{cpu}/topology"
        socket = _read(topology / "physical_package_id")
        siblings = _read(topology / "thread_siblings_list") or str(cpu)
        found.setdefault((int(socket) if socket.isdigit() else 0, siblings), []).append(cpu)
    return [found[key] for key in sorted(found, key=lambda key: (key[0], found[key]))]


def limit_memory(nbytes: int) -> None:
    """Let `memory` tell of so many bytes at most, of which what this process has allocated is used."""
    global _memory_limit
    _memory_limit = nbytes


def memory(reclaim: bool = False) -> tuple[int, int]:
    """Bytes of memory this process may use, and how much of it is free now; zeros where the system does not tell.

    With `reclaim` page cache that a control group counts as used, and could drop, is free.
    """
    sizes = {}
    for line in _read(PROC / "meminfo").splitlines():
        name, _, value = line.partition(":")
        sizes[name] = int(value.split()[0]) * 1024
    total, free = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    for group in _control_groups("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit_bytes, used_bytes = _read(group / limit), _read(group / used)
            if limit_bytes.isdigit() and used_bytes.isdigit():
                total = min(total, int(limit_bytes))
                cached = _page_cache(group) if reclaim else 0
                free = min(free, max(0, int(limit_bytes) - int(used_bytes) + cached))
    if _memory_limit is not None and total:
        total, free = min(total, _memory_limit), min(free, max(0, _memory_limit - _allocated()))
    return total, free


def available_memory() -> int:
    """Bytes that can be allocated without swapping: what the system reports, or less inside a limited container."""
    total, free = memory(reclaim=True)
    return free if total else 1 << 62  # the system does not tell: let the allocator decide


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes (0 where the system does not tell)."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _allocated() -> int:
    """Bytes of this process's memory that are no pages of files."""
    fields = (line.partition(":") for line in _read(PROC / "self/status").splitlines())
    return sum(int(size.split()[0]) * 1024 for name, _, size in fields if name in ("RssAnon", "RssShmem"))


def _page_cache(group: Path) -> int:
    """Bytes of files that a control group keeps in memory."""
    lines = _read(group / "memory.stat").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))


def _read(path: Path) -> str:
    """A small system file without the newline at its end; empty if there is none or it may not be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    first = _read(PROC / "cpuinfo").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_flags() -> frozenset[str]:
    """Instruction sets that the system lists; whether they work is another question (backends/cpu/features.py)."""
    info = _cpuinfo()
    return frozenset((info.get("flags") or info.get("Features", "")).split())


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _control_groups(controller: str) -> list[Path]:
    """The control group of this process and all above it, in version 2 or 1."""
    groups: list[Path] = []
    for line in _read(PROC / "self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = SYS / "fs/cgroup" / (controller if controllers else "")
        path = PurePosixPath(name.lstrip("/"))
        groups += (root / part for part in (path, *path.parents))
    return groups


def _cpu_quota() -> int:
    """CPUs' worth of time that the control groups grant, rounded up; a large number if there is no limit."""
    granted = [math.inf]
    for group in _control_groups("cpu"):
        limit = _read(group / "cpu.max").split() or [
            _read(group / "cpu.cfs_quota_us"),
            _read(group / "cpu.cfs_period_us"),
        ]
        if len(limit) == 2 and limit[0].isdigit() and limit[1].isdigit():
            granted.append(int(limit[0]) / int(limit[1]))
    least = min(granted)
    return sys.maxsize if least == math.inf else max(1, math.ceil(least))
