"""Kimi-Linear by CUDA kernels: decays of channels and latent attention without rotation, in one small model."""

import numpy as np

from tests.gpu.common import GPU
from tests.gpu.test_models import SMALL, made
from tests.models.common import error, some_tokens
from tests.models.made import decoded


def test_small_model_matches_the_definitions():
    config, tokens = SMALL["kimi_linear"], some_tokens(200 if GPU else 11)
    reference, llm = made(config, "reference"), made(config, "cuda", dtype="float32")
    assert error(llm.logits(tokens), reference.logits(tokens)) <= 5e-5
    assert error(decoded(llm, tokens, len(tokens) - 3), decoded(reference, tokens, len(tokens) - 3)) <= 5e-5


def test_a_prompt_by_chunks_is_near_the_definitions():
    """Chunks of 64 tokens on tensor cores, then tokens by steps from the states that they left; experts may differ."""
    config, tokens = SMALL["kimi_linear"], some_tokens(200 if GPU else 70)
    reference, llm = made(config, "reference"), made(config, "cuda", dtype="bfloat16")
    for got, want in (
        (llm.logits(tokens), reference.logits(tokens)),
        (decoded(llm, tokens, len(tokens) - 3), decoded(reference, tokens, len(tokens) - 3)),
    ):
        cosines = np.sum(got * want, axis=1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
        assert np.median(cosines) >= 0.995
