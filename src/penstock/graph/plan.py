"""Where the values of a graph lie in one arena: two values share bytes if no node needs both."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from penstock import ops
from penstock.graph.trace import Graph, Node, Value, nbytes

ALIGNMENT = 256  # of each value in the arena, as of a GPU's own allocations


@dataclass(frozen=True)
class Plan:
    """Byte offsets of all values that nodes make, the size of the arena, and what they would take each `apart`."""

    offsets: dict[Value, int]
    size: int
    apart: int


def plan(graph: Graph, cut: Callable[[Node], bool] | None = None) -> Plan:
    """Give each output of a node its place, first fit from the start; a place is free again after its last reader.

    Outputs of a node share no bytes with anything it reads: kernels may read an input after they began to write. But a
    sum over ranks takes the place of what it sums where that is read nowhere else: it is made in place.
    Outputs of the graph keep their place to the end, and so does what is made before a node that `cut` names and read
    from there on: the graph can be run from that node on again.
    """
    last: dict[Value, int] = {}
    for number, node in enumerate(graph.nodes):
        for value in node.reads:
            last[value.base] = number
    for output in graph.outputs:
        last[output.base] = len(graph.nodes)
    cuts = [number for number, node in enumerate(graph.nodes) if cut is not None and cut(node)]
    for number, node in enumerate(graph.nodes):
        for out in node.outs:
            if out is not None and any(number < at <= last.get(out, -1) for at in cuts):
                last[out] = len(graph.nodes)
    ending: dict[int, list[Value]] = {}
    for value, number in last.items():
        ending.setdefault(number, []).append(value)

    free = _Free()
    offsets: dict[Value, int] = {}
    apart = 0
    for number, node in enumerate(graph.nodes):
        made = [out for out in node.outs if out is not None]
        replaced = _replaced(node)
        if replaced is not None and not (replaced in offsets and last[replaced] == number):
            replaced = None
        for out in made:
            size = _rounded(nbytes(out))
            offsets[out] = free.take(size) if replaced is None else offsets[replaced]
            apart += size
        unread = [out for out in made if out not in last]
        for value in (*ending.get(number, ()), *unread):
            if value in offsets and value is not replaced:
                free.give(offsets[value], _rounded(nbytes(value)))
    return Plan(offsets, free.end, apart)


def _replaced(node: Node) -> Value | None:
    """The value in whose place a node may put its output."""
    if node.op is not ops.all_reduce:
        return None
    (x,) = node.reads
    return x if x.base is x else None


def _rounded(size: int) -> int:
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


class _Free:
    """Free ranges below `end`, in order, neighbours merged."""

    def __init__(self) -> None:
        self.end = 0
        self._ranges: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        for i, (start, stop) in enumerate(self._ranges):
            if stop - start >= size:
                self._ranges[i : i + 1] = [(start + size, stop)] if stop - start > size else []
                return start
        if self._ranges and self._ranges[-1][1] == self.end:
            start, _ = self._ranges.pop()
        else:
            start = self.end
        self.end = start + size
        return start

    def give(self, start: int, size: int) -> None:
        insort(self._ranges, (start, start + size))
        merged: list[tuple[int, int]] = []
        for piece in self._ranges:
            if merged and merged[-1][1] == piece[0]:
                merged[-1] = (merged[-1][0], piece[1])
            else:
                merged.append(piece)
        self._ranges = merged
