"""Calls at the sizes of models, which make launches choose other tiles than the small calls of tests/ops/cases.py.

They are compiled, not run (`tests.gpu.compile`): a line for each kernel whose tiles depend on sizes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

import penstock
from penstock import ops
from penstock.quant import BLOCK_TYPES, GgufTensor, QuantizedTensor, in_planes

FLOATS = ("mxfp4", "mxfp8", "nvfp4")


class Call(NamedTuple):
    """Calls of an op: its name, a function that makes one, and the arguments of that for each of them."""

    op: str
    run: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], ...] = ((),)


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def codes(*shape: int, bits: int = 4, gs: int = 64) -> QuantizedTensor:
    *lead, K = shape
    return QuantizedTensor(ints(*lead, K * bits // 32), half(*lead, K // gs), half(*lead, K // gs), bits, gs)


def float_codes(*shape: int, mode: str = "mxfp4") -> QuantizedTensor:
    *lead, K = shape
    bits, gs = 8 if mode == "mxfp8" else 4, 16 if mode == "nvfp4" else 32
    scales = torch.zeros(*lead, K // gs, dtype=torch.uint8)
    return QuantizedTensor(ints(*lead, K * bits // 32), scales, None, bits, gs, mode)


def paged(heads: int, of_keys: int, width: int, window: int | None = None) -> Any:
    pages = half(4, 256, of_keys * width)
    return ops.attention_paged(half(1, heads, width), pages, pages, ints(1, 4), ints(1), 0.5, window)


def prefill(T: int, heads: int, of_keys: int, width: int) -> Any:
    cache = half(512, of_keys * width)
    return ops.attention_prefill(half(T, heads, width), cache, cache, 0, 0.5)


def latents(T: int, lengths: Any) -> Any:
    return ops.mla_sdpa(half(T, 128, 512), half(T, 128, 64), half(256, 512), half(256, 64), lengths, 0.5)


def product(T: int, bits: int, dtype: str | None = None) -> Any:
    return ops.quantized_matmul(half(T, 512), codes(8448, 512, bits=bits), dtype=dtype)


def lanes(T: int, N: int, K: int = 2048, bits: int = 4, gs: int = 64, dtype: str | None = None) -> Any:
    with penstock.backend("cuda", variant="lanes"):
        return ops.quantized_matmul(half(T, K), codes(N, K, bits=bits, gs=gs), dtype=dtype)


def lanes_gate_up(T: int, N: int, bits: int = 4) -> Any:
    with penstock.backend("cuda", variant="lanes"):
        return ops.fused_gate_up_swiglu(half(T, 2048), codes(N, 2048, bits=bits), codes(N, 2048, bits=bits))


def lanes_experts(T: int, dim: int, width: int, bits: int = 4, gs: int = 64, E: int = 16) -> Any:
    """Five pairs of an expert are a tile of 8, more of them one of 16."""
    shapes = ((width, dim), (width, dim), (dim, width))
    stacks, own = ([codes(*lead, *shape, bits=bits, gs=gs) for shape in shapes] for lead in ((E,), ()))
    with penstock.backend("cuda", variant="lanes"):
        return ops.moe_shared_forward(
            torch.zeros(T, dim), half(T, dim), ints(T, 8), torch.zeros(T, 8), *stacks, *own, half(T)
        )


def blocks(kind: str, *shape: int) -> GgufTensor:
    known, (*lead, K) = BLOCK_TYPES[kind], shape
    return in_planes(GgufTensor(np.zeros((*lead, K // known.size * known.nbytes), np.uint8), kind), "torch")


def floats_product(T: int, mode: str, N: int = 12352, K: int = 2048) -> Any:
    return ops.quantized_matmul(half(T, K), float_codes(N, K, mode=mode))


def floats_experts(T: int, mode: str) -> Any:
    stacks = (float_codes(16, n, k, mode=mode) for n, k in ((256, 512), (256, 512), (512, 256)))
    return ops.moe_forward(half(T, 512), ints(T, 2), torch.zeros(T, 2), *stacks)


def blocks_product(T: int, kind: str, N: int = 2176, K: int = 1024) -> Any:
    return ops.quantized_matmul(half(T, K), blocks(kind, N, K))


def blocks_experts(T: int, kind: str) -> Any:
    stacks = (blocks(kind, 4, n, k) for n, k in ((256, 512), (256, 512), (512, 256)))
    return ops.moe_forward(half(T, 512), ints(T, 2), torch.zeros(T, 2), *stacks)


def lanes_blocks_experts(T: int, first: str, last: str) -> Any:
    """Of 16 experts; 8 tokens are in tiles of 8 pairs, 64 in those of 16."""
    stacks = (blocks(kind, 16, n, k) for kind, n, k in ((first, 512, 2048), (first, 512, 2048), (last, 2048, 512)))
    with penstock.backend("cuda", variant="lanes"):
        return ops.moe_forward(half(T, 2048), ints(T, 8), torch.zeros(T, 8), *stacks)


def blocks_latent(kind: str) -> Any:
    return ops.mla_q_prime(half(2, 16, 128), blocks(kind, 16 * 256, 512))


def experts(T: int, bits: int = 4) -> Any:
    weights = (codes(4, n, k, bits=bits) for n, k in ((256, 512), (256, 512), (512, 256)))
    return ops.moe_forward(half(T, 512), ints(T, 2), torch.zeros(T, 2), *weights)


def biased_experts(T: int, dim: int, width: int) -> Any:
    """gpt-oss: experts in mxfp4 with biases."""
    shapes = ((width, dim), (width, dim), (dim, width))
    stacks = [float_codes(4, n, k) for n, k in shapes]
    biases = [torch.zeros(4, n) for n, _ in shapes]
    return ops.moe_biased_forward(half(T, dim), ints(T, 4), torch.zeros(T, 4), *stacks, *biases)


def sinks(T: int) -> Any:
    pages, rows = half(4, 256, 8 * 64), half(T, 64, 64)
    return ops.attention_paged(rows, pages, pages, ints(T, 4), ints(T), 0.125, 128, sinks=torch.zeros(64))


def router(T: int, E: int, K: int, groups: int = 0) -> Any:
    if groups:
        return ops.moe_norm_group_route(half(T, K), half(K), codes(E, K, bits=8), None, groups, groups // 2, 8)
    return ops.moe_norm_route(half(T, K), half(K), codes(E + 1, K, bits=8), None, 8, 1, write_normed=True)


def routed_experts(T: int, E: int, K: int, N: int) -> Any:
    stacks, own = ([codes(*lead, *shape) for shape in ((N, K), (N, K), (K, N))] for lead in ((E,), ()))
    router = half(K), codes(E + 1, K, bits=8), None, 8
    return ops.moe_route_forward(torch.zeros(T, K), half(T, K), *router, *stacks, *own, True, propagate_nan=True)


def expanded() -> Any:
    caches = half(256, 512), half(256, 64)
    return ops.mla_prefill(half(128, 16, 128), half(128, 16, 64), *caches, 0, 0.5, codes(16 * 256, 512))


def keys_and_values(T: int, bits: int) -> Any:
    """Of latents, kv_b in codes of so many bits; 0: in mxfp4."""
    kv_b = codes(4 * 256, 512, bits=bits) if bits else float_codes(4 * 256, 512)
    return ops.mla_expand(half(T, 512), kv_b, heads=4, nope=128)


def dense_experts(T: int) -> Any:
    """With a dense shared expert, which a product of its own takes."""
    shapes = ((512, 1024), (512, 1024), (1024, 512))
    stacks, own = ([half(*lead, *shape) for shape in shapes] for lead in ((8,), ()))
    return ops.moe_shared_forward(
        torch.zeros(T, 1024), half(T, 1024), ints(T, 4), torch.zeros(T, 4), *stacks, *own, half(T)
    )


def chunks_of_runs() -> Any:
    gates = torch.zeros(128, 4, 128), torch.zeros(128, 4)
    sizes = (2, 4, 128, 128)
    return ops.gated_delta_net(
        torch.zeros(3, 4, 128, 128), half(128, 1024), *gates, *sizes, slots=ints(2), starts=ints(3)
    )


def convolved(*heads: int) -> Any:
    return ops.conv1d_causal(half(128, 8192), half(4, 3, 8192), half(8192, 4), ints(3), ints(4), "silu", *heads)


def chunks(*channels: int) -> Any:
    gates = torch.zeros(128, 4, *channels), torch.zeros(128, 4)
    return ops.gated_delta_net(torch.zeros(4, 128, 128), half(128, 1024), *gates, 2, 4, 128, 128)


def verified(B: int, each: int) -> Any:
    Hk, Hv, D, T = 16, 32, 128, B * each
    C = (2 * Hk + Hv) * D
    rows = half(T, C), half(T, Hv, D), half(T, Hv), half(T, Hv)
    states = half(B, 3 + 8, C), torch.zeros(B, Hv, D, D), torch.zeros(B, 8, 2, Hv)
    runs = ints(B), ints(B + 1), ints(B), ints(B)
    return ops.gated_delta_verify(*rows, *states, *runs, half(C, 4), torch.zeros(Hv), half(Hv), half(D), Hk)


def stepped(B: int, deterministic: bool) -> Any:
    Hk, Hv, D = 16, 32, 128
    C = (2 * Hk + Hv) * D
    rows, states = (half(B, C), half(B, Hv, D), half(B, Hv), half(B, Hv)), (half(B, 3, C), torch.zeros(B, Hv, D, D))
    with penstock.backend("cuda", deterministic=deterministic):
        weights = half(C, 4), torch.zeros(Hv), half(Hv), half(D)
        return ops.gated_delta_step(*rows, *states, ints(B), *weights, Hk)


def sampled(B: int, V: int, mode: str) -> Any:
    row, wide = ints(B), torch.zeros(B, dtype=torch.float64)
    return ops.sample_tokens(torch.zeros(B, V), row, wide, row, wide, wide, row.long(), mode=mode)


CALLS = (
    Call("attention_paged", paged, ((24, 8, 128), (16, 2, 256), (16, 2, 512), (16, 8, 256, 1024))),
    Call("attention_prefill", prefill, ((128, 16, 2, 64), (128, 16, 2, 128), (128, 16, 2, 256), (128, 16, 2, 512))),
    Call("attention_prefill", prefill, ((8, 16, 2, 256),)),
    Call("mla_sdpa", latents, ((1, 100), (64, 200))),
    Call("mla_prefill", expanded),
    Call("mla_expand", keys_and_values, ((100, 6), (16, 6), (100, 3), (100, 5), (100, 0), (100, 8))),
    Call("moe_shared_forward", dense_experts, ((20,), (100,))),
    Call("quantized_matmul", product, ((16, 4), (32, 4), (64, 4), (128, 4), (16, 8), (32, 8), (64, 8), (128, 8))),
    Call("quantized_matmul", product, ((64, 3), (128, 6), (64, 4, "float32"))),
    Call("quantized_matmul", lanes, ((8, 12352), (8, 2048, 4096), (16, 12352), (16, 2048, 4096), (32, 2048, 4096))),
    Call("quantized_matmul", lanes, ((8, 248320, 2048, 4, 64, "float32"), (32, 248320, 2048, 4, 64, "float32"))),
    Call("quantized_matmul", lanes, ((300, 257, 2048, 8, 64, "float32"), (16, 257, 2048, 8, 32, "float32"))),
    Call("quantized_matmul", lanes, ((8, 12352, 2048, 2), (16, 12352, 2048, 2, 128), (16, 2112, 2816, 4, 128))),
    Call("quantized_matmul", lanes, ((8, 1025, 704), (16, 12352, 2048, 8))),
    Call("quantized_matmul", floats_product, tuple((T, mode) for T in (1, 8, 16) for mode in FLOATS)),
    Call("quantized_matmul", floats_product, ((8, "mxfp4", 2048, 2880), (8, "mxfp8", 2048, 4096))),
    Call("quantized_matmul", floats_product, ((1, "nvfp4", 99, 96), (3, "nvfp4", 17408, 5120))),
    Call("moe_forward", floats_experts, tuple((T, mode) for T in (8, 64) for mode in FLOATS)),
    Call("quantized_matmul", blocks_product, tuple((T, kind) for T in (1, 8, 32, 300) for kind in BLOCK_TYPES)),
    Call("moe_forward", blocks_experts, ((1, "Q6_K"), (64, "Q6_K"))),
    Call(
        "moe_forward",
        lanes_blocks_experts,
        tuple((T, *kinds) for T in (8, 64) for kinds in (("Q4_K", "Q6_K"), ("Q6_K", "Q5_K"), ("Q5_K", "Q4_K"))),
    ),
    Call("mla_q_prime", blocks_latent, (("Q4_K",),)),
    Call("quantized_embedding", lambda: ops.quantized_embedding(ints(3), blocks("Q6_K", 64, 256), "bfloat16")),
    Call("dequantize", lambda: ops.dequantize(blocks("Q6_K", 64, 256))),
    Call("fused_gate_up_swiglu", lanes_gate_up, ((8, 12352), (16, 12352), (8, 1024), (16, 1024), (16, 1024, 8))),
    Call("moe_shared_forward", lanes_experts, ((8, 2048, 512), (16, 2048, 512), (64, 2048, 512, 2), (64, 2816, 704))),
    Call("moe_forward", experts, ((12,), (64,), (160,), (300,), (300, 8), (160, 3), (300, 6))),
    Call("moe_biased_forward", biased_experts, ((1, 2880, 2880), (8, 2880, 2880), (300, 2880, 2880))),
    Call("attention_paged", sinks, ((1,), (8,))),
    Call("quantized_matmul", lanes, ((8, 5120, 2880, 8), (8, 2880, 4096, 8))),
    Call("moe_norm_route", router, ((1, 256, 2048), (8, 256, 2048))),
    Call("moe_norm_group_route", router, ((1, 256, 7168, 8),)),
    Call(
        "moe_route_forward",
        routed_experts,
        ((1, 256, 2048, 512), (1, 512, 2048, 1024), (4, 256, 2048, 512), (8, 256, 2048, 512), (32, 256, 2048, 512)),
    ),
    Call("gated_delta_net", chunks, ((), (128,))),
    Call("gated_delta_net", chunks_of_runs),
    Call("gated_delta_verify", verified, ((1, 4), (8, 2))),
    Call("gated_delta_step", stepped, ((1, True), (1, False), (48, False))),
    Call("conv1d_causal", convolved, ((), (16, 128))),
    Call(
        "sample_tokens", sampled, ((256, 248320, "full"), (32, 248320, "full"), (1, 262144, "full"), (1, 32001, "full"))
    ),
    Call("sample_tokens", sampled, ((1, 248320, "top_k"), (256, 248320, "top_k"), (32, 248320, "plain"))),
)
