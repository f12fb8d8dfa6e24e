"""Callables of a request that take part in choosing its tokens, on NumPy arrays of the host.

The order is mlx-lm's: processors see the logits of the step, one after the other; then come penalties, bias and the
mask of a grammar; a sampler chooses from the log-probabilities of what these leave. They are called by the thread that
runs the step, one at a time, once for each token.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from penstock.errors import Cancelled, InvalidArgument

LogitsProcessor: TypeAlias = Callable[[np.ndarray, np.ndarray], Any]
"""(tokens int32 [n] of the prompt and what was generated, logits float32 [1, V]) → logits [1, V].

The logits are the hook's own and may be changed; the tokens may not.
"""
TokenSampler: TypeAlias = Callable[[np.ndarray], Any]
"""(log-probabilities float32 [B, V]) → ids [B]; B is 1."""

T = TypeVar("T")


class HookInterrupted(Cancelled):
    """Something other than an error, a KeyboardInterrupt, was raised in a hook: its request ends, and so does the step
    that called it, with `reason`, once the others have their tokens.
    """

    def __init__(self, name: str, reason: BaseException) -> None:
        super().__init__(f"{name}: it was interrupted by {type(reason).__name__}")
        self.reason = reason


@dataclass(frozen=True, eq=False)
class Hooks:
    """The callables of one request."""

    processors: tuple[LogitsProcessor, ...] = ()
    sampler: TokenSampler | None = None

    def process(self, tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """What the processors make of finite logits float32 [V]. Raises InvalidArgument for what are no logits."""
        found, shape = logits, (1, len(logits))
        for n, processor in enumerate(self.processors):
            name = f"logits_processors[{n}] ({_named(processor)})"
            given = _called(name, processor, tokens, np.array(found[None]))
            found = _float_array(name, given, shape)[0]
            _check_logits(name, found)
        return found

    def choose(self, logprobs: np.ndarray) -> int:
        """The id that the sampler chooses from log-probabilities float32 [V]. Raises InvalidArgument if it is none."""
        assert self.sampler is not None
        name, vocab = f"sampler ({_named(self.sampler)})", len(logprobs)
        given = _called(name, self.sampler, np.array(logprobs[None]))
        ids = _array(given)
        if ids is None or ids.dtype.kind not in "iu" or ids.shape != (1,):
            raise InvalidArgument(f"{name}: returned {_shown(given)}, expected integers of shape (1,): the ids chosen")
        if not 0 <= (token := int(ids[0])) < vocab:
            raise InvalidArgument(f"{name}: returned the id {token}, expected one from 0 to {vocab - 1}")
        if logprobs[token] == -np.inf:
            raise InvalidArgument(f"{name}: returned the id {token}, expected one whose log-probability is not -inf")
        return token


def make_hooks(processors: Any, sampler: Any) -> Hooks | None:
    """The hooks of these options, None if there are none. Raises InvalidArgument for what cannot be called."""
    if processors is None:
        processors = ()
    if not isinstance(processors, Seq) or isinstance(processors, str):
        raise InvalidArgument(f"logits_processors is {_shown(processors)}, expected a list of callables")
    for n, processor in enumerate(processors):
        if not callable(processor):
            raise InvalidArgument(f"logits_processors[{n}] is {_shown(processor)}, expected a callable")
    if sampler is not None and not callable(sampler):
        raise InvalidArgument(f"sampler is {_shown(sampler)}, expected a callable")
    return Hooks(tuple(processors), sampler) if processors or sampler is not None else None


class TokenHistory:
    """Tokens of a sequence as hooks see them: one array that grows."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._array = np.array(list(tokens), np.int32)
        self._length = len(self._array)

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Seq[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._array):
            grown = np.empty(max(64, 2 * end), np.int32)
            grown[: self._length] = self._array[: self._length]
            self._array = grown
        self._array[self._length : end] = tokens
        self._length = end

    def view(self) -> np.ndarray:
        """int32 [n], which cannot be written to and stays as it is."""
        found = self._array[: self._length]
        found.flags.writeable = False
        return found


def _called(name: str, hook: Callable[..., Any], *args: np.ndarray) -> Any:
    try:
        return hook(*args)
    except (StopIteration, StopAsyncIteration) as error:  # would end the loop of a reader without a word
        raise RuntimeError(f"{name}: it raised {type(error).__name__}") from error
    except Exception:
        raise
    except BaseException as reason:
        raise HookInterrupted(name, reason) from reason


def _float_array(name: str, given: Any, shape: tuple[int, ...]) -> np.ndarray:
    array = _array(given)
    if array is None or array.dtype.kind != "f" or array.shape != shape:
        raise InvalidArgument(f"{name}: returned {_shown(given)}, expected logits: float32 of shape {shape}")
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


def _check_logits(name: str, x: np.ndarray) -> None:
    highest = x.max()
    if np.isfinite(highest):
        return
    if highest == -np.inf:
        raise InvalidArgument(f"{name}: returned -inf for all {x.size} tokens, expected a number for one at least")
    wrong = np.flatnonzero(np.isnan(x) | (x == np.inf))
    what = "NaN" if np.isnan(x[wrong[0]]) else "+inf"
    raise InvalidArgument(
        f"{name}: returned NaN or +inf for {wrong.size} of {x.size} tokens, expected numbers or -inf; "
        f"the first is {what} for token {wrong[0]}"
    )


def _array(given: Any) -> np.ndarray | None:
    """As an array, None if it is none."""
    try:
        array = np.asarray(given)
    except Exception:
        return None
    return None if array.dtype == object else array


def _named(hook: Any) -> str:
    return str(getattr(hook, "__name__", None) or type(hook).__name__)[:100]


def _shown(value: Any) -> str:
    """An array by its dtype and shape, all else as Python writes it, shortened."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{str(dtype)[:40]} of shape {tuple(shape)}"
    return reprlib.repr(value)
