"""HTTP/1.1 by uvicorn and h11, with limits on heads, on time and on the number of connections, and our error shape."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from penstock.server.errors import ApiError, dumps, unavailable
from penstock.server.limits import Limits

# Unread bytes that the socket and the transport each keep. By itself Linux keeps up to 4 MiB for a client that reads
# nothing, more than most answers: it would never be seen to lag behind.
_UNREAD = 16 << 10
_START = b"HTTP/1.1 "  # how every response begins, whatever it will say

# seconds after its last byte at which a client that sends no more is written to, to see whether it is still there
_SIGNS = (0.0, 0.05, 0.2, 0.8, 3.0, 12.0, 50.0, 200.0, 800.0)


def protocol_of(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol class for a server with these limits."""
    return type("LimitedProtocol", (_Protocol,), {"limits": limits})


class _Connection(h11.Connection):
    """h11's, which can have written the first bytes of a response before there is one, and frames the parts of a
    chunked body itself: h11 takes 7 µs for one to find that nothing changed.
    """

    _ahead = 0
    _chunked = False  # the response under way

    def begin(self) -> bytes:
        """The next byte of the response, of those that are always the same."""
        self._ahead += 1
        return _START[self._ahead - 1 : self._ahead]

    def send(self, event: Any) -> bytes | None:  # type: ignore[override]
        if self._chunked and type(event) is h11.Data and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        data: bytes | None = super().send(event)
        if isinstance(event, h11.Response):
            self._chunked = b"\r\ntransfer-encoding: chunked\r\n" in (data or b"").lower()
        if data:
            data, self._ahead = data[self._ahead :], 0
        return data


class _Protocol(H11Protocol):
    limits: Limits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False  # uvicorn's lines have queries in them; ours do not
        self.conn = _Connection(h11.SERVER, self.limits.headers)
        self._half_closed = False
        self._sign_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(_UNREAD)
        made = transport.get_extra_info("socket")
        if made.family == socket.AF_UNIX:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD)
        elif hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux and macOS
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNREAD)
        if len(self.connections) > self.limits.connections:
            message = f"there are {self.limits.connections} connections already"
            self._refuse(unavailable(message, "too_many_connections", retry_after=1))
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._linger_timer, self._unread_timer, self._sign_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_head_timer()
        elif self.conn.trailing_data[0] and not self.transport.is_closing():
            self._start_head_timer()

    def on_response_complete(self) -> None:
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._linger_timer = self.loop.call_later(self.limits.linger_seconds, self._end_lingering, self.cycle)
        super().on_response_complete()
        if self._half_closed:
            if self._in_whole():  # the next one, which came with this one
                self._sign(0, self.cycle)
            else:
                self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. It may have gone, or have closed its half and wait for the answer to a request
        that is here in whole; a write shows which: one that is gone resets the connection. TLS has no such halves.
        """
        if not self._in_whole() or self.transport.get_extra_info("sslcontext") is not None:
            return False
        if not self._half_closed:
            self._half_closed = True
            self._sign(0, self.cycle)
        return True

    def _in_whole(self) -> bool:
        """Whether a request has arrived to its end and is not answered yet."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _sign(self, number: int, cycle: Any) -> None:
        """Write a byte that is part of any response, and more of them later, until the response itself begins."""
        if self.cycle is not cycle or cycle.response_started or self.transport.is_closing():
            return
        self.transport.write(self.conn.begin())
        if number + 1 < len(_SIGNS):
            wait = _SIGNS[number + 1] - _SIGNS[number]
            self._sign_timer = self.loop.call_later(wait, self._sign, number + 1, cycle)

    def pause_writing(self) -> None:
        """Called when so much is unread that no more should be written."""
        super().pause_writing()
        self._start_unread_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_unread_timer()  # what is closed waits until all is read

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn where h11 could not make sense of the bytes."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        self._refuse(ApiError(status, f"not a valid HTTP request: {str(error or msg)[:200]}", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer, if that is still possible, and close."""
        self._stop_head_timer()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = dumps(error.body)
            headers = [
                *error.headers.items(),
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            status = error.status
            events = (
                h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what its endpoint still writes goes nowhere
            self.cycle.message_event.set()
        self.transport.close()
        self._start_unread_timer()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.header_seconds, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_unread_timer(self) -> None:
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            seconds = self.limits.header_seconds
            self._refuse(ApiError(408, f"no request arrived within {seconds:g} s", code="request_timeout"))

    def _end_lingering(self, cycle: Any) -> None:
        if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()
