"""Kimi's tiktoken file: ids by the definition and by the tiktoken package, special tokens, and damaged files."""

import base64
import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CheckpointError
from penstock.text.tokenizer import Tokenizer
from tests.text.test_gguf_tokenizer import KIMI

regex = pytest.importorskip("regex")
TEXTS = [
    "The penstock carries water down to the turbine, and the turbine's shaft turns.",
    "Größe, naïve, 東京都は日本の首都 and 😀😀 are words too; 漢字かな交じり文 12345678 ¼½",
    "    indented\n\tcode = {'a': 1}\r\n\r\n  DON'T we'LL I'Ve ́é\n",
    "aaaaaaaaaaaaaaaaaaab ababababab bababa a\x00\xff𝔘𝔫𝔦 ǅ Ⅷ",
]


def words(text: str) -> list[str]:
    return [match.group() for match in regex.finditer(KIMI, text, regex.VERSION1)]


def trained(count: int = 500) -> dict[bytes, int]:
    """Ranks that plain byte-pair encoding finds in the texts, and some whose parts are merged in other orders."""
    ranks = {bytes([n]): n for n in range(256)}
    split = [[bytes([byte]) for byte in word.encode()] for text in TEXTS for word in words(text)]
    while len(ranks) < count:
        pairs = Counter(pair for word in split for pair in pairwise(word))
        if not pairs:
            break
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        ranks[left + right] = len(ranks)
        split = [merged(word, left, right) for word in split]
    for token in (b"aba", b"bab", b"ababa", " 東京".encode(), b"turbine's"):
        ranks.setdefault(token, len(ranks))
    return ranks


def merged(word: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    made, n = [], 0
    while n < len(word):
        both = word[n : n + 2] == [left, right]
        made.append(left + right if both else word[n])
        n += 1 + both
    return made


def defined(ranks: dict[bytes, int], text: str) -> Iterator[int]:
    """The lowest rank of two neighbours first, the first of equals; a word that is a token is not cut."""
    for word in words(text):
        whole = word.encode()
        parts = [whole] if whole in ranks else [bytes([byte]) for byte in whole]
        while True:
            found = [(ranks[a + b], n) for n, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
            if not found:
                break
            _, n = min(found)
            parts[n : n + 2] = [parts[n] + parts[n + 1]]
        yield from (ranks[part] for part in parts)


RANKS = trained()
SETTINGS: dict[str, Any] = {
    "tokenizer_class": "TikTokenTokenizer",
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "added_tokens_decoder": {
        str(len(RANKS) + n): {"content": name, "special": special, "normalized": False}
        for n, name, special in ((0, "[BOS]", True), (1, "[EOS]", True), (2, "<|im_end|>", True), (8, "<think>", False))
    },
    "chat_template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
}


def lines(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def folder(path: Path, content: bytes | None = None, **settings: Any) -> Path:
    (path / "tiktoken.model").write_bytes(lines(RANKS) if content is None else content)
    (path / "tokenizer_config.json").write_text(json.dumps(SETTINGS | settings))
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_definition(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer.from_folder(folder(tmp_path))
    found = tokenizer.encode(text)
    assert found == list(defined(RANKS, text))
    assert tokenizer.decode(found) == text
    stream = tokenizer.detokenizer()
    assert "".join(map(stream.add, found)) + stream.finish() == text


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_tiktoken(tmp_path: Path, text: str) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=RANKS, special_tokens={})
    assert Tokenizer.from_folder(folder(tmp_path)).encode(text) == encoding.encode(text)


def test_lines_may_be_in_any_order(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder(tmp_path, lines(dict(reversed(RANKS.items())))))
    assert tokenizer.encode(TEXTS[0]) == list(defined(RANKS, TEXTS[0]))


def test_special_tokens_have_the_names_of_the_settings_or_reserved_ones(tmp_path: Path) -> None:
    tokenizer, base = Tokenizer.from_folder(folder(tmp_path)), len(RANKS)
    assert tokenizer.vocab_size == base + 256
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (base, base + 1, {base + 1})
    text = f"a<|im_end|>b<think>c<|reserved_token_{base + 255}|>"
    a, b, c = (RANKS[letter] for letter in (b"a", b"b", b"c"))
    assert tokenizer.encode(text) == [a, base + 2, b, base + 8, c, base + 255]
    assert tokenizer.decode(tokenizer.encode(text)) == "ab<think>c"
    assert tokenizer.encode_chat(tokenizer.chat_text([{"role": "user", "content": "a"}])) == [a, base + 2]
    reserved = f"<|reserved_token_{base + 256}|>"  # a model has no embedding for it: it is text
    assert tokenizer.encode(reserved) == list(defined(RANKS, reserved))


def test_a_whole_tokenizer_counts_before_it(tmp_path: Path) -> None:
    made = Tokenizer.from_folder(folder(tmp_path)).backend
    (tmp_path / "tiktoken.model").write_bytes(b"nonsense")
    made.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode(TEXTS[1]) == list(defined(RANKS, TEXTS[1]))


GOOD = lines(RANKS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "tiktoken.model: has no token for the byte 0, expected one for each of the 256"),
        (GOOD.replace(b"AA== 0\n", b""), "has no token for the byte 0, expected one for each of the 256"),
        (GOOD + b"!!! 7\n", "expected a token in base64 and its rank"),
        (GOOD + b"YWI=\n", "expected a token in base64 and its rank"),
        (GOOD + b"YWI= x\n", "expected a token in base64 and its rank"),
        (GOOD[:-4], "expected a token in base64 and its rank|has the rank"),
        (GOOD + b"AA== 999\n", "has a token again: "),
        (GOOD + b" 999\n", "has no token: "),
        (GOOD + b"enp6eno= 9999999\n", "has the rank 9999999 where .* would follow: ranks are ids, without a gap"),
        (GOOD + b"enp6eno= 3\n", "has the rank 3 where 4 would follow: ranks are ids, without a gap"),
        (GOOD + b"enp6eno= -1\n", "has the rank -1 where 0 would follow"),
    ],
    ids=range(11),
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        Tokenizer.from_folder(folder(tmp_path, content))
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, "tokenizer_class is 'LlamaTokenizer', expected 'TikTokenTokenizer'"),
        ({"tokenizer_class": None}, "tokenizer_class is None, expected 'TikTokenTokenizer'"),
        (
            {"added_tokens_decoder": {str(len(RANKS) + n): {"content": "<x>"} for n in (0, 1)}},
            "added_tokens_decoder gives '<x>' id .*, expected a name that no other token has",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_folder(folder(tmp_path, **settings))
