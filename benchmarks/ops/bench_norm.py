"""Norm ops on the CPU: checked against the definitions, then timed for one token and for many.

python benchmarks/ops/bench_norm.py [--tokens 1 512] [--dim 2048] [--json FILE]
"""

import common
import numpy as np

from penstock import ops
from penstock.dtypes import FLOATS, numpy_dtype

SLOTS, HEAD = 8, 128
EPS = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2.4e-2}


def calls(rng: np.random.Generator, T: int, dim: int, dtype: str) -> list[tuple]:
    """(label, op, arguments, bytes that move)."""
    kind = numpy_dtype(dtype)

    def rows(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(kind)

    x, a, b, experts = rows(T, dim), rows(T, dim), rows(T, dim), rows(T, SLOTS, dim)
    heads, z = rows(T, dim // HEAD, HEAD), rows(T, dim // HEAD, HEAD)
    w, w_head = (rng.standard_normal(n, np.float32).astype(numpy_dtype("bfloat16")) for n in (dim, HEAD))
    slots = rng.random((T, SLOTS), np.float32)
    n, sums = x.nbytes, (SLOTS * x.nbytes + slots.nbytes)
    quarter = dim // 4 // HEAD
    return [
        ("rms_norm", ops.rms_norm, (x, w), 2 * n),
        ("rms_norm, heads", ops.rms_norm, (heads, w_head), 2 * n),
        ("rms_norm_mul", ops.rms_norm_mul, (x, w, a), 3 * n),
        ("rms_norm_triple", ops.rms_norm_triple, (x, w, w, w), 4 * n),
        ("rms_norm_qk", ops.rms_norm_qk, (x, quarter, HEAD, quarter * HEAD), 2 * n),
        ("gated_rms_norm", ops.gated_rms_norm, (heads, z, w_head), 3 * n),
        ("norm_add", ops.norm_add, (a, x, w), 3 * n),
        ("norm_add_scalar", ops.norm_add_scalar, (a, x, w, 0.7), 3 * n),
        ("residual_norm", ops.residual_norm, (a, x, w, 1e-6, True), 4 * n),
        ("residual_norm_scalar", ops.residual_norm_scalar, (a, x, w, 0.7), 3 * n),
        ("moe_wsum_norm_add", ops.moe_wsum_norm_add, (experts, slots, a, w), sums + 2 * n),
        ("moe_wsum_dnorm_add", ops.moe_wsum_dnorm_add, (experts, slots, a, w, w), sums + 2 * n),
        ("post_attn_triple_norm", ops.post_attn_triple_norm, (a, x, w, w, w, w), 6 * n),
        ("post_ff_norm2_endlayer", ops.post_ff_norm2_endlayer, (a, x, b, w, w, 0.7), 5 * n),
        (
            "moe_wsum_post_ff_norm2_endlayer",
            ops.moe_wsum_post_ff_norm2_endlayer,
            (experts, slots, a, b, w, w, 0.7),
            sums + 4 * n,
        ),
    ]


def main() -> None:
    parser = common.parser("Time the norm ops on the CPU.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 512])
    parser.add_argument("--dim", type=int, default=2048, help="a multiple of 512")
    parser.add_argument("--dtype", nargs="+", choices=FLOATS, default=list(FLOATS))
    args = common.parse(parser)
    rng = np.random.default_rng(0)
    rows = []
    for T in args.tokens:
        for dtype in args.dtype:
            for label, op, arguments, nbytes in calls(rng, T, args.dim, dtype):
                common.checked(op, *arguments, rel=EPS[dtype])
                seconds = common.best_op(op, *arguments, rounds=args.rounds)
                rows.append(common.row(label, arguments[0].shape, dtype, seconds, nbytes))
    common.report("norm", rows, args.json)


if __name__ == "__main__":
    main()
