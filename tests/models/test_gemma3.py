"""Gemma 3 against transformers (Hugging Face files) and mlx-lm (converted files), both in float32."""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.models import gemma3
from tests.models.common import BRANCH, VOCAB, error
from tests.models.made import (
    FOUR,
    LONG,
    SHORT,
    Case,
    check_cosines,
    check_several,
    converted,
    decoded,
    in_pieces,
    load,
    make,
    reference_error,
)
from tests.models.test_config import refused

FACTORS = {
    "post_attention_layernorm": BRANCH,
    "post_feedforward_layernorm": BRANCH,
    "norm": BRANCH,
    "layernorm": BRANCH,
}


def config_of(**changes: Any) -> dict[str, Any]:
    """config.json of a text model as released, every size another one."""
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 2048,
        "query_pre_attn_scalar": 40,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "sliding_window": 70,
        "sliding_window_pattern": 3,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    return {key: value for key, value in (config | changes).items() if value != "left out"}


VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "text": config_of(),
    # 4B and larger: positions of global layers are stretched
    "nested": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "vocab_size": VOCAB,
        "mm_tokens_per_image": 4,
        "text_config": config_of(
            num_hidden_layers=3, rope_scaling={"factor": 8.0, "rope_type": "linear"}, num_key_value_heads=1, head_dim=32
        ),
        "vision_config": VISION,
    },
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @functools.cache
    def case(name: str) -> Case:
        return make(tmp_path_factory.mktemp("hf"), CONFIGS[name], FACTORS, count=330)

    return case


@pytest.fixture(scope="module")
def mlx(hf: Callable[[str], Case]) -> Callable[[str], Case]:
    @functools.cache
    def case(name: str) -> Case:
        source = hf(name)
        return converted(source, source.folder / "mlx", **FOUR)

    return case


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    got = load(case.folder).logits(case.tokens)
    assert error(got[:200], case.want[:200]) <= SHORT
    assert error(got, case.want) <= LONG
    assert error(load(case.folder, "reference").logits(case.tokens[:100]), case.want[:100]) <= SHORT


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_mlx(name: str, mlx: Callable[[str], Case]) -> None:
    case = mlx(name)
    assert error(load(case.folder).logits(case.tokens), case.want) <= SHORT
    check_cosines(load(case.folder, "cpu", "int8").logits(case.tokens), case.want)


def test_the_factor_of_embeddings_is_rounded_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    """√96 is no float of 16 bits; transformers rounds it to the dtype it computes in, mlx-lm to bfloat16."""
    case = make(tmp_path / "hf", config_of(hidden_size=96, num_hidden_layers=3, torch_dtype="float32"), FACTORS, 20)
    assert reference_error(case) <= SHORT
    assert reference_error(converted(case, tmp_path / "mlx", 20, **FOUR)) <= SHORT


def test_pieces_and_single_tokens_are_right(hf: Callable[[str], Case]) -> None:
    case = hf("text")
    llm = load(case.folder)
    assert error(in_pieces(llm, case.tokens, (3, 69, 70, 71, 255, 257)), case.want) <= LONG
    assert error(decoded(llm, case.tokens[:40], 0), case.want[:40]) <= SHORT
    assert error(decoded(llm, case.tokens[:330], 250), case.want[249:330]) <= LONG


def test_decode_of_several_gives_the_bits_of_each_alone(mlx: Callable[[str], Case]) -> None:
    check_several(load(mlx("text").folder), (1, 69, 303))


WRONG: dict[str, Callable[[Any], dict[str, Any]]] = {
    "no window": lambda config: {"windows": (None,) * 4},
    "window longer": lambda config: {"windows": tuple(w and w + 1 for w in config.windows)},
    "one table of positions": lambda config: {"rope": config.local_rope},
    "scale by the width of heads": lambda config: {"scale": 24**-0.5},
    "embedding not scaled": lambda config: {"embed_scale": 1.0},
    "logits bent": lambda config: {"softcap": 30.0},
}


@pytest.mark.parametrize("reading", WRONG)
def test_a_wrong_config_breaks_the_bound(
    reading: str, hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gemma3.read_config

    def wrong(raw: dict[str, Any]) -> Any:
        config = right(raw)
        return dataclasses.replace(config, **WRONG[reading](config))

    monkeypatch.setattr(gemma3, "FAMILY", dataclasses.replace(gemma3.FAMILY, read_config=wrong))
    assert reference_error(hf("text"), 120) > 5e-5


def test_norms_are_stored_less_one(hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemma3, "_norm", lambda source, path, size: source.vector(path, size))
    assert reference_error(hf("text")) > 5e-5


# -- config.json -----------------------------------------------------------------------------------------------------


def test_read_config_takes_the_defaults_of_the_family() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = gemma3.read_config({"model_type": "gemma3", "text_config": text})
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.embed_scale == 50.5 and config.scale == 1 / 16 and config.tied  # √2560 as a bfloat16 number
    assert config.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert (config.rope.inv_freq[0], config.local_rope.inv_freq[0]) == (0.125, 1.0)


def test_read_config_takes_tables_by_kind() -> None:
    ropes = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"}}
    kinds = ["full_attention", "sliding_attention"] * 2
    raw = config_of(rope_parameters=ropes, rope_theta="left out", rope_local_base_freq="left out", layer_types=kinds)
    config = gemma3.read_config(raw)
    assert config.windows == (None, 70) * 2
    for rope, theta in ((config.rope, 5e5), (config.local_rope, 100.0)):
        np.testing.assert_allclose(rope.inv_freq[-1], theta ** (-22 / 24), rtol=1e-6)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"])
def test_read_config_names_an_integer_that_is_missing_or_none(key: str) -> None:
    for value in (0, -1, 1.5, "4", True, [4]):
        assert f" {key} is " in refused(config_of(**{key: value}))
    assert f" {key} is missing, expected an integer" in refused(config_of(**{key: "left out"}))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_attention_heads": "left out"}, "num_attention_heads is missing, expected an integer from 1"),
        ({"num_attention_heads": 5}, "num_attention_heads is 5, expected a multiple of num_key_value_heads (2)"),
        ({"sliding_window": None}, "sliding_window is None, expected an integer from 1"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu', expected 'gelu_pytorch_tanh'"),
        ({"attention_bias": True}, "attention_bias is True, expected False"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True, expected False"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, expected null"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0, expected a number above 0"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1, expected a number above 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan, expected a number above 0"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type is 'dynamic', expected one of"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, expected 4"),
    ],
    ids=str,
)
def test_read_config_refuses(changes: dict[str, Any], words: str) -> None:
    assert words in refused(config_of(**changes))
