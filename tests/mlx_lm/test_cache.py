"""Prompt caches: turns that go on, files of them, and tokens that are taken away again."""

import copy
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import penstock
from penstock.api import LLM, load_random
from penstock.errors import CheckpointError, InvalidArgument
from penstock.mlx_lm import (
    can_trim_prompt_cache,
    generate,
    load,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

LLAMA = {
    "model_type": "mistral",
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "sliding_window": None,
}


@pytest.fixture(scope="module")
def both():
    return load(None)


def attending(tokenizer, **changes) -> LLM:
    """A model of attention alone, made up, with the words of the demo model."""
    made = load_random(LLAMA | changes, device="cpu", activations="float32")
    return LLM(made.engine, tokenizer.tokenizer, None, ())


def test_turns_go_on_where_the_last_one_ended(both):
    model, tokenizer = both
    cache, ids = make_prompt_cache(model), tokenizer.encode("The fox said")
    assert [len(cache), cache[0].offset, cache[-1].empty(), bool(cache)] == [8, 0, True, True]
    first = [r.token for r in penstock.mlx_lm.stream_generate(model, tokenizer, ids, max_tokens=4, prompt_cache=cache)]
    assert list(cache.tokens) == ids + first and cache[3].offset == cache[3].size() == len(ids) + 4
    assert cache.nbytes > cache[0].nbytes > 0 and repr(cache) == f"PromptCache(8 layers, {len(ids) + 4} tokens)"
    branch = copy.deepcopy(cache)
    more = tokenizer.encode(" and then")
    want = generate(model, tokenizer, ids + first + more, max_tokens=4)
    assert generate(model, tokenizer, more, max_tokens=4, prompt_cache=branch) == want
    assert cache[0].offset == len(ids) + 4  # the copy went on by itself
    with pytest.raises(IndexError):
        cache[8]
    with pytest.raises(InvalidArgument, match="belongs to another model"):
        generate(load(None)[0], tokenizer, more, prompt_cache=cache)
    limited = make_prompt_cache(model, max_kv_size=8)
    with pytest.raises(InvalidArgument, match="max_kv_size is 8"):
        generate(model, tokenizer, ids, max_tokens=20, prompt_cache=limited)


def test_a_cache_may_be_used_while_an_answer_is_not_read_to_its_end(both):
    model, tokenizer = both
    cache, ids = make_prompt_cache(model), tokenizer.encode("The fox said")
    want = generate(model, tokenizer, ids, max_tokens=6)
    stream = penstock.mlx_lm.stream_generate(model, tokenizer, ids, max_tokens=6, prompt_cache=cache)
    first = next(stream)
    second = penstock.mlx_lm.stream_generate(
        model, tokenizer, tokenizer.encode(" no"), max_tokens=2, prompt_cache=cache
    )
    third = generate(model, tokenizer, tokenizer.encode(" that"), max_tokens=2, prompt_cache=cache)
    assert want.startswith(first.text) and third and list(stream) == []
    assert list(cache.tokens)[: len(ids) + 2] == [*ids, first.token, *tokenizer.encode(" that")][: len(ids) + 2]
    with pytest.raises(InvalidArgument, match="^prompt_cache: it was used since this call was made"):
        next(second)


def test_processors_see_the_tokens_of_their_own_call(both):
    model, tokenizer = both
    cache, seen = make_prompt_cache(model), []
    generate(model, tokenizer, "The fox said", max_tokens=2, prompt_cache=cache)

    def watch(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    *_, last = penstock.mlx_lm.stream_generate(
        model, tokenizer, [29, 54], max_tokens=2, prompt_cache=cache, logits_processors=[watch]
    )
    assert seen[0] == [29, 54] and seen[1] == [29, 54, cache.tokens[-2]] and last.token == cache.tokens[-1]


def test_files_are_sessions_with_metadata(both, tmp_path):
    model, tokenizer = both
    cache, file = make_prompt_cache(model), tmp_path / "cache.safetensors"
    generate(model, tokenizer, "The fox said", max_tokens=3, prompt_cache=cache)
    save_prompt_cache(str(file), cache, {"model": "demo"})
    read, metadata = load_prompt_cache(str(file), return_metadata=True)
    plain = load_prompt_cache(file)
    assert metadata == {"model": "demo"} and list(read.tokens) == list(cache.tokens) and len(plain) == 8
    assert read[0].offset == len(cache.tokens) and not can_trim_prompt_cache(read)
    with pytest.raises(InvalidArgument, match="was not used with a model yet"):
        save_prompt_cache(tmp_path / "other", plain)
    save_prompt_cache(file, make_prompt_cache(model))  # another file has the name now
    assert load_prompt_cache(file, return_metadata=True)[1] == {}
    more = tokenizer.encode(" and then")
    texts = {generate(model, tokenizer, more, max_tokens=4, prompt_cache=one) for one in (cache, read, plain)}
    assert len(texts) == 1
    save_prompt_cache(file, cache)
    with penstock.restore(file, model.llm) as session:
        assert session.tokens == list(cache.tokens)
    with pytest.raises(InvalidArgument, match="metadata is"):
        save_prompt_cache(file, cache, {"turns": 2})
    with pytest.raises(CheckpointError, match="another model or quantization"):
        generate(attending(tokenizer), tokenizer, more, prompt_cache=load_prompt_cache(file))


def test_a_file_of_mlx_lm_is_refused_by_name(both, tmp_path):
    file = tmp_path / "mlx.safetensors"
    rows = {f"{n}.{part}": np.zeros((1, 2, 4, 8), np.float32) for n in range(2) for part in (0, 1)}
    save_file(rows, file, {"0.model": "m", "1.0": "KVCache", "1.1": "ArraysCache", "2.0": ""})
    with pytest.raises(CheckpointError, match=r"is a prompt cache of mlx-lm \(ArraysCache, KVCache\), expected one of"):
        load_prompt_cache(file)
    save_file(rows, file, {"format": "mlx"})
    with pytest.raises(CheckpointError, match="format is 'mlx', expected a saved session"):
        load_prompt_cache(file)
    with pytest.raises(CheckpointError, match="nothing"):
        load_prompt_cache(tmp_path / "nothing")
    (damaged := tmp_path / "damaged").write_bytes(b"\0" * 30)
    with pytest.raises(CheckpointError):
        load_prompt_cache(damaged)


def test_metadata_that_is_damaged_is_refused(both, tmp_path):
    model, tokenizer = both
    file = tmp_path / "cache.safetensors"
    cache = make_prompt_cache(model)
    generate(model, tokenizer, "The fox", max_tokens=1, prompt_cache=cache)
    save_prompt_cache(file, cache, {"a": "b"})
    data = file.read_bytes()
    assert data.count(b'{\\"a\\": \\"b\\"}') == 1
    file.write_bytes(data.replace(b'{\\"a\\": \\"b\\"}', b'[\\"a\\", \\"b\\"]'))
    with pytest.raises(CheckpointError, match="metadata is damaged"):
        load_prompt_cache(file, return_metadata=True)
    with pytest.raises(CheckpointError, match="do not fit their digest"):
        generate(model, tokenizer, "x", prompt_cache=load_prompt_cache(file))
    assert json.loads("[1]")


@pytest.mark.slow
def test_a_file_that_mlx_lm_wrote_is_refused(both, tmp_path):
    theirs, cache = pytest.importorskip("mlx_lm"), pytest.importorskip("mlx_lm.models.cache")
    from tests.mlx_lm.notebook import MODEL

    model, tokenizer = theirs.load(MODEL)
    held = cache.make_prompt_cache(model)
    theirs.generate(model, tokenizer, "The fox", max_tokens=2, prompt_cache=held)
    cache.save_prompt_cache(str(tmp_path / "file.safetensors"), held, {"a": "b"})
    with pytest.raises(CheckpointError, match="is a prompt cache of mlx-lm"):
        load_prompt_cache(tmp_path / "file.safetensors")


def test_the_last_tokens_of_attention_can_be_taken_away(both):
    _, tokenizer = both
    llm = attending(tokenizer)
    rng = np.random.default_rng(1)
    ids, more, others = (rng.integers(4, 4096, count).tolist() for count in (280, 90, 40))
    pools = list(llm.engine.caches.pools.values())
    cache = make_prompt_cache(llm)
    generate(llm, tokenizer, ids, max_tokens=3, prompt_cache=cache)
    written, used = list(cache.tokens), [pool.used for pool in pools]
    branch = copy.deepcopy(cache)  # shares pages with it
    cache.session.append(more)
    assert can_trim_prompt_cache(cache) and cache[0].is_trimmable()
    assert trim_prompt_cache(cache, 200) == 200 and list(cache.tokens) == written[:-110]  # into the shared pages
    cache.session.append(others)
    np.testing.assert_array_equal(cache.session.logits, llm.logits(written[:-110] + others)[-1])
    branch.session.append(others)
    np.testing.assert_array_equal(branch.session.logits, llm.logits(written + others)[-1])  # its pages are its own
    branch.session.close()
    assert trim_prompt_cache(cache, 10**6) == len(written) - 70 and len(cache.tokens) == 0
    assert [pool.used for pool in pools] == [0] != used
    cache.session.append(others)
    np.testing.assert_array_equal(cache.session.logits, llm.logits(others)[-1])
    assert trim_prompt_cache(cache, 1) == 1
    with pytest.raises(InvalidArgument, match="num_tokens is -1"):
        trim_prompt_cache(cache, -1)
    with pytest.raises(InvalidArgument, match="length is 99, expected 0 to 39"):
        cache.session.truncate(99)


def test_nothing_is_taken_from_what_has_left_a_window(both):
    model, tokenizer = both
    llm = attending(tokenizer, sliding_window=70)
    cache = make_prompt_cache(llm)
    ids = list(range(4, 64))
    cache.session.append(ids)
    assert can_trim_prompt_cache(cache) and trim_prompt_cache(cache, 5) == 5
    cache.session.append(list(range(4, 300)))
    assert not can_trim_prompt_cache(cache) and trim_prompt_cache(cache, 5) == 0
    with pytest.raises(InvalidArgument, match="truncate: the sequence has a recurrent state or has left a window"):
        cache.session.truncate(3)
    recurrent = make_prompt_cache(model)
    recurrent.session.append(ids)
    assert not can_trim_prompt_cache(recurrent) and trim_prompt_cache(recurrent, 5) == 0
