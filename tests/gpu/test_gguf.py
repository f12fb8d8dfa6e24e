"""CUDA kernels with weights in GGUF blocks, which they read as planes, against definitions."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.errors import BackendError, DTypeError, ShapeError
from penstock.quant import BLOCK_TYPES, GgufPlanes, GgufTensor, in_planes
from tests.gpu.common import DEVICE, GPU, reference, run, to_device, to_host
from tests.models.common import error, some_tokens
from tests.models.made import decoded
from tests.models.test_gguf import MODELS, write
from tests.ops.common import EPS, assert_close, i32, normal
from tests.weights.blocks import some_blocks

PLACE = "cuda" if GPU else "torch"


def some(rng: np.random.Generator, kind: str, *shape: int) -> GgufTensor:
    return GgufTensor(some_blocks(rng, kind, *shape), kind)


def calls(rng: np.random.Generator, kind: str, dtype: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Ops with arguments: an odd number of blocks in a row, rows that fill no tile, few and many, absent experts."""
    wide = BLOCK_TYPES[kind].size == 256
    K = 768 if wide else 160
    yield ops.dequantize, {"w": some(rng, kind, 3, 5, K)}
    yield ops.quantized_embedding, {"token_ids": i32(4, -1, 0, 6), "table": some(rng, kind, 7, K), "dtype": dtype}
    for T, N in ((1, 21), (3, 18), (17, 37)):
        x, w = normal(rng, T, K, dtype=dtype), some(rng, kind, N, K)
        yield ops.quantized_matmul, {"x": x, "w": w, "dtype": "float32" if T == 3 else None}
    x, norm = normal(rng, 1, K, dtype=dtype), normal(rng, K, dtype=dtype)
    yield ops.norm_matmul, {"x": x, "norm_weight": norm, "w": some(rng, kind, 9, K)}
    gate, up = some(rng, kind, 11, K), some(rng, kind, 11, K)
    yield ops.fused_gate_up_swiglu, {"x": normal(rng, 2, K, dtype=dtype), "gate_w": gate, "up_w": up}
    E, K, N = (4, 256, 256) if wide else (5, 96, 64)
    stacks = {"gate_w": some(rng, kind, E, N, K), "up_w": some(rng, kind, E, N, K), "down_w": some(rng, kind, E, K, N)}
    slot_of = i32(3, -2, 0, 2, 1)
    for T in (1, 9):
        ids = np.stack([rng.permutation(len(slot_of))[:2] for _ in range(T)]).astype(np.int32)
        ids[-1, 0] = -1 if T > 1 else ids[-1, 0]
        x, weights = normal(rng, T, K, dtype=dtype), rng.random((T, 2), np.float32)
        yield ops.moe_forward, {"x": x, "ids": ids, "weights": weights, **stacks, "slot_of": slot_of}


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_kernels_equal_definitions(kind, rng):
    dtype = "bfloat16"
    for op, arguments in calls(rng, kind, dtype):
        want = reference(op, **arguments).astype(np.float32)
        got = run(op, **arguments).astype(np.float32)
        size = max(np.abs(want).max(initial=0), 1e-3)
        if op.name in ("dequantize", "quantized_embedding"):
            np.testing.assert_array_equal(got, want)
        else:
            assert_close(f"{op.name} y", got, want, 4e-6 + 4 * EPS[dtype], size)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_planes_are_the_blocks_bit_for_bit(kind, rng):
    """Any bytes, infinite and NaN scales among them: the same weights, and the same blocks on the way back."""
    known = BLOCK_TYPES[kind]
    blocks = rng.integers(0, 256, (3, 7, 3 * known.nbytes), dtype=np.uint8)
    if kind == "MXFP4":
        blocks.reshape(-1, 17)[:2, 0] = 0, 255
    w = GgufTensor(blocks, kind)
    planes = in_planes(w, PLACE)
    assert planes.shape == w.shape and planes.nbytes <= 1.02 * w.nbytes and planes.key == w.key
    assert len({array.device for array in planes.arrays}) == 1
    np.testing.assert_array_equal(planes.to("cpu").packed, blocks)
    np.testing.assert_array_equal(planes[1].rows(slice(2, 5)).to("cpu").packed, blocks[1, 2:5])
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    with penstock.backend("cuda"), np.errstate(all="ignore"):
        got = to_host(ops.dequantize(planes))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[~np.isnan(got)], want[~np.isnan(got)])
    np.testing.assert_array_equal(to_host(planes.dequantize()).view(np.uint32), w.dequantize().view(np.uint32))


@pytest.mark.parametrize("kind", ["Q6_K", "Q3_K", "IQ4_NL"])
def test_other_activations_and_ways(kind, rng):
    """float32 in three parts, rounded activations, rows whose bits do not depend on others, absent experts."""
    K = 256 if BLOCK_TYPES[kind].size == 256 else 96
    w, x = some(rng, kind, 5, K), normal(rng, 4, K, dtype="float32")
    for activations in ("float32", "int8"):
        want = reference(ops.quantized_matmul, x=x, w=w, activations=activations)
        got = run(ops.quantized_matmul, x=x, w=w, activations=activations)
        assert_close("y", got, want, 4e-6, np.abs(want).max())
    there, planes = to_device(x).to(torch.bfloat16), to_device(w)
    with penstock.backend("cuda", deterministic=True):
        out = torch.full((4, 5), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        together = ops.quantized_matmul(there, planes, out=out)
        assert torch.equal(together[1:2], ops.quantized_matmul(there[1:2].clone(), planes))
    stack, ids = some(rng, kind, 2, 6, K), i32(0, 1, 2, -1)
    want = reference(ops.expert_matmul, x=x[0], experts=stack, ids=i32(0, 1))
    slots = to_device(i32(1, -1, 0))  # the second expert has not come
    with penstock.backend("cuda"):
        got = to_host(ops.expert_matmul(to_device(x[0]), to_device(stack), to_device(ids), slots))
    assert_close("y", got[[2, 0]], want, 4e-6, np.abs(want).max())
    assert not got[[1, 3]].any()


def test_planes_that_do_not_fit_are_refused(rng):
    planes = in_planes(some(rng, "Q6_K", 3, 256), "torch")
    low, high, sub, top = planes.arrays
    for arrays, kind, words in (
        ((low, high, sub), ShapeError, "3 arrays, expected 4 of Q6_K"),
        ((low, high[:2], sub, top), ShapeError, r"high has shape \(2, 16\), expected \(3, 16\)"),
        ((low, high, sub.view(torch.int8), top), DTypeError, "sub has dtype torch.int8, expected uint8"),
        ((low, high, sub, top.numpy()), DTypeError, "top is a ndarray"),
        ((low, high.t().contiguous().t(), sub, top), ShapeError, "high is not contiguous"),
    ):
        with pytest.raises(kind, match=words):
            GgufPlanes(arrays, "Q6_K")
    blocks = planes.to("torch")
    with penstock.backend("cuda"), pytest.raises(BackendError, match="expected its planes on cuda"):
        ops.dequantize(blocks)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("wide_moe", "Q6_K"), ("qwen3_moe", "Q8_0"), pytest.param("llama", "Q5_1", marks=pytest.mark.slow)],
)
def test_a_file_on_the_gpu_is_the_model_of_the_host(name, kind, tmp_path, monkeypatch):
    """Resident and, of experts, streamed through slots for some of them, from pinned memory and from disk."""
    monkeypatch.setattr("penstock.api.gguf_tokenizer", lambda _: SimpleNamespace(vocab_size=1))
    monkeypatch.setitem(MODELS, f"short {name}", MODELS[name] | {"num_hidden_layers": 1})
    path, tokens = write(tmp_path / "x.gguf", f"short {name}", kind), some_tokens(5)
    options = {"activations": "float32", "max_context": 128}
    want = penstock.load(path, device="cpu", **options).logits(tokens)
    budgets = [{}, {"expert_cache": "60%", "expert_host": "30%"}] if "moe" in name else [{}]
    for budget in budgets:
        llm = penstock.load(path, device="cuda", dtype="float32", **options, **budget)
        if not GPU:
            llm.engine.allocate(sequences=1)
        assert error(decoded(llm, tokens, 4), want[3:]) <= 2e-5
