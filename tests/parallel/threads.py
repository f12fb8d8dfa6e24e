"""Ranks in one process."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.ops.collective import set_communicator


class Threads:
    """A communicator whose ranks are threads; arrays are of NumPy or torch."""

    capturable = True

    def __init__(self, size: int) -> None:
        self.size, self._own = size, threading.local()
        self._arrays: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    @property
    def rank(self) -> int:
        return self._own.rank

    def _shared(self, array: Any) -> list[Any]:
        self._arrays[self.rank] = array.copy() if isinstance(array, np.ndarray) else array.clone()
        self._barrier.wait()
        found = list(self._arrays)
        self._barrier.wait()
        return found

    def all_reduce(self, array: Any, note: Any = None) -> None:
        array[...] = sum(self._shared(array))
        if note is not None:
            note[...] = sum(self._shared(note))

    def all_gather(self, parts: Any, array: Any) -> None:
        for part, found in zip(parts, self._shared(array), strict=True):
            part[...] = found

    def run(self, work: Any) -> list[Any]:
        """What `work(rank)` returns in each thread; raises what one of them raised first."""
        found: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            self._own.rank = rank
            try:
                found[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        set_communicator(self)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            set_communicator(None)
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return found


class ThreadGroup:
    """What `RankGroup` is to processes, for a rank that is a thread. seconds: that a message may take to come."""

    def __init__(self, threads: Threads, rank: int, inboxes: list["queue.Queue[bytes]"], seconds: float = 60) -> None:
        self.rank, self.size = rank, threads.size
        self.failure: str | None = None
        self.messages: list[bytes] = []
        self._threads, self._inboxes, self._seconds = threads, inboxes, seconds

    @classmethod
    def all(cls, threads: Threads) -> list["ThreadGroup"]:
        inboxes: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(threads.size)]
        return [cls(threads, rank, inboxes) for rank in range(threads.size)]

    def send(self, message: bytes) -> None:
        self.messages.append(message)
        for inbox in self._inboxes[1:]:
            inbox.put(message)

    def receive(self) -> bytes:
        return self._inboxes[self.rank].get(timeout=self._seconds)

    def gather_host(self, array: np.ndarray) -> list[np.ndarray]:
        return self._threads._shared(array)

    def exchange(self, name: str, own: bytes, seconds: float) -> list[bytes]:
        return [bytes(one) for one in self.gather_host(np.frombuffer(own, np.uint8))]

    def least(self, value: int) -> int:
        return min(int(one[0]) for one in self.gather_host(np.array([value])))

    def fail(self, cause: str) -> None:
        self.failure = self.failure or cause

    def close(self) -> None:
        pass

    @contextlib.contextmanager
    def stepping(self, first: bool) -> Iterator[None]:
        yield
