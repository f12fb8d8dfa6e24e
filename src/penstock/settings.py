"""Every setting of penstock and its PENSTOCK_<NAME> variable. Nothing else reads PENSTOCK_* from the environment."""

import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from penstock.errors import InvalidArgument

PREFIX = "PENSTOCK_"

_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _setting(default: Any, help: str, at_least: int | None = None, secret: bool = False) -> Any:
    return field(default=default, repr=not secret, metadata={"help": help, "at_least": at_least, "secret": secret})


@dataclass(frozen=True)
class Settings:
    """The table: name, type, default, meaning. A new setting is one line; its type int, float, str, bool or Literal."""

    threads: int | None = _setting(None, "threads of the CPU kernels; all physical cores if unset", at_least=1)
    cache_dir: str | None = _setting(None, "folder of compiled kernels, Triton's too; the user's cache folder if unset")
    device: Literal["auto", "cpu", "cuda", "reference"] = _setting("auto", "where models run")
    debug: bool = _setting(False, "show the traceback of an error on the command line")
    api_key: str | None = _setting(None, "key that clients of `penstock serve` have to send", secret=True)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "Settings":
        """Defaults, overridden by PENSTOCK_<NAME>; an empty variable counts as unset.

        Raises InvalidArgument for a name that is no setting and for a value that its setting cannot take.
        """
        known = {variable(f): f for f in fields(cls)}
        types = get_type_hints(cls)
        values = {}
        for name, text in environ.items():
            if not name.startswith(PREFIX):
                continue
            if name not in known:
                raise InvalidArgument(f"{name} is not a setting, expected one of {', '.join(known)}")
            if text:
                setting = known[name]
                values[setting.name] = _parsed(name, text, types[setting.name], setting.metadata["at_least"])
        return cls(**values)


def shown(settings: Settings) -> dict[str, Any]:
    """All values by name, for people to read: of a secret only whether it is set."""
    values = {f.name: getattr(settings, f.name) for f in fields(settings)}
    return values | {f.name: "(set)" for f in fields(settings) if f.metadata["secret"] and values[f.name] is not None}


def variable(setting: Field[Any]) -> str:
    """The environment variable of a field of Settings."""
    return PREFIX + setting.name.upper()


def _parsed(name: str, text: str, kind: Any, at_least: int | None) -> Any:
    if get_origin(kind) is UnionType:  # "int | None": unset is the only way to say None
        kind = next(arm for arm in get_args(kind) if arm is not type(None))
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise InvalidArgument(f"{name} is {text!r}, expected one of {', '.join(get_args(kind))}")
        return text
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise InvalidArgument(f"{name} is {text!r}, expected one of {', '.join(_BOOLS)}")
        return _BOOLS[text.lower()]
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or (at_least is not None and value < at_least):
        limit = "" if at_least is None else f" of at least {at_least}"
        raise InvalidArgument(f"{name} is {text!r}, expected {'an' if kind is int else 'a'} {kind.__name__}{limit}")
    return value
