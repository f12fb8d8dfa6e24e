"""Grammars of tool calls: how a call of given tools reads in each format, in llguidance's Lark."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.engine.formats import FORMATS
from penstock.engine.tokenizer import Tokenizer
from penstock.errors import InvalidArgument

_JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n\r\t]{0,40}",  # indents, but no model that writes nothing else
    "coerce_one_of": False,
}
_NAME = re.compile(r"[^\s<>{}\"'`]{1,256}")
_KEY = re.compile(r"[^\s<>{}\[\]:,\"]{1,256}")

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

    def until(self, mark: str) -> str:
        """Any text up to a marker, and the marker."""
        written = self.mark(mark)
        if written.startswith("<["):
            return f"{self.define('TEXT', _ANY_TEXT)} {written}"
        return self.rule("text", _ANY_TEXT, f"[suffix={written}]")

    def json(self, schema: Mapping[str, Any], lenient: bool) -> str:
        """A JSON value that satisfies a schema. lenient: without the keywords that llguidance does not know."""
        options = {**_JSON_OPTIONS, "lenient": lenient}
        return self.rule("json", f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}")


_ANY_TEXT = "/(?s:.*)/"


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def write_calls(lark: Lark, format: str, tools: Tools, parallel: bool) -> str:
    """The rule for a call of one of the tools, or for several calls, as models of that format write them.

    Raises InvalidArgument for names that the format cannot write.
    """
    known = FORMATS[format]
    assert known.call is not None
    for name in tools:
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"a tool is named {name!r:.60}, expected a name without spaces, brackets and quotes")
    opening, closing = (lark.mark(mark) for mark in known.call)
    write = {"qwen": _json_call, "qwen-xml": _xml_call, "gemma": _gemma_call}.get(format, _deepseek_call)
    each = " | ".join(write(lark, format, name, *tool) for name, tool in tools.items())
    line = literal("\n") if format.startswith("qwen") else ""
    call = lark.rule("call", f"{opening} {line} ({each}) {line} {closing}")
    calls = f"{call} ({line} {call})*" if parallel else call
    if known.calls is not None:
        calls = f"{lark.mark(known.calls[0])} {calls} {lark.mark(known.calls[1])}"
    return lark.rule("calls", calls)


def arguments(lark: Lark, parameters: Mapping[str, Any], strict: bool) -> str:
    """The rule for a JSON object of the parameters, with others only if the schema says so itself."""
    closed = {"type": "object", "properties": {}, "additionalProperties": False}
    return lark.json({**closed, **parameters}, lenient=not strict)


def _json_call(lark: Lark, _format: str, name: str, parameters: Mapping[str, Any], strict: bool) -> str:
    before = f'{{"name": {literal(name)}, "arguments": '
    return f'{literal(before)} {arguments(lark, parameters, strict)} "}}"'


def _deepseek_call(lark: Lark, format: str, name: str, parameters: Mapping[str, Any], strict: bool) -> str:
    separator, values = lark.mark(FORMATS[format].separator), arguments(lark, parameters, strict)
    if format == "deepseek-v3":
        before, after = literal(f"{name}\n```json\n"), literal("\n```")
        return f'"function" {separator} {before} {values} {after}'
    return f"{literal(name)} {separator} {values}"


def _xml_call(lark: Lark, _format: str, name: str, parameters: Mapping[str, Any], strict: bool) -> str:
    """Parameters in the order of the schema. Strings are free text, unless they are enumerated."""
    end = literal("\n</parameter>\n")
    parts = [literal(f"<function={name}>\n")]
    for key, schema, required in _properties(name, parameters):
        found = _target(schema, parameters)
        if choices := _texts(found):
            value = f"({' | '.join(map(literal, choices))}) {end}"
        elif found.get("type") in ("integer", "number", "boolean", "null", "object", "array"):
            definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
            value = f"{lark.json({**definitions, **found}, lenient=not strict)} {end}"
        else:
            value = lark.rule("text", _ANY_TEXT, f"[suffix={end}]")
        begin = literal(f"<parameter={key}>\n")
        parts.append(f"{begin} {value}" if required else f"({begin} {value})?")
    return " ".join([*parts, literal("</function>")])


def _gemma_call(lark: Lark, _format: str, name: str, parameters: Mapping[str, Any], _strict: bool) -> str:
    return f"{literal(f'call:{name}')} {_Gemma(lark, name, parameters).object(parameters)}"


class _Gemma:
    """Values as Gemma writes them, by the types, properties, items and enumerations of a schema."""

    def __init__(self, lark: Lark, name: str, root: Mapping[str, Any]) -> None:
        self._lark, self._name, self._root = lark, name, root
        self._quote = lark.mark(FORMATS["gemma"].quote)
        self._references: dict[str, str] = {}

    def object(self, schema: Mapping[str, Any]) -> str:
        """Properties in the order of their names, as the chat template has them."""
        pairs = sorted(_properties(self._name, schema), key=lambda pair: pair[0])
        first = later = '""'  # what can follow: if no property has been written yet, and if one has
        for key, inner, required in reversed(pairs):
            pair = self._lark.rule("pair", f"{literal(f'{key}:')} {self.value(inner)}")
            first = self._lark.rule("first", f"{pair} {later}" + ("" if required else f" | {first}"))
            later = self._lark.rule("later", (f'"," {pair}' if required else f'("," {pair})?') + f" {later}")
        return f'"{{" {first} "}}"'

    def value(self, schema: Any) -> str:
        """The rule for a value."""
        lark = self._lark
        if not isinstance(schema, Mapping):
            return self._any()
        if isinstance(pointer := schema.get("$ref"), str):
            if pointer not in self._references:
                name = self._references[pointer] = lark.reserve("value")
                lark.define(name, self.value(_at(pointer, self._root)))
            return self._references[pointer]
        if choices := _texts(schema):
            return lark.rule("string", f"{self._quote} ({' | '.join(map(literal, choices))}) {self._quote}")
        options = schema.get("anyOf") or schema.get("oneOf")
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            options = [{**schema, "type": each} for each in kind]
        if isinstance(options, list) and options:
            return lark.rule("value", " | ".join(dict.fromkeys(map(self.value, options))))
        if kind == "object" and isinstance(schema.get("properties"), Mapping):
            return lark.rule("object", self.object(schema))
        if kind == "array":
            item = self.value(schema.get("items"))
            return lark.rule("array", f'"[" ({item} ("," {item})*)? "]"')
        if kind == "string":
            return self._string()
        if kind == "boolean":
            return lark.define("boolean", '"true" | "false"')
        if kind == "null":
            return lark.define("null", '"null"')
        if kind == "integer":
            return lark.define("INTEGER", "/-?(0|[1-9][0-9]{0,18})/")
        if kind == "number":
            return self._number()
        return self._any()

    def _string(self) -> str:
        return self._lark.define("string", f"{self._quote} {self._lark.until(FORMATS['gemma'].quote)}")

    def _number(self) -> str:
        return self._lark.define("NUMBER", r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?/")

    def _any(self) -> str:
        self._lark.define("KEY", r"/[a-zA-Z0-9_.\-]{1,64}/")
        self._lark.define("list", '"[" (any ("," any)*)? "]"')
        self._lark.define("dict", '"{" (KEY ":" any ("," KEY ":" any)*)? "}"')
        others = '"true" | "false" | "null" | list | dict'
        return self._lark.define("any", f"{self._string()} | {self._number()} | {others}")


def _properties(name: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Name and schema of each property, and whether it is required."""
    properties, required = schema.get("properties"), schema.get("required")
    for key, inner in properties.items() if isinstance(properties, Mapping) else ():
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise InvalidArgument(f"the tool {name} has a parameter named {key!r:.60}, expected no spaces and brackets")
        yield key, inner, isinstance(required, list) and key in required


def _texts(schema: Mapping[str, Any]) -> list[str]:
    """The strings of an enumeration; none if it is no enumeration of strings."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return list(dict.fromkeys(values))
    return []


def _target(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or that which it refers to."""
    for _ in range(32):
        if isinstance(schema, Mapping) and isinstance(pointer := schema.get("$ref"), str):
            schema = _at(pointer, root)
    return schema if isinstance(schema, Mapping) else {}


def _at(pointer: str, root: Any) -> Any:
    if not pointer.startswith("#/"):
        return root if pointer == "#" else None
    for part in pointer[2:].split("/"):
        root = root.get(part) if isinstance(root, Mapping) else None
    return root
