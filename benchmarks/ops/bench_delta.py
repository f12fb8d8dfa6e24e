"""Gated delta net and embeddings on the CPU: checked against the definitions, then timed for one token and for many.

python benchmarks/ops/bench_delta.py [--tokens 1 512] [--dtype float32 bfloat16] [--json FILE]

Decode of gated_delta_net goes over 40 states, so that they come from memory as the layers of a model do. Its GFLOP/s
count 6 Dk Dv operations per token and head: the two products with the state and its update.
"""

import common
import numpy as np

import penstock
from penstock import ops
from penstock.dtypes import FLOATS, numpy_dtype

Hk, Hv, D, W = 16, 32, 128, 4
VOCAB, DIM = 20_000, 2048
STATES = 40
EPS = {"float32": 4e-5, "float16": 3e-3, "bfloat16": 2.4e-2}


def delta_call(rng: np.random.Generator, T: int, dtype: str) -> tuple[np.ndarray, ...]:
    qkv = (rng.standard_normal((T, 2 * Hk * D + Hv * D), np.float32) * D**-0.5).astype(numpy_dtype(dtype))
    g, b = (rng.uniform(least, 1, (T, Hv)).astype(np.float32) for least in (0.8, 0))
    return qkv, g, b


def delta_rows(rng: np.random.Generator, T: int, dtype: str, rounds: int) -> list[dict]:
    """gated_delta_net as a model calls it, and as the recurrence."""
    qkv, g, b = delta_call(rng, T, dtype)
    states = [(rng.standard_normal((Hv, D, D), np.float32) * 0.1) for _ in range(STATES if T == 1 else 1)]
    found = []
    for method in ("auto",) if T == 1 else ("auto", "sequential"):
        results = []
        for device in ("reference", "cpu"):
            state = states[0].copy()
            with penstock.backend(device):
                results.append((ops.gated_delta_net(state, qkv, g, b, Hk, Hv, D, D, method), state))
        common.check_close(f"gated_delta_net, {method}", results[1], results[0], EPS[dtype])
        calls = [lambda s=state: ops.gated_delta_net(s, qkv, g, b, Hk, Hv, D, D, method) for state in states]  # noqa: B023
        seconds = common.best_over(calls, rounds)
        nbytes = 2 * states[0].nbytes + qkv.nbytes + T * Hv * D * qkv.itemsize
        gflops = 6 * T * Hv * D * D / seconds / 1e9
        found.append(common.row(f"gated_delta_net, {method}", (T, Hv, D, D), dtype, seconds, nbytes, gflops=gflops))
    return found


def calls(rng: np.random.Generator, T: int, dtype: str) -> list[tuple]:
    """(label, op, arguments, shape, bytes that move)."""
    kind, C = numpy_dtype(dtype), 2 * Hk * D + Hv * D

    def rows(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(kind)

    x, state, weight = rows(T, C), rows(W - 1, C), rows(C, W)
    alpha, A_log = rows(T, Hv), rng.standard_normal(Hv, np.float32)
    table = rows(VOCAB, DIM)
    packed = penstock.quantize(table, bits=4, group_size=64)
    ids = rng.integers(0, VOCAB, T).astype(np.int32)
    y, gates, codes = T * DIM * kind.itemsize, 2 * alpha.nbytes + 8 * alpha.size, packed.nbytes * T // VOCAB
    return [
        ("conv1d_causal", ops.conv1d_causal, (x, state, weight), x.shape, 2 * x.nbytes + state.nbytes + weight.nbytes),
        ("gdn_decay_beta", ops.gdn_decay_beta, (alpha, alpha, A_log, A_log), alpha.shape, gates),
        ("embedding", ops.embedding, (ids, table), (T, DIM), 2 * y),
        ("quantized_embedding", ops.quantized_embedding, (ids, packed, dtype), (T, DIM), y + codes),
    ]


def main() -> None:
    parser = common.parser("Time the gated delta net and the embeddings on the CPU.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 512])
    parser.add_argument("--dtype", nargs="+", choices=FLOATS, default=["float32", "bfloat16"])
    args = common.parse(parser)
    rng = np.random.default_rng(0)
    rows = []
    for T in args.tokens:
        for dtype in args.dtype:
            rows += delta_rows(rng, T, dtype, args.rounds)
            for label, op, arguments, shape, nbytes in calls(rng, T, dtype):
                common.checked(op, *arguments, rel=EPS[dtype])
                seconds = common.best_op(op, *arguments, rounds=args.rounds)
                rows.append(common.row(label, shape, dtype, seconds, nbytes))
            state, x = calls(rng, T, dtype)[0][2][1::-1]
            seconds = common.best(lambda: ops.conv1d_state_update(state, x), args.rounds)  # noqa: B023
            rows.append(common.row("conv1d_state_update", x.shape, dtype, seconds, 2 * state.nbytes))
    common.report("delta and embed", rows, args.json)


if __name__ == "__main__":
    main()
