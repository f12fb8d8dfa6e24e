"""gpt-oss: an answer is a list of messages, each with a header that names its channel and whom it is for.

<|channel|>analysis<|message|>So.<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>
<|start|>assistant<|channel|>final<|message|>Done.<|return|>

`analysis` is reasoning, `final` is content, and so is `commentary` that is for no function. The prompt ends behind
<|start|>assistant, or further inside of a message. <|call|> and <|return|> end the answer, <|end|> a message only.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from penstock.text.formats.arguments import escaped
from penstock.text.formats.base import SPACE, TEXT, ChatFormat, Parser
from penstock.text.formats.deltas import Content, Reasoning
from penstock.text.formats.reader import Step
from penstock.text.lark import Lark, Tools, arguments, literal

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_MARKS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN)
_ROLE, _FUNCTIONS = "assistant", "functions."
_BETWEEN = "\n\n"  # texts of a kind
_MAX_HEADER = 512  # characters: a longer one is a text whose <|message|> was forgotten
_NO_SPACE = re.compile(r"[^\s<]+")
_CHANNEL_NAME = re.compile(r"\W*(analysis|commentary|final)(?![a-z])")
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S*)")
_TYPE = re.compile(r"\s*(json|code)\s*")
_STRING_PARTS = re.compile(r'["\\\x00-\x1f]|[^"\\\x00-\x1f]+')
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # those that the models do not know


class _Header:
    """What stands before a text, between its markers: a role, a channel, a type, and a recipient in one of them."""

    def __init__(self, role: str) -> None:
        self._parts = {_START: role, _CHANNEL: "", _CONSTRAIN: ""}  # by the marker before each
        self.size = 0

    def open(self, mark: str) -> None:
        """The part behind this marker begins. Of two channels the second counts, with the first one's recipient."""
        if mark == _CHANNEL and (found := _RECIPIENT.search(self._parts[mark])):
            self._parts[_START] += f" to={found[1]}"
        self._parts[mark] = ""

    def add(self, mark: str, text: str) -> None:
        self._parts[mark] += text
        self.size += len(text)

    @property
    def recipient(self) -> str:
        found = _RECIPIENT.search(" ".join(self._parts.values()))
        return found[1] if found else ""

    @property
    def channel(self) -> str:
        """One that is known, or nothing."""
        named = _CHANNEL_NAME.match(self._parts[_CHANNEL])
        return named[1] if named else ""

    @property
    def kind(self) -> type[Content] | type[Reasoning]:
        """Of the text. What is in no channel for users is not shown to them, nor what others than the model say."""
        seen = self.channel in ("commentary", "final") or not self._parts[_CHANNEL].strip()
        return Content if seen and self._role in ("", _ROLE) else Reasoning

    @property
    def rest(self) -> str:
        """What is no part of a header: a text whose <|message|> was forgotten."""
        channel = _RECIPIENT.sub("", _CHANNEL_NAME.sub("", self._parts[_CHANNEL], count=1))
        rest = self._role.removeprefix(_ROLE) + ("" if _TYPE.fullmatch(channel) else channel)
        return rest.strip()

    @property
    def _role(self) -> str:
        return _RECIPIENT.sub("", self._parts[_START]).strip()


class _JsonText:
    """JSON in pieces, with line breaks and the like inside of strings escaped."""

    def __init__(self) -> None:
        self.in_string = self._behind_backslash = False

    def __call__(self, text: str) -> str:
        pieces = []
        for part in _STRING_PARTS.findall(text):
            pieces.append(escaped(part) if self.in_string and part < " " else part)
            if self._behind_backslash:
                self._behind_backslash = False
            elif part == '"':
                self.in_string = not self.in_string
            else:
                self._behind_backslash = self.in_string and part == "\\"
        return "".join(pieces)


class HarmonyParser(Parser):
    """Reads messages one behind the other; texts of a kind are joined by an empty line.

    Markers and headers do not become text, also where an answer is cut off in the middle of one (but for a < alone).
    Text outside of any message is content, and what a header has too much is text of its channel.
    """

    def _run(self) -> Step[None]:
        self._spoken: set[type] = set()  # the kinds of text that there are
        mark = yield from self._body(Reasoning) if self._in_reasoning else self._outside("")
        while (yield from self._more()):
            if mark in (_START, _CHANNEL, _CONSTRAIN):
                mark = yield from self._message(mark)
            elif mark == _MESSAGE:
                mark = yield from self._body(Content)
            else:
                mark = yield from self._outside("\n")

    def _take(self) -> Step[str]:
        rest = self._text[self._at :] if self._ended else ""
        if len(rest) > 1 and any(mark.startswith(rest) for mark in _MARKS):
            self._at = len(self._text)
        return (yield from super()._take())

    def _outside(self, trimmed: str) -> Step[str]:
        """No message: up to the next marker. Text is content, unless a header goes on here whose beginning stands in
        the prompt or was forgotten."""
        space = yield from self._all(SPACE)
        if mark := (yield from self._word(*_MARKS)):
            return mark
        self._raw = []
        begun = yield from self._word("to=", _ROLE)
        if begun == "to=":
            yield from self._all(_NO_SPACE)
        role = "".join(self._raw)
        yield from self._all(SPACE)
        text, self._raw = "".join(self._raw), None
        mark = (yield from self._word(_CHANNEL, _CONSTRAIN, _MESSAGE)) if begun else ""
        if not mark:
            return (yield from self._body(Content, space + text, trimmed))
        return (yield from self._message(mark, role))

    def _message(self, mark: str, role: str = "") -> Step[str]:
        """A message, from behind a marker of its header on; returns the marker that ends it, "" at the end."""
        header, part = _Header(role), mark
        while mark != _MESSAGE and (yield from self._more()):
            if text := (yield from self._some(TEXT)):
                header.add(part, text)
            elif not (mark := (yield from self._word(*_MARKS))):
                header.add(part, (yield from self._take()))
            elif mark in (_CHANNEL, _CONSTRAIN):
                header.open(mark)
                part = mark
            elif mark != _MESSAGE:
                self._open_text(header.kind, header.rest)
                return mark
            if header.size > _MAX_HEADER:
                return (yield from self._body(header.kind, header.rest))
        if mark != _MESSAGE:
            if " " in header.rest:  # one word may be the beginning of anything
                self._open_text(header.kind, header.rest)
            return ""
        if not (name := self._called(header)):
            return (yield from self._body(header.kind))
        self._begin(name)
        return (yield from self._arguments())

    def _called(self, header: _Header) -> str:
        """The function that a message is for, if it is for one."""
        recipient = header.recipient
        if not self._openings or recipient in ("", _ROLE):
            return ""
        if recipient not in self._tools and recipient.startswith(_FUNCTIONS):
            return recipient.removeprefix(_FUNCTIONS)
        return recipient if recipient in self._tools or header.channel == "commentary" else ""

    def _open_text(self, kind: type[Content] | type[Reasoning], text: str, trimmed: str = "\n") -> None:
        """The text of a message begins."""
        self._held[:] = [_BETWEEN] if kind in self._spoken else []
        self._trimmed = trimmed
        self._say(kind, text)

    def _say(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if text:
            self._write(kind, text)
        if text.strip():
            self._spoken.add(kind)

    def _body(self, kind: type[Content] | type[Reasoning], text: str = "", trimmed: str = "\n") -> Step[str]:
        """The text of a message and the marker behind it, "" at the end; `text` is what is read already."""
        self._open_text(kind, text, trimmed)
        some, mark = bool(text.strip()), ""
        while not mark and (yield from self._more()):
            if text := (yield from self._some(TEXT)):
                self._say(kind, text)
                some |= bool(text.strip())
            elif not (mark := (yield from self._word(*_MARKS))):
                self._say(kind, (yield from self._take()))
                some = True
            elif mark in (_MESSAGE, _CONSTRAIN):  # of no header
                mark = ""
        if some and mark in ("", _CALL, _RETURN):
            self._release(kind)
        self._held.clear()
        return mark

    def _arguments(self) -> Step[str]:
        """The arguments of a call and the marker behind it, "" at the end of the text: they are not complete then."""
        json, held, begun = _JsonText(), "", False
        while (yield from self._more()):
            outside = () if json.in_string else (_CHANNEL,)  # a message whose <|start|> was forgotten
            if mark := (yield from self._word(_CALL, _END, _RETURN, _START, *outside)):
                if not begun:
                    self._argue("{}")
                self.complete += 1
                return mark
            piece = (yield from self._some(TEXT)) or (yield from self._take())
            if piece == "<" and not json.in_string and not (yield from self._more()):
                break  # the beginning of a marker
            text = held + json(piece)
            body = text if json.in_string else text.rstrip()
            held = text[len(body) :]
            if body := body if begun else body.lstrip():
                self._argue(body)
                begun = True
        return ""


class HarmonyFormat(ChatFormat):
    """With headers around what other formats write as it is."""

    def shown(self, tools: bool) -> tuple[str, ...]:
        return _MARKS

    def effort(self, effort: str) -> dict[str, Any]:
        return super().effort(effort) | {"reasoning_effort": _EFFORTS.get(effort, effort)}

    def write_answer(self, lark: Lark, inside: bool, json: str = "", calls: str = "") -> str:
        channel, message = lark.mark(_CHANNEL), lark.mark(_MESSAGE)
        rest = f'{lark.until(_END)} {lark.mark(_START)} "{_ROLE}"'
        reasoning = lark.rule("reasoning", f'({channel} "analysis" {message} {rest})*')
        final = f'{channel} "final" {_type(lark)} {message} {json}'
        answer = lark.rule("answer", " | ".join([*([final] if json else []), *([calls] if calls else [])]))
        if inside:
            return f"{rest} {reasoning} {answer}"
        return f"{reasoning} {answer}" + (f" | {json}" if json else "")  # the prompt may end inside of the answer

    def write_calls(self, lark: Lark, tools: Tools, parallel: bool) -> str:
        self.check_names(tools)
        each = [_write_call(lark, name, *tool) for name, tool in tools.items()]
        call = lark.rule("call", " | ".join(each))
        ended = [_END] if lark.ends(_CALL) else [_END, _CALL]
        between = f'({" | ".join(map(lark.mark, ended))}) {lark.mark(_START)} "{_ROLE}"'
        calls = f"{call} ({between} {call})*" if parallel else call
        return lark.rule("calls", calls if lark.ends(_CALL) else f"{calls} {lark.mark(_CALL)}?")

    def for_template(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """One call a message, its results behind it, and what was said before it in `thinking`: templates look at the
        first call alone, name results by the last one, and refuse content beside thoughts. Thoughts before an answer
        are left out, as the models were trained, but for one that goes on."""
        made: list[dict[str, Any]] = []
        rest = [dict(message) for message in messages]
        while rest:
            message = rest.pop(0)
            thought = message.pop("thinking", None) or message.get("reasoning_content")
            calls = message.get("tool_calls")
            if not calls:
                made.append(message if rest or not thought else {**message, "thinking": thought})
                continue
            results = list(takewhile(lambda other: other.get("role") == "tool", rest))
            rest = rest[len(results) :]
            said = [text for text in (thought, message.get("content")) if text]
            message |= {"content": "", "thinking": _BETWEEN.join(said)} if said else {}
            for call in calls:
                made.append({**message, "tool_calls": [call]})
                made += [result for result in results if _answers(result, call)]
                message = {"role": message.get("role"), "content": ""}
            made += [result for result in results if not any(_answers(result, call) for call in calls)]
        return made


def _answers(result: Mapping[str, Any], call: Any) -> bool:
    number = call.get("id") if isinstance(call, Mapping) else None
    return number is not None and result.get("tool_call_id") == number


def _type(lark: Lark) -> str:
    constrain = lark.mark(_CONSTRAIN)
    return lark.rule("type", f'(" "? {constrain} "json" | " json")?')


def _write_call(lark: Lark, name: str, parameters: Mapping[str, Any], strict: bool) -> str:
    """With its recipient in the header of its channel or before it."""
    channel, message, to = lark.mark(_CHANNEL), lark.mark(_MESSAGE), f" to={_FUNCTIONS}{name}"
    behind, before = f"{channel} {literal(f'commentary{to}')}", f'{literal(to)} {channel} "commentary"'
    return f"({behind} | {before}) {_type(lark)} {message} {arguments(lark, parameters, strict)}"


HARMONY = HarmonyFormat(
    "harmony",
    reasoning=(_CHANNEL, _END),
    label=f"analysis{_MESSAGE}",
    call=(_START, _CALL),
    inner=(_CONSTRAIN, _MESSAGE, _RETURN),
    headers=True,
    signs=(_CHANNEL,),
    template_signs=(_START, _MESSAGE),
    write_call=_write_call,
    parser=HarmonyParser,
)
