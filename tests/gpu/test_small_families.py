"""Families by CUDA kernels in one small model each: short convolutions, queries that grow with their position."""

from typing import Any

import pytest

from tests.gpu.common import GPU
from tests.gpu.test_models import made
from tests.models.common import error, some_tokens
from tests.models.made import decoded
from tests.models.test_lfm2 import CONFIGS as LFM2
from tests.models.test_llama import CONFIGS as LLAMA

# cut short for the interpreter; queries grow after four positions
SMALL: dict[str, dict[str, Any]] = {
    "lfm2": {**LFM2["moe"], "num_hidden_layers": 2, "num_dense_layers": 1, "layer_types": ["full_attention", "conv"]},
    "ministral": {
        **LLAMA["ministral"],
        "num_hidden_layers": 1,
        "rope_parameters": {**LLAMA["ministral"]["rope_parameters"], "original_max_position_embeddings": 4},
    },
}


@pytest.mark.parametrize("name", ["lfm2", pytest.param("ministral", marks=pytest.mark.slow)])
def test_small_model_matches_the_definitions(name):
    config, tokens = SMALL[name], some_tokens(200 if GPU else 6)
    want = made(config, "reference").logits(tokens)
    gpu = made(config, "cuda", dtype="float32")
    assert error(gpu.logits(tokens), want) <= 5e-5
    assert error(decoded(gpu, tokens[:6], 5), want[4:6]) <= 5e-5
