"""Drafts by a second, smaller model of the same vocabulary, which has an engine and caches of its own.

A sequence of it follows each one that it drafts for, by the tokens alone: before it drafts it goes back to what both
have in common and reads what is missing, a whole prompt or what was accepted since. So nothing has to be told when
drafts are accepted, when a session is rewound, or when a request is computed again in another sequence. Sequences whose
own has been closed are kept for texts that begin alike. Where its memory ends there are no drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from penstock.engine.cache import Sequence, Snapshot
from penstock.engine.draft_head import Asked
from penstock.engine.engine import Engine
from penstock.engine.speculate import MOST_DRAFTS
from penstock.engine.steps import Run
from penstock.errors import CheckpointError, OutOfMemory

_log = logging.getLogger("penstock")

_IDLE = 4  # sequences that are kept
_AT_ONCE = 1 + MOST_DRAFTS  # tokens that are read together with those of other sequences


@dataclass(eq=False)
class _Follower:
    """A sequence of the draft model and the tokens that it holds; snapshot: before drafts, where it cannot go back."""

    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    snapshot: Snapshot | None = None


class DraftModel:
    """Drafts for the sequences of another engine, whose model has `vocab_size` tokens."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self.engine, self._vocab_size = engine, vocab_size
        self._followers: dict[Sequence, _Follower] = {}
        self._idle: list[_Follower] = []
        self._failed = False  # its files are no longer what they were

    def ready(self, sequence: Sequence) -> bool:
        """Whether it can draft behind the next token of a sequence."""
        return not self._failed and sequence.length + 1 + MOST_DRAFTS <= self.engine.max_context

    def draft(self, asked: Seq[Asked]) -> None:
        """Draft for sequences that are `ready`; `Asked.text` has their tokens and the one that comes next."""
        try:
            with self.engine.lock:
                self._sweep()
                size = max(1, min(self.engine.most_tokens // _AT_ONCE, self.engine.most_sequences))
                for first in range(0, len(asked), size):
                    self._draft(asked[first : first + size])
        except CheckpointError as error:
            self._failed = True
            _log.warning("no more drafts: %s", error)

    def close(self) -> None:
        """Give back the memory of all sequences."""
        with self.engine.lock:
            for one in (*self._followers.values(), *self._idle):
                self._drop(one)
            self._followers, self._idle = {}, []

    def _draft(self, asked: Seq[Asked]) -> None:
        going: list[tuple[Asked, _Follower]] = []
        fed: list[list[int]] = []
        for one in asked:
            found = self._caught_up(one)
            if found is not None:
                going.append((one, found))
                fed.append(list(one.text[len(found.tokens) :]))
        place = 0
        while going:
            rows = self._step([one for _, one in going], fed)
            if rows is None:
                return
            for (one, _), row in zip(going, rows, strict=True):
                mask = one.mask if place == 0 else None
                drawn = one.sampler.draft(row[: self._vocab_size], one.sequence.length + 1 + place, mask)
                one.drafts.append(drawn)
            place += 1
            going = [(one, own) for one, own in going if one.count > place]
            fed = [[one.drafts[-1]] for one, _ in going]
            if place == 1:
                for _, own in going:
                    if not self.engine.caches.can_truncate(own.sequence):
                        own.snapshot = self.engine.snapshot(own.sequence)

    def _step(self, followers: list[_Follower], fed: list[list[int]]) -> np.ndarray | None:
        """Logits after these tokens, which the followers then hold; None if there is no memory for them."""
        runs = [
            Run(own.sequence, self._ids(tokens), prompt=len(tokens) > 1)
            for own, tokens in zip(followers, fed, strict=True)
        ]
        try:
            rows = self.engine.step(runs)
        except OutOfMemory:
            return None
        for own, tokens in zip(followers, fed, strict=True):
            own.tokens += tokens
        return rows

    def _ids(self, tokens: Seq[int]) -> np.ndarray:
        """Tokens as the draft model reads them: in place of those that the other model alone has an embedding of,
        behind the vocabulary of both, the first one.
        """
        ids = np.array(tokens, np.int32)
        ids[ids >= self.engine.model.config.vocab_size] = 0
        return ids

    # -- sequences ---------------------------------------------------------------------------------------------------

    def _caught_up(self, one: Asked) -> _Follower | None:
        """The follower of a sequence, which holds the beginning of its text and lacks few tokens of it, one at least;
        None if there is no memory for it.
        """
        known = list(one.text[:-1])
        try:
            own = self._followers.get(one.sequence) or self._opened(known)
            self._followers[one.sequence] = own = self._going_back(own, known)
            missing = one.text[len(own.tokens) :]
            if len(missing) > _AT_ONCE:
                self.engine.prefill(own.sequence, self._ids(missing[:-1]).tolist())
                own.tokens = known
        except OutOfMemory:
            own = self._followers.pop(one.sequence, None)
            if own is not None:
                self._drop(own)
            return None
        return own

    def _opened(self, known: list[int]) -> _Follower:
        """One that was kept and can serve a text, the one with most in common, or a new one."""
        best, most = None, 0
        for one in self._idle:
            same = _common(one.tokens, known)
            if same > most and (same == len(one.tokens) or self.engine.caches.can_truncate(one.sequence)):
                best, most = one, same
        if best is not None:
            self._idle.remove(best)
            return best
        while True:
            try:
                return _Follower(self.engine.open())
            except OutOfMemory:
                if not self._idle:
                    raise
                self._drop(self._idle.pop(0))

    def _going_back(self, own: _Follower, known: list[int]) -> _Follower:
        """A follower that holds nothing but the beginning of a text: itself, gone back, or another one."""
        engine, same = self.engine, _common(own.tokens, known)
        corrupt = own.sequence.corrupt
        if same == len(own.tokens) and not corrupt:
            pass
        elif engine.caches.can_truncate(own.sequence) and not corrupt:
            engine.truncate(own.sequence, same)
            del own.tokens[same:]
        elif own.snapshot is not None and own.snapshot.length <= same:
            engine.rewind(own.sequence, own.snapshot)
            del own.tokens[own.snapshot.length :]
        else:
            self._drop(own)
            return self._opened(known)
        if own.snapshot is not None:
            engine.drop(own.snapshot)
            own.snapshot = None
        return own

    def _sweep(self) -> None:
        """Followers of sequences that were closed serve others, the latest of them."""
        for sequence in [one for one in self._followers if one.closed]:
            self._idle.append(self._followers.pop(sequence))
        while len(self._idle) > _IDLE:
            self._drop(self._idle.pop(0))

    def _drop(self, own: _Follower) -> None:
        if own.snapshot is not None:
            self.engine.drop(own.snapshot)
        self.engine.close(own.sequence)


def _common(held: list[int], known: list[int]) -> int:
    """How many tokens two texts begin with alike. The last ones differ, if any: they were drafts."""
    for count in range(len(held), max(-1, len(held) - 1 - MOST_DRAFTS), -1):
        if held[:count] == known[:count]:
            return count
    pairs = zip(held, known, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(held), len(known)))
