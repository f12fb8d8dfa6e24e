"""In the front process: a scheduler whose engine runs in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.engine.channel import (
    Cancel,
    ChannelError,
    Close,
    Connection,
    Damaged,
    End,
    Failed,
    FromEngine,
    Message,
    Metrics,
    NotLoaded,
    Pause,
    Progress,
    Read,
    Ready,
    Resume,
    Start,
    State,
    Tokens,
    error_of,
    set_timings,
    submit_message,
)
from penstock.engine.heat import ExpertHeat
from penstock.engine.metrics import SchedulerMetrics, total
from penstock.engine.request import Request, RequestLimits, Timings, make_request
from penstock.engine.resources import Resources
from penstock.engine.response import ChunkQueue, ResponseHandle, Token, TokenBatch
from penstock.errors import Cancelled, CheckpointError, EngineDied, InvalidArgument, QueueFull
from penstock.text.tokenizer import Tokenizer

BUFFER = 64  # tokens that a reader may lag behind before the engine knows
RESTART_SECONDS = 60.0  # a second death within them is the last one
_GRACE = 10.0  # seconds for the process to end by itself once its requests have


class RemoteScheduler:
    """Has the interface of `Scheduler`, for an engine in another process.

    module: is run in that process and has `main(descriptor)`. start: what it is to load. resources: what of the machine
    it gets (None: all). progress and notify get its remarks while it loads, record the timings of requests that have
    ended without an error. When the process ends unasked, all requests end with EngineDied and a new one is started,
    meanwhile `unavailable` says so; if that ends too within RESTART_SECONDS, `given_up` is called with the reason.
    damaged is called when the weights cannot be read any more. Returns when the model is there; raises what loading
    failed with.
    """

    def __init__(
        self,
        module: str,
        start: Start,
        tokenizer: Tokenizer,
        *,
        progress: Callable[[float], None] = lambda share: None,
        notify: Callable[[str], None] = lambda note: None,
        damaged: Callable[[CheckpointError], None] | None = None,
        given_up: Callable[[str], None] = lambda reason: None,
        record: Callable[[Sequence[Timings]], None] = lambda timings: None,
        resources: Resources | None = None,
    ) -> None:
        self._module, self._start, self._tokenizer, self._resources = module, start, tokenizer, resources
        self._progress, self._notify, self._damaged, self._given_up = progress, notify, damaged, given_up
        self._record = record
        self.unavailable: str | None = None  # why no request is taken now, as long as a new engine starts
        self.stats: dict[str, Any] = {}
        self._metrics = SchedulerMetrics()
        self._past = SchedulerMetrics()  # of engines that have ended
        self._refused = 0
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards what follows
        self._live: dict[int, _Live] = {}
        self._closing = False
        self._died = -RESTART_SECONDS
        self._engine = _Engine(self._module, self._resources)
        self.ready = self._launch(self._engine)

    @property
    def max_sequences(self) -> int:
        return self.ready.max_sequences

    @property
    def closing(self) -> bool:
        return self._closing

    @property
    def pid(self) -> int:
        """The process of the engine."""
        return self._engine.process.pid

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self._live)

    def request(self, prompt: str | Sequence[int], max_tokens: int = 256, stop: Any = (), **options: Any) -> Request:
        """A request for `submit`, checked here. Raises InvalidArgument or DTypeError, naming what is wrong."""
        model = self.ready.model
        limits = RequestLimits(model["max_context"], model["vocab_size"])
        return make_request(limits, self._tokenizer, prompt, max_tokens, stop, options)

    def submit(self, request: Request, client: str | None = None) -> ResponseHandle:
        """Hand a request in. Raises QueueFull, Cancelled after `close`, EngineDied while there is no engine; what the
        engine itself refuses it for, its reader gets.
        """
        number = next(self._numbers)
        message = submit_message(number, request, client)
        queue = ChunkQueue(BUFFER, functools.partial(self._resume, number), Timings())
        with self._lock:
            if self._closing:
                raise Cancelled("scheduler: it is closing and takes no requests")
            if self.unavailable is not None:
                raise EngineDied(self.unavailable)
            if any(live.request is request for live in self._live.values()):
                raise InvalidArgument("request: it was submitted before, expected a new one")
            self._check_room(client)
            self._live[number] = _Live(request, queue, client)
            engine = self._engine
        engine.send(message)
        return ResponseHandle(request, queue, self._tokenizer, functools.partial(self._cancel, number))

    def metrics(self) -> SchedulerMetrics:
        """Of a moment ago."""
        now = total((self._past, self._metrics))
        return dataclasses.replace(now, refused=now.refused + self._refused)

    def close(self, deadline: float | None = None) -> None:
        """Take no more requests, finish those that run, and end the process; it is killed soon after `deadline`."""
        with self._lock:
            self._closing = True
            engine = self._engine
        if engine.ready.is_set():
            engine.send(Close(deadline))
        else:
            engine.process.kill()
        try:
            engine.process.wait(None if deadline is None else deadline + _GRACE)
        except subprocess.TimeoutExpired:
            engine.process.kill()
        engine.reader.join()

    def __enter__(self) -> RemoteScheduler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(0)

    def _check_room(self, client: str | None) -> None:
        """Raise QueueFull if the engine would refuse a request of this client, and not another one for it."""
        room = self.ready.max_sequences + self.ready.queue
        if len(self._live) < room:
            return
        held = Counter(live.client for live in self._live.values())
        most = max((held[live.client] for live in self._live.values() if not live.begun), default=0)
        if most <= held[client] + 1:
            self._refused += 1
            raise QueueFull(f"queue: {room} requests are running or waiting, expected fewer; try again", 1)

    def _cancel(self, number: int, finished: bool) -> None:
        with self._lock:
            live = self._live.get(number)
            if live is None or live.cancelled:
                return
            live.cancelled = True
            self._engine.send(Cancel(number, finished))

    def _resume(self, number: int) -> None:
        with self._lock:
            live = self._live.get(number)
            if live is None or not live.paused:
                return
            live.paused = False
            self._engine.send(Resume(number))

    # -- the process ---------------------------------------------------------------------------------------------------

    def _launch(self, engine: _Engine) -> Ready:
        """Have an engine load the model. Raises what it failed with, EngineDied if it ended."""
        engine.reader = threading.Thread(target=self._read, args=(engine,), name="penstock-engine-reader", daemon=True)
        engine.reader.start()
        engine.send(self._start)
        engine.ready.wait()
        if engine.answer is None:
            engine.reader.join()
            raise EngineDied(f"the engine process ended while it loaded the model ({engine.status()})")
        if isinstance(engine.answer, NotLoaded):
            engine.process.wait()
            raise error_of(engine.answer.kind, engine.answer.message)
        return engine.answer

    def _read(self, engine: _Engine) -> None:
        """In a thread: messages of an engine, until it ends."""
        try:
            while messages := engine.connection.receive():
                batch = TokenBatch()
                for message in messages:
                    self._take(message, engine, batch)
                batch.wake()
        except ChannelError as error:
            self._notify(f"penstock: the engine process is ended: {error}")
        engine.end()
        loaded = engine.answer is not None
        engine.ready.set()
        if loaded:
            self._ended(engine)

    def _ended(self, engine: _Engine) -> None:
        """An engine that was ready has ended: so do its requests. Start another one, unless that happened before."""
        now, status = time.monotonic(), engine.status()
        if engine.last_note.startswith("rank "):  # of several ranks the one that failed
            status += f": {engine.last_note}"
        with self._lock:
            lost, self._live = self._live, {}
            self._past, self._metrics = total((self._past, self._metrics.ended(len(lost)))), SchedulerMetrics()
            closing = self._closing or isinstance(engine.answer, NotLoaded)
            again = now - self._died > RESTART_SECONDS
            self._died = now
            if not closing:
                self.unavailable = f"the engine process ended ({status}); " + (
                    "a new one is being started" if again else f"the second time within {RESTART_SECONDS:g} s"
                )
        error: Exception = Cancelled("scheduler: it is closing") if closing else EngineDied(str(self.unavailable))
        batch = TokenBatch()
        for live in lost.values():
            live.queue.end(error, batch)
        batch.wake()
        if closing:
            return
        self._notify(f"penstock: {self.unavailable}; {len(lost)} requests are lost")
        if not again:
            self._given_up(str(self.unavailable))
            return
        threading.Thread(target=self._restart, name="penstock-engine-restart", daemon=True).start()

    def _restart(self) -> None:
        try:
            engine = _Engine(self._module, self._resources)
            with self._lock:
                self._engine = engine
                if self._closing:
                    engine.process.kill()
            ready = self._launch(engine)
        except Exception as error:
            if not self._closing:
                self.unavailable = f"{self.unavailable}, which failed: {error}"
                self._given_up(self.unavailable)
            return
        with self._lock:
            self.ready, self.unavailable = ready, None
        self._notify("penstock: the new engine is ready")

    # -- its messages --------------------------------------------------------------------------------------------------

    def _take(self, message: FromEngine, engine: _Engine, batch: TokenBatch) -> None:
        if isinstance(message, Tokens):
            self._put(message, batch)
        elif isinstance(message, Read):
            self._add_piece(message)
        elif isinstance(message, State):
            if (live := self._live.get(message.id)) is not None:
                live.begun = True
                live.queue.state, live.queue.reused = message.state, message.reused
                set_timings(live.queue.timings, message.timings)
        elif isinstance(message, End | Failed):
            self._end(message, batch)
        elif isinstance(message, Metrics):
            self._metrics, self.stats = SchedulerMetrics(**message.scheduler), message.stats  # type: ignore[arg-type]
            for number, live in list(self._live.items()):
                if live.queue.cancelled:  # its handle was garbage-collected
                    self._cancel(number, False)
        elif isinstance(message, Progress):
            self._progress(message.share)
            if message.note:
                engine.last_note = message.note
                self._notify(message.note)
        elif isinstance(message, Damaged):
            if self._damaged is not None:
                self._damaged(CheckpointError(message.message))
        else:
            engine.answer = message
            engine.ready.set()

    def _add_piece(self, message: Read) -> None:
        live = self._live.get(message.id)
        if live is not None and live.request.reading is not None:
            try:
                live.queue.pieces.append(live.request.reading.piece(message.arrays))
            except ValueError as error:
                raise ChannelError(f"channel: not what a reading finds: {error}") from None

    def _put(self, message: Tokens, batch: TokenBatch) -> None:
        reasons, logprobs = message.reasons, message.logprobs
        for place, (number, token) in enumerate(zip(message.requests, message.tokens, strict=True)):
            live = self._live.get(number)
            if live is None:
                continue
            queue, made = live.queue, Token(token)
            if reasons or logprobs:
                logprob, top = logprobs.get(place, (None, None))
                made = Token(token, reasons.get(place), logprob, None if top is None else tuple(top))
            queue.put(made, batch)
            if queue.full and not live.paused:
                self._pause(number, live)

    def _pause(self, number: int, live: _Live) -> None:
        with self._lock:
            live.paused = live.queue.full and not live.cancelled  # a paused one would not send its end
            if live.paused:
                self._engine.send(Pause(number))

    def _end(self, message: End | Failed, batch: TokenBatch) -> None:
        with self._lock:
            live = self._live.pop(message.id, None)
        if live is None:
            return
        if isinstance(message, Failed):
            live.queue.end(error_of(message.kind, message.message, message.retry_after), batch)
        else:
            live.queue.reused = message.reused
            set_timings(live.queue.timings, message.timings)
            if message.experts is not None:
                live.queue.heat = ExpertHeat(_counts(message.experts))
            self._record([live.queue.timings])
            live.queue.end(None, batch)


def _counts(experts: list[list[int]]) -> np.ndarray:
    try:
        return np.array(experts, np.int64)
    except (ValueError, OverflowError):
        raise ChannelError("channel: not counts of experts, layers have different numbers of them") from None


@dataclasses.dataclass(eq=False)
class _Live:
    """A request whose end has not come."""

    request: Request
    queue: ChunkQueue
    client: str | None
    begun: bool = False
    paused: bool = False  # the engine keeps its tokens
    cancelled: bool = False  # the engine knows


class _Engine:
    """A process, the connection to it, and what it said when it had loaded the model."""

    def __init__(self, module: str, resources: Resources | None = None) -> None:
        self.ready = threading.Event()
        self.answer: Ready | NotLoaded | None = None
        self.last_note = ""
        self.reader: threading.Thread
        ours, theirs = socket.socketpair()
        home = str(Path(__file__).parents[2])  # the front may have found penstock by a path of its own
        first, environ = ("", {}) if resources is None else (resources.statements(), resources.environ())
        code = f"import sys; sys.path.append({home!r}); {first}from {module} import main; main({theirs.fileno()})"
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=os.environ | environ,
                    start_new_session=True,  # Ctrl-C in a terminal is for the front
                )
        except OSError as error:
            ours.close()
            raise EngineDied(f"the engine process cannot be started: {error.strerror or error}") from None
        self.connection = Connection(ours, FromEngine)

    def send(self, message: Message) -> None:
        """Send a message. Where the process has ended, the thread that reads from it ends the requests."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def end(self) -> None:
        """The connection has ended: so does the process."""
        try:
            self.process.wait(0.5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.connection.close()

    def status(self) -> str:
        code = self.process.poll()
        return f"signal {-code}" if code is not None and code < 0 else f"status {code}"
