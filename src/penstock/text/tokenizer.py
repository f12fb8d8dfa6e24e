"""Text to token ids and back: tokenizer.json by the `tokenizers` library, end-of-text ids, text as tokens arrive."""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, overload

import tokenizers

from penstock.errors import CheckpointError, DTypeError, InvalidArgument, TooManyTokens, no_panic
from penstock.text.byte_level import BYTE_OF
from penstock.text.control_tokens import ChatText, ControlTokens
from penstock.text.pieces import PIECE, RUN, Cuts, bytes_of_a_token, fewest_tokens
from penstock.text.template import ChatTemplates, special_tokens, templates_in
from penstock.text.tiktoken import FILE as TIKTOKEN
from penstock.text.tiktoken import read_tiktoken

_OTHER_FORMATS = {
    "tokenizer.model": "sentencepiece",
    "spiece.model": "sentencepiece",
    "vocab.json": "vocab.json and merges.txt",
    "vocab.txt": "vocab.txt",
}
_HARMONY_ENDS = ("<|return|>", "<|call|>")  # of gpt-oss: folders without generation_config.json name the first alone
_SHORT = 1 << 12  # characters: longer texts are encoded without the interpreter's lock, by a thread of the library
_MAX_GAP = 1 << 16  # unused ids below the highest one: more would be a damaged file, and arrays are sized by vocab_size


class Tokenizer:
    """A model's vocabulary: encodes, decodes, knows which tokens end a text and how a chat is written.

    `from_folder` reads a model folder. The constructor takes a `tokenizers.Tokenizer` made elsewhere; `source` is the
    name for messages. `templates` may be replaced. Raises CheckpointError for ids that cannot be.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        eos_id: int | None = None,
        bos_id: int | None = None,
        templates: ChatTemplates | None = None,
        source: str = "tokenizer",
    ) -> None:
        backend.no_truncation()  # some files carry the lengths of a training run
        backend.no_padding()
        self.backend = backend
        self.eos_ids = frozenset(eos_ids)
        self.eos_id, self.bos_id = eos_id, bos_id
        self.templates = templates
        vocab = backend.get_vocab(with_added_tokens=True)
        ids = vocab.values()
        if not ids:
            raise CheckpointError(f"{source}: has no tokens, expected a vocabulary")
        pieces = {number: piece for piece, number in vocab.items()}
        if len(pieces) < len(vocab):
            number, *both = min((n, *sorted((p, pieces[n]))) for p, n in vocab.items() if pieces[n] != p)
            first, second = map(_shown, both)
            raise CheckpointError(
                f"{source}: {first} and {second} both have the id {number}, expected one token per id"
            )
        self.vocab_size = max(ids) + 1
        if self.vocab_size > len(ids) + _MAX_GAP:
            raise CheckpointError(
                f"{source}: the highest token id is {self.vocab_size - 1}, expected one near the {len(ids)} tokens"
            )
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)

    def __repr__(self) -> str:
        template = "with" if self.has_chat_template else "no"
        return f"Tokenizer({self.vocab_size} tokens, ends at {sorted(self.eos_ids)}, {template} chat template)"

    @overload
    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]: ...
    @overload
    def __call__(self, text: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]: ...
    def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """`encode` as transformers has it: {"input_ids": ids, "attention_mask": ones}, of a list of texts lists."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        each = [self.encode(one, add_special_tokens) for one in text]
        return {"input_ids": each, "attention_mask": [[1] * len(ids) for ids in each]}

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text: the tokenizer's own, else the lowest of `eos_ids`; None: there is none."""
        return min(self.eos_ids, default=None) if self.eos_id is None else self.eos_id

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        return self.bos_id

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer of a model folder: tokenizer.json or Kimi's tiktoken.model, with what tokenizer_config.json,
        generation_config.json and config.json say about special tokens, and the chat template.

        A chat template that cannot be compiled is refused when it is used. Raises CheckpointError, naming the file.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder, expected one with tokenizer.json")
        settings = _json_object(folder / "tokenizer_config.json")
        named = special_tokens(settings, _json_object(folder / "special_tokens_map.json"))
        whole = folder / "tokenizer.json"
        tiktoken = not whole.is_file() and (folder / TIKTOKEN).is_file()
        backend = read_tiktoken(folder / TIKTOKEN, settings) if tiktoken else _read_backend(whole)
        _add_missing(backend, settings, folder / "tokenizer_config.json")
        config, generation = _json_object(folder / "config.json"), _json_object(folder / "generation_config.json")
        eos = named.get("eos_token")
        tokenizer = cls(
            backend,
            eos_id=backend.token_to_id(eos) if isinstance(eos, str) else None,
            bos_id=_bos_id(backend, named, config, folder),
            templates=templates_in(folder, settings, named),
            source=str(folder / TIKTOKEN if tiktoken else whole),
        )
        tokenizer.eos_ids = _eos_ids(tokenizer, named, config, generation, folder) | harmony_ends(backend)
        return tokenizer

    def encode(self, text: str, add_special_tokens: bool = True, *, limit: int | None = None) -> list[int]:
        """Token ids as tokenizer.json says; add_special_tokens adds what its post-processor adds, such as a BOS.

        limit: the most tokens that are of use; work on a longer text ends as soon as it is known to be one, often
        before it begins, and a word of more than RUN characters is not begun. Raises DTypeError for no str,
        InvalidArgument for text with lone surrogates and for such a word, TooManyTokens.
        """
        _check_text(text)
        self.check_length(text, limit)
        if len(text) <= PIECE or (add_special_tokens and self._around is None):
            ids = self._ids(text, add_special_tokens)
        else:
            before, after = (self._around or ([], [])) if add_special_tokens else ([], [])
            ids = [*before]
            for piece in self._cuts.pieces(text):
                if limit is not None and len(piece) > RUN and self._cuts.known:
                    raise InvalidArgument(f"encode: text has a word of {len(piece)} characters, expected at most {RUN}")
                ids += self._ids(piece, False)
                _check_tokens(len(ids), limit)
            ids += after
        _check_tokens(len(ids), limit)
        return ids

    def check_length(self, text: str, limit: int | None) -> None:
        """Raises TooManyTokens if the bytes of a text alone tell that it has more tokens than the limit."""
        if limit is not None and self._longest is not None:
            _check_tokens(fewest_tokens(text, self._longest), limit)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        with no_panic(f"encode: text of {len(text)} characters"):
            if len(text) < _SHORT:
                return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    @cached_property
    def _longest(self) -> int | None:
        return bytes_of_a_token(self.backend)

    @cached_property
    def _cuts(self) -> Cuts:
        return Cuts(self.backend)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]] | None:
        """What the post-processor puts before and behind a text; None if that cannot be told."""
        plain, whole = self._ids("a", False), self._ids("a", True)
        starts = [n for n in range(len(whole)) if whole[n : n + len(plain)] == plain]
        return (whole[: starts[0]], whole[starts[0] + len(plain) :]) if plain and len(starts) == 1 else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. An id without a token, as models with a padded vocabulary have them, gives none.

        Raises DTypeError or InvalidArgument for what is no id.
        """
        try:
            with no_panic("decode"):
                return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except TypeError:
            raise DTypeError(f"decode: ids is {_shown(ids)}, expected a sequence of integers") from None
        except OverflowError:
            raise InvalidArgument(f"decode: ids is {_shown(ids)}, expected integers from 0 to 2**32 - 1") from None

    def name_of(self, token: int) -> str | None:
        """How the vocabulary writes a token; None for an id without one."""
        return self.backend.id_to_token(token) if token < self.vocab_size else None

    def detokenizer(self, skip_special_tokens: bool = True, shown: Iterable[str] = ()) -> "Detokenizer":
        """A decoder that takes one token at a time. `shown` are special tokens that become text all the same."""
        skipped = self._special if skip_special_tokens else frozenset()
        skipped -= {self.backend.token_to_id(token) for token in shown}
        stream = _ByteStream(self.backend) if self.byte_level else _WindowStream(self.backend, self._decoder)
        return Detokenizer(stream, skipped)

    @property
    def byte_level(self) -> bool:
        """Whether tokens are bytes, written in the alphabet of BYTE_OF."""
        return bool(self._decoder) and json.loads(self._decoder).get("type") == "ByteLevel"

    @property
    def has_chat_template(self) -> bool:
        return self.templates is not None

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template, of the one for tools if there are several."""
        sources = {} if self.templates is None else self.templates.sources
        text, _ = sources.get("tool_use") or sources.get("default") or (None, None)
        return text

    def compile_chat_template(self) -> None:
        """Compile the chat template now, if there is one, so that the first chat does not wait for it.

        Raises CheckpointError for a broken template.
        """
        if self.templates is not None:
            self.templates.compile()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        tokenize: bool = False,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """The text of a chat as the model's template writes it, special tokens included: encode it without adding any.

        tokenize: its token ids instead, with return_dict as {"input_ids": ids, "attention_mask": ones}.

        Raises InvalidArgument for messages that the template or penstock does not take, and if there is no template;
        CheckpointError for a broken template.
        """
        if self.templates is None:
            raise InvalidArgument("chat: the model has no chat template, expected a prompt of plain text")
        if return_dict and not tokenize:
            raise InvalidArgument("apply_chat_template: return_dict is True, expected it with tokenize=True")
        text = self.templates.render(messages, tools, add_generation_prompt, variables)
        if return_dict:
            return self(text, add_special_tokens=False)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        allow_special_in_messages: bool = False,
    ) -> ChatText:
        """As `apply_chat_template`, for `encode_chat`: it tells control tokens that user, system and tool messages
        spell out from those of the template, unless allow_special_in_messages.
        """
        if self.templates is None:
            raise InvalidArgument("chat: the model has no chat template, expected a prompt of plain text")
        mark = ""
        if not allow_special_in_messages:
            seen = self.templates.sources, self.templates.special_tokens
            messages, mark = self._control_tokens.marked(messages, tools, variables, *seen)
        return ChatText(self.templates.render(messages, tools, add_generation_prompt, variables), mark)

    def encode_chat(self, chat: ChatText, *, limit: int | None = None) -> list[int]:
        """Token ids of a chat, with nothing added. Control tokens that messages spell out are encoded as text.

        limit, and what is raised: as in `encode`.
        """
        if not chat.mark:
            return self.encode(chat.text, add_special_tokens=False, limit=limit)
        _check_text(chat.text)
        self.check_length(chat.text, limit)
        with no_panic("encode: chat"):
            renamed = self._control_tokens.renamed(chat)
        return self._renamed.encode(renamed, add_special_tokens=False, limit=limit)

    @cached_property
    def _renamed(self) -> "Tokenizer":
        return Tokenizer(self._control_tokens.copy)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self.backend)

    @cached_property
    def _decoder(self) -> str:
        decoder: Any = self.backend.decoder  # pickles as its part of tokenizer.json
        return "" if decoder is None else bytes(decoder.__getstate__()).decode()


class Detokenizer:
    """Text as tokens arrive: what `add` returns is final, never half a character.

    The pieces that `add` and at the end `finish` return, joined, are `Tokenizer.decode` of all ids.
    """

    def __init__(self, stream: "_Stream", skipped: frozenset[int]) -> None:
        self._stream = stream
        self._skipped = skipped

    def add(self, token: int) -> str:
        """The text that became final with this token; often empty, at times more than the token's own."""
        return "" if token in self._skipped else self._stream.add(token)

    def finish(self) -> str:
        """The rest, with U+FFFD for bytes that never became a character."""
        return self._stream.finish()


class _Stream(Protocol):
    def add(self, token: int) -> str: ...

    def finish(self) -> str: ...


class _ByteStream:
    """For byte-level vocabularies: tokens are bytes, and the text is their UTF-8."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._piece = backend.id_to_token
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        piece = self._piece(token)
        if piece is None:
            return ""
        try:
            data = bytes([BYTE_OF[character] for character in piece])
        except KeyError:  # an added token, written as it is
            data = piece.encode()
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """For any other decoder: the text of a token is what it adds to the text of the one before it.

    Tokens are held back while the text may still change: in a run of byte tokens (<0x..>), which is valid or invalid as
    a whole, and after the first bytes of a character.
    """

    def __init__(self, backend: tokenizers.Tokenizer, decoder: str) -> None:
        self._backend = backend
        self._byte_fallback = "ByteFallback" in decoder
        self._incomplete = "�" if "ByteLevel" in decoder else None
        self._window: list[int] = []  # a token that is written already, then those that are held back
        self._written = 0  # characters of the first one's text

    def add(self, token: int) -> str:
        piece = self._backend.id_to_token(token)
        if not piece:
            return ""
        self._window.append(token)
        if self._byte_fallback and is_byte_token(piece):
            return ""
        text = self._text(self._window)
        if self._incomplete is not None and text.endswith(self._incomplete):
            return ""
        new, self._window = text[self._written :], [token]
        self._written = len(self._text(self._window))
        return new

    def finish(self) -> str:
        text, self._window = self._text(self._window)[self._written :], []
        self._written = 0
        return text

    def _text(self, ids: list[int]) -> str:
        with no_panic("decode"):
            return self._backend.decode(ids, skip_special_tokens=False)


def _check_tokens(found: int, limit: int | None) -> None:
    if limit is not None and found > limit:
        raise TooManyTokens(f"encode: text has {found} tokens or more, expected at most {limit}")


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise DTypeError(f"encode: text is a {type(text).__name__}, expected a str")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = f"U+{ord(text[error.start]):04X}"
            raise InvalidArgument(
                f"encode: text has the lone surrogate {code} at character {error.start}, expected valid Unicode"
            ) from None


def is_byte_token(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        found = [f"{name} ({kind})" for name, kind in _OTHER_FORMATS.items() if (path.parent / name).is_file()]
        raise CheckpointError(
            f"{path}: no such file; only tokenizer.json is supported, found {', '.join(found) or 'no other tokenizer'}"
        )
    text = _read_text(path)
    content = _parsed(path, text)
    model = content.get("model")
    if not isinstance(model, dict):
        raise CheckpointError(f"{path}: model is {_shown(model)}, expected an object")
    if "vocab" not in model:
        raise CheckpointError(f"{path}: model has no vocab, expected the tokens and their ids")
    if "merges" not in model and model.get("type") == "BPE":
        raise CheckpointError(f"{path}: model has no merges, expected those of byte-pair encoding beside its vocab")
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # the library raises bare Exception, and a BaseException where its Rust code panics
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise CheckpointError(f"{path}: cannot be read as a tokenizer: {_one_line(error)}") from None
    added = content.get("added_tokens") or []
    for token in added:  # their shape was checked by the library
        found = backend.token_to_id(token["content"])
        if found != token["id"]:
            raise CheckpointError(
                f"{path}: added token {_shown(token['content'])} has id {token['id']}, expected {found}, "
                "the next one that is free"
            )
    return backend


def _add_missing(backend: tokenizers.Tokenizer, settings: dict[str, Any], path: Path) -> None:
    """Add tokens that tokenizer_config.json knows and tokenizer.json does not."""
    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise CheckpointError(f"{path}: added_tokens_decoder is {_shown(listed)}, expected an object")
    missing: list[tuple[int, tokenizers.AddedToken]] = []
    for key, token in listed.items():
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or not key.isdecimal():
            raise CheckpointError(
                f"{path}: added_tokens_decoder[{_shown(key)}] is {_shown(token)}, expected a token with content"
            )
        if backend.token_to_id(content) is None:
            flags = {name: token.get(name) is True for name in ("single_word", "lstrip", "rstrip", "special")}
            normalized = token.get("normalized", not flags["special"]) is True
            missing.append((int(key), tokenizers.AddedToken(content, normalized=normalized, **flags)))
    for number, token in sorted(missing, key=lambda pair: pair[0]):
        backend.add_tokens([token])
        found = backend.token_to_id(token.content)
        if found != number:
            raise CheckpointError(
                f"{path}: added_tokens_decoder gives {_shown(token.content)} id {number}, expected {found}, "
                "the next one that tokenizer.json leaves free"
            )


def _eos_ids(
    tokenizer: Tokenizer, named: Mapping[str, Any], config: dict[str, Any], generation: dict[str, Any], folder: Path
) -> frozenset[int]:
    """Ids of generation_config.json, else of config.json or its text_config, and the eos token of the tokenizer."""
    limit = max([tokenizer.vocab_size, *(n for n in _settings(config, "vocab_size") if type(n) is int)])
    ids: frozenset[int] = frozenset()
    places = [("generation_config.json", value) for value in _settings(generation, "eos_token_id")]
    places += [("config.json", value) for value in _settings(config, "eos_token_id")]
    for name, value in places:
        if value is not None and not ids:
            numbers = value if isinstance(value, list) else [value]
            ids = frozenset(_checked_id(folder / name, "eos_token_id", number, limit) for number in numbers)
    eos = named.get("eos_token")
    if isinstance(eos, str) and tokenizer.eos_id is None and not ids:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: eos_token is {_shown(eos)}, expected a token of the vocabulary"
        )
    return ids if tokenizer.eos_id is None else ids | {tokenizer.eos_id}


def harmony_ends(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """The tokens that end an answer of gpt-oss, if these are its tokens: there <|end|> only ends a message."""
    special = {token.content: number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    known = "<|channel|>" in special and all(name in special for name in _HARMONY_ENDS)
    return frozenset(special[name] for name in _HARMONY_ENDS) if known else frozenset()


def _bos_id(
    backend: tokenizers.Tokenizer, named: Mapping[str, Any], config: dict[str, Any], folder: Path
) -> int | None:
    bos = named.get("bos_token")
    if isinstance(bos, str) and (number := backend.token_to_id(bos)) is not None:
        return number
    for value in _settings(config, "bos_token_id"):
        if value is not None:
            return _checked_id(folder / "config.json", "bos_token_id", value, 2**32)
    return None


def _settings(config: dict[str, Any], name: str) -> list[Any]:
    """A setting of config.json and that of its text_config, None where one is not there."""
    inner = config.get("text_config")
    return [config.get(name), inner.get(name) if isinstance(inner, dict) else None]


def _checked_id(path: Path, name: str, value: Any, limit: int) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise CheckpointError(f"{path}: {name} is {_shown(value)}, expected a token id from 0 to {limit - 1}")
    return value


def _json_object(path: Path) -> dict[str, Any]:
    """A JSON file that may be absent."""
    return _parsed(path, _read_text(path)) if path.is_file() else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: byte {error.start} is not UTF-8, expected JSON text") from None


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: is damaged, expected a JSON object: {_one_line(error)}") from None
    except RecursionError:
        raise CheckpointError(f"{path}: is nested too deeply, expected a JSON object") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, expected a JSON object")
    return content


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def tokens_beyond(what: str, tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """A remark about tokens that a model of `vocab_size` embeddings has none for, if there are any."""
    if tokenizer.vocab_size <= vocab_size:
        return []
    found = f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model embeddings for 0 to"
    return [f"{what}: {found} {vocab_size - 1}; prompts that need others are refused"]
