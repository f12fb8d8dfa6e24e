"""Four processes run every family, resident and streamed, and give the logits and texts of one."""

import json
from typing import Any

import pytest

pytest.importorskip("torch.distributed", reason="the extra `distributed` is not installed")
pytest.importorskip("msgspec", reason="the extra `distributed` is not installed")

import penstock
from penstock.convert.run import Options, convert
from tests.models.common import error, moe_config, some_tokens, write_model
from tests.models.made import make
from tests.models.test_deepseek_v3 import FACTORS as DEEPSEEK_FACTORS
from tests.models.test_deepseek_v3 import config_of as deepseek_config
from tests.models.test_deepseek_v3 import mistral_config
from tests.models.test_gemma4 import FACTORS as GEMMA_FACTORS
from tests.models.test_gemma4 import config_of as gemma_config
from tests.models.test_lfm2 import CONFIGS as LFM2
from tests.models.test_lfm2 import FACTORS as LFM2_FACTORS
from tests.models.test_llama import EXPERTS, MINIMAX
from tests.models.test_llama import config_of as llama_config

pytestmark = pytest.mark.slow

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def released(folder, family):
    """A checkpoint whose heads four ranks can share out in groups of 32."""
    if family == "qwen":
        delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 32}
        return write_model(folder, moe_config(**HEADS, **delta, moe_intermediate_size=64))
    if family == "gemma":
        wide = {"head_dim": 32, "global_head_dim": 64, "num_attention_heads": 4, "final_logit_softcapping": 30.0}
        return make(folder, gemma_config(**wide), GEMMA_FACTORS | {"embed_tokens": 1.0}, count=40).folder
    if family == "deepseek":
        return make(folder, deepseek_config(v_head_dim=32), DEEPSEEK_FACTORS, count=40).folder
    if family == "mistral":
        return make(folder, mistral_config(v_head_dim=32, num_hidden_layers=4), DEEPSEEK_FACTORS, count=40).folder
    if family == "lfm2":
        config = LFM2["moe"] | {"num_attention_heads": 4, "num_key_value_heads": 2}
        return make(folder, config, LFM2_FACTORS, count=40).folder
    if family == "minimax":
        config = llama_config("minimax_m2", **MINIMAX | {"head_dim": 32, **HEADS})
        return make(folder, config, {"o_proj": 0.25, "down_proj": 0.25, "w2": 0.25}, count=40).folder
    config = llama_config("qwen3_moe", **EXPERTS | {"head_dim": 32, **HEADS})
    return make(folder, config, {"o_proj": 0.25, "down_proj": 0.25}, count=40).folder


@pytest.mark.parametrize(
    ("family", "bits", "streamed"),
    [
        ("qwen", 4, "40%"),
        ("gemma", 8, "auto"),
        ("deepseek", 3, "40%"),
        ("llama", 2, "auto"),
        ("qwen", 6, "auto"),
        ("minimax", 4, "40%"),
        ("mistral", 4, "40%"),
        ("lfm2", 4, "40%"),
    ],
)
def test_four_ranks_give_the_logits_of_one(tmp_path, family, bits, streamed):
    folder = tmp_path / "quantized"
    convert(released(tmp_path / "released", family), folder, Options(quantize=True, q_bits=bits, q_group_size=32))
    assert json.loads((folder / "config.json").read_text())["quantization"]["bits"] == bits
    options: dict[str, Any] = {"device": "cpu", "activations": "float32"}
    one = penstock.load(folder, **options)
    tokens = some_tokens(90, seed=bits)
    want, text = one.logits(tokens), one.generate(tokens[:20], max_tokens=8).tokens
    with penstock.load(folder, **options, tensor_parallel_size=4, expert_cache=streamed) as llm:
        assert error(llm.logits(tokens), want) < 1e-5
        assert llm.generate(tokens[:20], max_tokens=8).tokens == text
        assert streamed == "auto" or (llm.stats().expert_reads or 0) > 0
