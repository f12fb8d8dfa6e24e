"""A process group of ranks: collectives of a step, messages of rank 0, and the end of all when one fails.

Arrays of a step travel by gloo (host memory) or NCCL (GPUs), messages and host arrays by a gloo group of their own, in
which ranks wait as long as it takes. No object is ever pickled: messages are bytes in uint8 tensors, up to a limit.
What ranks tell each other beside collectives (that they have loaded, that they failed) is in the store.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from penstock.errors import BackendError, EngineDied, InvalidArgument

STEP_SECONDS = 60.0  # that a step may take before its rank counts as hung
FIRST_SECONDS = 900.0  # a step of a kind that may still have to be compiled
MAX_MESSAGE = 1 << 30
_HEAD = 4096  # bytes of a message that travel with its length
_FOREVER = 365 * 86400.0
_POLL = 0.25
_LAST_SECONDS = 10.0  # for the watchdog's question to the store to be answered, which takes seconds on a busy machine
_FAILED = "failed"


def torch_distributed() -> Any:
    """torch.distributed. Raises BackendError where it is not installed."""
    try:
        import torch.distributed as dist
    except ImportError:
        raise BackendError(
            "tensor_parallel_size: torch is not installed, expected it (pip install 'penstock[distributed]')"
        ) from None
    if not dist.is_available() or not hasattr(dist, "ProcessGroupGloo"):
        raise BackendError("tensor_parallel_size: this torch was built without gloo, expected one that has it")
    return dist


class RankGroup:
    """This process among `size` ranks, found through a store of torch.distributed.

    address: of the network device that gloo uses; None: that of GLOO_SOCKET_IFNAME, else of this machine's name.
    backend of the arrays of steps: "gloo" or "nccl". ended is called, once and from a thread, when a rank has failed or
    hangs: it ends this process, or the others. step_seconds: that a step may take.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        backend: str = "gloo",
        address: str | None = None,
        step_seconds: float = STEP_SECONDS,
    ) -> None:
        dist = torch_distributed()
        import torch

        self._torch, self._dist = torch, dist
        self.rank, self.size, self.backend = rank, size, backend
        self.step_seconds = step_seconds
        self.failure: str | None = None
        self.ended: Callable[[str], None] = lambda cause: None
        self._store = dist.PrefixStore("penstock", store)
        self._began: tuple[float, float] | None = None  # when a step did, and how long it may take
        self._closed = threading.Event()
        try:
            self._control = self._gloo("control", address, _FOREVER)
            self._data = self._control if backend == "gloo" else self._nccl(address is not None)
        except RuntimeError as error:
            raise EngineDied(f"rank {rank}: the other ranks cannot be reached: {_line(error)}") from None
        self._head = torch.zeros(_HEAD, dtype=torch.uint8)
        self._watchdog = threading.Thread(target=self._watch, name="penstock-rank-watchdog", daemon=True)
        self._watchdog.start()

    def _gloo(self, name: str, address: str | None, seconds: float) -> Any:
        kind = self._dist.ProcessGroupGloo
        options = kind._Options()
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]  # torch reads it for its groups alone
        if address is not None:
            device = kind.create_device(hostname=address)
        else:
            device = kind.create_device(interface=interface) if interface else kind.create_default_device()
        options._devices, options._timeout = [device], datetime.timedelta(seconds=seconds)
        return kind(self._dist.PrefixStore(name, self._store), self.rank, self.size, options)

    def _nccl(self, local: bool) -> Any:
        if local:  # all ranks are on this machine
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        kind = self._dist.ProcessGroupNCCL
        options = kind.Options()
        options._timeout = datetime.timedelta(seconds=FIRST_SECONDS)
        return kind(self._dist.PrefixStore("data", self._store), self.rank, self.size, options)

    # -- collectives -------------------------------------------------------------------------------------------------

    @property
    def capturable(self) -> bool:
        """NCCL's kernels are captured; arrays that travel by gloo pass through the host.

        The first run of a program is never a replay, so on every rank NCCL has connected before something is captured.
        """
        return self.backend == "nccl"

    def all_reduce(self, array: Any, note: Any = None) -> None:
        """Replace an array by its sum over all ranks, and a note with it: NCCL has one launch for both."""
        given = [array] if note is None else [array, note]
        with self._reaching():
            tensors = given if self.backend != "gloo" else [self._on_host(one) for one in given]
            if note is None:
                _wait(self._data.allreduce(tensors, self._in_line("AllreduceOptions")))
            else:
                _wait(self._data.allreduce_coalesced(tensors, self._in_line("AllreduceCoalescedOptions")))
            for one, tensor in zip(given, tensors, strict=True):
                self._back(one, tensor)

    def all_gather(self, parts: Any, array: Any) -> None:
        """Write the arrays of all ranks into parts [size, …]."""
        with self._reaching():
            if self.backend != "gloo":
                options = self._in_line("AllgatherOptions")
                _wait(self._data._allgather_base(parts.reshape(-1), array.reshape(-1), options))
                return
            found, own = self._on_host(parts), self._on_host(array)
            self._data._allgather_base(found.reshape(-1), own.reshape(-1)).wait()
            self._back(parts, found)

    def _in_line(self, name: str) -> Any:
        """Options by which NCCL launches on the stream of the kernels around it.

        On a stream of its own, as torch has it otherwise, each collective of a captured graph is a fork and a join,
        across which no kernel starts before the one before it has ended.
        """
        options = getattr(self._dist.distributed_c10d, name)()
        options.asyncOp = False
        return options

    def _on_host(self, array: Any) -> Any:
        """A tensor on the host with the memory of an array there, or a copy of one on a GPU."""
        if isinstance(array, np.ndarray):
            return self._torch.from_numpy(array)
        return array.cpu() if array.is_cuda else array

    def _back(self, array: Any, tensor: Any) -> None:
        """What `_on_host` made of an array, into it."""
        if tensor is not array and not isinstance(array, np.ndarray):
            array.copy_(tensor)

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._closed.wait(2 * _POLL)  # the reason may be on its way
            raise EngineDied(self.failure or f"rank {self.rank}: another rank is gone: {_line(error)}") from None

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """From rank 0 to all others."""
        if len(message) > MAX_MESSAGE:
            raise InvalidArgument(f"ranks: a message has {len(message)} bytes, expected at most {MAX_MESSAGE}")
        room = _HEAD - 8
        head = np.frombuffer(len(message).to_bytes(8, "little") + message[:room], np.uint8)
        with self._reaching(), self._timed():
            self._head[: len(head)] = self._torch.from_numpy(head.copy())
            self._control.broadcast(self._head, 0).wait()
            if len(message) > room:
                rest = self._torch.from_numpy(np.frombuffer(message[room:], np.uint8).copy())
                self._control.broadcast(rest, 0).wait()

    def receive(self) -> bytes:
        """Wait for a message of rank 0."""
        room = _HEAD - 8
        with self._reaching():
            self._control.broadcast(self._head, 0).wait()
            head = self._head.numpy().tobytes()
            length = int.from_bytes(head[:8], "little")
            if length > MAX_MESSAGE:
                raise EngineDied(f"rank {self.rank}: a message of {length} bytes is announced, at most {MAX_MESSAGE}")
            if length <= room:
                return head[8 : 8 + length]
            rest = self._torch.zeros(length - room, dtype=self._torch.uint8)
            self._control.broadcast(rest, 0).wait()
            return head[8:] + rest.numpy().tobytes()

    def gather_host(self, array: np.ndarray) -> list[np.ndarray]:
        """Host arrays of all ranks, which may differ in shape, not in dtype and axes."""
        shapes = self._torch.zeros((self.size, array.ndim), dtype=self._torch.int64)
        with self._reaching(), self._timed():
            own = self._torch.tensor(array.shape, dtype=self._torch.int64)
            self._control._allgather_base(shapes.reshape(-1), own).wait()
            sizes = [int(np.prod(shape)) * array.itemsize for shape in shapes.numpy()]
            flat = np.zeros(max(sizes), np.uint8)
            flat[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            found = self._torch.zeros((self.size, len(flat)), dtype=self._torch.uint8)
            self._control._allgather_base(found.reshape(-1), self._torch.from_numpy(flat)).wait()
        parts = zip(found.numpy(), sizes, shapes.numpy(), strict=True)
        return [part[:size].view(array.dtype).reshape(tuple(shape)) for part, size, shape in parts]

    def least(self, value: int) -> int:
        """The least of what all ranks call this with."""
        return min(int(one[0]) for one in self.gather_host(np.array([value], np.int64)))

    # -- what is in the store ----------------------------------------------------------------------------------------

    def announce(self, name: str, own: bytes) -> None:
        """What this rank has to say under a name, for `exchange` of the others."""
        self._store.set(f"{name}/{self.rank}", own)

    def exchange(self, name: str, own: bytes, seconds: float) -> list[bytes]:
        """What each rank has to say under a name, once all have said it. Raises EngineDied if one fails or is late."""
        self.announce(name, own)
        end, found = time.monotonic() + seconds, []
        for rank in range(self.size):
            key = f"{name}/{rank}"
            while not self._store.check([key]):
                if self.failure is not None:
                    raise EngineDied(self.failure)
                if time.monotonic() > end:
                    raise EngineDied(f"rank {rank}: did not answer within {seconds:g} s ({name})")
                time.sleep(0.01)
            found.append(bytes(self._store.get(key)))
        return found

    def fail(self, cause: str) -> None:
        """Let all ranks end, and say why. The first cause counts."""
        if self.failure is None:
            self.failure = cause
        with contextlib.suppress(RuntimeError):  # the store is gone with its process
            if not self._store.check([_FAILED]):
                self._store.set(_FAILED, cause.encode())

    # -- the watchdog ------------------------------------------------------------------------------------------------

    def stepping(self, first: bool) -> contextlib.AbstractContextManager[None]:
        """Around a step; first: of its kind, which may have to be compiled."""
        return self._timed(FIRST_SECONDS if first else 0.0)

    @contextlib.contextmanager
    def _timed(self, seconds: float = 0.0) -> Iterator[None]:
        """Around what all ranks do within a step's time, or within so many seconds."""
        before, self._began = self._began, (time.monotonic(), max(self.step_seconds, seconds))
        try:
            yield
        finally:
            self._began = before

    def _watch(self) -> None:
        while not self._closed.wait(_POLL):
            began = self._began
            if self.failure is None and began is not None and time.monotonic() - began[0] > began[1]:
                self.fail(f"rank {self.rank}: a step took more than {began[1]:g} s, a rank hangs")
            if self.failure is None:
                with contextlib.suppress(RuntimeError):
                    if self._store.check([_FAILED]):
                        self.failure = bytes(self._store.get(_FAILED)).decode(errors="replace")
            if self.failure is not None:
                self.ended(self.failure)
                self._abort()
                return

    def _abort(self) -> None:
        """Let kernels that wait for another rank end, and this process with them."""
        if self._data is not self._control:
            with contextlib.suppress(RuntimeError):
                self._data.abort()

    def close(self) -> None:
        """Leave the group."""
        if not self._closed.is_set():
            self._closed.set()
            self._abort()
        if threading.current_thread() is not self._watchdog:  # one that asks the store while the process ends aborts it
            self._watchdog.join(_LAST_SECONDS)


def _wait(work: Any) -> None:
    if work is not None:  # else it is in line with what follows
        work.wait()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
