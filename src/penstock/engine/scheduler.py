"""Requests of many clients on one model: each step has tokens of many of them, answers first, then chunks of prompts.

A scheduler has no thread: whoever waits for a token runs steps, or a thread does (`SchedulerThread`). A step holds the
next token of all answers and chunks of prompts, as many as are expected to keep the step under `step_seconds`, twice
that where there are no answers, and at least one; `order.py` says whose go first. Where the device draws tokens, the
next step is launched before those of the last one are read: it appends what was drawn there. A row whose next token
depends on the host (a grammar, hooks, a session) sits that step out. What was drawn after a request's end is discarded.

A request starts when memory for its prompt and all of max_tokens is there; until then it waits, and those behind it
with it. Stored prefixes go before one waits. A running request whose reader lags behind is preempted when another one
needs its sequence or memory: its sequence is closed, and computed again when the reader has caught up.

A step that fails is tried again with each request alone, and the one that fails alone ends with the error; the step
launched behind it is discarded. Where recurrent states were left half-way the sequences are computed again: prompts as
at first, answers token by token, so that no bit changes. Weights that cannot be read (files that changed, a disk that
fails, a damaged record) end all. An error that leaves the device unusable is raised by `step`.
"""

from __future__ import annotations

import functools
import math
import numbers
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from penstock import compile_progress
from penstock.engine.admission import Admission, Pages, share_memory
from penstock.engine.cache import Sequence
from penstock.engine.draft_gate import DraftGate, answers_of_size
from penstock.engine.draft_head import Asked
from penstock.engine.engine import Engine
from penstock.engine.execution import Execution, Launched, Part, most_rows, sampled
from penstock.engine.heat import ExpertHeat
from penstock.engine.hooks import HookInterrupted
from penstock.engine.metrics import SchedulerMetrics, Work
from penstock.engine.order import Order
from penstock.engine.prefix import Entry, PrefixCache
from penstock.engine.reading import Reader
from penstock.engine.request import Request, Timings
from penstock.engine.response import ChunkQueue, ResponseHandle, Token, TokenBatch
from penstock.engine.runner import unready_runs
from penstock.engine.sampling import Sampler
from penstock.engine.speculate import MOST_DRAFTS, Speculation, Speculator
from penstock.engine.state import RequestState
from penstock.engine.steps import MOST_LOGITS
from penstock.errors import Cancelled, CheckpointError, InvalidArgument, OutOfMemory, QueueFull
from penstock.text.tokenizer import Tokenizer

POLL_SECONDS = 1.0  # between looks for requests whose handle was garbage-collected, and at files
STEP_SECONDS = 0.06


class SchedulableModel(Protocol):
    """What a scheduler needs of a model: `penstock.LLM` has it."""

    engine: Engine

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def text_tokenizer(self) -> Tokenizer | None: ...
    def request(self, prompt: Any, max_tokens: int = 256, stop: str | Seq[str] = (), **options: Any) -> Request: ...
    def add_timings(self, timings: Seq[Timings]) -> None: ...


@dataclass(frozen=True)
class Continued:
    """What a session brings to a request: its sequence, the tokens it holds and the logits after the last of them."""

    sequence: Sequence
    tokens: Seq[int]
    logits: np.ndarray | None


class Scheduler:
    """Runs requests of any thread on one model, up to `max_sequences` at a time, the rest waiting in a queue.

    max_sequences None: 8 on the CPU, 32 on a GPU, or as many as fit there. queue: requests that may wait beside those
    running. memory: bytes for sequences and stored prefixes. None: the model's cache_memory, else what is free now,
    less room for activations and mapped weights, on a GPU no more than lets this process have gpu_memory_utilization
    (None: 0.9) of its memory. A GPU's caches take it now, with OutOfMemory if it is not there; allocate False: they
    stay as they are, or get the size that `load` has for them. prefix_memory: of the memory, bytes for prefixes (None:
    a tenth of what is free). buffer: tokens that a reader may lag behind; then its request pauses, is preempted if
    others wait, and after `read_timeout` seconds without a read it is cancelled. failed is called once when the weights
    cannot be read any more; all requests end with that error, and no other is taken. overlap: a device may be at the
    next step before the last one's tokens are read. record: gets the timings of requests that have ended (None: the
    model's stats do). `condition` guards the queue: while it is held, requests are queued but none is started.
    threaded: a thread calls `step`.
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
        step_seconds: float = STEP_SECONDS,
        overlap: bool = True,
        failed: Callable[[CheckpointError], None] | None = None,
        record: Callable[[Seq[Timings]], None] | None = None,
        gpu_memory_utilization: float | None = None,
        allocate: bool = True,
    ) -> None:
        engine = llm.engine
        for name, value, least in (
            ("max_sequences", max_sequences, 1),
            ("queue", queue, 0),
            ("memory", memory, 1),
            ("prefix_memory", prefix_memory, 0),
            ("buffer", buffer, 1),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InvalidArgument(f"scheduler: {name} is {value!r}, expected an integer of at least {least}")
        for name, seconds in (("read_timeout", read_timeout), ("step_seconds", step_seconds)):
            if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real) or not seconds > 0:
                raise InvalidArgument(f"scheduler: {name} is {seconds!r}, expected seconds above 0")
        if gpu_memory_utilization is not None and not 0 < gpu_memory_utilization <= 1:
            raise InvalidArgument(
                f"scheduler: gpu_memory_utilization is {gpu_memory_utilization!r}, expected above 0 and at most 1"
            )
        self._llm, self._engine = llm, engine
        self.queue, self.buffer, self.read_timeout = queue, buffer, read_timeout
        self.step_seconds, self.overlap, self.threaded = step_seconds, overlap, False
        share = prefix_memory if prefix_cache else 0
        shares = share_memory(engine, max_sequences, memory, share, gpu_memory_utilization, allocate)
        self.max_sequences, self.memory = shares.sequences, shares.memory
        self._prefix = PrefixCache(engine, shares.prefix) if prefix_cache else None
        self._admission = Admission(engine, self.memory, self._prefix)
        self._execution = Execution(engine)
        self._most_rows = most_rows(engine)
        ahead = engine.device.samples_tokens
        self._speculator = Speculator(compile_progress.clock if ahead else time.thread_time, shared=not ahead)
        self._gate = DraftGate(self._execution.draft_seconds)
        self._record = llm.add_timings if record is None else record

        self.condition = threading.Condition()  # guards what follows
        self._changed = False  # there is something to look at before the next step
        self._retry = False  # waiting requests may fit now
        self._waiting: list[RequestState] = []
        self._running: list[RequestState] = []  # changed by `step` alone
        self._closing = False
        self._deadline = math.inf
        self._failure: str | None = None
        self._on_failure = failed
        self._counts: dict[str, int] = dict.fromkeys(("finished", "cancelled", "failed", "refused"), 0)
        self._known: weakref.WeakSet[Request] = weakref.WeakSet()

        self._closed = threading.Event()
        self._batch: TokenBatch | None = None  # wakes the readers of a step's tokens, while there is one
        self._interruption: BaseException | None = None  # of a hook in this step
        self._stepping = threading.RLock()  # held by the thread that runs a step
        self._order = Order(engine.device.chunk_alignment)
        self._launched: list[Launched] = []  # steps under way, the oldest first: at most two
        self._collected, self._unready = 0.0, 0  # when the last one was, and `unready_runs` then
        self._since = 0.0  # by this thread's clock, where it computes: what a step takes is counted from here
        self._work = Work()
        self._interval, self._last_end = 1.0, 0.0  # mean seconds between two ends, and when the last one was

    # -- for any thread ----------------------------------------------------------------------------------------------

    def request(self, prompt: str | Seq[int], max_tokens: int = 256, stop: str | Seq[str] = (), **more: Any) -> Request:
        """A request for `submit`; prompt and options as in `LLM.generate`.

        Raises InvalidArgument or DTypeError, naming what is wrong. Text is encoded here, in the caller's thread.
        """
        return self._llm.request(prompt, max_tokens, stop, **more)

    def submit(
        self,
        request: Request,
        client: Hashable = None,
        *,
        buffer: int | None = None,
        progress: Callable[[int], None] | None = None,
        continued: Continued | None = None,
        rows: Callable[[np.ndarray], None] | None = None,
        hidden: bool = False,
    ) -> ResponseHandle:
        """Hand a request in. Raises QueueFull, OutOfMemory for one that can never fit, Cancelled after `close`, and
        CheckpointError once the weights could not be read.

        client: whose it is. Clients have equal shares, also of a full queue: there the newest request of the client
        with the most makes room for one with fewer, and ends with QueueFull. buffer: tokens that the reader may lag
        behind, if not as others. progress is called with the number of tokens of each chunk of the prompt. rows: for a
        `reading_request`, called by the thread that runs steps with the logits after each token of the prompt, float32
        [n, vocab], a chunk at a time and in order; the request has no tokens, and ends with what `rows` raises. hidden:
        rows gets the hidden states after the final norm, float32 [n, dim], in place of logits.
        """
        reading = request.reading
        reads = rows is not None or reading is not None
        only_reads = rows is not None or (reading is not None and reading.hidden)
        if (not reads and not request.max_tokens) or (only_reads and request.max_tokens) or (reads and continued):
            raise InvalidArgument(
                f"submit: max_tokens is {request.max_tokens} with{'out' * (not reads)} rows, "
                "expected 0 with rows and no session, or at least 1 without"
            )
        if reading is not None and reading.hidden:
            self._check_hidden()
        state = self._state(request, client, buffer, progress, continued)
        if reading is not None:
            rows, hidden = Reader(reading, request.prompt, state.queue.pieces).add, reading.hidden
        if rows is not None:
            state.rows, state.hidden, state.digests = rows, hidden, []  # a stored prefix has no logits
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
            self._waiting.append(state)
            self._retry = True
            self._wake()
        cancel = functools.partial(self._cancel, state)
        tokenizer = self._llm.text_tokenizer if request.max_tokens else None  # it has no answer
        return ResponseHandle(request, state.queue, tokenizer, cancel, self, state.held)

    def _check_hidden(self) -> None:
        model = self._engine.model
        if model.family.final_norm is None:
            kind = model.config.model_type
            raise InvalidArgument(f"embed: {kind} has no final_norm, expected a family with one")

    def _state(
        self,
        request: Request,
        client: Hashable,
        buffer: int | None,
        progress: Callable[[int], None] | None,
        continued: Continued | None,
    ) -> RequestState:
        engine, length = self._engine, len(request.prompt)
        held = 0 if continued is None else continued.sequence.length
        most = end = min(held + length + request.max_tokens, engine.max_context)
        if engine.drafts_ahead:  # two steps may be under way behind an answer's end
            most = min(end + 3 * (1 + MOST_DRAFTS), engine.max_context)
        try:
            pages = engine.caches.pages_of(most) if continued is not None else self._admission.check(most, length)
        except OutOfMemory:
            with self.condition:
                self._counts["refused"] += 1
            raise
        if request.grammar is not None:
            request.grammar.end_within(end - held - length)
        digests = self._prefix.digests(request.prompt) if self._prefix is not None and continued is None else []
        context = () if continued is None else continued.tokens
        sampler = Sampler(request.params, engine.model.config.vocab_size, [*context, *request.prompt])
        queue = ChunkQueue(buffer or self.buffer, self._wake, Timings(prompt_tokens=length))
        queue.heat = ExpertHeat() if request.expert_heat and engine.tells_experts else None
        state = RequestState(
            request, queue, sampler, engine.max_context, pages, digests, client, held=held, progress=progress
        )
        if request.hooks is not None:
            state.context = context
        if continued is not None:
            state.sequence, state.logits, state.owned = continued.sequence, continued.logits, False
        if request.max_tokens:
            state.speculation = self._speculation(request, context)
        return state

    def _speculation(self, request: Request, context: Seq[int]) -> Speculation | None:
        """What a request drafts with: as it asks, else as the model was loaded. Raises InvalidArgument."""
        kind, most = self._engine.speculating(request.speculate, request.num_draft_tokens)
        if kind == "off":
            return None
        found = self._speculator.speculation(kind, most, request.fixed_drafts)
        found.extend(context)
        found.extend(request.prompt)
        return found

    def metrics(self) -> SchedulerMetrics:
        caches, prefix = self._engine.caches, self._prefix
        with self.condition:
            running, waiting, counts = list(self._running), len(self._waiting), dict(self._counts)
        used = self._admission.used(_promises(running))
        pages = sum(pool.used for pool in caches.pools.values())
        if self._engine.device.fixed_caches:
            total = sum(pool.capacity for pool in caches.pools.values())
        else:
            largest = max((caches.page_bytes(window) for window in caches.pools), default=0)
            total = pages + (max(0, self.memory - used) // largest if largest else 0)
        return SchedulerMetrics(
            running=len(running),
            waiting=waiting,
            **counts,
            **vars(self._work),
            pages_used=pages,
            pages_total=total,
            memory_used=used,
            memory_total=self.memory,
            prefix_entries=0 if prefix is None else len(prefix),
            prefix_bytes=0 if prefix is None else prefix.nbytes,
        )

    @property
    def closing(self) -> bool:
        """Whether `close` was called: no request is taken any more."""
        return self._closing

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return not self._running and not self._waiting

    def close(self, deadline: float | None = None) -> None:
        """Take no more requests, cancel those that wait, finish those that run; returns when all is given back.

        deadline: seconds after which running ones are cancelled too (None: never). May be called again, from any
        thread, with a shorter one.
        """
        self.begin_close(deadline)
        if self.threaded:
            self._closed.wait()
            return
        while not self.idle:
            with self._stepping:
                worked = self.step()
            if not worked:
                self.wait()
        self.finish_close(None)

    def begin_close(self, deadline: float | None) -> None:
        """Take no more requests, cancel those that wait; steps then finish those that run, up to the deadline."""
        with self.condition:
            self._closing = True
            self._deadline = min(self._deadline, math.inf if deadline is None else time.monotonic() + deadline)
            for state in [state for state in self._waiting if not state.begun]:
                self._drop(state, Cancelled("scheduler: closed before the request was started"))
            self._wake()

    def finish_close(self, failure: BaseException | None) -> None:
        """Give everything back, when no step is run any more; failure: why, if requests are left."""
        with self.condition:
            self._closing = True
            for state in list(self._waiting):
                self._drop(state, Cancelled(f"scheduler: it has stopped: {failure}"))
        for state in list(self._running):
            self._end(state, Cancelled(f"scheduler: it has stopped: {failure}"))
        if self._prefix is not None:
            self._prefix.clear()
        self._closed.set()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(0)

    def _wake(self) -> None:
        with self.condition:
            self._changed = True
            self.condition.notify_all()

    def _cancel(self, state: RequestState, complete: bool) -> None:
        with self.condition:
            state.queue.cancelled, state.queue.complete = True, complete
            if state in self._waiting:
                self._drop(state, None)
            self._wake()
        if not self.threaded:  # its memory comes back now, not with somebody else's next step
            with self._stepping:
                if state in self._running:
                    self._end(state, None)

    def _drop(self, state: RequestState, error: Exception | None, kind: str = "cancelled") -> None:
        """End a request that waits; the lock is held."""
        self._waiting.remove(state)
        self._counts["failed" if isinstance(error, CheckpointError) else kind] += 1
        if state.begun:
            self._record([state.timings])
        state.queue.end(error)

    def _make_room(self, client: Hashable, full: QueueFull) -> None:
        """Refuse the newest request of the client with the most, or raise if this one has as many; the lock is held."""
        held = Counter(state.client for state in (*self._waiting, *self._running))
        unstarted = [state for state in reversed(self._waiting) if not state.begun]
        newest = max(unstarted, key=lambda state: held[state.client], default=None)
        if newest is None or held[newest.client] <= held[client] + 1:
            self._counts["refused"] += 1
            raise full
        self._drop(newest, full, "refused")

    # -- who runs steps ----------------------------------------------------------------------------------------------

    def drive(self, queue: ChunkQueue) -> None:
        """Run a step for a reader that waits, or wait while another thread runs one."""
        if not self._stepping.acquire(blocking=False):
            queue.wait(0.02)
            return
        try:
            if self._batch is not None:  # this very thread is in a step
                raise InvalidArgument(
                    "scheduler: a hook or callback of a request reads from the model that calls it, "
                    "expected it to return first"
                )
            worked = queue.ready or self.step()
        finally:
            self._stepping.release()
        if not worked:
            self.wait(0.02)

    def wait(self, most: float = math.inf) -> None:
        """Until there may be something to do: a request, a reader that has caught up, a look at the files."""
        with self.condition:
            if self._closing and self.idle:
                return
            watches = self._engine.reads_files and self._failure is None
            look = POLL_SECONDS if watches else math.inf
            if not self.idle:  # all of them paused, or their handles garbage-collected
                look = max(0.0, min(POLL_SECONDS, self.read_timeout, self._deadline - time.monotonic()))
            look = min(look, most)
            self.condition.wait_for(lambda: self._changed or self._retry, None if look == math.inf else look)
        if watches:
            self._watch()

    def _watch(self) -> None:
        """Look at the files of the weights, which a step does itself: a server without requests has to know, too."""
        try:
            self._engine.check_files()
        except CheckpointError as error:
            self._fail(error)

    def step(self) -> bool:
        """One step of all requests that can go on. False: there is nothing to compute now.

        For one thread at a time; with `SchedulerThread` for that one alone.
        """
        self._batch = TokenBatch()
        try:
            return self._step()
        finally:
            batch, self._batch = self._batch, None
            batch.wake()
            interruption, self._interruption = self._interruption, None
            if interruption is not None:
                raise interruption

    def _step(self) -> bool:
        self._engine.check_ranks()
        with self.condition:
            self._changed = False
        self._since, self._speculator.drafting = time.thread_time(), 0.0
        self._reap()
        self._admit()
        if self._verify_more():
            return True
        drafting = self._draft_parts()
        if drafting:
            return self._step_ahead(drafting)
        if any(step.ahead for step in self._launched):
            self._collect()  # where sequences are, the device alone knows until then
            return True
        parts, suspects = self._parts(drafting is None)
        if drafting is None:
            self._add_drafts(parts)
        groups = self._execution.groups(parts)
        chains = self.overlap and self._execution.overlaps
        overlap = chains and len(groups) == 1 and not suspects and not groups[0][0].all_rows
        if not overlap and self._launched:
            self._collect()  # what the next step has depends on it
            return True
        for group in [*groups, suspects[:1]]:
            if group and self._launch(group) and not (overlap and len(self._launched) == 1):
                self._collect()
        return bool(parts or suspects)

    def _step_ahead(self, parts: list[Part]) -> bool:
        """A step of answers whose drafts the device accepts by itself, launched before the last one's tokens are read:
        those of a step of another kind have to be known.
        """
        others = any(not step.ahead for step in self._launched)
        if others or (self._launch(parts) and not (self.overlap and len(self._launched) == 1)):
            self._collect()
        return True

    def _draft_parts(self) -> list[Part] | None:
        """What the next step has of each request, if the device is to accept drafts by itself; empty: there are to be
        none, since they do not pay or there is no room; None: some requests need the host, or have no head's drafts.
        """
        if not self._engine.drafts_ahead:
            return None
        states: list[RequestState] = []
        for state in self._running:
            if state.paused is not None and (state.queue.state == "generating" or not state.owned):
                continue
            waits = state.verification is not None or state.verifying or state.suspect
            if state.queue.state != "generating" or waits or not state.drafts_ahead or state.sequence is None:
                return None
            under_way = state.drawn - len(state.tokens)
            if not under_way and state.computed_tokens + 1 != len(state.tokens):  # it is computed again
                return None
            if state.drawn < state.request.max_tokens:
                states.append(state)
        if not states:
            return None
        answers = [state.speculation for state in states if state.speculation is not None]
        drafts = self._gate.drafts(answers, self._prepared_drafts(states, answers))
        if not drafts:
            return []
        for state in states:
            under_way = state.drawn > len(state.tokens)  # it is looked at again with its token known
            if not self._engine.has_room_ahead(state.opened, drafts, under_way):
                return []
        return [Part.ahead_of(state, drafts) for state in states]

    def _prepared_drafts(self, states: list[RequestState], answers: list[Speculation]) -> Seq[int]:
        """How many drafts the next step may have of each answer. Where drafts begin all is captured with which they
        rest and begin again, so that it is not in the middle of an answer.
        """
        if any(one.fixed for one in answers) or not self._gate.may_draft(answers):
            return ()
        most = min(one.most for one in answers)
        return self._execution.prepare_drafting(answers_of_size(len(answers)), most, states)

    def _reap(self) -> None:
        """End requests that were cancelled, whose reader has gone to sleep, or that are past the deadline."""
        now = time.monotonic()
        waiting = [state for state in list(self._waiting) if state.queue.cancelled or state.begun]
        for state in [*waiting, *self._running]:
            lags = state.lags
            if state.queue.cancelled:
                self._stop(state, None)
            elif now >= self._deadline:
                self._stop(state, Cancelled("scheduler: closed before the answer was complete"))
            elif lags != (state.paused is not None):
                state.paused = now if lags else None
                with self.condition:
                    self._retry = True
            elif state.owned and state.paused and now - max(state.paused, state.queue.last_read) > self.read_timeout:
                self._stop(state, Cancelled(f"reader: nothing was read for {self.read_timeout:g} seconds"))

    def _stop(self, state: RequestState, error: Exception | None) -> None:
        """End a request that runs or waits."""
        with self.condition:
            if state in self._waiting:
                self._drop(state, error)
        if state in self._running:
            self._end(state, error)

    def _fail(self, error: CheckpointError) -> None:
        """The weights cannot be read: no step can be trusted any more, so everything ends."""
        self._launched = []
        with self.condition:
            first, self._failure = self._failure is None, str(error)
        if first and self._on_failure is not None:
            self._on_failure(error)  # before a client sees the end of its request, and asks for the reason
        with self.condition:
            for state in list(self._waiting):
                self._drop(state, error)
        for state in list(self._running):
            self._end(state, error)

    # -- admission ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start requests that wait, in order, as far as sequences and memory go."""
        with self.condition:
            if not self._retry:
                return
            self._retry = False
            waiting = [state for state in self._waiting if state.paused is None]
        for state in waiting:
            if state.order is None:
                found = self._found(state)
                self._order.place(state, found.length if found is not None else 0)
        for state in self._order.waiting(waiting, self._running):
            while len(self._running) >= self.max_sequences or not self._start(state):
                if not self._preempt():
                    return

    def _preempt(self) -> bool:
        """Close the sequence whose reader has lagged behind for the longest; False if there is none."""
        lagging = [state for state in self._running if state.paused is not None and state.owned]
        state = min(lagging, key=lambda state: state.paused or 0.0, default=None)
        if state is None:
            return False
        state.preempted = True
        self._work.preemptions += 1
        self._requeue(state)
        return True

    def _requeue(self, state: RequestState) -> None:
        """Close the sequence of a running request; it waits for another one, in which it is computed again."""
        self._engine.close(state.opened)
        self._count_accepted(state)
        state.sequence, state.queue.state = None, "waiting"
        state.verification, state.verifying, state.ahead = None, False, 0
        state.drawn = len(state.tokens)
        if state.sampler.edits is not None:
            state.sampler.edits.stale = True  # a device may have counted a token that nobody has read
        with self.condition:
            self._running.remove(state)
            self._waiting.insert(0, state)
            self._retry = True

    def _start(self, state: RequestState) -> bool:
        """Give a request its sequence; False if it has to wait. It fails if no other request runs that could end."""
        if state.sequence is not None:
            return self._begin(state, state.sequence)
        while True:
            found = self._found(state)
            promises = _promises(self._running)
            try:
                return self._begin(state, self._admission.open(state.pages, found, promises))
            except MemoryError as error:
                helps = not self._running or self._admission.helps(state.pages, promises)
                if helps and self._prefix is not None and self._prefix.evict():
                    continue
                if any(other.owned or other.paused is None for other in self._running):
                    return False
                return self._begin(state, None, error)
            except Exception as error:
                return self._begin(state, None, error)

    def _begin(self, state: RequestState, sequence: Sequence | None, error: Exception | None = None) -> bool:
        with self.condition:
            waited = state in self._waiting  # else it was cancelled a moment ago
            if waited:
                self._waiting.remove(state)
                self._running.append(state)
        if not waited:
            if sequence is not None and state.owned:
                self._engine.close(sequence)
            return True
        if sequence is None:
            self._end(state, error)
            return True
        state.sequence = sequence
        if state.owned and not state.begun:
            self._count_reused(state, sequence.length)
        self._order.let_in(state)
        state.queue.state = "prompt"
        state.preempted = False
        if self._prefix is not None and state.owned:
            state.points = self._prefix.points(state.digests, sequence.length)
        if not state.owned and not state.request.prompt:
            self._continue_session(state)
        return True

    def _continue_session(self, state: RequestState) -> None:
        """An answer without a prompt: its first token comes from logits that the session has."""
        assert state.logits is not None
        self._work.queue_seconds += state.begin_prompt()
        state.end_prompt()
        state.queue.state = "generating"
        state.drawn += 1
        self._deliver(state, sampled(self._engine, state, state.logits, state.opened.length))
        if state.lags:  # the step that lets it in would compute the token before it was read
            state.paused = time.monotonic()

    def _found(self, state: RequestState) -> Entry | None:
        if self._prefix is None or not state.owned:
            return None
        return self._prefix.find(state.digests, len(state.request.prompt))

    def _reuse(self, state: RequestState) -> None:
        """Skip what another request with the same beginning has stored since this one was let in."""
        found = self._found(state)
        if self._prefix is not None and found is not None and found.length > state.opened.length:
            skipped = found.length - state.opened.length
            self._prefix.use(found, state.opened)
            if not state.tokens:  # else it is computed again, and was counted
                self._count_reused(state, skipped)

    def _count_reused(self, state: RequestState, tokens: int) -> None:
        self._work.prefix_hits += tokens > 0 and not state.queue.reused
        self._work.cached_tokens += tokens
        state.queue.reused += tokens
        state.timings.prompt_tokens -= tokens

    def _stores(self, sequence: Sequence, emptied: bool) -> bool:
        """Whether there is room for what a stored copy of the sequence takes; emptied: if no other were stored."""
        return self._admission.stores(sequence, _promises(self._running), emptied)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _parts(self, may_draft: bool) -> tuple[list[Part], list[Part]]:
        """What the next step has of each request; and of those that are to run alone. may_draft: there may be drafts
        for those whose token is known.
        """
        parts: list[Part] = []
        suspects: list[Part] = []
        prompts: list[RequestState] = []
        chains = self.overlap and self._execution.overlaps
        for state in self._running:
            if state.paused is not None and (state.queue.state == "generating" or not state.owned):
                continue
            if state.verification is not None or state.verifying:
                continue
            if state.queue.state == "generating":
                known = state.computed_tokens < len(state.tokens)
                if known or (chains and state.can_chain and not (may_draft and self._waits(state))):
                    (suspects if state.suspect else parts).append(Part.of_answer(state))
            elif state.suspect:
                suspects.append(self._chunk(state, self._engine.most_tokens))
            else:
                prompts.append(state)
        room = self._execution.room(self.step_seconds, len(parts))
        return [*parts, *self._order.chunks(prompts, self._running, room, self._chunk)], suspects

    def _verify_more(self) -> bool:
        """Hand out the next token of sessions whose drafts have been computed and whose reader waits; whether any."""
        waiting = [state for state in self._running if state.verification is not None and state.paused is None]
        for state in waiting:
            for _, token in self._execution.verify(state):
                self._deliver(state, token)
        return bool(waiting)

    def _waits(self, state: RequestState) -> bool:
        """Whether a request sits out a step that is launched ahead: with its token known there may be drafts."""
        speculation = state.speculation
        return speculation is not None and self._host_drafts(state) and self._speculator.wants(speculation)

    def _host_drafts(self, state: RequestState) -> bool:
        """Whether a request's drafts may be accepted by the host: where the device does it by itself only those that
        were asked for by name.
        """
        assert state.speculation is not None
        kind = state.request.speculate or self._engine.speculate
        return state.speculation.kind != "mtp" or kind != "auto" or not self._engine.drafts_ahead

    def _add_drafts(self, parts: list[Part]) -> None:
        """Let answers verify drafts, as many as make their tokens come soonest."""
        answers = [part for part in parts if not part.prompt]
        if self._engine.device.captures and len(answers) < len(parts):  # there are no such sizes
            return
        if not any(part.state.speculation is not None and part.draws for part in answers):
            return
        if self._speculator.rests([part.state.speculation for part in answers]):
            return
        room = min(MOST_LOGITS, self._engine.most_sequences) - len(answers)
        wanted = [(part.state.speculation, self._draft_limit(part)) for part in answers]
        found = self._speculator.drafts(wanted, max(0, room), lambda counts: self._drafted(answers, counts))
        for part, drafts in zip(answers, found, strict=True):
            part.drafts = drafts

    def _drafted(self, answers: list[Part], counts: dict[int, int]) -> dict[int, list[int]]:
        """What the model's own head or a second model drafts for answers by their numbers."""
        asked: dict[int, Asked] = {}
        unready = unready_runs()
        for n, count in counts.items():
            state = answers[n].state
            mask = None if state.request.grammar is None else state.request.grammar.mask()
            asked[n] = Asked(state.opened, state.tokens, state.prompt_end, count, state.sampler, mask)
            assert state.speculation is not None
            asked[n].text = state.speculation.tokens
        by_head = [one for one in asked.values() if not one.text]
        by_model = [one for one in asked.values() if one.text]
        if by_head:
            drafter = self._engine.drafter
            assert drafter is not None
            if any(drafter.waiting(one.sequence) > 1 + MOST_DRAFTS for one in by_head):  # it has to catch up first
                self._speculator.leave_untimed()
            self._engine.draft(by_head)
        if by_model:
            assert self._engine.draft_model is not None
            self._engine.draft_model.draft(by_model)
        if unready_runs() != unready:
            self._speculator.leave_untimed()
        return {n: one.drafts for n, one in asked.items()}

    def _draft_limit(self, part: Part) -> int:
        """Drafts that an answer may have."""
        state, speculation = part.state, part.state.speculation
        if not part.draws or speculation is None or not self._host_drafts(state):
            return 0
        engine = self._engine
        drafter = {"mtp": engine.drafter, "draft": engine.draft_model}.get(speculation.kind)
        if speculation.by_model and (drafter is None or not drafter.ready(state.opened)):
            return 0
        if speculation.kind == "draft" and len(speculation.tokens) != state.opened.length + 1:
            return 0
        return state.draft_limit

    def _chunk(self, state: RequestState, room: int) -> Part:
        """The next chunk of a prompt, behind what is stored of it: up to a multiple of the alignment, the first behind
        it or one that is no more than `room` tokens away, and no further than where the prompt is stored or ends.
        """
        if not state.begun:
            self._work.queue_seconds += state.begin_prompt()
        self._reuse(state)
        engine = self._engine
        at, alignment = state.opened.length, engine.chunk_alignment
        least = (at // alignment + 1) * alignment
        most = min(room, engine.chunk_tokens)
        far = (at + most) // alignment * alignment
        stored = min((point for point in state.points if point > at), default=state.prompt_end)
        end = min(state.prompt_end, max(least, min(far, stored)))
        if state.prompt_end - at <= min(most, stored - at):
            end = state.prompt_end
        if state.rows is not None and not state.hidden:  # cut by its positions alone
            end = min(state.prompt_end, (at // self._most_rows + 1) * self._most_rows)
        return Part.of_prompt(state, end)

    def _launch(self, parts: list[Part]) -> bool:
        """Start a step; whether it was."""
        try:
            step = self._execution.launch(parts)
        except CheckpointError as error:
            self._fail(error)
            return False
        except Exception as error:
            if self._engine.lost(error):
                raise
            while self._launched:
                self._collect()
            self._failed([part.state for part in parts], error)
            return False
        self._launched.append(step)
        for part in parts:
            if part.prompt:
                self._launched_chunk(part)
        return True

    def _collect(self) -> None:
        """Wait for the oldest step under way and hand its tokens out."""
        step = self._launched[0]
        try:
            drawn = self._execution.collect(step)
        except Exception as error:
            if self._engine.lost(error):
                raise
            states = list(dict.fromkeys(state for step in self._launched for state in step.states))
            self._launched = []
            for state in states:
                state.opened.corrupt = True
            self._failed(states, error)
            return
        del self._launched[0]
        pairs = zip(step.parts, step.sequences, strict=True)
        self._work.draft_tokens += sum(part.drafts_verified for part, own in pairs if part.state.sequence is own)
        for n, (part, sequence) in enumerate(zip(step.parts, step.sequences, strict=True)):
            if part.prompt and part.state.sequence is sequence:
                self._computed(part, None if step.rows is None else step.rows[n])
        for state, token in drawn:
            if state.sequence is not None:
                self._deliver(state, token)
        now = compile_progress.clock()
        ready = max(step.unready, self._unready) == unready_runs()
        seconds, busy = now - max(step.begin, self._collected), self._busy() if step.ran else None
        self._count(step.parts, seconds, busy, ready)
        self._collected, self._unready = now, unready_runs()
        self._launched = [step for step in self._launched if step.states]  # else nobody reads what it has drawn

    def _busy(self) -> float:
        """Seconds that this thread has worked on a step, from what comes before it to its tokens, but for drafting;
        those in which other programs had its processor do not count.
        """
        now, drafting = time.thread_time(), self._speculator.drafting
        busy = now - self._since - drafting
        self._since, self._speculator.drafting = now, 0.0
        return busy

    def _launched_chunk(self, part: Part) -> None:
        """A chunk of a prompt is being computed: what follows in order of the device's work can be asked for."""
        state = part.state
        if self._prefix is not None and part.end in state.points:
            self._prefix.store(state.digests, state.opened, functools.partial(self._stores, state.opened))
        if part.end == state.prompt_end:
            state.queue.state = "generating"

    def _computed(self, part: Part, rows: tuple[np.ndarray, ...] | None) -> None:
        """A chunk of a prompt has been computed; rows: what is wanted of each of its tokens."""
        state, sequence = part.state, part.state.sequence
        if part.end == state.prompt_end:
            state.end_prompt()
        try:
            if state.rows is not None and rows is not None:
                known = max(0, state.rows_end - part.at)
                state.rows_end = max(state.rows_end, part.end)
                if known < part.end - part.at:
                    state.rows(*(array[known:] for array in rows))
            if state.progress is not None:
                state.progress(part.end - part.at)
        except Exception as error:
            if state.sequence is sequence:
                self._end(state, error)
            return
        if rows is None or part.end < state.prompt_end or state.sequence is not sequence:
            return
        if state.request.max_tokens:
            state.rows = None  # what is computed again is not read again
        else:
            state.finish_reason = state.queue.finish_reason = "length"
            self._end(state, None)

    def _count(self, parts: list[Part], seconds: float, busy: float | None, ready: bool) -> None:
        """Seconds of a step go to prompts and answers by their tokens. ready: nothing was captured meanwhile, so that
        they are what such steps take.
        """
        work = self._work
        prompt = sum(part.end - part.at for part in parts if part.prompt)
        answers = sum(not part.prompt for part in parts)
        tokens = sum(part.tokens for part in parts if not part.prompt)
        share = prompt / max(1, prompt + tokens)
        work.prompt_tokens += prompt
        work.prompt_seconds += share * seconds
        work.decode_seconds += (1 - share) * seconds
        work.decode_steps += answers > 0
        work.decode_rows += answers
        work.steps, work.host_seconds = self._execution.steps, self._execution.host_seconds
        if prompt and ready and not parts[0].all_logits:  # which cost more, and what is done with them
            self._execution.record(prompt + tokens, seconds)
        elif tokens and not prompt:
            if not parts[0].ahead:
                took = seconds if busy is None else busy
                self._speculator.costs.record(tokens, took if ready else None)
            if parts[0].ahead or tokens == answers:
                self._gate.record(answers, parts[0].ahead, seconds if ready else None)

    def _count_accepted(self, state: RequestState) -> None:
        """Drafts that were accepted since the last time: its sequence is closed, and it may end without another."""
        accepted = state.timings.draft_n_accepted
        self._work.accepted_tokens += accepted - state.accepted_counted
        state.accepted_counted = accepted

    def _failed(self, states: list[RequestState], error: Exception) -> None:
        """A step failed: one request alone ends with the error, several are tried alone."""
        corrupt = any(state.sequence is not None and state.sequence.corrupt for state in states)
        if not corrupt and isinstance(error, MemoryError) and self._prefix is not None and self._prefix.evict():
            return
        involved = [
            state
            for state in self._running
            if state in states or (state.sequence is not None and state.sequence.corrupt)
        ]
        if len(involved) == 1:
            self._end(involved[0], error)
            return
        for state in involved:
            state.failures += 1
            if state.opened.corrupt and not state.owned:
                self._end(state, error)
            elif state.opened.corrupt:
                state.order = 0  # before all others; what it shared with others may be gone, and it has to wait
                self._requeue(state)

    def _deliver(self, state: RequestState, token: Token | Exception) -> None:
        if isinstance(token, HookInterrupted):
            self._interruption = token.reason
        if isinstance(token, Exception):
            self._end(state, token)
            return
        state.failures = 0
        state.count(compile_progress.clock())
        self._work.generated_tokens += 1
        state.queue.put(token, self._batch)
        if token.finish_reason is not None:
            self._end(state, None)

    def _end(self, state: RequestState, error: Exception | None) -> None:
        """End a running request and give its memory back."""
        if state.sequence is not None:
            if state.verification is not None:
                self._execution.accept(state)
            if state.speculation is not None:
                self._speculator.recent.add(state.tokens)
                self._count_accepted(state)
            if state.owned:
                self._engine.close(state.sequence)
            state.sequence = None
            self._record([state.timings])
        now = compile_progress.clock()
        self._interval += 0.2 * (now - max(self._last_end, state.submitted) - self._interval)
        self._last_end = now
        done = state.finish_reason is not None or state.queue.complete
        if isinstance(error, Cancelled) or (error is None and not done):
            kind = "cancelled"
        else:
            kind = "finished" if error is None else "failed"
        with self.condition:
            self._running.remove(state)
            self._counts[kind] += 1
            self._retry = True
        state.queue.end(error, self._batch)


def _promises(states: Seq[RequestState]) -> list[tuple[Sequence, Pages]]:
    return [(sequence, state.pages) for state in states if (sequence := state.sequence) is not None]
