import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock import api
from penstock.analysis import bandwidth
from penstock.analysis.survey import Survey
from penstock.analysis.survey import survey as survey_of
from penstock.analysis.weights import active_bytes
from penstock.cli._treemap import Box, in_strips, squarified
from penstock.models.config import first_layers
from penstock.models.family import ROLES
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.mapped import MappedFile
from penstock.weights.resolve import ANY, resolve_model, shipped_configs
from tests.cli.common import call
from tests.cli.model import DEMO
from tests.models.common import moe_config, next_config, small_config, tensors, write_model


@pytest.fixture
def unread(monkeypatch):
    """No weight can be read."""

    def refuse(*_, **__):
        raise AssertionError("a weight is read")

    monkeypatch.setattr(MappedFile, "view", refuse)


def survey(model: str) -> Survey:
    return survey_of(resolve_model(model, ANY))


def inspected(capsys, *words) -> dict:
    shown = call(capsys, "inspect", *words, "--bandwidth", "10", "--json")
    assert (shown.status, shown.err) == (0, "")
    return json.loads(shown.out)


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_inspect_counts_the_demo_model(capsys, unread):
    found = inspected(capsys)
    checkpoint = Checkpoint.open(DEMO)
    assert found["parameters"] == 25_898_288
    head = found["draft_head"]
    assert (head["parameters"], head["bytes"]) == (2_905_728, checkpoint.nbytes - found["bytes"])
    spans = [checkpoint.location(name)[1:] for name in checkpoint.names if ".mtp." in name]
    assert sum(stop - start for start, stop in spans) == head["bytes"]
    assert head["bytes_per_draft"] == head["active_bytes"] + 256 * 9 // 16 * 4097
    assert head["cache_bytes_per_1000_tokens"] * 2 == found["cache_bytes_per_1000_tokens"] and not found["skipped"]
    assert found["layers"] == {"linear attention + MoE": 6, "full attention + MoE": 2}
    assert (found["experts"], found["top_k"], found["vocab_size"], found["context"]) == (16, 4, 4096, 2048)
    assert (found["source"], found["files"], found["tied"]) == ("safetensors", 2, False)
    for key in ("parameters", "bytes", "active_bytes", "tensors"):
        assert sum(part[key] for part in found["parts"].values()) == pytest.approx(found[key], abs=len(ROLES))
        assert sum(part[key] for part in found["formats"]) == pytest.approx(found[key], abs=len(ROLES))
    experts = found["parts"]["experts"]
    assert experts["active_bytes"] * 4 == experts["bytes"]
    assert {(f["bits"], f["group_size"]) for f in found["formats"]} == {(4, 64), (8, 64), (16, None), (32, None)}
    # every file of the checkpoint is asked for, and nothing else: routers have 8 bits
    assert {f["bits"]: f["tensors"] for f in found["formats"]}[8] == 16
    assert found["limit_tokens_per_s"] == pytest.approx(10e9 / found["active_bytes"], rel=1e-6)


def test_inspect_counts_what_bench_counts(capsys):
    """Vectors in bfloat16 are float32 once they are loaded; all else is the same."""
    found = inspected(capsys)
    vectors = next(format["bytes"] for format in found["formats"] if format["dtype"] == "bfloat16")
    assert found["active_bytes"] + vectors == active_bytes(penstock.load(device="cpu").engine.model)


@pytest.mark.parametrize(
    ("name", "kinds", "parameters", "active"),
    [
        ("qwen3.6-35b-a3b", {"linear attention + MoE": 30, "full attention + MoE": 10}, 34.66e9, 2.95e9),
        (
            "gemma4-26b-a4b",
            {"sliding attention (1024) + dense + MoE": 25, "full attention + dense + MoE": 5},
            25.23e9,
            3.82e9,
        ),
        ("gemma3n-e2b", {"sliding attention (512) + dense": 24, "full attention + dense": 6}, 4.435e9, 2.42e9),
        ("gemma3n-e4b", {"sliding attention (512) + dense": 28, "full attention + dense": 7}, 6.835e9, 4.485e9),
        ("gemma4-e2b", {"sliding attention (512) + dense": 28, "full attention + dense": 7}, 4.63e9, 2.28e9),
        ("gemma4-e4b", {"sliding attention (512) + dense": 35, "full attention + dense": 7}, 7.46e9, 4.64e9),
        ("deepseek-v3", {"latent attention (MLA) + dense": 3, "latent attention (MLA) + MoE": 58}, 671.0e9, 36.6e9),
        ("llama-3.2-3b", {"full attention + dense": 28}, 3.213e9, 3.213e9),
        ("glm-4.6", {"full attention + dense": 3, "full attention + MoE": 89}, 352.8e9, 32.86e9),
        ("minimax-m2", {"full attention + MoE": 62}, 228.7e9, 10.42e9),
        ("mistral-small-4", {"latent attention (MLA) + MoE": 36}, 118.97e9, 6.096e9),
        (
            "lfm2-8b-a1b",
            {"short convolution + dense": 2, "full attention + MoE": 6, "short convolution + MoE": 16},
            8.34e9,
            1.56e9,
        ),
        (
            "kimi-linear-48b-a3b",
            {"linear attention + dense": 1, "linear attention + MoE": 19, "latent attention (MLA) + MoE": 7},
            49.12e9,
            3.107e9,
        ),
        ("qwen3-next-80b-a3b", {"linear attention + MoE": 36, "full attention + MoE": 12}, 79.67e9, 3.56e9),
    ],
)
def test_inspect_knows_the_released_models_by_their_configs(capsys, name, kinds, parameters, active):
    found = inspected(capsys, name)
    assert found["layers"] == kinds
    assert found["parameters"] == pytest.approx(parameters, rel=2e-3)
    assert found["active_parameters"] == pytest.approx(active, rel=5e-3)
    assert found["source"] == "config" and found["tokenizer"] is None
    raw, _ = first_layers(resolve_model(name, ["config"]).read_config(), "all", name)
    if "quantization" in raw:
        drafts = found["draft_head"]["bytes"] if found["draft_head"] else 0
        assert found["bytes"] + drafts == pytest.approx(api.random_nbytes(raw), rel=1e-3)
    else:
        assert found["bytes"] == 2 * found["parameters"] and "taken as bfloat16" in found["notices"][0]


def test_inspect_counts_the_cache(capsys):
    """Qwen3.6: 10 layers with 2 heads of 256 keys and values; 30 with a state of 32 heads of 128 x 128."""
    found = inspected(capsys, "qwen3.6-35b-a3b", "--device", "cpu")
    assert found["cache_dtype"] == "float32"
    assert found["cache_bytes_per_1000_tokens"] == 1000 * 10 * 2 * 2 * 256 * 4
    assert found["cache_bytes_fixed"] == 30 * (3 * 8192 * 4 + 32 * 128 * 128 * 4)
    gemma = inspected(capsys, "gemma4-26b-a4b", "--device", "cuda")
    assert gemma["cache_dtype"] == "bfloat16"
    assert gemma["cache_bytes_fixed"] == 25 * 1024 * 2 * 8 * 256 * 2
    assert gemma["tied"] and gemma["parts"]["embedding"]["active_bytes"] == gemma["parts"]["embedding"]["bytes"]


@pytest.mark.parametrize("config", [moe_config(), next_config()], ids=["stacked experts", "a module per expert"])
def test_inspect_reads_hugging_face_layouts_without_their_weights(capsys, tmp_path, unread, config):
    folder = write_model(tmp_path / "model", config, shards=3)
    found = inspected(capsys, str(folder))
    weights = {name: array for name, array in tensors(config).items() if not name.startswith(("model.visual", "mtp"))}
    assert found["parameters"] == sum(array.size for array in weights.values())
    assert found["bytes"] == sum(array.nbytes for array in weights.values())
    assert found["files"] == 3
    share = 3 / 7
    assert found["parts"]["experts"]["active_parameters"] == pytest.approx(
        share * found["parts"]["experts"]["parameters"], abs=1
    )


def test_inspect_tells_what_is_not_run(capsys, tmp_path):
    config = small_config()
    extra = {
        "model.language_model.layers.2.input_layernorm.weight": np.zeros(64, np.float32),
        "unheard_of": np.zeros(3, np.float32),
    }
    folder = write_model(tmp_path / "model", config, tensors(config) | extra)
    found = inspected(capsys, str(folder))
    sizes = {part["what"]: part["bytes"] for part in found["skipped"]}
    assert sizes.pop("layers from 2 on (prediction of further tokens)") == 256
    made = tensors(config)
    assert sizes == {
        part: sum(array.nbytes for name, array in made.items() if name.startswith(part))
        for part in ("model.visual", "mtp")
    }
    assert any("1 tensors are not part of the model: unheard_of" in notice for notice in found["notices"])
    assert "not run" in call(capsys, "inspect", str(folder), "--bandwidth", "10").out


def test_inspect_shows_the_tokenizer_and_lives_without_one(capsys, tmp_path):
    folder = write_model(tmp_path / "model", small_config())
    about = inspected(capsys, str(folder))["tokenizer"]
    assert (about["type"], about["byte_level"], about["tokens"]) == ("BPE", True, 260)
    assert (about["bos"], about["adds_bos"], about["eos"]) == ("<|bos|>", False, {"1": "<|eos|>", "3": "<|im_end|>"})
    assert about["templates"] == ["default"]
    (folder / "tokenizer.json").unlink()
    found = inspected(capsys, str(folder))
    assert found["tokenizer"] is None
    assert "tokenizer.json: no such file" in found["notices"][-1]


def test_inspect_honours_the_table_of_a_config(tmp_path):
    raw = resolve_model("qwen3.6-35b-a3b", ["config"]).read_config()
    table = {"bits": 3, "group_size": 128, "lm_head": {"bits": 6, "group_size": 32}, "model.embed_tokens": False}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw | {"quantization": table}))
    formats = {piece.path: piece.format for piece in survey(str(path)).weights}
    assert (formats["lm_head"].bits, formats["lm_head"].group_size) == (6, 32)
    assert formats["embed_tokens"].group_size is None and formats["embed_tokens"].bits == 16
    assert formats["layers.7.mlp.switch_mlp.up_proj"].bits == 3
    path.write_text(json.dumps(raw | {"quantization": {"quant_method": "fp8"}}))
    with pytest.raises(penstock.errors.CheckpointError, match="quant_method is 'fp8', expected MLX's quantization"):
        survey(str(path))


def test_inspect_reads_gguf(capsys, tmp_path, unread):
    pytest.importorskip("torch")
    from tests.models.test_gguf import reference, write  # transformers writes the file

    path = write(tmp_path / "model.gguf", "llama", "Q4_0")
    found = inspected(capsys, str(path))
    assert found["parameters"] == sum(weight.numel() for weight in reference("llama").parameters())
    assert (found["source"], found["layers"]) == ("gguf", {"full attention + dense": 3})
    assert [(f["bits"], f["group_size"]) for f in found["formats"]] == [(4, 32), (32, None)]


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("demo", "--model", "demo"), 2, "--model: 'demo' stands behind the verb already"),
        (("--bandwidth", "-1"), 2, "--bandwidth: is -1.0, expected GB/s above 0"),
        (("nosuch/model",), 1, "nosuch/model: no such folder, and not completely in the local cache while offline"),
        (("",), 1, "'': no such folder"),
        (("~nosuchuser/model",), 1, "'~nosuchuser/model': cannot be opened"),
        (("nosuch.json",), 1, "nosuch.json: no such file"),
        (("--html", "/nosuch/map.html", "--bandwidth", "1"), 1, "--html: /nosuch/map.html: No such file or directory"),
    ],
)
def test_inspect_refuses_in_one_line(capsys, words, status, message):
    shown = call(capsys, "inspect", *words)
    assert (shown.status, shown.out, shown.err.count("\n")) == (status, "", 1)
    assert shown.err.startswith(f"penstock: error: {message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 2**31}, "dim is 2147483648, expected at most 131072"),
        ({"num_experts": 2**20}, "experts is 1048576, expected at most 131072"),
        ({"num_experts": 4000}, "experts is 4000, expected at most 384: the files have no more"),
        ({"num_hidden_layers": 4}, "has no tensor 'model.language_model.layers.2.mlp.gate'"),
    ],
)
def test_inspect_refuses_sizes_that_the_files_do_not_have(capsys, tmp_path, changes, message):
    folder = write_model(tmp_path / "model", small_config())
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= changes
    path.write_text(json.dumps(config))
    shown = call(capsys, "inspect", str(folder), "--bandwidth", "10")
    assert (shown.status, shown.out, shown.err.count("\n")) == (1, "", 1)
    assert message in shown.err


def test_inspect_measures_the_bandwidth(capsys, monkeypatch):
    monkeypatch.setattr(bandwidth, "bandwidth_of", lambda device, given: (20.0, f"measured on {device}"))
    found = json.loads(call(capsys, "inspect", "--device", "cpu", "--json").out)
    assert (found["gb_per_s"], found["gb_per_s_from"], found["device"]) == (20.0, "measured on cpu", "cpu")

    def nothing(*_):
        raise penstock.errors.BackendError("no")

    monkeypatch.setattr(bandwidth, "bandwidth_of", nothing)
    found = json.loads(call(capsys, "inspect", "--device", "cpu", "--json").out)
    assert (found["gb_per_s"], found["limit_tokens_per_s"]) == (None, None)
    assert "tokens/s" not in call(capsys, "inspect", "--device", "cpu").out


def test_every_path_of_every_family_belongs_to_a_part():
    for name in shipped_configs():
        for piece in survey(name).weights:
            assert piece.role != "other", (name, piece.path)
            if piece.role == "router":
                assert piece.nbytes < 1e8
    assert ROLES[-1] == "other"


# -- the page --------------------------------------------------------------------------------------------------------


SIZES = st.lists(st.one_of(st.just(0), st.integers(1, 10**9)), min_size=1, max_size=30).filter(any)


@pytest.mark.parametrize("arrange", [squarified, in_strips])
@given(sizes=SIZES, width=st.floats(10, 2000), height=st.floats(10, 2000))
def test_boxes_fill_their_box_in_proportion(arrange, sizes, width, height):
    box = Box(3.0, 5.0, width, height)
    found = arrange(sizes, box)
    total, room = sum(sizes), width * height
    for size, one in zip(sizes, found, strict=True):
        assert one.width * one.height == pytest.approx(room * size / total, rel=1e-6, abs=1e-6)
        assert one.x >= 3 - 1e-6 and one.y >= 5 - 1e-6
        assert one.x + one.width <= 3 + width * (1 + 1e-9) + 1e-6
        assert one.y + one.height <= 5 + height * (1 + 1e-9) + 1e-6
    for n, a in enumerate(found):
        for b in found[:n]:
            across = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
            down = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
            assert min(across, down) <= 1e-6 * max(width, height)


def test_squarified_boxes_are_those_of_the_paper():
    found = squarified([6, 6, 4, 3, 2, 2, 1], Box(0, 0, 6, 4))
    assert found[0] == Box(0, 0, 3, 2) and found[1] == Box(0, 2, 3, 2)
    assert found[2].width == pytest.approx(12 / 7) and found[2].height == pytest.approx(7 / 3)


def test_strips_keep_the_order():
    found = in_strips([1] * 12, Box(0, 0, 4, 3))
    assert [(round(one.x), round(one.y)) for one in found] == [(n % 4, n // 4) for n in range(12)]


class Page(HTMLParser):
    """Tags with their attributes; every tag that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_a_map_of_the_bytes_that_needs_nothing_from_outside(capsys, tmp_path):
    path = tmp_path / "map.html"
    shown = call(capsys, "inspect", "qwen3.6-35b-a3b", "--bandwidth", "10", "--html", str(path))
    assert shown.status == 0
    text = path.read_text()
    page = Page(text)
    assert not re.search(r"https?:|url\(|@import|<link|src=", text)
    pieces = survey("qwen3.6-35b-a3b").weights
    listed = json.loads(re.search(r"const pieces = (\[.*\]);\n", text)[1])  # type: ignore[index]
    assert [row[0] for row in listed] == [piece.path for piece in pieces]
    boxes = [tag for name, tag in page.tags if name == "rect" and "data-i" in tag]
    areas: dict[int, list[float]] = {}
    for box in boxes:
        areas.setdefault(int(str(box["data-i"])), []).append(float(str(box["width"])) * float(str(box["height"])))
    # both maps show every tensor that is large enough to be seen, in about the area of its bytes
    total = sum(piece.nbytes for piece in pieces)
    for number, piece in enumerate(pieces):
        wanted = 1200 * 640 * piece.nbytes / total
        if wanted > 500:
            assert len(areas[number]) == 2
            assert areas[number] == pytest.approx([wanted] * 2, rel=0.35)
    assert math.isclose(sum(map(sum, areas.values())), 2 * 1200 * 640, rel_tol=0.2)


def test_page_escapes_names(capsys, tmp_path):
    folder = write_model(tmp_path / "<img onerror=x>", small_config())
    path = tmp_path / "map.html"
    assert call(capsys, "inspect", str(folder), "--bandwidth", "10", "--html", str(path)).status == 0
    text = path.read_text()
    assert "&lt;img onerror=x&gt;: where its bytes are" in text
    assert "<img" not in text
    Page(text)
