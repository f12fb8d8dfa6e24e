"""penstock convert: a model of Hugging Face or a GGUF file as an MLX folder that mlx-lm loads, streamed row by row.

For the same settings the tensors are those of `mlx_lm.convert`, bit for bit. Nothing in the source is executed.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock._version import __version__
from penstock.convert import gguf, layout
from penstock.convert.layout import PARTS, ConversionPlan
from penstock.convert.recipe import Recipe, general_format, read_recipe, table_of
from penstock.convert.rows import Cast, Dequantized, Rows
from penstock.convert.write import SHARD_BYTES, Task, Tensor, Workshop, check_room, check_target, index, split_shards
from penstock.dtypes import FLOATS, dtype_name, numpy_dtype
from penstock.errors import CheckpointError, InvalidArgument
from penstock.models.source import CheckpointSource
from penstock.quant import Format, quantize
from penstock.text.gguf_tokenizer import gguf_tokenizer
from penstock.text.tokenizer import Tokenizer
from penstock.weights.checkpoint import INDEX, Checkpoint
from penstock.weights.files import list_folder, open_regular, read_json, short
from penstock.weights.resolve import resolve_model

# Tokenizer, templates and licence; config.json and the index are made anew.
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*", "USE_POLICY*")
_NOT_COPIED = ("config.json", "*.index.json", "hf_quant_config.json", "quantize_config.json")

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

Progress = Callable[[str, int, bool], AbstractContextManager[Callable[..., None]]]
"""Shows how far something is: called with what, how much in all, whether in bytes; inside, with what was just done."""


@contextmanager
def _unseen(what: str, total: int, in_bytes: bool) -> Iterator[Callable[..., None]]:
    yield lambda count, remark="": None


@dataclass(frozen=True)
class Options:
    """What is to become of a model; names and defaults are mlx-lm's.

    q_mode None: affine. q_bits and q_group_size None: those of the mode, affine 4 and 64. quant_predicate: a mixed
    recipe or a JSON file (`recipe.read_recipe`). dtype of what is not quantized, None: what config.json says,
    or as it is. keep_mtp: layers that predict further tokens stay, in a file of their own. mtp: the head that drafts
    becomes a folder of its own, and nothing else. requantize: what is quantized already is rounded again. calibrate: a
    text file by which codes are chosen; calibrate_tokens of it are looked at.
    """

    quantize: bool = False
    q_bits: int | None = None
    q_group_size: int | None = None
    q_mode: str | None = None
    quant_predicate: str | None = None
    dtype: str | None = None
    dequantize: bool = False
    keep_mtp: bool = False
    mtp: bool = False
    requantize: bool = False
    calibrate: str | None = None
    calibrate_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.quantize and self.dequantize:
            raise InvalidArgument("convert: quantize and dequantize are both asked for, expected one of them")
        for name in ("q_bits", "q_group_size", "q_mode", "quant_predicate"):
            if getattr(self, name) is not None and not (
                self.quantize or (self.requantize and name in ("q_bits", "q_group_size"))
            ):
                raise InvalidArgument(f"convert: {name} is {getattr(self, name)!r}, expected it with quantize (-q)")
        if self.calibrate is not None and not self.quantize:
            raise InvalidArgument("convert: calibrate is asked for without quantize, expected it with quantize (-q)")
        if self.calibrate_tokens is not None and (self.calibrate is None or self.calibrate_tokens < 1):
            found = f"calibrate_tokens is {self.calibrate_tokens!r}"
            raise InvalidArgument(f"convert: {found}, expected a number above 0, and a text to calibrate with")
        for name in ("keep_mtp", "calibrate"):
            if self.mtp and getattr(self, name):
                raise InvalidArgument(f"convert: mtp is asked for with {name}, expected it without")
        if self.dtype is not None and self.dtype not in FLOATS:
            raise InvalidArgument(f"convert: dtype is {short(self.dtype)}, expected one of {', '.join(FLOATS)}")
        if self.q_mode not in (None, "affine"):
            for name in ("quant_predicate", "calibrate"):
                if getattr(self, name) is not None:
                    raise InvalidArgument(f"convert: q_mode is {self.q_mode!r}, expected affine with {name}")
        self.recipe()

    def recipe(self) -> Recipe:
        """Reads the file of quant_predicate."""
        if self.quant_predicate is not None:
            return read_recipe(self.quant_predicate, self.q_bits, self.q_group_size)
        return Recipe(general_format(self.q_bits, self.q_group_size, self.q_mode))


@dataclass(frozen=True)
class Perplexity:
    """On windows of the text of a calibration that it did not look at: dense, rounded plainly, and calibrated."""

    windows: int
    length: int
    dense: float
    plain: float
    calibrated: float


@dataclass(frozen=True)
class ConversionReport:
    """What was made. nbytes of all tensors; parameters: numbers they stand for; kept: files of an interrupted run."""

    target: str
    files: int
    kept: int
    tensors: int
    quantized: int
    parameters: int
    source_nbytes: int
    nbytes: int
    seconds: float
    perplexity: Perplexity | None = None

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.parameters


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: Options | None = None,
    *,
    revision: str | None = None,
    offline: bool | None = None,
    progress: Progress = _unseen,
    notify: Callable[[str], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ConversionReport:
    """Write a model, as `resolve_model` finds it, as an MLX folder `target`, which must not exist.

    `progress` shows how far it is, `notify` is called with remarks. The folder `target`.converting holds what is done
    so far; after an interruption the same call goes on with it. Raises CheckpointError, InvalidArgument, and WriteError
    for what cannot be written.
    """
    began = time.monotonic()
    options = options or Options()
    target = Path(target).expanduser()
    check_target(target)
    found = resolve_model(source, revision=revision, offline=offline, quiet=progress is _unseen)
    path = found.path
    opened = (_gguf if found.kind == "gguf" else _folder)(path, options)
    job = Job(opened.plan, options)
    for notice in (*opened.plan.notices, *job.notices):
        if notify is not None:
            notify(notice)
    shards = split_shards(job.tasks, job.extra, shard_bytes)
    total = sum(task.source_nbytes for task in (*job.tasks, *job.extra))
    calibration = _Calibration(opened, options, job) if options.calibrate is not None else None
    settings = _settings(path, options, shard_bytes)
    if calibration is not None:
        settings["text"] = calibration.digest
    with Workshop(target, settings) as workshop:
        kept = len(workshop.finished)
        left = sum(task.nbytes for shard in shards if shard.file not in workshop.finished for task in shard.tasks)
        check_room(workshop.folder, left)
        if calibration is not None:
            calibration.look(progress)
        with progress("converting", total, True) as advance:
            for shard in shards:
                workshop.write_shard(shard, advance)
        workshop.write_json(INDEX, index(shards, job.parameters))
        workshop.write_json("config.json", dict(sorted(job.config.items())))
        opened.write_others(workshop)
        workshop.finish()
    return ConversionReport(
        target=str(target),
        files=len(shards),
        kept=kept,
        tensors=sum(len(shard.tensors) for shard in shards),
        quantized=len(job.formats),
        parameters=job.parameters,
        source_nbytes=total,
        nbytes=sum(task.nbytes for shard in shards for task in shard.tasks),
        seconds=time.monotonic() - began,
        perplexity=calibration.measured(target, progress) if calibration is not None else None,
    )


class _Calibration:
    """A text, what the model's matrices see of it, and how well the model predicts the rest of it."""

    def __init__(self, opened: _Opened, options: Options, job: Job) -> None:
        from penstock.convert import calibrate

        assert options.calibrate is not None
        self._opened, self._job = opened, job
        text = Path(options.calibrate).expanduser()
        self._name = text.name
        found = calibrate.read_text(text)
        self.digest = hashlib.sha256(found.encode()).hexdigest()
        tokens = opened.tokenizer().encode(found)
        limit = options.calibrate_tokens or calibrate.TOKENS
        context = opened.plan.family.read_config(opened.plan.config).max_positions
        self._seen, self._kept = calibrate.split_windows(tokens, limit, context, str(text))
        calibrate.check_memory(opened.plan)

    def look(self, progress: Progress) -> None:
        """Give the job what it chooses codes by, and measure the dense model and plain rounding."""
        from penstock.convert import calibrate

        planned = self._opened.plan
        family, config = planned.family, planned.family.read_config(planned.config)
        source = calibrate.Planned(planned)
        with progress(f"reading {self._name}", self._seen.size, False) as advance:
            model = calibrate.engine(family, config, source, fused=False)
            self._job.inputs = calibrate.collect(model, source.names, self._seen, advance)
        self._dense = self._evaluated(model, progress)
        del model, source
        plain = calibrate.Planned(planned, self._job.format)
        self._plain = self._evaluated(calibrate.engine(family, config, plain), progress)

    def measured(self, target: Path, progress: Progress) -> Perplexity:
        from penstock.convert import calibrate

        checkpoint, family = Checkpoint.open(target), self._opened.plan.family
        config = family.read_config(checkpoint.config)
        made = calibrate.engine(family, config, CheckpointSource(checkpoint, *family.names(checkpoint, config)))
        count, length = self._kept.shape
        return Perplexity(count, length, self._dense, self._plain, self._evaluated(made, progress))

    def _evaluated(self, engine: Engine, progress: Progress) -> float:
        from penstock.analysis.perplexity import evaluate

        with progress("measuring", len(self._kept), False) as advance:
            return evaluate(engine, self._kept, progress=lambda *_: advance(1)).perplexity


@dataclass(frozen=True)
class _Opened:
    """A source: its plan, what writes the files beside weights and config.json, and its tokenizer."""

    plan: ConversionPlan
    write_others: Callable[[Workshop], None]
    tokenizer: Callable[[], Tokenizer]


def _folder(path: Path, options: Options) -> _Opened:
    if options.requantize and not options.quantize:
        raise InvalidArgument(f"{path}: requantize is asked for without quantize (-q), expected both for a folder")
    released, dense = layout.Released(path), options.dequantize or options.requantize
    planned = layout.plan_head(released, dense) if options.mtp else layout.plan(released, options.keep_mtp, dense)
    if planned.formats and options.quantize and not planned.partly:
        first, format = next(iter(planned.formats.items()))
        raise InvalidArgument(
            f"{path}: is quantized already ({first}: {format}), expected a dense model; "
            "requantize rounds it again, dequantize makes it dense"
        )
    notices = [*planned.notices, *([] if options.mtp else _tokenizer_notices(path))]
    others = [path / name for name in copied(path)]
    for other in others:
        os.close(open_regular(other))  # what cannot be read is found before anything is written

    def write_others(workshop: Workshop) -> None:
        for other in others:
            workshop.copy(other)

    more = {} if options.mtp else _end_of_text(path)
    planned = replace(planned, config=planned.config | more, notices=tuple(notices))
    return _Opened(planned, write_others, lambda: Tokenizer.from_folder(path))


def _gguf(path: Path, options: Options) -> _Opened:
    if options.mtp:
        raise InvalidArgument(f"{path}: mtp is asked for, expected a folder: heads of GGUF files are not read")
    planned, file = gguf.plan(path, options)
    settings, tokenizer, remarks = gguf.tokenizer_files(file)
    if planned.formats and options.dtype == "bfloat16":
        remarks.append(f"{path}: its scales are float16, and as bfloat16 they lose digits")
    ids = {key: value for key, value in settings.get("generation_config.json", {}).items() if key.endswith("_token_id")}

    def write_others(workshop: Workshop) -> None:
        for name, value in settings.items():
            workshop.write_json(name, value)
        if tokenizer is not None:
            workshop.write_text("tokenizer.json", tokenizer)

    planned = replace(planned, config=planned.config | ids, notices=(*planned.notices, *remarks))
    return _Opened(planned, write_others, lambda: gguf_tokenizer(file))


def _tokenizer_notices(path: Path) -> list[str]:
    """A remark if penstock could not use the tokenizer; others may, so its files are copied all the same."""
    try:
        Tokenizer.from_folder(path)
    except CheckpointError as error:
        return [f"the tokenizer is copied as it is, but penstock cannot use it: {error}"]
    return []


def _end_of_text(path: Path) -> dict[str, Any]:
    """eos_token_id of generation_config.json, which counts more than that of config.json: mlx-lm merges it."""
    file = path / "generation_config.json"
    if not os.path.lexists(file):
        return {}
    found = read_json(file)
    return {"eos_token_id": found["eos_token_id"]} if isinstance(found, dict) and found.get("eos_token_id") else {}


class Job:
    """A plan and options as tasks: what is read, what is done with it, what is written.

    inputs: what the matrices are multiplied by (`calibrate.collect`); with it codes are searched, else plainly rounded.
    """

    def __init__(self, planned: ConversionPlan, options: Options) -> None:
        self.planned = planned
        self.inputs: dict[str, Any] | None = None
        self.recipe = options.recipe() if options.quantize else None
        self.dtype = _chosen_dtype(planned.config, options.dtype)
        self.formats: dict[str, Format] = dict(planned.formats)
        self.parameters = 0
        made = {name: self._made(name) for name in sorted(planned.tensors, key=_natural)}
        self.tasks = [task for name, task in made.items() if name not in planned.extra]
        self.extra = [task for name, task in made.items() if name in planned.extra]
        self.config = planned.config | self._tables()
        unmatched = self.recipe.unmatched(_matrices(planned)) if self.recipe is not None else []
        self.notices = [f"{options.quant_predicate}: {short(p)} fits no matrix of the model" for p in unmatched]

    def _made(self, name: str) -> Task:
        rows = self._cast(name, self.planned.tensors[name])
        path = name.removesuffix(".weight")
        module, _, part = name.rpartition(".")
        if module in self.planned.formats and part in PARTS:
            bits = self.planned.formats[module].bits
            self.parameters += math.prod(rows.shape) * 32 // bits if part == "weight" else 0
            return _copied(name, rows)
        self.parameters += math.prod(rows.shape)
        format = self.format(path, rows.shape) if path != name else None
        if format is None:
            return _copied(name, rows)
        self.formats[path] = format
        return self._quantized(path, rows, format)

    def format(self, path: str, shape: tuple[int, ...]) -> Format | None:
        """The format that the matrix of a module is rounded to, None if it stays as it is."""
        if path in self.planned.rounded or self.recipe is None:
            return self.planned.rounded.get(path)
        return self.recipe.format(path, shape, self.planned.family, self.planned.layers)

    def _quantized(self, path: str, rows: Rows, format: Format) -> Task:
        *lead, K = rows.shape
        groups, scale = (*lead, K // format.group_size), format.scale_dtype(rows.dtype)

        def work(start: int, array: np.ndarray) -> tuple[np.ndarray, ...]:
            try:
                if self.inputs is None:
                    return quantize(array, *format).arrays
                from penstock.convert.calibrate import searched

                own = (self.inputs.get(path), format.bits, format.group_size)
                return searched(array, *own, start, rows.shape[-2]).arrays
            except InvalidArgument as error:
                told = str(error).removeprefix("quantize: ")
                told = re.sub(r"row (\d+)", lambda row: f"row {start + int(row[1])}", told)
                raise CheckpointError(f"{path}.weight: {told}") from None

        packed, *rest = format.parts
        tensors = (
            Tensor(f"{path}.{packed}", np.dtype(np.uint32), (*lead, K * format.bits // 32)),
            *(Tensor(f"{path}.{part}", scale, groups) for part in rest),
        )
        return Task(rows, tensors, work)

    def _cast(self, name: str, rows: Rows) -> Rows:
        wanted, found = self.dtype, dtype_name(rows.dtype)
        if wanted is None or found == wanted or found not in FLOATS or name.endswith(self.planned.rules.uncast):
            return rows
        if isinstance(rows, Dequantized):  # computed in the new format, not rounded to it at the end
            return rows.cast(numpy_dtype(wanted), name)
        return Cast(rows, numpy_dtype(wanted), name)

    def _tables(self) -> dict[str, Any]:
        if not self.formats:
            return {}
        if self.recipe is not None:
            table = self.recipe.table(self.formats, self.planned.family, self.planned.formats)
        else:
            sizes = {path: math.prod(self.planned.tensors[f"{path}.weight"].shape) for path in self.formats}
            table = table_of(self.formats, sizes)
        return {"quantization": table, "quantization_config": table}


def _matrices(planned: ConversionPlan) -> list[str]:
    """Paths of all modules with a matrix."""
    names = (name for name, rows in planned.tensors.items() if len(rows.shape) > 1)
    return [name.removesuffix(".weight") for name in names if name.endswith(".weight")]


def _copied(name: str, rows: Rows) -> Task:
    return Task(rows, (Tensor(name, rows.dtype, rows.shape),), lambda start, array: (array,))


def _chosen_dtype(config: Mapping[str, Any], wanted: str | None) -> str | None:
    """As mlx-lm chooses: what was asked for, torch_dtype, that of the text model, or none: everything as it is."""
    text = config.get("text_config")
    found = wanted or config.get("torch_dtype") or (text.get("dtype") if isinstance(text, dict) else None)
    return found if found in FLOATS else None


def _natural(name: str) -> list[Any]:
    """Orders layers.2 before layers.10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def copied(folder: Path) -> list[str]:
    """The files of a model folder that go into the new one as they are."""

    def fits(name: str, patterns: tuple[str, ...]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    return [
        name
        for name in list_folder(folder)
        if fits(name, _COPIED)
        and not fits(name, _NOT_COPIED)
        and not name.startswith(".")
        and not (folder / name).is_dir()
    ]


def _settings(path: Path, options: Options, shard_bytes: int) -> dict[str, Any]:
    """What decides the bytes that are written, and the version of the program that writes them."""
    found: dict[str, Any] = {"version": __version__, "source": str(path.resolve()), "shard_bytes": shard_bytes}
    digest = hashlib.sha256()
    files = [path] if path.is_file() else [path / name for name in list_folder(path)]
    for file in files:
        if not file.is_file():
            continue
        status = file.stat()
        digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    found["files"] = digest.hexdigest()
    found |= asdict(options)
    if options.quant_predicate is not None:
        found["patterns"] = {pattern: entry and list(entry[:2]) for pattern, entry in options.recipe().patterns.items()}
    return found
