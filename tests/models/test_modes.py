"""Models whose weights are small floats: against mlx-lm, with experts in slots, cut for ranks, and made up."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import penstock
from penstock.convert.run import Options, convert
from penstock.models.random import Random, Shapes
from penstock.models.split import Part, taken
from penstock.quant import QuantizedTensor, dequantize
from tests.convert.common import write
from tests.models.common import error, some_tokens
from tests.models.made import mlx_logits
from tests.ops.modes import FLOAT_MODES, weight


def logits(folder: Path, tokens: list[int], **options: Any) -> np.ndarray:
    with penstock.load(folder, device="cpu", activations="float32", **options) as llm:
        return llm.logits(tokens)


def test_nvfp4_model_agrees_with_mlx_lm_wherever_its_experts_are(tmp_path: Path) -> None:
    """Also with global scales on its experts: those that change nothing, and those that differ from one to the next."""
    made, scaled = tmp_path / "made", tmp_path / "scaled"
    convert(write(tmp_path / "source", "qwen3_moe"), made, Options(quantize=True, q_mode="nvfp4"))
    tokens = some_tokens(12)
    want = logits(made, tokens)
    assert np.median([error(a, b) for a, b in zip(want, mlx_logits(made, tokens), strict=True)]) < 5e-6
    np.testing.assert_array_equal(logits(made, tokens, expert_cache="50%"), want)

    scaled.mkdir()
    for file in made.iterdir():
        (scaled / file.name).write_bytes(file.read_bytes())
    tensors = load_file(made / "model.safetensors")
    experts = [name.removesuffix(".scales") for name in tensors if "switch_mlp" in name and name.endswith(".scales")]
    (scaled / "model.safetensors.index.json").unlink()
    for step in (0, 100):
        rising = {path: 2688 + step * np.arange(len(tensors[f"{path}.scales"]), dtype=np.float32) for path in experts}
        save_file(tensors | {f"{path}.global_scale": a for path, a in rising.items()}, scaled / "model.safetensors")
        found = logits(scaled, tokens)
        assert (error(found, want) < 5e-6) is (step == 0)
        np.testing.assert_array_equal(logits(scaled, tokens, expert_cache="50%"), found)
    rising[experts[-1]][1] = np.nan
    save_file(tensors | {f"{path}.global_scale": a for path, a in rising.items()}, scaled / "model.safetensors")
    with pytest.raises(penstock.errors.CheckpointError, match=f"{experts[-1]} has a global scale that is not finite"):
        logits(scaled, tokens)
    rising[experts[-1]][1] = 2788
    save_file(tensors | {f"{path}.global_scale": a for path, a in rising.items()}, scaled / "model.safetensors")
    convert(scaled, tmp_path / "dense", Options(dequantize=True, dtype="float32"))
    assert error(logits(tmp_path / "dense", tokens), found) < 5e-6
    mxfp8: dict[str, Any] = {"dtype": "float32", "quantize": True, "q_mode": "mxfp8"}
    convert(scaled, tmp_path / "again", Options(**mxfp8, requantize=True))
    convert(tmp_path / "dense", tmp_path / "once", Options(**mxfp8))
    np.testing.assert_array_equal(logits(tmp_path / "again", tokens), logits(tmp_path / "once", tokens))


@pytest.mark.parametrize("kind", [*FLOAT_MODES, "nvfp4 with global scales"])
def test_taken_cuts_experts_rows_and_columns(kind: str, rng: np.random.Generator) -> None:
    w = weight(rng, kind, 4, 6, 128)
    whole = dequantize(w)
    for part, want in (
        (Part(-3, np.array([2, 0]), 4), whole[[2, 0]]),
        (Part(-2, slice(1, 5), 6), whole[:, 1:5]),
        (Part(-1, slice(32, 96), 128), whole[..., 32:96]),
    ):
        np.testing.assert_array_equal(dequantize(taken(w, part)), want)
    with pytest.raises(penstock.errors.InvalidArgument, match="groups of 32 columns, expected 16 and 32"):
        taken(w, Part(-1, slice(16, 32), 128))


@pytest.mark.parametrize("mode", FLOAT_MODES)
def test_made_up_weights_are_tame_in_every_mode(mode: str) -> None:
    config = {"model_type": "qwen3_moe", "quantization": {"mode": mode, "lm_head": {"bits": 8, "group_size": 64}}}
    source = Random(config)
    w, head = source.weight("layers.0.mlp.switch_mlp.up_proj", 3, 64, 256), source.weight("lm_head", 9, 256)
    assert isinstance(w, QuantizedTensor) and w.mode == mode
    values = dequantize(w)
    assert np.isfinite(values).all() and 0.3 < values.std() * 16 < 1.2
    assert isinstance(head, QuantizedTensor) and (head.mode, head.bits, source.group_size) == ("affine", 8, 64)
    shapes = Shapes(config).weight("layers.0.mlp.switch_mlp.up_proj", 3, 64, 256)
    assert shapes.nbytes == w.nbytes
