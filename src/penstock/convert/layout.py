"""From the names and shapes of released files to those of mlx-lm: prefixes, experts in stacks, norms, latent heads.

The result is checked by the code that runs the model: its family reads the weights from the plan, so that a tensor that
is missing or of another shape is found before anything is written, and one that the model does not have is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock import models
from penstock.convert.rows import (
    BLOCK,
    BlockScaled,
    Dequantized,
    Files,
    Half,
    Heads,
    InTurns,
    PlusOne,
    Rows,
    Shaped,
    Stacked,
    Words,
    describe,
    stored,
)
from penstock.dtypes import FLOATS, bfloat16, dtype_name
from penstock.errors import CheckpointError
from penstock.models import mtp
from penstock.models.family import AnyFamily, MlxRules, SplitHeads
from penstock.models.source import Weight
from penstock.quant import Format
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.files import short

PARTS = ("weight", "scales", "biases", "global_scale")  # of a quantized matrix

_UNUSED = ("rotary_emb.inv_freq", "input_max", "input_min", "output_max", "output_min")  # buffers, not weights
_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.((?:gate|up|down)_proj|w[123])\.(weight|scales|biases)")
_SPELLED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # parts of an expert, as Mixtral has them
_JOINED = re.compile(r"(.+)\.experts\.(gate_up|down)_proj")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_SCALE = "_scale_inv"
_BLOCKS = "_blocks"
_MXFP4 = Format(4, 32, "mxfp4")
_HEAD = "mtp."  # before the paths of a head that drafts


@dataclass(frozen=True)
class ConversionPlan:
    """A model in mlx-lm's names: its tensors, which modules of them are quantized already, and its config.json.

    rules: what its family says about mlx-lm's files. formats: by the path of a module; those
    modules have `<path>.weight`, `.scales` and what else of PARTS belongs to it. extra: names of the layers that
    predict further tokens, which mlx-lm does not know. rounded: dense modules that are to be quantized in these
    formats, whatever else is asked for.
    """

    family: AnyFamily
    rules: MlxRules
    tensors: dict[str, Rows]
    formats: dict[str, Format]
    config: dict[str, Any]
    layers: int
    extra: frozenset[str]
    notices: tuple[str, ...]
    rounded: Mapping[str, Format] = field(default_factory=dict)
    partly: bool = False  # the released files are quantized in part: what is dense may be rounded beside it


class Released(Checkpoint):
    """A checkpoint whose matrices may also be block-scaled FP8, which penstock reads but does not run."""

    def _read_formats(self, listing: list[str]) -> Any:
        table = self.config.get("quantization_config")
        if not isinstance(table, dict) or table.get("quant_method") != "fp8" or self.config.get("quantization"):
            return super()._read_formats(listing)
        found = table.get("weight_block_size")
        if found != [BLOCK, BLOCK] or table.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            where = f"{self._config_path}: quantization_config"
            raise CheckpointError(f"{where} has weight_block_size {short(found)}, expected E4M3 in [{BLOCK}, {BLOCK}]")
        return None


def plan(checkpoint: Released, keep_mtp: bool = False, dense: bool = False) -> ConversionPlan:
    """The tensors that mlx-lm would have after reading a folder, none of them read yet.

    dense: what is quantized comes dequantized. Raises CheckpointError for a model that is not supported, incomplete,
    or does not fit its config.
    """
    config = checkpoint.config
    family = models.family_of(config)
    read = family.read_config(config)
    prefix, head, layout = family.names(checkpoint, read)
    rules = family.mlx_rules(config, read)
    family = replace(family, unquantized=(*family.unquantized, *rules.unquantized))
    tensors, formats = _opened(checkpoint, dense)
    if rules.in_columns:
        _of_columns(checkpoint, tensors)
    names = _Names(rules, prefix, head, len(family.caches(read)), checkpoint.path)
    tensors, formats = names.renamed(tensors, formats)
    tensors = _experts_stacked(tensors, rules.expert_stack, str(checkpoint.path))
    formats = {_stacked_path(path, rules.expert_stack): format for path, format in formats.items()}
    head = mtp.find(checkpoint, family, read) if keep_mtp else None
    forms = {True: layout if head is None else head.source.layout, False: layout}
    tensors = {
        name: _mlx_form(name, rows, rules) if forms[names.predicts(name)] == "hf" else rows
        for name, rows in tensors.items()
    }
    tensors = dict(_heads_split(tensors, formats, rules.split_heads))
    extra = {name for name in tensors if names.predicts(name)}
    checked = Checked(tensors, formats, names.target, names.target_head, str(checkpoint.path))
    family.read_weights(checked, read)
    kept = {
        name
        for name in tensors
        if name in checked.used or name.rpartition(".")[0].endswith(rules.kept) or (keep_mtp and name in extra)
    }
    tied = read.tied and f"{names.target_head}lm_head.weight" in tensors
    if tied:
        kept -= {f"{names.target_head}lm_head.{part}" for part in PARTS}
    notices = [*checkpoint.notices, *_left_out(checkpoint.path, tensors.keys() - kept, extra, tied, names.dropped)]
    return ConversionPlan(
        family,
        rules,
        {name: rows for name, rows in tensors.items() if name in kept},
        {path: format for path, format in formats.items() if f"{path}.weight" in kept},
        _config(config) | rules.config,
        names.layers,
        frozenset(extra & kept),
        tuple(notices),
        partly=any(name.endswith(_BLOCKS) for name in checkpoint.names),
    )


def plan_head(checkpoint: Released, dense: bool = False) -> ConversionPlan:
    """The folder of a head that drafts alone, as mlx-vlm writes it, of a model's files or of those of its head.

    dense: what is quantized comes dequantized. Raises CheckpointError for a model without a head, and for one that is
    incomplete or does not fit its config.
    """
    config, where = checkpoint.config, str(checkpoint.path)
    family = models.family_of(config)
    read = family.read_config(config)
    rules, found = mtp.rules_of(family, read), mtp.find(checkpoint, family, read)
    if rules is None or found is None:
        raise CheckpointError(f"{where}: has no head that drafts (multi-token prediction), expected a model with one")
    mlx, source = family.mlx_rules(config, read), found.source
    tensors, formats = _opened(checkpoint, dense)
    paths = {name: source.path_of(name) for name in tensors}
    tensors = {path: tensors[name] for name, path in paths.items() if path is not None}
    formats = {path: form for name, form in formats.items() if (path := source.path_of(name)) is not None}
    tensors = _experts_stacked(tensors, mlx.expert_stack, where)
    formats = {_stacked_path(path, mlx.expert_stack): format for path, format in formats.items()}
    if source.layout == "hf":
        tensors = {path: _mlx_form(_HEAD + path, rows, mlx) for path, rows in tensors.items()}
    tensors = dict(_heads_split(tensors, formats, mlx.split_heads))
    checked = Checked(tensors, formats, "", "", where)
    mtp.read(checked, family, read, nothing((0, 0)), nothing((0, 0)))
    own = checked.used | {f"{path}.{part}" for path in mtp.TABLES for part in PARTS}
    tensors = {path: rows for path, rows in tensors.items() if path in own}

    def named(path: str) -> str:
        module, _, part = path.rpartition(".")
        return f"{mtp.drafter_name(rules, module)}.{part}"

    text = _config(config)
    return ConversionPlan(
        replace(family, unquantized=(*family.unquantized, *mlx.unquantized)),
        mlx,
        {named(path): rows for path, rows in tensors.items()},
        {mtp.drafter_name(rules, path): form for path, form in formats.items() if f"{path}.weight" in tensors},
        mtp.drafter_config(rules, text.get("text_config", text)),
        1,
        frozenset(),
        tuple(checkpoint.notices),
    )


def _opened(checkpoint: Released, dense: bool) -> tuple[dict[str, Rows], dict[str, Format]]:
    """All tensors by their names in the files, FP8 with its scales as one, and the formats of quantized modules."""
    files = Files()
    found: dict[str, Rows] = {name: stored(files, checkpoint, name) for name in checkpoint.names}
    formats: dict[str, Format] = {}
    for name in list(found):
        if name.endswith(f".weight{_SCALE}"):
            found[name.removesuffix(_SCALE)] = _block_scaled(checkpoint, name, found)
            del found[name]
    in_blocks = _of_blocks(checkpoint, found)
    for path in in_blocks:
        if dense:
            parts = found.pop(f"{path}.weight"), found.pop(f"{path}.scales")
            found[f"{path}.weight"] = Dequantized(parts, _MXFP4, bfloat16)
        else:
            formats[path] = _MXFP4
    for name in list(found):
        if name.endswith(".scales") and (path := name.removesuffix(".scales")) not in formats:
            checkpoint.tensor(path)  # checks its parts against each other and against config.json
            format = checkpoint.quantization(path)
            assert format is not None
            if not dense:
                formats[path] = format
                continue
            packed, *rest = (found.pop(f"{path}.{part}") for part in format.parts)
            dtype = rest[0].dtype if format.mode == "affine" else bfloat16
            factors = found.pop(f"{path}.global_scale", None)
            found[f"{path}.weight"] = Dequantized((packed, *rest), format, dtype, factors)
    for name, rows in found.items():
        if isinstance(rows, BlockScaled | Dequantized) or name.rpartition(".")[0] in formats:
            continue
        if name in checkpoint and checkpoint.dtype(name).startswith("float8"):
            raise CheckpointError(f"{checkpoint.path}: tensor {short(name)} is FP8 without {short(name + _SCALE)}")
    return found, formats


def _of_blocks(checkpoint: Released, found: dict[str, Rows]) -> list[str]:
    """Experts of gpt-oss as it is released, in mlx-lm's names instead: words, scales and biases, with the rows of gate
    and up apart. Returns the paths of their modules.
    """
    paths: list[str] = []
    for name in [name for name in found if name.endswith(_BLOCKS)]:
        path = name.removesuffix(_BLOCKS)
        base, _, module = path.rpartition(".")
        codes, scales = (found.pop(part) for part in checkpoint.mxfp4_blocks(path))
        parts: dict[str, Rows] = {"weight": Words(codes), "scales": scales}
        if module != "gate_up_proj":
            paths.append(path)
            found |= {f"{path}.{part}": rows for part, rows in parts.items()}
        elif codes.shape[1] % 2:
            raise CheckpointError(f"{checkpoint.path}: {name} has {codes.shape[1]} rows, expected those of gate and up")
        else:
            paths += [f"{base}.gate_proj", f"{base}.up_proj"]
            found |= _gate_and_up(base, parts)
        found |= _bias_of(path, found)
    return paths


def _of_columns(checkpoint: Released, found: dict[str, Rows]) -> None:
    """Dense experts of gpt-oss as transformers saves them, [E, K, N] with the columns of gate and up in turns, in
    mlx-lm's names and form.
    """
    for name in [name for name in found if _JOINED.fullmatch(name)]:
        rows = found.pop(name)
        if len(rows.shape) != 3 or rows.shape[2] % 2:
            raise CheckpointError(f"{checkpoint.path}: {name} has shape {list(rows.shape)}, expected [E, K, an even N]")
        E, K, _ = rows.shape
        turned, (base, _, module) = Heads(rows, E, 0, K, turned=True), name.rpartition(".")
        found |= _gate_and_up(base, {"weight": turned}) if module == "gate_up_proj" else {f"{name}.weight": turned}
        found |= _bias_of(name, found)


def _gate_and_up(base: str, parts: Mapping[str, Rows]) -> dict[str, Rows]:
    """Two modules out of the parts of one that has their rows in turns."""
    halves = enumerate(("gate_proj", "up_proj"))
    return {f"{base}.{half}.{end}": InTurns(rows, bool(n)) for n, half in halves for end, rows in parts.items()}


def _bias_of(path: str, found: dict[str, Rows]) -> dict[str, Rows]:
    """The bias of a module of gpt-oss, taken out of `found`, in mlx-lm's names; none if it has none."""
    bias, (base, _, module) = found.pop(f"{path}_bias", None), path.rpartition(".")
    if bias is None or module != "gate_up_proj":
        return {} if bias is None else {f"{path}.bias": bias}
    halves = _gate_and_up(base, {"bias": Shaped(bias, (*bias.shape, 1))})
    return {name: Shaped(half, half.shape[:-1]) for name, half in halves.items()}


def _block_scaled(checkpoint: Released, name: str, found: Mapping[str, Rows]) -> Rows:
    matrix = name.removesuffix(_SCALE)
    where = f"{checkpoint.path}: tensor {short(name)}"
    if matrix not in found or checkpoint.dtype(matrix) != "float8_e4m3fn" or len(checkpoint.shape(matrix)) != 2:
        raise CheckpointError(f"{where} has no {short(matrix)} of two axes in F8_E4M3 beside it")
    scales = found[name]
    blocks = tuple(-(-size // BLOCK) for size in checkpoint.shape(matrix))
    if scales.shape != blocks or dtype_name(scales.dtype) not in FLOATS:
        raise CheckpointError(
            f"{where} is {describe(scales)}, expected floats {list(blocks)}, one per {BLOCK} x {BLOCK}"
        )
    return BlockScaled(found[matrix], scales)


class _Names:
    """Names of the text model with mlx-lm's prefix, and those of the layers that predict further tokens."""

    def __init__(self, rules: MlxRules, prefix: str, head: str, layers: int, folder: Any) -> None:
        self.prefix, self.head, self.layers, self.folder = prefix, head, layers, folder
        self.target, self.target_head = rules.prefixes
        self.parts = rules.renamed
        self.dropped: list[str] = []

    def renamed(
        self, tensors: Mapping[str, Rows], formats: Mapping[str, Format]
    ) -> tuple[dict[str, Rows], dict[str, Format]]:
        found: dict[str, Rows] = {}
        for name, rows in tensors.items():
            new = self.new(name)
            if new is None:
                self.dropped.append(name)
                continue
            if new in found:
                raise CheckpointError(f"{self.folder}: two tensors would be called {short(new)}, expected one")
            found[new] = rows
        paths = {self.new(f"{path}.weight"): format for path, format in formats.items()}
        kept = {path.removesuffix(".weight"): format for path, format in paths.items() if path is not None}
        return found, kept

    def new(self, name: str) -> str | None:
        if any(part in name for part in _UNUSED):
            return None
        start, found, rest = name.partition("mtp.")
        if found and start in ("", "model.", "language_model.", "model.language_model."):
            return f"{self.target_head}mtp.{rest}"
        if name.startswith(self.prefix):
            name = self.target + name.removeprefix(self.prefix)
            for part, other in self.parts:
                name = name.replace(part, other)
            return name
        return self.target_head + name.removeprefix(self.head) if name.startswith(f"{self.head}lm_head.") else None

    def predicts(self, name: str) -> bool:
        layer = _LAYER.search(name)
        return name.startswith(f"{self.target_head}mtp.") or (layer is not None and int(layer[1]) >= self.layers)


def _experts_stacked(tensors: Mapping[str, Rows], stack: str, where: str) -> dict[str, Rows]:
    """Experts as mlx-lm has them: one stack for each of gate, up and down, in the module `stack`."""
    found: dict[str, Rows] = {}
    single: dict[str, dict[int, Rows]] = {}
    for name, rows in tensors.items():
        if one := _EXPERT.fullmatch(name):
            path = f"{one[1]}.{stack}.{_SPELLED.get(one[3], one[3])}"
            single.setdefault(f"{path}.{one[4]}", {})[int(one[2])] = rows
        elif joined := _JOINED.fullmatch(name):
            base = f"{joined[1]}.{stack}"
            if joined[2] == "down":
                found[f"{base}.down_proj.weight"] = rows
            elif len(rows.shape) != 3 or rows.shape[1] % 2:
                raise CheckpointError(f"{where}: {name} has shape {list(rows.shape)}, expected [E, 2 I, dim]")
            else:
                found[f"{base}.gate_proj.weight"] = Half(rows, second=False)
                found[f"{base}.up_proj.weight"] = Half(rows, second=True)
        else:
            found[name] = rows
    for name, experts in single.items():
        parts = [experts.get(e) for e in range(len(experts))]
        missing = next((e for e, rows in enumerate(parts) if rows is None), None)
        if missing is not None:
            raise CheckpointError(f"{where}: {name} has {len(experts)} experts, but none of number {missing}")
        unlike = next((e for e, rows in enumerate(parts) if describe(rows) != describe(parts[0])), None)  # type: ignore[arg-type]
        if unlike is not None:
            a, b = (describe(parts[e]) for e in (unlike, 0))  # type: ignore[arg-type]
            raise CheckpointError(f"{where}: {name}: expert {unlike} is {a}, expected {b} as the others")
        found[name] = Stacked(tuple(parts))  # type: ignore[arg-type]
    return found


def _stacked_path(path: str, stack: str) -> str:
    """The path of a module, of an expert that of its stack."""
    one = _EXPERT.fullmatch(f"{path}.weight")
    return path if one is None else f"{one[1]}.{stack}.{_SPELLED.get(one[3], one[3])}"


def _mlx_form(name: str, rows: Rows, rules: MlxRules) -> Rows:
    """What mlx-lm stores in another form than Hugging Face."""
    if name.endswith(rules.channels_last) and len(rows.shape) == 3 and rows.shape[1] == 1:
        C, _, W = rows.shape
        return Shaped(rows, (C, W, 1))
    return PlusOne(rows) if name.endswith(rules.offset_norms) and len(rows.shape) == 1 else rows


def _heads_split(
    tensors: Mapping[str, Rows], formats: Mapping[str, Any], rules: Mapping[str, SplitHeads]
) -> Iterable[tuple[str, Rows]]:
    """Matrices of heads that mlx-lm has in parts, unless they are quantized or of another shape."""
    for name, rows in tensors.items():
        path = name.removesuffix(".weight")
        base, _, module = path.rpartition(".")
        rule = rules.get(module)
        if rule is None or path == name or path in formats or rows.shape != rule.shape:
            yield name, rows
        else:
            for part, (first, last, turned) in rule.parts.items():
                yield f"{base}.{part}.weight", Heads(rows, rule.heads, first, last, turned)


class Checked:
    """A `models.source.Source` over planned tensors: says whether they are a whole model, and which of them it uses.

    Its arrays have shapes and no memory.
    """

    layout = "mlx"

    def __init__(
        self, tensors: Mapping[str, Rows], formats: Mapping[str, Format], prefix: str, head: str, where: str
    ) -> None:
        self._tensors, self._formats = tensors, formats
        self._prefix, self._head, self._where = prefix, head, where
        self.used: set[str] = set()

    def _path(self, path: str) -> str:
        return (self._head if path == "lm_head" else self._prefix) + path

    def __contains__(self, path: str) -> bool:
        name = self._path(path)
        return name in self._tensors or f"{name}.weight" in self._tensors

    def weight(self, path: str, *shape: int) -> Weight:
        name = self._path(path)
        rows = self._rows(name)
        if name in self._formats:
            found = (*rows.shape[:-1], rows.shape[-1] * 32 // self._formats[name].bits)
            self.used.update(f"{name}.{part}" for part in PARTS)
        else:
            found = rows.shape
        self._check(name, found, shape)
        return nothing(shape)

    def vector(self, path: str, *shape: int) -> np.ndarray:
        name = self._path(path)
        if name in self._formats:
            raise CheckpointError(f"{self._where}: {name} is quantized, expected a dense tensor")
        self._check(name, self._rows(name).shape, shape)
        return nothing(shape)

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Weight:
        self.weight(path, *shape)
        return nothing((len(order), *shape[1:]))

    def stack(self, paths: Sequence[str], *shape: int) -> Weight:
        if len(paths) == 1:
            return self.weight(paths[0], *shape)
        first = short(self._path(paths[0]))
        raise CheckpointError(f"{self._where}: has no experts {first}, expected them by config.json")

    def _rows(self, name: str) -> Rows:
        found = next((n for n in (f"{name}.weight", name) if n in self._tensors), None)
        if found is None:
            raise CheckpointError(f"{self._where}: has no tensor {short(name + '.weight')}, expected it by config.json")
        rows = self._tensors[found]
        if name not in self._formats and dtype_name(rows.dtype) not in FLOATS:
            raise CheckpointError(
                f"{self._where}: {found} has dtype {dtype_name(rows.dtype)}, expected one of {', '.join(FLOATS)}"
            )
        self.used.add(found)
        return rows

    def _check(self, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if found != expected:
            raise CheckpointError(f"{self._where}: {name} has shape {found}, expected {expected} by config.json")


def nothing(shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.float32(0), shape)


def _config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json without what belongs to other files: vision, names of folders, the quantization of the source."""
    left = ("_name_or_path", "vision_config", "quantization", "quantization_config")
    made = {key: value for key, value in config.items() if key not in left}
    text = made.get("text_config")
    if isinstance(text, dict):
        made["text_config"] = {key: value for key, value in text.items() if key not in left[2:]}
    return made


def _left_out(folder: Any, names: set[str], extra: set[str], tied: bool, dropped: list[str]) -> list[str]:
    """One remark about parts that are known, one about unknown tensors."""
    notices = []
    other = sorted(names - extra)
    if tied:
        other = [name for name in other if ".lm_head." not in f".{name}"]
        notices.append(f"{folder}: lm_head is left out, config.json says that it is tied to the embedding")
    if skipped := len(names & extra):
        notices.append(f"{folder}: {skipped} tensors that predict further tokens are left out (--keep-mtp keeps them)")
    if other or dropped:
        shown = [*other, *dropped]
        more = f"{', '.join(map(short, shown[:3]))}{' …' if len(shown) > 3 else ''}"
        notices.append(f"{folder}: {len(shown)} tensors are not part of the text model and left out: {more}")
    return notices
