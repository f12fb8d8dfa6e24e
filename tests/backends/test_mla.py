"""The CPU kernels of MLA beyond the cases of tests/ops: weights of every form, rows, threads, long caches, tiles."""

import numpy as np
import pytest

from penstock import ops
from penstock.quant import BITS, GROUP_SIZES
from tests.backends.test_attention import both, check_uncompiled, same_pages, with_threads
from tests.ops.common import DTYPES, assert_close, assert_same_bits, normal, quantized, run_on


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_products_with_every_packing(bits, group_size, rng):
    H, nope, vd, R = 3, 21, 11, 3 * group_size
    packing = {"bits": bits, "group_size": group_size}
    kv_b = quantized(rng, H * (nope + vd), R, dtype="float16", **packing)
    both(ops.mla_q_prime, normal(rng, 2, H, nope), kv_b)
    both(ops.mla_out_per_head, normal(rng, 2, H, R), kv_b, nope)
    both(ops.mla_q_prime, normal(rng, 2, H, R), quantized(rng, H, 13, R, dtype="float32", **packing))
    latent = normal(rng, 5, R)
    got, want = (run_on(d, ops.mla_expand, latent, kv_b, None, H, nope) for d in ("cpu", "reference"))
    for a, b in zip(got, want, strict=True):
        assert_close("keys and values", a, b, 4e-6, np.abs(b).max())


@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_with_dense_weights(dtype, w_dtype, rng):
    H, nope, vd, R = 3, 21, 11, 37
    kv_b = normal(rng, H * (nope + vd), R, dtype=w_dtype, scale=0.2)
    both(ops.mla_q_prime, normal(rng, 9, H, nope, dtype=dtype), kv_b)
    both(ops.mla_out_per_head, normal(rng, 9, H, R, dtype=dtype), kv_b, None, vd)
    both(ops.mla_q_prime, normal(rng, H, nope, dtype=dtype), normal(rng, H, R, nope, dtype=w_dtype, scale=0.2))


def products(rng, T, dtype="float32"):
    """Calls with T rows, each of which has its own number."""
    H, nope, vd, R = 5, 32, 20, 96
    rows = [normal(rng, 150, *shape, dtype=dtype) for shape in ((H, nope), (H, R), (R,))]
    kv_b, embed_q, unembed = quantized(rng, H * (nope + vd), R), quantized(rng, H, R, nope), quantized(rng, H, vd, R)
    dense = normal(rng, H * (nope + vd), R, dtype="bfloat16")
    return lambda a, b: [
        run_on("cpu", ops.mla_q_prime, rows[0][a:b].copy(), kv_b),
        run_on("cpu", ops.mla_q_prime, rows[0][a:b].copy(), embed_q),
        run_on("cpu", ops.mla_q_prime, rows[0][a:b].copy(), dense),
        run_on("cpu", ops.mla_out_per_head, rows[1][a:b].copy(), kv_b, nope),
        run_on("cpu", ops.mla_out_per_head, rows[1][a:b].copy(), unembed),
        *run_on("cpu", ops.mla_expand, rows[2][a:b].copy(), kv_b, None, H, nope),
        *run_on("cpu", ops.mla_expand, rows[2][a:b].copy(), embed_q, unembed),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_products_do_not_depend_on_their_number(dtype, rng):
    call = products(rng, 150, dtype)
    whole, alone = call(0, 150), [call(t, t + 1) for t in range(40)]
    for number, array in enumerate(whole):
        want = np.concatenate([each[number] for each in alone])
        assert_same_bits(f"product {number}", array[:40], want)
    for T in range(2, 33):
        for number, array in enumerate(call(3, 3 + T)):
            assert_same_bits(f"product {number} of {T} rows", array, whole[number][3 : 3 + T])


def test_threads_give_the_same_bits_of_products(rng):
    call = products(rng, 150)
    for a, b in zip(with_threads(2, lambda: call(0, 150)), with_threads(1, lambda: call(0, 150)), strict=True):
        assert_same_bits("product", a, b)


def latents(rng, n, H, R, rope, *lead, dtype="float32"):
    q = [normal(rng, *lead, H, width, dtype=dtype) for width in (R, rope)]
    return (*q, normal(rng, n, R, dtype=dtype), normal(rng, n, rope, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H", [1, 8, 16, 20, 130])
def test_sdpa_rows_equal_single_tokens_in_every_layout(H, dtype, rng):
    T, n = 70, 330
    q, pe, latent, rope_k = latents(rng, n, H, 40, 12, T, dtype=dtype)
    whole = both(ops.mla_sdpa, q, pe, latent, rope_k, n, 0.2)
    for t in (0, 1, 33, 69):
        alone = run_on("cpu", ops.mla_sdpa, q[t], pe[t], latent, rope_k, n - T + t + 1, 0.2)
        assert_same_bits(f"row {t}", alone, whole[t])
    latent_pages, rope_pages, table = same_pages(latent, rope_k, 7, rng)
    got = run_on("cpu", ops.mla_sdpa, q, pe, latent_pages, rope_pages, n, 0.2, None, table)
    assert_same_bits("pages", got, whole)
    lengths, slots = np.array([0, 330, 261], np.int32), np.array([1, 0, 1], np.int32)
    few = q[:3].copy(), pe[:3].copy()
    each = [run_on("cpu", ops.mla_sdpa, q[b], pe[b], latent, rope_k, int(m), 0.2) for b, m in enumerate(lengths)]
    tables = np.stack([table] * 3)
    got = run_on("cpu", ops.mla_sdpa, *few, latent_pages, rope_pages, lengths, 0.2, None, tables)
    assert_same_bits("pages of three", got, np.stack(each))
    got = run_on("cpu", ops.mla_sdpa, *few, np.stack([latent] * 2), np.stack([rope_k] * 2), lengths, 0.2, slots)
    assert_same_bits("slots", got, np.stack(each))


def test_sdpa_and_tiles_of_long_caches(rng):
    q, pe, latent, rope_k = latents(rng, 10_000, 5, 24, 8)
    for n in (1, 127, 128, 129, 4095, 4096, 4097, 8192, 10_000):
        whole = both(ops.mla_sdpa, q, pe, latent, rope_k, n, 0.5)
        state = [np.full(shape, np.nan, np.float32) for shape in ((5,), (5,), (5, 24))]
        for start in range(0, n, 3000):
            tile = (start, min(n, start + 3000), 0.5, start == 0)
            run_on("cpu", ops.mla_sdpa_tile_accumulate, *state, q, pe, latent, rope_k, *tile)
        got = run_on("cpu", ops.mla_sdpa_finalize, *state[1:])
        assert_close("tiles", got, whole, 4e-6, np.abs(whole).max())
        call = lambda n=n: run_on("cpu", ops.mla_sdpa, q, pe, latent, rope_k, n, 0.5)  # noqa: E731
        assert_same_bits("one thread", with_threads(1, call), whole)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_state_of_a_tile_follows_the_definition(value, rng):
    q, pe, latent, rope_k = latents(rng, 50, 3, 9, 4)
    rope_k[20, 1] = value
    pe[:, 1] = np.abs(pe[:, 1]) + 1
    states = []
    for device in ("cpu", "reference"):
        state = [np.full(shape, np.nan, np.float32) for shape in ((3,), (3,), (3, 9))]
        for tile in ((0, 10, 0.3, True), (10, 10, 0.3, False), (10, 33, 0.3, False), (33, 50, 0.3, False)):
            run_on(device, ops.mla_sdpa_tile_accumulate, *state, q, pe, latent, rope_k, *tile)
        states.append(state)
    for name, a, b in zip(("maximum", "denominator", "accumulator"), *states, strict=True):
        with np.errstate(invalid="ignore"):
            assert_close(name, a, b, 8e-6)


def test_first_empty_tile_clears_the_state(rng):
    q, pe, latent, rope_k = latents(rng, 5, 3, 9, 4)
    state = [np.full(shape, 7, np.float32) for shape in ((3,), (3,), (3, 9))]
    run_on("cpu", ops.mla_sdpa_tile_accumulate, *state, q, pe, latent, rope_k, 2, 2, 0.3, True)
    assert np.isneginf(state[0]).all() and not state[1].any() and not state[2].any()
    y = run_on("cpu", ops.mla_sdpa_finalize, *state[1:], out=state[2])
    assert y is state[2] and not y.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_finalize_of_every_denominator(dtype, rng):
    z = np.array([1, 0, -1, np.nan, np.inf, 1e-45], np.float32)
    v = normal(rng, 6, 33)
    v[0, 2], v[1, 3] = np.nan, np.inf
    got, want = (run_on(device, ops.mla_sdpa_finalize, z, v, dtype) for device in ("cpu", "reference"))
    with np.errstate(invalid="ignore"):
        assert_close("y", got, want, {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype])


def test_kernels_run_uncompiled():
    check_uncompiled("mla")
