import hashlib
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.analysis import verify as library
from penstock.analysis.verify import Numbers, check_hashes, check_model, hub_hashes, read_hashes
from penstock.cli._output import progress_bar
from penstock.errors import CheckpointError
from penstock.weights.safetensors import SafetensorsFile
from tests.cli.common import call
from tests.cli.model import DEMO
from tests.models.common import small_config, tensors, write_model

SHARDS = [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
INDEX = "model.safetensors.index.json"
ALL = ["headers", "index", "numbers", "quantization", "shapes", "tokenizer", "template", "hashes"]


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A small dense model in three files with an index."""
    return write_model(tmp_path / "model", small_config(), shards=3)


@pytest.fixture
def quantized(tmp_path) -> Path:
    """The demo model, to be damaged."""
    return Path(shutil.copytree(DEMO, tmp_path / "demo"))


def change_json(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_header(path: Path, change) -> None:
    """Change the header of a safetensors file, the data staying as it is."""
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])


def overwrite(path: Path, tensor: str, at: int, data: bytes) -> None:
    """Put bytes into a tensor, from its `at`-th byte on."""
    start = SafetensorsFile.open(path).tensors[tensor].start + at
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def problems(folder: Path, check: str | None = None) -> list[str]:
    """Of one check, or of all; those of one check are all there are."""
    checks, _ = check_model(folder, None, progress_bar)
    found = {one.name: one.problems for one in checks}
    if check is not None:
        assert [name for name, listed in found.items() if listed] == [check]
        return found[check]
    return [problem for listed in found.values() for problem in listed]


# -- the command -----------------------------------------------------------------------------------------------------


def test_verify_finds_nothing_wrong_with_the_demo_model(capsys):
    shown = call(capsys, "verify")
    assert (shown.status, shown.err) == (0, "")
    lines = [line.split()[:2] for line in shown.out.splitlines()]
    assert [name for _, name in lines] == ALL
    assert {status for status, _ in lines} == {"ok", "skipped"}
    assert [name for status, name in lines if status == "skipped"] == ["index", "hashes"]


def test_verify_finds_nothing_wrong_with_shards(capsys, sharded):
    shown = call(capsys, "verify", str(sharded), "--json")
    found = json.loads(shown.out)
    assert (shown.status, shown.err, found["ok"]) == (0, "", True)
    about = {check["name"]: check["about"] for check in found["checks"]}
    size = sum(array.nbytes for array in tensors(small_config()).values())
    assert about["headers"].startswith("3 files, ") and about["headers"].endswith(f"{size / 1e6:,.1f} MB")
    assert about["index"] == f"{len(tensors(small_config()))} tensors in 3 files"
    assert {check["status"] for check in found["checks"][:7]} == {"ok"}
    assert "model.visual, mtp are skipped" in found["notes"][0]


def test_verify_lists_all_problems_and_ends_with_status_1(capsys, sharded):
    (sharded / SHARDS[1]).write_bytes(b"short")
    (sharded / SHARDS[2]).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    (sharded / "tokenizer.json").unlink()
    shown = call(capsys, "verify", str(sharded))
    assert (shown.status, shown.err) == (1, "")
    found = [line for line in shown.out.splitlines() if line.startswith("problem: ")]
    assert [line.partition(": ")[2].removeprefix(f"{sharded}/").partition(":")[0] for line in found] == [
        SHARDS[1],
        SHARDS[2],
        "tokenizer.json",
    ]
    assert shown.out.endswith("3 problems found\n")
    shown = call(capsys, "verify", str(sharded), "--json")
    assert shown.status == 1 and json.loads(shown.out)["ok"] is False


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("demo", "--model", "demo"), 2, "--model: 'demo' stands behind the verb already"),
        (("--hub", "--hashes", "x"), 2, "--hub: expected without --hashes"),
        (("--hub",), 1, "--hub: "),
        (("--hashes", "nosuch"), 1, "nosuch: no such file"),
        (("",), 1, "'': no such folder"),
        (("nosuch/model",), 1, "nosuch/model: no such folder, and not completely in the local cache"),
    ],
)
def test_verify_refuses_in_one_line(capsys, words, status, message):
    shown = call(capsys, "verify", *words)
    assert (shown.status, shown.out, shown.err.count("\n")) == (status, "", 1)
    assert shown.err.startswith(f"penstock: error: {message}")


def test_verify_shows_a_limited_number_of_problems(capsys, monkeypatch, quantized):
    monkeypatch.setattr("penstock.cli.verify._SHOWN", 5)
    change_json(quantized / "config.json", lambda config: config["quantization"].update(bits=8))
    shown = call(capsys, "verify", str(quantized))
    lines = [line for line in shown.out.splitlines() if line.startswith("problem: ")]
    assert len(lines) == 6 and lines[-1] == "problem: … and 94 more of quantization"
    assert shown.out.endswith("99 problems found\n")


# -- headers and index -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: path.write_bytes(b""), "has no bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "an unfinished download?"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "1 bytes behind the last tensor"),
        (lambda path: (path.unlink(), path.symlink_to("gone")), "is a link to gone, which does not exist"),
        (lambda path: (path.unlink(), path.mkdir()), "is a folder, expected a regular file"),
        (lambda path: path.write_bytes(b"\xff" * 64), "header length is 18446744073709551615"),
    ],
)
def test_headers_are_checked_file_by_file(quantized, make, expected):
    make(quantized / "model.safetensors")
    (problem,) = problems(quantized, "headers")
    assert expected in problem


def test_a_tensor_in_two_files_is_a_problem(sharded):
    (sharded / INDEX).unlink()
    shutil.copy(sharded / SHARDS[0], sharded / SHARDS[1])
    found = problems(sharded, "headers")
    assert len(found) == len(SafetensorsFile.open(sharded / SHARDS[0]).tensors)
    assert f"is in {SHARDS[0]} as well, expected it once" in found[0]


def test_index_is_compared_with_the_files(sharded):
    def change(index):
        names = [name for name, file in index["weight_map"].items() if file == SHARDS[0]]
        del index["weight_map"][names[0]]
        index["weight_map"][names[1]] = SHARDS[2]
        index["weight_map"]["nosuch"] = SHARDS[1]
        index["metadata"]["total_size"] += 1

    change_json(sharded / INDEX, change)
    found = problems(sharded, "index")
    assert len(found) == 4
    for expected in ("not in model-00003", "'nosuch' is not in", "does not list tensor", "total_size is"):
        assert any(expected in problem for problem in found), expected


def test_index_names_every_file_that_is_missing(sharded):
    for name in SHARDS[1:]:
        (sharded / name).unlink()
    lost = [f"{sharded / INDEX}: lists '{name}', but the folder has no such file" for name in SHARDS[1:]]
    assert problems(sharded, "index") == lost


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {"a": "../../x.safetensors"}}', '{"weight_map": 5}'])
def test_an_index_that_makes_no_sense_is_a_problem(sharded, content):
    (sharded / INDEX).write_text(content)
    assert len(problems(sharded, "index")) == 1


# -- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [64, 1 << 23])
def test_numbers_that_are_not_finite_are_counted(monkeypatch, quantized, piece):
    """Also across the pieces in which the files are read."""
    monkeypatch.setattr(library, "_PIECE", piece)
    path = quantized / "model.safetensors"
    scales = "language_model.model.layers.2.mlp.switch_mlp.down_proj.scales"
    overwrite(path, scales, 62, b"\xc0\x7f\x80\x7f\x80\xff")  # NaN, infinity, minus infinity
    overwrite(path, "language_model.model.norm.weight", 0, b"\xff\xff")
    end = "expected none: damaged?"
    assert sorted(problems(quantized, "numbers")) == [
        f"{path}: tensor '{scales}' has 3 numbers not finite (the first is number 31), {end}",
        f"{path}: tensor 'language_model.model.norm.weight' has 1 number not finite (the first is number 0), {end}",
    ]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize(("value", "bad"), [(np.nan, 1), (-np.inf, 1), (np.inf, 1), ("max", 0), ("tiny", 0)])
def test_numbers_of_every_float_are_looked_at(tmp_path, dtype, value, bad):
    from safetensors.numpy import save_file

    array = np.linspace(-1, 1, 99).astype(dtype)
    array[57] = getattr(np.finfo(dtype), value) if isinstance(value, str) else value
    save_file({"w": array, "codes": np.full(9, 0xFFFFFFFF, np.uint32)}, tmp_path / "x.safetensors")
    numbers = Numbers.of_safetensors([SafetensorsFile.open(tmp_path / "x.safetensors")])
    assert numbers.nbytes == array.nbytes  # codes cannot be wrong
    seen = []
    found = numbers.check(2, seen.append)
    assert len(found.problems) == bad and sum(seen) == array.nbytes
    assert not bad or "has 1 number not finite (the first is number 57)" in found.problems[0]


@pytest.mark.parametrize(("mode", "scale", "code"), [("mxfp4", 255, None), ("nvfp4", 0xFF, None), ("mxfp8", 255, 0x7F)])
def test_scales_and_codes_of_small_floats_are_looked_at(tmp_path, rng, mode, scale, code):
    from safetensors.numpy import save_file

    q = penstock.quantize(rng.standard_normal((3, 64)).astype(np.float32), mode=mode)
    q.scales[1, 1] = scale
    if code is not None:
        q.packed.view(np.uint8)[2, 5] = code
    save_file({"a.weight": q.packed, "a.scales": q.scales, "b": np.full(9, 255, np.uint8)}, tmp_path / "x.safetensors")
    found = Numbers.of_safetensors([SafetensorsFile.open(tmp_path / "x.safetensors")]).check(1, lambda _: None)
    named = sorted(problem.partition("tensor ")[2].partition(" has")[0] for problem in found.problems)
    assert named == (["'a.scales'"] if code is None else ["'a.scales'", "'a.weight'"])


def test_a_file_that_is_shortened_meanwhile_is_a_problem_and_not_the_end(quantized):
    path = quantized / "model.safetensors"
    numbers = Numbers.of_safetensors([SafetensorsFile.open(path)])
    with path.open("r+b") as file:
        file.truncate(5_000_000)
    found = numbers.check(2, lambda count: None).problems
    assert found and all("model.safetensors: ends at byte" in problem for problem in found)


def test_numbers_of_gguf_blocks_are_looked_at(tmp_path):
    pytest.importorskip("gguf")
    from penstock.weights.gguf import GgufFile
    from tests.weights.test_gguf import write

    weights = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    formats = {"a": "Q4_0", "b": "Q4_1", "c": "F32", "d": "MXFP4"}
    path = write(tmp_path / "x.gguf", {name: (weights, format) for name, format in formats.items()})
    file = GgufFile.open(path)
    assert Numbers.of_gguf(file).check(2, lambda count: None).problems == []
    with path.open("r+b") as data:
        data.seek(file.tensors["a"].start + 3 * 18)
        data.write(b"\x00\x7c")  # the scale of block 3 is infinite
        data.seek(file.tensors["b"].start + 5 * 20 + 2)
        data.write(b"\x01\x7e")  # the bias of block 5 is NaN
        data.seek(file.tensors["d"].start + 4 * 17)
        data.write(b"\xff")  # so is the scale of block 4
    found = Numbers.of_gguf(GgufFile.open(path)).check(2, lambda count: None).problems
    assert [problem.partition(": tensor ")[2][:60] for problem in found] == [
        "'a' has 1 number not finite (the first is number 3), expecte",
        "'b' has 1 number not finite (the first is number 5), expecte",
        "'d' has 1 number not finite (the first is number 4), expecte",
    ]


# -- what config.json says -------------------------------------------------------------------------------------------


def test_every_quantized_tensor_is_compared_with_the_table(quantized):
    change_json(quantized / "config.json", lambda config: config["quantization"].update(group_size=32))
    found = problems(quantized, "quantization")
    assert len(found) == 99 and all("config.json says 4 bits, groups of 32" in problem for problem in found)


def test_parts_of_quantized_tensors_that_are_missing_are_named(quantized):
    lost = ["language_model.lm_head.biases", "language_model.model.embed_tokens.biases"]

    def change(header):
        for name in lost:
            header[f"{name}.other"] = header.pop(name)

    change_header(quantized / "model.safetensors", change)
    found = problems(quantized, "quantization")
    assert [any(name in problem for problem in found) for name in lost] == [True, True] and len(found) == 2


def test_every_shape_is_compared_with_the_config(sharded):
    change_json(sharded / "config.json", lambda config: config["text_config"].update(moe_intermediate_size=48))
    found = problems(sharded, "shapes")
    assert len(found) == 4  # gate_up and down of two layers
    assert all("by config.json" in problem for problem in found)


def test_tensors_that_are_missing_are_all_named(sharded):
    change_json(
        sharded / "config.json", lambda config: config["text_config"].update(num_hidden_layers=3, layer_types=None)
    )
    found = problems(sharded, "shapes")
    assert len(found) > 10 and all("layers.2." in problem for problem in found)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "evil"}, "model_type is 'evil'"),
        ({"text_config": {}}, "text_config"),
        ({"text_config": 5}, "text_config is 5, expected an object"),
    ],
)
def test_a_config_that_cannot_be_read_is_one_problem(sharded, changes, expected):
    change_json(sharded / "config.json", lambda config: config.update(changes))
    assert expected in "".join(problems(sharded, "shapes"))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": NaN}', "\ufeff5"])
def test_a_config_that_is_no_json_object_is_a_problem(sharded, content):
    (sharded / "config.json").write_text(content)
    assert any("config.json" in problem for problem in problems(sharded))


# -- tokenizer -------------------------------------------------------------------------------------------------------


def test_a_tokenizer_with_more_tokens_than_the_model_is_remarked_on(quantized):
    change_json(
        quantized / "tokenizer.json",
        lambda content: content["added_tokens"].append(content["added_tokens"][0] | {"id": 4096, "content": "<|new|>"}),
    )
    checks, _ = check_model(quantized, None, progress_bar)
    (about,) = [check.about for check in checks if check.name == "tokenizer"]
    assert about.startswith("4,097 tokens of 4,096: the tokenizer has ids up to 4096, the model embeddings for 0 to ")
    assert problems(quantized) == []


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for %}", "chat template, line 1"),
        ("{{ raise_exception('not for you') }}", "not for you"),
        ("{{ 'x' * 10**9 }}", "makes data of more than 64 MB on the way, expected less"),
        ("{{ messages.__class__ }}", "'__class__' of a list is kept from templates"),
    ],
)
def test_a_template_that_does_not_render_is_a_problem(quantized, template, expected):
    change_json(quantized / "tokenizer_config.json", lambda content: content.update(chat_template=template))
    (problem,) = problems(quantized, "template")
    assert expected in problem and str(quantized) in problem


def test_a_model_without_a_template_is_no_problem(quantized):
    change_json(quantized / "tokenizer_config.json", lambda content: content.pop("chat_template"))
    checks, _ = check_model(quantized, None, progress_bar)
    assert {check.name: check.status for check in checks}["template"] == "skipped"


# -- hashes ----------------------------------------------------------------------------------------------------------


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git_blob(path: Path) -> str:
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.mark.parametrize("form", ["{hash}  {name}", "{hash} *{name}", "{hash}  ./{name}", "SHA256 ({name}) = {hash}"])
def test_hashes_of_a_list_are_compared(capsys, sharded, form):
    files = [*SHARDS, "config.json"]
    lines = [form.format(hash=sha256(sharded / name), name=name) for name in files]
    listed = sharded.parent / "SHA256SUMS"
    listed.write_text("\n".join(["# a remark", "", *lines]) + "\n")
    shown = call(capsys, "verify", str(sharded), "--hashes", str(listed))
    assert shown.status == 0 and "ok  hashes        4 files" in shown.out
    before = sha256(sharded / SHARDS[0])
    overwrite(sharded / SHARDS[0], next(iter(SafetensorsFile.open(sharded / SHARDS[0]).tensors)), 0, b"\x11\x22")
    (sharded / "config.json").rename(sharded / "other.json")
    shown = call(capsys, "verify", str(sharded), "--hashes", str(listed))
    assert shown.status == 1
    wrong = sharded / SHARDS[0]
    assert f"problem: {wrong}: its hash is {sha256(wrong)}, expected {before}\n" in shown.out
    assert f"problem: {sharded / 'config.json'}: no such file" in shown.out


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "has no hashes"),
        ("abc  model.safetensors", "line 1 is 'abc  model.safetensors', expected a SHA-256"),
        (f"{'a' * 64}  ../secret", "'../secret' is no plain file name"),
        (f"{'a' * 64}  /etc/passwd", "'/etc/passwd' is no plain file name"),
        (f"{'a' * 64}  x\n{'b' * 64}  x", "line 2: 'x' appears twice"),
        (f"{'a' * 64} x", "expected a SHA-256, two spaces and a name"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(tmp_path, content, expected):
    path = tmp_path / "list"
    path.write_text(content)
    with pytest.raises(CheckpointError) as caught:
        read_hashes(path)
    assert expected in str(caught.value)


@pytest.fixture
def snapshot(tmp_path, sharded) -> Path:
    """The model as huggingface_hub's cache has it: links to blobs that are named by their hashes."""
    blobs, folder = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    for path in sharded.iterdir():
        name = sha256(path) if path.suffix == ".safetensors" else git_blob(path)
        shutil.copy(path, blobs / name)
        (folder / path.name).symlink_to(Path("..", "..", "blobs", name))
    return folder


def test_hashes_of_the_hub_are_the_names_of_its_blobs(capsys, snapshot):
    found = hub_hashes(snapshot)
    assert {len(value) for name, value in found.items() if name.endswith(".safetensors")} == {64}
    assert len(found["config.json"]) == 40
    shown = call(capsys, "verify", str(snapshot), "--hub", "--json")
    assert shown.status == 0 and json.loads(shown.out)["checks"][-1]["status"] == "ok"
    with (snapshot / "generation_config.json").open("a") as file:
        file.write(" ")
    with (snapshot / SHARDS[1]).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x07")
    shown = call(capsys, "verify", str(snapshot), "--hub", "--json")
    found = json.loads(shown.out)["checks"][-1]["problems"]
    assert shown.status == 1 and len(found) == 2
    assert "generation_config.json: its hash is" in found[0] and SHARDS[1] in found[1]


def test_hashes_of_the_hub_are_kept_beside_files_of_a_local_folder(sharded):
    assert hub_hashes(sharded) == {}
    kept = sharded / ".cache" / "huggingface" / "download"
    kept.mkdir(parents=True)
    (kept / f"{SHARDS[0]}.metadata").write_text(f"abc\n{sha256(sharded / SHARDS[0])}\n123.4\n")
    (kept / "config.json.metadata").write_text(f"abc\n{git_blob(sharded / 'config.json')}\n123.4\n")
    (kept / "tokenizer.json.metadata").write_text("nonsense")
    found = hub_hashes(sharded)
    assert sorted(found) == ["config.json", SHARDS[0]]
    assert check_hashes(sharded, found, 2, lambda count: None).problems == []
