"""Chat templates: a model folder's Jinja program that writes a list of messages as one text, run within limits.

A template comes with the model and is not trusted: it is compiled and rendered in a child process (`template_child`)
with limits of time and memory, one for all templates of this process. What it is given is checked here.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.child import Child, ChildDied, ChildOutOfMemory, ChildTimeout
from penstock.errors import CheckpointError, DTypeError, InvalidArgument

MAX_SECONDS = 2.0
MAX_CHARACTERS = 8 << 20  # of the text, and of what a macro or a block writes

_MAX_SOURCE = 256 << 10  # characters of a template; released ones have up to 30 thousand
_MAX_VALUES = 16 << 20  # bytes of all values as JSON
_MAX_BITS = 4096  # of an integer
_MAX_NESTING = 90  # of data; a template may put it into lists of its own
_MEMORY = 256 << 20  # bytes that the child may take,
_MEMORY_OF_ANY, _MEMORY_PER_BYTE = 64 << 20, 8  # and that one call may: so many, and more with the bytes it is given
_GRACE = 0.5  # seconds after which the child is ended, when it has not stopped by itself
_RESERVED = ("messages", "tools", "add_generation_prompt")

_child = Child("penstock.text.template_child:answer", memory=_MEMORY, seconds=MAX_SECONDS)


@dataclass
class ChatTemplates:
    """The templates of a model by name ("default", "tool_use"), each with its source and the file it stands in."""

    sources: Mapping[str, tuple[str, str]]
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    max_seconds: float = MAX_SECONDS
    max_characters: int = MAX_CHARACTERS

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat. `variables` reach the template under their names.

        Content given as a list of text parts is joined if the template takes strings only. Raises InvalidArgument for
        what penstock or the template does not take and for work beyond the limits, CheckpointError for a broken
        template.
        """
        variables = {} if variables is None else variables
        if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
            raise DTypeError(f"chat template: variables is {variables!r:.60}, expected a dict of values by name")
        for name in _RESERVED:
            if name in variables:
                raise InvalidArgument(f"chat template: {name} is among the variables, expected other names")
        if not isinstance(add_generation_prompt, bool):
            raise DTypeError(f"chat template: add_generation_prompt is {add_generation_prompt!r}, expected a bool")
        values = {
            "documents": None,
            **self.special_tokens,
            **{name: _plain(value, name) for name, value in variables.items()},
            "messages": _checked_messages(messages),
            "tools": _checked_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._run("tool_use" if tools is not None and "tool_use" in self.sources else "default", values)

    def compile(self) -> None:
        """Compile the default template now, so that the first chat does not wait. Raises CheckpointError."""
        self._run("default", {})

    def _run(self, name: str, values: Mapping[str, Any]) -> str:
        """The text that a template makes of values; without any it is only compiled."""
        if name not in self.sources:
            found = ", ".join(sorted(self.sources))
            raise InvalidArgument(f"chat template: the model has templates named {found}, expected one named default")
        source, file = self.sources[name]
        if len(source) > _MAX_SOURCE:
            raise CheckpointError(f"{file}: chat template has {len(source)} characters, expected at most {_MAX_SOURCE}")
        data = _encoded(values)
        if len(data) > _MAX_VALUES:
            largest = max(values, key=lambda name: len(_encoded(values[name])))
            raise InvalidArgument(f"chat template: {largest} holds too much, expected less than {_MAX_VALUES >> 20} MB")
        memory = min(_MEMORY_OF_ANY + _MEMORY_PER_BYTE * len(data), _MEMORY)
        limits = {"seconds": self.max_seconds, "characters": self.max_characters, "spared": _MEMORY - memory}
        _child.start()  # what fails here is no fault of the template
        try:
            answer = _child.call(_encoded({"source": source, **limits}) + b"\n" + data, self.max_seconds + _GRACE)
        except ChildTimeout:
            kind, text = "invalid", f": takes longer than {self.max_seconds:g} s, expected a template that ends"
        except ChildOutOfMemory:
            kind, text = "invalid", f": makes data of more than {memory >> 20} MB on the way, expected less"
        except ChildDied as error:
            kind, text = "invalid", f": ends the process that runs it ({error}), expected a text"
        else:
            kind, text = json.loads(answer.decode("utf-8", "surrogatepass"))
        if kind == "text":
            return text
        if kind == "refused":
            raise InvalidArgument(f"chat template: {text}")
        raise (CheckpointError if kind == "broken" else InvalidArgument)(f"{file}: chat template{text}")


def _encoded(value: Any) -> bytes:
    """JSON for the child, with surrogates as they are."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def templates_in(folder: Path, settings: Mapping[str, Any], special: Mapping[str, Any]) -> ChatTemplates | None:
    """The templates of a model folder, None if there are none.

    chat_template.jinja and additional_chat_templates/*.jinja win over tokenizer_config.json (`settings`), that over
    chat_template.json. Raises CheckpointError for a template that is no text.
    """
    sources: dict[str, tuple[str, str]] = {}
    for name, path in [
        ("default", folder / "chat_template.jinja"),
        *((path.stem, path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))),
    ]:
        if path.is_file():
            sources[name] = _read(path), str(path)
    if not sources:
        sources = _listed(settings.get("chat_template"), folder / "tokenizer_config.json")
    if not sources and (path := folder / "chat_template.json").is_file():
        try:
            content = json.loads(_read(path))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: is damaged, expected a JSON object: {error}") from None
        sources = _listed(content.get("chat_template") if isinstance(content, dict) else content, path)
    return ChatTemplates(sources, special) if sources else None


def special_tokens(*settings: Mapping[str, Any]) -> dict[str, Any]:
    """Names and texts of special tokens (bos_token and so on) as templates see them; the first mapping wins."""
    named: dict[str, Any] = {}
    for mapping in settings:
        more = mapping.get("extra_special_tokens")
        for name, token in itertools.chain(mapping.items(), more.items() if isinstance(more, dict) else ()):
            text = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(text, str):
                named.setdefault(name, text)
    return named


def _listed(value: Any, path: Path) -> dict[str, tuple[str, str]]:
    """Templates as JSON files hold them: a string, or a list of names and templates."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": (value, str(path))}
    entries = value if isinstance(value, list) else [value]
    sources = {}
    for entry in entries:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise CheckpointError(
                f"{path}: chat_template is a {type(value).__name__}, expected a string or a list of names and templates"
            )
        sources[name] = text, str(path)
    return sources


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > 4 * _MAX_SOURCE:
            raise CheckpointError(f"{path}: has {path.stat().st_size} bytes, expected at most {4 * _MAX_SOURCE}")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: byte {error.start} is not UTF-8, expected a chat template") from None


# What goes in


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple):
        raise DTypeError(f"messages is a {type(messages).__name__}, expected a list of messages")
    if not messages:
        raise InvalidArgument("messages is empty, expected at least one message")
    return [_checked_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise DTypeError(f"{where} is a {type(message).__name__}, expected a dict with role and content")
    if not isinstance(role := message.get("role"), str) or not role:
        found = "missing" if "role" not in message else "empty" if role == "" else f"a {type(role).__name__}"
        raise InvalidArgument(f"{where}.role is {found}, expected a string such as user")
    plain = _plain(message, where)
    content = plain.get("content")
    if not (content is None or isinstance(content, str | list)):
        kind = type(content).__name__
        raise InvalidArgument(f"{where}.content is a {kind}, expected a string, a list of text parts or None")
    if isinstance(content, list):
        for n, part in enumerate(content):
            _check_part(part, f"{where}.content[{n}]")
    return plain


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
        raise InvalidArgument(f"{where} has no type, expected a part {{type: text, text: ...}}")
    if kind != "text":
        raise InvalidArgument(f"{where} has type {kind[:40]!r}, expected text: images and sound are not supported")
    if not isinstance(part.get("text"), str):
        raise InvalidArgument(f"{where}.text is a {type(part.get('text')).__name__}, expected a string")


def _checked_tools(tools: Any) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise DTypeError(f"tools is a {type(tools).__name__}, expected a list of dicts")
    for n, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise DTypeError(f"tools[{n}] is a {type(tool).__name__}, expected a dict with a JSON schema")
    return _plain(tools, "tools")


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of dict, list, str, int, float, bool and None. Raises InvalidArgument for anything else."""
    if depth > _MAX_NESTING:
        raise InvalidArgument(f"{where[:80]}... is nested deeper than {_MAX_NESTING} levels, expected less")
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise InvalidArgument(f"{where} is an integer of {value.bit_length()} bits, expected at most {_MAX_BITS}")
        return int(value)
    if isinstance(value, dict):
        copy = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidArgument(f"{where} has the key {key!r:.40}, expected strings as keys")
            copy[str(key)] = _plain(item, f"{where}.{key:.40}", depth + 1)
        return copy
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value)]
    raise InvalidArgument(f"{where} is a {type(value).__name__}, expected JSON data")
