"""config.json: what is missing, of another kind, out of range, contradictory or not supported is refused by name."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import models
from penstock.errors import CheckpointError, InvalidArgument
from penstock.models import qwen3_5
from penstock.models.config import Fields, first_layers, layer_types
from tests.models.common import dense_config, moe_config, next_config, tensors, text_config, write_model


def refused(config: Any) -> str:
    """The message of the refusal: one line that begins with the file."""
    with pytest.raises(CheckpointError) as caught:
        models.family_of(config).read_config(config)
    message = str(caught.value)
    assert message.startswith("config.json: ") and "expected" in message
    assert "\n" not in message and len(message) < 250
    return message


# -- what is read ----------------------------------------------------------------------------------------------------


def test_read_config_of_the_nested_form() -> None:
    config = qwen3_5.read_config(moe_config())
    assert (config.vocab_size, config.dim, config.heads, config.kv_heads, config.head_dim) == (263, 64, 6, 2, 32)
    assert config.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert (config.experts, config.top_k, config.dense_layers, config.renormalise) == (7, 3, frozenset(), True)
    assert config.conv_dim == 2 * 2 * 24 + 4 * 16 and config.rope.width == 8


def test_read_config_of_the_flat_form_is_the_same() -> None:
    nested, flat = qwen3_5.read_config(moe_config()), qwen3_5.read_config(text_config())
    assert {**vars(nested), "rope": 0} == {**vars(flat), "rope": 0}
    assert (nested.rope.inv_freq == flat.rope.inv_freq).all()


def test_read_config_of_dense_models() -> None:
    config = qwen3_5.read_config(dense_config())
    assert config.dense_layers == frozenset(range(4)) and (config.experts, config.mlp_width) == (0, 160)


def test_read_config_of_qwen3_next() -> None:
    config = qwen3_5.read_config(next_config(mlp_only_layers=[0], decoder_sparse_step=2, norm_topk_prob=False))
    assert config.dense_layers == {0, 2} and not config.renormalise
    assert config.rope.width == 8


def test_read_config_takes_defaults_of_the_family() -> None:
    left_out = ("hidden_act", "attention_bias", "attn_output_gate", "tie_word_embeddings", "full_attention_interval")
    none = dict.fromkeys((*left_out, "max_position_embeddings", "head_dim"))
    config = qwen3_5.read_config(moe_config(**none, num_attention_heads=4))
    assert config.layer_types.count("full_attention") == 1 and not config.tied
    assert (config.head_dim, config.max_positions) == (16, 1 << 18)


def test_read_config_takes_whole_numbers_written_as_floats() -> None:
    assert qwen3_5.read_config(moe_config(vocab_size=263.0)).vocab_size == 263


@pytest.mark.parametrize("kind", models.FAMILIES)
def test_family_of_every_type_can_be_imported(kind: str) -> None:
    family = models.family_of({"model_type": kind})
    assert kind in family.model_types
    for part in ("skipped", "read_config", "names", "read_weights", "caches", "forward", "logits"):
        assert hasattr(family, part)


def test_the_table_of_families_says_what_the_families_say() -> None:
    assert {kind: family.name for family in models.families() for kind in family.model_types} == models.FAMILIES


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "llama9", "", 5, ["qwen3_5_moe"], {}, "x" * 10_000, "os", "../qwen3_5"])
def test_family_of_names_an_unknown_type(value: Any) -> None:
    with pytest.raises(CheckpointError, match="^config.json: model_type is .* expected one of .*qwen3_5_moe") as caught:
        models.family_of({"model_type": value})
    assert len(str(caught.value)) < 160 + len(", ".join(models.FAMILIES))  # and a few characters of this one


def test_family_of_needs_a_type() -> None:
    with pytest.raises(CheckpointError, match="^config.json: model_type is missing, expected one of"):
        models.family_of({})


INTEGERS = [
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
    "vocab_size",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
]
BAD_INTEGERS = [-1, 2**31 + 1, 10**30, 10**5000, 1.5, math.nan, math.inf, 1e12, "4", "", True, [4], {"a": 1}]


@pytest.mark.parametrize("key", INTEGERS)
def test_read_config_names_an_integer_that_is_none(key: str) -> None:
    for value in BAD_INTEGERS:
        assert f" {key} is " in refused(moe_config(**{key: value})), value
    if key not in ("num_experts",):  # 0 experts: a dense model
        assert f" {key} is 0, expected an integer from 1 to " in refused(moe_config(**{key: 0}))


@pytest.mark.parametrize("key", sorted({*INTEGERS} - {"head_dim", "max_position_embeddings", "num_experts"}))
def test_read_config_names_what_is_missing(key: str) -> None:
    assert f" {key} is missing, expected an integer from 1 to " in refused(moe_config(**{key: None}))


def test_read_config_needs_the_width_of_dense_layers() -> None:
    assert " intermediate_size is missing" in refused(dense_config(intermediate_size=None))
    assert " intermediate_size is missing" in refused(next_config(intermediate_size=None, mlp_only_layers=[1]))


@pytest.mark.parametrize("value", [0, -1e-6, math.nan, math.inf, "1e-6", True, [], 10**400])
def test_read_config_names_a_number_that_is_none(value: Any) -> None:
    assert " rms_norm_eps is " in refused(moe_config(rms_norm_eps=value))


@pytest.mark.parametrize("key", ["norm_topk_prob", "tie_word_embeddings"])
@pytest.mark.parametrize("value", [0, 1, "true", "", [True]])
def test_read_config_names_a_boolean_that_is_none(key: str, value: Any) -> None:
    assert f" {key} is {value!r}, expected true or false" in refused(next_config(**{key: value}))


@pytest.mark.parametrize("changes, words", [
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
    ({"hidden_act": ["silu"]}, "hidden_act is ['silu'], expected 'silu'"),
    ({"attention_bias": True}, "attention_bias is True, expected False"),
    ({"attention_bias": 0}, "attention_bias is 0, expected False"),
    ({"attn_output_gate": False}, "attn_output_gate is False, expected True"),
    ({"model_type": "qwen9_text"}, "text_config: model_type is 'qwen9_text', expected one of"),
    ({"num_attention_heads": 5}, "num_attention_heads is 5, expected a multiple of num_key_value_heads (2)"),
    ({"head_dim": None, "num_attention_heads": 6}, "head_dim is missing, expected it: hidden_size 64 is no multiple"),
    ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3, expected a multiple of linear_num_key_heads (2)"),
    ({"num_experts_per_tok": 8}, "num_experts_per_tok is 8, expected an integer from 1 to 7"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries, expected 4 (one per layer)"),
    ({"layer_types": ["full_attention"] * 5}, "layer_types has 5 entries, expected 4 (one per layer)"),
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types has 'sliding_attention', expected 'linear"),
    ({"layer_types": "full_attention"}, "layer_types is 'full_attention', expected a list of strings"),
    ({"layer_types": [1, 2, 3, 4]}, "layer_types is [1, 2, 3, 4], expected a list of strings"),
    ({"layer_types": []}, "layer_types has 0 entries, expected 4"),
    ({"full_attention_interval": 0}, "full_attention_interval is 0, expected an integer from 1"),
    ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000, expected an integer"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "su"}}, "rope_parameters: rope_type is 'su', expected"),
    ({"rope_parameters": {}}, "rope_theta is missing"),
    ({"num_hidden_layers": 5000}, "num_hidden_layers is 5000, expected an integer from 1 to 4096"),
    ({"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim is 65, expected an integer from 1 to 64"),
])  # fmt: skip
def test_read_config_says_what_does_not_fit(changes: dict[str, Any], words: str) -> None:
    assert words in refused(moe_config(**changes))


@pytest.mark.parametrize("changes, words", [
    ({"mlp_only_layers": 1}, "mlp_only_layers is 1, expected a list of integers"),
    ({"mlp_only_layers": ["1"]}, "mlp_only_layers is ['1'], expected a list of integers"),
    ({"mlp_only_layers": [True]}, "mlp_only_layers is [True], expected a list of integers"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected an integer from 1"),
    ({"rope_theta": -5}, "rope_theta is -5, expected a number above 0"),
])  # fmt: skip
def test_read_config_of_qwen3_next_says_what_does_not_fit(changes: dict[str, Any], words: str) -> None:
    assert words in refused(next_config(**changes))


@pytest.mark.parametrize("value", ["", [], 5, True, "{}"])
def test_read_config_needs_an_object_for_the_text_config(value: Any) -> None:
    assert "text_config is " in refused({"model_type": "qwen3_5_moe", "text_config": value})


def test_read_config_shortens_what_it_shows() -> None:
    assert len(refused(moe_config(hidden_act="x" * 100_000))) < 150


# -- Fields ----------------------------------------------------------------------------------------------------------


def test_fields_take_null_for_missing() -> None:
    fields = Fields({"a": None, "b": 2}, "here")
    assert fields.integer("a", 7) == 7 and "a" not in fields and "b" in fields
    with pytest.raises(CheckpointError, match="^here: a is None, expected an integer"):
        fields.integer("a")


def test_fields_name_nested_places() -> None:
    table = Fields({"outer": {"inner": {"x": "1"}}}, "config.json").table("outer").table("inner")
    with pytest.raises(
        CheckpointError, match="^config.json: outer: inner: x is '1', expected a number above 0 up to 2$"
    ):
        table.number("x", above=0, most=2)


def test_layer_types_without_a_list() -> None:
    fields = Fields({}, "here")
    assert layer_types(fields, 4, ("a", "b"), 2) == ("a", "b", "a", "b")
    assert layer_types(fields, 2, ("a", "b"), default="b") == ("b", "b")
    with pytest.raises(CheckpointError, match="^here: layer_types is missing, expected a list of 2 layer kinds"):
        layer_types(fields, 2, ("a", "b"))


# -- config against the weights, and through load --------------------------------------------------------------------


def load_refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        penstock.load(folder, device="reference")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("changes, name, found, expected", [
    ({"vocab_size": 264}, "embed_tokens", (263, 64), (264, 64)),
    ({"num_experts": 8}, "layers.0.mlp.gate", (7, 64), (8, 64)),
    ({"num_attention_heads": 8}, "layers.3.self_attn.q_proj", (384, 64), (512, 64)),
    ({"linear_conv_kernel_dim": 3}, "layers.0.linear_attn.conv1d", (160, 1, 4), (160, 1, 3)),
    ({"moe_intermediate_size": 31}, "layers.0.mlp.experts.gate_up_proj", (7, 64, 64), (7, 62, 64)),
])  # fmt: skip
def test_load_compares_every_weight_with_the_config(
    changes: dict[str, Any], name: str, found: Any, expected: Any, tmp_path: Path
) -> None:
    write_model(tmp_path, moe_config(**changes), tensors(moe_config()))
    words = f"{tmp_path}: model.language_model.{name} has shape {found}, expected {expected} by config.json"
    assert load_refused(tmp_path) == words


def test_load_names_a_missing_weight(tmp_path: Path) -> None:
    weights = tensors(moe_config())
    del weights["model.language_model.layers.2.mlp.shared_expert.up_proj.weight"]
    write_model(tmp_path, moe_config(), weights)
    assert "model.language_model.layers.2.mlp.shared_expert.up_proj" in load_refused(tmp_path)


def test_load_needs_a_head_where_none_is_tied(tmp_path: Path) -> None:
    weights = tensors(moe_config())
    del weights["lm_head.weight"]
    write_model(tmp_path, moe_config(), weights)
    assert "lm_head" in load_refused(tmp_path)


def test_load_refuses_layer_kinds_that_the_weights_do_not_have(tmp_path: Path) -> None:
    write_model(tmp_path, moe_config(layer_types=["full_attention"] * 4), tensors(moe_config()))
    assert "layers.0.self_attn" in load_refused(tmp_path)


def test_load_of_a_config_with_code_executes_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    config = moe_config() | {"auto_map": {"AutoModel": "code.Model"}, "model_file": "code.py"}
    write_model(tmp_path, config)
    (tmp_path / "code.py").write_text(f"open({str(mark)!r}, 'w')")
    llm = penstock.load(tmp_path, device="reference")
    assert not mark.exists()
    assert sum("never executed" in notice for notice in llm.notices) == 2


@pytest.mark.parametrize("text", [
    "", "\x00", "[]", "5", "null", "{", '{"model_type": NaN}', '{"model_type": "qwen3_5", "model_type": "x"}',
    "[" * 10**5, '{"vocab_size": ' + "9" * 5000 + "}",
])  # fmt: skip
def test_load_refuses_a_config_that_is_no_object(text: str, tmp_path: Path) -> None:
    write_model(tmp_path, moe_config())
    (tmp_path / "config.json").write_text(text)
    assert load_refused(tmp_path).startswith(str(tmp_path / "config.json"))


def test_load_refuses_a_config_with_nan(tmp_path: Path) -> None:
    config = copy.deepcopy(moe_config())
    config["text_config"]["rms_norm_eps"] = math.nan
    write_model(tmp_path, moe_config())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "NaN" in load_refused(tmp_path)


def test_first_layers_shortens_nested_configs_and_leaves_its_argument():
    raw = {"layers": 1, "text_config": {"num_hidden_layers": 4, "layer_types": ["a", "b", "c", "d"]}}
    kept = json.dumps(raw)
    three = {"text_config": {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"]}}
    assert first_layers(raw, 3, "x") == (three, ", 3 of 4 layers")
    assert first_layers(raw, None, "x")[0]["text_config"]["layer_types"] == ["a"]
    assert first_layers(raw, "all", "x") == ({"text_config": raw["text_config"]}, "")
    assert json.dumps(raw) == kept
    more = {"num_kv_shared_layers": 2, "intermediate_size": [8, 8, 16, 16]}
    raw["text_config"] |= more
    for count, shared in ((4, 2), (3, 1), (2, 0), (1, 0)):  # the last ones of all layers share
        text = first_layers(raw, count, "x")[0]["text_config"]
        assert (text["num_kv_shared_layers"], text["intermediate_size"]) == (shared, [8, 8, 16, 16][:count])
    for layers in (0, 5):
        with pytest.raises(InvalidArgument, match=f"x: layers is {layers}, expected 1 to 4"):
            first_layers(raw, layers, "x")
    with pytest.raises(InvalidArgument, match="layers is True"):
        first_layers(raw | {"layers": True}, None, "x")
