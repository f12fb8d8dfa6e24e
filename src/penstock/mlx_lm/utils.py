"""`load` with mlx-lm's arguments, and what its `utils` has beside it for running models."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from penstock import api
from penstock.errors import InvalidArgument
from penstock.mlx_lm.models.base import Model
from penstock.mlx_lm.tokenizer_utils import TokenizerWrapper, wrapped
from penstock.weights.files import read_json
from penstock.weights.resolve import ResolvedModel, resolve_model

__all__ = [
    "common_prefix_len",
    "does_model_support_input_embeddings",
    "load",
    "load_config",
    "load_model",
    "load_tokenizer",
]

_REMARK = "trust_remote_code: no code from model folders is run"


@overload
def load(
    path_or_hf_repo: str | os.PathLike[str] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: Literal[False] = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[Model, TokenizerWrapper]: ...
@overload
def load(
    path_or_hf_repo: str | os.PathLike[str] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    *,
    return_config: Literal[True],
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[Model, TokenizerWrapper, dict[str, Any]]: ...
def load(
    path_or_hf_repo: str | os.PathLike[str] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """(model, tokenizer) of a folder, a .gguf file or a Hugging Face id; with return_config also what config.json says.

    None is the built-in demo model. tokenizer_config: texts of special tokens (eos_token, …), chat_template. lazy
    changes nothing: weights are mapped from the files. options: those of `penstock.load` (device, expert_cache, …);
    activations are "float32" here unless given, which is exact, so that greedy text is mlx-lm's; "int8" is quicker on a
    CPU. adapter_path and model_config are refused: penstock has no adapters, and takes a model as its files say. Raises
    InvalidArgument, CheckpointError, OutOfMemory.
    """
    if adapter_path is not None:
        raise InvalidArgument(
            f"load: adapter_path is {adapter_path!r:.60}, expected None: penstock has no adapters; "
            "fuse them into the model with mlx_lm.fuse first"
        )
    _check_model_config(model_config)
    if trust_remote_code or (tokenizer_config or {}).get("trust_remote_code"):
        logging.getLogger("penstock").warning("load: %s", _REMARK)
    options.setdefault("activations", "float32")
    llm = api.load(path_or_hf_repo, revision=revision, **options)
    found = resolve_model(path_or_hf_repo, revision=revision, offline=True, quiet=True)
    try:
        tokenizer = wrapped(llm.tokenizer, found.path, tokenizer_config)
        config = _config_of(found, llm)
    except BaseException:
        llm.close()
        raise
    model = Model(llm, config)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def load_model(
    model_path: str | os.PathLike[str],
    lazy: bool = False,
    strict: bool = True,
    model_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Model, dict[str, Any]]:
    """(model, config) of a folder; arguments as `load`. Raises InvalidArgument for strict=False."""
    if not strict:
        raise InvalidArgument("load_model: strict is False, expected True: all weights of a model are needed")
    model, _, config = load(model_path, model_config=model_config, lazy=lazy, return_config=True, **options)
    return model, config


def load_tokenizer(
    model_path: str | os.PathLike[str] | None,
    tokenizer_config_extra: Mapping[str, Any] | None = None,
    eos_token_ids: Sequence[int] | int | None = None,
) -> TokenizerWrapper:
    """The tokenizer of a model alone; tokenizer_config_extra as tokenizer_config of `load`."""
    from penstock.text.gguf_tokenizer import gguf_tokenizer
    from penstock.text.tokenizer import Tokenizer
    from penstock.weights.gguf import GgufFile

    found = resolve_model(model_path, quiet=True)
    own = gguf_tokenizer(GgufFile.open(found.path)) if found.kind == "gguf" else Tokenizer.from_folder(found.path)
    return wrapped(own, found.path, tokenizer_config_extra, eos_token_ids)


def load_config(model_path: str | os.PathLike[str]) -> dict[str, Any]:
    """What config.json of a folder says, with eos_token_id of generation_config.json. Raises CheckpointError."""
    return _with_eos(resolve_model(Path(model_path), quiet=True))


def common_prefix_len(list1: Sequence[Any], list2: Sequence[Any]) -> int:
    """How many leading items two lists share."""
    count = 0
    for first, second in zip(list1, list2, strict=False):
        if first != second:
            break
        count += 1
    return count


def does_model_support_input_embeddings(model: Any) -> bool:
    """No model of penstock does."""
    return False


def _check_model_config(model_config: Mapping[str, Any] | None) -> None:
    for name, value in (model_config or {}).items():
        if name == "quantize_activations" and value in (None, False):
            continue
        raise InvalidArgument(
            f"load: model_config has {name}, expected nothing: penstock takes a model as its config.json says"
        )


def _config_of(found: ResolvedModel, llm: api.LLM) -> dict[str, Any]:
    if found.kind == "gguf":
        config: Any = llm.config
        return {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    return _with_eos(found)


def _with_eos(found: ResolvedModel) -> dict[str, Any]:
    config = found.read_config()
    generation = found.config_path.parent / "generation_config.json"
    read = read_json(generation) if generation.is_file() else {}
    if isinstance(read, dict) and read.get("eos_token_id") is not None:
        config["eos_token_id"] = read["eos_token_id"]
    return config
