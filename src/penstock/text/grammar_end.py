"""The shortest way to the end of a text that a grammar holds, as far as it is JSON."""

from __future__ import annotations

from typing import Any

# What is tried, in this order, inside of a string and elsewhere: what closes something, then the least of everything.
_IN_STRING = (b'"', b"0", b"a")
_ELSEWHERE = (b"}", b"]", b"null", b'"', b":", b"0", b",", b"false", b"{", b"[")
_MOST_BRACKETS = 64  # in a row: more than a schema has levels are text of a string
_BEGINNINGS = ((False, b""), (True, b""), (True, b"n"))  # elsewhere, in a string, behind a backslash of one


def shortest_end(matcher: Any, tokens: Any, most: int) -> list[int] | None:
    """Tokens after which the text may end, few if not the fewest; None if `most` of them do not do.

    matcher: llguidance's, which stays as it is; tokens: its tokenizer. Strings, arrays and objects that are open are
    closed, and what is still required gets the shortest value. Other text than JSON, such as reasoning before it, is
    not ended.
    """
    if matcher.is_accepting():
        return []
    for in_string, first in _BEGINNINGS:
        trial, found = matcher.deep_copy(), []
        if first and not _taken(trial, tokens, first, found):
            continue
        brackets = 0
        while len(found) <= most and brackets <= _MOST_BRACKETS:
            if trial.is_accepting():
                return found
            written = _next(trial, tokens, in_string, found)
            if written is None:
                break
            in_string = _in_string(written, in_string)
            brackets = brackets + 1 if written in (b"}", b"]") else 0
    return None


def _next(trial: Any, tokens: Any, in_string: bool, found: list[int]) -> bytes | None:
    """Go on with the first of the pieces that fits, else with what has to follow, else with any token."""
    for piece in _IN_STRING if in_string else _ELSEWHERE:
        if _taken(trial, tokens, piece, found):
            return piece
    forced = bytes(trial.compute_ff_bytes())
    if forced and _taken(trial, tokens, forced, found):
        return forced
    words = trial.compute_bitmask()
    for at, byte in enumerate(words):
        if byte:
            token = at * 8 + (byte & -byte).bit_length() - 1
            found.append(token)
            return tokens.decode_bytes([token]) if trial.consume_token(token) else None
    return None


def _taken(trial: Any, tokens: Any, piece: bytes, found: list[int]) -> bool:
    ids = tokens.tokenize_bytes(piece)
    if trial.validate_tokens(ids) < len(ids):
        return False
    found += ids
    return trial.consume_tokens(ids)


def _in_string(written: bytes, inside: bool) -> bool:
    """Whether JSON is inside of a string behind these bytes, if it was before them."""
    escaped = False
    for byte in written:
        if escaped:
            escaped = False
        elif inside and byte == ord("\\"):
            escaped = True
        elif byte == ord('"'):
            inside = not inside
    return inside
