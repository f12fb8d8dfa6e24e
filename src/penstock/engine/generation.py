"""From logits to text: one request's tokens, stops and limits, and a loop that runs several requests together."""

from __future__ import annotations

import numbers
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np

from penstock.engine.cache import Sequence
from penstock.engine.engine import Engine
from penstock.engine.sampling import Sampled, Sampler, SamplingParams, mode_of
from penstock.errors import InvalidArgument, NonFiniteLogits
from penstock.ops.device import Flight
from penstock.text.stop import StopStrings
from penstock.text.tokenizer import Tokenizer

_OPTIONS = tuple(option.name for option in fields(SamplingParams))

MAX_BATCH = 32  # requests that decode together


@dataclass(frozen=True)
class Chunk:
    """One generated token: the text that became final with it, and on the last one why generation ended.

    finish_reason: "stop" (end-of-text token, stop string or end of the grammar), "length" (max_tokens, or the context
    is full), else None.
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
    queue_seconds: float = 0.0  # before the prompt was begun

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


class Constraint(Protocol):
    """What may come next in one answer (see `grammar.Grammar`)."""

    done: bool  # nothing but the end may follow

    def mask(self) -> np.ndarray | None:
        """uint32 words: bit i % 32 of word i // 32 says whether token i is allowed; None: all are."""
        ...

    def accept(self, token: int) -> None:
        """The token was chosen."""
        ...


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from keyword arguments. Raises InvalidArgument or DTypeError, naming the one that is wrong."""
    for name in options:
        if name not in _OPTIONS:
            raise InvalidArgument(f"generate: {name} is no option, expected one of {', '.join(_OPTIONS)}")
    return SamplingParams(**options)


class Request:
    """One prompt on its way to a completion.

    `sequence` continues what a session already holds: `context` are its tokens, `logits` those after the last of
    them, needed when the prompt is empty. `shown` are special tokens that become text all the same.
    `grammar` says before each token which ones are allowed; with it the logits are read by the host.
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
        shown: Seq[str] = (),
        grammar: Constraint | None = None,
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
        self.detokenizer = tokenizer.detokenizer(shown=shown)
        self.eos = tokenizer.eos_ids | set(engine.token_array(extra_eos, "extra_eos", tokenizer).tolist())
        self.max_tokens = max_tokens
        self.max_context = engine.max_context
        self.grammar = grammar
        self.draws = self.sampler.draws and grammar is None  # whether a device can choose the tokens
        self.sequence = sequence
        self.cached = start
        self.reused = 0  # tokens of the prompt whose state was found in a prefix cache
        self.logits = logits
        self.tokens: list[int] = []
        self.chunks: list[Chunk] = []
        self.finish_reason: str | None = None
        self.timings = Timings(prompt_tokens=len(self.prompt))

    def accept(self, logits: np.ndarray, position: int) -> Chunk:
        """Sample the token at `position` (its number in the sequence) and turn it into text."""
        mask = None if self.grammar is None else self.grammar.mask()
        return self.take(self.sampler.sample(logits, position, mask), position)

    def take(self, drawn: Sampled, position: int) -> Chunk:
        """The token at `position` has been chosen: turn it into text."""
        self.tokens.append(drawn.token)
        text = ""
        if drawn.token in self.eos:
            self.finish_reason = "stop"
        else:
            if self.grammar is not None:
                self.grammar.accept(drawn.token)
            text = self.stops.add(self.detokenizer.add(drawn.token))
            if self.stops.stopped is not None or (self.grammar is not None and self.grammar.done):
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

    @property
    def usage(self) -> Usage:
        return Usage(self.cached + len(self.prompt), len(self.tokens), self.cached + self.reused)

    def completion(self) -> Completion:
        """What has come so far, as an answer; cut off by the caller counts as "length"."""
        wanted = self.sampler.params.logprobs is not None
        return Completion(
            text="".join(chunk.text for chunk in self.chunks),
            tokens=list(self.tokens),
            finish_reason=self.finish_reason or "length",
            usage=self.usage,
            timings=self.timings,
            logprobs=[chunk.logprob for chunk in self.chunks] if wanted else None,  # type: ignore[misc]
            top_logprobs=[chunk.top_logprobs or () for chunk in self.chunks] if wanted else None,
            seed=self.sampler.seed,
        )


def request_of(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: str | Seq[int],
    max_tokens: int,
    stop: str | Seq[str],
    options: Mapping[str, Any],
) -> Request:
    """A request for the continuation of a text or of token ids; options as in `LLM.generate`."""
    options = dict(options)
    extra = options.pop("extra_eos", ())
    more = {name: options.pop(name) for name in ("grammar", "shown") if name in options}
    params = sampling_params(options)
    given = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    ids = engine.token_array(given, tokenizer=tokenizer).tolist()
    stops = [stop] if isinstance(stop, str) else stop
    return Request(ids, params, tokenizer, engine, max_tokens=max_tokens, stop=stops, extra_eos=extra, **more)


@dataclass(eq=False)
class Running:
    """A request and its sequence. `owned`: the sequence ends with the request."""

    request: Request
    sequence: Sequence
    owned: bool = True
    tag: Any = None
    started: float = field(default_factory=time.perf_counter)

    @property
    def told(self) -> int:
        """How many of the request's tokens the sequence holds."""
        return self.sequence.length - self.request.cached - len(self.request.prompt)

    @property
    def may_go_on(self) -> bool:
        """Whether a step may be launched before the one under way is known."""
        request = self.request
        room = len(request.tokens) + 1 < request.max_tokens and self.sequence.length + 1 < request.max_context
        return self.owned and room and self.told == len(request.tokens)

    @property
    def last(self) -> int | None:
        """The token that the sequence was given last, if the request knows it."""
        given = self.request.tokens or self.request.prompt
        return given[-1] if given else None

    def accept(self, logits: np.ndarray, engine: Engine) -> Chunk:
        """Sample the next token. Raises NonFiniteLogits, with the layer where they begin."""
        try:
            return self.request.accept(logits, self.sequence.length)
        except NonFiniteLogits as error:
            raise engine.located(error, self.sequence, self.last) from None

    def prompted(self) -> None:
        """The prompt has been computed."""
        now = time.perf_counter()
        self.request.timings.prompt_seconds, self.started = now - self.started, now

    def count(self) -> None:
        """A token has come."""
        timings = self.request.timings
        timings.generated_tokens = len(self.request.tokens)
        timings.generation_seconds = time.perf_counter() - self.started


class Decoder:
    """Decode steps of rows that come and go.

    Where the device draws, it is at the next step while the host turns the last one's tokens into text. A row that ends
    has then taken one step too many, which changes no answer: only sequences that end with their request do so.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ahead: tuple[list[Running], Flight] | None = None

    @property
    def ahead(self) -> bool:
        """Whether a step is under way whose tokens were not read yet."""
        return self._ahead is not None

    def step(self, rows: list[Running], go_on: bool = True) -> list[tuple[Running, Chunk | Exception]]:
        """The next token of each row, or what went wrong with it alone; what goes wrong with the step is raised.

        A step under way comes first, with the rows it has. A row whose sequence holds fewer tokens than its request is
        told the next of them, and nothing is reported. go_on: the next step may be launched before this one is known.
        """
        engine = self.engine
        under_way, self._ahead = self._ahead, None
        if under_way is None:
            if not (engine.device.samples_tokens and all(row.request.draws for row in rows)):
                return self._decoded(rows)
            under_way = rows, self._draw(rows, [row.request.tokens[row.told] for row in rows])
        flying, flight = under_way
        behind = 0
        try:
            if go_on and flying == rows and all(row.may_go_on for row in rows):
                with engine.lock:
                    if engine.continues([row.sequence for row in rows]):
                        self._ahead, behind = (rows, self._draw(rows, None)), 1
            tokens = flight.tokens()
        except BaseException:
            self._ahead = None
            for row in flying:
                row.sequence.corrupt = True
            raise
        found: list[tuple[Running, Chunk | Exception]] = []
        for row, token in zip(flying, tokens, strict=False):
            if not row.sequence.closed and row.told - behind == len(row.request.tokens):
                found.append((row, self._drawn(row, token, row.sequence.length - behind)))
        return found

    def _decoded(self, rows: list[Running]) -> list[tuple[Running, Chunk | Exception]]:
        told = [row.told for row in rows]
        sequences = [row.sequence for row in rows]
        logits = self.engine.decode(sequences, [row.request.tokens[n] for row, n in zip(rows, told, strict=True)])
        found: list[tuple[Running, Chunk | Exception]] = []
        for row, n, own in zip(rows, told, logits, strict=True):
            if n + 1 == len(row.request.tokens):
                found.append((row, self._accepted(row, own)))
        return found

    def _draw(self, rows: list[Running], tokens: list[int] | None) -> Flight:
        samplers = [row.request.sampler for row in rows]
        sequences = [row.sequence for row in rows]
        return self.engine.draw(sequences, tokens, [sampler.row for sampler in samplers], mode_of(samplers))

    def _accepted(self, row: Running, logits: np.ndarray) -> Chunk | Exception:
        try:
            return row.accept(logits, self.engine)
        except Exception as error:
            return error

    def _drawn(self, row: Running, token: int, position: int) -> Chunk | Exception:
        if token < 0:
            error = NonFiniteLogits(f"sample: the model produced non-finite logits at position {position}")
            return self.engine.located(error, row.sequence, row.last)
        try:
            return row.request.take(Sampled(token, None, None), position)
        except Exception as error:
            return error


def run_requests(
    engine: Engine, requests: Seq[Request], progress: Callable[[int], None] | None = None, max_batch: int = MAX_BATCH
) -> Iterator[tuple[int, Chunk]]:
    """Run requests to their ends, up to `max_batch` decoding together; yields (number of the request, chunk).

    Each is prefilled when it is its turn. Sequences that were opened here are closed at the end, also if the caller
    stops early.
    """
    max_batch = min(max_batch, engine.most_sequences)
    waiting = list(enumerate(requests))[::-1]
    active: list[Running] = []
    decoder = Decoder(engine)

    def took(row: Running, chunk: Chunk | Exception) -> tuple[int, Chunk]:
        if isinstance(chunk, Exception):
            raise chunk
        row.count()
        if chunk.finish_reason is not None:
            active.remove(row)
            if row.owned:
                engine.close(row.sequence)
        return row.tag, chunk

    try:
        while waiting or active:
            while waiting and len(active) < max_batch:
                number, request = waiting.pop()
                owned = request.sequence is None
                row = Running(request, request.sequence or engine.open(), owned, number)
                active.append(row)
                if request.prompt:
                    logits = engine.prefill(row.sequence, request.prompt, progress=progress)
                else:
                    assert request.logits is not None
                    logits = request.logits
                row.prompted()
                yield took(row, row.accept(logits, engine))
            if active:
                yield from [took(row, chunk) for row, chunk in decoder.step(list(active))]
    finally:
        for row in active:
            if row.owned:
                engine.close(row.sequence)
