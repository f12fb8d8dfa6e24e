"""Safetensors files: what is read equals the reference implementation; what is wrong is refused in one line."""

import gc
import json
import os
import random
import socket
import struct
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CheckpointError
from penstock.weights.files import JSON_DEPTH, parse_json
from penstock.weights.safetensors import DTYPES, SafetensorsFile, TensorInfo
from tests.weights.common import entry, safetensors_bytes


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """What tests of other files left is looked through once, not at every collection here (2 s each)."""
    gc.collect()
    gc.freeze()


def write(folder: Path, *content, **keywords) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(safetensors_bytes(*content, **keywords))
    return path


def refusal(path: Path) -> str:
    """The message of the error that opening the file raises: one line that starts with the file."""
    with pytest.raises(CheckpointError) as raised:
        SafetensorsFile.open(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 600 + len(str(path))
    return message.removeprefix(f"{path}: ")


# what is read

NUMPY_DTYPES = [d for d in DTYPES if not d.startswith("F8")]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_array_equals_what_the_safetensors_package_wrote(tmp_path, rng, dtype):
    def values(*shape):
        return rng.integers(0, 2, shape).astype(DTYPES[dtype])

    tensors = {"a.weight": values(3, 5), "scalar": values(), "empty": values(0, 7), "four": values(2, 1, 3, 2)}
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors", {"format": "pt", "note": "é"})
    file = SafetensorsFile.open(tmp_path / "x.safetensors")
    assert file.tensors.keys() == tensors.keys() and file.metadata == {"format": "pt", "note": "é"}
    for name, want in tensors.items():
        got = file.array(name)
        assert (got.dtype, got.shape) == (want.dtype, want.shape) and file.tensors[name].dtype == dtype
        assert got.tobytes() == want.tobytes()
        assert got.flags.aligned and not got.flags.writeable


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_array_of_8_bit_floats_is_raw_bytes(tmp_path, dtype):
    file = SafetensorsFile.open(write(tmp_path, {"a": entry(dtype, [3], [0, 3])}, b"\x01\x80\xff"))
    assert file.array("a").dtype == np.uint8 and file.array("a").tolist() == [1, 128, 255]


def test_tensors_have_places_in_the_file(tmp_path):
    header = {"b": entry("U8", [2], [3, 5]), "a": entry("U8", [3], [0, 3])}
    path = write(tmp_path, header, b"abcde")
    file = SafetensorsFile.open(path)
    start = 8 + len(json.dumps(header))
    assert file.tensors == {"b": ("U8", (2,), start + 3, start + 5), "a": TensorInfo("U8", (3,), start, start + 3)}
    assert path.read_bytes()[file.tensors["b"].start : file.tensors["b"].stop] == b"de"
    assert file.array("b").tobytes() == b"de" and file.size == start + 5


def test_open_takes_an_empty_header_and_trailing_spaces(tmp_path):
    assert SafetensorsFile.open(write(tmp_path, b"{}")).tensors == {}
    assert SafetensorsFile.open(write(tmp_path, b"{}      ")).tensors == {}


def test_array_lives_longer_than_the_file_object(tmp_path):
    path = write(tmp_path, b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"data")
    view = SafetensorsFile.open(path).array("a")
    gc.collect()
    path.unlink()
    assert view.tobytes() == b"data"


DESCRIPTORS = Path("/proc/self/fd")


def open_descriptors() -> int:
    return len(list(DESCRIPTORS.iterdir()))


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="counts descriptors in /proc")
def test_open_leaves_no_descriptor_behind(tmp_path):
    good, bad = write(tmp_path, {"a": entry()}, bytes(8)), tmp_path / "bad"
    bad.write_bytes(b"junk")
    before = open_descriptors()
    for _ in range(3):
        SafetensorsFile.open(good).array("a")
        refusal(bad)
    gc.collect()
    assert open_descriptors() == before


@pytest.mark.parametrize("shift", range(8))
def test_array_copies_a_misaligned_tensor_once(tmp_path, shift):
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    header = json.dumps({"f": entry("F32", [2, 3], [0, 24]), "u": entry("U8", [3], [24, 27])}).encode()
    header += b" " * (-len(header) % 8 + shift)  # the data start at 8 + a multiple of 8 + shift
    file = SafetensorsFile.open(write(tmp_path, header, data.tobytes() + b"xyz"))
    first, second = file.array("f"), file.array("f")
    np.testing.assert_array_equal(first, data)
    assert first.flags.aligned and not first.flags.writeable and np.shares_memory(first, second)
    assert file.array("u").tobytes() == b"xyz"
    misaligned = shift % 4 != 0
    assert file.tensors["f"].aligned == (not misaligned) and file.tensors["u"].aligned
    assert file.misaligned_nbytes == 24 * misaligned and file.copied == (misaligned, 24 * misaligned)
    part = first[1:]
    del first, second
    gc.collect()
    assert np.shares_memory(part, file.array("f"))  # somebody still holds the copy


def test_copied_counts_a_tensor_once_though_it_was_released(tmp_path):
    header = json.dumps({"f": entry()}).encode()
    file = SafetensorsFile.open(write(tmp_path, header + b" " * (-len(header) % 8 + 1), bytes(8)))
    for _ in range(2):
        assert file.array("f").sum() == 0
    assert file.copied == (1, 8)


@pytest.mark.parametrize(
    ("metadata", "noticed"),
    [({}, False), ({"format": "mlx"}, False), ({"format": "pt"}, False), ({"format": "tf"}, True), ({"x": ""}, False)],
)
def test_metadata_of_another_format_gives_a_notice(tmp_path, metadata, noticed):
    file = SafetensorsFile.open(write(tmp_path, {"__metadata__": metadata}))
    assert file.metadata == metadata and ["tf" in notice for notice in file.notices] == [True] * noticed


# files that change


@pytest.mark.parametrize("pad", [0, 1], ids=["mapped", "copied"])
@pytest.mark.parametrize("change", [-1, 5, -(10**6)])
def test_array_refuses_a_file_whose_size_changed(tmp_path, pad, change):
    header = json.dumps({"f": entry("F32", [250_000], [0, 10**6])}).encode()
    path = write(tmp_path, header + b" " * (-len(header) % 8 + pad), bytes(10**6))
    file = SafetensorsFile.open(path)
    os.truncate(path, file.size + change)
    with pytest.raises(CheckpointError, match=rf"has {file.size + change} bytes, expected the {file.size}"):
        file.array("f")


def test_array_refuses_an_unknown_name(tmp_path):
    with pytest.raises(CheckpointError, match="has no tensor 'b'"):
        SafetensorsFile.open(write(tmp_path, {"a": entry()}, bytes(8))).array("b")


def test_array_reports_a_short_read_and_a_disk_error(tmp_path, monkeypatch):
    header = json.dumps({"f": entry("U16", [5000], [0, 10_000])}).encode()
    want = np.arange(5000, dtype=np.uint16)
    path = write(tmp_path, header + b" " * (-len(header) % 8 + 1), want.tobytes())
    file = SafetensorsFile.open(path)
    pieces = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: pieces(fd, [b[:999] for b in buffers], at))
    np.testing.assert_array_equal(file.array("f"), want)  # read in pieces
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(CheckpointError, match="ends at byte"):
        file.array("f")

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match="cannot be read at byte .*: Input/output error"):
        file.array("f")
    monkeypatch.setattr(os, "open", broken)
    assert refusal(path) == "cannot be read: Input/output error"


# bad inputs, group 1: not a file of some length


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "has no bytes, expected a safetensors file"),
        (b"\x02", "has only 1 bytes"),
        (b"\x02\0\0\0\0\0\0", "has only 7 bytes"),
        (b"\x02\0\0\0\0\0\0\0", "header length is 2, expected 1 to 0"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "a Git LFS pointer"),
        (b"<!DOCTYPE html><html><title>404</title></html>", "an HTML page"),
        (b"\n\n<html lang=en>" + b"x" * 600, "an HTML page"),
        (b"<html>", "an HTML page"),
        (b"GGUF\3\0\0\0" + bytes(24), "a GGUF file"),
        (b"PK\3\4\0\0\x08\x08" + bytes(60), "a zip archive"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "a PyTorch pickle"),
        (bytes(4096), "nothing but zero bytes"),
    ],
)
def test_open_refuses_what_is_no_safetensors_file(tmp_path, content, expected):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert refusal(path).startswith(expected)


def make_fifo(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_loop(path):
    path.with_name("other").symlink_to(path)
    path.symlink_to(path.with_name("other"))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Path.mkdir, "is a folder, expected a regular file"),
        (make_fifo, "is a FIFO, expected a regular file"),
        (make_socket, "is a socket, expected a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, expected a regular file"),
        (lambda path: path.symlink_to("nowhere"), "is a link to nowhere, which does not exist"),
        (make_loop, "is a link that leads back to itself"),
        (lambda path: None, "no such file"),
    ],
    ids=["folder", "fifo", "socket", "device", "dangling", "loop", "missing"],
)
def test_open_refuses_what_is_no_regular_file_and_does_not_wait(tmp_path, make, expected, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    path = Path("x.safetensors")
    make(path)
    assert refusal(path) == expected


def test_open_refuses_a_fifo_that_took_the_place_of_the_file(tmp_path, monkeypatch):
    path = write(tmp_path, b"{}")
    status = path.stat()
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(Path, "stat", lambda self: status)  # as it was when it was looked at
    assert refusal(path) == "is a FIFO, expected a regular file"


def test_open_follows_links_and_says_why_a_file_cannot_be_read(tmp_path, monkeypatch):
    path = write(tmp_path, {"a": entry()}, bytes(8))
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    assert SafetensorsFile.open(str(link)).array("a").tolist() == [0, 0]
    path.chmod(0)
    if os.geteuid() == 0:  # nothing is forbidden to root

        def forbidden(*_):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", forbidden)
    assert refusal(link) == "cannot be read: Permission denied"
    with pytest.raises(CheckpointError, match="cannot be read: .*null"):
        SafetensorsFile.open("a\0b")


# group 2: the header as a text


@pytest.mark.parametrize("length", [0, 3, 2**31, 2**63, 2**64 - 1, 100_000_001], ids=str)
def test_open_refuses_a_header_length_outside_of_the_file(tmp_path, length):
    assert f"header length is {length}, expected 1 to 2 (the file has 10 bytes)" in refusal(
        write(tmp_path, b"{}", length=length)
    )


def test_open_refuses_a_header_above_the_limit_without_reading_it(tmp_path):
    path = tmp_path / "big.safetensors"
    path.write_bytes(struct.pack("<Q", 100_000_001) + b"{")
    os.truncate(path, 1 << 40)  # sparse
    tracemalloc.start()
    message = refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message.startswith("header length is 100000001, expected 1 to 100000000") and peak < 1 << 20


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"[]", "header starts with b'[', expected '{'"),
        (b" {}", "header starts with b' '"),
        (b"\xef\xbb\xbf{}", "header starts with"),
        (b"null", "header starts with b'n'"),
        (b"{", "header: not valid JSON"),
        (b"{}{}", "header: not valid JSON: Extra data"),
        (b"{'a': 1}", "header: not valid JSON"),
        (b'{"\xff": 1}', "header: not valid UTF-8"),
        ('{"a": 1}'.encode("utf-16-le"), "header: not valid JSON"),
        (b'{"\\ud800": 1}', "header: not valid UTF-8"),
        (b'{"a": NaN}', "header: not valid JSON: NaN is no JSON number"),
        (b'{"a": -Infinity}', "header: not valid JSON: -Infinity"),
        (b'{"a": 1e999}', "header: not valid JSON: '1e999' is beyond the range"),
        (b'{"a": ' + b"9" * 5000 + b"}", "header: not valid JSON: Exceeds the limit"),
        (b'{"a": 1, "a": 1}', "header: not valid JSON: key 'a' appears twice"),
        (b'{"a": {"dtype": "U8", "dtype": "U8"}}', "header: not valid JSON: key 'dtype' appears twice"),
        (b'{"a": ' + b"[" * 200_000, "header: not valid JSON: brackets are nested 200001 deep"),
        (b'{"a": ' * 200_000, "header: not valid JSON: brackets are nested 200000 deep"),
    ],
    ids=range(18),
)
def test_open_refuses_a_header_that_is_no_strict_json_object(tmp_path, header, expected):
    assert refusal(write(tmp_path, header)).startswith(expected)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'"' + b"[" * 200 + b'"', "[" * 200),
        (b'["a\\"' + b"[" * 200 + b'", "\\\\", "]"]', ['a"' + "[" * 200, "\\", "]"]),
        (b"[" + b"[]," * 200 + b"[]]", [[]] * 201),
        (b"[" * JSON_DEPTH + b"]" * JSON_DEPTH, None),
        (b"\xef\xbb\xbf[1.5, 2e3, -0]", [1.5, 2000, 0]),
        (b'"\\ud83d\\ude00 \\u00e9"', "😀 é"),
    ],
    ids=["string", "escapes", "wide", "deepest", "bom", "surrogate pair"],
)
def test_parse_json_counts_nested_brackets_outside_of_strings(text, value):
    assert value is None or parse_json(text, "x") == value


def test_parse_json_refuses_one_bracket_too_many():
    with pytest.raises(CheckpointError, match=f"^x: .*nested {JSON_DEPTH + 1} deep"):
        parse_json(b'["\\"",' + b"[" * JSON_DEPTH + b"]" * (JSON_DEPTH + 1), "x")
    with pytest.raises(CheckpointError, match=r"^x: is empty"):
        parse_json(b" \n", "x")


def test_open_takes_many_entries(tmp_path):
    header = {f"tensor.{i}": entry("U8", [], [i, i + 1]) for i in range(100_000)}
    file = SafetensorsFile.open(write(tmp_path, header, bytes(100_000)))
    assert len(file.tensors) == 100_000 and file.array("tensor.99999").shape == ()


# groups 3 to 5: entries, offsets, metadata

EIGHT = bytes(8)


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (None, "has None, expected an object"),
        ([], "has [], expected an object"),
        ("F32", "has 'F32', expected an object"),
        ({"dtype": "F32", "shape": [2]}, "has keys ['dtype', 'shape'], expected an object with dtype"),
        (entry() | {"more": 1}, "has keys ['data_offsets', 'dtype', 'more', 'shape']"),
        (entry("F4"), "has dtype 'F4', expected one of F64, "),
        (entry("F8_E8M0", [8]), "has dtype 'F8_E8M0'"),
        (entry("f32"), "has dtype 'f32'"),
        (entry(["F32"]), "has dtype ['F32']"),
        (entry(None), "has dtype None"),
        (entry(shape=None), "has shape None, expected a list of sizes"),
        (entry(shape=2), "has shape 2,"),
        (entry(shape={}), "has shape {},"),
        (entry(shape=[True, 2]), "has shape [True, 2],"),
        (entry(shape=[2.0]), "has shape [2.0],"),
        (entry(shape=["2"]), "has shape ['2'],"),
        (entry(shape=[None]), "has shape [None],"),
        (entry(shape=[-2]), "has shape [-2],"),
        (entry(shape=[2**63 + 1]), "expected less than 2**63 bytes"),
        (entry(shape=[10**4000]), "expected less than 2**63 bytes"),
        (entry(shape=[2**32, 2**32]), "expected less than 2**63 bytes"),
        (entry(shape=[2**62, 4, 2], offsets=[0, 0]), "expected less than 2**63 bytes"),
        (entry(shape=[0, 2**62, 2**62], offsets=[0, 0]), "expected less than 2**63 bytes"),
        (entry(shape=[2**62 + 1, 2**62], offsets=[0, 8]), "expected less than 2**63 bytes"),
        (entry(shape=[1] * 8 + [2]), "has 9 axes, expected at most 8"),
        (entry(shape=[3]), "has 8 bytes, expected 12 for F32 of shape [3]"),
        (entry(shape=[]), "has 8 bytes, expected 4 for F32 of shape []"),
        (entry(shape=[0]), "has 8 bytes, expected 0"),
        (entry(offsets=None), "has data_offsets None, expected two integers"),
        (entry(offsets=[0]), "has data_offsets [0], expected two integers"),
        (entry(offsets=[0, 8, 8]), "has data_offsets [0, 8, 8]"),
        (entry(offsets=[False, 8]), "has data_offsets [False, 8]"),
        (entry(offsets=[0.0, 8.0]), "has data_offsets [0.0, 8.0]"),
        (entry(offsets=["0", "8"]), "has data_offsets ['0', '8']"),
        (entry(offsets=[8, 0]), "has data_offsets [8, 0], expected 0 <= begin <= end"),
        (entry(offsets=[-8, 0]), "has data_offsets [-8, 0], expected 0 <= begin <= end"),
        (entry(offsets=[0, 12], shape=[3]), "but the file has"),
        (entry(offsets=[2**64, 2**64 + 8]), "but the file has"),
        (entry(offsets=[0, 10**4000]), "but the file has"),
    ],
)
def test_open_refuses_a_wrong_entry_and_names_the_tensor(tmp_path, bad, expected):
    message = refusal(write(tmp_path, {"layer.weight": bad}, EIGHT))
    assert message.startswith("tensor 'layer.weight' ") and expected in message


@pytest.mark.parametrize(
    ("places", "size", "expected"),
    [
        ([(0, 4), (2, 6)], 6, "tensor '1' starts at byte {2}, expected {4}: it overlaps"),
        ([(0, 4), (0, 4)], 4, "tensor '1' starts at byte {0}, expected {4}: it overlaps"),
        ([(0, 4), (5, 8)], 8, "tensor '1' starts at byte {5}, expected {4}: unused bytes"),
        ([(1, 4)], 4, "tensor '0' starts at byte {1}, expected {0}: unused bytes"),
        ([(0, 4), (4, 6)], 7, "has 1 bytes behind the last tensor, expected none"),
        ([], 3, "has 3 bytes behind the last tensor"),
        ([(0, 4), (4, 8)], 7, "tensor '1' ends at byte {8}, but the file has {7} bytes: an unfinished download?"),
        ([(0, 4), (2, 2)], 4, "tensor '1' starts at byte {2}, expected {4}: it overlaps"),
    ],
)
def test_open_refuses_overlaps_holes_and_bytes_that_belong_to_nothing(tmp_path, places, size, expected):
    header = {str(i): entry("U8", [b - a], [a, b]) for i, (a, b) in enumerate(places)}
    start = 8 + len(json.dumps(header))
    assert refusal(write(tmp_path, header, bytes(size))).startswith(expected.format(*range(start, start + 9)))


def test_open_takes_tensors_in_any_order_and_of_no_size(tmp_path):
    header = {"b": entry("U8", [1], [2, 3]), "none": entry("F64", [3, 0], [2, 2]), "a": entry("I16", [1], [0, 2])}
    file = SafetensorsFile.open(write(tmp_path, header, b"\1\0\7"))
    assert file.array("a").tolist() == [1] and file.array("b").tolist() == [7] and file.array("none").shape == (3, 0)


@pytest.mark.parametrize(
    "name", ["", "..", "../a", "a/../b", "/etc/passwd", "a//b", "./a", "a/", "a\0", "a\nb", "a\\b"]
)
def test_open_refuses_names_that_are_paths_or_cannot_be_printed(tmp_path, name):
    message = refusal(write(tmp_path, {name: entry()}, EIGHT))
    assert message.startswith("tensor name ") and "control characters or parts of a path" in message


@pytest.mark.parametrize("name", ["a..b", "a/b", ".hidden", "größe", "a b", "x" * 5000])
def test_open_takes_unusual_names(tmp_path, name):
    assert SafetensorsFile.open(write(tmp_path, {name: entry()}, EIGHT)).array(name).shape == (2,)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (None, "__metadata__ is None, expected an object"),
        ("mlx", "__metadata__ is 'mlx'"),
        ([], "__metadata__ is []"),
        ({"format": 1}, "__metadata__ 'format' is 1, expected a string"),
        ({"a": None}, "__metadata__ 'a' is None"),
        ({"a": {}}, "__metadata__ 'a' is {}"),
    ],
)
def test_open_refuses_metadata_that_are_not_strings(tmp_path, metadata, expected):
    assert refusal(write(tmp_path, {"__metadata__": metadata})).startswith(expected)


def test_messages_stay_one_short_line(tmp_path):
    long = "x" * 10_000
    assert len(refusal(write(tmp_path, {long: None}))) < 400
    assert len(refusal(write(tmp_path, {"a": entry(long)}))) < 400
    assert len(refusal(write(tmp_path, {"a": entry(shape=[long])}))) < 400
    assert len(refusal(write(tmp_path, f'{{"{long}": 1, "{long}": 1}}'.encode()))) < 400


# damaged files


def small_file() -> bytes:
    rng = np.random.default_rng(0)
    tensors = {
        "a.weight": rng.integers(0, 2**32, (3, 4), np.uint32),
        "a.scales": rng.standard_normal((3, 2)).astype(ml_dtypes.bfloat16),
        "b": rng.standard_normal((2, 1, 2)),
        "c": np.zeros((0, 3), np.float16),
        "d": np.array(7, np.int8),
    }
    return safetensors.numpy.save(tensors, {"format": "mlx"})


SMALL = small_file()
HEADER_END = 8 + int.from_bytes(SMALL[:8], "little")


def agree(path: Path, content: bytes) -> bool:
    """Nothing but CheckpointError is raised, and what both readers accept is equal; True if both accept."""
    path.write_bytes(content)
    try:
        file = SafetensorsFile.open(path)
        ours = {name: file.array(name) for name in file.tensors}
    except CheckpointError:
        return False
    try:
        theirs = dict(safetensors.deserialize(content))
    except Exception:
        return False
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        info = file.tensors[name]
        assert (info.dtype, list(info.shape)) == (theirs[name]["dtype"], theirs[name]["shape"])
        assert array.tobytes() == bytes(theirs[name]["data"])
    return True


def test_agree_accepts_the_file_itself(tmp_path):
    assert agree(tmp_path / "x", SMALL)


@settings(max_examples=300)
@given(
    flips=st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.integers(0, 7)), max_size=3),
    cut=st.one_of(st.just(len(SMALL)), st.integers(0, len(SMALL))),
    tail=st.binary(max_size=3),
)
def test_open_survives_damaged_files(tmp_path_factory, flips, cut, tail):
    content = bytearray(SMALL)
    for place, bit in flips:
        content[place] ^= 1 << bit
    agree(tmp_path_factory.getbasetemp() / "damaged", bytes(content[:cut]) + tail)


def test_open_survives_each_replaced_byte_of_the_header(tmp_path):
    chance = random.Random(0)
    accepted = 0
    for place in range(HEADER_END):
        for byte in chance.sample(b'"[]{}:,019.-eE \\/\0\x80\xffnt', 6):
            content = bytearray(SMALL)
            content[place] = byte
            accepted += agree(tmp_path / "x", bytes(content))
    assert accepted > 100  # a changed letter in a name is no damage that a reader could see


@settings(max_examples=200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-1, 9) | st.sampled_from(["F32", "U8", "BF16", "x", "format"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a", "__metadata__"]), inner)
            | st.fixed_dictionaries(
                {
                    "dtype": st.sampled_from(["F32", "U8", "BF16"]),
                    "shape": st.lists(st.integers(0, 3), max_size=2),
                    "data_offsets": st.lists(st.integers(0, 9), min_size=2, max_size=2),
                }
            )
        ),
        max_leaves=12,
    ).filter(lambda value: isinstance(value, dict)),
    st.binary(max_size=12),
)
def test_open_survives_any_header(tmp_path_factory, header, data):
    agree(tmp_path_factory.getbasetemp() / "header", safetensors_bytes(header, data))
