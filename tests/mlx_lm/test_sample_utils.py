"""Samplers and processors by hand, against mlx-lm's own, and which of them the engine's options stand for."""

import math

import numpy as np
import pytest

from penstock import ops
from penstock.errors import InvalidArgument
from penstock.mlx_lm import make_logits_processors, make_sampler, sample_utils
from penstock.mlx_lm.sample_utils import CategoricalSampler, greedy_sampler, sampling_plan

PROBABILITIES = np.array([[0.05, 0.4, 0.3, 0.2, 0.05]], np.float32)
LOGPROBS = np.log(PROBABILITIES)


def kept(logprobs: np.ndarray) -> list[int]:
    return np.flatnonzero(np.isfinite(logprobs[0])).tolist()


def test_cuts_by_hand():
    assert kept(sample_utils.apply_top_p(LOGPROBS, 0.4)) == [1]
    assert kept(sample_utils.apply_top_p(LOGPROBS, 0.41)) == [1, 2]
    assert kept(sample_utils.apply_top_p(LOGPROBS, 0.91)) == [0, 1, 2, 3, 4]  # of equal ones all or none
    assert kept(sample_utils.apply_min_p(LOGPROBS, 0.5)) == [1, 2, 3]
    assert kept(sample_utils.apply_min_p(LOGPROBS, 0.9, 3)) == [1, 2, 3]
    assert kept(sample_utils.apply_top_k(LOGPROBS, 4)) == [0, 1, 2, 3]
    assert kept(sample_utils.apply_xtc(LOGPROBS, 1.0, 0.15)) == [0, 3, 4]
    assert kept(sample_utils.apply_xtc(LOGPROBS, 1.0, 0.15, [2])) == [0, 2, 3, 4]
    assert kept(sample_utils.apply_xtc(LOGPROBS, 0.0, 0.15)) == [0, 1, 2, 3, 4]


def test_penalties_by_hand():
    logits = np.array([[2.0, -2.0, 1.0, 0.0]], np.float32)
    tokens = np.array([3, 0, 1, 1])

    def after(**options):
        x, before = logits, logits.copy()
        for processor in make_logits_processors(**options):
            x = processor(tokens, x)
        np.testing.assert_array_equal(logits, before)
        return x.tolist()[0]

    assert after(repetition_penalty=2.0) == [1.0, -4.0, 1.0, 0.0]
    assert after(repetition_penalty=2.0, repetition_context_size=2) == [2.0, -4.0, 1.0, 0.0]
    assert after(presence_penalty=0.5, presence_context_size=3) == [1.5, -2.5, 1.0, 0.0]
    assert after(frequency_penalty=0.5) == [1.5, -3.0, 1.0, -0.5]
    assert after(logit_bias={2: 7.0}, frequency_penalty=1.0, frequency_context_size=1) == [2.0, -3.0, 8.0, 0.0]
    assert make_logits_processors() == [] and make_logits_processors(repetition_penalty=0.0) == []


def test_a_sampler_draws_by_the_probabilities():
    sampler = make_sampler(temp=1.0, min_p=0.5, seed=4)
    drawn = [int(sampler(LOGPROBS)[0]) for _ in range(400)]
    shares = np.bincount(drawn, minlength=5) / 400
    assert set(drawn) == {1, 2, 3} and abs(shares[1] - 0.4 / 0.9) < 0.08
    assert make_sampler(temp=1.0, seed=4)(np.repeat(LOGPROBS, 3, axis=0)).shape == (3,)
    assert make_sampler() is greedy_sampler and greedy_sampler(LOGPROBS).tolist() == [1]


@pytest.mark.parametrize(
    "options",
    [
        {"temp": 0.6, "min_p": 0.3},
        {"temp": 1.7, "min_p": 0.02, "top_k": 9},
        {"temp": 1.0, "top_p": 0.7},
        {"temp": 1.0, "top_p": 0.9, "min_p": 0.1},
        {"temp": 2.5, "top_k": 3},
        {"temp": 0.5},
    ],
    ids=str,
)
def test_engine_options_draw_from_the_same_ids_with_the_same_weights(options, rng):
    """The op draws what remains of mlx-lm's cuts, for every seed: the cut logits without any option say which ids."""
    sampler = make_sampler(**options)
    assert isinstance(sampler, CategoricalSampler)
    found = sampler.engine_options()
    assert found is not None
    logits = rng.standard_normal((64, 50)).astype(np.float32) * 3
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ones, seeds = np.ones(64), np.arange(64)
    positions = np.full(64, 7, np.int32)

    def drawn(x, top_k=0, top_p=1.0, min_p=0.0, temperature=1.0):
        top = np.full(64, top_k, np.int32)
        more = (ones * temperature, top, ones * top_p, ones * min_p, seeds)
        with ops.backend("reference"):
            return ops.sample_tokens(x, positions, *more).tolist()

    want = drawn(sampler.cut(logprobs, np.random.default_rng(0)), temperature=options["temp"])
    assert drawn(logprobs, **found) == want and len(set(want)) > 9


def test_what_the_engine_has_no_option_for_runs_on_the_host():
    for options in (
        {"temp": 0.7, "top_p": 0.9},
        {"temp": 1.0, "top_p": 0.9, "top_k": 5},
        {"temp": 1.0, "min_p": 0.1, "min_tokens_to_keep": 2},
        {"temp": 1.0, "xtc_probability": 0.5},
    ):
        plan = sampling_plan(make_sampler(**options), None, prompt=5, vocab_size=50)
        assert plan.cut is not None and plan.options["temperature"] == options["temp"]
    both = make_logits_processors({3: 1.0}, repetition_penalty=1.2)
    plan = sampling_plan(None, both, prompt=5, vocab_size=50)
    assert not plan.processors and plan.edits == tuple(both)
    assert plan.options["repetition_context"] == 20 and plan.options["logit_bias"] == {3: 1.0}
    assert sampling_plan(None, both[::-1], prompt=5, vocab_size=50).processors == tuple(both[::-1])  # another order
    assert sampling_plan(None, both, prompt=5, held=9, vocab_size=50).processors  # 20 tokens reach into the cache
    assert not sampling_plan(None, both, prompt=20, held=9, vocab_size=50).processors
    assert sampling_plan(None, make_logits_processors(presence_penalty=1.0), prompt=5, vocab_size=50).processors
    assert sampling_plan(None, [*both, lambda tokens, logits: logits], prompt=5, vocab_size=50).processors
    own = sampling_plan(lambda logprobs: [0], both, prompt=5, vocab_size=50)
    assert own.sampler is not None and own.processors == tuple(both) and own.options["temperature"] == 0


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: make_sampler(temp=-1), "temp -1"),
        (lambda: make_sampler(temp=math.nan), "temp is nan, expected a number"),
        (lambda: make_sampler(temp=1, min_p=2), "min_p 2"),
        (lambda: make_sampler(temp=1, min_tokens_to_keep=0), "min_tokens_to_keep is 0"),
        (lambda: make_sampler(temp=1, xtc_probability=0.5, xtc_threshold=0.9), "xtc_threshold 0.9"),
        (lambda: make_logits_processors(repetition_penalty=-1.0), "penalty is -1.0"),
        (lambda: make_logits_processors(presence_penalty=1.0, presence_context_size=None), "context_size is None"),
        (lambda: make_logits_processors({"a": 1.0}), "logit_bias: a token id is 'a'"),  # type: ignore[dict-item]
        (lambda: sampling_plan(make_sampler(1.0, top_k=50), None, prompt=1, vocab_size=50), "top_k is 50"),
        (lambda: sampling_plan("greedy", None, prompt=1, vocab_size=50), "sampler is a str"),  # type: ignore[arg-type]
        (lambda: sampling_plan(None, max, prompt=1, vocab_size=50), "logits_processors is a "),  # type: ignore[arg-type]
        (lambda: sampling_plan(None, [1], prompt=1, vocab_size=50), r"logits_processors\[0\] is a int"),  # type: ignore[list-item]
    ],
)
def test_bad_settings_are_named(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()


@pytest.mark.slow
def test_cuts_and_penalties_are_those_of_mlx_lm(rng):
    mx = pytest.importorskip("mlx.core")
    theirs = pytest.importorskip("mlx_lm.sample_utils")
    logits = rng.standard_normal((2, 40)).astype(np.float32) * 2
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for name, *arguments in (
        ("apply_top_p", 0.8),
        ("apply_min_p", 0.2),
        ("apply_min_p", 0.9, 4),
        ("apply_top_k", 7),
        ("apply_xtc", 1.0, 0.05, [3, 5]),
    ):
        want = np.array(getattr(theirs, name)(mx.array(logprobs), *arguments))
        np.testing.assert_array_equal(getattr(sample_utils, name)(logprobs, *arguments), want, name)
    tokens = rng.integers(0, 40, 33)
    for options in (
        {"repetition_penalty": 1.7},
        {"presence_penalty": 0.3, "frequency_penalty": 0.7, "frequency_context_size": 0},
        {"logit_bias": {4: 2.5, 0: -1.0}, "repetition_penalty": 0.5, "repetition_context_size": 5},
    ):
        got, want = logits[:1], mx.array(logits[:1])
        for own, other in zip(make_logits_processors(**options), theirs.make_logits_processors(**options), strict=True):
            got, want = own(tokens, got), other(mx.array(tokens), want)
        np.testing.assert_allclose(got, np.array(want), rtol=1e-6)


@pytest.mark.parametrize("top_k", [0, -1])
def test_make_sampler_takes_both_spellings_of_no_top_k(top_k):
    assert make_sampler(0.7, top_k=top_k).engine_options() == {"temperature": 0.7, "top_k": 0}
    with pytest.raises(InvalidArgument, match="^make_sampler: top_k is -2, expected 0 or -1"):
        make_sampler(0.7, top_k=-2)
