"""Requests of many clients on one model: texts as alone, order, memory, cancels, slow readers, failures, the end."""

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.api import LLM, load_random
from penstock.backends.cpu import device as cpu_device
from penstock.backends.cpu.device import CpuDevice
from penstock.engine import scheduler as module
from penstock.engine.buckets import BucketedSteps
from penstock.engine.cache import Sequence
from penstock.engine.engine import Engine
from penstock.engine.request import Completion, Timings
from penstock.engine.response import ChunkQueue, ResponseHandle
from penstock.engine.runner import Runner
from penstock.engine.sampling import Sampler
from penstock.engine.scheduler import Scheduler
from penstock.engine.state import RequestState
from penstock.engine.steps import CHAINED, ExactSteps, Run
from penstock.engine.thread import SchedulerThread
from penstock.errors import BackendError, Cancelled, DTypeError, InvalidArgument, OutOfMemory, QueueFull
from penstock.graph import Bound
from penstock.models.step import PagedKV
from tests.engine.capturing import CapturingHost
from tests.engine.test_cache import FixedHost
from tests.models.common import VOCAB, letters, small_config, some_tokens, write_model

LETTERS = letters()
SECONDS = 60  # after which a test that waits has failed


def with_device(llm: LLM, device: CpuDevice, max_context: int) -> LLM:
    old = llm.engine
    engine = Engine(old.model, activations=old.activations, max_context=max_context, device=device)
    return LLM(engine, llm.tokenizer, None, ())


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return penstock.load(write_model(tmp_path_factory.mktemp("small"), small_config()), device="cpu")


@pytest.fixture(params=["logits", "drawn"])
def llm(request: pytest.FixtureRequest, loaded: LLM) -> LLM:
    """The model with caches of its own, once with logits that go to the host, once with a device that draws."""
    return with_device(loaded, CpuDevice() if request.param == "logits" else CapturingHost(), 2048)


@pytest.fixture
def plain(loaded: LLM) -> LLM:
    return with_device(loaded, CpuDevice(), 2048)


@contextlib.contextmanager
def scheduler(llm: LLM, **options: Any) -> Iterator[Scheduler]:
    """A scheduler that leaves nothing behind."""
    thread = SchedulerThread(Scheduler(llm, **options))
    try:
        yield thread.scheduler
    finally:
        thread.close(0)
    assert not thread._thread.is_alive()
    nothing_is_held(llm)


def nothing_is_held(llm: LLM) -> None:
    caches = llm.engine.caches
    assert caches.slots_used == 0
    for pool in caches.pools.values():
        assert pool.used == 0 and not any(pool.references)


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def tokens_of(ticket: ResponseHandle) -> list[int]:
    """Read to the end, but not for ever."""
    found: list[int] = []
    reader = threading.Thread(target=lambda: found.extend(chunk.token for chunk in ticket), daemon=True)
    reader.start()
    reader.join(SECONDS)
    assert not reader.is_alive(), "waited in vain"
    return found


def same(got: Completion, want: Completion) -> None:
    assert (got.text, got.tokens, got.finish_reason) == (want.text, want.tokens, want.finish_reason)
    assert (got.logprobs, got.top_logprobs) == (want.logprobs, want.top_logprobs)
    assert got.usage.prompt_tokens == want.usage.prompt_tokens
    assert got.usage.completion_tokens == want.usage.completion_tokens


class Watched:
    """What an engine is asked to do, in order: ("prefill", tokens) and ("decode", rows). `gate` holds it up."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[str, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        step = engine.step

        def watched(runs: Seq[Run]) -> np.ndarray | None:
            assert self.gate.wait(SECONDS)
            answers = sum(not run.prompt for run in runs)
            self.found += [("prefill", len(run.tokens)) for run in runs if run.prompt]
            self.found += [("decode", answers)] if answers else []
            return step(runs)

        monkeypatch.setattr(engine, "step", watched)


@pytest.fixture
def steps(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(plain.engine, monkeypatch)
    yield watched
    watched.gate.set()


# -- texts -----------------------------------------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.1, "seed": 3},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2**63 + 5},
    {"temperature": 1.5, "top_k": 20, "min_p": 0.01, "seed": 11},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"logit_bias": LETTERS, "stop": ["a", "mn", "zzz"]},
    {"temperature": 0.7, "seed": 1, "logprobs": 3},
    {"temperature": 2.0, "seed": 8, "extra_eos": list(range(20, 60))},
]


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_texts_are_those_of_requests_alone(rows: int, llm: LLM, rng: np.random.Generator) -> None:
    """Many kinds and lengths, more than fit at once, submitted in bursts."""
    cases = []
    for n in range(24):
        prompt = some_tokens(int(rng.choice([1, 2, 9, 40, 255, 256, 257, 520])), seed=n)
        cases.append((prompt, {"max_tokens": int(rng.integers(1, 24)), **KINDS[n % len(KINDS)]}))
    want = [llm.generate(prompt, **options) for prompt, options in cases]
    with scheduler(llm, max_sequences=rows, prefix_cache=False) as made:
        tickets = []
        for n, (prompt, options) in enumerate(cases):
            tickets.append(made.submit(made.request(prompt, **options)))
            if n % 7 == 6:
                tickets[-1].result(SECONDS)
        for ticket, alone in zip(tickets, want, strict=True):
            same(ticket.result(SECONDS), alone)
        assert made.metrics().finished == 24


def test_the_same_request_gives_the_same_text_in_any_company(llm: LLM, rng: np.random.Generator) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 1.2, "top_p": 0.95, "seed": 77}
    prompt = some_tokens(30)
    want = llm.generate(prompt, **options)
    with scheduler(llm) as made:
        for _ in range(6):
            others = []
            for n in range(int(rng.integers(0, 9))):
                kind = KINDS[int(rng.integers(len(KINDS)))]
                length = int(rng.integers(1, 300))
                others.append(made.submit(made.request(some_tokens(length, seed=n), max_tokens=12, **kind)))
            same(made.submit(made.request(prompt, **options)).result(SECONDS), want)
            for other in others:
                other.cancel()


def test_a_capturing_device_is_ahead_of_its_host(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests with it show nothing. Requests join, end and need pages while it is."""
    llm = with_device(loaded, CapturingHost(), 2048)
    chained: list[int] = []
    launch = llm.engine.launch

    def watched(runs: Any, *how: Any) -> Any:
        chained.append(sum(int(run.tokens[0]) <= CHAINED for run in runs))
        return launch(runs, *how)

    monkeypatch.setattr(llm.engine, "launch", watched)
    with scheduler(llm) as made:
        first = made.submit(made.request([5] * 250, max_tokens=30, extra_eos=[]))
        second = made.submit(made.request([6], max_tokens=9, extra_eos=[]))
        first.result(SECONDS)
        second.result(SECONDS)
    assert sum(chained) == 29 + 8


def test_a_device_that_was_ahead_starts_anew_after_others(loaded: LLM) -> None:
    """A request is paused, another one runs in the same size of step, then it goes on."""
    llm = with_device(loaded, CapturingHost(), 2048)
    want = [llm.generate([n], max_tokens=40, temperature=1.0, seed=0).tokens for n in (5, 6)]
    with scheduler(llm, buffer=3) as made:
        first = made.submit(made.request([5], max_tokens=40, temperature=1.0, seed=0))
        until(lambda: first.timings.generated_tokens >= 4)
        second = made.submit(made.request([6], max_tokens=40, temperature=1.0, seed=0, logprobs=1))
        assert second.result(SECONDS).tokens == want[1]
        assert tokens_of(first) == want[0]


def test_the_model_may_be_used_directly_meanwhile(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 25, "temperature": 1.0, "seed": 9}
    prompts = [some_tokens(n, seed=n) for n in (4, 300, 30)]
    want = [llm.generate(prompt, **options).tokens for prompt in prompts]
    with scheduler(llm) as made:
        tickets = [made.submit(made.request(prompt, **options)) for prompt in prompts]
        assert [llm.generate(prompt, **options).tokens for prompt in prompts] == want
        assert [ticket.result(SECONDS).tokens for ticket in tickets] == want


@pytest.mark.cuda
def test_cuda_texts_are_those_of_requests_alone(tmp_path: Path) -> None:
    """With prefixes, which a GPU stores at multiples of 2048."""
    folder = write_model(tmp_path, small_config(max_position_embeddings=8192))
    llm = penstock.load(folder, device="cuda", deterministic=True)
    assert llm.engine.device.samples_tokens
    slow = getattr(llm.engine.device, "interpreted", False)  # seconds per token
    lengths, tokens = ([3, 5], 2) if slow else ([3, 40, 2047, 2048, 9, 2049, 5000] * 2, 40)
    cases = [(some_tokens(length, seed=length), KINDS[n % len(KINDS)]) for n, length in enumerate(lengths)]
    want = [llm.generate(prompt, max_tokens=tokens, **options) for prompt, options in cases]
    with scheduler(llm) as made:
        tickets = [made.submit(made.request(prompt, max_tokens=tokens, **options)) for prompt, options in cases]
        for ticket, alone in zip(tickets, want, strict=True):
            same(ticket.result(10 * SECONDS), alone)
        assert slow or made.metrics().cached_tokens >= 2048


def test_chunks_are_those_of_stream(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 25, "logit_bias": LETTERS, "logprobs": 1}
    want = list(llm.stream([7, 8], **options))
    with scheduler(llm) as made:
        assert list(made.submit(made.request([7, 8], **options))) == want

        async def read() -> list[Any]:
            return [chunk async for chunk in made.submit(made.request([7, 8], **options))]

        assert asyncio.run(read()) == want


def test_request_takes_text_and_names_bad_options(plain: LLM) -> None:
    with scheduler(plain) as made:
        same(made.submit(made.request("hello", max_tokens=4)).result(SECONDS), plain.generate("hello", max_tokens=4))
        for error, options in (
            (InvalidArgument, {"max_tokens": 0}),
            (DTypeError, {"temperature": "hot"}),
            (InvalidArgument, {"best_of": 2}),
            (InvalidArgument, {"prompt": []}),
            (InvalidArgument, {"prompt": [VOCAB]}),
            (InvalidArgument, {"prompt": [1] * 2048}),
        ):
            with pytest.raises(error):
                made.request(**{"prompt": [1], **options})


def test_submit_refuses_a_request_twice(plain: LLM) -> None:
    with scheduler(plain) as made:
        request = made.request([1], max_tokens=1)
        made.submit(request).result(SECONDS)
        with pytest.raises(InvalidArgument, match="^request: it was submitted before, expected a new one"):
            made.submit(request)


def test_usage_and_timings_are_told(plain: LLM) -> None:
    with scheduler(plain) as made:
        ticket = made.submit(made.request(some_tokens(30), max_tokens=5, logit_bias=LETTERS))
        done = ticket.result(SECONDS)
    assert (ticket.usage.prompt_tokens, ticket.usage.completion_tokens, ticket.usage.cached_tokens) == (30, 5, 0)
    timings = ticket.timings
    assert done.timings is timings and (timings.prompt_tokens, timings.generated_tokens) == (30, 5)
    assert timings.queue_seconds > 0 and timings.prompt_seconds > 0 and timings.generation_seconds > 0
    assert plain.stats().generated_tokens == 5


@pytest.mark.parametrize("options", [
    {"max_sequences": 0}, {"queue": -1}, {"queue": True}, {"memory": 0}, {"prefix_memory": 1.5}, {"buffer": 0},
    {"read_timeout": 0}, {"read_timeout": "1"},
], ids=str)  # fmt: skip
def test_scheduler_names_a_bad_option(options: dict[str, Any], plain: LLM) -> None:
    (name,) = options
    with pytest.raises(InvalidArgument, match=f"^scheduler: {name} is "):
        Scheduler(plain, **options)


# -- order -----------------------------------------------------------------------------------------------------------


def test_a_long_prompt_delays_a_running_answer_by_one_chunk(plain: LLM, steps: Watched) -> None:
    with scheduler(plain, buffer=5000) as made:
        first = made.submit(made.request([5], max_tokens=2000, logit_bias=LETTERS))
        next(first)
        long = made.submit(made.request(some_tokens(1700), max_tokens=2))
        long.result(SECONDS)
        first.cancel()
    found = [kind for kind, _ in steps.found]
    begin = steps.found.index(("prefill", 256))
    end = len(found) - found[::-1].index("prefill")
    assert found[begin:end].count("prefill") == 7
    assert all(pair != ("prefill", "prefill") for pair in zip(found[begin:end], found[begin + 1 : end], strict=False))


def test_short_prompts_pass_a_long_one(plain: LLM, steps: Watched) -> None:
    steps.gate.clear()
    with scheduler(plain) as made:
        long = made.submit(made.request(some_tokens(1700), max_tokens=1))
        until(lambda: long.state == "prompt")
        short = made.submit(made.request(some_tokens(20), max_tokens=1))
        steps.gate.set()
        short.result(SECONDS)
        long.result(SECONDS)
    assert steps.found[:3] == [("prefill", 256), ("prefill", 20), ("prefill", 256)]


def test_a_long_prompt_is_passed_by_no_more_than_its_length(plain: LLM, steps: Watched) -> None:
    """1000 tokens, then shorter prompts without end: fewer than 1000 tokens of them go first."""
    steps.gate.clear()
    with scheduler(plain, max_sequences=2) as made:
        first = made.submit(made.request([1], max_tokens=1))
        long = made.submit(made.request(some_tokens(1000), max_tokens=1))
        short = [made.submit(made.request(some_tokens(250, seed=n), max_tokens=1)) for n in range(12)]
        until(lambda: first.state == "prompt")
        steps.gate.set()
        later = 12
        while long.state != "done":  # more come as they go
            if short[-3].state == "done":
                short.append(made.submit(made.request(some_tokens(250, seed=later), max_tokens=1)))
                later += 1
            time.sleep(0.0005)
        before = sum(count for kind, count in steps.found[: steps.found.index(("prefill", 1000 - 768))] if count == 250)
        assert before == 500  # a third one has 500 tokens before it, and twice its own are as many again
        for ticket in short:
            ticket.result(SECONDS)


def test_requests_join_a_batch_that_runs(plain: LLM, steps: Watched) -> None:
    with scheduler(plain, max_sequences=4) as made:
        with made.condition:  # all of them before the engine looks
            tickets = [made.submit(made.request([n + 4], max_tokens=40, logit_bias=LETTERS)) for n in range(6)]
        for ticket in tickets:
            ticket.result(SECONDS)
        metrics = made.metrics()
    rows = [count for kind, count in steps.found if kind == "decode"]
    assert max(rows) == 4 and metrics.decode_steps == len(rows) and metrics.decode_rows == sum(rows) == 6 * 39
    assert metrics.mean_batch == sum(rows) / len(rows)


# -- queue and memory ------------------------------------------------------------------------------------------------


def test_submit_refuses_what_the_queue_has_no_room_for(plain: LLM, steps: Watched) -> None:
    steps.gate.clear()
    with scheduler(plain, max_sequences=2, queue=3) as made:
        tickets = [made.submit(made.request([5], max_tokens=2)) for _ in range(5)]
        with pytest.raises(QueueFull, match="^queue: 5 requests are running or waiting, expected fewer") as caught:
            made.submit(made.request([5]))
        assert 1 <= caught.value.retry_after <= 60
        tickets[4].cancel()
        tickets.append(made.submit(made.request([5], max_tokens=2)))  # a cancelled one makes room at once
        steps.gate.set()
        done = [ticket.result(SECONDS).finish_reason for ticket in tickets]
        assert done == ["length"] * 4 + ["cancelled", "length"]
        assert made.metrics().refused == 1


def test_submit_refuses_what_can_never_fit(plain: LLM) -> None:
    caches = plain.engine.caches
    with scheduler(plain, memory=caches.bytes_of(512)) as made:
        with pytest.raises(OutOfMemory, match=r"^request: 513 positions \(a prompt of 13 and max_tokens\) need \d"):
            made.submit(made.request([1] * 13, max_tokens=500))
        assert made.submit(made.request([1] * 12, max_tokens=500, stop="a")).result(SECONDS).tokens
        assert made.metrics().refused == 1
        # max_tokens beyond the context asks for the context alone
        with pytest.raises(OutOfMemory, match="^request: 2048 positions"):
            made.submit(made.request([1], max_tokens=10**9))


def test_requests_wait_for_memory_and_small_ones_pass(plain: LLM) -> None:
    """Room for one long and one short sequence: a second long one waits, a short one does not."""
    caches = plain.engine.caches
    with scheduler(plain, memory=caches.bytes_of(1024) + caches.bytes_of(200), prefix_cache=False, buffer=2000) as made:
        first = made.submit(made.request([5], max_tokens=1023, logit_bias=LETTERS))
        next(first)
        second = made.submit(made.request(some_tokens(600), max_tokens=400))
        third = made.submit(made.request([6], max_tokens=3))
        third.result(SECONDS)
        assert second.state == "waiting"
        metrics = made.metrics()
        assert metrics.memory_used <= metrics.memory_total == made.memory
        assert (metrics.running, metrics.waiting) == (1, 1)
        first.cancel()
        assert second.result(SECONDS).usage.prompt_tokens == 600


def test_a_request_that_waits_for_memory_is_passed_by_no_more_than_its_prompt(plain: LLM, steps: Watched) -> None:
    caches = plain.engine.caches
    with scheduler(plain, memory=caches.bytes_of(1024) + caches.bytes_of(256), prefix_cache=False, buffer=2000) as made:
        first = made.submit(made.request([5], max_tokens=1023, logit_bias=LETTERS))
        next(first)
        large = made.submit(made.request(some_tokens(300), max_tokens=700))
        small = [made.submit(made.request(some_tokens(40, seed=n), max_tokens=1)) for n in range(7)]
        for ticket in small[:6]:
            ticket.result(SECONDS)
        with pytest.raises(TimeoutError):
            small[6].result(0.2)
        assert (small[6].state, large.state) == ("waiting", "waiting")
        first.cancel()
        large.result(SECONDS)
        small[6].result(SECONDS)


def test_a_large_request_of_a_client_who_has_one_holds_up_nobody_elses_first(plain: LLM) -> None:
    caches = plain.engine.caches
    memory = caches.bytes_of(1024) + caches.bytes_of(256)
    with scheduler(plain, memory=memory, prefix_cache=False, buffer=2000) as made:
        first = made.submit(made.request([5], max_tokens=1023, logit_bias=LETTERS), "A")
        next(first)
        large = made.submit(made.request([6], max_tokens=1000), "A")
        own = made.submit(made.request(some_tokens(150), max_tokens=2), "A")  # too long to pass
        other = made.submit(made.request(some_tokens(150), max_tokens=2), "B")
        other.result(SECONDS)
        assert (large.state, own.state) == ("waiting", "waiting")
        first.cancel()
        large.result(SECONDS)
        own.result(SECONDS)


def test_memory_for_all_of_max_tokens_is_there_when_a_request_starts(plain: LLM, steps: Watched) -> None:
    steps.gate.clear()
    caches = plain.engine.caches
    with scheduler(plain) as made:
        with made.condition:  # all of them before the engine looks
            tickets = [made.submit(made.request([5], max_tokens=1000)) for _ in range(3)]
        until(lambda: all(ticket.state == "prompt" for ticket in tickets))
        assert len(caches.pools[None].free) >= 3 * 4 and caches._slots >= 3
        version = caches.version
        steps.gate.set()
        for ticket in tickets:
            ticket.cancel()
        assert caches.version == version


def test_a_request_fails_if_the_machine_has_no_memory(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with scheduler(plain) as made:
        with monkeypatch.context() as patch:
            patch.setattr(cpu_device, "available_memory", lambda: 0)
            with pytest.raises(OutOfMemory, match="^cache: .* are needed"):
                made.submit(made.request([5], max_tokens=2000)).result(SECONDS)
        assert made.submit(made.request([5], max_tokens=3)).result(SECONDS).tokens
        assert made.metrics().failed == 1


def test_caches_make_room_once(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = plain.engine.caches
    caches.make_room({None: 9}, 3)
    assert len(caches.pools[None].free) >= 9 and caches._slots == 3 and caches.slots_used == 0
    version, nbytes = caches.version, caches.nbytes
    caches.make_room({None: 9}, 3)
    assert (caches.version, caches.nbytes) == (version, nbytes)
    assert nbytes == caches.pools[None].capacity * caches.page_bytes(None) + 3 * caches.slot_bytes
    caches.make_room({}, 4)
    assert caches._slots == 6
    assert caches.bytes_of(600) == 3 * caches.page_bytes(None) + caches.slot_bytes
    room = (64 << 20) + caches.page_bytes(None)  # not for twice as many: then as many as needed
    monkeypatch.setattr(cpu_device, "available_memory", lambda: room)
    caches.make_room({None: 10}, 0)
    room = (64 << 20) + caches.slot_bytes
    caches.make_room({None: 10}, 7)
    assert (caches.pools[None].capacity, caches._slots) == (10, 7)
    with pytest.raises(OutOfMemory, match="^cache: "):
        caches.make_room({None: 12}, 0)


def test_caches_that_grew_in_part_are_bound_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two layers has new arrays when memory ends; a step after that writes into them."""
    engine = load_random(small_config(num_hidden_layers=4), device="cpu").engine
    pages = [layout for layout in engine.caches.layouts if isinstance(layout, PagedKV)]
    rows = []
    for fails in (False, True):
        sequence = engine.open()
        engine.prefill(sequence, some_tokens(200))
        engine.decode([sequence], [5])
        if fails:
            with monkeypatch.context() as patch:
                made = [
                    engine.device.zeros((31, 256, layout.key_width), "float32") for layout in pages[:1] for _ in "kv"
                ]
                patch.setattr(engine.device, "zeros", lambda *shape, made=made: made.pop())
                with pytest.raises(IndexError):
                    engine.caches.make_room({None: 30}, 0)
            engine.decode([sequence], [6])
            engine.caches.make_room({None: 30}, 0)
        else:
            engine.decode([sequence], [6])
        rows.append(engine.decode([sequence], [7]))
    np.testing.assert_array_equal(rows[0], rows[1])


def test_memory_is_by_default_what_is_free(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = plain.engine.caches
    whole = caches.bytes_of(plain.max_context)
    for free in (4 << 30, (300 << 20) + whole, 0):
        monkeypatch.setattr(cpu_device, "available_memory", lambda free=free: free)
        if not free:
            caches.make_room({None: 4}, 1)
        with scheduler(plain) as made:
            assert made.memory <= caches.nbytes + free
            assert made.memory >= whole or not free


# -- caches of a fixed size ------------------------------------------------------------------------------------------


def capacity(llm: LLM) -> tuple[int, int]:
    caches = llm.engine.caches
    return caches.slots, caches.pools[None].capacity


@pytest.fixture
def fixed(loaded: LLM) -> LLM:
    return with_device(loaded, FixedHost(), 2048)


def test_fixed_caches_have_the_size_of_load_until_a_scheduler_takes_more(fixed: LLM) -> None:
    want = fixed.generate([5], max_tokens=4).tokens
    assert capacity(fixed) == (8, 8 + 8 * 8) and fixed.scheduler.memory == fixed.engine.caches.nbytes
    version = fixed.engine.caches.version
    with scheduler(fixed) as made:  # as many sequences: nothing to change
        assert capacity(fixed) == (8, 72) and fixed.engine.caches.version == version
        assert made.metrics().pages_total == 72 and made.metrics().pages_used == 0
    old = [weakref.ref(array) for arrays in fixed.engine.caches.arrays for array in arrays]
    with scheduler(fixed, max_sequences=20) as made:
        assert capacity(fixed) == (20, 20 * 9) and fixed.engine.caches.version == version + 1
        gc.collect()
        assert old and not any(array() is not None for array in old)  # no program holds them
        assert made.metrics().pages_total == 180
        assert fixed.generate([5], max_tokens=4).tokens == want  # programs are bound to the new arrays
    with fixed.session() as session:
        session.append([5])
        with pytest.raises(InvalidArgument, match="^cache: 1 sequences are open and 1 pages are held"):
            Scheduler(fixed, max_sequences=21)
        with scheduler_beside(fixed, max_sequences=4):  # more than enough, and kept
            assert capacity(fixed) == (20, 180)
    with scheduler(fixed, max_sequences=4):  # much too large
        assert capacity(fixed) == (4, 36)


@contextlib.contextmanager
def scheduler_beside(llm: LLM, **options: Any) -> Iterator[Scheduler]:
    """A scheduler on a model that holds more than its requests."""
    made = Scheduler(llm, **options)
    yield made
    made.close(0)


def test_fixed_caches_are_refused_with_numbers_if_memory_cannot_hold_them(
    fixed: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches, working = fixed.engine.caches, 256 << 20
    slot, least = caches.slot_bytes, caches.bytes_of(2048)
    monkeypatch.setattr(cpu_device, "available_memory", lambda: (1 << 30) + working)
    with pytest.raises(
        OutOfMemory, match=r"^scheduler: memory for sequences is 1.07 GB, expected at most 1.07 GB: so much"
    ):
        Scheduler(fixed, memory=(1 << 30) + 1)
    with pytest.raises(OutOfMemory, match=r"^cache: 9 sequences, one of them with 2048 .* use at most 8 sequences"):
        Scheduler(fixed, max_sequences=9, memory=least + 8 * slot - 1, prefix_cache=False)
    with scheduler(fixed, memory=least + 3 * slot - 1, prefix_cache=False) as made:
        assert (made.max_sequences, capacity(fixed)) == (3, (3, 8))
        assert made.memory == caches.nbytes == least + 2 * slot
    with scheduler(fixed, max_sequences=2, memory=1 << 29, prefix_memory=5 * slot) as made:
        assert capacity(fixed) == (2, 18) and made.memory == caches.nbytes + 5 * slot
    with pytest.raises(OutOfMemory, match="^cache: 2 sequences"):
        Scheduler(fixed, max_sequences=2, memory=least + 5 * slot, prefix_memory=5 * slot)
    with pytest.raises(InvalidArgument, match="^scheduler: gpu_memory_utilization is 1.5, expected above 0"):
        Scheduler(fixed, gpu_memory_utilization=1.5)
    seen: list[float] = []
    monkeypatch.setattr(fixed.engine.device, "free_memory", lambda share=1.0: seen.append(share) or 1 << 30)
    with scheduler(fixed, gpu_memory_utilization=0.25), scheduler(fixed):
        assert {0.25, 0.9} < set(seen)


def test_fixed_caches_have_room_for_the_whole_context_unless_a_share_is_asked_for(
    fixed: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `load` leaves free may be more than 0.9 of the memory allows, as beside streamed experts."""
    caches = fixed.engine.caches
    working = fixed.engine.working_bytes(8)
    free = working + caches.bytes_of(2048) - caches.nbytes
    monkeypatch.setattr(fixed.engine.device, "free_memory", lambda share=1.0: free if share == 1 else 0)
    with pytest.raises(OutOfMemory, match="^cache: 1 sequences, one of them with 2048 positions, need"):
        Scheduler(fixed, gpu_memory_utilization=0.9)
    with scheduler(fixed) as made:
        assert (made.max_sequences, capacity(fixed)) == (1, (1, 8))


def test_allocate_for_has_room_for_batches_of_any_size(fixed: LLM) -> None:
    engine = fixed.engine
    engine.allocate_for([(11, 300), (1, 1000)])
    assert capacity(fixed) == (11, 11 * 3)
    version = engine.caches.version
    sequences = [engine.open() for _ in range(11)]
    for sequence in sequences:
        engine.prefill(sequence, some_tokens(300))
    engine.allocate_for([(5, 300)])  # in use, and enough
    with pytest.raises(InvalidArgument, match="^cache: 11 sequences are open"):
        engine.allocate_for([(12, 300)])
    for sequence in sequences:
        engine.close(sequence)
    assert engine.caches.version == version
    engine.cache_memory = engine.caches.bytes_of(300)
    with pytest.raises(OutOfMemory, match=r"^cache: 2 sequences need .*, expected at most .* \(cache_memory\)"):
        engine.allocate_for([(2, 300)])


def test_gpu_memory_utilization_is_refused_where_caches_grow(plain: LLM) -> None:
    with pytest.raises(InvalidArgument, match="gpu_memory_utilization is 0.5, expected none on device 'cpu'"):
        Scheduler(plain, gpu_memory_utilization=0.5)


def test_requests_wait_for_pages_and_slots_of_fixed_caches(fixed: LLM) -> None:
    caches = fixed.engine.caches
    prompts = [some_tokens(520, seed=n) for n in range(4)]
    want = [fixed.generate(prompt, max_tokens=90, logit_bias=LETTERS).tokens for prompt in prompts]
    memory = caches.size(4, {None: 8})  # of pages two such requests
    with scheduler(fixed, max_sequences=4, memory=memory, prefix_cache=False) as made:
        assert capacity(fixed) == (4, 8)
        version = caches.version
        with made.condition:
            tickets = [made.submit(made.request(prompt, max_tokens=90, logit_bias=LETTERS)) for prompt in prompts]
        until(lambda: tickets[1].state == "generating")
        assert made.metrics().running == 2 and caches.pools[None].capacity == 8
        assert [ticket.result(SECONDS).tokens for ticket in tickets] == want
        assert caches.version == version
    sessions = [fixed.session() for _ in range(caches.slots)]
    with pytest.raises(OutOfMemory, match="^cache: 4 of 4 sequences"):
        fixed.generate([5], max_tokens=1)
    for session in sessions:
        session.close()
    assert fixed.generate(prompts[0], max_tokens=1, logit_bias=LETTERS).tokens == want[0][:1]


def test_prefixes_are_stored_in_what_fixed_caches_leave(fixed: LLM) -> None:
    """Pages of stored prefixes go when requests need them; copies of states lie beside the caches."""
    caches = fixed.engine.caches
    texts = [some_tokens(600, seed=n) for n in range(4)]
    want = [fixed.generate(text, max_tokens=3).tokens for text in texts]
    budget = 2 * (caches.slot_bytes + 2 * caches.page_bytes(None))
    with scheduler(fixed, max_sequences=1, memory=caches.size(1, {None: 9}) + budget, prefix_memory=budget) as made:
        assert capacity(fixed) == (1, 9)
        for text, tokens in zip(texts, want, strict=True):
            for again in (False, True):
                ticket = made.submit(made.request(text, max_tokens=3))
                assert ticket.result(SECONDS).tokens == tokens
                assert ticket.completion().usage.cached_tokens == (512 if again else 0)
        assert made.metrics().prefix_entries == 2 and made.metrics().pages_used == 4
        long = made.submit(made.request([5], max_tokens=2040))  # all pages but one
        next(long)
        assert made.metrics().prefix_entries < 2
        long.cancel()


def test_load_has_caches_of_the_size_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.device_for", lambda name: FixedHost())
    config = small_config(max_position_embeddings=1 << 13)
    caches = load_random(config, device="cpu").engine.caches
    memory = caches.size(8, {None: 39})
    for asked in (memory, f"{memory}B"):
        llm = load_random(config, device="cpu", cache_memory=asked)
        assert llm.max_context == 1 << 13
        llm.logits([5])
        assert capacity(llm) == (8, 39) and llm.engine.caches.nbytes == memory
        with scheduler(llm, prefix_cache=False) as made:  # the same is what a server has
            assert made.memory == memory and capacity(llm) == (8, 39)
    less = caches.bytes_of(1 << 13) - 1
    assert load_random(config, device="cpu", cache_memory=less).max_context == 1 << 12
    with pytest.raises(
        OutOfMemory, match=r"8192 positions need .* are there for them \(cache_memory\); max_context=4096"
    ):
        load_random(config, device="cpu", cache_memory=less, max_context=1 << 13)
    for wrong, message in ((0, "is 0, expected"), (True, "is True"), ("12Q", "is '12Q'"), ("50%", "is '50%'")):
        with pytest.raises(InvalidArgument, match=f"^load: cache_memory:? {message}"):
            load_random(config, device="cpu", cache_memory=wrong)
    with pytest.raises(OutOfMemory, match=r"cache_memory is 4000\d+\.\d\d GB, expected at most .* free"):
        load_random(config, device="cpu", cache_memory="4000000GB")
    room = caches.bytes_of(1 << 13)
    monkeypatch.setattr(cpu_device, "available_memory", lambda: (256 << 20) + 2 * room - 1)
    monkeypatch.setattr("penstock.api.random_nbytes", lambda config, speculate: 0)
    assert load_random(config, device="cpu").max_context == 1 << 12  # a long one takes at most half
    assert load_random(config, device="cpu", max_context=1 << 13).max_context == 1 << 13


def test_cache_memory_limits_requests_on_the_cpu(loaded: LLM) -> None:
    caches = loaded.engine.caches
    llm = load_random(small_config(), device="cpu", cache_memory=caches.bytes_of(1024), max_context=1024)
    assert llm.scheduler.memory == caches.bytes_of(1024) == Scheduler(llm, prefix_cache=False).memory


# -- readers ---------------------------------------------------------------------------------------------------------


def test_a_slow_reader_pauses_his_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 1000.0)  # a read wakes the engine
    want = llm.generate([5], max_tokens=60, logit_bias=LETTERS)
    with scheduler(llm, buffer=4) as made:
        slow = made.submit(made.request([5], max_tokens=60, logit_bias=LETTERS))
        next(slow)
        other = made.submit(made.request([6], max_tokens=100, logit_bias=LETTERS))
        assert len(tokens_of(other)) == 100  # read as it comes
        until(lambda: slow.timings.generated_tokens >= 5)
        count = slow.timings.generated_tokens
        assert count <= 1 + 4 + 2  # one that is under way when the buffer is full, one that a device is ahead
        whole = made.submit(made.request([6], max_tokens=100, logit_bias=LETTERS))
        assert len(whole.result(SECONDS).tokens) == 100  # nobody reads its chunks, and it is not held up
        assert slow.timings.generated_tokens == count and slow.state == "generating"
        assert tokens_of(slow) == want.tokens[1:]


def test_a_reader_who_takes_nothing_is_given_up(plain: LLM) -> None:
    with scheduler(plain, buffer=2, read_timeout=0.05) as made:
        ticket = made.submit(made.request([5], max_tokens=500, logit_bias=LETTERS))
        until(lambda: ticket.state == "done")
        assert ticket.timings.generated_tokens < 10
        with pytest.raises(Cancelled, match=r"^reader: nothing was read for 0.05 seconds"):
            list(ticket)
        assert made.metrics().cancelled == 1


@pytest.mark.parametrize("short_of", ["sequences", "memory"])
def test_a_reader_who_lags_while_others_wait_gives_up_his_sequence(
    short_of: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 1000.0)  # reads wake the engine
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 3, "logit_bias": LETTERS}
    prompt = some_tokens(300)
    want = llm.generate(prompt, **options).tokens
    limit = {"max_sequences": 1}
    if short_of == "memory":
        llm.engine.max_context = 512
        limit = {"max_sequences": 4, "memory": llm.engine.caches.size(4, {None: 2})}
    with scheduler(llm, buffer=4, prefix_cache=False, **limit) as made:
        slow = made.submit(made.request(prompt, **options))
        until(lambda: slow.timings.generated_tokens >= 4)
        read: list[int] = []
        for count in (1, 3):  # some are read, then all: only then is it computed again
            assert made.submit(made.request(some_tokens(300, seed=9), max_tokens=3)).result(SECONDS).tokens
            assert slow.state == "waiting" and made.metrics().preemptions == 1
            read += [next(slow).token for _ in range(count)]
        assert read + tokens_of(slow) == want
        assert made.metrics().finished == 3


def test_a_preempted_request_is_given_up_or_finished_as_one_that_runs(plain: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "logit_bias": LETTERS}
    want = plain.generate([5], **options).tokens
    with scheduler(plain, max_sequences=1, buffer=4, read_timeout=SECONDS) as made:

        def preempted() -> ResponseHandle:
            count = made.metrics().preemptions
            ticket = made.submit(made.request([5], **options))
            made.submit(made.request([6], max_tokens=2)).result(SECONDS)
            assert made.metrics().preemptions == count + 1
            return ticket

        asleep, made.read_timeout = preempted(), 0.05
        until(lambda: asleep.state == "done")
        with pytest.raises(Cancelled, match=r"^reader: nothing was read for 0.05 seconds"):
            list(asleep)
        made.read_timeout = SECONDS
        awake, late = preempted(), preempted()
        assert next(late).token == want[0]
        closing = threading.Thread(target=made.close, args=(SECONDS,))
        closing.start()
        assert tokens_of(awake) == want
        assert tokens_of(late) == want[1:]
        closing.join(SECONDS)
        assert (made.metrics().cancelled, made.metrics().waiting) == (1, 0)


def test_result_after_some_chunks_is_the_whole_answer(llm: LLM) -> None:
    with scheduler(llm, buffer=2) as made:
        ticket = made.submit(made.request([5], max_tokens=30, logit_bias=LETTERS))
        next(ticket)
        next(ticket)
        same(ticket.result(SECONDS), llm.generate([5], max_tokens=30, logit_bias=LETTERS))
        assert list(ticket) == [] and ticket.result(0).text


def test_result_in_time_or_not_at_all(plain: LLM, steps: Watched) -> None:
    steps.gate.clear()
    with scheduler(plain) as made:
        ticket = made.submit(made.request([5], max_tokens=3))
        with pytest.raises(TimeoutError, match=r"^request: the answer is not complete after 0.01 seconds"):
            ticket.result(0.01)
        steps.gate.set()
        assert len(ticket.result(SECONDS).tokens) == 3


def test_tickets_in_an_event_loop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 1000.0)
    want = [llm.generate([n + 4], max_tokens=20, temperature=1.0, seed=n) for n in range(10)]

    async def client(made: Scheduler, n: int) -> str:
        ticket = made.submit(made.request([n + 4], max_tokens=20, temperature=1.0, seed=n))
        if n % 2:
            return (await ticket.wait()).text
        return "".join([chunk.text async for chunk in ticket])

    async def main(made: Scheduler) -> list[str]:
        return await asyncio.wait_for(asyncio.gather(*(client(made, n) for n in range(10))), SECONDS)

    with scheduler(llm, max_sequences=4, buffer=2) as made:
        assert asyncio.run(main(made)) == [done.text for done in want]


def test_a_cancelled_task_may_cancel_its_request(plain: LLM) -> None:
    async def client(made: Scheduler) -> ResponseHandle:
        ticket = made.submit(made.request([5], max_tokens=2000, logit_bias=LETTERS))

        async def read() -> None:
            try:
                async for _ in ticket:
                    pass
            finally:
                ticket.cancel()

        task = asyncio.create_task(read())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await ticket.wait()).finish_reason == "cancelled"
        return ticket

    with scheduler(plain) as made:
        assert asyncio.run(client(made)).state == "done"


def test_a_loop_that_was_closed_holds_nothing_up(plain: LLM, steps: Watched) -> None:
    steps.gate.clear()
    with scheduler(plain) as made:
        ticket = made.submit(made.request([5], max_tokens=30))

        async def leave() -> None:
            task = asyncio.ensure_future(anext(ticket))
            await asyncio.sleep(0.01)
            del task

        loop = asyncio.new_event_loop()
        loop.run_until_complete(leave())
        loop.close()
        steps.gate.set()
        assert len(ticket.result(SECONDS).tokens) == 30
        gc.collect()


# -- cancels ---------------------------------------------------------------------------------------------------------


def test_cancel_while_waiting(plain: LLM, steps: Watched) -> None:
    steps.gate.clear()
    with scheduler(plain, max_sequences=1) as made:
        first = made.submit(made.request([5], max_tokens=2))
        second = made.submit(made.request([6], max_tokens=2))
        until(lambda: first.state == "prompt")
        second.cancel()
        assert second.state == "done" and list(second) == []  # at once, while the engine is busy
        assert second.result(0).finish_reason == "cancelled"
        steps.gate.set()
        assert len(first.result(SECONDS).tokens) == 2
        assert made.metrics().cancelled == 1


def test_cancel_in_the_prompt(plain: LLM, steps: Watched) -> None:
    steps.gate.clear()
    with scheduler(plain) as made:
        ticket = made.submit(made.request(some_tokens(1700), max_tokens=2))
        until(lambda: ticket.state == "prompt")
        ticket.cancel()
        steps.gate.set()
        done = ticket.result(SECONDS)
        assert (done.finish_reason, done.tokens, done.text) == ("cancelled", [], "")
        assert len(steps.found) <= 1


def test_cancel_within_one_token(llm: LLM) -> None:
    with scheduler(llm) as made:
        for after in (1, 2, 10):
            ticket = made.submit(made.request([5], max_tokens=2000, logit_bias=LETTERS))
            other = made.submit(made.request([6], max_tokens=30, logit_bias=LETTERS))
            for _ in range(after):
                next(ticket)
            ticket.cancel()
            count = ticket.timings.generated_tokens
            done = ticket.result(SECONDS)
            assert done.finish_reason == "cancelled" and after <= len(done.tokens) <= count + 2
            assert len(other.result(SECONDS).tokens) == 30


def test_cancel_when_done_changes_nothing(plain: LLM) -> None:
    with scheduler(plain) as made:
        ticket = made.submit(made.request([5], max_tokens=3, logit_bias=LETTERS))
        done = ticket.result(SECONDS)
        ticket.cancel()
        assert ticket.result(0) == done and done.finish_reason == "length"
        metrics = made.metrics()
        assert (metrics.finished, metrics.cancelled) == (1, 0)


def test_a_ticket_that_nobody_holds_is_cancelled(plain: LLM, steps: Watched) -> None:
    with scheduler(plain, max_sequences=1, buffer=3) as made:
        first = made.submit(made.request([5], max_tokens=2000, logit_bias=LETTERS))
        next(first)
        second = made.submit(made.request([5], max_tokens=2000))
        del first, second
        gc.collect()
        until(lambda: made.metrics().cancelled == 2)


def test_many_requests_with_cancels_leave_nothing(llm: LLM, rng: np.random.Generator) -> None:
    threads = threading.active_count()
    with scheduler(llm, max_sequences=6, queue=500) as made:
        tickets = []
        for n in range(200):
            length = int(rng.choice([1, 3, 20, 60, 300]))
            options = KINDS[n % len(KINDS)]
            request = made.request(some_tokens(length, seed=n % 9), max_tokens=int(rng.integers(1, 12)), **options)
            tickets.append(made.submit(request))
            if rng.random() < 0.4:
                tickets[int(rng.integers(len(tickets)))].cancel()
            if rng.random() < 0.1:
                next(tickets[int(rng.integers(len(tickets)))], None)
            if rng.random() < 0.05:
                time.sleep(0.003)
        done = [ticket.result(SECONDS) for ticket in tickets]
        assert {one.finish_reason for one in done} <= {"stop", "length", "cancelled"}
        metrics = made.metrics()
        assert (metrics.running, metrics.waiting, metrics.failed) == (0, 0, 0)
        assert metrics.finished + metrics.cancelled == 200 and metrics.cancelled >= 20
        assert llm.engine.caches.slots_used == 0
        prefix = made._prefix
        assert prefix is not None
        assert metrics.pages_used * llm.engine.caches.page_bytes(None) + prefix.state_bytes == metrics.prefix_bytes
    assert threading.active_count() == threads


# -- failures --------------------------------------------------------------------------------------------------------


Fails = Callable[[np.ndarray, np.ndarray], bool]


def break_steps(patch: pytest.MonkeyPatch, error: Exception, fails: Fails) -> None:
    """Steps for which `fails(their tokens, positions of answers)` says so stop half-way."""
    exact, bucketed, whole, captured = ExactSteps.run, BucketedSteps._launch, Bound.run, Runner.run
    broken = False

    def look(runs: Seq[Run]) -> None:
        nonlocal broken
        answers = np.array([run.sequence.length for run in runs if not run.prompt], np.int32)
        broken = fails(np.concatenate([run.tokens for run in runs]), answers)

    def half_exact(self: ExactSteps, runs: Seq[Run]) -> np.ndarray | None:
        look(runs)
        return exact(self, runs)

    def half_bucketed(self: BucketedSteps, runs: Seq[Run], *more: Any, **how: Any) -> Any:
        look(runs)
        return bucketed(self, runs, *more, **how)

    def half(self: Bound | Runner) -> Any:
        if not broken:
            return whole(self) if isinstance(self, Bound) else captured(self)
        for call in self.calls[: len(self.calls) // 2]:
            call()
        raise error

    patch.setattr(ExactSteps, "run", half_exact)
    patch.setattr(BucketedSteps, "_launch", half_bucketed)
    patch.setattr(Bound, "run", half)
    patch.setattr(Runner, "run", half)


BAD = 262  # a token that only one prompt has


@pytest.mark.parametrize("where", ["prompt", "first", "later"])
def test_a_request_that_breaks_steps_ends_alone(where: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with one sequence in them fail half-way, with its state and everybody else's: the others' texts stay."""
    prompts = [some_tokens(n, seed=n) for n in (300, 5, 20, 270)]
    options: dict[str, Any] = {"max_tokens": 25, "temperature": 1.0, "seed": 5, "logit_bias": None}
    want = [llm.generate(prompt, **options) for prompt in prompts]
    length = 50 if where == "prompt" else 50 + (0 if where == "first" else 12)
    bad = {"tokens": 0}

    def fails(tokens: np.ndarray, answers: np.ndarray) -> bool:
        return (tokens == BAD).sum() == length if where == "prompt" else length in answers

    with scheduler(llm, prefix_cache=where != "later") as made:
        break_steps(monkeypatch, BackendError("expert 3: cannot be read"), fails)
        tickets = [made.submit(made.request(prompt, **options)) for prompt in prompts]
        next(tickets[0])
        broken = made.submit(made.request([BAD] * 50, max_tokens=100, logit_bias=LETTERS))
        with pytest.raises(BackendError, match="^expert 3: cannot be read"):
            broken.result(SECONDS)
        bad["tokens"] = len(broken.tokens)
        for ticket, alone in zip(tickets, want, strict=True):
            same(ticket.result(SECONDS), alone)
        metrics = made.metrics()
        assert (metrics.failed, metrics.finished, metrics.running) == (1, 4, 0)
    assert bad["tokens"] == {"prompt": 0, "first": 1, "later": 13}[where]


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.2, "frequency_penalty": 0.3}], ids=["", "penalties"])
def test_a_step_that_fails_once_costs_nobody_his_text(
    more: dict[str, float], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [some_tokens(n, seed=n) for n in (300, 5, 20)]
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, **more}
    want: list[Completion] = []
    while not want or any(len(alone.tokens) < 40 for alone in want):  # a seed with which none ends early
        options["seed"] = options.get("seed", -1) + 1
        want = [llm.generate(prompt, **options) for prompt in prompts]
    count = 0

    def fails(tokens: np.ndarray, answers: np.ndarray) -> bool:
        nonlocal count
        count += len(answers) > 1
        return len(answers) > 1 and count in (7, 11, 12, 30)

    with scheduler(llm) as made:
        break_steps(monkeypatch, BackendError("disk: a read failed"), fails)
        with made.condition:
            tickets = [made.submit(made.request(prompt, **options)) for prompt in prompts]
        for ticket, alone in zip(tickets, want, strict=True):
            assert tokens_of(ticket) == alone.tokens
            same(ticket.result(0), alone)
    assert count > 30


def test_a_sequence_that_lost_what_it_shared_waits_for_memory(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests fit since they share a prefix; a step fails when that is not stored any more."""
    prompt, caches = some_tokens(600), plain.engine.caches
    options: dict[str, Any] = {"max_tokens": 30, "logit_bias": LETTERS}
    want = plain.generate(prompt, **options)
    memory = 4 * caches.page_bytes(None) + 3 * caches.slot_bytes
    with scheduler(plain, memory=memory, prefix_memory=memory) as made:
        made.submit(made.request(prompt, max_tokens=1)).result(SECONDS)
        failed = False

        def fails(tokens: np.ndarray, answers: np.ndarray) -> bool:
            nonlocal failed
            if len(answers) != 2 or failed:
                return False
            failed = True
            made._prefix.clear()  # type: ignore[union-attr]
            return True

        break_steps(monkeypatch, BackendError("disk: a read failed"), fails)
        with made.condition:
            tickets = [made.submit(made.request(prompt, **options)) for _ in range(2)]
        for ticket in tickets:
            same(ticket.result(SECONDS), want)
        assert failed and made.metrics().failed == 0
        assert [ticket.usage.cached_tokens for ticket in tickets] == [512, 512]


def test_a_token_is_appended_before_it_is_known_only_if_another_one_follows(plain: LLM) -> None:
    def state(drawn: int, owned: bool = True, length: int = 5, **options: Any) -> RequestState:
        request = plain.request([5, 6], 4, **options)
        queue, sampler = ChunkQueue(9, lambda: None, Timings()), Sampler(request.params, VOCAB)
        sequence = Sequence(0, {}, length)
        return RequestState(request, queue, sampler, 2048, {}, sequence=sequence, drawn=drawn, owned=owned)

    assert state(3).can_chain and not state(4).can_chain
    assert state(3, length=2046).can_chain and not state(3, length=2047).can_chain
    assert not state(3, owned=False).can_chain  # a session holds no token that it does not know
    assert not state(3, repetition_penalty=1.1, repetition_context=3).can_chain
    assert state(3, repetition_penalty=1.1, presence_penalty=0.5).can_chain


def test_steps_that_always_fail_end_every_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with scheduler(llm) as made:
        with monkeypatch.context() as patch:
            break_steps(patch, RuntimeError("the device has gone"), lambda tokens, answers: len(answers) > 0)
            tickets = [made.submit(made.request([n + 4], max_tokens=9)) for n in range(5)]
            for ticket in tickets:
                with pytest.raises(RuntimeError, match="^the device has gone"):
                    ticket.result(SECONDS)
        assert made.submit(made.request([5], max_tokens=3)).result(SECONDS).tokens
        assert made.metrics().failed == 5


def test_scores_that_are_not_finite_end_their_request_alone(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = plain.generate([5], max_tokens=30)
    step = plain.engine.step

    def with_nan(runs: Seq[Run]) -> np.ndarray | None:
        logits = step(runs)
        if logits is not None:
            for row, run in zip(logits, [run for run in runs if run.wanted == "last"], strict=True):
                if run.sequence.length == 50:
                    row[7] = np.nan
        return logits

    monkeypatch.setattr(plain.engine, "step", with_nan)
    with scheduler(plain) as made:
        good = made.submit(made.request([5], max_tokens=30))
        bad = made.submit(made.request(some_tokens(45), max_tokens=30, logit_bias=LETTERS))
        with pytest.raises(BackendError, match="^sample: the model produced non-finite logits at position 50: NaN"):
            bad.result(SECONDS)
        same(good.result(SECONDS), want)


def test_memory_that_ends_in_the_middle_ends_one_request(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may take pages that were promised; who then needs one more fails, and nobody else."""
    want = plain.generate([5], max_tokens=60)
    with scheduler(plain, prefix_cache=False, buffer=2) as made:  # they wait for their readers after a few tokens
        ticket = made.submit(made.request([5], max_tokens=60))
        large = made.submit(made.request(some_tokens(250), max_tokens=30, logit_bias=LETTERS))
        next(large)
        thief = plain.engine.open()
        with monkeypatch.context() as patch:
            patch.setattr(cpu_device, "available_memory", lambda: 0)
            with pytest.raises(OutOfMemory), plain.engine.lock:
                while True:
                    plain.engine.caches.reserve(thief, 256)
                    plain.engine.caches.advance(thief, 256)
            with pytest.raises(OutOfMemory, match="^cache: "):
                large.result(SECONDS)
            same(ticket.result(SECONDS), want)
            plain.engine.close(thief)


def test_a_request_whose_start_fails_ends_alone(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with scheduler(plain) as made:
        other = made.submit(made.request([5], max_tokens=100, logit_bias=LETTERS))
        next(other)
        with monkeypatch.context() as patch:
            patch.setattr(plain.engine.caches, "open", lambda: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                made.submit(made.request([6])).result(SECONDS)
        assert len(other.result(SECONDS).tokens) == 100
        assert made.submit(made.request([6], max_tokens=2)).result(SECONDS).tokens


def test_a_mistake_in_the_scheduler_ends_all_waits(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with scheduler(plain, max_sequences=1) as made:
        first = made.submit(made.request([5], max_tokens=2000, logit_bias=LETTERS))
        next(first)
        second = made.submit(made.request([5], max_tokens=2))
        monkeypatch.setattr(made, "_reap", lambda: 1 // 0)
        for ticket in (first, second):
            with pytest.raises(Cancelled, match="^scheduler: it has stopped: integer division"):
                ticket.result(SECONDS)
        with pytest.raises(Cancelled, match="^scheduler: it is closing"):
            made.submit(made.request([5]))


# -- grammars --------------------------------------------------------------------------------------------------------


class Spelling:
    """A grammar that allows one text alone; it notes what it is told."""

    def __init__(self, tokens: Seq[int], limited: bool = True) -> None:
        self.tokens, self.limited = list(tokens), limited
        self.accepted: list[int] = []

    @property
    def done(self) -> bool:
        return self.limited and len(self.accepted) == len(self.tokens)

    def mask(self) -> np.ndarray | None:
        if len(self.accepted) >= len(self.tokens):
            return None
        token = self.tokens[len(self.accepted)]
        words = np.zeros(token // 32 + 1, np.uint32)  # shorter than the vocabulary: the rest is not allowed
        words[token // 32] = 1 << (token % 32)
        return words

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def end_within(self, tokens: int) -> None:
        self.most = tokens

    @property
    def closing(self) -> bool:
        return False


def test_a_grammar_decides_what_may_come(llm: LLM) -> None:
    ids = llm.tokenizer.encode('{"name": 42}')
    want = llm.generate([6], max_tokens=20)
    with scheduler(llm) as made:
        for options in ({}, {"temperature": 2.0, "seed": 4}, {"logit_bias": {5: 100.0}, "repetition_penalty": 3.0}):
            grammar = Spelling(ids)
            other = made.submit(made.request([6], max_tokens=20))
            done = made.submit(made.request([5], max_tokens=50, grammar=grammar, **options)).result(SECONDS)
            assert (done.text, done.finish_reason, grammar.accepted) == ('{"name": 42}', "stop", ids)
            same(other.result(SECONDS), want)
        done = made.submit(made.request([5], max_tokens=5, grammar=Spelling(ids))).result(SECONDS)
        assert (done.text, done.finish_reason) == ('{"nam', "length")
        for prompt, asked, most in (([5], 9, 9), ([5] * 60, 10**6, llm.max_context - 60)):
            grammar = Spelling(ids)
            made.submit(made.request(prompt, max_tokens=asked, grammar=grammar)).result(SECONDS)
            assert grammar.most == most
    with pytest.raises(InvalidArgument, match="^generate: grammar belongs to one prompt"):
        llm.generate([[5], [6]], grammar=Spelling(ids))
    done = llm.generate([5], max_tokens=50, grammar=Spelling(ids), logprobs=2)
    assert done.text == '{"name": 42}' and done.logprobs == [0.0] * len(ids)


def test_a_grammar_that_allows_all_changes_nothing(llm: LLM) -> None:
    with scheduler(llm) as made:
        options: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 3}
        got = made.submit(made.request([5], grammar=Spelling([], limited=False), **options)).result(SECONDS)
        same(got, llm.generate([5], **options))


def test_a_grammar_that_fails_ends_its_request_alone(plain: LLM) -> None:
    class Broken(Spelling):
        def accept(self, token: int) -> None:
            super().accept(token)
            if len(self.accepted) == 3:
                raise InvalidArgument("grammar: too costly")

    class Empty(Spelling):
        def mask(self) -> np.ndarray:
            return np.zeros(9, np.uint32)

    with scheduler(plain) as made:
        other = made.submit(made.request([5], max_tokens=20))
        with pytest.raises(InvalidArgument, match="^grammar: too costly"):
            made.submit(made.request([5], grammar=Broken([5, 6, 7, 8]))).result(SECONDS)
        with pytest.raises(BackendError, match="-inf for all 263 tokens"):
            made.submit(made.request([5], grammar=Empty([5]))).result(SECONDS)
        same(other.result(SECONDS), plain.generate([5], max_tokens=20))


# -- the end ---------------------------------------------------------------------------------------------------------


def test_close_finishes_what_runs_and_cancels_what_waits(llm: LLM) -> None:
    want = llm.generate([5], max_tokens=300)
    thread = SchedulerThread(Scheduler(llm, max_sequences=1, buffer=5000))
    made = thread.scheduler
    first = made.submit(made.request([5], max_tokens=300))
    next(first)
    second = made.submit(made.request([6], max_tokens=2))
    thread.close()
    assert made.closing and not thread._thread.is_alive()
    same(first.result(0), want)
    with pytest.raises(Cancelled, match="^scheduler: closed before the request was started"):
        second.result(0)
    with pytest.raises(Cancelled, match="^scheduler: it is closing and takes no requests"):
        made.submit(made.request([7]))
    thread.close(1)  # again
    nothing_is_held(llm)


def test_close_cancels_what_runs_at_its_deadline(plain: LLM) -> None:
    thread = SchedulerThread(Scheduler(plain, buffer=2))
    made = thread.scheduler
    paused = made.submit(made.request([5], max_tokens=2000, logit_bias=LETTERS))
    running = made.submit(made.request([6], max_tokens=2000, logit_bias=LETTERS))
    raised: list[Exception] = []

    def read() -> None:
        try:
            for _ in running:
                pass
        except Cancelled as error:
            raised.append(error)

    reader = threading.Thread(target=read)
    next(paused)
    reader.start()
    until(lambda: running.state == "generating")
    closing = threading.Thread(target=thread.close)  # without a deadline: it would wait for the one that is not read
    closing.start()
    until(lambda: made.closing)
    thread.close(0.05)
    closing.join(SECONDS)
    reader.join(SECONDS)
    assert str(raised[0]) == "scheduler: closed before the answer was complete"
    with pytest.raises(Cancelled, match="^scheduler: closed before the answer was complete"):
        paused.result(0)
    assert made.metrics().cancelled == 2
    nothing_is_held(plain)


def test_a_program_that_ends_without_close_ends(loaded: LLM) -> None:
    import subprocess
    import sys

    code = (
        "import penstock; from penstock.engine.scheduler import Scheduler\n"
        "from penstock.engine.thread import SchedulerThread\n"
        "llm = penstock.load(device='cpu'); s = SchedulerThread(Scheduler(llm)).scheduler\n"
        "t = s.submit(s.request('Once', max_tokens=3000)); print(len(next(t).text) >= 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "True", "")
