"""Engine processes side by side on one machine: each gets cores or GPUs of its own, and a share of the memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.backends.cuda.runtime import features as cuda
from penstock.errors import BackendError, InvalidArgument
from penstock.machine import available_memory, cores, physical_cores


@dataclass(frozen=True)
class Resources:
    """What of this machine a process may use.

    cpus: hardware threads that it runs on (none: all). threads: of its CPU kernels. gpus: as CUDA_VISIBLE_DEVICES names
    them. memory: bytes of the host that it may allocate.
    """

    cpus: tuple[int, ...] = ()
    threads: int | None = None
    gpus: tuple[str, ...] = ()
    memory: int | None = None

    def environ(self) -> dict[str, str]:
        """Variables of the process."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}

    def statements(self) -> str:
        """Python for the beginning of the process, before anything counts processors or starts threads."""
        pin = f"import os; os.sched_setaffinity(0, {set(self.cpus)}); "
        limit = f"from penstock.machine import limit_memory; limit_memory({self.memory}); "
        can_pin = bool(self.cpus) and hasattr(os, "sched_setaffinity")
        return (pin if can_pin else "") + (limit if self.memory is not None else "")


def joined(parts: Sequence[Resources]) -> Resources:
    """What several processes have together: the ranks of one model, of which the first starts the others."""
    threads = [part.threads for part in parts if part.threads is not None]
    return Resources(
        tuple(sorted({cpu for part in parts for cpu in part.cpus})),
        sum(threads) if threads else None,
        tuple(gpu for part in parts for gpu in part.gpus),
        sum(part.memory for part in parts if part.memory is not None) or None,
    )


def share_machine(device: str, count: int, threads: int | None = None) -> list[Resources]:
    """Equal parts of this machine for `count` processes on "cpu", "reference" or "cuda", neighbours side by side: where
    a replica has T processes, the i-th one takes parts i * T to (i + 1) * T.

    On a CPU each has cores of its own, whole ones, as long as there are enough; threads: of all processes together, by
    default the cores. On GPUs each has one. Raises InvalidArgument for more processes than GPUs, BackendError where no
    GPU can be used.
    """
    memory = available_memory() // count
    if device == "cuda":
        return [Resources(gpus=(gpu,), memory=memory) for gpu in _gpus(count)]
    there, made = cores(), []
    granted = physical_cores() if threads is None else threads  # a control group may grant fewer than there are
    for n in range(count):
        own = there[n * len(there) // count : (n + 1) * len(there) // count] or [there[n % len(there)]]
        all_own = threads is None and granted == len(there)
        cpus = tuple(sorted(cpu for core in own for cpu in core))
        made.append(Resources(cpus, len(own) if all_own else max(1, granted // count), memory=memory))
    return made


def _gpus(count: int) -> list[str]:
    if (reason := cuda.unusable()) is not None:
        raise BackendError(f"cuda: no GPU can be used: {reason}")
    there = cuda.visible_gpus()
    if count > len(there):
        are = "is 1" if len(there) == 1 else f"are {len(there)}"
        raise InvalidArgument(f"{count} engines need a GPU each, there {are}")
    return there[:count]
