"""CUDA kernels with weights of small floats, and of 1 bit, against definitions."""

import numpy as np
import pytest

from tests.gpu.common import GPU, reference, run
from tests.ops.common import EPS, assert_close
from tests.ops.modes import KINDS, calls

CASES = [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "int8"), ("float16", "float32")]


@pytest.mark.parametrize(("dtype", "activations"), CASES if GPU else CASES[1:2])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_equal_definitions(kind, dtype, activations, rng):
    for op, arguments in calls(rng, kind, dtype, activations):
        want = reference(op, **arguments).astype(np.float32)
        got = run(op, **arguments).astype(np.float32)
        size = max(np.abs(want).max(initial=0), 1e-3)
        if op.name in ("dequantize", "quantized_embedding"):
            np.testing.assert_array_equal(got, want)
        else:
            assert_close(f"{op.name} y", got, want, 4e-6 + (0 if dtype == "float32" else 4 * EPS[dtype]), size)
