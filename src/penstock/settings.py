"""Every setting of penstock and its PENSTOCK_<NAME> variable. Nothing else reads PENSTOCK_* from the environment."""

import difflib
import os
import warnings
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from penstock.errors import InvalidArgument

PREFIX = "PENSTOCK_"

_told: set[str] = set()  # variables that were warned of: once in a process is enough

_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _setting(default: Any, help: str, at_least: int | None = None, secret: bool = False) -> Any:
    return field(default=default, repr=not secret, metadata={"help": help, "at_least": at_least, "secret": secret})


@dataclass(frozen=True)
class Settings:
    """The table: name, type, default, meaning. A new setting is one line; its type int, float, str, bool or Literal."""

    threads: int | None = _setting(None, "threads of the CPU kernels; all physical cores if unset", at_least=1)
    cache_dir: str | None = _setting(None, "folder of compiled kernels, Triton's too; the user's cache folder if unset")
    device: Literal["auto", "cpu", "cuda", "reference"] = _setting("auto", "where models run")
    state_dtype: Literal["auto", "float32", "bfloat16"] = _setting("auto", "numbers of recurrent states; auto: float32")
    debug: bool = _setting(False, "show the traceback of an error on the command line")
    engine_process: bool | None = _setting(None, "whether `penstock serve` runs the model in a process of its own")
    rank_backend: Literal["auto", "gloo", "nccl"] = _setting("auto", "how GPU ranks of a model exchange arrays")
    data_parallel_size: int = _setting(1, "engines of one model that `penstock serve` runs side by side", at_least=1)
    plugins: bool = _setting(True, "whether families of models are looked for in installed packages")
    api_key: str | None = _setting(None, "key that clients of `penstock serve` have to send", secret=True)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "Settings":
        """Defaults, overridden by PENSTOCK_<NAME>; an empty variable counts as unset.

        A name that is no setting is warned of, once. Raises InvalidArgument for a value that its setting cannot take.
        """
        known = {variable(f): f for f in fields(cls)}
        types = get_type_hints(cls)
        values = {}
        for name, text in environ.items():
            if not name.startswith(PREFIX):
                continue
            if name not in known:
                _warn_of(name, list(known))
            elif text:
                setting = known[name]
                values[setting.name] = _parsed(name, text, types[setting.name], setting.metadata["at_least"])
        return cls(**values)


def shown(settings: Settings) -> dict[str, Any]:
    """All values by name, for people to read: of a secret only whether it is set."""
    values = {f.name: getattr(settings, f.name) for f in fields(settings)}
    return values | {f.name: "(set)" for f in fields(settings) if f.metadata["secret"] and values[f.name] is not None}


def is_blank(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the variable of a setting is there with nothing but white space in it."""
    text = environ.get(PREFIX + name.upper())
    return text is not None and not text.strip()


def is_given(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the variable of a setting says something; False for a name that is no setting."""
    return name in {f.name for f in fields(Settings)} and bool(environ.get(PREFIX + name.upper()))


def without_secrets(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for processes that need no keys."""
    secret = {variable(f) for f in fields(Settings) if f.metadata["secret"]}
    return {name: text for name, text in environ.items() if name not in secret}


def variable(setting: Field[Any]) -> str:
    """The environment variable of a field of Settings."""
    return PREFIX + setting.name.upper()


def _warn_of(name: str, known: list[str]) -> None:
    """It may be meant for another program or another version, so it is no error; it may be a typing mistake too."""
    if name in _told:
        return
    _told.add(name)
    close = difflib.get_close_matches(name.removeprefix(PREFIX), [each.removeprefix(PREFIX) for each in known], n=1)
    expected = f"did you mean {PREFIX}{close[0]}?" if close else f"expected one of {', '.join(known)}"
    warnings.warn(f"{name} is not a setting and is ignored, {expected}", stacklevel=3)


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
