"""Models of the Hugging Face hub, through huggingface_hub's cache."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from penstock.errors import CheckpointError
from penstock.progress import visible
from penstock.weights.files import short

Files = Literal["all", "small", "config"]

# Weights, configuration, tokenizer and template of the repository's root: no code, no pickles, no second copy of the
# model in another format or folder.
ALLOWED: dict[Files, list[str]] = {
    "all": ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"],
    "small": ["*.json", "*.jinja"],
    "config": ["config.json"],
}
_MIXES = re.compile("_(?:XS|S|M|L|XL)$")  # of types in a file, behind the name of the commonest
IGNORED = ["*/*", "consolidated*", "adapter*", "optimizer*"]

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)


def is_id(text: str) -> bool:
    """Whether a text is owner/name."""
    return _ID.fullmatch(text) is not None


def split_id(text: str) -> tuple[str, str | None] | None:
    """owner/name and, of owner/name:TYPE, the type of GGUF file; None for any other text."""
    id, colon, type = text.partition(":")
    if not is_id(id) or (colon and not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", type, re.ASCII)):
        return None
    return id, type if colon else None


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


def download_gguf(
    id: str, type: str, revision: str | None = None, offline: bool | None = None, quiet: bool = False
) -> Path:
    """The GGUF file of a hub model whose name says `type` (Q8_0; capitals do not count), after a download if needed.

    Of several the one with the shortest name, of one in parts all, and the path of the first. Raises CheckpointError
    for a type that is known and cannot be run, for one that no file has, for a part that is missing, and as `download`.
    """
    from huggingface_hub import constants

    _check_type(id, type)
    offline = bool(offline) or constants.HF_HUB_OFFLINE
    names = _gguf_names(id, revision, offline)
    word = re.compile(rf"(?:^|[-._/]){re.escape(type)}(?=[-./])", re.IGNORECASE)
    found = [name for name in names if word.search(name) and "mmproj" not in name.lower()]
    if not found:
        have = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        where = "the local cache has while offline" if offline else "it has"
        raise CheckpointError(
            f"{id}: no GGUF file of type {short(type)}, expected one of those {where}: {have or 'none'}"
        )
    name = min(found, key=lambda name: (len(name), name))
    parts = [name]
    if (spelled := re.fullmatch(r"(.+)-\d{5}-of-(?!0{5})(\d{5})\.gguf", name)) is not None:
        parts = [f"{spelled[1]}-{n:05}-of-{spelled[2]}.gguf" for n in range(1, int(spelled[2]) + 1)]
        if missing := sorted({*parts} - {*names}):
            raise CheckpointError(f"{id}: has no {missing[0]}, expected all {len(parts)} parts of {parts[0]}")
    folder = _snapshot(id, revision, offline, quiet, "all", parts)
    return folder / parts[0]


def _check_type(id: str, type: str) -> None:
    """Refuse a type whose blocks cannot be read before gigabytes of it come."""
    from penstock.weights.gguf import CONVERTED, KNOWN, SUPPORTED

    name = type.upper()
    base = name if name in KNOWN else _MIXES.sub("", name)
    if base in KNOWN and base not in SUPPORTED:
        hint = "; of a file of it, penstock convert --requantize makes a folder that loads" if base in CONVERTED else ""
        found = f"{id}: GGUF type {short(type)} cannot be run"
        raise CheckpointError(f"{found}, expected one of {', '.join(SUPPORTED)}{hint}")


def _gguf_names(id: str, revision: str | None, offline: bool) -> list[str]:
    """The GGUF files of a hub model, offline of its snapshot in the cache."""
    if offline:
        folder = _snapshot(id, revision, True, True, "all", ["*.gguf"])
        return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf"))
    from huggingface_hub import HfApi

    names = _asked(
        id,
        revision,
        offline,
        "its list of files cannot be had",
        partial(HfApi().list_repo_files, id, revision=revision),
    )
    return sorted(name for name in names if name.endswith(".gguf"))


def _snapshot(
    id: str, revision: str | None, offline: bool, quiet: bool, files: Files, only: list[str] | None = None
) -> Path:
    """The folder of a snapshot with the files of that kind, or with those that fit the patterns `only`."""
    from huggingface_hub import snapshot_download, utils

    allowed, ignored = (ALLOWED[files], IGNORED) if only is None else (only, [])
    failed = "cannot be downloaded" if files == "all" else "its config.json cannot be had"
    call = partial(
        snapshot_download,
        id,
        revision=revision,
        allow_patterns=allowed,
        ignore_patterns=ignored,
        local_files_only=offline,
    )
    with _progress(utils, shown=not quiet and visible()):
        return Path(_asked(id, revision, offline, failed, call))


def _asked(id: str, revision: str | None, offline: bool, failed: str, call: Callable[[], Any]) -> Any:
    """What a function of huggingface_hub returns. What it raises becomes a CheckpointError: the model's name, the
    reason, what to do.
    """
    from huggingface_hub import errors

    name = id if revision is None else f"{id} (revision {revision})"
    try:
        return call()
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
        reason = f"{failed}: {type(error).__name__}: {_line(error)}"
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
