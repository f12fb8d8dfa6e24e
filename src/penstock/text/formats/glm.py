"""GLM-4.5 to 4.7: calls of a name and pairs of tags. 4.5 and 4.6 write each tag on a line, 4.7 no line breaks.

<tool_call>f
<arg_key>x</arg_key>
<arg_value>1</arg_value>
</tool_call>
"""

import json
from collections.abc import Mapping
from typing import Any

from penstock.text.formats.arguments import properties_of
from penstock.text.formats.base import NAME, SPACE, ChatFormat
from penstock.text.formats.reader import Step
from penstock.text.formats.tags import NO_TAG, TagParser, write_value
from penstock.text.lark import Lark, literal

_KEY = ("<arg_key>", "</arg_key>")
_VALUE = ("<arg_value>", "</arg_value>")


def _write_call(lark: Lark, name: str, parameters: Mapping[str, Any], strict: bool) -> str:
    """Parameters in the order of the schema, with line breaks or without."""
    line = lark.define("line", '"\\n"?')
    before, between, after = lark.mark(_KEY[0]), lark.mark(_KEY[1]), lark.mark(_VALUE[0])
    parts = [literal(name), line]
    for key, schema, required in properties_of(name, parameters):
        value = write_value(lark, schema, parameters, strict, _VALUE[1])
        pair = f"{before} {literal(key)} {between} {line} {after} {value} {line}"
        parts.append(pair if required else f"({pair})?")
    return " ".join(parts)


class GlmParser(TagParser):
    """Reads calls of tags, and those of JSON that models write now and then."""

    def _read_call(self, mark: str, known: bool) -> Step[None]:
        """A name, <arg_key>…</arg_key> and <arg_value>…</arg_value> in turn, and </tool_call>."""
        yield from self._all(SPACE)
        if (yield from self._word("{")):
            yield from self._json_call(known)
            return
        name = yield from self._all(NAME)
        yield from self._all(SPACE)
        mark = yield from self._word(_KEY[0], self._close)
        if not name or not mark or (known and name not in self._tools):
            return
        self._begin(name)
        types = self._tools.get(name, {})
        before = "{"
        while mark == _KEY[0]:
            self._raw = [mark]
            key = (yield from self._all(NO_TAG)).strip()
            if not key or not (yield from self._word(_KEY[1])):
                break
            yield from self._all(SPACE)
            if not (yield from self._word(_VALUE[0])):
                break
            self._raw = None
            self._argue(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            mark = yield from self._tagged(types.get(key, frozenset()), _VALUE[1], _KEY[0])
        raw, self._raw = "".join(self._raw or ()), None
        if mark == self._close:
            self._argue("}" if before == ", " else "{}")
            self.complete += 1
        elif (yield from self._more()):
            self._argue(raw)
            yield from self._broken()


GLM = ChatFormat(
    "glm",
    reasoning=("<think>", "</think>"),
    call=("<tool_call>", "</tool_call>"),
    inner=(*_KEY, *_VALUE),
    special=False,
    between="\n",
    template_signs=("<arg_key>", "<arg_value>"),
    write_call=_write_call,
    parser=GlmParser,
)
