"""The assembly of lanes for Q5_K and Q6_K, which the interpreter does not run, on one warp against blocks."""

import numpy as np
import torch

from penstock.backends.cuda import _lane_blocks as lanes
from penstock.quant import GgufTensor, in_planes
from tests.gpu import ptx
from tests.ops.common import normal
from tests.weights.blocks import some_blocks

LANE = np.arange(32)
ROW, PLACE = LANE // 4, LANE % 4


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
