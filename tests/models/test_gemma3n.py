"""Gemma 3n against transformers (Hugging Face files) and mlx-lm (converted files), both in float32."""

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
from penstock.models import gemma3n, gemma4
from penstock.weights.resolve import resolve_model
from tests.models.common import BRANCH, VOCAB, error, write_tokenizer
from tests.models.made import (
    FOUR,
    LONG,
    SHORT,
    Case,
    With,
    check_cosines,
    check_several,
    decoded,
    in_pieces,
    load,
    make,
    reference_error,
    values,
)
from tests.models.test_config import refused

SLIDING, FULL = "sliding_attention", "full_attention"
NORMS = ("post_attention_layernorm", "post_feedforward_layernorm", "post_per_layer_input_norm", "post_laurel_norm")
# routers see rows that were divided by their width; streams that are mixed too much amplify every rounding
FACTORS = dict.fromkeys(NORMS, BRANCH) | {"q_norm": 0.6, "modality_router": 32.0, "embed_tokens": 64**-0.5}
FACTORS |= {"prediction_coefs": 0.3, "correction_coefs": 0.3}


def config_of(**changes: Any) -> dict[str, Any]:
    """A text config as released, every size another one."""
    config = {
        "architectures": ["Gemma3nForCausalLM"],
        "model_type": "gemma3n_text",
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size": 64,
        "hidden_size_per_layer_input": 32,
        "intermediate_size": [96, 96, 96, 160, 160, 96, 96],
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "num_kv_shared_layers": 3,
        "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL, SLIDING],
        "activation_sparsity_pattern": [0.95, 0.8, 0.0, 0.5, 0.0, 0.0, 0.7],
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_num_inputs": 4,
        "laurel_rank": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "sliding_window": 37,
        "final_logit_softcapping": 30.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    return {key: value for key, value in (config | changes).items() if value != "left out"}


CONFIGS: dict[str, dict[str, Any]] = {
    "text": config_of(),
    # nothing shared, three streams, no scale, one width for all layers, and rows that the second table lacks
    "plain": config_of(
        num_hidden_layers=3,
        layer_types=[SLIDING, SLIDING, FULL],
        num_kv_shared_layers=0,
        intermediate_size=112,
        activation_sparsity_pattern=[0.0, 0.9, 0.0],
        altup_num_inputs=3,
        altup_correct_scale=False,
        num_key_value_heads=1,
    ),
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @functools.cache
    def case(name: str) -> Case:
        return make(tmp_path_factory.mktemp("hf"), CONFIGS[name], FACTORS, count=330)

    return case


def released(folder: Path, target: Path, config: dict[str, Any]) -> Path:
    """The weights of a text model as released: below a model of pictures, with keys that shared layers do not use."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        found["model.language_model." + name.removeprefix("model.")] = tensor
    own = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    for n in range(own, config["num_hidden_layers"]):
        for part in ("k_proj", "v_proj", "k_norm"):
            like = found[f"model.language_model.layers.0.self_attn.{part}.weight"]
            name = f"model.language_model.layers.{n}.self_attn.{part}.weight"
            found[name] = values(name, like.shape, {}, 1).astype(like.dtype)
    found["model.embed_vision.embedding.weight"] = np.zeros((3, 5), np.float32)
    target.mkdir()
    save_file(found, target / "model.safetensors", {"format": "pt"})
    outer = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(outer | {"text_config": config}))
    write_tokenizer(target)
    return target


def mlx_logits(folder: Path, tokens: list[int]) -> np.ndarray:
    """With a cache: without one mlx-lm's layers share nothing."""
    import mlx.core as mx
    import mlx_lm.utils

    model, _ = mlx_lm.utils.load_model(folder)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array([tokens]), cache=model.make_cache())[0])


@pytest.fixture(scope="module")
def nested(hf: Callable[[str], Case]) -> Case:
    source = hf("text")
    return source._replace(folder=released(source.folder, source.folder / "nested", CONFIGS["text"]))


@pytest.fixture(scope="module")
def mlx(nested: Case) -> Case:
    import mlx_lm

    folder, tokens = nested.folder / "mlx", nested.tokens[:200]
    mlx_lm.convert(str(nested.folder), str(folder), **FOUR)
    return Case(folder, tokens, mlx_logits(folder, tokens))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    got = load(case.folder).logits(case.tokens)
    assert error(got[:200], case.want[:200]) <= SHORT
    assert error(got, case.want) <= LONG
    assert error(load(case.folder, "reference").logits(case.tokens[:100]), case.want[:100]) <= SHORT


def test_logits_of_the_released_layout_are_the_same(nested: Case, mlx: Case) -> None:
    assert error(load(nested.folder).logits(nested.tokens[:60]), nested.want[:60]) <= SHORT
    assert error(load(mlx.folder).logits(mlx.tokens), mlx.want) <= SHORT
    check_cosines(load(mlx.folder, "cpu", "int8").logits(mlx.tokens), mlx.want)


def test_pieces_and_single_tokens_are_right(hf: Callable[[str], Case]) -> None:
    case = hf("text")
    llm = load(case.folder)
    assert error(in_pieces(llm, case.tokens, (3, 36, 37, 38, 255, 257)), case.want) <= LONG
    assert error(decoded(llm, case.tokens[:40], 0), case.want[:40]) <= SHORT
    assert error(decoded(llm, case.tokens[:300], 255), case.want[254:300]) <= LONG


def test_decode_of_several_gives_the_bits_of_each_alone(mlx: Case) -> None:
    check_several(load(mlx.folder), (1, 69, 303))


WRONG: dict[str, Callable[[Any], dict[str, Any]]] = {
    "window longer": lambda config: {
        "kinds": {kind: dataclasses.replace(k, window=k.window and k.window + 1) for kind, k in config.kinds.items()}
    },
    "one table of positions": lambda config: {
        "kinds": {kind: dataclasses.replace(k, rope=config.kinds[FULL].rope) for kind, k in config.kinds.items()}
    },
    "no neuron is cut off": lambda config: {"cuts": (None,) * 7},
    "more neurons are cut off": lambda config: {"cuts": tuple(cut and cut + 0.1 for cut in config.cuts)},
    "no scale before per-layer inputs": lambda config: {"scaled": False},
    "the first layer of a kind is shared": lambda config: {"sources": (0, 1, 2, 3, 0, 1, 0)},
    "no soft cap": lambda config: {"softcap": None},
}


def _without_tanh(first: Any, rest: Any, scores: Any, *more: Any) -> Any:
    return ops.altup_mix(first, rest, np.arctanh(np.clip(scores, -0.999, 0.999)), *more)


WRONG_OPS: dict[str, dict[str, Any]] = {
    "streams as they are": {"altup_mix": lambda first, rest, *more: (first, rest)},
    "extra stream left out": {
        "altup_mix": lambda *given: ops.altup_mix(*given[:5], 0 * given[5] if given[5] is not None else None)
    },
    "streams not scaled": {"altup_match": lambda x, like: x},
    "scores without tanh": {"altup_mix": _without_tanh},
}


@pytest.mark.parametrize("reading", [*WRONG, *WRONG_OPS])
def test_a_wrong_reading_breaks_the_bound(
    reading: str, hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gemma3n.read_config

    def wrong(raw: dict[str, Any]) -> Any:
        config = right(raw)
        return dataclasses.replace(config, **WRONG[reading](config))

    if reading in WRONG:
        monkeypatch.setattr(gemma3n, "FAMILY", dataclasses.replace(gemma3n.FAMILY, read_config=wrong))
    else:
        monkeypatch.setattr(gemma3n, "ops", With(**WRONG_OPS[reading]))
    assert reference_error(hf("text")) > 5e-5


def test_a_token_that_the_second_table_lacks_has_nothing_there(hf: Callable[[str], Case], tmp_path: Path) -> None:
    """transformers takes row 0, of padding: for tokens of pictures and sound alone, which do not run here."""
    case = hf("plain")
    weights = load_file(case.folder / "model.safetensors")
    weights["model.embed_tokens_per_layer.weight"] = weights["model.embed_tokens_per_layer.weight"][: VOCAB - 13]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config = CONFIGS["plain"] | {"vocab_size_per_layer_input": VOCAB - 13}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path)
    known = [token for token in case.tokens if token < VOCAB - 13][:20]
    for device in ("cpu", "reference"):
        llm = load(tmp_path, device)
        assert error(llm.logits(known), load(case.folder, device).logits(known)) == 0
        assert np.isfinite(llm.logits([VOCAB - 1, *known])).all()


# -- config.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layers", "shared"), [("gemma3n-e2b", 30, 20), ("gemma3n-e4b", 35, 20)])
def test_shipped_configs_share_and_cut_as_released(name: str, layers: int, shared: int) -> None:
    config = gemma3n.read_config(resolve_model(name, ["config"]).read_config())
    assert len(config.sources) == layers and set(config.sources[shared:]) == {shared - 2, shared - 1}
    assert config.cuts[:10] == pytest.approx([1.6448536] * 10) and config.cuts[10:] == (None,) * (layers - 10)
    assert sum(layout.key_width > 0 for layout in gemma4.caches(config)) == shared  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "vocab_size", "num_kv_shared_layers", "laurel_rank"]
)
def test_read_config_names_an_integer_that_is_missing_or_none(key: str) -> None:
    for value in (-1, 1.5, "4", True, [4]):
        assert f" {key} is " in refused(config_of(**{key: value}))
    assert f" {key} is missing, expected an integer" in refused(config_of(**{key: "left out"}))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"altup_active_idx": 1}, "altup_active_idx is 1, expected 0"),
        ({"altup_num_inputs": 1}, "altup_num_inputs is 1, expected an integer from 2"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu', expected 'gelu_pytorch_tanh'"),
        ({"intermediate_size": [96] * 6}, "intermediate_size has 6 entries, expected 7"),
        ({"activation_sparsity_pattern": [0.5] * 6}, "activation_sparsity_pattern is [0.5, 0.5"),
        ({"activation_sparsity_pattern": [1.0] * 7}, "expected a list of 7 numbers from 0 to 1"),
        ({"activation_sparsity_pattern": "left out"}, "activation_sparsity_pattern is missing, expected a list of 7"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6, expected a layer of full_attention before those"),
        ({"vocab_size_per_layer_input": VOCAB + 1}, f"vocab_size_per_layer_input is {VOCAB + 1}, expected an integer"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3, expected a multiple of num_key_value_heads (2)"),
    ],
    ids=str,
)
def test_read_config_refuses(changes: dict[str, Any], words: str) -> None:
    assert words in refused(config_of(**changes))
