"""Where the arrays of a loaded model lie: in host memory as NumPy arrays, or on a GPU as torch tensors.

The engine makes, copies and reads arrays through a place alone, so everything above the ops is written once. The GPU's
place is in the CUDA backend, where torch belongs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np

from penstock.dtypes import numpy_dtype
from penstock.errors import InvalidArgument
from penstock.experts.store import HostTier, Tier
from penstock.machine import available_memory, peak_memory
from penstock.models.step import PAGE
from penstock.ops._op import backend


class Inputs(Protocol):
    """Small arrays that the host fills and the device reads."""

    host: list[np.ndarray]
    here: list[Any]

    def send(self) -> None:
        """Bring what is in `host` to `here`, in the order of the device's work."""
        ...

    def ready(self) -> None:
        """Wait until what was sent has left `host`, so that it may be filled again."""
        ...


class Flight(Protocol):
    """A decode step that is under way."""

    def tokens(self) -> list[int]:
        """Wait for it; the token of each row, -2 where its scores are not finite."""
        ...


class Drawing(Protocol):
    """The end of a decode step: draws tokens and feeds them to the next one, without the host."""

    def calls(self, mode: str) -> list[Callable[[], object]]:
        """What to run after the program; mode of `ops.sample_tokens`."""
        ...

    def fill(self, parameters: Seq[Mapping[str, float]]) -> None:
        """Set how each row draws: temperature, top_k, top_p, min_p, seed."""
        ...

    def launched(self) -> Flight:
        """The step that was just run."""
        ...


class Missing(Protocol):
    """Sees to it on a device, layer by layer, that the experts which a step chose are there.

    Those in host memory take slots of little worth. Once one is not there either, the rest of the step changes nothing:
    its rows become inactive ones.
    """

    @property
    def host(self) -> np.ndarray:
        """int32 [layers, 1 + 2 · width]: whether some are missing, ids (−1: of an inactive row), slots that were taken.

        There are two, in turns.
        """
        ...

    turn: int  # which of the two is written next, 0 or 1

    def look(self, n: int, layer: int, ids: Any, inputs: Mapping[str, Any]) -> None:
        """Look for the ids of a layer, the n-th of the step; inputs: slots, positions and lengths of the rows."""
        ...

    def rank(self, behind: int) -> None:
        """Tell the device what the slots are worth, before a step; `behind`: steps that the store has not heard of."""
        ...

    def wait(self) -> None:
        """Until `host` has what was looked for."""
        ...

    def later(self) -> Callable[[], np.ndarray]:
        """Of the step that was just launched: what waits until `host` has its report, and gives a copy of that."""
        ...

    def gather(self) -> None:
        """Go on to read experts that nobody has chosen yet, if host memory has room for all."""
        ...

    def tell(self, layers: np.ndarray, report: np.ndarray) -> None:
        """Tell the store of a report (rows of `host`) about these layers; of earlier ones it has heard."""
        ...


class Place(Protocol):
    """What the engine needs to know of a device."""

    memory: str  # its name in messages: "memory", "GPU memory"
    kernels: str  # device whose kernels run here; "": the definitions, without programs
    grid: int  # prefill is cut at multiples of this position
    pages: int  # fewest that a cache has: where growing means to capture programs again, more
    joins: int  # see Step.joins
    draws: bool  # whether tokens can be drawn here, without their scores going to the host

    def put(self, value: Any) -> Any:
        """A NumPy array or quantized tensor, here."""
        ...

    def host(self, array: Any) -> np.ndarray:
        """A copy of an array of this place as a NumPy array; waits for it."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any: ...

    def copy(self, array: Any) -> Any: ...

    def copy_all(self, into: Seq[Any], arrays: Seq[Any]) -> None:
        """Copy arrays of this place into others of the same shapes."""
        ...

    def inputs(self, wanted: Seq[tuple[tuple[int, ...], str]]) -> Inputs:
        """Buffers of these shapes and dtypes."""
        ...

    def arena(self, nbytes: int) -> Any:
        """Bytes for the values of a program."""
        ...

    def compile(self, calls: Seq[Callable[[], object]]) -> None:
        """Compile the kernels of these calls, where that is quicker than when each first runs; none of them runs."""
        ...

    def captured(self, calls: Seq[Callable[[], object]]) -> Callable[[], object]:
        """A function that does what the calls do, in the quickest way this place has. Their kernels have run before."""
        ...

    def drawing(self, logits: Any, here: Mapping[str, Any]) -> Drawing:
        """What draws tokens from the scores of a decode program with these inputs; only where `draws`."""
        ...

    def rows(self, count: int) -> int:
        """Rows of a decode program for `count` sequences; those beyond are inactive."""
        ...

    def tier(self, host: str, top_k: int) -> Tier:
        """Memory for streamed experts here; host: bytes of host memory behind it, or "auto"."""
        ...

    def missing(self, tier: Tier, layers: int, width: int) -> Missing | None:
        """What looks for experts that are not there while a step runs, for `width` choices of each layer; None where
        the host takes part in every layer anyway.
        """
        ...

    def free(self) -> int:
        """Bytes that can still be allocated."""
        ...

    def peak(self) -> int:
        """The most bytes that were in use so far."""
        ...

    def running(self, deterministic: bool) -> contextlib.AbstractContextManager[Any]:
        """Inside, ops run with this place's kernels; a lack of memory is penstock's OutOfMemory."""
        ...


class Host:
    """Host memory; `reference` runs the definitions of the ops instead of their kernels."""

    memory = "memory"
    grid = PAGE
    pages = 4
    joins = 1
    draws = False

    def __init__(self, reference: bool = False) -> None:
        self.reference = reference
        self.kernels = "" if reference else "cpu"

    def put(self, value: Any) -> Any:
        return value

    def host(self, array: Any) -> np.ndarray:
        return array.copy()

    def zeros(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.zeros(shape, numpy_dtype(dtype))

    def copy(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def copy_all(self, into: Seq[np.ndarray], arrays: Seq[np.ndarray]) -> None:
        for target, array in zip(into, arrays, strict=True):
            np.copyto(target, array)

    def inputs(self, wanted: Seq[tuple[tuple[int, ...], str]]) -> Inputs:
        return _HostInputs(wanted)

    def arena(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def compile(self, calls: Seq[Callable[[], object]]) -> None:
        pass

    def captured(self, calls: Seq[Callable[[], object]]) -> Callable[[], object]:
        kept = tuple(calls)

        def replay() -> None:
            for call in kept:
                call()

        return replay

    def drawing(self, logits: Any, here: Mapping[str, Any]) -> Drawing:
        raise NotImplementedError

    def rows(self, count: int) -> int:
        return count

    def tier(self, host: str, top_k: int) -> Tier:
        if host != "auto":
            raise InvalidArgument(f"load: expert_host is {host!r}, expected 'auto': it is the memory behind a GPU's")
        return HostTier()

    def missing(self, tier: Tier, layers: int, width: int) -> Missing | None:
        return None

    def free(self) -> int:
        return available_memory()

    def peak(self) -> int:
        return peak_memory()

    def running(self, deterministic: bool) -> contextlib.AbstractContextManager[Any]:
        return backend("reference") if self.reference else contextlib.nullcontext()


class _HostInputs:
    def __init__(self, wanted: Seq[tuple[tuple[int, ...], str]]) -> None:
        self.host = [np.zeros(shape, numpy_dtype(dtype)) for shape, dtype in wanted]
        self.here = list(self.host)

    def send(self) -> None:
        pass

    def ready(self) -> None:
        pass


def place_of(device: str) -> Place:
    """The place of a device: "cpu", "reference" or "cuda". Raises BackendError where CUDA cannot be used."""
    if device != "cuda":
        return Host(device == "reference")
    from penstock.backends.cuda.place import Gpu

    return Gpu()
