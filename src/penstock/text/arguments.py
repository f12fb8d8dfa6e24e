"""Arguments of tool calls: values typed by a JSON schema, and the forms that requests and chat templates have."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import InvalidArgument

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")


def with_arguments(messages: Sequence[Mapping[str, Any]], format: str) -> list[dict[str, Any]]:
    """Messages for a chat template: with the arguments of earlier calls, JSON text in requests, in the form that
    templates of `format` take (an object; text in DeepSeek's).

    Raises InvalidArgument for arguments that are no JSON object. Whatever else is wrong is left to the template.
    """
    keep_text = format.startswith("deepseek")
    changed = []
    for n, message in enumerate(messages):
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if isinstance(calls, list | tuple):
            where = f"messages[{n}].tool_calls"
            calls = [_with_arguments(call, f"{where}[{i}]", keep_text) for i, call in enumerate(calls)]
            message = {**message, "tool_calls": calls}
        changed.append(message)
    return changed


def _with_arguments(call: Any, where: str, keep_text: bool) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    given = function["arguments"]
    try:
        value = loads(given or "{}") if isinstance(given, str) else given
    except ValueError:
        value = None
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{where}.function.arguments is {given!r:.60}, expected the JSON text of an object")
    if keep_text:
        value = given or "{}" if isinstance(given, str) else json.dumps(value, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": value}}


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
        target = root
        for part in pointer[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return _types(target, root, followed, depth + 1)
    named = schema.get("type")
    types = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    if not types:
        for key in ("anyOf", "oneOf", "allOf"):
            choices = schema.get(key)
            for choice in choices if isinstance(choices, list) else ():
                types |= _types(choice, root, followed, depth + 1)
    return frozenset(types | {"null"}) if types and schema.get("nullable") is True else frozenset(types)
