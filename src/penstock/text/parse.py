"""What a model wrote, taken apart: answer, reasoning and tool calls, by one machine for streamed and whole text.

The machine reads character by character and looks back at nothing but what it holds, so how a text is cut into pieces
does not matter, and its time grows with the length of the text only. Rules that hold for every format:

- Text that only looks like the beginning of a call stays what it is: content, or reasoning.
- A call has begun once its name and the opening of its arguments are there. Arguments that cannot be read from then on
  are passed on as they came, up to the end of the call: they are no JSON then, and the client sees it. If the text ends
  in the middle of a call, so do its arguments.
- White space between the parts belongs to the markers: before a marker, behind a call, and line breaks behind the
  markers of the reasoning.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.errors import InvalidArgument
from penstock.text.arguments import NUMBER, escaped, parameter_types, typed, with_arguments
from penstock.text.formats import FORMATS, format_of, in_reasoning, shown_tokens
from penstock.text.reader import Reader, Step

__all__ = [
    "FORMATS",
    "CallArguments",
    "CallBegin",
    "Content",
    "Delta",
    "Message",
    "Parser",
    "Reasoning",
    "ToolCall",
    "call_id",
    "format_of",
    "gather",
    "in_reasoning",
    "parse_whole",
    "shown_tokens",
    "with_arguments",
]


@dataclass(frozen=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins; `index` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = Content | Reasoning | CallBegin | CallArguments


@dataclass(frozen=True)
class ToolCall:
    """A call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """A whole answer. content is None if there are only calls, reasoning_content if there was no reasoning."""

    content: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCall] = field(default_factory=list)


def call_id() -> str:
    """A new id for a tool call: call_ and 24 random hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


def parse_whole(
    text: str,
    format: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    in_reasoning: bool = False,
    ids: Callable[[], str] = call_id,
) -> Message:
    """The message of a whole text: what `gather` makes of the deltas of a Parser."""
    parser = Parser(format, tools, in_reasoning=in_reasoning, ids=ids)
    return gather([*parser.feed(text), *parser.end()])


def gather(deltas: Iterable[Delta]) -> Message:
    """The message that deltas make together."""
    texts: dict[type, list[str]] = {Content: [], Reasoning: []}
    calls: list[tuple[CallBegin, list[str]]] = []
    for delta in deltas:
        if isinstance(delta, CallBegin):
            calls.append((delta, []))
        elif isinstance(delta, CallArguments):
            calls[delta.index][1].append(delta.text)
        else:
            texts[type(delta)].append(delta.text)
    content, reasoning = ("".join(pieces) for pieces in texts.values())
    return Message(
        content=content if content or not calls else None,
        reasoning_content=reasoning or None,
        tool_calls=[ToolCall(begin.id, begin.name, "".join(pieces)) for begin, pieces in calls],
    )


_ANY = re.compile(r".+", re.DOTALL)
_NO_MARK = r"<(?=[^/|｜cfpt])"  # with what follows it, no marker begins
_TEXT = re.compile(rf"(?:[^<]+|{_NO_MARK})+")  # not for `_all`: what it takes depends on the piece
_SPACE = re.compile(r"\s+")
_SPACE_BRACES = re.compile(r"[\s}]+")
_SPACE_FENCE = re.compile(r"[\s}`]+")
_NAME = re.compile(r"[^\s<>{}\"'`]+")
_PARAMETER = re.compile(r"[^<>\n]+")  # its name
_LINE = re.compile(rf"(?:[^<\n]+|{_NO_MARK})+")
_JSON_TEXT = re.compile(r"[^\"\\<\x00-\x1f]+")  # inside a string
_JSON_REST = re.compile(r"[^\"{}\[\]<]+")  # of an object or array, between its strings
_JSON_SCALAR = re.compile(r"[^\s,{}\[\]<\"]+")
_BARE = re.compile(r"[^,{}\[\]<]+")  # a value of Gemma's that has no quotes
_BARE_KEY = re.compile(r"[^:,{}\[\]<\"]+")
_BARE_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}

_CUT, _CLOSED, _WHOLE = range(3)  # a value ended: with the text, by the marker that ends the call, as it should


class Parser(Reader):
    """Takes a model's text in pieces and says what they mean.

    format: one of FORMATS, see `format_of`. tools: those of the request, as OpenAI writes them; without any, calls are
    left in the content as text. in_reasoning: the prompt ended inside the reasoning, so the text begins there.
    ids: makes the ids of calls.

    How a text is cut into pieces changes where the texts of deltas are cut, and nothing else. `calls` counts the calls
    that began, `complete` those that came to their end.
    """

    def __init__(
        self,
        format: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        in_reasoning: bool = False,
        ids: Callable[[], str] = call_id,
    ) -> None:
        super().__init__()
        if format not in FORMATS:
            raise InvalidArgument(f"format is {format!r:.40}, expected one of {', '.join(FORMATS)}")
        self._format = FORMATS[format]
        self._tools = parameter_types(tools or ())
        self._in_reasoning = in_reasoning and self._format.reasoning is not None
        self._ids = ids
        self._open, self._close = self._format.call or ("", "")
        self._openings: tuple[str, ...] = ()  # of calls
        family = format.partition("-")[0]
        if tools and self._format.call:
            self._openings = (self._open, *(self._format.calls or ())[:1])
            if format == "qwen-xml":  # models forget <tool_call>
                self._openings += ("<function=",)
        self._special = family != "qwen"  # markers of calls are special tokens: they do not occur in their arguments
        self._read_call = {"qwen": self._qwen_call, "gemma": self._gemma_call}.get(family, self._deepseek_call)

        self.calls = 0
        self.complete = 0
        self._deltas: list[tuple[Delta, list[str]]] = []  # with the pieces of their texts
        self._held: list[str] = []  # white space that may belong to a marker
        self._trimmed = ""  # characters that are dropped before the next text
        self._said = False  # whether there is content already
        self._machine = self._run()
        next(self._machine)

    def feed(self, text: str) -> list[Delta]:
        """The next piece; returns what is certain now."""
        assert not self._ended, "feed after end"
        self._text, self._at = text, 0
        next(self._machine)
        return self._taken()

    def end(self) -> list[Delta]:
        """The text has ended: returns what was held back."""
        self._ended = True
        next(self._machine, None)
        return self._taken()

    # Writing

    def _emit(self, delta: Delta, text: str = "") -> None:
        if not self._deltas or self._deltas[-1][0] != delta:
            self._deltas.append((delta, []))
        self._deltas[-1][1].append(text)

    def _taken(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return [d if isinstance(d, CallBegin) else replace(d, text="".join(pieces)) for d, pieces in deltas]

    def _write(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        """Text, but for white space at its end, which is held back."""
        if self._trimmed:
            text = text.lstrip(self._trimmed)
            if not text:
                return
            self._trimmed = ""
        body = text.rstrip()
        if body:
            self._release(kind)
            self._emit(kind(""), body)
            self._said |= kind is Content
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def _release(self, kind: type[Content] | type[Reasoning]) -> None:
        if self._held:
            self._emit(kind(""), "".join(self._held))
            self._held.clear()

    def _begin(self, name: str) -> None:
        self._raw = None
        self._held.clear()
        self._trimmed = " \t\r\n"
        self._emit(CallBegin(self.calls, self._ids(), name))
        self.calls += 1

    def _argue(self, text: str) -> None:
        if text:
            self._emit(CallArguments(self.calls - 1, ""), text)

    # The parts of an answer

    def _run(self) -> Step[None]:
        opening, closing = self._format.reasoning or ("", "")
        if self._in_reasoning:
            yield from self._word(opening)  # again
            yield from self._reasoning()
        elif closing and (yield from self._word(f"{self._format.label}{closing}", closing)):
            self._trimmed = "\n"  # the end of a reasoning that never began
        while (yield from self._more()):
            # <think> inside an answer is text; Gemma's marker is none of an answer's own words
            early = opening and (self._format.label or not self._said)
            mark = yield from self._until(Content, (*self._openings, opening) if early else self._openings)
            if mark and mark == opening:
                self._held.clear()
                yield from self._word(self._format.label)
                yield from self._reasoning()
            elif mark:
                yield from self._call(mark, Content)
        self._release(Content)

    def _reasoning(self) -> Step[None]:
        """The reasoning and the marker behind it. A call on a new line ends it too: Qwen's models forget </think>."""
        assert self._format.reasoning is not None
        closing = self._format.reasoning[1]
        marks = (closing,) if self._special or not self._openings else (closing, self._open)
        self._trimmed = "\n"
        while (yield from self._more()):
            mark = yield from self._until(Reasoning, marks)
            if mark == closing:
                self._held.clear()
                self._trimmed = "\n"
                return
            if mark and (self._trimmed or any("\n" in piece for piece in self._held)):
                if (yield from self._call(mark, Reasoning, known=True)):
                    return
            else:
                self._write(Reasoning, mark)
        self._release(Reasoning)

    def _until(self, kind: type[Content] | type[Reasoning], marks: tuple[str, ...]) -> Step[str]:
        """One of the marks, or a stretch of text before one, which is written, and ""."""
        if not marks:
            self._release(kind)
            self._emit(kind(""), (yield from self._some(_ANY)))
        elif text := (yield from self._some(_TEXT)):
            self._write(kind, text)
        elif mark := (yield from self._word(*marks)):
            return mark
        else:
            self._write(kind, (yield from self._take()))
        return ""

    def _call(self, mark: str, kind: type[Content] | type[Reasoning], known: bool = False) -> Step[bool]:
        """The call or calls behind a mark, whether there was one; what is none is written as text.

        known: only calls of tools that were given count.
        """
        before, self._raw = self.calls, [mark]
        yield from self._read_call(mark, known)
        if self._raw is not None:
            text, self._raw = "".join(self._raw), None
            self._write(kind, text)
        return self.calls > before

    def _finish(self, rest: re.Pattern[str] = _SPACE_BRACES) -> Step[str]:
        """The end of a call, behind its arguments: a bracket too many or too few does no harm."""
        self.complete += 1
        yield from self._all(rest)
        return (yield from self._word(self._close))

    def _broken(self) -> Step[None]:
        """The rest of a call whose arguments cannot be read, as it is."""
        while (yield from self._more()):
            if text := (yield from self._some(_TEXT)):
                self._argue(text)
            elif (yield from self._word(self._close)):
                self.complete += 1
                return
            else:
                self._argue((yield from self._take()))

    # JSON

    def _string(self) -> Step[str | None]:
        """A JSON string, decoded; None if what comes is none."""
        pieces: list[str] = []
        if not (yield from self._word('"')) or (yield from self._quoted(pieces.append)) != _WHOLE:
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
                if (self._special or new_line) and (yield from self._word(self._close)):
                    return _CLOSED
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
                    return _WHOLE
                put((yield from self._take()))  # behind a backslash
                new_line = False
        return _CUT

    def _value(self, put: Callable[[str], None]) -> Step[int]:
        """A JSON value. Only what is needed to find its end is looked at."""
        depth = 0
        while character := (yield from self._peek()):
            if character == "<":
                if (yield from self._word(self._close)):
                    return _CLOSED
                if not depth:
                    return _WHOLE
                put((yield from self._take()))
            elif character == '"':
                put((yield from self._take()))
                ended = yield from self._quoted(put)
                if ended != _WHOLE or not depth:
                    return ended
            elif character in "{[":
                put((yield from self._take()))
                depth += 1
            elif character in "}]":
                if depth:
                    put((yield from self._take()))
                    depth -= 1
                if not depth:
                    return _WHOLE
            elif depth:
                put((yield from self._some(_JSON_REST)))
            else:
                put((yield from self._all(_JSON_SCALAR)))
                return _WHOLE
        return _CUT

    # Qwen

    def _qwen_call(self, mark: str, known: bool) -> Step[None]:
        """{"name": ..., "arguments": {...}}, or <function=...>, and </tool_call>."""
        if mark == self._open:
            yield from self._all(_SPACE)
            if (yield from self._word("{")):
                yield from self._json_call(known)
                return
            if not (yield from self._word("<function=")):
                return
        yield from self._xml_call(known or mark != self._open)

    def _json_call(self, known: bool) -> Step[None]:
        name: str | None = None
        arguments: list[str] | None = None
        began = False
        while True:
            yield from self._all(_SPACE)
            key = yield from self._string()
            yield from self._all(_SPACE)
            if key is None or not (yield from self._word(":")):
                break
            yield from self._all(_SPACE)
            ended = _WHOLE
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
            if ended != _WHOLE:
                if began:
                    self._raw = None
                    self.complete += ended == _CLOSED
                return
            if began:
                self._raw = []
            yield from self._all(_SPACE)
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
        elif text.startswith('"') and ended == _WHOLE:
            try:
                inner = json.loads(text)
            except ValueError:
                inner = ""
            text = inner if inner.lstrip().startswith("{") else text
        put(text)
        return ended

    def _xml_call(self, known: bool) -> Step[None]:
        name = yield from self._all(_NAME)
        if not name or (known and name not in self._tools) or not (yield from self._word(">")):
            return
        self._begin(name)
        types = self._tools.get(name, {})
        given: set[str] = set()
        key = ""
        self._raw = []
        yield from self._all(_SPACE)
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
                yield from self._finish(_SPACE)
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
            yield from self._all(_SPACE)
            mark = yield from self._word("<parameter=", "</function>", self._close)
            return (mark, "") if mark or not (yield from self._more()) else None
        if mark == "</function>":
            yield from self._all(_SPACE)
            return (self._close, "") if (yield from self._word(self._close)) else None
        if mark and others:
            key = yield from self._all(_PARAMETER)
            return (mark, key) if key in others and (yield from self._word(">")) else None
        if not mark:
            yield from self._take()
        return None

    # Gemma

    def _gemma_call(self, mark: str, known: bool) -> Step[None]:
        """call:name{key:value,...}, several of them perhaps, and <tool_call|>."""
        yield from self._all(_SPACE)
        while (yield from self._word("call:")):
            name = yield from self._all(_NAME)
            yield from self._all(_SPACE)
            if not name or not (yield from self._word("{")):
                return
            self._begin(name)
            self._argue("{")
            ended = yield from self._gemma_object()
            if ended == _CUT:
                yield from self._broken()
            elif ended == _CLOSED:
                self.complete += 1
            if ended != _WHOLE or (yield from self._finish()):
                return
            self._raw = []
        if not self._raw:  # behind the last call
            self._raw = None

    def _gemma_object(self) -> Step[int]:
        """What follows the first bracket, as JSON; _CUT where it cannot be read, at the end of the text or before."""
        brackets = ["}"]
        first = True  # behind an opening bracket
        while brackets:
            self._raw = []
            yield from self._all(_SPACE)
            comma = not first and (yield from self._word(","))
            if comma:
                yield from self._all(_SPACE)
            if (yield from self._word(brackets[-1])):
                self._argue(brackets.pop())
                first = False
                continue
            key = (yield from self._gemma_key()) if brackets[-1] == "}" else ""
            if key is None or not (first or comma):
                return (yield from self._gemma_end())
            before, first = f"{', ' if comma else ''}{key}", False
            if bracket := (yield from self._word("{", "[")):
                self._argue(before + bracket)
                brackets.append("}" if bracket == "{" else "]")
                first = True
            elif quote := (yield from self._word(self._format.quote, '"')):
                self._raw = None
                self._argue(f'{before}"')
                ended = yield from (self._quoted(self._argue) if quote == '"' else self._gemma_string())
                if ended != _WHOLE:
                    return ended
            elif text := (yield from self._all(_BARE)).strip():
                number = text if NUMBER.fullmatch(text) else None
                self._argue(before + (_BARE_WORDS.get(text) or number or json.dumps(text, ensure_ascii=False)))
            else:
                return (yield from self._gemma_end())
        self._raw = None
        return _WHOLE

    def _gemma_end(self) -> Step[int]:
        """Arguments that cannot be read: what was read in vain goes out as it is."""
        self._argue("".join(self._raw or ()))
        self._raw = None
        return _CLOSED if (yield from self._word(self._close)) else _CUT

    def _gemma_key(self) -> Step[str | None]:
        """A key and its colon, as JSON; None if what comes is none."""
        pieces: list[str] = []
        if (yield from self._word(self._format.quote)):
            while (mark := (yield from self._word(self._format.quote, self._close))) != self._format.quote:
                if mark and self._raw is not None:
                    self._unread(self._raw.pop())
                    return None
                text = (yield from self._some(_TEXT)) or (yield from self._take())
                if not text:
                    return None
                pieces.append(text)
        elif (yield from self._peek()) == '"':
            pieces.append((yield from self._string()) or "")
        else:
            pieces.append((yield from self._all(_BARE_KEY)).strip())
        yield from self._all(_SPACE)
        key = "".join(pieces)
        if not key or not (yield from self._word(":")):
            return None
        yield from self._all(_SPACE)
        return f"{json.dumps(key, ensure_ascii=False)}: "

    def _gemma_string(self) -> Step[int]:
        """The rest of a string behind its first quote."""
        while (yield from self._more()):
            if text := (yield from self._some(_TEXT)):
                self._argue(escaped(text))
            elif mark := (yield from self._word(self._format.quote, self._close)):
                if mark == self._close:
                    return _CLOSED
                self._argue('"')
                return _WHOLE
            else:
                self._argue((yield from self._take()))
        return _CUT

    # DeepSeek

    def _deepseek_call(self, mark: str, known: bool) -> Step[None]:
        """A list of calls: name, separator and JSON, or "function", separator, name and JSON between fences."""
        assert self._format.calls is not None
        if mark == self._format.calls[0]:
            yield from self._all(_SPACE)
            mark = yield from self._word(self._open)
        while mark == self._open:
            yield from self._all(_SPACE)
            name = yield from self._all(_NAME)
            yield from self._all(_SPACE)
            if not (yield from self._word(self._format.separator)):
                return
            yield from self._all(_SPACE)
            second = yield from self._all(_NAME)
            yield from self._all(_SPACE)
            if (yield from self._word("```")):
                yield from self._word("json")
                yield from self._all(_SPACE)
            name = second or name
            if not name or (yield from self._peek()) != "{":
                return
            self._begin(name)
            ended = yield from self._value(self._argue)
            if ended == _CUT:
                return
            if ended == _CLOSED:
                self.complete += 1
            else:
                yield from self._finish(_SPACE_FENCE)
            yield from self._all(_SPACE)
            self._raw = []
            mark = yield from self._word(self._open, self._format.calls[1])
            if mark != self._open:
                self._raw = None
