"""GGUF files of each architecture, written as llama.cpp's converter writes them, against the released weights."""

import functools
import re
import tracemalloc
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import pre_tokenizers

import penstock
from penstock.cli.main import run
from penstock.engine.engine import Engine, Model
from penstock.errors import CheckpointError
from penstock.models import family_of, replaced
from penstock.models.gguf import GgufModel, GgufSource, open_gguf
from penstock.models.gguf_keys import GgufKeys
from penstock.models.layers import ExpertStack
from penstock.models.split import Mesh, SplitSource
from penstock.ops.device import device_for
from tests.models.common import VOCAB, error, some_tokens
from tests.models.gguf_files import MODELS, Released, mixed, released, rounded, tensors_of, write
from tests.parallel.threads import Threads

CLOSE = 1e-6


def some(names: Iterable[str], quick: Sequence[str]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def engine_of(family: Any, config: Any, weights: Any, device: str = "cpu") -> Engine:
    model = Model(family, config, weights, "", 0)
    return Engine(model, device=device_for(device), activations="float32", max_context=config.max_positions)


def logits(engine: Engine, tokens: list[int]) -> np.ndarray:
    return engine.prefill(engine.open(), tokens, every=True)


@functools.cache
def wanted(name: str, count: int) -> np.ndarray:
    """Logits with the released weights."""
    config = MODELS[name]
    family = family_of(config)
    read = family.read_config(config)
    return logits(engine_of(family, read, family.read_weights(Released(config), read)), some_tokens(count))


def of_file(model: GgufModel, tokens: list[int], device: str = "cpu") -> np.ndarray:
    config = model.read_config()
    return logits(engine_of(model.family, config, model.family.read_weights(model.source, config), device), tokens)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_released_weights(tmp_path: Path, name: str) -> None:
    model = open_gguf(write(tmp_path / "x.gguf", name))
    two = name.startswith(("deepseek2", "mistral4"))
    bound = 3 * CLOSE if two else CLOSE  # kv_b_proj is two: sums have another order
    assert error(of_file(model, some_tokens(60)), wanted(name, 60)) < bound
    assert not model.source.unused()
    assert not [notice for notice in model.notices if "not known" in notice]


@pytest.mark.parametrize("name", some(MODELS, ("qwen35moe", "gemma4", "deepseek2", "gpt-oss")))
def test_logits_of_blocks_are_those_of_their_numbers(tmp_path: Path, name: str) -> None:
    blocks = mixed(tensors_of(name))
    dense = open_gguf(write(tmp_path / "dense.gguf", name, tensors=rounded(blocks)))
    model, tokens = open_gguf(write(tmp_path / "x.gguf", name, tensors=blocks)), some_tokens(30)
    assert error(of_file(model, tokens), of_file(dense, tokens)) < 3 * CLOSE


STREAMED = ("qwen35moe", "gemma4", "deepseek2", "gpt-oss", "glm4moe", "minimax-m2", "lfm2moe")
STREAMED += ("kimi-linear", "mistral4", "llama experts")


@pytest.mark.parametrize("name", some(STREAMED, ("gemma4", "gpt-oss")))
def test_experts_are_streamed_from_blocks(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.gguf_tokenizer", lambda _: SimpleNamespace(vocab_size=1))
    path, tokens = write(tmp_path / "x.gguf", name, tensors=mixed(tensors_of(name))), some_tokens(12)
    with penstock.load(path, device="cpu", activations="float32") as llm:
        want = llm.logits(tokens)
    with penstock.load(path, device="cpu", activations="float32", expert_cache="60%") as llm:
        assert error(llm.logits(tokens), want) < 5 * CLOSE


@pytest.mark.parametrize("name", some(MODELS, ("qwen35moe", "gpt-oss")))
def test_two_ranks_have_whole_blocks_and_the_sum(tmp_path: Path, name: str) -> None:
    """Also value heads in the order of the file, of which a rank has some and the key heads that they read."""
    model, tokens = open_gguf(write(tmp_path / "x.gguf", name, "Q8_0")), some_tokens(9)
    config, family = model.read_config(), model.family
    want = logits(engine_of(family, config, family.read_weights(model.source, config), "reference"), tokens)
    assert model.columns == 32 and family.split is not None

    def work(rank: int) -> np.ndarray:
        mesh = Mesh(rank, 2)
        split = family.split(config, mesh, model.columns)  # type: ignore[misc]
        weights = family.read_weights(SplitSource(GgufSource(model.file, model.config), split, mesh), split.config)
        if config.experts:
            slots = mesh.slot_of(config.experts)
            weights = replaced(weights, ExpertStack, lambda stack: replace(stack, slot_of=slots))
        part = Model(family, split.config, weights, "", split=split, mesh=mesh)
        engine = Engine(part, device=device_for("reference"), activations="float32", max_context=64)
        return logits(engine, tokens)

    for found in Threads(2).run(work):
        assert error(found, want) < 5 * CLOSE


@pytest.mark.parametrize("name", ["qwen35", "gemma3", "kimi-linear", "mistral3"])
def test_logits_would_show_a_wrong_reading(tmp_path: Path, name: str) -> None:
    """Value heads as if they were in the released order, norms with their 1, decays as stored, rows of q and k too."""
    model = open_gguf(write(tmp_path / "x.gguf", name))
    model.config.pop("linear_value_heads_tiled", None)
    model.source.architecture = replace(model.source.architecture, values={"*A_log": np.negative}, rows=None)
    assert error(of_file(model, some_tokens(60)), wanted(name, 60)) > 1e-3


def test_experts_whose_gates_lie_beside_their_ups_are_read(tmp_path: Path) -> None:
    """What the converter's option fuse-gate-up-exps writes."""
    tensors = tensors_of("qwen35moe")
    for n in range(4):
        gate, up = (tensors.pop(f"blk.{n}.ffn_{part}_exps.weight") for part in ("gate", "up"))
        tensors[f"blk.{n}.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], axis=1)
    model = open_gguf(write(tmp_path / "x.gguf", "qwen35moe", tensors=tensors))
    assert error(of_file(model, some_tokens(60)), wanted("qwen35moe", 60)) < CLOSE


def test_older_files_are_read(tmp_path: Path) -> None:
    """`kv_b_proj` in one piece with the widths of heads as key_length and value_length; `in_proj_qkvz` in one."""
    config, weights = MODELS["deepseek2"], released("deepseek2")
    tensors = {name: array for name, array in tensors_of("deepseek2").items() if not re.search(r"attn_[kv]_b\.", name)}
    for n in range(config["num_hidden_layers"]):
        tensors[f"blk.{n}.attn_kv_b.weight"] = weights[f"layers.{n}.self_attn.kv_b_proj"]
    older = {"attention__key_length_mla": None, "attention__value_length_mla": None}
    older |= {"attention__key_length": 96, "attention__value_length": 96, "attention__head_count_kv": 8}
    path = write(tmp_path / "x.gguf", "deepseek2", tensors=tensors, **older)
    np.testing.assert_array_equal(of_file(open_gguf(path), some_tokens(60)), wanted("deepseek2", 60))
    tensors = tensors_of("qwen3next")
    for n in range(3):
        for part in ("attn_qkv", "attn_gate"):
            del tensors[f"blk.{n}.{part}.weight"]
        tensors[f"blk.{n}.ssm_in.weight"] = released("qwen3next")[f"layers.{n}.linear_attn.in_proj_qkvz"]
    path = write(tmp_path / "x.gguf", "qwen3next", tensors=tensors)
    assert error(of_file(open_gguf(path), some_tokens(60)), wanted("qwen3next", 60)) < CLOSE


def test_queries_of_mistral4_grow_only_where_a_file_says_so(tmp_path: Path) -> None:
    """llama.cpp's converter writes it for Mistral's own files, not for those in the layout of transformers."""
    rope = MODELS["mistral4"]["rope_parameters"] | {"llama_4_scaling_beta": 0.0}
    config = MODELS["mistral4"] | {"rope_parameters": rope}
    family, tokens = family_of(config), some_tokens(60)
    read: Any = family.read_config(config)
    assert read.query_scale is None
    want = logits(engine_of(family, read, family.read_weights(Released(config), read)), tokens)
    model = open_gguf(write(tmp_path / "x.gguf", "mistral4", attention__temperature_scale=None))
    assert any("temperature_scale is missing, queries do not grow from position 16 on" in n for n in model.notices)
    assert error(of_file(model, tokens), want) < 3 * CLOSE < error(want, wanted("mistral4", 60))


def test_what_is_copied_and_skipped_is_said(tmp_path: Path) -> None:
    model = open_gguf(write(tmp_path / "x.gguf", "qwen35moe"))
    assert model.copied_nbytes == 0 and model.nbytes == model.file.nbytes  # value heads stay in their order
    model = open_gguf(write(tmp_path / "x.gguf", "deepseek2 flash"))
    rows = [model.file.tensors[f"blk.{n}.attn_{part}.weight"].nbytes for n in range(3) for part in ("q", "kv_a_mqa")]
    assert model.copied_nbytes == sum(rows)
    assert any("2 tensors of layers from 3 on (prediction of further tokens) are skipped" in n for n in model.notices)
    assert model.nbytes == model.file.nbytes - (256 * 512 + 256) * 4


def test_further_layers_may_be_counted_by_a_list(tmp_path: Path) -> None:
    """As all numbers that are alike for all layers."""
    model = open_gguf(write(tmp_path / "x.gguf", "qwen2moe", nextn_predict_layers=[0, 0]))
    assert len(model.tensors) == len(model.file.tensors)


def tokenizer_keys(pre: str = "qwen35") -> dict[str, Any]:
    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", *(f"[PAD{n}]" for n in range(258, VOCAB))]
    kinds = [3, *[1] * 257, *[5] * (VOCAB - 258)]
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": ["a b"]}
    return {f"tokenizer__ggml__{key}": value for key, value in (keys | {"eos_token_id": 0}).items()}


@pytest.mark.parametrize("name", some(("qwen35moe", "gpt-oss"), ()))
def test_generate_inspect_and_verify_take_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = write(tmp_path / "x.gguf", name, tensors=mixed(tensors_of(name)), **tokenizer_keys())
    assert run(["generate", "--model", str(path), "--prompt", "cab", "--max-tokens", "3", "--device", "cpu"]) == 0
    capsys.readouterr()
    assert run(["inspect", str(path)]) == 0
    assert "MXFP4" in capsys.readouterr().out
    assert run(["verify", str(path)]) == 0


def test_drafts_change_nothing_where_value_heads_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    path, found = write(tmp_path / "x.gguf", "qwen35", **tokenizer_keys()), []
    for speculate in ("off", "ngram"):
        with penstock.load(path, device="cpu", activations="float32", speculate=speculate) as llm:
            found.append(llm.generate("cab cab cab cab cab", max_tokens=24).tokens)
    assert found[0] == found[1]


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "program"), [("lfm2", "penstock convert"), ("gemma3n", "llama-quantize")])
def test_a_type_that_no_kernel_reads_names_a_program_that_takes_the_file(
    tmp_path: Path, name: str, program: str
) -> None:
    rows = tensors_of(name)["token_embd.weight"].shape[0]
    table = np.zeros((rows, 54), np.uint8), gguf.GGMLQuantizationType.TQ1_0
    path = write(tmp_path / "x.gguf", name, tensors=tensors_of(name) | {"token_embd.weight": table})
    with pytest.raises(CheckpointError, match=rf"'token_embd.weight' has type TQ1_0, expected .*: {program}"):
        open_gguf(path)


@pytest.mark.parametrize("lacks", ["blk.1.ffn_up_exps.weight", "blk.0.ssm_a", "output_norm.weight"])
def test_every_verb_names_a_tensor_that_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lacks: str
) -> None:
    tensors = tensors_of("qwen35moe")
    del tensors[lacks]
    path = str(write(tmp_path / "x.gguf", "qwen35moe", tensors=tensors, **tokenizer_keys()))
    for verb in (["inspect", path], ["plan", path], ["generate", "--model", path, "--device", "cpu", "-p", "cab"]):
        assert run(verb) == 1
        assert capsys.readouterr().err.splitlines()[-1] == f"penstock: error: {path}: has no tensor '{lacks}'"
    assert run(["verify", path]) == 1
    assert f"problem: {path}: has no tensor '{lacks}'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("qwen35", {"ssm__state_size": None}, "qwen35.ssm.state_size is missing, expected an integer"),
        (
            "qwen35",
            {"ssm__inner_size": 100},
            "qwen35: ssm.inner_size is 100, expected a multiple of ssm.time_step_rank",
        ),
        ("qwen35", {"nextn_predict_layers": 4}, "qwen35.nextn_predict_layers is 4, expected less than block_count (4)"),
        ("qwen35moe", {"expert_count": None}, "qwen35moe.expert_count is missing"),
        ("qwen35moe", {"expert_gating_func": 2}, "qwen35moe.expert_gating_func is 2, expected 1, the only value"),
        ("gemma3", {"rope__dimension_count": 16}, "gemma3.rope.dimension_count is 16, expected 32"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping is 50.0, expected 0.0"),
        ("gemma4", {"attention__key_length_swa": None}, "gemma4.attention.key_length_swa is missing"),
        ("gemma4", {"attention__sliding_window_pattern": [True, False]}, "gemma4.attention.sliding_window_pattern is"),
        ("gemma4", {"feed_forward_length": [512, 512, 512, 512, 512, 64]}, "gemma4.feed_forward_length is [512"),
        ("gemma4", {"attention__head_count_kv": [2, 2, 1, 2, 1, 1]}, "gemma4: attention.head_count_kv of layer"),
        ("deepseek2", {"attention__kv_lora_rank": None}, "deepseek2.attention.kv_lora_rank is missing"),
        ("deepseek2", {"expert_gating_func": 1}, "deepseek2.expert_gating_func is 1, expected 2 (sigmoid)"),
        ("deepseek2", {"attention__temperature_scale": 0.1}, "deepseek2.attention.temperature_scale is 0.1"),
        ("gpt-oss", {"attention__sliding_window": None}, "gpt-oss.attention.sliding_window is missing"),
        ("glm4moe", {"expert_used_count": 99}, "num_experts_per_tok is 99"),
        ("minimax-m2", {"expert_shared_count": 1}, "minimax-m2: experts have n_shared_experts 1, expected 0"),
        ("mistral4", {"rope__scaling__type": "linear"}, "mistral4.rope.scaling.type is 'linear', expected 'yarn'"),
        ("mistral4", {"expert_gating_func": 2}, "mistral4.expert_gating_func is 2, expected 1 (softmax)"),
        ("mistral4", {"attention__temperature_length": 8}, "mistral4.attention.temperature_length is 8, expected 16"),
        ("mistral4", {"expert_group_count": 2}, "n_group is 2, expected 1"),
        ("mistral3 small", {"expert_count": 8}, "mistral3.expert_count is 8, expected no experts"),
    ],
    ids=range(22),
)
def test_open_refuses_metadata_by_name(tmp_path: Path, name: str, changes: dict[str, Any], expected: str) -> None:
    path = write(tmp_path / "x.gguf", name, tensors=tensors_of(name), **changes)
    with pytest.raises(CheckpointError) as raised:
        open_gguf(path).read_config()
    assert str(raised.value).startswith(f"{path}: {expected}") and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("deepseek2", {"attention__kv_lora_rank": 1 << 30}, "kv_lora_rank is 1073741824, expected an integer"),
        ("deepseek2", {"attention__head_count": 1 << 24}, "num_attention_heads is 16777216 and their width 96"),
        ("mistral4", {"attention__key_length_mla": 1 << 30}, "num_attention_heads is 8 and their width 1073741824"),
        ("kimi-linear", {"attention__key_length_mla": 1 << 30}, "num_attention_heads is 8 and their width 1073741824"),
        ("kimi-linear", {"attention__kv_lora_rank": 1 << 30}, "kv_lora_rank is 1073741824, expected an integer"),
        ("qwen3next", {"ssm__state_size": 1 << 28}, "heads of linear attention have 1073743360 channels, expected"),
        ("lfm2", {"embedding_length": 1 << 31}, "heads have 268435456 rotary channels, expected at most 1048576"),
    ],
    ids=range(7),
)
def test_sizes_that_no_model_has_take_no_memory(
    tmp_path: Path, name: str, changes: dict[str, Any], expected: str
) -> None:
    path = write(tmp_path / "x.gguf", name, tensors=tensors_of(name), **changes)
    model = open_gguf(path)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as raised:
            model.family.read_weights(model.source, model.read_config())
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert str(raised.value).startswith(f"{path}: {expected}")


def test_numbers_beyond_float32_are_read_without_a_warning() -> None:
    file: Any = SimpleNamespace(metadata={"lfm2.rope.freq_base": 1e300}, path="x.gguf")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert GgufKeys(file, "lfm2").number("rope.freq_base") == 1e300


def test_factors_of_gemma_4_that_are_no_share_are_refused(tmp_path: Path) -> None:
    for factors, expected in (
        (np.ones(7, np.float32), r"rope_freqs.weight has shape \(7,\), expected 32 numbers"),
        (np.linspace(1, 2, 32, dtype=np.float32), "rope_freqs.weight has other numbers, expected 1 and"),
        (None, "has no tensor 'rope_freqs.weight'"),
    ):
        tensors = tensors_of("gemma4") | {"rope_freqs.weight": factors}
        path = write(tmp_path / "x.gguf", "gemma4", tensors={k: v for k, v in tensors.items() if v is not None})
        with pytest.raises(CheckpointError, match=expected):
            open_gguf(path)
