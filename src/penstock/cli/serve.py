"""penstock serve: an HTTP server with OpenAI's endpoints and a page to chat on."""

import contextlib
import importlib.util
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from penstock._version import __version__
from penstock.cli._config import read_config
from penstock.cli._foreign import BATCH, LOADING, SAMPLING, refused, refused_flag, taken, taken_flag, without
from penstock.cli._model import (
    ALLOW_SPECIAL,
    MODEL,
    TEMPLATE,
    ModelOptions,
    TemplateText,
    UsageError,
    checked_text,
    model_option,
    note,
    set_template,
    verb,
)
from penstock.errors import BackendError, InvalidArgument, PenstockError
from penstock.settings import Settings, is_blank
from penstock.units import amount, parse_size

if TYPE_CHECKING:
    import socket
    import ssl

    from penstock.engine.resources import Resources
    from penstock.server.model_info import ServedModel
    from penstock.server.service import Service
    from penstock.text.tokenizer import Tokenizer

_NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client", "msgspec")
_LEVELS = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
_FORMATS = Literal["text", "json"]
_OWN = ("--gpu-memory-utilization", "--jinja", "--reasoning-format", "--reasoning-budget")  # options of this verb
_BY_MODEL = "the model's chat template tells the format of calls and reasoning"
_BY_REQUEST = "requests set it"
_PAGES = "Pages and log"  # a panel of the help

_FOREIGN = (
    *without((*LOADING, *SAMPLING), *_OWN),
    BATCH,
    taken_flag(
        "--jinja --cont-batching -cb --enable-auto-tool-choice --enable-prompt-tokens-details", "always so here"
    ),
    taken_flag("--enable-chunked-prefill --disable-log-stats", "always so here"),
    taken("--tool-call-parser --reasoning-parser", _BY_MODEL, silent="auto"),
    taken("--prompt-concurrency", "prompts share steps as they come", silent="8"),
    taken("--prompt-cache-size", "--prompt-cache-bytes bounds the shared beginnings of prompts", silent="10"),
    refused("--seed -s --repeat-penalty --repetition-penalty --repeat-last-n --logit-bias -l", _BY_REQUEST),
    refused("--presence-penalty --frequency-penalty", _BY_REQUEST, silent="0"),
    refused("--grammar --grammar-file --json-schema --json-schema-file -j -jf", f"{_BY_REQUEST} (response_format)"),
    refused("--system-prompt -sys", _BY_REQUEST),
    refused("--override-generation-config", "--temp, --top-p, --top-k and --min-p set defaults"),
    refused_flag("--props --slots", "/props can be read, and nothing of the server be changed"),
    refused("--slot-save-path", "penstock cache_prompt writes what generate --prompt-cache-file reads"),
    refused("--cache-reuse", "beginnings that prompts share are computed once", silent="0"),
    taken("--cache-ram -cram", "--prompt-cache-bytes bounds the shared beginnings of prompts"),
    refused("--ctx-checkpoints -ctxcp", "--prompt-cache-bytes bounds the shared beginnings of prompts"),
    refused("--models-dir --models-preset --models-max", "one server serves one model"),
    refused("--sleep-idle-seconds", "the model stays loaded", silent="-1"),
    taken_flag("--embedding --embeddings", "/v1/embeddings is there, beside the others"),
    refused_flag("--reranking", "text alone is answered"),
    refused("--task --runner", "text alone is answered", silent="auto generate"),
    refused("--limit-mm-per-prompt", "only text is read"),
    refused_flag("--trust-request-chat-template", "--chat-template-file sets the template"),
    refused("--chat-template-content-format", "the template's form of messages is found out", silent="auto"),
    refused_flag("--enable-force-include-usage", "requests ask for it: stream_options.include_usage"),
    taken("--threads-http", "HTTP has one event loop"),
    refused("--api-server-count", "--data-parallel-size N runs engines behind one address", silent="1"),
    refused_flag("--enable-lora", "mlx_lm fuse makes one folder of a model and its adapter"),
)


def byte_size(text: str) -> int:
    """A number of bytes: 4096, 500MB, 5G (10**9), 16M, 1GiB (2**30)."""
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
    digits = text.rstrip("kKmMgGtTiIbB")
    unit = text[len(digits) :].upper().removesuffix("B")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 15) or unit not in units:
        raise typer.BadParameter(f"{text!r} is no number of bytes such as 500MB or 5G")
    return int(digits) * units[unit]


def file_mode(text: str) -> int:
    """Rights of a file as chmod takes them: 600, 0660."""
    if (
        not (text.isascii() and text.isdigit() and len(text) <= 4 and set(text) <= set("01234567"))
        or int(text, 8) > 0o777
    ):
        raise typer.BadParameter(f"{text!r} is no mode such as 600 or 660")
    return int(text, 8)


@dataclass(frozen=True)
class AddressOptions:
    """Where the server listens, and which clients it takes."""

    PANEL: ClassVar[str] = "Address and clients"

    host: Annotated[str, typer.Option("--host", metavar="H", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8080
    root_path: Annotated[
        str, typer.Option("--root-path", metavar="PATH", help="Below which a proxy has the server, such as /llm.")
    ] = ""
    uds: Annotated[
        str | None, typer.Option("--uds", metavar="PATH", help="A Unix socket to listen on, instead of a port.")
    ] = None
    uds_mode: Annotated[
        int, typer.Option("--uds-mode", metavar="MODE", parser=file_mode, help="Who may connect there: 660, 600.")
    ] = "600"  # type: ignore[assignment]  # the parser makes it a number
    ssl_certfile: Annotated[
        str | None,
        typer.Option("--ssl-certfile", "--ssl-cert-file", metavar="FILE", help="Speak TLS with this certificate."),
    ] = None
    ssl_keyfile: Annotated[
        str | None, typer.Option("--ssl-keyfile", "--ssl-key-file", metavar="FILE", help="Its key, both in PEM.")
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key", metavar="KEY", help="Clients have to send it; may be repeated. PENSTOCK_API_KEY too."
        ),
    ] = None
    api_key_file: Annotated[
        str | None, typer.Option("--api-key-file", metavar="FILE", help="The same, one key per line, # for remarks.")
    ] = None
    insecure: Annotated[bool, typer.Option("--insecure", help="Let others than this machine in without a key.")] = False
    allowed_origins: Annotated[
        str | None,
        typer.Option(
            "--allowed-origins", "--cors-origins", metavar="LIST", help="Sites whose pages may call: a list, or *."
        ),
    ] = None
    allowed_hosts: Annotated[
        str | None,
        typer.Option("--allowed-hosts", metavar="LIST", help="More names it goes by, behind a proxy: a list, or *."),
    ] = None

    def tls(self) -> "ssl.SSLContext | None":
        """What TLS needs, where it is asked for. Raises UsageError or InvalidArgument."""
        from penstock.server.listen import tls_context

        if self.ssl_certfile is None and self.ssl_keyfile is not None:
            raise UsageError("--ssl-keyfile: expected --ssl-certfile with it")
        return None if self.ssl_certfile is None else tls_context(self.ssl_certfile, self.ssl_keyfile)

    def check(self, keys: tuple[str, ...]) -> None:
        """Raises UsageError for two addresses, and for one that others can reach without a key."""
        from penstock.server.guard import is_loopback

        if self.uds is not None:
            if (self.host, self.port) != (AddressOptions.host, AddressOptions.port):
                raise UsageError("--uds: expected without --host and --port")
        elif not keys and not self.insecure and not is_loopback(self.host):
            raise UsageError(
                f"--host: {self.host} can be reached from other machines, expected --api-key with it (or --insecure)"
            )

    def hosts(self) -> frozenset[str] | None:
        """Names that clients may use: over a Unix socket any, where pages of other sites cannot reach it."""
        from penstock.server.guard import hosts_of

        return hosts_of(self.host if self.uds is None else "", _split(self.allowed_hosts))

    def listen(self) -> "tuple[socket.socket, str]":
        """The socket, and the address for people. Raises PenstockError."""
        from penstock.server.listen import bind_unix
        from penstock.server.run import bind

        if self.uds is not None:
            return bind_unix(self.uds, self.uds_mode), f"unix:{self.uds}"
        bound = bind(self.host, self.port)
        url = _url(self.host, bound.getsockname()[1])
        return bound, url if self.ssl_certfile is None else url.replace("http:", "https:", 1)

    def prefix(self) -> str:
        """The path below which a proxy has the server, without a slash at its end. Raises UsageError."""
        found = self.root_path.rstrip("/")
        if found and not re.fullmatch(r"(/[\w.~-]+)+", found, re.ASCII):
            raise UsageError(f"--root-path: is {self.root_path!r}, expected a path such as /llm")
        return found

    def keys(self) -> tuple[str, ...]:
        """All keys. A blank one is refused: the server was meant to be locked. Raises UsageError or InvalidArgument,
        never with a key in it.
        """
        found = [key.strip() for given in self.api_key or () for key in given.split(",")]
        if not all(found):
            raise UsageError("--api-key: is empty, expected a key")
        if is_blank("api_key"):
            raise UsageError("PENSTOCK_API_KEY: is blank, expected a key, or no such variable for a server without one")
        if (key := Settings.from_env().api_key) is not None:
            found.append(key.strip())
        if self.api_key_file is not None:
            found += _keys_in(self.api_key_file)
        keys = tuple(dict.fromkeys(found))
        for key in keys:
            checked_text("--api-key", key)
        return keys


def _keys_in(path: str) -> list[str]:
    """The lines of a key file that are neither blank nor, starting with #, a comment."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise InvalidArgument(f"--api-key-file: {path}: {reason}") from None
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise UsageError(f"--api-key-file: {path}: has no key, expected one per line")
    return keys


@dataclass(frozen=True)
class AnswerOptions(TemplateText):
    """What a request need not say."""

    PANEL: ClassVar[str] = "Answers"

    alias: Annotated[
        list[str] | None,
        typer.Option(
            "--alias", "-a", "--served-model-name", metavar="NAME", help="What clients call the model; *: anything."
        ),
    ] = None
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="Of an answer, if the request sets none.")
    ] = 512
    temp: Annotated[
        float | None, typer.Option("--temp", min=0, help="If a request sets none; by default the model's own, or 0.")
    ] = None
    top_p: Annotated[
        float | None, typer.Option("--top-p", min=0, max=1, help="If a request sets none; by default the model's own.")
    ] = None
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=-1, help="If a request sets none; by default the model's own.")
    ] = None
    min_p: Annotated[
        float | None, typer.Option("--min-p", min=0, max=1, help="If a request sets none; by default the model's own.")
    ] = None
    generation_config: Annotated[
        str, typer.Option("--generation-config", metavar="auto|none", help="none leaves the model's own defaults out.")
    ] = "auto"
    chat_template_args: Annotated[
        str,
        typer.Option(
            "--chat-template-args",
            "--chat-template-kwargs",
            metavar="JSON",
            rich_help_panel=TEMPLATE,
            help="Variables of the template, such as '{\"enable_thinking\": false}'.",
        ),
    ] = "{}"
    chat_template_config: Annotated[
        str | None, typer.Option("--chat-template-config", "--default-chat-template-kwargs", hidden=True)
    ] = None
    allow_special_in_messages: Annotated[bool, ALLOW_SPECIAL] = False
    reasoning_format: Annotated[
        Literal["auto", "deepseek", "none"],
        typer.Option("--reasoning-format", help="none leaves reasoning in the answer's text."),
    ] = "auto"
    reasoning_budget: Annotated[
        int, typer.Option("--reasoning-budget", min=-1, max=0, help="0: no reasoning, where the template can do that.")
    ] = -1

    pooling: Annotated[
        Literal["mean", "last"],
        typer.Option("--pooling", help="Embeddings: the mean over a text's tokens, or its last token."),
    ] = "mean"

    def defaults(self) -> dict[str, Any]:
        """Sampling options that were given."""
        given = {"temperature": self.temp, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return {name: value for name, value in given.items() if value is not None}

    def own_defaults(self) -> bool:
        if self.generation_config not in ("auto", "none", "vllm"):
            raise UsageError(f"--generation-config: is {self.generation_config!r}, expected auto or none")
        return self.generation_config == "auto"

    def variables(self) -> dict[str, Any]:
        try:
            found = json.loads(self.chat_template_config or self.chat_template_args)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--chat-template-args: not valid JSON: {error}") from None
        if not isinstance(found, dict):
            raise UsageError(f"--chat-template-args: is a {type(found).__name__}, expected a JSON object")
        for name in ("messages", "tools", "add_generation_prompt"):
            if name in found:
                raise UsageError(f"--chat-template-args: {name!r} is set by requests, expected other variables")
        return ({"enable_thinking": False} if self.reasoning_budget == 0 else {}) | found


@dataclass(frozen=True)
class LoadOptions:
    """How much at once."""

    PANEL: ClassVar[str] = "Load"

    parallel: Annotated[
        int | None,
        typer.Option(
            "--parallel",
            "-np",
            "--decode-concurrency",
            "--max-num-seqs",
            metavar="N",
            min=1,
            help="Answers that are made together; 8 on a CPU, 32 on a GPU.",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory-utilization",
            metavar="SHARE",
            help="Of a GPU's memory, for weights, caches and steps together; 0.9 if left out.",
        ),
    ] = None
    queue: Annotated[
        int, typer.Option("--queue", metavar="N", min=0, help="Answers that may wait; more are turned away (429).")
    ] = 256
    cache_prompt: Annotated[
        bool, typer.Option("--cache-prompt/--no-cache-prompt", help="Compute a beginning that prompts share only once.")
    ] = True
    prefix_caching: Annotated[
        bool | None, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", hidden=True)
    ] = None
    prompt_cache_bytes: Annotated[
        int | None,
        typer.Option("--prompt-cache-bytes", metavar="SIZE", parser=byte_size, help="Memory for these: 5G, 500MB."),
    ] = None
    max_answer: Annotated[
        int | None,
        typer.Option("--max-answer", metavar="N", min=1, help="Most tokens of an answer, whatever a request asks for."),
    ] = None
    max_body: Annotated[int, typer.Option("--max-body", metavar="SIZE", parser=byte_size, help="Largest request.")] = (
        "16MiB"  # type: ignore[assignment]  # the parser makes it a number
    )
    max_connections: Annotated[
        int, typer.Option("--max-connections", metavar="N", min=1, help="At one time; more are turned away (503).")
    ] = 4096
    timeout: Annotated[
        float, typer.Option("--timeout", "-to", metavar="S", min=1, help="Most seconds of a request.")
    ] = 3600.0
    sse_ping_interval: Annotated[
        float, typer.Option("--sse-ping-interval", metavar="S", min=1, help="Sign of life on a silent stream.")
    ] = 30.0
    engine_process: Annotated[
        bool | None,
        typer.Option(
            "--engine-process/--no-engine-process",
            help="The model in a process of its own, HTTP in the other; by default where there is a GPU.",
        ),
    ] = None
    data_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--data-parallel-size",
            "-dp",
            metavar="N",
            min=1,
            help="Engines of the model side by side, each on a GPU or a share of the cores; 1 if left out.",
        ),
    ] = None
    shutdown_timeout: Annotated[
        float, typer.Option("--shutdown-timeout", metavar="S", min=0, help="For answers under way at the end.")
    ] = 10.0

    def check_memory(self, memory: str | None) -> None:
        """Raises UsageError for a size or a share of a GPU that is none, and for both of them."""
        share = self.gpu_memory_utilization
        try:
            parse_size(memory or "1G", "--memory")
        except InvalidArgument as error:
            raise UsageError(str(error)) from None
        if share is not None and not 0 < share <= 1:
            raise UsageError(f"--gpu-memory-utilization: is {share:g}, expected above 0 and at most 1")
        if share is not None and memory is not None:
            raise UsageError("--gpu-memory-utilization: expected without --memory")

    def replicas(self, device: str, threads: int | None, ranks: int) -> "list[Resources]":
        """What each engine of so many ranks gets of the machine where there are several, else nothing. Raises
        UsageError, and before anything is loaded InvalidArgument for more than there are GPUs.
        """
        from penstock.engine.options import resolve_device
        from penstock.engine.resources import joined, share_machine
        from penstock.parallel.launch import joined_by_torchrun

        settings = Settings.from_env()
        count = self.data_parallel_size or settings.data_parallel_size
        if count == 1:
            return []
        if joined_by_torchrun() is not None:
            raise UsageError(
                f"--data-parallel-size: is {count}, expected 1 under torchrun; start one server per replica"
            )
        if (settings.engine_process if self.engine_process is None else self.engine_process) is False:
            raise UsageError(f"--data-parallel-size: is {count}, expected 1 with --no-engine-process")
        try:
            parts = share_machine(resolve_device(device), count * ranks, threads or settings.threads)
        except InvalidArgument as error:
            each = f" of {ranks} ranks each" if ranks > 1 else ""
            raise InvalidArgument(f"--data-parallel-size: is {count}{each}: {error}") from None
        return [joined(parts[n * ranks : (n + 1) * ranks]) for n in range(count)]

    def in_two_processes(self, device: str, ranks: int) -> bool:
        """Whether the engine gets a process of its own, by the flag, the setting, the device or since it has ranks."""
        from penstock.backends.cuda.runtime import features

        settings = Settings.from_env()
        if self.engine_process is not None or settings.engine_process is not None:
            return bool(settings.engine_process if self.engine_process is None else self.engine_process)
        device = settings.device if device == "auto" else device
        return ranks > 1 or device == "cuda" or (device == "auto" and features.driver_found())


@dataclass(frozen=True)
class ServeModel(ModelOptions):
    """As every model, with llama.cpp's short name."""

    model: Annotated[str | None, model_option("-m")] = None


@verb(_FOREIGN)
def serve(
    *,
    argument: Annotated[str | None, MODEL] = None,
    file_model: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            is_eager=True,
            callback=read_config,
            help="Options from a TOML file; flags and variables go before it.",
        ),
    ] = None,
    model: ServeModel,
    address: AddressOptions,
    answers: AnswerOptions,
    load: LoadOptions,
    webui: Annotated[
        bool, typer.Option("--webui/--no-webui", help="The page to chat on.", rich_help_panel=_PAGES)
    ] = True,
    metrics: Annotated[
        bool, typer.Option("--metrics/--no-metrics", help="Counters at /metrics.", rich_help_panel=_PAGES)
    ] = True,
    log_level: Annotated[
        _LEVELS,
        typer.Option(
            "--log-level",
            "--uvicorn-log-level",
            case_sensitive=False,
            help="Of the log on stderr.",
            rich_help_panel=_PAGES,
        ),
    ] = "INFO",
    log_requests: Annotated[
        bool,
        typer.Option(
            "--log-requests/--disable-log-requests",
            help="A line per request, without its content.",
            rich_help_panel=_PAGES,
        ),
    ] = True,
    log_format: Annotated[
        _FORMATS, typer.Option("--log-format", help="json: each line an object, for programs.", rich_help_panel=_PAGES)
    ] = "text",
) -> None:
    """Serve a model over HTTP: OpenAI's endpoints and a page to chat on.

    The server listens at once and loads the model meanwhile; /health tells how far it is. Only this machine can reach
    it, unless --host says otherwise, and then a key is needed. Ctrl-C ends it when the answers under way are complete,
    a second one at once.

    \b
    Examples:
      penstock serve
      penstock serve mlx-community/Qwen3.6-35B-A3B-4bit -c 32k
      penstock serve --data-parallel-size 2
      PENSTOCK_API_KEY=secret penstock serve --host 0.0.0.0 --port 8000
    """
    model = model.given(argument)
    if file_model is not None and model.model is None:
        model = replace(model, model=file_model)
    model.follow()
    _check_installed()
    from penstock.engine.protect import protect
    from penstock.machine import physical_cores
    from penstock.server.engine_start import engine_starter
    from penstock.server.guard import Access
    from penstock.server.limits import Limits
    from penstock.server.logs import LogStream, start_log
    from penstock.server.model_info import RemoteModel, info_of, read_tokenizer
    from penstock.server.run import serve as run
    from penstock.server.service import Options
    from penstock.weights.resolve import resolve_model

    keys = address.keys()
    address.check(keys)
    tls = address.tls()
    load.check_memory(model.memory)
    template, own = answers.template(), answers.own_defaults()
    arguments = {"path_or_hub_id": model.model, **model.load_arguments(model.max_context or None, model.threads)}
    ranks = model.ranks
    replicas = load.replicas(model.device, model.threads, ranks)
    starter = None
    if replicas or load.in_two_processes(model.device, ranks):
        starter = engine_starter(arguments, note, replicas)
    options = Options(
        names=_names(model, answers.alias or []),
        defaults=answers.defaults(),
        max_tokens=answers.max_tokens,
        template_variables=answers.variables(),
        split_reasoning=answers.reasoning_format != "none",
        allow_special_in_messages=answers.allow_special_in_messages,
        pooling=answers.pooling,
        ping_seconds=load.sse_ping_interval,
        parallel=load.parallel,
        prefix_cache=load.cache_prompt if load.prefix_caching is None else load.prefix_caching,
        prefix_memory=load.prompt_cache_bytes,
        gpu_memory_utilization=load.gpu_memory_utilization,
        page=webui,
        metrics=metrics,
        root_path=address.prefix(),
        limits=Limits(
            body=load.max_body,
            request_seconds=load.timeout,
            shutdown_seconds=load.shutdown_timeout,
            connections=load.max_connections,
            queue=load.queue,
            tokens=load.max_answer,
        ),
    )
    access = Access(keys=keys, origins=tuple(_split(address.allowed_origins)), hosts=address.hosts())
    bound, url = address.listen()
    start_log(log_level, log_requests, log_format)
    _raise_file_limit()
    start = time.monotonic()

    def listening() -> None:
        note(f"penstock {__version__} listens on {url} and loads {model.name}; Ctrl-C ends it")
        if any(one.cpus for one in replicas) and len(replicas) > (cores := physical_cores()):
            note(f"penstock: warning: --data-parallel-size: is {len(replicas)}, more than the {cores} cores here")

    def prepared(tokenizer: "Tokenizer") -> "Mapping[str, Any]":
        """Get templates ready; the model's own defaults of sampling."""
        if template is not None:
            set_template(tokenizer, template)
        else:
            _compile_template(tokenizer)
        return _own_defaults(model) if own else {}

    def loader(progress: Callable[[float], None]) -> "tuple[ServedModel, Mapping[str, Any]]":
        if starter is not None:
            found = resolve_model(model.model, revision=model.revision, offline=model.offline or None)
            tokenizer = read_tokenizer(found)
            return RemoteModel(tokenizer), prepared(tokenizer)
        llm = model.load(note, progress)
        note(protect(llm.engine))
        return llm, prepared(llm.tokenizer)

    def ready(service: "Service") -> None:
        if service.failure is not None:
            note(f"penstock: error: {service.failure} (/health says so too; Ctrl-C ends the server)")
            return
        assert service.loaded is not None
        info = info_of(service.loaded[0])
        where = info.device if starter is None else f"{info.device}, in a process of its own"
        if replicas:
            where = f"{info.device}, in {len(replicas)} processes"
        if ranks > 1:
            where += f" of {ranks} ranks each" if replicas else f", split over {ranks} ranks"
        note(
            f"{service.name} is ready after {time.monotonic() - start:.1f} s: {amount(info.weight_bytes)} of "
            f"weights, context of {info.max_context} tokens, {where}"
        )
        if address.uds is not None:
            return
        note(f"  OpenAI clients: base URL {url}/v1{', with a key' if keys else ''}")
        if webui:
            note(f"  In a browser:   {url}")

    with contextlib.redirect_stderr(LogStream()) if log_format == "json" else contextlib.nullcontext():
        service = run(loader, options, access, bound, listening, ready, starter, tls)
    if service.failure is not None:
        raise typer.Exit(1)


def _check_installed() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendError(
            f"serve: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; "
            "the server needs: pip install 'penstock[server]'"
        )


def _names(model: ModelOptions, aliases: list[str]) -> tuple[str, ...]:
    """What clients may call the model; of a folder on this machine only the last part of its path."""
    from penstock.weights.resolve import HubModel, find_model

    found = find_model(model.model)
    hub_id = [found.id] if isinstance(found, HubModel) else []
    return tuple(dict.fromkeys([*aliases, *hub_id, found.name]))


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _url(host: str, port: int) -> str:
    if host in ("0.0.0.0", "::", ""):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _own_defaults(model: ModelOptions) -> dict[str, Any]:
    from penstock.server.service import generation_defaults
    from penstock.weights.resolve import resolve_model

    found = resolve_model(model.model, revision=model.revision, offline=True, quiet=True)
    return generation_defaults(None if found.kind == "gguf" else found.path)


def _compile_template(tokenizer: "Tokenizer") -> None:
    """Compile the model's own chat template, so that the first chat does not wait; the rest works without one."""
    try:
        tokenizer.compile_chat_template()
    except PenstockError as error:
        note(f"penstock: warning: no chat will be answered: {error}")


def _raise_file_limit() -> None:
    """A connection takes a file descriptor, and many systems start programs with 1024 of them."""
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ImportError, ValueError, OSError):
        pass
