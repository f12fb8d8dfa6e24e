"""Tokenizers of GGUF files: the same ids as the `tokenizers` pipeline that the metadata was written from."""

import contextlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.errors import CheckpointError
from penstock.text.gguf_tokenizer import BYTE, CONTROL, NORMAL, PRE, UNKNOWN, UNUSED, USER_DEFINED, gguf_tokenizer
from penstock.text.tokenizer import Tokenizer
from penstock.weights.gguf import GgufFile

CORPUS = [
    "The penstock carries water down to the turbine; it's 1234567 litres, they'll say. I'M SURE, WE'VE SEEN.",
    "Größe, naïve, 東京 and 😀😀 are words too. Ελληνικά, русский язык, हिन्दी, العربية, 한국어!",
    "    indented\n\tcode = {'a': 1, \"b\": [2, 30, 400]}\n\n\nreturn x+=1 // y\r\n",
    "HelloWorld camelCase XMLHttp iPhone ÀÉÎ ß ǅ²³½ ⅷ 12.5% a/b/c\n// path/to/file",
]
TRICKY = [
    "",
    " ",
    "   ",
    "\n",
    "\r\n\r\n x",
    "a  b   c \n d\t\te ",
    *"1 12 123 1234 12345678901 x1y22z333 ²³½ⅷ٣٤٥ 1,234.56".split(),
    " 12 345",
    "it's IT'S They'Ve we'LL 'd'D 'ſ WE'LLama I'Dare",
    "e\u0301 é \u1100\u1161 가 ﬁ Å",
    "😀👨‍👩‍👧‍👦🏳️‍🌈 \u200b\u00a0\u3000x",
    "東京都に住む12人 中文，标点。",
    "हिन्दी العربية עברית ไทย",
    "if(x!=0){return a[i]+=b->c;}//\n\n\n  /* ... */",
    "<|bos|>hello<|end|><think>a</think><|bos|>",
    "< |bos|> <|bos |>",
    "snake_case kebab-case http://a.b/c?d=e&f#g __init__",
    "\x00\x01\x7f\ufeff\ufffd",
    "HTTPServer eBay McDonald ǅungla ÀB",
    "[PAD3] a\n/b \n a+/\n/b !!+x",
]
SPECIAL = ["<|bos|>", "<|end|>", "<|im_end|>"]
DEFINED = ["<think>", "</think>", "  \t x"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(*patterns: str) -> Any:
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated", False) for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def digits() -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


# As the tokenizer.json of the released models has them.
PIPELINES: dict[str, Any] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-bpe": lambda: split(LLAMA3),
    "smollm": digits,
    "starcoder": digits,
    "qwen2": lambda: split(LLAMA3.replace("{1,3}", "")),
    "tekken": lambda: split(TEKKEN),
    "qwen35": lambda: split(QWEN35),
    "gpt-4o": lambda: split(O200K),
    "deepseek-v3": lambda: split(*DEEPSEEK3),
    "kimi-k2": lambda: split(KIMI),
    "deepseek-coder": lambda: split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
}


def trained(pre: str, bos: bool = False) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken", "kimi-k2")))
    backend.pre_tokenizer = PIPELINES[pre]()
    backend.decoder = decoders.ByteLevel()
    if pre in ("qwen2", "qwen35"):
        backend.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 2, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in DEFINED])
    if bos:
        number = backend.token_to_id(SPECIAL[0])
        backend.post_processor = processors.TemplateProcessing(
            f"{SPECIAL[0]} $A", f"{SPECIAL[0]} $A $B", [(SPECIAL[0], number)]
        )
    return backend


def metadata(backend: tokenizers.Tokenizer, pre: str | None, **more: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes for a tokenizer, with three ids that only fill the table."""
    vocab = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    kinds = dict.fromkeys(SPECIAL, CONTROL) | dict.fromkeys(DEFINED, USER_DEFINED)
    merges = json.loads(backend.to_str())["model"]["merges"]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*vocab, *(f"[PAD{n}]" for n in range(3))],
        "token_type": [*(kinds.get(token, NORMAL) for token in vocab), *[UNUSED] * 3],
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": backend.token_to_id("<|bos|>"),
        "eos_token_id": backend.token_to_id("<|end|>"),
        **more,
    }


def write(path: Path, values: dict[str, Any], **others: Any) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    add = {str: writer.add_string, list: writer.add_array, bool: writer.add_bool, float: writer.add_float32}
    named = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    for key, value in (named | {f"tokenizer.{key.replace('__', '.')}": v for key, v in others.items()}).items():
        if value is not None and value != []:
            add.get(type(value), writer.add_int32)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile.open(path)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, tuple[tokenizers.Tokenizer, Tokenizer]]:
    """By kind: the pipeline, and what is read from a file with its metadata."""
    folder = tmp_path_factory.mktemp("gguf")
    made = {}
    for pre in PIPELINES:
        bos = pre in ("llama-bpe", "tekken")
        backend = trained(pre, bos)
        values = metadata(backend, pre, add_bos_token=bos if pre != "llama-bpe" else None)
        made[pre] = backend, gguf_tokenizer(write(folder / f"{pre}.gguf", values))
    return made


# ids and text


@pytest.mark.parametrize("pre", PIPELINES)
def test_encode_gives_the_ids_of_the_tokenizer_it_was_written_from(pairs, pre):
    backend, got = pairs[pre]
    for text in [*TRICKY, *CORPUS, " ".join(TRICKY)]:
        for special in (True, False):
            assert got.encode(text, special) == backend.encode(text, add_special_tokens=special).ids, text


@pytest.mark.parametrize("pre", PIPELINES)
@settings(max_examples=60)
@given(text=st.text(max_size=30) | st.text("aB1 2\n\t'sS²é東<|>/_.é", max_size=40))
def test_encode_gives_the_same_ids_for_any_text(pairs, pre, text):
    backend, got = pairs[pre]
    assert got.encode(text) == backend.encode(text).ids


@pytest.mark.parametrize("pre", PIPELINES)
def test_decode_and_detokenizer_give_the_same_text(pairs, pre):
    backend, got = pairs[pre]
    for text in [*TRICKY, *CORPUS]:
        ids = backend.encode(text).ids
        for skip in (True, False):
            assert got.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)
        stream = got.detokenizer()
        assert "".join(map(stream.add, ids)) + stream.finish() == got.decode(ids)


def test_words_are_cut_as_in_the_pipelines_and_by_each_kind_differently(pairs):
    text = " ".join([*TRICKY, *CORPUS])
    cuts = {pre: pipeline().pre_tokenize_str(text) for pre, pipeline in PIPELINES.items()}
    for pre, (_, got) in pairs.items():
        assert got.backend.pre_tokenizer.pre_tokenize_str(text) == cuts[pre]
    assert len({tuple(cut) for cut in cuts.values()}) == len(cuts) - 1  # smollm and starcoder are the same


def test_default_cuts_as_the_definition_says(tmp_path):
    backend = trained("gpt-2")
    for pre in ("default", None):
        file = write(tmp_path / "x.gguf", metadata(backend, pre))
        cut = gguf_tokenizer(file).backend.pre_tokenizer
        found = [piece for piece, _ in cut.pre_tokenize_str("a$+b don't 12345 x²!!  y")]
        # Sign runs first, so the apostrophe of don't stands alone; digits in threes from the left.
        assert found == ["a", "$+", "b", "Ġdon", "'", "t", "Ġ", "123", "45", "Ġx", "Â²", "!!", "Ġ", "Ġy"]
        assert [n for n in file.notices if "tokenizer.ggml.pre is missing" in n] == ([] if pre else file.notices)


def test_a_word_that_is_a_token_needs_no_merges_where_the_kind_says_so(tmp_path):
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "word", "<|bos|>"]
    values = {"model": "gpt2", "tokens": tokens, "merges": ["w o"], "bos_token_id": 257}
    values["tokens"] = tokens = [*tokens, "wo"]
    merged = [258, tokens.index("r"), tokens.index("d")]
    for pre, want in (("llama-bpe", [257, 256]), ("glm4", [256]), ("chatglm-bpe", merged), ("gpt-2", merged)):
        assert gguf_tokenizer(write(tmp_path / "x.gguf", values | {"pre": pre})).encode("word") == want


def test_names_of_one_way_to_cut_words_are_alike():
    for alike in (
        ("llama-bpe", "lfm2", "llama3", "pixtral"),
        ("gpt-4o", "minimax-m2", "llama4"),
        ("chatglm-bpe", "smaug-bpe"),
        ("smollm", "starcoder"),
        ("deepseek-v3", "joyai-llm"),
    ):
        assert len({PRE[name] for name in alike}) == 1
    assert PRE["glm4"].patterns == PRE["chatglm-bpe"].patterns == PRE["llama-bpe"].patterns
    assert not PRE["chatglm-bpe"].ignore_merges and not PRE["glm4"].add_bos


# SentencePiece


class Pieces(NamedTuple):
    """A trained SentencePiece model, and what is read from a file with its metadata."""

    model: Any
    got: Tokenizer


def pieces_metadata(model: Any, **more: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of a model; the last two tokens are added ones."""
    count = model.vocab_size()
    kinds = [
        UNKNOWN if model.is_unknown(n) else CONTROL if model.is_control(n) else BYTE if model.is_byte(n) else NORMAL
        for n in range(count)
    ]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [*(model.id_to_piece(n) for n in range(count)), "<|turn|>", "    "],
        "scores": [*(model.get_score(n) for n in range(count)), -1000.0, -1000.0],
        "token_type": [*kinds, CONTROL, USER_DEFINED],
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        **more,
    }


@pytest.fixture(scope="module", params=[True, False], ids=["llama", "gemma"])
def pieces(request, tmp_path_factory) -> Pieces:
    """With a space before the text, as Llama 2, and without one, as Gemma."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("pieces")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_prefix=str(folder / "m"),
        vocab_size=430,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        split_digits=True,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))
    values = pieces_metadata(model, add_space_prefix=None if request.param else False)
    return Pieces(model, gguf_tokenizer(write(folder / "x.gguf", values)))


def test_pieces_are_those_of_sentencepiece(pieces):
    for text in [*TRICKY, *CORPUS, " ".join(TRICKY)]:
        if "    " in text or "\0" in text or not text:  # an added token; SentencePiece ends at a NUL
            continue
        assert pieces.got.encode(text, add_special_tokens=False) == pieces.model.encode(text), text
        assert pieces.got.encode(text) == [pieces.model.bos_id(), *pieces.model.encode(text)]
        assert pieces.got.decode(pieces.model.encode(text)) == pieces.model.decode(pieces.model.encode(text))


@settings(max_examples=60)
@given(text=st.text("aB1 2\n\t'sS²é東<>/_.éthe ", min_size=1, max_size=40))
def test_pieces_of_any_text_come_back(pieces, text):
    assert pieces.got.decode(pieces.got.encode(text)) == text


def test_added_tokens_are_found_before_pieces(pieces):
    count = pieces.model.vocab_size()
    ids = pieces.got.encode("a<|turn|>b    c", add_special_tokens=False)
    assert ids == [*pieces.model.encode("a"), count, *pieces.model.encode("b"), count + 1, *pieces.model.encode("c")]


def test_pieces_with_merges_are_those_of_the_pipeline(tmp_path):
    """Gemma 4: as its tokenizer.json has it."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    named = [*special, *(f"<0x{n:02X}>" for n in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=named, limit_alphabet=60, show_progress=False)
    backend.train_from_iterator(CORPUS * 2, trainer)
    backend = tokenizers.Tokenizer.from_str(_without_added(backend, special))
    vocab = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    kinds = {"<unk>": UNKNOWN} | dict.fromkeys(special[:3], CONTROL)
    file = write(
        tmp_path / "x.gguf",
        {
            "model": "gemma4",
            "tokens": vocab,
            "token_type": [kinds.get(token, BYTE if token.startswith("<0x") else NORMAL) for token in vocab],
            "scores": [-1000.0] * len(vocab),
            "merges": [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]],
            "bos_token_id": 2,
            "eos_token_id": 1,
            "unknown_token_id": 3,
            "add_space_prefix": False,
            "add_bos_token": True,
        },
    )
    got = gguf_tokenizer(file)
    for text in [*TRICKY, *CORPUS]:
        assert got.encode(text, add_special_tokens=False) == backend.encode(text).ids, text
        assert got.decode(got.encode(text)) == text.replace("▁", " ")
    assert got.encode("a")[0] == 2


def _without_added(backend: tokenizers.Tokenizer, special: list[str]) -> str:
    """Bytes are tokens of the model, and none that text is searched for."""
    data = json.loads(backend.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in special]
    return json.dumps(data)


# special tokens


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
@pytest.mark.parametrize("bos", [None, True, False])
@pytest.mark.parametrize("eos", [None, True])
def test_encode_adds_bos_and_eos_as_the_file_or_else_the_kind_says(tmp_path, pre, bos, eos):
    values = metadata(trained("gpt-2"), pre, add_bos_token=bos, add_eos_token=eos)
    got = gguf_tokenizer(write(tmp_path / "x.gguf", values))
    ids = got.encode("Hi")
    expected = pre in ("llama-bpe", "tekken") if bos is None else bos
    assert (ids[0] == got.bos_id) == expected and (ids[-1] == values["eos_token_id"]) == bool(eos)
    assert got.encode("Hi", add_special_tokens=False) == ids[expected : len(ids) - bool(eos)]
    assert got.decode(ids) == "Hi"


def test_bos_may_be_any_text(tmp_path):
    values = metadata(trained("gpt-2"), "gpt-2", add_bos_token=True)
    values["tokens"][values["bos_token_id"]] = "$A:1 <s:0> é"
    got = gguf_tokenizer(write(tmp_path / "x.gguf", values))
    assert got.encode("a")[0] == got.bos_id == values["bos_token_id"]


def test_eos_ids_are_those_of_the_file_and_ends_of_turns(tmp_path):
    backend = trained("gpt-2")
    bos, end, turn = (backend.token_to_id(token) for token in SPECIAL)
    for more, want in (
        ({}, {end, turn}),
        ({"eot_token_id": bos}, {end, bos}),
        ({"eos_token_id": None, "eot_token_id": turn, "eom_token_id": 3}, {turn, 3}),
    ):
        assert gguf_tokenizer(write(tmp_path / "x.gguf", metadata(backend, "gpt-2") | more)).eos_ids == want
    values = metadata(backend, "gpt-2", eos_token_id=None)
    values["token_type"] = [NORMAL] * len(values["tokens"])  # a word that looks like the end of a turn is none
    assert gguf_tokenizer(write(tmp_path / "x.gguf", values)).eos_ids == frozenset()


@pytest.mark.parametrize(
    "ends",
    [
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        ("<end_of_turn>", "<eos>"),
        ("<turn|>", "<eos>", "<|tool_response>"),
        ("[EOS]", "<|im_end|>", "[EOT]"),
    ],
    ids=["Llama 3", "Gemma 3", "Gemma 4", "Kimi K2"],
)
def test_eos_ids_have_the_ends_that_a_file_has_no_key_for(tmp_path, ends):
    """Released models have them in a list, of which a file names the first."""
    backend = trained("gpt-2")
    values = metadata(backend, "gpt-2", eos_token_id=backend.get_vocab_size())
    count = backend.get_vocab_size()
    values["tokens"] = [*(f"no {t}" if t in SPECIAL else t for t in values["tokens"][:count]), *ends]
    kinds = [USER_DEFINED if token == "<|tool_response>" else CONTROL for token in ends]  # Gemma's is to be shown
    values["token_type"] = [*values["token_type"][:count], *kinds]
    got = gguf_tokenizer(write(tmp_path / "x.gguf", values))
    assert got.eos_ids == {count + n for n in range(len(ends))}


def test_eos_ids_of_harmony_are_not_the_end_of_a_message(tmp_path):
    backend = trained("gpt-2")
    marks = ["<|return|>", "<|call|>", "<|channel|>"]
    assert "<|end|>" in SPECIAL
    values = metadata(backend, "gpt-2", eos_token_id=backend.get_vocab_size())
    values["tokens"] = [*values["tokens"][: backend.get_vocab_size()], *marks]
    values["token_type"] = [*values["token_type"][: backend.get_vocab_size()], *[CONTROL] * len(marks)]
    got = gguf_tokenizer(write(tmp_path / "x.gguf", values))
    assert got.eos_ids == {got.backend.token_to_id(mark) for mark in marks[:2]}


def test_unused_ids_have_no_text_and_types_may_be_absent(tmp_path):
    values = metadata(trained("gpt-2"), "gpt-2")
    got = gguf_tokenizer(write(tmp_path / "x.gguf", values))
    count = len(values["tokens"])
    assert got.vocab_size == count - 3 and got.decode([count - 1]) == ""
    plain = gguf_tokenizer(write(tmp_path / "x.gguf", values | {"token_type": None}))
    assert plain.vocab_size == count and len(plain.encode("<|bos|>")) > 1


def test_chat_template_is_that_of_the_file(tmp_path):
    values = metadata(trained("gpt-2"), "gpt-2")
    template = "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}{{ eos_token }}"
    file = write(
        tmp_path / "x.gguf", values, chat_template=template, chat_template__tool_use="tools", chat_templates="x"
    )
    got = gguf_tokenizer(file)
    messages = [{"role": "user", "content": "hi"}]
    assert got.has_chat_template and got.apply_chat_template(messages) == "<|bos|>[hi]<|end|>"
    assert got.apply_chat_template(messages, tools=[]) == "tools"
    assert not gguf_tokenizer(write(tmp_path / "x.gguf", values)).has_chat_template
    broken = gguf_tokenizer(write(tmp_path / "x.gguf", values, chat_template="{% if"))
    with pytest.raises(CheckpointError, match="x.gguf: tokenizer.chat_template"):
        broken.apply_chat_template(messages)


# what is refused


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": "bert"}, r"tokenizer.ggml.model is 'bert', expected 'gpt2' \(byte-level BPE\)"),
        ({"model": "llama"}, r"tokenizer.ggml.scores is missing, expected \d+ numbers, one per token"),
        ({"model": "llama", "scores": [1.0]}, "tokenizer.ggml.scores is an array of 1"),
        ({"model": "gemma4", "merges": None}, "tokenizer.ggml.merges is missing"),
        ({"model": "gemma4", "add_space_prefix": 1}, "add_space_prefix is 1, expected true or false"),
        ({"model": 3}, "tokenizer.ggml.model is 3"),
        ({"pre": "new-words"}, "tokenizer.ggml.pre is 'new-words', expected one of default, gpt-2, llama-bpe"),
        ({"pre": 3}, "tokenizer.ggml.pre is 3"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing, expected the vocabulary"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens is 'abc'"),
        ({"tokens": [1, 2, 3]}, "tokenizer.ggml.tokens is an array of 3"),
        ({"tokens": ["a"], "token_type": [UNUSED]}, "tokenizer.ggml.tokens is an array of 1, expected a vocabulary"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "tokens 0 and 2 are both 'a', expected each once"),
        ({"tokens": ["a", ""], "token_type": None}, "token 1 is empty"),
        ({"token_type": [1, 1]}, r"token_type is an array of 2, expected \d+ integers"),
        ({"token_type": 1}, "token_type is 1"),
        ({"token_type": [0.5]}, "token_type is an array of 1"),
        ({"merges": None}, "tokenizer.ggml.merges is missing, expected the merges"),
        ({"merges": [3]}, "tokenizer.ggml.merges is an array of 1"),
        ({"merges": ["ab"]}, "merge 0 is 'ab', expected two tokens that make a third"),
        ({"merges": [""]}, "merge 0 is ''"),
        ({"merges": ["q東 x"]}, "merge 0 is 'q東 x'"),
        ({"merges": ["x x x"]}, "merge 0 is 'x x x'"),
        ({"bos_token_id": 10**6}, r"bos_token_id is 1000000, expected a token id from 0 to"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eot_token_id": "</s>"}, "eot_token_id is '</s>'"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing, expected a token: add_bos_token"),
        ({"add_bos_token": 1}, "add_bos_token is 1, expected true or false"),
    ],
    ids=range(29),
)
def test_gguf_tokenizer_refuses_by_name(tmp_path, changes, expected):
    file = write(tmp_path / "x.gguf", metadata(trained("gpt-2"), "gpt-2") | changes)
    with pytest.raises(CheckpointError, match=expected) as raised:
        gguf_tokenizer(file)
    assert str(raised.value).startswith(f"{file.path}: ") and "\n" not in str(raised.value)


def test_a_chat_template_that_is_no_text_is_refused(tmp_path):
    file = write(tmp_path / "x.gguf", metadata(trained("gpt-2"), "gpt-2"), chat_template=3)
    with pytest.raises(CheckpointError, match="tokenizer.chat_template is 3, expected a chat template"):
        gguf_tokenizer(file)


@settings(max_examples=150)
@given(
    tokens=st.lists(st.text(max_size=3), max_size=6),
    merges=st.lists(st.text("ab \0é", max_size=4), max_size=3),
    types=st.lists(st.integers(-1, 7), max_size=6) | st.none(),
    pre=st.sampled_from([*PRE, "x"]),
    bos=st.integers(-1, 6) | st.none(),
)
def test_gguf_tokenizer_survives_any_metadata(tmp_path_factory, tokens, merges, types, pre, bos):
    values = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges, "bos_token_id": bos}
    with contextlib.suppress(CheckpointError):
        got = gguf_tokenizer(write(tmp_path_factory.getbasetemp() / "any.gguf", values))
        assert isinstance(got.decode(got.encode("ab é<a>")), str)
