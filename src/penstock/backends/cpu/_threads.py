"""How many threads the kernels use, one kernel at a time.

Parallel kernels run one at a time: each takes all threads, and Numba's fallback thread pool dies when two start at
once.
"""

import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numba

from penstock.errors import InvalidArgument
from penstock.machine import physical_cores
from penstock.settings import Settings

# Between two kernels OpenMP's threads wait in a loop, for milliseconds; on processors that others want too, the thread
# that all others wait for then gets no time. A thousand turns are about 20 us. Decoding the demo model beside one busy
# process on 2 processors: 3 tokens/s with the library's default, 160 with this; alone 285 and 240.
_TURNS_IN_COMPANY = "1000"

_lock = threading.Lock()
_count: int | None = None
_started = False  # OpenMP has read its settings
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
    global _started
    count = threads()
    with _lock:
        if getattr(_here, "count", None) != count:
            if not _started:
                _wait_politely(count)
                _started = True
            numba.set_num_threads(count)
            _here.count = count
        return kernel(*args)


def _wait_politely(count: int) -> None:
    """Before OpenMP starts its threads: let them sleep soon if other processes want the processors now.

    What the user has said of it (OMP_WAIT_POLICY, GOMP_SPINCOUNT) counts.
    """
    if "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        return
    waiting = []
    for _ in range(5):
        try:
            waiting.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]))
        except (OSError, ValueError, IndexError):
            return
        time.sleep(0.002)
    others = statistics.median(waiting) - 1
    if others + count > (os.cpu_count() or 1):
        os.environ["GOMP_SPINCOUNT"] = _TURNS_IN_COMPANY
