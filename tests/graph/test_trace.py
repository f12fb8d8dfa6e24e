"""Tracing: what models ask of arrays, on values that do not exist yet."""

import numpy as np
import pytest

from penstock import ops
from penstock.errors import InvalidArgument, ShapeError
from penstock.graph import trace
from penstock.ops.array import Spec

X = {"x": Spec((3, 8), "float32")}
W = np.ones(8, np.float32)


def test_trace_records_calls_in_order_with_constants_and_values():
    def fn(x):
        y = ops.rms_norm(x, W, 1e-5)
        return ops.residual_add(x, y)

    graph = trace(fn, X)
    norm, add = graph.nodes
    assert [node.op.name for node in graph.nodes] == ["rms_norm", "residual_add"]
    assert norm["x"] is graph.inputs["x"] and norm["weight"] is W and norm["eps"] == 1e-5
    assert add["b"] is norm.out and graph.outputs == (add.out,)
    assert norm.out.shape == (3, 8) and norm.out.dtype == "float32"
    assert "residual_add.1(%x, %rms_norm.0) -> float32[3, 8]" in str(graph)


def test_trace_checks_shapes_as_a_call_does():
    with pytest.raises(ShapeError, match="^rms_norm: weight has shape"):
        trace(lambda x: ops.rms_norm(x, W[:3]), X)


def test_trace_of_several_outputs_and_of_none():
    pages = {"k": Spec((2, 4, 8), "float32"), "v": Spec((2, 4, 8), "float32"), "table": Spec((2,), "int32")}

    def fn(x, k, v, table):
        at = np.array(0, np.int32)
        assert ops.kv_pages_append(x.reshape(3, 1, 8), x.reshape(3, 1, 8), k, v, table, at) is None
        return ops.split_columns(x, 3, 5)

    graph = trace(fn, X | pages)
    append, split = graph.nodes
    assert append.outs == () and list(append.writes) == [graph.inputs["k"], graph.inputs["v"]]
    assert [out.shape for out in graph.outputs] == [(3, 3), (3, 5)] and split.outs[2:] == (None, None)


def test_trace_refuses_what_it_did_not_make():
    with pytest.raises(InvalidArgument, match="^trace: 3 was returned, expected values of the graph"):
        trace(lambda x: 3, X)
    other = trace(lambda x: ops.rms_norm(x), X)
    with pytest.raises(InvalidArgument, match="was returned"):
        trace(lambda x: other.outputs[0], X)
    with pytest.raises(InvalidArgument, match="^rms_norm: out is given"):
        trace(lambda x: ops.rms_norm(x, out=x), X)


def made(shape: tuple[int, ...]):
    """A value of a graph and a NumPy array of its elements' numbers."""
    graph = trace(lambda x: x, {"x": Spec(shape, "float32")})
    return graph.inputs["x"], np.arange(np.prod(shape, dtype=int)).reshape(shape)


@pytest.mark.parametrize(
    ("shape", "index"),
    [
        ((5, 3, 2), 2),
        ((5, 3, 2), -1),
        ((5, 3, 2), slice(1, 4)),
        ((5, 3, 2), (3, slice(1, 3))),
        ((1, 7), (slice(None), slice(2, 6))),
        ((1, 7), (slice(None), 3)),
        ((5, 3), slice(-1, None)),
        ((5, 3), slice(4, 2)),
        ((4, 1, 6), (2, slice(None), slice(1, 3))),
    ],
)
def test_parts_are_those_of_numpy(shape, index):
    value, array = made(shape)
    part, want = value[index], array[index]
    assert part.shape == want.shape and part.base is value
    if want.size:
        assert part.offset == want.reshape(-1)[0]
        np.testing.assert_array_equal(np.arange(part.offset, part.offset + part.spec.size), want.reshape(-1))


@pytest.mark.parametrize(
    ("shape", "index"),
    [((5, 3), (slice(None), 1)), ((5, 3), (slice(None), slice(0, 2))), ((5, 3), slice(0, 4, 2)), ((5, 3), 5)],
)
def test_parts_that_do_not_lie_in_one_piece_are_refused(shape, index):
    value, _ = made(shape)
    with pytest.raises(ShapeError, match="^part of"):
        value[index]


def test_parts_of_parts_and_other_shapes_count_from_the_base():
    value, array = made((4, 6))
    part = value[1:3].reshape(12)[4:9]
    assert part.base is value and part.offset == array[1:3].reshape(12)[4]
    assert len(value) == 4 and value.ndim == 2
    with pytest.raises(ShapeError, match="^reshape: shape is"):
        value.reshape(5, 5)
