"""Small checkpoints with experts, of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.random_checkpoint import write
from tests.models.common import moe_config, next_config
from tests.models.test_deepseek_v3 import CONFIGS as DEEPSEEK
from tests.models.test_gemma4 import CONFIGS as GEMMA
from tests.models.test_kimi_linear import CONFIGS as KIMI
from tests.models.test_lfm2 import CONFIGS as LFM2
from tests.models.test_llama import CONFIGS as LLAMA

VOCAB = 4096  # the demo model's tokenizer
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": moe_config(num_experts=11),
    "qwen3_next": next_config(num_experts=11),
    "gemma4": GEMMA["moe"],
    "deepseek_v3": DEEPSEEK["v3"],
    "llama": LLAMA["moe"],
    "glm4_moe": LLAMA["glm"],
    "minimax_m2": LLAMA["minimax"],
    "mistral4": DEEPSEEK["mistral sees"],
    "lfm2_moe": LFM2["moe"],
    "kimi_linear": KIMI["moe"],
}


def checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    inner = config.get("text_config")
    text = {**(inner or config), "vocab_size": VOCAB}
    write({**config, "text_config": text} if inner else text, folder)
    return folder
