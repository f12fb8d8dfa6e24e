"""What the op benchmarks share: timing, the yardsticks of memory, the machine, a table and JSON.

A row of a table is one measured call. Its bytes are those that have to move, each input and output once; they are
compared with a copy of as many bytes by the same threads in the same run (share_of_copy), and with that copy or one
that fits in no cache, whichever is slower (share_of_lower).
"""

import argparse
import datetime
import functools
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import prange
from rich.console import Console
from rich.table import Table

import penstock
from penstock import machine as machine_facts
from penstock.backends.cpu import _threads
from penstock.backends.cpu.compile import SUM_IN_ANY_ORDER, njit

DRAM_BYTES = 1 << 30  # of the array whose read and copy count as those of DRAM
_BLOCK = 1 << 14  # floats that a thread copies or sums at once


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every op benchmark: --json, --rounds, --threads."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, help="also write the rows and the machine to this file")
    made.add_argument("--rounds", type=int, default=7, help="rounds of a timing; the best one counts")
    made.add_argument("--threads", type=int, help="threads of the kernels (default: physical cores)")
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    args = made.parse_args(argv)
    if args.threads is not None:
        _threads.set_threads(args.threads)
    return args


# --------------------------------------------------------------------------------------------------------------------
# Timing


def best(call: Callable[[], object], rounds: int = 7, least: float = 0.01) -> float:
    """Seconds per call: the best of several rounds, each long enough (`least` seconds) for the clock.

    The first call, which may compile, does not count.
    """
    call()
    start = time.perf_counter()
    call()
    once = time.perf_counter() - start
    repeat = max(1, int(least / max(once, 1e-7)))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        times.append((time.perf_counter() - start) / repeat)
    return min(times)


def best_over(calls: Sequence[Callable[[], object]], rounds: int = 7) -> float:
    """Seconds per call of many different calls one after the other: weights that do not stay in cache between
    rounds.
    """

    def each() -> None:
        for call in calls:
            call()

    return best(each, rounds) / len(calls)


def best_op(op: Any, *args: Any, rounds: int = 7) -> float:
    """Seconds per call of an op as a program calls it, with the CPU backend and all checks.

    Outputs are new arrays for small calls and given ones (`out=`) for large calls: fresh pages of the system would cost
    more than the op, and a model keeps its buffers.
    """
    with penstock.backend("cpu"):
        made = op(*args)
        out = made if sum(a.nbytes for a in (made if isinstance(made, tuple) else (made,))) > 1 << 16 else None
        return best(lambda: op(*args, out=out), rounds)


# --------------------------------------------------------------------------------------------------------------------
# Yardsticks: what this machine's memory gives to the same number of threads


# copy      out[i] = source[i]
# shapes    source, out float32 [n]
# threads   prange over blocks of 64 KB
# bytes     8 * n
# limits    none
@njit(parallel=True)
def _copy(source, out):
    for c in prange((source.size + _BLOCK - 1) // _BLOCK):
        stop = min(source.size, (c + 1) * _BLOCK)
        for i in range(c * _BLOCK, stop):
            out[i] = source[i]


@njit(fastmath=SUM_IN_ANY_ORDER)
def _block_sum(block):
    total = np.float32(0)
    for i in range(block.size):
        total += block[i]
    return total


# read      partial[c] = sum of block c of source
# shapes    source float32 [n], partial float32 [ceil(n / block)]
# threads   prange over blocks of 64 KB
# bytes     4 * n
# limits    none
@njit(parallel=True)
def _read(source, partial):
    for c in prange(partial.size):
        partial[c] = _block_sum(source[c * _BLOCK : min(source.size, (c + 1) * _BLOCK)])


def _distinct(n: int) -> np.ndarray:
    """Numbers that differ from page to page: a host may keep equal pages of its guests once, then they sit in cache."""
    return np.arange(n, dtype=np.float32)


@functools.cache
def copy_rate(nbytes: int) -> float:
    """GB/s of a copy that reads and writes nbytes together, by all threads of the kernels (or NumPy's copy if
    faster).
    """
    source = _distinct(max(1, nbytes // 8))
    out = np.zeros_like(source)
    seconds = min(best(lambda: _threads.run(_copy, source, out)), best(lambda: np.copyto(out, source)))
    return 2 * source.nbytes / seconds / 1e9


@functools.cache
def dram_copy_rate() -> float:
    """GB/s of a copy far larger than any cache."""
    return copy_rate(DRAM_BYTES)


@functools.cache
def _read_arrays(nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    source = _distinct(nbytes // 4)
    return source, np.zeros((source.size + _BLOCK - 1) // _BLOCK, np.float32)


def read_rate(nbytes: int = DRAM_BYTES, rounds: int = 3) -> float:
    """GB/s of reading nbytes by all threads of the kernels, now: a shared host gives twice as much in one minute as in
    the next, so a share is taken against a reading of its own minute.
    """
    source, partial = _read_arrays(nbytes)
    return source.nbytes / best(lambda: _threads.run(_read, source, partial), rounds) / 1e9


def shares(nbytes: int, seconds: float) -> dict[str, float]:
    """GB/s against the copy of as many bytes, and against that or the one from DRAM, whichever is slower."""
    rate, copy = nbytes / seconds / 1e9, copy_rate(nbytes)
    return {"share_of_copy": rate / copy, "share_of_lower": rate / min(copy, dram_copy_rate())}


# --------------------------------------------------------------------------------------------------------------------
# Correctness first


def check_close(what: str, got: Any, want: Any, rel: float) -> None:
    """Stops the program unless |got - want| <= rel * max(|want|, 1) everywhere (tuples: each array); None fits None."""
    if isinstance(want, tuple):
        for number, (a, b) in enumerate(zip(got, want, strict=True)):
            check_close(f"{what}, output {number}", a, b, rel)
        return
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    off = np.abs(a - b) / np.maximum(np.abs(b), 1)
    if a.shape != b.shape or not np.all((off <= rel) | (np.isnan(a) & np.isnan(b)) | (a == b)):
        raise SystemExit(f"{what}: off by {np.nanmax(off):.3g} from the definition, at most {rel:.3g} is allowed")


def checked(op: Any, *args: Any, rel: float, **kwargs: Any) -> Any:
    """The CPU kernel's result of an op, after a comparison with the definition."""
    with penstock.backend("reference"):
        want = op(*args, **kwargs)
    with penstock.backend("cpu"):
        got = op(*args, **kwargs)
    check_close(op.name, got, want, rel)
    return got


# --------------------------------------------------------------------------------------------------------------------
# Reports


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    total, _ = machine_facts.memory()
    return {
        "cpu": machine_facts.cpu_model(),
        "threads": _threads.threads(),
        "cores": machine_facts.physical_cores(),
        "memory_GB": round(total / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "penstock": penstock.__version__,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def row(op: str, shape: Sequence[int], dtype: str, seconds: float, nbytes: int, **extra: Any) -> dict[str, Any]:
    """One measured call; `extra` columns follow (flops as GFLOP/s: pass gflops=…)."""
    made = {"op": op, "shape": list(shape), "dtype": dtype, "us": seconds * 1e6, "GB_per_s": nbytes / seconds / 1e9}
    return made | shares(nbytes, seconds) | extra


def report(
    title: str,
    rows: Iterable[dict[str, Any]],
    json_file: Path | None = None,
    shown: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    **summary: float,
) -> None:
    """Print the machine, the table and a summary, and write them as JSON if asked to; shown: what to print of a row."""
    rows = list(rows)
    where = machine()
    # a pipe or file has no width of its own: wide enough for every column
    console = Console(highlight=False) if Console().is_terminal else Console(highlight=False, width=140)
    console.print(f"{where['cpu']}, {where['threads']} threads, {where['memory_GB']} GB, numba {where['numba']}")
    yardsticks = {"copy_DRAM_GB_per_s": dram_copy_rate()}
    console.print(f"copy of {DRAM_BYTES >> 20} MB: {dram_copy_rate():.1f} GB/s (read and written bytes together)")
    printed = [shown(one) for one in rows]
    columns = list(dict.fromkeys(name for one in printed for name in one))
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in ("op", "shape", "dtype", "backend") else "right")
    for one in printed:
        table.add_row(*(_cell(name, one.get(name)) for name in columns))
    console.print(table)
    for name, value in summary.items():
        console.print(f"{name.replace('_', ' ')}: {_cell(name, value)}")
    if json_file is not None:
        content = {"title": title, "machine": where, "yardsticks": yardsticks, **summary, "rows": rows}
        json_file.write_text(json.dumps(content, indent=2) + "\n")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return " x ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.0%}" if name.startswith("share") else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)
