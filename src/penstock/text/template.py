"""Chat templates: a model folder's Jinja program that writes a list of messages as one text, run within limits.

A template comes with the model and is not trusted. It runs in an immutable Jinja sandbox that knows only the values
given to it (plain JSON data) and methods that are named here. Every loop, call, filter and operator counts against a
budget of time and memory, and nothing is computed before its size is known, so that no template can hang, exhaust the
memory, reach Python's internals or open a file.
"""

import functools
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor
from markupsafe import Markup

from penstock.errors import CheckpointError, DTypeError, InvalidArgument

MAX_SECONDS = 2.0
MAX_CHARACTERS = 8 << 20  # of the text, and of any string on the way to it

_MAX_SOURCE = 256 << 10  # characters of a template; released ones have up to 30 thousand
_MAX_WEIGHT = 16 << 20  # of a list or dict with all it holds, where a value weighs 32 and a character 1
_MAX_PRODUCED = 256 << 20  # characters that all operations together may make
_MAX_BITS = 4096  # of an integer
_MAX_NESTING = 100  # of data, and of macro calls
_VALUE, _SLOT = 32, 4  # weight of a value; characters that a place in a list counts for
_RESERVED = ("messages", "tools", "add_generation_prompt")


@dataclass
class ChatTemplates:
    """The templates of a model by name ("default", "tool_use"), each with its source and the file it stands in."""

    sources: Mapping[str, tuple[str, str]]
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    max_seconds: float = MAX_SECONDS
    max_characters: int = MAX_CHARACTERS

    def __post_init__(self) -> None:
        self._compiled: dict[str, _Template] = {}

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
        variables = dict(variables or {})
        for name in _RESERVED:
            if name in variables:
                raise InvalidArgument(f"chat template: {name} is among the variables, expected other names")
        if not isinstance(add_generation_prompt, bool):
            raise DTypeError(f"chat template: add_generation_prompt is {add_generation_prompt!r}, expected a bool")
        template = self._template(tools)
        values = {
            "documents": None,
            **self.special_tokens,
            **{name: _plain(value, name) for name, value in variables.items()},
            "messages": _checked_messages(messages, keep_parts=template.takes_parts),
            "tools": _checked_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        return template.render(values, self.max_seconds, self.max_characters)

    def _template(self, tools: Any) -> "_Template":
        name = "tool_use" if tools is not None and "tool_use" in self.sources else "default"
        if name not in self.sources:
            found = ", ".join(sorted(self.sources))
            raise InvalidArgument(f"chat template: the model has templates named {found}, expected one named default")
        if name not in self._compiled:
            self._compiled[name] = _Template(*self.sources[name])
        return self._compiled[name]


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


def _checked_messages(messages: Any, keep_parts: bool) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple):
        raise DTypeError(f"messages is a {type(messages).__name__}, expected a list of messages")
    if not messages:
        raise InvalidArgument("messages is empty, expected at least one message")
    return [_checked_message(message, f"messages[{n}]", keep_parts) for n, message in enumerate(messages)]


def _checked_message(message: Any, where: str, keep_parts: bool) -> dict[str, Any]:
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
        if not keep_parts:
            plain["content"] = "".join(part["text"] for part in content)
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
    if depth > _MAX_NESTING - 10:  # a template may put it into lists of its own
        raise InvalidArgument(f"{where[:80]}... is nested deeper than {_MAX_NESTING - 10} levels, expected less")
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


# Running one


class _Template:
    """A compiled template. Raises CheckpointError, naming the file and the line, if it cannot be compiled."""

    def __init__(self, source: str, file: str) -> None:
        self._file = file
        if len(source) > _MAX_SOURCE:
            raise CheckpointError(f"{file}: chat template has {len(source)} characters, expected at most {_MAX_SOURCE}")
        try:
            with _Budget(MAX_SECONDS, MAX_CHARACTERS):
                self.takes_parts = _takes_parts(_environment().parse(source))
                self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{file}: chat template, line {error.lineno}: {error.message}") from None
        except (SyntaxError, RecursionError, MemoryError, ValueError, OverflowError, _TooMuch) as error:
            raise CheckpointError(f"{file}: chat template cannot be compiled: {_described(error)}") from None

    def render(self, values: dict[str, Any], seconds: float, characters: int) -> str:
        with _Budget(seconds, characters) as budget:
            try:
                budget.take_inputs(values)
                context = self._template.new_context(values)
                return budget.joined(self._template.root_render_func(context))
            except InvalidArgument:
                raise
            except _Raised as error:
                raise InvalidArgument(f"chat template: {' '.join(str(error).split())}") from None
            except _TooMuch as error:
                raise InvalidArgument(f"{self._place(error)}: {error}") from None
            except jinja2.exceptions.SecurityError as error:
                raise CheckpointError(f"{self._place(error)}: {_described(error)}") from None
            except RecursionError as error:
                raise InvalidArgument(f"{self._place(error)}: calls itself or nests data too deeply") from None
            except Exception as error:  # whatever the operations of a template can raise
                raise InvalidArgument(f"{self._place(error)}: {_described(error)}") from None

    def _place(self, error: BaseException) -> str:
        line, at = None, error.__traceback__
        while isinstance(at, TracebackType):
            if at.tb_frame.f_code.co_filename == "<template>":
                line = self._template.get_corresponding_lineno(at.tb_lineno)
            at = at.tb_next
        return f"{self._file}: chat template" + (f", line {line}" if line is not None else "")


def _described(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    if isinstance(error, jinja2.TemplateError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Raised(jinja2.TemplateError):
    """The template itself refused the messages, by raise_exception."""


class _TooMuch(Exception):
    """A limit was reached."""


class _Budget:
    """Time and memory of one rendering, known to the operations of the sandbox while it runs in this thread."""

    _running = threading.local()

    def __init__(self, seconds: float, characters: int) -> None:
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._characters = characters
        self._produced = 0
        self._inputs: dict[int, tuple[int, int]] = {}  # weight and depth of each list and dict that was given, by id
        self._recent: dict[int, tuple[Any, int, int]] = {}  # the same of lists and dicts weighed last, kept alive
        self.calls = 0

    def __enter__(self) -> "_Budget":
        self._outer = getattr(self._running, "budget", None)
        self._running.budget = self
        return self

    def __exit__(self, *_: object) -> None:
        self._running.budget = self._outer

    @classmethod
    def now(cls) -> "_Budget":
        """The one of the rendering in progress, its time checked."""
        budget: _Budget = cls._running.budget
        if time.monotonic() > budget._deadline:
            raise _TooMuch(f"takes longer than {budget._seconds:g} s, expected a template that ends")
        return budget

    def room(self, characters: int) -> None:
        """Refuse a string of that many characters before it is made."""
        if characters > self._characters:
            raise _TooMuch(f"makes a text of {characters} characters, expected at most {self._characters}")

    def check(self, value: Any, fresh: bool = False) -> Any:
        """A value just made, if it is within the limits. fresh: all that it holds was made with it."""
        if isinstance(value, str):
            self.room(len(value))
            self._count(len(value))
        elif isinstance(value, int):
            if value.bit_length() > _MAX_BITS:
                raise _TooMuch(f"makes an integer of {value.bit_length()} bits, expected at most {_MAX_BITS}")
        elif isinstance(value, list | tuple | dict):
            weight, _ = self.weigh(value)
            self._count(weight if fresh else _SLOT * len(value))
        return value

    def take_inputs(self, values: dict[str, Any]) -> None:
        """Weigh what is given to the template; it does not change while the template runs."""
        for name, value in values.items():
            try:
                self.weigh(value, remember=self._inputs)
            except _TooMuch:
                raise InvalidArgument(f"chat template: {name} holds too much, expected less than 16 MB") from None

    def listed(self, items: Iterable[Any]) -> list[Any]:
        """The items as a list, not longer than one may be."""
        most = _MAX_WEIGHT // _VALUE
        found = list(itertools.islice(items, most + 1))
        if len(found) > most:
            raise _TooMuch(f"makes a list of more than {most} items, expected fewer")
        return found

    def joined(self, pieces: Iterable[str], separator: str = "") -> str:
        total, parts = 0, []
        for piece in pieces:
            total += len(piece) + (len(separator) if parts else 0)
            self.room(total)
            parts.append(piece)
            if not len(parts) % 1024:
                _Budget.now()
        self._count(total)
        return separator.join(parts)

    def _count(self, characters: int) -> None:
        self._produced += characters
        if self._produced > _MAX_PRODUCED:
            raise _TooMuch(f"makes more than {_MAX_PRODUCED} characters on the way, expected fewer")

    def weigh(self, value: Any, depth: int = 0, remember: dict[int, tuple[int, int]] | None = None) -> tuple[int, int]:
        """Weight of a value with all it holds, counted as often as it is held, and how deep it is nested."""
        if isinstance(value, str):
            return _VALUE + len(value), 0
        if not isinstance(value, list | tuple | dict):
            return _VALUE, 0
        known = self._inputs.get(id(value)) or (self._recent.get(id(value)) or (None,))[1:]
        if known:
            weight, below = known
        else:
            _Budget.now()
            weight, below = _VALUE, 0
            for item in itertools.chain(value, value.values()) if isinstance(value, dict) else value:
                if depth + below > _MAX_NESTING:
                    break
                more, deep = self.weigh(item, depth + 1, remember)
                weight, below = weight + more, max(below, deep + 1)
                _check_weight(weight)
            if remember is None:
                self._remember(value, weight, below)
            else:
                remember[id(value)] = weight, below
        if depth + below > _MAX_NESTING:
            raise _TooMuch(f"nests data deeper than {_MAX_NESTING} levels, expected less")
        return weight, below

    def add_lists(self, left: Any, right: Any) -> Any:
        """The sum of two lists, weighed by what they weigh, so that a list can grow step by step."""
        (weight, below), (more, deep) = self.weigh(left), self.weigh(right)
        _check_weight(weight + more)
        total = left + right
        self._remember(total, weight + more - _VALUE, max(below, deep))
        return total

    def _remember(self, value: Any, weight: int, below: int) -> None:
        if len(self._recent) >= 256:
            del self._recent[next(iter(self._recent))]
        self._recent[id(value)] = value, weight, below


def _check_weight(weight: int) -> None:
    if weight > _MAX_WEIGHT:
        raise _TooMuch("makes lists or dicts that hold too much, expected less")


# What a template may do

_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (
        str,
        frozenset(
            "capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii "
            "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower "
            "lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split "
            "splitlines startswith strip swapcase title upper zfill".split()
        ),
    ),
    (dict, frozenset("copy fromkeys get items keys values".split())),
    (list, frozenset("copy count index".split())),
    (tuple, frozenset("count index grouper list".split())),  # the last two are those of the groupby filter
    (float, frozenset(["is_integer"])),
)
_RUNTIME = (  # Jinja's own objects, whose public attributes are made for templates
    jinja2.runtime.LoopContext,
    jinja2.runtime.Macro,
    jinja2.runtime.BlockReference,
    jinja2.runtime.TemplateReference,
    jinja2.utils.Namespace,
    jinja2.utils.Cycler,
    jinja2.utils.Joiner,
)
# The sandbox cannot bound what these do, and chat templates do not use them.
_LEFT_OUT = ("pprint", "random", "striptags", "urlize", "xmlattr")
_SLOW = ("title", "urlencode", "wordcount", "wordwrap")  # filters with a loop in Python over the words of a text


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, but without names that Python gives a meaning, and without writing out what it holds."""

    def __init__(*args: Any, **values: Any) -> None:
        self, args = args[0], args[1:]
        values = dict(*args, **values)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace has the name {name!r:.40}, expected one without _ in front")


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    """str.format with a limit on each field."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        budget = _Budget.now()
        budget.room(max(map(int, re.findall(r"\d{1,18}", format_spec)), default=0))
        return budget.check(super().format_field(value, format_spec))

    def vformat(self, format_string: str, args: Any, kwargs: Any) -> Any:
        # A field is as long as one value, and a value may be used by many fields.
        budget = _Budget.now()
        values = [*args, *(kwargs.values() if isinstance(kwargs, Mapping) else ())]
        weight = max((budget.weigh(value)[0] for value in values), default=0)
        budget.room(len(format_string) + format_string.count("{") * max(0, weight - _VALUE))
        return super().vformat(format_string, args, kwargs)


class _MarkupFormatter(_Formatter, jinja2.sandbox.SandboxedEscapeFormatter):
    """The same for text that escapes what it is combined with."""


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what an assistant wrote, for training; here it is a block like any other."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Attributes, calls and operators under the budget; filters as Jinja has them."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        for kind, names in _METHODS:
            if isinstance(obj, kind):
                return attr in names
        return isinstance(obj, _RUNTIME)

    def is_safe_callable(self, obj: Any) -> bool:
        if isinstance(obj, type):
            return obj in (_Namespace, jinja2.utils.Cycler, jinja2.utils.Joiner)
        return super().is_safe_callable(obj)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _Budget.now()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _Budget.now()
        return super().getitem(obj, argument)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """An attribute that is kept from templates: they may ask whether it is defined, and no more."""
        return jinja2.StrictUndefined(
            f"attribute {attribute!r:.40} of a {type(obj).__name__} is kept from templates",
            obj,
            attribute,
            jinja2.exceptions.SecurityError,
        )

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        text = getattr(value, "__self__", None)
        name = getattr(value, "__name__", None)
        if not isinstance(text, str) or name not in ("format", "format_map"):
            return None
        formatter = _MarkupFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)

        def formatted(*args: Any, **kwargs: Any) -> str:
            if name == "format_map":
                (kwargs,), args = args, ()
            return type(text)(_Budget.now().check(formatter.vformat(text, args, kwargs)))

        return formatted

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _Budget.now()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            check = _STRING_METHODS.get(getattr(__obj, "__name__", ""))
            if check is not None:
                named = {
                    name: value for name, value in kwargs.items() if not name.startswith("_")
                }  # others are Jinja's
                args = check(budget, owner, *args, **named) or args
        budget.calls += 1
        if budget.calls > _MAX_NESTING:
            raise _TooMuch(f"nests calls deeper than {_MAX_NESTING} levels, expected fewer")
        try:
            return budget.check(super().call(__context, __obj, *args, **kwargs), fresh=isinstance(owner, str))
        finally:
            budget.calls -= 1

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _Budget.now()
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            budget.room(len(left) + len(right))
        elif operator == "+" and isinstance(left, list) and isinstance(right, list):
            return budget.check(budget.add_lists(left, right))
        elif operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, str | list | tuple) and isinstance(times, int):
                    budget.room(max(0, times) * len(items) * (1 if isinstance(items, str) else _VALUE // 4))
        elif operator == "%" and isinstance(left, str):
            _check_percent(budget, left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(0, right)
            if abs(left) > 1 and bits > _MAX_BITS:
                raise _TooMuch(f"makes an integer of about {bits} bits, expected at most {_MAX_BITS}")
        return budget.check(super().call_binop(context, operator, left, right))


class _Environment(_Sandbox):
    """The sandbox in which templates run: filters under the budget too, and code that counts its loops."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed while compiling, where no budget runs
            finalize=_finalized,
            extensions=[jinja2.ext.loopcontrols, _Generation],
        )
        plain = _Sandbox()
        self.filters = {name: _guarded_filter(plain, name) for name in plain.filters if name not in _LEFT_OUT}
        self.filters |= {"join": _join, "list": _list, "sum": _sum, "tojson": _tojson}
        # names that no template can write, for what the code calls by itself
        self.filters |= {"()": _made, "~": _concatenated}
        self.tests = {name: _guarded_test(plain, name) for name in plain.tests}
        self.globals = {
            "range": jinja2.sandbox.safe_range,
            "dict": _dict,
            "namespace": _Namespace,
            "cycler": jinja2.utils.Cycler,
            "joiner": jinja2.utils.Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def tick(self) -> str:
        _Budget.now()
        return ""

    def concat(self, pieces: Iterable[str]) -> str:
        return _Budget.now().joined(pieces)

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Counting().visit(source), *args, **kwargs)


@functools.cache
def _environment() -> _Environment:
    return _Environment()


class _Counting(jinja2.visitor.NodeTransformer):
    """Puts a check of the budget into each round of a loop and around each literal, slice and concatenation."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        tick = jinja2.nodes.EnvironmentAttribute("tick")
        call = jinja2.nodes.Call(tick, [], [], None, None, lineno=node.lineno)
        node.body.insert(0, jinja2.nodes.ExprStmt(call, lineno=node.lineno))
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(jinja2.nodes.Tuple(node.nodes, "load", lineno=node.lineno), "~")

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:
        return _filtered(self.generic_visit(node), "()")

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:
        return _filtered(self.generic_visit(node), "()")

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "()") if node.ctx == "load" else node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "()") if isinstance(node.arg, jinja2.nodes.Slice) else node

    def _refuse(self, node: jinja2.nodes.Node) -> jinja2.nodes.Node:
        name = type(node).__name__.lower()
        raise jinja2.TemplateSyntaxError(f"{name} is used, expected a template in one file", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refuse


def _filtered(node: Any, name: str) -> jinja2.nodes.Node:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _takes_parts(template: jinja2.nodes.Template) -> bool:
    """Whether a template goes through the parts of a message's content: whether it loops over something called so."""

    def is_content(node: Any) -> bool:
        while isinstance(node, jinja2.nodes.Filter):
            node = node.node
        if isinstance(node, jinja2.nodes.Name):
            return node.name == "content" or node.name in renamed
        name = node.attr if isinstance(node, jinja2.nodes.Getattr) else None
        if isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Const):
            name = node.arg.value
        return name == "content"

    renamed: set[str] = set()
    for assign in template.find_all(jinja2.nodes.Assign):
        if isinstance(assign.target, jinja2.nodes.Name) and is_content(assign.node):
            renamed.add(assign.target.name)
    return any(is_content(loop.iter) for loop in template.find_all(jinja2.nodes.For))


# Functions and filters


@jinja2.pass_context
def _finalized(_context: Any, value: Any) -> Any:
    _Budget.now()
    return value


def _raise_exception(message: Any = "") -> None:
    raise _Raised(str(message)[:2000])


def _strftime_now(format: str) -> str:
    if len(format) > 200:
        raise _TooMuch(f"asks for a date with a format of {len(format)} characters, expected at most 200")
    return datetime.now().strftime(format)


def _dict(*args: Any, **values: Any) -> dict[Any, Any]:
    return dict(*args, **values)


@jinja2.pass_context
def _made(_context: Any, value: Any) -> Any:
    return _Budget.now().check(value)


@jinja2.pass_context
def _concatenated(_context: Any, values: tuple[Any, ...]) -> str:
    return _Budget.now().joined(map(str, values))


@jinja2.pass_context
def _list(_context: Any, value: Any) -> list[Any]:
    budget = _Budget.now()
    return budget.check(budget.listed(value))


@jinja2.pass_context
def _join(context: Any, value: Any, d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = context.environment.call_filter("map", value, (), {"attribute": attribute}, context)
    return _Budget.now().joined(map(str, value), str(d))


@jinja2.pass_context
def _sum(context: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    if attribute is not None:
        iterable = context.environment.call_filter("map", iterable, (), {"attribute": attribute}, context)
    for item in iterable:
        start = context.environment.call_binop(context, "+", start, item)
    return start


@jinja2.pass_context
def _tojson(
    _context: Any,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, without HTML escapes."""
    budget = _Budget.now()
    if indent is not None:
        budget.room((len(indent) if isinstance(indent, str) else indent) * _MAX_NESTING)
    if separators is not None:
        separators = tuple(separators)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return budget.joined(encoder.iterencode(value))


def _guarded_filter(plain: _Sandbox, name: str) -> Callable[..., Any]:
    """A filter of Jinja's that checks its budget before and its result after."""
    check = _FILTERS.get(name)

    @jinja2.pass_context
    def guarded(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _Budget.now()
        if name in _SLOW and isinstance(value, str):
            budget.room(8 * len(value))
        if check is not None:
            check(budget, value, *args, **kwargs)
        return budget.check(plain.call_filter(name, value, args, kwargs, context))

    return guarded


def _guarded_test(plain: _Sandbox, name: str) -> Callable[..., Any]:
    @jinja2.pass_context
    def guarded(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        _Budget.now()
        return plain.call_test(name, value, args, kwargs, context)

    return guarded


# Checks of the operations that can make much out of little. They take the arguments of what they check.


def _check_percent(budget: _Budget, text: str, values: Any) -> None:
    """Refuse `text % values` if it may be too long: a field has its width, and a named value may be used often."""
    fields = re.findall(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?", text)
    sizes = [size for field in fields for size in field if size]
    if "*" in sizes:
        raise _TooMuch("formats with a width given by *, expected a number")
    weight, _ = budget.weigh(values)
    many = len(fields) if isinstance(values, dict) else 1
    budget.room(len(text) + sum(int(size[:18]) for size in sizes) + many * max(0, weight - _VALUE))


def _check_width(budget: _Budget, _text: Any, width: int = 80, *_args: Any) -> None:
    budget.room(width)


def _check_tabs(budget: _Budget, text: str, tabsize: int = 8) -> None:
    budget.room(len(text) + text.count("\t") * max(0, tabsize))


def _check_replace(budget: _Budget, text: Any, old: Any, new: Any, count: Any = None) -> None:
    text, old, new = str(text), str(old), str(new)
    budget.room(len(text) + text.count(old) * max(0, len(new) - len(old)))


def _check_split(budget: _Budget, text: str, sep: str | None = None, *_args: Any, **_kwargs: Any) -> None:
    if sep:
        budget.room(_VALUE // 4 * text.count(sep))


def _check_join(budget: _Budget, separator: str, items: Iterable[Any]) -> tuple[list[Any]]:
    found = budget.listed(items)
    budget.room(len(separator) * len(found) + sum(len(item) for item in found if isinstance(item, str)))
    return (found,)


def _check_indent(budget: _Budget, text: Any, width: int | str = 4, *_args: Any, **_kwargs: Any) -> None:
    each = len(width) if isinstance(width, str) else width
    budget.room(len(str(text)) + each * (str(text).count("\n") + 2))


def _check_count(budget: _Budget, _value: Any, count: int, *_args: Any, **_kwargs: Any) -> None:
    budget.room(_VALUE * count)


def _check_precision(_budget: _Budget, _value: Any, precision: int = 0, *_args: Any, **_kwargs: Any) -> None:
    if abs(precision) > 300:
        raise _TooMuch(f"rounds to {precision} digits, expected at most 300")


def _check_wrap(
    budget: _Budget, text: Any, width: int = 79, long: bool = True, wrapstring: Any = None, *_args: Any, **_kwargs: Any
) -> None:
    budget.room(len(str(text)) * (1 + len(wrapstring or "")))


def _check_format(budget: _Budget, text: Any, *args: Any, **kwargs: Any) -> None:
    _check_percent(budget, str(text), kwargs or args)


_STRING_METHODS: dict[str, Callable[..., Any]] = {
    "center": _check_width,
    "ljust": _check_width,
    "rjust": _check_width,
    "zfill": _check_width,
    "expandtabs": _check_tabs,
    "replace": _check_replace,
    "split": _check_split,
    "rsplit": _check_split,
    "join": _check_join,
}
_FILTERS: dict[str, Callable[..., Any]] = {
    "batch": _check_count,
    "center": _check_width,
    "format": _check_format,
    "indent": _check_indent,
    "replace": _check_replace,
    "round": _check_precision,
    "slice": _check_count,
    "wordwrap": _check_wrap,
}
