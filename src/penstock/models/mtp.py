"""Heads that draft the tokens after the next one (multi-token prediction): found, read and run.

A head is one decoder layer of its trunk's family with keys and values of its own. At position t it sees the trunk's
hidden state h[t] after the final norm and the token t + 1, and drafts token t + 2:

    x = fc · concat(norm(embed(token[t + 1])), norm(h[t]));  h' = norm(layer(x));  logits = lm_head · h'

h' takes the place of h[t + 1] for the next draft. Embedding and lm_head are the trunk's. What differs between families
is said by their `Family.draft_head`; paths here are those of Qwen's files behind `mtp.`: fc, pre_fc_norm_embedding,
pre_fc_norm_hidden, norm and layers.0.…, whatever the files call them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock import ops
from penstock.dtypes import FLOATS
from penstock.errors import CheckpointError, InvalidArgument
from penstock.models import family_of
from penstock.models.config import Fields
from penstock.models.family import HEAD_NORMS, AnyFamily, DraftHead, ModelConfig
from penstock.models.layers import embed, head_logits, linear
from penstock.models.source import CheckpointSource, Source, Weight
from penstock.models.step import STREAM, PagedKV, Step
from penstock.ops.array import Array
from penstock.quant import QuantizedTensor
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.files import short

TABLES = ("embed_tokens", "lm_head")
_ENDING = "_mtp"  # of the model_type of a folder that has a head alone
_FIRST = "layers.0."
_PREFIXES = ("mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp.")
_NEXTN = dict(zip(("fc", *HEAD_NORMS, "norm", *TABLES), (
    "eh_proj", "enorm", "hnorm", "shared_head.norm", "embed_tokens", "shared_head.head",
), strict=True))  # fmt: skip
_FLAT = {path: f"model.{name}" for path, name in _NEXTN.items()} | {
    "norm": "model.shared_head_norm",
    "lm_head": "lm_head",
}
_FLAT_LAYER = "model.mtp_block."
_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
_COMPARED = 64  # rows of a table by which it is known to be the trunk's
_NOT_COMPARED = ("model_type", "max_positions", "rope", "tied")  # of configs


@dataclass(frozen=True)
class HeadWeights:
    """embed [vocab, dim] and head [rows, dim] are the trunk's arrays; layer is what the family reads."""

    embed: Weight
    head: Weight
    embedding_norm: np.ndarray
    hidden_norm: np.ndarray
    projection: Weight  # [dim, 2 · dim], embedding first
    layer: Any
    norm: np.ndarray


@dataclass(frozen=True)
class Head:
    """A head with its weights. config: of a model with its one layer, a rank's part where weights are."""

    rules: DraftHead[Any]
    config: Any
    weights: HeadWeights

    @property
    def rows(self) -> int:
        """Of lm_head: tokens that it may draft are those with an id below; of a split model all."""
        return self.weights.head.shape[0]


def layout(head: Head, family: AnyFamily) -> PagedKV:
    """The cache of its own keys and values."""
    (found,) = family.caches(head.config)
    assert isinstance(found, PagedKV)
    return found


def forward(head: Head, step: Step, hidden: Array, cache: tuple[Array, Array]) -> Array:
    """h' [T, dim] in the dtype of activations: what the head reads of lm_head, and the next draft's hidden state.

    step.tokens are those after step.positions; hidden [T, dim] the trunk's rows at these positions after its final
    norm, or the head's own h' for a draft after a draft; lengths count the positions of the head's own cache.
    """
    w, config, eps = head.weights, head.config, head.config.norm_eps
    seen = step if head.rules.sees_first else replace(step, tokens=ops.ids_after_first(step.tokens, step.positions))
    e = ops.rms_norm(embed(seen, w.embed, vocab=config.vocab_size), w.embedding_norm, eps, step.dtype)
    g = ops.rms_norm(hidden, w.hidden_norm, eps, step.dtype)
    x = linear(step, ops.beside(e, g), w.projection, STREAM)
    return ops.rms_norm(head.rules.layer(step, x, w.layer, config, cache), w.norm, eps, step.dtype)


def logits(head: Head, step: Step, hidden: Array) -> Array:
    """Logits of drafts by rows h' [T, dim], float32 [T, rows]."""
    return head_logits(step, hidden, head.weights.head, head.config.vocab_size)


def with_rows(head: Head, rows: int) -> Head:
    """A head that drafts tokens with ids below `rows` alone, by a view of the first rows of lm_head.

    Vocabularies of byte-pair encoding number tokens in the order in which they were merged, frequent ones first. A
    draft that is never right costs speed and changes no text. Raises InvalidArgument for no rows or more than there
    are.
    """
    table = head.weights.head
    if not 0 < rows <= table.shape[0]:
        raise InvalidArgument(f"mtp: rows is {rows}, expected 1 to {table.shape[0]} (of lm_head)")
    if rows == table.shape[0]:
        return head
    if isinstance(table, QuantizedTensor):
        arrays = [array[:rows] if array.ndim else array for array in table.arrays]
        return replace(head, weights=replace(head.weights, head=table.with_arrays(*arrays)))
    return replace(head, weights=replace(head.weights, head=table[:rows]))


# -- reading ---------------------------------------------------------------------------------------------------------


def rules_of(family: AnyFamily, config: ModelConfig) -> DraftHead[Any] | None:
    """What is known of the head of a model, None if there is none."""
    rules = family.draft_head
    return rules if rules is not None and config.model_type in rules.model_types else None


def declared(family: AnyFamily, config: ModelConfig, raw: Mapping[str, Any]) -> bool | None:
    """Whether config.json says that the model has a head; None if it says nothing about it.

    Raises CheckpointError for a head of several layers.
    """
    rules = rules_of(family, config)
    if rules is None:
        return False
    top = Fields(raw, "config.json")
    depth = top.table("text_config", top).integer(rules.depth, None, least=0)
    if depth is not None and depth > 1:
        raise CheckpointError(f"config.json: {rules.depth} is {depth}, expected 1: a head that drafts has one layer")
    return None if depth is None else depth == 1


def read(
    source: Source, family: AnyFamily, config: ModelConfig, embed: Weight, head: Weight, tables: Iterable[str] = ()
) -> Head:
    """The head of a trunk with this config, embedding and lm_head. tables: of TABLES those that are its own."""
    rules = rules_of(family, config)
    assert rules is not None
    own, dim, vocab = rules.config(config), config.dim, config.vocab_size
    found = {"embed_tokens": embed, "lm_head": head} | {path: source.weight(path, vocab, dim) for path in tables}
    return Head(
        rules,
        own,
        HeadWeights(
            embed=found["embed_tokens"],
            head=found["lm_head"],
            embedding_norm=rules.read_norm(source, "pre_fc_norm_embedding", dim),
            hidden_norm=rules.read_norm(source, "pre_fc_norm_hidden", dim),
            projection=source.weight("fc", dim, 2 * dim),
            layer=rules.read_layer(source, own),
            norm=rules.read_norm(source, "norm", dim),
        ),
    )


class HeadSource(CheckpointSource):
    """The tensors of a head in a checkpoint by the paths of this module."""

    def __init__(
        self, checkpoint: Checkpoint, names: Mapping[str, str], layer: str, layout: str, used: set[str] | None = None
    ) -> None:
        super().__init__(checkpoint, "", "", layout, used)
        self._names, self._layer = names, layer

    def name_of(self, path: str) -> str:
        if path.startswith(_FIRST):
            return self._layer + path.removeprefix(_FIRST)
        return self._names[path]

    def path_of(self, name: str) -> str | None:
        """The path of a module or tensor by its name in the files; None for one of something else."""
        for path, own in self._names.items():
            if name == own or name.startswith(f"{own}."):
                return path + name.removeprefix(own)
        return _FIRST + name.removeprefix(self._layer) if name.startswith(self._layer) else None


@dataclass(frozen=True)
class HeadFiles:
    """A head in files. tables: of TABLES those that it has of its own and that are not the trunk's."""

    source: HeadSource
    tables: tuple[str, ...] = ()

    def read(
        self,
        family: AnyFamily,
        config: ModelConfig,
        embed: Weight,
        head: Weight,
        through: Callable[[Source], Source] = lambda source: source,
    ) -> Head:
        """The head's weights; `through`: a source that moves or splits those of another."""
        return read(through(self.source), family, config, embed, head, self.tables)

    def check_finite(self) -> None:
        """Raise CheckpointError for numbers that are not finite. Those of a trunk show in its logits; drafts of such a
        head are never right, and nothing would say so. Experts, most of its bytes, are not looked at.
        """
        checkpoint = self.source.checkpoint
        for name, path in self._paths().items():
            apart = path.partition(".")[0] in TABLES or ".experts." in path or ".switch_mlp." in path
            if not apart and checkpoint.dtype(name) in FLOATS and not np.isfinite(checkpoint.array(name)).all():
                raise CheckpointError(
                    f"{checkpoint.path}: {name} has numbers that are not finite, expected finite ones: damaged?"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        own = (self.source.checkpoint.location(name) for name in self._paths())
        return sum(stop - start for _, start, stop in own)

    def _paths(self) -> dict[str, str]:
        """Of its tensors, by their names in the files."""
        found = {name: self.source.path_of(name) for name in self.source.checkpoint.names}
        return {name: path for name, path in found.items() if path is not None}


def find(
    checkpoint: Checkpoint, family: AnyFamily, config: ModelConfig, trunk: CheckpointSource | None = None
) -> HeadFiles | None:
    """The head among the tensors of a checkpoint, None if it has none.

    trunk: the source of the trunk's weights; what the head has asked for counts as used there, too. Raises
    CheckpointError for a head whose tables have another shape, and for one that config.json calls deeper.
    """
    rules, says = rules_of(family, config), declared(family, config, checkpoint.config)
    if rules is None or says is False:
        return None
    prefix, _, form = family.names(checkpoint, config)
    used = None if trunk is None or trunk.checkpoint is not checkpoint else trunk.used
    if rules.spelling == "nextn":
        start = f"{prefix}layers.{len(family.caches(config))}."
        source = HeadSource(checkpoint, {path: start + name for path, name in _NEXTN.items()}, start, form, used)
    else:
        start = next((start for start in _PREFIXES if any(name.startswith(start) for name in checkpoint.names)), "mtp.")
        source = _by_path(checkpoint, start, _form(checkpoint, start, form), used)
    whole = "fc" in source and f"{_FIRST}input_layernorm" in source
    there = any(name.startswith(start) for name in checkpoint.names)
    return _with_tables(source, config, trunk) if whole or (says and there) else None


def _by_path(checkpoint: Checkpoint, start: str, form: str, used: set[str] | None = None) -> HeadSource:
    """A head in the names of this module behind `start`."""
    names = {path: start + path for path in ("fc", *HEAD_NORMS, "norm", *TABLES)}
    return HeadSource(checkpoint, names, start + _FIRST, form, used)


def _form(checkpoint: Checkpoint, start: str, usual: str) -> str:
    """The layout of a head behind `start`: told by its experts, else the usual one."""
    own = [name for name in checkpoint.names if name.startswith(start)]
    if any(".mlp.switch_mlp." in name for name in own):
        return "mlx"
    return "hf" if any(".mlp.experts." in name for name in own) else usual


def _with_tables(source: HeadSource, config: ModelConfig, trunk: CheckpointSource | None) -> HeadFiles:
    own = []
    for path in TABLES:
        if path in source:
            table = source.weight(path, config.vocab_size, config.dim)
            if trunk is not None and path in trunk and not _alike(table, trunk.weight(path, *table.shape)):
                own.append(path)
    return HeadFiles(source, tuple(own))


def _alike(a: Weight, b: Weight) -> bool:
    """Whether a head's table is the trunk's, by some of its rows; one in another format is taken for it."""
    parts = [weight.arrays if isinstance(weight, QuantizedTensor) else (weight,) for weight in (a, b)]
    if [(p.dtype, p.shape) for p in parts[0]] != [(p.dtype, p.shape) for p in parts[1]]:
        return True
    rows = np.unique(np.linspace(0, a.shape[0] - 1, _COMPARED).astype(np.int64))
    return all(np.array_equal(_bits(x[rows]), _bits(y[rows])) for x, y in zip(*parts, strict=True) if x.ndim)


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def drafter_name(rules: DraftHead[Any], path: str) -> str:
    """The name in a folder with a head alone, as mlx-vlm writes it, of a path of this module."""
    if rules.spelling == "mtp":
        return path
    return f"{_FLAT_LAYER}{path.removeprefix(_FIRST)}" if path.startswith(_FIRST) else _FLAT[path]


def drafter_config(rules: DraftHead[Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a folder with a head alone, by that of its trunk's text model."""
    return {
        "model_type": rules.drafter(str(text["model_type"])),
        "text_config": {**text, rules.depth: 1},
        "block_size": 3 if rules.spelling == "mtp" else 2,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
    }


def is_head(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a head alone, of a kind that is known or not."""
    model_type = raw.get("model_type")
    return isinstance(model_type, str) and (model_type.endswith(_ENDING) or model_type in _ASSISTANTS)


def open_drafter(
    folder: str | os.PathLike[str],
    family: AnyFamily,
    config: ModelConfig,
    trunk: CheckpointSource | None = None,
    open_folder: Callable[[Path], Checkpoint] = Checkpoint.open,
) -> HeadFiles:
    """The head of a trunk with this config in a folder of its own, or among the tensors of another checkpoint.

    Raises CheckpointError for a folder without one, and for a head of another trunk, which it names.
    """
    checkpoint = open_folder(Path(folder))
    raw, where, rules = checkpoint.config, f"{checkpoint.path / 'config.json'}", rules_of(family, config)
    model_type = raw.get("model_type")
    if model_type in _ASSISTANTS:
        raise CheckpointError(
            f"{where}: model_type is {short(model_type)}, a drafter that reads keys and values of its trunk, which is "
            "not supported, expected a head with its own"
        )
    if rules is None:
        raise CheckpointError(f"{where}: is the config of a drafter, expected none: {config.model_type} has no head")
    if not is_head(raw):
        if model_type not in family.model_types:
            raise CheckpointError(f"{where}: model_type is {short(model_type)}, expected a head of {config.model_type}")
        check_trunk(family.read_config(raw), config, where)
        found = find(checkpoint, family, config, trunk)
        if found is None:
            raise CheckpointError(f"{folder}: has no head that drafts, expected its tensors among those of the model")
        return found
    if model_type != rules.drafter(config.model_type):
        expected = rules.drafter(config.model_type)
        raise CheckpointError(f"{where}: model_type is {short(model_type)}, expected {expected!r} for this model")
    text = Fields(raw, where).table("text_config").values
    check_trunk(family.read_config(dict(text)), config, f"{where}: text_config")
    declared(family, config, text)
    if rules.spelling == "nextn":
        flat = HeadSource(checkpoint, _FLAT, _FLAT_LAYER, "mlx")
        return _with_tables(flat, config, trunk)
    bare = not any(name.startswith("mtp.") for name in checkpoint.names)
    start, form = ("", "mlx") if bare else ("mtp.", _form(checkpoint, "mtp.", "hf"))
    return _with_tables(_by_path(checkpoint, start, form), config, trunk)


def trunk_config(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The config.json of the trunk of a head alone. Raises CheckpointError for one of a kind that is not known."""
    text = dict(Fields(raw, where).table("text_config").values)
    family = family_of(text)
    rules = rules_of(family, family.read_config(text))
    if rules is None or rules.drafter(str(text.get("model_type"))) != raw.get("model_type"):
        raise CheckpointError(
            f"{where}: model_type is {short(raw.get('model_type'))}, expected the head of text_config"
        )
    return text


def check_trunk(own: ModelConfig, trunk: ModelConfig, where: str) -> None:
    """Raise CheckpointError unless the config that a head was made for is its trunk's; max_positions may differ."""
    names = [item.name for item in fields(own) if item.name not in _NOT_COMPARED]  # type: ignore[arg-type]
    for name in sorted(names, key=lambda name: name not in ("dim", "vocab_size")):
        found, expected = getattr(own, name), getattr(trunk, name, None)
        if found != expected:
            raise CheckpointError(
                f"{where}: {name} is {short(found)}, expected {short(expected)}: it is the head of another model"
            )
