"""Attention and caches on the CPU: decode against the read bandwidth of its keys and values, prefill in GFLOP/s.

Decode walks over several caches, so that none stays in the CPU's cache between calls.
python benchmarks/ops/bench_attention.py [--heads 16 2 256] [--json FILE]
"""

from typing import Any

import common
import numpy as np

from penstock import ops
from penstock.dtypes import FLOATS, numpy_dtype

EPS = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2.4e-2}
CACHES = 200 << 20  # bytes of keys and values that a decode benchmark walks over

rng = np.random.default_rng(0)


def rows(*shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(numpy_dtype(dtype))


def check(H: int, Hkv: int, D: int) -> None:
    for dtype in FLOATS:
        k, v = rows(600, Hkv * D, dtype=dtype), rows(600, Hkv * D, dtype=dtype)
        for window in (None, 77):
            common.checked(ops.attention_decode, rows(H, D, dtype=dtype), k, v, 590, D**-0.5, window, rel=EPS[dtype])
            q = rows(70, H, D, dtype=dtype)
            common.checked(ops.attention_prefill, q, k, v, 500, D**-0.5, window, rel=EPS[dtype])


def line(op: str, shape: tuple[int, ...], dtype: str, seconds: float, nbytes: int, flops: int | None) -> dict[str, Any]:
    made: dict[str, Any] = {"op": op, "shape": list(shape), "dtype": dtype, "us": seconds * 1e6}
    made |= {"GB_per_s": nbytes / seconds / 1e9, "share_of_read": nbytes / seconds / 1e9 / common.read_rate()}
    return made | {"GFLOP_per_s": None if flops is None else flops / seconds / 1e9}


def decode(
    H: int, Hkv: int, D: int, n: int, dtype: str, rounds: int, window: int | None = None, B: int = 0, page: int = 0
) -> dict[str, Any]:
    """One step of one sequence (B = 0) or of B sequences, contiguous or in pages."""
    seen, size = min(n, window or n), numpy_dtype(dtype).itemsize
    nbytes = 2 * max(B, 1) * seen * Hkv * D * size
    many = max(2, CACHES // (2 * max(B, 1) * n * Hkv * D * size))
    lead = (B * n // page, page) if page else (B, n) if B else (n,)
    caches = [(rows(*lead, Hkv * D, dtype=dtype), rows(*lead, Hkv * D, dtype=dtype)) for _ in range(many)]
    q = rows(B, H, D, dtype=dtype) if B else rows(H, D, dtype=dtype)
    y, lengths = np.empty_like(q), np.full(B, n, np.int32)
    table = rng.permutation(B * n // page).reshape(B, -1).astype(np.int32) if page else None
    slots = np.arange(B, dtype=np.int32) if B else None

    def step(k: np.ndarray, v: np.ndarray) -> None:
        if page:
            ops.attention_paged(q, k, v, table, lengths, D**-0.5, window, out=y)
        else:
            ops.attention_decode(q, k, v, lengths if B else n, D**-0.5, window, slots, out=y)

    calls = [lambda k=k, v=v: step(k, v) for k, v in caches]
    seconds = common.best_over(calls, rounds)
    name = "attention_paged" if page else "attention_decode"
    name += f", {B} sequences" if B else ""
    name += f", window {window}" if window else ""
    return line(name, (H, Hkv, D, n), dtype, seconds, nbytes, 4 * max(B, 1) * seen * H * D)


def prefill(
    H: int, Hkv: int, D: int, T: int, start: int, dtype: str, rounds: int, window: int | None
) -> dict[str, Any]:
    k, v = rows(start + T, Hkv * D, dtype=dtype), rows(start + T, Hkv * D, dtype=dtype)
    q = rows(T, H, D, dtype=dtype)
    y = np.empty_like(q)
    seconds = common.best(lambda: ops.attention_prefill(q, k, v, start, D**-0.5, window, out=y), rounds)
    seen = sum(min(start + t + 1, window or start + T) for t in range(T))
    name = f"attention_prefill at {start}" + (f", window {window}" if window else "")
    return line(name, (T, H, Hkv, D), dtype, seconds, k.nbytes + v.nbytes + q.nbytes + y.nbytes, 4 * seen * H * D)


def copies(H: int, Hkv: int, D: int, T: int, rounds: int) -> list[dict[str, Any]]:
    """Splitting and appending T rows, against a copy of as many bytes."""
    q_proj, k, v = rows(T, H, 2 * D), rows(T, Hkv * D), rows(T, Hkv * D)
    seconds = common.best_op(ops.split_q_gate, q_proj, rounds=rounds)
    made = [common.row("split_q_gate", q_proj.shape, "float32", seconds, 2 * q_proj.nbytes)]
    nbytes = 2 * (k.nbytes + v.nbytes)
    flat = np.zeros((4096, Hkv * D), np.float32), np.zeros((4096, Hkv * D), np.float32)
    seconds = common.best(lambda: ops.kv_cache_append(k, v, *flat, 100), rounds)
    made.append(common.row("kv_cache_append", k.shape, "float32", seconds, nbytes))
    paged = tuple(a.reshape(256, 16, -1) for a in flat)
    table = rng.permutation(256).astype(np.int32)
    seconds = common.best(lambda: ops.kv_pages_append(k, v, *paged, table, 100), rounds)
    made.append(common.row("kv_pages_append", k.shape, "float32", seconds, nbytes))
    return made


def main() -> None:
    parser = common.parser("Time attention on the CPU.")
    parser.add_argument("--heads", type=int, nargs=3, default=[16, 2, 256], metavar=("H", "Hkv", "D"))
    args = common.parse(parser)
    H, Hkv, D = args.heads
    check(H, Hkv, D)
    table = [decode(H, Hkv, D, n, "float32", args.rounds) for n in (16, 256, 1024, 4096, 16384)]
    table += [decode(H, Hkv, D, 4096, dtype, args.rounds) for dtype in FLOATS if dtype != "float32"]
    table += [decode(H, Hkv, D, 4096, "float32", args.rounds, window=w) for w in (128, 1024)]
    table += [decode(H, Hkv, D, 1024, "float32", args.rounds, B=8, page=p) for p in (0, 16)]
    table += [decode(H, H, 128, 1024, "float32", args.rounds)]
    cases = ((512, 0, None), (512, 4096, None), (512, 4096, 1024), (16, 4096, None))
    for dtype in ("float32", "bfloat16"):
        table += [prefill(H, Hkv, D, *case[:2], dtype, args.rounds, case[2]) for case in cases]
    common.report("attention", table, args.json)
    small = [row for T in (1, 512) for row in copies(H, Hkv, D, T, args.rounds)]
    copies_json = args.json and args.json.with_stem(args.json.stem + "_copies")
    common.report("rows into caches and cut in two", small, copies_json)


if __name__ == "__main__":
    main()
