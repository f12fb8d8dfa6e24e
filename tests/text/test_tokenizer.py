"""Tokenizers: files and their damage, end-of-text ids, exact text, and streaming for each kind of decoder."""

import json
import re
import string

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.errors import CheckpointError, DTypeError, InvalidArgument
from penstock.text.tokenizer import Tokenizer, _WindowStream

SENTENCES = [
    "The penstock carries water down to the turbine.",
    "Größe, naïve, 東京 and 😀😀 are words too.",
    "    indented\n\tcode = {'a': 1}\n",
]


def byte_level():
    """A byte-level BPE tokenizer with special and ordinary added tokens, as Qwen and DeepSeek have them."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(["<|bos|>", "<|end|>"])
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("<｜tool▁call｜>", special=False)])
    return backend


def byte_fallback(decoder):
    """A sentencepiece-like tokenizer: pieces with ▁ for spaces, and bytes for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *string.ascii_letters, ".", "é"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("▁", "▁")]
    vocab = {piece: n for n, piece in enumerate([*pieces, *("".join(pair) for pair in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoder
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", vocab["<s>"])])
    return backend


def replace_space():
    return [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


BACKENDS = {
    "byte level": byte_level(),
    "gemma": byte_fallback(decoders.Sequence(replace_space())),
    "llama": byte_fallback(decoders.Sequence([*replace_space(), decoders.Strip(" ", 1, 0)])),
    "metaspace": byte_fallback(decoders.Metaspace()),
    "metaspace bytes": byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
}
BACKENDS["byte level in a sequence"] = tokenizers.Tokenizer.from_str(byte_level().to_str())
BACKENDS["byte level in a sequence"].decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
TOKENIZERS = {name: Tokenizer(backend) for name, backend in BACKENDS.items()}
WITH_BYTES = [name for name in TOKENIZERS if name != "metaspace"]  # it writes <0x..> as it stands


def streamed(tokenizer, ids, **options):
    stream = tokenizer.detokenizer(**options)
    return [stream.add(token) for token in ids], stream.finish()


# streaming


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150)
@given(data=st.data(), skip=st.booleans())
def test_detokenizer_gives_what_decode_gives_for_any_ids(name, data, skip):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=25))
    pieces, rest = streamed(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", WITH_BYTES)
@given(data=st.data())
def test_detokenizer_gives_what_decode_gives_for_runs_of_bytes(name, data):
    """Many ids stand for single bytes here, so that characters begin, break off and complete."""
    tokenizer = TOKENIZERS[name]
    single = [i for i in range(tokenizer.vocab_size) if (p := tokenizer.backend.id_to_token(i)) and is_byte(p, name)]
    ids = data.draw(st.lists(st.one_of(st.sampled_from(single), st.sampled_from([*single[:1], 1, 300])), max_size=30))
    pieces, rest = streamed(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)


def is_byte(piece, name):
    return len(piece) == 1 if "byte level" in name else piece.startswith("<0x")


@pytest.mark.parametrize("name", WITH_BYTES)
@given(text=st.text(max_size=30))
def test_detokenizer_never_splits_a_character(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    pieces, rest = streamed(tokenizer, ids)
    whole = tokenizer.decode(ids)
    assert "".join(pieces) + rest == whole
    if "�" not in whole:
        assert not any("�" in piece for piece in (*pieces, rest))


def test_detokenizer_waits_for_the_rest_of_a_character():
    tokenizer = TOKENIZERS["byte level"]
    ids = [tokenizer.backend.token_to_id(piece) for piece in ("a", "ð", "Ł", "ĺ", "Ģ", "b")]  # a, four bytes of 😀, b
    assert streamed(tokenizer, ids) == (["a", "", "", "", "😀", "b"], "")
    assert streamed(tokenizer, ids[:4]) == (["a", "", "", ""], "�")
    assert streamed(tokenizer, [*ids[:3], ids[5]]) == (["a", "", "", "�b"], "")


def test_detokenizer_waits_for_the_end_of_a_run_of_byte_tokens():
    tokenizer = TOKENIZERS["llama"]
    ids = [tokenizer.backend.token_to_id(piece) for piece in ("▁a", "<0xC3>", "<0xB6>", "<0xFF>", "e")]
    assert streamed(tokenizer, [ids[0], *ids[1:3], ids[4]]) == (["a", "", "", "öe"], "")
    assert streamed(tokenizer, ids) == (["a", "", "", "", "���e"], "")


def test_detokenizer_leaves_special_tokens_out_unless_asked():
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("a<|end|><think>b")
    assert streamed(tokenizer, ids) == (["a", "", "<think>", "b"], "")
    assert streamed(tokenizer, ids, skip_special_tokens=False)[0] == ["a", "<|end|>", "<think>", "b"]


def test_detokenizers_do_not_share_their_state():
    tokenizer = TOKENIZERS["byte level"]
    first, second = tokenizer.detokenizer(), tokenizer.detokenizer()
    first.add(tokenizer.backend.token_to_id("ð"))
    assert second.add(tokenizer.backend.token_to_id("a")) == "a"


@pytest.mark.parametrize("name", ["gemma", "llama", "metaspace"])
def test_detokenizer_decodes_each_token_a_bounded_number_of_times(name):
    decoded = 0

    class Counting:
        def __init__(self, backend):
            self.backend = backend
            self.id_to_token = backend.id_to_token

        def decode(self, ids, **options):
            nonlocal decoded
            decoded += len(ids)
            return self.backend.decode(ids, **options)

    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("the cat 😀😀😀 a the é " * 20)
    stream = _WindowStream(Counting(tokenizer.backend), tokenizer._decoder)
    assert "".join(map(stream.add, ids)) + stream.finish() == tokenizer.decode(ids, skip_special_tokens=False)
    assert decoded <= 3 * len(ids)


# encode and decode


@pytest.mark.parametrize("text", ["", " ", "the cat", "  two  ", "Größe 東京 😀", "a\r\n\tb\x00", "<|end|>", "é"])
def test_encode_is_what_the_library_does(text):
    for name, tokenizer in TOKENIZERS.items():
        for special in (True, False):
            want = BACKENDS[name].encode(text, add_special_tokens=special).ids
            assert tokenizer.encode(text, add_special_tokens=special) == want
    assert TOKENIZERS["byte level"].decode(TOKENIZERS["byte level"].encode(text), False).replace("é", "é") in (
        text,
        text.replace("é", "é"),
    )


def test_encode_runs_the_post_processor_only_when_asked():
    tokenizer = TOKENIZERS["gemma"]
    assert tokenizer.encode("a")[0] == tokenizer.backend.token_to_id("<s>")
    assert tokenizer.encode("a", add_special_tokens=False) == [tokenizer.backend.token_to_id("a")]


def test_encode_ignores_truncation_and_padding_of_the_file():
    backend = byte_level()
    plain = Tokenizer(byte_level()).encode("The penstock carries water")
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    assert Tokenizer(backend).encode("The penstock carries water") == plain


@pytest.mark.parametrize("text", ["\ud800", "abc\udfff", "é\ud83d\ude00"], ids=ascii)
def test_encode_refuses_lone_surrogates(text):
    at = next(n for n, c in enumerate(text) if "\ud800" <= c <= "\udfff")
    with pytest.raises(
        InvalidArgument, match=rf"^encode: text has the lone surrogate U\+D\w+ at character {at}, expected"
    ):
        TOKENIZERS["byte level"].encode(text)


def test_encode_and_decode_refuse_other_types():
    tokenizer = TOKENIZERS["byte level"]
    with pytest.raises(DTypeError, match="^encode: text is a bytes, expected a str"):
        tokenizer.encode(b"a")
    for ids in ("ab", [1.5], [None], 3):
        with pytest.raises(DTypeError, match="^decode: ids is .*expected a sequence of integers"):
            tokenizer.decode(ids)
    for ids in ([-1], [2**32]):
        with pytest.raises(InvalidArgument, match="^decode: ids is .*expected integers from 0"):
            tokenizer.decode(ids)


def test_decode_takes_numpy_ids_and_ids_without_a_token():
    tokenizer = TOKENIZERS["byte level"]
    ids = np.array(tokenizer.encode("water"))
    assert tokenizer.decode(ids) == "water"
    assert tokenizer.decode([*ids, tokenizer.vocab_size + 5]) == "water"


# folders


@pytest.fixture
def folder(tmp_path):
    """Writes a model folder from keyword arguments: name_json=content, and tokenizer= for its JSON as a dict."""

    def write(backend=None, **files):
        content = json.loads((backend or byte_level()).to_str())
        for name, change in {"tokenizer": None, **files}.items():
            path = tmp_path / f"{name}.json"
            if name == "tokenizer" and (change is None or callable(change)):
                if change is not None:
                    change(content)
                path.write_text(json.dumps(content))
            elif isinstance(change, bytes):
                path.write_bytes(change)
            else:
                path.write_text(json.dumps(change))
        return tmp_path

    return write


def token(content, number, **flags):
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": content, **plain, **flags}


@pytest.mark.parametrize(
    "generation, config, settings, eos",
    [
        ({}, {}, {}, []),
        ({"eos_token_id": 5}, {"eos_token_id": 6}, {}, [5]),
        ({"eos_token_id": [5, 7]}, {}, {"eos_token": "<|end|>"}, [5, 7, "<|end|>"]),
        ({"eos_token_id": None}, {"eos_token_id": 6}, {"eos_token": None}, [6]),
        ({"eos_token_id": []}, {"eos_token_id": [6]}, {}, [6]),
        ({}, {"text_config": {"eos_token_id": 8}}, {}, [8]),
        ({}, {"eos_token_id": None, "text_config": {"eos_token_id": [8, 9]}}, {}, [8, 9]),
        ({}, {}, {"eos_token": {"content": "<|end|>", "special": True}}, ["<|end|>"]),
        ({"eos_token_id": 5}, {}, {"eos_token": "<|unheard of|>"}, [5]),
        ({"eos_token_id": 400}, {"vocab_size": 512}, {}, [400]),
    ],
)
def test_from_folder_collects_eos_ids(folder, generation, config, settings, eos):
    path = folder(generation_config=generation, config=config, tokenizer_config=settings)
    tokenizer = Tokenizer.from_folder(path)
    ids = [tokenizer.backend.token_to_id(i) if isinstance(i, str) else i for i in eos]
    assert tokenizer.eos_ids == set(ids)
    named = [number for number, given in zip(ids, eos, strict=True) if isinstance(given, str)]
    assert tokenizer.eos_token_id == (named or sorted(ids) or [None])[0]  # as transformers, where the tokenizer has one


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {"generation_config": {"eos_token_id": 10**6}},
            r"generation_config.json: eos_token_id is 1000000, expected a",
        ),
        ({"generation_config": {"eos_token_id": [3, -1]}}, r"generation_config.json: eos_token_id is -1, expected a"),
        ({"config": {"eos_token_id": True}}, r"config.json: eos_token_id is True, expected a token id from 0"),
        ({"config": {"text_config": {"eos_token_id": "</s>"}}}, r"config.json: eos_token_id is '</s>', expected a"),
        ({"config": {"bos_token_id": 1.5}}, r"config.json: bos_token_id is 1.5, expected a token id"),
        ({"tokenizer_config": {"eos_token": "<no>"}}, r"tokenizer_config.json: eos_token is '<no>', expected a token"),
        ({"generation_config": b"{"}, r"generation_config.json: is damaged, expected a JSON object"),
        ({"config": []}, r"config.json: holds a list, expected a JSON object"),
    ],
)
def test_from_folder_refuses_bad_ids_and_files(folder, files, message):
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_folder(folder(**files))


@pytest.mark.parametrize(
    "config, settings, bos",
    [
        ({}, {}, None),
        ({}, {"bos_token": "<|bos|>"}, "<|bos|>"),
        ({"bos_token_id": 4}, {"bos_token": None}, 4),
        ({"bos_token_id": None, "text_config": {"bos_token_id": 6}}, {}, 6),
    ],
)
def test_from_folder_finds_the_bos_id(folder, config, settings, bos):
    tokenizer = Tokenizer.from_folder(folder(config=config, tokenizer_config=settings))
    assert tokenizer.bos_id == (tokenizer.backend.token_to_id(bos) if isinstance(bos, str) else bos)


def remove(name):
    return lambda content: content["model"].pop(name)


@pytest.mark.parametrize(
    "damage, message",
    [
        (b"", "is damaged, expected a JSON object"),
        (b"<html>404</html>", "is damaged, expected a JSON object"),
        (b"\xff\xfe{}", "byte 0 is not UTF-8"),
        (b"[" * 100_000, "is nested too deeply|is damaged"),
        (b"[1]", "holds a list, expected a JSON object"),
        (b"{}", "model is None, expected an object"),
        (remove("merges"), "model has no merges, expected those of byte-pair encoding"),
        (remove("vocab"), "model has no vocab"),
        (lambda content: content["model"].update(type="Bigram"), "cannot be read as a tokenizer: "),
        (lambda content: content["model"]["merges"].append(["zz", "qq"]), "cannot be read as a tokenizer: .*zz"),
        (lambda content: content["added_tokens"].append(token("<far>", 10**6)), "'<far>' has id 1000000, expected 334"),
        (lambda content: content["added_tokens"].append(token("<low>", 3)), "'<low>' has id 3, expected 334"),
        (lambda content: content["added_tokens"].append(token("<neg>", -1)), "cannot be read as a tokenizer: .*-1"),
        (lambda content: content["added_tokens"].append(token("<big>", 2**40)), "cannot be read as a tokenizer: "),
        (lambda content: content["model"]["vocab"].update(far=10**9), r"'<\|bos\|>' has id 330, expected 331"),
        (
            lambda content: (content["model"]["vocab"].update(far=10**9), content.update(added_tokens=[])),
            "the highest token id is 1000000000, expected one near the 331 tokens",
        ),
        (
            lambda content: (content["model"]["vocab"].update(other=5, third=5), content.update(added_tokens=[])),
            "'.*' and '.*' both have the id 5, expected one token per id",
        ),
        (lambda content: content.update(added_tokens=[3]), "cannot be read as a tokenizer: "),
        (lambda content: (content["model"].update(vocab={}, merges=[]), content.update(added_tokens=[])), "no tokens"),
    ],
)
def test_from_folder_refuses_a_damaged_file(folder, damage, message):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: ") as caught:
        Tokenizer.from_folder(folder(tokenizer=damage))
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_from_folder_names_other_formats(tmp_path):
    with pytest.raises(
        CheckpointError, match="tokenizer.json: no such file; only tokenizer.json is supported, found no"
    ):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(
        CheckpointError, match=r"only tokenizer.json is supported, found tokenizer.model \(sentencepiece\)"
    ):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        Tokenizer.from_folder(tmp_path / "absent")


def test_from_folder_takes_a_byte_order_mark(folder):
    path = folder()
    (path / "tokenizer.json").write_bytes(b"\xef\xbb\xbf" + (path / "tokenizer.json").read_bytes())
    assert Tokenizer.from_folder(str(path)).encode("a")


def test_from_folder_adds_tokens_that_only_the_config_lists(folder):
    listed = {"335": {"content": "<b>", "special": False}, "334": {"content": "<a>", "special": True}}
    tokenizer = Tokenizer.from_folder(folder(tokenizer_config={"added_tokens_decoder": listed}))
    assert tokenizer.encode("<a><b>") == [334, 335]
    assert tokenizer.decode([334, 335]) == "<b>"
    assert tokenizer.vocab_size == 336


@pytest.mark.parametrize(
    "listed, message",
    [
        ({"999": {"content": "<a>"}}, "added_tokens_decoder gives '<a>' id 999, expected 334"),
        ({"x": {"content": "<a>"}}, r"added_tokens_decoder\['x'\] is"),
        ({"334": 5}, r"added_tokens_decoder\['334'\] is 5, expected a token with content"),
        ([1], r"added_tokens_decoder is \[1\], expected an object"),
    ],
)
def test_from_folder_refuses_odd_tokens_of_the_config(folder, listed, message):
    with pytest.raises(CheckpointError, match=f"tokenizer_config.json: {message}"):
        Tokenizer.from_folder(folder(tokenizer_config={"added_tokens_decoder": listed}))


def test_from_folder_reads_the_chat_template(folder):
    settings = {"chat_template": "{{ eos_token }}{{ messages[0].content }}{{ x }}", "eos_token": "<|end|>"}
    tokenizer = Tokenizer.from_folder(folder(tokenizer_config=settings))
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], x=3) == "<|end|>hi3"


def test_apply_chat_template_without_one_says_so(folder):
    tokenizer = Tokenizer.from_folder(folder())
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidArgument, match="^chat: the model has no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_compile_chat_template_refuses_a_broken_one(folder):
    Tokenizer.from_folder(folder()).compile_chat_template()
    Tokenizer.from_folder(folder(tokenizer_config={"chat_template": "{{ missing.there }}"})).compile_chat_template()
    broken = Tokenizer.from_folder(folder(tokenizer_config={"chat_template": "{{"}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat template, line 1: "):
        broken.compile_chat_template()


def test_apply_chat_template_refuses_a_variable_called_messages(folder):
    tokenizer = Tokenizer.from_folder(folder(tokenizer_config={"chat_template": "x"}))
    with pytest.raises(InvalidArgument, match="messages is among the variables"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], messages=[])
