"""Stop strings in a stream of text pieces, also where one begins in one piece and ends in another."""

from collections.abc import Sequence

from penstock.errors import DTypeError, InvalidArgument

MAX_STOPS = 64


class StopStrings:
    """Passes text on up to the earliest stop string, excluding it; text that may begin one is held back.

    The pieces that `add` and `finish` return, joined, are the text before the stop string that begins first; of two
    that begin at one place, the shorter one counts. How the text was cut into pieces does not matter. `stopped` is the
    stop string met, None before that. stops: a string or a sequence of at most 64, none empty; None or () for no stops.
    Raises DTypeError or InvalidArgument.
    """

    def __init__(self, stops: str | Sequence[str] | None = ()) -> None:
        self._stops = _checked(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopped: str | None = None

    def add(self, text: str) -> str:
        """Take the next piece; returns what is now known to stand before any stop string."""
        if not self._stops or self.stopped is not None:
            return "" if self._stops else text
        text = self._held + text
        met, stop = self._first_stop(text)
        begun = self._first_beginning(text)
        if stop is not None and met <= begun:
            return self._end_at(met, stop, text)
        self._held = text[begun:]
        return text[:begun]

    def finish(self) -> str:
        """The text has ended: returns what was held back, up to a stop string in it."""
        text, self._held = self._held, ""
        met, stop = self._first_stop(text)
        return text if stop is None else self._end_at(met, stop, text)

    def _end_at(self, met: int, stop: str, text: str) -> str:
        self.stopped, self._held = stop, ""
        return text[:met]

    def _first_stop(self, text: str) -> tuple[int, str | None]:
        found = [(at, len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        at, _, stop = min(found, default=(len(text), 0, None))
        return at, stop

    def _first_beginning(self, text: str) -> int:
        """Where the earliest stop string that the text may still complete begins; the text's length if none does."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return len(text)


def _checked(stops: str | Sequence[str] | None) -> tuple[str, ...]:
    if stops is None:
        return ()
    if isinstance(stops, str):
        stops = (stops,)
    if not isinstance(stops, Sequence) or isinstance(stops, bytes | bytearray):
        raise DTypeError(f"stop is a {type(stops).__name__}, expected a string or a sequence of strings")
    if len(stops) > MAX_STOPS:
        raise InvalidArgument(f"stop has {len(stops)} strings, expected at most {MAX_STOPS}")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise DTypeError(f"stop[{i}] is a {type(stop).__name__}, expected a string")
        if not stop:
            raise InvalidArgument(f"stop[{i}] is empty, expected at least one character")
    return tuple(dict.fromkeys(stops))
