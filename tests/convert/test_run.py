"""Whole conversions: tensors against those of mlx-lm, bit for bit, and both programs on the result."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import penstock
from penstock.convert.run import Options, convert
from penstock.errors import CheckpointError, InvalidArgument
from penstock.quant import QuantizedTensor, dequantize
from penstock.weights.checkpoint import Checkpoint
from tests.convert.common import CONFIGS, by_mlx_lm, config_in, stored, tensors, write
from tests.models.common import error, some_tokens, write_model
from tests.models.made import mlx_logits
from tests.models.test_gpt_oss import CONFIG as GPT_OSS

FOUR = {"quantize": True, "q_group_size": 32}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a name, written once."""
    folder = tmp_path_factory.mktemp("released")

    def made(name: str) -> Path:
        path = folder / name.replace(" ", "-")
        return path if path.exists() else write(path, name)

    return made


def same(ours: Path, theirs: Path) -> None:
    """Equal tensors, and equal words about their formats."""
    got, want = stored(ours), stored(theirs)
    assert sorted(got) == sorted(want)
    assert [name for name in want if got[name] != want[name]] == []
    a, b = (config_in(folder) for folder in (ours, theirs))
    assert a.get("quantization") == b.get("quantization") and a.get("quantization_config") == a.get("quantization")
    assert {k: v for k, v in a.items() if k != "text_config"} == {k: v for k, v in b.items() if k != "text_config"}
    sizes = [json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (ours, theirs)]
    assert sizes[0]["metadata"]["total_size"] == sizes[1]["metadata"]["total_size"]
    assert sorted(sizes[0]["weight_map"]) == sorted(sizes[1]["weight_map"])


ROUTED = ("qwen2_moe", "mixtral", "mistral4")


# transformers has no Kimi K2; routers of the others have as few bits in mlx-lm as all else
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in (*ROUTED, "kimi_k2")])
def test_convert_makes_the_tensors_of_mlx_lm_in_4_bits(source: Any, tmp_path: Path, name: str) -> None:
    convert(source(name), tmp_path / "ours", Options(**FOUR))
    same(tmp_path / "ours", by_mlx_lm(source(name), tmp_path / "theirs", **FOUR))


def test_convert_of_kimi_makes_the_tensors_of_deepseek(source: Any, tmp_path: Path) -> None:
    # transformers has no such model, so mlx-lm gets no tokenizer for it and converts it under its other name
    convert(source("kimi_k2"), tmp_path / "ours", Options(**FOUR))
    folder = write(tmp_path / "source", "kimi_k2", model_type="deepseek_v3")
    assert stored(tmp_path / "ours") == stored(by_mlx_lm(folder, tmp_path / "theirs", **FOUR))
    mlx_logits(tmp_path / "ours", [1, 2])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_5_moe", {}),
        ("qwen3_5_moe", {"quantize": True}),
        ("qwen3_5", {"dtype": "float32"}),
        ("qwen3_next", {"dtype": "float16", "quantize": True, "q_bits": 8}),
        ("gemma4", {"quantize": True, "q_bits": 3, "q_group_size": 64}),
        ("deepseek_v3", {"dtype": "float16"}),
        ("deepseek_v3", {"quantize": True, "q_bits": 6, "dtype": "float32"}),
        ("llama", {}),
        ("qwen2", {"quantize": True, "q_bits": 5}),
        ("qwen3_moe", {"quantize": True, "q_bits": 2}),
        ("qwen3_moe", {"quantize": True, "q_mode": "mxfp4"}),
        ("qwen3_5", {"quantize": True, "q_mode": "mxfp8", "dtype": "float32"}),
        ("deepseek_v3", {"quantize": True, "q_mode": "nvfp4", "dtype": "float16"}),
        ("gemma4", {"quantize": True, "q_mode": "nvfp4"}),
        ("qwen2_moe", {}),
        ("mixtral", {"dtype": "float16"}),
        ("mistral4", {}),
        ("glm4_moe", {"dtype": "float16"}),
        ("minimax_m2", {"quantize": True, "q_bits": 3}),
        ("kimi_linear", {"dtype": "float16"}),
        ("gemma3n", {}),
        ("gemma3n", {"quantize": True, "q_group_size": 32, "dtype": "float16"}),
        ("kimi_linear", {"quantize": True, "q_group_size": 32}),
    ],
    ids=str,
)
def test_convert_makes_the_tensors_of_mlx_lm(source: Any, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    convert(source(name), tmp_path / "ours", Options(**options))
    same(tmp_path / "ours", by_mlx_lm(source(name), tmp_path / "theirs", **options))


@pytest.mark.parametrize(
    "options",
    [{}, {"quantize": True, "q_bits": 8}, {"dequantize": True}, {"quantize": True, "dtype": "float16"}],
    ids=str,
)
def test_convert_makes_the_tensors_of_mlx_lm_from_blocks_of_mxfp4(tmp_path: Path, options: dict[str, Any]) -> None:
    """gpt-oss as it is released: experts stay as they are, and what is dense is quantized beside them."""
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "layer_types": None}
    table = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config = GPT_OSS | sizes | {"quantization_config": table, "torch_dtype": "bfloat16"}
    config["rope_scaling"] = GPT_OSS["rope_scaling"] | {"truncate": True}  # as mlx-lm does, whatever is said
    folder = write_model(tmp_path / "source", config, gpt_oss_in_blocks(config), shards=2)
    convert(folder, tmp_path / "ours", Options(**options))
    same(tmp_path / "ours", by_mlx_lm(folder, tmp_path / "theirs", **options))
    assert typical_error(exact(tmp_path / "ours", [1, 2, 3]), mlx_logits(tmp_path / "theirs", [1, 2, 3])) < 5e-6


@pytest.mark.parametrize("recipe", ["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"])
def test_convert_takes_mixed_recipes(tmp_path: Path, recipe: str) -> None:
    name = {"mixed_2_6": "deepseek_v3", "mixed_3_6": "gemma4"}.get(recipe, "qwen3_5_moe")
    deep = {"num_hidden_layers": 9}  # mlx-lm's choice depends on eighths and thirds of the layers
    config = CONFIGS[name]
    nested = {"text_config": config["text_config"] | deep | {"layer_types": None}} if "text_config" in config else deep
    if name == "gemma4":
        nested["text_config"]["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"] * 3
    else:
        nested.get("text_config", {}).pop("layer_types", None)
    folder = write(tmp_path / "source", name, **nested)
    options = {**FOUR, "quant_predicate": recipe}
    convert(folder, tmp_path / "ours", Options(**options))
    same(tmp_path / "ours", by_mlx_lm(folder, tmp_path / "theirs", **options))


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen3_5_moe", None), ("gemma4", "float16"), ("llama", "float32"), ("qwen3_moe", None)]
)
def test_convert_back_makes_the_tensors_of_mlx_lm(source: Any, tmp_path: Path, name: str, dtype: str | None) -> None:
    convert(source(name), tmp_path / "quantized", Options(**FOUR))
    convert(tmp_path / "quantized", tmp_path / "ours", Options(dequantize=True, dtype=dtype))
    same(tmp_path / "ours", by_mlx_lm(tmp_path / "quantized", tmp_path / "theirs", dequantize=True, dtype=dtype))


def test_convert_back_leaves_nothing_quantized(source: Any, tmp_path: Path) -> None:
    # mlx-lm forgets the matrices of latent attention and cannot load what it wrote
    convert(source("deepseek_v3"), tmp_path / "quantized", Options(**FOUR))
    convert(tmp_path / "quantized", tmp_path / "dense", Options(dequantize=True, dtype="float32"))
    assert "quantization" not in config_in(tmp_path / "dense")
    tokens = some_tokens(30)
    want = mlx_logits(tmp_path / "quantized", tokens)
    assert typical_error(mlx_logits(tmp_path / "dense", tokens), want) < 5e-6
    assert typical_error(exact(tmp_path / "dense", tokens), want) < 5e-6


def gpt_oss_in_blocks(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Small numbers for all tensors of its released files."""
    rng, dim, width = np.random.default_rng(4), config["hidden_size"], config["intermediate_size"]
    E, D, vocab = config["num_local_experts"], config["head_dim"], config["vocab_size"]
    H, Hkv = config["num_attention_heads"] * D, config["num_key_value_heads"] * D

    def drawn(*shape: int, mean: float = 0.0) -> np.ndarray:
        return (mean + rng.standard_normal(shape) * shape[-1] ** -0.5).astype(ml_dtypes.bfloat16)

    made = {"lm_head.weight": drawn(vocab, dim), "model.norm.weight": drawn(dim, mean=1.0)}
    made["model.embed_tokens.weight"] = drawn(vocab, dim)
    for n in range(config["num_hidden_layers"]):
        path = f"model.layers.{n}."
        for part, rows, columns in (("q", H, dim), ("k", Hkv, dim), ("v", Hkv, dim), ("o", dim, H)):
            made[f"{path}self_attn.{part}_proj.weight"] = drawn(rows, columns)
            made[f"{path}self_attn.{part}_proj.bias"] = drawn(rows)
        made[f"{path}self_attn.sinks"] = drawn(H // D)
        made[f"{path}mlp.router.weight"], made[f"{path}mlp.router.bias"] = drawn(E, dim), drawn(E)
        for norm in ("input", "post_attention"):
            made[f"{path}{norm}_layernorm.weight"] = drawn(dim, mean=1.0)
        for part, rows, columns in (("gate_up", 2 * width, dim), ("down", dim, width)):
            base = f"{path}mlp.experts.{part}_proj"
            made[f"{base}_blocks"] = rng.integers(0, 256, (E, rows, columns // 32, 16), np.uint8)
            made[f"{base}_scales"] = rng.integers(118, 123, (E, rows, columns // 32), np.uint8)
            made[f"{base}_bias"] = drawn(E, rows)
    return made


def exact(folder: Path, tokens: list[int]) -> np.ndarray:
    return penstock.load(folder, device="reference", activations="float32").logits(tokens)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "gemma4 inputs", "deepseek_v3", "qwen3_moe"])
def test_both_programs_give_the_same_answer_on_the_result(source: Any, tmp_path: Path, name: str) -> None:
    convert(source(name), tmp_path / "made", Options(**FOUR))
    tokens = some_tokens(24)
    assert typical_error(exact(tmp_path / "made", tokens), mlx_logits(tmp_path / "made", tokens)) < 5e-6


def typical_error(got: np.ndarray, want: np.ndarray) -> float:
    """Of half of the tokens: random routers have near-ties, and a token that takes another expert says nothing."""
    return float(np.median([error(a, b) for a, b in zip(got, want, strict=True)]))


def test_convert_of_a_quantized_model_keeps_it(source: Any, tmp_path: Path) -> None:
    convert(source("gemma4"), tmp_path / "quantized", Options(**FOUR))
    convert(tmp_path / "quantized", tmp_path / "again")
    assert stored(tmp_path / "again") == stored(tmp_path / "quantized")
    penstock.load(tmp_path / "again", device="reference")


def test_convert_rounds_a_quantized_model_again_if_told(source: Any, tmp_path: Path) -> None:
    convert(source("qwen3_5_moe"), tmp_path / "eight", Options(quantize=True, q_bits=8))
    with pytest.raises(InvalidArgument, match=r"eight: is quantized already \(.*: 8 bits, groups of 64\)"):
        convert(tmp_path / "eight", tmp_path / "four", Options(**FOUR))
    convert(tmp_path / "eight", tmp_path / "four", Options(**FOUR, requantize=True))
    convert(tmp_path / "eight", tmp_path / "dense", Options(dequantize=True))
    convert(tmp_path / "dense", tmp_path / "expected", Options(**FOUR))
    assert stored(tmp_path / "four") == stored(tmp_path / "expected")


# -- FP8 -------------------------------------------------------------------------------------------------------------


def fp8(folder: Path, without: str = "", **changes: Any) -> Path:
    """DeepSeek with block-scaled FP8 matrices, of sizes that no block divides."""
    config = CONFIGS["deepseek_v3"] | {"num_hidden_layers": 2, "intermediate_size": 200}
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]} | changes
    found: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(0)
    for name, array in tensors(config).items():
        found[name] = array
        if array.ndim == 2 and name.endswith("_proj.weight"):
            codes = rng.integers(0, 256, array.shape).astype(np.uint8)
            codes[codes & 0x7F == 0x7F] = 0x31  # NaN
            found[name] = codes.view(ml_dtypes.float8_e4m3fn)
            blocks = tuple(-(-size // 128) for size in array.shape)
            scales = rng.uniform(1e-4, 3e-4, blocks).astype(np.float32)
            powers = np.exp2(rng.integers(-13, -10, blocks)).astype(np.float32)
            found[f"{name}_scale_inv"] = powers if "scale_fmt" in changes else scales
    found.pop(without, None)
    return write_model(folder, config, found)


def test_convert_dequantizes_fp8_as_mlx_lm(tmp_path: Path) -> None:
    folder = fp8(tmp_path / "fp8")
    convert(folder, tmp_path / "ours", Options(**FOUR))
    same(tmp_path / "ours", by_mlx_lm(folder, tmp_path / "theirs", **FOUR))
    convert(folder, tmp_path / "dense")
    assert stored(tmp_path / "dense") == stored(by_mlx_lm(folder, tmp_path / "dense by mlx-lm"))
    assert "quantization_config" not in config_in(tmp_path / "dense")
    tokens = some_tokens(9)
    np.testing.assert_array_equal(exact(folder, tokens), exact(tmp_path / "dense", tokens))


def test_fp8_with_scales_that_are_powers_of_two_is_loaded_as_mxfp8(tmp_path: Path) -> None:
    folder = fp8(tmp_path / "fp8", scale_fmt="ue8m0")
    convert(folder, tmp_path / "dense")
    tokens, checkpoint = some_tokens(9), Checkpoint.open(folder)
    assert typical_error(exact(folder, tokens), exact(tmp_path / "dense", tokens)) < 5e-6
    paths = [name.removesuffix(".weight_scale_inv") for name in checkpoint.names if name.endswith("_scale_inv")]
    found = {path: checkpoint.tensor(path) for path in paths}
    assert {w.mode for w in found.values() if isinstance(w, QuantizedTensor)} == {"mxfp8"}
    dense = Checkpoint.open(tmp_path / "dense")
    for path, w in found.items():
        assert isinstance(w, QuantizedTensor) == (w.shape[1] % 32 == 0)
        if path in dense or f"{path}.weight" in dense:
            values = dequantize(w) if isinstance(w, QuantizedTensor) else w.astype(np.float32)
            np.testing.assert_array_equal(values, dense.array(f"{path}.weight").astype(np.float32))


def test_convert_names_fp8_that_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"weight_block_size \[64, 64\], expected E4M3 in \[128, 128\]"):
        convert(fp8(tmp_path / "a", weight_block_size=[64, 64]), tmp_path / "out")
    scale = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    with pytest.raises(CheckpointError, match=rf"is FP8 without '{scale}'"):
        convert(fp8(tmp_path / "b", without=scale), tmp_path / "out")
    with pytest.raises(CheckpointError, match=rf"'{scale}' has no '.*o_proj.weight' of two axes in F8_E4M3"):
        convert(fp8(tmp_path / "c", without=scale.removesuffix("_scale_inv")), tmp_path / "out")


def test_fp8_with_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    scale = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    path, start, _ = Checkpoint.open(fp8(tmp_path / "fp8")).location(scale)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(np.float32(np.nan).tobytes())
    with pytest.raises(CheckpointError, match=rf"'{scale}' has numbers that are not finite, expected finite scales"):
        exact(tmp_path / "fp8", [1])


# -- layers that predict further tokens ------------------------------------------------------------------------------


def test_convert_keeps_prediction_layers_in_a_file_that_mlx_lm_does_not_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "source", "qwen3_5_moe")
    notices: list[str] = []
    convert(folder, tmp_path / "without", Options(**FOUR), notify=notices.append)
    assert any("1 tensors that predict further tokens are left out (--keep-mtp keeps them)" in line for line in notices)
    convert(folder, tmp_path / "with", Options(**FOUR, keep_mtp=True))
    assert stored(tmp_path / "with") == stored(tmp_path / "without")
    assert sorted(stored(tmp_path / "with", "mtp.safetensors")) == [
        f"language_model.mtp.fc.{part}" for part in ("biases", "scales", "weight")
    ]
    assert not (tmp_path / "without" / "mtp.safetensors").exists()
    penstock.load(tmp_path / "with", device="reference")
    mlx_logits(tmp_path / "with", [1, 2])


def test_convert_keeps_the_last_layers_of_deepseek(tmp_path: Path) -> None:
    config = CONFIGS["deepseek_v3"] | {"num_hidden_layers": 3}
    weights = tensors(config)
    folder = write_model(tmp_path / "source", config | {"num_hidden_layers": 2}, weights)
    convert(folder, tmp_path / "with", Options(**FOUR, keep_mtp=True))
    convert(write_model(tmp_path / "all", config, weights), tmp_path / "three", Options(**FOUR))
    kept, three = stored(tmp_path / "with", "mtp.safetensors"), stored(tmp_path / "three")
    assert kept == {name: tensor for name, tensor in three.items() if ".layers.2." in name}
    mlx_logits(tmp_path / "with", [1, 2])


def test_prediction_layers_of_qwen_are_stored_as_the_others(tmp_path: Path) -> None:
    folder = write(tmp_path / "source", "qwen3_5_moe", shards=1)
    weights = load_file(folder / "model.safetensors")
    base = "model.language_model.layers.3."
    weights |= {name.replace(base, "mtp.layers.0."): array for name, array in weights.items() if base in name}
    weights["mtp.norm.weight"] = weights["model.language_model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    convert(folder, tmp_path / "made", Options(**FOUR, keep_mtp=True))
    kept, main = stored(tmp_path / "made", "mtp.safetensors"), stored(tmp_path / "made")
    like = {name.replace("mtp.", "model.").replace("layers.0", "layers.3"): array for name, array in kept.items()}
    assert len(like) > 20
    assert {name: array for name, array in like.items() if ".fc." not in name}.items() <= main.items()


# -- what is beside the weights --------------------------------------------------------------------------------------


def test_convert_copies_tokenizer_and_licence_and_no_weights(source: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(source("qwen2"), tmp_path / "source")
    for name in ("LICENSE", "chat_template.jinja", "tokenization_x.py", "README.md", "old.bin", ".hidden.json"):
        (folder / name).write_text(name)
    convert(folder, tmp_path / "made")
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == [
        "LICENSE",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenization_x.py",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (tmp_path / "made" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert config_in(tmp_path / "made")["eos_token_id"] == [3, 1]  # of generation_config.json


def test_convert_says_what_it_leaves_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "source", "qwen2", shards=1)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = weights["model.norm.weight"]
    weights["model.layers.0.extra.weight"] = weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    notices: list[str] = []
    convert(folder, tmp_path / "made", notify=notices.append)
    assert notices == [
        f"{folder}: lm_head is left out, config.json says that it is tied to the embedding",
        f"{folder}: 2 tensors are not part of the text model and left out: "
        "'model.layers.0.extra.weight', 'model.layers.0.self_attn.rotary_emb.inv_freq'",
    ]
    assert stored(tmp_path / "made").keys() == weights.keys() - {
        "lm_head.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.extra.weight",
    }
    mlx_logits(tmp_path / "made", [1, 2])


def test_text_models_of_qwen_get_the_name_that_mlx_lm_has(tmp_path: Path) -> None:
    flat = CONFIGS["qwen3_5_moe"]["text_config"]
    folder = write_model(tmp_path / "source", flat)
    convert(folder, tmp_path / "made", Options(**FOUR))
    assert config_in(tmp_path / "made")["model_type"] == "qwen3_5_moe"
    tokens = some_tokens(10)
    assert typical_error(exact(tmp_path / "made", tokens), mlx_logits(tmp_path / "made", tokens)) < 5e-6


def test_files_are_cut_and_aligned(source: Any, tmp_path: Path) -> None:
    report = convert(source("qwen3_5_moe"), tmp_path / "made", Options(**FOUR), shard_bytes=60_000)
    files = sorted((tmp_path / "made").glob("*.safetensors"))
    assert report.files == len(files) > 3
    assert [file.name for file in files] == [
        f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))
    ]
    assert (
        penstock.load(tmp_path / "made", device="reference").notices == ()
    )  # none about tensors that had to be copied
    convert(source("qwen3_5_moe"), tmp_path / "whole", Options(**FOUR))
    assert stored(tmp_path / "made") == stored(tmp_path / "whole")
