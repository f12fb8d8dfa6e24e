"""Every family as programs: fused equals unfused, replays equal the ops called one by one, shapes grow."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock import ops
from penstock.api import LLM, load_random
from penstock.engine.engine import Engine
from penstock.engine.steps import Run, ragged_step, step_arrays, table_names, table_width
from penstock.graph import fuse
from penstock.models import layers
from penstock.models.step import Step
from tests.models.common import error, moe_config, next_config, small_config, some_tokens
from tests.models.made import decoded
from tests.models.test_deepseek_v3 import CONFIGS as DEEPSEEK
from tests.models.test_gemma3 import CONFIGS as GEMMA3
from tests.models.test_gemma3n import CONFIGS as GEMMA3N
from tests.models.test_gemma4 import CONFIGS as GEMMA
from tests.models.test_gpt_oss import CONFIG as GPT_OSS
from tests.models.test_kimi_linear import CONFIGS as KIMI
from tests.models.test_lfm2 import CONFIGS as LFM2
from tests.models.test_llama import CONFIGS as LLAMA

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": moe_config(),
    "qwen3_next": next_config(),
    "gemma3": GEMMA3["text"],
    "gemma3n": GEMMA3N["plain"],
    **{f"lfm2-{name}": LFM2[name] for name in ("moe", "dense")},
    **{f"gemma4-{name}": config for name, config in GEMMA.items()},
    **{f"deepseek_v3-{name}": config for name, config in DEEPSEEK.items()},
    "kimi_linear": KIMI["moe"],
    "gpt_oss": GPT_OSS,
    **{f"llama-{name}": LLAMA[name] for name in ("tied", "biases", "window", "qwen3", "moe", "mixed moe")},
    **{f"llama-{name}": LLAMA[name] for name in ("qwen2 moe", "glm", "minimax", "ministral")},
}

# Random models amplify the rounding that a fused op saves; int8 activations then round to other codes here and there.
BOUNDS = {"float32": 1e-5, "int8": 2e-2}


def unfused(llm: LLM) -> LLM:
    """The same model without fusion."""
    engine = llm.engine
    options = {"device": engine.device, "activations": engine.activations, "dtype": engine.dtype}
    plain = Engine(engine.model, **options, max_context=engine.max_context, fused=False)
    return LLM(plain, None, None, ())


def ops_of(engine: Engine) -> list[str]:
    assert engine.programs is not None and engine.programs.steps is not None
    return [node.op.name for kind in engine.programs.steps._kinds.values() for node in kind.graph.nodes]


@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_fused_equals_unfused(name, activations):
    llm = load_random(CONFIGS[name], device="cpu", activations=activations, max_context=1024)
    plain = unfused(llm)
    tokens = some_tokens(40)
    assert error(decoded(llm, tokens, 30), decoded(plain, tokens, 30)) <= BOUNDS[activations]
    assert error(llm.logits(tokens), plain.logits(tokens)) <= BOUNDS[activations]
    assert len(ops_of(llm.engine)) < len(ops_of(plain.engine))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_residual_stream_is_float32_whatever_the_activations_are(name):
    """Every row of the model's width that is added to is float32, and products read none of it; fused for a GPU too."""
    programs, plain = (
        load_random(CONFIGS[name], device="cpu", activations="float32", dtype=dtype, max_context=1024).engine.programs
        for dtype in ("bfloat16", "float32")
    )
    assert programs is not None and plain is not None
    for each in (programs, plain):
        each.caches.make_room(dict.fromkeys(each.caches.pools, 4), 3)
    for T, decode in ((3, True), (17, False)):
        graph, exact = (each.graph(T, 3 if decode else 1, 4, 0, decode=decode) for each in (programs, plain))
        assert graph.outputs[0].dtype == "float32"
        fused = fuse(graph, "cuda")
        rounded = [
            node for node in fused.nodes if node.op is ops.columns and node["dtype"] is not None
        ]  # Gemma's inputs
        found = [node.op for node in fused.nodes if node not in rounded]
        assert found == [node.op for node in fuse(exact, "cuda").nodes]
        for node in (*graph.nodes, *fused.nodes):
            if node.op in (ops.residual_add, ops.moe_combine_residual, ops.matmul_add, ops.moe_shared_forward):
                assert node.out.dtype == "float32"
            if node.op in (ops.quantized_matmul, ops.matmul, ops.moe_forward, ops.moe_shared_forward):
                assert node["x"].dtype == "bfloat16"
            if node.op is ops.norm_matmul:
                assert node["normed"] == "bfloat16" and node["x"].dtype in ("float32", "bfloat16")


def eager(llm: LLM, tokens: list[int], prompt: int) -> np.ndarray:
    """Logits after each token from the last of the prompt on, by ops called on arrays, one after the other."""
    engine = llm.engine
    family, config, weights = engine.model.family, engine.model.config, engine.model.weights
    sequence = engine.open()
    rows = [engine.prefill(sequence, tokens[:prompt])]
    for token in tokens[prompt:]:
        engine.caches.reserve(sequence, 1)
        at = np.array([sequence.length], np.int32)
        step = Step(
            np.array([token], np.int32),
            at,
            at + np.int32(1),
            np.array([sequence.slot], np.int32),
            {window: table.array[None] for window, table in sequence.tables.items()},
            activations=engine.activations,
            dtype=engine.dtype,
        )
        h = family.forward(step, weights, config, engine.caches.arrays)
        rows.append(family.logits(step, h, weights, config)[0])
        engine.caches.advance(sequence, 1)
    engine.close(sequence)
    return np.array(rows)


@pytest.mark.parametrize("name", ["qwen3_5", "gemma4-moe", "deepseek_v3-v3", "llama-window"])
def test_unfused_replays_give_the_bits_of_the_ops_one_by_one(name):
    llm = unfused(load_random(CONFIGS[name], device="cpu", activations="int8", max_context=1024))
    tokens = some_tokens(20)
    np.testing.assert_array_equal(decoded(llm, tokens, 5), eager(llm, tokens, 5))


@pytest.mark.parametrize(
    "name", ["qwen3_5", "gemma4-moe", "deepseek_v3-v3", "llama-moe", "llama-mixed moe", "llama-glm"]
)
def test_rows_of_no_sequence_choose_no_expert(name, monkeypatch):
    """A step with rows behind its tokens, as programs of fixed sizes have: the others have the bits they have alone."""
    engine = load_random(CONFIGS[name], device="cpu", activations="int8", max_context=1024).engine
    family, config, weights = engine.model.family, engine.model.config, engine.model.weights
    chosen = []

    def moe_forward(x, ids, *args, **kwargs):
        chosen.append(ids)
        return ops.moe_forward(x, ids, *args, **kwargs)

    monkeypatch.setattr(layers, "ops", SimpleNamespace(**{**vars(ops), "moe_forward": moe_forward}))
    tables = table_names(engine.caches.pools)
    found = []
    for unused in (0, 3):
        sequence = engine.open()
        engine.caches.reserve(sequence, 2)
        arrays = step_arrays([Run(sequence, np.array([5, 9], np.int32), "all", True)], tables)
        for row, number in (("tokens", -1), ("positions", 0), ("sequence", -1)):
            arrays[row] = np.concatenate([arrays[row], np.full(unused, number, np.int32)])
        active = arrays["sequence"] if unused else None
        step = ragged_step(arrays, tables, active=active, activations=engine.activations, dtype=engine.dtype)
        found.append(family.forward(step, weights, config, engine.caches.arrays))
        engine.close(sequence)
    np.testing.assert_array_equal(found[1][:2], found[0])
    assert np.isfinite(found[1]).all()
    half = len(chosen) // 2
    assert half > 0
    for alone, padded in zip(chosen[:half], chosen[half:], strict=True):
        np.testing.assert_array_equal(padded[:2], alone)
        np.testing.assert_array_equal(padded[2:], np.full((3, config.top_k), -1))


def test_a_thousand_replays_give_the_tokens_of_the_ops_one_by_one():
    """Across pages, across a wider block table, across caches that grow."""
    llm = unfused(load_random(small_config(), device="cpu", activations="float32", max_context=1200))
    tokens = some_tokens(1100)
    got, want = decoded(llm, tokens, 60), eager(llm, tokens, 60)
    np.testing.assert_array_equal(got.argmax(axis=1), want.argmax(axis=1))
    np.testing.assert_array_equal(got, want)
    steps = llm.engine.programs.steps
    assert {sizes[3] for sizes, *_ in steps._bound} == {4, 8} and len(steps._kinds) == 2


def test_a_kind_of_step_is_traced_once():
    llm = load_random(small_config(), device="cpu", max_context=1024)
    engine = llm.engine
    engine.caches.make_room({None: 8}, 4)
    for _ in range(3):
        llm.logits(some_tokens(17))
        sequences = [engine.open() for _ in range(2)]
        for sequence in sequences:
            engine.prefill(sequence, some_tokens(9))
        engine.decode(sequences, [1, 2])
        for sequence in sequences:
            engine.close(sequence)
    steps = engine.programs.steps
    assert len(steps._kinds) == 2  # of many tokens, and of two
    assert [sizes[:3] for sizes, *_ in steps._bound] == [(17, 1, 17), (9, 1, 1), (2, 2, 2)]


def test_old_bindings_go(monkeypatch):
    monkeypatch.setattr("penstock.engine.steps._KEPT", 4)
    llm = load_random(small_config(), device="cpu", max_context=1024)
    want = llm.logits(some_tokens(9))
    for length in range(8, 0, -1):
        llm.logits(some_tokens(length))
    assert len(llm.engine.programs.steps._bound) == 4
    np.testing.assert_array_equal(llm.logits(some_tokens(9)), want)


def test_a_prompt_over_latents_is_that_over_expanded_keys():
    llm = load_random(DEEPSEEK["v3"], device="cpu", activations="float32", max_context=1024)
    engine = llm.engine
    tokens = some_tokens(90)
    want = engine.prefill(engine.open(), tokens)
    sequence = engine.open()
    for start in range(0, 90, 30):
        got = engine.prefill(sequence, tokens[start : start + 30])
    assert error(got[None], want[None]) <= 1e-5


@pytest.mark.parametrize(("pages", "width"), [(0, 4), (1, 4), (4, 4), (5, 8), (9, 16), (1000, 1024)])
def test_table_width(pages, width):
    assert table_width(pages) == width
