"""Embedding look-ups: rows of a dense or quantized table."""

from __future__ import annotations

import numpy as np

from penstock import quant
from penstock.dtypes import numpy_dtype, round_to
from penstock.ops import check
from penstock.ops.array import Array, Spec
from penstock.ops.op import op
from penstock.quant import QuantizedTensor


def _gathered(token_ids: Spec, table: Spec | QuantizedTensor, dtype: str | None) -> Spec:
    check.dtype("int32", token_ids=token_ids)
    check.axes("[T]", 0, 1, 2, token_ids=token_ids)
    check.axes("[vocab, dim]", 2, table=table)
    check.floating(table=table)
    check.filled(0, table=table)
    kept = Spec(table.shape, "float32") if isinstance(table, QuantizedTensor) else table
    return Spec((*token_ids.shape, table.shape[1]), check.result_dtype(kept, dtype))


def _check_ids(token_ids: Array, table: Array | QuantizedTensor) -> None:
    check.in_range("token_ids", token_ids, -1, table.shape[0], f"vocabulary of {table.shape[0]}, -1: no token")


def _no_token(token_ids: Array, rows: Array) -> Array:
    """Rows [T, dim], 0 where there is no token."""
    return np.where((token_ids < 0)[..., None], rows.dtype.type(0), rows)


@op(infer=_gathered, check=_check_ids)
def embedding(token_ids: Array, table: Array, dtype: str | None = None) -> Array:
    """table[token_ids]: int32 [T] and [vocab, dim] → [T, dim] in the table's dtype, or rounded to `dtype`.

    Token −1 is none: its row is 0.
    """
    rows = _no_token(token_ids, table[np.maximum(token_ids, 0)])
    return rows if dtype is None else round_to(rows, numpy_dtype(dtype))


@op(infer=_gathered, check=_check_ids)
def quantized_embedding(token_ids: Array, table: QuantizedTensor, dtype: str | None = None) -> Array:
    """Rows of a quantized table: code · scale + bias, bit-exact on every backend.

    token_ids int32 [T], table [vocab, dim] → float32 [T, dim], or that rounded once to `dtype`. Token −1 is none: its
    row is 0.
    """
    rows = table.rows(np.maximum(token_ids.reshape(-1), 0))
    y = _no_token(token_ids, quant.dequantize(rows).reshape(*token_ids.shape, table.shape[1]))
    return y if dtype is None else round_to(y, numpy_dtype(dtype))


def _beside_ids(ids: Spec, positions: Spec) -> Spec:
    check.dtype("int32", ids=ids, positions=positions)
    check.shape(ids.shape, "as ids", positions=positions)
    return ids


@op(infer=_beside_ids, alias=True)
def ids_after_first(ids: Array, positions: Array) -> Array:
    """ids int32 [T] with −1 (no token) where the position, int32 [T], is 0: heads of DeepSeek see no token there."""
    return np.where(positions == 0, np.int32(-1), ids)
