"""A step of a model as a list of nodes: what the ops record when they are called with symbols.

Activations are values of the graph. Weights and numbers are constants in the nodes' arguments. What changes from step
to step (tokens, positions, tables) and what is written (caches) are inputs, bound to arrays when a program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.dtypes import ITEMSIZE
from penstock.errors import InvalidArgument, ShapeError
from penstock.ops.array import Spec, Symbol
from penstock.ops.op import Op


class Value(Symbol):
    """An array of a graph: an input, an output of a node, or a contiguous part of one of these (`base`, `offset`).

    offset counts elements from the start of the base, which is never a part itself. row_stride: elements from one row
    to the next where a part is columns of a base with several rows.
    """

    __slots__ = ("base", "graph", "name", "node", "offset", "row_stride", "spec")

    def __init__(
        self,
        graph: Graph,
        spec: Spec,
        *,
        node: Node | None = None,
        name: str | None = None,
        base: Value | None = None,
        offset: int = 0,
        row_stride: int | None = None,
    ) -> None:
        self.graph = graph
        self.spec = spec
        self.node = node  # that makes it; None for an input
        self.name = name  # of an input
        self.base = base if base is not None else self
        self.offset = offset
        self.row_stride = row_stride

    def __repr__(self) -> str:
        if self.row_stride is not None:
            first = self.offset % self.row_stride
            return f"{self.base!r}[:, {first}:{first + self.spec.size // max(len(self), 1)}]"
        if self.is_part:
            return f"{self.base!r}[{self.offset}:{self.offset + self.spec.size}]"
        return f"%{self.name}" if self.node is None else f"%{self.node.op.name}.{self.node.number}"

    @property
    def is_part(self) -> bool:
        return self.base is not self

    # -- what models ask of an array ---------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> str:
        return self.spec.dtype

    @property
    def ndim(self) -> int:
        return len(self.spec.shape)

    def __len__(self) -> int:
        return self.spec.shape[0]

    def reshape(self, *shape: int) -> Value:
        spec = Spec(shape, self.dtype)
        if spec.size != self.spec.size:
            raise ShapeError(f"reshape: shape is {shape}, expected {self.spec.size} elements in all")
        return Value(self.graph, spec, node=self.node, name=self.name, base=self.base, offset=self.offset)

    def __getitem__(self, index: Any) -> Value:
        """A part that lies in one piece; any other raises ShapeError."""
        shape: list[int] = []
        offset, step, whole = 0, self.spec.size, True  # whole: so far all of every axis, or one element of each
        given = index if isinstance(index, tuple) else (index,)
        for axis, size in enumerate(self.shape):
            step = step // size if size else 0
            item = given[axis] if axis < len(given) else slice(None)
            if isinstance(item, slice):
                start, stop, stride = item.indices(size)
                if stride != 1:
                    raise ShapeError(f"part of {self.shape}: has stride {stride}, expected 1")
            else:
                start = item + size if item < 0 else item
                stop = start + 1
                if not 0 <= start < size:
                    raise ShapeError(f"part of {self.shape}: index is {item}, expected less than {size}")
            if not whole and (start, stop) != (0, size):
                raise ShapeError(f"part of {self.shape}: {index!r} does not lie in one piece, expected one that does")
            whole = whole and max(stop - start, 0) <= 1
            offset += start * step
            if isinstance(item, slice):
                shape.append(max(stop - start, 0))
        spec = Spec(tuple(shape), self.dtype)
        return Value(self.graph, spec, node=self.node, name=self.name, base=self.base, offset=self.offset + offset)

    def record(self, op: Op, arguments: dict[str, Any], specs: tuple[Spec | None, ...], out: Any) -> Any:
        if out is not None:
            raise InvalidArgument(f"{op.name}: out is given, expected none: a graph has its own buffers")
        return self.graph.add(op, arguments, specs)


@dataclass(eq=False)
class Node:
    """One call of an op: its arguments by name, values of the graph among them, and what it makes (None: not asked)."""

    op: Op
    args: dict[str, Any]
    outs: tuple[Value | None, ...]
    number: int

    def __repr__(self) -> str:
        return f"<{self.op.name}.{self.number}>"

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    @property
    def out(self) -> Value:
        """Its only output."""
        (made,) = (out for out in self.outs if out is not None)
        return made

    @property
    def reads(self) -> Iterator[Value]:
        """The values among its arguments, whatever it does with them."""
        for arg in self.args.values():
            if isinstance(arg, Value):
                yield arg

    @property
    def writes(self) -> Iterator[Value]:
        """The values among its arguments that it changes."""
        for name in self.op.writes:
            if isinstance(self.args[name], Value):
                yield self.args[name]


@dataclass(eq=False)
class Graph:
    """Nodes in the order in which they run, between inputs and outputs."""

    inputs: dict[str, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    outputs: tuple[Value, ...] = ()

    def input(self, name: str, spec: Spec) -> Value:
        if name in self.inputs:
            raise InvalidArgument(f"trace: input {name!r} is given twice")
        self.inputs[name] = Value(self, spec, name=name)
        return self.inputs[name]

    def add(self, op: Op, args: dict[str, Any], specs: Sequence[Spec | None]) -> Any:
        """Append a call; its outputs as an op returns them: bare if there is one, else those that are asked for."""
        node = self.made(op, args, specs)
        self.nodes.append(node)
        wanted = tuple(out for out in node.outs if out is not None)
        return wanted[0] if len(wanted) == 1 else wanted or None

    def made(self, op: Op, args: dict[str, Any], specs: Sequence[Spec | None]) -> Node:
        """A node with new outputs that is not yet in the list."""
        node = Node(op, args, (), len(self.nodes))
        node.outs = tuple(None if spec is None else Value(self, spec, node=node) for spec in specs)
        return node

    def __str__(self) -> str:
        lines = [f"%{name}: {value.dtype}{list(value.shape)}" for name, value in self.inputs.items()]
        for node in self.nodes:
            outs = ", ".join(f"{o.dtype}{list(o.shape)}" for o in node.outs if o is not None)
            reads = ", ".join(map(repr, node.reads))
            lines.append(f"{node.op.name}.{node.number}({reads}) -> {outs or 'nothing'}")
        return "\n".join([*lines, f"return {', '.join(map(repr, self.outputs))}"])


def trace(fn: Callable[..., Any], specs: Mapping[str, Spec]) -> Graph:
    """The ops that `fn` calls, as a graph. It gets a value per spec by name and returns a value or several."""
    graph = Graph()
    for name, spec in specs.items():
        graph.input(name, spec)
    returned = fn(**graph.inputs)
    outputs = returned if isinstance(returned, tuple | list) else (returned,)
    for output in outputs:
        if not isinstance(output, Value) or output.graph is not graph:
            raise InvalidArgument(f"trace: {output!r} was returned, expected values of the graph")
    graph.outputs = tuple(outputs)
    return graph


def nbytes(value: Value) -> int:
    return value.spec.size * ITEMSIZE[value.dtype]
