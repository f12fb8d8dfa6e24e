"""Ranks that stream their own experts on a device that detects what is absent: all stop where one misses."""

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import api
from penstock.engine.request import Request
from penstock.engine.sampling import SamplingParams
from tests.experts.common import checkpoint
from tests.models.common import moe_config
from tests.models.test_gemma4 import config_of as gemma_config
from tests.parallel.streamed import Detecting, on_ranks

PROMPTS = [[5, 6, 7], list(range(20, 33)), [9]]


def answers(llm: Any) -> list[list[int]]:
    """Tokens after the prompts, two together, then one, and the first again."""
    scheduler, found = llm.scheduler, []
    for some in (PROMPTS[:2], PROMPTS[2:], PROMPTS[:1]):
        requests = [Request(prompt, SamplingParams(), 16, eos=frozenset()) for prompt in some]
        handles = [scheduler.submit(request) for request in requests]
        while not scheduler.idle:
            scheduler.step()
        found += [handle.result(1).tokens for handle in handles]
    return found


CONFIGS = {"qwen": moe_config(num_experts=11), "gemma": gemma_config()}


@pytest.mark.parametrize(("name", "budget"), [("qwen", "60%"), ("gemma", "80%")])
def test_all_ranks_stop_where_one_alone_misses_and_go_on_together(name, budget, tmp_path: Path, monkeypatch: Any):
    folder = checkpoint(tmp_path / "model", CONFIGS[name] | {"quantization": {"bits": 4, "group_size": 32}})
    want = answers(penstock.load(folder, device="cpu", activations="float32", max_context=64))
    monkeypatch.setattr(api, "device_for", lambda name: Detecting())
    got, engines, turns = on_ranks(folder, [{"expert_cache": "100%"}, {"expert_cache": budget}], answers)
    assert got == want
    assert turns.exchanged[0] == turns.exchanged[1]
    assert engines[0].most_sequences == engines[1].most_sequences == engines[1].experts.store.most_tokens
    stops = [[one for detector in engine.device.detectors for one in detector.resolved] for engine in engines]
    assert len(stops[0]) > 2 and not any(missed for _, missed in stops[0])
    assert len(stops[1]) > len(stops[0]) and all(missed for _, missed in stops[1])
    assert {n for n, _ in stops[0]} <= {n for n, _ in stops[1]}
