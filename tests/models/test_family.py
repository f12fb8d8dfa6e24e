"""A family is one file and one line of a table: everything else takes what its FAMILY says."""

import ast
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import models
from penstock.models.family import ROLES, Family, MlxRules
from penstock.quant import Format
from penstock.weights.checkpoint import Checkpoint
from tests.cli.common import call
from tests.convert.common import CONFIGS, Names
from tests.models import toy
from tests.models.common import some_tokens, write_model

TOY = {
    "model_type": "toy",
    "vocab_size": 260,
    "max_positions": 512,
    "dim": 64,
    "layers": 3,
    "heads": 4,
    "experts": 5,
    "top_k": 2,
    "expert_width": 96,
    "torch_dtype": "float32",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A released model of a family that is known by one line of the table, with a part that is not run."""
    monkeypatch.setitem(sys.modules, "penstock.models.toy", toy)
    monkeypatch.setitem(models.FAMILIES, "toy", "toy")
    names = Names("model.")
    toy.read_weights(names, toy.read_config(TOY))
    weights = {name: array.astype(np.float32) for name, array in names.found.items()}
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] -= 1
    return write_model(tmp_path / "source", TOY, weights | {"camera.lens.weight": np.ones((3, 2), np.float32)})


def logits(folder: Path, **options: Any) -> np.ndarray:
    return penstock.load(folder, **{"device": "reference"} | options).logits(some_tokens(9))


def test_a_family_of_one_file_is_loaded_converted_verified_inspected_and_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    want, made = logits(folder), tmp_path / "made"
    np.testing.assert_allclose(logits(folder, device="cpu", activations="float32"), want, rtol=0, atol=1e-5)
    shown = call(capsys, "convert", "--model", str(folder), "--mlx-path", str(made))
    assert shown.status == 0, shown.err
    np.testing.assert_array_equal(logits(made), want)
    assert json.loads((made / "config.json").read_text())["written_for"] == "mlx-lm"

    small = tmp_path / "small"
    shown = call(capsys, "convert", "--model", str(folder), "--mlx-path", str(small), "-q", "--q-group-size", "32")
    assert shown.status == 0, shown.err
    found, path = Checkpoint.open(small), "language_model.model.layers.1."
    parts = ("block.choice", "block.switch_bank.down_proj", "mixer.q", "mixer.keys", "mixer.values")
    assert [found.quantization(path + part) for part in parts] == [
        Format(8, 64),
        Format(4, 32),
        Format(4, 32),
        None,
        None,
    ]
    mixed = ("-q", "--q-group-size", "32", "--quant-predicate", "mixed_3_6")
    shown = call(capsys, "convert", "--model", str(folder), "--mlx-path", str(tmp_path / "mixed"), *mixed)
    assert shown.status == 0, shown.err
    found, path = Checkpoint.open(tmp_path / "mixed"), "language_model.model.layers.2.mixer."
    assert [found.quantization(path + part) for part in ("q", "out")] == [Format(3, 32), Format(6, 32)]

    assert call(capsys, "verify", str(small)).status == 0
    about = json.loads(call(capsys, "inspect", str(folder), "--json", "--bandwidth", "10").out)
    assert list(about["parts"]) == ["embedding", "attention", "router", "experts", "norms", "head"]
    assert about["layers"] == {"toy attention + MoE": 3}
    assert [(part["what"], part["tensors"]) for part in about["skipped"]] == [("camera", 1)]
    options = ("-p", "hello", "-m", "3", "--device", "reference", "--ignore-chat-template")
    assert call(capsys, "generate", "--model", str(small), *options).status == 0


def test_a_family_that_is_not_in_the_table_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(models.FAMILIES, "toy")
    with pytest.raises(penstock.errors.CheckpointError, match="model_type is 'toy', expected one of qwen3_5_moe, "):
        penstock.load(folder)


@pytest.mark.parametrize("family", models.families(), ids=str)
def test_a_family_says_what_it_is(family: Family[Any, Any]) -> None:
    assert family.read_weights.__module__ == family.forward.__module__ == f"penstock.models.{family.name}"
    assert set(family.roles) <= set(ROLES) and {"embedding", "head", "norms"} <= set(family.roles)


@pytest.mark.parametrize(
    ("kind", "path", "role"),
    [
        ("llama", "embed_tokens", "embedding"),
        ("llama", "layers.11.mlp.gate", "router"),
        ("llama", "model.layers.11.mlp.gate", "router"),
        ("llama", "layers.0.mlp.gate_proj", "dense MLP"),
        ("llama", "layers.0.self_attn.q_norm", "norms"),
        ("llama", "layers.0.self_attn.q_proj.bias", "attention"),
        ("qwen3_next", "language_model.mtp.layers.0.mlp.shared_expert_gate", "router"),
        ("qwen3_next", "layers.0.mlp.shared_expert.up_proj", "shared expert"),
        ("qwen3_next", "layers.0.linear_attn.A_log", "linear attention"),
        ("deepseek_v3", "layers.3.mlp.gate.e_score_correction_bias", "router"),
        ("deepseek_v3", "layers.3.mlp.shared_experts.up_proj", "shared expert"),
        ("glm4_moe", "layers.3.mlp.shared_experts.up_proj", "shared expert"),
        ("minimax_m2", "layers.3.block_sparse_moe.e_score_correction_bias", "router"),
        ("minimax_m2", "layers.3.block_sparse_moe.experts.5.w2", "experts"),
        ("mixtral", "layers.3.block_sparse_moe.gate", "router"),
        ("kimi_linear", "layers.3.block_sparse_moe.gate.e_score_correction_bias", "router"),
        ("kimi_linear", "layers.3.mlp.e_score_correction_bias", "router"),
        ("kimi_linear", "layers.3.block_sparse_moe.experts.5.w2", "experts"),
        ("kimi_linear", "layers.3.self_attn.q_conv.conv", "linear attention"),
        ("kimi_linear", "layers.3.self_attn.o_norm", "norms"),
        ("qwen2_moe", "layers.3.mlp.shared_expert_gate", "router"),
        ("lfm2_moe", "layers.3.feed_forward.expert_bias", "router"),
        ("lfm2_moe", "layers.3.feed_forward.experts.5.w2", "experts"),
        ("lfm2_moe", "layers.0.self_attn.q_layernorm", "norms"),
        ("lfm2", "layers.3.feed_forward.w2", "dense MLP"),
        ("gemma4", "embed_tokens_per_layer", "embedding"),
        ("gemma4", "layers.0.router.per_expert_scale", "router"),
        ("gemma4", "layers.0.post_feedforward_layernorm_1", "norms"),
        ("gemma4", "layers.0.experts.switch_glu.down_proj", "experts"),
        ("gemma4", "layers.0.per_layer_projection", "dense MLP"),
        ("gemma4", "layers.0.no_such_thing", "other"),
    ],
)
def test_role_of_is_what_the_family_declares(kind: str, path: str, role: str) -> None:
    assert models.family_of({"model_type": kind}).role_of(path) == role


@pytest.mark.parametrize("name", CONFIGS)
def test_every_weight_of_a_family_has_a_role(name: str) -> None:
    """But for the per-layer inputs of Gemma, its streams and the branch beside attention, which are none of them."""
    config = CONFIGS[name]
    family, asked = models.family_of(dict(config)), Names("", joined=name.startswith("gemma"))
    family.read_weights(asked, family.read_config(dict(config)))
    other = [path for path in asked.found if family.role_of(path.removesuffix(".weight")) == "other"]
    assert all(any(part in path for part in ("per_layer", "altup", "laurel")) for path in other)


def test_rules_of_a_model_are_those_of_its_files() -> None:
    def rules(name: str, **changes: Any) -> MlxRules:
        config = CONFIGS[name] | changes
        family = models.family_of(config)
        return family.mlx_rules(config, family.read_config(config))

    assert rules("llama") == MlxRules()
    assert rules("qwen3_5_moe").prefixes == rules("gemma4").prefixes == ("language_model.model.", "language_model.")
    assert rules("qwen3_next").prefixes == rules("gemma4_text").prefixes == ("model.", "")
    assert (rules("qwen3_5_moe").uncast, rules("qwen3_next").uncast) == (("A_log",), ())
    assert rules("gemma4").config == {"vocab_size": 263} and rules("gemma4_text").config == {}


def test_no_other_module_knows_a_family_by_name() -> None:
    """Names of model types and of GGUF's architectures stand in families and in the one table, nowhere else."""
    root = Path(models.__file__).parents[1]
    known = {name for family in models.families() for name in (family.name, *family.model_types)}
    known |= {name for family in models.families() if family.gguf for name in family.gguf.architectures}
    own = {root / "models" / f"{family.name}.py" for family in models.families()} | {root / "models" / "__init__.py"}
    found = []
    for file in sorted(root.rglob("*.py")):
        if file in own or file.is_relative_to(root / "text"):  # tokenizers and chat formats have names of their own
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and node.value in known:
                found.append(f"{file.relative_to(root)}:{node.lineno}: {node.value!r}")
    assert found == []
