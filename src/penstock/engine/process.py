"""In the engine process: requests from the channel into a scheduler, steps, and what each step brought back again."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.engine.channel import (
    Cancel,
    ChannelError,
    Close,
    Connection,
    End,
    Failed,
    Message,
    Metrics,
    Pause,
    Read,
    Resume,
    State,
    Submit,
    Tokens,
    error_message,
    sampling_params_of,
    timings_values,
)
from penstock.engine.request import Request
from penstock.engine.response import ResponseHandle
from penstock.engine.scheduler import Scheduler
from penstock.text.grammar import grammar_of_source
from penstock.text.tokenizer import Tokenizer

_IDLE_SECONDS = 0.25  # between looks at a scheduler that has nothing to do
_METRICS_SECONDS = 0.25


class Inbox:
    """Receives messages in a thread, so that the front never waits for a step. The process ends when the front does.

    prepare: called in the thread for each message; its result is kept in place of the message.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: deque[Any] = deque()
        self._arrived = threading.Event()
        self.prepare: Callable[[Any], Any] = lambda message: message
        threading.Thread(target=self._run, name="penstock-inbox", daemon=True).start()

    def take(self, timeout: float | None = 0.0) -> list[Any]:
        """What has arrived; waits up to `timeout` seconds (None: for ever) if nothing has."""
        if not self._messages and timeout != 0.0:
            self._arrived.wait(timeout)
        self._arrived.clear()
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def _run(self) -> None:
        try:
            while messages := self._connection.receive():
                for message in messages:
                    self._messages.append(self.prepare(message))
                self._arrived.set()
        except ChannelError as error:
            print(f"penstock engine: {error}", file=sys.stderr, flush=True)
        os._exit(1)


@dataclasses.dataclass
class _Prepared:
    id: int
    request: Request | None
    client: str | None
    error: Exception | None = None


@dataclasses.dataclass
class _Live:
    handle: ResponseHandle
    state: str = "waiting"
    paused: bool = False  # its reader in the front lags behind


class EngineLoop:
    """Runs a scheduler for the front process. stats: what the front shows of the model besides the scheduler's numbers.

    Tokens of all requests of a step travel in one message. Those of a request whose reader lags behind stay in its
    queue here, where the scheduler sees that it is full.
    """

    def __init__(
        self,
        connection: Connection,
        inbox: Inbox,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        vocab_size: int,
        stats: Callable[[], dict[str, Any]],
    ) -> None:
        self._connection, self._inbox, self._scheduler = connection, inbox, scheduler
        self._tokenizer, self._vocab_size, self._stats = tokenizer, vocab_size, stats
        self._live: dict[int, _Live] = {}
        self._metrics: Metrics | None = None
        self._metrics_sent = 0.0
        inbox.prepare = self._prepare

    def run(self) -> None:
        """Until `Close` was received and all requests have ended."""
        scheduler, idle = self._scheduler, False
        while not (scheduler.closing and scheduler.idle) or self._live:
            out: list[Message] = []
            for message in self._inbox.take(_IDLE_SECONDS if idle else 0.0):
                self._handle(message, out)
            worked = scheduler.step()
            if not worked:
                scheduler.wait(0.0)  # which looks at the files
            self._collect(out)
            idle = not worked and not out
            self._add_metrics(out)
            if out:
                self._connection.send(*out)
        scheduler.finish_close(None)

    def _prepare(self, message: Any) -> Any:
        """A request of a `Submit`; grammars are built here, in the inbox's thread."""
        if not isinstance(message, Submit):
            return message
        try:
            grammar = None
            if message.grammar is not None:
                grammar = grammar_of_source(message.grammar, self._tokenizer, self._vocab_size)
            params = sampling_params_of(message)
            about: dict[str, Any] = {"speculate": message.speculate, "num_draft_tokens": message.num_draft_tokens}
            about |= {"reading": message.reading, "expert_heat": message.expert_heat}
            eos = frozenset(message.eos)
            request = Request(message.prompt, params, message.max_tokens, eos, grammar=grammar, **about)
        except Exception as error:
            return _Prepared(message.id, None, message.client, error)
        return _Prepared(message.id, request, message.client)

    def _handle(self, message: Any, out: list[Message]) -> None:
        if isinstance(message, _Prepared):
            self._submit(message, out)
        elif isinstance(message, Close):
            self._scheduler.begin_close(message.deadline)
        elif (live := self._live.get(message.id)) is not None:
            if isinstance(message, Cancel):
                live.paused = False
                live.handle.cancel(message.finished)
            elif isinstance(message, Pause | Resume):
                live.paused = isinstance(message, Pause)

    def _submit(self, prepared: _Prepared, out: list[Message]) -> None:
        try:
            if prepared.error is not None:
                raise prepared.error
            assert prepared.request is not None
            self._live[prepared.id] = _Live(self._scheduler.submit(prepared.request, prepared.client))
        except Exception as error:
            out.append(error_message(prepared.id, error))

    def _collect(self, out: list[Message]) -> None:
        """Add what has happened since the last time: changes of state, then tokens, then ends."""
        tokens, ends = Tokens([], []), []
        for number, live in list(self._live.items()):
            handle, state = live.handle, live.handle.state
            if state != live.state and state != "done":
                live.state = state
                out.append(State(number, state, handle.usage.cached_tokens, timings_values(handle.timings)))
            out += (Read(number, _bytes(piece)) for piece in handle.pieces)
            handle.pieces.clear()
            if not live.paused and (end := self._take(number, handle, state, tokens)) is not None:
                ends.append(end)
                del self._live[number]
        if tokens.requests:
            out.append(tokens)
        out += ends

    def _take(self, number: int, handle: ResponseHandle, state: str, tokens: Tokens) -> End | Failed | None:
        """Add the tokens of a request; its end, if it has ended."""
        try:
            for token in handle.take():
                place = len(tokens.requests)
                tokens.requests.append(number)
                tokens.tokens.append(token.id)
                if token.finish_reason is not None:
                    tokens.reasons[place] = token.finish_reason
                if token.logprob is not None:
                    top = None if token.top is None else [(int(one), float(value)) for one, value in token.top]
                    tokens.logprobs[place] = float(token.logprob), top
            if state != "done":
                return None
            handle.take()  # raises the error it ended with
        except Exception as error:
            return error_message(number, error)
        counts = handle.expert_counts
        experts = None if counts is None else counts.tolist()
        return End(number, handle.usage.cached_tokens, timings_values(handle.timings), experts)

    def _add_metrics(self, out: list[Message]) -> None:
        now = time.monotonic()
        if now - self._metrics_sent < _METRICS_SECONDS:
            return
        self._metrics_sent = now
        found = Metrics(dataclasses.asdict(self._scheduler.metrics()), self._stats())
        if found != self._metrics or self._live:  # a sign of life, as long as there are requests
            self._metrics = found
            out.append(found)


def _bytes(piece: tuple[np.ndarray, ...]) -> list[bytes]:
    return [np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in piece]
