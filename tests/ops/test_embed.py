import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock import ops, quant
from penstock.dtypes import numpy_dtype, round_to
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.quant import BITS, GROUP_SIZES
from tests.ops.common import DTYPES, EPS, assert_close, assert_refused_like, assert_same_bits, normal, quantized
from tests.ops.test_elementwise import check_refusals, f32

IDS = np.array([4, 0, 6, 4], "int32")


@pytest.fixture(autouse=True)
def _definition():
    with penstock.backend("reference"):
        yield


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_quantized_embedding_gives_the_dequantized_rows(bits, group_size, scale_dtype, rng):
    table = quantized(rng, 7, 256, bits=bits, group_size=group_size, dtype=scale_dtype)
    rows = quant.dequantize(table)[IDS]
    y = ops.quantized_embedding(IDS, table)
    assert_same_bits("y", y, rows)
    mx = pytest.importorskip("mlx.core")
    scales, biases = (mx.array(a).astype(mx.float32) for a in (table.scales, table.biases))
    want = np.array(mx.dequantize(mx.array(table.packed), scales, biases, group_size=group_size, bits=bits))[IDS]
    if scale_dtype == "float32":  # fused or separate multiply-add
        assert_close("y of mlx", y, want, 2 * EPS["float32"])
    else:
        assert_same_bits("y of mlx", y, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_embedding_rounds_once_to_the_dtype_asked_for(dtype, rng):
    table = quantized(rng, 7, 64, bits=8, dtype="bfloat16")
    y = ops.quantized_embedding(IDS, table, dtype=dtype)
    assert_same_bits("y", y, round_to(ops.quantized_embedding(IDS, table), numpy_dtype(dtype)))
    if dtype == "bfloat16":  # not the product and the sum rounded one after the other
        assert (y != quant.dequantize(table, "bfloat16")[IDS]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_copies_rows(dtype, rng):
    table = normal(rng, 7, 5, dtype=dtype)
    y = ops.embedding(IDS, table)
    assert_same_bits("y", y, np.stack([table[i] for i in IDS]))
    assert not np.may_share_memory(y, table)
    for other in DTYPES:
        assert_same_bits(other, ops.embedding(IDS, table, dtype=other), round_to(y, numpy_dtype(other)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_of_no_token_is_zero(dtype, rng):
    dense, table = normal(rng, 7, 64, dtype=dtype), quantized(rng, 7, 64)
    before = dense.copy()
    ids = np.array([[-1, 6], [0, -1]], "int32")
    for y, rows in ((ops.embedding(ids, dense), dense), (ops.quantized_embedding(ids, table), quant.dequantize(table))):
        assert_same_bits("y", y, np.stack([[0 * rows[0], rows[6]], [rows[0], 0 * rows[0]]]) + 0)
    assert not ops.embedding(np.array(-1, "int32"), dense).any()
    assert_same_bits("table", dense, before)


@given(st.lists(st.integers(0, 3), max_size=2), st.integers(1, 3))
def test_embedding_keeps_the_shape_of_the_ids(lead, vocab):
    ids = (np.arange(int(np.prod(lead)), dtype="int32") % vocab).reshape(lead)
    dense = np.arange(vocab * 32, dtype="float32").reshape(vocab, 32)
    table = penstock.quantize(dense, bits=8, group_size=32)
    for y, rows in ((ops.embedding(ids, dense), dense), (ops.quantized_embedding(ids, table), quant.dequantize(table))):
        assert y.shape == (*lead, 32)
        assert_same_bits("y", y, rows[ids])


VALID = {
    "embedding": lambda rng: {"token_ids": IDS, "table": normal(rng, 7, 64)},
    "quantized_embedding": lambda rng: {"token_ids": IDS, "table": quantized(rng, 7, 64)},
}


@pytest.mark.parametrize("name", VALID)
def test_embedding_refuses_bad_arrays(name, rng):
    check_refusals(getattr(ops, name), VALID[name](rng))


@pytest.mark.parametrize("name", VALID)
@pytest.mark.parametrize(("ids", "found"), [([0, 7], 7), ([-2, 3], -2), ([0, -(2**31)], -(2**31)), ([2**30], 2**30)])
def test_embedding_refuses_ids_out_of_range_by_value(name, ids, found, rng):
    args = VALID[name](rng) | {"token_ids": np.array(ids, "int32"), "out": np.full((len(ids), 64), 7, "float32")}
    message = rf"token_ids has {found}, expected -1 to 6 \(vocabulary of 7, -1: no token\)"
    assert_refused_like(getattr(ops, name), args, InvalidArgument, message)


@pytest.mark.parametrize("name", VALID)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"token_ids": IDS.astype("int64")}, DTypeError, "token_ids has dtype int64, expected int32"),
        ({"token_ids": IDS.astype("uint32")}, DTypeError, "token_ids has dtype uint32, expected int32"),
        ({"token_ids": IDS.reshape(1, 2, 2)}, ShapeError, r"token_ids has shape \(1, 2, 2\), expected \[T\]"),
        ({"token_ids": 3}, DTypeError, "token_ids is 3, expected an array"),
        ({"dtype": "int8"}, DTypeError, "dtype is 'int8', expected float32, float16 or bfloat16"),
    ],
)
def test_embedding_names_what_is_wrong(name, change, error, message, rng):
    assert_refused_like(getattr(ops, name), VALID[name](rng) | change, error, message)


@pytest.mark.parametrize(
    ("name", "table", "error", "message"),
    [
        ("embedding", f32(7), ShapeError, r"table has shape \(7,\), expected \[vocab, dim\]"),
        ("embedding", f32(0, 64), ShapeError, r"table has shape \(0, 64\), expected no empty axis"),
        ("embedding", np.zeros((7, 64), int), DTypeError, "table has dtype int64, expected float32"),
        ("quantized_embedding", f32(7, 64), DTypeError, "table is a ndarray, expected a QuantizedTensor"),
    ],
)
def test_embedding_names_what_is_wrong_with_the_table(name, table, error, message):
    assert_refused_like(getattr(ops, name), {"token_ids": IDS, "table": table}, error, message)


def test_quantized_embedding_refuses_a_stack_of_tables(rng):
    args = {"token_ids": IDS, "table": quantized(rng, 2, 7, 64)}
    assert_refused_like(
        ops.quantized_embedding, args, ShapeError, r"table has shape \(2, 7, 64\), expected \[vocab, dim\]"
    )
