"""The endpoints: paths, what stands behind them, and the ASGI application of all together."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from penstock._version import __version__
from penstock.engine.response import ResponseHandle
from penstock.errors import TooManyTokens, no_panic
from penstock.server import embeddings, messages, responses, schema
from penstock.server.answer import Answer
from penstock.server.body import Bodies
from penstock.server.chat import ChatShape, TextShape, failed
from penstock.server.errors import ApiError, dumps
from penstock.server.guard import Access, Guard
from penstock.server.metrics import CONTENT_TYPE, Metrics
from penstock.server.model_info import info_of
from penstock.server.openapi import described
from penstock.server.service import Service, Work, response_format_of
from penstock.server.static import FILES, page_file
from penstock.server.stream import Events, EventStream, awaited
from penstock.text.token_texts import TokenTexts

_T = TypeVar("_T")
_Model = TypeVar("_Model", bound=BaseModel)

_LONG = 1 << 16  # bytes of a body whose preparation other requests should not wait for
_STEP = 1 << 12  # tokens of an answer that are written at a time

FINGERPRINT = f"penstock-{__version__}"


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


class Application:
    """All endpoints of one service, as an ASGI application with what guards it."""

    def __init__(self, service: Service, access: Access) -> None:
        self.service = service
        self._options = service.options
        self._bodies = Bodies(self._options.limits)
        # Parsing, templates and tokenizers take a while for long prompts; the event loop goes on meanwhile, and so do
        # short requests, whose threads are others. Half of the cores are left to the model.
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="penstock-request")
        half = max(1, (os.cpu_count() or 1) // 2)
        self._long_threads = ThreadPoolExecutor(half, thread_name_prefix="penstock-long-request")
        routes = self._routes()
        self.metrics = Metrics(service, (route.path for route in routes))
        # The bare router: starlette's application would answer what goes wrong itself, in a shape of its own.
        router = Router(routes, redirect_slashes=False, lifespan=self._lifespan)
        self._app = Guard(router, access, self._options.limits, self.metrics.count)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = self._options.root_path
        if root and scope["type"] == "http":
            if scope["path"] == root:  # names on the page are relative to the folder
                await Response(status_code=307, headers={"location": f"{root}/"})(scope, receive, send)
                return
            if scope["path"].startswith(f"{root}/"):
                scope = {**scope, "path": scope["path"][len(root) :]}
        scope["app"] = self  # then the router raises what it cannot route
        await self._app(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        yield
        for threads in (self._threads, self._long_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self._bodies.close()

    def _routes(self) -> list[Route]:
        get: dict[str, Callable[[Request], Awaitable[Any]]] = {
            "/health": self._health,
            "/v1/health": self._health,
            "/v1/models": self._models,
            "/models": self._models,
            "/v1/models/{name:path}": self._one_model,
            "/props": self._props,
            "/tokenizer_info": self._tokenizer_info,
            "/openapi.json": self._openapi,
        }
        post: dict[str, Callable[[Request], Awaitable[Any]]] = {
            "/v1/chat/completions": self._chat,
            "/chat/completions": self._chat,
            "/v1/completions": self._completions,
            "/completions": self._completions,
            "/v1/embeddings": self._embeddings,
            "/embeddings": self._embeddings,
            "/v1/responses": self._responses,
            "/responses": self._responses,
            "/v1/messages": self._messages,
            "/v1/messages/count_tokens": self._count_tokens,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/apply-template": self._apply_template,
        }
        if self._options.metrics:
            get["/metrics"] = self._metrics
        if self._options.page:
            get |= {path: functools.partial(page_file, path) for path in FILES}
        return [
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in get.items()),
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in post.items()),
        ]

    # -- answers -----------------------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Any:
        asked, work = await self._ready(request, schema.ChatRequest, self._chat_work)
        logprobs = bool(asked.logprobs)
        return await self._answered(request, asked, work, ChatShape(self.service.name, FINGERPRINT, 1, logprobs))

    def _chat_work(self, asked: schema.ChatRequest) -> Work:
        choice = asked.tool_choice
        return self.service.chat(
            asked,
            asked.messages,
            limit=asked.limit,
            tools=[tool.model_dump(exclude_none=True) for tool in asked.tools or ()],
            choice=choice if choice is None or isinstance(choice, str) else choice.model_dump(),
            parallel=asked.parallel_tool_calls is not False,
            response_format=response_format_of(asked),
            effort=asked.reasoning_effort,
            logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
            n=asked.n or 1,
            add_generation_prompt=asked.add_generation_prompt is not False,
            continued=bool(asked.continue_final_message),
        )

    async def _completions(self, request: Request) -> Any:
        asked, work = await self._ready(request, schema.CompletionRequest, self.service.completion)
        shape = TextShape(self.service.name, FINGERPRINT, len(asked.prompt), asked.logprobs is not None)
        return await self._answered(request, asked, work, shape)

    async def _answered(self, request: Request, asked: schema.Generating, work: Work, shape: ChatShape) -> Any:
        answers = self._submitted(request, work)
        if asked.stream:
            include = asked.stream_options is not None and bool(asked.stream_options.include_usage)
            return self._stream(shape.events(answers, include), failed)
        pieces = await self._awaited(asyncio.gather(*(answer.whole() for answer in answers)), request, answers)
        return Json(shape.whole(answers, pieces))

    async def _responses(self, request: Request) -> Any:
        asked, work = await self._ready(request, schema.ResponsesRequest, self._responses_work)
        [answer] = self._submitted(request, work)
        params = work.requests[0].params
        sampling = {"temperature": params.temperature, "top_p": params.top_p}
        shape = responses.ResponsesShape(asked, self.service.name, sampling)
        if asked.stream:
            return self._stream(shape.events(answer), shape.failed)
        return Json(await self._awaited(shape.whole(answer), request, [answer]))

    def _responses_work(self, asked: schema.ResponsesRequest) -> Work:
        return self.service.chat(
            asked,
            responses.conversation(asked),
            limit=asked.max_output_tokens,
            tools=responses.tools(asked),
            choice=responses.tool_choice(asked),
            parallel=asked.parallel_tool_calls is not False,
            response_format=responses.response_format(asked),
            effort=asked.reasoning.effort if asked.reasoning is not None else None,
            field="input",
        )

    async def _messages(self, request: Request) -> Any:
        asked, work = await self._ready(request, schema.MessagesRequest, self._messages_work)
        [answer] = self._submitted(request, work)
        prompt = len(work.requests[0].prompt)
        headers = messages.clamped(asked.max_tokens, prompt, self.service.llm.max_context)
        shape = messages.MessagesShape(self.service.name, prompt)
        if asked.stream:
            options = self._options
            events, ping = shape.events(answer), messages.PING
            return EventStream(events, shape.failed, options.limits, options.ping_seconds, ping, headers)
        return Json(await self._awaited(shape.whole(answer), request, [answer]), headers=headers)

    def _messages_work(self, asked: schema.MessagesRequest) -> Work:
        turns = messages.conversation(asked)
        return self.service.chat(
            asked,
            turns,
            limit=asked.max_tokens,
            tools=messages.tools(asked),
            choice=messages.tool_choice(asked),
            parallel=messages.parallel(asked),
            response_format=messages.response_format(asked),
            effort=messages.effort(asked),
            continued=messages.continued(turns),
        )

    async def _embeddings(self, request: Request) -> Response:
        asked, requests = await self._ready(request, schema.EmbeddingRequest, self.service.embeddings)
        count = sum(len(one.prompt) for one in requests)
        request.state.note.append(lambda: {"prompt_tokens": count, "cached_tokens": 0, "completion_tokens": 0})
        handles: list[ResponseHandle] = []
        work = embeddings.vectors(requests, self.service.scheduler, request.state.client, handles)
        found = await awaited(work, request.receive, handles, self._options.limits)
        write = functools.partial(embeddings.body, found, asked.encoding_format, self.service.name, count)
        body = await asyncio.get_running_loop().run_in_executor(self._threads, write)
        return Response(body, media_type=Json.media_type)

    async def _count_tokens(self, request: Request) -> Json:
        def work(asked: schema.CountTokensRequest) -> dict[str, Any]:
            self.service.check_model(asked.model)
            turns, tools = messages.conversation(asked), messages.tools(asked)
            more = {"effort": messages.effort(asked), "continued": messages.continued(turns)}
            chat = self.service.prompt(turns, tools, asked.chat_template_kwargs, **more)
            return {"input_tokens": len(self.service.llm.tokenizer.encode_chat(chat))}

        return Json((await self._ready(request, schema.CountTokensRequest, work))[1])

    async def _ready(self, request: Request, model: type[_Model], prepare: Callable[[_Model], _T]) -> tuple[_Model, _T]:
        """A request read, checked and prepared in a thread."""
        self.service.scheduler  # noqa: B018  (503 before a body is read)

        def work(body: bytearray) -> tuple[_Model, _T]:
            asked = self._bodies.parsed(body, model)
            with no_panic("request"):
                return asked, prepare(asked)

        async with self._bodies.read(request) as body:
            threads = self._threads if len(body) <= _LONG else self._long_threads
            return await asyncio.get_running_loop().run_in_executor(threads, work, body)

    def _submitted(self, request: Request, work: Work) -> list[Answer]:
        handles = self.service.submit(work, request.state.client)
        asked = work.asked_of_prompts or [None] * len(handles)
        each = enumerate(zip(handles, work.parsers, asked, strict=True))
        answers = [Answer(n, handle, parser, self._texts, work.one_call, of) for n, (handle, parser, of) in each]
        request.state.note.append(lambda: _tokens(answers))
        return answers

    def _stream(self, events: Events, failed: Callable[[BaseException], bytes]) -> EventStream:
        return EventStream(events, failed, self._options.limits, self._options.ping_seconds)

    async def _awaited(self, work: Awaitable[_T], request: Request, answers: list[Answer]) -> _T:
        return await awaited(work, request.receive, [answer.handle for answer in answers], self._options.limits)

    @functools.cached_property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self.service.llm.tokenizer)

    @functools.cached_property
    def _meta(self) -> dict[str, Any]:
        """What agents look up about a model: how much context there is, and its size."""
        loaded = self.service.loaded
        assert loaded is not None
        info = info_of(loaded[0])
        return {
            "n_ctx": info.max_context,
            "n_ctx_train": info.max_positions,
            "n_vocab": info.vocab_size,
            "n_params": info.parameters,
            "size": info.weight_bytes,
            "quantization": info.quantization,
            "expert_layers": info.expert_layers,
        }

    # -- tokens and templates ----------------------------------------------------------------------------------------

    async def _tokenize(self, request: Request) -> Response:
        def work(asked: schema.TokenizeRequest) -> bytes:
            llm, most = self.service.llm, self._options.limits.tokenized
            self.service.check_model(asked.model)
            (text, special), name = asked.text, "prompt" if asked.content is None else "content"
            try:
                ids: list[Any] = llm.tokenizer.encode(text, add_special_tokens=special, limit=most)
            except TooManyTokens:
                message = f"{name} has more than {most} tokens, expected at most that many in one request"
                raise ApiError(400, message, param=name, code="invalid_value") from None
            about = (
                b""
                if asked.prompt is None
                else b"," + dumps({"count": len(ids), "max_model_len": llm.max_context})[1:-1]
            )
            if asked.with_pieces:
                ids = [{"id": token, "piece": self._piece(token)} for token in ids]
            parts = [dumps(ids[at : at + _STEP])[1:-1] for at in range(0, len(ids), _STEP)]  # dumps holds up the others
            return b'{"tokens":[' + b",".join(parts) + b"]" + about + b"}"

        return Response((await self._ready(request, schema.TokenizeRequest, work))[1], media_type=Json.media_type)

    def _piece(self, token: int) -> str | list[int]:
        """A token's text, or its bytes where they are a part of a character."""
        data = self._texts.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return list(data)

    async def _detokenize(self, request: Request) -> Json:
        def work(asked: schema.DetokenizeRequest) -> dict[str, Any]:
            llm = self.service.llm
            self.service.check_model(asked.model)
            vocab = max(llm.config.vocab_size, llm.tokenizer.vocab_size)
            if asked.tokens and max(asked.tokens) >= vocab:
                raise ApiError(400, f"tokens has {max(asked.tokens)}, expected ids below {vocab}", param="tokens")
            text = llm.tokenizer.decode(asked.tokens, skip_special_tokens=False)
            return {"content": text, "prompt": text}

        return Json((await self._ready(request, schema.DetokenizeRequest, work))[1])

    async def _tokenizer_info(self, request: Request) -> Json:
        """What clients of vLLM that use the server's tokenizer ask about it."""
        tokenizer = self.service.llm.tokenizer
        bos, eos = tokenizer.bos_id, min(tokenizer.eos_ids, default=None)
        named = {"bos_token": bos, "eos_token": eos, "pad_token": None}
        shown = {name: None if token is None else self._texts.text_of(token) for name, token in named.items()}
        return Json(
            shown | {"chat_template": tokenizer.chat_template, "model_max_length": self.service.llm.max_context}
        )

    async def _apply_template(self, request: Request) -> Json:
        def work(asked: schema.TemplateRequest) -> dict[str, Any]:
            tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
            variables, add = asked.chat_template_kwargs, asked.add_generation_prompt
            self.service.check_model(asked.model)
            chat = self.service.prompt(asked.messages, tools, variables, add_generation_prompt=add)
            return {"prompt": chat.text}

        return Json((await self._ready(request, schema.TemplateRequest, work))[1])

    # -- the server itself -------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Json:
        service, replicas = self.service, {}
        if (known := service.replicas) is not None:
            replicas["replicas"] = {"ready": len(known.available), "total": len(known.schedulers)}
        if service.ready and not service.closing:
            return Json({"status": "ok", "progress": 1.0, "model": service.name, **replicas})
        error = service.unavailable()
        status = "draining" if service.closing else "error" if service.failure is not None else "loading"
        if error.code == "engine_died":
            status = "restarting"
        body = {"status": status, "progress": service.progress, **replicas, **error.body}
        return Json(body, error.status, error.headers)

    async def _models(self, request: Request) -> Json:
        return Json({"object": "list", "data": [self._model(name) for name in self.service.names]})

    async def _one_model(self, request: Request) -> Json:
        name = request.path_params["name"]
        self.service.check_model(name)
        return Json(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": self.service.started, "owned_by": "penstock"}
        loaded = self.service.loaded
        return about if loaded is None else about | {"meta": self._meta}

    async def _props(self, request: Request) -> Json:
        service, llm = self.service, self.service.llm
        tokenizer = llm.tokenizer
        return Json(
            {
                "default_generation_settings": {
                    "n_ctx": llm.max_context,
                    "params": {"max_tokens": self._options.max_tokens, **service.options.defaults},
                },
                "total_slots": service.scheduler.max_sequences,
                "model_alias": service.name,
                "chat_template": tokenizer.chat_template or "",
                "bos_token": "" if tokenizer.bos_id is None else self._texts.text_of(tokenizer.bos_id),
                "eos_token": "".join(self._texts.text_of(token) for token in sorted(tokenizer.eos_ids)[:1]),
                "modalities": {"vision": False, "audio": False},
                "build_info": FINGERPRINT,
            }
        )

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def _openapi(self, request: Request) -> Json:
        return Json(described(bool(self._options.metrics), self._options.root_path))


def _tokens(answers: list[Answer]) -> dict[str, int]:
    """Numbers of a request for the log."""
    counted = [answer.handle.usage for answer in answers]
    return {
        "prompt_tokens": counted[0].prompt_tokens,
        "cached_tokens": counted[0].cached_tokens,
        "completion_tokens": sum(one.completion_tokens for one in counted),
    }
