"""Ragged calls: the runs of several sequences in one call are what each sequence gives by itself."""

import ml_dtypes
import numpy as np
import pytest

import penstock
from penstock import ops
from penstock.errors import InvalidArgument, ShapeError
from penstock.ops.ragged import equal_runs, runs

DEVICES = ("reference", "cpu")
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
RUNS = (1, 1, 5, 0, 1, 12, 3, 3)  # rows of each sequence, two rows of no sequence behind them
BEFORE = (0, 300, 7, 9, 255, 250, 0, 512)  # positions that each has already
STARTS = np.array([0, *np.cumsum(RUNS)], np.int32)
T = sum(RUNS) + 2
SEQUENCE = np.array([b for b, n in enumerate(RUNS) for _ in range(n)] + [-1, -1], np.int32)
POSITIONS = np.array([BEFORE[b] + i for b, n in enumerate(RUNS) for i in range(n)] + [-1, -1], np.int32)
LENGTHS = np.array([a + b for a, b in zip(BEFORE, RUNS, strict=True)], np.int32)
PAGE, BLOCKS = 256, 3


@pytest.fixture(params=DEVICES)
def device(request):
    with penstock.backend(request.param):
        yield request.param


@pytest.fixture(params=DTYPES.values(), ids=DTYPES)
def dtype(request):
    return request.param


def table(rng: np.random.Generator) -> np.ndarray:
    """A block table in which no page stands twice."""
    return rng.permutation(len(RUNS) * BLOCKS).reshape(len(RUNS), BLOCKS).astype(np.int32)


def numbers(rng: np.random.Generator, dtype, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(dtype)


def unset(shape: tuple[int, ...], dtype) -> np.ndarray:
    return np.full(shape, np.nan).astype(dtype)


def same(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


# -- runs ------------------------------------------------------------------------------------------------------------


def test_runs_leaves_out_empty_ones():
    assert list(runs(STARTS))[:3] == [(0, 0, 1), (1, 1, 2), (2, 2, 7)]
    assert [b for b, _, _ in runs(STARTS)] == [0, 1, 2, 4, 5, 6, 7]


def test_equal_runs_join_neighbours_of_one_length():
    assert list(equal_runs(STARTS)) == [(0, 2, 1), (2, 1, 5), (4, 1, 1), (5, 1, 12), (6, 2, 3)]
    assert list(equal_runs(np.array([0, 1, 1, 2], np.int32))) == [(0, 1, 1), (2, 1, 1)]
    assert list(equal_runs(np.zeros(1, np.int32))) == []


# -- caches ----------------------------------------------------------------------------------------------------------


def test_kv_pages_append_writes_the_rows_of_every_sequence(device, dtype, rng):
    tables = table(rng)
    k, v = numbers(rng, dtype, T, 10), numbers(rng, dtype, T, 6)
    pages = [unset((tables.size, PAGE, width), dtype) for width in (10, 6)]
    want = [page.copy() for page in pages]
    ops.kv_pages_append(k, v, *pages, tables, POSITIONS, SEQUENCE)
    for b, low, high in runs(STARTS):
        ops.kv_pages_append(k[low:high], v[low:high], *want, tables[b], BEFORE[b])
    for got, expected in zip(pages, want, strict=True):
        same(got, expected)


def test_mla_cache_append_writes_the_rows_of_every_sequence(device, rng):
    tables = table(rng)
    latent, k_pe = numbers(rng, np.float32, T, 12), numbers(rng, np.float32, T, 4)
    pages = [unset((tables.size, PAGE, width), np.float32) for width in (12, 4)]
    want = [page.copy() for page in pages]
    ops.mla_cache_append(latent, k_pe, *pages, POSITIONS, block_table=tables, sequence=SEQUENCE)
    for b, low, high in runs(STARTS):
        ops.mla_cache_append(latent[low:high], k_pe[low:high], *want, BEFORE[b], block_table=tables[b])
    for got, expected in zip(pages, want, strict=True):
        same(got, expected)


@pytest.mark.parametrize("gated", [False, True])
def test_attention_prepare_is_that_of_each_sequence(device, gated, rng):
    H, Hkv, D = 4, 2, 8
    tables = table(rng)
    q = numbers(rng, np.float32, T, H * D * (2 if gated else 1))
    k, v = numbers(rng, np.float32, T, Hkv * D), numbers(rng, np.float32, T, Hkv * D)
    norms = numbers(rng, np.float32, D), numbers(rng, np.float32, D)
    inv_freq = (10000.0 ** -np.linspace(0, 1, D // 2)).astype(np.float32)
    pages = [unset((tables.size, PAGE, Hkv * D), np.float32) for _ in range(2)]
    want = [page.copy() for page in pages]
    positions = np.maximum(POSITIONS, 0)
    got = ops.attention_prepare(q, k, v, *norms, inv_freq, positions, *pages, tables, H, gated=gated, sequence=SEQUENCE)
    for b, low, high in runs(STARTS):
        own = slice(low, high)
        alone = ops.attention_prepare(
            q[own], k[own], v[own], *norms, inv_freq, BEFORE[b], *want, tables[b], H, gated=gated
        )
        for one, expected in zip(got if gated else [got], alone if gated else [alone], strict=True):
            same(one[own], expected)
    for page, expected in zip(pages, want, strict=True):
        same(page, expected)


# -- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 6, 300])
def test_attention_paged_is_that_of_each_sequence(device, dtype, window, rng):
    H, Hkv, D, Dv = 6, 2, 8, 10
    tables = table(rng)
    q = numbers(rng, dtype, T, H, D)
    k, v = numbers(rng, dtype, tables.size, PAGE, Hkv * D), numbers(rng, dtype, tables.size, PAGE, Hkv * Dv)
    got = ops.attention_paged(q, k, v, tables, LENGTHS, 0.3, window, starts=STARTS, out=unset((T, H, Dv), dtype))
    for b, low, high in runs(STARTS):
        want = ops.attention_prefill(q[low:high], k, v, BEFORE[b], 0.3, window, tables[b])
        same(got[low:high], want)
        for t in range(low, high):  # and token by token
            length = np.array([POSITIONS[t] + 1], np.int32)
            same(got[t : t + 1], ops.attention_paged(q[t : t + 1], k, v, tables[b : b + 1], length, 0.3, window))
    same(got[STARTS[-1] :], np.zeros((2, H, Dv)))
    gate = numbers(rng, dtype, T, H, Dv)
    same(ops.attention_paged(q, k, v, tables, LENGTHS, 0.3, window, gate, STARTS), ops.sigmoid_gate(got, gate))


@pytest.mark.parametrize("longest", [None, 4])
def test_mla_sdpa_is_that_of_each_sequence(device, longest, rng):
    H, R, rope = 5, 16, 4
    tables = table(rng)
    q, q_pe = numbers(rng, np.float32, T, H, R), numbers(rng, np.float32, T, H, rope)
    caches = [numbers(rng, np.float32, tables.size, PAGE, width) for width in (R, rope)]
    got = ops.mla_sdpa(
        q,
        q_pe,
        *caches,
        LENGTHS,
        0.2,
        block_table=tables,
        starts=STARTS,
        longest=longest,
        out=unset(q.shape, np.float32),
    )
    for b, low, high in runs(STARTS):
        if longest is not None and high - low > longest:
            same(got[low:high], np.zeros((high - low, H, R)))
            continue
        want = ops.mla_sdpa(q[low:high], q_pe[low:high], *caches, int(LENGTHS[b]), 0.2, block_table=tables[b])
        same(got[low:high], want)
    same(got[STARTS[-1] :], np.zeros((2, H, R)))


def test_mla_prefill_computes_the_long_runs(device, rng):
    H, R, rope, nope, width = 3, 16, 4, 6, 5
    tables = table(rng)
    q, q_pe = numbers(rng, np.float32, T, H, nope), numbers(rng, np.float32, T, H, rope)
    caches = [numbers(rng, np.float32, tables.size, PAGE, size) for size in (R, rope)]
    kv_b = numbers(rng, np.float32, H * (nope + width), R)
    more = {"block_table": tables, "starts": STARTS, "longer_than": 4, "out": unset((T, H, width), np.float32)}
    got = ops.mla_prefill(q, q_pe, *caches, POSITIONS, 0.2, kv_b, **more)
    for b, low, high in runs(STARTS):
        want = np.zeros((high - low, H, width))
        if high - low > 4:
            own = (q[low:high], q_pe[low:high])
            want = ops.mla_prefill(*own, *caches, BEFORE[b], 0.2, kv_b, block_table=tables[b])
        same(got[low:high], want)
    same(got[STARTS[-1] :], np.zeros((2, H, width)))


# -- delta rule ------------------------------------------------------------------------------------------------------

Hk, Hv, Dk, Dv, W, K = 2, 4, 8, 6, 4, 5
C = 2 * Hk * Dk + Hv * Dv
SLOTS = np.array([3, 0, 9, 1, 8, 2, 7, 4], np.int32)  # of ten


def layer(rng: np.random.Generator, dtype):
    """What a linear-attention layer has: projections of T rows, weights, states with room for K kept rows."""
    x = numbers(rng, dtype, T, C)
    g, b = (rng.uniform(0.1, 1, (T, Hv)).astype(np.float32) for _ in range(2))
    weight = numbers(rng, dtype, C, W)
    conv, state = numbers(rng, dtype, 10, W - 1 + K, C), numbers(rng, np.float32, 10, Hv, Dv, Dk)
    return x, g, b, weight, conv, state


def moved(x, g, b, weight, conv, state) -> np.ndarray:
    """T tokens of one sequence, whose rows [W − 1, C] and state are moved on."""
    y = ops.rms_norm_qk(ops.conv1d_causal(x, conv, weight), Hk, Dk, Hk * Dk)
    ops.conv1d_state_update(conv, x)
    return ops.gated_delta_net(state, y, g, b, Hk, Hv, Dk, Dv)


def test_runs_move_their_own_states(device, dtype, rng):
    x, g, b, weight, conv, state = layer(rng, dtype)
    conv = conv[:, : W - 1].copy()
    slots = SLOTS.copy()
    slots[6] = -1  # left out
    want_conv, want_state = conv.copy(), state.copy()
    y = ops.conv1d_causal(x, conv, weight, slots, STARTS, out=unset(x.shape, dtype))
    same(y[STARTS[6] : STARTS[7]], np.zeros((RUNS[6], C)))
    ops.conv1d_state_update(conv, x, slots, STARTS)
    y = ops.rms_norm_qk(y, Hk, Dk, Hk * Dk)
    out = unset((T, Hv, Dv), dtype)
    got = ops.gated_delta_net(state, y, g, b, Hk, Hv, Dk, Dv, slots=slots, starts=STARTS, out=out)
    for n, low, high in runs(STARTS):
        own, slot = slice(low, high), slots[n]
        if slot < 0:
            same(got[own], np.zeros((high - low, Hv, Dv)))
            continue
        same(got[own], moved(x[own], g[own], b[own], weight, want_conv[slot], want_state[slot]))
    same(conv, want_conv)
    same(state, want_state)
    same(got[STARTS[-1] :], np.zeros((2, Hv, Dv)))


@pytest.mark.parametrize("accepted", range(4))
def test_a_kept_run_is_committed_as_far_as_it_was_accepted(device, dtype, accepted, rng):
    x, g, b, weight, conv, state = layer(rng, dtype)
    starts, slots = np.array([0, 1, 5, 9], np.int32), np.array([6, 2, 0], np.int32)
    keep = np.array([0, 4, 4], np.int32)
    gates = unset((10, K, 2, Hv), np.float32)
    T = 9
    x, g, b = x[:T], g[:T], b[:T]
    before = conv[:, : W - 1].copy(), state.copy()
    y = ops.rms_norm_qk(ops.conv1d_causal(x, conv, weight, slots, starts), Hk, Dk, Hk * Dk)
    ops.conv1d_state_update(conv, x, slots, starts, keep, W)
    got = ops.gated_delta_net(
        state,
        y,
        g,
        b,
        Hk,
        Hv,
        Dk,
        Dv,
        slots=slots,
        starts=starts,
        keep=keep,
        gates=gates,
        out=unset((T, Hv, Dv), dtype),
    )
    same(conv[slots[1:], : W - 1], before[0][slots[1:]])  # kept runs have moved nothing on
    same(state[slots[1:]], before[1][slots[1:]])
    ops.delta_commit(conv, state, gates, slots, np.array([0, accepted, 4], np.int32), weight, Hk)
    rows, states = before
    for n, count in ((0, 1), (1, accepted), (2, 4)):
        slot = slots[n]
        for t in range(starts[n], starts[n + 1]):  # one by one, as an answer is computed
            one = slice(t, t + 1)
            if t == starts[n] + count:
                same(conv[slot, : W - 1], rows[slot])
                same(state[slot], states[slot])
            same(got[one], moved(x[one], g[one], b[one], weight, rows[slot], states[slot]))
        if count == starts[n + 1] - starts[n]:
            same(conv[slot, : W - 1], rows[slot])
            same(state[slot], states[slot])


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("starts", "message"),
    [([1, 2, 3], "starts is"), ([0, 2, 1], "starts is"), ([0, 2, 99], "starts is"), ([0, 2], "one per sequence")],
)
def test_starts_that_do_not_fit_are_refused(device, starts, message, rng):
    q, pages = numbers(rng, np.float32, 3, 2, 4), numbers(rng, np.float32, 4, PAGE, 4)
    tables, lengths = np.arange(4, dtype=np.int32).reshape(2, 2), np.array([9, 9], np.int32)
    with pytest.raises((InvalidArgument, ShapeError), match=message):
        ops.attention_paged(q, pages, pages, tables, lengths, 1.0, starts=np.array(starts, np.int32))


def test_a_run_longer_than_its_sequence_is_refused(device, rng):
    q, pages = numbers(rng, np.float32, 3, 2, 4), numbers(rng, np.float32, 4, PAGE, 4)
    tables, lengths = np.arange(4, dtype=np.int32).reshape(2, 2), np.array([9, 1], np.int32)
    with pytest.raises(InvalidArgument, match="lengths has 1 for a run of 2 rows"):
        ops.attention_paged(q, pages, pages, tables, lengths, 1.0, starts=np.array([0, 1, 3], np.int32))


def test_a_run_is_kept_whole_or_not(device, rng):
    x, g, b, _, _, state = layer(rng, np.float32)
    keep, gates = np.array([2], np.int32), np.zeros((10, K, 2, Hv), np.float32)
    call = {"slots": np.array([1], np.int32), "starts": np.array([0, 3], np.int32), "keep": keep, "gates": gates}
    with pytest.raises(InvalidArgument, match="keep is"):
        ops.gated_delta_net(state, x, g, b, Hk, Hv, Dk, Dv, **call)
