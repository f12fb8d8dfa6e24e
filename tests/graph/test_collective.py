"""Fused programs of split models: no rule fuses across an exchange of ranks, drops one or changes their order."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock import ops
from penstock.graph import fuse, trace
from penstock.graph.trace import Graph
from penstock.models.split import Mesh
from penstock.ops.array import Spec
from penstock.ops.collective import set_communicator
from tests.graph.common import matrix, names, vector
from tests.models.common import moe_config
from tests.models.test_split import CASES, Drawn, engine_of

EXCHANGES = (ops.all_reduce, ops.all_gather)
FAMILIES = {name: CASES[name] for name in ("qwen", "gemma", "deepseek", "llama")}
FEW = moe_config(num_experts=1, num_experts_per_tok=1, shared_expert_intermediate_size=32)  # nothing for a second rank


def exchanged(graph: Graph) -> list[tuple[str, tuple[int, ...], str]]:
    return [(node.op.name, node.out.shape, node.out.dtype) for node in graph.nodes if node.op in EXCHANGES]


def programs(raw, spelling: str, rank: int, size: int, T: int) -> list[Graph]:
    """A step of a rank as it is written, then fused for the CPU and for a GPU."""
    place: Any = SimpleNamespace(rank=rank, size=size)  # shapes follow it, and nothing is exchanged
    set_communicator(place)
    try:
        engine = engine_of(raw, Drawn(spelling), "cpu", Mesh(rank, size))
        assert engine.programs is not None
        engine.caches.make_room(dict.fromkeys(engine.caches.pools, 4), 3)
        plain = engine.programs.graph(T, T if T < 4 else 1, 4, 2, decode=False)
    finally:
        set_communicator(None)
    return [plain, fuse(plain, "cpu"), fuse(plain, "cuda")]


@pytest.mark.parametrize("T", [1, 17])
@pytest.mark.parametrize("case", [*FAMILIES, "empty"])
def test_all_ranks_exchange_the_same_in_the_same_order(case, T):
    raw, spelling = FAMILIES.get(case, (FEW, "stacked"))
    ranks = [programs(raw, spelling, rank, 2, T) for rank in range(2)]
    want = exchanged(ranks[0][0])
    layers = len({name for name in ranks[0][0].inputs if name.startswith("cache")}) // 2
    assert len(want) >= 2 * layers + 2  # and those of embedding and head
    assert all(exchanged(graph) == want for graphs in ranks for graph in graphs)
    assert all(len(graphs[2].nodes) < len(graphs[0].nodes) for graphs in ranks)  # they are fused at all
    if case in ("qwen", "deepseek"):  # what has no residual gets no zeros for it
        assert not any(ops.mul in {node.op for node in graphs[0].nodes} for graphs in ranks)
    if case == "empty":
        assert [ops.moe_forward in {node.op for node in graphs[0].nodes} for graphs in ranks] == [True, False]


def test_a_sum_of_ranks_keeps_what_comes_before_and_after_apart():
    """Each of these is one node where there is no sum between."""
    w, norm = matrix(64, 64), vector(64)
    specs = {name: Spec((2, 64), "float32") for name in "hx"}

    def block(x, h, over):
        y = ops.residual_add(h, over(ops.quantized_matmul(x, w)))
        return y, ops.rms_norm(y, norm)

    def routed(x, h, over):
        return ops.moe_combine_residual(h, None, None, over(ops.quantized_matmul(x, w)), None, moe_sum=over(x)), h

    for pattern in (block, routed):
        alone = fuse(trace(lambda h, x, p=pattern: p(x, h, lambda v: v), specs), "cuda")
        split = trace(lambda h, x, p=pattern: p(x, h, ops.all_reduce), specs)
        count = names(split).count("all_reduce")
        for device in ("cpu", "cuda"):
            found = fuse(split, device)
            assert names(found).count("all_reduce") == count
            assert len(found.nodes) > len(alone.nodes)
            for node in found.nodes:
                if node.op is ops.all_reduce and node["x"].base.node is not None:
                    assert node["x"].base.node.op is ops.quantized_matmul
