"""What a client asks for, and what it gets: prompt and options on one side, chunks, usage and timings on the other."""

from __future__ import annotations

import numbers
import secrets
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.engine.hooks import Hooks, make_hooks
from penstock.engine.reading import Reading
from penstock.engine.sampling import SamplingParams, check_vocabulary
from penstock.engine.speculate import check_speculate
from penstock.errors import DTypeError, InvalidArgument
from penstock.ops.sampling import MAX_TOP
from penstock.text.stop import StopStrings
from penstock.text.tokenizer import Tokenizer

_OPTIONS = tuple(option.name for option in fields(SamplingParams))


@dataclass(frozen=True)
class Chunk:
    """One generated token: the text that became final with it, and on the last one why generation ended.

    finish_reason: "stop" (end-of-text token, stop string or end of the grammar), "length" (max_tokens, or the context
    is full; also of JSON that was closed before), else None.
    """

    text: str
    token: int
    finish_reason: str | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None


@dataclass
class Timings:
    """Tokens and seconds of the two phases. What kernels took to compile meanwhile is in neither of them."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    generation_seconds: float = 0.0
    queue_seconds: float = 0.0  # before the prompt was begun
    compile_seconds: float = 0.0  # once per machine, for kernels that it has not met before
    draft_n: int = 0  # drafts that were verified
    draft_n_accepted: int = 0
    draft_places: list[list[int]] = field(default_factory=list)  # by place: how often one was looked at, and accepted

    def count_draft(self, place: int, accepted: bool) -> None:
        """The draft at this place, all those before it being right, was looked at."""
        while len(self.draft_places) <= place:
            self.draft_places.append([0, 0])
        self.draft_places[place][0] += 1
        self.draft_places[place][1] += accepted
        self.draft_n_accepted += accepted

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
    """A finished answer. tokens include the one that ended it; text does not.

    expert_counts: int64 [L, E], how often it chose each expert of the layers that have some, if `expert_heat` asked for
    it and the device tells (the CPU does).
    """

    text: str
    tokens: list[int]
    finish_reason: str
    usage: Usage
    timings: Timings
    logprobs: list[float] | None = None
    top_logprobs: list[tuple[tuple[int, float], ...]] | None = None
    seed: int | None = None
    expert_counts: np.ndarray | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return self.text


class Constraint(Protocol):
    """What may come next in one answer (see `grammar.Grammar`)."""

    source: str  # makes the same one in another process

    @property
    def done(self) -> bool:
        """Whether nothing but the end may follow."""
        ...

    def mask(self) -> np.ndarray | None:
        """uint32 words: bit i % 32 of word i // 32 says whether token i is allowed; None: all are."""
        ...

    def accept(self, token: int) -> None:
        """The token was chosen."""
        ...

    def end_within(self, tokens: int) -> None:
        """The answer has at most so many more tokens, before which the text is to end."""
        ...

    @property
    def closing(self) -> bool:
        """Whether the text ends where it does because of that."""
        ...


class RequestLimits(NamedTuple):
    """What a request is checked against: positions of a sequence, ids with an embedding."""

    max_context: int
    vocab_size: int


@dataclass(frozen=True, eq=False)
class Request:
    """What was asked: token ids to continue, how tokens are drawn, and when the answer ends.

    params have a seed. eos: ids that end the answer. stop: strings that end it, and are not part of it. shown: special
    tokens that become text all the same. grammar says before each token which ones are allowed. hooks: see `Hooks`; a
    request that has some stays in its process. max_tokens 0: there is no answer, see `reading_request`. reading: what
    is wanted of the prompt. speculate, and num_draft_tokens: what drafts come from and how many a step verifies at the
    most; None: as the model was loaded.
    acceptance, for benchmarks: the draft at place i counts with this probability if those before it do, whatever the
    token is, drawn by seed and position; and with fixed_drafts every step verifies num_draft_tokens. expert_heat: the
    experts that the answer chooses are counted, where the device tells them (`heat.py`).
    """

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    eos: frozenset[int]
    stop: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    grammar: Constraint | None = None
    hooks: Hooks | None = None
    speculate: str | None = None
    num_draft_tokens: int | None = None
    acceptance: tuple[float, ...] | None = None
    fixed_drafts: bool = False
    reading: Reading | None = None
    expert_heat: bool = False


def make_request(
    limits: RequestLimits,
    tokenizer: Tokenizer,
    prompt: str | Seq[int],
    max_tokens: int,
    stop: str | Seq[str],
    options: Mapping[str, Any],
    *,
    start: int = 0,
    continues: bool = False,
) -> Request:
    """A checked request for the continuation of a text or of token ids; options as in `LLM.generate`.

    start: positions that a session already holds. continues: the prompt may be empty. Raises InvalidArgument or
    DTypeError, naming what is wrong.
    """
    options = dict(options)
    extra = options.pop("extra_eos", ())
    more = {name: options.pop(name) for name in ("grammar", "shown") if name in options}
    reading, heat = options.pop("reading", None), options.pop("expert_heat", False)
    if not isinstance(heat, bool):
        raise InvalidArgument(f"generate: expert_heat is {heat!r:.40}, expected True or False")
    speculate, drafts = options.pop("speculate", None), options.pop("num_draft_tokens", None)
    drafts = check_speculate("generate", speculate, drafts)
    _check_text_options(more.get("grammar"), more.get("shown"))
    hooks = make_hooks(options.pop("logits_processors", None), options.pop("sampler", None))
    params = sampling_params(options)
    if hooks is not None and hooks.sampler is not None:
        _check_alone(params)
    given = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    ids: list[int] = token_array(given, limits.vocab_size, tokenizer=tokenizer).tolist()
    least = 1 if reading is None else 0
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, numbers.Integral) or max_tokens < least:
        raise InvalidArgument(f"max_tokens is {max_tokens!r}, expected an integer of at least {least}")
    if reading is not None and not 0 <= reading.top <= MAX_TOP:
        raise InvalidArgument(f"reading: top is {reading.top}, expected 0 to {MAX_TOP}")
    if not ids and not continues:
        raise InvalidArgument("prompt has no tokens, expected at least one")
    if start + len(ids) >= limits.max_context + (max_tokens == 0):
        raise InvalidArgument(
            f"prompt has {start + len(ids)} tokens, expected fewer than {limits.max_context} "
            "(max_context), to leave room for an answer"
        )
    check_vocabulary(params, limits.vocab_size)
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(64))
    StopStrings(stop)  # refuses what is no stop string
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    eos = tokenizer.eos_ids | set(token_array(extra, limits.vocab_size, "extra_eos", tokenizer).tolist())
    shown, grammar = tuple(more.get("shown") or ()), more.get("grammar")
    about = (ids, params, int(max_tokens), frozenset(eos), stops, shown, grammar, hooks)
    return Request(*about, speculate=speculate, num_draft_tokens=drafts, reading=reading, expert_heat=heat)


def reading_request(limits: RequestLimits, tokens: Seq[int], reading: Reading | None = None) -> Request:
    """A request that ends with its prompt: with a reading, or for `Scheduler.submit` with `rows`. Raises
    InvalidArgument.
    """
    ids: list[int] = token_array(tokens, limits.vocab_size).tolist()
    if not ids:
        raise InvalidArgument("tokens is empty, expected at least one")
    if len(ids) > limits.max_context:
        raise InvalidArgument(
            f"context: 0 positions are filled and {len(ids)} more were given, "
            f"expected at most {limits.max_context} in all (max_context)"
        )
    return Request(ids, SamplingParams(seed=0), 0, frozenset(), reading=reading)


def _check_text_options(grammar: Any, shown: Any) -> None:
    """Raise InvalidArgument for what is no grammar, DTypeError for what are no special tokens."""
    if grammar is not None and not hasattr(grammar, "end_within"):
        raise InvalidArgument(
            f"generate: grammar is {grammar!r:.60}, expected what penstock.text.grammar.grammar_of_gbnf makes of a text"
        )
    if shown is not None and (isinstance(shown, str) or not all(isinstance(token, str) for token in _items(shown))):
        raise DTypeError(f"generate: shown is {shown!r:.60}, expected a list of special tokens")


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, Iterable) else (value,)


def _check_alone(params: SamplingParams) -> None:
    """Raise InvalidArgument for options that say how to choose a token, which a sampler does by itself."""
    for name, off in (("temperature", 0), ("top_p", 1), ("top_k", 0), ("min_p", 0)):
        if (value := getattr(params, name)) != off:
            raise InvalidArgument(f"generate: sampler is given with {name} {value:g}, expected one of the two")


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from keyword arguments. Raises InvalidArgument or DTypeError, naming the one that is wrong."""
    for name in options:
        if name not in _OPTIONS:
            raise InvalidArgument(f"generate: {name} is no option, expected one of {', '.join(_OPTIONS)}")
    return SamplingParams(**options)


def token_array(
    tokens: Seq[int], vocab_size: int, what: str = "tokens", tokenizer: Tokenizer | None = None
) -> np.ndarray:
    """Token ids as an array. Raises InvalidArgument for others than the model has embeddings for.

    `what` are they? The tokenizer, which may have more tokens than the model, has the name of one that is refused.
    """
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError):
        ids = np.empty(0, object)
    if ids.size == 0 and ids.dtype != object:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidArgument(f"{what}: expected a list of integers (token ids)")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        name = None if low < 0 or tokenizer is None else tokenizer.name_of(high)
        found = f"{low if low < 0 else high}" if name is None else f"{high} ({name!r:.100})"
        raise InvalidArgument(f"{what}: has {found}, expected ids from 0 to {vocab_size - 1}, which have embeddings")
    return ids.astype(np.int32)


class AnswerText:
    """The text of one answer, token by token: detokenized, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._eos = request.eos
        self._stops = StopStrings(request.stop)
        self._detokenizer = tokenizer.detokenizer(shown=request.shown)

    @property
    def stop_string(self) -> str | None:
        """The one that ended the text."""
        return self._stops.stopped

    def add(self, token: int, finish_reason: str | None) -> tuple[str, str | None]:
        """What became final with this token, and why the answer ends with it: as given, or for a stop string."""
        text = ""
        if token not in self._eos:
            text = self._stops.add(self._detokenizer.add(token))
        if finish_reason is not None and self._stops.stopped is None:
            text += self._stops.add(self._detokenizer.finish())
            text += self._stops.finish()
        return text, finish_reason if self._stops.stopped is None else "stop"
