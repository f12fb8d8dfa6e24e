"""From the logits of a step to its token: penalties, greedy choice, truncated sampling, log probabilities.

The draw is counter-based: the random number of a token depends on the seed and the token's position alone, so the same
seed gives the same text alone, in a batch, after a restart, on the host and on a device.

What a step does, in this order, and what a device kernel has to do to give the same token (x: the logits, float32 [V]):

1. x[id] += bias for each entry of logit_bias, float32.
2. repetition_penalty r: for each different id among prompt and generated tokens (the last repetition_context of them),
   x[id] = x[id] / r if x[id] > 0 else x[id] * r, float32.
3. frequency_penalty f and presence_penalty p: x[id] -= f * count + p for each id generated so far, float32, with
   f * count + p in float64, rounded once. The prompt does not count.
4. m = max(x). temperature 0: the token is the lowest id with x[id] == m. Otherwise, in float64,
   w[id] = exp((x[id] - m) / temperature).
5. Rank the ids by x, highest first, lower id first among equals. top_k: keep the first k ranks. top_p: of these, keep
   the smallest number of leading ranks, at least 1, whose w sum to at least top_p * (the sum of w over what top_k
   kept). min_p: of these, keep those with w >= min_p (the highest w is 1).
6. u = (second << 32 | first) >> 11, times 2**-53: the first two output words of Philox 4x32-10 for the counter
   (position, position >> 32, 0, 0) and the key (seed, seed >> 32), 32 bits each.
7. Go through the kept ids from the lowest id up, adding w in float64; the token is the first whose running sum exceeds
   u * (sum of all kept w). If rounding lets none exceed it, the last with w > 0.

Sums may be formed in another order, and exp may differ in its last bits: then two machines differ where u falls within
that rounding of an edge, about once in 10**12 tokens with float64.
"""

import math
import numbers
import reprlib
import secrets
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import DTypeError, InvalidArgument, NonFiniteLogits, ShapeError
from penstock.ops.sampling import FEW, uniform

MAX_LOGPROBS = 20

# Beyond these a penalty or bias could push a float32 logit to infinity.
_MAX_PENALTY, _MAX_BIAS, _MAX_REPETITION = 1e6, 1e30, 1e3

_BLOCK = 256  # logits per block of the bound in _kth_highest
_BINS = 4096  # of the histogram in _nucleus


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen; the module's docstring gives the exact rules.

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

    `seed` is the one in use, drawn at random if the params have none: passing it again gives the same tokens. `draws`:
    a device can choose the tokens (`ops.sample_tokens` with `mode` and the values of `row`).
    Raises InvalidArgument for ids outside of the vocabulary.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, prompt_tokens: Iterable[int] = ()) -> None:
        self.params = params
        self.vocab_size = _integer("vocab_size", vocab_size, 1, None)
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self._greedy = params.temperature == 0
        check_vocabulary(params, self.vocab_size)
        self._bias = _bias_arrays(params.logit_bias)
        self._seen = _Seen(params.repetition_context) if params.repetition_penalty != 1 else None
        self._counts = _Counts() if params.presence_penalty or params.frequency_penalty else None
        if self._seen is not None:
            for token in prompt_tokens:
                self._seen.add(self._checked(token))
        changes = self._bias is not None or self._seen is not None or self._counts is not None
        self._logits = np.empty(self.vocab_size, np.float32) if changes else None
        self.draws = not changes and params.logprobs is None  # whether a device can draw: it looks at nothing else
        self.mode = _mode(params)
        self.row = {  # of a device's table
            "temperature": params.temperature,
            "top_k": min(params.top_k, self.vocab_size),
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed": self.seed - (1 << 64) if self.seed >> 63 else self.seed,
        }
        wide = not self._greedy or params.logprobs is not None
        self._weights = np.empty(self.vocab_size, np.float64) if wide else None

    def sample(self, logits: np.ndarray, position: int) -> Sampled:
        """The token at `position`, its number in the sequence (prompt included), from float32 logits `[vocab_size]`.

        The logits are left as they are; -inf rules an id out. Raises ShapeError or DTypeError for other arrays,
        NonFiniteLogits if the logits hold NaN or +inf or nothing but -inf.
        """
        if not isinstance(logits, np.ndarray) or logits.dtype != np.float32:
            kind = str(logits.dtype) if isinstance(logits, np.ndarray) else type(logits).__name__
            raise DTypeError(f"sample: logits is {kind}, expected a float32 array")
        if logits.shape != (self.vocab_size,):
            raise ShapeError(f"sample: logits has shape {logits.shape}, expected {(self.vocab_size,)}")
        x = self._processed(logits)
        best = int(x.argmax())  # the first of equal ones; the first NaN if there is one
        highest = float(x[best])
        if not math.isfinite(highest):
            _refuse(x, position)
        token = best if self._greedy else self._drawn(x, highest, position)
        self.record(token)
        if self.params.logprobs is None:
            return Sampled(token, None, None)
        return self._with_logprobs(x, highest, token)

    def record(self, token: int) -> None:
        """Count a token as generated; `sample` does so itself, a token chosen elsewhere has to be told."""
        token = self._checked(token)
        if self._seen is not None:
            self._seen.add(token)
        if self._counts is not None:
            self._counts.add(token)

    def _checked(self, token: Any) -> int:
        return _integer("token", token, 0, self.vocab_size - 1)

    def _processed(self, logits: np.ndarray) -> np.ndarray:
        x = self._logits
        if x is None:
            return logits
        np.copyto(x, logits)
        if self._bias is not None:
            ids, values = self._bias
            x[ids] += values
        if self._seen is not None and len(ids := self._seen.ids()):
            r = np.float32(self.params.repetition_penalty)
            old = x[ids]
            x[ids] = np.where(old > 0, old / r, old * r)
        if self._counts is not None:
            ids, counts = self._counts.arrays()
            x[ids] -= (self.params.frequency_penalty * counts + self.params.presence_penalty).astype(np.float32)
        return x

    def _drawn(self, x: np.ndarray, highest: float, position: int) -> int:
        params, weights = self.params, self._weights
        assert weights is not None
        ids = None  # of the entries of x and weights; None: all of them
        if 0 < params.top_k < x.size:
            ids = _leading(x, _kth_highest(x, params.top_k), params.top_k)
            x, weights = x[ids], weights[: params.top_k]
        _weigh(x, highest, params.temperature, out=weights)
        if params.top_p < 1:
            kept = _nucleus(x, weights, highest, params.temperature, params.top_p)
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        if params.min_p > 0:
            kept = np.flatnonzero(weights >= params.min_p)
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        u = uniform(self.seed, _integer("position", position, 0, 2**64 - 1))
        sums = np.cumsum(weights, out=weights)
        total = sums[-1]
        at = int(sums.searchsorted(u * total, side="right"))
        if at == sums.size:
            at = int(sums.searchsorted(total))  # the first to reach the total is the last that added to it
        return at if ids is None else int(ids[at])

    def _with_logprobs(self, x: np.ndarray, highest: float, token: int) -> Sampled:
        assert self._weights is not None and self.params.logprobs is not None
        _weigh(x, highest, 1.0, out=self._weights)
        log_sum = math.log(self._weights.sum())
        n = min(self.params.logprobs, x.size)
        top: list[tuple[int, float]] = []
        if n:
            ids = _leading(x, _kth_highest(x, n), n)
            order = np.argsort(-x[ids], kind="stable")
            top = [(int(i), float(x[i]) - highest - log_sum) for i in ids[order] if x[i] > -np.inf]
        return Sampled(token, float(x[token]) - highest - log_sum, tuple(top))


class _Seen:
    """Which ids have come, of all tokens or of the last few."""

    def __init__(self, context: int | None) -> None:
        self._context = context
        self._last: deque[int] = deque(maxlen=context if context is not None else 0)
        self._all = _Counts()

    def add(self, token: int) -> None:
        if self._context is None:
            self._all.add(token)
        else:
            self._last.append(token)

    def ids(self) -> np.ndarray:
        if self._context is None:
            return self._all.arrays()[0]
        return np.fromiter(set(self._last), np.int64)


class _Counts:
    """How often each id has come, in arrays that grow, so that a step does not rebuild them."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.empty(64, np.float64)

    def add(self, token: int) -> None:
        slot = self._slots.get(token)
        if slot is not None:
            self._counts[slot] += 1
            return
        slot = self._slots[token] = len(self._slots)
        if slot == self._ids.size:
            self._ids, self._counts = (np.concatenate([a, np.empty_like(a)]) for a in (self._ids, self._counts))
        self._ids[slot], self._counts[slot] = token, 1

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return self._ids[: len(self._slots)], self._counts[: len(self._slots)]


def _mode(params: SamplingParams) -> str:
    """What a device has to do for these parameters: a mode of `ops.sample_tokens`."""
    if params.temperature == 0:
        return "greedy"
    if params.top_k == 0:
        return "plain" if params.top_p == 1 else "full"
    return "top_k" if params.top_k <= FEW else "full"


def mode_of(samplers: Iterable[Sampler]) -> str:
    """The mode that does for all of them."""
    drawn = {sampler.mode for sampler in samplers} - {"greedy"}
    return drawn.pop() if len(drawn) == 1 else "full" if drawn else "greedy"


def _weigh(x: np.ndarray, highest: float, temperature: float, out: np.ndarray) -> None:
    """out = exp((x - highest) / temperature) in float64. The difference comes first: it cannot overflow."""
    np.copyto(out, x)
    out -= highest
    if temperature != 1:
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the highest to -inf, and their weight to 0
            out /= temperature
    np.exp(out, out=out)


def _kth_highest(x: np.ndarray, k: int) -> float:
    """The value of rank k. k blocks whose highest values reach some bound hold k values that do: few are left to sort.

    0.1 ms instead of 1.4 ms for k = 50 of 248320 on an EPYC.
    """
    blocks = x.size // _BLOCK
    if k < blocks:
        tops = x[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        x = x[x >= np.partition(tops, blocks - k)[blocks - k]]
    return float(np.partition(x, x.size - k)[x.size - k])


def _leading(x: np.ndarray, value: float, k: int) -> np.ndarray:
    """Indices, ascending, of the k first ranks of x, whose value of rank k is known: the lower index among equals."""
    ids = np.flatnonzero(x >= value)
    if ids.size > k:
        ties = np.flatnonzero(x[ids] == value)
        ids = np.delete(ids, ties[k - ids.size :])
    return ids


def _nucleus(x: np.ndarray, weights: np.ndarray, highest: float, temperature: float, top_p: float) -> np.ndarray:
    """Indices, ascending, of the leading ranks whose weights reach top_p of the whole.

    Where many could be among them, a histogram finds the range of values that the last of them lies in, and only that
    is sorted.
    """
    total = float(weights.sum())
    goal = top_p * total
    # What lies below this floor weighs less than half of 1 - top_p together, so that the nucleus lies above it.
    among = np.flatnonzero(weights >= 0.5 * (1 - top_p) * total / weights.size)
    values = x[among]
    above, weight_above = 0, 0.0  # number and weight of the ranks before those left in `values`
    if values.size > _BINS:
        depth = np.subtract(highest, values, dtype=np.float64)
        depth *= _BINS / max(float(depth.max()), 1e-30)
        bins = depth.astype(np.int64)
        sums = np.cumsum(np.bincount(bins, weights[among]))
        at = min(int(sums.searchsorted(goal)), sums.size - 1)
        above, weight_above = int(np.count_nonzero(bins < at)), float(sums[at - 1]) if at else 0.0
        values = values[bins == at]
    ranked = np.sort(values)[::-1]
    sums = np.empty(ranked.size, np.float64)
    _weigh(ranked, highest, temperature, out=sums)
    np.cumsum(sums, out=sums)
    last = min(int(sums.searchsorted(goal - weight_above)), ranked.size - 1)
    return _leading(x, float(ranked[last]), above + last + 1)


def _refuse(x: np.ndarray, position: int) -> None:
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
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
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


def _bias_arrays(bias: Mapping[int, float] | None) -> tuple[np.ndarray, np.ndarray] | None:
    if not bias:
        return None
    return np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
