"""The clock that stands still while kernels are compiled, and what is shown meanwhile."""

import pytest

from penstock import compile_progress
from penstock.compile_progress import clock, compiling, counting, seconds, show


@pytest.fixture
def times(monkeypatch):
    """time.perf_counter() of the module, to be set by the test; nothing is being compiled."""
    now = [100.0]
    monkeypatch.setattr(compile_progress.time, "perf_counter", lambda: now[0])
    for name, value in {"_active": 0, "_began": 0.0, "_spent": 0.0, "_counted": None, "_line_at": 0.0}.items():
        monkeypatch.setattr(compile_progress, name, value)
    return now


def test_clock_stands_still_while_kernels_are_compiled(times):
    assert (clock(), seconds()) == (100.0, 0.0)
    with compiling():
        times[0] = 103.0
        assert (clock(), seconds()) == (100.0, 3.0)
        with compiling():  # one inside of another counts once
            times[0] = 104.0
        times[0] = 105.0
    assert (clock(), seconds()) == (100.0, 5.0)
    times[0] = 107.0
    assert (clock(), seconds()) == (102.0, 5.0)


def test_show_prints_a_line_every_few_seconds_where_there_is_no_terminal(times, capsys):
    with counting(lambda: (int(times[0] - 100), 40)):
        for _ in range(13):
            show("this CPU", "norm")
            times[0] += 1.0
    lines = [f"penstock: compiling kernels for this CPU, once: {n} of 40, norm" for n in (3, 6, 9, 12)]
    assert capsys.readouterr().err.splitlines() == lines
    assert seconds() == 13.0


def test_show_without_a_count_is_silent_for_a_short_time(times, capsys):
    with compiling():
        show("this GPU")
        times[0] += 2.9
        show("this GPU")
        assert capsys.readouterr().err == ""
        times[0] += 0.1
        show("this GPU", "attend")
    assert capsys.readouterr().err == "penstock: compiling kernels for this GPU, once: attend\n"
