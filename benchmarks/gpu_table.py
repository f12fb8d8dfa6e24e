"""The short table at the end of benchmarks/gpu.sh, and the whole one in docs/kernels.md.

    python benchmarks/gpu_table.py FOLDER [--docs docs/kernels.md]

FOLDER holds the JSON of benchmarks/ops/gpu_*.py. Shares are of the copy bandwidth or of the rate of a large bfloat16
product, both measured in the same run.
"""

import argparse
import json
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table: benchmarks/gpu_table.py -->", "<!-- end of table -->"


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The machine and all rows, those of one file one behind the other."""
    about: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("gpu_*.json")):
        found = json.loads(path.read_text())
        about = found["machine"]
        rows += found["rows"]
    if not rows:
        raise SystemExit(f"{folder}: holds no gpu_*.json, expected those of benchmarks/gpu.sh")
    return about, rows


def cells(row: dict[str, Any]) -> list[str]:
    moved = f"{row['TB/s']:.2f} TB/s" if "TB/s" in row else ""
    share = f"{100 * row['share of copy']:.0f} %" if "share of copy" in row else ""
    done = f"{row['TFLOP/s']:.0f} TFLOP/s" if "TFLOP/s" in row else ""
    rate = f"{100 * row['share of matrix rate']:.0f} %" if "share of matrix rate" in row else ""
    took = f"{row['us']:.1f}" if row["us"] < 100 else f"{row['us']:.0f}"
    return [row["op"], row["shape"], took, moved, share, done, rate]


def markdown(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    head = (
        f"{about['gpu']}, torch {about['torch']}, triton {about['triton']}, {about['date']}: copy "
        f"{about['copy TB/s']:.2f} TB/s, bfloat16 product {about['bf16 TFLOP/s']:.0f} TFLOP/s."
    )
    lines = ["| op | shape | µs | | of copy | | of matrix rate |", "|---|---|--:|--:|--:|--:|--:|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join([head, "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--docs", type=Path, help="put the table between the marks of this page")
    args = parser.parse_args()
    about, rows = read(args.folder)
    if args.docs:
        before, _, rest = args.docs.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        args.docs.write_text(f"{before}{BEGIN}\n{markdown(about, rows)}\n{END}{after}")
    for row in rows:
        name, shape, *numbers = cells(row)
        print(f"{name:24} {shape:44} " + " ".join(f"{number:>12}" for number in numbers))
    print(f"{about['gpu']}: copy {about['copy TB/s']:.2f} TB/s, bfloat16 product {about['bf16 TFLOP/s']:.0f} TFLOP/s")


if __name__ == "__main__":
    main()
