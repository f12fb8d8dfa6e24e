"""What a model is made of, without its weights: layers by kind, tensors by role and format, what a token reads.

A family asks for its weights by path and shape; here it is answered with nothing but zeros of that shape, which take no
memory, and every question is written down with the format in which the files have the tensor.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.analysis.weights import Sum, TensorFormat, WeightInfo, layer_of
from penstock.dtypes import FLOATS, ITEMSIZE, bfloat16
from penstock.errors import CheckpointError, InvalidArgument, PenstockError
from penstock.models import mtp
from penstock.models.config import Fields, first_layers
from penstock.models.family import ROLES, AnyFamily, ModelConfig
from penstock.models.quantization import FormatTable
from penstock.models.source import CheckpointSource, left_over
from penstock.models.step import Layout, PagedKV
from penstock.quant import BLOCK_TYPES, QuantizedTensor
from penstock.quant.gguf_blocks import GROUP
from penstock.units import amount
from penstock.weights import fp8
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.resolve import ResolvedModel
from penstock.weights.safetensors import DTYPES

if TYPE_CHECKING:
    from penstock.models.gguf import GgufModel
    from penstock.text.tokenizer import Tokenizer

_LONG = ("vocab_size", "max_positions", "per_layer_vocab")
_WIDEST = 1 << 17  # of all other sizes; the widest layers of released models have 53 248


class Headers(Checkpoint):
    """A checkpoint whose tensors are never read: they come in their shape and dtype, but hold nothing."""

    def array(self, name: str) -> np.ndarray:
        info = self._info(name)
        return np.zeros(info.shape, DTYPES[info.dtype])  # untouched pages take no memory

    def _made_of_blocks(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray | QuantizedTensor:
        if self._scales_are_powers and codes.shape[1] % fp8.EXACT.unit == 0:
            groups = (len(codes), codes.shape[1] // fp8.EXACT.group_size)
            return QuantizedTensor(codes.view(np.uint32), np.zeros(groups, np.uint8), None, *fp8.EXACT)
        return np.zeros(codes.shape, bfloat16)


def _dense(dtype: str) -> TensorFormat:
    return TensorFormat(8 * ITEMSIZE[dtype], None, dtype)


@dataclass(frozen=True)
class Machine:
    """What the limit is computed for: bytes per second of its memory, None if that is not known."""

    device: str
    dtype: str  # of keys and values
    bandwidth: float | None  # GB/s
    how: str

    def limit(self, nbytes: float) -> float | None:
        """Tokens per second if reading the weights were all."""
        return self.bandwidth * 1e9 / nbytes if self.bandwidth and nbytes else None


@dataclass(frozen=True)
class Skipped:
    """Tensors of the files that penstock does not run: a vision tower, layers that predict further tokens."""

    what: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Survey:
    """What was found. `files` and `file_bytes` are 0 for a config.json alone, `tokenizer` is None without one."""

    name: str
    source: str  # "safetensors", "gguf" or "config"
    config: Any
    weights: tuple[WeightInfo, ...]
    layers: tuple[str, ...]  # the kind of each
    caches: tuple[Layout, ...]
    tied: bool
    files: int = 0
    file_bytes: int = 0
    skipped: tuple[Skipped, ...] = ()
    tokenizer: dict[str, Any] | None = None
    notices: tuple[str, ...] = ()
    draft_head: tuple[WeightInfo, ...] = ()  # weights of the head that drafts, no part of the others
    draft_cache: Layout | None = None  # its keys and values

    @property
    def total(self) -> Sum:
        return Sum.of(self.weights)

    @property
    def kinds(self) -> dict[str, int]:
        """Layers by kind, in the order in which each comes first."""
        return dict(Counter(self.layers))

    def by_role(self) -> dict[str, Sum]:
        found: dict[str, list[WeightInfo]] = defaultdict(list)
        for weight in self.weights:
            found[weight.role].append(weight)
        return {role: Sum.of(found[role]) for role in ROLES if role in found}

    def by_format(self) -> dict[TensorFormat, Sum]:
        """The largest first."""
        found: dict[TensorFormat, list[WeightInfo]] = defaultdict(list)
        for weight in self.weights:
            assert weight.format is not None
            found[_without_scales(weight.format)].append(weight)
        sums = {format: Sum.of(weights) for format, weights in found.items()}
        return dict(sorted(sums.items(), key=lambda item: -item[1].nbytes))

    def draft_bytes(self) -> float:
        """Bytes that a draft reads: of the head, and of the trunk's tables."""
        tables = (weight for weight in self.weights if weight.path in ("embed_tokens", "lm_head"))
        return Sum.of([*self.draft_head, *tables]).active_bytes

    def cache_bytes(self, dtype: str) -> tuple[int, int]:
        """Bytes that a sequence takes per position, and besides: windows that are full, recurrent states."""
        return _cache_bytes(self.caches, dtype)

    def draft_cache_bytes(self, dtype: str) -> int:
        """Bytes that the head's own keys and values take per position."""
        return 0 if self.draft_cache is None else _cache_bytes([self.draft_cache], dtype)[0]


def _cache_bytes(layouts: Iterable[Layout], dtype: str) -> tuple[int, int]:
    item, per_position, fixed = ITEMSIZE[dtype], 0, 0
    for layout in layouts:
        if not isinstance(layout, PagedKV):
            fixed += math.prod(layout.conv) * item + math.prod(layout.state) * ITEMSIZE[layout.dtype]
        elif layout.window is None:
            per_position += (layout.key_width + layout.value_width) * item
        else:
            fixed += (layout.key_width + layout.value_width) * item * layout.window
    return per_position, fixed


def _without_scales(format: TensorFormat) -> TensorFormat:
    return format if format.group_size is None else replace(format, dtype="")


def survey(found: ResolvedModel) -> Survey:
    """Look at a model, of which the small files are enough. Raises CheckpointError, InvalidArgument."""
    if found.kind == "gguf":
        return _of_gguf(found.name, found.path)
    if found.kind != "config":
        return _of_folder(found.name, found.path)
    raw, _ = first_layers(found.read_config(), "all", str(found.config_path))
    made = _of_config(found.name, raw, str(found.config_path))
    if found.path.is_dir():
        made = replace(made, **_with_tokenizer(found.path, made.config, made.notices))
    return made


# --------------------------------------------------------------------------------------------------------------------
# Kinds of models


class _Described(Protocol):
    """Where formats come from. `layout` as in models.source.Source."""

    layout: str

    def __contains__(self, path: str) -> bool: ...

    def found(self, path: str, shape: tuple[int, ...], vector: bool) -> tuple[TensorFormat, int]:
        """Format and bytes of one tensor. Raises CheckpointError unless it is there in that shape."""
        ...


class FromFiles:
    """Tensors of a checkpoint, none of which is read."""

    def __init__(self, stored: CheckpointSource) -> None:
        self.stored = stored
        self.layout = stored.layout

    @classmethod
    def of(cls, checkpoint: Headers, family: AnyFamily, config: ModelConfig) -> FromFiles:
        """The tensors of the model itself."""
        return cls(CheckpointSource(checkpoint, *family.names(checkpoint, config)))

    def __contains__(self, path: str) -> bool:
        return path in self.stored

    def found(self, path: str, shape: tuple[int, ...], vector: bool) -> tuple[TensorFormat, int]:
        if vector:
            self.stored.vector(path, *shape)
        else:
            weight = self.stored.weight(path, *shape)
            if isinstance(weight, QuantizedTensor):
                return TensorFormat(weight.bits, weight.group_size, weight.dtype, weight.mode), weight.nbytes
            if f"{self.stored.name_of(path)}.weight_scale_inv" in self.stored.checkpoint:
                return _dense("bfloat16"), weight.nbytes
        checkpoint, name = self.stored.checkpoint, self.stored.name_of(path)
        name = f"{name}.weight" if f"{name}.weight" in checkpoint else name
        return _dense(checkpoint.dtype(name)), _span(checkpoint, name)


class FromGguf:
    """Tensors of a GGUF file, in the format that they have once they are loaded."""

    layout = "mlx"

    def __init__(self, gguf: GgufModel) -> None:
        self._gguf = gguf

    def __contains__(self, path: str) -> bool:
        return path in self._gguf.source

    def found(self, path: str, shape: tuple[int, ...], vector: bool) -> tuple[TensorFormat, int]:
        if path.endswith(".bias") and path not in self:
            return _dense("float32"), 0  # zeros
        file, name = self._gguf.file, self._gguf.source.asked(path, shape)
        kind, whole = (info := file.info(name)).type, math.prod(info.shape)
        nbytes = file.loaded_nbytes(name) * math.prod(shape) // max(1, whole)  # a matrix of a stack is a part of it
        dense = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(kind)
        if kind in BLOCK_TYPES:
            return TensorFormat(BLOCK_TYPES[kind].bits, GROUP, "float16", kind), nbytes
        return _dense(dense) if dense is not None else TensorFormat(8 if kind == "Q8_0" else 4, 32, "float16"), nbytes


class _FromConfig:
    """Tensors that a config.json implies: quantized as its table says, dense without one; routers 8 bits."""

    layout = "mlx"

    def __init__(self, raw: dict[str, Any], family: AnyFamily) -> None:
        self._family = family
        top = Fields(raw, "config.json")
        inner = top.table("text_config", top)
        spelled = (holder.get(key) for holder in (raw, inner.values) for key in ("dtype", "torch_dtype"))
        self.dtype = next((name for name in spelled if name in FLOATS), "bfloat16")
        self._table = FormatTable(raw)
        self.quantized = self._table.quantized

    def __contains__(self, path: str) -> bool:
        return not path.endswith(".bias") and path != "lm_head"  # which is asked for where it may be left out

    def found(self, path: str, shape: tuple[int, ...], vector: bool) -> tuple[TensorFormat, int]:
        count = math.prod(shape)
        router = self._family.role_of(path) == "router"
        plain = vector or not self.quantized
        format = None if plain else self._table.format(path, shape[-1], router)
        if format is None:
            return _dense(self.dtype), count * ITEMSIZE[self.dtype]
        per_group = 4 if format.mode == "affine" else 1
        nbytes = count * format.bits // 8 + count // format.group_size * per_group
        return TensorFormat(format.bits, format.group_size, "bfloat16", format.mode), nbytes


@dataclass
class Recorder:
    """Answers a family's questions with zeros and keeps a list of them."""

    described: _Described
    family: AnyFamily
    weights: list[WeightInfo] = field(default_factory=list)

    @property
    def layout(self) -> str:
        return self.described.layout

    def __contains__(self, path: str) -> bool:
        return path in self.described

    def weight(self, path: str, *shape: int) -> Any:
        return self._noted(path, shape, *self.described.found(path, shape, vector=False))

    def vector(self, path: str, *shape: int) -> np.ndarray:
        return self._noted(path, shape, *self.described.found(path, shape, vector=True))

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Any:
        format, nbytes = self.described.found(path, shape, vector=False)
        return self._noted(path, (len(order), *shape[1:]), format, nbytes * len(order) // max(shape[0], 1))

    def stack(self, paths: Sequence[str], *shape: int) -> Any:
        if len(paths) == 1:
            return self.weight(paths[0], *shape)
        found = [self.described.found(path, shape[1:], vector=False) for path in paths]
        nbytes = sum(size for _, size in found)
        return self._noted(re.sub(r"\.\d+\.([^.]*)$", r".\1", paths[0]), shape, found[0][0], nbytes)

    def _noted(self, path: str, shape: tuple[int, ...], format: TensorFormat, nbytes: int) -> np.ndarray:
        role = self.family.role_of(path)
        self.weights.append(WeightInfo(path, role, layer_of(path), shape, nbytes, format=format))
        try:
            return np.broadcast_to(np.zeros((), np.float32), shape)
        except ValueError:
            raise InvalidArgument(f"{path}: has shape {shape}, expected sizes that an array can have") from None


# --------------------------------------------------------------------------------------------------------------------
# Surveys


def _of_folder(name: str, folder: Path) -> Survey:
    from penstock import models

    checkpoint = Headers(folder)
    if mtp.is_head(checkpoint.config):
        return _of_head(name, checkpoint)
    family = models.family_of(checkpoint.config)
    config = family.read_config(checkpoint.config)
    check_sizes(config, f"{folder / 'config.json'}", checkpoint)
    described = FromFiles.of(checkpoint, family, config)
    found, remarks = _looked_at(name, "safetensors", family, config, described), []
    used = set(described.stored.used)
    try:
        head = mtp.find(checkpoint, family, config, described.stored)
        if head is not None:
            found = _with_head(found, family, FromFiles(head.source))
    except CheckpointError as error:
        described.stored.used.intersection_update(used)
        remarks.append(f"{error}; the head that drafts is not used")
    left = left_over(described.stored, family.skipped, len(found.layers))
    skipped = tuple(
        Skipped(what, len(names), sum(_span(checkpoint, name) for name in names)) for what, names in left.known.items()
    )
    notices = [*checkpoint.notices, *remarks, *left.remarks]
    if copied := checkpoint.misaligned_nbytes:
        notices.append(f"{folder}: {amount(copied)} of tensors are not aligned and are copied when they are loaded")
    more: dict[str, Any] = {"files": len(checkpoint.files), "file_bytes": sum(_size(f) for f in checkpoint.files)}
    return replace(found, skipped=skipped, **more, **_with_tokenizer(folder, config, notices))


def _of_head(name: str, checkpoint: Headers) -> Survey:
    """A folder with a head that drafts alone: its one layer is the model."""
    from penstock import models

    where = f"{checkpoint.path / 'config.json'}"
    text = mtp.trunk_config(checkpoint.config, where)
    family = models.family_of(text)
    config = family.read_config(text)
    check_sizes(config, where, checkpoint)
    head = mtp.open_drafter(checkpoint.path, family, config, open_folder=lambda _: checkpoint)
    made = _with_head(Survey(name, "safetensors", config, (), (), (), config.tied), family, FromFiles(head.source))
    assert made.draft_cache is not None
    kinds = _kinds(made.draft_head, [made.draft_cache], family)
    more: dict[str, Any] = {"files": len(checkpoint.files), "file_bytes": sum(_size(f) for f in checkpoint.files)}
    notice = f"{checkpoint.path}: a head that drafts for a {config.model_type} of {len(family.caches(config))} layers"
    left = left_over(head.source, (), 1).remarks
    return replace(
        made,
        weights=made.draft_head,
        layers=kinds,
        caches=(made.draft_cache,),
        draft_head=(),
        draft_cache=None,
        notices=(*checkpoint.notices, notice, *left),
        **more,
    )


def _with_head(found: Survey, family: AnyFamily, described: _Described) -> Survey:
    """A survey with the head that drafts."""
    recorder, config = Recorder(described, family), found.config
    none = np.empty((0, 0), np.float32)
    head = mtp.read(recorder, family, config, none, none)
    weights = tuple(replace(one, takes=_taken(one, config, False)) for one in recorder.weights)
    return replace(found, draft_head=weights, draft_cache=mtp.layout(head, family))


def _of_gguf(name: str, path: Path) -> Survey:
    from penstock.models.gguf import open_gguf
    from penstock.text.gguf_tokenizer import gguf_tokenizer

    gguf = open_gguf(path)
    config = gguf.read_config()
    check_sizes(config, f"{path}")
    found = _looked_at(name, "gguf", gguf.family, config, FromGguf(gguf))
    notices, facts = list(gguf.notices), None
    try:
        facts = _tokenizer_facts(gguf_tokenizer(gguf.file))
    except PenstockError as error:
        notices.append(str(error))
    return replace(found, files=1, file_bytes=_size(path), tokenizer=facts, notices=tuple(notices))


def _of_config(name: str, raw: dict[str, Any], where: str) -> Survey:
    from penstock import models

    family = models.family_of(raw)
    described = _FromConfig(raw, family)
    config = family.read_config(raw)
    check_sizes(config, where)
    found = _looked_at(name, "config", family, config, described)
    if mtp.declared(family, config, raw):
        found = _with_head(found, family, described)
    notice = f"{where}: the sizes are those that it implies, there are no weights"
    if not described.quantized:
        notice += f"; it has no quantization: they are taken as {described.dtype}"
    return replace(found, notices=(notice,))


def _looked_at(name: str, source: str, family: AnyFamily, config: ModelConfig, described: _Described) -> Survey:
    recorder = Recorder(described, family)
    read = family.read_weights(recorder, config)
    tied = read.head is read.embed
    caches = tuple(family.caches(config))
    weights = tuple(replace(one, takes=_taken(one, config, tied)) for one in recorder.weights)
    return Survey(name, source, config, weights, _kinds(weights, caches, family), caches, tied)


def _taken(weight: WeightInfo, config: ModelConfig, tied: bool) -> int | None:
    """Of the first axis of a tensor what one token reads, None for all: chosen experts, one row of a table.

    A tied table is the head too.
    """
    if weight.role == "experts":
        return config.top_k
    return 1 if weight.role == "embedding" and not (tied and weight.path == "embed_tokens") else None


def _kinds(weights: Sequence[WeightInfo], caches: Sequence[Layout], family: AnyFamily) -> tuple[str, ...]:
    """What each layer does: how it mixes positions, and what follows."""
    roles: dict[int | None, set[str]] = defaultdict(set)
    for weight in weights:
        roles[weight.layer].add(weight.role)
    found = []
    for number, layout in enumerate(caches):
        if "linear attention" in roles[number]:
            mixer = family.linear_attention
        elif isinstance(layout, PagedKV) and layout.window is not None:
            mixer = f"sliding attention ({layout.window})"
        else:
            mixer = family.full_attention
        blocks = [block for role, block in (("dense MLP", "dense"), ("experts", "MoE")) if role in roles[number]]
        found.append(" + ".join([mixer, *blocks]))
    return tuple(found)


def check_sizes(config: Any, where: str, checkpoint: Checkpoint | None = None) -> None:
    """Raise CheckpointError for sizes that no model has, before arrays or lists of that many things are made.

    Experts are compared with the files, if there are any: as many tensors, or a stack of as many.
    """
    for item in fields(config):
        value = getattr(config, item.name)
        if type(value) is int and item.name not in _LONG and value > _WIDEST:
            raise CheckpointError(f"{where}: {item.name} is {value}, expected at most {_WIDEST}")
    if checkpoint is not None:
        shapes = [checkpoint.shape(name) for name in checkpoint.names]
        most = max([len(shapes), *(shape[0] for shape in shapes if shape)])
        if (count := getattr(config, "experts", 0)) > most:
            raise CheckpointError(f"{where}: experts is {count}, expected at most {most}: the files have no more")


def _span(checkpoint: Checkpoint, name: str) -> int:
    _, start, stop = checkpoint.location(name)
    return stop - start


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def _with_tokenizer(folder: Path, config: Any, notices: Iterable[str]) -> dict[str, Any]:
    """Fields of a Survey; a tokenizer that cannot be read is a notice, not the end."""
    from penstock.text.tokenizer import Tokenizer, tokens_beyond

    found, facts = list(notices), None
    try:
        tokenizer = Tokenizer.from_folder(folder)
        facts = _tokenizer_facts(tokenizer)
        found += tokens_beyond(f"{folder}", tokenizer, config.vocab_size)
    except PenstockError as error:
        found.append(str(error))
    return {"tokenizer": facts, "notices": tuple(found)}


def _tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    model: Any = json.loads(tokenizer.backend.to_str())["model"]
    templates = tokenizer.templates
    sources = {} if templates is None else {name: source for name, (source, _) in templates.sources.items()}
    text = "\n".join(sources.values())

    def token(number: int | None) -> str | None:
        return None if number is None else tokenizer.backend.id_to_token(number)

    return {
        "type": model.get("type"),
        "byte_level": tokenizer.byte_level,
        "tokens": tokenizer.vocab_size,
        "bos": token(tokenizer.bos_id),
        "adds_bos": tokenizer.bos_id is not None and tokenizer.bos_id in tokenizer.encode("", add_special_tokens=True),
        "eos": {str(number): token(number) for number in sorted(tokenizer.eos_ids)},
        "templates": list(sources),
        "template_characters": len(text),
        "template_tools": "tools" in text,
        "template_thinking": "enable_thinking" in text or "<think>" in text,
    }
