"""Qwen3-Coder, Qwen3.5 and Qwen3.6: calls of tags, each parameter as the text between two of them.

<tool_call>
<function=f>
<parameter=x>
1
</parameter>
</function>
</tool_call>
"""

import json
import re
from collections.abc import Mapping, Set
from typing import Any

from penstock.text.formats.arguments import escaped, properties_of, typed
from penstock.text.formats.base import NAME, NO_MARK, SPACE, ChatFormat
from penstock.text.formats.json_parser import JsonParser
from penstock.text.formats.reader import Step
from penstock.text.formats.tags import write_value
from penstock.text.lark import Lark, literal

_PARAMETER = re.compile(r"[^<>\n]+")  # its name
_LINE = re.compile(rf"(?:[^<\n]+|{NO_MARK})+")


def _write_call(lark: Lark, name: str, parameters: Mapping[str, Any], strict: bool) -> str:
    """Parameters in the order of the schema."""
    parts = [literal(f"<function={name}>\n")]
    for key, schema, required in properties_of(name, parameters):
        begin = literal(f"<parameter={key}>\n")
        value = write_value(lark, schema, parameters, strict, "\n</parameter>\n")
        parts.append(f"{begin} {value}" if required else f"({begin} {value})?")
    return " ".join([*parts, literal("</function>")])


class QwenParser(JsonParser):
    """Reads calls of tags and calls of JSON: models write either, whatever their template shows."""

    def _read_call(self, mark: str, known: bool) -> Step[None]:
        """{"name": ..., "arguments": {...}}, or <function=...>, and </tool_call>."""
        if mark == self._open:
            yield from self._all(SPACE)
            if (yield from self._word("{")):
                yield from self._json_call(known)
                return
            if not (yield from self._word("<function=")):
                return
        yield from self._xml_call(known or mark != self._open)

    def _xml_call(self, known: bool) -> Step[None]:
        name = yield from self._all(NAME)
        if not name or (known and name not in self._tools) or not (yield from self._word(">")):
            return
        self._begin(name)
        types = self._tools.get(name, {})
        given: set[str] = set()
        key = ""
        self._raw = []
        yield from self._all(SPACE)
        mark = yield from self._word("<parameter=", "</function>", self._close)
        while mark == "<parameter=":
            if not key:
                key = yield from self._all(_PARAMETER)
                if not key or not (yield from self._word(">")):
                    break
            self._raw = None
            self._argue(f"{', ' if given else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            given.add(key)
            mark, key = yield from self._parameter(types.get(key, frozenset()), types.keys() - given)
            self._raw = [mark]
        raw, self._raw = "".join(self._raw), None
        if mark in ("</function>", self._close):
            self._argue("}" if given else "{}")
            if mark == self._close:
                self.complete += 1
            else:
                yield from self._finish(SPACE)
        elif (yield from self._more()):
            self._argue(raw)
            yield from self._broken()

    def _parameter(self, types: frozenset[str], others: Set[str]) -> Step[tuple[str, str]]:
        """The value of a parameter up to its end; returns the marker behind it, and the name of the next parameter
        where it had to be read. Strings go out as they come, others when they are whole."""
        plain = types <= {"string"}
        pieces: list[str] = []
        held, new_line = "", True
        if plain:
            self._argue('"')

        def put(text: str) -> None:
            if plain:
                self._argue(escaped(text))
            else:
                pieces.append(text)

        yield from self._word("\n")
        while (yield from self._more()):
            if (yield from self._word("\n")):
                put(held)
                held, new_line = "\n", True
                continue
            text = yield from self._some(_LINE)
            if not text:
                self._raw = []
                found = yield from self._parameter_end(others if new_line else None)
                text, self._raw = "".join(self._raw), None
                if found is not None:
                    self._argue('"' if plain else typed("".join(pieces), types))
                    return found
            new_line = text.endswith("\n")
            put(held + text[: len(text) - new_line])
            held = "\n" * new_line
        put(held)
        return "", ""

    def _parameter_end(self, others: Set[str] | None) -> Step[tuple[str, str] | None]:
        """At a <: whether the value ends here. </parameter> counts if what follows it fits; on a new line also the end
        of the call and the next parameter (one of `others`), since models forget </parameter>."""
        mark = yield from self._word("</parameter>", *(() if others is None else ("</function>", "<parameter=")))
        if mark == "</parameter>":
            yield from self._all(SPACE)
            mark = yield from self._word("<parameter=", "</function>", self._close)
            return (mark, "") if mark or not (yield from self._more()) else None
        if mark == "</function>":
            yield from self._all(SPACE)
            return (self._close, "") if (yield from self._word(self._close)) else None
        if mark and others:
            key = yield from self._all(_PARAMETER)
            return (mark, key) if key in others and (yield from self._word(">")) else None
        if not mark:
            yield from self._take()
        return None


QWEN_XML = ChatFormat(
    "qwen-xml",
    reasoning=("<think>", "</think>"),
    call=("<tool_call>", "</tool_call>"),
    line="\n",
    special=False,
    unopened=("<function=",),
    template_signs=("<function=", "<parameter="),
    write_call=_write_call,
    parser=QwenParser,
)
