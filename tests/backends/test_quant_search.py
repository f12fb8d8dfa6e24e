"""Scales and biases by search: against plain rounding, a NumPy search, and what an error does to the products."""

import numpy as np
import pytest

from penstock.backends.cpu.quant_search import _REACH, _TURNS, search_into
from penstock.dtypes import numpy_dtype
from penstock.quant import QuantizedTensor, dequantize, quantize, unpack_codes


def searched(w: np.ndarray, h: np.ndarray, bits: int, gs: int, feedback: np.ndarray | None = None) -> QuantizedTensor:
    rows, K = w.shape
    packed = np.full((rows, K * bits // 32), 0xFFFFFFFF, np.uint32)
    scales, biases = (np.full((rows, K // gs), np.nan, w.dtype) for _ in range(2))
    out = QuantizedTensor(packed, scales, biases, bits, gs)
    assert search_into(w, h, out, feedback) == -1
    return out


def errors(w: np.ndarray, made: QuantizedTensor, h: np.ndarray) -> np.ndarray:
    """Weighted error of each group."""
    off = h * (w.astype(np.float64) - dequantize(made)) ** 2
    return off.reshape(*off.shape[:-1], -1, made.group_size).sum(axis=-1)


def by_definition(w: np.ndarray, h: np.ndarray, bits: int, gs: int, plain: QuantizedTensor) -> np.ndarray:
    """The least weighted error of each group over the same candidates, in float64 but for the format of s and b."""
    n, least = 2**bits - 1, errors(w, plain, h)
    groups, weights = (
        w.astype(np.float64).reshape(len(w), -1, gs),
        np.broadcast_to(h.reshape(-1, gs), (len(w), len(h) // gs, gs)),
    )
    lo, hi = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    for reach in _REACH:
        s, b = reach * (hi - lo) / n, (lo + hi) / 2 - reach * (hi - lo) / 2
        for _ in range(_TURNS):
            q = np.clip(np.rint((groups - b) / s), 0, n)
            sh, sq, sqq, sw, sqw = ((weights * x).sum(-1, keepdims=True) for x in (1, q, q * q, groups, q * groups))
            det = sh * sqq - sq * sq
            s = np.where(det > 1e-6 * sh * sqq, (sh * sqw - sq * sw) / det, s)
            b = np.where(det > 1e-6 * sh * sqq, (sw - s * sq) / sh, b)
        s, b = (x.astype(w.dtype).astype(np.float64) for x in (s, b))
        q = np.clip(np.rint((groups - b) / s), 0, n)
        least = np.minimum(least, (weights * (groups - (q * s + b)) ** 2).sum(-1))
    return least


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bits, gs", [(2, 32), (3, 64), (4, 64), (8, 128)])
def test_search_is_never_worse_than_rounding_and_as_good_as_its_definition(
    rng: np.random.Generator, dtype: str, bits: int, gs: int
) -> None:
    w = (rng.standard_normal((19, 3 * gs)) ** 3).astype(numpy_dtype(dtype))
    h = rng.gamma(0.5, size=3 * gs).astype(np.float32)
    plain, made = quantize(w, bits, gs), searched(w, h, bits, gs)
    got, before = errors(w, made, h), errors(w, plain, h)
    assert (got <= before * (1 + 1e-5)).all()
    assert got.sum() < before.sum() * (0.9 if bits < 8 else 1)
    want = by_definition(w, h, bits, gs, plain)
    assert np.mean(got <= want * (1 + 1e-3)) > 0.95  # sums in float32 may prefer another of two equal candidates
    assert abs(got.sum() / want.sum() - 1) < 0.01


def test_search_of_groups_without_choice(rng: np.random.Generator) -> None:
    w = np.zeros((3, 64), np.float32)
    w[1] = 5.0
    w[2, :32] = np.where(rng.random(32) < 0.5, -1, 1)
    made = searched(w, np.ones(64, np.float32), 4, 32)
    np.testing.assert_allclose(dequantize(made), w, atol=1e-6)


def test_search_with_weights_of_nothing_is_rounding(rng: np.random.Generator) -> None:
    w = rng.standard_normal((4, 64)).astype(np.float32)
    made, plain = searched(w, np.zeros(64, np.float32), 4, 64), quantize(w, 4, 64)
    for a, b in zip(made.arrays, plain.arrays, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_search_names_the_row_that_is_not_finite(bad: float) -> None:
    w = np.ones((40, 64), np.float32)
    w[33, 50] = bad
    out = quantize(np.ones((40, 64), np.float32), 4, 32)
    assert search_into(w, np.ones(64, np.float32), out) == 33


def feedback_of(x: np.ndarray) -> np.ndarray:
    H = x.T.astype(np.float64) @ x
    U = np.linalg.cholesky(np.linalg.inv(H + 0.01 * np.trace(H) / len(H) * np.eye(len(H)))).T
    return np.ascontiguousarray(U / np.diag(U)[:, None], np.float32)


def test_feedback_of_independent_channels_changes_nothing(rng: np.random.Generator) -> None:
    w, h = rng.standard_normal((21, 96)).astype(np.float32), rng.random(96, np.float32)
    alone, fed = searched(w, h, 3, 32), searched(w, h, 3, 32, np.eye(96, dtype=np.float32))
    for a, b in zip(alone.arrays, fed.arrays, strict=True):
        np.testing.assert_array_equal(a, b)


def test_feedback_makes_products_of_related_channels_better(rng: np.random.Generator) -> None:
    x = rng.standard_normal((500, 12)) @ rng.standard_normal((12, 128)) + 0.3 * rng.standard_normal((500, 128))
    x = x.astype(np.float32)
    w = rng.standard_normal((37, 128)).astype(np.float32)
    h = np.ascontiguousarray((x * x).mean(axis=0))
    off = [
        np.linalg.norm(x @ (w - dequantize(made)).T)
        for made in (quantize(w, 3, 32), searched(w, h, 3, 32), searched(w, h, 3, 32, feedback_of(x)))
    ]
    assert off[1] < 0.95 * off[0] and off[2] < 0.6 * off[1]


def test_feedback_follows_its_formula(rng: np.random.Generator) -> None:
    """Codes of one row, one weight after the other, with the scales that came out."""
    x = rng.standard_normal((200, 8)) @ rng.standard_normal((8, 64)) + rng.standard_normal((200, 64))
    U, w = feedback_of(x.astype(np.float32)), rng.standard_normal((1, 64)).astype(np.float32)
    made = searched(w, np.ones(64, np.float32), 4, 32, U)
    row, codes = w[0].astype(np.float64), unpack_codes(made.packed, 4)[0]
    for j in range(64):
        s, b = float(made.scales[0, j // 32]), float(made.biases[0, j // 32])
        q = np.clip(np.rint((row[j] - b) / s), 0, 15)
        assert codes[j] == q or abs((row[j] - b) / s % 1 - 0.5) < 1e-3  # a tie in float32
        row[j + 1 :] -= (row[j] - (codes[j] * s + b)) * U[j, j + 1 :]
