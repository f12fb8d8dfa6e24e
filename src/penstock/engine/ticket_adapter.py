"""The scheduler with the interface of requests as data and handles. To be removed with `Ticket`."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable
from typing import Any

from penstock.engine import scheduler as old
from penstock.engine.request import Request, RequestLimits, Timings, make_request
from penstock.engine.response import ChunkQueue, ResponseHandle, Token

_changed = threading.Event()  # tokens were put since the last `step`


class _Feed(ChunkQueue):
    def __init__(self, limit: int, wake: Callable[[], None]) -> None:
        super().__init__(limit, wake, Timings())
        self.request: Any = None

    def put(self, chunk: Any, last: bool = False) -> None:  # type: ignore[override]
        super().put(Token(chunk.token, chunk.finish_reason, chunk.logprob, chunk.top_logprobs))
        _changed.set()

    def end(self, error: Exception | None) -> None:  # type: ignore[override]
        super().end(error)
        _changed.set()


class _Ticket:
    def __init__(self, request: Any, feed: _Feed, cancel: Callable[[], None]) -> None:
        feed.request, feed.timings = request, request.timings
        self.feed, self.cancel = feed, cancel


old.Feed, old.Ticket = _Feed, _Ticket  # type: ignore[misc,assignment]


class _Handle(ResponseHandle):
    @property
    def usage(self) -> Any:
        self._queue.reused = self._queue.request.usage.cached_tokens  # type: ignore[attr-defined]
        return super().usage


class HandleScheduler(old.Scheduler):
    max_sequences: int

    def request(self, prompt: Any, max_tokens: int = 256, stop: Any = (), **more: Any) -> Request:  # type: ignore[override]
        limits = RequestLimits(self._engine.max_context, self._engine.model.config.vocab_size)
        return make_request(limits, self._llm.tokenizer, prompt, max_tokens, stop, more)  # type: ignore[attr-defined]

    def submit(self, request: Request, client: Hashable = None) -> ResponseHandle:  # type: ignore[override]
        tokenizer = self._llm.tokenizer  # type: ignore[attr-defined]
        options = {field.name: getattr(request.params, field.name) for field in dataclasses.fields(request.params)}
        extra = tuple(request.eos - tokenizer.eos_ids)
        made = self._llm.request(
            request.prompt, request.max_tokens, request.stop, shown=request.shown, grammar=request.grammar,
            extra_eos=extra, **options,
        )  # fmt: skip
        ticket: Any = super().submit(made, client)
        return _Handle(request, ticket.feed, tokenizer, lambda finished: ticket.cancel())

    def step(self) -> bool:
        """Wait a moment for tokens of the scheduler's own thread."""
        changed = _changed.wait(0.002)
        _changed.clear()
        return changed or bool(self._running or self._waiting)
