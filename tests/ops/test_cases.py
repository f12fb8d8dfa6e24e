"""What holds for every op, checked on the calls of cases.py; and every kernel against its definition."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.ops.array import leaves, numpy_view, torch_view
from penstock.ops.op import Op
from penstock.quant import QuantizedTensor
from tests.ops.cases import ALL_OPS, CASES, Arguments, Case
from tests.ops.common import EPS, assert_close, assert_same_bits

EACH = pytest.mark.parametrize("case", CASES, ids=str)


def run(case: Case, arguments: Arguments, out: Any = None, device: str = "reference") -> tuple[Any, ...]:
    """Outputs, then the state that the op wrote."""
    op = ops.REGISTRY[case.op]
    with penstock.backend(device):
        result = op(**arguments, out=out)
    outputs = result if isinstance(result, tuple) else () if result is None else (result,)
    return (*outputs, *written(op, arguments))


def written(op: Op, arguments: Arguments) -> list[Any]:
    """What a call changes in place."""
    return [arguments[name] for name in op.writes if arguments.get(name) is not None]


def outputs_of(case: Case, found: tuple[Any, ...], dtype: str) -> tuple[Any, ...]:
    """Of what `run` found the outputs alone."""
    return found[: len(found) - len(written(ops.REGISTRY[case.op], case.arguments(dtype)))]


def poisoned(outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arrays like these, filled with NaN or a large negative number."""
    return tuple(np.full_like(o, np.nan if o.dtype.kind not in "iu" else -(2**30)) for o in outputs)


def to_torch(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch_view(value)
    if isinstance(value, QuantizedTensor):
        return value.to("torch")
    return [to_torch(item) for item in value] if isinstance(value, list) else value


def test_every_op_has_a_case():
    assert {case.op for case in CASES} == set(ALL_OPS)


@contextlib.contextmanager
def told(dtype: str) -> Iterator[None]:
    """What fails inside names the dtype."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"with {dtype}")
        raise


@EACH
def test_op_reads_its_inputs_only_and_writes_what_it_declares(case):
    for dtype in case.dtypes:
        with told(dtype):
            arguments = case.arguments(dtype)
            before = copy.deepcopy(arguments)
            run(case, arguments)
            for name, value in arguments.items():
                if name in ops.REGISTRY[case.op].writes:
                    continue
                for now, then in zip(leaves(value), leaves(before[name]), strict=True):
                    assert_same_bits(name, now, then)


@EACH
def test_op_fills_out_and_returns_it(case):
    dtype = case.dtypes[-1]
    op = ops.REGISTRY[case.op]
    want = run(case, case.arguments(dtype))
    outputs = outputs_of(case, want, dtype)
    if not outputs:
        pytest.skip("no outputs")
    out = poisoned(outputs)
    if op.partial:
        for array in out:
            array[...] = 0
    got = run(case, case.arguments(dtype), out=out if len(out) > 1 else out[0])
    for number, (a, b, given) in enumerate(zip(got, want, out, strict=False)):
        assert a is given
        assert_same_bits(f"out[{number}]", a, b)


@EACH
def test_op_gives_torch_tensors_the_same_bits(case):
    dtype = case.dtypes[-1]
    want = run(case, case.arguments(dtype))
    arguments = {name: to_torch(value) for name, value in case.arguments(dtype).items()}
    got = run(case, arguments)
    takes_arrays = any(leaves(value) for value in arguments.values())
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert isinstance(a, torch.Tensor) == takes_arrays
        assert_same_bits(f"output {number}", numpy_view(a), b)


def check_against_definition(case: Case, dtype: str, got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        name = f"output {number}"
        if case.rel == 0 or b.dtype.kind in "iu":
            assert_same_bits(name, a, b)
            continue
        kind = {2: dtype, 4: "float32", 8: "float64"}[b.dtype.itemsize]
        rel = case.rel if b.dtype.itemsize > 2 else case.rel + 2 * EPS[kind]
        scale = max(np.max(np.abs(b.astype(np.float64)), initial=0), 1e-3) if case.whole else None
        assert_close(name, a, b, rel, scale)


@pytest.mark.parametrize("case", [c for c in CASES if ops.REGISTRY[c.op].kernel("cpu") is not None], ids=str)
def test_cpu_kernel_matches_definition(case):
    op = ops.REGISTRY[case.op]
    for dtype in case.dtypes:
        with told(dtype):
            want = run(case, case.arguments(dtype))
            out = poisoned(outputs_of(case, want, dtype))
            if op.partial:
                for array in out:
                    array[...] = 0
            given = (out if len(out) > 1 else out[0]) if out else None
            got = run(case, case.arguments(dtype), out=given, device="cpu")
            check_against_definition(case, dtype, got, want)
