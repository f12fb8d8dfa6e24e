"""Which experts an answer chose: counted while its steps run, for requests that ask for it.

Where programs are bound to exact sizes on the host's memory, each expert op leaves a copy of its ids, a few numbers a
row, and one count over all layers follows the step. A device that captures its steps is not asked: a copy for each
layer would be a launch for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock import ops
from penstock.graph import Graph, Node, Value, Wrap

# a layer with experts has one of them
EXPERT_OPS = (
    ops.moe_forward,
    ops.moe_shared_forward,
    ops.moe_route_forward,
    ops.moe_biased_forward,
    ops.expert_gate_up,
)


class ExpertHeat:
    """Of one answer: how often each expert was chosen, int64 [L, E] by layers with experts; None before its first step
    and for a model without experts.
    """

    def __init__(self, counts: np.ndarray | None = None) -> None:
        self.counts = counts
        self._kept: tuple[np.ndarray, int] | None = None

    def add(self, ids: np.ndarray, experts: int, keep: bool = False) -> None:
        """The choices int32 [L, n, k] of n tokens, −1 for none; keep: until it is known how many of them count."""
        if not experts:
            return
        if keep:
            self._kept = ids.copy(), experts
            return
        if self.counts is None:
            self.counts = np.zeros((len(ids), experts), np.int64)
        rows = np.arange(len(ids))[:, None, None] * experts + ids
        self.counts += np.bincount(rows[ids >= 0], minlength=self.counts.size).reshape(self.counts.shape)

    def accept(self, count: int) -> None:
        """Of the tokens that were kept the first `count` are the answer's own."""
        if self._kept is not None:
            ids, experts = self._kept
            self._kept = None
            self.add(ids[:, :count], experts)


class ChoiceNotes:
    """Copies of the ids of a program's expert ops, layer after layer in the order of its nodes."""

    def __init__(self, graph: Graph, most_tokens: int) -> None:
        """graph: of a program, as it runs."""
        nodes = [node for node in graph.nodes if node.op in EXPERT_OPS]
        self.experts = experts_of(nodes[0]) if nodes else 0
        width = ids_of(nodes[0]).shape[-1] if nodes else 0
        self._ids = np.full((len(nodes), most_tokens, width), -1, np.int32)

    def wrap(self, inner: Wrap | None) -> Wrap:
        """For one `bind`: kernels of expert ops note what they are given. inner: another wrap."""
        layers = iter(self._ids)

        def wrap(node: Node, kernel: Any) -> Any:
            run = kernel if inner is None else inner(node, kernel)
            if node.op not in EXPERT_OPS:
                return run
            layer = next(layers)

            def note(ids: Any) -> None:
                layer[: len(ids)] = ids

            return noting(node, run, note)

        return wrap

    def of(self, begin: int, end: int) -> np.ndarray:
        """Those of some rows of the last step, int32 [L, end − begin, k]."""
        return self._ids[:, begin:end]


def experts_of(node: Node) -> int:
    """How many experts an expert op chooses from."""
    stack, slot_of = node["gate_w"], node.args.get("slot_of")
    return stack.shape[0] if slot_of is None else slot_of.shape[0]


def ids_of(node: Node) -> Value:
    """The ids that an expert op is given, or that it chooses itself."""
    made = node["ids"] if "ids" in node.args else node.outs[1]
    assert made is not None
    return made


def noting(node: Node, run: Any, note: Callable[[Any], None]) -> Any:
    """The kernel of an expert op that has its ids noted: before it where it is given them, else after it."""
    if "ids" in node.args:
        at = node.op.params.index("ids")

        def given(*args: Any, **kwargs: Any) -> Any:
            note(args[at])
            return run(*args, **kwargs)

        return given

    def chosen(*args: Any, out: Any, **kwargs: Any) -> Any:
        result = run(*args, out=out, **kwargs)
        note(out[1])
        return result

    return chosen
