"""GGUF files: tensors equal the gguf package's own dequantizer bit for bit; what is wrong is refused in one line."""

import contextlib
import gc
import os
import re
import struct
import tracemalloc
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CheckpointError
from penstock.quant import BLOCK_TYPES, QuantizedTensor, dequantize
from penstock.weights import gguf as module
from penstock.weights.gguf import SUPPORTED, GgufFile, TensorInfo
from tests.weights.blocks import pack

BLOCKS = ("Q4_0", "Q4_1", "Q8_0")
AFFINE = ("F32", "F16", "BF16", *BLOCKS)
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def kind(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def write(path: Path, tensors: dict[str, tuple[np.ndarray, str]], alignment: int | None = None, **values) -> Path:
    """A file written by the gguf package; tensors are given as numbers and the type they are stored as."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in values.items():
        add = {str: writer.add_string, list: writer.add_array, bool: writer.add_bool, float: writer.add_float32}
        add.get(type(value), writer.add_uint32)(f"test.{key}", value)
    for name, (array, type_name) in tensors.items():
        writer.add_tensor(name, stored(array, type_name), raw_dtype=kind(type_name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(array: np.ndarray, type_name: str) -> np.ndarray:
    if type_name in BLOCK_TYPES:
        return pack(array, type_name)
    return gguf.quants.quantize(array.astype(np.float32), kind(type_name))


def restored(data: np.ndarray, type_name: str) -> np.ndarray:
    """What the gguf package reads from stored data. Zeros of a negative scale are negative there, but not here."""
    found = gguf.quants.dequantize(data, kind(type_name))
    return found + np.float32(0) if type_name in ("Q4_0", "Q8_0") else found


def numbers(tensor: np.ndarray | QuantizedTensor) -> np.ndarray:
    return dequantize(tensor) if isinstance(tensor, QuantizedTensor) else tensor.astype(np.float32)


# files made byte by byte, so that they can be wrong


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def pair(key: str | bytes, type_number: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", type_number) + value


def array(type_number: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", type_number, count) + data


def entry(name: str | bytes = "a", sizes=(2,), type_number: int = 0, offset: int = 0, rank: int | None = None) -> bytes:
    rank = len(sizes) if rank is None else rank
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", rank, *sizes, type_number, offset)


def file_bytes(entries=(), pairs=(), data=b"", version=3, counts=(None, None), magic=b"GGUF", align=32) -> bytes:
    made = [given if given is not None else len(what) for given, what in zip(counts, (entries, pairs), strict=True)]
    head = magic + struct.pack("<IQQ", version, *made) + b"".join(pairs) + b"".join(entries)
    return head + (b"\0" * (-len(head) % align) + data if entries else b"")


def refusal(path: Path) -> str:
    """The message of the error that opening the file raises: one line that starts with the file."""
    with pytest.raises(CheckpointError) as raised:
        GgufFile.open(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 600 + len(str(path))
    return message.removeprefix(f"{path}: ")


def refused(folder: Path, data: bytes) -> str:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return refusal(path)


# what is read


@pytest.mark.parametrize("type_name", AFFINE)
@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (3, 7, 64), (2, 1, 3, 32), (300, 1024)], ids=str)
def test_tensor_equals_the_dequantizer_of_the_gguf_package(tmp_path, rng, type_name, shape):
    values = rng.standard_normal(shape).astype(np.float32) * rng.uniform(1e-3, 10, (*shape[:-1], 1))
    path = write(tmp_path / "x.gguf", {"before": (values[..., :32], "F32"), "a": (values, type_name)})
    file = GgufFile.open(path)
    got, want = file.tensor("a"), restored(stored(values, type_name), type_name)
    assert tuple(got.shape) == shape and file.tensors["a"].type == type_name
    assert numbers(got).tobytes() == want.tobytes()
    assert isinstance(got, QuantizedTensor) == (type_name in BLOCKS) == file.is_copied("a")
    assert file.loaded_nbytes("a") == got.nbytes
    if isinstance(got, QuantizedTensor):
        assert (got.bits, got.group_size, got.dtype) == (8 if type_name == "Q8_0" else 4, 32, "float16")
    else:
        assert not got.flags.writeable and not got.flags.owndata and got.flags.aligned


def blocks(type_name: str, scales: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Blocks [rows, 3] of random codes with given scales (as bits), each row another one."""
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[type_name]
    data = rng.integers(0, 256, (len(scales), 3, size), np.uint8)
    data[:, :, :2] = np.repeat(scales.astype("<u2")[:, None, None], 3, 1).view(np.uint8)
    if type_name == "Q4_1":
        data[:, :, 2:4] = np.roll(data[:, :, :2], 5, axis=0)
    return data.reshape(len(scales), 3 * size)


@pytest.mark.parametrize("type_name", BLOCKS)
@pytest.mark.parametrize("largest", [0x7BFF, 0x6FFE, 0x5FFE], ids=["any", "fits -8", "fits -128"])
def test_tensor_is_exact_for_every_scale_that_float16_has(tmp_path, rng, type_name, largest):
    patterns = np.arange(largest + 1, dtype=np.uint16)
    patterns = np.concatenate([patterns, patterns | 0x8000])
    data = blocks(type_name, patterns, rng)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("a", data, raw_dtype=kind(type_name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = GgufFile.open(tmp_path / "x.gguf").tensor("a")
    assert numbers(got).tobytes() == restored(data, type_name).tobytes()
    exact = {"Q4_0": 0x6FFF, "Q8_0": 0x5FFF, "Q4_1": 0x7BFF}[type_name]  # 8188, 511.75: the bias is 65504
    assert got.dtype == ("float16" if largest <= exact else "float32")


@pytest.mark.parametrize("type_name", BLOCKS)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00], ids=["inf", "-inf", "nan"])
def test_tensor_refuses_a_scale_that_is_not_finite(tmp_path, rng, type_name, bits):
    scales = np.full(700, 0x3C00, np.uint16)
    scales[567] = bits
    data = blocks(type_name, scales, rng)
    number = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 8}[type_name]
    path = tmp_path / "x.gguf"
    path.write_bytes(file_bytes([entry("w", (96, 700), number)], data=data.tobytes()))
    with pytest.raises(CheckpointError, match=r"tensor 'w' has scale -?(inf|nan) in block 1701, expected a finite"):
        GgufFile.open(path).tensor("w")


def test_tensor_is_the_same_for_any_number_of_blocks_at_once(tmp_path, rng, monkeypatch):
    values = rng.standard_normal((13, 160)).astype(np.float32)
    file = GgufFile.open(write(tmp_path / "x.gguf", {t: (values, t) for t in BLOCKS}))
    want = {t: numbers(file.tensor(t)).tobytes() for t in BLOCKS}
    monkeypatch.setattr(module, "_STEP", 7)
    assert {t: numbers(file.tensor(t)).tobytes() for t in BLOCKS} == want


def test_tensors_have_shapes_rows_first_and_places_in_the_file(tmp_path):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = write(tmp_path / "x.gguf", {"m": (values, "F32"), "v": (values[0], "F16"), "s": (values, "BF16")})
    file = GgufFile.open(path)
    assert [file.tensors[n].shape for n in "mvs"] == [(3, 4), (4,), (3, 4)] and file.nbytes == 48 + 8 + 24
    data = path.read_bytes()
    assert data[file.tensors["m"].start : file.tensors["m"].stop] == values.tobytes()
    assert file.tensor("s").dtype == ml_dtypes.bfloat16 and file.tensor("v").tolist() == [0, 1, 2, 3]
    assert "m" in file and "x" not in file and repr(file).endswith(f"3 tensors, {len(data)} bytes)")


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_has_every_type_of_value(tmp_path, version):
    values = {
        "u8": (U8, b"\xff", 255),
        "i8": (I8, b"\xff", -1),
        "u16": (U16, b"\xff\xff", 65535),
        "i16": (I16, b"\0\x80", -32768),
        "u32": (U32, b"\xff\xff\xff\xff", 2**32 - 1),
        "i32": (I32, b"\xff\xff\xff\xff", -1),
        "f32": (F32, struct.pack("<f", 0.1), float(np.float32(0.1))),
        "bool": (BOOL, b"\1", True),
        "string": (STRING, text("é\0 x"), "é\0 x"),
        "u64": (U64, b"\xff" * 8, 2**64 - 1),
        "i64": (I64, b"\xff" * 8, -1),
        "f64": (F64, struct.pack("<d", 0.1), 0.1),
        "texts": (ARRAY, array(STRING, 3, text("") + text("Ġa") + text("b")), ["", "Ġa", "b"]),
        "none": (ARRAY, array(STRING, 0), []),
    }
    path = tmp_path / "x.gguf"
    path.write_bytes(file_bytes(pairs=[pair(k, t, v) for k, (t, v, _) in values.items()], version=version))
    file = GgufFile.open(path)
    assert file.version == version and file.metadata == {key: want for key, (_, _, want) in values.items()}
    assert all(type(file.metadata[k]) is type(want) for k, (_, _, want) in values.items())


def test_metadata_has_arrays_of_numbers(tmp_path):
    pairs = [
        pair("i", ARRAY, array(I32, 3, struct.pack("<3i", 1, -2, 3))),
        pair("b", ARRAY, array(BOOL, 2, b"\1\0")),
        pair("none", ARRAY, array(F64, 0)),
    ]
    path = tmp_path / "x.gguf"
    path.write_bytes(file_bytes(pairs=pairs))
    metadata = GgufFile.open(path).metadata
    assert metadata["i"].tolist() == [1, -2, 3] and metadata["i"].dtype == np.int32
    assert metadata["b"].tolist() == [True, False] and metadata["none"].shape == (0,)


@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_open_reads_what_the_gguf_package_wrote_at_any_alignment(tmp_path, rng, alignment):
    values = rng.standard_normal((3, 5)).astype(np.float32)
    words = [f"token {n} é" for n in range(5000)]
    tensors = dict.fromkeys("abc", (values, "F32"))
    path = write(tmp_path / "x.gguf", tensors, alignment, words=words, n=7, f=0.5, yes=True)
    file = GgufFile.open(path)
    assert file.alignment == alignment and file.metadata["test.words"] == words
    assert [file.metadata[f"test.{k}"] for k in ("n", "f", "yes")] == [7, 0.5, True]
    assert all(file.tensors[n].start % alignment == 0 for n in "abc")
    np.testing.assert_array_equal(file.tensor("b"), values)


def test_open_takes_no_tensors_empty_ones_and_no_padding_at_the_end(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(file_bytes())
    assert GgufFile.open(path).tensors == {} and GgufFile.open(path).metadata == {}
    entries = [entry("a", (0,)), entry("b", (3, 0)), entry("c", (3,)), entry("s", ())]
    path.write_bytes(file_bytes([*entries[:3], entry("s", (), offset=32)], data=bytes(36)))
    file = GgufFile.open(path)
    assert [file.tensors[n].shape for n in "abcs"] == [(0,), (0, 3), (3,), ()]
    assert file.tensor("b").shape == (0, 3) and file.tensor("s") == 0


def test_open_and_tensor_read_little_of_a_large_file(tmp_path):
    path = tmp_path / "x.gguf"
    size = 1 << 40
    path.write_bytes(file_bytes([entry("big", (size // 8, 2))], data=b"x"))
    start = (path.stat().st_size - 1) // 32 * 32
    os.truncate(path, start + size)  # sparse
    tracemalloc.start()
    file = GgufFile.open(path)
    view = file.tensor("big")
    assert view.shape == (2, size // 8) and view[1, -1] == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_tensor_lives_longer_than_the_file_object(tmp_path):
    path = write(tmp_path / "x.gguf", {"a": (np.arange(3), "F32")})
    view = GgufFile.open(path).tensor("a")
    gc.collect()
    path.unlink()
    assert view.tolist() == [0, 1, 2]


@pytest.mark.parametrize("change", [-1, 100])
@pytest.mark.parametrize("type_name", ["F32", "Q4_0"])
def test_tensor_refuses_a_file_whose_size_changed(tmp_path, change, type_name):
    path = write(tmp_path / "x.gguf", {"a": (np.ones((1000, 64)), type_name)})
    file = GgufFile.open(path)
    os.truncate(path, file.size + change)
    with pytest.raises(CheckpointError, match=f"has {file.size + change} bytes, expected the {file.size} it had"):
        file.tensor("a")


def test_open_reports_a_disk_error(tmp_path, monkeypatch):
    path = write(tmp_path / "x.gguf", {})

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    assert refusal(path) == "cannot be read at byte 0: Input/output error"
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    assert refusal(path).startswith("ends at byte 0, expected")


# types that cannot be used


@pytest.mark.parametrize("type_name", [t.name for t in gguf.GGMLQuantizationType if t.name not in SUPPORTED])
def test_tensor_refuses_other_types_by_name_but_knows_their_size(tmp_path, type_name):
    number = kind(type_name)
    block, size = gguf.GGML_QUANT_SIZES[number]
    path = tmp_path / "x.gguf"
    entries = [entry("w", (2 * block, 3), number), entry("z", (4,), offset=-(-6 * size // 32) * 32)]
    path.write_bytes(file_bytes(entries, data=bytes(-(-6 * size // 32) * 32 + 16)))
    file = GgufFile.open(path)
    assert file.tensors["w"].nbytes == 6 * size and file.tensor("z").tolist() == [0, 0, 0, 0]
    with pytest.raises(
        CheckpointError, match=rf"tensor 'w' has type {type_name}, expected one of F32, F16, BF16, Q4_0"
    ):
        file.tensor("w")
    assert refused(tmp_path, file_bytes(entries, data=bytes(6 * size - 1))).startswith("tensor")


def test_tensor_refuses_codes_without_rows_and_unknown_names(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(file_bytes([entry("w", (32,), 2), entry("e", (32, 0), 2, 32)], data=bytes(32)))
    file = GgufFile.open(path)
    with pytest.raises(CheckpointError, match=r"tensor 'w' is Q4_0 of shape \[32\], expected rows"):
        file.tensor("w")
    assert file.tensor("e").shape == (0, 32)
    with pytest.raises(CheckpointError, match="has no tensor 'x'"):
        file.tensor("x")


# bad inputs: not a GGUF file of this kind


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "has no bytes, expected a GGUF file"),
        (b"GG", "starts with b'GG', expected a GGUF file"),
        (b"GGUF", "the version ends at byte 8, but the file has 4 bytes"),
        (b"GGUF\3\0\0\0" + bytes(7), "the counts ends at byte 16"),
        (file_bytes(magic=b"tjgg"), "a GGML file of the time before GGUF"),
        (file_bytes(magic=b"GGUF", version=1), "is GGUF version 1, expected 2 or 3"),
        (file_bytes(version=4), "is GGUF version 4, expected 2 or 3"),
        (file_bytes(version=0), "is GGUF version 0, expected 2 or 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
        (b"GGUF" + struct.pack(">IQQ", 2, 0, 0), "is big-endian"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"<!DOCTYPE html><html></html>", "an HTML page"),
        (b"PK\3\4" + bytes(60), "a zip archive"),
        (bytes(4096), "nothing but zero bytes"),
        (b"\x50\0\0\0\0\0\0\0{}", "starts with b'P\\x00\\x00\\x00', expected a GGUF file"),
    ],
    ids=range(15),
)
def test_open_refuses_what_is_no_gguf_file(tmp_path, content, expected):
    assert refused(tmp_path, content).startswith(expected)


def test_open_refuses_what_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert refusal(tmp_path / "fifo") == "is a FIFO, expected a regular file"
    assert refusal(tmp_path) == "is a folder, expected a regular file"
    assert refusal(tmp_path / "none") == "no such file"


def test_open_refuses_a_big_endian_file_of_the_gguf_package(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert refusal(tmp_path / "x.gguf").startswith("is big-endian")


# counts and lengths that are larger than the file, or overflow


HUGE = [2**63 - 1, 2**63, 2**64 - 1, 2**61 + 1, 2**32, 1000]


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("which", [0, 1], ids=["tensors", "keys"])
def test_open_refuses_a_count_that_the_file_has_no_room_for(tmp_path, count, which):
    counts = [0, 0]
    counts[which] = count
    what = ("tensors", "metadata keys")[which]
    assert refused(tmp_path, file_bytes(counts=counts)).startswith(f"says it has {count} {what}, expected at most 0")


def test_open_refuses_counts_above_the_limits_though_the_file_is_large(tmp_path):
    for counts, limit in (((module.TENSOR_LIMIT + 1, 0), module.TENSOR_LIMIT), ((0, 65537), module.KEY_LIMIT)):
        path = tmp_path / "x.gguf"
        path.write_bytes(file_bytes(counts=counts))
        os.truncate(path, 1 << 40)
        assert f"expected at most {limit} " in refusal(path)


@pytest.mark.parametrize("length", HUGE)
def test_open_refuses_a_string_longer_than_the_file(tmp_path, length):
    data = bytes(40)
    for content in (
        file_bytes(pairs=[text(b"key", length) + data]),
        file_bytes(pairs=[pair("key", STRING, text(b"x", length) + data)]),
        file_bytes(pairs=[pair("key", ARRAY, array(STRING, 2, text("x") + text(b"y", length)) + data)]),
        file_bytes([text(b"name", length) + data]),
    ):
        assert re.search("ends at byte .* but the file has|has .* bytes, expected at most", refused(tmp_path, content))


@pytest.mark.parametrize("type_number", [U8, U32, U64, F64, BOOL, STRING])
@pytest.mark.parametrize("count", HUGE)
def test_open_refuses_an_array_whose_size_overflows_or_exceeds_the_file(tmp_path, type_number, count):
    content = file_bytes(pairs=[pair("a.b", ARRAY, array(type_number, count, bytes(64)))])
    tracemalloc.start()
    message = refused(tmp_path, content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message.startswith("metadata 'a.b' ") and peak < 1 << 20


def test_open_bounds_the_header_and_its_strings_in_a_large_file(tmp_path):
    path = tmp_path / "x.gguf"
    for content, expected in (
        (pair("a", ARRAY, array(U8, 1 << 30)), "expected a header of 100000000 bytes"),
        (pair("a", STRING, text(b"", 1 << 30)), "expected at most 100000000"),
        (pair("a", ARRAY, array(STRING, 1 << 23)), "has 8388608 strings, expected at most 4194304"),
    ):
        path.write_bytes(file_bytes(pairs=[content]))
        os.truncate(path, 1 << 40)
        tracemalloc.start()
        message = refusal(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert expected in message and peak < 1 << 20


# metadata


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([pair("", U64, bytes(8))], "metadata key '', expected a name"),
        ([pair("a b", U8, b"\1")], "metadata key 'a b', expected a name"),
        ([pair("a\n", U8, b"\1")], "metadata key 'a\\n', expected a name"),
        ([pair(b"\xff", U8, b"\1")], "metadata key 0 is not UTF-8"),
        ([pair("k" * 65536, U8, b"\1")], "metadata key 0 has 65536 bytes, expected at most 65535"),
        ([pair("a", U8, b"\1"), pair("a", U8, b"\1")], "metadata key 'a' appears twice"),
        ([pair("a", 13, b"\1")], "metadata 'a' has type 13, expected a number"),
        ([pair("a", 2**32 - 1, b"\1")], "metadata 'a' has type 4294967295"),
        ([pair("a", BOOL, b"\2")], "metadata 'a' has a truth value of 2"),
        ([pair("a", STRING, text(b"\xc3("))], "metadata 'a' is not UTF-8"),
        ([pair("a", STRING, text(b"\xed\xa0\x80"))], "metadata 'a' is not UTF-8"),
        ([pair("a", ARRAY, array(STRING, 2, text("x") + text(b"\xff")))], "metadata 'a' has a string 1 that is not"),
        ([pair("a", ARRAY, array(ARRAY, 1, array(U8, 1, b"\1")))], "metadata 'a' is an array of arrays"),
        ([pair("a", ARRAY, array(13, 1, b"\1"))], "metadata 'a' has elements of type 13"),
        ([pair("a", ARRAY, array(BOOL, 2, b"\0\3"))], "metadata 'a' has a truth value of 3"),
        ([pair("a", U64, b"\1")], "metadata 'a' ends at byte"),
        *(
            (
                [pair("general.alignment", U32, struct.pack("<I", n))],
                f"general.alignment is {n}, expected a power of two",
            )
            for n in (0, 1, 4, 12, 33, 2**22, 2**31)
        ),
        ([pair("general.alignment", STRING, text("32"))], "general.alignment is '32'"),
        ([pair("general.alignment", F32, struct.pack("<f", 32))], "general.alignment is 32.0"),
        ([pair("general.alignment", ARRAY, array(U32, 1, b"\x20\0\0\0"))], "general.alignment is array"),
    ],
    ids=range(26),
)
def test_open_refuses_metadata_that_is_wrong(tmp_path, pairs, expected):
    assert refused(tmp_path, file_bytes(pairs=pairs)).startswith(expected)


# entries of tensors


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([entry("")], "tensor name '' has control characters or parts of a path"),
        ([entry("a/../b")], "tensor name 'a/../b' has"),
        ([entry("/etc/passwd")], "tensor name '/etc/passwd' has"),
        ([entry("a\\b")], "tensor name 'a\\\\b' has"),
        ([entry("a\0b")], "tensor name 'a\\x00b' has"),
        ([entry(b"\xff")], "the name of tensor 0 is not UTF-8"),
        ([entry("x" * 65)], "the name of tensor 0 has 65 bytes, expected at most 64"),
        ([entry(), entry()], "tensor 'a' appears twice"),
        ([entry(sizes=(1,) * 5)], "tensor 'a' has 5 axes, expected at most 4"),
        ([entry(rank=2**32 - 1)], "tensor 'a' has 4294967295 axes"),
        ([entry(sizes=(2**64 - 1,))], "tensor 'a' has shape [18446744073709551615], expected sizes below 2**63"),
        ([entry(sizes=(2**63, 2))], "tensor 'a' has shape [2, 9223372036854775808], expected sizes"),
        # products beyond 64 bits, also such that come back to something small
        ([entry(sizes=(2**62, 4))], "tensor 'a' has shape [4, 4611686018427387904], expected less than 2**63 bytes"),
        ([entry(sizes=(2**32, 2**32))], "tensor 'a' has shape"),
        ([entry(sizes=(2**32, 2**31, 2, 1))], "tensor 'a' has shape"),
        ([entry(sizes=(0, 2**62, 2**62))], "tensor 'a' has shape"),
        ([entry(sizes=(2**61 + 1, 8))], "tensor 'a' has shape"),
        ([entry(sizes=(2**60,))], "tensor 'a' ends at byte"),
        ([entry(sizes=(2**59, 32), type_number=2)], "tensor 'a' has shape"),
        ([entry(sizes=(2**47, 32), type_number=12)], "tensor 'a' ends at byte"),
        ([entry(type_number=42)], "tensor 'a' has type number 42, expected one of F32"),
        ([entry(type_number=2**32 - 1)], "tensor 'a' has type number 4294967295"),
        ([entry(type_number=4)], "tensor 'a' has type Q4_2, which GGUF no longer has"),
        ([entry(type_number=31)], "tensor 'a' has type Q4_0_4_4, which GGUF no longer has"),
        ([entry(sizes=(33,), type_number=2)], "tensor 'a' is Q4_0 of shape [33], expected rows of a multiple of 32"),
        ([entry(sizes=(32, 8), type_number=12)], "tensor 'a' is Q4_K of shape [8, 32], expected rows of a multiple of"),
        ([entry(sizes=(), type_number=8)], "tensor 'a' is Q8_0 of shape []"),
        ([entry(offset=1)], "tensor 'a' has offset 1, expected a multiple of 32"),
        ([entry(offset=2**64 - 32)], "tensor 'a' ends at byte 1844674407370955"),
        ([entry(offset=32)], "tensor 'a' ends at byte"),
        ([entry(sizes=(9,))], "tensor 'a' ends at byte"),
        ([entry("a", (8,)), entry("b", (1,))], "tensor 'a' starts at byte"),
    ],
    ids=range(32),
)
def test_open_refuses_a_tensor_that_cannot_be(tmp_path, entries, expected):
    assert refused(tmp_path, file_bytes(entries, data=bytes(32))).startswith(expected)


def test_open_refuses_overlaps_holes_and_what_lies_behind(tmp_path):
    size = 64

    def message(second, data):
        return refused(tmp_path, file_bytes([entry("a", (size // 4,)), entry("b", (8,), offset=second)], data=data))

    assert "tensor 'b' starts at byte" in message(32, bytes(96)) and "it overlaps" in message(32, bytes(96))
    assert "tensor 'b' starts at byte" in message(96, bytes(128)) and "unused bytes" in message(96, bytes(128))
    assert "has 32 bytes behind the last tensor" in message(64, bytes(128))
    assert "tensor 'b' ends at byte" in message(64, bytes(95))
    path = tmp_path / "good.gguf"
    path.write_bytes(file_bytes([entry("a", (size // 4,)), entry("b", (8,), offset=64)], data=bytes(96)))
    assert len(GgufFile.open(path).tensors) == 2


def test_open_refuses_a_file_cut_anywhere(tmp_path, rng):
    values = rng.standard_normal((4, 32)).astype(np.float32)
    path = write(tmp_path / "x.gguf", {"a": (values, "Q4_0"), "b": (values, "F32")}, words=["one", "two"], n=3)
    data = path.read_bytes()
    for length in [*range(200), *range(200, len(data), 7), len(data) - 1]:
        assert refused(tmp_path, data[:length])


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_blocks_that_are_cut_or_do_not_fit_rows_are_refused_at_open(tmp_path, type_name):
    """A file that ends in a block, or before the last one; rows that are no whole blocks."""
    known, number = BLOCK_TYPES[type_name], kind(type_name).value
    rows = 3 * 2 * known.nbytes
    good = file_bytes([entry("w", (2 * known.size, 3), number)], data=bytes(rows))
    (tmp_path / "good.gguf").write_bytes(good)
    assert GgufFile.open(tmp_path / "good.gguf").tensors["w"].nbytes == rows
    for missing in (1, known.nbytes - 1, known.nbytes, rows):
        cut = file_bytes([entry("w", (2 * known.size, 3), number)], data=bytes(rows - missing))
        assert refused(tmp_path, cut).startswith("tensor 'w' ends at byte")
    for columns in (1, known.size - 1, known.size + 1, 2 * known.size - 16):
        found = refused(tmp_path, file_bytes([entry("w", (columns, 3), number)], data=bytes(1 << 12)))
        assert found.startswith(f"tensor 'w' is {type_name} of shape [3, {columns}], expected rows of a multiple of")


@pytest.mark.parametrize(
    ("type_name", "at"), [(name, at) for name, known in BLOCK_TYPES.items() for at in known.halves]
)
def test_blocks_with_a_scale_that_is_not_finite_are_refused_by_number(tmp_path, type_name, at):
    """Each half of a block, infinite and NaN, of either sign; the file opens, its tensor does not."""
    known = BLOCK_TYPES[type_name]
    for pattern in (0x7C00, 0xFC00, 0x7C01, 0xFFFF):
        data = np.zeros((6, known.nbytes), np.uint8)
        data[4, at : at + 2] = pattern & 0xFF, pattern >> 8
        path = tmp_path / "x.gguf"
        path.write_bytes(file_bytes([entry("w", (2 * known.size, 3), kind(type_name).value)], data=data.tobytes()))
        file = GgufFile.open(path)
        expected = "tensor 'w' has a scale that is not finite in block 4, expected finite numbers: damaged"
        with pytest.raises(CheckpointError, match=re.escape(expected)):
            file.tensor("w")


# anything else


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    values = np.random.default_rng(0).standard_normal((2, 256)).astype(np.float32)
    tensors = {f"blk.{n}.{t}": (values, t) for n, t in enumerate((*AFFINE, *BLOCK_TYPES))}
    return folder, write(folder / "good.gguf", tensors, words=["a", "bc", "é"], ids=[1, 2, 3], n=3, f=1.5).read_bytes()


def use(path: Path) -> None:
    """Open a file and read all of it; anything but a CheckpointError fails the test."""
    with contextlib.suppress(CheckpointError):
        file = GgufFile.open(path)
        for name, info in file.tensors.items():
            assert 0 <= info.start <= info.stop <= file.size
            numbers(file.tensor(name))


@settings(max_examples=400)
@given(data=st.data())
def test_open_survives_bytes_that_are_changed(sample, data):
    folder, good = sample
    broken = bytearray(good)
    header = good.index(struct.pack("<f", 1.5)) + 600
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(header, len(good) - 8)))
        piece = data.draw(
            st.sampled_from([b"\xff", b"\0", b"\x80", b"\xff" * 8, bytes(7) + b"\x80", b"\0\0\0\x40\0\0\0\0", bytes(8)])
            | st.binary(min_size=1, max_size=8)
        )
        broken[place : place + len(piece)] = piece
    path = folder / "broken.gguf"
    path.write_bytes(broken)
    tracemalloc.start()
    use(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


@settings(max_examples=100)
@given(tail=st.binary(max_size=200), counts=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_open_survives_anything_behind_the_magic(sample, tail, counts):
    path = sample[0] / "junk.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + tail)
    use(path)


def test_tensor_info_counts_bytes():
    assert TensorInfo("F32", (2,), 8, 16).nbytes == 8
