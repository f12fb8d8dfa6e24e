"""Compiling and rendering chat templates, in the child process that `penstock.engine.template` keeps for it.

A template comes with the model and is not trusted. It runs in Jinja's immutable sandbox, and the child's limits stop
what takes too much time or memory. This module imports little, so that the child starts quickly, and all of it at once:
the child opens no files.
"""

import codecs
import functools
import json
import resource
import signal
import textwrap  # noqa: F401 (for Jinja's wordwrap)
import time
import traceback
import unicodedata  # noqa: F401 (for \N{...} in a template)
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.debug  # for errors in Jinja's syntax
from jinja2 import TemplateRuntimeError, TemplateSyntaxError, ext, nodes, sandbox, utils
from jinja2.exceptions import SecurityError

time.tzset()  # reads the zone's file, for strftime_now
codecs.lookup("unicode_escape")  # of Jinja's string literals


def answer(data: bytes) -> bytes:
    """Compile and render: a line of JSON with the arguments of `_answer`, then one with the template's values.

    What comes back is a JSON list of two strings: "text" and the text; "refused" and the template's own words;
    "invalid" and where and why it fails with these values; "broken" and the same with any. Raises MemoryError.
    """
    arguments, _, values = data.decode("utf-8", "surrogatepass").partition("\n")
    found = _answer(json.loads(values), **json.loads(arguments))
    return json.dumps(found, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _answer(values: dict[str, Any], source: str, seconds: float, characters: int, spared: int) -> list[str]:
    """spared: bytes of the child's memory that are not for this call. Without values the template is only compiled."""

    def stop(*_: object) -> None:
        raise _TooLong(f"takes longer than {seconds:g} s, expected a template that ends")

    signal.signal(signal.SIGALRM, stop)  # runs between two instructions; the parent ends what does not come to one
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    template = None
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            if most != resource.RLIM_INFINITY:
                resource.setrlimit(resource.RLIMIT_AS, (most - spared, most))
            template, takes_parts = _compiled(source)
            return ["text", _rendered(template, takes_parts, values, characters) if values else ""]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except TemplateSyntaxError as error:
        return ["broken", f", line {error.lineno}: {error.message}"]
    except BaseException as error:  # _TooLong, and whatever a template's operations can raise
        if type(error) is jinja2.TemplateError:
            return ["refused", " ".join(str(error).split())]
        if template is None:
            return ["broken", f" cannot be compiled: {_described(error)}"]
        if isinstance(error, MemoryError):
            raise
        deep = isinstance(error, RecursionError)
        text = "nests calls or data too deeply, expected fewer levels" if deep else _described(error)
        kind = "broken" if isinstance(error, SecurityError) else "invalid"
        return [kind, f"{_line(error, template)}: {text}"]


def _described(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    if isinstance(error, jinja2.TemplateError | _TooLong):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _line(error: BaseException, template: jinja2.Template) -> str:
    at = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    return f", line {template.get_corresponding_lineno(at[-1])}" if at else ""


class _TooLong(BaseException):
    """The time is over; no Exception, so that nothing on the way catches it."""


@functools.lru_cache(16)
def _compiled(source: str) -> tuple[jinja2.Template, bool]:
    """A template, and whether it goes through the parts of a message's content. Raises TemplateSyntaxError and more."""
    tree = _SANDBOX.parse(source)
    for node in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        name = type(node).__name__.lower()
        raise TemplateSyntaxError(f"{name} is used, expected a template in one file", node.lineno)
    for node in tree.find_all((nodes.Keyword, nodes.NSRef)):
        name = node.key if isinstance(node, nodes.Keyword) else node.attr
        if name.startswith("__"):
            raise TemplateSyntaxError(f"a value is named {name:.40}, expected one without __ in front", node.lineno)
    return _SANDBOX.from_string(source), _takes_parts(tree)


def _takes_parts(template: nodes.Template) -> bool:
    """Whether a template loops over something called content."""

    def is_content(node: Any) -> bool:
        while isinstance(node, nodes.Filter):
            node = node.node
        if isinstance(node, nodes.Name):
            return node.name in names
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Getattr) and node.attr == "content"

    names = {"content"}
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    return any(is_content(loop.iter) for loop in template.find_all(nodes.For))


def _rendered(template: jinja2.Template, takes_parts: bool, values: dict[str, Any], characters: int) -> str:
    """The text. Content given as a list of text parts is joined if the template takes strings only."""
    for message in values["messages"]:
        if not takes_parts and isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])
    _SANDBOX.characters = characters
    return _SANDBOX.concat(template.root_render_func(template.new_context(values)))


# What a template may do

_BYTES = ("encode", "to_bytes", "from_bytes", "fromhex")  # methods for what is no JSON data
_LEFT_OUT = ("pprint", "random", "striptags", "urlize", "xmlattr")  # filters for HTML and for people who debug


class _Sandbox(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with the settings, functions and filters that transformers gives templates."""

    characters = 0  # that a template may write

    def __init__(self) -> None:
        # Nothing is computed while compiling: a value that finalize gets at run time is no constant.
        finalize = jinja2.pass_context(lambda _, value: value)
        extensions = [ext.loopcontrols, _Generation]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=finalize, extensions=extensions
        )
        self.filters = {name: made for name, made in self.filters.items() if name not in _LEFT_OUT}
        self.filters["tojson"] = _tojson
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) is utils.Namespace:  # before any isinstance, which each take its __getattribute__
            return not attr.startswith("_")
        return attr not in _BYTES and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """An attribute that is kept from templates: they may ask whether it is defined, and no more."""
        hint = f"attribute {attribute!r:.40} of a {type(obj).__name__} is kept from templates"
        return jinja2.StrictUndefined(hint, obj, attribute, SecurityError)

    def concat(self, pieces: Iterable[str]) -> str:
        """What the template, a macro or a block writes, if it is not too long."""
        total, parts = 0, []
        for piece in pieces:
            total += len(piece)
            if total > self.characters:
                raise TemplateRuntimeError(f"makes a text of {total} characters, expected at most {self.characters}")
            parts.append(piece)
        return "".join(parts)


class _Generation(ext.Extension):
    """{% generation %} marks what an assistant wrote, for training; here it is a block like any other."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: Any = "") -> None:
    raise jinja2.TemplateError(str(message)[:2000])


def _strftime_now(format: str) -> str:
    if len(format) > 200:
        raise TemplateRuntimeError(f"asks for a date by {len(format)} characters, expected at most 200")
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_SANDBOX = _Sandbox()
