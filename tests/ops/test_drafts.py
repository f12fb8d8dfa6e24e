"""Drafts that a device verifies and makes by itself: hand values, and what is refused."""

from typing import Any

import numpy as np
import pytest

from penstock import ops
from penstock.errors import InvalidArgument, ShapeError
from penstock.ops.drafts import made_up
from tests.ops.common import run_on


def i32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def ahead() -> np.ndarray:
    """Slot 0: 10 positions, of which 2 were accepted last, token 5 and drafts 6, 7, 8; slot 2: 4, 1, 9, draft 3."""
    return i32([10, 2, 5, 6, 7, 8], [0, 0, 0, 0, 0, 0], [4, 1, 9, 3, -1, -1])


def test_draft_rows_by_hand() -> None:
    known = i32([-1, 0, 0], [0, 0, 0], [20, 3, 11])
    tokens, positions, at, lengths, accepted = ops.draft_rows(ahead(), i32(2, -1, 0), known, 2)
    assert tokens.reshape(3, 3).tolist() == [[9, 3, -1], [-1, -1, -1], [11, -1, -1]]
    assert positions.reshape(3, 3).tolist() == [[4, 5, 6], [-1, -1, -1], [20, 21, 22]]
    assert at.reshape(3, 3).tolist() == [[5, 6, 7], [-1, -1, -1], [21, 22, 23]]
    assert lengths.tolist() == [7, 0, 23] and accepted.tolist() == [1, 0, 3]


def accepted(drawn: np.ndarray, tokens: np.ndarray, slots: np.ndarray, chance: float = -1.0) -> tuple[Any, ...]:
    table, B = ahead(), len(slots)
    positions = i32(*[at + j for at in (10, 4, 30)[:B] for j in range(len(drawn) // B)])
    given = (np.arange(B, dtype=np.int64), np.full((B, 3), chance, np.float32), 12)
    return table, *ops.accept_drafts(drawn, table, tokens, positions, slots, *given)


def test_accept_drafts_by_hand() -> None:
    """The first draft of two; all; none of a slot of −1; a draft that is none is never accepted."""
    drawn = i32(6, 3, 8, 1, 2, 3, 4, 4, 4)
    table, sequence, wanted, at = accepted(drawn, i32(5, 6, 7, 9, 1, 2, 0, 0, 0), i32(0, 2, -1))
    assert drawn.tolist() == [6, 3, -1, 1, 2, 3, -1, -1, -1]
    assert sequence.tolist() == [0, 0, -1, 1, 1, 1, -1, -1, -1]
    assert wanted.tolist() == [1, 5, -1] and at.tolist() == [13, 8, -1]
    assert table.tolist() == [[12, 2, 3, -1, -1, -1], [0, 0, 0, 0, 0, 0], [7, 3, 3, -1, -1, -1]]
    drawn = i32(-1, 4, 4)
    table, _, wanted, _ = accepted(drawn, i32(5, -1, 4), i32(0))
    assert drawn.tolist() == [-1, -1, -1] and wanted.tolist() == [0] and table[0].tolist()[:3] == [11, 1, -1]


def test_accept_drafts_tells_what_is_not_finite() -> None:
    drawn = i32(6, -2, 8)
    table, *_ = accepted(drawn, i32(5, 6, 7), i32(0))
    assert drawn.tolist() == [6, -2, -1] and table[0].tolist()[:3] == [12, 2, -2]


def test_accept_drafts_by_made_up_chances() -> None:
    for chance, want in ((1.0, [6, 7, 2]), (0.0, [0, -1, -1])):
        drawn = i32(0, 1, 2)
        accepted(drawn, i32(5, 6, 7), i32(0), chance)
        assert drawn.tolist() == want
    drawn = i32(11, 1, 2)  # the draft itself is drawn and does not count: another token of the vocabulary
    accepted(drawn, i32(5, 11, 7), i32(0), 0.0)
    assert drawn.tolist() == [0, -1, -1]


def test_made_up_counts_as_often_as_it_says() -> None:
    found = [made_up(seed, position, 0.7) for seed in (1, -5, 2**64 - 2) for position in range(3000)]
    assert abs(np.mean(found) - 0.7) < 0.02
    assert not made_up(3, 4, 0.0) and made_up(3, 4, 1.0)


def test_chain_draft_by_hand() -> None:
    table = ahead()
    tokens, positions, lengths, at = ops.chain_draft(i32(40, 41, -2), table, i32(2, -1, 0), 1)
    assert tokens.tolist() == [40, -1, 0] and positions.tolist() == [5, -1, 11]
    assert lengths.tolist() == [6, 0, 12] and at.tolist() == [7, -1, 13]
    assert table.tolist() == [[10, 2, 5, 6, 0, 8], [0, 0, 0, 0, 0, 0], [4, 1, 9, 3, 40, -1]]


def test_drafts_are_refused_by_name() -> None:
    slots, known, seed = i32(0, 2), np.zeros((2, 3), np.int32), np.zeros(2, np.int64)
    with pytest.raises(InvalidArgument, match=r"^draft_rows: drafts is 4, expected 1 to 3 \(columns of ahead\)"):
        ops.draft_rows(ahead(), slots, known, 4)
    with pytest.raises(ShapeError, match=r"^draft_rows: known has shape \(2, 2\), expected \(2, 3\)"):
        ops.draft_rows(ahead(), slots, known[:, :2].copy(), 2)
    with pytest.raises(InvalidArgument, match=r"^draft_rows: slots has 3, expected -1 to 2 \(3 slots\)"):
        ops.draft_rows(ahead(), i32(0, 3), known, 2)
    with pytest.raises(InvalidArgument, match="^chain_draft: slots has the same value twice"):
        ops.chain_draft(i32(1, 2), ahead(), i32(1, 1), 0)
    with pytest.raises(InvalidArgument, match=r"^chain_draft: place is 3, expected 0 to 2"):
        ops.chain_draft(i32(1, 2), ahead(), slots, 3)
    rows, chance = np.zeros(6, np.int32), np.zeros((2, 3), np.float32)
    with pytest.raises(ShapeError, match=r"^accept_drafts: drawn has shape \(5,\), expected 1 \+ k for each of 2"):
        ops.accept_drafts(rows[:5].copy(), ahead(), rows[:5], rows[:5], slots, seed, chance, 9)
    with pytest.raises(ShapeError, match=r"^accept_drafts: chance has shape \(2, 2\), expected \(2, 3\)"):
        ops.accept_drafts(rows.copy(), ahead(), rows, rows, slots, seed, chance[:, :2].copy(), 9)
    with pytest.raises(InvalidArgument, match=r"^accept_drafts: slots has 5"):
        run_on("reference", ops.accept_drafts, rows.copy(), ahead(), rows, rows, i32(0, 5), seed, chance, 9)
