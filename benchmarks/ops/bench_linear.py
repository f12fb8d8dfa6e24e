"""Quantized products: decode against the read bandwidth, prefill in GFLOP/s, experts, and peers beside them.

Weights are many different matrices, so that none stays in cache; x is one row (decode) or T rows (prefill).
"""

from collections.abc import Callable
from typing import Any

import common
import numpy as np

import penstock
from penstock import ops
from penstock.dtypes import bfloat16
from penstock.quant import MODES, QuantizedTensor

rng = np.random.default_rng(0)


def weight(*shape: int, bits: int = 4, gs: int = 64) -> QuantizedTensor:
    """Random codes with scales and biases of a real weight's size."""
    *lead, K = shape
    packed = rng.integers(0, 2**32, (*lead, K * bits // 32), dtype=np.uint32)
    scales = (rng.random((*lead, K // gs), dtype=np.float32) * 0.01).astype(bfloat16)
    biases = (rng.random((*lead, K // gs), dtype=np.float32) * -0.05).astype(bfloat16)
    return QuantizedTensor(packed, scales, biases, bits, gs)


def float_weight(mode: str, *shape: int) -> QuantizedTensor:
    """Random codes of a mode that is not affine, scales of a real weight's size."""
    known, (*lead, K) = MODES[mode], shape
    packed = rng.integers(0, 2**32, (*lead, K * known.default_bits // 32), dtype=np.uint32)
    if mode == "mxfp8":
        packed &= np.uint32(0xBFBFBFBF)  # below 2, and no NaN
    low, high = (1, 8) if mode == "nvfp4" else (118, 122)
    scales = rng.integers(low, high, (*lead, K // known.default_group_size), dtype=np.uint8)
    return QuantizedTensor(packed, scales, None, known.default_bits, known.default_group_size, mode)


def rows(T: int, K: int) -> np.ndarray:
    return rng.standard_normal((T, K), dtype=np.float32)


def check(activations: str) -> None:
    """Every width of codes against the definition, few and many tokens, before anything is timed."""
    weights = {f"{bits} bits": weight(48, 256, bits=bits) for bits in (1, 2, 3, 4, 5, 6, 8)}
    weights |= {mode: float_weight(mode, 48, 256) for mode in MODES if mode != "affine"}
    for name, w in weights.items():
        for T in (1, 33):
            x = rows(T, 256)
            with penstock.backend("reference"):
                want = ops.quantized_matmul(x, w, activations=activations)
            got = ops.quantized_matmul(x, w, activations=activations)
            common.check_close(f"{name}, T = {T}", got / np.abs(want).max(), want / np.abs(want).max(), 4e-6)


def matvec(N: int, K: int, activations: str, rounds: int, bits: int = 4) -> dict[str, Any]:
    return _matvec(f"{bits}-bit", lambda: weight(N, K, bits=bits), N, K, activations, rounds)


def _matvec(name: str, make: Callable[[], QuantizedTensor], N: int, K: int, activations: str, rounds: int) -> Any:
    first = make()
    weights = [first, *(make() for _ in range(max(1, min(63, 300_000_000 // first.nbytes))))]
    x, y = rows(1, K), np.empty((1, N), np.float32)
    calls = [lambda w=w: ops.quantized_matmul(x, w, activations=activations, out=y) for w in weights]
    seconds = common.best_over(calls, rounds)
    return line(f"quantized_matmul {name} {activations}", (1, N, K), seconds, weights[0].nbytes)


def modes(N: int, K: int, rounds: int) -> list[dict[str, Any]]:
    """Weights of small floats beside affine ones of as many bits, in turn."""
    table = []
    for activations in ("int8", "float32"):
        for bits, names in ((4, ("mxfp4", "nvfp4")), (8, ("mxfp8",))):
            table.append(matvec(N, K, activations, rounds, bits))
            table += [_matvec(m, lambda m=m: float_weight(m, N, K), N, K, activations, rounds) for m in names]
    return table


def line(op: str, shape: tuple[int, ...], seconds: float, nbytes: int, flops: float | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"op": op, "shape": list(shape), "us": seconds * 1e6, "GB_per_s": nbytes / seconds / 1e9}
    made["read_GB_per_s"] = common.read_rate()
    made["share_of_read"] = nbytes / seconds / 1e9 / made["read_GB_per_s"]
    made["GFLOP_per_s"] = None if flops is None else flops / seconds / 1e9
    return made


def matmul(T: int, N: int, K: int, activations: str, rounds: int) -> dict[str, Any]:
    w, x, y = weight(N, K), rows(T, K), np.empty((T, N), np.float32)
    seconds = common.best(lambda: ops.quantized_matmul(x, w, activations=activations, out=y), rounds)
    return line(f"quantized_matmul 4-bit {activations}", (T, N, K), seconds, w.nbytes, 2 * T * N * K)


def experts(T: int, E: int, k: int, dim: int, width: int, rounds: int) -> dict[str, Any]:
    gate, up, down = weight(E, width, dim), weight(E, width, dim), weight(E, dim, width)
    x = rows(T, dim)
    routes = [np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32) for _ in range(32 if T == 1 else 1)]
    weights, y = np.full((T, k), 1 / k, np.float32), np.empty((T, dim), np.float32)
    calls = [
        lambda ids=ids: ops.moe_forward(x, ids, weights, gate, up, down, activations="int8", out=y) for ids in routes
    ]
    seconds = common.best_over(calls, rounds)
    used = len(np.unique(routes[0])) / E
    nbytes = int((gate.nbytes + up.nbytes + down.nbytes) * used)
    return line(f"moe_forward 4-bit int8, {k} of {E}", (T, dim, width), seconds, nbytes, 6 * T * k * dim * width)


def peers(rounds: int) -> list[dict[str, Any]]:
    """The same 4096 × 4096 product in mlx and torch, where they are installed."""
    made = []
    try:
        import mlx.core as mx
    except ImportError:
        pass
    else:
        w, s, b = mx.quantize(mx.array(rows(4096, 4096)), bits=4, group_size=64)
        x = mx.array(rows(1, 4096))
        seconds = common.best(lambda: mx.eval(mx.quantized_matmul(x, w, s, b, bits=4, group_size=64)), min(rounds, 3))
        made.append(line("mlx quantized_matmul 4-bit", (1, 4096, 4096), seconds, 4096 * 4096 * 9 // 16))
    try:
        import torch
    except ImportError:
        return made
    torch.set_num_threads(common.machine()["threads"])
    dense = [torch.randn(4096, 4096) for _ in range(8)]
    for T in (1, 512):
        x = torch.randn(T, 4096)
        seconds = common.best_over([lambda x=x, w=w: x @ w.T for w in dense], rounds)
        flops = 2 * T * 4096 * 4096 if T > 1 else None
        made.append(line("torch float32 matmul (dense)", (T, 4096, 4096), seconds, 4 * 4096 * 4096, flops))
    return made


def main() -> None:
    parser = common.parser("quantized products on the CPU")
    parser.add_argument("--peers", action="store_true", help="time mlx and torch beside penstock")
    args = common.parse(parser)
    for activations in ("int8", "float32"):
        check(activations)
    table = [matvec(4096, 4096, activations, args.rounds) for activations in ("int8", "float32")]
    table += [matvec(N, K, "int8", args.rounds) for N, K in ((2048, 2048), (512, 2048), (12288, 2048), (2048, 4096))]
    table += [matvec(4096, 4096, "int8", args.rounds, bits) for bits in (1, 2, 3, 5, 6, 8)]
    table += modes(4096, 4096, args.rounds)
    table += [experts(1, 256, 8, 2048, 512, args.rounds), experts(512, 256, 8, 2048, 512, max(3, args.rounds // 2))]
    for T in (4, 8, 16, 64, 512):
        table += [matmul(T, 4096, 4096, activations, max(3, args.rounds // 2)) for activations in ("int8", "float32")]
    if args.peers:
        table += peers(args.rounds)
    common.report("quantized products", table, args.json)


if __name__ == "__main__":
    main()
