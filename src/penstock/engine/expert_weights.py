"""From options to streamed experts: which budget, which files, and a model's weights on slots instead of files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock import models
from penstock.errors import CheckpointError, InvalidArgument, OutOfMemory
from penstock.experts.layout import ExpertFiles, Layer
from penstock.experts.packed import NAME as PACKED
from penstock.experts.packed import open_packed
from penstock.experts.policy import POLICIES
from penstock.experts.reader import IO, ExpertReader
from penstock.experts.store import HostTier, Store, Tier, chosen_here, owned_bytes, slot_counts
from penstock.experts.streamed import Streamed
from penstock.models import replaced
from penstock.models.family import ConfigT, Family, WeightsT
from penstock.models.gguf import open_gguf
from penstock.models.layers import ExpertStack
from penstock.models.source import CheckpointSource, FileBackedSource, FilesSource, outlined
from penstock.ops.device import Device
from penstock.quant import BLOCK_TYPES, GgufPlanes, GgufTensor, QuantizedTensor, layout_in_planes
from penstock.units import parse_size, spelled
from penstock.weights.checkpoint import Checkpoint

_SHARE = 0.9  # of the free memory that experts may take with expert_cache 'auto'


@dataclass(frozen=True)
class ExpertOptions:
    """Where experts are kept, as `penstock.load` takes it: sizes ("12G", "50%") or "auto", and how files are read."""

    cache: str = "auto"
    host: str = "auto"
    io: str = "auto"
    policy: str = "auto"
    file: str | None = None  # a packed one; None: that in the model's folder, if there is one
    prefetch: bool = False  # read what the next layer will perhaps choose, on the CPU

    def __post_init__(self) -> None:
        for name, value, allowed in (("expert_io", self.io, IO), ("expert_policy", self.policy, ("auto", *POLICIES))):
            if value not in allowed:
                raise InvalidArgument(f"load: {name} is {value!r}, expected one of {', '.join(allowed)}")
        for name, value in (("expert_cache", self.cache), ("expert_host", self.host)):
            if not isinstance(value, str):
                raise InvalidArgument(f"load: {name} is {value!r}, expected a size such as '12G' or 'auto'")
            if value != "auto":
                parse_size(value, f"load: {name}", whole=0)

    @property
    def asked(self) -> bool:
        """Whether experts are to be streamed, however much memory there is."""
        return self.cache != "auto" or self.host != "auto"


def expert_layers(family: Family[ConfigT, WeightsT], source: FilesSource, config: ConfigT) -> list[Layer]:
    """The layers of a checkpoint that have experts, in the order in which they run. No weight is read."""
    return _layers(family.read_weights(FileBackedSource(source, outlined), config))


def expert_layers_of(path: Path) -> tuple[list[Layer], str]:
    """`expert_layers` of a model folder or a .gguf file, and the fingerprint of that model."""
    if path.is_file():
        model = open_gguf(path)
        return expert_layers(model.family, model.source, model.read_config()), model.fingerprint
    checkpoint = Checkpoint.open(path)
    family = models.family_of(checkpoint.config)
    config = family.read_config(checkpoint.config)
    source = CheckpointSource(checkpoint, *family.names(checkpoint, config))
    return expert_layers(family, source, config), checkpoint.fingerprint


def packed_beside(path: Path) -> Path:
    """Where the packed experts of a model folder or a .gguf file lie."""
    return (path.parent if path.suffix == ".gguf" else path) / PACKED


def budget_of(
    options: ExpertOptions,
    layers: Sequence[Layer],
    rest: int,
    device: Device,
    what: str,
    owned: Sequence[int] | None = None,
) -> int:
    """Bytes for slots on a device where `rest` bytes are taken by other things.

    owned: the experts of each layer that are this rank's, which "50%" and "auto" mean; None: all. Raises
    InvalidArgument for a model without experts, OutOfMemory for a budget that is not there.
    """
    if not layers:
        raise InvalidArgument(f"expert_cache: {what} has no experts, expected 'auto'")
    total, free = owned_bytes(layers, owned), device.free_memory() - rest
    if options.cache == "auto":
        return max(0, min(total, int(free * _SHARE)))
    budget = min(total, parse_size(options.cache, "load: expert_cache", whole=total))
    if budget > free:
        raise OutOfMemory(
            f"expert_cache: {spelled(budget)} of {device.memory_name} are asked for, "
            f"{spelled(max(free, 0))} are free beside the rest of the model"
        )
    return budget


def open_experts(
    weights: WeightsT,
    options: ExpertOptions,
    budget: int,
    top_k: int,
    device: Device,
    folder: Path,
    fingerprint: str,
    owned: Sequence[int] | None = None,
) -> tuple[WeightsT, Streamed, list[str]]:
    """A model's weights with slots instead of files, what fills them, and remarks.

    owned: the experts of each layer that are this rank's, ascending; None: all. No others are read.
    """
    layers = _layers(weights)
    slot_counts(layers, budget, top_k, owned)  # raises before anything is opened
    layers, notices = _packed(layers, options, folder, fingerprint)
    reader = ExpertReader(layers, options.io, owned=owned)
    try:
        tier = _tier(options, chosen_here(top_k, owned), device)
        store = Store(layers, reader, budget, top_k, options.policy, tier, owned)
    except BaseException:
        reader.close()
        raise
    slot_maps = tier.device_slot_maps(store)
    return _with_slots(weights, store, slot_maps), Streamed(store, slot_maps, device, tier, options.prefetch), notices


def _tier(options: ExpertOptions, top_k: int, device: Device) -> Tier:
    """Where slots are; host memory for a device that computes there."""
    if device.host_memory and options.host != "auto":
        raise InvalidArgument(
            f"load: expert_host is {options.host!r}, expected 'auto': it is the memory behind a GPU's"
        )
    return device.expert_tier(options.host, top_k) or HostTier()


def _packed(
    layers: list[Layer], options: ExpertOptions, folder: Path, fingerprint: str
) -> tuple[list[Layer], list[str]]:
    """The layers in a packed file, if there is one that fits; one that was named must."""
    path = folder / PACKED if options.file is None else Path(options.file)
    if options.file is None and not path.is_file():
        return layers, []
    try:
        return open_packed(path, layers, fingerprint), []
    except CheckpointError as error:
        if options.file is not None:
            raise
        return layers, [f"{error}; experts are read from the checkpoint"]


def _layers(weights: Any) -> list[Layer]:
    found: list[Layer] = []

    def add(stack: ExpertStack) -> ExpertStack:
        stacks = [files for files in (stack.gate, stack.up, stack.down) if isinstance(files, ExpertFiles)]
        name = stacks[0].name.rpartition(".")[0]
        found.append(Layer(name, tuple(part for files in stacks for part in files.parts)))
        return stack

    replaced(weights, ExpertStack, add)
    return found


def _with_slots(weights: WeightsT, store: Store, slot_of: Sequence[Any]) -> WeightsT:
    count = iter(range(len(store.layers)))

    def make(stack: ExpertStack) -> ExpertStack:
        n = next(count)
        arrays = iter(store.pool_of[n].slots.arrays)
        gate, up = _weight(stack.gate, arrays), None if stack.up is None else _weight(stack.up, arrays)
        return ExpertStack(gate, up, _weight(stack.down, arrays), slot_of[n])

    return replaced(weights, ExpertStack, make)


def _weight(files: Any, arrays: Iterator[Any]) -> Any:
    if files.format is None:
        return next(arrays)
    if files.format.mode in BLOCK_TYPES:
        first = next(arrays)
        if isinstance(first, np.ndarray):
            return GgufTensor(first, files.format.mode)
        rest = layout_in_planes(files.format.mode).planes[1:]
        return GgufPlanes([first, *(next(arrays) for _ in rest)], files.format.mode)
    return QuantizedTensor.of(files.format, [next(arrays) for _ in files.parts])
