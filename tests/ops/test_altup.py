"""AltUp's ops by hand and against torch."""

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from tests.ops.common import assert_refused, normal, zeros


@pytest.fixture(autouse=True)
def definition():
    with penstock.backend("reference"):
        yield


def test_altup_mix_by_hand():
    first, rest = np.array([[1, 2]], np.float32), np.array([[[10, 20]]], np.float32)
    scores, extra = np.arctanh(np.array([[0.5, -0.25]])).astype(np.float32), np.array([[100, 200]], np.float32)
    weight, bias = np.array([[2, 0], [0, 4], [0, 0], [2, 4]], np.float32), np.array([0, 1, 3, 4], np.float32)
    y, others = ops.altup_mix(first, rest, scores, weight, bias)  # factors 1, 0, 3, 4
    np.testing.assert_allclose(y, [[1, 2]], rtol=1e-6)
    np.testing.assert_allclose(others, [[[43, 86]]], rtol=1e-6)
    bias = np.array([0, 1, 2, -1, 0, 0.5], np.float32)
    y, others = ops.altup_mix(first, rest, scores, np.zeros((6, 2), np.float32), bias, extra)
    np.testing.assert_array_equal(y, [[210, 420]])
    np.testing.assert_array_equal(others, [[[49, 98]]])


def test_altup_match_has_the_magnitude_of_the_other(rng):
    x, like = normal(rng, 4, 33), normal(rng, 4, 33, scale=5)
    y = ops.altup_match(x, like)
    np.testing.assert_allclose(np.mean(y**2, axis=1), np.mean(like**2, axis=1), rtol=1e-5)
    np.testing.assert_allclose(y / x, np.repeat(y[:, :1] / x[:, :1], 33, axis=1), rtol=1e-5)
    small = ops.altup_match(x * np.float32(1e-6), like)  # divided by √1e-5 at least
    np.testing.assert_allclose(small, x * 1e-6 * np.sqrt(np.mean(like**2, axis=1, keepdims=True) / 1e-5), rtol=1e-5)
    assert not ops.altup_match(np.zeros_like(x), like).any()


def test_gaussian_topk_matches_torch(rng):
    x = normal(rng, 3, 500)
    wide = torch.from_numpy(x).double()
    cut = wide.mean(-1, keepdim=True) + wide.std(-1, keepdim=True, unbiased=False) * 1.6448536269514722
    y = ops.gaussian_topk(x, 1.6448536269514722)
    np.testing.assert_allclose(y, torch.relu(wide - cut).numpy(), atol=1e-6)
    assert 0.02 < np.mean(y > 0) < 0.08


MIX = {"first": zeros(5, 6), "rest": zeros(5, 2, 6), "scores": zeros(5, 3), "weight": zeros(9, 3), "bias": zeros(9)}


@pytest.mark.parametrize(
    ("name", "call", "change", "error", "message"),
    [
        ("altup_mix", MIX, {"rest": zeros(5, 2, 5)}, ShapeError, "rest has shape (5, 2, 5), expected (5, 2, 6)"),
        ("altup_mix", MIX, {"rest": zeros(5, 12)}, ShapeError, "rest has shape (5, 12), expected [T, P - 1, D]"),
        ("altup_mix", MIX, {"extra": zeros(5, 6)}, ShapeError, "weight has shape (9, 3), expected (12, 3) (4 factors"),
        ("altup_mix", MIX, {"scores": zeros(5, 2)}, ShapeError, "scores has shape (5, 2), expected (5, 3) (one per st"),
        ("altup_mix", MIX, {"first": zeros(5, 6, dtype="float16")}, DTypeError, "first has dtype float16, expected"),
        (
            "altup_match",
            {"x": zeros(2, 3)},
            {"like": zeros(2, 4)},
            ShapeError,
            "like has shape (2, 4), expected (2, 3)",
        ),
        ("gaussian_topk", {"x": zeros(2, 3)}, {"factor": float("inf")}, InvalidArgument, "factor is inf, expected a"),
        (
            "gaussian_topk",
            {"factor": 1.0},
            {"x": zeros(2, 0)},
            ShapeError,
            "x has shape (2, 0), expected no empty axis",
        ),
    ],
)
def test_altup_names_the_argument_and_what_it_expected(name, call, change, error, message):
    assert_refused(ops.REGISTRY[name], {**call, **change}, error, message)
