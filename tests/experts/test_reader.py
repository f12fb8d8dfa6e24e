import errno
import gc
import mmap
import os
import threading
from concurrent.futures import CancelledError
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import BackendError, CheckpointError, InvalidArgument
from penstock.experts import disk, reader
from penstock.experts.layout import ExpertFiles, Layer, files, in_turns, stacked
from penstock.experts.reader import BLOCK, ExpertReader
from penstock.ops.array import Spec
from tests.experts.files import WIDE, layers_in, scattered, stored, write_files


@pytest.fixture(params=["pagecache", "direct", "mmap"])
def io(request, tmp_path):
    if request.param == "direct":
        needs_direct(tmp_path)
    return request.param


def needs_direct(folder: Path) -> None:
    (folder / "probe").write_bytes(bytes(BLOCK))
    try:
        descriptor = os.open(folder / "probe", os.O_RDONLY | os.O_DIRECT)
    except (OSError, AttributeError) as error:
        pytest.skip(f"no direct reads in the test folder: {error}")
    os.close(descriptor)


def space(layer: Layer, how: str) -> list[memoryview]:
    """Memory for an expert, full of 0xEE: a record on a page, one at an odd address, or arrays by themselves."""
    if how == "arrays":
        return [memoryview(np.full(spec.nbytes, 0xEE, np.uint8)) for spec in layer.format.specs]
    record = mmap.mmap(-1, layer.format.nbytes + BLOCK)
    record[:] = b"\xee" * len(record)
    return list(layer.format.views(memoryview(record)[3 if how == "odd" else 0 :]))


def contents(into: list[memoryview]) -> list[bytes]:
    return [bytes(view) for view in into]


def gaps(layer: Layer, record: memoryview) -> bytes:
    """What lies between the arrays of a record."""
    format = layer.format
    ends = [offset + spec.nbytes for offset, spec in zip(format.offsets, format.specs, strict=True)]
    return b"".join(bytes(record[a:b]) for a, b in zip(ends, [*format.offsets[1:], len(record)], strict=True))


class Faults:
    """Stands for preadv: `bend(call number, buffers)` may raise, return a number of bytes, or None for a real call."""

    def __init__(self, monkeypatch, bend):
        self.calls = 0
        self._bend, self._real = bend, reader.preadv
        monkeypatch.setattr(reader, "preadv", self)

    def __call__(self, descriptor, buffers, offset):
        self.calls += 1
        most = self._bend(self.calls, buffers)
        if most is None:
            return self._real(descriptor, buffers, offset)
        return self._real(descriptor, [memoryview(buffers[0])[:most]], offset)


# --------------------------------------------------------------------------------------------------------------------
# What comes


@pytest.mark.parametrize("how", ["page", "odd", "arrays"])
def test_every_expert_comes_as_stored(tmp_path, rng, io, how):
    layers = write_files(tmp_path, rng)
    with ExpertReader(layers, io, threads=3) as experts:
        asked = []
        for n, layer in enumerate(layers):
            for expert in range(layer.count):
                into = space(layer, how)
                asked.append((n, expert, into, experts.submit(n, expert, into)))
        for n, expert, into, future in asked:
            assert future.result() is None
            assert contents(into) == stored(layers[n], expert)
        total = sum(layer.nbytes for layer in layers)
        assert experts.counters[:2] == (17, total) and experts.counters.seconds > 0
        assert experts.io == io


def test_read_is_the_same_in_this_thread(tmp_path, rng, io):
    layers = write_files(tmp_path, rng)
    before = threading.active_count()
    with ExpertReader(layers, io) as experts:
        into = space(layers[2], "arrays")
        experts.read(2, 1, into)
        assert contents(into) == stored(layers[2], 1)
        assert threading.active_count() == before


def test_arrays_that_are_neighbours_are_read_together(tmp_path, rng, io, monkeypatch):
    layer = scattered(tmp_path / "alone.bin", rng)
    with ExpertReader([layer], io) as experts:
        calls = Faults(monkeypatch, lambda *_: None)
        for expert in range(layer.count):
            into = space(layer, "page")
            experts.read(0, expert, into)
            assert contents(into) == stored(layer, expert)
        assert calls.calls == (0 if io == "mmap" else layer.count)


@pytest.mark.parametrize("how", ["page", "odd"])
def test_what_lies_between_the_arrays_of_a_record_is_left_alone(tmp_path, rng, io, how):
    specs, step = WIDE[:3], 221_184
    path = tmp_path / "records.bin"
    path.write_bytes(rng.bytes(BLOCK + 3 * step))
    offsets = Layer("", tuple(stacked(path, 0, 1, spec) for spec in specs)).format.offsets
    parts = (stacked(path, BLOCK + offset, 3, spec, step) for spec, offset in zip(specs, offsets, strict=True))
    layer = Layer("records", tuple(parts))
    memory = memoryview(mmap.mmap(-1, layer.format.nbytes + BLOCK))[3 if how == "odd" else 0 :][: layer.format.nbytes]
    memory[:] = b"\xee" * len(memory)
    with ExpertReader([layer], io) as experts:
        into = layer.format.views(memory)
        experts.read(0, 1, into)
        assert contents(list(into)) == stored(layer, 1)
    assert set(gaps(layer, memory)) == {0xEE}


def test_direct_blocks_land_where_they_belong(tmp_path, rng, monkeypatch):
    needs_direct(tmp_path)
    spec = WIDE[0]
    (tmp_path / "a").write_bytes(rng.bytes(BLOCK + spec.nbytes))
    layer = Layer("one", (stacked(tmp_path / "a", BLOCK, 1, spec),))
    landed = {}
    with ExpertReader([layer], "direct") as experts:

        def note(call, buffers):
            landed[call] = [len(buffer) for buffer in buffers]

        Faults(monkeypatch, note)
        experts.read(0, 0, into := space(layer, "page"))
        experts.read(0, 0, odd := space(layer, "odd"))
    assert contents(into) == contents(odd) == stored(layer, 0)
    whole = spec.nbytes // BLOCK * BLOCK
    assert landed == {1: [whole, BLOCK], 2: [whole + BLOCK]}  # the end of the array shares its block; an odd one all


def test_direct_reads_of_more_than_a_thread_keeps(tmp_path, rng, monkeypatch):
    needs_direct(tmp_path)
    monkeypatch.setattr(reader, "BOUNCE", 3 * BLOCK)
    layers = write_files(tmp_path, rng)
    with ExpertReader(layers, "direct") as experts:
        calls = Faults(monkeypatch, lambda *_: None)
        for how in ("odd", "page"):
            experts.read(0, 4, into := space(layers[0], how))
            assert contents(into) == stored(layers[0], 4)
        assert calls.calls >= WIDE[0].nbytes // (3 * BLOCK)


def test_direct_reads_where_memory_takes_no_blocks(tmp_path, rng, monkeypatch):
    needs_direct(tmp_path)
    layers = write_files(tmp_path, rng, start=2 * BLOCK)
    with ExpertReader(layers, "direct") as experts:

        def refuse(call, buffers):
            if call == 1:
                raise OSError(errno.EFAULT, "Bad address")

        calls = Faults(monkeypatch, refuse)
        for _ in range(2):
            experts.read(0, 0, into := space(layers[0], "page"))
            assert contents(into) == stored(layers[0], 0)
        assert not experts._way._lands  # type: ignore[attr-defined]
        assert calls.calls == 4 + 3  # the first array once more, by the plain way


# --------------------------------------------------------------------------------------------------------------------
# What goes wrong


@pytest.mark.parametrize("most", [1000, BLOCK])
def test_short_reads_go_on(tmp_path, rng, io, most, monkeypatch):
    layer = scattered(tmp_path / "alone.bin", rng)  # several arrays in one call
    with ExpertReader([layer], io) as experts:
        Faults(monkeypatch, lambda call, buffers: min(most, len(buffers[0])))
        experts.read(0, 3, into := space(layer, "arrays"))
    assert contents(into) == stored(layer, 3)


@pytest.mark.parametrize("code", [errno.EINTR, errno.EIO, errno.EAGAIN])
def test_errors_that_go_away_are_not_seen(tmp_path, rng, io, code, monkeypatch):
    monkeypatch.setattr(reader, "_PAUSES", (0, 0))
    layers = write_files(tmp_path, rng)
    with ExpertReader(layers, io) as experts:

        def fail(call, buffers):
            if call in (1, 2):
                raise OSError(code, os.strerror(code))

        Faults(monkeypatch, fail)
        experts.read(1, 8, into := space(layers[1], "odd"))
    assert contents(into) == stored(layers[1], 8)


@pytest.mark.parametrize("io", ["pagecache", "direct"])
def test_an_error_that_stays_ends_that_read_only(tmp_path, rng, io, monkeypatch):
    if io == "direct":
        needs_direct(tmp_path)
    monkeypatch.setattr(reader, "_PAUSES", (0, 0))
    layers = write_files(tmp_path, rng)
    with ExpertReader(layers, io, threads=2) as experts:
        bad = [False]

        def fail(call, buffers):
            if bad[0]:
                raise OSError(errno.EIO, "Input/output error")

        calls = Faults(monkeypatch, fail)
        bad[0] = True
        future = experts.submit(0, 1, space(layers[0], "arrays"))
        start = layers[0].extents(1)[0].start
        with pytest.raises(CheckpointError, match=rf"one\.bin: cannot be read at byte {start}: Input/output error$"):
            future.result()
        assert calls.calls == (3 if io == "pagecache" else 4)
        bad[0] = False
        into = space(layers[0], "arrays")
        experts.submit(0, 1, into).result()
        assert contents(into) == stored(layers[0], 1)


def test_a_file_that_was_shortened(tmp_path, rng, io):
    layers = write_files(tmp_path, rng)
    last = layers[2].extents(2)[2]
    with ExpertReader(layers, io) as experts:
        experts.read(2, 0, space(layers[2], "arrays"))
        os.truncate(last.path, last.start + 100)
        with pytest.raises(
            CheckpointError, match=r"two\.bin: (ends at byte \d+, expected \d+|has \d+ bytes, expected)"
        ):
            experts.read(2, 2, space(layers[2], "arrays"))
        if io != "mmap":  # what is there can still be read, and other files anyway
            experts.read(2, 0, into := space(layers[2], "arrays"))
            assert contents(into) == stored(layers[2], 0)
        experts.read(0, 0, into := space(layers[0], "arrays"))
        assert contents(into) == stored(layers[0], 0)


def test_a_file_that_was_too_short_from_the_start(tmp_path, rng, io):
    layers = write_files(tmp_path, rng)
    last = layers[2].extents(2)[2]
    os.truncate(last.path, last.start + 100)
    with ExpertReader(layers, io) as experts:
        wanted = rf"two\.bin: ends at byte {last.start + 100}, expected {last.start + last.nbytes} or more"
        with pytest.raises(CheckpointError, match=wanted):
            experts.read(2, 2, space(layers[2], "arrays"))


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def write(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # the clock of a file system may not have moved on


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    status = path.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize(
    "change, found", [(shorten, "has .* bytes, expected the"), (write, "was written"), (replace, "was replaced")]
)
def test_check_finds_what_happened_to_a_file(tmp_path, rng, change, found):
    layers = write_files(tmp_path, rng)
    with ExpertReader(layers, "pagecache") as experts:
        experts.check()
        change(tmp_path / "two.bin")
        with pytest.raises(CheckpointError, match=rf"two\.bin: {found}.* since it was opened; load the model again"):
            experts.check()


def test_a_removed_file_is_read_on(tmp_path, rng, io):
    layers = write_files(tmp_path, rng)
    want = stored(layers[2], 1)
    with ExpertReader(layers, io) as experts:
        (tmp_path / "two.bin").unlink()
        experts.check()
        experts.read(2, 1, into := space(layers[2], "arrays"))
        assert contents(into) == want


def test_a_missing_file_is_named_and_nothing_stays_open(tmp_path, rng):
    layers = write_files(tmp_path, rng)
    (tmp_path / "two.bin").unlink()
    with pytest.raises(CheckpointError, match=r"two\.bin: no such file"):
        ExpertReader(layers, "pagecache")
    assert not descriptors(tmp_path)


@pytest.mark.parametrize(
    "layer, expert, sizes, found",
    [
        (3, 0, None, "layer is 3, expected 0 to 2"),
        (-1, 0, None, "layer is -1, expected 0 to 2"),
        (1, 9, None, "layers.1.experts: expert is 9, expected 0 to 8"),
        (1, -1, None, "layers.1.experts: expert is -1, expected 0 to 8"),
        (1, 0, [21], "memory for an expert has .21. bytes, expected .21, 5120."),
        (1, 0, [21, 5121], "memory for an expert has .21, 5121. bytes, expected .21, 5120."),
    ],
)
def test_wrong_arguments_are_refused_at_once(tmp_path, rng, layer, expert, sizes, found):
    layers = write_files(tmp_path, rng)
    with ExpertReader(layers, "pagecache") as experts:
        into = [memoryview(bytearray(size)) for size in sizes or (21, 5120)]
        for call in (experts.submit, experts.read):
            with pytest.raises(InvalidArgument, match=found):
                call(layer, expert, into)
        with pytest.raises(InvalidArgument, match="memory for an expert has"):  # not bytes
            experts.read(1, 0, [memoryview(np.zeros(21, np.uint8)), memoryview(np.zeros(1280, np.uint32))])


def test_wrong_settings_are_refused():
    with pytest.raises(InvalidArgument, match="expert io is 'fast', expected one of auto, direct, pagecache, mmap"):
        ExpertReader([], "fast")
    with pytest.raises(InvalidArgument, match="reading threads are 0, expected at least 1"):
        ExpertReader([], threads=0)


def test_a_forked_process_is_told_to_spawn(tmp_path, rng):
    layers = write_files(tmp_path, rng)
    with ExpertReader(layers, "pagecache") as experts:
        experts.submit(0, 0, space(layers[0], "arrays")).result()
        child = os.fork()
        if child == 0:
            told = 0
            for call in (experts.submit, experts.read):
                try:
                    call(0, 0, space(layers[0], "arrays"))
                except BackendError as error:
                    told += "start processes with the spawn method" in str(error)
            experts.close()
            os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        experts.read(0, 1, into := space(layers[0], "arrays"))  # the child's close has closed nothing here
        assert contents(into) == stored(layers[0], 1)


# --------------------------------------------------------------------------------------------------------------------
# The end


def descriptors(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except OSError:
            continue
    return [path for path in found if path.startswith(str(folder))]


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-experts")]


def test_close_ends_threads_and_closes_files(tmp_path, rng, io):
    layers = write_files(tmp_path, rng)
    experts = ExpertReader(layers, io, threads=3)
    for future in [experts.submit(0, n % 5, space(layers[0], "arrays")) for n in range(12)]:
        future.result()
    assert own_threads() and descriptors(tmp_path)
    experts.close()
    experts.close()
    assert not own_threads() and not descriptors(tmp_path)
    for call in (experts.submit, experts.read):
        with pytest.raises(BackendError, match="experts cannot be read any more"):
            call(0, 0, space(layers[0], "arrays"))
    with pytest.raises(BackendError, match="experts cannot be read any more"):
        _ = experts.bandwidth


def test_close_cancels_what_has_not_begun(tmp_path, rng, monkeypatch):
    layers = write_files(tmp_path, rng)
    experts, began, go = ExpertReader(layers, "pagecache", threads=1), threading.Event(), threading.Event()

    def wait(call, buffers):
        began.set()
        go.wait(10)

    Faults(monkeypatch, wait)
    first = experts.submit(1, 0, into := space(layers[1], "arrays"))
    second = experts.submit(1, 1, space(layers[1], "arrays"))
    began.wait(10)
    closing = threading.Thread(target=experts.close)
    closing.start()
    while not second.cancelled():
        pass
    go.set()
    closing.join()
    first.result()
    assert contents(into) == stored(layers[1], 0)
    with pytest.raises(CancelledError):
        second.result()


def test_a_forgotten_reader_leaves_nothing(tmp_path, rng, io):
    layers = write_files(tmp_path, rng)
    experts = ExpertReader(layers, io)
    started = experts.submit(0, 0, space(layers[0], "arrays"))
    started.result()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("penstock-experts")]
    del experts, started
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert not own_threads() and not descriptors(tmp_path)


# --------------------------------------------------------------------------------------------------------------------
# Choosing


@pytest.fixture
def rates(monkeypatch):
    """Experts larger than memory, and bandwidths by way that are not measured but set."""
    found: dict[str, float] = {}
    monkeypatch.setattr(disk, "stays_in_memory", lambda nbytes: False)
    monkeypatch.setattr(disk, "bandwidth", lambda key, *_: found[key[0]])
    return found


def no_direct(monkeypatch):
    real = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("faster, slower", [("direct", "pagecache"), ("pagecache", "direct")])
def test_auto_takes_the_faster_way(tmp_path, rng, rates, faster, slower):
    needs_direct(tmp_path)
    rates |= {faster: 3e9, slower: 2e9}
    with ExpertReader(write_files(tmp_path, rng)) as experts:
        assert experts.io == faster and experts.bandwidth == 3e9


def test_auto_takes_the_page_cache_where_experts_stay_in_it(tmp_path, rng, rates, monkeypatch):
    asked = []
    monkeypatch.setattr(disk, "stays_in_memory", lambda nbytes: asked.append(nbytes) or True)
    layers = write_files(tmp_path, rng)
    with ExpertReader(layers) as experts:
        assert experts.io == "pagecache"
    assert asked == [sum(layer.nbytes for layer in layers)]


def test_direct_that_the_file_system_refuses(tmp_path, rng, rates, monkeypatch):
    layers = write_files(tmp_path, rng)
    no_direct(monkeypatch)
    with ExpertReader(layers) as experts:
        assert experts.io == "pagecache"
    with pytest.raises(
        CheckpointError, match=r"one\.bin: direct reads are refused here \(Invalid argument\), expected"
    ):
        ExpertReader(layers, "direct")
    assert not descriptors(tmp_path)


def test_bandwidth_is_measured_once_per_device(tmp_path, rng, io, monkeypatch):
    monkeypatch.setattr(disk, "_known", {})
    layers = write_files(tmp_path, rng)
    with ExpertReader(layers, io) as experts:
        rate = experts.bandwidth
        assert 0 < rate < 1e12
        assert experts.counters.reads == 0
    monkeypatch.setattr(disk, "_measured", lambda *_: pytest.fail("measured again"))
    with ExpertReader(layers[:1], io) as experts:
        assert experts.bandwidth == rate


def test_a_measurement_reads_no_experts_of_other_ranks(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(disk, "bandwidth", lambda key, read, count, threads: sum(map(read, range(count))))
    layers = write_files(tmp_path, rng)
    assert min(layer.count for layer in layers) > 2
    for owned in ((0, 2), ()):
        with ExpertReader(layers, "pagecache", owned=owned) as experts:
            assert experts.bandwidth == sum(len(owned) * layer.format.payload for layer in layers)


def test_a_measurement_reads_every_expert_once():
    seen = []
    rate = disk._measured(lambda number: seen.append(number) or 10, 7, threads=3)
    assert sorted(seen) == list(range(7)) and rate > 0


def test_a_measurement_ends_when_its_time_is_over(monkeypatch):
    monkeypatch.setattr(disk, "SECONDS", 0)
    assert disk._measured(lambda number: pytest.fail("read"), 7, threads=2) == 0


def test_stays_in_memory_leaves_half_of_it(monkeypatch):
    monkeypatch.setattr(disk, "memory", lambda reclaim: (1000, 500))
    assert disk.stays_in_memory(250) and not disk.stays_in_memory(251)


# --------------------------------------------------------------------------------------------------------------------
# Places


def test_files_names_each_file_once(tmp_path, rng):
    layers = [*layers_in(tmp_path), scattered(tmp_path / "alone.bin", rng)]
    assert files(layers) == [tmp_path / "one.bin", tmp_path / "two.bin", tmp_path / "alone.bin"]


def test_stacked_places_may_lie_apart(tmp_path):
    part = stacked(tmp_path / "a", 100, 4, WIDE[1], step=512)
    assert [extent.start for extent in part.extents] == [100, 612, 1124, 1636]
    assert {b.start - a.start for a, b in pairwise(stacked(tmp_path / "a", 0, 3, WIDE[1]).extents)} == {WIDE[1].nbytes}


def test_rows_that_lie_in_turns_are_dealt_apart(tmp_path, rng, io):
    """Two arrays of 7 rows each, of words and of odd bytes, beside one that lies alone; several blocks of a disk."""
    E, N = 3, 7
    words, odd, alone = Spec((2 * N, 1501), "uint32"), Spec((2 * N, 13), "uint8"), Spec((5, 3), "bfloat16")
    path, at, parts = tmp_path / "x.bin", 11, []
    for spec in (words, odd, alone):
        parts.append(stacked(path, at, E, spec))
        at += E * spec.nbytes
    path.write_bytes(rng.bytes(at + 9))
    both = ExpertFiles("layers.0.experts.gate_up_proj", None, tuple(parts[:2]))
    first, second = in_turns(both)
    layer = Layer("layers.0.experts", (*first.parts, *second.parts, parts[2]))
    assert [part.spec.shape[0] for part in layer.parts] == [N, N, N, N, 5]
    with ExpertReader([layer], io) as reader:
        assert reader.bandwidth > 0
        for expert in (2, 0, 1):
            got = [np.full(part.spec.nbytes, 7, np.uint8) for part in layer.parts]
            reader.submit(0, expert, [array.data for array in got]).result()
            for number, part in enumerate((*parts[:2], *parts[:2], parts[2])):
                extent = part.extents[expert]
                want = np.frombuffer(path.read_bytes()[extent.start : extent.start + extent.nbytes], np.uint8)
                if number < 4:
                    want = want.reshape(N, 2, -1)[:, number // 2].reshape(-1)
                np.testing.assert_array_equal(got[number], want)
