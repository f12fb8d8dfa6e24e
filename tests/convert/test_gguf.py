"""GGUF files as MLX folders: every value kept where that is possible, and both programs on the result."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

import penstock
from penstock.convert.run import Options, convert
from penstock.engine.engine import Engine, Model
from penstock.errors import CheckpointError, InvalidArgument
from penstock.models.gguf import open_gguf
from penstock.ops.device import device_for
from penstock.quant import BLOCK_TYPES, Format, QuantizedTensor, dequantize
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.gguf import CONVERTED, GgufFile
from tests.convert.common import config_in, stored, tensors
from tests.models import gguf_files
from tests.models.common import GGUF_ARCHITECTURES, GGUF_NAMES, TEMPLATE, VOCAB, error, some_tokens, write_tokenizer
from tests.models.made import mlx_logits
from tests.models.test_llama import EXPERTS, config_of

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": config_of("llama", **SIZES),
    "tied": config_of("llama", **SIZES | {"num_hidden_layers": 1}, tie_word_embeddings=True, attention_bias=True),
    "llama3": config_of("llama", **SIZES, rope_theta=500.0),
    "mistral": config_of("mistral", **SIZES, sliding_window=9),
    "qwen2": config_of("qwen2", **SIZES),
    "qwen3": config_of("qwen3", **SIZES),
    "qwen3_moe": config_of("qwen3_moe", **EXPERTS | SIZES | {"moe_intermediate_size": 256, "num_experts": 5}),
}


def weights_of(name: str) -> dict[str, np.ndarray]:
    """Weights by their GGUF names, as llama.cpp's converter arranges them."""
    config, found = MODELS[name], {}
    experts: dict[str, list[np.ndarray]] = {}
    for key, array in tensors(config).items():
        array, (stem, suffix) = array.astype(np.float32), key.rsplit(".", 1)
        if ".experts." in stem:
            layer, part = stem.split(".")[2], stem.rsplit(".", 1)[1].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", []).append(array)
            continue
        if config["model_type"] in ("llama", "mistral") and stem.endswith(("q_proj", "k_proj")):
            halves = array.reshape(array.shape[0] // 64, 2, 32, *array.shape[1:])  # interleaved in the file
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        if stem in GGUF_NAMES:
            found[f"{GGUF_NAMES[stem]}.{suffix}"] = array
        else:
            _, _, layer, part = stem.split(".", 3)
            found[f"blk.{layer}.{GGUF_NAMES[part]}.{suffix}"] = array
    return found | {key: np.stack(arrays) for key, arrays in experts.items()}


def factors(original: int = 128, factor: float = 8.0) -> np.ndarray:
    """What Llama 3 divides its frequencies by."""
    turns = original * 500.0 ** (-np.arange(0, 64, 2) / 64) / (2 * np.pi)
    blend = np.clip((turns - 1) / 3, 0, 1)
    return (1 / (blend + (1 - blend) / factor)).astype(np.float32)


def write(path: Path, name: str, type_name: str = "Q4_0", other: Mapping[str, str] | None = None, **more: Any) -> Path:
    """A model of MODELS; `other` has the types of tensors whose names begin so, `more` adds metadata."""
    config = MODELS[name]
    arch = GGUF_ARCHITECTURES[config["model_type"]]
    weights = weights_of(name)
    if name == "llama3":
        weights["rope_freqs.weight"] = factors()
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.sliding_window": config.get("sliding_window"),
        "expert_count": config.get("num_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }.items():
        if value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{arch}.rope.freq_base", config["rope_theta"])
    for key, value in more.items():
        add = {str: writer.add_string, list: writer.add_array, bool: writer.add_bool}.get(
            type(value), writer.add_uint32
        )
        add(key.replace("__", "."), value)
    for key, array in weights.items():
        chosen = next((t for part, t in (other or {}).items() if key.startswith(part)), type_name)
        chosen = "F32" if array.ndim == 1 else chosen
        number = gguf.GGMLQuantizationType[chosen]
        drawn = chosen in BLOCK_TYPES or chosen in CONVERTED
        data = _random_blocks(array.shape, chosen) if drawn else gguf.quants.quantize(array, number)
        writer.add_tensor(key, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random_blocks(shape: tuple[int, ...], type_name: str) -> np.ndarray:
    """Blocks of a type that the gguf package cannot write: any bytes with small float16 scales are some numbers."""
    number = gguf.GGMLQuantizationType[type_name]
    size, nbytes = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (np.prod(shape) // size, nbytes), dtype=np.uint8)
    scale = np.float16(1e-3).view(np.uint16)
    if type_name == "IQ1_M":  # a digit of its scale in each of the last four words
        words = data[:, 48:].view(np.uint16)
        words[:] = (words & 0x0FFF) | ((scale >> np.arange(0, 16, 4, dtype=np.uint16)) << 12)
    else:
        for at in _SCALES_AT.get(type_name, (0,) if type_name in CONVERTED else (0, 2)):
            data[:, at : at + 2] = np.full(len(data), scale).view(np.uint8).reshape(-1, 2)
    return data.reshape(*shape[:-1], -1)


_SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)}


def engine_of(source: Any, family: Any, config: Any) -> Engine:
    model = Model(family, config, family.read_weights(source, config), "test")
    return Engine(model, device=device_for("reference"), activations="float32", max_context=config.max_positions)


def logits(engine: Engine, tokens: list[int]) -> np.ndarray:
    return engine.prefill(engine.open(), tokens, every=True)


def gguf_logits(path: Path, tokens: list[int]) -> np.ndarray:
    model = open_gguf(path)
    return logits(engine_of(model.source, model.family, model.read_config()), tokens)


def folder_logits(folder: Path, tokens: list[int]) -> np.ndarray:
    from penstock import models
    from penstock.models.source import CheckpointSource

    checkpoint = Checkpoint.open(folder)
    family = models.family_of(checkpoint.config)
    config = family.read_config(checkpoint.config)
    return logits(engine_of(CheckpointSource(checkpoint, *family.names(checkpoint, config)), family, config), tokens)


@pytest.mark.parametrize(
    ("name", "type_name"),
    [("llama", "Q4_0"), ("llama", "Q4_1"), ("llama", "Q8_0"), ("llama", "F16"), ("llama", "BF16")]
    + [(name, "Q4_0") for name in MODELS if name != "llama"],
)
def test_convert_of_gguf_keeps_every_value(tmp_path: Path, name: str, type_name: str) -> None:
    path = write(tmp_path / "x.gguf", name, type_name)
    convert(path, tmp_path / "made")
    tokens = some_tokens(20)
    got = folder_logits(tmp_path / "made", tokens)
    want = gguf_logits(path, tokens)
    if name == "llama3":  # config.json's numbers make the frequencies anew
        assert error(got, want) < 5e-6
    else:
        np.testing.assert_array_equal(got, want)
    seen = MODELS[name].get("sliding_window") or len(tokens)  # mlx-lm has no window for Mistral
    assert error(mlx_logits(tmp_path / "made", tokens)[:seen], got[:seen]) < 5e-6


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0"])
def test_values_are_those_of_the_gguf_package(tmp_path: Path, type_name: str) -> None:
    path = write(tmp_path / "x.gguf", "qwen3", type_name)
    convert(path, tmp_path / "made")
    made = Checkpoint.open(tmp_path / "made")
    for tensor in gguf.GGUFReader(path).tensors:
        module = {v: k for k, v in GGUF_NAMES.items()}.get(tensor.name.split(".", 2)[-1].removesuffix(".weight"))
        if tensor.name.startswith("blk.1.") and module is not None and len(tensor.shape) == 2:
            got = made.tensor(f"model.layers.1.{module}")
            assert isinstance(got, QuantizedTensor) and got.group_size == 32 and got.dtype == "float16"
            want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(dequantize(got), want)


def test_other_types_are_rounded_again_only_if_told(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "llama", other={"output": "Q6_K", "token_embd": "Q4_K", "blk.1.ffn_down": "Q3_K"})
    with pytest.raises(InvalidArgument, match=r"tensor token_embd.weight is Q4_K and 2 others, expected Q4_0, Q4_1"):
        convert(path, tmp_path / "made")
    convert(path, tmp_path / "made", Options(requantize=True))
    made = Checkpoint.open(tmp_path / "made")
    found = {p: made.quantization(p) for p in ("lm_head", "model.embed_tokens", "model.layers.1.mlp.down_proj")}
    assert found == {
        "lm_head": Format(6, 32),
        "model.embed_tokens": Format(4, 32),
        "model.layers.1.mlp.down_proj": Format(4, 32),
    }
    assert made.quantization("model.layers.0.mlp.down_proj") == Format(4, 32)
    want = gguf.quants.dequantize(GGUF(path, "output.weight"), gguf.GGMLQuantizationType.Q6_K)
    got = dequantize(made.tensor("lm_head"))  # type: ignore[arg-type]
    assert np.abs(got - want).max() <= 2.1 * np.abs(want).max() / 63  # about a step of 6-bit codes
    mlx_logits(tmp_path / "made", [1, 2])

    convert(path, tmp_path / "eight", Options(requantize=True, q_bits=8))
    assert Checkpoint.open(tmp_path / "eight").quantization("lm_head") == Format(8, 32)
    assert Checkpoint.open(tmp_path / "eight").quantization("model.layers.0.mlp.up_proj") == Format(4, 32)


def GGUF(path: Path, name: str) -> np.ndarray:
    return next(tensor.data for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)


def test_types_that_no_kernel_reads_name_convert_which_makes_them_load(tmp_path: Path, monkeypatch) -> None:
    names = ["token_embd", "output.", "blk.0.ffn_gate", "blk.0.ffn_up", "blk.0.ffn_down"]
    names += ["blk.1.attn_q.", "blk.1.attn_k.", "blk.1.attn_v", "blk.1.ffn_down"]
    other: dict[str, str] = dict(zip(names, CONVERTED, strict=True))
    path = write(tmp_path / "a file.gguf", "qwen3", other=other)
    hint = rf"penstock convert --model '{path}' --requantize makes a folder that loads"
    with pytest.raises(CheckpointError, match=rf"tensor 'token_embd.weight' has type IQ1_S, expected .*: {hint}"):
        penstock.load(path)
    with pytest.raises(InvalidArgument, match=r"tensor token_embd.weight is IQ1_S and 8 others, expected Q4_0, Q4_1"):
        convert(path, tmp_path / "made")
    convert(path, tmp_path / "dense", Options(dequantize=True))
    convert(path, tmp_path / "made", Options(requantize=True))
    dense, made = (Checkpoint.open(tmp_path / folder) for folder in ("dense", "made"))
    modules = {name: module for module, name in GGUF_NAMES.items()}
    for part, type_name in other.items():
        name = next(t.name for t in gguf.GGUFReader(path).tensors if t.name.startswith(part))
        stem = name.removesuffix(".weight")
        _, layer, inner = stem.split(".", 2) if stem.startswith("blk.") else ("", "", stem)
        module = f"model.layers.{layer}.{modules[inner]}" if layer else modules[inner]
        want = gguf.quants.dequantize(GGUF(path, name), gguf.GGMLQuantizationType[type_name])
        np.testing.assert_array_equal(dense.array(f"{module}.weight"), want.astype(np.float16))
        got = dequantize(made.tensor(module))  # type: ignore[arg-type]
        step = 2 * np.abs(want).max() / (2 ** made.tensor(module).bits - 1)  # type: ignore[union-attr]
        assert np.abs(got - want).max() <= 1.05 * step, type_name
    assert np.isfinite(folder_logits(tmp_path / "made", [1, 2])).all()
    monkeypatch.setattr("penstock.convert.gguf.find_spec", lambda name: None)
    with pytest.raises(InvalidArgument, match=r"is IQ1_S, expected the gguf package.*: pip install 'penstock\[gguf\]'"):
        convert(path, tmp_path / "none", Options(requantize=True))


def test_all_types_can_be_made_dense(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "qwen3", "Q8_0", other={"output": "Q5_K"})
    convert(path, tmp_path / "made", Options(dequantize=True))
    assert "quantization" not in config_in(tmp_path / "made")
    made = Checkpoint.open(tmp_path / "made")
    want = gguf.quants.dequantize(GGUF(path, "output.weight"), gguf.GGMLQuantizationType.Q5_K)
    np.testing.assert_array_equal(made.array("lm_head.weight"), want.astype(np.float16))
    mlx_logits(tmp_path / "made", [1, 2])


def test_a_quantized_file_is_quantized_again_only_if_told(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "qwen2", "Q8_0")
    with pytest.raises(InvalidArgument, match=r"tensor token_embd.weight is Q8_0 already, expected floats"):
        convert(path, tmp_path / "made", Options(quantize=True))
    convert(path, tmp_path / "made", Options(quantize=True, q_bits=3, requantize=True))
    convert(path, tmp_path / "dense", Options(dequantize=True))
    convert(tmp_path / "dense", tmp_path / "want", Options(quantize=True, q_bits=3))
    assert stored(tmp_path / "made") == stored(tmp_path / "want")


def test_frequency_factors_become_rope_scaling_or_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(write(tmp_path / "x.gguf", "llama3"), tmp_path / "made")
    assert config_in(tmp_path / "made")["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    monkeypatch.setattr("tests.convert.test_gguf.factors", lambda: np.linspace(1, 2, 32, dtype=np.float32))
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight is none that config.json can say"):
        convert(write(tmp_path / "y.gguf", "llama3"), tmp_path / "other")


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_tokenizer(folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    pieces = [piece for piece, _ in sorted(backend.get_vocab().items(), key=lambda item: item[1])]
    more = {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": "gpt-2",
        "tokenizer__ggml__tokens": [*pieces, *(f"[PAD{n}]" for n in range(len(pieces), VOCAB))],
        "tokenizer__ggml__token_type": [3] * 4 + [1] * (len(pieces) - 4) + [5] * (VOCAB - len(pieces)),
        "tokenizer__ggml__merges": ["a b"],
        "tokenizer__ggml__bos_token_id": 0,
        "tokenizer__ggml__eos_token_id": 3,
        "tokenizer__chat_template": TEMPLATE,
    }
    more["tokenizer__ggml__tokens"][-1] = "ab"
    more["tokenizer__ggml__token_type"][-1] = 1
    path = write(tmp_path / "x.gguf", "qwen2", **more)
    notices: list[str] = []
    convert(path, tmp_path / "made", notify=notices.append)
    assert notices == []
    ours, theirs = (penstock.load(p, device="reference").tokenizer for p in (tmp_path / "made", path))
    text = "a cab, <|im_start|> 東京\n"
    assert ours.encode(text) == theirs.encode(text) and VOCAB - 1 in ours.encode(text)
    assert ours.eos_ids == theirs.eos_ids and ours.bos_id == theirs.bos_id == 0
    chat = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    assert json.loads((tmp_path / "made" / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    import mlx_lm

    _, tokenizer = mlx_lm.load(str(tmp_path / "made"))  # type: ignore[misc]
    assert tokenizer.encode(text) == ours.encode(text)


def test_a_tokenizer_that_is_not_known_is_left_out(tmp_path: Path) -> None:
    notices: list[str] = []
    convert(
        write(tmp_path / "x.gguf", "qwen2", tokenizer__ggml__model="llama"), tmp_path / "made", notify=notices.append
    )
    assert len(notices) == 1 and notices[0].startswith("the tokenizer is left out, expected its files from the model")
    assert not (tmp_path / "made" / "tokenizer.json").exists()


def test_a_damaged_scale_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "qwen2", "Q8_0")
    info = GgufFile.open(path).tensors["blk.0.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[info.start : info.start + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"tensor blk.0.ffn_up.weight has a scale that is not finite or too large"
    ):
        convert(path, tmp_path / "made")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.gguf"]


@pytest.mark.parametrize(
    ("name", "type_name"),
    [
        ("qwen35moe", "Q8_0"),
        *(
            pytest.param(name, "Q8_0", marks=pytest.mark.slow)
            for name in gguf_files.MODELS
            if name not in ("qwen35moe", "qwen3next", "gemma3n")
        ),
        pytest.param("qwen35moe", "F16", marks=pytest.mark.slow),
    ],
)
def test_convert_of_each_architecture_keeps_every_value(tmp_path: Path, name: str, type_name: str) -> None:
    path, tokens = gguf_files.write(tmp_path / "x.gguf", name, type_name), some_tokens(20)
    convert(path, tmp_path / "made")
    got = folder_logits(tmp_path / "made", tokens)
    # norms and decays are turned back and forth, sums over heads have another order
    assert error(got, gguf_logits(path, tokens)) < 2e-6
    # mlx-lm truncates YaRN's bounds, has another eps inside of attention, and no tied embeddings in DeepSeek-V3
    if name not in ("gpt-oss", "deepseek2", "deepseek2 flash"):
        assert error(mlx_logits(tmp_path / "made", tokens), got) < 2e-5


def test_convert_requantizes_blocks_with_their_heads_in_order_and_says_what_it_cannot_write(tmp_path: Path) -> None:
    tensors = gguf_files.mixed(gguf_files.tensors_of("qwen35"))
    path, tokens = gguf_files.write(tmp_path / "x.gguf", "qwen35", tensors=tensors), some_tokens(20)
    convert(path, tmp_path / "made", Options(dequantize=True))
    assert error(folder_logits(tmp_path / "made", tokens), gguf_logits(path, tokens)) < 5e-3  # float16
    other = gguf_files.write(tmp_path / "y.gguf", "qwen3next")
    with pytest.raises(InvalidArgument, match="y.gguf: is of qwen3next, expected the released files to convert"):
        convert(other, tmp_path / "no")
