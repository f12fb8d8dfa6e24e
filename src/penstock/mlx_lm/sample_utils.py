"""Samplers and logits processors with mlx-lm's names, on NumPy arrays.

What `make_sampler` and `make_logits_processors` return can be called, and also says what it does, so that `generate`
leaves the drawing to the device where the engine has an option of the same meaning (`sampling_plan`).
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from penstock.errors import DTypeError, InvalidArgument
from penstock.mlx_lm._arrays import as_numpy, integer, token_ids

Sampler: TypeAlias = Callable[[np.ndarray], Any]
"""(log-probabilities [B, V]) → ids [B]"""
LogitsProcessor: TypeAlias = Callable[[np.ndarray, np.ndarray], Any]
"""(tokens so far [n], logits [1, V]) → logits [1, V]"""

__all__ = [
    "LogitsProcessor",
    "Sampler",
    "apply_min_p",
    "apply_top_k",
    "apply_top_p",
    "apply_xtc",
    "categorical_sampling",
    "greedy_sampler",
    "make_frequency_penalty",
    "make_logits_processors",
    "make_presence_penalty",
    "make_repetition_penalty",
    "make_sampler",
]

_REPETITION_LIMITS = 1e-3, 1e3  # of the engine's option


def greedy_sampler(logprobs: Any) -> np.ndarray:
    """The id with the highest log-probability of each row, the lowest of equal ones."""
    return as_numpy(logprobs).argmax(axis=-1)


def apply_top_p(logprobs: Any, top_p: float) -> np.ndarray:
    """Keep of each row the fewest ids, likeliest first, whose probabilities reach top_p of the whole; others −inf."""
    x = _float(logprobs)
    ranked = np.sort(x, axis=-1)[..., ::-1]
    sums = np.cumsum(np.exp(ranked, dtype=np.float64), axis=-1)
    before = np.concatenate([np.zeros_like(sums[..., :1]), sums[..., :-1]], axis=-1)
    count = np.maximum((before < top_p * sums[..., -1:]).sum(axis=-1, keepdims=True), 1)
    return _kept(x, x >= np.take_along_axis(ranked, count - 1, axis=-1))


def apply_min_p(logprobs: Any, min_p: float, min_tokens_to_keep: int = 1) -> np.ndarray:
    """Keep ids of at least min_p times the highest probability, and the likeliest min_tokens_to_keep; others −inf."""
    if not 0 <= min_p <= 1:
        raise InvalidArgument(f"min_p is {min_p!r}, expected a number from 0 to 1")
    integer(min_tokens_to_keep, "min_tokens_to_keep", 1)
    x = _float(logprobs)
    limit = x.max(axis=-1, keepdims=True) + (math.log(min_p) if min_p else -math.inf)
    kept = x >= limit
    if min_tokens_to_keep > 1:
        np.put_along_axis(kept, _highest(x, min(min_tokens_to_keep, x.shape[-1])), True, axis=-1)
    return _kept(x, kept)


def apply_top_k(logprobs: Any, top_k: int) -> np.ndarray:
    """Keep the top_k likeliest ids of each row, the lower of equal ones; others −inf."""
    x = _float(logprobs)
    if isinstance(top_k, bool) or not isinstance(top_k, numbers.Integral) or not 0 < top_k < x.shape[-1]:
        raise InvalidArgument(
            f"top_k is {top_k!r}, expected an integer from 1 to {x.shape[-1] - 1} (of the vocabulary)"
        )
    kept = np.zeros(x.shape, bool)
    np.put_along_axis(kept, _highest(x, int(top_k)), True, axis=-1)
    return _kept(x, kept)


def apply_xtc(
    logits: Any,
    xtc_probability: float,
    xtc_threshold: float,
    xtc_special_tokens: Sequence[int] = (),
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """With xtc_probability, rule out every id above xtc_threshold but the least likely of them (and special ones)."""
    if not 0 <= xtc_threshold <= 0.5:
        raise InvalidArgument(f"xtc_threshold is {xtc_threshold!r}, expected a number from 0 to 0.5")
    if not 0 <= xtc_probability <= 1:
        raise InvalidArgument(f"xtc_probability is {xtc_probability!r}, expected a number from 0 to 1")
    x = _float(logits)
    if (rng or _default_rng()).random() > xtc_probability:
        return x
    weights = np.exp(x - x.max(axis=-1, keepdims=True), dtype=np.float64)
    shares = weights / weights.sum(axis=-1, keepdims=True)
    least = np.where(shares > xtc_threshold, shares, np.inf).min(axis=-1, keepdims=True)
    out = shares > least
    out[..., list(xtc_special_tokens)] = False
    return _kept(x, ~out)


def categorical_sampling(logits: Any, temp: float, rng: np.random.Generator | None = None) -> np.ndarray:
    """An id of each row, drawn with probabilities softmax(logits / temp)."""
    x = _float(logits).astype(np.float64) / temp
    return (x + (rng or _default_rng()).gumbel(size=x.shape)).argmax(axis=-1)


@functools.cache
def _default_rng() -> np.random.Generator:
    return np.random.default_rng()


@dataclass(frozen=True, eq=False)
class CategoricalSampler:
    """What `make_sampler` returns for a temperature: cuts in mlx-lm's order (top_p, min_p, xtc, top_k), then a draw.

    The cuts look at probabilities of temperature 1. `engine_options` has the engine's options of exactly this meaning;
    where there are none, `cut` is done on the host, and the engine draws from what is left.
    """

    temp: float
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: tuple[int, ...] = ()
    seed: int | None = None
    rng: np.random.Generator = field(default_factory=np.random.default_rng, repr=False)

    def __call__(self, logprobs: Any) -> np.ndarray:
        """Ids [B] drawn from log-probabilities [B, V]."""
        return categorical_sampling(self.cut(_float(logprobs), self.rng), self.temp, self.rng)

    def cut(self, logprobs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Log-probabilities at temperature 1, −inf for ids that must not be drawn."""
        if 0 < self.top_p < 1:
            logprobs = apply_top_p(logprobs, self.top_p)
        if self.min_p != 0:
            logprobs = apply_min_p(logprobs, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability > 0:
            logprobs = apply_xtc(logprobs, self.xtc_probability, self.xtc_threshold, self.xtc_special_tokens, rng)
        return apply_top_k(logprobs, self.top_k) if self.top_k > 0 else logprobs

    def engine_options(self) -> dict[str, Any] | None:
        """Options of `LLM.generate` that keep the same ids; None if there are none.

        The engine cuts after the temperature, and top_p after top_k: a min_p of 1/temp-th power keeps the same ids, a
        top_p does so at temperature 1 alone, and not beside a top_k.
        """
        nucleus = 0 < self.top_p < 1
        if self.xtc_probability > 0 or (self.min_p and self.min_tokens_to_keep > 1):
            return None
        if nucleus and (self.temp != 1 or self.top_k > 0):
            return None
        options: dict[str, Any] = {"temperature": self.temp, "top_k": self.top_k}
        if nucleus:
            options["top_p"] = self.top_p
        if self.min_p:
            options["min_p"] = self.min_p ** (1 / self.temp)
        return options


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] | None = None,
    *,
    seed: int | None = None,
) -> Sampler:
    """A sampler: (log-probabilities [B, V]) → ids [B]; temp 0 takes the likeliest.

    Off are top_p 0 or 1, min_p 0, top_k 0 or -1, xtc_probability 0. seed, of penstock: the same draws in every call of
    `generate`, which has the option as well. Raises InvalidArgument, naming the argument.
    """
    for name, value in (("temp", temp), ("top_p", top_p), ("min_p", min_p)):
        _number(name, value)
    if temp < 0 or top_p < 0 or not 0 <= min_p <= 1:
        found = f"temp {temp}, top_p {top_p}, min_p {min_p}"
        raise InvalidArgument(f"make_sampler: got {found}, expected temp and top_p of at least 0 and min_p from 0 to 1")
    if top_k < -1:
        raise InvalidArgument(f"make_sampler: top_k is {top_k}, expected 0 or -1 (off), or more")
    integer(min_tokens_to_keep, "make_sampler: min_tokens_to_keep", 1)
    if xtc_probability and not (0 < xtc_probability <= 1 and 0 <= xtc_threshold <= 0.5):
        found = f"xtc_probability {xtc_probability} and xtc_threshold {xtc_threshold}"
        raise InvalidArgument(f"make_sampler: got {found}, expected 0 to 1 and 0 to 0.5")
    if temp == 0:
        return greedy_sampler
    special = tuple(token_ids(list(xtc_special_tokens or ()), "make_sampler: xtc_special_tokens"))
    return CategoricalSampler(
        float(temp),
        float(top_p),
        float(min_p),
        min_tokens_to_keep,
        max(0, int(top_k)),
        float(xtc_probability),
        float(xtc_threshold),
        special,
        seed,
        np.random.default_rng(seed),
    )


@dataclass(frozen=True, eq=False)
class LogitBias:
    """Adds to the logits of some ids."""

    bias: Mapping[int, float]

    def __call__(self, tokens: Any, logits: Any) -> np.ndarray:
        x = np.array(_float(logits))
        for token, value in self.bias.items():
            x[:, token] += np.float32(value)
        return x


@dataclass(frozen=True, eq=False)
class RepetitionPenalty:
    """Divides positive and multiplies negative logits of the last context_size tokens (0: of all) by the penalty."""

    penalty: float
    context_size: int

    def __call__(self, tokens: Any, logits: Any) -> np.ndarray:
        x, recent = np.array(_float(logits)), _recent(tokens, self.context_size)
        seen = x[:, recent]
        x[:, recent] = np.where(seen < 0, seen * np.float32(self.penalty), seen / np.float32(self.penalty))
        return x


@dataclass(frozen=True, eq=False)
class PresencePenalty:
    """Subtracts the penalty once from the logit of each of the last context_size tokens (0: of all)."""

    penalty: float
    context_size: int

    def __call__(self, tokens: Any, logits: Any) -> np.ndarray:
        x, recent = np.array(_float(logits)), _recent(tokens, self.context_size)
        x[:, recent] -= np.float32(self.penalty)
        return x


@dataclass(frozen=True, eq=False)
class FrequencyPenalty:
    """Subtracts the penalty from the logit of a token as often as it is among the last context_size (0: all)."""

    penalty: float
    context_size: int

    def __call__(self, tokens: Any, logits: Any) -> np.ndarray:
        x = np.array(_float(logits))
        ids, counts = np.unique(_recent(tokens, self.context_size), return_counts=True)
        x[:, ids] -= counts.astype(np.float32) * np.float32(self.penalty)
        return x


def make_repetition_penalty(penalty: float, context_size: int = 20) -> LogitsProcessor:
    """A processor that makes the last context_size tokens less likely (penalty above 1)."""
    _number("penalty", penalty)
    if penalty < 0:
        raise InvalidArgument(f"penalty is {penalty!r}, expected a number of at least 0")
    return RepetitionPenalty(float(penalty), integer(context_size, "context_size", 0))


def make_presence_penalty(penalty: float, context_size: int = 20) -> LogitsProcessor:
    """A processor that subtracts the penalty from the logits of the last context_size tokens."""
    _number("penalty", penalty)
    return PresencePenalty(float(penalty), integer(context_size, "context_size", 0))


def make_frequency_penalty(penalty: float, context_size: int = 20) -> LogitsProcessor:
    """A processor that subtracts the penalty as often as a token is among the last context_size."""
    _number("penalty", penalty)
    return FrequencyPenalty(float(penalty), integer(context_size, "context_size", 0))


def make_logits_processors(
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int | None = 20,
    presence_penalty: float | None = None,
    presence_context_size: int | None = 20,
    frequency_penalty: float | None = None,
    frequency_context_size: int | None = 20,
) -> list[LogitsProcessor]:
    """Processors (tokens [n], logits [1, V]) → logits, applied in this order; None and 0 leave one out.

    A context counts tokens of the prompt and of the answer, as mlx-lm has it.
    """
    found: list[LogitsProcessor] = []
    if logit_bias:
        for token, value in logit_bias.items():
            integer(token, "logit_bias: a token id", 0)
            _number(f"logit_bias[{token}]", value)
        found.append(LogitBias({int(token): float(value) for token, value in logit_bias.items()}))
    for make, penalty, size in (
        (make_repetition_penalty, repetition_penalty, repetition_context_size),
        (make_presence_penalty, presence_penalty, presence_context_size),
        (make_frequency_penalty, frequency_penalty, frequency_context_size),
    ):
        if penalty:
            found.append(make(penalty, integer(size, "context_size", 0)))
    return found


@dataclass(frozen=True)
class SamplingPlan:
    """How the tokens of one request are chosen.

    options of the engine. processors: hooks that edit the logits, `cut` what a sampler rules out of them afterwards,
    `sampler` a hook that chooses. edits: processors whose work the engine does by its options.
    """

    options: dict[str, Any]
    processors: tuple[LogitsProcessor, ...] = ()
    cut: CategoricalSampler | None = None
    sampler: Sampler | None = None
    edits: tuple[LogitsProcessor, ...] = ()


def sampling_plan(
    sampler: Sampler | None,
    logits_processors: Sequence[LogitsProcessor] | None,
    *,
    prompt: int,
    held: int = 0,
    vocab_size: int,
    seed: int | None = None,
) -> SamplingPlan:
    """What the engine does by its options and what runs as hooks, with mlx-lm's meaning.

    prompt: tokens that are given now; held: those that a prompt cache has, which mlx-lm's processors do not see.
    """
    processors = _checked(logits_processors)
    options: dict[str, Any] = {"temperature": 0.0, "seed": seed}
    cut = hook = None
    if isinstance(sampler, CategoricalSampler):
        if sampler.top_k >= vocab_size:
            raise InvalidArgument(f"top_k is {sampler.top_k}, expected 1 to {vocab_size - 1} (of the vocabulary)")
        known = sampler.engine_options()
        options |= {"temperature": sampler.temp} if known is None else known
        options["seed"] = sampler.seed if seed is None else seed
        cut = sampler if known is None else None
    elif sampler is not None and sampler is not greedy_sampler:
        if not callable(sampler):
            raise DTypeError(f"sampler is a {type(sampler).__name__}, expected a callable")
        hook = sampler
    edits = _engine_edits(processors, prompt if held else None) if cut is None and hook is None else None
    if edits is None:
        return SamplingPlan(options, processors, cut, hook)
    return SamplingPlan(options | edits, edits=processors)


def _engine_edits(processors: Sequence[LogitsProcessor], visible: int | None) -> dict[str, Any] | None:
    """Options of the engine for exactly these processors; visible: tokens of the prompt, if more stand before it."""
    options: dict[str, Any] = {}
    for processor in processors:
        if isinstance(processor, LogitBias) and not options:
            options["logit_bias"] = dict(processor.bias)
        elif isinstance(processor, RepetitionPenalty) and "repetition_penalty" not in options:
            low, high = _REPETITION_LIMITS
            size = processor.context_size
            if not low <= processor.penalty <= high or (visible is not None and not 0 < size <= visible):
                return None
            options |= {"repetition_penalty": processor.penalty, "repetition_context": size or None}
        else:  # others have no option, or the engine has another order
            return None
    return options


def _checked(processors: Any) -> tuple[LogitsProcessor, ...]:
    if processors is None:
        return ()
    if callable(processors) or isinstance(processors, str) or not isinstance(processors, Sequence):
        raise DTypeError(f"logits_processors is a {type(processors).__name__}, expected a list of callables")
    for n, processor in enumerate(processors):
        if not callable(processor):
            raise DTypeError(f"logits_processors[{n}] is a {type(processor).__name__}, expected a callable")
    return tuple(processors)


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise InvalidArgument(f"{name} is {value!r:.60}, expected a number")


def _float(logits: Any) -> np.ndarray:
    x = as_numpy(logits)
    return x if x.dtype == np.float32 else x.astype(np.float32)


def _kept(x: np.ndarray, kept: np.ndarray) -> np.ndarray:
    return np.where(kept, x, np.float32(-np.inf))


def _highest(x: np.ndarray, count: int) -> np.ndarray:
    """The ids of the `count` highest of each row, lower ids first among equals."""
    return np.argsort(-x, axis=-1, kind="stable")[..., :count]


def _recent(tokens: Any, context_size: int) -> np.ndarray:
    return as_numpy(tokens)[-context_size:].astype(np.int64)
