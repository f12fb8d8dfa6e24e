"""config.json of Gemma 4, DeepSeek-V3 and the Llama family: what is read, and what is refused by its name."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

from penstock import models
from penstock.models import deepseek_v3, gemma3, gemma4, lfm2, llama
from tests.models import test_deepseek_v3 as deepseek
from tests.models import test_gemma3 as gemma3s
from tests.models import test_gemma4 as gemma
from tests.models import test_lfm2 as lfms
from tests.models import test_llama as llamas
from tests.models.test_config import BAD_INTEGERS, refused

SLIDING, FULL = "sliding_attention", "full_attention"


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    """A config without a key, in its text part if it has one."""
    config = copy.deepcopy(config)
    config.get("text_config", config).pop(key, None)
    return config


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    config.get("text_config", config).update(changes)
    return config


GEMMA, INPUTS = gemma.CONFIGS["moe"], gemma.CONFIGS["inputs"]
DEEPSEEK = deepseek.CONFIGS["v3"]
LLAMA, QWEN3_MOE = llamas.CONFIGS["llama3"], llamas.CONFIGS["moe"]
GLM, MINIMAX, MIXTRAL = llamas.CONFIGS["glm"], llamas.CONFIGS["minimax"], llamas.CONFIGS["mixtral"]
QWEN2_MOE = llamas.CONFIGS["qwen2 moe"]
LFM2, LFM2_MOE = lfms.CONFIGS["dense"], lfms.CONFIGS["moe"]
MISTRAL4 = deepseek.CONFIGS["mistral"]
MINISTRAL, SEEING = llamas.CONFIGS["ministral"], llamas.CONFIGS["ministral sees"]

# of each config the keys whose value is an integer: those that must be there, and those that have a default
REQUIRED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gemma4": (
        GEMMA,
        [
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "sliding_window",
            "intermediate_size",
            "num_experts",
            "top_k_experts",
            "moe_intermediate_size",
            "vocab_size",
            "hidden_size",
        ],
    ),
    "deepseek_v3": (
        DEEPSEEK,
        [
            "num_hidden_layers",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "vocab_size",
            "hidden_size",
            "num_attention_heads",
            "kv_lora_rank",
            "v_head_dim",
            "intermediate_size",
        ],
    ),
    "llama": (LLAMA, ["num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "intermediate_size"]),
    "qwen3_moe": (QWEN3_MOE, ["num_experts", "num_experts_per_tok", "moe_intermediate_size"]),
    "qwen2_moe": (QWEN2_MOE, ["num_experts", "num_experts_per_tok", "shared_expert_intermediate_size"]),
    "mixtral": (MIXTRAL, ["num_local_experts", "num_experts_per_tok", "intermediate_size"]),
    "glm4_moe": (GLM, ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size"]),
    "minimax_m2": (MINIMAX, ["num_local_experts", "num_experts_per_tok", "intermediate_size"]),
    "lfm2": (LFM2, ["num_hidden_layers", "num_key_value_heads", "hidden_size", "vocab_size", "conv_L_cache"]),
    "lfm2_moe": (
        LFM2_MOE,
        ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size", "num_dense_layers"],
    ),
    "mistral4": (MISTRAL4, ["num_experts_per_tok", "kv_lora_rank", "moe_intermediate_size"]),
    "mistral3": (SEEING, ["num_hidden_layers", "num_key_value_heads", "hidden_size", "vocab_size"]),
}
OPTIONAL: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gemma4": (GEMMA, ["global_head_dim", "num_global_key_value_heads", "max_position_embeddings"]),
    "gemma4 inputs": (INPUTS, ["hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_kv_shared_layers"]),
    "deepseek_v3": (
        DEEPSEEK,
        [
            "q_lora_rank",
            "n_routed_experts",
            "first_k_dense_replace",
            "n_group",
            "topk_group",
            "n_shared_experts",
            "max_position_embeddings",
        ],
    ),
    "llama": (LLAMA, ["num_key_value_heads", "head_dim", "max_position_embeddings"]),
    "mistral": (llamas.CONFIGS["window"], ["sliding_window"]),
    "qwen2": (llamas.CONFIGS["qwen2 window"], ["sliding_window", "max_window_layers"]),
    "qwen3_moe": (QWEN3_MOE, ["decoder_sparse_step"]),
    "glm4_moe": (GLM, ["first_k_dense_replace", "n_shared_experts", "n_group", "topk_group"]),
    "minimax_m2": (MINIMAX, ["rotary_dim"]),
}
MAY_BE_ZERO = {
    "hidden_size_per_layer_input",
    "num_kv_shared_layers",
    "n_routed_experts",
    "first_k_dense_replace",
    "n_shared_experts",
    "max_window_layers",
    "num_experts",
    "num_dense_layers",
}


@pytest.mark.parametrize("name, key", [(name, key) for name, (_, keys) in REQUIRED.items() for key in keys])
def test_read_config_names_an_integer_that_is_missing_or_none(name: str, key: str) -> None:
    config = REQUIRED[name][0]
    for value in BAD_INTEGERS if key in MAY_BE_ZERO else [*BAD_INTEGERS, 0]:
        assert f" {key} is " in refused(changed(config, **{key: value})), value
    assert f" {key} is missing, expected an integer from " in refused(without(config, key))
    assert f" {key} is None, expected an integer from " in refused(changed(config, **{key: None}))


@pytest.mark.parametrize("name, key", [(name, key) for name, (_, keys) in OPTIONAL.items() for key in keys])
def test_read_config_names_an_integer_with_a_default_that_is_none(name: str, key: str) -> None:
    config = OPTIONAL[name][0]
    for value in BAD_INTEGERS if key in MAY_BE_ZERO else [*BAD_INTEGERS, 0]:
        assert f" {key} is " in refused(changed(config, **{key: value})), value


CONFIGS = {"gemma4": GEMMA, "deepseek_v3": DEEPSEEK, "llama": LLAMA, "qwen3_moe": QWEN3_MOE}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("value", [None, 0, -1e-6, math.nan, math.inf, "1e-6", True, [], 10**400])
def test_read_config_names_an_eps_that_is_none(name: str, value: Any) -> None:
    assert " rms_norm_eps is " in refused(changed(CONFIGS[name], rms_norm_eps=value))


@pytest.mark.parametrize(
    "config, key",
    [
        (GEMMA, "attention_k_eq_v"),
        (GEMMA, "enable_moe_block"),
        (GEMMA, "use_double_wide_mlp"),
        (GEMMA, "tie_word_embeddings"),
        (DEEPSEEK, "rope_interleave"),
        (DEEPSEEK, "norm_topk_prob"),
        (DEEPSEEK, "tie_word_embeddings"),
        (LLAMA, "attention_bias"),
        (LLAMA, "mlp_bias"),
        (LLAMA, "tie_word_embeddings"),
        (llamas.CONFIGS["qwen2"], "use_sliding_window"),
        (QWEN3_MOE, "norm_topk_prob"),
        (QWEN2_MOE, "qkv_bias"),
        (GLM, "use_qk_norm"),
        (GLM, "norm_topk_prob"),
    ],
)
def test_read_config_names_a_boolean_that_is_none(config: dict[str, Any], key: str) -> None:
    for value in (0, 1, "true", "", [True]):
        assert f" {key} is {value!r}, expected true or false" in refused(changed(config, **{key: value}))


def ropes(**full: Any) -> dict[str, Any]:
    tables = copy.deepcopy(GEMMA["text_config"]["rope_parameters"])
    tables[FULL] |= full
    return {"rope_parameters": tables}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu', expected 'gelu_pytorch_tanh'"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu', expected 'gelu_pytorch_tanh'"),
        ({"attention_bias": True}, "attention_bias is True, expected False"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all', expected 'vision'"),
        ({"model_type": "gemma3_text"}, "text_config: model_type is 'gemma3_text', expected one of"),
        ({"num_attention_heads": 5}, "num_attention_heads is 5, expected a multiple of 2 key/value heads"),
        ({"num_global_key_value_heads": 3}, "num_attention_heads is 4, expected a multiple of 3 key/value heads"),
        ({"top_k_experts": 8}, "top_k_experts is 8, expected an integer from 1 to 7"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0, expected a number above 0"),
        ({"final_logit_softcapping": "30"}, "final_logit_softcapping is '30', expected a number above 0"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6, expected an integer from 0 to 5"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, expected a layer of full_attention before those"),
        ({"layer_types": [SLIDING]}, "layer_types has 1 entries, expected 6"),
        ({"layer_types": ["linear_attention"] * 6}, "layer_types has 'linear_attention', expected"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', expected a list of strings"),
        (ropes(rope_type="longrope"), "rope_type is 'longrope', expected one of"),
        (ropes(partial_rotary_factor=1.5), "partial_rotary_factor is 1.5, expected a number above 0 up to 1"),
        (ropes(rope_theta=0), "rope_theta is 0, expected a number above 0"),
        (ropes(factor=-1), "factor is -1, expected a number above 0"),
        ({"rope_parameters": [1]}, "rope_parameters is [1], expected an object"),
        ({"rope_parameters": {FULL: 3}}, "full_attention is 3, expected an object"),
        ({"per_layer_config": [1]}, "per_layer_config is [1], expected an object"),
        ({"per_layer_config": {"2": {"head_dim": 8}}}, "layers of full_attention differ, expected them alike"),
        ({"per_layer_config": {"2": 5}}, "per_layer_config: 2 is 5, expected an object"),
        ({"per_layer_config": {"2": {"head_dim": -8}}}, "head_dim is -8, expected an integer from 1"),
        ({"per_layer_config": {"2": {"sliding_window": 8}}}, "sliding_window is not known, expected it left out"),
    ],
    ids=str,
)
def test_read_config_of_gemma4_refuses(changes: dict[str, Any], words: str) -> None:
    message = refused(changed(GEMMA, **changes))
    assert words in message and message.startswith("config.json: text_config: ")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"attention_bias": True}, "attention_bias is True, expected False"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy', expected 'noaux_tc'"),
        ({"topk_method": "group_limited_greedy"}, "topk_method is 'group_limited_greedy', expected 'noaux_tc'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2, expected 1"),
        ({"n_group": 5}, "n_routed_experts is 12, expected a multiple of n_group (5)"),
        ({"topk_group": 5}, "topk_group is 5, expected at most n_group (4)"),
        ({"n_group": 12}, "n_group is 12, expected two experts or more in each"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7, expected at most 6 (topk_group groups of experts)"),
        ({"num_experts_per_tok": 13}, "num_experts_per_tok is 13, expected an integer from 1 to 12"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0, expected a number above 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "type is 'dynamic', expected one of"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', expected an object"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "factor is 0, expected a number above 0"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 32}},
            "beta_slow is 32, expected at most beta_fast (1)",
        ),
        ({"rope_theta": -5}, "rope_theta is -5, expected a number above 0"),
        ({"qk_rope_head_dim": 7}, "rotary channels, expected an even number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1, expected all of qk_rope_head_dim to turn"),
    ],
    ids=str,
)
def test_read_config_of_deepseek_v3_refuses(changes: dict[str, Any], words: str) -> None:
    assert words in refused(changed(DEEPSEEK, **changes))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2, expected 1"),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "num_attention_heads is 5, expected a multiple of"),
        ({"head_dim": None, "num_attention_heads": 5}, "head_dim is missing, expected it: hidden_size 64 is"),
        ({"head_dim": 7}, "rotary channels, expected an even number"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope', expected one of"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type is 'dynamic', expected one of"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing, expected a number above 0"),
        ({"rope_scaling": llamas.LLAMA3 | {"low_freq_factor": 4}}, "high_freq_factor is 4.0, expected a number above"),
        (
            {"rope_scaling": llamas.LLAMA3 | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings is 0, expected an integer from 1",
        ),
    ],
    ids=str,
)
def test_read_config_of_llama_refuses(changes: dict[str, Any], words: str) -> None:
    assert words in refused(changed(LLAMA, **changes))


@pytest.mark.parametrize(
    "config, changes, words",
    [
        (GLM, {"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
        (GLM, {"topk_method": "greedy"}, "topk_method is 'greedy', expected 'noaux_tc'"),
        (GLM, {"n_group": 2}, "n_routed_experts is 9, expected a multiple of n_group (2)"),
        (GLM, {"topk_group": 4}, "topk_group is 4, expected at most n_group (3)"),
        (GLM, {"routed_scaling_factor": -1}, "routed_scaling_factor is -1, expected a number above 0"),
        (GLM, {"partial_rotary_factor": 0.3}, "gives 7 rotary channels, expected an even number"),
        (MINIMAX, {"head_dim": None}, "head_dim is None, expected an integer"),
        (MINIMAX, {"rotary_dim": 26}, "rotary_dim is 26, expected an integer from 1 to 24"),
        (MINIMAX, {"rotary_dim": 9}, "gives 9 rotary channels, expected an even number"),
        (MINIMAX, {"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
        (MINIMAX, {"use_qk_norm": False}, "use_qk_norm is False, expected True"),
        (MINIMAX, {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head', expected 'per_layer'"),
        (MINIMAX, {"shared_intermediate_size": 64}, "shared_intermediate_size is 64, expected 0"),
        (MINIMAX, {"attn_type_list": [1, 0, 1]}, "attn_type_list has other numbers, expected 1 in every layer"),
        (MINIMAX, {"attention_bias": True}, "attention_bias is True, expected False"),
        (MIXTRAL, {"num_experts_per_tok": 6}, "num_experts_per_tok is 6, expected an integer from 1 to 5"),
        (QWEN2_MOE, {"use_sliding_window": True}, "use_sliding_window is True, expected False"),
    ],
    ids=str,
)
def test_read_config_of_other_experts_refuses(config: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    assert words in refused(changed(config, **changes))


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("moe", {"num_experts_per_tok": 10}, "num_experts_per_tok is 10, expected an integer from 1 to 9"),
        ("moe", {"mlp_only_layers": [True]}, "mlp_only_layers is [True], expected a list of integers"),
        ("moe", {"mlp_only_layers": 2}, "mlp_only_layers is 2, expected a list of integers"),
        ("moe", {"mlp_only_layers": [1], "intermediate_size": None}, "intermediate_size is None, expected an integer"),
        ("moe", {"num_local_experts": 2}, "num_experts_per_tok is 3, expected an integer from 1 to 2"),
        ("qwen3 biases", {"layer_types": [FULL]}, "layer_types has 1 entries, expected 3"),
        ("qwen3 biases", {"layer_types": [FULL, FULL, "chunked"]}, "layer_types has 'chunked', expected"),
    ],
    ids=str,
)
def test_read_config_of_qwen_refuses(name: str, changes: dict[str, Any], words: str) -> None:
    assert words in refused(changed(llamas.CONFIGS[name], **changes))


# -- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", gemma.CONFIGS)
def test_read_config_of_gemma4(name: str) -> None:
    raw = gemma.CONFIGS[name]
    config, text = gemma4.read_config(raw), raw.get("text_config", raw)
    assert (config.dim, config.vocab_size, config.tied) == (64, 263, name != "wide")
    assert config.layer_types == tuple(text["layer_types"])
    assert (config.experts, config.softcap) == (text.get("num_experts", 0), text.get("final_logit_softcapping"))
    assert config.kinds[SLIDING].window == text["sliding_window"] and config.kinds[FULL].window is None
    assert config.kinds[FULL].values == (not text["attention_k_eq_v"])


def test_read_config_of_gemma4_takes_defaults_of_the_family() -> None:
    left_out = ("rope_parameters", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "global_head_dim")
    text = {k: v for k, v in GEMMA["text_config"].items() if k not in (*left_out, "layer_types", "sliding_window")}
    text |= {"sliding_window": 512, "num_hidden_layers": 8}
    config = gemma4.read_config(GEMMA | {"text_config": text})
    assert config.layer_types == (SLIDING,) * 5 + (FULL, SLIDING, FULL)
    assert (config.per_layer_width, config.per_layer_vocab) == (256, 263)
    assert config.kinds[FULL].head_dim == 512 and config.kinds[FULL].rope.width == 512
    assert (config.kinds[FULL].rope.inv_freq[64:] == 0).all() and (config.kinds[FULL].rope.inv_freq[:64] > 0).all()


def test_read_config_of_gemma4_widens_the_layers_that_share() -> None:
    config = gemma4.read_config(INPUTS)
    assert config.mlp_widths == (96,) * 5 + (192,) * 3
    assert gemma4.read_config(changed(INPUTS, num_kv_shared_layers=0)).mlp_widths == (96,) * 8


@pytest.mark.parametrize("overrides, sizes", [({}, (2, 16)), ({"head_dim": 40}, (2, 40))], ids=str)
def test_read_config_of_gemma4_by_layer(overrides: dict[str, int], sizes: tuple[int, int]) -> None:
    """With `per_layer_config` the `global_` keys do not count."""
    config = gemma4.read_config(changed(GEMMA, per_layer_config={"2": overrides, "5": overrides}))
    assert (config.kinds[FULL].kv_heads, config.kinds[FULL].head_dim) == sizes
    assert (config.kinds[SLIDING].kv_heads, config.kinds[SLIDING].head_dim) == (2, 16)


def test_read_config_of_deepseek_v3() -> None:
    config = deepseek_v3.read_config(DEEPSEEK)
    assert (config.experts, config.top_k, config.groups, config.top_groups) == (12, 3, 4, 2)
    assert (config.shared_width, config.dense_layers, config.layers, config.q_rank) == (64, 1, 4, 48)
    assert config.scale == pytest.approx(40**-0.5 * (0.1 * math.log(4) + 1) ** 2) and config.rope.mscale == 1
    assert config.interleaved and config.renormalise
    assert deepseek_v3.read_config(changed(DEEPSEEK, first_k_dense_replace=9)).dense_layers == 4


def test_read_config_of_deepseek_v3_without_experts() -> None:
    config = deepseek_v3.read_config(without(DEEPSEEK, "n_routed_experts"))
    assert (config.experts, config.dense_layers) == (0, 4)


def test_read_config_of_glm_flash() -> None:
    raw = deepseek.CONFIGS["flash"]
    config = deepseek_v3.read_config(raw)
    assert (config.dense_layers, config.routed_scale, config.scale) == (1, 1.7, 32**-0.5)
    assert deepseek_v3.read_config(without(raw, "routed_scaling_factor")).routed_scale == 1.8
    assert deepseek_v3.read_config(without(raw, "first_k_dense_replace")).dense_layers == 1
    assert deepseek_v3.read_config(raw | {"mlp_layer_types": ["dense", "dense", "sparse"]}).dense_layers == 2
    for kinds in (["sparse", "dense", "sparse"], ["dense", "sparse"], ["dense", "sparse", "other"]):
        assert "mlp_layer_types has another order, expected 3" in refused(raw | {"mlp_layer_types": kinds})
    assert " rope_theta is missing, expected a number above 0" in refused(without(raw, "rope_theta"))
    assert " n_routed_experts is missing, expected an integer" in refused(without(raw, "n_routed_experts"))


def test_read_config_of_kimi_k2_is_that_of_deepseek_v3() -> None:
    family = models.family_of({"model_type": "kimi_k2"})
    config = family.read_config(changed(DEEPSEEK, model_type="kimi_k2"))
    assert family is deepseek_v3.FAMILY and config.model_type == "kimi_k2"


@pytest.mark.parametrize(
    "name, windows",
    [
        ("tied", (None,) * 3),
        ("window", (70,) * 3),
        ("mistral", (None,) * 2),
        ("qwen2", (None,) * 3),
        ("qwen2 window", (None, 90, 90)),
        ("qwen3 biases", (40, None, 40)),
        ("moe window", (50, 50)),
    ],
)
def test_read_config_of_llama_windows(name: str, windows: tuple[int | None, ...]) -> None:
    assert llama.read_config(llamas.CONFIGS[name]).windows == windows


def test_read_config_of_qwen2_windows_begin_at_layer_28() -> None:
    config = without(llamas.CONFIGS["qwen2 window"], "max_window_layers") | {"num_hidden_layers": 30}
    assert llama.read_config(config).windows == (None,) * 28 + (90,) * 2


@pytest.mark.parametrize("model_type, width", [("llama", 16), ("qwen2", 16), ("qwen3", 128), ("qwen3_moe", 16)])
def test_read_config_of_llama_takes_the_width_of_heads(model_type: str, width: int) -> None:
    config = llamas.config_of(model_type, **{k: v for k, v in llamas.EXPERTS.items() if k != "head_dim"})
    assert llama.read_config(config).head_dim == width
    assert llama.read_config(config | {"head_dim": 30}).head_dim == 30


def test_read_config_of_qwen3_moe_finds_its_dense_layers() -> None:
    assert llama.read_config(llamas.CONFIGS["mixed moe"]).dense_layers == {0, 2, 3, 4}
    assert llama.read_config(QWEN3_MOE).dense_layers == frozenset()
    spelled = without(QWEN3_MOE, "num_experts") | {"num_local_experts": 9}
    assert llama.read_config(spelled).experts == 9
    assert llama.read_config(changed(QWEN3_MOE, num_experts=0)).dense_layers == {0, 1, 2, 3}


def test_read_config_of_lfm2() -> None:
    assert lfm2.read_config(LFM2).layer_types == ("conv", "full_attention", "conv", "full_attention", "conv")
    assert lfm2.read_config(LFM2).mlp_width == 192  # 1.1 times two thirds of 250, up to a multiple of 32
    assert lfm2.read_config(LFM2 | {"block_auto_adjust_ff_dim": False}).mlp_width == 250
    assert not lfm2.read_config(LFM2 | {"tie_embedding": False}).tied and lfm2.read_config(LFM2_MOE).tied
    assert lfm2.read_config(LFM2_MOE | {"num_dense_layers": 9}).dense_layers == 5
    for config, changes, told in (
        (LFM2, {"full_attn_idxs": None}, " layer_types is None, expected a list of 5 layer kinds"),
        (LFM2, {"layer_types": ["conv"] * 5}, "full_attn_idxs has other layers than layer_types, expected the same"),
        (LFM2, {"block_ffn_dim_multiplier": None}, " block_ffn_dim_multiplier is None, expected a number above 0"),
        (LFM2, {"block_dim": 64}, " block_dim is 64, expected 128 (hidden_size)"),
        (LFM2, {"head_dim": 64}, "hidden_size is 128, expected num_attention_heads (8) times the width of a head"),
        (LFM2, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, " rope_type is 'yarn', expected 'default'"),
        (LFM2_MOE, {"layer_types": ["mamba"] * 5}, "layer_types has 'mamba', expected 'conv', 'full_attention'"),
        (LFM2_MOE, {"conv_bias": True}, " conv_bias is True, expected False"),
        (LFM2_MOE, {"conv_L_cache": 1}, " conv_L_cache is 1, expected an integer from 2 to 64"),
        (LFM2_MOE, {"norm_eps": 0}, " norm_eps is 0, expected a number above 0"),
        (LFM2_MOE, {"use_expert_bias": None}, " use_expert_bias is None, expected true or false"),
        (LFM2_MOE, {"norm_topk_prob": None}, " norm_topk_prob is None, expected true or false"),
    ):
        assert told in refused(config | changes)


def test_read_config_of_ministral3_asks_for_what_readers_disagree_on() -> None:
    def rope(**changes: Any) -> dict[str, Any]:
        table = MINISTRAL["rope_parameters"] | changes
        return MINISTRAL | {"rope_parameters": {key: value for key, value in table.items() if value is not None}}

    assert llama.read_config(MINISTRAL).query_scale == (0.3, 48)
    assert " rope_parameters is missing, expected an object" in refused(without(MINISTRAL, "rope_parameters"))
    for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        assert f"rope_parameters: {key} is missing" in refused(rope(**{key: None}))
    assert "llama_4_scaling_beta is 'x', expected a number" in refused(rope(llama_4_scaling_beta="x"))
    assert " head_dim is missing, expected an integer" in refused(without(MINISTRAL, "head_dim"))
    assert " num_key_value_heads is missing" in refused(without(MINISTRAL, "num_key_value_heads"))
    assert " sliding_window is 64, expected null" in refused(MINISTRAL | {"sliding_window": 64})
    assert "layer_types has 'sliding_attention', expected" in refused(MINISTRAL | {"layer_types": [SLIDING] * 3})
    assert " attention_bias is True, expected False" in refused(MINISTRAL | {"attention_bias": True})


def test_read_config_of_mistral4() -> None:
    def rope(**changes: Any) -> dict[str, Any]:
        return MISTRAL4 | {"rope_parameters": MISTRAL4["rope_parameters"] | changes}

    config = deepseek_v3.read_config(MISTRAL4)
    assert (config.query_scale, config.softmax, config.rope.width) == ((0.3, 48), True, 8)
    assert config.scale == pytest.approx(40**-0.5 * (0.1 * math.log(8) + 1) ** 2)
    sees = deepseek.CONFIGS["mistral sees"]
    assert models.family_of(sees) is deepseek_v3.FAMILY and deepseek_v3.read_config(sees).model_type == "mistral4"
    assert "partial_rotary_factor is 0.5, expected 0.2 (qk_rope_head_dim of a head)" in refused(
        rope(partial_rotary_factor=0.5)
    )
    assert "llama_4_scaling_beta is None, expected a number" in refused(rope(llama_4_scaling_beta=None))
    assert " rope_theta is missing" in refused(rope(rope_theta=None))
    assert " n_group is 2, expected 1" in refused(MISTRAL4 | {"n_group": 2})
    for key in ("rope_parameters", "n_routed_experts", "n_shared_experts"):
        assert f" {key} is missing, expected an" in refused(without(MISTRAL4, key))


def test_read_config_of_a_wrapper_is_that_of_its_text_model() -> None:
    assert models.family_of(SEEING) is llama.FAMILY
    assert llama.read_config(SEEING).model_type == "ministral3" and llama.read_config(SEEING).tied
    assert llama.read_config(llamas.CONFIGS["mistral sees"]).model_type == "mistral"
    untold = without(SEEING, "tie_word_embeddings")
    config = llama.read_config(untold)
    assert config.tied and not llama.read_config(untold | {"tie_word_embeddings": False}).tied
    assert llama.FAMILY.mlx_rules(untold, config).config["text_config"]["tie_word_embeddings"] is True
    apart = changed(SEEING, tie_word_embeddings=False)
    for tied in (True, False):
        assert llama.read_config(apart | {"tie_word_embeddings": tied}).tied == tied
    assert " text_config is missing, expected an object" in refused({"model_type": "mistral3"})
    assert "text_config: model_type is 'qwen3', expected one of 'mistral', 'ministral3'" in refused(
        changed(SEEING, model_type="qwen3")
    )


@pytest.mark.parametrize(
    "read, config",
    [(gemma4.read_config, GEMMA), (deepseek_v3.read_config, DEEPSEEK), (llama.read_config, QWEN3_MOE)],
    ids=["gemma4", "deepseek_v3", "qwen3_moe"],
)
def test_caches_have_one_layout_per_layer(read: Callable[[dict[str, Any]], Any], config: dict[str, Any]) -> None:
    family = models.family_of(config)
    text = config.get("text_config", config)
    assert len(family.caches(read(config))) == text["num_hidden_layers"]


def test_a_wrapper_of_gemma_ties_a_head_whose_text_model_does_not() -> None:
    apart = changed(GEMMA, tie_word_embeddings=False)
    assert gemma4.read_config(apart | {"tie_word_embeddings": True}).tied
    assert not gemma4.read_config(apart | {"tie_word_embeddings": False}).tied
    nested = changed(gemma3s.CONFIGS["nested"], tie_word_embeddings=False)
    assert gemma3.read_config(nested | {"tie_word_embeddings": True}).tied
    assert not gemma3.read_config(nested | {"tie_word_embeddings": False}).tied


WHOLE = {"llama": LLAMA, "qwen3_moe": QWEN3_MOE, "mixtral": MIXTRAL, "lfm2": LFM2, "gemma3": gemma3s.CONFIGS["text"]}


@pytest.mark.parametrize("name", WHOLE)
def test_read_config_refuses_that_a_part_of_a_head_turns(name: str) -> None:
    """transformers and mlx-lm read past the key in these."""
    config = WHOLE[name]
    models.family_of(config).read_config(config | {"partial_rotary_factor": 1.0})
    message = refused(config | {"partial_rotary_factor": 0.5})
    assert message == "config.json: partial_rotary_factor is 0.5, expected 1: all channels of a head turn"
