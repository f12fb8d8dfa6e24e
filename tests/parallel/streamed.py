"""Ranks in one process whose experts are streamed to a device that detects what is absent, as a GPU does."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np

from penstock import api
from penstock.engine.rank import Rank
from penstock.engine.ranks import Follower
from penstock.experts.store import HostTier
from penstock.models.split import Mesh
from penstock.ops.collective import communicator
from tests.engine.capturing import CapturingHost
from tests.parallel.threads import ThreadGroup, Threads


class Turns(Threads):
    """Ranks of which one runs at a time, until it exchanges something: Triton's interpreter is for one thread."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._turn = threading.Lock()
        self.exchanged: list[list[tuple[int, ...]]] = [[] for _ in range(size)]

    def waiting(self, wait: Callable[[], Any]) -> Any:
        self._turn.release()
        try:
            return wait()
        finally:
            self._turn.acquire()

    def _shared(self, array: Any) -> list[Any]:
        self.exchanged[self.rank].append(tuple(array.shape))
        return self.waiting(lambda: super(Turns, self)._shared(array))

    def run(self, work: Any) -> list[Any]:
        def one(rank: int) -> Any:
            with self._turn:
                return work(rank)

        return super().run(one)


class TurnGroup(ThreadGroup):
    """Of ranks that take turns."""

    def receive(self) -> bytes:
        assert isinstance(self._threads, Turns)
        return self._threads.waiting(super().receive)


class HostDetector:
    """`MissDetector` in NumPy: what is in no slot is on disk alone."""

    turn = 0

    def __init__(self, tier: Any, layers: int, width: int, sums: str | None) -> None:
        self._tier, self._width = tier, width
        self.host = np.zeros((layers, 1 + 2 * width), np.int32)
        self.agreed = None if sums is None else np.ones((layers, 2), np.int32)
        self._notes = np.zeros((layers, 2), sums or "float32")
        self._ids: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.resolved: list[tuple[int, bool]] = []

    def detect(self, n: int, layer: int, ids: Any, inputs: Mapping[str, Any]) -> None:
        active = np.repeat(inputs["slots"] >= 0, ids.shape[1])
        slots = np.where(ids >= 0, self._tier.store.slot_of[layer][ids], -2).reshape(-1)
        missing = bool((active & (slots == -1)).any())
        self.host[n] = -1
        self.host[n, 0] = missing
        self.host[n, 1 : 1 + ids.size] = np.where(active & (slots != -2), ids.reshape(-1), -1)
        self._notes[n] = missing
        self._ids[n] = ids, ids.copy()
        if missing:
            _deactivate(inputs)
            ids[slots.reshape(ids.shape) == -1] = -1  # which a GPU's kernels leave out by themselves

    def agree(self, n: int, x: Any, inputs: Mapping[str, Any], out: Any) -> None:
        np.copyto(out, x)
        communicator().all_reduce(out, self._notes[n])
        assert self.agreed is not None
        self.agreed[n] = self._notes[n]
        if self._notes[n, 0]:
            _deactivate(inputs)

    def resolve(self, n: int, missed: bool) -> None:
        self.resolved.append((n, missed))
        ids, chosen = self._ids[n]
        ids[...] = chosen
        self._notes[n] = 0, missed

    def rank(self, behind: int) -> None:
        pass

    def wait(self) -> None:
        pass

    def prefetch_all(self) -> None:
        pass

    def apply_report(self, layers: np.ndarray, report: np.ndarray) -> None:
        self._tier.store.record_step(layers, report[:, 1 : 1 + self._width], 0)


def _deactivate(inputs: Mapping[str, Any]) -> None:
    inputs["slots"][:], inputs["positions"][:], inputs["lengths"][:] = -1, -1, 0


class KnownTier(HostTier):
    """Slots in host memory, of a store that can be looked at."""

    store: Any = None

    def device_slot_maps(self, store: Any) -> list[Any]:
        self.store = store
        return super().device_slot_maps(store)


class Detecting(CapturingHost):
    """Host memory that detects absent experts while a step runs."""

    def __init__(self) -> None:
        super().__init__()
        self.detectors: list[HostDetector] = []

    def expert_tier(self, host: str, top_k: int) -> Any:
        return KnownTier()

    def miss_detector(self, tier: Any, layers: int, width: int, sums: str | None = None) -> Any:
        self.detectors.append(HostDetector(tier, layers, width, sums))
        return self.detectors[-1]


GIVEN: dict[str, Any] = {
    **{name: parameter.default for name, parameter in inspect.signature(api.load).parameters.items()},
    "device": "cpu",
    "dtype": "float32",
    "activations": "float32",
    "max_context": 64,
}


def on_ranks(
    folder: Path, options: Seq[Mapping[str, Any]], work: Callable[[api.LLM], Any]
) -> tuple[Any, list[Any], Turns]:
    """What `work` makes of a model that is split, on rank 0, while the others follow; the engines of all ranks, and
    what they exchanged. options: of `load`, for each rank.
    """
    turns = Turns(len(options))
    groups = TurnGroup.all(turns)
    engines: list[Any] = [None] * turns.size

    def one(number: int) -> Any:
        given = {**GIVEN, "path_or_hub_id": str(folder), **options[number]}
        mesh = Mesh(number, turns.size)
        rank = Rank(groups[number], mesh, given | {"device": "cpu"}, turns.size, None)  # type: ignore[arg-type]
        llm = api._load(given, None, None, rank)
        engines[number] = llm.engine
        rank.agree(llm.engine)
        if number:
            return Follower(llm.engine, groups[number]).run()  # type: ignore[arg-type]
        try:
            return work(llm)
        finally:
            llm.engine.leader.end()  # type: ignore[union-attr]

    return turns.run(one)[0], engines, turns
