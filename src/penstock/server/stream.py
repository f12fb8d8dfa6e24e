"""Answers that leave while they are made (server-sent events), and answers that end when their client has gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from penstock.engine.response import ResponseHandle
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


async def awaited(work: Awaitable[_T], receive: Receive, tickets: Sequence[ResponseHandle], limits: Limits) -> _T:
    """The result of `work`, as long as the client is there and in time; else the tickets are cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, timeout=limits.request_seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Disconnected if gone.done() else _late(limits)
    finally:
        for ticket in tickets:
            ticket.cancel()
        await _ended(task, gone)


class EventStream:
    """An ASGI response that sends what `events` yields, each a whole event (or several).

    The tickets are cancelled as soon as the client is gone or the request has taken too long. `failed` turns an error
    into a last event.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        failed: Callable[[BaseException], bytes],
        tickets: Sequence[ResponseHandle],
        limits: Limits,
        ping_seconds: float,
    ) -> None:
        self._events, self._failed, self._tickets, self._limits = events, failed, tickets, limits
        self._ping = ping_seconds
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
                    await self._send(send, _PING)
            pump.result()
        finally:
            for ticket in self._tickets:
                ticket.cancel()
            await _ended(pump, gone)
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            async for event in self._events:
                await self._send(send, event)
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
