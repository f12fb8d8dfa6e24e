"""Sampling on CUDA: tokens of the definition, edits, ties at the limits, marked rows, graphs with other parameters."""

from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.backends.cuda import _limits, sampling
from penstock.ops.sampling import MODES, gumbel
from tests.gpu.common import GPU, reference, run, to_device, to_host
from tests.ops.common import assert_close, assert_same_bits
from tests.ops.test_sampling import FREQUENCIES, arguments, call, check_frequencies, damaged, edge_of_min_p, edits, rows

ROWS = {"greedy": 6, "plain": 4, "top_k": 2, "full": 2}  # in the interpreter


def check(logits, positions, parameters, mode, **tables):
    got = run(ops.sample_tokens, **arguments(logits, positions, parameters), mode=mode, **tables)
    want = expected(logits, positions, parameters, **tables)
    wrong = np.flatnonzero(got != want)
    assert not wrong.size, [(parameters[b], int(got[b]), want[b]) for b in wrong[:3]]


def expected(logits, positions, parameters, **tables):
    """The tokens of the definition."""
    return reference(ops.sample_tokens, **arguments(logits, positions, parameters), **tables)


@pytest.mark.parametrize("mode", MODES)
def test_sample_tokens_gives_the_token_of_the_definition(mode, rng):
    check(*rows(rng, 2000 if GPU else ROWS[mode], 297, mode), mode)


@pytest.mark.parametrize("mode", MODES)
def test_sample_tokens_edits_as_the_definition(mode, rng):
    count = 1000 if GPU else 2 * ROWS[mode]
    check(*rows(rng, count, 297, mode), mode, **edits(rng, count, 297))


@pytest.mark.parametrize("n", [0, 3, 20])
def test_sample_tokens_gives_the_log_probabilities_of_the_definition(n, rng):
    B, V = 500 if GPU else 9, 297
    logits, positions, parameters = rows(rng, B, V, "greedy")
    logits[2], logits[3, 5], positions[4] = np.round(logits[2]), np.nan, -1
    given = arguments(logits, positions, parameters) | edits(rng, B, V) | {"mode": "greedy", "logprobs": n}
    want = reference(ops.sample_tokens, **given)
    out = tuple(to_device(np.full_like(array, -7 if array.dtype == np.int32 else np.nan)) for array in want)
    with penstock.backend("cuda"):
        ops.sample_tokens(**{name: to_device(value) for name, value in given.items()}, out=out)
    for name, got, array in zip(("tokens", "own", "ids", "top"), to_host(out), want, strict=True):
        assert_close(name, got, array, 1e-13)


@pytest.mark.parametrize("V, top", [(297, 3), (297, 0), (5, 20)])
def test_token_logprobs_gives_the_numbers_of_the_definition(V, top, rng):
    given = damaged(rng, 500 if GPU else 10, V)
    want = reference(ops.token_logprobs, **given, top=top)
    out = tuple(to_device(np.full_like(array, -7 if array.dtype == np.int32 else np.nan)) for array in want)
    with penstock.backend("cuda"):
        ops.token_logprobs(**{name: to_device(value) for name, value in given.items()}, top=top, out=out)
    for name, got, array in zip(("own", "ranks", "ids", "top"), to_host(out), want, strict=True):
        assert_close(name, got, array, 1e-13)


def test_sample_tokens_keeps_to_min_p_close_to_its_edge():
    given = edge_of_min_p(2000 if GPU else 12)
    assert_same_bits("tokens", run(ops.sample_tokens, **given), reference(ops.sample_tokens, **given))


def test_sample_tokens_with_slots_or_masks_alone(rng):
    given = edits(rng, 6, 270)
    for names in (("slots", "counts", "bias", "penalties"), ("masked", "masks")):
        check(*rows(rng, 6, 270, "greedy"), "greedy", **{name: given[name] for name in names})


@pytest.mark.cuda
@pytest.mark.parametrize("rules, kept", FREQUENCIES, ids=str)
def test_sample_tokens_draws_as_often_as_the_probabilities_say(rules, kept):
    check_frequencies(lambda **given: run(ops.sample_tokens, **given), rules, kept, 4000)


def test_sample_tokens_draws_from_every_block(rng):
    given = call(rng.standard_normal((300 if GPU else 12, 1000)), position=7, mode="plain")
    given["seed"][:] = np.arange(len(given["seed"]))
    got = run(ops.sample_tokens, **given)
    assert_same_bits("tokens", got, reference(ops.sample_tokens, **given))
    assert len(set((got // 256).tolist())) > 2


# Kinds of ties: (logits, top_k, top_p). 270 logits are two blocks.
TIES = {
    "k among equals": (lambda n: np.where(n < 5, 1.0, np.where(n % 9 == 4, 0.5, -1.0)), 12, 1.0),
    "p among those of k": (lambda n: np.where(n < 5, 1.0, np.where(n % 9 == 4, 0.5, -1.0)), 12, 0.9),
    "p above those of k": (lambda n: np.where(n % 90 == 7, 1.0, 0.5), 20, 0.2),
    "equal": (lambda n: np.zeros(n.size), 50, 0.5),
    "in two blocks": (lambda n: np.where(n >= 250, 0.5, -1.0), 12, 1.0),
    "zeros of both signs": (lambda n: np.where(n % 2 == 0, -0.0, 0.0), 20, 1.0),
}


@pytest.mark.parametrize("mode", ["top_k", "full"])
@pytest.mark.parametrize("kind", TIES)
def test_sample_tokens_keeps_the_lowest_ids_among_equals(kind, mode, rng):
    form, top_k, top_p = TIES[kind]
    logits = form(np.arange(270)).astype(np.float32)
    ranked = np.argsort(-logits, kind="stable")
    sums = np.cumsum(np.exp(logits[ranked[:top_k]] - logits.max(), dtype=np.float64))
    n = top_k if top_p == 1 else int(np.searchsorted(sums, top_p * sums[-1])) + 1
    # positions that take the last kept id, and that would take the one behind it: a limit one off shows
    positions = [position_of(logits, ranked[:n]), position_of(logits, ranked[: n + 1]), *range(300 if GPU else 0)]
    given = call(np.tile(logits, (len(positions), 1)), top_k=top_k, top_p=top_p, mode=mode)
    given["positions"][:] = positions
    got = run(ops.sample_tokens, **given)
    assert_same_bits("tokens", got, reference(ops.sample_tokens, **given))
    assert got[0] == ranked[n - 1] and set(got.tolist()) <= set(ranked[:n].tolist())


def position_of(logits, ids):
    """A position at which the last of these ids has the highest sum."""
    positions = range(10_000)
    return next(p for p in positions if np.argmax(logits[ids] + gumbel(0, p, ids)) == len(ids) - 1)


class Limits:
    """Where calls of sample_tokens cut: limits [B, 4] as the lists leave them, and as they are in the end. Tokens that
    are drawn from all ids do not count: every row has its limit.
    """

    def __init__(self, monkeypatch):
        self.listed = self.final = np.empty((0, 4))
        self._find, self._search = sampling.find_limits, _limits._search_kernel
        monkeypatch.setattr(sampling, "find_limits", self._found)
        monkeypatch.setattr(_limits, "_search_kernel", self)

    def _found(self, given, parts, full, sizes, drawn):
        limits = self._find(given, parts, full, sizes)
        self.final = to_host(limits.clone())
        return limits

    def __getitem__(self, grid):
        """The launch of _search_kernel."""

        def launch(given, search, limits, *sizes, **options):
            self.listed = to_host(limits.clone())
            self._search[grid](given, search, limits, *sizes, **options)

        return launch

    def way(self, b):
        """How the limit of a row was found: in its list, in its list but for the id, or in the whole row."""
        _, last, ties, _ = self.listed[b]
        return "list" if last >= 0 else "id" if ties > 0 else "row"

    def kept(self, b, x):
        key, last = self.final[b, :2]
        bits = (x + np.float32(0)).view(np.uint32).astype(np.int64)
        keys = np.where(bits >> 31, 0xFFFFFFFF - bits, bits | 0x80000000)
        return np.flatnonzero(((keys > key) | ((keys == key) & (np.arange(x.size) <= last))) & (x > -np.inf))


def kept_by(x, temperature, top_k, top_p):
    """What top-k and top-p keep by the definition."""
    ranked = np.argsort(-x, kind="stable")[: top_k or None]
    if top_p < 1:
        sums = np.cumsum(np.exp((x[ranked].astype(np.float64) - x.max()) / temperature))
        ranked = ranked[: np.searchsorted(sums, top_p * sums[-1]) + 1]
    return np.sort(ranked[x[ranked] > -np.inf])


def rounded(x):
    """float32 with the digits of bfloat16: many equal ones."""
    return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


# Rows of normal numbers z: (logits, temperature, top_k, top_p, where a list of 64 leaves the limit).
CUTS = {
    "top_p": (lambda z: z * 2, 1.0, 0, 0.9, "list"),
    "top_p, cold": (lambda z: z * 2, 0.1, 0, 0.95, "list"),
    "top_p, warm": (lambda z: z * 2, 5.0, 0, 0.9, "list"),
    "top_p close to 1": (lambda z: z * 2, 1.0, 0, 1 - 1e-9, "list"),
    "top_p close to 0": (lambda z: z * 2, 1.0, 0, 1e-9, "list"),
    "top_p 0": (lambda z: z, 1.0, 0, 0.0, "list"),
    "top_p, peaked": (lambda z: np.where(z > 2.5, z * 3 + 14, z), 0.7, 0, 0.95, "list"),
    "top_p, far from 0": (lambda z: z + 1000, 1.0, 0, 0.9, "list"),
    "top_p, few possible": (lambda z: np.where(z > 1, z, -np.inf), 1.0, 0, 0.9, "list"),
    "top_p, some very low": (lambda z: np.where(z > -1, z, -1e9), 1.0, 0, 0.9, "list"),
    "top_p among equals": (lambda z: rounded(z + 40), 1.0, 0, 0.9, "id"),
    "top_p, all equal": (lambda z: z * 0 + 3, 1.0, 0, 0.9, "id"),
    "top_p, flat": (lambda z: z * 1e-6, 1e3, 0, 0.9, "row"),
    "top_k": (lambda z: z * 2, 1.0, 20, 1.0, "list"),
    "top_k and top_p": (lambda z: z * 2, 1.0, 30, 0.7, "list"),
    "top_k among equals": (lambda z: np.round(z * 4), 1.0, 25, 1.0, "list"),
    "top_k, all equal": (lambda z: z * 0, 1.0, 25, 0.5, "id"),
    "top_k, two values": (lambda z: np.where(z > 0, 1.0, -1.0), 1.0, 900, 0.9, "row"),
    "many of top_k": (lambda z: z * 2, 1.0, 700, 1.0, "row"),
    "many of top_k and top_p": (lambda z: z * 2, 1.0, 700, 0.9, "row"),
    "top_k beyond the possible": (lambda z: np.where(z > 2, z, -np.inf), 1.0, 200, 0.9, "list"),
}


@pytest.mark.parametrize("span", [1, 3])
def test_sample_tokens_keeps_what_the_definition_keeps(span, monkeypatch, rng):
    """Rows of all kinds in one call, greedy, plain, broken and inactive ones between them, and lists that are short."""
    monkeypatch.setattr(_limits, "SAMPLE_LIST", 64)
    monkeypatch.setattr(_limits, "SAMPLE_SPANS", ((1000, span),))
    kinds, V = list(CUTS.values())[:: 1 if GPU else span], 1100
    others = [(0.0, 0, 0.5), (1.0, 0, 1.0), (1.0, 5, 0.5), (1.0, 0, 0.9)]
    logits = np.stack([*(form(rng.standard_normal(V)) for form, *_ in kinds), *rng.standard_normal((4, V))])
    logits = logits.astype(np.float32)
    given = call(logits)
    for b, (temperature, top_k, top_p) in enumerate([*(kind[1:4] for kind in kinds), *others]):
        given["temperature"][b], given["top_k"][b], given["top_p"][b] = temperature, top_k, top_p
    given["positions"][:] = np.arange(len(logits))
    given["positions"][-2], logits[-1, 7] = -1, np.nan
    limits = Limits(monkeypatch)
    assert_same_bits("tokens", run(ops.sample_tokens, **given), reference(ops.sample_tokens, **given))
    for b, (_, *cut, way) in enumerate(kinds):
        np.testing.assert_array_equal(limits.kept(b, logits[b]), kept_by(logits[b], *cut), f"{cut}")
        assert limits.way(b) == way, cut
        few = kept_by(logits[b], *cut).size <= 64
        assert (limits.final[b, 3] >= 0) == (way == "list" and few), cut  # drawn from the list
    assert limits.final[len(kinds) :, 3].tolist() == [-1, -1, -1, -1]
    assert limits.kept(len(kinds) + 1, logits[-3]).size == V


@pytest.mark.cuda
@pytest.mark.parametrize("V", [248_320, 32_001])
@pytest.mark.parametrize("kind", CUTS)
def test_sample_tokens_keeps_what_the_definition_keeps_of_a_vocabulary(kind, V, monkeypatch, rng):
    form, temperature, top_k, top_p, _ = CUTS[kind]
    logits = np.stack([form(rng.standard_normal(V)) for _ in range(17)]).astype(np.float32)
    limits = Limits(monkeypatch)
    run(ops.sample_tokens, **call(logits, temperature=temperature, top_k=top_k, top_p=top_p))
    for b, x in enumerate(logits):
        np.testing.assert_array_equal(limits.kept(b, x), kept_by(x, temperature, top_k, top_p))
        assert limits.way(b) == "list" or "equal" in kind or "flat" in kind or "two" in kind


class Ahead:
    """Whether tokens of calls of sample_tokens stood that were drawn from all ids: tokens of limits [B, 4] before lists
    are made, −1 where a row was still open.
    """

    def __init__(self, monkeypatch):
        self.tokens = np.empty(0)
        self._rows = _limits._rows_kernel
        monkeypatch.setattr(_limits, "_rows_kernel", self)

    def __getitem__(self, grid):
        def launch(given, parts, drawn, search, limits, *sizes, **options):
            self._rows[grid](given, parts, drawn, search, limits, *sizes, **options)
            self.tokens = to_host(limits[:, 3].clone()).astype(int)

        return launch


def winners(given, b):
    """The token that row b would have without top-p."""
    row = {name: value[b : b + 1] for name, value in given.items() if name != "mode"}
    return int(reference(ops.sample_tokens, **row | {"top_p": np.ones(1)})[0])


# Forms of logits by normal numbers z.
FORMS = {
    "normal": lambda z: z * 2,
    "flat": lambda z: z * 0.01,
    "peaked": lambda z: z * 8,
    "ties": lambda z: np.round(z * 3),
    "equal": lambda z: z * 0 - 5,
    "two values": lambda z: np.where(z > 1, 1.0, -0.5),
    "few possible": lambda z: np.where(z > 1.5, z, -np.inf),
    "zeros of both signs": lambda z: np.where(z > 0, 0.0, -0.0),
    "far apart": lambda z: np.where(z > 1, z * 1e29, -3e30),
    "far from 0": lambda z: z + 1e4,
}
SHARES = (0.0, 1e-300, 1e-9, 0.05, 0.5, 0.9, 0.999, 1 - 1e-9, np.nextafter(1.0, 0), 1.0)
HEATS = (1e-310, 1e-30, 0.1, 0.7, 1.0, 2.0, 20.0, 1e31, 1e300)


@pytest.mark.parametrize("V", [65, 1001, 248_320 if GPU else 2050])
@pytest.mark.parametrize("form", FORMS)
def test_sample_tokens_tries_the_token_drawn_from_all_ids(form, V, monkeypatch, rng):
    """Tokens are those of the definition, whether one that is drawn from all ids stands or its row is gone through."""
    monkeypatch.setattr(_limits, "SAMPLE_LIST", 64)
    rules = [(heat, share) for heat in HEATS for share in SHARES]
    rules = rules if GPU else [rules[n] for n in rng.choice(len(rules), 24 if V < 2000 else 6, replace=False)]
    given = call(FORMS[form](rng.standard_normal((len(rules), V))).astype(np.float32))
    given["temperature"][:], given["top_p"][:] = np.transpose(rules)
    given["min_p"][:] = rng.choice([0, 0, 1e-3, 0.5, 1], len(rules))
    given["seed"][:] = rng.integers(-(2**63), 2**63, len(rules))
    given["positions"][:] = rng.integers(0, 2**31 - 1, len(rules))
    ahead = Ahead(monkeypatch)
    got, want = run(ops.sample_tokens, **given), reference(ops.sample_tokens, **given)
    wrong = np.flatnonzero(got != want)
    assert not wrong.size, [(rules[b], int(got[b]), int(want[b])) for b in wrong[:3]]
    stood = ahead.tokens >= 0
    np.testing.assert_array_equal(ahead.tokens[stood], want[stood])
    heat, cut = given["temperature"], given["top_p"] < 1
    assert stood[~cut].all()
    first = stood & cut & ((heat < 1e-29) | (heat > 1e30))  # weights in float32 say nothing there
    np.testing.assert_array_equal(want[first], given["logits"][first].argmax(axis=1))
    for b in np.flatnonzero(~stood):  # what clearly stands is not looked for
        heat, share = rules[b]
        assert heat not in (0.7, 1.0) or winners(given, b) not in clearly_kept(given["logits"][b], heat, share)


def clearly_kept(x, temperature, top_p):
    """Ids that top-p keeps by a distance, the first rank among them."""
    ranked = np.argsort(-x, kind="stable")
    sums = np.cumsum(np.exp((x[ranked].astype(np.float64) - x.max()) / temperature))
    return {ranked[0], *ranked[1:][sums[:-1] < top_p * sums[-1] * (1 - 1e-3)].tolist()}


@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_sample_tokens_goes_both_ways_with_top_p(top_p, monkeypatch, rng):
    """Rows whose token drawn from all ids is kept take it at once, others go through their logits, as all could."""
    monkeypatch.setattr(_limits, "SAMPLE_LIST", 64)
    B, V = 400 if GPU else 40, 1003
    given = call(rng.standard_normal((B, V)) * 2, top_p=top_p)
    given["seed"][:] = np.arange(B)
    ahead = Ahead(monkeypatch)
    got = run(ops.sample_tokens, **given)
    kept = np.array([winners(given, b) in kept_by(given["logits"][b], 1.0, 0, top_p) for b in range(B)])
    stood = ahead.tokens >= 0
    assert not stood[~kept].any() and stood[kept].mean() > 0.99
    assert abs(kept.mean() - top_p) < 4 * (top_p * (1 - top_p) / B) ** 0.5 and not kept.all()
    assert_same_bits("tokens", got, reference(ops.sample_tokens, **given))
    Limits(monkeypatch)
    assert_same_bits("tokens", run(ops.sample_tokens, **given), got)


@pytest.mark.parametrize("gap", [0.0, 1.0])
def test_sample_tokens_refuses_the_first_rank_that_top_p_leaves_out(gap, monkeypatch):
    """The token drawn from all ids is the last that is kept, and then the one behind it: also among equals."""
    monkeypatch.setattr(_limits, "SAMPLE_LIST", 64)
    V, ids = 1100, np.array([3, 40, 257, 258, 700, 1099])
    logits = np.full(V, -30, np.float32)
    logits[ids] = -gap * np.arange(ids.size)
    w = np.exp(logits.astype(np.float64))
    sums = np.cumsum(w[ids])
    ahead = Ahead(monkeypatch)
    for rank, at in enumerate(ids):
        position = next(p for p in range(10_000) if np.argmax(logits + gumbel(0, p, np.arange(V))) == at)
        before = (sums[rank] - w[at]) / w.sum()
        # The least share that keeps it, and the greatest that does not; both by a distance, and both closer than that.
        for share, way in [
            (before + 1e-3, "stands"),
            (before - 1e-3, "open"),
            (before + 1e-6, ""),
            (before - 1e-6, ""),
        ]:
            if not 0 <= share < 1:
                continue
            given = call(logits, position=position, top_p=share)
            got, want = run(ops.sample_tokens, **given), reference(ops.sample_tokens, **given)
            assert got == want and (got[0] == at) == (share > before or rank == 0)
            assert way != "stands" or ahead.tokens[0] == at
            assert way != "open" or rank == 0 or ahead.tokens[0] == -1


def test_sample_tokens_of_rows_of_all_kinds_in_one_call(monkeypatch, rng):
    """Greedy, plain, top_k, top_p, both, min_p, inactive and broken rows, edits and masks; tokens are those of the
    definition, and those of a row alone.
    """
    monkeypatch.setattr(_limits, "SAMPLE_LIST", 64)
    kinds = [
        (0.0, 0, 0.5),
        (1.0, 0, 1.0),
        (1.0, 20, 1.0),
        (1.0, 0, 0.9),
        (0.8, 30, 0.9),
        (1.2, 0, 0.4),
        (1.0, 10**6, 0.7),
    ]
    B, V = (40 if GPU else 3) * len(kinds), 1101
    given = call((rng.standard_normal((B, V)) * 2).astype(np.float32))
    for b in range(B):
        given["temperature"][b], given["top_k"][b], given["top_p"][b] = kinds[b % len(kinds)]
    given["min_p"][:] = rng.choice([0, 0, 0.2], B)
    given["positions"][:], given["seed"][:] = np.arange(B), rng.integers(0, 2**62, B)
    given["positions"][4], given["logits"][10, 5], given["logits"][12, 6] = -1, np.nan, np.inf
    given["logits"][17] = -np.inf
    by_row = {*given, "slots", "masked"} - {"mode"}
    for tables in ({}, edits(rng, B, V)):
        both: dict[str, Any] = given | tables
        got = run(ops.sample_tokens, **both)
        assert_same_bits("tokens", got, reference(ops.sample_tokens, **both))
        for b in range(0, B, 3):
            alone = {name: value[b : b + 1] if name in by_row else value for name, value in both.items()}
            assert run(ops.sample_tokens, **alone)[0] == got[b]


def test_sample_tokens_top_p_alone(rng):
    logits = (rng.standard_normal((200 if GPU else 1, 520)) * 2).astype(np.float32)
    given = call(logits, position=3, top_p=0.8)
    assert_same_bits("tokens", run(ops.sample_tokens, **given), reference(ops.sample_tokens, **given))


@pytest.mark.parametrize("mode", MODES)
def test_sample_tokens_marks_inactive_and_broken_rows(mode):
    logits = np.zeros((6, 300), np.float32)
    logits[1, 299], logits[2, 2], logits[3], logits[4, 0] = np.nan, np.inf, -np.inf, np.nan
    given = call(logits, temperature=float(mode != "greedy"), top_k=int(mode == "top_k"), mode=mode)
    given["positions"][4:] = -1
    given["temperature"][5], given["top_p"][5], given["top_k"][5] = np.nan, 7, -3
    assert run(ops.sample_tokens, **given)[1:].tolist() == [-2, -2, -2, -1, -1]


@pytest.mark.cuda
@pytest.mark.parametrize("V", [248_320, 262_144, 129_280, 32_001, 1])
@pytest.mark.parametrize("mode", MODES)
def test_sample_tokens_at_the_vocabularies_of_models(mode, V, rng):
    logits, positions, parameters = rows(rng, 40, V, mode)
    check(logits, positions, parameters, mode)
    check(logits[:1], positions[:1], parameters[:1], mode)
    given = {name: to_device(value) for name, value in arguments(logits, positions, parameters).items()}
    first = ops.sample_tokens(**given, mode=mode)
    assert all(torch.equal(ops.sample_tokens(**given, mode=mode), first) for _ in range(20))


@pytest.mark.cuda
@pytest.mark.parametrize("mode", MODES)
def test_sample_tokens_replays_in_a_graph_with_other_parameters(mode, rng):
    V, B = 20_003, 3
    made = [rows(rng, B, V, mode) for _ in range(8)]
    buffers = {name: to_device(value) for name, value in arguments(*made[0]).items()}
    ops.sample_tokens(**buffers, mode=mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.sample_tokens(**buffers, mode=mode)
    for given in made:
        for name, value in arguments(*given).items():
            buffers[name].copy_(to_device(value))
        got.fill_(-9)
        graph.replay()
        assert got.tolist() == expected(*given).tolist()


@pytest.mark.cuda
def test_sample_tokens_row_does_not_depend_on_the_others(rng):
    logits, positions, parameters = rows(rng, 64, 50_257)
    together = run(ops.sample_tokens, **arguments(logits, positions, parameters))
    for b in range(0, 64, 7):
        alone = arguments(logits[b : b + 1], positions[b : b + 1], parameters[b : b + 1])
        with penstock.backend("cuda", deterministic=True):
            assert ops.sample_tokens(**{n: to_device(v) for n, v in alone.items()}).item() == together[b]
