"""Host memory as a device that captures programs and draws tokens itself, as a GPU does; it counts what it makes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from penstock import ops
from penstock.backends.cpu.device import CpuDevice
from penstock.dtypes import numpy_dtype
from penstock.engine.steps import CHAINED
from penstock.ops.sampling import ONE, SEEN, Edits, mask_words, split_mode

SAMPLING = {
    "temperature": "float64", "top_k": "int32", "top_p": "float64", "min_p": "float64", "seed": "int64",
    "draw_at": "int32", "draw_slots": "int32",
}  # fmt: skip


class CapturingHost(CpuDevice):
    """Arrays are NumPy arrays and kernels those of the CPU; what was launched has run."""

    captures = samples_tokens = fixed_caches = True
    joins = 64
    chunk_alignment = 2048
    default_sequences = 4

    def __init__(self) -> None:
        self.captured = 0  # lists of calls
        self.compiled = 0

    def compile(self, calls: Seq[Callable[[], object]]) -> None:
        self.compiled += len(calls)

    def capture(self, calls: Seq[Callable[[], object]]) -> Callable[[], object]:
        self.captured += 1
        return super().capture(calls)

    def step_inputs(self, wanted: Mapping[str, tuple[tuple[int, ...], str]], slots: int) -> Any:
        rows = wanted["wanted"][0]
        return HostStepInputs({**wanted, **{name: (rows, dtype) for name, dtype in SAMPLING.items()}}, slots)

    def sampler(self, inputs: Any, vocab: int) -> Any:
        return HostSampler(inputs, vocab)


class HostStepInputs:
    def __init__(self, wanted: Mapping[str, tuple[tuple[int, ...], str]], slots: int) -> None:
        self.on_device = {name: np.full(shape, -99, numpy_dtype(dtype)) for name, (shape, dtype) in wanted.items()}
        self.last = np.full(slots, -99, np.int32)
        self._sent: dict[str, np.ndarray] = {}

    def send(self, values: Mapping[str, np.ndarray]) -> None:
        self._sent = {name: value.copy() for name, value in values.items()}

    def unpack(self) -> None:
        for name, value in self._sent.items():
            if name == "tokens":
                chained = value <= CHAINED
                value = np.where(chained, self.last[np.where(chained, CHAINED - value, 0)], value)
            self.on_device[name][tuple(map(slice, value.shape))] = value


class HostSampler:
    """Draws as a GPU does: it has copies of the edits, and counts what it draws itself."""

    def __init__(self, inputs: HostStepInputs, vocab: int) -> None:
        self.inputs, self.vocab = inputs, vocab
        self.counts: dict[Edits, np.ndarray] = {}
        self.edits: list[Edits | None] = []
        self.masks: Seq[np.ndarray | None] = ()
        self.drawn = np.full(len(inputs.on_device["wanted"]), -99, np.int32)
        self.found: list[np.ndarray] = []

    def values(self, rows: Seq[Mapping[str, Any]], masks: Seq[np.ndarray | None] = ()) -> dict[str, np.ndarray]:
        kinds = {name: kind for name, kind in SAMPLING.items() if not name.startswith("draw_")}
        self.masks = masks
        self.edits = [row.get("edits") for row in rows]
        for one in self.edits:
            if one is None:
                continue
            if one.stale or one not in self.counts:
                self.counts[one] = one.counts.copy()
            for token in one.forgotten:
                if not one.counts[token] & SEEN:
                    self.counts[one][token] &= ~SEEN
            one.stale = False
            one.forgotten.clear()
        return {name: np.array([row[name] for row in rows], kind) for name, kind in kinds.items()}

    def calls(
        self, logits: np.ndarray, mode: str, behind: Seq[Callable[[], object]] = ()
    ) -> list[Callable[[], object]]:
        return [functools.partial(self.draw, logits, mode), *behind]

    def draw(self, logits: np.ndarray, mode: str) -> None:
        kind, edited, wanted = split_mode(mode)
        more: dict[str, Any] = {"logprobs": 20} if wanted else {}
        rows = len(logits)
        given = {name: self.inputs.on_device[name][:rows] for name in SAMPLING}
        own = [*self.edits, *([None] * (rows - len(self.edits)))]
        have = [one for one in own if one is not None]
        if edited and have:
            slots = [-1 if one is None else have.index(one) for one in own]
            more |= {"slots": np.array(slots, np.int32), "counts": np.stack([self.counts[one] for one in have])}
            more |= {"bias": np.stack([one.bias for one in have])}
            more |= {"penalties": np.stack([one.penalties for one in have])}
        if edited and any(mask is not None for mask in self.masks):
            words = [mask_words(mask, self.vocab) for mask in self.masks if mask is not None]
            number = itertools.count()
            masked = [-1 if mask is None else next(number) for mask in self.masks]
            masked += [-1] * (rows - len(masked))
            more |= {"masked": np.array(masked, np.int32), "masks": np.stack(words)}
        how = [given[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed")]
        found: Any = ops.sample_tokens(logits, given["draw_at"], *how, kind, **more)
        drawn, *self.found = found if wanted else (found,)
        self.drawn[:rows] = drawn
        for one, token in zip(own, drawn.tolist(), strict=True):
            if one is not None and token >= 0:
                self.counts[one][token] = (self.counts[one][token] + ONE) | SEEN
        slots = given["draw_slots"]
        self.inputs.last[slots[slots >= 0]] = drawn[slots >= 0]

    def launched(self, rows: int, mode: str) -> Any:
        return HostPending(self.drawn[:rows].tolist(), [found[:rows] for found in self.found])


class HostPending:
    def __init__(self, tokens: list[int], logprobs: list[np.ndarray]) -> None:
        self._tokens, self._logprobs = tokens, logprobs

    def tokens(self) -> list[int]:
        return self._tokens

    def logprobs(self) -> tuple[np.ndarray, ...]:
        return tuple(self._logprobs)
