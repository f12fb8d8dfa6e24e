"""Compile a model's kernels in a second process while the first one starts to run: half the wait of a first run.

The first process calls `start`, runs its steps as usual, and waits for kernels that the helper is compiling. The helper
loads the same model, runs small steps again and again, skips kernels that the first process is at, and leaves when
nothing is left to compile. What it computes is nonsense and is not read.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from penstock.engine.engine import Engine
from penstock.graph import Node
from penstock.machine import usable_threads

PREFILL, PASSES, SECONDS = 20, 200, 120.0


class Loaded(Protocol):
    engine: Engine


def start(load: Callable[..., Loaded], options: dict[str, Any]) -> None:
    """Start a helper that calls `load(**options)` if this machine has compiled nothing yet and has a second core.

    A helper that cannot start or fails costs nothing: the first process compiles what is missing.
    """
    from penstock.backends.cpu import compile_lock
    from penstock.backends.cpu.compile import trusted_folder

    folder = trusted_folder()
    alone = compile_lock.helping or compile_lock.helper is not None or usable_threads() < 2
    if alone or not folder.is_dir() or any(folder.glob("*.nbc")):
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
            pickle.dump((load, options, os.getpid()), helper.stdin)
        compile_lock.helper = helper


def compile_steps(engine: Engine, parent: int) -> None:
    """Steps over and over until one meets no locked kernel, the parent has gone, or time is up."""
    from penstock.backends.cpu import compile_lock

    met = 0

    def forgiving(node: Node, kernel: Any) -> Any:
        def skipping(*args: Any, **kwargs: Any) -> None:
            nonlocal met
            if os.getppid() != parent:
                raise SystemExit
            try:
                kernel(*args, **kwargs)
            except compile_lock.LockedElsewhere:
                met += 1
                out = kwargs.get("out", ())
                for array in out if isinstance(out, tuple) else (out,):
                    if isinstance(array, np.ndarray):
                        array[...] = 0  # ids and lengths made of it stay valid

        return skipping

    assert engine.programs is not None
    engine.programs.wrap = forgiving
    end = time.monotonic() + SECONDS
    for _ in range(PASSES):
        met = 0
        sequence = engine.open()
        engine.decode([sequence], [0])
        engine.prefill(sequence, [0] * PREFILL)
        engine.close(sequence)
        if not met or time.monotonic() > end:
            return


def main() -> None:
    from penstock.backends.cpu import compile_lock

    load, options, parent = pickle.load(sys.stdin.buffer)
    compile_lock.helping = True
    compile_steps(load(**options).engine, parent)


if __name__ == "__main__":
    main()
