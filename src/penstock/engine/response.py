"""A client's side of a request: tokens on their way from the engine to a thread or an event loop, and their text."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from penstock.engine.request import AnswerText, Chunk, Completion, Request, Timings, Usage
from penstock.text.tokenizer import Tokenizer


class Token(NamedTuple):
    """A token of an answer, as the engine hands it out; on the last one why generation ended."""

    id: int
    finish_reason: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None


class Driver(Protocol):
    """What makes tokens come. threaded: a thread or process of its own does; else readers drive it while they wait."""

    threaded: bool

    def drive(self, queue: ChunkQueue) -> None:
        """Run a step, or wait a moment where none can be run or another thread runs one; not if `queue` is ready."""
        ...


class ChunkQueue:
    """One writer, one reader, and about `limit` tokens between them; beside them how far the request is.

    `wake` is called, without any lock, when a full queue has room again, and when that of a request that waits to be
    computed again is empty.
    """

    def __init__(self, limit: int, wake: Callable[[], None], timings: Timings) -> None:
        self.state = "waiting"
        self.reused = 0  # tokens of the prompt whose state was found in a prefix cache
        self.timings = timings
        self.cancelled = False  # the reader wants no more
        self.complete = False  # since it has all it wants
        self.reading = False  # it waits for a token
        self.last_read = 0.0
        self._limit = limit
        self._wake = wake
        self._lock = threading.Condition()
        self._tokens: deque[Token] = deque()
        self._ended = False
        self._error: Exception | None = None
        self._futures: list[asyncio.Future[None]] = []

    @property
    def full(self) -> bool:
        return len(self._tokens) >= self._limit

    @property
    def drained(self) -> bool:
        return not self._tokens

    @property
    def ready(self) -> bool:
        """Whether `get` would not wait."""
        return bool(self._tokens) or self._ended

    # for the engine

    def put(self, token: Token) -> None:
        """Hand a token out; the last one tells the reader with `end`, which follows at once."""
        with self._lock:
            self._tokens.append(token)
            if token.finish_reason is None:
                self._notify()

    def end(self, error: Exception | None) -> None:
        with self._lock:
            self.state, self._ended, self._error = "done", True, error
            self._notify()

    def _notify(self) -> None:
        self._lock.notify_all()
        for future in self._futures:
            with contextlib.suppress(RuntimeError):  # its loop was closed, and the reader with it
                future.get_loop().call_soon_threadsafe(_resolve, future)
        self._futures.clear()

    # for the reader

    def wait(self, timeout: float) -> None:
        """Until there is something to read, or the time is over."""
        with self._lock:
            self._lock.wait_for(lambda: self.ready, timeout)

    def get(self, timeout: float | None = None) -> Token | None:
        """The next token, None at the end; raises the error that ended the request, and TimeoutError."""
        with self._lock:
            if not self._lock.wait_for(lambda: self.ready, timeout):
                raise TimeoutError
            token, freed = self._taken()
        if freed:
            self._wake()
        return token

    async def get_async(self) -> Token | None:
        while True:
            with self._lock:
                future = None if self.ready else self._future()
                token, freed = (None, False) if future is not None else self._taken()
            if freed:
                self._wake()
            if future is None:
                return token
            await future

    def _future(self) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return future

    def _taken(self) -> tuple[Token | None, bool]:
        """The next token, and whether the engine has to know that it was read."""
        if self._tokens:
            full, self.last_read = self.full, time.monotonic()
            token = self._tokens.popleft()
            return token, full or (self.state == "waiting" and self.drained)
        if self._error is not None:
            raise self._error
        return None, False


class ResponseHandle:
    """A request on its way: read its chunks with `for` or `async for` (one reader), or wait for the whole.

    Garbage-collecting the handle cancels the request. cancel: ends the request, True if its answer is complete. driver:
    runs steps while the reader waits, where nothing else does. cached: tokens that a session held before the prompt.
    Without a tokenizer chunks have no text.
    """

    def __init__(
        self,
        request: Request,
        queue: ChunkQueue,
        tokenizer: Tokenizer | None,
        cancel: Callable[[bool], None],
        driver: Driver | None = None,
        cached: int = 0,
    ) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.chunks: list[Chunk] = []
        self.finish_reason: str | None = None
        self._queue, self._cancel, self._driver, self._cached = queue, cancel, driver, cached
        self._text = None if tokenizer is None else AnswerText(tokenizer, request)
        weakref.finalize(self, _forget, queue).atexit = False

    @property
    def state(self) -> str:
        """ "waiting", "prompt", "generating" or "done"."""
        return self._queue.state

    @property
    def usage(self) -> Usage:
        """Tokens read so far; `cached_tokens` is known from state "generating" on."""
        prompt = self._cached + len(self.request.prompt)
        return Usage(prompt, len(self.tokens), self._cached + self._queue.reused)

    @property
    def timings(self) -> Timings:
        """Seconds so far, with `queue_seconds`."""
        return self._queue.timings

    @property
    def ready(self) -> bool:
        """Whether the next chunk, or the end, is there."""
        return self.finish_reason is not None or self._queue.ready

    def poll(self) -> None:
        """Wait a moment for the next chunk, running a step where nothing else does."""
        with self._reading():
            if self._driver is None or self._driver.threaded:
                self._queue.wait(0.02)
            else:
                self._driver.drive(self._queue)

    def cancel(self) -> None:
        """End the request within one token, from any thread. Its chunks then end as if it were done."""
        self._cancel(False)

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they come. Raises what the request failed with, or Cancelled if others ended it."""
        return self

    def __next__(self) -> Chunk:
        chunk = self._next(None)
        if chunk is None:
            raise StopIteration
        return chunk

    def __aiter__(self) -> ResponseHandle:
        """The same in an event loop."""
        return self

    async def __anext__(self) -> Chunk:
        if self.finish_reason is not None:
            raise StopAsyncIteration
        with self._reading():
            while not (self._driver is None or self._driver.threaded or self._queue.ready):
                await asyncio.to_thread(self._driver.drive, self._queue)
            token = await self._queue.get_async()
        if token is None:
            raise StopAsyncIteration
        return self._read(token)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end: the whole answer, also where chunks of it were read (finish_reason "cancelled" after
        `cancel`). Raises as iteration does, and TimeoutError; the request then goes on.
        """
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while self._next(end) is not None:
                pass
        except TimeoutError:
            raise TimeoutError(f"request: the answer is not complete after {timeout:g} seconds") from None
        return self.completion()

    async def wait(self) -> Completion:
        """`result` in an event loop. If the task is cancelled meanwhile, the request goes on: call `cancel`."""
        async for _ in self:
            pass
        return self.completion()

    def completion(self) -> Completion:
        """What has been read so far, as an answer."""
        wanted = self.request.params.logprobs is not None
        return Completion(
            text="".join(chunk.text for chunk in self.chunks),
            tokens=list(self.tokens),
            finish_reason=self.finish_reason or ("cancelled" if self.state == "done" else "length"),
            usage=self.usage,
            timings=self.timings,
            logprobs=[chunk.logprob for chunk in self.chunks] if wanted else None,  # type: ignore[misc]
            top_logprobs=[chunk.top_logprobs or () for chunk in self.chunks] if wanted else None,
            seed=self.request.params.seed,
        )

    def _next(self, end: float | None) -> Chunk | None:
        if self.finish_reason is not None:
            return None
        with self._reading():
            while not (self._driver is None or self._driver.threaded or self._queue.ready):
                if end is not None and time.monotonic() > end:
                    raise TimeoutError
                self._driver.drive(self._queue)
            token = self._queue.get(None if end is None else max(0.0, end - time.monotonic()))
        return None if token is None else self._read(token)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        self._queue.reading = True
        try:
            yield
        finally:
            self._queue.reading = False

    def _read(self, token: Token) -> Chunk:
        """Turn a token into text. A stop string ends the request."""
        text, self.finish_reason = "", token.finish_reason
        if self._text is not None:
            text, self.finish_reason = self._text.add(token.id, token.finish_reason)
        self.tokens.append(token.id)
        chunk = Chunk(text, token.id, self.finish_reason, token.logprob, token.top)
        self.chunks.append(chunk)
        if self.finish_reason is not None and token.finish_reason is None:
            self._cancel(True)
        return chunk


def in_order_of_arrival(handles: Seq[ResponseHandle]) -> Iterator[tuple[int, Chunk]]:
    """(number of the handle, chunk) of requests of one scheduler, whichever comes first, to the end of all of them."""
    left = dict(enumerate(handles))
    while left:
        first = next(iter(left.values()))
        ready = [number for number, handle in left.items() if handle.ready]
        if not ready:
            first.poll()
        for number in ready:
            chunk = next(left[number], None)
            if chunk is not None:
                yield number, chunk
            if chunk is None or chunk.finish_reason is not None:
                del left[number]


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _forget(queue: ChunkQueue) -> None:
    """Its handle is gone. No lock is taken: this may be called anywhere, while any is held."""
    queue.cancelled = True
