"""What a request wants to know of its prompt, reduced from the rows of each chunk to a few numbers per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import InvalidArgument, NonFiniteLogits

POOLINGS = ("mean", "last")


class Reading(NamedTuple):
    """kind: "mean" or "last", an embedding by that pooling.

    What is found are pieces, tuples of arrays: of an embedding one piece, float32 [dim].
    """

    kind: str

    @property
    def hidden(self) -> bool:
        """Whether it reads hidden states in place of logits."""
        return self.kind in POOLINGS

    def piece(self, parts: Sequence[bytes]) -> tuple[np.ndarray, ...]:
        """The arrays of a piece from their bytes. Raises ValueError for others."""
        (vector,) = parts
        return (np.frombuffer(vector, "<f4"),)


class Reader:
    """Takes the rows of a prompt of `length` tokens, chunk by chunk, and adds to `pieces` what a reading wants."""

    def __init__(self, reading: Reading, length: int, pieces: list[tuple[np.ndarray, ...]]) -> None:
        self._reading, self._length, self._pieces = reading, length, pieces
        self._count = 0
        self._sum = np.zeros(())

    def add(self, rows: np.ndarray) -> None:
        """rows: hidden states float32 [n, dim]. Raises NonFiniteLogits."""
        if self._reading.kind == "mean":
            self._sum = self._sum + rows.sum(axis=0, dtype=np.float64)
        else:
            self._sum = rows[-1].astype(np.float64)
        self._count += len(rows)
        if self._count == self._length:
            self._pieces.append((_direction(self._sum),))


def _direction(vector: np.ndarray) -> np.ndarray:
    """Divided by its Euclidean length. Raises NonFiniteLogits."""
    length = np.linalg.norm(vector)
    if not np.isfinite(length):
        raise NonFiniteLogits("embed: the model produced hidden states that are not finite")
    return (vector / length if length else vector).astype(np.float32)


def check_pooling(pooling: str) -> None:
    if pooling not in POOLINGS:
        raise InvalidArgument(f"embed: pooling is {pooling!r}, expected {' or '.join(POOLINGS)}")
