"""Messages between the front process of a server and its engine process, and the connection that carries them.

A frame is the length of its payload, four bytes, and the payload: one message in msgpack, an array that begins with the
message's kind. Nothing in it can name code to run. A frame that is cut off, too long or not understood ends the
connection: both sides are of one version, so it is a mistake, and what follows cannot be trusted.
"""

from __future__ import annotations

import dataclasses
import socket
import struct
import threading
from collections.abc import Iterable
from typing import Any

import msgspec

from penstock import errors
from penstock.engine.reading import Reading
from penstock.engine.request import Request, Timings
from penstock.engine.sampling import SamplingParams
from penstock.errors import InvalidArgument, PenstockError, QueueFull

MAX_FRAME = 64 << 20  # bytes; a prompt of a million tokens has 5 MB

_LENGTH = struct.Struct("<I")
_READ = 1 << 18  # bytes that are asked of the system at a time


class ChannelError(PenstockError):
    """Bytes that are no messages, or a connection that ended in the middle of one."""


class _Message(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


# --------------------------------------------------------------------------------------------------------------------
# Front to engine


class Start(_Message):
    """Which model the engine process runs, and how: arguments of `load` and of the scheduler."""

    model: dict[str, Any]
    scheduler: dict[str, Any]


class Submit(_Message):
    """A request: its number, and what the engine has to know of it. grammar: its text (see `Grammar.source`)."""

    id: int
    prompt: list[int]
    params: dict[str, Any]
    max_tokens: int
    eos: list[int]
    client: str | None = None
    grammar: str | None = None
    speculate: str | None = None
    num_draft_tokens: int | None = None
    reading: Reading | None = None
    expert_heat: bool = False


class Cancel(_Message):
    """Its reader wants no more. finished: because the answer is complete, by a stop string."""

    id: int
    finished: bool = False


class Pause(_Message):
    """Its reader lags behind."""

    id: int


class Resume(_Message):
    """Its reader has caught up."""

    id: int


class Close(_Message):
    """Take no more requests; those under way may finish within so many seconds (None: however long it takes)."""

    deadline: float | None = None


# --------------------------------------------------------------------------------------------------------------------
# Engine to front


class Tokens(_Message):
    """What a step brought: tokens and whose they are. By place: reasons of last tokens, log probabilities."""

    requests: list[int]
    tokens: list[int]
    reasons: dict[int, str] = {}
    logprobs: dict[int, tuple[float, list[tuple[int, float]] | None]] = {}


class Read(_Message):
    """What the reading of a request has found: a piece, the bytes of its arrays."""

    id: int
    arrays: list[bytes]


class State(_Message):
    """A request is in another state: "waiting", "prompt" or "generating", with so many tokens of its prompt reused."""

    id: int
    state: str
    reused: int
    timings: list[float]


class End(_Message):
    """A request is done; nothing follows about it. experts: how often its answer chose each, by layers."""

    id: int
    reused: int
    timings: list[float]
    experts: list[list[int]] | None = None


class Failed(_Message):
    """A request ended with an error."""

    id: int
    kind: str
    message: str
    retry_after: int = 1


class Progress(_Message):
    """How far loading is, from 0 to 1, and a remark."""

    share: float
    note: str = ""


class Ready(_Message):
    """The model is there: what is known of it, and requests that run at one time."""

    model: dict[str, Any]
    max_sequences: int
    queue: int


class NotLoaded(_Message):
    """There will be no model; the process ends."""

    kind: str
    message: str


class Damaged(_Message):
    """The weights cannot be read any more."""

    message: str


class Metrics(_Message):
    """Fields of SchedulerMetrics and of the model's Stats."""

    scheduler: dict[str, int | float]
    stats: dict[str, Any]


FromFront = Start | Submit | Cancel | Pause | Resume | Close
FromEngine = Tokens | Read | State | End | Failed | Progress | Ready | NotLoaded | Damaged | Metrics
Message = FromFront | FromEngine


def submit_message(number: int, request: Request, client: str | None) -> Submit:
    """Raises InvalidArgument for a request with callables, which a message cannot carry."""
    if request.hooks is not None:
        raise InvalidArgument(
            "submit: the request has logits_processors or a sampler, expected none: the engine runs in another process"
        )
    params = {field.name: getattr(request.params, field.name) for field in dataclasses.fields(request.params)}
    if params["logit_bias"] is not None:
        params["logit_bias"] = {int(token): float(bias) for token, bias in params["logit_bias"].items()}
    grammar = None if request.grammar is None else request.grammar.source
    drafts = request.speculate, request.num_draft_tokens
    about = (request.prompt, params, request.max_tokens, sorted(request.eos), client, grammar, *drafts)
    return Submit(number, *about, request.reading, request.expert_heat)


def sampling_params_of(message: Submit) -> SamplingParams:
    return SamplingParams(**message.params)


_NUMBERS = [field for field in dataclasses.fields(Timings) if field.name != "draft_places"]


def timings_values(timings: Timings) -> list[float]:
    return [getattr(timings, field.name) for field in _NUMBERS]


def set_timings(timings: Timings, values: list[float]) -> None:
    for field, value in zip(_NUMBERS, values, strict=False):
        setattr(timings, field.name, type(getattr(timings, field.name))(value))


def error_message(number: int, error: BaseException) -> Failed:
    retry = error.retry_after if isinstance(error, QueueFull) else 1
    return Failed(number, type(error).__name__, str(error), retry)


def error_of(kind: str, message: str, retry_after: int = 1) -> Exception:
    """The exception that a message tells of. One of another kind than `penstock.errors` becomes a RuntimeError."""
    known = getattr(errors, kind, None)
    if known is QueueFull:
        return QueueFull(message, retry_after)
    if isinstance(known, type) and issubclass(known, PenstockError):
        return known(message)
    return RuntimeError(f"{kind}: {message}")


class Connection:
    """One end of a socket: messages of any thread are sent whole, one thread receives."""

    def __init__(self, made: socket.socket, receives: Any) -> None:
        """receives: the union of the messages that the other end sends."""
        self._socket = made
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(receives)
        self._sending = threading.Lock()
        self._received = bytearray()

    def send(self, *messages: Message) -> None:
        """Send messages with one write. Raises OSError when the other end has gone."""
        with self._sending:
            self._socket.sendall(b"".join(self._frames(messages)))

    def _frames(self, messages: Iterable[Message]) -> Iterable[bytes]:
        for message in messages:
            payload = self._encoder.encode(message)
            if len(payload) > MAX_FRAME:
                raise ChannelError(f"channel: a message has {len(payload)} bytes, expected at most {MAX_FRAME}")
            yield _LENGTH.pack(len(payload))
            yield payload

    def receive(self) -> list[Any]:
        """Wait for messages: all that have arrived in whole, at least one; none when the other end was closed.

        Raises ChannelError for what is no message, and where the connection ends within one.
        """
        while True:
            if found := self._complete():
                return found
            try:
                part = self._socket.recv(_READ)
            except OSError:
                part = b""
            if not part:
                if self._received:
                    raise ChannelError(f"channel: ended within a message, after {len(self._received)} bytes of it")
                return []
            self._received += part

    def _complete(self) -> list[Any]:
        """Messages whose frames have arrived; the rest stays."""
        found, at, data = [], 0, self._received
        while len(data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            if length > MAX_FRAME:
                raise ChannelError(f"channel: a message of {length} bytes is announced, expected at most {MAX_FRAME}")
            end = at + _LENGTH.size + length
            if len(data) < end:
                break
            try:
                with memoryview(data) as view, view[at + _LENGTH.size : end] as payload:
                    found.append(self._decoder.decode(payload))
            except (msgspec.DecodeError, ValueError) as error:
                raise ChannelError(f"channel: not a message: {error}") from None
            at = end
        del data[:at]
        return found

    def close(self) -> None:
        self._socket.close()
