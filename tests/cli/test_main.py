import subprocess
import sys

import pytest

import penstock
from penstock.cli import main
from penstock.errors import BackendError
from tests.cli.common import Outcome, call, program


def test_version_is_the_package_version(capsys):
    shown = call(capsys, "--version")
    assert (shown.status, shown.out, shown.err) == (0, f"penstock {penstock.__version__}\n", "")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("kernels", "--help"), ("doctor", "--help")])
def test_help_shows_an_example_and_fits_80_columns(capsys, monkeypatch, arguments):
    monkeypatch.setenv("COLUMNS", "80")
    shown = call(capsys, *arguments)
    assert shown.status == 0
    assert "Example" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nosuch",), "penstock: error: No such command 'nosuch' (see penstock --help)\n"),
        (("doctor", "--nosuch"), "penstock: error: No such option: --nosuch (see penstock doctor --help)\n"),
        (("kernels", "--family"), "penstock: error: Option '--family' requires an argument\n"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(capsys, arguments, message):
    shown = call(capsys, *arguments)
    assert (shown.status, shown.out, shown.err) == (2, "", message)


def test_unknown_setting_is_one_line_of_warning():
    """However often a program reads its settings; generate does so before and while it loads the model."""
    shown = program("generate", "-p", "Once", "-m", "1", "--temp", "0", PENSTOCK_THREDS="2")
    told = [line for line in shown.err.splitlines() if "PENSTOCK_THREDS" in line]
    assert shown.status == 0 and shown.out
    assert told == [
        "penstock: warning: PENSTOCK_THREDS is not a setting and is ignored, did you mean PENSTOCK_THREADS?"
    ]


def test_a_value_that_a_setting_cannot_take_is_one_line_and_status_1():
    shown = program("kernels", PENSTOCK_THREADS="many")
    assert (shown.status, shown.out) == (1, "")
    assert shown.err == "penstock: error: PENSTOCK_THREADS is 'many', expected an int of at least 1\n"


def test_the_demo_explains_itself_and_refuses_what_it_does_not_know():
    for argument, status in (("--help", 0), ("-h", 0), ("nosuch", 2)):
        ran = subprocess.run([sys.executable, "-m", "penstock.demo", argument], capture_output=True, text=True)
        assert ran.returncode == status
        assert (ran.stdout or ran.stderr).startswith("usage: python -m penstock.demo")
        assert "Once upon a time" not in ran.stdout


@pytest.fixture
def failing(monkeypatch):
    """Make the program raise what is put into the returned list."""
    raised: list[BaseException] = []

    def fail(**_):
        raise raised[0]

    monkeypatch.setattr(main, "program", lambda: fail)
    return raised


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (BackendError("rms_norm: two\nlines"), 1, "penstock: error: rms_norm: two lines\n"),
        (OSError(2, "No such file", "x"), 1, "penstock: error: [Errno 2] No such file: 'x' (--debug shows where)\n"),
        (RuntimeError("oops"), 1, "penstock: error: RuntimeError: oops (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_error_is_one_line(capsys, failing, error, status, message):
    failing.append(error)
    shown = call(capsys, "kernels")
    assert (shown.status, shown.err) == (status, message)


@pytest.mark.parametrize("how", ["before", "after", "setting"])
def test_debug_lets_the_error_through(failing, monkeypatch, how):
    failing.append(BackendError("rms_norm: broken"))
    if how == "setting":
        monkeypatch.setenv("PENSTOCK_DEBUG", "1")
    arguments = {"before": ["--debug", "kernels"], "after": ["kernels", "--debug"], "setting": ["kernels"]}[how]
    with pytest.raises(BackendError):
        main.run(arguments)


def test_debug_shows_a_traceback_and_status_1():
    shown = program("kernels", "nosuch", "--debug")
    assert shown.status == 1
    assert shown.err.startswith("Traceback")
    assert "KernelNotFound" in shown.err


def test_closed_pipe_is_silent():
    shown = program("kernels", "--json", shell="| true")
    assert (shown.status, shown.out, shown.err) == (0, "", "")
    full = program("kernels", "--json", shell="> /dev/full")
    assert full.status == 1
    assert full.err.count("\n") == 1


def test_a_closed_stream_is_the_null_device():
    assert program("kernels", "--json", shell=">&-") == Outcome(0, "", "")
    told = program("kernels", shell="2>&-", PENSTOCK_THREDS="2")  # of which a warning is told on stderr
    assert told.status == 0 and "PENSTOCK_THREDS" not in told.out
    empty = program("generate", "-p", "-", "--ignore-chat-template", shell="<&-")
    assert (empty.status, empty.err) == (1, "penstock: error: prompt has no tokens, expected at least one\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_stdout_replaces_what_its_encoding_lacks(encoding):
    shown = program("kernels", PYTHONIOENCODING=encoding)
    assert (shown.status, shown.err) == (0, "")
    assert "?" in shown.out


def test_import_is_light():
    code = "import sys, penstock.cli.main; print({'torch', 'triton', 'numba', 'llvmlite'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
