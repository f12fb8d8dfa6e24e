"""Gemma 4: calls with values of a notation of its own. <|tool_call>call:f{x:1,y:<|"|>text<|"|>}<tool_call|>"""

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.text.formats.arguments import NUMBER, at, escaped, properties_of, string_choices
from penstock.text.formats.base import NAME, SPACE, TEXT, ChatFormat
from penstock.text.formats.json_parser import CLOSED, CUT, WHOLE, JsonParser
from penstock.text.formats.reader import Step
from penstock.text.lark import Lark, literal

_QUOTE = '<|"|>'
_BARE = re.compile(r"[^,{}\[\]<]+")  # a value that has no quotes
_BARE_KEY = re.compile(r"[^:,{}\[\]<\"]+")
_BARE_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


def _write_call(lark: Lark, name: str, parameters: Mapping[str, Any], _strict: bool) -> str:
    return f"{literal(f'call:{name}')} {_Writer(lark, name, parameters).object(parameters)}"


class _Writer:
    """Values as Gemma writes them, by the types, properties, items and enumerations of a schema."""

    def __init__(self, lark: Lark, name: str, root: Mapping[str, Any]) -> None:
        self._lark, self._name, self._root = lark, name, root
        self._quote = lark.mark(_QUOTE)
        self._references: dict[str, str] = {}

    def object(self, schema: Mapping[str, Any]) -> str:
        """Properties in the order of their names, as the chat template has them."""
        pairs = sorted(properties_of(self._name, schema), key=lambda pair: pair[0])
        first = later = '""'  # what can follow: if no property has been written yet, and if one has
        for key, inner, required in reversed(pairs):
            pair = self._lark.rule("pair", f"{literal(f'{key}:')} {self.value(inner)}")
            first = self._lark.rule("first", f"{pair} {later}" + ("" if required else f" | {first}"))
            later = self._lark.rule("later", (f'"," {pair}' if required else f'("," {pair})?') + f" {later}")
        return f'"{{" {first} "}}"'

    def value(self, schema: Any) -> str:
        """The rule for a value."""
        lark = self._lark
        if not isinstance(schema, Mapping):
            return self._any()
        if isinstance(pointer := schema.get("$ref"), str):
            if pointer not in self._references:
                name = self._references[pointer] = lark.reserve("value")
                lark.define(name, self.value(at(pointer, self._root)))
            return self._references[pointer]
        if choices := string_choices(schema):
            return lark.rule("string", f"{self._quote} ({' | '.join(map(literal, choices))}) {self._quote}")
        options = schema.get("anyOf") or schema.get("oneOf")
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            options = [{**schema, "type": each} for each in kind]
        if isinstance(options, list) and options:
            return lark.rule("value", " | ".join(dict.fromkeys(map(self.value, options))))
        if kind == "object" and isinstance(schema.get("properties"), Mapping):
            return lark.rule("object", self.object(schema))
        if kind == "array":
            item = self.value(schema.get("items"))
            return lark.rule("array", f'"[" ({item} ("," {item})*)? "]"')
        if kind == "string":
            return self._string()
        if kind == "boolean":
            return lark.define("boolean", '"true" | "false"')
        if kind == "null":
            return lark.define("null", '"null"')
        if kind == "integer":
            return lark.define("INTEGER", "/-?(0|[1-9][0-9]{0,18})/")
        if kind == "number":
            return self._number()
        return self._any()

    def _string(self) -> str:
        return self._lark.define("string", f"{self._quote} {self._lark.until(_QUOTE)}")

    def _number(self) -> str:
        return self._lark.define("NUMBER", r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?/")

    def _any(self) -> str:
        self._lark.define("KEY", r"/[a-zA-Z0-9_.\-]{1,64}/")
        self._lark.define("list", '"[" (any ("," any)*)? "]"')
        self._lark.define("dict", '"{" (KEY ":" any ("," KEY ":" any)*)? "}"')
        others = '"true" | "false" | "null" | list | dict'
        return self._lark.define("any", f"{self._string()} | {self._number()} | {others}")


class GemmaParser(JsonParser):
    """Reads calls and writes their values as JSON."""

    def _read_call(self, mark: str, known: bool) -> Step[None]:
        """call:name{key:value,...}, several of them perhaps, and <tool_call|>."""
        yield from self._all(SPACE)
        while (yield from self._word("call:")):
            name = yield from self._all(NAME)
            yield from self._all(SPACE)
            if not name or not (yield from self._word("{")):
                return
            self._begin(name)
            self._argue("{")
            ended = yield from self._arguments()
            if ended == CUT:
                yield from self._broken()
            elif ended == CLOSED:
                self.complete += 1
            if ended != WHOLE or (yield from self._finish()):
                return
            self._raw = []
        if not self._raw:  # behind the last call
            self._raw = None

    def _arguments(self) -> Step[int]:
        """What follows the first bracket, as JSON; CUT where it cannot be read, at the end of the text or before."""
        brackets = ["}"]
        first = True  # behind an opening bracket
        while brackets:
            self._raw = []
            yield from self._all(SPACE)
            comma = not first and (yield from self._word(","))
            if comma:
                yield from self._all(SPACE)
            if (yield from self._word(brackets[-1])):
                self._argue(brackets.pop())
                first = False
                continue
            key = (yield from self._key()) if brackets[-1] == "}" else ""
            if key is None or not (first or comma):
                return (yield from self._unreadable())
            before, first = f"{', ' if comma else ''}{key}", False
            if bracket := (yield from self._word("{", "[")):
                self._argue(before + bracket)
                brackets.append("}" if bracket == "{" else "]")
                first = True
            elif quote := (yield from self._word(_QUOTE, '"')):
                self._raw = None
                self._argue(f'{before}"')
                ended = yield from (self._quoted(self._argue) if quote == '"' else self._text_value())
                if ended != WHOLE:
                    return ended
            elif text := (yield from self._all(_BARE)).strip():
                number = text if NUMBER.fullmatch(text) else None
                self._argue(before + (_BARE_WORDS.get(text) or number or json.dumps(text, ensure_ascii=False)))
            else:
                return (yield from self._unreadable())
        self._raw = None
        return WHOLE

    def _unreadable(self) -> Step[int]:
        """Arguments that cannot be read: what was read in vain goes out as it is."""
        self._argue("".join(self._raw or ()))
        self._raw = None
        return CLOSED if (yield from self._word(self._close)) else CUT

    def _key(self) -> Step[str | None]:
        """A key and its colon, as JSON; None if what comes is none."""
        pieces: list[str] = []
        if (yield from self._word(_QUOTE)):
            while (mark := (yield from self._word(_QUOTE, self._close))) != _QUOTE:
                if mark and self._raw is not None:
                    self._unread(self._raw.pop())
                    return None
                text = (yield from self._some(TEXT)) or (yield from self._take())
                if not text:
                    return None
                pieces.append(text)
        elif (yield from self._peek()) == '"':
            pieces.append((yield from self._string()) or "")
        else:
            pieces.append((yield from self._all(_BARE_KEY)).strip())
        yield from self._all(SPACE)
        key = "".join(pieces)
        if not key or not (yield from self._word(":")):
            return None
        yield from self._all(SPACE)
        return f"{json.dumps(key, ensure_ascii=False)}: "

    def _text_value(self) -> Step[int]:
        """The rest of a string behind its first quote."""
        while (yield from self._more()):
            if text := (yield from self._some(TEXT)):
                self._argue(escaped(text))
            elif mark := (yield from self._word(_QUOTE, self._close)):
                if mark == self._close:
                    return CLOSED
                self._argue('"')
                return WHOLE
            else:
                self._argue((yield from self._take()))
        return CUT


GEMMA = ChatFormat(
    "gemma",
    reasoning=("<|channel>", "<channel|>"),
    label="thought\n",
    call=("<|tool_call>", "<tool_call|>"),
    quote=_QUOTE,
    signs=("<|tool_call>", "<|channel>"),
    write_call=_write_call,
    parser=GemmaParser,
)
