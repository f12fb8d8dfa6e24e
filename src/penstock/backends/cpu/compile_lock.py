"""Two processes compile one model's kernels side by side: which one compiles which.

Numba compiles one kernel at a time per process, and most of that is Python. A helper (`engine/compile_ahead.py`) has
the same list of kernels as this one; a kernel that one of them is compiling is locked by a file beside its place in the
cache. The helper skips locked kernels and goes on to the next one; the first process waits for the helper's result. A
lock whose process has died, or that is old, does not count.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock import compile_progress

_OLD = 60.0  # seconds after which a lock is not waited for
_POLL_SECONDS = 0.02

helping = False  # this process is a helper
helper: Any = None  # the helper's process, if this one has started one


class LockedElsewhere(Exception):
    """Another process is compiling this kernel: raised in a helper only."""


def alone() -> bool:
    """Whether no second process is at work."""
    return not helping and helper is None


@contextlib.contextmanager
def hold(file: Path) -> Iterator[None]:
    """Around the compilation of a kernel into its file. Does nothing unless two processes are at work."""
    if alone():
        yield
        return
    lock = file.with_suffix(".lock")
    mine = not file.exists() and _take(lock)
    try:
        if not mine and not file.exists():
            if helping:
                raise LockedElsewhere
            _wait(file, lock)
        yield
    finally:
        if mine:
            with contextlib.suppress(OSError):
                lock.unlink()


def _take(lock: Path) -> bool:
    try:
        with open(lock, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            out.write(str(os.getpid()))
        return True
    except FileExistsError:
        return False
    except OSError:  # a folder that cannot be written: each process compiles for itself
        return True


def _wait(file: Path, lock: Path) -> None:
    """Until the machine code is there, or no process is working on it any more."""
    end = time.monotonic() + _OLD
    while not file.exists() and lock.exists() and time.monotonic() < end:
        if helper is not None and helper.poll() is not None:
            return
        compile_progress.show("this CPU")
        time.sleep(_POLL_SECONDS)
