"""Long texts for a tokenizer: how few tokens they can have, and where they can be cut without changing any of them.

Both are read off the parts of tokenizer.json. What is not known there is not guessed: then a text has no lower bound,
or is encoded whole.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

import tokenizers

RUN = 1 << 18  # characters of a piece that are tokenized within a limit: the library takes up to 400 bytes for each
PIECE = 1 << 16  # characters: tens of milliseconds of work, and little memory beside the ids

_SPACE = "▁"  # what sentencepiece writes for one
_SHRINKS = 4  # NFC and NFKC: a character of four bytes becomes one, three Hangul letters one syllable

# Alternatives of the patterns that cut words, as in the tokenizers of GPT-2, Llama 3, Qwen and DeepSeek. None looks to
# its left, and none matches a letter with one of _AFTER behind it, so that a match always ends between the two.
_LETTERS = (
    r" ?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
)
_OTHERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
    *(r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r" ?\p{N}+"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
    *(r" ?[\p{P}\p{S}]+[\r\n]*", r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""),
    "[一-龥぀-ゟ゠-ヿ]+",
    *(r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
)
_ONE = "(?:" + "|".join(re.escape(one) for one in (*_LETTERS, *_OTHERS)) + ")"
_KNOWN = re.compile(rf"{_ONE}(?:\|{_ONE})*")

_AFTER = r" \n!-@\[-`{-~，。、；：！？"  # no letters, no marks
_CUTS = re.compile(rf"[^\W\d_](?=[{_AFTER}])")
_CUTS_AT_SPACES = re.compile(r"[^\W\d_](?= )")


def bytes_of_a_token(backend: tokenizers.Tokenizer) -> int | None:
    """The most bytes of ASCII text that one token can stand for; `fewest_tokens` allows for other text.

    None where a token may stand for any number of them: an unknown word, spaces that are taken off, removed text.
    """
    model: Any = backend.model
    added = backend.get_added_tokens_decoder().values()
    if not isinstance(model, tokenizers.models.BPE) or any(token.lstrip or token.rstrip for token in added):
        return None
    normalizers, cutters = _parts(backend.normalizer, "normalizers"), _parts(backend.pre_tokenizer, "pretokenizers")
    if not all(_keeps_length(part) for part in normalizers) or not all(_keeps_text(part) for part in cutters):
        return None
    vocab = backend.get_vocab(with_added_tokens=False)
    if any(part["type"] == "ByteLevel" for part in cutters):
        complete = all(character in vocab for character in tokenizers.pre_tokenizers.ByteLevel.alphabet())
        longest = max(len(token) for token in vocab)  # a character for each byte
    else:
        complete = model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
        longest = max(len(token.encode()) for token in vocab)
    return max([longest, *(len(token.content.encode()) for token in added)]) if complete else None


def fewest_tokens(text: str, most: int) -> int:
    """Tokens that a text has at least, where one stands for `most` bytes at most."""
    if text.isascii():
        return len(text) // most
    return len(text.encode()) // (most * _SHRINKS)


class Cuts:
    """Where texts can be cut for a tokenizer: behind a letter that no token and no word reaches beyond."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._places = _places(backend)
        self._added = [token.content for token in backend.get_added_tokens_decoder().values()]
        self._reach = max((len(content) for content in self._added), default=1)

    @property
    def known(self) -> bool:
        return self._places is not None

    def pieces(self, text: str) -> Iterator[str]:
        """Pieces of about PIECE characters whose tokens, one piece after the other, are those of the text."""
        start = 0
        while start < len(text):
            end = self._next(text, start + PIECE)
            yield text[start:end]
            start = end

    def _next(self, text: str, at: int) -> int:
        if self._places is None:
            return len(text)
        while at < len(text):  # in steps, as a search lets no other thread run
            for found in self._places.finditer(text, at, at + PIECE):
                if _is_letter(found[0]) and not self._inside(text, found.end()):
                    return found.end()
            at += PIECE - 1
        return len(text)

    def _inside(self, text: str, at: int) -> bool:
        """Whether an added token stands across a place."""
        start = max(0, at - self._reach)
        around, middle = text[start : at + self._reach], at - start
        return any(
            middle - len(content) < found < middle for content in self._added for found in _places_of(content, around)
        )


def _places_of(content: str, text: str) -> Iterator[int]:
    at = text.find(content)
    while at >= 0:
        yield at
        at = text.find(content, at + 1)


def _is_letter(character: str) -> bool:
    return character.isalpha() and unicodedata.normalize("NFKC", character)[-1].isalpha()


def _places(backend: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """A pattern of the letters behind which every text can be cut, None if there are none that are known."""
    model: Any = backend.model
    if not isinstance(model, tokenizers.models.BPE) or model.dropout or model.end_of_word_suffix:
        return None
    normalizers, cutters = _parts(backend.normalizer, "normalizers"), _parts(backend.pre_tokenizer, "pretokenizers")
    if not all(part["type"] in ("NFC", "NFKC") or _writes_spaces(part) for part in normalizers):
        return None
    if any(part["type"] == "ByteLevel" for part in cutters):
        places = _places_between_words(normalizers, cutters)
    else:
        places = _places_before_spaces(backend, normalizers, cutters)
    for token in backend.get_added_tokens_decoder().values():
        if token.rstrip or token.single_word:  # what follows it decides what it is
            return None
        if normalizers and token.normalized and places is not None:  # other texts may become this one
            written = f"{token.content} {unicodedata.normalize('NFKC', token.content)}".replace(_SPACE, " ")
            if places.search(written.rstrip()):
                return None
    return places


def _places_between_words(normalizers: list[dict[str, Any]], cutters: list[dict[str, Any]]) -> re.Pattern[str] | None:
    """For byte-level vocabularies, where patterns cut words."""
    words = spaces = False
    for part in cutters:
        if part["type"] == "ByteLevel":
            words |= part["use_regex"]  # that of GPT-2
            spaces |= part["add_prefix_space"]  # before a piece that begins with anything else
        elif part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            pattern = part["pattern"].get("Regex", "")
            if not _KNOWN.fullmatch(pattern):
                return None
            words |= any(f"|{letters}|" in f"|{pattern}|" for letters in _LETTERS)
        elif part["type"] != "Digits":
            return None
    if not words or any(_writes_spaces(part) for part in normalizers):
        return None
    return _CUTS_AT_SPACES if spaces else _CUTS


def _places_before_spaces(
    backend: tokenizers.Tokenizer, normalizers: list[dict[str, Any]], cutters: list[dict[str, Any]]
) -> re.Pattern[str] | None:
    """For vocabularies of sentencepiece: a whole text may be one word, but no token has a space behind a letter."""
    model: Any = backend.model
    metaspace = {"type": "Metaspace", "replacement": _SPACE}
    written = any(_writes_spaces(part) for part in normalizers)
    for part in cutters:
        if metaspace.items() <= part.items():
            written = True
        elif not written or part["type"] != "Split" or part["pattern"] != {"String": " "}:  # of which none are left
            return None
    vocab = backend.get_vocab(with_added_tokens=False)
    if not written or _SPACE not in vocab or model.ignore_merges or model.continuing_subword_prefix:
        return None
    crossing = re.compile(rf"(?:\w|<0x..>){_SPACE}")
    return None if any(crossing.search(token) for token in vocab) else _CUTS_AT_SPACES


def _parts(part: Any, inner: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as tokenizer.json writes it, and where it is a sequence its parts."""
    if part is None:
        return []
    written: dict[str, Any] = json.loads(bytes(part.__getstate__()))
    return _flat(written, inner)


def _flat(written: dict[str, Any], inner: str) -> list[dict[str, Any]]:
    return [one for part in written[inner] for one in _flat(part, inner)] if inner in written else [written]


def _writes_spaces(part: dict[str, Any]) -> bool:
    return part["type"] == "Replace" and part["pattern"] == {"String": " "} and part["content"] == _SPACE


def _keeps_length(normalizer: dict[str, Any]) -> bool:
    return normalizer["type"] in ("NFC", "NFKC", "Prepend") or _writes_spaces(normalizer)


def _keeps_text(cutter: dict[str, Any]) -> bool:
    return cutter["type"] in ("ByteLevel", "Metaspace", "Digits") or (
        cutter["type"] == "Split" and cutter["behavior"] != "Removed"
    )
