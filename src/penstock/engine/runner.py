"""Bound programs that run: a list of calls at first, then a replay of what the device has captured."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.experts.streamed import Streamed
from penstock.graph import Node, Wrap
from penstock.ops.collective import EXCHANGES
from penstock.ops.device import Device, MissDetector

Call = Callable[[], object]

_FEW_MISSES = 1  # layers of a step that may miss experts for the next one to be run as a whole

_unready = itertools.count(1)
_last_unready = 0


def unready_runs() -> int:
    """Runs of this process, of whatever model, that were no replays but a first list of calls or a capture, which take
    longer: a time in which this number has changed is not that of a step.
    """
    return _last_unready


def _count_unready() -> None:
    global _last_unready
    _last_unready = next(_unready)


class Runner:
    """Segments of calls that are run one after the other. The first run is a list of calls; later ones are replays.

    captures: False if the calls do more than launch kernels, so that every run is a list of calls. Replays are cut at
    calls of what `between_replays` has marked.
    """

    def __init__(self, device: Device, segments: Sequence[Sequence[Call]], captures: bool = True) -> None:
        self.device, self.captures = device, captures
        self.segments = [list(segment) for segment in segments]
        self._replays: dict[Any, Callable[[], object]] = {}
        self._ran: set[Any] = set()

    @property
    def calls(self) -> list[Call]:
        return [call for segment in self.segments for call in segment]

    @property
    def captured(self) -> bool:
        return bool(self._replays) or not self.captures

    def run(self) -> None:
        self._replay("", lambda: self.calls)

    def _replay(self, key: Any, calls: Callable[[], Sequence[Call]]) -> None:
        """Run these calls; `key` names them."""
        replay = self._replays.get(key)
        if replay is None:
            if self.captures:
                _count_unready()
            if key not in self._ran or not self.captures:
                for call in calls():
                    call()
                self._ran.add(key)
                return
            replay = self._replays[key] = self._capture(calls())
        replay()

    def _capture(self, calls: Sequence[Call]) -> Callable[[], object]:
        parts: list[Call] = []
        for marked, group in itertools.groupby(calls, _is_marked):
            own = list(group)
            parts += own if marked else [self.device.capture(own)]
        return parts[0] if len(parts) == 1 else lambda: [part() for part in parts]


@dataclass(frozen=True)
class _BetweenReplays:
    """A kernel that cannot be captured."""

    kernel: Callable[..., object]

    def __call__(self, *args: Any, **named: Any) -> None:
        self.kernel(*args, **named)


def between_replays(inner: Wrap | None) -> Wrap:
    """A wrap (see `Program.bind`) for ranks that exchange arrays through the host: what does so is not captured."""

    def wrap(node: Node, kernel: Any) -> Any:
        kernel = kernel if inner is None else inner(node, kernel)
        return _BetweenReplays(kernel) if node.op in EXCHANGES else kernel

    return wrap


def _is_marked(call: Call) -> bool:
    return isinstance(call, functools.partial) and isinstance(call.func, _BetweenReplays)


class SegmentedRunner(Runner):
    """Answers of a model whose experts are streamed to a device that replays.

    It is cut before each layer's experts. A step runs as a whole while hardly anything has to come from disk; from the
    first layer that needs it on it goes layer by layer, and so do the steps after one that needed much. Once nothing is
    on disk alone, `run` does not wait for the step. layers: of its expert nodes. resume: makes rows active again that
    the detector has made inactive.

    Ranks of a split model stop at the same layer and go on from there together, since they agree with each layer's sum
    on whether one of them misses experts. Layer by layer each fetches its own before the sum, where the others wait.
    Which of both a step does follows from what was agreed on in the last one.
    """

    def __init__(
        self,
        device: Device,
        segments: Sequence[Sequence[Call]],
        streamed: Streamed,
        detector: MissDetector,
        layers: Sequence[int],
        resume: Call,
    ) -> None:
        super().__init__(device, segments)
        self._streamed, self._detector, self._resume = streamed, detector, resume
        self._layers = np.array(layers)
        self._mostly_cached = False

    def run(self) -> None:
        parts, agreed = self.segments, self._detector.agreed
        if self._streamed.fully_cached and agreed is None:  # other ranks may still have to stop
            self._launch()
            return
        if agreed is not None:
            self._detector.wait()  # for the last step
            self._mostly_cached = np.count_nonzero(agreed[:, 1]) <= _FEW_MISSES
        self._detector.turn = start = missed = 0
        if self._streamed.store.pending:
            self._streamed.apply_reports()
            self._streamed.store.drain()
        self._detector.rank(len(self._streamed.pending_reports))
        if self._mostly_cached:
            self._replay(-1, lambda: self.calls)
            self._streamed.apply_reports()
            self._detector.wait()
            wrong = np.flatnonzero((self._detector.host if agreed is None else agreed)[:, 0])
            found = int(wrong[0]) if len(wrong) else len(self._layers)
            own = len(wrong) > 0 and self._detector.host[found, 0] > 0
            self._keep_report(0, found if own or not len(wrong) else found + 1)
            start, missed = found + 1, int(len(wrong) > 0)
            if own:
                self._fetch_and_resume(found)
            elif len(wrong):
                self._detector.resolve(found, missed=False)
                self._resume()
        for n in range(start, len(parts)):
            self._replay(n, lambda n=n: parts[n])
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

    def _launch(self) -> None:
        """A step that cannot stop. Its report is applied while the next one is under way."""
        self._detector.turn ^= 1
        self._detector.rank(len(self._streamed.pending_reports))
        self._replay((-1, self._detector.turn), lambda: self.calls)
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
        if self._detector.agreed is not None:
            self._detector.resolve(n, missed=True)
        self._resume()

    def _keep_report(self, start: int, stop: int) -> None:
        """Keep what the device did in these layers; it is applied to the store while the next step runs."""
        if start < stop:
            report = self._detector.host[start:stop].copy()
            apply = functools.partial(self._detector.apply_report, self._layers[start:stop], report)
            self._streamed.pending_reports.append(apply)
