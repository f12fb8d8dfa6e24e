"""Reading a text that comes in pieces, so that it does not matter how it was cut."""

import re
from collections.abc import Generator
from typing import TypeVar

_T = TypeVar("_T")
Step = Generator[None, None, _T]  # reads: yields when there is no text left, returns what it found


class Reader:
    """The text at hand, and steps that consume it. Whenever a step yields, all of it is consumed.

    `_raw`, where it is a list, gets all that is read.
    """

    def __init__(self) -> None:
        self._text, self._at, self._ended = "", 0, False
        self._raw: list[str] | None = None

    def _more(self) -> Step[bool]:
        """Wait for text; False if there is no more."""
        while self._at == len(self._text):
            if self._ended:
                return False
            yield
        return True

    def _peek(self) -> Step[str]:
        """The next character; "" at the end of the text."""
        return self._text[self._at] if (yield from self._more()) else ""

    def _take(self) -> Step[str]:
        return self._consumed(self._at + 1) if (yield from self._more()) else ""

    def _some(self, pattern: re.Pattern[str]) -> Step[str]:
        """What fits the pattern, one or more characters of a kind, in the text at hand; "" if nothing does."""
        match = pattern.match(self._text, self._at) if (yield from self._more()) else None
        return self._consumed(match.end()) if match else ""

    def _all(self, pattern: re.Pattern[str]) -> Step[str]:
        """All that fits the pattern."""
        pieces = []
        while piece := (yield from self._some(pattern)):
            pieces.append(piece)
        return "".join(pieces)

    def _word(self, *words: str) -> Step[str]:
        """The one of these words that comes next; "" and nothing is consumed if none does."""
        seen = ""
        while (yield from self._more()):
            longer = seen + self._text[self._at]
            if not any(word.startswith(longer) for word in words):
                break
            self._at += 1
            if longer in words:
                if self._raw is not None:
                    self._raw.append(longer)
                return longer
            seen = longer
        self._unread(seen)
        return ""

    def _unread(self, text: str) -> None:
        if self._at >= len(text):
            self._at -= len(text)
        else:  # it began in an earlier piece
            self._text, self._at = text + self._text[self._at :], 0

    def _consumed(self, end: int) -> str:
        piece, self._at = self._text[self._at : end], end
        if self._raw is not None:
            self._raw.append(piece)
        return piece
