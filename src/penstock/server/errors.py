"""Errors as every endpoint answers them: {"error": {"message", "type", "param", "code"}}, with a matching status."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.errors import (
    Cancelled,
    CheckpointError,
    EngineDied,
    InvalidArgument,
    OutOfMemory,
    PenstockError,
    QueueFull,
)

THREAD_UNSUPPORTED = "thread_unsupported_request"  # Anthropic's word

_FOLDERS = re.compile(r"^.*/(?=[^/]*: )")  # up to the last slash before a name and what is said of it

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that is refused: status, message, the field it is about, a word that a program can look for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_ANTHROPIC_TYPES = _TYPES | {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The body of an error as Anthropic's API has it."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    details = {"details": {"error_code": error.code}} if error.code == THREAD_UNSUPPORTED else {}
    return {"type": "error", "error": {"type": kind, "message": error.message, **details}}


def unavailable(message: str, code: str, retry_after: int | None = None) -> ApiError:
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    return ApiError(503, message, code=code, headers=headers)


def as_api_error(error: BaseException) -> ApiError:
    """What a client gets to know about an exception of the engine; details of unexpected ones stay in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        wait = {"retry-after": str(max(1, error.retry_after))}
        return ApiError(429, one_line(error), code="queue_full", headers=wait)
    if isinstance(error, Cancelled):
        return unavailable(one_line(error), "cancelled")
    if isinstance(error, EngineDied):
        return unavailable(one_line(error), "engine_died", retry_after=1)
    if isinstance(error, OutOfMemory):
        return unavailable(one_line(error), "out_of_memory", retry_after=1)
    if isinstance(error, InvalidArgument):
        return ApiError(400, one_line(error), code="invalid_value")
    if isinstance(error, CheckpointError):
        return unavailable(f"the model's weights cannot be read: {without_folders(error)}", "weights_damaged")
    if isinstance(error, PenstockError):
        return ApiError(500, one_line(error), code=type(error).__name__)
    return ApiError(500, "the server failed to answer this request; its log says why", code="internal_error")


def without_folders(error: BaseException) -> str:
    """A message that begins with a file, without the folders that it is in: they are no client's business."""
    return _FOLDERS.sub("", one_line(error))


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def dumps(value: Any) -> bytes:
    """Compact JSON in ASCII: no client can take a character of it for the end of a line."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
