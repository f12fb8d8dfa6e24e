"""How much memory this process may still take, and how much it took at most."""

from __future__ import annotations

import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can be allocated without swapping: what the system reports, or less inside a limited container."""
    free = _meminfo("MemAvailable")
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        most, used = _number(_CGROUP / limit), _number(_CGROUP / usage)
        if most is not None and used is not None:
            cached = _reclaimable()
            free = min(free, max(0, most - used + cached))
    return free


def _meminfo(key: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62  # not Linux: let the allocator decide


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _reclaimable() -> int:
    """Page cache that counts as used in a container but can be dropped."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes (0 where the system does not tell)."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
