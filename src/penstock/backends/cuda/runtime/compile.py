"""Compile the kernels of many launches at once, in threads, before the first of them runs.

Triton compiles a kernel when it is first launched, one after the other: half a minute for a model on a new machine.
Most of that time is spent outside of Python's lock, so threads share it.
"""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from penstock import compile_progress
from penstock.ops.collective import exchanging_nothing
from penstock.quant import QuantizedTensor

WHERE = "this GPU"  # that kernels are compiled for, as a user reads it


@contextlib.contextmanager
def compiling() -> Iterator[Any]:
    """Inside, launches by this thread hand their kernels to a pool for compilation, if they have to, and do not run.

    Yields Triton's record of what was handed over. All is compiled at the end.
    """
    me = threading.get_ident()
    plain = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return plain(self, *args, grid=grid, warmup=warmup or threading.get_ident() == me, **kwargs)

    # A pool of processes would need less of Python's lock, but a copy of torch in each.
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool, triton.AsyncCompileMode(pool) as mode:
        JITFunction.run = run
        try:
            yield mode
        finally:
            JITFunction.run = plain
        _watch(mode)


def compile_all(calls: Sequence[Callable[[], object]]) -> None:
    """Compile every kernel that these calls launch. What they do besides launching is done: it must not matter. Ranks
    exchange nothing.

    Of calls that differ in the addresses of their arrays alone, as those of one kind of layer do, one is looked at.
    """
    with compiling(), exchanging_nothing():
        for call in {_signature(call): call for call in calls}.values():
            call()


def _signature(value: Any) -> Any:
    """What a kernel may be compiled for, of a call and of all that it is given."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.data_ptr() % 16
    if isinstance(value, functools.partial):
        return value.func, _signature(value.args), tuple(value.keywords), _signature(tuple(value.keywords.values()))
    if isinstance(value, QuantizedTensor):
        return value.format, _signature(tuple(value.arrays))
    if isinstance(value, tuple | list):
        return tuple(map(_signature, value))
    return value if value is None or isinstance(value, bool | int | float | str) else id(value)


def _watch(mode: Any) -> None:
    """Wait for what was handed over, and show how far it is."""
    waiting = list(mode.raw_futures)
    if not waiting:
        return
    with compile_progress.counting(lambda: (sum(future.done() for future in waiting), len(waiting))):
        while not all(future.done() for future in waiting):
            compile_progress.show(WHERE)
            time.sleep(0.05)
