"""From JSON text to a checked request model, or to an error that names the field.

`checked` runs in a child process, so what is imported here is little.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from penstock.server import schema
from penstock.server.errors import ApiError

_Model = TypeVar("_Model", bound=BaseModel)

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # what a lone surrogate looks like in JSON; one of a pair does too
_MAX_NESTING = 64
_SENT_AS = {first: second for second, first in schema.Request.CALLED.items()}


def parsed(body: bytes | bytearray | memoryview, model: type[_Model]) -> _Model:
    """The request that a body holds. Raises ApiError 400, naming the field."""
    data = _json(body)
    if not isinstance(data, dict):
        raise ApiError(400, f"the body is {_kind(data)}, expected a JSON object", code="invalid_json")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _explained(error, data) from None


def checked(data: bytes) -> bytes:
    """Nothing if a body, behind a line with the name of its model, holds such a request; else an ApiError as JSON."""
    end = data.index(b"\n")
    try:
        parsed(memoryview(data)[end + 1 :], getattr(schema, data[:end].decode()))
    except ApiError as error:
        fields = {"status": error.status, "message": error.message, "param": error.param, "code": error.code}
        return json.dumps(fields).encode()
    return b""


def built(body: bytes | bytearray, model: type[_Model]) -> _Model:
    """The request of a body in which `checked` found nothing wrong, without a copy of it as text."""
    return model.model_validate(from_json(body[3:] if body.startswith(b"\xef\xbb\xbf") else body))


def _json(body: bytes | bytearray | memoryview) -> Any:
    try:
        text = str(body, "utf-8").removeprefix("\ufeff")  # utf-8-sig is a module, and a child process can open no more
    except UnicodeDecodeError as error:
        raise ApiError(400, f"byte {error.start} of the body is not UTF-8", code="invalid_json") from None
    if not text or text.isspace():
        raise ApiError(400, "the body is empty, expected a JSON object", code="invalid_json")
    try:
        data = json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_distinct)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        message = f"the body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        raise ApiError(400, message, code="invalid_json") from None
    except ValueError:  # digits beyond the interpreter's limit
        raise ApiError(400, "the body holds a number with too many digits", code="invalid_json") from None
    _check_depth(data)
    if _SURROGATE.search(text):
        _check_text(data)
    return data


def _no_constant(name: str) -> Any:
    raise ApiError(400, f"the body holds {name}, which JSON does not have", code="invalid_json")


def _finite(digits: str) -> float:
    """A number; one beyond float64 would be infinite, which no answer could say."""
    value = float(digits)
    if not math.isfinite(value):
        raise ApiError(
            400, f"the body holds the number {_short(digits)}, expected at most 1.8e308", code="invalid_json"
        )
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ApiError(400, f"{_short(name)} stands twice in one object of the body", code="invalid_json")
    return made


def _check_depth(data: Any) -> None:
    level, depth = [data], 0
    while level:
        depth += 1
        if depth > _MAX_NESTING:
            raise _too_deep()
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, dict | list)
        ]


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested deeper than {_MAX_NESTING} levels", code="invalid_json")


def _check_text(data: Any) -> None:
    """Refuse a lone surrogate wherever it stands: such a string can be neither encoded nor sent back."""
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                code = ord(value[error.start])
                raise ApiError(
                    400, f"the body holds the lone surrogate U+{code:04X}, expected valid Unicode", code="invalid_json"
                ) from None


# --------------------------------------------------------------------------------------------------------------------
# What pydantic found, in the words of an error message


_EXPECTED = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "list": "a list",
    "dictionary": "an object",
}


def _explained(error: ValidationError, data: dict[str, Any]) -> ApiError:
    # of the arms of a union the one that got furthest is the one that was meant
    found = max(error.errors(include_url=False), key=lambda e: _progress(e, data))
    path = _path(found, data)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    kind, message, context = found["type"], found["msg"], found.get("ctx", {})
    if kind == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_parameter")
    if kind == "value_error":  # raised by a validator of ours
        text = f"{param} {message.removeprefix('Value error, ')}"
    elif kind in ("too_short", "too_long"):
        least, most = context.get("min_length"), context.get("max_length")
        limit = f"at least {least}" if kind == "too_short" else f"at most {most}"
        text = f"{param} has {context.get('actual_length')} entries, expected {limit}"
    elif message.startswith("Input should be "):
        expected = message.removeprefix("Input should be ").removeprefix("a valid ").partition(" or instance of ")[0]
        expected = expected.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
        text = f"{param} is {_shown(found['input'])}, expected {_EXPECTED.get(expected, expected)}"
    else:
        text = f"{param}: {message}"
    return ApiError(400, text, param=param, code="invalid_value")


def _progress(error: Any, data: Any) -> tuple[int, bool, bool]:
    kind = error["type"]
    return len(_path(error, data)), kind != "missing", not kind.endswith("_type")


def _path(error: Any, data: Any) -> list[int | str]:
    """The parts of an error's location that lead into the data; the others name arms of a union."""
    path: list[int | str] = []
    for part in error["loc"]:
        if isinstance(data, dict) and part not in data and part in _SENT_AS:
            part = _SENT_AS[part]
        if (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and 0 <= part < len(data)
        ):
            data = data[part]  # type: ignore[index]
            path.append(part)
    return [*path, error["loc"][-1]] if error["type"] == "missing" else path


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "an object")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return _kind(value) if isinstance(value, dict | list) else _short(value)


def _short(value: Any) -> str:
    return reprlib.repr(value)
