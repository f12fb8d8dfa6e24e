"""A client's side of a request: chunks on their way from the engine's thread to a thread or an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

from penstock.engine.generation import Chunk, Completion, Request, Timings, Usage


class Ticket:
    """A request on its way: read its chunks with `for` or `async for` (one reader), or wait for the whole.

    Garbage-collecting the ticket cancels the request.
    """

    def __init__(self, request: Request, feed: Feed, cancel: Callable[[], None]) -> None:
        self.request = request
        self._feed = feed
        self._cancel = cancel
        weakref.finalize(self, _forget, feed).atexit = False

    @property
    def state(self) -> str:
        """ "waiting", "prompt", "generating" or "done"."""
        return self._feed.state

    @property
    def usage(self) -> Usage:
        """Tokens so far; `cached_tokens` is known from state "generating" on."""
        return self.request.usage

    @property
    def timings(self) -> Timings:
        """Seconds so far, with `queue_seconds`."""
        return self.request.timings

    def cancel(self) -> None:
        """End the request within one token, from any thread. Its chunks then end as if it were done."""
        self._cancel()

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they come. Raises what the request failed with, or Cancelled if others ended it."""
        return self

    def __next__(self) -> Chunk:
        chunk = self._feed.get()
        if chunk is None:
            raise StopIteration
        return chunk

    def __aiter__(self) -> Ticket:
        """The same in an event loop."""
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self._feed.get_async()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end: the whole answer, also where chunks of it were read (finish_reason "cancelled" after
        `cancel`). Raises as iteration does, and TimeoutError; the request then goes on.
        """
        self._feed.whole(timeout)
        return self.request.completion()

    async def wait(self) -> Completion:
        """`result` in an event loop. If the task is cancelled meanwhile, the request goes on: call `cancel`."""
        await self._feed.whole_async()
        return self.request.completion()


class Feed:
    """One writer, one reader, and at most `limit` chunks between them.

    `wake` is called, without any lock, when a full buffer has room again, and when that of a request that waits to be
    computed again is empty.
    """

    def __init__(self, limit: int, wake: Callable[[], None]) -> None:
        self.state = "waiting"
        self.cancelled = False  # the reader wants no more
        self.last_read = 0.0
        self._limit = limit
        self._wake = wake
        self._lock = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._read = True  # chunk by chunk, not as a whole
        self._ended = False
        self._error: Exception | None = None
        self._futures: list[asyncio.Future[None]] = []

    @property
    def full(self) -> bool:
        return len(self._chunks) >= self._limit

    @property
    def drained(self) -> bool:
        return not self._chunks

    # for the engine's thread

    def put(self, chunk: Chunk, last: bool = False) -> None:
        """last: `end` follows at once, and tells the reader."""
        with self._lock:
            if self._read:
                self._chunks.append(chunk)
                if not last:
                    self._tell()

    def end(self, error: Exception | None) -> None:
        with self._lock:
            self.state, self._ended, self._error = "done", True, error
            self._tell()

    def _tell(self) -> None:
        self._lock.notify_all()
        for future in self._futures:
            with contextlib.suppress(RuntimeError):  # its loop was closed, and the reader with it
                future.get_loop().call_soon_threadsafe(_resolve, future)
        self._futures.clear()

    # for the reader

    def get(self) -> Chunk | None:
        """The next chunk, None at the end; raises the error that ended the request."""
        with self._lock:
            self._lock.wait_for(self._ready)
            chunk, freed = self._taken()
        if freed:
            self._wake()
        return chunk

    async def get_async(self) -> Chunk | None:
        while True:
            with self._lock:
                future = None if self._ready() else self._future()
                chunk, freed = (None, False) if future is not None else self._taken()
            if freed:
                self._wake()
            if future is None:
                return chunk
            await future

    def whole(self, timeout: float | None) -> None:
        """Wait for the end; chunks are not kept for the reader any more."""
        self._skip()
        with self._lock:
            if not self._lock.wait_for(lambda: self._ended, timeout):
                raise TimeoutError(f"request: the answer is not complete after {timeout:g} seconds")
            self._taken()

    async def whole_async(self) -> None:
        self._skip()
        while True:
            with self._lock:
                if self._ended:
                    self._taken()
                    return
                future = self._future()
            await future

    def _ready(self) -> bool:
        return bool(self._chunks) or self._ended

    def _future(self) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return future

    def _skip(self) -> None:
        with self._lock:
            self._read = False
            self._chunks.clear()
        self._wake()

    def _taken(self) -> tuple[Chunk | None, bool]:
        """The next chunk, and whether the engine has to know that it was read."""
        if self._chunks:
            full, self.last_read = self.full, time.monotonic()
            chunk = self._chunks.popleft()
            return chunk, full or (self.state == "waiting" and self.drained)
        if self._error is not None:
            raise self._error
        return None, False


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _forget(feed: Feed) -> None:
    """Its ticket is gone. No lock is taken: this may be called anywhere, while any is held."""
    feed.cancelled = True
