"""Pages and slots: who holds what, copies on write, windows, growth, refusals before anything is allocated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from penstock.backends.cpu import device as cpu_device
from penstock.backends.cpu.device import CpuDevice
from penstock.engine.cache import Caches, PageTable, Sequence, Snapshot
from penstock.engine.cache_size import sequences_within, size_for_batches, size_for_load, size_within
from penstock.errors import InvalidArgument, OutOfMemory
from penstock.models.step import PAGE, Layout, PagedKV, RecurrentState, with_state_dtype

WINDOW = 300
LAYOUTS: tuple[Layout, ...] = (PagedKV(3, 2), RecurrentState((3, 5), (2, 4, 6)), PagedKV(7, 1, WINDOW), PagedKV(4, 4))


def made(*layouts: Layout, dtype: str = "float32") -> Caches:
    return Caches(layouts or LAYOUTS, dtype)


def used(caches: Caches) -> dict[int | None, int]:
    return {window: pool.used for window, pool in caches.pools.items()}


def write(caches: Caches, sequence: Sequence, values: np.ndarray) -> None:
    """Append one position per value: in every layer and part each channel holds that value; states hold the last."""
    caches.reserve(sequence, len(values))
    for layout, arrays in zip(caches.layouts, caches.arrays, strict=True):
        for array in arrays:
            if not isinstance(layout, PagedKV):
                array[sequence.slot] = values[-1]
                continue
            ids = sequence.tables[layout.window].ids
            for position, value in enumerate(values, sequence.length):
                array[ids[position // PAGE], position % PAGE] = value
    caches.advance(sequence, len(values))


def read(caches: Caches, sequence: Sequence, layer: int) -> np.ndarray:
    """The values of the live positions of a layer, or of its state."""
    first, second = caches.rows(sequence, layer)
    if not isinstance(caches.layouts[layer], PagedKV):
        assert (first == first.flat[0]).all() and (second == first.flat[0]).all()
        return first
    assert (first == first[:, :1]).all() and (second == first[:, :1]).all()
    return first[:, 0]


def holds(caches: Caches, sequence: Sequence, values: np.ndarray) -> None:
    """Every layer of the sequence holds these values, a windowed one those that are still read and perhaps more."""
    assert sequence.length == len(values)
    for n, layout in enumerate(caches.layouts):
        got = read(caches, sequence, n)
        if not isinstance(layout, PagedKV):
            assert (got == (values[-1] if len(values) else 0)).all()
        else:
            least = len(values) if layout.window is None else min(len(values), layout.window - 1)
            assert least <= len(got) < least + PAGE + (0 if layout.window is None else 1)
            np.testing.assert_array_equal(got, values[len(values) - len(got) :])


# -- slots and pages -------------------------------------------------------------------------------------------------


def test_open_gives_each_sequence_a_clean_slot() -> None:
    caches = made()
    sequences = [caches.open() for _ in range(5)]
    assert len({sequence.slot for sequence in sequences}) == 5
    write(caches, sequences[2], np.array([9.0]))
    slot = sequences[2].slot
    caches.close(sequences[2])
    again = caches.open()
    assert again.slot == slot
    holds(caches, again, np.empty(0))


@pytest.mark.parametrize("count, pages", [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (600, 3)])
def test_reserve_takes_the_pages_that_positions_need(count: int, pages: int) -> None:
    caches = made(PagedKV(3, 2))
    sequence = caches.open()
    caches.reserve(sequence, count)
    assert used(caches) == {None: pages} and len(sequence.tables[None].ids) == pages
    caches.reserve(sequence, count)  # a step that failed is tried again
    assert used(caches) == {None: pages}


def test_advance_fills_a_page_before_it_takes_the_next() -> None:
    caches = made(PagedKV(3, 2))
    sequence = caches.open()
    for count in (100, 100, 56):
        caches.reserve(sequence, count)
        caches.advance(sequence, count)
        assert used(caches) == {None: 1}
    caches.reserve(sequence, 1)
    assert used(caches) == {None: 2} and sequence.length == 256


def test_layers_of_one_window_share_page_numbers() -> None:
    caches = made()
    assert set(caches.pools) == {None, WINDOW}
    sequence = caches.open()
    write(caches, sequence, np.arange(10.0))
    assert used(caches) == {None: 1, WINDOW: 1}
    assert len(caches.arrays[0][0]) == len(caches.arrays[3][0])


def test_close_gives_everything_back_once() -> None:
    caches = made()
    first, second = caches.open(), caches.open()
    write(caches, first, np.arange(500.0))
    write(caches, second, np.arange(3.0))
    caches.close(first)
    caches.close(first)
    assert used(caches) == {None: 1, WINDOW: 1}
    holds(caches, second, np.arange(3.0))
    caches.close(second)
    assert used(caches) == {None: 0, WINDOW: 0}
    assert sorted(caches._free_slots) == list(range(caches._slots))
    assert all(count == 0 for pool in caches.pools.values() for count in pool.references)


def test_table_of_nothing_names_a_page_for_the_kernels() -> None:
    assert PageTable().array.tolist() == [0] and PageTable().array.dtype == np.int32


# -- snapshots -------------------------------------------------------------------------------------------------------


def test_snapshot_costs_no_page_until_somebody_writes() -> None:
    caches = made()
    sequence = caches.open()
    write(caches, sequence, np.arange(300.0))
    before = used(caches)
    snapshot = caches.snapshot(sequence)
    assert used(caches) == before
    write(caches, sequence, np.arange(300.0, 310.0))
    assert used(caches) == {None: before[None] + 1, WINDOW: before[WINDOW] + 1}  # the half-full page, copied
    write(caches, sequence, np.arange(310.0, 320.0))
    assert used(caches) == {None: before[None] + 1, WINDOW: before[WINDOW] + 1}
    holds(caches, sequence, np.arange(320.0))
    caches.rewind(sequence, snapshot)
    holds(caches, sequence, np.arange(300.0))


def test_snapshot_at_the_edge_of_a_page_copies_nothing() -> None:
    caches = made(PagedKV(3, 2))
    sequence = caches.open()
    write(caches, sequence, np.arange(256.0))
    snapshot = caches.snapshot(sequence)
    write(caches, sequence, np.arange(256.0, 257.0))
    assert used(caches) == {None: 2}
    caches.drop(snapshot)
    assert used(caches) == {None: 2}


def test_rewind_as_often_as_one_likes_and_into_another_sequence() -> None:
    caches = made()
    sequence, other = caches.open(), caches.open()
    write(caches, sequence, np.arange(100.0))
    write(caches, other, np.full(700, 5.0))
    snapshot = caches.snapshot(sequence)
    for start in (200.0, 300.0):
        write(caches, sequence, np.arange(start, start + 400))
        caches.rewind(sequence, snapshot)
        holds(caches, sequence, np.arange(100.0))
    caches.rewind(other, snapshot)
    write(caches, other, np.array([1.0, 2.0]))
    write(caches, sequence, np.array([3.0]))
    holds(caches, other, np.append(np.arange(100.0), [1, 2]))
    holds(caches, sequence, np.append(np.arange(100.0), 3))
    for one in (sequence, other):
        caches.close(one)
    caches.drop(snapshot)
    caches.drop(snapshot)
    assert used(caches) == {None: 0, WINDOW: 0}


def test_rewind_heals_a_spoiled_sequence() -> None:
    caches = made()
    sequence = caches.open()
    write(caches, sequence, np.arange(5.0))
    snapshot = caches.snapshot(sequence)
    sequence.corrupt = True
    caches.rewind(sequence, snapshot)
    assert not sequence.corrupt


# -- windows ---------------------------------------------------------------------------------------------------------


def test_advance_releases_pages_that_left_the_window() -> None:
    caches = made(PagedKV(3, 2, WINDOW))
    sequence = caches.open()
    most = 0
    for start in range(0, 2560, 64):
        write(caches, sequence, np.arange(start, start + 64.0))
        most = max(most, used(caches)[WINDOW])
        holds(caches, sequence, np.arange(start + 64.0))
    assert most <= -(-WINDOW // PAGE) + 1
    caches.close(sequence)
    assert used(caches) == {WINDOW: 0}


@pytest.mark.parametrize("window", [1, 2, 255, 256, 257, 512])
def test_advance_keeps_what_the_next_token_reads(window: int) -> None:
    """The token at position p reads p - window + 1 … p."""
    caches = made(PagedKV(3, 2, window))
    sequence = caches.open()
    for length in range(1, 900):
        caches.reserve(sequence, 1)
        caches.advance(sequence, 1)
        first = sequence.tables[window].first * PAGE
        assert first <= max(0, length - window + 1) < first + PAGE


def test_snapshot_keeps_pages_that_leave_the_window_later() -> None:
    caches = made(PagedKV(3, 2, WINDOW))
    sequence = caches.open()
    write(caches, sequence, np.arange(256.0))
    snapshot = caches.snapshot(sequence)
    write(caches, sequence, np.arange(256.0, 1200.0))
    caches.rewind(sequence, snapshot)
    holds(caches, sequence, np.arange(256.0))


# -- growth ----------------------------------------------------------------------------------------------------------


def test_growth_keeps_contents() -> None:
    caches = made()
    sequences = [caches.open() for _ in range(7)]
    texts = [np.arange(50.0 * n, 50.0 * n + 90 * (n + 1)) for n in range(7)]
    for sequence, text in zip(sequences, texts, strict=True):
        write(caches, sequence, text)
    for sequence, text in zip(sequences, texts, strict=True):
        holds(caches, sequence, text)


def test_states_of_two_bytes_are_counted_so() -> None:
    whole, half = (Caches(with_state_dtype(LAYOUTS, kind), "float32") for kind in ("float32", "bfloat16"))
    assert whole.slot_bytes - half.slot_bytes == 2 * 2 * 4 * 6
    assert [str(array.dtype) for array in half.arrays[1]] == ["float32", "bfloat16"]
    first, second = half.open(), half.open()
    half.arrays[1][1][first.slot] = 1.5
    moment = half.snapshot(first)
    half.rewind(second, moment)
    assert (half.arrays[1][1][second.slot] == 1.5).all()
    with pytest.raises(InvalidArgument, match="^load: state_dtype is 'bfloat16', expected 'auto': the model has no"):
        with_state_dtype((PagedKV(3, 2),), "bfloat16")
    assert with_state_dtype((PagedKV(3, 2),), "float32") == (PagedKV(3, 2),)


def test_bytes_of_is_what_a_sequence_takes() -> None:
    caches = made(dtype="float16")
    state, conv = 2 * 4 * 6 * 4, 3 * 5 * 2  # the state is float32 whatever the activations are
    for length, pages, windowed in ((1, 1, 1), (257, 2, 2), (10_000, 40, 4)):
        row = PAGE * 2
        assert caches.bytes_of(length) == state + conv + row * (pages * (5 + 8) + windowed * 8)
    sequence = caches.open()
    caches.reserve(sequence, 4 * PAGE)
    assert caches.nbytes == caches.bytes_of(4 * PAGE)


@contextmanager
def memory_of(patch: pytest.MonkeyPatch, size: int) -> Iterator[None]:
    with patch.context() as inner:
        inner.setattr(cpu_device, "available_memory", lambda: size)
        yield


def test_reserve_refuses_before_it_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = made()
    sequence = caches.open()
    write(caches, sequence, np.arange(40.0))
    before = used(caches), caches.nbytes, [id(array) for arrays in caches.arrays for array in arrays]
    with (
        memory_of(monkeypatch, 64 << 20),
        pytest.raises(OutOfMemory, match=r"^cache: \d+\.\d\d MB more of memory are needed, 67\.11 MB") as caught,
    ):
        caches.reserve(sequence, 100_000)
    assert "\n" not in str(caught.value) and isinstance(caught.value, MemoryError)
    assert before == (used(caches), caches.nbytes, [id(array) for arrays in caches.arrays for array in arrays])
    write(caches, sequence, np.arange(40.0, 3000.0))
    holds(caches, sequence, np.arange(3000.0))


def test_reserve_of_absurd_lengths_is_refused_at_once() -> None:
    caches = made(PagedKV(1 << 20, 1 << 20))
    with pytest.raises(OutOfMemory):
        caches.reserve(caches.open(), 1 << 30)


def test_open_refuses_before_it_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = made()
    with memory_of(monkeypatch, 0), pytest.raises(OutOfMemory):
        caches.open()
    assert caches.open().slot == 0


# -- caches of a fixed size ------------------------------------------------------------------------------------------


class FixedHost(CpuDevice):
    """Host memory whose caches keep the size that they are given, as a GPU's do."""

    fixed_caches = True


def fixed(*layouts: Layout) -> Caches:
    return Caches(layouts or LAYOUTS, "float32", FixedHost())


def sizes(caches: Caches) -> tuple[int, dict[int | None, int], list[int]]:
    lengths = [len(array) for arrays in caches.arrays for array in arrays]
    return caches.slots, {window: pool.capacity for window, pool in caches.pools.items()}, lengths


def test_allocate_gives_the_arrays_their_size_and_nothing_grows() -> None:
    caches = fixed()
    assert sizes(caches) == (0, {None: 0, WINDOW: 0}, [0] * 8) and caches.nbytes == 0
    caches.allocate(2, {None: 5, WINDOW: 7})
    assert sizes(caches) == (2, {None: 5, WINDOW: 7}, [5, 5, 2, 2, 7, 7, 5, 5]) and caches.version == 1
    assert caches.nbytes == sum(array.nbytes for arrays in caches.arrays for array in arrays)
    caches.make_room({None: 5, WINDOW: 7}, 2)
    first, second = caches.open(), caches.open()
    with pytest.raises(OutOfMemory, match=r"^cache: 2 of 2 sequences that there is room for are open.*close sessions"):
        caches.open()
    write(caches, first, np.arange(3.0 * PAGE))
    write(caches, second, np.arange(2.0 * PAGE))
    with pytest.raises(OutOfMemory, match=r"^cache: 1 more pages of 256 positions are needed, 0 of 5 are free; use a"):
        caches.reserve(second, 1)
    with pytest.raises(OutOfMemory, match="^cache: 2 more pages .* 0 of 5"):
        caches.make_room({None: 2}, 0)
    with pytest.raises(OutOfMemory, match="^cache: 2 of 2 sequences"):
        caches.make_room({None: 0}, 1)
    holds(caches, first, np.arange(3.0 * PAGE))
    holds(caches, second, np.arange(2.0 * PAGE))
    assert caches.version == 1


def test_allocate_is_refused_while_anything_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = fixed()
    caches.allocate(2, {None: 5, WINDOW: 7})
    before = sizes(caches), caches.version
    sequence = caches.open()
    write(caches, sequence, np.arange(300.0))
    snapshot = caches.snapshot(sequence)
    message = r"^cache: {} sequences are open and 4 pages are held, expected none .* close sessions and drop snapshots"
    with pytest.raises(InvalidArgument, match=message.format(1)):
        caches.allocate(3, {None: 5, WINDOW: 7})
    caches.close(sequence)
    with pytest.raises(InvalidArgument, match=message.format(0)):
        caches.allocate(3, {None: 5, WINDOW: 7})
    assert before == (sizes(caches), caches.version)
    caches.drop(snapshot)
    caches.allocate(1, {None: 3, WINDOW: 4})
    assert sizes(caches) == (1, {None: 3, WINDOW: 4}, [3, 3, 1, 1, 4, 4, 3, 3]) and caches.version == 2
    sequence = caches.open()
    write(caches, sequence, np.arange(700.0))
    holds(caches, sequence, np.arange(700.0))
    caches.close(sequence)
    with (
        memory_of(monkeypatch, 1000),
        pytest.raises(OutOfMemory, match=r"^cache: 9 sequences and 8 pages take \d.* kB of memory, 1\.00 kB are free"),
    ):
        caches.allocate(9, {None: 4, WINDOW: 4})
    assert sizes(caches) == (0, {None: 0, WINDOW: 0}, [0] * 8)


def test_size_within_fills_memory_but_never_beyond_what_is_useful() -> None:
    caches = fixed()
    one = caches.pages_of(2000)
    assert one == {None: 8, WINDOW: 4}
    beside = caches.size(3, {WINDOW: 12})
    page = caches.page_bytes(None)
    assert size_within(caches, 2000, 3, beside + 11 * page - 1) == (3, {WINDOW: 12, None: 10})
    assert size_within(caches, 2000, 3, 1 << 40) == (3, {WINDOW: 12, None: 27})  # a snapshot may hold one of each
    stored = 2 * caches.page_bytes(WINDOW) + 1
    assert size_within(caches, 2000, 3, 1 << 40, stored) == (3, {WINDOW: 14, None: 27})
    assert size_within(caches, 2000, 3, beside + 8 * page) == (3, {WINDOW: 12, None: 8})
    with pytest.raises(
        OutOfMemory, match=r"^cache: 3 sequences, one of them with 2000 positions, need .* use at most 2 "
    ):
        size_within(caches, 2000, 3, beside + 8 * page - 1)
    with pytest.raises(OutOfMemory, match=r"need .*, 0 B are there for them; use a shorter context"):
        size_within(caches, 2000, 1, -5)
    recurrent = fixed(LAYOUTS[1])
    assert size_within(recurrent, 2000, 3, 3 * recurrent.slot_bytes) == (3, {})
    with pytest.raises(OutOfMemory, match="use at most 2 sequences"):
        size_within(recurrent, 2000, 3, 3 * recurrent.slot_bytes - 1)


def test_sequences_within_leave_room_for_a_long_one() -> None:
    caches = fixed()
    least = caches.bytes_of(2000)
    each = caches.size(1, {WINDOW: 4})
    assert [sequences_within(caches, 2000, 3, least + more) for more in (-1, 0, each, 9 * each)] == [0, 1, 2, 3]
    assert sequences_within(fixed(PagedKV(3, 2)), 2000, 3, 1 << 30) == 3


def test_size_for_load_is_one_long_sequence_and_short_ones_in_half_of_the_memory() -> None:
    caches = fixed()
    assert size_for_load(caches, 5000, 3, 1 << 40) == (3, {WINDOW: 12, None: 20 + 3 * 8})
    half = caches.size(3, {WINDOW: 12, None: 30})
    assert size_for_load(caches, 5000, 3, 2 * half) == (3, {WINDOW: 12, None: 30})
    assert size_for_load(caches, 5000, 3, caches.bytes_of(5000)) == (1, {WINDOW: 4, None: 20})


def test_size_for_batches_has_room_for_each_with_its_snapshots() -> None:
    caches = fixed()
    slots, pages = size_for_batches(caches, [(4, 100), (1, 1500)])
    assert (slots, pages) == (4, {None: 8, WINDOW: 8})
    caches.allocate(slots, pages)
    for count, positions in ((4, 100), (1, 1500)):
        sequences = [caches.open() for _ in range(count)]
        for sequence in sequences:
            write(caches, sequence, np.arange(positions / 2))
        snapshots = [caches.snapshot(sequence) for sequence in sequences]
        for sequence in sequences:
            write(caches, sequence, np.arange(positions / 2))
        for sequence, snapshot in zip(sequences, snapshots, strict=True):
            caches.drop(snapshot)
            caches.close(sequence)


# -- rows and fill ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 300, 301, 1000])
def test_fill_is_the_reverse_of_rows(length: int) -> None:
    caches, other = made(), made()
    sequence = caches.open()
    values = np.arange(1.0, length + 1)
    if length:
        write(caches, sequence, values)
    rows = [caches.rows(sequence, n) for n in range(len(LAYOUTS))]
    occupied = other.open()
    write(other, occupied, np.full(30, -1.0))
    target = other.open()
    other.fill(target, length, rows)
    holds(other, target, values)
    write(other, target, np.array([7.0]))
    holds(other, target, np.append(values, 7))
    holds(other, occupied, np.full(30, -1.0))


# -- anything, in any order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_caches_hold_what_was_written_whatever_happens(seed: int) -> None:
    """Random steps on several sequences and snapshots, against lists that say what each should hold."""
    rng = np.random.default_rng(seed)
    caches = made(PagedKV(3, 2), RecurrentState((3, 5), (2, 4, 6)), PagedKV(7, 1, WINDOW))
    live: list[tuple[Sequence, np.ndarray]] = []
    kept: list[tuple[Snapshot, np.ndarray]] = []
    counter = 0.0

    def one(items: list) -> int:
        return int(rng.integers(len(items)))

    def open_() -> None:
        live.append((caches.open(), np.empty(0)))

    def write_() -> None:
        nonlocal counter
        n = one(live)
        count = int(rng.choice([1, 2, 100, 255, 256, 300]))
        values = np.arange(counter, counter + count)
        counter += count
        write(caches, live[n][0], values)
        live[n] = live[n][0], np.concatenate([live[n][1], values])

    def snapshot_() -> None:
        sequence, values = live[one(live)]
        kept.append((caches.snapshot(sequence), values))

    def rewind_() -> None:
        if kept:
            n, (snapshot, values) = one(live), kept[one(kept)]
            caches.rewind(live[n][0], snapshot)
            live[n] = live[n][0], values

    def drop_() -> None:
        if kept:
            caches.drop(kept.pop(one(kept))[0])

    def close_() -> None:
        if len(live) > 1:
            caches.close(live.pop(one(live))[0])

    actions: list[Callable[[], None]] = [open_, write_, write_, write_, snapshot_, rewind_, drop_, close_]
    open_()
    for _ in range(120):
        actions[one(actions)]()
        for sequence, values in live:
            holds(caches, sequence, values)
    for sequence, _ in live:
        caches.close(sequence)
    for snapshot, _ in kept:
        caches.drop(snapshot)
    for pool in caches.pools.values():
        assert pool.used == 0 and all(count == 0 for count in pool.references)
        assert sorted(pool.free) == list(range(pool.capacity))
