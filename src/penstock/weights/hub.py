"""From what a user types to a folder: a local path as it is, a Hugging Face id through huggingface_hub's cache."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError, InvalidArgument
from penstock.weights.files import list_folder, short

# Weights, configuration, tokenizer and template of the repository's root: no code, no pickles, no second copy of the
# model in another format or folder.
ALLOWED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
IGNORED = ["*/*", "consolidated*", "adapter*", "optimizer*"]

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)


def resolve(
    path_or_id: str | os.PathLike[str], revision: str | None = None, offline: bool | None = None, quiet: bool = False
) -> Path:
    """The folder of a model: an existing folder itself, or that of `owner/name` of the Hugging Face hub.

    A hub model is downloaded unless it is cached; with offline (None: as HF_HUB_OFFLINE says) only the cache is used.
    Progress bars appear on a terminal unless quiet. Raises CheckpointError if there is no such model or it cannot be
    had, InvalidArgument for a revision of a folder.
    """
    path = located(path_or_id)
    if path is not None:
        if revision is not None:
            raise InvalidArgument(f"{path_or_id}: is a folder, expected a hub id for revision {short(revision)}")
        return path
    return _download(os.fspath(path_or_id), revision, offline, quiet)


def located(path_or_id: str | os.PathLike[str]) -> Path | None:
    """The folder of a model on this machine, None for a hub id. Raises CheckpointError for what is neither."""
    text = os.fspath(path_or_id)
    path = _local(text)
    if path is None and not (isinstance(path_or_id, str) and _ID.fullmatch(text)):
        raise CheckpointError(f"{short(text)}: no such folder, expected one or the id owner/name of a hub model")
    return path


def _local(text: str) -> Path | None:
    """The folder of that path, None if there is nothing; raises CheckpointError for anything but a readable folder."""
    try:
        path = Path(text).expanduser()
        there = bool(text) and (path.exists() or path.is_symlink())
    except (OSError, ValueError, RuntimeError) as error:  # no permission, a NUL, an unknown ~user
        raise CheckpointError(f"{short(text)}: cannot be opened: {error}") from None
    if there and not (path.suffix == ".gguf" and path.is_file()):
        list_folder(path)
    return path if there else None


def _download(id: str, revision: str | None, offline: bool | None, quiet: bool) -> Path:
    from huggingface_hub import constants, errors, snapshot_download, utils  # half a second: only who need it

    offline = bool(offline) or constants.HF_HUB_OFFLINE
    name = id if revision is None else f"{id} (revision {revision})"
    try:
        with _progress(utils, shown=not quiet and sys.stderr.isatty()):
            folder = snapshot_download(
                id, revision=revision, allow_patterns=ALLOWED, ignore_patterns=IGNORED, local_files_only=offline
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
        reason = f"cannot be downloaded: {type(error).__name__}: {_line(error)}"
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
