"""Kimi's tokenizer file: tokens in base64 with their ranks, which are their ids and the order in which they merge.

Two neighbours merge if they are a token together, those of the lowest rank first; a word that is a token is that token.
How words are cut is not in the file: it is that of Kimi's models, which name their class. Behind the ranks come 256
special tokens, by the names of tokenizer_config.json, where it has none <|reserved_token_N|>.
"""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from penstock.errors import CheckpointError
from penstock.text.byte_level import CHARACTER_OF
from penstock.text.words import KIMI
from penstock.weights.files import read_bounded, short

FILE = "tiktoken.model"
CLASS = "TikTokenTokenizer"
_SPECIAL = 256
_LIMIT = 64 << 20  # bytes; Kimi's has 2.8 million


def read_tiktoken(path: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a file, with what tokenizer_config.json says. Raises CheckpointError, naming file and line."""
    if (found := settings.get("tokenizer_class")) != CLASS:
        raise CheckpointError(
            f"{path.with_name('tokenizer_config.json')}: tokenizer_class is {short(found)}, expected {CLASS!r}, "
            f"Kimi's: {path.name} does not say how text is cut into words"
        )
    ranks = _ranks(path)
    text = {token: "".join(map(CHARACTER_OF.__getitem__, token)) for token in ranks}
    vocab = {text[token]: rank for token, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab, _merges(ranks, text), ignore_merges=True))
    words = pre_tokenizers.Split(Regex(KIMI), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    named = settings.get("added_tokens_decoder")
    for number in range(len(ranks), len(ranks) + _SPECIAL):
        token = named.get(str(number)) if isinstance(named, Mapping) else None
        content = token.get("content") if isinstance(token, Mapping) else None
        special = not isinstance(token, Mapping) or token.get("special") is not False
        name = content if isinstance(content, str) and content else f"<|reserved_token_{number}|>"
        backend.add_tokens([AddedToken(name, special=special, normalized=False)])
        if backend.token_to_id(name) != number:
            raise CheckpointError(
                f"{path.with_name('tokenizer_config.json')}: added_tokens_decoder gives {short(name)} id {number}, "
                f"expected a name that no other token has"
            )
    return backend


def _ranks(path: Path) -> dict[bytes, int]:
    """Ranks by token: 0, 1, … without a gap, all single bytes among the tokens."""
    found: dict[bytes, int] = {}
    for n, line in enumerate(read_bounded(path, _LIMIT).splitlines(), 1):
        if not line:
            continue
        token, _, number = line.partition(b" ")
        try:
            piece, rank = base64.b64decode(token, validate=True), int(number)
        except (binascii.Error, ValueError):
            what = f"line {n} is {short(line)}"
            raise CheckpointError(f"{path}: {what}, expected a token in base64 and its rank") from None
        if not piece or piece in found:
            raise CheckpointError(f"{path}: line {n} has {'a token again' if piece else 'no token'}: {short(line)}")
        found[piece] = rank
    if missing := [byte for byte in range(256) if bytes([byte]) not in found]:
        raise CheckpointError(f"{path}: has no token for the byte {missing[0]}, expected one for each of the 256")
    ordered = dict(sorted(found.items(), key=lambda item: item[1]))
    for n, rank in enumerate(ordered.values()):
        if rank != n:
            raise CheckpointError(f"{path}: has the rank {rank} where {n} would follow: ranks are ids, without a gap")
    return ordered


def _merges(ranks: Mapping[bytes, int], text: Mapping[bytes, str]) -> list[tuple[str, str]]:
    """Every pair of tokens that is a token, in the order of its rank."""
    return [
        (text[token[:cut]], text[token[cut:]])
        for token in ranks
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
