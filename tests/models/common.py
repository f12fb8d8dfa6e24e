"""Small random checkpoints of the Qwen3.5 family, written tensor by tensor in the layout of the released files.

Nothing here needs torch: transformers and mlx-lm read the same folders as penstock. Residual branches are small, so
that a layer does not amplify the rounding of the one before it.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

BRANCH = 0.25  # size of what a block adds to the residual stream, in units of the embedding's
SPECIAL = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
VOCAB = 263  # 256 bytes, four special tokens, and three ids without a token, as padded vocabularies have them
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# what llama.cpp's converter calls an architecture and its modules
GGUF_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


def text_config(**changes: Any) -> dict[str, Any]:
    """A text config with experts, every size another one; `changes` replace values, None removes a key."""
    config = {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 96,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "full_attention_interval": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        "dtype": "bfloat16",
    }
    return {key: value for key, value in (config | changes).items() if value is not None}


def moe_config(**changes: Any) -> dict[str, Any]:
    """config.json as released: the text config nested, a vision config beside it."""
    vision = {"model_type": "qwen3_5_moe", "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    text = text_config(**changes)
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "dtype": "bfloat16",
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "text_config": text,
        "vision_config": vision | {"out_hidden_size": text.get("hidden_size"), "num_position_embeddings": 16},
    }


def dense_config(**changes: Any) -> dict[str, Any]:
    """config.json of a model without experts."""
    none = dict.fromkeys(
        ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    )
    config = moe_config(**{"model_type": "qwen3_5_text", "intermediate_size": 160} | none | changes)
    config["vision_config"]["model_type"] = "qwen3_5"
    return config | {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}


def next_config(**changes: Any) -> dict[str, Any]:
    """config.json of Qwen3-Next as released: flat, rotary values by their older names."""
    older = {
        "rope_parameters": None,
        "rope_theta": 1e5,
        "rope_scaling": None,
        "partial_rotary_factor": 0.25,
        "intermediate_size": 160,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    config = text_config(**{"model_type": "qwen3_next"} | older | changes)
    return {"architectures": ["Qwen3NextForCausalLM"], "rope_scaling": None, **config}


def seeing(text: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """config.json of a model that sees, around a text model: Mistral Small 3.1, Ministral 3, Mistral Small 4."""
    vision = {"model_type": "pixtral", "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8}
    vision |= {"intermediate_size": 24, "num_hidden_layers": 1, "patch_size": 14, "image_size": 28}
    config = {"model_type": "mistral3", "text_config": text, "vision_config": vision, "image_token_index": 7}
    return config | {"architectures": ["Mistral3ForConditionalGeneration"], "tie_word_embeddings": False} | changes


def kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer of a text config."""
    interval, count = config.get("full_attention_interval", 4), config["num_hidden_layers"]
    made = ["linear_attention" if (n + 1) % interval else "full_attention" for n in range(count)]
    return config.get("layer_types", made)


def tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """All weights of a config in the names and shapes of the released files, bfloat16 (A_log float32)."""
    text = config.get("text_config", config)
    nested = "text_config" in config
    prefix = "model.language_model." if nested else "model."
    dim = text["hidden_size"]
    tied = text.get("tie_word_embeddings") or config.get("tie_word_embeddings")
    size = dim**-0.5 if tied else 1.0  # a tied table is also the head: its logits should not be one-sided
    made = _Maker(seed, size)
    made.normal(prefix + "embed_tokens.weight", text["vocab_size"], dim, scale=size)
    for n, kind in enumerate(kinds(text)):
        path = f"{prefix}layers.{n}."
        made.norm(path + "input_layernorm.weight", dim)
        made.norm(path + "post_attention_layernorm.weight", dim)
        if kind == "full_attention":
            _attention(made, path + "self_attn.", text)
        elif text["model_type"] == "qwen3_next":
            _delta_net(made, path + "linear_attn.", text, joined=True)
        else:
            _delta_net(made, path + "linear_attn.", text, joined=False)
        dense = n in text.get("mlp_only_layers", ()) or (n + 1) % text.get("decoder_sparse_step", 1)
        if dense or not text.get("num_experts"):
            _mlp(made, path + "mlp.", dim, text["intermediate_size"])
        else:
            _experts(made, path + "mlp.", text)
    made.norm(prefix + "norm.weight", dim)
    if not tied:
        made.normal("lm_head.weight", text["vocab_size"], dim)
    if nested:  # parts that penstock skips
        made.normal("model.visual.pos_embed.weight", 16, 32)
    made.normal("mtp.fc.weight", dim, 2 * dim)
    return made.found


class _Maker:
    """Draws each tensor from a seed and its name alone."""

    def __init__(self, seed: int, size: float) -> None:
        self.seed = seed
        self.size = size
        self.found: dict[str, np.ndarray] = {}

    def _put(self, name: str, values: np.ndarray, dtype: Any = ml_dtypes.bfloat16) -> None:
        self.found[name] = values.astype(dtype)

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def normal(self, name: str, *shape: int, scale: float | None = None) -> None:
        size = shape[-1] ** -0.5 if scale is None else scale
        self._put(name, self._rng(name).standard_normal(shape) * size)

    def branch(self, name: str, *shape: int) -> None:
        """A matrix whose product is added to the residual stream."""
        self.normal(name, *shape, scale=BRANCH * self.size * shape[-1] ** -0.5)

    def norm(self, name: str, size: int, centre: float = 0.0) -> None:
        self._put(name, centre + 0.2 * self._rng(name).standard_normal(size))

    def between(self, name: str, low: float, high: float, size: int, dtype: Any = ml_dtypes.bfloat16) -> None:
        self._put(name, self._rng(name).uniform(low, high, size), dtype)


def _attention(made: _Maker, path: str, text: Mapping[str, Any]) -> None:
    dim, H, Hkv, D = (text[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    made.normal(path + "q_proj.weight", 2 * H * D, dim)
    made.normal(path + "k_proj.weight", Hkv * D, dim)
    made.normal(path + "v_proj.weight", Hkv * D, dim)
    made.norm(path + "q_norm.weight", D)
    made.norm(path + "k_norm.weight", D)
    made.branch(path + "o_proj.weight", dim, H * D)


def _delta_net(made: _Maker, path: str, text: Mapping[str, Any], joined: bool) -> None:
    dim, Hk, Hv = (text[key] for key in ("hidden_size", "linear_num_key_heads", "linear_num_value_heads"))
    Dk, Dv, W = (text[f"linear_{key}"] for key in ("key_head_dim", "value_head_dim", "conv_kernel_dim"))
    if joined:
        made.normal(path + "in_proj_qkvz.weight", 2 * Hk * Dk + 2 * Hv * Dv, dim)
        made.normal(path + "in_proj_ba.weight", 2 * Hv, dim)
    else:
        made.normal(path + "in_proj_qkv.weight", 2 * Hk * Dk + Hv * Dv, dim)
        made.normal(path + "in_proj_z.weight", Hv * Dv, dim)
        made.normal(path + "in_proj_b.weight", Hv, dim)
        made.normal(path + "in_proj_a.weight", Hv, dim)
    # q and k come out short, as in trained models: only then does it matter what their eps is added to
    made.normal(path + "conv1d.weight", 2 * Hk * Dk + Hv * Dv, 1, W, scale=0.05)
    made.between(path + "A_log", -1.5, 1.5, Hv, np.float32)
    made.between(path + "dt_bias", -3.0, 0.0, Hv)
    made.norm(path + "norm.weight", Dv, centre=1.0)
    made.branch(path + "out_proj.weight", dim, Hv * Dv)


def _mlp(made: _Maker, path: str, dim: int, width: int) -> None:
    made.normal(path + "gate_proj.weight", width, dim)
    made.normal(path + "up_proj.weight", width, dim)
    made.branch(path + "down_proj.weight", dim, width)


def _experts(made: _Maker, path: str, text: Mapping[str, Any]) -> None:
    dim, E, I = (text[key] for key in ("hidden_size", "num_experts", "moe_intermediate_size"))  # noqa: E741
    made.normal(path + "gate.weight", E, dim, scale=2 * dim**-0.5)
    made.normal(path + "shared_expert_gate.weight", 1, dim)
    _mlp(made, path + "shared_expert.", dim, text["shared_expert_intermediate_size"])
    if text["model_type"] == "qwen3_next":
        for e in range(E):
            _mlp(made, f"{path}experts.{e}.", dim, I)
    else:
        made.normal(path + "experts.gate_up_proj", E, 2 * I, dim)
        made.branch(path + "experts.down_proj", E, dim, I)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges, with a chat template, whose texts end at <|im_end|> or <|eos|>."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={piece: n for n, piece in enumerate((*SPECIAL, *alphabet))}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = tokenizers.decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[3],
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [3, 1]}))


def write_model(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, np.ndarray] | None = None, shards: int = 1
) -> Path:
    """A model folder: config, weights (made up unless given) in one or several files with an index, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = tensors(config) if weights is None else weights
    names = sorted(weights)
    if shards == 1:
        save_file(dict(weights), folder / "model.safetensors", {"format": "pt"})
    else:
        files = {name: f"model-{n % shards + 1:05}-of-{shards:05}.safetensors" for n, name in enumerate(names)}
        for file in sorted(set(files.values())):
            save_file({name: weights[name] for name in names if files[name] == file}, folder / file, {"format": "pt"})
        size = sum(array.nbytes for array in weights.values())
        index = {"metadata": {"total_size": size}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizer(folder)
    return folder


def write_tokens_beyond(folder: Path) -> Path:
    """Give a folder of `write_model` two more tokens than its model, if that has 260, and one of them as an end."""
    path = folder / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.add_special_tokens(["<|image|>", "<|sound|>"])
    backend.save(str(path))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 261]}))
    return folder


def trained(name: str) -> Path:
    """A trained model of the folder that TRAINED_MODELS names; the test is skipped where it is not there."""
    folder = Path(os.environ.get("TRAINED_MODELS") or "/nonexistent") / name
    if not folder.is_dir():
        pytest.skip(f"TRAINED_MODELS names no folder with {name}")
    return folder


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference of any logit over the largest logit."""
    assert got.shape == want.shape, f"{got.shape}, expected {want.shape}"
    assert np.isfinite(got).all()
    return float(np.abs(got.astype(np.float64) - want).max() / np.abs(want).max())


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def small_config(**changes: Any) -> dict[str, Any]:
    """A model of two layers, one of each kind, for tests of what is around it."""
    options = {"num_hidden_layers": 2, "full_attention_interval": 2, "num_experts": 3, "num_experts_per_tok": 2}
    return moe_config(**options | {"max_position_embeddings": 2048} | changes)


def letters() -> dict[int, float]:
    """A bias that makes the tokenizer of `write_tokenizer` write lower-case letters alone."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return {len(SPECIAL) + alphabet.index(letter): 100.0 for letter in "abcdefghijklmnopqrstuvwxyz"}
