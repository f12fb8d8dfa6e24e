"""Requests that read a prompt and draw no token: logits of all rows, in order, beside answers; how they end."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.api import LLM
from penstock.backends.cpu.device import CpuDevice
from penstock.engine import execution
from penstock.engine.engine import Engine
from penstock.engine.reading import Reading
from penstock.engine.request import RequestLimits, reading_request
from penstock.engine.scheduler import Continued, Scheduler
from penstock.engine.steps import Run
from penstock.errors import BackendError, Cancelled, InvalidArgument, NonFiniteLogits, OutOfMemory
from tests.engine.capturing import CapturingHost
from tests.engine.test_scheduler import KINDS, SECONDS, same, scheduler, with_device
from tests.models.common import VOCAB, small_config, some_tokens, write_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return penstock.load(write_model(tmp_path_factory.mktemp("small"), small_config()), device="cpu")


@pytest.fixture(params=[CpuDevice, CapturingHost])
def llm(request: pytest.FixtureRequest, loaded: LLM) -> LLM:
    """The model with caches of its own, on a device that hands logits to the host, and on one that draws."""
    return with_device(loaded, request.param(), 2048)


@pytest.fixture
def plain(loaded: LLM) -> LLM:
    return with_device(loaded, CpuDevice(), 2048)


def alone(engine: Engine, tokens: Seq[int]) -> np.ndarray:
    sequence = engine.open()
    try:
        return engine.prefill(sequence, tokens, every=True)
    finally:
        engine.close(sequence)


def test_rows_are_those_of_the_prompt_alone_beside_answers(llm: LLM) -> None:
    prompts = [some_tokens(length, seed=length) for length in (1, 7, 600, 256, 257)]
    want = [alone(llm.engine, prompt) for prompt in prompts]
    cases = [(some_tokens(9 * n + 300, seed=n), {"max_tokens": 12, **KINDS[n]}) for n in range(3)]
    answers = [llm.generate(prompt, **options) for prompt, options in cases]
    found: list[list[np.ndarray]] = [[] for _ in prompts]
    with scheduler(llm, max_sequences=4) as made:
        writing = [made.submit(made.request(prompt, **options)) for prompt, options in cases]
        requests = [reading_request(llm.engine.limits, prompt) for prompt in prompts]
        reading = [made.submit(one, rows=own.append) for one, own in zip(requests, found, strict=True)]
        for handle, prompt in zip(reading, prompts, strict=True):
            done, timings = handle.result(SECONDS), handle.timings
            assert (done.tokens, done.text, done.finish_reason) == ([], "", "length")
            assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(prompt), 0)
            assert (timings.prompt_tokens, timings.generated_tokens, timings.generation_seconds) == (len(prompt), 0, 0)
            assert timings.prompt_seconds > 0 and timings.queue_seconds > 0
        for handle, answer in zip(writing, answers, strict=True):
            same(handle.result(SECONDS), answer)
        metrics = made.metrics()
        assert (metrics.finished, metrics.cancelled, metrics.failed) == (8, 0, 0)
    for own, rows in zip(found, want, strict=True):
        np.testing.assert_array_equal(np.concatenate(own), rows)


def test_rows_come_in_chunks_that_memory_has_room_for(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut by their number and the vocabulary alone; a prompt that is stored gives all its rows again."""
    monkeypatch.setattr(execution, "_LOGITS_BYTES", 512 * VOCAB * 4)
    llm = with_device(loaded, CapturingHost(), 4096)
    engine = llm.engine
    prompt = some_tokens(2200)
    with scheduler(llm, max_sequences=2) as made:
        for _ in range(2):
            made.submit(made.request(prompt, max_tokens=1)).result(SECONDS)
        assert made.metrics().cached_tokens == 2048
        chunks: list[np.ndarray] = []
        read: list[int] = []
        handle = made.submit(reading_request(engine.limits, prompt), rows=chunks.append, progress=read.append)
        assert handle.result(SECONDS).usage.cached_tokens == 0
        assert [len(chunk) for chunk in chunks] == read == [512, 512, 512, 512, 152]
    np.testing.assert_allclose(np.concatenate(chunks), alone(engine, prompt), atol=1e-4)


def test_logits_of_the_model_share_its_steps(llm: LLM) -> None:
    prompt = some_tokens(300)
    want = alone(llm.engine, prompt)
    stream = llm.stream(some_tokens(5), max_tokens=4)
    first = next(stream)
    np.testing.assert_array_equal(llm.logits(prompt), want)
    assert [first.token, *(chunk.token for chunk in stream)] == llm.generate(some_tokens(5), max_tokens=4).tokens
    before = llm.stats().prompt_tokens
    assert llm.logits([]).shape == (0, VOCAB) and llm.logits([3]).shape == (1, VOCAB)
    assert llm.stats().prompt_tokens == before + 1 and llm.engine.caches.slots_used == 0
    whole = llm.logits(some_tokens(llm.max_context))
    assert len(whole) == llm.max_context and np.isfinite(whole).all()


def test_what_goes_wrong_ends_the_reading_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rows raises, a step that fails or finds no memory, a cancel between two chunks."""
    monkeypatch.setattr(execution, "_LOGITS_BYTES", 0)  # chunks of 256
    engine, step, fails = llm.engine, llm.engine.step, [False]
    answer = llm.generate([5, 6], max_tokens=40)

    def failing(runs: Seq[Run]) -> np.ndarray | None:
        if fails[0] and any(run.wanted == "all" for run in runs):
            raise BackendError("step: no luck")
        return step(runs)

    monkeypatch.setattr(engine, "step", failing)
    seen: list[int] = []

    def refuse(rows: np.ndarray) -> None:
        seen.append(len(rows))
        if len(seen) == 2:
            raise MemoryError("enough")

    with scheduler(llm, max_sequences=3) as made:
        other = made.submit(made.request([5, 6], max_tokens=40))
        with pytest.raises(MemoryError, match="^enough$"):
            made.submit(reading_request(engine.limits, some_tokens(700)), rows=refuse).result(SECONDS)
        assert seen == [256, 256]
        handles: list[Any] = []
        got: list[int] = []

        def leave(rows: np.ndarray) -> None:
            got.append(len(rows))
            handles[0].cancel()

        with made.condition:
            handles.append(made.submit(reading_request(engine.limits, some_tokens(700)), rows=leave))
        assert handles[0].result(SECONDS).finish_reason == "cancelled" and got == [256]
        fails[0] = True
        with pytest.raises(BackendError, match="^step: no luck$"):
            made.submit(reading_request(engine.limits, [1, 2, 3]), rows=refuse).result(SECONDS)
        fails[0] = False
        same(other.result(SECONDS), answer)
        assert (made.metrics().failed, made.metrics().cancelled, made.metrics().finished) == (2, 1, 1)


def test_close_ends_a_reading_request(plain: LLM) -> None:
    limits, got = plain.engine.limits, []
    made = Scheduler(plain, max_sequences=1)
    under_way = made.submit(reading_request(limits, some_tokens(600)), rows=got.append)
    made.step()
    waits = made.submit(reading_request(limits, [1]), rows=got.append)
    made.close(0)
    for handle in (under_way, waits):
        with pytest.raises(Cancelled, match="^scheduler: closed before"):
            handle.result(SECONDS)
    assert [len(rows) for rows in got] == [256] and plain.engine.caches.slots_used == 0


def test_reading_requests_are_refused_with_reasons(plain: LLM) -> None:
    limits = RequestLimits(5, VOCAB)
    for tokens, message in (
        ([], "^tokens is empty, expected at least one"),
        ([VOCAB], f"^tokens: has {VOCAB}, expected ids from 0"),
        ([1] * 6, "^context: 0 positions are filled and 6 more were given, expected at most 5 in all"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            reading_request(limits, tokens)
    sequence = plain.engine.open()
    with Scheduler(plain, memory=1) as made:
        with pytest.raises(InvalidArgument, match="^submit: max_tokens is 0 without rows, expected 0 with rows"):
            made.submit(reading_request(limits, [1]))
        with pytest.raises(InvalidArgument, match="^submit: max_tokens is 3 with rows, expected 0 with rows"):
            made.submit(made.request([1], max_tokens=3), rows=print)
        with pytest.raises(InvalidArgument, match="and no session"):
            made.submit(reading_request(limits, [1]), rows=print, continued=Continued(sequence, [], None))
        with pytest.raises(OutOfMemory, match="^request: 1 positions"):
            made.submit(reading_request(limits, [1]), rows=print)
    plain.engine.close(sequence)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_log_probabilities_of_a_prompt_and_the_answer_behind_it(llm: LLM, kind: int) -> None:
    """Of prompts in chunks and of one token; the answer is the one of a request that reads nothing."""
    prompts = [some_tokens(length, seed=length) for length in (1, 7, 600, 257)]
    options = {"max_tokens": 6, **KINDS[kind]}
    want = [llm.generate(prompt, **options) for prompt in prompts]
    each = [log_softmax(alone(llm.engine, prompt))[:-1] for prompt in prompts]
    with scheduler(llm, max_sequences=3) as made:
        asked = [made.request(prompt, reading=Reading("logprobs", 3), **options) for prompt in prompts]
        handles = [made.submit(one) for one in asked]
        for handle, prompt, answer, rows in zip(handles, prompts, want, each, strict=True):
            same(handle.result(SECONDS), answer)
            assert handle.usage.cached_tokens == 0
            logprobs, ranks, ids, values = (np.concatenate(arrays) for arrays in zip(*handle.pieces, strict=True))
            own = rows[np.arange(len(rows)), prompt[1:]]
            np.testing.assert_allclose(logprobs, own, atol=1e-5)
            np.testing.assert_array_equal(ranks, 1 + (rows > own[:, None]).sum(axis=1))
            np.testing.assert_allclose(values, -np.sort(-rows, axis=1)[:, :3], atol=1e-5)
            np.testing.assert_allclose(np.take_along_axis(rows, ids.astype(np.int64), 1), values, atol=1e-5)
        assert made.metrics().prefix_entries == 0


def test_log_probabilities_are_reduced_where_the_logits_are(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host gets a few numbers of each token, and the logits of one row of a chunk."""
    device, seen = type(llm.engine.device), []
    to_host = device.to_host
    monkeypatch.setattr(device, "to_host", lambda self, array: (seen.append(array.shape), to_host(self, array))[1])
    with scheduler(llm) as made:
        handle = made.submit(made.request(some_tokens(300), max_tokens=0, reading=Reading("logprobs", 2)))
        assert handle.result(SECONDS).finish_reason == "length" and sum(len(piece[1]) for piece in handle.pieces) == 299
    assert max(np.prod(shape) for shape in seen if shape[-1:] == (VOCAB,)) == VOCAB
    assert {shape[1:] for shape in seen} == {(VOCAB,), (), (2,)}


def test_a_prompt_with_logits_that_are_not_finite_is_refused(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = plain.engine
    step = engine.step

    def damaged(runs: Seq[Run]) -> np.ndarray | None:
        found = step(runs)
        runs[0].found[1][5:7] = -2
        return found

    monkeypatch.setattr(engine, "step", damaged)
    with scheduler(plain) as made:
        handle = made.submit(made.request(some_tokens(9), max_tokens=0, reading=Reading("logprobs")))
        with pytest.raises(NonFiniteLogits, match="non-finite logits at position 6$"):
            handle.result(SECONDS)


def test_a_prompt_that_fills_the_context_is_read_where_no_answer_is_wanted(plain: LLM) -> None:
    llm = with_device(plain, CpuDevice(), 64)
    with scheduler(llm) as made:
        tokens = some_tokens(64)
        handle = made.submit(made.request(tokens, max_tokens=0, reading=Reading("logprobs")))
        assert handle.result(SECONDS).finish_reason == "length" and sum(len(piece[0]) for piece in handle.pieces) == 63
        with pytest.raises(InvalidArgument, match="prompt has 64 tokens"):
            made.request(tokens, max_tokens=1, reading=Reading("logprobs"))
        with pytest.raises(InvalidArgument, match="top is 100000, expected 0 to"):
            made.request(tokens, max_tokens=0, reading=Reading("logprobs", 100000))
        with pytest.raises(InvalidArgument, match="at least 1"):
            made.request([1], max_tokens=0)
