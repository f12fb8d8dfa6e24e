"""The CPU kernels of the gated delta net beyond the cases of tests/ops: chunkings, slots, zero decays, threads."""

import numpy as np
import pytest

import penstock
from penstock import ops
from penstock.backends.cpu import _threads
from penstock.dtypes import numpy_dtype
from penstock.errors import BackendError
from tests.backends import rows
from tests.ops.cases import by_op
from tests.ops.common import DTYPES, EPS, assert_close, assert_same_bits, normal, run_on

# -- convolution -----------------------------------------------------------------------------------------------------


def conv(rng, T, C, W, dtype="float32", state="float32", weight="bfloat16"):
    x, weight = normal(rng, T, C, dtype=dtype), normal(rng, C, W, dtype=weight)
    return x, normal(rng, W - 1, C, dtype=state), weight


@pytest.mark.parametrize("W", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_conv1d_takes_any_width_and_mix_of_dtypes(dtype, W, rng):
    for state in {"float32", dtype}:
        for weight in DTYPES:
            arguments = conv(rng, 9, 70, W, dtype, state, weight)
            got, want = (run_on(device, ops.conv1d_causal, *arguments) for device in ("cpu", "reference"))
            assert_close(f"{state} {weight}", got, want, 2e-6 + (2 * EPS[dtype] if dtype != "float32" else 0))


@pytest.mark.parametrize("T, C", [(1, 8193), (70, 4100), (33, 1), (300, 129)])
def test_conv1d_of_many_blocks(T, C, rng):
    arguments = conv(rng, T, C, 4)
    got, want = (run_on(device, ops.conv1d_causal, *arguments) for device in ("cpu", "reference"))
    assert_close("y", got, want, 2e-6)


@pytest.mark.parametrize("W", [2, 4])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 17])
def test_conv1d_in_chunks_equals_the_whole(chunk, W, rng):
    for dtype in DTYPES:
        x, state, weight = conv(rng, 70, 301, W, dtype, dtype)
        want, last = run_on("cpu", ops.conv1d_causal, x, state, weight), state.copy()
        run_on("cpu", ops.conv1d_state_update, last, x)
        for start in range(0, 70, chunk):
            part = x[start : start + chunk].copy()
            assert_same_bits("y", run_on("cpu", ops.conv1d_causal, part, state, weight), want[start : start + chunk])
            run_on("cpu", ops.conv1d_state_update, state, part)
        assert_same_bits("state", state, last)


def test_conv1d_by_slots_equals_single_sequences(rng):
    x, _, weight = conv(rng, 32, 300, 4)
    states, slots = normal(rng, 40, 3, 300), rng.permutation(40)[:32].astype(np.int32)
    alone = states.copy()
    y = run_on("cpu", ops.conv1d_causal, x, states, weight, slots)
    run_on("cpu", ops.conv1d_state_update, states, x, slots)
    for b, slot in enumerate(slots):
        row = x[b : b + 1].copy()
        assert_same_bits("y", y[b : b + 1], run_on("cpu", ops.conv1d_causal, row, alone[slot], weight))
        run_on("cpu", ops.conv1d_state_update, alone[slot], row)
    assert_same_bits("states", states, alone)


def test_conv1d_state_of_float32_takes_halves(rng):
    for dtype in ("float16", "bfloat16"):
        x, state, _ = conv(rng, 2, 61, 4, dtype)
        want = state.copy()
        run_on("reference", ops.conv1d_state_update, want, x)
        run_on("cpu", ops.conv1d_state_update, state, x)
        assert_same_bits("state", state, want)


def test_conv1d_of_extremes(rng):
    x, state, weight = conv(rng, 6, 40, 4)
    x[2, 3], x[3, 4], x[1, 5], x[0, 6] = np.inf, -np.inf, np.nan, 1e-42
    x[:, 7] *= 1e38
    got, want = (run_on(device, ops.conv1d_causal, x, state, weight) for device in ("cpu", "reference"))
    with np.errstate(invalid="ignore"):
        assert_close("y", got[:, :7], want[:, :7], 2e-6)


# -- gates -----------------------------------------------------------------------------------------------------------


def test_gates_of_any_magnitude(rng):
    alpha = rng.uniform(-110, 110, (400, 7)).astype(np.float32)
    alpha[:6, 0], alpha[0, 1] = [np.inf, -np.inf, 88.8, -17.5, 0, 1e-40], np.nan
    A_log, dt_bias = np.linspace(-8, 4, 7).astype(np.float32), normal(rng, 7, dtype="bfloat16")
    got, want = (run_on(device, ops.gdn_decay_beta, alpha, -alpha, A_log, dt_bias) for device in ("cpu", "reference"))
    for name, a, b in zip("gb", got, want, strict=True):
        assert_close(name, a, b, 2e-6)


# -- delta rule ------------------------------------------------------------------------------------------------------


def delta(rng, T, Hk=2, Hv=4, Dk=33, Dv=17, dtype="float32", low=0.7):
    qkv = normal(rng, T, 2 * Hk * Dk + Hv * Dv, dtype=dtype, scale=Dk**-0.5)
    g, b = (rng.uniform(least, 1, (T, Hv)).astype(np.float32) for least in (low, 0))
    sizes = {"Hk": Hk, "Hv": Hv, "Dk": Dk, "Dv": Dv}
    return {"state": normal(rng, Hv, Dv, Dk, scale=0.1), "qkv": qkv, "g": g, "b": b, **sizes}


def moved(device, arguments, **others):
    """Output and new state; the given state stays."""
    arguments = {**arguments, **others, "state": arguments["state"].copy()}
    y = np.full((*arguments["b"].shape, arguments["Dv"]), np.nan, np.float32).astype(arguments["qkv"].dtype)
    return run_on(device, ops.gated_delta_net, **arguments, out=y), arguments["state"]


def check_delta(arguments, rel=2e-5, **others):
    want = moved("reference", arguments, method="sequential")
    got = moved("cpu", arguments, **others)
    for name, a, b in zip(("y", "state"), got, want, strict=True):
        kind = {2: "float16", 4: "float32"}[a.dtype.itemsize]
        kind = "bfloat16" if a.dtype not in (np.float16, np.float32) else kind
        assert_close(name, a, b, rel + (2 * EPS[kind] if kind != "float32" else 0), np.abs(b.astype(np.float64)).max())


@pytest.mark.parametrize("method", ["step", "chunkwise", "auto"])
def test_delta_of_every_length(method, rng):
    for T in [*range(1, 34), 127, 128, 129, 300]:
        check_delta(delta(rng, T), method=method)


def by_channel(arguments, rng, low=0.0):
    """The call with a decay for each key channel, some of them 0."""
    g = rng.uniform(low, 1, (*arguments["b"].shape, arguments["Dk"])).astype(np.float32)
    g[::7, :, ::3] = 0
    return {**arguments, "g": g}


@pytest.mark.parametrize("method", ["step", "chunkwise", "auto"])
def test_delta_by_channel_of_every_length(method, rng):
    for T in [*range(1, 20), 127, 129, 300]:
        check_delta(by_channel(delta(rng, T), rng), method=method)


@pytest.mark.parametrize("Dk, Dv, dtype", [(128, 128, "float32"), (1, 1, "float16"), (5, 33, "bfloat16")])
def test_delta_by_channel_of_any_head_size(Dk, Dv, dtype, rng):
    for T in (1, 5, 40):
        check_delta(by_channel(delta(rng, T, Hk=1, Hv=3, Dk=Dk, Dv=Dv, dtype=dtype), rng, low=0.6))


def test_delta_by_channel_in_pieces_equals_the_whole(rng):
    """Steps anywhere; by slots the bits of single sequences."""
    arguments = by_channel(delta(rng, 37, Hk=1, Hv=2, Dk=128, Dv=40), rng)
    want, last = moved("cpu", arguments, method="step")
    state = arguments["state"]
    for start in range(0, 37, 9):
        part = {name: arguments[name][start : start + 9].copy() for name in ("qkv", "g", "b")}
        y, state = moved("cpu", {**arguments, **part, "state": state}, method="step")
        assert_same_bits("y", y, want[start : start + 9])
    assert_same_bits("state", state, last)
    one = {name: arguments[name][:1] for name in ("qkv", "g", "b")}
    states = np.stack([arguments["state"] * 2, arguments["state"]])
    y, moved_on = moved("cpu", {**arguments, **one, "state": states}, slots=np.array([1], np.int32))
    assert_same_bits("y", y, want[:1])
    assert_same_bits("state", moved_on[0], states[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("Dk, Dv", [(128, 128), (1, 1), (5, 33), (64, 32), (100, 130)])
def test_delta_of_any_head_size(Dk, Dv, dtype, rng):
    for T in (1, 5, 40):
        check_delta(delta(rng, T, Hk=1, Hv=3, Dk=Dk, Dv=Dv, dtype=dtype))


@pytest.mark.parametrize("method", ["step", "chunkwise"])
@pytest.mark.parametrize("where", [[0], [10], [20], [3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7], range(21)], ids=str)
def test_delta_with_decays_of_zero(where, method, rng):
    arguments = delta(rng, 21)
    arguments["g"][list(where)] = 0
    check_delta(arguments, method=method)


@pytest.mark.parametrize("low", [0.0, 1e-6, 0.999])
def test_delta_over_many_decays(low, rng):
    """Fast, tiny and slow decays: what the wide form leaves out of its state comes back at the right time."""
    arguments = delta(rng, 400, low=low)
    if low == 1e-6:
        arguments["g"][:] = 10.0 ** rng.uniform(-6, 0, arguments["g"].shape)
    check_delta(arguments)
    arguments["g"][::50] = 1e-40
    check_delta(arguments)


@pytest.mark.parametrize("method", ["step", "sequential"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 9, 16])
def test_delta_steps_in_chunks_equal_the_whole(chunk, method, rng):
    for dtype in DTYPES:
        arguments = delta(rng, 37, Hk=1, Hv=2, Dk=128, Dv=40, dtype=dtype)
        want, last = moved("cpu", arguments, method=method)
        state = arguments["state"]
        for start in range(0, 37, chunk):
            part = {name: arguments[name][start : start + chunk].copy() for name in ("qkv", "g", "b")}
            y, state = moved("cpu", {**arguments, **part, "state": state}, method=method)
            assert_same_bits("y", y, want[start : start + chunk])
        assert_same_bits("state", state, last)


def test_delta_few_tokens_are_steps(rng):
    arguments = delta(rng, 7)
    for a, b in zip(moved("cpu", arguments), moved("cpu", arguments, method="step"), strict=True):
        assert_same_bits("auto", a, b)


@pytest.mark.parametrize("B", [1, 2, 5, 32])
def test_delta_by_slots_equals_single_sequences(B, rng):
    arguments = delta(rng, B, Hk=2, Hv=4, Dk=64, Dv=48)
    states = normal(rng, 35, 4, 48, 64, scale=0.1)
    slots = rng.permutation(35)[:B].astype(np.int32)
    got, after = moved("cpu", {**arguments, "state": states}, slots=slots)
    for i, slot in enumerate(slots):
        one = {name: arguments[name][i : i + 1].copy() for name in ("qkv", "g", "b")}
        y, state = moved("cpu", {**arguments, **one, "state": states[slot].copy()})
        assert_same_bits("y", got[i : i + 1], y)
        assert_same_bits("state", after[slot], state)
    others = np.setdiff1d(np.arange(35), slots)
    assert_same_bits("other slots", after[others], states[others])


@pytest.mark.parametrize("T, method", [(1, "auto"), (30, "step"), (30, "auto")])
def test_delta_does_not_depend_on_the_number_of_threads(T, method, rng):
    if _threads.available() < 2:
        pytest.skip("one processor")
    arguments = delta(rng, T, Hk=3, Hv=9, Dk=64, Dv=64)
    before, found = _threads.threads(), []
    try:
        for count in (1, 2):
            _threads.set_threads(count)
            found.append(moved("cpu", arguments, method=method))
    finally:
        _threads.set_threads(before)
    for one, two in zip(*found, strict=True):
        assert_same_bits("threads", two, one)


def test_delta_keeps_nan_in_its_head(rng):
    for T in (1, 20):
        arguments = delta(rng, T)
        arguments["qkv"][0, -1] = np.nan  # the last value of the last head
        y, state = moved("cpu", arguments)
        assert np.isnan(y[0, -1, -1]) and np.isnan(state[-1, -1]).all()
        assert np.isfinite(y[:, :-1]).all() and np.isfinite(state[:-1]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_delta_step_is_the_kernels_one_after_the_other(dtype, rng):
    case = by_op("gated_delta_step")[1]
    call, again = case.arguments(dtype), case.arguments(dtype)
    Hk, (Hv, Dv, Dk) = call["Hk"], call["state"].shape[1:]
    with penstock.backend("cpu"):
        got = ops.gated_delta_step(**call)
        y = ops.conv1d_causal(again["qkv"], again["conv_state"], again["conv_weight"], again["slots"])
        ops.conv1d_state_update(again["conv_state"], again["qkv"], again["slots"])
        gates = ops.gdn_decay_beta(again["alpha"], again["beta"], again["A_log"], again["dt_bias"])
        y = ops.rms_norm_qk(y, Hk, Dk, Hk * Dk)
        d = ops.gated_delta_net(again["state"], y, *gates, Hk, Hv, Dk, Dv, slots=again["slots"])
        want = ops.gated_rms_norm(d, again["z"], again["norm_weight"], again["eps"])
    assert_same_bits("y", got, want)
    for name in ("conv_state", "state"):
        assert_same_bits(name, call[name], again[name])


def test_kernels_run_uncompiled():
    rows.check_uncompiled("conv1d_causal", "gdn_decay_beta", "gated_delta_net")


@pytest.mark.parametrize("case", by_op("gdn_decay_beta")[:2], ids=str)
def test_gates_do_not_depend_on_the_number_of_rows(case):
    for dtype in DTYPES:
        rows.check_rows_alone(case, dtype)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_row_of_no_sequence_is_0_and_moves_no_state(device, rng):
    Hk, Hv, Dk, Dv = 2, 4, 8, 5
    slots, there = np.array([4, -1, 0, -1, 2], np.int32), np.array([0, 2, 4])
    x, _, weight = conv(rng, 5, 2 * Hk * Dk + Hv * Dv, 4)
    g, b = (rng.random((5, Hv)).astype(np.float32) for _ in range(2))
    rows, states = normal(rng, 5, 3, x.shape[1]), normal(rng, 5, Hv, Dv, Dk)

    def layer(own, rows, states):
        keep = [np.ascontiguousarray(a[own]) for a in (x, slots, g, b)]
        y = run_on(device, ops.conv1d_causal, keep[0], rows, weight, keep[1])
        run_on(device, ops.conv1d_state_update, rows, keep[0], keep[1])
        return run_on(device, ops.gated_delta_net, states, y, *keep[2:], Hk, Hv, Dk, Dv, slots=keep[1]), rows, states

    want, *moved = layer(there, rows.copy(), states.copy())
    got, *also = layer(np.arange(5), rows.copy(), states.copy())
    assert_same_bits("y", got[there], want)
    assert not got[[1, 3]].any()
    for one, other in zip(also, moved, strict=True):
        assert_same_bits("state", one, other)


@pytest.mark.parametrize("op", ["gated_delta_net", "gated_delta_step", "delta_commit"])
def test_cpu_kernels_refuse_bfloat16_states_before_anything_moves(op, rng):
    case = next(case for case in by_op(op) if "empty" not in str(case))
    arguments = case.arguments("float32")
    arguments["state"] = arguments["state"].astype(numpy_dtype("bfloat16"))
    before = {name: value.copy() for name, value in arguments.items() if isinstance(value, np.ndarray)}
    message = f"^{op}: state is bfloat16, expected float32: the CPU has no other states$"
    with penstock.backend("cpu"), pytest.raises(BackendError, match=message):
        ops.REGISTRY[op](**arguments)
    for name, value in before.items():
        assert_same_bits(name, arguments[name], value)
