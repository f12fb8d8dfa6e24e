"""Drafts that a device verifies, accepts and makes by itself, step by step, without the host.

What it knows of the sequence in a slot is a row of `ahead` int32 [S, 3 + D]: the positions it has, how many of them
were accepted of the run kept last (its recurrent states do not hold those yet: ops/delta.py), the token behind them,
and up to D drafts of the tokens behind that one, −1 where there is none. A step of it runs 1 + k tokens of each of B
sequences: the known token and k drafts (`draft_rows`), draws the model's own token behind each of them, takes those up
to the first that is no draft (`accept_drafts`), and has a head draft k more, one behind the other (`chain_draft`).
"""

from __future__ import annotations

import numpy as np

from penstock.errors import InvalidArgument, ShapeError
from penstock.ops import check
from penstock.ops.array import Array, Spec
from penstock.ops.op import op
from penstock.ops.sampling import philox4x32

LENGTH, ACCEPTED, TOKEN, DRAFTS = 0, 1, 2, 3  # columns of a row of `ahead`

_MADE_UP = 1  # the third word of the counter, which noise of ids has 0 in


def _check_ahead(ahead: Spec, slots: Spec) -> int:
    """B."""
    check.dtype("int32", ahead=ahead, slots=slots)
    check.axes("[S, 3 + D]", 2, ahead=ahead)
    check.axes("[B]", 1, slots=slots)
    if ahead.shape[1] <= DRAFTS:
        raise ShapeError(f"ahead has shape {ahead.shape}, expected at least {DRAFTS + 1} columns (3 + D)")
    return slots.shape[0]


def _check_slots(ahead: Array, slots: Array) -> None:
    check.in_range("slots", slots, -1, ahead.shape[0], f"{ahead.shape[0]} slots")
    check.unique("slots", slots[slots >= 0])


def _rows(ahead: Spec, slots: Spec, known: Spec, drafts: int) -> tuple[Spec, ...]:
    B = _check_ahead(ahead, slots)
    check.dtype("int32", known=known)
    check.shape((B, 3), "length, accepted and token of each of slots", known=known)
    most = ahead.shape[1] - DRAFTS
    if not 1 <= drafts <= most:
        raise InvalidArgument(f"drafts is {drafts}, expected 1 to {most} (columns of ahead)")
    row, one = Spec((B * (1 + drafts),), "int32"), Spec((B,), "int32")
    return row, row, row, one, one


@op(infer=_rows, check=_check_slots)
def draft_rows(
    ahead: Array, slots: Array, known: Array, drafts: int
) -> tuple[Array, Array, Array, Array, Array]:
    """What a step of 1 + k = drafts tokens of each of B sequences reads: their tokens, positions and the positions that
    are drawn behind them, int32 [B (1 + k)]; lengths with the run, and accepted tokens of the run before, int32 [B].

    ahead int32 [S, 3 + D], slots int32 [B] (−1: none; its rows are −1, its lengths 0). known int32 [B, 3]: length,
    accepted and token of a sequence of which the host says them, which has no drafts then; length −1: those of `ahead`.
    """
    B, n = len(slots), 1 + drafts
    tokens = np.full((B, n), -1, np.int32)
    positions = np.full((B, n), -1, np.int32)
    lengths, accepted = np.zeros(B, np.int32), np.zeros(B, np.int32)
    for b, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        told = known[b, LENGTH] >= 0
        length, accepted[b], tokens[b, 0] = known[b] if told else ahead[slot, :DRAFTS]
        if not told:
            tokens[b, 1:] = ahead[slot, DRAFTS : DRAFTS + drafts]
        positions[b] = length + np.arange(n)
        lengths[b] = length + n
    at = np.where(positions >= 0, positions + 1, -1).astype(np.int32)
    return tokens.reshape(-1), positions.reshape(-1), at.reshape(-1), lengths, accepted


def _accepted(
    drawn: Spec, ahead: Spec, tokens: Spec, positions: Spec, slots: Spec, seed: Spec, chance: Spec, vocab: int
) -> tuple[Spec, ...]:
    B = _check_ahead(ahead, slots)
    check.dtype("int32", drawn=drawn, tokens=tokens, positions=positions)
    check.dtype("int64", seed=seed)
    check.dtype("float32", chance=chance)
    check.axes("[B (1 + k)]", 1, drawn=drawn)
    T = drawn.shape[0]
    if B == 0 or T % B or not 2 <= T // B <= ahead.shape[1] - DRAFTS + 1:
        most = ahead.shape[1] - DRAFTS
        raise ShapeError(f"drawn has shape {drawn.shape}, expected 1 + k for each of {B} slots, k from 1 to {most}")
    check.shape((T,), "as drawn", tokens=tokens, positions=positions)
    check.shape((B,), "one for each of slots", seed=seed)
    check.shape((B, ahead.shape[1] - DRAFTS), "one for each draft of each of slots", chance=chance)
    check.positive(vocab=vocab)
    return Spec((T,), "int32"), Spec((B,), "int32"), Spec((B,), "int32")


def made_up(seed: int, position: int, chance: float) -> bool:
    """Whether a draft for this position counts by a made-up chance: u < chance, u = (word + 1/2) · 2^−32 of the first
    word of Philox 4x32-10 with the counter (position, 0, 1, 0) and the key (seed, seed >> 32).
    """
    seed &= 0xFFFFFFFFFFFFFFFF
    word = philox4x32((position, 0, _MADE_UP, 0), (seed & 0xFFFFFFFF, seed >> 32))[0]
    return (word + 0.5) * 2.0**-32 < chance


@op(infer=_accepted, check=_check_slots, writes=("drawn", "ahead"))
def accept_drafts(
    drawn: Array, ahead: Array, tokens: Array, positions: Array, slots: Array, seed: Array, chance: Array, vocab: int
) -> tuple[Array, Array, Array]:
    """Takes of the tokens `drawn` int32 [B (1 + k)] behind each of `tokens` those up to the first that is not the draft
    behind it, and makes the others −1. The sequence in slots[b] has the row of its last token and all before it then,
    and the token itself, and no drafts: ahead[slots[b]] says so.

    Gives sequence int32 [B (1 + k)], b for each row that counts and −1 for others; wanted int32 [B], the last row that
    counts, and at int32 [B], the position that is drafted behind it; −1 for a slot of −1.
    chance float32 [B, D], for benchmarks: where chance[b, j] is not negative, the draft at place j counts with it
    (`made_up` by seed int64 [B]), whatever was drawn, and if it does not a token of the `vocab` is drawn that differs.
    """
    B = len(slots)
    n = len(drawn) // B
    sequence = np.full(len(drawn), -1, np.int32)
    wanted, at = np.full(B, -1, np.int32), np.full(B, -1, np.int32)
    for b, slot in enumerate(slots.tolist()):
        low, count = b * n, 0
        same = slot >= 0
        while same:
            row = low + count
            draft = int(tokens[row + 1]) if count + 1 < n else -1
            if draft >= 0 and chance[b, count] >= 0:
                if made_up(int(seed[b]), int(positions[row]) + 1, float(chance[b, count])):
                    drawn[row] = draft
                elif drawn[row] == draft:
                    drawn[row] = (draft + 1) % vocab
            same = draft >= 0 and int(drawn[row]) == draft
            sequence[row] = b
            count += 1
        drawn[low + count : low + n] = -1
        if slot >= 0:
            length = positions[low] + count
            ahead[slot] = -1
            ahead[slot, :DRAFTS] = length, count, drawn[low + count - 1]
            wanted[b], at[b] = low + count - 1, length + 1
    return sequence, wanted, at


def _chained(drawn: Spec, ahead: Spec, slots: Spec, place: int) -> tuple[Spec, ...]:
    B = _check_ahead(ahead, slots)
    check.dtype("int32", drawn=drawn)
    check.shape((B,), "one for each of slots", drawn=drawn)
    most = ahead.shape[1] - DRAFTS
    if not 0 <= place < most:
        raise InvalidArgument(f"place is {place}, expected 0 to {most - 1} (columns of ahead)")
    return (Spec((B,), "int32"),) * 4


@op(infer=_chained, check=_check_slots, writes=("ahead",))
def chain_draft(drawn: Array, ahead: Array, slots: Array, place: int) -> tuple[Array, Array, Array, Array]:
    """Puts what a head has drawn, int32 [B], at a place of the drafts in ahead[slots]; what it reads to draft behind
    that: tokens, positions, lengths of its own cache and the positions it draws, int32 [B]; −1 (lengths 0) for a slot
    of −1. One that is negative, since logits were not finite, becomes 0.
    """
    tokens, positions, at = (np.full(len(slots), -1, np.int32) for _ in range(3))
    lengths = np.zeros(len(slots), np.int32)
    for b, slot in enumerate(slots.tolist()):
        if slot >= 0:
            tokens[b] = ahead[slot, DRAFTS + place] = max(0, int(drawn[b]))
            positions[b] = ahead[slot, LENGTH] + place
            lengths[b], at[b] = positions[b] + 1, positions[b] + 2
    return tokens, positions, lengths, at
