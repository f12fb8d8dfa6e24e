"""Rows of tensors that are made of others: any range of them is that part of the whole."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from penstock.convert.rows import (
    BlockScaled,
    Cast,
    Dequantized,
    Files,
    Half,
    Heads,
    PlusOne,
    Rows,
    Shaped,
    Stacked,
    Stored,
    Whole,
    row_count,
    runs,
)
from penstock.dtypes import bfloat16
from penstock.errors import CheckpointError
from penstock.quant import Format, dequantize, quantize


class Given:
    """An array as rows."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.array.reshape(row_count(self), -1)[start:stop]


def check(rows: Rows, want: np.ndarray) -> None:
    """Shape, dtype, and every way to cut the rows in three."""
    assert (rows.shape, rows.dtype) == (want.shape, want.dtype)
    flat, count = want.reshape(row_count(rows), -1), row_count(rows)
    for a in range(1, count):
        for b in range(a + 1, count):
            pieces = [rows.read(*cut) for cut in ((0, a), (a, b), (b, count))]
            assert all(piece.flags.c_contiguous for piece in pieces)
            np.testing.assert_array_equal(np.concatenate(pieces), flat)


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(bfloat16)


def test_stored_reads_from_the_middle_of_a_file(rng: np.random.Generator, tmp_path: Path) -> None:
    array = numbers(rng, 3, 4, 5)
    (tmp_path / "x").write_bytes(b"abc" + array.tobytes() + b"d")
    check(Stored(Files(), tmp_path / "x", 3, array.shape, array.dtype), array)


def test_stored_refuses_a_file_that_changed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(100))
    rows = Stored(Files(), path, 0, (10, 10), np.dtype(np.uint8))
    rows.read(0, 5)
    path.write_bytes(bytes(50))
    with pytest.raises(CheckpointError, match=r"x: has 50 bytes, expected the 100 it had"):
        rows.read(5, 10)


def test_stacked_and_half_and_shaped(rng: np.random.Generator) -> None:
    parts = [numbers(rng, 3, 8) for _ in range(4)]
    check(Stacked(tuple(map(Given, parts))), np.stack(parts))
    joined = numbers(rng, 3, 6, 8)
    check(Half(Given(joined), second=False), joined[:, :3])
    check(Half(Given(joined), second=True), joined[:, 3:])
    conv = numbers(rng, 7, 1, 4)
    check(Shaped(Given(conv), (7, 4, 1)), conv.reshape(7, 4, 1))


def test_heads_are_cut_and_turned(rng: np.random.Generator) -> None:
    whole = numbers(rng, 3 * 5, 4)  # 3 heads, 2 rows of keys and 3 of values each
    per_head = whole.reshape(3, 5, 4)
    check(Heads(Given(whole), 3, 0, 2, turned=True), np.ascontiguousarray(per_head[:, :2].swapaxes(1, 2)))
    check(Heads(Given(whole), 3, 2, 5, turned=False), np.ascontiguousarray(per_head[:, 2:]))


def test_plus_one_is_rounded_once(rng: np.random.Generator) -> None:
    for dtype in (np.float32, np.float16, bfloat16):
        array = rng.standard_normal((5, 6)).astype(dtype)
        check(PlusOne(Given(array)), (array.astype(np.float64) + 1).astype(np.float32).astype(dtype))


def test_block_scaled_over_the_edges_of_blocks(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.convert.rows.BLOCK", 4)
    codes = rng.integers(0, 127, (10, 7)).astype(np.uint8)
    scales = rng.random((3, 2), np.float32)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    wide = scales.repeat(4, axis=0)[:10].repeat(4, axis=1)[:, :7]
    check(BlockScaled(Given(codes), Given(scales)), (values * wide).astype(bfloat16))


def test_cast_refuses_what_does_not_fit(rng: np.random.Generator) -> None:
    array = rng.standard_normal((4, 3)).astype(np.float32)
    check(Cast(Given(array), np.dtype(np.float16), "w"), array.astype(np.float16))
    check(Cast(Given(array), bfloat16, "w"), array.astype(bfloat16))
    array[2, 1] = 70000
    with pytest.raises(CheckpointError, match=r"^w: holds 70000, expected at most 65504, the largest float16"):
        Cast(Given(array), np.dtype(np.float16), "w").read(0, 4)
    array[1, 2] = np.nan
    with pytest.raises(CheckpointError, match=r"^w: holds nan, expected finite numbers: damaged\?"):
        Cast(Given(array), np.dtype(np.float16), "w").read(0, 4)


def test_dequantized_rounds_as_the_scales_do(rng: np.random.Generator) -> None:
    made = quantize(numbers(rng, 2, 3, 64), 4, 32)
    parts = tuple(map(Given, made.arrays))
    check(Dequantized(parts, Format(4, 32), made.scales.dtype), dequantize(made, "bfloat16"))


def test_whole_is_made_once_and_let_go(rng: np.random.Generator) -> None:
    array, made = numbers(rng, 3, 2, 4), []

    def make() -> np.ndarray:
        made.append(1)
        return array

    rows = Whole(array.shape, array.dtype, make)
    np.testing.assert_array_equal(np.concatenate([rows.read(0, 2), rows.read(2, 6)]), array.reshape(6, 4))
    assert len(made) == 1
    rows.read(0, 6)
    assert len(made) == 2


def test_runs_split_at_matrices() -> None:
    assert list(runs(2, 9, 3)) == [(0, 2, 3), (1, 0, 3), (2, 0, 3)]
    assert list(runs(4, 5, 3)) == [(1, 1, 2)]
    assert list(runs(3, 3, 3)) == []
