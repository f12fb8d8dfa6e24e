"""The CPU kernels of the embeddings beyond the cases of tests/ops, bit for bit."""

import numpy as np
import pytest

from penstock import ops
from penstock.backends.cpu import _threads
from penstock.quant import BITS, GROUP_SIZES
from tests.backends import rows
from tests.ops.common import DTYPES, assert_same_bits, normal, quantized, run_on


def check(op, *arguments):
    got, want = (run_on(device, op, *arguments) for device in ("cpu", "reference"))
    assert_same_bits(str(arguments[2:]), got, want)


@pytest.mark.parametrize("scales", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_quantized_rows_of_every_format(bits, group_size, scales, rng):
    table = quantized(rng, 23, 3 * group_size, bits=bits, group_size=group_size, dtype=scales)
    ids = rng.integers(0, 23, 9).astype(np.int32)
    for dtype in (None, *DTYPES):
        check(ops.quantized_embedding, ids, table, dtype)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0), (700,)])
def test_ids_of_any_shape(shape, rng):
    ids = rng.integers(0, 50, shape).astype(np.int32)
    ids.setflags(write=False)
    table = quantized(rng, 50, 96, bits=4)
    for dtype in (None, "bfloat16"):
        check(ops.quantized_embedding, ids, table, dtype)
        check(ops.embedding, ids, normal(rng, 50, 65), dtype)


@pytest.mark.parametrize("kept", DTYPES)
def test_dense_rows_of_every_format(kept, rng):
    table = normal(rng, 40, 77, dtype=kept)
    table[3, 5], table[4, 6], table[5, 0], table[5, 1] = np.inf, -np.inf, 1e-6, 65519
    table.setflags(write=False)
    for T in (1, 30, 900):
        ids = rng.integers(0, 40, T).astype(np.int32)
        for dtype in (None, *DTYPES):
            check(ops.embedding, ids, table, dtype)


def test_dense_rows_keep_the_bits_of_nan():
    table = np.frombuffer(np.full(600, 0xFFA5, np.uint16).tobytes(), np.float16).reshape(4, 150)
    for T in (3, 400):
        got = run_on("cpu", ops.embedding, np.zeros(T, np.int32), table)
        assert (got.view(np.uint16) == 0xFFA5).all()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_rows_do_not_depend_on_number_and_threads(dtype, rng):
    table, ids = quantized(rng, 61, 2048, bits=3), rng.integers(0, 61, 100).astype(np.int32)
    one = np.concatenate([run_on("cpu", ops.quantized_embedding, ids[i : i + 1], table, dtype) for i in range(100)])
    before = _threads.threads()
    try:
        for count in range(1, min(2, _threads.available()) + 1):
            _threads.set_threads(count)
            assert_same_bits("rows", run_on("cpu", ops.quantized_embedding, ids, table, dtype), one)
    finally:
        _threads.set_threads(before)


def test_kernels_run_uncompiled():
    rows.check_uncompiled("embedding", "quantized_embedding")
