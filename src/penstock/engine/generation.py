"""From scores to text: one request's tokens, stops and limits, and a loop that runs several requests together."""

from __future__ import annotations

import numbers
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from penstock.engine.cache import Sequence
from penstock.engine.engine import Engine
from penstock.engine.place import Flight
from penstock.engine.sampling import Sampled, Sampler, SamplingParams, mode_of
from penstock.engine.stop import StopStrings
from penstock.engine.tokenizer import Tokenizer
from penstock.errors import BackendError, InvalidArgument

_OPTIONS = tuple(option.name for option in fields(SamplingParams))

MAX_BATCH = 32  # requests that decode together


@dataclass(frozen=True)
class Chunk:
    """One generated token: the text that became final with it, and on the last one why generation ended.

    finish_reason: "stop" (end-of-text token or stop string), "length" (max_tokens, or the context is full), else None.
    """

    text: str
    token: int
    finish_reason: str | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None


@dataclass
class Timings:
    """Tokens and seconds of the two phases."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    generation_seconds: float = 0.0

    @property
    def prompt_tps(self) -> float:
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def generation_tps(self) -> float:
        """Tokens after the first, which the prompt pays for, per second."""
        return max(0, self.generated_tokens - 1) / self.generation_seconds if self.generation_seconds > 0 else 0.0


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt, not computed again


@dataclass(frozen=True)
class Completion:
    """A finished answer. tokens include the one that ended it; text does not."""

    text: str
    tokens: list[int]
    finish_reason: str
    usage: Usage
    timings: Timings
    logprobs: list[float] | None = None
    top_logprobs: list[tuple[tuple[int, float], ...]] | None = None
    seed: int | None = None


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from keyword arguments. Raises InvalidArgument or DTypeError, naming the one that is wrong."""
    for name in options:
        if name not in _OPTIONS:
            raise InvalidArgument(f"generate: {name} is no option, expected one of {', '.join(_OPTIONS)}")
    return SamplingParams(**options)


class Request:
    """One prompt on its way to a completion.

    `sequence` continues what a session already holds: `context` are its tokens, `logits` the scores after the last of
    them, needed when the prompt is empty.
    """

    def __init__(
        self,
        prompt: Seq[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        engine: Engine,
        *,
        max_tokens: int,
        stop: Seq[str] = (),
        extra_eos: Seq[int] = (),
        sequence: Sequence | None = None,
        context: Seq[int] = (),
        logits: np.ndarray | None = None,
    ) -> None:
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, numbers.Integral) or max_tokens < 1:
            raise InvalidArgument(f"max_tokens is {max_tokens!r}, expected an integer of at least 1")
        if not len(prompt) and logits is None:
            raise InvalidArgument("prompt has no tokens, expected at least one")
        self.prompt = list(prompt)
        start = 0 if sequence is None else sequence.length
        if start + len(self.prompt) >= engine.max_context:
            raise InvalidArgument(
                f"prompt has {start + len(self.prompt)} tokens, expected fewer than {engine.max_context} "
                "(max_context), to leave room for an answer"
            )
        vocab = engine.model.config.vocab_size
        self.sampler = Sampler(params, vocab, [*context, *self.prompt])
        self.stops = StopStrings(stop)
        self.detokenizer = tokenizer.detokenizer()
        self.eos = tokenizer.eos_ids | set(engine._ids(extra_eos).tolist())
        self.max_tokens = max_tokens
        self.max_context = engine.max_context
        self.sequence = sequence
        self.cached = start
        self.logits = logits
        self.tokens: list[int] = []
        self.chunks: list[Chunk] = []
        self.finish_reason: str | None = None
        self.timings = Timings(prompt_tokens=len(self.prompt))

    def accept(self, logits: np.ndarray, position: int) -> Chunk:
        """Sample the token at `position` (its number in the sequence) and turn it into text."""
        return self.take(self.sampler.sample(logits, position), position)

    def take(self, drawn: Sampled, position: int) -> Chunk:
        """The token at `position` has been chosen: turn it into text."""
        self.tokens.append(drawn.token)
        text = ""
        if drawn.token in self.eos:
            self.finish_reason = "stop"
        else:
            text = self.stops.add(self.detokenizer.add(drawn.token))
            if self.stops.stopped is not None:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.max_tokens or position + 1 >= self.max_context:
                self.finish_reason = "length"
        if self.finish_reason is not None and self.stops.stopped is None:
            text += self.stops.add(self.detokenizer.finish())
            text += self.stops.finish()
            if self.stops.stopped is not None:
                self.finish_reason = "stop"
        chunk = Chunk(text, drawn.token, self.finish_reason, drawn.logprob, drawn.top)
        self.chunks.append(chunk)
        return chunk

    def completion(self) -> Completion:
        """What has come so far, as an answer; cut off by the caller counts as "length"."""
        wanted = self.sampler.params.logprobs is not None
        return Completion(
            text="".join(chunk.text for chunk in self.chunks),
            tokens=list(self.tokens),
            finish_reason=self.finish_reason or "length",
            usage=Usage(self.cached + len(self.prompt), len(self.tokens), self.cached),
            timings=self.timings,
            logprobs=[chunk.logprob for chunk in self.chunks] if wanted else None,  # type: ignore[misc]
            top_logprobs=[chunk.top_logprobs or () for chunk in self.chunks] if wanted else None,
            seed=self.sampler.seed,
        )


@dataclass
class _Running:
    number: int
    request: Request
    sequence: Sequence
    owned: bool
    started: float = field(default_factory=time.perf_counter)

    @property
    def may_go_on(self) -> bool:
        """Whether a step may be launched before the one under way is known."""
        request = self.request
        room = len(request.tokens) + 1 < request.max_tokens and self.sequence.length + 1 < request.max_context
        return self.owned and room


def run(
    engine: Engine,
    requests: Seq[Request],
    progress: Callable[[int], None] | None = None,
    max_batch: int = MAX_BATCH,
) -> Iterator[tuple[int, Chunk]]:
    """Run requests to their ends, up to `max_batch` decoding together; yields (number of the request, chunk).

    Each is prefilled when it is its turn. Sequences that were opened here are closed at the end, also if the caller
    stops early.
    """
    max_batch = min(max_batch, engine.most_sequences)
    waiting = list(enumerate(requests))[::-1]
    active: list[_Running] = []
    try:
        while waiting or active:
            while waiting and len(active) < max_batch:
                number, request = waiting.pop()
                owned = request.sequence is None
                row = _Running(number, request, request.sequence or engine.open(), owned)
                active.append(row)
                if request.prompt:
                    logits = engine.prefill(row.sequence, request.prompt, progress=progress)
                else:
                    assert request.logits is not None
                    logits = request.logits
                now = time.perf_counter()
                request.timings.prompt_seconds, row.started = now - row.started, now
                yield _accepted(engine, active, row, request.accept(logits, row.sequence.length))
            if not active:
                continue
            rows = list(active)
            if engine.place.draws and all(row.request.sampler.draws for row in rows):
                yield from _drawn(engine, active, rows)
                continue
            logits = engine.decode([row.sequence for row in rows], [row.request.tokens[-1] for row in rows])
            for row, scores in zip(rows, logits, strict=True):
                yield _accepted(engine, active, row, row.request.accept(scores, row.sequence.length))
    finally:
        for row in active:
            if row.owned:
                engine.close(row.sequence)


def _drawn(engine: Engine, active: list[_Running], rows: list[_Running]) -> Iterator[tuple[int, Chunk]]:
    """Steps of these rows, drawn on the device, until one of them ends.

    While the host turns a step's tokens into text the device is at the next one. A row that ends has then taken one
    step too many, which matters to nobody: only sequences that end with their request are treated so.
    """
    sequences = [row.sequence for row in rows]
    how = [row.request.sampler.row for row in rows]
    mode = mode_of(row.request.sampler for row in rows)
    ahead: Flight | None = None
    while len(active) == len(rows):
        flight = ahead or engine.draw(sequences, [row.request.tokens[-1] for row in rows], how, mode)
        behind = 0
        ahead = None
        if all(row.may_go_on for row in rows) and engine.continues(sequences):
            ahead, behind = engine.draw(sequences, None, how, mode), 1
        chunks = []
        for row, token in zip(rows, flight.tokens(), strict=False):
            position = row.sequence.length - behind
            if token < 0:
                raise BackendError(f"sample: the model produced non-finite logits at position {position}")
            chunks.append(_accepted(engine, active, row, row.request.take(Sampled(token, None, None), position)))
        yield from chunks
    if ahead is not None:
        for row, token in zip(rows, ahead.tokens(), strict=False):
            if row in active and token >= 0:
                chunk = row.request.take(Sampled(token, None, None), row.sequence.length)
                yield _accepted(engine, active, row, chunk)


def _accepted(engine: Engine, active: list[_Running], row: _Running, chunk: Chunk) -> tuple[int, Chunk]:
    timings = row.request.timings
    timings.generated_tokens = len(row.request.tokens)
    timings.generation_seconds = time.perf_counter() - row.started
    if chunk.finish_reason is not None:
        active.remove(row)
        if row.owned:
            engine.close(row.sequence)
    return row.number, chunk
