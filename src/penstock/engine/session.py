"""A conversation that keeps its state: append, generate, go back, save.

Recurrent layers forget how they came to a state, so a session can only go back to a snapshot. A snapshot is cheap: it
holds pages that the session would write again only in a copy, and copies the recurrent state (megabytes per layer).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.dtypes import dtype_name
from penstock.engine.cache import Snapshot
from penstock.engine.engine import Engine
from penstock.engine.request import Chunk, Completion, Request, make_request
from penstock.engine.response import ResponseHandle
from penstock.engine.scheduler import Continued, Scheduler
from penstock.errors import CheckpointError, DTypeError, InvalidArgument
from penstock.models.step import PAGE, PagedKV
from penstock.text.tokenizer import Tokenizer
from penstock.weights.safetensors import SafetensorsFile

FORMAT = "penstock-session"
VERSION = 1


@dataclass(eq=False)
class SessionSnapshot:
    """What `Session.snapshot` returns: give it to `Session.rewind`."""

    tokens: tuple[int, ...]
    logits: np.ndarray | None
    kept: Snapshot
    engine: int  # id of the engine that holds `kept`


class Session:
    """One sequence of a model. `tokens` is all it has read and written; the last one may not have been computed yet.

    `logits` [vocab] are those after the last token, None while it has not been computed. An answer that is still being
    read ends where the session is changed in another way: what was read of it stays.
    """

    def __init__(self, scheduler: Scheduler, engine: Engine, tokenizer: Tokenizer, model: str | None) -> None:
        self.engine = engine
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._model = model
        self._sequence = engine.open()
        self.logits: np.ndarray | None = None
        self.tokens: list[int] = []
        self._closing = weakref.finalize(self, engine.close, self._sequence)
        self._answer: ResponseHandle | None = None  # that is being read

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        state = "closed" if self._sequence.closed else f"{len(self.tokens)} tokens"
        return f"Session({state} of {self.engine.max_context})"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back. A closed session refuses everything else."""
        self._end_answer()
        self._closing()

    def append(self, prompt: str | Seq[int], progress: Callable[[int], None] | None = None) -> int:
        """Read text (without a template or added special tokens, unless it is the first) or token ids; their number."""
        ids = self._encoded(prompt)
        self._end_answer()
        self._read([*self.tokens, *ids], progress)
        return len(ids)

    def _read(self, tokens: list[int], progress: Callable[[int], None] | None) -> None:
        """Compute those of `tokens` that the caches do not hold yet. If that fails the session has what was done."""
        done = self._sequence.length
        if done == len(tokens):
            return
        try:
            logits = self.engine.prefill(self._sequence, tokens[done:], progress=progress)
        except BaseException:
            self._keep(tokens, done)
            raise
        self.tokens, self.logits = tokens, logits

    def _keep(self, tokens: list[int], done: int) -> None:
        """After a failure: `tokens` as far as they were computed, if that is more than the `done` of before."""
        if self._sequence.length > done:
            self.tokens, self.logits = tokens[: max(self._sequence.length, len(self.tokens))], None

    def _encoded(self, prompt: str | Seq[int]) -> list[int]:
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt, add_special_tokens=not self.tokens)
        return self.engine.token_array(prompt, tokenizer=self._tokenizer).tolist()

    def stream(
        self,
        prompt: str | Seq[int] = (),
        max_tokens: int = 256,
        stop: str | Seq[str] = (),
        progress: Callable[[int], None] | None = None,
        **sampling: Any,
    ) -> Iterator[Chunk]:
        """Append a prompt and continue it, token by token. What was generated belongs to the session. Sampling and
        extra_eos as in `LLM.generate`. The prompt is checked now, and goes on where the session is at the first chunk.
        """
        self._request(prompt, max_tokens, stop, sampling)

        def chunks() -> Iterator[Chunk]:
            yield from self.read_from(self.submit(self.request(prompt, max_tokens, stop, **sampling), progress))

        return chunks()

    def generate(
        self, prompt: str | Seq[int] = (), max_tokens: int = 256, stop: str | Seq[str] = (), **sampling: Any
    ) -> Completion:
        """Append a prompt and continue it; sampling as in `LLM.generate`."""
        handle = self.submit(self.request(prompt, max_tokens, stop, **sampling))
        for _ in self.read_from(handle):
            pass
        return handle.completion()

    def request(
        self, prompt: str | Seq[int] = (), max_tokens: int = 256, stop: str | Seq[str] = (), **sampling: Any
    ) -> Request:
        """A checked request for `submit`: the prompt goes on where the session is, options as in `LLM.generate`. An
        answer that is being read ends here.
        """
        self._end_answer()
        return self._request(prompt, max_tokens, stop, sampling)

    def _request(
        self, prompt: str | Seq[int], max_tokens: int, stop: str | Seq[str], sampling: Mapping[str, Any]
    ) -> Request:
        ids = self._encoded(prompt)
        if not ids and not self.tokens:
            raise InvalidArgument("session: it is empty and so is the prompt, expected at least one token")
        done = self._sequence.length
        rest = [*self.tokens[done:], *ids]
        if not rest and self.logits is None:
            raise InvalidArgument("prompt has no tokens, expected at least one")
        limits = self.engine.limits
        return make_request(limits, self._tokenizer, rest, max_tokens, stop, sampling, start=done, continues=True)

    def submit(self, request: Request, progress: Callable[[int], None] | None = None) -> ResponseHandle:
        """Hand in what `request` made; the session may be used again when `read_from` or `hold` has its answer."""
        self._end_answer()
        self.engine.check_room(self._sequence, len(request.prompt))
        held = Continued(self._sequence, self.tokens[: self._sequence.length], self.logits)
        self._answer = self._scheduler.submit(request, buffer=1, progress=progress, continued=held)
        return self._answer

    def read_from(self, handle: ResponseHandle) -> Iterator[Chunk]:
        """The chunks of an answer that `submit` began, to its end or to another use of the session. What was read
        belongs to the session.
        """
        try:
            for chunk in handle:
                if handle is not self._answer:
                    return
                self.hold(handle)
                yield chunk
        finally:
            handle.cancel()
            self.hold(handle)

    def _end_answer(self) -> None:
        """The session goes on in another way than the answer that is being read."""
        if (handle := self._answer) is not None:
            handle.cancel()
            self.hold(handle)
            self._answer = None

    def hold(self, handle: ResponseHandle) -> None:
        """Have what was read of an answer: after its end, or its failure, for one who reads the handle himself. Not of
        one that another use of the session has ended.
        """
        if handle is not self._answer:
            return
        done = handle.usage.cached_tokens
        read = [*self.tokens[:done], *handle.request.prompt]
        if handle.tokens:
            self.tokens = [*read, *handle.tokens]
            self.logits = None  # of the token before the last one
        else:
            self._keep(read, done)

    def advance(
        self, tokens: Seq[int], snapshots: Seq[SessionSnapshot] = (), progress: Callable[[int], None] | None = None
    ) -> int:
        """Make the session hold exactly `tokens`, from the latest state that is a beginning of them; how many it kept.

        Candidates are the session itself and `snapshots`; without a fitting one everything is read again. A state that
        holds all of `tokens` but not the logits after them does not fit: nothing could be generated from it.
        """
        ids: list[int] = self.engine.token_array(tokens, tokenizer=self._tokenizer).tolist()
        self._end_answer()
        if self._sequence.closed:
            raise InvalidArgument("session: it was closed, expected an open one")
        done = self._sequence.length

        def fits(tokens: Seq[int], length: int, logits: np.ndarray | None) -> bool:
            return ids[: len(tokens)] == list(tokens) and (length < len(ids) or logits is not None or not ids)

        own = not self._sequence.corrupt and fits(self.tokens[:done], done, self.logits)
        fitting = [snapshot for snapshot in snapshots if fits(snapshot.tokens, snapshot.kept.length, snapshot.logits)]
        best = max(fitting, key=lambda m: m.kept.length, default=None)
        if best is not None and (not own or best.kept.length > done):
            self.rewind(best)
        elif not own:
            self._restart()
        done = self._sequence.length
        self._read(ids, progress)
        self.tokens = ids
        return done

    def _restart(self) -> None:
        self.engine.close(self._sequence)
        self._closing.detach()
        self._sequence = self.engine.open()
        self._closing = weakref.finalize(self, self.engine.close, self._sequence)
        self.tokens, self.logits = [], None

    def snapshot(self) -> SessionSnapshot:
        """The state of now. It stays valid while the model is loaded, also after the session has gone on."""
        kept = self.engine.snapshot(self._sequence)
        snapshot = SessionSnapshot(tuple(self.tokens), self.logits, kept, id(self.engine))
        weakref.finalize(snapshot, self.engine.drop, kept)
        return snapshot

    def rewind(self, snapshot: SessionSnapshot) -> None:
        """Be as at `snapshot`, which may be another session's of the same model."""
        if not isinstance(snapshot, SessionSnapshot):
            raise DTypeError(f"rewind: snapshot is a {type(snapshot).__name__}, expected what snapshot() returned")
        if snapshot.engine != id(self.engine):
            raise InvalidArgument("rewind: the snapshot belongs to another model, expected one of this model")
        self._end_answer()
        self.engine.rewind(self._sequence, snapshot.kept)
        self.tokens, self.logits = list(snapshot.tokens), snapshot.logits

    @property
    def can_truncate(self) -> bool:
        """Whether `truncate` can go back: the model has no recurrent state, and no window has been left."""
        return self.engine.caches.can_truncate(self._sequence)

    def truncate(self, length: int) -> None:
        """Forget the tokens from number `length` on. Raises InvalidArgument where `can_truncate` is False."""
        self._end_answer()
        if not 0 <= length <= len(self.tokens):
            raise InvalidArgument(f"truncate: length is {length}, expected 0 to {len(self.tokens)}")
        if length == len(self.tokens):
            return
        if length < self._sequence.length:
            self.engine.truncate(self._sequence, length)
        self.tokens, self.logits = self.tokens[:length], None

    def fork(self) -> Session:
        """Another session that goes on from here by itself; both share the memory of what they have in common."""
        snapshot = self.snapshot()
        made = Session(self._scheduler, self.engine, self._tokenizer, self._model)
        try:
            made.rewind(snapshot)
        except BaseException:
            made.close()
            raise
        return made

    # -- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
        """Write everything into one file (safetensors), under a temporary name first: it is there whole, or the path is
        as it was. metadata: text of the caller's own beside it, see `metadata_of`. Raises CheckpointError if it cannot
        be written, DTypeError for what is no path and for metadata that is no text.
        """
        target = _target(path)
        named = {} if metadata is None else metadata
        texts = isinstance(named, Mapping) and all(isinstance(text, str) for pair in named.items() for text in pair)
        if not texts:
            raise DTypeError(f"save: metadata is {metadata!r:.100}, expected names and values that are strings")
        engine, sequence = self.engine, self._sequence
        engine.check_room(sequence, 0)
        arrays: dict[str, np.ndarray] = {"tokens": np.array(self.tokens, np.int32)}
        if self.logits is not None:
            arrays["logits"] = self.logits
        with engine.lock:
            engine.settle(sequence)
            for n in range(len(engine.model.family.caches(engine.model.config))):  # a head's is left out
                for part, array in zip(("first", "second"), engine.caches.rows(sequence, n), strict=True):
                    arrays[f"layers.{n}.{part}"] = np.ascontiguousarray(array)
        about = {
            "format": FORMAT,
            "version": str(VERSION),
            "model": self._model or "",
            "fingerprint": engine.model.fingerprint,
            "dtype": engine.dtype,
            "state_dtype": engine.state_dtype,
            "activations": engine.activations,
            "length": str(sequence.length),
        }
        if metadata:
            about["metadata"] = json.dumps(dict(metadata))
        about["digest"] = _digest(about, arrays)
        _write(target, arrays, about)


def _target(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise DTypeError(f"save: path is a {type(path).__name__}, expected a str or a Path") from None


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise what `Session.save` raises for a path that cannot be written, before anything is computed for it."""
    with _temporary(_target(path)):
        pass


def _write(target: Path, arrays: dict[str, np.ndarray], about: dict[str, str]) -> None:
    from safetensors.numpy import save_file

    with _temporary(target) as temporary:
        save_file(arrays, temporary, about)
        temporary.replace(target)


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A file beside the target, to take its place; gone at the end. Raises CheckpointError if it cannot be written."""
    from safetensors import SafetensorError

    temporary = target.parent / f".penstock-{secrets.token_hex(8)}.tmp"  # fits where the longest name does
    try:
        if target.is_dir():
            raise ValueError("is a folder, expected the name of a file")
        if target.exists() and not target.is_file():  # a rename would put a file in its place
            raise ValueError("is a device or a pipe, expected the name of a file")
        temporary.touch(exist_ok=False)  # what is wrong with the folder, in the system's words
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: a NUL in the path, too
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise CheckpointError(f"{ascii(str(target))[1:-1]}: cannot be written: {reason}") from None


def read_about(path: str | os.PathLike[str]) -> tuple[SafetensorsFile, dict[str, str]]:
    """A session file and its description. Raises CheckpointError for anything that is not a session of this version."""
    file = SafetensorsFile.open(Path(path))
    about = dict(file.metadata)
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format is {about.get('format')!r}, expected a saved session ({FORMAT!r})")
    if about.get("version") != str(VERSION):
        raise CheckpointError(f"{path}: version is {str(about.get('version'))[:20]!r}, expected {VERSION}")
    missing = [key for key in ("model", "fingerprint", "dtype", "activations", "length", "digest") if key not in about]
    if missing or not about["length"].isdecimal() or len(about["length"]) > 10:
        raise CheckpointError(f"{path}: the description lacks {', '.join(missing) or 'a length'}, expected a session")
    return file, about


def metadata_of(about: Mapping[str, str], path: str | os.PathLike[str]) -> dict[str, str]:
    """What `Session.save` was given as metadata, from the description of a session file."""
    try:
        found = json.loads(about.get("metadata", "{}"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise CheckpointError(f"{path}: metadata is damaged, expected names and texts")
    return found


def restore_into(
    session: Session, path: str | os.PathLike[str], opened: tuple[SafetensorsFile, dict[str, str]] | None = None
) -> None:
    """Fill a new session from a file of the same model, dtypes and activations; opened: what `read_about` gave."""
    file, about = opened or read_about(path)
    engine = session.engine
    for key, own in (
        ("fingerprint", engine.model.fingerprint),
        ("dtype", engine.dtype),
        ("state_dtype", engine.state_dtype),
        ("activations", engine.activations),
    ):
        saved = about.get(key, "float32")  # files from before there were other states do not name their dtype
        if saved != own:
            what = {"fingerprint": "another model or quantization"}.get(key, f"{key} {saved[:20]!r}")
            raise CheckpointError(f"{path}: was saved with {what}, expected this model's ({key} {own[:16]!r})")
    length = int(about["length"])
    if length > engine.max_context:
        raise CheckpointError(f"{path}: has {length} positions, expected at most {engine.max_context} (max_context)")
    arrays = {name: file.array(name) for name in file.tensors}
    wanted = {"tokens": ((arrays["tokens"].size,), "int32")} if "tokens" in arrays else {"tokens": ((0,), "int32")}
    if "logits" in arrays:
        wanted["logits"] = ((engine.model.config.vocab_size,), "float32")
    layers = len(engine.model.family.caches(engine.model.config))
    for n, layout in enumerate(engine.caches.saved_layouts[:layers]):
        if isinstance(layout, PagedKV):
            dead = 0 if layout.window is None else max(0, length - layout.window + 1) // PAGE
            shapes = [((length - dead * PAGE, width), engine.dtype) for width in (layout.key_width, layout.value_width)]
        else:
            shapes = [(layout.conv, engine.dtype), (layout.state, layout.dtype)]
        wanted |= {f"layers.{n}.{part}": shape for part, shape in zip(("first", "second"), shapes, strict=True)}
    for name, (shape, dtype) in wanted.items():
        if name not in arrays or tuple(arrays[name].shape) != tuple(shape) or dtype_name(arrays[name].dtype) != dtype:
            raise CheckpointError(f"{path}: {name} is missing or not {dtype} {list(shape)}, expected a whole session")
    if set(arrays) != set(wanted) or _digest(about, arrays) != about["digest"]:
        raise CheckpointError(f"{path}: the contents do not fit their digest, expected an unchanged file")
    tokens = arrays["tokens"].tolist()
    if not length <= len(tokens) <= length + 1:
        raise CheckpointError(f"{path}: has {len(tokens)} tokens for {length} positions, expected as many or one more")
    try:
        engine.token_array(tokens)
    except InvalidArgument as error:
        raise CheckpointError(f"{path}: {error}") from None
    rows = [tuple(arrays[f"layers.{n}.{part}"] for part in ("first", "second")) for n in range(layers)]
    with engine.lock:
        engine.caches.fill(session._sequence, length, rows)  # type: ignore[arg-type]
    session.tokens = tokens
    session.logits = np.array(arrays["logits"]) if "logits" in arrays else None


def _digest(about: dict[str, str], arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps({k: v for k, v in about.items() if k != "digest"}, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).view(np.uint8).data)
    return digest.hexdigest()
