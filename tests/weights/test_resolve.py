"""Which model is meant: paths, the demo model, shipped configs, hub ids, in that order; nothing leaves the machine."""

import json
from importlib import resources
from pathlib import Path

import pytest
from huggingface_hub import HfApi, errors

import penstock
from penstock.errors import CheckpointError, InvalidArgument
from penstock.weights.resolve import ANY, HubModel, ResolvedModel, find_model, resolve_model, shipped_configs
from tests.cli.common import call
from tests.cli.test_bench import TINY

CONFIG = ("config",)
QWEN = "qwen3.6-35b-a3b"


def refusal(*arguments, **options) -> str:
    with pytest.raises(CheckpointError) as raised:
        resolve_model(*arguments, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def resolve(*arguments, **options) -> Path:
    return resolve_model(*arguments, **options).path


# -- paths -----------------------------------------------------------------------------------------------------------


def test_resolve_returns_a_folder_as_it_is(hub, tmp_path, monkeypatch):
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(str(folder)) == folder and resolve(folder) == folder
    assert resolve("owner/name") == Path("owner/name")  # a folder wins over the hub
    assert resolve("~/owner") == tmp_path / "owner" and resolve(".") == Path()
    assert [resolve_model(text).name for text in ("owner/name/", str(folder), ".")] == ["name", "name", "."]
    assert hub.calls == []


@pytest.mark.parametrize(
    "text",
    ["./x", "/no/such/x", "~/no-such-x", "a/b/c", "x", "", "owner/name/", "../x/y", "a\\b", "owner/na me", "a/..",
     "C:\\models\\x", "C:/models/x", "C:/x", f"./{QWEN}", f"{QWEN}/"],
)  # fmt: skip
@pytest.mark.parametrize("kinds", [("demo", "folder", "gguf"), ANY])
def test_resolve_refuses_a_missing_path_and_names_it(hub, text, kinds):
    assert refusal(text, kinds).startswith(f"{text!r}: no such folder") and hub.calls == []


def test_resolve_takes_a_path_object_for_a_path(hub):
    for name in ("owner/name", QWEN, "demo"):
        assert "no such folder" in refusal(Path(name), ANY) and hub.calls == []


def test_resolve_refuses_files_and_broken_links(hub, tmp_path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "dangling").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    assert refusal("model.safetensors") == "model.safetensors: is a file, expected a model folder"
    assert refusal("dangling") == "dangling: is a link to gone, which does not exist"
    assert refusal("loop") == "loop: is a link that leads back to itself"
    assert "cannot be opened" in refusal("a\0b") or "no such folder" in refusal("a\0b")
    assert "cannot be opened" in refusal("~no-such-user-here/x")
    assert "x…x" in refusal("x" * 300)


def test_resolve_takes_a_gguf_file(hub, tmp_path):
    for name in ("model.gguf", "MODEL.GGUF"):
        (tmp_path / name).touch()
        found = resolve_model(tmp_path / name)
        assert (found.kind, found.path, found.name) == ("gguf", tmp_path / name, name)
    assert hub.calls == []


@pytest.mark.parametrize("text", ["models/llama.gguf", "llama.gguf", "some/config.json", f"{QWEN}.json"])
def test_resolve_never_takes_the_name_of_a_missing_file_for_a_hub_id(hub, text):
    assert refusal(text, ANY) == refusal(text) == f"{text}: no such file" and hub.calls == []


def test_resolve_takes_a_json_file_for_a_config(hub, tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "tiny.json").write_text("[]")
    for path in (tmp_path / "config.json", "config.json"):
        found = resolve_model(path, ANY)
        assert (found.kind, found.name, found.config_path) == ("config", tmp_path.name, Path(path))
        assert found.read_config() == {"a": 1}
    found = resolve_model("tiny.json", CONFIG)
    assert (found.kind, found.name) == ("config", "tiny")
    with pytest.raises(CheckpointError, match="^tiny.json: is a list, expected an object$"):
        found.read_config()


def test_a_folder_stands_for_its_config_where_no_weights_are_needed(hub, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for kinds, kind in ((("folder",), "folder"), (ANY, "config"), (CONFIG, "config")):
        found = resolve_model(tmp_path, kinds)
        assert (found.kind, found.path, found.config_path) == (kind, tmp_path, tmp_path / "config.json")
    (tmp_path / "model.safetensors").touch()
    assert [resolve_model(tmp_path, kinds).kind for kinds in (ANY, CONFIG)] == ["folder", "config"]


def test_resolve_refuses_a_revision_of_what_is_not_on_the_hub(hub):
    for model, what in ((".", "a folder"), (None, "the demo model"), (QWEN, "a config.json")):
        with pytest.raises(InvalidArgument, match=f"is {what}, expected a hub id for revision 'main'"):
            resolve_model(model, ANY, revision="main")


# -- names -----------------------------------------------------------------------------------------------------------


def test_the_demo_model_has_a_name(hub, tmp_path):
    assert resolve_model() == resolve_model("demo") == resolve_model("Demo", ANY)
    assert resolve_model().kind == "demo" and (resolve() / "config.json").is_file()
    assert resolve_model(None, CONFIG).kind == "config"
    (tmp_path / "demo").mkdir()
    assert resolve("demo") == Path("demo") and resolve() != Path("demo")


@pytest.mark.parametrize("text", [QWEN, "Qwen3.6-35B-A3B", "qwen3_6_35b_a3b", "QWEN3-6-35B.A3B"])
def test_a_shipped_config_is_found_by_its_name(hub, text):
    assert resolve_model(text, ANY) == ResolvedModel("config", shipped_configs()[QWEN], QWEN) and hub.calls == []


def test_names_of_shipped_configs_differ_in_more_than_their_marks(hub):
    for name, file in shipped_configs().items():
        assert resolve(name, CONFIG) == resolve(name.replace(".", "_").upper(), CONFIG) == file


def test_what_is_on_disk_wins_over_the_name_of_a_shipped_config(hub, tmp_path):
    (tmp_path / QWEN).mkdir()
    assert resolve(QWEN) == resolve(QWEN, ANY) == Path(QWEN)
    (tmp_path / "deepseek-v3").touch()
    assert refusal("deepseek-v3", ANY) == "deepseek-v3: is a file, expected a model folder"


@pytest.mark.parametrize(
    ("text", "kinds", "words"),
    [
        ("qwen3.6-35b", ANY, "no such folder, file, shipped config or hub id, expected the path of a folder, a "
         ".gguf file or a config.json, a hub id (owner/name) or a shipped config (qwen3.6-35b-a3b"),
        ("nosuch", ANY, f"or a shipped config ({', '.join(shipped_configs())})"),
        ("deepseek", ("folder",), "a folder or a hub id (owner/name); shipped configs (deepseek-v3) have no weights"),
        ("nosuch", ("demo", "folder", "gguf"), "the path of a folder or a .gguf file or a hub id (owner/name)"),
    ],
)  # fmt: skip
def test_an_unknown_name_tells_what_was_tried_and_what_is_near(hub, text, kinds, words):
    assert words in refusal(text, kinds) and hub.calls == []
    assert refusal(text, kinds, option="--random").startswith(f"--random: there is no {text!r}, expected the path of ")


def test_kinds_that_are_not_taken_are_refused_by_name(hub, tmp_path):
    (tmp_path / "x.gguf").touch()
    (tmp_path / "x.json").write_text("{}")
    for text in (QWEN, "x.json"):
        assert refusal(text) == (
            f"{text}: is a config without weights, expected a folder, a .gguf file or a hub id; "
            "penstock bench --random runs it with random weights"
        )
    assert refusal("x.gguf", CONFIG) == "x.gguf: is a .gguf file, expected a config.json or a hub id"
    assert refusal("demo", ("folder",)) == "demo: is the demo model, expected a folder or a hub id"


# -- the hub ---------------------------------------------------------------------------------------------------------


def test_find_model_leaves_a_hub_id_alone(hub):
    assert find_model("owner/Name-4bit") == HubModel("owner/Name-4bit") and HubModel("owner/x").name == "x"
    assert hub.calls == []


def test_resolve_downloads_a_hub_model_and_keeps_its_id(hub, tmp_path):
    hub.outcome = str(tmp_path)
    assert "has no config.json" in refusal("owner/name") and "owner/name:TYPE takes" in refusal("owner/name")
    hub.calls.clear()
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model("owner/name", revision="v1") == ResolvedModel("folder", tmp_path, "name", "owner/name")
    ((id, options),) = hub.calls
    assert id == "owner/name" and options["revision"] == "v1"
    hub.cached = errors.LocalEntryNotFoundError("no")
    assert resolve_model("owner/name", ANY, files="config").kind == "config"
    (tmp_path / "model.safetensors").touch()
    assert resolve_model("owner/name", ANY, files="small").kind == "folder"


PARTS = ["BF16/a-BF16-00001-of-00002.gguf", "BF16/a-BF16-00002-of-00002.gguf"]
GGUF = ["a-Q4_0.gguf", "a-UD-Q4_0.gguf", "a.q8_0.gguf", "mmproj-Q8_0.gguf", "a.json", *PARTS, "F16-00002-of-00002.gguf"]


@pytest.mark.parametrize("offline", [False, True])
def test_resolve_takes_a_gguf_file_of_a_hub_model_by_its_type(hub, tmp_path, monkeypatch, offline):
    """As llama.cpp's -hf owner/name:TYPE. Offline the names are those of the cached snapshot."""
    monkeypatch.setattr(HfApi, "list_repo_files", lambda *_, **__: pytest.fail("asked") if offline else GGUF)
    for name in GGUF:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    hub.outcome = str(tmp_path)
    found = resolve_model("owner/name:Q4_0", offline=offline)
    assert found == ResolvedModel("gguf", tmp_path / "a-Q4_0.gguf", "name:Q4_0", "owner/name:Q4_0")
    assert hub.calls[-1][1]["allow_patterns"] == ["a-Q4_0.gguf"]
    assert resolve("owner/name:Q8_0", offline=offline) == tmp_path / "a.q8_0.gguf"  # not that of images
    assert resolve("owner/name:bf16", offline=offline) == tmp_path / PARTS[0]
    assert hub.calls[-1][1]["allow_patterns"] == PARTS
    assert "has no F16-00001-of-00002.gguf, expected all 2 parts" in refusal("owner/name:F16", offline=offline)
    assert "no GGUF file of type 'Q4', expected one of those" in refusal("owner/name:Q4", offline=offline)
    before = len(hub.calls)
    refused = refusal("owner/name:IQ2_XS", offline=offline)
    assert "GGUF type 'IQ2_XS' cannot be run" in refused and "penstock convert --requantize makes" in refused
    assert "is a .gguf file, expected a folder" in refusal("owner/name:Q8_0", ("folder",), offline=offline)
    assert len(hub.calls) == before  # nothing was asked
    assert isinstance(find_model("owner/name:Q8_0"), HubModel)
    for wrong in ("owner/name:", "owner/name:a b", "name:Q8_0", "owner/name:a:b"):
        assert "no such folder" in refusal(wrong, offline=offline)


# -- the verbs and the package ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [("generate", "--model"), ("serve", "--model"), ("bench", "--model"), ("convert", "--model"), ("verify",),
     ("pack",), ("perplexity", "--data-path", __file__), ("routes",)],
    ids=lambda words: words[0],
)  # fmt: skip
def test_verbs_that_need_weights_refuse_a_shipped_config_by_name(hub, capsys, words):
    shown = call(capsys, *words, "DeepSeek_V3")
    assert (shown.status, shown.out) == (1, "")
    assert shown.err.startswith("penstock: error: DeepSeek_V3: is a config without weights, expected a folder")
    with pytest.raises(CheckpointError, match="^deepseek-v3: is a config without weights"):
        penstock.load("deepseek-v3")
    assert hub.calls == []


@pytest.mark.parametrize(
    "words", [("inspect", "--bandwidth", "10"), ("plan", "--memory-bandwidth", "10", "--disk-bandwidth", "1")],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_shipped_config_needs_no_network_and_no_repository(hub, capsys, words):
    shown = call(capsys, words[0], "LLaMA-3.2_3B", *words[1:], "--device", "cpu", "--json")
    assert shown.status == 0 and json.loads(shown.out)["model"] == "llama-3.2-3b" and hub.calls == []


def test_a_trace_of_a_hub_model_fetches_its_config_alone(hub, capsys, tmp_path):
    hub.outcome, hub.cached = str(tmp_path), errors.LocalEntryNotFoundError("no")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    shown = call(capsys, "kernels", "--trace", "owner/name", "--layers", "2", "--bandwidth", "1", "--json")
    assert shown.status == 0 and json.loads(shown.out)["model"] == "name, 2 of 3 layers"
    assert hub.calls[-1][1]["allow_patterns"] == ["config.json"]


def test_shipped_configs_are_files_of_the_package():
    folder = resources.files("penstock") / "configs"
    assert {f"{name}.json" for name in shipped_configs()} == {file.name for file in folder.iterdir()}
    assert len(shipped_configs()) >= 6
