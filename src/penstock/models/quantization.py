"""The formats that a config.json without weights implies: those of its quantization table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.errors import CheckpointError
from penstock.models.config import Fields
from penstock.quant import GROUP_SIZES, MODES, Format
from penstock.weights.checkpoint import quantization_table
from penstock.weights.files import short

_PREFIXES = ("", "model.", "language_model.model.", "language_model.", "model.language_model.")
_ROUTER = Format(8, 64)


class FormatTable:
    """Formats by path (without the family's prefix): what a table says of it, else its general format; 8 bits for
    routers where a table names nothing by path. `quantized`: whether there is a table at all.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        _, table = quantization_table(dict(config))
        self.quantized = table is not None
        fields = Fields(table or {}, "config.json: quantization")
        if (method := fields.values.get("quant_method")) is not None:
            raise CheckpointError(f"config.json: quant_method is {short(method)}, expected MLX's quantization")
        self.general = _read(fields)
        self._own: dict[str, Format | None] = {}
        for path, value in fields.values.items():
            if isinstance(value, dict):
                self._own[path] = _read(Fields(value, f"config.json: quantization of {path}"))
            elif isinstance(value, bool):
                self._own[path] = self.general if value else None

    @property
    def unit(self) -> int:
        """Columns at whose multiples a matrix of any of the formats can be cut."""
        return math.lcm(*(format.unit for format in (self.general, *self._own.values()) if format is not None))

    def format(self, path: str, columns: int, router: bool = False) -> Format | None:
        """The format of a matrix with so many columns; None: dense. Where groups are too wide they are halved."""
        named = [prefix + path for prefix in _PREFIXES if prefix + path in self._own]
        if named:
            format = self._own[named[0]]
        elif router and not self._own:
            format = self.general._replace(bits=_ROUTER.bits) if self.general.mode == "affine" else _ROUTER
        else:
            format = self.general
        if format is None or columns % format.unit == 0:
            return format
        sizes = [size for size in GROUP_SIZES if size < format.group_size and columns % size == 0]
        return format._replace(group_size=max(sizes)) if format.mode == "affine" and sizes else None


def _read(table: Fields) -> Format:
    mode = table.choice("mode", tuple(MODES), "affine")
    known = MODES[mode]
    bits = table.choice("bits", known.bits, known.default_bits)
    return Format(bits, table.choice("group_size", known.group_sizes, known.default_group_size), mode)
