"""A Python function as the JSON schema of a tool: chat templates take tools in this form.

Names, types and defaults come from the signature, descriptions from a docstring with an "Args:" section, one indented
"name: text" per argument; "(choices: ["a", "b"])" at the end of a text lists the values that are allowed.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from penstock.errors import InvalidArgument

_BASIC = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_PLAIN = _BASIC | {list: "array", tuple: "array", dict: "object"}
_SECTIONS = ("Args:", "Returns:", "Raises:")
_ARGUMENT = re.compile(r"([ \t]*)(\w+):\s*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """{"type": "function", "function": {name, description, parameters}} of a function.

    Raises InvalidArgument for one without a docstring, and naming an argument without a type hint or a description, or
    with a type that JSON does not have.
    """
    name = getattr(function, "__name__", type(function).__name__)
    text = inspect.getdoc(function)
    if not text:
        raise InvalidArgument(f"tools: {name} has no docstring, expected one that describes it and its arguments")
    sections = _sections(text)
    described = _descriptions(sections.get("Args:", []))
    hints = get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for n, (argument, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if n == 0 and argument in ("self", "cls") and argument not in hints:
            continue
        if argument not in hints:
            raise InvalidArgument(f"tools: {name} has no type hint for {argument}, expected one")
        if argument not in described:
            raise InvalidArgument(f"tools: the docstring of {name} does not describe {argument}, expected it in Args")
        properties[argument] = _described(name, argument, hints[argument], described[argument])
        if parameter.default is inspect.Parameter.empty:
            required.append(argument)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    about = {"name": name, "description": "\n".join(sections[""]).strip(), "parameters": parameters}
    returned = _returned(hints, sections)
    return {"type": "function", "function": about | ({"return": returned} if returned is not None else {})}


def _sections(text: str) -> dict[str, list[str]]:
    """The lines of a docstring by their heading; "" for those before the first."""
    found: dict[str, list[str]] = {"": []}
    now = ""
    for line in text.strip().splitlines():
        if line.strip() in _SECTIONS:
            now = line.strip()
            found.setdefault(now, [])
        else:
            found[now].append(line)
    return found


def _descriptions(lines: list[str]) -> dict[str, str]:
    """Argument names and their texts; lines that are indented deeper than the first name belong to the text above."""
    found: dict[str, str] = {}
    indent: str | None = None
    now = ""
    for line in filter(str.strip, lines):
        match = _ARGUMENT.fullmatch(line)
        if match and (indent is None or len(match[1]) <= len(indent)):
            indent, now = match[1], match[2]
            found[now] = match[3].strip()
        elif now:
            found[now] = f"{found[now]} {line.strip()}".strip()
    return found


def _described(function: str, argument: str, hint: Any, text: str) -> dict[str, Any]:
    try:
        schema = _typed(hint)
    except TypeError:
        raise InvalidArgument(
            f"tools: {function} has the type {hint!r:.80} for {argument}, expected one that JSON has "
            "(int, float, str, bool, list, dict, Literal, or unions of these)"
        ) from None
    if choices := _CHOICES.search(text):
        try:
            schema["enum"] = json.loads(choices[1])
        except ValueError:
            raise InvalidArgument(f"tools: {function} has choices for {argument} that are no JSON list") from None
        text = text[: choices.start()].strip()
    return schema | {"description": text}


def _returned(hints: dict[str, Any], sections: dict[str, list[str]]) -> dict[str, Any] | None:
    """What a function returns, where its hint says so in JSON's types."""
    if "return" not in hints:
        return None
    try:
        schema = _typed(hints["return"])
    except TypeError:
        return None
    text = " ".join(line.strip() for line in sections.get("Returns:", ())).strip()
    return schema | ({"description": text} if text else {})


def _typed(hint: Any) -> dict[str, Any]:
    """The schema of a type hint; raises TypeError for one that JSON does not have."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if inspect.isclass(hint) and issubclass(hint, enum.Enum):
        return _listed([member.value for member in hint])
    if origin is None:
        if hint not in _PLAIN:
            raise TypeError
        return {"type": _PLAIN[hint]}
    if origin is Literal:
        return _listed(list(inner))
    if origin in (Union, types.UnionType):
        return _union(inner)
    if origin is list:
        return {"type": "array", "items": _typed(inner[0])}
    if origin is tuple and len(inner) > 1 and ... not in inner:
        return {"type": "array", "prefixItems": [_typed(one) for one in inner]}
    if origin is dict and len(inner) == 2:
        return {"type": "object", "additionalProperties": _typed(inner[1])}
    raise TypeError


def _listed(values: list[Any]) -> dict[str, Any]:
    if not values or any(type(value) not in _BASIC for value in values):
        raise TypeError
    names = list(dict.fromkeys(_BASIC[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _union(inner: tuple[Any, ...]) -> dict[str, Any]:
    each = [_typed(one) for one in inner if one is not type(None)]
    if len(each) == 1:
        schema = each[0]
    elif all(set(one) == {"type"} and isinstance(one["type"], str) for one in each):
        names = sorted({one["type"] for one in each})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": each}
    return schema | ({"nullable": True} if type(None) in inner else {})
