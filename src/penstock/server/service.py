"""The model behind the endpoints: loading it, what it is called, its defaults, and requests made ready for it."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from penstock.engine.metrics import SchedulerMetrics
from penstock.engine.reading import Reading
from penstock.engine.remote import RemoteScheduler
from penstock.engine.replicas import Replicas
from penstock.engine.request import RequestLimits, reading_request, token_array
from penstock.engine.response import ResponseHandle
from penstock.engine.scheduler import Scheduler
from penstock.engine.thread import SchedulerThread
from penstock.errors import CheckpointError, InvalidArgument, PenstockError, TooManyTokens
from penstock.server import schema
from penstock.server.answer import AskedOfPrompt
from penstock.server.errors import ApiError, as_api_error, one_line, unavailable
from penstock.server.latency import Latencies
from penstock.server.limits import Limits
from penstock.server.model_info import ServedModel
from penstock.text.control_tokens import ChatText
from penstock.text.formats import FORMATS, format_of, in_reasoning, parser_for, shown_tokens, with_arguments
from penstock.text.formats.base import Parser
from penstock.text.generic_tools import FORMAT as GENERIC_TOOLS
from penstock.text.generic_tools import lacks_tools, with_tools
from penstock.text.grammar import Grammar, grammar_for, grammar_for_tools

if TYPE_CHECKING:
    from penstock.api import LLM
    from penstock.engine.request import Request, Timings

log = logging.getLogger("penstock.server")

_RESERVED = ("messages", "tools", "add_generation_prompt")  # variables of a template that the request has fields for
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class AnyScheduler(Protocol):
    """What the endpoints need of a scheduler, here or in another process."""

    @property
    def max_sequences(self) -> int: ...

    def request(self, prompt: Any, max_tokens: int = 256, stop: Any = (), **more: Any) -> Request: ...
    def submit(self, request: Request, client: str | None = None) -> ResponseHandle: ...
    def metrics(self) -> SchedulerMetrics: ...
    def close(self, deadline: float | None = None) -> None: ...


@dataclass(frozen=True)
class Options:
    """How a server answers. names: what the model is called, the first one is its id in /v1/models; "*" among them:
    whatever a request calls it.

    defaults: of the sampling options that a request leaves out. max_tokens: of an answer if the request sets none.
    template_variables: for every chat. split_reasoning: False leaves reasoning in the content.
    allow_special_in_messages: control tokens that messages spell out reach the model as such. pooling: of embeddings
    (see `LLM.embed`).
    """

    names: tuple[str, ...] = ("demo",)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = 512
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    split_reasoning: bool = True
    allow_special_in_messages: bool = False
    pooling: str = "mean"
    ping_seconds: float = 30.0
    parallel: int | None = None
    prefix_cache: bool = True
    prefix_memory: int | None = None
    gpu_memory_utilization: float | None = None
    page: bool = True
    metrics: bool = True
    root_path: str = ""  # below which a proxy has the server; taken off where the proxy left it
    limits: Limits = field(default_factory=Limits)


@dataclass
class Work:
    """A request that is ready to run: one engine request and one parser per answer."""

    requests: list[Request]
    parsers: list[Parser | None]
    one_call: bool = False  # end after the first tool call
    asked_of_prompts: list[AskedOfPrompt | None] | None = None  # by answer


class Service:
    """One model and its scheduler, from the moment the server listens. Made by `load` in a thread of its own."""

    def __init__(self, options: Options, make_scheduler: Callable[..., AnyScheduler] | None = None) -> None:
        """make_scheduler: gets the model, this service and options of a scheduler; by default it is in this process."""
        self.options = options
        self._make_scheduler = make_scheduler or start_scheduler
        self.started = int(time.time())
        self.progress = 0.0
        self.failure: str | None = None  # why no request can be answered
        self.stop: Callable[[], None] = lambda: None  # ends the server
        self.latencies = Latencies()
        self._damage: CheckpointError | None = None
        self._llm: ServedModel | None = None
        self._scheduler: AnyScheduler | None = None
        self._format = "plain"
        self._closing = False
        self._lock = threading.Lock()

    def load(self, loader: Callable[[Callable[[float], None]], tuple[ServedModel, Mapping[str, Any]]]) -> None:
        """Load the model and run one token. `loader` gets a function to report progress to, from 0 to 1, and returns
        the model and defaults of sampling options. A failure is kept for /health, not raised.
        """
        try:
            llm, defaults = loader(self.report)
            self.options = replace(self.options, defaults={**defaults, **self.options.defaults})
            options, self._format = self.options, format_of(llm.tokenizer)
            scheduler = self._make_scheduler(
                llm,
                self,
                max_sequences=options.parallel,
                queue=options.limits.queue,
                prefix_cache=options.prefix_cache,
                prefix_memory=options.prefix_memory,
                gpu_memory_utilization=options.gpu_memory_utilization,
                read_timeout=options.limits.write_seconds,
            )
        except Exception as error:
            self.failure = one_line(error) if isinstance(error, PenstockError | OSError) else repr(error)
            if not isinstance(error, PenstockError | OSError):
                log.error("the model could not be loaded", exc_info=error)
            return
        with self._lock:
            self._llm, self._scheduler, self.progress = llm, scheduler, 1.0
            closing = self._closing
        if closing:
            scheduler.close(0)

    def weights_failed(self, error: CheckpointError) -> None:
        """The weights cannot be read any more. It stays so: only loading them again would tell what they are now."""
        log.error("no more requests are answered: %s", one_line(error))
        self.failure, self._damage = one_line(error), error

    def record(self, timings: Sequence[Timings]) -> None:
        """Requests have ended; the one that tries the model out is none."""
        if self._scheduler is not None:
            self.latencies.add(timings)

    def report(self, share: float) -> None:
        self.progress = min(0.99, max(self.progress, share))

    def close(self, deadline: float) -> None:
        """Take no more requests; those under way may finish within `deadline` seconds."""
        with self._lock:
            self._closing, scheduler = True, self._scheduler
        if scheduler is not None:
            scheduler.close(deadline)

    # -- what there is -----------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self._scheduler is not None and self.failure is None and self._without_engine is None

    @property
    def _without_engine(self) -> str | None:
        """Why a scheduler that is there takes no requests for a while: its process has ended, or all have."""
        return self._scheduler.unavailable if isinstance(self._scheduler, RemoteScheduler | Replicas) else None

    @property
    def replicas(self) -> Replicas | None:
        """The engines, where there are several."""
        return self._scheduler if isinstance(self._scheduler, Replicas) else None

    def give_up(self, reason: str) -> None:
        """There will be no engine any more."""
        log.error("no more requests are answered: %s", reason)
        self.failure = reason
        self.stop()

    @property
    def closing(self) -> bool:
        return self._closing

    @property
    def scheduler(self) -> AnyScheduler:
        """Raises ApiError 503 while the model is loading, if it could not be loaded, once its weights cannot be read,
        while its process is started again and when the server ends.
        """
        if self._closing or self._scheduler is None or not self.ready:
            raise self.unavailable()
        return self._scheduler

    @property
    def llm(self) -> ServedModel:
        """Raises as `scheduler` does."""
        if self._closing or self._llm is None or self.failure is not None:
            raise self.unavailable()
        return self._llm

    @property
    def loaded(self) -> tuple[ServedModel, AnyScheduler] | None:
        return None if self._llm is None or self._scheduler is None else (self._llm, self._scheduler)

    def unavailable(self) -> ApiError:
        """Why no request is taken."""
        if self._closing:
            return unavailable("the server is shutting down", "shutting_down")
        if self._damage is not None:
            return as_api_error(self._damage)
        if self.failure is not None:
            return unavailable(f"the model could not be loaded: {self.failure}", "load_failed")
        if self._without_engine is not None:
            return unavailable(self._without_engine, "engine_died", retry_after=1)
        return unavailable(f"the model is being loaded ({self.progress:.0%})", "loading", retry_after=1)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Those that /v1/models lists."""
        return tuple(name for name in self.options.names if name != "*") or ("demo",)

    def check_model(self, name: str | None) -> None:
        """A model is only ever named; what a client sends is never looked for on disk or on the hub."""
        if name is not None and name not in self.options.names and "*" not in self.options.names:
            shown = name if len(name) <= 80 else f"{name[:77]}..."
            known = ", ".join(self.names)
            raise ApiError(404, f"model is {shown!r}, expected {known}", param="model", code="model_not_found")

    # -- making requests ready; these run in threads -------------------------------------------------------------------

    def chat(
        self,
        request: schema.Request,
        messages: Sequence[schema.Message],
        *,
        limit: int | None,
        tools: list[dict[str, Any]],
        choice: Any,
        parallel: bool,
        response_format: dict[str, Any] | None,
        effort: str | None = None,
        logprobs: int | None = None,
        n: int = 1,
        add_generation_prompt: bool = True,
        continued: bool = False,
        field: str = "messages",
    ) -> Work:
        """A conversation, which the request has in `field`. `choice` is the tool_choice as OpenAI's chat completions
        write it.
        """
        scheduler, tokenizer = self.scheduler, self.llm.tokenizer
        self.check_model(request.model)
        if choice == "none":
            tools = []
        with self._room(field) as most:
            for message in messages:  # a prompt holds them whole: what is too long is not even rendered
                if message.role != "assistant":
                    tokenizer.check_length(message.text or "", most)
            chat = self.prompt(messages, tools, request.chat_template_kwargs, effort, add_generation_prompt, continued)
            ids = tokenizer.encode_chat(chat, limit=most)
        self._check_ids(ids, field)
        thinks_on = continued and self._begun_thought(messages) is not None
        inside = self.options.split_reasoning and (thinks_on or in_reasoning(self._format, chat.text))
        own = GENERIC_TOOLS if tools and self._generic_tools else self._format
        format = own if self.options.split_reasoning or tools else "plain"
        grammar = self._grammar(response_format, tools, choice, format=format, in_reasoning=inside, parallel=parallel)
        options = self._options(request, limit, logprobs, shown_tokens(own, bool(tools)))
        requests = self._requests(scheduler, [ids], n, options, grammar)
        reads = FORMATS[format].reasoning is not None or (bool(tools) and FORMATS[format].call is not None)
        parsers = [parser_for(format, tools or None, in_reasoning=inside) if reads else None for _ in requests]
        return Work(requests, parsers, one_call=bool(tools) and not parallel)

    def completion(self, request: schema.CompletionRequest) -> Work:
        """Prompts as they are."""
        scheduler, llm = self.scheduler, self.llm
        self.check_model(request.model)
        prompts: list[list[int]] = []
        for n, prompt in enumerate(request.prompt):
            param = "prompt" if len(request.prompt) == 1 else f"prompt[{n}]"
            with self._room(param, request.max_tokens != 0) as most:
                ids = llm.tokenizer.encode(prompt, limit=most) if isinstance(prompt, str) else prompt
                if len(ids) > most:
                    raise TooManyTokens(f"{param} has {len(ids)} tokens, expected at most {most}")
            self._check_given(ids, param)
            prompts.append(ids)
        grammar = self._grammar(response_format_of(request))
        options = self._options(request, request.max_tokens, request.logprobs, ())
        reading = _reading(request)
        if reading is not None:
            options["reading"] = reading
        n = request.n or 1
        requests = self._requests(scheduler, prompts, n, options, grammar)
        asked = [self._asked_of(request, given, ids) for given, ids in zip(request.prompt, prompts, strict=True)]
        return Work(requests, [None] * len(requests), asked_of_prompts=[one for one in asked for _ in range(n)])

    def _asked_of(self, request: schema.CompletionRequest, given: Any, ids: list[int]) -> AskedOfPrompt | None:
        if not request.echo and _reading(request) is None:
            return None
        text = None
        if request.echo:
            whole = self.llm.tokenizer.decode
            text = given if isinstance(given, str) else whole(ids, skip_special_tokens=False)
        return AskedOfPrompt(text, request.logprobs if request.echo else None, request.prompt_logprobs)

    def embeddings(self, request: schema.EmbeddingRequest) -> list[Request]:
        """One request for each text, which ends with it."""
        self.check_model(request.model)
        llm, context = self.llm, self.llm.max_context
        limits, reading = RequestLimits(context, llm.config.vocab_size), Reading(self.options.pooling)
        made = []
        for n, text in enumerate(request.input):
            param = "input" if len(request.input) == 1 else f"input[{n}]"
            with too_long(param, f"more than {context} tokens, the context"):
                ids = llm.tokenizer.encode(text, limit=context) if isinstance(text, str) else text
                if len(ids) > context:
                    raise TooManyTokens(param)
            self._check_given(ids, param)
            made.append(reading_request(limits, ids, reading))
        return made

    def prompt(
        self,
        messages: Sequence[schema.Message],
        tools: list[dict[str, Any]],
        variables: Mapping[str, Any] | None,
        effort: str | None = None,
        add_generation_prompt: bool = True,
        continued: bool = False,
    ) -> ChatText:
        """A conversation as the model's template writes it. `continued`: the last message goes on in the answer, or the
        reasoning of one that has got no further.
        """
        for name in _RESERVED:
            if name in (variables or {}):
                param = "chat_template_kwargs"
                raise ApiError(400, f"{param} has {name}, which is a field of its own", param=param)
        effort_variables = {} if effort is None else FORMATS[self._format].effort(effort)
        merged = {**self.options.template_variables, **effort_variables, **(variables or {})}
        try:
            plain = with_arguments([message.plain() for message in messages], self._format)
        except InvalidArgument as error:
            raise ApiError(400, one_line(error), param="messages", code="invalid_value") from None
        if self._generic_tools:
            plain, tools = with_tools(plain, tools, self.llm.tokenizer.chat_template or ""), []
        last, thought = plain[-1]["content"].rstrip(), self._begun_thought(messages) if continued else None
        if thought is not None:
            plain = plain[:-1]
        elif continued and (plain[-1]["role"] != "assistant" or not last):
            raise ApiError(400, "continue_final_message needs a last message of the assistant", param="messages")
        add = (add_generation_prompt and not continued) or thought is not None
        try:
            chat = self.llm.tokenizer.chat_text(
                plain, tools or None, add, merged, self.options.allow_special_in_messages
            )
        except (InvalidArgument, CheckpointError) as error:
            _, place, reason = one_line(error).rpartition("chat template")  # what stands before it are folders
            status = 400 if isinstance(error, InvalidArgument) else 500
            raise ApiError(status, place + reason, param="messages", code="chat_template") from None
        if thought is not None:
            known = FORMATS[self._format]
            assert known.reasoning is not None
            opening = "" if in_reasoning(self._format, chat.text) else known.reasoning[0] + (known.label or "\n")
            return replace(chat, marked=chat.marked + opening + thought)
        if not continued:
            return chat
        before, found, _ = chat.marked.rpartition(last)
        if not found:
            raise ApiError(400, "the chat template does not show the last message as it is", param="messages")
        return replace(chat, marked=before + last)

    def _begun_thought(self, messages: Sequence[schema.Message]) -> str | None:
        """The reasoning of a last message that has nothing else, where the model's format knows of reasoning."""
        last = messages[-1]
        if last.role != "assistant" or (last.text or "").strip() or last.tool_calls:
            return None
        thought = (last.reasoning_content or last.reasoning or "").rstrip()
        return thought if thought and FORMATS[self._format].reasoning is not None else None

    @property
    def _generic_tools(self) -> bool:
        """Whether tools are written for the model in a form that is not its template's."""
        return self._format == "plain" and lacks_tools(self.llm.tokenizer)

    def submit(self, work: Work, client: str) -> list[ResponseHandle]:
        """All answers of a client's request, or none. Raises QueueFull."""
        handles: list[ResponseHandle] = []
        try:
            for request in work.requests:
                handles.append(self.scheduler.submit(request, client))
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return handles

    def _grammar(
        self,
        response_format: dict[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] = (),
        choice: Any = None,
        *,
        format: str = "plain",
        in_reasoning: bool = False,
        parallel: bool = True,
    ) -> Grammar | None:
        """What holds an answer to a JSON schema or to a call, if the request asks for that."""
        tokenizer, vocab = self.llm.tokenizer, self.llm.config.vocab_size
        forced = choice not in (None, "none", "auto")
        if response_format == {"type": "text"}:
            response_format = None
        if forced and response_format is not None:
            raise ApiError(400, "response_format and a forced tool call exclude each other", param="response_format")
        try:
            if forced:
                return grammar_for_tools(
                    tools, choice, format, tokenizer, vocab, in_reasoning=in_reasoning, parallel=parallel
                )
            if response_format is not None:
                return grammar_for(
                    response_format,
                    tokenizer,
                    vocab,
                    format=format,
                    in_reasoning=in_reasoning,
                    tools=tools,
                    parallel=parallel,
                )
        except InvalidArgument as error:
            param = "tool_choice" if forced else "response_format"
            raise ApiError(400, one_line(error), param=param, code="invalid_value") from None
        return None

    def _check_given(self, ids: Sequence[int], param: str) -> None:
        """Refuse a text without tokens, and ids that the model has no embeddings for."""
        if not ids:
            raise ApiError(400, f"{param} has no tokens, expected at least one", param=param, code="invalid_value")
        self._check_ids(ids, param)

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        """Refuse ids that the model has no embeddings for."""
        try:
            token_array(ids, self.llm.config.vocab_size, param, self.llm.tokenizer)
        except InvalidArgument as error:
            raise ApiError(400, one_line(error), param=param, code="invalid_value") from None

    @contextlib.contextmanager
    def _room(self, param: str, answers: bool = True) -> Iterator[int]:
        """The most tokens that a prompt may have, with room for an answer if there is to be one; TooManyTokens becomes
        an ApiError about the field.
        """
        limit = self.llm.max_context + (not answers)
        with too_long(param, f"{limit} tokens or more, the context, expected fewer to leave room for an answer"):
            yield limit - 1

    def _options(
        self, request: schema.Request, limit: int | None, logprobs: int | None, shown: Sequence[str]
    ) -> dict[str, Any]:
        """Options of an engine request."""
        most = self.options.limits.tokens
        tokens = self.options.max_tokens if limit is None else limit
        given = {name: getattr(request, name) for name in _SAMPLING if getattr(request, name) is not None}
        options = {**self.options.defaults, **given, "logprobs": logprobs, "stop": request.stop or ()}
        options["max_tokens"] = tokens if most is None else min(tokens, most)
        for name in ("presence_penalty", "frequency_penalty", "speculate", "num_draft_tokens"):
            if getattr(request, name) is not None:
                options[name] = getattr(request, name)
        context = request.repetition_context
        if context == 0:
            options["repetition_penalty"] = 1.0
        elif context is not None and context > 0:
            options["repetition_context"] = context
        bias = dict(request.logit_bias or {})
        self._check_ids(list(bias), "logit_bias")
        self._check_ids(request.stop_token_ids or [], "stop_token_ids")
        if request.ignore_eos:
            vocab = self.llm.config.vocab_size
            bias |= {token: -1e30 for token in self.llm.tokenizer.eos_ids if token < vocab}
        if bias:
            options["logit_bias"] = bias
        if isinstance(request, schema.Generating) and request.expert_heat:
            options["expert_heat"] = True
        if request.stop_token_ids:
            options["extra_eos"] = request.stop_token_ids
        if shown:
            options["shown"] = shown
        options["seed"] = None if request.seed in (None, -1) else request.seed
        return options

    def _requests(
        self,
        scheduler: AnyScheduler,
        prompts: Sequence[Sequence[int]],
        n: int,
        options: dict[str, Any],
        grammar: Grammar | None,
    ) -> list[Request]:
        """n answers to each prompt; with a seed the i-th one has seed + i."""
        most = self.options.limits.choices
        if n * len(prompts) > most:
            raise ApiError(400, f"{n * len(prompts)} answers are asked for, expected at most {most}", param="n")
        seed, made = options["seed"], []
        for ids in prompts:
            for i in range(n):
                own = {} if seed is None else {"seed": (seed + i) % 2**64}
                copied = None if grammar is None else grammar.copy()
                made.append(scheduler.request(ids, grammar=copied, **(options | own)))
        return made


def _reading(request: schema.CompletionRequest) -> Reading | None:
    """What has to be known of the prompts; also where they are all there is to compute."""
    tops = [request.logprobs if request.echo else None, request.prompt_logprobs, 0 if request.max_tokens == 0 else None]
    known = [top for top in tops if top is not None]
    return Reading("logprobs", max(known)) if known else None


@contextlib.contextmanager
def too_long(param: str, found: str) -> Iterator[None]:
    """TooManyTokens becomes an ApiError about the field, which has what was `found`."""
    try:
        yield
    except TooManyTokens:
        raise ApiError(400, f"{param} has {found}", param=param, code="context_length_exceeded") from None


def response_format_of(request: schema.Generating) -> dict[str, Any] | None:
    """The response_format of a request, or what its short form stands for."""
    if request.response_format is not None:
        return request.response_format.model_dump(by_alias=True, exclude_none=True)
    if request.json_schema is not None:
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": request.json_schema}}
    return None


def generation_defaults(folder: Path | None) -> dict[str, Any]:
    """Sampling defaults of a model folder's generation_config.json; greedy where it says nothing of a temperature.

    Raises InvalidArgument, naming the file, for values that cannot be.
    """
    from penstock.engine.sampling import SamplingParams

    path = None if folder is None else folder / "generation_config.json"
    if path is None or not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path}: cannot be read: {one_line(error)}") from None
    if not isinstance(found, dict) or found.get("do_sample") is False:
        return {}
    chosen = {name: found[name] for name in _SAMPLING if found.get(name) is not None}
    if found.get("do_sample") and "temperature" not in chosen:
        chosen["temperature"] = 1.0
    try:
        SamplingParams(**chosen)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from None
    return chosen


def start_scheduler(llm: ServedModel, service: Service, **options: Any) -> Scheduler:
    """A scheduler with a thread in this process. All programs are there, and one token has been computed: what was not
    compiled yet is compiled.
    """
    model = cast("LLM", llm)

    def record(timings: Sequence[Timings]) -> None:
        model.add_timings(timings)
        service.record(timings)

    scheduler = Scheduler(model, failed=service.weights_failed, record=record, **options)
    model.engine.prepare()
    scheduler.submit(scheduler.request([0], max_tokens=1)).result()
    return SchedulerThread(scheduler).scheduler
