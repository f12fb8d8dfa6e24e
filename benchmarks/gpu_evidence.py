"""Which sources the last GPU run was of: `benchmarks/gpu.sh` writes it, `make test` says when they have changed since.

python benchmarks/gpu_evidence.py write FOLDER    beside the results: commit, date, a digest of the CUDA backend
python benchmarks/gpu_evidence.py check           one line if the backend is another than that of the results
"""

import datetime
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAME = "gpu_evidence.json"


def digest(root: Path = ROOT) -> str:
    """Of every source file of the CUDA backend, with its name; needs no git, which a copied tree may lack."""
    total = hashlib.sha256()
    folder = root / "src" / "penstock" / "backends" / "cuda"
    for file in sorted(folder.rglob("*.py")):
        total.update(f"\0{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes())
    return total.hexdigest()[:16]


def commit(root: Path = ROOT) -> str:
    """The commit of the tree: the variable COMMIT, which a copy of the sources needs, else as git knows it."""
    if told := os.environ.get("COMMIT"):
        return told
    try:
        found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def evidence(root: Path = ROOT) -> dict[str, Any]:
    return {"commit": commit(root), "date": datetime.date.today().isoformat(), "cuda_sources": digest(root)}


def remark(root: Path = ROOT) -> str | None:
    """What to say of the results in the repository; None if they are of these sources."""
    file = root / "benchmarks" / "results" / NAME
    if not file.is_file():
        return "backends/cuda: no GPU run is recorded; benchmarks/gpu.sh on a GPU records one"
    found = json.loads(file.read_text())
    if found["cuda_sources"] == digest(root):
        return None
    return (
        f"backends/cuda has changed since the last GPU run ({found['commit']}, {found['date']}); "
        "benchmarks/gpu.sh on a GPU repeats it"
    )


def main() -> None:
    match sys.argv[1:]:
        case ["write", folder]:
            Path(folder, NAME).write_text(json.dumps(evidence(), indent=1) + "\n")
        case ["check"]:
            if said := remark():
                print(said)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
