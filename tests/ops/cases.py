"""One table of calls for every op: small, every axis another size, one of them ragged, decode- and prefill-shaped.

A case makes the arguments by name. Tests use the table for what must hold of every op (purity, `out=`, torch tensors)
and to compare kernels with the definition. `rel` bounds |kernel − definition| in float32: per element against max(|y|,
1), or against the largest output of the call where `whole` is set (sums that may cancel); 0 means the same bits.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock import ops
from penstock.ops import rope_inv_freq
from tests.ops.common import DTYPES, normal, quantized

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Case:
    op: str
    label: str
    make: Callable[..., Arguments]
    sizes: tuple[Any, ...]
    rel: float
    whole: bool
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"

    def arguments(self, dtype: str) -> Arguments:
        rng = np.random.default_rng(zlib.crc32(f"{self}-{dtype}".encode()))
        return self.make(rng, dtype, *self.sizes)


CASES: list[Case] = []


def case(
    *names: str,
    sizes: dict[str, tuple[Any, ...]],
    rel: float = 2e-6,
    whole: bool = False,
    dtypes: tuple[str, ...] = DTYPES,
) -> Callable[[Callable[..., Arguments]], Callable[..., Arguments]]:
    """Register a maker `(rng, dtype, *sizes) → arguments` for each op and each labelled tuple of sizes."""

    def register(make: Callable[..., Arguments]) -> Callable[..., Arguments]:
        CASES.extend(
            Case(name, label, make, size, rel, whole, dtypes) for name in names for label, size in sizes.items()
        )
        return make

    return register


def by_op(name: str) -> list[Case]:
    return [case for case in CASES if case.op == name]


def ids_of(rng: np.random.Generator, rows: int, k: int, experts: int) -> np.ndarray:
    """k distinct experts per row."""
    return np.stack([rng.permutation(experts)[:k] for _ in range(rows)]).astype(np.int32).reshape(rows, k)


# a residual stream of another float than the activations
HALVES = ("bfloat16", "float16")
STREAMS = {"stream": (5, 61), "stream-one": (1, 64), "stream-tall": (130, 33), "stream-empty": (0, 7)}
ROWS = {"decode": (1, 64), "ragged": (5, 61), "wide": (3, 2816), "one": (2, 1), "tall": (130, 33), "empty": (0, 7)}

# -- elementwise -----------------------------------------------------------------------------------------------------


@case("residual_add", sizes=ROWS, rel=0)
def _residual_add(rng, dtype, rows, dim):
    return {"a": normal(rng, rows, dim, dtype=dtype), "b": normal(rng, rows, dim, dtype=dtype)}


@case("residual_add", sizes=STREAMS, rel=0)
def _residual_add_stream(rng, dtype, rows, dim):
    return {"a": normal(rng, rows, dim), "b": normal(rng, rows, dim, dtype=dtype)}


@case("residual_add", sizes={"half-stream": (5, 61)}, rel=0, dtypes=HALVES)
def _residual_add_half_stream(rng, dtype, rows, dim):
    return {"a": normal(rng, rows, dim, dtype=dtype), "b": normal(rng, rows, dim)}


@case("add", "mul", sizes=ROWS, rel=0)
def _whole_operand(rng, dtype, rows, dim):
    return {"a": normal(rng, rows, dim, dtype=dtype), "b": normal(rng, rows, dim, dtype=dtype)}


@case("add", "mul", sizes={"vector": (5, 61)}, rel=0)
def _vector_operand(rng, dtype, rows, dim):
    return {"a": normal(rng, rows, dim, dtype=dtype), "b": normal(rng, dim, dtype="float32")}


@case("add", "mul", sizes={"number": (5, 61)}, rel=1e-7)
def _number_operand(rng, dtype, rows, dim):
    return {"a": normal(rng, rows, dim, dtype=dtype), "b": 53.06599665}


@case("gelu_tanh", sizes=ROWS)
def _unary(rng, dtype, rows, dim):
    return {"x": normal(rng, rows, dim, dtype=dtype, scale=3)}


@case("swiglu", "geglu", sizes=ROWS)
def _gated(rng, dtype, rows, dim):
    return {"gate": normal(rng, rows, dim, dtype=dtype, scale=3), "up": normal(rng, rows, dim, dtype=dtype)}


@case("softcap", sizes=ROWS)
def _softcap(rng, dtype, rows, dim):
    return {"x": normal(rng, rows, dim, dtype=dtype, scale=20), "cap": 30.0}


@case("sigmoid_gate", sizes=ROWS)
def _sigmoid_gate(rng, dtype, rows, dim):
    return {"x": normal(rng, rows, dim, dtype=dtype), "gate": normal(rng, rows, dim, dtype=dtype, scale=3)}


@case("columns", sizes={"ragged": (5, 61, 7, 19), "one": (1, 3, 0, 3), "last": (4, 9, 8, 9), "empty": (0, 5, 1, 2)})
def _columns(rng, dtype, T, N, start, stop):
    return {"x": normal(rng, T, N, dtype=dtype), "start": start, "stop": stop}


@case("columns", sizes={"rounded": (5, 61, 7, 19)})
def _columns_rounded(rng, dtype, T, N, start, stop):
    return {"x": normal(rng, T, N), "start": start, "stop": stop, "dtype": dtype}


SPLITS = {"two": (3, 61, 5, 0, 0), "ragged": (5, 2049, 7, 19, 0), "four": (2, 9, 8, 1, 3), "empty": (0, 5, 1, 2, 1)}


@case("split_columns", sizes=SPLITS)
def _split_columns(rng, dtype, T, first, second, third, fourth):
    counts = {"first": first, "second": second, "third": third, "fourth": fourth}
    return {"x": normal(rng, T, sum(counts.values()), dtype=dtype), **counts}


EXPERT_SUMS = {"decode": (1, 8, 64), "ragged": (5, 3, 61), "wide": (2, 8, 2816), "one": (3, 1, 1), "empty": (0, 2, 5)}


@case("weighted_sum", sizes={**EXPERT_SUMS, "none": (2, 0, 5)})
def _weighted_sum(rng, dtype, rows, k, dim):
    return {"expert_out": normal(rng, rows, k, dim, dtype=dtype), "weights": normal(rng, rows, k, scale=0.3)}


# -- norm ------------------------------------------------------------------------------------------------------------


@case("rms_norm", sizes=ROWS)
def _rms_norm(rng, dtype, rows, dim):
    return {"x": normal(rng, rows, dim, dtype=dtype), "weight": normal(rng, dim, dtype="bfloat16"), "eps": 1e-5}


@case("rms_norm", sizes={"heads": (3, 5, 128), "bare": (2, 3, 31)})
def _rms_norm_heads(rng, dtype, rows, heads, dim):
    return {"x": normal(rng, rows, heads, dim, dtype=dtype)}


@case("rms_norm_mul", sizes=ROWS)
def _rms_norm_mul(rng, dtype, rows, dim):
    x, scale = normal(rng, rows, dim, dtype=dtype), normal(rng, rows, dim, dtype=dtype)
    return {"x": x, "norm_weight": normal(rng, dim, dtype="float16"), "scale": scale}


@case("rms_norm_triple", sizes=ROWS)
def _rms_norm_triple(rng, dtype, rows, dim):
    weights = {name: normal(rng, dim, dtype=kind) for name, kind in zip(("wa", "wb", "wc"), DTYPES, strict=True)}
    return {"x": normal(rng, rows, dim, dtype=dtype), **weights}


@case("rms_norm_qk", sizes={"decode": (1, 4, 128, 96), "ragged": (5, 3, 20, 7), "empty": (0, 2, 8, 3)})
def _rms_norm_qk(rng, dtype, rows, heads, key_dim, rest):
    x = normal(rng, rows, 2 * heads * key_dim + rest + 2, dtype=dtype)
    return {"x": x, "num_k_heads": heads, "key_dim": key_dim, "key_offset": heads * key_dim + 2}


@case("gated_rms_norm", sizes={"decode": (1, 4, 128), "ragged": (5, 3, 61), "empty": (0, 2, 8)})
def _gated_rms_norm(rng, dtype, rows, heads, dim):
    values, z = normal(rng, rows, heads, dim, dtype=dtype), normal(rng, rows, heads, dim, dtype=dtype, scale=3)
    return {"values": values, "z": z, "weight": normal(rng, dim, dtype="bfloat16")}


@case("gated_rms_norm", sizes={"sigmoid": (5, 3, 61)})
def _gated_rms_norm_sigmoid(rng, dtype, rows, heads, dim):
    return _gated_rms_norm(rng, dtype, rows, heads, dim) | {"act": "sigmoid"}


@case("norm_add", "residual_norm", sizes=ROWS)
def _norm_add(rng, dtype, rows, dim):
    residual, x = normal(rng, rows, dim, dtype=dtype), normal(rng, rows, dim, dtype=dtype)
    return {"residual": residual, "x": x, "weight": normal(rng, dim, dtype="bfloat16")}


@case("residual_norm", sizes={"sum": (5, 61), "sum-wide": (1, 2816)})
def _residual_norm_sum(rng, dtype, rows, dim):
    return {**_norm_add(rng, dtype, rows, dim), "write_sum": True}


@case("norm_add_scalar", "residual_norm_scalar", sizes=ROWS)
def _with_scalar(rng, dtype, rows, dim):
    return {**_norm_add(rng, dtype, rows, dim), "scalar": normal(rng, 1, dtype="bfloat16")}


@case("norm_add_scalar", "residual_norm_scalar", sizes={"vector": (5, 61)})
def _with_vector(rng, dtype, rows, dim):
    return {**_norm_add(rng, dtype, rows, dim), "scalar": normal(rng, dim)}


@case("norm_add_scalar", "residual_norm_scalar", sizes={"number": (5, 61)})
def _with_number(rng, dtype, rows, dim):
    return {**_norm_add(rng, dtype, rows, dim), "scalar": 0.75}


WSUMS = {label: size for label, size in EXPERT_SUMS.items() if label != "one"}


@case("moe_wsum_norm_add", sizes=WSUMS, rel=4e-6)
def _moe_wsum_norm_add(rng, dtype, rows, k, dim):
    residual, weight = normal(rng, rows, dim, dtype=dtype), normal(rng, dim)
    return {**_weighted_sum(rng, dtype, rows, k, dim), "residual": residual, "norm_weight": weight}


@case("moe_wsum_dnorm_add", sizes=WSUMS, rel=4e-6)
def _moe_wsum_dnorm_add(rng, dtype, rows, k, dim):
    names = {"res_norm_weight": normal(rng, dim), "moe_norm_weight": normal(rng, dim, dtype="bfloat16")}
    return {**_weighted_sum(rng, dtype, rows, k, dim), "residual": normal(rng, rows, dim, dtype=dtype), **names}


@case("post_attn_triple_norm", sizes=ROWS, rel=4e-6)
def _post_attn_triple_norm(rng, dtype, rows, dim):
    rows_of = {name: normal(rng, rows, dim, dtype=dtype) for name in ("hidden", "attn_out")}
    return {**rows_of, **{name: normal(rng, dim) for name in ("post_attn_w", "wa", "wb", "wc")}}


@case("post_ff_norm2_endlayer", sizes=ROWS, rel=4e-6)
def _post_ff_norm2_endlayer(rng, dtype, rows, dim):
    rows_of = {name: normal(rng, rows, dim, dtype=dtype) for name in ("addend", "moe_accum", "residual")}
    return {**rows_of, "w2": normal(rng, dim), "w3": normal(rng, dim, dtype="bfloat16"), "layer_scalar": normal(rng, 1)}


@case("post_ff_norm2_endlayer", sizes={"hidden-only": (5, 61)}, rel=4e-6)
def _post_ff_hidden_only(rng, dtype, rows, dim):
    return {**_post_ff_norm2_endlayer(rng, dtype, rows, dim), "return_mid": False}


@case("post_ff_norm2_endlayer", sizes={"addend-normed": (5, 61)}, rel=4e-6)
def _post_ff_addend_normed(rng, dtype, rows, dim):
    return {**_post_ff_norm2_endlayer(rng, dtype, rows, dim), "w1": normal(rng, dim)}


@case("moe_wsum_post_ff_norm2_endlayer", sizes=WSUMS, rel=6e-6)
def _moe_wsum_post_ff(rng, dtype, rows, k, dim):
    rows_of = {name: normal(rng, rows, dim, dtype=dtype) for name in ("addend", "residual")}
    weights = {"w2": normal(rng, dim), "w3": normal(rng, dim), "layer_scalar": normal(rng, dim)}
    return {**_weighted_sum(rng, dtype, rows, k, dim), **rows_of, **weights}


@case("rms_norm", sizes=STREAMS, dtypes=HALVES)
def _rms_norm_stream(rng, dtype, rows, dim):
    return {**_rms_norm(rng, "float32", rows, dim), "dtype": dtype}


@case("rms_norm_triple", sizes=STREAMS, dtypes=HALVES)
def _rms_norm_triple_stream(rng, dtype, rows, dim):
    return {**_rms_norm_triple(rng, "float32", rows, dim), "dtype": dtype}


@case("norm_add", "residual_norm", sizes=STREAMS, dtypes=HALVES)
def _norm_add_stream(rng, dtype, rows, dim):
    return {**_norm_add(rng, dtype, rows, dim), "residual": normal(rng, rows, dim)}


@case("residual_norm", sizes={f"sum-{label}": size for label, size in STREAMS.items()}, dtypes=HALVES)
def _residual_norm_sum_stream(rng, dtype, rows, dim):
    return {**_norm_add_stream(rng, dtype, rows, dim), "write_sum": True}


@case("norm_add_scalar", sizes=STREAMS, dtypes=HALVES)
def _with_scalar_stream(rng, dtype, rows, dim):
    return {**_with_scalar(rng, dtype, rows, dim), "residual": normal(rng, rows, dim)}


@case("post_attn_triple_norm", sizes=STREAMS, rel=4e-6, dtypes=HALVES)
def _post_attn_triple_norm_stream(rng, dtype, rows, dim):
    return {**_post_attn_triple_norm(rng, dtype, rows, dim), "hidden": normal(rng, rows, dim)}


@case("post_ff_norm2_endlayer", sizes=STREAMS, rel=4e-6, dtypes=HALVES)
def _post_ff_norm2_endlayer_stream(rng, dtype, rows, dim):
    return {**_post_ff_norm2_endlayer(rng, dtype, rows, dim), "residual": normal(rng, rows, dim)}


@case("post_ff_norm2_endlayer", sizes={"stream-addend-normed": (5, 61)}, rel=4e-6, dtypes=HALVES)
def _post_ff_addend_normed_stream(rng, dtype, rows, dim):
    return {**_post_ff_addend_normed(rng, dtype, rows, dim), "residual": normal(rng, rows, dim), "return_mid": False}


# -- linear and embed ------------------------------------------------------------------------------------------------


@case(
    "dequantize",
    sizes={f"{bits}bit": (bits, gs) for bits, gs in ((2, 32), (3, 64), (4, 128), (5, 32), (6, 64), (8, 32))},
    rel=0,
)
def _dequantize(rng, dtype, bits, gs):
    return {"w": quantized(rng, 2, 5, 384, bits=bits, group_size=gs), "dtype": dtype}


MATMULS = {
    "decode": (1, 61, 192),
    "ragged": (5, 7, 96),
    "prefill": (37, 33, 128),
    "row": (1, 1, 64),
    "empty": (0, 3, 32),
}


@case("matmul", sizes=MATMULS, rel=4e-6, whole=True)
def _matmul(rng, dtype, T, N, K):
    return {"x": normal(rng, T, K, dtype=dtype), "w": normal(rng, N, K, dtype="float16", scale=K**-0.5)}


@case("matmul", sizes={"bfloat16": (3, 61, 80), "float32": (3, 61, 83)}, rel=4e-6, whole=True)
def _matmul_kinds(rng, dtype, T, N, K):
    kind = "bfloat16" if K % 2 == 0 else "float32"
    return {"x": normal(rng, T, K, dtype=dtype), "w": normal(rng, N, K, dtype=kind, scale=K**-0.5), "dtype": "float32"}


@case("bf16_matmul", sizes=MATMULS, rel=4e-6, whole=True)
def _bf16_matmul(rng, dtype, T, N, K):
    return {
        "x": normal(rng, T, K, dtype=dtype),
        "w": normal(rng, N, K, dtype="bfloat16", scale=K**-0.5),
        "dtype": "float32",
    }


@case("quantized_matmul", sizes=MATMULS, rel=4e-6, whole=True)
def _quantized_matmul(rng, dtype, T, N, K):
    return {"x": normal(rng, T, K, dtype=dtype), "w": quantized(rng, N, K)}


BITS = {f"{bits}bit-g{gs}": (bits, gs) for bits in (2, 3, 4, 5, 6, 8) for gs in (32, 64, 128)}


@case(
    "quantized_matmul",
    sizes={f"{label}-T{T}": (T, *size) for label, size in BITS.items() for T in (3, 19)},
    rel=4e-6,
    whole=True,
)
def _quantized_matmul_bits(rng, dtype, T, bits, gs):
    kind = DTYPES[bits % 3]
    return {"x": normal(rng, T, 256, dtype=dtype), "w": quantized(rng, 13, 256, bits=bits, group_size=gs, dtype=kind)}


@case(
    "quantized_matmul",
    sizes={f"int8-{label}-T{T}": (T, *size) for label, size in BITS.items() for T in (2, 19)},
    rel=4e-6,
    whole=True,
)
def _quantized_matmul_int8(rng, dtype, T, bits, gs):
    return {**_quantized_matmul_bits(rng, dtype, T, bits, gs), "activations": "int8", "dtype": "float32"}


@case("fused_gate_up_swiglu", sizes=MATMULS, rel=4e-6, whole=True)
def _fused_gate_up_swiglu(rng, dtype, T, N, K):
    return {"x": normal(rng, T, K, dtype=dtype), "gate_w": quantized(rng, N, K), "up_w": quantized(rng, N, K)}


@case("fused_gate_up_geglu", sizes=MATMULS, rel=4e-6, whole=True)
def _fused_gate_up_geglu(rng, dtype, T, N, K):
    return _fused_gate_up_swiglu(rng, dtype, T, N, K)


@case("norm_matmul", sizes=MATMULS, rel=4e-6, whole=True)
def _norm_matmul(rng, dtype, T, N, K):
    return {**_quantized_matmul(rng, dtype, T, N, K), "norm_weight": normal(rng, K, dtype="bfloat16"), "eps": 1e-5}


@case("norm_matmul", sizes={f"dense-{label}": size for label, size in MATMULS.items()}, rel=4e-6, whole=True)
def _norm_matmul_dense(rng, dtype, T, N, K):
    return {**_bf16_matmul(rng, dtype, T, N, K), "norm_weight": normal(rng, K), "eps": 1e-5, "dtype": None}


# results are of normed rows that were rounded: one of them may go the other way
NORMED = {"stream": (1, 61, 192), "stream-few": (5, 7, 96), "stream-many": (37, 33, 128), "stream-row": (1, 1, 64)}


@case("norm_matmul", sizes=NORMED, rel=4e-3, whole=True, dtypes=HALVES)
def _norm_matmul_stream(rng, dtype, T, N, K):
    return {**_norm_matmul(rng, "float32", T, N, K), "normed": dtype, "dtype": "float32"}


@case("norm_matmul", sizes={f"dense-{label}": size for label, size in NORMED.items()}, whole=True, dtypes=HALVES)
def _norm_matmul_dense_stream(rng, dtype, T, N, K):
    return {**_norm_matmul_dense(rng, "float32", T, N, K), "normed": dtype}


@case("matmul_add", sizes=NORMED, rel=4e-6, whole=True, dtypes=HALVES)
def _matmul_add_stream(rng, dtype, T, N, K):
    return {**_matmul_add(rng, dtype, T, N, K), "residual": normal(rng, T, N)}


@case("matmul_add", sizes=MATMULS, rel=4e-6, whole=True)
def _matmul_add(rng, dtype, T, N, K):
    return {**_quantized_matmul(rng, dtype, T, N, K), "residual": normal(rng, T, N, dtype=dtype)}


@case("matmul_add", sizes={f"dense-{label}": size for label, size in MATMULS.items()}, rel=4e-6, whole=True)
def _matmul_add_dense(rng, dtype, T, N, K):
    dense = normal(rng, N, K, dtype="float16", scale=K**-0.5)
    return {"x": normal(rng, T, K, dtype=dtype), "w": dense, "residual": normal(rng, T, N, dtype=dtype)}


@case(
    "matmul_add", sizes={"bias": (1, 37, 96), "bias-few": (5, 33, 64), "bias-many": (20, 13, 64)}, rel=4e-6, whole=True
)
def _matmul_add_bias(rng, dtype, T, N, K):
    return {**_matmul_add_stream(rng, dtype, T, N, K), "bias": normal(rng, N)}


@case("matmul_add", sizes={"dense-bias": (1, 37, 96), "dense-bias-many": (20, 13, 64)}, rel=4e-6, whole=True)
def _matmul_add_dense_bias(rng, dtype, T, N, K):
    return {**_matmul_add_dense(rng, dtype, T, N, K), "bias": normal(rng, N, dtype="bfloat16")}


@case("expert_matmul", sizes={"shared": (5, 3, 13, 64)}, rel=4e-6, whole=True)
def _expert_matmul(rng, dtype, E, k, N, K):
    return {"x": normal(rng, K, dtype=dtype), "experts": quantized(rng, E, N, K), "ids": ids_of(rng, 1, k, E)[0]}


@case("expert_matmul", sizes={"sequence": (4, 9, 32)}, rel=4e-6, whole=True)
def _expert_matmul_sequence(rng, dtype, E, N, K):
    return {"x": normal(rng, E, K, dtype=dtype), "experts": [quantized(rng, N, K, bits=8) for _ in range(E)]}


@case("expert_matmul", sizes={"stack": (6, 2, 3, 7, 32)}, rel=4e-6, whole=True)
def _expert_matmul_stack(rng, dtype, E, T, k, N, K):
    slot_of = rng.permutation(E).astype(np.int32)
    x = normal(rng, T, k, K, dtype=dtype)
    return {"x": x, "experts": quantized(rng, E, N, K, bits=2), "ids": ids_of(rng, T, k, E), "slot_of": slot_of}


@case("embedding", sizes={"some": (7, 11, 20), "empty": (0, 3, 5)}, rel=0)
def _embedding(rng, dtype, T, vocab, dim):
    return {"token_ids": rng.integers(0, vocab, T).astype(np.int32), "table": normal(rng, vocab, dim, dtype=dtype)}


@case("embedding", sizes={"no-token": (7, 11, 20)}, rel=0)
def _embedding_of_no_token(rng, dtype, T, vocab, dim):
    call = _embedding(rng, dtype, T, vocab, dim)
    call["token_ids"][::3] = -1
    return call | {"dtype": "bfloat16"}


@case("quantized_embedding", sizes={"no-token": (5, 9, 3), "no-token-alone": (1, 4, 4)}, rel=0)
def _quantized_embedding_of_no_token(rng, dtype, T, vocab, bits):
    call = _quantized_embedding(rng, dtype, T, vocab, bits)
    call["token_ids"][::3] = -1
    return call


@case("quantized_embedding", sizes={f"{bits}bit": (5, 9, bits) for bits in (2, 3, 4, 5, 6, 8)}, rel=0)
def _quantized_embedding(rng, dtype, T, vocab, bits):
    ids = rng.integers(0, vocab, T).astype(np.int32)
    return {"token_ids": ids, "table": quantized(rng, vocab, 96, bits=bits), "dtype": dtype}


# -- moe -------------------------------------------------------------------------------------------------------------

ROUTES = {
    "decode": (1, 128, 8),
    "ragged": (5, 33, 3),
    "all": (3, 4, 4),
    "one": (2, 1, 1),
    "many": (70, 512, 10),
    "empty": (0, 8, 2),
}
F32 = ("float32",)


@case("moe_route", sizes=ROUTES, dtypes=F32)
def _moe_route(rng, dtype, T, E, k):
    scale = normal(rng, E, dtype="bfloat16")
    return {"logits": normal(rng, T, E, scale=2), "per_expert_scale": scale, "top_k": k, "propagate_nan": T > 1}


@case("moe_softmax_topk", sizes=ROUTES, dtypes=F32)
def _moe_softmax_topk(rng, dtype, T, E, k):
    return {"logits": normal(rng, T, E, scale=2), "k": k, "propagate_nan": T > 1}


@case(
    "moe_group_route",
    sizes={"decode": (1, 32, 4, 2, 5), "ragged": (5, 24, 3, 2, 4), "flat": (3, 7, 1, 1, 3)},
    dtypes=F32,
)
def _moe_group_route(rng, dtype, T, E, G, keep, k):
    routing = {"n_group": G, "topk_group": keep, "top_k": k, "routed_scaling_factor": 2.5, "propagate_nan": T > 1}
    return {"logits": normal(rng, T, E), "bias": normal(rng, E, scale=0.1), **routing}


@case("moe_group_route", sizes={"faint": (3, 9, 1, 1, 4)}, dtypes=F32)
def _moe_group_route_faint(rng, dtype, T, E, G, keep, k):
    """Scores so small that what is added to their sum counts."""
    call = _moe_group_route(rng, dtype, T, E, G, keep, k)
    return {**call, "logits": call["logits"] - 12, "norm_eps": 1e-6}


INACTIVE = {"inactive": (5, 33, 3), "inactive-alone": (1, 8, 2)}


def _inactive(call):
    """Every third row, from the first on, is of no sequence, whatever its logits are."""
    T = len(call["logits"])
    call["logits"][0] = np.nan
    return {**call, "active": np.arange(T, dtype=np.int32) % 3 - 1, "propagate_nan": True}


@case("moe_route", sizes=INACTIVE, dtypes=F32)
def _moe_route_inactive(rng, dtype, T, E, k):
    return _inactive(_moe_route(rng, dtype, T, E, k))


@case("moe_softmax_topk", sizes=INACTIVE, dtypes=F32)
def _moe_softmax_topk_inactive(rng, dtype, T, E, k):
    return _inactive(_moe_softmax_topk(rng, dtype, T, E, k))


@case("moe_group_route", sizes={"inactive": (5, 24, 3, 2, 4), "inactive-alone": (1, 8, 2, 1, 2)}, dtypes=F32)
def _moe_group_route_inactive(rng, dtype, T, E, G, keep, k):
    return _inactive(_moe_group_route(rng, dtype, T, E, G, keep, k))


# T, E, k, scores, K
NORM_ROUTES = {
    "decode": (1, 40, 4, 1, 128),
    "ragged": (5, 33, 3, 2, 64),
    "all": (1, 4, 4, 0, 64),
    "one": (2, 1, 1, 1, 64),
    "long": (1, 257, 9, 3, 2048),
    "empty": (0, 8, 2, 1, 64),
}


@case("moe_norm_route", sizes=NORM_ROUTES, rel=1e-5, whole=True)
def _moe_norm_route(rng, dtype, T, E, k, scores, K):
    rows = {"x": normal(rng, T, K, dtype=dtype), "norm_weight": normal(rng, K, dtype=dtype), "eps": 1e-5}
    w = quantized(rng, E + scores, K, bits=8)
    return {**rows, "w": w, "per_expert_scale": None, "top_k": k, "scores": scores, "write_normed": scores > 0}


@case("moe_norm_route", sizes={f"dense-{label}": size for label, size in NORM_ROUTES.items()}, rel=1e-5, whole=True)
def _moe_norm_route_dense(rng, dtype, T, E, k, scores, K):
    w = normal(rng, E + scores, K, dtype="bfloat16", scale=K**-0.5)
    more = {"per_expert_scale": normal(rng, E, dtype="bfloat16"), "propagate_nan": True}
    return {**_moe_norm_route(rng, dtype, T, E, k, scores, K), "w": w, **more}


@case("moe_norm_route", sizes={"plain": (1, 24, 5, 0, 96), "plain-ragged": (3, 24, 5, 3, 96)}, rel=1e-5, whole=True)
def _moe_norm_route_of_normed_rows(rng, dtype, T, E, k, scores, K):
    w = quantized(rng, E + scores, K, bits=4, group_size=32)
    call = {**_moe_norm_route(rng, dtype, T, E, k, scores, K), "w": w, "norm_weight": None, "write_normed": False}
    return {**call, "active": np.arange(T, dtype=np.int32) - 1, "propagate_nan": True}


@case("moe_norm_route", sizes={"bias": (1, 32, 4, 0, 96), "bias-ragged": (3, 24, 5, 2, 64)}, rel=1e-5, whole=True)
def _moe_norm_route_bias(rng, dtype, T, E, k, scores, K):
    return {**_moe_norm_route(rng, dtype, T, E, k, scores, K), "logit_bias": normal(rng, E)}


@case("moe_norm_route", sizes={"dense-bias": (1, 32, 4, 3, 96)}, rel=1e-5, whole=True)
def _moe_norm_route_dense_bias(rng, dtype, T, E, k, scores, K):
    return {**_moe_norm_route_dense(rng, dtype, T, E, k, scores, K), "logit_bias": normal(rng, E, dtype="bfloat16")}


@case(
    "moe_norm_group_route",
    sizes={"decode": (1, 32, 4, 2, 5, 0, 128), "ragged": (5, 24, 3, 2, 4, 1, 64), "flat": (1, 39, 1, 1, 3, 2, 64)},
    rel=1e-5,
    whole=True,
)
def _moe_norm_group_route(rng, dtype, T, E, G, keep, k, scores, K):
    call = _moe_norm_route(rng, dtype, T, E, k, scores, K)
    del call["per_expert_scale"]
    routing = {"n_group": G, "topk_group": keep, "top_k": k, "routed_scaling_factor": 2.5, "propagate_nan": T > 1}
    return {**call, **routing, "bias": normal(rng, E, scale=0.1), "write_normed": True}


@case("moe_norm_group_route", sizes={"faint": (1, 39, 1, 1, 3, 0, 64)}, rel=1e-5, whole=True)
def _moe_norm_group_route_faint(rng, dtype, T, E, G, keep, k, scores, K):
    return {**_moe_norm_group_route(rng, dtype, T, E, G, keep, k, scores, K), "norm_eps": 0.25}


@case("moe_normalize_weights", sizes={"decode": (1, 8), "ragged": (5, 3), "empty": (0, 2)}, dtypes=F32)
def _moe_normalize_weights(rng, dtype, T, k):
    weights = np.abs(normal(rng, T, k))
    weights[2:3] = 0
    return {"weights": weights}


EXPERTS = {"decode": (1, 5, 3, 33, 64, 40), "ragged": (6, 4, 2, 32, 96, 7), "prefill": (23, 3, 2, 64, 32, 5)}


@case("expert_gate_up", sizes=EXPERTS, rel=4e-6, whole=True)
def _expert_gate_up(rng, dtype, T, E, k, N, K, dim):
    stacks = {name: quantized(rng, E, N, K) for name in ("gate_w", "up_w")}
    return {"x": normal(rng, T, K, dtype=dtype), **stacks, "ids": ids_of(rng, T, k, E)}


@case("expert_gate_up", sizes={f"joined-{label}": size for label, size in EXPERTS.items()}, rel=4e-6, whole=True)
def _expert_gate_up_joined(rng, dtype, T, E, k, N, K, dim):
    joined = normal(rng, E, 2 * N, K, dtype="bfloat16", scale=K**-0.5)
    slot_of = np.concatenate([rng.permutation(E), [-1]]).astype(np.int32)
    x, ids = normal(rng, T, K, dtype=dtype), ids_of(rng, T, k, E)
    return {"x": x, "gate_w": joined, "up_w": None, "ids": ids, "slot_of": slot_of, "act": "gelu_tanh"}


@case("expert_gate_up", sizes={f"int8-{label}": size for label, size in EXPERTS.items()}, rel=4e-6, whole=True)
def _expert_gate_up_int8(rng, dtype, T, E, k, N, K, dim):
    return {**_expert_gate_up(rng, dtype, T, E, k, N, K, dim), "activations": "int8"}


def _down(rng, dtype, T, E, k, K, dim):
    ids, weights = ids_of(rng, T, k, E), np.abs(normal(rng, T, k))
    return {"h": normal(rng, T, k, K, dtype=dtype), "down_w": quantized(rng, E, dim, K), "ids": ids, "weights": weights}


@case("expert_down_sum", sizes=EXPERTS, rel=4e-6, whole=True)
def _expert_down_sum(rng, dtype, T, E, k, N, K, dim):
    return _down(rng, dtype, T, E, k, K, dim)


@case("expert_down_sum", sizes={"int8": (2, 5, 3, 64, 9), "int8-prefill": (23, 3, 2, 32, 9)}, rel=4e-6, whole=True)
def _expert_down_sum_int8(rng, dtype, T, E, k, K, dim):
    return {**_down(rng, dtype, T, E, k, K, dim), "activations": "int8"}


@case(
    "moe_forward",
    sizes={"decode": (1, 5, 3, 32, 64), "ragged": (6, 4, 2, 64, 32), "prefill": (40, 3, 2, 32, 32)},
    rel=4e-6,
    whole=True,
)
def _moe_forward(rng, dtype, T, E, k, N, K):
    stacks = {"gate_w": quantized(rng, E, N, K), "up_w": quantized(rng, E, N, K), "down_w": quantized(rng, E, K, N)}
    return {
        "x": normal(rng, T, K, dtype=dtype),
        "ids": ids_of(rng, T, k, E),
        "weights": np.abs(normal(rng, T, k)),
        **stacks,
    }


@case("expert_mlp", sizes=EXPERTS, rel=4e-6, whole=True)
def _expert_mlp(rng, dtype, T, E, k, N, K, dim):
    """The experts of one batch: the others are absent, and their rows stay."""
    stacks = {
        "gate_w": quantized(rng, E, 32, K),
        "up_w": quantized(rng, E, 32, K),
        "down_w": quantized(rng, E, dim, 32),
    }
    slot_of = np.where(np.arange(E) % 2, -1, rng.permutation(E)).astype(np.int32)
    rows = {"expert_out": normal(rng, T, k, dim, dtype=dtype), "x": normal(rng, T, K, dtype=dtype)}
    return {**rows, "ids": ids_of(rng, T, k, E), **stacks, "slot_of": slot_of}


@case("moe_forward", sizes={"batches": (6, 4, 2, 64, 32)}, rel=4e-6, whole=True)
def _moe_forward_in_batches(rng, dtype, T, E, k, N, K):
    return {**_moe_forward(rng, dtype, T, E, k, N, K), "expert_out": normal(rng, T, k, K, dtype=dtype)}


MIXED = {"decode": (1, 5, 3, 32, 64), "ragged": (2, 4, 2, 64, 96), "prefill": (40, 3, 2, 32, 32)}


@case("moe_shared_forward", sizes=MIXED, rel=4e-6, whole=True)
def _moe_shared_forward(rng, dtype, T, E, k, N, K):
    shared = {"gate_w": quantized(rng, N, K), "up_w": quantized(rng, N, K), "down_w": quantized(rng, K, N)}
    return {
        "residual": normal(rng, T, K, dtype=dtype),
        **_moe_forward(rng, dtype, T, E, k, N, K),
        **{f"shared_{name}": w for name, w in shared.items()},
        "shared_score": normal(rng, T, 1),
    }


@case("moe_shared_forward", sizes={f"joined-{label}": size for label, size in MIXED.items()}, rel=4e-6, whole=True)
def _moe_shared_forward_joined(rng, dtype, T, E, k, N, K):
    """Gate and up in one weight, a norm before, no score; experts and the shared one in other places of the stack."""
    joined = {"gate_w": quantized(rng, E, 2 * N, K), "shared_gate_w": quantized(rng, 2 * N, K), "up_w": None}
    slot_of = np.concatenate([rng.permutation(E), [-1]]).astype(np.int32)
    more = {"shared_up_w": None, "shared_score": None, "slot_of": slot_of, "act": "gelu_tanh"}
    norm = {"norm_weight": normal(rng, K, dtype="bfloat16"), "eps": 1e-5}
    return {**_moe_shared_forward(rng, dtype, T, E, k, N, K), **joined, **more, **norm}


@case("moe_shared_forward", sizes={"wider": (2, 4, 2, 32, 64), "dense": (3, 4, 2, 24, 32)}, rel=4e-6, whole=True)
def _moe_shared_forward_apart(rng, dtype, T, E, k, N, K):
    """A shared expert of another width or format than the others has its own launches."""
    call = _moe_shared_forward(rng, dtype, T, E, k, 32, K)
    if N != 32:
        stacks = {"gate_w": (E, N, K), "up_w": (E, N, K), "down_w": (E, K, N)}
        call |= {name: normal(rng, *shape, scale=K**-0.5, dtype="bfloat16") for name, shape in stacks.items()}
    wide = {"gate_w": quantized(rng, 96, K), "up_w": quantized(rng, 96, K, bits=8), "down_w": quantized(rng, K, 96)}
    return call | {f"shared_{name}": w for name, w in wide.items()} | {"norm_weight": normal(rng, K)}


STREAMS_OF_BLOCK = {f"stream-{label}": size for label, size in MIXED.items()}


# what is between the products is rounded to the activations' dtype: a number of it may go the other way
@case("moe_shared_forward", sizes=STREAMS_OF_BLOCK, rel=8e-3, whole=True, dtypes=HALVES)
def _moe_shared_forward_stream(rng, dtype, T, E, k, N, K):
    return {**_moe_shared_forward(rng, dtype, T, E, k, N, K), "residual": normal(rng, T, K)}


# pairs one by one, in turn of their experts, sorted
@case("moe_shared_forward", sizes={f"alone-{label}": size for label, size in MIXED.items()}, rel=4e-6, whole=True)
def _moe_shared_forward_alone(rng, dtype, T, E, k, N, K):
    return {**_moe_shared_forward(rng, dtype, T, E, k, N, K), "residual": None}


# T, E, k, N, K
ROUTED_BLOCKS = {
    "decode": (1, 40, 4, 32, 64),
    "all": (1, 3, 3, 32, 96),
    "ragged": (3, 33, 5, 64, 32),
    "empty": (0, 5, 2, 32, 64),
}


@case("moe_route_forward", sizes=ROUTED_BLOCKS, rel=1e-5, whole=True)
def _moe_route_forward(rng, dtype, T, E, k, N, K):
    block = _moe_shared_forward(rng, dtype, max(T, 1), E, k, N, K)
    block |= {name: block[name][:T] for name in ("residual", "x")}
    router = {"norm_weight": normal(rng, K, dtype=dtype), "w": quantized(rng, E + 1, K, bits=8), "scored": True}
    given = ("residual", "x", *(f"{own}{part}_w" for own in ("", "shared_") for part in ("gate", "up", "down")))
    return {**{name: block[name] for name in given}, **router, "per_expert_scale": None, "top_k": k}


@case(
    "moe_route_forward", sizes={f"joined-{label}": size for label, size in ROUTED_BLOCKS.items()}, rel=1e-5, whole=True
)
def _moe_route_forward_joined(rng, dtype, T, E, k, N, K):
    """Gate and up in one weight, no score, no residual, a dense router, scales of experts, rows of no sequence."""
    joined = {"gate_w": quantized(rng, E, 2 * N, K), "shared_gate_w": quantized(rng, 2 * N, K)}
    router = {"w": normal(rng, E, K, dtype="bfloat16", scale=K**-0.5), "per_expert_scale": normal(rng, E)}
    more = {"active": np.arange(T, dtype=np.int32)[::-1] - 1, "propagate_nan": True, "act": "gelu_tanh", "eps": 1e-5}
    none = {"up_w": None, "shared_up_w": None, "residual": None, "scored": False}
    return {**_moe_route_forward(rng, dtype, T, E, k, N, K), **joined, **router, **more, **none}


@case("moe_shared_forward", sizes={"int8": (2, 4, 2, 32, 64)}, rel=4e-6, whole=True)
def _moe_shared_forward_int8(rng, dtype, T, E, k, N, K):
    return {**_moe_shared_forward(rng, dtype, T, E, k, N, K), "activations": "int8"}


@case("moe_shared_forward", sizes={"batches": (5, 4, 2, 32, 64)}, rel=4e-6, whole=True)
def _moe_shared_forward_in_batches(rng, dtype, T, E, k, N, K):
    return {**_moe_shared_forward(rng, dtype, T, E, k, N, K), "expert_out": normal(rng, T, k, K)}


def _no_expert(call, *unread):
    """Ids −1, of every third row from the first on and of one more pair; NaN in what is `unread` there."""
    ids = call["ids"]
    ids[::3] = -1
    ids[1:2, -1] = -1
    for name in unread:
        of_rows = len(call[name].shape) == 2 and name == "x"
        call[name][(ids < 0).all(axis=-1) if of_rows else ids < 0] = np.nan
    return call


# pairs one by one, none at all, sorted by expert
NO_EXPERT = {
    "no-expert": (2, 16, 2, 33, 32, 7),
    "no-expert-alone": (1, 4, 2, 32, 32, 7),
    "no-expert-5": (5, 4, 2, 32, 64, 7),
}


@case("expert_gate_up", sizes=NO_EXPERT, rel=4e-6, whole=True)
def _expert_gate_up_no_expert(rng, dtype, T, E, k, N, K, dim):
    return _no_expert(_expert_gate_up(rng, dtype, T, E, k, N, K, dim), "x")


@case("expert_gate_up", sizes={f"joined-{label}": size for label, size in NO_EXPERT.items()}, rel=4e-6, whole=True)
def _expert_gate_up_joined_no_expert(rng, dtype, T, E, k, N, K, dim):
    return _no_expert(_expert_gate_up_joined(rng, dtype, T, E, k, N, K, dim), "x")


@case("expert_gate_up", sizes={f"int8-{label}": size for label, size in NO_EXPERT.items()}, rel=4e-6, whole=True)
def _expert_gate_up_int8_no_expert(rng, dtype, T, E, k, N, K, dim):
    return _no_expert(_expert_gate_up_int8(rng, dtype, T, E, k, N, K, dim), "x")


@case("expert_down_sum", sizes=NO_EXPERT, rel=4e-6, whole=True)
def _expert_down_sum_no_expert(rng, dtype, T, E, k, N, K, dim):
    return _no_expert(_down(rng, dtype, T, E, k, K, dim), "h", "weights")


@case("expert_matmul", sizes={"no-expert": (6, 2, 3, 7, 32), "no-expert-alone": (6, 1, 2, 7, 32)}, rel=4e-6, whole=True)
def _expert_matmul_no_expert(rng, dtype, E, T, k, N, K):
    return _no_expert(_expert_matmul_stack(rng, dtype, E, T, k, N, K), "x")


@case("expert_mlp", sizes=NO_EXPERT, rel=4e-6, whole=True)
def _expert_mlp_no_expert(rng, dtype, T, E, k, N, K, dim):
    return _no_expert(_expert_mlp(rng, dtype, T, E, k, N, K, dim), "x")


NO_EXPERTS_OF_BLOCK = {label: (*size[:-3], 32, 64) for label, size in NO_EXPERT.items()}


@case("moe_forward", sizes=NO_EXPERTS_OF_BLOCK, rel=4e-6, whole=True)
def _moe_forward_no_expert(rng, dtype, T, E, k, N, K):
    return _no_expert(_moe_forward(rng, dtype, T, E, k, N, K), "x", "weights")


# h lies between two codes of int8 for some, and its last bit decides
@case("moe_forward", sizes={f"int8-{label}": size for label, size in NO_EXPERTS_OF_BLOCK.items()}, rel=1e-4, whole=True)
def _moe_forward_int8_no_expert(rng, dtype, T, E, k, N, K):
    return {**_moe_forward_no_expert(rng, dtype, T, E, k, N, K), "activations": "int8"}


@case("moe_forward", sizes={"batches-no-expert": (5, 4, 2, 32, 64)}, rel=4e-6, whole=True)
def _moe_forward_in_batches_no_expert(rng, dtype, T, E, k, N, K):
    return _no_expert(_moe_forward_in_batches(rng, dtype, T, E, k, N, K), "x", "weights", "expert_out")


# as above, and pairs one by one in the turn of their experts
@case("moe_shared_forward", sizes={**NO_EXPERTS_OF_BLOCK, "no-expert-2": (2, 8, 2, 32, 64)}, rel=4e-6, whole=True)
def _moe_shared_forward_no_expert(rng, dtype, T, E, k, N, K):
    return _no_expert(_moe_shared_forward(rng, dtype, T, E, k, N, K), "weights")


@case("moe_shared_forward", sizes={"joined-no-expert": (2, 16, 2, 32, 64)}, rel=4e-6, whole=True)
def _moe_shared_forward_joined_no_expert(rng, dtype, T, E, k, N, K):
    return _no_expert(_moe_shared_forward_joined(rng, dtype, T, E, k, N, K), "weights")


@case("moe_shared_forward", sizes={"batches-no-expert": (5, 4, 2, 32, 64)}, rel=4e-6, whole=True)
def _moe_shared_forward_in_batches_no_expert(rng, dtype, T, E, k, N, K):
    return _no_expert(_moe_shared_forward_in_batches(rng, dtype, T, E, k, N, K), "weights", "expert_out")


@case("moe_combine_residual", sizes={"stream": (5, 3, 61), "stream-one": (1, 2, 7)}, dtypes=HALVES)
def _moe_combine_residual_stream(rng, dtype, T, k, dim):
    return {**_moe_combine_residual(rng, dtype, T, k, dim), "h_mid": normal(rng, T, dim)}


@case("moe_combine_residual", sizes=EXPERT_SUMS)
def _moe_combine_residual(rng, dtype, T, k, dim):
    rows = {name: normal(rng, T, dim, dtype=dtype) for name in ("h_mid", "shared_out")}
    return {**rows, **_weighted_sum(rng, dtype, T, k, dim), "shared_gate": normal(rng, T, 1)}


@case("moe_combine_residual", sizes={"alone": (5, 3, 61), "alone-one": (1, 2, 7)})
def _moe_combine_residual_alone(rng, dtype, T, k, dim):
    return {**_moe_combine_residual(rng, dtype, T, k, dim), "h_mid": None}


@case("moe_combine_residual", sizes={"sum-alone": (3, 37)})
def _moe_combine_sum_alone(rng, dtype, T, dim):
    return {**_moe_combine_sum(rng, dtype, T, dim), "h_mid": None, "shared_gate": normal(rng, T)}


@case("moe_combine_residual", sizes={"sum": (5, 61)})
def _moe_combine_sum(rng, dtype, T, dim):
    rows = {name: normal(rng, T, dim, dtype=dtype) for name in ("h_mid", "shared_out", "moe_sum")}
    return {**rows, "expert_out": None, "weights": None}


@case("moe_bucket_accumulate", sizes={"some": (7, 4, 61), "none": (3, 0, 5)})
def _moe_bucket_accumulate(rng, dtype, T, B, dim):
    where = rng.permutation(T)[:B].astype(np.int32)
    sums = {"out_sum": normal(rng, T, dim, dtype=dtype), "bucket_out": normal(rng, B, dim, dtype=dtype)}
    return {**sums, "token_idx": where, "weights": normal(rng, B)}


# -- attention and cache ---------------------------------------------------------------------------------------------

HEADS = {"gqa": (6, 2, 20, 12), "mha": (3, 3, 64, 64), "mqa": (5, 1, 33, 40)}


@case("attention_scores", sizes=HEADS, rel=4e-6, whole=True)
def _attention_scores(rng, dtype, H, Hkv, D, Dv):
    cache = normal(rng, 19, Hkv * D, dtype=dtype)
    sizes = {"seq_len": 13, "scale": D**-0.5, "heads_per_kv": H // Hkv, "seq_stride": 17}
    return {"q": normal(rng, H, D, dtype=dtype), "k_cache": cache, **sizes}


@case("attention_softmax", sizes={"some": (5, 17, 13), "all": (3, 64, 64), "none": (2, 4, 0)})
def _attention_softmax(rng, dtype, H, columns, seq_len):
    return {"scores": normal(rng, H, columns, dtype=dtype, scale=3), "seq_len": seq_len}


@case("attention_values", sizes=HEADS, rel=4e-6, whole=True)
def _attention_values(rng, dtype, H, Hkv, D, Dv):
    scores, cache = np.abs(normal(rng, H, 17, dtype=dtype)), normal(rng, 19, Hkv * Dv, dtype=dtype)
    return {"scores": scores, "v_cache": cache, "seq_len": 13, "heads_per_kv": H // Hkv}


@case("split_q_gate", sizes={"decode": (1, 4, 64), "ragged": (5, 3, 17), "empty": (0, 2, 4)}, rel=0)
def _split_q_gate(rng, dtype, T, H, D):
    return {"q_proj": normal(rng, T, H, 2 * D, dtype=dtype)}


def _caches(rng, dtype, *lead, Hkv, D, Dv):
    return normal(rng, *lead, Hkv * D, dtype=dtype), normal(rng, *lead, Hkv * Dv, dtype=dtype)


@case("attention_decode", sizes={**HEADS, "window": (4, 2, 16, 16)}, rel=4e-6, whole=True)
def _attention_decode(rng, dtype, H, Hkv, D, Dv):
    k, v = _caches(rng, dtype, 150, Hkv=Hkv, D=D, Dv=Dv)
    window = 9 if D == 16 else None
    return {
        "q": normal(rng, H, D, dtype=dtype),
        "k_cache": k,
        "v_cache": v,
        "seq_len": 141,
        "scale": D**-0.5,
        "window": window,
    }


@case("attention_decode", sizes={"slots": (3, 6, 2, 20, 12)}, rel=4e-6, whole=True)
def _attention_decode_slots(rng, dtype, B, H, Hkv, D, Dv):
    k, v = _caches(rng, dtype, B + 2, 23, Hkv=Hkv, D=D, Dv=Dv)
    where = {"seq_len": np.array([0, 23, 7], np.int32), "slots": np.array([4, 0, 2], np.int32)}
    return {"q": normal(rng, B, H, D, dtype=dtype), "k_cache": k, "v_cache": v, "scale": 0.5, **where}


@case("attention_prefill", sizes={**HEADS, "window": (4, 2, 16, 16)}, rel=4e-6, whole=True)
def _attention_prefill(rng, dtype, H, Hkv, D, Dv):
    k, v = _caches(rng, dtype, 150, Hkv=Hkv, D=D, Dv=Dv)
    window = 9 if D == 16 else None
    return {
        "q": normal(rng, 77, H, D, dtype=dtype),
        "k_cache": k,
        "v_cache": v,
        "start": 70,
        "scale": D**-0.5,
        "window": window,
    }


@case("attention_prefill", sizes={"pages": (6, 2, 20, 12), "empty": (2, 1, 8, 8)}, rel=4e-6, whole=True)
def _attention_prefill_pages(rng, dtype, H, Hkv, D, Dv):
    k, v = _caches(rng, dtype, 9, 16, Hkv=Hkv, D=D, Dv=Dv)
    table, start = rng.permutation(9)[:7].astype(np.int32), np.array(31, np.int32)
    T = 0 if D == 8 else 50
    return {
        "q": normal(rng, T, H, D, dtype=dtype),
        "k_cache": k,
        "v_cache": v,
        "start": start,
        "scale": 1.0,
        "block_table": table,
    }


@case("attention_paged", sizes={**HEADS, "window": (4, 2, 16, 16)}, rel=4e-6, whole=True)
def _attention_paged(rng, dtype, H, Hkv, D, Dv):
    k, v = _caches(rng, dtype, 31, 16, Hkv=Hkv, D=D, Dv=Dv)
    table = rng.permutation(30).reshape(3, 10).astype(np.int32)
    where = {"block_table": table, "lengths": np.array([17, 0, 160], np.int32), "window": 9 if D == 16 else None}
    return {"q": normal(rng, 3, H, D, dtype=dtype), "k_pages": k, "v_pages": v, "scale": D**-0.5, **where}


@case("attention_paged", sizes={"gate": (6, 2, 20, 12), "gate-short": (4, 2, 16, 16)}, rel=4e-6, whole=True)
def _attention_paged_gate(rng, dtype, H, Hkv, D, Dv):
    call = _attention_paged(rng, dtype, H, Hkv, D, Dv)
    return {**call, "gate": normal(rng, 3, H, Dv, dtype=dtype, scale=3)}


@case("attention_paged", sizes={"sinks": (6, 2, 20, 12), "sinks-window": (4, 2, 16, 16)}, rel=4e-6, whole=True)
def _attention_paged_sinks(rng, dtype, H, Hkv, D, Dv):
    return {**_attention_paged(rng, dtype, H, Hkv, D, Dv), "sinks": normal(rng, H, scale=3)}


@case("moe_biased_forward", sizes={"one": (1, 4, 2, 64, 96), "many": (9, 5, 3, 64, 32)}, rel=8e-6, whole=True)
def _moe_biased_forward(rng, dtype, T, E, k, K, N):
    stacks = {"gate_w": quantized(rng, E, N, K), "up_w": quantized(rng, E, N, K), "down_w": quantized(rng, E, K, N)}
    biases = {"gate_bias": normal(rng, E, N, scale=4), "up_bias": normal(rng, E, N, scale=4)}
    ids = ids_of(rng, T, k, E)
    ids[-1, 0] = -1 if T > 1 else ids[-1, 0]
    routing = {"x": normal(rng, T, K, dtype=dtype), "ids": ids, "weights": rng.random((T, k), np.float32)}
    where = {"down_bias": normal(rng, E, K), "slot_of": rng.permutation(E).astype(np.int32)}
    return {**routing, **stacks, **biases, **where}


# Rows of 16 bits: float32 sums of hidden rows that are rounded to 16 bits, of which one may go the other way.
SUMS = {"sum": (1, 4, 3, 96, 64), "sum-few": (5, 5, 2, 64, 96), "sum-turns": (3, 7, 2, 64, 96)}


@case("moe_biased_forward", sizes=SUMS, rel=1e-3, whole=True, dtypes=HALVES)
@case("moe_biased_forward", sizes=SUMS, rel=8e-6, whole=True, dtypes=F32)
def _moe_biased_forward_sum(rng, dtype, T, E, k, K, N):
    call = _moe_biased_forward(rng, dtype, T, E, k, K, N)
    slots = call["slot_of"].copy()
    slots[call["ids"][0, 0]] = -2  # another rank's: neither its product nor its bias counts
    call["weights"][0, 0] = np.nan
    return {**call, "slot_of": slots, "residual": normal(rng, T, K)}


DENSE_SUMS = {"dense": (1, 4, 3, 96, 64), "dense-many": (9, 3, 2, 32, 64), "dense-turns": (3, 7, 2, 32, 64)}


@case("moe_biased_forward", sizes=DENSE_SUMS, rel=1e-3, whole=True, dtypes=HALVES)
@case("moe_biased_forward", sizes=DENSE_SUMS, rel=8e-6, whole=True, dtypes=F32)
def _moe_biased_forward_dense(rng, dtype, T, E, k, K, N):
    sizes = {"gate_w": (E, N, K), "up_w": (E, N, K), "down_w": (E, K, N)}
    stacks = {name: normal(rng, *size, dtype="bfloat16", scale=0.2) for name, size in sizes.items()}
    return {**_moe_biased_forward_sum(rng, dtype, T, E, k, K, N), **stacks}


RUNS = (1, 0, 19, 4)  # rows of each sequence, two rows of no sequence behind them


def _runs(rng, pages, before=(8, 3, 2, 11)):
    """Where the rows of RUNS stand: starts, sequence and position of each, lengths, and a block table of six pages."""
    sequence = np.repeat(np.arange(len(RUNS)), RUNS)
    starts = np.cumsum([0, *RUNS])
    positions = np.arange(len(sequence)) - starts[sequence] + np.array(before)[sequence]
    found = {"starts": starts, "sequence": [*sequence, -1, -1], "positions": [*positions, 0, 0]}
    found |= {"lengths": np.add(before, RUNS), "table": rng.permutation(pages)[: 6 * len(RUNS)].reshape(-1, 6)}
    return {name: np.array(value, np.int32) for name, value in found.items()}


RAGGED = {"runs": (6, 2, 20, 12, None), "runs-wide": (4, 1, 192, 128, None), "runs-window": (8, 2, 64, 64, 7)}


@case("attention_paged", sizes=RAGGED, rel=4e-6, whole=True)
def _attention_paged_runs(rng, dtype, H, Hkv, D, Dv, window):
    k, v = _caches(rng, dtype, 25, 16, Hkv=Hkv, D=D, Dv=Dv)
    at, T = _runs(rng, 25), sum(RUNS) + 2
    rows = {"q": normal(rng, T, H, D, dtype=dtype), "gate": normal(rng, T, H, Dv, dtype=dtype, scale=3)}
    where = {"block_table": at["table"], "lengths": at["lengths"], "starts": at["starts"], "window": window}
    return {**rows, "k_pages": k, "v_pages": v, "scale": D**-0.5, **where}


@case("attention_paged", sizes={"runs-sinks": (8, 2, 64, 64, 7)}, rel=4e-6, whole=True)
def _attention_paged_runs_sinks(rng, dtype, H, Hkv, D, Dv, window):
    return {**_attention_paged_runs(rng, dtype, H, Hkv, D, Dv, window), "sinks": normal(rng, H, scale=3)}


@case("kv_cache_append", sizes={"some": (3, 2, 5, 7), "none": (0, 1, 2, 3)}, rel=0)
def _kv_cache_append(rng, dtype, T, Hkv, D, Dv):
    k, v = _caches(rng, dtype, 11, Hkv=Hkv, D=D, Dv=Dv)
    sources = {"k_src": normal(rng, T, Hkv, D, dtype=dtype), "v_src": normal(rng, T, Hkv * Dv, dtype=dtype)}
    return {**sources, "k_cache": k, "v_cache": v, "kv_start": 8}


@case("kv_cache_append", sizes={"slots": (3, 2, 5, 7)}, rel=0)
def _kv_cache_append_slots(rng, dtype, B, Hkv, D, Dv):
    k, v = _caches(rng, dtype, 5, 11, Hkv=Hkv, D=D, Dv=Dv)
    where = {"kv_start": np.array([10, 0, 3], np.int32), "slots": np.array([1, 4, 0], np.int32)}
    return {
        "k_src": normal(rng, B, Hkv * D, dtype=dtype),
        "v_src": normal(rng, B, Hkv * Dv, dtype=dtype),
        "k_cache": k,
        "v_cache": v,
        **where,
    }


@case("kv_pages_append", sizes={"sequence": (9, 2, 5, 7)}, rel=0)
def _kv_pages_append(rng, dtype, T, Hkv, D, Dv):
    k, v = _caches(rng, dtype, 6, 4, Hkv=Hkv, D=D, Dv=Dv)
    where = {"block_table": np.array([5, 0, 3, 1], np.int32), "positions": 6}
    return {
        "k_src": normal(rng, T, Hkv * D, dtype=dtype),
        "v_src": normal(rng, T, Hkv * Dv, dtype=dtype),
        "k_pages": k,
        "v_pages": v,
        **where,
    }


@case("kv_pages_append", sizes={"batch": (2, 2, 5, 7)}, rel=0)
def _kv_pages_append_batch(rng, dtype, B, Hkv, D, Dv):
    k, v = _caches(rng, dtype, 6, 4, Hkv=Hkv, D=D, Dv=Dv)
    where = {"block_table": np.array([[5, 0], [3, 1]], np.int32), "positions": np.array([6, 3], np.int32)}
    return {
        "k_src": normal(rng, B, Hkv * D, dtype=dtype),
        "v_src": normal(rng, B, Hkv * Dv, dtype=dtype),
        "k_pages": k,
        "v_pages": v,
        **where,
    }


@case("kv_pages_append", sizes={"runs": (2, 5, 7)}, rel=0)
def _kv_pages_append_runs(rng, dtype, Hkv, D, Dv):
    k, v = _caches(rng, dtype, 25, 4, Hkv=Hkv, D=D, Dv=Dv)
    at, T = _runs(rng, 25), sum(RUNS) + 2
    rows = {"k_src": normal(rng, T, Hkv * D, dtype=dtype), "v_src": normal(rng, T, Hkv * Dv, dtype=dtype)}
    where = {"block_table": at["table"], "positions": at["positions"], "sequence": at["sequence"]}
    return {**rows, "k_pages": k, "v_pages": v, **where}


@case("mla_cache_append", sizes={"runs": (9, 3)}, rel=0)
def _mla_cache_append_runs(rng, dtype, R, rope):
    at, T = _runs(rng, 25), sum(RUNS) + 2
    sources = {"kv_lat": normal(rng, T, R, dtype=dtype), "k_pe": normal(rng, T, rope, dtype=dtype)}
    where = {"pos": at["positions"], "block_table": at["table"], "sequence": at["sequence"]}
    return {**sources, **_latents(rng, dtype, 25, 4, R=R, rope=rope), **where}


@case("mla_cache_append", sizes={"one": (7, 5), "many": (9, 3)}, rel=0)
def _mla_cache_append(rng, dtype, R, rope):
    lead = () if R == 7 else (4,)
    sources = {"kv_lat": normal(rng, *lead, R, dtype=dtype), "k_pe": normal(rng, *lead, rope, dtype=dtype)}
    return {
        **sources,
        "latent_cache": normal(rng, 12, R, dtype=dtype),
        "rope_k_cache": normal(rng, 12, rope, dtype=dtype),
        "pos": 5,
    }


@case("mla_cache_append", sizes={"pages": (9, 3)}, rel=0)
def _mla_cache_append_pages(rng, dtype, R, rope):
    sources = {"kv_lat": normal(rng, 2, R, dtype=dtype), "k_pe": normal(rng, 2, rope, dtype=dtype)}
    caches = {"latent_cache": normal(rng, 5, 4, R, dtype=dtype), "rope_k_cache": normal(rng, 5, 4, rope, dtype=dtype)}
    where = {"pos": np.array([5, 2], np.int32), "block_table": np.array([[4, 1], [0, 3]], np.int32)}
    return {**sources, **caches, **where}


PREPARED = {
    "decode": (3, 4, 2, 32, 32, {}),
    "gated": (2, 6, 2, 40, 12, {"gated": True, "mscale": 1.25}),
    "values": (1, 4, 1, 64, 64, {"norm_values": True, "k_is_v": True}),
    "plain": (3, 4, 4, 20, 20, {"normed": False}),
    "sequence": (7, 3, 1, 40, 24, {"gated": True, "norm_values": True}),
    "prefill": (37, 4, 2, 128, 64, {"gated": True}),
    "empty": (0, 2, 1, 8, 8, {}),
}


@case("attention_prepare", sizes=PREPARED)
def _attention_prepare(rng, dtype, T, H, Hkv, D, width, form):
    form = dict(form)
    normed, k_is_v = form.pop("normed", True), form.pop("k_is_v", False)
    rows = {"q": H * D * (2 if form.get("gated") else 1), "k": Hkv * D, "v": Hkv * D}
    call = {name: normal(rng, T, wide, dtype=dtype) for name, wide in rows.items()}
    norms = {name: normal(rng, D, dtype="bfloat16") if normed else None for name in ("q_norm", "k_norm")}
    k_pages, v_pages = _caches(rng, dtype, 13, 4, Hkv=Hkv, D=D, Dv=D)
    if T in (0, 7, 37):  # one sequence
        where = {"positions": np.array(2, np.int32), "block_table": rng.permutation(13)[:11].astype(np.int32)}
    else:
        table = rng.permutation(13)[:12].reshape(3, 4).astype(np.int32)[:T]
        where = {"positions": np.array([15, 0, 6], np.int32)[:T], "block_table": table}
    pages = {"key_pages": k_pages, "value_pages": v_pages, "H": H, "inv_freq": rope_inv_freq(width, 1e4)}
    return {**call, "v": None if k_is_v else call["v"], **norms, **where, **pages, "rotary_dim": width, **form}


BIASED = {
    "bias": (3, 4, 2, 32, 32, {"normed": False}),
    "bias-gated": (2, 6, 2, 40, 12, {"gated": True, "norm_values": True}),
    "bias-keys": (1, 4, 1, 20, 20, {"k_is_v": True}),
}


@case("attention_prepare", sizes=BIASED)
def _attention_prepare_bias(rng, dtype, T, H, Hkv, D, width, form):
    call = _attention_prepare(rng, dtype, T, H, Hkv, D, width, form)
    rows = [(name, call[name]) for name in ("q", "k", "v") if call[name] is not None]
    return {**call, **{f"{name}_bias": normal(rng, x.shape[1]) for name, x in rows}}


@case("attention_prepare", sizes={"runs": (2, 2, 40, 12)})
def _attention_prepare_runs(rng, dtype, H, Hkv, D, width):
    at, T = _runs(rng, 25), sum(RUNS) + 2
    rows = {"q": 2 * H * D, "k": Hkv * D, "v": Hkv * D}
    call = {name: normal(rng, T, wide, dtype=dtype) for name, wide in rows.items()}
    k_pages, v_pages = _caches(rng, dtype, 25, 4, Hkv=Hkv, D=D, Dv=D)
    norms = {name: normal(rng, D, dtype="bfloat16") for name in ("q_norm", "k_norm")}
    pages = {"key_pages": k_pages, "value_pages": v_pages, "H": H, "inv_freq": rope_inv_freq(width, 1e4)}
    where = {"positions": at["positions"], "block_table": at["table"], "sequence": at["sequence"]}
    return {**call, **norms, **pages, **where, "rotary_dim": width, "gated": True}


# -- rope ------------------------------------------------------------------------------------------------------------

ROPES = {"decode": (1, 4, 64, 64), "partial": (5, 3, 40, 12), "prefill": (33, 2, 128, 128), "empty": (0, 2, 8, 8)}


@case("rope", sizes=ROPES)
def _rope(rng, dtype, T, H, D, width):
    return {
        "x": normal(rng, T, H, D, dtype=dtype),
        "inv_freq": rope_inv_freq(width, 1e4),
        "start_pos": 4000,
        "rotary_dim": width,
    }


@case("rope", sizes={"positions": (5, 3, 32, 20)})
def _rope_positions(rng, dtype, T, H, D, width):
    at = rng.integers(0, 131072, T).astype(np.int32)
    kind = {"rotary_dim": width, "mscale": 1.25, "interleaved": True}
    return {"x": normal(rng, T, H, D, dtype=dtype), "inv_freq": rope_inv_freq(width, 1e6), "start_pos": at, **kind}


@case("head_norm_rope", sizes=ROPES)
def _head_norm_rope(rng, dtype, T, H, D, width):
    x, weight = normal(rng, T, H, D, dtype=dtype), normal(rng, D, dtype="bfloat16")
    return {"x": x, "weight": weight, "inv_freq": rope_inv_freq(width, 1e4), "start_pos": 17, "rotary_dim": width}


@case("position_scale", sizes={"decode": (1, 4, 64), "ragged": (5, 3, 40), "wide": (33, 2, 1030), "empty": (0, 2, 8)})
def _position_scale(rng, dtype, T, H, D):
    at = rng.integers(0, 1 << 20, T).astype(np.int32)
    at[:1] = 8191
    return {"x": normal(rng, T, H, D, dtype=dtype), "positions": at, "beta": 0.1, "length": 8192}


@case("rope_inv_freq", sizes={"plain": (64, 1e4)}, dtypes=F32, rel=0)
def _rope_inv_freq(rng, dtype, dim, theta):
    return {"dim": dim, "theta": theta}


@case("yarn_inv_freq", sizes={"deepseek": (64, 1e4, 40.0, 4096)}, dtypes=F32, rel=0)
def _yarn_inv_freq(rng, dtype, dim, theta, factor, original):
    return {"dim": dim, "theta": theta, "factor": factor, "original_max_position": original}


@case("proportional_inv_freq", sizes={"gemma": (128, 1e6, 0.25)}, dtypes=F32, rel=0)
def _proportional_inv_freq(rng, dtype, head_dim, theta, part):
    return {"head_dim": head_dim, "theta": theta, "partial_rotary_factor": part}


# -- altup -----------------------------------------------------------------------------------------------------------


@case("altup_mix", sizes={"decode": (1, 4, 520), "ragged": (5, 3, 61), "empty": (0, 2, 8)}, dtypes=F32, whole=True)
def _altup_mix(rng, dtype, T, P, D):
    streams = {"first": normal(rng, T, D), "rest": normal(rng, T, P - 1, D)}
    return streams | {"scores": normal(rng, T, P), "weight": normal(rng, P * P, P), "bias": normal(rng, P * P)}


@case("altup_mix", sizes={"extra": (3, 4, 37), "extra-many": (70, 2, 600)}, whole=True)
def _altup_mix_extra(rng, dtype, T, P, D):
    call = _altup_mix(rng, "float32", T, P, D)
    factors = {"weight": normal(rng, P * (P + 1), P), "bias": normal(rng, P * (P + 1))}
    return call | factors | {"extra": normal(rng, T, D, dtype=dtype)}


@case("altup_match", sizes={"decode": (1, 2048), "ragged": (5, 61), "wide": (70, 4100), "empty": (0, 3)})
def _altup_match(rng, dtype, T, D):
    x = normal(rng, T, D, dtype=dtype, scale=3)
    x[1:2] = 0.001  # whose mean square is too small to be divided by
    return {"x": x, "like": normal(rng, T, D)}


@case("gaussian_topk", sizes={"decode": (1, 96), "ragged": (5, 61), "wide": (70, 4100), "empty": (0, 3)}, whole=True)
def _gaussian_topk(rng, dtype, T, N):
    x = normal(rng, T, N, dtype=dtype, scale=2)
    return {"x": x + np.ones(1, x.dtype), "factor": 1.0}


# -- delta -----------------------------------------------------------------------------------------------------------

CONVS = {"decode": (1, 64, 4), "ragged": (5, 37, 4), "short": (2, 9, 3), "empty": (0, 5, 4), "long": (70, 33, 4)}


@case("conv1d_causal", sizes=CONVS)
def _conv1d_causal(rng, dtype, T, C, W):
    state, weight = normal(rng, W - 1, C, dtype=dtype), normal(rng, C, W, dtype="bfloat16")
    return {"x": normal(rng, T, C, dtype=dtype), "state": state, "weight": weight}


@case("conv1d_causal", sizes={"plain": (5, 37, 3), "plain-long": (70, 33, 4)})
def _conv1d_plain(rng, dtype, T, C, W):
    return _conv1d_causal(rng, dtype, T, C, W) | {"act": "none"}


@case("conv1d_causal", sizes={"slots": (3, 37, 4, 0), "slots-room": (3, 37, 4, 2)})
def _conv1d_causal_slots(rng, dtype, B, C, W, room):
    state, weight = normal(rng, 5, W - 1 + room, C), normal(rng, C, W)
    return {
        "x": normal(rng, B, C, dtype=dtype),
        "state": state,
        "weight": weight,
        "slots": np.array([4, 0, 2], np.int32),
    }


@case("conv1d_causal", sizes={"runs": (37, 4)})
def _conv1d_causal_runs(rng, dtype, C, W):
    state, weight = normal(rng, 5, W, C, dtype=dtype), normal(rng, C, W)  # with room for a kept row
    where = {"slots": np.array([4, -1, 0, 2], np.int32), "starts": np.cumsum([0, *RUNS], dtype=np.int32)}
    return {"x": normal(rng, sum(RUNS) + 2, C, dtype=dtype), "state": state, "weight": weight, **where}


@case("conv1d_causal", sizes={"heads": (5, 43, 3, 2, 8), "heads-long": (70, 70, 4, 1, 32)})
def _conv1d_heads(rng, dtype, T, C, W, heads, dim):
    return _conv1d_causal(rng, dtype, T, C, W) | {"key_heads": heads, "key_dim": dim}


@case("conv1d_causal", sizes={"heads-runs": (43, 4, 2, 8)})
def _conv1d_heads_runs(rng, dtype, C, W, heads, dim):
    return _conv1d_causal_runs(rng, dtype, C, W) | {"key_heads": heads, "key_dim": dim}


@case("conv1d_causal", sizes={"plain-slots": (3, 37, 3, 0), "plain-slots-room": (3, 37, 3, 2)})
def _conv1d_plain_slots(rng, dtype, B, C, W, room):
    return _conv1d_causal_slots(rng, dtype, B, C, W, room) | {"act": "none"}


@case("conv1d_causal", sizes={"plain-runs": (37, 3)})
def _conv1d_plain_runs(rng, dtype, C, W):
    return _conv1d_causal_runs(rng, dtype, C, W) | {"act": "none"}


@case("conv1d_state_update", sizes=CONVS, rel=0)
def _conv1d_state_update(rng, dtype, T, C, W):
    return {"state": normal(rng, W - 1, C, dtype=dtype), "x": normal(rng, T, C, dtype=dtype)}


@case("conv1d_state_update", sizes={"slots": (3, 37, 4)}, rel=0)
def _conv1d_state_update_slots(rng, dtype, B, C, W):
    return {
        "state": normal(rng, 5, W - 1, C),
        "x": normal(rng, B, C, dtype=dtype),
        "slots": np.array([4, 0, 2], np.int32),
    }


@case("conv1d_state_update", sizes={"slots-room": (3, 37, 4)}, rel=0)
def _conv1d_state_update_slots_with_room(rng, dtype, B, C, W):
    return _conv1d_state_update_slots(rng, dtype, B, C, W) | {"state": normal(rng, 5, W + 1, C), "width": W}


@case("conv1d_state_update", sizes={"runs": (37, 4)}, rel=0)
def _conv1d_state_update_runs(rng, dtype, C, W):
    where = {"slots": np.array([4, -1, 0, 2], np.int32), "starts": np.cumsum([0, *RUNS], dtype=np.int32)}
    kept = {"keep": np.array([1, 0, 0, 4], np.int32), "width": W}
    return {"state": normal(rng, 5, W + 3, C), "x": normal(rng, sum(RUNS) + 2, C, dtype=dtype), **where, **kept}


@case("gdn_decay_beta", sizes={"decode": (1, 32), "ragged": (5, 7), "empty": (0, 2)})
def _gdn_decay_beta(rng, dtype, T, Hv):
    rows = {name: normal(rng, T, Hv, dtype=dtype, scale=3) for name in ("alpha", "beta")}
    return {**rows, "A_log": normal(rng, Hv), "dt_bias": normal(rng, Hv, dtype="bfloat16")}


@case("gdn_decay_beta", sizes={"channels": (5, 3, 7), "channels-many": (40, 4, 70), "channels-empty": (0, 2, 3)})
def _gdn_decay_beta_channels(rng, dtype, T, Hv, D):
    rows = {"alpha": normal(rng, T, Hv, D, dtype=dtype, scale=3), "beta": normal(rng, T, Hv, dtype=dtype, scale=3)}
    return {**rows, "A_log": normal(rng, Hv), "dt_bias": normal(rng, Hv, D, dtype="bfloat16")}


DELTAS = {
    "decode": (1, 2, 4, 64, 32),
    "ragged": (21, 2, 6, 20, 12),
    "long": (70, 1, 2, 32, 64),
    "empty": (0, 1, 1, 4, 4),
}


@case("gated_delta_net", sizes=DELTAS, rel=2e-5, whole=True)
def _gated_delta_net(rng, dtype, T, Hk, Hv, Dk, Dv):
    qkv = normal(rng, T, 2 * Hk * Dk + Hv * Dv, dtype=dtype, scale=Dk**-0.5)
    gates = {"g": rng.uniform(0.7, 1, (T, Hv)).astype("float32"), "b": rng.uniform(0, 1, (T, Hv)).astype("float32")}
    return {"state": normal(rng, Hv, Dv, Dk, scale=0.1), "qkv": qkv, **gates, "Hk": Hk, "Hv": Hv, "Dk": Dk, "Dv": Dv}


@case("gated_delta_net", sizes={f"chunkwise-{label}": size for label, size in DELTAS.items()}, rel=4e-5, whole=True)
def _gated_delta_net_chunkwise(rng, dtype, T, Hk, Hv, Dk, Dv):
    call = _gated_delta_net(rng, dtype, T, Hk, Hv, Dk, Dv)
    call["g"][3:5] = 0
    return {**call, "method": "chunkwise"}


def by_channel(rng, call, g="g"):
    """A call whose decays are of key channels."""
    decays = rng.uniform(0.4, 1, (*call[g].shape, call["Dk"])).astype("float32")
    decays[..., ::5] *= decays[..., ::5] > 0.6  # some channels forget all at once
    return call | {g: decays}


@case("gated_delta_net", sizes={f"channels-{label}": size for label, size in DELTAS.items()}, rel=2e-5, whole=True)
def _gated_delta_net_channels(rng, dtype, T, Hk, Hv, Dk, Dv):
    return by_channel(rng, _gated_delta_net(rng, dtype, T, Hk, Hv, Dk, Dv))


@case(
    "gated_delta_net",
    sizes={"channels-chunkwise": (21, 2, 6, 20, 12), "channels-chunkwise-long": (130, 1, 2, 32, 64)},
    rel=4e-5,
    whole=True,
)
def _gated_delta_net_channels_chunkwise(rng, dtype, T, Hk, Hv, Dk, Dv):
    return _gated_delta_net_channels(rng, dtype, T, Hk, Hv, Dk, Dv) | {"method": "chunkwise"}


@case("gated_delta_net", sizes={"slots": (3, 2, 4, 16, 12)}, rel=2e-5, whole=True)
def _gated_delta_net_slots(rng, dtype, B, Hk, Hv, Dk, Dv):
    state, slots = normal(rng, 5, Hv, Dv, Dk, scale=0.1), np.array([4, 0, 2], np.int32)
    return {**_gated_delta_net(rng, dtype, B, Hk, Hv, Dk, Dv), "state": state, "slots": slots}


@case(
    "gated_delta_net",
    sizes={"runs": ((1, 0, 9, 4), 2, 4, 16, 12), "runs-long": ((1, 0, 70, 4), 1, 2, 32, 64)},
    rel=2e-5,
    whole=True,
)
def _gated_delta_net_runs(rng, dtype, runs, Hk, Hv, Dk, Dv):
    T = sum(runs) + 2  # two rows of no sequence
    call = _gated_delta_net(rng, dtype, T, Hk, Hv, Dk, Dv) | {"state": normal(rng, 5, Hv, Dv, Dk, scale=0.1)}
    call |= {"slots": np.array([4, 1, 0, 2], np.int32), "starts": np.cumsum([0, *runs], dtype=np.int32)}
    return call | {"keep": np.array([0, 0, 0, 4], np.int32), "gates": normal(rng, 5, 4, 2, Hv)}


@case(
    "gated_delta_net",
    sizes={"channels-slots": ((), 2, 4, 16, 12), "channels-runs": ((1, 0, 9, 4), 1, 2, 32, 12)},
    rel=2e-5,
    whole=True,
)
def _gated_delta_net_channels_of_sequences(rng, dtype, runs, Hk, Hv, Dk, Dv):
    if not runs:
        return by_channel(rng, _gated_delta_net_slots(rng, dtype, 3, Hk, Hv, Dk, Dv))
    call = by_channel(rng, _gated_delta_net_runs(rng, dtype, runs, Hk, Hv, Dk, Dv))
    return call | {"gates": normal(rng, 5, 4, Dk + 1, Hv)}


@case("conv1d_commit", sizes={"three": (37, 4, 3), "two": (9, 3, 5)}, rel=0)
def _conv1d_commit(rng, dtype, C, W, K):
    where = {"slots": np.array([4, -1, 0, 2], np.int32), "accepted": np.array([K, 1, 0, 1], np.int32)}
    return {"state": normal(rng, 5, W - 1 + K, C, dtype=dtype), **where, "width": W}


@case("delta_commit", sizes={"two": (2, 4, 16, 12, 4, 3), "one": (1, 1, 8, 8, 2, 1)}, rel=2e-5, whole=True)
def _delta_commit(rng, dtype, Hk, Hv, Dk, Dv, W, K):
    C = 2 * Hk * Dk + Hv * Dv
    gates = np.stack([rng.uniform(0.7, 1, (5, K, Hv)), rng.uniform(0, 1, (5, K, Hv))], axis=2).astype("float32")
    return {
        "conv_state": normal(rng, 5, W - 1 + K, C, dtype=dtype),
        "state": normal(rng, 5, Hv, Dv, Dk, scale=0.1),
        "gates": gates,
        "slots": np.array([4, -1, 0, 2], np.int32),
        "accepted": np.array([K, 1, 0, 1], np.int32),
        "conv_weight": normal(rng, C, W, dtype="bfloat16"),
        "Hk": Hk,
    }


@case("delta_commit", sizes={"channels": (2, 4, 16, 12, 4, 3)}, rel=2e-5, whole=True)
def _delta_commit_channels(rng, dtype, Hk, Hv, Dk, Dv, W, K):
    gates = rng.uniform(0, 1, (5, K, Dk + 1, Hv)).astype("float32")
    return _delta_commit(rng, dtype, Hk, Hv, Dk, Dv, W, K) | {"gates": gates}


RUNS_KEPT = {  # runs, of which those of 4 and less are kept where `kept` says so; the last: room
    "runs": ((3, 0, 1, 4), (3, 0, 0, 4), 2, 4, 16, 12, 4, 5),
    "one": ((2,), (2,), 1, 1, 8, 8, 2, 2),
    "odd": ((1, 3, 2), (1, 3, 0), 1, 3, 20, 12, 3, 3),
    "long": ((11, 2), (0, 2), 1, 2, 32, 16, 4, 8),
    "wide": ((4, 4, 4), (4, 4, 4), 2, 4, 128, 128, 4, 8),
}


@case("gated_delta_verify", sizes=RUNS_KEPT, rel=2e-5, whole=True, dtypes=F32)
def _gated_delta_verify(rng, dtype, runs, kept, Hk, Hv, Dk, Dv, W, K):
    T, B, C = sum(runs) + 1, len(runs), 2 * Hk * Dk + Hv * Dv  # a row of no sequence
    slots = np.array([4, 1, 0, 2], np.int32)[:B]
    slots[1:2] = -1 if B == 3 else slots[1:2]
    gates = np.stack([rng.uniform(0.7, 1, (5, K, Hv)), rng.uniform(0, 1, (5, K, Hv))], axis=2).astype("float32")
    return {
        "qkv": normal(rng, T, C, dtype=dtype),
        "z": normal(rng, T, Hv, Dv, dtype=dtype),
        "alpha": normal(rng, T, Hv, dtype=dtype),
        "beta": normal(rng, T, Hv, dtype=dtype),
        "conv_state": normal(rng, 5, W - 1 + K, C, dtype=dtype),
        "state": normal(rng, 5, Hv, Dv, Dk, scale=0.1),
        "gates": gates,
        "slots": slots,
        "starts": np.cumsum([0, *runs], dtype=np.int32),
        "keep": np.array(kept, np.int32),
        "accepted": np.array([K, 1, 0, 2], np.int32)[:B],
        "conv_weight": normal(rng, C, W, dtype="bfloat16"),
        "A_log": normal(rng, Hv),
        "dt_bias": normal(rng, Hv, dtype="bfloat16"),
        "norm_weight": normal(rng, Dv, dtype="bfloat16"),
        "Hk": Hk,
    }


DELTA_STEPS = {  # the last: room behind the rows of the convolution
    "decode": (1, 2, 4, 64, 32, 4, 0),
    "ragged": (3, 1, 3, 20, 12, 3, 0),
    "room": (3, 1, 3, 20, 12, 3, 2),
    "empty": (0, 1, 1, 4, 4, 4, 0),
}


@case("gated_delta_step", sizes=DELTA_STEPS, rel=2e-5, whole=True, dtypes=F32)
def _gated_delta_step(rng, dtype, B, Hk, Hv, Dk, Dv, W, room):
    C = 2 * Hk * Dk + Hv * Dv
    rows = {"qkv": (B, C), "z": (B, Hv, Dv), "alpha": (B, Hv), "beta": (B, Hv)}
    call = {name: normal(rng, *shape, dtype=dtype) for name, shape in rows.items()}
    kept = normal(rng, 5, W - 1 + room, C, dtype=dtype)
    states = {"conv_state": kept, "state": normal(rng, 5, Hv, Dv, Dk, scale=0.1)}
    weights = {"conv_weight": normal(rng, C, W, dtype="bfloat16"), "A_log": normal(rng, Hv), "dt_bias": normal(rng, Hv)}
    slots = np.array([4, 0, 2], np.int32)[:B]
    return {**call, **states, "slots": slots, **weights, "norm_weight": normal(rng, Dv), "Hk": Hk, "eps": 1e-5}


@case("gated_delta_step", sizes={"channels": (3, 2, 4, 20, 12, 3)}, rel=2e-5, whole=True, dtypes=F32)
def _gated_delta_step_channels(rng, dtype, B, Hk, Hv, Dk, Dv, W):
    gates = {"alpha": normal(rng, B, Hv, Dk, dtype=dtype), "dt_bias": normal(rng, Hv, Dk), "act": "sigmoid"}
    return _gated_delta_step(rng, dtype, B, Hk, Hv, Dk, Dv, W, 0) | gates


# -- mla -------------------------------------------------------------------------------------------------------------


@case("mla_split_q_kv", sizes={"decode": (3, 16, 8, 20), "many": (5, 12, 4, 9)}, rel=0)
def _mla_split_q_kv(rng, dtype, H, nope, rope, R):
    lead = () if H == 3 else (7,)
    return {
        "q_full": normal(rng, *lead, H, nope + rope, dtype=dtype),
        "kv_pre": normal(rng, *lead, R + rope, dtype=dtype),
        "nope": nope,
    }


@case("mla_prepare", sizes={"decode": (3, 5, 20, 12, 33), "sequence": (6, 9, 16, 8, 40), "empty": (0, 2, 4, 2, 8)})
def _mla_prepare(rng, dtype, T, H, nope, rope, R):
    rows = {"q": normal(rng, T, H * (nope + rope), dtype=dtype), "kv": normal(rng, T, R + rope, dtype=dtype)}
    pages = {name: normal(rng, 13, 4, wide, dtype=dtype) for name, wide in (("latent_pages", R), ("rope_pages", rope))}
    if T == 3:
        where = {"positions": np.array([15, 0, 6], np.int32), "block_table": rng.permutation(12).reshape(3, 4)}
    else:
        where = {"positions": np.array(2, np.int32), "block_table": rng.permutation(13)[:3]}
    where["block_table"] = where["block_table"].astype(np.int32)
    sizes = {"H": H, "nope": nope, "mscale": 1.25, "eps": 1e-5}
    return {**rows, **pages, **where, "kv_norm": normal(rng, R), "inv_freq": rope_inv_freq(rope, 1e4), **sizes}


@case("mla_prepare", sizes={"runs": (5, 20, 12, 33)})
def _mla_prepare_runs(rng, dtype, H, nope, rope, R):
    at, T = _runs(rng, 25), sum(RUNS) + 2
    call = _mla_prepare(rng, dtype, T, H, nope, rope, R)
    pages = {
        name: normal(rng, 25, 4, wide, dtype=dtype) for name, wide in (("latent_pages", R), ("rope_pages", rope))
    }  # fmt: skip
    where = {"positions": at["positions"], "block_table": at["table"], "sequence": at["sequence"]}
    return {**call, **pages, **where}


@case("mla_q_prime", sizes={"whole": (3, 5, 20, 12, 64), "one": (0, 4, 32, 32, 32)}, rel=4e-6, whole=True)
def _mla_q_prime(rng, dtype, T, H, nope, vd, R):
    lead = (T,) if T else ()
    return {"q_nope": normal(rng, *lead, H, nope, dtype=dtype), "kv_b": quantized(rng, H * (nope + vd), R)}


@case("mla_q_prime", sizes={"pair": (3, 5, 32, 40)}, rel=4e-6, whole=True)
def _mla_q_prime_pair(rng, dtype, T, H, nope, R):
    return {"q_nope": normal(rng, T, H, nope, dtype=dtype), "kv_b": quantized(rng, H, R, nope)}


@case("mla_q_prime", sizes={"dense": (3, 5, 20, 12, 24)}, rel=4e-6, whole=True)
def _mla_q_prime_dense(rng, dtype, T, H, nope, vd, R):
    return {
        "q_nope": normal(rng, T, H, nope, dtype=dtype),
        "kv_b": normal(rng, H * (nope + vd), R, dtype="bfloat16", scale=0.1),
    }


@case("mla_out_per_head", sizes={"whole": (3, 5, 20, 12, 64)}, rel=4e-6, whole=True)
def _mla_out_per_head(rng, dtype, T, H, nope, vd, R):
    return {"v_combine": normal(rng, T, H, R, dtype=dtype), "kv_b": quantized(rng, H * (nope + vd), R), "nope": nope}


@case("mla_out_per_head", sizes={"pair": (5, 12, 64)}, rel=4e-6, whole=True)
def _mla_out_per_head_pair(rng, dtype, H, vd, R):
    return {"v_combine": normal(rng, H, R, dtype=dtype), "kv_b": quantized(rng, H, vd, R)}


@case("mla_out_per_head", sizes={"dense": (5, 20, 12, 24)}, rel=4e-6, whole=True)
def _mla_out_per_head_dense(rng, dtype, H, nope, vd, R):
    kv_b = normal(rng, H * (nope + vd), R, dtype="float16", scale=0.1)
    return {"v_combine": normal(rng, H, R, dtype=dtype), "kv_b": kv_b, "v_head_dim": vd}


@case("mla_expand", sizes={"whole": (7, 5, 20, 12, 64), "prefill": (40, 2, 16, 16, 32)}, rel=4e-6, whole=True)
def _mla_expand(rng, dtype, T, H, nope, vd, R):
    return {
        "latent": normal(rng, T, R, dtype=dtype),
        "kv_b": quantized(rng, H * (nope + vd), R),
        "heads": H,
        "nope": nope,
    }


@case("mla_expand", sizes={"pair": (7, 5, 32, 12, 64)}, rel=4e-6, whole=True)
def _mla_expand_pair(rng, dtype, T, H, nope, vd, R):
    return {
        "latent": normal(rng, T, R, dtype=dtype),
        "kv_b": quantized(rng, H, R, nope),
        "unembed_out": quantized(rng, H, vd, R),
    }


def _latents(rng, dtype, *lead, R, rope):
    return {"latent_cache": normal(rng, *lead, R, dtype=dtype), "rope_k_cache": normal(rng, *lead, rope, dtype=dtype)}


@case("mla_sdpa", sizes={"decode": (5, 40, 12, 141), "none": (2, 8, 4, 0)}, rel=4e-6, whole=True)
def _mla_sdpa(rng, dtype, H, R, rope, n):
    q = {"q_prime": normal(rng, H, R, dtype=dtype), "q_pe": normal(rng, H, rope, dtype=dtype)}
    return {**q, **_latents(rng, dtype, 150, R=R, rope=rope), "cache_len": n, "softmax_scale": 0.2}


@case("mla_sdpa", sizes={"causal": (23, 5, 40, 12)}, rel=4e-6, whole=True)
def _mla_sdpa_causal(rng, dtype, T, H, R, rope):
    q = {"q_prime": normal(rng, T, H, R, dtype=dtype), "q_pe": normal(rng, T, H, rope, dtype=dtype)}
    return {**q, **_latents(rng, dtype, 50, R=R, rope=rope), "cache_len": 41, "softmax_scale": 0.2}


@case("mla_sdpa", sizes={"pages": (3, 5, 40, 12)}, rel=4e-6, whole=True)
def _mla_sdpa_pages(rng, dtype, B, H, R, rope):
    q = {"q_prime": normal(rng, B, H, R, dtype=dtype), "q_pe": normal(rng, B, H, rope, dtype=dtype)}
    where = {
        "cache_len": np.array([9, 0, 16], np.int32),
        "block_table": rng.permutation(12).reshape(3, 4).astype(np.int32),
    }
    return {**q, **_latents(rng, dtype, 13, 4, R=R, rope=rope), **where, "softmax_scale": 0.2}


@case("mla_sdpa", sizes={"runs": (5, 40, 12, None, None), "runs-few": (3, 33, 8, 4, 20)}, rel=4e-6, whole=True)
def _mla_sdpa_runs(rng, dtype, H, R, rope, longest, up_to):
    at, T = _runs(rng, 25), sum(RUNS) + 2
    q = {"q_prime": normal(rng, T, H, R, dtype=dtype), "q_pe": normal(rng, T, H, rope, dtype=dtype)}
    where = {"cache_len": at["lengths"], "block_table": at["table"], "starts": at["starts"]}
    where |= {"longest": longest, "up_to": up_to}
    return {**q, **_latents(rng, dtype, 25, 4, R=R, rope=rope), **where, "softmax_scale": 0.2}


@case("mla_prefill", sizes={"runs": (5, 20, 12, 64, 6, 3), "runs-few": (2, 8, 4, 32, 4, 30)}, rel=4e-6, whole=True)
def _mla_prefill_runs(rng, dtype, H, nope, vd, R, rope, longer_than):
    at, T = _runs(rng, 25), sum(RUNS) + 2
    q = {"q_nope": normal(rng, T, H, nope, dtype=dtype), "q_pe": normal(rng, T, H, rope, dtype=dtype)}
    where = {"start": at["positions"], "block_table": at["table"], "starts": at["starts"]}
    where |= {"softmax_scale": 0.2, "kv_b": quantized(rng, H * (nope + vd), R), "longer_than": longer_than, "up_to": 24}
    return {**q, **_latents(rng, dtype, 25, 4, R=R, rope=rope), **where}


@case("mla_prefill", sizes={"pages": (7, 5, 20, 12, 64, 6), "empty": (0, 2, 8, 4, 32, 4)}, rel=4e-6, whole=True)
def _mla_prefill_pages(rng, dtype, T, H, nope, vd, R, rope):
    q = {"q_nope": normal(rng, T, H, nope, dtype=dtype), "q_pe": normal(rng, T, H, rope, dtype=dtype)}
    table = rng.permutation(9)[:5].astype(np.int32)
    where = {"start": np.array(9, np.int32), "softmax_scale": 0.2, "kv_b": quantized(rng, H * (nope + vd), R)}
    return {**q, **_latents(rng, dtype, 9, 4, R=R, rope=rope), **where, "block_table": table}


@case("mla_prefill", sizes={"pair": (11, 3, 32, 12, 64, 6)}, rel=4e-6, whole=True)
def _mla_prefill_pair(rng, dtype, T, H, nope, vd, R, rope):
    q = {"q_nope": normal(rng, T, H, nope, dtype=dtype), "q_pe": normal(rng, T, H, rope, dtype=dtype)}
    weights = {"kv_b": quantized(rng, H, R, nope), "unembed_out": quantized(rng, H, vd, R)}
    return {**q, **_latents(rng, dtype, 30, R=R, rope=rope), "start": 13, "softmax_scale": 0.2, **weights}


@case("mla_sdpa_tile_accumulate", sizes={"first": (5, 40, 12, True), "later": (3, 33, 8, False)}, rel=4e-6, whole=True)
def _mla_sdpa_tile_accumulate(rng, dtype, H, R, rope, first):
    state = {"running_max": normal(rng, H), "denominator": np.abs(normal(rng, H)), "accumulator": normal(rng, H, R)}
    call = _mla_sdpa(rng, dtype, H, R, rope, 0)
    del call["cache_len"]
    return {**state, **call, "tile_start": 7, "tile_end": 90, "first": first}


@case("mla_sdpa_finalize", sizes={"some": (5, 33)})
def _mla_sdpa_finalize(rng, dtype, H, R):
    denominator = np.abs(normal(rng, H))
    denominator[2] = 0
    return {"denominator": denominator, "accumulator": normal(rng, H, R), "dtype": dtype}


# -- sampling --------------------------------------------------------------------------------------------------------


@case(
    "sample_tokens",
    sizes={
        "greedy": (4, 61, "greedy"),
        "plain": (3, 64, "plain"),
        "full": (4, 61, "full"),
        "one": (2, 1, "full"),
        "wide": (5, 20_003, "full"),
        "empty": (0, 7, "full"),
        "top_k": (3, 300, "top_k"),
        "edited": (6, 75, "full", 2, 3, 5),
        "slots": (3, 64, "plain", 4, 0),
        "masks": (4, 33, "greedy", 0, 2),
        "many": (5, 20_003, "top_k", 3, 2, 0),
        "logprobs": (3, 700, "greedy", 0, 0, 20),
    },
    rel=1e-13,
    dtypes=("float32",),
)
def _sample_tokens(rng, dtype, B, V, mode, S=0, M=0, logprobs=None):
    cut = mode in ("top_k", "full")
    tables = {}
    if S:
        counts = rng.integers(0, 5, (S, V)) * (rng.random((S, V)) < 0.2)
        tables = {
            "slots": np.arange(B, dtype=np.int32) % (S + 1) - 1,
            "counts": counts.astype(np.int32),
            "bias": normal(rng, S, V),
            "penalties": rng.uniform(0.3, 2, (S, 3)),
        }
    if M:
        masks = rng.integers(-(2**31), 2**31, (M, -(-V // 32))).astype(np.int32)
        tables |= {"masked": np.arange(B, dtype=np.int32) % (M + 1) - 1, "masks": masks}
    positions = rng.integers(0, 2**31 - 1, B).astype(np.int32)
    positions[-1:] = -1
    return {
        "logits": normal(rng, B, V, scale=3),
        "positions": positions,
        "temperature": rng.uniform(0.5, 1.5, B) * (mode != "greedy"),
        "top_k": rng.integers(1, 40, B).astype(np.int32) * cut,
        "top_p": rng.uniform(0.3, 1, B) if cut else np.ones(B),
        "min_p": rng.uniform(0, 0.1, B),
        "seed": rng.integers(-(2**63), 2**63 - 1, B),
        "mode": mode,
        "logprobs": logprobs,
        **tables,
    }


# -- drafts ----------------------------------------------------------------------------------------------------------


def _ahead(rng, S, D, B):
    """Rows of `ahead`, some with fewer drafts than there is room for, and slots, the second of them −1."""
    ahead = rng.integers(0, 50, (S, 3 + D)).astype(np.int32)
    ahead[:, 1] = rng.integers(0, D + 2, S)
    ahead[rng.random(S) < 0.4, 3 + D // 2 :] = -1
    slots = rng.permutation(S)[:B].astype(np.int32)
    slots[1:2] = -1
    return {"ahead": ahead, "slots": slots}


DRAFTED = {"one": (1, 3, 1, 3), "some": (7, 5, 5, 2), "most": (9, 7, 3, 7), "other": (4, 3, 4, 1)}  # S, D, B, k


@case("draft_rows", sizes=DRAFTED | {"empty": (2, 3, 0, 2)}, rel=0, dtypes=("float32",))
def _draft_rows(rng, dtype, S, D, B, k):
    known = rng.integers(0, 40, (B, 3)).astype(np.int32)
    known[::2, 0] = -1
    return _ahead(rng, S, D, B) | {"known": known, "drafts": k}


@case("accept_drafts", sizes=DRAFTED, rel=0, dtypes=("float32",))
def _accept_drafts(rng, dtype, S, D, B, k):
    tokens = rng.integers(-1, 4, B * (1 + k)).astype(np.int32)
    drawn = np.where(rng.random(len(tokens)) < 0.7, np.roll(tokens, -1), rng.integers(-2, 4, len(tokens)))
    positions = (rng.integers(0, 90, (B, 1)) + np.arange(1 + k)).astype(np.int32).reshape(-1)
    chance = rng.uniform(-1, 1, (B, D)).astype(np.float32)
    given = {"drawn": drawn.astype(np.int32), **_ahead(rng, S, D, B), "tokens": tokens, "positions": positions}
    return given | {"seed": rng.integers(-(2**63), 2**63 - 1, B), "chance": chance, "vocab": 4}


@case("chain_draft", sizes=DRAFTED | {"empty": (2, 3, 0, 2)}, rel=0, dtypes=("float32",))
def _chain_draft(rng, dtype, S, D, B, k):
    drawn = rng.integers(-2, 60, B).astype(np.int32)
    return {"drawn": drawn, **_ahead(rng, S, D, B), "place": k - 1}


@case(
    "token_logprobs",
    sizes={"some": (5, 61, 3), "one": (1, 1, 2), "wide": (4, 20_003, 20), "alone": (3, 300, 0), "empty": (0, 7, 2)},
    rel=1e-13,
    dtypes=("float32",),
)
def _token_logprobs(rng, dtype, R, V, top):
    tokens = rng.integers(0, V, R).astype(np.int32)
    tokens[R // 2 : R // 2 + (R > 1)] = -1
    return {"logits": normal(rng, R, V, scale=3), "tokens": tokens, "top": top}


# -- collective: of one rank, see test_collective.py for several -----------------------------------------------------


@case("all_reduce", sizes={"decode": (1, 64), "ragged": (5, 61), "empty": (0, 7)}, rel=0)
def _all_reduce(rng, dtype, rows, dim):
    return {"x": normal(rng, rows, dim, dtype=dtype)}


@case("all_gather", sizes={"decode": (1, 64, 64), "ragged": (5, 61, None), "empty": (0, 7, 7)}, rel=0)
def _all_gather(rng, dtype, rows, dim, columns):
    return {"x": normal(rng, rows, dim, dtype=dtype), "columns": columns}


@case("part_ids", sizes={"some": (37, 5, 11), "none": (3, 40, 0), "many": (1500, 0, 7), "empty": (0, 2, 3)}, rel=0)
def _part_ids(rng, dtype, count, first, rows):
    return {"ids": rng.integers(-1, 23, count).astype(np.int32), "first": first, "count": rows}


@case("ids_after_first", sizes={"one": (1,), "some": (37,), "many": (1500,), "empty": (0,)}, rel=0)
def _ids_after_first(rng, dtype, count):
    draw = lambda low, high: rng.integers(low, high, count).astype(np.int32)  # noqa: E731
    return {"ids": draw(-1, 23), "positions": draw(0, 3)}


@case("beside", sizes={"decode": (1, 64, 32), "ragged": (5, 61, 7), "bare": (3, 0, 5), "empty": (0, 7, 3)}, rel=0)
def _beside(rng, dtype, rows, left, right):
    return {"a": normal(rng, rows, left, dtype=dtype), "b": normal(rng, rows, right, dtype=dtype)}


def call(op: Any, arguments: Arguments, **extra: Any) -> Any:
    return op(**arguments, **extra)


ALL_OPS = tuple(sorted(ops.REGISTRY))
