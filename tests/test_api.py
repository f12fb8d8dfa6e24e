"""`penstock.load` and the model it returns; broken folders, in the process and on the command line."""

import contextlib
import json
import logging
import math
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import penstock
from penstock.api import LLM, Stats, load_random
from penstock.backends.cpu import device as cpu_device
from penstock.engine import options as engine_options
from penstock.errors import BackendError, CheckpointError, DTypeError, InvalidArgument, OutOfMemory, PenstockError
from penstock.models.step import RecurrentState
from penstock.weights.resolve import resolve_model
from tests.cli.common import program
from tests.models.common import (
    VOCAB,
    letters,
    moe_config,
    small_config,
    some_tokens,
    tensors,
    write_model,
    write_tokens_beyond,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small"), small_config())


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return penstock.load(folder, device="cpu")


# -- load ------------------------------------------------------------------------------------------------------------


def test_load_without_a_model_is_the_demo() -> None:
    llm = penstock.load(device="reference")
    assert llm.config.model_type.startswith("qwen3_5_moe") and llm.config.vocab_size == 4096
    assert llm.max_context == 2048 and llm.tokenizer.has_chat_template
    assert llm.notices == ()


def test_load_takes_paths_and_strings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    rows = [penstock.load(path, device="reference").logits([1, 2]) for path in (folder, str(folder), folder.name)]
    for row in rows[1:]:
        np.testing.assert_array_equal(row, rows[0])


def test_load_says_what_it_loaded(llm: LLM) -> None:
    assert repr(llm) == "LLM(qwen3_5_moe_text, cpu, context 2048)"
    assert (llm.config.dim, llm.config.experts, llm.tokenizer.vocab_size) == (64, 3, 260)


@pytest.mark.parametrize("options, words", [
    ({"device": "tpu"}, "device is 'tpu', expected one of auto, cpu, cuda, reference"),
    ({"device": None}, "device is None, expected one of"),
    ({"dtype": "float64"}, "dtype is 'float64', expected one of auto, float32, bfloat16"),
    ({"state_dtype": "float16"}, "state_dtype is 'float16', expected one of auto, float32, bfloat16"),
    ({"state_dtype": "bfloat16", "device": "cpu"}, "state_dtype is 'bfloat16', expected float32: device 'cpu' has no"),
    ({"activations": "int4"}, "activations is 'int4', expected one of auto, int8, float32"),
    ({"expert_cache": "12 elephants"}, "expert_cache: is '12 elephants', expected a size such as 12G"),
    ({"expert_cache": 12}, "expert_cache is 12, expected a size such as '12G' or 'auto'"),
    ({"expert_io": "tape"}, "expert_io is 'tape', expected one of auto, direct, pagecache, mmap"),
    ({"expert_policy": "random"}, "expert_policy is 'random', expected one of auto, lru"),
    ({"expert_host": "1G", "device": "cpu"}, "expert_host is '1G', expected 'auto': it is the memory behind a GPU's"),
    ({"expert_cache": "10%", "device": "reference"}, "expert_cache is given, expected 'auto' for device 'reference'"),
    ({"max_context": 0}, "max_context is 0, expected 1 to 2048"),
    ({"max_context": 2049}, "max_context is 2049, expected 1 to 2048"),
    ({"max_context": True}, "max_context is True, expected 1 to 2048"),
    ({"max_context": "512"}, "max_context is '512', expected 1 to 2048"),
    ({"threads": 0, "device": "cpu"}, "threads is 0, expected 1 to"),
    ({"threads": 10**6, "device": "cpu"}, "threads is 1000000, expected 1 to"),
    ({"threads": True}, "threads is True, expected an integer"),
    ({"threads": "2"}, "threads is '2', expected an integer"),
    ({"revision": "main"}, "is a folder, expected a hub id for revision 'main'"),
])  # fmt: skip
def test_load_names_a_bad_option(options: dict[str, Any], words: str, folder: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        penstock.load(folder, **dict[str, Any](device="reference") | options)
    assert words in str(caught.value)


def test_load_says_why_a_gpu_cannot_be_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backends.cuda.runtime.device.interpreted", lambda: False)
    monkeypatch.setattr("penstock.backends.cuda.runtime.device.unusable", lambda: "torch finds no GPU")
    with pytest.raises(BackendError, match="^load: device is 'cuda', expected 'cpu': torch finds no GPU$"):
        penstock.load(folder, device="cuda")


def test_load_chooses_a_gpu_that_can_be_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for why, device in (("torch finds no GPU", "cpu"), (None, "cuda")):
        monkeypatch.setattr("penstock.backends.cuda.runtime.features.unusable", lambda why=why: why)
        dtype = "bfloat16" if device == "cuda" else "float32"
        assert engine_options.resolve_options()[:2] == (device, dtype)


def test_load_takes_the_device_of_the_settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DEVICE", "reference")
    assert "reference" in repr(penstock.load(folder))
    assert "cpu" in repr(penstock.load(folder, device="cpu"))


def test_load_takes_the_state_dtype_of_the_settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_STATE_DTYPE", "bfloat16")
    assert penstock.load(folder, device="reference").engine.state_dtype == "bfloat16"
    assert penstock.load(folder, device="reference", state_dtype="float32").engine.state_dtype == "float32"
    with pytest.raises(InvalidArgument, match="^load: state_dtype is 'bfloat16', expected float32: device 'cpu'"):
        penstock.load(folder, device="cpu")


def test_load_with_bfloat16_states_is_close_and_takes_less_memory(folder: Path) -> None:
    whole, half = (penstock.load(folder, device="reference", state_dtype=kind) for kind in ("float32", "bfloat16"))
    logits = [llm.logits(range(1, 40)).astype(np.float64) for llm in (whole, half)]
    error = np.abs(logits[1] - logits[0]).max() / np.abs(logits[0]).max()
    assert 0 < error < 0.02
    layers = zip(half.engine.caches.layouts, half.engine.caches.arrays, strict=True)
    states = [(layout, array) for layout, (_, array) in layers if isinstance(layout, RecurrentState)]
    assert states and all(str(array.dtype) == "bfloat16" for _, array in states)
    saved = sum(2 * math.prod(layout.state) for layout, _ in states)
    assert whole.engine.caches.slot_bytes - half.engine.caches.slot_bytes == saved


def test_load_refuses_a_state_dtype_of_a_model_without_states() -> None:
    config = small_config(full_attention_interval=1)
    with pytest.raises(
        InvalidArgument, match="^load: state_dtype is 'bfloat16', expected 'auto': the model has no rec"
    ):
        load_random(config, device="reference", state_dtype="bfloat16")


@pytest.mark.parametrize("name", ["", "no/such/folder/here", "\x00", "a b", "../..//", "http://x/y", "x" * 300])
def test_load_refuses_what_is_no_model(name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        penstock.load(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_load_tells_remarks_to_whoever_asks(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    llm = penstock.load(folder, device="reference", notify=told.append)
    assert tuple(told) == llm.notices and len(told) == 1
    with caplog.at_level(logging.INFO, "penstock"):
        penstock.load(folder, device="reference")
    assert [record.message for record in caplog.records] == told


def test_load_takes_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path) -> None:
    folder = write_tokens_beyond(write_model(tmp_path, small_config(vocab_size=260)))
    llm = penstock.load(folder, device="reference")
    beyond = "the tokenizer has ids up to 261, the model embeddings for 0 to 259; prompts that need others are refused"
    assert llm.notices[0] == f"{folder}: {beyond}"
    assert llm.tokenizer.encode("a<|image|>")[1:] == [260] and llm.logits([1, 2]).shape == (2, 260)
    assert len(llm.generate("a", max_tokens=3, logit_bias=letters()).tokens) == 3
    named = r"has 260 \('<\|image\|>'\), expected ids from 0 to 259, which have embeddings$"
    chat = [{"role": "user", "content": "<|image|>"}]
    for refused in (
        lambda: llm.generate("a<|image|>"),
        lambda: llm.generate(["a", "<|image|>"]),
        lambda: llm.generate([5, 260]),
        lambda: llm.stream("<|image|>"),
        lambda: llm.chat(chat, allow_special_in_messages=True),
        lambda: llm.session().append("<|image|>"),
        lambda: llm.session().generate("<|image|>"),
        lambda: llm.session().advance([260]),
    ):
        with pytest.raises(InvalidArgument, match=f"^tokens: {named}"):
            refused()
    with pytest.raises(InvalidArgument, match=f"^extra_eos: {named}"):
        llm.generate("a", extra_eos=[260])
    with pytest.raises(InvalidArgument, match="^logit_bias: a token id is 260, expected an integer from 0 to 259"):
        llm.generate("a", logit_bias={260: 1.0})
    with pytest.raises(InvalidArgument, match="^tokens: has 260, expected ids from 0 to 259"):
        llm.logits([260])
    assert llm.chat(chat, max_tokens=1).usage.prompt_tokens > 9  # as text


def test_load_on_the_reference_backend_is_exact(folder: Path) -> None:
    llm = penstock.load(folder, device="reference")
    assert llm.engine.activations == "float32"
    assert penstock.load(folder, device="reference", activations="int8").engine.activations == "int8"
    assert penstock.load(folder, device="cpu").engine.activations == "int8"
    demo = penstock.load(device="reference")
    ids = [1, 20, 300]
    exact = penstock.load(device="reference", activations="float32").logits(ids)
    rounded = penstock.load(device="reference", activations="int8").logits(ids)
    assert (demo.logits(ids) == exact).all() and not (rounded == exact).all()


def test_load_refuses_a_context_that_does_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device, "available_memory", lambda: engine_options.WORKING_BYTES + 1000)
    with pytest.raises(OutOfMemory, match=r"2048 positions need [1-9].* of memory, 1\.00 kB are free"):
        penstock.load(folder, device="reference", max_context=2048)
    monkeypatch.setattr(cpu_device, "available_memory", lambda: 1000)
    with pytest.raises(OutOfMemory):
        penstock.load(folder, device="reference")


def test_load_shortens_the_context_to_what_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = penstock.load(folder, device="reference").engine.caches
    monkeypatch.setattr(cpu_device, "available_memory", lambda: engine_options.WORKING_BYTES + caches.bytes_of(1500))
    assert penstock.load(folder, device="reference").max_context == 1024


def test_load_reads_weights_from_the_map(tmp_path: Path) -> None:
    """No copy of the experts: their arrays are views of the file."""
    llm = penstock.load(write_model(tmp_path, small_config()), device="reference")
    stack = llm.engine.model.weights.layers[0].mlp.routed
    assert not stack.gate.flags.owndata and not stack.gate.flags.writeable


def test_load_of_the_same_folder_twice_shares_nothing(folder: Path) -> None:
    one, other = penstock.load(folder, device="reference"), penstock.load(folder, device="reference")
    assert one.engine is not other.engine
    np.testing.assert_array_equal(one.logits([3]), other.logits([3]))


# -- logits, text, chat ----------------------------------------------------------------------------------------------


def test_logits_of_a_sequence(llm: LLM) -> None:
    rows = llm.logits(some_tokens(7))
    assert rows.shape == (7, VOCAB) and rows.dtype == np.float32
    assert llm.logits([]).shape == (0, VOCAB)


@pytest.mark.parametrize("tokens", [[VOCAB], [-1], [1.0], "text", None, [[1]], [None]])
def test_logits_refuses_what_is_no_token(tokens: Any, llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="^tokens: "):
        llm.logits(tokens)


def test_logits_refuses_more_than_the_context(folder: Path) -> None:
    llm = penstock.load(folder, device="reference", max_context=5)
    assert llm.logits([1] * 5).shape == (5, VOCAB)
    with pytest.raises(InvalidArgument, match="^context: 0 positions are filled and 6 more were given"):
        llm.logits([1] * 6)


def test_generate_encodes_text_as_the_tokenizer_says(llm: LLM) -> None:
    text = "Once upon a time"
    assert llm.generate(text, max_tokens=5).tokens == llm.generate(llm.tokenizer.encode(text), max_tokens=5).tokens
    done = llm.generate([text, "Then"], max_tokens=5)
    assert [d.tokens for d in done] == [llm.generate(t, max_tokens=5).tokens for t in (text, "Then")]


def test_generate_refuses_lone_surrogates(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="lone surrogate"):
        llm.generate("\ud800")


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]


def test_chat_is_generate_after_the_template(llm: LLM) -> None:
    text = "<|bos|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    tokens = llm.tokenizer.encode(text, add_special_tokens=False)
    assert llm.chat_tokens(MESSAGES) == tokens and tokens[:2] == [0, 2]
    options: dict[str, Any] = {"max_tokens": 6, "logit_bias": letters()}
    done = llm.chat(MESSAGES, **options)
    assert done.tokens == llm.generate(tokens, **options).tokens
    assert "".join(chunk.text for chunk in llm.stream_chat(MESSAGES, **options)) == done.text


def test_chat_reads_control_tokens_of_messages_as_text_unless_allowed(llm: LLM) -> None:
    messages = [{"role": "user", "content": "a<|im_end|>b"}]
    tokens, old = llm.chat_tokens(messages), llm.chat_tokens(messages, allow_special_in_messages=True)
    assert (tokens.count(3), old.count(3)) == (1, 2)
    assert old == llm.tokenizer.encode(llm.tokenizer.apply_chat_template(messages), add_special_tokens=False)
    for ids, more in ((tokens, {}), (old, {"allow_special_in_messages": True})):
        assert llm.chat(messages, max_tokens=1, **more).usage.prompt_tokens == len(ids)
        assert len(list(llm.stream_chat(messages, max_tokens=1, **more))) == 1


@pytest.mark.parametrize("content", ["Who?", " a  <b> <|im_ end|> é \ue000 \n\n", "x" * 300, "<|IM_END|><think>"])
def test_chat_tokens_without_control_tokens_are_those_of_transformers(content: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = resolve_model(None).path
    llm, theirs = penstock.load(), transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": content}, {"role": "user", "content": content}]
    want = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert llm.chat_tokens(messages) == want


def test_chat_hands_variables_to_the_template(tmp_path: Path) -> None:
    write_model(tmp_path, small_config())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ mood }}:{{ messages[0].content }}:{{ tools | length if tools else 0 }}"})
    )
    llm = penstock.load(tmp_path, device="reference")
    tools = [{"type": "function", "function": {"name": "f"}}]
    tokens = llm.chat_tokens([{"role": "user", "content": "x"}], tools=tools, template_variables={"mood": "glad"})
    assert llm.tokenizer.decode(tokens) == "glad:x:1"
    done = llm.chat([{"role": "user", "content": "x"}], tools=tools, template_variables={"mood": "glad"}, max_tokens=1)
    assert done.usage.prompt_tokens == len(tokens)


@pytest.mark.parametrize("variables", [
    {"tools": []},
    {"add_generation_prompt": False},
    {5: 6},
    5,
])  # fmt: skip
def test_chat_refuses_variables_that_are_none(variables: Any, llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="^chat template: "):
        llm.chat_tokens([{"role": "user", "content": "x"}], template_variables=variables)


def test_chat_variables_may_have_any_other_name(tmp_path: Path) -> None:
    """Also that of an argument on the way to the template."""
    write_model(tmp_path, small_config())
    source = {"chat_template": "{{ messages[0].content }}{{ tokenize }}{{ return_dict }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(source))
    llm = penstock.load(tmp_path, device="reference")
    variables = {"tokenize": "y", "return_dict": "z"}
    tokens = llm.chat_tokens([{"role": "user", "content": "x"}], template_variables=variables)
    assert llm.tokenizer.decode(tokens) == "xyz"


def test_chat_refuses_what_is_no_list_of_messages(llm: LLM) -> None:
    with pytest.raises(DTypeError, match="^chat: messages is a NoneType, expected a list of messages"):
        llm.chat(None)  # type: ignore[arg-type]


def test_chat_needs_a_template(tmp_path: Path) -> None:
    write_model(tmp_path, small_config())
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidArgument, match="^chat: the model has no chat template"):
        penstock.load(tmp_path, device="reference").chat(MESSAGES)


# -- stats -----------------------------------------------------------------------------------------------------------


def test_stats_add_up(folder: Path) -> None:
    llm = penstock.load(folder, device="reference")
    assert (llm.stats().prompt_tokens, llm.stats().generated_tokens) == (0, 0)
    llm.generate([[1, 2], [3]], max_tokens=4, logit_bias=letters())
    list(llm.stream([1, 2, 3], max_tokens=2, logit_bias=letters()))
    stats = llm.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.expert_hits) == (6, 10, None)
    assert stats.prompt_seconds > 0 and stats.generation_seconds > 0 and stats.prompt_tps > 0
    assert stats.cache_bytes > 0 and stats.peak_memory > 1 << 20
    assert stats.weight_bytes == sum(array.nbytes for array in tensors(small_config()).values())


def test_stats_read_as_those_of_mlx_lm() -> None:
    stats = Stats(
        prompt_tokens=10, prompt_seconds=2.0, generated_tokens=3, generation_seconds=0.5, peak_memory=1500000000
    )
    assert str(stats).splitlines() == [
        "Prompt: 10 tokens, 5.000 tokens-per-sec",
        "Generation: 3 tokens, 6.000 tokens-per-sec",
        "Peak memory: 1.500 GB",
    ]
    assert json.loads(json.dumps(stats.as_dict()))["prompt_tps"] == 5.0


# -- folders that cannot be loaded -----------------------------------------------------------------------------------


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def with_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def changed_entry(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with_header(
            folder / "model.safetensors", lambda header: header | {"lm_head.weight": header["lm_head.weight"] | values}
        )

    return change


def replaced(name: str, data: bytes | str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return change


def config_with(**changes: Any) -> Callable[[Path], None]:
    return replaced("config.json", json.dumps(small_config(**changes)))


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def linked_to_itself(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")


def a_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def a_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def lost(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def quantized_without_scales(folder: Path) -> None:
    path = folder / "model.safetensors"
    arrays = load_file(path)
    arrays["lm_head.weight"] = np.zeros((VOCAB, 8), np.uint32)
    save_file(arrays, path)


def bad_bits(folder: Path) -> None:
    config = small_config() | {"quantization": {"bits": 7, "group_size": 64}}
    (folder / "config.json").write_text(json.dumps(config))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty file": (replaced("model.safetensors", b""), "model.safetensors"),
    "five bytes": (replaced("model.safetensors", b"12345"), "model.safetensors"),
    "HTML page": (replaced("model.safetensors", "<html>" + "x" * 500), "model.safetensors"),
    "LFS pointer": (replaced("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0"), "LFS"),
    "header longer than the file": (
        replaced("model.safetensors", struct.pack("<Q", 2**40) + b"{}"),
        "model.safetensors",
    ),
    "negative header": (replaced("model.safetensors", struct.pack("<q", -5) + b"{}"), "model.safetensors"),
    "truncated": (truncated, "model.safetensors"),
    "looping link": (linked_to_itself, "model.safetensors"),
    "pipe": (a_pipe, "model.safetensors"),
    "folder": (a_folder, "model.safetensors"),
    "no weights": (lost("model.safetensors"), "has no .safetensors files"),
    "no config": (lost("config.json"), "has no config.json"),
    "no tokenizer": (lost("tokenizer.json"), "tokenizer.json"),
    "huge shape": (changed_entry(shape=[2**62, 2**62]), "lm_head.weight"),
    "negative shape": (changed_entry(shape=[-1, 64]), "lm_head.weight"),
    "offsets beyond the end": (changed_entry(data_offsets=[0, 2**50]), "lm_head.weight"),
    "reversed offsets": (changed_entry(data_offsets=[100, 50]), "lm_head.weight"),
    "unknown dtype": (changed_entry(dtype="Q9"), "lm_head.weight"),
    "packed without scales": (quantized_without_scales, "lm_head.weight"),
    "seven bits": (bad_bits, "bits"),
    "index of lost files": (
        replaced(
            "model.safetensors.index.json", '{"weight_map": {"a": "model-2.safetensors", "b": "model.safetensors"}}'
        ),
        "model-2.safetensors",
    ),
    "index that leaves the folder": (
        replaced("model.safetensors.index.json", '{"weight_map": {"a": "../../etc/passwd"}}'),
        "model.safetensors.index.json",
    ),
    "config of another model": (config_with(model_type="llama"), "model_type is 'llama'"),
    "config is a list": (replaced("config.json", "[]"), "config.json"),
    "config is nested": (replaced("config.json", "[" * 200_000), "config.json"),
    "experts": (config_with(num_experts_per_tok=4), "num_experts_per_tok is 4"),
    "vocabulary": (config_with(vocab_size=VOCAB + 1), "expected (264, 64) by config.json"),
    "positions": (config_with(max_position_embeddings=10**12), "max_position_embeddings"),
    "tokenizer is no JSON": (replaced("tokenizer.json", "{"), "tokenizer.json"),
    "tokenizer is empty": (replaced("tokenizer.json", ""), "tokenizer.json"),
    "tokenizer settings": (replaced("tokenizer_config.json", "[1]"), "tokenizer_config.json"),
    "end of text": (replaced("generation_config.json", '{"eos_token_id": "x"}'), "eos_token_id"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_load_names_what_is_broken(name: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    change, words = BROKEN[name]
    change(tmp_path / "model")
    start = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        penstock.load(tmp_path / "model", device="reference")
    message = str(caught.value)
    assert words in message and "\n" not in message and len(message) < 500
    assert time.perf_counter() - start < 5


def test_load_of_the_unchanged_copy_works(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    with_header(tmp_path / "model" / "model.safetensors", lambda header: header)
    assert "lm_head.weight" in header_of(tmp_path / "model" / "model.safetensors")
    np.testing.assert_array_equal(
        penstock.load(tmp_path / "model", device="reference").logits([1]),
        penstock.load(folder, device="reference").logits([1]),
    )


def test_load_of_random_bytes_raises_its_own_errors(folder: Path, tmp_path: Path) -> None:
    """Single bytes of the header changed: either it loads, or it says why not."""
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    data = path.read_bytes()
    length = 8 + struct.unpack("<Q", data[:8])[0]
    rng = np.random.default_rng(0)
    for at in rng.integers(0, length, 60):
        changed = bytearray(data)
        changed[at] = rng.integers(256)
        path.write_bytes(changed)
        with contextlib.suppress(PenstockError):
            penstock.load(tmp_path / "model", device="reference")


@pytest.mark.parametrize("name", ["truncated", "config of another model", "no tokenizer", "pipe"])
def test_generate_of_a_broken_model_says_so_in_one_line(name: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    change, words = BROKEN[name]
    change(tmp_path / "model")
    outcome = program("generate", "--model", str(tmp_path / "model"), "-p", "x")
    assert (outcome.status, outcome.out) == (1, "")
    (line,) = outcome.err.strip().splitlines()
    assert words in line and "Traceback" not in line


def test_generate_runs_a_model_of_the_command_line(folder: Path) -> None:
    arguments = ("--ignore-chat-template", "-m", "3", "--device", "reference", "-p", "Once")
    outcome = program("generate", "--model", str(folder), *arguments)
    assert outcome.status == 0, outcome.err
    assert "Generation: 3 tokens" in outcome.err


def test_generate_never_runs_code_of_a_model(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    config = moe_config() | {"auto_map": {"AutoModel": "code.Model"}, "model_file": "code.py"}
    folder = write_model(tmp_path / "model", config)
    for name in ("code.py", "conftest.py", "sitecustomize.py", "tokenization.py"):
        (folder / name).write_text(f"open({str(mark)!r}, 'w')")
    outcome = program("generate", "--model", str(folder), "-p", "x", "-m", "1", "--device", "reference")
    assert outcome.status == 0, outcome.err
    assert not mark.exists()
