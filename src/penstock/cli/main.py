"""The `penstock` program: verbs, and how their errors reach the user.

Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted. An error is one line on stderr, or its traceback with
--debug.
"""

import functools
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from penstock._version import __version__
from penstock.cli._foreign import VERBS
from penstock.cli._help import PanelCommand
from penstock.cli._model import UsageError, tolerant_stdout
from penstock.cli.bench import bench
from penstock.cli.benchmark import benchmark
from penstock.cli.cache_prompt import cache_prompt
from penstock.cli.chat import chat
from penstock.cli.compile import compile
from penstock.cli.convert import convert
from penstock.cli.doctor import doctor
from penstock.cli.generate import generate
from penstock.cli.inspect import inspect
from penstock.cli.kernels import kernels
from penstock.cli.pack import pack
from penstock.cli.perplexity import perplexity
from penstock.cli.plan import plan
from penstock.cli.routes import routes
from penstock.cli.serve import serve
from penstock.cli.verify import verify
from penstock.errors import PenstockError
from penstock.settings import Settings

_WIDE = {"max_content_width": 100}
# Plain help text: it reads the same on a terminal, in a pipe and in a pager, at any width.
app = typer.Typer(name="penstock", pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=_WIDE)
app.command(cls=PanelCommand, context_settings={"allow_extra_args": True})(generate)
app.command(cls=PanelCommand)(chat)
app.command("cache_prompt", cls=PanelCommand)(cache_prompt)
app.command(cls=PanelCommand)(serve)
app.command("server", cls=PanelCommand, hidden=True)(serve)  # as mlx-lm calls it
for one in (bench, benchmark, plan, pack, routes, convert, perplexity, inspect, verify, kernels, compile, doctor):
    app.command(cls=PanelCommand)(one)


def _lacking(name: str, way: str) -> Callable[[], None]:
    def refuse() -> None:
        raise UsageError(f"{name}: not supported by penstock yet; {way}")

    return refuse


for name, way in VERBS.items():  # whatever stands behind them
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, hidden=True, add_help_option=False, context_settings=anything)(_lacking(name, way))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def penstock(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; works after a verb too.")
    ] = False,
) -> None:
    """Run quantized Mixture-of-Experts language models on NVIDIA GPUs and plain CPUs.

    Every command has --help with examples. Results go to stdout, remarks and progress to stderr; bars and colours are
    for terminals alone, and NO_COLOR turns colours off. Settings are PENSTOCK_... variables, which penstock doctor
    shows.

    The exit status is 0 if all went well, 1 after a failure, 2 after wrong usage, 130 after an interrupt.

    \b
    Examples:
      penstock generate --prompt "Tell me a story about a fox."
      penstock inspect qwen3.6-35b-a3b
      penstock doctor
      penstock --install-completion
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@functools.cache
def program() -> Any:
    """All verbs with their options, which takes a while to put together."""
    return typer.main.get_command(app)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the program and leave the interpreter with its exit status."""
    _open_streams()
    tolerant_stdout()
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run the program and return its exit status."""
    debug = "--debug" in arguments
    if debug:  # an option of the program, taken after the verb as well: there one thinks of it
        arguments = ["--debug", *(argument for argument in arguments if argument != "--debug")]
    try:
        debug = _settings().debug or debug
        status = program()(args=arguments, prog_name="penstock", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except typer.TyperException as error:
        return _usage_error(error)
    except BrokenPipeError:  # the reader has seen enough (head, less): say nothing, also not at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        if debug:
            raise
        _say(str(error) if isinstance(error, PenstockError) else f"{_unexpected(error)} (--debug shows where)")
        return 1


def _open_streams() -> None:
    """Put the null device where a standard stream was closed: Python has None there, and prints for None to stdout."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def _settings() -> Settings:
    """The settings of the environment; what they warn of is one line each on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = Settings.from_env()
    for warning in caught:
        _say(str(warning.message), "warning")
    return settings


def _usage_error(error: Any) -> int:
    """One line for an unknown verb, option or value, and where to read more."""
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    _say(f"{error.format_message().rstrip('.')}{hint}")
    return error.exit_code


def _unexpected(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _say(message: str, kind: str = "error") -> None:
    print(f"penstock: {kind}: {' '.join(message.split())}", file=sys.stderr)
