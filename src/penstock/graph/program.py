"""A graph ready to run: fused, with a place in the arena for every value, cut into segments of bound kernel calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.dtypes import ITEMSIZE
from penstock.errors import InvalidArgument, KernelNotFound, ShapeError
from penstock.graph.fuse import fuse
from penstock.graph.plan import plan
from penstock.graph.trace import Graph, Node, Value
from penstock.ops.array import part, spec_of

Call = Callable[[], object]
Wrap = Callable[[Node, Any], Any]


@dataclass(frozen=True)
class Bound:
    """A program on arrays: segments of calls to run one after the other, and where its outputs lie."""

    segments: tuple[tuple[Call, ...], ...]
    outputs: tuple[Any, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(call for segment in self.segments for call in segment)

    def run(self) -> tuple[Any, ...]:
        for segment in self.segments:
            for call in segment:
                call()
        return self.outputs


class Program:
    """A traced step for one device ("cpu" or "cuda"). It knows no arrays but the weights; `bind` gives it the others.

    batch_invariant: see `fuse`. cut: nodes that begin a segment of their own, so that something can happen before they
    run (experts that have to be fetched), and it can be run from there on again; none: one segment. more: adds nodes to
    the fused graph.
    """

    def __init__(
        self,
        graph: Graph,
        device: str,
        *,
        fused: bool = True,
        batch_invariant: bool = False,
        cut: Callable[[Node], bool] | None = None,
        more: Callable[[Graph], None] | None = None,
    ) -> None:
        self.graph = fuse(graph, device, batch_invariant) if fused else graph
        if more is not None:
            more(self.graph)
        self.device = device
        self.plan = plan(self.graph, cut)
        self._cut = cut

    @property
    def arena_bytes(self) -> int:
        return self.plan.size

    def begins_segment(self, node: Node) -> bool:
        return self._cut is not None and self._cut(node)

    def bind(
        self, inputs: Mapping[str, Any], arena: Any, wrap: Wrap | None = None, outputs: Sequence[Any] = ()
    ) -> Bound:
        """Calls of the device's kernels on these inputs, everything between them in `arena` (uint8, `arena_bytes`).

        An input may have more rows than the one the graph was traced with (a cache that has grown). wrap(node,
        kernel) may replace the kernel of a node. outputs: arrays that the first outputs are written to, if not to the
        arena.
        """
        arrays: dict[Value, Any] = dict(zip(self.graph.outputs, outputs, strict=False))
        for name, value in self.graph.inputs.items():
            if name not in inputs:
                raise InvalidArgument(f"program: input {name!r} is missing, expected {', '.join(self.graph.inputs)}")
            found = spec_of(inputs[name])
            if found.dtype != value.dtype or found.shape[1:] != value.shape[1:] or found.ndim != value.ndim:
                raise ShapeError(
                    f"program: input {name!r} is {found.dtype}{list(found.shape)}, "
                    f"expected {value.dtype}{list(value.shape)}"
                )
            arrays[value] = inputs[name]
        if len(arena) < self.plan.size:
            raise ShapeError(f"program: the arena has {len(arena)} bytes, expected {self.plan.size}")

        def array(value: Value) -> Any:
            found = arrays.get(value)
            if found is None:
                found = arrays[value] = self._array(value, arrays, arena)
            return found

        segments: list[list[Call]] = [[]]
        for node in self.graph.nodes:
            if self.begins_segment(node) and segments[-1]:
                segments.append([])
            values = [array(arg) if isinstance(arg, Value) else arg for arg in node.args.values()]
            outs = [None if out is None else array(out) for out in node.outs]
            segments[-1] += node_calls(node, self.device, values, outs, wrap)
        return Bound(tuple(map(tuple, segments)), tuple(map(array, self.graph.outputs)))

    def _array(self, value: Value, arrays: Mapping[Value, Any], arena: Any) -> Any:
        offset = self.plan.offsets.get(value.base)
        if offset is None:  # a part of an input
            rows = arrays[value.base].reshape(-1)
            return rows[value.offset : value.offset + value.spec.size].reshape(value.shape)
        start = offset + value.offset * ITEMSIZE[value.dtype]
        return part(arena, start, value.shape, value.dtype, value.row_stride)


def node_calls(node: Node, device: str, values: Sequence[Any], outs: Sequence[Any], wrap: Wrap | None) -> list[Call]:
    """What a node comes down to: its op's kernel on these arrays; before it zeros for one that leaves gaps."""
    op = node.op
    kernel = op.kernel(device)
    if kernel is None:
        raise KernelNotFound(f"{op.name}: no kernel is registered for device {device!r}")
    run = kernel.choosing if wrap is None else wrap(node, kernel.choosing)
    if not outs:
        return [functools.partial(run, *values)]
    target = outs[0] if len(outs) == 1 else tuple(outs)
    calls: list[Call] = [functools.partial(_clear, out) for out in outs if op.partial and out is not None]
    return [*calls, functools.partial(run, *values, out=target)]


def _clear(array: Any) -> None:
    array[...] = 0
