"""Mistral's models (Small 3.2, Ministral 3, Small 4): a name and JSON behind special tokens, with no end of their own.

[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}. Small 3.2 has [CALL_ID] and an id before [ARGS]; older models write a
list of JSON objects, [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}], which is read too.
"""

import re
from collections.abc import Mapping
from typing import Any

from penstock.text.formats.base import SPACE, ChatFormat
from penstock.text.formats.json_parser import CUT, JsonParser
from penstock.text.formats.reader import Step
from penstock.text.lark import Lark, arguments, literal

_SEPARATOR, _ID = "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[^\s<>{}\[\]\"'`]+")


def _call_id(_name: str, number: int) -> str:
    """Nine characters, which chat templates insist on."""
    return f"{number:09}"


def _write_call(lark: Lark, name: str, parameters: Mapping[str, Any], strict: bool) -> str:
    return f"{literal(name)} {lark.mark(_SEPARATOR)} {arguments(lark, parameters, strict)}"


class MistralParser(JsonParser):
    """Reads calls of a name and JSON, with and without ids, and lists of JSON objects."""

    text = re.compile(r"(?:[^\[]+|\[(?=[^ACT/]))+")

    def _read_call(self, mark: str, known: bool) -> Step[None]:
        """A name, perhaps an id, [ARGS] and JSON; behind that the next call, perhaps."""
        while mark:
            yield from self._all(SPACE)
            if (yield from self._word("[")):
                yield from self._listed(known)
                return
            name = yield from self._all(_NAME)
            yield from self._all(SPACE)
            if name and (yield from self._word(_ID)):
                yield from self._all(_NAME)
                yield from self._all(SPACE)
            if not name or (known and name not in self._tools) or not (yield from self._word(_SEPARATOR)):
                return
            yield from self._all(SPACE)
            if (yield from self._peek()) != "{":
                return
            self._begin(name)
            if (yield from self._value(self._argue)) == CUT:
                return
            self.complete += 1
            yield from self._all(SPACE)
            self._raw = []
            mark = yield from self._word(self._open)
        self._raw = None

    def _listed(self, known: bool) -> Step[None]:
        """Calls of JSON up to the end of their list."""
        yield from self._all(SPACE)
        while (yield from self._word("{")):
            before = self.calls
            yield from self._json_call(known)
            if self.calls == before or self.complete < self.calls:
                return
            yield from self._all(SPACE)
            self._raw = []
            if not (yield from self._word(",")):
                yield from self._word("]")
                self._raw = None
                return
            yield from self._all(SPACE)


class MistralFormat(ChatFormat):
    """Models that reason do so or not: chat templates know no efforts between."""

    def effort(self, effort: str) -> dict[str, Any]:
        return {"reasoning_effort": "none" if effort in ("none", "minimal") else "high"}


MISTRAL = MistralFormat(
    "mistral",
    reasoning=("[THINK]", "[/THINK]"),
    call=("[TOOL_CALLS]", ""),
    separator=_SEPARATOR,
    inner=(_ID,),
    call_ids=_call_id,
    signs=(_SEPARATOR,),
    write_call=_write_call,
    parser=MistralParser,
)
