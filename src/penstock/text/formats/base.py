"""What chat formats share: ChatFormat, the description of one, and Parser, which takes a text apart into answer,
reasoning and tool calls.

One machine serves streamed and whole text. It reads character by character and looks back at nothing but what it holds,
so how a text is cut into pieces does not matter, and its time grows with the length of the text only. Rules that hold
for every format:

- Text that only looks like the beginning of a call stays what it is: content, or reasoning.
- A call has begun once its name and the opening of its arguments are there. Arguments that cannot be read from then on
  are passed on as they came, up to the end of the call: they are no JSON then, and the client sees it. If the text ends
  in the middle of a call, so do its arguments.
- White space between the parts belongs to the markers: before a marker, behind a call, and line breaks behind the
  markers of the reasoning.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import InvalidArgument
from penstock.text.formats.arguments import parameter_types
from penstock.text.formats.deltas import CallArguments, CallBegin, Content, Delta, Reasoning
from penstock.text.formats.reader import Reader, Step
from penstock.text.lark import Lark, Tools, literal
from penstock.text.tokenizer import Tokenizer

NO_MARK = r"<(?=[^/|｜cfimpt])"  # with what follows it, no marker begins
TEXT = re.compile(rf"(?:[^<]+|{NO_MARK})+")  # not for `_all`: what it takes depends on the piece
SPACE = re.compile(r"\s+")
NAME = re.compile(r"[^\s<>{}\"'`]+")  # of a tool
_ANY = re.compile(r".+", re.DOTALL)
_SPACE_BRACES = re.compile(r"[\s}]+")


class Parser(Reader):
    """Takes a model's text in pieces and says what they mean.

    tools: those of the request, as OpenAI writes them; without any, calls are left in the content as text.
    in_reasoning: the prompt ended inside the reasoning, so the text begins there. ids: makes the ids of calls. A format
    with calls has a subclass, whose `_read_call` reads them.

    How a text is cut into pieces changes where the texts of deltas are cut, and nothing else. `calls` counts the calls
    that began, `complete` those that came to their end. text: what no marker of a format begins with.
    """

    text = TEXT

    def __init__(
        self,
        format: "ChatFormat",
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        in_reasoning: bool,
        ids: Callable[[], str],
    ) -> None:
        super().__init__()
        self._format = format
        self._tools = parameter_types(tools or ())
        self._in_reasoning = in_reasoning and format.reasoning is not None
        self._ids = ids
        self._open, self._close = format.call or ("", "")
        self._openings: tuple[str, ...] = ()  # of calls
        if tools and format.call:
            self._openings = (self._open, *(format.calls or ())[:1], *format.unopened)
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
            # <think> inside an answer is text; a marker with a label is none of an answer's own words
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
        """The reasoning and the marker behind it. Models whose markers are text forget the latter: a call on a new line
        ends the reasoning too."""
        assert self._format.reasoning is not None
        closing = self._format.reasoning[1]
        marks = (closing,) if self._format.special or not self._openings else (closing, self._open)
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
        elif text := (yield from self._some(self.text)):
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

    def _read_call(self, mark: str, known: bool) -> Step[None]:
        """The call or calls behind a mark, as the format has them; text that is no call is left in `_raw`."""
        raise NotImplementedError

    def _finish(self, rest: re.Pattern[str] = _SPACE_BRACES) -> Step[str]:
        """The end of a call, behind its arguments: a bracket too many or too few does no harm."""
        self.complete += 1
        yield from self._all(rest)
        return (yield from self._word(self._close))

    def _broken(self) -> Step[None]:
        """The rest of a call whose arguments cannot be read, as it is."""
        while (yield from self._more()):
            if text := (yield from self._some(TEXT)):
                self._argue(text)
            elif (yield from self._word(self._close)):
                self.complete += 1
                return
            else:
                self._argue((yield from self._take()))


@dataclass(frozen=True)
class ChatFormat:
    """How models of one kind write reasoning and tool calls. Markers begin with a bracket, which they do not have
    again; none begins another one, or as the parser's `text` says.

    reasoning: what opens and closes it, and the label that stands behind the opening. call: what opens and closes a
    tool call; calls: what opens and closes a list of them; inner: markers inside of a call. separator: behind the name.
    quote: around strings. line: inside the markers of a call and between calls; between: between calls and inside the
    markers of a list alone. special: the markers of calls are special tokens, so they do not
    occur in arguments. unopened: how a call begins whose opening a model forgot. arguments_as_text: chat templates take
    the arguments of earlier calls as JSON text, not as an object. headers: all text stands in messages with headers, so
    that an answer means nothing without its markers. call_ids: the ids of earlier calls, which chat templates write, by
    the name of the tool and the number of the call in the conversation.

    A model has this format if its chat template or its tokens have one of `signs` (where there are any), and its chat
    template has all of `template_signs`. write_call: the rule for what stands between the markers of a call, from a
    tool's name, parameters and strictness. parser: the class that reads what a model wrote.
    """

    name: str
    reasoning: tuple[str, str] | None = None
    label: str = ""
    call: tuple[str, str] | None = None
    calls: tuple[str, str] | None = None
    separator: str = ""
    quote: str = ""
    inner: tuple[str, ...] = ()
    line: str = ""
    between: str = ""
    special: bool = True
    unopened: tuple[str, ...] = ()
    arguments_as_text: bool = False
    headers: bool = False
    call_ids: Callable[[str, int], str] | None = None
    signs: tuple[str, ...] = ()
    template_signs: tuple[str, ...] = ()
    write_call: Callable[[Lark, str, Mapping[str, Any], bool], str] | None = None
    parser: type[Parser] = Parser

    def fits(self, tokenizer: Tokenizer) -> bool:
        """Whether a tokenizer and its chat template show the signs of this format."""
        template, token = tokenizer.chat_template or "", tokenizer.backend.token_to_id
        known = not self.signs or any(sign in template or token(sign) is not None for sign in self.signs)
        return known and all(sign in template for sign in self.template_signs)

    def shown(self, tools: bool) -> tuple[str, ...]:
        """Tokens that the parser has to see, as text, also where the tokenizer calls them special.

        tools: whether the request has any; without them only the markers of the reasoning are needed.
        """
        marks = self.reasoning or ()
        if tools:
            marks += (self.call or ()) + (self.calls or ()) + (self.separator, self.quote) + self.inner
        return tuple(mark for mark in marks if mark)

    def effort(self, effort: str) -> dict[str, Any]:
        """Template variables for OpenAI's reasoning_effort."""
        return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}

    def for_template(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages of earlier turns as chat templates of this format take them."""
        return [dict(message) for message in messages]

    def write_answer(self, lark: Lark, inside: bool, json: str = "", calls: str = "") -> str:
        """The rule for a whole answer: JSON or calls, whichever is given, behind the rest of a reasoning that the
        answer begins `inside` of, or behind one of the model's own.
        """
        answer = f"({json} | {calls})" if json and calls else json or calls
        if self.reasoning is None:
            return answer
        space = lark.define("SPACE", r"/[ \n]{0,8}/")
        rest = f"{lark.until(self.reasoning[1])} {space}"
        return f"{rest} {answer}" if inside else f"({lark.mark(self.reasoning[0])} {rest})? {answer}"

    def check_names(self, tools: Tools) -> None:
        """Raises InvalidArgument for names that the format cannot write."""
        for name in tools:
            if len(name) > 256 or not NAME.fullmatch(name):
                raise InvalidArgument(
                    f"a tool is named {name!r:.60}, expected a name without spaces, brackets and quotes"
                )

    def write_calls(self, lark: Lark, tools: Tools, parallel: bool) -> str:
        """The rule for a call of one of the tools, or for several calls, as models of this format write them.

        Raises InvalidArgument as `check_names`.
        """
        assert self.call is not None and self.write_call is not None
        self.check_names(tools)
        opening, closing = (lark.mark(mark) for mark in self.call)
        each = " | ".join([self.write_call(lark, name, *tool) for name, tool in tools.items()])
        line = literal(self.line) if self.line else ""
        call = lark.rule("call", f"{opening} {line} ({each}) {line} {closing}")
        between = literal(self.between) if self.between else line
        calls = f"{call} ({between} {call})*" if parallel else call
        if self.calls is not None:
            inside = literal(self.between) if self.between else ""
            calls = f"{lark.mark(self.calls[0])} {inside} {calls} {inside} {lark.mark(self.calls[1])}"
        return lark.rule("calls", calls)
