"""A notebook of mlx-lm runs after a change of its import line, and shows the same."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.convert import common
from tests.mlx_lm import notebook

PENSTOCK, MLX = "penstock.mlx_lm", "mlx_lm"
CELLS = (
    notebook.quick_start,
    notebook.streaming,
    notebook.sampling,
    notebook.batch,
    notebook.tool_use,
    notebook.tokens,
    notebook.steps,
)


@pytest.fixture(scope="module")
def ours() -> tuple[Any, Any]:
    return notebook.loaded(PENSTOCK)


@pytest.fixture(scope="module")
def theirs() -> tuple[Any, Any]:
    pytest.importorskip("mlx_lm")
    return notebook.loaded(MLX)


def test_quick_start(ours):
    found = notebook.quick_start(PENSTOCK, *ours)
    assert found["shown"] == found["text"] != ""
    assert found["numbers"] == ["Prompt", "Generation", "Peak memory"]
    assert found["prefilled"].endswith("assistant\nThe fox ")
    assert found["template"].endswith("<|im_end|>\n")


def test_streaming(ours):
    found = notebook.streaming(PENSTOCK, *ours)
    assert found["finish"] == [None] * 5 + ["length"] and found["counts"] == [(6, n) for n in range(1, 7)]
    assert found["progress"] == ((0, 6), (6, 6)) and found["positive"]
    assert "".join(found["texts"]) == ': "I will not be'


def test_sampling(ours):
    found = notebook.sampling(PENSTOCK, *ours)
    assert found["greedy"] == found["nucleus of one"] == found["one of k"] == found["watched"]
    assert found["second"] != found["greedy"] and found["bias"].count("king") == 5
    first = len(ours[1].encode("The fox and the crow and the"))
    assert found["seen"] == list(range(first, first + 5))
    assert found["repetition"] != found["greedy"]


def test_batch(ours):
    found = notebook.batch(PENSTOCK, *ours)
    assert [len(ids) for ids in found["token_ids"]] <= [3, 5] and found["none"] == (None, None)
    assert [len(row) for row in found["logprobs"]] == [3, 3]


def test_prompt_caching(ours, tmp_path):
    found = notebook.prompt_caching(PENSTOCK, *ours, tmp_path)
    assert found["texts"][1] == found["texts"][3]
    assert found["metadata"] == {"model": "demo", "turns": "2"} and found["trimmed"] == (False, 0)


def test_tool_use(ours):
    found = notebook.tool_use(PENSTOCK, *ours)
    assert '"name": "multiply"' in found["prompt"] and '"required": ["a", "b"]' in found["prompt"]
    assert "tool\n480<|im_end|>" in found["answer"]


def test_convert(tmp_path):
    source = common.write(tmp_path / "source", "qwen3_5_moe")
    for file in Path(notebook.MODEL).glob("tokenizer*.json"):
        (source / file.name).write_bytes(file.read_bytes())
    found = notebook.converting(PENSTOCK, source, tmp_path / "ours")
    assert (found["bits"], found["group"]) == (4, 32)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
def test_a_cell_gives_what_mlx_lm_gives(cell, ours, theirs):
    assert _plain(cell(PENSTOCK, *ours)) == _plain(cell(MLX, *theirs))


@pytest.mark.slow
def test_cached_turns_are_those_of_mlx_lm(ours, theirs, tmp_path):
    found, wanted = (notebook.prompt_caching(*one, tmp_path) for one in ((PENSTOCK, *ours), (MLX, *theirs)))
    assert found == wanted


@pytest.mark.slow
def test_a_converted_model_is_that_of_mlx_lm(tmp_path):
    pytest.importorskip("mlx_lm")
    source = common.write(tmp_path / "source", "qwen3_5_moe")
    for file in Path(notebook.MODEL).glob("tokenizer*.json"):
        (source / file.name).write_bytes(file.read_bytes())
    found, wanted = (notebook.converting(name, source, tmp_path / name) for name in (PENSTOCK, MLX))
    assert (found["bits"], found["group"]) == (wanted["bits"], wanted["group"])
    assert found["config"]["quantization"] == wanted["config"]["quantization"]


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("TRAINED_MODELS"), reason="TRAINED_MODELS names no folder of small models")
@pytest.mark.parametrize("name", ["tiny-qwen3.5-moe", "tiny-gemma4-moe", "tiny-deepseek-v3"])
def test_greedy_text_of_trained_models(name, tmp_path):
    """Converted to 4 bits by penstock, then read by both; text, ids and log-probabilities agree."""
    from penstock.mlx_lm import convert

    folder = tmp_path / name
    convert(Path(os.environ["TRAINED_MODELS"]) / name, folder, quantize=True)
    found, wanted = (
        [cell(package, *notebook.loaded(package, str(folder))) for cell in (notebook.streaming, notebook.batch)]
        for package in (PENSTOCK, MLX)
    )
    assert _plain(found) == _plain(wanted)


def _plain(value: Any) -> Any:
    """Tuples as lists, numbers rounded once more: the last digit of a log-probability may differ."""
    return json.loads(json.dumps(value, default=str), parse_float=lambda text: round(float(text), 2))
