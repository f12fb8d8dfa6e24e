"""One engine over several ranks: rank 0 decides and says what it does, the others do the same with their parts.

The scheduler, with all that depends on a clock, on free memory or on a callable, runs on rank 0 alone. Each change of
the caches and each step is a message to the other ranks before its collectives run: which sequences, which tokens. A
step's message also has what the ranks must agree on: how many messages there were, the lengths of its sequences, the
tokens that the last step's logits are highest for, where they are on the host, and a hash of the step's plan, slots and
pages included. A rank that has others says so and ends all. Where the device samples tokens rank 0 alone draws: what it
drew is in the next message, as the tokens of its runs, and the others leave their logits where they are.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np

from penstock.dtypes import dtype_name, numpy_dtype
from penstock.engine.cache import Caches, Sequence, Snapshot
from penstock.engine.cache_size import CacheSize
from penstock.engine.engine import Engine
from penstock.engine.nonfinite import NonFinite, own_nonfinite
from penstock.engine.steps import Run, wants_hidden
from penstock.errors import EngineDied
from penstock.models.split import Split
from penstock.models.step import Layout, PagedKV
from penstock.ops.device import Device, PendingStep
from penstock.parallel.group import RankGroup

P = ParamSpec("P")
T = TypeVar("T")


class _Command(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Open(_Command, frozen=True):
    sequence: int


class Close(_Command, frozen=True):
    sequence: int


class TakeSnapshot(_Command, frozen=True):
    sequence: int
    snapshot: int


class Rewind(_Command, frozen=True):
    sequence: int
    snapshot: int


class Truncate(_Command, frozen=True):
    sequence: int
    length: int


class ReserveAhead(_Command, frozen=True):
    """Pages for positions that the first rank writes before the step: those of its head."""

    sequence: int
    count: int


class Accept(_Command, frozen=True):
    """Of the run of a sequence that the last step has kept so many tokens are its own."""

    sequence: int
    count: int


class Settle(_Command, frozen=True):
    sequence: int


class Drop(_Command, frozen=True):
    snapshot: int


class MakeRoom(_Command, frozen=True):
    """Pages per window, −1 for none, and slots."""

    pages: dict[int, int]
    slots: int


class Allocate(_Command, frozen=True):
    slots: int
    pages: dict[int, int]


class Least(_Command, frozen=True):
    """What is the least free memory of all ranks? share: see `DeviceMemory.free_memory`."""

    share: float


class Rows(_Command, frozen=True):
    sequence: int
    layer: int


class Fill(_Command, frozen=True):
    """Arrays of all layers of a sequence that has just been opened follow, a message each."""

    sequence: int
    length: int


class Values(_Command, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class RunOf(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    length: int  # of the sequence before the step
    tokens: bytes  # int32
    wanted: str
    prompt: bool
    keep: bool


class StepOf(_Command, frozen=True):
    """A step; number: of messages before it; highest: tokens of the last step's logits; plan: see `plan_hash`."""

    runs: list[RunOf]
    number: int
    highest: list[int]
    plan: bytes


class Prepare(_Command, frozen=True):
    pass


class FindNonFinite(_Command, frozen=True):
    """Which result of a step with this token is the first one that is not finite? Each rank answers for its own."""

    sequence: int
    token: int


class End(_Command, frozen=True):
    pass


Command = (
    Open
    | Close
    | TakeSnapshot
    | Rewind
    | Truncate
    | ReserveAhead
    | Accept
    | Settle
    | Drop
    | MakeRoom
    | Allocate
    | Least
    | Rows
    | Fill
    | Values
    | StepOf
    | Prepare
    | FindNonFinite
    | End
)


def _windows(pages: Mapping[int | None, int]) -> dict[int, int]:
    return {-1 if window is None else window: count for window, count in pages.items()}


def _pages(windows: Mapping[int, int]) -> dict[int | None, int]:
    return {None if window == -1 else window: count for window, count in windows.items()}


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Around what all ranks do or none: Ctrl-C counts behind it."""
    ours = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if ours else None
    if before is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def later(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt


def _whole(method: Callable[P, T]) -> Callable[P, T]:
    """A change of the caches that Ctrl-C does not cut in two."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with uninterrupted():
            return method(*args, **kwargs)

    return run


class Leader:
    """On rank 0: tells the other ranks what to do.

    splits: of all ranks; layouts: of the whole model's caches; local_ranks: on this machine; sharing: on one device.
    """

    def __init__(
        self, group: RankGroup, splits: Seq[Split[Any]], layouts: Seq[Layout], local_ranks: int, sharing: int = 1
    ) -> None:
        self.group, self.splits, self.layouts = group, splits, tuple(layouts)
        self.local_ranks, self.sharing = local_ranks, sharing
        self._encoder = msgspec.msgpack.Encoder()
        self._numbers, self._sent, self._ended = itertools.count(), 0, False
        self._of: dict[Sequence | Snapshot, int] = {}
        self._highest: list[int] = []
        self._kinds: set[Any] = set()
        self._silent = self._first = False

    def named(self, thing: Sequence | Snapshot) -> int:
        """The number by which all ranks know a new sequence or snapshot."""
        number = self._of[thing] = next(self._numbers)
        return number

    def number(self, thing: Sequence | Snapshot) -> int:
        return self._of[thing]

    def forget(self, thing: Sequence | Snapshot) -> int:
        return self._of.pop(thing)

    def check(self) -> None:
        """Raises EngineDied if a rank has failed."""
        if self.group.failure is not None or self._ended:
            raise EngineDied(self.group.failure or "ranks: the model was closed, expected an open one")

    def send(self, command: Command) -> None:
        if self._silent:
            return
        self.check()
        self._sent += 1
        self.group.send(self._encoder.encode(command))

    def caches(self, layouts: Seq[Layout], dtype: str, device: Device) -> Caches:
        """Caches whose changes all ranks make."""
        return LedCaches(layouts, dtype, device, self)

    def free_memory(self, free: int, host: bool, share: float) -> int:
        if host:
            return free // self.local_ranks
        self.send(Least(share))
        return self.group.least(free) // self.sharing

    @contextlib.contextmanager
    def prepared_by_all(self) -> Iterator[None]:
        """Around `Engine.prepare`, which all ranks run by themselves."""
        self.send(Prepare())
        self._silent = True
        try:
            with self.group.stepping(True):
                yield
        finally:
            self._silent = False

    @contextlib.contextmanager
    def stepping(self, runs: Seq[Run]) -> Iterator[list[Any]]:
        """Around a step of all ranks. Its logits, if it has some, are put into the list.

        What fails within it leaves the ranks apart, so it ends all.
        """
        parts = [
            RunOf(self._of[run.sequence], run.sequence.length, run.tokens.tobytes(), run.wanted, run.prompt, run.keep)
            for run in runs
        ]
        kind = _kind(runs)
        found: list[Any] = []
        self._first = kind not in self._kinds
        with uninterrupted():
            self.send(StepOf(parts, self._sent, self._highest, plan_hash(runs)))
            try:
                with self.group.stepping(self._first):
                    yield found
            except EngineDied:
                raise
            except BaseException as error:
                self.group.fail(f"rank 0: a step failed: {type(error).__name__}: {error}")
                raise
            self._kinds.add(kind)
            self._highest = highest(found[0] if found else None)

    def nonfinite_of_all(
        self, sequence: Sequence, token: int, own: Callable[[], NonFinite | None]
    ) -> list[NonFinite | None]:
        """What each rank finds in a step that appends this token to a sequence, the first with `own`.

        As in `stepping`, what fails ends all.
        """
        with uninterrupted():
            self.send(FindNonFinite(self._of[sequence], token))
            try:
                with self.group.stepping(True):
                    found = own()
                return _gathered(self.group, found)
            except EngineDied:
                raise
            except BaseException as error:
                self.group.fail(f"rank 0: a step failed: {type(error).__name__}: {error}")
                raise

    def settle(self, sequence: Sequence) -> None:
        """The recurrent states of all ranks are to hold what was accepted."""
        self.send(Settle(self._of[sequence]))

    def watched(self, step: PendingStep) -> PendingStep:
        """The step that was just launched; waiting for it ends with EngineDied if a rank fails or hangs."""
        return _Watched(self, step, self._first)

    def end(self) -> None:
        """Let the other ranks end."""
        if not self._ended and self.group.failure is None:
            with contextlib.suppress(EngineDied):
                self.send(End())
        self._ended = True


@dataclass(frozen=True)
class _Watched:
    """A pending step of all ranks. first: of its kind, which others may still have to compile."""

    leader: Leader
    step: PendingStep
    first: bool

    def tokens(self) -> list[int]:
        return self._waited(self.step.tokens)

    def logprobs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._waited(self.step.logprobs)

    def logits(self) -> np.ndarray:
        return self._waited(self.step.logits)

    def _waited(self, wait: Callable[[], T]) -> T:
        try:
            with self.leader.group.stepping(self.first):
                found = wait()
        except Exception:
            self.leader.check()
            raise
        self.leader.check()  # what is exchanged with a rank that is gone is anything
        return found


def _kind(runs: Seq[Run]) -> Any:
    """Steps of one kind need no kernels beyond each other's, nearly always."""
    tokens = sum(len(run.tokens) for run in runs)
    return tokens.bit_length(), len(runs).bit_length(), any(run.wanted != "none" for run in runs)


def plan_hash(runs: Seq[Run]) -> bytes:
    """Of all that a step is made of: tokens, which results are wanted, and where the caches of its sequences are."""
    found = hashlib.blake2b(digest_size=8)
    for run in runs:
        sequence = run.sequence
        found.update(repr((sequence.slot, sequence.length, len(run.tokens), run.wanted, run.prompt, run.keep)).encode())
        found.update(run.tokens.tobytes())
        for table in sequence.tables.values():
            found.update(table.array.tobytes())
    return found.digest()


def _gathered(group: RankGroup, own: NonFinite | None) -> list[NonFinite | None]:
    """What all ranks have found."""
    parts = group.gather_host(np.frombuffer(msgspec.msgpack.encode(own), np.uint8))
    return [msgspec.msgpack.decode(part.tobytes(), type=NonFinite | None) for part in parts]


def highest(logits: np.ndarray | None) -> list[int]:
    """The token of each row whose logit is highest."""
    return [] if logits is None else np.argmax(logits, axis=1).tolist()


class LedCaches(Caches):
    """The caches of rank 0: what is done to them is done by all ranks. `rows` and `fill` have those of the whole."""

    def __init__(self, layouts: Seq[Layout], dtype: str, device: Device, leader: Leader) -> None:
        super().__init__(layouts, dtype, device)
        self._leader = leader

    @property
    def saved_layouts(self) -> tuple[Layout, ...]:
        return self._leader.layouts

    @_whole
    def open(self) -> Sequence:
        made = super().open()
        self._leader.send(Open(self._leader.named(made)))
        return made

    @_whole
    def close(self, sequence: Sequence) -> None:
        if not sequence.closed:
            super().close(sequence)
            number = self._leader.forget(sequence)
            with contextlib.suppress(EngineDied):  # nothing is left to close
                self._leader.send(Close(number))

    @_whole
    def snapshot(self, sequence: Sequence) -> Snapshot:
        made = super().snapshot(sequence)
        self._leader.send(TakeSnapshot(self._leader.number(sequence), self._leader.named(made)))
        return made

    @_whole
    def rewind(self, sequence: Sequence, snapshot: Snapshot) -> None:
        super().rewind(sequence, snapshot)
        self._leader.send(Rewind(self._leader.number(sequence), self._leader.number(snapshot)))

    @_whole
    def truncate(self, sequence: Sequence, length: int) -> None:
        super().truncate(sequence, length)
        self._leader.send(Truncate(self._leader.number(sequence), length))

    @_whole
    def reserve_ahead(self, sequence: Sequence, count: int) -> None:
        super().reserve_ahead(sequence, count)
        self._leader.send(ReserveAhead(self._leader.number(sequence), count))

    @_whole
    def accept(self, sequence: Sequence, count: int) -> None:
        super().accept(sequence, count)
        self._leader.send(Accept(self._leader.number(sequence), count))

    @_whole
    def drop(self, snapshot: Snapshot) -> None:
        if not snapshot.closed:
            super().drop(snapshot)
            number = self._leader.forget(snapshot)
            with contextlib.suppress(EngineDied):
                self._leader.send(Drop(number))

    @_whole
    def make_room(self, pages: Mapping[int | None, int], slots: int) -> None:
        super().make_room(pages, slots)
        self._leader.send(MakeRoom(_windows(pages), slots))

    @_whole
    def allocate(self, slots: int, pages: Mapping[int | None, int]) -> None:
        super().allocate(slots, pages)
        self._leader.send(Allocate(slots, _windows(pages)))

    @_whole
    def rows(self, sequence: Sequence, layer: int) -> tuple[np.ndarray, np.ndarray]:
        leader = self._leader
        leader.send(Rows(leader.number(sequence), layer))
        found = []
        for n, own in enumerate(super().rows(sequence, layer)):
            parts = leader.group.gather_host(own)
            found.append(_merged(parts, [split.caches[layer][n] for split in leader.splits], leader.layouts[layer], n))
        return found[0], found[1]

    @_whole
    def fill(self, sequence: Sequence, length: int, rows: Seq[tuple[np.ndarray, np.ndarray]]) -> None:
        leader = self._leader
        leader.send(Fill(leader.number(sequence), length))
        for pair in rows:
            for array in pair:
                leader.send(Values(dtype_name(array.dtype), array.shape, np.ascontiguousarray(array).tobytes()))
        super().fill(sequence, length, part_of_rows(rows, leader.splits[0], self.layouts[: len(leader.layouts)]))


def _merged(parts: list[np.ndarray], indices: list[Any], layout: Layout, n: int) -> np.ndarray:
    """What all ranks have of one of a layer's arrays: columns of positions, or heads of a state."""
    if indices[0] is None:
        return parts[0]
    state = not isinstance(layout, PagedKV) and n == 1
    if isinstance(layout, PagedKV):
        shape = (parts[0].shape[0], (layout.key_width, layout.value_width)[n])
    else:
        shape = layout.state if state else layout.conv
    whole = np.zeros(shape, parts[0].dtype)
    for part, index in zip(parts, indices, strict=True):
        if state:
            whole[index] = part
        else:
            whole[:, index] = part
    return whole


def part_of_rows(rows: Seq[tuple[Any, Any]], split: Split[Any], layouts: Seq[Layout]) -> list[tuple[Any, Any]]:
    """A rank's part of what `LedCaches.rows` has merged."""
    found = []
    for pair, indices, layout in zip(rows, split.caches, layouts, strict=True):
        own = []
        for n, (array, index) in enumerate(zip(pair, indices, strict=True)):
            state = not isinstance(layout, PagedKV) and n == 1
            own.append(array if index is None else np.ascontiguousarray(array[index] if state else array[:, index]))
        found.append(tuple(own))
    return found


class Follower:
    """On the other ranks: does what rank 0 says, until it says `End`."""

    def __init__(self, engine: Engine, group: RankGroup) -> None:
        self._engine, self._group = engine, group
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._things: dict[int, Any] = {}
        self._received, self._highest = 0, []
        self._kinds: set[Any] = set()

    def run(self) -> None:
        while True:
            command = self._next()
            if isinstance(command, End):
                return
            self._do(command)

    def _next(self) -> Any:
        message = self._group.receive()
        try:
            return self._decoder.decode(message)
        except (msgspec.DecodeError, ValueError) as error:
            raise EngineDied(f"rank {self._group.rank}: not a message: {error}") from None
        finally:
            self._received += 1

    def _do(self, command: Any) -> None:
        engine, things = self._engine, self._things
        caches = engine.caches
        if isinstance(command, StepOf):
            self._step(command)
        elif isinstance(command, Open):
            things[command.sequence] = caches.open()
        elif isinstance(command, Close):
            caches.close(things.pop(command.sequence))
        elif isinstance(command, TakeSnapshot):
            things[command.snapshot] = caches.snapshot(things[command.sequence])
        elif isinstance(command, Rewind):
            caches.rewind(things[command.sequence], things[command.snapshot])
        elif isinstance(command, Truncate):
            caches.truncate(things[command.sequence], command.length)
        elif isinstance(command, ReserveAhead):
            caches.reserve_ahead(things[command.sequence], command.count)
        elif isinstance(command, Accept):
            caches.accept(things[command.sequence], command.count)
        elif isinstance(command, Settle):
            engine.settle(things[command.sequence])
        elif isinstance(command, Drop):
            caches.drop(things.pop(command.snapshot))
        elif isinstance(command, MakeRoom):
            caches.make_room(_pages(command.pages), command.slots)
        elif isinstance(command, Allocate):
            engine.allocate_as(CacheSize(command.slots, _pages(command.pages)))
        elif isinstance(command, Least):
            self._group.least(engine.device.free_memory(command.share))
        elif isinstance(command, Rows):
            for array in caches.rows(things[command.sequence], command.layer):
                self._group.gather_host(array)
        elif isinstance(command, Fill):
            self._fill(things[command.sequence], command.length)
        elif isinstance(command, Prepare):
            engine.prepare()
        elif isinstance(command, FindNonFinite):
            self._find_nonfinite(things[command.sequence], command.token)

    def _step(self, command: StepOf) -> None:
        runs = [
            Run(self._things[run.sequence], np.frombuffer(run.tokens, np.int32), run.wanted, run.prompt, run.keep)
            for run in command.runs
        ]
        self._agree("messages", self._received - 1, command.number)
        self._agree("lengths", [run.sequence.length for run in runs], [run.length for run in command.runs])
        self._agree("tokens of the last step", self._highest, command.highest)
        kind = _kind(runs)
        with self._group.stepping(kind not in self._kinds):
            logits = self._engine.follow(
                runs, lambda: self._agree("slots and pages (hash)", plan_hash(runs).hex(), command.plan.hex())
            )
        self._kinds.add(kind)
        self._highest = [] if wants_hidden(runs) else highest(logits)

    def _agree(self, what: str, here: object, there: object) -> None:
        if here != there:
            shown = f"{str(here)[:60]} here, {str(there)[:60]} on rank 0"
            raise EngineDied(f"rank {self._group.rank}: the ranks have come apart in their {what}: {shown}")

    def _find_nonfinite(self, sequence: Sequence, token: int) -> None:
        engine, group = self._engine, self._group
        with engine.lock, engine.device.running(engine.deterministic), group.stepping(True):
            found = own_nonfinite(engine, sequence, token)
        _gathered(group, found)

    def _fill(self, sequence: Sequence, length: int) -> None:
        engine = self._engine
        arrays = []
        for _ in range(2 * len(engine.caches.layouts)):
            values = self._next()
            if not isinstance(values, Values):
                raise EngineDied(f"rank {self._group.rank}: {type(values).__name__} came, expected Values")
            arrays.append(np.frombuffer(values.data, numpy_dtype(values.dtype)).reshape(values.shape))
        assert engine.model.split is not None
        rows = list(zip(arrays[::2], arrays[1::2], strict=True))
        engine.caches.fill(sequence, length, part_of_rows(rows, engine.model.split, engine.caches.layouts))
