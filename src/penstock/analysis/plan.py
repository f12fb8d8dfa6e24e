"""Where the parts of a model go, what a token moves, and how long that takes: the numbers of `penstock plan`.

Nothing is loaded: a model is outlined from its files or its config.json.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock import models
from penstock.analysis.bandwidth import bandwidth_of
from penstock.analysis.expert_routes import load_expert_routes
from penstock.analysis.measured import MeasuredShare, measured_share
from penstock.analysis.ranks import Link, PlannedRanks, busiest_rank, possible_sizes, sums_of, tracing_as
from penstock.analysis.trace import Outline, Work, outline_of, outlined_head, outlined_programs
from penstock.analysis.weights import distinct
from penstock.backends.cuda.runtime.features import unusable
from penstock.engine.buckets import BucketedSteps
from penstock.engine.cache import Caches
from penstock.engine.expert_weights import expert_layers_of, packed_beside
from penstock.engine.options import WORKING_BYTES, resolve_options, resolve_state_dtype
from penstock.engine.programs import Programs
from penstock.engine.rank import RankStart
from penstock.engine.speculate import MOST_DRAFTS
from penstock.errors import CheckpointError, InvalidArgument
from penstock.experts.packed import open_packed
from penstock.experts.policy import AUTO
from penstock.experts.reader import ExpertReader
from penstock.experts.simulate import Trace, simulate
from penstock.graph import Program, fuse
from penstock.machine import available_memory
from penstock.models import mtp
from penstock.models.split import Mesh
from penstock.models.step import PAGE, with_room
from penstock.ops.device import device_for, device_type
from penstock.weights.resolve import ResolvedModel

_CONTEXT = 8192  # positions that are planned for by default
_DRIVER = 512 << 20  # bytes of GPU memory that the driver, torch and compiled kernels take
_PROCESS = 2 << 30  # bytes of host memory that a process with torch takes


# --------------------------------------------------------------------------------------------------------------------
# The model


@dataclass(frozen=True)
class PlannedModel:
    """A model without its weights, or the part of a rank of it.

    given: what the user called it, None for the demo model. parts: bytes by name, experts not among them. experts: that
    are here, of all that a token chooses from. layers: bytes of one expert of each layer that has experts. active:
    bytes of everything else that a token reads. arena: bytes for the values of a prefill's chunk. files: a folder or
    .gguf file, if the weights are here. ranks: how the model is split, None: it is whole.
    """

    given: str | None
    name: str
    family: str
    config: Any
    caches: Caches
    parts: dict[str, int]
    experts: int
    all_experts: int
    top_k: int
    layers: tuple[int, ...]
    active: int
    arena: int
    files: Path | None
    ranks: PlannedRanks | None = None

    @property
    def dense(self) -> int:
        """Bytes of all weights but the experts."""
        return sum(self.parts.values())

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts."""
        return self.experts * sum(self.layers)

    @property
    def chosen_bytes(self) -> int:
        """Bytes of the experts that a token chooses; of a split model those of the rank that has the most of them."""
        return round((self.top_k if self.ranks is None else self.ranks.busiest) * sum(self.layers))

    @property
    def least(self) -> int:
        """Bytes of slots without which a token cannot be computed."""
        return min(self.top_k, self.experts) * sum(set(self.layers))

    @property
    def streams(self) -> bool:
        """Whether experts can stay in their files."""
        return bool(self.layers) and not (self.ranks is not None and self.ranks.experts_split)


def subject_of(
    found: ResolvedModel, given: str | None, device: str, state_dtype: str = "auto", ranks: RankStart | None = None
) -> PlannedModel:
    """A model as it would run on a device, or on the largest of several ranks; given: what the user called it.

    Raises InvalidArgument for a model that cannot be split so.
    """
    outline = outline_of(found, None)
    whole = _outlined(outline, device, state_dtype, None)
    model = PlannedModel(
        given=given,
        name=found.hub_id or found.name,
        family=outline.family.name,
        config=whole.programs.config,
        caches=whole.programs.caches,
        parts=whole.parts,
        experts=whole.experts,
        all_experts=whole.experts,
        top_k=getattr(whole.programs.config, "top_k", 0) if whole.layers else 0,
        layers=whole.layers,
        active=whole.active,
        arena=0,
        files=None if found.kind == "config" else found.path,
    )
    if ranks is None:
        return replace(model, caches=_with_drafts(whole), arena=_arena(whole.programs, device))
    ranks.check(outline.family, outline.config, outline.columns)
    meshes = [Mesh(rank, ranks.size, ranks.experts_split) for rank in range(ranks.size)]
    return _split(model, whole, [_outlined(outline, device, state_dtype, mesh) for mesh in meshes], outline, device)


@dataclass(frozen=True)
class _Outlined:
    """What a model, or a rank of it, has: bytes by part, by part and field, experts, the bytes of one in each layer."""

    programs: Programs
    parts: dict[str, int]
    fields: dict[tuple[str, str], int]
    experts: int
    layers: tuple[int, ...]
    active: int
    head: mtp.Head | None

    @property
    def all_parts(self) -> dict[str, int]:
        """Bytes by part, experts among them."""
        return self.parts | {"experts": self.experts * sum(self.layers)}


def _outlined(outline: Outline, device: str, state_dtype: str, mesh: Mesh | None) -> _Outlined:
    _, dtype, activations = resolve_options(device)
    states = resolve_state_dtype(state_dtype, device)
    programs = outlined_programs(outline, dtype, activations, Work("decode", 1, 0), states, mesh)
    parts, fields, active = dict.fromkeys(_PARTS.values(), 0), defaultdict(int), 0.0
    experts, count = defaultdict(int), 0
    for weight in distinct(programs):
        if weight.role != "experts":
            parts[_PARTS[weight.role]] += weight.nbytes
            fields[_PARTS[weight.role], weight.path.rpartition(".")[2]] += weight.nbytes
            active += weight.read_by(1)
        elif weight.shape[0]:
            count = weight.shape[0]
            experts[weight.layer] += weight.nbytes // count
    layers = tuple(experts[layer] for layer in sorted(experts))
    if (head := outlined_head(outline, programs)) is not None:
        own = models.bytes_of((programs.weights, head)) - models.bytes_of(programs.weights)
        parts["draft head"] = fields["draft head", "draft head"] = own
    parts = {part: nbytes for part, nbytes in parts.items() if nbytes}
    return _Outlined(programs, parts, dict(fields), count, layers, round(active), head)


def _with_drafts(whole: _Outlined) -> Caches:
    """Caches as `load` makes them: recurrent states with room for drafts, and those of the head."""
    caches, family, head = whole.programs.caches, whole.programs.family, whole.head
    layouts = caches.layouts if family.commit is None else with_room(caches.layouts, 1 + MOST_DRAFTS)
    if head is not None:
        layouts = (*layouts, mtp.layout(head, family))
    return Caches(layouts, caches.dtype, caches.device)


def _arena(programs: Programs, device: str) -> int:
    """Bytes for the values of the longest chunk of a prompt."""
    kind = device_type(device)
    whole = kind.captures and not any(window is not None for window in programs.caches.pools)
    chunk = min(BucketedSteps.most_tokens if whole else kind.chunk_alignment, programs.config.max_positions)
    return Program(programs.graph(chunk, 1, -(-chunk // PAGE), R=1), device).arena_bytes


def _split(
    model: PlannedModel, whole: _Outlined, found: list[_Outlined], outline: Outline, device: str
) -> PlannedModel:
    """The largest rank of a model; whole and found: outlines of all of it and of each rank."""
    caches = tuple(one.programs.caches for one in found)
    sizes = [sum(one.all_parts.values()) + one.programs.caches.bytes_of(_CONTEXT) for one in found]
    largest = sizes.index(max(sizes))
    own = found[largest]
    mesh = own.programs.mesh
    assert mesh is not None
    more = {key: sum(one.fields.get(key, 0) for one in found) - nbytes for key, nbytes in whole.fields.items()}
    repeated: dict[str, dict[str, int]] = defaultdict(dict)
    for (part, field), nbytes in sorted(more.items(), key=lambda one: -one[1]):
        if nbytes > 0:
            repeated[part][field] = nbytes
    with tracing_as(mesh):
        sums = sums_of(fuse(own.programs.graph(1, 1, 1, R=1, decode=True), device))
        arena = _arena(own.programs, device)
    ranks = PlannedRanks(
        size=mesh.size,
        experts_split=mesh.experts_split,
        largest=largest,
        whole=model.parts | ({"experts": model.expert_bytes} if model.layers else {}),
        repeated=dict(repeated),
        caches=(model.caches, caches),
        sums=sums,
        busiest=model.top_k if mesh.experts_split else busiest_rank([one.experts for one in found], model.top_k),
        sizes=possible_sizes(outline, mesh.experts_split),
    )
    return replace(
        model,
        caches=caches[largest],
        parts=own.parts,
        experts=own.experts,
        layers=own.layers,
        active=max(one.active for one in found),
        arena=arena,
        ranks=ranks,
    )


# what roles of weights are called here, in the order in which they are shown
_PARTS = {
    "embedding": "embeddings",
    "head": "head",
    "router": "router",
    "attention": "attention",
    "MLP": "shared and dense",
    "norms": "norms and others",
}


# --------------------------------------------------------------------------------------------------------------------
# Memory


def device_of(given: str) -> str:
    """The device that "auto" and the settings stand for."""
    device = resolve_options(given).device
    if device == "reference":  # by PENSTOCK_DEVICE
        raise InvalidArgument("plan: device is 'reference', expected cpu or cuda")
    return device


@dataclass(frozen=True)
class Memory:
    """Bytes that may be taken: on the device, and of a GPU's host (0 on the CPU, where both are the same)."""

    device: int
    host: int


def memory_of(device: str, own: int | None, host: int | None, ranks: int = 1) -> Memory:
    """Of a rank: as given, else what is free, of the host's a share. Raises InvalidArgument for a GPU that is not here,
    and on the CPU for both.
    """
    free = available_memory() // ranks
    if device == "cpu":
        if own is not None and host is not None:
            raise InvalidArgument("--host-memory: on the CPU it is the device's memory, expected --device-memory alone")
        return Memory(next(size for size in (own, host, free) if size is not None), 0)
    if own is None:
        if (why := unusable()) is not None:
            raise InvalidArgument(f"--device-memory: expected for a GPU that is not here ({why})")
        own = device_for("cuda").free_memory() + _DRIVER
    return Memory(own, free if host is None else host)


@dataclass(frozen=True)
class Room:
    """Where everything goes. Of the experts `cache` bytes are in slots of the device, `host` in host memory.

    resident: all experts are on the device. fits: there is room for what a token needs at least. need: the memory that
    the device would have to have at least.
    """

    context: int
    caches: int
    working: int
    cache: int
    host: int
    resident: bool
    fits: bool
    need: int


def room_of(subject: PlannedModel, device: str, memory: Memory, max_context: int | None) -> Room:
    """First everything that is no expert, then as many experts as go into the rest."""
    limit = subject.config.max_positions
    if max_context is not None and not 1 <= max_context <= limit:
        raise InvalidArgument(f"--max-context: is {max_context}, expected 1 to {limit} (the model's positions)")
    context = max_context or min(limit, _CONTEXT)
    caches = subject.caches.bytes_of(context)
    working = subject.arena + WORKING_BYTES + (_DRIVER if device == "cuda" else 0)
    rest = subject.dense + caches + working
    left = memory.device - rest
    resident = left >= subject.expert_bytes
    least = subject.least if subject.streams else subject.expert_bytes
    cache = subject.expert_bytes if resident else max(0, left)
    host = 0
    if device == "cuda" and not resident:
        host = max(0, min(subject.expert_bytes, memory.host - _PROCESS))
        host = host if host > cache else 0  # it holds what is on the device, too
    return Room(context, caches, working, cache, host, resident, resident or left >= least, rest + least)


# --------------------------------------------------------------------------------------------------------------------
# Speed


class Hits:
    """The share of choices that a cache of a share of the experts has: the same, or that of a recorded text."""

    def __init__(self, trace: Trace | None) -> None:
        self.trace = trace
        self._known: dict[int, float] = {}

    def rate(self, share: float) -> float:
        if self.trace is None or share >= 1 or share <= 0:
            return min(max(share, 0.0), 1.0)
        slots = max(self.trace.least, int(share * self.trace.keys))
        if slots not in self._known:
            hits = simulate(self.trace, slots, AUTO)
            self._known[slots] = float(hits.sum() / self.trace.chosen.sum())
        return self._known[slots]


def trace_of(path: Path, subject: PlannedModel) -> Trace:
    """A recorded text. Raises InvalidArgument if it is another model's or has no answer."""
    recorded = load_expert_routes(path)
    own = (len(subject.layers), subject.all_experts, subject.top_k)
    found = (len(recorded.layers), recorded.experts, recorded.ids.shape[2])
    if found != own:
        raise InvalidArgument(
            f"--routes: {path}: has {found[0]} layers of {found[1]} experts, {found[2]} per token, "
            f"expected {own[0]} of {own[1]}, {own[2]} per token, as {subject.name} has"
        )
    if not recorded.decode.any():
        raise InvalidArgument(f"--routes: {path}: has no decoded tokens, expected a recording with an answer")
    return Trace(recorded.ids, recorded.decode, recorded.experts)


@dataclass(frozen=True)
class Speed:
    """A bandwidth in GB/s and how it is known; None where it could not be measured. io: how files are read best."""

    rate: float | None
    how: str
    io: str = "auto"


def speeds_of(
    subject: PlannedModel, device: str, room: Room, given: Mapping[str, float | None], notify: Callable[[str], None]
) -> dict[str, Speed]:
    """Of the memory, the link to a GPU and the disk, as far as a token needs them; `given` are options by name.

    Ranks share the disk, and on the CPU the memory: each has a part of what is measured. notify: gets a remark about a
    packed file that cannot be used.
    """
    found: dict[str, Speed] = {}
    ranks = 1 if subject.ranks is None else subject.ranks.size
    elsewhere = device == "cuda" and unusable() is not None

    def know(way: str, missing: str | None, measured: Callable[[], Speed]) -> None:
        """As given, else unknown if something is missing for a measurement, else measured."""
        option = f"--{way}-bandwidth"
        if (rate := given[option]) is not None:
            found[way] = Speed(rate, "as given")
        else:
            found[way] = measured() if missing is None else Speed(None, f"{missing}; {option} tells")

    no_gpu = "there is no GPU here" if elsewhere else None
    know("memory", no_gpu, lambda: _shared(Speed(*bandwidth_of(device, None)), ranks if device == "cpu" else 1))
    if room.resident:
        return found
    if device == "cuda":
        know("link", no_gpu, lambda: _link(device))
    files = subject.files if subject.streams else None
    no_files = "no files here to measure it on" if files is None else None
    know("disk", no_files, lambda: _shared(_disk(Path(files or ""), notify), ranks))
    return found


def _shared(speed: Speed, ranks: int) -> Speed:
    if ranks == 1 or speed.rate is None:
        return speed
    return replace(speed, rate=speed.rate / ranks, how=f"{speed.how}, shared by {ranks} ranks")


def _link(device: str) -> Speed:
    rate = device_for(device).link_rate()
    return Speed(rate, "no room for a measurement" if rate is None else "a copy from pinned memory")


def _disk(files: Path, notify: Callable[[str], None]) -> Speed:
    """Reading the experts of a checkpoint, or of its packed file, in the way that loading would choose."""
    (layers, fingerprint), what, packed = expert_layers_of(files), "experts", packed_beside(files)
    if packed.is_file():
        try:
            layers, what = open_packed(packed, layers, fingerprint), "packed experts"
        except CheckpointError as error:
            notify(f"{error}; experts are read from the checkpoint")
    with ExpertReader(layers) as reader:
        return Speed(reader.bandwidth / 1e9, f"{reader.io} reads of {what}", reader.io)


@dataclass(frozen=True)
class TokenCost:
    """Bytes that a token moves over each way, and the seconds they need; None where a bandwidth is not known.

    sums: of these, what sums over ranks take. expected: seconds with the share of the memory's speed that was measured,
    None where none was.
    """

    moved: dict[str, int]
    seconds: float | None
    sums: float = 0.0
    expected: float | None = None

    @property
    def rate(self) -> float | None:
        """Tokens per second at most."""
        return 1 / self.seconds if self.seconds else None

    @property
    def expected_rate(self) -> float | None:
        return 1 / self.expected if self.expected else None


@dataclass(frozen=True)
class ModelPlan:
    """All of it, and what follows for a token."""

    subject: PlannedModel
    device: str
    memory: Memory
    room: Room
    speeds: dict[str, Speed]
    hits: Hits
    link: Link | None = None  # between ranks

    @property
    def share(self) -> float:
        """Of the experts, those in slots."""
        return self.room.cache / self.subject.expert_bytes if self.subject.layers else 1.0

    @property
    def host_share(self) -> float:
        """Of the experts, those in slots or in host memory."""
        return max(self.share, self.room.host / self.subject.expert_bytes) if self.subject.layers else 1.0

    @property
    def hit(self) -> float:
        """Of the choices, those in slots."""
        return self.hits.rate(self.share)

    @property
    def known(self) -> float:
        """Of the choices, those in slots or in host memory."""
        return max(self.hit, self.hits.rate(self.host_share))

    def step(self, warm: bool) -> TokenCost:
        """A token: with the hit rates that a run comes to, or with nothing in slots and host memory yet."""
        chosen = self.subject.chosen_bytes
        moved = {"memory": self.subject.active + chosen}
        if not self.room.resident:
            moved |= {"link": round(chosen * (1 - self.hit * warm))} if "link" in self.speeds else {}
            moved["disk"] = round(chosen * (1 - self.known * warm))
        ranks = self.subject.ranks
        sums = 0.0 if ranks is None or self.link is None else ranks.seconds(self.link)
        seconds = sums
        for way, nbytes in moved.items():
            rate = self.speeds[way].rate
            if rate is None and nbytes:
                return TokenCost(moved, None, sums)
            seconds += nbytes / (rate * 1e9) if rate is not None else 0.0
        expected = None if self.measured is None else sums + (seconds - sums) / self.measured.share
        return TokenCost(moved, seconds, sums, expected)

    @property
    def measured(self) -> MeasuredShare | None:
        """The share of the memory's speed to expect; of streamed experts none is known."""
        if not self.room.resident:
            return None
        return measured_share(self.device, self.subject.family, self.speeds["memory"].rate)

    @property
    def flags(self) -> list[str]:
        """What to add to a command line."""
        flags: list[str] = []
        if self.subject.ranks is not None:
            flags = ["-tp", str(self.subject.ranks.size)]
            flags += ["--expert-parallel", "off"] if self.subject.ranks.experts_split else []
        if not self.room.fits:
            return []
        if self.room.resident:
            return flags
        flags += ["--expert-cache", _flag(self.room.cache, self.subject.least)]
        if self.room.host:
            flags += ["--expert-host", _flag(self.room.host, 0)]
        return [*flags, "--expert-io", self.speeds["disk"].io]


def _flag(nbytes: int, least: int) -> str:
    """A size for the command line, rounded down, but not below the least."""
    for unit, factor in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        tenths = nbytes * 10 // factor
        if tenths >= 10 and tenths * factor // 10 >= least:
            return f"{tenths / 10:g}{unit}"
    return str(nbytes)


@dataclass(frozen=True)
class CacheNeeds:
    """What caches take: per 1000 positions, in all layers with a window once it is full, and per sequence."""

    per_1000: int
    windows: int
    state: int


def cache_needs(caches: Caches) -> CacheNeeds:
    far = 1 << 40  # positions, beyond every window
    state, each = caches.bytes_of(0), (caches.bytes_of(far + PAGE) - caches.bytes_of(far)) // PAGE
    return CacheNeeds(1000 * each, caches.bytes_of(far) - far * each - state, state)
