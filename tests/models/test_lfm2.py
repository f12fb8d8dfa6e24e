"""LFM2 against transformers (Hugging Face files) and mlx-lm (converted files): attention and short convolutions."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import ops
from penstock.errors import InvalidArgument
from penstock.models import lfm2
from penstock.models.step import convolve, with_state_dtype
from tests.models.common import BRANCH, VOCAB, error, some_tokens
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
)

CONV, FULL = "conv", "full_attention"


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """config.json as released, every size another one."""
    config = {
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "norm_eps": 1e-5,
        "rope_theta": 1e4,
        "conv_bias": False,
        "conv_L_cache": 3,
        "layer_types": [CONV, CONV, FULL, CONV, FULL],
        "torch_dtype": "bfloat16",
    }
    return config | changes


EXPERTS = {
    "intermediate_size": 160,
    "moe_intermediate_size": 64,
    "num_dense_layers": 2,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
}
DENSE = {
    "block_dim": 128,
    "block_ff_dim": 250,
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "moe": config_of("lfm2_moe", **EXPERTS),
    # no bias for the choice, weights as they come, scaled; four taps, attention first, and no dense layers
    "plain": config_of(
        "lfm2_moe",
        **EXPERTS
        | {"num_dense_layers": 0, "norm_topk_prob": False, "use_expert_bias": False, "routed_scaling_factor": 1.7},
        conv_L_cache=4,
        num_hidden_layers=2,
        layer_types=[FULL, CONV],
    ),
    # LFM2-1.2B: a dense MLP whose width is computed, layers by the numbers of those that attend
    "dense": config_of("lfm2", **DENSE, layer_types=None, full_attn_idxs=[1, 3], tie_embedding=True),
    "wide": config_of(
        "lfm2", block_auto_adjust_ff_dim=False, intermediate_size=160, block_dim=128, num_hidden_layers=3,
        layer_types=[FULL, CONV, CONV], block_multiple_of=256, block_ffn_dim_multiplier=1.0,
    ),
}  # fmt: skip
SIZE = 128**-0.5  # all are tied: branches are in units of the table, which is also the head
FACTORS = {"out_proj": BRANCH * SIZE, "w2": BRANCH * SIZE, "experts.down_proj": BRANCH * SIZE, "embed_tokens": SIZE}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @functools.cache
    def case(name: str) -> Case:
        count = 600 if name == "moe" else 200
        return make(tmp_path_factory.mktemp("hf"), CONFIGS[name], FACTORS, count=count)

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
    assert error(load(case.folder, "reference").logits(case.tokens[:60]), case.want[:60]) <= SHORT


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_mlx(name: str, mlx: Callable[[str], Case]) -> None:
    case = mlx(name)
    assert error(load(case.folder).logits(case.tokens), case.want) <= SHORT
    assert error(load(case.folder, "reference").logits(case.tokens[:30]), case.want[:30]) <= SHORT


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_logits_of_unquantized_files_are_those_of_mlx(name: str, hf: Callable[[str], Case]) -> None:
    """Whose convolutions have another shape, and of a dense model the same names."""
    source = hf(name)
    case = converted(source, source.folder / "unquantized", count=60)
    assert error(load(case.folder).logits(case.tokens), case.want) <= SHORT


def test_logits_with_int8_activations_point_the_same_way(mlx: Callable[[str], Case]) -> None:
    case = mlx("moe")
    check_cosines(load(case.folder, "cpu", "int8").logits(case.tokens), case.want)


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_logits_of_a_config_that_transformers_saved_are_the_same(
    name: str, hf: Callable[[str], Case], tmp_path: Path
) -> None:
    import transformers

    case = hf(name)
    transformers.AutoConfig.from_pretrained(case.folder).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in config and "block_ff_dim" not in config
    for file in case.folder.glob("*.*"):
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    assert reference_error(case._replace(folder=tmp_path)) <= SHORT


@pytest.mark.parametrize("cuts", [(1,), (1, 2, 3, 4, 6, 255, 257), (77, 302, 513, 599)], ids=str)
def test_prefill_in_any_pieces_is_right(cuts: tuple[int, ...], hf: Callable[[str], Case]) -> None:
    case = hf("moe")
    assert error(in_pieces(load(case.folder), case.tokens, cuts), case.want) <= LONG


@pytest.mark.parametrize("name, prompt, end", [("moe", 0, 30), ("moe", 250, 280), ("plain", 5, 30), ("dense", 1, 30)])
def test_decode_token_by_token_is_right(name: str, prompt: int, end: int, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    rows = decoded(load(case.folder), case.tokens[:end], prompt)
    assert error(rows, case.want[max(0, prompt - 1) : end]) <= LONG


@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_decode_of_several_gives_the_bits_of_each_alone(activations: str, mlx: Callable[[str], Case]) -> None:
    check_several(load(mlx("moe").folder, "cpu", activations), (1, 254, 303))


def test_sequences_in_one_step_get_what_each_gets_alone(mlx: Callable[[str], Case]) -> None:
    """Prompts of several lengths and answers, mixed by the scheduler."""
    llm = load(mlx("moe").folder)
    prompts = [some_tokens(n, seed=n) for n in (1, 2, 5, 130, 300)]
    alone = [llm.generate(prompt, max_tokens=6).tokens for prompt in prompts]
    assert [answer.tokens for answer in llm.generate(prompts, max_tokens=6)] == alone


def test_kept_runs_count_as_far_as_they_are_accepted(mlx: Callable[[str], Case]) -> None:
    """Drafts: convolutions move on by the accepted tokens alone, to the bit; and change no text."""
    from tests.engine.test_speculate import test_a_kept_run_counts_as_far_as_it_is_accepted as check_kept_runs

    llm = load(mlx("moe").folder)
    check_kept_runs(254, llm, np.random.default_rng(0))
    repeated = [7, 8, 9, 10, 11] * 6
    want = llm.generate(repeated, max_tokens=24, speculate="off").tokens
    assert llm.generate(repeated, max_tokens=24, speculate="ngram").tokens == want


def test_a_session_is_saved_and_restored(mlx: Callable[[str], Case], tmp_path: Path) -> None:
    llm = load(mlx("moe").folder)
    session = llm.session()
    session.append(some_tokens(40))
    session.save(tmp_path / "session")
    want = session.generate(max_tokens=5).tokens
    assert penstock.restore(tmp_path / "session", llm).generate(max_tokens=5).tokens == want


def test_there_is_no_state_whose_dtype_could_be_chosen() -> None:
    layouts = lfm2.caches(lfm2.read_config(CONFIGS["moe"]))
    assert with_state_dtype(layouts, "float32") == layouts
    with pytest.raises(InvalidArgument, match="the model has no recurrent states"):
        with_state_dtype(layouts, "bfloat16")


# -- wrong readings: what the bounds above would show ----------------------------------------------------------------


def swapped(x: Any, *counts: int) -> Any:
    a, b, c = ops.split_columns(x, *counts)
    return b, a, c


def gated(step: Any, cache: Any, x: Any, weight: Any, act: str) -> Any:
    return convolve(step, cache, x, weight)


def without_norm(x: Any, w: Any, eps: float, *dtype: Any) -> Any:
    return x if x.ndim == 3 else ops.rms_norm(x, w, eps, *dtype)


def without_bias(scores: Any, bias: Any, *how: Any, **more: Any) -> Any:
    return ops.moe_group_route(scores, None, *how, **more)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "gates the other way round": ("moe", {"ops": With(split_columns=swapped)}),
    "convolution with its activation": ("moe", {"convolve": gated}),
    "no norm of heads": ("dense", {"ops": With(rms_norm=without_norm)}),
    "no bias of the choice": ("moe", {"ops": With(moe_group_route=without_bias)}),
}


@pytest.mark.parametrize("reading", WRONG)
def test_a_wrong_reading_breaks_the_bound(
    reading: str, hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, replaced = WRONG[reading]
    for attribute, wrong in replaced.items():
        monkeypatch.setattr(lfm2, attribute, wrong)
    assert reference_error(hf(name)) > 5e-5  # the wider of the two promises


WRONG_CONFIG: dict[str, tuple[str, dict[str, Any]]] = {
    "weights renormalised": ("plain", {"renormalise": True}),
    "experts not scaled": ("plain", {"routed_scale": 1.0}),
    "one expert less": ("moe", {"top_k": 2}),
    "eps": ("moe", {"norm_eps": 1e-4}),
}


@pytest.mark.parametrize("reading", WRONG_CONFIG)
def test_a_wrong_config_breaks_the_bound(
    reading: str, hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change = WRONG_CONFIG[reading]
    right = lfm2.read_config
    wrong = dataclasses.replace(lfm2.FAMILY, read_config=lambda raw: dataclasses.replace(right(raw), **change))
    monkeypatch.setattr(lfm2, "FAMILY", wrong)
    assert reference_error(hf(name)) > 1e-5
