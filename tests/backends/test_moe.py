"""One token through its experts in one launch, and experts in batches: the same bits as all ops on their own."""

import numpy as np
import pytest

import penstock
from penstock import ops
from penstock.backends.cpu import _threads, linear
from penstock.errors import InvalidArgument
from tests.ops.common import assert_same_bits, fenced, normal, quantized

VARIANTS = [name for name in linear.VARIANTS if linear._runs_here(name)]
E, DIM, WIDTH, K = 5, 3 * 64 + 512, 2 * 128 + 64, 3  # a ragged end behind a block of 512


def stacks(rng, up_bits=4, down_bits=4, dim=DIM, width=WIDTH, dtype="bfloat16"):
    gate, up = (quantized(rng, E, width, dim, bits=up_bits, group_size=64, dtype=dtype) for _ in range(2))
    return gate, up, quantized(rng, E, dim, width, bits=down_bits, group_size=32, dtype=dtype)


def apart(x, ids, weights, gate, up, down, slot_of=None, act="silu"):
    """The block as two ops, each with launches of its own."""
    h = ops.expert_gate_up(x, gate, up, ids, slot_of, act, activations="int8")
    return ops.expert_down_sum(h, down, ids, weights, slot_of, activations="int8")


def token(rng, dim=DIM, k=K):
    ids = rng.permutation(E)[None, :k].astype(np.int32)
    return normal(rng, 1, dim), ids, rng.random((1, k), dtype=np.float32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_moe_forward_of_one_token_has_the_bits_of_its_parts(variant, rng):
    gate, up, down = stacks(rng)
    x, ids, weights = token(rng)
    with penstock.backend("cpu", variant=variant):
        y = ops.moe_forward(x, ids, weights, gate, up, down, activations="int8", out=np.full((1, DIM), np.nan, "f4"))
        assert_same_bits("y", y, apart(x, ids, weights, gate, up, down))
        assert_same_bits("one row", ops.moe_forward(x[0], ids[0], weights[0], gate, up, down, activations="int8"), y[0])


@pytest.mark.parametrize("up_bits, down_bits", [(4, 8), pytest.param(3, 4, marks=pytest.mark.slow)])
def test_moe_forward_of_one_token_takes_other_bits_for_down(up_bits, down_bits, rng):
    gate, up, down = stacks(rng, up_bits, down_bits, dtype="float16")
    call = (*token(rng), gate, up, down)
    assert_same_bits("y", ops.moe_forward(*call, activations="int8"), apart(*call))


def test_moe_forward_of_one_token_takes_joined_weights_and_slots_and_gelu(rng):
    gate, up, down = stacks(rng)
    joined = gate.with_arrays(*(np.concatenate(both, axis=1) for both in zip(gate.arrays, up.arrays, strict=True)))
    x, ids, weights = token(rng)
    want = apart(x, ids, weights, gate, up, down, act="gelu_tanh")
    y = ops.moe_forward(x, ids, weights, joined, None, down, act="gelu_tanh", activations="int8")
    assert_same_bits("joined", y, want)
    place = np.array([4, 2, 0, 1, 3], np.int32)  # expert e lies in slot place[e]
    moved = [w.with_arrays(*(a[np.argsort(place)] for a in w.arrays)) for w in (gate, up, down)]
    y = ops.moe_forward(x, ids, weights, *moved, slot_of=place, act="gelu_tanh", activations="int8")
    assert_same_bits("moved", y, want)


def test_moe_forward_of_one_token_leaves_out_what_is_no_expert(rng, monkeypatch):
    weights_of = [fenced(w) for w in stacks(rng, dim=64, width=64)]
    x, ids, weights = token(rng, dim=64)
    want = ops.moe_forward(x, ids[:, [0, 2]], weights[:, [0, 2]], *weights_of, activations="int8")
    ids[0, 1], weights[0, 1] = -1, np.nan
    slot_of = np.arange(E, dtype=np.int32)
    for place in (None, slot_of):
        assert_same_bits("y", ops.moe_forward(x, ids, weights, *weights_of, place, activations="int8"), want)
    ids[0, 1] = next(e for e in range(E) if e not in ids)  # another rank's: still one launch, by the two others
    slot_of[ids[0, 1]] = -2
    with monkeypatch.context() as patch:
        patch.setattr("penstock.backends.cpu.moe.pairs_of", None)
        got = ops.moe_forward(x, ids, weights, *weights_of, slot_of, activations="int8")
    assert_same_bits("y without another rank's", got, want)
    out = np.full((1, 64), np.nan, np.float32)
    ops.moe_forward(x, np.full_like(ids, -1), weights, *weights_of, activations="int8", out=out)
    assert_same_bits("y of no expert", out, np.zeros_like(out))


def test_moe_forward_of_one_token_does_not_depend_on_threads_or_strips(rng):
    gate, up, down = stacks(rng, dim=64 * 3 + 64, width=32 * 5)
    call = (*token(rng, dim=64 * 3 + 64, k=1), gate, up, down)
    before = _threads.threads()
    try:
        results = []
        for count in range(1, _threads.available() + 1):
            _threads.set_threads(count)
            results.append(ops.moe_forward(*call, activations="int8"))
    finally:
        _threads.set_threads(before)
    for y in results:
        assert_same_bits("y", y, apart(*call))


def test_moe_forward_of_one_token_shows_what_is_not_finite(rng):
    gate, up, down = stacks(rng)
    x, ids, weights = token(rng)
    x[0, 70] = np.nan
    assert np.isnan(ops.moe_forward(x, ids, weights, gate, up, down, activations="int8")).all()


@pytest.mark.parametrize("activations", ["int8", "float32"])
@pytest.mark.parametrize("T", [1, 7])
def test_experts_in_batches_have_the_bits_of_all_at_once(T, activations, rng):
    """A stack of two slots, NaN in the one that is not filled: whatever reads an absent expert shows."""
    weights_of = stacks(rng, dim=64, width=64)
    x, weights = normal(rng, T, 64), rng.random((T, K), dtype=np.float32)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
    want = ops.moe_forward(x, ids, weights, *weights_of, activations=activations)
    rows = np.full((T, K, 64), np.nan, np.float32)
    for batch in ([3], [0, 4], [2], [1]):
        slot_of, empty = np.full(E, -1, np.int32), [fenced(w[:2]) for w in weights_of]
        slot_of[batch] = np.arange(len(batch))
        for w, own in zip(weights_of, empty, strict=True):
            own.scales[:] = np.nan
            for array, into in zip(w.arrays, own.arrays, strict=True):
                into[: len(batch)] = array[batch]
        before = rows.copy()
        ops.expert_mlp(rows, x, ids, *empty, slot_of, activations=activations)
        others = ~np.isin(ids, batch)
        assert_same_bits("rows of other experts", rows[others], before[others])
        assert np.isfinite(rows[~others]).all()
    nothing = [w.with_arrays(w.packed[:1], np.full_like(w.scales[:1], np.nan), w.biases[:1]) for w in weights_of]
    away = np.full(E, -1, np.int32)
    call = (x, ids, weights, *nothing, away)
    assert_same_bits("y", ops.moe_forward(*call, activations=activations, expert_out=rows), want)


@pytest.mark.parametrize("activations", ["int8", "float32"])
@pytest.mark.parametrize("T", [1, 7])
def test_kernels_refuse_absent_experts_by_themselves(T, activations, rng):
    """Inside a program an op's checks of values do not run."""
    gate, up, down = (fenced(w) for w in stacks(rng, dim=64, width=64))
    slot_of = np.array([0, 1, -1, 3, 4], np.int32)
    ids, weights = np.array([[0, 2, 3]] * T, np.int32), np.ones((T, K), np.float32)
    x, h = normal(rng, T, 64), normal(rng, T, K, 64)
    calls = {
        ops.moe_forward: (x, ids, weights, gate, up, down, slot_of, "silu", activations, None),
        ops.expert_gate_up: (x, gate, up, ids, slot_of, "silu", activations),
        ops.expert_down_sum: (h, down, ids, weights, slot_of, activations),
        ops.expert_matmul: (h, down, ids, slot_of, activations),
    }
    shapes = {ops.expert_gate_up: (T, K, 64), ops.expert_matmul: (T, K, 64)}
    for op, args in calls.items():
        out, kernel = np.full(shapes.get(op, (T, 64)), 7, np.float32), op.kernel("cpu")
        assert kernel is not None
        for run in (lambda *args, kernel=kernel, out=out: kernel.choosing(*args, out=out), op.body):
            with pytest.raises(
                InvalidArgument, match=r"ids has 2, an absent expert \(slot_of is -1\), expected present"
            ):
                run(*args)
        assert (out == 7).all()
