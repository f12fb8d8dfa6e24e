"""Streamed experts: how near they come to the disk's, and on a GPU to the bus's bandwidth.

    python benchmarks/bench_streaming.py [--device cpu|cuda] [--layers 12] [--cache 25%] [--json FILE]

Writes a checkpoint of random weights of the true shape into a temporary folder, packs it, checks that streamed and
resident experts give the same tokens, then measures. Every share is against a bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script it sees its own folder only

import penstock
from benchmarks.random_checkpoint import write
from penstock import models, ops
from penstock.api import LLM
from penstock.cli.bench import layer_count
from penstock.engine.expert_weights import expert_layers
from penstock.experts.layout import Layer
from penstock.experts.packed import NAME, open_packed, write_packed
from penstock.experts.reader import ExpertReader
from penstock.experts.store import HostSlots
from penstock.models.config import first_layers
from penstock.models.random import Random
from penstock.models.source import CheckpointSource
from penstock.ops.device import device_for
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.resolve import resolve_model

TOKENS = list(range(5, 25))
THREADS = 8


def layers_of(folder: Path) -> tuple[list[Layer], str]:
    checkpoint = Checkpoint.open(folder)
    family = models.family_of(checkpoint.config)
    config = family.read_config(checkpoint.config)
    source = CheckpointSource(checkpoint, *family.names(checkpoint, config))
    return expert_layers(family, source, config), checkpoint.fingerprint


def rate(work: Callable[[int], int], count: int, seconds: float) -> float:
    """Bytes per second of work(n), called by several threads until the time is over."""
    numbers, lock, total = iter(range(count)), threading.Lock(), 0
    end = time.perf_counter() + seconds

    def some() -> None:
        nonlocal total
        while time.perf_counter() < end:
            with lock:
                n = next(numbers, None)
            if n is None:
                return
            done = work(n)
            with lock:
                total += done

    start = time.perf_counter()
    threads = [threading.Thread(target=some) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return total / (time.perf_counter() - start)


def raw_disk(path: Path, size: int, seconds: float) -> float:
    """Direct reads of this size at random places of a file, without anything of penstock."""
    import mmap

    size = -(-size // 4096) * 4096
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    places = np.random.default_rng(1).permutation(path.stat().st_size // size - 1)
    local = threading.local()

    def read(n: int) -> int:
        if not hasattr(local, "buffer"):
            local.buffer = mmap.mmap(-1, size)
        return os.preadv(descriptor, [local.buffer], int(places[n]) * size)

    try:
        return rate(read, len(places), seconds)
    finally:
        os.close(descriptor)


def reader_rate(layers: list[Layer], io: str, seconds: float) -> float:
    """What an ExpertReader brings into slots."""
    with ExpertReader(layers, io, THREADS) as reader:

        class Shop:
            counters = None

        Shop.reader = reader  # type: ignore[attr-defined]
        slots = HostSlots(layers[0].format, THREADS, Shop)  # type: ignore[arg-type]
        order = np.random.default_rng(2).permutation(sum(layer.count for layer in layers))
        first = layers[0].count
        local, free = threading.local(), iter(range(THREADS))

        def read(n: int) -> int:
            if not hasattr(local, "views"):
                local.views = slots._views(next(free))
            reader.read(int(order[n]) // first, int(order[n]) % first, local.views)
            return layers[0].format.payload

        return rate(read, len(order), seconds)


def speed(llm: LLM, count: int) -> tuple[float, list[int]]:
    """Tokens per second of a warm model, and the tokens."""
    llm.generate(TOKENS, max_tokens=count)
    out = llm.generate(TOKENS, max_tokens=count)
    return (count - 1) / out.timings.generation_seconds, out.tokens


def per_token(llm: LLM, count: int) -> dict[str, float]:
    """Tokens per second after the first, and bytes that each of them reads and copies."""
    llm.generate(TOKENS, max_tokens=count)
    stream = llm.stream(TOKENS, max_tokens=count + 1)
    next(stream)
    before, start = llm.stats(), time.perf_counter()
    made = sum(1 for _ in stream)
    seconds, after = time.perf_counter() - start, llm.stats()
    found = {"tokens_per_second": made / seconds}
    for name in ("bytes_read", "bytes_copied", "wait_seconds"):
        found[name] = (getattr(after, f"expert_{name}") - getattr(before, f"expert_{name}")) / made
    return found


def slot_cost(config: dict[str, Any], device: str) -> float:
    """How much longer the experts of one token take with `slot_of` than without."""
    inner = config.get("text_config", config)
    dim, width = inner["hidden_size"], inner["moe_intermediate_size"]
    count, k = inner["num_experts"], inner["num_experts_per_tok"]
    source = Random(config, 3)
    weights = [source.weight("x", count, *shape) for shape in ((width, dim), (width, dim), (dim, width))]
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((1, dim), np.float32), np.full((1, k), 1 / k, np.float32)
    ids = [rng.permutation(count)[None, :k].astype(np.int32) for _ in range(32)]
    slot_of = rng.permutation(count).astype(np.int32)
    if device == "cuda":
        import torch

        gpu = device_for("cuda")
        weights, ids = [gpu.to_device(a) for a in weights], [gpu.to_device(a) for a in ids]
        x, w, slot_of = gpu.to_device(x).to(torch.bfloat16), gpu.to_device(w), gpu.to_device(slot_of)
    kernel = ops.moe_forward.kernel(device)
    assert kernel is not None
    out = x.copy() if device == "cpu" else x.clone()
    activations = "int8" if device == "cpu" else "float32"

    def calls(slots: Any) -> list[Callable[[], object]]:
        return [lambda i=i: kernel.choosing(x, i, w, *weights, slots, "silu", activations, out=out) for i in ids]

    runs = {"plain": calls(None), "slots": calls(slot_of)}
    if device == "cuda":
        for made in runs.values():
            for call in made:
                call()
        runs = {name: [gpu.capture(made)] for name, made in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(60):
        for name, made in runs.items():
            start = time.perf_counter()
            for call in made:
                call()
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return float(np.min(times["slots"]) / np.min(times["plain"]) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qwen3.6-35b-a3b")
    parser.add_argument("--layers", default="12")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cache", default="25%")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--folder", type=Path, help="for the checkpoint, which stays there")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    config = first_layers(
        resolve_model(given.config, ["config"]).read_config(), layer_count(given.layers), given.config
    )[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "model"
        if not folder.exists():
            print(f"writing {write(config, folder) / 1e9:.2f} GB", file=sys.stderr)
        report = measure(folder, config, given)
    for name, value in report.items():
        print(f"{name:46} {value:.4g}" if isinstance(value, float) else f"{name:46} {value}")
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(folder: Path, config: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    device, cache, count = given.device, given.cache, given.tokens
    layers, fingerprint = layers_of(folder)
    report: dict[str, Any] = {"device": device, "layers": given.layers}
    report["experts_GB"] = sum(layer.nbytes for layer in layers) / 1e9
    resident = penstock.load(folder, device=device, max_context=1024)
    report["resident_tokens_per_second"], want = speed(resident, count)
    del resident
    report["slot_of_cost"] = slot_cost(config, device)
    if device == "cpu":
        if not (folder / NAME).exists():
            write_packed(layers, fingerprint, folder / NAME)
        packed = open_packed(folder / NAME, layers, fingerprint)
        disk = raw_disk(folder / NAME, layers[0].format.nbytes, given.seconds)
        report["disk_GBps"] = disk / 1e9
        for name, own in (("packed", packed), ("slices", layers)):
            report[f"cold_{name}_share"] = reader_rate(own, "direct", given.seconds) / disk
        llm = penstock.load(folder, device=device, max_context=1024, expert_cache=cache, expert_io="direct")
        same = llm.generate(TOKENS, max_tokens=16).tokens == want[:16]
        found = per_token(llm, count)
        disk = (disk + raw_disk(folder / NAME, layers[0].format.nbytes, given.seconds)) / 2
        limit = disk / found["bytes_read"]
        report |= {"cache": cache, "same_tokens": same, "tokens_per_second": found["tokens_per_second"]}
        report |= {"read_MB_per_token": found["bytes_read"] / 1e6, "limit_tokens_per_second": limit}
        report["share_of_limit"] = found["tokens_per_second"] / limit
        report["share_of_time_waiting"] = found["wait_seconds"] * found["tokens_per_second"]
        return report
    import torch

    size = layers[0].format.nbytes
    host = torch.zeros(1 << 28, dtype=torch.int32).pin_memory()
    here = torch.empty_like(host, device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for at in range(0, len(host) - size // 4, size // 4):
            here[at : at + size // 4].copy_(host[at : at + size // 4], non_blocking=True)
        torch.cuda.synchronize()
        bus = len(host) * 4 / (time.perf_counter() - start)
    report["bus_GBps"] = bus / 1e9
    del host, here
    for cache in ("100%", *given.cache.split(",")):
        llm = penstock.load(folder, device=device, max_context=1024, expert_cache=cache, expert_host="100%")
        same = llm.generate(TOKENS, max_tokens=16).tokens == want[:16]
        speed(llm, 2 * count)
        found = per_token(llm, count)
        moved = found["bytes_copied"] * found["tokens_per_second"]
        report |= {
            f"{cache}: same_tokens": same,
            f"{cache}: tokens_per_second": found["tokens_per_second"],
            f"{cache}: copied_MB_per_token": found["bytes_copied"] / 1e6,
            f"{cache}: share_of_bus": moved / bus,
        }
        del llm
        torch.cuda.empty_cache()
    return report


if __name__ == "__main__":
    main()
