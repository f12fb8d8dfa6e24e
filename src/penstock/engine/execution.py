"""Runs the steps that a scheduler has put together, and draws their tokens."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock import compile_progress
from penstock.engine.buckets import UNREAD, BucketedSteps, drafts_to_prepare
from penstock.engine.cache import Sequence
from penstock.engine.draft_chain import AheadRun
from penstock.engine.engine import Engine
from penstock.engine.response import Token
from penstock.engine.runner import unready_runs
from penstock.engine.sampling import mode_of, with_logprobs
from penstock.engine.speculate import Proposal
from penstock.engine.state import RequestState, Verification
from penstock.engine.steps import CHAINED, Run
from penstock.errors import NonFiniteLogits, PenstockError
from penstock.models.step import PAGE
from penstock.ops.device import PendingStep
from penstock.ops.sampling import INACTIVE

_log = logging.getLogger("penstock")

_LOGITS_BYTES = 1 << 28  # that a step may hand out, but for those of a page


@dataclass(slots=True, eq=False)
class Part:
    """What one request has in a step: positions `at` to `end` of its sequence, and whether a token is drawn after it:
    not where the request is computed again.
    """

    state: RequestState
    at: int
    end: int
    prompt: bool
    draws: bool
    drafts: Proposal | None = None  # behind the token of an answer
    ahead: int = 0  # drafts that the device is to make, and verifies in the step behind this one
    verified: int = 0  # drafts of the step before that made some

    @classmethod
    def of_prompt(cls, state: RequestState, end: int) -> Part:
        draws = end == state.prompt_end and not state.drawn and state.rows is None
        return cls(state, state.opened.length, end, True, draws)

    @classmethod
    def of_answer(cls, state: RequestState) -> Part:
        at = state.opened.length
        return cls(state, at, at + 1, False, at + 1 == state.prompt_end + state.drawn)

    @classmethod
    def ahead_of(cls, state: RequestState, drafts: int) -> Part:
        """An answer whose drafts the device accepts by itself; the position is that which the host knows."""
        at = state.opened.length
        return cls(state, at, at + 1, False, True, ahead=drafts, verified=min(drafts, state.opened.drafted or 0))

    @property
    def tokens(self) -> int:
        """Of the step."""
        if self.ahead:
            return 1 + self.ahead
        return self.end - self.at + (0 if self.drafts is None else len(self.drafts.tokens))

    @property
    def drafts_verified(self) -> int:
        """In the step."""
        return self.verified if self.drafts is None else len(self.drafts.tokens)

    @property
    def rows(self) -> range:
        """Of the step's logits from which a token is drawn."""
        return range(self.tokens if self.drafts is not None else 1)

    @property
    def hosted(self) -> bool:
        """Whether the host chooses its tokens, whatever the device does. What is allowed or likely after a draft may
        depend on it.
        """
        state = self.state
        depends = state.sampler.edits is not None or state.request.grammar is not None
        return state.hosted or (self.drafts is not None and depends)

    @property
    def all_rows(self) -> bool:
        """Whether something of each of its tokens is wanted: logits, or hidden states."""
        return self.prompt and self.state.rows is not None

    @property
    def all_logits(self) -> bool:
        """Whether it is the logits."""
        return self.all_rows and not self.state.hidden

    def run(self) -> Run:
        state, sequence = self.state, self.state.opened
        wanted = "last" if self.draws else "none"
        if self.prompt:
            ids = np.array(state.request.prompt[self.at - state.held : self.end - state.held], np.int32)
            reading = state.request.reading
            if self.all_logits and reading is not None:
                targets = reading.targets(state.request.prompt, self.at, self.end)
                return Run(sequence, ids, "logprobs", True, targets=targets, top=reading.top)
            if self.all_rows:
                wanted = "all" if self.all_logits else "hidden"
            return Run(sequence, ids, wanted, True)
        number = self.at - state.prompt_end
        token = state.tokens[number] if number < len(state.tokens) else CHAINED - sequence.slot
        heat = state.queue.heat if self.draws else None
        if self.drafts is not None:
            return Run(sequence, np.array((token, *self.drafts.tokens), np.int32), "all", keep=True, heat=heat)
        return Run(sequence, np.array((token,), np.int32), wanted, heat=heat)


Drawn = list[tuple[RequestState, Token | Exception]]


@dataclass(slots=True, eq=False)
class Launched:
    """A step that has been started: its parts, their sequences, and what will tell the tokens drawn after them; rows:
    those of each part, where all are wanted of all parts, as tuples of arrays. ran: this thread has computed it.
    unready: `unready_runs` before.
    """

    parts: list[Part]
    sequences: list[Sequence]
    drawn: PendingStep | Drawn
    begin: float
    rows: list[tuple[np.ndarray, ...]] | None = None
    ran: bool = False
    unready: int = 0

    @property
    def ahead(self) -> bool:
        """Whether the device accepts drafts by itself."""
        return bool(self.parts[0].ahead)

    @property
    def states(self) -> list[RequestState]:
        """Those of requests that still have the sequence they had."""
        pairs = zip(self.parts, self.sequences, strict=True)
        return [part.state for part, sequence in pairs if part.state.sequence is sequence]


class Execution:
    """The steps of one engine. What goes wrong with a step is raised, with one request alone returned."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._token_seconds = math.inf  # mean of a token in a step with chunks of prompts
        self.host_seconds, self.steps = 0.0, 0
        self._refused: set[tuple[int, str]] = set()  # answers and ways to draw of steps that could not be prepared

    @property
    def overlaps(self) -> bool:
        """Whether a step may be launched before the tokens of the one before are read."""
        return self._engine.can_chain

    def draft_seconds(self, answers: int) -> Mapping[int, float]:
        """Seconds of a step of so many answers by the drafts of each that the device makes, as far as measured."""
        steps = self._steps
        return {} if steps is None else steps.draft_seconds(min(answers, steps.sequences))

    @property
    def _steps(self) -> BucketedSteps | None:
        programs = self._engine.programs
        steps = None if programs is None else programs.steps
        return steps if isinstance(steps, BucketedSteps) else None

    def prepare_drafting(self, answers: int, most: int, states: list[RequestState]) -> Seq[int]:
        """Have steps of up to so many answers ready in which the device accepts drafts of these requests by itself, as
        their samplers draw; the numbers of drafts of each that they may have: none where that fails, as for memory.
        """
        steps, mode = self._steps, mode_of([state.sampler for state in states])
        assert steps is not None
        answers = min(answers, steps.sequences)
        sizes = drafts_to_prepare(answers, most)
        if steps.drafting_prepared(answers, sizes, mode):
            return sizes
        if (answers, mode) in self._refused:
            return ()
        try:
            self._engine.prepare_drafting(answers, sizes, (mode,))
        except PenstockError as error:
            self._refused.add((answers, mode))
            _log.warning("steps of %d answers have no drafts: %s", answers, error)
            return ()
        return sizes

    def room(self, seconds: float, answers: int) -> int:
        """Tokens of prompts for a step beside so many of answers that is to take up to so many seconds, twice as many
        if no answer waits for it.
        """
        seconds = seconds if answers else 2 * seconds
        engine, most = self._engine, self._engine.most_tokens - answers
        if engine.deterministic and engine.device.captures:
            return 1  # one chunk
        steps = None if engine.programs is None else engine.programs.steps
        if isinstance(steps, BucketedSteps):
            return min(most, steps.tokens_within(seconds) - answers) if steps.measured else most
        return min(most, int(seconds / self._token_seconds))

    def groups(self, parts: list[Part]) -> list[list[Part]]:
        """The parts that make a step each.

        A part with the logits of all rows is one, those with hidden states are some without others. Streamed experts:
        chunks of prompts and answers are steps of their own. On a GPU with `deterministic` each chunk is one.
        """
        whole = [[part] for part in parts if part.all_logits]
        hidden = [part for part in parts if part.all_rows and not part.all_logits]
        parts = [part for part in parts if not part.all_rows] if whole or hidden else parts
        return [*self._shared(parts), *self._shared(hidden), *whole]

    def _shared(self, parts: list[Part]) -> list[list[Part]]:
        prompts = [part for part in parts if part.prompt]
        answers = [part for part in parts if not part.prompt]
        if self._engine.device.captures and self._engine.deterministic:
            return [*([part] for part in prompts), *([answers] if answers else [])]
        if self._engine.experts is not None:
            return [group for group in (prompts, answers) if group]
        return [parts] if parts else []

    def launch(self, parts: list[Part]) -> Launched:
        """Start a step. Where the device does not sample, it has been run when this returns."""
        unready = unready_runs()
        step = self._launched(parts)
        step.unready = unready
        return step

    def _launched(self, parts: list[Part]) -> Launched:
        begin = compile_progress.clock()
        if parts[0].ahead:
            return self._launch_ahead(parts, begin)
        engine, runs = self._engine, [part.run() for part in parts]
        drawn: PendingStep | Drawn
        if any(part.all_rows for part in parts):
            self.steps += 1
            found = engine.step(runs)
            assert found is not None
            if runs[0].wanted == "logprobs":
                read = [runs[0].found]
                first = self._after(parts[0], found[0])
            else:
                ends = np.cumsum([len(run.tokens) for run in runs])
                read, first = [(own,) for own in np.split(found, ends[:-1])], []
            return Launched(parts, [run.sequence for run in runs], first, begin, read)
        if engine.device.samples_tokens:
            drawing = [part for part in parts if part.draws]
            samplers = [part.state.sampler for part in drawing if not part.hosted]
            grammars = [None if part.hosted else part.state.request.grammar for part in drawing for _ in part.rows]
            masked = any(grammar is not None for grammar in grammars)
            masks = [None if grammar is None else grammar.mask() for grammar in grammars] if masked else []
            each = [part for part in drawing for _ in part.rows]
            rows = [UNREAD if part.hosted else part.state.sampler.row for part in each]
            hosted = [row for row, part in enumerate(each) if part.hosted]
            drawn = engine.launch(runs, rows, mode_of(samplers, masked), masks, hosted)
            for part in drawing:
                part.state.verifying = part.drafts is not None
            self.host_seconds += compile_progress.clock() - begin
        else:
            logits = engine.step(runs)
            drawn = [] if logits is None else self._drawn(parts, logits)
        for part in parts:
            if part.draws and part.drafts is None:
                part.state.drawn += 1
        self.steps += 1
        return Launched(parts, [run.sequence for run in runs], drawn, begin, ran=not engine.device.samples_tokens)

    def _launch_ahead(self, parts: list[Part], begin: float) -> Launched:
        """Start a step of answers that verifies the device's drafts and makes more."""
        states = [part.state for part in parts]
        runs = [AheadRun(one.opened, one.tokens, one.prompt_end, one.request.acceptance) for one in states]
        samplers = [state.sampler for state in states]
        rows = [sampler.row for sampler in samplers]
        drawn = self._engine.launch_ahead(runs, parts[0].ahead, rows, mode_of(samplers))
        for state in states:
            state.drawn += 1
            state.ahead += 1
        self.host_seconds += compile_progress.clock() - begin
        self.steps += 1
        return Launched(parts, [run.sequence for run in runs], drawn, begin)

    def _collect_ahead(self, step: Launched, tokens: list[int]) -> Drawn:
        """The tokens of each answer up to the last one that counts, or with which it ends."""
        found: Drawn = []
        each = 1 + step.parts[0].ahead
        for n, (part, sequence) in enumerate(zip(step.parts, step.sequences, strict=True)):
            state = part.state
            if state.sequence is not sequence:
                continue
            own = [token for token in tokens[n * each : (n + 1) * each] if token != INACTIVE]
            length = sequence.length
            state.ahead -= 1
            self._engine.advance_ahead(sequence, part.ahead, len(own))
            self._count_drafts(part, len(own) - 1)
            for place, token in enumerate(own):
                taken = self._taken(state, token, None, length + 1 + place)
                found.append((state, taken))
                if isinstance(taken, Exception) or taken.finish_reason is not None:
                    break
            state.drawn = len(state.tokens) + state.ahead
        return found

    def _count_drafts(self, part: Part, met: int) -> None:
        state = part.state
        state.timings.draft_n += part.verified
        for place in range(min(part.verified, met + 1)):
            state.timings.count_draft(place, place < met)
        if part.verified and state.speculation is not None:
            state.speculation.acceptance.record(state.speculation.kind, part.verified, met)

    def _after(self, part: Part, logits: np.ndarray) -> Drawn:
        """The first token of the answer to a prompt that was read, by the logits after its last token, on the host."""
        state = part.state
        if part.end < state.prompt_end or not state.request.max_tokens or state.drawn:
            return []
        state.drawn += 1
        return [(state, sampled(self._engine, state, logits, part.end))]

    def _drawn(self, parts: list[Part], logits: np.ndarray) -> Drawn:
        """Tokens of a step by its logits, on the host."""
        found: Drawn = []
        row = 0
        for part in parts:
            if not part.draws:
                continue
            own = logits[row : row + len(part.rows)]
            found += self._taken_by_host(part, own)
            row += len(part.rows)
        return found

    def _taken_by_host(self, part: Part, logits: np.ndarray) -> Drawn:
        state = part.state
        if part.drafts is None:
            return [(state, sampled(self._engine, state, logits[0], part.end))]
        state.timings.draft_n += len(part.drafts.tokens)
        state.verification = Verification(
            part.drafts.tokens, part.drafts.group, logits if state.owned else logits.copy()
        )
        return self.verify(state)

    def verify(self, state: RequestState) -> Drawn:
        """The next tokens of a request whose drafts a step has computed: all up to the first that is no draft; of a
        session one, since its sequence is to hold what was read alone.
        """
        found: Drawn = []
        while (held := state.verification) is not None:
            position = state.opened.length + 1 + held.drawn
            if held.logits is not None:
                token = sampled(self._engine, state, held.logits[held.drawn], position)
            else:
                token = self._taken(state, *held.tokens[held.drawn], position)
            if state.request.acceptance is not None and isinstance(token, Token):
                token = state.made_up(token, position)
            found.append((state, token))
            same = not isinstance(token, Exception) and state.verified(token.id)
            if not same or found[-1][1].finish_reason is not None:  # type: ignore[union-attr]
                held.drawn += isinstance(token, Exception)
                self.accept(state)
            elif not state.owned:
                break
        return found

    def accept(self, state: RequestState) -> None:
        """No more tokens of a verification are drawn: the sequence holds those before the last one."""
        held = state.verification
        assert held is not None and state.speculation is not None
        state.verification = None
        self._engine.accept(state.opened, held.drawn)
        if state.queue.heat is not None:
            state.queue.heat.accept(held.drawn)
        state.drawn = len(state.tokens)
        state.speculation.acceptance.record(held.group, len(held.drafts), held.met)

    def collect(self, step: Launched) -> Drawn:
        """Wait for a step; its tokens."""
        if isinstance(step.drawn, list):
            return step.drawn
        tokens = step.drawn.tokens()
        begin = compile_progress.clock()
        if step.ahead:
            found = self._collect_ahead(step, tokens)
            self.host_seconds += compile_progress.clock() - begin
            return found
        drawing = [(part, own) for part, own in zip(step.parts, step.sequences, strict=True) if part.draws]
        wanted = any(part.state.sampler.params.logprobs is not None and not part.hosted for part, _ in drawing)
        logits = step.drawn.logits() if any(part.hosted for part, _ in drawing) else None
        logprobs = zip(*step.drawn.logprobs(), strict=True) if wanted else itertools.repeat(None)
        pairs = zip(tokens, logprobs, strict=False)
        found: Drawn = []
        row = 0
        for part, sequence in drawing:
            drawn = [next(pairs) for _ in part.rows]
            state, own, row = part.state, row, row + len(part.rows) * part.hosted
            if state.sequence is not sequence:
                continue
            state.verifying = False
            if part.hosted:
                assert logits is not None
                found += self._taken_by_host(part, logits[own:row])
            elif part.drafts is None:
                found.append((state, self._taken(state, *drawn[0], part.end)))
            else:
                state.timings.draft_n += len(part.drafts.tokens)
                state.verification = Verification(part.drafts.tokens, part.drafts.group, None, drawn)
                found += self.verify(state)
        self.host_seconds += compile_progress.clock() - begin
        return found

    def _taken(self, state: RequestState, token: int, logprobs: Any, position: int) -> Token | Exception:
        if token < 0:
            error = NonFiniteLogits(f"sample: the model produced non-finite logits at position {position}")
            if state.ahead:  # its states have moved on
                return error
            return self._engine.located(error, state.opened, state.last)
        try:
            if state.sampler.edits is not None:
                state.sampler.record(token)
            return state.take(with_logprobs(state.sampler, token, logprobs), position)
        except Exception as error:
            return error

    def record(self, tokens: int, seconds: float) -> None:
        """A step with chunks of prompts had so many tokens and took so long."""
        own = seconds / max(1, tokens)
        known = self._token_seconds < math.inf
        self._token_seconds = 0.7 * self._token_seconds + 0.3 * own if known else own


def most_rows(engine: Engine) -> int:
    """Tokens of a part with all rows: a whole chunk, or a part of it where the logits would be too many."""
    count = engine.device.chunk_alignment
    while count > PAGE and count * engine.model.config.vocab_size * 4 > _LOGITS_BYTES:
        count //= 2
    return count


def sampled(engine: Engine, state: RequestState, logits: np.ndarray, position: int) -> Token | Exception:
    """The token of a request at this position, or why there is none; of logits that are not finite the layer where they
    begin.
    """
    try:
        return state.sample(logits, position)
    except NonFiniteLogits as error:
        return engine.located(error, state.opened, state.last)
    except Exception as error:
        return error
