"""Answers in the shapes of /v1/chat/completions and /v1/completions, whole and as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from penstock.server.answer import Answer, AnswerChunk, merged, timings, usage
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
        numbers = {"usage": usage(answers, self._prompts), "timings": timings(answers)}
        return self._about | {"object": self.whole_object, "choices": choices} | numbers

    async def events(self, answers: Sequence[Answer], include_usage: bool) -> AsyncGenerator[bytes, None]:
        """The same as it comes: what each token brings, the reasons of the ends, numbers if asked for, [DONE]."""
        nulls = {"usage": None} if include_usage else {}
        # written once: it is the larger part of every event
        beginning = b"data: " + dumps(self._about | {"object": self.chunk_object} | nulls)[:-1] + b',"choices":['
        if opening := b"".join(_event(beginning, self._opening(answer.index)) for answer in answers):
            yield opening
        left = len(answers)
        async for answer, piece in merged(answers):
            event = b""
            if piece.deltas or piece.logprob is not None:
                event = _event(beginning, self._delta(answer.index, piece))
            if piece.finish_reason is not None:
                left -= 1
                more = {} if left else {"timings": timings(answers)}
                event += _event(beginning, self._end(answer.index, piece.finish_reason), **more)
            if event:
                yield event
        closing = b""
        if include_usage:
            numbers = {"usage": usage(answers, self._prompts), "timings": timings(answers)}
            closing = b"data: " + dumps(self._about | {"object": self.chunk_object, "choices": []} | numbers) + b"\n\n"
        yield closing + _DONE

    def _opening(self, index: int) -> dict[str, Any] | None:
        """The choice of an answer's first event."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _end(self, index: int, reason: str) -> dict[str, Any]:
        """That of its last one."""
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}

    def _delta(self, index: int, piece: AnswerChunk) -> dict[str, Any]:
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

    def _opening(self, index: int) -> dict[str, Any] | None:
        return None

    def _end(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def _delta(self, index: int, piece: AnswerChunk) -> dict[str, Any]:
        logprobs = None if piece.logprob is None else self._table(index, [piece])
        return {"index": index, "text": _text([piece]), "logprobs": logprobs, "finish_reason": None}

    def _choice(self, answer: Answer, pieces: Sequence[AnswerChunk]) -> dict[str, Any]:
        reason = pieces[-1].finish_reason if pieces else "stop"
        logprobs = self._table(answer.index, pieces) if self._logprobs else None
        return {"index": answer.index, "text": _text(pieces), "logprobs": logprobs, "finish_reason": reason}

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
            "top_logprobs": [{other.text: other.logprob for other in entry.top} for entry in known],
            "text_offset": offsets,
        }


def _text(pieces: Sequence[AnswerChunk]) -> str:
    return "".join(delta.text for piece in pieces for delta in piece.deltas if isinstance(delta, Content))


def _event(beginning: bytes, choice: dict[str, Any] | None, **more: Any) -> bytes:
    """An event of one choice; nothing for None."""
    if choice is None:
        return b""
    return beginning + dumps(choice) + (b"]," + dumps(more)[1:] if more else b"]}") + b"\n\n"


def failed(error: BaseException) -> bytes:
    """The last event of a stream that cannot go on."""
    return b"data: " + dumps(as_api_error(error).body) + b"\n\n"
