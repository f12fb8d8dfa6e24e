import sys
from types import SimpleNamespace

import pytest

from penstock.analysis import bandwidth
from penstock.analysis.bandwidth import H200, ReadBandwidth, bandwidth_meter, bandwidth_of
from penstock.errors import BackendError


def test_read_bandwidth_measures_in_another_process():
    with ReadBandwidth(2, 1 << 24) as bandwidth:
        rates = [bandwidth.measure(), bandwidth.measure()]
    assert all(0.1 < rate < 1e5 for rate in rates)


def test_read_bandwidth_of_a_process_that_died_is_none():
    bandwidth = ReadBandwidth(1, 1 << 20)
    bandwidth._command = [sys.executable, "-c", ""]
    with bandwidth:
        bandwidth._process.wait()
        assert bandwidth.measure() is None


def test_bandwidth_meter_asks_a_device_with_its_own_memory_for_a_copy():
    rates = iter([3.0, 4.0])
    with bandwidth_meter(SimpleNamespace(host_memory=False, copy_rate=lambda: next(rates)), 1) as measure:
        assert [measure(), measure()] == [3.0, 4.0]


def test_bandwidth_of_a_gpu_that_is_not_here_is_that_of_an_h200(monkeypatch):
    monkeypatch.setattr("penstock.backends.cuda.runtime.features.unusable", lambda: "no GPU")
    assert bandwidth_of("cuda", None) == (H200, "a copy on an H200, there is no GPU here")
    assert bandwidth_of("cuda", 7.0) == (7.0, "as given")


def test_bandwidth_of_host_memory_is_measured_or_refused(monkeypatch):
    monkeypatch.setattr(bandwidth, "array_bytes", lambda: 1 << 24)
    rate, how = bandwidth_of("cpu", None)
    assert rate > 0.1 and how == "a plain read here"
    monkeypatch.setattr(ReadBandwidth, "measure", lambda self: None)
    with pytest.raises(BackendError, match="^kernels: the bandwidth could not be measured, expected --bandwidth$"):
        bandwidth_of("cpu", None)
