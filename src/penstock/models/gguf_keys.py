"""The metadata of one architecture in a GGUF file, read as strictly as config.json, and what many of them share.

A family turns them into the config.json that the model was released with (`GgufArchitecture.config`). A key that nobody
read is checked afterwards: one that would change what is computed is refused unless it says that it does not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.errors import CheckpointError
from penstock.models.config import Fields
from penstock.weights.gguf import GgufFile

SOFTMAX, SIGMOID = 1, 2  # expert_gating_func
_LARGEST_FLOAT = float(np.finfo(np.float32).max)

# Keys that change what is computed, and the value that leaves it as it is; for architectures that do not read them.
_NEUTRAL: dict[str, Any] = {
    "attention.scale": None,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.causal": True,
    "attention.temperature_length": None,
    "attention.temperature_scale": None,
    "attention.shared_kv_layers": 0,
    "attention.q_lora_rank": None,
    "attention.kv_lora_rank": None,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "router_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "embedding_length_per_layer_input": 0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "use_parallel_residual": False,
    "expert_shared_count": 0,
    "expert_shared_feed_forward_length": 0,
    "expert_group_count": None,
    "expert_group_used_count": None,
    "expert_weights_scale": 1.0,
    "expert_gating_func": SOFTMAX,
    "leading_dense_block_count": 0,
    "interleave_moe_layer_step": 1,
    "moe_every_n_layers": 1,
    "rope.dimension_count_swa": None,
    "rope.dimension_sections": None,
    "rope.scaling.alpha": None,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
# Keys that say what other keys or the tensors say, too, or that nothing depends on.
_SAID_ELSEWHERE = (
    "expert_feed_forward_length",
    "expert_used_count",
    "expert_weights_norm",
    "feed_forward_length",
    "rope.freq_base_swa",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "vocab_size",
)


class GgufKeys(Fields):
    """The keys of an architecture without its name in front; which of them were read is kept."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        super().__init__(_numbers(file, arch), f"{file.path}: {arch}")
        self.file = file
        self.arch = arch
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        self._read.add(key)
        return super().__contains__(key)

    def _value(self, key: str, default: Any, expected: str) -> Any:
        self._read.add(key)
        return super()._value(key, default, expected)

    def error(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(str(super().error(key, expected)).replace(f"{self.where}: ", f"{self.where}.", 1))

    @property
    def layers(self) -> int:
        """Layers without those behind them that predict further tokens."""
        count, more = self.integer("block_count", most=4096), self.integer("nextn_predict_layers", 0, least=0)
        if more >= count:
            raise self.error("nextn_predict_layers", f"less than block_count ({count})")
        return count - more

    def per_layer(self, key: str, kind: type, default: Any = None) -> tuple[Any, ...]:
        """A key with one value for all layers, or with one for each; those behind the last layer are left out."""
        layers, word = self.layers, {bool: "true or false", int: "an integer"}[kind]
        expected = f"{word}, or a list of {layers}, one per layer"
        found = self._value(key, default, expected)
        values = found if isinstance(found, list) else [found] * layers
        if len(values) < layers or any(type(value) is not kind for value in values):
            raise self.error(key, expected)
        return tuple(values[:layers])

    def has(self, pattern: str) -> bool:
        """Whether the name of a tensor is of a kind, a regular expression."""
        return any(re.fullmatch(pattern, name) for name in self.file.tensors)

    def accept(self, *keys: str) -> None:
        """Whatever these say, text is computed alike."""
        self._read.update(keys)

    def check_rest(self) -> None:
        """Raises CheckpointError for a key that was not read and would change the result; others are remarked on."""
        rest = {key: value for key, value in self.values.items() if key not in self._read}
        for key, value in rest.items():
            if key in _NEUTRAL and value != _NEUTRAL[key]:
                neutral = _NEUTRAL[key]
                expected = "no such key" if neutral is None else f"{neutral!r}, the only value penstock supports"
                raise self.error(key, expected)
        if unknown := [key for key in rest if key not in _NEUTRAL and key not in _SAID_ELSEWHERE]:
            more = f" and {len(unknown) - 1} others" if len(unknown) > 1 else ""
            found = f"metadata {self.arch}.{unknown[0]}{more} is not known and ignored"
            self.file.notices.append(f"{self.file.path}: {found}")


def _numbers(file: GgufFile, arch: str) -> dict[str, Any]:
    """The metadata of an architecture without its prefix; an array that says the same for each layer is one value."""
    found: dict[str, Any] = {}
    for key, value in file.metadata.items():
        if not key.startswith(f"{arch}."):
            continue
        if isinstance(value, np.ndarray):
            value = value[0].item() if value.size and (value == value[0]).all() else value.tolist()
        if isinstance(value, float) and abs(value) <= _LARGEST_FLOAT and float(np.float32(value)) == value:
            value = float(str(np.float32(value)))  # 1e-05 and not 9.999999747378752e-06: what config.json said
        found[key.removeprefix(f"{arch}.")] = value
    return found


def vocab_size(file: GgufFile, name: str = "token_embd.weight") -> int:
    """Rows of a table with one per token."""
    if name not in file:
        raise CheckpointError(f"{file.path}: has no tensor {name!r}, expected the weights of a model")
    shape = file.tensors[name].shape
    if len(shape) != 2:
        raise CheckpointError(f"{file.path}: tensor {name} has shape {list(shape)}, expected [vocab, dim]")
    return shape[0]


def base(keys: GgufKeys, model_type: str) -> dict[str, Any]:
    """What every model with heads of one width has."""
    dim = keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", None)
    if head_dim is None:
        keys.require(dim % heads == 0, f"embedding_length {dim} is no multiple of attention.head_count {heads}")
        head_dim = dim // heads
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.error("attention.value_length", f"{head_dim}, the length of keys")
    kv_heads = keys.integer("attention.head_count_kv", heads)
    return stem(keys, model_type) | {"num_key_value_heads": kv_heads, "head_dim": head_dim}


def stem(keys: GgufKeys, model_type: str) -> dict[str, Any]:
    """What every model has."""
    return {
        "model_type": model_type,
        "vocab_size": vocab_size(keys.file),
        "hidden_size": keys.integer("embedding_length"),
        "num_hidden_layers": keys.layers,
        "num_attention_heads": keys.integer("attention.head_count"),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", above=0),
        "rope_theta": keys.number("rope.freq_base", 10000.0, above=0),
        "tie_word_embeddings": "output.weight" not in keys.file,
    }


def rotation(keys: GgufKeys, head_dim: int) -> dict[str, Any]:
    """Rotary channels and how their frequencies are scaled."""
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in keys.file:
            raise CheckpointError(f"{keys.file.path}: has {name} (LongRoPE), expected frequencies of one kind")
    config: dict[str, Any] = {}
    width = keys.integer("rope.dimension_count", head_dim)
    if not (width % 2 == 0 and 2 <= width <= head_dim):
        raise keys.error("rope.dimension_count", f"an even number up to {head_dim}")
    if width != head_dim:
        config["partial_rotary_factor"] = share(width, head_dim)
    if (scaling := rope_scaling(keys)) is not None:
        config["rope_scaling"] = scaling
    return config


def share(width: int, head_dim: int) -> float:
    """partial_rotary_factor: times head_dim it is not below width."""
    return width / head_dim if int(head_dim * (width / head_dim)) == width else math.nextafter(width / head_dim, 1)


def rope_scaling(keys: GgufKeys) -> dict[str, Any] | None:
    """`rope_scaling` of config.json; None: frequencies are not scaled."""
    kind = keys.choice("rope.scaling.type", ("none", "linear", "yarn"), "linear")
    factor = keys.number("rope.scaling.factor", None) or keys.number("rope.scale_linear", None) or 1.0
    if factor <= 0:
        raise keys.error("rope.scaling.factor", "a number above 0")
    original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    fast = keys.number("rope.scaling.yarn_beta_fast", 32.0, above=0)
    slow = keys.number("rope.scaling.yarn_beta_slow", 1.0, above=0)
    if kind == "linear" and factor != 1:
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        return None
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": fast,
        "beta_slow": slow,
    }


def sigmoid_experts(keys: GgufKeys) -> dict[str, Any]:
    """Keys of experts that are chosen by sigmoids with a bias, as DeepSeek-V3 and its relatives have them."""
    biased = keys.has(r"blk\.\d+\.exp_probs_b\.bias")
    gate = keys.integer("expert_gating_func", SIGMOID if biased else SOFTMAX)
    if gate != SIGMOID:
        if "expert_gating_func" in keys:
            raise keys.error("expert_gating_func", f"{SIGMOID} (sigmoid)")
        raise keys.error("expert_gating_func", f"{SIGMOID} (sigmoid), or tensors exp_probs_b.bias")
    return _experts(keys)


def softmax_experts(keys: GgufKeys) -> dict[str, Any]:
    """Keys of experts that are chosen by softmax without a bias beside shared ones, as Mistral Small 4 has them."""
    if keys.integer("expert_gating_func", SOFTMAX) != SOFTMAX:
        raise keys.error("expert_gating_func", f"{SOFTMAX} (softmax)")
    if keys.has(r"blk\.\d+\.exp_probs_b\.bias"):
        raise CheckpointError(f"{keys.file.path}: has tensors exp_probs_b.bias, expected none where softmax chooses")
    return _experts(keys)


def _experts(keys: GgufKeys) -> dict[str, Any]:
    return {
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_routed_experts": keys.integer("expert_count"),
        "n_shared_experts": keys.integer("expert_shared_count", 0, least=0),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, least=0),
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
    }


def sliding(keys: GgufKeys, period: int) -> list[str]:
    """`layer_types` by a list of truth values, or by a number: the last of so many layers sees everything."""
    key = "attention.sliding_window_pattern"
    if type(keys.values.get(key, 0)) is int:
        period = keys.integer(key, period)
        inside = tuple((n + 1) % period != 0 for n in range(keys.layers))
    else:
        inside = keys.per_layer(key, bool)
    return ["sliding_attention" if slides else "full_attention" for slides in inside]


def less_one(vector: np.ndarray) -> np.ndarray:
    """A norm's weight less the 1 that the converter added."""
    return vector - np.float32(1)


def logarithm(decay: np.ndarray) -> np.ndarray:
    """A_log of the −exp(A_log) that files have."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.log(-decay.astype(np.float64)).astype(np.float32)


def halves(config: Mapping[str, Any], path: str, rows: int) -> np.ndarray | None:
    """Rows of q and k with neighbouring channels that turn together: into the order of two halves of a head."""
    if not path.endswith(("self_attn.q_proj", "self_attn.k_proj")):
        return None
    head_dim = config["head_dim"]
    width = int(head_dim * config.get("partial_rotary_factor", 1.0))
    pairs = np.arange(width).reshape(-1, 2)
    head = np.concatenate([pairs[:, 0], pairs[:, 1], np.arange(width, head_dim)])
    return (np.arange(0, rows, head_dim)[:, None] + head).reshape(-1)
