"""Models of the Hugging Face hub, through huggingface_hub's cache."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from penstock.errors import CheckpointError
from penstock.progress import visible

Files = Literal["all", "small", "config"]

# Weights, configuration, tokenizer and template of the repository's root: no code, no pickles, no second copy of the
# model in another format or folder.
ALLOWED: dict[Files, list[str]] = {
    "all": ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"],
    "small": ["*.json", "*.jinja"],
    "config": ["config.json"],
}
IGNORED = ["*/*", "consolidated*", "adapter*", "optimizer*"]

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)


def is_id(text: str) -> bool:
    """Whether a text is owner/name."""
    return _ID.fullmatch(text) is not None


def download(
    id: str, revision: str | None = None, offline: bool | None = None, quiet: bool = False, files: Files = "all"
) -> Path:
    """The folder of a hub model in the cache, after a download of what is missing.

    With `files` not "all" a model that is cached is taken as it is, else only those files are downloaded. offline,
    quiet and what is raised: as `resolve_model` says.
    """
    from huggingface_hub import constants  # half a second: only where it is needed

    offline = bool(offline) or constants.HF_HUB_OFFLINE
    if files != "all" and not offline:
        with suppress(CheckpointError):
            cached = _snapshot(id, revision, True, True, "all")
            if (cached / "config.json").is_file():
                return cached
    return _snapshot(id, revision, offline, quiet, files)


def _snapshot(id: str, revision: str | None, offline: bool, quiet: bool, files: Files) -> Path:
    from huggingface_hub import errors, snapshot_download, utils

    name = id if revision is None else f"{id} (revision {revision})"
    try:
        with _progress(utils, shown=not quiet and visible()):
            folder = snapshot_download(
                id, revision=revision, allow_patterns=ALLOWED[files], ignore_patterns=IGNORED, local_files_only=offline
            )
    except errors.GatedRepoError:
        page = f"https://huggingface.co/{id}"
        reason = f"access is restricted: accept the terms on {page} and log in with `hf auth login`"
    except errors.RevisionNotFoundError:
        reason = "the hub has no such revision"
    except errors.RepositoryNotFoundError:
        reason = "no such folder, and no such model on the hub, or a private one (`hf auth login`)"
    except errors.LocalEntryNotFoundError as error:
        if offline:
            reason = "no such folder, and not completely in the local cache while offline"
        else:
            reason = f"no such folder, not in the local cache, and the hub cannot be reached: {_line(error)}"
    # Which HTTP library speaks to the hub, and with which errors, depends on the version of huggingface_hub.
    except Exception as error:
        failed = "cannot be downloaded" if files == "all" else "its config.json cannot be had"
        reason = f"{failed}: {type(error).__name__}: {_line(error)}"
    else:
        return Path(folder)
    raise CheckpointError(f"{name}: {reason}")


@contextmanager
def _progress(utils: Any, shown: bool) -> Iterator[None]:
    """Progress bars of huggingface_hub inside the block: as the user has set them if `shown`, else off."""
    if shown or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _line(error: Exception) -> str:
    """The first line of a message."""
    return (str(error).strip() or "no reason given").splitlines()[0]
