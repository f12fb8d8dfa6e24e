"""What a request wants to know of its prompt, reduced from the rows of each chunk to a few numbers per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.engine.sampling import refuse_logits
from penstock.errors import InvalidArgument, NonFiniteLogits

POOLINGS = ("mean", "last")


class Reading(NamedTuple):
    """kind: "mean" or "last", an embedding by that pooling; "logprobs", how likely each token was behind the others.

    What is found are pieces, tuples of arrays. Of an embedding one piece: float32 [dim]. Of log probabilities one for
    each chunk, which together have n tokens, all of the prompt but the first: log probabilities float64 [n], ranks
    int32 [n] (1: no other was likelier), the `top` likeliest tokens int32 [n, top] and theirs float64 [n, top].
    """

    kind: str
    top: int = 0

    @property
    def hidden(self) -> bool:
        """Whether it reads hidden states in place of logits."""
        return self.kind in POOLINGS

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

    def add(self, rows: np.ndarray) -> None:
        """rows: hidden states float32 [n, dim], or logits float32 [n, vocab]. Raises NonFiniteLogits."""
        at, self._count = self._count, self._count + len(rows)
        if not self._reading.hidden:
            self._pieces.append(_likelihoods(rows, self._prompt[at + 1 : self._count + 1], self._reading.top, at + 1))
            return
        if self._reading.kind == "mean":
            self._sum = self._sum + rows.sum(axis=0, dtype=np.float64)
        else:
            self._sum = rows[-1].astype(np.float64)
        if self._count == len(self._prompt):
            self._pieces.append((_direction(self._sum),))


def _likelihoods(rows: np.ndarray, tokens: Sequence[int], top: int, position: int) -> tuple[np.ndarray, ...]:
    """A piece of `Reading`: how likely these tokens, the first of them at `position`, were by the rows before them."""
    n = len(tokens)
    logprobs, ranks = np.empty(n), np.empty(n, np.int32)
    ids, values = np.empty((n, top), np.int32), np.empty((n, top))
    for i, token in enumerate(tokens):
        row = rows[i]
        most = float(row.max())
        if not np.isfinite(most):
            refuse_logits(row, position + i)
        total = most + np.log(np.exp(row - most).sum(dtype=np.float64))
        logprobs[i], ranks[i] = row[token] - total, 1 + np.count_nonzero(row > row[token])
        if top:
            best = np.argpartition(row, -top)[-top:]
            ids[i] = best[np.lexsort((best, -row[best]))]
            values[i] = row[ids[i]] - total
    return logprobs, ranks, ids, values


def _direction(vector: np.ndarray) -> np.ndarray:
    """Divided by its Euclidean length. Raises NonFiniteLogits."""
    length = np.linalg.norm(vector)
    if not np.isfinite(length):
        raise NonFiniteLogits("embed: the model produced hidden states that are not finite")
    return (vector / length if length else vector).astype(np.float32)


def check_pooling(pooling: str) -> None:
    if pooling not in POOLINGS:
        raise InvalidArgument(f"embed: pooling is {pooling!r}, expected {' or '.join(POOLINGS)}")
