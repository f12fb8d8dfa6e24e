"""How a request's tokens are chosen: checked parameters, what was generated so far, and log-probabilities.

`ops.sample_tokens` says what a choice is, on the host and on every device. A `Sampler` holds its arguments for one
request: the host chooses with the CPU kernel (`sample`), a device with what `row` and `edits` give it.
"""

import math
import numbers
import reprlib
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from penstock import ops
from penstock.errors import DTypeError, InvalidArgument, NonFiniteLogits, ShapeError
from penstock.ops.sampling import FEW, MAX_TOP, ONE, SEEN, Edits, edited_logits, log_probabilities, mask_words

MAX_LOGPROBS = MAX_TOP

# Beyond these a penalty or bias could push a float32 logit to infinity.
_MAX_PENALTY, _MAX_BIAS, _MAX_REPETITION = 1e6, 1e30, 1e3
_LAST_POSITION = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen; `ops.sample_tokens` gives the exact rules.

    temperature 0 is greedy. Off are top_p 1, top_k 0 or -1, min_p 0, repetition_penalty 1, the other penalties 0.
    repetition_context limits the repetition penalty to that many last tokens (None: all). seed None draws one per
    request. logit_bias maps token ids to what is added to their logits. logprobs: None or False for none, n from 0 to
    20 for the chosen token's log probability and the n highest, True for the chosen one alone.
    Raises InvalidArgument or DTypeError, naming the field.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    repetition_context: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        checked = {
            "temperature": _real("temperature", self.temperature, 0, math.inf),
            "top_p": _real("top_p", self.top_p, 0, 1),
            "top_k": max(0, _integer("top_k", self.top_k, -1, None)),
            "min_p": _real("min_p", self.min_p, 0, 1),
            "seed": None if self.seed is None else _integer("seed", self.seed, 0, 2**64 - 1),
            "repetition_penalty": _real(
                "repetition_penalty", self.repetition_penalty, 1 / _MAX_REPETITION, _MAX_REPETITION
            ),
            "repetition_context": (
                None
                if self.repetition_context is None
                else _integer("repetition_context", self.repetition_context, 1, None)
            ),
            "presence_penalty": _real("presence_penalty", self.presence_penalty, -_MAX_PENALTY, _MAX_PENALTY),
            "frequency_penalty": _real("frequency_penalty", self.frequency_penalty, -_MAX_PENALTY, _MAX_PENALTY),
            "logit_bias": _bias(self.logit_bias),
            "logprobs": _logprobs(self.logprobs),
        }
        for field in fields(self):
            object.__setattr__(self, field.name, checked[field.name])


class Sampled(NamedTuple):
    """A chosen token. logprob and top are None unless asked for.

    Log probabilities are those of the logits after bias and penalties, at temperature 1 and before any truncation.
    top: up to n pairs (id, logprob), highest first, lower id first among equals; ids of probability 0 are left out.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] | None


class Sampler:
    """Chooses the tokens of one request and remembers them for the penalties.

    `seed` is the one in use, drawn at random if the params have none: passing it again gives the same tokens. A device
    chooses the same tokens with `mode` and the values of `row`, among them `edits`: what is done to the logits, kept up
    to date by `record`.
    Raises InvalidArgument for ids outside of the vocabulary.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, prompt_tokens: Iterable[int] = ()) -> None:
        self.params = params
        self.vocab_size = _integer("vocab_size", vocab_size, 1, None)
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        check_vocabulary(params, self.vocab_size)
        self.mode = _mode(params)
        self._repeats = params.repetition_penalty != 1
        context = params.repetition_context
        self._recent: deque[int] | None = deque() if self._repeats and context is not None else None
        self._in_recent: Counter[int] = Counter()
        self.edits = self._new_edits(prompt_tokens)
        self.row: dict[str, Any] = {  # of a device's table
            "temperature": params.temperature,
            "top_k": min(params.top_k, self.vocab_size),
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed": self.seed - (1 << 64) if self.seed >> 63 else self.seed,
        }
        self._position, self._token = np.zeros(1, np.int32), np.zeros(1, np.int32)
        self._arguments = (self._position, *_columns(self.row), self.mode)
        if self.edits is not None:
            self.row["edits"] = self.edits

    @property
    def waits(self) -> bool:
        """Whether a token has to be recorded before a device draws the next one: some leave the repetition context."""
        return self._recent is not None

    def sample(self, logits: np.ndarray, position: int, mask: np.ndarray | None = None) -> Sampled:
        """The token at `position`, its number in the sequence (prompt included), from float32 logits `[vocab_size]`.

        mask: the words of a grammar, 32 ids each; ids beyond it are not allowed. The logits are left as they are; -inf
        rules an id out. Raises ShapeError or DTypeError for other arrays, NonFiniteLogits if the logits hold NaN or
        +inf or nothing but -inf.
        """
        self._check(logits)
        self._position[0] = _integer("position", position, 0, _LAST_POSITION)
        n = self.params.logprobs
        more: Any = (None,) * 3 if n is None else (np.empty(1), np.empty((1, n), np.int32), np.empty((1, n)))
        edits: tuple[Any, ...] = (None,) * 6
        if self.edits is not None:
            edits = (_FIRST, self.edits.counts[None], self.edits.bias[None], self.edits.penalties[None], None, None)
        if mask is not None:
            edits = (*edits[:4], _FIRST, mask_words(mask, self.vocab_size)[None])
        _choose(logits[None], *self._arguments, *edits, n, out=(self._token, *more))
        token = int(self._token[0])
        if token < 0:
            refuse_logits(logits, position)
        self._chosen(token)
        return with_logprobs(self, token, None if n is None else [array[0] for array in more])

    def draft(self, logits: np.ndarray, position: int, mask: np.ndarray | None = None) -> int:
        """A guess at the token at `position` from another model's float32 logits of the first ids, drawn as the token
        itself will be, with the same noise. Nothing is remembered. Of logits that are not finite it is the first id.
        """
        self._position[0] = position
        words = None if mask is None else mask_words(mask, self.vocab_size)[: -(-len(logits) // 32)]
        edits: tuple[Any, ...] = (None,) * 6
        if words is not None and len(logits) % 32 == 0:
            edits = (*edits[:4], _FIRST, np.ascontiguousarray(words)[None])
        _choose(logits[None], *self._arguments, *edits, None, out=(self._token, None, None, None))
        return max(0, int(self._token[0]))

    def sample_with(
        self, choose: Callable[[np.ndarray], int], logits: np.ndarray, position: int, mask: np.ndarray | None = None
    ) -> Sampled:
        """As `sample`, but `choose` gives the token: from log-probabilities float32 `[vocab_size]` after all edits."""
        self._check(logits)
        words = None if mask is None else mask_words(mask, self.vocab_size)
        x = edited_logits(logits, self.edits, words)
        if not np.isfinite(x.max()):
            refuse_logits(x, position)
        each = log_probabilities(x)
        token = self._checked(choose(each.astype(np.float32)))
        self._chosen(token)
        n = self.params.logprobs
        if n is None:
            return Sampled(token, None, None)
        own, ids, top = np.empty(1), np.empty((1, n), np.int32), np.empty((1, n))
        _choose(x[None], *_GREEDY, *(None,) * 6, n, out=(self._token, own, ids, top))  # for the first ranks
        return with_logprobs(self, token, (each[token], ids[0], top[0]))

    def _check(self, logits: np.ndarray) -> None:
        if not isinstance(logits, np.ndarray) or logits.dtype != np.float32:
            kind = str(logits.dtype) if isinstance(logits, np.ndarray) else type(logits).__name__
            raise DTypeError(f"sample: logits is {kind}, expected a float32 array")
        if logits.shape != (self.vocab_size,):
            raise ShapeError(f"sample: logits has shape {logits.shape}, expected {(self.vocab_size,)}")

    def _chosen(self, token: int) -> None:
        """The host has chosen a token, which a device does not know of."""
        if self.edits is not None:
            self.record(token)
            self.edits.stale = True

    def record(self, token: int) -> None:
        """Count a token as generated that a device has drawn; `sample` does so itself."""
        token = self._checked(token)
        if self.edits is not None:
            self.edits.counts[token] += ONE
            if self._repeats:
                self._see(token, self.edits)

    def _new_edits(self, prompt_tokens: Iterable[int]) -> Edits | None:
        params, vocab = self.params, self.vocab_size
        if not (self._repeats or params.presence_penalty or params.frequency_penalty or params.logit_bias):
            return None
        numbers = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        edits = Edits(np.zeros(vocab, np.int32), np.zeros(vocab, np.float32), np.array(numbers))
        for token, value in (params.logit_bias or {}).items():
            edits.bias[token] = value
        if self._repeats:
            for token in prompt_tokens:
                self._see(self._checked(token), edits)
        return edits

    def _see(self, token: int, edits: Edits) -> None:
        """Let the repetition penalty hold for a token, and no longer for the one that leaves the context."""
        edits.counts[token] |= SEEN
        if self._recent is None:
            return
        self._recent.append(token)
        self._in_recent[token] += 1
        if len(self._recent) > (self.params.repetition_context or 0):
            oldest = self._recent.popleft()
            self._in_recent[oldest] -= 1
            if not self._in_recent[oldest]:
                del self._in_recent[oldest]
                edits.counts[oldest] &= ~SEEN
                if not edits.stale:
                    edits.forgotten.append(oldest)

    def _checked(self, token: Any) -> int:
        return _integer("token", token, 0, self.vocab_size - 1)


_FIRST = np.zeros(1, np.int32)


def _choose(*args: Any, out: tuple[Any, ...]) -> None:
    """`ops.sample_tokens` by its CPU kernel, without the checks: the sampler has made them."""
    cpu = ops.sample_tokens.kernel("cpu")
    assert cpu is not None
    cpu.run(*args, out=out)


def _columns(row: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
    """temperature, top_k, top_p, min_p and seed of one row."""
    dtypes = {"temperature": "float64", "top_k": "int32", "top_p": "float64", "min_p": "float64", "seed": "int64"}
    return tuple(np.array([row[name]], dtype) for name, dtype in dtypes.items())


_GREEDY = (
    np.zeros(1, np.int32),
    *_columns({"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}),
    "greedy",
)


def _mode(params: SamplingParams) -> str:
    """What a device has to do for these parameters: a mode of `ops.sample_tokens`."""
    if params.temperature == 0:
        return "greedy"
    if params.top_k == 0:
        return "plain" if params.top_p == 1 else "full"
    return "top_k" if params.top_k <= FEW else "full"


def mode_of(samplers: Iterable[Sampler], masked: bool = False) -> str:
    """The mode that does for all of them, with what else a device's drawing has to do; masked: some have a grammar.

    "plain", "top_k+edits", "greedy+edits+logprobs": see `ops.sampling.split_mode`.
    """
    samplers = list(samplers)
    drawn = {sampler.mode for sampler in samplers} - {"greedy"}
    mode = drawn.pop() if len(drawn) == 1 else "full" if drawn else "greedy"
    edited = masked or any(sampler.edits is not None for sampler in samplers)
    wanted = any(sampler.params.logprobs is not None for sampler in samplers)
    return mode + "+edits" * edited + "+logprobs" * wanted


def with_logprobs(sampler: Sampler, token: int, found: Any) -> Sampled:
    """A token that a device drew, with what its sampler's params ask for; found: `PendingStep.logprobs` of the row."""
    n = sampler.params.logprobs
    if n is None:
        return Sampled(token, None, None)
    own, ids, top = found
    pairs = zip(ids[:n].tolist(), top[:n].tolist(), strict=True)
    return Sampled(token, float(own), tuple(pair for pair in pairs if pair[0] >= 0))


def refuse_logits(x: np.ndarray, position: int) -> None:
    """Raise NonFiniteLogits for logits that a token cannot be drawn from."""
    nan, inf = np.flatnonzero(np.isnan(x)), np.flatnonzero(x == np.inf)
    if nan.size or inf.size:
        what, ids = ("NaN", nan) if nan.size else ("+inf", inf)
        found = f"{what} for {ids.size} of {x.size} tokens, the first is {ids[0]}"
    else:
        found = f"-inf for all {x.size} tokens"
    raise NonFiniteLogits(f"sample: the model produced non-finite logits at position {position}: {found}")


def _real(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise DTypeError(f"{name} is {_shown(value)}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and least <= number <= most):
        limits = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise InvalidArgument(f"{name} is {_shown(value)}, expected a number {limits}")
    return number


def _integer(name: str, value: Any, least: int, most: int | None) -> int:
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise DTypeError(f"{name} is {_shown(value)}, expected an integer")
    number = int(value)
    if number < least or (most is not None and number > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidArgument(f"{name} is {_shown(number)}, expected an integer {limits}")
    return number


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to write very long ones
    return reprlib.repr(value)


def _logprobs(value: Any) -> int | None:
    if value is None or value is False:
        return None
    return 0 if value is True else _integer("logprobs", value, 0, MAX_LOGPROBS)


def _bias(bias: Any) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise DTypeError(f"logit_bias is a {type(bias).__name__}, expected a mapping of token ids to numbers")
    return {
        _integer("logit_bias: a token id", token, 0, None): _real(f"logit_bias[{token}]", value, -_MAX_BIAS, _MAX_BIAS)
        for token, value in bias.items()
    }


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidArgument for ids of logit_bias that are outside of the vocabulary."""
    for token in params.logit_bias or ():
        _integer("logit_bias: a token id", token, 0, vocab_size - 1)
