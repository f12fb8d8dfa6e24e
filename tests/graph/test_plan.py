"""Plans: values that are needed at the same time never share bytes, others may."""

import itertools

import numpy as np
import pytest

from penstock import ops
from penstock.graph import Graph, Value, plan, trace
from penstock.graph.plan import ALIGNMENT
from penstock.graph.trace import nbytes
from penstock.ops.array import Spec


def lifetimes(graph: Graph) -> dict[Value, tuple[int, int]]:
    """First and last node that needs each value, by a plain look at all of them."""
    spans = {out: (n, n) for n, node in enumerate(graph.nodes) for out in node.outs if out is not None}
    for n, node in enumerate(graph.nodes):
        for value in node.reads:
            if value.base in spans:
                spans[value.base] = (spans[value.base][0], n)
    for output in graph.outputs:
        spans[output.base] = (spans[output.base][0], len(graph.nodes))
    return spans


def check(graph: Graph) -> None:
    made = plan(graph)
    spans = lifetimes(graph)
    assert set(made.offsets) == set(spans)
    for value, offset in made.offsets.items():
        assert offset % ALIGNMENT == 0 and offset + nbytes(value) <= made.size
    for a, b in itertools.combinations(spans, 2):
        together = spans[a][0] <= spans[b][1] and spans[b][0] <= spans[a][1]
        start, other = made.offsets[a], made.offsets[b]
        if together and nbytes(a) and nbytes(b):
            assert start + nbytes(a) <= other or other + nbytes(b) <= start, (a, b)
    assert made.size <= made.apart


def chain(length: int):
    def fn(x):
        for _ in range(length):
            x = ops.rms_norm(x)
        return x

    return trace(fn, {"x": Spec((5, 100), "float32")})


def test_a_chain_needs_two_buffers():
    graph = chain(10)
    check(graph)
    made = plan(graph)
    assert made.size == 2 * 2048 and made.apart == 10 * 2048


def test_outputs_and_values_read_late_keep_their_place():
    def fn(x):
        first = ops.rms_norm(x)
        y = first
        for _ in range(4):
            y = ops.rms_norm(y)
        return ops.residual_add(first, y), ops.rms_norm(y).reshape(500)[100:200]

    check(trace(fn, {"x": Spec((5, 100), "float32")}))


def test_a_part_keeps_its_whole():
    def fn(x):
        y = ops.rms_norm(x)
        part = y[0:1].reshape(100)
        other = ops.rms_norm(ops.rms_norm(x))
        return ops.add(other, part)

    check(trace(fn, {"x": Spec((5, 100), "float32")}))


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs(seed):
    rng = np.random.default_rng(seed)

    def fn(x):
        values = [x]
        for _ in range(40):
            a, b = (values[i] for i in rng.integers(0, len(values), 2))
            kind = rng.integers(3)
            if kind == 0:
                values.append(ops.rms_norm(a))
            elif kind == 1 and a.shape == b.shape:
                values.append(ops.residual_add(a, b))
            else:
                values += ops.split_columns(a, 1, a.shape[1] - 1) if a.shape[1] > 1 else [ops.rms_norm(a)]
        return tuple(values[i] for i in {*rng.integers(1, len(values), 3).tolist(), len(values) - 1})

    check(trace(fn, {"x": Spec((int(rng.integers(1, 4)), 300), "float32")}))


def test_a_value_that_nobody_reads_gives_its_place_back():
    def fn(x):
        for _ in range(5):
            ops.rms_norm(x)
        return ops.rms_norm(x)

    assert plan(trace(fn, {"x": Spec((1, 64), "float32")})).size == 256


def test_what_is_read_behind_a_cut_keeps_its_place():
    """A program that is stopped behind a cut can be run from the cut on: nothing after it writes over what it reads."""

    def fn(x):
        h = x
        for _ in range(4):
            y = ops.swiglu(h, h)
            h = ops.residual_add(h, ops.gelu_tanh(y))
        return h

    def at_gelu(node):
        return node.op is ops.gelu_tanh

    graph = trace(fn, {"x": Spec((3, 64), "float32")})
    made = plan(graph, at_gelu)
    spans = {value: (start, start + nbytes(value)) for value, start in made.offsets.items()}
    cuts = [n for n, node in enumerate(graph.nodes) if at_gelu(node)]
    for at in cuts:
        read = {v.base for node in graph.nodes[at:] for v in node.reads if v.base in spans}
        before = {out for node in graph.nodes[:at] for out in node.outs}
        for value in read & before:
            for node in graph.nodes[at:]:
                for out in node.outs:
                    assert spans[out][0] >= spans[value][1] or spans[out][1] <= spans[value][0]
    assert plan(graph).size < made.size


def test_a_sum_over_ranks_is_made_in_place_where_nothing_else_reads_its_terms():
    spec = Spec((3, 100), "float32")

    def alone(x):
        return ops.residual_add(ops.all_reduce(ops.mul(x, 2.0)), x)

    def read_later(x):
        y = ops.mul(x, 2.0)
        return ops.residual_add(ops.all_reduce(y), y)

    for function, shares in ((alone, True), (read_later, False)):
        graph = trace(function, {"x": spec})
        made = plan(graph)
        product, total = (next(node for node in graph.nodes if node.op is op) for op in (ops.mul, ops.all_reduce))
        assert (made.offsets[product.out] == made.offsets[total.out]) is shares
        assert made.size == (2 if shares else 3) * 1280
    given = trace(lambda x: ops.residual_add(ops.all_reduce(x), x), {"x": spec})
    assert set(plan(given).offsets) == {node.out for node in given.nodes}, "an input keeps its own memory"
