"""Lay a peer's rows beside penstock's: the ratio of their speeds (mean and best), for equal shapes only.

    penstock bench --random llama-3.2-3b -p 512 -n 128 -o json > penstock.json
    python benchmarks/peers/compare.py peer.json penstock.json

Rows belong together when model (with its number of layers), prompt, generation, depth and batch are the same. It ends
with 1 and no table when such rows differ in backend or in more than 1% of their parameters, or when there are none.
The ratio of the best repetitions is the fairer one where other programs share the machine.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import peer

SHAPE = ("model", "n_prompt", "n_gen", "n_depth", "batch_size")
MOST = 0.01  # of the parameters: families keep a few vectors more or less

Row = dict[str, Any]


def read(path: Path) -> tuple[str, dict[tuple[Any, ...], Row]]:
    """Who measured, and the rows of a peer script (an object) or of `penstock bench -o json` (a list) by shape."""
    try:
        content = json.loads(path.read_text())
        who, rows = ("penstock", content) if isinstance(content, list) else (content["peer"], content["rows"])
        found: dict[tuple[Any, ...], Row] = {}
        for row in rows:
            shape = tuple(row[name] for name in SHAPE)
            if shape in found:
                peer.stop(f"{path}: has two rows of {row['model']}, {row['test']}, expected one")
            needed = (*SHAPE, "test", "backend", "model_n_params", "avg_ts", "samples_ns")
            found[shape] = {name: row[name] for name in needed}
    except (OSError, ValueError) as error:
        peer.stop(f"{path}: cannot be read as JSON ({error})", 2)
    except (KeyError, TypeError) as error:
        peer.stop(f"{path}: is no output of a peer script or of penstock bench -o json ({error!r})", 2)
    return who, found


def matched(theirs: dict[tuple[Any, ...], Row], ours: dict[tuple[Any, ...], Row]) -> list[tuple[Row, Row]]:
    """Rows of equal shape. Ends the program where two of them are not of the same model or backend after all."""
    pairs = [(row, ours[shape]) for shape, row in theirs.items() if shape in ours]
    if not pairs:
        peer.stop(f"nothing to compare: {_named(theirs)} on one side, {_named(ours)} on the other")
    for their, our in pairs:
        where = f"{their['model']}, {their['test']}"
        if their["backend"] != our["backend"]:
            peer.stop(f"{where}: measured on {their['backend']} and on {our['backend']}, expected the same backend")
        counts = their["model_n_params"], our["model_n_params"]
        if abs(counts[0] - counts[1]) > MOST * max(counts):
            peer.stop(f"{where}: has {counts[0]:,} parameters and {counts[1]:,}, expected the same shapes")
    return pairs


def _named(rows: dict[tuple[Any, ...], Row]) -> str:
    return "; ".join(f"{row['model']}, {row['test']}" for row in rows.values()) or "no row"


def main(argv: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("peer", type=Path, metavar="PEER.json", help="--json of a peer script")
    options.add_argument("penstock", type=Path, metavar="PENSTOCK.json", help="of penstock bench -o json")
    args = options.parse_args(argv)
    (them, theirs), (us, ours) = read(args.peer), read(args.penstock)
    pairs = matched(theirs, ours)
    print(f"| model | backend | test | {them} t/s | {us} t/s | ratio | of best |\n|---|---|---:|---:|---:|---:|---:|")
    for their, our in pairs:
        best = min(their["samples_ns"]) / min(our["samples_ns"])
        speeds = f"{their['avg_ts']:.2f} | {our['avg_ts']:.2f} | {our['avg_ts'] / their['avg_ts']:.2f} | {best:.2f}"
        print(f"| {our['model']} | {our['backend']} | {our['test']} | {speeds} |")
    for who, rows, others in ((them, theirs, ours), (us, ours, theirs)):
        for shape, row in rows.items():
            if shape not in others:
                print(f"not compared: {row['model']}, {row['test']}: only {who} has it", file=sys.stderr)


if __name__ == "__main__":
    main()
