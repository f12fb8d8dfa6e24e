"""Products of experts whose weights pass through shared memory in bulk copies on CUDA."""

from typing import Any

import pytest
import torch

import penstock
from penstock import ops
from penstock.backends.cuda import _staged, moe
from penstock.backends.cuda._few_rows import Tiles
from penstock.backends.cuda._staged import staged_products, stages
from tests.gpu.common import DEVICE, GPU, reference, to_device, to_host
from tests.gpu.test_few_rows import check_gate_and_up, check_pairs, nearly
from tests.gpu.test_moe import whole_block
from tests.ops.common import normal, quantized

# Bits, group size, N and K: 4, 2 and 1 warps share K, with 8, 6, 4, 8 and 1 groups of a row for each.
SHAPES = [(4, 64, 48, 2048), (4, 64, 96, 768), (2, 128, 64, 1024), (8, 32, 128, 256), (4, 64, 64, 64)]


@pytest.mark.parametrize("factors", ["none", "weights", "score", "ones"])
@pytest.mark.parametrize(("bits", "gs", "N", "K"), SHAPES if GPU else SHAPES[:3])
def test_staged_products_multiply_each_pair_by_its_expert(factors, bits, gs, N, K, rng):
    scales = "float16" if factors == "ones" else "bfloat16"
    check_pairs(staged_products, rng, factors, N, K, bits=bits, group_size=gs, dtype=scales)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("N", "K", "stacked"), [(64, 512, False), (32, 2048, True), (96, 1024, True)])
def test_staged_products_of_gate_and_up(N, K, stacked, act, rng):
    """A program has several experts."""
    check_gate_and_up(staged_products, rng, N, K, stacked, act, group_size=64)


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
        tiles = Tiles(made, made, 64, rows, 2, False)
        return stages(x, N, tiles, act, to_device(quantized(rng, N, K, **{"group_size": 64} | form)))

    assert taken(16, 2048) and taken(32, 1024) and taken(64, 512)
    assert not taken(24, 2048)  # rows that are no multiple of 16
    assert not taken(16, 2816)  # eight warps' worth of numbers
    assert not taken(16, 2048, rows=16)
    assert not taken(16, 2048, bits=8)  # two stages of 32 KB
    assert not taken(64, 704)  # 11 groups for two warps
    assert not stages(x, 16, Tiles(made, made, 22, 8, 2, False), None, to_device(quantized(rng, 16, 2048)))
