"""MLA on the CPU: products with kv_b against the read bandwidth of the weight, attention over latents in GFLOP/s.

The shapes are DeepSeek-V3's. Single tokens walk over several weights, so that none stays in cache between calls.
python benchmarks/ops/bench_mla.py [--json FILE]
"""

from typing import Any

import common
import numpy as np

from penstock import ops
from penstock.dtypes import bfloat16
from penstock.quant import QuantizedTensor

H, NOPE, ROPE, V, R = 128, 128, 64, 128, 512
WEIGHTS = 12

rng = np.random.default_rng(0)


def rows(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def weight(*shape: int, bits: int = 4, gs: int = 64) -> QuantizedTensor:
    """Random codes with scales and biases of a real weight's size."""
    *lead, K = shape
    packed = rng.integers(0, 2**32, (*lead, K * bits // 32), dtype=np.uint32)
    scales = (rng.random((*lead, K // gs), dtype=np.float32) * 0.01).astype(bfloat16)
    biases = (rng.random((*lead, K // gs), dtype=np.float32) * -0.05).astype(bfloat16)
    return QuantizedTensor(packed, scales, biases, bits, gs)


def check() -> None:
    w = weight(4 * 48, 128)
    common.checked(ops.mla_q_prime, rows(3, 4, 32), w, rel=2e-5)
    common.checked(ops.mla_out_per_head, rows(3, 4, 128), w, 32, rel=2e-5)
    common.checked(ops.mla_expand, rows(3, 128), w, None, 4, 32, rel=2e-5)
    q, pe, latent, rope_k = rows(9, 5, 40), rows(9, 5, 12), rows(600, 40), rows(600, 12)
    common.checked(ops.mla_sdpa, q, pe, latent, rope_k, 590, 0.1, rel=2e-5)


def line(op: str, shape: tuple[int, ...], seconds: float, nbytes: int, flops: int) -> dict[str, Any]:
    made: dict[str, Any] = {"op": op, "shape": list(shape), "dtype": "float32", "us": seconds * 1e6}
    made |= {"GB_per_s": nbytes / seconds / 1e9, "share_of_read": nbytes / seconds / 1e9 / common.read_rate()}
    return made | {"GFLOP_per_s": flops / seconds / 1e9}


def products(T: int, rounds: int) -> list[dict[str, Any]]:
    many = WEIGHTS if T == 1 else 1
    whole = [weight(H * (NOPE + V), R) for _ in range(many)]
    embed = [weight(H, R, NOPE) for _ in range(many)]
    q, v, latent = rows(T, H, NOPE), rows(T, H, R), rows(T, R)
    flops, nbytes = 2 * T * H * NOPE * R, embed[0].nbytes
    forms = [
        ("mla_q_prime", [lambda w=w: ops.mla_q_prime(q, w) for w in whole], 1),
        ("mla_q_prime of embed_q", [lambda w=w: ops.mla_q_prime(q, w) for w in embed], 1),
        ("mla_out_per_head", [lambda w=w: ops.mla_out_per_head(v, w, NOPE) for w in whole], 1),
        ("mla_expand", [lambda w=w: ops.mla_expand(latent, w, None, H, NOPE) for w in whole], 2),
    ]
    shape = (T, H, NOPE, R)
    return [line(name, shape, common.best_over(calls, rounds), n * nbytes, n * flops) for name, calls, n in forms]


def sdpa(T: int, n: int, rounds: int) -> dict[str, Any]:
    q, pe, latent, rope_k = rows(T, H, R), rows(T, H, ROPE), rows(n, R), rows(n, ROPE)
    y = np.empty_like(q)
    seconds = common.best(lambda: ops.mla_sdpa(q, pe, latent, rope_k, n, 0.07, out=y), rounds)
    flops = 2 * H * (2 * R + ROPE) * sum(n - t for t in range(T))
    return line("mla_sdpa", (T, H, R, n), seconds, latent.nbytes + rope_k.nbytes, flops)


def split(T: int, rounds: int) -> dict[str, Any]:
    q_full, kv_pre = rows(T, H, NOPE + ROPE), rows(T, R + ROPE)
    seconds = common.best_op(ops.mla_split_q_kv, q_full, kv_pre, NOPE, rounds=rounds)
    return common.row("mla_split_q_kv", q_full.shape, "float32", seconds, 2 * (q_full.nbytes + kv_pre.nbytes))


def main() -> None:
    args = common.parse(common.parser("Time MLA on the CPU."))
    check()
    table = [row for T in (1, 128) for row in products(T, args.rounds)]
    table += [sdpa(T, n, args.rounds) for T, n in ((1, 256), (1, 4096), (64, 1024))]
    table += [split(T, args.rounds) for T in (1, 512)]
    common.report("mla", table, args.json)


if __name__ == "__main__":
    main()
