"""Models in GGUF files against transformers on the dequantized weights, and against the same model in safetensors."""

import copy
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

import penstock
from penstock.cli.main import run
from penstock.engine.engine import Engine, Model
from penstock.engine.options import WORKING_BYTES
from penstock.errors import CheckpointError, InvalidArgument, OutOfMemory
from penstock.models.gguf import GgufModel, open_gguf
from penstock.ops.device import device_for
from penstock.quant import BLOCK_TYPES, GgufTensor, QuantizedTensor
from penstock.weights.gguf import GgufFile
from penstock.weights.mapped import is_mapped
from tests.models.common import GGUF_ARCHITECTURES, GGUF_NAMES, VOCAB, error, some_tokens, write_tokenizer
from tests.parallel.streamed import on_ranks
from tests.weights.blocks import pack

transformers.logging.set_verbosity_error()

SHORT = 5e-6  # what penstock promises is 1e-5

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}

# Each axis another size; heads are wider than hidden_size / heads.
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
LLAMA = {"model_type": "llama", "attention_bias": False, "mlp_bias": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama": BASE | LLAMA,
    "tied": BASE | LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 6, "num_hidden_layers": 2},
    "llama3": BASE | LLAMA | {"rope_parameters": LLAMA3, "num_key_value_heads": 3},
    "linear": BASE | LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "yarn": BASE | LLAMA | {"rope_parameters": YARN, "num_hidden_layers": 2},
    "biases": BASE | LLAMA | {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
    "mistral": BASE | {"model_type": "mistral", "sliding_window": 37, "num_hidden_layers": 2},
    "qwen2": BASE | {"model_type": "qwen2", "head_dim": None, "num_attention_heads": 4, "num_hidden_layers": 2},
    "qwen3": BASE | {"model_type": "qwen3", "attention_bias": False, "tie_word_embeddings": True},
    "qwen3_moe": BASE
    | {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_hidden_layers": 2,
    },
}
# Rows of whole blocks of 256, and heads of them.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2, "head_dim": 64}
MODELS["wide"] = BASE | LLAMA | WIDE
MODELS["wide_moe"] = MODELS["qwen3_moe"] | WIDE | {"moe_intermediate_size": 256}
AFFINE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")  # types that a folder of safetensors can have, too


# -- files, written as llama.cpp's converter writes them -------------------------------------------------------------


@functools.cache
def reference(name: str) -> Any:
    """A transformers model with random weights, residual branches small."""
    config = {key: value for key, value in MODELS[name].items() if value is not None}
    torch.manual_seed(len(name))
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    made = transformers.AutoConfig.for_model(**config, **eager, initializer_range=0.1)
    model = transformers.AutoModelForCausalLM.from_config(made).float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.copy_(1 + 0.2 * torch.randn_like(weight))
            elif key.endswith("bias"):
                weight.copy_(0.3 * torch.randn_like(weight))
    rotary = model.model.rotary_emb
    if rotary.rope_type == "default":  # rounded once: transformers forms powers in float32, and is 1e-5 off in logits
        width = 2 * rotary.inv_freq.numel()
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        rotary.inv_freq.copy_(made.rope_parameters["rope_theta"] ** -exponents)
    return model


def weights_of(name: str) -> dict[str, np.ndarray]:
    model = reference(name)
    found = {key: value.detach().numpy() for key, value in model.state_dict().items()}
    if MODELS[name]["tie_word_embeddings"]:
        found.pop("lm_head.weight", None)
    return found


def stored(array: np.ndarray, type_name: str) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """As converters do: vectors stay float32."""
    type_number = gguf.GGMLQuantizationType["F32" if array.ndim == 1 else type_name]
    if type_number.name in BLOCK_TYPES:
        return pack(array, type_number.name), type_number
    return gguf.quants.quantize(np.ascontiguousarray(array), type_number), type_number


def rounded(array: np.ndarray, type_name: str) -> np.ndarray:
    return gguf.quants.dequantize(*stored(array, type_name)).reshape(array.shape)


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order of llama.cpp's converter: the halves of a head interleaved."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for key, array in weights.items():
        stem, suffix = key.rpartition(".")[::2]
        if suffix not in ("weight", "bias"):  # experts: gate_up_proj and down_proj, stacked
            layer = stem.split(".")[2]
            if suffix == "down_proj":
                found[f"blk.{layer}.ffn_down_exps.weight"] = array
            else:
                gate, up = np.split(array, 2, axis=1)
                found[f"blk.{layer}.ffn_gate_exps.weight"], found[f"blk.{layer}.ffn_up_exps.weight"] = gate, up
            continue
        if stem in GGUF_NAMES:
            found[f"{GGUF_NAMES[stem]}.{suffix}"] = array
            continue
        _, _, layer, part = stem.split(".", 3)
        if GGUF_ARCHITECTURES[config["model_type"]] == "llama":
            if part.endswith("q_proj"):
                array = permuted(array, config["num_attention_heads"])
            elif part.endswith("k_proj"):
                array = permuted(array, config["num_key_value_heads"])
        found[f"blk.{layer}.{GGUF_NAMES[part]}.{suffix}"] = array
    return found


def rope_factors(table: Mapping[str, Any], head_dim: int) -> np.ndarray:
    factors = []
    for n in range(0, head_dim, 2):
        wave = 2 * np.pi * table["rope_theta"] ** (n / head_dim)
        turns = table["original_max_position_embeddings"] / wave
        low, high = table["low_freq_factor"], table["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / table["factor"] + smooth))
    return np.array(factors, np.float32)


def write(path: Path, name: str, type_name: str = "F32", tensors: Any = None, **changes: Any) -> Path:
    """A model of MODELS as a GGUF file; `changes` replace metadata, None removes a key."""
    config = MODELS[name]
    arch, table = GGUF_ARCHITECTURES[config["model_type"]], config["rope_parameters"]
    tensors = gguf_tensors(config, weights_of(name)) if tensors is None else dict(tensors)
    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    if table["rope_type"] == "llama3":
        tensors.setdefault("rope_freqs.weight", rope_factors(table, head_dim))
    values: dict[str, Any] = {
        "general.type": "model",
        "general.file_type": 0,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": table["rope_theta"],
        f"{arch}.vocab_size": config["vocab_size"],
    }
    if config["head_dim"]:
        values |= {f"{arch}.attention.key_length": head_dim, f"{arch}.attention.value_length": head_dim}
        values |= {f"{arch}.rope.dimension_count": head_dim}
    if table["rope_type"] in ("linear", "yarn"):
        values |= {f"{arch}.rope.scaling.type": table["rope_type"], f"{arch}.rope.scaling.factor": table["factor"]}
    if table["rope_type"] == "yarn":
        values[f"{arch}.rope.scaling.original_context_length"] = table["original_max_position_embeddings"]
    if "sliding_window" in config:
        values[f"{arch}.attention.sliding_window"] = config["sliding_window"]
    if "num_experts" in config:
        values |= {f"{arch}.expert_count": config["num_experts"], f"{arch}.expert_used_count": 3}
        values[f"{arch}.expert_feed_forward_length"] = config["moe_intermediate_size"]
    changed = values | {"general.architecture": arch}
    for key, value in changes.items():
        key = key.replace("__", ".")
        changed[key if key.startswith(("general.", "split.", "tokenizer.")) else f"{arch}.{key}"] = value
    return write_file(path, changed, {key: stored(array, type_name) for key, array in tensors.items()})


def write_file(path: Path, values: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, Any]]) -> Path:
    writer = gguf.GGUFWriter(path, "none")
    del writer.kv_data[0]["general.architecture"]
    add = {str: writer.add_string, list: writer.add_array, bool: writer.add_bool, float: writer.add_float32}
    for key, value in values.items():
        if value is not None:
            add.get(type(value), writer.add_int32)(key, value)
    for key, (data, type_number) in tensors.items():
        writer.add_tensor(key, data, raw_dtype=type_number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model: GgufModel, tokens: list[int], device: str = "cpu", activations: str = "float32") -> np.ndarray:
    config = model.read_config()
    weights = model.family.read_weights(model.source, config)
    loaded = Model(model.family, config, weights, model.fingerprint, model.nbytes)
    engine = Engine(loaded, device=device_for(device), activations=activations, max_context=config.max_positions)
    return engine.prefill(engine.open(), tokens, every=True)


def wanted(name: str, type_name: str, tokens: list[int]) -> np.ndarray:
    """Logits of transformers in float64 with each weight as the GGUF file has it."""
    made = reference(name)
    model = copy.deepcopy(made).double()
    model.load_state_dict({k: torch.tensor(rounded(v.numpy(), type_name)) for k, v in made.state_dict().items()})
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


# -- correctness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "type_name"),
    [
        *(("llama", t) for t in AFFINE),
        *((name, "Q4_0") for name in MODELS if name not in ("llama", "wide", "wide_moe")),
        ("llama3", "BF16"),
        ("wide", "Q4_K"),
        ("wide_moe", "Q6_K"),
        ("llama", "Q5_1"),  # rows of 96 and 160: no whole step of the kernels
        *(pytest.param("wide", t, marks=pytest.mark.slow) for t in BLOCK_TYPES if t != "Q4_K"),
    ],
)
def test_logits_equal_those_of_transformers(tmp_path, name, type_name):
    model = open_gguf(write(tmp_path / "x.gguf", name, type_name))
    tokens = some_tokens(200)
    assert error(logits(model, tokens), wanted(name, type_name, tokens)) < SHORT
    assert not model.source.unused()


def test_logits_of_the_reference_backend_and_with_int8_activations(tmp_path):
    path, tokens = write(tmp_path / "x.gguf", "llama3", "Q8_0"), some_tokens(70)
    exact = logits(open_gguf(path), tokens)
    assert error(logits(open_gguf(path), tokens, "reference"), exact) < SHORT
    assert error(logits(open_gguf(path), tokens, activations="int8"), exact) < 0.2  # random models amplify rounding


def test_blocks_are_read_where_they_lie_and_rounded_activations_are_near(tmp_path):
    path, tokens = write(tmp_path / "x.gguf", "wide_moe", "Q4_K"), some_tokens(40)
    model = open_gguf(path)
    weights = model.family.read_weights(model.source, model.read_config())
    stack = weights.layers[0].mlp.routed.gate
    assert isinstance(stack, GgufTensor) and stack.shape == (7, 256, 256) and is_mapped(stack.packed)
    assert model.copied_nbytes == 0 and model.nbytes == model.file.nbytes
    exact = logits(model, tokens)
    assert error(logits(open_gguf(path), tokens, "reference"), exact) < SHORT
    assert error(logits(open_gguf(path), tokens, activations="int8"), exact) < 0.2  # random models amplify rounding
    one = [logits(open_gguf(path), tokens[:1], activations="int8"), logits(open_gguf(path), tokens[:1])]
    assert error(*one) < 0.2


def test_parts_of_a_model_are_one_and_experts_are_streamed_from_them(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.api.gguf_tokenizer", lambda _: SimpleNamespace(vocab_size=1))
    whole, tokens = write(tmp_path / "x.gguf", "wide_moe", "Q4_K"), some_tokens(20)
    metadata = GgufFile.open(whole).metadata
    made = {
        key: stored(array, "Q4_K") for key, array in gguf_tensors(MODELS["wide_moe"], weights_of("wide_moe")).items()
    }
    paths = [tmp_path / f"m-{n:05}-of-00002.gguf" for n in (1, 2)]
    for n, path in enumerate(paths):
        part = {key: made[key] for i, key in enumerate(sorted(made)) if i % 2 == n}
        counts = {"split.no": n, "split.count": 2, "split.tensors.count": len(made)}
        write_file(path, (metadata if n == 0 else {}) | counts, part)
    want = penstock.load(whole, device="cpu", activations="float32").logits(tokens)
    np.testing.assert_array_equal(penstock.load(paths[0], device="cpu", activations="float32").logits(tokens), want)
    for path in (whole, paths[0]):
        llm = penstock.load(path, device="cpu", activations="float32", expert_cache="60%")
        np.testing.assert_allclose(llm.logits(tokens), want, atol=1e-4)
    with pytest.raises(
        CheckpointError, match=r"m-00002-of-00002.gguf: is one of 2 parts of a model, expected the first"
    ):
        open_gguf(paths[1])
    assert open_gguf(whole).columns == 256
    paths[1].rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002.gguf"):
        open_gguf(paths[0])
    write_file(paths[1], {"split.no": 1, "split.count": 2}, {"output_norm.weight": made["output_norm.weight"]})
    with pytest.raises(CheckpointError, match=r"is in an earlier part, too|parts have \d+ tensors, expected \d+"):
        open_gguf(paths[0])


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0"])
def test_experts_in_groups_are_streamed_with_the_bits_of_resident_ones(tmp_path, monkeypatch, type_name):
    """Codes, scales and biases come out of the blocks when an expert is read, or packed."""
    monkeypatch.setattr("penstock.api.gguf_tokenizer", lambda _: SimpleNamespace(vocab_size=1))
    path, tokens = write(tmp_path / "x.gguf", "qwen3_moe", type_name), some_tokens(20)
    want = penstock.load(path, device="cpu").logits(tokens)
    for io in ("pagecache", "mmap"):
        llm = penstock.load(path, device="cpu", expert_cache="60%", expert_io=io)
        np.testing.assert_array_equal(llm.logits(tokens), want)
        assert llm.stats().expert_reads > 0
    assert run(["pack", str(path)]) == 0 and run(["pack", str(path), "--check"]) == 0
    packed = penstock.load(path, device="cpu", expert_cache="60%")
    assert packed.engine.experts.store.layers[0].hashes is not None  # of the packed file
    np.testing.assert_array_equal(packed.logits(tokens), want)


@pytest.mark.parametrize(
    ("half", "said"),
    [
        (0x7E00, "scale nan in block 2, expected a finite number"),
        (0xE3FF, "a scale of 1023.5, expected at most 511.75"),
    ],
)
def test_a_streamed_expert_with_a_damaged_scale_ends_the_step(tmp_path, monkeypatch, half, said):
    monkeypatch.setattr("penstock.api.gguf_tokenizer", lambda _: SimpleNamespace(vocab_size=1))
    tensors = gguf_tensors(MODELS["qwen3_moe"], weights_of("qwen3_moe"))
    made = {key: stored(array, "Q8_0") for key, array in tensors.items()}
    made["blk.1.ffn_up_exps.weight"][0][:, 0, 68:70] = half & 255, half >> 8  # the third block of each expert
    metadata = GgufFile.open(write(tmp_path / "x.gguf", "qwen3_moe")).metadata
    llm = penstock.load(write_file(tmp_path / "y.gguf", metadata, made), device="cpu", expert_cache="60%")
    with pytest.raises(CheckpointError, match=rf"y.gguf: expert \d of 'blk.1.ffn_\w+.*', at byte \d+, has {said}"):
        llm.logits(some_tokens(20))


@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0"])
def test_a_file_that_does_not_fit_has_its_experts_streamed(tmp_path, monkeypatch, type_name):
    monkeypatch.setattr("penstock.api.gguf_tokenizer", lambda _: SimpleNamespace(vocab_size=1))
    path, tokens = write(tmp_path / "x.gguf", "wide_moe", type_name), some_tokens(20)
    whole = penstock.load(path, device="cpu")
    want, experts = whole.logits(tokens), sum(i.nbytes for n, i in GgufFile.open(path).tensors.items() if "_exps" in n)
    room = WORKING_BYTES + open_gguf(path).nbytes
    monkeypatch.setattr("penstock.backends.cpu.device.CpuDevice.free_memory", lambda *_: room)
    llm = penstock.load(path, device="cpu")
    assert 0 < llm.stats().expert_bytes < experts
    np.testing.assert_allclose(llm.logits(tokens), want, atol=1e-4)
    dense = write(tmp_path / "dense.gguf", "wide", type_name)
    monkeypatch.setattr("penstock.backends.cpu.device.CpuDevice.free_memory", lambda *_: 1 << 20)
    with pytest.raises(OutOfMemory, match=r"dense.gguf: needs .* of memory beside its files, 1\.05 MB are free"):
        penstock.load(dense, device="cpu")


def test_ranks_stream_their_own_experts_from_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.api.gguf_tokenizer", lambda _: SimpleNamespace(vocab_size=1))
    path, tokens = write(tmp_path / "x.gguf", "wide_moe", "IQ4_NL"), some_tokens(20)
    options = {"device": "cpu", "activations": "float32"}
    want = penstock.load(path, **options).logits(tokens)
    got, engines, _ = on_ranks(path, [{"expert_cache": "60%", **options}] * 2, lambda llm: llm.logits(tokens))
    assert error(got, want) < SHORT
    counted = [engine.experts.store.counters for engine in engines]
    owned = [len(engine.model.mesh.owned(7)) * len(engine.experts.slot_of) for engine in engines]
    assert [one.reads > 0 for one in counted] == [True, True] and owned == [8, 6]


def test_a_scale_that_is_not_finite_is_refused(tmp_path):
    tensors = gguf_tensors(MODELS["wide"], weights_of("wide"))
    made = {key: stored(array, "Q4_K") for key, array in tensors.items()}
    made["blk.1.ffn_down.weight"][0][7, 145] = 0x7E  # the upper byte of a half in the second block of a row
    metadata = GgufFile.open(write(tmp_path / "x.gguf", "wide")).metadata
    path = write_file(tmp_path / "y.gguf", metadata, made)
    with pytest.raises(CheckpointError, match=r"y.gguf: tensor 'blk.1.ffn_down.weight' has a scale that is not finite"):
        logits(open_gguf(path), [1])
    made["blk.1.ffn_down.weight"] = stored(tensors["blk.1.ffn_down.weight"], "MXFP4")
    made["blk.1.ffn_down.weight"][0][0, 2 * 17] = 0xFF
    path = write_file(tmp_path / "z.gguf", metadata, made)
    with pytest.raises(CheckpointError, match=r"blk.1.ffn_down.weight has a scale that is not finite in block 2,"):
        logits(open_gguf(path), [1])


def folder_of(folder: Path, name: str, type_name: str) -> Path:
    """The same model as a folder of safetensors, its weights as GGUF has them: dense, or quantized in MLX's layout."""
    config = {key: value for key, value in MODELS[name].items() if value is not None}
    weights: dict[str, np.ndarray] = {}
    one = folder / "one.gguf"
    for key, array in weights_of(name).items():
        write_file(one, {}, {"w": stored(array, type_name)})
        tensor = GgufFile.open(one).tensor("w")
        if isinstance(tensor, QuantizedTensor):
            parts = dict(zip(("weight", "scales", "biases"), tensor.arrays, strict=True))
            weights |= {f"{key.removesuffix('.weight')}.{part}": values for part, values in parts.items()}
            config["quantization"] = {"bits": tensor.bits, "group_size": tensor.group_size}
        else:
            weights[key] = np.array(tensor)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "mlx"})
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("type_name", AFFINE)
def test_logits_are_those_of_the_same_model_in_safetensors(tmp_path, type_name):
    other = penstock.load(folder_of(tmp_path, "llama", type_name), device="cpu", activations="float32")
    tokens = some_tokens(40)
    got = logits(open_gguf(write(tmp_path / "x.gguf", "llama", type_name)), tokens)
    np.testing.assert_array_equal(got, other.logits(tokens))


@pytest.mark.parametrize("wrong", ["rows of q and k as stored", "no frequency factors"])
def test_logits_would_show_a_wrong_reading(tmp_path, monkeypatch, wrong):
    path, tokens = write(tmp_path / "x.gguf", "llama3", "F32"), some_tokens(100)
    model = open_gguf(path)
    want = wanted("llama3", "F32", tokens)
    if wrong == "no frequency factors":
        monkeypatch.setattr(GgufModel, "read_config", lambda self: self.family.read_config(self.config))
    else:
        model.source.architecture = replace(model.source.architecture, rows=None)
    assert error(logits(model, tokens), want) > 1e-3


def test_partial_rotation_turns_the_first_channels_only(tmp_path):
    # No converter writes this, so the meaning is GGUF's own: neighbours of the first channels turn, others stay.
    tensors = {k: v for k, v in gguf_tensors(MODELS["llama"], weights_of("llama")).items() if k != "rope_freqs.weight"}
    model = open_gguf(write(tmp_path / "x.gguf", "llama", tensors=tensors, rope__dimension_count=12))
    rope = model.read_config().rope
    assert rope.width == 12 and len(rope.inv_freq) == 6
    path = "layers.1.self_attn.k_proj"
    got, raw = model.source.weight(path, 64, 96), model.file.tensor("blk.1.attn_k.weight")
    order = [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11, *range(12, 32)]
    np.testing.assert_array_equal(got, np.concatenate([raw[order], raw[32:][order]]))


# -- what a file says ------------------------------------------------------------------------------------------------


def test_a_vocabulary_larger_than_the_table_of_embeddings_is_read(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", *alphabet, *(f"[PAD{n}]" for n in range(257, VOCAB)), "<|image|>"]
    kinds = [3, *[1] * 256, *[5] * (VOCAB - 257), 3]
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": kinds, "merges": ["a b"]}
    tokens[257], kinds[257] = "ab", 1
    changes = {f"tokenizer__ggml__{key}": value for key, value in (keys | {"eos_token_id": 0}).items()}
    llm = penstock.load(write(tmp_path / "x.gguf", "llama", **changes), device="reference")
    assert f"ids up to {VOCAB}, the model embeddings for 0 to {VOCAB - 1}" in llm.notices[0]
    assert len(llm.generate("cab", max_tokens=2).tokens) <= 2
    with pytest.raises(InvalidArgument, match=rf"^tokens: has {VOCAB} \('<\|image\|>'\), expected ids from 0 to"):
        llm.generate("cab<|image|>")


def test_generate_and_inspect_take_a_file_of_k_types(tmp_path, capsys):
    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", *(f"[PAD{n}]" for n in range(258, VOCAB))]
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": ["a b"], "eos_token_id": 0}
    keys["token_type"] = [3, *[1] * 257, *[5] * (VOCAB - 258)]
    changes = {f"tokenizer__ggml__{key}": value for key, value in keys.items()}
    path = write(tmp_path / "x.gguf", "wide", "Q4_K", **changes)
    assert run(["generate", "--model", str(path), "--prompt", "cab", "--max-tokens", "3", "--device", "cpu"]) == 0
    capsys.readouterr()
    assert run(["inspect", str(path)]) == 0
    assert "Q4_K" in capsys.readouterr().out
    assert run(["verify", str(path)]) == 0
    data = bytearray(path.read_bytes())
    info = GgufFile.open(path).tensors["output.weight"]
    data[info.start + 144 + 2 : info.start + 144 + 4] = b"\x00\x7c"  # an infinite minimum
    path.write_bytes(data)
    capsys.readouterr()
    assert run(["verify", str(path)]) == 1
    assert "tensor 'output.weight' has 1 number not finite (the first is number 1)" in capsys.readouterr().out


def test_config_has_what_config_json_would_say(tmp_path):
    config = open_gguf(write(tmp_path / "x.gguf", "yarn", "Q8_0")).config
    same = ("vocab_size", "hidden_size", "head_dim", "intermediate_size", "rms_norm_eps", "num_key_value_heads")
    assert {key: config[key] for key in same} == {key: MODELS["yarn"][key] for key in same}
    assert config["rope_scaling"]["factor"] == 4 and config["tie_word_embeddings"] is False
    assert open_gguf(write(tmp_path / "x.gguf", "mistral")).config["model_type"] == "mistral"


def test_config_takes_counts_per_layer_if_they_are_equal(tmp_path):
    assert open_gguf(write(tmp_path / "x.gguf", "llama", attention__head_count=[6, 6, 6])).read_config().heads == 6
    path = write(tmp_path / "x.gguf", "llama", attention__head_count_kv=[2, 2, 1])
    with pytest.raises(CheckpointError, match=r"x.gguf: llama.attention.head_count_kv is \[2, 2, 1\], expected an int"):
        open_gguf(path)


def test_open_reads_no_weights_and_counts_what_is_copied(tmp_path, monkeypatch):
    path = write(tmp_path / "x.gguf", "llama", "F16")
    monkeypatch.setattr(GgufFile, "tensor", None)
    model = open_gguf(path)
    rows = 3 * (6 + 2) * 32 * 96 * 2
    assert model.copied_nbytes == rows and model.nbytes == model.file.nbytes
    coded = open_gguf(write(tmp_path / "y.gguf", "llama", "Q4_0"))
    matrices = sum(v.size for v in weights_of("llama").values() if v.ndim == 2)
    assert coded.copied_nbytes == matrices // 32 * 20
    assert [n for n in coded.notices if "copied into memory" in n and n.startswith(str(tmp_path / "y.gguf"))]


def test_fingerprint_depends_on_config_and_types_not_on_the_path(tmp_path):
    prints = [
        open_gguf(write(tmp_path / f"{n}.gguf", "llama", t, **changes)).fingerprint
        for n, (t, changes) in enumerate([("F16", {}), ("F16", {}), ("BF16", {}), ("F16", {"context_length": 8})])
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 3


def test_notices_name_what_is_not_used(tmp_path):
    tensors = gguf_tensors(MODELS["llama"], weights_of("llama")) | {"blk.9.extra.weight": np.zeros((2, 32), np.float32)}
    model = open_gguf(write(tmp_path / "x.gguf", "llama", tensors=tensors, new_setting=3))
    logits(model, [1])
    assert any("1 tensors are not part of the model: blk.9.extra.weight" in n for n in model.notices)
    assert any("metadata llama.new_setting is not known" in n for n in model.notices)


def test_a_bias_that_is_absent_is_zero(tmp_path):
    tensors = gguf_tensors(MODELS["biases"], weights_of("biases"))
    gone = [name for name in tensors if name.endswith(("attn_output.bias", "0.attn_k.bias", "ffn_up.bias"))]
    path, tokens = tmp_path / "x.gguf", some_tokens(30)
    zero = {name: np.zeros_like(tensors[name]) if name in gone else tensors[name] for name in tensors}
    want = logits(open_gguf(write(path, "biases", tensors=zero)), tokens)
    kept = {name: tensors[name] for name in tensors if name not in gone}
    np.testing.assert_array_equal(logits(open_gguf(write(path, "biases", tensors=kept)), tokens), want)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"general__architecture": "gemma2"}, "general.architecture is 'gemma2', expected one of 'qwen35moe'"),
        ({"general__architecture": None}, "general.architecture is missing, expected one of"),
        ({"general__architecture": [1, 2]}, "general.architecture is "),
        ({"general__type": "adapter"}, "general.type is 'adapter', expected 'model'"),
        ({"split__count": 3}, "is one of 3 parts of a model, expected the first one, named"),
        ({"block_count": None}, "llama.block_count is missing, expected an integer"),
        ({"block_count": 0}, "llama.block_count is 0"),
        ({"block_count": -1}, "llama.block_count is -1"),
        ({"block_count": 5000}, "llama.block_count is 5000"),
        ({"block_count": "3"}, "llama.block_count is '3'"),
        ({"embedding_length": None}, "llama.embedding_length is missing"),
        ({"context_length": None}, "llama.context_length is missing"),
        ({"feed_forward_length": None}, "llama.feed_forward_length is missing"),
        ({"feed_forward_length": [160, 160, 32]}, "llama.feed_forward_length is [160, 160, 32]"),
        ({"attention__head_count": 5, "attention__key_length": None}, "llama: embedding_length 96 is no multiple of"),
        ({"attention__head_count_kv": 4}, "num_attention_heads is 6, expected a multiple of num_key_value_heads (4)"),
        ({"attention__value_length": 8}, "llama.attention.value_length is 8, expected 32"),
        ({"attention__layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "llama.attention.layer_norm_rms_epsilon is nan"),
        ({"rope__dimension_count": 34}, "llama.rope.dimension_count is 34, expected an even number up to 32"),
        ({"rope__dimension_count": 7}, "llama.rope.dimension_count is 7"),
        ({"rope__freq_base": -1.0}, "llama.rope.freq_base is -1.0"),
        ({"rope__scaling__type": "longrope"}, "llama.rope.scaling.type is 'longrope', expected one of 'none'"),
        ({"rope__scaling__factor": -2.0}, "llama.rope.scaling.factor is -2.0"),
        ({"rope__scaling__attn_factor": 0.5}, "llama.rope.scaling.attn_factor is 0.5, expected 1.0"),
        ({"expert_count": 8}, "llama.expert_used_count is missing, expected an integer"),
        ({"logit_scale": 0.5}, "llama.logit_scale is 0.5, expected 1.0, the only value"),
        ({"attention__causal": False}, "llama.attention.causal is False"),
        ({"attention__scale": 0.1}, "llama.attention.scale is 0.1, expected no such key"),
        ({"attention__sliding_window": 16, "attention__sliding_window_pattern": 2}, "llama.attention.sliding_window"),
    ],
    ids=range(30),
)
def test_open_refuses_metadata_by_name(tmp_path, changes, expected):
    path = write(tmp_path / "x.gguf", "llama", **changes)
    with pytest.raises(CheckpointError) as raised:
        open_gguf(path).read_config()
    assert str(raised.value).startswith(f"{path}: {expected}") and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "array", "expected"),
    [
        ("token_embd.weight", None, "has no tensor 'token_embd.weight', expected the weights of a model"),
        ("token_embd.weight", np.zeros(96), r"tensor token_embd.weight has shape \[96\], expected \[vocab, dim\]"),
        ("output_norm.weight", None, "has no tensor 'output_norm.weight'"),
        ("blk.1.attn_q.weight", None, "has no tensor 'blk.1.attn_q.weight'"),
        ("blk.1.attn_q.weight", np.zeros((96, 32)), r"blk.1.attn_q.weight has shape \(96, 32\), expected \(192, 96\)"),
        ("blk.2.attn_norm.weight", np.zeros((3, 32)), r"blk.2.attn_norm.weight has shape \(3, 32\), expected \(96,\)"),
        ("rope_freqs.weight", np.ones(8), "rope_freqs.weight is F32 of shape .8,., expected 16 numbers"),
        ("rope_freqs.weight", np.zeros(16), "rope_freqs.weight has numbers that are not above 0"),
        ("rope_freqs.weight", np.full(16, np.nan), "rope_freqs.weight has numbers that are not above 0"),
        ("rope_factors_long.weight", np.ones(8), "has rope_factors_long.weight"),
    ],
    ids=range(10),
)
def test_weights_that_do_not_fit_are_refused(tmp_path, name, array, expected):
    tensors = gguf_tensors(MODELS["llama"], weights_of("llama"))
    tensors[name] = array
    tensors = {key: value.astype(np.float32) for key, value in tensors.items() if value is not None}
    path = write(tmp_path / "x.gguf", "llama", tensors=tensors)
    with pytest.raises(CheckpointError, match=expected):
        logits(open_gguf(path), [1])


def test_open_refuses_a_type_that_is_not_supported_before_reading_weights(tmp_path, monkeypatch):
    values = {"general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 8}
    values |= {"llama.embedding_length": 256, "llama.attention.head_count": 2, "llama.feed_forward_length": 8}
    values["llama.attention.layer_norm_rms_epsilon"] = 1e-5
    table = np.zeros((5, 66), np.uint8), gguf.GGMLQuantizationType.IQ2_XXS
    path = write_file(tmp_path / "x.gguf", values, {"token_embd.weight": table})
    monkeypatch.setattr(GgufFile, "tensor", None)
    with pytest.raises(
        CheckpointError, match=r"tensor 'token_embd.weight' has type IQ2_XXS, expected one of F32, F16, BF"
    ):
        open_gguf(path)


def test_experts_that_are_not_stacked_are_refused(tmp_path):
    tensors = gguf_tensors(MODELS["qwen3_moe"], weights_of("qwen3_moe"))
    path = write(tmp_path / "x.gguf", "qwen3_moe", tensors={k: v for k, v in tensors.items() if "gate_exps" not in k})
    with pytest.raises(CheckpointError, match=r"has no tensor 'blk.0.ffn_gate_exps.weight', expected the experts"):
        logits(open_gguf(path), [1])


def test_a_quantized_vector_is_refused(tmp_path):
    tensors = gguf_tensors(MODELS["qwen2"], weights_of("qwen2"))
    made = {key: stored(array, "F32") for key, array in tensors.items()}
    coded = gguf.GGMLQuantizationType.Q8_0
    made["output_norm.weight"] = gguf.quants.quantize(tensors["output_norm.weight"], coded), coded
    metadata = GgufFile.open(write(tmp_path / "x.gguf", "qwen2")).metadata
    path = write_file(tmp_path / "y.gguf", metadata, made)
    with pytest.raises(CheckpointError, match=r"tensor 'output_norm.weight' is Q8_0 of shape \[96\], expected rows"):
        logits(open_gguf(path), [1])


def test_a_file_that_is_shortened_while_it_is_in_use_ends_the_step_with_an_error(tmp_path, monkeypatch):
    path = write(tmp_path / "x.gguf", "llama")
    monkeypatch.setattr("penstock.api.gguf_tokenizer", lambda _: SimpleNamespace(vocab_size=1))
    llm = penstock.load(path, device="cpu")
    llm.logits([1, 2, 3])
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"x\.gguf: has \d+ bytes, expected the \d+ it had"):
        llm.logits([1, 2, 3])
