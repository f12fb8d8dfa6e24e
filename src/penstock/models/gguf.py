"""Models in GGUF files: metadata as a config.json, tensor names as paths, tensors as mlx-lm's files have them.

Families say which architectures they run, what GGUF calls their modules, and what llama.cpp's converter did to their
tensors (`Family.gguf`), which is undone here: rows move whole, vectors are turned back, nothing is quantized again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from penstock import models
from penstock.errors import CheckpointError
from penstock.experts.layout import ExpertFiles, TensorExtents, stacked
from penstock.models.config import Fields
from penstock.models.family import AnyFamily, GgufArchitecture, ModelConfig
from penstock.models.gguf_keys import GgufKeys
from penstock.models.source import Weight, _taken
from penstock.models.split import GGUF_COLUMNS
from penstock.ops.array import Spec
from penstock.quant import BLOCK_TYPES, Format, QuantizedTensor, first_unsound_scale
from penstock.quant.gguf_blocks import GROUP
from penstock.units import amount
from penstock.weights.gguf import BLOCKS, SUPPORTED, GgufFile

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
ROPE_FACTORS = "rope_freqs.weight"
_DENSE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufModel:
    """A model file: its config, where its weights come from, and what a user should know about it.

    Raises CheckpointError for an architecture, a setting or a type of tensor that penstock does not run, before any
    weight is read; `types` of tensors may be more than those that run.
    """

    def __init__(self, file: GgufFile, types: Collection[str] = SUPPORTED) -> None:
        self.file = file
        _check_kind(file)
        self.config = read_metadata(file)
        """What config.json would say."""
        self.source = GgufSource(file, self.config)
        self.tensors = [name for name in file.tensors if not self.source.is_further(name)]
        """Names of those that are not of a part which is not run."""
        for name in self.tensors:
            file.check_supported(name, types, convertible=not self.source.architecture.unwritten)

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
        if ROPE_FACTORS not in self.file or self.source.architecture.own_factors:
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
        types = {self.file.tensors[name].type for name in self.tensors}
        return max([GGUF_COLUMNS, *(BLOCK_TYPES[type].size for type in types if type in BLOCK_TYPES)])

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they are used."""
        return sum(map(self.file.loaded_nbytes, self.tensors))

    @property
    def copied_nbytes(self) -> int:
        """Bytes of the weights that lie in memory and not in the mapped file: codes, and rows that move."""
        names = [name for name in self.tensors if self.file.is_copied(name) or self.source.is_moved(name)]
        return sum(map(self.file.loaded_nbytes, names))

    @property
    def notices(self) -> list[str]:
        """What a user should know although it is no error, one line each; complete once the weights were read."""
        found = list(self.file.notices)
        if self.copied_nbytes:
            size = amount(self.copied_nbytes)
            found.append(f"{self.file.path}: {size} of weights are copied into memory, their order in GGUF is another")
        if further := sum(map(self.source.is_further, self.file.tensors)):
            what = f"{further} tensors of layers from {self.config['num_hidden_layers']} on"
            found.append(f"{self.file.path}: {what} (prediction of further tokens) are skipped")
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
        self.config = config
        names = models.family_of(config).gguf
        assert names is not None, "read_metadata knows no others"
        self.architecture = names.architectures[file.metadata["general.architecture"]]
        self._modules = {**names.modules, **self.architecture.modules}
        self._tensors, self._stacks = names.tensors, names.stacks
        self._paths = {name: path for path, name in self._modules.items()}
        keys = GgufKeys(file, file.metadata["general.architecture"])
        self._further = keys.integer("nextn_predict_layers", 0, least=0)
        self._used: set[str] = {ROPE_FACTORS} if self.architecture.own_factors else set()

    def name(self, path: str) -> str:
        """The name of a tensor in the file: layers.3.self_attn.q_proj is blk.3.attn_q.weight."""
        layer = _LAYER.fullmatch(path)
        inner, block = (layer[2], f"blk.{layer[1]}.") if layer else (path, "")
        if inner in self._tensors:
            return block + self._tensors[inner]
        if (one := self._one_of_stack(path)) is not None:
            return f"{self._stacks[one[0]]}.weight"
        module, suffix = (inner.removesuffix(".bias"), ".bias") if inner.endswith(".bias") else (inner, ".weight")
        return block + self._modules.get(module, module) + suffix

    def _one_of_stack(self, path: str) -> tuple[str, int] | None:
        """The stack that a path is a matrix of, and which."""
        stem, _, number = path.rpartition(".")
        return (stem, int(number)) if stem in self._stacks and number.isdecimal() else None

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
        values = (tensor if order is None else tensor[order]).astype(np.float32)
        undo = self.undo(path)
        return values if undo is None else undo(values)

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Weight:
        weight = self.weight(path, *shape)
        return weight if np.array_equal(order, np.arange(shape[0])) else _taken(weight, order)

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
        info, (count, rows, columns) = self.file.info(name), shape
        self.file.check_supported(name)
        path, kind = self.file.path_of(name), info.type
        if kind in _DENSE:
            return ExpertFiles(name, None, (stacked(path, info.start, count, Spec((rows, columns), _DENSE[kind])),))
        if kind in BLOCK_TYPES:
            known = BLOCK_TYPES[kind]
            part = stacked(path, info.start, count, Spec((rows, columns // known.size * known.nbytes), "uint8"))
            return ExpertFiles(name, Format(known.bits, GROUP, kind), (dataclasses.replace(part, blocks=kind),))
        record, bits, _ = BLOCKS[kind]
        groups = columns // GGUF_COLUMNS
        whole = stacked(path, info.start, count, Spec((rows, groups * record.itemsize), "uint8"))
        specs = Spec((rows, groups * bits), "uint32"), *[Spec((rows, groups), "float16")] * 2
        parts = (TensorExtents(spec, whole.extents, dealt=kind, share=n) for n, spec in enumerate(specs))
        return ExpertFiles(name, Format(bits, GGUF_COLUMNS), tuple(parts))

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

    def is_moved(self, name: str) -> bool:
        """Whether the rows of a tensor are put into another order, here or by the family."""
        block = _BLOCK.fullmatch(name)
        path = self._paths.get((block[2] if block else name).removesuffix(".weight"))
        shape = self.file.tensors[name].shape
        if path is None or not shape:
            return False
        return path in self.architecture.copied or self.order(path, shape[0]) is not None

    def is_further(self, name: str) -> bool:
        """Whether a tensor is of a layer behind the last one, which predicts further tokens."""
        block = _BLOCK.fullmatch(name)
        if block is None or self._further == 0:
            return False
        return 0 <= int(block[1]) - self.config["num_hidden_layers"] < self._further

    def unused(self) -> list[str]:
        """Names of tensors that nothing asked for."""
        return sorted(name for name in self.file.tensors if name not in self._used and not self.is_further(name))

    def _tensor(self, path: str, shape: tuple[int, ...]) -> Weight:
        name = self.asked(path, shape)
        tensor = self.file.tensor(name)
        if isinstance(tensor, QuantizedTensor) and tensor.mode == "MXFP4":
            # Read as 2^127 by the gguf package, as NaN by the format's standard: no model that is whole has one.
            blocks = tensor.packed.reshape(-1, BLOCK_TYPES["MXFP4"].nbytes)
            if (block := first_unsound_scale("mxfp4", blocks[:, 0])) >= 0:
                found = f"has a scale that is not finite in block {block}"
                raise CheckpointError(f"{self.file.path}: tensor {name} {found}, expected finite numbers: damaged?")
        if (one := self._one_of_stack(path)) is not None:
            return tensor[one[1]]
        return tensor if isinstance(tensor, QuantizedTensor) else tensor.reshape(shape)

    def asked(self, path: str, shape: tuple[int, ...]) -> str:
        """The name of a tensor in the file, which counts as used from now on. Raises CheckpointError for its shape.

        Of a dense one axes of size 1 do not count: converters drop and add them.
        """
        name = self.name(path)
        if name in self.file:
            info = self.file.tensors[name]
            if (one := self._one_of_stack(path)) is not None and info.shape[:1] > (one[1],):
                info = info._replace(shape=info.shape[1:])
            own, wanted = (info.shape, shape) if info.type not in _DENSE else (_filled(info.shape), _filled(shape))
            if own != wanted:
                found = f"has shape {info.shape}, expected {shape} by the metadata"
                raise CheckpointError(f"{self.file.path}: tensor {name} {found}")
        self._used.add(name)
        return name

    def order(self, path: str, rows: int) -> np.ndarray | None:
        """Where the rows of a matrix are to come from; None if they stay."""
        rule = self.architecture.rows
        return None if rule is None else rule(self.config, path, rows)

    def written_order(self, path: str, axis: int, size: int) -> np.ndarray | None:
        """Where rows (axis 0) or columns (1) of a matrix come from in a file for mlx-lm; None if they stay."""
        layer = _LAYER.fullmatch(path)
        rule, inner = self.architecture.written, layer[2] if layer else path
        if rule is not None and (order := rule(self.config, inner, axis)) is not None:
            return order
        return self.order(path.removesuffix(".bias"), size) if axis == 0 else None

    def written(self, path: str, shape: tuple[int, ...]) -> np.ndarray:
        """A vector as a file for mlx-lm has it."""
        values = self.vector(path, *shape)
        rule, layer = self.architecture.written, _LAYER.fullmatch(path)
        order = None if rule is None else rule(self.config, layer[2] if layer else path, 0)
        return values if order is None else np.ascontiguousarray(values[order])

    def undo(self, path: str) -> Callable[[np.ndarray], np.ndarray] | None:
        """What makes of a vector in the file the one that was released; None: it is that one."""
        layer = _LAYER.fullmatch(path)
        inner = layer[2] if layer else path
        return next((undo for pattern, undo in self.architecture.values.items() if fnmatchcase(inner, pattern)), None)


def _filled(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def read_metadata(file: GgufFile) -> dict[str, Any]:
    """The keys of config.json that the metadata and the tensors of a file stand for.

    Raises CheckpointError, naming file and key, for what is missing, of another kind, or not supported.
    """
    known = _architectures()
    arch = Fields(file.metadata, str(file.path)).choice("general.architecture", tuple(known))
    keys = GgufKeys(file, arch)
    config = known[arch].config(keys)
    keys.check_rest()
    return config


def _architectures() -> dict[str, GgufArchitecture]:
    """Those of all families."""
    return {name: found for f in models.families() if f.gguf for name, found in f.gguf.architectures.items()}


def _check_kind(file: GgufFile) -> None:
    fields = Fields(file.metadata, str(file.path))
    fields.choice("general.type", ("model",), "model")
