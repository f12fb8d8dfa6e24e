"""What the host gives to steps on the GPU: one copy, laid out by a kernel."""

from typing import Any

import numpy as np

from penstock.backends.cuda.runtime.inputs import StepInputs
from penstock.ops.device import device_for
from tests.gpu.common import to_host

WANTED: dict[str, tuple[tuple[int, ...], str]] = {
    "positions": ((9,), "int32"),
    "tokens": ((7,), "int32"),
    "table": ((70, 50), "int32"),
    "table8": ((3, 5), "int32"),
    "top_p": ((5,), "float64"),
    "seed": ((3,), "int64"),
    "slots": ((4,), "int32"),
}
EMPTY = -99


def test_unpack_lays_out_what_was_sent_and_leaves_the_rest(rng):
    gpu: Any = device_for("cuda")
    inputs = StepInputs(gpu, WANTED, slots=4)
    want: dict[str, np.ndarray] = {}
    for name, array in inputs.on_device.items():
        array.fill_(EMPTY)
        want[name] = np.full(tuple(array.shape), EMPTY, WANTED[name][1])
    inputs.last.copy_(gpu.to_device(np.array([11, 12, 13, 14], np.int32)))
    numbers = {
        "table": rng.integers(-(2**31), 2**31, (64, 45)).astype(np.int32),  # a corner, more than one round of words
        "tokens": np.array([5, -2 - 3, -1, -2, 0], np.int32),
        "positions": np.array([-2, -1, 0, 2**31 - 1, -(2**31), 7], np.int32),
        "top_p": np.array([-0.0, np.pi, 1e-300, -np.inf]),
        "seed": np.array([-1, -(2**63), 2**63 - 1]),
    }
    tokens = np.array([5, 14, -1, 11, 0], np.int32)
    # other tokens alone: what they are the first time is what they are now
    more = {"tokens": np.array([-2 - 1], np.int32), "table8": np.array([[1, 2], [3, 4], [-2, -3]], np.int32)}
    for values, drawn in ((numbers, tokens), (more, np.array([12], np.int32)), ({"slots": np.zeros(0, np.int32)}, [])):
        inputs.send(values)
        inputs.unpack()
        for name, value in values.items():
            want[name][tuple(map(slice, value.shape))] = drawn if name == "tokens" else value
        for name, array in inputs.on_device.items():
            got = to_host(array)
            assert got.tobytes() == want[name].tobytes(), name  # bits: also the sign of 0
    assert inputs.last.tolist() == [11, 12, 13, 14]
    inputs.unpack()  # what a step that is resumed does
    assert to_host(inputs.on_device["table8"]).tolist() == want["table8"].tolist()


def test_every_step_reads_what_was_sent_for_it():
    """The host goes on to the next message while steps are under way."""
    inputs = StepInputs(device_for("cuda"), WANTED, slots=4)
    numbers, read = np.arange(9, dtype=np.int32), []
    for _ in range(5):
        numbers += 10
        inputs.send({"positions": numbers})
        inputs.unpack()
        read.append(inputs.on_device["positions"].clone())
    assert [to_host(array).tolist() for array in read] == [list(range(10 * n, 10 * n + 9)) for n in range(1, 6)]
