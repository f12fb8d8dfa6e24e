"""How fast experts come from pinned host memory to the GPU: the yardstick of `penstock plan`."""

from __future__ import annotations

_BYTES = 256 << 20


def link_rate(nbytes: int = _BYTES) -> float | None:
    """GB/s of a copy of `nbytes` from pinned host memory, the best of five; None where there is no room for it."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 2 * nbytes:
        return None
    try:
        source = torch.empty(nbytes // 4, dtype=torch.int32, pin_memory=True).fill_(1)
    except RuntimeError:  # the system lets no more memory be pinned
        return None
    target = torch.empty_like(source, device="cuda")
    times = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return nbytes / min(times) / 1e6
