"""Starting ranks: as processes of this one on this machine, or by torchrun on several.

Ranks of one machine meet in a folder that this user alone can open, and talk on the loopback device: no port is open to
others. They end with the process that started them, whatever it ends by.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import BackendError, EngineDied, InvalidArgument
from penstock.parallel.group import STEP_SECONDS, RankGroup, torch_distributed
from penstock.settings import without_secrets

_LOOPBACK = "127.0.0.1"
_JOIN_SECONDS = 120.0  # for the processes of all ranks to begin
_GRACE = 5.0  # for them to end by themselves
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankOptions:
    """How ranks are joined: arrays travel by `backend`, a step may take step_seconds."""

    backend: str = "gloo"
    step_seconds: float = STEP_SECONDS

    def __post_init__(self) -> None:
        if self.backend not in ("gloo", "nccl"):
            raise InvalidArgument(f"ranks: backend is {self.backend!r}, expected 'gloo' or 'nccl'")
        if not self.step_seconds > 0:
            raise InvalidArgument(f"load: step_timeout is {self.step_seconds!r}, expected seconds above 0")


@dataclass(frozen=True)
class Torchrun:
    """Where this process is among those that torchrun has started."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def joined_by_torchrun() -> Torchrun | None:
    """What torchrun says in the environment; None: this process was not started by it."""
    if not all(name in os.environ for name in _TORCHRUN):
        return None
    try:
        rank, size, local_rank, local_size = (int(os.environ[name]) for name in _TORCHRUN[:4])
    except ValueError:
        raise InvalidArgument("torchrun: RANK, WORLD_SIZE and their like are no integers, expected them") from None
    return Torchrun(rank, size, local_rank, local_size)


def join_torchrun(found: Torchrun, options: RankOptions) -> RankGroup:
    """The group of all processes that torchrun has started. Raises EngineDied where they cannot be reached."""
    dist = torch_distributed()
    import datetime

    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        timeout = datetime.timedelta(seconds=_JOIN_SECONDS)
        server = found.rank == 0 and not shared
        store = dist.TCPStore(address, int(port), found.size, server, timeout, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise EngineDied(f"rank {found.rank}: {address}:{port} cannot be reached: {why}") from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{attempt}", store)
    local = _LOOPBACK if found.local_size == found.size else None
    group = RankGroup(
        store, found.rank, found.size, backend=options.backend, address=local, step_seconds=options.step_seconds
    )
    group.ended = functools.partial(_exit, found.rank)
    return group


class RankProcesses:
    """Ranks 1, 2, … of a group whose rank 0 is this process; each runs `entry` ("module:function") with its start."""

    def __init__(self, size: int, options: RankOptions, entry: str, start: dict[str, Any]) -> None:
        torch_distributed()
        self.size, self.options = size, options
        self.group: RankGroup | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-ranks-"))  # mode 0700
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = False
        self._finalizer = weakref.finalize(self, _end, self._processes, self._folder)
        home = str(Path(__file__).parents[2])  # this process may have found penstock by a path of its own
        path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        try:
            for rank in range(1, size):
                about = {"rank": rank, "size": size, "store": str(self._folder / "store"), "backend": options.backend}
                about |= {"step_seconds": options.step_seconds, "start": start}
                made = subprocess.Popen(
                    [sys.executable, "-P", "-m", "penstock.parallel", entry],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    env=without_secrets() | {"PYTHONPATH": path},
                    start_new_session=True,  # Ctrl-C in a terminal is for rank 0
                )
                self._processes.append(made)
                assert made.stdin is not None
                made.stdin.write(json.dumps(about).encode() + b"\n")
                made.stdin.flush()
        except OSError as error:
            self.close()
            raise BackendError(f"ranks: a process cannot be started: {error.strerror or error}") from None

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def join(self) -> RankGroup:
        """The group, once all ranks have begun. Raises EngineDied if one of them ends."""
        dist = torch_distributed()
        store = dist.FileStore(str(self._folder / "store"), self.size)
        end = time.monotonic() + _JOIN_SECONDS
        for rank in range(1, self.size):
            while not store.check([f"here/{rank}"]):
                if (cause := self._dead()) is not None:
                    raise EngineDied(cause)
                if time.monotonic() > end:
                    raise EngineDied(f"rank {rank}: did not begin within {_JOIN_SECONDS:g} s")
                time.sleep(0.01)
        options = self.options
        group = RankGroup(
            store, 0, self.size, backend=options.backend, address=_LOOPBACK, step_seconds=options.step_seconds
        )
        self.group, owner = group, weakref.ref(self)
        group.ended = lambda cause: None if (found := owner()) is None else found.kill()
        threading.Thread(target=_watch, args=(owner,), name="penstock-ranks", daemon=True).start()
        return group

    def _dead(self) -> str | None:
        """Why a rank has ended, if one has."""
        for rank, process in enumerate(self._processes, 1):
            if (code := process.poll()) is not None:
                status = f"signal {-code}" if code < 0 else f"status {code}"
                return f"rank {rank}: its process ended ({status})"
        return None

    def kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.kill()

    def close(self) -> None:
        """End the processes: by themselves, if they were told to, else at once."""
        self._closing = True
        if self.group is not None:
            self.group.close()
        end = time.monotonic() + (_GRACE if self.group is not None and self.group.failure is None else 0.0)
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        self._finalizer()


def start_ranks(size: int, options: RankOptions, entry: str, start: dict[str, Any]) -> RankProcesses:
    """Start ranks 1 … size − 1 on this machine; `join` waits for them."""
    return RankProcesses(size, options, entry, start)


def _watch(owner: weakref.ref[RankProcesses]) -> None:
    """In a thread of rank 0: the end of a rank is the end of all."""
    while True:
        time.sleep(0.2)
        found = owner()
        if found is None or found._closing:
            return
        if (cause := found._dead()) is not None:
            time.sleep(0.1)  # it may have said why
            if not found._closing and found.group is not None:
                found.group.fail(cause)
                found.kill()
            return
        del found


def _end(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            process.kill()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def join_parent(about: dict[str, Any]) -> RankGroup:
    """In a process that `start_ranks` began: its group."""
    dist = torch_distributed()
    store = dist.FileStore(about["store"], about["size"])
    store.set(f"here/{about['rank']}", b"")
    group = RankGroup(
        store,
        about["rank"],
        about["size"],
        backend=about["backend"],
        address=_LOOPBACK,
        step_seconds=about["step_seconds"],
    )
    group.ended = functools.partial(_exit, about["rank"])
    return group


def _exit(rank: int, cause: str) -> None:
    """End this process now: its main thread may wait for a rank that is gone. Rank 0 says why, or the rank itself."""
    if rank == 0 or cause.startswith(f"rank {rank}:"):
        print(f"penstock: {cause}", file=sys.stderr, flush=True)
    os._exit(1)
