"""Small random checkpoints of every family in the layout of the released files, and what mlx-lm makes of them.

Names and shapes come from the code that reads a model, values from the name; mlx-lm, which loads strictly, says whether
they are right. Nothing here needs torch.
"""

import contextlib
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from penstock import models
from tests.models.common import BRANCH, dense_config, moe_config, next_config, seeing, write_model
from tests.models.common import tensors as qwen_tensors
from tests.models.test_deepseek_v3 import config_of as deepseek_config
from tests.models.test_deepseek_v3 import mistral_config
from tests.models.test_gemma3 import CONFIGS as GEMMA3
from tests.models.test_gemma3n import config_of as gemma3n_config
from tests.models.test_gemma4 import CONFIGS as GEMMA
from tests.models.test_kimi_linear import config_of as kimi_config
from tests.models.test_lfm2 import CONFIGS as LFM2
from tests.models.test_llama import EXPERTS, GLM, MINIMAX, MINISTRAL
from tests.models.test_llama import config_of as llama_config

# Widths that are multiples of 64, so that matrices can be quantized, but for a few (96, 160, 24) that stay dense.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": moe_config(moe_intermediate_size=64, shared_expert_intermediate_size=128),
    "qwen3_5": dense_config(intermediate_size=192, tie_word_embeddings=True),
    "qwen3_next": next_config(moe_intermediate_size=64, torch_dtype="bfloat16"),
    "gemma3": GEMMA3["nested"],
    "gemma3_text": GEMMA3["text"],
    "gemma3n": {"model_type": "gemma3n", "dtype": "bfloat16", "text_config": gemma3n_config()},
    "gemma4": GEMMA["moe"],
    "gemma4 inputs": GEMMA["inputs"],
    "gemma4_text": GEMMA["wide"],
    "deepseek_v3": deepseek_config(moe_intermediate_size=64, kv_lora_rank=64, q_lora_rank=64),
    "kimi_k2": deepseek_config(model_type="kimi_k2", num_hidden_layers=2, q_lora_rank=None),
    "glm4_moe_lite": deepseek_config(
        model_type="glm4_moe_lite", num_hidden_layers=2, n_group=1, topk_group=1, rope_scaling=None
    ),
    "kimi_linear": kimi_config((2,), 3, moe_intermediate_size=64, kv_lora_rank=64, delta={"head_dim": 64}),
    "llama": llama_config("llama", attention_bias=True, mlp_bias=True),
    "mistral": llama_config("mistral", num_hidden_layers=2),
    "qwen2": llama_config("qwen2", num_hidden_layers=2, tie_word_embeddings=True),
    "qwen3": llama_config("qwen3", num_hidden_layers=2, head_dim=24),
    "qwen3_moe": llama_config("qwen3_moe", **EXPERTS | {"num_hidden_layers": 2, "moe_intermediate_size": 64}),
    "qwen2_moe": llama_config(
        "qwen2_moe",
        **EXPERTS | {"num_hidden_layers": 2, "moe_intermediate_size": 64, "head_dim": None},
        shared_expert_intermediate_size=64,
    ),
    "mixtral": llama_config("mixtral", num_hidden_layers=2, num_local_experts=3, num_experts_per_tok=2),
    "glm4_moe": llama_config("glm4_moe", **GLM | {"num_hidden_layers": 3, "moe_intermediate_size": 64}),
    "minimax_m2": llama_config("minimax_m2", **MINIMAX | {"num_hidden_layers": 2, "intermediate_size": 64}),
    "mistral4": seeing(mistral_config(num_hidden_layers=2, moe_intermediate_size=64, kv_lora_rank=64)),
    "lfm2": LFM2["dense"],
    "lfm2_moe": LFM2["moe"],
    "ministral3": llama_config("ministral3", **MINISTRAL | {"num_hidden_layers": 2}),
    "mistral3": seeing(llama_config("ministral3", **MINISTRAL, num_hidden_layers=2)),
}
_PLAIN = (
    "A_log",
    "dt_bias",
    "correct_output_scale",
    "layer_scalar",
    "router.scale",
    "per_expert_scale",
    "e_score_correction_bias",
    "expert_bias",
    ".bias",
)


class Names:
    """A `Source` that draws whatever it is asked for and keeps it under the name of the released files."""

    layout = "hf"

    def __init__(self, prefix: str, head: str = "", joined: bool = False) -> None:
        self._prefix, self._head, self._joined = prefix, head, joined
        self.found: dict[str, np.ndarray] = {}

    def __contains__(self, path: str) -> bool:
        return path.endswith("e_score_correction_bias") or (self._joined and path.endswith("gate_up_proj"))

    def weight(self, path: str, *shape: int) -> np.ndarray:
        suffix = "" if path.endswith(_PLAIN) or (".experts." in path and self._joined) else ".weight"
        name = (self._head if path == "lm_head" else self._prefix) + path + suffix
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        array = rng.standard_normal(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.2)
        if path.endswith(("norm", "layernorm", "layer_scalar", "scale", "norm_1", "norm_2")):
            array += 1
        if path.endswith(("o_proj", "down_proj")):
            array *= BRANCH
        kept = np.float32 if path.endswith(("e_score_correction_bias", "dt_bias", "A_log")) else ml_dtypes.bfloat16
        self.found[name] = array.astype(kept)
        return self.found[name]

    def vector(self, path: str, *shape: int) -> np.ndarray:
        return self.weight(path, *shape).astype(np.float32)

    def rows(self, path: str, order: np.ndarray, *shape: int) -> np.ndarray:
        return self.weight(path, *shape)[order]

    def stack(self, paths: Sequence[str], *shape: int) -> np.ndarray:
        if len(paths) == 1:
            return self.weight(paths[0], *shape)
        return np.stack([self.weight(path, *shape[1:]) for path in paths])


def tensors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """All weights of a config, as released."""
    family = models.family_of(dict(config))
    if family.name == "qwen3_5":
        return qwen_tensors(config)
    nested = "text_config" in config
    if family.name == "gemma3" and nested:  # as released, which mlx-lm alone can read
        names = Names("language_model.model.", "language_model.")
    else:
        names = Names("model.language_model." if nested else "model.", joined=family.name == "gemma4")
    family.read_weights(names, family.read_config(dict(config)))
    if family.name == "gemma3n":  # whose files have keys and values in layers that share others'
        text = config["text_config"]
        for n in range(text["num_hidden_layers"] - text["num_kv_shared_layers"], text["num_hidden_layers"]):
            for part in ("k_proj", "v_proj", "k_norm"):
                like = names.found[f"model.language_model.layers.0.self_attn.{part}.weight"]
                names.weight(f"layers.{n}.self_attn.{part}", *like.shape)
    return names.found


def write(folder: Path, name: str, shards: int = 2, **changes: Any) -> Path:
    """The model of a name of CONFIGS."""
    config = CONFIGS[name] | changes
    return write_model(folder, config, tensors(config), shards)


Stored = dict[str, tuple[str, tuple[int, ...], bytes]]


def stored(folder: Path, pattern: str = "model*.safetensors") -> Stored:
    """dtype, shape and bytes of all tensors of a folder, read by mlx."""
    import mlx.core as mx

    found: Stored = {}
    for file in sorted(folder.glob(pattern)):
        for name, array in mx.load(str(file)).items():
            found[name] = str(array.dtype), tuple(array.shape), np.array(array.reshape(-1).view(mx.uint8)).tobytes()
    return found


def by_mlx_lm(source: Path, target: Path, **options: Any) -> Path:
    """What `mlx_lm.convert` makes."""
    import mlx_lm

    with contextlib.redirect_stdout(io.StringIO()):
        mlx_lm.convert(str(source), str(target), **options)
    return target


def config_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
