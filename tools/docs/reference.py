"""Pages of the site that are made from the package: the Python API, ops, commands and settings.

Each function returns Markdown. A page of docs/ holds a line `<!-- made from the package: NAME -->`, and the site has
what `MADE[NAME]` returns in its place.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_overloads, get_type_hints

import numpy as np
import typer

import penstock
from penstock.cli.main import program
from penstock.engine.request import Chunk, Completion, Timings, Usage
from penstock.engine.sampling import SamplingParams
from penstock.engine.session import Session, SessionSnapshot
from penstock.models.family import Family
from penstock.ops import REGISTRY
from penstock.ops.array import spec_of
from penstock.ops.op import Op
from penstock.quant import GgufTensor, QuantizedTensor
from penstock.settings import Settings, variable
from tests.ops.cases import by_op

ROOT = Path(__file__).parents[2]
WIDTH = 116  # columns of a docstring's lines in the sources, less their indentation
# the line for readers of the file itself goes with the mark
MARK = re.compile(r"(?:^\*The rest of this page [^\n]*\*\n\n)?^<!-- made from the package: (\w+) -->$", re.MULTILINE)
SPECIAL = re.compile(r"([\\*_<>\[\]|#~$])")


def filled(text: str) -> str:
    """A page with its marks replaced."""
    return MARK.sub(lambda found: MADE[found[1]](), text)


# -- docstrings ------------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Text as Markdown that shows it as it is, code in backticks left alone."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if number % 2 else SPECIAL.sub(r"\\\1", part) for number, part in enumerate(parts))


def prose(text: str | None, width: int = WIDTH, names: Iterable[str] = ()) -> str:
    """A docstring as Markdown: blank lines part paragraphs, indented lines are code, and a line that ends although the
    next word would easily have fitted ends there on the page, too. Other pages are linked, and those of `names` that no
    one can take for a word of the text, since they have an underscore, or a colon, a shape or a dtype behind them, are
    code.
    """
    done: list[str] = []
    code: list[str] = []
    lines = inspect.cleandoc(text or "").splitlines()
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if line.startswith("    "):
            code.append(line)
            if not following.startswith("    "):
                done += ["", "```text", *textwrap.dedent("\n".join(code)).splitlines(), "```", ""]
                code = []
            continue
        meant = following and not following.startswith(" ") and len(line) + len(following.split()[0]) < width - 12
        done.append(escaped(_with_code(line, names)) + ("\\" if line and meant else ""))
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(done).strip())
    return re.sub(r"\bdocs/([\w-]+)\.md\b", r"[docs/\1.md](../\1.md)", text)


def _with_code(line: str, names: Iterable[str]) -> str:
    """A line with names of parameters in backticks, where it has none."""
    for name in names:
        end = r"(?![\w`])" if "_" in name else r"(?=:| \[| (?:int|uint|float|bfloat)\d)"
        line = re.sub(rf"(?<![\w`.'\"]){re.escape(name)}{end}", f"`{name}`", line)
    return line


# -- signatures ------------------------------------------------------------------------------------------------------


def _annotation(value: Any) -> str:
    text = value if isinstance(value, str) else inspect.formatannotation(value)
    return re.sub(r"\b(?:penstock|collections|typing|numpy|pathlib)\.(?:\w+\.)*(?=\w)", "", text)


def _parameter(one: inspect.Parameter) -> str:
    star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    name = star + one.name + ("" if one.annotation is one.empty else f": {_annotation(one.annotation)}")
    if one.default is one.empty:
        return name
    return f"{name}{' = ' if ':' in name else '='}{one.default!r}"


def signature(name: str, of: inspect.Signature) -> str:
    """A call as code, without self: on one line if it fits, else with a line per parameter."""
    parts: list[str] = []
    for one in of.parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.kind is one.KEYWORD_ONLY and "*" not in parts and not any(part.startswith("*") for part in parts):
            parts.append("*")
        parts.append(_parameter(one))
    back = "" if of.return_annotation is of.empty else f" -> {_annotation(of.return_annotation)}"
    line = f"{name}({', '.join(parts)}){back}"
    return line if len(line) <= 96 else "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){back}"])


def _called(name: str, function: Callable[..., Any]) -> str:
    shown = get_overloads(function) or [function]
    return "\n".join(["```python", *(signature(name, inspect.signature(one)) for one in shown), "```"])


def function(name: str, level: int = 3, shown: str | None = None) -> str:
    """A function by its full name, such as penstock.load."""
    module, _, last = name.rpartition(".")
    found = getattr(import_module(module), last)
    said = prose(found.__doc__, names=inspect.signature(found).parameters)
    return f"{'#' * level} {shown or last}\n\n{_called(shown or last, found)}\n\n{said}"


def _default(field: Any) -> str:
    if field.default is not MISSING:
        return f" = {field.default!r}"
    return "" if field.default_factory is MISSING else f" = {field.default_factory()!r}"


def class_of(kind: type, level: int = 3, without: Iterable[str] = ()) -> str:
    """A class: what it says of itself, its fields, and its public methods and properties in the order of the source."""
    said = prose(kind.__doc__) if not (kind.__doc__ or "").startswith(f"{kind.__name__}(") else ""
    parts = [f"{'#' * level} {kind.__name__}", said]
    if is_dataclass(kind):
        lines = [f"{f.name}: {_annotation(f.type)}{_default(f)}" for f in fields(kind) if not f.name.startswith("_")]
        parts.append("\n".join(["```python", *lines, "```"]))
    for name, member in vars(kind).items():
        if name.startswith("_") or name in without:
            continue
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        if isinstance(member, property | cached_property):
            getter = member.fget if isinstance(member, property) else member.func
            assert getter is not None
            back = _annotation(inspect.signature(getter).return_annotation)
            text = prose(member.__doc__)
            parts.append(f"{'#' * (level + 1)} {kind.__name__}.{name}\n\n```python\n{name}: {back}\n```\n\n{text}")
        elif inspect.isfunction(member):
            heading = f"{'#' * (level + 1)} {kind.__name__}.{name}"
            said = prose(member.__doc__, names=inspect.signature(member).parameters)
            parts.append(f"{heading}\n\n{_called(name, member)}\n\n{said}")
    return "\n\n".join(part for part in parts if part)


# -- pages -----------------------------------------------------------------------------------------------------------


def api() -> str:
    """Everything of the package that a program calls, but ops."""
    stats = import_module("penstock.api").Stats
    answers = [class_of(kind, without=("count_draft",)) for kind in (Completion, Usage, Timings, Chunk, SamplingParams)]
    counted = class_of(stats, without=("add_drafts", "about_compiling", "about_drafts", "about_experts"))
    weights = [function("penstock.quantize"), function("penstock.dequantize"), class_of(QuantizedTensor)]
    sections = {
        "Loading": [function("penstock.load"), function("penstock.restore")],
        "A model": [class_of(penstock.LLM, without=("add_timings",)), counted],
        "Answers": answers,
        "Sessions": [class_of(Session), class_of(SessionSnapshot)],
        "Quantized weights": [*weights, class_of(GgufTensor)],
        "Kernels and definitions": [function("penstock.backend")],
        "Families of models": [function("penstock.models.register", shown="models.register"), class_of(Family)],
        "mlx-lm's names": _mlx_lm(),
        "Errors": [_errors()],
    }
    return "\n\n".join(f"## {title}\n\n" + "\n\n".join(parts) for title, parts in sections.items())


def _mlx_lm() -> list[str]:
    module = import_module("penstock.mlx_lm")
    names = [name for name in module.__all__ if inspect.isfunction(getattr(module, name))]
    return [prose(module.__doc__), *(function(f"penstock.mlx_lm.{name}", shown=f"mlx_lm.{name}") for name in names)]


def error_classes() -> list[type]:
    module = import_module("penstock.errors")
    return [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__]


def _errors() -> str:
    rows = []
    for kind in error_classes():
        bases = " and ".join(f"`{base.__name__}`" for base in kind.__bases__)
        rows.append(f"| `{kind.__name__}` | {bases} | {' '.join(prose(kind.__doc__).split())} |")
    head = f"{prose(import_module('penstock.errors').__doc__)} All are in `penstock.errors`."
    return "\n".join([head, "", "| error | is also a | when |", "|---|---|---|", *rows])


def public_ops() -> list[Op]:
    """The ops of `penstock.ops`, by family and name."""
    found = [getattr(penstock.ops, name) for name in penstock.ops.__all__]
    return sorted((one for one in found if isinstance(one, Op)), key=lambda one: (one.family, one.name))


def helpers() -> list[str]:
    """Names of `penstock.ops` that are plain functions of numbers, such as tables for rope."""
    return [name for name in penstock.ops.__all__ if inspect.isfunction(getattr(penstock.ops, name))]


def ops() -> str:
    """Every op by family, behind a table of all of them."""
    found = public_ops()
    assert {one.name for one in found} == set(REGISTRY)
    rows = [f"| [`{one.name}`](#{one.name}) | {one.family} | {_first(one.doc)} |" for one in found]
    parts = ["\n".join(["| op | family | |", "|---|---|---|", *rows])]
    for family in dict.fromkeys(one.family for one in found):
        module = import_module(f"penstock.ops.{family}")
        parts += [f"## {family}", prose(module.__doc__, WIDTH + 4)]
        parts += [_op(one) for one in found if one.family == family]
    parts += ["## Around the ops", *(function(f"penstock.ops.{name}") for name in helpers())]
    return "\n\n".join(parts)


def _first(doc: str) -> str:
    """The first paragraph on one line, as a cell."""
    return " ".join(escaped(doc.partition("\n\n")[0]).split())


def _op(one: Op) -> str:
    written = f"\n\nWrites {', '.join(f'`{name}`' for name in one.writes)}." if one.writes else ""
    called = signature(one.name, one.signature)
    return (
        f"### {one.name}\n\n```python\n{called}\n```\n\n{prose(one.doc, names=one.params)}{written}\n\n{example(one)}"
    )


def example(one: Op) -> str:
    """Shapes of a call that the tests make, and of what comes back."""
    cases = by_op(one.name)
    chosen = next((case for case in cases if case.label == "ragged"), cases[0])
    given = chosen.arguments(chosen.dtypes[0])
    arguments, specs = one.inferred(**given)
    shown = ",\n".join(f"    {name}={_argument(arguments[name])}" for name in given)
    back = ", ".join("–" if spec is None else f"{spec.dtype} {list(spec.shape)}" for spec in specs) or "None"
    return f"```text\n{one.name}(\n{shown},\n) → {back}\n```"


def _argument(value: Any) -> str:
    if isinstance(value, QuantizedTensor):
        return f"{value.bits}-bit {list(value.shape)}"
    if isinstance(value, np.ndarray):
        spec = spec_of(value)
        return f"{spec.dtype} {list(spec.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]"
    return repr(value) if isinstance(value, int | float | str | None) else type(value).__name__


def commands() -> str:
    """What `penstock VERB --help` prints, verb by verb."""
    parts = []
    for name, command in program().commands.items():
        if command.hidden:
            continue
        context = typer.Context(command, info_name=f"penstock {name}", max_content_width=100, terminal_width=100)
        parts.append(f"## {name}\n\n```text\n{command.get_help(context).strip()}\n```")
    return "\n\n".join(parts)


def settings() -> str:
    """Every PENSTOCK_… variable."""
    kinds = get_type_hints(Settings)
    rows = []
    for one in fields(Settings):
        default = "unset" if one.default is None else f"`{one.default}`"
        rows.append(f"| `{variable(one)}` | {_taken(kinds[one.name])} | {default} | {escaped(one.metadata['help'])} |")
    return "\n".join(["| variable | takes | default | meaning |", "|---|---|---|---|", *rows])


def _taken(kind: Any) -> str:
    """What a setting of this type takes, in words."""
    if get_origin(kind) is UnionType:
        kind = next(arm for arm in get_args(kind) if arm is not type(None))
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    return {int: "a number", float: "a number", bool: "`1` or `0`", str: "text"}[kind]


def examples() -> str:
    """The programs of examples/ as they stand."""
    parts = []
    for file in sorted((ROOT / "examples").glob("*.py")):
        parts.append(f"## {file.name}\n\n```python\n{file.read_text().strip()}\n```")
    return "\n\n".join(parts)


MADE: dict[str, Callable[[], str]] = {
    "api": api,
    "ops": ops,
    "commands": commands,
    "settings": settings,
    "examples": examples,
}
