"""Runs the steps that a scheduler has put together, and draws their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.engine.engine import Engine
from penstock.engine.response import Token
from penstock.engine.sampling import mode_of, with_logprobs
from penstock.engine.state import RequestState
from penstock.engine.steps import Run
from penstock.errors import NonFiniteLogits
from penstock.ops.device import Flight


@dataclass(frozen=True, eq=False)
class Part:
    """What one request has in a step: positions `at` to `end` of its sequence."""

    state: RequestState
    at: int
    end: int
    prompt: bool

    @property
    def draws(self) -> bool:
        """Whether a token is drawn after it: not where the request is computed again."""
        state = self.state
        if self.prompt:
            return self.end == state.prompt_end and not state.tokens
        return self.end - state.prompt_end == len(state.tokens)

    def run(self) -> Run:
        state, base = self.state, self.state.held
        known = state.request.prompt[self.at - base : self.end - base]
        answer = state.tokens[max(0, self.at - state.prompt_end) : max(0, self.end - state.prompt_end)]
        assert state.sequence is not None
        ids = np.array([*known, *answer], np.int32)
        return Run(state.sequence, ids, "last" if self.draws else "none", self.prompt)


Drawn = list[tuple[RequestState, Token | Exception]]


class Execution:
    """The steps of one engine. What goes wrong with a step is raised, with one request alone returned."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._decoder = Decoder(engine)
        self.ragged = engine.device.ragged

    @property
    def under_way(self) -> bool:
        """Whether a step was launched whose tokens were not read yet."""
        return self._decoder.under_way

    def groups(self, parts: list[Part]) -> list[list[Part]]:
        """The parts that make a step each. Streamed experts: chunks of prompts and answers are steps of their own."""
        prompts = [part for part in parts if part.prompt]
        answers = [part for part in parts if not part.prompt]
        if not self.ragged:
            return [*([part] for part in prompts), answers]
        return [prompts, answers] if self._engine.experts is not None else [parts]

    def run(self, parts: list[Part], overlap: bool) -> Drawn:
        """Run a step; the tokens drawn after it. overlap: the next step may be launched before they are known."""
        if self.ragged:
            return self._ragged(parts)
        if not (parts and parts[0].prompt):
            return self._decoder.step([part.state for part in parts], overlap)
        (part,) = parts
        run = part.run()
        logits = self._engine.prefill_chunk(
            run.sequence, run.tokens, every=False, last=part.end == part.state.prompt_end
        )
        return [(part.state, sampled(self._engine, part.state, logits[0]))] if part.draws and logits is not None else []

    def _ragged(self, parts: list[Part]) -> Drawn:
        if not parts:
            return []
        runs = [part.run() for part in parts]
        drawing = [part.state for part, run in zip(parts, runs, strict=True) if run.wanted == "last"]
        logits = self._engine.step(runs)
        if logits is None:
            return []
        return [(state, sampled(self._engine, state, row)) for state, row in zip(drawing, logits, strict=True)]


def sampled(engine: Engine, state: RequestState, logits: np.ndarray) -> Token | Exception:
    """The next token of a request, or why there is none; of logits that are not finite the layer where they begin."""
    assert state.sequence is not None
    try:
        return state.sample(logits, state.sequence.length)
    except NonFiniteLogits as error:
        return engine.located(error, state.sequence, state.last)
    except Exception as error:
        return error


class Decoder:
    """Decode steps on a device that takes one token of each sequence at a time.

    Where the device draws, it is at the next step while the host hands out the last one's tokens. A request that ends
    has then taken one step too many, which changes no answer: only sequences that end with their request do so.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ahead: tuple[list[RequestState], Flight] | None = None

    @property
    def under_way(self) -> bool:
        return self._ahead is not None

    def step(self, states: list[RequestState], overlap: bool = True) -> Drawn:
        """The next token of each. A step under way comes first, with the requests it has.

        A request whose sequence holds fewer tokens than it has is given the next of them, and nothing is returned.
        """
        engine = self.engine
        under_way, self._ahead = self._ahead, None
        if under_way is None:
            if not states:
                return []
            edited = sum(state.sampler.edits is not None for state in states)
            if not engine.device.samples_tokens or edited > engine.device.most_edited:
                return self._decoded(states)
            under_way = states, self._draw(states, [state.tokens[state.computed_tokens] for state in states])
        flying, flight = under_way
        behind = 0
        try:
            if overlap and flying == states and all(state.can_overlap for state in states):
                with engine.lock:
                    if engine.continues([state.opened for state in states]):
                        self._ahead, behind = (states, self._draw(states, None)), 1
            tokens = flight.tokens()
            wanted = any(state.sampler.params.logprobs is not None for state in flying)
            logprobs = zip(*flight.logprobs(), strict=True) if wanted else itertools.repeat(None)
        except BaseException:
            self._ahead = None
            for state in flying:
                if state.sequence is not None:
                    state.sequence.corrupt = True
            raise
        found: Drawn = []
        for state, token, own in zip(flying, tokens, logprobs, strict=False):
            if state.sequence is None:
                continue
            if state.computed_tokens - behind == len(state.tokens):
                found.append((state, self._taken(state, token, own, state.sequence.length - behind)))
            elif state.sampler.edits is not None:
                state.sampler.edits.stale = True  # the device has counted a token that was known
        return found

    def _decoded(self, states: list[RequestState]) -> Drawn:
        computed = [state.computed_tokens for state in states]
        tokens = [state.tokens[n] for state, n in zip(states, computed, strict=True)]
        logits = self.engine.decode([state.opened for state in states], tokens)
        return [
            (state, sampled(self.engine, state, own))
            for state, n, own in zip(states, computed, logits, strict=True)
            if n + 1 == len(state.tokens)
        ]

    def _draw(self, states: Seq[RequestState], tokens: list[int] | None) -> Flight:
        samplers = [state.sampler for state in states]
        sequences = [state.opened for state in states]
        grammars = [state.request.grammar for state in states]
        masked = any(grammar is not None for grammar in grammars)
        masks = [None if grammar is None else grammar.mask() for grammar in grammars] if masked else []
        rows = [sampler.row for sampler in samplers]
        return self.engine.draw(sequences, tokens, rows, mode_of(samplers, masked), masks)

    def _taken(self, state: RequestState, token: int, logprobs: Any, position: int) -> Token | Exception:
        if token < 0:
            error = NonFiniteLogits(f"sample: the model produced non-finite logits at position {position}")
            return self.engine.located(error, state.opened, state.last)
        try:
            state.sampler.record(token)
            return state.take(with_logprobs(state.sampler, token, logprobs), position)
        except Exception as error:
            return error
