"""Products of a few rows by lanes of a warp on CUDA: rows of one weight, and pairs of tokens and experts in tiles."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.backends.cuda import _few_rows, linear
from penstock.backends.cuda._few_rows import Tiles, expert_products, expert_tiles, tile_rows
from penstock.errors import BackendError
from penstock.quant import QuantizedTensor
from tests.gpu.common import DEVICE, GPU, reference, run, to_device, to_host
from tests.gpu.test_linear import random_weight
from tests.gpu.test_moe import block, run_unchecked, whole_block, with_fences
from tests.ops.common import EPS, assert_close, assert_same_bits, i32, normal, quantized

FORMATS = [(2, 64), (2, 128), (4, 32), (4, 64), (4, 128), (8, 32), (8, 64)]  # bits and group size
EXACT = 4e-6 if GPU else 1.5e-6  # of the largest result: sums of float32, on a GPU those of its matrix products


def close(got: Any, want: Any) -> None:
    """float32 within the error of its sums; bfloat16 one rounding off at most, and that seldom."""
    top = max(float(np.abs(want.astype(np.float64)).max(initial=0)), 1e-3)
    assert got.dtype == want.dtype
    assert_close("y", got, want, EXACT if got.dtype == np.float32 else 2 * EPS["bfloat16"], top)
    if got.dtype != np.float32 and got.size >= 100:
        assert np.mean(got != want) < 0.02


def nearly(got: Any, want: Any) -> None:
    """As `close` in many rows. Where a number between two products falls on the other side of a rounding, a row is off
    by a part of that, 2e-5 for one of 512; of few rows two in three may be.
    """
    assert got.dtype == want.dtype and got.shape == want.shape
    got, want = got.astype(np.float64), want.astype(np.float64)
    top = np.abs(want).max()
    error = np.abs(got - want).max(axis=-1) / top
    assert not np.isnan(got).any()
    few, median = np.quantile(error, [0.25, 0.5])
    most = 2 * EXACT if len(error) > 16 else 5e-5
    assert few <= 2 * EXACT and median <= most and error.max() <= 2e-3, f"{median:.2g}, at most {error.max():.2g}"


def rows_before_nan(x: np.ndarray) -> torch.Tensor:
    """x on the device with rows of NaN behind it, which change nothing."""
    made = torch.full((len(x) + 9, x.shape[1]), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    made[: len(x)] = to_device(x)
    return made[: len(x)]


def within_nan(T: int, N: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """An output of NaN, and the rows before and behind it, which are to stay so."""
    made = torch.full((T + 2, N), float("nan"), dtype=dtype, device=DEVICE)
    return made[1:-1], made[:: T + 1]


# -- rows of one weight ----------------------------------------------------------------------------------------------


def check_product(rng: Any, T: int, N: int, K: int, dtype: str = "float32", **form: Any) -> None:
    x, w = normal(rng, T, K, dtype="bfloat16"), quantized(rng, N, K, **form)
    out, around = within_nan(T, N, getattr(torch, dtype))
    with penstock.backend("cuda", variant="lanes"):
        ops.quantized_matmul(rows_before_nan(x), to_device(w), dtype=dtype, out=out)
    close(to_host(out), reference(ops.quantized_matmul, x=x, w=w, dtype=dtype))
    assert around.isnan().all()


@pytest.mark.parametrize("scales", ["bfloat16", "float16"])
@pytest.mark.parametrize(("bits", "gs"), FORMATS)
def test_lanes_take_every_format(bits, gs, scales, rng):
    call = {"x": normal(rng, 3, 6 * gs, dtype="bfloat16"), "dtype": "float32"}
    call["w"] = quantized(rng, 19, 6 * gs, bits=bits, group_size=gs, dtype=scales)
    close(run(ops.quantized_matmul, "lanes", **call), reference(ops.quantized_matmul, **call))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("T", [1, 2, 7, 8, 9, 16, 17, 33])
def test_lanes_take_any_number_of_rows(T, dtype, rng):
    """An odd number of groups, 11, so that no two of them have their scales in one load."""
    check_product(rng, T, 17, 704, group_size=64, dtype=dtype)


@pytest.mark.parametrize("T", [3, 17] if GPU else [3])
@pytest.mark.parametrize("N", [1, 8, 17, 257])
def test_lanes_take_any_number_of_outputs(N, T, rng):
    """Rows of the weight end where its programs do not; those beside out stay as they are."""
    check_product(rng, T, N, 128, bits=8)


@pytest.mark.parametrize("groups", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("T", [4, 11])
def test_lanes_take_any_number_of_groups(T, groups, rng):
    """Fewer than the parts of a program share, and more of them than divides."""
    check_product(rng, T, 33, 32 * groups)


def test_lanes_take_rows_of_wide_and_many_results(rng):
    """Launches of weights with many rows, which have other tiles."""
    check_product(rng, 8, 132, 64)
    check_product(rng, 16, 132, 64)
    check_product(rng, 18, 1030, 32)


def test_lanes_give_nothing_for_no_rows(rng):
    w = quantized(rng, 17, 64)
    assert run(ops.quantized_matmul, "lanes", x=normal(rng, 0, 64, dtype="bfloat16"), w=w).shape == (0, 17)


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("stream", ["float32", "bfloat16"])
def test_matmul_add_by_lanes(stream, over, rng):
    T, N, K = 9, 37, 96
    x, w, residual = normal(rng, T, K, dtype="bfloat16"), quantized(rng, N, K), normal(rng, T, N, dtype=stream)
    out, around = within_nan(T, N, getattr(torch, stream))
    if over:
        out.copy_(to_device(residual))
    with penstock.backend("cuda", variant="lanes"):
        given = out if over else to_device(residual)
        ops.matmul_add(given, rows_before_nan(x), to_device(w), out=out)
    close(to_host(out), reference(ops.matmul_add, residual=residual, x=x, w=w))
    assert around.isnan().all()


@pytest.mark.parametrize("op", [ops.fused_gate_up_swiglu, ops.fused_gate_up_geglu], ids=["silu", "gelu"])
@pytest.mark.parametrize(("T", "N", "bits", "gs"), [(2, 1, 4, 32), (7, 21, 8, 64), (17, 17, 2, 64)])
def test_gate_and_up_by_lanes(op, T, N, bits, gs, rng):
    """As row views of one weight."""
    x, w = normal(rng, T, 3 * gs, dtype="bfloat16"), quantized(rng, 2 * N, 3 * gs, bits=bits, group_size=gs)

    def halves(w: QuantizedTensor) -> list[QuantizedTensor]:
        return [w.with_arrays(*(a[rows] for a in w.arrays)) for rows in (slice(0, N), slice(N, None))]

    out, around = within_nan(T, N, torch.bfloat16)
    with penstock.backend("cuda", variant="lanes"):
        op(rows_before_nan(x), *halves(to_device(w)), out=out)
    gate, up = halves(w)
    close(to_host(out), reference(op, x=x, gate_w=gate, up_w=up))
    assert around.isnan().all()


def test_gate_and_up_with_scales_of_two_kinds_are_not_read_as_one(rng):
    """Lanes read scales of one dtype: such weights go another way."""
    w = {"gate_w": quantized(rng, 18, 64, dtype="float16"), "up_w": quantized(rng, 18, 64, dtype="bfloat16")}
    call = {"x": normal(rng, 9, 64, dtype="bfloat16"), **w}
    got, want = run(ops.fused_gate_up_swiglu, **call), reference(ops.fused_gate_up_swiglu, **call)
    assert_close(
        "y", got, want, 4 * EPS["bfloat16"], float(np.abs(want.astype(np.float64)).max())
    )  # tiles round weights
    with pytest.raises(BackendError, match=r"^variant 'lanes': .* of one format"):
        run(ops.fused_gate_up_swiglu, "lanes", **call)


@pytest.mark.parametrize("stream", ["float32", "bfloat16"])
def test_norm_matmul_by_lanes(stream, rng):
    """A few roundings of the normed rows may go the other way."""
    x = normal(rng, 9, 96, dtype=stream) * np.array([[1], [8], [0.125]] * 3, stream)
    call = {"x": x, "norm_weight": normal(rng, 96), "w": quantized(rng, 37, 96, bits=8), "eps": 1e-4}
    call |= {"dtype": "float32", "normed": "bfloat16"}
    nearly(run(ops.norm_matmul, "lanes", **call), reference(ops.norm_matmul, **call))


def test_lanes_refuse_what_they_cannot_read(rng):
    x, norm, residual = (normal(rng, *shape, dtype="bfloat16") for shape in ((2, 128), (128,), (2, 16)))
    message = r"^variant 'lanes': x has torch.%s rows, weights are %s.*, expected bfloat16 rows and Q4_K, Q5_K or Q6_K"
    for bits, gs, kind in ((3, 32, "bfloat16"), (2, 32, "bfloat16"), (8, 128, "bfloat16"), (4, 32, "float32")):
        w = quantized(rng, 16, 128, bits=bits, group_size=gs, dtype=kind)
        for op in (ops.quantized_matmul, ops.norm_matmul, ops.matmul_add):
            more = {"norm_weight": norm} if op is ops.norm_matmul else {}
            more |= {"residual": residual} if op is ops.matmul_add else {}
            named = rf"QuantizedTensor\(\(16, 128\), {bits} bits, groups of {gs}, {kind} scales"
            with pytest.raises(BackendError, match=message % ("bfloat16", named)):
                run(op, "lanes", x=x, w=w, **more)
    for rows, w in ((x.astype(np.float32), quantized(rng, 16, 128)), (x.astype(np.float16), quantized(rng, 16, 128))):
        with pytest.raises(BackendError, match=message % (rows.dtype, "QuantizedTensor")):
            run(ops.quantized_matmul, "lanes", x=rows, w=w)
    with pytest.raises(BackendError, match=message % ("bfloat16", "dense torch.bfloat16")):
        run(ops.norm_matmul, "lanes", x=x, norm_weight=norm, w=normal(rng, 16, 128, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("T", "N", "dtype", "way"),
    [
        (1, 64, "bfloat16", "matvec"),
        (2, 64, "bfloat16", "lanes"),
        (16, 4104, "bfloat16", "lanes"),
        (17, 4104, "bfloat16", "exact"),
        (193, 4104, "bfloat16", "tiles"),
        (32, 4096, "bfloat16", "lanes"),
        (33, 4096, "bfloat16", "tiles"),
        (65, 4096, "bfloat16", "tiles"),
        (33, 1024, "float32", "lanes"),
        (1024, 9, "float32", "lanes"),
        (16, 1032, "float32", "lanes"),
        (17, 1032, "float32", "exact"),
        (257, 1032, "float32", "exact"),
    ],
)
def test_products_go_ways_by_rows_and_results(T, N, dtype, way, rng, monkeypatch):
    """And by tiles or the matvec alone for rows whose bits may not depend on their number."""
    asked = []
    monkeypatch.setattr(linear, "few_rows", lambda *_: asked.append("lanes"))
    monkeypatch.setattr(linear, "exact_product", lambda *_: asked.append("exact"))
    monkeypatch.setattr(linear, "matvec", lambda *_, **__: asked.append("matvec"))
    monkeypatch.setattr("penstock.backends.cuda._gemm.quantized_gemm", lambda *_: asked.append("tiles"))
    x, w = normal(rng, T, 32, dtype="bfloat16"), quantized(rng, N, 32)
    run(ops.quantized_matmul, x=x, w=w, dtype=dtype)
    with penstock.backend("cuda", deterministic=True):
        ops.quantized_matmul(to_device(x), to_device(w), dtype=dtype)
    assert asked[0] == way and asked[1] in ("matvec", "tiles") and len(asked) == 2


# -- tiles of pairs --------------------------------------------------------------------------------------------------


def chosen(rng: Any, counts: dict[int, int], k: int) -> np.ndarray:
    """ids [T, k] that name each expert so often, in any order."""
    flat = rng.permutation([e for e, count in counts.items() for _ in range(count)])
    return flat.reshape(-1, k).astype(np.int32)


COUNTS = {"one": {2: 1}, "ends": {0: 8, 1: 9, 2: 16, 3: 17, -1: 4}, "together": {4: 39}, "none": {-1: 6, 9: 3}}


def parts(tiles: Tiles) -> tuple[np.ndarray, np.ndarray, int]:
    """The order, the slot, begin and end of each tile in use, and where the pairs without an expert begin."""
    *made, count, absent = tiles.tiles.cpu().numpy()
    return tiles.order.cpu().numpy(), np.reshape(made, (3, -1))[:, :count].T, int(absent)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("experts", [6, 60], ids=["of 16", "of 8"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_expert_tiles_have_each_pair_with_an_expert_once(counts, experts, shared, rng):
    S, k = 7, 3 if sum(counts.values()) % 3 == 0 else 1
    ids = chosen(rng, counts, k)
    T, every = len(ids), k + shared
    slot_of = rng.permutation(S).astype(np.int32)
    slot_of[2], slot_of[3] = -1, -2
    for absent, slots in ((None, np.arange(S)), (to_device(slot_of), slot_of)):
        tiles = expert_tiles(to_device(ids), S, absent, experts, shared)
        order, each, first = parts(tiles)
        own = np.where((ids >= 0) & (ids < S), slots[np.clip(ids, 0, S - 1)], -1)
        key = np.where(own < 0, S + 1, own)
        key = np.hstack([key, np.full((T, 1), S)]).reshape(-1) if shared else key.reshape(-1)
        assert tiles.every == every and tiles.rows == tile_rows(T * k, experts)
        assert_same_bits("order", order, np.argsort(key, kind="stable").astype(np.int32))
        each = each[np.argsort(each[:, 1])]  # tiles come in any order
        starts, ends = each[:, 1].tolist(), each[:, 2]
        assert [*starts, first] == [0, *ends] and first == np.count_nonzero(key <= S)
        assert (ends > each[:, 1]).all() and (ends - each[:, 1] <= tiles.rows).all()
        assert all(set(key[order[begin:end]]) == {slot} for slot, begin, end in each)
        full = -(-np.bincount(key)[: S + 1] // tiles.rows)
        assert len(each) == full.sum()  # and none more than it takes


def test_tile_rows_follow_the_pairs_of_an_expert():
    assert [tile_rows(pairs, 10) for pairs in (0, 100, 101, 4000)] == [8, 8, 16, 16]


def check_pairs(
    products: Callable[..., None], rng: Any, factors: str, N: int, K: int, rows: int = 8, **form: Any
) -> None:  # fmt: skip
    """A row of its own for each pair; rows of pairs without an expert, and their weights, are NaN and give 0."""
    S, shared = 3, factors in ("score", "ones")
    k = 2 if shared else 1
    ids = chosen(rng, {0: rows, 1: rows + 1, -1: 3} if factors == "weights" else {1: 6, 0: 2, -1: 1}, 1)
    T = len(ids)
    tiles = expert_tiles(to_device(ids), S, None, T, shared)
    assert tiles.rows == rows
    stack, own = quantized(rng, S, N, K, **form), quantized(rng, N, K, **form)
    x = normal(rng, T * k, K, dtype="bfloat16")
    x.reshape(T, k, K)[ids[:, 0] < 0, 0] = np.nan
    weights = np.where(ids < 0, np.float32(np.nan), normal(rng, T, 1))
    score = normal(rng, T, dtype="bfloat16") if factors == "score" else None
    out, around = within_nan(T * k, N, torch.float32)
    products(
        to_device(x), to_device(stack), None, tiles, 1, None, out, to_device(own) if shared else None, None,
        None if factors == "none" else to_device(weights), to_device(score),
    )  # fmt: skip
    dense, common = (ops.dequantize(w, dtype="float32").astype(np.float64) for w in (stack, own))
    want = np.zeros((T, k, N))
    for t in range(T):
        each = x.reshape(T, k, K)[t].astype(np.float64)
        if ids[t, 0] >= 0:
            want[t, 0] = dense[ids[t, 0]] @ each[0] * (1 if factors == "none" else weights[t, 0])
        if shared:
            want[t, 1] = common @ each[1] / (1 if score is None else 1 + np.exp(-float(score[t])))
    got = to_host(out)
    close(got, want.reshape(T * k, N).astype(np.float32))
    assert not got.reshape(T, k, N)[ids[:, 0] < 0, 0].any()
    assert around.isnan().all()


def check_gate_and_up(
    products: Callable[..., None], rng: Any, N: int, K: int, stacked: bool, act: str, **form: Any
) -> None:  # fmt: skip
    """The pairs of a token share its row; an expert has several tiles."""
    S, k = 3, 3
    ids = chosen(rng, {0: 4, 1: 9, 2: 1, -1: 1}, k)
    x = normal(rng, len(ids), K, dtype="bfloat16")
    both = quantized(rng, S, 2 * N, K, **form)
    separate = [both.with_arrays(*(a[:, r].copy() for a in both.arrays)) for r in (slice(0, N), slice(N, None))]
    gate, up = (to_device(both), None) if stacked else map(to_device, separate)
    out, around = within_nan(ids.size, N, torch.bfloat16)
    tiles = expert_tiles(to_device(ids), S, None, ids.size, False)
    products(to_device(x), gate, up, tiles, k, act, out)
    op = ops.fused_gate_up_swiglu if act == "silu" else ops.fused_gate_up_geglu
    for pair, e in enumerate(ids.reshape(-1)):
        row = to_host(out[pair : pair + 1])
        if e < 0:
            assert not row.any()
        else:
            one = {"x": x[pair // k : pair // k + 1], "gate_w": separate[0][e], "up_w": separate[1][e]}
            close(row, reference(op, **one))
    assert around.isnan().all()


@pytest.mark.parametrize("factors", ["none", "weights", "score", "ones"])
@pytest.mark.parametrize(("rows", "bits", "gs"), [(8, 4, 64), (16, 8, 32), (16, 2, 128)][: 3 if GPU else 2])
def test_expert_products_multiply_each_pair_by_its_expert(factors, rows, bits, gs, rng, monkeypatch):
    """K in pairs of groups, or not."""
    monkeypatch.setattr(_few_rows, "FEW_TILES", ((float("inf"), rows),))
    check_pairs(expert_products, rng, factors, 17, {64: 4, 32: 2, 128: 3}[gs] * gs, rows, bits=bits, group_size=gs)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("stacked", [False, True])
def test_expert_products_of_gate_and_up(stacked, act, rng):
    """N is no multiple of what a program has."""
    check_gate_and_up(expert_products, rng, 21, 128, stacked, act)


# -- blocks of experts -----------------------------------------------------------------------------------------------


def joined(call: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The same call with the up rows behind the gate rows."""
    gate, up = call[f"{prefix}gate_w"], call[f"{prefix}up_w"]
    both = [np.concatenate(pair, axis=-2) for pair in zip(gate.arrays, up.arrays, strict=True)]
    return {**call, f"{prefix}gate_w": gate.with_arrays(*both), f"{prefix}up_w": None}


@pytest.mark.parametrize(
    ("T", "bits", "gs", "scales", "act", "stacked"),
    [
        (1, 4, 32, "bfloat16", "silu", True),
        (2, 8, 32, "float16", "gelu_tanh", False),
        (9, 4, 32, "float16", "silu", True),
        *([(33, 2, 64, "bfloat16", "gelu_tanh", False), (70, 8, 64, "float16", "silu", True)] if GPU else []),
    ],
)
def test_moe_forward_by_lanes_matches_definition(T, bits, gs, scales, act, stacked, rng):
    call = block(rng, T, 3, 2, gs, 3 * gs, "bfloat16") | {"act": act}
    for name, shape in (("gate_w", (gs, 3 * gs)), ("up_w", (gs, 3 * gs)), ("down_w", (3 * gs, gs))):
        call[name] = quantized(rng, 3, *shape, bits=bits, group_size=gs, dtype=scales)
    call["ids"][0, 1] = -1
    call["weights"][0, 1] = np.nan
    want = reference(ops.moe_forward, **call)
    got = run(ops.moe_forward, "lanes", **(joined(call) if stacked else call))
    assert_close("y", got, want, 2 * EPS["bfloat16"], np.abs(want.astype(np.float64)).max())
    assert np.mean(got != want) < 0.05


@pytest.mark.parametrize("way", ["score", "no score", "normed", "joined", "over"])
def test_moe_shared_forward_by_lanes_matches_definition(way, rng):
    dim = 96 if GPU or way == "score" else 32
    call = whole_block(rng, 3, 3, 2, 32, dim, "bfloat16")
    call["residual"] = normal(rng, 3, dim, dtype="bfloat16" if way == "over" else "float32")
    if way == "no score":
        call["shared_score"] = None
    if way == "normed":
        call |= {"norm_weight": normal(rng, dim, dtype="bfloat16"), "eps": 1e-4}
    want = reference(ops.moe_shared_forward, **call)
    made = {name: to_device(value) for name, value in (joined(call, "shared_") if way == "joined" else call).items()}
    out = made["residual"] if way == "over" else torch.full_like(made["residual"], float("nan"))
    with penstock.backend("cuda", variant="lanes"):
        ops.moe_shared_forward(**made, out=out)
    if way == "over":  # bfloat16, whose roundings are wider than those between
        close(to_host(out), want)
    else:
        nearly(to_host(out), want)


def test_moe_shared_forward_with_all_pairs_on_one_expert(rng):
    """Several tiles of it, the last of them short."""
    T = 9
    call = whole_block(rng, T, 3, 2, 32, 32, "bfloat16") | {"residual": normal(rng, T, 32)}
    call["ids"] = np.full((T, 2), 2, np.int32)
    nearly(run(ops.moe_shared_forward, "lanes", **call), reference(ops.moe_shared_forward, **call))


@pytest.mark.parametrize("shared", [False, True])
def test_absent_experts_add_nothing_by_lanes(shared, rng):
    """Not even their weight, which is NaN for ids of −1, and with a shared expert for experts without a slot."""
    make, op = (whole_block, ops.moe_shared_forward) if shared else (block, ops.moe_forward)
    call = with_fences(make(rng, 3, 3, 3, 32, 32, "bfloat16"))
    call["slot_of"] = i32(2, -1, 0, 1, -2, 9)
    call["ids"] = i32([3, 1, -1], [4, 5, -(2**31)], [-1, -1, -1])
    present = call["ids"] == 3
    safe = {**call, "ids": np.where(present, call["ids"], -1).astype(np.int32), "weights": call["weights"].copy()}
    call["weights"][~present if shared else call["ids"] < 0] = np.nan
    if not shared:
        call["x"][2] = np.nan
    made = {name: to_device(value) for name, value in call.items()}
    with penstock.backend("cuda", variant="lanes"):
        got = to_host(op(**made))
    safe["x"] = np.nan_to_num(call["x"].astype(np.float32)).astype(call["x"].dtype)
    close(got, reference(op, **safe))
    if not shared:
        assert not got[1:].any()


def test_blocks_by_lanes_refuse_what_they_cannot_read(rng):
    for form, dtype, named in (({"bits": 3}, "bfloat16", "3 bits"), ({}, "float32", "4 bits")):
        call = whole_block(rng, 2, 3, 2, 32, 32, dtype, **form)
        for op in (ops.moe_forward, ops.moe_shared_forward):
            own = {name: value for name, value in call.items() if op is ops.moe_shared_forward or name in FORWARD}
            with pytest.raises(
                BackendError, match=rf"^variant 'lanes': x has torch.{dtype} rows, .* {named}, .* expected"
            ):
                run_unchecked(op, "lanes", own)
    call = {name: value for name, value in call.items() if name in FORWARD} | {"activations": "int8"}
    with pytest.raises(BackendError, match=r"^moe_forward: activations is 'int8', expected 'float32'"):
        run_unchecked(ops.moe_forward, "lanes", call)


FORWARD = ("x", "ids", "weights", "gate_w", "up_w", "down_w", "slot_of", "act", "activations")


# -- on a GPU --------------------------------------------------------------------------------------------------------

MODEL_SHAPES = [
    (2, 12352, 2048, 4),
    (8, 2048, 4096, 4),
    (16, 12352, 2048, 4),
    (16, 2816, 2112, 4),
    (32, 2048, 4096, 4),
    (7, 248320, 2048, 4),
    (33, 248320, 2048, 4),
    (256, 257, 2048, 8),
    (1000, 257, 2816, 8),
    (9, 4096, 7168, 2),
]


@pytest.mark.cuda
@pytest.mark.parametrize(("T", "N", "K", "bits"), MODEL_SHAPES)
def test_lanes_at_model_shapes(T, N, K, bits):
    w, x = random_weight(N, K, bits=bits), torch.randn(T, K, device=DEVICE).bfloat16()
    with penstock.backend("cuda", variant="lanes"):
        out = torch.full((T, N), float("nan"), device=DEVICE)
        ops.quantized_matmul(x, w, dtype="float32", out=out)
        assert all(torch.equal(out, ops.quantized_matmul(x, w, dtype="float32")) for _ in range(10))
    for rows in (slice(0, 10000), slice(-10000, None)):
        part = w.with_arrays(*(a[rows] for a in w.arrays))
        want = x.double() @ ops.dequantize(part, dtype="float32").double().T
        assert (out[:, rows] - want).abs().max() <= EXACT * want.abs().max()
    assert not out.isnan().any()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("T", "E", "dim", "width"),
    [(4, 256, 2048, 512), (64, 256, 2048, 512), (256, 256, 2048, 512), (33, 128, 2816, 704), (12, 16, 7168, 2048)],
)
def test_blocks_by_lanes_at_model_shapes(T, E, dim, width):
    """Against the same pairs one by one, and in every run the same bits."""
    stacks = [random_weight(E, width, dim), random_weight(E, width, dim), random_weight(E, dim, width)]
    own = [random_weight(width, dim), random_weight(width, dim), random_weight(dim, width)]
    x = torch.randn(T, dim, device=DEVICE).bfloat16()
    ids = torch.stack([torch.randperm(E, device=DEVICE)[:8] for _ in range(T)]).int()
    ids[T // 2 :: 3] = -1
    call = (torch.randn(T, dim, device=DEVICE), x, ids, torch.rand(T, 8, device=DEVICE), *stacks, *own)
    score = torch.randn(T, device=DEVICE)
    with penstock.backend("cuda", variant="rows"):
        want = ops.moe_shared_forward(*call, score)
    with penstock.backend("cuda", variant="lanes"):
        got = ops.moe_shared_forward(*call, score)
        assert all(torch.equal(got, ops.moe_shared_forward(*call, score)) for _ in range(20))
    nearly(to_host(got), to_host(want))


@pytest.mark.cuda
def test_lanes_in_a_chain_of_replays_equal_call_by_call(rng):
    """Kernels that start before the one ahead of them has ended read nothing too soon."""
    T, E, dim, width = 16, 32, 2048, 512
    call = {name: to_device(value) for name, value in whole_block(rng, T, E, 8, width, dim, "bfloat16").items()}
    router, square = to_device(quantized(rng, E, dim, bits=8)), to_device(quantized(rng, dim, dim))

    def chain(x: torch.Tensor, wait: Any) -> torch.Tensor:
        for _ in range(10):
            x = ops.quantized_matmul(x, square)
            wait()
            ids, weights = ops.moe_route(ops.quantized_matmul(x, router, dtype="float32"), None, 8)
            wait()
            x = ops.moe_shared_forward(**{**call, "residual": x, "x": x, "ids": ids, "weights": weights}) * 0.5
            wait()
        return x

    want = chain(call["x"], torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(call["x"], lambda: None)
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)
