"""The gated delta net on CUDA: slots, ragged and cut sequences, zero decays, equal keys, and long runs on a GPU."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.backends.cuda import _chunk, _delta_step, delta
from penstock.backends.cuda._tuning import DeltaStep
from penstock.dtypes import numpy_dtype
from penstock.errors import BackendError
from tests.gpu.common import DEVICE, GPU, reference, run, to_host
from tests.gpu.common import to_device as view_on_device
from tests.ops.common import EPS, assert_close, assert_same_bits, i32, normal


def to_device(value: Any) -> Any:
    """A copy: without a GPU the tensor would share the array's memory, and a state be moved on in both."""
    return view_on_device(value.copy() if isinstance(value, np.ndarray) else value)


def assert_as_defined(name: str, got: np.ndarray, want: np.ndarray, rel: float) -> None:
    """Within rel of the largest value, or two roundings of a half format."""
    scale = np.abs(want.astype(np.float64)).max()
    assert_close(name, got, want, rel + (2 * EPS[want.dtype.name] if want.dtype.itemsize == 2 else 0), scale)


# -- convolution and gates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("W", [1, 5])
def test_conv1d_cut_in_pieces_equals_whole(W, rng):
    """H10 and H11: pieces of 1, 2, 3 and 6 tokens, bit for bit, the state included."""
    x, weight = to_device(normal(rng, 12, 5)), to_device(normal(rng, 5, W))
    states = [to_device(normal(rng, W - 1, 5))]
    states.append(states[0].clone())
    with penstock.backend("cuda"):
        whole = ops.conv1d_causal(x, states[0], weight)
        ops.conv1d_state_update(states[0], x)
        parts = []
        for piece in torch.split(x, [1, 2, 3, 6]):
            parts.append(ops.conv1d_causal(piece, states[1], weight))
            ops.conv1d_state_update(states[1], piece)
    assert_same_bits("y", to_host(torch.cat(parts)), to_host(whole))
    assert_same_bits("state", to_host(states[1]), to_host(states[0]))
    want = reference(ops.conv1d_causal, x=to_host(x), state=normal(rng, W - 1, 5) * 0, weight=to_host(weight))
    got = run(ops.conv1d_causal, x=to_host(x), state=np.zeros((W - 1, 5), "f4"), weight=to_host(weight))
    assert_close("y", got, want, 2e-6)


def test_conv1d_of_inactive_rows_is_zero_and_keeps_the_state(rng):
    x, state, slots = normal(rng, 4, 6), normal(rng, 3, 3, 6), i32(-1, 2, 3, 0)
    x[[0, 2]] = np.nan
    y = run(ops.conv1d_causal, x=x, state=state, weight=normal(rng, 6, 4), slots=slots)
    assert not y[[0, 2]].any() and np.isfinite(y).all() and y[[1, 3]].all()
    moved = to_device(state)
    with penstock.backend("cuda"):
        ops.conv1d_state_update(moved, to_device(x), to_device(slots))
    want = state.copy()
    want[2], want[0] = np.concatenate([state[2, 1:], x[1:2]]), np.concatenate([state[0, 1:], x[3:4]])
    assert_same_bits("state", to_host(moved), want)


def test_gdn_decay_beta_keeps_small_and_large_arguments(rng):
    alpha = np.array([[-100, -30, -17, -5, -1e-3, 0, 1e-3, 5, 30, 88, 100, 1000]], "f4")
    arguments = {"alpha": alpha, "beta": alpha, "A_log": np.full(12, -4, "f4"), "dt_bias": np.zeros(12, "f4")}
    for got, want in zip(run(ops.gdn_decay_beta, **arguments), reference(ops.gdn_decay_beta, **arguments), strict=True):
        scale = want * (1 + np.abs(np.log(want + 1e-38)))  # g = exp(-y) has the relative error of y, y times
        assert_close("gate", got, want, 8 * EPS["float32"], scale + 1e-37)


# -- delta rule --------------------------------------------------------------------------------------------------------


def sequence(rng: Any, T: int, Hk: int, Hv: int, Dk: int, Dv: int, dtype: str = "float32", low: float = 0.7) -> dict:
    qkv = normal(rng, T, 2 * Hk * Dk + Hv * Dv, dtype=dtype, scale=Dk**-0.5)
    g, b = (rng.uniform(least, 1, (T, Hv)).astype("f4") for least in (low, 0))
    heads = {"Hk": Hk, "Hv": Hv, "Dk": Dk, "Dv": Dv}
    return {"state": normal(rng, Hv, Dv, Dk, scale=0.1), "qkv": qkv, "g": g, "b": b, **heads}


def moved(call: dict, variant: str | None = None, cuts: tuple[int, ...] = (), **more: Any) -> tuple[Any, Any]:
    """Outputs and last state of a call on the device, cut into several at these tokens."""
    call = {name: to_device(value) for name, value in (call | more).items()}
    parts, edges = [], (0, *cuts, len(call["qkv"]))
    with penstock.backend("cuda", variant=variant):
        for start, stop in itertools.pairwise(edges):
            rows = {name: call[name][start:stop] for name in ("qkv", "g", "b")}
            parts.append(ops.gated_delta_net(**(call | rows)))
    return to_host(torch.cat(parts)), to_host(call["state"])


def defined(call: dict) -> tuple[np.ndarray, np.ndarray]:
    state = call["state"].copy()
    with penstock.backend("reference"):
        return ops.gated_delta_net(**(call | {"state": state})), state


def check(call: dict, variant: str | None = "chunks", rel: float = 4e-5) -> None:
    for name, got, want in zip(("y", "state"), moved(call, variant), defined(call), strict=True):
        assert_as_defined(name, got, want, rel)


@pytest.fixture
def poisoned_scratch(monkeypatch):
    new_empty = torch.Tensor.new_empty

    def filled(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return new_empty(self, *args, **kwargs).fill_(float("nan"))

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


@pytest.mark.parametrize(("T", "dtype"), [(1, "float16"), (65, "bfloat16")])
def test_gated_delta_net_by_ragged_chunks(T, dtype, rng, poisoned_scratch):
    """H6: the last chunk has one token, and Dk and Dv do not fill their tiles."""
    check(sequence(rng, T, 1, 1, 20, 12, dtype))


@pytest.mark.parametrize("zero", [[0, 1, 30, 63, 64], slice(None)], ids=["some", "all"])
def test_gated_delta_net_by_chunks_forgets(zero, rng):
    """H7: a decay of exactly 0, first, in the middle and last of a chunk, or always."""
    call = sequence(rng, 66, 1, 1, 16, 16, "bfloat16")
    call["g"][zero] = 0
    check(call)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gated_delta_net_by_chunks_of_equal_keys(dtype, rng):
    """The same key and full strength throughout: I + A is all ones below its diagonal, its powers are huge."""
    call = sequence(rng, 64, 1, 1, 16, 16, dtype)
    key = rng.standard_normal(16)
    call["qkv"][:, 16:32] = key / np.linalg.norm(key)
    call["g"][:], call["b"][:] = 1, 1
    check(call)


def test_gated_delta_net_cut_at_chunks_equals_whole(rng, monkeypatch):
    call = sequence(rng, 70, 1, 1, 16, 16, "bfloat16")
    whole = moved(call, "chunks")
    for name, got, want in zip(("y", "state"), moved(call, "chunks", cuts=(64,)), whole, strict=True):
        assert_same_bits(name, got, want)
    monkeypatch.setattr(_chunk, "SEGMENT", 64)
    for name, got, want in zip(("y", "state"), moved(call, "chunks"), whole, strict=True):
        assert_same_bits(name, got, want)


def with_channels(rng: Any, call: dict, low: float = 0.7) -> dict:
    """A call whose key channels have decays of their own."""
    return call | {"g": rng.uniform(low, 1, (*call["g"].shape, call["Dk"])).astype("f4")}


@pytest.mark.parametrize(("T", "dtype"), [(1, "float16"), (17, "bfloat16"), (66, "float16"), (130, "bfloat16")])
def test_decays_of_channels_by_ragged_chunks(T, dtype, rng, poisoned_scratch):
    """One token, one behind 16, chunks with one or two; Dk and Dv do not fill their tiles, heads share keys."""
    check(with_channels(rng, sequence(rng, T, 1, 2 if T < 60 else 1, 20, 12, dtype)))


def test_decays_of_channels_that_are_all_one_are_those_of_a_head(rng):
    call = sequence(rng, 80, 1, 1, 16, 24, "bfloat16")
    spread = call | {"g": np.repeat(call["g"][:, :, None], 16, axis=2)}
    for name, got, want in zip(("y", "state"), moved(spread, "chunks"), defined(call), strict=True):
        assert_as_defined(name, got, want, 4e-5)


@pytest.mark.parametrize("low", [0.0, 1e-12, 1e-38])
def test_decays_of_channels_may_be_anything_up_to_one(low, rng):
    """Channels that forget all at once beside others that keep everything: products of 64 of them leave float32, and
    none becomes infinite on the way.
    """
    call = with_channels(rng, sequence(rng, 70, 1, 1, 16, 16, "bfloat16"))
    call["g"][:, :, ::3] = low
    call["g"][:, :, 1::3] = 1
    call["g"][[0, 15, 16, 33, 63, 64], :, 2::3] = 0
    check(call)


def test_decays_of_channels_by_chunks_of_equal_keys(rng):
    """Without decays the numbers of both schemes are the same, also where I + A is hard to solve."""
    call = sequence(rng, 64, 1, 1, 16, 16, "bfloat16")
    key = rng.standard_normal(16)
    call["qkv"][:, 16:32] = key / np.linalg.norm(key)
    call["g"][:], call["b"][:] = 1, 1
    spread = call | {"g": np.ones((64, 1, 16), "f4")}
    for name, got, want in zip(("y", "state"), moved(spread, "chunks"), moved(call, "chunks"), strict=True):
        assert_same_bits(name, got, want)


def test_decays_of_channels_cut_at_chunks_equal_the_whole(rng, monkeypatch):
    call = with_channels(rng, sequence(rng, 70, 1, 1, 16, 16, "bfloat16"))
    whole = moved(call, "chunks")
    for name, got, want in zip(("y", "state"), moved(call, "chunks", cuts=(64,)), whole, strict=True):
        assert_same_bits(name, got, want)
    monkeypatch.setattr(_chunk, "CHANNELS_SEGMENT", 64)
    for name, got, want in zip(("y", "state"), moved(call, "chunks"), whole, strict=True):
        assert_same_bits(name, got, want)


def test_gated_delta_net_steps_may_be_cut_anywhere(rng):
    call = sequence(rng, 7, 1, 2, 40, 6)
    check(call, "step", rel=2e-6)
    whole = moved(call, "step")
    for name, got, want in zip(("y", "state"), moved(call, "step", cuts=(1, 4)), whole, strict=True):
        assert_same_bits(name, got, want)


def halved(call: dict) -> tuple[dict, dict]:
    """A call whose state is bfloat16, and the same with those numbers in float32."""
    state = call["state"].astype(numpy_dtype("bfloat16"))
    return call | {"state": state}, call | {"state": state.astype(np.float32)}


@pytest.mark.parametrize(("T", "variant", "dtype"), [(1, "step", "float32"), (70, "chunks", "bfloat16")])
def test_gated_delta_net_rounds_a_bfloat16_state_once(T, variant, dtype, rng):
    """By the recurrence after a token, by chunks after all of them: what float32 gives, rounded to the nearest."""
    half, whole = halved(sequence(rng, T, 1, 2, 20, 12, dtype))
    (y, state), (want, last) = moved(half, variant), moved(whole, variant)
    assert_same_bits("y", y, want)
    assert_same_bits("state", state, last.astype(state.dtype))
    assert state.dtype == numpy_dtype("bfloat16") and not np.array_equal(state.astype(np.float32), last)


def test_gated_delta_net_steps_over_bfloat16_states_may_be_cut_anywhere(rng):
    half, _ = halved(sequence(rng, 7, 1, 2, 40, 6))
    whole = moved(half, "step")
    for name, got, want in zip(("y", "state"), moved(half, "step", cuts=(1, 4)), whole, strict=True):
        assert_same_bits(name, got, want)
    for name, got, want in zip(("y", "state"), whole, defined(half), strict=True):
        assert_close(name, got, want, 2 * EPS["bfloat16"], np.abs(want.astype(np.float64)).max())


def test_gated_delta_net_says_how_wide_a_key_may_be():
    call = sequence(np.random.default_rng(0), 1, 1, 1, 16385, 1)
    with pytest.raises(BackendError, match=r"^gated_delta_net: Dk is 16385, expected at most 16384 on cuda"):
        moved(call)


@pytest.mark.parametrize("variant", [None, "chunks"])
def test_gated_delta_net_of_inactive_rows_is_zero_and_keeps_the_state(variant, rng):
    call = sequence(rng, 4, 1, 2, 20, 6)
    states = normal(rng, 3, 2, 6, 20, scale=0.1)
    for name in ("qkv", "g", "b"):
        call[name][[0, 2]] = np.nan
    y, after = moved(call | {"state": states}, variant, slots=i32(-1, 2, 3, 0))
    assert not y[[0, 2]].any()
    assert_same_bits("state 1", after[1], states[1])
    for row, slot in ((1, 2), (3, 0)):
        one = {name: call[name][row : row + 1] for name in ("qkv", "g", "b")}
        want = defined(call | one | {"state": states[slot]})
        for name, got, value in zip(("y", "state"), (y[row : row + 1], after[slot]), want, strict=True):
            assert_as_defined(name, got, value, 2e-6)


def test_gated_delta_net_rows_do_not_depend_on_how_many_there_are(rng):
    call = sequence(rng, 50, 1, 1, 16, 16, "bfloat16")
    some = call | {name: call[name][:20] for name in ("qkv", "g", "b")}
    with penstock.backend("cuda", deterministic=True):
        y, short = (to_host(ops.gated_delta_net(**{n: to_device(v) for n, v in c.items()})) for c in (call, some))
    assert_same_bits("y", y[:20], short)


# -- a layer's step ----------------------------------------------------------------------------------------------------


def layer(rng: Any, B: int, S: int, Hk: int, Hv: int, Dk: int, Dv: int, dtype: str) -> dict[str, Any]:
    C, W = 2 * Hk * Dk + Hv * Dv, 4
    inputs = {"qkv": (B, C), "z": (B, Hv, Dv), "alpha": (B, Hv), "beta": (B, Hv), "conv_state": (S, W - 1, C)}
    made = {name: normal(rng, *shape, dtype=dtype) for name, shape in inputs.items()}
    made |= {"conv_weight": normal(rng, C, W, dtype=dtype), "A_log": normal(rng, Hv), "dt_bias": normal(rng, Hv)}
    return made | {"norm_weight": normal(rng, Dv), "state": normal(rng, S, Hv, Dv, Dk, scale=0.1)}


def one_by_one(call: dict[str, Any], Hk: int) -> torch.Tensor:
    """The ops that `gated_delta_step` stands for."""
    Hv, Dv, Dk = call["state"].shape[1:]
    y = ops.conv1d_causal(call["qkv"], call["conv_state"], call["conv_weight"], call["slots"])
    ops.conv1d_state_update(call["conv_state"], call["qkv"], call["slots"])
    y = ops.rms_norm_qk(y, Hk, Dk, Hk * Dk)
    g, b = ops.gdn_decay_beta(call["alpha"], call["beta"], call["A_log"], call["dt_bias"])
    d = ops.gated_delta_net(call["state"], y, g, b, Hk, Hv, Dk, Dv, slots=call["slots"])
    return ops.gated_rms_norm(d, call["z"], call["norm_weight"])


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((3, 4, 1, 2, 20, 12), "float32"), ((2, 4, 2, 2, 16, 40), "bfloat16"), ((2, 3, 1, 1, 520, 40), "float16")]
    + [((5, 9, 16, 32, 128, 128), dtype) for dtype in ("float32", "float16", "bfloat16") if GPU],
)
def test_gated_delta_step_equals_its_ops(sizes, dtype, rng):
    """The third: a state that is too large for the registers of a program."""
    B, S, Hk, Hv, Dk, Dv = sizes
    slots = i32(*np.where(np.arange(B) == 1, -1, np.arange(B)[::-1]))
    call = layer(rng, B, S, Hk, Hv, Dk, Dv, dtype) | {"slots": slots}
    call = {name: to_device(value) for name, value in call.items()}
    again = {name: value.clone() for name, value in call.items()}
    with penstock.backend("cuda"):
        want, got = one_by_one(again, Hk), ops.gated_delta_step(**call, Hk=Hk)
    for name, a, b in (("y", got, want), *((name, call[name], again[name]) for name in ("conv_state", "state"))):
        a, b = to_host(a), to_host(b)
        # a normalised k may round the other way, and the state follows it
        assert_close(name, a, b, 0 if name == "conv_state" else 8 * EPS[dtype], np.abs(b.astype(np.float64)).max())
    assert not to_host(got)[1].any()


@pytest.mark.parametrize(
    ("launches", "parts", "warps", "sizes"),
    [(1, 1, 8, (3, 4, 2, 6, 20, 12)), (2, 4, 8, (3, 4, 2, 6, 20, 12)), (1, 4, 4, (2, 3, 1, 2, 40, 33)),
     (1, 2, 2, (4, 4, 3, 3, 32, 16)), (1, 8, 8, (2, 3, 1, 4, 70, 5)), (2, 1, 4, (2, 2, 1, 1, 64, 64))]
    + [(n, parts, warps, (5, 9, 16, 32, 128, 128)) for n in (1, 2) for parts, warps in ((1, 8), (4, 4), (8, 2)) if GPU],
)  # fmt: skip
@pytest.mark.parametrize(("W", "kept"), [(1, "float32"), (2, "bfloat16"), (4, "float32")])
def test_gated_delta_step_in_any_launches_moves_on_step_by_step(
    launches, parts, warps, sizes, W, kept, monkeypatch, rng
):
    """Three steps of rows in turning slots, one of no sequence and one beyond the states, in every arrangement."""
    monkeypatch.setattr(_delta_step, "DELTA_STEP", (DeltaStep(1 << 30, launches, parts, warps, 128, True),))
    B, S, Hk, Hv, Dk, Dv = sizes
    call = layer(rng, B, S, Hk, Hv, Dk, Dv, "float32")
    call["state"] = call["state"].astype(numpy_dtype(kept))
    call |= {"conv_weight": normal(rng, call["qkv"].shape[1], W), "conv_state": call["conv_state"][:, 4 - W :].copy()}
    call = {name: to_device(value) for name, value in call.items()}
    again = {name: value.clone() for name, value in call.items()}
    for step in range(3):
        slots = np.roll(np.arange(S), step)[:B]
        slots[step % B] = (-1, S, -1)[step]
        call["slots"], again["slots"] = to_device(slots.astype(np.int32)), to_device(slots.astype(np.int32))
        with penstock.backend("cuda"):
            got = ops.gated_delta_step(**call, Hk=Hk, out=torch.full_like(call["z"], float("nan")))
            want = one_by_one(again, Hk)
        assert not to_host(got)[step % B].any()
        for name, a, b in (("y", got, want), *((name, call[name], again[name]) for name in ("conv_state", "state"))):
            a, b = to_host(a), to_host(b)
            rel = 0 if name == "conv_state" else 16 * EPS["float32"] if kept == "float32" else 2 * EPS[kept]
            assert_close(name, a, b, rel, max(1, np.abs(b.astype(np.float64)).max(initial=0)))


# -- runs that are kept ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "dtype", "kept"),
    [((1, 2, 20, 12), "float32", "float32"), ((2, 4, 16, 8), "bfloat16", "bfloat16")]
    + [((16, 32, 128, 128), dtype, kept) for dtype, kept in (("bfloat16", "float32"), ("float32", "bfloat16")) if GPU],
)
def test_gated_delta_verify_has_the_bits_of_single_steps(sizes, dtype, kept, rng):
    """Runs of two sequences, of which some tokens are accepted each time, beside all accepted tokens one by one."""
    Hk, Hv, Dk, Dv = sizes
    room, W, S = 5, 4, 3
    steps = [((4, 2), (3, 1)), ((1, 5), (1, 5)), ((3, 3), (1, 2))]
    made = layer(rng, sum(sum(runs) for runs, _ in steps), S, Hk, Hv, Dk, Dv, dtype)
    more = normal(rng, S, room, made["qkv"].shape[1], dtype=dtype)
    made["conv_state"] = np.concatenate([made["conv_state"], more], axis=1)
    made["state"] = made["state"].astype(numpy_dtype(kept))
    rows = {name: to_device(made.pop(name)) for name in ("qkv", "z", "alpha", "beta")}
    call = {name: to_device(value) for name, value in made.items()} | {"Hk": Hk}
    single = {name: value.clone() if name in ("conv_state", "state") else value for name, value in call.items()}
    gates, slots = to_device(np.zeros((S, room, 2, Hv), np.float32)), to_device(i32(2, 0))
    first, accepted = 0, (0, 0)
    with penstock.backend("cuda", deterministic=True):
        for runs, taken in steps:
            own = {name: value[first : first + sum(runs)].contiguous() for name, value in rows.items()}
            starts = to_device(np.cumsum([0, *runs], dtype=np.int32))
            kept_runs = {"starts": starts, "keep": to_device(i32(*runs)), "accepted": to_device(i32(*accepted))}
            got = to_host(ops.gated_delta_verify(**own, **call, gates=gates, slots=slots, **kept_runs))
            for b, count in enumerate(taken):
                for t in range(count):
                    at = sum(runs[:b]) + t
                    one = {name: value[at : at + 1].contiguous() for name, value in own.items()}
                    want = ops.gated_delta_step(**one, **single, slots=slots[b : b + 1].contiguous())
                    assert_same_bits("y", got[at], to_host(want)[0])
            first, accepted = first + sum(runs), taken
        ops.delta_commit(
            call["conv_state"], call["state"], gates, slots, to_device(i32(*accepted)), call["conv_weight"], Hk
        )
    assert_same_bits("conv_state", to_host(call["conv_state"])[:, : W - 1], to_host(single["conv_state"])[:, : W - 1])
    assert_same_bits("state", to_host(call["state"]), to_host(single["state"]))


# -- on a GPU ----------------------------------------------------------------------------------------------------------

MODEL = {"Hk": 16, "Hv": 32, "Dk": 128, "Dv": 128}


def long_call(T: int, dtype: torch.dtype, low: float, seed: int = 0) -> dict:
    """Unit keys, queries of length 1 / sqrt(Dk), as the model has them, made on the device."""
    made = torch.Generator(DEVICE).manual_seed(seed)
    qkv = torch.randn(T, 8192, device=DEVICE, generator=made)
    heads = qkv[:, :4096].view(T, 32, 128)
    heads /= heads.norm(dim=-1, keepdim=True)
    qkv[:, :2048] *= 128**-0.5
    g, b = (torch.rand(T, 32, device=DEVICE, generator=made) for _ in range(2))
    state = 0.1 * torch.randn(32, 128, 128, device=DEVICE, generator=made)
    return {"state": state, "qkv": qkv.to(dtype), "g": low + (1 - low) * g, "b": b, **MODEL}


def on_gpu(call: dict, method: str) -> tuple[torch.Tensor, torch.Tensor]:
    state = call["state"].clone()
    return ops.gated_delta_net(**(call | {"state": state, "method": method})), state


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("T", "low"), [(4096, 0.9), (4159, 0.0), (100_000, 0.9999)])
def test_gated_delta_net_chunks_equal_steps(T, low, dtype):
    """Also over 100 000 tokens whose decays hardly forget: an error in the carried state would pile up."""
    call = long_call(T, dtype, low)
    call["g"][100:103] = 0
    (y, state), (want, last) = on_gpu(call, "chunkwise"), on_gpu(call, "sequential")
    assert float((state - last).abs().max() / last.abs().max()) <= 4e-5
    eps = {torch.float16: 2 * EPS["float16"], torch.bfloat16: 2 * EPS["bfloat16"]}[dtype]
    assert float((y.double() - want.double()).abs().max() / want.double().abs().max()) <= eps + 4e-5


@pytest.mark.cuda
def test_gated_delta_net_repeats_its_bits_and_writes_everything(poisoned_scratch):
    call = long_call(3000, torch.bfloat16, 0.9)
    want, last = on_gpu(call, "auto")
    for _ in range(20):
        state = call["state"].clone()
        y = ops.gated_delta_net(**(call | {"state": state}), out=torch.full_like(want, float("nan")))
        assert torch.equal(y, want) and torch.equal(state, last)


@pytest.mark.cuda
def test_gated_delta_net_of_many_sequences_equals_one_by_one():
    B, S = 300, 310
    call, slots = long_call(B, torch.bfloat16, 0.5), torch.randperm(S, device=DEVICE)[:B].int()
    states = 0.1 * torch.randn(S, 32, 128, 128, device=DEVICE)
    before = states.clone()
    y = ops.gated_delta_net(**(call | {"state": states}), slots=slots)
    for row in range(0, B, 37):
        alone, one = before.clone(), {name: call[name][row : row + 1] for name in ("qkv", "g", "b")}
        got = ops.gated_delta_net(**(call | one | {"state": alone}), slots=slots[row : row + 1])[0]
        assert torch.equal(got, y[row]) and torch.equal(alone[slots[row]], states[slots[row]])
        state = before[slots[row]].clone()
        ops.gated_delta_net(**(call | one | {"state": state, "method": "step"}))
        assert float((state - alone[slots[row]]).abs().max() / state.abs().max()) <= 2e-6
    rest = torch.ones(S, dtype=torch.bool, device=DEVICE)
    rest[slots.long()] = False
    assert torch.equal(states[rest], before[rest])


@pytest.mark.cuda
def test_delta_ops_replay_from_a_graph_with_other_slots():
    B, S, C = 4, 6, 8192
    call = long_call(B, torch.bfloat16, 0.5) | {"state": 0.1 * torch.randn(S, 32, 128, 128, device=DEVICE)}
    rows = torch.randn(S, 3, C, device=DEVICE).bfloat16()
    weight, slots = torch.randn(C, 4, device=DEVICE).bfloat16(), torch.arange(B, device=DEVICE).int()

    def step(state: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = ops.conv1d_causal(call["qkv"], rows, weight, slots)
        ops.conv1d_state_update(rows, call["qkv"], slots)
        return x, ops.gated_delta_net(**(call | {"state": state}), slots=slots)

    step(call["state"].clone(), rows.clone())
    state, kept = call["state"].clone(), rows.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(state, kept)
    slots.copy_(torch.tensor([5, -1, 2, 9], device=DEVICE))
    graph.replay()
    want_state, want_rows = call["state"].clone(), rows.clone()
    for got, want in zip((*captured, state, kept), (*step(want_state, want_rows), want_state, want_rows), strict=True):
        assert torch.equal(got, want)


@pytest.mark.cuda
def test_conv1d_of_a_long_sequence_matches_torch():
    T, C = 100_000, 1030
    x, state = torch.randn(T, C, device=DEVICE).bfloat16(), torch.randn(3, C, device=DEVICE)
    weight = torch.randn(C, 4, device=DEVICE)
    sequence = torch.cat([state, x.float()]).T[None]
    want = torch.nn.functional.silu(torch.nn.functional.conv1d(sequence, weight[:, None], groups=C))[0].T
    got = ops.conv1d_causal(x, state, weight, out=torch.full_like(x, float("nan")))
    assert float(((got.float() - want).abs() / (want.abs() + 1)).max()) <= 2 * EPS["bfloat16"]
    assert torch.equal(ops.conv1d_causal(x[:50].contiguous(), state, weight), got[:50])  # by smaller tiles


if not GPU:  # the method and chunk arguments reach the kernels

    def test_gated_delta_net_methods_choose_the_arrangement(rng, monkeypatch):
        used: list[str] = []
        monkeypatch.setattr(delta, "delta_chunks", lambda *a: used.append("chunks"))
        monkeypatch.setattr(delta, "recur", lambda *a: used.append("step"))
        call = sequence(rng, 20, 1, 1, 16, 16, "bfloat16")
        for method in ("auto", "step", "sequential", "chunkwise"):
            moved(call, method=method, chunk=7)
        moved(call | {name: call[name][:1] for name in ("qkv", "g", "b")})
        moved(sequence(rng, 20, 1, 1, 200, 16, "bfloat16"), method="chunkwise")  # keys too wide for the chunks
        moved(sequence(rng, 20, 1, 1, 16, 16), method="chunkwise")
        moved(with_channels(rng, call))
        assert used == ["chunks", "step", "step", "chunks", "step", "step", "step", "chunks"]


@pytest.mark.cuda
def test_gated_delta_step_replays_with_other_slots_and_repeats_its_bits():
    B, S, Hk, Hv, D = 4, 6, 16, 32, 128
    rng = np.random.default_rng(1)
    start = {name: to_device(value) for name, value in layer(rng, B, S, Hk, Hv, D, D, "bfloat16").items()}
    start["slots"] = to_device(i32(0, 1, 2, 3))
    call = {name: value.clone() for name, value in start.items()}
    out = torch.empty_like(call["z"])
    ops.gated_delta_step(**call, Hk=Hk, out=out)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.gated_delta_step(**call, Hk=Hk, out=out)
    for slots in ((0, 1, 2, 3), (5, -1, 0, 2), (0, 1, 2, 3)):
        want = {name: value.clone() for name, value in start.items()} | {"slots": to_device(i32(*slots))}
        for name, value in want.items():
            call[name].copy_(value)
        graph.replay()
        y = ops.gated_delta_step(**want, Hk=Hk)
        assert torch.equal(y, out)
        assert all(torch.equal(call[name], want[name]) for name in ("conv_state", "state"))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "arrangement", [(1, 1, 8, 128, True), (1, 4, 4, 128, False), (1, 8, 2, 128, True), (2, 4, 4, 128, False)]
)
def test_gated_delta_step_of_many_rows_moves_the_kept_rows_on_exactly(arrangement, monkeypatch):
    """Programs of a key head read the same rows, one of them moves them on: a race would mix rows of two steps."""
    monkeypatch.setattr(_delta_step, "DELTA_STEP", (DeltaStep(1 << 30, *arrangement),))
    B, S, Hk, Hv, D, W = 256, 260, 16, 32, 128, 4
    C = 2 * Hk * D + Hv * D
    made = torch.Generator(DEVICE).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, generator=made)

    call = {"conv_state": drawn(S, W - 1, C).bfloat16(), "state": 0.1 * drawn(S, Hv, D, D)}
    call |= {"conv_weight": drawn(C, W).bfloat16(), "A_log": drawn(Hv), "dt_bias": drawn(Hv), "norm_weight": drawn(D)}
    call["slots"] = torch.randperm(S, device=DEVICE)[:B].int()
    again = call | {name: call[name].clone() for name in ("conv_state", "state")}
    for _ in range(12):
        rows = {"qkv": drawn(B, C), "z": drawn(B, Hv, D), "alpha": drawn(B, Hv), "beta": drawn(B, Hv)}
        rows = {name: value.bfloat16() for name, value in rows.items()}
        got, want = ops.gated_delta_step(**call, **rows, Hk=Hk), one_by_one(again | rows, Hk)
        assert torch.equal(call["conv_state"], again["conv_state"])
        assert float((got.double() - want.double()).norm() / want.double().norm()) <= 8e-3
