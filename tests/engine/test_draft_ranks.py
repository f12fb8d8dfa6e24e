"""Heads that draft over ranks whose device captures and draws, as a GPU does: whole on rank 0, and all ranks verify."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra `distributed` is not installed")

import penstock
from penstock import api
from penstock.api import LLM
from penstock.engine.draft_head import CapturedHead
from penstock.engine.speculate import StepCosts
from penstock.errors import OutOfMemory
from tests.engine.capturing import CapturingHost
from tests.parallel.streamed import on_ranks

TALE = (Path(penstock.__file__).parent / "demo" / "tale.txt").read_text()
PROMPTS = [TALE[:40], TALE[900:2400], TALE[2000:2005]]  # the second has more rows than a head computes at once
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.9, "seed": 4, "logprobs": 2},
    {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.1},
]
GIVEN: dict[str, Any] = {"max_context": 700}


@pytest.fixture(scope="module")
def folder() -> Path:
    (found,) = (config.parent for config in Path(penstock.__file__).parent.glob("demo/*/config.json"))
    return found


@pytest.fixture(scope="module")
def want(folder: Path) -> list[list[list[int]]]:
    """Answers of one rank without drafts."""
    llm = penstock.load(folder, device="cpu", activations="float32", **GIVEN)
    return [tokens_of(llm, speculate="off", **options) for options in OPTIONS]


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are on a device that captures, and the gate takes drafts."""
    monkeypatch.setattr(api, "device_for", lambda name: CapturingHost())
    monkeypatch.setattr(StepCosts, "__call__", lambda self, tokens: 1.0)


def tokens_of(llm: LLM, **options: Any) -> list[list[int]]:
    return [done.tokens for done in llm.generate(PROMPTS, max_tokens=20, **options)]


@pytest.mark.parametrize("speculate", ["mtp", "auto"])
def test_the_text_is_that_of_one_rank(speculate: str, folder: Path, want: Any) -> None:
    drafted: list[tuple[int, int]] = []

    def work(llm: LLM) -> list[list[list[int]]]:
        assert llm.engine.drafter is not None and isinstance(llm.engine.drafter._runner, CapturedHead)
        found = []
        for options in OPTIONS:
            done = llm.generate(PROMPTS, max_tokens=20, num_draft_tokens=3, **options)
            found.append([one.tokens for one in done])
            drafted.extend((one.timings.draft_n, one.timings.draft_n_accepted) for one in done)
        return found

    got, engines, turns = on_ranks(folder, [{**GIVEN, "speculate": speculate}] * 2, work)
    assert got == want
    assert turns.exchanged[0] == turns.exchanged[1]  # the head exchanges nothing
    assert engines[1].drafter is None
    assert all(0 < accepted < made for made, accepted in drafted)
    assert all(engine.caches.slots_used == 0 for engine in engines)


def test_sizes_are_prepared_by_all_ranks_and_sessions_go_on(folder: Path, want: Any) -> None:
    def work(llm: LLM) -> list[int]:
        llm.engine.allocate(sequences=2)
        llm.engine.prepare()
        with llm.session() as session:
            for n, _ in enumerate(session.stream(PROMPTS[0], max_tokens=20, num_draft_tokens=3)):
                if n == 9:
                    break
            moment = session.snapshot()
            first = session.generate(max_tokens=4, num_draft_tokens=3).tokens
            session.rewind(moment)
            assert session.generate(max_tokens=4, num_draft_tokens=2).tokens == first
            return [*session.tokens[-14:-4], *first]

    got, _, turns = on_ranks(folder, [{**GIVEN, "max_context": 100}] * 2, work)
    assert got == want[0][0][:14]
    assert turns.exchanged[0] == turns.exchanged[1]


class Device(CapturingHost):
    """Memory that is not the host's."""

    host_memory = False


def test_a_head_without_room_on_rank_0_is_left_out_with_a_remark(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is asked for."""
    monkeypatch.setattr(api, "device_for", lambda name: Device())

    def work(llm: LLM) -> tuple[bool, list[str]]:
        llm.generate(PROMPTS[0], max_tokens=3)
        return llm.engine.drafter is not None, [notice for notice in llm.notices if "head" in notice]

    assert on_ranks(folder, [GIVEN] * 2, work)[0] == (True, [])
    monkeypatch.setattr(api, "_head_bytes", lambda *how: 1 << 60)
    drafts, notices = on_ranks(folder, [GIVEN] * 2, work)[0]
    assert not drafts and len(notices) == 1 and "rank 0 has no room for the whole of it" in notices[0]
    with pytest.raises(OutOfMemory, match="needs .* are free"):
        on_ranks(folder, [{**GIVEN, "speculate": "mtp"}] * 2, work)
