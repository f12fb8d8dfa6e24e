"""Devices: what the layers above the ops need of the place where a model's arrays lie and its kernels run.

A device is asked for what it can do (`host_memory`, `runs_programs`, `samples_tokens`), never for its type. A backend
is a folder of `backends/` with a module `device` that registers it here under its names; the module is imported when
a name of it is first asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np

from penstock.backend_module import backend_module
from penstock.errors import InvalidArgument
from penstock.ops.array import Spec

# the names of devices and the package with the `device` module of each: a new backend adds its line here
BACKENDS = {"cpu": "cpu", "cuda": "cuda.runtime", "reference": "cpu"}

_TYPES: dict[str, type[Device]] = {}


class StepInputs(Protocol):
    """Arrays that the steps of all sizes read, at their largest, and the token that was drawn last in each slot."""

    on_device: dict[str, Any]

    def send(self, values: Mapping[str, np.ndarray]) -> None:
        """Bring the first numbers of some arrays on their way: of one axis, or the corner of a table."""
        ...

    def unpack(self) -> None:
        """Write what was sent last into the arrays. A token −2 − s becomes the one that was drawn last in slot s."""
        ...


class PendingDraw(Protocol):
    """Tokens that are being drawn."""

    def tokens(self) -> list[int]:
        """Wait for it; the tokens drawn, -2 where the logits are not finite."""
        ...

    def logprobs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Wait for it; log-probabilities [rows] of the tokens, ids and log-probabilities [rows, 20] of the first ranks.

        Only of a step with log-probabilities in its mode.
        """
        ...


class PendingStep(PendingDraw, Protocol):
    """A step that is under way."""

    def logits(self) -> np.ndarray:
        """Wait for it; logits float32 [n, vocab] of the rows that the host gets. Only of a step that has some."""
        ...


class DeviceSampler(Protocol):
    """The end of a step: draws tokens and keeps them for the next one, without the host."""

    def values(self, rows: Seq[Mapping[str, Any]], masks: Seq[np.ndarray | None] = ()) -> dict[str, np.ndarray]:
        """What `StepInputs.send` takes for rows that draw so: temperature, top_k, top_p, min_p, seed, and `edits` where
        a row has some. masks: the words of each row's grammar, None where it has none.
        """
        ...

    drawn: Any  # int32: what the rows of the last step have drawn

    def calls(self, logits: Any, mode: str, behind: Seq[Callable[[], object]] = ()) -> list[Callable[[], object]]:
        """What draws from logits [rows, vocab]; a mode of `ops.sample_tokens`, "+edits", "+logprobs": `split_mode`.
        behind: calls that may change what was drawn (`drawn`), before it is kept and reported.
        """
        ...

    def launched(self, rows: int, mode: str) -> PendingDraw:
        """The draw of so many rows whose calls were run last."""
        ...


class MissDetector(Protocol):
    """Sees to it on a device, layer by layer, that the experts which a step chose are there.

    Those in host memory take slots of a low score. Once one is not there either, the rest of the step changes nothing:
    its rows become inactive ones.
    """

    @property
    def host(self) -> np.ndarray:
        """int32 [layers, 1 + 2 · width]: whether some are missing, ids (−1: of an inactive row, or another rank's),
        slots that were taken.

        There are two, which take turns.
        """
        ...

    turn: int  # which of the two is written next, 0 or 1

    @property
    def agreed(self) -> np.ndarray | None:
        """int32 [layers, 2], of a model that is split: the ranks that stopped at a layer, and those that missed experts
        of it, as all of them know. None where there is one rank.
        """
        ...

    def detect(self, n: int, layer: int, ids: Any, inputs: Mapping[str, Any]) -> None:
        """Look for the ids of a layer, the n-th of the step; inputs: slots, positions and lengths of the rows."""
        ...

    def agree(self, n: int, x: Any, inputs: Mapping[str, Any], out: Any) -> None:
        """Sum x over ranks into out; with it travels whether experts of the n-th layer are missing on one of them. If
        so the rest of the step changes nothing on any rank: rows become inactive before a cache is written again.
        """
        ...

    def resolve(self, n: int, missed: bool) -> None:
        """What the n-th layer lacked is there now, if it lacked something: its sum may be made again."""
        ...

    def rank(self, behind: int) -> None:
        """Send the scores of the slots to the device, before a step; `behind`: steps whose reports are pending."""
        ...

    def wait(self) -> None:
        """Until `host` has what was looked for."""
        ...

    def report_future(self) -> Callable[[], np.ndarray]:
        """Of the step that was just launched: a function that waits for its report in `host` and returns a copy."""
        ...

    def prefetch_all(self) -> None:
        """Go on to read experts before a step chooses them, if host memory has room for all."""
        ...

    def apply_report(self, layers: np.ndarray, report: np.ndarray) -> None:
        """Bring the store up to date with a report (rows of `host`) about these layers; earlier ones come first."""
        ...


class DeviceMemory(Protocol):
    """Arrays of a device: how they get there and back, and how much room there is."""

    memory_name: str  # in messages: "memory", "GPU memory"
    host_memory: bool  # arrays are NumPy arrays: mapped files serve as weights, the host reads values where they lie
    fixed_caches: bool  # caches have their full size from the start: captured programs know where they lie

    def to_device(self, value: Any) -> Any:
        """A NumPy array or quantized tensor, here."""
        ...

    def to_host(self, array: Any) -> np.ndarray:
        """A copy of an array of this device as a NumPy array; waits for it."""
        ...

    def rows_to_host(self, array: Any, rows: Seq[int]) -> Callable[[], np.ndarray]:
        """Bring a copy of some rows of an array on its way, as they are when all that was launched is done; a function
        that waits for it.
        """
        ...

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any: ...

    def most_rows(self, nbytes: int) -> int:
        """Rows of so many bytes that `reserve` may be asked for, more than there will be memory for. 0: none."""
        ...

    def reserve(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Zeros that take memory when they are written. May raise MemoryError."""
        ...

    def copy(self, array: Any) -> Any: ...

    def copies(self, arrays: Seq[Any]) -> list[Any]:
        """A copy of each of several arrays of this device."""
        ...

    def clear_all(self, arrays: Seq[Any]) -> None:
        """Set arrays of this device to 0."""
        ...

    def copy_all(self, into: Seq[Any], arrays: Seq[Any]) -> None:
        """Copy arrays of this device into others of the same shapes."""
        ...

    def arena(self, nbytes: int) -> Any:
        """Bytes for the values of a program."""
        ...

    def free_memory(self, share: float = 1.0) -> int:
        """Bytes that can still be allocated; share: while this process has at most that part of the device's memory.

        Where memory is not the process's own to divide (host memory) the share changes nothing.
        """
        ...

    def peak_memory(self) -> int:
        """The most bytes that were in use so far."""
        ...

    def copy_rate(self) -> float | None:
        """GB/s of a copy within this memory, bytes read plus bytes written; None where none is measured."""
        ...

    def link_rate(self) -> float | None:
        """GB/s of a copy from pinned host memory to here; None where none is measured."""
        ...


class Execution(Protocol):
    """How steps run."""

    runs_programs: bool  # steps are traced and fused; else every op runs by its definition
    chunk_alignment: int  # chunks of a prompt end at multiples of this position
    captures: bool  # programs are captured, in a few sizes; else they are bound to the sizes of each step
    joins: int  # most rows for which one product with adjacent weights and a cut beats a product with each
    default_dtype: str  # of activations
    default_activations: str  # how quantized products round x
    state_dtypes: tuple[str, ...]  # that its kernels take for recurrent states
    default_sequences: int  # that run at a time under a scheduler
    compiles_ahead: bool  # kernels are compiled on the host's cores, where a second process can help

    @staticmethod
    def set_threads(count: int) -> None:
        """Threads of the kernels that run on the host; nothing elsewhere."""
        ...

    @staticmethod
    def threads() -> int:
        """Threads of the kernels that run on the host; 1 elsewhere."""
        ...

    def compile(self, calls: Seq[Callable[[], object]]) -> None:
        """Compile the kernels of these calls, where that is quicker than when each first runs; none of them runs."""
        ...

    def capture(self, calls: Seq[Callable[[], object]]) -> Callable[[], object]:
        """A function that does what the calls do, in the quickest way of the device. Their kernels have run before."""
        ...

    def wait(self) -> None:
        """Until all that was launched is done."""
        ...

    def event(self) -> Callable[[], object]:
        """A function that waits until all that has been launched so far is done."""
        ...

    def lost(self, error: BaseException) -> bool:
        """Whether nothing can run on the device any more after this error."""
        ...

    def running(self, deterministic: bool) -> contextlib.AbstractContextManager[Any]:
        """Inside, ops run with this device's kernels; a lack of memory is penstock's OutOfMemory."""
        ...


class Sampling(Protocol):
    """How tokens are drawn."""

    samples_tokens: bool  # here, without their logits going to the host

    def step_inputs(self, wanted: Mapping[str, tuple[tuple[int, ...], str]], slots: int) -> StepInputs:
        """Arrays of these shapes and dtypes for steps of sequences in so many slots, and those that sampling reads;
        only where `captures`.
        """
        ...

    def sampler(self, inputs: StepInputs, vocab: int) -> DeviceSampler:
        """What draws tokens after steps with these inputs; only where `samples_tokens`."""
        ...


class ExpertFormat(Protocol):
    """The arrays of one expert, and where they lie in a record of it."""

    @property
    def specs(self) -> tuple[Spec, ...]: ...

    @property
    def blocks(self) -> tuple[str | None, ...]:
        """The types of those that are GGUF blocks; empty: none is."""
        ...

    @property
    def offsets(self) -> tuple[int, ...]: ...

    @property
    def payload(self) -> int:
        """Bytes of the arrays."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of a record."""
        ...

    def views(self, record: memoryview) -> Seq[memoryview]:
        """The arrays of a record, as bytes."""
        ...


class ExpertMemory(Protocol):
    """Where streamed experts lie, and how a step finds out which are absent."""

    def expert_tier(self, host: str, top_k: int) -> Any:
        """Memory for streamed experts here; host: bytes of host memory behind it, or "auto". None: host memory."""
        ...

    def miss_detector(self, tier: Any, layers: int, width: int, sums: str | None = None) -> MissDetector | None:
        """What detects absent experts while a step runs, for `width` choices of each layer; None where the host takes
        part in every layer anyway. sums: the dtype in which ranks sum the layers of a model that is split.
        """
        ...

    def expert_room(self, pairs: tuple[int, int], experts: int, x: Any, block: bool) -> Any:
        """An array for `expert_mlp` where the experts of pairs [T, k], of so many to choose from, come in batches.

        x: what they read, as wide as what they make; block: the op is `moe_shared_forward`. None where a kernel sums
        over a token's experts as it goes: there those of some tokens come together.
        """
        ...


class Device(DeviceMemory, Execution, Sampling, ExpertMemory, Protocol):
    """All of it, under a name."""

    name: str


def register_device(kind: type[Device]) -> None:
    """Make a device known under its name. Making one raises BackendError where it cannot be used."""
    _TYPES[kind.name] = kind


def device_type(name: str) -> type[Device]:
    """What a device can do, whether there is one here or not. Raises InvalidArgument for an unknown name."""
    if name not in BACKENDS:
        raise InvalidArgument(f"device: is {name!r}, expected one of {', '.join(BACKENDS)}")
    backend_module(BACKENDS[name], "device")
    return _TYPES[name]


def device_for(name: str) -> Device:
    """The device of a name. Raises InvalidArgument for an unknown one, BackendError where it cannot be used."""
    return device_type(name)()
