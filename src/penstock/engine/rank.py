"""From `penstock.load` to the ranks of a model: who starts them, which part each loads, and what they agree on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from penstock import __version__, errors
from penstock.engine.engine import AnyModel, Engine
from penstock.engine.options import resolve_options
from penstock.errors import BackendError, EngineDied, InvalidArgument, PenstockError
from penstock.machine import physical_cores
from penstock.models import bytes_of, replaced
from penstock.models.family import AnyFamily
from penstock.models.layers import ExpertStack
from penstock.models.split import Mesh, Split, SplitSource
from penstock.models.step import with_state_dtype
from penstock.ops.collective import set_communicator
from penstock.ops.device import Device
from penstock.parallel.group import RankGroup, torch_distributed
from penstock.parallel.launch import (
    RankOptions,
    RankProcesses,
    Torchrun,
    join_parent,
    join_torchrun,
    joined_by_torchrun,
    start_ranks,
)
from penstock.settings import Settings

LOAD_SECONDS = 3600.0  # for the slowest rank to load its part
_ENTRY = "penstock.api:follow_rank"
_MOST_RANKS = 1024
_LINGER = 3.0
_SETTINGS = ("device", "dtype", "activations", "state_dtype", "deterministic")  # that ranks must have in common

WeightsT = TypeVar("WeightsT")
_open: list[Rank] = []  # of this process: one at a time, since collectives of a step reach one group


class Rank:
    """This process among the ranks of a model that is being loaded, and after that.

    options: of `load`, as this rank has them. local_size: ranks on this machine.
    """

    def __init__(
        self, group: RankGroup, mesh: Mesh, options: Mapping[str, Any], local_size: int, processes: RankProcesses | None
    ) -> None:
        self.group, self.mesh, self.options = group, mesh, options
        self.local_size, self._processes = local_size, processes
        self._whole: Any = None  # the config of the whole model
        self._columns = 1
        self._split: Split[Any] | None = None
        self._leader: Any = None

    @property
    def leads(self) -> bool:
        return self.mesh.rank == 0

    @property
    def size(self) -> int:
        return self.mesh.size

    def split(self, family: AnyFamily, source: Any, config: Any, columns: int) -> tuple[Any, Any]:
        """This rank's part of a source, and its config. Raises InvalidArgument where the model cannot be split so."""
        if self.mesh.experts_split and config.experts and self.options["expert_cache"] != "auto":
            raise InvalidArgument("load: expert_cache is given, expected 'auto' where experts are split by their width")
        self._whole, self._columns = config, columns
        self._split = self._split_of(family, self.mesh.rank)
        return SplitSource(source, self._split, self.mesh), self._split.config

    def _split_of(self, family: AnyFamily, rank: int) -> Split[Any]:
        assert family.split is not None
        return family.split(self._whole, replace(self.mesh, rank=rank), self._columns)

    def with_slots(self, weights: WeightsT, config: Any, device: Device) -> WeightsT:
        """Weights whose experts are this rank's alone, with where each of all is."""
        if not config.experts or self.mesh.experts_split:
            return weights
        slot_of = device.to_device(self.mesh.slot_of(config.experts))
        return replaced(weights, ExpertStack, lambda stack: replace(stack, slot_of=slot_of))

    def part(self, model: AnyModel) -> AnyModel:
        """The model as this rank has it."""
        return replace(model, split=self._split, mesh=self.mesh, nbytes=bytes_of((model.weights, model.head)))

    def leader(self, family: AnyFamily, state_dtype: str) -> Any:
        """What tells the other ranks, on rank 0."""
        if not self.leads:
            return None
        from penstock.engine.ranks import Leader

        splits = [self._split_of(family, rank) for rank in range(self.size)]
        layouts = with_state_dtype(family.caches(self._whole), state_dtype)
        sharing = _ranks_of_one_gpu(self.local_size) if self.options["device"] == "cuda" else 1
        self._leader = Leader(self.group, splits, layouts, self.local_size, sharing)
        return self._leader

    def agree(self, engine: Engine) -> None:
        """Wait for all ranks to have loaded. Raises what one failed with, and InvalidArgument where they differ."""
        settings = {name: str(getattr(engine, name, None) or engine.device.name) for name in _SETTINGS}
        settings["device"] = engine.device.name
        own = {
            "penstock": __version__,
            "weights": engine.model.fingerprint,
            "settings": settings | {"experts_split": self.mesh.experts_split, "columns": self._columns},
            "context": engine.max_context,
            "answers": engine.most_sequences,
        }
        found = self._exchange(own)
        for rank, other in enumerate(found):
            for key in ("penstock", "weights", "settings"):
                if other[key] != found[0][key]:
                    raise InvalidArgument(
                        f"rank {rank}: {key} differ from rank 0's: {_shown(other[key])}, "
                        f"expected {_shown(found[0][key])}"
                    )
        engine.max_context = min(other["context"] for other in found)
        if engine.programs is not None:
            engine.programs.max_context = engine.max_context
            engine.programs.most_of_ranks = min(other["answers"] for other in found)

    def _exchange(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        found = [json.loads(one) for one in self.group.exchange("loaded", json.dumps(own).encode(), LOAD_SECONDS)]
        for rank, other in enumerate(found):
            if "error" in other:
                kind = getattr(errors, str(other["kind"]), EngineDied)
                raise kind(other["error"] if rank == 0 else f"rank {rank}: {other['error']}")
        return found

    def failed(self, error: BaseException) -> None:
        """Loading failed here: so it does on all ranks."""
        with contextlib.suppress(EngineDied, RuntimeError):
            kind = type(error).__name__ if isinstance(error, PenstockError) else "EngineDied"
            text = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
            self.group.announce("loaded", json.dumps({"error": text, "kind": kind}).encode())

    def follow(self, engine: Engine) -> NoReturn:
        """Do what rank 0 says until it ends, then end this process."""
        from penstock.engine.ranks import Follower

        try:
            Follower(engine, self.group).run()
        except BaseException as error:
            cause = str(error) if isinstance(error, EngineDied) else f"{type(error).__name__}: {error}"
            self.group.fail(cause if cause.startswith("rank ") else f"rank {self.mesh.rank}: {cause}")
            sys.exit(1)
        self.group.close()
        sys.exit(0)

    def close(self) -> None:
        """End the other ranks."""
        if self._leader is not None:
            self._leader.end()
        self.group.close()
        if self._processes is not None:
            self._processes.close()
        if self in _open:
            _open.remove(self)
            set_communicator(None)


@dataclass(frozen=True)
class RankStart:
    """Ranks that `load` was asked for, before there are any."""

    size: int
    experts_split: bool
    step_seconds: float
    torchrun: Torchrun | None

    def check(self, family: AnyFamily, config: Any, columns: int) -> None:
        """Raise InvalidArgument for a model that cannot be split so, on whichever rank."""
        if family.split is None:
            raise InvalidArgument(
                f"tensor_parallel_size is {self.size}, expected 1: models of the family {family.name} are not split"
            )
        for rank in range(self.size):
            family.split(config, Mesh(rank, self.size, self.experts_split), columns)

    @contextlib.contextmanager
    def loading(self, given: Mapping[str, Any]) -> Iterator[Rank]:
        """Around loading this rank's part. If that fails all ranks end."""
        if _open:
            raise InvalidArgument(
                f"tensor_parallel_size is {self.size}, expected 1: this process has a split model; close it first"
            )
        local = self.size if self.torchrun is None else self.torchrun.local_size
        options = rank_options(given, local)
        how = RankOptions(rank_backend(options["device"], local), self.step_seconds)
        processes = None
        if self.torchrun is None:
            start = {"given": dict(given), "experts_split": self.experts_split}
            processes = start_ranks(self.size, how, _ENTRY, start)
        try:
            if processes is not None:
                group, number, place = processes.join(), 0, 0
            else:
                assert self.torchrun is not None
                group, number, place = join_torchrun(self.torchrun, how), self.torchrun.rank, self.torchrun.local_rank
            rank = Rank(group, Mesh(number, self.size, self.experts_split), options, local, processes)
        except BaseException:
            if processes is not None:
                processes.close()
            raise
        yield from _loading(rank, place, _LINGER)


@contextlib.contextmanager
def following(about: Mapping[str, Any]) -> Iterator[Rank]:
    """Around loading the part of a rank that another process has started."""
    start, size = about["start"], about["size"]
    options = rank_options(start["given"], size)
    mesh = Mesh(about["rank"], size, start["experts_split"])
    yield from _loading(Rank(join_parent(dict(about)), mesh, options, size, None), mesh.rank)


def _loading(rank: Rank, place: int, linger: float = 0.0) -> Iterator[Rank]:
    """linger: seconds by which rank 0 ends before the others, so that it says why and torchrun does not stop it."""
    _open.append(rank)
    set_communicator(rank.group)
    try:
        if rank.options["device"] == "cuda":
            import torch

            torch.cuda.set_device(place % torch.cuda.device_count())
        yield rank
    except BaseException as error:
        rank.failed(error)
        if rank.leads:
            rank.close()
            raise
        rank.group.close()
        time.sleep(linger)
        sys.exit(1)


def rank_options(given: Mapping[str, Any], local: int) -> dict[str, Any]:
    """Options of `load` for one of `local` ranks on this machine: its device by name, its share of the cores."""
    device = resolve_options(given["device"], given["dtype"], given["activations"]).device
    threads = given["threads"] or Settings.from_env().threads or physical_cores()
    return {**given, "device": device, "threads": max(1, threads // local)}


def rank_backend(device: str, local: int) -> str:
    """By what arrays of steps travel. Raises BackendError for more ranks than GPUs."""
    chosen = Settings.from_env().rank_backend
    if device != "cuda":
        return "gloo"
    torch_distributed()
    import torch

    count = torch.cuda.device_count()
    if chosen != "gloo" and local > count:
        raise BackendError(f"tensor_parallel_size: {local} ranks on this machine, expected at most {count} (its GPUs)")
    return "gloo" if chosen == "gloo" else "nccl"


def _ranks_of_one_gpu(local: int) -> int:
    import torch

    return -(-local // torch.cuda.device_count())


def ranks_of(size: Any, expert_parallel: Any, step_timeout: Any) -> RankStart | None:
    """The ranks that `load` is asked for, by its arguments and by torchrun; None: a model in this process alone."""
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= _MOST_RANKS:
        raise InvalidArgument(f"load: tensor_parallel_size is {size!r}, expected 1 to {_MOST_RANKS}")
    if not isinstance(expert_parallel, bool):
        raise InvalidArgument(f"load: expert_parallel is {expert_parallel!r}, expected True or False")
    real = isinstance(step_timeout, int | float) and not isinstance(step_timeout, bool)
    if not real or not 0 < step_timeout < math.inf:
        raise InvalidArgument(f"load: step_timeout is {step_timeout!r}, expected seconds above 0")
    found = joined_by_torchrun()
    if found is not None and size not in (1, found.size):
        raise InvalidArgument(
            f"load: tensor_parallel_size is {size}, expected {found.size}: so many processes were started by torchrun"
        )
    if found is None and size == 1:
        return None
    return RankStart(size if found is None else found.size, not expert_parallel, float(step_timeout), found)


def warn_of_cores(size: int, device: str, notify: Callable[[str], None]) -> None:
    """Say so if ranks on the CPU are more than its cores."""
    if device != "cuda" and size > (cores := physical_cores()):
        notify(f"tensor_parallel_size: {size} ranks share {cores} cores, which makes them slower than one")


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value[:16]
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8] + " " + str(value)[:160]
