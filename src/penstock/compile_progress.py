"""How long this process has been compiling kernels, and what a user sees of it: how far it is (`progress`), or, where
that cannot be shown, a line every few seconds.

Kernels are compiled once per machine, in the middle of whatever needs them first. Speeds are measured with `clock`,
which stands still meanwhile.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from penstock import progress

LINE_SECONDS = 3.0  # between two lines where stderr is no terminal
_SHOWN_AFTER = 0.3  # seconds from which on a terminal shows it

_lock = threading.RLock()
_active = 0
_began = 0.0
_spent = 0.0
_counted: Callable[[], tuple[int, int]] | None = None
_status: progress.Line | None = None
_line_at = 0.0


def seconds() -> float:
    """Seconds for which kernels were compiled, or waited for, in this process."""
    with _lock:
        return _spent + (time.perf_counter() - _began if _active else 0.0)


def clock() -> float:
    """time.perf_counter() without the seconds for which kernels were compiled."""
    return time.perf_counter() - seconds()


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Around a compilation; several at once, or one inside of another, are one."""
    global _active, _began, _spent, _status, _line_at
    with _lock:
        _active += 1
        if _active == 1:
            _began = time.perf_counter()
            if _counted is None:
                _line_at = _began
    try:
        yield
    finally:
        with _lock:
            _active -= 1
            if not _active:
                _spent += time.perf_counter() - _began
                if _status is not None:
                    _status.stop()
                    _status = None


@contextlib.contextmanager
def counting(counted: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Around compilations whose number is known: `counted` gives how many are done, and of how many."""
    global _counted, _line_at
    with _lock:
        before, _counted, _line_at = _counted, counted, time.perf_counter()
    try:
        with compiling():
            yield
    finally:
        with _lock:
            _counted = before


def show(where: str, name: str = "") -> None:
    """Say that kernels are being compiled for `where` (this CPU, this GPU), which of them, and how many are done."""
    global _status, _line_at
    with _lock:
        now = time.perf_counter()
        parts, done, total = [name] if name else [], 0, 0
        if _counted is not None:
            done, total = _counted()
            parts.insert(0, f"{done} of {total}")
        text = f"compiling kernels for {where}, once: {', '.join(parts)}"
        if not progress.visible():
            if now - _line_at >= LINE_SECONDS and sys.stderr is not None:
                _line_at = now
                print(f"penstock: {text}", file=sys.stderr, flush=True)
        elif _status is not None:
            _status.update(text, done, total)
        elif now - _began >= _SHOWN_AFTER or _counted is not None:
            _status = progress.show(text)
