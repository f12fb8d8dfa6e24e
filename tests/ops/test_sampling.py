"""sample_tokens: hand values, the host's Sampler on thousands of rows, modes, and refusals."""

from typing import Any

import numpy as np
import pytest

from penstock.engine.sampling import Sampler, SamplingParams
from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.ops import sample_tokens
from penstock.ops.sampling import FEW, MODES, philox4x32
from tests.ops.common import assert_refused, i32, run_on

DEVICES = pytest.mark.parametrize("device", ["reference", "cpu"])


def rows(rng: np.random.Generator, count: int, V: int, mode: str = "full") -> tuple[np.ndarray, np.ndarray, list[Any]]:
    """Logits [count, V], positions [count] and the parameters of each row.

    Peaked, flat, rounded (many ties), masked, a single one possible, all equal; edges of every parameter that the mode
    allows.
    """
    logits, parameters = np.empty((count, V), np.float32), []
    for row in logits:
        normal = rng.standard_normal(V)
        forms = [
            lambda x: x * 8,
            lambda x: x * 0.01,
            lambda x: x * 2,
            lambda x: np.round(x * 3),
            lambda x: np.where(rng.random(V) < 0.9, -np.inf, x),
            lambda x: np.full(V, -np.inf),
            lambda x: np.where(x > 0, 0.0, -0.0),
        ]
        row[:] = forms[rng.integers(len(forms))](normal)
        row[rng.integers(V)] = rng.standard_normal()
        chosen = {
            "temperature": rng.choice([0, 1e-310, 1e-3, 0.5, 0.7, 1, 1.3, 20, 1e300]),
            "top_k": rng.choice([0, 0, 1, 2, 5, 20, 64, V // 2, V - 1, V, 10**6]),
            "top_p": rng.choice([1, 1, 0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999]),
            "min_p": rng.choice([0, 0, 0.01, 0.3, 1]),
            "seed": rng.integers(0, 2**64, dtype=np.uint64),
        }
        if mode == "greedy":
            chosen["temperature"] = 0.0
        if mode == "plain":
            chosen |= {"top_k": 0, "top_p": 1.0}
        if mode == "top_k":
            chosen["top_k"] = rng.integers(1, FEW + 1)
        parameters.append({name: value.item() if hasattr(value, "item") else value for name, value in chosen.items()})
    return logits, rng.integers(0, 2**31 - 1, count).astype(np.int32), parameters


def arguments(logits: np.ndarray, positions: np.ndarray, parameters: list[Any]) -> dict[str, np.ndarray]:
    """The call of sample_tokens for such rows, without its mode."""
    kinds = {"temperature": "float64", "top_k": "int32", "top_p": "float64", "min_p": "float64", "seed": "uint64"}
    columns = {name: np.array([p[name] for p in parameters], kind) for name, kind in kinds.items()}
    columns["seed"] = columns["seed"].view(np.int64)
    return {"logits": logits, "positions": positions, **columns}


def expected(logits: np.ndarray, positions: np.ndarray, parameters: list[Any]) -> list[int]:
    """The tokens of engine.sampling."""
    each = zip(logits, positions, parameters, strict=True)
    return [Sampler(SamplingParams(**p), x.size).sample(x, int(position)).token for x, position, p in each]


def call(logits, position=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, mode="full"):
    """One set of parameters for all rows of logits."""
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    B = len(logits)
    return {
        "logits": logits,
        "positions": np.full(B, position, np.int32),
        "temperature": np.full(B, float(temperature)),
        "top_k": np.full(B, top_k, np.int32),
        "top_p": np.full(B, top_p),
        "min_p": np.full(B, min_p),
        "seed": np.full(B, seed, np.int64),
        "mode": mode,
    }


def test_philox4x32_gives_the_published_words():
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert uniform(0, 0) == (0xE169C58D6627E8D5 >> 11) / 2**53


@DEVICES
@pytest.mark.parametrize("V, count", [(1, 20), (37, 1500), (1003, 600), (9001, 60)])
def test_sample_tokens_gives_the_token_of_the_host(device, V, count, rng):
    logits, positions, parameters = rows(rng, count, V)
    got = run_on(device, sample_tokens, **arguments(logits, positions, parameters))
    np.testing.assert_array_equal(got, expected(logits, positions, parameters))


@DEVICES
def test_sample_tokens_greedy_takes_the_lowest_id_of_equal_ones(device):
    logits = [[1, 5, -2, 5], [-np.inf, -3, -np.inf, -4], [-0.0, 0.0, -1, 0.0]]
    assert run_on(device, sample_tokens, **call(logits, temperature=0)).tolist() == [1, 1, 0]


@DEVICES
def test_sample_tokens_by_hand(device):
    # uniform(0, 0) is 0.8805…: of equal weights 4 · 0.88 = 3.5 exceeds three of them, 2 · 0.88 one, 3 · 0.88 two
    assert 0.88 < uniform(0, 0) < 0.881
    equal = [0, 0, -np.inf, 0, 0]
    assert run_on(device, sample_tokens, **call(equal)).tolist() == [4]
    assert run_on(device, sample_tokens, **call(equal, top_k=2)).tolist() == [1]
    assert run_on(device, sample_tokens, **call(equal, top_p=0.75)).tolist() == [3]
    assert run_on(device, sample_tokens, **call(equal, top_k=4, top_p=0.5)).tolist() == [1]
    steps = np.log(np.float32([0.5, 0.25, 0.125]))
    assert run_on(device, sample_tokens, **call(steps)).tolist() == [2]  # 0.875 · 0.8805 = 0.7704
    assert run_on(device, sample_tokens, **call(steps, min_p=0.4)).tolist() == [1]
    assert run_on(device, sample_tokens, **call(steps, min_p=0.6)).tolist() == [0]


@DEVICES
def test_sample_tokens_marks_inactive_and_broken_rows(device):
    logits = np.zeros((6, 3), np.float32)
    logits[1, 1], logits[2, 2], logits[3], logits[4, 0] = np.nan, np.inf, -np.inf, np.nan
    for temperature in (0.0, 1.0):
        given = call(logits, temperature=temperature)
        given["positions"][4:] = -1
        given["temperature"][5], given["top_p"][5], given["top_k"][5] = np.nan, 7, -3  # nobody looks at these
        assert run_on(device, sample_tokens, **given)[1:].tolist() == [-2, -2, -2, -1, -1]


@pytest.mark.parametrize("mode", MODES)
def test_sample_tokens_gives_the_same_token_in_every_mode_that_allows_it(mode, rng):
    logits, positions, parameters = rows(rng, 60, 300, mode)
    given = arguments(logits, positions, parameters)
    np.testing.assert_array_equal(sample_tokens(**given, mode=mode), sample_tokens(**given, mode="full"))
    assert len({p["seed"] >> 63 for p in parameters}) == 2  # all 64 bits of a seed occur


def test_sample_tokens_uses_the_bits_of_the_seed():
    logits = np.zeros(1000, np.float32)
    for seed in (1, 2**32, 2**63, 2**64 - 1):
        want = Sampler(SamplingParams(temperature=1.0, seed=seed), 1000).sample(logits, 2**31 - 1).token
        given = call(logits, 2**31 - 1, seed=int(np.uint64(seed).view(np.int64)))
        assert sample_tokens(**given).tolist() == [want]


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"logits": np.zeros(4, np.float32)}, ShapeError, "logits has shape (4,), expected [B, V]"),
        ({"logits": np.zeros((2, 0), np.float32)}, ShapeError, "logits has shape (2, 0), expected no empty axis"),
        ({"logits": np.zeros((2, 4))}, DTypeError, "logits has dtype float64, expected float32"),
        ({"positions": i32(1, 2, 3)}, ShapeError, "positions has shape (3,), expected (2,) (rows of logits)"),
        ({"seed": np.zeros(2, np.uint64)}, DTypeError, "seed has dtype uint64, expected int64"),
        ({"top_p": np.ones(2, np.float32)}, DTypeError, "top_p has dtype float32, expected float64"),
        ({"top_k": np.zeros(2, np.int64)}, DTypeError, "top_k has dtype int64, expected int32"),
        ({"temperature": np.array([1, np.nan])}, InvalidArgument, "temperature has nan, expected a finite number"),
        ({"temperature": np.array([1, np.inf])}, InvalidArgument, "temperature has inf, expected a finite number"),
        ({"top_p": np.array([1, 1.5])}, InvalidArgument, "top_p has 1.5, expected 0 to 1"),
        ({"min_p": np.array([-0.1, 0])}, InvalidArgument, "min_p has -0.1, expected 0 to 1"),
        ({"top_k": i32(3, -2)}, InvalidArgument, "top_k has -2, expected 0 or more"),
        ({"mode": "fast"}, InvalidArgument, "mode is 'fast', expected one of 'greedy', 'plain', 'top_k', 'full'"),
        ({"mode": "greedy"}, InvalidArgument, "temperature has 1.0, expected 0 everywhere in mode 'greedy'"),
        ({"mode": "plain", "top_k": i32(0, 3)}, InvalidArgument, "top_k has 3 and top_p 1.0 in one row, expected"),
        ({"mode": "top_k", "top_k": i32(3, 0)}, InvalidArgument, f"top_k has 0, expected 1 to {FEW} in mode 'top_k'"),
    ],
    ids=str,
)
def test_sample_tokens_refuses(change, error, message):
    assert_refused(sample_tokens, call(np.zeros((2, 4), np.float32)) | change, error, message)
