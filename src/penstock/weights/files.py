"""Files of a model folder, opened without trust: regular files only, bounded sizes, strict JSON, nothing executed."""

import errno
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from penstock.errors import CheckpointError

JSON_LIMIT = 64 << 20  # bytes of a JSON file; the index of the largest released models has about 20 MB
JSON_DEPTH = 64  # nested brackets; real files have less than ten

_BOM = b"\xef\xbb\xbf"
_HTML = re.compile(rb"\s*<(?:!doctype|!--|html|head|body|\?xml)", re.IGNORECASE)
_KINDS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file itself: fetch it with `git lfs pull`",
    b"GGUF": "a GGUF file",
    b"PK\x03\x04": "a zip archive, probably a PyTorch pickle, which is never loaded",
    b"\x80\x02\x8a\x0al\xfc": "a PyTorch pickle, which is never loaded",
}


def open_regular(path: Path) -> int:
    """A descriptor for reading a regular file; links are followed, and nothing waits for a writer or touches a device.

    Raises CheckpointError for anything else and for a file that cannot be opened.
    """
    try:
        _check_regular(path, path.stat())  # before opening: a device may act on being opened
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        _cannot_read(path, error)
    try:
        _check_regular(path, os.fstat(descriptor))  # what was opened may no longer be what was looked at
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def list_folder(path: Path) -> list[str]:
    """The sorted names in a folder; raises CheckpointError if it is none or cannot be read."""
    try:
        return sorted(entry.name for entry in path.iterdir())
    except NotADirectoryError:
        raise CheckpointError(f"{path}: is a file, expected a model folder") from None
    except (OSError, ValueError) as error:
        _cannot_read(path, error, kind="folder")


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a regular file; raises CheckpointError if it has more than `limit` or cannot be read."""
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise CheckpointError(f"{path}: has {size} bytes, expected at most {limit}")
            data = file.read(size + 1)
        except OSError as error:
            _cannot_read(path, error)
    if len(data) != size:
        raise CheckpointError(f"{path}: its size changed while it was read, expected {size} bytes")
    return data


def read_json(path: Path, limit: int = JSON_LIMIT) -> Any:
    """The value in a JSON file; raises CheckpointError as `read_bounded` and `parse_json` do."""
    return parse_json(read_bounded(path, limit), str(path))


def parse_json(data: bytes, where: str) -> Any:
    """The value of a JSON text in UTF-8, with or without a byte order mark.

    Raises CheckpointError, starting with `where`, for anything outside of the standard (NaN, numbers beyond float64,
    lone surrogates), for a key that appears twice in an object and for more than JSON_DEPTH nested brackets.
    """
    data = data.removeprefix(_BOM)
    if not data.strip():
        raise CheckpointError(f"{where}: is empty, expected JSON")
    try:
        if (depth := _depth(data)) > JSON_DEPTH:
            raise ValueError(f"brackets are nested {depth} deep, expected at most {JSON_DEPTH}")
        value = json.loads(
            data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite_float
        )
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be encoded
    except UnicodeError:
        raise CheckpointError(f"{where}: {kind_of(data) or 'not valid UTF-8'}") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: {kind_of(data) or f'not valid JSON: {error}'}") from None
    return value


def kind_of(head: bytes) -> str | None:
    """What the first bytes of a file say it is, if it is one of the things that often take a model file's place."""
    if _HTML.match(head):
        return "an HTML page, not the file itself: the download went wrong"
    if head and not head.strip(b"\0"):
        return "nothing but zero bytes at its start: the download did not finish"
    return next((kind for magic, kind in _KINDS.items() if head.startswith(magic)), None)


def check_plain_name(where: str, name: str) -> None:
    """Raises CheckpointError unless `name` is that of a file in the folder itself."""
    if name in ("", ".", "..") or any(c in "/\\" or not c.isprintable() for c in name):
        raise CheckpointError(f"{where}: {short(name)} is no plain file name, expected one without folders")


def short(value: object) -> str:
    """repr for messages: one line of bounded length, whatever a file contains."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 120 else f"{text[:100]}…{text[-16:]}"


def _check_regular(path: Path, status: os.stat_result) -> None:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    if not stat.S_ISREG(status.st_mode):
        found = kinds.get(stat.S_IFMT(status.st_mode), "something else")
        raise CheckpointError(f"{path}: is {found}, expected a regular file")


def _cannot_read(path: Path, error: OSError | ValueError, kind: str = "file") -> NoReturn:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.ENOENT and path.is_symlink():
        reason = f"is a link to {path.readlink()}, which does not exist"
    elif code == errno.ENOENT:
        reason = f"no such {kind}"
    elif code == errno.ELOOP:
        reason = "is a link that leads back to itself"
    else:
        reason = f"cannot be read: {error.strerror if isinstance(error, OSError) else error}"
    raise CheckpointError(f"{path}: {reason}") from None


def _depth(data: bytes) -> int:
    """How deep brackets are nested, without recursion; right up to the first error a parser would meet."""
    if data.count(b"[") + data.count(b"{") <= JSON_DEPTH:
        return 0
    if b"\\" in data:
        data = re.sub(rb"\\.", b"__", data, flags=re.DOTALL)  # an escaped quote ends no string
    kind = np.zeros(256, np.int8)
    kind[list(b'"[]{}')] = [2, 1, -1, 1, -1]
    marks = kind[np.frombuffer(data, np.uint8)]
    marks = marks[marks != 0]
    outside = np.cumsum(marks == 2) % 2 == 0
    return int(np.cumsum(np.where(outside & (marks != 2), marks, 0), dtype=np.int64).max())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {short(twice)} appears twice in an object")
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{short(text)} is beyond the range of float64")
    return value
