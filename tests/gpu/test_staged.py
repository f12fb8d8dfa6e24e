"""Products of experts whose weights pass through shared memory in bulk copies on CUDA."""

from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.backends.cuda import _staged, moe
from penstock.backends.cuda._few_rows import Tiles, expert_tiles
from penstock.backends.cuda._staged import staged_products, stages
from tests.gpu.common import DEVICE, GPU, reference, to_device, to_host
from tests.gpu.test_few_rows import chosen, close, nearly, within_nan
from tests.gpu.test_moe import whole_block
from tests.ops.common import normal, quantized

# Bits, group size, N and K: 4, 2 and 1 warps share K, with 8, 6, 4, 8 and 1 groups of a row for each.
SHAPES = [(4, 64, 48, 2048), (4, 64, 96, 768), (2, 128, 64, 1024), (8, 32, 128, 256), (4, 64, 64, 64)]


@pytest.mark.parametrize("factors", ["none", "weights", "score", "ones"])
@pytest.mark.parametrize(("bits", "gs", "N", "K"), SHAPES if GPU else SHAPES[:3])
def test_staged_products_multiply_each_pair_by_its_expert(factors, bits, gs, N, K, rng):
    """A row of its own for each pair; rows of pairs without an expert, and their weights, are NaN and give 0."""
    S, shared = 3, factors in ("score", "ones")
    k = 2 if shared else 1
    ids = chosen(rng, {0: 8, 1: 9, -1: 3} if factors == "weights" else {1: 6, 0: 2, -1: 1}, 1)
    T = len(ids)
    tiles = expert_tiles(to_device(ids), S, None, T, shared)
    form = {"bits": bits, "group_size": gs, "dtype": "float16" if factors == "ones" else "bfloat16"}
    stack, own = quantized(rng, S, N, K, **form), quantized(rng, N, K, **form)
    x = normal(rng, T * k, K, dtype="bfloat16")
    x.reshape(T, k, K)[ids[:, 0] < 0, 0] = np.nan
    weights = np.where(ids < 0, np.float32(np.nan), normal(rng, T, 1))
    score = normal(rng, T, dtype="bfloat16") if factors == "score" else None
    out, around = within_nan(T * k, N, torch.float32)
    staged_products(
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


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("N", "K", "stacked"), [(64, 512, False), (32, 2048, True), (96, 1024, True)])
def test_staged_products_of_gate_and_up(N, K, stacked, act, rng):
    """The pairs of a token share its row; experts have several tiles, and a program several experts."""
    S, k = 3, 3
    ids = chosen(rng, {0: 4, 1: 9, 2: 1, -1: 1}, k)
    x = normal(rng, len(ids), K, dtype="bfloat16")
    both = quantized(rng, S, 2 * N, K, group_size=64)
    separate = [both.with_arrays(*(a[:, r].copy() for a in both.arrays)) for r in (slice(0, N), slice(N, None))]
    gate, up = (to_device(both), None) if stacked else map(to_device, separate)
    out, around = within_nan(ids.size, N, torch.bfloat16)
    tiles = expert_tiles(to_device(ids), S, None, ids.size, False)
    staged_products(to_device(x), gate, up, tiles, k, act, out)
    op = ops.fused_gate_up_swiglu if act == "silu" else ops.fused_gate_up_geglu
    for pair, e in enumerate(ids.reshape(-1)):
        row = to_host(out[pair : pair + 1])
        if e < 0:
            assert not row.any()
        else:
            one = {"x": x[pair // k : pair // k + 1], "gate_w": separate[0][e], "up_w": separate[1][e]}
            close(row, reference(op, **one))
    assert around.isnan().all()


@pytest.mark.parametrize("tokens", [(8, False), (9, True)], ids=["few", "enough"])
def test_blocks_by_lanes_are_staged_from_so_many_tokens_on(tokens, rng, monkeypatch):
    (T, taken), asked = tokens, []
    monkeypatch.setattr(_staged, "STAGED_TOKENS", 9)
    monkeypatch.setattr(moe, "staged_products", lambda *args: (asked.append(args[5]), staged_products(*args)))
    call = whole_block(rng, T, 9, 2, 64, 128, "bfloat16") | {"residual": normal(rng, T, 128)}
    want = reference(ops.moe_shared_forward, **call)
    made = {name: to_device(value) for name, value in call.items()}
    out = torch.full_like(made["residual"], float("nan"))
    with penstock.backend("cuda", variant="lanes"):
        ops.moe_shared_forward(**made, out=out)
    nearly(to_host(out), want)
    assert asked == (["silu", None] if taken else [])


def test_stages_are_for_rows_that_divide_and_fit(rng):
    x = torch.zeros((16, 64), dtype=torch.bfloat16, device=DEVICE)
    made = torch.zeros(64, dtype=torch.int32, device=DEVICE)

    def taken(N: int, K: int, rows: int = 8, act: str | None = None, **form: Any) -> bool:
        tiles = Tiles(made, made, rows, 2, False)
        return stages(x, N, tiles, act, to_device(quantized(rng, N, K, **{"group_size": 64} | form)))

    assert taken(16, 2048) and taken(32, 1024) and taken(64, 512)
    assert not taken(24, 2048)  # rows that are no multiple of 16
    assert not taken(16, 2816)  # eight warps' worth of numbers
    assert not taken(16, 2048, rows=16)
    assert not taken(16, 2048, bits=8)  # two stages of 32 KB
    assert not taken(64, 704)  # 11 groups for two warps
    assert not stages(x, 16, Tiles(made[:22], made, 8, 2, False), None, to_device(quantized(rng, 16, 2048)))
