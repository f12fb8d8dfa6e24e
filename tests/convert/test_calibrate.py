"""What a text says about the inputs of matrices, and a whole conversion by it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.convert import calibrate
from penstock.convert.calibrate import Inputs, Planned, _Watch, collect, engine, read_text, searched, split_windows
from penstock.convert.layout import Released, plan
from penstock.convert.run import Options, convert
from penstock.errors import CheckpointError, InvalidArgument, OutOfMemory
from penstock.ops.array import address
from penstock.quant import dequantize, quantize
from tests.convert.common import stored, write
from tests.models.common import some_tokens
from tests.models.made import mlx_logits
from tests.models.test_trained import DEMO, FABLES


def looked_at(folder: Path, rows: np.ndarray) -> tuple[Any, dict[str, Inputs]]:
    planned = plan(Released(folder))
    source = Planned(planned)
    model = engine(planned.family, planned.family.read_config(planned.config), source, fused=False)
    return planned, collect(model, source.names, rows)


def matrices(planned: Any) -> set[str]:
    found = {name.removesuffix(".weight") for name, rows in planned.tensors.items() if len(rows.shape) > 1}
    return {path for path in found if not path.endswith(("conv1d", "embed_tokens", "embed_tokens_per_layer"))}


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_5_moe", "gemma4 inputs"])
def test_collect_sees_every_matrix_and_every_token(tmp_path: Path, name: str) -> None:
    rows = np.array([some_tokens(40, seed) for seed in range(3)], np.int32)
    planned, found = looked_at(write(tmp_path / "source", name), rows)
    tied = {path for path in found if path.endswith("embed_tokens")}
    assert found.keys() - tied == matrices(planned)
    for path, inputs in found.items():
        K = planned.tensors[f"{path}.weight"].shape[-1]
        assert inputs.squares.shape[1] == K and (inputs.squares >= 0).all() and inputs.squares.sum() > 0, path
        times = 3 if "switch_mlp" in path else 4 if path.endswith("embed_q") else 1  # experts of a token, heads
        assert inputs.counts.sum() == times * rows.size, path
        assert inputs.products is not None
        np.testing.assert_allclose(
            np.einsum("pkk->k", inputs.products), inputs.squares.sum(axis=0), rtol=1e-4, err_msg=path
        )


def test_collect_has_the_squares_of_the_first_layer(tmp_path: Path) -> None:
    rows = np.array([some_tokens(40)], np.int32)
    planned, found = looked_at(write(tmp_path / "source", "qwen3"), rows)
    tensors = planned.tensors
    h = tensors["model.embed_tokens.weight"].read(0, 263)[rows[0]].astype(np.float64)
    x = h / np.sqrt((h * h).mean(axis=1, keepdims=True) + 1e-5)
    x = x * tensors["model.layers.0.input_layernorm.weight"].read(0, 1)[0].astype(np.float64)
    for part in "qkv":
        inputs = found[f"model.layers.0.self_attn.{part}_proj"]
        np.testing.assert_allclose(inputs.squares[0], (x * x).sum(axis=0), rtol=1e-5)
        np.testing.assert_allclose(inputs.products[0], x.T @ x, rtol=1e-4, atol=1e-4)  # type: ignore[index]


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_experts_count_the_tokens_they_got_by_their_weights(rng: np.random.Generator, act: str) -> None:
    T, E, K, I = 9, 5, 8, 6  # noqa: E741
    x, weights = rng.standard_normal((T, K)).astype(np.float32), rng.random((T, 2), np.float32)
    ids = np.stack([rng.permutation(E - 1)[:2] for _ in range(T)]).astype(np.int32)  # the last expert gets none
    gate, up = (rng.standard_normal((E, I, K)).astype(np.float32) for _ in range(2))
    down = rng.standard_normal((E, K, I)).astype(np.float32)
    watch = _Watch({address(w): name for w, name in ((gate, "gate"), (up, "up"), (down, "down"))}, room=1 << 20)
    watch._moe_forward(x, ids, weights, gate, up, down, None, act, "float32")
    sides, inner = np.zeros((E, K)), np.zeros((E, I))
    for t in range(T):
        for k in range(2):
            e, s = ids[t, k], weights[t, k]
            a = gate[e] @ x[t]
            turned = (
                a / (1 + np.exp(-a))
                if act == "silu"
                else a / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))
            )
            sides[e] += (x[t] * s) ** 2
            inner[e] += (turned * (up[e] @ x[t]) * s) ** 2
    for name, want in (("gate", sides), ("up", sides), ("down", inner)):
        np.testing.assert_allclose(watch.found[name].squares, want, rtol=1e-4)
    assert watch.found["gate"].products.shape == (1, K, K)  # type: ignore[union-attr]
    assert watch.found["down"].products.shape == (E, I, I)  # type: ignore[union-attr]
    assert watch.found["down"].counts[-1] == 0


def test_products_are_left_out_where_memory_ends(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal((4, 16)).astype(np.float32) for _ in range(2))
    watch = _Watch({address(a): "a", address(b): "b"}, room=4 * 16 * 16)
    for w in (a, b):
        watch._matmul(np.ones((3, 16), np.float32), w)
    assert watch.found["a"].products is not None and watch.found["b"].products is None
    assert watch.found["b"].feedback() is None and watch.found["b"].importance().tolist() == [1.0] * 16


def test_few_tokens_take_after_the_others() -> None:
    squares = np.array([[1000.0, 0, 0, 0], [0, 0, 0, 0], [0, 4, 0, 0]])
    inputs = Inputs(squares, np.array([1000.0, 0, 4]))
    many, none, few = (inputs.importance(part) for part in range(3))
    np.testing.assert_allclose([many.mean(), none.mean(), few.mean()], 1, rtol=1e-5)
    assert many.argmax() == none.argmax() == few.argmax() == 0
    assert few[1] > 10 * none[1] > 0 and none[2] > 0


def test_feedback_of_an_expert_without_tokens_is_none_of_its_own() -> None:
    inputs = Inputs(
        np.ones((2, 3)),
        np.array([9.0, 0]),
        np.stack([np.full((3, 3), 2.0) + np.eye(3), np.zeros((3, 3))]).astype(np.float32),
    )
    np.testing.assert_allclose(inputs.feedback(1), np.eye(3), atol=1e-6)
    got = inputs.feedback(0)
    assert got is not None and got[0, 1] < -0.1 and got[1, 0] == 0


def test_searched_takes_rows_from_the_middle_of_a_stack(rng: np.random.Generator) -> None:
    w = rng.standard_normal((3, 10, 64)).astype(np.float32)
    inputs = Inputs(rng.random((3, 64)) * 50, np.full(3, 50.0), np.stack([50 * np.eye(64, dtype=np.float32)] * 3))
    flat = w.reshape(30, 64)
    whole = searched(flat, inputs, 3, 32, 0, 10)
    part = searched(np.ascontiguousarray(flat[7:25]), inputs, 3, 32, 7, 10)
    for a, b in zip(part.arrays, whole.arrays, strict=True):
        np.testing.assert_array_equal(a, b[7:25])
    alone = searched(w[1], Inputs(inputs.squares[1:2], inputs.counts[1:2], None), 3, 32, 0, 10)
    assert not np.array_equal(alone.packed, whole.packed[10:20])  # others count a little for each


def test_convert_by_a_text(tmp_path: Path) -> None:
    folder = write(tmp_path / "source", "qwen3_moe")
    text = tmp_path / "text.txt"
    text.write_text(FABLES * 2)
    options = {"quantize": True, "q_bits": 3, "q_group_size": 32}
    report = convert(folder, tmp_path / "made", Options(**options, calibrate=str(text), calibrate_tokens=2000))
    assert report.perplexity is not None and report.perplexity.length == 512
    assert all(
        1 < value < 1e9 for value in (report.perplexity.dense, report.perplexity.plain, report.perplexity.calibrated)
    )
    convert(folder, tmp_path / "plain", Options(**options))
    got, plain = stored(tmp_path / "made"), stored(tmp_path / "plain")
    assert {name: value[:2] for name, value in got.items()} == {name: value[:2] for name, value in plain.items()}
    changed = {name for name in got if got[name] != plain[name]}
    assert changed == {name for name in got if name.rpartition(".")[0] + ".scales" in got}
    mlx_logits(tmp_path / "made", [1, 2, 3])
    # mean error of the logits on other text: nearer to the dense model than plain rounding
    dense, a, b = (
        penstock.load(p, device="reference").logits(some_tokens(60, 5))
        for p in (folder, tmp_path / "plain", tmp_path / "made")
    )
    assert np.abs(b - dense).mean() < 0.95 * np.abs(a - dense).mean()  # little: random inputs have nothing in common


@pytest.mark.slow
def test_calibration_of_the_demo_model_predicts_better_than_rounding(tmp_path: Path) -> None:
    llm = penstock.load(DEMO)
    told = [llm.generate(FABLES.split("\n\n"), max_tokens=1200, temperature=1.0, seed=seed) for seed in range(3)]
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(out.text for some in told for out in some))
    for bits, share in ((2, 0.85), (3, 0.98)):
        options = Options(quantize=True, q_bits=bits, requantize=True, calibrate=str(text))
        report = convert(DEMO, tmp_path / f"made{bits}", options)
        assert report.perplexity is not None
        assert report.perplexity.dense < report.perplexity.calibrated < share * report.perplexity.plain


def test_cut_keeps_windows_to_measure_by() -> None:
    seen, kept = split_windows(list(range(20 * 512 + 7)), 6000, 10_000, "text")
    assert seen.shape == (11, 512) and kept.shape == (2, 512)
    assert seen[:2, 0].tolist() == [0, 1024] and kept[:, 0].tolist() == [512, 512 * 6]
    seen, kept = split_windows(list(range(40)), 6000, 16, "text")
    assert (seen.shape, kept.shape) == ((1, 16), (1, 16))
    with pytest.raises(InvalidArgument, match=r"^text: has 31 tokens, expected at least 32 to calibrate with"):
        split_windows(list(range(31)), 6000, 16, "text")


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (None, CheckpointError, "text.txt: no such file"),
        (b"", InvalidArgument, "text.txt: is empty, expected a text"),
        (b" \n", InvalidArgument, "text.txt: is empty, expected a text"),
        (b"ab\xff", InvalidArgument, "text.txt: byte 2 is no UTF-8"),
        (b"ab\xe2\x82", InvalidArgument, "text.txt: byte 2 is no UTF-8"),
    ],
)
def test_read_text_says_what_is_wrong(tmp_path: Path, data: bytes | None, error: Any, message: str) -> None:
    path = tmp_path / "text.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(error, match=message):
        read_text(path)


def test_read_text_cuts_a_long_text_between_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_TEXT_LIMIT", 5)
    (tmp_path / "text.txt").write_text("aé€b", encoding="utf-8")
    assert read_text(tmp_path / "text.txt") == "aé"


def test_a_model_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "source", "qwen3_moe")
    (tmp_path / "text.txt").write_text(FABLES)
    monkeypatch.setattr(calibrate, "available_memory", lambda: 1000)
    with pytest.raises(OutOfMemory, match=r"calibrate: .* of the dense model have to be in memory, 1.00 kB are free"):
        convert(folder, tmp_path / "made", Options(quantize=True, calibrate=str(tmp_path / "text.txt")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "text.txt"]


def test_planned_weights_are_those_of_the_file_or_rounded(tmp_path: Path) -> None:
    planned = plan(Released(write(tmp_path / "source", "qwen3_moe", shards=1)))
    dense, rounded = Planned(planned), Planned(planned, lambda path, shape: (4, 32))
    path, shape = "layers.1.mlp.switch_mlp.down_proj", (9, 64, 64)
    array = dense.weight(path, *shape)
    assert dense.names == {address(array): f"model.{path}"}
    np.testing.assert_array_equal(dequantize(rounded.weight(path, *shape)), dequantize(quantize(array, 4, 32)))
    assert dense.weight("embed_tokens", 263, 64).base is not None  # a view of the file
