"""Generation with mlx-lm's functions, arguments and results, on penstock's scheduler."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.api import LLM
from penstock.engine.request import Chunk, Request
from penstock.engine.response import ResponseHandle, in_order_of_arrival
from penstock.engine.session import Session
from penstock.errors import DTypeError, InvalidArgument
from penstock.mlx_lm._arrays import integer, token_ids
from penstock.mlx_lm.generate_utils import BatchStats
from penstock.mlx_lm.models.base import llm_of
from penstock.mlx_lm.models.cache import PromptCache, checked_cache
from penstock.mlx_lm.sample_utils import LogitsProcessor, Sampler, SamplingPlan, sampling_plan
from penstock.mlx_lm.tokenizer_utils import TokenizerWrapper

__all__ = [
    "BatchResponse",
    "BatchStats",
    "GenerationResponse",
    "batch_generate",
    "generate",
    "generate_step",
    "stream_generate",
]

_WITHOUT_EFFECT = ("kv_group_size", "quantized_kv_start", "num_draft_tokens")  # without kv_bits and draft_model
_SIZES = ("prefill_step_size", "prefill_batch_size", "completion_batch_size")  # the scheduler has its own


@dataclass
class GenerationResponse:
    """A token of an answer and the text that came with it; numbers are those so far.

    logprobs: log-probabilities float32 [V] of the step, after logits processors; computed when they are first read.
    peak_memory in GB. finish_reason: "stop" or "length" with the last token, else None.
    """

    text: str
    token: int
    logprobs: np.ndarray
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None
    _compute: Callable[[], np.ndarray] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if callable(self.logprobs):
            self._compute = self.logprobs
            del self.logprobs

    def __getattr__(self, name: str) -> Any:
        if name == "logprobs" and self._compute is not None:
            self.logprobs, self._compute = self._compute(), None
            return self.logprobs
        raise AttributeError(f"'GenerationResponse' object has no attribute {name!r}")


@dataclass
class BatchResponse:
    """Answers to a batch of prompts, in their order; caches, token_ids and logprobs are None unless asked for."""

    texts: list[str]
    stats: BatchStats
    caches: list[PromptCache] | None
    token_ids: list[list[int]] | None = None
    logprobs: list[list[float]] | None = None


def generate_step(
    prompt: Any,
    model: Any,
    stream: None = None,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: PromptCache | None = None,
    prefill_step_size: int = 2048,
    kv_bits: None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    input_embeddings: None = None,
    seed: int | None = None,
) -> Iterator[tuple[int, np.ndarray]]:
    """Token ids that follow a prompt of ids, each with log-probabilities float32 [V], up to max_tokens (−1: no limit).

    No id ends it: the caller does. Options as of `stream_generate`.
    """
    llm = llm_of(model)
    options = {"sampler": sampler, "logits_processors": logits_processors, "max_kv_size": max_kv_size}
    options |= {"prompt_cache": prompt_cache, "prefill_step_size": prefill_step_size, "kv_bits": kv_bits, "seed": seed}
    options |= {"prompt_progress_callback": prompt_progress_callback, "input_embeddings": input_embeddings}
    _check_options("generate_step", {**options, "stream": stream})
    answer = _Answer(llm, token_ids(prompt, "prompt"), frozenset(), max_tokens, "copied", **_used(options))
    return ((chunk.token, answer.logprobs()) for chunk in answer)


def stream_generate(
    model: Any,
    tokenizer: Any,
    prompt: str | Any,
    max_tokens: int = 256,
    draft_model: None = None,
    stream: None = None,
    **kwargs: Any,
) -> Iterator[GenerationResponse]:
    """Continue a prompt, a `GenerationResponse` per token; the last one has a finish_reason.

    prompt: text, or token ids in a list or in an array of NumPy, mlx or another library. max_tokens −1: to the end of
    the context. Options: sampler (log-probabilities [1, V] → ids [1]) and logits_processors (tokens [n], logits [1, V]
    → logits) on NumPy arrays, prompt_cache, prompt_progress_callback (done, total), and penstock's seed: draws are
    random without one, and mlx's own seed has no effect. prefill_step_size has none either. Refused are draft_model,
    kv_bits, input_embeddings, stream, and a max_kv_size that the call would exceed. Raises InvalidArgument.
    """
    llm = llm_of(model)
    wanted = "copied" if llm.engine.device.host_memory else "lazy"
    return _streamed(llm, _wrapped(tokenizer), prompt, max_tokens, draft_model, stream, wanted, kwargs)


def generate(model: Any, tokenizer: Any, prompt: str | Any, verbose: bool = False, **kwargs: Any) -> str:
    """The continuation of a prompt as text; options as of `stream_generate`. verbose prints it as it comes."""
    llm, held = llm_of(model), _wrapped(tokenizer)
    options = dict(kwargs)
    limit, draft, stream = options.pop("max_tokens", 256), options.pop("draft_model", None), options.pop("stream", None)
    text, last = "", None
    if verbose:
        print("=" * 10)
    for last in _streamed(llm, held, prompt, limit, draft, stream, "none", options):
        if verbose:
            print(last.text, end="", flush=True)
        text += last.text
    if not verbose:
        return text
    print()
    print("=" * 10)
    if not text or last is None:
        print("No text generated for this prompt")
        return text
    print(f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec")
    print(f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec")
    print(f"Peak memory: {last.peak_memory:.3f} GB")
    return text


def batch_generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    prompt_caches: Sequence[PromptCache] | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    **kwargs: Any,
) -> BatchResponse:
    """Continue several prompts (lists or arrays of token ids), decoded together.

    prompt_caches: one per prompt, which stay as they are. max_tokens: for all, or one per prompt. Options: sampler,
    logits_processors, seed as of `stream_generate`; sizes of batches and steps have no effect, the scheduler has its
    own. Raises InvalidArgument.
    """
    llm, held = llm_of(model), _wrapped(tokenizer)
    _check_options("batch_generate", kwargs, ("sampler", "logits_processors", "max_kv_size", "seed", "stream"))
    ids = _prompts(prompts)
    limits = list(max_tokens) if isinstance(max_tokens, Sequence) else [max_tokens] * len(ids)
    _check_count("max_tokens", limits, len(ids))
    caches = [None] * len(ids) if prompt_caches is None else [checked_cache(cache) for cache in prompt_caches]
    _check_count("prompt_caches", caches, len(ids))
    for limit in limits:
        integer(limit, "max_tokens", 1)
    with contextlib.ExitStack() as opened:
        answers = [
            _Answer(
                llm,
                prompt,
                frozenset(held.eos_token_ids),
                limit,
                "chosen" if return_logprobs else "none",
                session=_forked(llm, cache, return_prompt_caches),
                **_used(kwargs),
            )
            for prompt, limit, cache in zip(ids, limits, caches, strict=True)
        ]
        for answer in answers:
            opened.callback(answer.end, keep=return_prompt_caches)
        return _batch(llm, held, answers, verbose, return_prompt_caches, return_token_ids, return_logprobs)


def _batch(
    llm: LLM,
    tokenizer: TokenizerWrapper,
    answers: Sequence[_Answer],
    verbose: bool,
    with_caches: bool,
    with_tokens: bool,
    with_logprobs: bool,
) -> BatchResponse:
    before, began = llm.scheduler.metrics(), time.perf_counter()
    tokens: list[list[int]] = [[] for _ in answers]
    logprobs: list[list[float]] = [[] for _ in answers]
    done = 0
    if verbose:
        print(f"[batch_generate] {done}/{len(answers)} answers ...", end="\r")
    handles = [answer.begin() for answer in answers]
    for number, chunk in in_order_of_arrival(handles):
        chosen = answers[number].chosen(chunk) if with_logprobs else 0.0
        if chunk.finish_reason != "stop":
            tokens[number].append(chunk.token)
            logprobs[number].append(chosen)
        if chunk.finish_reason is not None:
            done += 1
            if verbose:
                print(f"[batch_generate] {done}/{len(answers)} answers ...", end="\r")
    after = llm.scheduler.metrics()
    stats = BatchStats(
        prompt_tokens=sum(len(answer.prompt) for answer in answers),
        prompt_time=after.prompt_seconds - before.prompt_seconds,
        generation_tokens=sum(len(handle.tokens) for handle in handles),
        generation_steps=after.decode_steps - before.decode_steps,
        decode_time=after.decode_seconds - before.decode_seconds,
        wall_time=time.perf_counter() - began,
        peak_memory=llm.engine.device.peak_memory() / 1e9,
    )
    if verbose:
        print(f"[batch_generate] {done}/{len(answers)} answers    ")
        print(f"[batch_generate] Prompt: {stats.prompt_tokens} tokens, {stats.prompt_tps:.3f} tokens-per-sec")
        print(
            f"[batch_generate] Generation: {stats.generation_tokens} tokens, {stats.generation_tps:.3f} tokens-per-sec"
        )
        print(f"[batch_generate] Peak memory: {stats.peak_memory:.3f} GB")
    return BatchResponse(
        [tokenizer.decode(one) for one in tokens],
        stats,
        [PromptCache.of_session(answer.held()) for answer in answers] if with_caches else None,
        tokens if with_tokens else None,
        logprobs if with_logprobs else None,
    )


def _streamed(
    llm: LLM,
    tokenizer: TokenizerWrapper,
    prompt: Any,
    max_tokens: int,
    draft_model: Any,
    stream: Any,
    wanted: str,
    options: dict[str, Any],
) -> Iterator[GenerationResponse]:
    """Check everything now, and compute with the first response."""
    _check_options("generate", {**options, "draft_model": draft_model, "stream": stream})
    if isinstance(prompt, str):
        bos = getattr(tokenizer, "bos_token", None)
        ids = tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos))
    else:
        ids = token_ids(prompt, "prompt")
    answer = _Answer(llm, ids, frozenset(tokenizer.eos_token_ids), max_tokens, wanted, **_used(options))
    return _responses(llm, tokenizer, answer)


def _responses(llm: LLM, tokenizer: TokenizerWrapper, answer: _Answer) -> Iterator[GenerationResponse]:
    detokenizer = tokenizer.detokenizer
    for count, chunk in enumerate(answer, start=1):
        if chunk.token not in answer.eos:
            detokenizer.add_token(chunk.token)
        if chunk.finish_reason is not None:
            detokenizer.finalize()
        timings = answer.handle.timings
        yield GenerationResponse(
            text=detokenizer.last_segment,
            token=chunk.token,
            logprobs=answer.lazy_logprobs(),  # type: ignore[arg-type]
            from_draft=False,
            prompt_tokens=len(answer.prompt),
            prompt_tps=timings.prompt_tps,
            generation_tokens=count,
            generation_tps=timings.generation_tps,
            peak_memory=llm.engine.device.peak_memory() / 1e9,
            finish_reason=chunk.finish_reason,
        )


class _Answer:
    """One request: checked when it is made, submitted by `begin` or by iteration, which gives its chunks.

    wanted says which log-probabilities will be read: "none"; "chosen", of the tokens; "copied", of all ids; "lazy", of
    all ids, but seldom: logits stay on the device, and those that are asked for are computed again.
    """

    def __init__(
        self,
        llm: LLM,
        prompt: list[int],
        eos: frozenset[int],
        max_tokens: int,
        wanted: str,
        *,
        session: Session | None = None,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] | None = None,
        max_kv_size: int | None = None,
        prompt_cache: PromptCache | None = None,
        prompt_progress_callback: Callable[[int, int], None] | None = None,
        seed: int | None = None,
    ) -> None:
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int | np.integer) or max_tokens in (0, None):
            raise InvalidArgument(f"max_tokens is {max_tokens!r:.40}, expected a number of tokens, or −1 for no limit")
        if not prompt:
            raise InvalidArgument("prompt has no tokens, expected at least one")
        self.llm, self.prompt, self.eos = llm, prompt, eos
        cache = checked_cache(prompt_cache)
        self._session = session if cache is None else cache.session_of(llm)
        self._before = [] if self._session is None else list(self._session.tokens)
        limit = int(max_tokens) if max_tokens > 0 else llm.max_context
        self._check_size(limit, max_kv_size, cache)
        self._plan = sampling_plan(
            sampler,
            logits_processors,
            prompt=len(prompt),
            held=len(self._before),
            vocab_size=llm.config.vocab_size,
            seed=seed,
        )
        hooked = bool(self._plan.processors or self._plan.cut or self._plan.sampler)
        copied = wanted == "copied" or (hooked and wanted != "none")
        self._logits: dict[int, np.ndarray] | None = {} if copied else None  # by the number of tokens before them
        self._progress = prompt_progress_callback
        self._shadow: Session | None = None
        self._handle: ResponseHandle | None = None
        self._count = 0
        self.request = self._made(limit, wanted)

    def _check_size(self, limit: int, max_kv_size: int | None, cache: PromptCache | None) -> None:
        """Where mlx-lm would drop old positions, penstock has no such cache."""
        need = len(self._before) + len(self.prompt) + min(limit, self.llm.max_context)
        for size in (max_kv_size, None if cache is None else cache.max_size):
            if size is not None and integer(size, "max_kv_size", 1) < need:
                raise InvalidArgument(
                    f"max_kv_size is {size}, expected None or at least {need} (prompt and max_tokens): penstock has no "
                    "cache that drops old positions; give fewer max_tokens, or load with max_context"
                )

    def _made(self, limit: int, wanted: str) -> Request:
        options = dict(self._plan.options)
        processors = [self._seeing_own(processor) for processor in self._plan.processors]
        if self._logits is not None:
            processors.append(self._capture)
        if self._plan.cut is not None:
            processors.append(self._cut(self._plan, options["seed"]))
        if processors:
            options["logits_processors"] = processors
        if self._plan.sampler is not None:
            options["sampler"] = self._plan.sampler
        if wanted == "chosen" and self._logits is None:
            options["logprobs"] = True
        make = self.llm.request if self._session is None else self._session.request
        return replace(make(self.prompt, limit, (), **options), eos=self.eos)

    def _seeing_own(self, processor: LogitsProcessor) -> LogitsProcessor:
        """A processor that gets the tokens of this call alone, as mlx-lm gives them."""
        start = len(self._before)
        return processor if not start else lambda tokens, logits: processor(tokens[start:], logits)

    def _capture(self, tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        assert self._logits is not None
        self._logits[len(tokens)] = np.array(logits[0])
        return logits

    def _cut(self, plan: SamplingPlan, seed: int | None) -> LogitsProcessor:
        rng, cut = np.random.default_rng(seed), plan.cut
        assert cut is not None
        return lambda tokens, logits: cut.cut(_log_softmax(np.asarray(logits)), rng)

    # -- running -----------------------------------------------------------------------------------------------------

    @property
    def handle(self) -> ResponseHandle:
        assert self._handle is not None
        return self._handle

    def begin(self) -> ResponseHandle:
        """Submit it, for one who reads the handle and calls `end`."""
        progress = self._report if self._progress is not None else None
        if self._progress is not None:
            self._done = 0
            self._progress(0, len(self.prompt))
        if self._session is None:
            self._handle = self.llm.scheduler.submit(self.request, buffer=1, progress=progress)
        elif self._session.tokens != self._before:
            raise InvalidArgument("prompt_cache: it was used since this call was made, expected one call at a time")
        else:
            self._handle = self._session.submit(self.request, progress)
        return self._handle

    def _report(self, count: int) -> None:
        """Chunks of the prompt: all but its last token, which belongs to the first one of the answer."""
        self._done += count
        if self._progress is not None and self._done < len(self.prompt):
            self._progress(self._done, len(self.prompt))

    def __iter__(self) -> Iterator[Chunk]:
        handle = self.begin()
        try:
            for chunk in handle if self._session is None else self._session.read_from(handle):
                if self._count == 0 and self._progress is not None:
                    self._progress(len(self.prompt), len(self.prompt))
                self._count += 1
                yield chunk
        finally:
            self.end(keep=True)

    def end(self, keep: bool) -> None:
        """Nothing more is read. keep: the session, with what was; one of a batch that nobody wants is closed."""
        if self._handle is not None:
            self._handle.cancel()
            self.llm.add_timings([self._handle.timings])
        if self._session is not None and not keep:
            self._session.close()
        if self._shadow is not None:
            self._shadow.close()
            self._shadow = None

    def held(self) -> Session:
        """The session of an answer whose handle was read to its end."""
        assert self._session is not None
        self._session.hold(self.handle)
        return self._session

    # -- log-probabilities -------------------------------------------------------------------------------------------

    def logprobs(self) -> np.ndarray:
        """Of the token that was read last, float32 [V], after all processors."""
        return self.lazy_logprobs()()

    def lazy_logprobs(self) -> Callable[[], np.ndarray]:
        """Computes them when it is called, also later."""
        written, start = self.handle.tokens, len(self._before)
        count = len(written) - 1
        captured = None if self._logits is None else self._logits.pop(start + len(self.prompt) + count)

        def compute() -> np.ndarray:
            tokens = [*self._before, *self.prompt, *written[:count]]
            row = self._computed_again(tokens) if captured is None else captured
            logits = row[None]
            for processor in self._plan.edits:
                logits = processor(np.array(tokens[start:], np.int32), logits)
            return _log_softmax(np.asarray(logits))[0]

        return compute

    def chosen(self, chunk: Chunk) -> float:
        """The log-probability of a token that has just been read."""
        if chunk.logprob is not None:
            return chunk.logprob
        return float(self.logprobs()[chunk.token])

    def _computed_again(self, tokens: list[int]) -> np.ndarray:
        """Logits that a device has kept for itself: a session follows the answer, one token per call."""
        if self._shadow is None:
            self._shadow = self.llm.session()
        self._shadow.advance(tokens)
        assert self._shadow.logits is not None
        return self._shadow.logits


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """float32, of rows [B, V]."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return (x - np.log(np.exp(x).sum(axis=-1, keepdims=True))).astype(np.float32)


def _wrapped(tokenizer: Any) -> TokenizerWrapper:
    return tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)


def _forked(llm: LLM, cache: PromptCache | None, needed: bool) -> Session | None:
    """A session that goes on from a cache and leaves it as it is; a new one if the caller wants to have it."""
    if cache is None:
        return llm.session() if needed else None
    return cache.session_of(llm).fork()


def _prompts(prompts: Any) -> list[list[int]]:
    if isinstance(prompts, str) or (isinstance(prompts, Sequence) and any(isinstance(one, str) for one in prompts)):
        raise DTypeError("prompts holds text, expected token ids: tokenizer.encode(text) gives them")
    return [token_ids(prompt, f"prompts[{n}]") for n, prompt in enumerate(prompts)]


def _check_count(name: str, values: Sequence[Any], count: int) -> None:
    if len(values) != count:
        raise InvalidArgument(f"{name} has {len(values)} values, expected {count}: one per prompt")


_OPTIONS = ("sampler", "logits_processors", "max_kv_size", "prompt_cache", "prompt_progress_callback", "seed")
_REFUSED = {
    "draft_model": "penstock.load takes the folder of one",
    "kv_bits": "penstock keeps keys and values in the dtype of the model",
    "input_embeddings": "penstock takes token ids",
    "stream": "penstock has no streams of mlx",
}


def _check_options(function: str, options: dict[str, Any], known: Sequence[str] = _OPTIONS) -> None:
    """Raise InvalidArgument for features that penstock lacks, TypeError for names that mlx-lm does not have either."""
    for name, value in options.items():
        if name in _SIZES:
            integer(value, name, 1)
        elif name in _REFUSED:
            if value is not None:
                raise InvalidArgument(f"{function}: {name} is given, expected None: {_REFUSED[name]}")
        elif name not in known and name not in _WITHOUT_EFFECT:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def _used(options: dict[str, Any]) -> dict[str, Any]:
    """Those that say something about the answer."""
    return {name: value for name, value in options.items() if name in _OPTIONS}
