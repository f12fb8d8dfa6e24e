"""Stored prefixes: the bits of answers stay, what is found, what is stored and when, and what it costs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.api import LLM, load_random
from penstock.backends.cpu import device as cpu_device
from penstock.engine.admission import Admission
from penstock.engine.engine import Engine
from penstock.engine.prefix import PrefixCache
from penstock.engine.scheduler import Scheduler
from penstock.errors import OutOfMemory
from penstock.models.step import PAGE
from penstock.text.tokenizer import Tokenizer
from tests.engine.test_cache import FixedHost
from tests.models.common import VOCAB, letters, small_config, some_tokens, write_tokenizer
from tests.models.test_deepseek_v3 import CONFIGS as DEEPSEEK
from tests.models.test_gemma4 import CONFIGS as GEMMA

GRID, SECONDS = 256, 60
MODELS: dict[str, dict[str, Any]] = {
    "hybrid": small_config(),
    "window": GEMMA["moe"],  # shorter than a page
    "wide": GEMMA["wide"],  # longer than a page
    "latent": DEEPSEEK["plain"],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def models() -> dict[str, LLM]:
    return {name: load_random(config, device="cpu", max_context=2048) for name, config in MODELS.items()}


@pytest.fixture
def model(models: dict[str, LLM], tokenizer: Tokenizer) -> Callable[[str], LLM]:
    """A model by name, with caches of its own."""

    def made(name: str) -> LLM:
        old = models[name].engine
        return LLM(Engine(old.model, activations="int8", max_context=2048), tokenizer, None, ())

    return made


@pytest.fixture
def hybrid(model: Callable[[str], LLM]) -> Iterator[Engine]:
    engine = model("hybrid").engine
    yield engine
    nothing_is_held(engine)


def nothing_is_held(engine: Engine) -> None:
    caches = engine.caches
    assert caches.slots_used == 0
    for pool in caches.pools.values():
        assert pool.used == 0 and not any(pool.references)


def read(engine: Engine, prefix: PrefixCache, tokens: list[int]) -> tuple[int, np.ndarray]:
    """What the scheduler does with a prompt: how much of it was found, and the logits after it."""
    digests = prefix.digests(tokens)
    sequence = engine.open()
    found = prefix.find(digests, len(tokens))
    if found is not None:
        prefix.use(found, sequence)
    start = sequence.length
    points = prefix.points(digests, start)
    logits = None
    for at in range(start, len(tokens), GRID):
        logits = engine.prefill(sequence, tokens[at : at + GRID])
        if sequence.length in points:
            prefix.store(digests, sequence, lambda emptied: True)
    engine.close(sequence)
    assert logits is not None
    return start, logits


# -- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_reuse_changes_no_bit(name: str, model: Callable[[str], LLM]) -> None:
    """Prompts that share 0, 1, 2 … blocks, in any order, against an engine without a cache."""
    engine, plain = model(name).engine, model(name).engine
    prefix = PrefixCache(engine, 1 << 30)
    base, other = some_tokens(700, seed=1), some_tokens(300, seed=2)
    prompts = [base[:600], base[:600], base[:512] + other, base[:300] + other[:40], base[:512] + other[:9]]
    prompts += [base[:513], base[:512], other[:20], base[:256], base[:257], base[:512] + other + base[:1]]
    reused = []
    for prompt in prompts:
        start, logits = read(engine, prefix, prompt)
        reused.append(start)
        sequence = plain.open()
        np.testing.assert_array_equal(logits, plain.prefill(sequence, prompt))
        plain.close(sequence)
    assert reused[1] == 512 and reused.count(512) >= 4
    assert reused[8] == 0 and reused[10] == 768  # one block has to be computed; whatever was stored is found
    prefix.clear()
    nothing_is_held(engine)


@pytest.mark.parametrize("name", MODELS)
def test_texts_with_reuse_are_those_without(name: str, model: Callable[[str], LLM], rng: np.random.Generator) -> None:
    """A shared instruction, conversations that grow, repeated prompts; drawn with seeds, in batches."""
    llm, plain = model(name), model(name)
    instruction = some_tokens(300, seed=50)
    talks = [instruction + some_tokens(int(rng.integers(1, 250)), seed=n) for n in range(3)]
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 3}
    with Scheduler(llm, max_sequences=3) as made:
        for turn in range(3):
            tickets = [made.submit(made.request(talk, **options)) for talk in talks]
            for n, (talk, ticket) in enumerate(zip(talks, tickets, strict=True)):
                got, want = ticket.result(SECONDS), plain.generate(talk, **options)
                assert (got.tokens, got.text) == (want.tokens, want.text)
                assert got.usage.prompt_tokens == len(talk)
                if turn:
                    assert got.usage.cached_tokens >= 256
                talks[n] = talk + got.tokens + some_tokens(150, seed=10 * turn + n)
        metrics = made.metrics()
        assert metrics.prefix_hits >= 6 and metrics.prefix_entries > 0 and metrics.prefix_bytes > 0
        total = sum(len(talk) for talk in talks)
        assert 0 < metrics.cached_tokens < 3 * total and metrics.prompt_tokens > 0
    nothing_is_held(llm.engine)


def test_what_a_decode_step_wrote_is_not_stored(model: Callable[[str], LLM]) -> None:
    """Its rounding is not that of a prefill: a next turn computes the answer again, and has the bits it has alone."""
    llm = model("hybrid")
    with Scheduler(llm) as made:
        prompt = some_tokens(250)
        answer = made.submit(made.request(prompt, max_tokens=30, logit_bias=letters())).result(SECONDS)
        longer = prompt + answer.tokens + some_tokens(5)
        again = made.submit(made.request(longer, max_tokens=5)).result(SECONDS)
        assert again.usage.cached_tokens == 0
        third = made.submit(made.request([*longer, 5], max_tokens=5)).result(SECONDS)
        assert third.usage.cached_tokens == 256


# -- what is found ---------------------------------------------------------------------------------------------------


def test_digests_are_of_everything_before(hybrid: Engine) -> None:
    prefix = PrefixCache(hybrid, 1 << 30)
    tokens = some_tokens(1000)
    digests = prefix.digests(tokens)
    assert len(digests) == len(set(digests)) == 3
    assert prefix.digests(tokens[:768]) == digests and prefix.digests(tokens[:767]) == digests[:2]
    changed = list(tokens)
    changed[0] = (changed[0] + 1) % VOCAB
    assert not set(prefix.digests(changed)) & set(digests)
    changed = list(tokens)
    changed[600] = (changed[600] + 1) % VOCAB
    assert prefix.digests(changed)[:2] == digests[:2] and prefix.digests(changed)[2] != digests[2]
    assert prefix.digests([]) == prefix.digests(tokens[:255]) == []
    # blocks that repeat are not each other
    assert len(set(prefix.digests(tokens[:256] * 3))) == 3
    other = Engine(load_random(small_config(), device="cpu", seed=1).engine.model, max_context=600)
    assert not set(PrefixCache(other, 1 << 30).digests(tokens)) & set(digests)


def test_find_leaves_a_token_to_compute(hybrid: Engine) -> None:
    prefix = PrefixCache(hybrid, 1 << 30)
    tokens = some_tokens(1000)
    read(hybrid, prefix, tokens[:600])
    digests = prefix.digests(tokens)
    for length, want in ((513, 512), (1000, 512), (512, None), (256, None), (1, None)):
        found = prefix.find(digests[: length // GRID], length)
        assert (found and found.length) == want
    prefix.clear()
    assert prefix.find(digests, 1000) is None


# -- what is stored --------------------------------------------------------------------------------------------------


def test_points_are_the_last_and_where_prompts_part(hybrid: Engine) -> None:
    prefix = PrefixCache(hybrid, 1 << 30)
    assert not prefix.free_of_cost
    instruction = some_tokens(600, seed=1)
    first, second, third = (instruction + some_tokens(700, seed=n) for n in (2, 3, 4))
    assert prefix.points(prefix.digests(first), 0) == {1280}
    assert prefix.points(prefix.digests(second), 0) == {512, 1280}
    assert prefix.points(prefix.digests(third), 512) == {1280}
    assert prefix.points(prefix.digests(first), 1280) == set()
    assert prefix.points(prefix.digests(first + some_tokens(300)), 1280) == {1536}
    assert prefix.points([], 0) == set()


def test_points_are_all_where_they_cost_nothing(model: Callable[[str], LLM]) -> None:
    engine = model("latent").engine
    prefix = PrefixCache(engine, 1 << 30)
    assert prefix.free_of_cost
    tokens = some_tokens(1000)
    assert prefix.points(prefix.digests(tokens), 256) == {512, 768}
    read(engine, prefix, tokens)
    assert len(prefix) == 3 and prefix.nbytes == 3 * engine.caches.page_bytes(None) and prefix.state_bytes == 0
    start, _ = read(engine, prefix, tokens[:600] + some_tokens(10, seed=1))
    assert start == 512
    prefix.clear()


def test_a_shared_instruction_is_found_by_the_third_request(hybrid: Engine) -> None:
    prefix = PrefixCache(hybrid, 1 << 30)
    starts = []
    for n in range(4):
        starts.append(read(hybrid, prefix, some_tokens(600) + some_tokens(300, seed=10 + n))[0])
    assert starts == [0, 0, 512, 512]
    prefix.clear()


def test_only_so_many_blocks_are_remembered(hybrid: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.prefix._REMEMBERED", 5)
    prefix = PrefixCache(hybrid, 1 << 30)
    for n in range(4):
        prefix.points(prefix.digests(some_tokens(600, seed=n)), 0)
    assert len(prefix._seen) == 5
    assert prefix.points(prefix.digests(some_tokens(256, seed=3) + some_tokens(600, seed=9)), 0) == {256, 768}
    assert prefix.points(prefix.digests(some_tokens(256, seed=0) + some_tokens(600, seed=9)), 0) == {768}


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_pages_and_states(hybrid: Engine) -> None:
    caches = hybrid.caches
    page, state = caches.page_bytes(None), caches.slot_bytes
    assert page > 0 and state > 0
    prefix = PrefixCache(hybrid, 1 << 30)
    tokens = some_tokens(800)
    read(hybrid, prefix, tokens[:600])
    assert (len(prefix), prefix.nbytes, prefix.state_bytes) == (1, 2 * page + state, state)
    read(hybrid, prefix, tokens)  # shares two pages
    assert (len(prefix), prefix.nbytes) == (2, 3 * page + 2 * state)
    assert prefix.reclaimable == prefix.nbytes
    sequence = hybrid.open()
    entry = prefix.find(prefix.digests(tokens), 800)
    assert entry is not None and entry.length == 768
    prefix.use(entry, sequence)
    assert prefix.reclaimable == 2 * state  # its pages are the sequence's too
    assert prefix.evict() and (len(prefix), prefix.nbytes) == (1, 3 * page + state)
    hybrid.close(sequence)
    assert prefix.reclaimable == prefix.nbytes
    assert prefix.evict() and not prefix.evict() and prefix.nbytes == prefix.reclaimable == 0


def test_the_least_recently_used_goes_first(hybrid: Engine) -> None:
    caches = hybrid.caches
    one = 2 * caches.page_bytes(None) + caches.slot_bytes
    prefix = PrefixCache(hybrid, 3 * one + 1)
    texts = [some_tokens(600, seed=n) for n in range(4)]
    for text in texts[:3]:
        read(hybrid, prefix, text)
    assert read(hybrid, prefix, texts[0])[0] == 512  # now the most recent
    read(hybrid, prefix, texts[3])
    assert len(prefix) == 3 and prefix.nbytes <= prefix.budget
    found = [prefix.find(prefix.digests(text), 600) is not None for text in texts]
    assert found == [True, False, True, True]
    prefix.clear()


def test_the_end_of_a_long_prompt_goes_before_its_beginning(model: Callable[[str], LLM]) -> None:
    """Where entries share all they have, dropping the shorter one would give nothing back."""
    engine = model("latent").engine
    page = engine.caches.page_bytes(None)
    prefix = PrefixCache(engine, 4 * page)
    tokens = some_tokens(800)
    read(engine, prefix, tokens)
    read(engine, prefix, some_tokens(600, seed=9))
    assert prefix.nbytes == 4 * page
    assert read(engine, prefix, tokens)[0] == 512
    prefix.clear()
    nothing_is_held(engine)


def test_what_is_larger_than_the_budget_is_not_stored(hybrid: Engine) -> None:
    caches = hybrid.caches
    small = PrefixCache(hybrid, caches.page_bytes(None) + caches.slot_bytes)
    read(hybrid, small, some_tokens(300))
    assert len(small) == 1
    read(hybrid, small, some_tokens(600, seed=1))
    assert len(small) == 1 and small.find(small.digests(some_tokens(300)), 300) is not None
    small.clear()
    none = PrefixCache(hybrid, 0)
    read(hybrid, none, some_tokens(300))
    assert len(none) == 0


@pytest.mark.parametrize("name", ["hybrid", "wide", "latent"])
def test_nothing_is_stored_where_others_were_promised_the_room(name: str, model: Callable[[str], LLM]) -> None:
    engine = model(name).engine
    caches = engine.caches
    prefix = PrefixCache(engine, 1 << 30)
    own = caches.slot_bytes + sum(2 * caches.page_bytes(window) for window in caches.pools if window is not None)
    texts = [some_tokens(512, seed=n) for n in range(2)]
    digests = [prefix.digests(text) for text in texts]
    first, second = engine.open(), engine.open()
    engine.prefill(first, texts[0])
    engine.prefill(second, texts[1])
    admission = Admission(engine, 0, prefix)

    def store(n: int, room: Callable[[], int]) -> bool:
        """Store where so many bytes are neither in use nor promised."""
        sequence = (first, second)[n]

        def fits(emptied: bool) -> bool:
            admission.total = admission.used([]) + room()
            return admission.stores(sequence, [], emptied)

        return prefix.store(digests[n], sequence, fits)

    assert not store(0, lambda: own - 1) and len(prefix) == 0
    assert store(0, lambda: own)
    less = own - prefix.reclaimable - 1
    assert not store(1, lambda: less) and len(prefix) == 1  # the older one alone is no help
    engine.close(first)  # now it is, and goes
    assert store(1, lambda: own - len(prefix)) and len(prefix) == 1
    assert prefix.find(digests[1], 513) is not None
    engine.close(second)
    prefix.clear()
    nothing_is_held(engine)


def test_fixed_caches_count_pages_of_each_window_and_slots(model: Callable[[str], LLM]) -> None:
    old = model("wide").engine
    engine = Engine(old.model, activations=old.activations, max_context=2048, device=FixedHost())
    caches, prefix = engine.caches, PrefixCache(engine, 1 << 30)
    admission = Admission(engine, 1 << 40, prefix)
    (window,) = (window for window in caches.pools if window is not None)
    engine.allocate(2, 1 << 30)
    caches.allocate(2, {None: 6, window: 6})
    first = engine.open()
    text = some_tokens(512)
    engine.prefill(first, text)
    live = len(first.tables[window].live)
    assert live == 2
    for most, fits in ((4, True), (5, False)):  # pages of the window that the request itself was promised
        promises = [(first, {None: 2, window: most})]
        assert admission.stores(first, promises, False) == admission.stores(first, promises, True) == fits
    assert prefix.store(prefix.digests(text), first, lambda emptied: admission.stores(first, [], emptied))
    engine.close(first)
    for pages, helps in (({None: 6, window: 6}, True), ({None: 7, window: 1}, False), ({None: 1, window: 7}, False)):
        assert admission.helps(pages, []) == helps
        with pytest.raises(OutOfMemory, match="^cache: . more pages .* are needed, 4 of 6 are free"):
            admission.open(pages, None, [])
    open_ones = [admission.open({None: 1, window: 1}, None, []) for _ in range(2)]
    assert not admission.helps({None: 1, window: 1}, [])
    for sequence in open_ones:
        engine.close(sequence)
    prefix.clear()
    nothing_is_held(engine)


def test_a_copy_that_has_no_memory_is_not_stored(hybrid: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(array: Any) -> Any:
        raise OutOfMemory("memory: none")

    prefix = PrefixCache(hybrid, 1 << 30)
    monkeypatch.setattr(hybrid.device, "copies", full)
    read(hybrid, prefix, some_tokens(300))
    assert len(prefix) == 0


# -- in a scheduler --------------------------------------------------------------------------------------------------


def test_cached_tokens_are_told(model: Callable[[str], LLM]) -> None:
    llm = model("hybrid")
    with Scheduler(llm) as made:
        prompt = some_tokens(700)
        first = made.submit(made.request(prompt, max_tokens=2)).result(SECONDS)
        second = made.submit(made.request(prompt, max_tokens=2)).result(SECONDS)
        assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 512)
        assert (first.timings.prompt_tokens, second.timings.prompt_tokens) == (700, 188)
        metrics = made.metrics()
        assert (metrics.prompt_tokens, metrics.cached_tokens, metrics.prefix_hits) == (888, 512, 1)
    with Scheduler(llm, prefix_cache=False) as made:
        for _ in range(2):
            done = made.submit(made.request(prompt, max_tokens=2)).result(SECONDS)
            assert done.usage.cached_tokens == 0
        assert made.metrics().prefix_entries == 0


def test_requests_that_come_together_share_what_the_first_computes(model: Callable[[str], LLM]) -> None:
    llm, plain = model("hybrid"), model("hybrid")
    prompt = some_tokens(700)
    talks = [some_tokens(300, seed=9) + some_tokens(220, seed=n) for n in (20, 21, 22)]
    with Scheduler(llm) as made:
        for prompts, cached in (([prompt] * 4, [0, 512, 512, 512]), (talks, [0, 0, 256])):
            with made.condition:  # all of them before the engine looks
                tickets = [made.submit(made.request(one, max_tokens=5)) for one in prompts]
            done = [ticket.result(SECONDS) for ticket in tickets]
            assert [one.usage.cached_tokens for one in done] == cached
            for one, text in zip(done, prompts, strict=True):
                assert one.tokens == plain.generate(text, max_tokens=5).tokens
                assert one.timings.prompt_tokens == len(text) - one.usage.cached_tokens
        metrics = made.metrics()
        assert metrics.prefix_hits == 4 and metrics.cached_tokens == 3 * 512 + 256
    nothing_is_held(llm.engine)


def test_prefixes_go_before_a_request_waits(model: Callable[[str], LLM]) -> None:
    llm = model("hybrid")
    caches = llm.engine.caches
    memory = caches.bytes_of(1024) + caches.bytes_of(512) + caches.slot_bytes
    with Scheduler(llm, memory=memory, prefix_memory=memory) as made:
        for n in range(4):
            made.submit(made.request(some_tokens(500, seed=n), max_tokens=3)).result(SECONDS)
        assert made.metrics().prefix_entries >= 3
        running = made.submit(made.request([5], max_tokens=500, logit_bias=letters()))
        next(running)
        large = made.submit(made.request(some_tokens(500, seed=3), max_tokens=500, stop=["a"], logit_bias=letters()))
        done = large.result(SECONDS)
        assert running.state == "generating"  # it did not have to wait for the other
        assert done.usage.cached_tokens == 256  # the newest was kept, there is room for its state
        metrics = made.metrics()
        assert metrics.prefix_entries < 4 and metrics.memory_used <= memory
    nothing_is_held(llm.engine)


def test_prefixes_stay_if_dropping_them_would_not_help(model: Callable[[str], LLM]) -> None:
    llm = model("hybrid")
    caches = llm.engine.caches
    memory = caches.bytes_of(1024) + caches.bytes_of(512)
    with Scheduler(llm, memory=memory, prefix_memory=memory, buffer=2000) as made:  # a reader who lags is preempted
        made.submit(made.request(some_tokens(300), max_tokens=3)).result(SECONDS)
        running = made.submit(made.request([5], max_tokens=1000, logit_bias=letters()))
        next(running)
        large = made.submit(made.request(some_tokens(500, seed=3), max_tokens=500))
        with pytest.raises(TimeoutError):
            large.result(0.1)
        assert (large.state, made.metrics().prefix_entries) == ("waiting", 1)
        running.cancel()
        assert large.result(SECONDS).tokens


def test_prefixes_go_when_the_machine_is_short_of_memory(
    model: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = model("hybrid")
    caches = llm.engine.caches
    with Scheduler(llm) as made:
        for n in range(6):
            made.submit(made.request(some_tokens(600, seed=n), max_tokens=3)).result(SECONDS)
        assert made.metrics().prefix_entries == 6
        free = len(caches.pools[None].free)
        monkeypatch.setattr(cpu_device, "available_memory", lambda: 0)  # caches cannot grow
        done = made.submit(made.request([5], max_tokens=(free + 2) * PAGE - 1, stop=["a"], logit_bias=letters()))
        assert done.result(SECONDS).tokens
        assert 0 < made.metrics().prefix_entries < 6
    nothing_is_held(llm.engine)
