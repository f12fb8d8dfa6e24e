"""What the GPU benchmarks share: timing by CUDA graphs, the copy bandwidth, compiling in parallel, a table and JSON.

A call is timed as it runs in a decode step: many launches captured in one CUDA graph, over several sets of inputs that
together do not fit in the L2 cache, so that every set comes from memory. Bytes are those that have to move, each input
and output once; shares are of a copy (bytes read plus bytes written) measured in the same run.
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from penstock.quant import BLOCK_TYPES, MODES, GgufPlanes, Plane, QuantizedTensor, layout_in_planes

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder above, where these scripts are not started
from gpu_evidence import evidence

COLD_BYTES = 256 << 20  # of all sets of inputs together: several times the L2 cache


def sets_of(nbytes: int, most: int = 64) -> int:
    """How many sets of inputs of this size a timing rotates over."""
    return max(1, min(most, -(-COLD_BYTES // max(nbytes, 1))))


def seconds(calls: Sequence[Callable[[], object]], least: float = 2e-3, rounds: int = 7) -> float:
    """Seconds per call: the median of several replays of a CUDA graph that holds all calls, again and again.

    `calls` run one after the other, one per set of inputs; a replay takes at least `least` seconds.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    once = _replay(_captured(calls, 1), 3)
    repeat = max(1, min(200, int(least / max(once, 1e-7))))
    graph = _captured(calls, repeat)
    return _replay(graph, rounds) / (repeat * len(calls))


def _captured(calls: Sequence[Callable[[], object]], repeat: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for call in calls:
                call()
    return graph


def _replay(graph: torch.cuda.CUDAGraph, rounds: int) -> float:
    graph.replay()
    times = []
    for _ in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    return statistics.median(times)


@functools.cache
def copy_rate() -> float:
    """Bytes per second of a device-to-device copy, read plus written."""
    source = torch.randint(0, 2**31 - 1, (1 << 30,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):  # not in a graph: there a copy runs on the copy engine, a third slower
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    return 2 * source.nbytes / statistics.median(times[2:])


@functools.cache
def matrix_rate() -> float:
    """Operations per second of an 8192³ bfloat16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * 8192**3 / seconds([lambda: torch.mm(a, b, out=out)])


def random_weight(*shape: int, bits: int = 4, gs: int = 64) -> QuantizedTensor:
    """Random codes with weights of about K^(−1/2), made on the GPU."""
    *lead, K = shape
    packed = torch.randint(-(2**31), 2**31 - 1, (*lead, K * bits // 32), dtype=torch.int32, device="cuda")
    scales = ((torch.rand(*lead, K // gs, device="cuda") + 0.5) * (3 * K**-0.5 / 2**bits)).bfloat16()
    return QuantizedTensor(packed, scales, (-scales.float() * 2 ** (bits - 1)).bfloat16(), bits, gs)


def weight_of(format: str, *shape: int) -> QuantizedTensor:
    """Random codes and scales in a format ("4 bits", "mxfp4", "Q4_K"), made on the GPU."""
    *lead, K = shape
    if format in BLOCK_TYPES:
        blocks = K // BLOCK_TYPES[format].size
        planes = layout_in_planes(format).planes
        return GgufPlanes([_plane(plane, format, *lead, blocks * plane.entries) for plane in planes], format)
    if format not in MODES:
        return random_weight(*shape, bits=int(format.split()[0]))
    mode = MODES[format]
    bits, gs = mode.default_bits, mode.default_group_size
    packed = torch.randint(-(2**31), 2**31 - 1, (*lead, K * bits // 32), dtype=torch.int32, device="cuda")
    if bits == 8:
        packed &= 0x77777777  # no NaN
    low, high = (40, 60) if format == "nvfp4" else (118, 124)
    scales = torch.randint(low, high, (*lead, K // gs), dtype=torch.uint8, device="cuda")
    return QuantizedTensor(packed, scales, None, bits, gs, format)


def _plane(plane: Plane, format: str, *shape: int) -> torch.Tensor:
    """A plane of GGUF blocks with any bits, floats of a moderate size."""
    if plane.name == "top":
        halves = 2 if plane.dtype == "int32" else 1
        floats = ((torch.rand(*shape, halves, device="cuda") + 0.5) * 1e-3).half()
        return floats.view(torch.int32)[..., 0].contiguous() if halves == 2 else floats[..., 0].contiguous()
    if plane.dtype == "uint8":
        low, high = (118, 124) if format == "MXFP4" else (0, 256)
        return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda")


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖ in float64; NaN anywhere gives NaN."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def check(what: str, got: torch.Tensor, want: torch.Tensor, most: float) -> float:
    """Stops the program unless the relative error is at most `most`."""
    error = relative_error(got, want)
    if not error <= most:
        raise SystemExit(f"{what}: relative error {error:.3g}, at most {most:.3g} is allowed")
    return error


def compile_ahead(function: Callable[..., object], arguments: Iterable[tuple[Any, ...]], processes: int = 12) -> None:
    """Call `function(*arguments)` for each tuple in several processes: Triton's cache then holds what they compile."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        pool.starmap(function, list(arguments), chunksize=1)


def row(op: str, shape: str, took: float, nbytes: int = 0, flops: int = 0, **more: Any) -> dict[str, Any]:
    """One line of a table: what was called, its time, and what that is of the copy bandwidth or the matrix rate."""
    made: dict[str, Any] = {"op": op, "shape": shape, "us": took * 1e6}
    if nbytes:
        made |= {"bytes": nbytes, "TB/s": nbytes / took / 1e12, "share of copy": nbytes / took / copy_rate()}
    if flops:
        made |= {"flops": flops, "TFLOP/s": flops / took / 1e12, "share of matrix rate": flops / took / matrix_rate()}
    return made | more


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    columns = [name for name in columns if name not in ("bytes", "flops")]
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in ("op", "shape") else "right", no_wrap=True)
    for each in rows:
        table.add_row(*(_cell(name, each.get(name)) for name in columns))
    Console(width=160).print(table)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.startswith("share"):
        return f"{100 * value:.0f} %"
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return str(value)


def machine() -> dict[str, Any]:
    import triton

    about = torch.cuda.get_device_properties(0)
    return {
        "gpu": about.name,
        "multiprocessors": about.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy TB/s": copy_rate() / 1e12,
        "bf16 TFLOP/s": matrix_rate() / 1e12,
        **evidence(),
    }


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, help="also write the rows and the machine to this file")
    return made


def finish(title: str, rows: Sequence[dict[str, Any]], path: Path | None) -> None:
    """Print the table; write it with the machine if a path is given."""
    show(title, rows)
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), "rows": list(rows)}, indent=1) + "\n")
