"""GGUF files as MLX models: names, rows in mlx-lm's order, blocks of codes as groups of 32, and the tokenizer.

Q4_0, Q4_1 and Q8_0 are affine codes in groups of 32 with float16 scales, so they keep every value. The other block
formats are dequantized, and what becomes of them is rounded again; those that no kernel reads by the gguf package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.convert.layout import ConversionPlan, nothing
from penstock.convert.rows import Cast, Dequantized, Files, Half, Rows, Stored, Whole
from penstock.dtypes import bfloat16
from penstock.errors import CheckpointError, InvalidArgument
from penstock.models.family import MlxRules
from penstock.models.gguf import ROPE_FACTORS, GgufModel
from penstock.models.source import Weight
from penstock.quant import BLOCK_TYPES, Format
from penstock.weights.files import short
from penstock.weights.gguf import CONVERTED, SUPPORTED, GgufFile, reorder_nibbles

if TYPE_CHECKING:
    from penstock.convert.run import Options

GROUP = 32

_DENSE = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": bfloat16}
_HALF = np.dtype(np.float16)
# Formats whose codes are affine in groups of 32: bytes of a block, bits, and the bias in scales (None: it has its own).
_EXACT = {"Q4_0": (18, 4, -8), "Q4_1": (20, 4, None), "Q8_0": (34, 8, -128)}


_PARTS = Format(4, 32).parts


def plan(path: Path, options: Options) -> tuple[ConversionPlan, GgufFile]:
    """The tensors of a file in mlx-lm's names, none of them read yet; options as in `run.Options`.

    Raises CheckpointError for a file that is damaged or of a model that is not supported, InvalidArgument for types
    that would have to be rounded again and were not allowed to.
    """
    model = GgufModel(GgufFile.open(path), (*SUPPORTED, *CONVERTED))
    file, family, architecture = model.file, model.family, model.source.architecture
    if architecture.unwritten:
        kind = file.metadata["general.architecture"]
        raise InvalidArgument(f"{path}: is of {kind}, expected the released files to convert: {architecture.unwritten}")
    read, name_of = model.read_config(), model.source.name
    rules = family.mlx_rules(model.config, read)
    config = model.config | _frequencies(model) | _said_elsewhere(model) | rules.config
    if architecture.written is not None:
        config.pop("linear_value_heads_tiled", None)
    wanted = _Asked(model)
    family.read_weights(wanted, read)
    _check_types(file, wanted, options)
    tensors: dict[str, Rows] = {}
    formats: dict[str, Format] = {}
    rounded: dict[str, Format] = {}
    files = Files()
    for asked, whole in wanted.shapes.items():
        name = name_of(asked)
        if name not in file:
            tensors[_target(asked, rules)] = Whole(whole, np.dtype(np.float32), partial(np.zeros, whole, np.float32))
            continue
        info = file.tensors[name]
        if asked in wanted.vectors:
            make = partial(model.source.written, asked, whole)
            tensors[_target(asked, rules)] = Whole(whole, np.dtype(np.float32), make)
            continue
        order, columns = model.source.written_order(asked, 0, whole[0]), model.source.written_order(asked, 1, whole[-1])
        for target, shape, second in _parts(asked, whole, rules, wanted.joined):
            if info.type in _DENSE:
                dense = Stored(files, file.path_of(name), info.start, whole, _DENSE[info.type])
                tensors[f"{target}.weight"] = _columns(_taken(_half(dense, second), order), columns)
                continue
            width = info.nbytes // math.prod(whole[:-1])
            raw = Stored(files, file.path_of(name), info.start, (*whole[:-1], width), np.dtype(np.uint8))
            blocks = _taken(_half(raw, second), order)
            if info.type not in _EXACT:
                decoded = _columns(_Decoded(blocks, info.type, shape), columns)
                tensors[f"{target}.weight"] = Cast(decoded, _HALF, name)
                if not (options.quantize or options.dequantize or target.endswith(rules.unquantized)):
                    size = options.q_group_size or GROUP
                    bits = options.q_bits or _KEPT[info.type]
                    rounded[target] = Format(bits, size if shape[-1] % size == 0 else GROUP)
                continue
            if columns is not None:
                blocks = _columns(blocks, _whole_blocks(columns, _EXACT[info.type][0], f"{path}: tensor {name}"))
            bits = _EXACT[info.type][1]
            parts = [_Codes(blocks, info.type, shape, part, f"{path}: tensor {name}") for part in _PARTS]
            again = options.requantize and options.quantize
            if options.dequantize or again or target.endswith(rules.unquantized):
                tensors[f"{target}.weight"] = Dequantized(tuple(parts), Format(bits, GROUP), parts[1].dtype)
            else:
                tensors |= {f"{target}.{part}": rows for part, rows in zip(_PARTS, parts, strict=True)}
                formats[target] = Format(bits, GROUP)
    unused = sorted(file.tensors.keys() - {ROPE_FACTORS, *map(name_of, wanted.shapes)})
    notices = list(file.notices)
    if unused:
        shown = ", ".join(map(short, unused[:3])) + (" …" if len(unused) > 3 else "")
        notices.append(f"{path}: {len(unused)} tensors are not part of the model and left out: {shown}")
    layers = model.config["num_hidden_layers"]
    return ConversionPlan(family, rules, tensors, formats, config, layers, frozenset(), tuple(notices), rounded), file


# Ends of the paths of tensors that are not a module's weight.
_PLAIN = ("_bias", ".bias", ".A_log", ".sinks", ".layer_scalar", ".scale", ".per_expert_scale")


def _target(asked: str, rules: MlxRules) -> str:
    """The name of a tensor in mlx-lm's files."""
    prefix, head = rules.prefixes
    name = (head if asked == "lm_head" else prefix) + asked
    return name if name.endswith(_PLAIN) else f"{name}.weight"


def _parts(
    asked: str, shape: tuple[int, ...], rules: MlxRules, joined: bool
) -> list[tuple[str, tuple[int, ...], bool | None]]:
    """Modules of mlx-lm that a tensor is, their shapes, and which half of its rows; gates beside ups are two."""
    name = _target(asked, rules).removesuffix(".weight")
    stem, _, part = name.rpartition(".experts.")
    if part == "gate_up_proj":
        half = (shape[0], shape[1] // 2, shape[2])
        return [(f"{stem}.{rules.expert_stack}.{one}_proj", half, one == "up") for one in ("gate", "up")]
    if part == "down_proj" and joined:
        return [(f"{stem}.{rules.expert_stack}.down_proj", shape, None)]
    return [(name, shape, None)]


def _check_types(file: GgufFile, wanted: _Asked, options: Options) -> None:
    types = {name: file.tensors[name].type for name in map(wanted.source.name, wanted.shapes) if name in file}
    lossy = [name for name, type in types.items() if type in BLOCK_TYPES or type in CONVERTED]
    if lossy and not (options.requantize or options.dequantize):
        more = f" and {len(lossy) - 1} others" if len(lossy) > 1 else ""
        raise InvalidArgument(
            f"{file.path}: tensor {lossy[0]} is {types[lossy[0]]}{more}, expected Q4_0, Q4_1, Q8_0 or floats, which "
            "lose nothing; requantize rounds the others again, dequantize makes all dense"
        )
    quantized = [name for name, type in types.items() if type not in _DENSE]
    if quantized and options.quantize and not options.requantize:
        raise InvalidArgument(
            f"{file.path}: tensor {quantized[0]} is {types[quantized[0]]} already, expected floats to quantize; "
            "requantize rounds it again, without quantize it keeps its values"
        )
    decoded = [name for name in lossy if types[name] in CONVERTED]
    if decoded and find_spec("gguf") is None:
        found = f"{file.path}: tensor {decoded[0]} is {types[decoded[0]]}"
        raise InvalidArgument(f"{found}, expected the gguf package, which decodes it: pip install 'penstock[gguf]'")


class _Asked:
    """A `models.source.Source` over the tensors of a file that notes which of them the model wants, in what shapes."""

    layout = "mlx"

    def __init__(self, model: GgufModel) -> None:
        self.file, self.source = model.file, model.source
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.vectors: set[str] = set()

    @property
    def joined(self) -> bool:
        """Whether experts have their gates and ups in one tensor."""
        return any(path.endswith(".experts.gate_up_proj") for path in self.shapes)

    def __contains__(self, path: str) -> bool:
        return path in self.source

    def weight(self, path: str, *shape: int) -> Weight:
        file, name = self.file, self.source.name(path)
        if name not in file:
            raise CheckpointError(f"{file.path}: has no tensor {name!r}, expected it by the metadata")
        self.source.asked(path, shape)
        self.shapes[path] = shape
        return nothing(shape)

    def vector(self, path: str, *shape: int) -> np.ndarray:
        self.vectors.add(path)
        if path.endswith(".bias") and path not in self:
            self.shapes[path] = shape
            return nothing(shape)
        self.weight(path, *shape)
        file, name = self.file, self.source.name(path)
        if file.tensors[name].type not in _DENSE:
            kind = file.tensors[name].type
            raise CheckpointError(f"{file.path}: tensor {name} is {kind}, expected F32, F16 or BF16")
        return nothing(shape)

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Weight:
        return self.weight(path, *shape)

    def stack(self, paths: Sequence[str], *shape: int) -> Weight:
        return self.weight(paths[0], *shape) if len(paths) == 1 else self.source.stack(paths, *shape)


def _frequencies(model: GgufModel) -> dict[str, Any]:
    """rope_scaling for the factors of Llama 3.1, which config.json has as four numbers."""
    if ROPE_FACTORS not in model.file or model.source.architecture.own_factors:
        return {}
    width = int(model.config["head_dim"] * model.config.get("partial_rotary_factor", 1.0))
    factors = model.source.factors(width // 2)
    waves = model.config["rope_theta"] ** (-np.arange(0, width, 2) / width) / (2 * math.pi)
    low, high, factor = 1.0, 4.0, float(str(np.float32(factors.max())))
    for original in (1 << n for n in range(6, 21)):
        blend = np.clip((original * waves - low) / (high - low), 0, 1)
        if np.allclose(1 / (blend + (1 - blend) / factor), factors, rtol=1e-5):
            break
    else:
        raise CheckpointError(f"{model.file.path}: {ROPE_FACTORS} is none that config.json can say, expected Llama 3's")
    return {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    }


def _said_elsewhere(model: GgufModel) -> dict[str, Any]:
    """Keys that penstock does without and mlx-lm asks for."""
    if "num_experts" not in model.config:
        return {}
    arch = model.file.metadata["general.architecture"]
    width = model.file.metadata.get(f"{arch}.feed_forward_length", model.config["moe_intermediate_size"])
    return {"intermediate_size": width, "decoder_sparse_step": 1, "mlp_only_layers": []}


# -- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Taken:
    """Rows in another order; those that are next to each other afterwards were near each other before."""

    whole: Rows
    order: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape

    @property
    def dtype(self) -> np.dtype:
        return self.whole.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        chosen = self.order[start:stop]
        first, last = int(chosen.min()), int(chosen.max())
        return self.whole.read(first, last + 1)[chosen - first]


def _taken(rows: Rows, order: np.ndarray | None) -> Rows:
    return rows if order is None else _Taken(rows, order)


def _half(rows: Rows, second: bool | None) -> Rows:
    return rows if second is None else Half(rows, second)


@dataclass(frozen=True)
class _Columns:
    """Columns in another order."""

    whole: Rows
    order: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape

    @property
    def dtype(self) -> np.dtype:
        return self.whole.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(self.whole.read(start, stop)[:, self.order])


def _columns(rows: Rows, order: np.ndarray | None) -> Rows:
    return rows if order is None else _Columns(rows, order)


def _whole_blocks(order: np.ndarray, nbytes: int, name: str) -> np.ndarray:
    """The order of the bytes of a row whose blocks of GROUP columns, `nbytes` each, move whole."""
    groups = order.reshape(-1, GROUP) if order.size % GROUP == 0 else order[:, None]
    if order.size % GROUP or (groups != groups[:, :1] + np.arange(GROUP)).any() or (groups[:, 0] % GROUP).any():
        raise InvalidArgument(f"{name} has blocks of {GROUP} columns, expected heads of a multiple of that")
    return (groups[:, :1] // GROUP * nbytes + np.arange(nbytes)).reshape(-1)


@dataclass(frozen=True)
class _Codes:
    """Packed words, scales or biases of Q4_0, Q4_1 or Q8_0, made of the bytes of its blocks."""

    blocks: Rows
    type: str
    full: tuple[int, ...]
    part: str
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        K = self.full[-1]
        return (*self.full[:-1], K * _EXACT[self.type][1] // 32 if self.part == "weight" else K // GROUP)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint32) if self.part == "weight" else _HALF

    def read(self, start: int, stop: int) -> np.ndarray:
        nbytes, bits, offset = _EXACT[self.type]
        data = self.blocks.read(start, stop).reshape(-1, nbytes)
        if self.part == "weight":
            codes = np.ascontiguousarray(data[:, nbytes - GROUP * bits // 8 :])
            if bits == 8:
                codes ^= 128  # signed to unsigned
            else:
                reorder_nibbles(codes.view("<u2").reshape(-1), ordered := np.empty((len(codes), 2), np.uint64))
                codes = ordered
            return codes.view("<u4").reshape(stop - start, -1)
        own = self.part == "biases" and offset is None
        found = np.ascontiguousarray(data[:, 2:4] if own else data[:, :2]).view(_HALF)
        if self.part == "biases" and offset is not None:
            with np.errstate(over="ignore"):
                found = found * _HALF.type(offset)
        if not np.isfinite(found).all():
            raise CheckpointError(
                f"{self.name} has a scale that is not finite or too large, expected float16 to hold it"
            )
        return found.reshape(stop - start, -1)


@dataclass(frozen=True)
class _Decoded:
    """The numbers of a block format, float32."""

    blocks: Rows
    type: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def read(self, start: int, stop: int) -> np.ndarray:
        data = self.blocks.read(start, stop)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused when it is rounded
            if (known := BLOCK_TYPES.get(self.type)) is not None:
                return known.values(data.reshape(-1, known.nbytes)).reshape(stop - start, -1)
            import gguf  # which few need

            rows = np.ascontiguousarray(data).reshape(stop - start, -1)
            return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[self.type])


# Bits that keep most of a type's values. Two groups of 16 with scales of their own share one of 32: one bit more keeps
# what the smaller of them had; so do levels that are not equally far apart. Rounding as MLX does may lose the outermost
# level of a group whose levels are symmetric, the more the fewer bits: none gets 2.
_KEPT = {
    "Q5_0": 5,
    "Q5_1": 5,
    "Q2_K": 3,
    "Q3_K": 4,
    "Q4_K": 4,
    "Q5_K": 5,
    "Q6_K": 6,
    "IQ4_NL": 5,
    "IQ4_XS": 5,
    "MXFP4": 5,
    "IQ1_S": 4,
    "IQ1_M": 4,
    "IQ2_XXS": 4,
    "IQ2_XS": 4,
    "IQ2_S": 4,
    "IQ3_XXS": 5,
    "IQ3_S": 5,
    "TQ1_0": 4,
    "TQ2_0": 4,
}


# -- the tokenizer ---------------------------------------------------------------------------------------------------


def tokenizer_files(file: GgufFile) -> tuple[dict[str, Any], str | None, list[str]]:
    """JSON files by name, the text of tokenizer.json, and remarks; no files without a tokenizer that is supported."""
    from penstock.text.gguf_tokenizer import gguf_tokenizer

    try:
        found = gguf_tokenizer(file)
    except CheckpointError as error:
        remark = f"the tokenizer is left out, expected its files from the model that the GGUF was made of: {error}"
        return {}, None, [remark]
    tokens = file.metadata["tokenizer.ggml.tokens"]
    ends = sorted(found.eos_ids)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    generation: dict[str, Any] = {"eos_token_id": ends} if ends else {}
    if found.bos_id is not None:
        settings["bos_token"] = tokens[found.bos_id]
        generation["bos_token_id"] = found.bos_id
    eos = file.metadata.get("tokenizer.ggml.eos_token_id", ends[0] if ends else None)
    if eos is not None:
        settings["eos_token"] = tokens[eos]
    key = "tokenizer.chat_template"
    named = {name.removeprefix(f"{key}."): text for name, text in file.metadata.items() if name.startswith(f"{key}.")}
    if named:
        templates = {"default": file.metadata[key], **named} if key in file.metadata else named
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif key in file.metadata:
        settings["chat_template"] = file.metadata[key]
    made = {"tokenizer_config.json": settings, "generation_config.json": generation}
    return made, found.backend.to_str(pretty=True), []
