"""Programs: bound calls give what the ops give, wherever the inputs lie and however often they run."""

import numpy as np
import pytest

from penstock import ops
from penstock.errors import InvalidArgument, ShapeError
from penstock.graph import Program, SizedProgram, fuse, fuse_cuda, trace
from penstock.ops.array import Spec, spec_of

W = np.linspace(0.5, 1.5, 8, dtype=np.float32)


def fn(x, state, slots):
    y = ops.rms_norm(x, W)
    ops.conv1d_state_update(state, y, slots=slots)
    left, right = ops.split_columns(y, 3, 5)
    return ops.residual_add(x, y), right, left.reshape(left.shape[0] * 3)[1:4]


def inputs(seed: int = 0, rows: int = 4):
    rng = np.random.default_rng(seed)
    x, state = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 8), (rows, 3, 8)))
    return {"x": x, "state": state, "slots": np.array([3, 1], np.int32)}


def program(**options):
    return Program(trace(fn, {name: spec_of(array) for name, array in inputs().items()}), "cpu", **options)


@pytest.mark.parametrize("fused", [False, True])
def test_program_gives_what_the_ops_give_again_and_again(fused):
    made, given = program(fused=fused), inputs()
    arena = np.full(made.arena_bytes, 0xFF, np.uint8)  # NaN wherever nothing is written
    bound = made.bind(given, arena)
    for seed in range(3):
        fresh = inputs(seed)
        given["x"][:] = fresh["x"]
        state = given["state"].copy()
        wanted = [w.copy() for w in fn(given["x"], state, given["slots"])]
        for got, want in zip(bound.run(), wanted, strict=True):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(given["state"], state)


@pytest.mark.parametrize("sized", [False, True])
def test_columns_of_a_product_are_bound_where_they_lie(sized, monkeypatch):
    """As a view with the product's strides, in any shape of its rows."""
    monkeypatch.setitem(fuse_cuda.ROWS_APART, ops.gelu_tanh, ("x",))
    seen = []

    def graph(sizes):
        def joined(x):
            left, right = ops.split_columns(ops.rms_norm(x, W), 3, 5)
            return ops.gelu_tanh(left), ops.gelu_tanh(right.reshape(len(x), 5, 1))

        made = fuse(trace(joined, {"x": Spec((sizes["T"], 8), "float32")}), "cpu")
        fuse_cuda.columns_in_place(made)
        assert [node.op.name for node in made.nodes] == ["rms_norm", "gelu_tanh", "gelu_tanh"]
        return made

    def wrap(node, kernel):
        def run(x, *rest, out):
            seen.append(x)
            kernel(np.ascontiguousarray(x), *rest, out=out)

        return run

    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    if sized:
        made = SizedProgram(graph, "cpu", {"T": 2}, {"T": 9}, fused=False)
        bound = made.bind({"T": 4}, {"x": x}, np.full(made.arena_bytes, 0xFF, np.uint8), wrap)
    else:
        made = Program(graph({"T": 4}), "cpu", fused=False)
        bound = made.bind({"x": x}, np.full(made.arena_bytes, 0xFF, np.uint8), wrap)
    y = ops.rms_norm(x, W)
    for got, part in zip(bound.run(), (y[:, :3], y[:, 3:, None]), strict=True):
        np.testing.assert_array_equal(got, ops.gelu_tanh(np.ascontiguousarray(part)))
    assert [view.strides for view in seen[1:]] == [(32, 4), (32, 4, 4)]


def test_an_input_may_have_grown():
    made, given = program(), inputs(rows=9)
    before = given["state"].copy()
    made.bind(given, np.empty(made.arena_bytes, np.uint8)).run()
    assert (given["state"][3] != before[3]).any() and (given["state"][4:] == before[4:]).all()


def test_inputs_that_do_not_fit_are_refused():
    made, given = program(), inputs()
    arena = np.empty(made.arena_bytes, np.uint8)
    with pytest.raises(InvalidArgument, match="^program: input 'slots' is missing"):
        made.bind({name: given[name] for name in ("x", "state")}, arena)
    with pytest.raises(ShapeError, match=r"^program: input 'x' is float32\[2, 7\], expected float32\[2, 8\]"):
        made.bind(given | {"x": np.zeros((2, 7), np.float32)}, arena)
    with pytest.raises(ShapeError, match=r"^program: the arena has \d+ bytes, expected"):
        made.bind(given, arena[:-1])


def test_segments_begin_at_the_nodes_they_are_cut_at():
    made = program(fused=False, cut=lambda node: node.op is ops.split_columns)
    bound = made.bind(inputs(), np.empty(made.arena_bytes, np.uint8))
    assert [len(segment) for segment in bound.segments] == [2, 2] and len(bound.calls) == 4
    whole = program(fused=False).bind(inputs(), np.empty(made.arena_bytes, np.uint8))
    assert len(whole.segments) == 1
    for a, b in zip(bound.run(), whole.run(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_op_that_leaves_gaps_gets_zeros_each_time():
    rng = np.random.default_rng(1)
    q, k = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 4), (6, 1, 4)))
    graph = trace(lambda q: ops.attention_scores(q, k, 3, 1.0, 2, 5), {"q": Spec((2, 4), "float32")})
    made = Program(graph, "cpu")
    bound = made.bind({"q": q}, np.full(made.arena_bytes, 0xFF, np.uint8))
    np.testing.assert_array_equal(bound.run()[0], ops.attention_scores(q, k, 3, 1.0, 2, 5))


def test_a_kernel_can_be_replaced():
    names = []

    def wrap(node, kernel):
        names.append(node.op.name)
        return kernel

    made = program(fused=False)
    made.bind(inputs(), np.empty(made.arena_bytes, np.uint8), wrap).run()
    assert names == ["rms_norm", "conv1d_state_update", "split_columns", "residual_add"]
