"""Requests on their way to completions: ends, limits, log probabilities, batches, seeds."""

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.api import LLM, MAX_BATCH
from penstock.backends.cpu import device as cpu_device
from penstock.engine.request import Request, Timings, sampling_params
from penstock.engine.response import in_order_of_arrival
from penstock.engine.scheduler import Scheduler
from penstock.errors import BackendError, DTypeError, InvalidArgument, OutOfMemory
from tests.models.common import SPECIAL, VOCAB, letters, small_config, some_tokens, write_model

LETTERS = letters()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return penstock.load(write_model(tmp_path_factory.mktemp("small"), small_config()), device="cpu", max_context=400)


@pytest.fixture(autouse=True)
def nothing_stays_open(llm: LLM) -> Iterator[None]:
    yield
    caches = llm.engine.caches
    assert len(caches._free_slots) == caches._slots and caches.pools[None].used == 0


def request(llm: LLM, prompt: list[int], max_tokens: int = 5, **options: Any) -> Request:
    return llm.request(prompt, max_tokens, **options)


# -- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 30])
def test_generate_ends_after_max_tokens(count: int, llm: LLM) -> None:
    done = llm.generate([1, 2, 3], max_tokens=count, logit_bias=LETTERS)
    assert (done.finish_reason, len(done.tokens), len(done.text)) == ("length", count, count)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.cached_tokens) == (3, count, 0)


@pytest.mark.parametrize("name", ["<|im_end|>", "<|eos|>"])
def test_generate_ends_at_a_token_that_ends_texts(name: str, llm: LLM) -> None:
    end = SPECIAL.index(name)
    done = llm.generate([5, 6], max_tokens=9, logit_bias={end: 1000.0})
    assert (done.finish_reason, done.tokens, done.text) == ("stop", [end], "")


def test_generate_goes_on_over_other_special_tokens(llm: LLM) -> None:
    done = llm.generate([5], max_tokens=3, logit_bias={0: 1000.0})
    assert (done.finish_reason, done.tokens, done.text) == ("length", [0, 0, 0], "")


def test_generate_ends_at_extra_tokens(llm: LLM) -> None:
    text = llm.generate([5], max_tokens=20, logit_bias=LETTERS)
    third = text.tokens[2]
    done = llm.generate([5], max_tokens=20, logit_bias=LETTERS, extra_eos=[third])
    first = text.tokens.index(third)
    assert (done.finish_reason, done.tokens, done.text) == ("stop", text.tokens[: first + 1], text.text[:first])
    for bad in ([VOCAB], [-1], 5, ["a"], [None]):
        with pytest.raises(InvalidArgument):
            llm.generate([5], extra_eos=bad)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_generate_ends_before_a_stop_string(length: int, llm: LLM) -> None:
    """Over token borders: a token of this tokenizer is one letter."""
    whole = llm.generate([5], max_tokens=40, logit_bias=LETTERS).text
    stop = whole[12 : 12 + length]
    at = whole.index(stop)
    for given in (stop, [stop], ["0123", stop]):
        done = llm.generate([5], max_tokens=40, logit_bias=LETTERS, stop=given)
        assert (done.text, done.finish_reason, len(done.tokens)) == (whole[:at], "stop", at + length)


def test_generate_passes_on_what_only_began_a_stop_string(llm: LLM) -> None:
    whole = llm.generate([5], max_tokens=20, logit_bias=LETTERS).text
    for end in (5, 20):
        done = llm.generate([5], max_tokens=end, logit_bias=LETTERS, stop=whole[end - 3 : end] + "!")
        assert (done.text, done.finish_reason) == (whole[:end], "length")


def test_generate_stops_at_the_last_token_allowed(llm: LLM) -> None:
    whole = llm.generate([5], max_tokens=9, logit_bias=LETTERS).text
    done = llm.generate([5], max_tokens=9, logit_bias=LETTERS, stop=whole[6:9])
    assert (done.text, done.finish_reason) == (whole[: whole.index(whole[6:9])], "stop")


def test_generate_gives_the_bytes_that_never_became_a_character(llm: LLM) -> None:
    """The first byte of a two-byte character, then the limit."""
    first = llm.tokenizer.encode("é")[0]
    done = llm.generate([5], max_tokens=1, logit_bias={first: 1000.0})
    assert done.text == "\ufffd"


def test_stream_never_splits_a_character(llm: LLM) -> None:
    pieces = [c.text for c in llm.stream(some_tokens(30), max_tokens=200, temperature=2.0, seed=1)]
    tokens = [c.token for c in llm.stream(some_tokens(30), max_tokens=200, temperature=2.0, seed=1)]
    ended = tokens[-1] in llm.tokenizer.eos_ids
    assert "".join(pieces) == llm.tokenizer.decode(tokens[:-1] if ended else tokens)


# -- the context -----------------------------------------------------------------------------------------------------


def test_generate_ends_where_the_context_ends(llm: LLM) -> None:
    done = llm.generate(some_tokens(395), max_tokens=100, logit_bias=LETTERS)
    assert (done.finish_reason, len(done.tokens)) == ("length", 5)
    done = llm.generate(some_tokens(399), max_tokens=100, logit_bias=LETTERS)
    assert (done.finish_reason, len(done.tokens)) == ("length", 1)


@pytest.mark.parametrize("length", [400, 401, 5000])
def test_generate_refuses_a_prompt_without_room_for_an_answer(length: int, llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match=rf"^prompt has {length} tokens, expected fewer than 400 \(max_context\)"):
        llm.generate(some_tokens(length), max_tokens=1)


def test_generate_refuses_a_batch_before_it_starts(llm: LLM) -> None:
    computed = llm.stats().prompt_tokens
    with pytest.raises(InvalidArgument, match="^prompt has 400 tokens"):
        llm.generate([[1], some_tokens(400)])
    assert llm.stats().prompt_tokens == computed


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "3", None, float("nan"), [5]])
def test_generate_names_bad_max_tokens(value: Any, llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="^max_tokens is .* expected an integer of at least 1$"):
        llm.generate([1], max_tokens=value)


def test_generate_takes_any_integer_for_max_tokens(llm: LLM) -> None:
    assert len(llm.generate([1], max_tokens=np.int64(2)).tokens) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [[1], []]])
def test_generate_needs_a_prompt(prompt: Any, llm: LLM) -> None:
    if not len(prompt) and not isinstance(prompt, str):
        assert llm.generate(prompt) == []  # no prompts, no completions
        return
    with pytest.raises(InvalidArgument, match="^prompt has no tokens, expected at least one"):
        llm.generate(prompt)


@pytest.mark.parametrize(
    "prompt", [[VOCAB], [-1], [1.5], [2**70], [True], [1, "a"], [None], [[1], [VOCAB]], np.ones((2, 2), int)]
)
def test_generate_refuses_what_is_no_token(prompt: Any, llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="^tokens: "):
        llm.generate(prompt)


@pytest.mark.parametrize("prompt", [None, 5, 1.5, {1: 2}, {1}, iter([1])])
def test_generate_refuses_what_is_no_prompt(prompt: Any, llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="^prompt is a .*, expected text, token ids or a list of prompts"):
        llm.generate(prompt)


@pytest.mark.parametrize("options", [
    {"temperature": -1}, {"temperature": "hot"}, {"top_p": 2}, {"top_k": -2}, {"min_p": 1.5}, {"seed": -1},
    {"seed": 2**64}, {"logprobs": 21}, {"logprobs": -1}, {"repetition_penalty": 0}, {"frequency_penalty": float("nan")},
    {"logit_bias": {VOCAB: 1}}, {"logit_bias": {1: float("nan")}}, {"logit_bias": [1]}, {"stop": [""]}, {"stop": 5},
    {"stop": ["a"] * 65}, {"best_of": 3},
], ids=str)  # fmt: skip
def test_generate_names_a_bad_option(options: dict[str, Any], llm: LLM) -> None:
    (name,) = options
    with pytest.raises(InvalidArgument, match=name):
        llm.generate([1], **options)
    with pytest.raises(InvalidArgument, match=name):
        llm.stream([1], **options)  # checked at once, not at the first chunk


@pytest.mark.parametrize("options, kind, words", [
    ({"grammar": "root ::= 'a'"}, InvalidArgument, "grammar is \"root"),
    ({"grammar": {}}, InvalidArgument, "grammar is {}"),
    ({"shown": 5}, DTypeError, "shown is 5"),
    ({"shown": [None]}, DTypeError, r"shown is \[None\]"),
    ({"shown": "<a>"}, DTypeError, "shown is '<a>'"),
])  # fmt: skip
def test_generate_refuses_what_is_no_grammar_and_no_special_token(
    options: dict[str, Any], kind: type[Exception], words: str, llm: LLM
) -> None:
    with pytest.raises(kind, match=f"^generate: {words}.*, expected"):
        llm.generate([1], **options)


def test_sampling_params_keeps_the_kind_of_error() -> None:
    with pytest.raises(DTypeError, match="^temperature is 'hot', expected a number"):
        sampling_params({"temperature": "hot"})
    with pytest.raises(InvalidArgument, match="^generate: best_of is no option, expected one of temperature, top_p"):
        sampling_params({"best_of": 2})


# -- log probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_logits(llm: LLM) -> None:
    prompt = some_tokens(10)
    done = llm.generate(prompt, max_tokens=4, logprobs=3)
    rows = llm.logits([*prompt, *done.tokens])[9:-1].astype(np.float64)
    want = (
        rows
        - np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
        - rows.max(axis=1, keepdims=True)
    )
    assert done.logprobs is not None and done.top_logprobs is not None
    np.testing.assert_allclose(done.logprobs, want[np.arange(4), done.tokens], atol=1e-5)
    for row, top in zip(want, done.top_logprobs, strict=True):
        assert [token for token, _ in top] == np.argsort(-row)[:3].tolist()


def test_logprobs_are_left_out_unless_asked_for(llm: LLM) -> None:
    done = llm.generate([1], max_tokens=2)
    assert done.logprobs is None and done.top_logprobs is None
    done = llm.generate([1], max_tokens=2, logprobs=0)
    assert done.logprobs is not None and len(done.logprobs) == 2 and done.top_logprobs == [(), ()]


# -- together --------------------------------------------------------------------------------------------------------

PROMPTS = [some_tokens(length, seed=length) for length in (3, 256, 1, 300, 20, 255, 257, 9)]


def test_generate_of_a_list_is_that_of_each_alone(llm: LLM) -> None:
    together = llm.generate(PROMPTS, max_tokens=12)
    for prompt, got in zip(PROMPTS, together, strict=True):
        want = llm.generate(prompt, max_tokens=12)
        assert (got.tokens, got.text, got.finish_reason, got.usage) == (
            want.tokens, want.text, want.finish_reason, want.usage,
        )  # fmt: skip


def test_generate_of_a_list_with_different_ends(llm: LLM) -> None:
    """One ends at once, others go on without it."""
    whole = llm.generate(PROMPTS, max_tokens=30, logit_bias=LETTERS)
    stop = whole[0].text[3:5]
    for got, want in zip(llm.generate(PROMPTS, max_tokens=30, logit_bias=LETTERS, stop=stop), whole, strict=True):
        at = want.text.find(stop)
        assert got.text == (want.text if at < 0 else want.text[:at])


def test_generate_with_a_seed_is_the_same_alone_and_together(llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 1.2, "top_p": 0.9, "seed": 5, "max_tokens": 10}
    together = llm.generate(PROMPTS[:3], **options)
    assert [done.tokens for done in together] == [llm.generate(prompt, **options).tokens for prompt in PROMPTS[:3]]
    assert together[0].seed == 5
    other = llm.generate(PROMPTS[:3], **dict(options, seed=6))
    assert [done.tokens for done in other] != [done.tokens for done in together]


def test_generate_tells_the_seed_it_drew(llm: LLM) -> None:
    first = llm.generate([1, 2], max_tokens=8, temperature=1.5)
    assert first.seed is not None
    assert llm.generate([1, 2], max_tokens=8, temperature=1.5, seed=first.seed).tokens == first.tokens


def test_run_takes_turns_when_there_are_more_requests_than_rows(llm: LLM) -> None:
    prompts = [[n + 4] for n in range(7)]
    want = [llm.generate(prompt, max_tokens=n + 1).tokens for n, prompt in enumerate(prompts)]
    most = 0
    with Scheduler(llm, max_sequences=3, prefix_cache=False) as made:
        handles = [made.submit(request(llm, prompt, n + 1)) for n, prompt in enumerate(prompts)]
        for _ in in_order_of_arrival(handles):
            most = max(most, llm.engine.caches.slots_used)
    assert [handle.tokens for handle in handles] == want and most == 3
    assert MAX_BATCH >= 8


def test_run_yields_as_tokens_come(llm: LLM) -> None:
    requests = [request(llm, [5], 3, logit_bias=LETTERS), request(llm, [6], 2, logit_bias=LETTERS)]
    handles = [llm.scheduler.submit(one) for one in requests]
    order = [(number, chunk.finish_reason) for number, chunk in in_order_of_arrival(handles)]
    assert order == [(0, None), (1, None), (0, None), (1, "length"), (0, "length")]


def test_run_closes_its_sequences_when_the_reader_stops(llm: LLM) -> None:
    handles = [llm.scheduler.submit(request(llm, [n], 9)) for n in (5, 6)]
    for handle in handles:
        next(handle)
        assert llm.engine.caches.slots_used > 0
    for handle in handles:
        handle.cancel()


def test_requests_wait_for_each_other_when_memory_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want, other = llm.generate([1], max_tokens=2), penstock.load(device="cpu")
    monkeypatch.setattr(cpu_device, "available_memory", lambda: 0)
    assert [done.tokens for done in llm.generate([[1]] * 64, max_tokens=2)] == [want.tokens] * 64
    with pytest.raises(OutOfMemory, match="^request: 309 positions"):
        other.generate([1] * 300, max_tokens=9)


def test_generate_names_scores_that_are_not_finite(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.device, "to_host", lambda array: np.full(array.shape, np.nan, np.float32))
    with pytest.raises(BackendError, match="^sample: the model produced non-finite logits at position 1: NaN for 263"):
        llm.generate([1], max_tokens=3)


def test_generate_in_two_threads_gives_the_same_texts(llm: LLM) -> None:
    want = [llm.generate(prompt, max_tokens=12).tokens for prompt in PROMPTS[:4]]
    got: dict[int, list[int]] = {}

    def work(n: int) -> None:
        got[n] = llm.generate(PROMPTS[n], max_tokens=12).tokens

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[n] for n in range(4)] == want


def test_two_models_in_two_threads(llm: LLM, tmp_path) -> None:
    """Kernels of one process run one at a time, whoever calls them."""
    other = penstock.load(write_model(tmp_path, small_config(num_experts=5)))
    pair = [(llm, PROMPTS[0]), (other, PROMPTS[1])]
    want = [model.generate(prompt, max_tokens=20).tokens for model, prompt in pair]
    got: dict[int, list[int]] = {}

    def work(n: int) -> None:
        for _ in range(3):
            got[n] = pair[n][0].generate(pair[n][1], max_tokens=20).tokens

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[0], got[1]] == want


# -- chunks and timings ----------------------------------------------------------------------------------------------


def test_stream_is_generate_in_pieces(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 25, "logit_bias": LETTERS, "logprobs": 1}
    whole = llm.generate([7, 8], **options)
    chunks = list(llm.stream([7, 8], **options))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.token for chunk in chunks] == whole.tokens
    assert [chunk.logprob for chunk in chunks] == whole.logprobs
    assert [chunk.finish_reason for chunk in chunks] == [None] * 24 + ["length"]


def test_stream_computes_the_prompt_with_the_first_chunk(llm: LLM) -> None:
    pieces: list[int] = []
    chunks = llm.stream(some_tokens(300), max_tokens=2, progress=pieces.append)
    assert pieces == []
    next(chunks)
    assert pieces == [256, 44]
    list(chunks)


def test_timings_count_tokens_and_seconds(llm: LLM) -> None:
    done = llm.generate(some_tokens(50), max_tokens=10, logit_bias=LETTERS)
    timings = done.timings
    assert (timings.prompt_tokens, timings.generated_tokens) == (50, 10)
    assert timings.prompt_tps == 50 / timings.prompt_seconds > 0
    assert timings.generation_tps == 9 / timings.generation_seconds > 0
    assert (Timings().prompt_tps, Timings().generation_tps) == (0, 0)


def test_completion_of_a_request_that_was_cut_off(llm: LLM) -> None:
    one = request(llm, [5], 9, logit_bias=LETTERS)
    handle = llm.scheduler.submit(one)
    next(handle)
    assert handle.completion().finish_reason == "length"
    handle.cancel()
    done = handle.completion()
    assert (len(done.tokens), done.finish_reason, done.usage.completion_tokens) == (1, "cancelled", 1)


def test_a_model_goes_when_nothing_holds_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a request that failed, whose error holds the frames of its reader."""
    model = penstock.load(write_model(tmp_path, small_config()), device="cpu", max_context=400)
    list(model.stream([5], max_tokens=3))
    next(model.stream([5], max_tokens=30))
    with model.session() as session:
        session.generate([5], max_tokens=2)
    with monkeypatch.context() as patch:
        patch.setattr(model.engine, "step", lambda runs: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            model.generate([5], max_tokens=3)
    engine = weakref.ref(model.engine)
    del model, session
    gc.collect()
    assert engine() is None
