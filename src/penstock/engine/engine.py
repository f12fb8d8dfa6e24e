"""Runs a model for sequences: steps of tokens of several of them, chunks of prompts and answers in any mix.

On the CPU, and on a GPU with `deterministic`, a step's arithmetic for one sequence depends neither on the rest of the
step nor on where its pages lie, and prompts are cut at multiples of chunk_alignment, so the answer does not depend on
whether a part of the prompt was there before. Steps run as programs (`programs.py`), fused and with their buffers
planned.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias

import numpy as np

from penstock.engine.buckets import POSITIONS_TO_MEASURE, PREPARED, WHOLE, Bucket, BucketedSteps, drafts_to_prepare
from penstock.engine.cache import Caches, Sequence, Snapshot
from penstock.engine.cache_size import CacheSize, sequences_within, size_for_batches, size_for_load, size_within
from penstock.engine.draft_chain import AheadRun
from penstock.engine.draft_head import Asked, CapturedHead, ExactHead, HeadDrafter
from penstock.engine.nonfinite import NonFinite, first_nonfinite
from penstock.engine.options import WORKING_BYTES
from penstock.engine.programs import Programs
from penstock.engine.request import RequestLimits, token_array
from penstock.engine.speculate import COPIED_TOKENS, MOST_DRAFTS
from penstock.engine.steps import (
    MOST_SEQUENCES,
    MOST_TOKENS,
    Run,
    kept_arrays,
    ragged_step,
    read_logprobs,
    step_arrays,
    table_names,
    wants_hidden,
    wants_logprobs,
)
from penstock.errors import CheckpointError, EngineDied, InvalidArgument, NonFiniteLogits, OutOfMemory
from penstock.experts.streamed import Streamed
from penstock.models import mtp
from penstock.models.family import ConfigT, Family, ModelConfig, ModelWeights, WeightsT
from penstock.models.mtp import Head
from penstock.models.split import Mesh, Split
from penstock.models.step import PAGE, Cache, Layout, Step, with_room, with_state_dtype
from penstock.ops.device import Device, PendingStep, device_for
from penstock.units import amount

if TYPE_CHECKING:
    from penstock.engine.draft_model import DraftModel
    from penstock.text.tokenizer import Tokenizer

_log = logging.getLogger("penstock")

DRAFT_ROWS = 1 << 15  # of lm_head that a draft reads, if there are twice as many

# caches stay if they have this share of the pages that are wanted, and are not larger than all of it by this factor
_ENOUGH, _TOO_LARGE = 0.9, 1.25


@dataclass(frozen=True)
class Model(Generic[ConfigT, WeightsT]):
    """A loaded model: its family, its config and its weights, and a name for the files it came from."""

    family: Family[ConfigT, WeightsT]
    config: ConfigT
    weights: WeightsT
    fingerprint: str
    nbytes: int = 0
    experts: Streamed | None = None  # those that are not all in memory
    from_files: int = 0  # bytes of weights that steps read from files, at most: they need room in the page cache
    check: Callable[[], None] | None = None  # raises CheckpointError if the mapped files are no longer what they were
    lease: Callable[[], bool] | None = None  # asks the system to hold off writers of these files; whether it does
    split: Split[Any] | None = None  # it is a rank's part: config and weights are that part's
    mesh: Mesh | None = None
    head: Head | None = None  # drafts tokens; whole, its experts all in memory; of a split model on the first rank


AnyModel: TypeAlias = Model[ModelConfig, ModelWeights]


class LeadingRank(Protocol):
    """What an engine needs of the other ranks of its model, on rank 0."""

    def caches(self, layouts: Seq[Layout], dtype: str, device: Device) -> Caches:
        """Caches whose changes all ranks make."""
        ...

    def check(self) -> None:
        """Raises EngineDied if a rank has failed."""
        ...

    def free_memory(self, free: int, host: bool, share: float) -> int:
        """Of `free` bytes what a rank may take, if all take as much; host: ranks of a machine share its memory.

        share: see `DeviceMemory.free_memory`.
        """
        ...

    def stepping(self, runs: Seq[Run]) -> contextlib.AbstractContextManager[list[Any]]:
        """Around a step of all ranks; the list takes its logits, if they are on the host on every rank."""
        ...

    def watched(self, step: PendingStep) -> PendingStep:
        """The step that was just launched; waiting for it ends with EngineDied if a rank fails or hangs."""
        ...

    def settle(self, sequence: Sequence) -> None:
        """The recurrent states of all ranks are to hold what was accepted."""
        ...

    def prepared_by_all(self) -> contextlib.AbstractContextManager[None]:
        """Around `Engine.prepare`, which all ranks run by themselves."""
        ...

    def nonfinite_of_all(
        self, sequence: Sequence, token: int, own: Callable[[], NonFinite | None]
    ) -> list[NonFinite | None]:
        """What each rank finds in a step that appends this token to a sequence, the first with `own`."""
        ...


class Engine:
    """One model on one device with the caches of its sequences. Its methods may be called from several threads.

    lock: held during a step, and by code that changes caches, weights or programs beside the methods here.
    cache_memory: bytes that the caches of all sequences may take, None for the rule of `allocate`. drafts: the most
    that a step may verify of one sequence. speculate: what the drafts of requests come from that do not say it, of
    `SPECULATE`, and num_draft_tokens how many they have at the most. draft_model: drafts where that is asked for.
    """

    def __init__(
        self,
        model: AnyModel,
        *,
        activations: str = "int8",
        dtype: str = "float32",
        state_dtype: str = "float32",
        max_context: int,
        deterministic: bool = False,
        device: Device | None = None,
        fused: bool = True,
        cache_memory: int | None = None,
        leader: LeadingRank | None = None,
        drafts: int = 0,
        speculate: str = "off",
        num_draft_tokens: int | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.model = model
        self.draft_model = draft_model
        self.leader = leader
        self.activations = activations
        self.dtype = dtype
        self.state_dtype = state_dtype
        self.max_context = max_context
        self.cache_memory = cache_memory
        self.deterministic = deterministic
        self.device = device or device_for("cpu")
        self.experts = model.experts
        layouts = with_state_dtype(model.family.caches(model.config), state_dtype)
        if model.family.commit is not None:
            layouts = with_room(layouts, 1 + drafts if drafts and model.family.commits(model.config) else 0)
        by_itself = not self.device.captures or model.experts is None  # else the host would decide between replays
        asked = speculate == "mtp" or (speculate == "auto" and by_itself)
        whole = model.mesh is None or leader is not None  # the first rank has the head
        runs_head = self.device.runs_programs and whole and drafts > 0 and asked
        head = model.head if runs_head and model.family.final_norm is not None else None
        if head is not None:
            head = _with_frequent_rows(head)
            layouts = (*layouts, mtp.layout(head, model.family))
        make = Caches if leader is None else leader.caches
        self.caches = make(layouts, dtype, self.device)
        self.programs = (
            Programs(
                model.family,
                model.config,
                model.weights,
                self.caches,
                activations,
                fused,
                deterministic,
                self.experts,
                max_context,
                model.mesh,
            )
            if self.device.runs_programs
            else None
        )
        if self.programs is not None and head is not None:
            runner = CapturedHead if self.device.captures else ExactHead
            self.programs.drafter = HeadDrafter(runner(self.programs, head))
        self.lock = threading.RLock()
        self.speculate, self.num_draft_tokens = speculate, num_draft_tokens
        self._drafts = drafts
        self._copied: weakref.WeakKeyDictionary[Sequence, tuple[list[Any], np.ndarray]] = weakref.WeakKeyDictionary()
        self._damage: str | None = None  # what was found wrong with the files
        self._allocated = False

    def speculating(
        self, kind: str | None = None, drafts: int | None = None, where: str = "generate"
    ) -> tuple[str, int]:
        """What the drafts of a request come from, and how many a step may have of it; None: as `load` was told.

        Raises InvalidArgument for what this model cannot do.
        """
        chosen = self.speculate if kind is None or kind == "auto" else kind
        if chosen == "auto" and self.draft_model is not None:
            chosen = "draft"
        elif chosen == "auto" and self.drafter is not None:
            chosen = "mtp"
        if chosen in ("auto", "off"):
            return "off", 0
        room = self.caches.room
        if self._copies_states and self._drafts and self.leader is None:
            room = COPIED_TOKENS
        if room is not None and room < 2:
            raise InvalidArgument(
                f"{where}: speculate is {chosen!r}, expected 'off': the model was loaded without room for drafts "
                "in its recurrent states (speculate='off')"
            )
        if {"draft": self.draft_model, "mtp": self.drafter}.get(chosen, self) is None:
            need = "a head for drafts in its files" if chosen == "mtp" else "a draft_model"
            raise InvalidArgument(f"{where}: speculate is {chosen!r}, expected another: the model has not {need}")
        most = drafts or self.num_draft_tokens or MOST_DRAFTS
        return chosen, most if room is None else min(most, room - 1)

    @property
    def layers(self) -> int:
        """Of the model, without those of a head that drafts."""
        return len(self.model.family.caches(self.model.config))

    @property
    def limits(self) -> RequestLimits:
        return RequestLimits(self.max_context, self.model.config.vocab_size)

    def open(self) -> Sequence:
        with self.lock:
            self.ensure_allocated()
            return self.caches.open()

    def ensure_allocated(self) -> None:
        """Have caches, of whatever size they were given, or of the usual one."""
        with self.lock:
            if not self._allocated:
                self.allocate()

    def allocate(self, sequences: int | None = None, memory: int | None = None, stored: int = 0) -> None:
        """Give caches of a fixed size theirs: slots for so many sequences and pages up to `memory` bytes in all.

        memory None: cache_memory; where that is None too, room for one sequence of max_context and, in at most half of
        the free memory, for short ones, and for fewer sequences if they do not fit. stored: of the memory, bytes for
        windows of stored prefixes. Caches of about this size stay. The first `open` calls this unless it was called
        before. Nothing happens on devices whose caches grow. Raises OutOfMemory if one sequence of max_context and the
        states of the others do not fit, InvalidArgument if larger caches are needed while sequences are open.
        """
        if not self.device.fixed_caches:
            return
        with self.lock:
            caches = self.caches
            count = sequences or min(self.device.default_sequences, self.most_sequences)
            free = self.free_memory() + caches.nbytes
            memory = self.cache_memory if memory is None else memory
            if memory is not None:
                if sequences is None:
                    count = max(1, sequences_within(caches, self.max_context, count, memory))
                size = size_within(caches, self.max_context, count, memory, stored)
            else:
                size = size_for_load(caches, self.max_context, count, free)
            self._resize(size)

    def allocate_for(self, batches: Iterable[tuple[int, int]]) -> None:
        """As `allocate`, for batches of known sizes: a number of sequences, and the positions of each."""
        if not self.device.fixed_caches:
            return
        with self.lock:
            size = size_for_batches(self.caches, batches)
            need = self.caches.size(*size)
            if self.cache_memory is not None and need > self.cache_memory:
                raise OutOfMemory(
                    f"cache: {size.slots} sequences need {amount(need)} of {self.device.memory_name}, "
                    f"expected at most {amount(self.cache_memory)} (cache_memory)"
                )
            self._resize(size)

    def _resize(self, size: CacheSize) -> None:
        """Give the caches about this size, unless they have it."""
        caches, need, one = self.caches, self.caches.size(*size), self.caches.pages_of(self.max_context)
        enough = caches.slots >= size.slots and all(
            pool.capacity >= max(_ENOUGH * size.pages[window], min(one[window], size.pages[window]))
            for window, pool in caches.pools.items()
        )
        if self._allocated and enough and (caches.in_use or caches.nbytes <= _TOO_LARGE * need):
            return
        if self._allocated and self.programs is not None and not caches.in_use:
            self.programs.unbind()
        try:
            caches.allocate(*size)
        finally:
            self._allocated = caches.slots > 0

    def allocate_as(self, size: CacheSize) -> None:
        """Give the caches the size that those of rank 0 have got."""
        with self.lock:
            if self.programs is not None:
                self.programs.unbind()
            self.caches.allocate(*size)
            self._allocated = True

    def free_memory(self, share: float = 1.0) -> int:
        """Bytes that are free for what all ranks allocate alike. share: see `DeviceMemory.free_memory`."""
        free = self.device.free_memory(share)
        return free if self.leader is None else self.leader.free_memory(free, self.device.host_memory, share)

    def working_bytes(self, sequences: int) -> int:
        """Bytes that steps of so many sequences take beside weights and caches, and some for everything else."""
        working, caches, programs = WORKING_BYTES, self.caches, self.programs
        if programs is None:
            return working
        with self.lock:
            one = dict.fromkeys(caches.pools, 1)  # programs are made for caches that are not empty
            if not self.device.fixed_caches:
                caches.make_room(one, 1)
            elif not caches.slots:
                caches.allocate(1, one)
            return working + programs.steps.working_bytes(sequences)

    def close(self, sequence: Sequence) -> None:
        with self.lock:
            self.caches.close(sequence)

    def snapshot(self, sequence: Sequence) -> Snapshot:
        with self.lock:
            self.check_room(sequence, 0)
            self.settle(sequence)
            return self.caches.snapshot(sequence)

    def rewind(self, sequence: Sequence, snapshot: Snapshot) -> None:
        with self.lock:
            if sequence.closed or snapshot.closed:
                which = "sequence" if sequence.closed else "snapshot"
                raise InvalidArgument(f"rewind: the {which} was closed, expected an open one")
            self.caches.rewind(sequence, snapshot)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget the positions from `length` on. Raises InvalidArgument where a state cannot go back."""
        with self.lock:
            self.check_room(sequence, 0)
            if not self.caches.can_truncate(sequence):
                raise InvalidArgument(
                    "truncate: the sequence has a recurrent state or has left a window, expected none"
                )
            self.caches.truncate(sequence, length)

    def drop(self, snapshot: Snapshot) -> None:
        with self.lock:
            self.caches.drop(snapshot)

    def prefill(
        self, sequence: Sequence, tokens: Seq[int], every: bool = False, progress: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """Append tokens to a sequence; logits after the last one [vocab], or after each one [T, vocab].

        Cut into chunks at multiples of the device's chunk_alignment, so that what is stored there never depends on the
        cut. If a chunk fails the sequence keeps what the chunks before it wrote. `progress` is called with the number
        of tokens of each chunk.
        """
        ids = self.token_array(tokens)
        if not len(ids):
            raise InvalidArgument("prefill: tokens is empty, expected at least one")
        self.check_room(sequence, len(ids))
        rows = np.empty((len(ids), self.model.config.vocab_size), np.float32) if every else None
        alignment = self.device.chunk_alignment
        done = 0
        while True:
            count = min(len(ids) - done, alignment - sequence.length % alignment)
            last = done + count == len(ids)
            wanted = "all" if every else "last" if last else "none"
            logits = self.step([Run(sequence, ids[done : done + count], wanted, prompt=True)])
            if rows is not None:
                rows[done : done + count] = logits
            done += count
            if progress is not None:
                progress(count)
            if last:
                assert logits is not None
                return logits[0] if rows is None else rows

    def decode(self, sequences: Seq[Sequence], tokens: Seq[int]) -> np.ndarray:
        """Append one token to each of B sequences; logits after it, float32 [B, vocab]."""
        if len(sequences) > (most := self.most_sequences):
            parts = [slice(start, start + most) for start in range(0, len(sequences), most)]
            return np.concatenate([self.decode(sequences[part], tokens[part]) for part in parts])
        ids = self.token_array(tokens)
        logits = self.step([Run(sequence, ids[i : i + 1]) for i, sequence in enumerate(sequences)])
        assert logits is not None
        return logits

    def located(self, error: NonFiniteLogits, sequence: Sequence, token: int | None) -> NonFiniteLogits:
        """The same error with the device where a step with the last token of a sequence is first not finite.

        As it was if that cannot be found: the token is not known, or the step cannot be run once more.
        """
        if token is None:
            return error
        try:
            with self.lock, self.device.running(self.deterministic):
                self._check_files()
                self.settle(sequence)
                where = first_nonfinite(self, sequence, token)
        except Exception as failure:  # whatever it is, the request ends with the error that it has
            _log.warning("the layer of non-finite logits cannot be found: %s", failure)
            return error
        return error if where is None else NonFiniteLogits(f"{error}; first in {where}")

    @property
    def most_sequences(self) -> int:
        """How many can decode together: those whose experts fit on a device that cannot wait for them in between."""
        if self.programs is None or not self.device.samples_tokens:
            return MOST_SEQUENCES
        return self.programs.most_answers

    def apply_reports(self) -> None:
        """Bring what is known of streamed experts up to date, unless a step is under way."""
        if self.experts is not None and self.lock.acquire(blocking=False):
            try:
                self.experts.apply_reports()
            finally:
                self.lock.release()

    @property
    def can_chain(self) -> bool:
        """Whether a step may be launched before the tokens that it appends are known: the device has drawn them.

        Not with experts on disk: a step that missed some starts again from what the host gave it. Nor on several ranks,
        of which the first alone draws.
        """
        if self.leader is not None:
            return False
        return self.device.samples_tokens and (self.experts is None or self.experts.fully_cached)

    @property
    def tells_experts(self) -> bool:
        """Whether the experts that tokens choose can be counted at no cost worth naming (`heat.py`)."""
        return self.programs is not None and not self.device.captures and self.leader is None

    @property
    def chunk_alignment(self) -> int:
        """Chunks of prompts end at multiples of it. Those at multiples of the device's may be stored, and where results
        are not to depend on the cut all are.
        """
        free = self.device.captures and not self.deterministic
        return PAGE if free else self.device.chunk_alignment

    @property
    def chunk_tokens(self) -> int:
        """Of one prompt in a step at the most. The pages of a window are counted for no more than the device's
        alignment (`Caches.pages_of`): twice as many would be 0.4 GB more for a sequence of Gemma 4 26B-A4B.
        """
        windows = any(window is not None for window in self.caches.pools)
        whole = self.device.captures and not windows
        return self.most_tokens if whole else self.device.chunk_alignment

    @property
    def most_tokens(self) -> int:
        """Of a step."""
        return MOST_TOKENS if self.programs is None else self.programs.steps.most_tokens

    def step(self, runs: Seq[Run]) -> np.ndarray | None:
        """Append the tokens of each run to its sequence, all in one step; logits float32 [R, vocab] after the wanted
        tokens in the order of the runs, None if there are none; or hidden states float32 [T, dim], if the runs want
        them. At most one run of a sequence.
        """
        with self._stepping(runs):
            if self.leader is None:
                return self._run(runs)
            with self.leader.stepping(runs) as found:
                logits = self._run(runs)
                found += [] if logits is None or self.device.samples_tokens or wants_hidden(runs) else [logits]
            return logits

    def follow(self, runs: Seq[Run], check: Callable[[], None]) -> np.ndarray | None:
        """As `step`, on a rank that another one leads. Where the device samples tokens, logits are not read, and
        nothing waits for the step. check: called when sequences have their pages, before anything runs.
        """
        with self._stepping(runs):
            check()
            if not self.device.samples_tokens:
                return self._run(runs)
            assert self.programs is not None and isinstance(self.programs.steps, BucketedSteps)
            self.programs.steps.follow(runs)
        return None

    def _run(self, runs: Seq[Run]) -> np.ndarray | None:
        return self._defined(runs) if self.programs is None else self.programs.steps.run(runs)

    def launch(
        self,
        runs: Seq[Run],
        rows: Seq[Mapping[str, Any]],
        mode: str,
        masks: Seq[np.ndarray | None] = (),
        hosted: Seq[int] = (),
    ) -> PendingStep:
        """As `step`, but the next tokens are drawn on the device after the last token of each run that wants it, and
        nothing waits for them; only where the device samples tokens.

        rows: how each of them draws (`Sampler.row`), the same objects as long as it stays the same; mode as of
        `mode_of`; masks: the words of each one's grammar, None where it has none; hosted: numbers of those for which
        the host chooses, from `PendingStep.logits`.
        """
        with self._stepping(runs):
            assert self.programs is not None and isinstance(self.programs.steps, BucketedSteps)
            if self.leader is None:
                return self.programs.steps.launch(runs, rows, mode, masks, hosted)
            with self.leader.stepping(runs):
                step = self.programs.steps.launch(runs, rows, mode, masks, hosted)
            return self.leader.watched(step)

    @contextlib.contextmanager
    def _stepping(self, runs: Seq[Run]) -> Iterator[None]:
        """Around a step of these runs: their sequences have room for it before, and are longer behind."""
        for run in runs:
            self.check_room(run.sequence, len(run.tokens))
        with self.lock, self.device.running(self.deterministic):
            self._check_files()
            for run in runs:
                self.caches.reserve(run.sequence, len(run.tokens))  # may raise OutOfMemory, and no length has changed
            with mark_corrupt_on_error([run.sequence for run in runs]):
                if not any(run.keep for run in runs):  # else the step does it
                    self._commit([run.sequence for run in runs])
                for run in runs if self._copies_states else ():
                    if run.keep:
                        self._copied[run.sequence] = self.caches.copied_states(run.sequence), run.tokens
                yield
                for run in runs:
                    run.sequence.accepted, run.sequence.drafted = 0, None
                    if not run.keep:
                        self.caches.advance(run.sequence, len(run.tokens))

    def accept(self, sequence: Sequence, count: int) -> None:
        """Of the run of a sequence that the last step has kept, the first `count` tokens are its own."""
        with self.lock:
            if self.drafter is not None:
                self.drafter.accepted(sequence, count)
            copied = self._copied.pop(sequence, None)
            if copied is not None and count < len(copied[1]):
                self.caches.put_states(sequence, copied[0])
                self.step([Run(sequence, copied[1][:count], "none")])
            else:
                self.caches.accept(sequence, count)

    @property
    def _copies_states(self) -> bool:
        """Whether recurrent states are copied before runs that are kept, and tokens that count computed again: the
        family does not say how to commit them.
        """
        return self.caches.room == 0

    @property
    def drafter(self) -> HeadDrafter | None:
        """The model's own head, where it drafts."""
        return None if self.programs is None else self.programs.drafter

    def draft(self, asked: Seq[Asked]) -> None:
        """Have the model's own head draft tokens of sequences for which it is ready."""
        assert self.drafter is not None
        with self.lock, self.device.running(self.deterministic):
            with contextlib.suppress(CheckpointError):  # the next step says so
                self._check_files()
            if self._damage is not None:
                return
            for one in asked:
                self.caches.reserve_ahead(one.sequence, one.count)
            self.drafter.draft(asked)

    @property
    def drafts_ahead(self) -> bool:
        """Whether the device verifies, accepts and drafts by itself, and the host reads tokens afterwards."""
        return self.drafter is not None and self.can_chain and self.experts is None and not self._copies_states

    def has_room_ahead(self, sequence: Sequence, drafts: int, under_way: bool = False) -> bool:
        """Whether `launch_ahead` may be called for a sequence: its pages, which may end behind max_context, have room
        for what may come, and the head has all before it. under_way: a step that ends before will see to that.
        """
        assert self.drafter is not None
        most = -(-self.max_context // PAGE) * PAGE
        known = under_way or sequence.drafted is not None or self.drafter.knows(sequence)
        return known and sequence.length + sequence.ahead + 1 + 2 * drafts <= most

    def launch_ahead(self, runs: Seq[AheadRun], drafts: int, rows: Seq[Mapping[str, Any]], mode: str) -> PendingStep:
        """Start a step that verifies the drafts which the device has for each sequence, none at first, and makes so
        many more; only where `drafts_ahead`. Of each sequence 1 + drafts tokens are reported, −1 behind the last that
        counts; `advance_ahead` is to be told how many those are. Steps may be started before; rows, mode: see `launch`.
        """
        each = 1 + drafts
        for run in runs:
            self.check_room(run.sequence, 0)
            assert self.has_room_ahead(run.sequence, drafts)
        with self.lock, self.device.running(self.deterministic):
            self._check_files()
            assert self.programs is not None and isinstance(self.programs.steps, BucketedSteps)
            assert self.drafter is not None
            for run in runs:  # drafts behind the step's tokens have entries in the head's cache
                self.caches.reserve(run.sequence, run.sequence.ahead + each + drafts)
            with mark_corrupt_on_error([run.sequence for run in runs]):
                self.drafter.catch_up([run for run in runs if run.sequence.drafted is None])
                step = self.programs.steps.launch_ahead(runs, drafts, rows, mode)
                for run in runs:
                    run.sequence.accepted, run.sequence.drafted = 0, drafts
                    run.sequence.ahead += each
            return step

    def advance_ahead(self, sequence: Sequence, drafts: int, count: int) -> None:
        """Of the oldest step under way that `launch_ahead` has started with so many drafts, so many tokens count."""
        with self.lock:
            sequence.ahead -= 1 + drafts
            self.caches.accept(sequence, count)
            if self.drafter is not None:
                self.drafter.caught_up(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Have the recurrent states of a sequence hold all that was accepted."""
        with self.lock:
            if sequence.accepted and self.leader is not None:
                self.leader.settle(sequence)
            with mark_corrupt_on_error([sequence]):
                self._commit([sequence])

    def _commit(self, sequences: Seq[Sequence]) -> None:
        behind = [sequence for sequence in sequences if sequence.accepted]
        if not behind:
            return
        if self.programs is not None:
            self.programs.commit(behind)
        else:
            arrays = {"slots": [one.slot for one in behind], "accepted": [one.accepted for one in behind]}
            slots, accepted = (np.array(values, np.int32) for values in arrays.values())
            self._commit_defined(Step(slots, slots, slots, slots, {}, accepted=accepted))
        for sequence in behind:
            sequence.accepted, sequence.drafted = 0, None

    def _commit_defined(self, step: Step) -> None:
        model = self.model
        assert model.family.commit is not None
        model.family.commit(step, model.weights, model.config, self._layer_caches())

    def _layer_caches(self) -> list[Cache]:
        gates = self.caches.gates
        layers = self.caches.arrays[: self.layers]
        return [(*pair, gates[n]) if n in gates else pair for n, pair in enumerate(layers)]

    def prepare(self) -> None:
        """Have all programs compiled and captured, where the device captures, before the first request comes."""
        if self.programs is None or not isinstance(self.programs.steps, BucketedSteps):
            return
        steps, rng, opened = self.programs.steps, np.random.default_rng(0), []
        vocab = self.model.config.vocab_size

        def seconds(bucket: Bucket) -> float:
            count = 1 if bucket.answers else min(bucket.rows, self.max_context)
            runs = [
                Run(sequence, rng.integers(0, vocab, count, np.int32), "none", prompt=not bucket.answers)
                for sequence in (opened[: bucket.sequences] if bucket.answers else opened[:1])
            ]
            for run in runs:
                self.caches.reserve(run.sequence, count)
            return steps.time(bucket, lambda: steps.run(runs, bucket))

        self.ensure_allocated()
        together = contextlib.nullcontext() if self.leader is None else self.leader.prepared_by_all()
        with self.lock, self.device.running(self.deterministic), together:
            try:
                opened += [self.open() for _ in range(steps.answers[-1])]
                steps.prepare(seconds)
            finally:
                for sequence in opened:
                    self.close(sequence)
            if self.drafts_ahead:
                most = self.speculating("mtp")[1]
                for count in (one for one in PREPARED if one <= steps.answers[-1]):
                    self.prepare_drafting(count, drafts_to_prepare(count, most))

    def prepare_drafting(self, sequences: int, drafts: Seq[int], modes: Seq[str] = WHOLE) -> None:
        """Have steps captured in which the device accepts drafts of so many sequences by itself, by the drafts of each
        and the way to draw, with those in which drafts begin, rest and begin again; where so many more sequences can be
        opened it is known then how long they take. Only where `drafts_ahead`.
        """
        assert self.programs is not None and isinstance(self.programs.steps, BucketedSteps)
        assert self.drafter is not None
        steps, opened = self.programs.steps, []
        self.ensure_allocated()
        with self.lock, self.device.running(self.deterministic):
            steps.prepare_drafting(sequences, drafts, modes)
            self.drafter.prepare(sequences)
            self.programs.prepare_commit(sequences)
            if set(drafts) <= steps.draft_seconds(sequences).keys() or self.max_context < POSITIONS_TO_MEASURE:
                return
            try:
                for _ in range(sequences):
                    opened.append(self.caches.open())
                    self.caches.reserve(opened[-1], POSITIONS_TO_MEASURE)
                steps.measure_drafting(opened, drafts, modes[-1])
            except OutOfMemory:
                pass  # steps of requests tell
            finally:
                for sequence in opened:
                    self.caches.close(sequence)

    def _defined(self, runs: Seq[Run]) -> np.ndarray | None:
        """A step by the definitions of the ops, one after the other: device "reference"."""
        family, config, weights = self.model.family, self.model.config, self.model.weights
        tables = table_names(self.caches.pools)
        arrays = step_arrays(runs, tables)
        options = {"activations": self.activations, "dtype": self.dtype, "mesh": self.model.mesh}
        if self.caches.gates and any(run.keep for run in runs):
            arrays |= kept_arrays(runs)
        step = ragged_step(arrays, tables, **options)
        if step.accepted is not None:
            self._commit_defined(step)
        h = family.forward(step, weights, config, self._layer_caches())
        if wants_hidden(runs):
            assert family.final_norm is not None
            return family.final_norm(replace(step, dtype="float32"), h, weights, config)
        if not len(arrays["wanted"]):
            return None
        logits = family.logits(step, h[arrays["wanted"]], weights, config)
        return read_logprobs(self.device, runs[0], [logits]) if wants_logprobs(runs) else logits

    def lost(self, error: BaseException) -> bool:
        """Whether nothing can be computed any more after this error: the device or another rank is gone."""
        return isinstance(error, EngineDied) or self.device.lost(error)

    def check_ranks(self) -> None:
        """Raises EngineDied if another rank of the model has failed."""
        if self.leader is not None:
            self.leader.check()

    def replace_model(self, model: Model) -> None:
        """The same model with its weights elsewhere in memory, before the first step."""
        with self.lock:
            self.model = model
            if self.programs is not None:
                self.programs.weights = model.weights
                if self.programs.drafter is not None and model.head is not None:
                    self.programs.drafter.replace_head(_with_frequent_rows(model.head))

    @property
    def reads_files(self) -> bool:
        """Whether steps read from files, mapped ones or those of streamed experts."""
        return self.model.check is not None or self.experts is not None

    def check_files(self) -> None:
        """Raises CheckpointError if a file of the weights is no longer what it was. Waits for a step under way."""
        with self.lock:
            self._check_files()

    def _check_files(self) -> None:
        """Before a step: the files that it may read are what they were. One that changed once is not trusted again."""
        if self._damage is not None:
            raise CheckpointError(self._damage)
        try:
            if self.model.check is not None:
                self.model.check()
            if self.experts is not None:
                self.experts.store.reader.check()
        except CheckpointError as error:
            self._damage = str(error)
            raise

    def token_array(self, tokens: Seq[int], what: str = "tokens", tokenizer: Tokenizer | None = None) -> np.ndarray:
        """Token ids as an array. Raises InvalidArgument for others than the model has embeddings for.

        `what` are they? The tokenizer, which may have more tokens than the model, has the name of one that is refused.
        """
        return token_array(tokens, self.model.config.vocab_size, what, tokenizer)

    def check_room(self, sequence: Sequence, count: int) -> None:
        """Raises InvalidArgument if a sequence cannot take `count` more tokens."""
        if sequence.closed or sequence.corrupt:
            state = "was closed" if sequence.closed else "was interrupted in the middle of a step"
            raise InvalidArgument(
                f"sequence: it {state}, expected an open one (rewind it to a snapshot, or start anew)"
            )
        if sequence.length + count > self.max_context:
            raise InvalidArgument(
                f"context: {sequence.length} positions are filled and {count} more were given, "
                f"expected at most {self.max_context} in all (max_context)"
            )


def _with_frequent_rows(head: Head) -> Head:
    """A head that drafts the most frequent tokens alone where there are many others, whose rows of lm_head are most of
    what a draft reads.
    """
    return head if head.rows < 2 * DRAFT_ROWS else mtp.with_rows(head, DRAFT_ROWS)


@contextlib.contextmanager
def mark_corrupt_on_error(sequences: Seq[Sequence]) -> Iterator[None]:
    """Mark sequences as corrupt if their step raises: their states may be half-way."""
    try:
        yield
    except BaseException:
        for sequence in sequences:
            sequence.corrupt = True
        raise
