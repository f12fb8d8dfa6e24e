"""/v1/messages, Anthropic's API: its requests as conversations, its answers as content blocks, whole and as events."""

from __future__ import annotations

import json
import secrets
from typing import Any

from penstock.server.answer import Answer, AnswerChunk
from penstock.server.errors import anthropic_body, as_api_error, dumps
from penstock.server.schema import ContentBlock, Message, Prompted, Turn
from penstock.server.stream import AnswerEvents
from penstock.text.formats.deltas import CallArguments, CallBegin, Content, Delta, Reasoning

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_BILLING = "x-anthropic-billing-header:"  # a line of agents for their own server, another one in every request


def conversation(request: Prompted) -> list[Message]:
    """The messages of a request. Results of tools become messages of their own, before what else a turn says."""
    made: list[dict[str, Any]] = []
    system = request.system
    if isinstance(system, list):
        system = "\n\n".join(block.text for block in system if not block.text.startswith(_BILLING))
    if system:
        made.append({"role": "system", "content": system})
    for turn in request.messages:
        for message in _messages(turn):
            last = made[-1] if made else None
            if last is not None and message["role"] == last["role"] == "user":  # turns of one side are one turn
                last["content"] += "\n\n" + message["content"]
            else:
                made.append(message)
    return [Message.model_validate(message) for message in made]


def _messages(turn: Turn) -> list[dict[str, Any]]:
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in turn.content:
        if block.type == "text":
            texts.append(block.text or "")
        elif block.type == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)})
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
            calls.append({"id": block.id, "function": function})
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
    said: dict[str, Any] = {"role": turn.role, "content": "\n\n".join(texts)}
    if calls:
        said["tool_calls"] = calls
    if thoughts:
        said["reasoning_content"] = "\n\n".join(thoughts)
    return results if results and not texts else [*results, said]


def _result(block: ContentBlock) -> str:
    """What a tool gave back; the model reads that it failed, for which chat templates have no place."""
    content = block.content
    text = content if isinstance(content, str) else "\n".join(part.text or "" for part in content or ())
    return f"Error: {text}" if block.is_error and not text.lower().startswith("error") else text


def continued(messages: list[Message]) -> bool:
    """Whether the answer goes on with the last message."""
    return messages[-1].role == "assistant" and bool(messages[-1].text) and not messages[-1].tool_calls


def tools(request: Prompted) -> list[dict[str, Any]]:
    """Tools as chat completions write them, and so as templates expect them; none where none may be called."""
    made = []
    if request.tool_choice is not None and request.tool_choice.type == "none":
        return made
    for tool in request.tools or ():
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        made.append({"type": "function", "function": function})
    return made


def tool_choice(request: Prompted) -> Any:
    choice = request.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def parallel(request: Prompted) -> bool:
    return request.tool_choice is None or not request.tool_choice.disable_parallel_tool_use


def effort(request: Prompted) -> str | None:
    """OpenAI's word for it. A budget of tokens for thinking is not kept."""
    if request.thinking is not None and request.thinking.type == "disabled":
        return "none"
    return None if request.output_config is None else request.output_config.effort


def response_format(request: Prompted) -> dict[str, Any] | None:
    config = request.output_config
    format = request.output_format or (None if config is None else config.format)
    if format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": format.schema_}}


class MessagesShape:
    """One message. Pieces go in, events come out; `body` is the message as far as it came."""

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self.body: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(prompt_tokens, 0, 0),
        }
        self._arguments = ""  # of the call that is being written
        self._open = False

    async def whole(self, answer: Answer) -> dict[str, Any]:
        for piece in await answer.whole():
            self.take(piece, answer)
        return self.body

    def events(self, answer: Answer) -> AnswerEvents:
        return AnswerEvents(self.take, answer, _event("message_start", message=self.body) + PING)

    def failed(self, error: BaseException) -> bytes:
        """The last event of a message that cannot go on."""
        return b"event: error\ndata: " + dumps(anthropic_body(as_api_error(error))) + b"\n\n"

    def take(self, piece: AnswerChunk, answer: Answer) -> bytes:
        """Add a piece to the body; returns the events that tell of it."""
        out = b"".join(self._add(delta) for delta in piece.deltas)
        if piece.finish_reason is None:
            return out
        out += self._close()
        stop, counted = answer.handle.stop_string, answer.handle.usage
        reason = "stop_sequence" if stop is not None else _REASONS.get(piece.finish_reason, "end_turn")
        numbers = _usage(counted.prompt_tokens, counted.cached_tokens, counted.completion_tokens)
        self.body |= {"stop_reason": reason, "stop_sequence": stop, "usage": numbers}
        ended = {"stop_reason": reason, "stop_sequence": stop}
        return out + _event("message_delta", delta=ended, usage=numbers) + _event("message_stop")

    def _add(self, delta: Delta) -> bytes:
        """More of the block that is being written, or the beginning of the next one."""
        if isinstance(delta, CallBegin):
            return self._begin({"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
        if isinstance(delta, CallArguments):
            self._arguments += delta.text
            return self._more({"type": "input_json_delta", "partial_json": delta.text}) if delta.text else b""
        if isinstance(delta, Reasoning):
            kind, block = "thinking", {"type": "thinking", "thinking": "", "signature": ""}
        else:
            assert isinstance(delta, Content)
            kind, block = "text", {"type": "text", "text": ""}
        content = self.body["content"]
        out = b"" if self._open and content[-1]["type"] == kind else self._begin(block)
        content[-1][kind] += delta.text
        return out + self._more({"type": f"{kind}_delta", kind: delta.text})

    def _begin(self, block: dict[str, Any]) -> bytes:
        out = self._close()
        self.body["content"].append(block)
        self._open, self._arguments = True, ""
        return out + _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        """The block that is being written is complete."""
        if not self._open:
            return b""
        self._open, block = False, self.body["content"][-1]
        out = b""
        if block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        elif block["type"] == "thinking":
            out = self._more({"type": "signature_delta", "signature": ""})
        return out + _event("content_block_stop", index=self._index)

    def _more(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    @property
    def _index(self) -> int:
        return len(self.body["content"]) - 1


def _usage(prompt: int, cached: int, written: int) -> dict[str, int]:
    """As Anthropic counts: tokens of the prompt that were computed before are not among `input_tokens`."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
    }


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call; a call that was cut off has those that are whole: none."""
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _event(kind: str, **values: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + dumps({"type": kind, **values}) + b"\n\n"


def clamped(asked: int, prompt: int, context: int) -> dict[str, str]:
    """The header of an answer whose max_tokens is more than the context has room for."""
    room = context - prompt
    if asked <= room:
        return {}
    return {"x-penstock-warning": f"max_tokens is {asked}, {room} of a context of {context} are left"}
