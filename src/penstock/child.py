"""A resident child process that runs one function on bytes, within limits of time and memory.

For work on data that is not trusted: chat templates, large bodies of requests. A call that takes too long or too much
memory costs the child, not this process; the next call starts another one. The child can open no files, and of the
environment it gets only what Python needs to start. Only what `function` imports is loaded in it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from penstock.errors import PenstockError

_CALL = struct.Struct("<dQ")  # seconds, bytes that follow
_ANSWER = struct.Struct("<BQ")  # one of the following, bytes that follow
_DONE, _MEMORY, _FAILED = range(3)
_START_SECONDS = 60.0  # to import what the function needs, on a busy machine
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "SYSTEMROOT")  # and PYTHON*


class ChildError(PenstockError):
    """A call in a child process that gave no result."""


class ChildTimeout(ChildError):
    """The call took longer than it may."""


class ChildOutOfMemory(ChildError):
    """The call took more memory than it may."""


class ChildDied(ChildError):
    """The process ended before it answered, or could not be started."""


class Child:
    """Calls `handler`, "package.module:function" from bytes to bytes, in a process of its own.

    memory: bytes that calls may take beyond what the imports took (Linux; elsewhere only time is limited). seconds:
    of one call, unless it names its own. The process starts at the first call or `start`; calls from several threads
    run one after the other. A function that raises gives ChildError with the message.
    """

    def __init__(self, handler: str, *, memory: int, seconds: float) -> None:
        self._handler, self._memory, self._seconds = handler, memory, seconds
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._finalizer: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Start the process now, so that the first call does not wait for it."""
        with self._lock:
            self._running()

    def call(self, data: bytes, seconds: float | None = None) -> bytes:
        """What the function returns for `data`. Raises ChildTimeout, ChildOutOfMemory, ChildDied or ChildError."""
        seconds = self._seconds if seconds is None else seconds
        with self._lock:
            process = self._running()
            try:
                status, answer = process.call(data, seconds)
            except BaseException:  # a KeyboardInterrupt too: its answer would be taken for the next call's
                self._stop()
                raise
            if status == _MEMORY:
                self._stop()
                raise ChildOutOfMemory(f"{self._handler}: needs more memory than {self._memory >> 20} MiB")
        if status == _FAILED:
            raise ChildError(answer.decode())
        return answer

    def close(self) -> None:
        """End the process. A later call starts another one."""
        with self._lock:
            self._stop()

    def _running(self) -> _Process:
        if self._process is not None and self._process.ended:
            self._stop()
        if self._process is None or self._process.owner != os.getpid():  # a forked copy leaves the process to its owner
            self._process = _Process(self._handler, self._memory)
            self._finalizer = weakref.finalize(self, self._process.end)
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._finalizer()  # ends it, and is forgotten
            self._process = None


class _Process:
    """The process and its end of a socket. `end` may be called again."""

    def __init__(self, handler: str, memory: int) -> None:
        self.owner = os.getpid()
        self._handler = handler
        self._socket, theirs = socket.socketpair()
        environ = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith("PYTHON")}
        home = str(Path(__file__).parents[1])  # the parent may have found penstock by a path of its own
        code = (
            f"import sys; sys.path.append({home!r}); "
            f"from penstock.child import run; run({theirs.fileno()}, {handler!r}, {memory})"
        )
        try:
            with theirs:
                self._child = subprocess.Popen(
                    [sys.executable, "-P", "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=environ,
                    start_new_session=True,  # Ctrl-C in a terminal is for this process
                )
        except OSError as error:
            self._socket.close()
            raise ChildDied(f"{handler}: no process can be started: {error.strerror or error}") from None
        try:
            status, answer = self._answer(time.monotonic() + _START_SECONDS, _START_SECONDS)
        except BaseException:
            self.end()
            raise
        if status != _DONE:
            self.end()
            raise ChildDied(f"{handler}: cannot be imported: {answer.decode()}")

    @property
    def ended(self) -> bool:
        """Whether it ended between two calls, by no fault of either."""
        return self.owner == os.getpid() and self._child.poll() is not None

    def call(self, data: bytes, seconds: float) -> tuple[int, bytes]:
        end = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(_CALL.pack(seconds, len(data)))
            self._socket.sendall(data)
        except TimeoutError:
            raise self._late(seconds) from None
        except OSError:
            raise self._died() from None
        return self._answer(end, seconds)

    def _answer(self, end: float, seconds: float) -> tuple[int, bytes]:
        status, length = _ANSWER.unpack(self._received(_ANSWER.size, end, seconds))
        return status, self._received(length, end, seconds)

    def _received(self, length: int, end: float, seconds: float) -> bytes:
        received = bytearray()
        while len(received) < length:
            left = end - time.monotonic()
            if left <= 0:
                raise self._late(seconds)
            self._socket.settimeout(left)
            try:
                part = self._socket.recv(min(length - len(received), 1 << 20))
            except TimeoutError:
                raise self._late(seconds) from None
            except OSError:
                part = b""
            if not part:
                raise self._died()
            received += part
        return bytes(received)

    def _late(self, seconds: float) -> ChildTimeout:
        return ChildTimeout(f"{self._handler}: takes longer than {seconds:g} s")

    def _died(self) -> ChildError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(1.0)
        status = self._child.returncode
        if status == -getattr(signal, "SIGXCPU", 0):
            return ChildTimeout(f"{self._handler}: takes more time of the processor than it may")
        return ChildDied(f"{self._handler}: its process ended with status {status}")

    def end(self) -> None:
        if self.owner != os.getpid():
            return
        self._socket.close()
        if hasattr(self, "_child"):
            self._child.kill()
            self._child.wait()


def run(descriptor: int, handler: str, memory: int) -> None:
    """In the child: answer calls until the other end is closed."""
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(OSError):
        try:
            module, _, name = handler.partition(":")
            function: Callable[[bytes], bytes] = getattr(importlib.import_module(module), name)
            _limit(memory)
        except Exception as error:
            _send(connection, _FAILED, f"{type(error).__name__}: {error}".encode(errors="replace"))
            return
        _send(connection, _DONE, b"")
        while head := _read(connection, _CALL.size):
            seconds, length = _CALL.unpack(head)
            _limit_time(seconds)
            try:
                data = _read(connection, length)
                status, answer = _DONE, function(data)
            except MemoryError:
                status, answer = _MEMORY, b""
            except Exception as error:
                status, answer = _FAILED, f"{type(error).__name__}: {error}".encode(errors="replace")
            _send(connection, status, answer)


def _read(connection: socket.socket, length: int) -> bytes:
    """That many bytes; fewer where the other end was closed."""
    received = bytearray()
    while len(received) < length and (part := connection.recv(min(length - len(received), 1 << 20))):
        received += part
    return bytes(received)


def _send(connection: socket.socket, status: int, answer: bytes) -> None:
    connection.sendall(_ANSWER.pack(status, len(answer)))
    connection.sendall(answer)


def _limit(memory: int) -> None:
    """No files and no core dump; on Linux at most so many bytes more than now."""
    import resource

    if sys.platform == "linux":
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def _limit_time(seconds: float) -> None:
    """A call comes to its end even if this process's parent is gone: the system ends it."""
    import resource

    used, (_, hard) = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_CPU)
    most = int(used.ru_utime + used.ru_stime + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
