"""penstock perplexity: how well a model predicts a text, and how far its predictions are from another model's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import penstock
from penstock.cli._foreign import LOADING, refused, refused_flag
from penstock.cli._model import MODEL, SEED, NamedModel, UsageError, complete_model, note, verb
from penstock.cli._output import print_json, print_table, progress_bar
from penstock.errors import CheckpointError, InvalidArgument
from penstock.units import amount

if TYPE_CHECKING:
    import numpy as np

    from penstock.analysis.perplexity import Evaluation
    from penstock.api import LLM
    from penstock.text.tokenizer import Tokenizer

_TEXT_LIMIT = 64 << 20  # bytes; the test set of WikiText-2 has 1.3 MB


_FOREIGN = (
    *LOADING,
    refused_flag(
        "--kl-divergence --hellaswag --winogrande", "--reference M measures the divergence from another model"
    ),
    refused("--kl-divergence-base --save-all-logits", "--reference M measures the divergence from another model"),
)


@verb(_FOREIGN)
def perplexity(
    *,
    argument: Annotated[str | None, MODEL] = None,
    model: NamedModel,
    data_path: Annotated[
        Path | None,
        typer.Option("--data-path", "-f", "--file", metavar="FILE", help="Text in UTF-8; tale: a shipped one."),
    ] = None,
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", "-c", "--ctx-size", metavar="N", min=2, help="Tokens of a window.")
    ] = 512,
    num_samples: Annotated[
        int,
        typer.Option(
            "--num-samples", "--chunks", metavar="N", min=-1, help="Windows at most; -1 takes the whole text."
        ),
    ] = 256,
    seed: Annotated[int | None, SEED] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size",
            "-b",
            metavar="N",
            min=1,
            help="Known from mlx-lm; windows run one at a time, whatever it is.",
        ),
    ] = 8,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="M",
            help="Compare with this model: folder, .gguf file or hub id.",
            autocompletion=complete_model,
        ),
    ] = None,
    reference_device: Annotated[
        Literal["auto", "cpu", "cuda", "reference"] | None,
        typer.Option("--reference-device", help="Where the reference runs; as --device if left out."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", metavar="N", min=1, help="Threads; all physical cores if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how well a model predicts a text.

    The text is cut into windows of --sequence-length tokens, from its start or drawn with --seed, each read from an
    empty context; a model that wants a beginning-of-text token gets it in every window. Perplexity is exp of the mean
    of -log p over all tokens but the first of each window, with its standard error.

    With --reference also the Kullback-Leibler divergence KL(reference | model) of the predictions, in nats, and the
    share of predictions whose likeliest token is the same. Both models are loaded together, those that -tp splits one
    after the other, with the logits of the reference in a temporary file; the reference has float32 states, whatever
    --state-dtype says.

    \b
    Examples:
      penstock perplexity --data-path tale --sequence-length 256
      penstock perplexity ./my-model-4bit --data-path wiki.txt --num-samples -1
      penstock perplexity ./my-model-4bit --data-path wiki.txt --reference ./my-model --json
    """
    chosen = model.given(argument)
    if data_path is None:
        raise UsageError("--data-path: is missing, expected a text in UTF-8 (datasets of the hub are not supported)")
    if num_samples == 0:
        raise UsageError("--num-samples: is 0, expected at least 1, or -1 for the whole text")
    if reference is None and reference_device is not None:
        raise UsageError("--reference-device: expected together with --reference")
    second = None
    if reference is not None:
        where = reference_device or chosen.device
        second = replace(chosen, model=reference, device=where, revision=None, state_dtype="float32")
    given = _Text(data_path, _read(data_path), sequence_length, None if num_samples < 0 else num_samples, seed)
    notify = None if as_json else note
    if second is not None and _is_split(chosen):
        found, bos, peak = _compare_in_turn(chosen, second, given, threads, notify)
    else:
        found, bos, peak = _measure(chosen, second, given, threads, notify)
    about = {"model": chosen.name, "reference": reference, "data": str(data_path), "bos": bos}
    _show(found, about, peak / 1e9, as_json)


@dataclass(frozen=True)
class _Text:
    """A text, and how it is cut into windows."""

    path: Path
    content: str
    length: int
    count: int | None
    seed: int | None

    def windows(self, tokens: list[int], prefix: list[int]) -> np.ndarray:
        from penstock.analysis.perplexity import windows

        try:
            return windows(tokens, self.length, self.count, prefix, self.seed)
        except InvalidArgument as error:
            raise InvalidArgument(f"{self.path}: {str(error).removeprefix('perplexity: ')}") from None


def _measure(
    chosen: NamedModel,
    second: NamedModel | None,
    text: _Text,
    threads: int | None,
    notify: Callable[[str], None] | None,
) -> tuple[Evaluation, bool, int]:
    """The model alone, or with the reference beside it; whether windows have a BOS; peak memory in bytes."""
    from penstock.analysis.perplexity import evaluate

    llm = chosen.load_with(None, threads, notify)
    tokens, prefix = encoded(llm.tokenizer, text.content)
    llm.engine.token_array([*prefix, *tokens], f"{text.path}", llm.tokenizer)
    _check_length(chosen.name, llm.max_context, text.length, len(prefix))
    rows = text.windows(tokens, prefix)
    other = None
    if second is not None:
        other = second.load_with(None, threads, notify)
        _check_length(second.name, other.max_context, text.length, len(prefix))
        _check_alike(llm.config.vocab_size, other, text.content, tokens)
        if notify is not None and llm.engine.device.name == other.engine.device.name == "cpu":
            _remark_memory(llm, other)
    with progress_bar("windows", len(rows)) as advance:
        found = evaluate(llm.engine, rows, None if other is None else other.engine, _shown_by(advance))
    return found, bool(prefix), llm.stats().peak_memory


def _is_split(chosen: NamedModel) -> bool:
    """Whether a model with these options has ranks. Raises UsageError for those of torchrun, which run one model."""
    from penstock.parallel.launch import joined_by_torchrun

    if joined_by_torchrun() is not None:
        raise UsageError("--reference: the ranks of torchrun run one model, expected -tp N without torchrun")
    return chosen.ranks > 1


def _compare_in_turn(
    chosen: NamedModel, second: NamedModel, text: _Text, threads: int | None, notify: Callable[[str], None] | None
) -> tuple[Evaluation, bool, int]:
    """As `_measure`, of two models that are split: a process has one at a time. The reference comes first, and all that
    can be wrong with the model's vocabulary and windows is found before it is loaded.
    """
    from penstock.analysis.perplexity import StoredLogits, evaluate
    from penstock.analysis.trace import outline_of
    from penstock.server.model_info import read_tokenizer
    from penstock.weights.resolve import resolve_model

    files = resolve_model(chosen.model, revision=chosen.revision, offline=chosen.offline or None)
    config = outline_of(files, None).config
    tokens, prefix = encoded(read_tokenizer(files), text.content)
    _check_length(chosen.name, config.max_positions, text.length, len(prefix))
    rows = text.windows(tokens, prefix)
    with contextlib.ExitStack() as stack:
        with second.load_with(None, threads, notify) as other, progress_bar("reference", len(rows)) as advance:
            _check_length(second.name, other.max_context, text.length, len(prefix))
            _check_alike(config.vocab_size, other, text.content, tokens)
            other.engine.token_array([*prefix, *tokens], f"{text.path}", other.tokenizer)
            stored = stack.enter_context(StoredLogits(other.engine, rows, lambda: advance(1)))
        with chosen.load_with(None, threads, notify) as llm, progress_bar("windows", len(rows)) as advance:
            _check_length(chosen.name, llm.max_context, text.length, len(prefix))
            found = evaluate(llm.engine, rows, stored, _shown_by(advance))
            return found, bool(prefix), llm.stats().peak_memory


def _shown_by(advance: Callable[..., None]) -> Callable[[int, float], None]:
    return lambda done, value: advance(1, f"perplexity {value:.3f}")


def _read(path: Path) -> str:
    """The text of a file. Raises CheckpointError, naming it, for anything but UTF-8 of a sensible size."""
    from penstock.weights.files import kind_of, read_bounded

    if path == Path("tale") and not path.exists():
        path = Path(penstock.__file__).parent / "demo" / "tale.txt"
    if not path.exists() and not path.is_symlink():
        raise CheckpointError(f"{path}: no such file, expected a text in UTF-8 (datasets of the hub are not supported)")
    data = read_bounded(path, _TEXT_LIMIT)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = kind_of(data[:512]) or f"byte {error.start} is not UTF-8"
        raise CheckpointError(f"{path}: {found}, expected plain text") from None
    if not text.strip():
        raise CheckpointError(f"{path}: {'is empty' if not text else 'has no words'}, expected a text")
    return text


def encoded(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """The tokens of a text, and those that the tokenizer puts before every text, such as a BOS."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=added) for added in (False, True))
    start = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
    return tokenizer.encode(text, add_special_tokens=False), whole[:start]


def _check_length(name: str, most: int, length: int, before: int) -> None:
    least = before + 2
    if not least <= length <= most:
        raise InvalidArgument(f"--sequence-length: is {length}, expected {least} to {most} (the context of {name})")


def _check_alike(own: int, other: LLM, text: str, tokens: list[int]) -> None:
    """The model, of `own` tokens, and the other read the same. Raises InvalidArgument with the numbers that differ."""
    theirs = other.config.vocab_size
    if own != theirs:
        raise InvalidArgument(f"--reference: its vocabulary has {theirs} tokens, expected {own} as the model's")
    found, _ = encoded(other.tokenizer, text)
    if found != tokens:
        at = next((n for n, pair in enumerate(zip(found, tokens, strict=False)) if pair[0] != pair[1]), len(tokens))
        raise InvalidArgument(
            f"--reference: its tokenizer makes {len(found)} tokens of the text, the model's {len(tokens)}, and they "
            f"differ from token {at} on, expected the same vocabulary"
        )


def _remark_memory(llm: LLM, other: LLM) -> None:
    from penstock.machine import available_memory

    need, free = llm.stats().weight_bytes + other.stats().weight_bytes, available_memory()
    if need > free:
        note(
            f"both models have {amount(need)} of weights, and {amount(free)} of memory are free: "
            "every window reads them from disk"
        )


def _show(found: Evaluation, about: dict[str, Any], peak: float, as_json: bool) -> None:
    values = asdict(found)
    other = values.pop("divergence")
    if as_json:
        values = about | values | {"tokens_per_second": found.tokens_per_second, "peak_memory": peak}
        print_json(values | {"divergence": other})
        return
    rows = [("Perplexity", f"{found.perplexity:.3f} ± {found.perplexity_error:.3f}")]
    if found.divergence is not None:
        other = found.divergence
        rows += [
            ("Reference", f"{other.perplexity:.3f} ± {other.perplexity_error:.3f}"),
            ("Ratio", f"{other.ratio:.5f} ± {other.ratio_error:.5f}"),
            ("KL divergence", f"mean {other.kl_mean:.6f} ± {other.kl_error:.6f}, median {other.kl_median:.6f}"),
            ("", f"95 % {other.kl_95:.6f}, 99 % {other.kl_99:.6f}, max {other.kl_max:.6f}"),
            ("Same top token", f"{other.same_top:.2%} ± {other.same_top_error:.2%}"),
            ("Change of p", f"{other.rms_probability:.2%} (root mean square)"),
        ]
    bos = ", each with a BOS" if about["bos"] else ""
    rows += [
        ("Tokens", f"{found.predictions} predicted in {found.windows} windows of {found.length}{bos}"),
        ("Time", f"{found.seconds:.2f} s, {found.tokens_per_second:.1f} tokens-per-sec"),
        ("Peak memory", f"{peak:.3f} GB"),
    ]
    print_table(("", "value"), rows, wrap=("value",), header=False)
