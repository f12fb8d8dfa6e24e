"""Tokenizers as mlx-lm has them: transformers' names, ids from `apply_chat_template`, text as tokens arrive.

`TokenizerWrapper` holds a `HubTokenizer` (penstock's tokenizer under transformers' names), or a tokenizer of
transformers itself.
"""

from __future__ import annotations

import codecs
import copy
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import DTypeError, InvalidArgument
from penstock.mlx_lm._arrays import as_numpy, token_ids
from penstock.mlx_lm._schema import tool_schema
from penstock.text.byte_level import BYTE_OF
from penstock.text.formats import FORMATS, format_of, parse_whole
from penstock.text.template import ChatTemplates, special_tokens
from penstock.text.tokenizer import Tokenizer, is_byte_token

__all__ = [
    "BPEStreamingDetokenizer",
    "HubTokenizer",
    "NaiveStreamingDetokenizer",
    "SPMStreamingDetokenizer",
    "StreamingDetokenizer",
    "TokenizerWrapper",
    "load",
]

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_THINKING = (("<think>", "</think>"), ("<longcat_think>", "</longcat_think>"), ("<|think:start|>", "<|think:end|>"))
_ANY_TOOL = [{"type": "function", "function": {"name": "any"}}]  # a parser reads calls of others, too
_CHANNEL = ("<|channel>", "<channel|>")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same field of a message
_SPM = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_SPACE = next(character for character, byte in BYTE_OF.items() if byte == 0x20)


class StreamingDetokenizer(ABC):
    """Text as tokens arrive: `add_token` for each, `finalize` at the end; `text` so far, and all `tokens`.

    `last_segment` is the text that came since it was read last.
    """

    text: str
    tokens: list[int]
    offset: int

    @abstractmethod
    def reset(self) -> None:
        """Begin another text."""

    @abstractmethod
    def add_token(self, token: int) -> None:
        """Take one token id."""

    @abstractmethod
    def finalize(self) -> None:
        """No token follows: what was held back becomes text."""

    @property
    def last_segment(self) -> str:
        text = self.text
        segment, self.offset = text[self.offset :], len(text)
        return segment


class NaiveStreamingDetokenizer(StreamingDetokenizer):
    """For any tokenizer: the line that is being written is decoded anew with each token."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.reset()

    def reset(self) -> None:
        self.offset, self.tokens = 0, []
        self._lines, self._line = "", []

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        self._line.append(token)

    def finalize(self) -> None:
        self._lines, self._line = self._lines + self._tokenizer.decode(self._line), []

    @property
    def text(self) -> str:  # type: ignore[override]
        if not self._line:
            return self._lines
        line = self._tokenizer.decode(self._line)
        if line.endswith("\n"):
            self._lines, self._line = self._lines + line, []
            return self._lines
        return self._lines + line.rstrip("�")  # of bytes that are no character yet


class _ByteDetokenizer(StreamingDetokenizer):
    """For vocabularies whose tokens are bytes of UTF-8, one way or another."""

    trim_space = True  # the first character of the text, if it is a space, is left out

    def __init__(self, tokenizer: Any) -> None:
        self._pieces: list[str | None] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self.reset()

    def reset(self) -> None:
        self.offset, self.tokens, self.text = 0, [], ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        piece = self._pieces[token] if token < len(self._pieces) else None
        self._held += self._decoder.decode(self._bytes(piece))
        if not self._waits(piece) and not self._decoder.getstate()[0]:  # no character is half there
            self._write()

    def finalize(self) -> None:
        self._held += self._decoder.decode(b"", final=True)
        self._write()

    def _write(self) -> None:
        if self.trim_space and not self.text:
            self._held = self._held.removeprefix(" ")
        self.text, self._held = self.text + self._held, ""

    def _waits(self, piece: str | None) -> bool:
        """Whether the text up to here is not to be seen yet."""
        return False

    @abstractmethod
    def _bytes(self, piece: str | None) -> bytes:
        """What a token stands for."""


class BPEStreamingDetokenizer(_ByteDetokenizer):
    """For byte-level BPE. A token that is one space waits for the next one; an id without a token is a "!"."""

    def _bytes(self, piece: str | None) -> bytes:
        if piece is None:
            return b"!"
        try:
            return bytes([BYTE_OF[character] for character in piece])
        except KeyError:  # an added token, written as it is
            return piece.encode()

    def _waits(self, piece: str | None) -> bool:
        return piece == _SPACE


class SPMStreamingDetokenizer(_ByteDetokenizer):
    """For sentencepiece vocabularies: ▁ is a space, <0x0A> a byte."""

    def __init__(self, tokenizer: Any, trim_space: bool = True) -> None:
        self.trim_space = trim_space
        super().__init__(tokenizer)

    def _bytes(self, piece: str | None) -> bytes:
        if piece is None:
            return b""
        return bytes([int(piece[3:5], 16)]) if is_byte_token(piece) else piece.replace("▁", " ").encode()


class Encoding(dict[str, Any]):
    """input_ids and attention_mask, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"'Encoding' object has no attribute {name!r}")


class HubTokenizer:
    """A penstock tokenizer under the names that transformers gives its own.

    named: special tokens by name (eos_token, …), as tokenizer_config.json has them. Arguments that are not here are
    refused by Python, none is ignored.
    """

    is_fast = True

    def __init__(self, tokenizer: Tokenizer, named: Mapping[str, Any] | None = None, name_or_path: str = "") -> None:
        self.tokenizer = tokenizer
        self.name_or_path = name_or_path
        if named is None:
            named = {} if tokenizer.templates is None else tokenizer.templates.special_tokens
        self.special_tokens_map = {name: text for name, text in named.items() if isinstance(text, str)}

    def __repr__(self) -> str:
        return f"HubTokenizer({self.tokenizer!r})"

    def __len__(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def vocab_size(self) -> int:
        """Tokens without the added ones."""
        return self.tokenizer.backend.get_vocab_size(with_added_tokens=False)

    def get_vocab(self) -> dict[str, int]:
        return self.tokenizer.backend.get_vocab(with_added_tokens=True)

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    def __getattr__(self, name: str) -> Any:
        """eos_token, pad_token and so on are texts or None, eos_token_id their ids."""
        token = name.removesuffix("_id")
        if name.startswith("_") or token not in (*_NAMED, *self.special_tokens_map):
            raise AttributeError(f"'HubTokenizer' object has no attribute {name!r}")
        text = self.special_tokens_map.get(token)
        number = None if text is None else self.tokenizer.backend.token_to_id(text)
        if text is None:
            number = {"eos_token": self.tokenizer.eos_token_id, "bos_token": self.tokenizer.bos_id}.get(token)
            text = None if number is None else self.tokenizer.name_of(number)
        return number if name.endswith("_id") else text

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _NAMED:
            super().__setattr__(name, value)
        elif value is None:
            self.special_tokens_map.pop(name, None)
        elif isinstance(value, str) and self.tokenizer.backend.token_to_id(value) is not None:
            self.special_tokens_map[name] = value
        else:
            raise InvalidArgument(f"{name} is {value!r:.60}, expected a token of the vocabulary")

    @property
    def all_special_tokens(self) -> list[str]:
        added = self.tokenizer.backend.get_added_tokens_decoder()
        return [token.content for _, token in sorted(added.items()) if token.special]

    @property
    def all_special_ids(self) -> list[int]:
        return self.convert_tokens_to_ids(self.all_special_tokens)

    @property
    def chat_template(self) -> str | None:
        return self.tokenizer.chat_template

    @chat_template.setter
    def chat_template(self, source: str | None) -> None:
        named = self.special_tokens_map
        self.tokenizer.templates = (
            None if source is None else ChatTemplates({"default": (source, "chat_template")}, named)
        )

    def encode(self, text: str, add_special_tokens: bool = True, return_tensors: str | None = None) -> Any:
        """Token ids of a text."""
        return _tensors(self.tokenizer.encode(text, add_special_tokens), return_tensors)

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, return_tensors: str | None = None
    ) -> Encoding:
        """input_ids and attention_mask of a text, lists of them of several."""
        given = text if isinstance(text, str) else list(text)
        found = self.tokenizer(given, add_special_tokens)  # type: ignore[call-overload]
        return Encoding({name: _tensors(value, return_tensors) for name, value in found.items()})

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of an id or of ids."""
        return self.tokenizer.decode(_ids(token_ids), skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Any], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(sequence, skip_special_tokens) for sequence in sequences]

    def tokenize(self, text: str) -> list[str]:
        """The tokens of a text as the vocabulary writes them."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens=False))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, that of unk_token for one that is not known (None without it); of several a list."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self.tokenizer.backend.token_to_id(tokens)
        return found if found is not None or "unk_token" not in self.special_tokens_map else self.unk_token_id

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """How the vocabulary writes an id, None for one without a token; of several a list."""
        found = as_numpy(ids)
        if found.ndim == 0:
            return self.tokenizer.name_of(int(found))
        return [self.tokenizer.name_of(token) for token in _ids(found)]

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        return_tensors: str | None = None,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """A conversation as token ids, or as text with tokenize=False; of a list of conversations a list.

        tools: JSON schemas, or functions with type hints and a docstring that describes their arguments.
        continue_final_message: the text ends within the last message. chat_template: another one than the model's.
        Raises InvalidArgument.
        """
        if conversation and isinstance(conversation[0], list | tuple):
            texts = [
                self._rendered(
                    one, tools, documents, chat_template, add_generation_prompt, continue_final_message, variables
                )
                for one in conversation
            ]
            if not tokenize:
                return texts
            found = self(texts, add_special_tokens=False, return_tensors=return_tensors)
            return found if return_dict else found["input_ids"]
        text = self._rendered(
            conversation, tools, documents, chat_template, add_generation_prompt, continue_final_message, variables
        )
        if not tokenize:
            return text
        found = self(text, add_special_tokens=False, return_tensors=return_tensors)
        return found if return_dict else found["input_ids"]

    def _rendered(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool | str,
        variables: Mapping[str, Any],
    ) -> str:
        templates = self.tokenizer.templates
        if chat_template is not None:
            templates = ChatTemplates({"default": (chat_template, "chat_template")}, self.special_tokens_map)
        if templates is None:
            raise InvalidArgument("apply_chat_template: the model has no chat template, expected chat_template or text")
        if not isinstance(messages, list | tuple):
            raise DTypeError(f"apply_chat_template: conversation is a {type(messages).__name__}, expected a list")
        plain = [_message(message) for message in messages]
        given = {"documents": list(documents)} if documents is not None else {}
        schemas = None if tools is None else [tool_schema(tool) if callable(tool) else tool for tool in tools]
        templates = replace(templates, special_tokens={**templates.special_tokens, **self.special_tokens_map})
        if not continue_final_message:
            return templates.render(plain, schemas, add_generation_prompt, {**variables, **given})
        if add_generation_prompt:
            raise InvalidArgument(
                "apply_chat_template: continue_final_message and add_generation_prompt are both asked for, "
                "expected one of them"
            )
        mark = f"penstock{secrets.token_hex(8)}"
        field = continue_final_message if isinstance(continue_final_message, str) else "content"
        last = plain[-1] if plain else {}
        if not isinstance(last.get(field), str):
            raise InvalidArgument(
                f"apply_chat_template: the last message has no text as {field}, expected one to continue"
            )
        names = _REASONING if field in _REASONING else (field,)
        ended = {name: last[name] + mark for name in names if name in last}
        text = templates.render([*plain[:-1], last | ended], schemas, False, {**variables, **given})
        before, found, _ = text.rpartition(mark)
        if not found:
            raise InvalidArgument(
                f"apply_chat_template: the template leaves out the last {field}, expected it to be there"
            )
        return before


class TokenizerWrapper:
    """A tokenizer with the additions of mlx-lm: ids that end a text, a detokenizer, marks of thoughts and calls.

    tokenizer: one of penstock, of transformers, or a `HubTokenizer`; its attributes are this one's, too. eos_token_ids:
    beside the tokenizer's own.
    """

    def __init__(
        self,
        tokenizer: Any,
        detokenizer_class: Callable[[Any], StreamingDetokenizer] | None = None,
        eos_token_ids: Iterable[int] | int | None = None,
    ) -> None:
        held = HubTokenizer(tokenizer) if isinstance(tokenizer, Tokenizer) else tokenizer
        for name in ("encode", "decode", "eos_token_id"):
            if not hasattr(held, name):
                raise DTypeError(f"tokenizer is a {type(tokenizer).__name__} without {name}, expected a tokenizer")
        ids = [eos_token_ids] if isinstance(eos_token_ids, int) else eos_token_ids
        self._tokenizer = held
        self._detokenizer_class = detokenizer_class or _detokenizer_class(held)
        self._detokenizer: StreamingDetokenizer | None = None
        self._eos_token_ids = set(ids or ())
        if held.eos_token_id is not None:
            self._eos_token_ids.add(held.eos_token_id)
        self._thinking = _thinking(held)
        self._format = FORMATS[format_of(held.tokenizer)] if isinstance(held, HubTokenizer) else None

    def __repr__(self) -> str:
        return f"TokenizerWrapper({self._tokenizer!r}, ends at {sorted(self._eos_token_ids)})"

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"'TokenizerWrapper' object has no attribute {name!r}")
        return getattr(self._tokenizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self._tokenizer, name, value)

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def apply_chat_template(self, *args: Any, tokenize: bool = True, **kwargs: Any) -> Any:
        """Token ids of a conversation, text with tokenize=False; other arguments as transformers has them.

        enable_thinking is True where the model can think, unless it is given; return_dict has no effect, as in mlx-lm.
        """
        kwargs.setdefault("enable_thinking", self.has_thinking)
        kwargs["return_dict"] = False
        return self._tokenizer.apply_chat_template(*args, tokenize=tokenize, **kwargs)

    @property
    def detokenizer(self) -> StreamingDetokenizer:
        """A new one for one text."""
        if self._detokenizer is None:
            self._detokenizer = self._detokenizer_class(self._tokenizer)
        made = copy.copy(self._detokenizer)
        made.reset()
        return made

    @property
    def eos_token_ids(self) -> set[int]:
        """Ids that end an answer; may be changed, or replaced."""
        return self._eos_token_ids

    @eos_token_ids.setter
    def eos_token_ids(self, value: Iterable[int] | None) -> None:
        self._eos_token_ids = set(value or ())

    def add_eos_token(self, token: str | int) -> None:
        """Let a token (or an id) end answers. Raises InvalidArgument for one that is not known."""
        text = str(token)
        found = int(text) if text.isdecimal() else self._tokenizer.get_vocab().get(text)
        if found is None:
            raise InvalidArgument(f"add_eos_token: {token!r:.60} is no token of this tokenizer, expected one")
        self._eos_token_ids.add(found)

    # -- thinking and tool calls -------------------------------------------------------------------------------------

    @property
    def has_thinking(self) -> bool:
        return self._thinking is not None

    @property
    def think_start(self) -> str | None:
        return self._thinking[0] if self._thinking else None

    @property
    def think_end(self) -> str | None:
        return self._thinking[1] if self._thinking else None

    @property
    def think_start_tokens(self) -> tuple[int, ...] | None:
        return self._ids_of(self.think_start)

    @property
    def think_end_tokens(self) -> tuple[int, ...] | None:
        return self._ids_of(self.think_end)

    @property
    def think_start_id(self) -> int | None:
        return _only(self.think_start_tokens, "think_start")

    @property
    def think_end_id(self) -> int | None:
        return _only(self.think_end_tokens, "think_end")

    @property
    def has_tool_calling(self) -> bool:
        return self.tool_call_start is not None

    @property
    def tool_call_start(self) -> str | None:
        return self._format.call[0] if self._format is not None and self._format.call else None

    @property
    def tool_call_end(self) -> str | None:
        return self._format.call[1] if self._format is not None and self._format.call else None

    @property
    def tool_call_start_tokens(self) -> tuple[int, ...] | None:
        return self._ids_of(self.tool_call_start)

    @property
    def tool_call_end_tokens(self) -> tuple[int, ...] | None:
        return self._ids_of(self.tool_call_end)

    @property
    def tool_parser(self) -> Callable[..., Any] | None:
        """(text between tool_call_start and tool_call_end, tools) → {"name": …, "arguments": {…}}, of several a list.

        It raises InvalidArgument for a text that is no call.
        """
        return self._parsed if self.has_tool_calling else None

    def _parsed(self, text: str, tools: Sequence[Any] | None = None) -> Any:
        assert self._format is not None
        schemas = [tool_schema(tool) if callable(tool) else tool for tool in tools or ()]
        whole = f"{self.tool_call_start}{self._format.line}{text.strip()}{self._format.line}{self.tool_call_end}"
        if self._format.calls is not None:
            whole = f"{self._format.calls[0]}{whole}{self._format.calls[1]}"
        calls = parse_whole(whole, self._format.name, schemas or _ANY_TOOL).tool_calls
        try:
            found = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls or ()]
        except ValueError:
            found = []
        if not found:
            raise InvalidArgument(f"tool_parser: {text!r:.80} is no tool call, expected one as the model writes it")
        return found[0] if len(found) == 1 else found

    def _ids_of(self, text: str | None) -> tuple[int, ...] | None:
        return None if text is None else tuple(self._tokenizer.encode(text, add_special_tokens=False))


def load(
    model_path: str | Path,
    tokenizer_config_extra: Mapping[str, Any] | None = None,
    eos_token_ids: Iterable[int] | int | None = None,
) -> TokenizerWrapper:
    """The tokenizer of a model folder; tokenizer_config_extra as `penstock.mlx_lm.load` has it."""
    return wrapped(Tokenizer.from_folder(model_path), Path(model_path), tokenizer_config_extra, eos_token_ids)


def wrapped(
    tokenizer: Tokenizer,
    path: Path,
    settings: Mapping[str, Any] | None = None,
    eos_token_ids: Iterable[int] | int | None = None,
) -> TokenizerWrapper:
    """A tokenizer that was read from `path`, with settings of the caller in place of tokenizer_config.json's.

    settings: texts of special tokens (eos_token, …), chat_template; trust_remote_code is for the caller to remark.
    Raises InvalidArgument for others.
    """
    named = dict(special_tokens(_json(path / "tokenizer_config.json"), _json(path / "special_tokens_map.json")))
    if not named and tokenizer.templates is not None:
        named = dict(tokenizer.templates.special_tokens)
    template = None
    for name, value in (settings or {}).items():
        if name == "trust_remote_code":
            continue
        if name == "chat_template" and isinstance(value, str):
            template = value
        elif name.endswith("_token") and isinstance(value, str):
            if tokenizer.backend.token_to_id(value) is None:
                raise InvalidArgument(f"tokenizer_config: {name} is {value!r:.60}, expected a token of the vocabulary")
            named[name] = value
        else:
            raise InvalidArgument(
                f"tokenizer_config: {name} is {value!r:.60}, expected tokens (eos_token, bos_token, pad_token, …) or "
                "chat_template as text: penstock reads all else from the model's own files"
            )
    hub = HubTokenizer(tokenizer, named, str(path))
    if template is not None:
        hub.chat_template = template
    if eos_token_ids is None:
        eos_token_ids = _listed_eos(path) if "eos_token" in (settings or {}) else tokenizer.eos_ids
    return TokenizerWrapper(hub, eos_token_ids=eos_token_ids)


def _listed_eos(path: Path) -> set[int]:
    """Ids that generation_config.json or config.json name."""
    generation, config = _json(path / "generation_config.json"), _json(path / "config.json")
    for settings in (generation, config, config.get("text_config") or {}):
        if (value := settings.get("eos_token_id")) is not None:
            return set(value if isinstance(value, list) else [value])
    return set()


def _json(path: Path) -> dict[str, Any]:
    """What the tokenizer has read and checked before; nothing if there is no such file."""
    return json.loads(path.read_text(encoding="utf-8-sig")) if path.is_file() else {}


def _detokenizer_class(tokenizer: Any) -> Callable[[Any], StreamingDetokenizer]:
    backend = tokenizer.tokenizer.backend if isinstance(tokenizer, HubTokenizer) else None
    decoder: Any = None if backend is None else backend.decoder  # pickles as its part of tokenizer.json
    about = None if decoder is None else json.loads(bytes(decoder.__getstate__()))
    if about is not None and about["type"] == "ByteLevel":
        return BPEStreamingDetokenizer
    steps = about.get("decoders") if about is not None and about["type"] == "Sequence" else None
    if steps == [*_SPM, _STRIP]:
        return SPMStreamingDetokenizer
    if steps == _SPM:
        return lambda tokenizer: SPMStreamingDetokenizer(tokenizer, trim_space=False)
    return NaiveStreamingDetokenizer


def _thinking(tokenizer: Any) -> tuple[str, str] | None:
    """The marks around what a model thinks, if its vocabulary has them."""
    vocab = tokenizer.get_vocab()
    for start, end in _THINKING:
        if start in vocab and end in vocab:
            return start, end
    start, end = _CHANNEL
    return (f"{start}thought", end) if start in vocab and end in vocab else None


def _only(ids: tuple[int, ...] | None, what: str) -> int | None:
    if ids is None:
        return None
    if len(ids) != 1:
        raise InvalidArgument(f"{what}: it has {len(ids)} tokens, expected one; {what}_tokens has them all")
    return ids[0]


def _message(message: Any) -> Any:
    """A message as transformers hands it to a template: without fields that are None, reasoning under its names."""
    if not isinstance(message, Mapping):
        return message  # which the template's checks refuse
    plain = {name: value for name, value in message.items() if value is not None}
    content = plain.get("content")
    if content is not None and not isinstance(content, str | list | tuple):
        plain["content"] = str(content)  # what a tool returned, as a template would write it
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _ids(value: Any) -> list[int]:
    found = as_numpy(value)
    return [int(found)] if found.ndim == 0 else token_ids(found, "token_ids")


def _tensors(value: Any, wanted: str | None) -> Any:
    """Ids as they were asked for: a list, or a NumPy array with an axis of texts."""
    if wanted is None:
        return value
    if wanted != "np":
        raise InvalidArgument(f"return_tensors is {wanted!r:.40}, expected None or 'np'")
    try:
        found = np.array(value, np.int64)
    except ValueError:
        raise InvalidArgument(
            "return_tensors: the texts have different numbers of tokens, expected equal ones"
        ) from None
    return found[None] if found.ndim == 1 else found
