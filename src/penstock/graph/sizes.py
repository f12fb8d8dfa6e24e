"""One program for every size of a step: traced at three sizes, bound to any other in milliseconds.

An axis of a value in a step is a number, or grows evenly with one of the step's sizes (rows, sequences, wanted rows).
Three traces show with which: at the least sizes, a little above them and at the largest, whose plan of the arena is
used: what has room at the largest size has room at all others, in the same place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.dtypes import ITEMSIZE
from penstock.errors import InvalidArgument
from penstock.graph.program import Bound, Call, Program, Wrap, node_calls
from penstock.graph.trace import Graph, Value
from penstock.ops.array import address, part, spec_of
from penstock.quant import QuantizedTensor

Sizes = Mapping[str, int]


class SizedProgram:
    """Programs of one step at all sizes up to `most`; `make` traces the step at some sizes.

    Sizes are between those of `least` and of `most`, between which the step is to have the same nodes. Options as those
    of `Program`.
    """

    def __init__(self, make: Callable[[Sizes], Graph], device: str, least: Sizes, most: Sizes, **options: Any) -> None:
        self.least, self.most = dict(least), dict(most)
        self.program = Program(make(most), device, **options)
        self._names = tuple(most)
        above = {name: min(size + 1 + n, most[name]) for n, (name, size) in enumerate(least.items())}
        probes = [probe for n, probe in enumerate((dict(least), above)) if probe != most and (n == 0 or probe != least)]
        graphs = [Program(make(probe), device, **options).graph for probe in probes]
        self._forms = _forms(self.program.graph, graphs, [*probes, dict(most)])
        self._expressions: dict[tuple[int, ...], int] = {}
        self._shapes = {
            value: (tuple(map(self._index, shape)), self._index(offset))
            for value, (shape, offset) in self._forms.items()
        }
        self._nodes = [
            (node, [arg if isinstance(arg, Value) else None for arg in node.args.values()]) for node in self.graph.nodes
        ]

    @property
    def graph(self) -> Graph:
        """At the largest sizes."""
        return self.program.graph

    @property
    def arena_bytes(self) -> int:
        return self.program.arena_bytes

    def bind(
        self, sizes: Sizes, inputs: Mapping[str, Any], arena: Any, wrap: Wrap | None = None, outputs: Sequence[Any] = ()
    ) -> Bound:
        """As `Program.bind`, at these sizes. wrap gets the nodes of the largest sizes: their shapes say nothing.

        outputs: arrays that the outputs are written to, if not to the arena.
        """
        numbers = self._numbers(sizes)
        arrays: dict[Value, Any] = dict(zip(self.graph.outputs, outputs, strict=False))
        for name, value in self.graph.inputs.items():
            if name not in inputs:
                raise InvalidArgument(f"program: input {name!r} is missing, expected {', '.join(self.graph.inputs)}")
            arrays[value] = inputs[name]
        offsets, device = self.program.plan.offsets, self.program.device

        def array(value: Value) -> Any:
            found = arrays.get(value)
            if found is None:
                shape, at = self._shapes[value]
                axes = tuple([numbers[i] for i in shape])
                start = offsets.get(value.base)
                if start is None:  # a part of an input
                    rows = arrays[value.base].reshape(-1)[numbers[at] :]
                    found = rows[: math.prod(axes)].reshape(axes)
                else:
                    first = start + numbers[at] * ITEMSIZE[value.dtype]
                    found = part(arena, first, axes, value.dtype, value.row_stride)
                arrays[value] = found
            return found

        segments: list[list[Call]] = [[]]
        for node, values in self._nodes:
            if self.program.begins_segment(node) and segments[-1]:
                segments.append([])
            given = [
                array(value) if value is not None else arg
                for value, arg in zip(values, node.args.values(), strict=True)
            ]
            outs = [None if out is None else array(out) for out in node.outs]
            segments[-1] += node_calls(node, device, given, outs, wrap)
        return Bound(tuple(map(tuple, segments)), tuple(map(array, self.graph.outputs)))

    def _index(self, form: tuple[int, ...]) -> int:
        return self._expressions.setdefault(form, len(self._expressions))

    def _numbers(self, sizes: Sizes) -> list[int]:
        """What every form is at these sizes."""
        given = [sizes[name] for name in self._names]
        for name, size in sizes.items():
            if not self.least[name] <= size <= self.most[name]:
                raise InvalidArgument(f"program: {name} is {size}, expected {self.least[name]} to {self.most[name]}")
        return [form[0] + sum(map(int.__mul__, form[1:], given)) for form in self._expressions]


Form = tuple[int, ...]  # a number, then what each size is multiplied with


def _forms(last: Graph, graphs: list[Graph], sizes: list[dict[str, int]]) -> dict[Value, tuple[tuple[Form, ...], Form]]:
    """Shape and offset of each value of `last` as forms; `sizes` are those of `graphs` and then those of `last`."""
    names = list(sizes[0])
    found: dict[Value, tuple[tuple[Form, ...], Form]] = {}
    known: dict[tuple[int, ...], Form] = {}

    def form(numbers: tuple[int, ...], what: Any) -> Form:
        made = known.get(numbers)
        if made is None:
            made = known[numbers] = grown(numbers, what)
        return made

    def grown(numbers: tuple[int, ...], what: Any) -> Form:
        if len(set(numbers)) == 1:
            return (numbers[0], *(0 for _ in names))
        for place, name in enumerate(names):
            steps = [each[name] - sizes[0][name] for each in sizes]
            slope = (numbers[-1] - numbers[0]) // steps[-1] if steps[-1] else 0
            if slope and all(n - numbers[0] == slope * step for n, step in zip(numbers, steps, strict=True)):
                return (
                    numbers[0] - slope * sizes[0][name],
                    *(slope if other == place else 0 for other in range(len(names))),
                )
        raise InvalidArgument(f"program: {what!r} does not grow evenly with one of {', '.join(names)}: {numbers}")

    def enter(value: Value, others: list[Value]) -> None:
        if value in found:
            return
        kind = len(value.shape), value.dtype, value.row_stride
        if any((len(other.shape), other.dtype, other.row_stride) != kind for other in others):
            raise InvalidArgument(f"program: {value!r} is another array at other sizes")
        every = (*others, value)
        shape = tuple(form(axes, value) for axes in zip(*(one.shape for one in every), strict=True))
        found[value] = shape, form(tuple(one.offset for one in every), value)

    for name, value in last.inputs.items():
        enter(value, [graph.inputs[name] for graph in graphs])
    if any(len(graph.nodes) != len(last.nodes) for graph in graphs):
        raise InvalidArgument("program: its nodes are others at other sizes, expected the same ones")
    for number, node in enumerate(last.nodes):
        twins = [graph.nodes[number] for graph in graphs]
        if any(twin.op is not node.op for twin in twins):
            raise InvalidArgument(f"program: {node!r} is another op at other sizes, expected the same ones")
        for name, arg in node.args.items():
            others = [twin.args[name] for twin in twins]
            if isinstance(arg, Value):
                enter(arg, others)
            elif any(other is not arg and not _equal(other, arg) for other in others):
                raise InvalidArgument(f"program: {name} of {node!r} is another number at other sizes")
        for place, out in enumerate(node.outs):
            if out is not None:
                enter(out, [twin.outs[place] for twin in twins])  # type: ignore[misc]
    for place, output in enumerate(last.outputs):
        enter(output, [graph.outputs[place] for graph in graphs])
    return found


def _equal(one: Any, other: Any) -> bool:
    """Whether two arguments are the same number, text or tuple, or lie in the same memory."""
    if type(one) is not type(other):
        return False
    if isinstance(one, QuantizedTensor):
        return one.key == other.key and all(map(_equal, one.arrays, other.arrays))
    if hasattr(one, "shape"):
        return spec_of(one) == spec_of(other) and address(one) == address(other)
    return one == other
