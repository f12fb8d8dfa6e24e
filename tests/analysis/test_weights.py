from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import QuantizedTensor, api
from penstock.analysis.weights import Sum, WeightInfo, active_bytes, distinct, layer_of, walk
from penstock.models.layers import ExpertStack
from tests.cli.test_bench import TINY


@pytest.fixture(scope="module")
def llm():
    return api.load_random(TINY, device="reference")


def stored(llm):
    """All bytes of a model; each weight is there once, whatever refers to it."""
    return sum(weight.nbytes for weight in distinct(llm.engine.model))


def test_active_bytes_counts_chosen_experts_and_one_row(llm):
    weights = llm.engine.model.weights
    routed = [layer.mlp.routed for layer in weights.layers]
    stacks = sum(w.nbytes for stack in routed for w in (stack.gate, stack.up, stack.down))
    row = weights.embed.nbytes // TINY["vocab_size"]
    other = stored(llm) - stacks - weights.embed.nbytes
    assert active_bytes(llm.engine.model) == other + stacks * 2 // 8 + row
    assert active_bytes(llm.engine.model, 2) == round(other + stacks * (1 - (6 / 8) ** 2) + 2 * row)


def test_active_bytes_counts_a_tied_head_once(llm):
    tied = api.load_random(TINY | {"tie_word_embeddings": True}, device="reference")
    table = llm.engine.model.weights.embed.nbytes
    assert active_bytes(tied.engine.model) == active_bytes(llm.engine.model) - table // TINY["vocab_size"]
    assert stored(tied) == stored(llm) - table


@pytest.mark.parametrize("budget", ["0.5M", "1M"])
def test_streamed_experts_count_wherever_they_are(budget):
    """Slots, of which layers share some, are fewer than experts."""
    whole, streamed = (penstock.load(expert_cache=given, max_context=64).engine.model for given in ("auto", budget))
    assert streamed.experts is not None and whole.experts is None
    assert Sum.of(distinct(streamed)).parameters == Sum.of(distinct(whole)).parameters
    assert Sum.of(distinct(streamed)).nbytes == Sum.of(distinct(whole)).nbytes
    assert [active_bytes(streamed, tokens) for tokens in (1, 5)] == [active_bytes(whole, tokens) for tokens in (1, 5)]


def test_distinct_leaves_out_views(rng):
    @dataclass
    class Weights:
        embed: Any
        parts: Any
        whole: Any
        head: Any

    whole = rng.standard_normal((6, 4))
    q = QuantizedTensor(np.zeros((3, 8), "uint32"), np.zeros((3, 1), "float32"), np.zeros((3, 1), "float32"), 4, 64)
    model = SimpleNamespace(weights=Weights(q, (whole[:2], whole[2:]), whole, q), config=None, experts=None)
    assert [(weight.path, weight.shape) for weight in distinct(model)] in (
        [("whole", (6, 4)), ("head", (3, 64))],
        [("head", (3, 64)), ("whole", (6, 4))],
    )


def test_random_nbytes_is_what_the_weights_take(llm):
    assert api.random_nbytes(TINY) == stored(llm)


def test_walk_knows_the_layer_and_the_role_of_every_array(rng):
    @dataclass
    class Layer:
        mixer: Any
        norm: Any
        mlp: Any

    @dataclass
    class Weights:
        embed: Any
        layers: Any
        head: Any

    def block(*shape):
        return rng.standard_normal(shape)

    stack = ExpertStack(block(6, 2, 4), None, block(6, 4, 2), np.arange(6))
    layers = (Layer([block(4, 4), block(4)], block(4), block(3, 4)), Layer(block(4, 4), block(4), stack))
    weights = Weights(block(9, 4), layers, block(9, 4))
    model = SimpleNamespace(weights=weights, config=SimpleNamespace(top_k=2), experts=None)
    found = [(weight.path, weight.layer, weight.role, weight.share) for weight in walk(model)]
    assert found == [
        ("embed", None, "embedding", 1 / 9),
        ("layers.mixer", 0, "attention", 1.0),
        ("layers.mixer", 0, "attention", 1.0),
        ("layers.norm", 0, "norms", 1.0),
        ("layers.mlp", 0, "MLP", 1.0),
        ("layers.mixer", 1, "attention", 1.0),
        ("layers.norm", 1, "norms", 1.0),
        ("layers.mlp.gate", 1, "experts", 2 / 6),
        ("layers.mlp.down", 1, "experts", 2 / 6),
        ("layers.mlp.slot_of", 1, "MLP", 1.0),  # of which every step reads all
        ("head", None, "head", 1.0),
    ]


def test_a_step_of_several_tokens_reads_more_experts_and_rows():
    experts = WeightInfo("layers.0.experts", "experts", 0, (8, 5, 3), 800, takes=2)
    table = WeightInfo("embed_tokens", "embedding", None, (10, 4), 1000, takes=1)
    dense = WeightInfo("lm_head", "head", None, (10, 4), 70)
    assert [experts.read_by(n) for n in (1, 2)] == pytest.approx([200, 800 * (1 - 0.75**2)])
    assert [table.read_by(n) for n in (1, 3, 20)] == pytest.approx([100, 300, 1000])
    assert [dense.read_by(n) for n in (1, 9)] == [70, 70]
    assert Sum.of([experts, table, dense]) == Sum(3, 200, 1870, 120 * 2 / 8 + 40 / 10 + 40, 200 + 100 + 70)


def test_layer_of_a_path():
    assert [layer_of(path) for path in ("layers.12.mlp.gate", "embed_tokens", "norm")] == [12, None, None]
