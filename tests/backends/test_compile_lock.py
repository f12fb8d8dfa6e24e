"""Two processes share the compilation of kernels: one waits, one skips, and a dead one is not waited for."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.backends.cpu import compile_lock


@pytest.fixture
def file(tmp_path):
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "kernel.nbc"


@pytest.fixture
def helped(monkeypatch):
    monkeypatch.setattr(compile_lock, "helper", SimpleNamespace(poll=lambda: None))


def test_hold_does_nothing_for_a_process_on_its_own(file, monkeypatch):
    monkeypatch.setattr(compile_lock, "helper", None)  # a test before may have started one
    with compile_lock.hold(file):
        assert not list(file.parent.iterdir())


def test_hold_locks_while_compiling_and_lets_go(file, helped):
    with pytest.raises(KeyError), compile_lock.hold(file):
        assert file.with_suffix(".lock").read_text() == str(os.getpid())
        raise KeyError
    assert not file.with_suffix(".lock").exists()


def test_hold_skips_in_a_helper_what_is_locked(file, monkeypatch):
    monkeypatch.setattr(compile_lock, "helping", True)
    file.with_suffix(".lock").write_text("1")
    with pytest.raises(compile_lock.LockedElsewhere), compile_lock.hold(file):
        pytest.fail("compiled what another process is compiling")
    file.write_text("machine code")
    with compile_lock.hold(file):
        pass
    assert file.with_suffix(".lock").exists()  # not this process's to remove


def test_hold_waits_for_the_helper(file, helped):
    file.with_suffix(".lock").write_text("1")
    threading.Timer(0.1, file.write_text, ["machine code"]).start()
    with compile_lock.hold(file):
        assert file.exists()


def test_hold_does_not_wait_for_a_helper_that_died(file, monkeypatch):
    monkeypatch.setattr(compile_lock, "helper", SimpleNamespace(poll=lambda: 1))
    file.with_suffix(".lock").write_text("1")
    start = time.monotonic()
    with compile_lock.hold(file):
        assert time.monotonic() - start < 5


def test_hold_in_a_folder_that_cannot_be_written_compiles(helped):
    with compile_lock.hold(Path(os.devnull, "kernel.nbc")):
        pass


@pytest.mark.slow  # compiles the kernels of a model from nothing
def test_first_run_is_shared_by_two_processes_and_gives_the_same_bits_as_the_second(tmp_path):
    script = (
        "import penstock, hashlib; from penstock.backends.cpu import compile_lock; llm = penstock.load();"
        "tokens = llm.generate('Once upon a time', max_tokens=8).tokens; logits = llm.logits(tokens).tobytes();"
        "print(compile_lock.helper is not None, tokens, hashlib.sha256(logits).hexdigest())"
    )
    environment = os.environ | {"PENSTOCK_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    (cold, *first), (warm, *second) = (run.stdout.split(" ", 1) for run in runs)
    assert first == second
    assert warm == "False"
    assert cold == str(len(os.sched_getaffinity(0)) > 1)
    end = time.monotonic() + 60  # the helper ends the kernel it is at
    while list(tmp_path.rglob("*.lock")) and time.monotonic() < end:
        time.sleep(0.1)
    assert not list(tmp_path.rglob("*.lock"))
