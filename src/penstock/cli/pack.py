"""penstock pack: put the experts of a model into one file, each in one piece, for faster streaming."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli._model import SAME_MODEL, UsageError, complete_model, named, note, resolved
from penstock.cli._output import print_json
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from rich.progress import Progress

    from penstock.experts.layout import Layer


def pack(
    argument: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Folder, .gguf file or hub id.", show_default=False, autocompletion=complete_model
        ),
    ] = None,
    model: Annotated[str | None, SAME_MODEL] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="By default experts.penstock in the model's folder.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Read a packed file and compare all hashes.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Pack again, from the start.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="R", help="Branch, tag or commit of a hub model.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use only what has been downloaded before.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Pack the experts of a model into one file, so that streaming reads an expert in one piece.

    The weights stay as they are, and so does the model: the packed file takes as much room again as the experts. It
    gets its name when it is complete. Interrupted, the same command goes on where it was; a packed file that fits the
    model is left alone.

    \b
    Examples:
      penstock pack ./my-model
      penstock pack ./my-model --check
    """
    if check and force:
        raise UsageError("--force: expected without --check, which writes nothing")
    if (given := named(argument, model)) is None:
        raise UsageError("Missing argument 'MODEL'.")
    from penstock.engine.expert_weights import expert_layers_of, packed_beside
    from penstock.experts.packed import open_packed, verify_packed, write_packed

    model_path = resolved(given, ("folder", "gguf"), revision, offline).path
    layers, fingerprint = expert_layers_of(model_path)
    if not layers:
        raise CheckpointError(f"{model_path}: has no experts to pack")
    path = packed_beside(model_path) if out is None else out.expanduser()
    report: dict[str, Any] = {
        "file": str(path),
        "status": "verified" if check else "packed",
        "layers": len(layers),
        "experts": sum(layer.count for layer in layers),
        "bytes": 0,
        "seconds": 0.0,
        "moved_bytes": 0,  # written, or read by --check: less than all if an earlier run had begun
    }
    if not check and not force and _fits(path, layers, fingerprint):
        report["status"] = "current"
    else:
        start = time.perf_counter()
        try:
            with _Progress("checking" if check else "packing") as shown:
                if check:
                    open_packed(path, layers, fingerprint)
                    verify_packed(path, shown)
                else:
                    write_packed(layers, fingerprint, path, shown, resume=not force)
        except KeyboardInterrupt:
            if Path(f"{path}.part").exists() and not check:
                note(f"interrupted; {path}.part is kept, and the same command goes on from there")
            raise
        report["seconds"], report["moved_bytes"] = time.perf_counter() - start, shown.moved
    report["bytes"] = path.stat().st_size
    if as_json:
        print_json(report)
    else:
        print(_line(report))


def _fits(path: Path, layers: "list[Layer]", fingerprint: str) -> bool:
    """Whether a packed file is there and of this model as it is now."""
    from penstock.experts.packed import AGAIN, open_packed

    if not path.exists():
        return False
    try:
        open_packed(path, layers, fingerprint)
    except CheckpointError as error:
        note(f"packed again: {str(error).removesuffix(f'; {AGAIN}')}")
        return False
    return True


def _line(report: dict[str, Any]) -> str:
    from penstock.units import spelled

    what = f"{report['file']}: {report['experts']} experts of {report['layers']} layers, {spelled(report['bytes'])}"
    if report["status"] == "current":
        return f"{what}, packed before and of this model (--check compares all hashes, --force packs again)"
    rate = report["moved_bytes"] / 1e9 / (report["seconds"] or 1)
    done = "all hashes right" if report["status"] == "verified" else "packed"
    return f"{what}, {done} in {report['seconds']:.1f} s ({rate:.2f} GB/s)"


class _Progress:
    """What packing and checking report: a bar on stderr, if that is a terminal. `moved` are the bytes of this run."""

    def __init__(self, doing: str) -> None:
        self._doing, self._bar = doing, None
        self._first: int | None = None
        self.moved = 0

    def __call__(self, done: int, total: int) -> None:
        if self._first is None:
            self._first = done
            if sys.stderr.isatty():
                self._bar = _bar(self._doing, done, total)
        self.moved = done - self._first
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(doing: str, done: int, total: int) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(doing), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(doing, total=total, completed=done)
    bar.start()
    return bar
