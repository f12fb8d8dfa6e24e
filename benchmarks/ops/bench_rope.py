"""Rope on the CPU: checked against the definition, then timed for one token and for many.

python benchmarks/ops/bench_rope.py [--tokens 1 512] [--heads 16] [--head-dim 128] [--json FILE]
"""

import common
import numpy as np

from penstock import ops
from penstock.dtypes import FLOATS, numpy_dtype

EPS = {"float32": 4e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def main() -> None:
    parser = common.parser("Time rope on the CPU.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 512])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", nargs="+", choices=FLOATS, default=list(FLOATS))
    args = common.parse(parser)
    rng = np.random.default_rng(0)
    D, part = args.head_dim, args.head_dim // 4
    whole, partial = ops.rope_inv_freq(D, 1e6), ops.rope_inv_freq(part, 1e7)
    weight = rng.standard_normal(D, np.float32)
    rows = []
    for T in args.tokens:
        for dtype in args.dtype:
            x = rng.standard_normal((T, args.heads, D), np.float32).astype(numpy_dtype(dtype))
            calls = [
                ("rope", ops.rope, (x, whole, 4000)),
                ("rope, a quarter", ops.rope, (x, partial, 4000, part)),
                ("rope, interleaved", ops.rope, (x, whole, 4000, D, 1.0, True)),
                ("head_norm_rope", ops.head_norm_rope, (x, weight, whole, 4000)),
            ]
            for label, op, arguments in calls:
                common.checked(op, *arguments, rel=EPS[dtype])
                seconds = common.best_op(op, *arguments, rounds=args.rounds)
                rows.append(common.row(label, x.shape, dtype, seconds, 2 * x.nbytes))
    common.report("rope", rows, args.json)


if __name__ == "__main__":
    main()
