"""Callables of requests that change logits or choose tokens: what they see, beside others, and what is refused."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.api import LLM
from penstock.backends.cpu.device import CpuDevice
from penstock.engine.channel import submit_message
from penstock.engine.hooks import TokenHistory
from penstock.engine.steps import CHAINED
from penstock.errors import InvalidArgument, NonFiniteLogits
from tests.engine.capturing import CapturingHost
from tests.engine.test_scheduler import nothing_is_held, same, scheduler, with_device
from tests.models.common import VOCAB, small_config, some_tokens, write_model

PROMPT = some_tokens(9)
SIZED = {"max_tokens": 6, "logprobs": 3}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return penstock.load(write_model(tmp_path_factory.mktemp("small"), small_config()), device="cpu")


@pytest.fixture(params=[CpuDevice, CapturingHost])
def llm(request: pytest.FixtureRequest, loaded: LLM) -> LLM:
    """The model with caches of its own, on a device that hands logits to the host, and on one that draws."""
    return with_device(loaded, request.param(), 2048)


class Noting:
    """A processor that changes nothing, and notes what it sees."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.logits: list[np.ndarray] = []

    def __call__(self, tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        self.tokens.append(tokens)
        self.logits.append(logits)
        return logits


def highest(logprobs: np.ndarray) -> np.ndarray:
    return np.argmax(logprobs, axis=-1)


def lower_every(n: int) -> Any:
    def lower(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        logits[:, ::n] -= 5
        return logits

    return lower


@pytest.mark.parametrize("options", [
    {},
    {"temperature": 0.9, "top_k": 20, "seed": 3},
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.4, "repetition_context": 4, "frequency_penalty": 0.2},
])  # fmt: skip
def test_a_processor_that_changes_nothing_changes_nothing(options: dict[str, Any], llm: LLM) -> None:
    noting = Noting()
    want = llm.generate(PROMPT, **SIZED, **options)
    same(llm.generate(PROMPT, **SIZED, **options, logits_processors=[noting]), want)
    assert [tokens.tolist() for tokens in noting.tokens] == [[*PROMPT, *want.tokens[:n]] for n in range(6)]
    raw = llm.logits([*PROMPT, *want.tokens[:5]])[len(PROMPT) - 1 :]
    assert all(x.shape == (1, VOCAB) and x.dtype == np.float32 for x in noting.logits)
    np.testing.assert_allclose(np.concatenate(noting.logits), raw, atol=1e-5)
    with pytest.raises(ValueError, match="read-only"):
        noting.tokens[0][0] = 1
    nothing_is_held(llm)


def test_processors_come_one_after_the_other_and_their_logprobs_are_reported(llm: LLM) -> None:
    first = lower_every(2)
    noting = Noting()
    got = llm.generate(PROMPT, **SIZED, logits_processors=[first, noting, lower_every(3)])
    x = noting.logits[0][0].astype(np.float64)
    raw = llm.logits(PROMPT)[-1]
    np.testing.assert_allclose(x[1::2], raw[1::2], atol=1e-5)
    np.testing.assert_allclose(x[::2], raw[::2] - 5, atol=1e-5)
    x[::3] -= 5
    want = x - np.log(np.exp(x).sum())
    assert got.tokens[0] == np.argmax(want) and got.logprobs is not None and got.top_logprobs is not None
    np.testing.assert_allclose(got.logprobs[0], want.max(), atol=1e-4)
    assert [i for i, _ in got.top_logprobs[0]] == np.argsort(-want, kind="stable")[:3].tolist()


def test_a_sampler_chooses_from_logprobs_after_processors_and_penalties(llm: LLM) -> None:
    """As greedy where it takes the highest; else its token, with its log-probability and the highest ones."""
    options = {**SIZED, "repetition_penalty": 1.3, "logit_bias": {7: 2.0}, "logits_processors": [lower_every(2)]}
    same(llm.generate(PROMPT, **options, sampler=highest), llm.generate(PROMPT, **options))
    seen: list[np.ndarray] = []

    def second(logprobs: np.ndarray) -> list[int]:
        seen.append(logprobs)
        return [int(np.argsort(-logprobs[0], kind="stable")[1])]

    got = llm.generate(PROMPT, **SIZED, sampler=second)
    assert got.logprobs is not None and got.top_logprobs is not None and len(seen) == 6
    for logprobs, token, own, top in zip(seen, got.tokens, got.logprobs, got.top_logprobs, strict=True):
        assert logprobs.shape == (1, VOCAB) and logprobs.dtype == np.float32
        np.testing.assert_allclose(np.exp(logprobs.astype(np.float64)).sum(), 1, atol=1e-5)
        assert top[1] == (token, own) and len(top) == 3
        np.testing.assert_allclose(own, logprobs[0, token], atol=1e-6)


def test_a_hook_does_not_hold_up_requests_beside_it(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooked row sits out every other step, the plain one has the token in each that the step before draws."""
    llm = with_device(loaded, CapturingHost(), 2048)
    launch, steps = llm.engine.launch, []

    def noted(runs: Any, *args: Any) -> Any:
        steps.append([int(run.tokens[-1]) <= CHAINED for run in runs])
        return launch(runs, *args)

    monkeypatch.setattr(llm.engine, "launch", noted)
    want = llm.generate(PROMPT, max_tokens=12).tokens
    steps.clear()
    found = llm.generate([PROMPT, PROMPT], max_tokens=12, logits_processors=[None, [Noting()]])
    assert [answer.tokens for answer in found] == [want, want]
    assert steps[:6] == [[False, False], [True], [True, False], [True], [True, False], [True]]


def test_hooked_requests_beside_plain_ones(llm: LLM) -> None:
    """Each as alone."""
    prompts = [some_tokens(n, seed=n) for n in (3, 300, 8, 20)]
    hooks: dict[str, Any] = {
        "logits_processors": [[lower_every(2)], None, [], [lower_every(5)]],
        "sampler": [None, None, highest, None],
        "temperature": [0.7, 0.9, 0.0, 0.0],
        "seed": [1, 2, 3, 4],
    }
    alone = [
        llm.generate(prompt, **SIZED, **{name: value[n] for name, value in hooks.items()})
        for n, prompt in enumerate(prompts)
    ]
    for got, want in zip(llm.generate(prompts, **SIZED, **hooks), alone, strict=True):
        same(got, want)
    texts = ["", "", "", ""]
    for n, chunk in llm.stream_batch(prompts, **SIZED, **hooks):
        texts[n] += chunk.text
    assert texts == [answer.text for answer in alone]
    shared = llm.generate(prompts[:2], **SIZED, logits_processors=[lower_every(2), lower_every(3)], sampler=highest)
    same(shared[1], llm.generate(prompts[1], **SIZED, logits_processors=[lower_every(2), lower_every(3)]))
    nothing_is_held(llm)


def test_hooks_in_every_way_to_ask(loaded: LLM) -> None:
    llm = with_device(loaded, CpuDevice(), 2048)
    hooks: dict[str, Any] = {"max_tokens": 4, "logits_processors": [lower_every(2)], "sampler": highest}
    want = llm.generate(PROMPT, **hooks).tokens
    assert want != llm.generate(PROMPT, max_tokens=4).tokens
    assert [chunk.token for chunk in llm.stream(PROMPT, **hooks)] == want
    assert asyncio.run(llm.agenerate(PROMPT, **hooks)).tokens == want

    async def streamed() -> list[int]:
        return [chunk.token async for chunk in llm.astream(PROMPT, **hooks)]

    assert asyncio.run(streamed()) == want
    messages = [{"role": "user", "content": "abc"}]
    whole = llm.chat(messages, **hooks).tokens
    assert whole == [chunk.token for chunk in llm.stream_chat(messages, **hooks)]
    assert whole == llm.generate(llm.chat_tokens(messages), **hooks).tokens


def test_hooks_of_a_session_see_all_its_tokens(llm: LLM) -> None:
    with llm.session() as session:
        noting = Noting()
        session.append(PROMPT)
        first = session.generate(max_tokens=3, logits_processors=[noting]).tokens  # from logits that it has
        second = session.generate([5, 6], max_tokens=2, logits_processors=[noting], sampler=highest).tokens
        seen = [tokens.tolist() for tokens in noting.tokens]
        assert seen[:3] == [[*PROMPT, *first[:n]] for n in range(3)]
        assert seen[3:] == [[*PROMPT, *first, 5, 6, *second[:n]] for n in range(2)]
        with pytest.raises(ZeroDivisionError):
            session.generate([7], logits_processors=[lambda tokens, logits: 1 / 0])
        assert session.tokens[-3:] == [*second, 7][-3:] and session.generate([8], max_tokens=1).tokens


def test_a_stop_string_and_a_grammar_hold_with_hooks(llm: LLM) -> None:
    want = llm.generate(PROMPT, max_tokens=12)
    stop = want.text[2:4]
    same(
        llm.generate(PROMPT, max_tokens=12, stop=stop, sampler=highest), llm.generate(PROMPT, max_tokens=12, stop=stop)
    )

    class Even:
        """A grammar: even ids."""

        source, done, closing = "", False, False

        def mask(self) -> np.ndarray:
            return np.full(-(-VOCAB // 32), 0x55555555, np.uint32)

        def accept(self, token: int) -> None:
            assert token % 2 == 0

        def end_within(self, tokens: int) -> None:
            assert tokens > 0

    def odd(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        logits[:, ::2] = -np.inf
        return logits

    for more in ({"sampler": highest}, {"temperature": 1.0, "seed": 4}):
        found = llm.generate(PROMPT, **SIZED, **more, grammar=Even(), logits_processors=[lower_every(4)])
        assert all(token % 2 == 0 for token in found.tokens) and len(found.tokens) == 6
    with pytest.raises(InvalidArgument, match="logits_processors: returned -inf for all of the .* the grammar allows"):
        llm.generate(PROMPT, grammar=Even(), logits_processors=[odd])
    with pytest.raises(InvalidArgument, match=r"returned the id 1, expected one whose log-probability is not -inf"):
        llm.generate(PROMPT, grammar=Even(), sampler=lambda logprobs: [1])


def nan_at_four(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
    logits[0, 4] = np.nan
    return logits


@pytest.mark.parametrize("hooks, words", [
    ({"logits_processors": [Noting(), lambda t, x: x[0]]},
     rf"logits_processors\[1\] \(<lambda>\): returned float32 of shape \({VOCAB},\), expected .* \(1, {VOCAB}\)"),
    ({"logits_processors": [lambda t, x: None]}, "returned None, expected logits"),
    ({"logits_processors": [lambda t, x: x.astype(np.int64)]}, rf"returned int64 of shape \(1, {VOCAB}\)"),
    ({"logits_processors": [nan_at_four]}, "nan_at_four.*for 1 of .* tokens.*the first is NaN for token 4"),
    ({"logits_processors": [lambda t, x: x * np.nan]}, f"NaN or .inf for {VOCAB} of {VOCAB} tokens"),
    ({"logits_processors": [lambda t, x: x + np.inf]}, "the first is .inf for token 0"),
    ({"logits_processors": [lambda t, x: x - np.inf]}, "returned -inf for all"),
    ({"sampler": lambda p: VOCAB}, rf"sampler \(<lambda>\): returned {VOCAB}, expected integers of shape \(1,\)"),
    ({"sampler": lambda p: np.array([[1]])}, r"returned int64 of shape \(1, 1\)"),
    ({"sampler": lambda p: [1.0]}, r"returned \[1.0\], expected integers"),
    ({"sampler": lambda p: [VOCAB]}, f"returned the id {VOCAB}, expected one from 0 to {VOCAB - 1}"),
    ({"sampler": lambda p: [-1]}, "returned the id -1"),
])  # fmt: skip
def test_what_hooks_return_is_looked_at(hooks: dict[str, Any], words: str, loaded: LLM) -> None:
    with pytest.raises(InvalidArgument, match=words):
        loaded.generate(PROMPT, **hooks)


@pytest.mark.parametrize("options, words", [
    ({"logits_processors": highest}, "logits_processors is <function .*, expected a list of callables"),
    ({"logits_processors": [3]}, r"logits_processors\[0\] is 3, expected a callable"),
    ({"sampler": "greedy"}, "sampler is 'greedy', expected a callable"),
    ({"sampler": highest, "temperature": 0.5}, "sampler is given with temperature 0.5, expected one of the two"),
    ({"sampler": highest, "top_k": 4}, "sampler is given with top_k 4"),
])  # fmt: skip
def test_options_that_are_no_hooks_are_refused(options: dict[str, Any], words: str, loaded: LLM) -> None:
    with pytest.raises(InvalidArgument, match=words):
        loaded.generate(PROMPT, **options)


def test_what_a_hook_raises_ends_its_request_alone(llm: LLM) -> None:
    class Ours(Exception):
        pass

    def failing(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        if len(tokens) == len(PROMPT) + 2:
            raise Ours("three")
        return logits

    want = llm.generate(some_tokens(5), max_tokens=12)
    with scheduler(llm, max_sequences=3) as made:
        bad = made.submit(made.request(PROMPT, logits_processors=[failing]))
        stopping = made.submit(made.request(PROMPT, sampler=lambda p: next(iter(()))))
        good = made.submit(made.request(some_tokens(5), max_tokens=12))
        with pytest.raises(Ours, match="three"):
            bad.result(60)
        with pytest.raises(RuntimeError, match="it raised StopIteration"):
            stopping.result(60)
        assert len(bad.tokens) == 2
        same(good.result(60), want)
        metrics = made.metrics()
        assert (metrics.finished, metrics.failed) == (1, 2)


def test_an_interrupt_in_a_hook_ends_the_call_and_no_other_request(llm: LLM) -> None:
    def interrupted(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        raise KeyboardInterrupt

    want = llm.generate(PROMPT, max_tokens=8).tokens
    other = llm.stream(PROMPT, max_tokens=8)
    found = [next(other).token]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(some_tokens(3), logits_processors=[interrupted])
    assert found + [chunk.token for chunk in other] == want
    nothing_is_held(llm)


def test_a_hook_cannot_use_the_model_that_calls_it(llm: LLM) -> None:
    def asks(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        return llm.logits(tokens.tolist())[-1:]

    done: list[Exception] = []

    def run() -> None:
        try:
            llm.generate(PROMPT, logits_processors=[asks])
        except InvalidArgument as error:
            done.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert "reads from the model that calls it" in str(done[0])
    nothing_is_held(llm)


def test_nonfinite_logits_are_the_models_not_the_hooks(loaded: LLM) -> None:
    state = loaded.scheduler._state(loaded.request(PROMPT, logits_processors=[Noting()]), None, None, None, None)
    with pytest.raises(NonFiniteLogits, match="the model produced"):
        state.sample(np.full(VOCAB, np.nan, np.float32), 9)


def test_a_request_with_hooks_stays_in_its_process(loaded: LLM) -> None:
    with pytest.raises(InvalidArgument, match="expected none: the engine runs in another process"):
        submit_message(1, loaded.request(PROMPT, sampler=highest), None)


def test_the_history_of_tokens_grows() -> None:
    history = TokenHistory([1, 2])
    before = history.view()
    for n in range(300):
        history.extend([n])
    assert before.tolist() == [1, 2] and history.view().tolist() == [1, 2, *range(300)] and len(history) == 302
