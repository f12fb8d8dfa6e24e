"""Kimi-Linear against transformers (Hugging Face files) and mlx-lm (converted files), both in float32."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock import ops
from penstock.engine.steps import Run
from penstock.models import deepseek_v3, kimi_linear
from penstock.models.step import PagedKV, RecurrentState
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
from tests.models.test_config import refused

# convolutions are small, so that q and k come out short: only then does it matter what their eps is added to
FACTORS = {"o_proj": BRANCH, "down_proj": BRANCH, "conv1d": 0.1}
_DENSE = re.compile(r"block_sparse_moe\.(?=(gate|up|down)_proj)")
DELTA = {"num_heads": 3, "head_dim": 32, "short_conv_kernel_size": 4}


def config_of(full: tuple[int, ...] = (2, 4), layers: int = 4, **changes: Any) -> dict[str, Any]:
    """config.json as released, every size another one; `full`: latent layers, counted from 1."""
    delta = DELTA | changes.pop("delta", {})
    lists = {"full_attn_layers": [*full], "kda_layers": [n for n in range(1, layers + 1) if n not in full]}
    config = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "head_dim": 20,
        "intermediate_size": 160,
        "moe_intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,  # which mlx-lm has inside of latent attention, too; transformers always
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "kv_lora_rank": 96,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 40,
        "mla_use_nope": True,
        "model_max_length": 4096,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "tie_word_embeddings": False,
        "linear_attn_config": delta | lists,
        "dtype": "bfloat16",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {key: value for key, value in (config | changes).items() if value != "left out"}


CONFIGS: dict[str, dict[str, Any]] = {
    "moe": config_of(),
    # as transformers writes it, latent layers first and last, experts in groups, heads no multiple of the lanes
    "odd": config_of(
        (1, 4),
        first_k_dense_replace=2,
        num_expert_group=4,
        topk_group=2,
        num_experts_per_token=4,
        num_shared_experts=1,
        moe_renormalize=False,
        rms_norm_eps=1e-5,
        delta={"num_heads": 5, "head_dim": 20, "short_conv_kernel_size": 3},
    ),
}


def tame(model: Any) -> None:
    """Decays as trained ones are: from forgetting at once to hardly ever."""
    import torch

    for name, tensor in model.named_parameters():
        if name.endswith(("dt_bias", "A_log")):
            rng = np.random.default_rng(len(name) + tensor.numel())
            low, high = (-4.0, 0.5) if name.endswith("dt_bias") else (-1.5, 1.5)
            tensor.data.copy_(torch.from_numpy(rng.uniform(low, high, tensor.shape)).to(torch.bfloat16))


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @functools.cache
    def case(name: str) -> Case:
        made = make(tmp_path_factory.mktemp("hf"), CONFIGS[name], FACTORS, count=330, change=tame)
        if name == "moe":  # as released: transformers calls dense blocks as those of experts
            file = made.folder / "model.safetensors"
            found = {_DENSE.sub("mlp.", key): tensor for key, tensor in load_file(file).items()}
            save_file(found, file, {"format": "pt"})
        return made

    return case


def mixed(path: str, _: Any) -> dict[str, int] | bool:
    """More bits for v, as mlx-lm's mixed recipes have it: q, k and v are three products then."""
    return {"bits": 6 if path.endswith("v_proj") else 4, "group_size": 32}


@pytest.fixture(scope="module")
def mlx(hf: Callable[[str], Case]) -> Callable[[str], Case]:
    @functools.cache
    def case(name: str) -> Case:
        source = hf("moe")
        more = {"quant_predicate": mixed} if name == "mixed" else {}
        return converted(source, source.folder / name, **(FOUR | more if name != "dense" else {}))

    return case


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, hf: Callable[[str], Case]) -> None:
    case = hf(name)
    got = load(case.folder).logits(case.tokens)
    assert error(got[:200], case.want[:200]) <= SHORT
    assert error(got, case.want) <= LONG
    assert error(load(case.folder, "reference").logits(case.tokens[:100]), case.want[:100]) <= SHORT


@pytest.mark.parametrize("name", ["four", "mixed", "dense"])
def test_logits_are_those_of_mlx(name: str, mlx: Callable[[str], Case]) -> None:
    case = mlx(name)
    assert error(load(case.folder).logits(case.tokens), case.want) <= SHORT
    if name == "four":
        check_cosines(load(case.folder, "cpu", "int8").logits(case.tokens), case.want)


def test_pieces_and_single_tokens_are_right(hf: Callable[[str], Case]) -> None:
    case = hf("moe")
    llm = load(case.folder)
    assert error(in_pieces(llm, case.tokens, (3, 69, 70, 71, 255, 257)), case.want) <= LONG
    assert error(decoded(llm, case.tokens[:40], 0), case.want[:40]) <= SHORT
    assert error(decoded(llm, case.tokens[:300], 255), case.want[254:300]) <= LONG


def test_decode_of_several_gives_the_bits_of_each_alone(mlx: Callable[[str], Case]) -> None:
    check_several(load(mlx("four").folder), (1, 69, 303))


def test_a_kept_run_counts_as_far_as_it_is_accepted(mlx: Callable[[str], Case]) -> None:
    """Decays of channels are kept, too: to the bit as token by token."""
    case = mlx("four")
    engine, tokens = load(case.folder).engine, case.tokens[:24]
    plain, kept = engine.open(), engine.open()
    for sequence in (plain, kept):
        engine.prefill(sequence, tokens[:9])
    want = [engine.decode([plain], [token])[0] for token in tokens[9:]]
    for at, accepted, drafts in ((9, 3, 5), (12, 1, 4), (13, 5, 5), (18, 1, 2), (19, 5, 5)):
        wrong = [token ^ 1 for token in tokens[at + accepted : at + drafts]]
        run = Run(kept, np.array([*tokens[at : at + accepted], *wrong], np.int32), "all", keep=True)
        found = engine.step([run])
        engine.accept(kept, accepted)
        assert found is not None
        np.testing.assert_array_equal(found[:accepted], want[at - 9 : at - 9 + accepted])
    engine.settle(kept)
    for one, other in zip(engine.caches.rows(plain, 0), engine.caches.rows(kept, 0), strict=True):
        np.testing.assert_array_equal(one, other)
    engine.close(plain)
    engine.close(kept)


def _one_decay(alpha: Any, beta: Any, A_log: Any, dt_bias: Any) -> Any:
    g, b = ops.gdn_decay_beta(alpha, beta, A_log, dt_bias)
    return np.repeat(g.mean(axis=2, keepdims=True), g.shape[2], axis=2), b


WRONG_OPS: dict[str, dict[str, Any]] = {
    "one decay of a head": {"gdn_decay_beta": _one_decay},
    "gate by silu": {"gated_rms_norm": lambda *args: ops.gated_rms_norm(*args[:4])},
    "q and k not normed": {"rms_norm_qk": lambda x, *args: x},
    "eps of q and k on their mean": {"rms_norm_qk": lambda x, *args: ops.rms_norm_qk(x, *args, eps_on="mean")},
}
WRONG: dict[str, Callable[[Any], dict[str, Any]]] = {
    "scale of the part that others rotate left out": lambda config: {"scale": config.nope**-0.5},
    "weights not renormalised": lambda config: {"renormalise": False},
    "weights not scaled": lambda config: {"routed_scale": 1.0},
    "kinds of layers counted from 0": lambda config: {"layer_types": config.layer_types[1:] + config.layer_types[:1]},
}


@pytest.mark.parametrize("reading", WRONG_OPS)
def test_a_wrong_op_breaks_the_bound(reading: str, hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kimi_linear, "ops", With(**WRONG_OPS[reading]))
    assert reference_error(hf("moe")) > 5e-5


@pytest.mark.parametrize("reading", [*WRONG, "eps inside of latent attention", "rotated"])
def test_a_wrong_config_breaks_the_bound(
    reading: str, hf: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = kimi_linear.read_config
    if reading == "eps inside of latent attention":
        monkeypatch.setattr(deepseek_v3, "_INNER_EPS", 1e-3)
        assert reference_error(hf("moe")) > 5e-5
        return

    def wrong(raw: dict[str, Any]) -> Any:
        config = right(raw)
        if reading == "rotated":
            table = {"rope_theta": 10000.0, "max_position_embeddings": 4096}
            rope = deepseek_v3.read_rope(deepseek_v3.Fields(table, "config.json"), config.rope_dim, 4096)
            return dataclasses.replace(config, rope=rope)  # type: ignore[arg-type]
        return dataclasses.replace(config, **WRONG[reading](config))

    if reading == "kinds of layers counted from 0":
        assert wrong(CONFIGS["moe"]).layer_types != right(CONFIGS["moe"]).layer_types  # other tensors: it cannot load
        return
    monkeypatch.setattr(kimi_linear, "FAMILY", dataclasses.replace(kimi_linear.FAMILY, read_config=wrong))
    assert reference_error(hf("moe")) > 5e-5


# -- config.json -----------------------------------------------------------------------------------------------------


def test_read_config_takes_the_lists_and_the_keys_of_transformers() -> None:
    config = kimi_linear.read_config(config_of())
    assert config.layer_types == ("linear_attention", "full_attention") * 2
    kinds = kimi_linear.caches(config)
    assert kinds[0] == RecurrentState((3, 288), (3, 32, 32), decays=32) and kinds[1] == PagedKV(96, 16)
    keys = {"linear_num_heads": 3, "linear_head_dim": 32, "linear_conv_kernel_dim": 4}
    other = config_of(
        linear_attn_config="left out", layer_types=list(config.layer_types), mlp_layer_types=["dense"] + 3 * ["sparse"]
    )
    assert kimi_linear.read_config(other | keys) == config
    other.pop("first_k_dense_replace")  # transformers leaves it out
    assert kimi_linear.read_config(other | keys) == config
    assert kimi_linear.read_config(config_of() | {"num_hidden_layers": 3}).layer_types == config.layer_types[:3]


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "kv_lora_rank"])
def test_read_config_names_an_integer_that_is_missing_or_none(key: str) -> None:
    for value in (0, -1, 1.5, "4", True, [4]):
        assert f" {key} is " in refused(config_of(**{key: value}))
    assert f" {key} is missing, expected an integer" in refused(config_of(**{key: "left out"}))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"mla_use_nope": False}, "mla_use_nope is False, expected True"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax', expected 'sigmoid'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, expected 4 (num_attention_heads)"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2, expected 1"),
        ({"num_experts_per_token": 9}, "num_experts_per_token is 9, expected an integer from 1 to 8"),
        ({"num_expert_group": 3}, "num_experts is 8, expected a multiple of num_expert_group (3)"),
        ({"routed_scaling_factor": "left out"}, "routed_scaling_factor is missing, expected a number above 0"),
        ({"num_shared_experts": "left out"}, "num_shared_experts is missing, expected an integer"),
        ({"linear_attn_config": "left out"}, "linear_num_heads is missing, expected an integer"),
        ({"linear_attn_config": DELTA | {"kda_layers": [1, 2]}}, "full_attn_layers is missing, expected a list"),
        (
            {"linear_attn_config": DELTA | {"kda_layers": [1, 2], "full_attn_layers": [2, 3, 4]}},
            "linear_attn_config: layer 2 is in both or none of the lists of layers",
        ),
        ({"layer_types": ["full_attention"] * 4}, "layer_types is another order than linear_attn_config"),
        ({"mlp_layer_types": ["sparse"] * 4}, "mlp_layer_types has another order, expected 4: 1 dense first"),
    ],
    ids=str,
)
def test_read_config_refuses(changes: dict[str, Any], words: str) -> None:
    assert words in refused(config_of(**changes))
