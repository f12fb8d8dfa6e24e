"""How verbs print: tables and bars for a terminal, plain columns for a pipe, JSON for a program."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.errors import InvalidArgument

if TYPE_CHECKING:
    from markupsafe import Markup


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


def css_name(words: str) -> str:
    """Words as the name of a class or a colour in a page."""
    return words.replace(" ", "-")


def css_colours(colours: Mapping[str, tuple[str, str]], which: int) -> str:
    """Colours by name as variables of a page: on light ground (0) or on dark (1)."""
    return "".join(f"--{css_name(name)}:{pair[which]};" for name, pair in colours.items())


def percent(share: float | None, digits: int = 0) -> str:
    return "–" if share is None else f"{share:.{digits}%}"


def script_json(value: Any) -> "Markup":
    """JSON that may stand in a script of a page: nothing in it ends the script."""
    from markupsafe import Markup

    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


def render(page: str, **data: Any) -> str:
    """A page of the folder `pages`, which needs nothing from elsewhere. Names and texts of `data` are escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = PackageLoader("penstock.cli", "pages")
    made = Environment(loader=pages, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    made.globals |= {"css_name": css_name, "css_colours": css_colours, "percent": percent}
    return made.get_template(page).render(data)


def check_output(option: str, path: Path) -> None:
    """Raise InvalidArgument for a file that an option names and that has no place, before anything is computed."""
    try:
        wrong = "Is a directory" if path.is_dir() else "" if path.parent.is_dir() else "No such file or directory"
    except OSError as error:  # a folder that may not be looked into
        wrong = error.strerror or str(error)
    if wrong:
        raise InvalidArgument(f"{option}: {path}: {wrong}")


def write_page(option: str, path: Path, text: str) -> None:
    """Write a file that an option names: whole, or not at all. Raises InvalidArgument naming the option."""
    check_output(option, path)
    part = path.with_name(f".{path.name}.part")
    try:
        if path.exists() and not path.is_file():  # a device or a pipe
            path.write_text(text, encoding="utf-8")
            return
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidArgument(f"{option}: {path}: {error.strerror or error}") from None


@contextmanager
def progress_bar(what: str, total: int, in_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """A bar on stderr while the block runs, if that is a terminal; nothing else.

    The block gets a function `advance(count, remark="")`, which may be called from several threads.
    """
    if not sys.stderr.isatty():
        yield lambda count, remark="": None
        return
    from rich import progress

    sizes = (progress.DownloadColumn(), progress.TransferSpeedColumn())
    columns = (
        progress.TextColumn(what),
        progress.BarColumn(),
        *(sizes if in_bytes else (progress.MofNCompleteColumn(),)),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[remark]}"),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, remark="")
        yield lambda count, remark="": bar.update(task, advance=count, remark=remark)
