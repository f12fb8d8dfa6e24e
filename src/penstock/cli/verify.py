"""penstock verify: whether a model on this disk is whole and means something."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli._model import MODEL, SAME_MODEL, UsageError, named, note, resolved
from penstock.cli._output import print_json, print_table, progress_bar
from penstock.errors import CheckpointError, InvalidArgument, PenstockError

if TYPE_CHECKING:
    from penstock.analysis.verify import Check, Headers, Numbers
    from penstock.models.family import AnyFamily, ModelConfig
    from penstock.text.tokenizer import Tokenizer

_SHOWN = 200  # problems of one check; a hostile file could have millions
_MESSAGE = [{"role": "user", "content": "Hello"}]


def verify(
    argument: Annotated[str | None, MODEL] = None,
    model: Annotated[str | None, SAME_MODEL] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="R", help="Branch, tag or commit of a hub model.")
    ] = None,
    hashes: Annotated[
        Path | None, typer.Option("--hashes", metavar="FILE", help="Compare SHA-256 hashes, as sha256sum lists them.")
    ] = None,
    hub: Annotated[
        bool, typer.Option("--hub", help="Compare with the hashes that the hub gave when it was downloaded.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the files of a model and list every problem.

    Looked at are: headers and the bounds of each tensor; the index against the files; all floats (scales, biases, dense
    weights), which must be finite; the quantization table; the shapes that config.json implies; the tokenizer and the
    chat template. --hashes and --hub read the files whole. Nothing is downloaded, and nothing of the model is executed.

    The status is 0 if all is well, 1 if there are problems.

    \b
    Examples:
      penstock verify
      penstock verify ./my-model --hashes SHA256SUMS
      penstock verify mlx-community/Qwen3.6-35B-A3B-4bit --hub --json
    """
    if hashes is not None and hub:
        raise UsageError("--hub: expected without --hashes")
    from penstock.weights.resolve import WITH_WEIGHTS

    folder = resolved(named(argument, model), WITH_WEIGHTS, revision, offline=True).path
    expected = _expected(folder, hashes, hub)
    checks, notes = checked(folder, expected)
    problems = [problem for check in checks for problem in check.problems]
    if as_json:
        described = [
            {"name": check.name, "status": check.status, "about": check.about, "problems": check.problems}
            for check in checks
        ]
        print_json({"model": str(folder), "ok": not problems, "checks": described, "notes": notes})
    else:
        _show(checks)
        for remark in notes:
            note(remark)
    if problems:
        raise typer.Exit(1)


def _expected(folder: Path, hashes: Path | None, hub: bool) -> dict[str, str] | None:
    """The hashes that the files should have, by name; None if none are asked for."""
    from penstock.analysis.verify import hub_hashes, read_hashes

    if hashes is not None:
        return read_hashes(hashes)
    if not hub:
        return None
    if found := hub_hashes(folder) if folder.is_dir() else {}:
        return found
    raise InvalidArgument(f"--hub: {folder} does not come from the hub's cache, expected a hub id or its snapshot")


# --------------------------------------------------------------------------------------------------------------------
# Checks


def checked(folder: Path, expected: dict[str, str] | None) -> tuple[list[Check], list[str]]:
    """All checks of a model folder or a .gguf file, and remarks that are no problems."""
    from penstock.analysis.verify import Check, check_hashes, cores, hashed_nbytes

    checks, notes = (_of_gguf if folder.is_file() else _of_folder)(folder)
    home = folder.parent if folder.is_file() else folder
    if expected is None:
        checks.append(Check("hashes", "not asked for: --hashes FILE or --hub", skipped=True))
    else:
        with progress_bar("hashes", hashed_nbytes(home, expected), in_bytes=True) as advance:
            checks.append(check_hashes(home, expected, cores(), advance))
    told: set[str] = set()
    for check in checks:  # one cause may show in several checks
        check.problems = [problem for problem in check.problems if not (problem in told or told.add(problem))]
    return checks, [remark for remark in notes if remark not in told]


def _of_folder(folder: Path) -> tuple[list[Check], list[str]]:
    from penstock.analysis.verify import Check, Headers, Numbers, check_headers, check_index
    from penstock.text.tokenizer import Tokenizer

    headers, files = check_headers(folder)
    checks = [headers, check_index(folder, files), _numbers(Numbers.of_safetensors(files))]
    notes: list[str] = []
    config = None
    try:
        checkpoint = Headers(folder)
    except CheckpointError as error:
        broken = any(check.problems for check in checks)
        checks.append(Check("model", "the files cannot be read together", [] if broken else [str(error)], broken))
    else:
        notes = [notice for notice in checkpoint.notices if "model.safetensors.index.json:" not in notice]
        quantization, shapes = Check("quantization"), Check("shapes")
        checks += [quantization, shapes]
        _check_quantization(checkpoint, quantization)
        config, more = _check_shapes(checkpoint, shapes)
        notes += more
    return [*checks, *_tokenizer_checks(lambda: Tokenizer.from_folder(folder), f"{folder}", config)], notes


def _of_gguf(path: Path) -> tuple[list[Check], list[str]]:
    from penstock.analysis.survey import FromGguf, check_sizes
    from penstock.analysis.verify import Check, Numbers
    from penstock.models.gguf import GgufModel
    from penstock.text.gguf_tokenizer import gguf_tokenizer
    from penstock.weights.gguf import GgufFile

    try:
        file = GgufFile.open(path)
    except CheckpointError as error:
        return [Check("headers", problems=[str(error)])], []
    about = f"GGUF {file.version}, {len(file.tensors):,} tensors, {file.nbytes / 1e6:,.1f} MB"
    shapes = Check("shapes")
    checks = [Check("headers", about), _numbers(Numbers.of_gguf(file)), shapes]
    config, gguf = None, None
    try:
        gguf = GgufModel(file)
        config = gguf.read_config()
        check_sizes(config, f"{path}")
    except PenstockError as error:
        shapes.problems.append(str(error))
    else:
        _ask(gguf.family, config, FromGguf(gguf), shapes)
    checks += _tokenizer_checks(lambda: gguf_tokenizer(file), f"{path}", config)
    return checks, list(file.notices if gguf is None else gguf.notices)


def _numbers(numbers: Numbers) -> Check:
    from penstock.analysis.verify import cores

    with progress_bar("numbers", numbers.nbytes, in_bytes=True) as advance:
        return numbers.check(cores(), advance)


def _check_quantization(checkpoint: Headers, check: Check) -> None:
    """Every quantized module: its parts fit each other and the table of config.json, and the other way round."""
    formats: dict[tuple[int, int], int] = {}
    overrides = () if checkpoint._formats is None else checkpoint._formats.by_path
    paths = [name.removesuffix(".scales") for name in checkpoint.names if name.endswith(".scales")]
    for path in dict.fromkeys([*paths, *overrides]):
        try:
            format = checkpoint.quantization(path)
            if format is not None:
                checkpoint.tensor(path)
                formats[format] = formats.get(format, 0) + 1
        except CheckpointError as error:
            check.problems.append(str(error))
    found = (f"{count:,} of {bits} bits in groups of {group}" for (bits, group), count in sorted(formats.items()))
    check.about = ", ".join(found) or "no quantized tensors"


def _check_shapes(checkpoint: Headers, check: Check) -> tuple[Any, list[str]]:
    """Every tensor that the family asks for is there in its shape. The family's config, and remarks."""
    from penstock import models
    from penstock.analysis.survey import FromFiles, check_sizes
    from penstock.models.source import left_over

    try:
        family = models.family_of(checkpoint.config)
        config = family.read_config(checkpoint.config)
        check_sizes(config, f"{checkpoint.path / 'config.json'}", checkpoint)
        described = FromFiles(checkpoint, family, config)
    except PenstockError as error:
        check.problems.append(str(error))
        return None, []
    _ask(family, config, described, check)
    layers = len(family.caches(config))
    return config, [] if check.problems else left_over(described.stored, family.skipped, layers).remarks


def _ask(family: AnyFamily, config: ModelConfig, described: Any, check: Check) -> None:
    from penstock.analysis.survey import Recorder

    recorder = Recorder(_Forgiving(described, check.problems), family)
    try:
        family.read_weights(recorder, config)
    except PenstockError as error:
        check.problems.append(str(error))
    layers = len(family.caches(config))
    check.about = f"{config.model_type}, {layers} layers, {len(recorder.weights):,} weights asked for"


class _Forgiving:
    """Formats from elsewhere; what is wrong with one is written down, and the next one is asked for."""

    def __init__(self, described: Any, problems: list[str]) -> None:
        self._described, self._problems = described, problems
        self.layout = described.layout

    def __contains__(self, path: str) -> bool:
        return path in self._described

    def found(self, path: str, shape: tuple[int, ...], vector: bool) -> Any:
        from penstock.analysis.weights import TensorFormat

        try:
            return self._described.found(path, shape, vector)
        except PenstockError as error:
            self._problems.append(str(error))
            return TensorFormat(32, None, "float32"), 0


def _tokenizer_checks(read: Any, where: str, config: Any) -> list[Check]:
    from penstock.analysis.verify import Check
    from penstock.text.tokenizer import tokens_beyond

    words, template = Check("tokenizer"), Check("template")
    try:
        tokenizer: Tokenizer = read()
        words.about = f"{tokenizer.vocab_size:,} tokens"
        tokenizer.decode(tokenizer.encode("Hello, world"))
        if config is not None:
            words.about += f" of {config.vocab_size:,}"
            remarks = tokens_beyond(where, tokenizer, config.vocab_size)
            words.about += "".join(remark.removeprefix(where) for remark in remarks)
    except PenstockError as error:
        words.problems.append(str(error))
        template.about, template.skipped = "there is no tokenizer", True
        return [words, template]
    if not tokenizer.has_chat_template:
        template.about, template.skipped = "there is none", True
        return [words, template]
    try:
        text = tokenizer.apply_chat_template(_MESSAGE)
        template.about = f"writes a message in {len(tokenizer.encode(text, add_special_tokens=False))} tokens"
    except PenstockError as error:
        template.problems.append(f"{where}: {error}" if where not in str(error) else str(error))
    return [words, template]


# --------------------------------------------------------------------------------------------------------------------
# Output


def _show(checks: Iterable[Check]) -> None:
    rows = [(check.status, check.name, check.about) for check in checks]
    print_table(("", "check", "about"), rows, wrap=("about",), header=False)
    total = 0
    for check in checks:
        total += len(check.problems)
        for problem in check.problems[:_SHOWN]:
            print(f"problem: {problem}")
        if len(check.problems) > _SHOWN:
            print(f"problem: … and {len(check.problems) - _SHOWN:,} more of {check.name}")
    if total:
        print(f"{total:,} problem{'s' * (total != 1)} found")
