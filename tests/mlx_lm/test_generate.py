"""Functions of penstock.mlx_lm: what they take, what they refuse by name, and draws that follow a seed."""

import dataclasses
import importlib
import logging
import re
from pathlib import Path

import numpy as np
import pytest

import penstock
import penstock.mlx_lm as mlx_lm
from penstock.errors import CheckpointError, InvalidArgument
from penstock.mlx_lm import generate, load, stream_generate
from penstock.mlx_lm.generate import BatchStats, GenerationResponse, _Answer, _responses, generate_step
from penstock.text.byte_level import BYTE_OF

PROMPT = "The fox said to the crow"


@pytest.fixture(scope="module")
def both():
    return load(None)


class ForeignArray:
    """An array of a library that NumPy does not know: it has tolist, like mlx's and torch's."""

    def __init__(self, values):
        self._values = values

    def tolist(self):
        return self._values


def test_names_are_where_mlx_lm_has_them():
    assert callable(mlx_lm.generate) and callable(mlx_lm.convert)
    module = importlib.import_module("penstock.mlx_lm.generate")
    assert module.generate is mlx_lm.generate and module.stream_generate is stream_generate
    assert importlib.import_module("penstock.mlx_lm.utils").load is load
    from penstock.mlx_lm.models.cache import make_prompt_cache
    from penstock.mlx_lm.sample_utils import make_sampler

    assert mlx_lm.make_prompt_cache is make_prompt_cache and mlx_lm.make_sampler is make_sampler
    assert mlx_lm.models.cache.make_prompt_cache is make_prompt_cache
    assert set(mlx_lm.__all__) <= set(dir(mlx_lm)) and penstock.mlx_lm is mlx_lm
    assert not [name for name in dir(mlx_lm) if name.startswith("_") and not name.startswith("__")]


def test_prompts_in_every_form_give_the_same(both):
    model, tokenizer = both
    ids = tokenizer.encode(PROMPT)
    forms = [PROMPT, ids, tuple(ids), np.array(ids), np.array(ids, np.uint32), ForeignArray(ids)]
    texts = {generate(model, tokenizer, form, max_tokens=4) for form in forms}
    texts |= {generate(model.llm, model.llm.tokenizer, PROMPT, max_tokens=4)}  # penstock's own objects do as well
    texts |= {generate(model, tokenizer, "<|bos|>", max_tokens=1)} - {generate(model, tokenizer, [0], max_tokens=1)}
    assert len(texts) == 1


def test_draws_follow_a_seed(both):
    model, tokenizer = both
    for sampler in (mlx_lm.make_sampler(0.9), mlx_lm.make_sampler(0.9, top_p=0.8)):
        options = {"sampler": sampler, "max_tokens": 6}
        first, again, other = (generate(model, tokenizer, PROMPT, seed=seed, **options) for seed in (5, 5, 6))
        assert first == again != other
    fixed = mlx_lm.make_sampler(0.9, seed=5)
    assert generate(model, tokenizer, PROMPT, sampler=fixed, max_tokens=6).strip() == (
        model.llm.generate(PROMPT, temperature=0.9, seed=5, max_tokens=6).text.strip()
    )


def test_log_probabilities_are_the_same_copied_or_computed_again(both):
    """A GPU keeps logits for itself: those that are asked for are computed again, with penalties and a cache."""
    model, tokenizer = both
    ids = tokenizer.encode(PROMPT)
    options = {"logits_processors": mlx_lm.make_logits_processors(repetition_penalty=1.5)}
    eos = frozenset(tokenizer.eos_token_ids)
    rows = {}
    for wanted in ("copied", "lazy", "hooks"):
        cache = mlx_lm.make_prompt_cache(model)
        if wanted == "hooks":  # the penalty is not the engine's work beside a function
            wanted, options = "copied hooks", {"logits_processors": [*options["logits_processors"], lambda _, x: x]}
        generate(model, tokenizer, ids * 5, max_tokens=2, prompt_cache=cache)
        answer = _Answer(model.llm, ids * 4, eos, 4, wanted.split()[0], prompt_cache=cache, **options)
        responses = list(_responses(model.llm, tokenizer, answer))
        rows[wanted] = np.stack([response.logprobs for response in responses])
        assert all(response.logprobs is response.logprobs for response in responses)
    assert rows["lazy"].dtype == np.float32 and np.allclose(np.exp(rows["lazy"]).sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(rows["lazy"], rows["copied"], atol=1e-4)
    np.testing.assert_allclose(rows["copied hooks"], rows["copied"], atol=1e-5)


def test_the_end_of_an_answer(both):
    model, tokenizer = both
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who was the fox?"}], add_generation_prompt=True
    )
    *_, last = stream_generate(model, tokenizer, prompt, max_tokens=-1)
    assert last.finish_reason == "stop" and last.token in tokenizer.eos_token_ids and last.text == ""
    tokens = [token for token, _ in generate_step(prompt, model, max_tokens=last.generation_tokens + 2)]
    assert tokens[last.generation_tokens - 1] == last.token and len(tokens) == last.generation_tokens + 2
    _, other = load(None)
    other.add_eos_token(str(tokens[1]))
    assert len(list(stream_generate(model, other, prompt, max_tokens=9))) == 2
    other.eos_token_ids = []
    assert len(list(stream_generate(model, other, prompt, max_tokens=9))) == 9


def test_responses_can_be_made_by_hand():
    row = np.zeros(3, np.float32)
    made = GenerationResponse("a", 1, row, False, 2, 1.0, 3, 1.0, 0.1)
    assert made.logprobs is row and made.finish_reason is None and "logprobs=array" in repr(made)
    assert [one.name for one in dataclasses.fields(made)][:10] == [
        "text",
        "token",
        "logprobs",
        "from_draft",
        "prompt_tokens",
        "prompt_tps",
        "generation_tokens",
        "generation_tps",
        "peak_memory",
        "finish_reason",
    ]
    stats = BatchStats(prompt_tokens=4, prompt_time=2.0, generation_tokens=9, wall_time=5.0, decode_time=1.0)
    stats += BatchStats(prompt_tokens=2, wall_time=1.0, peak_memory=3.0)
    assert (stats.prompt_tps, stats.generation_tps, stats.overhead_time, stats.peak_memory) == (3.0, 9 / 4, 3.0, 3.0)


def test_a_model_can_be_called_for_logits(both):
    model, tokenizer = both
    ids = tokenizer.encode(PROMPT)
    found = model(np.array([ids]))
    np.testing.assert_array_equal(found[0], model.llm.logits(ids))
    cache = model.make_cache()
    stepped = np.concatenate([model([ids[:3]], cache=cache), model([ids[3:]], cache=cache)], axis=1)
    np.testing.assert_allclose(stepped, found, atol=1e-3)
    assert len(model.layers) == len(cache) == 8 and model.model_type == "qwen3_5_moe_text"


REFUSED = {
    "draft_model": ({"draft_model": object()}, "draft_model is given, expected None"),
    "kv_bits": ({"kv_bits": 4}, "kv_bits is given, expected None"),
    "input_embeddings": ({"input_embeddings": np.zeros((2, 4))}, "input_embeddings is given"),
    "stream": ({"stream": object()}, "stream is given"),
    "max_kv_size": ({"max_kv_size": 16}, "max_kv_size is 16, expected None or at least 26"),
    "no tokens": ({"prompt": []}, "prompt has no tokens"),
    "text in a list": ({"prompt": ["a"]}, "prompt holds <U1|prompt is a list"),
    "two axes": ({"prompt": [[1, 2]]}, r"prompt has shape \(1, 2\)"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens is 0"),
    "cache": ({"prompt_cache": []}, "prompt_cache is a list"),
    "model": ({"model": 3}, "model is a int, expected what penstock.mlx_lm.load returned"),
    "tokenizer": ({"tokenizer": "x"}, "tokenizer is a str without decode"),
    "step": ({"prefill_step_size": 0}, "prefill_step_size is 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_penstock_lacks_is_refused_by_name(both, name):
    changed, message = REFUSED[name]
    model, tokenizer = both
    options = {"model": model, "tokenizer": tokenizer, "prompt": PROMPT, "max_tokens": 20} | changed
    with pytest.raises(InvalidArgument, match=message):
        generate(**options)
    with pytest.raises(InvalidArgument, match=message):
        stream_generate(**options)  # before anything is computed


def test_prompts_that_are_no_ids_are_refused(both):
    for prompt, message in (("text", "prompt is a str"), ([1.5], "prompt holds float64"), ({1}, "prompt is a set")):
        with pytest.raises(InvalidArgument, match=message):
            generate_step(prompt, both[0])


def test_the_page_about_mlx_lm_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "mlx-lm.md").read_text()
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, "mlx-lm.md", "exec"), names)
    assert "Generation: " in capsys.readouterr().out
    for module, listed in re.findall(r"^\| `(penstock\.mlx_lm[\w.]*)` \| (.*?) \|$", text, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", listed):
            assert hasattr(importlib.import_module(module), name), (module, name)


def test_options_that_say_nothing_here_are_taken(both):
    model, tokenizer = both
    quiet = {"kv_bits": None, "kv_group_size": 32, "quantized_kv_start": 9, "num_draft_tokens": 4}
    text = generate(model, tokenizer, PROMPT, max_tokens=3, prefill_step_size=64, max_kv_size=1000, **quiet)
    assert text == generate(model, tokenizer, PROMPT, max_tokens=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        generate(model, tokenizer, PROMPT, temperature=0.5)


def test_batch_refuses_what_does_not_fit_together(both):
    model, tokenizer = both
    ids = tokenizer.encode(PROMPT)
    with pytest.raises(InvalidArgument, match="max_tokens has 1 values, expected 2: one per prompt"):
        mlx_lm.batch_generate(model, tokenizer, [ids, ids], max_tokens=[3])
    with pytest.raises(InvalidArgument, match="prompts holds text, expected token ids"):
        mlx_lm.batch_generate(model, tokenizer, [PROMPT])
    with pytest.raises(InvalidArgument, match=r"prompts\[1\] has shape"):
        mlx_lm.batch_generate(model, tokenizer, [ids, [ids]])
    with pytest.raises(InvalidArgument, match="max_tokens is 0"):
        mlx_lm.batch_generate(model, tokenizer, [ids], max_tokens=0)
    with pytest.raises(TypeError, match="'prompt_cache'"):
        mlx_lm.batch_generate(model, tokenizer, [ids], prompt_cache=None)
    assert mlx_lm.batch_generate(model, tokenizer, []).texts == []
    assert model.llm.scheduler.metrics().running == 0


def test_batch_with_processors_and_samplers(both, capsys):
    model, tokenizer = both
    prompts = [np.array(tokenizer.encode(text)) for text in (PROMPT, "The king")]
    options = {"logits_processors": mlx_lm.make_logits_processors(presence_penalty=3.0)}
    found = mlx_lm.batch_generate(
        model, tokenizer, prompts, max_tokens=4, verbose=True, return_logprobs=True, return_token_ids=True, **options
    )
    assert found.token_ids is not None and found.logprobs is not None
    for prompt, ids, row in zip(prompts, found.token_ids, found.logprobs, strict=True):
        alone = list(stream_generate(model, tokenizer, prompt, max_tokens=4, **options))
        assert ids == [one.token for one in alone]
        np.testing.assert_allclose(row, [one.logprobs[one.token] for one in alone], atol=1e-4)
    assert "[batch_generate] 2/2 answers" in capsys.readouterr().out
    drawn = {"sampler": mlx_lm.make_sampler(0.9, top_p=0.9), "seed": 3}
    assert mlx_lm.batch_generate(model, tokenizer, prompts[:1], max_tokens=4, **drawn).texts[0].strip() == generate(
        model, tokenizer, prompts[0], max_tokens=4, **drawn
    )


def test_a_reader_who_stops_early_leaves_nothing_behind(both):
    model, tokenizer = both
    cache = mlx_lm.make_prompt_cache(model)
    for response in stream_generate(model, tokenizer, PROMPT, prompt_cache=cache, max_tokens=50):
        if response.generation_tokens == 3:
            break
    read = list(cache.tokens)
    assert len(read) == len(tokenizer.encode(PROMPT)) + 3
    more = tokenizer.encode(" and")
    found = generate(model, tokenizer, more, prompt_cache=cache, max_tokens=4)
    assert found == generate(model, tokenizer, read + more, max_tokens=4)
    assert model.llm.scheduler.metrics().running == 0


def test_load_refuses_and_remarks(caplog, tmp_path):
    with pytest.raises(InvalidArgument, match="adapter_path is 'x', expected None: penstock has no adapters"):
        load(None, adapter_path="x")
    with pytest.raises(InvalidArgument, match="model_config has rope_theta, expected nothing"):
        load(None, model_config={"rope_theta": 1.0})
    with pytest.raises(InvalidArgument, match="tokenizer_config: padding_side is 'left'"):
        load(None, tokenizer_config={"padding_side": "left"})
    with pytest.raises(InvalidArgument, match="eos_token is 'nope', expected a token of the vocabulary"):
        load(None, tokenizer_config={"eos_token": "nope"})
    with pytest.raises(CheckpointError, match="no such"):
        load(tmp_path / "nothing")
    with caplog.at_level(logging.WARNING, "penstock"):
        _, tokenizer, config = load(
            None,
            {"trust_remote_code": True, "eos_token": "<|im_start|>"},
            {"quantize_activations": False},
            lazy=True,
            return_config=True,
        )
    assert "no code from model folders is run" in caplog.text
    assert tokenizer.eos_token == "<|im_start|>" and 2 in tokenizer.eos_token_ids
    assert config["model_type"] == "qwen3_5_moe" and sorted(config["eos_token_id"]) == [1, 3]


def test_convert_refuses_by_name(tmp_path):
    for options, message in (
        ({"upload_repo": "a/b"}, "upload_repo is 'a/b', expected None"),
        ({"q_mode": "mxfp5", "quantize": True}, "mxfp5"),
        ({"quant_predicate": lambda path, module: True, "quantize": True}, "quant_predicate is a function"),
        ({"quantize": True, "dequantize": True}, "both asked for"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            mlx_lm.convert("demo", tmp_path / "out", **options)
    (tmp_path / "out").mkdir()
    with pytest.raises(penstock.errors.PenstockError, match="out"):
        mlx_lm.convert("demo", tmp_path / "out", dequantize=True)


@pytest.mark.slow
def test_a_gguf_file_is_loaded_as_well(tmp_path):
    pytest.importorskip("gguf")
    from tests.models.test_gguf import write

    words = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*BYTE_OF, "ab", "<end>"],
        "merges": ["a b"],
        "eos_token_id": 257,
    }
    words["token_type"] = [1] * 257 + [3]
    file = write(tmp_path / "model.gguf", "llama", **{f"tokenizer__ggml__{key}": value for key, value in words.items()})
    model, tokenizer, config = load(file, return_config=True)
    assert config["model_type"] == model.model_type == "llama" and isinstance(
        generate(model, tokenizer, tokenizer.encode("a"), max_tokens=2), str
    )


@pytest.mark.slow
def test_a_tokenizer_of_transformers_does_as_well(both):
    transformers = pytest.importorskip("transformers")
    from tests.mlx_lm.notebook import MODEL

    model, own = both
    theirs = transformers.AutoTokenizer.from_pretrained(MODEL)
    assert generate(model, theirs, PROMPT, max_tokens=8).strip() == generate(model, own, PROMPT, max_tokens=8)
