"""LFM2: lists of calls as Python writes them. <|tool_call_start|>[f(x=1, y="text"), g()]<|tool_call_end|>"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.text.formats.arguments import NUMBER, escaped, properties_of, resolved
from penstock.text.formats.base import SPACE, ChatFormat
from penstock.text.formats.json_parser import CLOSED, CUT, WHOLE, JsonParser
from penstock.text.formats.reader import Step
from penstock.text.lark import Lark, Tools, literal

_NAME = re.compile(r"[^\s<>{}\[\]()\"'`,=:]+")
_BARE = re.compile(r"[^,=:<>{}\[\]()\"'\n]+")  # a value without quotes
_TEXT = re.compile(r"[^\\<\"']+")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "/": "/"}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]")


def _write_call(lark: Lark, name: str, parameters: Mapping[str, Any], strict: bool) -> str:
    """Arguments by name in the order of the schema: JSON, but for Python's words."""
    first = later = '""'  # what can follow: if no argument has been written yet, and if one has
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    for key, schema, required in reversed([*properties_of(name, parameters)]):
        found = resolved(schema, parameters)
        if found.get("type") == "boolean":
            value = lark.define("boolean", '"True" | "False"')
        else:
            value = lark.json({**definitions, **found}, lenient=not strict)
        pair = lark.rule("pair", f"{literal(f'{key}=')} {value}")
        first = lark.rule("first", f"{pair} {later}" + ("" if required else f" | {first}"))
        later = lark.rule("later", (f'", " {pair}' if required else f'(", " {pair})?') + f" {later}")
    return f'{literal(f"{name}(")} {first} ")"'


class Lfm2Parser(JsonParser):
    """Reads calls and writes their values as JSON; also lists of JSON objects, which models can be asked for."""

    def _read_call(self, mark: str, known: bool) -> Step[None]:
        """[name(key=value, …), …] and <|tool_call_end|>."""
        yield from self._all(SPACE)
        yield from self._word("[")
        while True:
            yield from self._all(SPACE)
            before = self.calls
            if (yield from self._word("{")):
                yield from self._json_call(known)
                if self.calls == before or self.complete < self.calls:
                    return
            elif not (yield from self._python_call(known)):
                return
            self._raw = []
            yield from self._all(SPACE)
            if not (yield from self._word(",")):
                break
        yield from self._word("]")
        yield from self._all(SPACE)
        yield from self._word(self._close)
        self._raw = None

    def _python_call(self, known: bool) -> Step[bool]:
        """name(key=value, …), whether it came to its end and something may follow."""
        name = yield from self._all(_NAME)
        if not name or (known and name not in self._tools) or not (yield from self._word("(")):
            return False
        self._begin(name)
        self._argue("{")
        ended = yield from self._arguments()
        if ended == CUT:
            yield from self._broken()
        elif ended == CLOSED:
            self.complete += 1
        else:
            self.complete += 1
            return True
        return False

    def _arguments(self) -> Step[int]:
        """What follows a call's bracket, as JSON; CUT where it cannot be read, at the end of the text or before."""
        brackets = ["call"]
        first = True  # behind an opening bracket
        while brackets:
            self._raw = []
            yield from self._all(SPACE)
            comma = not first and (yield from self._word(","))
            if comma:
                yield from self._all(SPACE)
            kind = brackets[-1]
            if (yield from self._word(")" if kind == "call" else _CLOSING[kind])):
                self._argue("}" if kind in ("call", "{") else "]")
                brackets.pop()
                first = False
                continue
            key = ""
            if kind in ("call", "{"):
                key = yield from self._key("=" if kind == "call" else ":")
            if key is None or not (first or comma):
                return (yield from self._unreadable())
            before, first = f"{', ' if comma else ''}{key}", False
            if bracket := (yield from self._word(*_CLOSING)):
                self._argue(before + ("{" if bracket == "{" else "["))
                brackets.append(bracket)
                first = True
            elif quote := (yield from self._word('"', "'")):
                self._raw = None
                self._argue(f'{before}"')
                ended = yield from self._python_string(quote, self._argue)
                if ended != WHOLE:
                    return ended
            elif text := (yield from self._all(_BARE)).strip():
                self._argue(before + _bare(text))
            else:
                return (yield from self._unreadable())
        self._raw = None
        return WHOLE

    def _unreadable(self) -> Step[int]:
        """Arguments that cannot be read: what was read in vain goes out as it is."""
        self._argue("".join(self._raw or ()))
        self._raw = None
        return CLOSED if (yield from self._word(self._close)) else CUT

    def _key(self, behind: str) -> Step[str | None]:
        """A key and the sign behind it, as JSON; None if what comes is none."""
        pieces: list[str] = []
        if quote := (yield from self._word('"', "'")):
            ended = yield from self._python_string(quote, pieces.append)
            if ended == CLOSED and self._raw is not None:
                self._unread(self._raw.pop())
            if ended != WHOLE:
                return None
            pieces.insert(0, '"')
        elif bare := (yield from self._all(_BARE)).strip():
            pieces.append(json.dumps(bare, ensure_ascii=False))
        yield from self._all(SPACE)
        if not pieces or not (yield from self._word(behind)):
            return None
        yield from self._all(SPACE)
        return f"{''.join(pieces)}: "

    def _python_string(self, quote: str, put: Callable[[str], None]) -> Step[int]:
        """The rest of a string behind its first quote, as that of a JSON string; one of three quotes, too."""
        if (yield from self._word(quote)):
            if not (yield from self._word(quote)):
                put('"')
                return WHOLE
            quote *= 3
        while character := (yield from self._peek()):
            if text := (yield from self._some(_TEXT)):
                put(escaped(text))
            elif character == "<" and (yield from self._word(self._close)):
                return CLOSED
            elif (yield from self._word(quote)):
                put('"')
                return WHOLE
            else:
                yield from self._take()
                put((yield from self._escape()) if character == "\\" else escaped(character))
        return CUT

    def _escape(self) -> Step[str]:
        """What stands behind a backslash, as in a JSON string; a line break there is none."""
        sign = yield from self._take()
        if sign in _DIGITS:
            digits = ""
            while len(digits) < _DIGITS[sign] and (digit := (yield from self._some(_HEX))):
                digits += digit
            number = int(digits, 16) if len(digits) == _DIGITS[sign] else -1
            if 0xD800 <= number < 0xE000:
                return f"\\u{number:04x}"  # a half of a pair
            return escaped(chr(number) if 0 <= number <= 0x10FFFF else f"\\{sign}{digits}")
        if sign == "\n" or not sign:
            return ""
        return escaped(sign if sign in "\\\"'" else _ESCAPES.get(sign, f"\\{sign}"))


def _bare(text: str) -> str:
    """A value without quotes, as JSON: a word or number of Python's, else a string."""
    if text in _WORDS:
        return _WORDS[text]
    if NUMBER.fullmatch(text):
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    return repr(value) if math.isfinite(value) else json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class Lfm2Format(ChatFormat):
    """With all calls in one list."""

    def write_calls(self, lark: Lark, tools: Tools, parallel: bool) -> str:
        self.check_names(tools)
        assert self.call is not None
        opening, closing = (lark.mark(mark) for mark in self.call)
        each = [_write_call(lark, name, *tool) for name, tool in tools.items()]
        call = lark.rule("call", " | ".join(each))
        calls = f'{call} (", " {call})*' if parallel else call
        return lark.rule("calls", f'{opening} "[" {calls} "]" {closing}')


LFM2 = Lfm2Format(
    "lfm2",
    reasoning=("<think>", "</think>"),
    call=("<|tool_call_start|>", "<|tool_call_end|>"),
    signs=("<|tool_call_start|>",),
    write_call=_write_call,
    parser=Lfm2Parser,
)
