"""Routers and combination of mixture-of-experts blocks on the CPU: checked against the definitions, then timed.

python benchmarks/ops/bench_moe_routing.py [--tokens 1 512] [--experts 128 256] [--json FILE]

Routers read their logits once, but choosing k of E takes k passes over a row in the first-level cache: their share of a
copy says how far they are from being free.
"""

import common
import numpy as np

import penstock
from penstock import ops
from penstock.dtypes import FLOATS, numpy_dtype

EPS = {"float32": 4e-6, "float16": 3e-3, "bfloat16": 2.4e-2}


def routers(rng: np.random.Generator, T: int, E: int, k: int) -> list[tuple]:
    """(label, op, arguments, shape, bytes that move)."""
    logits, bias = rng.standard_normal((T, E), np.float32), 0.1 * rng.standard_normal(E, np.float32)
    weights, nbytes = rng.random((T, k), np.float32), logits.nbytes + 8 * T * k
    return [
        ("moe_route", ops.moe_route, (logits, bias, k), (T, E, k), nbytes),
        ("moe_softmax_topk", ops.moe_softmax_topk, (logits, k), (T, E, k), nbytes),
        ("moe_group_route", ops.moe_group_route, (logits, bias, 8, 4, k, True, 2.5), (T, E, k), nbytes),
        ("moe_normalize_weights", ops.moe_normalize_weights, (weights,), (T, k), 2 * weights.nbytes),
    ]


def combinations(rng: np.random.Generator, T: int, dim: int, k: int, dtype: str) -> list[tuple]:
    kind = numpy_dtype(dtype)
    h, shared = (rng.standard_normal((T, dim), np.float32).astype(kind) for _ in range(2))
    experts = rng.standard_normal((T, k, dim), np.float32).astype(kind)
    weights, gate = rng.random((T, k), np.float32), rng.standard_normal(T, np.float32)
    sums = (h, None, None, shared, gate, experts[:, 0].copy())
    return [
        ("moe_combine_residual", (h, experts, weights, shared, gate), experts.nbytes + 3 * h.nbytes),
        ("moe_combine_residual, sum", sums, 4 * h.nbytes),
    ]


def bucket_row(rng: np.random.Generator, T: int, dim: int, dtype: str, rounds: int) -> dict:
    kind = numpy_dtype(dtype)
    bucket, weights = rng.standard_normal((T, dim), np.float32).astype(kind), rng.random(T, np.float32)
    token_idx = rng.permutation(T).astype(np.int32)
    sums = []
    for device in ("reference", "cpu"):
        sums.append(np.zeros((T, dim), kind))
        with penstock.backend(device):
            ops.moe_bucket_accumulate(sums[-1], bucket, token_idx, weights)
    common.check_close("moe_bucket_accumulate", sums[1], sums[0], EPS[dtype])
    weights *= 1e-6  # the sums stay finite
    seconds = common.best(lambda: ops.moe_bucket_accumulate(sums[1], bucket, token_idx, weights), rounds)
    return common.row("moe_bucket_accumulate", bucket.shape, dtype, seconds, 3 * bucket.nbytes)


def main() -> None:
    parser = common.parser("Time the routers and the combination on the CPU.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 512])
    parser.add_argument("--experts", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--dtype", nargs="+", choices=FLOATS, default=["float32", "bfloat16"])
    args = common.parse(parser)
    rng = np.random.default_rng(0)
    rows = []
    for T in args.tokens:
        for E in args.experts:
            for label, op, arguments, shape, nbytes in routers(rng, T, E, args.top_k):
                common.checked(op, *arguments, rel=EPS["float32"])
                seconds = common.best_op(op, *arguments, rounds=args.rounds)
                rows.append(common.row(label, shape, "float32", seconds, nbytes))
        for dtype in args.dtype:
            for label, arguments, nbytes in combinations(rng, T, args.dim, args.top_k, dtype):
                common.checked(ops.moe_combine_residual, *arguments, rel=EPS[dtype])
                seconds = common.best_op(ops.moe_combine_residual, *arguments, rounds=args.rounds)
                rows.append(common.row(label, (T, args.top_k, args.dim), dtype, seconds, nbytes))
            rows.append(bucket_row(rng, T, args.dim, dtype, args.rounds))
    common.report("moe routing", rows, args.json)


if __name__ == "__main__":
    main()
