"""The bytes of a request: read within limits of size and time, counted, and made a request model."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import TypeVar

import numpy as np
from pydantic import BaseModel
from starlette.requests import Request

from penstock.child import Child, ChildOutOfMemory, ChildTimeout
from penstock.server.errors import ApiError, unavailable
from penstock.server.limits import Limits
from penstock.server.validate import built, parsed

_Model = TypeVar("_Model", bound=BaseModel)

_LARGE = 1 << 20  # bytes of a body that a process of its own looks at first
_STEP = 1 << 20  # bytes that are counted at a time
_CHILD_MEMORY = 128 << 20  # a body of 16 MiB takes 160: one character beyond U+FFFF makes each of a text's four bytes
_CHILD_SECONDS = 20.0


class Bodies:
    """Reads bodies within limits of size and time, for one request and for all that arrive at once.

    Large ones are parsed and checked in a process of its own before they are here: it starts with the first of them
    and is ended by `close`.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held = 0  # bytes of requests that are arriving or being looked at
        self._child = Child("penstock.server.validate:checked", memory=_CHILD_MEMORY, seconds=_CHILD_SECONDS)

    def close(self) -> None:
        self._child.close()

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """The body, while it is looked at. Raises ApiError 408, 413, 415, 503; Disconnected if the client goes away."""
        body = bytearray()
        try:
            await self._arrive(request, body)
            yield body
        finally:
            self._held -= len(body)

    async def _arrive(self, request: Request, body: bytearray) -> None:
        _check_type(request.headers.get("content-type"))
        limit, length = self._limits.body, request.headers.get("content-length")
        if length is not None and int(length) > limit:  # h11 has checked that it is a number
            raise _too_large(limit)
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                more = True
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise Disconnected
                    part, more = message.get("body", b""), message.get("more_body", False)
                    body += part
                    self._held += len(part)
                    if len(body) > limit:
                        raise _too_large(limit)
                    if self._held > self._limits.bodies:
                        raise unavailable("too much data is arriving at once", "overloaded", retry_after=1)
        except TimeoutError:
            seconds = self._limits.body_seconds
            raise ApiError(408, f"the body did not arrive within {seconds:g} s", code="request_timeout") from None

    def parsed(self, body: bytearray, model: type[_Model]) -> _Model:
        """The request that a body holds. Raises ApiError 400, naming the field, and 413 for too many values."""
        found, limit = values(body), self._limits.values
        if found > limit:
            message = f"the body holds {found} values, expected at most {limit}"
            raise ApiError(413, message, code="request_too_large")
        if len(body) <= _LARGE:
            return parsed(body, model)
        try:
            answer = self._child.call(f"{model.__name__}\n".encode() + body)
        except ChildTimeout:
            raise _too_costly(f"takes longer than {_CHILD_SECONDS:g} s") from None
        except ChildOutOfMemory:
            raise _too_costly(f"needs more than {_CHILD_MEMORY >> 20} MiB of memory") from None
        if answer:
            raise ApiError(**json.loads(answer))
        return built(body, model)


class Disconnected(Exception):
    """The client has gone away; its answer is not waited for."""


def values(body: bytes | bytearray) -> int:
    """How many values JSON text has at most: one, one for each comma, and one for each list or object, outside strings.

    Up to the first mistake in it at least, which is as far as a parser comes.
    """
    found, inside, escaping = 1, False, False
    for start in range(0, len(body), _STEP):
        data = np.frombuffer(body, np.uint8, min(_STEP, len(body) - start), start)
        quotes = data == ord('"')
        backslashes = data == ord("\\")
        if escaping or backslashes.any():
            escaped = _escaped(backslashes, escaping)
            escaping = bool(backslashes[-1] and not escaped[-1])
            quotes &= ~escaped
        text = np.logical_xor.accumulate(quotes) ^ inside  # from a quote on, up to the next
        inside = bool(text[-1])
        marks = (data == ord(",")) | (data == ord("[")) | (data == ord("{"))
        found += int(np.count_nonzero(marks & ~text))
    return found


def _escaped(backslashes: np.ndarray, first: bool) -> np.ndarray:
    """Which bytes stand behind a backslash that is not escaped itself: behind an odd number of them."""
    places = np.arange(len(backslashes), dtype=np.int32)
    before = np.maximum.accumulate(np.where(backslashes, np.int32(-2 if first else -1), places))
    escaped = np.empty(len(backslashes), bool)
    escaped[0] = first
    odd = (places - before) % 2 == 1  # in the run of backslashes that ends here
    escaped[1:] = (backslashes & odd)[:-1]
    return escaped


def _check_type(value: str | None) -> None:
    if value is None:
        return
    kind, _, parameters = value.partition(";")
    charset = parameters.partition("charset=")[2].partition(";")[0].strip().strip('"').lower()
    if kind.strip().lower() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise ApiError(
            415, f"Content-Type is {value[:80]!r}, expected application/json in UTF-8", code="unsupported_media_type"
        )


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")


def _too_costly(reason: str) -> ApiError:
    return ApiError(413, f"the body {reason} to be checked", code="request_too_large")
