"""Programs that run: with their inputs, on the arrays they are bound to, captured where the device replays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.experts.streamed import Streamed
from penstock.graph import Bound, Program, Wrap
from penstock.ops.device import Device, Drawing, Inputs, MissDetector

Call = Callable[[], object]
Tail = Callable[[str], Sequence[Call]]

_FEW_MISSES = 1  # layers of a step that may miss experts for the next one to be run as a whole


class Runner:
    """A program with its buffers. The first run is a list of calls; from the second on it is a replay.

    Its inputs are small int32 arrays of the given shapes: `host` to fill, `on_device` where the device reads them.
    compiles: its kernels may be new, and are compiled together before it runs. captures: False if its calls do more
    than launch kernels, so that every run is a list of calls.
    """

    def __init__(
        self,
        program: Program,
        device: Device,
        numbers: Mapping[str, tuple[int, ...]],
        compiles: bool = True,
        captures: bool = True,
    ) -> None:
        self.compiles, self.captures = compiles and captures, captures
        self.program = program
        self.device = device
        self._buffer: Inputs = device.inputs([(shape, "int32") for shape in numbers.values()])
        self.host: dict[str, np.ndarray] = dict(zip(numbers, self._buffer.host, strict=True))
        self.on_device: dict[str, Any] = dict(zip(numbers, self._buffer.on_device, strict=True))
        self.bound: Bound | None = None
        self._drawing: Drawing | None = None
        self._replays: dict[Any, Callable[[], object]] = {}
        self._ran: set[Any] = set()
        self._key: Any = None

    @property
    def outputs(self) -> tuple[Any, ...]:
        assert self.bound is not None
        return self.bound.outputs

    def bind(self, key: Any, arrays: Mapping[str, Any], arena: Any, wrap: Wrap | None) -> None:
        """Bind the program to caches and an arena; nothing happens if `key`, which names them, is that of last time."""
        if key != self._key:
            self.bound = self.program.bind({**self.on_device, **arrays}, arena, wrap)
            self._key, self._replays, self._ran, self._drawing = key, {}, set(), None

    def fill(self, **values: Any) -> None:
        """Write inputs by name and bring them to the device."""
        self._buffer.ready()
        for name, value in values.items():
            self.host[name][...] = value
        self._buffer.send()

    @property
    def drawing(self) -> Drawing:
        """What draws from its logits."""
        if self._drawing is None:
            self._drawing = self.device.drawing(self.outputs[0], self.on_device)
        return self._drawing

    def run(self, name: str = "", tail: Tail | None = None) -> None:
        """Run the program, and behind it the calls that `tail` has by this name."""
        self._replay(name, lambda: [call for part in self._parts(name, tail) for call in part])

    def _parts(self, name: str, tail: Tail | None) -> list[list[Call]]:
        """The calls of each segment, those of `tail` behind the last."""
        assert self.bound is not None
        parts = [list(segment) for segment in self.bound.segments]
        parts[-1] += [] if tail is None else tail(name)
        return parts

    def _replay(self, key: Any, calls: Callable[[], Sequence[Call]]) -> None:
        """Run these calls; `key` names them."""
        replay = self._replays.get(key)
        if replay is None:
            now = calls()
            if key not in self._ran or not self.captures:
                if self.compiles and key not in self._ran:
                    self.device.compile(now)
                self._ran.add(key)
                for call in now:
                    call()
                return
            replay = self._replays[key] = self.device.capture(now)
        replay()


class SegmentedRunner(Runner):
    """A decode program whose experts are streamed to a device that replays.

    It is cut before each layer's experts. A step runs as a whole while hardly anything has to come from disk; from the
    first layer that needs it on it goes layer by layer, and so do the steps after one that needed much. Once nothing is
    on disk alone, `run` does not wait for the step.
    """

    def __init__(
        self,
        program: Program,
        device: Device,
        numbers: Mapping[str, tuple[int, ...]],
        streamed: Streamed,
        detector: MissDetector,
    ) -> None:
        super().__init__(program, device, numbers)
        self._streamed, self._detector = streamed, detector
        self._layers = np.array(streamed.layers(program.graph))
        self._filled: dict[str, np.ndarray] = {}
        self._cut: dict[str, list[list[Call]]] = {}
        self._mostly_cached = False

    def bind(self, key: Any, arrays: Mapping[str, Any], arena: Any, wrap: Wrap | None) -> None:
        if key != self._key:
            self._cut = {}
        detecting = self._streamed.detecting(self.program.graph, self._detector, self.on_device, wrap)
        super().bind(key, arrays, arena, detecting)

    def fill(self, **values: Any) -> None:
        self._filled |= {name: np.array(value) for name, value in values.items()}
        super().fill(**values)

    def run(self, name: str = "", tail: Tail | None = None) -> None:
        if name not in self._cut:
            self._cut[name] = self._parts(name, tail)
        parts = self._cut[name]
        if self._streamed.fully_cached:
            self._launch(name, parts)
            return
        self._detector.turn = start = missed = 0
        if self._streamed.store.pending:
            self._streamed.apply_reports()
            self._streamed.store.drain()
        self._detector.rank(len(self._streamed.pending_reports))
        if self._mostly_cached:
            self._replay((name, -1), lambda: [call for part in parts for call in part])
            self._streamed.apply_reports()
            self._detector.wait()
            wrong = np.flatnonzero(self._detector.host[:, 0])
            found = int(wrong[0]) if len(wrong) else len(self._layers)
            self._keep_report(0, found)
            start, missed = found + 1, int(len(wrong) > 0)
            if len(wrong):
                self._fetch_and_resume(found)
        for n in range(start, len(parts)):
            self._replay((name, n), lambda n=n: parts[n])
            if n < len(self._layers):
                self._detector.wait()
                if self._detector.host[n, 0]:
                    missed += 1
                    self._fetch_and_resume(n)
                else:
                    self._keep_report(n, n + 1)
        self._mostly_cached = missed <= _FEW_MISSES
        if start < len(parts):
            self._streamed.apply_reports()
        self._detector.prefetch_all()

    def _launch(self, name: str, parts: list[list[Call]]) -> None:
        """A step that cannot stop. Its report is applied while the next one is under way."""
        self._detector.turn ^= 1
        self._detector.rank(len(self._streamed.pending_reports))
        self._replay((name, -1, self._detector.turn), lambda: [call for part in parts for call in part])
        self._streamed.apply_reports()
        report = self._detector.report_future()
        self._streamed.pending_reports.append(lambda: self._detector.apply_report(self._layers, report()))

    def _fetch_and_resume(self, n: int) -> None:
        """Fetch what the n-th layer lacks, and make the rows active again."""
        self._streamed.apply_reports()
        ids = np.split(self._detector.host[n, 1:], 2)[0]
        store, layer = self._streamed.store, self._layers[n]
        store.request(layer, ids[ids >= 0])
        store.wait(layer, ids[ids >= 0])
        super().fill(**self._filled)

    def _keep_report(self, start: int, stop: int) -> None:
        """Keep what the device did in these layers; it is applied to the store while the next step runs."""
        if start < stop:
            report = self._detector.host[start:stop].copy()
            apply = functools.partial(self._detector.apply_report, self._layers[start:stop], report)
            self._streamed.pending_reports.append(apply)
