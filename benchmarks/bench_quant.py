"""quantize and dequantize on the CPU: checked against the definitions, then timed.

    python benchmarks/bench_quant.py [--rows 25600] [--cols 4096] [--bits 4 8] [--repeat 5] [--json FILE]

GB/s counts the bytes that have to move: weights, codes, scales and biases, each once. The last column is its share of
what a NumPy copy of the same weights reaches in the same process.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np

from penstock.backends.cpu.quant import dequantize_into
from penstock.dtypes import FLOATS, numpy_dtype
from penstock.quant import BITS, GROUP_SIZES, dequantize, quantize, quantize_reference


def best(call: Callable[[], object], repeat: int) -> float:
    call()  # compiles, or loads what was compiled
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def check(weights: np.ndarray, bits: int, group_size: int) -> None:
    """Stops unless the kernels give the bits of the definitions on the first rows."""
    few = weights[: max(1, 200_000 // weights.shape[1])]
    got, want = quantize(few, bits, group_size), quantize_reference(few, bits, group_size)
    same = all(a.tobytes() == b.tobytes() for a, b in zip(got.arrays, want.arrays, strict=True))
    out = np.empty_like(few)
    dequantize_into(got, out)
    if not same or out.tobytes() != dequantize(want, want.dtype).tobytes():
        raise SystemExit(f"{weights.dtype}, {bits} bits: the kernels differ from the definitions; nothing was timed")


def measure(weights: np.ndarray, bits: int, group_size: int, repeat: int) -> list[dict]:
    check(weights, bits, group_size)
    out = np.empty_like(weights)
    tensor = quantize(weights, bits, group_size)
    copy = 2 * weights.nbytes / best(lambda: np.copyto(out, weights), repeat)
    few = weights[: max(1, len(weights) // 20)]
    calls = {
        "quantize": (weights.size, lambda: quantize(weights, bits, group_size)),
        "dequantize": (weights.size, lambda: dequantize_into(tensor, out)),
        "quantize definition": (few.size, lambda: quantize_reference(few, bits, group_size)),
    }
    rows = []
    for op, (size, call) in calls.items():
        seconds = best(call, repeat)
        moved = (weights.nbytes + tensor.nbytes) * size / weights.size
        row = {"op": op, "shape": [size // weights.shape[1], weights.shape[1]], "dtype": tensor.dtype, "bits": bits}
        row |= {"seconds": seconds, "Mweights_per_s": size / seconds / 1e6, "GB_per_s": moved / seconds / 1e9}
        rows.append(row | {"share_of_copy": moved / seconds / copy})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Time quantize and dequantize on the CPU.")
    parser.add_argument("--rows", type=int, default=25600)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--bits", type=int, nargs="+", choices=BITS, default=[3, 4, 8])
    parser.add_argument("--group-size", type=int, choices=GROUP_SIZES, default=64)
    parser.add_argument("--dtype", nargs="+", choices=FLOATS, default=list(FLOATS))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    wide = rng.standard_normal((args.rows, args.cols), dtype=np.float32)
    print(
        f"{platform.processor() or platform.machine()}, {numba.get_num_threads()} threads, groups of {args.group_size}"
    )
    print(
        f"{'op':<20} {'shape':<14} {'dtype':<9} {'bits':>4} {'seconds':>8} {'Mweights/s':>10} {'GB/s':>6} {'copy':>5}"
    )
    rows = []
    for dtype in args.dtype:
        weights = wide.astype(numpy_dtype(dtype), copy=False)
        for bits in args.bits:
            for row in measure(weights, bits, args.group_size, args.repeat):
                rows.append(row)
                name, shape = row["op"], "{} x {}".format(*row["shape"])
                rates = f"{row['seconds']:8.4f} {row['Mweights_per_s']:10.0f} {row['GB_per_s']:6.2f}"
                print(f"{name:<20} {shape:<14} {dtype:<9} {bits:>4} {rates} {row['share_of_copy']:5.0%}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"threads": numba.get_num_threads(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
