"""Calls of every op that takes a quantized weight, with weights that are not affine."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from penstock import ops
from penstock.quant import MODES, QuantizedTensor
from tests.ops.common import i32, normal, quantized

FLOAT_MODES = [mode for mode in MODES if mode != "affine"]
KINDS = [*FLOAT_MODES, "nvfp4 with global scales", "1 bit"]


def weight(rng: np.random.Generator, kind: str, *shape: int) -> QuantizedTensor:
    if kind == "1 bit":
        return quantized(rng, *shape, bits=1)
    made = quantized(rng, *shape, mode=kind.partition(" ")[0])
    if kind in MODES or len(shape) == 2:
        return made
    return replace(made, global_scale=rng.uniform(1500, 4000, shape[:-2]).astype(np.float32))


def calls(rng: np.random.Generator, kind: str, dtype: str, activations: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Ops with arguments: widths that are no multiple of 64 and of 512, few rows and many, absent experts."""

    def some(*shape: int) -> QuantizedTensor:
        return weight(rng, kind, *shape)

    rounding = {"activations": activations}
    if activations == "float32":
        yield ops.dequantize, {"w": some(3, 5, 96)}
        yield ops.dequantize, {"w": some(5, 96), "dtype": "bfloat16"}
        yield ops.quantized_embedding, {"token_ids": i32(4, -1, 0, 6), "table": some(7, 96), "dtype": dtype}
        kv_b, q = some(3 * (8 + 5), 64), normal(rng, 2, 3, 8, dtype=dtype)
        yield ops.mla_q_prime, {"q_nope": q, "kv_b": kv_b}
        yield ops.mla_out_per_head, {"v_combine": normal(rng, 2, 3, 64, dtype=dtype), "kv_b": kv_b, "nope": 8}
        yield ops.mla_q_prime, {"q_nope": normal(rng, 1, 3, 32, dtype=dtype), "kv_b": some(3, 64, 32)}
    for T, N, K in ((1, 21, 96), (3, 18, 1120), (19, 37, 160)):
        x, w = normal(rng, T, K, dtype=dtype), some(N, K)
        yield ops.quantized_matmul, {"x": x, "w": w, **rounding}
        if kind == "1 bit":  # the kernels of all other widths, compiled once more
            continue
        yield ops.fused_gate_up_swiglu, {"x": x, "gate_w": w, "up_w": some(N, K), **rounding}
    if kind == "1 bit":
        return
    x, norm = normal(rng, 2, 96, dtype=dtype), normal(rng, 96, dtype=dtype)
    yield ops.norm_matmul, {"x": x, "norm_weight": norm, "w": some(9, 96), **rounding}
    yield ops.matmul_add, {"residual": normal(rng, 2, 9, dtype=dtype), "x": x, "w": some(9, 96), **rounding}
    E, K, N = 5, 96, 64
    stacks = {"gate_w": some(E, N, K), "up_w": some(E, N, K), "down_w": some(E, K, N)}
    joined = {"gate_w": some(E, 2 * N, K), "up_w": None, "down_w": stacks["down_w"]}
    shared = {"shared_gate_w": some(N, K), "shared_up_w": some(N, K), "shared_down_w": some(K, N)}
    yield (
        ops.expert_matmul,
        {"x": normal(rng, K, dtype=dtype), "experts": stacks["gate_w"], "ids": i32(4, 0), **rounding},
    )
    slot_of = i32(3, -2, 0, 4, 1)
    for T in (1, 12):
        ids = np.stack([rng.permutation(E)[:2] for _ in range(T)]).astype(np.int32)
        ids[-1, 0] = -1 if T > 1 else ids[-1, 0]
        routing = {"x": normal(rng, T, K, dtype=dtype), "ids": ids, "weights": rng.random((T, 2), np.float32)}
        yield ops.moe_forward, {**routing, **stacks, "slot_of": slot_of, **rounding}
        yield ops.moe_forward, {**routing, **joined, **rounding}
        yield (
            ops.moe_shared_forward,
            {"residual": normal(rng, T, K, dtype=dtype), **routing, **stacks, **shared, **rounding},
        )
    if kind == "mxfp4":
        yield from _gpt_oss(rng, dtype, rounding)


def _gpt_oss(rng: np.random.Generator, dtype: str, rounding: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Experts with biases, and products as wide as those of its released sizes: 2880 is no multiple of 128."""
    E, dim, width = 3, 2880, 96
    shapes = {"gate": (width, dim), "up": (width, dim), "down": (dim, width)}
    stacks = {f"{part}_w": quantized(rng, E, *shape, mode="mxfp4") for part, shape in shapes.items()}
    biases = {f"{part}_bias": normal(rng, E, shape[0]) for part, shape in shapes.items()}
    for T in (1, 9):
        x = normal(rng, T, dim, dtype=dtype)
        yield ops.quantized_matmul, {"x": x, "w": quantized(rng, 21, dim, bits=8, group_size=64), **rounding}
        ids = np.stack([rng.permutation(E)[:2] for _ in range(T)]).astype(np.int32)
        routing = {"x": x, "ids": ids, "weights": rng.random((T, 2), np.float32)}
        yield ops.moe_biased_forward, {**routing, **stacks, **biases, **rounding}
