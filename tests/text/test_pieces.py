"""Long texts: encoded in pieces they give the tokens of the whole, and those that are too long are refused early."""

import contextlib
import string
import sys
import unicodedata
from unittest import mock

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

import penstock
from penstock.errors import InvalidArgument, PenstockError, TooManyTokens
from penstock.text import pieces
from penstock.text import tokenizer as module
from penstock.text.gguf_tokenizer import PRE
from penstock.text.pieces import Cuts, bytes_of_a_token, fewest_tokens
from penstock.text.tokenizer import Tokenizer

CORPUS = [
    "The penstock carries water down to the turbine; it's 1234.5 m long, isn't it?\n\n  def f(x):\n\treturn x2\r\n",
    "Größe, naïve, 東京。大きい、さかな 값 ﬁ Ⅷ and 😀😀 are words too ... <|im_start|>user 2nd I'LL",
    "don't stop. im_start a| b> c_d e1 f\n g, h; i: j!",
]
QWEN35 = PRE["qwen2"].patterns[0].replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
ADDED = ["<|im_start|>", "<|im_end|>", "<think>", "<｜tool▁call｜>", "wide token", "end"]


def byte_level(patterns, normalizer=None, bos=False, digits=False, **options):
    """A byte-level tokenizer, trained so that merges want to reach across every cut."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=bos))
    backend.normalizer = normalizer
    split = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    split += [pre_tokenizers.Digits(individual_digits=False)] if digits else []
    last = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": False, **options})
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, last])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ADDED])
    if bos:
        number = backend.token_to_id("<|im_start|>")
        backend.post_processor = processors.TemplateProcessing(
            "<|im_start|> $A", "<|im_start|> $A $B", [("<|im_start|>", number)]
        )
    return backend


def sentencepiece(prepend=None, cutter=None, crossing=()):
    """Pieces with ▁ for spaces and bytes for what is missing, as in Gemma's and Mistral's tokenizers."""
    letters = [*string.ascii_letters, *string.digits, *".,;é東", "\n"]
    base = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("▁", "▁"), ("▁▁", "▁▁"), ("a", "b"), *crossing]
    vocab = {piece: n for n, piece in enumerate([*base, *("".join(pair) for pair in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if not isinstance(cutter, pre_tokenizers.Metaspace):
        before = [] if prepend is None else [normalizers.Prepend(prepend)]
        backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    if cutter is not None:
        backend.pre_tokenizer = cutter
    backend.add_special_tokens(["<unk>", "<s>", "</s>", *(AddedToken(token, normalized=False) for token in ADDED)])
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", "$A $B", [("<s>", 1), ("</s>", 2)])
    return backend


CUT = {
    "demo": penstock.load().tokenizer.backend,
    "gpt-2": byte_level((), use_regex=True),
    "gpt-2 with a prefix space": byte_level((), use_regex=True, add_prefix_space=True),
    "llama-3": byte_level(PRE["llama-bpe"].patterns, bos=True),
    "qwen-2": byte_level(PRE["qwen2"].patterns, normalizers.NFC()),
    "qwen-3.5": byte_level((QWEN35,), normalizers.NFC()),
    "smollm": byte_level(PRE["smollm"].patterns, normalizers.NFKC()),
    "digits": byte_level((), use_regex=True, digits=True),
    "deepseek-3": byte_level(DEEPSEEK3, normalizers.Sequence([])),
    "gemma": sentencepiece(cutter=pre_tokenizers.Split(" ", "merged_with_previous")),
    "no cutter": sentencepiece(),
    "metaspace": sentencepiece(cutter=pre_tokenizers.Metaspace()),
    "metaspace of one word": sentencepiece(cutter=pre_tokenizers.Metaspace(split=False)),
    "metaspace first": sentencepiece(cutter=pre_tokenizers.Metaspace(prepend_scheme="first")),
}
WHOLE = {
    "mistral": sentencepiece(prepend="▁"),
    "tokens across spaces": sentencepiece(crossing=[("b", "▁")]),
    "unknown pattern": byte_level((r"\w+ \w+",)),
    "no words": byte_level((r"\p{N}{1,3}",)),
    "no pre-tokenizer": tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, [])),
    "words": tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b")),
}
TOKENIZERS = {name: Tokenizer(backend) for name, backend in (CUT | WHOLE).items()}

PARTS = [
    *("the", "a", "ab", "naïve", "I", "東京", "さかな", "값", "क़", "का", "ᄀ", "ᅡ", "Ω", "K", "ﬁ", "Ⅷ", "²", "ª", "и"),
    *(" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u0085", "\x1c", "▁", "\u0301", "\u0338", "\u093c", "\u200b"),
    *("1", "12", "345678", ".", ",", ";", "'", "'s", "'LL", "_", "|", "<", ">", "=", "/", "，", "。", "・", "¨", "😀"),
    *(*ADDED, "<|im_", "start|>", "wide ", "token", "</s>"),
]
TEXTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=24).map("".join) | st.text(max_size=24)


@contextlib.contextmanager
def small(size):
    with mock.patch.object(pieces, "PIECE", size), mock.patch.object(module, "PIECE", size):
        yield


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=120)
@given(text=TEXTS, size=st.integers(2, 9), special=st.booleans())
@example(text="the <|im_start|>the 12.naïve the\nⅧ2 end the", size=2, special=True)
def test_encode_in_pieces_gives_the_tokens_of_the_whole(name, text, size, special):
    tokenizer = TOKENIZERS[name]
    with small(size):
        try:
            found = tokenizer.encode(text, add_special_tokens=special)
        except PenstockError:
            assert name == "words"  # that needs a token for every word
            return
    assert found == tokenizer.backend.encode(text, add_special_tokens=special).ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_cuts_are_made_where_they_are_known_to_be_safe(name):
    text = "the quick ab fox\n" * 8
    with small(4):
        found = list(Cuts(TOKENIZERS[name].backend).pieces(text))
    assert "".join(found) == text
    assert len(found) > 15 if name in CUT else len(found) == 1


@pytest.mark.parametrize(
    "token", [AddedToken("ab", rstrip=True), AddedToken("ab", single_word=True), AddedToken("a b", normalized=True)]
)
def test_added_tokens_that_depend_on_what_follows_forbid_cuts(token):
    backend = byte_level(PRE["qwen2"].patterns, normalizers.NFC())
    backend.add_tokens([token])
    with small(4):
        assert len(list(Cuts(backend).pieces("the quick ab fox " * 8))) == 1


def test_a_piece_without_a_place_to_cut_goes_on_to_the_next_one():
    with small(4):
        found = list(Cuts(CUT["qwen-2"]).pieces("one" + "7" * 50 + "two 8" + "x" * 9))
    assert found == ["one" + "7" * 50 + "two", " 8" + "x" * 9]


# how few tokens a text can have


@pytest.mark.parametrize("name", [name for name in CUT if "gpt" not in name] + ["mistral"])
@settings(max_examples=40)
@given(text=TEXTS)
def test_fewest_tokens_is_never_more_than_there_are(name, text):
    most = bytes_of_a_token(TOKENIZERS[name].backend)
    assert most is not None
    assert fewest_tokens(text, most) <= len(TOKENIZERS[name].backend.encode(text, add_special_tokens=False).ids)
    again = text * 50
    assert fewest_tokens(again, most) <= len(TOKENIZERS[name].backend.encode(again, add_special_tokens=False).ids)


def test_bytes_of_a_token_are_those_of_the_longest():
    assert bytes_of_a_token(CUT["deepseek-3"]) == len("<｜tool▁call｜>".encode()) == 19
    assert bytes_of_a_token(WHOLE["mistral"]) == 19


def test_bytes_of_a_token_are_unknown_where_text_can_vanish():
    stripped = byte_level(PRE["qwen2"].patterns)
    stripped.add_tokens([AddedToken("<mask>", lstrip=True)])
    incomplete = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    incomplete.pre_tokenizer = pre_tokenizers.ByteLevel()
    shrinking = byte_level(PRE["qwen2"].patterns, normalizers.Strip())
    removing = byte_level(())
    removing.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])
    for backend in (stripped, incomplete, shrinking, removing, WHOLE["words"], WHOLE["no pre-tokenizer"]):
        assert bytes_of_a_token(backend) is None


def test_no_character_shrinks_more_than_is_allowed_for():
    for form in ("NFC", "NFKC"):
        for number in range(sys.maxunicode + 1):
            character = chr(number)
            if not unicodedata.is_normalized(form, character):
                assert len(character.encode()) <= 4 * len(unicodedata.normalize(form, character).encode())


def test_encode_refuses_a_text_that_is_too_long_untokenized():
    tokenizer = Tokenizer(CUT["qwen-2"])
    with mock.patch.object(tokenizer, "_ids", side_effect=AssertionError), pytest.raises(TooManyTokens, match="100"):
        tokenizer.encode("x" * (19 * 101), limit=100)


@pytest.mark.parametrize("name", CUT)
def test_encode_stops_once_the_limit_is_passed(name):
    tokenizer, text = TOKENIZERS[name], "the ab 12 " * 400
    count = len(tokenizer.encode(text))
    assert len(tokenizer.encode(text, limit=count)) == count
    with small(16), mock.patch.object(Tokenizer, "_ids", autospec=True, side_effect=Tokenizer._ids) as encoded:
        with pytest.raises(TooManyTokens, match="expected at most 300$"):
            tokenizer.encode(text, limit=300)
        assert encoded.call_count < 150
        with pytest.raises(TooManyTokens):
            tokenizer.encode(text, limit=count - 1)


def test_encode_begins_no_word_without_end_where_there_is_a_limit():
    tokenizer, text = Tokenizer(CUT["qwen-2"]), "one two " + "7" * 300
    with small(8), mock.patch.object(module, "RUN", 256):
        assert len(tokenizer.encode(text)) > 300
        with pytest.raises(InvalidArgument, match="^encode: text has a word of 30[0-9] characters, .* 256$"):
            tokenizer.encode(text, limit=10**6)
    whole = Tokenizer(WHOLE["unknown pattern"])
    with small(8), mock.patch.object(module, "RUN", 256):
        assert whole.encode(text, limit=10**6) == whole.encode(text)


# panics


def test_a_panic_of_the_library_is_an_error_of_penstock():
    backend = byte_level((r"(a+)+$",))  # the regular expressions' library gives up, and panics
    with pytest.raises(PenstockError, match="^encode: text of 41 characters: .*retry-limit"):
        Tokenizer(backend).encode("a" * 40 + "b")


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_no_panic_passes(raised):
    tokenizer = Tokenizer(CUT["gpt-2"])
    with mock.patch.object(tokenizer, "backend") as backend:
        backend.encode.side_effect = backend.decode.side_effect = raised
        for call in (lambda: tokenizer.encode("a"), lambda: tokenizer.decode([1])):
            with pytest.raises(raised):
                call()


def test_a_panic_while_decoding_is_an_error_of_penstock():
    class Panic(BaseException):
        """As pyo3's, which is no Exception."""

    tokenizer = Tokenizer(CUT["metaspace"])
    with mock.patch.object(tokenizer, "backend") as backend:
        backend.decode.side_effect = Panic("index out of bounds")
        with pytest.raises(PenstockError, match="^decode: .*index out of bounds"):
            tokenizer.decode([1])
