"""Answers that leave while they are made (server-sent events), and answers that end when their client has gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from penstock.engine.response import ResponseHandle, wait_any
from penstock.server.answer import Answer, AnswerChunk
from penstock.server.body import Disconnected
from penstock.server.errors import ApiError
from penstock.server.limits import Limits

_T = TypeVar("_T")

_PING = b": ping\n\n"  # a comment: every reader of events leaves it out
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes on what it gets, at once
]


class Events(Protocol):
    """The events of a stream. answers: of whose tokens they are made. done: all were read."""

    @property
    def answers(self) -> Sequence[Answer]: ...

    @property
    def done(self) -> bool: ...

    def read(self) -> bytes:
        """Those that are ready, b"" if none are. Raises what ended an answer, once the events before it were read."""
        ...


class AnswerEvents:
    """The events of one answer, as they come: those of its beginning, then what `take` makes of each piece."""

    def __init__(self, take: Callable[[AnswerChunk, Answer], bytes], answer: Answer, opening: bytes) -> None:
        self.answers = [answer]
        self._take, self._answer, self._opening = take, answer, opening

    @property
    def done(self) -> bool:
        return self._answer.ended and not self._opening

    def read(self) -> bytes:
        opening, self._opening = self._opening, b""
        return opening or b"".join(self._take(piece, self._answer) for piece in self._answer.read())


async def awaited(work: Awaitable[_T], receive: Receive, handles: Sequence[ResponseHandle], limits: Limits) -> _T:
    """The result of `work`, as long as the client is there and in time; else the requests are cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, timeout=limits.request_seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Disconnected if gone.done() else _late(limits)
    finally:
        for handle in handles:
            handle.cancel()
        await _ended(task, gone)


class EventStream:
    """An ASGI response that sends events as they come, those that are ready together with one write.

    The requests are cancelled as soon as the client is gone or the answer has taken too long. `failed` turns an error
    into a last event. ping: what keeps a silent stream alive.
    """

    def __init__(
        self,
        events: Events,
        failed: Callable[[BaseException], bytes],
        limits: Limits,
        ping_seconds: float,
        ping: bytes = _PING,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._events, self._failed, self._limits = events, failed, limits
        self._ping, self._ping_event = ping_seconds, ping
        self._headers = [*_HEADERS, *((name.encode(), text.encode()) for name, text in (headers or {}).items())]
        self._written = time.monotonic()
        self._writing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        end = time.monotonic() + self._limits.request_seconds
        tick = min(5.0, self._ping / 2, self._limits.request_seconds / 2)
        pump, gone = asyncio.create_task(self._pump(send)), asyncio.create_task(_gone(receive))
        try:
            while not pump.done():
                await asyncio.wait({pump, gone}, timeout=tick, return_when=asyncio.FIRST_COMPLETED)
                now = time.monotonic()
                if pump.done():
                    break
                if gone.done():
                    raise Disconnected
                if self._writing:
                    continue  # the connection ends if that does not come to an end
                if now > end:
                    await _ended(pump)
                    await self._send(send, self._failed(_late(self._limits)), more=False)
                    return
                if now - self._written > self._ping:
                    await self._send(send, self._ping_event)
            pump.result()
        finally:
            for answer in self._events.answers:
                answer.handle.cancel()
            await _ended(pump, gone)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        try:
            while True:
                if data := self._events.read():
                    await self._send(send, data)
                if self._events.done:
                    break
                await wait_any([answer.handle for answer in self._events.answers if not answer.ended])
        except Exception as error:
            await self._send(send, self._failed(error))
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        self._writing = True
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._writing, self._written = False, time.monotonic()


async def _gone(receive: Receive) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Task[object] | asyncio.Future[object]) -> None:
    """Cancel tasks and wait until they have ended, however they do."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _late(limits: Limits) -> ApiError:
    return ApiError(504, f"the answer was not complete after {limits.request_seconds:g} s", code="timeout")
