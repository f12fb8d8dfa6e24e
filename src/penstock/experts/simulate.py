"""What a cache of experts would have done on a recorded text: hits for every policy and size, and the most there are.

Simulated are the policies that the store uses, step by step as the store does: a decode step finds the experts of a
layer in slots or brings them in; a prefill runs through all that its tokens chose, some at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.errors import InvalidArgument
from penstock.experts.policy import POLICIES, make_policy

BUDGETS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)  # shares of all experts
BEST = "min"  # the column of the optimum

_PIECE = 256  # tokens of a prefill's step
_NEVER = 1 << 62


@dataclass(frozen=True)
class Step:
    """What one step asked for: per layer the keys (layer · E + expert) that its tokens chose, and how many did."""

    decode: bool
    tokens: int
    layers: tuple[tuple[np.ndarray, np.ndarray], ...]


@dataclass(frozen=True, eq=False)
class Trace:
    """Choices of T tokens in L layers of E experts: ids int32 [T, L, k], −1 where there is none; decode bool [T]."""

    ids: np.ndarray
    decode: np.ndarray
    experts: int

    @property
    def keys(self) -> int:
        """Experts of all layers."""
        return self.ids.shape[1] * self.experts

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """A step per decoded token; prefills in pieces of 256 tokens."""
        return tuple(self._steps())

    def _steps(self) -> Iterator[Step]:
        total, start = len(self.ids), 0
        while start < total:
            stop = start + 1
            decode = bool(self.decode[start])
            while not decode and stop < min(total, start + _PIECE) and not self.decode[stop]:
                stop += 1
            layers = []
            for layer in range(self.ids.shape[1]):
                ids = self.ids[start:stop, layer]
                keys, counts = np.unique(ids[ids >= 0], return_counts=True)
                layers.append((keys.astype(np.int64) + layer * self.experts, counts))
            yield Step(decode, stop - start, tuple(layers))
            start = stop

    @cached_property
    def chosen(self) -> np.ndarray:
        """Experts that each decode step asks for, int64 [D]."""
        return np.array([sum(len(keys) for keys, _ in step.layers) for step in self.steps if step.decode], np.int64)

    @cached_property
    def least(self) -> int:
        """Slots that the hungriest layer of a decode step needs."""
        return max((len(keys) for step in self.steps if step.decode for keys, _ in step.layers), default=1)


def simulate(trace: Trace, slots: int, policy: str) -> np.ndarray:
    """Experts that each decode step finds in a cache of `slots` under a policy, int64 [D]. The cache begins empty."""
    cache, hits = _Cache(trace, slots, policy), []
    for step in trace.steps:
        if step.decode:
            hits.append(cache.decoded(step))
        else:
            cache.prefilled(step)
    return np.array(hits, np.int64)


class _Cache:
    """Slots without contents."""

    def __init__(self, trace: Trace, slots: int, policy: str) -> None:
        if slots < trace.least:
            raise InvalidArgument(
                f"expert cache: has {slots} slots, expected at least {trace.least}, what a token chooses in a layer"
            )
        self._policy = make_policy(policy, slots, trace.keys)
        self._slot = np.full(trace.keys, -1, np.int64)
        self._key = np.full(slots, -1, np.int64)

    def _fetch(self, keys: np.ndarray, keep: np.ndarray) -> None:
        busy = np.zeros(len(self._key), bool)
        busy[keep] = True
        slots = self._policy.victims(len(keys), busy)
        gone = self._key[slots]
        self._slot[gone[gone >= 0]] = -1
        self._slot[keys], self._key[slots] = slots, keys
        self._policy.filled(slots, keys)

    def decoded(self, step: Step) -> int:
        """Go through a decode step; how many experts were there."""
        hits = 0
        for keys, _ in step.layers:
            slots = self._slot[keys]
            there = slots >= 0
            hits += int(np.count_nonzero(there))
            if not there.all():
                self._fetch(keys[~there], slots[there])
            self._policy.used(self._slot[keys])
        return hits

    def prefilled(self, step: Step) -> None:
        """Go through a prefill: of every layer first what is there, then the rest, half a cache at a time."""
        size = len(self._key)
        for keys, counts in step.layers:
            self._policy.add_prefill_counts(keys, counts, step.tokens)
            there = self._slot[keys] >= 0
            current, rest = keys[there], keys[~there]
            while len(current) or len(rest):
                count = min(max(1, size // 2), size - len(current))
                following, rest = rest[:count], rest[count:]
                self._fetch(following, self._slot[current])
                self._policy.touch_prefill(self._slot[current])
                current = following


def optimal(trace: Trace, slots: int) -> np.ndarray:
    """The most hits that any policy could have in each decode step, int64 [D]: Belady's MIN, which knows the future.

    Of the experts that the present layer does not use, the one that is needed last goes. A prefill reads its experts
    anyway, so MIN may keep any of them.
    """
    uses = [(step.decode, keys) for step in trace.steps for keys, _ in step.layers]
    following: list[list[int]] = []  # when each use is followed by the next one of its expert
    coming = np.full(trace.keys, _NEVER)
    for time in range(len(uses) - 1, -1, -1):
        decode, keys = uses[time]
        following.append(coming[keys].tolist())
        if decode:
            coming[keys] = time
    held: dict[int, int] = {}  # expert → when it is needed next
    order: list[tuple[int, int]] = []  # a heap of (−when, expert); entries that `held` contradicts are old
    hits = []
    for decode, keys in uses:
        needed = dict(zip(keys.tolist(), following.pop(), strict=True))
        hits.append(sum(key in held for key in needed) if decode else 0)
        held |= needed
        for key, when in needed.items():
            heapq.heappush(order, (-when, key))
        spared = []
        while len(held) > slots:
            when, key = heapq.heappop(order)
            if held.get(key) != -when:
                continue
            if decode and key in needed:
                spared.append((when, key))
            else:
                del held[key]
        for entry in spared:
            heapq.heappush(order, entry)
    layers = trace.ids.shape[1]
    return np.array(hits, np.int64).reshape(-1, layers).sum(axis=1)[[step.decode for step in trace.steps]]


@dataclass(frozen=True)
class Row:
    """A cache size: its share of all experts, its slots, and the share of choices that each policy finds in it."""

    share: float
    slots: int
    rates: dict[str, float]  # by policy, and "min"


def table(trace: Trace, budgets: Sequence[float] = BUDGETS, policies: Sequence[str] = POLICIES) -> Iterator[Row]:
    """Hit rates of the decode steps, a row per budget. Nothing for a trace without decode steps."""
    total = int(trace.chosen.sum())
    for share in budgets if total else ():
        slots = min(trace.keys, max(trace.least, int(share * trace.keys)))
        rates = {policy: int(simulate(trace, slots, policy).sum()) / total for policy in policies}
        yield Row(share, slots, rates | {BEST: int(optimal(trace, slots).sum()) / total})


def repeats(trace: Trace) -> np.ndarray:
    """Per layer, the share of a decoded token's experts that the token before it had chosen there too, float64 [L].

    That is how often prefetching the last token's choice would be right. NaN for a layer that never had the chance.
    """
    pairs = np.flatnonzero(trace.decode[1:]) + 1
    now, before = trace.ids[pairs], trace.ids[pairs - 1]
    again = (now[..., :, None] == before[..., None, :]).any(axis=-1) & (now >= 0)
    chances = (now >= 0).sum(axis=(0, 2))
    return np.divide(again.sum(axis=(0, 2)), chances, out=np.full(len(chances), np.nan), where=chances > 0)
