import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.experts.policy import POLICIES, Lfru, Lru, Pin, make_policy


def busy(slots, *which):
    found = np.zeros(slots, bool)
    found[list(which)] = True
    return found


def array(*values):
    return np.array(values, np.int64)


def bring(policy, held, keys, slots, prefill=False):
    """A layer of a step on a cache that `held` (key → slot) describes; the keys that were missing."""
    missing = [key for key in keys if key not in held]
    if missing:
        victims = policy.victims(len(missing), busy(slots, *(held[key] for key in keys if key in held)))
        assert len(victims) == len(missing)
        for key in [key for key, slot in held.items() if slot in victims]:
            del held[key]
        held |= dict(zip(missing, victims.tolist(), strict=True))
        policy.filled(victims, np.array(missing))
    at = np.array([held[key] for key in keys], np.int64)
    policy.touch_prefill(at) if prefill else policy.used(at)
    return missing


@pytest.mark.parametrize("name", [*POLICIES, "auto"])
def test_victims_are_empty_slots_first(name):
    policy = make_policy(name, slots=5, keys=20)
    policy.filled(array(3, 0), array(7, 2))
    policy.used(array(3, 0))
    assert policy.victims(3, busy(5)).tolist() == [1, 2, 4]
    assert policy.victims(3, busy(5, 1)).tolist()[:2] == [2, 4]
    assert policy.victims(0, busy(5)).tolist() == []


@given(st.data(), st.sampled_from(POLICIES))
def test_victims_are_distinct_idle_and_as_many_as_there_are(data, name):
    slots, keys = data.draw(st.integers(1, 40)), 50
    policy, held, empty = make_policy(name, slots, keys), {}, set(range(slots))
    for _ in range(data.draw(st.integers(0, 8))):
        taken = data.draw(st.sets(st.integers(0, slots - 1)))
        count = data.draw(st.integers(0, slots + 2))
        found = policy.victims(count, busy(slots, *taken)).tolist()
        assert len(found) == len(set(found)) == min(count, slots - len(taken))
        assert not taken & set(found)
        first = [slot in empty for slot in found]
        assert first == sorted(first, reverse=True)
        assert not (empty - taken - set(found)) or all(first)
        chosen = sorted(data.draw(st.sets(st.integers(0, keys - 1), max_size=len(found))))
        bring(policy, held, chosen, slots, prefill=data.draw(st.booleans()))
        empty -= set(held.values())


@pytest.mark.parametrize("name", POLICIES)
def test_victims_of_many_are_those_of_one_after_the_other(name, rng):
    slots, keys = 60, 200
    policy, held = make_policy(name, slots, keys), {}
    for _ in range(50):
        bring(policy, held, np.sort(rng.choice(keys, 9, replace=False)).tolist(), slots)
    taken = busy(slots, *rng.choice(slots, 7, replace=False))
    many = policy.victims(40, taken)
    one = []
    for _ in range(40):
        one += policy.victims(1, taken | busy(slots, *one)).tolist()
    assert many.tolist() == one
    assert policy.victims(5, taken).tolist() == one[:5]


@pytest.mark.parametrize("name", POLICIES)
def test_prefill_does_not_push_out_what_decoding_uses(name):
    slots, layers, experts = 24, 6, 16
    policy, held = make_policy(name, slots, layers * experts), {}
    needed = [[layer * experts + e for e in (1, 4, 9)] for layer in range(layers)]  # 18 of 24 slots
    for _ in range(40):
        for keys in needed:
            bring(policy, held, keys, slots)
    for _ in range(2):
        for layer in range(layers):
            every = np.arange(layer * experts, (layer + 1) * experts)
            policy.add_prefill_counts(every, np.full(experts, 64), 256)
            for start in range(0, experts, 4):
                bring(policy, held, every[start : start + 4].tolist(), slots, prefill=True)
    assert [key for keys in needed for key in keys if key not in held] == []


def test_lru_gives_up_what_was_used_longest_ago():
    policy = Lru(slots=4, keys=9)
    policy.filled(array(0, 1, 2, 3), array(5, 6, 7, 8))
    policy.used(array(2, 0))
    policy.used(array(3, 1))
    policy.used(array(2))
    assert policy.victims(4, busy(4)).tolist() == [0, 3, 1, 2]
    assert policy.victims(2, busy(4, 0)).tolist() == [3, 1]


def test_lru_gives_up_what_passed_by_last_first():
    policy = Lru(slots=4, keys=9)
    policy.filled(array(0, 1, 2), array(5, 6, 7))
    policy.used(array(1))
    policy.touch_prefill(array(0, 1))  # 1 was used, and stays
    policy.touch_prefill(array(2))
    policy.filled(array(3), array(8))
    policy.touch_prefill(array(3))
    assert policy.victims(4, busy(4)).tolist() == [3, 2, 0, 1]


def test_lru_keeps_what_was_filled_and_not_used_yet():
    policy = Lru(slots=3, keys=9)
    policy.filled(array(0, 1), array(1, 2))
    policy.used(array(0, 1))
    policy.filled(array(2), array(3))  # read ahead
    assert policy.victims(3, busy(3)).tolist() == [0, 1, 2]


def test_lfru_prefers_the_frequent_to_the_recent():
    policy, held = Lfru(slots=4, keys=8), {}
    for step in range(64):
        bring(policy, held, [0, 1, 2 + step % 2], 4)  # 0 and 1 always, 2 and 3 every other step
    bring(policy, held, [5], 4)
    assert set(held) > {0, 1, 5}
    bring(policy, held, [6], 4)
    assert set(held) > {0, 1, 6}


def test_lfru_forgets_what_was_frequent_long_ago():
    policy, held = Lfru(slots=4, keys=12), {}
    for _ in range(200):
        bring(policy, held, [0], 4)
        bring(policy, held, [9], 4)
    for step in range(400):
        bring(policy, held, [1 + step % 2], 4)
        bring(policy, held, [9], 4)
    bring(policy, held, [3], 4)
    assert set(held) == {1, 2, 3, 9}


def test_lfru_remembers_what_is_not_held():
    policy, held = Lfru(slots=2, keys=12), {}
    for _ in range(50):
        bring(policy, held, [1], 2)
    for stranger in (5, 6, 7):  # in one step, as layers that follow each other
        bring(policy, held, [stranger, stranger + 4], 2)
    assert 1 not in held
    bring(policy, held, [1], 2)
    bring(policy, held, [3], 2)
    assert set(held) == {1, 3}  # 1 is known: what came with it went


@pytest.mark.parametrize(("kind", "short"), [("the same again", True), ("always the same few", False)])
def test_lfru_learns_how_much_recency_says(kind, short, rng):
    policy, held, keys = Lfru(slots=30, keys=64), {}, []
    fixed = rng.permutation(64)[:40]
    for step in range(200):
        if kind == "the same again":  # drawn at random, then kept for 8 steps
            keys = sorted(rng.choice(64, 6, replace=False).tolist()) if step % 8 == 0 else keys
        else:
            keys = sorted(rng.choice(fixed, 6, replace=False).tolist())
        bring(policy, held, keys[:3], 30)
        bring(policy, held, keys[3:], 30)
    long, recent = policy._weights
    assert (recent > 0.7) if short else (recent < 0.25 and long > 0.7)


def test_lfru_takes_a_prefill_as_a_forecast():
    policy, held = Lfru(slots=6, keys=40), {}
    counts = np.ones(20, int)
    counts[[3, 8, 15]] = 200
    policy.add_prefill_counts(np.arange(20), counts, 256)
    for start in range(0, 20, 2):
        bring(policy, held, [start, start + 1], 6, prefill=True)
    assert {3, 8, 15} <= set(held)


def test_lfru_stays_finite_and_small_over_many_steps():
    policy, held = Lfru(slots=4, keys=8), {}
    for _ in range(3000):
        bring(policy, held, [0], 4)
        bring(policy, held, [5], 4)
    bring(policy, held, [1, 6], 4)
    for _ in range(6000):
        bring(policy, held, [0], 4)
        bring(policy, held, [5], 4)
    assert np.isfinite(policy._shares).all() and policy._shares.max() <= 1 + 1e-9
    assert not ((policy._shares > 0) & (policy._shares < 1e-300)).any()


def test_pin_keeps_the_most_used_whatever_passes():
    policy, held = Pin(slots=8, keys=32), {}
    for step in range(40):
        bring(policy, held, [1, 2, 3], 8)
        bring(policy, held, [16 + step % 11], 8)
    for stranger in range(20, 32):
        bring(policy, held, [stranger], 8)
    assert {1, 2, 3} <= set(held)


def test_pin_decides_anew_when_the_text_has_changed():
    policy, held = Pin(slots=8, keys=32), {}
    for _ in range(30):
        bring(policy, held, [0, 1, 2, 3, 4, 5, 6], 8)
    for _ in range(300):
        bring(policy, held, [10, 11, 12, 13, 14, 15, 16], 8)
    for stranger in range(20, 32):
        bring(policy, held, [stranger], 8)
    assert set(range(10, 17)) <= set(held)


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_deterministic(name, rng):
    steps = [np.sort(rng.choice(100, 7, replace=False)).tolist() for _ in range(80)]

    def run():
        policy, held = make_policy(name, 31, 100), {}
        return [bring(policy, held, keys, 31) for keys in steps], held

    assert run() == run()


@pytest.mark.parametrize("name", POLICIES)
def test_a_step_without_experts_changes_nothing(name):
    policy, other = make_policy(name, 4, 9), make_policy(name, 4, 9)
    for each in (policy, other):
        each.filled(array(0, 1), array(3, 4))
        each.used(array(0, 1))
    policy.used(array())
    policy.touch_prefill(array())
    policy.filled(array(), array())
    assert policy.victims(4, busy(4)).tolist() == other.victims(4, busy(4)).tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mru", 4, 9), r"expert policy: is 'mru', expected one of auto, lru, lfru, pin"),
        (("lru", 0, 9), r"expert cache: has 0 slots for 9 experts, expected at least one of each"),
    ],
)
def test_make_policy_refuses(arguments, message):
    with pytest.raises(InvalidArgument, match=f"^{message}$"):
        make_policy(*arguments)
