"""Which matrices have how many bits: one format for all, mlx-lm's mixed recipes, or a JSON file of patterns.

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
from penstock.quant import BITS, GROUP_SIZES
from penstock.weights.files import read_json, short

MIXED = {"mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6)}
BITS_DEFAULT, GROUP_DEFAULT = 4, 64

_ROUTER = (8, 64)  # bits and group size of routers, whatever the others have
_KEYS = ("bits", "group_size")


@dataclass(frozen=True)
class Recipe:
    """bits and group_size in general; `mixed` a name of MIXED; `patterns` of a JSON file, the first that fits wins."""

    bits: int = BITS_DEFAULT
    group_size: int = GROUP_DEFAULT
    mixed: str | None = None
    patterns: Mapping[str, tuple[int, int] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _checked("q-bits", self.bits, BITS)
        _checked("q-group-size", self.group_size, GROUP_SIZES)

    def format(self, path: str, shape: tuple[int, ...], family: AnyFamily, layers: int) -> tuple[int, int] | None:
        """Bits and group size of the matrix of a module, None if it stays dense."""
        if len(shape) < 2 or path.endswith(family.unquantized) or shape[-1] % self.group_size:
            return None
        if self.mixed is not None:
            low, high = MIXED[self.mixed]
            return (high if _needs_more(path, family.more_bits, layers) else low), self.group_size
        pattern = next((p for p in self.patterns if fnmatch.fnmatchcase(path, p)), None)
        if pattern is not None:
            found = self.patterns[pattern]
            return None if found is None or shape[-1] % found[1] else found
        if family.role_of(path) == "router":
            return _ROUTER[0], self.group_size if shape[-1] % _ROUTER[1] else _ROUTER[1]
        return self.bits, self.group_size

    def unmatched(self, paths: list[str]) -> list[str]:
        """Patterns that fit none of the paths."""
        return [p for p in self.patterns if not any(fnmatch.fnmatchcase(path, p) for path in paths)]

    def table(self, formats: Mapping[str, tuple[int, int]], family: AnyFamily) -> dict[str, Any]:
        """What config.json says about the quantization of these modules."""
        general = {"group_size": self.group_size, "bits": self.bits, "mode": "affine"}
        made: dict[str, Any] = dict(general)
        for path, (bits, group_size) in formats.items():
            if self.mixed is not None or self.patterns:
                entry = {"group_size": group_size, "bits": bits, "mode": "affine"}
                if self.mixed is not None or entry != general:
                    made[path] = entry
            elif family.role_of(path) == "router":
                made[path] = {"group_size": group_size, "bits": bits}
        return made


def table_of(formats: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]) -> dict[str, Any]:
    """The table for modules that keep the formats they came with; the general one is what most weights have."""
    weights: dict[tuple[int, int], int] = {}
    for path, format in formats.items():
        weights[format] = weights.get(format, 0) + sizes[path]
    general = max(weights, key=lambda format: weights[format])
    made: dict[str, Any] = {"group_size": general[1], "bits": general[0], "mode": "affine"}
    others = {path: format for path, format in formats.items() if format != general}
    return made | {path: {"group_size": gs, "bits": bits, "mode": "affine"} for path, (bits, gs) in others.items()}


def read_recipe(name: str, bits: int | None, group_size: int | None) -> Recipe:
    """The recipe of a name of MIXED or of a JSON file {pattern: {"bits": …, "group_size": …} | bits | null}.

    A pattern is that of a shell (`*.mlp.switch_mlp.*`) and is held against the path of a module; null keeps it dense.
    What fits no pattern has the general format, routers 8 bits. Raises InvalidArgument for another name and for a file
    that says something else, CheckpointError for one that cannot be read.
    """
    bits, group_size = bits or BITS_DEFAULT, group_size or GROUP_DEFAULT
    if name in MIXED:
        return Recipe(bits, group_size, mixed=name)
    path = Path(name).expanduser()
    if not name.endswith(".json"):
        expected = f"one of {', '.join(MIXED)}, or a .json file"
        raise InvalidArgument(f"quant-predicate is {short(name)}, expected {expected}")
    table = read_json(path)
    if not isinstance(table, dict) or not table:
        raise InvalidArgument(f"{path}: is {short(table)}, expected an object of patterns")
    return Recipe(bits, group_size, patterns={p: _entry(path, p, v, bits, group_size) for p, v in table.items()})


def _entry(path: Path, pattern: str, value: Any, bits: int, group_size: int) -> tuple[int, int] | None:
    where = f"{path}: {short(pattern)}"
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"bits": value}
    if not isinstance(value, dict) or not value or value.keys() - {*_KEYS}:
        raise InvalidArgument(f"{where} is {short(value)}, expected bits, an object of {' and '.join(_KEYS)}, or null")
    chosen = _checked(f"{where}: bits", value.get("bits", bits), BITS)
    return chosen, _checked(f"{where}: group_size", value.get("group_size", group_size), GROUP_SIZES)


def _checked(what: str, value: Any, allowed: tuple[int, ...]) -> int:
    if type(value) is not int or value not in allowed:
        raise InvalidArgument(f"{what} is {short(value)}, expected one of {', '.join(map(str, allowed))}")
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
