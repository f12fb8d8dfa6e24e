"""How fast copies are on the GPU and from pinned host memory to it: the yardsticks of `penstock bench` and `plan`."""

from __future__ import annotations

from typing import Any


def copy_rate(nbytes: int = 1 << 30) -> float | None:
    """GB/s of a copy of `nbytes`, read plus written; None under the interpreter and where memory is short."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 3 * nbytes:
        return None
    source = torch.empty(nbytes // 4, dtype=torch.int32, device="cuda").random_()
    return 2 * nbytes / _milliseconds(torch.empty_like(source), source) / 1e6


def link_rate(nbytes: int = 256 << 20) -> float | None:
    """GB/s of a copy of `nbytes` from pinned host memory; None where there is no room for it."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 2 * nbytes:
        return None
    try:
        source = torch.empty(nbytes // 4, dtype=torch.int32, pin_memory=True).fill_(1)
    except RuntimeError:  # the system lets no more memory be pinned
        return None
    return nbytes / _milliseconds(torch.empty_like(source, device="cuda"), source) / 1e6


def _milliseconds(target: Any, source: Any) -> float:
    """Of a copy, the best of five."""
    import torch

    times = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return min(times)
