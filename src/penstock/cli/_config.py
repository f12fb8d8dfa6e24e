"""--config FILE: options of a verb from a TOML file, below those of the command line and of variables."""

from __future__ import annotations

import difflib
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import typer

from penstock.cli._foreign import UsageError
from penstock.errors import InvalidArgument
from penstock.settings import is_given

_SECRET = "api_key"


def read_config(ctx: typer.Context, path: str | None) -> str | None:
    """Make the options in a file the defaults of a verb, but for those that a variable sets; the model that it names.

    Raises InvalidArgument for a file that cannot be read, is no TOML, or holds a key and can be read by others, and
    UsageError for a key or a kind of value that is no option's.
    """
    if path is None:
        return None
    text, mode = _read(path)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"--config: {path}: no valid TOML: {error}") from None
    known = _options(ctx)
    found: dict[str, Any] = {}
    for key, value in table.items():
        option = known.get(key.replace("_", "-"))
        if option is None:
            close = difflib.get_close_matches(key, list(known), n=1)
            expected = f"did you mean {close[0]}?" if close else "expected options of the command line without --"
            raise UsageError(f"--config: {path}: {key!r} is no option, {expected}")
        if option.name in found:
            raise UsageError(f"--config: {path}: {key!r} says again what another key says")
        found[option.name] = _as_given(f"--config: {path}: {key}", option, value)
    if _SECRET in found and mode & 0o007:
        raise InvalidArgument(
            f"--config: {path}: holds a key and has the mode {mode:03o}, expected none for others: chmod 600 {path}"
        )
    model = found.pop("model", None)
    ctx.default_map = {name: value for name, value in found.items() if not is_given(name)}
    return model


def _read(path: str) -> tuple[str, int]:
    """The text of a file, and its rights when it was read."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            return file.read(), stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except OSError as error:
        raise InvalidArgument(f"--config: {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"--config: {path}: is not UTF-8") from None


def _options(ctx: typer.Context) -> dict[str, Any]:
    """Parameters of the verb by their long names, without those of other programs that are only remarked on."""
    return {
        spelling.removeprefix("--"): parameter
        for parameter in ctx.command.params
        for spelling in parameter.opts
        if spelling.startswith("--")
        and not str(parameter.name).startswith("foreign_")
        and spelling not in ("--config", "--help")
    }


def _as_given(where: str, option: Any, value: Any) -> Any:
    """A value as a command line would have it: the parser of the option looks at it as at any other."""
    if option.is_flag:
        if isinstance(value, bool):
            return value
        expected = "true or false"
    elif option.multiple:
        several = value if isinstance(value, list) else [value]
        if all(isinstance(one, str) for one in several):
            return several
        expected = "a text or a list of texts"
    else:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        expected = "a text or a number"
    raise UsageError(f"{where}: is a {type(value).__name__}, expected {expected}")
