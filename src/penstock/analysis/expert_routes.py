"""Which experts each token chose, recorded while a model reads a prompt and answers it.

The expert ops of every program copy their ids into one buffer, which is read after each step: the copies are part of
what a GPU replays, so a recorded model runs as it always does.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.analysis.weights import expert_layers, walk
from penstock.engine.admission import all_memory
from penstock.engine.engine import Engine, Model
from penstock.engine.heat import EXPERT_OPS, experts_of, ids_of, noting
from penstock.engine.scheduler import SchedulableModel, Scheduler
from penstock.errors import CheckpointError, InvalidArgument
from penstock.experts.simulate import Row, Trace, repeats, table
from penstock.graph import Node
from penstock.ops.array import address, leaves

if TYPE_CHECKING:
    pass

FORMAT = "penstock-routes"
VERSION = 1

_LIMIT = 1 << 30  # bytes of a file's arrays
# how a damaged archive, header or text may fail
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, TypeError, KeyError, RuntimeError, MemoryError)


@dataclass(frozen=True, eq=False)
class ExpertRoutes:
    """A text and the experts that each of its tokens chose.

    T tokens, L layers with experts, k choices, E experts. tokens int32 [T] are those that were computed (the last one
    of an answer never is), texts what each added to the text; ids int32 [T, L, k], −1 where a layer has none; decode
    bool [T]: computed by itself, not in a prefill. layers are the numbers of the L layers in the model, expert_bytes
    the bytes of one expert of each.
    """

    model: str
    tokens: np.ndarray
    texts: tuple[str, ...]
    ids: np.ndarray
    decode: np.ndarray
    experts: int
    layers: tuple[int, ...]
    expert_bytes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of all experts of all layers."""
        return self.experts * sum(self.expert_bytes)

    def counts(self) -> np.ndarray:
        """How often each expert was chosen, int64 [L, E]."""
        rows = self.ids.transpose(1, 0, 2)
        return np.stack([np.bincount(ids[ids >= 0], minlength=self.experts) for ids in rows]).astype(np.int64)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a compressed .npz, under a temporary name first. Raises InvalidArgument if that fails."""
        about = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "experts": self.experts,
            "layers": self.layers,
            "expert_bytes": self.expert_bytes,
            "texts": self.texts,
        }
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        try:
            with temporary.open("wb") as file:
                np.savez_compressed(file, tokens=self.tokens, ids=self.ids, decode=self.decode, about=text)
            temporary.replace(target)
        except OSError as error:
            raise InvalidArgument(f"{target}: cannot be written: {error.strerror or error}") from None
        finally:
            temporary.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------------------------
# Files


def load_expert_routes(path: str | os.PathLike[str]) -> ExpertRoutes:
    """The recording of a file that `ExpertRoutes.save` wrote. Raises CheckpointError for anything else."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
            if size > _LIMIT:
                raise CheckpointError(f"{path}: unpacks to {size} bytes, expected at most {_LIMIT}")
            arrays = {name: _member(archive, name) for name in ("tokens", "ids", "decode", "about")}
        about = json.loads(arrays["about"].tobytes())
        kind = about["format"], about["version"]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except _DAMAGE as error:
        reason = str(error).partition("\n")[0][:100] or type(error).__name__
        raise CheckpointError(f"{path}: is no recorded routing: {reason}") from None
    if kind != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path}: is {str(kind[0])[:40]!r} version {str(kind[1])[:20]}, expected {FORMAT!r} version {VERSION}"
        )
    return _checked(f"{path}", about, arrays)


def _member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _checked(where: str, about: dict[str, Any], arrays: dict[str, np.ndarray]) -> ExpertRoutes:
    """Raises CheckpointError unless everything fits together."""
    tokens, ids, decode = arrays["tokens"], arrays["ids"], arrays["decode"]
    numbers = [about.get("experts"), *_listed(about.get("layers")), *_listed(about.get("expert_bytes"))]
    texts, layers = _listed(about.get("texts")), _listed(about.get("layers"))
    whole = all(isinstance(number, int) and 0 <= number < 1 << 62 for number in numbers)
    fits = (
        (tokens.dtype, ids.dtype, decode.dtype) == (np.int32, np.int32, np.bool_)
        and ids.ndim == 3
        and min(ids.shape) > 0
        and tokens.shape == decode.shape == ids.shape[:1] == (len(texts),)
        and ids.shape[1] == len(layers) == len(_listed(about.get("expert_bytes")))
        and isinstance(about.get("model"), str)
        and all(isinstance(text, str) for text in texts)
    )
    if not whole or not fits or ids.min() < -1 or ids.max() >= about["experts"]:
        raise CheckpointError(f"{where}: its arrays and their description do not fit together, expected a whole file")
    return ExpertRoutes(
        about["model"], tokens, tuple(texts), ids, decode, about["experts"], tuple(layers), tuple(about["expert_bytes"])
    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# --------------------------------------------------------------------------------------------------------------------
# Recording


def record(
    llm: SchedulableModel,
    prompt: str | Seq[int],
    max_tokens: int = 100,
    stop: str | Seq[str] = (),
    progress: Callable[[int], None] | None = None,
    *,
    name: str | None = None,
    **sampling: Any,
) -> ExpertRoutes:
    """Continue a prompt as `LLM.generate` does and note which experts each token chose.

    progress: called with the number of tokens that each step computed. name: of the model, in the result. Raises
    InvalidArgument for a model without experts or on device "reference". Other threads wait until it is done.
    """
    engine, tokenizer = llm.engine, llm.tokenizer
    request = llm.request(prompt, max_tokens, stop, **(sampling | {"speculate": "off"}))  # a token each step
    pieces: list[np.ndarray] = []
    with engine.lock, _pages(engine), _watched(engine) as (nodes, read), _alone(llm) as scheduler:

        def note(count: int) -> None:
            pieces.append(read(count))
            if progress is not None:
                progress(count)

        handle = scheduler.submit(request, buffer=1, progress=note)
        for _ in handle:
            if len(handle.tokens) > 1:
                note(1)
    tokens = [*request.prompt, *handle.tokens[:-1]]
    detokenizer = tokenizer.detokenizer()
    decode = np.arange(len(tokens)) >= len(request.prompt)
    return ExpertRoutes(
        model=name or engine.model.config.model_type,
        tokens=np.array(tokens, np.int32),
        texts=tuple(detokenizer.add(token) for token in tokens),
        ids=np.concatenate(pieces),
        decode=decode,
        experts=experts_of(nodes[0]),
        layers=_layers(engine.model, len(nodes)),
        expert_bytes=tuple(map(_expert_bytes, nodes)),
    )


@contextmanager
def _pages(engine: Engine) -> Iterator[None]:
    """A sequence with its first pages, so that there are caches to trace a program with."""
    sequence = engine.open()
    try:
        engine.caches.reserve(sequence, 1)
        yield
    finally:
        engine.close(sequence)


def _alone(llm: SchedulableModel) -> Scheduler:
    """A scheduler for one request, whose steps are looked at one by one."""
    memory = all_memory(llm.engine)
    return Scheduler(llm, max_sequences=1, prefix_cache=False, memory=memory, overlap=False, allocate=False)


@contextmanager
def _watched(engine: Engine) -> Iterator[tuple[list[Node], Callable[[int], np.ndarray]]]:
    """Inside, programs note the ids of their expert ops; the expert nodes, and what reads the ids of a step's tokens.

    The last gives int32 [tokens, L, k]. Layers are told apart by their experts; those of a head that drafts are none.
    """
    programs, device = engine.programs, engine.device
    if programs is None:
        raise InvalidArgument(f"routes: device is {engine.device.name!r}, expected cpu or cuda")
    graph = programs.graph(1, 1, 1, decode=True)
    nodes = [node for node in graph.nodes if node.op in EXPERT_OPS]
    if not nodes:
        raise InvalidArgument(f"routes: {engine.model.config.model_type} has no experts, expected a model with experts")
    noted = device.zeros((len(nodes), engine.most_tokens, ids_of(nodes[0]).shape[-1]), "int32")
    before, layers = programs.wrap, {_place(node): n for n, node in enumerate(nodes)}

    def wrap(node: Node, kernel: Any) -> Any:
        run = kernel if before is None else before(node, kernel)
        if node.op not in EXPERT_OPS or _place(node) not in layers:
            return run
        layer = noted[layers[_place(node)]]
        return noting(node, run, lambda ids: device.copy_all([layer[: len(ids)]], [ids]))

    programs.wrap = wrap
    engine.caches.version += 1  # programs are bound anew
    try:
        yield nodes, lambda count: device.to_host(noted[:, :count]).transpose(1, 0, 2)
    finally:
        programs.wrap = before
        engine.caches.version += 1


def _place(node: Node) -> int:
    """Of what a layer's experts are found by, the same in all programs of a model."""
    slot_of = node.args.get("slot_of")
    return address(leaves(node["gate_w"] if slot_of is None else slot_of)[0])


def _expert_bytes(node: Node) -> int:
    stacks = [node.args.get(name) for name in ("gate_w", "up_w", "down_w")]
    arrays = [array for stack in stacks for array in leaves(stack)]
    return sum(math.prod(array.shape[1:]) * array.itemsize for array in arrays)  # a rank's stack may be empty


def _layers(model: Model, count: int) -> tuple[int, ...]:
    """Numbers of the layers that have experts; they are as many as there are expert nodes."""
    found = expert_layers(walk(model))
    assert len(found) == count
    return tuple(found)


# --------------------------------------------------------------------------------------------------------------------
# The report


@dataclass(frozen=True)
class LayerUse:
    """How a layer's experts were used: by how many tokens each (counts), and what follows."""

    layer: int
    counts: np.ndarray
    repeated: float | None  # share of a decoded token's experts that the token before chose too

    @property
    def used(self) -> int:
        """Experts that were chosen at all."""
        return int(np.count_nonzero(self.counts))

    @property
    def top_share(self) -> float:
        """Share of all choices that fell on the tenth of the experts (rounded up) that is chosen most."""
        tenth = -(-len(self.counts) // 10)
        return float(np.sort(self.counts)[-tenth:].sum() / max(1, self.counts.sum()))

    @property
    def entropy(self) -> float:
        """Of the choices, as a share of that of an even use: 1 if all experts are chosen as often."""
        shares = self.counts[self.counts > 0] / max(1, self.counts.sum())
        return float(-(shares * np.log(shares)).sum() / np.log(len(self.counts))) if len(self.counts) > 1 else 1.0


@dataclass(frozen=True)
class ExpertRoutesReport:
    """A recording, the use of each layer's experts, and the hit rates of simulated caches."""

    routes: ExpertRoutes
    layers: tuple[LayerUse, ...]
    rows: tuple[Row, ...]

    @property
    def repeated(self) -> float | None:
        known = [layer.repeated for layer in self.layers if layer.repeated is not None]
        return sum(known) / len(known) if known else None

    def nbytes(self, row: Row) -> int:
        """Of a simulated cache."""
        return round(self.routes.nbytes * row.slots / (len(self.routes.layers) * self.routes.experts))


def expert_routes_report(routes: ExpertRoutes) -> ExpertRoutesReport:
    """How a recorded text used the experts, and what caches would have made of it."""
    trace = Trace(routes.ids, routes.decode, routes.experts)
    again = repeats(trace)
    layers = tuple(
        LayerUse(layer, counts, None if np.isnan(repeated) else float(repeated))
        for layer, counts, repeated in zip(routes.layers, routes.counts(), again, strict=True)
    )
    return ExpertRoutesReport(routes, layers, tuple(table(trace)))
