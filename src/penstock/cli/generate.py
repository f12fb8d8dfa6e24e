"""penstock generate: continue a prompt and print the text."""

import json
import secrets
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock import compile_progress
from penstock.cli._model import (
    REFUSED,
    REFUSED_SAMPLING,
    SEED,
    ModelOptions,
    Reading,
    SamplingOptions,
    TemplateOptions,
    UsageError,
    checked_text,
    note,
    rate,
    tolerant_stdout,
    verb,
)
from penstock.errors import InvalidArgument

if TYPE_CHECKING:
    from penstock.api import LLM
    from penstock.engine.request import Chunk

_RULE = "=" * 10
_QUERY = "penstock:query:5d1f0c"  # stands for the prompt when the text before it is looked for
_BOOLS = {"t": True, "true": True, "f": False, "false": False}


@verb(REFUSED | REFUSED_SAMPLING)
def generate(
    context: typer.Context,
    *,
    model: ModelOptions,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", metavar="TEXT", help=r"Message to the model; - reads stdin. \n, \t work.")
    ] = "hello",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", metavar="N", min=1, help="Most tokens to generate.")
    ] = 100,
    sampling: SamplingOptions,
    seed: Annotated[int | None, SEED] = None,
    template: TemplateOptions,
    prefill_response: Annotated[
        str | None, typer.Option("--prefill-response", metavar="TEXT", help="Beginning of the answer.")
    ] = None,
    ignore_chat_template: Annotated[
        bool, typer.Option("--ignore-chat-template", help="Continue the prompt as it is.")
    ] = False,
    extra_eos_token: Annotated[
        list[str] | None, typer.Option("--extra-eos-token", metavar="TOKEN", help="End at these tokens too.")
    ] = None,
    prompt_cache_file: Annotated[
        str | None,
        typer.Option(
            "--prompt-cache-file", metavar="FILE", help="Saved session; the prompt goes on in its last message."
        ),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", metavar="N", min=0, max=20, help="With --json: log probabilities, N best."),
    ] = None,
    verbose: Annotated[str, typer.Option("--verbose", metavar="T|F", help="F prints the text and nothing else.")] = "T",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Continue a prompt and print the text.

    The prompt is put into the model's chat template, unless it has none. Text goes to stdout, numbers to stderr.

    \b
    Examples:
      penstock generate -p "Once upon a time" --ignore-chat-template
      penstock generate --model mlx-community/Qwen3.6-35B-A3B-4bit -p hello
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
    if prompt_cache_file is not None and eos:
        raise UsageError("--extra-eos-token: not supported together with --prompt-cache-file yet")
    variables, arguments = template.variables(), sampling.arguments()
    messages = [*template.messages(), {"role": "user", "content": _read(prompt)}]
    if seed is None:
        seed = secrets.randbits(48)  # drawn here, so that --json can name it; every JSON reader holds it exactly

    llm = model.load(note if talk else None)
    chat = {"variables": variables, "allow_special_in_messages": template.allow_special_in_messages}
    tokens = _encoded(llm, messages, prefill_response, chat, ignore_chat_template, prompt_cache_file is not None)
    arguments |= {"max_tokens": max_tokens, "seed": seed, "logprobs": logprobs}
    if prompt_cache_file is None:
        cached, reading = 0, Reading(len(tokens))
        extra = [_token_id(llm, token) for token in eos]
        chunks = llm.stream(tokens, progress=reading, extra_eos=extra, **arguments)
    else:
        from penstock.api import restore

        session = restore(prompt_cache_file, llm)
        cached, reading = len(session), Reading(len(tokens) + 1)
        chunks = session.stream(tokens, progress=reading, **arguments)

    tolerant_stdout()
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


def _read(prompt: str) -> str:
    """The prompt: standard input for "-", else the argument with its \\n and \\t made real, as mlx-lm does."""
    if prompt != "-":
        return checked_text("--prompt", prompt.replace("\\n", "\n").replace("\\t", "\t"))
    try:
        return checked_text("standard input", sys.stdin.read())
    except UnicodeDecodeError:
        raise InvalidArgument("standard input: is not valid UTF-8") from None


def _encoded(
    llm: "LLM",
    messages: list[dict[str, Any]],
    beginning: str | None,
    options: dict[str, Any],
    ignore_template: bool,
    continued: bool,
) -> list[int]:
    """The prompt's tokens. `options`: of `Tokenizer.chat_text`. `continued`: a session has read all that the template
    writes before the prompt.
    """
    tokenizer, beginning = llm.tokenizer, checked_text("--prefill-response", beginning or "")
    if ignore_template or not tokenizer.has_chat_template:
        variables = options["variables"]
        for name, given in (("--system-prompt", len(messages) > 1), ("--chat-template-config", bool(variables))):
            if given:
                reason = "--ignore-chat-template was given" if ignore_template else "the model has no chat template"
                raise UsageError(f"{name}: {reason}, expected a prompt alone")
        return tokenizer.encode(messages[-1]["content"] + beginning, add_special_tokens=not continued)
    chat = tokenizer.chat_text(messages, **options)
    text = chat.marked
    if continued:
        pattern = tokenizer.chat_text([{"role": "user", "content": _QUERY}], **options).text
        before, found, _ = pattern.partition(_QUERY)
        if not found or not text.startswith(before):
            raise InvalidArgument("--prompt-cache-file: the template alters the prompt, use --ignore-chat-template")
        text = text[len(before) :]
    return tokenizer.encode_chat(replace(chat, marked=text + beginning))


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
