"""Two processes compile one model's kernels side by side: who compiles which.

Numba compiles one kernel at a time per process, and most of that is Python. A helper process (`engine/ahead.py`) runs
the same step as this one; a kernel that one of them is compiling has a claim, a file beside its place in the cache. The
helper skips what is claimed and goes on to the next kernel; the process that wants an answer waits for the helper's.
A claim whose process has died, or that grows old, counts for nothing.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OLD = 60.0  # seconds after which nobody waits for a claim
_STEP = 0.02

helping = False  # this process is a helper
helper: Any = None  # the helper's process, if this one has started one


class Claimed(Exception):
    """Somebody else is compiling this kernel: raised in a helper only."""


@contextlib.contextmanager
def hold(kernel: Any, sig: Any) -> Iterator[None]:
    """Around the compilation of a kernel. Does nothing unless two processes are at work."""
    if not helping and helper is None:
        yield
        return
    file: Path = kernel._cache.file(sig, kernel.targetctx.codegen())
    claim = file.with_suffix(".claim")
    mine = not file.exists() and _take(claim)
    try:
        if not mine and not file.exists():
            if helping:
                raise Claimed
            _wait(file, claim)
        yield
    finally:
        if mine:
            with contextlib.suppress(OSError):
                claim.unlink()


def _take(claim: Path) -> bool:
    try:
        with open(claim, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            out.write(str(os.getpid()))
        return True
    except FileExistsError:
        return False
    except OSError:  # a folder that cannot be written: everybody compiles for himself
        return True


def _wait(file: Path, claim: Path) -> None:
    """Until the machine code is there, or nobody is working on it any more."""
    end = time.monotonic() + _OLD
    while not file.exists() and claim.exists() and time.monotonic() < end:
        if helper is not None and helper.poll() is not None:
            return
        time.sleep(_STEP)
