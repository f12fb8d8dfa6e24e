"""gpt-oss by CUDA kernels: its attention with sinks and its experts with biases, in one small model."""

from tests.gpu.common import GPU
from tests.gpu.test_models import SMALL, made
from tests.models.common import error, some_tokens


def test_small_model_matches_the_definitions():
    config, tokens = SMALL["gpt_oss"], some_tokens(200 if GPU else 11)
    want = made(config, "reference").logits(tokens)
    assert error(made(config, "cuda", dtype="float32").logits(tokens), want) <= 5e-5
