"""Weights in GGUF blocks: every type against the gguf package, and what cannot be such a weight."""

import gguf
import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.quant import BLOCK_TYPES, GgufTensor, dequantize
from tests.weights.blocks import pack, some_blocks


def wanted(blocks: np.ndarray, type_name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type_name])


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_dequantize_equals_the_gguf_package_bit_for_bit(type_name, rng):
    known = BLOCK_TYPES[type_name]
    data = rng.integers(0, 256, (3, 40, 8 * known.nbytes), dtype=np.uint8)  # NaN and infinite scales, too
    w = GgufTensor(data, type_name)
    assert w.shape == (3, 40, 8 * known.size) and w.nbytes == data.nbytes and w.mode == w.type == type_name
    got, want = dequantize(w), wanted(data, type_name)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got.view(np.uint32)[~np.isnan(got)], want.view(np.uint32)[~np.isnan(got)])
    np.testing.assert_array_equal(w[1].dequantize(), got[1])
    np.testing.assert_array_equal(w[1].rows(np.array([7, 2])).dequantize(), got[1][[7, 2]])
    there = w.to("torch")
    assert torch.equal(there.dequantize().nan_to_num(), torch.from_numpy(got).nan_to_num())
    assert there.to("cpu").packed.ctypes.data == data.ctypes.data
    floats = np.concatenate([data.reshape(-1, known.nbytes)[:, at : at + 2] for at in known.halves or (0,)], axis=1)
    if known.halves:
        unsound = np.asarray(~np.isfinite(np.ascontiguousarray(floats).view("<f2").astype(np.float32)).all(axis=1))
        found = known.first_unsound(data.reshape(-1, known.nbytes))
        assert (found >= 0) == unsound.any() and (found < 0 or unsound[found])


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_what_is_packed_comes_back(type_name, rng):
    """The packer of the tests is one: an error of a few steps of the type's size."""
    values = rng.standard_normal((5, 512)).astype(np.float32)
    bits = BLOCK_TYPES[type_name].bits
    assert np.sqrt(np.mean((wanted(pack(values, type_name), type_name) - values) ** 2)) < 2 / 2**bits


def test_bad_blocks_are_refused_by_name():
    data = np.zeros((2, 144), np.uint8)
    for make, error, words in (
        (lambda: GgufTensor(data, "Q4_0"), InvalidArgument, "type is 'Q4_0', expected one of Q2_K"),
        (lambda: GgufTensor(data, None), InvalidArgument, "type is None"),  # type: ignore[arg-type]
        (lambda: GgufTensor(data[:, :143].copy(), "Q4_K"), ShapeError, "expected .*a multiple of 144 bytes"),
        (lambda: GgufTensor(data[:, ::2], "Q4_K"), ShapeError, "a multiple of 144 bytes"),
        (lambda: GgufTensor(np.zeros((4, 144), np.uint8)[::2], "Q4_K"), ShapeError, "is not contiguous"),
        (lambda: GgufTensor(data[0], "Q4_K"), ShapeError, "has shape"),
        (lambda: GgufTensor(data.view(np.int8), "Q4_K"), DTypeError, "has dtype int8, expected uint8"),
        (lambda: GgufTensor([1], "Q4_K"), DTypeError, "is a list, expected an array"),
        (lambda: GgufTensor(data, "Q4_K").dequantize("int8"), DTypeError, "dtype is 'int8'"),
        (lambda: GgufTensor(data, "Q4_K").to("gpu"), InvalidArgument, "device is 'gpu', expected cpu, torch, cuda"),
        (lambda: GgufTensor(data, "Q4_K")[0], InvalidArgument, "expected axes before N and K"),
    ):
        with pytest.raises(error, match=words):
            make()


def on_cpu(op, *args, variant=None):
    with penstock.backend("cpu", variant=variant):
        return op(*args)


def in_numpy(op, *args):
    with penstock.backend("reference"):
        return op(*args)


@pytest.mark.parametrize(
    ("type_name", "K"),
    [
        ("Q4_K", 512),
        ("Q5_1", 96),  # each type compiles for seconds: Q6_K is in the test of experts
        *(pytest.param(t, k, marks=pytest.mark.slow) for t in BLOCK_TYPES for k in (256, 768)),
        *(pytest.param(t, 352, marks=pytest.mark.slow) for t, b in BLOCK_TYPES.items() if b.size == 32),
    ],
)
def test_products_are_the_definition_s(type_name, K, rng):
    w = GgufTensor(some_blocks(rng, type_name, 37, K), type_name)
    for T in (1, 3, 9):
        x = rng.standard_normal((T, K)).astype(np.float32)
        for activations in ("float32", "int8"):
            want = in_numpy(ops.quantized_matmul, x, w, activations)
            got = on_cpu(ops.quantized_matmul, x, w, activations)
            assert np.abs(got - want).max() < 1e-6 * np.abs(want).max()
            single = on_cpu(ops.quantized_matmul, x[-1:], w, activations)
            np.testing.assert_array_equal(single[0], got[-1])  # tokens beside it change nothing
    ids = np.array([3, -1, 36], np.int32)
    np.testing.assert_array_equal(on_cpu(ops.quantized_embedding, ids, w), in_numpy(ops.quantized_embedding, ids, w))


@pytest.mark.slow
@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_int8_products_have_the_same_bits_in_every_variant(type_name, rng):
    from penstock.backends.cpu.linear import VARIANTS, _runs_here

    w = GgufTensor(some_blocks(rng, type_name, 19, 512), type_name)
    x = rng.standard_normal((5, 512)).astype(np.float32)
    want = on_cpu(ops.quantized_matmul, x, w, "int8", variant="portable")
    for variant in filter(_runs_here, VARIANTS):
        np.testing.assert_array_equal(on_cpu(ops.quantized_matmul, x, w, "int8", variant=variant), want)


def test_experts_are_the_definition_s(rng):
    gate, up = (GgufTensor(some_blocks(rng, "Q4_K", 5, 256, 256), "Q4_K") for _ in range(2))
    down = GgufTensor(some_blocks(rng, "Q6_K", 5, 256, 256), "Q6_K")
    for T in (1, 6):
        x = rng.standard_normal((T, 256)).astype(np.float32)
        ids = np.stack([rng.permutation(5)[:2] for _ in range(T)]).astype(np.int32)
        weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
        for activations in ("float32", "int8"):
            args = (x, ids, weights, gate, up, down, None, "silu", activations)
            want = in_numpy(ops.moe_forward, *args)
            # int8 rounds what the first products make, and a value near a half goes either way
            bound = 1e-5 if activations == "float32" else 1e-3
            assert np.abs(on_cpu(ops.moe_forward, *args) - want).max() < bound * np.abs(want).max()
