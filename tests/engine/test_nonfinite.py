"""Routers that yield NaN or infinity: the request ends with an error that names the layer, never with text."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import penstock
from penstock.api import LLM
from penstock.engine import nonfinite
from penstock.engine.scheduler import Scheduler
from penstock.engine.steps import ExactSteps, Run
from penstock.errors import NonFiniteLogits
from penstock.weights.checkpoint import Checkpoint
from tests.experts.common import CONFIGS, checkpoint
from tests.models.common import some_tokens

ROUTER = re.compile(r"layers\.1\..*(mlp\.gate|block_sparse_moe\.gate|router\.proj)\.scales")
WHERE = r"first in layer 1, \w+\.router \(quantized_matmul\)$"
TOKENS = some_tokens(12)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = checkpoint(tmp_path_factory.mktemp("nonfinite") / name, CONFIGS[name])
        return made[name]

    return folder


def damage(folder: Path, value: float) -> None:
    """Write a value into a scale of the second layer's router."""
    source = Checkpoint.open(folder)
    (name,) = (name for name in source.names if ROUTER.search(name))
    path, start, _ = source.location(name)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(np.array(value, ml_dtypes.bfloat16).tobytes())


def ends(llm: LLM) -> None:
    with pytest.raises(NonFiniteLogits, match=WHERE):
        llm.generate(TOKENS, max_tokens=3)


# those left out have no router in their second layer
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("glm4_moe", "lfm2_moe")])
def test_a_router_that_yields_nan_or_inf_ends_the_request(name, folder_of):
    folder = folder_of(name)
    for value in (np.nan, np.inf, -np.inf):
        damage(folder, value)
        llm = penstock.load(folder, device="cpu", max_context=256)
        ends(llm)
        assert llm.engine.caches.slots_used == 0
        assert all(pool.used == 0 for pool in llm.engine.caches.pools.values())
    ends(penstock.load(folder, device="cpu", max_context=256, expert_cache="50%"))


def spoil(llm: LLM) -> None:
    """Give the second layer of a loaded model a router of NaN."""
    experts = llm.engine.model.weights.layers[1].mlp
    packed, scales, biases = experts.router.arrays
    bad = experts.router.with_arrays(packed, np.full_like(scales, np.nan), biases)
    object.__setattr__(experts, "router", bad)
    llm.engine.programs.steps = ExactSteps(llm.engine.programs)


def test_a_damaged_router_is_found_while_an_answer_is_made(folder_of, monkeypatch):
    """The copy that is looked at takes nothing from the others, and leaves nothing behind."""
    damage(folder_of("llama"), 0.01)
    llm = penstock.load(folder_of("llama"), device="cpu", max_context=256)
    step = llm.engine.step
    steps: list[int] = []

    def damaged_at_third(runs: list[Run]) -> np.ndarray | None:  # between two steps
        steps.append(len(steps))
        if len(steps) == 4:  # the first one has the prompt
            spoil(llm)
        return step(runs)

    monkeypatch.setattr(llm.engine, "step", damaged_at_third)
    with Scheduler(llm) as scheduler:
        ticket = scheduler.submit(scheduler.request(TOKENS, max_tokens=30, logit_bias={5: 100.0}))
        with pytest.raises(NonFiniteLogits, match=WHERE):
            ticket.result(60)
    assert ticket.tokens == [5] * 3


def test_the_error_stays_what_it_is_when_the_step_cannot_be_run_once_more(folder_of, monkeypatch, caplog):
    damage(folder_of("llama"), np.nan)
    llm = penstock.load(folder_of("llama"), device="cpu", max_context=256)

    def fails(*_: object) -> str:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("penstock.engine.engine.first_nonfinite", fails)
    with pytest.raises(NonFiniteLogits, match=r"at position 12: NaN for \d+ of \d+ tokens, the first is 0$"):
        llm.generate(TOKENS, max_tokens=3)
    assert "cannot be found: oh" in caplog.text


def test_a_finite_step_names_nothing(folder_of):
    damage(folder_of("llama"), 0.01)
    llm = penstock.load(folder_of("llama"), device="cpu", max_context=256)
    engine = llm.engine
    sequence = engine.open()
    engine.prefill(sequence, TOKENS)
    assert nonfinite.first_nonfinite(engine, sequence, TOKENS[-1]) is None
    assert engine.located(error := NonFiniteLogits("x"), sequence, TOKENS[-1]) is error
    assert engine.located(error, sequence, None) is error
