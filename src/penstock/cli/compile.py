"""penstock compile: have kernels compiled before they are needed."""

import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from penstock import compile_progress
from penstock.cli._model import SAME_MODEL, UsageError, note

if TYPE_CHECKING:
    from penstock.engine.compile_ahead import Missing


def compile(
    families: Annotated[
        list[str] | None,
        typer.Argument(metavar="FAMILY…", help="Families of models, such as qwen3_5 and gemma4; all if left out."),
    ] = None,
    model: Annotated[str | None, SAME_MODEL] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Whose kernels; by default where models run.")
    ] = "auto",
) -> None:
    """Compile kernels ahead, so that no run has to wait for them.

    A model compiles its own kernels when it is first loaded, once per machine. This compiles all the rest: for prompts
    and batches of every size, of all families or of those that are named, on the CPU from shapes alone. On a GPU
    kernels are compiled for the shapes of one model: --model, by default the demo model, which is loaded. What is there
    already is left as it is.

    \b
    Examples:
      penstock compile
      penstock compile qwen3_5
      penstock compile --model ./my-model
    """
    from penstock.engine.options import resolve_options

    chosen = resolve_options(device).device
    if chosen == "cuda" and families:
        raise UsageError("FAMILY: on a GPU kernels are compiled for a model's shapes, expected --model")
    if families and model is not None:
        raise UsageError("--model: expected without FAMILY, one of the two")
    begin = time.perf_counter()
    compiled = _on_gpu(model) if chosen == "cuda" else _on_cpu(families, model)
    if compiled:
        print(f"Compiled {compiled} kernel{'s' * (compiled != 1)} in {time.perf_counter() - begin:.1f} s.")
    else:
        print("Nothing was left to compile.")


def _on_cpu(families: list[str] | None, model: str | None) -> int:
    """How many kernels were compiled."""
    from penstock.engine import compile_ahead
    from penstock.engine.compile_families import missing_of_families, shipped_by_family

    if model is not None:
        missing, listing, argument = _of_model(model), _of_model, model
    else:
        known = list(shipped_by_family())
        for name in families or ():
            if name not in known:
                raise UsageError(f"FAMILY: is {name!r}, expected one of {', '.join(known)}")
        chosen = families or known
        note(f"Looking for missing kernels of {', '.join(chosen)} …")
        missing, listing, argument = missing_of_families(chosen), missing_of_families, chosen
    if missing:
        compile_ahead.start(listing, argument, at_once=False)
        compile_ahead.compile_kernels(missing)
    return len(missing)


def _of_model(model: str) -> "Missing":
    from penstock import api
    from penstock.engine.compile_ahead import missing_kernels
    from penstock.engine.compile_families import PROMPTS, SEQUENCES

    return missing_kernels(api.load(model, device="cpu").engine, PROMPTS, SEQUENCES)


def _on_gpu(model: str | None) -> int:
    """How many kernels were compiled: the folders that Triton has made for them."""
    from penstock import api, kernel_cache

    root, below = kernel_cache.triton_root()
    folder = kernel_cache.trusted(root, below)

    def count() -> int:
        return sum(1 for entry in folder.iterdir() if entry.is_dir())

    before = count()
    with compile_progress.compiling():
        api.load(model, device="cuda", notify=note).engine.prepare()
    return count() - before
