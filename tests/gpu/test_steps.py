"""Whole ragged steps on CUDA: programs of each family against the definitions of their ops, and steps of prompts and
answers in one against steps one by one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.api import load_random
from penstock.engine.engine import Engine
from penstock.engine.steps import Run
from penstock.graph.fuse import RULES
from penstock.graph.rewrite import rewritten
from penstock.graph.trace import Graph, Value
from penstock.models.step import PAGE, PagedKV
from tests.gpu.common import to_device, to_host
from tests.gpu.test_models import EVERY, SMALL, made
from tests.graph.common import names, run
from tests.models.common import error, some_tokens

RUNS = (1, 0, 5, 2)  # rows of each sequence, one row of no sequence behind them
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
    plain = engine.programs.graph(sum(RUNS) + 1, len(RUNS), PAGES, R=len(RUNS), padded=True)
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


# of each step: which sequence gets how many tokens
Steps = Sequence[Sequence[tuple[int, int]]]


def stepped(engine: Engine, texts: Sequence[list[int]], steps: Steps, together: bool) -> list[np.ndarray]:
    """Logits [tokens, vocab] of each text; the tokens of a step together, or sequence by sequence."""
    sequences = [engine.open() for _ in texts]
    found: list[list[np.ndarray]] = [[] for _ in texts]
    for parts in steps:
        runs = []
        for n, count in parts:
            at = sequences[n].length
            ids = np.array(texts[n][at : at + count], np.int32)
            runs.append(Run(sequences[n], ids, "all", prompt=at == 0 or count > 1))
        rows = np.concatenate([engine.step(runs)] if together else [engine.step([run]) for run in runs])
        ends = np.cumsum([count for _, count in parts])
        assert len(rows) == ends[-1]
        for (n, _), own in zip(parts, np.split(rows, ends[:-1]), strict=True):
            found[n].append(own)
    for sequence in sequences:
        engine.close(sequence)
    return [np.concatenate(rows) for rows in found]


FULL = 3.0


def written(engine: Engine) -> list[int]:
    """Of each cache that was full of FULL, the positions or the slots that are not any more."""
    found = []
    for layout, arrays in zip(engine.caches.layouts, engine.caches.arrays, strict=True):
        axes = 2 if isinstance(layout, PagedKV) else 1  # pages and their positions, or slots
        rows = [(to_host(array) != FULL).reshape(*array.shape[:axes], -1).any(axis=-1) for array in arrays]
        assert np.array_equal(*rows)
        found.append(int(rows[0].sum()))
    return found


@pytest.mark.parametrize("family", SMALL)
def test_prompts_and_answers_in_one_step_match_the_definitions(family):
    """One row, then an answer beside a prompt, then two answers in other rows than before. Rows and a slot are unused:
    nothing is written for them.
    """
    steps = [[(0, 1)], [(0, 1), (1, 3)], [(1, 1), (0, 1)]]
    texts = [some_tokens(3), some_tokens(4, seed=5)]
    config = SMALL[family]
    want = stepped(made(config, "reference").engine, texts, steps, together=False)
    engine = made(config, "cuda", dtype="float32").engine
    engine.allocate(sequences=3)
    for array in (array for arrays in engine.caches.arrays for array in arrays):
        array.fill_(FULL)
    got = stepped(engine, texts, steps, together=True)
    assert error(np.concatenate(got), np.concatenate(want)) <= 1e-5
    assert written(engine) == [7 if isinstance(layout, PagedKV) else 2 for layout in engine.caches.layouts]


def test_log_probabilities_of_a_prompt_are_made_on_the_device():
    engine = made(SMALL["llama"], "cuda", dtype="float32").engine
    tokens, targets, found = np.array(some_tokens(5), np.int32), np.array([3, 0, 7, 3, -1], np.int32), []
    for wanted in ("all", "logprobs"):
        sequence = engine.open()
        run = Run(sequence, tokens, wanted, prompt=True, targets=targets, top=2)
        found.append(engine.step([run]))
        engine.close(sequence)
    rows, last = found
    np.testing.assert_array_equal(last, rows[-1:])
    with penstock.backend("reference"):
        want = penstock.ops.token_logprobs(rows, targets, 2)
    for got, expected in zip(run.found, want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-12)


@pytest.mark.cuda
@pytest.mark.parametrize("name", EVERY)
def test_cuda_prompts_and_answers_in_one_step_are_those_one_by_one(name, rng):
    """Sequences join one after the other, go on by one token or by several, and cross a page."""
    texts = [some_tokens(500, seed=n) for n in range(6)]
    lengths, steps = [0] * len(texts), []
    for number in range(24):
        counts = [0 if number < n else 1 if rng.random() < 0.6 else int(rng.integers(2, 60)) for n in range(6)]
        counts = [min(count, 500 - length) for count, length in zip(counts, lengths, strict=True)]
        steps.append([(n, counts[n]) for n in rng.permutation(6).tolist() if counts[n]])
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
    assert max(lengths) > PAGE
    engine = made(EVERY[name], "cuda", dtype="float32").engine
    got, want = (stepped(engine, texts, steps, together) for together in (True, False))
    for own, expected in zip(got, want, strict=True):
        assert error(own, expected) <= 5e-5  # what each is within of the definitions: test_models.py
