"""Times a decode step of one row or a few on a GPU, with and without some of its fusions, in replays that take turns.

    python benchmarks/gpu_onerow.py [--model qwen3.6-35b-a3b] [--layers 8] [--rows 1] [--depth 100] [--rounds 15]
                                    [--json FILE]

Each way is checked first: from the same caches, the logits of its calls with a wait after each one have to be those of
its replay, bit for bit, and near those of the first way.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_evidence import evidence

from penstock import api
from penstock.analysis.trace import taken_layers
from penstock.backends.cuda import _chosen, _shared_down, moe
from penstock.backends.cuda._matvec import Config
from penstock.engine.engine import Engine
from penstock.engine.steps import Run, step_arrays, table_width
from penstock.graph import Program, fuse_cuda
from penstock.graph.fuse import RULES
from penstock.graph.rewrite import rewritten
from penstock.models.step import PAGE
from penstock.weights.resolve import ANY, resolve_model

REPLAYS = 100  # in a round


def launch_of(rows: int, warps: int, blocks: int) -> Callable[..., Config]:
    return lambda *_: Config(1, rows, warps, blocks, {"num_warps": warps, "num_stages": 1})


@dataclass(frozen=True)
class Way:
    """Rules (or `columns_in_place`) that are left out, and what names in modules mean while the step is captured."""

    without: tuple[str, ...] = ()
    patches: tuple[tuple[Any, str, Any], ...] = ()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        before = [(module, name, getattr(module, name)) for module, name, _ in self.patches]
        for module, name, value in self.patches:
            setattr(module, name, value)
        try:
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)


ROUTER = ("moe_route_forward",)
APART = (_shared_down, "SHARED_DOWN", ())
WAYS = {
    "the router chooses, down apart": Way(ROUTER, (APART,)),
    "gate and up choose, down apart": Way((), (APART,)),
    "the router chooses": Way(ROUTER),
    "as it is": Way(),
    "pairs of experts as they come": Way((), ((moe, "MOE_IN_TURN", 0),)),
    "gate and up 8 rows by 2 warps of 2 blocks": Way((), ((_chosen, "config", launch_of(8, 2, 2)),)),
}


def loaded(model: str, layers: int, depth: int) -> Engine:
    """A model with made-up weights."""
    _, raw = taken_layers(resolve_model(model, ANY), layers)
    assert raw is not None
    return api.load_random(raw, device="cuda", max_context=depth + 16, on_device=True).engine


def opened(engine: Engine, depth: int, count: int) -> list[Run]:
    """A token of each of so many sequences, which have this length."""
    engine.allocate_for([(count, depth + 1)])
    runs = [Run(engine.open(), np.array([17 + 31 * n], np.int32)) for n in range(count)]
    for run in runs:
        engine.caches.reserve(run.sequence, depth + 1)
        engine.caches.advance(run.sequence, depth)
    return runs


class Step:
    """The next step of some sequences of equal length."""

    def __init__(self, engine: Engine, runs: list[Run]) -> None:
        self.device, programs, count = engine.device, engine.programs, len(runs)
        assert programs is not None
        pages = table_width(-(-(runs[0].sequence.length + 1) // PAGE))
        self.graph = programs.graph(count, count, pages, R=count, decode=True)
        self.inputs = {name: self.device.to_device(a) for name, a in step_arrays(runs, programs.windows).items()}
        self.arrays = programs.cache_arrays()
        torch.manual_seed(0)
        self.start = {name: torch.randn_like(a) * 0.1 for name, a in self.arrays.items()}

    def reset(self) -> None:
        for name, array in self.arrays.items():
            array.copy_(self.start[name])

    def bound(self, without: tuple[str, ...]) -> Any:
        rules = [each for each in RULES if each.offers.__name__ not in without]
        graph = rewritten(self.graph, "cuda", rules)
        fuse_cuda.fetch_ahead(graph)
        if "columns_in_place" not in without:
            fuse_cuda.columns_in_place(graph)
        program = Program(graph, "cuda", fused=False)
        bound = program.bind(self.arrays | self.inputs, self.device.arena(program.arena_bytes))
        return bound, len(graph.nodes)

    def checked(self, name: str, bound: Any, replays: int = 30) -> tuple[torch.Tensor, Callable[[], object]]:
        """The logits, and a replay of the step."""
        self.reset()
        for call in bound.calls:
            call()
            self.device.wait()
        want = bound.outputs[0].clone()
        if not torch.isfinite(want).all():
            raise SystemExit(f"{name}: logits that are not finite")
        replay = self.device.capture(bound.calls)
        for _ in range(replays):
            self.reset()
            replay()
            self.device.wait()
            if not torch.equal(bound.outputs[0], want):
                raise SystemExit(f"{name}: a replay gives other logits than call by call")
        return want, replay

    def seconds(self, replay: Callable[[], object], replays: int = REPLAYS) -> float:
        """Of one replay, of many that follow one another."""
        self.device.wait()
        start = time.perf_counter()
        for _ in range(replays):
            replay()
        self.device.wait()
        return (time.perf_counter() - start) / replays


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖ of the median row: a router that flips on a near-tie moves a whole row."""
    got, want = (each.double().view(-1, each.shape[-1]) for each in (got, want))
    return float(((got - want).norm(dim=1) / want.norm(dim=1)).median())


def measured(step: Step, ways: Mapping[str, Way], rounds: int) -> list[dict[str, Any]]:
    """Of each way nodes, difference from the first one and times, after the checks."""
    replays, logits, rows = {}, {}, []
    with step.device.running(deterministic=False):
        for name, way in ways.items():
            with way.taken():
                bound, nodes = step.bound(way.without)
                logits[name], replays[name] = step.checked(name, bound)
            first = next(iter(logits.values()))
            error = difference(logits[name], first)
            rows.append({"way": name, "nodes": nodes, "error": error})
            if error > 1e-2:
                raise SystemExit(f"{name}: logits differ by {error:.2g} from those of the first way")
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, replay in replays.items():
                times[name].append(step.seconds(replay))
    for row in rows:
        found = times[row["way"]]
        row |= {"us": statistics.median(found) * 1e6, "least": min(found) * 1e6}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--model", default="qwen3.6-35b-a3b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = loaded(args.model, args.layers, args.depth)
    rows = measured(Step(engine, opened(engine, args.depth, args.rows)), WAYS, args.rounds)
    for row in rows:
        print(f"{row['way']:60} {row['nodes']:4} nodes {row['us']:8.1f} us (least {row['least']:.1f}), "
              f"difference {row['error']:.1g}")  # fmt: skip
    if args.json is not None:
        about = {"model": args.model, "layers": args.layers, "rows": args.rows, "depth": args.depth, **evidence()}
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
