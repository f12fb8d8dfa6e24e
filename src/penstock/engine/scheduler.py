"""Requests of many clients on one model: a thread runs the engine, other threads submit requests and read answers.

A turn of the thread is one prefill chunk (at most chunk_alignment long) of one prompt and one decode step of all
requests that generate, so a long prompt delays a running answer by one chunk per token. The queue and the prompts under
way have one order, counted in prompt tokens that are not stored already: all that came before + twice its own. So a
short prompt passes a long one, and those that pass a prompt of n tokens have fewer than n tokens together. Between
clients the order is fair: the first request of one goes before the second of another, and their prompts take turns.

A request starts when memory for its prompt and all of max_tokens is there; until then it waits, and those behind it
with it. Stored prefixes go before one waits. A running request whose reader lags behind is preempted when another one
needs its sequence or memory: its sequence is closed, and computed again when the reader has caught up.

A step that fails is tried again with each request alone, and the one that fails alone ends with the error. Where the
step left recurrent states half-way the sequences are computed again: prompts as at first, answers token by token, so
that no bit changes. Weights that cannot be read (files that changed, a disk that fails, a damaged record) end all.
"""

from __future__ import annotations

import atexit
import functools
import math
import numbers
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.engine.admission import Admission, Pages, memory_for_sequences
from penstock.engine.cache import Sequence
from penstock.engine.engine import Engine
from penstock.engine.generation import Chunk, Decoder, Request, Running, Timings
from penstock.engine.prefix import Entry, PrefixCache
from penstock.engine.ticket import Feed, Ticket
from penstock.errors import Cancelled, CheckpointError, InvalidArgument, OutOfMemory, QueueFull

POLL_SECONDS = 1.0  # between looks for requests whose handle was garbage-collected, and at files


class SchedulableModel(Protocol):
    """What a scheduler needs of a model: `penstock.LLM` has it."""

    engine: Engine

    def request(self, prompt: Any, max_tokens: int = 256, stop: str | Seq[str] = (), **options: Any) -> Request: ...
    def add_timings(self, timings: Seq[Timings]) -> None: ...


@dataclass(frozen=True)
class SchedulerMetrics:
    """What a scheduler is doing and has done. Counters only grow; bytes and pages are those of now."""

    running: int = 0  # requests that hold a sequence
    waiting: int = 0  # requests in the queue
    finished: int = 0  # ended by themselves
    cancelled: int = 0  # ended by their reader, by `close`, or because the reader took nothing
    failed: int = 0  # ended with an error
    refused: int = 0  # never started: queue full, or too large
    preemptions: int = 0  # sequences that were closed because their reader lagged behind while others waited
    prompt_tokens: int = 0  # computed
    cached_tokens: int = 0  # of prompts, taken from the prefix cache
    generated_tokens: int = 0
    prompt_seconds: float = 0.0  # in prefill chunks
    decode_seconds: float = 0.0  # in decode steps
    decode_steps: int = 0
    decode_rows: int = 0  # sum of the sequences of all steps
    queue_seconds: float = 0.0  # sum over requests whose prompt was begun
    pages_used: int = 0  # of keys and values
    pages_total: int = 0  # that there is memory for, about: pages of layers with a window are smaller
    memory_used: int = 0  # bytes of pages and recurrent state in use or promised to running requests
    memory_total: int = 0
    prefix_entries: int = 0
    prefix_bytes: int = 0
    prefix_hits: int = 0  # requests that began with a stored prefix

    @property
    def mean_batch(self) -> float:
        """Sequences per decode step."""
        return self.decode_rows / self.decode_steps if self.decode_steps else 0.0


class Scheduler:
    """Runs requests of any thread on one model, up to `max_sequences` at a time, the rest waiting in a queue.

    max_sequences None: 8 on the CPU, 32 on a GPU. queue: requests that may wait beside those running. memory: bytes for
    sequences and stored prefixes (None: what is free now, less room for activations and mapped weights). prefix_memory:
    of these, bytes for prefixes (None: a tenth of what is free). buffer: chunks that a reader may lag behind; then its
    request pauses, is preempted if others wait, and after `read_timeout` seconds without a read it is cancelled. failed
    is called once when the weights cannot be read any more; all requests end with that error, and no other is taken.
    `condition` guards the queue: while it is held, requests are queued but none is started.
    """

    def __init__(
        self,
        llm: SchedulableModel,
        *,
        max_sequences: int | None = None,
        queue: int = 64,
        prefix_cache: bool = True,
        memory: int | None = None,
        prefix_memory: int | None = None,
        buffer: int = 64,
        read_timeout: float = 60.0,
        failed: Callable[[CheckpointError], None] | None = None,
    ) -> None:
        engine = llm.engine
        if max_sequences is None:
            max_sequences = engine.device.default_sequences
        for name, value, least in (
            ("max_sequences", max_sequences, 1),
            ("queue", queue, 0),
            ("memory", memory, 1),
            ("prefix_memory", prefix_memory, 0),
            ("buffer", buffer, 1),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InvalidArgument(f"scheduler: {name} is {value!r}, expected an integer of at least {least}")
        if isinstance(read_timeout, bool) or not isinstance(read_timeout, numbers.Real) or not read_timeout > 0:
            raise InvalidArgument(f"scheduler: read_timeout is {read_timeout!r}, expected seconds above 0")
        max_sequences = min(max_sequences, engine.most_sequences)
        self._llm, self._engine = llm, engine
        self.max_sequences, self.queue, self.buffer, self.read_timeout = max_sequences, queue, buffer, read_timeout
        free = engine.device.free_memory()
        self.memory = memory_for_sequences(engine, max_sequences) if memory is None else memory
        share = free // 10 if prefix_memory is None else prefix_memory
        self._prefix = PrefixCache(engine, min(share, self.memory)) if prefix_cache else None
        self._admission = Admission(engine, self.memory, self._prefix)
        self._decoder = Decoder(engine)

        self.condition = threading.Condition()  # guards what follows
        self._changed = False  # something the thread has to look at
        self._retry = False  # waiting requests may fit now
        self._waiting: list[_Job] = []
        self._running: list[_Job] = []  # changed by the thread alone
        self._closing = False
        self._deadline = math.inf
        self._failure: str | None = None
        self._on_failure = failed
        self._counts: dict[str, int] = dict.fromkeys(("finished", "cancelled", "failed", "refused"), 0)
        self._known: weakref.WeakSet[Request] = weakref.WeakSet()

        self._handed_in = 0  # prompt tokens so far
        self._served: set[Hashable] = set()  # clients with a request that was let in since the turn came round
        self._chunks = 0  # of prompts, computed so far
        self._work = _Work()
        self._interval, self._last_end = 1.0, 0.0  # mean seconds between two ends, and when the last one was
        self._thread = threading.Thread(target=self._run, name="penstock-scheduler", daemon=True)
        self._thread.start()
        atexit.register(self.close, 0)  # before the interpreter stops threads in the middle of a kernel

    # -- for any thread ----------------------------------------------------------------------------------------------

    def request(self, prompt: str | Seq[int], max_tokens: int = 256, stop: str | Seq[str] = (), **more: Any) -> Request:
        """A request for `submit`; prompt and options as in `LLM.generate`.

        Raises InvalidArgument or DTypeError, naming what is wrong. Text is encoded here, in the caller's thread.
        """
        return self._llm.request(prompt, max_tokens, stop, **more)

    def submit(self, request: Request, client: Hashable = None) -> Ticket:
        """Hand a request in. Raises QueueFull, OutOfMemory for one that can never fit, Cancelled after `close`, and
        CheckpointError once the weights could not be read.

        client: whose it is. Clients have equal shares, also of a full queue: there the newest request of the client
        with the most makes room for one with fewer, and ends with QueueFull.
        """
        if request.sequence is not None:
            raise InvalidArgument("request: it continues a session, expected one with a sequence of its own")
        length = len(request.prompt)
        try:
            pages = self._admission.check(min(length + request.max_tokens, request.max_context), length)
        except OutOfMemory:
            with self.condition:
                self._counts["refused"] += 1
            raise
        digests = self._prefix.digests(request.prompt) if self._prefix is not None else []
        job = _Job(request, Feed(self.buffer, self._wake), digests, pages, client)
        with self.condition:
            if self._closing:
                raise Cancelled("scheduler: it is closing and takes no requests")
            if self._failure is not None:
                raise CheckpointError(self._failure)
            if request in self._known:
                raise InvalidArgument("request: it was submitted before, expected a new one")
            room = self.max_sequences + self.queue
            if len(self._waiting) + len(self._running) >= room:
                retry = min(60, max(1, math.ceil(self._interval)))
                full = QueueFull(f"queue: {room} requests are running or waiting, expected fewer; try again", retry)
                self._make_room(client, full)
            self._known.add(request)
            self._waiting.append(job)
            self._retry = True
            self._wake()
        return Ticket(request, job.feed, functools.partial(self._cancel, job))

    def metrics(self) -> SchedulerMetrics:
        caches, prefix, work = self._engine.caches, self._prefix, self._work
        with self.condition:
            running, waiting, counts = list(self._running), len(self._waiting), dict(self._counts)
        used = self._admission.used(_promises(running))
        pages = sum(pool.used for pool in caches.pools.values())
        largest = max((caches.page_bytes(window) for window in caches.pools), default=0)
        return SchedulerMetrics(
            running=len(running),
            waiting=waiting,
            **counts,
            **vars(work),
            pages_used=pages,
            pages_total=pages + (max(0, self.memory - used) // largest if largest else 0),
            memory_used=used,
            memory_total=self.memory,
            prefix_entries=0 if prefix is None else len(prefix),
            prefix_bytes=0 if prefix is None else prefix.nbytes,
        )

    @property
    def closing(self) -> bool:
        """Whether `close` was called: no request is taken any more."""
        return self._closing

    def close(self, deadline: float | None = None) -> None:
        """Take no more requests, cancel those that wait, finish those that run; returns when all is given back.

        deadline: seconds after which running ones are cancelled too (None: never). May be called again, from any
        thread, with a shorter one.
        """
        with self.condition:
            self._closing = True
            self._deadline = min(self._deadline, math.inf if deadline is None else time.monotonic() + deadline)
            for job in [job for job in self._waiting if job.row is None]:
                self._drop(job, Cancelled("scheduler: closed before the request was started"))
            self._wake()
        self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(0)

    def _wake(self) -> None:
        with self.condition:
            self._changed = True
            self.condition.notify()

    def _cancel(self, job: _Job) -> None:
        with self.condition:
            job.feed.cancelled = True
            if job in self._waiting:
                self._drop(job, None)
            self._wake()

    def _drop(self, job: _Job, error: Exception | None, kind: str = "cancelled") -> None:
        """End a request that waits; the lock is held."""
        self._waiting.remove(job)
        self._counts["failed" if isinstance(error, CheckpointError) else kind] += 1
        if job.row is not None:
            self._llm.add_timings([job.request.timings])
        job.end(error)

    def _make_room(self, client: Hashable, full: QueueFull) -> None:
        """Refuse the newest request of the client with the most, or raise if this one has as many; the lock is held."""
        held = Counter(job.client for job in (*self._waiting, *self._running))
        unstarted = [job for job in reversed(self._waiting) if job.row is None]
        newest = max(unstarted, key=lambda job: held[job.client], default=None)
        if newest is None or held[newest.client] <= held[client] + 1:
            self._counts["refused"] += 1
            raise full
        self._drop(newest, full, "refused")

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._turn():
                pass
        except BaseException as error:  # a mistake in this file: no answer may be waited for for ever
            failure = error
            raise
        finally:
            with self.condition:
                self._closing = True
                for job in list(self._waiting):
                    self._drop(job, Cancelled(f"scheduler: it has stopped: {failure}"))
            for job in list(self._running):
                self._end(job, Cancelled(f"scheduler: it has stopped: {failure}"))
            if self._prefix is not None:
                self._prefix.clear()

    def _turn(self) -> bool:
        """A prefill chunk and a decode step, or else a wait for requests. False: closed, and nothing is left."""
        with self.condition:
            self._changed = False
        self._reap()
        self._admit()
        prefilled = self._prefill()
        if self._decode() or prefilled:
            return True
        with self.condition:
            if self._closing and not self._running and not self._waiting:
                return False
            watches = self._engine.reads_files and self._failure is None
            look = POLL_SECONDS if watches else None
            if self._running or self._waiting:  # all of them paused, or their handles garbage-collected
                look = max(0.0, min(POLL_SECONDS, self.read_timeout, self._deadline - time.monotonic()))
            self.condition.wait_for(lambda: self._changed or self._retry, look)
        if watches:
            self._watch()
        return True

    def _watch(self) -> None:
        """Look at the files of the weights, which a step does itself: a server without requests has to know, too."""
        try:
            self._engine.check_files()
        except CheckpointError as error:
            self._fail(error)

    def _fail(self, error: CheckpointError) -> None:
        """The weights cannot be read: no step can be trusted any more, so everything ends."""
        with self.condition:
            first, self._failure = self._failure is None, str(error)
        if first and self._on_failure is not None:
            self._on_failure(error)  # before a client sees the end of its request, and asks for the reason
        with self.condition:
            for job in list(self._waiting):
                self._drop(job, error)
        for job in list(self._running):
            self._end(job, error)

    def _reap(self) -> None:
        """End requests that were cancelled, whose reader has gone to sleep, or that are past the deadline."""
        now = time.monotonic()
        waiting = [job for job in list(self._waiting) if job.feed.cancelled or job.row is not None]
        for job in [*waiting, *self._running]:
            lags = job.lags
            if job.feed.cancelled:
                self._stop(job, None)
            elif now >= self._deadline:
                self._stop(job, Cancelled("scheduler: closed before the answer was complete"))
            elif lags != (job.paused is not None):
                job.paused = now if lags else None
                with self.condition:
                    self._retry = True
            elif job.paused is not None and now - max(job.paused, job.feed.last_read) > self.read_timeout:
                self._stop(job, Cancelled(f"reader: nothing was read for {self.read_timeout:g} seconds"))

    def _stop(self, job: _Job, error: Exception | None) -> None:
        """End a request that runs or waits."""
        with self.condition:
            if job in self._waiting:
                self._drop(job, error)
        if job in self._running:
            self._end(job, error)

    # -- admission ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start requests that wait, in order, as far as sequences and memory go."""
        with self.condition:
            if not self._retry:
                return
            self._retry = False
            waiting = [job for job in self._waiting if job.paused is None]
        for job in waiting:
            if job.order is None:
                found = self._found(job)
                count = len(job.request.prompt) - (found.length if found is not None else 0)
                job.order = self._handed_in + 2 * count
                self._handed_in += count
        for job in self._fair(waiting):
            while len(self._running) >= self.max_sequences or not self._start(job):
                if not self._preempt():
                    return

    def _fair(self, waiting: list[_Job]) -> list[_Job]:
        """By how many requests of the same client come before, running or waiting; among equals clients take turns."""
        before = Counter(job.client for job in self._running)
        rank: dict[_Job, tuple[int, bool]] = {}
        for job in sorted(waiting, key=_order):
            # order 0: it ran until a step failed
            rank[job] = (before[job.client], job.client in self._served) if job.order else (-1, False)
            before[job.client] += 1
        return sorted(rank, key=lambda job: (rank[job], _order(job)))

    def _preempt(self) -> bool:
        """Close the sequence whose reader has lagged behind for the longest; False if there is none."""
        lagging = [job for job in self._running if job.paused is not None]
        job = min(lagging, key=lambda job: job.paused or 0.0, default=None)
        if job is None:
            return False
        job.preempted = True
        self._work.preemptions += 1
        self._requeue(job)
        return True

    def _requeue(self, job: _Job) -> None:
        """Close the sequence of a running request; it waits for another one, in which it is computed again."""
        assert job.row is not None
        self._engine.close(job.row.sequence)
        job.feed.state = "waiting"
        with self.condition:
            self._running.remove(job)
            self._waiting.insert(0, job)
            self._retry = True

    def _start(self, job: _Job) -> bool:
        """Give a request its sequence; False if it has to wait. It fails if no other request runs that could end."""
        while True:
            found = self._found(job)
            promises = _promises(self._running)
            try:
                return self._begin(job, self._admission.open(job.pages, found, promises))
            except MemoryError as error:
                helps = not self._running or self._admission.helps(job.pages, promises)
                if helps and self._prefix is not None and self._prefix.evict():
                    continue
                if self._running:
                    return False
                return self._begin(job, None, error)
            except Exception as error:
                return self._begin(job, None, error)

    def _begin(self, job: _Job, sequence: Sequence | None, error: Exception | None = None) -> bool:
        with self.condition:
            waited = job in self._waiting  # else it was cancelled a moment ago
            if waited:
                self._waiting.remove(job)
                self._running.append(job)
        if not waited:
            if sequence is not None:
                self._engine.close(sequence)
            return True
        if sequence is None:
            self._end(job, error)
            return True
        if job.row is None:
            job.row = Running(job.request, sequence, tag=job)
            self._count_reused(job, sequence.length)
        if job.client in self._served:  # all others that wait had their turn
            self._served.clear()
        self._served.add(job.client)
        job.row.sequence, job.feed.state = sequence, "prompt"
        job.preempted, job.turn = False, self._chunks
        if self._prefix is not None:
            job.points = self._prefix.points(job.digests, sequence.length)
        return True

    def _found(self, job: _Job) -> Entry | None:
        return None if self._prefix is None else self._prefix.find(job.digests, len(job.request.prompt))

    def _reuse(self, job: _Job, sequence: Sequence) -> None:
        """Skip what another request with the same beginning has stored since this one was let in."""
        found = self._found(job)
        if self._prefix is not None and found is not None and found.length > sequence.length:
            skipped = found.length - sequence.length
            self._prefix.use(found, sequence)
            if not job.request.tokens:  # else it is computed again, and was counted
                self._count_reused(job, skipped)

    def _count_reused(self, job: _Job, tokens: int) -> None:
        request = job.request
        self._work.prefix_hits += tokens > 0 and not request.reused
        self._work.cached_tokens += tokens
        request.reused += tokens
        request.timings.prompt_tokens -= tokens

    def _room(self) -> int:
        """Bytes that are neither in use nor promised to a request."""
        return self._admission.total - self._admission.used(_promises(self._running))

    # -- steps -------------------------------------------------------------------------------------------------------

    def _prefill(self) -> bool:
        """One chunk of the prompt that comes first, of the client whose last chunk is the longest ago."""
        turns: dict[Hashable, int] = {}
        for job in self._running:
            turns[job.client] = max(job.turn, turns.get(job.client, 0))
        prompts = [job for job in self._running if job.feed.state == "prompt"]
        job = min(prompts, key=lambda job: (turns[job.client], _order(job)), default=None)
        if job is None:
            return False
        assert job.row is not None
        self._chunks += 1
        job.turn = self._chunks
        engine, row, request = self._engine, job.row, job.request
        begin = time.perf_counter()
        if not job.begun:
            job.begun, row.started = True, begin
            request.timings.queue_seconds = begin - job.submitted
            self._work.queue_seconds += begin - job.submitted
        self._reuse(job, row.sequence)
        at = row.sequence.length
        end = min(len(request.prompt), (at // engine.device.chunk_alignment + 1) * engine.device.chunk_alignment)
        last = end == len(request.prompt)
        try:
            logits = engine.prefill_chunk(
                row.sequence, engine.token_array(request.prompt[at:end]), every=False, last=last
            )
            if self._prefix is not None and end in job.points:
                self._prefix.store(job.digests, row.sequence, self._room)
            self._work.prompt_tokens += end - at
            if last:
                job.feed.state = "generating"
                if not request.tokens:  # else it is computed again
                    assert logits is not None
                    row.prompted()
                    self._deliver(job, row.accept(logits[0], engine))
        except MemoryError as error:
            if row.sequence.corrupt or self._prefix is None or not self._prefix.evict():
                self._end(job, error)
        except CheckpointError as error:
            self._fail(error)
        except Exception as error:
            self._end(job, error)
        self._work.prompt_seconds += time.perf_counter() - begin
        return True

    def _decode(self) -> bool:
        """One step of all requests that generate and are read; those under suspicion alone, one in a turn."""
        rows: list[Running] = []
        suspect: Running | None = None
        for job in self._running:
            if job.feed.state == "generating" and job.paused is None and job.row is not None:
                if not job.suspect:
                    rows.append(job.row)
                elif suspect is None:
                    suspect = job.row
        worked = bool(rows) or self._decoder.ahead
        if worked:
            self._step(rows, go_on=suspect is None)
        if suspect is not None:
            self._step([suspect], go_on=False)
        return worked or suspect is not None

    def _step(self, rows: list[Running], go_on: bool) -> None:
        begin = time.perf_counter()
        try:
            found = self._decoder.step(rows, go_on)
        except CheckpointError as error:
            self._fail(error)
            return
        except Exception as error:
            self._failed(rows, error)
            return
        for row, chunk in found:
            job: _Job = row.tag
            if isinstance(chunk, Exception):
                self._end(job, chunk)
            else:
                job.failures = 0
                self._deliver(job, chunk)
        self._work.decode_seconds += time.perf_counter() - begin
        self._work.decode_steps += 1
        self._work.decode_rows += len(found)

    def _failed(self, rows: list[Running], error: Exception) -> None:
        """A step failed: one request alone ends with the error, several are tried alone."""
        jobs = [job for job in self._running if job.row is not None and (job.row in rows or job.row.sequence.corrupt)]
        whole = not any(row.sequence.corrupt for row in rows)
        if whole and isinstance(error, MemoryError) and self._prefix is not None and self._prefix.evict():
            return
        if len(jobs) == 1:
            self._end(jobs[0], error)
            return
        for job in jobs:
            assert job.row is not None
            job.failures += 1
            if job.row.sequence.corrupt:
                job.order = 0  # before all others; what it shared with others may be gone, and it has to wait
                self._requeue(job)

    def _deliver(self, job: _Job, chunk: Chunk) -> None:
        assert job.row is not None
        job.row.count()
        self._work.generated_tokens += 1
        if chunk.finish_reason is None:
            job.feed.put(chunk)
        else:
            job.feed.put(chunk, last=True)
            self._end(job, None)

    def _end(self, job: _Job, error: Exception | None) -> None:
        """End a running request and give its memory back."""
        row = job.row
        if row is not None:
            self._engine.close(row.sequence)
            self._llm.add_timings([job.request.timings])
        now = time.perf_counter()
        self._interval += 0.2 * (now - max(self._last_end, job.submitted) - self._interval)
        self._last_end = now
        if isinstance(error, Cancelled) or (error is None and job.request.finish_reason is None):
            kind = "cancelled"
        else:
            kind = "finished" if error is None else "failed"
        with self.condition:
            self._running.remove(job)
            self._counts[kind] += 1
            self._retry = True
        job.end(error)


@dataclass
class _Work:
    """Counters that the thread alone changes."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    decode_rows: int = 0
    queue_seconds: float = 0.0
    prefix_hits: int = 0
    preemptions: int = 0


@dataclass(eq=False)
class _Job:
    """A request from its submission to its end."""

    request: Request
    feed: Feed
    digests: list[bytes]
    pages: Pages  # the most it will hold
    client: Hashable
    submitted: float = field(default_factory=time.perf_counter)
    order: int | None = None
    row: Running | None = None
    points: set[int] = field(default_factory=set)  # lengths at which its prefix is stored
    begun: bool = False
    turn: int = 0  # number of the last chunk of its prompt, or of all when it was let in
    paused: float | None = None  # since when its reader lags behind
    preempted: bool = False  # its sequence was closed because of that
    failures: int = 0  # steps with others that failed, since its last token

    @property
    def lags(self) -> bool:
        """Whether its reader is too far behind. What has to be computed again waits until all was read."""
        return not self.feed.drained if self.preempted else self.feed.full

    @property
    def suspect(self) -> bool:
        """Whether its next step is to be run alone: the one that failed, after two failures every one."""
        if not self.failures or self.row is None:
            return False
        return self.failures > 1 or self.row.told + 1 == len(self.request.tokens)

    def end(self, error: Exception | None) -> None:
        if error is None and self.request.finish_reason is None:
            self.request.finish_reason = "cancelled"
        self.row = None
        self.feed.end(error)


def _promises(jobs: Seq[_Job]) -> list[tuple[Sequence, Pages]]:
    return [(row.sequence, job.pages) for job in jobs if (row := job.row) is not None]


def _order(job: _Job) -> int:
    assert job.order is not None
    return job.order
