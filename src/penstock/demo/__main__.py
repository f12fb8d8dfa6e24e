"""A few ops on real arrays with timings: one MoE block of a small model, weights quantized to 4 bits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import penstock
from penstock import ops

DIM, WIDTH, EXPERTS, TOP_K = 1024, 512, 16, 4


def main() -> None:
    rng = np.random.default_rng(0)
    console = Console()
    table = Table(
        title=f"one token through an MoE block: {EXPERTS} experts, top {TOP_K}, width {DIM} → {WIDTH} → {DIM}"
    )
    for heading, justify in (("op", "left"), ("result", "left"), ("time", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]

    def timed(name: str, call: Callable[[], Any], shown: Callable[[Any], str]) -> Any:
        result = call()  # the first call may compile
        times = []
        for _ in range(10):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        table.add_row(name, shown(result), f"{min(times) * 1e3:.3f} ms")
        return result

    def weight(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5)

    dense = weight(EXPERTS, WIDTH, DIM)
    gate = timed("quantize", lambda: penstock.quantize(dense, bits=4), str)
    back = timed(
        "dequantize",
        lambda: penstock.dequantize(gate),
        lambda w: f"{w.shape}, {w.nbytes / gate.nbytes:.1f} × the bytes",
    )
    error = np.linalg.norm(back - dense) / np.linalg.norm(dense)
    up, down = penstock.quantize(weight(EXPERTS, WIDTH, DIM)), penstock.quantize(weight(EXPERTS, DIM, WIDTH))
    router = penstock.quantize(weight(EXPERTS, DIM), bits=8)

    h = rng.standard_normal((1, DIM), dtype=np.float32)
    x = timed("rms_norm", lambda: ops.rms_norm(h, np.ones(DIM, np.float32)), lambda y: f"{y.shape}")
    logits = timed("quantized_matmul", lambda: ops.quantized_matmul(x, router), lambda y: f"{y.shape} router logits")
    ids, share = timed(
        "moe_route",
        lambda: ops.moe_route(logits, None, TOP_K),
        lambda r: "experts " + ", ".join(f"{i} ({w:.0%})" for i, w in zip(r[0][0], r[1][0], strict=True)),
    )
    y = timed("moe_forward", lambda: ops.moe_forward(x, ids, share, gate, up, down), lambda y: f"{y.shape}")
    timed("residual_add", lambda: ops.residual_add(h, y), lambda y: f"{y.shape}")

    with penstock.backend("reference"):
        exact = ops.moe_forward(x, ids, share, gate, up, down)
    console.print(table)
    console.print(f"rounding the weights to 4 bits moved them by {error:.1%} of their size")
    console.print(f"largest difference to the NumPy definition: {np.abs(y - exact).max():.1e}")
    console.print(
        "next: [bold]penstock kernels[/bold] lists every op, [bold]penstock doctor[/bold] shows what this machine has"
    )


if __name__ == "__main__":
    main()
