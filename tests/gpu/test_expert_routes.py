"""Recording which experts tokens choose while their steps are replayed."""

from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.analysis.expert_routes import ExpertRoutes, record
from tests.gpu.common import GPU
from tests.models.common import moe_config, small_config, some_tokens, write_model


def recorded(folder: Path, device: str, prompt: int, count: int) -> ExpertRoutes:
    llm = penstock.load(folder, device=device, activations="float32", dtype="float32", max_context=400)
    if not GPU:
        llm.engine.allocate(sequences=2)
    return record(llm, some_tokens(prompt), max_tokens=count)


@pytest.mark.slow  # seconds per token in the interpreter
def test_cuda_record_notes_what_the_cpu_notes(tmp_path):
    folder = write_model(tmp_path / "small", small_config())
    got, want = (recorded(folder, device, 2, 3) for device in ("cuda", "cpu"))
    assert got.tokens.tolist() == want.tokens.tolist()
    np.testing.assert_array_equal(np.sort(got.ids), np.sort(want.ids))


@pytest.mark.cuda
def test_cuda_record_notes_every_replay(tmp_path):
    """Prefill and some dozens of replayed steps; a rounding may turn a near-tie, so nearly all choices are equal."""
    folder = write_model(tmp_path / "model", moe_config())
    got, want = (recorded(folder, device, 300, 60) for device in ("cuda", "cpu"))
    same = np.sort(got.ids[:300]) == np.sort(want.ids[:300])
    assert same.mean() > 0.99
    assert len(np.unique(got.ids[300:], axis=0)) > 10  # steps are not noted once and for all
    again = recorded(folder, "cuda", 300, 60)
    np.testing.assert_array_equal(again.ids, got.ids)
