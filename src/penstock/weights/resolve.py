"""Which model is meant: the one place where what a user names becomes files on this machine.

The first of these that fits decides:

1. None: the demo model of the package.
2. What lies at that path (~ is the home folder): a folder, a .gguf file, a .json file, which is a config without
   weights. A folder called like a shipped config or like a hub id is that folder.
3. Text that ends in .gguf or .json is a path; with nothing there it is refused.
4. "demo", or the name of a shipped config: capitals do not count, and ".", "_" and "-" are the same.
5. owner/name: a model of the Hugging Face hub; owner/name:TYPE: the GGUF file of that type (Q8_0) in it.

A `Path` is never a name: 4 and 5 are for text. Only 5 asks the network.
"""

import difflib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from penstock.errors import CheckpointError, InvalidArgument
from penstock.weights import hub
from penstock.weights.files import list_folder, read_json, short

Kind = Literal["demo", "folder", "gguf", "config"]
Name = str | os.PathLike[str] | None

WITH_WEIGHTS: tuple[Kind, ...] = ("demo", "folder", "gguf")
ANY: tuple[Kind, ...] = (*WITH_WEIGHTS, "config")

_PACKAGE = Path(__file__).parents[1]
_FILES: dict[str, Kind] = {".gguf": "gguf", ".json": "config"}
_PATHS: dict[Kind, str] = {"folder": "a folder", "gguf": "a .gguf file", "config": "a config.json"}


@dataclass(frozen=True)
class ResolvedModel:
    """Files of a model.

    path: a folder or a .gguf file; of kind "config", which has no weights, a .json file or a folder with a config.json.
    name: how it is shown. hub_id: of a model of the hub.
    """

    kind: Kind
    path: Path
    name: str
    hub_id: str | None = None

    @property
    def config_path(self) -> Path:
        return self.path / "config.json" if self.path.is_dir() else self.path

    def read_config(self) -> dict[str, Any]:
        """What config.json says. Raises CheckpointError unless it is an object."""
        raw = read_json(self.config_path)
        if not isinstance(raw, dict):
            raise CheckpointError(f"{self.config_path}: is a {type(raw).__name__}, expected an object")
        return raw


@dataclass(frozen=True)
class HubModel:
    """A hub id; whether there is such a model has not been asked. gguf: the type of a GGUF file of it."""

    id: str
    gguf: str | None = None

    @property
    def name(self) -> str:
        return self.id.rpartition("/")[2] + (f":{self.gguf}" if self.gguf else "")


def resolve_model(
    model: Name = None,
    kinds: Collection[Kind] = WITH_WEIGHTS,
    *,
    revision: str | None = None,
    offline: bool | None = None,
    quiet: bool = False,
    files: hub.Files = "all",
    option: str | None = None,
) -> ResolvedModel:
    """The files of the model that is meant, one of `kinds`.

    A hub model is downloaded unless it is cached, with `files` not "all" only its small files or its config.json
    alone (a GGUF file of it only from the cache); with offline (None: as HF_HUB_OFFLINE says) only the cache is used.
    Progress bars appear on a terminal unless quiet. Raises CheckpointError as `find_model` does and for what cannot be
    had, InvalidArgument for a revision of what is not on the hub.
    """
    found = find_model(model, kinds, option)
    if isinstance(found, HubModel) and found.gguf is not None:
        shown = f"{found.id}:{found.gguf}"
        if "gguf" not in kinds:
            raise CheckpointError(f"{shown}: is a .gguf file, expected {_listed(*_paths(kinds), 'a hub id')}")
        path = hub.download_gguf(found.id, found.gguf, revision, bool(offline or files != "all") or None, quiet)
        return ResolvedModel("gguf", path, found.name, shown)
    if isinstance(found, HubModel):
        path = hub.download(found.id, revision, offline, quiet, files)
        if path.is_dir() and not (path / "config.json").is_file():
            raise CheckpointError(
                f"{found.id}: has no config.json, expected a model; {found.id}:TYPE takes a GGUF file, such as :Q8_0"
            )
        return _as_one_of(kinds, ResolvedModel("folder", path, found.name, found.id), found.id)
    if revision is not None:
        what = _PATHS.get(found.kind, "the demo model")
        raise InvalidArgument(f"{_shown(model)}: is {what}, expected a hub id for revision {short(revision)}")
    return found


def find_model(
    model: Name = None, kinds: Collection[Kind] = WITH_WEIGHTS, option: str | None = None
) -> ResolvedModel | HubModel:
    """As `resolve_model`, with no network: a hub id is left as it is.

    Where "config" is among `kinds`, a folder without weights, or any folder if "folder" is not, stands for its
    config.json. Raises CheckpointError for what is none of `kinds` or nothing at all; `option` is named then.
    """
    found = _meant(model)
    if found is None:
        raise CheckpointError(_unknown(os.fspath(model or ""), kinds, option))
    return found if isinstance(found, HubModel) else _as_one_of(kinds, found, _shown(model))


def shipped_configs() -> dict[str, Path]:
    """The config.json files of released models inside the package, by name."""
    return {file.stem: file for file in sorted((_PACKAGE / "configs").glob("*.json"))}


def _meant(model: Name) -> ResolvedModel | HubModel | None:
    if model is None:
        return _demo()
    text = os.fspath(model)
    if (found := _on_disk(text)) is not None:
        return found
    if text.lower().endswith(tuple(_FILES)):
        raise CheckpointError(f"{text}: no such file")
    if not isinstance(model, str):
        return None
    if _plain(text) == "demo":
        return _demo()
    for name, file in shipped_configs().items():
        if _plain(name) == _plain(text):
            return ResolvedModel("config", file, name)
    found = hub.split_id(text)
    return None if found is None else HubModel(*found)


def _demo() -> ResolvedModel:
    folder = _PACKAGE / "demo" / "model"
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: the demo model is not installed, expected it in the package")
    return ResolvedModel("demo", folder, "demo")


def _on_disk(text: str) -> ResolvedModel | None:
    """What lies at that path, None for nothing. Raises CheckpointError for anything but a model."""
    try:
        path = Path(text).expanduser()
        if not text or not (path.exists() or path.is_symlink()):
            return None
        kind = _FILES.get(path.suffix.lower()) if path.is_file() else None
    except (OSError, ValueError, RuntimeError) as error:  # no permission, a NUL, an unknown ~user
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{short(text)}: cannot be opened: {reason}") from None
    if kind is None:
        list_folder(path)
    if kind == "config":
        return ResolvedModel(kind, path, path.absolute().parent.name if path.name == "config.json" else path.stem)
    return ResolvedModel(kind or "folder", path, text.rstrip("/").rpartition("/")[2] or text)


def _as_one_of(kinds: Collection[Kind], found: ResolvedModel, shown: str) -> ResolvedModel:
    if found.kind in ("demo", "folder") and "config" in kinds and (found.kind not in kinds or _is_bare(found.path)):
        return replace(found, kind="config")
    if found.kind in kinds:
        return found
    what, hint = _PATHS.get(found.kind, "the demo model"), ""
    if found.kind == "config":
        what, hint = "a config without weights", "; penstock bench --random runs it with random weights"
    raise CheckpointError(f"{shown}: is {what}, expected {_listed(*_paths(kinds), 'a hub id')}{hint}")


def _is_bare(folder: Path) -> bool:
    names = list_folder(folder)
    return "config.json" in names and not any(name.endswith(".safetensors") for name in names)


def _unknown(text: str, kinds: Collection[Kind], option: str | None) -> str:
    known = {_plain(name): name for name in shipped_configs()}
    near = [known[name] for name in difflib.get_close_matches(_plain(text), known)]
    expected, hint = [f"the path of {_listed(*_paths(kinds))}", "a hub id (owner/name)"], ""
    if "config" in kinds:
        expected.append(f"a shipped config ({', '.join(near or known.values())})")
    elif near:
        hint = f"; shipped configs ({', '.join(near)}) have no weights"
    tried = f"{short(text)}: no such folder, file, shipped config or hub id"
    if option is not None:
        tried = f"{option}: there is no {short(text)}"
    return f"{tried}, expected {_listed(*expected)}{hint}"


def _paths(kinds: Collection[Kind]) -> list[str]:
    return [_PATHS[kind] for kind in kinds if kind in _PATHS]


def _listed(*parts: str) -> str:
    return " or ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


def _plain(name: str) -> str:
    return re.sub("[._-]", "-", name.lower())


def _shown(model: Name) -> str:
    return "demo" if model is None else os.fspath(model)
