"""Drafts by a second model: the same text with them, whatever of it is accepted."""

import functools
import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.api import LLM, load_random
from penstock.engine import speculate
from penstock.engine.draft_model import DraftModel, _common
from penstock.engine.engine import Engine
from penstock.engine.sampling import Sampler
from penstock.engine.speculate import StepCosts
from penstock.errors import CheckpointError, InvalidArgument, OutOfMemory
from penstock.text.tokenizer import Tokenizer
from tests.engine.capturing import CapturingHost
from tests.models.common import VOCAB, moe_config, some_tokens
from tests.models.made import make
from tests.models.test_gemma4 import CONFIGS as GEMMA
from tests.models.test_llama import CONFIGS as LLAMA

DEMO = Path(penstock.__file__).parent / "demo" / "model"
FAMILIES: dict[str, Any] = {
    "llama": LLAMA["llama"] if "llama" in LLAMA else next(iter(LLAMA.values())),
    "window": LLAMA["window"],
    "qwen3_5": moe_config(),
    "lfm2": "tests.models.test_lfm2",
}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "__call__", lambda self, tokens: 1.0)
    monkeypatch.setattr(speculate, "GAIN", 1.0)


@pytest.fixture
def mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some drafts are wrong, so that every number of them is accepted now and then."""
    rng, draft = np.random.default_rng(3), Sampler.draft

    def wrong(self: Sampler, *args: Any) -> int:
        token = draft(self, *args)
        return token if rng.random() < 0.75 else int(rng.integers(0, 50))

    monkeypatch.setattr(Sampler, "draft", wrong)


def config_of(family: str) -> dict[str, Any]:
    config = FAMILIES[family]
    return next(iter(importlib.import_module(config).CONFIGS.values())) if isinstance(config, str) else config


def with_draft_model(config: dict[str, Any], tokenizer: Tokenizer, seed: int = 0, captures: bool = False) -> LLM:
    """A random model and one of the same shapes that drafts; with seed 0 the same one."""
    own = load_random(config, device="cpu", max_context=700).engine
    second = load_random(config, device="cpu", max_context=700, seed=seed, speculate="off").engine
    drafter = DraftModel(second, own.model.config.vocab_size)
    options = {"activations": own.activations, "max_context": 700, "drafts": 7, "speculate": "draft"}
    device = CapturingHost() if captures else None
    return LLM(Engine(own.model, device=device, draft_model=drafter, **options), tokenizer, None, ())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(DEMO)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_model_changes_no_text(family: str, tokenizer: Tokenizer, mistaken: None) -> None:
    """In batches with different accepted counts, where states go back by truncation or by a snapshot."""
    config = config_of(family)
    llm = with_draft_model(config, tokenizer)
    vocab = llm.config.vocab_size
    prompts = [[token % vocab for token in prompt] for prompt in (some_tokens(5), [3, 4] * 10, some_tokens(300, 2))]
    for options in ({}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "seed": 1, "repetition_penalty": 1.1}):
        make = functools.partial(llm.generate, prompts, max_tokens=20, **options)
        want = [done.tokens for done in make(speculate="off")]
        found = make(num_draft_tokens=3)
        assert [done.tokens for done in found] == want
        assert all(0 < done.timings.draft_n_accepted < done.timings.draft_n for done in found if len(done.tokens) > 9)
        assert [done.tokens for done in make(speculate="auto")] == want


def test_an_equal_model_has_all_its_drafts_accepted(tokenizer: Tokenizer) -> None:
    """So it has read what the other one has: prompts, accepted tokens, and nothing else."""
    llm = with_draft_model(moe_config(), tokenizer)
    for options in ({}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}):
        for prompt in (some_tokens(6), some_tokens(270, 3)):
            done = llm.generate(prompt, max_tokens=30, num_draft_tokens=4, **options)
            places = done.timings.draft_places  # of those behind an answer's end nothing is known
            assert len(places) == 4 and all(tries == accepted > 0 for tries, accepted in places)


def test_tokens_that_the_draft_model_has_no_embedding_of_are_no_error(tokenizer: Tokenizer) -> None:
    """Of models of one tokenizer some have more rows than it has tokens."""
    own = load_random(moe_config(vocab_size=VOCAB + 70), device="cpu", max_context=300).engine
    second = load_random(moe_config(), device="cpu", max_context=300, seed=1, speculate="off").engine
    drafter = DraftModel(second, own.model.config.vocab_size)
    options: dict[str, Any] = {"activations": own.activations, "max_context": 300, "drafts": 7, "speculate": "draft"}
    llm = LLM(Engine(own.model, draft_model=drafter, **options), tokenizer, None, ())
    prompts = [[5, VOCAB + 69, 3], [VOCAB + 1, 6] * 30]
    make: Callable[..., Any] = functools.partial(llm.generate, prompts, max_tokens=24, temperature=1.5)
    want, found = make(speculate="off", seed=2), make(seed=2)
    assert any(token >= VOCAB for done in want for token in done.tokens)
    assert [done.tokens for done in found] == [done.tokens for done in want]
    assert all(done.timings.draft_n for done in found)


def test_a_draft_model_works_beside_a_device_that_draws(tokenizer: Tokenizer, mistaken: None) -> None:
    llm = with_draft_model(moe_config(), tokenizer, captures=True)
    prompts = [some_tokens(7), some_tokens(40, 2)]
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        want = [done.tokens for done in llm.generate(prompts, max_tokens=20, speculate="off", **options)]
        found = llm.generate(prompts, max_tokens=20, num_draft_tokens=3, **options)
        assert [done.tokens for done in found] == want
        assert sum(done.timings.draft_n_accepted for done in found) > 0


def test_sessions_go_on_and_back_with_a_draft_model(tokenizer: Tokenizer, mistaken: None, tmp_path: Path) -> None:
    llm = with_draft_model(moe_config(), tokenizer)
    plain = functools.partial(dict, temperature=0.9, seed=4, max_tokens=14)
    with llm.session() as one, llm.session() as other:
        for session, kind in ((one, "off"), (other, "draft")):
            for n, _ in enumerate(session.stream(some_tokens(20), speculate=kind, **plain())):
                if n == 7:
                    break
        assert one.tokens == other.tokens
        snapshot = other.snapshot()
        want = one.generate([5, 6], speculate="off", **plain()).tokens
        assert other.generate([5, 6], speculate="draft", **plain()).tokens == want
        other.rewind(snapshot)
        assert other.generate([5, 6], speculate="draft", **plain()).tokens == want
        other.save(tmp_path / "saved")
        want = one.generate([8], speculate="off", **plain()).tokens
        with penstock.restore(tmp_path / "saved", llm) as again:
            assert again.generate([8], speculate="draft", **plain()).tokens == want


def test_a_kept_follower_serves_a_text_that_begins_alike(tokenizer: Tokenizer) -> None:
    llm = with_draft_model(FAMILIES["llama"], tokenizer)
    drafter = llm.engine.draft_model
    assert drafter is not None
    prompt = some_tokens(200)
    read: list[int] = []
    step = drafter.engine.step

    def counting(runs: list[Any]) -> Any:
        read.append(sum(len(run.tokens) for run in runs))
        return step(runs)

    drafter.engine.step = counting  # type: ignore[method-assign]
    first = llm.generate(prompt, max_tokens=9, num_draft_tokens=2)
    assert sum(read) >= 200
    read.clear()
    again = llm.generate([*prompt, *first.tokens, 3, 4], max_tokens=9, num_draft_tokens=2)
    assert again.timings.draft_n_accepted == again.timings.draft_n > 0
    assert sum(read) < 60
    drafter.close()
    assert not drafter.engine.caches.in_use


def test_without_memory_there_are_no_drafts(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = with_draft_model(moe_config(), tokenizer)
    want = llm.generate(some_tokens(9), max_tokens=12, speculate="off").tokens
    assert llm.engine.draft_model is not None

    def full(*args: Any) -> None:
        raise OutOfMemory("cache: none is left")

    monkeypatch.setattr(llm.engine.draft_model.engine.caches, "reserve", full)
    done = llm.generate(some_tokens(9), max_tokens=12)
    assert (done.tokens, done.timings.draft_n) == (want, 0)


def test_what_two_texts_have_in_common() -> None:
    assert [_common([1, 2, 3], [1, 2, 3, 4]), _common([1, 2, 9], [1, 2, 3]), _common([], [1]), _common([5], [])] == [
        3, 2, 0, 0,
    ]  # fmt: skip
    assert _common([*range(50), 7], [*range(20), 99]) == 20


# -- from files ------------------------------------------------------------------------------------------------------


def test_a_folder_is_a_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    load: Callable[..., LLM] = functools.partial(penstock.load, device="cpu", speculate="draft")
    llm = load(draft_model=DEMO)
    want = llm.generate("The king and the fox", max_tokens=24, temperature=0.8, seed=1, speculate="off")
    done = llm.generate("The king and the fox", max_tokens=24, temperature=0.8, seed=1)
    assert done.text == want.text and done.timings.draft_n_accepted == done.timings.draft_n > 0


def test_a_folder_of_the_models_own_shapes_without_a_head_is_a_draft_model(tmp_path: Path) -> None:
    """Such as the same model in fewer bits."""
    same = tmp_path / "same"
    shutil.copytree(DEMO, same, ignore=shutil.ignore_patterns("mtp.safetensors"))
    headless = make(tmp_path / "headless", GEMMA["moe"], {}, count=8).folder
    for model, drafter in ((None, same), (headless, headless)):
        engine = penstock.load(model, device="cpu", max_context=64, draft_model=drafter).engine
        assert engine.draft_model is not None and engine.speculating()[0] == "draft"
    engine = penstock.load(same, device="cpu", max_context=64, draft_model=DEMO).engine
    assert engine.draft_model is None and engine.speculating()[0] == "mtp"
    with pytest.raises(CheckpointError, match="same: has no head that drafts"):
        penstock.load(device="cpu", speculate="mtp", draft_model=same)


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="^load: draft_model is None, expected a model that drafts"):
        penstock.load(device="cpu", speculate="draft")
    with pytest.raises(InvalidArgument, match="expected None: speculate is 'ngram'"):
        penstock.load(device="cpu", speculate="ngram", draft_model=DEMO)
    with pytest.raises(InvalidArgument, match="'draft', expected another: the model has not a draft_model"):
        penstock.load(device="cpu").generate("x", speculate="draft")
    other = tmp_path / "other"
    shutil.copytree(DEMO, other)
    described = json.loads((DEMO / "tokenizer.json").read_text())
    vocab = described["model"]["vocab"]
    vocab["Ġstove"], vocab["Ġsoldier"] = vocab["Ġsoldier"], vocab["Ġstove"]
    (other / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=r"other: token \d+ is another than the model's .* same vocabulary"):
        penstock.load(device="cpu", speculate="draft", draft_model=other)
    (other / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError):
        penstock.load(device="cpu", speculate="draft", draft_model=other)
    shutil.copy(DEMO / "model.safetensors", other)
    for changed, said in (
        ({"hidden_size": 128}, "dim is 128, expected 256: it is the head of another model"),
        ({"model_type": "deepseek_v3"}, "model_type is 'deepseek_v3', expected a head of qwen3_5_moe"),
    ):
        described = json.loads((DEMO / "config.json").read_text())
        inner = described.get("text_config", described)
        (inner if "hidden_size" in changed else described).update(changed)
        (other / "config.json").write_text(json.dumps(described))
        (other / "tokenizer.json").unlink(missing_ok=True)  # so that it cannot be a model by itself
        with pytest.raises(CheckpointError, match=f"other/config.json: {said}"):
            penstock.load(device="cpu", draft_model=other)
        with pytest.raises(InvalidArgument, match="other' has a head alone, expected a model that drafts"):
            penstock.load(device="cpu", speculate="draft", draft_model=other)
    with pytest.raises(CheckpointError, match="nowhere"):
        penstock.load(device="cpu", speculate="draft", draft_model=tmp_path / "nowhere")
