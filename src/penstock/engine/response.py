"""A client's side of a request: tokens on their way from the engine to a thread or an event loop, and their text."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from penstock.engine.heat import ExpertHeat
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


class TokenBatch:
    """What a step puts into many queues: readers in an event loop are woken with one call into it, by `wake`."""

    def __init__(self) -> None:
        self._futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    def add(self, future: asyncio.Future[None]) -> None:
        self._futures.setdefault(future.get_loop(), []).append(future)

    def wake(self) -> None:
        for loop, futures in self._futures.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed, and its readers with it
                loop.call_soon_threadsafe(_resolve, futures)
        self._futures = {}


class ChunkQueue:
    """One writer, one reader, and about `limit` tokens between them; beside them how far the request is.

    `wake` is called, without any lock, when a full queue has room again, and when that of a request that waits to be
    computed again is empty.
    """

    def __init__(self, limit: int, wake: Callable[[], None], timings: Timings) -> None:
        self.state = "waiting"
        self.reused = 0  # tokens of the prompt whose state was found in a prefix cache
        self.timings = timings
        self.finish_reason: str | None = None  # of a request that ends without a token
        self.pieces: list[tuple[np.ndarray, ...]] = []  # what its reading has found so far
        self.heat: ExpertHeat | None = None  # the experts that its answer has chosen, where they are counted
        self.cancelled = False  # the reader wants no more
        self.complete = False  # since it has all it wants
        self.reading = False  # it waits for a token
        self.last_read = 0.0
        self._limit = limit
        self._wake = wake
        self._lock = threading.Lock()
        self._changed: threading.Condition | None = None  # that a thread waits for
        self._tokens: deque[Token] = deque()
        self._last: Token | None = None  # read when the request has ended, with its numbers
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

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

    @property
    def exhausted(self) -> bool:
        """Whether all was read, and the request did not end with an error."""
        return self._ended and not self._tokens and self._error is None

    # for the engine

    def put(self, token: Token, batch: TokenBatch | None = None) -> None:
        """Hand a token out; `end` follows the last one at once. With a batch the reader is woken by that."""
        with self._lock:
            if token.finish_reason is None:
                self._tokens.append(token)
                self._notify(batch)
            else:
                self._last = token

    def end(self, error: Exception | None, batch: TokenBatch | None = None) -> None:
        with self._lock:
            if self._last is not None:
                self._tokens.append(self._last)
                self._last = None
            self.state, self._ended, self._error = "done", True, error
            self._notify(batch)

    def _notify(self, batch: TokenBatch | None) -> None:
        if self._changed is not None:
            self._changed.notify_all()
        if self._waiter is not None:
            woken = TokenBatch() if batch is None else batch
            woken.add(self._waiter)
            self._waiter = None
            if batch is None:
                woken.wake()

    # for the reader

    def get(self, timeout: float | None = None) -> Token | None:
        """The next token, None at the end; raises the error that ended the request, and TimeoutError."""
        with self._lock:
            if not self._waited(timeout):
                raise TimeoutError
            tokens, freed = self._taken(1)
        if freed:
            self._wake()
        return tokens[0] if tokens else None

    def wait(self, timeout: float) -> None:
        """Until there is something to read, or the time is over."""
        with self._lock:
            self._waited(timeout)

    def _waited(self, timeout: float | None) -> bool:
        """Whether there is something to read, at the latest after the time; the lock is held."""
        if self.ready:
            return True
        self._changed = self._changed or threading.Condition(self._lock)
        return self._changed.wait_for(lambda: self.ready, timeout)

    def drain(self) -> list[Token]:
        """All tokens that are there; raises the error that ended the request, once all before it were read."""
        with self._lock:
            if not self._tokens and self._error is None:
                return []
            tokens, freed = self._taken(len(self._tokens))
        if freed:
            self._wake()
        return tokens

    def wait_with(self, future: asyncio.Future[None]) -> bool:
        """Have a future of the reader's loop done when there is something to read; False: there is already."""
        with self._lock:
            self._waiter = None if self.ready else future
            return self._waiter is not None

    def _taken(self, count: int) -> tuple[list[Token], bool]:
        """The next tokens, and whether the engine has to know that they were read."""
        if self._tokens:
            full, self.last_read = self.full, time.monotonic()
            if count == len(self._tokens):
                tokens = list(self._tokens)
                self._tokens.clear()
            else:
                tokens = [self._tokens.popleft() for _ in range(count)]
            return tokens, (full and not self.full) or (self.state == "waiting" and self.drained)
        if self._error is not None:
            raise self._error
        return [], False


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
        # by a weak reference: an error in the queue has frames that hold this handle
        weakref.finalize(self, _forget, weakref.ref(queue)).atexit = False

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
    def pieces(self) -> list[tuple[np.ndarray, ...]]:
        """What the request's reading has found so far."""
        return self._queue.pieces

    @property
    def expert_counts(self) -> np.ndarray | None:
        """How often the answer has chosen each expert so far, int64 [L, E] by layers with experts; None if that was not
        asked for, or is not told here.
        """
        return None if self._queue.heat is None else self._queue.heat.counts

    @property
    def stop_string(self) -> str | None:
        """That of the request that ended the answer, None if none did."""
        return None if self._text is None else self._text.stop_string

    @property
    def ready(self) -> bool:
        """Whether the next chunk, or the end, is there."""
        return self.finish_reason is not None or self._queue.ready

    @property
    def driven(self) -> bool:
        """Whether its reader runs the steps."""
        return self._driver is not None and not self._driver.threaded

    def poll(self) -> None:
        """Wait a moment for the next chunk, running a step where nothing else does."""
        with self._reading():
            if self._driver is None or self._driver.threaded:
                self._queue.wait(0.02)
            else:
                self._driver.drive(self._queue)

    def cancel(self, finished: bool = False) -> None:
        """End the request within one token, from any thread. Its chunks then end as if it were done.

        finished: because the answer is complete.
        """
        self._cancel(finished)

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
        if not self.ended:
            await wait_any([self])
        chunk = None if self.ended else self._next(None)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    @property
    def ended(self) -> bool:
        """Whether no chunk is left to be read; False while an error is."""
        return self.finish_reason is not None or self._queue.exhausted

    def read(self) -> list[Chunk]:
        """The chunks that are there, without waiting. Raises as iteration does, once those before were read."""
        chunks: list[Chunk] = []
        if self.finish_reason is None:
            for token in self._queue.drain():
                chunks.append(self._read(token))
                if self.finish_reason is not None:
                    break
        return chunks

    def take(self) -> list[Token]:
        """The tokens that are there, without their text: for one who passes them on. Raises as `read`."""
        return self._queue.drain()

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
        while not self.ended:
            await wait_any([self])
            self.read()
        return self.completion()

    def completion(self) -> Completion:
        """What has been read so far, as an answer."""
        wanted = self.request.params.logprobs is not None
        return Completion(
            text="".join(chunk.text for chunk in self.chunks),
            tokens=list(self.tokens),
            finish_reason=self._finish_reason(),
            usage=self.usage,
            timings=self.timings,
            logprobs=[chunk.logprob for chunk in self.chunks] if wanted else None,  # type: ignore[misc]
            top_logprobs=[chunk.top_logprobs or () for chunk in self.chunks] if wanted else None,
            seed=self.request.params.seed,
            expert_counts=self.expert_counts,
        )

    def _finish_reason(self) -> str:
        return self.finish_reason or self._queue.finish_reason or ("cancelled" if self.state == "done" else "length")

    async def drive(self) -> None:
        """Run steps until there is something to read, where nothing else does."""
        while not self.ready:
            await asyncio.to_thread(self.poll)

    def wait_with(self, future: asyncio.Future[None]) -> bool:
        """Have a future of the reader's loop done when there is something to read; False: there is already."""
        return self._queue.wait_with(future)

    def _next(self, end: float | None) -> Chunk | None:
        if self.finish_reason is not None:
            return None
        with self._reading():
            while self._driver is not None and self.driven and not self._queue.ready:
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


def in_order_of_arrival(handles: Sequence[ResponseHandle]) -> Iterator[tuple[int, Chunk]]:
    """(number of the handle, chunk) of requests of one scheduler, whichever comes first, to the end of all of them."""
    left = dict(enumerate(handles))
    while left:
        ready = [number for number, handle in left.items() if handle.ready]
        if not ready:
            next(iter(left.values())).poll()
        for number in ready:
            chunk = next(left[number], None)
            if chunk is not None:
                yield number, chunk
            if chunk is None or chunk.finish_reason is not None:
                del left[number]


async def wait_any(handles: Sequence[ResponseHandle]) -> None:
    """Returns when one of the handles has something to read, or has ended."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    for handle in handles:
        if handle.driven:
            await handle.drive()
        if not handle.wait_with(future):
            await asyncio.sleep(0)  # other readers of the loop go first
            return
    await future


def _resolve(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _forget(queue: weakref.ref[ChunkQueue]) -> None:
    """Its handle is gone. No lock is taken: this may be called anywhere, while any is held."""
    if (left := queue()) is not None:
        left.cancelled = True
