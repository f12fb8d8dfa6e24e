"""Amounts of memory, as people type them and as messages and tables show them."""

from __future__ import annotations

import re
from fractions import Fraction

from penstock.errors import InvalidArgument

# K, M, G and T count in 1024s, as the memory options of llama.cpp and mlx-lm do, KB to TB in 1000s, as disks are sold
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?|\.[0-9]{1,9})\s*([KMGTkmgt]?(?:[iI]?[bB])?|%)", re.ASCII)

FORMS = "12G, 500M, 50% or bytes (K, M, G, T and KiB … TiB: 1024s; KB … TB: 1000s)"


def amount(nbytes: float) -> str:
    """Bytes in the largest decimal unit that leaves a digit before the point: 14.72 MB, never 0.01 GB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"


def count(number: float) -> str:
    """A number of parameters: 34.66 B, 1.20 M, 5.00 k, 12."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.2f} {unit}"
    return f"{number:.0f}"


def parse_size(text: str, name: str, whole: int | None = None) -> int:
    """Bytes of a size such as 12G (12 · 1024³), 12GB (12 · 1000³), 1.5GiB, 500M, 4096, or 50% of `whole`.

    Raises InvalidArgument, starting with `name`, for anything else, for a share of nothing and for one above 100%.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = found[2].upper() if found is not None else None
    if found is None or (unit != "%" and unit not in _UNITS):
        raise InvalidArgument(f"{name}: is {text[:40]!r}, expected a size such as {FORMS}")
    number = Fraction(found[1])
    if unit != "%":
        return int(number * _UNITS[str(unit)])
    if whole is None:
        raise InvalidArgument(
            f"{name}: is {text[:40]!r}, expected bytes such as 12G: there is nothing to take a share of"
        )
    if number > 100:
        raise InvalidArgument(f"{name}: is {text[:40]!r}, expected at most 100%")
    return int(number * whole / 100)


def spelled(nbytes: float) -> str:
    """Bytes for people, in the units that `parse_size` reads: 1.50 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
