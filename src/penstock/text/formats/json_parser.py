"""JSON inside tool calls: values of arguments, and calls that are one JSON object."""

import json
import re
from collections.abc import Callable

from penstock.text.formats.arguments import escaped
from penstock.text.formats.base import SPACE, Parser
from penstock.text.formats.reader import Step

_JSON_TEXT = re.compile(r"[^\"\\<\x00-\x1f]+")  # inside a string
_JSON_REST = re.compile(r"[^\"{}\[\]<]+")  # of an object or array, between its strings
_JSON_SCALAR = re.compile(r"[^\s,{}\[\]<\"]+")

CUT, CLOSED, WHOLE = range(3)  # a value ended: with the text, by the marker that ends the call, as it should


class JsonParser(Parser):
    """The steps that read JSON."""

    def _string(self) -> Step[str | None]:
        """A JSON string, decoded; None if what comes is none."""
        pieces: list[str] = []
        if not (yield from self._word('"')) or (yield from self._quoted(pieces.append)) != WHOLE:
            return None
        try:
            return json.loads('"' + "".join(pieces))
        except ValueError:
            return None

    def _quoted(self, put: Callable[[str], None]) -> Step[int]:
        """The rest of a JSON string behind its first quotation mark, with line breaks and the like escaped.

        A marker that ends the call counts inside a string if it is a special token or stands on a new line, which no
        JSON string can have.
        """
        new_line = False
        while character := (yield from self._peek()):
            if text := (yield from self._some(_JSON_TEXT)):
                put(text)
                new_line = new_line and text.isspace()
            elif character == "<":
                if (self._format.special or new_line) and (yield from self._word(self._close)):
                    return CLOSED
                put((yield from self._take()))
                new_line = False
            else:
                yield from self._take()
                if character < " ":
                    put(escaped(character))
                    new_line |= character == "\n"
                    continue
                put(character)
                if character == '"':
                    return WHOLE
                put((yield from self._take()))  # behind a backslash
                new_line = False
        return CUT

    def _value(self, put: Callable[[str], None]) -> Step[int]:
        """A JSON value. Only what is needed to find its end is looked at."""
        depth = 0
        while character := (yield from self._peek()):
            if character == "<":
                if (yield from self._word(self._close)):
                    return CLOSED
                if not depth:
                    return WHOLE
                put((yield from self._take()))
            elif character == '"':
                put((yield from self._take()))
                ended = yield from self._quoted(put)
                if ended != WHOLE or not depth:
                    return ended
            elif character in "{[":
                put((yield from self._take()))
                depth += 1
            elif character in "}]":
                if depth:
                    put((yield from self._take()))
                    depth -= 1
                if not depth:
                    return WHOLE
            elif depth:
                put((yield from self._some(_JSON_REST)))
            else:
                put((yield from self._all(_JSON_SCALAR)))
                return WHOLE
        return CUT

    def _json_call(self, known: bool) -> Step[None]:
        name: str | None = None
        arguments: list[str] | None = None
        began = False
        while True:
            yield from self._all(SPACE)
            key = yield from self._string()
            yield from self._all(SPACE)
            if key is None or not (yield from self._word(":")):
                break
            yield from self._all(SPACE)
            ended = WHOLE
            if key == "name" and name is None:
                name = yield from self._string()
                if not name or (known and name not in self._tools):
                    return
                if arguments is not None:
                    self._begin(name)
                    self._argue("".join(arguments))
            elif key in ("arguments", "parameters") and arguments is None:
                arguments = []
                if name is not None:
                    self._begin(name)
                ended = yield from self._object(arguments.append if name is None else self._argue)
            else:
                ended = yield from self._value(lambda _: None)
            began = name is not None and arguments is not None
            if ended != WHOLE:
                if began:
                    self._raw = None
                    self.complete += ended == CLOSED
                return
            if began:
                self._raw = []
            yield from self._all(SPACE)
            if not (yield from self._word(",")):
                break
        closed = yield from self._word("}")
        if name is not None and closed and not began:
            self._begin(name)
            self._argue("{}")
            began = True
        if began and closed:
            self._raw = None
            yield from self._finish()
        elif began:
            self.complete += 1
            if (yield from self._word(self._close)) or not (yield from self._more()):
                self._raw = None

    def _object(self, put: Callable[[str], None]) -> Step[int]:
        """The value of arguments: an object, the text of one in a string, or null."""
        if (yield from self._peek()) == "{":
            return (yield from self._value(put))
        pieces: list[str] = []
        ended = yield from self._value(pieces.append)
        text = "".join(pieces)
        if text == "null":
            text = "{}"
        elif text.startswith('"') and ended == WHOLE:
            try:
                inner = json.loads(text)
            except ValueError:
                inner = ""
            text = inner if inner.lstrip().startswith("{") else text
        put(text)
        return ended
