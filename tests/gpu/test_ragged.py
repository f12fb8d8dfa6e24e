"""CUDA kernels of ragged calls against the definition, and a run among others against the same run alone."""

import itertools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import penstock
from penstock import ops
from penstock.backends.cuda import _attend, _chunk
from penstock.ops.ragged import runs
from tests.gpu.common import GPU, to_device, to_host
from tests.ops.common import quantized
from tests.ops.test_ragged import numbers, same, unset

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
# of the largest number of the result: one bit of bfloat16; of states that chunks of bfloat16 rows have moved on
CLOSE, STATES = {np.float32: 4e-6, ml_dtypes.bfloat16: 2.0**-7}, 2e-5
PAGE = 32
combined = _attend._combined


@pytest.fixture(params=DTYPES.values(), ids=DTYPES)
def dtype(request):
    return request.param


@dataclass(frozen=True)
class Mix:
    """Runs of several sequences, what each had before, and rows of no sequence behind them."""

    runs: tuple[int, ...]
    before: tuple[int, ...]
    rest: int = 3

    @property
    def T(self) -> int:
        return sum(self.runs) + self.rest

    @property
    def starts(self) -> np.ndarray:
        return np.array([0, *itertools.accumulate(self.runs)], np.int32)

    @property
    def sequence(self) -> np.ndarray:
        return np.array([b for b, n in enumerate(self.runs) for _ in range(n)] + [-1] * self.rest, np.int32)

    @property
    def positions(self) -> np.ndarray:
        rows = (range(have, have + n) for n, have in zip(self.runs, self.before, strict=True))
        return np.array([*itertools.chain(*rows), *[0] * self.rest], np.int32)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([have + n for n, have in zip(self.runs, self.before, strict=True)], np.int32)

    def table(self, rng: np.random.Generator) -> np.ndarray:
        """A block table in which no page stands twice, with −1 behind the pages of each sequence."""
        entries = -(-int(self.lengths.max(initial=1)) // PAGE) + 1
        table = rng.permutation(len(self.runs) * entries).reshape(len(self.runs), entries).astype(np.int32)
        table[np.arange(entries) >= -(-self.lengths[:, None] // PAGE)] = -1
        return table

    def pages(self, table: np.ndarray) -> int:
        return table.shape[0] * table.shape[1]


LONG = Mix((1, 0, 21, 1, 5, 70), (40, 7, 3, 0, 61, 33))
BEHIND = Mix((3, 1), (5, 130), 1)
MIXES = {
    "mixed": Mix((1, 0, 21, 1, 5), (40, 7, 3, 0, 61)),
    "verified": Mix((4, 2), (31, 60), 1),
    "nothing": Mix((0, 0), (3, 0), 2),
}
if GPU:  # too long for the interpreter
    MIXES |= {
        "long": LONG,
        "answers": Mix((1, 1, 1, 1), (0, 33, 5, 70), 0),
        "behind": BEHIND,
        "one": Mix((1,), (64,), 0),
    }


@pytest.fixture(params=MIXES.values(), ids=MIXES)
def mix(request) -> Mix:
    return request.param


@pytest.fixture(params=[Mix((1, 0, 9, 2), (40, 7, 60, 0), 2), MIXES["nothing"]], ids=["few", "nothing"])
def few(request) -> Mix:
    return request.param


def close(got: np.ndarray, want: np.ndarray, bound: float | None = None) -> None:
    bound = CLOSE[got.dtype.type] if bound is None else bound
    got, want = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=bound * max(1.0, float(np.nanmax(np.abs(want), initial=0))))


def called(op: Any, writes: tuple[str, ...] = (), out: Any = None, **arguments: Any) -> tuple[Any, ...]:
    """What an op gives on CUDA, and what it leaves in the arrays that it writes, which are copied before."""
    tensors = {name: to_device(value.copy() if name in writes else value) for name, value in arguments.items()}
    with penstock.backend("cuda"):
        result = op(**tensors, **({} if out is None else {"out": to_device(out)}))
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    return *map(to_host, results), *(to_host(tensors[name]) for name in writes)


def defined(op: Any, writes: tuple[str, ...] = (), **arguments: Any) -> tuple[Any, ...]:
    """The same of the definition."""
    copied = {name: value.copy() if name in writes else value for name, value in arguments.items()}
    with penstock.backend("reference"):
        result = op(**copied)
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    return *results, *(copied[name] for name in writes)


# -- caches ----------------------------------------------------------------------------------------------------------


def test_kv_pages_append_writes_the_rows_of_every_sequence(few, dtype, rng):
    table = few.table(rng)
    k_pages, v_pages = (unset((few.pages(table), PAGE, width), dtype) for width in (10, 6))
    call = {"k_src": numbers(rng, dtype, few.T, 10), "v_src": numbers(rng, dtype, few.T, 6)}
    call |= {"k_pages": k_pages, "v_pages": v_pages, "block_table": table}
    call |= {"positions": few.positions, "sequence": few.sequence}
    writes = ("k_pages", "v_pages")
    for got, want in zip(
        called(ops.kv_pages_append, writes, **call), defined(ops.kv_pages_append, writes, **call), strict=True
    ):
        same(got, want)


def test_mla_cache_append_writes_the_rows_of_every_sequence(few, dtype, rng):
    table = few.table(rng)
    latents, ropes = (unset((few.pages(table), PAGE, width), dtype) for width in (12, 4))
    call = {"kv_lat": numbers(rng, dtype, few.T, 12), "k_pe": numbers(rng, dtype, few.T, 4)}
    call |= {"latent_cache": latents, "rope_k_cache": ropes, "block_table": table}
    call |= {"pos": few.positions, "sequence": few.sequence}
    writes = ("latent_cache", "rope_k_cache")
    for got, want in zip(
        called(ops.mla_cache_append, writes, **call), defined(ops.mla_cache_append, writes, **call), strict=True
    ):
        same(got, want)


@pytest.mark.parametrize("gated", [False, True])
def test_attention_prepare_is_that_of_the_definition(few, gated, dtype, rng):
    H, Hkv, D = 4, 2, 8
    table = few.table(rng)
    key_pages, value_pages = (unset((few.pages(table), PAGE, Hkv * D), dtype) for _ in range(2))
    call = {"q": numbers(rng, dtype, few.T, H * D * (2 if gated else 1)), "k": numbers(rng, dtype, few.T, Hkv * D)}
    call |= {
        "v": numbers(rng, dtype, few.T, Hkv * D),
        "q_norm": numbers(rng, dtype, D),
        "k_norm": numbers(rng, dtype, D),
    }
    call |= {"inv_freq": (100.0 ** -np.linspace(0, 1, D // 2)).astype(np.float32), "positions": few.positions}
    call |= {"key_pages": key_pages, "value_pages": value_pages, "block_table": table, "H": H, "gated": gated}
    call |= {"sequence": few.sequence}
    writes = ("key_pages", "value_pages")
    want = [part for part in defined(ops.attention_prepare, writes, **call) if part is not None]
    got = [part for part in called(ops.attention_prepare, writes, **call) if part is not None]
    for one, expected in zip(got, want, strict=True):
        close(one, expected)


def test_mla_prepare_is_that_of_the_definition(few, dtype, rng):
    H, R, nope, rope = 5, 12, 6, 4
    table = few.table(rng)
    latents, ropes = (unset((few.pages(table), PAGE, width), dtype) for width in (R, rope))
    call = {"q": numbers(rng, dtype, few.T, H * (nope + rope)), "kv": numbers(rng, dtype, few.T, R + rope)}
    call |= {"kv_norm": numbers(rng, dtype, R), "inv_freq": np.array([1, 0.1], np.float32), "positions": few.positions}
    call |= {"latent_pages": latents, "rope_pages": ropes, "block_table": table, "H": H, "nope": nope}
    call |= {"sequence": few.sequence}
    writes = ("latent_pages", "rope_pages")
    for one, expected in zip(
        called(ops.mla_prepare, writes, **call), defined(ops.mla_prepare, writes, **call), strict=True
    ):
        close(one, expected)


# -- attention -------------------------------------------------------------------------------------------------------


def paged(rng: np.random.Generator, mix: Mix, dtype: Any, H: int, Hkv: int, D: int, Dv: int) -> dict[str, Any]:
    """Arguments of attention_paged; what no row may see is NaN."""
    table = mix.table(rng)
    pages = {"k_pages": unset((mix.pages(table), PAGE, Hkv * D), dtype)}
    pages["v_pages"] = unset((mix.pages(table), PAGE, Hkv * Dv), dtype)
    for b, length in enumerate(mix.lengths):
        p = np.arange(length)
        for array in pages.values():
            array[table[b, p // PAGE], p % PAGE] = numbers(rng, dtype, length, array.shape[2])
    call = {"q": numbers(rng, dtype, mix.T, H, D), **pages, "block_table": table, "lengths": mix.lengths}
    return call | {"scale": 0.3, "starts": mix.starts}


@pytest.mark.parametrize(("window", "gated"), [(None, True), (6, False), (70, True)])
def test_attention_paged_of_runs(mix, dtype, window, gated, rng):
    call = paged(rng, mix, dtype, 6, 2, 8, 10) | {"window": window}
    call["gate"] = numbers(rng, dtype, mix.T, 6, 10) if gated else None
    (got,) = called(ops.attention_paged, out=unset((mix.T, 6, 10), dtype), **call)
    close(got, *defined(ops.attention_paged, **call))
    same(got[mix.starts[-1] :], np.zeros((mix.rest, 6, 10)))


@pytest.mark.parametrize(("H", "Hkv", "D", "Dv"), [(3, 3, 20, 20), (1, 1, 192, 128), (2, 1, 512, 512)])
def test_attention_paged_of_runs_of_other_heads(H, Hkv, D, Dv, dtype, rng):
    mix = Mix((1, 3, 0, 33), (5, 31, 3, 40), 2)
    call = paged(rng, mix, dtype, H, Hkv, D, Dv) | {"scale": -0.02}
    (got,) = called(ops.attention_paged, out=unset((mix.T, H, Dv), dtype), **call)
    close(got, *defined(ops.attention_paged, **call))


def test_attention_paged_of_an_answer_is_split(dtype, rng, monkeypatch):
    """Few answers over many positions, in rows that are not those of their sequences."""
    mix, merged = BEHIND, []
    call = paged(rng, mix, dtype, 3, 1, 8, 10) | {"gate": numbers(rng, dtype, mix.T, 3, 10)}
    monkeypatch.setattr(_attend, "_combined", lambda *sizes: merged.append(sizes) or combined(*sizes))
    (got,) = called(ops.attention_paged, out=unset((mix.T, 3, 10), dtype), **call)
    close(got, *defined(ops.attention_paged, **call))
    assert GPU or merged[0][0] > 1


def alone(mix: Mix, b: int) -> tuple[slice, np.ndarray]:
    """The rows of a sequence, and the starts of its run by itself."""
    low, high = mix.starts[b : b + 2]
    return slice(low, high), np.array([0, high - low], np.int32)


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_paged_of_a_prompt_run_does_not_depend_on_the_others(deterministic, rng):
    """Runs as short as those of answers are cut into parts as those are, by the number of sequences, unless bits are
    not to depend on it.
    """
    mix, dtype = LONG, ml_dtypes.bfloat16
    call = paged(rng, mix, dtype, 6, 2, 8, 10)
    with penstock.backend("cuda", deterministic=deterministic):
        (got,) = called(ops.attention_paged, **call)
        for b in (2, 5, *((0, 3, 4) if deterministic else ())):
            own, starts = alone(mix, b)
            one = call | {"q": call["q"][own], "starts": starts}
            one |= {name: call[name][b : b + 1] for name in ("block_table", "lengths")}
            same(*called(ops.attention_paged, **one), got[own])


# -- latent attention ------------------------------------------------------------------------------------------------


def latents(rng: np.random.Generator, mix: Mix, dtype: Any, R: int, rope: int) -> dict[str, Any]:
    """Caches and where the rows are; what no row may see is NaN."""
    table = mix.table(rng)
    caches = {"latent_cache": unset((mix.pages(table), PAGE, R), dtype)}
    caches["rope_k_cache"] = unset((mix.pages(table), PAGE, rope), dtype)
    for b, length in enumerate(mix.lengths):
        p = np.arange(length)
        for array in caches.values():
            array[table[b, p // PAGE], p % PAGE] = numbers(rng, dtype, length, array.shape[2])
    return {**caches, "block_table": table, "starts": mix.starts, "softmax_scale": 0.2}


@pytest.mark.parametrize(
    ("longest", "up_to", "dtype"),
    [(None, None, np.float32), (4, None, ml_dtypes.bfloat16), (4, 100, np.float32), (0, 64, ml_dtypes.bfloat16)],
)
def test_mla_sdpa_of_runs(mix, longest, up_to, dtype, rng):
    H, R, rope = 5, 24, 6
    call = latents(rng, mix, dtype, R, rope) | {"cache_len": mix.lengths, "longest": longest, "up_to": up_to}
    call |= {"q_prime": numbers(rng, dtype, mix.T, H, R), "q_pe": numbers(rng, dtype, mix.T, H, rope)}
    (got,) = called(ops.mla_sdpa, out=unset((mix.T, H, R), dtype), **call)
    close(got, *defined(ops.mla_sdpa, **call))
    same(got[mix.starts[-1] :], np.zeros((mix.rest, H, R)))


@pytest.mark.parametrize(
    ("longer_than", "up_to", "dtype"),
    [(0, None, ml_dtypes.bfloat16), (4, None, np.float32), (4, 100, ml_dtypes.bfloat16), (200, None, np.float32)],
)
def test_mla_prefill_of_runs(mix, longer_than, up_to, dtype, rng):
    H, R, rope, nope, width = 3, 32, 6, 20, 12
    call = latents(rng, mix, dtype, R, rope) | {"start": mix.positions, "longer_than": longer_than, "up_to": up_to}
    call |= {"q_nope": numbers(rng, dtype, mix.T, H, nope), "q_pe": numbers(rng, dtype, mix.T, H, rope)}
    call["kv_b"] = numbers(rng, dtype, H * (nope + width), R) * np.array(0.2, dtype)
    (got,) = called(ops.mla_prefill, out=unset((mix.T, H, width), dtype), **call)
    close(got, *defined(ops.mla_prefill, **call))
    same(got[mix.starts[-1] :], np.zeros((mix.rest, H, width)))


@pytest.mark.parametrize("paired", [False, True])
def test_mla_prefill_of_runs_with_quantized_weights(paired, dtype, rng):
    mix, (H, R, rope, nope, width) = Mix((1, 37, 0, 40), (3, 300, 5, 10), 2), (2, 64, 6, 32, 12)
    call = latents(rng, mix, dtype, R, rope) | {"start": mix.positions, "longer_than": 4}
    call |= {"q_nope": numbers(rng, dtype, mix.T, H, nope), "q_pe": numbers(rng, dtype, mix.T, H, rope)}
    if paired:
        call |= {"kv_b": quantized(rng, H, R, nope), "unembed_out": quantized(rng, H, width, R)}
    else:
        call["kv_b"] = quantized(rng, H * (nope + width), R)
    (got,) = called(ops.mla_prefill, out=unset((mix.T, H, width), dtype), **call)
    close(got, *defined(ops.mla_prefill, **call))


def test_latent_attention_of_a_prompt_run_does_not_depend_on_the_others(rng):
    mix, dtype, (H, R, rope, nope, width) = LONG, ml_dtypes.bfloat16, (3, 32, 6, 20, 12)
    caches = latents(rng, mix, dtype, R, rope)
    rows = {"q_prime": numbers(rng, dtype, mix.T, H, R), "q_pe": numbers(rng, dtype, mix.T, H, rope)}
    rows |= {"q_nope": numbers(rng, dtype, mix.T, H, nope), "start": mix.positions}
    kv_b = numbers(rng, dtype, H * (nope + width), R)

    def both(rows, caches, lengths):
        q_pe, start = rows["q_pe"], rows["start"]
        latent = {"q_prime": rows["q_prime"], "q_pe": q_pe, "cache_len": lengths, **caches}
        expanded = {"q_nope": rows["q_nope"], "q_pe": q_pe, "start": start, "kv_b": kv_b, "longer_than": 4, **caches}
        return *called(ops.mla_sdpa, **latent), *called(ops.mla_prefill, **expanded)

    got = both(rows, caches, mix.lengths)
    for b in (2, 4, 5):
        own, starts = alone(mix, b)
        one = caches | {"starts": starts, "block_table": caches["block_table"][b : b + 1]}
        found = both({name: array[own] for name, array in rows.items()}, one, mix.lengths[b : b + 1])
        for part, whole in zip(found, got, strict=True):
            same(part, whole[own])


# -- delta rule ------------------------------------------------------------------------------------------------------

Hk, Hv, Dk, Dv, W, K = 1, 2, 16, 12, 4, 6
C = 2 * Hk * Dk + Hv * Dv
SLOTS = 9


def linear_layer(rng: np.random.Generator, mix: Mix, dtype: Any) -> dict[str, Any]:
    """Projections, weights and states of a linear-attention layer; a sequence of the mix is left out if it has four."""
    slots = rng.permutation(SLOTS)[: len(mix.runs)].astype(np.int32)
    slots[3:4] = -1
    qkv = numbers(rng, np.float32, mix.T, C) * Dk**-0.5
    gates = {name: rng.uniform(0.5, 1, (mix.T, Hv)).astype(np.float32) for name in ("g", "b")}
    call = {"state": numbers(rng, np.float32, SLOTS, Hv, Dv, Dk), "qkv": qkv.astype(dtype), **gates}
    return call | {"Hk": Hk, "Hv": Hv, "Dk": Dk, "Dv": Dv, "slots": slots, "starts": mix.starts}


def keep_some(mix: Mix) -> np.ndarray:
    """Runs of up to K rows are kept, but for the first."""
    return np.array([n if b and n <= K else 0 for b, n in enumerate(mix.runs)], np.int32)


@pytest.mark.parametrize("kept", [False, True])
def test_conv1d_of_runs(mix, dtype, kept, rng):
    slots = linear_layer(rng, mix, dtype)["slots"]
    x, weight = numbers(rng, dtype, mix.T, 37), numbers(rng, dtype, 37, W)
    state = numbers(rng, dtype, SLOTS, W - 1 + (K if kept else 0), 37)
    call = {"x": x, "state": state, "slots": slots, "starts": mix.starts}
    (got,) = called(ops.conv1d_causal, out=unset(x.shape, dtype), weight=weight, **call)
    close(got, *defined(ops.conv1d_causal, weight=weight, **call))
    same(got[mix.starts[-1] :], np.zeros((mix.rest, 37)))
    more = {"keep": keep_some(mix), "width": W} if kept else {}
    (moved,) = called(ops.conv1d_state_update, ("state",), **call, **more)
    same(moved, *defined(ops.conv1d_state_update, ("state",), **call, **more))


@pytest.mark.parametrize(
    "mix",
    [
        Mix((1, 0, 37, 2, 3, 0, 0, 62, 5, 0), (0,) * 10, 7),  # they begin at any place of four and of a program
        Mix((0, 64), (0,) * 2, 0),
        Mix((2, 1, 1), (0,) * 3, 90),  # whole programs of rows of no sequence
    ],
    ids=["many", "one", "rest"],
)
@pytest.mark.parametrize("absent", [(), (0, 3, 7)], ids=["present", "absent"])
def test_conv1d_of_long_runs(mix, absent, dtype, rng):
    """Rows go down their channels, which are no multiple of a program's; rows of a run without a slot are 0."""
    channels, B = 517, len(mix.runs)
    slots = rng.permutation(B + 2)[:B].astype(np.int32)
    slots[[b for b in absent if b < B]] = -1
    x, weight = numbers(rng, dtype, mix.T, channels), numbers(rng, dtype, channels, W)
    state = unset((B + 2, W + 1, channels), dtype)
    state[slots[slots >= 0], : W - 1] = numbers(rng, dtype, (slots >= 0).sum(), W - 1, channels)
    call = {"x": x, "state": state, "weight": weight, "slots": slots, "starts": mix.starts}
    (got,) = called(ops.conv1d_causal, out=unset(x.shape, dtype), **call)
    close(got, *defined(ops.conv1d_causal, **call))
    here = np.append(slots, -1)[mix.sequence] >= 0
    assert got[here].any(axis=1).all() and not got[~here].any()
    for heads, dim in ((5, 32), (2, 128), (1, 96)):  # they end within a program, with it; 96 do not divide it
        (unit,) = called(ops.conv1d_causal, out=unset(x.shape, dtype), **call, key_heads=heads, key_dim=dim)
        close(unit, *defined(ops.conv1d_causal, **call, key_heads=heads, key_dim=dim))
        same(unit[:, 2 * heads * dim :], got[:, 2 * heads * dim :])


@pytest.mark.parametrize("kept", [False, True])
def test_gated_delta_net_of_runs(mix, dtype, kept, rng):
    call, writes = linear_layer(rng, mix, dtype), ("state",)
    if kept:
        call |= {"keep": keep_some(mix), "gates": unset((SLOTS, K, 2, Hv), np.float32)}
        writes = ("state", "gates")
    got = called(ops.gated_delta_net, writes, out=unset((mix.T, Hv, Dv), dtype), **call)
    for one, want in zip(got, defined(ops.gated_delta_net, writes, **call), strict=True):
        close(one, want, STATES if one.dtype == np.float32 else None)
    same(got[0][mix.starts[-1] :], np.zeros((mix.rest, Hv, Dv)))


def test_gated_delta_net_of_runs_over_bfloat16_states(mix, rng):
    """Runs by steps are rounded after every token, those by chunks once, so that they differ by a rounding or two."""
    call = linear_layer(rng, mix, ml_dtypes.bfloat16)
    call |= {"state": call["state"].astype(ml_dtypes.bfloat16), "keep": keep_some(mix)}
    call |= {"gates": unset((SLOTS, K, 2, Hv), np.float32)}
    writes = ("state", "gates")
    got = called(ops.gated_delta_net, writes, out=unset((mix.T, Hv, Dv), ml_dtypes.bfloat16), **call)
    for one, want in zip(got, defined(ops.gated_delta_net, writes, **call), strict=True):
        close(one, want, 2**-6 if one.dtype != np.float32 else STATES)
    still = [slot for slot in range(SLOTS) if slot not in call["slots"][call["keep"] == 0]]
    same(got[1][still], call["state"][still])


@pytest.mark.parametrize("method", ["step", "chunkwise"])
def test_gated_delta_net_of_runs_by_one_method(method, rng):
    mix, dtype = Mix((1, 67, 0, 2, 20), (0,) * 5, 2), ml_dtypes.bfloat16
    call = linear_layer(rng, mix, dtype) | {"method": method}
    got = called(ops.gated_delta_net, ("state",), out=unset((mix.T, Hv, Dv), dtype), **call)
    for one, want in zip(got, defined(ops.gated_delta_net, ("state",), **call), strict=True):
        close(one, want, STATES if one.dtype == np.float32 else None)


def test_gated_delta_net_of_runs_prepares_some_chunks_at_a_time(monkeypatch, rng):
    mix, dtype = Mix((70, 1, 200, 20), (0,) * 4, 1), ml_dtypes.bfloat16
    call = linear_layer(rng, mix, dtype) | {"slots": np.array([3, 0, 8, 1], np.int32)}
    want = called(ops.gated_delta_net, ("state",), **call)
    monkeypatch.setattr(_chunk, "CHUNKS", 3)
    for one, expected in zip(called(ops.gated_delta_net, ("state",), **call), want, strict=True):
        same(one, expected)


def of_channels(rng, call, low=0.5):
    """A layer whose key channels have decays of their own."""
    return call | {"g": rng.uniform(low, 1, (*call["g"].shape, Dk)).astype(np.float32)}


@pytest.mark.parametrize("kept", [False, True], ids=["moved", "kept"])
def test_decays_of_channels_of_runs(mix, kept, rng):
    """Short and kept runs by steps, the others by chunks, each from its own state."""
    dtype, writes = ml_dtypes.bfloat16, ("state",)
    call = of_channels(rng, linear_layer(rng, mix, dtype))
    if kept:
        call |= {"keep": keep_some(mix), "gates": unset((SLOTS, K, Dk + 1, Hv), np.float32)}
        writes = ("state", "gates")
    got = called(ops.gated_delta_net, writes, out=unset((mix.T, Hv, Dv), dtype), **call)
    for one, want in zip(got, defined(ops.gated_delta_net, writes, **call), strict=True):
        close(one, want, STATES if one.dtype == np.float32 else None)
    same(got[0][mix.starts[-1] :], np.zeros((mix.rest, Hv, Dv)))


def test_decays_of_channels_of_runs_prepare_some_chunks_at_a_time(monkeypatch, rng):
    mix, dtype = Mix((70, 1, 140, 20), (0,) * 4, 1), ml_dtypes.bfloat16
    call = of_channels(rng, linear_layer(rng, mix, dtype)) | {"slots": np.array([3, 0, 8, 1], np.int32)}
    want = called(ops.gated_delta_net, ("state",), **call)
    monkeypatch.setattr(_chunk, "CHANNELS_CHUNKS", 3)
    for one, expected in zip(called(ops.gated_delta_net, ("state",), **call), want, strict=True):
        same(one, expected)


def test_gated_delta_net_of_a_run_does_not_depend_on_the_others(dtype, rng):
    mix = LONG
    call = linear_layer(rng, mix, dtype)
    got, state = called(ops.gated_delta_net, ("state",), **call)
    for b, _, _ in runs(mix.starts):
        own, starts = alone(mix, b)
        one = call | {name: call[name][own] for name in ("qkv", "g", "b")}
        one |= {"slots": call["slots"][b : b + 1], "starts": starts}
        y, moved = called(ops.gated_delta_net, ("state",), **one)
        same(y, got[own])
        if call["slots"][b] >= 0:
            same(moved[call["slots"][b]], state[call["slots"][b]])


@pytest.mark.parametrize(("accepted", "held"), [(0, "f4"), (1, "f4"), (2, "f4"), (3, "f4"), (3, ml_dtypes.bfloat16)])
def test_a_kept_run_is_committed_as_far_as_it_was_accepted(accepted, held, dtype, rng):
    """A state does not depend on whether its tokens were kept and committed or moved it on one by one.

    On a GPU but for a rounding: there products and sums of the two kernels are joined differently.
    """
    x, weight = numbers(rng, dtype, 9, C), numbers(rng, dtype, C, W)
    g, b = (rng.uniform(0.5, 1, (9, Hv)).astype(np.float32) for _ in range(2))
    tensors = (x, weight, g, b, numbers(rng, dtype, SLOTS, W - 1 + K, C), numbers(rng, held, SLOTS, Hv, Dv, Dk))
    x, weight, g, b, conv, state = map(to_device, tensors)
    gates = to_device(unset((SLOTS, K, 2, Hv), np.float32))
    one_by_one = conv.clone(), state.clone()

    def step(rows, first, lengths, slots, conv, state, keep=None):
        starts, keep = to_device(np.cumsum([0, *lengths], dtype=np.int32)), None if keep is None else to_device(keep)
        where, own = (to_device(np.array(slots, np.int32)), starts), slice(first, first + rows)
        y = ops.rms_norm_qk(ops.conv1d_causal(x[own], conv, weight, *where), Hk, Dk, Hk * Dk)
        ops.conv1d_state_update(
            conv, x[own], *where, *((keep, W) if keep is not None else (to_device(np.zeros(len(slots), np.int32)), W))
        )
        more = {} if keep is None else {"keep": keep, "gates": gates}
        return ops.gated_delta_net(state, y, g[own], b[own], Hk, Hv, Dk, Dv, slots=where[0], starts=starts, **more)

    with penstock.backend("cuda"):
        got = step(9, 0, (1, 4, 4), (6, 2, 0), conv, state, np.array([0, 4, 4], np.int32))
        counts = np.array([0, accepted, 4], np.int32)
        ops.delta_commit(conv, state, gates, to_device(np.array([6, 2, 0], np.int32)), to_device(counts), weight, Hk)
        for slot, first, count in ((6, 0, 1), (2, 1, accepted), (0, 5, 4)):
            for t in range(first, first + count):
                same(to_host(step(1, t, (1,), (slot,), *one_by_one))[0], to_host(got[t]))
            same(to_host(conv[slot, : W - 1]), to_host(one_by_one[0][slot, : W - 1]))
            bound = 2e-7 if held == "f4" else 2**-8  # a sum near the middle may be rounded the other way
            close(to_host(state[slot]), to_host(one_by_one[1][slot]), bound if GPU else 0.0)
