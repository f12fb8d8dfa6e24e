"""Every CUDA kernel against its definition on the calls of tests/ops/cases.py."""

from dataclasses import replace

import pytest
import torch

import penstock
from penstock import ops
from penstock.backends.cuda import _delta_step, _tuning
from penstock.graph.fuse_cuda import ROWS_APART
from tests.gpu.common import GPU, to_device, to_host
from tests.ops.cases import CASES, Case
from tests.ops.test_cases import check_against_definition, outputs_of, poisoned, written
from tests.ops.test_cases import run as run_reference

# Tiles on tensor cores round weights to the activations' dtype: the definition with such weights is 0.0029 away.
_ROUNDED = {("moe_biased_forward-sum-few", "bfloat16"): 2**-8} if GPU else {}
_MANY_PROGRAMS = ("wide", "tall", "many", "prefill", "long", "sum-wide")  # labels that take the interpreter too long


def _chosen() -> list[tuple[Case, str]]:
    """On a GPU everything; in the interpreter the small cases, half precision and float32 in turn."""
    found = [(case, dtype) for case in CASES for dtype in case.dtypes]
    found = [(case, dtype) for case, dtype in found if ops.REGISTRY[case.op].kernel("cuda") is not None]
    if GPU:
        return found
    small = [case for case, dtype in found if dtype == case.dtypes[0] and case.label not in _MANY_PROGRAMS]
    return [(case, case.dtypes[-1 if number % 2 else 0]) for number, case in enumerate(small)]


@pytest.mark.parametrize(("case", "dtype"), _chosen(), ids=str)
def test_cuda_kernel_matches_definition(case, dtype):
    op = ops.REGISTRY[case.op]
    want = run_reference(case, case.arguments(dtype))
    out = tuple(map(to_device, poisoned(outputs_of(case, want, dtype))))
    if op.partial:
        for tensor in out:
            tensor.zero_()
    arguments = {name: to_device(value) for name, value in case.arguments(dtype).items()}
    with penstock.backend("cuda"):
        result = op(**arguments, out=(out if len(out) > 1 else out[0]) if out else None)
    outputs = result if isinstance(result, tuple) else () if result is None else (result,)
    got = to_host((*outputs, *written(op, arguments)))
    check_against_definition(replace(case, rel=_ROUNDED.get((str(case), dtype), case.rel)), dtype, got, want)


_APART = [(case, dtype) for case, dtype in _chosen() if ops.REGISTRY[case.op] in ROWS_APART]


@pytest.mark.parametrize(("case", "dtype"), _APART, ids=str)
@pytest.mark.parametrize("how", ["few rows", "many rows", "deterministic"])
def test_cuda_kernel_reads_rows_that_lie_apart(case, dtype, how, monkeypatch):
    """Columns of one array, with NaN between them, give the bits of arrays of their own."""
    op, deterministic = ops.REGISTRY[case.op], how == "deterministic"
    if how == "many rows":
        monkeypatch.setattr(_delta_step, "DELTA_STEP", _tuning.DELTA_STEP[-1:])
    together, specs = op.inferred(**{name: to_device(value) for name, value in case.arguments(dtype).items()})
    apart = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in together.items()}
    for name in ROWS_APART[op]:
        rows = apart[name]
        if rows is not None and len(rows):
            wide = rows.new_full((len(rows), rows[0].numel() + 16), float("nan"))
            wide[:, 8:-8] = rows.reshape(len(rows), -1)
            apart[name] = wide.as_strided(rows.shape, (wide.stride(0), *rows.stride()[1:]), 8)
    made = []
    for arguments in (together, apart):
        first = next(value for value in arguments.values() if isinstance(value, torch.Tensor))
        outs = [
            None if spec is None else first.new_full(spec.shape, float("nan"), dtype=getattr(torch, spec.dtype))
            for spec in specs
        ]
        with penstock.backend("cuda", deterministic=deterministic):
            op.kernel("cuda").choosing(*arguments.values(), out=tuple(outs) if len(outs) > 1 else outs[0])
        made.append([*(out for out in outs if out is not None), *written(op, arguments)])
    for a, b in zip(*made, strict=True):
        assert torch.equal(a.nan_to_num(9), b.nan_to_num(9))
