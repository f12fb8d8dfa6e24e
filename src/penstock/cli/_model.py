"""Options that several verbs share, and what becomes of them: a loaded model, sampling, a prompt, a refusal.

A verb takes groups of options as dataclasses; `verb` turns each field into an option of the command line, in the panel
of the help that the group's PANEL names. Names are those of mlx-lm, and where it has none those of llama.cpp and vLLM.
What becomes of their other options is said in `_foreign`.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_type_hints

import typer
from rich.console import Console

from penstock.cli._foreign import Foreign, UsageError
from penstock.errors import CheckpointError, InvalidArgument

if TYPE_CHECKING:
    from rich.progress import Progress

    from penstock.api import LLM
    from penstock.text.tokenizer import Tokenizer
    from penstock.weights.hub import Files
    from penstock.weights.resolve import Kind, ResolvedModel


# --------------------------------------------------------------------------------------------------------------------
# Verbs


def verb(foreign: Iterable[Foreign]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a Typer command of a function whose parameters are options or dataclasses of options.

    `foreign`: options of other programs that are taken with a remark or refused with the nearest way.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        groups: dict[str, type] = {}
        parameters: list[Parameter] = []
        for parameter in signature(function, eval_str=True).parameters.values():
            if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
                groups[parameter.name] = parameter.annotation
                parameters += _options_of(parameter.annotation)
            else:
                parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
        spelled = [(name, option) for option in foreign for name in option.names]
        hidden = {f"foreign_{n}": one for n, one in enumerate(spelled)}

        def command(**values: Any) -> None:
            given = [(*one, value) for key, one in hidden.items() if (value := values.pop(key)) not in (None, False)]
            for remark in [option.remark_on(name, str(value)) for name, option, value in given]:
                if remark is not None:
                    note(f"penstock: {remark}")
            made = {
                name: group(**{field.name: values.pop(field.name) for field in fields(group)})
                for name, group in groups.items()
            }
            return function(**made, **values)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        parameters += [_hidden(key, *one) for key, one in hidden.items()]
        # Typer reads these instead of the function's own
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _options_of(group: type) -> list[Parameter]:
    """The options of a group, in its panel of the help unless they name another."""
    hints = get_type_hints(group, include_extras=True)
    assert is_dataclass(group) and all(field.default is not MISSING for field in fields(group))
    for field in fields(group):
        (option,) = hints[field.name].__metadata__
        option.rich_help_panel = option.rich_help_panel or getattr(group, "PANEL", None)
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]


def _hidden(key: str, name: str, option: Foreign) -> Parameter:
    described = typer.Option(name, hidden=True)
    kind = Annotated[bool, described] if option.flag else Annotated[str | None, described]
    return Parameter(key, Parameter.KEYWORD_ONLY, default=False if option.flag else None, annotation=kind)


# --------------------------------------------------------------------------------------------------------------------
# Groups of options


def complete_model(incomplete: str) -> list[str]:
    """Hub models of the local cache that begin so, for the shell; where there are none it completes paths."""
    return [name for name in cached_models() if name.startswith(incomplete)]


def complete_config(incomplete: str) -> list[str]:
    """The same, and the config.json files that are shipped by name."""
    from penstock.weights.resolve import shipped_configs

    return [name for name in (*cached_models(), *shipped_configs()) if name.startswith(incomplete)]


def cached_models() -> list[str]:
    """The ids of the models in huggingface_hub's cache, which is looked up without importing it: a shell waits."""
    try:
        folders = [entry.name for entry in hub_cache().iterdir() if (entry / "snapshots").is_dir()]
    except (OSError, RuntimeError):  # none there, or no home folder
        return []
    return sorted(name.removeprefix("models--").replace("--", "/") for name in folders if name.startswith("models--"))


def hub_cache() -> Path:
    """The folder of models that huggingface_hub has downloaded."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()


MODEL = typer.Argument(
    metavar="MODEL",
    help="Folder, .gguf file or hub id; the built-in demo model if left out.",
    show_default=False,
    autocompletion=complete_model,
)


ANY_MODEL = typer.Argument(
    metavar="MODEL",
    help="Folder, .gguf file, hub id, config.json or the name of a shipped one; by default the demo model.",
    show_default=False,
    autocompletion=complete_config,
)
SAME_MODEL = typer.Option("--model", metavar="M", help="The same.", autocompletion=complete_model)


def named(argument: str | None, model: str | None) -> str | None:
    """The model of a verb that takes it behind itself or as --model. Raises UsageError for both."""
    if argument is not None and model is not None:
        raise UsageError(f"--model: {argument!r} stands behind the verb already, expected one of the two")
    return model if argument is None else argument


def resolved(
    model: str | None,
    kinds: Collection[Kind],
    revision: str | None = None,
    offline: bool = False,
    files: Files = "all",
    option: str | None = None,
) -> ResolvedModel:
    """As `resolve_model`, for options of a verb. Raises UsageError for --revision without a hub id."""
    from penstock.weights.resolve import resolve_model

    try:
        return resolve_model(model, kinds, revision=revision, offline=offline or None, files=files, option=option)
    except InvalidArgument as error:
        raise UsageError(f"--revision: expected with a hub id; {error}") from None


def size(text: str) -> int:
    """A number of tokens: 4096, 32k (32 000) or 32K (32 768), 1m or 1M."""
    factor = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}.get(text[-1:], 1)
    digits = text if factor == 1 else text[:-1]
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 12):
        raise typer.BadParameter(f"{text!r} is no number of tokens such as 4096, 32k or 32K")
    return int(digits) * factor


def model_option(*short: str) -> Any:
    """--model, with further spellings of it."""
    return typer.Option(
        "--model",
        *short,
        "-hf",
        "--hf-repo",
        metavar="M",
        help="Folder, .gguf file, hub id, or OWNER/NAME:TYPE for a GGUF file of the hub; by default the demo model.",
        autocompletion=complete_model,
    )


MEMORY = "Memory and experts"  # panels of the help
RANKS = "Several devices"
DRAFTS = "Drafts"


@dataclass(frozen=True)
class AnyModel:
    """Which model, and how it computes."""

    PANEL: ClassVar[str] = "Model"

    model: Annotated[str | None, model_option()] = None
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="R", help="Branch, tag or commit of a hub model.")
    ] = None
    offline: Annotated[bool, typer.Option("--offline", help="Use only what has been downloaded before.")] = False
    device: Annotated[
        Literal["auto", "cpu", "cuda", "reference"], typer.Option("--device", help="Where the model runs.")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option("--dtype", help="Numbers between the layers.")
    ] = "auto"
    state_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option("--state-dtype", help="Numbers of recurrent states; bfloat16 has half the bytes, not on the CPU."),
    ] = "auto"
    gpu_layers: Annotated[  # llama.cpp's
        str | None, typer.Option("-ngl", "--n-gpu-layers", "--gpu-layers", hidden=True)
    ] = None
    activations: Annotated[
        Literal["auto", "int8", "float32"],
        typer.Option("--activations", help="Rounding inside quantized products; float32 is exact and slower."),
    ] = "auto"
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", rich_help_panel=MEMORY, metavar="SIZE", help="Memory for the caches of sequences, such as 20G."
        ),
    ] = None
    expert_cache: Annotated[
        str,
        typer.Option(
            "--expert-cache",
            metavar="SIZE",
            rich_help_panel=MEMORY,
            help="Experts that are held, such as 12G or 50%; the others are read when they are chosen.",
        ),
    ] = "auto"
    moe_cache: Annotated[  # as others call it
        str | None,
        typer.Option(
            "--moe-expert-cache", "--moe-expert-cache-size", "--moe-cache-size", "--moe-stream-cache", hidden=True
        ),
    ] = None
    expert_host: Annotated[
        str,
        typer.Option(
            "--expert-host",
            rich_help_panel=MEMORY,
            metavar="SIZE",
            help="Host memory for experts behind a GPU's, such as 48G.",
        ),
    ] = "auto"
    expert_io: Annotated[
        Literal["auto", "direct", "pagecache", "mmap"],
        typer.Option("--expert-io", rich_help_panel=MEMORY, help="How experts are read."),
    ] = "auto"
    expert_policy: Annotated[
        Literal["auto", "lru", "lfru", "pin"],
        typer.Option("--expert-policy", rich_help_panel=MEMORY, help="Which experts are kept."),
    ] = "auto"
    expert_file: Annotated[
        str | None,
        typer.Option(
            "--expert-file",
            rich_help_panel=MEMORY,
            metavar="FILE",
            help="Made by penstock pack; that in the folder if left out.",
        ),
    ] = None
    expert_prefetch: Annotated[
        bool,
        typer.Option(
            "--expert-prefetch", rich_help_panel=MEMORY, help="Read what the next layer will perhaps choose (CPU)."
        ),
    ] = False

    speculate: Annotated[
        Literal["off", "auto", "mtp", "ngram", "draft"],
        typer.Option(
            "--speculate",
            rich_help_panel=DRAFTS,
            help="What drafts of the next tokens come from; they make answers quicker, and change none.",
        ),
    ] = "auto"
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens",
            "--spec-draft-n-max",
            "--draft-max",
            "--draft-n",
            "--draft",
            metavar="N",
            min=1,
            max=7,
            rich_help_panel=DRAFTS,
            help="Drafts of a step at the most.",
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        typer.Option(
            "--draft-model",
            "--model-draft",
            "--spec-draft-model",
            "-md",
            metavar="M",
            rich_help_panel=DRAFTS,
            help="A smaller model of the same vocabulary that drafts, or a folder with the model's head.",
        ),
    ] = None

    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel-size",
            "-tp",
            metavar="N",
            min=1,
            rich_help_panel=RANKS,
            help="GPUs, or shares of the cores, to split it over.",
        ),
    ] = None
    expert_parallel: Annotated[
        Literal["on", "off"],
        typer.Option(
            "--expert-parallel",
            rich_help_panel=RANKS,
            help="Of a split model: whole experts on each rank, or a part of each.",
        ),
    ] = "on"
    enable_expert_parallel: Annotated[bool, typer.Option("--enable-expert-parallel", "-ep", hidden=True)] = False
    step_timeout: Annotated[
        float,
        typer.Option(
            "--step-timeout", rich_help_panel=RANKS, metavar="S", help="Of a split model: a longer step counts as hung."
        ),
    ] = 60.0

    def __post_init__(self) -> None:
        if self.gpu_layers is not None:
            object.__setattr__(self, "device", _device_of(self.gpu_layers, self.device))
            object.__setattr__(self, "gpu_layers", None)

    def given(self, argument: str | None) -> Self:
        """The same with the model that stands behind the verb. Raises UsageError if --model names one as well."""
        if argument is None:
            return self
        return replace(self, model=named(argument, self.model))

    @property
    def name(self) -> str:
        from penstock.weights.resolve import find_model

        return find_model(self.model).name

    def load_with(
        self,
        max_context: int | None,
        threads: int | None,
        notify: Callable[[str], None] | None,
        progress: Callable[[float], None] | None = None,
    ) -> LLM:
        """The model with this many positions and threads, whatever the flags say of them."""
        from penstock import api

        return api.load(self.model, **self.load_arguments(max_context, threads), notify=notify, progress=progress)

    def load_arguments(self, max_context: int | None, threads: int | None) -> dict[str, Any]:
        """The same as arguments of `penstock.load` behind the model: texts, numbers and None."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "state_dtype": self.state_dtype,
            "activations": self.activations,
            "max_context": max_context,
            "threads": threads,
            "cache_memory": self.memory,
            "expert_cache": self.moe_cache or self.expert_cache,
            "expert_host": self.expert_host,
            "expert_io": self.expert_io,
            "expert_policy": self.expert_policy,
            "expert_file": self.expert_file,
            "expert_prefetch": self.expert_prefetch,
            "speculate": self.speculate,
            "num_draft_tokens": self.num_draft_tokens,
            "draft_model": self.draft_model,
            "revision": self.revision,
            "offline": self.offline or None,
            **self.rank_arguments(),
        }

    def rank_arguments(self) -> dict[str, Any]:
        """How the model is split over ranks, as `penstock.load` takes it."""
        if not 0 < self.step_timeout < math.inf:
            raise UsageError(f"--step-timeout: is {self.step_timeout:g}, expected seconds above 0")
        return {
            "tensor_parallel_size": self.tensor_parallel_size or 1,
            "expert_parallel": self.expert_parallel == "on",
            "step_timeout": self.step_timeout,
        }

    @property
    def ranks(self) -> int:
        """That the model is split over."""
        from penstock.parallel.launch import joined_by_torchrun

        found = joined_by_torchrun()
        return (self.tensor_parallel_size or 1) if found is None else found.size

    def follow(self) -> None:
        """In a process that torchrun has started as another rank than 0: be that, until rank 0 ends. Else nothing."""
        if "LOCAL_RANK" not in os.environ:
            return
        from penstock.parallel.launch import joined_by_torchrun

        if (found := joined_by_torchrun()) is not None and found.rank > 0:
            self.load_with(None, None, lambda note: None)


@dataclass(frozen=True)
class NamedModel(AnyModel):
    """The same with llama.cpp's short name, for verbs where -m is not mlx-lm's --max-tokens."""

    model: Annotated[str | None, model_option("-m")] = None


@dataclass(frozen=True)
class ModelOptions(AnyModel):
    """Which model, and how much of the machine it takes."""

    max_context: Annotated[
        int | None,
        typer.Option(
            "--max-kv-size",
            "--ctx-size",
            "-c",
            "--max-model-len",
            metavar="N",
            rich_help_panel=MEMORY,
            parser=size,
            help="Positions of the context (32k, 32K); by default all that the model has and memory allows.",
        ),
    ] = None
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", metavar="N", min=1, help="Threads; all physical cores if left out.")
    ] = None

    def load(self, notify: Callable[[str], None] | None, progress: Callable[[float], None] | None = None) -> LLM:
        """The model; remarks about it go to `notify`, how far it is, from 0 to 1, to `progress`."""
        return self.load_with(self.max_context or None, self.threads, notify, progress)


@dataclass(frozen=True)
class SamplingOptions:
    """How a token is chosen."""

    PANEL: ClassVar[str] = "Sampling"

    temp: Annotated[float, typer.Option("--temp", min=0, help="Sampling temperature; 0 takes the best token.")] = 0.0
    top_p: Annotated[float, typer.Option("--top-p", min=0, max=1, help="Keep the likeliest tokens up to this sum.")] = (
        1.0
    )
    min_p: Annotated[
        float, typer.Option("--min-p", min=0, max=1, help="Drop tokens below this share of the likeliest one.")
    ] = 0.0
    top_k: Annotated[int, typer.Option("--top-k", min=-1, help="Keep this many tokens; 0 keeps all.")] = 0
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", "--repeat-penalty", help="Divides the logits of earlier tokens.")
    ] = 1.0
    repeat_last_n: Annotated[
        int,
        typer.Option(
            "--repeat-last-n",
            "--repetition-context-size",
            metavar="N",
            min=-1,
            help="Of the last N tokens alone; -1 of all, 0 of none.",
        ),
    ] = -1
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Taken from the logits of generated tokens.")
    ] = 0.0
    frequency_penalty: Annotated[float, typer.Option("--frequency-penalty", help="The same, once per occurrence.")] = (
        0.0
    )
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", "-l", metavar="ID±X", help="Add X to the logit of a token: 15+1.5, 7-100."),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", "-r", "--reverse-prompt", metavar="TEXT", help="End before this text; may be repeated."),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """As `LLM.stream` and `Session.stream` take them, but for the seed. Raises UsageError for a wrong value."""
        from penstock.engine.sampling import SamplingParams

        chosen: dict[str, Any] = {
            "temperature": self.temp,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "top_k": self.top_k,
            "repetition_penalty": self.repetition_penalty if self.repeat_last_n else 1.0,
            "repetition_context": self.repeat_last_n if self.repeat_last_n > 0 else None,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self._biases(),
        }
        try:
            SamplingParams(**chosen)  # before a model is loaded
        except InvalidArgument as error:
            raise UsageError(str(error)) from None
        return chosen | {"stop": [checked_text("--stop", text) for text in self.stop or ()]}

    def _biases(self) -> dict[int, float] | None:
        found = {}
        for text in self.logit_bias or ():
            match = re.fullmatch(r"([0-9]{1,9})([+-][0-9]{1,9}(?:\.[0-9]{1,9})?)", text, re.ASCII)
            if match is None:
                raise UsageError(
                    f"--logit-bias: is {text!r}, expected a token id and a number, such as 15+1.5 or 7-100"
                )
            found[int(match[1])] = float(match[2])
        return found or None


SEED = typer.Option(
    "--seed", "-s", metavar="N", min=0, max=2**64 - 1, help="Of the random choices.", rich_help_panel="Sampling"
)
RANDOM_SEED = typer.Option(
    "--seed",
    "-s",
    metavar="N",
    min=-1,
    max=2**64 - 1,
    help="Of the random choices; -1 draws one.",
    rich_help_panel="Sampling",
)
TEMPLATE = "Chat template"
ALLOW_SPECIAL = typer.Option(
    "--allow-special-in-messages",
    help="Control tokens in messages act as such; else they are text.",
    rich_help_panel=TEMPLATE,
)


def token_count(text: str) -> int:
    """Most tokens of an answer: 1 and more, or -1 for as many as the context holds."""
    if not re.fullmatch("-1|[0-9]{1,9}", text, re.ASCII):
        raise typer.BadParameter(f"{text!r} is no number of tokens; --model M names the model")
    if int(text) == 0:
        raise typer.BadParameter("0 is not in the range x>=1, nor -1")
    return int(text)


def max_tokens_option(help: str, panel: str) -> Any:
    """--max-tokens as mlx-lm and llama.cpp spell it; -1 is as many as the context holds."""
    return typer.Option(
        "--max-tokens",
        "-m",
        "-n",
        "--n-predict",
        "--predict",
        metavar="N",
        parser=token_count,
        help=help,
        rich_help_panel=panel,
    )


@dataclass(frozen=True)
class TemplateText:
    """Another chat template than the model's own."""

    PANEL: ClassVar[str] = TEMPLATE

    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template", metavar="TEXT", help="Jinja, instead of the model's own.", rich_help_panel=TEMPLATE
        ),
    ] = None
    chat_template_file: Annotated[
        str | None,
        typer.Option("--chat-template-file", metavar="FILE", help="The same from a file.", rich_help_panel=TEMPLATE),
    ] = None

    def template(self) -> str | None:
        """Its text. Raises UsageError for the name of one, InvalidArgument for a file that cannot be read."""
        if self.chat_template is not None and self.chat_template_file is not None:
            raise UsageError("--chat-template-file: expected without --chat-template")
        if self.chat_template_file is not None:
            return read_text("--chat-template-file", self.chat_template_file)
        if self.chat_template is not None and "{" not in self.chat_template:
            raise UsageError("--chat-template: names of templates are not known here, expected Jinja text")
        return self.chat_template


def set_template(tokenizer: Tokenizer, text: str) -> None:
    """Give a model another chat template; it fails here, not with the first chat, if it is broken."""
    from penstock.text.template import ChatTemplates

    before = tokenizer.templates
    named = {} if before is None else before.special_tokens
    tokenizer.templates = ChatTemplates({"default": (text, "--chat-template")}, named)
    tokenizer.templates.compile()


@dataclass(frozen=True)
class TemplateOptions(TemplateText):
    """The chat template, and what it is given besides the messages."""

    system_prompt: Annotated[
        str | None, typer.Option("--system-prompt", "-sys", metavar="TEXT", help="First message, of role system.")
    ] = None
    chat_template_config: Annotated[
        str | None,
        typer.Option(
            "--chat-template-config",
            "--chat-template-kwargs",
            metavar="JSON",
            help="Variables of the template, such as '{\"enable_thinking\": false}'.",
        ),
    ] = None
    allow_special_in_messages: Annotated[bool, ALLOW_SPECIAL] = False

    def messages(self) -> list[dict[str, Any]]:
        """What stands before the first message of the user."""
        if self.system_prompt is None:
            return []
        return [{"role": "system", "content": checked_text("--system-prompt", self.system_prompt)}]

    def variables(self) -> dict[str, Any]:
        """The variables of --chat-template-config. Raises UsageError unless they are a JSON object."""
        if self.chat_template_config is None:
            return {}
        try:
            found = json.loads(self.chat_template_config)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--chat-template-config: not valid JSON: {error}") from None
        if not isinstance(found, dict):
            raise UsageError(f"--chat-template-config: is a {type(found).__name__}, expected a JSON object")
        for taken in ("messages", "add_generation_prompt"):
            if taken in found:
                raise UsageError(f"--chat-template-config: {taken!r} is set by penstock, expected other variables")
        return found


def _device_of(layers: str, device: Any) -> str:
    """What -ngl of llama.cpp comes to: 0 is a CPU; all of them, or more than any model has, is what happens anyway.
    Raises UsageError for some of the layers, and for -ngl 0 on a GPU.
    """
    number = int(layers) if re.fullmatch("-?[0-9]{1,9}", layers, re.ASCII) else None
    if number == 0:
        if device not in ("auto", "cpu"):
            raise UsageError(f"-ngl: is 0, which is --device cpu, expected no --device {device} with it")
        return "cpu"
    if layers not in ("auto", "all") and (number is None or 0 <= number < _ALL_LAYERS):
        raise UsageError(
            f"-ngl: is {layers!r}, expected 0 (--device cpu), or auto, all, 99: a GPU holds the whole model, and "
            "--expert-cache SIZE|NN% says how many experts of one that is too large for it"
        )
    note(f"penstock: -ngl {layers}: where there is a GPU it holds the whole model; --expert-cache bounds its experts")
    return device


def read_text(option: str, path: str, most: int = 16 << 20) -> str:
    """The text of a file that an option names. Raises InvalidArgument for anything but UTF-8 of a sensible size."""
    from penstock.weights.files import read_bounded

    try:
        return read_bounded(Path(path).expanduser(), most).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidArgument(f"{option}: {path}: is not UTF-8") from None
    except (CheckpointError, RuntimeError) as error:  # RuntimeError: no home folder
        raise InvalidArgument(f"{option}: {error}") from None


_ALL_LAYERS = 99  # the number that command lines give for all


def checked_text(name: str, text: str) -> str:
    """Text from the command line or standard input. Raises InvalidArgument if its bytes were no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name}: is not valid UTF-8") from None
    return text


# --------------------------------------------------------------------------------------------------------------------
# Output


def note(text: str) -> None:
    """A remark on stderr, dim on a terminal."""
    console = Console(stderr=True, highlight=False)
    dim = "dim" if console.is_terminal and not console.no_color else ""
    console.print(text, style=dim, markup=False, emoji=False, soft_wrap=True)


def tolerant_stdout() -> None:
    """Let stdout replace what its encoding lacks: models and tables may have any character, terminals know ASCII."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class Reading:
    """Progress over a long prompt: a bar on stderr, if that is a terminal, until the last token has been read.

    An instance is what `progress=` takes. Nothing is shown before the first chunk is done: it may have to compile.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._bar: Progress | None = None

    def __call__(self, count: int) -> None:
        self._done += count
        if self._done >= self._total:
            self.close()
        elif sys.stderr.isatty():
            if self._bar is None:
                from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

                columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
                self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
                self._bar.add_task("reading", total=self._total)
                self._bar.start()
            self._bar.update(self._bar.task_ids[0], completed=self._done)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def rate(count: int, seconds: float) -> float:
    """Tokens per second; 0 for no time at all."""
    return count / seconds if seconds > 0 and math.isfinite(seconds) else 0.0
