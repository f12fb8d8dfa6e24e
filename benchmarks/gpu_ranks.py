"""What the collectives of a split model cost on one GPU: one rank over NCCL, with its sums in the captured graph.

python benchmarks/gpu_ranks.py                                    all parts: check, sums, torchrun, text
python benchmarks/gpu_ranks.py --config qwen3.6-35b-a3b --parts check,sums --output ranks.json

check     in float32, a few layers: logits with collectives are those without
sums      tokens/s of prompts and answers, and nodes of the captured graph of one answer: no mesh; one NCCL rank, its
          sums unfused and captured; a kernel that waits --wait-us in the place of each sum, as over a link
torchrun  the same rank as users start it, with the messages of rank 0: penstock bench under torchrun
text      two ranks on this GPU over gloo give the text of one (demo model)

Nothing is elided for a mesh of one rank: what is timed is what each of several ranks does, but for the link.
"""

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.language.extra.cuda import globaltimer

from penstock import models
from penstock.api import LLM, load_random
from penstock.backends.cuda.runtime.device import CudaDevice
from penstock.cli._model import resolved
from penstock.cli.bench import Test, measured
from penstock.engine.engine import Engine
from penstock.models.config import first_layers
from penstock.models.layers import ExpertStack
from penstock.models.split import Mesh
from penstock.ops.collective import set_communicator
from penstock.parallel.group import RankGroup, torch_distributed

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("check", "sums", "torchrun", "text")
BOUND = 1e-4  # of the largest logit, float32: sums of another order
_NODE_KINDS = ("kernel", "memcpy", "memset", "host", "graph", "empty", "wait", "record")


@triton.jit
def _wait_kernel(nanoseconds):
    start = globaltimer()
    now = start
    while now - start < nanoseconds:
        now = globaltimer()


class StandIn:
    """A communicator of one rank whose sums take a while and change nothing."""

    rank, size, capturable = 0, 1, True

    def __init__(self, microseconds: float) -> None:
        self.nanoseconds = round(1000 * microseconds)

    def all_reduce(self, array: torch.Tensor, note: torch.Tensor | None = None) -> None:
        _wait_kernel[(1,)](self.nanoseconds, num_warps=1)

    def all_gather(self, parts: torch.Tensor, array: torch.Tensor) -> None:
        parts[0].copy_(array)
        _wait_kernel[(1,)](self.nanoseconds, num_warps=1)

    def measured(self) -> float:
        """Microseconds of a wait in a captured graph."""
        graph, count = torch.cuda.CUDAGraph(), 200
        self.all_reduce(torch.empty(0))
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(count):
                self.all_reduce(torch.empty(0))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return 1000 * begin.elapsed_time(end) / count


class Counting:
    """Another communicator, and how often it was asked."""

    def __init__(self, given: Any) -> None:
        self._given, self.rank, self.size, self.capturable = given, given.rank, given.size, given.capturable
        self.count = 0

    def all_reduce(self, array: torch.Tensor, note: torch.Tensor | None = None) -> None:
        self.count += 1
        self._given.all_reduce(array, note)

    def all_gather(self, parts: torch.Tensor, array: torch.Tensor) -> None:
        self.count += 1
        self._given.all_gather(parts, array)


class CountingDevice(CudaDevice):
    """Knows the nodes of every graph that it captured, by kind, and the collectives among them."""

    def __init__(self, communicator: Counting | None) -> None:
        super().__init__()
        self.graphs: list[dict[str, int]] = []
        self._communicator = communicator

    def capture(self, calls: Sequence[Any]) -> Any:
        found: list[dict[str, int]] = []
        before = self._communicator.count if self._communicator is not None else 0
        replay = super().capture([*calls, lambda: found.append(nodes_of_capture())])
        after = self._communicator.count if self._communicator is not None else 0
        self.graphs.append({"collectives": after - before, **found[0]})
        return replay


def nodes_of_capture() -> dict[str, int]:
    """Nodes that the capture on the current stream has so far, by kind."""
    driver = ctypes.CDLL("libcuda.so.1")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    _checked(driver.cuStreamGetCaptureInfo_v2(stream, _to(status), _to(number), _to(graph), None, None))
    count = ctypes.c_size_t()
    _checked(driver.cuGraphGetNodes(graph, None, _to(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _checked(driver.cuGraphGetNodes(graph, nodes, _to(count)))
    kinds: Counter[str] = Counter()
    for node in nodes:
        kind = ctypes.c_int()
        _checked(driver.cuGraphNodeGetType(ctypes.c_void_p(node), _to(kind)))
        kinds[_NODE_KINDS[kind.value] if kind.value < len(_NODE_KINDS) else "other"] += 1
    return {"nodes": count.value, **kinds}


def _to(value: Any) -> Any:
    return ctypes.byref(value)


def _checked(result: int) -> None:
    if result:
        raise RuntimeError(f"CUDA driver: error {result}")


@contextlib.contextmanager
def nccl() -> Iterator[RankGroup]:
    """A group of one rank, which has exchanged something."""
    with tempfile.TemporaryDirectory() as folder:
        store = torch_distributed().FileStore(f"{folder}/store", 1)
        group = RankGroup(store, 0, 1, backend="nccl", address="127.0.0.1")
        group.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
        try:
            yield group
        finally:
            group.close()


@contextlib.contextmanager
def as_rank(engine: Engine, communicator: Any, raw: Any) -> Iterator[Engine]:
    """The same weights as those of the one rank of a split model, with this communicator; None: as they are."""
    counting = None if communicator is None else Counting(communicator)
    device = CountingDevice(counting)
    model = engine.model
    if counting is not None:
        family, mesh = model.family, Mesh(0, 1)
        config = family.read_config(dict(raw))
        assert family.split is not None
        model = replace(model, mesh=mesh, split=family.split(config, mesh, 64))
        if config.experts:
            slot_of = device.to_device(mesh.slot_of(config.experts))
            stacks = models.replaced(model.weights, ExpertStack, lambda stack: replace(stack, slot_of=slot_of))
            model = replace(model, weights=stacks)
    names = ("activations", "dtype", "state_dtype", "max_context")
    options = {name: getattr(engine, name) for name in names}
    set_communicator(counting)
    try:
        yield Engine(model, **options, device=device)
    finally:
        set_communicator(None)
        device.wait()


def logits_of(engine: Engine) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, engine.model.config.vocab_size, 48).tolist()
    sequence = engine.open()
    rows = [engine.prefill(sequence, tokens[:40], every=True)]
    rows += [engine.decode([sequence], [token]) for token in tokens[40:]]
    engine.close(sequence)
    return np.concatenate(rows)


def check(given: Any, group: RankGroup) -> float:
    """The error of a model with collectives, of the largest logit. Raises SystemExit if it is too large."""
    raw, _ = first_layers(given, 4, "config")
    engine = load_random(raw, device="cuda", dtype="float32", max_context=256, on_device=True).engine
    found = []
    for communicator in (None, group):
        with as_rank(engine, communicator, raw) as one:
            found.append(logits_of(one))
    error = float(np.abs(found[1] - found[0]).max() / np.abs(found[0]).max())
    if not error <= BOUND:
        raise SystemExit(f"check: logits with collectives are off by {error:.2e} of the largest, at most {BOUND:g}")
    return error


def speeds(engine: Engine, name: str, tests: list[Test], repetitions: int) -> list[dict[str, Any]]:
    """Tokens per second of each test, and what is in its graph: of answers with the head and the draw."""
    rows = []
    for test in tests:
        device: Any = engine.device
        device.graphs.clear()
        llm = LLM(engine, None, None, ())
        [row] = measured(llm, name, [test], repetitions, 1)
        graph = max(device.graphs, key=lambda one: (one["collectives"], one["nodes"]), default={})
        rows.append({"variant": name, "test": row.test, "rows": test.batch, "tokens_per_second": row.avg_ts} | graph)
        print(json.dumps(rows[-1]), flush=True)
    return rows


def sums(raw: Any, group: RankGroup, tests: list[Test], wait: float, repetitions: int) -> list[dict[str, Any]]:
    context = max(test.positions for test in tests)
    engine = load_random(raw, device="cuda", max_context=context, on_device=True).engine
    stand_in = StandIn(wait)
    print(f"a sum of {wait:g} us takes {stand_in.measured():.2f} us in a graph", flush=True)
    rows = []
    for name, communicator in (("no mesh", None), ("one NCCL rank", group), (f"{wait:g} us per sum", stand_in)):
        with as_rank(engine, communicator, raw) as one:
            one.allocate_for([(test.batch, test.positions) for test in tests])
            rows += speeds(one, name, tests, repetitions)
            one.caches.allocate(1, dict.fromkeys(one.caches.pools, 1))
    return rows


def program(*arguments: str, **environment: str) -> str:
    """What a Python program prints. Raises SystemExit if it fails."""
    path = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path)} | environment
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: ended with {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def under_torchrun(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second of `penstock bench` alone and as the one rank of a model."""
    bench = ["-m", "penstock", "bench", "--random", arguments.config, "--device", "cuda", "-o", "json"]
    bench += ["-p", arguments.prompts, "-n", str(arguments.tokens), "-b", arguments.rows]
    bench += ["-r", str(arguments.repetitions)] + (["--layers", arguments.layers] if arguments.layers else [])
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "1"]
    rows = []
    for name, command in (("penstock bench", bench), ("penstock bench, torchrun", [*torchrun, *bench])):
        for row in json.loads(program(*command)):
            found = {"test": row["test"], "rows": row["batch_size"], "tokens_per_second": row["avg_ts"]}
            rows.append({"variant": name, **found, "host_us": row["host_us"]})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def same_text() -> bool:
    """Whether two ranks on this GPU, which exchange through the host, write what one writes. Raises SystemExit."""
    generate = ["-m", "penstock", "generate", "--device", "cuda", "--dtype", "float32", "--verbose", "false"]
    generate += ["--prompt", "Once upon a time", "--max-tokens", "48", "--memory", "2G"]
    one = program(*generate)
    two = program(*generate, "-tp", "2", PENSTOCK_RANK_BACKEND="gloo")
    if one != two:
        raise SystemExit(f"text: two ranks over gloo write\n{two}\nand one writes\n{one}")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qwen3.6-35b-a3b", help="name of a shipped config, or a config.json")
    parser.add_argument("--layers", help="the first N layers, by default all")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--prompts", default="512,4096")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--wait-us", type=float, default=6.0)
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--output", help="JSON file")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}, expected some of {', '.join(PARTS)}")
    given = resolved(arguments.config, ("config",), None, True, files="config", option="--config").read_config()
    layers = "all" if arguments.layers is None else int(arguments.layers)
    raw, _ = first_layers(given, layers, arguments.config)
    tests = [Test(int(count), 0, 0) for count in arguments.prompts.split(",")]
    tests += [Test(0, arguments.tokens, 0, int(batch)) for batch in arguments.rows.split(",")]
    found: dict[str, Any] = {"config": arguments.config, "layers": arguments.layers, "rows": []}
    found["gpu"], found["torch"] = torch.cuda.get_device_name(), torch.__version__
    with nccl() as group:
        if "check" in parts:
            found["error"] = check(given, group)
            print(f"check: with collectives off by {found['error']:.1e} of the largest logit", flush=True)
        if "sums" in parts:
            found["rows"] += sums(raw, group, tests, arguments.wait_us, arguments.repetitions)
    torch.cuda.empty_cache()
    if "torchrun" in parts:
        found["rows"] += under_torchrun(arguments)
    if "text" in parts:
        found["text_of_two_ranks_is_that_of_one"] = same_text()
    table(found["rows"])
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(found, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> None:
    """By test: each variant against the first."""
    print("\n| test | rows | variant | tokens/s | of the first | collectives | nodes |\n|---|--:|---|--:|--:|--:|--:|")
    first: dict[Any, float] = {}
    for row in sorted(rows, key=lambda row: (row["test"], row["rows"])):
        speed = row["tokens_per_second"]
        share = speed / first.setdefault((row["test"], row["rows"]), speed)
        counts = " | ".join(str(row.get(name, "")) for name in ("collectives", "nodes"))
        print(f"| {row['test']} | {row['rows']} | {row['variant']} | {speed:.1f} | {share:.1%} | {counts} |")


if __name__ == "__main__":
    main()
