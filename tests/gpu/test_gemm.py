"""Tensor-core products on CUDA (`_gemm`, `_grouped`): every format, ragged shapes, the grouping of pairs by expert."""

from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import quant
from penstock.backends.cuda import _gemm, _grouped
from penstock.dtypes import FLOATS
from penstock.quant import QuantizedTensor
from tests.gpu.common import GPU, to_device
from tests.ops.cases import ids_of
from tests.ops.common import EPS, assert_close, normal, quantized

SILU = {"silu": torch.nn.functional.silu, "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh")}


def dense(w: Any) -> torch.Tensor:
    """A weight in float64 on the host."""
    if isinstance(w, QuantizedTensor):
        return torch.from_numpy(quant.dequantize(w.to("cpu")).astype(np.float64))
    return w.double().cpu()


def poison(*shape: int, like: torch.Tensor, dtype: str | None = None) -> torch.Tensor:
    return torch.full(shape, float("nan"), device=like.device, dtype=getattr(torch, dtype) if dtype else like.dtype)


def check(got: torch.Tensor, want: torch.Tensor, rel: float = 4e-6) -> None:
    """As the cases of these ops: against the largest output, with the rounding of the result's dtype."""
    kind = str(got.dtype).removeprefix("torch.")
    rel = rel if kind == "float32" else rel + 2 * EPS[kind]
    assert_close("y", got.cpu().double().numpy(), want.numpy(), rel, max(float(want.abs().max()), 1e-3))


FORMAT_CALLS = [(9, 13, 384, "float16", "float16", "float16"), (17, 70, 256, "bfloat16", "bfloat16", "float32")]
if GPU:
    FORMAT_CALLS += [
        (150, 300, 1024, "bfloat16", "bfloat16", "bfloat16"),
        (70, 40, 256, "float32", "float16", "float32"),
        (33, 64, 128, "float16", "float32", "float16"),
    ]


@pytest.mark.parametrize("bits", quant.BITS)
def test_quantized_gemm_of_every_format(bits, rng):
    for T, N, K, kind, scales, result in FORMAT_CALLS:
        w = to_device(quantized(rng, N, K, bits=bits, group_size=64, dtype=scales))
        x = to_device(normal(rng, T, K, dtype=kind))
        out = poison(T, N, like=x, dtype=result)
        _gemm._launch(x, w, out)
        check(out, x.cpu().double() @ dense(w).T)


@pytest.mark.parametrize("fold", [1, 3])
def test_quantized_gemm_with_parts_of_k_and_x_in_dot_order(fold, rng, monkeypatch):
    monkeypatch.setattr(_gemm, "_config", lambda *_: (32, 128, 64, 3, fold, 4, 3))
    x, w = to_device(normal(rng, 66, 320, dtype="float16")), to_device(quantized(rng, 5, 320, dtype="float16"))
    out = poison(66, 5, like=x)
    _gemm._launch(x, w, out)
    check(out, x.cpu().double() @ dense(w).T)


@pytest.mark.parametrize(("x_kind", "w_kind", "out_kind"), [
    ("float32", "bfloat16", "float32"),
    ("bfloat16", "float32", "float32"),
    ("float16", "bfloat16", "float32"),
    ("bfloat16", "float16", "bfloat16"),
    ("float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "float32"),
])  # fmt: skip
def test_dense_gemm_of_mixed_dtypes(x_kind, w_kind, out_kind, rng):
    x, w = to_device(normal(rng, 19, 83, dtype=x_kind)), to_device(normal(rng, 33, 83, dtype=w_kind, scale=83**-0.5))
    out = poison(19, 33, like=x, dtype=out_kind)
    _gemm.dense_gemm(x, w, out)
    check(out, x.cpu().double() @ w.cpu().double().T)


@pytest.mark.parametrize("bits", quant.BITS)
def test_dense_copy_is_the_definition(bits, rng):
    w = quantized(rng, 3, 7, 128, bits=bits, group_size=32)
    got = _gemm.dense_copy(to_device(w), torch.float32)
    assert torch.equal(got.cpu(), torch.from_numpy(quant.dequantize(w)))


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("many", [0, 1 << 30], ids=["by blocks", "by slots"])
@pytest.mark.parametrize(("T", "k", "slots"), [(1, 1, 1), (7, 3, 5), (90, 4, 70), (301, 5, 3)])
def test_group_pairs_sorts_by_slot_and_covers_every_pair(T, k, slots, rows, many, rng, monkeypatch):
    monkeypatch.setattr(_grouped, "PLAN_MANY", many)
    experts = slots + 3
    ids = rng.integers(-2, experts + 2, (T, k)).astype(np.int32)
    slot_of = rng.integers(-1, slots + 1, experts).astype(np.int32)
    plan = _grouped.group_pairs(to_device(ids), slots, to_device(slot_of), rows)
    present = (ids >= 0) & (ids < experts)
    slot = np.where(present, slot_of[np.where(present, ids, 0)], -1).reshape(-1)
    slot = np.where((slot >= 0) & (slot < slots), slot, slots)
    np.testing.assert_array_equal(plan.order.cpu().numpy(), np.argsort(slot, kind="stable"))
    tiles = plan.tiles.cpu().numpy().reshape(3, -1)
    covered = []
    for s, first, end in tiles.T[tiles[0] >= 0]:
        places = np.arange(first, min(first + rows, end))
        assert len(places) > 0 and (np.sort(slot)[places] == s).all()
        covered += list(places)
    assert covered == list(range(T * k))


def expected(x, gate, up, down, slots, weights, act, h):
    """h and y in float64; slots −1 count as 0."""
    live = torch.from_numpy(slots >= 0)
    safe = torch.from_numpy(np.maximum(slots, 0)).long()
    g = torch.einsum("tknc,tc->tkn", dense(gate)[safe], x.cpu().double())
    if up is None:
        g, u = g.chunk(2, -1)
    else:
        u = torch.einsum("tknc,tc->tkn", dense(up)[safe], x.cpu().double())
    y = torch.einsum("tkdn,tkn->tkd", dense(down)[safe], h.cpu().double())
    return SILU[act](g) * u * live[..., None], (y * (weights.cpu().double() * live)[..., None]).sum(1)


@pytest.mark.parametrize(("T", "E", "k", "K", "N", "dim", "kind", "bits", "joined", "act"), [
    (12, 4, 3, 128, 96, 70, "float16", 4, False, "silu"),
    (10, 3, 2, 256, 128, 40, "bfloat16", 8, True, "gelu_tanh"),
    (9, 3, 2, 83, 33, 40, "float32", 0, True, "silu"),
    (9, 5, 2, 128, 128, 33, "float32", 3, False, "silu"),
    *(((300, 16, 4, 2816, 704, 2816, "bfloat16", 4, False, "gelu_tanh"),
       (90, 5, 2, 256, 128, 70, "bfloat16", 6, True, "silu"),
       (700, 3, 2, 512, 192, 512, "bfloat16", 2, True, "silu")) if GPU else ()),
])  # fmt: skip
def test_grouped_experts_with_absent_ones(T, E, k, K, N, dim, kind, bits, joined, act, rng):
    def stack(rows: int, width: int) -> Any:
        if bits == 0:
            return to_device(normal(rng, E, rows, width, dtype="bfloat16", scale=width**-0.5))
        return to_device(quantized(rng, E, rows, width, bits=bits, dtype="bfloat16" if joined else kind))

    gate, up, down = stack(N * (1 + joined), K), None if joined else stack(N, K), stack(dim, N)
    x, weights = to_device(normal(rng, T, K, dtype=kind)), to_device(np.abs(normal(rng, T, k)))
    ids, slot_of = ids_of(rng, T, k, E), rng.permutation(E).astype(np.int32)
    slot_of[0] = -1
    ids[2, 1] = -1
    ids[5, 0] = E + 100
    slots = np.where((ids >= 0) & (ids < E), slot_of[np.clip(ids, 0, E - 1)], -1)
    device_ids, device_slots = to_device(ids), to_device(slot_of)
    h = poison(T, k, N, like=x)
    _grouped.grouped_gate_up(x, gate, up, device_ids, device_slots, act, h)
    y = poison(T, dim, like=x)
    _grouped.grouped_down_sum(h, down, device_ids, weights, device_slots, y)
    want_h, want_y = expected(x, gate, up, down, slots, weights, act, h)
    check(h, want_h)
    check(y, want_y)


def test_grouped_experts_in_whole_and_short_tiles(rng, monkeypatch):
    monkeypatch.setattr(_grouped, "_config", lambda *_: (16, 128, 64, 4, 3))
    gate, down = (to_device(quantized(rng, 2, *shape, dtype="float16")) for shape in ((128, 64), (33, 64)))
    x, weights = to_device(normal(rng, 40, 64, dtype="float16")), to_device(np.abs(normal(rng, 40, 1)))
    ids = np.repeat(np.array([0, 1], np.int32), [5, 35])[rng.permutation(40)][:, None]  # tiles of 5, 32 and 3 pairs
    plan = _grouped.group_pairs(to_device(ids), 2, None, rows=32)
    h, y = poison(40, 1, 64, like=x), poison(40, 33, like=x)
    _grouped.grouped_gate_up(x, gate, None, to_device(ids), None, "silu", h, plan=plan)
    _grouped.grouped_down_sum(h, down, to_device(ids), weights, None, y, plan=plan)
    want_h, want_y = expected(x, gate, None, down, ids, weights, "silu", h)
    check(h, want_h)
    check(y, want_y)
    monkeypatch.setattr(_grouped, "_tile_rows", lambda *_: 32)
    each, again = poison(40, 1, 33, like=x), poison(40, 33, like=x)
    _grouped.grouped_mlp(x, gate, None, down, to_device(ids), None, "silu", each)
    _grouped.sum_of_chosen(each, weights, to_device(ids), None, again)
    assert torch.equal(again, y)


@pytest.mark.parametrize("joined", [False, True])
def test_grouped_experts_in_long_tiles(joined, rng, monkeypatch):
    monkeypatch.setattr(_grouped, "GROUPED_LONG", (32,))
    monkeypatch.setattr(_grouped, "_tile_rows", lambda *_: 32)  # and 16 more
    T, E, K, N, dim = 150, 3, 128, 96, 70
    gate, up, down = (
        to_device(quantized(rng, E, *shape, dtype="float16")) for shape in ((N * (1 + joined), K), (N, K), (dim, N))
    )
    x, weights = to_device(normal(rng, T, K, dtype="float16")), to_device(np.abs(normal(rng, T, 1)))
    # tiles of 41; 48 and 9; 20; of none 32
    ids = np.repeat(np.array([0, 1, 2, -1], np.int32), [41, 57, 20, 32])[rng.permutation(T)][:, None]
    assert _grouped._takes_long(x, gate, down) and _grouped.group_pairs(to_device(ids), E, long=True).more == 16
    each, y, want_y = poison(T, 1, dim, like=x), poison(T, dim, like=x), poison(T, dim, like=x)
    _grouped.grouped_mlp(x, gate, None if joined else up, down, to_device(ids), None, "silu", each)
    _grouped.sum_of_chosen(each, weights, to_device(ids), None, y)
    assert not each[to_device(ids)[:, 0] < 0].any()
    h = poison(T, 1, N, like=x)
    _grouped.grouped_gate_up(x, gate, None if joined else up, to_device(ids), None, "silu", h)
    _grouped.grouped_down_sum(h, down, to_device(ids), weights, None, want_y)
    assert torch.equal(y, want_y)
    check(y, expected(x, gate, None if joined else up, down, ids, weights, "silu", h)[1])


# -- on a GPU only ---------------------------------------------------------------------------------------------------


def random_weight(*shape: int, bits: int = 4) -> QuantizedTensor:
    """Random codes, made on the GPU: quantizing model shapes on the host takes too long."""
    *lead, K = shape
    packed = torch.randint(-(2**31), 2**31 - 1, (*lead, K * bits // 32), dtype=torch.int32, device="cuda")
    scales = ((torch.rand(*lead, K // 64, device="cuda") + 0.5) * K**-0.5 / 2**bits).bfloat16()
    return QuantizedTensor(packed, scales, (-scales.float() * 2 ** (bits - 1)).bfloat16(), bits, 64)


@pytest.mark.cuda
@pytest.mark.parametrize("T", [16, 100, 300, 4096])
@pytest.mark.parametrize(("N", "K"), [(12288, 2048), (2048, 4096), (2112, 2816), (2816, 2112)])
def test_quantized_gemm_at_model_shapes(T, N, K):
    w, x = random_weight(N, K), torch.randn(T, K, device="cuda").bfloat16()
    out = poison(T, N, like=x)
    _gemm.quantized_gemm(x, w, out)
    want = x.double() @ _gemm.dense_copy(w, torch.float32).double().T
    assert float((out.double() - want).norm() / want.norm()) < 4e-3
    again = poison(T, N, like=x)
    for _ in range(20):
        _gemm.quantized_gemm(x, w, again)
        assert torch.equal(out, again)


@pytest.mark.cuda
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(("N", "K"), [(2048, 4096), (256, 2048), (12288, 2048)])
def test_deterministic_rows_do_not_depend_on_their_number(N, K, quantize):
    x = torch.randn(600, K, device="cuda").bfloat16()
    w: Any = random_weight(N, K) if quantize else torch.randn(N, K, device="cuda").bfloat16()
    product = _gemm.quantized_gemm if quantize else _gemm.dense_gemm
    with penstock.backend("cuda", deterministic=True):
        whole = poison(600, N, like=x)
        product(x, w, whole)
        for T in (1, 9, 17, 40, 65, 200):
            out = poison(T, N, like=x)
            product(x[:T], w, out)
            assert torch.equal(out, whole[:T]), T


@pytest.mark.cuda
def test_quantized_gemm_of_a_million_rows():
    w, x = random_weight(40, 2048), torch.randn(1 << 20, 2048, device="cuda", dtype=torch.bfloat16)
    out = poison(len(x), 40, like=x)
    _gemm._launch(x, w, out)
    rows = torch.tensor([0, 1, 524287, len(x) - 2, len(x) - 1], device="cuda")
    want = x[rows].double() @ _gemm.dense_copy(w, torch.float32).double().T
    assert float((out[rows].double() - want).norm() / want.norm()) < 4e-3
    assert not out.isnan().any()


def differences(h: torch.Tensor, y: torch.Tensor, first: torch.Tensor, down: Any, ids: torch.Tensor, E: int) -> str:
    """Where two results differ, and whether plans, copies in dot order and products of single pairs do."""
    plans = [_grouped.group_pairs(ids, E) for _ in range(5)]
    flat = h.view(-1, h.shape[-1])
    copies = [_gemm.ordered(flat, 4) for _ in range(5)]
    each = [poison(len(flat), y.shape[1], like=y) for _ in range(6)]
    for one in each:
        _grouped._grouped(flat, down, None, plans[0], 1, None, one)
    where = [(one != each[0]).nonzero() for one in each[1:]]
    rows = (y != first).any(1).nonzero().flatten()
    return (
        f"y: {int((y != first).sum())} elements of {len(rows)} rows {rows[:8].tolist()}, "
        f"NaN {int(y.isnan().sum())} and {int(first.isnan().sum())}; "
        f"order equal {[torch.equal(p.order, plans[0].order) for p in plans]}, "
        f"tiles {[torch.equal(p.tiles, plans[0].tiles) for p in plans]}; "
        f"copies {[torch.equal(c, copies[0]) for c in copies]}; pairs: NaN {[int(one.isnan().sum()) for one in each]}, "
        f"differ {[len(w) for w in where]} at {[w[:6].tolist() for w in where]}"
    )


@pytest.mark.cuda
@pytest.mark.parametrize(("T", "E", "K", "N"), [(4096, 256, 2048, 512), (64, 256, 2048, 512), (1000, 128, 2816, 704)])
def test_grouped_experts_at_model_shapes_repeat_and_replay(T, E, K, N):
    gate, up, down = random_weight(E, N, K), random_weight(E, N, K), random_weight(E, K, N)
    x, weights = torch.randn(T, K, device="cuda").bfloat16(), torch.rand(T, 8, device="cuda")
    ids = torch.rand(T, E, device="cuda").topk(8).indices.int()
    h, y = poison(T, 8, N, like=x), poison(T, K, like=x)

    def call() -> None:
        plan = _grouped.group_pairs(ids, E)
        _grouped.grouped_gate_up(x, gate, up, ids, None, "silu", h, plan=plan)
        _grouped.grouped_down_sum(h, down, ids, weights, None, y, plan=plan)

    def compare() -> None:
        for t in (0, T // 2, T - 1):
            each = []
            for i in range(8):
                e = int(ids[t, i])
                g, u, d = (_gemm.dense_copy(w[e], torch.float32).double() for w in (gate, up, down))
                want = torch.nn.functional.silu(g @ x[t].double()) * (u @ x[t].double())
                assert float((h[t, i].double() - want).norm() / want.norm()) < 1e-2
                each.append(float(weights[t, i]) * (d @ h[t, i].double()))
            want = torch.stack(each).sum(0)
            assert float((y[t].double() - want).norm() / want.norm()) < 1e-2

    call()
    compare()
    first = h.clone(), y.clone()
    for _ in range(10):
        call()
        assert torch.equal(h, first[0])
        assert torch.equal(y, first[1]), differences(h, y, first[1], down, ids, E)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    ids.copy_(torch.rand(T, E, device="cuda").topk(8).indices.int())
    h.fill_(float("nan"))
    graph.replay()
    compare()
    ids.fill_(3)  # all tokens to one expert, then to none: the plan's room does not depend on values
    graph.replay()
    compare()
    ids.fill_(-1)
    graph.replay()
    assert not h.any() and not y.any()


@pytest.mark.cuda
def test_group_pairs_of_a_million():
    ids = torch.randint(-1, 300, (125_000, 8), device="cuda", dtype=torch.int32)
    plan = _grouped.group_pairs(ids, 256)
    slot = torch.where((ids >= 0) & (ids < 256), ids, 256).flatten()
    assert torch.equal(plan.order.long(), slot.long().sort(stable=True).indices)


def test_dtypes_have_triton_names():
    assert {str(dtype).removeprefix("torch.") for dtype in _gemm.TL_DTYPES} == set(FLOATS)
