"""Grammars in llguidance's Lark, as they are written."""

import json
from collections.abc import Mapping
from typing import Any

from penstock.text.tokenizer import Tokenizer

_JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    # as JSON is written in one line or indented: a model that likes white space would write nothing else
    "whitespace_pattern": r" ?|\r?\n[ \t]{0,20}",
    "coerce_one_of": False,
}
ANY_TEXT = "/(?s:.*)/"

Tools = Mapping[str, tuple[Mapping[str, Any], bool]]  # parameters and strictness, by name


class Lark:
    """A grammar as it is written, for one tokenizer: rules, and the parts that rules are made of.

    tokens: llguidance's form of the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Any) -> None:
        self._tokenizer, self._tokens = tokenizer, tokens
        self._rules: dict[str, str] = {}  # by name, behind it
        self._names: dict[str, str] = {}  # of numbered rules

    def empty(self) -> "Lark":
        """Another one for the same tokenizer."""
        return Lark(self._tokenizer, self._tokens)

    def text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(name + rest for name, rest in self._rules.items()), ""])

    def define(self, name: str, body: str, attributes: str = "") -> str:
        self._rules[name] = f"{attributes}: {body}"
        return name

    def rule(self, name: str, body: str, attributes: str = "") -> str:
        """A rule with a number behind its name; the same one twice is one."""
        key = f"{name}{attributes}: {body}"
        if key not in self._names:
            self._names[key] = self.define(self.reserve(name), body, attributes)
        return self._names[key]

    def reserve(self, name: str) -> str:
        """The name of a rule that is defined later."""
        made = f"{name}_{len(self._rules)}"
        self._rules[made] = ""
        return made

    def mark(self, text: str) -> str:
        """A marker: its token where it is a special one, else its text."""
        number = self._tokenizer.backend.token_to_id(text)
        if number is not None and number < self._tokens.vocab_size and self._tokens.is_special_token(number):
            return f"<[{number}]>"
        return literal(text)

    def ends(self, text: str) -> bool:
        """Whether a marker is a token that ends an answer: then it stands behind every grammar, and in none."""
        return self._tokenizer.backend.token_to_id(text) in self._tokenizer.eos_ids

    def until(self, mark: str) -> str:
        """Any text up to a marker, and the marker."""
        written = self.mark(mark)
        if written.startswith("<["):
            return f"{self.define('TEXT', ANY_TEXT)} {written}"
        return self.rule("text", ANY_TEXT, f"[suffix={written}]")

    def json(self, schema: Mapping[str, Any], lenient: bool) -> str:
        """A JSON value that satisfies a schema. lenient: without the keywords that llguidance does not know."""
        options = {**_JSON_OPTIONS, "lenient": lenient}
        return self.rule("json", f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}")


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def arguments(lark: Lark, parameters: Mapping[str, Any], strict: bool) -> str:
    """The rule for a JSON object of the parameters, with others only if the schema says so itself."""
    closed = {"type": "object", "properties": {}, "additionalProperties": False}
    return lark.json({**closed, **parameters}, lenient=not strict)
