"""Rotary tables of every spelling in config.json: values worked out elsewhere, and transformers where it is there."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.errors import CheckpointError
from penstock.models.config import Fields
from penstock.models.rope import Rope, read_rope

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(config: dict[str, Any], head_dim: int = 32, max_positions: int = 2048, **options: Any) -> Rope:
    return read_rope(Fields(config, "config.json"), head_dim, max_positions, **options)


# -- values ----------------------------------------------------------------------------------------------------------


def test_read_rope_plain_by_hand() -> None:
    rope = read({"rope_theta": 1e4}, head_dim=8)
    np.testing.assert_allclose(rope.inv_freq, [1, 0.1, 0.01, 0.001], rtol=1e-7)
    assert (rope.inv_freq.dtype, rope.width, rope.mscale, rope.score_gain) == (np.float32, 8, 1.0, 1.0)


def test_read_rope_yarn_values() -> None:
    rope = read({"rope_parameters": YARN}, head_dim=32)
    known = [1, 0.56234133, 0.28234622, 0.13972196, 0.067857146, 0.032133792, 0.014682003, 0.0063509978, 0.0024999999]
    np.testing.assert_allclose(rope.inv_freq[:9], known, rtol=1e-6)
    np.testing.assert_allclose(rope.inv_freq[15], 4.4456985e-05, rtol=1e-6)
    np.testing.assert_allclose(rope.mscale, 1.1386294, rtol=1e-7)
    assert rope.score_gain == 1.0


def test_read_rope_yarn_values_of_a_long_context() -> None:
    table = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    rope = read({"rope_theta": 10000, "rope_scaling": table}, head_dim=64, max_positions=163840)
    known = [1, 0.056234132, 0.039006926, 0.0055, 3.3338038e-05, 3.3338035e-06]
    np.testing.assert_allclose(rope.inv_freq[[0, 10, 11, 16, 23, 31]], known, rtol=1e-6)
    assert rope.mscale == 1.0  # equal gains cancel
    np.testing.assert_allclose(192**-0.5 * rope.score_gain, 0.13523378, rtol=1e-7)


def test_read_rope_yarn_gain_by_other_keys() -> None:
    one = 0.1 * np.log(4) + 1
    assert read({"rope_parameters": YARN | {"attention_factor": 0.75}}).mscale == 0.75
    assert read({"rope_parameters": YARN | {"factor": 0.5}}).mscale == 1.0
    half = read({"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 1.0}})
    np.testing.assert_allclose(half.mscale, (0.2 * np.log(4) + 1) / one, rtol=1e-12)
    np.testing.assert_allclose(half.score_gain, one**2, rtol=1e-12)


def test_read_rope_yarn_factor_is_how_much_longer_the_context_is() -> None:
    table = {key: value for key, value in YARN.items() if key != "factor"}
    got, want = read({"rope_parameters": table}, max_positions=2048), read({"rope_parameters": YARN})
    np.testing.assert_array_equal(got.inv_freq, want.inv_freq)
    assert got.mscale == want.mscale


def test_read_rope_proportional_values() -> None:
    table = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    rope = read({"rope_parameters": table}, head_dim=128)
    np.testing.assert_allclose(rope.inv_freq[[0, 1, 15, 16]], [1, 0.80584216, 0.0392419, 0], rtol=1e-6)
    assert rope.width == 128 and len(rope.inv_freq) == 64


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"}},
        {
            "rope_parameters": {"rope_theta": 1e4, "type": "mrope", "mrope_section": [1, 1, 2]},
            "partial_rotary_factor": 0.25,
        },
        {"rope_theta": 1e4, "rope_scaling": {"type": "default", "partial_rotary_factor": 0.25}},
        {"rope_theta": 77.0, "rope_parameters": {"rope_theta": 10000, "partial_rotary_factor": 0.25}},
        {"rope_parameters": {"rope_theta": 1e4}},
    ],
    ids=["older", "null", "newer", "mrope", "scaling", "both", "default"],
)
def test_read_rope_takes_every_spelling(config: dict[str, Any]) -> None:
    rope = read(config, head_dim=32, share=0.25)
    np.testing.assert_allclose(rope.inv_freq, [1, 0.1, 0.01, 0.001], rtol=1e-7)
    assert rope.width == 8


def test_read_rope_partial_takes_whole_channels() -> None:
    """int(head_dim · share), as transformers."""
    assert read({"rope_theta": 1e4, "partial_rotary_factor": 0.35}, head_dim=40).width == 14


# -- transformers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize(
    "table",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        LLAMA3,
        LLAMA3 | {"factor": 32.0, "low_freq_factor": 0.5},
        YARN,
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "factor": 7.5},
        YARN | {"truncate": False},
        YARN | {"mscale": 0.707, "mscale_all_dim": 0.9},
    ],
    ids=["default", "linear", "llama3", "llama3 long", "yarn", "betas", "not truncated", "mscales"],
)
def test_read_rope_is_that_of_transformers(table: dict[str, Any], share: float) -> None:
    torch = pytest.importorskip("torch")
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    rope = read({"rope_parameters": table, "partial_rotary_factor": share}, head_dim=48, max_positions=2048)
    assert rope.width == int(48 * share)
    if table["rope_type"] == "default":
        want, gain = table["rope_theta"] ** (-np.arange(0, rope.width, 2) / rope.width), 1.0
    else:
        config = SimpleNamespace(
            head_dim=48,
            hidden_size=48,
            num_attention_heads=1,
            max_position_embeddings=2048,
            rope_parameters=table | {"partial_rotary_factor": share},
            standardize_rope_params=lambda: None,
        )
        made, gain = functions[table["rope_type"]](config, torch.device("cpu"))
        want = made.numpy()
    np.testing.assert_allclose(rope.inv_freq, want, rtol=2e-6)  # theirs is computed in float32
    np.testing.assert_allclose(rope.mscale, gain, rtol=1e-12)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, words",
    [
        ({}, "rope_theta is missing, expected a number above 0"),
        ({"rope_theta": 0}, "rope_theta is 0, expected a number above 0"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4', expected a number above 0"),
        ({"rope_theta": True}, "rope_theta is True, expected a number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan, expected a number above 0"),
        ({"rope_theta": 10**400}, "rope_theta is 1000000000"),
        ({"rope_parameters": [1]}, "rope_parameters is [1], expected an object"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}}, "rope_type is 'longrope', expected one of"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic"}}, "type is 'dynamic', expected one of"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": 3}}, "rope_type is 3, expected one of"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "factor is missing, expected a number above 0"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": -1}},
            "factor is -1, expected a number above 0",
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0},
            "partial_rotary_factor is 0, expected a number above 0 up to 1",
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 1.5},
            "partial_rotary_factor is 1.5, expected a number above 0 up to 1",
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.1},
            "partial_rotary_factor gives 3 rotary channels, expected an even",
        ),
        (
            {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}},
            "high_freq_factor is 1.0, expected a number above low_freq",
        ),
        (
            {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": None}},
            "original_max_position_embeddings is",
        ),
        ({"rope_parameters": YARN | {"beta_slow": 64}}, "beta_slow is 64, expected at most beta_fast (32)"),
        ({"rope_parameters": YARN | {"truncate": 1}}, "truncate is 1, expected true or false"),
        ({"rope_parameters": YARN | {"original_max_position_embeddings": 0}}, "original_max_position_embeddings is 0"),
        (
            {"rope_parameters": YARN | {"mscale": 1e308, "factor": 1e308, "mscale_all_dim": 1e308}},
            "mscale and factor give",
        ),
        ({"rope_parameters": YARN | {"mscale_all_dim": 1e308}}, "mscale and factor give"),
        ({"rope_parameters": YARN | {"attention_factor": 0}}, "attention_factor is 0, expected a number above 0"),
    ],
)
def test_read_rope_names_what_it_refuses(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(config)
    message = str(caught.value)
    assert message.startswith("config.json") and words in message and "expected" in message
    assert "\n" not in message and len(message) < 300
