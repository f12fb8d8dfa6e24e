"""How far a long piece of work is, where someone can see it: a line on a terminal, a bar below a notebook's cell.

Elsewhere nothing is shown: a script whose stderr is a file or a pipe prints nothing of its own accord.
"""

from __future__ import annotations

import contextlib
import html
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

_EVERY = 0.1  # seconds between two changes of what a notebook shows


class Line(Protocol):
    """What is shown now."""

    def update(self, text: str, done: float = 0, total: float = 0) -> None:
        """Show this text, and how much of the total is done, if that is known."""
        ...

    def stop(self) -> None:
        """Take it away."""
        ...


def on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. IPython is not imported for the answer."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def visible() -> bool:
    """Whether progress can be shown at all."""
    return on_terminal() or in_notebook()


def show(text: str) -> Line:
    """Begin to show something; only where `visible`."""
    return _CellLine(text) if in_notebook() else _TerminalLine(text)


@contextlib.contextmanager
def notebook_bar(text: str, after: float = 0.5) -> Iterator[Callable[[float, float], None]]:
    """A bar in a notebook while the block takes longer than `after` seconds; elsewhere nothing.

    The block gets a function `report(done, total)`.
    """
    if not in_notebook():
        yield lambda done, total: None
        return
    line: Line | None = None
    begin = time.monotonic()

    def report(done: float, total: float) -> None:
        nonlocal line
        if line is None and time.monotonic() - begin >= after:
            line = show(text)
        if line is not None:
            line.update(text, done, total)

    try:
        yield report
    finally:
        if line is not None:
            line.stop()


class _TerminalLine:
    """A line with a spinner on stderr."""

    def __init__(self, text: str) -> None:
        from rich.console import Console

        self._status = Console(stderr=True).status(text)
        self._status.start()

    def update(self, text: str, done: float = 0, total: float = 0) -> None:
        self._status.update(text)

    def stop(self) -> None:
        self._status.stop()


class _CellLine:
    """Text and bar in the output of the cell that runs, written over as they change: no widgets are needed.

    A cell has one such place, however many lines come one after the other.
    """

    _places: ClassVar[dict[int, Any]] = {}  # of the cell that ran last, by its number

    def __init__(self, text: str) -> None:
        from IPython import get_ipython  # type: ignore[import-not-found]
        from IPython.display import display  # type: ignore[import-not-found]

        cell = int(get_ipython().execution_count)
        bundle = _bundle(text, 0, 0)
        if cell in self._places:
            self._places[cell].update(bundle, raw=True)
        else:
            self._places.clear()
            self._places[cell] = display(bundle, raw=True, display_id=True)
        self._handle, self._shown = self._places[cell], time.monotonic()

    def update(self, text: str, done: float = 0, total: float = 0) -> None:
        now = time.monotonic()
        if now - self._shown >= _EVERY:
            self._shown = now
            self._handle.update(_bundle(text, done, total), raw=True)

    def stop(self) -> None:
        self._handle.update({"text/plain": "", "text/html": ""}, raw=True)


def _bundle(text: str, done: float, total: float) -> dict[str, str]:
    """As plain text, and as HTML with a bar."""
    share = f" {min(1.0, done / total):.0%}" if total else ""
    value = f' value="{done:g}" max="{total:g}"' if total else ""
    return {"text/plain": f"{text}{share}", "text/html": f"<progress{value}></progress> {html.escape(text)}{share}"}
