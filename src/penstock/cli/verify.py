"""penstock verify: whether a model on this disk is whole and means something."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli._model import MODEL, SAME_MODEL, UsageError, named, note, resolved
from penstock.cli._output import print_json, print_table, progress_bar
from penstock.errors import InvalidArgument

if TYPE_CHECKING:
    from penstock.analysis.verify import Check

_SHOWN = 200  # problems of one check; a hostile file could have millions


def verify(
    argument: Annotated[str | None, MODEL] = None,
    model: Annotated[str | None, SAME_MODEL] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="R", help="Branch, tag or commit of a hub model.")
    ] = None,
    hashes: Annotated[
        Path | None, typer.Option("--hashes", metavar="FILE", help="Compare SHA-256 hashes, as sha256sum lists them.")
    ] = None,
    hub: Annotated[
        bool, typer.Option("--hub", help="Compare with the hashes that the hub gave when it was downloaded.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the files of a model and list every problem.

    Looked at are: headers and the bounds of each tensor; the index against the files; all floats (scales, biases, dense
    weights), which must be finite; the quantization table; the shapes that config.json implies; the tokenizer and the
    chat template. --hashes and --hub read the files whole. Nothing is downloaded, and nothing of the model is executed.

    The status is 0 if all is well, 1 if there are problems.

    \b
    Examples:
      penstock verify
      penstock verify ./my-model --hashes SHA256SUMS
      penstock verify mlx-community/Qwen3.6-35B-A3B-4bit --hub --json
    """
    if hashes is not None and hub:
        raise UsageError("--hub: expected without --hashes")
    from penstock.analysis.verify import check_model
    from penstock.weights.resolve import WITH_WEIGHTS

    folder = resolved(named(argument, model), WITH_WEIGHTS, revision, offline=True).path
    expected = _expected(folder, hashes, hub)
    checks, notes = check_model(folder, expected, progress_bar)
    problems = [problem for check in checks for problem in check.problems]
    if as_json:
        described = [
            {"name": check.name, "status": check.status, "about": check.about, "problems": check.problems}
            for check in checks
        ]
        print_json({"model": str(folder), "ok": not problems, "checks": described, "notes": notes})
    else:
        _show(checks)
        for remark in notes:
            note(remark)
    if problems:
        raise typer.Exit(1)


def _expected(folder: Path, hashes: Path | None, hub: bool) -> dict[str, str] | None:
    """The hashes that the files should have, by name; None if none are asked for."""
    from penstock.analysis.verify import hub_hashes, read_hashes

    if hashes is not None:
        return read_hashes(hashes)
    if not hub:
        return None
    if found := hub_hashes(folder) if folder.is_dir() else {}:
        return found
    raise InvalidArgument(f"--hub: {folder} does not come from the hub's cache, expected a hub id or its snapshot")


def _show(checks: Iterable[Check]) -> None:
    rows = [(check.status, check.name, check.about) for check in checks]
    print_table(("", "check", "about"), rows, wrap=("about",), header=False)
    total = 0
    for check in checks:
        total += len(check.problems)
        for problem in check.problems[:_SHOWN]:
            print(f"problem: {problem}")
        if len(check.problems) > _SHOWN:
            print(f"problem: … and {len(check.problems) - _SHOWN:,} more of {check.name}")
    if total:
        print(f"{total:,} problem{'s' * (total != 1)} found")
