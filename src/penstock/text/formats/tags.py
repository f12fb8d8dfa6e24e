"""Arguments of calls as text between tags: how they are written, and the steps that read them."""

import re
from collections.abc import Mapping
from typing import Any

from penstock.text.formats.arguments import escaped, resolved, string_choices, typed
from penstock.text.formats.base import SPACE
from penstock.text.formats.json_parser import JsonParser
from penstock.text.formats.reader import Step
from penstock.text.lark import Lark, literal

NO_TAG = re.compile(r"[^<]+")


def write_value(lark: Lark, schema: Any, root: Mapping[str, Any], strict: bool, end: str) -> str:
    """The rule for a value and the marker behind it. Strings are free text, unless they are enumerated."""
    found = resolved(schema, root)
    if choices := string_choices(found):
        return f"({' | '.join(map(literal, choices))}) {lark.mark(end)}"
    if found.get("type") in ("integer", "number", "boolean", "null", "object", "array"):
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"{lark.json({**definitions, **found}, lenient=not strict)} {lark.mark(end)}"
    return lark.until(end)


class TagParser(JsonParser):
    """Reads values between tags. The end of the call ends them too, since models forget tags."""

    def _tagged(self, types: frozenset[str], end: str, following: str) -> Step[str]:
        """A value up to `end` and what stands behind it: returns `following` or the end of the call, "" where the text
        is over. Strings go out as they come, others when they are whole; an `end` with other text behind it is text.
        """
        plain = types <= {"string"}
        pieces: list[str] = []
        if plain:
            self._argue('"')
        while (yield from self._more()):
            text = yield from self._some(NO_TAG)
            if not text:
                self._raw = []
                mark = yield from self._value_end(end, following)
                text, self._raw = "".join(self._raw), None
                if mark is not None:
                    self._argue('"' if plain else typed("".join(pieces), types))
                    return mark
            if plain:
                self._argue(escaped(text))
            else:
                pieces.append(text)
        return ""

    def _value_end(self, end: str, following: str) -> Step[str | None]:
        """At a <: what stands behind the value, None if it goes on."""
        mark = yield from self._word(end, self._close)
        if mark == end:
            yield from self._all(SPACE)
            mark = yield from self._word(following, self._close)
            return mark if mark or not (yield from self._more()) else None
        if not mark:
            yield from self._take()
        return mark or None
