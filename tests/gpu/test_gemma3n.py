"""Gemma 3n by CUDA kernels: streams that are mixed, MLPs of few neurons, per-layer inputs, in one small model."""

from tests.gpu.common import GPU
from tests.gpu.test_models import SMALL, made
from tests.models.common import error, some_tokens
from tests.models.made import decoded


def test_small_model_matches_the_definitions():
    config, tokens = SMALL["gemma3n"], some_tokens(200 if GPU else 11)
    reference, llm = made(config, "reference"), made(config, "cuda", dtype="float32")
    assert error(llm.logits(tokens), reference.logits(tokens)) <= 5e-5
    assert error(decoded(llm, tokens, len(tokens) - 2), decoded(reference, tokens, len(tokens) - 2)) <= 5e-5
