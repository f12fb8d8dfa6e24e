"""`penstock.load` and the model it returns: generate, stream, chat, logits, sessions."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import weakref
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast, overload

import numpy as np

from penstock import compile_progress, models
from penstock.engine import compile_ahead
from penstock.engine.admission import all_memory
from penstock.engine.cache import Caches
from penstock.engine.draft_model import DraftModel
from penstock.engine.engine import AnyModel, Engine, LeadingRank, Model
from penstock.engine.expert_weights import ExpertOptions, budget_of, expert_layers, open_experts
from penstock.engine.hooks import LogitsProcessor, TokenSampler
from penstock.engine.options import WORKING_BYTES, resolve_options, resolve_state_dtype
from penstock.engine.rank import Rank, RankStart, following, ranks_of, warn_of_cores
from penstock.engine.reading import Reading, check_pooling
from penstock.engine.request import Chunk, Completion, Request, Timings, make_request, reading_request
from penstock.engine.response import ResponseHandle, in_order_of_arrival
from penstock.engine.scheduler import Scheduler
from penstock.engine.session import Session, read_about, restore_into
from penstock.engine.speculate import MOST_DRAFTS, check_speculate
from penstock.errors import CheckpointError, DTypeError, InvalidArgument, OutOfMemory
from penstock.experts.layout import Layer
from penstock.experts.store import owned_bytes, slot_counts
from penstock.models import mtp
from penstock.models.family import AnyFamily, ConfigT, Family, ModelConfig, WeightsT
from penstock.models.gguf import open_gguf
from penstock.models.random import DeviceRandomSource, Maker, Random, RandomPart, Shapes
from penstock.models.source import (
    CheckpointSource,
    DeviceSource,
    FileBackedSource,
    FilesSource,
    ShapeOnlySource,
    Source,
    left_over,
)
from penstock.models.split import group_columns
from penstock.models.step import with_state_dtype
from penstock.ops.device import Device, device_for
from penstock.parallel.group import STEP_SECONDS
from penstock.progress import in_notebook, notebook_bar
from penstock.text.gguf_tokenizer import gguf_tokenizer
from penstock.text.tokenizer import Tokenizer, tokens_beyond
from penstock.units import amount, parse_size
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.gguf import GgufFile
from penstock.weights.resolve import ResolvedModel, resolve_model

_TEMPLATE_OPTIONS = ("tools", "template_variables", "allow_special_in_messages")  # of chat, for its template
_LISTS = ("stop", "extra_eos", "logits_processors")  # options of which a list is one value
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
MAX_BATCH = 32  # requests that run together
_CONTEXT = 4096  # positions that there is room for beside streamed experts, and that a GPU may fill its memory with


@dataclass
class Stats:
    """What a model has done and what it holds. Times are sums over all calls.

    Of streamed experts (else None): bytes of their slots; how often one that was chosen was in a slot, in host memory
    (on its way to a GPU) or read; bytes read from files and copied from host memory; seconds that steps waited.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    generation_seconds: float = 0.0
    weight_bytes: int = 0
    cache_bytes: int = 0
    peak_memory: int = 0
    compile_seconds: float = 0.0  # for kernels that this machine had not compiled before; no part of the other times
    expert_bytes: int | None = None
    expert_hits: int | None = None
    expert_host_hits: int | None = None
    expert_reads: int | None = None
    expert_guessed: int | None = None  # of the reads, those of experts that were not chosen yet
    expert_bytes_read: int | None = None
    expert_bytes_copied: int | None = None
    expert_wait_seconds: float | None = None
    draft_n: int = 0  # drafts that were verified
    draft_n_accepted: int = 0
    draft_places: list[list[int]] = field(default_factory=list)  # see `Timings`

    @property
    def prompt_tps(self) -> float:
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generation_tps(self) -> float:
        return self.generated_tokens / self.generation_seconds if self.generation_seconds else 0.0

    @property
    def expert_hit_rate(self) -> float | None:
        """Share of the chosen experts that were in a slot."""
        if self.expert_hits is None:
            return None
        read = (self.expert_reads or 0) - (self.expert_guessed or 0)
        chosen = self.expert_hits + (self.expert_host_hits or 0) + read
        return self.expert_hits / chosen if chosen else 0.0

    def __str__(self) -> str:
        return (
            f"Prompt: {self.prompt_tokens} tokens, {self.prompt_tps:.3f} tokens-per-sec\n"
            f"Generation: {self.generated_tokens} tokens, {self.generation_tps:.3f} tokens-per-sec\n"
            f"{self.about_drafts()}{self.about_compiling()}"
            f"Peak memory: {self.peak_memory / 1e9:.3f} GB{self.about_experts()}"
        )

    def about_compiling(self) -> str:
        """A line about the time for compiling, before a line break; nothing if there was none."""
        spent = f"{self.compile_seconds:.1f}"
        return "" if spent == "0.0" else f"Compiling: {spent} s, once on this machine\n"

    def add_drafts(self, timings: Timings) -> None:
        self.draft_n += timings.draft_n
        self.draft_n_accepted += timings.draft_n_accepted
        for place, counts in enumerate(timings.draft_places):
            if place == len(self.draft_places):
                self.draft_places.append([0, 0])
            self.draft_places[place] = [sum(pair) for pair in zip(self.draft_places[place], counts, strict=True)]

    def about_drafts(self) -> str:
        """A line about drafts, before a line break; nothing if there were none."""
        if not self.draft_n:
            return ""
        places = ", ".join(f"{accepted / max(1, tries):.0%}" for tries, accepted in self.draft_places)
        return f"Drafts: {self.draft_n_accepted} of {self.draft_n} accepted, by place {places}\n"

    def drafts(self) -> dict[str, Any]:
        """What is known of drafts, as JSON shows it; nothing if there were none."""
        names = ("draft_n", "draft_n_accepted", "draft_places") if self.draft_n else ()
        return {name: getattr(self, name) for name in names}

    def experts(self) -> dict[str, Any] | None:
        """What is known of streamed experts, as JSON shows it."""
        if self.expert_hits is None:
            return None
        named = {name[7:]: value for name, value in asdict(self).items() if name.startswith("expert_")}
        return named | {"hit_rate": self.expert_hit_rate}

    def about_experts(self) -> str:
        """A line about streamed experts, after a line break; nothing if there are none."""
        if self.expert_hits is None:
            return ""
        tokens = max(1, self.prompt_tokens + self.generated_tokens)
        seconds = self.prompt_seconds + self.generation_seconds
        waited = (self.expert_wait_seconds or 0.0) / seconds if seconds else 0.0
        held, read = amount(self.expert_bytes or 0), amount((self.expert_bytes_read or 0) / tokens)
        return (
            f"\nExperts: {self.expert_hit_rate or 0.0:.1%} of the chosen ones were in {held} of slots, "
            f"{read} read per token, {waited:.0%} of the time waiting for them"
        )

    def as_dict(self) -> dict[str, Any]:
        rates = {"prompt_tps": self.prompt_tps, "generation_tps": self.generation_tps}
        return asdict(self) | rates | {"expert_hit_rate": self.expert_hit_rate}


class _ClosedEngine:
    """In place of the engine of a model that was closed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InvalidArgument("model: it was closed, expected an open one")


class LLM:
    """A loaded model. Made by `load`; methods may be called from several threads.

    engine: what computes its steps (sequences, caches, device, weights); a change of it shows in all of the model's
    answers. tokenizer, config, max_context; notices: remarks of loading.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        path: str | None,
        notices: Seq[str],
        close: Callable[[], None] | None = None,
    ) -> None:
        self.engine = engine
        self._close = None if close is None else weakref.finalize(self, close)  # at the end of the process, too
        self._tokenizer = tokenizer
        self._path = path
        self._stats = Stats(weight_bytes=engine.model.nbytes)
        self._scheduler: Scheduler | None = None
        self._lock = threading.Lock()
        self.notices = tuple(notices)

    def close(self) -> None:
        """Cancel what runs and give the memory back: of weights and caches when the last session has gone, too.

        A closed model refuses everything with InvalidArgument. Of one that is split over ranks the others end, and what
        is asked of it raises EngineDied.
        """
        if self._close is not None:
            self._close()
            return
        with self._lock:
            scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            scheduler.close(0)
        self.engine = cast("Engine", _ClosedEngine())

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def scheduler(self) -> Scheduler:
        """Runs the requests of `generate`, `stream` and sessions: those of several threads share its steps."""
        with self._lock:
            if self._scheduler is None:
                memory = self.engine.cache_memory
                self._scheduler = Scheduler(
                    self,
                    max_sequences=MAX_BATCH,
                    queue=1 << 30,
                    prefix_cache=False,
                    memory=all_memory(self.engine) if memory is None else memory,
                    record=_not_counted,
                    allocate=False,
                )
            return self._scheduler

    @property
    def text_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, if there is one: without it tokens have no text."""
        return self._tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidArgument("tokenizer: this model was made up without one, expected token ids")
        return self._tokenizer

    @property
    def config(self) -> ModelConfig:
        return self.engine.model.config

    @property
    def max_context(self) -> int:
        return self.engine.max_context

    def __repr__(self) -> str:
        if isinstance(self.engine, _ClosedEngine):
            return "LLM(closed)"
        return f"LLM({self.config.model_type}, {self.engine.device.name}, context {self.max_context})"

    def stats(self) -> Stats:
        """Tokens, seconds, bytes so far (a copy)."""
        now = Stats(**asdict(self._stats))
        now.cache_bytes, now.peak_memory = self.engine.caches.nbytes, self.engine.device.peak_memory()
        if (streamed := self.engine.experts) is not None:
            self.engine.apply_reports()
            counters, now.expert_bytes = streamed.store.counters, streamed.store.nbytes
            now.expert_hits, now.expert_host_hits, now.expert_reads = counters.hits, counters.host_hits, counters.reads
            now.expert_guessed = counters.guessed
            now.expert_bytes_read, now.expert_bytes_copied = counters.bytes_read, counters.bytes_copied
            now.expert_wait_seconds = counters.wait_seconds
        return now

    def logits(self, token_ids: Seq[int]) -> np.ndarray:
        """Logits of the next token after each of `token_ids`, float32 [T, vocab]: one sequence, teacher-forced."""
        ids = self.engine.token_array(token_ids)
        found, done = np.empty((len(ids), self.config.vocab_size), np.float32), 0
        if not len(ids):
            return found

        def take(rows: np.ndarray) -> None:
            nonlocal done
            found[done : done + len(rows)] = rows
            done += len(rows)

        handle = self.scheduler.submit(reading_request(self.engine.limits, ids.tolist()), rows=take)
        try:
            handle.result()
        finally:
            handle.cancel()
            self.add_timings([handle.timings])
        return found

    def embed(self, texts: str | Seq[int] | Seq[str] | Seq[Seq[int]], pooling: str = "mean") -> np.ndarray:
        """Embedding of a text, float32 [dim]; of a list of texts (or of lists of token ids) float32 [n, dim].

        The mean over the tokens of the hidden state after the final norm (pooling "last": that of the last token),
        divided by its Euclidean length: the product of two is their cosine. Text is encoded as the tokenizer says.
        Texts of a list are computed together; on the CPU no bit depends on the others. Raises InvalidArgument for a
        text without tokens or longer than the context.
        """
        check_pooling(pooling)
        one = _one(texts, "embed: texts")
        requests = [
            self._embedding_request(text, "texts" if one else f"texts[{n}]", Reading(pooling))
            for n, text in enumerate([texts] if one else texts)
        ]
        handles = [self.scheduler.submit(request) for request in requests]
        try:
            with notebook_bar("reading", after=1.0) as report:
                for n, handle in enumerate(handles):
                    handle.result()
                    report(n + 1, len(handles))
        finally:
            for handle in handles:
                handle.cancel()
            self.add_timings([handle.timings for handle in handles])
        found = np.array([handle.pieces[0][0] for handle in handles], np.float32).reshape(-1, self.config.dim)
        return found[0] if one else found

    def _embedding_request(self, text: Any, name: str, reading: Reading) -> Request:
        ids = self.tokenizer.encode(text) if isinstance(text, str) else text
        found = self.engine.token_array(ids, f"embed: {name}", self._tokenizer)
        if not 0 < len(found) <= self.max_context:
            limit = f"1 to {self.max_context} (max_context)"
            raise InvalidArgument(f"embed: {name} has {len(found) or 'no'} tokens, expected {limit}")
        return reading_request(self.engine.limits, found.tolist(), reading)

    @overload
    def generate(
        self,
        prompt: str | Seq[int],
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Seq[str] = (),
        logprobs: int | None = None,
        logits_processors: Seq[LogitsProcessor] | None = None,
        sampler: TokenSampler | None = None,
        **more: Any,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        max_tokens: int | list[int] = 256,
        temperature: float | list[float] = 0.0,
        top_p: float | list[float] = 1.0,
        top_k: int | list[int] = 0,
        min_p: float | list[float] = 0.0,
        seed: int | list[int] | None = None,
        stop: str | Seq[str] | list[Seq[str]] = (),
        logprobs: int | list[int] | None = None,
        logits_processors: Seq[LogitsProcessor] | list[Seq[LogitsProcessor] | None] | None = None,
        sampler: TokenSampler | list[TokenSampler | None] | None = None,
        **more: Any,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompt: Any,
        max_tokens: Any = 256,
        temperature: Any = 0.0,
        top_p: Any = 1.0,
        top_k: Any = 0,
        min_p: Any = 0.0,
        seed: Any = None,
        stop: Any = (),
        logprobs: Any = None,
        logits_processors: Any = None,
        sampler: Any = None,
        **more: Any,
    ) -> Any:
        """Continue a prompt: text (encoded as the tokenizer says, no chat template) or token ids → Completion.

        A list of prompts gives a list of completions, decoded together; an option that is a list then has one value per
        prompt (of `stop`, `extra_eos` and `logits_processors` a list of lists). `more`: repetition_penalty,
        presence_penalty, frequency_penalty, logit_bias and the other fields of SamplingParams, extra_eos (token ids),
        response_format as OpenAI has it ({"type": "json_schema", …}), expert_heat (for `Completion.expert_counts`), and
        of one prompt grammar and shown (see `Request`).

        logits_processors: callables (tokens int32 [n] of the prompt and the answer so far, logits float32 [1, V]) →
        logits [1, V], called one after the other for each token, before penalties, bias and grammar; log-probabilities
        are those of what they leave. sampler: a callable (log-probabilities float32 [1, V]) → ids [1] that chooses the
        token in place of temperature, top_p, top_k and min_p. Arrays are NumPy's, on every device. What a hook raises
        ends its request alone; InvalidArgument names one that returns something else.
        """
        options = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
        options |= {"max_tokens": max_tokens, "stop": stop, "logprobs": logprobs}
        options |= {"logits_processors": logits_processors, "sampler": sampler, **more}
        handles = [self.scheduler.submit(request, buffer=1 << 30) for request in self._requests(prompt, options)]
        try:
            with notebook_bar("generating", after=1.0) as report:
                self._read_all(handles, report)
        finally:
            for handle in handles:
                handle.cancel()
            self.add_timings([handle.timings for handle in handles])
        done = [handle.completion() for handle in handles]
        return done[0] if _one(prompt) else done

    @staticmethod
    def _read_all(handles: Seq[ResponseHandle], report: Callable[[float, float], None]) -> None:
        """Wait for answers; report: gets the tokens there are, of those there may be at the most."""
        most = [handle.request.max_tokens for handle in handles]
        total = sum(most)
        for there, (number, chunk) in enumerate(in_order_of_arrival(handles), 1):
            if chunk.finish_reason is not None:
                total -= most[number] - len(handles[number].tokens)
            report(there, total)

    def _requests(self, prompt: Any, options: Mapping[str, Any]) -> list[Request]:
        """Of one prompt or of a list of them."""
        if _one(prompt):
            return [self.request(prompt, **options)]
        if options.get("grammar") is not None:
            raise InvalidArgument("generate: grammar belongs to one prompt, expected no list of prompts with it")
        prompts = list(prompt)
        return [self.request(one, **own) for one, own in zip(prompts, _each(options, len(prompts)), strict=True)]

    @overload
    async def agenerate(self, prompt: str | Seq[int], **options: Any) -> Completion: ...
    @overload
    async def agenerate(self, prompt: list[str] | list[list[int]], **options: Any) -> list[Completion]: ...
    async def agenerate(self, prompt: Any, **options: Any) -> Any:
        """`generate` in an event loop, which goes on meanwhile; calls at the same time share their steps.

        If the task is cancelled, so are the requests.
        """
        handles = [self.scheduler.submit(request, buffer=1 << 30) for request in self._requests(prompt, options)]
        try:
            done = [await handle.wait() for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()
            self.add_timings([handle.timings for handle in handles])
        return done[0] if _one(prompt) else done

    async def astream(self, prompt: str | Seq[int], **options: Any) -> AsyncIterator[Chunk]:
        """`stream` in an event loop: `async for chunk in llm.astream(…)`."""
        handle = self.scheduler.submit(self.request(prompt, **options), buffer=1)
        try:
            async for chunk in handle:
                yield chunk
        finally:
            handle.cancel()
            self.add_timings([handle.timings])

    def stream_batch(self, prompts: list[str] | list[list[int]], **options: Any) -> Iterator[tuple[int, Chunk]]:
        """As `generate` for a list of prompts: the number of a prompt and a Chunk of its answer, as they come."""
        if _one(prompts):
            raise InvalidArgument("stream_batch: prompts is one prompt, expected a list of them")
        requests = self._requests(prompts, options)

        def chunks() -> Iterator[tuple[int, Chunk]]:
            handles = [self.scheduler.submit(request) for request in requests]
            try:
                yield from in_order_of_arrival(handles)
            finally:
                for handle in handles:
                    handle.cancel()
                self.add_timings([handle.timings for handle in handles])

        return chunks()

    def stream(
        self,
        prompt: str | Seq[int],
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Seq[str] = (),
        logprobs: int | None = None,
        progress: Callable[[int], None] | None = None,
        logits_processors: Seq[LogitsProcessor] | None = None,
        sampler: TokenSampler | None = None,
        **more: Any,
    ) -> Iterator[Chunk]:
        """As `generate` for one prompt, a Chunk per token. The prompt is checked now, computed with the first chunk."""
        options = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
        options |= {"logprobs": logprobs, "logits_processors": logits_processors, "sampler": sampler}
        request = self.request(prompt, max_tokens, stop, **options, **more)
        return self._chunks(request, progress)

    def _chunks(self, request: Request, progress: Callable[[int], None] | None) -> Iterator[Chunk]:
        handle = self.scheduler.submit(request, buffer=1, progress=progress)
        try:
            yield from handle
        finally:
            handle.cancel()
            self.add_timings([handle.timings])

    def chat(self, messages: Seq[Mapping[str, Any]], **options: Any) -> Completion:
        """Answer a conversation: `messages` through the chat template (see `chat_tokens`), then as `generate`.

        The text is as the model wrote it, with its reasoning and calls: `penstock.text.formats.parse_whole` takes it
        apart.
        """
        template = {key: options.pop(key) for key in _TEMPLATE_OPTIONS if key in options}
        return self.generate(self.chat_tokens(messages, **template), **self._headers_shown() | options)

    def stream_chat(self, messages: Seq[Mapping[str, Any]], **options: Any) -> Iterator[Chunk]:
        """As `chat`, a Chunk per token."""
        template = {key: options.pop(key) for key in _TEMPLATE_OPTIONS if key in options}
        return self.stream(self.chat_tokens(messages, **template), **self._headers_shown() | options)

    def _headers_shown(self) -> dict[str, Any]:
        from penstock.text.formats import headers_shown

        return headers_shown(self.tokenizer)

    def chat_tokens(
        self,
        messages: Seq[Mapping[str, Any]],
        tools: Seq[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        allow_special_in_messages: bool = False,
    ) -> list[int]:
        """The prompt of a conversation, with the beginning of the answer; special tokens come from the template.

        Those that user, system and tool messages spell out are read as the text they are, unless
        allow_special_in_messages.
        """
        if not isinstance(messages, Iterable):
            raise DTypeError(f"chat: messages is a {type(messages).__name__}, expected a list of messages")
        chat = self.tokenizer.chat_text(
            list(messages), tools, variables=template_variables, allow_special_in_messages=allow_special_in_messages
        )
        return self.tokenizer.encode_chat(chat)

    def session(self) -> Session:
        """A conversation that keeps its state."""
        return Session(self.scheduler, self.engine, self.tokenizer, self._path)

    def request(self, prompt: Any, max_tokens: int = 256, stop: str | Seq[str] = (), **options: Any) -> Request:
        """A checked request for `Scheduler.submit`; one prompt and options as in `generate`."""
        if (wanted := options.pop("response_format", None)) is not None:
            if options.get("grammar") is not None:
                raise InvalidArgument("generate: response_format and grammar are given, expected one of the two")
            options["grammar"] = self._grammar(wanted, prompt)
        return make_request(self.engine.limits, self.tokenizer, prompt, max_tokens, stop, options)

    def _grammar(self, response_format: Any, prompt: Any) -> Any:
        """What may be answered to a prompt; a model that reasons may do so before its JSON."""
        from penstock.text.formats import format_of, in_reasoning
        from penstock.text.grammar import grammar_for

        tokenizer = self.tokenizer
        format = format_of(tokenizer)
        text = prompt if isinstance(prompt, str) else tokenizer.decode(list(prompt)[-64:], skip_special_tokens=False)
        inside = in_reasoning(format, text)
        return grammar_for(response_format, tokenizer, self.config.vocab_size, format=format, in_reasoning=inside)

    def add_timings(self, timings: Seq[Timings]) -> None:
        """Add to `stats` what requests that ran together have taken."""
        for one in timings:
            self._stats.prompt_tokens += one.prompt_tokens
            self._stats.prompt_seconds += one.prompt_seconds
            self._stats.generated_tokens += one.generated_tokens
            self._stats.add_drafts(one)
        self._stats.generation_seconds += max((one.generation_seconds for one in timings), default=0.0)
        self._stats.compile_seconds += max((one.compile_seconds for one in timings), default=0.0)


def _not_counted(timings: Seq[Timings]) -> None:
    """Requests of `generate` and `stream` are counted there, those that ran together as one."""


def _each(options: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Options of each of `count` prompts: a list (of lists) has one value for each, all else is for all of them."""
    listed = {}
    for name, value in options.items():
        several = isinstance(value, list)
        if name in _LISTS:
            several = several and any(one is None or isinstance(one, list | tuple) for one in value)
        if several:
            if len(value) != count:
                raise InvalidArgument(f"{name} has {len(value)} values, expected {count}: one per prompt")
            listed[name] = value
    return [{**options, **{name: value[n] for name, value in listed.items()}} for n in range(count)]


def _one(prompt: Any, name: str = "prompt") -> bool:
    """A single prompt: text, or a sequence of integers."""
    if isinstance(prompt, str | np.ndarray):
        return True
    if not isinstance(prompt, Seq):
        raise InvalidArgument(f"{name} is a {type(prompt).__name__}, expected text, token ids or a list of prompts")
    return len(prompt) > 0 and all(isinstance(item, int | np.integer) for item in prompt)


def load(
    path_or_hub_id: str | os.PathLike[str] | None = None,
    device: str = "auto",
    dtype: str = "auto",
    activations: str = "auto",
    max_context: int | None = None,
    expert_cache: str = "auto",
    threads: int | None = None,
    *,
    expert_host: str = "auto",
    expert_io: str = "auto",
    expert_policy: str = "auto",
    expert_file: str | os.PathLike[str] | None = None,
    expert_prefetch: bool = False,
    deterministic: bool = False,
    revision: str | None = None,
    offline: bool | None = None,
    notify: Callable[[str], None] | None = None,
    progress: Callable[[float], None] | None = None,
    cache_memory: int | str | None = None,
    state_dtype: str = "auto",
    tensor_parallel_size: int = 1,
    expert_parallel: bool = True,
    step_timeout: float = STEP_SECONDS,
    speculate: str = "auto",
    num_draft_tokens: int | None = None,
    draft_model: str | os.PathLike[str] | None = None,
) -> LLM:
    """Load a model: a folder, a .gguf file, a Hugging Face id, or None (or "demo") for the built-in demo model.

    device "auto" (a GPU if it can be used), "cpu", "cuda", "reference" (NumPy, slow); dtype of activations (auto:
    float32 on the CPU, bfloat16 on a GPU); activations "int8" or "float32" for quantized products (auto: int8 on "cpu",
    else float32, which is exact); max_context: positions per sequence, by default the model's, or what fits in memory.
    cache_memory: bytes for the caches of all sequences (20 * 2**30, "20G"), which a GPU takes when the first one opens;
    by default room for one of max_context and short ones beside it, in at most half of what is free there, and on the
    CPU what the sequences need. On the CPU it is a limit for requests.
    state_dtype of recurrent states: "bfloat16" has half the bytes of "float32" (auto), and rounds (docs/kernels.md);
    not on the CPU.
    deterministic: on a GPU an answer's bits do not depend on the requests decoded beside it (on the CPU they never do).
    Weights are read from the files by memory map. expert_cache: bytes of experts that are held ("12G", "50%" of them),
    the others are read when they are chosen; "auto": all of them if they fit. expert_host: bytes of host memory behind
    a GPU's; expert_io "direct", "pagecache" or "mmap"; expert_policy "lru", "lfru" or "pin"; expert_file: made by
    `penstock pack`, by default the one in the folder; expert_prefetch: on the CPU, read what a layer will perhaps
    choose. docs/streaming.md has more. `notify` receives remarks (skipped tensors, copies), else they are logged;
    `progress` the share of the weights that are there: a notebook shows a bar if it is not given.
    tensor_parallel_size: ranks that the model is split over (docs/distributed.md): this process and others that it
    starts, on the GPUs or cores of this machine, or those that torchrun has started, of which all but the first stay in
    this call until the first one closes its model. expert_parallel: each rank has whole experts, else a part of each
    one's width. step_timeout: seconds that a step may take before the ranks are ended. speculate: what drafts of the
    next tokens come from (docs/speculation.md), which make answers quicker and do not change them: "off", "mtp" (the
    model's own head), "ngram" (what followed the last tokens before), "draft" (draft_model) or "auto" (draft_model, or
    the head, if there is one and it pays); num_draft_tokens: how many a step verifies of a sequence at the most.
    draft_model: a smaller model of the same vocabulary, or a folder or hub id with the head that drafts, if the model's
    own files have none.
    Raises CheckpointError, InvalidArgument, OutOfMemory, BackendError, EngineDied.
    """
    num_draft_tokens = check_speculate("load", speculate, num_draft_tokens)
    if not isinstance(draft_model, str | os.PathLike | None):
        raise InvalidArgument(f"load: draft_model is {draft_model!r}, expected a path, a hub id or None")
    if not isinstance(path_or_hub_id, str | os.PathLike | None):
        raise InvalidArgument(f"load: path_or_hub_id is {path_or_hub_id!r}, expected a path, a hub id or None")
    given = {
        "path_or_hub_id": None if path_or_hub_id is None else os.fspath(path_or_hub_id),
        "device": device,
        "dtype": dtype,
        "activations": activations,
        "max_context": max_context,
        "expert_cache": expert_cache,
        "threads": threads,
        "expert_host": expert_host,
        "expert_io": expert_io,
        "expert_policy": expert_policy,
        "expert_file": None if expert_file is None else os.fspath(expert_file),
        "expert_prefetch": expert_prefetch,
        "deterministic": deterministic,
        "revision": revision,
        "offline": offline,
        "cache_memory": cache_memory,
        "state_dtype": state_dtype,
        "speculate": speculate,
        "num_draft_tokens": num_draft_tokens,
        "draft_model": None if draft_model is None else os.fspath(draft_model),
    }
    ranks = ranks_of(tensor_parallel_size, expert_parallel, step_timeout)
    with notebook_bar("loading") as shown:
        report = progress or (lambda share: shown(share, 1.0))
        if ranks is None:
            return _load(given, notify, report)
        _check_split(given, ranks)
        warn_of_cores(ranks.size, device, notify or logging.getLogger("penstock").warning)
        with ranks.loading(given) as rank:
            llm = _load(rank.options, notify, report, rank)
            rank.agree(llm.engine)
    return llm if rank.leads else rank.follow(llm.engine)


def _check_split(given: Mapping[str, Any], ranks: RankStart) -> None:
    """Raise InvalidArgument for a model that cannot be split over so many ranks, before any of them is started."""
    found = resolve_model(given["path_or_hub_id"], revision=given["revision"], offline=given["offline"], quiet=True)
    if found.kind == "gguf":
        stored = open_gguf(found.path)
        ranks.check(stored.family, stored.read_config(), stored.columns)
    else:
        checkpoint = Checkpoint.open(found.path)
        family = models.family_of(checkpoint.config)
        ranks.check(family, family.read_config(checkpoint.config), group_columns(checkpoint))


def follow_rank(about: Mapping[str, Any]) -> None:
    """What the process of a rank other than 0 does, which `load` has started."""
    with following(about) as rank:
        random = "config" in rank.options
        llm = _load_random(rank.options, None, rank) if random else _load(rank.options, None, None, rank)
        rank.agree(llm.engine)
    rank.follow(llm.engine)


def _load(
    given: Mapping[str, Any],
    notify: Callable[[str], None] | None,
    progress: Callable[[float], None] | None,
    rank: Rank | None = None,
) -> LLM:
    """`load` on one device: a whole model, or a rank's part of it."""
    threads = given["threads"]
    name, dtype, activations = resolve_options(given["device"], given["dtype"], given["activations"], threads)
    experts = ExpertOptions(*(given[f"expert_{key}"] for key in ("cache", "host", "io", "policy", "file", "prefetch")))
    room = _cache_bytes(given["cache_memory"])
    states = resolve_state_dtype(given["state_dtype"], name)
    where = device_for(name)
    path_or_hub_id, revision, offline = given["path_or_hub_id"], given["revision"], given["offline"]
    quiet = notify is None and not in_notebook()
    found = resolve_model(path_or_hub_id, revision=revision, offline=offline, quiet=quiet)
    folder = found.path
    notify = notify or logging.getLogger("penstock").info
    options = {"path_or_hub_id": str(folder), "dtype": dtype, "activations": activations, "threads": threads}
    drafter, second = given["draft_model"], None
    if drafter is not None and given["speculate"] in ("off", "ngram"):
        unused = f"speculate is {given['speculate']!r}"
        raise InvalidArgument(f"load: draft_model is {drafter!r}, expected None: {unused}")
    if drafter is not None:
        second = resolve_model(drafter, offline=offline, quiet=quiet)
        if not _drafts_alone(second, found, given["speculate"]):
            drafter, second = second.path, None
    if given["speculate"] == "draft" and second is None:
        came = "is None" if given["draft_model"] is None else f"{given['draft_model']!r} has a head alone"
        raise InvalidArgument(f"load: draft_model {came}, expected a model that drafts for speculate='draft'")
    if found.kind == "gguf":
        if drafter is not None and second is None:
            raise InvalidArgument(f"load: draft_model is {str(drafter)!r}, expected a model: {folder} is a GGUF file")
        model, tokenizer, notices = _read_gguf(folder, where, experts, options, progress, rank)
    else:
        drafting = _Drafting(given["speculate"], None if second is not None else drafter)
        model, tokenizer, notices = _read_folder(
            folder, where, experts, options, progress, room, states, drafting, rank
        )
    for notice in notices:
        notify(notice)
    leader = None if rank is None else rank.leader(model.family, states)
    context, deterministic = given["max_context"], given["deterministic"]
    drafts = given["speculate"], given["num_draft_tokens"]
    about = (dtype, states, activations, context, deterministic, f"{folder}", room, leader)
    helper = None if second is None else _read_draft_model(second, given, model, tokenizer, notify, rank)
    engine = _engine(model, where, *about, *drafts, helper)
    spent = compile_progress.seconds()
    if where.compiles_ahead and rank is None:
        compile_ahead.compile_model(engine, load, options)
    # a saved session finds its model again by its hub id or its whole path
    name = None if found.kind == "demo" else found.hub_id or str(folder.resolve())
    llm = LLM(engine, tokenizer, name, notices, None if rank is None or not rank.leads else rank.close)
    llm.add_timings([Timings(compile_seconds=compile_progress.seconds() - spent)])
    return llm


def _drafts_alone(drafter: ResolvedModel, trunk: ResolvedModel, speculate: str) -> bool:
    """Whether what `draft_model` names is a model by itself, not a folder with the head of the trunk. A folder of the
    trunk's own shapes that has both gives the head, unless a model is asked for; one without a tokenizer has a head.
    """
    if drafter.kind == "gguf":
        return True
    raw = drafter.read_config()
    has_tokenizer = drafter.kind == "demo" or (drafter.path / "tokenizer.json").is_file()
    if mtp.is_head(raw) or speculate == "mtp" or not has_tokenizer:
        return False
    if speculate == "draft" or trunk.kind == "gguf":
        return True
    family = models.family_of(trunk.read_config())
    config = family.read_config(trunk.read_config())
    if raw.get("model_type") not in family.model_types or mtp.rules_of(family, config) is None:
        return True
    try:
        own = family.read_config(raw)
        mtp.check_trunk(own, config, str(drafter.config_path))
    except CheckpointError:
        return True
    return mtp.find(Checkpoint.open(drafter.path), family, own) is None


def _read_draft_model(
    drafter: ResolvedModel,
    given: Mapping[str, Any],
    model: AnyModel,
    tokenizer: Tokenizer,
    notify: Callable[[str], None],
    rank: Rank | None,
) -> DraftModel | None:
    """The model that drafts, beside the one of these weights; of several ranks the first has it. Raises CheckpointError
    for one of another vocabulary.
    """
    if drafter.kind == "gguf":
        theirs = gguf_tokenizer(open_gguf(drafter.path).file)
    else:
        theirs = Tokenizer.from_folder(drafter.path)
    _check_same_vocabulary(drafter, theirs, tokenizer)
    if rank is not None and not rank.leads:
        return None
    options = {name: given[name] for name in ("device", "dtype", "activations", "threads", "deterministic", "offline")}
    beside = {
        **given,
        **options,
        "path_or_hub_id": None if drafter.kind == "demo" else str(drafter.path),
        "max_context": None,
        "revision": None,
        "expert_cache": "auto",
        "expert_file": None,
        "cache_memory": None,
        "speculate": "off",
        "draft_model": None,
    }
    engine = _load(beside, notify, None).engine
    if engine.device.fixed_caches:  # which the other model's are not to take, nor the other way around
        engine.cache_memory = max(engine.caches.bytes_of(engine.max_context), engine.free_memory() // 10)
        engine.allocate()
    return DraftModel(engine, model.config.vocab_size)


def _check_same_vocabulary(drafter: ResolvedModel, theirs: Tokenizer, tokenizer: Tokenizer) -> None:
    """Raise CheckpointError for a model whose tokens are others than those that it is to draft."""
    if theirs.backend.get_vocab() == tokenizer.backend.get_vocab():
        return
    count = min(theirs.vocab_size, tokenizer.vocab_size)
    other = next((n for n in range(count) if theirs.name_of(n) != tokenizer.name_of(n)), count)
    named = ", ".join(f"{each.name_of(other)!r}" for each in (theirs, tokenizer))
    raise CheckpointError(
        f"{drafter.path}: token {other} is another than the model's ({named}), expected a draft model of the same "
        "vocabulary"
    )


def _cache_bytes(value: int | str | None) -> int | None:
    """What cache_memory says, in bytes. Raises InvalidArgument."""
    if isinstance(value, str):
        value = parse_size(value, "load: cache_memory")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InvalidArgument(f"load: cache_memory is {value!r}, expected bytes above 0 or a text such as 20G")
    return value


def _read_folder(
    folder: Path,
    device: Device,
    experts: ExpertOptions,
    options: dict[str, Any],
    progress: Callable[[float], None] | None,
    cache_memory: int | None,
    state_dtype: str,
    drafting: _Drafting,
    rank: Rank | None = None,
) -> tuple[AnyModel, Tokenizer, list[str]]:
    checkpoint = Checkpoint.open(folder)
    family = models.family_of(checkpoint.config)
    config = family.read_config(checkpoint.config)
    tokenizer = Tokenizer.from_folder(folder)
    source = stored = CheckpointSource(checkpoint, *family.names(checkpoint, config))
    head, notices = _find_head(drafting, family, config, stored)
    copied, share, whole = _copied_bytes(checkpoint), 1, config
    if rank is not None:
        source, config = rank.split(family, stored, config, group_columns(checkpoint))
        share, copied = rank.size, checkpoint.nbytes  # columns and experts of a rank are copies
    caches = Caches(with_state_dtype(family.caches(config), state_dtype), options["dtype"], device)
    states = caches.bytes_of(min(config.max_positions, _CONTEXT)) if cache_memory is None else cache_memory
    beside = WORKING_BYTES + caches.nbytes + states
    drafter = 0 if head is None or drafting.drafter is None else head.nbytes
    nbytes = (checkpoint.nbytes + drafter) // share
    layers = _streamed_layers(family, source, config, experts, device, nbytes + beside)
    streams = bool(layers) or experts.asked
    extra = 0  # of the first rank's GPU, which has the whole head
    if head is not None and rank is not None and rank.leads and not device.host_memory:
        extra = _head_bytes(head, stored, whole)
        if not drafting.asked and nbytes + beside + extra > device.free_memory():
            head, extra = None, 0
            notices.append(f"{folder}: the head that drafts is not used: rank 0 has no room for the whole of it")
    if not streams:
        _check_fits(f"{folder}", device, nbytes + extra, copied // share)
    if device.compiles_ahead and rank is None:
        compile_ahead.start(compile_ahead.missing_of, load, options)
    streamed = None
    if streams:
        owned = None if rank is None else rank.mesh.owned(config.experts)
        away = owned_bytes(layers, owned)
        rest = max(0, (copied // share if device.host_memory else nbytes) - away) + beside
        budget = budget_of(experts, layers, rest, device, f"{folder}", owned)
        slot_counts(layers, budget, config.top_k, owned)
        put = _putting(device, nbytes - away, progress)
        weights = family.read_weights(FileBackedSource(source, put), config)
        opened = open_experts(weights, experts, budget, config.top_k, device, folder, checkpoint.fingerprint, owned)
        weights, streamed, remarks = opened
        notices += remarks
        weights, placed = models.placed(weights, device.to_device), models.placed(config, device.to_device)
    else:
        weights, placed = _weights(family, source, config, device, nbytes, progress)
        weights = weights if rank is None else rank.with_slots(weights, config, device)
    model = Model(family, placed, weights, checkpoint.fingerprint, checkpoint.nbytes + drafter, streamed)
    if head is not None and (rank is None or rank.leads):
        model = _read_head(head, model, whole, device, None if rank is None else stored)
    if progress is not None:
        progress(1.0)
    notices += tokens_beyond(f"{folder}", tokenizer, config.vocab_size)
    notices += [*checkpoint.notices, *left_over(stored, family.skipped, len(family.caches(config))).remarks]
    model = model if rank is None else rank.part(model)
    files = [checkpoint] if head is None or drafting.drafter is None else [checkpoint, head.source.checkpoint]
    model = _with_files(model, device, *files)
    return model, tokenizer, notices


@dataclass(frozen=True)
class _Drafting:
    """What is asked for of drafts; drafter: a folder with a head."""

    speculate: str = "auto"
    drafter: Path | None = None

    @property
    def asked(self) -> bool:
        """Whether there has to be a head."""
        return self.speculate == "mtp" or self.drafter is not None


def _find_head(
    drafting: _Drafting, family: AnyFamily, config: ModelConfig, stored: CheckpointSource
) -> tuple[mtp.HeadFiles | None, list[str]]:
    """Where the head that drafts is, its shapes and numbers looked at, and remarks.

    One of the trunk's own files that cannot be used is left out with a remark where nothing was asked for.
    """
    if not _may_draft(drafting.speculate):
        return None, []
    used = set(stored.used)
    try:
        if drafting.drafter is None:
            files = mtp.find(stored.checkpoint, family, config, stored)
        else:
            files = mtp.open_drafter(drafting.drafter, family, config, stored)
        if files is not None:
            none = np.empty((0, 0), np.float32)
            files.read(family, config, none, none, ShapeOnlySource)
            files.check_finite()
        return files, []
    except CheckpointError as error:
        if drafting.asked:
            raise
        stored.used.intersection_update(used)
        return None, [f"{error}; the head that drafts is not used"]


def _head_bytes(files: mtp.HeadFiles, trunk: CheckpointSource, config: ModelConfig) -> int:
    """Bytes of a head beside a rank's part of its trunk, whose tables it has for itself."""
    tables = [trunk.weight(path, config.vocab_size, config.dim) for path in mtp.TABLES if path in trunk]
    return files.nbytes + models.bytes_of(tables)


def _read_head(
    files: mtp.HeadFiles, model: AnyModel, config: ModelConfig, device: Device, trunk: CheckpointSource | None
) -> AnyModel:
    """The model with the head of these files. Its experts are held like those of a model that fits, whatever is
    streamed. config: of the whole model, its arrays on the host; trunk: of a split model, whose first rank has the
    whole head, the source of the tables of which it has a part.
    """
    embed, table = model.weights.embed, model.weights.head
    if trunk is not None:
        put = DeviceSource(trunk, device.to_device)
        embed = put.weight("embed_tokens", config.vocab_size, config.dim)
        table = put.weight("lm_head", config.vocab_size, config.dim) if "lm_head" in trunk else embed
    head = files.read(model.family, config, embed, table, lambda source: DeviceSource(source, device.to_device))
    return replace(model, head=models.placed(head, device.to_device))


def _streamed_layers(
    family: AnyFamily, source: FilesSource, config: ModelConfig, experts: ExpertOptions, device: Device, need: int
) -> list[Layer]:
    """The layers whose experts are to be streamed: asked for, or a model of which `need` bytes do not fit."""
    if not (experts.asked or (need > device.free_memory() and config.top_k and device.runs_programs)):
        return []
    if not device.runs_programs:
        raise InvalidArgument("load: expert_cache is given, expected 'auto' for device 'reference'")
    return expert_layers(family, source, config)


def _read_gguf(
    path: Path,
    device: Device,
    experts: ExpertOptions,
    options: dict[str, Any],
    progress: Callable[[float], None] | None,
    rank: Rank | None = None,
) -> tuple[AnyModel, Tokenizer, list[str]]:
    found = open_gguf(path)
    family, source, config = found.family, found.source, found.read_config()
    tokenizer = gguf_tokenizer(found.file)
    remarks = tokens_beyond(f"{path}", tokenizer, config.vocab_size)
    nbytes, copied, owned = found.nbytes, found.copied_nbytes, None
    if rank is not None:
        source, config = rank.split(family, source, config, found.columns)
        nbytes = copied = nbytes // rank.size  # columns of a rank are copies
        owned = rank.mesh.owned(config.experts)
    caches = Caches(family.caches(config), options["dtype"], device)
    beside = WORKING_BYTES + caches.nbytes + caches.bytes_of(min(config.max_positions, _CONTEXT))
    layers = _streamed_layers(family, source, config, experts, device, nbytes + beside)
    streamed = None
    if layers or experts.asked:
        away = owned_bytes(layers, owned)
        whole = device.host_memory and rank is None  # of which nothing is copied but what has to be
        kept = copied - sum(layer.dealt_nbytes for layer in layers) if whole else nbytes - away
        budget = budget_of(experts, layers, max(0, kept) + beside, device, f"{path}", owned)
        slot_counts(layers, budget, config.top_k, owned)
        put = _putting(device, nbytes - away, progress)
        weights = family.read_weights(FileBackedSource(source, put), config)
        opened = open_experts(weights, experts, budget, config.top_k, device, path.parent, found.fingerprint, owned)
        weights, streamed, told = opened
        remarks = [*told, *remarks]
        weights, placed = models.placed(weights, device.to_device), models.placed(config, device.to_device)
    else:
        _check_fits(f"{path}", device, nbytes, copied)
        if device.compiles_ahead and rank is None:
            compile_ahead.start(compile_ahead.missing_of, load, options)
        weights, placed = _weights(family, source, config, device, found.nbytes, progress)
        weights = weights if rank is None else rank.with_slots(weights, config, device)
    model = Model(family, placed, weights, found.fingerprint, found.nbytes, streamed)
    model = model if rank is None else rank.part(model)
    return _with_files(model, device, found.file), tokenizer, [*remarks, *found.notices]


def _with_files(model: AnyModel, device: Device, *files: Checkpoint | GgufFile) -> AnyModel:
    """A model that knows the files which its weights are mapped from; on a GPU none is."""
    if not device.host_memory:
        return model

    def check() -> None:
        for own in files:
            own.check()

    def lease() -> bool:
        leased = [own.lease() for own in files]
        return all(leased)

    return replace(model, from_files=model.nbytes, check=check, lease=lease)


def _putting(device: Device, nbytes: int, progress: Callable[[float], None] | None) -> Callable[[Any], Any]:
    """`device.to_device` that calls `progress` with the share of all `nbytes` that are there."""
    done = 0

    def put(value: Any) -> Any:
        nonlocal done
        there = device.to_device(value)
        done += value.nbytes
        if progress is not None:
            progress(min(1.0, done / max(1, nbytes)))
        return there

    return put


def _weights(
    family: Family[ConfigT, WeightsT],
    source: Source,
    config: ConfigT,
    device: Device,
    nbytes: int = 0,
    progress: Callable[[float], None] | None = None,
) -> tuple[WeightsT, ConfigT]:
    """A family's weights and config with their arrays on a device: matrices as they are read, small ones at the end.

    progress is called with the share of all `nbytes` that are there.
    """
    weights = family.read_weights(DeviceSource(source, _putting(device, nbytes, progress)), config)
    return models.placed(weights, device.to_device), models.placed(config, device.to_device)


def _copied_bytes(checkpoint: Checkpoint) -> int:
    """What loading takes beside the files: misaligned tensors, experts to be stacked, projections to be joined."""
    total = checkpoint.misaligned_nbytes
    for name in checkpoint.names:
        module = name.rpartition(".")[0]
        stacked = _ONE_EXPERT.search(name) is not None
        joined = len(checkpoint.shape(name)) == 2 and f"{module}.scales" in checkpoint
        if stacked or (joined and not module.endswith(("embed_tokens", "lm_head"))):
            _, start, stop = checkpoint.location(name)
            total += stop - start
    return total


def load_random(
    config: Mapping[str, Any],
    device: str = "auto",
    dtype: str = "auto",
    activations: str = "auto",
    max_context: int | None = None,
    threads: int | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    *,
    deterministic: bool = False,
    on_device: bool = False,
    cache_memory: int | str | None = None,
    state_dtype: str = "auto",
    tensor_parallel_size: int = 1,
    expert_parallel: bool = True,
    step_timeout: float = STEP_SECONDS,
    speculate: str = "auto",
    num_draft_tokens: int | None = None,
) -> LLM:
    """A model of any config.json with made-up weights in memory (no tokenizer): for benchmarks.

    on_device: a GPU draws them itself, which is much quicker; else they depend on the seed alone, not on the device.
    tensor_parallel_size, expert_parallel, step_timeout: as of `load`; each rank draws its own part, which is no part of
    what one device would draw. speculate, num_draft_tokens: as of `load`.
    """
    num_draft_tokens = check_speculate("load", speculate, num_draft_tokens)
    given = {
        "config": dict(config),
        "device": device,
        "dtype": dtype,
        "activations": activations,
        "max_context": max_context,
        "threads": threads,
        "seed": seed,
        "deterministic": deterministic,
        "on_device": on_device,
        "cache_memory": cache_memory,
        "state_dtype": state_dtype,
        "expert_cache": "auto",
        "speculate": speculate,
        "num_draft_tokens": num_draft_tokens,
    }
    ranks = ranks_of(tensor_parallel_size, expert_parallel, step_timeout)
    if ranks is None:
        return _load_random(given, progress)
    family = models.family_of(dict(config))
    ranks.check(family, family.read_config(dict(config)), Random(config).group_size)
    with ranks.loading(given) as rank:
        llm = _load_random(rank.options, progress, rank)
        rank.agree(llm.engine)
    return llm if rank.leads else rank.follow(llm.engine)


def _load_random(given: Mapping[str, Any], progress: Callable[[int], None] | None, rank: Rank | None = None) -> LLM:
    """`load_random` on one device: a whole model, or a rank's part of it."""
    config, seed = given["config"], given["seed"]
    name, dtype, activations = resolve_options(given["device"], given["dtype"], given["activations"], given["threads"])
    room = _cache_bytes(given["cache_memory"])
    states = resolve_state_dtype(given["state_dtype"], name)
    where = device_for(name)
    family = models.family_of(dict(config))
    read = whole = family.read_config(dict(config))
    need = random_nbytes(config, given["speculate"]) // (1 if rank is None else rank.size) + WORKING_BYTES
    free = where.free_memory()
    if need > free:
        raise OutOfMemory(f"random weights: need {amount(need)} of {where.memory_name}, {amount(free)} are free")
    drawn = source = Random(config, seed, progress)
    if given["on_device"] and isinstance(where, Maker):
        drawn = source = DeviceRandomSource(config, where, seed, progress)
    fingerprint = f"random-{seed}"
    if rank is not None:
        split, read = rank.split(family, drawn, read, drawn.group_size)
        source = RandomPart(drawn, split.split, rank.mesh)
        fingerprint += f"-{zlib.crc32(json.dumps(config, sort_keys=True).encode()):08x}"
    weights, placed = _weights(family, source, read, where)
    head = None
    if (rank is None or rank.leads) and _may_draft(given["speculate"]) and mtp.declared(family, whole, config):
        put, own = DeviceSource(drawn, where.to_device), () if rank is None else mtp.TABLES  # of which it has a part
        head = models.placed(mtp.read(put, family, whole, weights.embed, weights.head, own), where.to_device)
    weights = weights if rank is None else rank.with_slots(weights, read, where)
    model = Model(family, placed, weights, fingerprint, models.bytes_of((weights, head)), head=head)
    model = model if rank is None else rank.part(model)
    leader = None if rank is None else rank.leader(family, states)
    context, deterministic = given["max_context"], given["deterministic"]
    drafts = given["speculate"], given["num_draft_tokens"]
    about = (dtype, states, activations, context, deterministic, "random weights", room, leader)
    engine = _engine(model, where, *about, *drafts)
    return LLM(engine, None, None, (), None if rank is None or not rank.leads else rank.close)


def _may_draft(speculate: str) -> bool:
    """Whether a model's own head is loaded."""
    return speculate not in ("off", "ngram")


def random_nbytes(config: Mapping[str, Any], speculate: str = "auto") -> int:
    """Bytes of the weights that `load_random` would make."""
    family = models.family_of(dict(config))
    read, source = family.read_config(dict(config)), Shapes(config)
    weights = family.read_weights(source, read)
    drafts = _may_draft(speculate) and mtp.declared(family, read, config)
    head = mtp.read(source, family, read, weights.embed, weights.head) if drafts else None
    return models.bytes_of((weights, head))


def restore(path: str | os.PathLike[str], llm: LLM | None = None) -> Session:
    """A session saved by `Session.save`, on a loaded model or on the one it names (which must be on this machine)."""
    if llm is None:
        _, about = read_about(path)
        dtype, states = about["dtype"], about.get("state_dtype", "float32")
        llm = load(about["model"] or None, "auto", dtype, about["activations"], state_dtype=states, offline=True)
    session = llm.session()
    try:
        restore_into(session, path)
    except BaseException:
        session.close()
        raise
    return session


def _check_fits(what: str, device: Device, files: int, copies: int) -> None:
    """Weights fit: on the host `copies` beside the mapped files, on a GPU all of them."""
    host = device.host_memory
    need, free = (copies if host else files) + WORKING_BYTES, device.free_memory()
    if need > free:
        found = f"{what}: needs {amount(need)} of {device.memory_name}{' beside its files' if host else ''}"
        raise OutOfMemory(f"{found}, {amount(free)} are free" + ("" if host else "; device='cpu' may fit"))


def _engine(
    model: AnyModel,
    device: Device,
    dtype: str,
    state_dtype: str,
    activations: str,
    max_context: int | None,
    deterministic: bool,
    what: str,
    cache_memory: int | None,
    leader: LeadingRank | None = None,
    speculate: str = "off",
    num_draft_tokens: int | None = None,
    draft_model: DraftModel | None = None,
) -> Engine:
    limit = model.config.max_positions
    if max_context is None:
        chosen = limit
    elif isinstance(max_context, bool) or not isinstance(max_context, int) or not 1 <= max_context <= limit:
        raise InvalidArgument(f"load: max_context is {max_context!r}, expected 1 to {limit} (the model's positions)")
    else:
        chosen = max_context
    engine = Engine(
        model,
        device=device,
        activations=activations,
        dtype=dtype,
        state_dtype=state_dtype,
        max_context=chosen,
        deterministic=deterministic,
        cache_memory=cache_memory,
        leader=leader,
        drafts=0 if speculate == "off" else MOST_DRAFTS,
        speculate=speculate,
        num_draft_tokens=num_draft_tokens,
        draft_model=draft_model,
    )
    if leader is not None or model.mesh is None or speculate not in ("mtp", "draft"):  # else the first rank drafts
        engine.speculating(where="load")  # refuses what the model cannot do
    free = device.free_memory() - WORKING_BYTES
    if cache_memory is not None:
        if cache_memory > free:
            raise OutOfMemory(
                f"{what}: cache_memory is {amount(cache_memory)}, expected at most {amount(max(free, 0))}: so much "
                f"{device.memory_name} is free beside the weights and {amount(WORKING_BYTES)} for steps"
            )
        free = cache_memory
    elif device.fixed_caches and max_context is None:
        # caches take their memory at once, of a long context at most half of it: steps and other sequences need some
        while engine.max_context > _CONTEXT and engine.caches.bytes_of(engine.max_context) > free // 2:
            engine.max_context //= 2
    while (max_context is None and engine.max_context > 256) and engine.caches.bytes_of(engine.max_context) > free:
        engine.max_context //= 2
    need = engine.caches.bytes_of(engine.max_context if max_context is not None else min(engine.max_context, 256))
    if need > free:
        fitting = next((n for n in (chosen >> k for k in range(1, 30)) if engine.caches.bytes_of(n) <= free), 0)
        advice = f"; max_context={fitting} would fit" if fitting else ""
        found = f"{what}: {engine.max_context} positions need {amount(need)} of {device.memory_name}"
        there = "are free" if cache_memory is None else "are there for them (cache_memory)"
        raise OutOfMemory(f"{found}, {amount(max(free, 0))} {there}{advice}")
    return engine
