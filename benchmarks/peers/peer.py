"""What the peer scripts share: options, configs, the tests of a run, timing, a table and JSON.

Needs numpy only, so that it runs in the environment of every peer. Names of models, tests and columns are those of
`penstock bench --random`, so that compare.py can lay the rows side by side.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

CONFIGS = Path(__file__).resolve().parents[2] / "src" / "penstock" / "configs"


class Runner(Protocol):
    """A peer with a model. A context is whatever the peer keeps of the tokens before."""

    vocab: int

    def context(self, tokens: Sequence[int]) -> Any:
        """A context that holds these tokens (none: an empty one)."""
        ...

    def copy(self, context: Any) -> Any:
        """A context for one timing; the original stays as it is."""
        ...

    def read(self, context: Any, tokens: Sequence[int]) -> None:
        """Read a prompt until the logits behind it are there."""
        ...

    def write(self, context: Any, tokens: Sequence[int]) -> None:
        """Decode as many steps as there are tokens, one after the other, until the last one's logits are there."""
        ...


def stop(message: str, code: int = 1) -> NoReturn:
    """One line on stderr and the end: 1 when it cannot be measured, 2 when the call or the environment is wrong."""
    print(message, file=sys.stderr)
    raise SystemExit(code)


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every peer script."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("config", help="a config.json, or the name of one in src/penstock/configs")
    made.add_argument("--layers", help="the first N layers, or all; else as the file says")
    made.add_argument("-p", "--prompt", type=numbers, default=[512], metavar="N", help="prompt sizes, 0 for none (512)")
    made.add_argument("-n", "--generate", type=numbers, default=[128], metavar="N", help="tokens to write (128)")
    made.add_argument("-d", "--depth", type=numbers, default=[0], metavar="N", help="tokens in the context before (0)")
    made.add_argument("-r", "--repetitions", type=int, default=5, metavar="N", help="of every measurement (5)")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the rows, shapes and machine to this file")
    return made


def numbers(text: str) -> list[int]:
    """A list such as 128,512."""
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise argparse.ArgumentTypeError(f"is {text!r}, expected numbers such as 128,512")
    return [int(part) for part in text.split(",")]


def read_config(name: str, layers: str | None) -> tuple[str, dict[str, Any]]:
    """A config with its first layers only, and the name that `penstock bench --random` gives to it.

    As many layers as `layers` says ("all", or a number), else as the config's own key "layers" says, else all.
    """
    path = Path(name)
    if not path.exists() and (CONFIGS / f"{name}.json").exists():
        path = CONFIGS / f"{name}.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        stop(f"{path}: cannot be read as a config.json ({error})", 2)
    stem = path.parent.name if path.name == "config.json" else path.stem
    own = config.pop("layers", None)
    text = text_config(config)
    whole, count = text["num_hidden_layers"], own if layers is None else layers
    if count in (None, "all"):
        return stem, config
    if not str(count).isdecimal() or not 1 <= int(count) <= whole:
        stop(f"--layers: is {count}, expected 1 to {whole} or all", 2)
    count = int(count)
    text["num_hidden_layers"] = count
    for key in ("layer_types", "mlp_layer_types", "intermediate_size", "activation_sparsity_pattern"):
        if isinstance(text.get(key), list):
            text[key] = text[key][:count]
    if "num_kv_shared_layers" in text:  # the last ones of all
        text["num_kv_shared_layers"] = max(0, text["num_kv_shared_layers"] - (whole - count))
    return stem + (f", {count} of {whole} layers" if count < whole else ""), config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the language model."""
    return config.get("text_config", config)


# --------------------------------------------------------------------------------------------------------------------
# Measuring


@dataclass(frozen=True)
class Test:
    """One line of the table."""

    prompt: int
    generation: int
    depth: int

    @property
    def name(self) -> str:
        what = f"pp{self.prompt}" if self.prompt else f"tg{self.generation}"
        return what + (f" @ d{self.depth}" if self.depth else "")


def planned(args: argparse.Namespace) -> list[Test]:
    """The tests in the order of `penstock bench`."""
    tests = []
    for depth in args.depth:
        tests += [Test(prompt, 0, depth) for prompt in args.prompt if prompt]
        tests += [Test(0, count, depth) for count in args.generate if count]
    if not tests:
        stop("-p and -n: are both 0, expected something to measure", 2)
    return tests


def seconds(runner: Runner, test: Test, repetitions: int) -> list[float]:
    """Seconds of every repetition, each from the same context, after one that does not count."""
    rng = np.random.default_rng(0)

    def some(count: int) -> list[int]:
        return rng.integers(0, runner.vocab, count).tolist()

    start = runner.context(some(test.depth))
    act: Callable[[Any, Sequence[int]], None] = runner.read if test.prompt else runner.write

    def once(count: int) -> float:
        context, tokens = runner.copy(start), some(count)
        begin = time.perf_counter()
        act(context, tokens)
        return time.perf_counter() - begin

    once(test.prompt or min(test.generation, 8))
    return [once(test.prompt or test.generation) for _ in range(repetitions)]


def row(test: Test, times: Sequence[float], **facts: Any) -> dict[str, Any]:
    """A measurement with the names of `penstock bench -o json`; facts: model, model_type, model_n_params, …"""
    speeds = [(test.prompt or test.generation) / one for one in times]
    return facts | {
        "test": test.name,
        "n_prompt": test.prompt,
        "n_gen": test.generation,
        "n_depth": test.depth,
        "batch_size": 1,
        "avg_ts": statistics.fmean(speeds),
        "stddev_ts": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        "samples_ns": [round(one * 1e9) for one in times],
    }


# --------------------------------------------------------------------------------------------------------------------
# Reports


class Report:
    """Prints a table row by row; the JSON file is written anew with each, so that a run cut short leaves the rest."""

    def __init__(self, peer: str, config: dict[str, Any], versions: dict[str, str], file: Path | None) -> None:
        self._file = file
        self._content = {"peer": peer, "machine": machine() | versions, "config": config, "rows": []}
        where = self._content["machine"]
        shown = where.get("gpu") or f"{where['cpu']}, {where['cores']} cores"
        used = ", ".join(f"{name} {version}" for name, version in versions.items())
        self._head = f"{peer} ({used}) on {shown}\n\n| model | size | params | backend | test | t/s |"

    def add(self, row: dict[str, Any]) -> None:
        if not self._content["rows"]:
            print(f"{self._head}\n|---|---:|---:|---|---:|---:|")
        self._content["rows"].append(row)
        size, params = f"{row['model_size'] / 2**30:.2f} GiB", f"{row['model_n_params'] / 1e9:.2f} B"
        speed = f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"
        print(f"| {row['model']} | {size} | {params} | {row['backend']} | {row['test']} | {speed} |", flush=True)
        if self._file is not None:
            self._file.write_text(json.dumps(self._content, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    facts = {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load": round(os.getloadavg()[0], 1),  # what else ran in the minute before
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    return facts | ({"gpu": gpu} if (gpu := _gpu()) else {})


def versions(*packages: str) -> dict[str, str]:
    """The installed ones of these packages."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return match[1] if match else platform.processor() or platform.machine()


def _gpu() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return ""
