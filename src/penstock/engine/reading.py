"""What a request wants to know of its prompt, reduced from the rows of each chunk to a few numbers per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import InvalidArgument, NonFiniteLogits
from penstock.ops.sampling import NOT_FINITE

POOLINGS = ("mean", "last")


class Reading(NamedTuple):
    """kind: "mean" or "last", an embedding by that pooling; "logprobs", how likely each token was behind the others.

    What is found are pieces, tuples of arrays. Of an embedding one piece: float32 [dim]. Of log probabilities one for
    each chunk, which together have n tokens, all of the prompt but the first: log probabilities float64 [n], ranks
    int32 [n] (1: no other was likelier), the `top` likeliest tokens int32 [n, top] (−1: there are fewer) and theirs
    float64 [n, top].
    """

    kind: str
    top: int = 0

    @property
    def hidden(self) -> bool:
        """Whether it reads hidden states in place of logits."""
        return self.kind in POOLINGS

    @staticmethod
    def targets(prompt: Sequence[int], at: int, end: int) -> np.ndarray:
        """Behind each token of a chunk of the prompt the one that comes next, int32 [end − at]; −1 behind the last."""
        return np.array([*prompt[at + 1 : end + 1], *[-1] * (end == len(prompt))], np.int32)

    def piece(self, parts: Sequence[bytes]) -> tuple[np.ndarray, ...]:
        """The arrays of a piece from their bytes. Raises ValueError for others."""
        if self.hidden:
            (vector,) = parts
            return (np.frombuffer(vector, "<f4"),)
        logprobs, ranks, ids, values = parts
        found = np.frombuffer(logprobs, "<f8"), np.frombuffer(ranks, "<i4")
        shape = (len(found[0]), self.top)
        return (*found, np.frombuffer(ids, "<i4").reshape(shape), np.frombuffer(values, "<f8").reshape(shape))


class Reader:
    """Takes the rows of a prompt, chunk by chunk, and adds to `pieces` what a reading wants."""

    def __init__(self, reading: Reading, prompt: Sequence[int], pieces: list[tuple[np.ndarray, ...]]) -> None:
        self._reading, self._prompt, self._pieces = reading, prompt, pieces
        self._count = 0
        self._sum = np.zeros(())

    def add(self, rows: np.ndarray, *more: np.ndarray) -> None:
        """rows: hidden states float32 [n, dim]; or, with more, what `ops.token_logprobs` gives for the token behind
        each. Raises NonFiniteLogits.
        """
        at, self._count = self._count, self._count + len(rows)
        if not self._reading.hidden:
            behind = min(self._count, len(self._prompt) - 1) - at
            self._pieces.append(_likelihoods(tuple(array[:behind] for array in (rows, *more)), at + 1))
            return
        if self._reading.kind == "mean":
            self._sum = self._sum + rows.sum(axis=0, dtype=np.float64)
        else:
            self._sum = rows[-1].astype(np.float64)
        if self._count == len(self._prompt):
            self._pieces.append((_direction(self._sum),))


def _likelihoods(piece: tuple[np.ndarray, ...], position: int) -> tuple[np.ndarray, ...]:
    """The piece, whose first token is at `position`, if all its rows were finite."""
    wrong = np.flatnonzero(piece[1] == NOT_FINITE)
    if wrong.size:
        at = position + int(wrong[0])
        raise NonFiniteLogits(f"sample: the model produced non-finite logits at position {at}")
    return piece


def _direction(vector: np.ndarray) -> np.ndarray:
    """Divided by its Euclidean length. Raises NonFiniteLogits."""
    length = np.linalg.norm(vector)
    if not np.isfinite(length):
        raise NonFiniteLogits("embed: the model produced hidden states that are not finite")
    return (vector / length if length else vector).astype(np.float32)


def check_pooling(pooling: str) -> None:
    if pooling not in POOLINGS:
        raise InvalidArgument(f"embed: pooling is {pooling!r}, expected {' or '.join(POOLINGS)}")
