"""What is shown while something takes long: in a notebook, on a terminal, and nowhere else."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock import compile_progress, progress


class Cell:
    """Stands for IPython in the kernel of a notebook: what a cell shows, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown: list[dict[str, str]] = []
        self.places = 0
        self.shell: Any = SimpleNamespace(kernel=object(), execution_count=1)
        ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
        ipython.get_ipython = lambda: self.shell  # type: ignore[attr-defined]
        display.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", display)
        monkeypatch.setattr(progress._CellLine, "_places", {})
        monkeypatch.setattr(progress, "_EVERY", 0)

    def display(self, bundle: dict[str, str], raw: bool, display_id: bool) -> Any:
        assert raw and display_id
        self.places += 1
        self.shown.append(bundle)
        return SimpleNamespace(update=lambda bundle, raw: self.shown.append(bundle))

    @property
    def texts(self) -> list[str]:
        return [bundle["text/plain"] for bundle in self.shown]


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    return Cell(monkeypatch)


def test_a_notebook_has_one_bar_per_cell(cell: Cell) -> None:
    assert progress.in_notebook() and progress.visible()
    for text in ("a <b>", "c"):
        with progress.notebook_bar(text, after=0) as report:
            report(1, 4)
    assert cell.texts == ["a <b>", "a <b> 25%", "", "c", "c 25%", ""] and cell.places == 1
    assert cell.shown[1]["text/html"] == '<progress value="1" max="4"></progress> a &lt;b&gt; 25%'
    assert cell.shown[2]["text/html"] == ""
    cell.shell.execution_count = 2
    with progress.notebook_bar("d", after=0) as report:
        report(1, 1)
    assert cell.places == 2
    with progress.notebook_bar("quick") as report:
        report(1, 1)
    assert "quick" not in cell.texts


def test_a_notebook_shows_kernels_being_compiled(cell: Cell) -> None:
    with compile_progress.counting(lambda: (3, 4)):
        compile_progress.show("this CPU", "norm")
        with compile_progress.compiling():
            compile_progress.show("this CPU", "rope")
    text = "compiling kernels for this CPU, once: 3 of 4"
    assert cell.texts == [f"{text}, norm", f"{text}, rope 75%", ""]


def test_a_notebook_shows_loading_and_long_answers(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock))
    llm = penstock.load(device="cpu")
    assert {"loading", "loading 100%"} <= set(cell.texts) and cell.texts[-1] == ""
    cell.shown.clear()
    answers = llm.generate(["Once upon a time", "A"], max_tokens=[3, 2])
    assert [len(answer.tokens) for answer in answers] == [3, 2]
    assert cell.texts[-2:] == ["generating 100%", ""]
    cell.shown.clear()
    llm.embed(["a", "b"])
    assert cell.texts[-2:] == ["reading 100%", ""]
    cell.shown.clear()
    shares: list[float] = []
    penstock.load(device="cpu", progress=shares.append)
    assert shares and "loading 100%" not in cell.texts


def test_a_shell_in_a_terminal_is_no_notebook(cell: Cell) -> None:
    cell.shell = SimpleNamespace(execution_count=1)  # IPython's own
    assert not progress.in_notebook()
    cell.shell = None  # IPython was imported by another library
    assert not progress.in_notebook()


def test_a_terminal_has_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert progress.visible() and not progress.in_notebook()
    line = progress.show("compiling")
    line.update("compiling: more", 1, 2)
    line.stop()
    assert "compiling" in capsys.readouterr().err


def test_a_script_without_a_terminal_prints_nothing_but_what_it_compiles() -> None:
    code = (
        "import penstock, sys\n"
        "llm = penstock.load(device='cpu')\n"
        "llm.generate(['a', 'b'], max_tokens=2); llm.embed(['a'])\n"
        "assert 'IPython' not in sys.modules and 'rich' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if not line.startswith("penstock: compiling kernels for this")]
    assert (done.returncode, done.stdout, said) == (0, "", [])
