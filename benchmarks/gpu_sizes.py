"""Times whole decode steps on a GPU with other launch sizes for one shape of product at a time, the rest as in use.

    python benchmarks/gpu_sizes.py [--models gpt-oss-20b:4,llama-3.2-3b:8] [--only "8 bits,[2880, 4096]"] [--rows 1]
                                   [--depth 100] [--most 10] [--rounds 5] [--processes 14] [--json FILE]

A shape is what `_matvec.config` chooses a launch by. Ways are rows and warps of a program, blocks of a warp at a time
and programs that share K. They are compiled in processes of their own, and those that spill registers are left out.
Each is checked first: a replay has to give the logits of its calls with a wait after each one, bit for bit, and the
first product of the shape has to be near the one that the launch in use gives. Then the ways of a shape take turns.
"""

import argparse
import collections
import contextlib
import importlib
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from gpu_evidence import evidence
from gpu_onerow import Step, Way, difference, loaded, opened
from triton.runtime.jit import JITFunction

from penstock.backends.cuda import _chosen, _matvec
from penstock.backends.cuda._codes import block_codes
from penstock.backends.cuda._floats import _KINDS, width
from penstock.backends.cuda._launch import INTERPRETED, compiled_for
from penstock.backends.cuda._matvec import Config

MODELS = "gpt-oss-20b:4,gemma4-26b-a4b:6,llama-3.2-3b:8,qwen3.8-27b:4,deepseek-v3:4,qwen3.6-35b-a3b:8"
WARPS, BLOCKS, PARTS = (1, 2, 4, 8, 16), (1, 2, 3, 4), (1, 2, 3, 4, 6)
REPLAYS = 40  # in a round
NEAR = 5e-3  # of a product in bfloat16 that was summed in another order
ENOUGH = 48 << 10  # bytes under way of a multiprocessor
KERNELS = ("_matvec_codes_kernel", "_chosen_gate_up_kernel")


class Shape(NamedTuple):
    """The arguments of `_matvec.config`."""

    bits: int
    gs: int
    N: int
    K: int
    T: int
    pairs: int
    slots: int
    gated: bool
    normed: bool
    wide: bool
    processors: int

    def __str__(self) -> str:
        format = {kind: name for name, kind in _KINDS.items()}.get(self.bits, f"{self.bits} bits")
        said = f"{format} of {self.gs} [{self.N}, {self.K}]"
        more = ("pairs", self.pairs), ("slots", self.slots), ("tokens", self.T)
        said += "".join(f" {count} {name}" for name, count in more if count > 1)
        flags = ("gated", self.gated), ("normed", self.normed), ("wide", self.wide)
        return said + "".join(f" {name}" for name, there in flags if there)


class Size(NamedTuple):
    """A launch: the arguments of `_matvec._coded`. More tokens than there are: shorter blocks."""

    tokens: int
    rows: int
    warps: int
    blocks: int
    parts: int

    @classmethod
    def of(cls, config: Config) -> "Size":
        return cls(config.TP, config.R, config.S, config.U, config.parts)

    def __str__(self) -> str:
        parts = f", {self.parts} parts" if self.parts > 1 else ""
        return f"{self.rows} rows, {self.warps} warps, {self.blocks} blocks for {self.tokens}{parts}"


# -- ways --------------------------------------------------------------------------------------------------------------


def words_of_lane(shape: Shape, tokens: int, rows: int, blocks: int) -> int:
    """Registers for the codes that a lane has asked for."""
    codes = blocks * rows * (1 + shape.gated) * block_codes(shape.bits, shape.gs, tokens)
    return codes * width(shape.bits) // 1024


def ways_of(shape: Shape, used: Size, most: int) -> list[Size]:
    """Launches to try, the likely ones first: those that leave few warps without a block in the last round, whose codes
    fit in registers, and that have enough under way on a multiprocessor.
    """
    least = 8 if shape.gated else 16
    found: dict[Size, float] = {}
    for tokens, rows, warps, ahead, parts in itertools.product(
        (used.tokens, 2 * used.tokens), (least, 2 * least), WARPS, BLOCKS, PARTS
    ):
        long = block_codes(shape.bits, shape.gs, tokens)
        blocks, step = shape.slots * -(-shape.K // long), warps * ahead
        rounds = -(-blocks // (step * parts))
        busy = shape.slots * shape.K / (rounds * step * parts * long)
        programs = -(-shape.N // rows) * shape.pairs * parts / shape.processors
        words = words_of_lane(shape, tokens, rows, ahead)
        if parts > 1 and (shape.gated or shape.pairs > 1 or (parts - 1) * rounds * step >= blocks or programs > 16):
            continue
        # codes of more than 64 registers spill in a loop and take long to compile
        room = 48 if warps == 16 else 96 if rounds == 1 else 64
        if busy < 0.7 or tokens > 8 or not 16 <= words <= room:
            continue
        # programs at once by registers, and the share of rounds of programs that is full
        at_once = max(1, min(32, 64 // warps, 2048 // (warps * (words + 72))))
        full = programs / at_once / -(-programs // at_once) if programs > at_once else 1.0
        under_way = min(programs, at_once) * warps * words * 128
        likely = busy * full**0.5 * min(1.0, under_way / ENOUGH) * (0.95 if tokens > used.tokens else 1.0)
        likely *= 1 - 0.04 * min(rounds - 1, 5)  # a warp waits for memory in each, of several slots for ids, too
        rows *= 8 if INTERPRETED else 1  # as `config` does
        found[Size(tokens, rows, warps, ahead, parts)] = likely
    found.pop(used, None)
    turns: dict[Any, int] = collections.Counter()  # likely ones are often alike: of those with as many warps one by one
    order = {}
    for way in sorted(found, key=lambda way: -found[way]):
        order[way] = turns[kind := (way.warps, way.parts > 1)], -found[way]
        turns[kind] += 1
    return sorted(order, key=lambda way: order[way])[:most]


def with_launches(chosen: Callable[..., Config]) -> Way:
    """Products whose launch `chosen` finds."""
    return Way((), ((_matvec, "config", chosen), (_chosen, "config", chosen)))


def with_way(shape: Shape, way: Size) -> Way:
    in_use = _matvec.config
    return with_launches(lambda *given: _matvec._coded(*way) if Shape(*given) == shape else in_use(*given))


# -- compiling ---------------------------------------------------------------------------------------------------------


class Address(NamedTuple):
    """What a kernel is compiled for, of an array."""

    dtype: torch.dtype
    offset: int  # from a multiple of 16 bytes


class Launch(NamedTuple):
    """A launch that another process can compile."""

    module: str
    kernel: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def plain(value: Any) -> Any:
    """An argument of a kernel as something that can be sent."""
    if isinstance(value, torch.Tensor):
        return Address(value.dtype, value.data_ptr() % 16)
    if isinstance(value, tuple):
        parts = [plain(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value.value if isinstance(value, triton.language.constexpr) else value


def restored(value: Any) -> Any:
    """What `plain` was given, with a small array for each."""
    if isinstance(value, Address):
        return torch.empty(64, dtype=torch.uint8)[value.offset : value.offset + 16].view(value.dtype)
    if isinstance(value, tuple):
        parts = [restored(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def compiled(launch: Launch) -> tuple[int, int]:
    """Registers of a thread, and those that are spilled; Triton's cache has the kernel from then on."""
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    kwargs = {
        name: compiled_for(value) if hasattr(value, "_fields") else value for name, value in launch.kwargs.items()
    }
    made = kernel.run(*map(restored, launch.args), grid=(1,), warmup=True, **kwargs)
    made._init_handles()
    return made.n_regs, made.n_spills


@contextlib.contextmanager
def looking() -> Iterator[list[Launch]]:
    """Inside, launches are written down and do not run."""
    before, found = JITFunction.run, []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if self.fn.__name__ in KERNELS:
            sent = {name: plain(value) for name, value in kwargs.items()}
            found.append(Launch(self.fn.__module__, self.fn.__name__, plain(args), sent))

    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = before


# -- a model -----------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """A shape of a step: the launch in use, the call that has it first, how many launches have it."""

    used: Size
    call: int
    launches: int = 0
    ways: dict[Size, Future | None] = field(default_factory=dict)  # and what compiles them


class Sweep:
    """The step of a model, its shapes and their ways."""

    def __init__(self, model: str, layers: int, depth: int, rows: int) -> None:
        self.about = {"model": model, "layers": layers, "depth": depth, "rows": rows}
        engine = loaded(model, layers, depth)
        self.step = Step(engine, opened(engine, depth, rows))
        self.bound, _ = self.step.bound(())
        self.shapes: dict[Shape, Found] = {}
        in_use = _matvec.config
        for at, call in enumerate(self.bound.calls):

            def noted(*given: Any, at: int = at) -> Config:
                used = in_use(*given)
                if given[0]:  # codes
                    self.shapes.setdefault(Shape(*given), Found(Size.of(used), at)).launches += 1
                return used

            with with_launches(noted).taken(), looking(), self.step.device.running(deterministic=False):
                call()

    def look(self, pool: ProcessPoolExecutor | None, only: list[str], most: int) -> None:
        """Find the ways of the shapes whose names have one of `only` in them, and let them be compiled."""
        for shape, found in self.shapes.items():
            if only and not any(part in str(shape) for part in only):
                continue
            for way in ways_of(shape, found.used, most):
                with with_way(shape, way).taken(), looking() as launches:
                    self.bound.calls[found.call]()
                own = [each for each in launches if _has(each, way)]
                found.ways[way] = pool.submit(compiled, own[0]) if pool is not None and own else None

    def first_product(self, found: Found) -> torch.Tensor:
        """What the first call with a shape makes."""
        self.step.reset()
        for call in self.bound.calls[: found.call + 1]:
            call()
        out = self.bound.calls[found.call].keywords["out"]
        return (out[0] if isinstance(out, tuple) else out).float().clone()

    def timed(self, shape: Shape, rounds: int) -> list[dict[str, Any]]:
        """Rows of a table: the launch in use, then the others from the best on."""
        found, step = self.shapes[shape], self.step
        want, rows, replays = self.first_product(found), [], {}
        for way in [found.used, *found.ways]:
            row = {"shape": str(shape), "launches": found.launches, "way": str(way), "used": way == found.used}
            row |= way._asdict()
            try:
                if (compiling := found.ways.get(way)) is not None:
                    row["registers"], row["spilled"] = compiling.result()
                    if row["spilled"]:
                        continue
                with contextlib.nullcontext() if row["used"] else with_way(shape, way).taken():
                    row["error"] = difference(self.first_product(found), want)
                    if not row["error"] <= NEAR:
                        raise SystemExit(f"products differ by {row['error']:.2g}, expected {NEAR} at most")
                    _, replays[way] = step.checked("replays", self.bound, 5)
            except (Exception, SystemExit) as error:  # of a compiler, a launch or a check: shown, and not timed
                print(f"{shape}, {way}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            rows.append((way, row))
        times: dict[Size, list[float]] = {way: [] for way in replays}
        for _ in range(rounds):
            for way, replay in replays.items():
                times[way].append(step.seconds(replay, REPLAYS))
        before = statistics.median(times[found.used])
        for way, row in rows:
            took = statistics.median(times[way])
            row |= {"us": took * 1e6, "least": min(times[way]) * 1e6, "saved": (before - took) * 1e6}
        return sorted((row for _, row in rows), key=lambda row: (not row["used"], row["us"]))


def _has(launch: Launch, way: Size) -> bool:
    """Whether a launch is of this size."""
    C = launch.kwargs["C"]
    return Size(C.TP, C.R, C.S, C.U, launch.kwargs.get("PARTS", 1)) == way


def shown(rows: list[dict[str, Any]], best: int = 5) -> None:
    used, others = rows[0], rows[1:]
    print(f"{used['shape']}, {used['launches']} launches: {used['us']:.1f} us with {used['way']}", flush=True)
    for row in others[:best]:
        registers = f"{row['registers']} registers" if "registers" in row else ""
        print(f"    {row['saved']:+6.1f} us  {row['way']:36} {registers}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--models", default=MODELS, help="names and layers, as in the default: %(default)s")
    parser.add_argument("--only", default="", help="parts of the names of shapes, divided by |")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--most", type=int, default=10, help="ways of a shape")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start, only = time.perf_counter(), [part for part in args.only.split("|") if part]
    elapsed: Callable[[], str] = lambda: f"[{time.perf_counter() - start:.0f} s]"  # noqa: E731
    sweeps, tables = [], []
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        for name in args.models.split(","):
            model, layers = name.split(":")
            sweep = Sweep(model, int(layers), args.depth, args.rows)
            with sweep.step.device.running(deterministic=False):
                sweep.look(pool, only, args.most)
            sweeps.append(sweep)
            print(f"{model}: {sum(len(found.ways) for found in sweep.shapes.values())} ways {elapsed()}", flush=True)
        for sweep in sweeps:
            print(f"\n{sweep.about} {elapsed()}", flush=True)
            with sweep.step.device.running(deterministic=False):
                sweep.step.device.compile(sweep.bound.calls)
                rows: list[dict[str, Any]] = []
                for shape, found in sweep.shapes.items():
                    if found.ways:
                        rows += (table := sweep.timed(shape, args.rounds))
                        shown(table)
            tables.append({**sweep.about, "rows": rows})
            if args.json is not None:  # also of a run that is cut short
                args.json.write_text(json.dumps({"about": evidence(), "models": tables}, indent=1) + "\n")
    print(elapsed())


if __name__ == "__main__":
    main()
