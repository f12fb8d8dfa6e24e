"""Answers in the shapes of /v1/chat/completions and /v1/completions, whole and as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from penstock.server.answer import Answer, AnswerChunk, Logprob, expert_heat, timings, usage
from penstock.server.errors import as_api_error, dumps
from penstock.text.formats.deltas import CallArguments, CallBegin, Content, Reasoning, gather

_DONE = b"data: [DONE]\n\n"


class ChatShape:
    """/v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, fingerprint: str, prompts: int = 1, logprobs: bool = False) -> None:
        self._about = {
            "id": f"{self.prefix}{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._prompts, self._logprobs = prompts, logprobs

    def whole(self, answers: Sequence[Answer], pieces: Sequence[Sequence[AnswerChunk]]) -> dict[str, Any]:
        """The response for complete answers."""
        choices = [self._choice(answer, own) for answer, own in zip(answers, pieces, strict=True)]
        numbers = {"usage": usage(answers, self._prompts), "timings": timings(answers)} | expert_heat(answers)
        return self._about | {"object": self.whole_object, "choices": choices} | numbers

    def events(self, answers: Sequence[Answer], include_usage: bool) -> ChatEvents:
        """The same as it comes: what each token brings, the reasons of the ends, numbers if asked for, [DONE]."""
        return ChatEvents(self, answers, include_usage)

    def beginning(self, include_usage: bool) -> bytes:
        """The bytes of every event up to its choice: written once, they are the larger part of it."""
        nulls = {"usage": None} if include_usage else {}
        return b"data: " + dumps(self._about | {"object": self.chunk_object} | nulls)[:-1] + b',"choices":['

    def numbers(self, answers: Sequence[Answer]) -> bytes:
        """The event with usage and timings."""
        numbers = {"usage": usage(answers, self._prompts), "timings": timings(answers)}
        return b"data: " + dumps(self._about | {"object": self.chunk_object, "choices": []} | numbers) + b"\n\n"

    def text_around(self, index: int) -> tuple[bytes, bytes]:
        """A choice that brings content and nothing else: the bytes before its text and those behind it."""
        return _around(self.delta(index, AnswerChunk([Content("")])))

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of an answer's first event."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """That of its last one."""
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}

    def delta(self, index: int, piece: AnswerChunk) -> dict[str, Any]:
        """Those between."""
        delta: dict[str, Any] = {}
        for part in piece.deltas:
            if isinstance(part, Content):
                delta["content"] = delta.get("content", "") + part.text
            elif isinstance(part, Reasoning):
                delta["reasoning_content"] = delta["reasoning"] = delta.get("reasoning", "") + part.text
            else:
                _add_call(delta.setdefault("tool_calls", []), part)
        logprobs = None
        if piece.logprob is not None:
            delta = delta or {"content": ""}
            logprobs = {"content": [piece.logprob.as_dict()], "refusal": None}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _choice(self, answer: Answer, pieces: Sequence[AnswerChunk]) -> dict[str, Any]:
        found = gather(delta for piece in pieces for delta in piece.deltas)
        message: dict[str, Any] = {"role": "assistant", "content": found.content, "refusal": None}
        if found.reasoning_content is not None:
            message |= {"reasoning_content": found.reasoning_content, "reasoning": found.reasoning_content}
        if found.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in found.tool_calls
            ]
        logprobs = None
        if self._logprobs:
            logprobs = {"content": [p.logprob.as_dict() for p in pieces if p.logprob is not None], "refusal": None}
        reason = pieces[-1].finish_reason if pieces else "stop"
        return {"index": answer.index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _add_call(calls: list[dict[str, Any]], part: CallBegin | CallArguments) -> None:
    """Add to the tool calls of a delta: the beginning of one, or more of its arguments."""
    if isinstance(part, CallBegin):
        function = {"name": part.name, "arguments": ""}
        calls.append({"index": part.index, "id": part.id, "type": "function", "function": function})
    elif calls and calls[-1]["index"] == part.index:
        calls[-1]["function"]["arguments"] += part.text
    else:
        calls.append({"index": part.index, "function": {"arguments": part.text}})


class TextShape(ChatShape):
    """/v1/completions."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, model: str, fingerprint: str, prompts: int = 1, logprobs: bool = False) -> None:
        super().__init__(model, fingerprint, prompts, logprobs)
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def end(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def delta(self, index: int, piece: AnswerChunk) -> dict[str, Any]:
        logprobs = None if piece.logprob is None else self._table(index, [piece])
        return {"index": index, "text": _text([piece]), "logprobs": logprobs, "finish_reason": None}

    def _choice(self, answer: Answer, pieces: Sequence[AnswerChunk]) -> dict[str, Any]:
        reason = pieces[-1].finish_reason if pieces else "stop"
        logprobs = self._table(answer.index, pieces) if self._logprobs else None
        made = {"index": answer.index, "text": _text(pieces), "logprobs": logprobs, "finish_reason": reason}
        of_prompt = answer.prompt_logprobs()
        return made if of_prompt is None else made | {"prompt_logprobs": of_prompt}

    def _table(self, index: int, pieces: Sequence[AnswerChunk]) -> dict[str, Any]:
        """Log probabilities as the older endpoint writes them; offsets count the characters of the tokens' texts."""
        known = [piece.logprob for piece in pieces if piece.logprob is not None]
        offsets = []
        for entry in known:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(entry.text)
        return {
            "tokens": [entry.text for entry in known],
            "token_logprobs": [entry.logprob for entry in known],
            "top_logprobs": [_by_text(entry) for entry in known],
            "text_offset": offsets,
        }


def _by_text(entry: Logprob) -> dict[str, float | None] | None:
    """The likeliest tokens and the entry's own; of tokens with one text the likeliest."""
    if entry.top is None:
        return None
    return {entry.text: entry.logprob} | {other.text: other.logprob for other in reversed(entry.top)}


class ChatEvents:
    """The events of one or more answers, as they come."""

    def __init__(self, shape: ChatShape, answers: Sequence[Answer], include_usage: bool) -> None:
        self.answers, self.done = answers, False
        self._shape, self._include_usage = shape, include_usage
        self._beginning = shape.beginning(include_usage)
        self._around = [self._text_around(answer.index) for answer in answers]
        self._opening = b"".join(self._event(shape.opening(answer.index)) for answer in answers)
        self._error: Exception | None = None

    def read(self) -> bytes:
        if self._error is not None:
            raise self._error
        events = [self._opening]
        self._opening = b""
        for answer, around in zip(self.answers, self._around, strict=True):
            if answer.ended:
                continue
            try:
                pieces = answer.read()
            except Exception as error:
                self._error = error
                break
            for piece in pieces:
                self._add(events, answer, piece, around)
        self.done = self._error is None and all(answer.ended for answer in self.answers)
        if self.done:
            events.append(self._shape.numbers(self.answers) + _DONE if self._include_usage else _DONE)
        data = b"".join(events)
        if self._error is not None and not data:
            raise self._error
        return data

    def _add(self, events: list[bytes], answer: Answer, piece: AnswerChunk, around: tuple[bytes, bytes]) -> None:
        deltas, logprob = piece.deltas, piece.logprob
        if len(deltas) == 1 and logprob is None and type(deltas[0]) is Content:
            before, behind = around
            events.append(before + encode_basestring_ascii(deltas[0].text).encode() + behind)
        elif deltas or logprob is not None:
            events.append(self._event(self._shape.delta(answer.index, piece)))
        if piece.finish_reason is not None:
            end = self._shape.end(answer.index, piece.finish_reason)
            others = any(not other.ended for other in self.answers)
            numbers = {} if others else {"timings": timings(self.answers)} | expert_heat(self.answers)
            events.append(self._event(end, **numbers))

    def _text_around(self, index: int) -> tuple[bytes, bytes]:
        before, behind = self._shape.text_around(index)
        return self._beginning + before, behind + b"]}\n\n"

    def _event(self, choice: dict[str, Any] | None, **more: Any) -> bytes:
        """An event of one choice; nothing for None."""
        if choice is None:
            return b""
        return self._beginning + dumps(choice) + (b"]," + dumps(more)[1:] if more else b"]}") + b"\n\n"


def _around(choice: dict[str, Any]) -> tuple[bytes, bytes]:
    """A choice without text, in two parts between which the text stands, a JSON string with its quotes."""
    before, empty, behind = dumps(choice).partition(b'""')
    assert empty
    return before, behind


def _text(pieces: Sequence[AnswerChunk]) -> str:
    return "".join(delta.text for piece in pieces for delta in piece.deltas if isinstance(delta, Content))


def failed(error: BaseException) -> bytes:
    """The last event of a stream that cannot go on."""
    return b"data: " + dumps(as_api_error(error).body) + b"\n\n"
