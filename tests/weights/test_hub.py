"""From hub ids to folders; the download itself is replaced, nothing leaves the machine."""

import errno
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import are_progress_bars_disabled

from penstock.errors import CheckpointError
from penstock.weights.hub import download


def refusal(*arguments, **options) -> str:
    with pytest.raises(CheckpointError) as raised:
        download(*arguments, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def http_error(kind):
    """An error as the library makes it, whichever HTTP library it carries."""
    error = kind.__new__(kind)
    Exception.__init__(error, "404 Client Error.\nmore lines")
    return error


@pytest.mark.parametrize("id", ["mlx-community/Qwen3.6-35B-A3B-4bit", "a/b", "user_1/model.v2"])
def test_download_fetches_a_hub_id(hub, id):
    assert download(id, revision="v1") == Path("/cache/snapshot")
    ((called, options),) = hub.calls
    assert called == id and options["revision"] == "v1" and options["local_files_only"] is False


def test_download_fetches_no_code_and_no_pickles(hub):
    download("a/b")
    patterns = {key: hub.calls[0][1][key] for key in ("allow_patterns", "ignore_patterns")}
    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
              "chat_template.jinja", "merges.txt", "tokenizer.model"]  # fmt: skip
    unwanted = ["modeling_x.py", "pytorch_model.bin", "model.pt", "model.gguf", "original/model.safetensors",
                "adapter_model.safetensors", "consolidated.safetensors", "evil.pkl", "x.so", "run.sh"]  # fmt: skip
    assert list(huggingface_hub.utils.filter_repo_objects(wanted + unwanted, **patterns)) == wanted


@pytest.mark.parametrize(
    ("variable", "argument", "expected"),
    [(False, None, False), (True, None, True), (False, True, True), (True, True, True), (False, False, False)],
)
def test_download_uses_only_the_cache_while_offline(hub, monkeypatch, variable, argument, expected):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", variable)
    download("a/b", offline=argument)
    assert hub.calls[0][1]["local_files_only"] is expected


@pytest.mark.parametrize(
    ("terminal", "quiet", "shown"), [(True, False, True), (True, True, False), (False, False, False)]
)
@pytest.mark.parametrize("fails", [False, True])
def test_download_shows_progress_on_a_terminal_unless_quiet(hub, monkeypatch, terminal, quiet, shown, fails):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    if fails:
        hub.outcome = errors.LocalEntryNotFoundError("no")
        refusal("a/b", quiet=quiet)
    else:
        download("a/b", quiet=quiet)
    assert hub.bars_off is not shown and not are_progress_bars_disabled()


@pytest.mark.parametrize(
    ("error", "offline", "expected"),
    [
        (http_error(errors.GatedRepoError), False, "a/b: access is restricted: accept the terms on https://hugging"),
        (http_error(errors.RepositoryNotFoundError), False, "a/b: no such folder, and no such model on the hub"),
        (http_error(errors.RevisionNotFoundError), False, "a/b: the hub has no such revision"),
        (http_error(errors.HfHubHTTPError), False, "a/b: cannot be downloaded: HfHubHTTPError: 404 Client Error."),
        (errors.LocalEntryNotFoundError("x"), True, "a/b: no such folder, and not completely in the local cache whi"),
        (errors.LocalEntryNotFoundError("Got\nx"), False, "a/b: no such folder, not in the local cache, and the hub c"),
        (errors.HFValidationError("bad id"), False, "a/b: cannot be downloaded: HFValidationError: bad id"),
        (OSError(errno.ENOSPC, "No space left"), False, "a/b: cannot be downloaded: OSError: [Errno 28] No space left"),
        (ConnectionError(), False, "a/b: cannot be downloaded: ConnectionError: no reason given"),
    ],
    ids=["gated", "missing", "revision", "http", "offline", "network", "validation", "disk", "silent"],
)
def test_download_turns_each_failure_into_one_line(hub, error, offline, expected):
    hub.outcome = error
    assert refusal("a/b", offline=offline).startswith(expected)


@pytest.mark.parametrize(("files", "patterns"), [("small", ["*.json", "*.jinja"]), ("config", ["config.json"])])
def test_download_of_a_few_files_takes_the_cached_model_first(hub, tmp_path, files, patterns):
    hub.cached = errors.LocalEntryNotFoundError("no")
    assert download("a/b", "v1", files=files) == Path("/cache/snapshot")
    (_, first), (_, second) = hub.calls
    assert first["local_files_only"] is True and second["local_files_only"] is False
    assert second["allow_patterns"] == patterns and first["revision"] == second["revision"] == "v1"
    hub.cached = str(tmp_path)
    assert download("a/b", files=files) == Path("/cache/snapshot")  # what is cached has no config.json
    (tmp_path / "config.json").touch()
    assert download("a/b", files=files) == tmp_path
    hub.cached, hub.calls = errors.LocalEntryNotFoundError("no"), []
    assert "not completely in the local cache while offline" in refusal("a/b", offline=True, files=files)
    assert len(hub.calls) == 1


def test_download_names_the_revision(hub):
    hub.outcome = http_error(errors.RevisionNotFoundError)
    assert refusal("a/b", revision="v9").startswith("a/b (revision v9): ")


def test_download_lets_an_interrupt_through(hub, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        download("a/b")


def test_download_offline_with_the_library_itself(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert "not completely in the local cache while offline" in refusal("a/b", offline=True)


def test_import_does_not_load_the_hub_library():
    code = "import sys, penstock.weights.resolve, penstock.weights.checkpoint; print('huggingface_hub' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
