"""Options of mlx-lm, llama.cpp and vLLM that have no home of their own here: each says in a line what becomes of it.

An option whose wish is met anyway, or cannot change an answer, is taken with one remark. One that asks for something
else is refused by its name, with the nearest way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import typer


class UsageError(typer.TyperException):
    """Wrong usage that the parser does not see; the program ends with status 2."""

    exit_code = 2


@dataclass(frozen=True)
class Foreign:
    """An option that is known from elsewhere.

    names: its spellings. flag: whether it stands alone. silent: values that ask for nothing special. remark: said of
    the values `noted` (None: of all), which are taken. All other values are refused, and `instead` is the nearest way.
    """

    names: tuple[str, ...]
    instead: str = ""
    flag: bool = False
    silent: tuple[str, ...] = ()
    remark: str = ""
    noted: tuple[str, ...] | None = ()

    def remark_on(self, name: str, value: str) -> str | None:
        """What is to be said of a value, None for nothing. Raises UsageError if it is refused."""
        if any(_same(value, one) for one in self.silent):
            return None
        if self.noted is None or any(_same(value, one) for one in self.noted):
            return f"{name}: {self.remark}"
        known = (*self.silent, *self.noted)
        but = f", except {' or '.join(known)}" if known else ""
        raise UsageError(f"{name}: not supported by penstock yet{but}" + (f"; {self.instead}" if self.instead else ""))


def _same(value: str, other: str) -> bool:
    """Equal as text or as numbers."""
    try:
        return float(value) == float(other)
    except ValueError:
        return value.lower() == other.lower()


def refused(names: str, instead: str = "", silent: str = "") -> Foreign:
    """An option with a value that penstock lacks; spellings and silent values are words of a text."""
    return Foreign(tuple(names.split()), instead, silent=tuple(silent.split()))


def refused_flag(names: str, instead: str = "") -> Foreign:
    return Foreign(tuple(names.split()), instead, flag=True)


def taken(names: str, remark: str, silent: str = "") -> Foreign:
    """An option with a value that changes nothing here, whatever the value is."""
    return Foreign(tuple(names.split()), silent=tuple(silent.split()), remark=remark, noted=None)


def taken_flag(names: str, remark: str) -> Foreign:
    return Foreign(tuple(names.split()), flag=True, remark=remark, noted=None)


def without(options: Iterable[Foreign], *names: str) -> tuple[Foreign, ...]:
    """The options but for those with one of these spellings: a verb has them itself."""
    return tuple(option for option in options if not set(names) & set(option.names))


_ADAPTERS = "mlx_lm fuse makes one folder of a model and its adapter, and penstock loads that"
_CACHES = "-c and --memory bound what caches take"
_EXPERTS = "--expert-cache SIZE|NN% says how many experts the GPU holds, --expert-host SIZE the host behind it"
_CHUNKS = "chunks of prompts have the size that suits the device"
_CONFIG = "config.json says it"
_GATE = "the gate takes as many drafts as make tokens come soonest, none where that is best"
_BESIDE = "a draft model is on the device of the model"
_MAPPED = "weights are mapped from their files; --expert-io says how streamed experts are read"

TRUST = taken_flag("--trust-remote-code", "no code from model folders is run")
CHUNKS = taken("--prefill-step-size -ub --ubatch-size --max-num-batched-tokens", _CHUNKS)
BATCH = taken("-b --batch-size", _CHUNKS)  # where it does not count sequences

# These fit every verb that loads a model.
LOADING: tuple[Foreign, ...] = (
    # mlx-lm
    TRUST,
    CHUNKS,
    refused("--adapter-path --lora --lora-scaled", _ADAPTERS),
    refused_flag("--pipeline", "-tp N splits a model over N devices"),
    refused("--spec-type --speculative-config", "--speculate says what drafts come from", silent="none"),
    refused_flag("--quantize-activations -qa", "--activations int8 rounds them in quantized products, as a CPU does"),
    refused("--kv-bits", _CACHES),
    taken("--kv-group-size", "without --kv-bits it changes nothing", silent="64"),
    taken("--quantized-kv-start", "without --kv-bits it changes nothing", silent="0 5000"),
    # llama.cpp
    Foreign(
        ("--cache-type-k", "-ctk", "--cache-type-v", "-ctv"),
        _CACHES,
        remark="caches have the numbers of --dtype: float32 on a CPU, bfloat16 on a GPU",
        noted=("f32", "f16", "bf16"),
    ),
    taken("--draft-min --draft-n-min --spec-draft-n-min", _GATE, silent="0"),
    taken("--draft-p-min --spec-draft-p-min --draft-p-split --spec-draft-p-split", _GATE),
    taken("--gpu-layers-draft --n-gpu-layers-draft -ngld --spec-draft-ngl", _BESIDE),
    refused("--device-draft -devd --spec-draft-device", _BESIDE),
    taken("--ctx-size-draft -cd --spec-draft-ctx-size", "a draft model's context is its own"),
    refused("--hf-repo-draft -hfd -hfrd --spec-draft-hf", "--draft-model OWNER/NAME takes a model of the hub"),
    refused("--override-tensor -ot", _EXPERTS),
    refused_flag("--cpu-moe -cmoe", _EXPERTS),
    refused("--n-cpu-moe -ncmoe", _EXPERTS, silent="0"),
    refused("--fit -fit", "what does not fit is refused with its numbers, or streamed", silent="on"),
    refused("--fit-target -fitt --fit-ctx -fitc", "--memory SIZE bounds the caches, --expert-cache SIZE the experts"),
    Foreign(
        ("--flash-attn", "-fa"),
        "there is no other way of computing attention",
        silent=("auto",),
        remark="attention is always computed in one pass",
        noted=("on", "1"),
    ),
    refused("--load-mode -lm", _MAPPED, silent="auto mmap"),
    refused_flag("--mlock --no-mmap", _MAPPED),
    refused("--numa", "numactl --interleave=all penstock … spreads memory over the nodes"),
    refused_flag("--check-tensors", "penstock verify MODEL checks every number of a model's files"),
    refused("--rope-scaling --rope-freq-base --rope-freq-scale --override-kv", _CONFIG),
    refused("--split-mode -sm --tensor-split -ts --main-gpu -mg", "-tp N splits a model over N GPUs"),
    taken("--threads-batch -tb", "--threads counts for prompts and answers alike"),
    taken("--poll --prio --cpu-mask --cpu-strict", "threads run as the system schedules them"),
    taken_flag("--no-warmup --warmup", "programs are compiled when they are first needed, and kept"),
    refused("--hf-file -hff", "-hf OWNER/NAME:TYPE takes the GGUF file of that type"),
    refused("--hf-token -hft", "HF_TOKEN in the environment, or hf auth login"),
    refused("--model-url -mu", "download the file and name its path, or -hf OWNER/NAME:TYPE"),
    refused_flag("--context-shift", "an answer ends where the context does; -c N makes it longer"),
    taken_flag("--no-context-shift", "an answer ends where the context does"),
    # vLLM
    refused("--kv-cache-dtype", _CACHES, silent="auto"),
    refused("--gpu-memory-utilization", "--memory SIZE bounds the caches, --expert-cache SIZE the experts"),
    refused("--cpu-offload-gb", _EXPERTS, silent="0"),
    refused("--pipeline-parallel-size -pp", "-tp N splits every layer over N devices", silent="1"),
    refused("--quantization", "a model's files say how it is quantized; penstock convert -q quantizes"),
    refused("--load-format", "safetensors and GGUF files are told apart by themselves", silent="auto safetensors gguf"),
    refused("--tokenizer", "a model's folder has its tokenizer"),
    refused("--download-dir", "HF_HOME in the environment names the folder of downloads"),
    taken_flag("--enforce-eager", "on a GPU steps are captured all the same: the answers are those of eager steps"),
    taken("--swap-space", "nothing is swapped"),
    taken("--block-size", "pages have the size that suits the kernels"),
)

# And these every verb that writes text.
SAMPLING: tuple[Foreign, ...] = (
    refused("--xtc-probability", "--min-p and --top-p cut the tail of unlikely tokens", silent="0"),
    taken("--xtc-threshold", "without --xtc-probability it changes nothing", silent="0 0.1"),
    refused("--min-tokens-to-keep", "every cut keeps one token at least", silent="1"),
    refused("--samplers --sampling-seq", "the order is: penalties, temperature, top_k, top_p, min_p"),
    refused("--typical --typical-p", "--top-p or --min-p cut the tail", silent="1"),
    refused("--top-nsigma --top-n-sigma", "--top-p or --min-p cut the tail", silent="-1"),
    refused("--mirostat", "--temp, --top-p, --top-k and --min-p choose a token", silent="0"),
    refused("--dynatemp-range", "--temp is the same for every token", silent="0"),
    refused("--dry-multiplier", "--repeat-penalty, --presence-penalty and --frequency-penalty act on repetition", "0"),
    refused("--image --mmproj", "only text is read"),
    taken_flag("--use-default-chat-template", "the model's own chat template is used, if it has one"),
    taken_flag("--jinja", "chat templates are always rendered with Jinja"),
    refused("--reasoning-format", "reasoning stays in the text; penstock serve takes it apart", silent="none"),
    refused("--reasoning-budget", "--chat-template-config '{\"enable_thinking\": false}'", silent="-1"),
    refused("--reasoning -rea", "--chat-template-config '{\"enable_thinking\": false}'", silent="auto"),
    refused_flag("--ignore-eos", "penstock bench and benchmark write as many tokens as they are told"),
)

# What llama-cli takes for its terminal, on generate and chat.
TERMINAL: tuple[Foreign, ...] = (
    taken_flag("--no-display-prompt --simple-io --color --no-perf --log-disable", "only the answer goes to stdout"),
    refused_flag("--interactive -i --interactive-first -if", "penstock chat talks"),
    taken_flag("--show-timings", "timings are always shown, on stderr"),
)

# Verbs of mlx-lm, llama.cpp and vLLM that penstock lacks, and the nearest way.
_TRAINING = "train with mlx_lm or another program, fuse the adapter (mlx_lm fuse), and load the folder that it makes"
_ROUNDING = "penstock convert -q --calibrate FILE chooses codes by what a text lets the model compute"
_HUB = "the hub's own program does that: hf upload OWNER/NAME FOLDER"
VERBS: dict[str, str] = {
    "lora": _TRAINING,
    "fuse": "mlx_lm fuse makes one folder of a model and its adapter, and penstock loads that",
    "evaluate": "lm_eval --model local-completions asks penstock serve; penstock perplexity measures on a text",
    "manage": "the hub's own program lists and deletes what was downloaded: hf cache",
    "awq": _ROUNDING,
    "dwq": _ROUNDING,
    "gptq": _ROUNDING,
    "dynamic_quant": "penstock convert -q --quant-predicate mixed_3_6, or a .json file of patterns, mixes bits",
    "upload": _HUB,
    "share": "copy the folder, or hf upload OWNER/NAME FOLDER",
    "complete": "penstock generate --ignore-chat-template continues a text",
    "run-batch": "requests that come together share steps: send them to penstock serve",
    "collect-env": "penstock doctor shows what is found on this machine",
    "quantize": "penstock convert -q --model FOLDER|FILE.gguf --mlx-path FOLDER",
    "imatrix": _ROUNDING,
    "cli": "penstock generate, or penstock chat",
    "run": "penstock generate --model M, or penstock chat --model M",
}
