"""Rewriting a graph: rules look for patterns of nodes and offer one node in their place; what keeps the graph right
is checked here, once, for all of them.

A rewrite happens only if what it drops has no reader left and is no output of the graph, what it keeps has the shape
and dtype it had, and the new node can stand in the place of one it replaces: behind the makers of what it reads, before
the readers of what it makes, with reads and writes of every array that some node writes in their old order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from penstock.errors import InvalidArgument
from penstock.graph.trace import Graph, Node, Value
from penstock.ops import split_columns
from penstock.ops.op import DEVICES, Op


@dataclass(frozen=True)
class Rewrite:
    """A new node instead of some others; its outputs are values that those made (None: not asked for, or new).

    before: another new one that makes what `node` reads.
    """

    node: Node
    instead: tuple[Node, ...]
    before: Node | None = None


Candidates = Iterator[Rewrite | None]  # best first; None: the new call's arguments do not fit


@dataclass(frozen=True)
class Rule:
    """What to offer for each node of the ops `roots`, on some devices."""

    roots: tuple[Op, ...]
    devices: tuple[str, ...]
    offers: Callable[[Match, Node], Candidates]


def rule(*roots: Op, devices: tuple[str, ...] = DEVICES) -> Callable[[Callable[[Match, Node], Candidates]], Rule]:
    """Make a rule of a generator: it gets the graph and a node of an op of `roots` and yields rewrites to try."""
    return lambda offers: Rule(roots, devices, offers)


def rewritten(graph: Graph, device: str, rules: Sequence[Rule]) -> Graph:
    """A new graph after one pass of each rule, in order, over the nodes of its ops, in order. The given one stays."""
    match = Match(graph, device)
    for each in rules:
        if device not in each.devices:
            continue
        for root in each.roots:
            for node in match.nodes(root):
                for offer in each.offers(match, node) if node in match else ():
                    if offer is not None and match.apply(offer):
                        break
    return match.result()


class Match:
    """A graph while it is rewritten: which nodes make and read each value, kept up to date."""

    def __init__(self, graph: Graph, device: str) -> None:
        self.device = device
        self._graph = graph
        self._place = {node: 2 * number for number, node in enumerate(graph.nodes)}  # odd: of a node `before` another
        self._by_op: dict[Op, dict[Node, None]] = {}
        self._bases: dict[Node, set[Value]] = {}  # what a node reads, whole arrays for parts
        self._maker: dict[Value, Node] = {}
        self._readers: dict[Value, dict[Node, None]] = {}
        self._written: set[Value] = set()  # bases that some node changes
        self._outputs = {output.base for output in graph.outputs}
        for node in graph.nodes:
            self._enter(node)

    # -- what rules ask ----------------------------------------------------------------------------------------------

    def __contains__(self, node: Node) -> bool:
        return node in self._place

    def nodes(self, op: Op) -> list[Node]:
        """The nodes of an op in the order in which they run."""
        return sorted(self._by_op.get(op, ()), key=self._place.__getitem__)

    def maker(self, value: Any, *ops: Op) -> Node | None:
        """The node of one of these ops that makes this value, all of its output, in its shape."""
        node = self._maker.get(value.base) if isinstance(value, Value) and value.spec == value.base.spec else None
        return node if node is not None and node.op in ops else None

    def made_by(self, value: Any, *ops: Op) -> Node | None:
        """`maker`, if one node alone reads the value and the graph does not return it."""
        node = self.maker(value, *ops)
        return node if node is not None and not self.kept(value) and len(self.readers(value)) == 1 else None

    def readers(self, value: Value) -> Collection[Node]:
        """The nodes that read any part of the array that this value belongs to."""
        return self._readers.get(value.base, ())

    def kept(self, value: Value) -> bool:
        """Whether the graph returns the value or a part of it."""
        return value.base in self._outputs

    def needed(self, value: Value, instead: Sequence[Node]) -> Value | None:
        """The value if it is returned or read by another node than these, else None."""
        return value if self.kept(value) or any(node not in instead for node in self.readers(value)) else None

    def call(self, op: Op, *args: Any, instead: Sequence[Node], makes: Sequence[Value | None], **named: Any) -> Any:
        """Offer a call of `op` that makes these values; None if its arguments or these values do not fit."""
        try:
            arguments, specs = op.inferred(*args, **named)
        except InvalidArgument:
            return None
        pairs = tuple(zip(makes, specs, strict=True))
        if any(value is not None and spec != value.spec for value, spec in pairs):
            return None
        node = Node(op, arguments, (), number=-1)
        fresh = (None if spec is None else Value(self._graph, spec, node=node) for spec in specs)
        node.outs = tuple(new if value is None else value for (value, _), new in zip(pairs, fresh, strict=True))
        return Rewrite(node, tuple(instead))

    # -- what keeps the graph right ----------------------------------------------------------------------------------

    def apply(self, rewrite: Rewrite) -> bool:
        """Do it and say True, or leave everything as it is."""
        place = self._place_for(rewrite)
        if place is None:
            return False
        for node in rewrite.instead:
            self._leave(node)
        if rewrite.before is not None:
            self._place[rewrite.before] = place - 1
            self._enter(rewrite.before)
        self._place[rewrite.node] = place
        self._enter(rewrite.node)
        return True

    def _place_for(self, rewrite: Rewrite) -> int | None:
        node, gone, place = rewrite.node, rewrite.instead, self._place
        if any(self.needed(out, gone) for old in gone for out in old.outs if out is not None and out not in node.outs):
            return None
        if {base for old in gone for base in _changed(old)} != _changed(node):
            return None
        bases = {value.base for value in (rewrite.before or node).reads}
        makers = [self._maker[base] for base in bases if base in self._maker]
        if any(maker in gone for maker in makers):
            return None
        readers = [reader for out in node.outs if out is not None for reader in self.readers(out) if reader not in gone]
        first = max((place[maker] for maker in makers), default=-1)
        last = min((place[reader] for reader in readers), default=2 * len(self._graph.nodes))
        for spot in sorted((place[old] for old in gone), reverse=True):
            if first < spot < last and self._in_order(bases, gone, spot):
                return spot
        return None

    def _in_order(self, bases: set[Value], gone: tuple[Node, ...], spot: int) -> bool:
        """Whether accesses to written arrays keep their order if those of the old nodes go to `spot`, and no others."""
        touched: set[Value] = set()
        for old in gone:
            for base in self._bases[old] & self._written:
                touched.add(base)
                changes = base in _changed(old)
                for other in self._readers[base]:
                    if other in gone or not (changes or base in _changed(other)):
                        continue
                    if (self._place[other] < self._place[old]) != (self._place[other] < spot):
                        return False
        return bases & self._written <= touched

    def _enter(self, node: Node) -> None:
        self._by_op.setdefault(node.op, {})[node] = None
        for out in node.outs:
            if out is not None:
                self._maker[out] = node
        self._bases[node] = bases = {value.base for value in node.reads}
        for base in bases:
            self._readers.setdefault(base, {})[node] = None
        self._written |= _changed(node)

    def _leave(self, node: Node) -> None:
        del self._place[node]
        del self._by_op[node.op][node]
        for base in self._bases.pop(node):
            del self._readers[base][node]

    def result(self) -> Graph:
        """The graph as it is now, with nodes and values of its own. The columns of one row are parts of it."""
        made = Graph()
        ours: dict[Value, Value] = {value: made.input(name, value.spec) for name, value in self._graph.inputs.items()}

        def own(value: Value) -> Value:
            base = ours[value.base]
            if not value.is_part:
                return base
            offset = base.offset + value.offset
            where = {"base": base.base, "offset": offset, "row_stride": value.row_stride}
            return Value(made, value.spec, node=base.node, name=base.name, **where)

        for node in sorted(self._place, key=self._place.__getitem__):
            args = {name: own(arg) if isinstance(arg, Value) else arg for name, arg in node.args.items()}
            if node.op is split_columns and node["x"].shape[0] == 1:
                outs = [out for out in node.outs if out is not None]
                ends = accumulate(out.spec.size for out in outs)
                ours |= {out: args["x"][:, end - out.spec.size : end] for out, end in zip(outs, ends, strict=True)}
                continue
            copy = made.made(node.op, args, [None if out is None else out.spec for out in node.outs])
            made.nodes.append(copy)
            for out, new in zip(node.outs, copy.outs, strict=True):
                if out is not None and new is not None:
                    ours[out] = new
        made.outputs = tuple(map(own, self._graph.outputs))
        return made


_NOTHING: frozenset[Value] = frozenset()


def _changed(node: Node) -> Set[Value]:
    """The arrays that a node writes to, whole ones for parts."""
    return {value.base for value in node.writes} if node.op.writes else _NOTHING


def same(a: Any, b: Any) -> bool:
    """Whether two arguments are the same part of an array in the same shape, or the same constant."""
    if isinstance(a, Value) and isinstance(b, Value):
        return a.base is b.base and (a.offset, a.spec, a.row_stride) == (b.offset, b.spec, b.row_stride)
    return a is b or (isinstance(a, int | float | str) and a == b)


def operands(node: Node) -> Iterator[tuple[Any, Any]]:
    """Both arguments of a sum or product of equals, in either order."""
    a, b = node["a"], node["b"]
    if isinstance(b, Value) and a.shape == b.shape:
        yield a, b
        yield b, a
