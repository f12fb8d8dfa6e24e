"""What splitting a model over ranks costs: bytes of each rank, what is on several, and the sums of a token.

The sums are those of the traced step, whatever the family. Their time is a model: seconds before the first byte, then
the bytes that a ring of N ranks sends over each link, 2 (N − 1) / N of a sum's and (N − 1) / N of a gather's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock import ops
from penstock.analysis.trace import Outline
from penstock.engine.cache import Caches
from penstock.engine.rank import RankStart
from penstock.errors import InvalidArgument
from penstock.graph import Graph
from penstock.graph.trace import nbytes
from penstock.models.split import Mesh
from penstock.ops.collective import communicator, set_communicator


@dataclass(frozen=True)
class Link:
    """What ranks send each other arrays by: GB/s in one direction, seconds before the first byte, how that is known."""

    rate: float
    latency: float
    how: str


ASSUMED_LINKS = {
    "nvlink": Link(450.0, 6e-6, "NVLink of an H100 or H200, assumed"),
    "pcie": Link(25.0, 20e-6, "PCIe 4.0 x16, assumed"),
    "ethernet": Link(12.5, 50e-6, "100 Gbit/s, assumed"),
    "loopback": Link(1.0, 400e-6, "gloo within a machine, assumed"),
}


@dataclass(frozen=True)
class RankSum:
    """A kind of sum or gather over ranks in a step: how often, and the bytes of the result."""

    op: str
    nbytes: int
    count: int

    def seconds(self, size: int, link: Link) -> float:
        """Of all of them."""
        rounds = 2 if self.op == "all_reduce" else 1
        return self.count * (link.latency + rounds * (size - 1) / size * self.nbytes / (link.rate * 1e9))


def sums_of(graph: Graph) -> tuple[RankSum, ...]:
    """The sums and gathers of a step, in the order in which each kind comes first."""
    found: dict[tuple[str, int], int] = {}
    for node in graph.nodes:
        if node.op is ops.all_reduce or node.op is ops.all_gather:
            kind = node.op.name, sum(nbytes(out) for out in node.outs if out is not None)
            found[kind] = found.get(kind, 0) + 1
    return tuple(RankSum(op, size, count) for (op, size), count in found.items())


@dataclass(frozen=True)
class PlannedRanks:
    """A split model. largest: the rank whose bytes are planned for; whole: bytes by part of the model on one rank;
    repeated: by part and field, what all ranks together have more; caches: of the whole model and of each rank;
    busiest: experts of a token that the rank with the most of them computes, on average; sizes: numbers of ranks that
    the model can be split over.
    """

    size: int
    experts_split: bool
    largest: int
    whole: dict[str, int]
    repeated: dict[str, dict[str, int]]
    caches: tuple[Caches, tuple[Caches, ...]]
    sums: tuple[RankSum, ...]
    busiest: float
    sizes: tuple[int, ...]

    def repeated_bytes(self, part: str) -> int:
        return sum(self.repeated.get(part, {}).values())

    def cache_bytes(self, context: int) -> tuple[int, int]:
        """Of the whole model's caches, and what those of all ranks have more."""
        whole = self.caches[0].bytes_of(context)
        return whole, sum(caches.bytes_of(context) for caches in self.caches[1]) - whole

    def seconds(self, link: Link) -> float:
        """That a token's sums take."""
        return sum(one.seconds(self.size, link) for one in self.sums)


def busiest_rank(owned: Sequence[int], top_k: int) -> float:
    """How many of a token's experts the rank with the most of them has, on average, when all are as likely.

    owned: experts of each rank. E[max] = Σ over m of P(max > m); P(max ≤ m) counts the choices with at most m of each
    rank, the coefficient of x^top_k in the product over ranks of Σ over j ≤ m of C(owned, j) x^j.
    """
    whole = math.comb(sum(owned), top_k)
    if not whole:
        return float(top_k)
    expected = 0.0
    for most in range(top_k):
        ways = [1] + [0] * top_k
        for count in owned:
            own = [math.comb(count, j) for j in range(most + 1)]
            ways = [sum(own[j] * ways[k - j] for j in range(min(k, most) + 1)) for k in range(top_k + 1)]
        expected += 1 - ways[top_k] / whole
    return expected


def possible_sizes(outline: Outline, experts_split: bool, most: int = 256) -> tuple[int, ...]:
    """Numbers of ranks up to `most` that a model can be split over."""
    found = []
    for size in range(1, most + 1):
        try:
            RankStart(size, experts_split, 1.0, None).check(outline.family, outline.config, outline.columns)
        except InvalidArgument:
            continue
        found.append(size)
    return tuple(found)


@dataclass(frozen=True)
class _Stand:
    """A communicator that knows where it is and sends nothing, for tracing."""

    rank: int
    size: int
    capturable: bool = True

    def all_reduce(self, array: object, note: object = None) -> None:
        raise NotImplementedError

    def all_gather(self, parts: object, array: object) -> None:
        raise NotImplementedError


@contextmanager
def tracing_as(mesh: Mesh) -> Iterator[None]:
    """Trace the steps of a rank without being one."""
    before = communicator()
    set_communicator(_Stand(mesh.rank, mesh.size))
    try:
        yield
    finally:
        set_communicator(before)
