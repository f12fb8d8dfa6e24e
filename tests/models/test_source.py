"""Where weights come from: checked and uncopied from a checkpoint, or made up; and how they come to lie."""

import json
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import penstock
from penstock import models
from penstock.dtypes import numpy_dtype
from penstock.errors import CheckpointError, OutOfMemory
from penstock.models import qwen3_5
from penstock.models.layers import ExpertStack, adjacent, read_experts, read_mlp
from penstock.models.random import DeviceRandomSource, Random, Shapes
from penstock.models.random import Maker as MakerProtocol
from penstock.models.source import CheckpointSource, ShapeOnlySource
from penstock.ops.array import as_one, numpy_view
from penstock.quant import QuantizedTensor
from penstock.weights.checkpoint import Checkpoint
from tests.models.common import dense_config, moe_config, next_config, write_model


def stored(folder: Path, tensors: dict[str, np.ndarray], **quantization: Any) -> CheckpointSource:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "test"} | ({"quantization": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(config))
    return CheckpointSource(Checkpoint.open(folder), "model.", "", "mlx")


def parts(path: str, q: QuantizedTensor) -> dict[str, np.ndarray]:
    return {f"{path}.{name}": np.array(a) for name, a in zip(("weight", "scales", "biases"), q.arrays, strict=True)}


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


# -- CheckpointSource ------------------------------------------------------------------------------------------------


def test_stored_weight_is_a_view_of_the_file(tmp_path: Path, rng: np.random.Generator) -> None:
    dense, q = normal(rng, 5, 64), penstock.quantize(normal(rng, 3, 64), 4, 32)
    source = stored(tmp_path, {"model.a.weight": dense} | parts("model.b", q), bits=4, group_size=32)
    a, b = source.weight("a", 5, 64), source.weight("b", 3, 64)
    assert isinstance(a, np.ndarray) and isinstance(b, QuantizedTensor)
    np.testing.assert_array_equal(a, dense)
    np.testing.assert_array_equal(b.packed, q.packed)
    for array in (a, *b.arrays):
        assert not array.flags.writeable and not array.flags.owndata


def test_stored_head_has_a_prefix_of_its_own(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = {"lm_head.weight": normal(rng, 2, 3), "model.norm.weight": normal(rng, 3)}
    source = stored(tmp_path, tensors)
    assert "lm_head" in source and "norm" in source and "model.norm" not in source and "other" not in source
    assert source.weight("lm_head", 2, 3).shape == (2, 3)


def test_stored_names_the_tensor_and_both_shapes(tmp_path: Path, rng: np.random.Generator) -> None:
    source = stored(tmp_path, {"model.a.weight": normal(rng, 2, 3)})
    with pytest.raises(CheckpointError, match=r"model.a has shape \(2, 3\), expected \(3, 2\) by config.json$"):
        source.weight("a", 3, 2)
    with pytest.raises(CheckpointError, match=r"model.a has shape \(2, 3\), expected \(6,\) by config.json$"):
        source.vector("a", 6)
    with pytest.raises(CheckpointError, match=r"model.nothing"):
        source.weight("nothing", 3, 2)


def test_stored_refuses_integers_and_quantized_vectors(tmp_path: Path, rng: np.random.Generator) -> None:
    q = penstock.quantize(normal(rng, 2, 32), 8, 32)
    tensors = {"model.a.weight": np.zeros((2, 3), np.int32)} | parts("model.b", q)
    source = stored(tmp_path, tensors, bits=8, group_size=32)
    with pytest.raises(CheckpointError, match=r"model.a has dtype int32, expected one of float32"):
        source.weight("a", 2, 3)
    with pytest.raises(CheckpointError, match=r"model.a has dtype int32, expected one of float32"):
        source.vector("a", 2, 3)
    with pytest.raises(CheckpointError, match=r"model.b is quantized, expected a dense tensor"):
        source.vector("b", 2, 32)


def test_stored_vector_is_float32(tmp_path: Path, rng: np.random.Generator) -> None:
    values = normal(rng, 7).astype(np.float16)
    vector = stored(tmp_path, {"model.a.weight": values}).vector("a", 7)
    assert vector.dtype == np.float32 and (vector == values).all()


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_stored_rows_moves_whole_rows(bits: int, tmp_path: Path, rng: np.random.Generator) -> None:
    dense, order = normal(rng, 9, 64), rng.permutation(9)[:5]
    q = penstock.quantize(dense, bits, 32)
    source = stored(tmp_path, {"model.a.weight": dense} | parts("model.b", q), bits=bits, group_size=32)
    np.testing.assert_array_equal(source.rows("a", order, 9, 64), dense[order])
    moved = source.rows("b", order, 9, 64)
    assert isinstance(moved, QuantizedTensor)
    np.testing.assert_array_equal(penstock.dequantize(moved), penstock.dequantize(q)[order])


def test_stored_stack_of_dense_and_quantized(tmp_path: Path, rng: np.random.Generator) -> None:
    dense = [normal(rng, 4, 32) for _ in range(3)]
    made = [penstock.quantize(w, 4, 32) for w in dense]
    tensors = {f"model.d.{n}.weight": w for n, w in enumerate(dense)}
    for n, q in enumerate(made):
        tensors |= parts(f"model.q.{n}", q)
    source = stored(tmp_path, tensors, bits=4, group_size=32)
    np.testing.assert_array_equal(source.stack([f"d.{n}" for n in range(3)], 3, 4, 32), np.stack(dense))
    stack = source.stack([f"q.{n}" for n in range(3)], 3, 4, 32)
    assert isinstance(stack, QuantizedTensor) and stack.shape == (3, 4, 32)
    for n, q in enumerate(made):
        np.testing.assert_array_equal(penstock.dequantize(stack)[n], penstock.dequantize(q))


def test_stored_stack_refuses_experts_that_differ(tmp_path: Path, rng: np.random.Generator) -> None:
    four, eight = (penstock.quantize(normal(rng, 4, 32), bits, 32) for bits in (4, 8))
    tensors = parts("model.e.0", four) | parts("model.e.1", eight) | {"model.e.2.weight": normal(rng, 4, 32)}
    formats = {"model.e.1": {"bits": 8, "group_size": 32}}
    source = stored(tmp_path, tensors, bits=4, group_size=32, **formats)
    for others in (("e.0", "e.1"), ("e.0", "e.2"), ("e.2", "e.0")):
        with pytest.raises(CheckpointError, match=f"model.{others[0]} and the experts beside it differ in bits"):
            source.stack(others, 2, 4, 32)
        with pytest.raises(CheckpointError, match=f"model.{others[0]} and the experts beside it differ in bits"):
            source.expert_files(others, 2, 4, 32)


def test_stored_unused_are_those_that_nobody_asked_for(tmp_path: Path, rng: np.random.Generator) -> None:
    q = penstock.quantize(normal(rng, 2, 32), 4, 32)
    tensors = {"model.a.weight": normal(rng, 2), "b": normal(rng, 1)} | parts("model.q", q)
    source = stored(tmp_path, tensors, bits=4, group_size=32)
    source.weight("q", 2, 32)
    assert source.unused() == ["b", "model.a.weight"]


# -- experts in their spellings --------------------------------------------------------------------------------------


def test_read_experts_of_three_spellings_are_the_same(tmp_path: Path, rng: np.random.Generator) -> None:
    E, I, dim = 3, 5, 8  # noqa: E741
    gate, up, down = normal(rng, E, I, dim), normal(rng, E, I, dim), normal(rng, E, dim, I)
    spellings = {
        "mlx": {
            f"model.mlp.switch_mlp.{name}_proj.weight": w for name, w in (("gate", gate), ("up", up), ("down", down))
        },
        "joined": {
            "model.mlp.experts.gate_up_proj": np.concatenate([gate, up], axis=1),
            "model.mlp.experts.down_proj": down,
        },
        "single": {
            f"model.mlp.experts.{e}.{name}_proj.weight": w[e].copy()
            for e in range(E)
            for name, w in (("gate", gate), ("up", up), ("down", down))
        },
    }

    def read(name: str) -> ExpertStack:
        return read_experts(stored(tmp_path / name, spellings[name]), "mlp", "switch_mlp", E, dim, I)

    for name in ("mlx", "single"):
        stack = read(name)
        assert stack.up is not None
        for got, want in ((stack.gate, gate), (stack.up, up), (stack.down, down)):
            np.testing.assert_array_equal(got, want)
    stack = read("joined")
    assert stack.up is None
    np.testing.assert_array_equal(stack.gate, np.concatenate([gate, up], axis=1))
    np.testing.assert_array_equal(stack.down, down)
    source = stored(tmp_path / "few", spellings["single"])
    with pytest.raises(CheckpointError, match=r"experts\.999999999999\.gate_proj"):  # at once: no list of their names
        read_experts(source, "mlp", "switch_mlp", 10**12, dim, I)


# -- adjacent --------------------------------------------------------------------------------------------------------


def block_of(weights: Sequence[Any]) -> list[Any]:
    """Codes, scales and biases of the block that weights are rows of; None for what is no block."""
    return [as_one(arrays) for arrays in zip(*(w.arrays for w in weights), strict=True)]


@pytest.mark.parametrize("kind", ["cpu", "torch"])
def test_adjacent_weights_of_equal_format_are_rows_of_a_block(kind: str, rng: np.random.Generator) -> None:
    if kind == "torch":
        pytest.importorskip("torch")
    made = [penstock.quantize(normal(rng, rows, 64), 4, 32).to(kind) for rows in (5, 1, 8)]
    weights = adjacent(*made)
    for block, *parts in zip(block_of(weights), *(w.arrays for w in made), strict=True):
        assert block.shape == (14, *parts[0].shape[1:])
        np.testing.assert_array_equal(numpy_view(block), np.concatenate([numpy_view(part) for part in parts]))
    assert models.bytes_of(weights) == models.bytes_of(made), "each counts once"
    for others in (made, weights[::-1], (weights[0], weights[2]), (weights[0], made[1])):
        assert block_of(others) == [None] * 3


@pytest.mark.parametrize("other", ["bits", "group_size", "dtype", "dense"])
def test_adjacent_leaves_different_formats_apart(other: str, rng: np.random.Generator) -> None:
    values = normal(rng, 4, 64)
    first = penstock.quantize(values, 4, 32)
    second: Any = {
        "bits": lambda: penstock.quantize(values, 8, 32),
        "group_size": lambda: penstock.quantize(values, 4, 64),
        "dtype": lambda: penstock.quantize(values.astype(np.float16), 4, 32),
        "dense": lambda: values,
    }[other]()
    for weights in ((first, second), (second, first)):
        assert adjacent(*weights) == weights


# -- Random ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [moe_config(), dense_config(tie_word_embeddings=True), next_config()])
def test_random_makes_a_model_of_any_config(config: dict[str, Any]) -> None:
    checked = qwen3_5.read_config(config)
    weights = qwen3_5.read_weights(Random(config), checked)
    assert len(weights.layers) == checked.layer_types.__len__()
    assert isinstance(weights.head, QuantizedTensor) and weights.head.shape == (263, 64)
    assert (weights.head is weights.embed) == checked.tied
    assert models.bytes_of(weights) > 0


def test_random_follows_the_quantization_table() -> None:
    source = Random(moe_config() | {"quantization": {"bits": 3, "group_size": 32}})
    w, router = source.weight("layers.0.mlp.down_proj", 6, 64), source.weight("layers.0.mlp.gate", 6, 64)
    assert isinstance(w, QuantizedTensor) and isinstance(router, QuantizedTensor)
    assert (w.bits, w.group_size, router.bits) == (3, 32, 8)
    assert isinstance(source.weight("odd", 6, 40), np.ndarray)  # no group size divides 40


def test_random_is_the_same_for_a_seed() -> None:
    a, b, c = (Random(moe_config(), seed).weight("w", 6, 64) for seed in (1, 1, 2))
    assert isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and isinstance(c, QuantizedTensor)
    assert (a.packed == b.packed).all() and not (a.packed == c.packed).all()


class Maker:
    """A device that draws zeros and ones."""

    def to_device(self, value: Any) -> Any:
        return value

    def zeros(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.zeros(shape, numpy_dtype(dtype))

    def random_codes(self, shape: tuple[int, ...], seed: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 2, shape).astype(np.uint32)


@pytest.mark.parametrize("K", [64, 40])
def test_random_here_differs_from_random_in_its_numbers_only(K: int) -> None:
    sizes: list[int] = []
    made, drawn = Random(moe_config()), DeviceRandomSource(moe_config(), Maker(), progress=sizes.append)
    for path in ("w", "layers.0.mlp.gate"):
        a, b = made.weight(path, 6, K), drawn.weight(path, 6, K)
        assert type(a) is type(b) and a.shape == b.shape
        if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
            assert a.key == b.key and b.packed.max() == 1 and sizes[-1] == a.packed.nbytes
            np.testing.assert_array_equal(a.scales, b.scales)
            np.testing.assert_array_equal(a.biases, b.biases)


def test_random_codes_of_a_gpu_fill_every_bit_and_follow_the_seed() -> None:
    torch = pytest.importorskip("torch")
    from penstock.backends.cuda.runtime.device import CudaDevice

    device = CudaDevice()
    first, again, other = (device.random_codes((64, 33), seed) for seed in (1, 1, 2))
    assert isinstance(device, MakerProtocol) and first.dtype == torch.int32 and torch.equal(first, again)
    assert not torch.equal(first, other)
    share = np.unpackbits(first.cpu().numpy().view(np.uint8)).reshape(-1, 32).mean(axis=0)
    assert (abs(share - 0.5) < 0.1).all()


@pytest.mark.parametrize("config", [moe_config(), dense_config(tie_word_embeddings=True), next_config()])
def test_shapes_are_those_of_random(config: dict[str, Any]) -> None:
    checked = qwen3_5.read_config(config)
    made, shapes = (qwen3_5.read_weights(kind(config), checked) for kind in (Random, Shapes))
    assert models.bytes_of(made) == models.bytes_of(shapes)
    assert isinstance(made.head, QuantizedTensor) and isinstance(shapes.head, QuantizedTensor)
    assert made.head.key == shapes.head.key


def resident() -> int:
    """Bytes of memory that this process really has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux")
def test_shapes_take_no_memory_also_when_they_are_adjacent() -> None:
    shapes, before = Shapes(moe_config()), resident()
    codes, *_ = block_of(adjacent(*(shapes.weight("w", rows, 1 << 14) for rows in (1 << 13, 1 << 14))))
    assert codes.shape == (3 << 13, 1 << 11)  # 200 MB
    assert resident() - before < 32 << 20


def test_shapes_refuse_what_no_machine_has() -> None:
    with pytest.raises(OutOfMemory, match=r"^config.json: a weight of shape \(.*\) needs [\d.]+ GB"):
        Shapes(moe_config()).weight("w", 1 << 40, 1 << 20)


def test_outline_has_the_formats_of_its_source(tmp_path: Path, rng: np.random.Generator) -> None:
    q = [penstock.quantize(normal(rng, 6, 64), bits, 32) for bits in (4, 4, 3)]
    tensors = {"model.d.weight": normal(rng, 5, 8), "model.v.weight": normal(rng, 7)}
    for n, each in enumerate(q):
        tensors |= parts(f"model.q{n}", each)
    source = stored(tmp_path, tensors, bits=4, group_size=32, **{"model.q2": {"bits": 3, "group_size": 32}})
    outline = ShapeOnlySource(source)
    assert "q0" in outline and "x" not in outline and outline.layout == source.layout
    for path in ("q0", "q2"):
        a, b = source.weight(path, 6, 64), outline.weight(path, 6, 64)
        assert isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and a.key == b.key
    order = np.arange(4)
    for a, b in (
        (source.rows("q0", order, 6, 64), outline.rows("q0", order, 6, 64)),
        (source.stack(["q0", "q1"], 2, 6, 64), outline.stack(["q0", "q1"], 2, 6, 64)),
        (source.weight("d", 5, 8), outline.weight("d", 5, 8)),
        (source.rows("d", order, 5, 8), outline.rows("d", order, 5, 8)),
    ):
        assert type(b) is type(a) or isinstance(b, np.ndarray)
        assert a.shape == b.shape and a.nbytes == b.nbytes
    np.testing.assert_array_equal(outline.vector("v", 7), source.vector("v", 7))
    with pytest.raises(CheckpointError, match="model.q0 has shape"):
        outline.weight("q0", 5, 64)


def test_load_random_answers(rng: np.random.Generator) -> None:
    from penstock.api import load_random

    llm = load_random(moe_config(), device="reference")
    logits = llm.logits(rng.integers(0, 263, 9).tolist())
    assert logits.shape == (9, 263) and np.isfinite(logits).all() and logits.std() > 0.1
    with pytest.raises(penstock.errors.InvalidArgument, match="^tokenizer: "):
        llm.generate("text")


def test_bytes_of_counts_a_tied_head_once() -> None:
    sizes = []
    for tied in (True, False):
        config = dense_config(tie_word_embeddings=tied)
        sizes.append(models.bytes_of(qwen3_5.read_weights(Random(config), qwen3_5.read_config(config))))
    table = Random(dense_config()).weight("embed_tokens", 263, 64)
    assert isinstance(table, QuantizedTensor) and sizes[1] - sizes[0] == table.nbytes


# -- how a checkpoint is read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config, prefix", [
    (moe_config(), "model.language_model."), (dense_config(), "model.language_model."), (next_config(), "model."),
])  # fmt: skip
def test_names_of_released_files(config: dict[str, Any], prefix: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path, config))
    assert qwen3_5.names(checkpoint, qwen3_5.read_config(config)) == (prefix, "", "hf")


def test_read_mlp_puts_gate_above_up(tmp_path: Path, rng: np.random.Generator) -> None:
    made = {name: penstock.quantize(normal(rng, *shape), 4, 32) for name, shape in
            (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96)))}  # fmt: skip
    tensors: dict[str, np.ndarray] = {}
    for name, q in made.items():
        tensors |= parts(f"model.m.{name}_proj", q)
    block = read_mlp(stored(tmp_path, tensors, bits=4, group_size=32), "m", 64, 96)
    assert block_of((block.gate, block.up))[0].shape == (192, 8)
