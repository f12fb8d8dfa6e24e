"""Control tokens that messages spell out: marked before a template mixes them with its own, and encoded as plain text.

A template writes one text, in which a <|im_end|> of its own looks like one that a user typed. So each of the user's
gets a mark, a character that occurs nowhere else, before the template runs. What comes out without a mark is the
template's; it is given another name, which a copy of the tokenizer has as its control token. That copy does not know
the names that users know, and reads the whole text at once, so that everything around them is encoded as it always is.
"""

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, pre_tokenizers

from penstock.errors import InvalidArgument

_ROLES = ("system", "developer", "user", "tool")
_MARKS = range(0xE000, 0xF900)  # of private use: no template looks for one, none is white space or has a case
_ESCAPE = re.compile(r"\\u[0-9a-f]{4}")


@dataclass(frozen=True)
class ChatText:
    """A chat as its template wrote it, with a mark behind the first character of each control token of a message."""

    marked: str
    mark: str = ""  # none: no message spells one out

    @property
    def text(self) -> str:
        """What the model reads."""
        return _without(self.mark, self.marked)


class ControlTokens:
    """The control tokens of a tokenizer: its added tokens that are `special`, except those of white space alone."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._tokenizer = backend
        self._added = list(backend.get_added_tokens_decoder().values())
        self._names = [token.content for token in self._added if token.special and token.content.strip()]
        self._squeezed = {_squeezed(name) for name in self._names}

    def marked(self, messages: Any, *others: Any) -> tuple[Any, str]:
        """Messages for a template with marks in them, and the mark; as they are, and "", if they need none.

        White space and the borders of texts do not count, for templates trim texts and join them. `others` is what
        the template sees besides. Raises InvalidArgument if no character is left to be the mark.
        """
        texts = list(_texts(messages))
        squeezed = [_squeezed(text) for _, _, text in texts]
        starts = sorted(_starts("".join(squeezed), self._squeezed))
        if not starts:
            return messages, ""
        mark = _unused((messages, *others))
        copied = [_copied(message) for message in messages]
        begin = 0
        for (number, part, text), plain in zip(texts, squeezed, strict=True):
            own = starts[bisect_left(starts, begin) : bisect_left(starts, begin + len(plain))]
            if own:
                holder, key = (copied[number], "content") if part is None else (copied[number]["content"][part], "text")
                holder[key] = _with_marks(text, {start - begin for start in own}, mark)
            begin += len(plain)
        return copied, mark

    def renamed(self, chat: ChatText) -> str:
        """The text of a chat that has marks, for `copy`: control tokens of the template by their other names."""
        marked, pieces, end = chat.marked, [], 0
        found = self._finder.encode(marked, add_special_tokens=False)
        for name, (start, stop) in zip(found.tokens, found.offsets, strict=True):
            if name in self._aliases and not marked.startswith(chat.mark, stop):  # behind a name of one character
                pieces += [marked[end:start], self._aliases[name]]
                end = stop
        return _without(chat.mark, "".join([*pieces, marked[end:]]))

    @cached_property
    def _aliases(self) -> dict[str, str]:
        """Names of control tokens that cannot be guessed."""
        nonce = secrets.token_hex(8)
        return {name: f"<{nonce}:{number}>" for number, name in enumerate(self._names)}

    @cached_property
    def _finder(self) -> tokenizers.Tokenizer:
        """Finds added tokens in a text as the tokenizer does, and nothing else."""
        finder = tokenizers.Tokenizer(models.BPE())
        finder.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]+"), "removed")  # type: ignore[assignment]
        finder.add_tokens(
            [
                AddedToken(token.content, single_word=token.single_word, normalized=token.normalized)
                for token in self._added
            ]
        )
        return finder

    @cached_property
    def copy(self) -> tokenizers.Tokenizer:
        """The tokenizer with the aliases as its control tokens, and no way to their ids from other text."""
        content, alias = json.loads(self._tokenizer.to_str()), self._aliases
        for token in content["added_tokens"]:
            token["content"] = alias.get(token["content"], token["content"])
        model = content["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {alias.get(piece, piece): number for piece, number in model["vocab"].items()}
        else:
            model["vocab"] = [[alias.get(piece, piece), score] for piece, score in model["vocab"]]
        if "merges" in model:
            model["merges"] = [
                [left, right]
                for left, right in model["merges"]
                if left not in alias and right not in alias and left + right not in alias
            ]
        if model.get("unk_token") in alias:
            model["unk_token"] = alias[model["unk_token"]]
        return tokenizers.Tokenizer.from_str(json.dumps(content))


def _texts(messages: Any) -> Iterator[tuple[int, int | None, str]]:
    """Texts of users, systems and tools with the numbers of their messages and parts; what is no message has none."""
    for number, message in enumerate(messages if isinstance(messages, Sequence) else ()):
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            continue
        content = message.get("content")
        if isinstance(content, str):
            yield number, None, content
        elif isinstance(content, Sequence):
            for part, value in enumerate(content):
                if isinstance(value, Mapping) and isinstance(text := value.get("text"), str):
                    yield number, part, text


def _copied(message: Any) -> Any:
    """A message whose texts may be changed."""
    if not isinstance(message, Mapping):
        return message
    copied, content = dict(message), message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        copied["content"] = [dict(part) if isinstance(part, Mapping) else part for part in content]
    return copied


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _starts(text: str, names: Iterable[str]) -> set[int]:
    """Where names stand in a text, overlapping ones too."""
    found: set[int] = set()
    for name in names:
        start = text.find(name)
        while start >= 0:
            found.add(start)
            start = text.find(name, start + 1)
    return found


def _with_marks(text: str, starts: set[int], mark: str) -> str:
    """`text` with marks behind the characters of these numbers, white space not counted."""
    pieces, number = [], -1
    for character in text:
        pieces.append(character)
        if not character.isspace():
            number += 1
            if number in starts:
                pieces.append(mark)
    return "".join(pieces)


def _unused(values: Any) -> str:
    """A character for the mark that is nowhere in `values`, nor is its escape in JSON."""
    used = set(_ESCAPE.findall(repr(values)))  # repr escapes characters of private use the way JSON does
    for code in _MARKS:
        if f"\\u{code:04x}" not in used:
            return chr(code)
    raise InvalidArgument("messages: use all characters from U+E000 to U+F8FF, expected one that is left")


def _without(mark: str, text: str) -> str:
    """`text` without marks, also where a template wrote them as JSON in ASCII."""
    return text.replace(mark, "").replace(f"\\u{ord(mark):04x}", "") if mark else text
