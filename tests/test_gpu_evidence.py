"""What `make test` says of the last GPU run."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import gpu_evidence


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the CUDA backend's sources, with evidence of a run of them."""
    own = Path("src/penstock/backends/cuda")
    shutil.copytree(gpu_evidence.ROOT / own, tmp_path / own, ignore=shutil.ignore_patterns("__pycache__"))
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / gpu_evidence.NAME).write_text(json.dumps(gpu_evidence.evidence(tmp_path)))
    return tmp_path


def test_evidence_has_commit_date_and_digest(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tree.parent))
    monkeypatch.setenv("COMMIT", "abc123")
    found = gpu_evidence.evidence(tree)
    assert found["commit"] == "abc123" and len(found["date"]) == 10
    assert found["cuda_sources"] == gpu_evidence.digest()


@pytest.mark.parametrize("change", ["edit", "add", "rename", "remove"])
def test_remark_names_a_change_of_the_backend_alone(tree: Path, change: str) -> None:
    folder = tree / "src/penstock/backends/cuda"
    (tree / "src/penstock/other.py").write_text("")
    assert gpu_evidence.remark(tree) is None
    file = folder / "norm.py"
    if change == "edit":
        file.write_text(file.read_text() + "\n")
    elif change == "add":
        (folder / "runtime" / "more.py").write_text("")
    elif change == "rename":
        file.rename(folder / "norms.py")
    else:
        file.unlink()
    assert "backends/cuda has changed since the last GPU run" in str(gpu_evidence.remark(tree))


def test_remark_without_evidence_says_how_to_get_it(tree: Path) -> None:
    (tree / "benchmarks/results" / gpu_evidence.NAME).unlink()
    assert "no GPU run is recorded" in str(gpu_evidence.remark(tree))
