"""MiniMax-M2: lists of calls of tags, each parameter as the text between two of them.

<minimax:tool_call>
<invoke name="f">
<parameter name="x">1</parameter>
</invoke>
</minimax:tool_call>
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.text.formats.arguments import properties_of
from penstock.text.formats.base import NAME, SPACE, ChatFormat
from penstock.text.formats.reader import Step
from penstock.text.formats.tags import TagParser, write_value
from penstock.text.lark import Lark, literal

_CALLS = ("<minimax:tool_call>", "</minimax:tool_call>")
_PARAMETER = ("<parameter name=", "</parameter>")
_KEY = re.compile(r"[^<>\n\"']+")


def _write_call(lark: Lark, name: str, parameters: Mapping[str, Any], strict: bool) -> str:
    """Parameters in the order of the schema, with line breaks or without."""
    line = lark.define("line", '"\\n"?')
    parts = [literal(f'"{name}">'), line]
    for key, schema, required in properties_of(name, parameters):
        value = write_value(lark, schema, parameters, strict, _PARAMETER[1])
        begin = literal(f'{_PARAMETER[0]}"{key}">')
        pair = f"{begin} {value} {line}"
        parts.append(pair if required else f"({pair})?")
    return " ".join(parts)


class MiniMaxParser(TagParser):
    """Reads calls with their names in quotes or without, inside a list or alone."""

    def _read_call(self, mark: str, known: bool) -> Step[None]:
        """<invoke name="…">, parameters and </invoke>, several of them perhaps, and the end of the list."""
        if mark == _CALLS[0]:
            yield from self._all(SPACE)
            mark = yield from self._word(self._open)
        while mark == self._open:
            name = yield from self._quoted_name(NAME)
            if not name or (known and name not in self._tools):
                return
            self._begin(name)
            if not (yield from self._parameters(self._tools.get(name, {}))):
                return
            yield from self._all(SPACE)
            self._raw = []
            mark = yield from self._word(self._open, _CALLS[1])
            if mark != self._open:
                self._raw = None

    def _quoted_name(self, pattern: re.Pattern[str]) -> Step[str]:
        """A name and the > behind it; "" if what comes is none."""
        quote = yield from self._word('"', "'")
        name = (yield from self._all(pattern)).strip()
        if quote and not (yield from self._word(quote)):
            return ""
        return name if (yield from self._word(">")) else ""

    def _parameters(self, types: Mapping[str, frozenset[str]]) -> Step[bool]:
        """What follows the name of a call, up to its end; False at the end of the text."""
        before = "{"
        self._raw = []
        yield from self._all(SPACE)
        mark = yield from self._word(_PARAMETER[0], self._close)
        while mark == _PARAMETER[0]:
            key = yield from self._quoted_name(_KEY)
            if not key:
                break
            self._raw = None
            self._argue(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            mark = yield from self._tagged(types.get(key, frozenset()), _PARAMETER[1], _PARAMETER[0])
            self._raw = [mark]
        raw, self._raw = "".join(self._raw), None
        if mark == self._close:
            self._argue("}" if before == ", " else "{}")
            self.complete += 1
            return True
        if (yield from self._more()):
            self._argue(raw)
            yield from self._broken()
        return (yield from self._more())


MINIMAX = ChatFormat(
    "minimax",
    reasoning=("<think>", "</think>"),
    call=("<invoke name=", "</invoke>"),
    calls=_CALLS,
    between="\n",
    signs=(_CALLS[0],),
    write_call=_write_call,
    parser=MiniMaxParser,
)
