"""Ways that benchmarks/gpu_sizes.py tries: each has a block of K for every part, and launches of them are right."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from gpu_sizes import Address, Shape, Size, plain, restored, ways_of, with_launches

from penstock import ops
from penstock.backends.cuda import _matvec
from penstock.backends.cuda._codes import Arrays, block_codes
from penstock.backends.cuda._floats import MXFP4
from penstock.backends.cuda._launch import INTERPRETED
from tests.gpu.common import reference, run
from tests.ops.common import assert_close, i32, normal, quantized

GPT_OSS = {
    "qkv": Shape(8, 64, 5120, 2880, 1, 1, 1, False, False, False, 132),
    "gate and up": Shape(MXFP4, 32, 2880, 2880, 1, 4, 1, True, False, False, 132),
    "down": Shape(MXFP4, 32, 2880, 2880, 1, 1, 4, False, False, False, 132),
    "down of 8 rows": Shape(MXFP4, 32, 2880, 2880, 1, 8, 4, False, False, False, 132),
}


@pytest.mark.parametrize("name", GPT_OSS)
def test_ways_have_a_block_for_every_part(name):
    shape, used = GPT_OSS[name], Size(1, 16, 8, 1, 1)
    ways = ways_of(shape, used, 16)
    assert len(set(ways)) == len(ways) == 16
    assert used not in ways
    for way in ways:
        blocks = shape.slots * -(-shape.K // block_codes(shape.bits, shape.gs, way.tokens))
        each = -(-blocks // (way.warps * way.blocks * way.parts)) * way.warps * way.blocks
        assert (way.parts - 1) * each < blocks <= way.parts * each
        assert way.rows % ((8 if shape.gated else 16) * (8 if INTERPRETED else 1)) == 0
        assert way.parts == 1 or (shape.pairs == 1 and not shape.gated)


def test_what_is_sent_to_a_process_has_dtypes_and_alignments():
    numbers = torch.zeros(64, dtype=torch.int32)
    given = Arrays((numbers, None), *(None,) * 3, numbers[1:].view(torch.float32), *(None,) * 8)
    sent = plain((given, 5, 0.5))
    assert sent[0].w == (Address(torch.int32, 0), None)
    assert sent[0].x == Address(torch.float32, 4)
    back, *more = restored(sent)
    assert isinstance(back, Arrays)
    assert more == [5, 0.5]
    assert (back.w[0].dtype, back.w[0].data_ptr() % 16, back.w[1]) == (torch.int32, 0, None)
    assert (back.x.dtype, back.x.data_ptr() % 16) == (torch.float32, 4)


@pytest.mark.parametrize("parts", [2, 3])
def test_down_of_experts_with_biases_may_share_its_blocks(parts, rng):
    """Of three experts, one of them another rank's: its product and its bias are in no part."""
    E, dim, width = 5, 96, 544  # rows of down have 3 blocks of 256 codes
    sizes = {"gate": (width, dim), "up": (width, dim), "down": (dim, width)}
    call = {f"{name}_w": quantized(rng, E, *size, mode="mxfp4") for name, size in sizes.items()}
    call |= {f"{name}_bias": normal(rng, E, size[0]) for name, size in sizes.items()}
    call |= {"x": normal(rng, 1, dim), "ids": i32(4, 0, 2)[None], "weights": rng.random((1, 3), np.float32)}
    call |= {"slot_of": i32(-2, 1, 0, 3, 4), "residual": normal(rng, 1, dim)}
    in_use, seen = _matvec.config, []

    def shared(*given):
        used = in_use(*given)
        if Shape(*given).slots == 3:
            seen.append(used := _matvec._coded(1, used.R, 2, 1, parts))
        return used

    with with_launches(shared).taken():
        got = run(ops.moe_biased_forward, **call)
    assert len(seen) == 1
    assert_close("y", got, reference(ops.moe_biased_forward, **call), 8e-6)
