"""Programs of a model whose experts are streamed: what asks for experts, and waits for them.

On the host the ids of the kernel that chooses experts go to the store, so that reading begins; what comes before the
experts in a layer (the shared expert) runs meanwhile; the expert op waits. A prefill that chooses more than there are
slots gets them in batches. A decode step on a GPU detects there what is absent: a step without a miss is one replay.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock import ops
from penstock.experts.store import Store, Tier
from penstock.graph import Graph, Node, Value, Wrap
from penstock.ops.array import Spec
from penstock.ops.device import Device, MissDetector

EXPERT_OPS = (ops.moe_forward, ops.moe_shared_forward, ops.moe_biased_forward)


class Streamed:
    """A store and the `slot_of` arrays by which the nodes of a program name its layers."""

    def __init__(
        self, store: Store, slot_of: Sequence[Any], device: Device, tier: Tier, prefetches: bool = False
    ) -> None:
        self.store, self.device, self.tier = store, device, tier
        self.prefetches = prefetches and device.host_memory
        self.slot_of = list(slot_of)
        self._layers = {id(array): n for n, array in enumerate(self.slot_of)}
        self._guesses: weakref.WeakKeyDictionary[Graph, dict[Node, tuple[int, int]]] = weakref.WeakKeyDictionary()
        self.pending_reports: list[Callable[[], None]] = []  # bring the store up to date with steps on the device

    @property
    def fully_cached(self) -> bool:
        """Whether a step on the device never has to stop for an expert."""
        return self.tier.fully_cached

    def layer_of(self, node: Node) -> int:
        return self._layers[id(node["slot_of"])]

    def wrap(self, graph: Graph, prefill: bool, inner: Wrap | None) -> Wrap:
        """A wrap (see `Program.bind`) by which a program asks the store for its experts.

        prefill: whether it is one, and not a decode step. inner: another wrap, for the kernels themselves.
        """
        chosen, guesses = self.choices(graph), self._guesses.get(graph, {})
        begun: dict[int, bool] = {}  # layer → what `request` said of the step under way

        def request(layer: int, ids: np.ndarray) -> None:
            self.apply_reports()
            begun[layer] = self.store.request(layer, ids, prefill)

        def wrap(node: Node, kernel: Any) -> Any:
            kernel = kernel if inner is None else inner(node, kernel)
            if node.op in EXPERT_OPS:
                return self._waiting(node, kernel, request, begun)
            if node in chosen and self.device.host_memory:
                layer, index = chosen[node]
                return _observed(kernel, index, lambda ids: request(layer, ids))
            if node in guesses:
                layer, index = guesses[node]
                return _observed(kernel, index, lambda ids: self.store.prefetch(layer, ids))
            return kernel

        return wrap

    def detecting(self, graph: Graph, detector: MissDetector, inputs: Mapping[str, Any], inner: Wrap | None) -> Wrap:
        """A wrap by which a decode program detects absent experts on the device, layer by layer in their order; of a
        split model all ranks agree on them with each layer's sum.
        """
        chosen = self.choices(graph)
        order = {layer: n for n, layer in enumerate(self.layers(graph))}
        sums = {} if detector.agreed is None else {node: n for n, node in enumerate(self.sums(graph))}

        def wrap(node: Node, kernel: Any) -> Any:
            if node in sums:
                kernel = functools.partial(_agreeing, detector, sums[node], inputs)
            kernel = kernel if inner is None else inner(node, kernel)
            if node not in chosen:
                return kernel
            layer, index = chosen[node]
            n = order[layer]
            return _observed(kernel, index, lambda ids: detector.detect(n, layer, ids, inputs))

        return wrap

    def apply_reports(self) -> None:
        """Bring the store up to date with what steps did on the device."""
        for apply in self.pending_reports:
            apply()
        self.pending_reports = []

    def layers(self, graph: Graph) -> list[int]:
        """The layers of a program that have experts, in its order."""
        return [self.layer_of(node) for node in graph.nodes if node.op in EXPERT_OPS]

    def sums(self, graph: Graph) -> list[Node]:
        """Of a split model the sum over ranks of each layer that has experts, the first behind them."""
        found = []
        for at, node in enumerate(graph.nodes):
            if node.op in EXPERT_OPS:
                after = itertools.takewhile(lambda other: not other.op.writes, graph.nodes[at + 1 :])
                found.append(next(other for other in after if other.op is ops.all_reduce))
        return found

    def choices(self, graph: Graph) -> dict[Node, tuple[int, int]]:
        """Nodes that choose experts: the layer they choose for, and which of their outputs the ids are."""
        makers = {out.base: (node, n) for node in graph.nodes for n, out in enumerate(node.outs) if out is not None}
        found = {}
        for node in graph.nodes:
            if node.op in EXPERT_OPS:
                maker, index = makers[node["ids"].base]
                found[maker] = self.layer_of(node), index
        return found

    def look_ahead(self, graph: Graph) -> None:
        """Let each layer's router have a look at what the layer before gave to its own: a guess at the next choice.

        Adds the nodes behind the choice of the layer before, so that its experts are read while that one is computed.
        """
        makers = {out.base: node for node in graph.nodes for out in node.outs if out is not None}
        choosers = [(node, layer, index) for node, (layer, index) in self.choices(graph).items()]
        guesses = {}
        for (here, _, _), (chooser, layer, index) in itertools.pairwise(choosers):
            logits = chooser.args.get("logits", chooser.args.get("scores"))
            own = here.args.get("logits", here.args.get("scores"))
            if not isinstance(logits, Value) or not isinstance(own, Value):
                continue
            product, model = makers.get(logits.base), makers.get(own.base)
            if product is None or model is None or product.op is not model.op or "x" not in product.args:
                continue
            if model["x"].spec != product["x"].spec:
                continue
            made = graph.made(product.op, {**product.args, "x": model["x"]}, _specs(product))
            base = next(new for new, old in zip(made.outs, product.outs, strict=True) if old is logits.base)
            seen = Value(graph, logits.spec, node=made, base=base, offset=logits.offset)
            name = "logits" if "logits" in chooser.args else "scores"
            guess = graph.made(chooser.op, {**chooser.args, name: seen}, _specs(chooser))
            at = graph.nodes.index(here) + 1
            graph.nodes[at:at] = [made, guess]
            guesses[guess] = layer, index
        self._guesses[graph] = guesses

    def _waiting(
        self, node: Node, kernel: Any, request: Callable[[int, np.ndarray], None], begun: dict[int, bool]
    ) -> Any:
        names = list(inspect.signature(node.op.body).parameters)
        ids_at = names.index("ids")
        store, layer, here = self.store, self.layer_of(node), self.device.host_memory

        def wait(*args: Any, out: Any) -> None:
            ids = args[ids_at] if here else self.device.to_host(args[ids_at])
            if layer not in begun:
                request(layer, ids)
            if begun.pop(layer):
                store.wait(layer, ids)
                kernel(*args, out=out)
            else:
                self._in_batches(node, kernel, layer, ids, dict(zip(names, args, strict=True)), out)

        return wait

    def _in_batches(self, node: Node, kernel: Any, layer: int, ids: np.ndarray, call: dict[str, Any], out: Any) -> None:
        """Run an expert op whose experts do not fit at once: batch by batch into rows that are summed at the end in the
        order of the slots, or, where the kernel sums as it goes, for some tokens after the other.
        """
        block = node.op is ops.moe_shared_forward
        room = None
        if node.op is not ops.moe_biased_forward:  # whose kernels leave out experts that are not here
            room = self.device.expert_room(ids.shape, len(call["slot_of"]), call["x"], block)
        if room is None:
            rows = self.device.copy(out)
            for part in self.store.token_batches(layer, ids):
                kernel(*call.values(), out=rows)  # all rows, so that they add up as they do with all experts
                out[part] = rows[part]
            return
        if block and call["norm_weight"] is not None:
            call |= {"x": ops.rms_norm(call["x"], call["norm_weight"], call["eps"]), "norm_weight": None}
        product = [call[name] for name in ("x", "ids", "gate_w", "up_w", "down_w")]
        for slot_of in self.store.expert_batches(layer, ids):
            ops.expert_mlp(room, *product, slot_of, call["act"], call["activations"])
        kernel(*(call | {"expert_out": room}).values(), out=out)


def _specs(node: Node) -> list[Spec | None]:
    return [None if out is None else out.spec for out in node.outs]


def _agreeing(detector: MissDetector, n: int, inputs: Mapping[str, Any], x: Any, *, out: Any) -> None:
    """The kernel of a layer's sum over ranks that says which of them miss experts."""
    detector.agree(n, x, inputs, out)


def _observed(kernel: Any, index: int, observe: Callable[[Any], None]) -> Any:
    """A kernel whose output `index` is passed on when it has run."""

    def run(*args: Any, out: Any) -> None:
        kernel(*args, out=out)
        observe(out[index] if isinstance(out, tuple) else out)

    return run
