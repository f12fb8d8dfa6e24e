"""Arguments of tool calls: the JSON schemas of their parameters, and values typed by them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.errors import InvalidArgument

_KEY = re.compile(r"[^\s<>{}\[\]:,\"]{1,256}")
_NAMES = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object",
}  # fmt: skip
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")


def escaped(text: str) -> str:
    """Text inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def loads(text: str) -> Any:
    """JSON without NaN and Infinity. Raises ValueError, also for what is nested too deeply."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def typed(text: str, types: frozenset[str]) -> str:
    """The value of a parameter as JSON: of one of the types if it can be read as such, else as a string."""
    bare = text.strip()
    if "null" in types and bare in ("null", "None"):
        return "null"
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    if types & {"integer", "number"} and NUMBER.fullmatch(bare):
        return bare
    if types & {"object", "array"} and bare[:1] in ("{", "["):
        try:
            return json.dumps(loads(bare), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, frozenset[str]]]:
    """The types of the parameters of each tool, by name; what is no tool is passed over."""
    found: dict[str, dict[str, frozenset[str]]] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str):
            continue
        root = function.get("parameters")
        properties = root.get("properties") if isinstance(root, Mapping) else None
        if not isinstance(properties, Mapping):
            properties = {}
        found[name] = {key: _types(schema, root, set()) for key, schema in properties.items()}
    return found


def _types(schema: Any, root: Any, followed: set[str], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema takes; none if it does not say. Each reference is followed once."""
    if not isinstance(schema, Mapping) or depth > 8:
        return frozenset()
    if isinstance(pointer := schema.get("$ref"), str):
        if pointer in followed or not pointer.startswith("#/"):
            return frozenset()
        followed.add(pointer)
        return _types(at(pointer, root), root, followed, depth + 1)
    named = schema.get("type")
    types = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    if not types:
        for key in ("anyOf", "oneOf", "allOf"):
            choices = schema.get(key)
            for choice in choices if isinstance(choices, list) else ():
                types |= _types(choice, root, followed, depth + 1)
    if not types:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        types = {_NAMES[type(v)] for v in values if type(v) in _NAMES} if isinstance(values, list) else types
    return frozenset(types | {"null"}) if types and schema.get("nullable") is True else frozenset(types)


def properties_of(name: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Name and schema of each property, and whether it is required."""
    properties, required = schema.get("properties"), schema.get("required")
    for key, inner in properties.items() if isinstance(properties, Mapping) else ():
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise InvalidArgument(f"the tool {name} has a parameter named {key!r:.60}, expected no spaces and brackets")
        yield key, inner, isinstance(required, list) and key in required


def string_choices(schema: Mapping[str, Any]) -> list[str]:
    """The strings of an enumeration; none if it is no enumeration of strings."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return list(dict.fromkeys(values))
    return []


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or that which it refers to."""
    for _ in range(32):
        if isinstance(schema, Mapping) and isinstance(pointer := schema.get("$ref"), str):
            schema = at(pointer, root)
    return schema if isinstance(schema, Mapping) else {}


def at(pointer: str, root: Any) -> Any:
    """What a reference inside a schema points to; None if there is nothing."""
    if not pointer.startswith("#/"):
        return root if pointer == "#" else None
    for part in pointer[2:].split("/"):
        root = root.get(part) if isinstance(root, Mapping) else None
    return root
