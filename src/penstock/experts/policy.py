"""Which expert to give up when a slot is needed.

A cache has S slots, and each holds one expert, named by a key from 0 to K − 1: layer · E + expert, so that the keys of
a step rise from layer to layer. What a policy knows is what was used so far. A call costs some microseconds; none
loops over slots.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from penstock.errors import InvalidArgument

POLICIES = ("lru", "lfru", "pin")
AUTO = "lfru"  # ahead of the others nearly everywhere: docs/streaming-plan.md has the hit rates

_FEW = 16  # victims that are looked for one by one, 1.5 µs each among 10 000 slots; sorting those takes 500 µs


class Policy(Protocol):
    """Keeps account of the slots. For a layer of a decode step: `victims`, `filled`, then `used`; of a prefill:
    `add_prefill_counts`, `victims`, `filled`, then `touch_prefill`.
    """

    def used(self, slots: np.ndarray) -> None:
        """A decode step chose the experts in these slots, newly filled ones among them. Once per layer and step."""
        ...

    def filled(self, slots: np.ndarray, keys: np.ndarray) -> None:
        """These slots hold these experts now."""
        ...

    def victims(self, count: int, busy: np.ndarray) -> np.ndarray:
        """Up to `count` slots to give up, the least loss first, empty ones before all. busy bool [S]: not these."""
        ...

    def ranks(self) -> np.ndarray:
        """The score of each slot now, [S]: what a step loses with it; −inf for an empty one."""
        ...

    def touch_prefill(self, slots: np.ndarray) -> None:
        """A prefill, which touches nearly all experts, filled these slots: that alone makes nothing worth keeping."""
        ...

    def add_prefill_counts(self, keys: np.ndarray, counts: np.ndarray, tokens: int) -> None:
        """Of a prefill's `tokens` counts[i] chose expert keys[i]. Once per layer and piece; it may be left out."""
        ...


def make_policy(name: str, slots: int, keys: int) -> Policy:
    """The policy of that name ("lru", "lfru", "pin", or "auto") for a cache of `slots` over `keys` experts."""
    if slots < 1 or keys < 1:
        raise InvalidArgument(f"expert cache: has {slots} slots for {keys} experts, expected at least one of each")
    made = {"lru": Lru, "lfru": Lfru, "pin": Pin}.get(AUTO if name == "auto" else name)
    if made is None:
        raise InvalidArgument(f"expert policy: is {name!r}, expected one of auto, {', '.join(POLICIES)}")
    return made(slots, keys)


class _Ranked:
    """Gives up the slots of the lowest score, the lowest number first among equals."""

    def __init__(self, slots: int, keys: int) -> None:
        self._score = np.full(slots, -np.inf)  # that of an empty slot
        self._key = np.full(slots, -1, np.int64)

    def filled(self, slots: np.ndarray, keys: np.ndarray) -> None:
        self._key[slots] = keys

    def ranks(self) -> np.ndarray:
        return self._score

    def victims(self, count: int, busy: np.ndarray) -> np.ndarray:
        score = np.where(busy, np.inf, self.ranks())
        if count > _FEW:
            free = len(score) - int(np.count_nonzero(busy))
            return np.argsort(score, kind="stable")[: min(count, free)]
        found: list[int] = []
        for _ in range(count):
            slot = int(score.argmin())
            if score[slot] == np.inf:
                break
            score[slot] = np.inf
            found.append(slot)
        return np.array(found, np.int64)

    def add_prefill_counts(self, keys: np.ndarray, counts: np.ndarray, tokens: int) -> None:
        pass


class Lru(_Ranked):
    """The expert that was used longest ago goes first. What a prefill brought in goes before all, the latest first."""

    def __init__(self, slots: int, keys: int) -> None:
        super().__init__(slots, keys)
        self._now = 0
        self._passed = 0
        self._unused = np.zeros(slots, bool)

    def filled(self, slots: np.ndarray, keys: np.ndarray) -> None:
        super().filled(slots, keys)
        self._touch(slots)  # until it is known what for
        self._unused[slots] = True

    def used(self, slots: np.ndarray) -> None:
        self._touch(slots)
        self._unused[slots] = False

    def touch_prefill(self, slots: np.ndarray) -> None:
        slots = slots[self._unused[slots]]  # what decoding uses keeps its place
        self._passed += len(slots)
        self._score[slots] = np.arange(-self._passed, len(slots) - self._passed)

    def _touch(self, slots: np.ndarray) -> None:
        self._score[slots] = np.arange(self._now, self._now + len(slots))
        self._now += len(slots)


class Lfru(_Ranked):
    """Frequency and recency: the expert that the next step uses with the least chance goes first.

    The chance is estimated from two shares of the past steps that used an expert, one with a half-life of 64 steps, one
    with 4, kept for all experts, held or not. How much each of them says differs between models: their weights are
    fitted to the steps so far by least squares. A prefill's counts move the long share half the way to their own.
    """

    def __init__(self, slots: int, keys: int) -> None:
        super().__init__(slots, keys)
        self._decay = 2.0 ** (-1 / np.array([[64.0], [4.0]]))
        self._shares = np.zeros((2, keys))
        self._weights = _PRIOR
        self._moments = np.zeros((2, 2))  # Σ shares · shares over past steps and keys, older steps counting less
        self._matches = np.zeros(2)  # Σ shares over the uses
        self._last = -1  # first key of the last layer; a lower one begins a step
        self._steps = 0
        self._stale = False

    def used(self, slots: np.ndarray) -> None:
        if not len(slots):
            return
        keys = self._key[slots]
        first = int(keys.min())
        if first <= self._last:
            self._step()
        self._last = first
        shares = self._shares[:, keys]
        self._matches += shares.sum(axis=1)
        self._shares[:, keys] = shares + (1 - self._decay)
        self._score[slots] = self._chance(keys)

    def filled(self, slots: np.ndarray, keys: np.ndarray) -> None:
        super().filled(slots, keys)
        self._score[slots] = self._chance(keys)

    def _chance(self, keys: np.ndarray) -> np.ndarray:
        """The scores of these experts. (A product of matrices would wake the threads of BLAS for it.)"""
        (long, short), (a, b) = self._shares, self._weights
        return a * long[keys] + b * short[keys]

    def ranks(self) -> np.ndarray:
        if self._stale:
            self._score = np.where(self._key < 0, -np.inf, self._chance(self._key))
            self._stale = False
        return self._score

    def touch_prefill(self, slots: np.ndarray) -> None:
        pass  # the score is what the past says

    def add_prefill_counts(self, keys: np.ndarray, counts: np.ndarray, tokens: int) -> None:
        self._shares[0, keys] += (counts / tokens - self._shares[0, keys]) / 2
        self._stale = True

    def _step(self) -> None:
        """The last step is complete: fit the weights to it, then let a step's time pass."""
        self._weights = _fitted(self._moments, self._matches)
        self._shares *= self._decay
        self._steps += 1
        if self._steps % 512 == 0:
            self._shares[self._shares < 1e-30] = 0  # numbers that are nearly 0 make arithmetic slow
        self._moments = _KEEP * self._moments + np.einsum("ik,jk->ij", self._shares, self._shares)
        self._matches *= _KEEP
        self._stale = True


_KEEP = 0.98  # of what past steps say about the weights, per step
_PRIOR = np.array([0.8, 0.2])  # weights of the long and the short share as long as there is little to fit


def _fitted(moments: np.ndarray, matches: np.ndarray) -> np.ndarray:
    """Weights w ≥ 0 of the least Σ (use − w · shares)², drawn a little to the prior."""
    drawn = 0.025 * np.trace(moments)
    if drawn <= 0:
        return _PRIOR
    (a, b), (_, d) = moments + drawn * np.eye(2)
    x, y = matches + drawn * _PRIOR
    return np.maximum(np.array([d * x - b * y, a * y - b * x]) / (a * d - b * b), 0)


class Pin(Lru):
    """The experts used most so far keep 7 of 8 slots; in the rest the one used longest ago goes first.

    The pinned ones are chosen anew after every K uses. An expert that is pinned but not held comes in when it is used.
    """

    def __init__(self, slots: int, keys: int) -> None:
        super().__init__(slots, keys)
        self._uses = np.zeros(keys, np.int64)
        self._pinned = np.zeros(keys + 1, bool)  # the last one for empty slots, whose key is −1
        self._room = slots - -(-slots // 8)
        self._since = 0

    def used(self, slots: np.ndarray) -> None:
        super().used(slots)
        self._uses[self._key[slots]] += 1
        self._since += len(slots)
        if self._since >= len(self._uses):
            self._since = 0
            self._pinned[:] = False
            self._pinned[np.argsort(-self._uses, kind="stable")[: self._room]] = True

    def add_prefill_counts(self, keys: np.ndarray, counts: np.ndarray, tokens: int) -> None:
        self._uses[keys] += counts
        self._since += int(counts.sum())

    def ranks(self) -> np.ndarray:
        return self._score + np.where(self._pinned[self._key], 2.0**52, 0)
