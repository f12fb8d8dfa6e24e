"""Products of few tokens with quantized weights on a GPU, as a decode step makes them: checked, then timed.

    python -m benchmarks.ops.gpu_linear [--json FILE]
    python -m benchmarks.ops.gpu_linear --formats [Q4_K,Q6_K]    every format, or these, beside affine 4 bits; with Q4_K
                                                                 experts as a Q4_K_M file has them, too

Weights of 4 bits in groups of 64 unless the line says otherwise, bfloat16 scales and activations, float32 results.
Bytes are codes, scales and biases, each once; every call reads another matrix, so that none is in the L2 cache.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import penstock
from benchmarks.ops.gpu_common import (
    check,
    compile_ahead,
    finish,
    parser,
    random_weight,
    row,
    seconds,
    sets_of,
    weight_of,
)
from penstock import ops
from penstock.quant import BLOCK_TYPES, QuantizedTensor

EXACT = 2e-6  # relative error with a float32 result: exact products, float32 sums
QWEN, GEMMA, DEEPSEEK = "Qwen3.6-35B-A3B", "Gemma 4 26B-A4B", "DeepSeek-V3"
# model, N, K, tokens, bits, dtype of activations
PRODUCTS = [
    *((QWEN, N, 2048, 1, 4, "bfloat16") for N in (248320, 12288, 8192, 2048)),
    *((QWEN, N, 4096, 1, 4, "bfloat16") for N in (4096, 2048)),
    *((GEMMA, N, K, 1, 4, "bfloat16") for N, K in ((262144, 2816), (2816, 2112))),
    *((DEEPSEEK, N, K, 1, 4, "bfloat16") for N, K in ((18432, 7168), (2048, 7168), (7168, 2048))),
    *((QWEN, 12288, 2048, T, 4, "bfloat16") for T in (2, 4, 8)),
    *((QWEN, 12288, 2048, 1, bits, "bfloat16") for bits in (2, 3, 6, 8)),
    *((QWEN, 12288, 2048, 1, 4, dtype) for dtype in ("float32",)),
    (f"{QWEN}, router", 256, 2048, 1, 8, "bfloat16"),
]
EXPERTS = {  # dim, width of an expert, experts, chosen and shared ones
    QWEN: (2048, 512, 256, 9),
    GEMMA: (2816, 704, 128, 8),
    DEEPSEEK: (7168, 2048, 32, 9),  # 32 of its 256 experts: enough to miss the cache
}


FORMATS = ("4 bits", "8 bits", "mxfp4", "mxfp8", "nvfp4", *BLOCK_TYPES)
SHAPES = ((12288, 2048), (2048, 4096), (17408, 5120))  # N, K
TOKENS = (1, 4, 8, 16)
EXPERT_TOKENS = (8, 32)
FILES = {"4 bits": ("4 bits", "4 bits"), "Q4_K": ("Q4_K", "Q6_K")}  # gate and up, and down: those of a Q4_K_M file


def first_rows(w: QuantizedTensor, rows: int = 4096) -> torch.Tensor:
    return ops.dequantize(w.with_arrays(*(a[:rows] for a in w.arrays))).double()


def product_row(model: str, N: int, K: int, T: int, bits: int, dtype: str) -> dict[str, Any]:
    one = random_weight(N, K, bits=bits)
    weights = [one, *(random_weight(N, K, bits=bits) for _ in range(sets_of(one.nbytes) - 1))]
    x = torch.randn(T, K, device="cuda").to(getattr(torch, dtype))
    got = ops.quantized_matmul(x, one, dtype="float32")[:, :4096]
    error = check(f"[{N}, {K}] {bits} bits T = {T}", got, x.double() @ first_rows(one).T, EXACT)
    out = torch.empty(T, N, device="cuda")
    took = seconds([lambda w=w: ops.quantized_matmul(x, w, dtype="float32", out=out) for w in weights])
    shape = f"{model} [{N}, {K}] T = {T}" + (f", {dtype}" if dtype != "bfloat16" else "")
    return row(f"quantized_matmul, {bits} bits", shape, took, one.nbytes, error=error)


def format_row(format: str, N: int, K: int, T: int) -> dict[str, Any]:
    one = weight_of(format, N, K)
    weights = [one, *(weight_of(format, N, K) for _ in range(sets_of(one.nbytes) - 1))]
    x = torch.randn(T, K, device="cuda").bfloat16()
    want = x.double() @ first_rows(one).T
    error = check(f"[{N}, {K}] {format} T = {T}", ops.quantized_matmul(x, one, dtype="float32")[:, :4096], want, 1e-5)
    out = torch.empty(T, N, device="cuda", dtype=torch.bfloat16)
    ops.quantized_matmul(x, one, out=out)  # what is timed, which may go another way
    check(f"[{N}, {K}] {format} T = {T} in bfloat16", out[:, :4096], want, 5e-3)
    took = seconds([lambda w=w: ops.quantized_matmul(x, w, out=out) for w in weights])
    return row(f"quantized_matmul, {format}", f"[{N}, {K}] T = {T}", took, one.nbytes, error=error)


def beside_affine(calls: Iterable[Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows with their share of the bandwidth over that of the first one, 4 bits; printed as they come."""
    rows: list[dict[str, Any]] = []
    for call in calls:
        one = call()
        rows.append(one | {"of 4 bits": one["TB/s"] / (rows[0] if rows else one)["TB/s"]})
        print(f"{one['op']} {one['shape']}: {one['us']:.2f} µs, {rows[-1]['of 4 bits']:.2f} of 4 bits", flush=True)
    return rows


def format_rows(formats: Sequence[str], tokens: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each format, shape and number of tokens."""
    rows = []
    for N, K in SHAPES:
        for T in tokens:
            rows += beside_affine(functools.partial(format_row, format, N, K, T) for format in formats)
    return rows


def block_weights(name: str, experts: int | None = None) -> tuple[QuantizedTensor, ...]:
    """Gate, up and down of Qwen's experts in the formats of a file."""
    dim, width, E, _ = EXPERTS[QWEN]
    E, (first, last) = experts or E, FILES[name]
    return weight_of(first, E, width, dim), weight_of(first, E, width, dim), weight_of(last, E, dim, width)


def expert_format_row(name: str, T: int) -> dict[str, Any]:
    """A block of 8 of Qwen's 256 experts in the formats of a file; two tokens of it are checked."""
    dim, _, E, _ = EXPERTS[QWEN]
    gate, up, down = stacks = block_weights(name)
    ids = [torch.rand(T, E, device="cuda").topk(8, dim=1).indices.int() for _ in range(16)]
    x, share = torch.randn(T, dim, device="cuda").bfloat16(), torch.rand(T, 8, device="cuda")
    got, error = ops.moe_forward(x, ids[0], share, *stacks), 0.0
    for t in {0, T - 1}:
        want = torch.zeros(dim, device="cuda", dtype=torch.float64)
        for slot, factor in zip(ids[0][t].tolist(), share[t].double(), strict=True):
            g, u = (ops.dequantize(w[slot]).double() @ x[t].double() for w in (gate, up))
            h = (torch.nn.functional.silu(g) * u).bfloat16().double()
            want += factor * (ops.dequantize(down[slot]).double() @ h)
        error = max(error, check(f"experts of {name} T = {T}, token {t}", got[t], want, 5e-3))
    out = torch.empty(T, dim, device="cuda", dtype=x.dtype)
    took = seconds([lambda i=i: ops.moe_forward(x, i, share, *stacks, out=out) for i in ids])
    read = sum(len(i.unique()) for i in ids) / len(ids)
    nbytes = int(read * sum(w.nbytes for w in stacks) / E)
    return row(f"moe_forward, {name}", f"{QWEN} 8 experts T = {T}", took, nbytes, error=error)


def expert_format_rows(formats: Sequence[str], tokens: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    for T in tokens:
        rows += beside_affine(functools.partial(expert_format_row, name, T) for name in FILES if name in formats)
    return rows


def stream_row(N: int, K: int, T: int, dtype: str) -> dict[str, Any]:
    """A norm inside the product, of a residual stream in this dtype."""
    one = random_weight(N, K)
    weights = [one, *(random_weight(N, K) for _ in range(sets_of(one.nbytes) - 1))]
    x, norm = torch.randn(T, K, device="cuda").to(getattr(torch, dtype)), torch.rand(K, device="cuda") + 0.5
    normed = ops.rms_norm(x, norm, dtype="bfloat16").double()
    got = ops.norm_matmul(x, norm, one, dtype="float32", normed="bfloat16")[:, :4096]
    error = check(f"norm [{N}, {K}] T = {T} {dtype}", got, normed @ first_rows(one).T, 5e-4)
    out = torch.empty(T, N, device="cuda", dtype=torch.bfloat16)
    took = seconds([lambda w=w: ops.norm_matmul(x, norm, w, normed="bfloat16", out=out) for w in weights])
    return row("norm_matmul, 4 bits", f"[{N}, {K}] T = {T}, stream {dtype}", took, one.nbytes, error=error)


def dense_row(N: int, K: int, T: int) -> dict[str, Any]:
    weights = [torch.randn(N, K, device="cuda").bfloat16() for _ in range(sets_of(2 * N * K))]
    x = torch.randn(T, K, device="cuda").bfloat16()
    got = ops.bf16_matmul(x, weights[0], dtype="float32")
    error = check(f"dense [{N}, {K}] T = {T}", got, x.double() @ weights[0].double().T, EXACT)
    out = torch.empty(T, N, device="cuda")
    took = seconds([lambda w=w: ops.bf16_matmul(x, w, dtype="float32", out=out) for w in weights])
    return row("bf16_matmul", f"[{N}, {K}] T = {T}", took, weights[0].nbytes, error=error)


def expert_row(model: str, T: int = 1) -> dict[str, Any]:
    """Both launches of the experts of an MoE block; Qwen and DeepSeek with one more in place of the shared one."""
    dim, width, E, k = EXPERTS[model]
    gate_up, down = random_weight(E, 2 * width, dim), random_weight(E, dim, width)
    ids = [torch.stack([torch.randperm(E, device="cuda")[:k] for _ in range(T)]).int() for _ in range(32)]
    x, weights = torch.randn(T, dim, device="cuda").bfloat16(), torch.rand(T, k, device="cuda")
    want = torch.zeros(dim, device="cuda", dtype=torch.float64)
    for slot, factor in zip(ids[0][0].tolist(), weights[0].double(), strict=True):
        gate, up = (ops.dequantize(gate_up[slot]).double() @ x[0].double()).view(2, width)
        h = (torch.nn.functional.silu(gate) * up).bfloat16().double()
        want += factor * (ops.dequantize(down[slot]).double() @ h)
    error = check(f"experts of {model}", ops.moe_forward(x, ids[0], weights, gate_up, None, down)[0], want, 5e-3)
    out = torch.empty(T, dim, device="cuda", dtype=x.dtype)
    took = seconds([lambda i=i: ops.moe_forward(x, i, weights, gate_up, None, down, out=out) for i in ids])
    read = sum(len(i.unique()) for i in ids) / len(ids)  # experts that a call reads
    nbytes = int(read * (gate_up.nbytes + down.nbytes) / E)
    return row("moe_forward", f"{model} {k} experts T = {T}", took, nbytes, error=error)


def compiled(kind: str, *sizes: Any) -> None:
    """Runs a kernel once: several at a time, before anything is timed."""
    if kind == "format":
        format, N, K, T, dtype = sizes
        x, w = torch.randn(T, K, device="cuda").bfloat16(), weight_of(format, N, K)
        ops.quantized_matmul(x, w, dtype=dtype)
        return
    if kind == "file":
        name, T = sizes
        ids = torch.zeros(T, 8, device="cuda", dtype=torch.int32)
        x, share = torch.randn(T, EXPERTS[QWEN][0], device="cuda").bfloat16(), torch.rand(T, 8, device="cuda")
        ids += torch.arange(8, device="cuda", dtype=torch.int32)
        with penstock.backend("cuda", variant=None if T == 1 else "lanes"):
            ops.moe_forward(x, ids, share, *block_weights(name, 8 if T < 128 else 128))
        return
    if kind == "product":
        _, N, K, T, bits, dtype = sizes
        x, w = torch.randn(T, K, device="cuda").to(getattr(torch, dtype)), random_weight(N, K, bits=bits)
        ops.quantized_matmul(x, w, dtype="float32")
        return
    dim, width, _, k = EXPERTS[sizes[0]]
    ids = torch.zeros(1, k, device="cuda", dtype=torch.int32)
    x, weights = torch.randn(1, dim, device="cuda").bfloat16(), torch.rand(1, k, device="cuda")
    ops.moe_forward(x, ids, weights, random_weight(k, 2 * width, dim), None, random_weight(k, dim, width))


def main() -> None:
    reader = parser(__doc__.split("\n", 1)[0])
    reader.add_argument("--formats", nargs="?", const=",".join(FORMATS), help="these formats alone, or all of them")
    reader.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="with --formats: of products")
    reader.add_argument("--expert-tokens", default=",".join(map(str, EXPERT_TOKENS)), help="with --formats: of experts")
    args = reader.parse_args()
    if args.formats:
        formats = ["4 bits", *(format for format in args.formats.split(",") if format != "4 bits")]
        tokens, expert_tokens = ([int(T) for T in some.split(",") if T] for some in (args.tokens, args.expert_tokens))
        calls = [(format, N, K, T) for format in formats for N, K in SHAPES for T in tokens]
        sizes = [("format", *call, dtype) for dtype in ("float32", None) for call in calls]
        sizes += [("file", name, T) for name in FILES if name in formats for T in expert_tokens]
        compile_ahead(compiled, sizes, 15)
        finish("Formats", format_rows(formats, tokens) + expert_format_rows(formats, expert_tokens), args.json)
        return
    compile_ahead(compiled, [("product", *sizes) for sizes in PRODUCTS] + [("experts", model) for model in EXPERTS], 15)
    rows = [product_row(*sizes) for sizes in PRODUCTS]
    rows += [dense_row(256, 7168, 1), dense_row(12288, 2048, 1)]
    rows += [stream_row(N, 2048, T, dtype) for N in (12352, 9216) for T in (1, 8) for dtype in ("bfloat16", "float32")]
    rows += [expert_row(model) for model in EXPERTS]
    finish("Products of few tokens", rows, args.json)


if __name__ == "__main__":
    main()
