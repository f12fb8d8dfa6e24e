"""gpt-oss on small random checkpoints: against mlx-lm and transformers, streamed, with a session, and its config."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.analysis.expert_routes import record
from penstock.analysis.survey import survey
from penstock.convert.run import Options, convert
from penstock.errors import CheckpointError
from penstock.models import family_of
from penstock.quant import QuantizedTensor, dequantize
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.resolve import resolve_model
from tests.cli.common import call
from tests.models.common import error, some_tokens, write_model, write_tokenizer
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


@pytest.mark.parametrize("cache", ["auto", "60%"])
def test_routes_and_heat_know_its_experts(released: Any, cache: str) -> None:
    with penstock.load(released[0], activations="float32", device="cpu", expert_cache=cache) as llm:
        routes = record(llm, some_tokens(9), max_tokens=6)
        assert (routes.experts, routes.layers) == (5, (0, 1, 2, 3)) and routes.ids.min() >= 0
        handle = llm.scheduler.submit(llm.request(some_tokens(9), 6, expert_heat=True))
        handle.result()
        ids = routes.ids[routes.decode].transpose(1, 0, 2)
        want = [np.bincount(layer.reshape(-1), minlength=5) for layer in ids]
        np.testing.assert_array_equal(handle.expert_counts, want)


@pytest.fixture(scope="module")
def in_blocks(released: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """The same model in the files of Hugging Face: experts in blocks of mxfp4, gate and up in turns, the rest dense."""
    values = released[1]
    stored = {name: array for name, array in values.items() if ".experts." not in name}
    for n in range(CONFIG["num_hidden_layers"]):
        path = f"model.layers.{n}.mlp.experts."
        joined = {"down_proj": (values[f"{path}down_proj.weight"], values[f"{path}down_proj.bias"])}
        gate, up = ([values[f"{path}{part}_proj.{end}"] for end in ("weight", "bias")] for part in ("gate", "up"))
        pairs = [np.stack(both, 2).reshape(len(both[0]), -1, *both[0].shape[2:]) for both in zip(gate, up, strict=True)]
        for part, (weight, bias) in (joined | {"gate_up_proj": tuple(pairs)}).items():
            q = penstock.quantize(np.ascontiguousarray(weight), mode="mxfp4")
            np.testing.assert_array_equal(dequantize(q), weight)
            stored[f"{path}{part}_blocks"] = q.packed.view(np.uint8).reshape(*q.scales.shape, 16)
            stored[f"{path}{part}_scales"] = q.scales
            stored[f"{path}{part}_bias"] = bias
    table = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    folder = tmp_path_factory.mktemp("gpt_oss") / "released"
    return write_model(folder, CONFIG | {"quantization_config": table}, stored, shards=2), values


@pytest.mark.parametrize("files", ["released", "in_blocks"])
def test_logits_agree_with_transformers(files: str, request: pytest.FixtureRequest) -> None:
    """Whose experts, in float32, come from its own reading of blocks where there are any."""
    torch = pytest.importorskip("torch")
    import transformers
    from safetensors.numpy import load_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, values = request.getfixturevalue(files)
    stored = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    config = transformers.GptOssConfig(**{k: v for k, v in CONFIG.items() if k not in ("model_type", "architectures")})
    model = transformers.GptOssForCausalLM(config).float().eval()
    state = {name: torch.from_numpy(array) for name, array in values.items() if ".experts." not in name}
    for n in range(CONFIG["num_hidden_layers"]):
        path = f"model.layers.{n}.mlp.experts."
        gate, up = (values[f"{path}{part}_proj.weight"].transpose(0, 2, 1) for part in ("gate", "up"))
        biases = [values[f"{path}{part}_proj.bias"] for part in ("gate", "up")]
        made = {
            "gate_up_proj": np.stack([gate, up], -1).reshape(*gate.shape[:2], -1),
            "gate_up_proj_bias": np.stack(biases, -1).reshape(len(gate), -1),
            "down_proj": values[f"{path}down_proj.weight"].transpose(0, 2, 1),
            "down_proj_bias": values[f"{path}down_proj.bias"],
        }
        for part, array in made.items():
            state[path + part] = torch.from_numpy(np.ascontiguousarray(array))
            if f"{path}{part}_blocks" in stored:
                both = (torch.from_numpy(stored[f"{path}{part}_{end}"]) for end in ("blocks", "scales"))
                assert torch.equal(convert_moe_packed_tensors(*both).float(), state[path + part])
    model.load_state_dict(state)
    tokens = some_tokens(40)
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0].numpy()
    assert error(logits(folder, tokens), want) <= SHORT


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, list[int]]:
    """A folder as transformers saves it, dense, with columns of gate and up in turns, and its logits."""
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(3)
    known = {k: v for k, v in CONFIG.items() if k not in ("model_type", "architectures")}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**known, swiglu_alpha=1.3)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.1)
        folder, tokens = tmp_path_factory.mktemp("gpt_oss") / "saved", some_tokens(30)
        model.save_pretrained(folder)
        write_tokenizer(folder)
        return folder, model(torch.tensor([tokens])).logits[0].numpy(), tokens


def test_files_that_transformers_saves_are_read_and_converted(saved: Any, tmp_path: Path) -> None:
    folder, want, tokens = saved
    assert error(logits(folder, tokens), want) <= SHORT
    assert error(logits(folder, tokens, device="reference"), want) <= SHORT
    convert(folder, tmp_path / "made")
    assert error(logits(tmp_path / "made", tokens), want) <= SHORT
    convert(folder, tmp_path / "small", Options(quantize=True, q_bits=8, q_group_size=32))
    resident = logits(tmp_path / "small", tokens)
    np.testing.assert_array_equal(logits(tmp_path / "small", tokens, expert_cache="60%"), resident)
    assert not survey(resolve_model(folder)).notices


def test_files_that_transformers_saves_cannot_be_streamed(saved: Any) -> None:
    message = r"layers.0.mlp.experts.gate_up_proj has the columns of each expert as rows, which cannot be streamed, exp"
    with pytest.raises(CheckpointError, match=message):
        penstock.load(saved[0], device="cpu", expert_cache="60%")


def test_blocks_of_every_scale_are_what_transformers_reads(tmp_path: Path) -> None:
    """Codes are not rounded again: the same bytes, as numbers those of transformers, but for the scale 255, which is
    infinity here and in MLX."""
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, (3, 85, 2, 16), np.uint8)
    scales = np.arange(3 * 85 * 2, dtype=np.int64).reshape(3, 85, 2) % 255
    folder = write_model(tmp_path / "m", CONFIG, {"x_blocks": codes, "x_scales": scales.astype(np.uint8)})
    tensor = Checkpoint.open(folder).tensor("x")
    assert isinstance(tensor, QuantizedTensor) and (tensor.shape, tensor.mode) == ((3, 85, 64), "mxfp4")
    np.testing.assert_array_equal(tensor.packed.view(np.uint8).reshape(codes.shape), codes)
    want = convert_moe_packed_tensors(torch.from_numpy(codes), torch.from_numpy(scales.astype(np.uint8)))
    np.testing.assert_array_equal(dequantize(tensor), want.float().numpy().transpose(0, 2, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_scales": None}, "tensor 'x_blocks' has no x_scales beside it, expected the scales of its blocks"),
        (
            {"x_scales": np.zeros((3, 4, 1), np.uint8)},
            r"x_scales' is U8 \[3, 4, 1\], expected U8 \[3, 4, 2\], one for each",
        ),
        ({"x_scales": np.zeros((3, 4, 2), np.float32)}, r"x_scales' is F32 \[3, 4, 2\], expected U8"),
        ({"x_blocks": np.zeros((3, 4, 2, 8), np.uint8)}, r"is U8 \[3, 4, 2, 8\], expected U8 \[E, N, K / 32, 16\]"),
        ({"x_blocks": np.zeros((3, 4, 16), np.uint8)}, r"is U8 \[3, 4, 16\], expected U8 \[E, N, K / 32, 16\]"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    parts = {"x_blocks": np.zeros((3, 4, 2, 16), np.uint8), "x_scales": np.zeros((3, 4, 2), np.uint8)} | change
    folder = write_model(tmp_path / "m", CONFIG, {name: array for name, array in parts.items() if array is not None})
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder).tensor("x")


@pytest.mark.parametrize("io", ["pagecache", "direct", "mmap"])
def test_experts_of_released_files_are_streamed_with_the_bits_of_resident_ones(in_blocks: Any, io: str) -> None:
    """Rows of gate and up lie in turns, and are dealt to two slots when they were read."""
    folder, tokens = in_blocks[0], some_tokens(12)
    options = {"expert_cache": "60%", "expert_io": io}
    np.testing.assert_array_equal(logits(folder, tokens, **options), logits(folder, tokens))


def test_experts_of_released_files_are_packed_and_converted(
    in_blocks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A packed file has gate and up each in one piece."""
    folder, tokens = shutil.copytree(in_blocks[0], tmp_path / "m"), some_tokens(12)
    want = logits(folder, tokens)
    assert call(capsys, "pack", str(folder)).status == 0
    file = folder / "experts.penstock"
    assert file.is_file()
    np.testing.assert_array_equal(logits(folder, tokens, expert_cache="60%", expert_file=str(file)), want)
    convert(folder, tmp_path / "made")
    np.testing.assert_array_equal(logits(tmp_path / "made", tokens, expert_cache="60%"), want)


def test_released_files_are_known_without_reading_them(
    in_blocks: Any, released: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes and roles; and `verify` finds a scale that is infinite."""
    found, mlx = (survey(resolve_model(folder)) for folder, _ in (in_blocks, released))
    experts, same = ({w.path: w.nbytes for w in one.weights if w.role == "experts"} for one in (found, mlx))
    assert sum(experts.values()) == sum(same.values()) and not found.notices
    good = call(capsys, "verify", str(in_blocks[0]))
    assert good.status == 0 and "8 of mxfp4" in good.out
    bad = shutil.copytree(in_blocks[0], tmp_path / "bad")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    path, start, _ = Checkpoint.open(bad).location(name)
    with path.open("r+b") as file:
        file.seek(start + 7)
        file.write(b"\xff")
    found = call(capsys, "verify", str(bad))
    assert found.status == 1 and f"tensor '{name}' has 1 number not finite (the first is number 7)" in found.out
    with pytest.raises(CheckpointError, match=r"1.mlp.experts.down_proj has a scale that is not finite \(byte 7 of"):
        penstock.load(bad, device="cpu")


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
