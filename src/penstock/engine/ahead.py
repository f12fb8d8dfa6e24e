"""Compile a model's kernels in a second process while the first one starts to run: half the wait of a first run.

The first process calls `start`, runs its steps as usual, and waits for kernels that the helper is compiling. The helper
loads the same model, runs small steps again and again, skips kernels that the first process is at, and leaves when
nothing is left to compile. It computes nonsense, and nobody reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

from penstock.engine.engine import Engine
from penstock.graph import Node

PREFILL, PASSES, SECONDS = 20, 200, 120.0


def start(options: dict[str, Any]) -> None:
    """Start a helper for `load(**options)` if this machine has compiled nothing yet and has a second core.

    A helper that cannot start or fails costs nothing: the first process compiles what is missing.
    """
    from penstock.backends.cpu import _claims
    from penstock.backends.cpu._compile import trusted_folder

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    folder = trusted_folder()
    if _claims.helping or _claims.helper is not None or cores < 2 or not folder.is_dir() or any(folder.glob("*.nbc")):
        return
    with contextlib.suppress(OSError):
        helper = subprocess.Popen(
            [sys.executable, "-m", "penstock.engine.ahead"],
            env=os.environ | {"PENSTOCK_CACHE_DIR": str(folder.parents[1])},  # trusted_folder() is there too
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert helper.stdin is not None
        with helper.stdin:
            helper.stdin.write(json.dumps({"options": options, "parent": os.getpid()}))
        _claims.helper = helper


def run(engine: Engine, parent: int) -> None:
    """Steps over and over until one meets no claimed kernel, the parent has gone, or time is up."""
    from penstock.backends.cpu import _claims

    met = 0

    def forgiving(node: Node, kernel: Any) -> Any:
        def skipping(*args: Any, **kwargs: Any) -> None:
            nonlocal met
            if os.getppid() != parent:
                raise SystemExit
            try:
                kernel(*args, **kwargs)
            except _claims.Claimed:
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
    from penstock.api import load
    from penstock.backends.cpu import _claims

    given = json.load(sys.stdin)
    _claims.helping = True
    run(load(**given["options"]).engine, given["parent"])


if __name__ == "__main__":
    main()
