"""Which matrices get how many bits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import models
from penstock.convert.recipe import Recipe, general_format, read_recipe, table_of
from penstock.convert.run import Options, convert
from penstock.errors import CheckpointError, InvalidArgument
from penstock.quant import Format
from penstock.weights.checkpoint import Checkpoint
from tests.convert.common import write
from tests.models.made import mlx_logits
from tests.models.test_deepseek_v3 import CONFIGS as DEEPSEEK


def of(recipe: Recipe, path: str, *shape: int, model_type: str = "qwen3_moe") -> Format | None:
    family = models.family_of({"model_type": model_type})
    if model_type == "deepseek_v3":
        more = family.mlx_rules(DEEPSEEK["v3"], family.read_config(DEEPSEEK["v3"])).unquantized
        family = replace(family, unquantized=(*family.unquantized, *more))
    return recipe.format(path, shape, family, 8)


def written(folder: Path, table: Any) -> str:
    path = folder / "recipe.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return str(path)


def test_format_leaves_dense_what_mlx_lm_cannot_quantize() -> None:
    general = Recipe(Format(3, 64))
    assert of(general, "model.layers.0.mlp.up_proj", 5, 128) == Format(3, 64)
    assert of(general, "model.layers.0.mlp.up_proj", 5, 96) is None
    assert of(general, "model.norm", 128) is None
    assert of(general, "model.layers.0.linear_attn.conv1d", 128, 4, 1) is None
    assert of(general, "model.layers.0.mlp.gate", 7, 128) == Format(8, 64)
    assert of(general, "model.layers.0.mlp.gate", 7, 128, model_type="deepseek_v3") is None
    assert of(Recipe(Format(4, 32)), "model.layers.0.mlp.gate", 7, 96) == Format(8, 32)


def test_patterns_are_tried_in_order_and_null_is_dense(tmp_path: Path) -> None:
    table = {"*.layers.0.*down_proj": None, "*down_proj": {"bits": 6, "group_size": 32}, "lm_head": 8}
    recipe = read_recipe(written(tmp_path, table), 3, None)
    assert of(recipe, "model.layers.0.mlp.switch_mlp.down_proj", 4, 5, 64) is None
    assert of(recipe, "model.layers.1.mlp.switch_mlp.down_proj", 4, 5, 64) == Format(6, 32)
    assert of(recipe, "lm_head", 9, 64) == Format(8, 64)
    assert of(recipe, "model.layers.1.mlp.gate", 9, 64) == Format(8, 64)
    assert of(recipe, "model.embed_tokens", 9, 64) == Format(3, 64)
    assert recipe.unmatched(["lm_head", "model.layers.0.down_proj"]) == []
    assert recipe.unmatched(["lm_head"]) == ["*.layers.0.*down_proj", "*down_proj"]


def test_convert_with_a_recipe_file_is_read_by_both(tmp_path: Path) -> None:
    table = {
        "*.self_attn.v_proj": {"group_size": 64},
        "*.mlp.switch_mlp.*": {"bits": 3},
        "*.o_proj": None,
        "*.nosuch": 2,
    }
    notices: list[str] = []
    options = Options(quantize=True, q_bits=5, q_group_size=32, quant_predicate=written(tmp_path, table))
    convert(write(tmp_path / "source", "qwen3_moe"), tmp_path / "made", options, notify=notices.append)
    assert f"{tmp_path}/recipe.json: '*.nosuch' fits no matrix of the model" in notices
    made = Checkpoint.open(tmp_path / "made")
    base = "model.layers.1."
    found = {
        name: made.quantization(base + name)
        for name in ("self_attn.v_proj", "self_attn.q_proj", "self_attn.o_proj", "mlp.switch_mlp.up_proj", "mlp.gate")
    }
    assert found == {
        "self_attn.v_proj": Format(5, 64),
        "self_attn.q_proj": Format(5, 32),
        "self_attn.o_proj": None,
        "mlp.switch_mlp.up_proj": Format(3, 32),
        "mlp.gate": Format(8, 64),
    }
    mlx_logits(tmp_path / "made", [1, 2, 3])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], r"recipe.json: is \[\], expected an object of patterns"),
        ({}, r"recipe.json: is {}, expected an object of patterns"),
        ({"*": 7}, r"recipe.json: '\*': bits is 7, expected one of 1, 2, 3, 4, 5, 6, 8"),
        ({"*": True}, r"'\*' is True, expected bits, an object of bits and group_size, or null"),
        ({"*": "4"}, r"'\*' is '4', expected bits, an object"),
        ({"*": {}}, r"'\*' is {}, expected bits, an object"),
        ({"*": {"bits": 4, "mode": "nf4"}}, r"expected bits, an object of bits and group_size"),
        ({"*": {"bits": 4.0}}, r"'\*': bits is 4.0, expected one of"),
        ({"*": {"bits": 4, "group_size": 48}}, r"'\*': group_size is 48, expected one of 32, 64, 128"),
    ],
)
def test_read_recipe_says_what_is_wrong(tmp_path: Path, table: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read_recipe(written(tmp_path, table), None, None)


@pytest.mark.parametrize("text", ["", "{", '{"a": NaN}', '{"a": 1, "a": 2}'])
def test_read_recipe_names_a_file_that_is_no_json(tmp_path: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match=r"recipe.json: (is empty|not valid JSON)"):
        read_recipe(written(tmp_path, text), None, None)


def test_read_recipe_names_what_is_no_recipe() -> None:
    with pytest.raises(
        InvalidArgument, match=r"quant-predicate is 'mixed_5_6', expected one of mixed_2_6, .*or a .json"
    ):
        read_recipe("mixed_5_6", None, None)
    with pytest.raises(CheckpointError, match=r"nosuch.json: no such file"):
        read_recipe("nosuch.json", None, None)


@pytest.mark.parametrize(("bits", "group_size"), [(7, 64), (0, 64), (4, 48), (True, 64)])
def test_recipe_refuses_formats_that_do_not_exist(bits: int, group_size: int) -> None:
    with pytest.raises(InvalidArgument, match=r"q-(bits|group-size) is .*, expected one of"):
        general_format(bits, group_size, None)


def test_general_format_takes_the_defaults_of_its_mode() -> None:
    assert general_format(None, None, None) == Format(4, 64)
    assert general_format(None, None, "nvfp4") == Format(4, 16, "nvfp4")
    for options, message in (
        ((8, None, "mxfp4"), "q-bits is 8, expected 4 in mode mxfp4"),
        ((None, 64, "mxfp8"), "q-group-size is 64, expected 32 in mode mxfp8"),
        ((None, None, "mxfp6"), "q-mode is 'mxfp6', expected one of affine, mxfp4, mxfp8, nvfp4"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            general_format(*options)


def test_table_of_takes_what_most_weights_have_as_general() -> None:
    formats = {"a": Format(4, 32), "b": Format(8, 32), "c": Format(4, 32)}
    assert table_of(formats, {"a": 10, "b": 15, "c": 10}) == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "b": {"group_size": 32, "bits": 8, "mode": "affine"},
    }
