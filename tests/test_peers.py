"""The scripts under benchmarks/peers, as far as they run without the peers."""

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from penstock import models
from penstock.cli.bench import layer_count
from penstock.models.config import first_layers
from penstock.models.random import Random
from penstock.quant import dequantize
from penstock.weights.gguf import GgufFile
from penstock.weights.resolve import shipped_configs

PEERS = Path(__file__).parents[1] / "benchmarks" / "peers"
CONFIGS = list(shipped_configs().values())
# llama.cpp: GGUF files are written of these alone
WRITTEN_STEMS = "deepseek-v3 gemma4-26b-a4b llama-3.2-3b qwen3-next-80b-a3b qwen3.5-397b-a17b qwen3.6-35b-a3b".split()
WRITTEN = [path for path in CONFIGS if path.stem in WRITTEN_STEMS]


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script as a module under another name than its peer's."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    spec = importlib.util.spec_from_file_location(f"peers_{name}", PEERS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def compare(monkeypatch):
    return script("compare", monkeypatch)


@pytest.fixture
def llama_cpp(monkeypatch):
    return script("llama_cpp", monkeypatch)


@pytest.fixture
def peer(monkeypatch):
    return script("peer", monkeypatch)


# --------------------------------------------------------------------------------------------------------------------
# Shapes


class Counted(Random):
    """Counts the parameters that a family reads."""

    total = 0

    def weight(self, path: str, *shape: int) -> Any:
        self.total += math.prod(shape)
        return super().weight(path, 1, shape[-1])

    def vector(self, path: str, *shape: int) -> np.ndarray:
        self.total += math.prod(shape)
        return super().vector(path, *shape)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_describe_has_the_parameters_that_penstock_reads(path, llama_cpp, peer):
    _, config = peer.read_config(str(path), "6")
    family, source = models.family_of(config), Counted(config)
    family.read_weights(source, family.read_config(config))
    tensors = [tensor for tensor in llama_cpp.describe(config)[2] if tensor.name != "rope_freqs.weight"]
    assert sum(math.prod(tensor.shape) for tensor in tensors) == source.total


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_describe_uses_the_names_of_gguf(path, llama_cpp, peer):
    constants = pytest.importorskip("gguf").constants
    arch, _, tensors = llama_cpp.describe(peer.read_config(str(path), "6")[1])
    (number,) = (key for key, name in constants.MODEL_ARCH_NAMES.items() if name == arch)
    known = {constants.TENSOR_NAMES[one] for one in constants.MODEL_TENSORS[number]}
    for tensor in tensors:
        parts = tensor.name.removesuffix(".weight").removesuffix(".bias").removesuffix(".scale").split(".")
        assert ".".join(["blk", "{bid}", *parts[2:]] if parts[0] == "blk" else parts) in known


@pytest.mark.parametrize("layers", [None, "3", "all"])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_read_config_cuts_and_names_as_penstock_bench(path, layers, peer):
    want, remark = first_layers(json.loads(path.read_text()), layer_count(layers), path.name)
    assert peer.read_config(path.stem, layers) == (path.stem + remark, want)


def test_read_config_refuses_layers_that_are_not_there(peer, capsys):
    with pytest.raises(SystemExit, match="2"):
        peer.read_config("llama-3.2-3b", "29")
    assert capsys.readouterr().err == "--layers: is 29, expected 1 to 28 or all\n"


# --------------------------------------------------------------------------------------------------------------------
# The GGUF

TINY = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def test_write_makes_a_gguf_that_penstock_opens(tmp_path, llama_cpp, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setattr(llama_cpp, "_BLOCKS", 50)  # the tensors take several pieces
    described = llama_cpp.describe(TINY)
    llama_cpp.write(tmp_path / "random.gguf", described)
    file = GgufFile.open(tmp_path / "random.gguf")
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.attention.head_count_kv"] == 2
    assert file.metadata["llama.vocab_size"] == 96
    for tensor in described[2]:
        assert file.tensor(tensor.name).shape == tensor.shape
    weights = dequantize(file.tensor("blk.1.ffn_down.weight"))
    assert weights.shape == (64, 160)
    assert np.std(weights) == pytest.approx(0.7 * 160**-0.5, rel=0.05)
    np.testing.assert_array_equal(file.tensor("blk.1.attn_norm.weight"), np.ones(64, np.float32))


def test_describe_refuses_other_model_types(llama_cpp, capsys):
    with pytest.raises(SystemExit, match="1"):
        llama_cpp.describe({**TINY, "model_type": "mamba"})
    assert "no GGUF is written for model_type 'mamba', only for deepseek_v3, gemma4, llama" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------------
# Without the peers


def test_mlx_lm_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(SystemExit, match="2"):
        script("mlx_lm", monkeypatch)
    assert "mlx-lm is not installed here" in (message := capsys.readouterr().err)
    assert "pip install mlx-lm" in message and message.count("\n") == 1


@pytest.mark.parametrize("way, says", [([], "llama.cpp is not installed"), (["--with", "llama-bench"], "not on PATH")])
def test_llama_cpp_says_how_to_install_it(way, says, llama_cpp, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(llama_cpp.peer, "versions", lambda *packages: {"gguf": "0"})
    with pytest.raises(SystemExit, match="2"):
        llama_cpp.main(["llama-3.2-3b", *way])
    assert says in (message := capsys.readouterr().err)
    assert "pip install llama-cpp-python" in message and message.count("\n") == 1


class FakeRunner:
    """Remembers what it was asked to do."""

    vocab = 7

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def context(self, tokens):
        assert all(0 <= token < self.vocab for token in tokens)
        return len(tokens)

    def copy(self, context):
        return context

    def read(self, context, tokens):
        self.calls.append(("read", context, len(tokens)))

    def write(self, context, tokens):
        self.calls.append(("write", context, len(tokens)))


def test_seconds_warms_up_and_repeats_from_the_same_context(peer):
    runner = FakeRunner()
    assert len(peer.seconds(runner, peer.Test(0, 20, 5), 2)) == 2
    assert len(peer.seconds(runner, peer.Test(30, 0, 0), 1)) == 1
    assert runner.calls == [("write", 5, 8), ("write", 5, 20), ("write", 5, 20), ("read", 0, 30), ("read", 0, 30)]


# --------------------------------------------------------------------------------------------------------------------
# Comparing


def row(peer: ModuleType, test: tuple[int, int, int], seconds: list[float], **changes: Any) -> dict[str, Any]:
    facts = {"model": "llama-3.2-3b, 2 of 28 layers", "backend": "CPU", "model_n_params": 1000_000}
    return peer.row(peer.Test(*test), seconds, **facts) | changes


@pytest.fixture
def files(tmp_path, peer):
    """Writes the rows of both sides and returns the arguments of compare."""

    def made(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
        (tmp_path / "peer.json").write_text(json.dumps({"peer": "llama.cpp", "rows": theirs}))
        (tmp_path / "penstock.json").write_text(json.dumps(ours))
        return [str(tmp_path / "peer.json"), str(tmp_path / "penstock.json")]

    return made


def test_compare_prints_the_ratio_per_row(compare, files, peer, capsys):
    theirs = [row(peer, (512, 0, 0), [4.0]), row(peer, (0, 10, 64), [2.0, 1.0])]
    ours = [row(peer, (0, 10, 64), [0.5, 0.5], model_n_params=1000_900), row(peer, (0, 10, 0), [1.0])]
    compare.main(files(theirs, ours))
    out, err = capsys.readouterr()
    assert out.splitlines()[2:] == ["| llama-3.2-3b, 2 of 28 layers | CPU | tg10 @ d64 | 7.50 | 20.00 | 2.67 | 2.00 |"]
    assert out.startswith("| model | backend | test | llama.cpp t/s | penstock t/s | ratio |")
    assert err.splitlines() == [
        "not compared: llama-3.2-3b, 2 of 28 layers, pp512: only llama.cpp has it",
        "not compared: llama-3.2-3b, 2 of 28 layers, tg10: only penstock has it",
    ]


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"model": "llama-3.2-3b, 3 of 28 layers"}, "nothing to compare: llama-3.2-3b, 2 of 28 layers, tg10 on one"),
        ({"n_depth": 64}, "nothing to compare"),
        ({"batch_size": 2}, "nothing to compare"),
        ({"model_n_params": 1020_000}, "has 1,000,000 parameters and 1,020,000, expected the same shapes"),
        ({"backend": "CUDA"}, "measured on CPU and on CUDA, expected the same backend"),
    ],
)
def test_compare_refuses_other_shapes(changes, says, compare, files, peer, capsys):
    with pytest.raises(SystemExit, match="1"):
        compare.main(files([row(peer, (0, 10, 0), [1.0])], [row(peer, (0, 10, 0), [1.0], **changes)]))
    out, err = capsys.readouterr()
    assert says in err and out == ""


def test_compare_refuses_two_rows_of_one_shape(compare, files, peer, capsys):
    one = row(peer, (0, 10, 0), [1.0])
    with pytest.raises(SystemExit, match="1"):
        compare.main(files([one, one], [one]))
    assert "has two rows of llama-3.2-3b, 2 of 28 layers, tg10" in capsys.readouterr().err


def test_compare_refuses_what_no_benchmark_wrote(compare, tmp_path, capsys):
    (tmp_path / "a.json").write_text('[{"model": "x"}]')
    with pytest.raises(SystemExit, match="2"):
        compare.main([str(tmp_path / "a.json"), str(tmp_path / "a.json")])
    assert "a.json: is no output of a peer script or of penstock bench -o json" in capsys.readouterr().err
