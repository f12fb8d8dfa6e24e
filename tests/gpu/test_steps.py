"""Whole ragged steps on CUDA: the fused program of each family against the definitions of its plain ops."""

from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.api import load_random
from penstock.graph.fuse import RULES
from penstock.graph.rewrite import rewritten
from penstock.graph.trace import Graph, Value
from penstock.models.step import PAGE
from tests.gpu.common import to_device, to_host
from tests.gpu.test_models import SMALL
from tests.graph.common import names, run

RUNS = (1, 0, 11, 3)  # rows of each sequence, one row of no sequence behind them
BEFORE = (300, 9, 2, 0)  # positions that each has already
PAGES = 2  # of each sequence


def inputs_of(graph: Graph) -> dict[str, np.ndarray]:
    """A step of RUNS, and caches of random numbers."""
    rng = np.random.default_rng(3)
    B, T = len(RUNS), sum(RUNS) + 1
    sequence = np.repeat(np.arange(B), RUNS)
    starts = np.cumsum([0, *RUNS])
    given = {
        "tokens": rng.integers(0, 40, T),
        "positions": [*(np.arange(T - 1) - starts[sequence] + np.array(BEFORE)[sequence]), 0],
        "sequence": [*sequence, -1],
        "starts": starts,
        "lengths": np.add(BEFORE, RUNS),
        "slots": [2, -1, 0, 3],
        "wanted": starts[1:] - 1,
    }
    made = {}
    for name, value in graph.inputs.items():
        if name in given:
            made[name] = np.array(given[name], np.int32)
        elif value.spec.dtype == "int32":
            made[name] = rng.permutation(B * PAGES).reshape(B, PAGES).astype(np.int32)
        else:
            made[name] = (0.3 * rng.standard_normal(value.shape)).astype(np.float32)
    return made


def run_on_cuda(graph: Graph, inputs: dict[str, np.ndarray]) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """The outputs of a graph by the CUDA kernels, and its inputs as they are then."""
    tensors = {name: to_device(array.copy()) for name, array in inputs.items()}
    found = {value: tensors[name] for name, value in graph.inputs.items()}

    def array(value: Value) -> torch.Tensor:
        return found[value.base].view(-1)[value.offset : value.offset + value.spec.size].view(value.shape)

    with penstock.backend("cuda"):
        for node in graph.nodes:
            args: dict[str, Any] = {n: array(a) if isinstance(a, Value) else to_device(a) for n, a in node.args.items()}
            results = node.op(**args)
            wanted = [out for out in node.outs if out is not None]
            found.update(zip(wanted, results if isinstance(results, tuple) else (results,), strict=False))
    return tuple(to_host(array(value)) for value in graph.outputs), {n: to_host(t) for n, t in tensors.items()}


PREPARED = {"qwen3_5": "attention_prepare", "llama": "attention_prepare", "deepseek_v3": "mla_prepare"}


@pytest.mark.parametrize("family", SMALL)
def test_a_ragged_step_of_a_family(family):
    llm = load_random(SMALL[family], device="cpu", activations="float32", max_context=PAGES * PAGE)
    engine = llm.engine
    engine.caches.make_room(dict.fromkeys(engine.caches.pools, len(RUNS) * PAGES), 4)
    steps = engine.programs.steps
    plain = steps.graph({"T": sum(RUNS) + 1, "B": len(RUNS), "R": len(RUNS), "n": PAGES}, True)
    inputs = inputs_of(plain)
    fused = rewritten(plain, "cuda", RULES)
    assert len(names(fused)) < len(names(plain))
    if family in PREPARED:
        assert PREPARED[family] in names(fused)
    defined = {name: array.copy() for name, array in inputs.items()}
    want = run(plain, defined)
    got, written = run_on_cuda(fused, inputs)
    rows = [b for b, n in enumerate(RUNS) if n]
    for one, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(one[rows], expected[rows], rtol=0, atol=1e-4 * np.abs(expected).max())
    for name, array in written.items():
        np.testing.assert_allclose(array, defined[name], rtol=0, atol=1e-4 * max(1, np.abs(array).max()), err_msg=name)
