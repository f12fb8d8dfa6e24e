"""Threads of the CPU kernels: how many, and calls from several Python threads at once."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from penstock import machine, ops
from penstock.backends.cpu import _threads
from penstock.errors import InvalidArgument
from tests.ops.common import assert_same_bits, normal, quantized


def in_child(code: str, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK_", "NUMBA_NUM"))}
    child = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, check=False
    )
    return child.stdout + child.stderr[-300:]


COUNT = "from penstock.backends.cpu import _threads; print(_threads.threads())"


def test_threads_are_the_physical_cores_unless_the_setting_says_otherwise():
    assert in_child(COUNT) == f"{min(machine.physical_cores(), _threads.available())}\n"
    assert in_child(COUNT, PENSTOCK_THREADS="1") == "1\n"


def test_threads_beyond_the_machine_are_refused():
    message = rf"threads is 9999, expected 1 to {_threads.available()} \(processors this process may use\)"
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        _threads.set_threads(9999)
    assert "threads is 9999, expected 1 to" in in_child(COUNT, PENSTOCK_THREADS="9999")


SCRATCH = """
import threading
import numpy as np
from tests.ops.common import normal, quantized
from penstock import ops

rng = np.random.default_rng(0)
w, rows = quantized(rng, 1024, 512), [normal(rng, 2, 512) for _ in range(8)]
want, wrong = [ops.quantized_matmul(x, w, "int8") for x in rows], []

def work(x, y):
    wrong.extend(not np.array_equal(ops.quantized_matmul(x, w, "int8"), y) for _ in range(500))

workers = [threading.Thread(target=work, args=pair) for pair in zip(rows, want)]
[worker.start() for worker in workers]
[worker.join() for worker in workers]
print(len(wrong), sum(wrong))
"""


def test_kernels_hold_their_scratch_as_long_as_they_use_it():
    """With one heap for all threads and none of their own, what one of them frees too early another one has at once."""
    tunables = "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"
    assert in_child(SCRATCH, GLIBC_TUNABLES=tunables) == "4000 0\n"


def test_kernels_may_be_called_from_many_threads_at_once(rng):
    w, rows = quantized(rng, 1024, 512), [normal(rng, 2, 512) for _ in range(8)]
    want = [ops.quantized_matmul(x, w, "int8") for x in rows]
    got: list[list[np.ndarray]] = [[] for _ in rows]

    def work(i: int) -> None:
        got[i].extend(ops.quantized_matmul(rows[i], w, "int8") for _ in range(20))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(rows))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for i, results in enumerate(got):
        assert len(results) == 20
        for result in results:
            assert_same_bits(f"thread {i}", result, want[i])
