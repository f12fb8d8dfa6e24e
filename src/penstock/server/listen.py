"""Other ways to listen than a plain port: a Unix socket, and TLS."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import InvalidArgument, PenstockError


def bind_unix(path: str, mode: int) -> socket.socket:
    """A Unix socket that listens there, with the rights `mode`. One that a server left behind is replaced if nothing
    answers on it. Raises PenstockError for one that is in use, for a file that is no socket, and if it is impossible.
    """
    try:
        _remove_stale(path)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise PenstockError(f"serve: --uds: {path}: {error.strerror or error}") from None
    try:
        bound.bind(path)
        Path(path).chmod(mode)  # before it listens, so that at no time others can connect
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise PenstockError(f"serve: --uds: cannot listen on {path}: {error.strerror or error}") from None
    return bound


def _remove_stale(path: str) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise PenstockError(f"serve: --uds: {path} is there and is no socket, expected a path without a file")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        tried.settimeout(5)
        try:
            tried.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
    raise PenstockError(f"serve: --uds: {path} is in use (another server?); choose another path")


@contextlib.contextmanager
def removed_at_end(bound: socket.socket) -> Iterator[None]:
    """The file of a Unix socket goes when the block ends, unless another server has put its own there."""
    path = bound.getsockname() if bound.family == socket.AF_UNIX else ""
    made = os.lstat(path) if path else None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if made is not None and os.path.samestat(made, os.lstat(path)):
                Path(path).unlink()


def tls_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """TLS 1.2 or newer with a certificate (and those above it) and its key, which may be in the same file.

    Raises InvalidArgument for files that cannot be read, that are none, and for a key of another certificate.
    """
    for option, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        try:
            if path is not None:
                Path(path).read_bytes()
        except OSError as error:
            raise InvalidArgument(f"{option}: {path}: {error.strerror or error}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    where = f"--ssl-keyfile: {key}" if key is not None else f"--ssl-certfile: {certificate}"

    def password() -> str:
        raise InvalidArgument(f"{where}: the key is encrypted, expected one without a password")

    try:
        context.load_cert_chain(certificate, key, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidArgument(f"{where}: is the key of another certificate than {certificate}") from None
        raise InvalidArgument(
            f"{where}: no key that fits the certificate {certificate} can be read, expected both in PEM"
        ) from None
    return context
