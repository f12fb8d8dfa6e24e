"""Lanes with GGUF blocks against definitions; their assembly, which the interpreter does not run, on one warp."""

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.backends.cuda import _lane_blocks as lanes
from penstock.errors import BackendError
from penstock.quant import GgufTensor, in_planes
from tests.gpu import ptx
from tests.gpu.common import GPU, check_experts_by_lanes, reference, run, to_device, to_host
from tests.ops.common import EPS, assert_close, normal
from tests.weights.blocks import some_blocks

LANE = np.arange(32)
ROW, PLACE = LANE // 4, LANE % 4


def some(rng: np.random.Generator, kind: str, *shape: int) -> GgufTensor:
    return GgufTensor(some_blocks(rng, kind, *shape), kind)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize(("T", "N", "K"), [(3, 37, 768), (11, 70, 256), (19, 17, 1280)])
def test_lanes_take_blocks(T, N, K, kind, rng):
    """Rows that end in a tile, more tokens than one tile of them has, few and many steps of K, gate and up."""
    x, w, up = normal(rng, T, K, dtype="bfloat16"), some(rng, kind, N, K), some(rng, kind, N, K)
    want = reference(ops.quantized_matmul, x=x, w=w, dtype="float32")
    got = run(ops.quantized_matmul, variant="lanes", x=x, w=w, dtype="float32")
    assert_close("y", got, want, 4e-6 if GPU else 1e-6, np.abs(want).max())
    want = reference(ops.fused_gate_up_swiglu, x=x, gate_w=w, up_w=up).astype(np.float32)
    got = run(ops.fused_gate_up_swiglu, variant="lanes", x=x, gate_w=w, up_w=up).astype(np.float32)
    assert_close("h", got, want, 4 * EPS["bfloat16"], np.abs(want).max())


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_lanes_take_rows_of_a_weight_in_blocks(kind, rng):
    """From row 3 on, where planes begin at any of their numbers; blocks that are in no planes are refused."""
    x, w = normal(rng, 5, 256, dtype="bfloat16"), some(rng, kind, 23, 256)
    want = reference(ops.quantized_matmul, x=x, w=GgufTensor(w.packed[3:20].copy(), kind), dtype="float32")
    with penstock.backend("cuda", variant="lanes"):
        got = ops.quantized_matmul(to_device(x), to_device(w).rows(slice(3, 20)), dtype="float32")
        assert_close("y", to_host(got), want, 4e-6 if GPU else 1e-6, np.abs(want).max())
        if not GPU:
            with pytest.raises(BackendError, match="variant 'lanes': .*GgufTensor"):
                ops.quantized_matmul(to_device(x), w.to("torch"))


def test_lanes_refuse_other_blocks(rng):
    x = normal(rng, 3, 256, dtype="bfloat16")
    with pytest.raises(BackendError, match="variant 'lanes': .*GgufPlanes.*expected .* Q4_K, Q5_K or Q6_K"):
        run(ops.quantized_matmul, variant="lanes", x=x, w=some(rng, "Q3_K", 5, 256))


@pytest.mark.parametrize(("first", "last", "stacked"), [("Q4_K", "Q6_K", False), ("Q6_K", "Q5_K", True)])
def test_lanes_take_experts_in_blocks(first, last, stacked, rng):
    """Gate and up of one type and down of another, in one stack and in two, in tiles of 8 pairs and of 16, absent ones
    among them; the shared expert as one more.
    """
    E, dim, width = 3, 512, 256
    own = [some(rng, first, width, dim), some(rng, first, width, dim), some(rng, last, dim, width)]
    both, down = some(rng, first, E, 2 * width, dim), some(rng, last, E, dim, width)
    halves = [
        GgufTensor(np.ascontiguousarray(both.packed[:, rows]), first) for rows in (slice(width), slice(width, None))
    ]
    check_experts_by_lanes(rng, own, both if stacked else None, halves, down)


# -- assembly --------------------------------------------------------------------------------------------------------


def words_of(array: torch.Tensor) -> np.ndarray:
    return array.numpy().view(np.uint32)


def pairs(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two bfloat16 numbers in a word."""
    bits = [part.astype(np.float32).view(np.uint32) >> 16 for part in (low, high)]
    return bits[0] | bits[1] << 16


def test_a_warp_multiplies_128_codes_of_16_rows_of_q6_k(rng):
    """Exchanges of codes and of x, numbers, sums and scales for both halves of a block, two tiles of tokens."""
    tokens, blocks = 2, some_blocks(rng, "Q6_K", 16, 256)
    low, high, sub, top = in_planes(GgufTensor(blocks, "Q6_K"), "torch").arrays
    x = normal(rng, 8 * tokens, 256, dtype="bfloat16").astype(np.float32)
    total = np.zeros((16, 8 * tokens))
    for half in range(2):
        rows = []
        for row in (ROW, ROW + 8):
            loaded = [words_of(low)[row, 16 * half + 4 * PLACE + i] for i in range(4)]
            loaded += [words_of(high)[row, 8 * half + 2 * PLACE + i] for i in range(2)]
            rows.append(ptx.run(lanes._codes_asm(), lanes._exchange_constraints(6), [*loaded, PLACE.astype(np.uint32)]))
        for p in range(4):
            groups = []
            for t in range(tokens):
                chunk = 128 * half + 32 * p + 8 * (PLACE % 2 * 2 + PLACE // 2)
                mine = [x[8 * t + ROW, chunk + i] for i in range(8)]
                loaded = [pairs(mine[i], mine[i + 4]) for i in range(4)]
                place = PLACE.astype(np.uint32)
                groups.append(ptx.run(lanes._x_asm(), lanes._exchange_constraints(4), [*loaded, place]))
            for g in range(2):
                mine = [part for each in groups for part in each[2 * g : 2 * g + 2]]
                sums = []
                for each in groups:
                    sums += ptx.run(lanes._sums_asm(), "=&f,=&f,r,r", each[2 * g : 2 * g + 2])
                words = [row[at] for row in rows for at in (p // 2 * 2 + g, 4 + g)]
                given = [*words, *mine, *sums, np.uint32(lanes.SIX)]
                made = ptx.run(lanes._product_asm(p, tokens), lanes._product_constraints(tokens), given)
                for i, sums_of in enumerate(made):
                    row, token = ROW + i % 4 // 2 * 8, i // 4 * 8 + 2 * PLACE + i % 2
                    entry = sub.numpy()[row, 8 * half + 2 * p + g] ^ 128
                    (number,) = ptx.run(f"{{{lanes._byte_asm(1)}}}", "=f,r", [entry.astype(np.uint32) << 8])
                    scale = (number.view(np.float32).astype(np.float64) - 32768 - 128) * top.numpy()[row, 0]
                    total[row, token] += sums_of * scale
    want = GgufTensor(blocks, "Q6_K").dequantize().astype(np.float64) @ x.T.astype(np.float64)
    np.testing.assert_allclose(total, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_a_warp_multiplies_128_codes_of_16_rows_of_q5_k(rng):
    """The exchange of upper bits, and products of 32 + code for both halves of a block, two tiles of tokens."""
    tokens, blocks = 2, some_blocks(rng, "Q5_K", 16, 256)
    blocks[:, :4] = np.array([1, 0], np.float16).view(np.uint8)  # no minima, weights are code times scale
    low, high, sub, _, _ = in_planes(GgufTensor(blocks, "Q5_K"), "torch").arrays
    x = normal(rng, 8 * tokens, 256, dtype="bfloat16").astype(np.float32)
    total, word = np.zeros((16, 8 * tokens)), PLACE % 2 * 2 + PLACE // 2
    for half in range(2):
        upper = []
        for row in (ROW, ROW + 8):
            loaded = [words_of(high)[row, 4 * half + PLACE], PLACE.astype(np.uint32)]
            upper += ptx.run(lanes._upper_asm(), lanes._exchange_constraints(1), loaded)
        for p in range(4):
            group, mine = 4 * half + p, []
            for t in range(tokens):
                each = [x[8 * t + ROW, 32 * group + 8 * word + i] for i in range(8)]
                mine += [pairs(each[i], each[i + 4]) for i in range(4)]
            words = [part for i in range(2) for part in (words_of(low)[ROW + 8 * i, 4 * group + word], upper[i])]
            made = ptx.run(
                lanes._five_asm(p, tokens), lanes._five_constraints(tokens), [*words, *mine, np.uint32(lanes.FIVE)]
            )
            sums = x[:, 32 * group : 32 * group + 32].sum(axis=1, dtype=np.float64)
            for i, sums_of in enumerate(made):
                row, token = ROW + i % 4 // 2 * 8, i // 4 * 8 + 2 * PLACE + i % 2
                total[row, token] += (sums_of - 32 * sums[token]) * (sub.numpy()[row, group] & 63)
    want = GgufTensor(blocks, "Q5_K").dequantize().astype(np.float64) @ x.T.astype(np.float64)
    np.testing.assert_allclose(total, want, rtol=0, atol=2e-6 * np.abs(want).max())
