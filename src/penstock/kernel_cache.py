"""Where compiled kernels are kept, and which of them are loaded.

A compiled kernel is code: Numba's are unpickled, Triton's launchers are loaded as libraries. So only files are loaded
that this user or root wrote, from folders in which no one else can put or replace one, and only under the name that
they were written for. Root counts as the user because it can do anything here in any case: an administrator may
compile for all users. Where folders have no POSIX owner (Windows), there is nothing to check.
"""

import atexit
import contextlib
import functools
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path

from penstock.errors import BackendError
from penstock.settings import Settings

LARGEST = 64 << 20  # bytes of a file; kernels have a tenth of a MB

_OWNED = hasattr(os, "geteuid")
_lock = threading.RLock()
_chosen: dict[Path, Path] = {}
_warned: set[str] = set()


def cache_root(given: str | Path | None = None) -> Path:
    """The folder of all compiled kernels: as given, or PENSTOCK_CACHE_DIR, or `penstock` in the user's cache folder."""
    root = given or Settings.from_env().cache_dir
    if not root:
        home = os.environ.get("XDG_CACHE_HOME", "")  # counts only if absolute, as the XDG specification says
        root = Path(home if home.startswith("/") else "~/.cache", "penstock")
    try:
        return Path(root).expanduser()
    except RuntimeError:  # a user without a home folder
        return Path(os.devnull)  # nothing can be kept below it


def triton_root() -> tuple[Path, str]:
    """Triton's cache as a root and a folder below it: TRITON_CACHE_DIR if the user names one, else `triton` of ours."""
    if given := os.environ.get("TRITON_CACHE_DIR"):
        return Path(given).expanduser(), ""
    return cache_root(), "triton"


def trusted(root: Path, below: str = "", to_write: bool = False) -> Path:
    """`root/below`, made if it is missing, if its content can be trusted; else the same of a folder of this process.

    Logs once which folder is left alone and why. Looks at a folder once per process. `to_write`: one that cannot be
    written is left alone too. Raises BackendError where the folder for temporary files cannot be trusted either.
    """
    folder = (root / below).absolute()
    with _lock:
        if folder not in _chosen:
            with contextlib.suppress(OSError):  # then there is nothing to read
                make(folder)
            why = distrust(root, folder)
            if why is None and to_write and not os.access(folder, os.W_OK):
                why = f"{folder} cannot be written"
            _chosen[folder] = folder if why is None else _instead(folder, below, why)
        return _chosen[folder]


def _instead(folder: Path, below: str, why: str) -> Path:
    """The folder of this process, for one that cannot be used."""
    expected = "expected a folder for compiled kernels that is the user's alone"
    try:
        own = _process_folder()
    except OSError as error:
        raise BackendError(f"{why}, and there is no folder for temporary files ({error}): {expected}") from error
    if (problem := distrust(own, own)) is not None:
        raise BackendError(f"{why}, and {problem}: {expected}")
    text = f"{why}: compiled kernels in {folder} are not used, this process keeps its own in {own}"
    _warn(why, f"{text}; PENSTOCK_CACHE_DIR names another folder")
    make(own / below)
    return own / below


def distrust(root: Path, folder: Path) -> str | None:
    """Other users who could have put files into a cache's folder at or below its root; None if there are none.

    Every folder on the way, links followed or not, belongs to the user or root, and no one else can write there. Above
    the root the user's own group may. What is in a folder with the sticky bit (as /tmp) is replaced by its owner alone.
    """
    if not _OWNED:
        return None
    roots = (root.absolute(), Path(os.path.realpath(root)))
    for end in (folder.absolute(), Path(os.path.realpath(folder))):
        for path in (*reversed(end.parents), end):
            try:
                found = path.lstat()
            except OSError:
                break  # nothing is there to read
            if (why := _foreign(path, found)) is not None:
                return why
            if not stat.S_ISDIR(found.st_mode) or (path != end and found.st_mode & stat.S_ISVTX):
                continue
            above = not any(map(path.is_relative_to, roots))
            by = stat.S_IWOTH if above and _users_own_group(found.st_gid) else stat.S_IWGRP | stat.S_IWOTH
            if (why := _writable(path, found, by)) is not None:
                return why
    return None


def read(file: str | Path) -> bytes | None:
    """A file's content; None if there is none, or if it is not a plain file that the user or root alone can write."""
    try:
        with open(file, "rb", opener=_open_no_link) as opened:
            found = os.fstat(opened.fileno())
            if (why := _foreign(file, found) or _writable(file, found)) is None:
                return opened.read() if stat.S_ISREG(found.st_mode) and found.st_size <= LARGEST else None
    except OSError:
        if not Path(file).is_symlink():
            return None
        why = f"{file} is a link, expected a file"
    _warn("file", f"{why}: it is not read, and compiled again; the same goes for others like it")
    return None


def write(file: Path, data: bytes) -> None:
    """Put a file in its place at once, readable and writable by the user alone. The folder has to be there."""
    handle, name = tempfile.mkstemp(dir=file.parent)
    scratch = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            scratch.chmod(0o600)  # whatever the umask is
            out.write(data)
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)


def make(folder: Path) -> None:
    """Make a folder and the missing ones above it, each for the user alone, whatever the umask is."""
    if not folder.is_dir():
        make(folder.parent)
        with contextlib.suppress(FileExistsError):  # another process is as quick, or a file: then all else fails
            folder.mkdir(mode=0o700)
            folder.chmod(0o700)


def digest(name: str, data: bytes) -> bytes:
    """sha256 of a file's full name and its content: the content under another name has another one."""
    both = hashlib.sha256(hashlib.sha256(name.encode()).digest())
    both.update(data)
    return both.digest()


@functools.cache
def _process_folder() -> Path:
    """Of this process alone, removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-"))
    folder.chmod(0o700)  # whatever the umask is
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _open_no_link(path: str, flags: int) -> int:
    """Neither follows a link nor waits for the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _foreign(path: str | Path, found: os.stat_result) -> str | None:
    if not _OWNED or found.st_uid in (os.geteuid(), 0):
        return None
    return f"{path} belongs to user {found.st_uid}, expected {os.geteuid()}"


def _writable(path: str | Path, found: os.stat_result, by: int = stat.S_IWGRP | stat.S_IWOTH) -> str | None:
    if not _OWNED or not found.st_mode & by:
        return None
    return f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"


@functools.cache
def _users_own_group(gid: int) -> bool:
    """Whether a group is the one that systems make for each user, with no one else in it."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _warn(about: str, text: str) -> None:
    with _lock:
        if about not in _warned:
            _warned.add(about)
            logging.getLogger("penstock").warning("%s", text)
