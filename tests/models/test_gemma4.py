"""Gemma 4 against transformers (Hugging Face files) and mlx-lm (converted files), both in float32."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock import ops
from penstock.models import gemma4, layers
from penstock.models import step as steps
from penstock.models.layers import experts, linear
from penstock.models.step import PAGE, Step
from penstock.ops.array import Array
from penstock.weights.resolve import resolve_model
from tests.models.common import BRANCH, VOCAB, error
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

SLIDING, FULL = "sliding_attention", "full_attention"
# norms of what is added to the residual stream; scores without a scale should not be too sharp
BRANCHES = dict.fromkeys(
    ("post_attention_layernorm", "post_feedforward_layernorm", "post_per_layer_input_norm"), BRANCH
)
FACTORS = BRANCHES | {"q_norm": 0.6}


def text_config(**changes: Any) -> dict[str, Any]:
    """A text config with experts as released, every size another one; None removes a key."""
    config = {
        "model_type": "gemma4_text",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
        },
        "sliding_window": 48,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": True,
        "enable_moe_block": True,
        "num_experts": 7,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "use_bidirectional_attention": None,
        "dtype": "bfloat16",
    }
    return {k: v for k, v in (config | changes).items() if v is not None or k == "use_bidirectional_attention"}


def config_of(**changes: Any) -> dict[str, Any]:
    """config.json as released: the text config nested."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "tie_word_embeddings": changes.get("tie_word_embeddings", True),
        "vocab_size": VOCAB,  # where mlx-lm looks for it
        "text_config": text_config(**changes),
        "vision_config": None,
        "audio_config": None,
    }


DENSE = dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size")) | {"enable_moe_block": False}

CONFIGS: dict[str, dict[str, Any]] = {
    # 26B-A4B: experts beside a dense MLP, wider global layers whose raw keys are the values, a short window
    "moe": config_of(use_bidirectional_attention="vision"),
    # a window longer than a page, global layers with values of their own, one expert, a head of its own, no soft cap
    "wide": text_config(
        sliding_window=300,
        attention_k_eq_v=False,
        num_global_key_value_heads=None,
        num_attention_heads=6,
        num_key_value_heads=3,
        global_head_dim=20,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        num_hidden_layers=4,
        top_k_experts=1,
        tie_word_embeddings=False,
        final_logit_softcapping=None,
        rms_norm_eps=1e-4,
        rope_parameters={
            SLIDING: {"rope_type": "default", "rope_theta": 5e3},
            FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "factor": 2.0},
        },
    ),
    # 31B: no experts
    "dense": config_of(**DENSE, num_hidden_layers=3, layer_types=[SLIDING, SLIDING, FULL], sliding_window=33),
    # E2B: inputs of each layer's own, the last layers read the keys and values of others and are twice as wide
    "inputs": config_of(
        **DENSE,
        attention_k_eq_v=False,
        num_global_key_value_heads=None,
        num_hidden_layers=8,
        layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=32,
        rms_norm_eps=1e-3,
    ),
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @functools.cache
    def case(name: str) -> Case:
        table = 64**-0.5  # the stream starts at 1, and a table that is also the head gives logits of 1
        return make(tmp_path_factory.mktemp(name), CONFIGS[name], FACTORS | {"embed_tokens": table})

    return case


@pytest.fixture(scope="module")
def mlx(hf: Callable[[str], Case]) -> Callable[[str], Case]:
    @functools.cache
    def case(name: str) -> Case:
        source = hf(name)
        return converted(source, source.folder / "mlx", **FOUR)

    return case


# -- E2B and E4B -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shared"), [("gemma4-e2b", 15), ("gemma4-e4b", 24)])
def test_small_models_of_the_shipped_configs_are_those_of_transformers_and_mlx(
    name: str, shared: int, tmp_path: Path
) -> None:
    """Layers, their kinds and what they share as released; everything narrow, and the window short."""
    text = resolve_model(name, ["config"]).read_config()["text_config"]
    narrow = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "global_head_dim": 32, "sliding_window": 9}
    inputs = {"hidden_size_per_layer_input": 32, "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB}
    config = config_of(**DENSE) | {"text_config": text | narrow | inputs}
    read = gemma4.read_config(config)
    assert read.sources[:shared] == tuple(range(shared)) and set(read.sources[shared:]) == {shared - 2, shared - 1}
    assert read.mlp_widths == (32,) * shared + (64 if name == "gemma4-e2b" else 32,) * (len(read.sources) - shared)
    case = make(tmp_path / "hf", config, FACTORS | {"embed_tokens": 64**-0.5}, count=40)
    llm = load(case.folder)
    assert error(llm.logits(case.tokens), case.want) <= SHORT
    assert error(decoded(llm, case.tokens[:20], 5), case.want[4:20]) <= SHORT
    mlx = converted(case, tmp_path / "mlx", 30, **FOUR)
    assert error(load(mlx.folder).logits(mlx.tokens), mlx.want) <= SHORT


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
    assert error(load(case.folder, "reference").logits(case.tokens[:320]), case.want[:320]) <= LONG


@pytest.mark.parametrize("name", ["moe", "dense", "inputs"])
def test_logits_are_those_of_mlx(name: str, mlx: Callable[[str], Case]) -> None:
    case = mlx(name)
    assert error(load(case.folder).logits(case.tokens), case.want) <= SHORT
    assert error(load(case.folder, "reference").logits(case.tokens[:30]), case.want[:30]) <= SHORT


def test_logits_of_unquantized_files_are_those_of_mlx(hf: Callable[[str], Case]) -> None:
    source = hf("moe")
    case = converted(source, source.folder / "unquantized")
    assert error(load(case.folder).logits(case.tokens), case.want) <= SHORT


@pytest.mark.parametrize("name", ["moe", "inputs"])
def test_logits_with_int8_activations_point_the_same_way(name: str, mlx: Callable[[str], Case]) -> None:
    case = mlx(name)
    check_cosines(load(case.folder, "cpu", "int8").logits(case.tokens), case.want)


def test_logits_of_a_config_that_transformers_saved_are_the_same(hf: Callable[[str], Case], tmp_path: Path) -> None:
    """Newer versions write `per_layer_config` in the place of `global_head_dim` and `num_global_key_value_heads`."""
    import transformers

    case = hf("moe")
    saved = transformers.AutoConfig.from_pretrained(case.folder)
    saved.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert "per_layer_config" in text and "global_head_dim" not in text
    for file in case.folder.glob("*.*"):
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    assert reference_error(case._replace(folder=tmp_path)) <= SHORT


# -- in pieces, token by token, together -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["moe", "wide", "inputs"])
@pytest.mark.parametrize("cuts", [(1,), (3, 47, 48, 49, 255, 257), (77, 130, 311, 513, 599)], ids=str)
def test_prefill_in_any_pieces_is_right(cuts: tuple[int, ...], name: str, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    assert error(in_pieces(load(case.folder), case.tokens, cuts), case.want) <= LONG


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prompt, end", [(0, 60), (250, 320), (510, 570)])
def test_decode_token_by_token_is_right(name: str, prompt: int, end: int, hf: Callable[[str], Case]) -> None:
    """Over the edge of the window, of a page, and of a page that has left the window."""
    case = hf(name)
    rows = decoded(load(case.folder), case.tokens[:end], prompt)
    assert error(rows, case.want[max(0, prompt - 1) : end]) <= LONG


@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("name", ["moe", "inputs"])
def test_decode_of_several_gives_the_bits_of_each_alone(
    name: str, activations: str, mlx: Callable[[str], Case]
) -> None:
    check_several(load(mlx(name).folder, "cpu", activations), (1, 254, 303))


@pytest.mark.parametrize("name, window", [("moe", 48), ("wide", 300)])
def test_pages_that_have_left_the_window_go_back(name: str, window: int, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    engine = load(case.folder).engine
    pools = engine.caches.pools
    before = {key: pool.used for key, pool in pools.items()}
    sequence = engine.open()
    most = -(-window // PAGE) + 1
    for start in range(0, 2000, 100):
        engine.prefill(sequence, case.tokens[:100])
        assert pools[window].used - before[window] <= most
        assert pools[None].used - before[None] == -(-(start + 100) // PAGE)
    for token in case.tokens[:80]:
        engine.decode([sequence], [token])
        assert pools[window].used - before[window] <= most
    engine.close(sequence)
    assert {key: pool.used for key, pool in pools.items()} == before


def test_layers_that_share_keep_nothing(hf: Callable[[str], Case]) -> None:
    engine = load(hf("inputs").folder).engine
    assert engine.model.config.sources == (0, 1, 2, 3, 4, 3, 3, 4)
    sequence = engine.open()
    engine.prefill(sequence, [1, 2, 3])
    sizes = [first.nbytes + second.nbytes for first, second in engine.caches.arrays]
    engine.close(sequence)
    assert all(sizes[:5]) and not any(sizes[5:])


# -- files -----------------------------------------------------------------------------------------------------------


def test_load_skips_towers_with_a_notice(hf: Callable[[str], Case], tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    case = hf("dense")
    for file in case.folder.glob("*.json"):
        (tmp_path / file.name).symlink_to(file)
    weights = load_file(case.folder / "model.safetensors")
    for name in ("vision_tower.patch", "embed_vision.proj", "audio_tower.x", "embed_audio.y"):
        weights[f"model.{name}.weight"] = np.zeros((2, 2), np.float32)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    llm = load(tmp_path, "reference")
    (notice,) = llm.notices
    assert "4 tensors of " in notice and notice.endswith("are skipped")
    assert error(llm.logits(case.tokens[:20]), case.want[:20]) <= SHORT


def test_load_leaves_keys_of_layers_that_share_unread(hf: Callable[[str], Case], tmp_path: Path) -> None:
    """Released files have them."""
    from safetensors.numpy import load_file, save_file

    case = hf("inputs")
    for file in case.folder.glob("*.json"):
        (tmp_path / file.name).symlink_to(file)
    weights = load_file(case.folder / "model.safetensors")
    for n in (5, 6):
        for part in ("k_proj", "v_proj", "k_norm"):
            name = f"model.language_model.layers.{n}.self_attn.{part}.weight"
            weights[name] = weights[name.replace(f".{n}.", ".3.")] * 2
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert error(load(tmp_path, "reference").logits(case.tokens[:20]), case.want[:20]) <= SHORT


def test_load_uses_a_head_that_is_there_although_tied(hf: Callable[[str], Case], tmp_path: Path) -> None:
    """As transformers does: a table and a head of different values were not tied."""
    from safetensors.numpy import load_file, save_file

    from tests.models.made import torch_logits, torch_model

    case = hf("dense")
    for file in case.folder.glob("*.json"):
        (tmp_path / file.name).symlink_to(file)
    weights = load_file(case.folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"][::-1].copy()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    want = torch_logits(torch_model(tmp_path, load=True), case.tokens[:20])
    assert error(want, case.want[:20]) > 0.1
    assert error(load(tmp_path, "reference").logits(case.tokens[:20]), want) <= SHORT


# -- wrong readings: what the bounds above would show ----------------------------------------------------------------


def with_config(case: Case, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Case:
    """The same weights under another config."""
    config = json.loads((case.folder / "config.json").read_text())
    change(config["text_config"])
    for file in case.folder.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config))
    return case._replace(folder=folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text["rope_parameters"][FULL].update(rope_type="default"),
        lambda text: text["rope_parameters"][FULL].update(partial_rotary_factor=1.0),
        lambda text: text["rope_parameters"].update({SLIDING: text["rope_parameters"][FULL]}),
        lambda text: text.update(sliding_window=47),
        lambda text: text.update(sliding_window=49),
        lambda text: text.update(final_logit_softcapping=None),
        lambda text: text.update(top_k_experts=2),
        lambda text: text.update(rms_norm_eps=1e-5),
    ],
    ids=["partial", "whole", "one rope", "shorter", "longer", "no softcap", "two experts", "eps"],
)
def test_a_wrong_config_breaks_the_bound(
    change: Callable[[dict[str, Any]], Any], hf: Callable[[str], Case], tmp_path: Path
) -> None:
    case = hf("moe")
    assert reference_error(with_config(case, tmp_path, lambda text: None)) <= SHORT
    for link in tmp_path.iterdir():
        link.unlink()
    assert reference_error(with_config(case, tmp_path, change)) > 1e-5


class Remembers:
    """rms_norm that takes values from the normed keys where they should come from the raw ones."""

    def __init__(self) -> None:
        self.raw: Any = None

    def __call__(self, x: Array, weight: Array | None, eps: float) -> Array:
        if weight is None and x is self.raw:
            return ops.rms_norm(self.normed, None, eps)
        y = ops.rms_norm(x, weight, eps)
        self.raw, self.normed = x, y
        return y


def erf_geglu(gate: Array, up: Array) -> Array:
    erf = np.vectorize(math.erf)(gate / math.sqrt(2))
    return (0.5 * gate * (1 + erf) * up).astype(np.float32)


def fed_with_expert_input(step: Step, h: Array, w: Any, config: Any) -> Array:
    eps = config.norm_eps
    x = ops.rms_norm(h, w.input_norm, eps)
    scores = linear(step, ops.rms_norm(x, w.router_norm, eps), w.router, "float32")
    ids, weights = ops.moe_route(scores, w.expert_scale, config.top_k)
    return ops.rms_norm(experts(step, x, ids, weights, w.routed, "gelu_tanh"), w.output_norm, eps)


def experts_of_the_dense_input(step: Step, h: Array, w: Any, config: Any) -> Array:
    return right_moe(step, h, dataclasses.replace(w, input_norm=w.dense_norm), config)


def with_weight_of_full_size(step: Step, h: Array, w: Any, config: Any) -> Array:
    return right_moe(step, h, dataclasses.replace(w, router_norm=w.router_norm * config.dim**0.5), config)


right_moe, right_attend, right_mlp, right_experts = gemma4.moe, steps.attend, layers.mlp, layers.experts

WRONG: dict[str, dict[str, Any]] = {
    "scale of a head": {
        "attend": lambda step, cache, q, k, v, scale, window: right_attend(
            step, cache, q, k, v, q.shape[-1] ** -0.5, window
        )
    },
    "values after k_norm": {"ops": With(rms_norm=Remembers())},
    "values not normed": {"ops": With(rms_norm=lambda x, w, eps: x if w is None else ops.rms_norm(x, w, eps))},
    "swiglu": {"mlp": lambda step, x, w, act: right_mlp(step, x, w, "silu")},
    "swiglu in the experts": {
        "experts": lambda step, x, ids, weights, w, act: right_experts(step, x, ids, weights, w, "silu")
    },
    "router fed with the experts' input": {"moe": fed_with_expert_input},
    "experts fed through another norm": {"moe": experts_of_the_dense_input},
    "router weight without dim^(-1/2)": {"moe": with_weight_of_full_size},
    "no embedding scale": {"math": SimpleNamespace(sqrt=lambda _: 1.0)},
    "no scale per expert": {
        "ops": With(moe_route=lambda scores, scale, k, **more: ops.moe_route(scores, np.ones_like(scale), k, **more))
    },
    "no layer scalar": {"ops": With(mul=lambda x, y: x if isinstance(y, np.ndarray) else ops.mul(x, y))},
}


@pytest.mark.parametrize("reading", WRONG)
def test_a_wrong_reading_breaks_the_bound(
    reading: str, hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, wrong in WRONG[reading].items():
        monkeypatch.setattr(gemma4, name, wrong)
    assert reference_error(hf("moe")) > 5e-5  # the wider of the two promises


def test_gelu_by_erf_breaks_the_bound(hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "ops", With(geglu=erf_geglu))
    assert reference_error(hf("dense")) > 5e-5


@pytest.mark.parametrize(
    "wrong",
    [
        {"math": SimpleNamespace(sqrt=lambda x: x**0.5 if x == 64 else 1.0)},
        {"ops": With(mul=lambda x, y: x if y == 2**-0.5 else ops.mul(x, y))},
        {"ops": With(geglu=lambda gate, up: ops.swiglu(gate, up))},
        # the projection's factor moved into its norm, where eps is another one
        {"ops": With(mul=lambda x, y: x if y == 64**-0.5 else ops.mul(x, y))},
    ],
    ids=["table not scaled", "sum not halved", "swiglu", "eps of the raw projection"],
)
def test_wrong_per_layer_inputs_break_the_bound(
    wrong: dict[str, Any], hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in wrong.items():
        monkeypatch.setattr(gemma4, name, value)
    assert reference_error(hf("inputs")) > 1e-5


def test_sharing_with_the_first_layer_of_a_kind_breaks_the_bound(
    hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(raw: dict[str, Any]) -> Any:
        return dataclasses.replace(gemma4.read_config(raw), sources=(0, 1, 2, 3, 4, 0, 0, 1))

    monkeypatch.setattr(gemma4, "FAMILY", dataclasses.replace(gemma4.FAMILY, read_config=wrong))
    assert reference_error(hf("inputs")) > 5e-5
