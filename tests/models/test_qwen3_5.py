"""The Qwen3.5 family against transformers (Hugging Face files) and mlx-lm (converted files), both in float32."""

import copy
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import numpy as np
import pytest
import torch
import transformers

import penstock
from penstock import ops
from penstock.api import LLM
from penstock.models import qwen3_5, step
from penstock.ops.array import Array
from tests.models.common import (
    VOCAB,
    dense_config,
    error,
    moe_config,
    next_config,
    some_tokens,
    tensors,
    text_config,
    write_model,
    write_tokenizer,
)

# max |difference| / max |logit|. What penstock promises is 1e-5 up to 200 tokens and 5e-5 up to 1000; these models stay
# below 1e-6.
SHORT, LONG = 5e-6, 1e-5

transformers.logging.set_verbosity_error()


# -- checkpoints and what they should answer -------------------------------------------------------------------------

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}

# Each differs from the others in all that a config can say: layouts of the experts, ratios of heads, widths, rotations.
HF: dict[str, dict[str, Any]] = {
    # experts stacked in one tensor, 6 query to 2 key heads, 4 value to 2 key heads
    "moe": moe_config(),
    # a module per expert, dense layers between, no renormalisation, one key head for 4 query heads
    "next": next_config(
        num_hidden_layers=5,
        full_attention_interval=2,
        mlp_only_layers=[2],
        norm_topk_prob=False,
        num_attention_heads=4,
        num_key_value_heads=1,
        linear_num_value_heads=8,
        linear_conv_kernel_dim=2,
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-5,
    ),
    # no experts, tied by the outer config alone, layer kinds by a list, as many key as value heads, Dv > Dk
    "dense": dense_config(
        hidden_size=96,
        num_hidden_layers=5,
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=20,
        linear_num_value_heads=3,
        linear_num_key_heads=3,
        linear_key_head_dim=10,
        linear_value_head_dim=37,
        linear_conv_kernel_dim=3,
        intermediate_size=111,
        rope_parameters={"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 1.0},
    )
    | {"tie_word_embeddings": True},
    # a text model alone, as transformers saves it itself; every expert is chosen; YaRN
    "text": text_config(
        num_hidden_layers=3,
        full_attention_interval=3,
        num_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=17,
        shared_expert_intermediate_size=31,
        rope_parameters=YARN,
    ),
}


# Widths of heads, numbers of experts and the ratio of layers as in the released models.
TRUE_WIDTHS = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}


class Case(NamedTuple):
    folder: Path
    tokens: list[int]
    want: np.ndarray  # float32 logits of the oracle


@functools.cache
def load(folder: Path, device: str, activations: str = "float32") -> LLM:
    return penstock.load(folder, device=device, activations=activations)


def transformers_logits(folder: Path, tokens: Sequence[int]) -> np.ndarray:
    nested = "text_config" in json.loads((folder / "config.json").read_text())
    kind: Any = transformers.AutoModelForImageTextToText if nested else transformers.AutoModelForCausalLM
    options = {"dtype": torch.float32, "experts_implementation": "eager"}  # which takes any width
    model, about = kind.from_pretrained(folder, output_loading_info=True, **options)
    missing = [name for name in (*about["missing_keys"], *about["mismatched_keys"]) if "visual" not in name]
    assert not missing, missing  # else the oracle would have made weights up
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0].numpy()


def mlx_logits(folder: Path, tokens: Sequence[int]) -> np.ndarray:
    """Scales and biases become float32 with the rest, which changes no value, and so does every product."""
    model, _ = mlx_lm.utils.load_model(folder)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array([list(tokens)]))[0])


def saved_by_transformers(folder: Path, config: dict[str, Any]) -> None:
    """save_pretrained of the text model, with the weights that `tensors` makes up."""
    write_model(folder / "source", config)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "source", dtype=torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer(folder)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @functools.cache
    def case(name: str) -> Case:
        folder = tmp_path_factory.mktemp(name)
        if name == "text":
            saved_by_transformers(folder, HF[name])
        else:
            write_model(folder, HF[name], shards=3 if name == "moe" else 1)
        tokens = some_tokens(600, seed=len(name))  # three pieces of the prefill grid
        return Case(folder, tokens, transformers_logits(folder, tokens))

    return case


def mixed(path: str, _: Any) -> dict[str, int] | bool:
    """All bit widths and group sizes in one model, and dense matrices between them."""
    formats = {
        "q_proj": (2, 32),
        "k_proj": (3, 64),
        "v_proj": (5, 32),
        "o_proj": (6, 64),
        "in_proj_qkv": (8, 32),
        "in_proj_z": (3, 32),
        "out_proj": (5, 64),
        "switch_mlp.gate_proj": (3, 32),
        "switch_mlp.up_proj": (6, 64),
        "switch_mlp.down_proj": (2, 32),
        "shared_expert.gate_proj": (4, 64),
        "shared_expert.up_proj": (4, 32),
        "embed_tokens": (6, 32),
        "lm_head": (8, 64),
        "mlp.gate": (8, 64),
    }
    found = next((formats[end] for end in formats if path.endswith(end)), None)
    return False if found is None else {"bits": found[0], "group_size": found[1]}


FOUR = {"quantize": True, "q_bits": 4, "q_group_size": 32}

# of what to convert, and how
MLX: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "moe": (moe_config(), FOUR),
    "mixed": (moe_config(), FOUR | {"quant_predicate": mixed}),
    "unquantized": (moe_config(linear_num_value_heads=2), {}),
    # a dense layer, tensors that do not divide into groups of 64 stay dense
    "next": (next_config(mlp_only_layers=[1], linear_num_value_heads=6), FOUR | {"q_group_size": 64}),
    "dense": (dense_config(hidden_size=128, tie_word_embeddings=True, linear_num_value_heads=8), FOUR),
    "wide": (
        dense_config(hidden_size=128, intermediate_size=384, head_dim=64, linear_value_head_dim=32),
        {"quantize": True, "q_bits": 8, "q_group_size": 128},
    ),
    "yarn": (moe_config(rope_parameters=YARN), {}),
    "true widths": (moe_config(**TRUE_WIDTHS), FOUR | {"q_group_size": 64}),
    **{
        f"{bits} bits": (moe_config(linear_num_value_heads=8), {"quantize": True, "q_bits": bits, "q_group_size": 64})
        for bits in (2, 3, 5, 6, 8)
    },
}


@pytest.fixture(scope="module")
def mlx(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @functools.cache
    def case(name: str) -> Case:
        config, options = MLX[name]
        folder = tmp_path_factory.mktemp("mlx")
        write_model(folder / "source", config)
        mlx_lm.convert(str(folder / "source"), str(folder / "made"), **options)
        tokens = some_tokens(200, seed=len(name))
        return Case(folder / "made", tokens, mlx_logits(folder / "made", tokens))

    return case


# -- whole sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HF)
def test_logits_are_those_of_transformers(name: str, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    got = load(case.folder, "cpu").logits(case.tokens)
    assert error(got[:200], case.want[:200]) <= SHORT
    assert error(got, case.want) <= LONG


@pytest.mark.parametrize("name", HF)
def test_logits_of_the_reference_are_those_of_transformers(name: str, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    got = load(case.folder, "reference").logits(case.tokens[:300])
    assert error(got, case.want[:300]) <= SHORT


@pytest.mark.parametrize("name", ["moe", "next", "dense", "unquantized"])
def test_logits_are_those_of_mlx(name: str, mlx: Callable[[str], Case]) -> None:
    case = mlx(name)
    assert error(load(case.folder, "cpu").logits(case.tokens), case.want) <= SHORT


@pytest.mark.slow  # compiles the kernels of every format
@pytest.mark.parametrize("name", sorted(MLX.keys() - {"moe", "next", "dense", "unquantized"}))
def test_logits_of_any_format_are_those_of_mlx(name: str, mlx: Callable[[str], Case]) -> None:
    case = mlx(name)
    assert error(load(case.folder, "cpu").logits(case.tokens), case.want) <= SHORT


@pytest.mark.parametrize("name", MLX)
def test_logits_of_the_reference_are_those_of_mlx(name: str, mlx: Callable[[str], Case]) -> None:
    case = mlx(name)
    assert error(load(case.folder, "reference").logits(case.tokens[:40]), case.want[:40]) <= SHORT


@pytest.mark.parametrize("name", ["moe", "next", "dense"])
def test_logits_with_int8_activations_point_the_same_way(name: str, mlx: Callable[[str], Case]) -> None:
    case = mlx(name)
    got, want = load(case.folder, "cpu", "int8").logits(case.tokens), case.want
    cosines = np.sum(got * want, axis=1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
    assert np.mean(cosines >= 0.995) >= 0.95 and cosines.min() >= 0.97
    assert np.mean(got.argmax(axis=1) == want.argmax(axis=1)) >= 0.9
    assert error(got, want) > SHORT  # it did round


@pytest.mark.slow
@pytest.mark.parametrize("config", [moe_config(**TRUE_WIDTHS), next_config(**TRUE_WIDTHS)], ids=["moe", "next"])
def test_logits_in_true_widths_are_those_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    folder, tokens = write_model(tmp_path, config), some_tokens(1000)
    got, want = load(folder, "cpu").logits(tokens), transformers_logits(folder, tokens)
    assert error(got[:200], want[:200]) <= SHORT and error(got, want) <= LONG


@pytest.mark.slow
@pytest.mark.parametrize("name", HF)
def test_logits_of_a_thousand_tokens_are_those_of_transformers(name: str, hf: Callable[[str], Case]) -> None:
    folder, tokens = hf(name).folder, some_tokens(1000, seed=1)
    assert error(load(folder, "cpu").logits(tokens), transformers_logits(folder, tokens)) <= LONG


# -- in pieces, token by token, together -----------------------------------------------------------------------------


def in_pieces(llm: LLM, tokens: Sequence[int], cuts: Sequence[int]) -> np.ndarray:
    """Logits after each token, from one prefill per piece."""
    engine = llm.engine
    sequence = engine.open()
    try:
        edges = [0, *cuts, len(tokens)]
        pieces = [engine.prefill(sequence, tokens[a:b], every=True) for a, b in itertools.pairwise(edges)]
        return np.concatenate(pieces)
    finally:
        engine.close(sequence)


@pytest.mark.parametrize("name", ["moe", "next"])
@pytest.mark.parametrize("cuts", [(1,), (3, 4, 5, 70), (255, 257), (77, 130, 131, 513, 599)], ids=str)
def test_prefill_in_any_pieces_is_right(cuts: tuple[int, ...], name: str, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    assert error(in_pieces(load(case.folder, "cpu"), case.tokens, cuts), case.want) <= LONG


@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_prefill_cut_at_the_grid_gives_the_same_bits(activations: str, mlx: Callable[[str], Case]) -> None:
    llm, tokens = load(mlx("moe").folder, "cpu", activations), some_tokens(700)
    whole = llm.logits(tokens)
    for cuts in ((256,), (512,), (256, 512)):
        np.testing.assert_array_equal(in_pieces(llm, tokens, cuts), whole)


@pytest.mark.parametrize("name", ["moe", "next", "dense"])
@pytest.mark.parametrize("prompt", [1, 5, 255])
def test_decode_token_by_token_is_right(prompt: int, name: str, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    engine = load(case.folder, "cpu").engine
    sequence = engine.open()
    rows = [engine.prefill(sequence, case.tokens[:prompt])]
    rows += [engine.decode([sequence], [token])[0] for token in case.tokens[prompt : prompt + 60]]
    engine.close(sequence)
    assert error(np.array(rows), case.want[prompt - 1 : prompt + 60]) <= SHORT


@pytest.mark.parametrize("name", ["moe", "next", "dense"])
def test_decode_of_the_reference_is_right(name: str, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    engine = load(case.folder, "reference").engine
    sequences = [engine.open() for _ in range(2)]
    rows = [engine.decode(sequences, [token, token])[1] for token in case.tokens[:12]]
    for sequence in sequences:
        engine.close(sequence)
    assert error(np.array(rows), case.want[:12]) <= SHORT


@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("lengths", [(1, 255, 300), (256, 3, 4, 5, 257, 90, 30, 1)], ids=["three", "eight"])
@pytest.mark.parametrize("name", ["moe", "next", "dense"])
def test_decode_of_several_gives_the_bits_of_each_alone(
    name: str, lengths: tuple[int, ...], activations: str, mlx: Callable[[str], Case]
) -> None:
    engine, steps = load(mlx(name).folder, "cpu", activations).engine, 5
    texts = [some_tokens(length + steps, seed=n) for n, length in enumerate(lengths)]

    def opened(n: int) -> Any:
        sequence = engine.open()
        engine.prefill(sequence, texts[n][: lengths[n]])
        return sequence

    alone = []
    for n, length in enumerate(lengths):
        sequence = opened(n)
        alone.append([engine.decode([sequence], [token])[0] for token in texts[n][length:]])
        engine.close(sequence)
    together = [opened(n) for n in range(len(lengths))]
    for n in range(steps):
        rows = engine.decode(together, [text[length + n] for text, length in zip(texts, lengths, strict=True)])
        for row, expected in zip(rows, alone, strict=True):
            np.testing.assert_array_equal(row, expected[n])
    for sequence in together:
        engine.close(sequence)


def test_decode_of_several_is_right(hf: Callable[[str], Case]) -> None:
    case = hf("moe")
    engine = load(case.folder, "cpu").engine
    lengths = (2, 256, 511)
    sequences = [engine.open() for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        engine.prefill(sequence, case.tokens[:length])
    for n in range(3):
        rows = engine.decode(sequences, [case.tokens[length + n] for length in lengths])
        assert error(rows, case.want[[length + n for length in lengths]]) <= SHORT
    for sequence in sequences:
        engine.close(sequence)


# -- files -----------------------------------------------------------------------------------------------------------


def test_load_skips_vision_and_prediction_tensors_with_a_notice(hf: Callable[[str], Case]) -> None:
    notices = penstock.load(hf("moe").folder, device="reference").notices
    assert [n.partition(": ")[2] for n in notices] == ["2 tensors of model.visual, mtp are skipped"]


def test_load_names_tensors_that_are_not_part_of_the_model(tmp_path: Path) -> None:
    config = moe_config()
    weights = tensors(config) | {"model.language_model.layers.0.mlp.extra.weight": np.zeros(3, np.float32)}
    (notice,) = [n for n in penstock.load(write_model(tmp_path, config, weights)).notices if "skipped" not in n]
    assert notice.endswith("1 tensors are not part of the model: model.language_model.layers.0.mlp.extra.weight")


@pytest.mark.parametrize("outer, inner", [(True, None), (None, True), (True, False), (False, True)])
def test_load_ties_the_head_when_either_config_says_so(outer: Any, inner: Any, tmp_path: Path) -> None:
    """transformers writes the outer key and leaves the inner one at its default; mlx-lm reads the inner one."""
    config = moe_config(tie_word_embeddings=inner)
    config = {key: value for key, value in (config | {"tie_word_embeddings": outer}).items() if value is not None}
    weights = penstock.load(write_model(tmp_path, config), device="reference").engine.model.weights
    assert weights.head is weights.embed


def test_load_uses_a_head_that_is_there_although_tied(tmp_path: Path) -> None:
    """As transformers does: a table and a head of different values were not tied."""
    config = moe_config(tie_word_embeddings=True)
    weights = tensors(config) | {"lm_head.weight": tensors(moe_config())["lm_head.weight"]}
    tokens = some_tokens(20)
    write_model(tmp_path, config, weights)
    got = load(tmp_path, "reference").logits(tokens)
    assert error(got, transformers_logits(tmp_path, tokens)) <= SHORT


def test_rotary_share_defaults_to_a_quarter(tmp_path: Path) -> None:
    parts = {"rope_type": "default", "rope_theta": 1e4}
    write_model(tmp_path, moe_config(rope_parameters=parts))
    tokens = some_tokens(20)
    assert error(load(tmp_path, "reference").logits(tokens), transformers_logits(tmp_path, tokens)) <= SHORT


# -- wrong readings: what the bounds above would show ----------------------------------------------------------------


def q_and_gate_as_halves(q_proj: Array) -> tuple[Array, Array]:
    T, H, width = q_proj.shape
    q, gate = np.split(q_proj.reshape(T, H * width), 2, axis=1)
    return q.reshape(T, H, width // 2).copy(), gate.reshape(T, H, width // 2).copy()


def value_heads_in_turns(state: Array, qkv: Array, g: Array, b: Array, *sizes: int, **runs: Array | None) -> Array:
    """Value head j with key head j % Hk instead of j // (Hv / Hk)."""
    Hk, Hv, Dk, Dv = sizes
    q, k, v = np.split(qkv, [Hk * Dk, 2 * Hk * Dk], axis=1)
    q, k = (part.reshape(-1, Hk, Dk)[:, np.arange(Hv) % Hk].reshape(-1, Hv * Dk) for part in (q, k))
    joined = np.ascontiguousarray(np.concatenate([q, k, v], axis=1))
    return ops.gated_delta_net(state, joined, g, b, Hv, Hv, Dk, Dv, **runs)


gated_delta_net, conv1d_causal, gdn_decay_beta = ops.gated_delta_net, ops.conv1d_causal, ops.gdn_decay_beta

WRONG: dict[str, tuple[str, Any]] = {
    "eps on the mean": ("rms_norm_qk", functools.partial(ops.rms_norm_qk, eps_on="mean")),
    "q and gate as halves": ("split_q_gate", q_and_gate_as_halves),
    "key heads in turns": ("gated_delta_net", value_heads_in_turns),
    "alpha and beta swapped": ("gdn_decay_beta", lambda a, b, *rest: gdn_decay_beta(b, a, *rest)),
    "convolution turned": (
        "conv1d_causal",
        lambda x, state, weight, *more: conv1d_causal(x, state, weight[:, ::-1].copy(), *more),
    ),
    "weights not renormalised": ("moe_normalize_weights", lambda weights: weights),
    "no gate on the output": ("sigmoid_gate", lambda y, gate: y),
}


def reference_error(case: Case) -> float:
    llm = penstock.load(case.folder, device="reference", activations="float32")
    return error(llm.logits(case.tokens[:60]), case.want[:60])


@pytest.mark.parametrize("reading", WRONG)
def test_a_wrong_reading_breaks_the_bound(
    reading: str, hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, wrong = WRONG[reading]
    case = hf("moe")
    with monkeypatch.context() as patch:
        for module in (qwen3_5, step):
            patch.setattr(module, "ops", _With(name, wrong))
        assert reference_error(case) > 5e-5  # the wider of the two promises
    assert reference_error(case) <= SHORT


class _With:
    """`penstock.ops` with one op replaced."""

    def __init__(self, name: str, op: Any) -> None:
        setattr(self, name, op)

    def __getattr__(self, name: str) -> Any:
        return getattr(ops, name)


def test_norms_without_their_offset_break_the_bound(hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen3_5, "_offset", lambda source, path, *shape: source.vector(path, *shape))
    assert reference_error(hf("moe")) > 0.1


def test_offsets_added_to_converted_norms_break_the_bound(
    mlx: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qwen3_5, "_offset", lambda source, path, *shape: source.vector(path, *shape) + np.float32(1))
    assert reference_error(mlx("moe")) > 0.1


def test_rotation_of_the_whole_head_breaks_the_bound(hf: Callable[[str], Case], tmp_path: Path) -> None:
    config = copy.deepcopy(HF["moe"])
    config["text_config"]["rope_parameters"]["partial_rotary_factor"] = 1.0
    case = hf("moe")
    assert reference_error(case._replace(folder=write_model(tmp_path, config))) > 10 * LONG


def test_vocab_has_ids_without_a_token(hf: Callable[[str], Case]) -> None:
    """The padded rows of the table are part of the logits, and no text comes of them."""
    llm = load(hf("moe").folder, "reference")
    assert llm.logits([VOCAB - 1]).shape == (1, VOCAB)
    assert llm.tokenizer.decode([VOCAB - 1]) == ""
