"""Embedding look-ups on CUDA: every format bit for bit, ids that are not there, large tables."""

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from tests.gpu.common import GPU, reference, run, to_device
from tests.ops.common import DTYPES, assert_same_bits, i32, normal, quantized


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_quantized_embedding_is_bit_exact(bits, dtype, rng):
    T, dim = (300, 2816) if GPU else (2, 256)
    table = quantized(rng, 40, dim, bits=bits, group_size=64, dtype="float16")
    ids = rng.integers(0, 40, T).astype(np.int32)
    call = {"token_ids": ids, "table": table, "dtype": dtype}
    assert_same_bits("rows", run(ops.quantized_embedding, **call), reference(ops.quantized_embedding, **call))


@pytest.mark.parametrize("dtype", [None, *DTYPES])
@pytest.mark.parametrize("kept", DTYPES)
def test_embedding_rounds_once(kept, dtype, rng):
    call = {"token_ids": i32([3, 0], [4, 4]), "table": normal(rng, 5, 37, dtype=kept), "dtype": dtype}
    assert_same_bits("rows", run(ops.embedding, **call), reference(ops.embedding, **call))


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "quantized"])
def test_embedding_of_ids_that_are_not_there_is_zero(dense, rng):
    table = normal(rng, 5, 64) if dense else quantized(rng, 5, 64)
    op = ops.embedding if dense else ops.quantized_embedding
    with penstock.backend("cuda"):
        got = op(to_device(i32(1, -1, 5, 2**31 - 1)), to_device(table)).cpu().numpy()
    assert_same_bits("row that is there", got[0], reference(op, token_ids=i32(1), table=table)[0])
    assert (got[1:] == 0).all()


@pytest.mark.cuda
def test_embedding_reads_beyond_four_gigabytes():
    table = torch.zeros(300_000, 8192, dtype=torch.bfloat16, device="cuda")
    table[-1] = torch.arange(8192, device="cuda")
    got = ops.embedding(torch.tensor([299_999, 0], dtype=torch.int32, device="cuda"), table)
    assert torch.equal(got[0], table[-1]) and not got[1].any()


@pytest.mark.cuda
def test_quantized_embedding_replays_in_a_graph_with_other_ids(rng):
    table = to_device(quantized(rng, 50, 256, bits=4, group_size=64))
    ids = to_device(i32(1, 2, 3))
    ops.quantized_embedding(ids, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.quantized_embedding(ids, table)
    ids.copy_(to_device(i32(49, -1, 0)))
    graph.replay()
    assert torch.equal(got, ops.quantized_embedding(ids, table))
