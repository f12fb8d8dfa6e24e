"""DeepSeek's models: lists of calls between special tokens, the arguments in JSON.

V3 and R1: <｜tool▁call▁begin｜>function<｜tool▁sep｜>f and the arguments as a JSON code block, <｜tool▁call▁end｜>
V3.1: <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.text.formats.base import NAME, SPACE, ChatFormat
from penstock.text.formats.json_parser import CLOSED, CUT, JsonParser
from penstock.text.formats.reader import Step
from penstock.text.lark import Lark, arguments, literal

_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"
_SPACE_FENCE = re.compile(r"[\s}`]+")


def _write_call(lark: Lark, name: str, parameters: Mapping[str, Any], strict: bool) -> str:
    separator, values = lark.mark(_SEPARATOR), arguments(lark, parameters, strict)
    return f"{literal(name)} {separator} {values}"


def _write_fenced_call(lark: Lark, name: str, parameters: Mapping[str, Any], strict: bool) -> str:
    separator, values = lark.mark(_SEPARATOR), arguments(lark, parameters, strict)
    before, after = literal(f"{name}\n```json\n"), literal("\n```")
    return f'"function" {separator} {before} {values} {after}'


class DeepSeekParser(JsonParser):
    """Reads calls with and without a code block, whichever of both formats the model has."""

    def _name_of(self, written: str) -> str:
        """The name of a tool, as a call has it."""
        return written

    def _read_call(self, mark: str, known: bool) -> Step[None]:
        """A list of calls: name, separator and JSON, or "function", separator, name and JSON between fences."""
        lists = self._format.calls or ("", "")
        if mark == lists[0]:
            yield from self._all(SPACE)
            mark = yield from self._word(self._open)
        while mark == self._open:
            yield from self._all(SPACE)
            name = yield from self._all(NAME)
            yield from self._all(SPACE)
            if not (yield from self._word(self._format.separator)):
                return
            yield from self._all(SPACE)
            second = yield from self._all(NAME)
            yield from self._all(SPACE)
            if (yield from self._word("```")):
                yield from self._word("json")
                yield from self._all(SPACE)
            name = self._name_of(second or name)
            if not name or (yield from self._peek()) != "{":
                return
            self._begin(name)
            ended = yield from self._value(self._argue)
            if ended == CUT:
                return
            if ended == CLOSED:
                self.complete += 1
            else:
                yield from self._finish(_SPACE_FENCE)
            yield from self._all(SPACE)
            self._raw = []
            mark = yield from self._word(self._open, lists[1])
            if mark != self._open:
                self._raw = None


DEEPSEEK_V3_1 = ChatFormat(
    "deepseek-v3.1",
    reasoning=("<think>", "</think>"),
    call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    calls=_CALLS,
    separator=_SEPARATOR,
    arguments_as_text=True,
    signs=(_SEPARATOR,),
    write_call=_write_call,
    parser=DeepSeekParser,
)
DEEPSEEK_V3 = replace(DEEPSEEK_V3_1, name="deepseek-v3", template_signs=("```json",), write_call=_write_fenced_call)
