"""gpt-oss by CUDA kernels: its attention with sinks and its experts with biases, in one small model."""

from penstock.graph import fuse
from tests.gpu.common import GPU
from tests.gpu.test_models import SMALL, made
from tests.models.common import error, some_tokens
from tests.models.made import decoded


def test_small_model_matches_the_definitions():
    config, tokens = SMALL["gpt_oss"], some_tokens(200 if GPU else 11)
    reference, llm = made(config, "reference"), made(config, "cuda", dtype="float32")
    assert error(llm.logits(tokens), reference.logits(tokens)) <= 5e-5
    assert error(decoded(llm, tokens, len(tokens) - 3), decoded(reference, tokens, len(tokens) - 3)) <= 5e-5


def test_a_step_of_one_row_is_six_nodes_a_layer():
    """Biases, the residual stream and the clamped gate are inside of other launches."""
    engine = made(SMALL["gpt_oss"], "cuda", dtype="float32").engine
    engine.allocate(sequences=1)
    graph = fuse(engine.programs.graph(1, 1, 4, 0, decode=True, padded=True), "cuda")
    found = [node.op.name for node in graph.nodes]
    layer = [
        "norm_matmul",
        "attention_prepare",
        "attention_paged",
        "matmul_add",
        "moe_norm_route",
        "moe_biased_forward",
    ]
    assert found[1:] == layer * ((len(found) - 1) // 6)
