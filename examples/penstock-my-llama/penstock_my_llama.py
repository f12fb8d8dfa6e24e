"""Models of `model_type` my_llama: those of Llama, whose config.json calls the width of the MLP `mlp_width`."""

from dataclasses import replace
from typing import Any

from penstock.models import llama


def read_config(raw: dict[str, Any]) -> llama.Config:
    renamed = raw | {"model_type": "llama", "intermediate_size": raw.get("mlp_width")}
    return replace(llama.read_config(renamed), model_type="my_llama")


FAMILY = replace(llama.FAMILY, name="my_llama", model_types=("my_llama",), read_config=read_config, gguf=None)
