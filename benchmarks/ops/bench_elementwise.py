"""Elementwise ops on the CPU: checked against the definitions, then timed for one token and for many.

python benchmarks/ops/bench_elementwise.py [--tokens 1 512] [--dim 2048] [--json FILE]
"""

import common
import numpy as np

from penstock import ops
from penstock.dtypes import FLOATS, numpy_dtype

SLOTS = 8
EPS = {"float32": 4e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def calls(rng: np.random.Generator, T: int, dim: int, dtype: str) -> list[tuple]:
    """(op, arguments, bytes that move)."""
    kind = numpy_dtype(dtype)
    a, b = (rng.standard_normal((T, dim), np.float32).astype(kind) for _ in range(2))
    experts = rng.standard_normal((T, SLOTS, dim), np.float32).astype(kind)
    weights = rng.random((T, SLOTS), np.float32)
    n = a.nbytes
    made = [(op, (a, b), 3 * n) for op in (ops.residual_add, ops.mul, ops.swiglu, ops.geglu, ops.sigmoid_gate)]
    made += [(ops.add, (a, b[0].copy()), 2 * n), (ops.gelu_tanh, (a,), 2 * n), (ops.softcap, (a, 30.0), 2 * n)]
    return [*made, (ops.weighted_sum, (experts, weights), (SLOTS + 1) * n + weights.nbytes)]


def main() -> None:
    parser = common.parser("Time the elementwise ops on the CPU.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 512])
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--dtype", nargs="+", choices=FLOATS, default=list(FLOATS))
    args = common.parse(parser)
    rng = np.random.default_rng(0)
    rows = []
    for T in args.tokens:
        for dtype in args.dtype:
            for op, arguments, nbytes in calls(rng, T, args.dim, dtype):
                common.checked(op, *arguments, rel=EPS[dtype])
                seconds = common.best_op(op, *arguments, rounds=args.rounds)
                rows.append(common.row(op.name, arguments[0].shape, dtype, seconds, nbytes))
    common.report("elementwise", rows, args.json)


if __name__ == "__main__":
    main()
