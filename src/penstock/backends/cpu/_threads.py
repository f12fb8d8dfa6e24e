"""How many threads the kernels use, and who may use them.

Parallel kernels run one at a time: each takes all threads, and Numba's fallback thread pool dies when two start at
once.
"""

import threading
from typing import Any

import numba

from penstock.backends.cpu.features import physical_cores
from penstock.errors import InvalidArgument
from penstock.settings import Settings

_lock = threading.Lock()
_count: int | None = None
_here = threading.local()  # Numba keeps the number of threads per calling thread


def available() -> int:
    """The most threads that kernels may use in this process."""
    return numba.config.NUMBA_NUM_THREADS


def threads() -> int:
    """The threads that parallel kernels use: as set, else PENSTOCK_THREADS, else the physical cores."""
    if _count is None:
        wanted = Settings.from_env().threads
        set_threads(min(physical_cores(), available()) if wanted is None else wanted)
    assert _count is not None
    return _count


def set_threads(count: int) -> None:
    """Let parallel kernels use `count` threads from their next call on. Raises InvalidArgument beyond what there is."""
    global _count
    if not 1 <= count <= available():
        raise InvalidArgument(f"threads is {count}, expected 1 to {available()} (processors this process may use)")
    _count = count


def run(kernel: Any, *args: Any) -> Any:
    """Call a parallel kernel."""
    count = threads()
    with _lock:
        if getattr(_here, "count", None) != count:
            numba.set_num_threads(count)
            _here.count = count
        return kernel(*args)
