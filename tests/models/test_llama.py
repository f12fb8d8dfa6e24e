"""Llama, Mistral, Qwen, Mixtral, GLM-4.5 and MiniMax-M2 against transformers (Hugging Face files) and mlx-lm
(converted files).
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock import ops
from penstock.models import llama
from penstock.models.layers import add_blocks
from penstock.models.rope import Rope
from penstock.models.step import PAGE, attend
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


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """config.json as released, every size another one."""
    config = {
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return config | changes


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
EXPERTS = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "moe_intermediate_size": 32,
    "num_experts": 9,
    "num_experts_per_tok": 3,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
GLM = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": False,
    "moe_intermediate_size": 32,
    "n_routed_experts": 9,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}
MINIMAX = {
    "num_attention_heads": 6,
    "head_dim": 24,
    "rotary_dim": 10,
    "intermediate_size": 32,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
    "attn_type_list": [1, 1, 1],
}

MINISTRAL = {
    "head_dim": 24,
    "rope_theta": None,
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 1e4,
        "factor": 16.0,
        "original_max_position_embeddings": 48,
        "max_position_embeddings": 768,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3,
    },
    "sliding_window": None,
}


CONFIGS: dict[str, dict[str, Any]] = {
    # SmolLM2: as many key heads as a third of the query heads, tied
    "tied": config_of(
        "llama", hidden_size=96, num_attention_heads=6, rms_norm_eps=1e-6, tie_word_embeddings=True, pretraining_tp=1
    ),
    # Llama 3.1: heads whose widths do not sum to the model's
    "llama3": config_of(
        "llama", head_dim=20, num_attention_heads=8, num_key_value_heads=1, rope_theta=500.0, rope_scaling=LLAMA3
    ),
    "linear": config_of("llama", rope_scaling={"type": "linear", "factor": 3.0}, num_key_value_heads=None),
    "yarn": config_of("llama", rope_scaling=YARN, head_dim=32),
    "biases": config_of("llama", attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    "window": config_of("mistral", sliding_window=70, head_dim=24),
    "wide window": config_of("mistral", sliding_window=301, num_hidden_layers=2),
    "mistral": config_of("mistral", sliding_window=None, num_hidden_layers=2),
    "qwen2": config_of("qwen2", use_sliding_window=False, sliding_window=32, max_window_layers=1, rms_norm_eps=1e-6),
    # the last two layers see a window
    "qwen2 window": config_of("qwen2", use_sliding_window=True, sliding_window=90, max_window_layers=1),
    "qwen3": config_of("qwen3", head_dim=40, attention_bias=False, rope_theta=1e6, tie_word_embeddings=True),
    "qwen3 biases": config_of(
        "qwen3",
        head_dim=12,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=40,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "moe": config_of("qwen3_moe", **EXPERTS),
    # dense layers by a list and by a step, weights as they come
    "mixed moe": config_of(
        "qwen3_moe",
        **EXPERTS
        | {
            "num_hidden_layers": 5,
            "mlp_only_layers": [3],
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "head_dim": 16,
        },
    ),
    # Qwen1.5-MoE and Qwen2-57B: biases, a shared expert with a gate
    "qwen2 moe": config_of(
        "qwen2_moe",
        **{key: EXPERTS[key] for key in EXPERTS if key != "head_dim"}
        | {"num_hidden_layers": 3, "norm_topk_prob": False},
        shared_expert_intermediate_size=96,
        use_sliding_window=False,
        sliding_window=32,
        max_window_layers=1,
    ),
    # as transformers writes it
    "qwen2 moe saved": config_of(
        "qwen2_moe",
        **{key: EXPERTS[key] for key in EXPERTS if key != "head_dim"} | {"num_hidden_layers": 2},
        shared_expert_intermediate_size=64,
        use_sliding_window=False,
        sliding_window=0,
        layer_types=["full_attention"] * 2,
    ),
    "mixtral": config_of(
        "mixtral", num_local_experts=5, num_experts_per_tok=2, sliding_window=None, rope_theta=1e6, intermediate_size=96
    ),
    "mixtral window": config_of(
        "mixtral", num_local_experts=3, num_experts_per_tok=3, num_hidden_layers=2, sliding_window=60
    ),
    # GLM-4.5 and 4.6: half of each head turns, normed heads, two dense layers, groups of experts
    "glm": config_of("glm4_moe", **GLM | {"n_group": 3, "topk_group": 2, "use_qk_norm": True}),
    # GLM-4.5-Air: no norms of heads
    "glm air": config_of("glm4_moe", **GLM | {"first_k_dense_replace": 1, "num_hidden_layers": 2}),
    "minimax": config_of("minimax_m2", **MINIMAX),
    # Ministral 3: the text model alone, tied with its vision tower, and Mistral Small 3.1
    "ministral": config_of("ministral3", **MINISTRAL),
    "ministral sees": seeing(
        config_of("ministral3", **MINISTRAL, tie_word_embeddings=True, num_hidden_layers=2), tie_word_embeddings=True
    ),
    "mistral sees": seeing(config_of("mistral", sliding_window=None, num_hidden_layers=2, head_dim=20)),
    # all layers see the window, whatever max_window_layers says
    "moe window": config_of(
        "qwen3_moe",
        **EXPERTS | {"num_hidden_layers": 2, "num_experts_per_tok": 9, "attention_bias": True},
        use_sliding_window=True,
        sliding_window=50,
        max_window_layers=1,
    ),
}
CONVERTED = ("tied", "llama3", "linear", "yarn", "biases", "mistral", "qwen2", "qwen3", "moe", "mixed moe")
CONVERTED += ("qwen2 moe", "mixtral", "glm", "glm air", "minimax", "ministral", "ministral sees", "mistral sees")
LONGER = [name for name in CONFIGS if "window" in name] + ["tied", "qwen3 biases", "moe"]


def factors(name: str) -> dict[str, float]:
    """Small residual branches; those of a tied model are in units of its table, which is also the head."""
    text = CONFIGS[name].get("text_config", CONFIGS[name])
    size = text["hidden_size"] ** -0.5 if text["tie_word_embeddings"] else 1.0
    branch = BRANCH * size
    return {
        "o_proj": branch,
        "down_proj": branch,
        "w2": branch,
        "o_proj.bias": branch,
        "down_proj.bias": branch,
        "embed_tokens": size,
    }


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @functools.cache
    def case(name: str) -> Case:
        count = 600 if name in LONGER else 200
        return make(tmp_path_factory.mktemp("hf"), CONFIGS[name], factors(name), count=count)

    return case


@pytest.fixture(scope="module")
def mlx(hf: Callable[[str], Case]) -> Callable[[str], Case]:
    @functools.cache
    def case(name: str) -> Case:
        source = hf(name)
        return converted(source, source.folder / "mlx", **FOUR)

    return case


# -- whole sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    got = load(case.folder).logits(case.tokens)
    assert error(got[:200], case.want[:200]) <= SHORT
    assert error(got, case.want) <= LONG


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_the_reference_are_those_of_transformers(name: str, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    assert error(load(case.folder, "reference").logits(case.tokens[:100]), case.want[:100]) <= SHORT


def test_embeddings_are_means_of_the_hidden_state_of_transformers(hf: Callable[[str], Case]) -> None:
    case = hf("window")
    torch, model = pytest.importorskip("torch"), torch_model(case.folder, load=True)
    texts = [case.tokens[:n] for n in (1, 90, 600)]
    with torch.no_grad():
        found = [model(torch.tensor([t]), output_hidden_states=True).hidden_states[-1][0].numpy() for t in texts]
    means = [rows.mean(axis=0, dtype=np.float64) for rows in found]
    want = np.array([mean / np.linalg.norm(mean) for mean in means])
    assert error(load(case.folder).embed(texts), want) <= SHORT
    assert error(load(case.folder, "reference").embed(texts[:2]), want[:2]) <= SHORT


@pytest.mark.parametrize("name", CONVERTED)
def test_logits_are_those_of_mlx(name: str, mlx: Callable[[str], Case]) -> None:
    case = mlx(name)
    assert error(load(case.folder).logits(case.tokens), case.want) <= SHORT
    assert error(load(case.folder, "reference").logits(case.tokens[:30]), case.want[:30]) <= SHORT


@pytest.mark.parametrize("name", ["tied", "moe"])
def test_logits_of_unquantized_files_are_those_of_mlx(name: str, hf: Callable[[str], Case]) -> None:
    source = hf(name)
    case = converted(source, source.folder / "unquantized", count=60)
    assert error(load(case.folder).logits(case.tokens), case.want) <= SHORT


@pytest.mark.parametrize("name", ["biases", "qwen2", "qwen3", "moe"])
def test_logits_with_int8_activations_point_the_same_way(name: str, mlx: Callable[[str], Case]) -> None:
    case = mlx(name)
    check_cosines(load(case.folder, "cpu", "int8").logits(case.tokens), case.want)


@pytest.mark.parametrize("name", ["tied", "llama3", "mixed moe", "ministral"])
def test_logits_of_a_config_that_transformers_saved_are_the_same(
    name: str, hf: Callable[[str], Case], tmp_path: Path
) -> None:
    """Newer versions write `rope_parameters`, and `num_local_experts` in the place of `num_experts`."""
    import transformers

    case = hf(name)
    transformers.AutoConfig.from_pretrained(case.folder).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in config and "num_experts" not in config
    for file in case.folder.glob("*.*"):
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    assert reference_error(case._replace(folder=tmp_path)) <= SHORT


# -- in pieces, token by token, together -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied", "window", "wide window", "moe"])
@pytest.mark.parametrize("cuts", [(1,), (3, 69, 70, 71, 255, 257), (77, 130, 302, 513, 599)], ids=str)
def test_prefill_in_any_pieces_is_right(cuts: tuple[int, ...], name: str, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    assert error(in_pieces(load(case.folder), case.tokens, cuts), case.want) <= LONG


@pytest.mark.parametrize("name", LONGER)
@pytest.mark.parametrize("prompt, end", [(0, 40), (250, 330), (555, 575)])
def test_decode_token_by_token_is_right(name: str, prompt: int, end: int, hf: Callable[[str], Case]) -> None:
    """Over the edge of the window, of a page, and of a page that has left the window."""
    case = hf(name)
    rows = decoded(load(case.folder), case.tokens[:end], prompt)
    assert error(rows, case.want[max(0, prompt - 1) : end]) <= LONG


@pytest.mark.parametrize("name", sorted({*CONFIGS} - {*LONGER}))
def test_decode_after_a_short_prompt_is_right(name: str, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    assert error(decoded(load(case.folder), case.tokens[:30], 5), case.want[4:30]) <= SHORT


@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("name", ["biases", "qwen2", "qwen3", "mixed moe", "glm", "minimax", "ministral"])
def test_decode_of_several_gives_the_bits_of_each_alone(
    name: str, activations: str, mlx: Callable[[str], Case]
) -> None:
    check_several(load(mlx(name).folder, "cpu", activations), (1, 254, 303))


def test_decode_of_several_with_a_window_gives_the_bits_of_each_alone(hf: Callable[[str], Case]) -> None:
    check_several(load(hf("window").folder), (1, 69, 330))


@pytest.mark.parametrize("name, window", [("window", 70), ("wide window", 301)])
def test_pages_that_have_left_the_window_go_back(name: str, window: int, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    engine = load(case.folder).engine
    pool = engine.caches.pools[window]
    assert list(engine.caches.pools) == [window]
    before = pool.used
    sequence = engine.open()
    for _ in range(19):
        engine.prefill(sequence, case.tokens[:100])
        assert pool.used - before <= -(-window // PAGE) + 1
    engine.close(sequence)
    assert pool.used == before


# -- files -----------------------------------------------------------------------------------------------------------


def test_load_uses_a_head_that_is_there_although_tied(hf: Callable[[str], Case], tmp_path: Path) -> None:
    """As transformers does: a table and a head of different values were not tied."""
    case = hf("tied")
    for file in case.folder.glob("*.json"):
        (tmp_path / file.name).symlink_to(file)
    weights = load_file(case.folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"][::-1].copy()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    want = torch_logits(torch_model(tmp_path, load=True), case.tokens[:20])
    assert error(want, case.want[:20]) > 0.1
    assert error(load(tmp_path, "reference").logits(case.tokens[:20]), want) <= SHORT


def test_the_output_bias_of_qwen2_is_never_there(hf: Callable[[str], Case], tmp_path: Path) -> None:
    """Some files say attention_bias; transformers and mlx-lm do not ask."""
    case = hf("qwen2")
    for file in case.folder.glob("*.*"):
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen2"] | {"attention_bias": True}))
    assert reference_error(case._replace(folder=tmp_path)) <= SHORT


# -- wrong readings: what the bounds above would show ----------------------------------------------------------------

no_bias = With(add=lambda x, y: x)


def scaled(step, k):
    return ops.position_scale(k, step.positions, 0.3, 48)


def half(step, x, rope):
    return ops.rope(x, rope.inv_freq, step.positions, rope.width, 1.0)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "no norm of heads": (
        "qwen3",
        {"ops": With(rms_norm=lambda x, w, eps: x if x.ndim == 3 else ops.rms_norm(x, w, eps))},
    ),
    "no biases": ("qwen2", {"ops": no_bias}),
    "no biases of the MLP": ("biases", {"ops": no_bias}),
    "no gain of YaRN": ("yarn", {"apply_rope": half}),
    "queries of one size": ("ministral", {"ops": With(position_scale=lambda x, *_: x)}),
    "queries and keys grow": (
        "ministral",
        {"attend": lambda step, cache, q, k, v, *rest: attend(step, cache, q, scaled(step, k), v, *rest)},
    ),
    "no norm over all heads": (
        "minimax",
        {"ops": With(rms_norm=lambda x, w, eps, *dtype: x if w.size in (48, 144) else ops.rms_norm(x, w, eps, *dtype))},
    ),
    "no shared expert": ("glm air", {"add_blocks": lambda step, h, shared, *rest: add_blocks(step, h, None, *rest)}),
    "shared expert without its gate": (
        "qwen2 moe",
        {"add_blocks": lambda step, h, shared, score, routed: add_blocks(step, h, shared, None, routed)},
    ),
    "no renormalisation": ("moe", {"ops": With(moe_normalize_weights=lambda weights: weights)}),
}


@pytest.mark.parametrize("reading", WRONG)
def test_a_wrong_reading_breaks_the_bound(
    reading: str, hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, replaced = WRONG[reading]
    for attribute, wrong in replaced.items():
        monkeypatch.setattr(llama, attribute, wrong)
    assert reference_error(hf(name)) > 5e-5  # the wider of the two promises


WRONG_CONFIG: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "window shorter": ("window", lambda config: {"windows": (69,) * 3}),
    "window longer": ("window", lambda config: {"windows": (71,) * 3}),
    "no window": ("window", lambda config: {"windows": (None,) * 3}),
    "wide window longer": ("wide window", lambda config: {"windows": (302,) * 2}),
    "window in all layers": ("qwen2 window", lambda config: {"windows": (90,) * 3}),
    "window in the first layers": ("qwen2 window", lambda config: {"windows": (90, None, None)}),
    "weights renormalised": ("mixed moe", lambda config: {"renormalise": True}),
    "one expert less": ("moe", lambda config: {"top_k": 2}),
    "all groups of experts": ("glm", lambda config: {"top_groups": 3}),
    "experts not scaled": ("glm air", lambda config: {"routed_scale": 1.0}),
    "scores of softmax": ("minimax", lambda config: {"sigmoid": False}),
    "norms of GLM's heads left out": ("glm", lambda config: {"head_norms": False}),
    "whole heads turn": ("glm", lambda config: {"rope": wide(config.head_dim)}),
    "weights of Qwen2 renormalised": ("qwen2 moe", lambda config: {"renormalise": True}),
    "steps of queries elsewhere": ("ministral", lambda config: {"query_scale": (0.3, 49)}),
    "gain of YaRN in the scores": (
        "ministral",
        lambda config: {"rope": dataclasses.replace(config.rope, mscale=config.rope.score_gain**0.5)},
    ),
    "eps": ("tied", lambda config: {"norm_eps": 1e-4}),
    "plain table": ("llama3", lambda config: {"rope": plain(config.rope, 500.0)}),
    "plain table instead of linear": ("linear", lambda config: {"rope": plain(config.rope, 1e4)}),
}


def plain(rope: Any, theta: float) -> Any:
    return dataclasses.replace(rope, inv_freq=ops.rope_inv_freq(rope.width, theta))


def wide(width: int) -> Any:
    return Rope(ops.rope_inv_freq(width, 1e4), width)


@pytest.mark.parametrize("reading", WRONG_CONFIG)
def test_a_wrong_config_breaks_the_bound(
    reading: str, hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change = WRONG_CONFIG[reading]
    right = llama.read_config

    def wrong(raw: dict[str, Any]) -> Any:
        config = right(raw)
        return dataclasses.replace(config, **change(config))

    monkeypatch.setattr(llama, "FAMILY", dataclasses.replace(llama.FAMILY, read_config=wrong))
    count = {"window": 120, "qwen2 window": 150, "wide window": 340}.get(name, 60)
    assert reference_error(hf(name), count) > 1e-5
