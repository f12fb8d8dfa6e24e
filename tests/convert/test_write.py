"""The folder a model is made in: interrupted, taken up, refused, full disks, and how much memory it all takes."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.convert import rows, write
from penstock.convert.run import Options, convert
from penstock.convert.write import SafetensorsWriter, Task, Tensor, Workshop, WriteError, chunks, split_shards, through
from penstock.errors import CheckpointError, InvalidArgument
from penstock.weights.safetensors import SafetensorsFile
from tests.convert.common import stored
from tests.convert.common import write as write_source

FOUR = Options(quantize=True, q_group_size=32)
SMALL = 40_000  # bytes of a file: the model has several


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("released") / "model", "qwen3_moe")


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "made"
    convert(source, folder, FOUR, shard_bytes=SMALL)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def stopping(monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException) -> None:
    """Let the write of the file behind the first `after` ones fail."""
    real, count = os.pwrite, 0

    def pwrite(descriptor: int, data: Any, place: int) -> int:
        nonlocal count
        count += place == 0
        if count > after and place:
            raise error
        return real(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", pwrite)


def test_a_full_disk_is_one_error_and_the_same_call_goes_on(
    source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "made"
    with monkeypatch.context() as patch:
        stopping(patch, 2, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(WriteError, match=r"model-00003-of-0000\d.safetensors.partial: the disk is full"):
            convert(source, target, FOUR, shard_bytes=SMALL)
    left = tmp_path / "made.converting"
    assert names(tmp_path) == ["made.converting"]
    assert names(left) == ["journal.jsonl", *(f"model-0000{n}-of-0000{len_of(whole)}.safetensors" for n in (1, 2))]
    before = (left / f"model-00001-of-0000{len_of(whole)}.safetensors").stat().st_mtime_ns
    report = convert(source, target, FOUR, shard_bytes=SMALL)
    assert report.kept == 2
    assert (target / f"model-00001-of-0000{len_of(whole)}.safetensors").stat().st_mtime_ns == before
    assert names(tmp_path) == ["made"] and names(target) == names(whole)
    for name in names(whole):
        assert (target / name).read_bytes() == (whole / name).read_bytes()


def len_of(folder: Path) -> int:
    return len(list(folder.glob("model-*.safetensors")))


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["EIO", "Ctrl-C"]
)
def test_a_failure_before_the_first_file_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    stopping(monkeypatch, 0, error)
    expected: Any = WriteError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        convert(source, tmp_path / "new" / "folder" / "made", FOUR)
    assert names(tmp_path) == []


def test_other_settings_are_refused_by_what_differs(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "made"
    with monkeypatch.context() as patch:
        stopping(patch, 1, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(WriteError):
            convert(source, target, FOUR, shard_bytes=SMALL)
    kept = names(tmp_path / "made.converting")
    with pytest.raises(
        InvalidArgument, match=r"made.converting: was begun with q_bits None \(now 3\); expected the same"
    ):
        convert(source, target, Options(quantize=True, q_group_size=32, q_bits=3), shard_bytes=SMALL)
    first = sorted(source.glob("*.safetensors"))[0]
    os.utime(first, ns=(1, 1))
    with pytest.raises(InvalidArgument, match=r"made.converting: was begun with files '[0-9a-f]+' \(now '[0-9a-f]+'\)"):
        convert(source, target, FOUR, shard_bytes=SMALL)
    assert names(tmp_path / "made.converting") == kept and not target.exists()


def test_a_file_of_another_size_is_written_again(
    source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "made"
    with monkeypatch.context() as patch:
        stopping(patch, 2, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(WriteError):
            convert(source, target, FOUR, shard_bytes=SMALL)
    left = tmp_path / "made.converting"
    with (left / f"model-00002-of-0000{len_of(whole)}.safetensors").open("ab") as file:
        file.write(b"x")
    with (left / "journal.jsonl").open("ab") as file:
        file.write(b'{"file": "model-0000')  # killed in the middle of a line
    assert convert(source, target, FOUR, shard_bytes=SMALL).kept == 1
    assert stored(target) == stored(whole)


def test_an_existing_target_is_refused_and_untouched(source: Path, tmp_path: Path) -> None:
    for name in ("file", "folder", "link"):
        path = tmp_path / name
        if name == "file":
            path.write_text("mine")
        elif name == "folder":
            path.mkdir()
        else:
            path.symlink_to(tmp_path / "nowhere")
        with pytest.raises(InvalidArgument, match=rf"{name}: exists already, expected a new path"):
            convert(source, path)
    assert names(tmp_path) == ["file", "folder", "link"]
    with pytest.raises(InvalidArgument, match=r"mlx-path is '\.', expected the name of a new folder"):
        convert(source, "")


def test_a_target_that_appears_meanwhile_is_not_replaced(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "made"
    with pytest.raises(InvalidArgument, match="exists already"), Workshop(target, {}) as workshop:
        target.mkdir()
        workshop.finish()
    assert names(target) == []


def test_a_foreign_folder_in_the_way_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "made.converting").mkdir()
    (tmp_path / "made.converting" / "thesis.tex").write_text("mine")
    with pytest.raises(InvalidArgument, match="made.converting: is in the way and was not left by convert"):
        convert(source, tmp_path / "made")
    assert names(tmp_path / "made.converting") == ["thesis.tex"]


def test_two_at_once_are_refused(source: Path, tmp_path: Path) -> None:
    with Workshop(tmp_path / "made", {}), pytest.raises(InvalidArgument, match="another convert is at work there"):
        convert(source, tmp_path / "made")
    assert names(tmp_path) == []


def test_a_read_only_folder_is_one_error(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdir(self: Path, *_: Any, **__: Any) -> None:  # root, as whom tests may run, could write anywhere
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(WriteError, match="made.converting: cannot be written: Read-only file system"):
        convert(source, tmp_path / "made")


def test_a_parent_that_is_a_file_is_one_error(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WriteError, match="cannot be written: Not a directory"):
        convert(source, tmp_path / "file" / "made")


def test_too_little_room_is_found_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(WriteError, match=r"has 1.00 kB free, expected [\d.]+ kB for the model"):
        convert(source, tmp_path / "made", FOUR)
    assert names(tmp_path) == []


def test_a_source_that_shrinks_meanwhile_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_source(tmp_path / "source", "qwen3_moe", shards=1)
    file = folder / "model.safetensors"
    real = rows.Stored.read

    def read(self: rows.Stored, start: int, stop: int) -> np.ndarray:
        if file.stat().st_size > 1000:
            os.truncate(file, 1000)
        return real(self, start, stop)

    monkeypatch.setattr(rows.Stored, "read", read)
    with pytest.raises(CheckpointError, match=r"model.safetensors: (ends at byte|has 1000 bytes)"):
        convert(folder, tmp_path / "made", FOUR)
    assert names(tmp_path) == ["source"]


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "source", "qwen2", shards=1)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][7, 40] = np.inf
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"^{name}: array holds inf in row 7, group 1, expected finite numbers"):
        convert(folder, tmp_path / "made", FOUR)
    weights[name][7, 40] = 2.0**99
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=rf"^{name}: holds 6.33825e\+29, expected at most 65504, the largest float16"
    ):
        convert(folder, tmp_path / "made", Options(dtype="float16"))
    assert names(tmp_path) == ["source"]


def test_killed_it_goes_on(source: Path, whole: Path, tmp_path: Path) -> None:
    """kill -9 after the second file, in a process of its own."""
    code = f"""
        import os, signal
        from pathlib import Path
        from penstock.convert import run, write
        real = write.Workshop._note
        def note(self, entry):
            real(self, entry)
            if len(self.finished) == 1 and "file" in entry:
                os.kill(os.getpid(), signal.SIGKILL)
        write.Workshop._note = note
        options = run.Options(quantize=True, q_group_size=32)
        run.convert({str(source)!r}, {str(tmp_path / "made")!r}, options, shard_bytes={SMALL})
    """
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert names(tmp_path) == ["made.converting"]
    report = convert(source, tmp_path / "made", FOUR, shard_bytes=SMALL)
    assert report.kept == 2
    assert stored(tmp_path / "made") == stored(whole)


# -- streams ---------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    """A tensor of 384 MB through a child process whose data may not grow by more than 200 MB."""
    code = f"""
        import resource
        from pathlib import Path
        import numpy as np
        from penstock.convert import rows, write
        from penstock.dtypes import bfloat16
        from penstock.quant import quantize
        path = Path({str(tmp_path)!r}) / "source"
        with path.open("wb") as file:
            file.truncate(384 << 20)
        quantize(np.zeros((64, 4096), bfloat16), 4, 64)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        source = rows.Stored(rows.Files(), path, 0, (48 << 10, 4096), bfloat16)
        work = lambda start, array: quantize(array, 4, 64).arrays
        tensors = (write.Tensor("w", np.dtype(np.uint32), (48 << 10, 512)),
                   write.Tensor("s", bfloat16, (48 << 10, 64)), write.Tensor("b", bfloat16, (48 << 10, 64)))
        with write.SafetensorsWriter(path.with_name("out"), [*tensors]) as out:
            write.through([write.Task(source, tensors, work)], out.write, lambda count: None)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) < 200 << 10  # kilobytes


def test_chunks_cover_all_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "CHUNK", 1000)

    class Some:
        dtype = np.dtype(np.float32)

        def __init__(self, *shape: int) -> None:
            self.shape = shape

    assert list(chunks(Some(3, 5, 100))) == [(n, min(15, n + 2)) for n in range(0, 15, 2)]  # type: ignore[arg-type]
    assert list(chunks(Some(2, 1000))) == [(0, 1), (1, 2)]  # type: ignore[arg-type]
    assert list(chunks(Some(7))) == [(0, 1)]  # type: ignore[arg-type]


def test_cut_gives_a_large_task_a_file_of_its_own() -> None:
    def task(n: int, size: int) -> Task:
        return Task(None, (Tensor(f"t{n}", np.dtype(np.uint8), (size,)),), lambda *_: ())  # type: ignore[arg-type]

    tasks = [task(n, size) for n, size in enumerate((4, 5, 2, 30, 1, 9, 1))]
    shards = split_shards(tasks, limit=10)
    assert [[t.name for t in shard.tensors] for shard in shards] == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5"], ["t6"]]
    assert shards[0].file == "model-00001-of-00005.safetensors"
    assert [shard.file for shard in split_shards(tasks[:1], tasks[1:])] == ["model.safetensors", "mtp.safetensors"]


def test_writer_aligns_what_it_can(tmp_path: Path) -> None:
    tensors = [
        Tensor("odd", np.dtype(np.float16), (3,)),
        Tensor("wide", np.dtype(np.float32), (5,)),
        Tensor("even", np.dtype(np.float16), (2, 32)),
        Tensor("scalar", np.dtype(np.float32), ()),
    ]
    with SafetensorsWriter(tmp_path / "x.safetensors", tensors) as out:
        for tensor in tensors:
            count = int(np.prod(tensor.shape))
            out.write(tensor, 0, np.arange(count).astype(tensor.dtype).reshape(-1, *tensor.shape[1:]))
    file = SafetensorsFile.open(tmp_path / "x.safetensors")
    assert file.metadata == {"format": "mlx"}
    assert file.misaligned_nbytes == 0 and file.tensors["even"].start % 64 == 0
    assert load_file(tmp_path / "x.safetensors")["wide"].tolist() == [0, 1, 2, 3, 4]


def test_rows_are_written_in_order_and_errors_come_out_of_the_threads() -> None:
    class Wide:
        shape, dtype = (6, 1 << 20), np.dtype(np.float32)

        def read(self, start: int, stop: int) -> np.ndarray:
            return np.zeros((stop - start, 4), np.float32)

    written: list[int] = []
    task = Task(Wide(), (Tensor("x", np.dtype(np.float32), (6, 4)),), lambda start, array: (array,))
    through([task], lambda tensor, row, array: written.append(row), lambda count: None)
    assert written == [0, 1, 2, 3, 4, 5]

    def failing(tensor: Tensor, row: int, array: np.ndarray) -> None:
        raise OSError(errno.EIO, "no")

    threads = threading.active_count()
    with pytest.raises(OSError, match="no"):
        through([task], failing, lambda count: None)
    assert threading.active_count() == threads


def test_index_says_where_everything_is(whole: Path) -> None:
    index = json.loads((whole / "model.safetensors.index.json").read_text())
    found = {
        name: file
        for file in names(whole)
        if file.endswith(".safetensors")
        for name in SafetensorsFile.open(whole / file).tensors
    }
    assert list(index["weight_map"]) == sorted(found)
    assert index["weight_map"] == found
