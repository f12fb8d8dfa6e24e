"""Model folders: where tensors are found, how they are quantized, and what is refused in one line."""

import json
import os
import shutil
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy

from penstock.dtypes import bfloat16
from penstock.errors import CheckpointError
from penstock.quant import Format, QuantizedTensor, dequantize
from penstock.quant import quantize_reference as quantize
from penstock.weights.checkpoint import INDEX, Checkpoint
from penstock.weights.files import JSON_LIMIT
from tests.weights.common import entry, parts, safetensors_bytes, write_config, write_index

TABLE = {"bits": 4, "group_size": 32}


def save(path, tensors, **metadata):
    safetensors.numpy.save_file(dict(tensors), path, metadata or None)


def numbered(*names):
    return {name: np.full(3, i, np.float32) for i, name in enumerate(names)}


def refusal(call, *arguments) -> str:
    """The message of a CheckpointError: one bounded line."""
    with pytest.raises(CheckpointError) as raised:
        call(*arguments)
    message = str(raised.value)
    assert "\n" not in message and len(message) < 800
    return message


@pytest.fixture
def folder(tmp_path):
    """A model of two tensors in one file."""
    write_config(tmp_path / "m")
    save(tmp_path / "m" / "model.safetensors", numbered("a.weight", "b"))
    return tmp_path / "m"


def sharded(folder, *names):
    """Two tensors in each of the named files, and the index that belongs to them."""
    folder.mkdir(exist_ok=True)
    if not (folder / "config.json").exists():
        write_config(folder)
    weight_map = {}
    for name in names:
        stem = name.removesuffix(".safetensors")
        save(folder / name, numbered(f"{stem}.x", f"{stem}.y"))
        weight_map |= {f"{stem}.x": name, f"{stem}.y": name}
    write_index(folder, weight_map, total_size=24 * len(names))
    return weight_map


TWO = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

# what is read


def test_open_gives_config_names_shapes_and_arrays(folder):
    ckpt = Checkpoint.open(str(folder))
    assert ckpt.path == folder and ckpt.config == {"model_type": "test"}
    assert ckpt.names == {"a.weight", "b"} and "b" in ckpt and "c" not in ckpt and 7 not in ckpt
    assert (ckpt.shape("b"), ckpt.dtype("b"), ckpt.nbytes, ckpt.misaligned_nbytes) == ((3,), "float32", 24, 0)
    assert ckpt.array("b").tolist() == [1, 1, 1] and not ckpt.array("b").flags.writeable
    assert ckpt.notices == [] and ckpt.files == (folder / "model.safetensors",)


def test_location_names_the_bytes_of_a_tensor(folder):
    path, start, stop = Checkpoint.open(folder).location("b")
    assert path.read_bytes()[start:stop] == np.ones(3, np.float32).tobytes()


@pytest.mark.parametrize("spelled, name", [("BF16", "bfloat16"), ("U32", "uint32"), ("F8_E4M3", "float8_e4m3fn")])
def test_dtype_has_penstocks_names(folder, spelled, name):
    size = {"BF16": 2, "U32": 4, "F8_E4M3": 1}[spelled]
    content = safetensors_bytes({"t": entry(spelled, [1], [0, size])}, bytes(size))
    (folder / "model.safetensors").write_bytes(content)
    assert Checkpoint.open(folder).dtype("t") == name


def test_unknown_names_are_refused(folder):
    ckpt = Checkpoint.open(folder)
    for call in (ckpt.array, ckpt.shape, ckpt.dtype, ckpt.location, ckpt.tensor):
        assert refusal(call, "nothing") == f"{folder}: has no tensor 'nothing'"
    assert ckpt.quantization("nothing") is None


def test_tensor_finds_weights_with_and_without_suffix(folder):
    ckpt = Checkpoint.open(folder)
    assert ckpt.tensor("a").tolist() == [0, 0, 0] and ckpt.tensor("b").tolist() == [1, 1, 1]
    assert ckpt.tensor("a.weight").tolist() == [0, 0, 0]


@pytest.mark.parametrize("index", [True, False])
def test_open_reads_shards_with_and_without_index(tmp_path, index):
    sharded(tmp_path, *TWO)
    if not index:
        (tmp_path / INDEX).unlink()
    ckpt = Checkpoint.open(tmp_path)
    assert len(ckpt.names) == 4 and ckpt.notices == [] and [f.name for f in ckpt.files] == [*TWO]
    assert ckpt.location("model-00002-of-00002.y")[0] == tmp_path / TWO[1] and ckpt.nbytes == 48


def test_open_follows_the_links_of_a_hub_cache(folder, tmp_path):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("config.json", "model.safetensors"):
        blob = tmp_path / f"blob-{name[:5]}"
        (folder / name).rename(blob)
        (snapshot / name).symlink_to(blob)
    assert Checkpoint.open(snapshot).tensor("b").tolist() == [1, 1, 1]


@pytest.mark.parametrize("names", [("weights.00.safetensors", "weights.01.safetensors"), ("anything.safetensors",)])
def test_open_takes_other_names_where_no_file_is_called_model(tmp_path, names):
    sharded(tmp_path, *names)
    (tmp_path / INDEX).unlink()
    save(tmp_path / "adapters.safetensors", numbered("lora"))
    (tmp_path / "._x.safetensors").write_bytes(b"junk of a file system")
    ckpt = Checkpoint.open(tmp_path)
    assert [f.name for f in ckpt.files] == [*names] and "lora" not in ckpt
    assert ckpt.notices == [f"{tmp_path}: 'adapters.safetensors': not part of the model by their names, not read"]


def test_open_of_a_large_checkpoint_reads_no_weights(folder):
    size = 1 << 40
    path = folder / "model.safetensors"
    path.write_bytes(safetensors_bytes({"t": entry("U8", [size], [0, size])}))
    os.truncate(path, path.stat().st_size + size)  # sparse
    tracemalloc.start()
    ckpt = Checkpoint.open(folder)
    assert ckpt.nbytes == size and ckpt.fingerprint
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_fingerprint_depends_on_config_and_headers_only(folder, tmp_path):
    print_ = Checkpoint.open(folder).fingerprint
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    (moved / "model.safetensors").rename(moved / "weights.safetensors")
    assert Checkpoint.open(moved).fingerprint == print_ and len(print_) == 64
    (moved / "weights.safetensors").unlink()
    for i, name in enumerate(("b", "a.weight")):
        save(moved / f"model-0000{i + 1}-of-00002.safetensors", {name: np.zeros(3, np.float32)})
    assert Checkpoint.open(moved).fingerprint == print_  # other values, other files, another order

    seen = {print_}
    for tensors in (numbered("a.weight", "c"), {"a.weight": np.zeros((3, 1), "f4"), "b": np.zeros(3, "f4")},
                    {"a.weight": np.zeros(3, "i4"), "b": np.zeros(3, "f4")}, numbered("a.weight")):  # fmt: skip
        save(folder / "model.safetensors", tensors)
        seen.add(Checkpoint.open(folder).fingerprint)
    write_config(folder, layers=2)
    seen.add(Checkpoint.open(folder).fingerprint)
    assert len(seen) == 6


@pytest.mark.parametrize("key, value", [("auto_map", {"AutoModel": "evil.Model"}), ("model_file", "../evil.py")])
def test_code_in_the_folder_is_never_executed(folder, tmp_path, key, value):
    for place in (folder, tmp_path):
        (place / "evil.py").write_text("raise SystemExit('executed')")
    write_config(folder, **{key: value})
    (notice,) = Checkpoint.open(folder).notices
    assert key in notice and "never executed" in notice


# folder and config.json


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty, expected JSON"),
        (b"\xef\xbb\xbf", "is empty, expected JSON"),
        (b"[]", "is [], expected a JSON object"),
        (b"3", "is 3, expected a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"eps": NaN}', "not valid JSON: NaN"),
        (b'{"eps": 1e400}', "not valid JSON: '1e400' is beyond"),
        (b'{"a": 1, "a": 2}', "not valid JSON: key 'a' appears twice"),
        (b"\xff\xfe{\0}\0", "not valid UTF-8"),
        (b'{"a":' * 200_000, "not valid JSON: brackets are nested"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"<!doctype html>", "an HTML page"),
    ],
    ids=range(12),
)
def test_open_refuses_a_config_that_is_no_strict_json_object(folder, content, expected):
    (folder / "config.json").write_bytes(content)
    assert refusal(Checkpoint.open, folder).startswith(f"{folder / 'config.json'}: {expected}")


def test_open_takes_a_config_with_byte_order_mark(folder):
    (folder / "config.json").write_bytes(b'\xef\xbb\xbf{"model_type": "x", "big": 123456789012345678901234567890}')
    assert Checkpoint.open(folder).config["big"] == 123456789012345678901234567890


def test_open_refuses_a_config_that_is_too_large(folder):
    os.truncate(folder / "config.json", JSON_LIMIT + 1)
    expected = f"has {JSON_LIMIT + 1} bytes, expected at most {JSON_LIMIT}"
    assert refusal(Checkpoint.open, folder) == f"{folder / 'config.json'}: {expected}"


def test_open_refuses_what_is_no_model_folder(folder, tmp_path):
    assert refusal(Checkpoint.open, tmp_path / "x") == f"{tmp_path / 'x'}: no such folder"
    file = folder / "model.safetensors"
    assert refusal(Checkpoint.open, file) == f"{file}: is a file, expected a model folder"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "leads back to itself" in refusal(Checkpoint.open, tmp_path / "loop")
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(Checkpoint.open, folder)
    os.mkfifo(folder / "config.json")
    assert "config.json: is a FIFO" in refusal(Checkpoint.open, folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("gone")
    assert "config.json: is a link to gone, which does not exist" in refusal(Checkpoint.open, folder)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pytorch_model.bin", "has no .safetensors files but 'pytorch_model.bin', .* pickles are never loaded"),
        ("model.pt", "pickles are never loaded"),
        ("model.gguf", "has no .safetensors files but 'model.gguf', expected at least one$"),
        ("adapters.safetensors", "has no .safetensors files, expected at least one$"),
        ("tokenizer.json", "has no .safetensors files, expected at least one$"),
    ],
)
def test_open_refuses_a_folder_without_weights_it_can_read(tmp_path, name, expected):
    write_config(tmp_path)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=expected):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: p.symlink_to("gone"), lambda p: p.write_bytes(b"x")])
def test_open_refuses_a_damaged_shard_and_names_it(tmp_path, make):
    sharded(tmp_path, *TWO)
    (tmp_path / TWO[1]).unlink()
    make(tmp_path / TWO[1])
    assert refusal(Checkpoint.open, tmp_path).startswith(f"{tmp_path / TWO[1]}: ")


# group 6: the index


def test_open_refuses_missing_shards(tmp_path):
    sharded(tmp_path, *TWO)
    (tmp_path / TWO[1]).unlink()
    message = refusal(Checkpoint.open, tmp_path)
    assert message.startswith(f"{tmp_path / INDEX}: lists '{TWO[1]}', but the folder has no such file")
    (tmp_path / INDEX).unlink()
    assert f"has no {TWO[1]}, expected all files of the set" in refusal(Checkpoint.open, tmp_path)
    (tmp_path / TWO[0]).rename(tmp_path / "model-00001-of-999999.safetensors")
    assert "has no model-00002-of-999999.safetensors" in refusal(Checkpoint.open, tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", *TWO[:1]])
def test_open_refuses_an_index_whose_files_are_partly_there(folder, file):
    save(folder / file, numbered("a.weight"))
    write_index(folder, {"a.weight": file, "b": "missing.safetensors"})
    assert "lists 'missing.safetensors', but the folder has no such file" in refusal(Checkpoint.open, folder)


def test_open_reads_without_an_index_that_belongs_to_other_files(folder):
    write_index(folder, {"a.weight": TWO[0], "old": TWO[1]})
    ckpt = Checkpoint.open(folder)
    assert ckpt.names == {"a.weight", "b"}
    (notice,) = ckpt.notices
    assert notice.endswith("lists none of the files that are there; read without it: model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00004.safetensors")  # but these are incomplete
    assert "but the folder has no such file" in refusal(Checkpoint.open, folder)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("../m/model.safetensors", "is no plain file name"),
        ("/etc/model.safetensors", "is no plain file name"),
        ("sub/model.safetensors", "is no plain file name"),
        ("..\\model.safetensors", "is no plain file name"),
        ("..", "is no plain file name"),
        ("", "is no plain file name"),
        ("model.safetensors\0", "is no plain file name"),
        ("a\nb.safetensors", "is no plain file name"),
        ("config.json", "expected only .safetensors files"),
        (7, "the file of tensor 'b' is 7, expected a name"),
        (None, "the file of tensor 'b' is None"),
    ],
)
def test_open_refuses_an_index_that_leaves_the_folder(folder, file, expected):
    write_index(folder, {"a.weight": "model.safetensors", "b": file})
    message = refusal(Checkpoint.open, folder)
    assert message.startswith(f"{folder / INDEX}: ") and expected in message


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ([], "is [], expected a JSON object"),
        ({}, "weight_map: is None, expected a JSON object"),
        ({"weight_map": []}, "weight_map: is [], expected a JSON object"),
        ({"weight_map": {}}, "weight_map is empty"),
        ({"weight_map": {"b": "model.safetensors"}, "metadata": []}, "metadata: is [], expected a JSON object"),
        ({"weight_map": {"b": "model.safetensors", "c": "model.safetensors"}}, "tensor 'c' is not in model.saf"),
    ],
)
def test_open_refuses_a_wrong_index(folder, index, expected):
    (folder / INDEX).write_text(json.dumps(index))
    assert refusal(Checkpoint.open, folder).startswith(f"{folder / INDEX}: {expected}")


def test_open_refuses_an_index_that_takes_a_tensor_from_the_wrong_file(tmp_path):
    weight_map = sharded(tmp_path, *TWO)
    write_index(tmp_path, weight_map | {"model-00001-of-00002.x": TWO[1]})
    assert f"tensor 'model-00001-of-00002.x' is in {TWO[0]}, not in {TWO[1]}" in refusal(Checkpoint.open, tmp_path)


@pytest.mark.parametrize("index", [True, False])
def test_open_refuses_a_tensor_in_two_shards(tmp_path, index):
    sharded(tmp_path, *TWO)
    save(tmp_path / TWO[1], numbered("model-00001-of-00002.x", "model-00002-of-00002.x", "model-00002-of-00002.y"))
    if not index:
        (tmp_path / INDEX).unlink()
    message = refusal(Checkpoint.open, tmp_path)
    assert message == f"{tmp_path / TWO[1]}: tensor 'model-00001-of-00002.x' is in {TWO[0]} as well"


def test_open_gives_notices_of_what_an_index_leaves_out(tmp_path):
    weight_map = sharded(tmp_path, *TWO)
    save(tmp_path / "model-extra.safetensors", numbered("more"))
    del weight_map["model-00002-of-00002.y"]
    write_index(tmp_path, weight_map, total_size=7)
    ckpt = Checkpoint.open(tmp_path)
    assert len(ckpt.names) == 4 and "more" not in ckpt
    unread, unlisted, total = ckpt.notices
    assert unread == f"{tmp_path}: 'model-extra.safetensors': not listed in {INDEX}, not read"
    assert "does not list tensor 'model-00002-of-00002.y' of the files" in unlisted
    assert total.endswith("total_size is 7, the tensors have 48 bytes")


def test_open_takes_an_index_without_total_size(folder):
    write_index(folder, {"a.weight": "model.safetensors", "b": "model.safetensors"})
    assert Checkpoint.open(folder).notices == []


# group 8: quantization


def quantized(folder, tensors, **config):
    write_config(folder, **config)
    save(folder / "model.safetensors", tensors, format="mlx")
    return Checkpoint.open(folder)


@pytest.fixture
def q4(rng):
    """Two experts of 3 rows and 96 columns."""
    return quantize(rng.standard_normal((2, 3, 96)).astype(np.float32), 4, 32)


def test_tensor_honours_the_table_exactly(tmp_path, rng):
    formats = {"a": (4, 64), "gate": (8, 64), "b": (2, 32), "c": (3, 128), "d": (6, 64)}
    formats = {path: Format(*format) for path, format in formats.items()}
    weights = {path: rng.standard_normal((5, 384)).astype(np.float32) for path in formats}
    tensors = {"norm.weight": np.ones(3, bfloat16), "A_log": np.ones(2, np.float32)}
    wanted = {path: quantize(weights[path], *formats[path]) for path in formats}
    for path, q in wanted.items():
        tensors |= parts(path, q)
    table = {"group_size": 64, "bits": 4, "mode": "affine", "norm": False}
    table |= {p: {"bits": b, "group_size": g} for p, (b, g, _) in formats.items() if p != "a"}
    table["gate"]["mode"] = "affine"
    ckpt = quantized(tmp_path, tensors, quantization=table, quantization_config=table)
    assert ckpt.notices == [] and ckpt.quantization("norm") is None and ckpt.quantization("A_log") is None
    for path, format in formats.items():
        got = ckpt.tensor(path)
        assert isinstance(got, QuantizedTensor) and got.format == format == ckpt.quantization(path)
        assert got.shape == (5, 384)
        np.testing.assert_array_equal(dequantize(got), dequantize(wanted[path]))
    assert ckpt.tensor("norm").dtype == bfloat16 and ckpt.tensor("A_log").tolist() == [1, 1]


def test_tensor_reads_what_mlx_wrote(tmp_path, rng):
    mx = pytest.importorskip("mlx.core")
    dense = rng.standard_normal((3, 128)).astype(np.float32)
    arrays = dict(zip(("x.weight", "x.scales", "x.biases"), mx.quantize(mx.array(dense), 64, 5), strict=True))
    write_config(tmp_path, quantization={"group_size": 64, "bits": 5})
    for pad in range(4):  # mlx does not align the data: the length of a name moves them
        path = tmp_path / "model.safetensors"
        mx.save_safetensors(str(path), arrays | {"y" * (pad + 1): mx.array([1.0])}, {"format": "mlx"})
        ckpt = Checkpoint.open(tmp_path)
        want = np.array(mx.dequantize(*arrays.values(), 64, 5))
        np.testing.assert_allclose(dequantize(ckpt.tensor("x")), want, rtol=1e-6)
        copied = ckpt.location("x.weight")[1] % 4 != 0
        assert (ckpt.misaligned_nbytes > 0) == copied
        assert len(ckpt.notices) == copied and all("not aligned in" in notice for notice in ckpt.notices)


def test_notices_count_the_copies_of_misaligned_tensors(tmp_path):
    write_config(tmp_path)
    header = json.dumps({"a": entry("F32", [2], [0, 8]), "b": entry("F32", [1], [8, 12])}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(header + b" " * (-len(header) % 8 + 2), bytes(12)))
    ckpt = Checkpoint.open(tmp_path)
    assert ckpt.notices == [] and ckpt.misaligned_nbytes == 12
    ckpt.array("a")
    assert ckpt.notices == [f"1 tensor (8 B) is not aligned in {path} and was copied"]
    ckpt.array("a"), ckpt.array("b")
    assert ckpt.notices == [f"2 tensors (12 B) are not aligned in {path} and were copied"]


def test_tensor_takes_parts_from_several_files(tmp_path, q4):
    write_config(tmp_path, quantization=TABLE)
    for i, (name, array) in enumerate(parts("experts", q4).items()):
        save(tmp_path / f"model-0000{i + 1}-of-00003.safetensors", {name: array})
    assert Checkpoint.open(tmp_path).tensor("experts").shape == (2, 3, 96)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
def test_tensor_takes_scales_of_each_float(tmp_path, q4, dtype):
    tensors = parts("x", q4) | {"x.scales": q4.scales.astype(dtype), "x.biases": q4.biases.astype(dtype)}
    assert quantized(tmp_path, tensors, quantization=TABLE).tensor("x").scales.dtype == dtype


def test_null_in_an_override_is_what_mlx_has_a_default_for(tmp_path, q4, rng):
    """mlx_lm.convert --quant-predicate mixed_3_6 writes it, unless it is given a group size."""
    eight = quantize(rng.standard_normal((3, 128)).astype(np.float32), 8, 64)
    table = {"bits": 4, "group_size": 64, "x": {"bits": 8, "group_size": None, "mode": "affine"}}
    assert quantized(tmp_path, parts("x", eight), quantization=table).quantization("x") == Format(8, 64)


def test_overrides_leave_out_what_mlx_has_defaults_for(tmp_path, rng):
    eight = quantize(rng.standard_normal((3, 128)).astype(np.float32), 8, 64)
    table = {"bits": 2, "group_size": 32, "x": {"bits": 8}, "y": {"group_size": 128}, "z": True}
    ckpt = quantized(tmp_path, parts("x", eight) | parts("y", eight) | parts("z", eight), quantization=table)
    assert [ckpt.quantization(path) for path in "xyz"] == [Format(8, 64), Format(4, 128), Format(2, 32)]
    np.testing.assert_array_equal(dequantize(ckpt.tensor("x")), dequantize(eight))


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
@pytest.mark.parametrize("nested", [False, True])
def test_quantization_is_found_under_either_name(tmp_path, q4, key, nested):
    config = {key: TABLE} if not nested else {"text_config": {key: TABLE}, "quantization": None}
    assert quantized(tmp_path, parts("x", q4), **config).quantization("x") == Format(4, 32)


def test_quantization_comes_before_another_quantization_config(tmp_path, q4):
    ckpt = quantized(tmp_path, parts("x", q4), quantization=TABLE, quantization_config={"quant_method": "fp8"})
    assert ckpt.quantization("x") == Format(4, 32) and "quantization_config differs" in ckpt.notices[0]


def test_notices_of_overrides_and_keys_that_mean_nothing(tmp_path, q4):
    table = TABLE | {"gone": TABLE, "gone.too": False, "version": 3}
    ckpt = quantized(tmp_path, parts("x", q4), quantization=table)
    assert ckpt.quantization("x") == Format(4, 32)
    unknown, absent = ckpt.notices
    assert "quantization has 'version', which is not known" in unknown
    assert "speaks of 'gone' and 1 others, which the files do not have" in absent


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"group_size": 64}, "quantization: bits is None, expected one of 1, 2, 3, 4, 5, 6, 8"),
        ({"bits": 4}, "quantization: group_size is None, expected one of 32, 64, 128"),
        ({"bits": 7, "group_size": 64}, "quantization: bits is 7,"),
        ({"bits": 0, "group_size": 64}, "quantization: bits is 0,"),
        ({"bits": True, "group_size": 64}, "quantization: bits is True,"),
        ({"bits": 4.0, "group_size": 64}, "quantization: bits is 4.0,"),
        ({"bits": "4", "group_size": 64}, "quantization: bits is '4',"),
        ({"bits": 4, "group_size": 16}, "quantization: group_size is 16,"),
        ({"bits": 4, "group_size": -1}, "quantization: group_size is -1,"),
        (
            {"bits": 4, "group_size": 32, "mode": "mxfp6"},
            "quantization: mode is 'mxfp6', expected one of affine, mxfp4",
        ),
        ({"bits": 8, "group_size": 32, "mode": "mxfp4"}, "quantization: bits is 8, expected 4 in mode mxfp4"),
        ({"bits": 4, "group_size": 32, "mode": "nvfp4"}, "quantization: group_size is 32, expected 16 in mode nvfp4"),
        ([4, 64], "quantization: is [4, 64], expected a JSON object"),
        (4, "quantization: is 4, expected a JSON object"),
        (TABLE | {"x": {"bits": 4, "group_size": 32, "sym": 1}}, "quantization of 'x' has 'sym', expected only bits"),
        (TABLE | {"x": {"bits": 9}}, "quantization of 'x': bits is 9"),
        (TABLE | {"x": {"mode": 8}}, "quantization of 'x': mode is 8, expected one of"),
        (TABLE | {"x": 8}, "quantization of 'x' is 8, expected an object or false"),
        (TABLE | {"x.y": None}, "quantization of 'x.y' is None, expected an object or false"),
    ],
)
def test_open_refuses_a_wrong_quantization_table(tmp_path, q4, table, expected):
    with pytest.raises(CheckpointError) as raised:
        quantized(tmp_path, parts("x", q4), quantization=table)
    assert str(raised.value).startswith(f"{tmp_path / 'config.json'}: {expected}")


def test_modes_of_small_floats_are_read_by_path(tmp_path, rng):
    weights = {name: rng.standard_normal((2, 3, 64)).astype(np.float32) for name in ("a", "b", "c")}
    modes = {"a": "mxfp4", "b": "nvfp4", "c": "mxfp8"}
    made = {name: quantize(w, mode=modes[name]) for name, w in weights.items()}
    scales = np.float32([2, 3])
    tensors = {f"{name}.weight": q.packed for name, q in made.items()}
    tensors |= {f"{name}.scales": q.scales for name, q in made.items()} | {"b.global_scale": scales}
    table = {"bits": 4, "group_size": 32, "mode": "mxfp4", "c": {"mode": "mxfp8"}}
    table["b"] = {"bits": 4, "group_size": 16, "mode": "nvfp4", "global_scale": True}
    ckpt = quantized(tmp_path, tensors, quantization=table)
    assert ckpt.notices == [] and [ckpt.quantization(name).mode for name in "abc"] == list(modes.values())
    for name in "ac":
        np.testing.assert_array_equal(dequantize(ckpt.tensor(name)), dequantize(made[name]))
    assert ckpt.parts("b")[1] == ("b.weight", "b.scales", "b.global_scale")
    np.testing.assert_array_equal(ckpt.tensor("b").global_scale, scales)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x.scales": np.zeros((3, 2), np.float16)}, "'x.scales' has dtype F16, expected U8: config.json says nvfp4"),
        ({"x.scales": np.zeros((3, 2), np.uint8)}, "'x.scales' has shape [3, 2], expected [3, 4]: config.json says"),
        ({"x.biases": np.zeros((3, 4), np.uint8)}, "'x.biases' is there, expected no biases: config.json says nvfp4"),
        ({"x.weight": np.zeros((3, 6), np.uint32)}, "'x.weight' has 6 words in a row, expected a multiple of 4"),
        ({"x.global_scale": np.zeros(3, np.float32)}, "'x.global_scale' is F32 [3], expected F32 [], one for each"),
    ],
)  # fmt: skip
def test_tensor_refuses_small_floats_that_do_not_fit(tmp_path, change, message):
    tensors = {"x.weight": np.zeros((3, 8), np.uint32), "x.scales": np.zeros((3, 4), np.uint8), **change}
    ckpt = quantized(tmp_path, tensors, quantization={"bits": 4, "group_size": 16, "mode": "nvfp4"})
    assert message in refusal(ckpt.tensor, "x")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_open_refuses_other_quantization_methods_by_name(folder, method, nested):
    config = {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 64}}
    write_config(folder, **({"text_config": config} if nested else config))
    assert f"quantization_config has quant_method '{method}', expected MLX's" in refusal(Checkpoint.open, folder)


def test_open_refuses_modelopt_files(folder):
    (folder / "hf_quant_config.json").write_text("{}")
    assert "ModelOpt quantization" in refusal(Checkpoint.open, folder)


def cast(array, dtype):
    return array.astype(dtype)


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        (lambda t: t.pop("x.biases"), "x.scales", "has no x.biases beside it"),
        (lambda t: t.pop("x.weight"), "x.scales", "has no x.weight beside it"),
        (lambda t: t.pop("x.scales"), "x.weight", "has packed words (U32), but there is no x.scales"),
        (lambda t: t.update({"x.weight": t["x.weight"].view(np.int32)}), "x.weight", "has dtype I32, expected U32"),
        (lambda t: t.update({"x.weight": t["x.weight"].view(np.uint8)}), "x.weight", "has dtype U8, expected U32"),
        (
            lambda t: t.update({"x.weight": t["x.weight"][:, :, :11]}),
            "x.weight",
            "has 11 words in a row, expected a mu",
        ),
        (
            lambda t: t.update({"x.weight": t["x.weight"][:, :, :8]}),
            "x.scales",
            "has shape [2, 3, 3], expected [2, 3, 2]",
        ),
        (lambda t: t.update({"x.weight": t["x.weight"][:, :0]}), "x.weight", "has shape [2, 0, 12], expected [..."),
        (lambda t: t.update({"x.weight": t["x.weight"][0, 0]}), "x.weight", "has shape [12], expected [..., N, K"),
        (lambda t: t.update({"x.scales": t["x.scales"][:1]}), "x.scales", "has shape [1, 3, 3], expected [2, 3, 3]"),
        (lambda t: t.update({"x.scales": cast(t["x.scales"], "f8")}), "x.scales", "has dtype F64, expected one of F32"),
        (lambda t: t.update({"x.scales": cast(t["x.scales"], "u1")}), "x.scales", "has dtype U8, expected one of F32"),
        (lambda t: t.update({"x.biases": cast(t["x.biases"], "f2")}), "x.biases", "is F16 [2, 3, 3], expected F32 [2,"),
        (lambda t: t.update({"x.biases": t["x.biases"][:, :, :2]}), "x.biases", "is F32 [2, 3, 2], expected F32 [2, 3"),
    ],
    ids=range(14),
)
def test_tensor_refuses_parts_that_do_not_fit(tmp_path, q4, change, name, expected):
    tensors = parts("x", q4)
    change(tensors)
    tensors = {key: np.ascontiguousarray(array) for key, array in tensors.items()}
    ckpt = quantized(tmp_path, tensors, quantization=TABLE)
    message = refusal(ckpt.tensor, "x")
    assert message.startswith(f"{tmp_path / 'model.safetensors'}: tensor '{name}' {expected}")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "tensor 'x.scales' needs bits and group size, but config.json has no quantization"),
        ({"quantization": TABLE | {"x": False}}, "tensor 'x.scales' is there, but config.json says false"),
        ({"quantization": TABLE | {"x": {"bits": 8}}}, "tensor 'x.weight' has 12 words in a row, expected"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "has 12 words in a row, expected a multiple of 8: config"),
        ({"quantization": {"bits": 2, "group_size": 32}}, "has shape [2, 3, 3], expected [2, 3, 6]: config"),
    ],
)
def test_tensor_refuses_a_table_that_does_not_fit(tmp_path, q4, config, expected):
    assert expected in refusal(quantized(tmp_path, parts("x", q4), **config).tensor, "x")


def test_tensor_refuses_a_dense_weight_that_the_table_calls_quantized(tmp_path):
    table = TABLE | {"x": {"bits": 8, "group_size": 64}}
    ckpt = quantized(tmp_path, {"x.weight": np.zeros((2, 64), np.float32)}, quantization=table)
    assert "tensor 'x.weight' has no x.scales, but config.json says quantized" in refusal(ckpt.tensor, "x")


def test_tensor_refuses_8_bit_floats(folder):
    content = safetensors_bytes({"x.weight": entry("F8_E4M3", [2], [0, 2])}, bytes(2))
    (folder / "model.safetensors").write_bytes(content)
    assert "tensor 'x.weight' has dtype F8_E4M3, expected" in refusal(Checkpoint.open(folder).tensor, "x")


def test_tensor_refuses_a_file_truncated_after_opening(tmp_path, q4):
    ckpt = quantized(tmp_path, parts("x", q4), quantization=TABLE)
    os.truncate(tmp_path / "model.safetensors", 100)
    assert "has 100 bytes, expected the" in refusal(ckpt.tensor, "x")
