"""Which matrices have which format: one for all, mlx-lm's mixed recipes, or a JSON file of patterns.

Whatever the recipe, a matrix whose rows are no multiple of the group size stays dense, as do those of which the family
says that mlx-lm cannot quantize them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import InvalidArgument
from penstock.models.family import AnyFamily
from penstock.quant import BITS, GROUP_SIZES, MODES, Format
from penstock.weights.files import read_json, short

MIXED = {"mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6)}

_GENERAL = Format(4, 64)
_ROUTER = Format(8, 64)  # of routers, whatever the others have
_KEYS = ("bits", "group_size")


@dataclass(frozen=True)
class Recipe:
    """The general format; `mixed` a name of MIXED; `patterns` of a JSON file, the first that fits wins."""

    general: Format = _GENERAL
    mixed: str | None = None
    patterns: Mapping[str, Format | None] = field(default_factory=dict)

    def format(self, path: str, shape: tuple[int, ...], family: AnyFamily, layers: int) -> Format | None:
        """The format of the matrix of a module, None if it stays dense."""
        if len(shape) < 2 or path.endswith(family.unquantized) or shape[-1] % self.general.unit:
            return None
        if self.mixed is not None:
            low, high = MIXED[self.mixed]
            return self.general._replace(bits=high if _needs_more(path, family.more_bits, layers) else low)
        pattern = next((p for p in self.patterns if fnmatch.fnmatchcase(path, p)), None)
        if pattern is not None:
            found = self.patterns[pattern]
            return None if found is None or shape[-1] % found.unit else found
        if family.role_of(path) == "router":
            narrow = self.general.group_size if self.general.mode == "affine" else GROUP_SIZES[0]
            return _ROUTER._replace(group_size=narrow) if shape[-1] % _ROUTER.group_size else _ROUTER
        return self.general

    def unmatched(self, paths: list[str]) -> list[str]:
        """Patterns that fit none of the paths."""
        return [p for p in self.patterns if not any(fnmatch.fnmatchcase(path, p) for path in paths)]

    def table(
        self, formats: Mapping[str, Format], family: AnyFamily, kept: Mapping[str, Format] | None = None
    ) -> dict[str, Any]:
        """What config.json says about the quantization of these modules. kept: those that came quantized, all alike;
        their format is the general one then, and all others are listed.
        """
        if kept:
            formats = {path: format for path, format in formats.items() if path not in kept}
        general = _spelled(next(iter(kept.values()))) if kept else _spelled(self.general)
        made: dict[str, Any] = dict(general)
        for path, format in formats.items():
            entry = _spelled(format)
            if kept and family.role_of(path) != "router":
                made[path] = entry
            elif self.mixed is not None or self.patterns:
                if self.mixed is not None or entry != general:
                    made[path] = entry
            elif family.role_of(path) == "router":
                made[path] = {"group_size": format.group_size, "bits": format.bits}
        return made


def _spelled(format: Format) -> dict[str, Any]:
    return {"group_size": format.group_size, "bits": format.bits, "mode": format.mode}


def table_of(formats: Mapping[str, Format], sizes: Mapping[str, int]) -> dict[str, Any]:
    """The table for modules that keep the formats they came with; the general one is what most weights have."""
    weights: dict[Format, int] = {}
    for path, format in formats.items():
        weights[format] = weights.get(format, 0) + sizes[path]
    general = max(weights, key=lambda format: weights[format])
    return _spelled(general) | {path: _spelled(format) for path, format in formats.items() if format != general}


def general_format(bits: int | None, group_size: int | None, mode: str | None) -> Format:
    """The format of options that may be left out. Raises InvalidArgument."""
    mode = "affine" if mode is None else mode
    if mode not in MODES:
        raise InvalidArgument(f"q-mode is {short(mode)}, expected one of {', '.join(MODES)}")
    known = MODES[mode]
    chosen = known.default_bits if bits is None else _checked("q-bits", bits, known.bits, mode)
    size = (
        known.default_group_size
        if group_size is None
        else _checked("q-group-size", group_size, known.group_sizes, mode)
    )
    return Format(chosen, size, mode)


def read_recipe(name: str, bits: int | None, group_size: int | None) -> Recipe:
    """The recipe of a name of MIXED or of a JSON file {pattern: {"bits": …, "group_size": …} | bits | null}.

    A pattern is that of a shell (`*.mlp.switch_mlp.*`) and is held against the path of a module; null keeps it dense.
    What fits no pattern has the general format, routers 8 bits. Raises InvalidArgument for another name and for a file
    that says something else, CheckpointError for one that cannot be read.
    """
    general = general_format(bits, group_size, None)
    if name in MIXED:
        return Recipe(general, mixed=name)
    path = Path(name).expanduser()
    if not name.endswith(".json"):
        expected = f"one of {', '.join(MIXED)}, or a .json file"
        raise InvalidArgument(f"quant-predicate is {short(name)}, expected {expected}")
    table = read_json(path)
    if not isinstance(table, dict) or not table:
        raise InvalidArgument(f"{path}: is {short(table)}, expected an object of patterns")
    return Recipe(general, patterns={p: _entry(path, p, v, general) for p, v in table.items()})


def _entry(path: Path, pattern: str, value: Any, general: Format) -> Format | None:
    where = f"{path}: {short(pattern)}"
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"bits": value}
    if not isinstance(value, dict) or not value or value.keys() - {*_KEYS}:
        raise InvalidArgument(f"{where} is {short(value)}, expected bits, an object of {' and '.join(_KEYS)}, or null")
    chosen = _checked(f"{where}: bits", value.get("bits", general.bits), BITS)
    return Format(chosen, _checked(f"{where}: group_size", value.get("group_size", general.group_size), GROUP_SIZES))


def _checked(what: str, value: Any, allowed: tuple[int, ...], mode: str = "affine") -> int:
    if type(value) is not int or value not in allowed:
        choice = f"one of {', '.join(map(str, allowed))}" if allowed[1:] else f"{allowed[0]} in mode {mode}"
        raise InvalidArgument(f"{what} is {short(value)}, expected {choice}")
    return value


def _needs_more(path: str, modules: tuple[str, ...], layers: int) -> bool:
    """mlx-lm's choice: values and the last product of a block in every third layer and in the first and last eighth,
    and the head.
    """
    parts = path.split(".")
    at = 3 if parts[0] == "language_model" else 2
    index = int(parts[at]) if len(parts) > at and parts[at].isdigit() else 0
    outer = index < layers // 8 or index >= 7 * layers // 8 or (index - layers // 8) % 3 == 2
    return "lm_head" in path or (outer and any(module in path for module in modules))
