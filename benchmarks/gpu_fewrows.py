"""Times whole decode steps of 2 rows and more on a GPU with other launches than those in use, in replays in turn.

    python benchmarks/gpu_fewrows.py [--rows 2 4 8] [--ways TEXT ...] [--layers 8] [--depth 100] [--rounds 5]
                                     [--processes 14] [--json FILE]

What the ways launch is compiled first, in several processes. Each way is checked as in gpu_onerow.py. --ways: those
whose names have one of these texts in them, and the first two.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "ops"))

import triton
from gpu_common import compile_ahead
from gpu_evidence import evidence
from gpu_onerow import Step, Way, loaded, measured, opened

from penstock.backends.cuda import _chosen, _few_rows, _matvec, _router, _shared_down, _staged, _tuning, linear, moe
from penstock.backends.cuda._matvec import Config

SHORT = 4  # layers of a model that has every kind of layer, for compiling

Patch = tuple[Any, str, Any]


def sized(rows: int, warps: int, blocks: int) -> Callable[..., Config]:
    """A launch of the matvec, whatever is asked for."""

    def config(bits: int, gs: int, N: int, K: int, T: int, *rest: Any) -> Config:
        return Config(triton.next_power_of_2(T), rows, warps, blocks, {"num_warps": warps, "num_stages": 1})

    return config


def gate_up(*sizes: int) -> Patch:
    return _chosen, "config", sized(*sizes)


def router(*sizes: int) -> Patch:
    return _router, "config", sized(*sizes)


APART = (_shared_down, "SHARED_DOWN_TOKENS", 0)  # down by the matvec


def down(*sizes: int) -> tuple[Patch, ...]:
    """Of several experts of a token by the matvec."""
    own = _matvec.config

    def config(bits: int, gs: int, N: int, K: int, T: int, pairs: int, slots: int, *rest: Any) -> Config:
        return (sized(*sizes) if slots > 1 else own)(bits, gs, N, K, T, pairs, slots, *rest)

    return APART, (_matvec, "config", config)


def by_matvec(*wanted: int, sizes: tuple[int, int, int] | None = None) -> tuple[Patch, ...]:
    """Weights of so many rows not by lanes."""
    by_lanes, own = linear._by_lanes, _matvec.config

    def lanes(x: Any, weights: tuple[Any, ...], *rest: Any) -> bool:
        return weights[0].shape[0] not in wanted and by_lanes(x, weights, *rest)

    def config(bits: int, gs: int, N: int, *rest: Any) -> Config:
        return (sized(*sizes) if sizes is not None and N in wanted else own)(bits, gs, N, *rest)

    return (linear, "_by_lanes", lanes), (_matvec, "config", config)


def chooses(tokens: int) -> Patch:
    return moe, "MOE_CHOOSES", tokens


def lanes_from(tokens: int) -> tuple[Patch, ...]:
    """Experts by lanes from so many tokens on."""
    return chooses(min(moe.MOE_CHOOSES, tokens - 1)), (moe, "FEW_EXPERTS", (tokens, *moe.FEW_EXPERTS[1:]))


def lanes_of(kind: str, *sizes: Any) -> tuple[Patch, ...]:
    """Experts by lanes in tiles of 8 pairs with so many tiles of rows, warps across and groups, x ahead or not."""
    own = _few_rows.FEW_GROUPS | {(kind, 8): _tuning.FewGroups(*sizes)}
    return (_few_rows, "FEW_GROUPS", own), (_few_rows, "_expert_launch", _few_rows._expert_launch.__wrapped__)


MOE, COLUMNS = "moe_route_forward", "columns_in_place"
PROJECTION, OUTPUT, HEAD = 12352, 2048, 248320  # rows of weights of Qwen3.6-35B-A3B

LANES = (
    ("gate_up", 2, 4, 4, False), ("gate_up", 2, 4, 4, True), ("gate_up", 2, 8, 4, False), ("gate_up", 4, 2, 4, False),
    ("gate_up", 2, 2, 4, False), ("gate_up", 4, 4, 2, True), ("down", 1, 4, 2, False), ("down", 2, 2, 2, False),
    ("down", 2, 4, 4, False), ("down", 2, 4, 2, True), ("down", 4, 4, 2, False), ("down", 1, 8, 4, False),
)  # fmt: skip


def ways(rows: int) -> dict[str, tuple[Way, tuple[str, ...]]]:
    """By name, with the ops whose launches are others than those of the first two; none named: all. So many rows."""
    made: dict[str, tuple[Way, tuple[str, ...]]] = {
        "norm, router and choice apart, down by the matvec, columns copied": (Way((MOE, COLUMNS), (APART,)), ()),
        "as it is": (Way(), ()),
        "columns copied": (Way((COLUMNS,)), ("split_columns",)),
    }

    def add(name: str, *patches: Patch, ops: tuple[str, ...] = (MOE,)) -> None:
        made[name] = Way((), patches), ops

    if rows <= 4:
        for sizes in ((8, 2, 2), (8, 1, 1), (8, 1, 2), (8, 4, 1), (16, 4, 1), (16, 2, 1)):
            add("gate and up {} rows by {} warps of {} blocks".format(*sizes), gate_up(*sizes))
        add("down by the matvec", APART)
        for sizes in ((16, 4, 3), (16, 8, 2), (16, 16, 1), (16, 2, 3), (16, 4, 2), (32, 4, 1)):
            add("down {} rows by {} warps of {} blocks".format(*sizes), *down(*sizes))
        add("router 16 rows by 16 warps", router(16, 16, 1))
        add("the router's launch, then the choice", chooses(1))
        add(f"experts by lanes from {rows} on", *lanes_from(rows))
        add("projections by the matvec", *by_matvec(PROJECTION), ops=("norm_matmul",))
        add("projections by the matvec, 2 warps", *by_matvec(PROJECTION, sizes=(16, 2, 2)), ops=("norm_matmul",))
        add("output by the matvec", *by_matvec(OUTPUT), ops=("matmul_add",))
        add("head by the matvec", *by_matvec(HEAD), ops=("norm_matmul",))
        add("head by the matvec, 2 warps", *by_matvec(HEAD, sizes=(16, 2, 2)), ops=("norm_matmul",))
    else:
        made["router and choice apart"] = Way((MOE,)), ()
        if rows < moe.FEW_EXPERTS[0]:
            add(f"experts by lanes from {rows} on", *lanes_from(rows))
        if rows <= 8:
            add("norm and router in one launch", (_tuning, "ROUTER_FUSED", 8))
            for sizes in ((16, 16, 1), (16, 16, 2), (16, 8, 4)):
                add("router {} rows by {} warps of {} blocks".format(*sizes), router(*sizes))
            add("gate and up choose", chooses(8))
            add("gate and up choose, 8 rows by 1 warp of 2 blocks", chooses(8), gate_up(8, 1, 2))
            add("experts through shared memory", (_staged, "STAGED_TOKENS", 8))
        if moe.FEW_EXPERTS[0] <= rows < _staged.STAGED_TOKENS:
            for kind, *sizes in LANES:
                name = "{} by lanes, {} tiles, {} warps, {} groups, x ahead {}".format(kind, *sizes)
                add(name, *lanes_of(kind, *sizes))
    return made


def calls_by_kind(step: Step, way: Way) -> Iterator[tuple[str, int]]:
    """The op of each kind of call of a step, and the place of the first one, from the end if it is in the second half:
    there the head is, at the same place with fewer layers.
    """
    with way.taken():
        bound, _ = step.bound(way.without)
    seen = set()
    for place, call in enumerate(bound.calls):
        op = getattr(call.func, "__name__", str(call.func))
        kind = (op, *(str(getattr(arg, "shape", "")) for arg in call.args if op != MOE))  # that has the next weight
        if kind not in seen:
            seen.add(kind)
            yield op, place if 2 * place < len(bound.calls) else place - len(bound.calls)


@functools.cache
def _short(model: str, depth: int, rows: int, most: int) -> Step:
    engine, runs = _short_engine(model, depth, most)
    return Step(engine, runs[:rows])


@functools.cache
def _short_engine(model: str, depth: int, most: int) -> tuple[Any, Any]:
    engine = loaded(model, SHORT, depth)
    return engine, opened(engine, depth, most)


def compile_call(model: str, depth: int, most: int, rows: int, name: str, place: int) -> None:
    """Run one call of a way of so many rows, of `most`, whatever is in its arrays."""
    way, _ = ways(rows)[name]
    step = _short(model, depth, rows, most)
    with step.device.running(deterministic=False), way.taken():
        bound, _ = step.bound(way.without)
        bound.calls[place]()
        step.device.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--model", default="qwen3.6-35b-a3b")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--ways", nargs="+", default=[""])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    engine = loaded(args.model, args.layers, args.depth)
    runs = opened(engine, args.depth, max(args.rows))
    steps, taken, calls = {}, {}, {}
    for rows in args.rows:
        steps[rows], found = Step(engine, runs[:rows]), ways(rows)
        taken[rows] = {
            name: way for n, (name, way) in enumerate(found.items()) if n < 2 or any(text in name for text in args.ways)
        }
        for name, (way, ops) in taken[rows].items():
            for op, place in calls_by_kind(steps[rows], way):
                if not ops or op in ops:
                    calls[args.model, args.depth, max(args.rows), rows, name, place] = (bool(ops), op != MOE)
    print(f"loaded after {time.perf_counter() - start:.0f} s; {len(calls)} calls to compile", flush=True)
    compile_ahead(compile_call, sorted(calls, key=calls.__getitem__), args.processes)  # what all ways have comes first
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    found = []
    for rows, step in steps.items():
        for row in measured(step, {name: way for name, (way, _) in taken[rows].items()}, args.rounds):
            found.append({"rows": rows, **row})
            print(f"{rows} rows  {row['way']:60} {row['nodes']:4} nodes {row['us']:8.1f} us "
                  f"(least {row['least']:.1f}), difference {row['error']:.1g}", flush=True)  # fmt: skip
    print(f"measured after {time.perf_counter() - start:.0f} s")
    if args.json is not None:
        about = {"model": args.model, "layers": args.layers, "depth": args.depth, **evidence()}
        args.json.write_text(json.dumps({"about": about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
