"""One answer on its way: tokens in; text, reasoning, tool calls and log probabilities out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.engine.request import Chunk
from penstock.engine.response import ResponseHandle
from penstock.text.formats.base import Parser
from penstock.text.formats.deltas import CallArguments, CallBegin, Content, Delta, Reasoning
from penstock.text.token_texts import TokenTexts

_LEAST = -9999.0  # log probability of what cannot be: JSON has no infinity


@dataclass(frozen=True)
class Logprob:
    """Of one token: its text and bytes, its log probability, and those of the likeliest ones."""

    text: str
    bytes: list[int]
    logprob: float | None  # None: nothing stands before it
    top: list[Logprob] | None

    def as_dict(self, top: bool = True) -> dict[str, Any]:
        """As OpenAI writes it."""
        made: dict[str, Any] = {"token": self.text, "logprob": self.logprob, "bytes": self.bytes}
        return made | {"top_logprobs": [other.as_dict(top=False) for other in self.top or ()]} if top else made


@dataclass(frozen=True)
class AskedOfPrompt:
    """What an answer has of its prompt. echo: its text, in front of the answer's. logprobs: log probabilities in front
    of the answer's, with so many of the likeliest tokens. prompt_logprobs: those as vLLM writes them.
    """

    echo: str | None
    logprobs: int | None
    prompt_logprobs: int | None


class AnswerChunk(NamedTuple):
    """What a token brought; on the last one the reason of the end, as OpenAI names it."""

    deltas: list[Delta]
    logprob: Logprob | None = None
    finish_reason: str | None = None


class Answer:
    """The answer of one handle, read piece by piece. Without a parser all text is content."""

    def __init__(
        self,
        index: int,
        handle: ResponseHandle,
        parser: Parser | None,
        texts: TokenTexts,
        one_call: bool = False,
        of_prompt: AskedOfPrompt | None = None,
    ) -> None:
        self.index, self.handle = index, handle
        self.ended = False  # no piece is left to be read
        self.reasoning_tokens = 0
        self._parser, self._texts, self._one_call = parser, texts, one_call
        self._thinking = False
        self._of_prompt, self._prompt_shown = of_prompt, of_prompt is None

    def read(self) -> list[AnswerChunk]:
        """The pieces that are there, without waiting. Raises what the request failed with, after those before it."""
        return self._pieces(self.handle.read())

    async def whole(self) -> list[AnswerChunk]:
        """All pieces at once, when the answer is complete."""
        await self.handle.wait()
        return self._pieces(self.handle.chunks)

    def _pieces(self, chunks: Sequence[Chunk]) -> list[AnswerChunk]:
        pieces: list[AnswerChunk] = []
        if not self._prompt_shown and (chunks or self.handle.ended):
            self._prompt_shown = True
            pieces = self._prompt_pieces()
        for chunk in chunks:
            pieces.append(self._taken(chunk))
            if pieces[-1].finish_reason is not None:
                self.ended = True
                self.handle.cancel()  # nothing more is wanted, where the parser saw the end before the model
                return pieces
        self.ended = self.handle.ended
        return pieces

    def _taken(self, chunk: Chunk) -> AnswerChunk:
        logprob = None
        echoes = self._of_prompt is not None and self._of_prompt.logprobs is not None
        if chunk.logprob is not None and (echoes or chunk.token not in self.handle.request.eos):
            logprob = self._logprob(chunk)
        parser = self._parser
        if parser is None:
            return AnswerChunk([Content(chunk.text)] if chunk.text else [], logprob, chunk.finish_reason)
        deltas, finish = parser.feed(chunk.text) if chunk.text else [], chunk.finish_reason
        if finish is not None:
            deltas = deltas + parser.end()
            if finish == "stop" and parser.calls:
                finish = "tool_calls"
        if self._one_call and parser.complete:
            deltas, finish = _first_call(deltas), "tool_calls"
        if deltas:
            self._thinking = isinstance(deltas[-1], Reasoning)
        self.reasoning_tokens += self._thinking
        return AnswerChunk(deltas, logprob, finish)

    def _prompt_pieces(self) -> list[AnswerChunk]:
        """What the prompt brings before the answer: its text, and a piece for each token where they are counted."""
        asked, request = self._of_prompt, self.handle.request
        assert asked is not None
        pieces = [AnswerChunk([Content(asked.echo)])] if asked.echo else []
        if asked.logprobs is not None:
            pieces += [AnswerChunk([], entry) for entry in self._prompt_entries(asked.logprobs)]
        if request.max_tokens == 0:
            pieces.append(AnswerChunk([], None, "length"))
        return pieces

    def _prompt_entries(self, top: int) -> list[Logprob]:
        entries = [Logprob(*self._shown(self.handle.request.prompt[0]), None, None)]
        for token, logprob, _, likeliest in self._prompt_rows(top):
            others = [Logprob(*self._shown(other), value, []) for other, value, _ in likeliest]
            entries.append(Logprob(*self._shown(token), logprob, others))
        return entries

    def prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        """Of each token of the prompt by ids, as vLLM writes them; None where they were not asked for."""
        if self._of_prompt is None or (top := self._of_prompt.prompt_logprobs) is None:
            return None
        found: list[dict[str, Any] | None] = [None]
        for *_, likeliest in self._prompt_rows(top):
            found.append(
                {
                    str(token): {"logprob": value, "rank": rank, "decoded_token": self._texts.text_of(token)}
                    for token, value, rank in likeliest
                }
            )
        return found

    def _prompt_rows(self, top: int) -> Iterator[tuple[int, float, int, list[tuple[int, float, int]]]]:
        """Of each token but the first: itself, its log probability, its rank; and the same of the `top` likeliest, and
        of itself if it is not among them.
        """
        tokens = iter(self.handle.request.prompt[1:])
        for logprobs, ranks, ids, values in self.handle.pieces:
            for row, token in enumerate(itertools.islice(tokens, len(logprobs))):
                own = (token, max(_LEAST, float(logprobs[row])), int(ranks[row]))
                best = zip(ids[row, :top].tolist(), values[row, :top].tolist(), strict=True)
                likeliest = [(other, max(_LEAST, value), n) for n, (other, value) in enumerate(best, 1) if other >= 0]
                if token not in ids[row, :top]:
                    likeliest.append(own)
                yield *own, likeliest

    def _logprob(self, chunk: Chunk) -> Logprob:
        assert chunk.logprob is not None
        top = [Logprob(*self._shown(token), value, []) for token, value in chunk.top_logprobs or ()]
        return Logprob(*self._shown(chunk.token), chunk.logprob, top)

    def _shown(self, token: int) -> tuple[str, list[int]]:
        return self._texts.text_of(token), list(self._texts.bytes_of(token))


def _first_call(deltas: list[Delta]) -> list[Delta]:
    """What stands before the end of the first call."""
    kept: list[Delta] = []
    for delta in deltas:
        if isinstance(delta, CallBegin | CallArguments):
            if delta.index > 0:
                break
        elif any(isinstance(before, CallBegin | CallArguments) for before in kept):
            break
        kept.append(delta)
    return kept


# --------------------------------------------------------------------------------------------------------------------
# Numbers


def usage(answers: Sequence[Answer], prompts: int = 1) -> dict[str, Any]:
    """Tokens as OpenAI counts them: a prompt once, however many answers it has (they stand beside each other)."""
    counted = [answer.handle.usage for answer in answers]
    firsts = counted[:: max(1, len(counted) // prompts)]
    prompt = sum(one.prompt_tokens for one in firsts)
    written = sum(one.completion_tokens for one in counted)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(answer.reasoning_tokens for answer in answers)},
    }


def timings(answers: Sequence[Answer]) -> dict[str, Any]:
    """Milliseconds and rates as llama.cpp names them; several answers count together, as they ran."""
    times = [answer.handle.timings for answer in answers]
    counted = [answer.handle.usage for answer in answers]
    cached = sum(one.cached_tokens for one in counted)
    read = sum(one.prompt_tokens for one in counted) - cached
    written = sum(one.completion_tokens for one in counted)
    read_ms = 1e3 * sum(one.prompt_seconds for one in times)
    written_ms = 1e3 * max(one.generation_seconds for one in times)
    after_first = max(0, written - len(answers))  # a prompt pays for the first token of its answer
    drafts = sum(one.draft_n for one in times)
    accepted = sum(one.draft_n_accepted for one in times)
    return {
        "cache_n": cached,
        "prompt_n": read,
        "prompt_ms": read_ms,
        "prompt_per_token_ms": _ratio(read_ms, read),
        "prompt_per_second": _ratio(1e3 * read, read_ms),
        "predicted_n": written,
        "predicted_ms": written_ms,
        "predicted_per_token_ms": _ratio(written_ms, after_first),
        "predicted_per_second": _ratio(1e3 * after_first, written_ms),
        "queue_ms": 1e3 * max(one.queue_seconds for one in times),
        **({"draft_n": drafts, "draft_n_accepted": accepted} if drafts else {}),
    }


def expert_heat(answers: Sequence[Answer]) -> dict[str, Any]:
    """How often the answers chose each expert, by layers with experts; nothing where that is not counted."""
    counted = [counts for answer in answers if (counts := answer.handle.expert_counts) is not None]
    return {"expert_heat": {"counts": sum(counted[1:], counted[0]).tolist()}} if counted else {}


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0
