"""The CPU kernels of attention beyond the cases of tests/ops: lengths, layouts, chunks, batches, threads, extremes."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from penstock import ops
from penstock.backends.cpu import _attend, _threads
from penstock.backends.cpu.features import usable_features
from tests.ops.common import DTYPES, EPS, assert_close, assert_same_bits, normal, run_on

HEADS = {  # H, Hkv, D, Dv: 1, 8, 16, more and many query rows of a head; odd and even widths
    "one": (3, 3, 33, 7),
    "eight": (16, 2, 32, 64),
    "sixteen": (13, 1, 20, 40),
    "more": (20, 1, 16, 33),
    "many": (70, 1, 9, 17),
}
EACH_HEADS = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)


def made(rng, heads, n, *lead, dtype="float32"):
    """Queries [*lead, H, D] and caches of n rows."""
    H, Hkv, D, Dv = heads
    k, v = normal(rng, n, Hkv * D, dtype=dtype), normal(rng, n, Hkv * Dv, dtype=dtype)
    return normal(rng, *lead, H, D, dtype=dtype), k, v


def both(op, *args, **kwargs):
    got, want = (run_on(device, op, *args, **kwargs) for device in ("cpu", "reference"))
    scale = max(1e-3, float(np.nanmax(np.abs(want.astype(np.float64)), initial=0)))
    name = {np.dtype("float32"): "float32", np.dtype("float16"): "float16"}.get(want.dtype, "bfloat16")
    assert_close(op.name, got, want, 4e-6 + (2 * EPS[name] if name != "float32" else 0), scale)
    return got


def with_threads(count, call):
    if count > _threads.available():
        pytest.skip("one processor")
    before = _threads.threads()
    try:
        _threads.set_threads(count)
        return call()
    finally:
        _threads.set_threads(before)


def paged(rng, cache, page):
    """The rows of a cache in shuffled pages among others, and the table that finds them."""
    n = -(-len(cache) // page)
    table = rng.permutation(n + 3)[:n].astype(np.int32)
    pages = np.full((n + 3, page, cache.shape[1]), np.nan, np.float32).astype(cache.dtype)
    for i, number in enumerate(table):
        part = cache[i * page : (i + 1) * page]
        pages[number, : len(part)] = part
    return pages, table


def same_pages(k, v, page, rng):
    k_pages, table = paged(rng, k, page)
    v_pages = np.full((*k_pages.shape[:2], v.shape[1]), np.nan, np.float32).astype(v.dtype)
    for i, number in enumerate(table):
        part = v[i * page : (i + 1) * page]
        v_pages[number, : len(part)] = part
    return k_pages, v_pages, table


@EACH_HEADS
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_of_every_length(heads, dtype, rng):
    q, k, v = made(rng, heads, 1030, dtype=dtype)
    for n in (0, 1, 7, 8, 9, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1030):
        both(ops.attention_decode, q, k, v, n, 0.3)


@EACH_HEADS
def test_prefill_of_every_length(heads, rng):
    for T, start in ((1, 0), (2, 0), (9, 250), (64, 0), (65, 191), (100, 300), (257, 0)):
        q, k, v = made(rng, heads, start + T + 3, T)
        both(ops.attention_prefill, q, k, v, start, 0.3)
        both(ops.attention_prefill, q, k, v, start, 0.3, window=5)
        both(ops.attention_prefill, q, k, v, start, 0.3, window=257)


@EACH_HEADS
@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_chunks_and_equal_decode(heads, window, dtype, rng):
    """A prefill in one piece, in pieces of other sizes, and step by step: the same bits."""
    T = 331
    q, k, v = made(rng, heads, T, T, dtype=dtype)
    whole = run_on("cpu", ops.attention_prefill, q, k, v, 0, 0.2, window)
    for cuts in ([1, 2, 5, 37, 256, 300], [64, 128, 330], [255, 257]):
        edges = [0, *cuts, T]
        for a, b in itertools.pairwise(edges):
            got = run_on("cpu", ops.attention_prefill, q[a:b].copy(), k, v, a, 0.2, window)
            assert_same_bits(f"rows {a} to {b}", got, whole[a:b])
    for t in (0, 1, 8, 100, 255, 256, 330):
        got = run_on("cpu", ops.attention_decode, q[t], k, v, t + 1, 0.2, window)
        assert_same_bits(f"step {t}", got, whole[t])


@pytest.mark.parametrize("heads", [HEADS["eight"], HEADS["more"]], ids=["eight", "more"])
@pytest.mark.parametrize("page", [1, 3, 8, 100, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_and_slots_equal_a_contiguous_cache(heads, page, dtype, rng):
    T, start = 50, 477
    q, k, v = made(rng, heads, start + T, T, dtype=dtype)
    k_pages, v_pages, table = same_pages(k, v, page, rng)
    for window in (None, 123):
        want = run_on("cpu", ops.attention_prefill, q, k, v, start, 0.2, window)
        got = run_on("cpu", ops.attention_prefill, q, k_pages, v_pages, start, 0.2, window, table)
        assert_same_bits("prefill", got, want)
        lengths = np.array([0, 1, 500, 527, 260], np.int32)
        each = [run_on("cpu", ops.attention_decode, q[b], k, v, int(n), 0.2, window) for b, n in enumerate(lengths)]
        tables = np.stack([table] * 5)
        got = run_on("cpu", ops.attention_paged, q[:5].copy(), k_pages, v_pages, tables, lengths, 0.2, window)
        assert_same_bits("decode", got, np.stack(each))
        slots = np.array([2, 0, 1, 2, 0], np.int32)
        stacks = np.stack([k] * 3), np.stack([v] * 3)
        got = run_on("cpu", ops.attention_decode, q[:5].copy(), *stacks, lengths, 0.2, window, slots)
        assert_same_bits("slots", got, np.stack(each))


def test_batches_equal_single_sequences(rng):
    H, Hkv, D, Dv = HEADS["eight"]
    k, v = normal(rng, 32, 300, Hkv * D), normal(rng, 32, 300, Hkv * Dv)
    q, lengths = normal(rng, 32, H, D), rng.integers(0, 301, 32).astype(np.int32)
    slots = rng.permutation(32).astype(np.int32)
    alone = [
        run_on("cpu", ops.attention_decode, q[b], k[slots[b]], v[slots[b]], int(lengths[b]), 0.2) for b in range(32)
    ]
    for B in range(1, 33):
        got = run_on("cpu", ops.attention_decode, q[:B].copy(), k, v, lengths[:B].copy(), 0.2, None, slots[:B].copy())
        assert_same_bits(f"{B} sequences", got, np.stack(alone[:B]))


@EACH_HEADS
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_threads_give_the_same_bits(heads, dtype, rng):
    """Long enough for several blocks, which one thread takes one after the other and two take as they come."""
    q, k, v = made(rng, heads, 4000, 90, dtype=dtype)
    for call in (
        lambda: run_on("cpu", ops.attention_decode, q[0], k, v, 3999, 0.2),
        lambda: run_on("cpu", ops.attention_decode, q[0], k, v, 3999, 0.2, window=1500),
        lambda: run_on("cpu", ops.attention_prefill, q, k, v, 3900, 0.2),
    ):
        assert_same_bits("y", with_threads(2, call), with_threads(1, call))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_row_does_not_see_does_not_reach_it(dtype, rng):
    """NaN behind the length, in front of the window, and in the future of a row."""
    heads = (6, 2, 20, 12)
    q, k, v = made(rng, heads, 400, 300, dtype=dtype)
    want = run_on("cpu", ops.attention_prefill, q, k, v, 10, 0.2, 40)
    late = [a.copy() for a in (k, v)]
    for a in late:
        a[200:] = np.nan
    got = run_on("cpu", ops.attention_prefill, q, *late, 10, 0.2, 40)
    assert_same_bits("rows before", got[:190], want[:190])
    assert np.isnan(got[190:].astype(np.float32)).all()
    early = [a.copy() for a in (k, v)]
    for a in early:
        a[:100] = np.nan
    got = run_on("cpu", ops.attention_prefill, q, *early, 10, 0.2, 40)
    assert_same_bits("rows behind", got[129:], want[129:])
    assert np.isnan(got[:129].astype(np.float32)).all()
    for a in early:
        a[120:] = np.nan
    got = run_on("cpu", ops.attention_decode, q[0], *early, 120, 0.2, 20)
    assert np.isfinite(got.astype(np.float32)).all()


def test_infinite_nan_and_huge_numbers_follow_the_definition(rng):
    q, k, v = made(rng, (4, 2, 8, 8), 300)
    k[5, :8], v[7, 9] = 1e30, 3e38
    both(ops.attention_decode, q, k, v, 300, 1.0)
    for at, value in ((3, np.nan), (280, np.inf), (0, -np.inf)):
        broken = k.copy()
        broken[at, 2] = value
        q[:, 2] = np.abs(q[:, 2]) + 1
        both(ops.attention_decode, q, broken, v, 300, 1.0)
    v[9, 3] = np.inf
    both(ops.attention_decode, q, k, v, 300, 0.01)
    both(ops.attention_decode, q, np.full_like(k, -np.inf) * np.sign(q[0, 0]), v, 300, 0.0)


def test_all_scores_infinitely_low_give_zeros():
    q, k = np.ones((2, 4), np.float32), np.full((300, 4), -3e38, np.float32)
    v = np.ones((300, 5), np.float32)
    got = run_on("cpu", ops.attention_decode, q, k, v, 300, 3e38)
    assert_same_bits("y", got, np.zeros((2, 5), np.float32))


def test_kernel_compiles_once_for_all_formats_and_flags(rng):
    if numba.config.DISABLE_JIT:
        pytest.skip("nothing is compiled")
    for dtype in DTYPES:
        q, k, v = made(rng, (4, 2, 8, 8), 20, dtype=dtype)
        for write in (True, False):
            for array in (q, k, v):
                array.flags.writeable = write
            run_on("cpu", ops.attention_decode, q, k, v, 20, 0.5)
            run_on("cpu", ops.attention_decode, q, k, v, 20, 1, window=3)
    assert len(_attend._work.signatures) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_three_launches_make_a_decode_step(dtype, rng):
    q, k, v = made(rng, (6, 2, 33, 40), 70, dtype=dtype)
    scores = np.full((6, 80), 7, q.dtype)
    run_on("cpu", ops.attention_scores, q, k, 61, 0.2, 3, 80, out=scores)
    assert (scores[:, 61:] == 7).all()
    run_on("cpu", ops.attention_softmax, scores, 61, out=scores)
    assert (scores[:, 61:] == 7).all()
    got = run_on("cpu", ops.attention_values, scores, v, 61, 3)
    want = run_on("cpu", ops.attention_decode, q, k, v, 61, 0.2)
    assert_close("y", got, want, 4e-6 if dtype == "float32" else 12 * EPS[dtype])


_UNCOMPILED = """
import sys
import numpy as np
import penstock
from penstock import ops
from tests.ops.cases import CASES
from tests.ops.common import EPS, assert_close

for number, case in enumerate(case for case in CASES if ops.REGISTRY[case.op].family == sys.argv[1]):
    op, dtype = ops.REGISTRY[case.op], ("float32", "bfloat16")[number % 2]
    results = []
    for device in ("reference", "cpu"):
        arguments = case.arguments(dtype)
        with penstock.backend(device), np.errstate(all="ignore"):
            result = op(**arguments)
        outputs = result if isinstance(result, tuple) else () if result is None else (result,)
        results.append((*outputs, *(arguments[name] for name in op.writes)))
    for a, b in zip(*results, strict=True):
        rel = case.rel if b.dtype.itemsize == 4 else case.rel + 2 * EPS[dtype]
        assert_close(f"{case} {dtype}", b, a, 2 * rel, max(1, np.abs(a.astype(np.float64)).max(initial=0)))
"""


def check_uncompiled(family):
    """Without Numba's compiler the kernels of a family give the results of the definitions, each case in one dtype."""
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", _UNCOMPILED, family]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_kernels_run_uncompiled():
    check_uncompiled("attention")


_NARROW = """
import sys
import numpy as np
from penstock.backends.cpu import features
features.usable_features = lambda: frozenset({"avx", "avx2", "fma"})
from penstock import ops
from penstock.backends.cpu import _attend

assert (_attend.TILE, _attend.STRIDE) == (4, 16)
_attend.threads = lambda: 1
given = np.load(sys.argv[1])
np.save(sys.argv[2], ops.attention_prefill(given["q"], given["k"], given["v"], 250, 0.3, 40))
"""


@pytest.mark.slow  # compiles the kernels for another CPU
@pytest.mark.skipif("avx512f" not in usable_features(), reason="the CPU has no wider instructions than the test's")
def test_narrow_vectors_give_the_same_bits(tmp_path, rng):
    q, k, v = made(rng, (20, 1, 16, 33), 300, 50)
    np.savez(tmp_path / "given.npz", q=q, k=k, v=v)
    command = [sys.executable, "-c", _NARROW, str(tmp_path / "given.npz"), str(tmp_path / "y.npy")]
    env = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    want = run_on("cpu", ops.attention_prefill, q, k, v, 250, 0.3, 40)
    assert_same_bits("y", np.load(tmp_path / "y.npy"), want)
