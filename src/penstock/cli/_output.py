"""How verbs print: tables for a terminal, plain columns for a pipe, JSON for a program."""

import json
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], wrap: Sequence[str], header: bool = True
) -> None:
    """A rich table on a terminal, where only the columns of `wrap` break lines; else one plain line per row."""
    console = Console(highlight=False)
    if not console.is_terminal:
        shown = [columns, *rows] if header else rows
        widths = [max(len(cell) for cell in column) for column in zip(*shown, strict=True)]
        for row in shown:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    bold = "" if console.no_color else "bold"  # NO_COLOR is set: no escape sequence at all
    table = Table(box=box.SIMPLE_HEAD if header else None, show_header=header, header_style=bold)
    table.pad_edge, table.padding = False, (0, 1, 0, 0)
    for name in columns:
        table.add_column(name, no_wrap=name not in wrap, style=bold if name == columns[0] else "")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)
