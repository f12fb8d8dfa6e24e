"""What a parser makes of a model's text: deltas as they come, and the message that they make together."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field


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
