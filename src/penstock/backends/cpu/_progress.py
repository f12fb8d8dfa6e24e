"""A line on the terminal, or in a notebook, while kernels are compiled: once per machine, a second or two each."""

import contextlib
import threading
from collections.abc import Iterator

from penstock import progress

_lock = threading.RLock()
_depth = 0
_line: progress.Line | None = None


@contextlib.contextmanager
def compiling() -> Iterator[bool]:
    """Around a compilation that may turn out to be a read from the cache; nested ones share the line and get False."""
    global _depth, _line
    with _lock:
        _depth += 1
        outermost = _depth == 1
    try:
        yield outermost
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _line is not None:
                _line.stop()
                _line = None


def show(name: str) -> None:
    """Name the kernel that is being compiled, where that can be seen; its parts go without saying."""
    global _line
    if _depth != 1 or not progress.visible():
        return
    text = f"compiling kernels for this CPU, once: {name}"
    with _lock:
        if _line is None:
            _line = progress.show(text)
        else:
            _line.update(text)
