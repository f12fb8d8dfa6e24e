"""Sums over ranks as `penstock doctor` measures them, in the form that `penstock plan` takes."""

import contextlib
import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch.distributed", reason="the extra `distributed` is not installed")

from penstock.cli import doctor
from penstock.parallel.launch import Torchrun
from penstock.parallel.measure import SumTime, SumTimes, measure_sums
from tests.cli.common import call

TIMES = (SumTime(1, 2048, 8192, 50e-6), SumTime(8, 2048, 65536, 40e-6), SumTime(512, 7168, 14_680_064, 10e-3))


def test_latency_and_bandwidth_by_hand():
    sums = SumTimes(4, "gloo", "float32", TIMES)
    assert sums.latency == 40e-6
    assert sums.rate(TIMES[2]) == pytest.approx(1.5 * 14_680_064 / 10e-3 / 1e9)
    assert sums.bandwidth == pytest.approx(1.5 * 14_680_064 / (10e-3 - 40e-6) / 1e9)
    assert SumTimes(1, "gloo", "float32", TIMES).bandwidth is None


class Slow:
    """A group of two ranks, the other one twice as slow."""

    size, rank, backend = 2, 0, "gloo"

    def __init__(self):
        self.shapes: list[tuple[int, ...]] = []

    def stepping(self, first):
        return contextlib.nullcontext()

    def all_reduce(self, array):
        assert array.dtype == np.float32
        self.shapes.append(array.shape)

    def gather_host(self, array):
        self.own = array
        return [array, 2 * array]


def test_every_size_is_measured_and_the_slowest_rank_counts():
    group = Slow()
    sums = measure_sums(group)  # pyright: ignore[reportArgumentType]
    sizes = [(rows, columns) for columns in (2048, 7168) for rows in (1, 8, 32, 128, 512)]
    assert [(one.rows, one.columns) for one in sums.times] == list(dict.fromkeys(group.shapes)) == sizes
    assert [one.nbytes for one in sums.times] == [4 * rows * columns for rows, columns in sizes]
    assert [one.seconds for one in sums.times] == (2 * group.own).tolist()


def test_plan_takes_what_doctor_gives(capsys):
    options = doctor._plan_options(SumTimes(2, "gloo", "float32", TIMES))
    assert options == ["-tp", "2", "--rank-latency", "40.0", "--rank-bandwidth", "1.47"]
    shown = call(capsys, "plan", "--device", "cpu", "--memory-bandwidth", "10", "--json", *options)
    assert json.loads(shown.out)["ranks"]["link"]["from"] == "as given"


def test_doctor_prints_the_sums_on_rank_0_alone(capsys, monkeypatch):
    sums = SumTimes(2, "gloo", "float32", TIMES)
    monkeypatch.setattr(doctor, "_measured_sums", lambda joined: sums)
    monkeypatch.setattr(doctor, "examined", lambda: {"notes": []})
    monkeypatch.setattr(doctor, "_rows", lambda report: [("a", "b")])
    monkeypatch.setattr(doctor, "joined_by_torchrun", lambda: Torchrun(1, 2, 1, 2))
    assert call(capsys, "doctor").out == ""
    monkeypatch.setattr(doctor, "joined_by_torchrun", lambda: Torchrun(0, 2, 0, 2))
    assert call(capsys, "doctor").out.splitlines()[-1].startswith("penstock plan MODEL -tp 2 --rank-latency 40.0 ")
    assert json.loads(call(capsys, "doctor", "--json").out)["ranks"]["sums"][1]["bytes"] == 65536


@pytest.mark.slow
def test_doctor_under_torchrun_measures_two_ranks():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "penstock"]
    ran = subprocess.run([*torchrun, "doctor", "--json"], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(ran.stdout)["ranks"]
    assert (found["size"], found["backend"], len(found["sums"])) == (2, "gloo", 10)
    assert found["latency_us"] > 0 and found["gb_per_s"] > 0
