"""A child process that works within limits: results, refusals, restarts, and what it cannot reach."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from penstock.child import Child, ChildDied, ChildError, ChildOutOfMemory, ChildTimeout

MEMORY = 64 << 20

HANDLER = """
import os, sys, time

def handle(data):
    word, _, rest = data.partition(b" ")
    if word == b"echo":
        return rest
    if word == b"pid":
        return str(os.getpid()).encode()
    if word == b"spin":
        while True:
            pass
    if word == b"sleep":
        time.sleep(float(rest))
    if word == b"fill":
        return bytes(int(rest))
    if word == b"raise":
        raise ValueError(rest.decode())
    if word == b"exit":
        os._exit(int(rest))
    if word == b"open":
        open(rest.decode()).read()
    if word == b"environ":
        return ",".join(sorted(os.environ)).encode()
    if word == b"modules":
        return ",".join(sys.modules).encode()
    print("printed, and lost")
    return b""
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "handled.py").write_text(HANDLER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    made = Child("handled:handle", memory=MEMORY, seconds=5)
    yield made
    made.close()


def test_call_answers_and_the_process_stays(child: Child) -> None:
    assert child.call(b"echo hello") == b"hello"
    assert child.call(b"echo ") == b""
    large = bytes(range(256)) * (1 << 16)  # more than a socket takes at once, both ways
    assert child.call(b"echo " + large) == large
    first = child.call(b"pid")
    assert child.call(b"print") == b""
    assert child.call(b"pid") == first


def test_call_too_long_is_ended_and_the_next_one_works(child: Child) -> None:
    child.start()
    before = child.call(b"pid")
    start = time.monotonic()
    for word in (b"spin", b"sleep 30"):
        with pytest.raises(ChildTimeout, match=r"handled:handle: takes longer than 0.2 s"):
            child.call(word, seconds=0.2)
    assert time.monotonic() - start < 10
    assert child.call(b"pid") != before


def test_call_with_too_much_memory_is_refused(child: Child) -> None:
    assert len(child.call(b"fill %d" % (MEMORY // 4))) == MEMORY // 4
    with pytest.raises(ChildOutOfMemory, match="needs more memory than 64 MiB"):
        child.call(b"fill %d" % (2 * MEMORY))
    assert child.call(b"echo again") == b"again"


def test_call_that_raises_or_dies_is_said(child: Child) -> None:
    pid = child.call(b"pid")
    with pytest.raises(ChildError, match="^ValueError: no such thing$"):
        child.call(b"raise no such thing")
    assert child.call(b"pid") == pid  # nothing wrong with the process
    with pytest.raises(ChildDied, match="ended with status 3"):
        child.call(b"exit 3")
    assert child.call(b"echo again") == b"again"


def test_process_that_ended_between_calls_is_replaced(child: Child) -> None:
    pid = int(child.call(b"pid"))
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert int(child.call(b"pid")) != pid


def test_child_opens_no_files_and_sees_no_secrets(child: Child, tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="Too many open files"):
        child.call(f"open {tmp_path / 'handled.py'}".encode())
    assert b"SECRET_TOKEN" not in child.call(b"environ")
    modules = child.call(b"modules").split(b",")
    assert b"numpy" not in modules and b"penstock.ops" not in modules


def test_child_imports_nothing_from_the_folder_it_starts_in(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "struct.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(folder)
    assert child.call(b"echo here") == b"here"


def test_handler_that_is_not_there_is_said() -> None:
    for name in ("penstock.nowhere:handle", "penstock.child:nothing"):
        with pytest.raises(ChildDied, match=f"^{name}: cannot be imported: "):
            Child(name, memory=MEMORY, seconds=5).call(b"")


def test_threads_share_one_process(child: Child) -> None:
    answers: list[bytes] = []
    threads = [threading.Thread(target=lambda n=n: answers.append(child.call(b"echo %d" % n * 1000))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == sorted((b"echo %d" % n * 1000).partition(b" ")[2] for n in range(8))


@pytest.mark.parametrize("how", ["closed", "collected"])
def test_process_ends_with_its_owner(child: Child, how: str) -> None:
    other = Child("handled:handle", memory=MEMORY, seconds=5)
    pid = int(other.call(b"pid"))
    if how == "closed":
        other.close()
    del other
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_process_ends_when_the_parent_is_killed(child: Child) -> None:
    script = textwrap.dedent(
        """
        import threading, time
        from penstock.child import Child
        child = Child("handled:handle", memory=1 << 26, seconds=1)
        print(child.call(b"pid").decode(), flush=True)
        threading.Thread(target=child.call, args=(b"spin",), kwargs={"seconds": 1}, daemon=True).start()
        time.sleep(60)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            return  # nobody collects it here
        time.sleep(0.05)
    pytest.fail("the child still runs")


def test_forked_copy_starts_a_process_of_its_own(child: Child) -> None:
    mine = child.call(b"pid")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, child.call(b"pid"))
        os._exit(0)
    os.waitpid(pid, 0)
    theirs = os.read(reader, 100)
    os.close(reader), os.close(writer)
    assert theirs and theirs != mine
    assert child.call(b"pid") == mine
