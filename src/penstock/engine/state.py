"""Where a request is, from its submission to its end."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock import compile_progress
from penstock.engine.admission import Pages
from penstock.engine.cache import Sequence
from penstock.engine.hooks import TokenHistory
from penstock.engine.request import Request, Timings
from penstock.engine.response import ChunkQueue, Token
from penstock.engine.sampling import Sampled, Sampler, refuse_logits
from penstock.engine.speculate import Group, Speculation, accepts
from penstock.errors import InvalidArgument, NonFiniteLogits


@dataclass(eq=False)
class Verification:
    """A run with n drafts that a step has kept: logits float32 [1 + n, vocab] after its tokens, or what a device has
    drawn from them, tokens and their log-probabilities; and of how many of its rows the token has been taken.
    """

    drafts: list[int]
    group: Group
    logits: np.ndarray | None
    tokens: Seq[tuple[int, Any]] = ()
    drawn: int = 0
    met: int = 0  # drafts that are the trunk's own tokens


@dataclass(eq=False)
class RequestState:
    """A request, its sequence while it has one, and its tokens so far.

    owned: the sequence ends with the request; one of a session does not, and is moved on only while its reader waits,
    so that it holds no token that the session does not know. held: positions it had before the prompt, context: their
    tokens. logits: those after them, for an empty prompt. progress: called with the number of tokens of each chunk of
    the prompt, rows with the logits after each of these tokens (hidden: with their hidden states; a request that reads
    log-probabilities: with what `ops.token_logprobs` makes of them), once.
    """

    request: Request
    queue: ChunkQueue
    sampler: Sampler
    max_context: int
    pages: Pages  # the most it will hold
    digests: list[bytes] = field(default_factory=list)
    client: Hashable = None
    sequence: Sequence | None = None
    owned: bool = True
    held: int = 0
    context: Seq[int] = ()
    logits: np.ndarray | None = None
    progress: Callable[[int], None] | None = None
    rows: Callable[..., None] | None = None
    hidden: bool = False
    rows_end: int = 0  # positions whose rows were handed out: no second time where a prompt is computed again

    prompt_end: int = 0  # positions of the sequence with the prompt
    tokens: list[int] = field(default_factory=list)
    drawn: int = 0  # tokens that it has, and those that steps under way are drawing
    finish_reason: str | None = None
    submitted: float = field(default_factory=compile_progress.clock)
    compiled: float = 0.0  # seconds of compiling in this process before it began
    started: float = 0.0  # when its prompt was begun, or its first token drawn
    order: int | None = None  # in the queue, and among prompts
    turn: int = 0  # number of the last chunk of its prompt, or of all when it was let in
    points: set[int] = field(default_factory=set)  # lengths at which its prefix is stored
    begun: bool = False
    prompted: bool = False  # its prompt has been computed once
    paused: float | None = None  # since when its reader lags behind
    preempted: bool = False  # its sequence was closed because of that
    failures: int = 0  # steps with others that failed, since its last token
    history: TokenHistory | None = None  # of its hooks, from the first call on
    speculation: Speculation | None = None
    verification: Verification | None = None  # whose tokens have not all been drawn: of a session
    verifying: bool = False  # a step with its drafts is under way
    ahead: int = 0  # steps under way whose drafts the device accepts by itself
    accepted_counted: int = 0  # drafts that were accepted, as far as metrics have them

    def __post_init__(self) -> None:
        self.prompt_end = self.held + len(self.request.prompt)

    @property
    def timings(self) -> Timings:
        return self.queue.timings

    @property
    def opened(self) -> Sequence:
        """Its sequence, where it has one."""
        assert self.sequence is not None
        return self.sequence

    @property
    def computed_tokens(self) -> int:
        """How many of the answer's tokens the sequence holds."""
        return self.opened.length - self.prompt_end

    @property
    def lags(self) -> bool:
        """Whether its reader is too far behind. What has to be computed again waits until all was read."""
        if not self.owned:
            return not (self.queue.reading and self.queue.drained)
        return not self.queue.drained if self.preempted else self.queue.full

    @property
    def suspect(self) -> bool:
        """Whether its next step is to be run alone: the one that failed, after two failures every one."""
        if not self.failures or self.sequence is None:
            return False
        return self.failures > 1 or not self.tokens or self.computed_tokens + 1 == len(self.tokens)

    @property
    def can_chain(self) -> bool:
        """Whether the token that is being drawn may be appended to the sequence before it is known.

        Not where the next one depends on it on the host: a grammar, hooks, a repetition context. Nor if it is the last
        one.
        """
        if not self.owned or self.request.grammar is not None or self.hosted or self.sampler.waits:
            return False
        return self.drawn < self.request.max_tokens and self.opened.length + 1 < self.max_context

    @property
    def drafts_ahead(self) -> bool:
        """Whether the device may accept its drafts by itself: nothing but the text says what comes next, and nothing
        is wanted beside the tokens.
        """
        if self.speculation is None or self.speculation.kind != "mtp" or not self.owned or self.hosted:
            return False
        sampler = self.sampler
        return self.request.grammar is None and sampler.edits is None and sampler.params.logprobs is None

    @property
    def draft_limit(self) -> int:
        """Drafts that its next run may have: none while tokens are computed again, nor beyond the answer's end."""
        if self.speculation is None or self.suspect or self.computed_tokens + 1 != len(self.tokens):
            return 0
        left = min(self.request.max_tokens - len(self.tokens), self.max_context - self.opened.length)
        return max(0, left - 1)

    def made_up(self, token: Token, position: int) -> Token:
        """For benchmarks: the draft in place of the token, or one that it is not, as `Request.acceptance` says."""
        held, request = self.verification, self.request
        assert held is not None and request.acceptance is not None
        if held.drawn >= len(held.drafts):
            return token
        draft = held.drafts[held.drawn]
        if accepts(request.acceptance, held.drawn, self.sampler.seed, position):
            chosen = draft
        else:
            chosen = token.id if token.id != draft else (draft + 1) % self.sampler.vocab_size
        self.tokens[-1] = chosen
        return token._replace(id=chosen)

    def verified(self, token: int) -> bool:
        """The next token of its verification has been drawn: whether the draft at its place is that token."""
        held = self.verification
        assert held is not None
        same = held.drawn < len(held.drafts) and held.drafts[held.drawn] == token
        if held.drawn < len(held.drafts):
            self.timings.count_draft(held.drawn, same)
        held.drawn, held.met = held.drawn + 1, held.met + same
        return same

    @property
    def hosted(self) -> bool:
        """Whether its tokens are chosen on the host, whatever the device does."""
        return self.request.hooks is not None

    @property
    def last(self) -> int | None:
        """The token that the sequence was given last, if the request knows it."""
        given = self.tokens or self.request.prompt
        return given[-1] if given else None

    def sample(self, logits: np.ndarray, position: int) -> Token:
        """Draw the token at `position` (its number in the sequence). Raises NonFiniteLogits, and what hooks raise."""
        mask = None if self.request.grammar is None else self.request.grammar.mask()
        drawn = self._hooked(logits, position, mask) if self.hosted else self.sampler.sample(logits, position, mask)
        return self.take(drawn, position)

    def _hooked(self, logits: np.ndarray, position: int, mask: np.ndarray | None) -> Sampled:
        hooks = self.request.hooks
        assert hooks is not None
        if not np.isfinite(logits.max()):
            refuse_logits(logits, position)  # the model's, not a hook's
        if self.history is None:
            self.history = TokenHistory([*self.context, *self.request.prompt])
        known = self.held + len(self.request.prompt)
        self.history.extend(self.tokens[len(self.history) - known :])
        processed = hooks.process(self.history.view(), logits)
        try:
            if hooks.sampler is None:
                return self.sampler.sample(processed, position, mask)
            return self.sampler.sample_with(hooks.choose, processed, position, mask)
        except NonFiniteLogits:
            found = f"-inf for all of the {processed.size} tokens that the grammar allows"
            raise InvalidArgument(f"logits_processors: returned {found}, expected a number for one at least") from None

    def take(self, drawn: Sampled, position: int) -> Token:
        """The token at `position` has been drawn: see whether the answer ends with it."""
        request, reason = self.request, None
        self.tokens.append(drawn.token)
        if self.speculation is not None:
            self.speculation.extend((drawn.token,))
        ended = "stop" if request.grammar is None or not request.grammar.closing else "length"
        if drawn.token in request.eos:
            reason = ended
        else:
            if request.grammar is not None:
                request.grammar.accept(drawn.token)
            if request.grammar is not None and request.grammar.done:
                reason = ended
            elif len(self.tokens) >= request.max_tokens or position + 1 >= self.max_context:
                reason = "length"
        self.finish_reason = reason
        return Token(drawn.token, reason, drawn.logprob, drawn.top)

    # the clock of a request

    def begin_prompt(self) -> float:
        """Its first chunk is about to be computed; seconds that it has waited for that."""
        self.begun, self.started, self.compiled = True, compile_progress.clock(), compile_progress.seconds()
        self.timings.queue_seconds = self.started - self.submitted
        return self.timings.queue_seconds

    def end_prompt(self) -> None:
        if not self.prompted:
            now = compile_progress.clock()
            self.timings.prompt_seconds, self.started, self.prompted = now - self.started, now, True
            self.timings.compile_seconds = compile_progress.seconds() - self.compiled

    def count(self, now: float) -> None:
        """A token has come."""
        timings = self.queue.timings
        timings.generated_tokens = len(self.tokens)
        timings.generation_seconds = now - self.started
        timings.compile_seconds = compile_progress.seconds() - self.compiled
