"""What a model family is: one object in the family's own file that says all there is to say about it.

How its config and weights are read, which ops it runs, what each weight is for, how its released files become mlx-lm's,
and what GGUF calls its parts. Nothing outside of that file asks for a family by name; docs/adding-a-model.md shows how
one is added.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, get_args

import numpy as np

from penstock.models.gguf_keys import GgufKeys
from penstock.models.source import Source, Weight, text_names
from penstock.models.split import Mesh, Split
from penstock.models.step import Cache, Layout, Step
from penstock.ops.array import Array
from penstock.weights.checkpoint import Checkpoint

Role = Literal[
    "embedding",
    "attention",
    "linear attention",
    "router",
    "shared expert",
    "experts",
    "dense MLP",
    "norms",
    "head",
    "other",
]
"""What a weight is for."""
ROLES: tuple[Role, ...] = get_args(Role)  # in the order in which they are shown

HEAD_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")  # before the product of a head that drafts
_IN_LAYER = re.compile(r"(?:.*\.)?layers\.\d+\.(.+)")


class ModelConfig(Protocol):
    """What the configs of all families have; counts and widths of experts are 0 without them."""

    @property
    def model_type(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def expert_width(self) -> int: ...


class ModelWeights(Protocol):
    """What the weights of all families have; `head` is `embed` in a tied model."""

    @property
    def embed(self) -> Weight: ...
    @property
    def head(self) -> Weight: ...


@dataclass(frozen=True)
class SplitHeads:
    """A matrix [H · width, K] of H heads that mlx-lm keeps as several modules.

    parts: by module its rows of each head, from and to, and whether they are transposed ([H, K, rows]).
    """

    heads: int
    shape: tuple[int, int]
    parts: Mapping[str, tuple[int, int, bool]]


@dataclass(frozen=True)
class MlxRules:
    """How mlx-lm's files of a model differ from the released ones. Tensors and modules are given by ends of names."""

    nested: bool = False  # the text model is below `language_model.`
    expert_stack: str = "switch_mlp"  # the module of stacked experts, below the block that has them
    offset_norms: tuple[str, ...] = ()  # tensors that released files hold less 1
    renamed: tuple[tuple[str, str], ...] = ()  # parts of names and what stands there instead, one after the other
    channels_last: tuple[str, ...] = ()  # convolutions [C, 1, W], in mlx-lm [C, W, 1]
    split_heads: Mapping[str, SplitHeads] = field(default_factory=dict)  # by the last part of a module's path
    uncast: tuple[str, ...] = ()  # tensors that keep their dtype, whatever the others become
    unquantized: tuple[str, ...] = ()  # ends of paths of matrices that mlx-lm cannot quantize in this model
    config: dict[str, Any] = field(default_factory=dict)  # keys of config.json that get another value
    within: bool = False  # the text model is below `model.language_model.`, its head beside that
    in_columns: bool = False  # dense experts of released files are [E, K, N], the columns of gate and up in turns
    kept: tuple[str, ...] = ()  # ends of paths of modules that are written although the model does not use them

    @property
    def prefixes(self) -> tuple[str, str]:
        """What stands before the names of the text model, and before its `lm_head`."""
        if self.within:
            return "model.language_model.", ""
        return ("language_model.model.", "language_model.") if self.nested else ("model.", "")


@dataclass(frozen=True)
class GgufArchitecture:
    """One architecture of GGUF: what its metadata say, and how its files differ from those of mlx-lm."""

    config: Callable[[GgufKeys], dict[str, Any]]
    """The config.json that its metadata stand for."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Names that are not those of the family's table."""
    rows: Callable[[Mapping[str, Any], str, int], np.ndarray | None] | None = None
    """By config.json, module and number of rows where each row (or entry of a bias) comes from; None: as stored."""
    values: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    """What vectors are as released, by patterns of their paths: what the converter made of them, undone."""
    written: Callable[[Mapping[str, Any], str, int], np.ndarray | None] | None = None
    """By config.json, module and axis (0 rows, 1 columns) where each comes from in mlx-lm's files, if the model runs in
    another order."""
    unwritten: str = ""
    """Why no file for mlx-lm is made of it; empty: one is."""
    copied: tuple[str, ...] = ()
    """Modules whose rows the family itself puts into another order."""
    own_factors: bool = False
    """`rope_freqs` is read with the metadata; else it divides the table of frequencies."""


@dataclass(frozen=True)
class GgufNames:
    """The architectures of GGUF that a family runs, and GGUF's names of its modules by path.

    Of a path in a layer what stands behind `layers.N.`, in the file behind `blk.N.`. tensors: whole names of what is
    no module's weight or bias. stacks: names of tensors whose matrices are modules with a number at their end.
    """

    architectures: Mapping[str, GgufArchitecture]
    modules: Mapping[str, str]
    tensors: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)


ConfigT = TypeVar("ConfigT", bound=ModelConfig)
WeightsT = TypeVar("WeightsT", bound=ModelWeights)


@dataclass(frozen=True)
class DraftHead(Generic[ConfigT]):
    """What a family says about the head that drafts the tokens after the next one (`models.mtp`).

    Of a head with the hidden state h and the embedding e of the token after it, the layer of
    fc · concat(norm e, norm h) is a decoder layer of the family, which is read and run by these functions.
    """

    model_types: tuple[str, ...]
    """Models of the family that have one."""
    depth: str
    """The key of config.json that says how many layers it has."""
    spelling: Literal["mtp", "nextn"]
    """Names of its tensors: behind `mtp.`, or those of one more layer behind the last."""
    drafter: Callable[[str], str]
    """The model_type of a folder that has the head alone, by that of its trunk."""
    config: Callable[[ConfigT], ConfigT]
    """The config of a model whose only layer is the head's, by that of its trunk."""
    read_layer: Callable[[Source, ConfigT], Any]
    """The layer, its paths behind `layers.0.`."""
    read_norm: Callable[..., Any]
    """A norm's weight by source, path and size."""
    layer: Callable[[Step, Array, Any, ConfigT, tuple[Array, Array]], Array]
    """The residual stream [T, dim] after the layer."""
    sees_first: bool = True
    """Whether position 0 gets the embedding of its token; else 0."""


def _as_released(raw: Mapping[str, Any], config: ModelConfig) -> MlxRules:
    return MlxRules()


def _whatever(config: ModelConfig) -> bool:
    return True


@dataclass(frozen=True)
class Family(Generic[ConfigT, WeightsT]):
    """A family whose configs are ConfigT and whose weights are WeightsT."""

    name: str
    """Of its module."""
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json that it runs."""
    read_config: Callable[[dict[str, Any]], ConfigT]
    """The config of a config.json. Raises CheckpointError for what is missing, inconsistent or not supported."""
    read_weights: Callable[[Source, ConfigT], WeightsT]
    """The weights, each asked for by path and shape."""
    caches: Callable[[ConfigT], tuple[Layout, ...]]
    """The cache of each layer."""
    forward: Callable[[Step, WeightsT, ConfigT, Sequence[Cache]], Array]
    """The residual stream after the last layer, [T, dim]."""
    logits: Callable[[Step, Array, WeightsT, ConfigT], Array]
    """Logits of the next token by rows of the residual stream, float32 [T, vocab]."""
    roles: Mapping[Role, tuple[str, ...]]
    """What weights are for, by patterns (`self_attn.*`) of what stands behind `layers.N.` in a path, or of the whole
    path outside of layers. The first that fits counts."""
    final_norm: Callable[[Step, Array, WeightsT, ConfigT], Array] | None = None
    """The hidden state [T, dim] that the head reads by rows of the residual stream, for `LLM.embed`; None: it has no
    embeddings."""
    commit: Callable[[Step, WeightsT, ConfigT, Sequence[Cache]], None] | None = None
    """Moves recurrent states on by what was accepted of runs that were kept. None: it has no recurrent states."""
    commits: Callable[[ConfigT], bool] = _whatever
    """Whether a model of a config can take drafts back that it has read; asked where there is `commit`."""
    names: Callable[[Checkpoint, ConfigT], tuple[str, str, str]] = text_names
    """Prefix of the text model's tensors in a checkpoint, prefix of `lm_head`, and the layout, "hf" or "mlx"."""
    skipped: tuple[str, ...] = ()
    """Beginnings of the names of tensors that belong to parts which penstock does not run."""
    unquantized: tuple[str, ...] = ()
    """Ends of the paths of matrices that mlx-lm cannot quantize."""
    more_bits: tuple[str, ...] = ("v_proj", "v_a_proj", "v_b_proj", "down_proj")
    """Parts of the paths of matrices that mlx-lm's mixed recipes give more bits."""
    mlx_rules: Callable[[Mapping[str, Any], ConfigT], MlxRules] = _as_released
    """How a model with this config.json is written for mlx-lm."""
    gguf: GgufNames | None = None
    """None: it is not run from GGUF files."""
    split: Callable[[ConfigT, Mesh, int], Split[ConfigT]] | None = None
    """How the model is split over ranks, with the columns of its quantization groups. None: it runs on one."""
    draft_head: DraftHead[ConfigT] | None = None
    """None: no head that drafts is known."""
    full_attention: str = "full attention"
    """What a layer is called that attends to all positions."""
    linear_attention: str = "linear attention"
    """What a layer is called that keeps a state in their place."""

    def __repr__(self) -> str:
        return f"Family({self.name!r})"

    def role_of(self, path: str) -> Role:
        """What the weight of a path is for. In layers any prefix may stand before `layers.N.`."""
        inner = _IN_LAYER.fullmatch(path)
        name = inner[1] if inner else path
        if name in HEAD_NORMS:
            return "norms"
        for role, patterns in self.roles.items():
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                return role
        return "other"


AnyFamily: TypeAlias = Family[ModelConfig, ModelWeights]
"""A family of which nothing is known but what all have in common."""
