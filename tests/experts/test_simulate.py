from collections import OrderedDict
from itertools import combinations

import numpy as np
import pytest

from penstock.errors import InvalidArgument
from penstock.experts.policy import POLICIES
from penstock.experts.simulate import BUDGETS, Trace, optimal, repeats, simulate, table


def made(rng, tokens=60, layers=3, experts=7, k=2, prompt=0, skew=1.0):
    """A trace in which some experts are chosen more often than others."""
    odds = rng.dirichlet(np.full(experts, skew), layers)
    ids = [
        [rng.choice(experts, k, replace=False, p=(p + 0.01) / (p + 0.01).sum()) for p in odds] for _ in range(tokens)
    ]
    return Trace(np.array(ids, np.int32), np.arange(tokens) >= prompt, experts)


def plain_lru(trace, slots):
    """LRU as one writes it down, without arrays."""
    held, hits = OrderedDict(), []
    for token in trace.ids:
        found = 0
        for layer, ids in enumerate(token):
            keys = [layer * trace.experts + int(e) for e in sorted(ids)]
            found += sum(key in held for key in keys)
            for key in [key for key in keys if key not in held]:
                if len(held) == slots:
                    held.pop(next(old for old in held if old not in keys))
                held[key] = None
            for key in keys:
                held.move_to_end(key)
        hits.append(found)
    return hits


def most_hits(trace, slots):
    """All ways to keep experts, tried."""
    states = {frozenset(): 0}
    for step in trace.steps:
        for keys, _ in step.layers:
            needed = frozenset(keys.tolist())
            following: dict[frozenset[int], int] = {}
            for state, hits in states.items():
                hits += len(state & needed) if step.decode else 0
                have = state | needed
                must = needed if step.decode else frozenset()
                others = sorted(have - must)
                for count in range(min(len(others), slots - len(must)) + 1):
                    for kept in combinations(others, count):
                        key = must | frozenset(kept)
                        following[key] = max(following.get(key, 0), hits)
            states = following
    return max(states.values())


@pytest.mark.parametrize("slots", [2, 5, 6, 11, 21])
def test_simulate_lru_is_lru(slots, rng):
    trace = made(rng)
    assert simulate(trace, slots, "lru").tolist() == plain_lru(trace, slots)


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("prompt", [0, 3])
def test_optimal_is_the_most_of_all_ways(slots, prompt, rng):
    trace = made(rng, tokens=9, layers=2, experts=4, k=2, prompt=prompt)
    assert optimal(trace, slots).sum() == most_hits(trace, slots)


@pytest.mark.parametrize("prompt", [0, 25, 40])
def test_no_policy_beats_the_optimum_and_more_slots_help_it(prompt, rng):
    trace = made(rng, tokens=70, prompt=prompt)
    before = -1
    for slots in (2, 4, 9, 15, 21):
        most = optimal(trace, slots).sum()
        assert most >= before
        assert all(simulate(trace, slots, policy).sum() <= most for policy in POLICIES)
        before = most


@pytest.mark.parametrize("policy", POLICIES)
def test_simulate_with_room_for_all_misses_each_expert_once(policy, rng):
    trace = made(rng, tokens=80)
    distinct = len(np.unique(trace.ids[:, 0])) + len(np.unique(trace.ids[:, 1])) + len(np.unique(trace.ids[:, 2]))
    assert trace.chosen.sum() - simulate(trace, trace.keys, policy).sum() == distinct
    assert trace.chosen.sum() - optimal(trace, trace.keys).sum() == distinct


@pytest.mark.parametrize("policy", POLICIES)
def test_simulate_finds_what_a_prefill_left(policy, rng):
    trace = made(rng, tokens=300, prompt=280)
    assert simulate(trace, trace.keys, policy).sum() == trace.chosen.sum()
    assert optimal(trace, 6).sum() > optimal(Trace(trace.ids[280:], trace.decode[280:], 7), 6).sum()


@pytest.mark.parametrize(("policy", "hits"), [("lru", 0), ("lfru", 2)])
def test_simulate_tells_the_policy_what_a_prefill_chose(policy, hits):
    """All tokens of the prompt but a few choose experts 0 and 1, and so does the answer."""
    ids = np.tile(np.array([[[0, 1]]], np.int32), (50, 1, 1))
    ids[:6, 0] = np.arange(12).reshape(6, 2)
    assert simulate(Trace(ids, np.arange(50) >= 49, 12), 10, policy).tolist() == [hits]


def test_trace_cuts_prefills_and_counts_their_choices(rng):
    trace = made(rng, tokens=600, prompt=590)
    assert [(step.decode, step.tokens) for step in trace.steps] == [
        (False, 256), (False, 256), (False, 78), *[(True, 1)] * 10,
    ]  # fmt: skip
    keys, counts = trace.steps[1].layers[2]
    want = np.bincount(trace.ids[256:512, 2].ravel(), minlength=7)
    assert dict(zip((keys - 14).tolist(), counts.tolist(), strict=True)) == {e: n for e, n in enumerate(want) if n}


def test_layers_without_a_choice_ask_for_nothing(rng):
    whole = made(rng, tokens=30)
    ids = whole.ids.copy()
    ids[:, 1] = -1
    trace = Trace(ids, whole.decode, 7)
    assert trace.chosen.tolist() == [4] * 30
    left = Trace(np.ascontiguousarray(ids[:, [0, 2]]), whole.decode, 7)
    assert simulate(trace, 5, "lru").tolist() == simulate(left, 5, "lru").tolist()
    assert np.isnan(repeats(trace)[1])


def test_repeats_counts_experts_of_the_token_before():
    ids = np.array([[[0, 1]], [[1, 2]], [[1, 2]], [[3, 4]], [[4, 3]]], np.int32)
    decode = np.array([False, False, True, True, True])
    assert repeats(Trace(ids, decode, 5)).tolist() == [(2 + 0 + 2) / 6]


def test_table_has_a_row_per_budget(rng):
    trace = made(rng, tokens=50)
    rows = list(table(trace))
    assert [row.share for row in rows] == list(BUDGETS)
    assert [row.slots for row in rows] == [2, 4, 6, 10, 14, 21]
    for row in rows:
        assert set(row.rates) == {*POLICIES, "min"}
        assert row.rates["lru"] == simulate(trace, row.slots, "lru").sum() / 300
        assert row.rates["min"] == optimal(trace, row.slots).sum() / 300


def test_table_of_a_trace_without_decode_steps_is_empty(rng):
    assert list(table(made(rng, tokens=20, prompt=20))) == []


def test_simulate_refuses_fewer_slots_than_a_layer_needs(rng):
    with pytest.raises(InvalidArgument, match=r"^expert cache: has 1 slots, expected at least 2, what a token chooses"):
        simulate(made(rng), 1, "lru")
