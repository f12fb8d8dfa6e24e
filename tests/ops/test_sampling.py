"""sample_tokens: hand values, statistics, thousands of rows against the definition, edits, modes, and refusals;
token_logprobs.
"""

from typing import Any

import numpy as np
import pytest

from penstock.errors import DTypeError, InvalidArgument, ShapeError
from penstock.ops import sample_tokens, token_logprobs
from penstock.ops.sampling import FEW, MODES, gumbel, philox4x32
from tests.ops.common import assert_close, assert_refused, assert_same_bits, i32, run_on

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


def edits(rng: np.random.Generator, B: int, V: int, S: int = 3, M: int = 2) -> dict[str, np.ndarray]:
    """Tables of S and M rows and who uses them: some rows nothing, some one of the two, some both."""
    counts = rng.integers(0, 9, (S, V)) * (rng.random((S, V)) < 0.3)
    bias = rng.standard_normal((S, V)) * (rng.random((S, V)) < 0.1)
    penalties = np.stack([rng.uniform(0.5, 2, S), rng.uniform(-1, 1, S), rng.uniform(-0.5, 0.5, S)], axis=1)
    masks = rng.integers(-(2**31), 2**31, (M, -(-V // 32)))
    masks[:, 0] |= 1  # something is allowed
    return {
        "slots": rng.integers(-1, S, B).astype(np.int32),
        "counts": counts.astype(np.int32),
        "bias": bias.astype(np.float32),
        "penalties": penalties,
        "masked": rng.integers(-1, M, B).astype(np.int32),
        "masks": masks.astype(np.int32),
    }


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


def test_philox4x32_takes_arrays_of_counters():
    c = np.arange(5, dtype=np.uint64) + 2**32 - 3 & 0xFFFFFFFF
    together = np.stack(philox4x32((7, c, 0, 0), (2**32 - 1, 3)), axis=1)
    assert together.tolist() == [list(philox4x32((7, int(each), 0, 0), (2**32 - 1, 3))) for each in c]


def test_gumbel_is_made_of_the_published_words():
    words = np.array([0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8])
    np.testing.assert_allclose(gumbel(0, 0, np.arange(4)), -np.log(-np.log((words + 0.5) / 2**32)), rtol=1e-15)
    third = philox4x32((5, 2, 0, 0), (6, 7))[1]
    assert gumbel(7 << 32 | 6, 5, np.array([9])) == -np.log(-np.log((third + 0.5) / 2**32))


def test_gumbel_of_two_positions_ids_and_seeds_is_independent():
    n = 40_000
    ids = np.arange(n)
    each = [gumbel(1, 1, ids), gumbel(1, 2, ids), gumbel(2, 1, ids), gumbel(1 << 32, 1, ids), gumbel(1, 1, ids + n)]
    for noise in each:
        assert abs(noise.mean() - 0.57722) < 4 * 1.2825 / n**0.5
        assert abs(noise.std() - 1.2825) < 0.03
        assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 4 / n**0.5  # ids of one block of Philox, and of two
    correlations = np.corrcoef(each)[np.triu_indices(len(each), 1)]
    assert np.abs(correlations).max() < 4.5 / n**0.5


FREQUENCIES = [
    ({}, [0, 1, 2, 3, 4, 5]),
    ({"top_k": 3}, [1, 3, 4]),
    ({"top_p": 0.8}, [1, 3, 4]),
    ({"min_p": 0.5}, [1, 3]),
    ({"top_k": 4, "top_p": 0.9, "min_p": 0.01, "temperature": 2.0}, [1, 3, 4, 5]),
]


@DEVICES
@pytest.mark.parametrize("rules, kept", FREQUENCIES, ids=str)
def test_sample_tokens_draws_as_often_as_the_probabilities_say(device, rules, kept):
    check_frequencies(lambda **given: run_on(device, sample_tokens, **given), rules, kept, 4000)


def check_frequencies(draw: Any, rules: dict[str, float], kept: list[int], count: int) -> None:
    """Tokens of `count` seeds and positions against the probabilities of what is kept of six."""
    logits = np.log(np.float32([0.04, 0.4, 0.02, 0.3, 0.14, 0.1]))
    for name in ("positions", "seed"):
        given = call(np.tile(logits, (count, 1)), 3, seed=11, **rules)
        given[name][:] = np.arange(count)
        counts = np.bincount(draw(**given), minlength=6)
        weights = np.exp(logits[kept] / rules.get("temperature", 1.0))
        wanted = count * weights / weights.sum()
        assert counts.sum() == counts[kept].sum()
        # 99.9 % of right samplers stay below 20.5 with 5 degrees of freedom, and below that with fewer
        assert ((counts[kept] - wanted) ** 2 / wanted).sum() < 20.5


@pytest.mark.parametrize("V, count", [(1, 20), (37, 1500), (1003, 600), (9001, 60)])
def test_sample_tokens_gives_the_token_of_the_definition(V, count, rng):
    given = arguments(*rows(rng, count, V))
    got, want = (run_on(device, sample_tokens, **given) for device in ("cpu", "reference"))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("V, count", [(1, 30), (37, 500), (513, 300)])
def test_sample_tokens_edits_as_the_definition(V, count, rng):
    plain = arguments(*rows(rng, count, V))
    given = plain | edits(rng, count, V)
    got, want, unedited = (
        run_on(device, sample_tokens, **each) for device, each in (("cpu", given), ("reference", given), ("cpu", plain))
    )
    np.testing.assert_array_equal(got, want)
    assert V == 1 or (want != unedited).mean() > 0.2


@pytest.mark.parametrize("n", [0, 1, 5, 20])
def test_sample_tokens_gives_the_log_probabilities_of_the_definition(n, rng):
    B, V = 60, 301
    given = arguments(*rows(rng, B, V)) | edits(rng, B, V) | {"logprobs": n}
    given["positions"][:2] = -1
    given["logits"][2] = np.nan
    want = run_on("reference", sample_tokens, **given)
    got = tuple(np.full_like(array, -7 if array.dtype == np.int32 else np.nan) for array in want)
    run_on("cpu", sample_tokens, **given, out=got)
    for name, ours, theirs in zip(("tokens", "own", "ids", "top"), got, want, strict=True):
        assert_close(name, ours, theirs, 1e-13)
    assert want[2].shape == want[3].shape == (B, n)
    assert (want[1][:3] == -np.inf).all() and (want[2][:3] == -1).all()


@DEVICES
def test_sample_tokens_greedy_takes_the_lowest_id_of_equal_ones(device):
    logits = [[1, 5, -2, 5], [-np.inf, -3, -np.inf, -4], [-0.0, 0.0, -1, 0.0]]
    assert run_on(device, sample_tokens, **call(logits, temperature=0)).tolist() == [1, 1, 0]


def best(noise: Any, *ids: int) -> list[int]:
    return [max(ids, key=lambda i: noise[i])]


@DEVICES
@pytest.mark.parametrize("position", [0, 1, 2**31 - 1])
def test_sample_tokens_by_hand(device, position):
    noise = gumbel(0, position, np.arange(5))
    equal = [0, 0, -np.inf, 0, 0]
    for rules, kept in [({}, (0, 1, 3, 4)), ({"top_k": 2}, (0, 1)), ({"top_p": 0.75}, (0, 1, 3))]:
        assert run_on(device, sample_tokens, **call(equal, position, **rules)).tolist() == best(noise, *kept)
    assert run_on(device, sample_tokens, **call(equal, position, top_k=4, top_p=0.5)).tolist() == best(noise, 0, 1)
    steps = np.log(np.float32([0.5, 0.25, 0.125]))
    for rules, kept in [({}, (0, 1, 2)), ({"min_p": 0.4}, (0, 1)), ({"min_p": 0.6}, (0,))]:
        want = best(steps / 0.7 + noise[:3], *kept)
        rules = {name: p ** (1 / 0.7) for name, p in rules.items()}
        assert run_on(device, sample_tokens, **call(steps, position, temperature=0.7, **rules)).tolist() == want


def edge_of_min_p(count: int) -> dict[str, Any]:
    """Logits a ten-thousandth apart, of which min_p keeps six; a row for each position."""
    given = call(np.tile(-1e-4 * np.arange(20), (count, 1)), min_p=float(np.exp(-5.5e-4)), mode="plain")
    given["positions"][:] = np.arange(count)
    return given


@DEVICES
def test_sample_tokens_keeps_to_min_p_close_to_its_edge(device):
    got = run_on(device, sample_tokens, **edge_of_min_p(100))
    assert set(got.tolist()) == set(range(6))


@DEVICES
def test_sample_tokens_takes_the_lowest_id_of_equal_sums(device):
    ids = np.arange(400_000)
    words = np.choose((ids & 3).astype(np.intp), philox4x32((9, ids.astype(np.uint64) >> 2, 0, 0), (4, 0)))
    order = np.argsort(words, kind="stable")[::-1]
    equal = np.flatnonzero(np.diff(words[order].astype(np.int64)) == 0)[0]
    pair = np.sort(order[equal : equal + 2])  # two ids with the same word, so the same noise
    logits = np.full(pair[1] + 2, -np.inf, np.float32)
    logits[pair] = 1
    assert run_on(device, sample_tokens, **call(logits, 9, seed=4)).tolist() == [pair[0]]
    logits[pair[0]] = 0.999
    assert run_on(device, sample_tokens, **call(logits, 9, seed=4)).tolist() == [pair[1]]


@DEVICES
def test_sample_tokens_edits_by_hand(device):
    logits = [[3, -1, 2, -1, 0.5, 7]] * 4
    given = call(logits, temperature=0) | {
        "slots": i32(-1, 1, 1, -1),
        "counts": i32([9, 9, 9, 9, 9, 9], [1, 5, 4, 0, 1, 3]),
        "bias": np.float32([[9, 9, 9, 9, 9, 9], [0, 0, 0, 0, 1, -4]]),
        "penalties": np.array([[0.1, 9, 9], [2, 0.25, 0.5]]),
        "masked": i32(-1, -1, 1, 1),
        "masks": i32([-1], [0b010111]),
        "logprobs": 6,
    }
    tokens, own, ids, top = run_on(device, sample_tokens, **given)
    plain, x = np.array([3, -1, 2, -1, 0.5, 7]), np.array([1.5, -2 - 1.25, 2 - 1.25, -1, 0.75, 1.5 - 0.75])
    allowed = np.array([0, 0, 0, -np.inf, 0, -np.inf])
    for b, each in enumerate((plain, x, x + allowed, plain + allowed)):
        want = each - np.log(np.exp(each).sum())
        assert tokens[b] == each.argmax()
        assert_close("own", own[b], want.max(), 1e-15)
        ranked = np.argsort(-each, kind="stable")
        ranked = ranked[each[ranked] > -np.inf]
        assert ids[b].tolist() == [*ranked, *[-1] * (6 - ranked.size)]
        assert_close("top", top[b], [*want[ranked], *[-np.inf] * (6 - ranked.size)], 1e-15)


@DEVICES
def test_sample_tokens_marks_a_row_whose_mask_allows_nothing(device):
    masks = {"masked": i32(0, 1), "masks": i32([0, 0], [0, 1])}
    assert run_on(device, sample_tokens, **call(np.zeros((2, 33)), temperature=0), **masks).tolist() == [-2, 32]


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


@DEVICES
@pytest.mark.parametrize("seed", [1, 2**32, 2**63, 2**64 - 1])
def test_sample_tokens_uses_the_bits_of_the_seed(device, seed):
    want = np.argmax(gumbel(seed, 2**31 - 1, np.arange(1000)))
    given = call(np.zeros(1000, np.float32), 2**31 - 1, seed=int(np.uint64(seed).view(np.int64)))
    assert run_on(device, sample_tokens, **given).tolist() == [want]


@DEVICES
def test_sample_tokens_writes_every_output(device, rng):
    given = arguments(*rows(rng, 7, 41))
    out = np.full(7, -9, np.int32)
    assert run_on(device, sample_tokens, **given, out=out) is out
    assert_same_bits("tokens", out, run_on(device, sample_tokens, **given))
    assert (out >= 0).all()


TABLES = {
    "slots": i32(0, 1),
    "counts": np.zeros((2, 4), np.int32),
    "bias": np.zeros((2, 4), np.float32),
    "penalties": np.ones((2, 3)),
}


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
        ({"slots": i32(0, 0)}, ShapeError, "counts is None, expected an array with slots"),
        ({"masks": i32([1])}, ShapeError, "masks is an array, expected None without masked"),
        ({"masked": i32(0, 0), "masks": i32([1, 2])}, ShapeError, "masks has shape (1, 2), expected (1, 1) (32 ids"),
        ({"masked": i32(0, 1), "masks": i32([1])}, InvalidArgument, "masked has 1, expected -1 to 0 (rows of masks"),
        ({"masked": i32(0, -2), "masks": i32([1])}, InvalidArgument, "masked has -2, expected -1 to 0"),
        (TABLES | {"slots": i32(0, 2)}, InvalidArgument, "slots has 2, expected -1 to 1 (rows of counts, or −1)"),
        (TABLES | {"counts": i32([1, 2])}, ShapeError, "counts has shape (1, 2), expected (1, 4) (V of logits)"),
        (TABLES | {"bias": np.zeros((2, 3), "f4")}, ShapeError, "bias has shape (2, 3), expected (2, 4) (that of"),
        (TABLES | {"bias": np.zeros((2, 4))}, DTypeError, "bias has dtype float64, expected float32"),
        (TABLES | {"penalties": np.ones((2, 2))}, ShapeError, "penalties has shape (2, 2), expected (2, 3)"),
        (TABLES | {"penalties": np.zeros((2, 3))}, InvalidArgument, "penalties has a row in use that is not finite or"),
        ({"logprobs": 21}, InvalidArgument, "logprobs is 21, expected None or 0 to 20"),
        ({"logprobs": -1}, InvalidArgument, "logprobs is -1, expected None or 0 to 20"),
    ],
    ids=str,
)
def test_sample_tokens_refuses(change, error, message):
    assert_refused(sample_tokens, call(np.zeros((2, 4), np.float32)) | change, error, message)


def damaged(rng: np.random.Generator, count: int, V: int) -> dict[str, np.ndarray]:
    """A call of token_logprobs: rows of every form, some without a token, with NaN, +inf, nothing but −inf, ties."""
    logits, _, _ = rows(rng, count, V)
    tokens = rng.integers(0, V, count).astype(np.int32)
    logits[1, V // 2], logits[2, 0], logits[3], tokens[4], logits[5] = np.nan, np.inf, -np.inf, -1, 1.5
    logits[6, : V - 1], logits[4, 0] = -np.inf, np.nan
    tokens[6] = 0
    return {"logits": logits, "tokens": tokens}


@DEVICES
def test_token_logprobs_by_hand(device):
    p = np.array([0.1, 0.4, 0.4, 0.0999999, 1e-7])
    logits = np.log(p).astype(np.float32) + np.float32([[0], [30], [-70]])
    own, ranks, ids, top = run_on(device, token_logprobs, logits, i32(3, 2, 1), top=3)
    assert_close("own", own, np.log(p[[3, 2, 1]]), 1e-5)
    assert ranks.tolist() == [4, 1, 1] and ids.tolist() == [[1, 2, 0]] * 3
    assert_close("top", top, np.tile(np.log(p[[1, 2, 0]]), (3, 1)), 1e-5)
    few = run_on(device, token_logprobs, np.float32([[1, -np.inf, 2]]), i32(1), top=20)
    assert few[0].tolist() == [-np.inf] and few[1].tolist() == [3] and few[2][0].tolist() == [2, 0, *[-1] * 18]
    assert np.isfinite(few[3]).sum() == 2


@pytest.mark.parametrize("V, top", [(7, 20), (700, 20), (5003, 0), (1, 1)])
def test_token_logprobs_gives_the_numbers_of_the_definition(V, top, rng):
    given = damaged(rng, 300, V)
    want = run_on("reference", token_logprobs, **given, top=top)
    assert want[1][[1, 2, 3, 4]].tolist() == [-2, -2, -2, -1]
    got = tuple(np.full_like(array, -7 if array.dtype == np.int32 else np.nan) for array in want)
    run_on("cpu", token_logprobs, **given, top=top, out=got)
    for name, array, other in zip(("own", "ranks", "ids", "top"), got, want, strict=True):
        assert_close(name, array, other, 1e-13)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"logits": np.zeros(4, "f4")}, ShapeError, "logits has shape (4,), expected [R, V]"),
        ({"logits": np.zeros((2, 0), "f4")}, ShapeError, "logits has shape (2, 0), expected"),
        ({"logits": np.zeros((2, 4))}, DTypeError, "logits has dtype float64, expected float32"),
        ({"tokens": i32(1)}, ShapeError, "tokens has shape (1,), expected (2,) (rows of logits)"),
        ({"tokens": np.zeros(2)}, DTypeError, "tokens has dtype float64, expected int32"),
        ({"tokens": i32(0, 4)}, InvalidArgument, "tokens has 4, expected -1 to 3 (ids of logits, or −1)"),
        ({"tokens": i32(0, -2)}, InvalidArgument, "tokens has -2, expected -1 to 3"),
        ({"top": 21}, InvalidArgument, "top is 21, expected 0 to 20"),
        ({"top": -1}, InvalidArgument, "top is -1, expected 0 to 20"),
    ],
    ids=str,
)
def test_token_logprobs_refuses(change, error, message):
    given = {"logits": np.zeros((2, 4), np.float32), "tokens": i32(0, 3), "top": 1}
    assert_refused(token_logprobs, given | change, error, message)
