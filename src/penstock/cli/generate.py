"""penstock generate: continue a prompt and print the text."""

import json
import re
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from penstock import compile_progress
from penstock.cli._foreign import BATCH, LOADING, SAMPLING, TERMINAL, refused_flag, taken_flag
from penstock.cli._model import (
    RANDOM_SEED,
    ModelOptions,
    Reading,
    SamplingOptions,
    TemplateOptions,
    UsageError,
    checked_text,
    max_tokens_option,
    note,
    rate,
    read_text,
    set_template,
    verb,
)
from penstock.errors import CheckpointError, InvalidArgument
from penstock.weights.files import parse_json

if TYPE_CHECKING:
    from penstock.api import LLM
    from penstock.engine.request import Chunk

_RULE = "=" * 10
_QUERY = "penstock:query:5d1f0c"  # stands where a message is cut in two
_BOOLS = {"t": True, "true": True, "f": False, "false": False}


_PROMPT = "Prompt and answer"  # panels of the help
_OUTPUT = "Output"


@dataclass(frozen=True)
class PromptOptions:
    """What the model is given to read."""

    PANEL: ClassVar[str] = _PROMPT

    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help=r"Message to the model; - reads stdin. \n, \t work. By default hello.",
            show_default=False,
        ),
    ] = None
    file: Annotated[str | None, typer.Option("--file", "-f", metavar="FILE", help="The message, from a file.")] = None
    escape: Annotated[
        bool | None,
        typer.Option(
            "--escape/--no-escape",
            "-e",
            help=r"All of \n \r \t \' \" \\ \xHH, also in a file; or none.",
            show_default=False,
        ),
    ] = None

    def read(self) -> str:
        r"""The message: standard input for "-", a file, or the argument with its \n and \t made real, as mlx-lm does.

        Raises UsageError for both a file and an argument, InvalidArgument for bytes that are no UTF-8.
        """
        if self.prompt is not None and self.file is not None:
            raise UsageError("--file: a --prompt is given as well, expected one of the two")
        if self.file is not None:
            text = read_text("--file", self.file).removesuffix("\n")  # as llama.cpp: the last line's end is no part
        elif self.prompt == "-":
            try:
                text = checked_text("standard input", sys.stdin.read())
            except UnicodeDecodeError:
                raise InvalidArgument("standard input: is not valid UTF-8") from None
        else:
            text = checked_text("--prompt", "hello" if self.prompt is None else self.prompt)
            if self.escape is None:
                return text.replace("\\n", "\n").replace("\\t", "\t")
        return _unescaped(text) if self.escape else text


_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def _unescaped(text: str) -> str:
    r"""Text with \n and the like made real, \xHH as bytes of UTF-8; what is no such sequence stays."""

    def meant(match: re.Match[str]) -> str:
        if match[1] is not None:
            return _ESCAPES[match[1]]
        try:
            return bytes.fromhex(match[0].replace("\\x", "")).decode()
        except UnicodeDecodeError:
            raise InvalidArgument(f"--escape: {match[0]} is not valid UTF-8") from None

    return re.sub(r"""\\([nrt'"\\])|(?:\\x[0-9a-fA-F]{2})+""", meant, text)


@dataclass(frozen=True)
class GrammarOptions:
    """What the answer is held to."""

    PANEL: ClassVar[str] = "Grammar"

    json_schema: Annotated[
        str | None, typer.Option("--json-schema", "-j", metavar="JSON", help="The answer is JSON of this schema.")
    ] = None
    json_schema_file: Annotated[
        str | None, typer.Option("--json-schema-file", "-jf", metavar="FILE", help="The same from a file.")
    ] = None
    grammar: Annotated[
        str | None, typer.Option("--grammar", metavar="GBNF", help="The answer is a text of this grammar.")
    ] = None
    grammar_file: Annotated[
        str | None, typer.Option("--grammar-file", metavar="FILE", help="The same from a file.")
    ] = None

    def check(self) -> "dict[str, Any] | str | None":
        """A response_format, the text of a grammar or None. Raises UsageError for two of them and for no JSON."""
        given = {name.replace("_", "-"): value for name, value in vars(self).items() if value is not None}
        if len(given) > 1:
            first, second = list(given)[:2]
            raise UsageError(f"--{second}: --{first} is given as well, expected one of them")
        for name, value in given.items():
            text = read_text(f"--{name}", value) if name.endswith("-file") else checked_text(f"--{name}", value)
            if name.startswith("grammar"):
                return text
            try:
                schema = parse_json(text.encode(), f"--{name}")
            except CheckpointError as error:
                raise UsageError(str(error)) from None
            if not isinstance(schema, dict):
                raise UsageError(f"--{name}: is a {type(schema).__name__}, expected a JSON schema (an object)")
            return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        return None


def _shown(llm: "LLM", ignore_chat_template: bool) -> dict[str, Any]:
    """Arguments of `LLM.stream` for an answer whose markers belong to its text."""
    from penstock.text.formats import headers_shown

    return {} if ignore_chat_template else headers_shown(llm.tokenizer)


def _held_to(llm: "LLM", wanted: "dict[str, Any] | str | None") -> dict[str, Any]:
    """Arguments of `LLM.stream` for what `GrammarOptions.check` gives. Raises InvalidArgument."""
    if wanted is None:
        return {}
    if isinstance(wanted, dict):
        return {"response_format": wanted}
    from penstock.text.grammar import grammar_of_gbnf

    return {"grammar": grammar_of_gbnf(wanted, llm.tokenizer, llm.config.vocab_size)}


_FOREIGN = (
    *LOADING,
    *SAMPLING,
    *TERMINAL,
    BATCH,
    taken_flag("--single-turn -st", "one prompt is answered; penstock chat talks"),
    refused_flag("--conversation -cnv", "penstock chat talks"),
)


@verb(_FOREIGN)
def generate(
    context: typer.Context,
    *,
    prompt: PromptOptions,
    max_tokens: Annotated[int, max_tokens_option("Most tokens to generate; -1 fills the context.", _PROMPT)] = (
        "100"  # type: ignore[assignment]  # the parser makes it a number
    ),
    sampling: SamplingOptions,
    seed: Annotated[int | None, RANDOM_SEED] = None,
    grammar: GrammarOptions,
    template: TemplateOptions,
    model: ModelOptions,
    prefill_response: Annotated[
        str | None,
        typer.Option("--prefill-response", metavar="TEXT", help="Beginning of the answer.", rich_help_panel=_PROMPT),
    ] = None,
    ignore_chat_template: Annotated[
        bool,
        typer.Option(
            "--ignore-chat-template",
            "--no-conversation",
            "-no-cnv",
            help="Continue the prompt as it is.",
            rich_help_panel=_PROMPT,
        ),
    ] = False,
    extra_eos_token: Annotated[
        list[str] | None,
        typer.Option("--extra-eos-token", metavar="TOKEN", help="End at these tokens too.", rich_help_panel="Sampling"),
    ] = None,
    prompt_cache_file: Annotated[
        str | None,
        typer.Option(
            "--prompt-cache-file",
            metavar="FILE",
            help="Made by penstock cache_prompt; the prompt goes on in its last message.",
            rich_help_panel=_PROMPT,
        ),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            metavar="N",
            min=0,
            max=20,
            help="With --json: log probabilities, N best.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    verbose: Annotated[
        str,
        typer.Option("--verbose", metavar="T|F", help="F prints the text and nothing else.", rich_help_panel=_OUTPUT),
    ] = "T",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=_OUTPUT)] = False,
) -> None:
    """Continue a prompt and print the text.

    The prompt is put into the model's chat template, unless it has none. Text goes to stdout, numbers to stderr.

    \b
    Examples:
      penstock generate -p "Once upon a time" --ignore-chat-template
      penstock generate --model mlx-community/Qwen3.6-35B-A3B-4bit -p hello
      penstock generate -hf ggml-org/Qwen3-0.6B-GGUF:Q8_0 -f prompt.txt -n -1
      penstock generate -p "A fox in JSON" -j '{"type": "object"}'
      echo "Tell me a story" | penstock generate -p - --temp 0.8 --json
    """
    model.follow()
    talk = _boolean("--verbose", verbose) and not as_json
    eos = [*(extra_eos_token or ()), *context.args]  # mlx-lm takes several tokens after one --extra-eos-token
    if context.args and not extra_eos_token:
        raise UsageError(f"Got unexpected extra argument ({context.args[0]})")
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs: expected together with --json, which prints them")
    if prompt_cache_file is not None and template.system_prompt is not None:
        raise UsageError("--system-prompt: belongs before what --prompt-cache-file holds, expected one of the two")
    wanted = grammar.check()
    if prompt_cache_file is not None and isinstance(wanted, dict):
        raise UsageError("--json-schema: not supported together with --prompt-cache-file yet")
    variables, arguments, own_template = template.variables(), sampling.arguments(), template.template()
    messages = [*template.messages(), {"role": "user", "content": prompt.read()}]
    if seed is None or seed < 0:
        seed = secrets.randbits(48)  # drawn here, so that --json can name it; every JSON reader holds it exactly

    llm = model.load(note if talk else None)
    if own_template is not None:
        set_template(llm.tokenizer, own_template)
    chat = {"variables": variables, "allow_special_in_messages": template.allow_special_in_messages}
    part = "whole" if prompt_cache_file is None else "rest"
    tokens = encoded(llm, messages, prefill_response, chat, ignore_chat_template, part)
    arguments |= {"max_tokens": llm.max_context if max_tokens < 0 else max_tokens, "seed": seed, "logprobs": logprobs}
    arguments |= {"extra_eos": [_token_id(llm, token) for token in eos], **_held_to(llm, wanted)}
    arguments |= _shown(llm, ignore_chat_template)
    if prompt_cache_file is None:
        cached, reading = 0, Reading(len(tokens))
        chunks = llm.stream(tokens, progress=reading, **arguments)
    else:
        from penstock.api import restore

        session = restore(prompt_cache_file, llm)
        cached, reading = len(session), Reading(len(tokens) + 1)
        chunks = session.stream(tokens, progress=reading, **arguments)

    answer = _Answer(len(tokens), cached)
    if as_json:
        for _ in answer.followed(chunks):
            pass
        print(json.dumps(answer.described(llm, seed, logprobs is not None), ensure_ascii=False))
        return
    framed = talk and sys.stdout.isatty()
    try:
        if framed:
            print(_RULE)
        for chunk in answer.followed(chunks):
            print(chunk.text, end="", flush=True)
    except BaseException:
        reading.close()
        if answer.chunks:
            print(flush=True)  # what follows, a prompt or a message, starts on a line of its own
        raise
    print(flush=True)
    if framed:
        print(_RULE, flush=True)
    if talk:
        print(answer.statistics(llm), file=sys.stderr)


class _Answer:
    """The chunks of an answer and when they came."""

    def __init__(self, prompt_tokens: int, cached: int) -> None:
        self.prompt_tokens, self.cached = prompt_tokens, cached
        self.chunks: list[Chunk] = []
        self.prompt_seconds = self.generation_seconds = 0.0

    def followed(self, chunks: "Iterator[Chunk]") -> "Iterator[Chunk]":
        start = compile_progress.clock()
        for chunk in chunks:
            now = compile_progress.clock()
            if self.chunks:
                self.generation_seconds = now - start - self.prompt_seconds
            else:
                self.prompt_seconds = now - start
            self.chunks.append(chunk)
            yield chunk

    @property
    def prompt_tps(self) -> float:
        return rate(self.prompt_tokens, self.prompt_seconds)

    @property
    def generation_tps(self) -> float:
        """Tokens after the first, which the prompt pays for, per second."""
        return rate(len(self.chunks) - 1, self.generation_seconds)

    def statistics(self, llm: "LLM") -> str:
        return (
            f"Prompt: {self.prompt_tokens} tokens, {self.prompt_tps:.3f} tokens-per-sec\n"
            f"Generation: {len(self.chunks)} tokens, {self.generation_tps:.3f} tokens-per-sec\n"
            f"{llm.stats().about_drafts()}"
            f"{llm.stats().about_compiling()}"
            f"Peak memory: {llm.stats().peak_memory / 1e9:.3f} GB{llm.stats().about_experts()}"
        )

    def described(self, llm: "LLM", seed: int, with_logprobs: bool) -> dict[str, Any]:
        """As --json prints it."""
        found = {
            "text": "".join(chunk.text for chunk in self.chunks),
            "tokens": [chunk.token for chunk in self.chunks],
            "finish_reason": self.chunks[-1].finish_reason if self.chunks else None,
            "usage": {
                "prompt_tokens": self.cached + self.prompt_tokens,
                "completion_tokens": len(self.chunks),
                "total_tokens": self.cached + self.prompt_tokens + len(self.chunks),
                "cached_tokens": self.cached,
            },
            "timings": {
                "prompt_seconds": self.prompt_seconds,
                "prompt_tps": self.prompt_tps,
                "generation_seconds": self.generation_seconds,
                "generation_tps": self.generation_tps,
                "compile_seconds": llm.stats().compile_seconds,
                "peak_memory": llm.stats().peak_memory / 1e9,
                **llm.stats().drafts(),
            },
            "seed": seed,
        }
        if (experts := llm.stats().experts()) is not None:
            found["experts"] = experts
        if with_logprobs:
            found["logprobs"] = [
                {
                    "token": chunk.token,
                    "logprob": chunk.logprob,
                    "top_logprobs": [{"token": token, "logprob": value} for token, value in chunk.top_logprobs or ()],
                }
                for chunk in self.chunks
            ]
        return found


def _boolean(name: str, text: str) -> bool:
    if text.lower() not in _BOOLS:
        raise UsageError(f"{name}: is {text!r}, expected T or F")
    return _BOOLS[text.lower()]


def encoded(
    llm: "LLM",
    messages: list[dict[str, Any]],
    beginning: str | None,
    options: dict[str, Any],
    ignore_template: bool,
    part: Literal["whole", "open", "rest"] = "whole",
) -> list[int]:
    """The prompt's tokens. `options`: of `Tokenizer.chat_text`.

    part "open" ends with the last message, which goes on later; "rest" begins with it: a session has read all that the
    template writes before. Raises UsageError and InvalidArgument.
    """
    tokenizer, beginning = llm.tokenizer, checked_text("--prefill-response", beginning or "")
    if ignore_template or not tokenizer.has_chat_template:
        variables = options.get("variables")
        for name, given in (("--system-prompt", len(messages) > 1), ("--chat-template-config", bool(variables))):
            if given:
                reason = "--ignore-chat-template was given" if ignore_template else "the model has no chat template"
                raise UsageError(f"{name}: {reason}, expected a prompt alone")
        return tokenizer.encode(messages[-1]["content"] + beginning, add_special_tokens=part != "rest")
    if part == "whole":
        chat = tokenizer.chat_text(messages, **options)
        return tokenizer.encode_chat(replace(chat, marked=chat.marked + beginning))
    message = messages[-1]["content"]
    marked = f"{message}{_QUERY}" if part == "open" else f"{_QUERY}{message}"  # found again in what the template writes
    chat = tokenizer.chat_text([*messages[:-1], {"role": "user", "content": marked}], **options)
    before, found, after = chat.marked.partition(_QUERY)
    if not found or _QUERY in after:
        raise InvalidArgument("--prompt-cache-file: the template alters the prompt, use --ignore-chat-template")
    return tokenizer.encode_chat(replace(chat, marked=before if part == "open" else after + beginning))


def _token_id(llm: "LLM", token: str) -> int:
    """The id of a token given as its id or as its text."""
    vocab = llm.config.vocab_size
    if token.isascii() and token.isdigit():
        if len(token) > 10 or int(token) >= vocab:
            raise InvalidArgument(f"--extra-eos-token: is {token[:20]}, expected a token id below {vocab}")
        return int(token)
    found = llm.tokenizer.encode(checked_text("--extra-eos-token", token), add_special_tokens=False)
    if len(found) != 1:
        raise InvalidArgument(f"--extra-eos-token: {token!r} is {len(found)} tokens of this model, expected one")
    return found[0]
