"""DeepSeek-V3 against transformers (Hugging Face files) and mlx-lm (converted files), both in float32."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import penstock
from penstock import ops
from penstock.models import deepseek_v3
from penstock.models.layers import apply_rope
from penstock.models.rope import Rope
from penstock.ops.array import Array
from penstock.quant import QuantizedTensor
from tests.models.common import BRANCH, VOCAB, error, seeing
from tests.models.made import (
    FOUR,
    LONG,
    SHORT,
    Case,
    With,
    check_cosines,
    check_several,
    converted,
    decoded,
    in_pieces,
    load,
    make,
    reference_error,
    torch_logits,
    torch_model,
)

FACTORS = {"o_proj": BRANCH, "down_proj": BRANCH}


def config_of(**changes: Any) -> dict[str, Any]:
    """config.json as released, every size another one."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 160,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "n_routed_experts": 12,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return config | changes


YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 8.0, "original_max_position_embeddings": 256}


MISTRAL_ROPE = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
MISTRAL_ROPE |= {"original_max_position_embeddings": 48}


def mistral_config(**changes: Any) -> dict[str, Any]:
    """config.json of Mistral Small 4's text model, every size another one."""
    left = ("scoring_func", "topk_method", "moe_layer_freq", "rope_theta", "rope_scaling", "num_nextn_predict_layers")
    config = {key: value for key, value in config_of().items() if key not in left}
    own = {
        "architectures": ["Mistral4ForCausalLM"],
        "model_type": "mistral4",
        "num_hidden_layers": 3,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_parameters": MISTRAL_ROPE,
    }
    return config | own | changes


CONFIGS: dict[str, dict[str, Any]] = {
    "v3": config_of(),
    # q in one piece, halves instead of neighbours turn, weights as they come, other gains, norms with another eps
    "plain": config_of(
        q_lora_rank=None,
        rope_interleave=False,
        norm_topk_prob=False,
        rms_norm_eps=1e-3,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        num_hidden_layers=2,
        n_shared_experts=1,
        rope_scaling=None,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    ),
    # as transformers itself writes it: everything in rope_parameters, no gain on scores; latent wider than its head
    "gain": config_of(
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        kv_lora_rank=96,
        qk_nope_head_dim=16,
        qk_rope_head_dim=12,
        v_head_dim=20,
        n_routed_experts=9,
        n_group=3,
        topk_group=2,
        num_experts_per_tok=6,
        rope_scaling=None,
        rope_parameters=YARN,
        rms_norm_eps=1e-4,
    ),
    # GLM-4.7-Flash: values wider than keys, no groups of experts, no YaRN
    "flash": config_of(
        architectures=["Glm4MoeLiteForCausalLM"],
        model_type="glm4_moe_lite",
        num_hidden_layers=3,
        qk_nope_head_dim=24,
        v_head_dim=40,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        rope_scaling=None,
        rope_theta=1e6,
        partial_rotary_factor=1.0,
    ),
    # Mistral Small 4: softmax routing, queries that grow with their position
    "mistral": mistral_config(rope_parameters=MISTRAL_ROPE | {"partial_rotary_factor": 0.2}),
    "mistral sees": seeing(
        mistral_config(num_hidden_layers=2, norm_topk_prob=False, routed_scaling_factor=1.3, q_lora_rank=None)
    ),
    # no YaRN
    "default": config_of(
        rope_scaling=None, num_hidden_layers=2, n_routed_experts=8, topk_group=3, num_experts_per_tok=6
    ),
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @functools.cache
    def case(name: str) -> Case:
        return make(tmp_path_factory.mktemp(name), CONFIGS[name], FACTORS)

    return case


@pytest.fixture(scope="module")
def mlx(hf: Callable[[str], Case]) -> Callable[[str], Case]:
    @functools.cache
    def case(name: str) -> Case:
        source = hf(name)
        return converted(source, source.folder / "mlx", **FOUR)

    return case


def rewritten(case: Case, folder: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], None]) -> Path:
    """A copy of a model folder with another config or other tensors."""
    config = json.loads((case.folder / "config.json").read_text())
    weights = load_file(case.folder / "model.safetensors")
    change(config, weights)
    for file in case.folder.glob("*.json"):
        if file.name not in ("config.json", "model.safetensors.index.json"):
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def forced(monkeypatch: pytest.MonkeyPatch, expands: bool | None) -> None:
    """Prompts in the expanded form, in the absorbed form, or as the model chooses."""
    if expands is not None:
        monkeypatch.setattr(deepseek_v3, "_break_even", lambda config: 0 if expands else 1 << 30)


# -- whole sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expands", [None, True, False], ids=["chosen", "expanded", "absorbed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(
    name: str, expands: bool | None, hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(monkeypatch, expands)
    case = hf(name)
    got = load(case.folder).logits(case.tokens)
    assert error(got[:200], case.want[:200]) <= SHORT
    assert error(got, case.want) <= LONG


@pytest.mark.parametrize("expands", [True, False], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_the_reference_are_those_of_transformers(
    name: str, expands: bool, hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(monkeypatch, expands)
    case = hf(name)
    assert error(load(case.folder, "reference").logits(case.tokens[:80]), case.want[:80]) <= SHORT


@pytest.mark.parametrize("expands", [True, False], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("name", ["v3", "mistral", "mistral sees"])
def test_logits_are_those_of_mlx(
    name: str, expands: bool, mlx: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(monkeypatch, expands)
    case = mlx(name)
    assert error(load(case.folder).logits(case.tokens), case.want) <= SHORT
    assert error(load(case.folder, "reference").logits(case.tokens[:30]), case.want[:30]) <= SHORT


def test_logits_of_unquantized_files_are_those_of_mlx(hf: Callable[[str], Case]) -> None:
    source = hf("v3")
    case = converted(source, source.folder / "unquantized")
    assert any(name.endswith("embed_q.weight") for name in load_file(case.folder / "model.safetensors"))
    assert error(load(case.folder).logits(case.tokens), case.want) <= SHORT


def test_logits_with_int8_activations_point_the_same_way(mlx: Callable[[str], Case]) -> None:
    case = mlx("v3")
    check_cosines(load(case.folder, "cpu", "int8").logits(case.tokens), case.want)


def test_both_forms_are_used_on_long_prompts() -> None:
    """So that the tests above and below mix them."""
    for name in ("v3", "gain"):
        config = deepseek_v3.read_config(CONFIGS[name])
        assert 1 <= deepseek_v3._break_even(config) < 256
        assert 512 <= deepseek_v3._most_expanded(config) < 1 << 30  # keys and values would not fit


# -- in pieces, token by token, together -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v3", "gain", "mistral"])
@pytest.mark.parametrize("cuts", [(1,), (3, 4, 5, 70, 255, 257), (77, 130, 513, 599)], ids=str)
def test_prefill_in_any_pieces_is_right(cuts: tuple[int, ...], name: str, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    assert error(in_pieces(load(case.folder), case.tokens, cuts), case.want) <= LONG


@pytest.mark.parametrize("expands", [None, True, False], ids=["chosen", "expanded", "absorbed"])
@pytest.mark.parametrize("name", ["v3", "plain", "gain"])
@pytest.mark.parametrize("prompt, end", [(0, 20), (5, 40), (250, 270), (512, 530)])
def test_decode_token_by_token_is_right(
    name: str, prompt: int, end: int, expands: bool | None, hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(monkeypatch, expands)
    case = hf(name)
    rows = decoded(load(case.folder), case.tokens[:end], prompt)
    assert error(rows, case.want[max(0, prompt - 1) : end]) <= LONG


def test_decode_of_converted_files_is_right(mlx: Callable[[str], Case]) -> None:
    case = mlx("v3")
    assert error(decoded(load(case.folder), case.tokens[:90], 60), case.want[59:90]) <= SHORT


@pytest.mark.parametrize("name, prompt, end", [("mistral", 0, 20), ("mistral", 90, 110), ("mistral sees", 512, 530)])
def test_decode_of_mistral_token_by_token_is_right(name: str, prompt: int, end: int, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    rows = decoded(load(case.folder), case.tokens[:end], prompt)
    assert error(rows, case.want[max(0, prompt - 1) : end]) <= LONG


@pytest.mark.parametrize("name, activations", [("v3", "float32"), ("v3", "int8"), ("mistral", "int8")])
def test_decode_of_several_gives_the_bits_of_each_alone(
    name: str, activations: str, mlx: Callable[[str], Case]
) -> None:
    check_several(load(mlx(name).folder, "cpu", activations), (1, 254, 303))


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def older(mlx: Callable[[str], Case], hf: Callable[[str], Case], tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A file of an older mlx-lm, with kv_b_proj quantized whole; the oracle is transformers on dequantized weights."""
    source, case = hf("v3"), mlx("v3")
    dense = load_file(source.folder / "model.safetensors")

    def whole(config: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
        for name in [name for name in weights if ".embed_q." in name or ".unembed_out." in name]:
            del weights[name]
        for name in [name for name in dense if name.endswith("kv_b_proj.weight")]:
            q = penstock.quantize(dense[name].astype(np.float32), bits=4, group_size=32)
            path = name.removesuffix("weight")
            weights |= dict(zip((path + "weight", path + "scales", path + "biases"), q.arrays, strict=True))

    folder = rewritten(case, tmp_path_factory.mktemp("older"), whole)
    return Case(folder, case.tokens, dequantized_logits(folder, case.tokens))


def dequantized_logits(folder: Path, tokens: list[int]) -> np.ndarray:
    """Of transformers' float32 model with the dequantized weights of a converted file."""
    import torch

    stored = load_file(folder / "model.safetensors")

    def tensor(path: str) -> np.ndarray:
        weight = stored[path + ".weight"]
        if path + ".scales" not in stored:
            return weight.astype(np.float32)
        scales = stored[path + ".scales"]
        arrays = (a.astype(np.float32) for a in (scales, stored[path + ".biases"]))
        return penstock.dequantize(QuantizedTensor(weight, *arrays, bits=4, group_size=32))

    model = torch_model(folder)
    for name, target in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            path = name.removesuffix("experts.gate_up_proj") + "switch_mlp."
            value = np.concatenate([tensor(path + "gate_proj"), tensor(path + "up_proj")], axis=1)
        elif name.endswith("experts.down_proj"):
            value = tensor(name.replace("experts.down_proj", "switch_mlp.down_proj"))
        elif name.endswith("correction_bias"):
            value = stored[name]
        else:
            value = tensor(name.removesuffix(".weight"))
        target.copy_(torch.from_numpy(value.astype(np.float32)))
    return torch_logits(model, tokens)


@pytest.mark.parametrize("expands", [None, True, False], ids=["chosen", "expanded", "absorbed"])
def test_logits_of_a_whole_quantized_kv_b_are_right(
    expands: bool | None, older: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(monkeypatch, expands)
    assert isinstance(load(older.folder).engine.model.weights.layers[0].attention.key, QuantizedTensor)
    assert error(load(older.folder).logits(older.tokens), older.want) <= SHORT
    assert error(load(older.folder, "reference").logits(older.tokens[:30]), older.want[:30]) <= SHORT
    assert error(decoded(load(older.folder), older.tokens[:60], 40), older.want[39:60]) <= SHORT


def test_decode_of_several_with_a_whole_quantized_kv_b_gives_the_bits_of_each_alone(older: Case) -> None:
    check_several(load(older.folder), (1, 90, 259))


def test_layers_beyond_the_last_are_skipped(hf: Callable[[str], Case], tmp_path: Path) -> None:
    """Multi-token prediction: the released file has one layer more than the config says."""
    case = hf("v3")

    def longer(config: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
        config["num_nextn_predict_layers"] = 1
        for name in [name for name in weights if name.startswith("model.layers.3.")]:
            weights[name.replace(".3.", ".4.", 1)] = weights[name]
        weights["model.layers.4.eh_proj.weight"] = np.zeros((64, 128), np.float32)

    llm = load(rewritten(case, tmp_path, longer), "reference")
    head, notice = llm.notices
    assert "the head that drafts is not used" in head and "tensors of layers from 4 on" in notice
    assert error(llm.logits(case.tokens[:20]), case.want[:20]) <= SHORT


@pytest.mark.parametrize("said", [True, False], ids=["said by config.json", "seen in the file"])
def test_fp8_files_are_loaded_as_bfloat16(said: bool, hf: Callable[[str], Case], tmp_path: Path) -> None:
    case = hf("v3")
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}

    def change(config: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
        if said:
            config["quantization_config"] = fp8
        for name in [name for name in weights if name.endswith("o_proj.weight")]:
            weights[name] = weights[name].astype(ml_dtypes.float8_e4m3fn)
            weights[name + "_scale_inv"] = np.full((1, 1), 1.5, np.float32)

    def dense(_config: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
        for name in [name for name in weights if name.endswith("o_proj.weight")]:
            rounded = weights[name].astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            weights[name] = (rounded * np.float32(1.5)).astype(ml_dtypes.bfloat16)

    (tmp_path / "fp8").mkdir()
    (tmp_path / "dense").mkdir()
    llm = penstock.load(rewritten(case, tmp_path / "fp8", change), device="reference")
    want = penstock.load(rewritten(case, tmp_path / "dense", dense), device="reference")
    np.testing.assert_array_equal(llm.logits(case.tokens[:9]), want.logits(case.tokens[:9]))
    assert any("FP8 is held in the memory of bfloat16; penstock convert -q" in notice for notice in llm.notices) == said


@pytest.mark.parametrize("groups", [1, 4])
def test_no_shared_experts_and_no_bias(groups: int, tmp_path: Path) -> None:
    """Leaving them out is what zeros do."""

    def zeros(model: Any) -> None:
        for layer in model.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.zero_()
            layer.mlp.shared_experts.down_proj.weight.data.zero_()

    def without(config: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
        config["n_shared_experts"] = None
        for name in [name for name in weights if "shared_experts" in name or name.endswith("correction_bias")]:
            del weights[name]

    config = config_of(num_hidden_layers=2, n_group=groups, topk_group=(groups + 1) // 2)
    case = make(tmp_path / "whole", config, FACTORS, count=40, change=zeros)
    (tmp_path / "without").mkdir()
    llm = load(rewritten(case, tmp_path / "without", without))
    assert not llm.notices
    assert error(llm.logits(case.tokens), case.want) <= SHORT


def test_only_dense_layers(tmp_path: Path) -> None:
    case = make(tmp_path, config_of(first_k_dense_replace=5, num_hidden_layers=2), FACTORS, count=40)
    assert error(load(tmp_path).logits(case.tokens), case.want) <= SHORT


def test_a_tied_head_is_the_table(tmp_path: Path) -> None:
    config = config_of(tie_word_embeddings=True, num_hidden_layers=2)
    case = make(tmp_path, config, {"o_proj": BRANCH / 8, "down_proj": BRANCH / 8, "embed_tokens": 1 / 8}, count=40)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert error(load(tmp_path).logits(case.tokens), case.want) <= SHORT


# -- wrong readings: what the bounds above would show ----------------------------------------------------------------


def best_of_each_group(
    scores: Array, bias: Array, groups: int, top_groups: int, k: int, renormalise: bool, scale: float, **_: bool
) -> tuple[Array, Array]:
    """Groups ranked by their best expert instead of the sum of the best two."""
    s = 1 / (1 + np.exp(-scores.astype(np.float64)))
    c = s + bias
    best = c.reshape(len(c), groups, -1).max(axis=-1)
    kept = np.argsort(-best, axis=-1, kind="stable")[:, :top_groups]
    mask = np.full(best.shape, -np.inf)
    np.put_along_axis(mask, kept, 0, axis=1)
    ids = np.argsort(-(c + np.repeat(mask, c.shape[1] // groups, axis=1)), axis=1, kind="stable")[:, :k]
    weights = np.take_along_axis(s, ids, axis=1)
    weights = weights / weights.sum(axis=1, keepdims=True) * scale
    return ids.astype(np.int32), weights.astype(np.float32)


def bias_kept(
    scores: Array, bias: Array, groups: int, top: int, k: int, renormalise: bool, scale: float, **_: bool
) -> Any:
    ids, _ = ops.moe_group_route(scores, bias, groups, top, k, renormalise, scale)
    weights = np.take_along_axis(1 / (1 + np.exp(-scores)) + bias, ids, axis=1)
    return ids, (weights / weights.sum(axis=1, keepdims=True) * scale).astype(np.float32)


WRONG: dict[str, dict[str, Any]] = {
    "half-split rope on the stored order": {"_halves": lambda config: np.arange(config.rope_dim)},
    "group score of the best one": {"ops": With(moe_group_route=best_of_each_group)},
    "bias kept in the weights": {"ops": With(moe_group_route=bias_kept)},
    "no bias": {"ops": With(moe_group_route=lambda s, b, *rest, **more: ops.moe_group_route(s, None, *rest, **more))},
    "latent not normed": {"ops": With(rms_norm=lambda x, w, eps: x if x.shape[-1] == 32 else ops.rms_norm(x, w, eps))},
    "keys not turned": {"apply_rope": lambda step, x, rope: x.copy() if x.shape[1] == 1 else apply_rope(step, x, rope)},
}


@pytest.mark.parametrize("reading", WRONG)
def test_a_wrong_reading_breaks_the_bound(
    reading: str, hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, wrong in WRONG[reading].items():
        monkeypatch.setattr(deepseek_v3, name, wrong)
    assert reference_error(hf("v3")) > 5e-5  # the wider of the two promises


def test_best_of_each_group_is_the_right_router_but_for_its_groups() -> None:
    """With one group the wrong router above gives the right answer: it shows its one mistake and no other."""
    scores, bias = np.random.default_rng(0).standard_normal((2, 50, 12)).astype(np.float32)
    got = best_of_each_group(scores, bias[0], 1, 1, 3, True, 1.7)
    want = ops.moe_group_route(scores, bias[0], 1, 1, 3, True, 1.7)
    np.testing.assert_array_equal(np.sort(got[0]), np.sort(want[0]))
    np.testing.assert_allclose(np.sort(got[1]), np.sort(want[1]), rtol=1e-5)


WRONG_CONFIG: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "no score gain": ("v3", lambda config: {"scale": 40**-0.5}),
    "gain on cos and sin too": ("v3", lambda config: {"rope": dataclasses.replace(config.rope, mscale=1.1386294)}),
    "plain table": ("v3", lambda config: {"rope": Rope(ops.rope_inv_freq(8, 1e4), 8, config.rope.mscale)}),
    "no renormalisation": ("v3", lambda config: {"renormalise": False}),
    "renormalisation": ("plain", lambda config: {"renormalise": True}),
    "no scale of the experts": ("v3", lambda config: {"routed_scale": 1.0}),
    "all groups": ("v3", lambda config: {"top_groups": 4}),
    "no gain on cos and sin": ("gain", lambda config: {"rope": dataclasses.replace(config.rope, mscale=1.0)}),
    "queries of one size": ("mistral", lambda config: {"query_scale": None}),
    "steps of queries elsewhere": ("mistral", lambda config: {"query_scale": (0.3, 49)}),
    "sigmoid routing": ("mistral", lambda config: {"softmax": False}),
    "no gain of Mistral's scores": ("mistral", lambda config: {"scale": 40**-0.5}),
    "weights of Mistral renormalised": ("mistral sees", lambda config: {"renormalise": True}),
    "no scale of Mistral's experts": ("mistral sees", lambda config: {"routed_scale": 1.0}),
    "neighbours turned": ("plain", lambda config: {"interleaved": True}),
}


@pytest.mark.parametrize("reading", WRONG_CONFIG)
def test_a_wrong_config_breaks_the_bound(
    reading: str, hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change = WRONG_CONFIG[reading]
    right = deepseek_v3.read_config

    def wrong(raw: dict[str, Any]) -> Any:
        config = right(raw)
        return dataclasses.replace(config, **change(config))

    monkeypatch.setattr(deepseek_v3, "FAMILY", dataclasses.replace(deepseek_v3.FAMILY, read_config=wrong))
    assert reference_error(hf(name)) > 5e-5


def test_norms_inside_with_the_eps_of_the_config_break_the_bound(
    hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers and mlx-lm have 1e-6 there, whatever rms_norm_eps says."""
    assert reference_error(hf("plain")) <= SHORT
    monkeypatch.setattr(deepseek_v3, "_INNER_EPS", 1e-3)
    assert reference_error(hf("plain")) > 1e-5
