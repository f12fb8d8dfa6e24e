"""What must hold of every CPU kernel that works row by row, on the calls of tests/ops/cases.py."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import ops
from penstock.backends.cpu import _threads
from tests.ops.cases import CASES, Arguments, Case
from tests.ops.common import assert_same_bits

MANY = 600  # rows that are enough for the parallel kernels


def cases_of(family: str, *, empty: bool = False) -> list[Case]:
    """Cases of a family that have rows."""
    found = [case for case in CASES if ops.REGISTRY[case.op].family == family and case.sizes]
    return [case for case in found if not case.op.endswith("inv_freq") and (empty or 0 not in case.sizes)]


def with_rows(case: Case, dtype: str, rows: int) -> Arguments:
    """The case's arguments with another number of rows, which is the first of its sizes."""
    rng = np.random.default_rng(rows)
    return case.make(rng, dtype, rows, *case.sizes[1:])


def sliced(arguments: Arguments, rows: int, start: int, stop: int) -> Arguments:
    """Some of the rows: arrays that have `rows` as their first axis are cut, the rest stays."""
    cut = {}
    for name, value in arguments.items():
        per_row = isinstance(value, np.ndarray) and value.ndim > 0 and value.shape[0] == rows
        cut[name] = value[start:stop].copy() if per_row else value
    return cut


def copied(arguments: Arguments) -> Arguments:
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in arguments.items()}


def run(case: Case, arguments: Arguments, **kwargs: Any) -> tuple[np.ndarray, ...]:
    with penstock.backend("cpu"):
        result = ops.REGISTRY[case.op](**arguments, **kwargs)
    return result if isinstance(result, tuple) else (result,)


def check_rows_alone(case: Case, dtype: str, **others: Any) -> None:
    """Row t of a call with T rows, T = 1 … 32 and many, has the bits of the call with that row alone.

    `others` are arguments in the place of the case's own.
    """
    arguments = {**with_rows(case, dtype, MANY), **others}
    alone = [run(case, sliced(arguments, MANY, t, t + 1)) for t in range(40)]
    whole = run(case, arguments)
    for number, array in enumerate(whole):
        want = np.concatenate([each[number] for each in alone])
        assert_same_bits(f"output {number} of {MANY} rows", array[:40], want)
        for T in range(1, 33):
            got = run(case, sliced(arguments, MANY, 3, 3 + T))[number]
            assert_same_bits(f"output {number} of {T} rows", got, want[3 : 3 + T])


def check_threads(case: Case, dtype: str) -> None:
    """One and two threads give the same bits."""
    if _threads.available() < 2:
        pytest.skip("one processor")
    before, arguments, found = _threads.threads(), with_rows(case, dtype, MANY), []
    try:
        for count in (1, 2):
            _threads.set_threads(count)
            found.append(run(case, arguments))
    finally:
        _threads.set_threads(before)
    for number, (one, two) in enumerate(zip(*found, strict=True)):
        assert_same_bits(f"output {number}", two, one)


def check_in_place(case: Case, dtype: str, rows: int) -> None:
    """Each output may lie on each input of its shape and dtype, with one row and with many."""
    given = with_rows(case, dtype, rows)
    want = run(case, copied(given))
    tried = 0
    for number, expected in enumerate(want):
        for name, value in given.items():
            if not (isinstance(value, np.ndarray) and (value.shape, value.dtype) == (expected.shape, expected.dtype)):
                continue
            arguments = copied(given)
            out = [np.full_like(array, -7) for array in want]
            out[number] = arguments[name]
            got = run(case, arguments, out=tuple(out) if len(out) > 1 else out[0])
            tried += 1
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                assert_same_bits(f"output {i} with output {number} on {name}", a, b)
    assert tried > 0


_UNCOMPILED = """
import sys
import numpy as np
import penstock
from penstock import ops
from tests.ops.cases import by_op
from tests.ops.common import EPS, assert_close

for op in sys.argv[1:]:
    for number, case in enumerate(by_op(op)):
        if case.label in ("wide", "sum-wide", "tall", "prefill"):
            continue
        dtype = case.dtypes[number % len(case.dtypes)]
        results = []
        for device in ("reference", "cpu"):
            with penstock.backend(device), np.errstate(all="ignore"):
                results.append(ops.REGISTRY[op](**case.arguments(dtype)))
        want, got = (r if isinstance(r, tuple) else (r,) for r in results)
        for a, b in zip(got, want, strict=True):
            kind = dtype if b.dtype.itemsize == 2 else "float32"
            rel = case.rel if kind == "float32" else case.rel + 2 * EPS[kind]
            assert_close(f"{case} {dtype}", a, b, rel)
"""


def check_uncompiled(*names: str) -> None:
    """The kernels are plain Python: without Numba's compiler they give the results of the definitions.

    A case in one of its dtypes, in turn: conversions have tests of their own, and Python takes seconds for a case.
    """
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", _UNCOMPILED, *names]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
