"""How much memory this process may still take, and how much it took at most."""

from __future__ import annotations

import sys

from penstock.backends.cpu import features


def available_memory() -> int:
    """Bytes that can be allocated without swapping: what the system reports, or less inside a limited container."""
    total, free = features.memory(reclaim=True)
    return free if total else 1 << 62  # the system does not tell: let the allocator decide


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes (0 where the system does not tell)."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
