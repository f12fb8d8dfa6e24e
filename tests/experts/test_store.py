"""The slot cache: what is where, what is given up, what happens when a read fails."""

import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import CheckpointError, InvalidArgument
from penstock.experts.layout import Format, Layer, TensorExtents, stacked
from penstock.experts.store import Store, slot_counts
from penstock.ops.array import Spec

SPECS = (Spec((3, 2), "uint32"), Spec((3, 1), "bfloat16"), Spec((5,), "float32"))
TOP = 3


def layer(n: int, count: int = 12, specs: tuple[Spec, ...] = SPECS) -> Layer:
    parts = tuple(stacked(Path(f"{n}"), 1000 * i, count, spec) for i, spec in enumerate(specs))
    return Layer(f"layers.{n}.experts", parts)


def content(layer: int, expert: int, spec: Spec) -> bytes:
    return np.random.default_rng((layer, expert, spec.nbytes)).bytes(spec.nbytes)


class Files:
    """A reader that makes up what it reads, and fails for what is in `broken`."""

    def __init__(self, specs: tuple[Spec, ...] = SPECS) -> None:
        self.specs, self.broken, self.reads = specs, set(), []

    def submit(self, layer: int, expert: int, into) -> Future:
        future: Future = Future()
        self.reads.append((layer, expert))

        def work() -> None:
            if (layer, expert) in self.broken:
                future.set_exception(CheckpointError("cannot be read"))
                return
            for spec, view in zip(self.specs, into, strict=True):
                view[:] = content(layer, expert, spec)
            future.set_result(None)

        threading.Thread(target=work).start()
        return future

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


def made(slots: int, layers: int = 2, policy: str = "lru", owned: tuple[int, ...] | None = None) -> tuple[Store, Files]:
    files = Files()
    each = Format(SPECS).payload
    budget = slots * each + each // 2
    return Store([layer(n) for n in range(layers)], files, budget, TOP, policy, owned=owned), files


def held(store: Store, n: int, expert: int) -> list[bytes]:
    slot = store.slot_of[n][expert]
    assert slot >= 0
    return [array[slot].tobytes() for array in store.pool_of[n].slots.arrays]


def check_all(store: Store) -> None:
    """Every slot has one owner at most, and what is said to be there is there."""
    taken = np.concatenate([row[row >= 0] for row in store.slot_of])
    assert len(set(taken.tolist())) == len(taken) <= store.pool_of[0].slots.count
    pending = store.pool_of[0].pending
    for n, row in enumerate(store.slot_of):
        for expert in np.flatnonzero(row >= 0):
            if int(row[expert]) not in pending:
                assert held(store, n, int(expert)) == [content(n, int(expert), spec) for spec in SPECS]


@pytest.mark.parametrize("policy", ["lru", "lfru", "pin", "auto"])
def test_any_sequence_of_choices_finds_its_experts(policy, rng):
    store, files = made(7, layers=3, policy=policy)
    for step in range(300):
        n = step % 3
        ids = rng.permutation(12)[:TOP].astype(np.int32)
        before = len(files.reads)
        there = int((store.slot_of[n][ids] >= 0).sum())
        assert store.request(n, ids[None])
        assert len(files.reads) - before == TOP - there
        store.wait(n, ids)
        for expert in ids:
            assert held(store, n, int(expert)) == [content(n, int(expert), spec) for spec in SPECS]
        if step % 20 == 0:
            check_all(store)
    assert store.counters.reads == len(files.reads)
    assert store.counters.hits + store.counters.reads == 300 * TOP
    assert store.counters.bytes_read == len(files.reads) * Format(SPECS).payload


def test_experts_that_are_there_are_not_read_again():
    store, files = made(6)
    for _ in range(3):
        store.request(0, np.array([[1, 2, 1], [2, 5, 5]], np.int32))
        store.wait(0, np.array([1, 2, 5]))
    assert sorted(files.reads) == [(0, 1), (0, 2), (0, 5)]
    assert (store.counters.hits, store.counters.reads) == (6, 3)


@pytest.mark.parametrize("policy", ["lru", "lfru", "pin"])
@pytest.mark.parametrize("prefill", [False, True])
def test_rows_without_experts_ask_for_nothing(prefill, policy):
    store, files = made(6, policy=policy)
    none = np.full((2, TOP), -1, np.int32)
    assert store.request(0, none, prefill)
    store.wait(0, none)
    store.prefetch(0, none)
    assert list(store.expert_batches(0, none)) == [] and len(list(store.token_batches(0, none))) == 1
    assert not files.reads and (store.slot_of[0] == -1).all() and store.counters.hits == 0
    some = np.array([[-1, -1, -1], [2, 5, 2]], np.int32)
    for _ in range(2):
        assert store.request(0, some, prefill)
        store.wait(0, some)
    assert sorted(files.reads) == [(0, 2), (0, 5)] and (store.counters.hits, store.counters.reads) == (2, 2)
    (batch,) = store.expert_batches(0, some)
    assert np.flatnonzero(batch >= 0).tolist() == [2, 5]
    check_all(store)


@pytest.mark.parametrize("policy", ["lru", "lfru", "pin"])
@pytest.mark.parametrize("owned", [(1, 4, 6, 7, 11), (5,)], ids=["some", "one"])
def test_other_ranks_experts_are_never_read_counted_or_kept(owned, policy, rng):
    """The store does, and its policy thinks, what those of a model do that has the other experts alone."""
    (store, files), smaller = made(9, 3, policy, owned), Files()
    each, at = Format(SPECS).payload, np.flatnonzero(np.isin(np.arange(36) % 12, owned))
    other = Store([layer(n, len(owned)) for n in range(3)], smaller, 9 * each, store.top_k, policy)
    assert store.pool_of[0].slots.count == other.pool_of[0].slots.count == min(9, 3 * len(owned))
    assert (store.nbytes, store.most_tokens) == (other.nbytes, other.most_tokens)
    number = np.full(12, -1, np.int32)
    number[list(owned)] = np.arange(len(owned))
    for step in range(90):
        n, prefill = step % 3, step % 7 > 4
        ids = np.stack([rng.permutation(12)[:TOP] for _ in range(1 + 2 * prefill)]).astype(np.int32)
        if prefill:
            ids[:, 0] = rng.choice(owned, 3)
        for one, seen in ((store, ids), (other, number[ids])):
            if step % 7 < 6:
                assert one.request(n, seen, prefill)
                one.wait(n, seen)
            else:
                batches = list(one.expert_batches(n, seen))
                assert {e for batch in batches for e in np.flatnonzero(batch >= 0)} == {*seen[number[ids] >= 0]}
                assert all((batch[(number < 0)[: len(batch)]] == -2).all() for batch in batches if one is store)
            one.prefetch((n + 1) % 3, seen)
            one.drain()
        check_all(store)
        np.testing.assert_array_equal(store.table[at], other.table)
        assert (np.delete(store.table, at) == -2).all()
        np.testing.assert_array_equal(store.pool_of[0].policy.ranks(), other.pool_of[0].policy.ranks())
    assert [(n, number[expert]) for n, expert in files.reads] == smaller.reads
    store.counters.wait_seconds = other.counters.wait_seconds = 0
    assert store.counters == other.counters and store.counters.hits
    assert store.counters.guessed or len(owned) == 1


def test_a_rank_without_experts_has_a_store_that_does_nothing():
    store, files = made(0, owned=())
    ids = np.array([[0, 3, 11]], np.int32)
    assert store.request(1, ids) and store.request(1, ids, prefill=True) and store.most_tokens >= 1
    store.wait(1, ids)
    store.prefetch(0, ids)
    assert not list(store.expert_batches(0, ids)) and (store.table == -2).all()
    assert not files.reads and store.counters.hits == 0


def test_a_step_on_the_device_counts_no_experts_of_other_ranks():
    store, _ = made(5, owned=(0, 2, 4))
    store.request(1, np.array([0, 4], np.int32))
    store.wait(1, np.array([0, 4]))
    store.record_step(np.array([0, 1]), np.array([[1, 3, -1], [0, 4, 5]], np.int32), 0)
    assert store.counters.hits == 2


def test_a_budget_is_of_what_a_rank_owns():
    layers, each = [layer(0), layer(1)], Format(SPECS).payload
    assert slot_counts(layers, 100 * each, TOP, (1, 5)) == {Format(SPECS): 4}
    assert slot_counts(layers, 2 * each, TOP, (1, 5)) == {Format(SPECS): 2}
    with pytest.raises(InvalidArgument, match=r"expected at least .* \(2 experts of"):
        slot_counts(layers, 2 * each - 1, TOP, (1, 5))
    for owned in ((5, 1), (1, 1), (-1, 3), (3, 12)):
        with pytest.raises(InvalidArgument, match=r"^layers.0.experts: owned is \[.*\], expected ascending .* 0 to 11"):
            Store(layers, Files(), 100 * each, TOP, owned=owned)


def test_a_prefill_counts_the_rows_of_sequences():
    """What a policy learns from a prefill does not depend on rows without experts."""
    some = np.array([[4, 2, 5], [2, 5, 1]], np.int32)
    found = []
    for ids in (some, np.concatenate([some, np.full((5, TOP), -1, np.int32)])):
        store, _ = made(6, policy="lfru")
        assert store.request(0, ids, prefill=True)
        store.wait(0, ids)
        found.append(store.pool_of[0].policy.ranks())
    np.testing.assert_array_equal(*found)


def test_lru_gives_up_what_was_not_used_for_the_longest_time():
    store, _ = made(4, layers=1)
    for ids in ([0, 1, 2], [3], [0], [4]):
        store.request(0, np.array(ids, np.int32))
        store.wait(0, np.array(ids))
    assert np.flatnonzero(store.slot_of[0] >= 0).tolist() == [0, 2, 3, 4]


def test_more_experts_than_slots_are_refused_without_a_read():
    store, files = made(4, layers=1)
    assert not store.request(0, np.arange(5, dtype=np.int32))
    assert not files.reads and (store.slot_of[0] == -1).all()


@pytest.mark.parametrize("slots", [3, 4, 7, 11])
def test_expert_batches_have_every_chosen_expert_once_and_read_it_once(slots):
    store, files = made(slots, layers=2)
    store.request(1, np.array([3, 4, 9], np.int32))
    store.wait(1, np.array([3, 4, 9]))
    store.request(0, np.array([2], np.int32))
    store.wait(0, np.array([2]))
    files.reads.clear()
    ids = np.array([[0, 1, 3], [3, 4, 5], [6, 7, 8], [9, 10, 0]], np.int32)
    assert slots >= 11 or not store.request(1, ids)
    there = np.flatnonzero(store.slot_of[1] >= 0)
    seen: list[int] = []
    for slot_of in store.expert_batches(1, ids):
        for expert in np.flatnonzero(slot_of >= 0):
            arrays = store.pool_of[1].slots.arrays
            assert [a[slot_of[expert]].tobytes() for a in arrays] == [content(1, int(expert), spec) for spec in SPECS]
            seen.append(int(expert))
    assert sorted(seen) == np.unique(ids).tolist()
    assert sorted(files.reads) == [(1, e) for e in np.unique(ids).tolist() if e not in there]
    check_all(store)


def test_token_batches_have_all_experts_of_their_tokens():
    store, _ = made(7, layers=1)
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(12, dtype=np.int32), (9, 1)), axis=1)[:, :TOP]
    rows = []
    for part in store.token_batches(0, ids):
        assert (store.slot_of[0][ids[part]] >= 0).all()
        for expert in np.unique(ids[part]):
            assert held(store, 0, int(expert)) == [content(0, int(expert), spec) for spec in SPECS]
        rows += range(9)[part]
    assert rows == list(range(9))


def test_a_failed_read_is_raised_once_and_leaves_an_empty_slot():
    store, files = made(4, layers=1)
    files.broken = {(0, 1)}
    ids = np.array([0, 1, 2], np.int32)
    assert store.request(0, ids)
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.wait(0, ids)
    assert store.slot_of[0][1] == -1 and (store.slot_of[0][[0, 2]] >= 0).all()
    files.broken = set()
    assert store.request(0, ids)
    store.wait(0, ids)
    check_all(store)


def test_a_failed_read_in_a_batch_leaves_a_store_that_works():
    store, files = made(4, layers=1)
    files.broken = {(0, 7)}
    ids = np.arange(12, dtype=np.int32).reshape(4, 3)
    with pytest.raises(CheckpointError, match="cannot be read"):
        for _ in store.expert_batches(0, ids):
            pass
    files.broken = set()
    for expert in range(12):
        assert store.request(0, np.array([expert], np.int32))
        store.wait(0, np.array([expert]))
    check_all(store)


def test_slots_take_no_more_than_the_budget_and_no_more_than_there_are_experts():
    each = Format(SPECS).payload
    for budget in (3 * each, 3 * each + 1, 10 * each - 1, 1000 * each):
        store = Store([layer(0), layer(1)], Files(), budget, TOP)
        assert store.nbytes == sum(a.nbytes for a in store.pool_of[0].slots.arrays) <= budget
        assert store.pool_of[0].slots.count == min(budget // each, 24)


def test_too_small_a_budget_is_refused_with_the_number_that_is_needed():
    need = TOP * Format(SPECS).payload
    message = f"expected at least {need} B .3 experts of"
    with pytest.raises(InvalidArgument, match=message):
        Store([layer(0)], Files(), need - 1, TOP)
    Store([layer(0)], Files(), need, TOP)


def test_formats_share_a_budget_by_their_bytes():
    large = (Spec((30, 8), "uint32"),)
    layers = [layer(0), layer(1, 40, large), layer(2)]
    small, big = Format(SPECS).payload, Format(large).payload
    counts = slot_counts(layers, 10 * big + 10 * small, TOP)
    assert counts[Format(SPECS)] >= TOP and counts[Format(large)] >= TOP
    assert counts[Format(SPECS)] * small + counts[Format(large)] * big <= 10 * big + 10 * small
    store = Store(layers, Files(large), 10 * big + 10 * small, TOP)
    store.request(1, np.array([39, 0], np.int32))
    store.wait(1, np.array([39, 0]))
    assert held(store, 1, 39) == [content(1, 39, large[0])]


def test_parts_need_not_follow_each_other():
    extents = [stacked(Path("x"), 100 * e, 1, SPECS[0]).extents[0] for e in (4, 0, 2)]
    part = TensorExtents(SPECS[0], extents)
    assert [extent.start for extent in Layer("n", (part,)).extents(0)] == [400]
