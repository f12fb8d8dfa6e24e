import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.errors import CheckpointError
from penstock.experts import packed, reader
from penstock.experts.layout import Layer
from penstock.experts.packed import open_packed, verify_packed, write_packed
from penstock.experts.reader import ExpertReader
from tests.experts.files import stored, write_files

MODEL = "ab" * 32  # a fingerprint


@pytest.fixture
def layers(tmp_path, rng):
    return write_files(tmp_path, rng)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "experts.penstock"


@pytest.fixture
def part(tmp_path):
    return tmp_path / "experts.penstock.part"


def read_all(layers: list[Layer], io: str) -> list[list[bytes]]:
    found = []
    with ExpertReader(layers, io) as experts:
        for n, layer in enumerate(layers):
            for expert in range(layer.count):
                into = layer.format.views(memoryview(bytearray(layer.format.nbytes)))
                experts.read(n, expert, into)
                found.append([bytes(view) for view in into])
    return found


def all_stored(layers: list[Layer]) -> list[list[bytes]]:
    return [stored(layer, expert) for layer in layers for expert in range(layer.count)]


def interrupted(layers: list[Layer], target: Path, at: int, error: BaseException, **options) -> None:
    """Pack until `at` records were reported, then raise."""
    calls = iter(range(10**6))

    def stop(done, total):
        if next(calls) == at:
            raise error

    with pytest.raises(type(error)):
        write_packed(layers, MODEL, target, stop, **options)


# --------------------------------------------------------------------------------------------------------------------
# Whole files


@pytest.mark.parametrize("io", ["pagecache", "mmap", "direct"])
def test_packed_experts_are_those_of_the_model(layers, target, part, io):
    write_packed(layers, MODEL, target)
    assert not part.exists()
    found = open_packed(target, layers, MODEL)
    assert [(layer.name, layer.format, layer.count) for layer in found] == [
        (layer.name, layer.format, layer.count) for layer in layers
    ]
    if io == "direct":
        try:
            ExpertReader(found, io).close()
        except CheckpointError as error:
            pytest.skip(str(error))
    assert read_all(found, io) == all_stored(layers)
    assert verify_packed(target) == 17


def test_an_expert_is_one_aligned_read(layers, target, monkeypatch):
    write_packed(layers, MODEL, target)
    found = open_packed(target, layers, MODEL)
    calls = []
    real = reader.preadv
    monkeypatch.setattr(reader, "preadv", lambda fd, buffers, offset: calls.append(offset) or real(fd, buffers, offset))
    read_all(found, "pagecache")
    assert len(calls) == len(set(calls)) == 17
    assert all(offset % 4096 == 0 for offset in calls)
    assert target.stat().st_size % 4096 == 0


def test_progress_counts_the_bytes_of_records(layers, target):
    told: list[tuple[int, int]] = []
    write_packed(layers, MODEL, target, lambda *both: told.append(both))
    checked: list[tuple[int, int]] = []
    verify_packed(target, lambda *both: checked.append(both))
    assert told == checked and len(told) == 18
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] < target.stat().st_size
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def test_packing_twice_gives_the_same_bytes(layers, target, tmp_path):
    write_packed(layers, MODEL, target)
    write_packed(layers, MODEL, tmp_path / "other.penstock")
    first = target.read_bytes()
    assert first == (tmp_path / "other.penstock").read_bytes()
    write_packed(layers, MODEL, target)  # replaces it
    assert first == target.read_bytes()


READ = """
import sys, hashlib
from pathlib import Path
from penstock.experts.packed import open_packed
from tests.experts.files import layers_in
from tests.experts.test_packed import MODEL, read_all
folder = Path(sys.argv[1])
layers = open_packed(folder / "experts.penstock", layers_in(folder), MODEL)
for _ in range(3):
    found = read_all(layers, "auto")
print(hashlib.sha256(repr(found).encode()).hexdigest())
"""


def child(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def test_two_processes_and_two_readers_share_a_file(layers, target, tmp_path):
    write_packed(layers, MODEL, target)
    found = open_packed(target, layers, MODEL)
    others = [child(READ, tmp_path) for _ in range(2)]
    with ExpertReader(found, "pagecache") as one, ExpertReader(found, "mmap") as two:
        for expert in range(5):
            spaces = [[memoryview(bytearray(spec.nbytes)) for spec in found[0].format.specs] for _ in range(2)]
            futures = [each.submit(0, expert, into) for each, into in zip((one, two), spaces, strict=True)]
            for future in futures:
                future.result()
            assert [bytes(a) for a in spaces[0]] == [bytes(b) for b in spaces[1]] == stored(layers[0], expert)
    want = hashlib.sha256(repr(all_stored(layers)).encode()).hexdigest()
    for other in others:
        out, err = other.communicate()
        assert (out.strip(), err) == (want, "")


# --------------------------------------------------------------------------------------------------------------------
# Interrupted


PACK = """
import sys, time
from pathlib import Path
from penstock.experts import packed
from tests.experts.files import layers_in

def told(done, total):
    print("record", flush=True)
    time.sleep(0.05)

packed._SYNC = 1  # count every record
folder = Path(sys.argv[1])
packed.write_packed(layers_in(folder), sys.argv[2], folder / "experts.penstock", told)
"""


def test_killed_at_any_moment_it_goes_on_to_the_same_file(layers, target, part, tmp_path):
    write_packed(layers, MODEL, target)
    want = target.read_bytes()
    target.unlink()
    moments, counted = random.Random(4), []
    for _ in range(4):
        process = child(PACK, tmp_path, MODEL)
        assert process.stdout is not None
        for _ in range(moments.randrange(1, 4)):
            assert process.stdout.readline() == "record\n"
        time.sleep(moments.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert part.exists() and not target.exists()
        counted.append(vouched(part))
    assert counted == sorted(counted) and counted[-1] > 0  # what was counted once is not done again
    told = []
    write_packed(layers, MODEL, target, lambda done, total: told.append(done))
    assert told[0] > 0 and len(told) == 18 - counted[-1]
    assert target.read_bytes() == want
    assert not part.exists()


def vouched(part: Path) -> int:
    return int.from_bytes(part.read_bytes()[72:80], "little")


@pytest.mark.parametrize("at", [1, 6, 17])
def test_an_interrupted_run_goes_on_where_it_was(layers, target, part, at):
    write_packed(layers, MODEL, target)
    want = target.read_bytes()
    target.unlink()
    interrupted(layers, target, at, KeyboardInterrupt())
    assert part.exists() and not target.exists()
    assert vouched(part) == at
    told = []
    write_packed(layers, MODEL, target, lambda done, total: told.append(done))
    assert len(told) == 18 - at and (told[0] > 0 or at == 0)
    assert target.read_bytes() == want and not part.exists()


def test_records_that_are_not_vouched_for_are_written_again(layers, target, part):
    write_packed(layers, MODEL, target)
    want = target.read_bytes()
    interrupted(layers, target.with_name("experts2.penstock"), 9, KeyboardInterrupt())
    begun = target.with_name("experts2.penstock.part")
    header, _ = packed._read_header(packed.MappedFile(target))
    damaged = bytearray(want[: header.size])
    damaged[: header.start] = begun.read_bytes()[: header.start]
    for record in range(9, 17):  # as after a power failure: blocks that never reached the disk
        place = header.place(record)
        damaged[place.start : place.stop] = bytes(place.stop - place.start)
    part.write_bytes(damaged)
    target.unlink()
    write_packed(layers, MODEL, target)
    assert target.read_bytes() == want


def test_killed_between_the_last_record_and_the_name(layers, target, part):
    write_packed(layers, MODEL, target)
    want = target.read_bytes()
    target.rename(part)
    told = []
    write_packed(layers, MODEL, target, lambda done, total: told.append(done == total))
    assert told == [True]
    assert target.read_bytes() == want


def begun_anew(layers: list[Layer], target: Path) -> bool:
    told = []
    write_packed(layers, MODEL, target, lambda done, total: told.append(done))
    assert read_all(open_packed(target, layers, MODEL), "pagecache") == all_stored(layers)
    verify_packed(target)
    return told[0] == 0 and len(told) == 18


def other_model(layers, part):
    status = part.with_name("one.bin").stat()
    os.utime(part.with_name("one.bin"), ns=(0, status.st_mtime_ns + 1))  # a header of the same length


def cut(layers, part):
    os.truncate(part, part.stat().st_size // 2)


def cut_in_the_header(layers, part):
    os.truncate(part, 100)


def wrong_count(layers, part):
    with part.open("r+b") as file:
        file.seek(72)
        file.write((17).to_bytes(8, "little"))


def nonsense(layers, part):
    part.write_bytes(b"\xff" * 100_000)


@pytest.mark.parametrize("change", [other_model, cut, cut_in_the_header, wrong_count, nonsense])
def test_an_unfinished_file_that_does_not_fit_is_begun_anew(layers, target, part, change):
    interrupted(layers, target, 12, KeyboardInterrupt())
    change(layers, part)
    assert begun_anew(layers, target)


def test_resume_may_be_declined(layers, target):
    interrupted(layers, target, 12, KeyboardInterrupt())
    told = []
    write_packed(layers, MODEL, target, lambda done, total: told.append(done), resume=False)
    assert len(told) == 18 and told[0] == 0


def test_only_one_process_packs(layers, target, part, tmp_path):
    def meanwhile(done, total):
        with pytest.raises(CheckpointError, match=r"experts\.penstock\.part: another process is writing it"):
            write_packed(layers, MODEL, target)
        if not tried:
            _, err = (other := child(PACK, tmp_path, MODEL)).communicate()
            assert other.returncode == 1 and "another process is writing it" in err
            tried.append(True)

    tried: list[bool] = []
    write_packed(layers, MODEL, target, meanwhile)
    assert verify_packed(target) == 17 and not part.exists()


def test_a_file_that_was_renamed_while_the_lock_was_awaited_is_not_touched(layers, target, part, monkeypatch):
    real, done = packed.fcntl.flock, []

    def late(descriptor, how):  # the other process completes and renames between our opening and our lock
        if not done:
            done.append(True)
            monkeypatch.setattr(packed.fcntl, "flock", real)
            part.unlink()
            write_packed(layers, MODEL, target)
            done.append(target.stat().st_ino)
        real(descriptor, how)

    monkeypatch.setattr(packed.fcntl, "flock", late)
    write_packed(layers, MODEL, target)
    assert verify_packed(target) == 17 and not part.exists()


# --------------------------------------------------------------------------------------------------------------------
# What cannot be written or read


def test_a_full_disk(layers, target, part, monkeypatch):
    real, calls = os.pwrite, []

    def full(descriptor, data, offset):
        if len(data) > 8192 and len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        calls.append(offset)
        return real(descriptor, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        found = (
            r"\.part: cannot be written: No space left on device \(.* are needed\); it is kept, and packing again goes"
        )
        with pytest.raises(CheckpointError, match=found):
            write_packed(layers, MODEL, target)
    assert part.exists() and not target.exists()
    write_packed(layers, MODEL, target)
    assert verify_packed(target) == 17


def test_a_limit_of_the_file_size(layers, target, part, tmp_path):
    script = PACK.replace(
        "print(", "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (600_000,) * 2); print("
    )
    process = child(script, tmp_path, MODEL)
    _, err = process.communicate()
    assert process.returncode == 1
    assert "CheckpointError" in err and "experts.penstock.part: cannot be written: File too large" in err
    assert not target.exists() and 0 < vouched(part) < 5
    write_packed(layers, MODEL, target)
    assert verify_packed(target) == 17


def test_short_writes_go_on(layers, target, monkeypatch):
    real = os.pwrite
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda fd, data, at: real(fd, memoryview(data)[:5000], at))
        write_packed(layers, MODEL, target)
    assert verify_packed(target) == 17
    assert read_all(open_packed(target, layers, MODEL), "pagecache") == all_stored(layers)


def test_too_little_room_is_told_before(layers, target, part, monkeypatch):
    class Disk:
        f_bavail, f_frsize = 10, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Disk)
    with pytest.raises(CheckpointError, match="1.7. MiB are needed for the packed experts, but 40.00 KiB are free"):
        write_packed(layers, MODEL, target)
    assert not part.exists()


def test_a_folder_that_takes_no_files(layers, target, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="absent: cannot be written: No such file or directory"):
        write_packed(layers, MODEL, tmp_path / "absent" / "experts.penstock")
    real = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=r"experts\.penstock\.part: cannot be written: Read-only file system"):
        write_packed(layers, MODEL, target)


def test_other_files_are_not_replaced(layers, tmp_path):
    before = (tmp_path / "one.bin").read_bytes()
    with pytest.raises(CheckpointError, match=r"one\.bin: is there and no packed expert file; it is not replaced"):
        write_packed(layers, MODEL, tmp_path / "one.bin")
    assert (tmp_path / "one.bin").read_bytes() == before
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="folder: is a folder"):
        write_packed(layers, MODEL, tmp_path / "folder")
    (tmp_path / "x.part").mkdir()
    with pytest.raises(CheckpointError, match=r"x\.part: cannot be written: Is a directory"):
        write_packed(layers, MODEL, tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "one.bin", "two.bin", "x.part"]


def test_a_source_that_ends_early(layers, target, part, tmp_path):
    last = layers[2].extents(2)[2]
    os.truncate(last.path, last.start + 10)
    with pytest.raises(CheckpointError, match=rf"two\.bin: ends at byte {last.start + 10}, expected"):
        write_packed(layers, MODEL, target)
    assert part.exists() and not target.exists()


def test_a_source_that_changes_meanwhile(layers, target, part, tmp_path):
    def change(done, total):
        os.utime(tmp_path / "one.bin", ns=(5, 5))

    with pytest.raises(CheckpointError, match="the model changed while it was packed; pack it again"):
        write_packed(layers, MODEL, target, change)
    assert not target.exists()
    assert begun_anew(layers, target)


def test_a_model_without_experts(target):
    with pytest.raises(CheckpointError, match="has no experts to pack"):
        write_packed([], MODEL, target)


# --------------------------------------------------------------------------------------------------------------------
# Files that do not fit


def test_open_says_why_a_file_does_not_fit(layers, target, tmp_path, rng):
    with pytest.raises(CheckpointError, match=r"experts\.penstock: no such file"):
        open_packed(target, layers, MODEL)
    write_packed(layers, MODEL, target)
    with pytest.raises(CheckpointError, match="was packed from another model; run `penstock pack` again"):
        open_packed(target, layers, "cd" * 32)
    with pytest.raises(CheckpointError, match="has other layers than the model"):
        open_packed(target, layers[:2], MODEL)
    with pytest.raises(CheckpointError, match="has other layers than the model"):
        open_packed(target, layers[::-1], MODEL)
    content = (tmp_path / "two.bin").read_bytes()
    (tmp_path / "two.bin").write_bytes(content + b"x")
    with pytest.raises(CheckpointError, match=r"was packed before 'two\.bin' changed"):
        open_packed(target, layers, MODEL)


def test_open_sees_a_source_written_in_place(layers, target, tmp_path):
    write_packed(layers, MODEL, target)
    status = (tmp_path / "one.bin").stat()
    os.utime(tmp_path / "one.bin", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(CheckpointError, match=r"was packed before 'one\.bin' changed"):
        open_packed(target, layers, MODEL)


def test_an_unfinished_file_under_the_name(layers, target, part):
    interrupted(layers, target, 3, KeyboardInterrupt())
    part.rename(target)
    with pytest.raises(CheckpointError, match="is not finished"):
        open_packed(target, layers, MODEL)


@pytest.mark.parametrize(
    "content, found",
    [
        (b"", "has 0 bytes, expected a packed expert file"),
        (b"PENSTOCK", "has 8 bytes, expected a packed expert file"),
        (bytes(200), "starts with .*, expected a packed expert file"),
        (b"PENSTOCK" + b"\x02" + bytes(200), "has version 2, expected 1"),
        (b"PENSTOCK" + b"\x01" + bytes(200), "has 209 bytes, expected 0: was it copied completely"),
    ],
)
def test_files_that_are_something_else(layers, target, content, found):
    target.write_bytes(content)
    for call in (lambda: open_packed(target, layers, MODEL), lambda: verify_packed(target)):
        with pytest.raises(CheckpointError, match=found):
            call()


def test_a_file_of_another_length(layers, target):
    write_packed(layers, MODEL, target)
    size = target.stat().st_size
    for length in (size - 1, size + 1, size - 4096, 4096, 130):
        os.truncate(target, length)
        with pytest.raises(CheckpointError, match=f"has {length} bytes, expected {size}: was it copied completely"):
            open_packed(target, layers, MODEL)


def test_every_flipped_bit_of_the_header_is_seen(layers, target):
    write_packed(layers, MODEL, target)
    header, _ = packed._read_header(packed.MappedFile(target))
    bits = random.Random(1)
    with target.open("r+b", buffering=0) as file:
        for at in range(header.start):
            byte = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << bits.randrange(8)]), at)
            with pytest.raises(CheckpointError, match="header is damaged|version|expected a packed|bytes, expected"):
                open_packed(target, layers, MODEL)
            os.pwrite(file.fileno(), byte, at)
    open_packed(target, layers, MODEL)


def test_a_flipped_bit_of_a_record_is_found(layers, target):
    write_packed(layers, MODEL, target)
    header, _ = packed._read_header(packed.MappedFile(target))
    for record, name in (
        (0, "0 of 'layers.0.experts'"),
        (9, "4 of 'layers.1.experts'"),
        (16, "2 of 'layers.2.experts'"),
    ):
        place = header.place(record)
        for at in (place.start, place.start + 70, place.stop - 1):
            with target.open("r+b", buffering=0) as file:
                byte = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), at)
                with pytest.raises(
                    CheckpointError, match=rf"expert {name} is damaged; run `penstock pack` with --force"
                ):
                    verify_packed(target)
                os.pwrite(file.fileno(), byte, at)
    assert verify_packed(target) == 17


@pytest.mark.parametrize("io", ["pagecache", "mmap"])
def test_a_record_is_compared_with_its_hash_when_it_is_first_read(layers, target, io):
    write_packed(layers, MODEL, target)
    header, _ = packed._read_header(packed.MappedFile(target))
    found = open_packed(target, layers, MODEL)
    into = [layer.format.views(memoryview(bytearray(layer.format.nbytes))) for layer in layers]
    with ExpertReader(found, io) as experts, target.open("r+b", buffering=0) as file:
        experts.submit(1, 4, into[1]).result()

        def flip(record: int) -> None:
            at = header.place(record).start + 70
            os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, at)[0] ^ 4]), at)

        flip(9)
        experts.submit(1, 4, into[1]).result()  # once is enough: `check` sees a file that is written to
        flip(9)
        flip(16)
        with pytest.raises(CheckpointError, match=r"experts.penstock: expert 2 of 'layers.2.experts' is damaged"):
            experts.submit(2, 2, into[2]).result()
        experts.submit(2, 1, into[2]).result()
        flip(16)
        experts.submit(2, 2, into[2]).result()
        assert [bytes(view) for view in into[2]] == stored(layers[2], 2)


def forged(value: object, records: int, size: int) -> bytes:
    """A file whose header has any text and the right hash."""
    text = json.dumps(value).encode()
    start = -(-(128 + len(text) + 16 * records) // 4096) * 4096
    rest = text + bytes(start - 128 - len(text))
    fixed = b"PENSTOCK" + b"".join(n.to_bytes(8, "little") for n in (1, len(text), records, size))
    return fixed + hashlib.sha256(fixed + rest).digest() + bytes(56) + rest


GOOD = {"fingerprint": MODEL, "sources": [["one.bin", 5, 6]], "formats": [[["uint8", [16]]]], "layers": [["a", 2, 0]]}


def test_a_forged_header_that_is_right_is_read(layers, target):
    target.write_bytes(forged(GOOD, 2, 3 * 4096) + bytes(2 * 4096))
    with pytest.raises(CheckpointError, match="expert 0 of 'a' is damaged"):
        verify_packed(target)


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": 3},
        {"sources": []},
        {"sources": {}},
        {"sources": [["one.bin", 5]]},
        {"sources": [["one.bin", -5, 6]]},
        {"formats": [[["float8", [16]]]]},
        {"formats": [[["uint8", [-16]]]]},
        {"formats": [[["uint8", [True]]]]},
        {"formats": [[["uint8", [2**40, 2**40]]]]},
        {"formats": [[["uint8", [0]]]]},
        {"formats": [[["uint8", [1] * 9]]]},
        {"formats": [[[["uint8"], [16]]]]},
        {"formats": [[]]},
        {"formats": []},
        {"layers": []},
        {"layers": [["a", 3, 0]]},
        {"layers": [["a", 2, 1]]},
        {"layers": [["a", 2, -1]]},
        {"layers": [["a", 0, 0], ["b", 2, 0]]},
        {"layers": [["a", 2**61, 0]]},
        {"layers": [["a", 2.0, 0]]},
        {"layers": "ab"},
        {"extra": 1},
    ],
    ids=str,
)
def test_forged_headers_are_refused(layers, target, changes):
    target.write_bytes(forged(GOOD | changes, 2, 3 * 4096) + bytes(2 * 4096))
    with pytest.raises(CheckpointError, match="header is damaged"):
        open_packed(target, layers, MODEL)


@pytest.mark.parametrize("value", [[], 3, "x", None], ids=str)
def test_forged_headers_that_are_no_object(layers, target, value):
    target.write_bytes(forged(value, 2, 3 * 4096) + bytes(2 * 4096))
    with pytest.raises(CheckpointError, match="header is damaged"):
        verify_packed(target)


@pytest.mark.parametrize("length, records", [(2**63, 2), (5 << 20, 2), (50, 2**60), (50, 2**23), (0, 0)])
def test_forged_sizes_allocate_nothing(layers, target, length, records):
    fixed = b"PENSTOCK" + b"".join(n.to_bytes(8, "little") for n in (1, length, records, 8192))
    target.write_bytes(fixed + bytes(8192 - len(fixed)))
    with pytest.raises(CheckpointError, match="header is damaged"):
        open_packed(target, layers, MODEL)
