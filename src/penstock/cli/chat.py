"""penstock chat: talk to a model. Earlier turns stay computed; an answer can be stopped, or given again."""

import contextlib
import itertools
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli._foreign import BATCH, LOADING, SAMPLING, TERMINAL, refused, taken_flag
from penstock.cli._model import (
    RANDOM_SEED,
    ModelOptions,
    Reading,
    SamplingOptions,
    TemplateOptions,
    checked_text,
    max_tokens_option,
    note,
    rate,
    set_template,
    verb,
)
from penstock.errors import InvalidArgument, OutOfMemory

if TYPE_CHECKING:
    from penstock.api import LLM
    from penstock.engine.request import Chunk
    from penstock.engine.session import SessionSnapshot

_PROMPT = ">> "
_HISTORY = 1000  # lines that are kept

_HELP = """\
/regen       answer again, with the next seed (needs --temp above 0 to differ)
/clear, r    forget the conversation; the system prompt stays
/exit, q     end, as do /quit and Ctrl-D
/help, h     this list
Ctrl-C       stops an answer, which stays as far as it came; at the prompt it clears the line, twice it ends"""

_ANYTHING = {"role": "user", "content": "x"}
_COMMANDS = {
    "/regen": "regen",
    "/clear": "clear",
    "r": "clear",
    "/exit": "exit",
    "/quit": "exit",
    "q": "exit",
    "/help": "help",
    "h": "help",
}


_FOREIGN = (
    *LOADING,
    *SAMPLING,
    *TERMINAL,
    BATCH,
    taken_flag("--conversation -cnv", "chat is always one"),
    refused("--grammar --grammar-file --json-schema --json-schema-file -j -jf", "penstock generate and serve take it"),
)


@verb(_FOREIGN)
def chat(
    *,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="The first message; the others are asked for.",
            rich_help_panel="Messages",
        ),
    ] = None,
    single_turn: Annotated[
        bool, typer.Option("--single-turn", "-st", help="End after one answer.", rich_help_panel="Messages")
    ] = False,
    max_tokens: Annotated[int, max_tokens_option("Most tokens of an answer; -1 fills the context.", "Messages")] = (
        "256"  # type: ignore[assignment]  # the parser makes it a number
    ),
    sampling: SamplingOptions,
    seed: Annotated[int, RANDOM_SEED] = 0,
    template: TemplateOptions,
    model: ModelOptions,
) -> None:
    """Talk to a model.

    Type a message; /help lists the commands. Without a terminal every line of standard input is a message. Answers go
    to stdout, everything else to stderr.

    \b
    Examples:
      penstock chat --temp 0.8
      penstock chat -p 'Tell me a story.' --single-turn
      penstock chat --model mlx-community/Qwen3.6-35B-A3B-4bit -c 32k
      printf 'hello\\n/regen\\n' | penstock chat --temp 0.8
    """
    model.follow()
    options = {
        "template_variables": template.variables(),
        "allow_special_in_messages": template.allow_special_in_messages,
    }
    arguments, own_template = sampling.arguments(), template.template()
    first = template.messages()
    llm = model.load(note)
    arguments |= {"max_tokens": llm.max_context if max_tokens < 0 else max_tokens}
    arguments |= {"seed": secrets.randbits(48) if seed < 0 else seed}
    if own_template is not None:
        set_template(llm.tokenizer, own_template)
    if not llm.tokenizer.has_chat_template:
        raise InvalidArgument(f"chat: {model.name} has no chat template, expected one (penstock generate needs none)")
    llm.tokenizer.compile_chat_template()
    note(f"{model.name}, context of {llm.max_context} tokens, {llm.engine.device.name}; /help lists the commands")
    lines = _Typed() if sys.stdin.isatty() else _Piped()
    with lines:
        said = itertools.chain([] if prompt is None else [prompt], iter(lines.read, None))
        failed = _talk(Conversation(llm, first, options), said, _Interrupts(), arguments, single_turn)
    if failed and not lines.interactive:
        raise typer.Exit(1)


def _talk(
    conversation: "Conversation",
    lines: Iterable[str],
    interrupts: "_Interrupts",
    arguments: dict[str, Any],
    single_turn: bool = False,
) -> bool:
    """Read, answer, until the end or with `single_turn` once; whether a message went unanswered."""
    failed = False
    for line in lines:
        command = _COMMANDS.get(line.strip())
        if command == "exit":
            break
        if command == "help":
            note(_HELP)
        elif command == "clear":
            conversation.clear()
            note("cleared")
        elif command is None and re.match(r"\s*/\w+(\s|$)", line):
            note(f"{line.split()[0]} is no command; /help lists them")
            failed = True
        elif line.strip() or command:
            try:
                _answer(conversation, None if command == "regen" else line, interrupts, arguments)
            except (InvalidArgument, OutOfMemory) as error:
                note(f"{error}")
                failed = True
            if single_turn:
                break
    return failed


def _answer(
    conversation: "Conversation", message: str | None, interrupts: "_Interrupts", arguments: dict[str, Any]
) -> None:
    """Print an answer as it comes, then its numbers."""
    count, start, first = 0, time.perf_counter(), 0.0
    with interrupts.watched():
        try:
            chunks = conversation.answer(message, interrupts.check, arguments)
            for chunk in chunks:
                now = time.perf_counter()
                first, count = first or now, count + 1
                print(chunk.text, end="", flush=True)
                if interrupts.pending:
                    break
            chunks.close()
        except _Stopped:
            note("stopped while the message was being read; it is forgotten")
            return
        finally:
            if count:
                print(flush=True)
    read, cached = conversation.read
    kept = f" after {cached} kept" if cached else ""
    prompt = f"prompt {read} tokens{kept}, {rate(read, first - start):.1f} tok/s; " if read else ""
    note(f"[{prompt}answer {count} tokens, {rate(count - 1, time.perf_counter() - first):.1f} tok/s]")
    if interrupts.pending:
        note("stopped")
    elif conversation.full:
        note(f"the context of {conversation.llm.max_context} tokens is full; /clear starts a new conversation")


class _Stopped(Exception):
    """Ctrl-C came between two chunks of a prompt."""


class Conversation:
    """Messages, and a session that has computed them.

    Snapshots are taken where a later prompt may part from this one: behind the system prompt, for the conversation
    after a /clear; where the next turn's prompt may differ, because templates drop the reasoning of earlier answers or
    open an answer in a way they do not repeat; and at the end of the prompt, to answer it again.
    """

    def __init__(self, llm: "LLM", first: list[dict[str, Any]], options: dict[str, Any]) -> None:
        self.llm = llm
        self.read = (0, 0)  # tokens of the last prompt: computed, and kept from before
        self.full = False
        self._first, self._options = first, options  # messages before the first, arguments of chat_tokens
        self._messages = list(first)
        self._session = llm.session()
        self._shown = _headers(llm)
        self._system: SessionSnapshot | None = None
        self._stable: SessionSnapshot | None = None
        self._ready: SessionSnapshot | None = None
        self._again = 0

    def clear(self) -> None:
        """Only the messages from before the user's first remain."""
        self._messages = list(self._first)
        self._stable = self._ready = None

    def answer(
        self, message: str | None, between: Callable[[], None], arguments: dict[str, Any]
    ) -> "Generator[Chunk, None, None]":
        """A generator of the answer to `message`, or of another answer to the last one (None).

        `between` is called between chunks of the prompt and may raise. A message whose prompt cannot be computed is
        forgotten; an answer that is not followed to its end stays as far as it came.
        """
        if message is None:
            if self._ready is None:
                raise InvalidArgument("/regen: there is no answer yet, expected a message first")
            if arguments["temperature"] == 0:
                note("the temperature is 0: the answer will be the same (start with --temp 0.8)")
            self._again += 1
            del self._messages[-1]  # the answer; there is one, if empty, wherever a prompt was computed
            self._session.rewind(self._ready)
            self.read = (0, len(self._session))
        else:
            before = len(self._messages)
            self._messages.append({"role": "user", "content": checked_text("message", message)})
            try:
                self._compute_prompt(between)
            except BaseException:
                del self._messages[before:]
                raise
            self._again = 0
        return self._generated(arguments)

    def _generated(self, arguments: dict[str, Any]) -> "Generator[Chunk, None, None]":
        said = {"role": "assistant", "content": ""}
        self._messages.append(said)
        seed = (arguments["seed"] + self._again) % 2**64
        self.full = False
        read = _WithHeaders(self.llm, said) if self._shown else None
        chunks = self._session.stream((), **(arguments | self._shown | {"seed": seed}))
        try:
            for chunk in chunks:
                if read is None:
                    said["content"] += chunk.text
                else:
                    chunk = read(chunk)
                self.full = chunk.finish_reason == "length" and len(self._session) >= self.llm.max_context
                yield chunk
        finally:
            chunks.close()  # type: ignore[attr-defined]

    def _compute_prompt(self, between: Callable[[], None]) -> None:
        tokens = self.llm.chat_tokens(self._messages, **self._options)
        if len(tokens) >= self.llm.max_context:
            raise InvalidArgument(
                f"the conversation has {len(tokens)} tokens with this message, expected fewer than "
                f"{self.llm.max_context} (the context); /clear starts a new one"
            )
        reading = Reading(len(tokens))

        def progress(count: int) -> None:
            between()
            reading(count)

        snapshots = [snapshot for snapshot in (self._system, self._stable, self._ready) if snapshot is not None]
        kept = len(tokens)

        def advance(count: int) -> "SessionSnapshot":
            nonlocal kept
            kept = min(kept, self._session.advance(tokens[:count], snapshots, progress))
            snapshots.append(self._session.snapshot())
            return snapshots[-1]

        try:
            if self._first and self._system is None and (same := self._shared(tokens, [_ANYTHING])):
                self._system = advance(same)
            answered = [*self._messages[len(self._first) :], {"role": "assistant", "content": "x"}, _ANYTHING]
            if same := self._shared(tokens, answered):
                self._stable = advance(same)
            self._ready = advance(len(tokens))
        finally:
            reading.close()
        self.read = (len(tokens) - kept, kept)

    def _shared(self, tokens: list[int], messages: list[dict[str, Any]]) -> int:
        """How many of the prompt's tokens the prompt for other messages of the user and the model begins with."""
        try:
            other = self.llm.chat_tokens([*self._first, *messages], **self._options)
        except InvalidArgument:  # a template may refuse messages that it would never be given
            return 0
        pairs = zip(tokens, other, strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(other)))


def _headers(llm: "LLM") -> dict[str, Any]:
    from penstock.text.formats import headers_shown

    return headers_shown(llm.tokenizer)


class _WithHeaders:
    """An answer whose messages have headers: its texts are shown without these, an empty line between reasoning and
    content, and only the content is kept, in `said`."""

    def __init__(self, llm: "LLM", said: dict[str, Any]) -> None:
        from penstock.text.formats import format_of, parser_for

        self._said, self._parser, self._last = said, parser_for(format_of(llm.tokenizer)), None

    def __call__(self, chunk: "Chunk") -> "Chunk":
        from penstock.text.formats.deltas import Content, Reasoning

        deltas = self._parser.feed(chunk.text)
        if chunk.finish_reason is not None:
            deltas += self._parser.end()
        pieces = []
        for delta in deltas:
            assert isinstance(delta, Content | Reasoning)  # there are no tools
            pieces += ["\n\n" if self._last not in (None, type(delta)) else "", delta.text]
            self._last = type(delta)
            self._said["content"] += delta.text if isinstance(delta, Content) else ""
        return replace(chunk, text="".join(pieces))


# --------------------------------------------------------------------------------------------------------------------
# The user


class _Interrupts:
    """Ctrl-C. While an answer is computed it only leaves a mark, so that no step is cut in the middle.

    The third one in a row does interrupt: a step may take long on a slow machine.
    """

    def __init__(self) -> None:
        self._count = 0

    @property
    def pending(self) -> bool:
        return self._count > 0

    def check(self) -> None:
        if self.pending:
            raise _Stopped

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        self._count = 0
        try:
            before = signal.signal(signal.SIGINT, self._mark)
        except ValueError:  # not the main thread: no signals come here
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _mark(self, *_: object) -> None:
        self._count += 1
        if self._count >= 3:
            raise KeyboardInterrupt


class _Piped:
    """Lines of a file or pipe."""

    interactive = False

    def __enter__(self) -> "_Piped":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def read(self) -> str | None:
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            raise InvalidArgument("standard input: is not valid UTF-8") from None
        return line.rstrip("\r\n") if line else None


class _Typed:
    """Lines from a terminal, with editing and a history where readline is there."""

    interactive = True

    def __init__(self) -> None:
        try:
            import readline
        except ImportError:
            self._readline: Any = None
        else:
            self._readline = readline
        self._file = _history_file()
        self._old = 0

    def __enter__(self) -> "_Typed":
        if self._readline is not None:
            self._readline.set_history_length(_HISTORY)
            with contextlib.suppress(OSError):
                self._readline.read_history_file(self._file)
            self._old = self._readline.get_current_history_length()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._readline is None or self._readline.get_current_history_length() == self._old:
            return
        with contextlib.suppress(OSError):  # a folder that cannot be written: no history
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file.touch(mode=0o600)  # before anything is in it: it holds what the user wrote
            self._readline.append_history_file(self._readline.get_current_history_length() - self._old, self._file)

    def read(self) -> str | None:
        stopped = False
        while True:
            try:
                if sys.stdout.isatty():
                    return input(_PROMPT)
                print(_PROMPT, end="", file=sys.stderr, flush=True)  # input() would write it into the answers
                return input()
            except EOFError:
                print(file=sys.stderr)
                return None
            except KeyboardInterrupt:
                print(file=sys.stderr)
                if stopped:
                    raise
                stopped = True
                note("Ctrl-C again, Ctrl-D or /exit ends")


def _history_file() -> Path:
    """chat_history in the user's state folder, as the XDG specification places it."""
    home = os.environ.get("XDG_STATE_HOME", "")
    with contextlib.suppress(RuntimeError):  # a user without a home folder
        return Path(home if home.startswith("/") else "~/.local/state", "penstock", "chat_history").expanduser()
    return Path(os.devnull, "chat_history")  # cannot be written
