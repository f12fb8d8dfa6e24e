"""Compile the kernels of a model's steps before the first of them runs, in two processes: half the wait of a first run.

Which kernels a step calls, and with which types, shows when it is run with kernels that do nothing. The first process
compiles what is missing of them from the beginning of that list; a helper, which makes the same list, from its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from penstock import compile_progress, kernel_cache
from penstock.engine.engine import Engine
from penstock.graph import Node
from penstock.machine import usable_threads

PREFILL = (20,)  # tokens of the prompts whose kernels are compiled before a first run
SECONDS = 600.0  # for which a helper works at most
_POLL_SECONDS = 0.05

Missing = dict[Path, tuple[Any, Any]]


class Loaded(Protocol):
    engine: Engine


def start(missing: Callable[..., Missing], *arguments: Any, at_once: bool = True) -> None:
    """Start a helper that compiles what `missing(*arguments)` lists if this machine has a second core; at_once: and no
    kernel at all.

    A helper that cannot start or fails costs nothing: the first process compiles what is missing.
    """
    from penstock.backends.cpu import compile_lock
    from penstock.backends.cpu.compile import trusted_folder

    folder = trusted_folder()
    alone = compile_lock.helping or compile_lock.helper is not None or usable_threads() < 2
    if alone or not folder.is_dir() or (at_once and any(folder.glob("*.nbc"))):
        return
    with contextlib.suppress(OSError):
        helper = subprocess.Popen(
            [sys.executable, "-m", "penstock.engine.compile_ahead"],
            env=os.environ | {"PENSTOCK_CACHE_DIR": str(folder.parents[1])},  # trusted_folder() is there too
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert helper.stdin is not None
        with helper.stdin:
            pickle.dump((missing, arguments, os.getpid()), helper.stdin)
        compile_lock.helper = helper


def missing_of(load: Callable[..., Loaded], options: dict[str, Any]) -> Missing:
    """`missing_kernels` of a model that is to be loaded."""
    return missing_kernels(load(**options).engine)


def compile_model(engine: Engine, load: Callable[..., Loaded], options: dict[str, Any]) -> None:
    """Compile what is missing of the kernels that answers and short prompts of a model need, with a helper.

    Which of them are there is looked at once per machine and kind of model.
    """
    from penstock.backends.cpu import compile_lock
    from penstock.backends.cpu.compile import compiles, trusted_folder

    if compile_lock.helping or not compiles():
        return
    mark = trusted_folder() / f"compiled-{_kind(engine)}"
    if mark.exists():
        return
    missing = missing_kernels(engine)
    if missing:
        start(missing_of, load, options, at_once=False)
        compile_kernels(missing)
    with contextlib.suppress(OSError):
        kernel_cache.write(mark, b"")


def _kind(engine: Engine) -> str:
    """Tells models whose steps may call other kernels from each other, and this CPU from others."""
    from penstock.backends.cpu.compile import this_cpu

    programs = engine.programs
    assert programs is not None
    told = (engine.model.fingerprint, programs.caches.dtype, programs.activations, programs.experts is None)
    return hashlib.sha256(repr((*told, PREFILL, this_cpu())).encode()).hexdigest()[:32]


def missing_kernels(engine: Engine, prompts: Sequence[int] = PREFILL, sequences: Sequence[int] = (1,)) -> Missing:
    """Kernels that are not on disk of a step of answers of so many sequences, and of prompts of so many tokens."""
    from penstock.backends.cpu.compile import listing

    own = {name: getattr(engine, name) for name in ("activations", "dtype", "state_dtype", "max_context", "device")}
    tried = Engine(engine.model, **own)  # with caches of its own
    assert tried.programs is not None
    tried.programs.wrap = _zeroing
    with listing() as listed:
        for tokens in prompts:
            tried.prefill(tried.open(), [0] * min(tokens, tried.max_context))
        for count in sequences:
            tried.decode([tried.open() for _ in range(count)], [0] * count)
    return {file: found for file, found in listed.items() if not file.exists()}


def _zeroing(node: Node, kernel: Any) -> Any:
    """A node's kernel, before which its outputs are zeros: ids and lengths made of them are valid."""

    def run(*args: Any, **kwargs: Any) -> None:
        out = kwargs.get("out", ())
        for array in out if isinstance(out, tuple) else (out,):
            if isinstance(array, np.ndarray):
                array[...] = 0
        kernel(*args, **kwargs)

    return run


def compile_kernels(missing: Missing) -> None:
    """Compile kernels, or wait for them where a helper is at it, and show how many are done."""
    from penstock.backends.cpu.compile import WHERE

    with compile_progress.counting(lambda: (sum(file.exists() for file in missing), len(missing))):
        for file, (kernel, sig) in missing.items():
            if not file.exists():
                compile_progress.show(WHERE)
                kernel.compile(sig)


def help_compile(missing: Missing, parent: int) -> None:
    """The same from the end of the list, without waiting for kernels that the parent is at."""
    from penstock.backends.cpu import compile_lock

    end = time.monotonic() + SECONDS
    while missing and time.monotonic() < end:
        for file, (kernel, sig) in reversed(missing.items()):
            if os.getppid() != parent:
                return
            if not file.exists():
                with contextlib.suppress(compile_lock.LockedElsewhere):
                    kernel.compile(sig)
        missing = {file: found for file, found in missing.items() if not file.exists()}
        time.sleep(_POLL_SECONDS)


def main() -> None:
    from penstock.backends.cpu import compile_lock

    missing, arguments, parent = pickle.load(sys.stdin.buffer)
    compile_lock.helping = True
    help_compile(missing(*arguments), parent)


if __name__ == "__main__":
    main()
