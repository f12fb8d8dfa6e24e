"""Small random models of many families as GGUF files, written as llama.cpp's converter writes them.

Names come from the gguf package's own table. What the converter does to tensors and which keys it writes is said here
once more, from its side: from released files to GGUF.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np

from penstock.models import family_of
from penstock.quant import BLOCK_TYPES
from tests.models.common import VOCAB
from tests.weights.blocks import pack

SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

# Each axis another size. Rows of 256 columns and more, so that all types of blocks fit.
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
}
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "norm_topk_prob": True}
SIGMOID = {
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
}
MLA = {"q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 96}
MISTRAL = {
    "model_type": "mistral4",
    "num_key_value_heads": 8,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "rope_parameters": YARN
    | {"rope_theta": 50000.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
    | {"original_max_position_embeddings": 16},
}
GEMMA4 = {
    "num_hidden_layers": 6,
    "intermediate_size": 512,
    "head_dim": 32,
    "global_head_dim": 64,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "sliding_window": 20,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen35moe": BASE
    | DELTA
    | EXPERTS
    | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 512, "num_attention_heads": 6},
    "qwen35": BASE | DELTA | {"model_type": "qwen3_5_text", "intermediate_size": 512, "tie_word_embeddings": True},
    # as many key heads as value heads: nothing is put into another order
    "qwen35 even": BASE | DELTA | {"model_type": "qwen3_5_text", "intermediate_size": 512, "linear_num_key_heads": 6},
    "qwen3next": BASE
    | DELTA
    | EXPERTS
    | {"model_type": "qwen3_next", "shared_expert_intermediate_size": 512, "intermediate_size": 512},
    "gemma3": BASE
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "intermediate_size": 512,
        "query_pre_attn_scalar": 32,
        "sliding_window": 20,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    },
    "gemma4": BASE
    | GEMMA4
    | {
        "model_type": "gemma4_text",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 7,
        "top_k_experts": 3,
        "moe_intermediate_size": 256,
    },
    "gemma4 inputs": BASE
    | GEMMA4
    | {
        "model_type": "gemma4_text",
        "attention_k_eq_v": False,
        "num_hidden_layers": 8,
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": VOCAB,
        "intermediate_size": 256,
    },
    "gemma3n": BASE
    | {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 5,
        "intermediate_size": [512] * 5,
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
        "sliding_window": 20,
        "num_kv_shared_layers": 2,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "laurel_rank": 64,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": VOCAB,
        "activation_sparsity_pattern": [0.95, 0.9, 0.0, 0.0, 0.0],
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "deepseek2": BASE
    | SIGMOID
    | MLA
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    # GLM-4.7-Flash: a layer behind the last one; q in one piece as the smaller ones have it, no YaRN
    "deepseek2 flash": BASE
    | SIGMOID
    | MLA
    | {
        "model_type": "glm4_moe_lite",
        "num_key_value_heads": 8,
        "q_lora_rank": None,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": True,
    },
    "mistral4": BASE | SIGMOID | MLA | MISTRAL,
    # Mistral Large 3, whose converter writes how queries grow, and experts as three stacks
    "deepseek2 large": BASE | SIGMOID | MLA | MISTRAL | {"first_k_dense_replace": 1, "n_shared_experts": 2},
    "gpt-oss": BASE
    | {
        "model_type": "gpt_oss",
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
        "swiglu_limit": 7.0,
        "rope_scaling": YARN | {"truncate": False},
    },
    "glm4moe": BASE
    | SIGMOID
    | {
        "model_type": "glm4_moe",
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 1,
    },
    "minimax-m2": BASE
    | {
        "model_type": "minimax_m2",
        "intermediate_size": 256,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "rotary_dim": 20,
        "num_hidden_layers": 2,
    },
    "mistral3": BASE
    | {
        "model_type": "ministral3",
        "intermediate_size": 512,
        "rope_parameters": YARN
        | {"rope_theta": 50000.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
        | {"original_max_position_embeddings": 16},
    },
    "llama experts": BASE
    | {"model_type": "mixtral", "intermediate_size": 512, "num_local_experts": 7, "num_experts_per_tok": 3},
    "mistral3 small": BASE | {"model_type": "mistral", "intermediate_size": 512, "sliding_window": None},
    "lfm2moe": BASE
    | {
        "model_type": "lfm2_moe",
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "layer_types": ["conv", FULL, "conv", FULL],
        "conv_L_cache": 3,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "num_dense_layers": 1,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "lfm2": BASE
    | {
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "layer_types": ["conv", FULL, "conv"],
        "conv_L_cache": 4,
        "intermediate_size": 512,
        "block_ff_dim": 512,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": True,
    },
    "kimi-linear": BASE
    | MLA
    | {
        "model_type": "kimi_linear",
        "num_hidden_layers": 4,
        "num_key_value_heads": 8,
        "q_lora_rank": None,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "moe_renormalize": True,
        "linear_attn_config": {
            "num_heads": 8,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3],
        },
    },
    "qwen2moe": BASE
    | EXPERTS
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 512, "norm_topk_prob": False},
}
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen35moe": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen35": gguf.MODEL_ARCH.QWEN35,
    "qwen3next": gguf.MODEL_ARCH.QWEN3NEXT,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "gemma3n": gguf.MODEL_ARCH.GEMMA3N,
    "gemma4": gguf.MODEL_ARCH.GEMMA4,
    "deepseek2": gguf.MODEL_ARCH.DEEPSEEK2,
    "gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
    "glm4moe": gguf.MODEL_ARCH.GLM4_MOE,
    "minimax-m2": gguf.MODEL_ARCH.MINIMAXM2,
    "qwen2moe": gguf.MODEL_ARCH.QWEN2MOE,
    "mistral3": gguf.MODEL_ARCH.MISTRAL3,
    "mistral4": gguf.MODEL_ARCH.MISTRAL4,
    "lfm2moe": gguf.MODEL_ARCH.LFM2MOE,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "kimi-linear": gguf.MODEL_ARCH.KIMI_LINEAR,
}


# -- released weights ------------------------------------------------------------------------------------------------


class Released:
    """A `Source` of released weights, drawn by their paths, which are kept."""

    layout = "hf"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.found: dict[str, np.ndarray] = {}

    def __contains__(self, path: str) -> bool:
        kind = self.config["model_type"]
        joined = kind.startswith("gemma4") or (kind == "mistral4" and not self.config["first_k_dense_replace"])
        if path.endswith(("experts.gate_up_proj", "switch_glu.gate_proj")):
            return path.endswith("gate_up_proj") == joined
        if path.endswith(("in_proj_qkv", "block_sparse_moe.gate_proj")):
            return False
        if path == "lm_head":
            return not self.config["tie_word_embeddings"]
        return not path.endswith(("embed_q", "unembed_out"))

    def _drawn(self, path: str, shape: Sequence[int]) -> np.ndarray:
        if path not in self.found:
            rng = np.random.default_rng(zlib.crc32(path.encode()))
            drawn = rng.standard_normal(shape)
            if path.endswith("A_log"):
                made = np.log(rng.uniform(0.5, 12, shape))
            elif path.endswith(("per_expert_scale", "layer_scalar")):
                made = rng.uniform(0.6, 1.4, shape)
            elif path.endswith(("bias", "sinks")):
                made = 0.3 * drawn
            elif path.endswith(("norm", "router.scale")) or "layernorm" in path:
                less = self.config["model_type"].startswith(("qwen3_5", "qwen3_next", "gemma3_"))
                made = (0 if less and not path.endswith("linear_attn.norm") else 1) + 0.2 * drawn
            else:
                small = path.endswith(("o_proj", "out_proj", "down_proj"))
                made = drawn * shape[-1] ** -0.5 * (0.3 if small else 1)
            self.found[path] = made.astype(np.float32)
        assert self.found[path].shape == tuple(shape)
        return self.found[path]

    def weight(self, path: str, *shape: int) -> np.ndarray:
        return self._drawn(path, shape)

    vector = weight

    def rows(self, path: str, order: np.ndarray, *shape: int) -> np.ndarray:
        return self._drawn(path, shape)[order]

    def stack(self, paths: Sequence[str], *shape: int) -> np.ndarray:
        return self._drawn(paths[0], shape)


def released(name: str) -> dict[str, np.ndarray]:
    """All weights of a model by path."""
    config = MODELS[name]
    family, source = family_of(config), Released(config)
    family.read_weights(source, family.read_config(config))
    return source.found


# -- what the converter does to tensors ------------------------------------------------------------------------------


def tiled_heads(array: np.ndarray, axis: int, key_heads: int, per: int, width: int) -> np.ndarray:
    """Value heads from "those of one key head together" to "the first of each key head, then the second"."""
    array = np.moveaxis(array, axis, 0)
    made = array.reshape(key_heads, per, width, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
    return np.moveaxis(made, 0, axis)


def _delta_net(config: Mapping[str, Any], path: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Qwen3-Next's and Qwen3.5's linear attention."""
    Hk, Hv = config["linear_num_key_heads"], config["linear_num_value_heads"]
    Dk, Dv, per = config["linear_key_head_dim"], config["linear_value_head_dim"], Hv // Hk
    part = path.rpartition(".")[2]
    if part == "A_log":
        array = -np.exp(array)
    elif part == "conv1d":
        array = array.squeeze()
    if config["model_type"] == "qwen3_next":
        if part == "in_proj_qkvz":
            heads = array.reshape(Hk, -1, array.shape[1])
            cuts = np.split(heads, np.cumsum([Dk, Dk, per * Dv]), axis=1)
            q, k, v, z = (cut.reshape(-1, array.shape[1]) for cut in cuts)
            stem = path.removesuffix("in_proj_qkvz")
            return {f"{stem}in_proj_qkv": np.concatenate([q, k, v]), f"{stem}in_proj_z": z}
        return {path: array}
    if part in ("in_proj_qkv", "conv1d"):
        front = 2 * Hk * Dk
        array = np.concatenate([array[:front], tiled_heads(array[front:], 0, Hk, per, Dv)])
    elif part == "in_proj_z":
        array = tiled_heads(array, 0, Hk, per, Dv)
    elif part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        array = tiled_heads(array, 0, Hk, per, 1)
    elif part == "out_proj":
        array = tiled_heads(array, 1, Hk, per, Dv)
    return {path: array}


def _changed(config: Mapping[str, Any], path: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """One released tensor as the converter's: by paths, whose last part may be a suffix of its own."""
    kind = config["model_type"]
    less = kind.startswith(("qwen3_5", "qwen3_next", "gemma3_"))
    if less and path.endswith("norm") and not path.endswith("linear_attn.norm"):
        return {path: array + np.float32(1)}
    if "linear_attn." in path:
        return _delta_net(config, path, array)
    if kind in ("llama", "ministral3", "mistral", "mixtral") and path.endswith(("q_proj", "k_proj")):
        heads = config["num_attention_heads" if path.endswith("q_proj") else "num_key_value_heads"]
        return {path: array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)}
    if path.endswith("A_log"):
        return {path: -np.exp(array)}
    if path.endswith("_conv1d"):
        return {path: array.reshape(1, array.shape[0], 1, array.shape[2])}
    if path.endswith("conv.conv"):
        return {path: array.squeeze(1)}
    if path.endswith("kv_b_proj"):
        heads = array.reshape(config["num_attention_heads"], -1, array.shape[1])
        k, v = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
        stem = path.removesuffix("kv_b_proj")
        return {f"{stem}k_b_proj": k.swapaxes(1, 2), f"{stem}v_b_proj": v}
    return {path: array.squeeze() if path.endswith("shared_expert_gate") else array}


def gguf_name(table: gguf.TensorNameMap, path: str) -> str:
    """The name in the file of what is at a path of the model."""
    special = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    if path.startswith("altup_"):
        stem, number = path.rsplit(".", 1)
        return f"{table.get_name(f'model.{stem}')}.{number}.weight"
    for end, name in special.items():
        if path.endswith(end):
            return f"blk.{path.split('.')[1]}.{name}"
    suffix = ".weight"
    path = path.replace(".dt_bias", ".dt_proj.bias").replace(".expert_bias", ".expert_bias.bias")
    path = path.replace("e_score_correction_bias", "e_score_correction.bias")
    if path.endswith(".bias"):
        path, suffix = path.removesuffix(".bias"), ".bias"
    path = path.replace("switch_mlp.", "experts.")
    if "block_sparse_moe.experts" in path or "feed_forward.experts" in path:
        for old, new in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            path = path.replace(old, new)
    bare = path == "lm_head" or "feed_forward.experts" in path
    found = table.get_name(path if bare else f"model.{path}")
    assert found is not None, path
    return found if path.endswith("A_log") else found + suffix


def tensors_of(name: str, weights: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """The tensors of a model's file, float32."""
    config = MODELS[name]
    table = gguf.get_tensor_name_map(ARCHITECTURES[name.split()[0]], config["num_hidden_layers"] + 1)
    made: dict[str, np.ndarray] = {}
    for path, array in (released(name) if weights is None else weights).items():
        for changed, values in _changed(config, path, array).items():
            made[gguf_name(table, changed)] = np.ascontiguousarray(values)
    for part in ("altup_proj", "altup_unembd_proj"):
        if each := [made.pop(f"{part}.{n}.weight") for n in range(3) if f"{part}.{n}.weight" in made]:
            made[f"{part}.weight"] = np.stack(each)
    if config["model_type"] == "gemma4_text":
        wide, share = config["global_head_dim"], config["rope_parameters"][FULL]["partial_rotary_factor"]
        turned = int(wide * share / 2)
        made["rope_freqs.weight"] = np.array([1.0] * turned + [1e30] * (wide // 2 - turned), np.float32)
    if config.get("num_nextn_predict_layers"):
        layer, dim = config["num_hidden_layers"], config["hidden_size"]
        made[f"blk.{layer}.nextn.eh_proj.weight"] = np.ones((dim, 2 * dim), np.float32)
        made[f"blk.{layer}.attn_norm.weight"] = np.ones(dim, np.float32)
    return made


# -- metadata --------------------------------------------------------------------------------------------------------


def metadata_of(name: str) -> dict[str, Any]:
    """What the converter writes of a config, with the architecture's name in front of its keys."""
    config, arch = MODELS[name], name.split()[0]
    further = config.get("num_nextn_predict_layers", 0)
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"] + further,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.freq_base": config["rope_theta"],
        "nextn_predict_layers": further or None,
        "expert_used_count": config.get("num_experts_per_tok") or config.get("top_k_experts"),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    for key in ("num_experts", "n_routed_experts", "num_local_experts"):
        if key in config:
            keys["expert_count"] = config[key]
    if (scaling := config.get("rope_scaling") or config.get("rope_parameters")) is not None and "factor" in scaling:
        keys |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
        if scaling["rope_type"] == "yarn":
            keys["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
            keys["rope.scaling.yarn_beta_fast"] = scaling["beta_fast"]
            keys["rope.scaling.yarn_beta_slow"] = scaling["beta_slow"]
    keys |= _MORE.get(arch, lambda config: {})(config)
    made = {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": arch, "general.type": "model", "general.file_type": 0} | made


def _of_delta(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "full_attention_interval": 4,
        "rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"]),
        "rope.dimension_sections": None if config["model_type"] == "qwen3_next" else [3, 3, 2, 0],
    }


def _of_sigmoid(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_gating_func": 2,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
    }


def _of_deepseek(config: Mapping[str, Any]) -> dict[str, Any]:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return _of_sigmoid(config) | {
        "expert_gating_func": 1 if config["model_type"] == "mistral4" else 2,
        "attention.head_count_kv": 1,
        "vocab_size": config["vocab_size"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope,
        "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"] if "mscale_all_dim" in scaling else None,
    }


def _of_gemma3(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention.sliding_window": config["sliding_window"], "rope.freq_base_swa": config["rope_local_base_freq"]}


def _of_gemma4(config: Mapping[str, Any]) -> dict[str, Any]:
    slides = [kind == SLIDING for kind in config["layer_types"]]
    shared, layers, width = config["num_kv_shared_layers"], config["num_hidden_layers"], config["intermediate_size"]
    wide = config.get("use_double_wide_mlp", False)
    kv, own = config["num_key_value_heads"], config.get("num_global_key_value_heads")
    tables = config["rope_parameters"]
    return {
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.key_length": config["global_head_dim"],
        "attention.value_length": config["global_head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "feed_forward_length": [width * 2 if n >= layers - shared else width for n in range(layers)] if wide else width,
        "attention.head_count_kv": kv if own is None else [kv if inside else own for inside in slides],
        "rope.dimension_count": config["global_head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base": tables[FULL]["rope_theta"],
        "rope.freq_base_swa": tables[SLIDING]["rope_theta"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }


def _of_lfm2(config: Mapping[str, Any]) -> dict[str, Any]:
    kv = config["num_key_value_heads"]
    return {
        "attention.head_count_kv": [kv if kind == FULL else 0 for kind in config["layer_types"]],
        "vocab_size": config["vocab_size"],
        "shortconv.l_cache": config["conv_L_cache"],
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
        "attention.key_length": None,
        "attention.value_length": None,
    }


def _of_kimi(config: Mapping[str, Any]) -> dict[str, Any]:
    rank, rope, delta = config["kv_lora_rank"], config["qk_rope_head_dim"], config["linear_attn_config"]
    return {
        "attention.head_count_kv": [
            int(n + 1 in delta["full_attn_layers"]) for n in range(config["num_hidden_layers"])
        ],
        "vocab_size": config["vocab_size"],
        "ssm.conv_kernel": delta["short_conv_kernel_size"],
        "kda.head_dim": delta["head_dim"],
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rope,
        "attention.key_length": rank + rope,
        "attention.value_length": None,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_used_count": config["num_experts_per_token"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_gating_func": 2,
    }


_MORE: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "qwen35moe": _of_delta,
    "qwen35": _of_delta,
    "qwen3next": _of_delta,
    "gemma3": _of_gemma3,
    "gemma3n": lambda config: (
        _of_gemma3(config)
        | {
            "feed_forward_length": config["intermediate_size"],
            "attention.sliding_window_pattern": [kind == SLIDING for kind in config["layer_types"]],
            "attention.shared_kv_layers": config["num_kv_shared_layers"],
            "altup.active_idx": config["altup_active_idx"],
            "altup.num_inputs": config["altup_num_inputs"],
            "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
            "final_logit_softcapping": config["final_logit_softcapping"],
            "activation_sparsity_scale": [
                NormalDist().inv_cdf(share) if share else -math.inf for share in config["activation_sparsity_pattern"]
            ],
        }
    ),
    "gemma4": _of_gemma4,
    "deepseek2": lambda config: (
        _of_deepseek(config)
        | (
            {
                "attention.temperature_scale": config["rope_parameters"]["llama_4_scaling_beta"],
                "attention.temperature_length": config["rope_parameters"]["original_max_position_embeddings"],
            }
            if config["model_type"] == "mistral4"
            else {}
        )
    ),
    "mistral4": lambda config: (
        _of_deepseek(config)
        | {"expert_gating_func": None, "attention.temperature_scale": config["rope_parameters"]["llama_4_scaling_beta"]}
    ),
    "mistral3": lambda config: {
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
        **(
            {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.3}
            if config["model_type"] == "ministral3"
            else {}
        ),
    },
    "lfm2": _of_lfm2,
    "lfm2moe": lambda config: (
        _of_lfm2(config) | {"leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2}
    ),
    "kimi-linear": _of_kimi,
    "gpt-oss": lambda config: {
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
    },
    "glm4moe": lambda config: (
        _of_sigmoid(config) | {"rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"])}
    ),
    "minimax-m2": lambda config: {
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_gating_func": 2,
        "rope.dimension_count": config["rotary_dim"],
    },
}


# -- files -----------------------------------------------------------------------------------------------------------


def stored(array: np.ndarray, type_name: str) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """A tensor in a type; vectors stay float32, and so does what has no whole blocks in its rows."""
    number = gguf.GGMLQuantizationType[type_name]
    if array.ndim == 1 or array.shape[-1] % gguf.GGML_QUANT_SIZES[number][0]:
        number = gguf.GGMLQuantizationType.F32
    if number.name in BLOCK_TYPES:
        return pack(array, number.name), number
    return gguf.quants.quantize(np.ascontiguousarray(array), number), number


MIXED = ("Q4_K", "Q6_K", "Q8_0", "MXFP4")


def mixed(tensors: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
    """A mix of types: experts MXFP4 or Q4_K, down and values Q6_K, rows of less than 256 columns Q8_0."""
    made = {}
    for name, array in tensors.items():
        if _kept(name):
            kind = "F32"
        elif array.shape[-1] % 256:
            kind = "Q8_0"
        elif "exps" in name:
            kind = "MXFP4" if "up" in name else "Q4_K"
        else:
            kind = "Q6_K" if any(part in name for part in ("down", "attn_v", "token_embd")) else "Q4_K"
        made[name] = stored(array, kind)
    return made


def rounded(tensors: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]) -> dict[str, np.ndarray]:
    """What stored tensors stand for, float32."""
    return {name: gguf.quants.dequantize(*held) for name, held in tensors.items()}


def write_file(
    path: Path, values: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]
) -> Path:
    writer = gguf.GGUFWriter(path, "none")
    del writer.kv_data[0]["general.architecture"]
    add = {str: writer.add_string, list: writer.add_array, bool: writer.add_bool, float: writer.add_float32}
    for key, value in values.items():
        if value is not None:
            add.get(type(value), writer.add_uint32)(key, value)
    for name, (data, number) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kept(name: str) -> bool:
    """Biases, routers and convolutions stay float32 in every file."""
    return name.endswith(".bias") or "ffn_gate_inp" in name or "conv" in name or name == "rope_freqs.weight"


def write(path: Path, name: str, type_name: str = "F32", tensors: Any = None, **changes: Any) -> Path:
    """A model of MODELS as a file; `changes` replace keys of its architecture ("." as "__"), None removes one."""
    arch = name.split()[0]
    values = metadata_of(name)
    for key, value in changes.items():
        key = key.replace("__", ".")
        values[key if key.startswith(("general.", "tokenizer.", "split.")) else f"{arch}.{key}"] = value
    tensors = tensors_of(name) if tensors is None else tensors
    held = {
        key: array if isinstance(array, tuple) else stored(array, "F32" if _kept(key) else type_name)
        for key, array in tensors.items()
    }
    return write_file(path, values, held)
