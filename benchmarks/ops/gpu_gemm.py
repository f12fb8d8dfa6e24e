"""Products of many rows on a GPU: quantized and dense weights, and experts, at the shapes of three models.

    python -m benchmarks.ops.gpu_gemm [--json results.json]

Every call is checked against float64 on some of its rows, then timed. FLOPs are those of the product itself, 2 per
weight and row; for experts those of the chosen ones, over the time of sorting, both products and the sum.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.ops import gpu_common as common
from benchmarks.ops.gpu_common import random_weight
from penstock.backends.cuda._gemm import dense_copy, quantized_gemm
from penstock.backends.cuda._grouped import group_pairs, grouped_down_sum, grouped_gate_up

MATRICES = [(12288, 2048), (2048, 4096), (2048, 2048), (18432, 7168)]
ROWS = (16, 256, 4096)
TOKENS = (64, 4096)
EXPERTS = {  # experts, chosen, dim, width
    "Qwen3.6-35B-A3B": (256, 8, 2048, 512),
    "Gemma 4 26B-A4B": (128, 8, 2816, 704),
    "DeepSeek-V3": (256, 8, 7168, 2048),
}
Call = Callable[[], None]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def exact(w: Any) -> torch.Tensor:
    return dense_copy(w, torch.float32).double()


def dense_rows() -> list[dict[str, Any]]:
    made = []
    for N, K in MATRICES:
        sets = [random_weight(N, K) for _ in range(common.sets_of(N * K // 2, 8))]
        for T in ROWS:
            x, out = normal(T, K), torch.empty(T, N, device="cuda", dtype=torch.bfloat16)
            quantized_gemm(x, sets[0], out)
            few = slice(0, 16)
            common.check(f"quantized_gemm {T} {N} {K}", out[few], x[few].double() @ exact(sets[0]).T, 4e-3)
            calls = [lambda w=w, x=x, out=out: quantized_gemm(x, w, out) for w in sets]
            moved = sets[0].nbytes + 2 * T * (N + K)
            took = common.seconds(calls, rounds=5)
            made.append(common.row("quantized_matmul", f"T={T} [{N}, {K}]", took, moved, 2 * T * N * K))
    return made


def expert_stacks(E: int, dim: int, width: int) -> tuple[Any, Any, Any]:
    return random_weight(E, width, dim), random_weight(E, width, dim), random_weight(E, dim, width)


def expert_call(T: int, k: int, stacks: tuple[Any, Any, Any]) -> tuple[Call, Call]:
    """The routed half of an MoE block, and a check of one of its tokens."""
    gate, up, down = stacks
    E, N, K = gate.shape
    x, weights = normal(T, K), torch.rand(T, k, device="cuda")
    ids = torch.rand(T, E, device="cuda").topk(k).indices.int()
    h, y = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((T, k, N), (T, K)))

    def call() -> None:
        plan = group_pairs(ids, E)
        grouped_gate_up(x, gate, up, ids, None, "silu", h, plan=plan)
        grouped_down_sum(h, down, ids, weights, None, y, plan=plan)

    def check() -> None:
        call()
        t, want = T // 2, torch.zeros(K, device="cuda", dtype=torch.float64)
        for i, e in enumerate(ids[t].tolist()):
            act = torch.nn.functional.silu(exact(gate[e]) @ x[t].double()) * (exact(up[e]) @ x[t].double())
            want = want + float(weights[t, i]) * (exact(down[e]) @ act)
        common.check(f"experts {T} {E} {K} {N}", y[t], want, 1e-2)

    return call, check


def expert_rows() -> list[dict[str, Any]]:
    made = []
    for name, (E, k, dim, width) in EXPERTS.items():
        stacks = expert_stacks(E, dim, width)
        for T in TOKENS:
            call, check = expert_call(T, k, stacks)
            check()
            flops = 2 * T * k * 3 * dim * width
            used = 1 - (1 - k / E) ** T  # share of the experts that at least one of T tokens chooses
            moved = round(used * sum(w.nbytes for w in stacks)) + 4 * T * dim
            made.append(common.row("moe_forward", f"T={T} {name}", common.seconds([call], rounds=5), moved, flops))
    return made


def compile_one(kind: str, *sizes: Any) -> None:
    """One call, so that its kernels are in Triton's cache."""
    if kind == "matrix":
        N, K, T = sizes
        quantized_gemm(normal(T, K), random_weight(N, K), torch.empty(T, N, device="cuda", dtype=torch.bfloat16))
    else:
        name, T = sizes
        E, k, dim, width = EXPERTS[name]
        expert_call(T, k, expert_stacks(E, dim, width))[0]()
    torch.cuda.synchronize()


def main() -> None:
    args = common.parser("products of many rows: quantized weights and experts").parse_args()
    jobs = [("experts", name, T) for name in EXPERTS for T in TOKENS]
    jobs += [("matrix", N, K, T) for N, K in MATRICES for T in ROWS]
    common.compile_ahead(compile_one, jobs)
    common.finish("tensor-core products, 4 bits, groups of 64, bfloat16", dense_rows() + expert_rows(), args.json)


if __name__ == "__main__":
    main()
