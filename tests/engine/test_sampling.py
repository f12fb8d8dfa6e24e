"""Sampling: known answers of Philox, a plain second implementation, statistics, penalties by hand, and refusals."""

import functools
import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import ops
from penstock.engine.sampling import Sampler, SamplingParams, mode_of
from penstock.errors import BackendError, DTypeError, InvalidArgument, PenstockError, ShapeError
from penstock.ops.sampling import philox4x32, split_mode

ONES = 0xFFFFFFFF


def f32(*values):
    return np.array(values, np.float32)


def choose(logits, position=0, prompt=(), **params):
    return Sampler(SamplingParams(**params), len(logits), prompt).sample(logits, position)


def plain_choice(logits, position, *, temperature, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    """The rules of `ops.sample_tokens` with Python numbers and a full sort: the kept ids and the token."""
    x = [float(v) for v in logits]
    highest = max(x)
    ranked = sorted(range(len(x)), key=lambda i: (-x[i], i))
    kept = ranked[: top_k or None]
    w = {i: math.exp((x[i] - highest) / temperature) for i in kept}
    if top_p < 1:
        total, running, n = math.fsum(w.values()), 0.0, 0
        for i in kept:
            running, n = running + w[i], n + 1
            if running >= top_p * total:
                break
        kept = kept[:n]
    kept = sorted(i for i in kept if w[i] >= min_p)
    sums = {i: (x[i] - highest) / temperature + noise(seed, position, i) for i in kept}
    return kept, max(kept, key=lambda i: (sums[i], -i))


def noise(seed, position, i):
    """Gumbel noise of one id, with Python's numbers."""
    word = words_of(position, i // 4, seed)[i % 4]
    return -math.log(-math.log((word + 0.5) / 2**32))


@functools.lru_cache(1)  # four ids share them
def words_of(position, i, seed):
    return philox4x32((position, i, 0, 0), (seed & ONES, seed >> 32))


# random numbers


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox4x32_gives_the_published_words(counter, key, words):
    assert philox4x32(counter, key) == words


# greedy


def test_sample_greedy_takes_the_lowest_id_of_equal_ones():
    assert choose(f32(1, 5, -2, 5, 5)).token == 1
    assert choose(f32(-7)).token == 0
    assert choose(f32(-np.inf, -np.inf, -3)).token == 2


def test_sample_leaves_the_logits_alone():
    logits = f32(1, 2, 3)
    choose(logits, prompt=[2], repetition_penalty=2.0, logit_bias={0: 1.5}, temperature=0.7, logprobs=2)
    np.testing.assert_array_equal(logits, f32(1, 2, 3))
    logits.flags.writeable = False
    assert choose(logits, temperature=1e-9).token == 2


# drawing

LOGITS = st.lists(
    st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, 1.0, -np.inf])), min_size=1, max_size=40
).filter(lambda values: max(values) > -np.inf)


@settings(max_examples=300)
@given(
    LOGITS,
    st.floats(0.05, 50),
    st.integers(-1, 45),
    st.floats(0, 1),
    st.one_of(st.just(0.0), st.floats(0, 1)),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31 - 1),
)
def test_sample_agrees_with_plain_python(values, temperature, top_k, top_p, min_p, seed, position):
    logits = f32(*values)
    got = choose(logits, position, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed).token
    kept, token = plain_choice(
        logits, position, temperature=temperature, top_k=max(top_k, 0), top_p=top_p, min_p=min_p, seed=seed
    )
    assert got in kept
    assert got == token


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0], ids=str)
@pytest.mark.parametrize(
    "rules",
    [{}, {"top_k": 40}, {"top_k": 3000}, {"top_p": 0.9}, {"top_p": 0.5, "top_k": 1000}, {"min_p": 0.05}],
    ids=str,
)
def test_sample_agrees_with_plain_python_on_a_large_vocabulary(spread, rules, rng):
    V = 20_003
    logits = (rng.standard_normal(V) * spread).astype(np.float32)
    logits[rng.integers(0, V, 3000)] = logits[17]  # ties
    sampler = Sampler(SamplingParams(temperature=0.8, seed=5, **rules), V)
    for position in range(3):
        _, token = plain_choice(logits, position, temperature=0.8, seed=5, **rules)
        assert sampler.sample(logits, position).token == token


def chi_square(counts, probabilities):
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "rules, kept",
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_p": 0.8}, [1, 3, 4]),
        ({"min_p": 0.5}, [1, 3]),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.01, "temperature": 2.0}, [1, 3, 4, 5]),
    ],
    ids=str,
)
def test_sample_draws_as_often_as_the_probabilities_say(rules, kept):
    logits = np.log(f32(0.04, 0.4, 0.02, 0.3, 0.14, 0.1))
    params = SamplingParams(**{"temperature": 1.0, "seed": 11, **rules})
    sampler = Sampler(params, 6)
    counts = np.bincount([sampler.sample(logits, position).token for position in range(4000)], minlength=6)
    weights = np.exp(logits[kept] / params.temperature)
    assert counts.sum() == counts[kept].sum()
    # 99.9 % of right samplers stay below 20.5 with 5 degrees of freedom, and below that with fewer
    assert chi_square(counts[kept], weights / weights.sum()) < 20.5


def test_sample_depends_on_seed_and_position_alone():
    logits = np.zeros(1000, np.float32)
    first = Sampler(SamplingParams(temperature=1, seed=3), 1000)
    tokens = [first.sample(logits, position).token for position in range(20)]
    assert len(set(tokens)) > 15
    again = Sampler(SamplingParams(temperature=1, seed=3), 1000, [1, 2, 3])
    assert [again.sample(logits, position).token for position in reversed(range(20))] == tokens[::-1]
    other = Sampler(SamplingParams(temperature=1, seed=4), 1000)
    assert [other.sample(logits, position).token for position in range(20)] != tokens


def test_sampler_draws_a_seed_that_can_be_used_again():
    logits = np.zeros(10_000, np.float32)
    samplers = [Sampler(SamplingParams(temperature=1), 10_000) for _ in range(2)]
    assert samplers[0].seed != samplers[1].seed
    tokens = [samplers[0].sample(logits, position).token for position in range(5)]
    again = Sampler(SamplingParams(temperature=1, seed=samplers[0].seed), 10_000)
    assert [again.sample(logits, position).token for position in range(5)] == tokens


@pytest.mark.parametrize("rules", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 5e-324}], ids=str)
def test_sample_keeps_at_least_the_highest(rules):
    logits = f32(1, 4, 3.99, -2)
    for position in range(30):
        assert choose(logits, position, **{"temperature": 3.0, "seed": 1, **rules}).token == 1


def test_sample_never_draws_a_token_of_probability_zero():
    logits = f32(-np.inf, 0, -np.inf, -3e38, -np.inf)
    for position in range(50):
        assert choose(logits, position, temperature=1.0, top_p=0.999, top_k=4, seed=2).token == 1


# penalties and bias


def test_logit_bias_is_added_before_anything_else():
    assert choose(f32(1, 2, 3), logit_bias={0: 5, 2: -1}).token == 0
    assert choose(f32(1, 2, 3), logit_bias={1: -1e30, 2: -1e30}, temperature=1.0, seed=0).token == 0
    assert choose(f32(1, 2, 3), logit_bias={}).token == 2


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once():
    logits = f32(3.0, -1.0, 2.0, -1.0, 0.5)
    got = choose(logits, prompt=[0, 0, 1, 4], repetition_penalty=2.0, logprobs=5)
    x = np.array([1.5, -2.0, 2.0, -1.0, 0.25])
    want = x - np.log(np.exp(x).sum())
    assert got.token == 2
    np.testing.assert_allclose([p for _, p in sorted(got.top)], want, atol=1e-6)


def test_repetition_penalty_counts_generated_tokens():
    sampler = Sampler(SamplingParams(repetition_penalty=1.5), 3)
    assert [sampler.sample(f32(3, 2.5, 2.2), n).token for n in range(4)] == [0, 1, 2, 0]


def test_repetition_context_forgets_older_tokens():
    sampler = Sampler(SamplingParams(repetition_penalty=10, repetition_context=2), 4, [3, 3, 3])
    assert [sampler.sample(f32(4, 3, 2, 5), n).token for n in range(5)] == [0, 1, 3, 0, 1]


def test_presence_and_frequency_penalty_count_generated_tokens_only():
    logits = f32(1.0, 0.9, 0.0)
    sampler = Sampler(SamplingParams(presence_penalty=0.25, frequency_penalty=0.5, logprobs=3), 3, [0, 0, 0])
    got = [sampler.sample(logits, n) for n in range(4)]
    assert [g.token for g in got] == [0, 1, 0, 1]
    x = np.array([1.0 - 0.25 - 2 * 0.5, 0.9 - 0.25 - 0.5, 0.0])
    np.testing.assert_allclose([p for _, p in sorted(got[3].top)], x - np.log(np.exp(x).sum()), atol=1e-6)


def test_penalties_follow_more_tokens_than_the_first_arrays_hold():
    V = 300
    logits = np.linspace(1, 0, V, dtype=np.float32)
    sampler = Sampler(SamplingParams(presence_penalty=10.0), V)
    assert [sampler.sample(logits, n).token for n in range(V)] == list(range(V))


def test_record_counts_a_token_chosen_elsewhere():
    sampler = Sampler(SamplingParams(presence_penalty=10.0), 3)
    sampler.record(2)
    assert sampler.sample(f32(0, 1, 2), 1).token == 1


def test_sample_keeps_to_the_mask_of_a_grammar(rng):
    logits = rng.standard_normal(70).astype(np.float32)
    logits[[3, 65]] = 20, 30
    words = np.array([0b10010000, 0, 0b10], np.uint32)
    sampler = Sampler(SamplingParams(temperature=0.0, logprobs=5, logit_bias={7: 1.0}), 70)
    got = sampler.sample(logits, 0, words)
    x = logits[[4, 7, 65]] + np.array([0, 1, 0])
    assert got.token == 65 and sorted(i for i, _ in got.top) == [4, 7, 65]
    np.testing.assert_allclose([p for _, p in sorted(got.top)], x - np.log(np.exp(x).sum()), atol=1e-6)
    assert {i for i, _ in sampler.sample(logits, 0, words[:2]).top} == {4, 7}  # no bit, not allowed
    assert sampler.sample(logits, 0, np.append(words, words)).token == 65


def test_edits_are_what_a_device_applies(rng):
    V, prompt = 90, [5, 6, 6, 7]
    params = SamplingParams(
        temperature=0.7, top_k=30, seed=2**63 + 5, repetition_penalty=1.3, repetition_context=5, presence_penalty=0.4,
        frequency_penalty=0.1, logit_bias={3: 2.0, 80: -1.5},
    )  # fmt: skip
    sampler = Sampler(params, V, prompt)
    assert sampler.row["edits"] is sampler.edits
    for position in range(4, 30):
        logits = (2 * rng.standard_normal(V)).astype(np.float32)
        edits = sampler.edits
        row = {name: np.array([value]) for name, value in sampler.row.items() if name != "edits"}
        row["top_k"] = row["top_k"].astype(np.int32)
        first = np.zeros(1, np.int32)
        tables = {"counts": edits.counts[None], "bias": edits.bias[None], "penalties": edits.penalties[None]}
        with penstock.backend("reference"):
            want = ops.sample_tokens(
                logits[None], np.array([position], np.int32), **row, mode=sampler.mode, slots=first, **tables
            )
        edits.stale = False  # as if a device had just been given them
        got = sampler.sample(logits, position).token
        assert got == want[0] and edits.stale
        prompt.append(got)
        assert set(np.flatnonzero(edits.counts & 1)) == set(prompt[-5:])
        np.testing.assert_array_equal(edits.counts >> 1, np.bincount(prompt[4:], minlength=V))
    assert len(edits.forgotten) > 10 and not edits.counts[edits.forgotten[-1]] & 1


# log probabilities


def test_logprobs_are_those_of_temperature_one_before_truncation(rng):
    logits = rng.standard_normal(700).astype(np.float32)
    got = choose(logits, temperature=0.3, top_k=5, seed=4, logprobs=20)
    want = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    order = np.lexsort((np.arange(700), -logits))[:20]
    assert [i for i, _ in got.top] == order.tolist()
    np.testing.assert_allclose([p for _, p in got.top], want[order], atol=1e-12)
    np.testing.assert_allclose(got.logprob, want[got.token], atol=1e-12)


def test_logprobs_order_equal_ones_by_id_and_leave_out_the_impossible():
    got = choose(f32(0, 2, 0, 2, -np.inf), logprobs=5)
    assert [i for i, _ in got.top] == [1, 3, 0, 2]
    assert choose(f32(1, 1), logprobs=20).top == ((0, -math.log(2)), (1, -math.log(2)))


@pytest.mark.parametrize("asked, kept, top", [(None, None, None), (False, None, None), (0, 0, ()), (True, 0, ())])
def test_logprobs_none_zero_and_bool(asked, kept, top):
    assert SamplingParams(logprobs=asked).logprobs == kept
    got = choose(f32(0, 0), logprobs=asked)
    assert got.top == top
    assert got.logprob is None if kept is None else math.isclose(got.logprob, -math.log(2))


# refusals


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "values, found",
    [
        ([1, np.nan, 3], "NaN for 1 of 3 tokens, the first is 1"),
        ([np.nan, np.inf], "NaN for 1 of 2"),
        ([1, np.inf, np.inf], r"\+inf for 2 of 3 tokens, the first is 1"),
        ([-np.inf, -np.inf], "-inf for all 2 tokens"),
    ],
)
def test_sample_refuses_non_finite_logits(values, found, temperature):
    with pytest.raises(BackendError, match=f"^sample: the model produced non-finite logits at position 9: {found}"):
        choose(f32(*values), 9, temperature=temperature)


@pytest.mark.parametrize(
    "logits, error, message",
    [
        (np.zeros(4, np.float32), ShapeError, r"^sample: logits has shape \(4,\), expected \(3,\)"),
        (np.zeros((1, 3), np.float32), ShapeError, "^sample: logits has shape"),
        (np.zeros(3), DTypeError, "^sample: logits is float64, expected a float32 array"),
        ([0.0, 0.0, 0.0], DTypeError, "^sample: logits is list"),
    ],
)
def test_sample_refuses_other_arrays(logits, error, message):
    with pytest.raises(error, match=message):
        Sampler(SamplingParams(), 3).sample(logits, 0)


BAD = {
    "temperature": [-1, math.nan, math.inf, "1", True, None, 1j, 10**400],
    "top_p": [-0.1, 1.01, 2, math.nan, False, "x"],
    "top_k": [-2, 1.5, True, "3", None],
    "min_p": [-1e-9, 1.1, math.nan, True],
    "seed": [-1, 2**64, 2**70, 2**70000, 1.5, True, "7"],
    "repetition_penalty": [0, -1, math.nan, math.inf, 1e9, True, None],
    "repetition_context": [0, -5, 2.0, True],
    "presence_penalty": [math.nan, math.inf, "0", True],
    "frequency_penalty": [math.nan, -math.inf, None, False],
    "logit_bias": [{-1: 0}, {"5": 1}, {1.0: 1}, {True: 1}, {1: math.nan}, {1: math.inf}, {1: "2"}, {1: True}, [(1, 2)]],
    "logprobs": [-1, 21, 2.0, "2", math.nan],
}


@pytest.mark.parametrize(
    "name, value", [pytest.param(name, value, id=f"{name}-{n}") for name in BAD for n, value in enumerate(BAD[name])]
)
def test_sampling_params_refuse_naming_the_field(name, value):
    with pytest.raises(PenstockError, match=f"^{name}.* expected ") as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, InvalidArgument)
    assert len(str(caught.value)) < 200


def test_bad_values_cover_every_field():
    assert set(BAD) == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ([{}], "greedy"),
        ([{"temperature": 1.0}], "plain"),
        ([{"temperature": 1.0, "min_p": 0.1}, {}], "plain"),
        ([{"temperature": 1.0, "top_p": 0.9}], "full"),
        ([{"temperature": 1.0, "top_k": 64, "top_p": 0.9}, {}], "top_k"),
        ([{"temperature": 1.0, "top_k": 65}], "full"),
        ([{"temperature": 1.0, "top_k": 5}, {"temperature": 1.0}], "full"),
    ],
)
def test_mode_of_several_samplers_does_for_each(options, mode):
    samplers = [Sampler(SamplingParams(**each), 100) for each in options]
    assert mode_of(samplers) == mode
    assert mode_of(samplers, masked=True) == mode + "+edits"
    biased, asking = (Sampler(SamplingParams(**each), 100) for each in ({"logit_bias": {1: 1}}, {"logprobs": 0}))
    assert mode_of([*samplers, biased]) == mode + "+edits"
    assert mode_of([*samplers, asking]) == mode + "+logprobs"
    assert split_mode(mode_of([asking, biased, *samplers])) == (mode, True, True)
    assert split_mode(mode) == (mode, False, False)


def test_sampling_params_take_edges_and_numpy_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(-1), top_p=0, min_p=1, seed=2**64 - 1, logit_bias={np.int32(3): 1}
    )
    assert (params.temperature, params.top_k, params.top_p, params.logit_bias) == (0.5, 0, 0.0, {3: 1.0})
    assert SamplingParams(top_k=10**9).top_k == 10**9
    assert choose(f32(1, 2), temperature=1, top_k=10**9, seed=0).token in (0, 1)


def test_sampler_refuses_ids_outside_of_the_vocabulary():
    with pytest.raises(InvalidArgument, match="^logit_bias: a token id is 8, expected an integer from 0 to 7"):
        Sampler(SamplingParams(logit_bias={8: 1.0}), 8)
    with pytest.raises(InvalidArgument, match="^token is 8, expected an integer from 0 to 7"):
        Sampler(SamplingParams(repetition_penalty=1.1), 8, [1, 8])
    for position in (-1, 2**31):
        with pytest.raises(InvalidArgument, match=f"^position is {position}, expected an integer from 0 to 2147483647"):
            choose(f32(1, 2), position, temperature=1)
