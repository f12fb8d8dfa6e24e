"""Models in GGUF files: metadata as a config.json, tensor names as paths, rotary channels in penstock's order.

Families say which architectures they run, and what GGUF calls their modules (`Family.gguf`). Files of some pair
neighbouring channels of q and k for the rotation; penstock pairs the first half of a head with the second, so their
rows are put back into that order. Rows move whole, and nothing is quantized again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock import models
from penstock.errors import CheckpointError, InvalidArgument
from penstock.experts.layout import ExpertFiles, stacked
from penstock.models.config import Fields
from penstock.models.family import AnyFamily, GgufArchitecture, ModelConfig
from penstock.models.source import Weight, _taken
from penstock.models.split import GGUF_COLUMNS
from penstock.ops.array import Spec
from penstock.quant import BLOCK_TYPES, Format, QuantizedTensor
from penstock.quant.gguf_blocks import GROUP
from penstock.units import amount
from penstock.weights.gguf import GgufFile

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
ROPE_FACTORS = "rope_freqs.weight"
_DENSE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Keys that change what is computed, and the value that leaves it as it is.
_NEUTRAL: dict[str, Any] = {
    "attention.scale": None,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.causal": True,
    "attention.temperature_length": None,
    "attention.temperature_scale": None,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "use_parallel_residual": False,
    "expert_shared_count": 0,
    "expert_group_count": None,
    "expert_weights_scale": 1.0,
    "expert_gating_func": 1,  # softmax
    "nextn_predict_layers": 0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.dimension_sections": None,
}
_KNOWN = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_feed_forward_length",
    "expert_used_count",
    "expert_weights_norm",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
    "vocab_size",
)


class GgufModel:
    """A model file: its config, where its weights come from, and what a user should know about it.

    Raises CheckpointError for an architecture, a setting or a type of tensor that penstock does not run, before any
    weight is read.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        _check_kind(file)
        self.config = read_metadata(file)
        """What config.json would say."""
        self.source = GgufSource(file, self.config)
        for name in file.tensors:
            file.check_supported(name)

    def __repr__(self) -> str:
        return f"GgufModel({str(self.file.path)!r}, {self.config['model_type']}, {len(self.file.tensors)} tensors)"

    @property
    def family(self) -> AnyFamily:
        return models.family_of(self.config)

    def read_config(self) -> ModelConfig:
        """The family's config. Frequency factors, which config.json has no key for, are in its rotary table."""
        try:
            config: Any = self.family.read_config(self.config)
        except CheckpointError as error:
            raise CheckpointError(f"{self.file.path}: {str(error).removeprefix('config.json: ')}") from None
        if ROPE_FACTORS not in self.file:
            return config
        factors = self.source.factors(len(config.rope.inv_freq))
        table = (config.rope.inv_freq.astype(np.float64) / factors).astype(np.float32)
        return dataclasses.replace(config, rope=dataclasses.replace(config.rope, inv_freq=table))

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of the config and of the name, type and shape of each tensor; the weights do not matter."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, info in sorted(self.file.tensors.items()):
            digest.update(json.dumps([name, info.type, info.shape]).encode() + b"\n")
        return digest.hexdigest()

    @property
    def columns(self) -> int:
        """Columns at whose multiples every matrix can be cut: whole blocks."""
        types = {info.type for info in self.file.tensors.values()}
        return max([GGUF_COLUMNS, *(BLOCK_TYPES[type].size for type in types if type in BLOCK_TYPES)])

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they are used."""
        return sum(self.file.loaded_nbytes(name) for name in self.file.tensors)

    @property
    def copied_nbytes(self) -> int:
        """Bytes of the weights that lie in memory and not in the mapped file: codes, and rows that move."""
        names = {name for name in self.file.tensors if self.file.is_copied(name)} | self.source.moved()
        return sum(self.file.loaded_nbytes(name) for name in names)

    @property
    def notices(self) -> list[str]:
        """What a user should know although it is no error, one line each; complete once the weights were read."""
        found = list(self.file.notices)
        if self.copied_nbytes:
            size = amount(self.copied_nbytes)
            found.append(f"{self.file.path}: {size} of weights are copied into memory, their order in GGUF is another")
        if unused := self.source.unused():
            shown = ", ".join(unused[:3]) + (" …" if len(unused) > 3 else "")
            found.append(f"{self.file.path}: {len(unused)} tensors are not part of the model: {shown}")
        return found


def open_gguf(path: str | os.PathLike[str]) -> GgufModel:
    """Open a model file; no weights are read. Raises CheckpointError, which names the file, for anything wrong."""
    return GgufModel(GgufFile.open(path))


class GgufSource:
    """Weights of a GGUF file by penstock's paths, each checked against the shape that the config implies.

    A bias that the file does not have is zero: GGUF has each of them or leaves it out.
    """

    layout = "mlx"  # experts are stacked

    def __init__(self, file: GgufFile, config: dict[str, Any]) -> None:
        self.file = file
        names = models.family_of(config).gguf
        assert names is not None, "read_metadata knows no others"
        self._modules = names.modules
        self.architecture = names.architectures[file.metadata["general.architecture"]]
        turned = config["head_dim"] * config.get("partial_rotary_factor", 1.0)
        self._width = int(turned) if self.architecture.neighbours else 0
        self._head_dim: int = config["head_dim"]
        self._used: set[str] = set()

    def name(self, path: str) -> str:
        """The name of a tensor in the file: layers.3.self_attn.q_proj is blk.3.attn_q.weight."""
        module, suffix = (path.removesuffix(".bias"), ".bias") if path.endswith(".bias") else (path, ".weight")
        layer = _LAYER.fullmatch(module)
        inner = layer[2] if layer else module
        return (f"blk.{layer[1]}." if layer else "") + self._modules.get(inner, inner) + suffix

    def __contains__(self, path: str) -> bool:
        return self.name(path) in self.file

    def weight(self, path: str, *shape: int) -> Weight:
        tensor = self._tensor(path, shape)
        order = self.order(path, shape[0])
        return tensor if order is None else _taken(tensor, order)

    def vector(self, path: str, *shape: int) -> np.ndarray:
        if path.endswith(".bias") and path not in self:
            return np.zeros(shape, np.float32)
        tensor = self._tensor(path, shape)
        if isinstance(tensor, QuantizedTensor):
            kind = self.file.tensors[self.name(path)].type
            raise CheckpointError(f"{self.file.path}: tensor {self.name(path)} is {kind}, expected F32, F16 or BF16")
        order = self.order(path.removesuffix(".bias"), shape[0])
        return (tensor if order is None else tensor[order]).astype(np.float32)

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Weight:
        return _taken(self.weight(path, *shape), order)

    def stack(self, paths: Sequence[str], *shape: int) -> Weight:
        if len(paths) == 1:
            return self.weight(paths[0], *shape)
        layer = _LAYER.fullmatch(paths[0])
        name = f"blk.{layer[1] if layer else 0}.ffn_gate_exps.weight"
        raise CheckpointError(f"{self.file.path}: has no tensor {name!r}, expected the experts of a layer as one stack")

    def expert_files(self, paths: Sequence[str], *shape: int) -> ExpertFiles:
        """`stack` without a look at the file: where its matrices lie, dense or in blocks."""
        if len(paths) > 1:
            self.stack(paths, *shape)
        name = self.asked(paths[0], shape)
        if name not in self.file:
            raise CheckpointError(f"{self.file.path}: has no tensor {name!r}, expected the experts of a layer")
        info, (count, rows, columns) = self.file.tensors[name], shape
        if self.file.is_copied(name):
            kinds = ", ".join(("F32", "F16", "BF16", *BLOCK_TYPES))
            raise InvalidArgument(
                f"{self.file.path}: tensor {name} is {info.type}, which is put into another order in memory; "
                f"expected {kinds} for experts that are streamed"
            )
        blocks = info.type if info.type in BLOCK_TYPES else None
        if blocks is not None:
            known = BLOCK_TYPES[blocks]
            format = Format(known.bits, GROUP, blocks)
            spec = Spec((rows, columns // known.size * known.nbytes), "uint8")
        else:
            format, spec = None, Spec((rows, columns), _DENSE[info.type])
        part = stacked(self.file.path_of(name), info.start, count, spec)
        return ExpertFiles(name, format, (dataclasses.replace(part, blocks=blocks),))

    def mark_used(self, paths: Sequence[str]) -> None:
        """Count these as asked for."""
        self._used.update(map(self.name, paths))

    def factors(self, count: int) -> np.ndarray:
        """What the rotary frequencies are divided by, float64."""
        self._used.add(ROPE_FACTORS)
        tensor = self.file.tensor(ROPE_FACTORS)
        if isinstance(tensor, QuantizedTensor) or tensor.shape != (count,):
            found = f"{self.file.tensors[ROPE_FACTORS].type} of shape {tuple(tensor.shape)}"
            raise CheckpointError(f"{self.file.path}: tensor {ROPE_FACTORS} is {found}, expected {count} numbers")
        values = tensor.astype(np.float64)
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise CheckpointError(f"{self.file.path}: tensor {ROPE_FACTORS} has numbers that are not above 0")
        return values

    def moved(self) -> set[str]:
        """Tensors whose rows are put into another order."""
        return {name for name in self.file.tensors if self._width and name.endswith(("attn_q.weight", "attn_k.weight"))}

    def unused(self) -> list[str]:
        """Names of tensors that nothing asked for."""
        return sorted(name for name in self.file.tensors if name not in self._used)

    def _tensor(self, path: str, shape: tuple[int, ...]) -> Weight:
        return self.file.tensor(self.asked(path, shape))

    def asked(self, path: str, shape: tuple[int, ...]) -> str:
        """The name of a tensor in the file, which counts as used from now on. Raises CheckpointError for its shape."""
        name = self.name(path)
        if name in self.file and self.file.tensors[name].shape != shape:
            found = f"has shape {self.file.tensors[name].shape}, expected {shape} by the metadata"
            raise CheckpointError(f"{self.file.path}: tensor {name} {found}")
        self._used.add(name)
        return name

    def order(self, path: str, rows: int) -> np.ndarray | None:
        """Where the rows of a matrix are to come from; None if they stay."""
        if not self._width or not path.endswith(("self_attn.q_proj", "self_attn.k_proj")):
            return None
        pairs = np.arange(self._width).reshape(-1, 2)
        head = np.concatenate([pairs[:, 0], pairs[:, 1], np.arange(self._width, self._head_dim)])
        return (np.arange(0, rows, self._head_dim)[:, None] + head).reshape(-1)


def read_metadata(file: GgufFile) -> dict[str, Any]:
    """The keys of config.json that the metadata and the tensors of a file stand for.

    Raises CheckpointError, naming file and key, for what is missing, of another kind, or not supported.
    """
    known = _architectures()
    arch = Fields(file.metadata, str(file.path)).choice("general.architecture", tuple(known))
    special = known[arch]
    fields = _Keys(_numbers(file, arch), f"{file.path}: {arch}")
    if unknown := [key for key in fields.values if key not in _KNOWN and key not in _NEUTRAL]:
        more = f" and {len(unknown) - 1} others" if len(unknown) > 1 else ""
        file.notices.append(f"{file.path}: metadata {arch}.{unknown[0]}{more} is not known and ignored")
    for key, neutral in _NEUTRAL.items():
        if key in fields and fields.values[key] != neutral:
            expected = "no such key" if neutral is None else f"{neutral!r}, the only value penstock supports"
            raise fields.error(key, expected)
    dim = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", None)
    if head_dim is None:
        fields.require(dim % heads == 0, f"embedding_length {dim} is no multiple of attention.head_count {heads}")
        head_dim = dim // heads
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.error("attention.value_length", f"{head_dim}, the length of keys")
    config: dict[str, Any] = {
        "model_type": special.model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": dim,
        "num_hidden_layers": fields.integer("block_count", most=4096),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", above=0),
        "rope_theta": fields.number("rope.freq_base", 10000.0, above=0),
        "attention_bias": not special.biased and _any(file, r"blk\.\d+\.attn_(q|k|v|output)\.bias"),
        "mlp_bias": _any(file, r"blk\.\d+\.ffn_(gate|up|down)\.bias"),
        "tie_word_embeddings": "output.weight" not in file,
    }
    config |= _experts(fields, special) or {"intermediate_size": fields.integer("feed_forward_length")}
    config |= _rotation(file, fields, head_dim) | _window(fields, special)
    return config


def _architectures() -> dict[str, GgufArchitecture]:
    """Those of all families."""
    return {name: found for f in models.families() if f.gguf for name, found in f.gguf.architectures.items()}


class _Keys(Fields):
    """The metadata of one architecture, whose name is a part of each key."""

    def error(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(str(super().error(key, expected)).replace(f"{self.where}: ", f"{self.where}.", 1))


def _check_kind(file: GgufFile) -> None:
    fields = Fields(file.metadata, str(file.path))
    fields.choice("general.type", ("model",), "model")


def _numbers(file: GgufFile, arch: str) -> dict[str, Any]:
    """The metadata of an architecture without its prefix; an array that says the same for each layer is one value."""
    found: dict[str, Any] = {}
    for key, value in file.metadata.items():
        if not key.startswith(f"{arch}."):
            continue
        if isinstance(value, np.ndarray):
            value = value[0].item() if value.size and (value == value[0]).all() else value.tolist()
        if isinstance(value, float) and math.isfinite(value) and float(np.float32(value)) == value:
            value = float(str(np.float32(value)))  # 1e-05 and not 9.999999747378752e-06: what config.json said
        found[key.removeprefix(f"{arch}.")] = value
    return found


def _vocab_size(file: GgufFile) -> int:
    if "token_embd.weight" not in file:
        raise CheckpointError(f"{file.path}: has no tensor 'token_embd.weight', expected the weights of a model")
    shape = file.tensors["token_embd.weight"].shape
    if len(shape) != 2:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight has shape {list(shape)}, expected [vocab, dim]")
    return shape[0]


def _experts(fields: Fields, arch: GgufArchitecture) -> dict[str, Any]:
    """Keys of the experts; none for a model without them."""
    count = fields.integer("expert_count", 0, least=0)
    if not arch.experts:
        if count:
            having = ", ".join(name for name, found in _architectures().items() if found.experts)
            raise fields.error("expert_count", f"no experts: of the models in GGUF penstock runs those of {having}")
        return {}
    return {
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "norm_topk_prob": fields.boolean("expert_weights_norm", True),
    }


def _rotation(file: GgufFile, fields: Fields, head_dim: int) -> dict[str, Any]:
    """Rotary channels and how their frequencies are scaled."""
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in file:
            raise CheckpointError(f"{file.path}: has {name} (LongRoPE), expected frequencies of one kind")
    config: dict[str, Any] = {}
    width = fields.integer("rope.dimension_count", head_dim)
    if not (width % 2 == 0 and 2 <= width <= head_dim):
        raise fields.error("rope.dimension_count", f"an even number up to {head_dim}")
    if width != head_dim:
        config["partial_rotary_factor"] = math.nextafter(width / head_dim, 1)  # times head_dim is not below width
    kind = fields.choice("rope.scaling.type", ("none", "linear", "yarn"), "linear")
    factor = fields.number("rope.scaling.factor", None) or fields.number("rope.scale_linear", None) or 1.0
    if factor <= 0:
        raise fields.error("rope.scaling.factor", "a number above 0")
    if kind == "yarn":
        config["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": fields.integer(
                "rope.scaling.original_context_length", fields.integer("context_length")
            ),
            "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0, above=0),
            "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0, above=0),
        }
    elif kind == "linear" and factor != 1:
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return config


def _window(fields: Fields, arch: GgufArchitecture) -> dict[str, Any]:
    """A sliding window of all layers, as the first Mistral has it."""
    window = fields.integer("attention.sliding_window", 0, least=0)
    if not window or window >= fields.integer("context_length"):
        return {}
    if arch.windowed is None or "attention.sliding_window_pattern" in fields:
        having = ", ".join(name for name, found in _architectures().items() if found.windowed)
        expected = f"none: of the models in GGUF only those of {having} may have one"
        raise fields.error("attention.sliding_window", expected)
    return {"model_type": arch.windowed, "sliding_window": window}


def _any(file: GgufFile, pattern: str) -> bool:
    return any(re.fullmatch(pattern, name) for name in file.tensors)
