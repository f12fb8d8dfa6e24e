"""gpt-oss on small random checkpoints: against mlx-lm and transformers, streamed, with a session, and its config."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import CheckpointError
from penstock.models import family_of
from penstock.quant import dequantize
from tests.models.common import error, some_tokens, write_model
from tests.models.made import SHORT, mlx_logits

CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 260,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "swiglu_limit": 7.0,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 128,
    },
}  # fmt: skip
EIGHT = {"bits": 8, "group_size": 32}


class Names:
    """A `Source` that draws whatever it is asked for, under the names of mlx-lm's files."""

    layout = "mlx"

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)
        self.found: dict[str, np.ndarray] = {}

    def __contains__(self, path: str) -> bool:
        return path.endswith("experts.gate_proj")

    def weight(self, path: str, *shape: int) -> np.ndarray:
        size = 2 if path.endswith(("up_proj", "gate_proj")) else 0.4 if path.endswith(("o_proj", "down_proj")) else 1
        return self._kept(("" if path == "lm_head" else "model.") + path + ".weight", size * shape[-1] ** -0.5, *shape)

    def _kept(self, name: str, size: float, *shape: int) -> np.ndarray:
        drawn = (self.rng.standard_normal(shape) * size).astype(np.float32)
        self.found[name] = np.float32(1) + drawn if name.endswith("norm.weight") else drawn
        return self.found[name]

    def vector(self, path: str, *shape: int) -> np.ndarray:
        plain = path.endswith((".bias", "sinks"))
        return self._kept(f"model.{path}" if plain else f"model.{path}.weight", 0.3, *shape)

    def rows(self, path: str, order: np.ndarray, *shape: int) -> np.ndarray:
        return self.weight(path, *shape)[order]

    def stack(self, paths: list[str], *shape: int) -> np.ndarray:
        return self.weight(paths[0], *shape)


def drawn() -> dict[str, np.ndarray]:
    names, family = Names(), family_of(CONFIG)
    family.read_weights(names, family.read_config(CONFIG))
    return names.found


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder as MXFP4-Q8 releases are, and the numbers its weights stand for."""
    table: dict[str, Any] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    stored, values = {}, drawn()
    for name, array in values.items():
        path = name.removesuffix(".weight")
        if array.ndim < 2 or path == name:
            stored[name] = array
            continue
        experts = ".experts." in path
        q = penstock.quantize(array, mode="mxfp4") if experts else penstock.quantize(array, 8, 32)
        if not experts:
            table[path] = dict(EIGHT)
        parts = zip(q.format.parts, q.arrays, strict=True)
        stored |= {f"{path}.{part}": each for part, each in parts}
        values[name] = dequantize(q)
    folder = tmp_path_factory.mktemp("gpt_oss") / "model"
    return write_model(folder, CONFIG | {"quantization": table}, stored), values


def logits(folder: Path, tokens: list[int], **options: Any) -> np.ndarray:
    with penstock.load(folder, activations="float32", **{"device": "cpu", **options}) as llm:
        return llm.logits(tokens)


def test_logits_agree_with_mlx_lm_wherever_the_experts_are(released: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(released[0], folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"]["truncate"] = True  # as mlx-lm does, whatever is said
    (folder / "config.json").write_text(json.dumps(config))
    tokens = some_tokens(40)
    want = mlx_logits(folder, tokens)
    assert error(logits(folder, tokens, device="reference"), want) <= SHORT
    found = logits(folder, tokens)
    assert error(found, want) <= SHORT
    np.testing.assert_array_equal(logits(folder, tokens, expert_cache="60%"), found)


def test_logits_agree_with_transformers(released: Any) -> None:
    torch = pytest.importorskip("torch")
    import transformers

    folder, values = released
    config = transformers.GptOssConfig(**{k: v for k, v in CONFIG.items() if k not in ("model_type", "architectures")})
    model = transformers.GptOssForCausalLM(config).float().eval()
    state = {}
    for name, array in values.items():
        if ".experts." not in name:
            state[name] = array
    for n in range(CONFIG["num_hidden_layers"]):
        path = f"model.layers.{n}.mlp.experts."
        gate, up = (values[f"{path}{part}_proj.weight"].transpose(0, 2, 1) for part in ("gate", "up"))
        state[f"{path}gate_up_proj"] = np.stack([gate, up], -1).reshape(*gate.shape[:2], -1)
        state[f"{path}gate_up_proj_bias"] = np.stack(
            [values[f"{path}{part}_proj.bias"] for part in ("gate", "up")], -1
        ).reshape(len(gate), -1)
        state[f"{path}down_proj"] = values[f"{path}down_proj.weight"].transpose(0, 2, 1)
        state[f"{path}down_proj_bias"] = values[f"{path}down_proj.bias"]
    model.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in state.items()})
    tokens = some_tokens(40)
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0].numpy()
    assert error(logits(folder, tokens), want) <= SHORT


def test_steps_give_what_one_step_gives(released: Any) -> None:
    folder, _ = released
    tokens = some_tokens(20)
    with penstock.load(folder, device="cpu", activations="float32") as llm:
        want = llm.logits(tokens).argmax(-1)
        session = llm.session()
        session.append(tokens[:12])
        got = session.generate(max_tokens=1).tokens[0]
    assert got == want[11]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_local_experts": 1}, "num_experts_per_tok is 2, expected an integer from 1 to 1"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"num_key_value_heads": 4}, "num_attention_heads is 6, expected a multiple of num_key_value_heads"),
        ({"attention_bias": False}, "attention_bias is False, expected True"),
    ],
)
def test_read_config_says_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        family_of(CONFIG).read_config(CONFIG | change)
