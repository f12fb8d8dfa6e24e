"""/openapi.json: the endpoints and their requests, from the same models that check them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from penstock._version import __version__
from penstock.server import schema

_REFUSALS = {
    "400": "A value that is not taken; `param` names it.",
    "401": "No key, or a wrong one.",
    "403": "A host or an origin that may not call.",
    "404": "No such model or path.",
    "405": "No method of this path.",
    "408": "The request did not arrive in time.",
    "413": "The request is too large.",
    "415": "The request is no JSON.",
    "429": "Too many requests are waiting; Retry-After says when to come again.",
    "500": "The server failed.",
    "503": "The model is not loaded (yet), memory is short, or the server is about to end.",
    "504": "The answer took too long.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required.split(), "properties": properties}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


_TEXT, _INT = {"type": "string"}, {"type": "integer"}
_USAGE = _object("prompt_tokens completion_tokens total_tokens", prompt_tokens=_INT, completion_tokens=_INT)
_REASON = {"enum": ["stop", "length", "tool_calls", "content_filter"]}
_MESSAGE = _object("role content", role={"const": "assistant"}, content={"type": ["string", "null"]})
_CHAT = _object(
    "id object created model choices usage",
    id=_TEXT,
    object={"const": "chat.completion"},
    choices=_list(_object("index message finish_reason", index=_INT, message=_MESSAGE, finish_reason=_REASON)),
    usage=_USAGE,
)
_COMPLETION = _object(
    "id object created model choices usage",
    id=_TEXT,
    object={"const": "text_completion"},
    choices=_list(_object("index text finish_reason", index=_INT, text=_TEXT, finish_reason=_REASON)),
    usage=_USAGE,
)
_VECTOR = {"anyOf": [_list({"type": "number"}), _TEXT]}
_EMBEDDINGS = _object(
    "object data model usage",
    object={"const": "list"},
    data=_list(_object("object index embedding", object={"const": "embedding"}, index=_INT, embedding=_VECTOR)),
    model=_TEXT,
    usage=_object("prompt_tokens total_tokens", prompt_tokens=_INT, total_tokens=_INT),
)
_RESPONSE = _object("id object created_at status output usage", object={"const": "response"}, output=_list({}))
_ANTHROPIC = _object(
    "id type role content model stop_reason usage",
    type={"const": "message"},
    content=_list({}),
    usage=_object("input_tokens output_tokens", input_tokens=_INT, output_tokens=_INT),
)
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {"type": {"const": "error"}, "error": _object("type message", type=_TEXT, message=_TEXT)},
}
_MODEL = _object("id object created owned_by", id=_TEXT, object={"const": "model"}, created=_INT)
_EVENTS = {"text/event-stream": {"schema": {}}}


def _json(answer: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": answer}}


_POSTS: dict[str, tuple[str, type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": ("Answer a conversation.", schema.ChatRequest, _json(_CHAT) | _EVENTS),
    "/v1/completions": ("Continue a text.", schema.CompletionRequest, _json(_COMPLETION) | _EVENTS),
    "/v1/embeddings": ("Embed texts.", schema.EmbeddingRequest, _json(_EMBEDDINGS)),
    "/v1/responses": ("Answer a conversation, in items.", schema.ResponsesRequest, _json(_RESPONSE) | _EVENTS),
    "/v1/messages": ("Answer as Anthropic's API does.", schema.MessagesRequest, _json(_ANTHROPIC) | _EVENTS),
    "/v1/messages/count_tokens": (
        "Tokens of such a conversation.",
        schema.CountTokensRequest,
        _json(_object("input_tokens", input_tokens=_INT)),
    ),
    "/tokenize": ("Text to token ids.", schema.TokenizeRequest, _json(_object("tokens", tokens=_list({})))),
    "/detokenize": ("Token ids to text.", schema.DetokenizeRequest, _json(_object("content", content=_TEXT))),
    "/apply-template": (
        "A conversation as the model's template writes it.",
        schema.TemplateRequest,
        _json(_object("prompt", prompt=_TEXT)),
    ),
}
_GETS: dict[str, tuple[str, dict[str, Any]]] = {
    "/health": ("Whether the model is ready.", _json(_object("status progress", status=_TEXT))),
    "/v1/models": ("The model and its names.", _json(_object("object data", data=_list(_MODEL)))),
    "/v1/models/{model}": ("One of them.", _json(_MODEL)),
    "/props": ("What the server was started with.", _json({"type": "object"})),
    "/tokenizer_info": ("Special tokens and the chat template.", _json({"type": "object"})),
    "/metrics": ("Counters for Prometheus.", {"text/plain": {"schema": _TEXT}}),
}


def described(metrics: bool = True, root_path: str = "") -> dict[str, Any]:
    """The OpenAPI description; of a server that a proxy has below `root_path`."""
    models = {model for _, model, _ in _POSTS.values()}
    named = sorted(models, key=lambda model: model.__name__)
    references, definitions = models_json_schema(
        [(model, "validation") for model in named], ref_template="#/components/schemas/{model}"
    )
    schemas = {**definitions.get("$defs", {}), "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    for model in named:
        if issubclass(model, schema.Request):
            _add_ignored(schemas[model.__name__])
    paths: dict[str, Any] = {}
    for path, (summary, model, content) in _POSTS.items():
        body = {"required": True, "content": _json(references[model, "validation"])}
        error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
        paths[path] = {"post": _operation(summary, content, error) | {"requestBody": body}}
    for path, (summary, content) in _GETS.items():
        if path != "/metrics" or metrics:
            paths[path] = {"get": _operation(summary, content)}
    paths["/v1/models/{model}"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "penstock", "version": __version__},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(summary: str, content: dict[str, Any], error_name: str = "Error") -> dict[str, Any]:
    error = _json({"$ref": f"#/components/schemas/{error_name}"})
    refusals = {status: {"description": text, "content": error} for status, text in _REFUSALS.items()}
    return {"summary": summary, "responses": {"200": {"description": "Done.", "content": content}, **refusals}}


def _add_ignored(described: dict[str, Any]) -> None:
    """Beside the properties: fields of other servers' requests that are accepted as well."""
    described["x-ignored"] = sorted(schema.IGNORED)
    described["x-accepted-values"] = {name: [None, *values] for name, values in sorted(schema.NEUTRAL.items())}
