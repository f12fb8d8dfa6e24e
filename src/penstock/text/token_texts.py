"""What single tokens stand for, as log probabilities and /tokenize show them."""

import functools

from penstock.errors import no_panic
from penstock.text.byte_level import BYTE_OF
from penstock.text.tokenizer import Tokenizer, is_byte_token


class TokenTexts:
    """Bytes and texts of a tokenizer's tokens as they stand inside a text, special ones by their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._byte_level = tokenizer.byte_level
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]  # some drop a space at the start of a text
        self._skip = len(self._decoded([]))
        self.bytes_of = functools.lru_cache(maxsize=1 << 16)(self._bytes_of)

    def text_of(self, token: int) -> str:
        """U+FFFD stands for bytes that are a part of a character."""
        return self.bytes_of(token).decode(errors="replace")

    def _bytes_of(self, token: int) -> bytes:
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level and all(character in BYTE_OF for character in piece):
            return bytes(BYTE_OF[character] for character in piece)
        if is_byte_token(piece):
            return bytes.fromhex(piece[3:5])
        return piece.encode() if self._byte_level else self._decoded([token])[self._skip :].encode()

    def _decoded(self, tokens: list[int]) -> str:
        with no_panic("decode"):
            return self._backend.decode([*self._before, *tokens], skip_special_tokens=False)
