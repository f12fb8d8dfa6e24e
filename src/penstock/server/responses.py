"""/v1/responses: its requests as conversations, its answers as items, whole and as events."""

from __future__ import annotations

import secrets
import time
from typing import Any

from penstock.server.answer import Answer, AnswerChunk, usage
from penstock.server.errors import ApiError, as_api_error, dumps
from penstock.server.schema import Message, ResponsesRequest
from penstock.server.stream import AnswerEvents
from penstock.text.formats.deltas import CallArguments, CallBegin, Content, Delta, Reasoning


def conversation(request: ResponsesRequest) -> list[Message]:
    """The messages of a request. Calls that follow each other belong to one message of the assistant, and reasoning to
    the message or the call behind it.
    """
    made: list[dict[str, Any]] = []
    thought = ""
    if request.instructions:
        made.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        made.append({"role": "user", "content": request.input})
        return [Message.model_validate(message) for message in made]
    for item in request.input:
        if item.type == "reasoning":
            thought = _text(item.content)
            continue
        if item.type == "function_call":
            if not made or made[-1]["role"] != "assistant":
                made.append({"role": "assistant", "content": ""})
            function = {"name": item.name, "arguments": item.arguments or "{}"}
            made[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
        elif item.type == "function_call_output":
            made.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        else:
            made.append({"role": item.role, "content": _text(item.content)})
        if thought and made[-1]["role"] == "assistant":
            made[-1].setdefault("reasoning_content", thought)
        thought = ""
    if all(message["role"] == "system" for message in made):
        raise ApiError(400, "input has no message, expected one to answer", param="input", code="invalid_value")
    return [Message.model_validate(message) for message in made]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.text or "" for part in content or ())


def tools(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Tools as chat completions write them, and so as templates expect them."""
    fields = {"name", "description", "parameters", "strict"}
    return [
        {"type": "function", "function": tool.model_dump(include=fields, exclude_none=True)}
        for tool in request.tools or ()
    ]


def tool_choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    return {"type": "function", "function": {"name": choice.name}}


def response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    format = request.text.format if request.text is not None else None
    if format is None:
        return None
    if format.type != "json_schema":
        return {"type": format.type}
    return {"type": "json_schema", "json_schema": format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)}


class ResponsesShape:
    """One response. Pieces go in, events come out; `body` is the response as far as it came."""

    def __init__(self, request: ResponsesRequest, model: str, sampling: dict[str, Any]) -> None:
        chosen = request.tool_choice
        format = request.text.format if request.text is not None else None
        self.body: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": {},
            "model": model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": False,
            "temperature": sampling["temperature"],
            "text": {
                "format": {"type": "text"} if format is None else format.model_dump(by_alias=True, exclude_none=True)
            },
            "tool_choice": chosen if isinstance(chosen, str) else chosen.model_dump() if chosen else "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in request.tools or ()],
            "top_p": sampling["top_p"],
            "truncation": "disabled",
            "usage": None,
        }
        self._item: dict[str, Any] | None = None  # that is being written
        self._number = 0

    async def whole(self, answer: Answer) -> dict[str, Any]:
        for piece in await answer.whole():
            self.take(piece, answer)
        return self.body

    def events(self, answer: Answer) -> AnswerEvents:
        opening = self._event("response.created", response=self.body)
        return AnswerEvents(self.take, answer, opening + self._event("response.in_progress", response=self.body))

    def failed(self, error: BaseException) -> bytes:
        """The last events of a response that cannot go on."""
        told = as_api_error(error)
        body = told.body["error"]
        self.body |= {"status": "failed", "error": {"code": body["code"] or "server_error", "message": told.message}}
        event = self._event("response.failed", response=self.body)
        return event + self._event("error", code=body["code"], message=told.message, param=body["param"])

    def take(self, piece: AnswerChunk, answer: Answer) -> bytes:
        """Add a piece to the body; returns the events that tell of it."""
        out = b"".join(self._add(delta) for delta in piece.deltas)
        if piece.finish_reason is None:
            return out
        cut = piece.finish_reason == "length"
        out += self._close("incomplete" if cut else "completed")
        counted = usage([answer])
        self.body["usage"] = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": counted["completion_tokens_details"],
            "total_tokens": counted["total_tokens"],
        }
        self.body["status"] = "incomplete" if cut else "completed"
        if cut:
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
        return out + self._event(f"response.{self.body['status']}", response=self.body)

    # -- items -------------------------------------------------------------------------------------------------------

    def _add(self, delta: Delta) -> bytes:
        """More of the item that is being written, or the beginning of the next one."""
        if isinstance(delta, CallBegin):
            item = {"id": _id("fc"), "type": "function_call", "call_id": delta.id, "name": delta.name, "arguments": ""}
            return self._open(item | {"status": "in_progress"})
        if isinstance(delta, CallArguments):
            assert self._item is not None
            self._item["arguments"] += delta.text
            return self._about_item("response.function_call_arguments.delta", delta=delta.text)
        if isinstance(delta, Reasoning):
            out = self._begin("reasoning")
            assert self._item is not None
            self._item["content"][0]["text"] += delta.text
            return out + self._about_item("response.reasoning_text.delta", content_index=0, delta=delta.text)
        assert isinstance(delta, Content)
        out = self._begin("message")
        assert self._item is not None
        self._item["content"][0]["text"] += delta.text
        return out + self._about_item("response.output_text.delta", content_index=0, delta=delta.text, logprobs=[])

    def _begin(self, kind: str) -> bytes:
        """Make sure that an item of this kind is being written."""
        if self._item is not None and self._item["type"] == kind:
            return b""
        if kind == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            item = {"id": _id("rs"), "type": kind, "summary": [], "content": [], "status": "in_progress"}
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": _id("msg"), "type": kind, "role": "assistant", "content": [], "status": "in_progress"}
        out = self._open(item)
        item["content"].append(part)
        return out + self._about_item("response.content_part.added", content_index=0, part=part)

    def _open(self, item: dict[str, Any]) -> bytes:
        out = self._close("completed")
        self._item = item
        self.body["output"].append(item)
        return out + self._about_item("response.output_item.added", item=item)

    def _close(self, status: str) -> bytes:
        """The item that is being written is complete."""
        item = self._item
        if item is None:
            return b""
        item["status"] = status
        if item["type"] == "function_call":
            out = self._about_item(
                "response.function_call_arguments.done", arguments=item["arguments"], name=item["name"]
            )
        else:
            part = item["content"][0]
            name, more = ("output_text", {"logprobs": []}) if item["type"] == "message" else ("reasoning_text", {})
            out = self._about_item(f"response.{name}.done", content_index=0, text=part["text"], **more)
            out += self._about_item("response.content_part.done", content_index=0, part=part)
        out += self._about_item("response.output_item.done", item=item)
        self._item = None
        return out

    def _about_item(self, kind: str, **values: Any) -> bytes:
        assert self._item is not None
        about = {} if "item" in values else {"item_id": self._item["id"]}
        return self._event(kind, output_index=len(self.body["output"]) - 1, **about, **values)

    def _event(self, kind: str, **values: Any) -> bytes:
        data = dumps({"type": kind, "sequence_number": self._number, **values})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
